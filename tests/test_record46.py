"""BatchSizeSchedule is equal in mathematics to public record 46: every number that we have of it, to 1e-8 or better.

Our 11 layers are the public layers 1 to 11: layer 0 is empty there.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

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
    test_packing = test_precision = None  # of this record the run has the batches

    def place(self, name: str) -> tuple[str, int]:
        name = re.sub(r"blocks\.(\d+)", lambda i: f"blocks.{int(i[1]) + 1}", name)
        return name.replace("skip_weights", "skip_weight") + ".weight" * name.endswith(
            ("c_proj", "c_fc", "gate", "head")
        ), 0

    @pytest.mark.parametrize("begin", [0])
    def test_optimizers(self, tmp_path: Path, begin: int):
        """Take six steps from step 698 on with given gradients, the moments being zero before; Adam counts from 1."""
        trainer = self.trainer(tmp_path, **self.small)
        self.load_parameters(trainer)
        params = {self.place(name)[0]: p for name, p in trainer.gpt.named_parameters()}
        params = {key: p for key, p in params.items() if f"optimizer/0/grad/{key}" in self.numbers}
        assert len(params) == 13
        for t, step in enumerate(self.numbers["optimizer/steps"]):
            for p in trainer.gpt.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for key, p in params.items():
                grad = self.numbers[f"optimizer/{t}/grad/{key}"].astype(np.float64)
                p.grad += torch.from_numpy(grad).flatten()[: p.numel()].view_as(p)
            before = {key: p.detach().clone() for key, p in params.items()}
            self.step(trainer, t, step)
            compared = self.compare_digests(f"optimizer/{t}/param/{{}}", self.public(trainer.gpt, 1.0))
            assert all(torch.equal(p, before[key]) for key, p in params.items() if key not in compared), "Adam waits"

    def test_states(self, tmp_path: Path):
        """Compare losses, every gradient and validations, from random parameters."""
        trainer = self.trainer(tmp_path, **self.small)
        gpt, rotary, windows = trainer.gpt, trainer.gpt.rotary, trainer.windows
        self.load_parameters(trainer)
        for step, family in {0: "stage1", 707: "stage2", 1414: "stage3", 2120: "stage4", 2160: "final"}.items():
            trainer.set_schedules(step)
            with torch.no_grad():
                loss = gpt(self.tokens("val/tokens"), self.tokens("val/targets"), windows)
            self.compare(family, windows_tokens=windows, val_loss=loss / 1024)
            if family != "final":
                self.compare(family, rotary_frequencies=rotary.sin[1].asin(), attention_scale=rotary.scale)
                tokens = self.tokens(f"{family}/tokens")
                loss = gpt(tokens, self.tokens(f"{family}/targets"), windows)
                loss.backward()
                self.compare(family, loss_sum=loss.item(), loss_mean=loss.item() / len(tokens))
                assert self.compare_digests(f"{family}/grad/{{}}", self.gradients(gpt)) == {*self.params}
                gpt.zero_grad()
