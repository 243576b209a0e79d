"""Muon and Adam against plain references and torch.optim's own, their groups, and what travels in a step, and when."""

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import train_gpt
from test_world_size import SMALL
from train_gpt import GPT, Adam, Hyperparameters, Muon, Ranks, build_optimizers, lr_multiplier, step_optimizers

# Groups of one shape: a batch of three and a square matrix; tall and wide ones; a tall one alone
MUON_GROUPS = [[(3, 16, 16), (16, 16)], [(3, 24, 16), (16, 24)], [(64, 16)]]
# One element, less than, exactly and more than the alignment; 2-D; a batch
ADAM_GROUP = [(2,), (1,), (16,), (17,), (37, 11), (5, 3, 7), (128, 9)]


def config(sequences: int, dtype: str) -> Hyperparameters:
    changes = dict(train_seq_len=64, batch_tokens=64 * sequences, adam_beta1=0.8, adam_beta2=0.95, adam_eps=0.01)
    return dataclasses.replace(train_gpt.PRESETS["nano"], **changes, dtype=dtype)


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    values = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return {str(i): nn.Parameter(value) for i, value in enumerate(values)}


def set_gradients(params: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Draw gradients of changing size, the same for equal shapes and steps, whatever the precision."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params.values():
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10 ** (step % 3 - 1)
        p.grad = (grad * factor).to(p.dtype)


def reference_update(grad: Tensor) -> Tensor:
    """Apply Newton-Schulz to each matrix, term by term, without a transposition."""
    updates = []
    for x in grad.view(-1, *grad.shape[-2:]):
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            xxx = x @ x.T @ x
            x = 3.4445 * x - 4.7750 * xxx + 2.0315 * (xxx @ x.T @ x)
        updates.append(max(1, x.size(0) / x.size(1)) ** 0.5 * x)
    return torch.stack(updates).view_as(grad)


@pytest.mark.parametrize(("shapes", "sequences"), list(zip(MUON_GROUPS, (1, 12, 3), strict=True)), ids=str)
def test_muon_equals_a_reference_that_takes_one_matrix_at_a_time(shapes: list, sequences: int):
    params = parameters(shapes)
    expected = [p.detach().clone() for p in params.values()]
    momentum_buffers = [torch.zeros_like(p) for p in expected]
    muon = Muon(params, 0.05, config(sequences, "float64"), Ranks())
    for step in range(6):
        lr, momentum = 0.05 * lr_multiplier(step, muon.cfg), train_gpt.muon_momentum(step, muon.cfg)
        set_gradients(params, step, factor=sequences)
        grads = [p.grad.clone() for p in params.values()]
        step_optimizers([muon], step)
        for p, grad, m, want in zip(params.values(), grads, momentum_buffers, expected, strict=True):
            m.mul_(momentum).add_((1 - momentum) * grad / sequences)
            want -= lr * reference_update(momentum * m + (1 - momentum) * grad / sequences)
            torch.testing.assert_close(p.detach(), want, rtol=0, atol=1e-11)
            assert torch.equal(p.grad, grad), "the gradients are left alone"


@pytest.mark.parametrize("shapes", [[(64, 96), (96, 64)], [(256, 64)]], ids=str)
def test_muon_in_bf16_agrees_with_torch(shapes: list):
    """To 5%: bf16 rounds differently when matrices are one stack, and torch normalizes in bf16."""
    params, others = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    start = [p.detach().clone() for p in params.values()]
    options = dict(lr=0.02, weight_decay=0.0, momentum=0.9, nesterov=True, ns_steps=5, adjust_lr_fn="original")
    theirs = torch.optim.Muon(others.values(), **options)
    ours = Muon(params, 0.02, config(1, "bfloat16"), Ranks())
    for step in range(6):
        set_gradients(params, step)
        set_gradients(others, step)
        step_optimizers([ours], step)
        theirs.step()
    for p, other, before in zip(params.values(), others.values(), start, strict=True):
        assert (p - other).norm() < 0.05 * (other - before).norm()


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_adam_equals_torch(dtype: torch.dtype, sequences: int):
    """Sizes that are no multiple of the alignment, and learning rates that change."""
    params, others = parameters(ADAM_GROUP, dtype), parameters(ADAM_GROUP, dtype)
    ours = Adam(params, 0.1, config(sequences, "float32"), Ranks())
    # fused: bf16 parameters with arithmetic in fp32 in between, as ours. The others: another implementation than ours
    options = dict(lr=0.1, betas=(0.8, 0.95), eps=0.01, fused=dtype == torch.bfloat16, foreach=False)
    theirs = torch.optim.Adam(others.values(), **options)
    limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 0}[dtype]
    for step in range(6):
        theirs.param_groups[0]["lr"] = 0.1 * lr_multiplier(step, ours.cfg)
        set_gradients(params, step, factor=sequences)
        set_gradients(others, step)
        step_optimizers([ours], step)
        theirs.step()
        moments = [ours.pieces(ours.state[kind]) for kind in ours.moments]
        for p, other, *pieces in zip(params.values(), others.values(), *moments, strict=True):
            torch.testing.assert_close(p, other, rtol=limit, atol=limit)
            for kind, piece in zip(ours.moments, pieces, strict=True):
                torch.testing.assert_close(piece.view_as(p), theirs.state[other][kind], rtol=limit, atol=limit)


def test_adams_parameters_are_aligned():
    params = parameters([(7, 5), (3, 5), (3,)])
    Adam(params, 0.1, config(1, "float64"), Ranks())
    assert [p.storage_offset() for p in params.values()] == [0, 48, 64], "multiples of 16 elements"


@pytest.fixture
def gpt(tiny) -> GPT:
    lrs = dict(muon_lr=0.1, head_lr=0.2, embed_lr=0.3, scalar_lr=0.4)
    return GPT(dataclasses.replace(tiny, **lrs, attention_layout="L-SL"))


def test_every_parameter_is_in_one_group_with_its_learning_rate(gpt: GPT):
    optimizers = build_optimizers(gpt, Ranks())
    found = [(name, type(o), o.lr, o.initial_lr) for o in optimizers for name in o.name.split("+")]
    assert [id(gpt.get_parameter(name)) for name, *_ in found] == [id(p) for o in optimizers for p in o.params]
    lrs, expected = dict(lm_head=0.2, embed=0.3, lambdas=0.4, skip=0.4), []
    for name, _ in gpt.named_parameters():
        lr = next((lr for part, lr in lrs.items() if part in name), 0.1)
        expected.append((name, Muon if lr == 0.1 else Adam, lr, lr))
    assert sorted(found, key=str) == sorted(expected, key=str)
    sizes = [o.grads.nbytes for o in optimizers]
    assert sizes == sorted(sizes, reverse=True), "the largest hides the others' communication"
    assert [o.grads.shape[1:] for o in optimizers if isinstance(o, Muon)] == [(32, 128), (32, 32)], "one per shape"


@pytest.mark.parametrize("name", "extra blocks.0.gate blocks.1.attn_lambdas bigram_embed.c_proj embed.lambdas".split())
def test_a_parameter_without_exactly_one_group_is_refused_by_name(gpt: GPT, name: str):
    """No group claims the first three; two claim the others."""
    module, _, last = name.rpartition(".")
    gpt.get_submodule(module).register_parameter(last, nn.Parameter(torch.zeros(3, 3)))
    with pytest.raises(ValueError, match=rf"exactly one group in build_optimizers: {name}$"):
        build_optimizers(gpt, Ranks())


# ---- Communication: when, beside what compute, through which buffers, how many bytes ---------------------------------
# By bytes, as in the gpt2 preset: embeddings, MLPs, head, attention, scalars; so Adam's and Muon's groups alternate
LIKE_GPT2 = train_gpt.parse_args([*SMALL, "--dtype", "float32", "--vocab_size", "500", "--eot_token", "499"])


def shared(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors without gaps have bytes in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class Network:
    """Carry out one collective after the other, for one of several ranks. One takes a unit of time, an update two."""

    def __init__(self, monkeypatch, ranks: Ranks, transfer: type):
        self.ranks, self.under_way, self.events, self.bytes, self.now, self.free = ranks, [], [], Counter(), 0, 0
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


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 3), (7, 8)])
def test_buffers_are_safe_and_communication_hides_behind_compute(monkeypatch, rank, size):
    """Of a step's 20 units of time 8 are hidden; they are 4 if only gradients, or only updates, travel beside compute.

    The second step finds the buffers of the first.
    """
    network, gpt = Network(monkeypatch, Ranks(rank, size), Transfer), GPT(train_gpt.resolve(LIKE_GPT2))
    optimizers = build_optimizers(gpt, network.ranks)
    for optimizer in optimizers:
        optimizer.update_shard = lambda *args, update=optimizer.update_shard: network.compute(update, *args)
    for step in range(2):
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        step_optimizers(optimizers, step)
        assert not network.under_way
        assert all(p.isfinite().all() for p in gpt.parameters()), "a result was used before it was there"
        groups = len(optimizers)
        assert Counter(network.events) == dict(reduce_scatter=groups, update=groups, all_gather=groups)
        assert network.events.index("update") == groups, "gradients leave before the first update"
        assert network.now - 12 * step <= 13
        network.events.clear()


@pytest.mark.parametrize("size", [3, 8])
def test_bytes_of_a_step_are_those_of_gradients_and_updates_and_little_padding(monkeypatch, size):
    """In the gpt2 preset: on 8 ranks 44 matrices of attention are 48. Muon's updates travel in bf16."""
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda", dtype="bfloat16", compile=False)
    network = Network(monkeypatch, Ranks(size - 1, size), SimpleNamespace)
    with torch.device("meta"):
        gpt = GPT(cfg)
        optimizers = build_optimizers(gpt, network.ranks)
    gradients, updates = 0, 0
    for name, p in gpt.named_parameters():
        p.grad = torch.empty_like(p)
        gradients += p.nbytes
        updates += p.nbytes if "blocks" not in name or p.ndim < 2 else 2 * p.numel()
    step_optimizers(optimizers, 0)
    assert gradients <= network.bytes["reduce_scatter"] < 1.015 * gradients
    assert updates <= network.bytes["all_gather"] < 1.015 * updates
