"""VeFused and the root script are equal in mathematics to public record 65: every number of it, to 1e-8 or better.

Losses, gradients and run are those of the public parameters cut to a quarter of the width: see public_records.
"""

import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from public_records import PublicRecord, check_table, digest, project, step_as
from test_record55 import place


def rotary_order(name: str, values: np.ndarray, public: bool, angles: int) -> np.ndarray:
    """Reorder the dimensions of queries and keys: pairs that rotate are neighbours in public, here `angles` apart.

    In the root script, which has half as many angles as VeFused, the first matrix of an MLP is transposed.
    """
    if name.endswith("c_fc") and angles < DIM // 12:
        return values.reshape((DIM, 4 * DIM) if public else (4 * DIM, DIM)).T.copy()
    if not name.endswith("qkv_w"):
        return values
    pair, D = np.arange(DIM // 24), DIM // 6
    quarters = [2 * pair, 2 * pair + 1, D // 2 + pair, 3 * D // 4 + pair]  # the last two are not rotated
    order = np.concatenate([quarters[i] for i in ((0, 2, 1, 3) if angles == D // 2 else (0, 1, 2, 3))])
    values = values.reshape(3, 6, D, DIM).copy()
    values[:2] = values[:2][:, :, np.argsort(order) if public else order]
    return values


SHARDS = dict(train_0="run/shard0", train_1="run/shard1", val_0="run/val_shard")
SHARDS |= dict(pack_0="pack/shard0", pack_1="pack/shard1")
RECORD = PublicRecord("2026-01-30_VeFused", place, SHARDS, rotary_order)
SCRIPT, NUMBERS = RECORD.script, RECORD.numbers
DIM = NUMBERS["param/embed.weight"].shape[1]
SMALL = dict(vocab_size=120, eot_token=119, num_heads=6, head_dim=DIM // 6, model_dim=DIM, bigram_rows=640)
SMALL |= dict(batch_tokens=768, train_seq_len=768, val_seq_len=768, val_tokens=768, block_size=16)
SMALL |= dict(window_tokens=(48, 112, 176, 208), final_window_tokens=320)
SMALL |= dict(dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=13, extension_steps=4, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=64, train_seq_len=96, batch_tokens=8 * 96, val_seq_len=288)
RUN |= dict(val_tokens=2 * 8 * 288, cooldown_frac=5 / 9, momentum_warmup_steps=4, momentum_cooldown_steps=3)
STATES = dict(s1=200, val_s1=250, s2=705, val_s2=750, s3_tied=1010, s3=1200, val_s3=1250, ext=1520, val_final=1555)
# What of our parameters stands for the public ones in the optimizers' steps
kinds = ("embed.weight", "bigram_embed.weight", "lm_head.weight", "smear_gate.weight", "skip_gate.weight")
MEMBERS = {kind: rf"{kind.removesuffix('.weight')}(\.weight)?" for kind in kinds}
kinds = ("attn.qkv_w", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "x0_lambdas")
MEMBERS |= {kind: rf"blocks\.0\.{kind.removesuffix('.weight').removesuffix('s')}" for kind in kinds}
MEMBERS |= dict(value_embeds="value_embeds.*", attn_gates=r".*\.gate", value_gates=r".*\.value_gate")
MEMBERS["scalars"] = r"blocks\.0\.(attn\.lambdas|(resid|bigram)_lambda)|(smear|backout)_lambda|skip_weights"


def check_schedules(m: types.ModuleType, folder: Path) -> None:
    """Compare the record's schedules, those of its logs, with 20 steps more, and those of the run in small."""
    full = dict(device="cpu", seed=0)
    logged = full | dict(num_iterations=1575, cooldown_frac=845 / 1535)
    RECORD.compare_schedules(m, folder, schedule=full, schedule_logged=logged, run=RUN)
    for family, changes in dict(schedule=full, schedule_logged=logged).items():
        ends = m.stage_starts(RECORD.config(m, folder, **changes))
        assert ends[:4] == NUMBERS[f"{family}/boundaries"][:, 0].tolist()  # VeFused's lack the end


def add_values(tensors: list[torch.Tensor], values: np.ndarray) -> None:
    """Add values, in order, to tensors that may have more at the end, or to one that is transposed."""
    values = torch.from_numpy(values.astype(np.float64))
    values = (values.T if tensors[0].shape == values.shape[::-1] != values.shape else values).flatten()
    for tensor in tensors:
        tensor.detach().view(-1)[: len(values)] += values[: tensor.numel()]
        values = values[tensor.numel() :]


def check_optimizers(m: types.ModuleType, folder: Path) -> None:
    """Take six steps from step 0 on, and six across the untying; moments are zero before, and Adam counts from 1."""
    shapes = SMALL | dict(vocab_size=32, eot_token=31, num_heads=2, head_dim=8, model_dim=16, bigram_rows=160)
    for first in 0, 1008:
        cfg = RECORD.config(m, folder, **shapes)
        trainer = m.Trainer(dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps), m.Ranks())
        params = dict(trainer.gpt.named_parameters())
        members = {key: [p for n, p in params.items() if re.fullmatch(kind, n)] for key, kind in MEMBERS.items()}
        for key, ours in members.items():
            for p in ours:
                p.detach().zero_()
            add_values(ours, NUMBERS[f"opt/init/{key}"])
        for t in range(6):
            for p in params.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            for key, ours in members.items():
                add_values([p.grad for p in ours], NUMBERS[f"opt/grad/{key}"][t])
            step_as(m, trainer, t, first + t)
            for key, ours in members.items():
                shape = NUMBERS[f"opt/init/{key}"].shape
                values = [p.detach().numpy() for p in ours]
                values = [values[0].T] if values[0].shape == shape[::-1] != shape else values
                values = np.concatenate([x.ravel() for x in values])[: np.prod(shape)].reshape(shape)
                key = f"opt/from{first}/{key}/{t}"
                RECORD.expect(key, ..., digest(values), NUMBERS[key][1])


def check_states(m: types.ModuleType, folder: Path) -> None:
    """Compare losses, the stream between layers, and every gradient, from random parameters."""
    trainer, outputs = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks()), []
    for block in trainer.gpt.blocks:
        block.register_forward_hook(lambda *result: outputs.append(result[2].detach().numpy()))
    for case, (state, step) in enumerate(STATES.items()):
        is_training = not state.startswith("val")
        RECORD.load_parameters(trainer.gpt, is_tied=step <= 1011)
        trainer.set_schedules(step)
        batch = [RECORD.tokens(f"{'train' if is_training else 'val'}/{name}") for name in ("tokens", "targets")]
        weights = trainer.weights[: len(m.next_weights(step, trainer.cfg))] if is_training else torch.ones(1).double()
        outputs.clear()
        loss = trainer.gpt(batch[0].int(), batch[1], trainer.windows, weights)
        RECORD.expect("loss", case, loss.item() / (1 if is_training else 768))
        RECORD.expect("block_rms", case, [np.sqrt(np.square(x).mean()) for x in outputs])
        RECORD.expect("block_sample", case, [x[[0, 384, 767], :8] for x in outputs], 1)
        if is_training:
            row = sum(not name.startswith("val") for name in [*STATES][:case])
            loss.backward()
            grads = RECORD.gradients(trainer.gpt)
            norms = [np.linalg.norm(g) for g in grads.values()]
            RECORD.expect("grad_norm", row, norms)
            for (key, g), norm in zip(grads.items(), norms, strict=True):
                if f"grad/{key}" in NUMBERS:
                    RECORD.expect(f"grad/{key}", row, g, norm)
                else:
                    RECORD.expect(f"grad/{key}:sample", row, g.flat[7919 * np.arange(16) % g.size], norm)
                    RECORD.expect(f"grad/{key}:rows", row, project(g.sum(-1)), norm)
                    RECORD.expect(f"grad/{key}:cols", row, project(g.sum(-2)), norm)
            trainer.gpt.zero_grad()


def check_packing(m: types.ModuleType, folder: Path) -> None:
    cfg, real = (RECORD.config(m, folder, **SMALL | dict(vocab_size=200, bigram_rows=rows)) for rows in (1280, 251520))
    hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=real), RECORD.tokens("hash/tokens").int())
    assert np.array_equal(hashes, NUMBERS["hash/rows"])
    cfg, lengths = dataclasses.replace(cfg, eot_token=199), [256] * 3 + [512] * 3 + [768] * 3
    plan = m.plan_batches(f"{folder}/pack_*.bin", lengths, 8, cfg, max_doc_len=64)
    for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
        compare_batch(m, cfg, batch, f"pack/stage{step // 3 + 1}", step % 3)
    cfg = RECORD.config(m, folder, **RUN)
    for i, pair in enumerate(m.read_batches(m.plan_data(cfg)["val"], [0], cfg, torch.device("cpu"))):
        compare_batch(m, cfg, pair, f"run/val{i // 8}", ranks=[i % 8])
    assert (step, i) == (8, 15)


def compare_batch(m: types.ModuleType, cfg, batch: list, key: str, *row: int, ranks=range(8)) -> None:
    for rank, (tokens, targets) in zip(ranks, batch, strict=True):
        hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=cfg), tokens)
        for name, found in dict(tokens=tokens, targets=targets, bigram=hashes).items():
            assert np.array_equal(found, NUMBERS[f"{key}/{name}"][(*row, rank)]), f"{key} {name}"
        if not key.startswith("run/val"):
            RECORD.compare_documents(tokens, f"{key}/cu_seqlens", *row, rank, eot=cfg.eot_token)


def check_run(m: types.ModuleType, folder: Path, ranks=None) -> None:
    """Train from data to the last validation, after a warm-up, as one of any number of processes."""
    cfg, ranks = RECORD.config(m, folder, **RUN), ranks or m.Ranks()
    trainer, plans, own = m.Trainer(cfg, ranks), m.plan_data(cfg), range(ranks.rank, 8, ranks.world_size)
    trainer.warm_up()
    RECORD.load_parameters(trainer.gpt, is_tied=True)
    batches, validations = m.read_batches(plans["train"], own, cfg, trainer.device), []

    def compare(step: int, norms: list[float]) -> None:
        if ranks.world_size == 1:
            RECORD.expect("run/grad_norm", step, norms)

    with RECORD.watch_norms(m, trainer.gpt, lambda _: RECORD.gradients(trainer.gpt), compare):
        for step in range(14):
            validations += [trainer.evaluate(step, plans["val"])] if step in NUMBERS["run/val_steps"] else []
            if step < 13:
                compare_batch(m, cfg, batch := next(batches), f"run/{step}", ranks=own)
                RECORD.expect("run/loss_per_token", step, trainer.train_step(step, batch).item())
                for key, x in RECORD.public(trainer.gpt, 1.0).items():
                    found = [x.sum(), norm := np.linalg.norm(x), *x.flat[7919 * np.arange(1, 9) % x.size]]
                    RECORD.expect(f"run/digest/{key}", step, found, norm)
    RECORD.expect("run/val_loss", ..., validations)


def check_first_values_and_rates(m: types.ModuleType, folder: Path) -> None:
    slow, first = (0.9, 0.99), dict(attn=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1, bigram_lambda=0.1)
    adam = {"embed|lm_head": (0.008, (0.5, 0.95), 150), "value_embeds|bigram_embed": (0.6, (0.75, 0.95), 5)}
    adam |= {"gate|value_gate": (0.008, slow, 1), "smear_gate": (8e-5, slow, 0), "skip_gate": (4e-4, slow, 0)}
    adam |= {"resid_lambda|bigram_lambda|lambdas|skip_weights|smear_lambda|backout_lambda": (0.04, slow, 0)}
    adam |= {"x0_lambda": (0.04, (0.65, 0.95), 0)}
    muon, std = {"qkv_w": 1, "attn.c_proj": 1, "c_fc": 2, "mlp.c_proj": 4}, dict(embed=0.005, lm_head=0.005)
    std |= dict.fromkeys(["qkv_w", "attn.c_proj", "c_fc"], 0.5 * DIM**-0.5)
    check_table(m, RECORD.config(m, folder, **SMALL), first | dict(backout_lambda=0.5), std, adam, muon)


CHECKS = [check_schedules, check_optimizers, check_packing, check_states, check_run, check_first_values_and_rates]


@pytest.mark.parametrize("script", [train_gpt, pytest.param(SCRIPT, marks=pytest.mark.slow)], ids=["root", "VeFused"])
@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_those_of_the_public_record(script: types.ModuleType, check, tmp_path: Path):
    check(script, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)
