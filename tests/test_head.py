"""The head's loss and gradients, in slices, against autograd of the whole, and in FP8 against quantized factors."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from dense import CAP, E4M3, E5M2, dense_head, quantized, randomize, softcapped_loss, with_gradients
from train_gpt import (
    HEAD_FP8_DZ,
    HEAD_FP8_W,
    HEAD_FP8_X,
    FP8Linear,
    FP8ReluSquaredMLP,
    Ranks,
    Trainer,
    TrainingLoss,
    make_attention_settings,
)

T, K, V = 80, 48, 112  # tokens, width, rows of the head: few, as the CPU's FP8 kernels are slow
THREE = torch.tensor([1.0, 0.5, 0.3])  # weights of the next tokens


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return x of unit RMS, w in float32 at least for logits that the cap bends, targets."""
    generator = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(T, K, generator=generator, dtype=torch.float64), (K,)).to(dtype)
    w = 0.2 * torch.randn(V, K, generator=generator, dtype=torch.float64)
    return x, w.to(torch.promote_types(dtype, torch.float32)), torch.randint(V, (T,), generator=generator)


def next_targets(targets: Tensor, n: int) -> Tensor:
    """Return (T, n): the next tokens, -2 beyond the end."""
    return F.pad(targets, (0, n - 1), value=-2).unfold(0, n, 1)


def config(slice_tokens: int, fp8: bool = False, cap=CAP) -> train_gpt.Hyperparameters:
    """Return what the head takes of a configuration."""
    sizes = dict(lm_head_slice=slice_tokens, val_lm_head_slice=slice_tokens, lm_head_fp8=fp8)
    softcap = dict(zip(("lm_head_softcap", "softcap_range", "softcap_shift"), cap, strict=True))
    return dataclasses.replace(train_gpt.PRESETS["nano"], **sizes, **softcap)


def in_slices(x: Tensor, w: Tensor, targets: Tensor, slice_tokens: int = T, fp8: bool = False):
    weights = THREE.to(torch.promote_types(w.dtype, torch.float32))
    rest = None, next_targets(targets, 3), weights, config(slice_tokens, fp8)
    return with_gradients(lambda x, w: TrainingLoss.apply(x, w, *rest), x, w)


@pytest.mark.parametrize("slice_tokens", [7, 16, T, 1000])
def test_slices_are_the_whole(slice_tokens: int):
    """In float64, also with a pointer where nearly all is a copy, any weights, and a factor on all; and in bf16."""
    x, w, targets = inputs(torch.float64)
    copy, cap = V - 5, (6.0, 40.0, 1.5)
    x[:9], w[copy] = x[0], x[0] / 2
    alpha = (cap[1] * ((x @ w.T + cap[2]) * 2 / cap[0]).sigmoid()).softmax(-1)[:, copy]
    assert alpha[0] > 0.99 > 0.01 > alpha[10:].min()
    weights = torch.tensor([0.7, 0.5, 0.0], dtype=torch.float64)
    columns = torch.cat([next_targets(targets, 2), torch.full((T, 1), copy)], dim=1)
    for pointer in [], [torch.rand(T, 3, dtype=torch.float64).softmax(1)[:, :2]]:
        n = 2 + len(pointer)
        rest = columns[:, :n], weights[:n], config(slice_tokens, cap=cap)
        none = () if pointer else (None,)
        head = lambda *given, rest=none + rest: 3 * TrainingLoss.apply(*given, *rest)  # noqa: E731
        expected = dense_head(x, w, targets, weights[:2], cap, *pointer, copy=copy)
        for got, want in zip(with_gradients(head, x, w, *pointer), expected, strict=True):
            torch.testing.assert_close(got, 3 * want, rtol=1e-10, atol=1e-11)
    actual, expected = in_slices(*inputs(), slice_tokens), dense_head(*inputs(), THREE)
    for got, want, limit in zip(actual, expected, (1e-6, 0.006, 0.006), strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= limit * want.norm()


class Watch(TorchDispatchMode):
    """Note the largest number that is cast to e4m3."""

    cast = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("dtype") == E4M3:
            self.cast = max(self.cast, args[0].abs().max().item())
        return func(*args, **(kwargs or {}))


def fp8_by_hand(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply quantized factors in float64; quantize the logits."""
    x_q, w_q = quantized(x, HEAD_FP8_X, E4M3), quantized(w, HEAD_FP8_W, E4M3)
    z = quantized((x_q @ w_q.T).float(), 1.0, E4M3).requires_grad_()
    loss = softcapped_loss(z, targets, THREE)
    loss.backward()
    grad = quantized(z.grad.float(), HEAD_FP8_DZ, E5M2)
    return loss.detach(), grad @ w_q, grad.T @ x_q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_is_exact_but_for_quantization(dtype: torch.dtype):
    """Scales, formats and transpositions. In fp32 a number in the middle may be rounded to the other side, rarely."""
    x, w, targets = args = inputs(dtype)
    plain = dense_head(x.double(), w.double(), targets, THREE)
    actual = in_slices(*args, fp8=True)
    assert [t.dtype for t in actual] == [torch.float32, dtype, torch.float32]
    for got, want, other, limit in zip(actual, fp8_by_hand(*args), plain, (1e-4, 5e-3, 2e-3), strict=True):
        assert (got - want).norm() <= limit * want.norm()
        assert (got - other).norm() <= 0.1 * other.norm(), "FP8 as a whole is off by a few percent"
        assert (got - other).norm() > 3 * limit * other.norm() or got.ndim == 0, "as far from no quantization at all"
    for loss, grad_x, grad_w in (in_slices(*args, slice_tokens, fp8=True) for slice_tokens in (16, 48)):
        assert torch.equal(grad_x, actual[1])
        torch.testing.assert_close((loss, grad_w), actual[::2], rtol=1e-5, atol=1e-6)  # sums in fp32


@pytest.mark.parametrize(("index", "scale", "size"), [(0, HEAD_FP8_X, 1e4), (1, HEAD_FP8_W, 2.1), (1, HEAD_FP8_W, 1e6)])
def test_numbers_beyond_the_largest_saturate(index: int, scale: float, size: float):
    """Before the cast, which may give NaN beyond it, though that of torch 2.13 on a CPU saturates."""
    args, clamped, largest = inputs(), list(inputs()), torch.finfo(E4M3).max
    args[index][[0, 7, 79], [0, 7, 47]] = torch.tensor([size, -size, size], dtype=args[index].dtype)
    clamped[index] = args[index].clamp(-largest / scale, largest / scale)
    with Watch() as watch:
        actual = in_slices(*args, fp8=True)
    assert watch.cast == largest
    assert all(map(torch.equal, actual, in_slices(clamped[0], clamped[1], args[2], fp8=True)))


@pytest.mark.published
def test_the_model_takes_fp8_in_training_only(gpt2, monkeypatch):
    """In the head with the script's scales and the configuration's softcap, in MLPs and products to q, k, v."""
    sizes = dict(model_dim=96, num_heads=6, head_dim=16, mlp_dim=64)
    cfg = dataclasses.replace(gpt2, **sizes, dtype="bfloat16", lm_head_slice=24, val_lm_head_slice=40)
    trainer = Trainer(cfg, Ranks())
    plain = randomize(trainer.gpt)
    fp8 = Trainer(dataclasses.replace(cfg, lm_head_fp8=True, layers_fp8=True), Ranks()).gpt
    fp8.load_state_dict(plain.state_dict())
    schedule = cfg.step_schedules[0]
    [inputs], exchange = trainer.dummy_batch(schedule)
    trainer.table.rows.normal_()
    trainer.table.fetch(exchange)
    fp8.fetched_ngrams = plain.fetched_ngrams
    batch = inputs, make_attention_settings(schedule, cfg, trainer.device)
    names = "softcapped_cross_entropy", "softcapped_softmax"
    given = {}
    for owner, name in (FP8Linear, "apply"), (FP8ReluSquaredMLP, "apply"), *((train_gpt, name) for name in names):
        calls = given[owner if name == "apply" else name] = []

        def noted(*args, calls=calls, function=getattr(owner, name), **more):  # noqa: B008
            calls.append((args, more))
            return function(*args, **more)

        monkeypatch.setattr(owner, name, noted)
    loss = fp8(*batch)
    loss.backward()
    counts = [sum(layer.attention is not None for layer in cfg.layers), sum(layer.mlps for layer in cfg.layers)]
    assert [len(given[FP8Linear]), len(given[FP8ReluSquaredMLP])] == counts
    for (z, *_), more in given["softcapped_cross_entropy"]:
        assert (z.dtype, more["scale"], more["cfg"]) == (E4M3, HEAD_FP8_DZ, fp8.cfg)
    assert [len(z) for (z, *_), _ in given["softcapped_softmax"]] == [24, 24, 16]
    assert loss != plain(*batch)
    given["softcapped_softmax"].clear()
    with torch.no_grad():
        assert fp8(*batch) == plain(*batch)
    assert [len(given[FP8Linear]), len(given[FP8ReluSquaredMLP])] == counts, "not in validation"
    assert [len(z) for (z, *_), _ in given["softcapped_softmax"]] == [40, 24] * 2


@pytest.mark.parametrize("sampled_classes", [0, 192])
def test_gradients_are_those_of_the_loss(gpt2, sampled_classes: int):
    """The pointer's, the layers' and the head's, by a difference along a random direction."""
    cfg = dataclasses.replace(gpt2, dtype="float64", prefix_file="")
    trainer = Trainer(cfg, Ranks())
    gpt = randomize(trainer.gpt)
    # The gradients of more targets have an accident
    schedule = cfg.step_schedules[0]._replace(mtp_weights=[0.7], sampled_classes=sampled_classes)
    tokens = np.random.default_rng(0).integers(40, size=schedule.seq_len + 1)
    [[read]], exchange = trainer.loader.load_cycle([schedule], [[tokens]])
    trainer.table.rows.normal_()
    trainer.table.fetch(exchange)
    batch = read, make_attention_settings(schedule, cfg, trainer.device)
    gpt.lm_head.weight.data[cfg.vocab_size] = 0.3 * gpt.features(*batch)[3].detach()
    start = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    for table in gpt.tables():
        table.grad_buffer = None
    gpt(*batch).backward()
    for prefix in "pointer.weight", "pointer.sink", "pointer.gain", "blocks.", "lm_head":
        names = [name for name in start if name.startswith(prefix)]
        way = {name: torch.randn_like(start[name]) for name in names}
        expected = sum((way[name] * gpt.get_parameter(name).grad).sum() for name in names)
        losses = []
        for step in 1e-6, -1e-6:
            for name in names:
                gpt.get_parameter(name).data.copy_(start[name] + step * way[name])
            losses.append(gpt(*batch).item())
            for name in names:
                gpt.get_parameter(name).data.copy_(start[name])
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(expected.item(), rel=1e-4), prefix
