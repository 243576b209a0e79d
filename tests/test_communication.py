"""The communication of a step: when, beside what compute, through which buffers and how many bytes."""

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from test_world_size import SMALL
from train_gpt import GPT, Ranks

# By bytes, as in the gpt2 preset: embeddings, MLPs, head, attention, scalars; so Adam's and Muon's groups alternate
LIKE_GPT2 = train_gpt.parse_args([*SMALL, "--dtype", "float32", "--vocab_size", "500", "--eot_token", "499"])


def shared(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors without gaps have bytes in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class Network:
    """Carry out one collective after the other, for one of several ranks, and measure by a clock of its own.

    A collective takes one unit of time, an update two.
    """

    def __init__(self, monkeypatch, ranks: Ranks, transfer: type):
        self.ranks, self.under_way, self.events, self.bytes = ranks, [], [], Counter()
        self.now, self.free = 0, 0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        for kind in ("reduce_scatter", "all_gather"):
            monkeypatch.setattr(train_gpt, kind, lambda *args, kind=kind, **_: self.launch(transfer, kind, *args))

    def launch(self, transfer: type, kind: str, result: Tensor, tensor: Tensor):
        self.events.append(kind)
        self.bytes[kind] += max(result.nbytes, tensor.nbytes)
        self.free = max(self.now, self.free) + 1
        return transfer(network=self, kind=kind, result=result, tensor=tensor, wait=lambda: None, arrival=self.free)

    def compute(self, update, *args) -> None:
        self.events.append("update")
        self.now += 2
        update(*args)


class Transfer:
    """Stand in for a dist.Work: the result is NaN until `wait`, and the input has to stay as it is."""

    def __init__(self, network: Network, kind: str, result: Tensor, tensor: Tensor, arrival: int, **_):
        self.network, self.kind, self.result, self.tensor, self.sent = network, kind, result, tensor, tensor.clone()
        self.arrival = arrival
        for other in network.under_way:
            for a, b in (self, other), (other, self):
                assert not shared(a.result, b.result), f"{kind} writes to the result of one under way"
                assert not shared(a.result, b.tensor), f"{kind} shares a buffer with one under way"
        network.under_way.append(self)
        result.fill_(math.nan)
        if kind == "all_gather":  # may be in place
            tensor.copy_(self.sent)

    def wait(self) -> None:
        network, result, (rank, size, *_) = self.network, self.result, self.network.ranks
        missing = result.isnan().sum() + (self.tensor.numel() if shared(result, self.tensor) else 0)
        assert torch.equal(self.tensor, self.sent), f"the input of {self.kind} was written to while it was under way"
        assert missing == result.numel(), f"the result of {self.kind} was written to before it arrived"
        if self.kind == "reduce_scatter":  # the others have no gradients
            result.copy_(self.sent.unflatten(0, (size, -1))[rank])
        else:  # the others update theirs as we do
            result.unflatten(0, (size, -1)).copy_(self.sent)
        network.now = max(network.now, self.arrival)
        network.under_way.remove(self)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3), (0, 8), (7, 8)])
def test_buffers_are_safe_and_communication_hides_behind_compute(monkeypatch, rank, size):
    """Of a step's 20 units of time 8 are hidden; they are 4 if only gradients, or only updates, travel beside compute.

    The second step finds the buffers of the first.
    """
    network, gpt = Network(monkeypatch, Ranks(rank, size), Transfer), GPT(train_gpt.resolve(LIKE_GPT2))
    optimizers = train_gpt.build_optimizers(gpt, network.ranks)
    for optimizer in optimizers:
        optimizer.update_shard = lambda *args, update=optimizer.update_shard: network.compute(update, *args)
    for step in range(2):
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        train_gpt.step_optimizers(optimizers, step)
        assert not network.under_way
        assert all(p.isfinite().all() for p in gpt.parameters()), "a result was used before it was there"
        groups = len(optimizers)
        assert Counter(network.events) == dict(reduce_scatter=groups, update=groups, all_gather=groups)
        assert network.events.index("update") == groups, "gradients leave before the first update"
        assert network.now - 12 * step <= 13
        network.events.clear()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_bytes_of_a_step_are_those_of_gradients_and_updates_and_little_padding(monkeypatch, size):
    """In the gpt2 preset: on 8 ranks 44 matrices of attention are 48. Muon's updates travel in bf16."""
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda", dtype="bfloat16", compile=False)
    network = Network(monkeypatch, Ranks(size - 1, size), SimpleNamespace)
    with torch.device("meta"):
        gpt = GPT(cfg)
        optimizers = train_gpt.build_optimizers(gpt, network.ranks)
    gradients, updates = 0, 0
    for name, p in gpt.named_parameters():
        p.grad = torch.empty_like(p)
        gradients += p.nbytes
        updates += p.nbytes if "blocks" not in name or p.ndim < 2 else 2 * p.numel()
    train_gpt.step_optimizers(optimizers, 0)
    assert gradients <= network.bytes["reduce_scatter"] < 1.015 * gradients
    assert updates <= network.bytes["all_gather"] < 1.015 * updates
