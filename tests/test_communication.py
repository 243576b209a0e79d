"""The communication of a step: in what order, beside what compute, how often and how many bytes."""

import dataclasses
import gc
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import communication_worker
import train_gpt
from communication_worker import Network, own_share, repeat
from shards import write_shard
from test_world_size import finish, small_flags, start
from train_gpt import GPT, Hyperparameters, World

WORKER = Path(communication_worker.__file__)
GROUPS = 5  # two shapes of matrices; head, embeddings, scalars
KINDS = ("reduce_scatter", "all_gather")
# By bytes, as in the gpt2 preset: embeddings, MLPs, head, attention, scalars; so Adam's and Muon's groups alternate
LIKE_GPT2 = dict(vocab_size=500, eot_token=499)


def expected_notes() -> list[tuple[str, str, int]]:
    """A step that overlaps as much as it can: everything is launched as early and waited for as late as possible."""
    notes = [("launch", "reduce_scatter", k) for k in range(GROUPS)]
    for k in range(GROUPS):
        notes += [("wait", "reduce_scatter", k), ("update", "", k), ("launch", "all_gather", k)]
    return notes + [("wait", "all_gather", k) for k in range(GROUPS)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_step_launches_as_early_and_waits_as_late_as_it_can(monkeypatch, size):
    """On all ranks alike: all gradients leave before the first is waited for, the biggest first; updates leave before
    the next gradient is waited for; no update is waited for before all have left.

    The network sees to it that no buffer is in two collectives at a time, or read or written while it is in one.
    """
    cfg = train_gpt.parse_args(small_flags(dtype="float32", **LIKE_GPT2))
    for rank in (0, size - 1):
        gpt, optimizers = communication_worker.build(cfg, World(rank, size))
        for step in range(2):  # the second finds the buffers of the first
            communication_worker.set_gradients(gpt, seed=step)
            network = Network(own_share, repeat)
            with monkeypatch.context() as patch:
                network.attach(optimizers[0], patch.setattr)
                train_gpt.step_optimizers(optimizers)
            network.link.shutdown()
            assert network.notes == expected_notes()
            assert not network.under_way
            assert all(p.isfinite().all() for p in gpt.parameters()), "a result was used before it was there"
            groups = [(g["grads"].nbytes, type(o).__name__) for o in optimizers for g in o.param_groups]
            groups.sort(reverse=True)
            assert [owner for _, owner in groups] == ["Adam", "Muon", "Adam", "Muon", "Adam"]
            gradients, updates = ([network.sizes[kind, k] for k in range(GROUPS)] for kind in KINDS)
            assert [count for count, _ in gradients] == [count for count, _ in groups]
            assert [share for _, share in updates] == [share for _, share in gradients], "updates in another order"


def overlap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Seconds that are in an interval of both."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


@pytest.mark.slow
def test_communication_of_two_processes_hides_behind_compute(tmp_path):
    """Over a network on which a collective takes 0.1 s, with updates that take 0.2 s.

    In theory a step takes 1.2 s instead of 2.0, and 0.8 of the network's 1.0 s are hidden; 1.6 s and 0.4 s if only the
    reduce-scatters overlap, or only the all-gathers. Time that a busy machine adds hides as much as before.
    """
    flags = small_flags(dtype="float32", log_dir=tmp_path, **LIKE_GPT2)
    finish([start([WORKER, "2", "0.1", *flags])], timeout=120)
    for rank in range(2):
        measured = torch.load(tmp_path / f"rank{rank}of2.pt")
        assert measured["notes"] == expected_notes()
        assert measured["same"], "not bit for bit what the step gives without the slow network"
        busy, computed = measured["busy"], measured["computed"]
        communication, compute = (sum(end - start for start, end in spans) for spans in (busy, computed))
        assert communication >= 2 * GROUPS * 0.1
        assert compute >= GROUPS * 0.2
        assert overlap(busy, computed) > 0.65 * 2 * GROUPS * 0.1
        assert measured["seconds"] < 0.75 * (communication + compute)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """What is called from here on, with the bytes it is given: the collectives, and "backward"."""
    calls: list[tuple[str, int]] = []

    def reduce_scatter(result, tensor, async_op):
        calls.append(("reduce_scatter", tensor.nbytes))
        own_share(result, tensor, async_op)

    def all_gather(result, tensor, async_op):
        calls.append(("all_gather", result.nbytes))
        repeat(result, tensor, async_op)

    tensor_backward = torch.Tensor.backward

    def backward(loss):
        calls.append(("backward", 0))
        tensor_backward(loss)

    monkeypatch.setattr(train_gpt, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(train_gpt, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, async_op: calls.append(("all_reduce", tensor.nbytes)))
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    return calls


@pytest.mark.parametrize("own_sequences", [1, 3])
def test_a_step_communicates_once_however_many_sequences_a_rank_has(
    tiny: Hyperparameters, calls, own_sequences, tmp_path, monkeypatch
):
    """After the last of them. A whole run as the second of two processes sees it."""
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", torch.arange(2000).numpy() % 100)
    files = dict(train_files=f"{tmp_path}/train.bin", val_files=f"{tmp_path}/val.bin", log_dir=str(tmp_path))
    steps = dict(batch_tokens=2 * own_sequences * tiny.train_seq_len, num_iterations=2, val_loss_every=0)
    cfg = dataclasses.replace(tiny, **files, **steps)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    world = World(1, 2)
    try:
        plans, log = train_gpt.plan_data(cfg), train_gpt.RunLog(cfg, world, start=0)
        train_gpt.train(cfg, world, torch.device("cpu"), plans, log, None)
    finally:
        gc.unfreeze()
        gc.enable()

    updates = ["reduce_scatter"] * GROUPS + ["all_gather"] * GROUPS
    warm_up = 2 * (["backward"] * min(2, own_sequences) + updates) + ["all_reduce"]
    step = ["backward"] * own_sequences + ["all_reduce", *updates]
    agreement_on_start, validation = ["all_reduce"], ["all_reduce"]
    assert [kind for kind, _ in calls] == warm_up + agreement_on_start + 2 * step + validation
    first = len(warm_up) + len(agreement_on_start)
    assert calls[first + own_sequences] == ("all_reduce", 4), "the loss of a step is one number"
    assert calls[-1] == ("all_reduce", 16), "loss and tokens of the validation are two"


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@pytest.mark.parametrize("size", [2, 3, 8])
def test_bytes_of_a_step_are_those_of_gradients_and_updates_and_little_padding(calls, size):
    """Of the gpt2 preset, by the shapes of its parameters; a rank sends and receives (size - 1) / size of them.

    Gradients go in the precision of their parameter, as does what Adam updates; what Muon updates goes in bf16.
    """
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda")  # in the precision that it has there
    with torch.device("meta"):
        gpt = GPT(cfg)
        shapes = {name: (p.shape, p.itemsize) for name, p in gpt.named_parameters()}
        optimizers = train_gpt.build_optimizers(gpt, cfg, World(size - 1, size), train_gpt.zeropower_via_newtonschulz5)
    for p in gpt.parameters():
        p.grad = torch.empty_like(p)
    train_gpt.step_optimizers(optimizers)

    gradients, updates, sent = 0, 0, Counter()
    matrices: Counter[tuple[int, ...]] = Counter()
    flat: Counter[tuple[str, int]] = Counter()
    for name, (shape, itemsize) in shapes.items():
        is_muons = name.startswith("blocks.") and len(shape) >= 2
        gradients += math.prod(shape) * itemsize
        updates += math.prod(shape) * (2 if is_muons else itemsize)
        if is_muons:
            matrices[tuple(sorted(shape[-2:]))] += math.prod(shape[:-2])
        else:
            kind = "scalars" if len(shape) < 2 else "head" if "lm_head" in name else "embeddings"
            flat[kind, itemsize] += up(math.prod(shape), 16)
    for (rows, cols), count in matrices.items():
        sent["reduce_scatter", up(count, size) * rows * cols * 4] += 1
        sent["all_gather", up(count, size) * rows * cols * 2] += 1
    for (_, itemsize), count in flat.items():
        for kind in KINDS:
            sent[kind, up(count, size) * itemsize] += 1
    assert Counter(calls) == sent
    assert len(calls) == 2 * GROUPS
    # on 8 ranks the 44 matrices of attention are 48
    assert gradients + updates <= sum(count for _, count in calls) < 1.015 * (gradients + updates)
