"""Milestones equal public records 83 and 89: schedules, losses, gradients, steps and a run, to 1e-8 or better.

The slow tier holds the script of record 89; that of 83 is for `./test.sh -m proof`. test_record92.py holds the root. No
number has FP8.
"""

import dataclasses
import re
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import public_records
from public_records import PublicRecord, digest, norm, prefix_weights, project
from world_worker import Run

pytestmark = pytest.mark.slow
RECORDS = ["record_89", pytest.param("record_83", marks=pytest.mark.proof)]
SIZES = [("record_83", 8), ("record_89", 1), ("record_89", 8)]


@pytest.fixture(params=RECORDS)
def record(request) -> PublicRecord:
    return getattr(public_records, request.param)()


def test_schedules(record, tmp_path: Path):
    """At every step of the whole run."""
    found, numbers = record.schedules(tmp_path), record.numbers
    wants = {k.partition("/")[2]: want for k, want in numbers.items() if k.startswith("schedule/")}
    wants = {public_records.NAMES.get(name, name): want for name, want in wants.items()}
    wants = {name: want for name, want in wants.items() if name in found}
    assert len(wants) > 8
    for name, want in wants.items():
        n = min(len(want), len(found[name]))
        want = want[:n, : len(found[name][0])] if name == "rotary_frequencies" else want[:n]  # then zeros
        np.testing.assert_allclose(found[name][:n], want, rtol=1e-12, atol=1e-15, err_msg=name)


def test_first_values(record, tmp_path: Path):
    for name, p in record.script.GPT(record.config(tmp_path, **record.small)).named_parameters():
        if p.ndim < 2:
            first = np.broadcast_to(record.first.get(record.place(name)[0], 0), p.shape)
            np.testing.assert_allclose(p.detach(), first, rtol=1e-6, err_msg=name)
        else:
            (rms,) = [v for k, v in public_records.STD.items() if f".{k}." in f".{name}."] or [0]
            assert p.square().mean().sqrt().item() == pytest.approx(rms, rel=0.05), name


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_any_number_of_processes_runs_the_same(tmp_path: Path, name: str, size: int):
    getattr(public_records, name)().config(tmp_path)
    run = Run([[name, tmp_path]] * size, tmp_path / "run", target=take_run)
    assert run.wait(timeout=400) == [0] * size, run.text("err")


def take_run(place: list[int], name: str, folder: str) -> None:
    """Train from data to the last validation, as one of the processes of a run.

    Compare tokens and loss of every step, by their public names, parameters after it, and the validations. A single
    process keeps gradients after an even step, as Adam waits: compare the norms. Eight do without the warm-up.
    """
    record = getattr(public_records, name)()
    m, cfg = record.script, record.config(Path(folder), **record.small | record.run)
    ranks, validations, losses, compared = m.Ranks(*place), [], [], 0
    if ranks.world_size > 1:
        m.init_distributed()
    trainer, plans, own = m.Trainer(cfg, ranks), m.plan_data(cfg), range(ranks.rank, 8, ranks.world_size)
    if ranks.world_size == 1:
        trainer.warm_up()
    record.load_parameters(trainer, is_tied=True)
    for step, batch in enumerate(m.read_batches(plans["train"], own, cfg, trainer.device)):
        validations += [trainer.evaluate(step, plans["val"])] if step in record.numbers["run/val_steps"] else []
        inputs = torch.stack([row for row, _ in batch])
        assert np.array_equal(inputs, record.numbers[f"run/{step}/inputs"][own])
        losses.append(trainer.train_step(step, batch).item())
        if ranks.world_size == 1 and step % 2 == 0:
            found = {i: norm(g) / 8 for i, g in enumerate(record.gradients(trainer.gpt).values()) if g.any()}
            record.expect("run/grad_norm", [*found.values()], (step, [*found]))
        arrays = record.public(trainer.gpt, 1.0)
        for key in [key for key in arrays if f"run/digest/{key}" in record.numbers]:
            x, want = arrays[key], record.numbers[f"run/digest/{key}"][step]
            found = [x.sum(), norm(x), *x.flat[record.numbers[f"run/indices/{key}"]]]
            record.expect(f"run/digest/{key}", found, step, want[1])
            compared += 1
    assert compared >= 3 * len(record.params)
    validations.append(trainer.evaluate(cfg.num_iterations, plans["val"]))
    record.expect("run/val_loss", validations)
    record.expect("run/loss_per_token", losses)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_packing(record, tmp_path: Path):
    """Compare the batches of three steps of each stage with their bigrams, those of the run, real hashes."""
    m, changes = record.script, dict(vocab_size=200, eot_token=199, bigram_rows=1280)
    cfg = record.config(tmp_path, **record.small | changes)
    real = types.SimpleNamespace(cfg=dataclasses.replace(cfg, **record.hashes))
    tokens = record.tokens("hash/inputs").int()
    assert np.array_equal(m.GPT.bigram_hashes(real, tokens), record.numbers["hash/rows"])
    (key,) = {"hash/signs", "hash/sign_rows"} & {*record.numbers}
    assert np.array_equal(m.GPT.sign_hashes(real, tokens), record.numbers[key])
    stages = [record.numbers[f"pack/stage{i}/inputs"] for i in (1, 2, 3)]
    lengths = [inputs.shape[-1] for inputs in stages for _ in range(3)]
    cuts, pattern = (28,) * 3 + (64,) * 6, f"{tmp_path}/pack_*.bin"
    plan = m.plan_batches(pattern, lengths, 8, cfg, cuts)
    for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
        for rank, (tokens, targets) in enumerate(batch):
            hashes = m.GPT.bigram_hashes(types.SimpleNamespace(cfg=cfg), tokens)
            for name, found in dict(inputs=tokens, targets=targets, bigram=hashes).items():
                key = f"pack/stage{step // 3 + 1}/{name}"
                assert np.array_equal(found, record.numbers[key][step % 3, rank]), key
    assert step == 8
    cfg = record.config(tmp_path, **record.small | record.run)
    plan = m.plan_data(cfg)["train"]
    for step, batch in enumerate(m.read_batches(plan, range(8), cfg, torch.device("cpu"))):
        inputs = torch.stack([inputs for inputs, _ in batch])
        assert np.array_equal(inputs, record.numbers[f"run/{step}/inputs"])


def compare_gradients(record: PublicRecord, gpt: nn.Module, row: int) -> None:
    """Compare all norms, small gradients whole, and samples and sums of large ones, with those of a row."""
    for i, (key, g) in enumerate(record.gradients(gpt).items()):
        found = {f"grad/{key}": g}
        if f"grad/{key}" not in record.numbers:
            found = {f"grad/{key}:rows": project(g.sum(-1)), f"grad/{key}:cols": project(g.sum(-2))}
            found[f"grad/{key}:sample"] = g.flat[7919 * np.arange(16) % g.size]
        scale = record.numbers["grad_norm"][row, i]
        record.expect("grad_norm", norm(g), (row, i), scale)
        for name, value in found.items():
            record.expect(name, value, row, scale)


def losses_of_states(record: PublicRecord, trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of states and their losses: sums, in training, and else means."""
    for state, step in record.states.items():
        kind = "val" if state.startswith("val") else "train"
        kind += "1" * (f"{kind}1/inputs" in record.numbers and state == "s1")  # with shorter documents
        record.load_parameters(trainer, is_tied=step <= record.states["s3_tied"])
        trainer.set_schedules(step)
        tokens, targets = (record.tokens(f"{kind}/{name}") for name in ("inputs", "targets"))
        weights = torch.ones(1).double() if kind == "val" else trainer.weights
        if kind != "val" and hasattr(record.script, "next_targets"):
            prefixes = trainer.prefixes if prefix_weights(record.script, step, trainer.cfg) else None
            num_next = len(record.script.mtp_weights(step, trainer.cfg))
            targets = record.script.next_targets(targets, num_next, prefixes)
        loss = trainer.gpt(tokens.int(), targets, trainer.windows, weights)
        yield state, loss / len(tokens) if kind == "val" else loss
        trainer.gpt.zero_grad()


def made_by(net: nn.Module, inputs: tuple, _) -> np.ndarray:
    """Return all factors that a net has made (n, T): it writes them into its last argument."""
    return torch.cat([inputs[-1][i][kind] for kind, i in net.keys])[..., 0].detach().numpy()


def test_states(record, tmp_path: Path):
    """Compare losses, also of each token, the stream between layers, what nets make, and every gradient."""
    outputs, made, losses, row = [], [], [], 0
    trainer = record.trainer(tmp_path, **record.small)
    for module in trainer.gpt.modules():
        if type(module).__name__ == "Block":
            module.register_forward_hook(lambda *result: outputs.append(result[2].detach().numpy()))
        if "w2" in dict(module.named_parameters(recurse=False)):
            module.register_forward_hook(lambda *call: made.append(made_by(*call)))
    plain = record.script.softcapped_cross_entropy

    def with_losses(*inputs):
        losses.append((result := plain(*inputs))[0])
        return result

    with mock.patch.object(record.script, "softcapped_cross_entropy", with_losses):
        for case, (state, loss) in enumerate(losses_of_states(record, trainer)):
            record.expect("loss", loss.item(), case)
            record.expect(f"token_loss/{state}", torch.cat(losses), ..., 1)
            record.expect(record.nets, np.concatenate(made).T[[0, 384, 767]], case, 1)
            record.expect("block_rms", [np.sqrt(np.square(x).mean()) for x in outputs], (case, slice(11)))
            record.expect("block_sample", [x[[0, 384, 767], :8] for x in outputs], (case, slice(11)), 1)
            for kept in outputs, made, losses:
                kept.clear()
            if not state.startswith("val"):
                loss.backward()
                compare_gradients(record, trainer.gpt, row)
                row += 1


def take_step(record: PublicRecord, trainer, step: int, shown: int) -> None:
    """Step the optimizers with learning rate and momentum of step `shown`."""
    m, cfg = record.script, trainer.cfg
    lr, momentum = m.lr_multiplier(shown, cfg), m.muon_momentum(shown, cfg)
    with mock.patch.multiple(m, lr_multiplier=lambda *_: lr, muon_momentum=lambda *_: momentum):
        m.step_optimizers(trainer.optimizers, step)


def set_values(tensors: list[Tensor], values: np.ndarray) -> None:
    """Write values, in order, to tensors that may have more at the end: those are zero."""
    values = torch.as_tensor(values.astype(np.float64)).flatten()
    for tensor in tensors:
        tensor.detach().zero_().view(-1)[: len(values)] = values[: tensor.numel()]
        values = values[tensor.numel() :]
    assert not len(values)


@pytest.mark.parametrize("begin", ["first", "across"])
def test_optimizers(record, tmp_path: Path, begin: str):
    """Take six steps with given gradients, from the first one on or across the untying.

    Moments are zero before, and Adam counts from 1.
    """
    first = 0 if begin == "first" else record.across
    cfg = record.config(tmp_path, **record.small | record.steps)
    cfg = dataclasses.replace(cfg, tied_frac=cfg.tied_frac - first / cfg.scheduled_steps)
    trainer = record.script.Trainer(cfg, record.script.Ranks())
    params = dict(trainer.gpt.named_parameters())
    members = {key: [p for n, p in params.items() if re.fullmatch(kind, n)] for key, kind in record.members.items()}
    public = {name: record.numbers[name] for key in members for name in (f"opt/init/{key}", f"opt/grad/{key}")}
    for key, ours in members.items():
        if ours[0].shape[::-1] == public[f"opt/init/{key}"].shape != ours[0].shape:  # ours is transposed
            public |= {name: x.swapaxes(-1, -2) for name, x in public.items() if name.endswith(f"/{key}")}
        set_values(ours, public[f"opt/init/{key}"])
    for t in range(6):
        grads = {p: torch.zeros_like(p) for p in params.values()}
        for key, ours in members.items():
            set_values([grads[p] for p in ours], public[f"opt/grad/{key}"][t])
        for p, grad in grads.items():
            p.grad = grad if p.grad is None else p.grad + grad
        take_step(record, trainer, t, first + t)
        for key, ours in members.items():
            init, values = public[f"opt/init/{key}"], np.concatenate([p.detach().numpy().ravel() for p in ours])
            values = values[: init.size].reshape(init.shape)
            values = values if init.flags.c_contiguous else values.T
            key = f"opt/from{first}/{key}"
            record.expect(key, digest(values), t, record.numbers[key][t, 1])


def test_precision(record, tmp_path: Path):
    """Check how parameters and moments are stored in bf16, and which biases then can move.

    From 2.5 on, half a step of bf16 is larger than the update of a bias. nano's moments are stored as what they are
    of: its tables would step 5 times slower with moments in fp32.
    """
    for dtype in "bfloat16", "float32":
        trainer = record.trainer(tmp_path, **record.small | dict(dtype=dtype))
        params = dict(trainer.gpt.named_parameters())
        biases = {p: p.detach().clone() for name, p in params.items() if name.endswith("b2")}
        for name, p in params.items():
            (kind,) = (kind for kind, names in public_records.STORED.items() if re.fullmatch(names, name))
            assert p.dtype == getattr(torch, kind if dtype == "bfloat16" else dtype), name
        assert {m.dtype for optimizer in trainer.optimizers for m in optimizer.state.values()} == {torch.float32}
        for step in range(8):
            for p in params.values():
                p.grad = torch.ones_like(p)
            record.script.step_optimizers([opt for opt in trainer.optimizers if "exp_avg" in opt.state], step)
        for p, first in biases.items():
            large = first.abs() >= 2.5
            assert large.any()
            assert (p != first)[first == 0].all()
            assert (p != first)[large].all() if dtype == "float32" else (p == first)[large].all()
    nano = dataclasses.replace(record.script.PRESETS["nano"], dtype="bfloat16", device="cpu", cpu_threads=0)
    for optimizer in record.script.Trainer(record.script.resolve(nano), record.script.Ranks()).optimizers:
        if "exp_avg" in optimizer.state:
            assert {m.dtype for m in optimizer.state.values()} == {optimizer.param_buffer.dtype}
