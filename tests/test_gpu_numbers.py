"""The kernels for a GPU compute what the CPU path computes: python -m gpu_proof gpu_numbers, Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train_gpt
from gpu_proof import gpu_numbers, pretend_gpu
from speedrun.process import ROOT

if problem := pretend_gpu.missing():
    pytest.skip(f"gpu_numbers {problem}", allow_module_level=True)

pytestmark = pytest.mark.slow


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


def check_squares_kernel():
    """Compare rows with PyTorch's, of which one has no positive number."""
    for T, N in ((8, 2816), (3, 64)):
        z = torch.randn(T, N, generator=torch.Generator().manual_seed(0)).bfloat16()
        z[1] = -z[1].abs()
        (y, scales), (twin, of_twin) = train_gpt.relu_squared_fp8_rows(z), train_gpt.fp8_rows(z.float().relu().square())
        assert torch.equal(y.float(), twin.float())
        torch.testing.assert_close(scales, of_twin, rtol=1e-6, atol=0)


def check_cross_entropy_kernel():
    """Compare losses and gradients with float64: with some targets missing, and two that are equal."""
    generator = torch.Generator().manual_seed(0)
    softcap = 15.0, 23.0, 5.0
    for V, n in ((320, 3), (2112, 1), (4096, 2)):
        z = (3 * torch.randn(12, V, generator=generator)).bfloat16()
        targets = torch.randint(-2, V, (12, n), generator=generator)
        targets[:3] = torch.tensor([-1, -2, V - 1])[:, None]
        weights = torch.tensor([1.0, 0.5, 0.25])[:n]
        exact = train_gpt.softcapped_cross_entropy(z.double(), targets, weights, softcap, True)
        found = train_gpt.cross_entropy_by_kernel(z, targets, weights, softcap, 2.0, torch.float32)
        for a, b, scale in zip(found, exact, (1, 2), strict=True):
            torch.testing.assert_close(a.double(), scale * b, rtol=1e-5, atol=1e-6)
        narrow = train_gpt.cross_entropy_by_kernel(z, targets, weights, softcap, 597.0, torch.float8_e5m2)[1]
        expected = (597 * exact[1]).to(torch.float8_e5m2)
        assert (narrow.float() != expected.float()).float().mean() < 0.001, "rounded from other last bits"


@pytest.mark.parametrize("check", [check_mlp_kernel, check_squares_kernel, check_cross_entropy_kernel])
def test_kernels_interpreted(check: Callable[[], None]):
    code = "import test_gpu_numbers, train_gpt; from gpu_proof import interpret; interpret.mend(); "
    code += f"train_gpt.has_kernels = lambda t: True; test_gpu_numbers.{check.__name__}()"
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
    assert {"loss", "validation", "embed.weight", "value_embeds.1.weight", "ngrams", "smear_gate"} <= names
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
    one_layer = dict(layers=[train_gpt.Layer("short", net=True, ngram=True)], fp8=fp8)  # quick, as it takes a minute
    assert gpu_numbers.compare(ROOT / "train_gpt.py", **one_layer)["agrees"], "without the fault"
    assert not gpu_numbers.compare(script, **one_layer)["agrees"]
