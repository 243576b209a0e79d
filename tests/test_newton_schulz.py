"""Newton-Schulz against matrices of known singular values: it makes of each value a polynomial of that value."""

import pytest
import torch
from torch import Tensor

from train_gpt import zeropower_via_newtonschulz5

SIZES = [(64, 64), (32, 32), (48, 160)]  # of Muon's matrices: rows <= columns
# The band ends here: a singular value of 0.0014 of the Frobenius norm comes out as 0.640, one of 0.001425 as 0.650
SMALLEST = 0.00143
# Largest difference to exact arithmetic, twice what was measured over these sizes. In float64 it is that of the 1e-7
# which is added to the norm; bf16 keeps 8 bits through 15 products
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.06}
STEEPEST = 8.7  # relative errors of a singular value grow at most so much, namely at 1


def matrices(rows: int, cols: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return U, s, V of matrices U diag(s) V' of norm 1. The least s of "edge" is SMALLEST."""
    generator, edge = torch.Generator().manual_seed(rows * cols), torch.logspace(0, -2, rows - 1, dtype=torch.float64)
    kinds = {
        "edge": torch.cat([edge * (1 - SMALLEST**2) ** 0.5 / edge.norm(), edge.new_tensor([SMALLEST])]),
        "equal": torch.ones(rows, dtype=torch.float64),
        "uniform": torch.rand(rows, dtype=torch.float64, generator=generator),
        "one": torch.eye(rows, dtype=torch.float64)[0],
    }

    def orthogonal(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, rows, dtype=torch.float64, generator=generator)).Q

    return {kind: (orthogonal(rows), s / s.norm(), orthogonal(cols)) for kind, s in kinds.items()}


def in_exact_arithmetic(s: Tensor) -> Tensor:
    """Apply five steps to singular values: X <- a X + b X X' X + c X X' X X' X leaves the vectors alone."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1, 1e15])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_singular_values_end_in_the_band_and_vectors_stay(size: tuple, scale: float, dtype: torch.dtype):
    """Each matrix of a stack has its own norm, to which 1e-7 is added; a zero one stays zero, and nothing overflows."""
    kinds = matrices(*size)
    stack = [scale * 10**i * (u * s) @ v.T for i, (u, s, v) in enumerate(kinds.values())]
    g = torch.stack([*stack, torch.zeros(size)]).to(torch.promote_types(dtype, torch.float32))
    *actual, zero = x = zeropower_via_newtonschulz5(g, dtype)
    assert (x.dtype, x.shape, zero.any()) == (dtype, g.shape, False)
    for x, (kind, (u, s, v)) in zip(actual, kinds.items(), strict=True):
        # A matrix of rank 1 has its singular value where the polynomial is steepest, and 0.109 was measured there
        tolerance = TOLERANCE[dtype] * (4 if kind == "one" else 1) + STEEPEST * 1e-7 * (scale < 1) / scale
        margin, values = tolerance if dtype == torch.bfloat16 or scale < 1 else 0, torch.linalg.svdvals(x.double())
        assert values.max() <= 1.25 + margin
        if kind != "one" and s.min() >= SMALLEST:
            assert values.min() >= 0.65 - margin
        expected = in_exact_arithmetic(s).diag()
        torch.testing.assert_close(u.T @ x.double() @ v, expected, rtol=0, atol=tolerance)
