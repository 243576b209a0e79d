"""Ideas that a user may have pass the tests with --idea, and a fault does not."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from world_worker import ROOT

pytestmark = pytest.mark.slow
FILES = [f"tests/test_{name}.py" for name in ("model", "head", "optimizers")]
FILES += ["tests/test_train.py::test_warm_up_and_checkpoints_change_nothing_and_are_off_the_clock"]
FILES += ["tests/test_checkpoint.py::test_a_resumed_run_goes_on_in_its_log_with_its_seed_and_on_its_clock"]
LION = re.search(r"^\+(class Lion.*?\n)\+\n\+\n", (ROOT / "docs/change.md").read_text(), re.M | re.S)[1]
SWIGLU = "linear(F.silu(linear(x, self.c_gate.mT)) * linear(x, self.c_fc.mT), c_proj)"
ROW = 'Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True, mlps=2)'  # of mini
IDEAS = {
    "a layer less": {f"    {ROW},\n": "", "reads=3": "reads=2", "mudd=(3, 2, 1)": "mudd=(2, 1)"},
    "a third kind of window": {
        "windows=dict(short=": "windows=dict(mid=256, short=",
        ROW: 'Layer("mid", half_v=True, mlps=2)',
    },
    "two stages": {
        f"{word} GPT2_STAGES": f"{word} tuple(row._replace(share=1 / 2) for row in GPT2_STAGES[:2])"
        for word in ("=", "stage in")
    },
    "SwiGLU": {
        '"*.c_fc"': '"*.c_fc *.c_gate"',
        "        self.c_fc =": "        self.c_gate = uniform_weight(K, K, cfg.mlp_dim)\n        self.c_fc =",
        "ReluSquaredMLP.apply(x, self.c_fc.mT.type_as(x), c_proj, fp8, self.by_kernel)": SWIGLU,
    },
    "Lion for the embedding": {
        "OPTIMIZERS = {": LION.replace("\n+", "\n") + '\n\nOPTIMIZERS = {"Lion": Lion, ',
        'Group("Adam", "embed.weight"': 'Group("Lion", "embed.weight"',
        "tied_frac: float = 1.0": "tied_frac: float = 0.0",
    },
}
FAULT = {"(q >= kv) & ": ""}  # attention sees the tokens to come


def run_tests(folder: Path, edits: dict[str, str]) -> subprocess.CompletedProcess:
    """Run tests of the root with --idea in a copy of the repository whose script has these edits."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "logs", "*.bin", "*.png", "__pycache__"))
    script = folder / "train_gpt.py"
    source = script.read_text()
    for old, new in edits.items():
        assert old in source, f"train_gpt.py no longer has {old}"
        source = source.replace(old, new)
    script.write_text(source)
    command = [sys.executable, "-m", "pytest", "--idea", "-q", "-x", *FILES]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_passes(tmp_path, idea: str):
    run = run_tests(tmp_path / "copy", IDEAS[idea])
    assert run.returncode == 0, run.stdout[-3000:]


def test_a_fault_does_not_pass(tmp_path):
    run = run_tests(tmp_path / "copy", FAULT)
    assert run.returncode == 1
    assert "1 failed" in run.stdout
