"""What a run touches besides its log: no other file and no network."""

import os
import subprocess
import sys

import pytest

from conftest import TINY_FLAGS
from speedrun import ROOT

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


@pytest.mark.slow
def test_nothing_is_written_but_logs_and_no_host_is_reached(script_flags, tmp_path):
    """Train in a fresh home, temporary folder, environment and working directory."""
    home, logs = tmp_path / "home", tmp_path / "logs"
    home.mkdir()
    env = dict(PATH=os.environ["PATH"], HOME=str(home), TMPDIR=str(home), PYTHONDONTWRITEBYTECODE="1")
    flags = [*TINY_FLAGS, *script_flags, "--checkpoint_every=2", f"--log_dir={logs}", "--run_id=r"]
    subprocess.run([sys.executable, "-c", OFFLINE, ROOT / "train_gpt.py", *flags], cwd=home, env=env, check=True)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    names = {str(path.relative_to(logs)) for path in logs.rglob("*")}
    assert names >= {f"r.{kind}" for kind in ("txt", "json", "pt", "ngrams0", "checkpoint")}
    assert {name.partition(".")[0] for name in names} == {"r"}
