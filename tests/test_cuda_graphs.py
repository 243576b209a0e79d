"""What a CUDA graph captures and replays, shown on a CPU: a tape of operations stands in for the graph."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt
from conftest import GPT2, small
from train_gpt import CUDAGraphs, Ranks, Trainer, train_cycles

HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}


class Tape(TorchDispatchMode):
    """Record operations, and undo them. Replaying computes them again from the same tensors, into the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple] = []
        self.before: list[tuple] = []  # tensors that an operation has written to, and what they held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable:
            self.before += [(t, t.clone()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, result in self.operations:
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def record(tape: Tape, **options):
    with tape:
        yield
    for tensor, held in reversed(tape.before):  # a GPU computes nothing while it captures
        tensor.detach().copy_(held)


@pytest.mark.slow
def test_a_run_by_graphs_is_the_run_without(monkeypatch, corpus):
    """Every bit is the same in all stages, with one graph for each shape, and a graph reads nothing back."""
    tapes: list[Tape] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: tapes.append(Tape()) or tapes[-1])
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    cfg = small(GPT2, dtype="float64", train_files=f"{corpus}/long.bin", val_files=f"{corpus}/val_000000.bin")
    trainers = [Trainer(cfg, Ranks()) for _ in range(2)]
    trainers[1].run_add_gradients = CUDAGraphs(trainers[1].add_gradients)
    for trainer in trainers:
        inputs = trainer.loader.steps(train_cycles(train_gpt.train_batches(cfg), cfg))
        trainer.losses = [trainer.train_step(schedule, *next(inputs)) for schedule in cfg.step_schedules]
    assert torch.equal(*(torch.stack(trainer.losses) for trainer in trainers))
    assert all(map(torch.equal, *(trainer.state_dict().values() for trainer in trainers)))
    assert torch.equal(*(trainer.table.rows for trainer in trainers))
    shapes = {(s.seq_len, s.sampled_classes, len(s.mtp_weights), s.prefix_weight > 0) for s in cfg.step_schedules}
    assert len(tapes) == len(shapes) > 1
    names = {function.name().split("::")[1].split(".")[0] for tape in tapes for function, *_ in tape.operations}
    assert "mm" in names
    assert not names & HOST_READS
