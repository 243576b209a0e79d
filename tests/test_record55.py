"""VeSkipGates is equal in mathematics to public record 55: every number that we have of it, to 1e-8 or better."""

import dataclasses
import re
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from public_records import PublicRecord, digest

SMALL = dict(vocab_size=120, eot_token=119, num_heads=3, head_dim=8, model_dim=24, block_size=16, train_seq_len=512)
SMALL |= dict(batch_tokens=512, val_seq_len=512, val_tokens=512, window_tokens=(48, 112, 176, 208))
SMALL |= dict(final_window_tokens=320, dtype="float64", device="cpu", compile=False, seed=0, run_id="small")
RUN = SMALL | dict(num_iterations=15, extension_steps=4, block_size=4, window_tokens=(12, 28, 44, 52))
RUN |= dict(final_window_tokens=80, max_doc_len=96, train_seq_len=128, batch_tokens=8 * 128, val_tokens=2 * 8 * 512)
RUN |= dict(momentum_warmup_steps=5, momentum_cooldown_steps=3)
STATES = dict(val_s1=250, s1=300, s2=900, val_s2=1000, s3t=1204, s3u=1500, val_s3=1500, ext=1830, val_final=1845)


def place(name: str) -> tuple[str, int]:
    """Return the public name of a parameter, and which part of it ours is."""
    if found := re.fullmatch(r"blocks\.(\d+)\.(?:(resid|x0)_lambda|(attn)\.lambdas)", name):
        return f"{found[2] or found[3]}_lambdas", int(found[1])
    return name.replace("skip_weights", "skip_lambda") + ".weight" * name.endswith(
        ("c_proj", "c_fc", "gate", "head")
    ), 0


RECORD = PublicRecord(
    "2025-12-29_VeSkipGates",
    lambda name: place(name)[0],
    dict(train_0="pack/shard0", train_1="pack/shard1", val_0="pack/shard1"),
)
SCRIPT, ORDER = RECORD.load(), [key[6:] for key in RECORD.numbers if key.startswith("param/")]


def part(name: str, array: np.ndarray, size: int) -> np.ndarray:
    """Return a view of what ours is of a public array: a row of one for all layers, or the rows with tokens."""
    key, i = place(name)
    return (array.reshape(11, -1)[i] if key.endswith("lambdas") else array.reshape(-1))[:size]


def public(tensors: dict[str, Tensor], unread: float) -> dict[str, np.ndarray]:
    """Return our values by their public names; what only the public record has is `unread` times its first value."""
    arrays = {key: np.array(unread * RECORD.numbers[f"param/{key}"].astype(np.float64)) for key in ORDER}
    for name, tensor in tensors.items():
        part(name, arrays[place(name)[0]], tensor.numel())[:] = tensor.detach().flatten()
    return arrays


def load_parameters(trainer, is_tied: bool) -> None:
    params = dict(trainer.gpt.named_parameters())
    assert {place(name)[0] for name in params} == set(ORDER)
    for name, p in params.items():
        values = part(name, RECORD.numbers[f"param/{place(name)[0]}"].astype(np.float64), p.numel())
        p.detach().copy_(torch.from_numpy(values).view_as(p))
    if is_tied:
        params["embed.weight"].detach().copy_(params["lm_head"])


def gradients(gpt, is_tied: bool) -> dict[str, np.ndarray]:
    tensors = {name: p.grad for name, p in gpt.named_parameters()}
    if is_tied:
        tensors["lm_head"] = tensors["lm_head"] + tensors.pop("embed.weight")
    return public(tensors, 0.0)


def check_schedules(m: types.ModuleType, folder: Path, family="sched", changes=None, N=1845) -> None:
    cfg, numbers = RECORD.config(m, folder, **changes or dict(device="cpu", seed=0)), RECORD.numbers
    weights = [m.next_weights(s, cfg) for s in range(N)]
    found = {name: [getattr(m, name)(s, cfg) for s in range(N)] for name in ("lr_multiplier", "muon_momentum")}
    found |= dict(batch_tokens=[8 * m.train_seq_len(s, cfg) for s in range(N)], mtp_count=[len(w) for w in weights])
    found |= dict(mtp_weights=[w + [0] * (3 - len(w)) for w in weights], max_doc_len=[cfg.max_doc_len] * N)
    found |= dict(adam_steps=[s % cfg.adam_every == 1 for s in range(N)])
    found |= dict(tied=[s - 1 - s % 2 < cfg.tied_frac * cfg.scheduled_steps for s in range(N)])
    windows = np.array([m.attention_windows(s, cfg) for s in range(N + 1)])
    found |= dict(window_long=windows[:, 0], window_short=windows[:, 1])
    rotary = [m.rotary_frequencies(stage, cfg, torch.float64) for stage in range(4)]
    found |= dict(attention_scale=[rotary[m.stage_of(s, cfg)][1] for s in range(N + 1)])
    for name, values in found.items():
        if (want := numbers.get(f"{family}/{name}")) is not None:
            last = N if family == "sched" else N + 1  # sched's last windows are those before the last validation's
            np.testing.assert_allclose(values[:last], want[:last], rtol=1e-12, atol=1e-15, err_msg=name)
    RECORD.compare(family, rotary_frequencies=np.stack([f for f, _ in rotary]))
    if family == "sched":
        RECORD.compare(family, final_val_windows=windows[-1, ::-1])
        assert [m.stage_of(s, cfg) for s in numbers["sched/stage_starts"]] == [0, 1, 2, 3]


def check_optimizers(m: types.ModuleType, folder: Path) -> None:
    """Take six steps from step 0 on, and six across the untying; moments are zero before, and Adam counts from 1."""
    for run, first in dict(optA=0, optB=1202).items():
        cfg = RECORD.config(m, folder, **SMALL)
        trainer = m.Trainer(dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps), m.Ranks())
        load_parameters(trainer, is_tied=True)
        params = dict(trainer.gpt.named_parameters())
        for t in range(6):
            for name, p in params.items():
                grads = RECORD.numbers.get(f"opt.grad/{place(name)[0]}", np.zeros((6, 128 * 24)))[t].astype(np.float64)
                is_unused = name == "embed.weight" and first + t <= 1205
                grad = torch.zeros_like(p) if is_unused or not grads.any() else part(name, grads, p.numel())
                p.grad = torch.as_tensor(grad).view_as(p) + (0 if p.grad is None else p.grad)
            now = {name: getattr(m, name)(first + t, cfg) for name in ("lr_multiplier", "muon_momentum")}
            with mock.patch.multiple(m, **{name: lambda *_, value=value: value for name, value in now.items()}):
                m.step_optimizers(trainer.optimizers, t)
            for key, values in public(params, 1.0).items():
                want = RECORD.numbers.get(f"{run}.after/{key}/{t}")
                if want is not None and not (key == "embed.weight" and first + t < 1205):
                    found = digest(values[:120] if "embed" in key else values)
                    np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[1], err_msg=f"{run} {t} {key}")


def check_states(m: types.ModuleType, folder: Path) -> None:
    """Compare training and validation losses, and every gradient, from random parameters."""
    trainer = m.Trainer(RECORD.config(m, folder, **SMALL), m.Ranks())
    for state, step in STATES.items():
        is_tied, is_training = step <= 1205, f"{state}/grad_summary" in RECORD.numbers and "val" not in state
        load_parameters(trainer, is_tied)
        trainer.set_schedules(step)
        batch = [RECORD.tokens(f"{'train' if is_training else 'val'}/{name}") for name in ("inputs", "targets")]
        weights = trainer.weights[: len(m.next_weights(step, trainer.cfg))] if is_training else torch.ones(1).double()
        loss = trainer.gpt(*batch, trainer.windows, weights)
        RECORD.compare(state, loss=loss.item() / (1 if is_training else 512))
        loss.backward()
        for g, want in zip(
            gradients(trainer.gpt, is_tied).values(), RECORD.numbers[f"{state}/grad_summary"], strict=True
        ):
            i, g, scale = np.arange(g.size), g.flatten(), 1 if is_training else 1 / 512
            found = scale * np.array([np.linalg.norm(g), g @ np.cos(i), g @ np.sin(2 * i)])
            np.testing.assert_allclose(found, np.nan_to_num(want), rtol=0, atol=1e-8 * np.nan_to_num(want[0]))
        trainer.gpt.zero_grad()


def check_packing(m: types.ModuleType, folder: Path) -> None:
    cfg, cpu = RECORD.config(m, folder, **RUN), torch.device("cpu")
    lengths, families = [128] * 3 + [256] * 3 + [384] * 8, [f"pack.stage{k}" for k in (1, 2, 3, 4)]
    plan = m.plan_batches(cfg.train_files, lengths, 8, cfg, max_doc_len=64)
    batches = [[torch.stack(rows) for rows in zip(*b, strict=True)] for b in m.read_batches(plan, range(8), cfg, cpu)]
    for step, (inputs, targets) in enumerate(batches[:12]):
        for name, rows in dict(inputs=inputs, targets=targets).items():
            assert np.array_equal(rows, RECORD.numbers[f"{families[step // 3]}/{name}"][step % 3])
        for rank, tokens in enumerate(inputs):
            RECORD.compare_documents(tokens, f"{families[step // 3]}/cu_seqlens", step % 3, rank)
    RECORD.compare("pack.after_switch", inputs=batches[13][0], targets=batches[13][1])
    validation = list(m.read_batches(m.plan_data(cfg)["val"], [0], cfg, cpu))
    for name, rows in zip(("inputs", "targets"), zip(*(pair for [pair] in validation), strict=True), strict=True):
        RECORD.compare("pack.val", **{name: torch.stack(rows).view(2, 8, 512)})


def check_run(m: types.ModuleType, folder: Path, ranks=None) -> None:
    """Train from data to the last validation, after a warm-up, as one of any number of processes."""
    cfg, ranks, numbers = RECORD.config(m, folder, **RUN), ranks or m.Ranks(), RECORD.numbers
    trainer, plans, losses, validations = m.Trainer(cfg, ranks), m.plan_data(cfg), [], []
    check_schedules(m, folder, "run", RUN, 15)
    trainer.warm_up()
    load_parameters(trainer, is_tied=True)
    batches = m.read_batches(plans["train"], range(ranks.rank, 8, ranks.world_size), cfg, trainer.device)
    rest, step_optimizers = {}, m.step_optimizers

    def step_and_compare(optimizers, step: int) -> None:
        """Compare the norms of a step's own gradients, without what an even step left."""
        found = gradients(trainer.gpt, is_tied=step <= 9)
        norms = [np.linalg.norm(found[key] - rest.get(key, 0)) / 8 for key in ORDER]
        if ranks.world_size == 1:
            np.testing.assert_allclose(norms, np.nan_to_num(numbers["run/grad_norm"][step]), rtol=1e-8, atol=1e-10)
        step_optimizers(optimizers, step)
        waiting = {place(name)[0] for name, p in trainer.gpt.named_parameters() if p.grad is not None}
        rest.clear()
        rest.update({key: found[key] for key in waiting})

    with mock.patch.object(m, "step_optimizers", step_and_compare):
        for step in range(16):
            validations += [trainer.evaluate(step, plans["val"])] if step in numbers["run/val_steps"] else []
            if step < 15:
                losses.append(trainer.train_step(step, batch := next(batches)).item())
                rows = numbers[f"run/{step}/inputs"][ranks.rank :: ranks.world_size]
                assert np.array_equal(torch.stack([tokens for tokens, _ in batch]), rows)
                for key, x in public(dict(trainer.gpt.named_parameters()), 1.0).items():
                    want, entries = numbers[f"run/digest/{key}"][step], x.flat[numbers[f"run/indices/{key}"]]
                    if key != "embed.weight" or step >= 9:
                        found = [x.sum(), np.linalg.norm(x), *entries]
                        np.testing.assert_allclose(found, want, rtol=0, atol=1e-8 * want[1], err_msg=f"{step} {key}")
    RECORD.compare("run", train_loss_per_token=losses, val_loss=validations)


CHECKS = [check_schedules, check_optimizers, check_packing, check_states, check_run]


@pytest.mark.parametrize("check", CHECKS)
def test_numbers_are_those_of_the_public_record(check, tmp_path: Path):
    check(SCRIPT, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_any_number_of_processes_runs_the_same(size: int, tmp_path: Path):
    RECORD.run_in_processes(__name__, tmp_path, size)


# Replacements in the script, by the check that notices them
FAULTS = {
    check_schedules: {
        "weights of next tokens that do not fade": [("(stage + 1 - parts * step / cfg.scheduled_steps)", "1")],
    },
    check_optimizers: {
        "untied one update late": [("self.step - self.every <", "self.step - 2 * self.every <")],
        "decay of Adam at no update": [("(update * p > 0)", "(update * p >= 0)")],
        "decay of Adam on the wrong side": [("(update * p > 0)", "(update * p < 0)")],
        "one rate of decay": [("head_decay: Rate = 0.75", "head_decay: Rate = 0.025")],
        "NorMuon on the other axis": [('if "mlp" in self.name', 'if "mlp" not in self.name')],
        "fast scalars": [("scalar_beta2: Decay = 0.99", "scalar_beta2: Decay = 0.95")],
    },
    check_states: {
        "wrong layer of the skip": [('"......3...."', '"......2...."')],
        "key offset in short windows": [('attention == "L", value', 'attention == "S", value')],
        "key offset where keys are rotated": [("% (D // 2) >= D // 4", "% (D // 2) < D // 4")],
        "value embeddings without gates": [
            ("2 * self.gates(x, self.value_gate)", "2 * self.gates(x, self.value_gate) ** 0")
        ],
        "skip gate without its 2": [("weight * 2 * linear", "weight * linear")],
        "skip gate on another stream": [("linear(x0[:, : cfg.gate_inputs]", "linear(x[:, : cfg.gate_inputs]")],
        "next tokens across the end": [("shares = (t >= 0) * weights", "shares = torch.ones_like(t) * weights")],
        "no shift of the logits": [("= 5.0  # and that shift", "= 0.0  # and that shift")],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults])
def test_a_planted_fault_is_noticed(check, fault: str, tmp_path: Path):
    with pytest.raises(AssertionError):
        check(RECORD.faulty(FAULTS[check][fault]), tmp_path)


def test_every_parameter_has_the_optimizer_and_the_first_values_of_the_public_record(tmp_path: Path):
    """With weights 1, let a zero gradient show Muon's decay of rate 1.2 lr, then a gradient 1 all that Adam does."""
    slow, fast, first = (0.9, 0.99), (0.65, 0.95), dict(lambdas=[0.5, 1], skip_weights=[-1.5], resid_lambda=1.1)
    adam = {"embed|lm_head": (0.008, fast, 150), "value_embeds": (0.6, fast, 5), "x0_lambda": (0.04, fast, 0)}
    adam |= {"resid_lambda|lambdas|skip_weights|smear_lambda|backout_lambda": (0.04, slow, 0)}
    adam |= {"smear_gate": (8e-5, fast, 0), "skip_gate": (4e-4, fast, 0)}
    muon = {"qkv_w": 2, "attn.c_proj": 2, "c_fc": 2, "mlp.c_proj": 4, "gate": 1, "value_gate": 1}
    trainer = SCRIPT.Trainer(RECORD.config(SCRIPT, tmp_path, **SMALL), SCRIPT.Ranks())
    sizes = dict(qkv_w=(3 / 24) ** 0.5, c_fc=(0.75 / 24) ** 0.5)
    for name, p in trainer.gpt.named_parameters():
        kind = name.rpartition(".")[2]
        if p.ndim < 2:
            assert p.tolist() == pytest.approx(first.get(kind, 0.5 * (kind == "backout_lambda")))
        elif name in ("embed.weight", "lm_head"):
            assert p.std().item() == pytest.approx(0.005, rel=0.05)
        else:
            assert p.abs().max().item() == pytest.approx(sizes.get(kind, 0), rel=0.02)
        p.detach().fill_(1)
    for step, slope in (1, 0), (3, 1):
        for p in trainer.gpt.parameters():
            p.grad = torch.full_like(p, slope)
        SCRIPT.step_optimizers(trainer.optimizers, step)
        for name, p in trainer.gpt.named_parameters():
            ((rate, betas, decay),) = [v for k, v in adam.items() if set(k.split("|")) & set(name.split("."))] or [
                (0, 0, 0)
            ]
            if betas:
                change = (
                    rate * (1 - betas[1] ** 2) ** 0.5 / (1 - betas[0] ** 2) * (1 - betas[0]) / (1 - betas[1]) ** 0.5
                )
                change = slope * (change + rate**2 * 0.005 * decay)
            else:
                (factor,) = [v for k, v in muon.items() if name.endswith("." + k)]
                change = factor * 0.023 * 1.2 * 0.023
            if betas or not slope:
                found = (1 - p.detach().flatten()[[0, -1]]).tolist()
                assert found == pytest.approx([change] * 2, abs=1e-6 * rate + 1e-15), name


@pytest.mark.slow
def test_no_graph_is_compiled_after_the_warm_up(tmp_path: Path):
    """Expect one for each length of sequences, one of validation, and one for each shape of Muon's matrices."""
    assert RECORD.count_graphs(SCRIPT, tmp_path, RUN) == (3 + 1 + 3, 3 + 1 + 3)
