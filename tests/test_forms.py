"""The record OneText carries no idea, but another form: it trains as the records before it, to rounding, in float64."""

import dataclasses
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from public_records import load
from shards import write_shard
from test_records import NAMES
from world_worker import ROOT, Run

FORM, BEFORE = "2026-11-23_OneText", dict(nano="2026-11-23_HeadStart", gpt2="2026-01-30_VeFused")
OLDER = dict(batch_factors="stage_growth", mask_block="block_size")  # fields that had another name
STEPS = 20
# The extension begins at step 15. There VeFused's tables part where the form's do; for 8 or 1,535 steps they would not
SMALL = dict(num_iterations=STEPS, mask_block=8, train_seq_len=64, batch_tokens=6 * 64, val_seq_len=128, val_tokens=512)
SMALL |= dict(vocab_size=257, eot_token=256, lm_head_slice=50)
SMALL |= dict(device="cpu", dtype="float64", compile=False, cpu_threads=1, seed=1)
# As in gpt2, attention is as wide as the model: VeFused lays tall matrices on their side, and NorMuon's means with them
WIDTHS = dict(nano=dict(model_dim=32, num_heads=2, head_dim=16), gpt2=dict(model_dim=48, num_heads=6, head_dim=8))
NANO = WIDTHS["nano"] | dict(window_tokens=(24,), bigram_rows=101, cooldown_frac=0.83)
GPT2 = WIDTHS["gpt2"] | dict(window_tokens=(24, 56, 88, 104), batch_factors=(1, 2, 3, 3), final_window_tokens=160)
GPT2 |= dict(cooldown_frac=0.6)  # of 15 steps they are whole: the form rounds them up
GPT2 |= dict(bigram_rows=330, max_doc_len=40, extension_steps=5, momentum_warmup_steps=4, momentum_cooldown_steps=3)


def script(name: str) -> types.ModuleType:
    """Import a record's script. The form is the root until it is a record."""
    return load(name) if (ROOT / "records" / name).exists() else train_gpt


def config(m: types.ModuleType, preset: str, folder: str):
    """Return a preset in small, with the shards in `folder`."""
    fields = SMALL | dict(nano=NANO, gpt2=GPT2)[preset]
    fields |= dict(train_files=f"{folder}/train.bin", val_files=f"{folder}/val.bin")
    if isinstance(m.PRESETS[preset].max_doc_len, tuple):
        fields |= dict(max_doc_len=(fields.get("max_doc_len", 0),) * len(fields["window_tokens"]))
    if hasattr(m.PRESETS[preset], "dc_keys"):
        fields |= dict(dc_keys=8)
    fields = {name if hasattr(m.PRESETS[preset], name) else OLDER[name]: value for name, value in fields.items()}
    return m.resolve(dataclasses.replace(m.PRESETS[preset], **fields))


def in_older_order(preset: str, name: str, values: Tensor) -> Tensor:
    """Return a parameter of the form as the records before have it.

    The first matrix of an MLP is transposed. VeFused rotates dimensions d and d + D / 2 of queries and keys, where the
    form rotates d and d + D / 4.
    """
    if name.endswith("c_fc"):
        return values.mT
    if name.endswith("qkv_w") and preset == "gpt2":
        quarters = values.unflatten(1, (WIDTHS[preset]["num_heads"], 4, -1))
        return torch.cat([quarters[:2, :, [0, 2, 1, 3]], quarters[2:]]).view_as(values)
    return values


def train(ranks: tuple, name: str, preset: str, folder: str) -> None:
    """Train from the parameters in `folder` as one of the processes. Rank 0 saves losses and parameters there."""
    m = script(name)
    cfg, ranks, reorder = config(m, preset, folder), m.Ranks(*ranks), name != FORM
    if ranks.world_size > 1:
        m.init_distributed()
    trainer, plans, losses = m.Trainer(cfg, ranks), m.plan_data(cfg), []
    trainer.warm_up()
    params = dict(trainer.gpt.named_parameters())
    for key, values in torch.load(f"{folder}/{preset}.pt").items():
        params[key].detach().copy_(in_older_order(preset, key, values) if reorder else values)
    own = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    for step, batch in enumerate(m.read_batches(plans["train"], own, cfg, trainer.device)):
        losses.append(trainer.train_step(step, batch).item())
    losses.append(trainer.evaluate(STEPS, plans["val"]))
    if ranks.rank == 0:
        values = {key: p.detach() if reorder else in_older_order(preset, key, p.detach()) for key, p in params.items()}
        torch.save(dict(losses=losses, params=values), f"{folder}/{preset} {name} {ranks.world_size}.pt")
    if ranks.world_size > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("preset", BEFORE)
def test_the_form_trains_as_the_record_before(preset: str, tmp_path: Path):
    """With 1, 2 and 3 processes it equals that record with one, over all of a run, losses and parameters."""
    rng, form = np.random.default_rng(0), script(FORM)
    for name, count in dict(train=60_000, val=9_000).items():
        write_shard(tmp_path / f"{name}.bin", np.where(rng.random(count) < 0.02, 256, rng.integers(256, size=count)))
    gpt = form.GPT(config(form, preset, tmp_path))
    values = {
        key: torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim < 2) for key, p in gpt.named_parameters()
    }
    if gpt.cfg.tied_frac:
        values["embed.weight"] = values["lm_head"]
    torch.save({key: p.detach() for key, p in values.items()}, tmp_path / f"{preset}.pt")
    runs = {size: Run([[FORM, preset, tmp_path]] * size, tmp_path / f"{size}", target=train) for size in (2, 3)}
    for name in BEFORE[preset], FORM:
        train(form.Ranks(), name, preset, tmp_path)
    for size, run in runs.items():
        assert run.wait(timeout=300) == [0] * size, run.text("err")
    files = [f"{preset} {BEFORE[preset]} 1.pt", *(f"{preset} {FORM} {size}.pt" for size in (1, 2, 3))]
    expected, *results = (torch.load(tmp_path / file) for file in files)
    assert len(expected["losses"]) == STEPS + 1
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-12)
        assert result["params"].keys() == expected["params"].keys()
        for key, want in expected["params"].items():
            assert (result["params"][key] - want).norm() <= 1e-12 * want.norm(), key
            assert (want - in_older_order(preset, key, values[key])).norm() > 1e-4 * want.norm(), f"{key}: untrained"


def test_tables_part_where_the_public_ones_do():
    """Their last tied step is odd, for any number of scheduled steps."""
    for steps in range(1, 2001):
        cfg = types.SimpleNamespace(tied_frac=train_gpt.PRESETS["gpt2"].tied_frac, scheduled_steps=steps)
        last = round(2 * steps / 3) | 1
        assert [train_gpt.is_tied(step, cfg) for step in (0, last, last + 1)] == [True, True, False]


LATE, SIGNS, GATES = "LateAttention", "BigramsSignTrick", "GateNets"
PREFIXES, ROLES, LAYER, ROWS = "FP8DownProjection", "HeadRoles", "OneLayer", "FP8Rows"
# Settings that turn an idea off in gpt2, and those of both records where it has no switch
WITHOUT = {LATE: dict(source_layout="", two_lambdas=False, heads_per_matrix=6, max_doc_len=(40,) * 4)}
WITHOUT[LATE] |= dict(resid_adam=[0.04, 0.0, 0.65, 0.95])
WITHOUT |= {SIGNS: dict(mudd_layers="", xsa_layout="", sign_rows=0, bigram_dim=0)}
WITHOUT |= {GATES: dict(gate_layer=0, gate_layout="", dc_layout=""), PREFIXES: dict(prefix_file="")}
WITHOUT |= {ROLES: {}, LAYER: {}, ROWS: {}}
BOTH = {LATE: dict(value_gate_inputs=0, scalar_adam=[0.04, 0.0, 0.65, 0.95], x0_adam=[0.04, 0.0, 0.65, 0.95])}
BOTH |= {SIGNS: dict(backout_layer=-1, mtp_weights=(1.0,), bigram_rows=0), PREFIXES: {}}
BOTH |= {ROLES: dict(prefix_file=""), LAYER: dict(prefix_file="", lr_factors=(0.03,) * 4), ROWS: dict(prefix_file="")}
BOTH |= {GATES: dict(head_gate_inputs=0, skip_gate_inputs=0, xsa_layout="", bigram_rows=0)}
LINE = [name for name in NAMES if name[11:] in (FORM[11:], *WITHOUT)]


def without_ideas(m: types.ModuleType, before, idea: str):
    """Return the newer script's presets with what the older one has, and its own ideas off."""
    fields = dataclasses.asdict(before) | WITHOUT[idea] | dict(run_id="small")
    presets = dataclasses.asdict(m.PRESETS[before.preset])
    return m.resolve(m.Hyperparameters(**{name: fields.get(name, value) for name, value in presets.items()}))


def losses(m: types.ModuleType, cfg, values: dict[str, Tensor]) -> list[float]:
    """Train from given values, and return the losses of all steps and of the last validation."""
    trainer, plans, found = m.Trainer(cfg, m.Ranks()), m.plan_data(cfg), []
    for name, p in trainer.gpt.named_parameters():
        p.detach().copy_(values[name].view_as(p))
    for step, batch in enumerate(m.read_batches(plans["train"], range(cfg.batch_sequences), cfg, trainer.device)):
        found.append(trainer.train_step(step, batch).item())
    return [*found, trainer.evaluate(STEPS, plans["val"])]


@pytest.mark.slow
@pytest.mark.parametrize("preset", BEFORE)
@pytest.mark.parametrize(("older", "newer"), [*pairwise(LINE)])
def test_without_its_ideas_a_record_is_the_one_before(older: str, newer: str, preset: str, tmp_path: Path):
    """Most are ideas of gpt2, or change no mathematics: nano has none of them. OneLayer is an idea of nano."""
    if (newer[11:], preset) == (LAYER, "nano"):
        pytest.skip("its two factors have no switch")
    rng, idea = np.random.default_rng(0), newer[11:]
    for name, count in dict(train=60_000, val=9_000).items():
        write_shard(tmp_path / f"{name}.bin", np.where(rng.random(count) < 0.02, 256, rng.integers(256, size=count)))
    before, after = load(older), load(newer)
    cfg = dataclasses.replace(config(before, preset, tmp_path), **(BOTH[idea] if preset == "gpt2" else {}))
    torch.manual_seed(0)
    values = {
        name: torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1) for name, p in before.GPT(cfg).named_parameters()
    }
    values = {name: value + (value.ndim < 2) for name, value in values.items()}
    values["embed.weight"] = values["lm_head"] if cfg.tied_frac else values["embed.weight"]
    renamed = dict(values)
    for name, value in values.items():  # as from LateAttention on
        if name.endswith("qkv_w"):
            renamed[name.replace("qkv_w", "qk_w")], renamed[name.replace("qkv_w", "v_w")] = value.split([2, 1])
        renamed[name.replace("resid_lambda", "resid_lambdas")] = value
    same = config(after, preset, tmp_path) if preset == "nano" else without_ideas(after, cfg, idea)
    expected, found = losses(before, cfg, values), losses(after, same, renamed)
    compared = 8 if idea == LAYER else None  # it adds in another order, and rounding grows up to a hundredfold a step
    np.testing.assert_allclose(found[:compared], expected[:compared], rtol=1e-12)
    assert expected[0] > expected[-1] + 0.1
