"""docs/example.md: its commands run in order, with two pairs of 30 steps."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import pack_nano
from synthetic_logs import ROOT


@pytest.mark.slow
def test_commands_of_the_page_run(tmp_path):
    """Verify refuses both times: first a placeholder is left, then a loss that 30 steps leave above the target."""
    copy = tmp_path / "repository"
    own = shutil.ignore_patterns(".git", ".venv", "logs", "nano", "fineweb10B", "own", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=own)
    pack_nano.main(["--out", str(copy / "data" / "nano")])
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    env = os.environ | dict(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", PYTHONDONTWRITEBYTECODE="1")
    page = (ROOT / "docs" / "example.md").read_text()
    page = page.replace("--pairs 10", "--pairs 2").replace("--preset nano", "--preset nano --num_iterations 30")
    for command in re.findall(r"^ {4}\$ (.*)$", page, re.MULTILINE):
        done = subprocess.run(["sh", "-c", command], cwd=copy, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == ("records verify" in command), (command, done.stdout, done.stderr)
    assert len(list((copy / "logs" / "SqrtCooldown").glob("*.txt"))) == 4
    after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and "logs" not in path.parts[:-1]}
    assert after == before, "the example leaves the repository as it was"
