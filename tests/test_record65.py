"""VeFused is equal in mathematics to public record 65: every number that we have of it, to 1e-8 or better."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from public_records import PublicRecord
from test_record55 import place

pytestmark = pytest.mark.slow
SMALL = dict(vocab_size=120, eot_token=119, num_heads=6, head_dim=16, model_dim=96, bigram_rows=640, block_size=16)
SMALL |= dict(batch_tokens=768, train_seq_len=768, val_seq_len=768, val_tokens=768, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=13, extension_steps=4, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=96, batch_tokens=8 * 96, val_seq_len=288)
RUN |= dict(val_tokens=2 * 8 * 288, cooldown_frac=5 / 9, momentum_warmup_steps=4, momentum_cooldown_steps=3)
RUN |= dict(batches="run/{}/inputs", loss="loss_per_token")
STEPS = SMALL | dict(vocab_size=32, eot_token=31, num_heads=2, head_dim=8, model_dim=16, bigram_rows=160)
STATES = dict(s1=200, val_s1=250, s2=705, val_s2=750, s3_tied=1010, s3=1200, val_s3=1250, ext=1520, val_final=1555)
# Which of our parameters stand for the public ones in the optimizers' steps: names, or patterns
kinds = ("attn.qkv_w", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "x0_lambdas")
MEMBERS = {kind: rf"blocks\.0\.{kind.removesuffix('.weight').removesuffix('s')}" for kind in kinds}
MEMBERS |= {f"{kind}.weight": rf"{kind}(\.weight)?" for kind in ("embed", "bigram_embed", "lm_head")}
MEMBERS |= {"smear_gate.weight": "smear_gate", "skip_gate.weight": "skip_gate", "value_embeds": "value_embeds.*"}
MEMBERS |= dict(attn_gates=r".*\.gate", value_gates=r".*\.value_gate")
MEMBERS["scalars"] = r"blocks\.0\.(attn\.lambdas|(resid|bigram)_lambda)|(smear|backout)_lambda|skip_weights"


def reorder(name: str, values: np.ndarray, public: bool) -> np.ndarray:
    """Reorder queries and keys: dimensions that rotate together are neighbours in public, half a head apart here."""
    if not name.endswith("qkv_w"):
        return values
    order = np.array([0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15])  # from 8 on they do not rotate
    values = values.reshape(3, 6, 16, 96).copy()
    values[:2] = values[:2][:, :, np.argsort(order) if public else order]
    return values


SHARDS = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
SHARDS |= dict(pack_0="pack/shard0", pack_1="pack/shard1")
RECORD = PublicRecord("2026-01-30_VeFused", place, SHARDS, reorder)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers


def test_schedules(tmp_path: Path):
    """Compare the record's schedules, and those of its logs, with 20 steps more."""
    full = dict(device="cpu", seed=0)
    logged = full | dict(num_iterations=1575, cooldown_frac=845 / 1535)
    RECORD.compare_schedules(tmp_path, schedule=full, schedule_logged=logged)


@pytest.mark.parametrize("first", [0, 1008])
def test_optimizers(first: int, tmp_path: Path):
    """Take six steps from the first one on, and six across the untying."""
    cfg = RECORD.config(tmp_path, **STEPS)
    cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
    RECORD.compare_steps(SCRIPT.Trainer(cfg, SCRIPT.Ranks()), first, MEMBERS)


def test_states(tmp_path: Path):
    RECORD.compare_states(RECORD.trainer(tmp_path, **SMALL), STATES, last_tied=1011)


def test_packing(tmp_path: Path):
    cfg = RECORD.config(tmp_path, **SMALL | dict(vocab_size=200, eot_token=199, bigram_rows=1280))
    RECORD.compare_packing(tmp_path, cfg, dict(bigram_rows=251520), [256, 512, 768], cuts=64)


@pytest.mark.parametrize("size", [8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


def test_first_values(tmp_path: Path):
    first = dict(attn=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1, bigram_lambda=0.1, backout_lambda=0.5)
    std = dict(embed=0.005, lm_head=0.005) | dict.fromkeys(["qkv_w", "attn.c_proj", "c_fc"], 0.5 * 96**-0.5)
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), first, std)
