"""The FP8 head: three products against float64, from the inputs and, exactly, from what quantization leaves of them."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from train_gpt import GPT, CastedLinear, Fp8Matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = torch.finfo(E4M3).max
X_S, W_S, GRAD_S = GPT.FP8_SCALES
T, K, V = 80, 48, 112  # tokens, width, rows of the head: few, as the CPU's FP8 kernels do 10 million products a second
TRAIN_SEQ_LEN = 49_152  # the scale of the gradients is made for it


def fp8_problem() -> str:
    """Empty where this processor multiplies FP8 in all the ways in which the head does."""
    one = torch.ones(())
    for left in (E4M3, E5M2):
        for out in (torch.bfloat16, torch.float32):
            a, b = torch.ones(16, 16).to(left), torch.ones(16, 16).to(E4M3)
            try:
                torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out)
            except RuntimeError as error:
                return f"torch._scaled_mm does not work here: {str(error).splitlines()[0]}"
    return ""


PROBLEM = fp8_problem()
pytestmark = pytest.mark.skipif(PROBLEM != "", reason=PROBLEM)


def training_inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x of unit RMS, a small w, and the gradient of a mean cross entropy over `TRAIN_SEQ_LEN` tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator)
    x = (x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype)
    w = 0.02 * torch.randn(V, K, generator=generator)
    probabilities = torch.randn(T, V, generator=generator).mul(2).softmax(-1)
    target = torch.nn.functional.one_hot(torch.randint(V, (T,), generator=generator), V)
    return x, w, ((probabilities - target) / TRAIN_SEQ_LEN).to(dtype)


def products(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The head's output and its gradients to x and to w, in FP8."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = Fp8Matmul.apply(x, w, X_S, W_S, GRAD_S)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


def quantized(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What FP8 leaves of them, in float64."""
    scaled = ((x * X_S).to(E4M3), (w * W_S).clamp(-FP8_MAX, FP8_MAX).to(E4M3), (grad * GRAD_S).to(E5M2))
    return tuple(t.double() / scale for t, scale in zip(scaled, (X_S, W_S, GRAD_S), strict=True))


def exact_products(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, grad = x.double(), w.double(), grad.double()
    return x @ w.T, grad @ w, grad.T @ x


def test_dtypes_and_shapes():
    x, w, grad = training_inputs()
    out, grad_x, grad_w = products(x, w, grad)
    assert (out.dtype, out.shape) == (torch.bfloat16, (T, V))
    assert (grad_x.dtype, grad_x.shape) == (torch.bfloat16, x.shape)
    assert (grad_w.dtype, grad_w.shape) == (torch.float32, w.shape)


def test_products_are_within_the_error_of_fp8_entry_by_entry():
    """A product of factors that are off by da and db is off by at most |a| db + da |b| + da db.

    Rounding to e4m3, of 3 bits behind the first, is off by at most 2^-4 of a number, or half of the 2^-9 between
    subnormal ones; rounding to e5m2 by 2^-3 or half of 2^-16. The result is rounded too: to bf16 by 2^-8, and sums in
    fp32 by far less.
    """
    inputs = x, w, grad = training_inputs()
    x, w, grad = x.double().abs(), w.double().abs(), grad.double().abs()
    dx = torch.maximum(x * 2**-4, torch.tensor(2**-10 / X_S))
    dw = torch.maximum(w * 2**-4, torch.tensor(2**-10 / W_S))
    dg = torch.maximum(grad * 2**-3, torch.tensor(2**-17 / GRAD_S))
    factors = ((x, dx, w.T, dw.T), (grad, dg, w, dw), (grad.T, dg.T, x, dx))
    for name, got, exact, (a, da, b, db), rounding in zip(
        ("out", "grad_x", "grad_w"),
        products(*inputs),
        exact_products(*inputs),
        factors,
        (2**-8, 2**-8, 2**-20),
        strict=True,
    ):
        bound = a @ db + da @ b + da @ db + rounding * exact.abs()
        share = ((got.double() - exact).abs() / bound).max().item()
        assert share <= 1, f"{name}: {share:.2f} of the bound"
        assert share > 0.01, f"{name}: {share:.4f} of the bound, which so tests nothing"


@pytest.mark.parametrize(("index", "limit"), [(0, 0.05), (1, 0.08), (2, 0.08)], ids=["out", "grad_x", "grad_w"])
def test_products_are_off_by_a_few_percent_as_a_whole(index, limit):
    inputs = training_inputs()
    got, exact = products(*inputs)[index].double(), exact_products(*inputs)[index]
    error = ((got - exact).norm() / exact.norm()).item()
    assert 0.01 < error < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_exact_but_for_quantization(dtype):
    """Scales, formats, transpositions and saturation: everything but the rounding of sums and results."""
    inputs = training_inputs(dtype)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-20
    names = ("out", "grad_x", "grad_w")
    for name, got, expected in zip(names, products(*inputs), exact_products(*quantized(*inputs)), strict=True):
        rtol = 2**-20 if name == "grad_w" else rounding
        atol = 1e-6 * expected.abs().max().item()  # sums that cancel
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_has_the_range_of_five_bits_of_exponent():
    """The e5m2 of the gradient spans 2^-16 to 57344: what would be 0 or NaN in e4m3 comes through."""
    x, w = torch.eye(16).bfloat16(), torch.eye(16) / 4
    grad = torch.diag(torch.tensor([2.0**e for e in range(-16, 16)][::2])).bfloat16() / GRAD_S
    _, grad_x, grad_w = products(x, w, grad)
    assert torch.equal(grad_x, grad / 4)
    assert torch.equal(grad_w, grad.float())


def test_numbers_keep_three_bits_forward_and_two_backward():
    x, w = torch.eye(16).bfloat16(), torch.eye(16) / 4
    for value, as_e4m3, as_e5m2 in ((1.0625, 1.0, 1.0), (1.125, 1.125, 1.0), (1.25, 1.25, 1.25)):
        out, grad_x, _ = products(value * x, w, value * x / GRAD_S)
        assert torch.equal(out, as_e4m3 * x / 4)
        assert torch.equal(grad_x * GRAD_S, as_e5m2 * x / 4)


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


@pytest.mark.parametrize("size", [0.9, 2.0, 1e6])
def test_weights_beyond_the_largest_number_saturate(size):
    x, w, grad = training_inputs()
    w[3, 5], w[100, 0], w[V - 1, K - 1] = size, -size, size
    assert size * W_S > FP8_MAX
    largest = FP8_MAX / W_S
    with NoCastBeyondTheLargest():
        got = products(x, w, grad)
    assert all(t.isfinite().all() for t in got)
    for t, expected in zip(got, products(x, w.clamp(-largest, largest), grad), strict=True):
        assert torch.equal(t, expected)
    # And not before: x = identity makes the output the weights
    [[weight]] = products(torch.eye(K).bfloat16(), w, torch.zeros(K, V).bfloat16())[0][5:6, 3:4]
    assert weight == largest


def test_inputs_beyond_the_largest_number_saturate():
    x, w, grad = training_inputs()
    x[0, 0], x[T - 1, 7] = 1e4, -1e4
    with NoCastBeyondTheLargest():
        got = products(x, w, grad)
    assert all(t.isfinite().all() for t in got)
    for t, expected in zip(got, products(x.clamp(-FP8_MAX / X_S, FP8_MAX / X_S), w, grad), strict=True):
        assert torch.equal(t, expected)


def test_casted_linear_takes_fp8_in_training_only():
    x, w, grad = training_inputs()
    head = CastedLinear(K, V, GPT.FP8_SCALES)
    with torch.no_grad():
        head.weight.copy_(w)
    in_fp8, plain = products(x, w, grad)[0], x @ w.bfloat16().T
    assert not torch.equal(in_fp8, plain)
    assert torch.equal(head.train()(x), in_fp8)
    assert torch.equal(head.eval()(x), plain)
    assert torch.equal(head.train()(x), in_fp8)
    # The weights' gradient arrives in their own precision, and dimensions before the last are those of a batch
    out = head(x.view(2, T // 2, K))
    assert torch.equal(out, in_fp8.view(2, T // 2, V))
    out.backward(grad.view(2, T // 2, V))
    assert head.weight.grad.dtype == torch.float32
    assert torch.equal(head.weight.grad, products(x, w, grad)[2])


@pytest.mark.parametrize("training", [True, False])
def test_casted_linear_without_scales_is_plain(training):
    x, w, grad = training_inputs()
    head = CastedLinear(K, V).train(training)
    with torch.no_grad():
        head.weight.copy_(w)
    out = head(x)
    assert torch.equal(out, x @ w.bfloat16().T)
    out.backward(grad)
    assert head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(head.weight.grad, (grad.T @ x).float(), rtol=2**-7, atol=1e-8)
