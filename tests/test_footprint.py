"""What a run touches besides its log: no other file and no network. An import says nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY_FLAGS
from world_worker import ROOT

pytestmark = pytest.mark.slow
# Every name that is looked up and every connection goes through the audit of Python
OFFLINE = """
import runpy, sys
def audit(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "urllib.Request"):
        raise SystemExit(f"network: {event} {args}")
sys.addaudithook(audit)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_nothing_is_written_but_logs_and_no_host_is_reached(script_flags, tmp_path: Path):
    """Train in a fresh home, temporary folder, environment and working directory."""
    home, temporary, cwd, logs = folders = [tmp_path / name for name in ("home", "tmp", "cwd", "logs")]
    for folder in folders:
        folder.mkdir()
    env = dict(PATH=os.environ["PATH"], HOME=str(home), TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="1")
    flags = [*TINY_FLAGS, *script_flags, "--checkpoint_every=2", f"--log_dir={logs}", "--run_id=r"]
    command = [sys.executable, "-c", OFFLINE, ROOT / "train_gpt.py", *flags]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [path for folder in folders[:3] for path in folder.rglob("*") if path.is_file()] == []
    names = {str(path.relative_to(logs)) for path in logs.rglob("*")}
    assert names >= {f"r.{kind}" for kind in ("txt", "json", "pt", "ngrams0", "checkpoint")}
    assert {name.partition(".")[0] for name in names} == {"r"}


def test_an_import_says_nothing_and_leaves_the_environment():
    code = "import os; before = dict(os.environ); import train_gpt; assert dict(os.environ) == before"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
