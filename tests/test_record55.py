"""VeSkipGates is equal in mathematics to public record 55: in schedules, first values and a run, to 1e-8."""

import re
from pathlib import Path

import pytest

import test_record46
from public_records import load

pytestmark = pytest.mark.slow


class TestRecord(test_record46.TestRecord):
    record = "2025-12-29_VeSkipGates"
    script = load(record)
    shards = dict(train_0="pack/shard0", train_1="pack/shard1", val_0="pack/shard1")
    small = test_record46.TestRecord.small | dict(num_heads=3, head_dim=8, val_seq_len=512, val_tokens=512)
    run = test_record46.TestRecord.run | dict(num_iterations=15, extension_steps=4, max_doc_len=96, train_seq_len=128)
    run |= dict(batch_tokens=8 * 128, val_seq_len=512, val_tokens=2 * 8 * 512, momentum_warmup_steps=5)
    batches, loss, one_table_until = "run/{}/inputs", "train_loss_per_token", 9
    first = dict(attn=[0.5, 1], skip_weights=-1.5, resid_lambda=1.1, backout_lambda=0.5)
    std = dict(embed=0.005, lm_head=0.005, qkv_w=1 / 24**0.5, c_fc=0.5 / 24**0.5)

    def place(self, name: str) -> tuple[str, int]:
        if found := re.fullmatch(r"blocks\.(\d+)\.(?:(resid|x0|bigram)_lambda|(attn)\.lambdas)", name):
            return f"{found[2] or found[3]}_lambdas", int(found[1])
        name = name.replace("skip_weights", "skip_lambda")
        return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0

    def test_schedules(self, tmp_path: Path):
        self.compare_schedules(tmp_path, "sched")
        cfg = self.config(tmp_path, device="cpu", seed=0)
        self.compare("sched", final_val_windows=self.script.attention_windows(1845, cfg)[::-1])
