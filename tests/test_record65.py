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
from public_records import PublicRecord, check_first_values, digest, project, step_as
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


@pytest.fixture(params=[train_gpt, pytest.param(SCRIPT, marks=pytest.mark.slow)], ids=["root", "VeFused"])
def m(request) -> types.ModuleType:
    return request.param


def test_schedules(m: types.ModuleType, tmp_path: Path):
    """Compare the record's schedules, and those of its logs, with 20 steps more."""
    full = dict(device="cpu", seed=0)
    logged = full | dict(num_iterations=1575, cooldown_frac=845 / 1535)
    RECORD.compare_schedules(m, tmp_path, schedule=full, schedule_logged=logged)


def add_values(tensors: list[torch.Tensor], values: np.ndarray) -> None:
    """Add values, in order, to tensors that may have more at the end, or to one that is transposed."""
    values = torch.from_numpy(values.astype(np.float64))
    values = (values.T if tensors[0].shape == values.shape[::-1] != values.shape else values).flatten()
    for tensor in tensors:
        tensor.detach().view(-1)[: len(values)] += values[: tensor.numel()]
        values = values[tensor.numel() :]


def test_optimizers(m: types.ModuleType, tmp_path: Path):
    """Take six steps from step 0 on, and six across the untying; moments are zero before, and Adam counts from 1."""
    shapes = SMALL | dict(vocab_size=32, eot_token=31, num_heads=2, head_dim=8, model_dim=16, bigram_rows=160)
    for first in 0, 1008:
        cfg = RECORD.config(m, tmp_path, **shapes)
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


def test_states(m: types.ModuleType, tmp_path: Path):
    """Compare losses, the stream between layers, and every gradient, from random parameters."""
    trainer, outputs = m.Trainer(RECORD.config(m, tmp_path, **SMALL), m.Ranks()), []
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


def test_packing(m: types.ModuleType, tmp_path: Path):
    """Compare the batches of three steps of each stage, with the rows of their token pairs."""
    cfg = RECORD.config(m, tmp_path, **SMALL | dict(vocab_size=200, eot_token=199, bigram_rows=1280))
    real, lengths = dataclasses.replace(cfg, bigram_rows=251520), [256] * 3 + [512] * 3 + [768] * 3
    hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=real), RECORD.tokens("hash/tokens").int())
    assert np.array_equal(hashes, NUMBERS["hash/rows"])
    plan = m.plan_batches(f"{tmp_path}/pack_*.bin", lengths, 8, cfg, max_doc_len=64)
    for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
        key = f"pack/stage{step // 3 + 1}"
        for rank, (tokens, targets) in enumerate(batch):
            hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=cfg), tokens)
            for name, found in dict(tokens=tokens, targets=targets, bigram=hashes).items():
                assert np.array_equal(found, NUMBERS[f"{key}/{name}"][step % 3, rank]), f"{key} {name}"
    assert step == 8


def train(m: types.ModuleType, folder: Path, ranks) -> None:
    names, gradients_at = ("run/{}/tokens", "loss_per_token"), lambda gpt, _: RECORD.gradients(gpt)
    for step, gpt in RECORD.run(m, folder, ranks, *names, gradients_at, **RUN):
        for key, x in RECORD.public(gpt, 1.0).items():
            found = [x.sum(), norm := np.linalg.norm(x), *x.flat[7919 * np.arange(1, 9) % x.size]]
            RECORD.expect(f"run/digest/{key}", step, found, norm)


def test_run(m: types.ModuleType, tmp_path: Path):
    train(m, tmp_path, m.Ranks())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


def test_first_values(m: types.ModuleType, tmp_path: Path):
    first = dict(attn=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1, bigram_lambda=0.1, backout_lambda=0.5)
    std = dict(embed=0.005, lm_head=0.005) | dict.fromkeys(["qkv_w", "attn.c_proj", "c_fc"], 0.5 * DIM**-0.5)
    check_first_values(m, RECORD.config(m, tmp_path, **SMALL), first, std)
