"""The file that comes back from a first GPU run: whole whatever fails, and without names of host and user."""

import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train_gpt
from benchmarks import ENVIRONMENT, first_gpu_run
from conftest import TINY_FLAGS, pytest_configure

SECRETS = "gpu-box-17", "marie", "/srv/people", "pierre", "10.20.30.40"
SHOWN = "GPU-BOX-17, driver 580.65.06, torch 2.13.0, /srv/people/marie/a.bin, torchinductor_marie, Marie\n"
SHOWN += "/home/pierre/x.bin, gpu-box-17.lab.example:29500, 10.20.30.40:29500, rosemarie, maries"
CLEAN = ["HOST, driver 580.65.06, torch 2.13.0, ~/a.bin, torchinductor_USER, USER"]
CLEAN += ["~/x.bin, HOST:29500, ADDRESS:29500, rosemarie, maries"]


def test_the_file_is_whole_whatever_fails_and_names_nobody(monkeypatch, tmp_path: Path, capsys):
    def stages(cfg, flags, processes, folder: Path):
        yield "fails", ["sh", "-c", f"echo '{SHOWN}' >&2; exit 3"]
        yield "lacks", ["no-such-program-marie"]
        yield "hangs", ["sh", "-c", f"(sleep 2; touch {tmp_path}/alive) & echo begun; wait"]
        log = f"source\n{'=' * 100}\n{SHOWN}\n{'=' * 100}\nstep:0/1"
        yield "works", ["sh", "-c", f"echo '{log}' > '{folder}/works/short.txt'"]

    monkeypatch.setattr(first_gpu_run, "stages", stages)
    monkeypatch.setattr(first_gpu_run, "LIMIT", 1)
    monkeypatch.setattr(first_gpu_run.platform, "node", lambda: "gpu-box-17.lab.example")
    monkeypatch.setenv("HOME", "/srv/people/marie")
    monkeypatch.setenv("USER", "marie")
    first_gpu_run.private.cache_clear()
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError)))  # the terminal has gone away
    before = [(n, signal.signal(n, signal.SIG_DFL)) for n in (signal.SIGHUP, signal.SIGTERM)]
    out = tmp_path / "new/result.json"
    assert first_gpu_run.main(["--preset=nano", "--device=cpu", "--train_files=/srv/people/marie", f"--out={out}"]) == 1
    assert [signal.signal(*usual) for usual in before] == [signal.SIG_IGN, signal.default_int_handler]
    first_gpu_run.private.cache_clear()
    found = json.loads(out.read_text())["stages"]
    assert [found[name]["exit_code"] for name in ("fails", "lacks", "hangs", "works")] == [3, None, None, 0]
    assert (found["fails"]["output"], "no-such-program-USER" in found["lacks"]["problem"]) == (CLEAN, True)
    assert (found["hangs"]["problem"], found["hangs"]["output"]) == ("not done in 1 s", ["begun"])
    assert found["works"]["files"] == {"short.txt": [*CLEAN, "=" * 100, "step:0/1"]}, "a log without its source"
    text = out.read_text().lower().replace("rosemarie, maries", "")  # words that hold a name are none
    assert not [secret for secret in SECRETS if secret in text]
    assert "fails: FAILED, exit code 3" in capsys.readouterr().out
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.exit.Exception, match="no GPU that torch can use") as stopped:  # ./test.sh -m gpu
        pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr="gpu")))
    assert stopped.value.returncode == 2
    assert first_gpu_run.main([f"--out={tmp_path / 'result.json'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("--preset nano --device cpu tries this without one")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_all_stages_on_a_cpu(monkeypatch, tmp_path: Path):
    """With the benchmarks of two processes, as on a machine with two GPUs."""
    monkeypatch.setattr(first_gpu_run, "ENVIRONMENT", {})  # the benchmarks set it themselves
    out, flags = tmp_path / "result.json", [*TINY_FLAGS, "--train_seq_len=512", "--batch_tokens=1024"]  # fewer to load
    assert first_gpu_run.collect(train_gpt.parse_args(flags), flags, 2, out) == 0, out.read_text()
    found = json.loads(out.read_text())["stages"]
    assert set(found) == {"check", "self-test", "short run", "benchmarks", "benchmarks on all"}
    assert json.loads("".join(found["short run"]["files"]["short.json"]))["num_iterations"] == 8
    both = json.loads("".join(found["benchmarks on all"]["files"]["benchmark.json"]))
    assert (both["processes"], ENVIRONMENT.items() <= both["environment"].items()) == (2, True)
    assert {"step: communication", "Newton-Schulz of 8 x 32 x 32"} <= both["figures"].keys()
