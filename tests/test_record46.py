"""BatchSizeSchedule is equal in mathematics to public record 46: in schedules, first values and a run, to 1e-8.

Our 11 layers are the public layers 1 to 11: layer 0 is empty there.
"""

import re

import pytest

from public_records import PublicRecord, load

pytestmark = pytest.mark.slow


class TestRecord(PublicRecord):
    record = "2025-11-29_BatchSizeSchedule"
    script = load(record)
    shards = {name: f"packing/{name}" for name in ("train_shard_0", "train_shard_1", "train_shard_2", "val_shard")}
    small = dict(vocab_size=120, eot_token=119, num_heads=2, head_dim=12, model_dim=24, block_size=16)
    small |= dict(train_seq_len=512, batch_tokens=512, val_seq_len=1024, val_tokens=1024)
    small |= dict(window_tokens=(48, 112, 176, 208), final_window_tokens=320)
    small |= dict(dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
    run = dict(num_iterations=12, extension_steps=3, block_size=4, window_tokens=(12, 28, 44, 52))
    run |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=192, batch_tokens=8 * 192)
    run |= dict(val_seq_len=576, val_tokens=2 * 8 * 576, momentum_warmup_steps=4, momentum_cooldown_steps=3)
    batches, loss = "packing/{}/inputs", "train_loss_mean"
    first = dict(skip_weights=-1.5, backout_lambda=0.5, lambdas=[1.1, 0], attn=0.5)
    std = dict(embed=1, value_embeds=1, qkv_w=0.5 / 24**0.5, c_fc=0.5 / 24**0.5)

    def place(self, name: str) -> tuple[str, int]:
        name = re.sub(r"blocks\.(\d+)", lambda i: f"blocks.{int(i[1]) + 1}", name).replace(
            "skip_weights", "skip_weight"
        )
        return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "head")), 0
