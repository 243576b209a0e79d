"""bench: its figures add up, and what it cannot measure is refused."""

import json
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import ROOT, bench


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
    noted = (
        "    def train_step(self, *args):\n        print('a step')\n        return self.step(*args)\n\n    def step("
    )
    source = (ROOT / "train_gpt.py").read_text()
    (other := tmp_path / "1.py").write_text(source.replace("    def train_step(", noted))
    flags = ["--pairs=2", "--cycles=1", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]
    assert bench.main(["--against", str(other), "combo_kernels", *flags]) == 0
    told, document = capfd.readouterr(), json.loads((tmp_path / "out" / "pairs.json").read_text())
    assert told.err.count("a step\n") == 2 * 3
    assert [pair["name"] for pair in document["pairs"]] == [str(other), "combo_kernels"]
    assert all(min(pair["ms"] + pair["ms_of_root"]) > 0 and len(pair["ms"]) == 2 for pair in document["pairs"])
    assert told.out.count("n = 2\n") == 2
    other.write_text("def (")
    assert bench.main(["--against", str(other), *flags]) == 2
    assert re.search(r"invalid syntax .*\n.* bench: \S*1.py: its process ended.*\n$", capfd.readouterr().err)


@pytest.mark.slow
def test_no_process_outlives_turns_that_are_stopped(script_flags, tmp_path):
    (other := tmp_path / "1.py").write_text(f"import os, time\nos.mkfifo('{tmp_path}/began')\ntime.sleep(99)\n")
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
    problems |= {"--against=none.py": "No such file", "--stages=8 --against=dz_warps_4": "--stages 8: expected"}
    for flags, message in problems.items():
        more = [*GPT2_FLAGS, "--num_iterations=40", "--synthetic", f"--out={tmp_path}/out"]
        assert bench.main([*flags.split(), *more]) == 2
        assert re.fullmatch(f"python -m speedrun bench: .*{message}.*\n", capsys.readouterr().err)
