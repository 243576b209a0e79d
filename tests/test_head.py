"""Head, softcap and loss, over slices of tokens and with gradients made in the forward: against the whole computation
by autograd, and in FP8 against float64 on what quantization leaves of the factors."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from train_gpt import GPT, HeadLoss, head_loss, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = torch.finfo(E4M3).max
X_S, W_S, GRAD_S = GPT.FP8_SCALES
T, K, V, CAP = 80, 48, 112, 6.0  # tokens, width, rows of the head: few, as the CPU's FP8 kernels are slow


def fp8_problem() -> str:
    """Empty where this processor multiplies FP8 in all the ways in which the head does."""
    for left in (E4M3, E5M2):
        for out in (torch.bfloat16, torch.float32):
            a, b = torch.ones(16, 16).to(left), torch.ones(16, 16).to(E4M3)
            try:
                scaled_mm(a, b, 1.0, 1.0, out, False)
            except RuntimeError as error:
                return f"torch._scaled_mm does not work here: {str(error).splitlines()[0]}"
    return ""


PROBLEM = fp8_problem()
needs_fp8 = pytest.mark.skipif(PROBLEM != "", reason=PROBLEM)


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x of unit RMS, w in float32 at least for logits that the cap bends, targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator, dtype=torch.float64)
    x = (x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype)
    w = 0.2 * torch.randn(V, K, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (T,), generator=generator)
    return x, w.to(torch.promote_types(dtype, torch.float32)), targets


def in_slices(x: Tensor, w: Tensor, targets: Tensor, slice_tokens: int, scales=None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients through autograd."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = HeadLoss.apply(x, w, targets, CAP, slice_tokens, scales)
    loss.backward()
    return loss.detach(), x.grad, w.grad


def whole(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with logits of (T, V) and autograd's gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    z = F.linear(x, w.type_as(x))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    loss = F.cross_entropy(CAP * torch.tanh(z / CAP) + CAP, targets)
    loss.backward()
    return loss.detach(), x.grad, w.grad


@pytest.mark.parametrize("slice_tokens", [1, 7, 16, 40, T, 1000])
def test_slices_are_the_whole(slice_tokens):
    args = inputs(torch.float64)
    expected = whole(*args)
    assert F.linear(args[0], args[1]).abs().max() > CAP / 2, "logits that the cap does not bend test nothing of it"
    for got, want in zip(in_slices(*args, slice_tokens), expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("slice_tokens", [16, T])
def test_slices_in_bf16_are_the_whole_up_to_its_rounding(slice_tokens):
    args = inputs()
    for got, want, limit in zip(in_slices(*args, slice_tokens), whole(*args), (1e-6, 0.006, 0.006), strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= limit * want.norm()


def test_gradients_are_scaled_by_what_comes_from_behind():
    x, w, targets = inputs(torch.float64)
    _, grad_x, grad_w = in_slices(x, w, targets, 16)
    x, w = x.requires_grad_(), w.requires_grad_()
    (3 * HeadLoss.apply(x, w, targets, CAP, 16, None)).backward()
    torch.testing.assert_close(x.grad, 3 * grad_x)
    torch.testing.assert_close(w.grad, 3 * grad_w)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        self.numbers = max([self.numbers, *(t.numel() for t in results if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("with_grads", [False, True])
def test_logits_never_exist_whole(with_grads):
    x, w, targets = (t.repeat(20, 1) if t.ndim > 1 and len(t) == T else t for t in inputs())
    args = (x, w, targets.repeat(20), CAP)
    sizes = []
    for slice_tokens in (len(x), T):
        with Largest() as largest:
            head_loss(*args, slice_tokens, None, with_grads)
        sizes.append(largest.numbers)
    assert sizes == [len(x) * V, max(x.numel() * with_grads, T * V)]


def test_without_gradients_it_is_the_loss_alone():
    x, w, targets = inputs()
    loss, *grads = head_loss(x, w, targets, CAP, 16, None, False)
    assert grads == [None, None]
    assert loss == in_slices(x, w, targets, 16)[0]


# FP8


def in_fp8(x: Tensor, w: Tensor, targets: Tensor, slice_tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    return in_slices(x, w, targets, slice_tokens, (X_S, W_S, GRAD_S))


def quantized(t: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """What FP8 leaves of it, in float64."""
    limit = torch.finfo(kind).max
    return (t * scale).clamp(-limit, limit).to(kind).double() / scale


def fp8_by_hand(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three products in float64 of quantized factors; the logits are rounded to x's precision."""
    x_q, w_q = quantized(x, X_S, E4M3), quantized(w, W_S, E4M3)
    z = (x_q @ w_q.T).to(x.dtype).double().requires_grad_()
    loss = F.cross_entropy(CAP * torch.tanh(z / CAP) + CAP, targets)
    loss.backward()
    grad = quantized(z.grad.float(), GRAD_S, E5M2)
    return loss.detach(), grad @ w_q, grad.T @ x_q


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_is_exact_but_for_quantization(dtype):
    """Scales, formats and transpositions. In fp32 a number in the middle may be rounded to the other side, rarely."""
    args = inputs(dtype)
    plain = whole(*(t.double() if t.is_floating_point() else t for t in args))
    limits = (1e-4, 5e-3, 2e-3)
    for got, want, other, limit in zip(in_fp8(*args), fp8_by_hand(*args), plain, limits, strict=True):
        assert (got - want).norm() <= limit * want.norm()
        assert (got - other).norm() > 3 * limit * other.norm() or got.ndim == 0, "as far from no quantization at all"


@needs_fp8
def test_fp8_is_off_by_a_few_percent_as_a_whole():
    args = inputs()
    plain = whole(*(t.double() if t.is_floating_point() else t for t in args))
    for got, want, limit in zip(in_fp8(*args), plain, (0.01, 0.1, 0.1), strict=True):
        assert (got - want).norm() <= limit * want.norm()


@needs_fp8
def test_fp8_sees_the_same_numbers_in_every_slice():
    """Each slice divides by the sequence's tokens: the quantized gradient, and so grad_x, is the same to the bit."""
    args = inputs()
    loss, grad_x, grad_w = in_fp8(*args, slice_tokens=T)
    for slice_tokens in (16, 48):
        got = in_fp8(*args, slice_tokens=slice_tokens)
        torch.testing.assert_close(got[0], loss, rtol=1e-6, atol=0)
        assert torch.equal(got[1], grad_x)
        torch.testing.assert_close(got[2], grad_w, rtol=1e-5, atol=1e-8)


@needs_fp8
def test_fp8_dtypes():
    x, w, targets = inputs()
    loss, grad_x, grad_w = in_fp8(x, w, targets)
    assert (loss.dtype, grad_x.dtype, grad_w.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_gradients_of_48k_tokens_do_not_vanish_in_e5m2():
    """The scale is made for the gradient of a mean over train_seq_len tokens: at most 1 / 49,152."""
    assert quantized(torch.tensor(1 / 49_152), GRAD_S, E5M2) > 0
    assert torch.finfo(E5M2).max > GRAD_S / 49_152
    small = torch.tensor(1e-5 / 49_152)  # of an unlikely token
    assert quantized(small, GRAD_S, E5M2) > 0
    assert quantized(small / 8, GRAD_S, E5M2) < quantized(small, GRAD_S, E5M2)  # where the loss is divided first


class NoCastBeyondTheLargest(TorchDispatchMode):
    """Refuses casts to e4m3 of numbers beyond its range: they may give NaN, though torch 2.13 on a CPU saturates."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") == E4M3:
            assert args[0].abs().max() <= FP8_MAX, f"a cast to e4m3 of {args[0].abs().max()}"
        return func(*args, **kwargs)


def test_cast_beyond_the_largest_number_is_noticed():
    with NoCastBeyondTheLargest(), pytest.raises(AssertionError, match="cast to e4m3 of 449"):
        torch.full((3,), 449.0).to(E4M3)


@needs_fp8
@pytest.mark.parametrize("size", [0.9, 2.0, 1e6])
def test_weights_beyond_the_largest_number_saturate(size):
    x, w, targets = inputs()
    w[3, 5], w[100, 0], w[V - 1, K - 1] = size, -size, size
    largest = FP8_MAX / W_S
    assert size > largest
    with NoCastBeyondTheLargest():
        got = in_fp8(x, w, targets)
    for t, expected in zip(got, in_fp8(x, w.clamp(-largest, largest), targets), strict=True):
        assert t.isfinite().all()
        assert torch.equal(t, expected)


@needs_fp8
def test_inputs_beyond_the_largest_number_saturate():
    x, w, targets = inputs()
    x[0, 0], x[T - 1, 7] = 1e4, -1e4
    with NoCastBeyondTheLargest():
        got = in_fp8(x, w, targets)
    for t, expected in zip(got, in_fp8(x.clamp(-FP8_MAX / X_S, FP8_MAX / X_S), w, targets), strict=True):
        assert t.isfinite().all()
        assert torch.equal(t, expected)


# In the model


@pytest.fixture
def batch(tiny) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(tiny.vocab_size, (tiny.train_seq_len + 1,))
    return tokens[:-1].int(), tokens[1:], torch.tensor(2, dtype=torch.int32)


@needs_fp8
def test_the_model_takes_fp8_in_training_only(tiny, random_gpt, batch):
    tokens, targets, window = batch
    cfg = dataclasses.replace(tiny, dtype="bfloat16", lm_head_slice=24)
    plain, fp8 = (random_gpt(dataclasses.replace(cfg, lm_head_fp8=on)) for on in (False, True))
    fp8.load_state_dict(plain.state_dict())
    assert fp8(tokens, targets, window) != plain(tokens, targets, window)
    with torch.no_grad():
        assert fp8(tokens, targets, window) == plain(tokens, targets, window)


def test_logits_are_what_the_loss_is_of(tiny64, random_gpt, batch):
    """`logits`, for sampling, and the loss; slices that do not divide the sequence."""
    tokens, targets, window = batch
    gpt = random_gpt(dataclasses.replace(tiny64, lm_head_slice=24))
    logits = gpt.logits(gpt.features(tokens, window))
    assert logits.shape == (len(tokens), 320)
    torch.testing.assert_close(gpt(tokens, targets, window), F.cross_entropy(logits, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("cap", "dtype"), [(15.0, "float64"), (4.0, "float64"), (15.0, "bfloat16")])
def test_logits_are_softcapped(tiny, random_gpt, batch, cap: float, dtype: str):
    """cap tanh(z / cap) + cap, in fp32 at least."""
    gpt = random_gpt(dataclasses.replace(tiny, lm_head_softcap=cap, dtype=dtype))
    with torch.no_grad():
        gpt.lm_head.weight *= 20
        x = gpt.features(batch[0], batch[2])
        z, logits = gpt.lm_head(x), gpt.logits(x)
    assert z.dtype == getattr(torch, dtype)
    assert z.abs().max() > 3 * cap
    assert logits.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert logits.min() >= 0
    assert logits.max() <= 2 * cap
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    torch.testing.assert_close(logits.double(), cap * torch.tanh(z.double() / cap) + cap, rtol=0, atol=tolerance)
