"""The kernels for a GPU compute what the CPU path computes: python -m gpu_proof gpu_numbers, and Triton's interpreter.

Casts, which round, are checked alone, in a process that is told to interpret before it begins; all else of the
interpreter by the agreement.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from gpu_proof import gpu_numbers, pretend_gpu
from speedrun.process import ROOT

if problem := pretend_gpu.missing():
    pytest.skip(f"gpu_numbers {problem}", allow_module_level=True)

import triton
import triton.language as tl

pytestmark = pytest.mark.slow
NARROW = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def cast(source, target, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, i < n).to(target.dtype.element_ty), i < n)


def run_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(x), dtype=dtype)
    cast[(-(-len(x) // 1024),)](x, out, len(x), BLOCK=1024)
    return out.double()


def check_casts():
    """Cast all numbers, and the middles between neighbours and what is next to these: they round to nearest even.

    FP8 saturates, only bf16 becomes infinite. So does triton 3.7.1 for compute capability 9.0: cvt.rn.bf16,
    cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.
    """
    for dtype in NARROW:
        bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
        every = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
        np.testing.assert_array_equal(run_cast(every, torch.float32), every.double())
        numbers = every[: len(bits) // 2].double()  # from 0 upwards
        numbers = numbers[numbers.isfinite()]
        low, high, largest = numbers[:-1], numbers[1:], torch.inf if dtype == torch.bfloat16 else numbers[-1]
        middles = ((low + high) / 2).float()
        near = [middles, middles.nextafter(low.float()), middles.nextafter(high.float())]
        x = torch.cat([numbers.float(), *near, torch.tensor([1.003 * numbers[-1], 3.4e38, torch.inf, torch.nan])])
        even = torch.where(bits[: len(low)] % 2 == 0, low, high)
        expected = torch.cat([numbers, even, low, high, torch.tensor([largest] * 3 + [torch.nan])])
        for sign in (1, -1):
            found = run_cast(sign * x, dtype)
            np.testing.assert_array_equal(found, sign * expected)
            assert torch.equal(found.signbit()[:-1], (sign * x).signbit()[:-1]), "zeros have signs"


def check_mlp_kernel():
    """Compare the MLP's kernel with float64, also where tiles reach beyond the edge, and the twin that CPUs run."""
    generator = torch.Generator().manual_seed(0)
    for T, K, N in ((256, 128, 256), (200, 96, 384), (1, 8, 16)):
        grad, w, z = (torch.randn(shape, generator=generator).bfloat16() for shape in ((T, K), (K, N), (T, N)))
        exact = 2 * z.double().relu() * (grad.double() @ w.double())
        (found, squares), (twin, y) = (train_gpt.relu_squared_backward(grad, w, z, kernel) for kernel in (True, False))
        assert torch.equal(squares, y)
        assert torch.equal(y, z.relu().square())
        error, of_twin = (((dz.double() - exact).norm() / exact.norm()).item() for dz in (found, twin))
        assert error < 0.002, "rounded once"
        assert error <= of_twin < 0.003, "rounded twice"
        assert T == 1 or not torch.equal(found, twin), "the kernel ran"


@pytest.mark.parametrize("check", ["check_casts", "check_mlp_kernel"])
def test_interpreted(check: str):
    code = f"import test_gpu_numbers; from gpu_proof import interpret; interpret.mend(); test_gpu_numbers.{check}()"
    command = [sys.executable, "-c", code]
    env = os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run(command, env=env, check=True)


@pytest.mark.proof
@pytest.mark.parametrize("flags", [[], ["--fp8"]], ids=["float32", "bfloat16 and FP8"])
def test_generated_kernels_agree_with_the_cpu_path(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    assert gpu_numbers.main([*flags, "--out", str(tmp_path / "numbers.json")]) == 0
    assert capsys.readouterr().out.endswith(": they agree\n")
    document = json.loads((tmp_path / "numbers.json").read_text())
    names = {row["name"] for row in document["rows"]}
    assert {"loss", "validation", "embed.weight", "value_embeds.0.weight", "bigram_embed.weight", "smear_gate"} <= names
    assert document["kernels"] > 50


FAULTS = {  # on the GPU's path alone
    "a window one token too wide": ("(q - kv <= window)", "(q - kv <= window + doc_ids.is_cuda)", False),
    "an FP8 scale 5% off": ("one / scale, one,", "(1.05 if a.is_cuda else 1) * one / scale, one,", True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, tmp_path: Path):
    right, wrong, fp8 = FAULTS[name]
    script, source = tmp_path / "train_gpt.py", (ROOT / "train_gpt.py").read_text()
    assert source.count(right) == 1
    script.write_text(source.replace(right, wrong))
    one_layer = dict(layers=[train_gpt.Layer("short")], fp8=fp8)  # quick, as it takes a minute
    assert gpu_numbers.compare(ROOT / "train_gpt.py", **one_layer)["agrees"], "without the fault"
    assert not gpu_numbers.compare(script, **one_layer)["agrees"]
