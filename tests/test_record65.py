"""VeFused is equal in mathematics to public record 65: in schedules, first values and a run, to 1e-8."""

from pathlib import Path

import numpy as np
import pytest

import test_record55
from public_records import load

pytestmark = pytest.mark.slow
BEFORE = test_record55.TestRecord


class TestRecord(BEFORE):
    record = "2026-01-30_VeFused"
    script = load(record)
    shards = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
    small = BEFORE.small | dict(num_heads=6, head_dim=16, model_dim=96, bigram_rows=640)
    small |= dict.fromkeys(("batch_tokens", "train_seq_len", "val_seq_len", "val_tokens"), 768)
    run = BEFORE.run | dict(num_iterations=13, max_doc_len=64, train_seq_len=96, batch_tokens=8 * 96, val_seq_len=288)
    batches, loss, one_table_until = "run/{}/inputs", "loss_per_token", -1
    run |= dict(val_tokens=2 * 8 * 288, cooldown_frac=5 / 9, momentum_warmup_steps=4)
    first = BEFORE.first | dict(bigram_lambda=0.1)
    std = dict(embed=0.005, lm_head=0.005) | dict.fromkeys(["qkv_w", "attn.c_proj", "c_fc"], 0.5 * 96**-0.5)

    def reorder(self, name: str, values: np.ndarray, public: bool) -> np.ndarray:
        """Reorder queries and keys: what rotates together are neighbours in public, half a head apart here."""
        if not name.endswith("qkv_w"):
            return values
        order = np.array([0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15])  # from 8 on they do not rotate
        values = values.reshape(3, 6, 16, 96).copy()
        values[:2] = values[:2][:, :, np.argsort(order) if public else order]
        return values

    def test_schedules(self, tmp_path: Path):
        """Compare the record's schedules, and those of its logs, with 20 steps more."""
        self.compare_schedules(tmp_path, "schedule")
        self.compare_schedules(tmp_path, "schedule_logged", num_iterations=1575, cooldown_frac=845 / 1535)
