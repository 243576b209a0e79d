"""Newton-Schulz against matrices of known singular values: what it does to each value is a polynomial of that value."""

import pytest
import torch

from train_gpt import zeropower_via_newtonschulz5

# Shapes as Muon has them: a stack of matrices. The last is (columns, rows) of the one before, for the tall branch
SHAPES = [(1, 64, 64), (3, 32, 32), (2, 48, 160), (2, 160, 48)]
# The band ends here: a singular value of 0.0014 of the Frobenius norm comes out as 0.640, one of 0.001425 as 0.650
SMALLEST = 0.00143
# Largest difference to exact arithmetic, twice what was measured over these shapes. In float64 it is that of the 1e-7
# which is added to the norm; bf16 keeps 8 bits through 15 products
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.06}
STEEPEST = 8.7  # relative errors of a singular value grow at most so much, namely at 1


def singular_values(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Of one matrix, with a Frobenius norm of 1, the least exactly SMALLEST in kind "edge"."""
    n = min(shape[-2:])
    if kind == "equal":
        return torch.full((n,), n**-0.5, dtype=torch.float64)
    if kind == "uniform":
        values = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        return values / values.norm()
    if kind == "one":  # rank 1
        return torch.eye(n, dtype=torch.float64)[0]
    values = torch.logspace(0, -2, n, dtype=torch.float64)
    values[-1] = 0
    values *= (1 - SMALLEST**2) ** 0.5 / values.norm()
    values[-1] = SMALLEST
    return values


def matrices(shape: tuple[int, ...], kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """G = U diag(s) V' of `shape`, and U, s, V, in float64."""
    (*batch, rows, cols), s = shape, singular_values(shape, kind)
    generator = torch.Generator().manual_seed(rows * cols)
    u, v = (
        torch.linalg.qr(torch.randn(*batch, size, len(s), dtype=torch.float64, generator=generator)).Q
        for size in (rows, cols)
    )
    return (u * s) @ v.mT, u, s, v


def in_exact_arithmetic(s: torch.Tensor) -> torch.Tensor:
    """What five steps make of a singular value s: X <- a X + b X X' X + c X X' X X' X leaves the vectors alone."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def test_polynomial_takes_everything_above_the_smallest_into_the_band():
    values = in_exact_arithmetic(torch.linspace(SMALLEST, 1, 1_000_001, dtype=torch.float64))
    assert values.min() >= 0.65
    assert values.max() <= 1.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["equal", "uniform", "edge", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_end_in_the_band_and_vectors_stay(shape, kind, dtype):
    g, u, s, v = matrices(shape, kind)
    x = zeropower_via_newtonschulz5(g if dtype == torch.float64 else g.float(), dtype)
    assert x.dtype == dtype
    assert x.shape == g.shape
    # A matrix of rank 1 has its singular value where the polynomial is steepest, and 0.109 was measured there
    tolerance = TOLERANCE[dtype] * (4 if kind == "one" else 1)
    margin = tolerance if dtype == torch.bfloat16 else 0
    values = torch.linalg.svdvals(x.double())
    assert values[..., : (s >= SMALLEST).sum()].min() >= 0.65 - margin
    assert values.max() <= 1.25 + margin
    # U' X V is diagonal where the vectors are kept, and has the very values of the polynomial on its diagonal
    expected = in_exact_arithmetic(s).diag().expand(*shape[:-2], -1, -1)
    torch.testing.assert_close(u.mT @ x.double() @ v, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matrices_of_a_stack_do_not_touch_each_other(dtype):
    shapes_kinds = [((1, 24, 56), kind) for kind in ("edge", "equal", "uniform")]
    stack = torch.cat([matrices(shape, kind)[0] * 10**i for i, (shape, kind) in enumerate(shapes_kinds)])
    stack = stack if dtype == torch.float64 else stack.float()
    together = zeropower_via_newtonschulz5(stack, dtype).double()
    alone = torch.cat([zeropower_via_newtonschulz5(g[None], dtype) for g in stack]).double()
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 40), (1, 40, 16), (1, 16, 16)], ids=str)
def test_zero_matrix_stays_zero_in_a_batch_too(shape, dtype):
    g = matrices(shape, "uniform")[0]
    g = torch.cat([torch.zeros_like(g), g, torch.zeros_like(g)])
    x = zeropower_via_newtonschulz5(g if dtype == torch.float64 else g.float(), dtype)
    assert x.isfinite().all()
    assert (x[[0, 2]] == 0).all()
    assert x[1].norm() > 1
    assert (zeropower_via_newtonschulz5(torch.zeros(shape), dtype) == 0).all()


@pytest.mark.parametrize("kind", ["one", "edge"])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e3, 1e15])
def test_scale_does_not_matter(scale, kind):
    """Down to a norm of 1e-7, which is added to every norm so that a zero matrix stays zero."""
    g = matrices((2, 32, 56), kind)[0]
    x = zeropower_via_newtonschulz5(g, torch.float64)
    atol = STEEPEST * 1e-7 / min(scale, 1)
    torch.testing.assert_close(zeropower_via_newtonschulz5(scale * g, torch.float64), x, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1e15])
def test_small_and_large_gradients_neither_vanish_nor_overflow(scale, dtype):
    """bf16 has the range of fp32, and the norm is divided out before the first product."""
    g, u, s, v = matrices((1, 32, 48), "uniform")
    x = zeropower_via_newtonschulz5((scale * g).float(), dtype)
    expected = in_exact_arithmetic(s).diag()[None]
    atol = TOLERANCE[dtype] + STEEPEST * 1e-7 / min(scale, 1)
    torch.testing.assert_close(u.mT @ x.double() @ v, expected, rtol=0, atol=atol)


def test_precision_is_bfloat16_unless_asked_otherwise():
    g = matrices((1, 16, 24), "uniform")[0]
    for given in (torch.float64, torch.float32, torch.bfloat16):
        assert zeropower_via_newtonschulz5(g.to(given)).dtype == torch.bfloat16
        assert zeropower_via_newtonschulz5(g.to(given), torch.float32).dtype == torch.float32
