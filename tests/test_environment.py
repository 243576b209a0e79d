"""environment.sh makes, completes and heals .venv: with stand-ins for Python and pip that only leave files behind."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The probes are told by their words; what pip has installed, and what is missing of it, are files in .venv
PYTHON = r"""#!/bin/bash
folder=$(dirname "$(dirname "$0")")
echo "$*" | head -c 200 | tr '\n' ' ' >>"$LOG"; echo >>"$LOG"
case "$*" in
*distributions*) [ ! -e "$folder/missing" ] ;;
*importlib.metadata*) [ -e "$folder/installed" ] ;;
"-m venv .venv")
    mkdir -p .venv/bin; touch .venv/pyvenv.cfg; cp "$0" .venv/bin/python
    [ "$FAULT" != venv ] || exec kill $PPID
    touch .venv/bin/activate ;;
*pip*install*)
    sleep "${PIP:-0}"; touch "$folder/installed"
    [ "$FAULT" != pip ] || { touch "$folder/missing"; kill $PPID; } ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Start a script that needs the environment, in a folder with spaces in its name."""
    folder = tmp_path / "a clone"
    (folder / "base" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "environment.sh", folder)
    (folder / "requirements.txt").write_text("torch==2.13.0\n")
    python = folder / "base" / "bin" / "python3.12"
    python.write_text(PYTHON)
    python.chmod(0o755)
    script = "set -euo pipefail; source ./environment.sh; find_python requirements.txt; echo $python $GOMP_SPINCOUNT"

    def run(**env: str) -> subprocess.Popen:
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        env = os.environ | dict(PYTHON=str(python), LOG=str(tmp_path / "log"), FAULT="", GOMP_SPINCOUNT="") | env
        return subprocess.Popen(["bash", "-c", script, "run.sh"], cwd=folder, env=env, **pipes)

    run.folder, run.log = folder, tmp_path / "log"
    return run


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=30)
    return process.returncode, out, errors


READY = ".venv/bin/python 10000\n"


FAULTS = {
    "venv": "",  # killed while that runs
    "pip": "",
    "its Python is gone": "mkdir -p .venv/bin .venv/lib; touch .venv/pyvenv.cfg; ln -s /nowhere .venv/bin/python",
    "a link to nowhere": "ln -s /nowhere .venv",
    "killed while it was removed": "mkdir .venv; touch .venv/unfinished",
    "empty": "mkdir .venv",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_was_interrupted_is_rebuilt(start, fault):
    subprocess.run(["sh", "-c", FAULTS[fault]], cwd=start.folder, check=True)
    venv = start.folder / ".venv"
    if not FAULTS[fault]:
        assert finish(start(FAULT=fault))[0] != 0
        assert (venv / "unfinished").exists()
    code, out, errors = finish(start())
    assert (code, out, "making the environment" in errors) == (0, READY, True), errors
    assert finish(start()) == (0, READY, "")
    assert not {"lib", "unfinished"} & {path.name for path in venv.iterdir()}


def test_an_environment_that_works_is_kept(start):
    """It lacks a package, or it was only marked; neither what it holds nor anything in its place is removed."""
    assert finish(start())[0] == 0
    venv, own = start.folder / ".venv", start.folder / ".venv" / "lib" / "own"
    own.mkdir(parents=True)
    for change in (venv / "installed").unlink, (venv / "unfinished").touch:
        change()
        assert (*finish(start()), own.exists()) == (0, READY, "", True)
    shutil.rmtree(venv / "bin")
    (venv / "pyvenv.cfg").unlink()
    message = "run.sh: .venv is in the way and no Python environment: move it away\n"
    assert (*finish(start()), own.exists()) == (2, "", message, True)


def test_two_at_once_make_one_environment(start):
    runs = [start(PIP="0.3"), start(PIP="0.3"), start(PIP="0.3")]
    assert [finish(run)[:2] for run in runs] == [(0, READY)] * 3
    log = start.log.read_text()
    assert (log.count("-m venv"), log.count("install")) == (1, 2), "torch, then the files"


def test_python_that_is_named_and_no_python_is_refused(start):
    assert finish(start(PYTHON="/nowhere")) == (2, "", "run.sh: PYTHON=/nowhere is not Python 3.11 or newer\n")


INDICES = {"535.1": ["cu126"], "525.60.13": ["cu126"], "580.65.06": [], "470.1": [], "": []}


@pytest.mark.parametrize("driver", INDICES)
def test_torch_suits_the_driver(start, driver):
    smi = start.folder / "base" / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {driver}\n")
    smi.chmod(0o755)
    assert finish(start(PATH=f"{smi.parent}:{os.environ['PATH']}"))[0] == 0
    assert re.findall(r"/whl/(\w+)", start.log.read_text()) == INDICES[driver]
