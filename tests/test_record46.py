"""BatchSizeSchedule is equal in mathematics to public record 46: every number that we have of it, to 1e-8 or better.

Our 11 layers are the public layers 1 to 11: layer 0 is empty there.
"""

import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from public_records import PublicRecord, check_table, step_as

SMALL = dict(vocab_size=120, eot_token=119, num_heads=2, head_dim=12, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=1024, val_tokens=1024, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=12, extension_steps=3, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=192, batch_tokens=8 * 192, val_seq_len=576)
RUN |= dict(val_tokens=2 * 8 * 576, momentum_warmup_steps=4, momentum_cooldown_steps=3)


def place(name: str) -> tuple[str, int]:
    name = re.sub(r"blocks\.(\d+)", lambda i: f"blocks.{int(i[1]) + 1}", name).replace("skip_weights", "skip_weight")
    return name + ".weight" * name.endswith(("c_proj", "c_fc", "gate", "lm_head")), 0


SHARDS = {name: f"packing/{name}" for name in ("train_shard_0", "train_shard_1", "train_shard_2", "val_shard")}
RECORD = PublicRecord("2025-11-29_BatchSizeSchedule", place, SHARDS)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers


def check_schedules(m: types.ModuleType, folder: Path) -> None:
    RECORD.compare_schedules(m, folder, schedule=dict(device="cpu", seed=0), run=RUN)


def check_optimizers(m: types.ModuleType, folder: Path) -> None:
    """Take six steps from step 698 on with given gradients, the moments being zero before; Adam counts from 1."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
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
        step_as(m, trainer, t, step)
        compared = RECORD.compare_digests(f"optimizer/{t}/param/{{}}", RECORD.public(trainer.gpt, 1.0))
        assert all(torch.equal(p, before[key]) for key, p in params.items() if key not in compared), "Adam waits"


def check_packing(m: types.ModuleType, folder: Path) -> None:
    cfg = RECORD.config(m, folder, **RUN)
    plans, cpu = m.plan_data(cfg), torch.device("cpu")
    for step, batch in enumerate(m.read_batches(plans["train"], range(8), cfg, cpu)):
        inputs, targets = (torch.stack(rows) for rows in zip(*batch, strict=True))
        RECORD.compare(f"packing/{step}", inputs=inputs, targets=targets)
        for rank, tokens in enumerate(inputs):
            RECORD.compare_documents(tokens, f"packing/{step}/cu_seqlens", rank)
    assert step == 11
    validation = torch.stack([tokens for [(tokens, _)] in m.read_batches(plans["val"], [0], cfg, cpu)])
    RECORD.compare("packing/val0", inputs=validation[:8])
    RECORD.compare("packing/val1", inputs=validation[8:])


def check_stages(m: types.ModuleType, folder: Path) -> None:
    """Compare losses, every gradient and validations, from random parameters."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
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
            RECORD.compare_documents(tokens, f"{family}/cu_seqlens")
            loss = gpt(tokens, RECORD.tokens(f"{family}/targets"), windows)
            loss.backward()
            RECORD.compare(family, loss_sum=loss.item(), loss_mean=loss.item() / len(tokens))
            assert RECORD.compare_digests(f"{family}/grad/{{}}", RECORD.gradients(gpt)) == {*RECORD.order}
            gpt.zero_grad()


def check_run(m: types.ModuleType, folder: Path, ranks=None) -> None:
    """Train from data to the last validation, after a warm-up, as one of any number of processes."""
    cfg, ranks = RECORD.config(m, folder, **RUN), ranks or m.Ranks()
    trainer, plans, losses, validations, compared = m.Trainer(cfg, ranks), m.plan_data(cfg), [], [], 0
    trainer.warm_up()
    RECORD.load_parameters(trainer.gpt)
    batches = m.read_batches(plans["train"], range(ranks.rank, 8, ranks.world_size), cfg, trainer.device)
    for step in range(13):
        validations += [trainer.evaluate(step, plans["val"])] if step in RECORD.numbers["run/val_steps"] else []
        losses += [trainer.train_step(step, next(batches)).item()] if step < 12 else []
        compared += len(RECORD.compare_digests(f"run/{step}/digest/{{}}", RECORD.public(trainer.gpt, 1.0)))
    assert compared == 246
    RECORD.compare("run", train_loss_mean=losses, val_loss=validations)


def check_first_values_and_rates(m: types.ModuleType, folder: Path) -> None:
    betas, std = (0.65, 0.95), dict(embed=1, value_embeds=1, qkv_w=0.5 / 24**0.5, c_fc=0.5 / 24**0.5)
    rates = {"embed|value_embeds": 0.6, "lm_head": 0.008, "lambdas|skip_weights|smear_lambda|backout_lambda": 0.04}
    first = dict(skip_weights=[-1.5], backout_lambda=0.5, lambdas=[1.1, 0], attn=[0.5, 0.5])
    adam, muon = {k: (rate, betas, 0) for k, rate in rates.items()}, dict(qkv_w=1, c_proj=1, c_fc=2, gate=1)
    check_table(m, RECORD.config(m, folder, **SMALL), first, std, adam, muon | dict(smear_gate=1))


CHECKS = [check_schedules, check_optimizers, check_packing, check_stages, check_run, check_first_values_and_rates]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_those_of_the_public_record(check, tmp_path: Path):
    check(SCRIPT, tmp_path)


@pytest.mark.slow
def test_eight_processes_run_the_same(tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, 8)
