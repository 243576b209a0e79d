"""BatchSizeSchedule is equal in mathematics to public record 46: every number that we have of it, to 1e-8 or better.

Our 11 layers are the public layers 1 to 11: layer 0 is empty there.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from public_records import PublicRecord

pytestmark = pytest.mark.slow
SMALL = dict(vocab_size=120, eot_token=119, num_heads=2, head_dim=12, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=1024, val_tokens=1024, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=12, extension_steps=3, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=192, batch_tokens=8 * 192, val_seq_len=576)
RUN |= dict(val_tokens=2 * 8 * 576, momentum_warmup_steps=4, momentum_cooldown_steps=3)
RUN |= dict(batches="packing/{}/inputs", loss="train_loss_mean")


def place(name: str) -> tuple[str, int]:
    name = re.sub(r"blocks\.(\d+)", lambda i: f"blocks.{int(i[1]) + 1}", name).replace("skip_weights", "skip_weight")
    return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "lm_head")), 0


SHARDS = {name: f"packing/{name}" for name in ("train_shard_0", "train_shard_1", "train_shard_2", "val_shard")}
RECORD = PublicRecord("2025-11-29_BatchSizeSchedule", place, SHARDS)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers


def test_schedules(tmp_path: Path):
    RECORD.compare_schedules(tmp_path, schedule=dict(device="cpu", seed=0))


def test_optimizers(tmp_path: Path):
    """Take six steps from step 698 on with given gradients, the moments being zero before; Adam counts from 1."""
    trainer = RECORD.trainer(tmp_path, **SMALL)
    RECORD.load_parameters(trainer.gpt)
    params = {place(name)[0]: p for name, p in trainer.gpt.named_parameters()}
    params = {key: p for key, p in params.items() if f"optimizer/0/grad/{key}" in NUMBERS}
    assert len(params) == 13
    for t, step in enumerate(NUMBERS["optimizer/steps"]):
        for p in trainer.gpt.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in params.items():
            grad = NUMBERS[f"optimizer/{t}/grad/{key}"].astype(np.float64)
            p.grad += torch.from_numpy(grad).flatten()[: p.numel()].view_as(p)
        before = {key: p.detach().clone() for key, p in params.items()}
        RECORD.step(trainer, t, step)
        compared = RECORD.compare_digests(f"optimizer/{t}/param/{{}}", RECORD.public(trainer.gpt, 1.0))
        assert all(torch.equal(p, before[key]) for key, p in params.items() if key not in compared), "Adam waits"


def test_stages(tmp_path: Path):
    """Compare losses, every gradient and validations, from random parameters."""
    trainer = RECORD.trainer(tmp_path, **SMALL)
    gpt, rotary, windows = trainer.gpt, trainer.gpt.rotary, trainer.windows
    RECORD.load_parameters(gpt)
    for step, family in {0: "stage1", 707: "stage2", 1414: "stage3", 2120: "stage4", 2160: "final"}.items():
        trainer.set_schedules(step)
        with torch.no_grad():
            loss = gpt(RECORD.tokens("val/tokens"), RECORD.tokens("val/targets"), windows)
        RECORD.compare(family, windows_tokens=windows, val_loss=loss / 1024)
        if family != "final":
            RECORD.compare(family, rotary_frequencies=rotary.sin[1].asin(), attention_scale=rotary.scale)
            tokens = RECORD.tokens(f"{family}/tokens")
            loss = gpt(tokens, RECORD.tokens(f"{family}/targets"), windows)
            loss.backward()
            RECORD.compare(family, loss_sum=loss.item(), loss_mean=loss.item() / len(tokens))
            assert RECORD.compare_digests(f"{family}/grad/{{}}", RECORD.gradients(gpt)) == {*RECORD.order}
            gpt.zero_grad()


@pytest.mark.parametrize("size", [8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


def test_first_values(tmp_path: Path):
    first = dict(skip_weights=[-1.5], backout_lambda=0.5, lambdas=[1.1, 0], attn=[0.5, 0.5])
    std = dict(embed=1, value_embeds=1, qkv_w=0.5 / 24**0.5, c_fc=0.5 / 24**0.5)
    RECORD.check_first_values(RECORD.config(tmp_path, **SMALL), first, std)
