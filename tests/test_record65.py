"""VeFused is equal in mathematics to public record 65: every number that we have of it, to 1e-8 or better."""

from pathlib import Path

import numpy as np
import pytest

import test_record55
from public_records import PublicRecord, load

pytestmark = pytest.mark.slow
BEFORE = test_record55.TestRecord


class TestRecord(PublicRecord):
    record = "2026-01-30_VeFused"
    script = load(record)
    shards = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
    shards |= dict(pack_0="pack/shard0", pack_1="pack/shard1")
    small = BEFORE.small | dict(num_heads=6, head_dim=16, model_dim=96, bigram_rows=640)
    small |= dict.fromkeys(("batch_tokens", "train_seq_len", "val_seq_len", "val_tokens"), 768)
    run = BEFORE.run | dict(num_iterations=13, max_doc_len=64, train_seq_len=96, batch_tokens=8 * 96, val_seq_len=288)
    run |= dict(val_tokens=2 * 8 * 288, cooldown_frac=5 / 9, momentum_warmup_steps=4)
    steps = dict(vocab_size=32, eot_token=31, num_heads=2, head_dim=8, model_dim=16, bigram_rows=160)
    across, cuts, hashes = 1008, 64, dict(bigram_rows=251520)
    states = dict(s1=200, val_s1=250, s2=705, val_s2=750, s3_tied=1010, s3=1200, val_s3=1250, ext=1520, val_final=1555)
    last_tied = 1011
    members = {"attn.qkv_w": r"blocks\.0\.attn\.qkv_w", "x0_lambdas": r"blocks\.0\.x0_lambda"}
    members |= {f"{kind}.weight": rf"blocks\.0\.{kind}" for kind in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    members |= {f"{kind}.weight": rf"{kind}(\.weight)?" for kind in ("embed", "bigram_embed", "lm_head")}
    members |= {"smear_gate.weight": "smear_gate", "skip_gate.weight": "skip_gate", "value_embeds": "value_embeds.*"}
    members |= dict(attn_gates=r".*\.gate", value_gates=r".*\.value_gate")
    members["scalars"] = r"blocks\.0\.(attn\.lambdas|(resid|bigram)_lambda)|(smear|backout)_lambda|skip_weights"
    first = BEFORE.first | dict(bigram_lambda=0.1)
    std = dict(embed=0.005, lm_head=0.005) | dict.fromkeys(["qkv_w", "attn.c_proj", "c_fc"], 0.5 * 96**-0.5)
    place = BEFORE.place
    test_precision = None

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
        super().test_schedules(tmp_path)
        self.compare_schedules(tmp_path, "schedule_logged", num_iterations=1575, cooldown_frac=845 / 1535)
