"""Muon and Adam against plain references and torch.optim's own, their groups, and what travels in a step, and when."""

import dataclasses
import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, Adam, Group, Muon, Ranks, Trainer, UserError, build_optimizers, step_optimizers

# Names and shapes of groups of one shape: attention, MLPs, attention of another width than the model's: tall matrices
ATTENTION = {"0.attn.v_w": (16, 16), "0.attn.c_proj": (16, 16), "1.attn.v_w": (16, 16)}
PAIRS = {"0.attn.qk_w": (6, 8, 16), "1.attn.qk_w": (6, 8, 16)}
MLPS = {"0.mlp.c_fc": (16, 64), "0.mlp.c_proj": (16, 64), "1.mlp.c_fc": (16, 64)}
WIDE = {"0.attn.qk_w": (3, 24, 16), "1.attn.qk_w": (3, 24, 16)}


def config(sequences: int, dtype: str, **changes) -> train_gpt.Hyperparameters:
    small = dict(
        train_seq_len=64, batch_tokens=64 * sequences, adam_eps=0.01, adam_every=1, adam_fp32=True, muon_lr=0.05
    )
    return dataclasses.replace(train_gpt.PRESETS["nano"], **small | changes, dtype=dtype)


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return {name: nn.Parameter(draw(shape).to(dtype)) for name, shape in shapes.items()}


def add_gradients(params: dict[str, nn.Parameter], step: int, factor: float = 1.0) -> list[Tensor]:
    """Add gradients of changing size, the same for equal shapes and steps, whatever the precision; return the sums."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params.values():
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10 ** (step % 3 - 1)
        grad = (grad * factor).to(p.dtype)
        p.grad = grad if p.grad is None else p.grad + grad
    return [p.grad.clone() for p in params.values()]


def reference_update(grad: Tensor, squares: Tensor, mean_dim: int, beta2: float) -> Tensor:
    """Apply Newton-Schulz and NorMuon to each matrix, term by term."""
    updates = []
    for x, square in zip(grad.view(-1, *grad.shape[-2:]), squares.view(-1, *grad.shape[-2:]), strict=True):
        x = x / (1.02 * x.norm() + 1e-6)
        for a, b, c in train_gpt.POLAR_EXPRESS:
            xxx = x @ x.T @ x
            x = a * x + b * xxx + c * (xxx @ x.T @ x)
        mean = x.square().mean(mean_dim, keepdim=True)
        even = x / square.mul_(beta2).add_((1 - beta2) * mean).sqrt()
        updates.append(even * x.norm() / even.norm())
    return torch.stack(updates).view_as(grad)


@pytest.mark.parametrize(
    ("shapes", "sequences", "decay", "mean_dim"),
    [(ATTENTION, 1, 1.2, -1), (MLPS, 12, 1.2, -2), (MLPS, 1, 0.0, -2), (WIDE, 3, 0.0, -1), (PAIRS, 3, 1.2, -2)],
    ids=["attention", "MLPs", "plain", "wide", "pairs"],
)
def test_muon_equals_a_reference_that_takes_one_matrix_at_a_time(shapes, sequences, decay, mean_dim):
    params, cfg = parameters(shapes), config(sequences, "float64")
    groups = [Group("Muon", "", lr=1.0 + i, decay=decay, beta1=0.0, beta2=0.9) for i in range(len(params))]
    expected = [p.detach().clone() for p in params.values()]
    momentum_buffers, squares = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    muon = Muon(params, groups, cfg, Ranks())
    for step in range(6):
        lr, momentum = 0.05 * train_gpt.lr_multiplier(step, cfg), train_gpt.muon_momentum(step, cfg)
        grads = add_gradients(params, step, factor=sequences)
        step_optimizers([muon], step)
        lists = zip(params.values(), grads, momentum_buffers, squares, expected, groups, strict=True)
        for p, grad, m, square, want, group in lists:
            share = (1 - momentum) * grad / sequences
            m.mul_(momentum).add_(share)
            update = reference_update(momentum * m + share, square, mean_dim, 0.9)
            want -= lr * group.lr * (update + torch.where(update * want >= 0, decay * lr * want, 0.0))
            torch.testing.assert_close(p.detach(), want, rtol=0, atol=1e-10)
            assert p.grad is None, "the next step adds to nothing"


@pytest.mark.parametrize(("every", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.bfloat16)])
def test_adam_steps_every_other_time_and_decays_cautiously(every: int, dtype: torch.dtype):
    cfg = config(2, "float64", adam_every=every, num_iterations=18)
    params, lr = parameters({"table": (5, 7), "other": (5, 7)}, dtype), 0.3
    want, m, v = [p.detach().double() for p in params.values()], [0.0, 0.0], [0.0, 0.0]
    adam = Adam(params, [Group("Adam", "", lr, 2.0, 0.5, 0.9)] * 2, cfg, Ranks())
    assert {moment.dtype for moment in adam.state.values()} == {torch.promote_types(dtype, torch.float32)}
    for step in range(18):
        sums = add_gradients(params, step)
        step_optimizers([adam], step)
        if (step + 1) % every:
            assert all(map(torch.equal, sums, (p.grad for p in params.values())))
            continue
        rate, count = lr * train_gpt.lr_multiplier(step, cfg), (step + 1) // every
        for i, (p, grad) in enumerate(zip(params.values(), sums, strict=True)):
            grad = (grad / 2).double()
            m[i], v[i] = 0.5 * m[i] + 0.5 * grad, 0.9 * v[i] + 0.1 * grad**2
            update = rate * (1 - 0.9**count) ** 0.5 / (1 - 0.5**count) * m[i] / (v[i].sqrt() + cfg.adam_eps)
            want[i] = want[i] - update - torch.where(update * want[i] > 0, 2.0 * rate**2 * want[i], 0.0)
            want[i] = want[i].to(dtype).double()
            torch.testing.assert_close(p.detach().double(), want[i], rtol=2 * torch.finfo(dtype).eps, atol=1e-12)


@pytest.mark.parametrize("every", [1, 2])
def test_head_and_embedding_are_one_table_while_tied(gpt2, every: int):
    """Both step on the sum of their gradients, and then each on its own; `test_root.py` has the numbers."""
    cfg = dataclasses.replace(gpt2, tied_frac=0.5, adam_every=every, num_iterations=12)
    trainer = Trainer(cfg, Ranks())
    embed, head = trainer.gpt.embed.weight, trainer.gpt.lm_head
    for step in range(12):
        before, rows = head.detach().clone(), torch.randint(257, (2, 65))
        trainer.train_step(step, [(row[:-1].int(), row[1:]) for row in rows])
        assert torch.equal(embed, head) == train_gpt.is_tied(step, cfg) or (step + 1) % every
        assert torch.equal(before, head) == bool((step + 1) % every)


@pytest.mark.parametrize("name", "extra blocks.0.scale blocks.1.attn_lambdas value_embeds.resid_lambdas".split())
def test_a_parameter_without_exactly_one_group_is_refused_by_name(gpt2, name: str):
    """No group claims the first three; two claim the last."""
    module, _, last = name.rpartition(".")
    gpt = GPT(gpt2)
    gpt.get_submodule(module).register_parameter(last, nn.Parameter(torch.zeros(3, 3)))
    with pytest.raises(UserError, match=rf"^{name}: [02] rows of `groups`"):
        build_optimizers(gpt, Ranks())


# ---- Communication: when, beside what compute, through which buffers, how many bytes ---------------------------------
def shared(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors without gaps have bytes in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class Network:
    """Carry out one collective after the other, for one of several ranks. One takes a unit of time, an update two.

    With `checks`, a result is NaN until it is waited for, and the input has to stay as it is.
    """

    def __init__(self, monkeypatch, ranks: Ranks, checks: bool):
        self.ranks, self.under_way, self.events, self.bytes, self.now, self.free = ranks, [], [], Counter(), 0, 0
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        for kind in ("reduce_scatter", "all_gather"):
            monkeypatch.setattr(train_gpt, kind, lambda *args, kind=kind, **_: self.launch(checks, kind, *args))

    def launch(self, checks: bool, kind: str, result: Tensor, tensor: Tensor) -> SimpleNamespace:
        self.events.append(kind)
        self.bytes[kind] += max(result.nbytes, tensor.nbytes)
        self.free = arrival = max(self.now, self.free) + 1
        if not checks:
            return SimpleNamespace(wait=lambda: None)
        sent, buffers, (rank, size, *_) = tensor.clone(), (result, tensor), self.ranks
        for others in self.under_way:
            for (written, _), pair in (buffers, others), (others, buffers):
                assert not any(shared(written, t) for t in pair), f"{kind} shares a buffer with one under way"
        self.under_way.append(buffers)
        result.fill_(math.nan)
        if kind == "all_gather":  # may be in place
            tensor.copy_(sent)

        def wait() -> None:
            missing = result.isnan().sum() + (tensor.numel() if shared(result, tensor) else 0)
            assert torch.equal(tensor, sent), f"the input of {kind} was written to while it was under way"
            assert missing == result.numel(), f"the result of {kind} was written to before it arrived"
            if kind == "reduce_scatter":  # the others have no gradients
                result.copy_(sent.unflatten(0, (size, -1))[rank])
            else:  # the others update theirs as we do
                result.unflatten(0, (size, -1)).copy_(sent)
            self.now = max(self.now, arrival)
            self.under_way[:] = [pair for pair in self.under_way if pair is not buffers]

        return SimpleNamespace(wait=wait)

    def compute(self, update, *args) -> None:
        self.events.append("update")
        self.now += 2
        update(*args)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 3), (7, 8)])
def test_buffers_are_safe_and_communication_hides_behind_compute(monkeypatch, gpt2, rank, size):
    """With n groups a step has 4 n units of time, of which 2 n - 2 are hidden: half of these if only gradients, or only
    updates, travel beside compute. The second step finds the buffers of the first."""
    network = Network(monkeypatch, Ranks(rank, size), checks=True)
    gpt = GPT(dataclasses.replace(gpt2, adam_every=1))
    optimizers = build_optimizers(gpt, network.ranks)
    for optimizer in optimizers:
        optimizer.update_shard = lambda *args, update=optimizer.update_shard: network.compute(update, *args)
    own = [optimizer.param_buffer.unflatten(0, (size, -1))[rank] for optimizer in optimizers]
    assert [o.param_shard.data_ptr() for o in optimizers] == [rows.data_ptr() for rows in own]
    for step in range(2):
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        step_optimizers(optimizers, step)
        assert not network.under_way
        assert all(p.isfinite().all() for p in gpt.parameters()), "a result was used before it was there"
        groups = len(optimizers)
        assert Counter(network.events) == dict(reduce_scatter=groups, update=groups, all_gather=groups)
        assert network.events.index("update") == groups, "gradients leave before the first update"
        assert network.now <= (2 * groups + 2) * (step + 1)
        network.events.clear()


@pytest.mark.parametrize("size", [3, 8])
def test_bytes_of_a_step_are_those_of_gradients_and_values_and_little_padding(monkeypatch, size):
    """In the preset gpt2: on 8 ranks 22 matrices of MLPs are 24. What steps every other time waits at step 0."""
    cfg = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda", dtype="bfloat16", compile=False)
    network, total = Network(monkeypatch, Ranks(size - 1, size), checks=False), 0
    with torch.device("meta"):
        gpt = GPT(cfg)
        optimizers = build_optimizers(gpt, network.ranks)
    sizes = [optimizer.grad_buffer.nbytes for optimizer in optimizers]
    assert sizes == sorted(sizes, reverse=True), "the largest computes while others communicate"
    for step in range(2):
        for optimizer in optimizers:
            for p in optimizer.params:
                p.grad = torch.empty_like(p)
                total += p.nbytes * ((step + 1) % optimizer.every == 0)
        step_optimizers(optimizers, step)
    for name in "reduce_scatter", "all_gather":
        assert total <= network.bytes[name] < 1.04 * total
