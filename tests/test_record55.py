"""VeSkipGates is equal in mathematics to public record 55: every number that we have of it, to 1e-8 or better."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

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
    states = dict(val_s1=250, s1=300, s2=900, val_s2=1000, s3t=1204, s3u=1500, val_s3=1500, ext=1830, val_final=1845)
    last_tied = 1205
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

    @pytest.mark.parametrize(("begin", "first"), [("A", 0), ("B", 1202)])
    def test_optimizers(self, tmp_path: Path, begin: str, first: int):
        """Take six steps from the first one on or across the untying; moments are zero before."""
        trainer = self.untied_after(tmp_path, first, **self.small)
        self.load_parameters(trainer, is_tied=True)
        for t in range(6):
            for name, p in trainer.gpt.named_parameters():
                grads = self.numbers.get(f"opt.grad/{self.place(name)[0]}", np.zeros((6, 128 * 24)))[t]
                is_unused = name == "embed.weight" and first + t <= self.last_tied
                grad = torch.zeros_like(p)
                if grads.any() and not is_unused:
                    grad = torch.as_tensor(self.part(name, grads.astype(np.float64), p.numel()))
                p.grad = grad.view_as(p) + (0 if p.grad is None else p.grad)
            self.step(trainer, t, first + t)
            found = self.public(trainer.gpt, 1.0)
            if first + t < self.last_tied:  # one table, which the public record keeps as its head
                del found["embed.weight"]
            assert self.compare_digests(f"opt{begin}.after/{{}}/{t}", found)

    def test_packing(self, tmp_path: Path):
        """Compare the batches of three steps of each stage, and one from the second shard."""
        cfg, lengths = self.config(tmp_path, **self.small), [128] * 3 + [256] * 3 + [384] * 8
        plan = self.script.plan_batches(cfg.train_files, lengths, 8, cfg, max_doc_len=64)
        for step, batch in enumerate(self.script.read_batches(plan, range(8), cfg, torch.device("cpu"))):
            family = f"pack.stage{step // 3 + 1}" if step < 12 else "pack.after_switch"
            for name, rows in zip(("inputs", "targets"), zip(*batch, strict=True), strict=True):
                want = self.numbers[f"{family}/{name}"]
                assert step == 12 or np.array_equal(torch.stack(rows), want[step % 3] if step < 12 else want)
        assert step == 13

    def test_states(self, tmp_path: Path):
        """Compare training and validation losses, and every gradient, from random parameters."""
        trainer = self.trainer(tmp_path, **self.small)
        for state, loss in self.losses(trainer, self.states):
            self.compare(state, loss=loss.item())
            loss.backward()
            grads = self.gradients(trainer.gpt, is_one_table=self.states[state] <= self.last_tied)
            for g, want in zip(grads.values(), np.nan_to_num(self.numbers[f"{state}/grad_summary"]), strict=True):
                i, g = np.arange(g.size), g.flatten()
                found = [np.linalg.norm(g), g @ np.cos(i), g @ np.sin(2 * i)]
                np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[0])
