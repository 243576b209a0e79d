"""The kernels for a GPU compute what the CPU path computes: python -m gpu_proof gpu_numbers, Triton's interpreter."""

import json
import os
import subprocess
import sys
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


def test_mlp_kernel_interpreted():
    code = "import test_gpu_numbers; from gpu_proof import interpret; interpret.mend(); "
    command = [sys.executable, "-c", code + "test_gpu_numbers.check_mlp_kernel()"]
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
