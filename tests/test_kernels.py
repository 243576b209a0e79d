"""The script's kernels compute what the CPU path computes, by Triton's interpreter, which keeps bf16 and FP8 as bits.

So numbers are wider here. It has to interpret from Triton's import on: each test runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import train_gpt
from speedrun import ROOT


def check_mlp_kernel():
    """Compare the MLP's kernel and its twin with float64, also where tiles reach beyond the edge."""
    train_gpt.can_use_kernels = lambda t: True
    train_gpt.fp8_matmul = lambda a, b, scale, dtype: a.to(dtype) @ b.to(dtype) / scale
    generator = torch.Generator().manual_seed(0)
    for T, K, N in ((256, 128, 256), (200, 96, 384), (8, 8, 16)):
        grad, w, y = (torch.randn(shape, generator=generator).half() for shape in ((T, K), (K, N), (T, N)))
        y.relu_()
        w_q = train_gpt.FP8_W * w
        scales = torch.rand(T, 1, generator=generator)
        exact = 2 * (y.double() * scales).sqrt() * (grad.double() @ w.double())
        scale = torch.tensor(0.5)
        found = train_gpt.relu_squared_backward(grad, w_q, y, scales, scale, has_tma=True)
        twin = train_gpt.relu_squared_backward(grad, w_q, y, scales, torch.tensor(1.0), has_tma=False)
        torch.testing.assert_close(found[2], (scale * y * scales).half(), rtol=0.001, atol=1e-7)
        torch.testing.assert_close(twin[2], (y * scales).half(), rtol=0.001, atol=1e-7)
        assert torch.equal(found[0], found[1])
        for dz in (*found[:2], *twin[:2]):
            assert (dz.double() - exact).norm() < 0.0004 * exact.norm(), "float16 alone gives 0.0002"


def check_cross_entropy_kernel():
    """Compare losses and gradients with float64: with some targets missing, and some that are equal or a copy.

    The interpreter knows no instructions of a GPU.
    """
    train_gpt.tanh = lambda x: 2 * train_gpt.tl.sigmoid(2 * x) - 1
    generator = torch.Generator().manual_seed(0)
    for V, n in ((320, 4), (2112, 2), (4096, 3)):  # the first target is always there, the last one is the row of a copy
        z = 3 * torch.randn(12, V, generator=generator)
        targets = torch.randint(-2, V, (12, n), generator=generator)
        targets[:3] = torch.tensor([-1, -2, V - 1])[:, None]
        targets[:, 0].clamp_(min=0)
        targets[:, -1] = V - 3
        z[:6, V - 3] += torch.arange(6)
        z[6], z[6, V - 3] = -50, 50  # nothing but a copy
        z[7:9].scatter_(1, targets[7:9][:, [0, -1]], 10)  # the next token or a copy
        pointer = torch.rand(12, 3, generator=generator).softmax(1)[:, :2].contiguous()
        weights = torch.tensor([0.7, 0.5, 0.25, 0.0])[[*range(n - 1), 3]]
        cfg = train_gpt.GPT2
        exact = train_gpt.cross_entropy(z.double(), 1.0, targets, weights.double(), pointer.double(), cfg)
        found = train_gpt.cross_entropy_with_kernel(z, 2.0, targets, weights, pointer, cfg)
        for a, b, scale in zip(found, exact, (1, 2, 1), strict=True):
            copy = torch.arange(12) == 6  # there float32 rounds what is left to other tokens
            torch.testing.assert_close(a[~copy].double(), scale * b[~copy], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(a[copy].double(), scale * b[copy], rtol=0.02, atol=1e-6)


def check_qkv_kernel():
    """Compare gradients of queries, keys and values, in both layouts, with float64; the last tile reaches beyond T."""
    generator = torch.Generator().manual_seed(0)
    for T, n, halves, quarter, width in ((130, 2, 1, 16, 192), (600, 1, 2, 32, 384), (70, 1, 1, 8, 128)):
        split = (T, 6 // n, n, halves, 2, quarter)
        x_q, x_k, *grads = torch.randn(4, *split, generator=generator).double()
        angles = 99 * torch.rand(T, 1, n, 1, 1, quarter, generator=generator)
        cos, sin = angles.cos().double(), angles.sin().double()
        scales = torch.tensor(0.13).double(), torch.tensor(1.0).double()
        saved = [[*train_gpt.norm_rotate(x, cos, sin, s), s] for x, s in zip((x_q, x_k), scales, strict=True)]
        grads.append(torch.randn(T, width, generator=generator).double())
        heads = [train_gpt.norm_rotate_backward(g, y, r, cos, sin, s) for g, (y, r, s) in zip(grads, saved)]  # noqa: B905
        exact = train_gpt.FP8_GRAD * torch.cat([t.flatten(1) for t in (*heads, grads[2])], dim=1)
        args = [[t.float() for t in tensors] for tensors in (grads, *saved)]
        found = train_gpt.qkv_backward_with_kernel(*args, cos.float(), sin.float(), dtype=torch.float32)
        for layout in found:
            torch.testing.assert_close(layout.double(), exact, rtol=1e-5, atol=1e-4)


CHECKS = check_mlp_kernel, check_cross_entropy_kernel, check_qkv_kernel


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install -e '.[dev]'")
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_interpreted(check: Callable[[], None]):
    code = f"import conftest, test_kernels; test_kernels.{check.__name__}()"
    env = os.environ | dict(SCRIPT=train_gpt.__file__, TRITON_INTERPRET="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
