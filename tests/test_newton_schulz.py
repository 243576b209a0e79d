"""Newton-Schulz against matrices of known singular values: it makes of each value a polynomial of that value."""

import pytest
import torch
from torch import Tensor

from train_gpt import zeropower_via_newtonschulz5

# Stacks of matrices as Muon has them, rows <= columns
SHAPES = [(1, 64, 64), (3, 32, 32), (2, 48, 160)]
# The band ends here: a singular value of 0.0014 of the Frobenius norm comes out as 0.640, one of 0.001425 as 0.650
SMALLEST = 0.00143
# Largest difference to exact arithmetic, twice what was measured over these shapes. In float64 it is that of the 1e-7
# which is added to the norm; bf16 keeps 8 bits through 15 products
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.06}
STEEPEST = 8.7  # relative errors of a singular value grow at most so much, namely at 1
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def matrices(shape: tuple[int, int, int], kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return G = U diag(s) V' of `shape` and of norm 1, and U, s, V. The least s of kind "edge" is SMALLEST."""
    (n, rows, cols), generator = shape, torch.Generator().manual_seed(shape[1] * shape[2])
    edge = torch.logspace(0, -2, rows - 1, dtype=torch.float64)
    s = {
        "equal": torch.full((rows,), rows**-0.5, dtype=torch.float64),
        "uniform": torch.rand(rows, dtype=torch.float64, generator=generator),
        "one": torch.eye(rows, dtype=torch.float64)[0],
        "edge": torch.cat([edge * (1 - SMALLEST**2) ** 0.5 / edge.norm(), edge.new_tensor([SMALLEST])]),
    }[kind]
    s = s / s.norm()
    u, v = (
        torch.linalg.qr(torch.randn(n, size, rows, dtype=torch.float64, generator=generator)).Q for size in (rows, cols)
    )
    return (u * s) @ v.mT, u, s, v


def in_exact_arithmetic(s: Tensor) -> Tensor:
    """Apply five steps to singular values: X <- a X + b X X' X + c X X' X X' X leaves the vectors alone."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@each_dtype
@pytest.mark.parametrize("kind", ["equal", "uniform", "edge", "one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_end_in_the_band_and_vectors_stay(shape: tuple, kind: str, dtype: torch.dtype):
    g, u, s, v = matrices(shape, kind)
    x = zeropower_via_newtonschulz5(g if dtype == torch.float64 else g.float(), dtype)
    assert (x.dtype, x.shape) == (dtype, g.shape)
    # A matrix of rank 1 has its singular value where the polynomial is steepest, and 0.109 was measured there
    tolerance = TOLERANCE[dtype] * (4 if kind == "one" else 1)
    margin = tolerance if dtype == torch.bfloat16 else 0
    values = torch.linalg.svdvals(x.double())
    if kind != "one" and s.min() >= SMALLEST:
        assert values.min() >= 0.65 - margin
    assert values.max() <= 1.25 + margin
    expected = in_exact_arithmetic(s).diag().expand(len(g), -1, -1)
    torch.testing.assert_close(u.mT @ x.double() @ v, expected, rtol=0, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1, 1e15])
def test_matrices_of_a_stack_do_not_touch_each_other(scale: float, dtype: torch.dtype):
    """Each has its own norm, to which 1e-7 is added; a zero matrix stays zero, and nothing vanishes or overflows."""
    kinds = [matrices((1, 24, 56), kind) for kind in ("edge", "equal", "uniform")]
    stack = [scale * g * 10**i for i, (g, *_) in enumerate(kinds)] + [torch.zeros(1, 24, 56, dtype=torch.float64)]
    *actual, zero = zeropower_via_newtonschulz5(torch.cat(stack).to(torch.promote_types(dtype, torch.float32)), dtype)
    assert not zero.any()
    for x, (_, u, s, v) in zip(actual, kinds, strict=True):
        atol = TOLERANCE[dtype] + STEEPEST * 1e-7 / min(scale, 1)
        torch.testing.assert_close(u[0].T @ x.double() @ v[0], in_exact_arithmetic(s).diag(), rtol=0, atol=atol)
