"""Records that train as the one before: forms always, and ideas of nano where they are switched off or not of gpt2.

The record ThreeTables carries no idea for a CPU, but another form: it trains as OneLayer, in three precisions.
OneLayer keeps nets and gates in fp32, where the form keeps them in the precision of the activations: here both have
what OneLayer has. Neither has FP8 on a CPU. Nets sum up their factors in another order, so in float64 and float32 gpt2
agrees to rounding, which the test keeps from growing by small learning rates (values at first that differ by 1e-7 move
a loss in float32 by up to 5e-4, as some of these random tokens are ill-conditioned). In bf16 it hides: losses are equal
in every bit, and of parameters at most a few last bits of fp32 differ (a net's by 1e-8, seen once).
"""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from public_records import load
from shards import write_shard
from world_worker import Run

pytestmark = pytest.mark.slow  # these scripts are frozen
FORM, BEFORE = "2026-11-25_ThreeTables", "2026-11-25_OneLayer"
PREFIXES, ROLES = "2026-07-17_FP8DownProjection", "2026-11-24_HeadRoles"
STEPS = 20
SMALL = dict(num_iterations=STEPS, train_seq_len=64, batch_tokens=6 * 64, val_seq_len=128, val_tokens=512, seed=1)
SMALL |= dict(vocab_size=257, eot_token=256, lm_head_slice=50, dc_keys=8, device="cpu", compile=False, cpu_threads=1)
NANO = dict(model_dim=32, num_heads=2, head_dim=16, bigram_rows=101)
GPT2 = dict(model_dim=48, num_heads=6, head_dim=8, bigram_rows=330, sign_rows=64, extension_steps=5)
GPT2 |= dict(momentum_warmup_steps=4, momentum_cooldown_steps=3)
PRESETS = dict(nano=NANO, gpt2=GPT2)
WINDOWS, CUTS = (24, 56, 88, 104), (28, 40, 40, 40)
MUDD_ROWS = [*range(8), 8, 12, 9, 13, 10, 11]  # of OneLayer's net, in the order of the form's
# Settings of gpt2 that turn a record's ideas off, and those of both where an idea has no switch. OneLayer is an idea of
# nano, whose gpt2 adds in another order: rounding grows up to a hundredfold a step
WITHOUT = dict(gate_layer=0, gate_layout="", dc_layout="", prefix_file="", lr_factors=(0.03,) * 4)


def config(m: types.ModuleType, preset: str, dtype: str, folder: Path, rate: float = 1.0, **changes):
    """Return a preset in small, with the shards in `folder`, and learning rates multiplied by `rate`."""
    plain = m.PRESETS[preset]
    fields = SMALL | PRESETS[preset] | dict(dtype=dtype, min_lr_frac=rate * plain.min_lr_frac)
    fields |= dict(train_files=f"{folder}/train.bin", val_files=f"{folder}/val.bin")
    fields |= dict(prefix_file=f"{folder}/prefixes") if preset == "gpt2" else {}
    if hasattr(plain, "stages"):
        rows = zip(plain.stages, WINDOWS, CUTS, strict=False)
        stages = [row._replace(lr=rate * row.lr, window=window) for row, window, _ in rows]
        if preset == "gpt2":
            stages = [stage._replace(max_doc_len=cut) for stage, cut in zip(stages, CUTS, strict=True)]
        fields |= dict(block_size=8, stages=tuple(stages), final_window=160 * (preset == "gpt2"))
    else:
        fields |= dict(mask_block=8, lr_factors=tuple(rate * factor for factor in plain.lr_factors))
        fields |= dict(window_tokens=WINDOWS[: len(plain.window_tokens)])
        fields |= dict(max_doc_len=CUTS, final_window_tokens=160) if preset == "gpt2" else {}
    return m.resolve(dataclasses.replace(plain, **fields | changes))


def write_text(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in dict(train=60_000, val=9_000).items():
        write_shard(folder / f"{name}.bin", np.where(rng.random(count) < 0.02, 256, rng.integers(256, size=count)))
    np.where(np.arange(257) % 3, 65535, np.arange(257) // 2).astype("<u2").tofile(folder / "prefixes")


def run(m: types.ModuleType, trainer, change: Callable[[nn.Module], None]) -> list[float]:
    """Train after `change` has set the parameters. Return the losses of all steps and of the last validation."""
    ranks, cfg, losses = trainer.ranks, trainer.cfg, []
    plans = m.plan_data(cfg)
    if ranks.world_size > 1:
        trainer.warm_up()  # after which all ranks have the same
    change(trainer.gpt)
    own = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    for step, batch in enumerate(m.read_batches(plans["train"], own, cfg, trainer.device)):
        losses.append(trainer.train_step(step, batch).item())
    return [*losses, trainer.evaluate(STEPS, plans["val"])]


@torch.no_grad()
def randomize(gpt: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for p in gpt.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim < 2))
    if gpt.cfg.tied_frac:
        gpt.embed.weight.copy_(gpt.lm_head)


CASES = [(PREFIXES, ROLES, "nano"), (PREFIXES, ROLES, "gpt2"), (ROLES, BEFORE, "gpt2")]


@pytest.mark.parametrize(("older", "newer", "preset"), CASES)
def test_without_its_ideas_a_record_is_the_one_before(older: str, newer: str, preset: str, tmp_path: Path):
    write_text(tmp_path)
    losses = []
    for m in load(older), load(newer):
        cfg = config(m, preset, "float64", tmp_path, **WITHOUT if preset == "gpt2" else {})
        losses.append(run(m, m.Trainer(cfg, m.Ranks()), randomize))
    compared = 8 if newer == BEFORE else None
    np.testing.assert_allclose(losses[1][:compared], losses[0][:compared], rtol=1e-12)
    assert losses[0][0] > losses[0][-1] + 0.1


def trainer_of(m: types.ModuleType, preset: str, dtype: str, folder: Path, ranks):
    """Build a trainer whose nets and gates are stored in fp32 at least, with small learning rates where they help."""
    plain, rate = m.GPT, 1.0 if dtype == "bfloat16" or preset == "nano" else 1e-3

    def build(cfg) -> nn.Module:
        gpt = plain(cfg)
        for name, p in gpt.named_parameters():
            if "_net" in name or name.endswith("_gate"):
                p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        return gpt

    with mock.patch.object(m, "GPT", build):
        return m.Trainer(config(m, preset, dtype, folder, rate), ranks)


def net_rows(old: nn.Module, new: nn.Module) -> list[int]:
    """Return where the factors of the form's net are in OneLayer's, which go by kind and then by layer."""
    begins = dict(zip(old.keys, np.cumsum([0, *old.sizes]).tolist(), strict=False))
    renamed = dict(head_gate="gate", embed="embeds")
    rows = []
    for (layer, kind), size in new.sizes.items():
        begin = begins[renamed.get(kind, kind), layer]
        rows += range(begin, begin + size)
    assert sorted(rows) == [*range(sum(old.sizes))]
    return rows


def parameter(old: nn.Module, new: nn.Module, name: str) -> Tensor:
    """Return OneLayer's values of a parameter of the form."""
    params = {name: p.detach() for name, p in old.named_parameters()}
    first, last = name.split(".")[0], name.split(".")[-1]
    if first == "value_embeds":
        return params[f"value_embeds.{[*new.value_embeds].index(name.split('.')[1])}.weight"]
    if last == "skip_lambda":
        return params["skip_weights"][0]
    if "_net" not in name:
        return params[name]
    if first == "gate_nets":
        layer = name.split(".")[1]
        net = "early" if layer == "0" else "mid"
        rows = net_rows(old.nets[net], new.gate_nets[layer])
    else:
        net, rows = ("out", [*range(5)]) if first == "head_net" else ("last", MUDD_ROWS)
    values = params[f"nets.{net}.{last}"]
    return values if last == "w1" else values[rows]


def compare(ranks: tuple, preset: str, dtype: str, folder: str) -> None:
    """Train the form from OneLayer's random parameters, as one of the processes. Rank 0 saves what it found."""
    before, form = load(BEFORE), load(FORM)
    ranks = form.Ranks(*ranks)
    old = trainer_of(before, preset, dtype, Path(folder), before.Ranks()).gpt
    randomize(old)
    if ranks.world_size > 1:
        form.init_distributed()

    @torch.no_grad()
    def take_over(gpt: nn.Module) -> None:
        for name, p in gpt.named_parameters():
            p.copy_(parameter(old, gpt, name))

    trainer = trainer_of(form, preset, dtype, Path(folder), ranks)
    losses = run(form, trainer, take_over)
    if ranks.rank == 0:
        params = {name: p.detach() for name, p in trainer.gpt.named_parameters()}
        torch.save(dict(losses=losses, params=params), f"{folder}/{dtype} {ranks.world_size}.pt")
    if ranks.world_size > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_the_form_trains_as_the_record_before(preset: str, tmp_path: Path):
    write_text(tmp_path)
    before, form = load(BEFORE), load(FORM)
    runs = [Run([[preset, "float64", tmp_path]] * n, tmp_path / f"{n}", target=compare) for n in (2, 3)]
    gpt = form.GPT(config(form, preset, "float64", tmp_path))
    for dtype in ("float64", "float32", "bfloat16"):
        compare(form.Ranks(), preset, dtype, tmp_path)
        trainer = trainer_of(before, preset, dtype, tmp_path, before.Ranks())
        losses = run(before, trainer, randomize)
        assert losses[-1] != losses[0]
        expected = {name: parameter(trainer.gpt, gpt, name) for name, _ in gpt.named_parameters()}
        if dtype == "float64":
            for n, several in zip((2, 3), runs, strict=True):
                assert several.wait(timeout=300) == [0] * n, several.text("err")
        for n in (1, 2, 3) if dtype == "float64" else (1,):
            found = torch.load(tmp_path / f"{dtype} {n}.pt")
            is_exact = n == 1 and preset == "nano"
            of_losses, of_params = dict(float64=(1e-12, 1e-9), float32=(1e-3, 1e-4), bfloat16=(0, 1e-6))[dtype]
            np.testing.assert_allclose(found["losses"], losses, rtol=0 if is_exact else of_losses)
            assert found["params"].keys() == expected.keys()
            for name, want in expected.items():
                off = (found["params"][name] - want).norm() / want.norm()
                assert off <= (0 if is_exact else of_params), (dtype, n, name)
