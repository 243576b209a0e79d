"""data/train_text.py: what is chosen for a text, and what is said at the end, however the run ended."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data import pack_text, train_text
from data.pack_nano import to_tokens
from speedrun import ROOT


def test_xz_knows_the_training_text():
    noise = os.urandom(4000)
    assert abs(train_text.xz_bits(noise, noise[:1000])) < 1
    assert train_text.xz_bits(b"a" * 4000, noise) > 7.9


def test_bits_per_byte_by_hand_and_a_loss_that_rose(capsys):
    """An end of text costs nats and is no byte."""
    targets, curve = to_tokens([b"ab", b"cde"])[1:], [(5, 0, 0), (1.5, 3, 3), (2, 6, 6)]
    wanted = f"{1.5 * 6 / 5 / math.log(2):8.3f} nano after step 3"
    train_text.show(curve[:2], targets, 3.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["bits per byte of 5 bytes that were held back:", wanted]
    assert lines[3].startswith("   3.000 xz -9e")
    train_text.show(curve, targets, 3.0)
    assert f"{wanted}: longer is worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "code", "runs", "last_step"),
    [
        ("time", 0, [20, 70], 70),
        ("late", 0, [20], 20),  # the time is over when the machine has been measured
        ("slower", 130, [20, 70], 20),
    ],
)
def test_steps_fit_into_the_time_and_what_is_known_is_shown(tmp_path, monkeypatch, capsys, end, code, runs, last_step):
    """A pretended run takes 2 s and its steps. 27 of the 30 s are planned: 70 steps and 25 for the sample fit."""
    (tmp_path / "book.txt").write_bytes(np.random.default_rng(0).bytes(200_000).hex().encode())
    pack_text.main([f"{tmp_path}/book.txt", f"--out={tmp_path}/own"])
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    done = []
    clock, ms = Mock(wraps=time, monotonic=Mock(return_value=0)), 900 if end == "late" else 200

    def program(flags):
        flags = dict(flag.split("=") for flag in flags if "=" in flag)
        done.append(steps := int(flags["--num_iterations"]))
        clock.monotonic.return_value += 2 + steps * ms / 1000
        lines = [f"step:{step}/{steps} val_loss:2 train_time:{ms * step}ms x\n" for step in (0, steps // 2, steps)]
        if len(done) > 1 and end == "slower":
            lines = lines[:1]  # of the validations
            with pytest.raises(KeyboardInterrupt):
                time.sleep(9)
        Path("logs", flags["--run_id"] + ".txt").write_text("'step:{step}'\n" + "".join(lines))
        return code if len(done) == len(runs) else 0

    monkeypatch.setattr(train_text, "time", clock)
    monkeypatch.setattr(train_text.train_gpt, "cli", program)
    monkeypatch.setattr(train_text.sample, "main", Mock(return_value=0))
    if end == "slower":
        monkeypatch.setattr(train_text, "LATE", 0)
    assert (train_text.train([f"{tmp_path}/own", "30", "0"]), done) == (code, runs)
    out = capsys.readouterr().out
    assert (f"nano after step {last_step}\n" in out, "became slower" in out) == (True, end == "slower")
    assert train_text.sample.main.called == (code == 0)


@pytest.mark.slow
def test_a_text_is_trained_on_and_ctrl_c_shows_what_is_known(tmp_path):
    (tmp_path / "book.txt").write_bytes(Path(ROOT, "train_gpt.py").read_bytes())
    command = [sys.executable, "-u", pack_text.__file__, f"{tmp_path}/book.txt", f"--out={tmp_path}/own", "--train"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            if line.startswith("step:25/"):
                break
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    assert (process.returncode, "bits per byte of" in told, "Traceback" in told) == (130, True, False), told
