"""What a GPU launches for gpt2 is no more than fake_gpu.json says. The gate takes three layers, every week all are."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import train_gpt
from speedrun import ROOT

STEPS = json.loads((ROOT / "tests" / "fake_gpu.json").read_text())["steps"]
THREE_LAYERS = """
PRESETS["gpt2"] = dataclasses.replace(
    PRESETS["gpt2"], layers=(*GPT2_LAYERS[:2], GPT2_LAYERS[-1]._replace(attn_input=0, mudd=0, head_mix=(1, 0)))
)
"""
MARKS = dict.fromkeys(STEPS, pytest.mark.frozen) | {"three layers": pytest.mark.slow}


@pytest.mark.skipif(not (find_spec("triton") and shutil.which("g++")), reason="needs triton and g++")
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def test_a_step_launches_moves_and_spills_no_more_than_is_written_down(name: str, tmp_path: Path):
    (script := tmp_path / "train_gpt.py").write_text(
        Path(train_gpt.__file__).read_text() + THREE_LAYERS * ("three" in name)
    )
    command = [sys.executable, ROOT / "tests" / "fake_gpu.py", "--json", f"--script={script}", *STEPS[name]["flags"]]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout, run.stderr
    found = json.loads(run.stdout)
    spills = sorted(call["spills"] for call in found["calls"] if call.get("spills"))
    assert (found["failed"], spills) == ([], STEPS[name]["spills"])
    for part in ("step", "validation"):
        own, most = found["totals"][part], STEPS[name][part]
        assert own["launches"] <= most["launches"], part
        assert own["product"] <= most["GB of products"], part
        assert own["fused"] + own["other"] <= most["GB of all else"], part
