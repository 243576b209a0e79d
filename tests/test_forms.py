"""The record OneText carries no idea, but another form: it trains as the records before it, to rounding, in float64."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from public_records import load
from shards import write_shard
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
