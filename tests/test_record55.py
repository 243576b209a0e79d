"""VeSkipGates is equal in mathematics to public record 55: every number that we have of it, to 1e-8 or better."""

import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from public_records import PublicRecord, check_table, step_as

SMALL = dict(vocab_size=120, eot_token=119, num_heads=3, head_dim=8, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=512, val_tokens=512, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=15, extension_steps=4, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=96, train_seq_len=128, batch_tokens=8 * 128, val_tokens=2 * 8 * 512)
RUN |= dict(momentum_warmup_steps=5, momentum_cooldown_steps=3)
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


def gradients(gpt, is_tied: bool) -> dict[str, np.ndarray]:
    found = RECORD.gradients(gpt)
    if is_tied:
        found["lm_head.weight"] += found["embed.weight"]
        found["embed.weight"] *= 0
    return found


def check_schedules(m: types.ModuleType, folder: Path) -> None:
    full = dict(device="cpu", seed=0)
    RECORD.compare_schedules(m, folder, sched=full, run=RUN)
    cfg = RECORD.config(m, folder, **full)
    RECORD.compare("sched", final_val_windows=m.attention_windows(1845, cfg)[::-1])
    assert [m.stage_of(s, cfg) for s in NUMBERS["sched/stage_starts"]] == [0, 1, 2, 3]


def check_optimizers(m: types.ModuleType, folder: Path) -> None:
    """Take six steps from step 0 on, and six across the untying; moments are zero before, and Adam counts from 1."""
    for run, first in dict(optA=0, optB=1202).items():
        cfg = RECORD.config(m, folder, **SMALL)
        trainer = m.Trainer(dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps), m.Ranks())
        RECORD.load_parameters(trainer.gpt, is_tied=True)
        for t in range(6):
            for name, p in trainer.gpt.named_parameters():
                grads = NUMBERS.get(f"opt.grad/{place(name)[0]}", np.zeros((6, 128 * 24)))[t].astype(np.float64)
                is_unused = name == "embed.weight" and first + t <= 1205
                grad = torch.zeros_like(p) if is_unused or not grads.any() else RECORD.part(name, grads, p.numel())
                p.grad = torch.as_tensor(grad).view_as(p) + (0 if p.grad is None else p.grad)
            step_as(m, trainer, t, first + t)
            found = RECORD.public(trainer.gpt, 1.0)
            if first + t < 1205:  # one table, which the public record keeps as its head
                del found["embed.weight"]
            assert RECORD.compare_digests(f"{run}.after/{{}}/{t}", found)


def check_packing(m: types.ModuleType, folder: Path) -> None:
    cfg, cpu = RECORD.config(m, folder, **RUN), torch.device("cpu")
    lengths, families = [128] * 3 + [256] * 3 + [384] * 8, [f"pack.stage{k}" for k in (1, 2, 3, 4)]
    plan = m.plan_batches(cfg.train_files, lengths, 8, cfg, max_doc_len=64)
    batches = [[torch.stack(rows) for rows in zip(*b, strict=True)] for b in m.read_batches(plan, range(8), cfg, cpu)]
    for step, (inputs, targets) in enumerate(batches[:12]):
        for name, rows in dict(inputs=inputs, targets=targets).items():
            assert np.array_equal(rows, NUMBERS[f"{families[step // 3]}/{name}"][step % 3])
        for rank, tokens in enumerate(inputs):
            RECORD.compare_documents(tokens, f"{families[step // 3]}/cu_seqlens", step % 3, rank)
    RECORD.compare("pack.after_switch", inputs=batches[13][0], targets=batches[13][1])
    validation = list(m.read_batches(m.plan_data(cfg)["val"], [0], cfg, cpu))
    for name, rows in zip(("inputs", "targets"), zip(*(pair for [pair] in validation), strict=True), strict=True):
        RECORD.compare("pack.val", **{name: torch.stack(rows).view(2, 8, 512)})


def check_states(m: types.ModuleType, folder: Path) -> None:
    """Compare training and validation losses, and every gradient, from random parameters."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
    for state, step in STATES.items():
        is_tied, is_training = step <= 1205, not state.startswith("val")
        RECORD.load_parameters(trainer.gpt, is_tied)
        trainer.set_schedules(step)
        batch = [RECORD.tokens(f"{'train' if is_training else 'val'}/{name}") for name in ("inputs", "targets")]
        weights = trainer.weights[: len(m.next_weights(step, trainer.cfg))] if is_training else torch.ones(1).double()
        scale = 1 if is_training else 1 / 512
        loss = scale * trainer.gpt(*batch, trainer.windows, weights)
        RECORD.compare(state, loss=loss.item())
        loss.backward()
        wants = np.nan_to_num(NUMBERS[f"{state}/grad_summary"])
        for g, want in zip(gradients(trainer.gpt, is_tied).values(), wants, strict=True):
            i, g = np.arange(g.size), g.flatten()
            found = [np.linalg.norm(g), g @ np.cos(i), g @ np.sin(2 * i)]
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[0])
        trainer.gpt.zero_grad()


def check_run(m: types.ModuleType, folder: Path, ranks=None) -> None:
    """Train from data to the last validation, after a warm-up, as one of any number of processes."""
    cfg, ranks = RECORD.config(m, folder, **RUN), ranks or m.Ranks()
    trainer, plans, losses, validations = m.Trainer(cfg, ranks), m.plan_data(cfg), [], []
    trainer.warm_up()
    RECORD.load_parameters(trainer.gpt, is_tied=True)
    batches = m.read_batches(plans["train"], range(ranks.rank, 8, ranks.world_size), cfg, trainer.device)

    def compare(step: int, norms: list[float]) -> None:
        if ranks.world_size == 1:
            np.testing.assert_allclose(norms, np.nan_to_num(NUMBERS["run/grad_norm"][step]), rtol=1e-8, atol=1e-10)

    with RECORD.watch_norms(m, trainer.gpt, lambda step: gradients(trainer.gpt, step <= 9), compare):
        for step in range(16):
            validations += [trainer.evaluate(step, plans["val"])] if step in NUMBERS["run/val_steps"] else []
            if step < 15:
                losses.append(trainer.train_step(step, batch := next(batches)).item())
                rows = NUMBERS[f"run/{step}/inputs"][ranks.rank :: ranks.world_size]
                assert np.array_equal(torch.stack([tokens for tokens, _ in batch]), rows)
                for key, x in RECORD.public(trainer.gpt, 1.0).items():
                    want, entries = NUMBERS[f"run/digest/{key}"][step], x.flat[NUMBERS[f"run/indices/{key}"]]
                    if key != "embed.weight" or step >= 9:
                        found = [x.sum(), np.linalg.norm(x), *entries]
                        np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[1], err_msg=f"{step} {key}")
    RECORD.compare("run", train_loss_per_token=losses, val_loss=validations)


def check_first_values_and_rates(m: types.ModuleType, folder: Path) -> None:
    slow, fast, first = (0.9, 0.99), (0.65, 0.95), dict(attn=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1)
    adam = {"embed|lm_head": (0.008, fast, 150), "value_embeds": (0.6, fast, 5), "x0_lambda": (0.04, fast, 0)}
    adam |= {"resid_lambda|lambdas|skip_weights|smear_lambda|backout_lambda": (0.04, slow, 0)}
    adam |= {"smear_gate": (8e-5, fast, 0), "skip_gate": (4e-4, fast, 0)}
    muon = {"qkv_w": 2, "attn.c_proj": 2, "c_fc": 2, "mlp.c_proj": 4, "gate": 1, "value_gate": 1}
    std = dict(embed=0.005, lm_head=0.005, qkv_w=1 / 24**0.5, c_fc=0.5 / 24**0.5)
    check_table(m, RECORD.config(m, folder, **SMALL), first | dict(backout_lambda=0.5), std, adam, muon)


CHECKS = [check_schedules, check_optimizers, check_packing, check_states, check_run, check_first_values_and_rates]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_those_of_the_public_record(check, tmp_path: Path):
    check(SCRIPT, tmp_path)


@pytest.mark.slow
def test_eight_processes_run_the_same(tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, 8)
