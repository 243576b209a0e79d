"""VeSkipGates is equal in mathematics to public record 55: every number that we have of it, to 1e-8 or better."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from public_records import PublicRecord

pytestmark = pytest.mark.slow
SMALL = dict(vocab_size=120, eot_token=119, num_heads=3, head_dim=8, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=512, val_tokens=512, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=15, extension_steps=4, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=96, train_seq_len=128, batch_tokens=8 * 128, val_tokens=2 * 8 * 512)
RUN |= dict(momentum_warmup_steps=5, momentum_cooldown_steps=3)
RUN |= dict(batches="run/{}/inputs", loss="train_loss_per_token", one_table_until=9)
STATES = dict(val_s1=250, s1=300, s2=900, val_s2=1000, s3t=1204, s3u=1500, val_s3=1500, ext=1830, val_final=1845)


def place(name: str) -> tuple[str, int]:
    """Return the public name of a parameter, and which layer's it is in an array for all."""
    if found := re.fullmatch(r"blocks\.(\d+)\.(?:(resid|x0|bigram)_lambda|(attn)\.lambdas)", name):
        return f"{found[2] or found[3]}_lambdas", int(found[1])
    name = name.replace("skip_weights", "skip_lambda")
    return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0


SHARDS = dict(train_0="pack/shard0", train_1="pack/shard1", val_0="pack/shard1")
RECORD = PublicRecord("2025-12-29_VeSkipGates", place, SHARDS)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers


def test_schedules(tmp_path: Path):
    full = dict(device="cpu", seed=0)
    RECORD.compare_schedules(tmp_path, sched=full)
    windows = SCRIPT.attention_windows(1845, RECORD.config(tmp_path, **full))
    RECORD.compare("sched", final_val_windows=windows[::-1])


def test_optimizers(tmp_path: Path):
    """Take six steps from step 0 on, and six across the untying; moments are zero before, and Adam counts from 1."""
    for run, first in dict(optA=0, optB=1202).items():
        cfg = RECORD.config(tmp_path, **SMALL)
        cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
        trainer = SCRIPT.Trainer(cfg, SCRIPT.Ranks())
        RECORD.load_parameters(trainer.gpt, is_tied=True)
        for t in range(6):
            for name, p in trainer.gpt.named_parameters():
                grads = NUMBERS.get(f"opt.grad/{place(name)[0]}", np.zeros((6, 128 * 24)))[t].astype(np.float64)
                is_unused = name == "embed.weight" and first + t <= 1205
                grad = torch.zeros_like(p) if is_unused or not grads.any() else RECORD.part(name, grads, p.numel())
                p.grad = torch.as_tensor(grad).view_as(p) + (0 if p.grad is None else p.grad)
            RECORD.step(trainer, t, first + t)
            found = RECORD.public(trainer.gpt, 1.0)
            if first + t < 1205:  # one table, which the public record keeps as its head
                del found["embed.weight"]
            assert RECORD.compare_digests(f"{run}.after/{{}}/{t}", found)


def test_packing(tmp_path: Path):
    """Compare the batches of three steps of each stage, and one from the second shard."""
    cfg, lengths = RECORD.config(tmp_path, **SMALL), [128] * 3 + [256] * 3 + [384] * 8
    plan = SCRIPT.plan_batches(cfg.train_files, lengths, 8, cfg, max_doc_len=64)
    for step, batch in enumerate(SCRIPT.read_batches(plan, range(8), cfg, torch.device("cpu"))):
        family = f"pack.stage{step // 3 + 1}" if step < 12 else "pack.after_switch"
        for name, rows in zip(("inputs", "targets"), zip(*batch, strict=True), strict=True):
            want = NUMBERS[f"{family}/{name}"]
            assert step == 12 or np.array_equal(torch.stack(rows), want[step % 3] if step < 12 else want)
    assert step == 13


def test_states(tmp_path: Path):
    """Compare training and validation losses, and every gradient, from random parameters."""
    trainer = RECORD.trainer(tmp_path, **SMALL)
    for state, loss in RECORD.states(trainer, STATES, last_tied=1205):
        RECORD.compare(state, loss=loss.item())
        loss.backward()
        grads = RECORD.gradients(trainer.gpt, is_one_table=STATES[state] <= 1205)
        for g, want in zip(grads.values(), np.nan_to_num(NUMBERS[f"{state}/grad_summary"]), strict=True):
            i, g = np.arange(g.size), g.flatten()
            found = [np.linalg.norm(g), g @ np.cos(i), g @ np.sin(2 * i)]
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[0])


@pytest.mark.parametrize("size", [8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


def test_first_values(tmp_path: Path):
    first = dict(attn=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1, backout_lambda=0.5)
    std = dict(embed=0.005, lm_head=0.005, qkv_w=1 / 24**0.5, c_fc=0.5 / 24**0.5)
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), first, std)
