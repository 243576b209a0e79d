"""What a run touches besides its log: no other file and no network. An import says nothing."""

import os
import subprocess
import sys

import pytest

from conftest import TINY_FLAGS
from speedrun import ROOT

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


def test_an_import_says_nothing_and_sets_what_libraries_read_as_they_load():
    """Unless somebody has set it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTORCH_ALLOC_CONF"} | dict(GOMP_SPINCOUNT="7")
    code = "import os; before = {**os.environ}; import train_gpt; print(dict(os.environ.items() - before.items()))"
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True)
    assert told == "{'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}\n"
