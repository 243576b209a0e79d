"""A record trains as the one before, to rounding in float64, where its ideas are switched off or not of the preset."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from public_records import load
from shards import write_shard

pytestmark = pytest.mark.slow  # these scripts are frozen
FUSED, START, SIGNS = "2026-01-30_VeFused", "2026-11-23_HeadStart", "2026-05-20_BigramsSignTrick"
PREFIXES, ROLES = "2026-07-17_FP8DownProjection", "2026-11-24_HeadRoles"
LAYER = "2026-11-25_OneLayer"
STEPS = 20
# The extension begins at step 15. There VeFused's tables part where HeadStart's do; for 8 or 1,535 steps they would not
SMALL = dict(num_iterations=STEPS, mask_block=8, train_seq_len=64, batch_tokens=6 * 64, val_seq_len=128, val_tokens=512)
SMALL |= dict(vocab_size=257, eot_token=256, lm_head_slice=50)
SMALL |= dict(device="cpu", dtype="float64", compile=False, cpu_threads=1, seed=1, run_id="small")
NANO = dict(model_dim=32, num_heads=2, head_dim=16, window_tokens=(24,), bigram_rows=101, cooldown_frac=0.83)
# As in gpt2, attention is as wide as the model: older scripts lay tall matrices on their side
GPT2 = dict(model_dim=48, num_heads=6, head_dim=8, window_tokens=(24, 56, 88, 104), batch_factors=(1, 2, 3, 3))
GPT2 |= dict(final_window_tokens=160, cooldown_frac=0.6)  # of 15 steps they are whole: newer scripts round them up
GPT2 |= dict(bigram_rows=330, max_doc_len=40, extension_steps=5, momentum_warmup_steps=4, momentum_cooldown_steps=3)
OLDER = dict(batch_factors="stage_growth", mask_block="block_size")  # fields that had another name

# Settings of gpt2 that turn a record's ideas off, and those of both where an idea has no switch
WITHOUT = {PREFIXES: dict(gate_layer=0, gate_layout="", dc_layout="", prefix_file="")}
BOTH = {PREFIXES: dict(head_gate_inputs=0, skip_gate_inputs=0, xsa_layout="", bigram_rows=0)}
BOTH |= {ROLES: dict(prefix_file=""), LAYER: dict(prefix_file="", lr_factors=(0.03,) * 4)}
# Presets whose training a record leaves alone, once its ideas are off. OneLayer is an idea of nano
CASES = [(FUSED, START, "gpt2"), (START, SIGNS, "nano"), (SIGNS, PREFIXES, "nano"), (SIGNS, PREFIXES, "gpt2")]
CASES += [(PREFIXES, ROLES, "nano"), (PREFIXES, ROLES, "gpt2"), (ROLES, LAYER, "gpt2")]


def small(m: types.ModuleType, preset: str, folder: Path):
    """Return a preset in small, with the shards in `folder`."""
    fields = SMALL | dict(nano=NANO, gpt2=GPT2)[preset]
    fields |= dict(train_files=f"{folder}/train.bin", val_files=f"{folder}/val.bin")
    if isinstance(m.PRESETS[preset].max_doc_len, tuple):
        fields |= dict(max_doc_len=(fields.get("max_doc_len", 0),) * len(fields["window_tokens"]))
    if hasattr(m.PRESETS[preset], "dc_keys"):
        fields |= dict(dc_keys=8)
    fields = {name if hasattr(m.PRESETS[preset], name) else OLDER[name]: value for name, value in fields.items()}
    return m.resolve(dataclasses.replace(m.PRESETS[preset], **fields))


def without_ideas(m: types.ModuleType, before, newer: str):
    """Return the newer script's gpt2 with what the older one has, and its own ideas off."""
    fields = dataclasses.asdict(before) | WITHOUT.get(newer, {})
    preset = dataclasses.asdict(m.PRESETS["gpt2"])
    return m.resolve(m.Hyperparameters(**{name: fields.get(name, value) for name, value in preset.items()}))


def newer_forms(older: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a script's parameters as the one after it has them, which differ twice.

    Of queries and keys VeFused rotates dimensions d and d + D / 2, HeadStart d and d + D / 4. Scripts after HeadStart
    keep queries and keys apart from values, and the first matrix of an MLP transposed.
    """
    found = dict(values)
    for name, value in values.items():
        if older == FUSED and name.endswith("qkv_w"):
            quarters = value.unflatten(1, (GPT2["num_heads"], 4, -1))
            found[name] = torch.cat([quarters[:2, :, [0, 2, 1, 3]], quarters[2:]]).view_as(value)
        elif older == START and name.endswith("qkv_w"):
            found[name.replace("qkv_w", "qk_w")], found[name.replace("qkv_w", "v_w")] = value.split([2, 1])
        elif older == START and name.endswith("c_fc"):
            found[name] = value.mT
        elif older == START:
            found[name.replace("resid_lambda", "resid_lambdas")] = value
    return found


def losses(m: types.ModuleType, cfg, values: dict[str, Tensor]) -> list[float]:
    """Train from given values, and return the losses of all steps and of the last validation."""
    trainer, plans, found = m.Trainer(cfg, m.Ranks()), m.plan_data(cfg), []
    for name, p in trainer.gpt.named_parameters():
        p.detach().copy_(values[name].view_as(p))
    for step, batch in enumerate(m.read_batches(plans["train"], range(cfg.batch_sequences), cfg, trainer.device)):
        found.append(trainer.train_step(step, batch).item())
    return [*found, trainer.evaluate(STEPS, plans["val"])]


@pytest.mark.parametrize(("older", "newer", "preset"), CASES)
def test_without_its_ideas_a_record_is_the_one_before(older: str, newer: str, preset: str, tmp_path: Path):
    rng, before, after = np.random.default_rng(0), load(older), load(newer)
    for name, count in dict(train=60_000, val=9_000).items():
        write_shard(tmp_path / f"{name}.bin", np.where(rng.random(count) < 0.02, 256, rng.integers(256, size=count)))
    cfg, same = small(before, preset, tmp_path), small(after, preset, tmp_path)
    if preset == "gpt2" and older != FUSED:
        cfg = dataclasses.replace(cfg, **BOTH[newer])
        same = without_ideas(after, cfg, newer)
    torch.manual_seed(0)
    values = {
        name: torch.randn_like(p) * (0.3 if p.ndim > 1 else 0.1) + (p.ndim < 2)
        for name, p in before.GPT(cfg).named_parameters()
    }
    if cfg.tied_frac:
        values["embed.weight"] = values["lm_head"]
    expected = losses(before, cfg, values)
    found = losses(after, same, newer_forms(older, values))
    compared = 8 if newer == LAYER else None  # it adds in another order, and rounding grows up to a hundredfold a step
    np.testing.assert_allclose(found[:compared], expected[:compared], rtol=1e-12)
    assert expected[0] > expected[-1] + 0.1
