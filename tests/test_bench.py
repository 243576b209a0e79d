"""bench: its figures add up, and what it cannot measure is refused."""

import gc
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train_gpt
from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import ROOT, bench


@pytest.fixture(autouse=True)
def script_as_before(monkeypatch):
    """Take back what bench, a program, changes for good."""
    for name in "start_collective", "step_optimizers":
        monkeypatch.setattr(train_gpt, name, getattr(train_gpt, name))
    yield
    gc.enable()


@pytest.mark.parametrize("share", [[], ["--one_of=2", "--synthetic"]], ids=["alone", "as one of two"])
def test_parts_of_a_step_add_up_to_it(share: list[str], script_flags, tmp_path, capsys):
    assert bench.main(["--cycles=3", *share, *TINY_FLAGS, *script_flags, f"--out={tmp_path}"]) == 0
    told, document = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    [figures] = document["stages"].values()
    assert all(min(values) > 0 and max(values) < math.inf for values in figures.values())
    np.testing.assert_allclose(np.sum([figures[part] for part in bench.PARTS], axis=0), figures["step"])
    assert f"| step | {np.median(figures['step']):,.2f} (" in told
    assert told.startswith((tmp_path / "bench.md").read_text().strip())


@pytest.mark.slow
def test_scripts_are_timed_in_turns(script_flags, tmp_path, capfd):
    """A cycle of nano is a step. Each turn has two before the one that is timed."""
    noted = "step = Trainer.train_step\nTrainer.train_step = lambda *args: (print('a step'), step(*args))[1]\n"
    (other := tmp_path / "1.py").write_text(Path(train_gpt.__file__).read_text() + noted)
    flags = ["--pairs=2", "--cycles=1", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]
    assert bench.main(["--against", str(other), "flex_tma", *flags]) == 0
    told, document = capfd.readouterr(), json.loads((tmp_path / "out" / "pairs.json").read_text())
    assert told.err.count("a step\n") == 2 * 3
    assert [pair["name"] for pair in document["pairs"]] == [str(other), "flex_tma"]
    assert all(min(pair["ms"] + pair["ms_of_root"]) > 0 and len(pair["ms"]) == 2 for pair in document["pairs"])
    assert told.out.count("a step of 128 tokens, the root ") == told.out.count("n = 2\n") == 2
    other.write_text(f"{other.read_text()}raise SystemExit('stopped')\n")
    assert bench.main(["--against", str(other), *flags]) == 2
    assert re.search(r"stopped\n.* bench: \S*1.py: its process ended.*\n$", capfd.readouterr().err)


def test_a_ratio_is_of_ms_a_token():
    pair = dict(name="my.py", stage=1, tokens=100.0, tokens_of_root=50.0, ms=[4.0, 4.0], ms_of_root=[2.0, 2.0])
    told = "4.00 ms a step of 100 tokens, the root 2.00 ms a step of 50 tokens: ratio of ms a token 1.0000 (95% "
    assert bench.tell(pair).startswith(f"my.py, stage 1: {told}")


@pytest.mark.slow
def test_no_process_outlives_turns_that_are_stopped(script_flags, tmp_path):
    waits = f"import os, time\nos.mkfifo('{tmp_path}/began')\ntime.sleep(99)\n"
    (other := tmp_path / "1.py").write_text(Path(train_gpt.__file__).read_text() + waits)
    command = [sys.executable, "-m", "speedrun", "bench", f"--out={tmp_path}/out", *TINY_FLAGS, *script_flags]
    with subprocess.Popen([*command, "--against", str(other)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as parent:
        while not (tmp_path / "began").exists():
            time.sleep(0.1)
        parent.send_signal(signal.SIGINT)
        assert parent.communicate(timeout=30)[1] == "python -m speedrun bench: interrupted\n"  # others have its stderr
    assert parent.returncode == 130


def test_edits_of_the_script_are_of_what_it_has():
    script = (ROOT / "train_gpt.py").read_text()
    assert {name: script.count(old) for name, (old, _) in bench.VARIANTS.items()} == dict.fromkeys(bench.VARIANTS, 1)


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path, capsys):
    problems = {"--stages=9": "--stages 9: expected", "--one_of=3": "3 ranks: expected a divisor"}
    (syntax := tmp_path / "1.py").write_text("def (")
    problems |= {"--against=none.py": "neither a file nor a record", f"--against={syntax}": "invalid syntax"}
    problems |= {"--stages=8 --against=dz_warps_4": "--stages 8: expected"}
    problems |= {"--against=ANVIL2": "ANVIL2 lacks StepSchedule.*: bench times scripts that have what the root has"}
    for flags, message in problems.items():
        more = [*GPT2_FLAGS, "--num_iterations=40", "--synthetic", f"--out={tmp_path}/out"]
        assert bench.main([*flags.split(), *more]) == 2
        assert re.fullmatch(f"python -m speedrun bench: .*{message}.*\n", capsys.readouterr().err)
