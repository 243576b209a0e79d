"""The kernels for a GPU compute what the CPU path computes: python -m gpu_proof gpu_numbers, and Triton's interpreter.

The checks of the interpreter run together in a process of their own, which is told to interpret before it begins.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_proof import gpu_numbers, pretend_gpu
from records.process import ROOT

if problem := pretend_gpu.missing():
    pytest.skip(f"gpu_numbers {problem}", allow_module_level=True)

import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers

pytestmark = pytest.mark.slow
NARROW = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


# ---- Kernels ---------------------------------------------------------------------------------------------------------
@triton.jit
def cast(source, target, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, i < n).to(target.dtype.element_ty), i < n)


@triton.jit
def arithmetic(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + N + i, x * y)
    tl.store(out + 2 * N + i, tl.where(x < y, x, y))
    tl.store(out + 3 * N + i, tl.maximum(x, y))
    tl.store(out + 4 * N + i, (x + y) * y)
    tl.store(out + 5 * N + i, tl.load(a + i, i < 100, 3.0))
    tl.store(out + 6 * N + i, tl.abs(x))


@triton.jit
def add_row_atomically(row, value, out, n, N: tl.constexpr):
    x, j = tl.program_id(0) + tl.arange(0, 1)[:, None], tl.arange(0, N)[None, :]
    at = tl.broadcast_to(j + N * tl.load(row + x, x < n, 0), [1, N])
    tl.atomic_add(out + at, tl.load(value + j, x < n, 0), x < n)


@triton.jit
def not_mended(source, out, NAME: tl.constexpr):
    i = tl.arange(0, 8)
    x = tl.load(source + i)
    if NAME == "bitcast":
        tl.store(out + i, x.to(tl.int16, bitcast=True))
    elif NAME == "sum":
        tl.store(out, tl.sum(x, 0))
    else:
        tl.store(out + i, triton_helpers.libdevice.rsqrt(x))


@triton.jit
def compose(scale, shift, scale_after, shift_after):  # two affine functions: associative, but not commutative
    return scale * scale_after, shift * scale_after + shift_after


@triton.jit
def reductions(source, out, scans, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(source + i * N + j)
    rows, scales = tl.arange(0, M), x * 0.1 + 1
    tl.store(out + rows, triton_helpers.max2(x, 1))
    tl.store(out + M + rows, triton_helpers.min2(x, 1))
    tl.store(out + 2 * M + rows, tl.sum(x, 1))
    tl.store(out + 3 * M + rows, triton_helpers.any(x > 2, 1).to(tl.float32))
    tl.store(out + 4 * M + rows, tl.reduce((scales, x * x), 1, compose)[1])
    tl.store(out + 5 * M + tl.arange(0, N), triton_helpers.max2(x, 0))
    tl.store(scans + i * N + j, tl.associative_scan((scales, x * x), 1, compose)[1])
    tl.store(scans + M * N + i * N + j, tl.associative_scan((scales, x * x), 0, compose)[1])


# ---- Checks of the interpreter, each of one mended part --------------------------------------------------------------
def run_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(x), dtype=dtype)
    cast[(-(-len(x) // 1024),)](x, out, len(x), BLOCK=1024)
    return out.double()


def check_casts_round_to_nearest_even_and_fp8_saturates():
    """Cast all numbers, and the middles between neighbours and what is next to these. Only bf16 becomes infinite.

    So does triton 3.7.1 for compute capability 9.0: cvt.rn.bf16, cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2.
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


def check_arithmetic_in_bf16_rounds_every_result():
    a, b = (torch.randn(256, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    out = torch.empty(7, 256, dtype=torch.bfloat16)
    arithmetic[(1,)](a, b, out, N=256)
    x, y = a.double(), b.double()
    exact = [x + y, x * y, torch.minimum(x, y), torch.maximum(x, y), (x + y).bfloat16().double() * y]
    exact += [torch.where(torch.arange(256) < 100, x, 3), x.abs()]
    assert torch.equal(out, torch.stack(exact).bfloat16())


def check_an_atomic_addition_heeds_a_mask_of_one_number():
    """Half the lanes of such a mask came from memory behind it."""
    row, value, out = torch.tensor([1, 1, 0, 0]), torch.rand(64), torch.zeros(2, 64)
    add_row_atomically[(4,)](row, value, out, 3, N=64)
    torch.testing.assert_close(out, torch.stack([value, 2 * value]))


def check_reductions_and_scans_combine_in_order():
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x[3, 4], x[5, 31] = torch.nan, 9
    out, scans = torch.empty(5 * 16 + 32), torch.empty(2, 16, 32)
    reductions[(1,)](x, out, scans, M=16, N=32)
    expected, totals = x.double(), []
    for axis in (1, 0):
        total = torch.zeros(x.size(1 - axis), dtype=torch.float64)
        steps = [total := total * (part * 0.1 + 1) + part * part for part in expected.unbind(axis)]
        totals.append(torch.stack(steps, axis))
    rows = [expected.amax(1), expected.amin(1), expected.sum(1), (expected > 2).any(1)]
    rows += [totals[0][:, -1], expected.amax(0)]
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6, equal_nan=True)
    close(out.double(), torch.cat([r.double() for r in rows]))
    close(scans.double(), torch.stack(totals))


def check_what_is_not_mended_raises():
    narrow, integers = torch.ones(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int16)
    calls = {"libdevice.rsqrt of bf16": lambda: not_mended[(1,)](narrow, torch.ones(8), NAME="rsqrt")}
    calls["atomic"] = lambda: add_row_atomically[(1,)](torch.tensor([0]), narrow, narrow, 1, N=8)
    calls["ReduceOps.sum"] = lambda: not_mended[(1,)](narrow, torch.ones(8), NAME="sum")
    calls["bitcast"] = lambda: not_mended[(1,)](narrow, integers, NAME="bitcast")
    for message, call in calls.items():
        with pytest.raises(Exception, match=f"NotImplementedError.*{message}"):
            call()


def run_checks() -> None:
    from gpu_proof import interpret

    interpret.mend()
    for check in [function for name, function in globals().items() if name.startswith("check_")]:
        check()


def test_the_interpreter():
    command = [sys.executable, "-c", "import test_gpu_numbers; test_gpu_numbers.run_checks()"]
    env = os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    subprocess.run(command, env=env, check=True)


# ---- The command -----------------------------------------------------------------------------------------------------
@pytest.mark.proof
@pytest.mark.parametrize("flags", [[], ["--fp8"]], ids=["float32", "bfloat16 with FP8 head"])
def test_generated_kernels_agree_with_the_cpu_path(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    assert gpu_numbers.main([*flags, "--out", str(tmp_path / "numbers.json")]) == 0
    assert capsys.readouterr().out.endswith(": they agree\n")
    document = json.loads((tmp_path / "numbers.json").read_text())
    names = {row["name"] for row in document["rows"]}
    assert {"loss", "validation", "embed.weight", "value_embeds.0.weight", "bigram_embed.weight", "smear_gate"} <= names
    assert document["kernels"] > 50


ONE_LAYER = "--attention_layout=S --value_embed_layout= --skip_layout= --source_layout= --xsa_layout= --gate_layout= "
ONE_LAYER = f"{ONE_LAYER}--dc_layout= --gate_layer=0 --mudd_layers= --bigram_rows=0".split()
FAULTS = {  # on the GPU's path alone
    "a window one token too wide": ("(q - kv <= window)", "(q - kv <= window + doc_ids.is_cuda)", []),
    "an FP8 scale 5% off": ("one / scale, one,", "(1.05 if a.is_cuda else 1) * one / scale, one,", ["--fp8"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    right, wrong, flags = FAULTS[name]
    script, source = tmp_path / "train_gpt.py", (ROOT / "train_gpt.py").read_text()
    assert source.count(right) == 1
    script.write_text(source.replace(right, wrong))
    assert gpu_numbers.main([*flags, "--script", str(script), *ONE_LAYER]) == 1
    assert "DISAGREES" in capsys.readouterr().out
