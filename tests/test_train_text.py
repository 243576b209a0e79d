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


def test_a_run_ends_in_time_and_reads_the_text_once():
    for seconds in 5, 20, 90:
        steps = train_text.steps_within(seconds, step=0.05, sequences=2, whole=10_000)
        others = train_text.VALIDATIONS * train_text.VALIDATION * 2 + train_text.SAMPLE
        assert steps == 20 or seconds - 0.05 < (steps + others) * 0.05 <= seconds
    assert train_text.steps_within(90, step=0.05, sequences=2, whole=100) == 100


def test_xz_knows_the_training_text():
    noise = os.urandom(4000)
    assert abs(train_text.xz_bits(noise, noise[:1000])) < 1
    assert train_text.xz_bits(b"a" * 4000, noise) > 7.9


def test_bits_per_byte_by_hand_and_a_loss_that_rose(tmp_path, capsys):
    """An end of text costs nats and is no byte."""
    (tmp_path / "log").write_text(
        "'step:{step}/9 val_loss:{loss}'\n"
        + "".join(
            f"step:{step}/9 val_loss:{loss:.4f} train_time:{step}000ms\nstep:{step + 1}/9 train_loss:1 train_time:1ms\n"
            for step, loss in ((0, 5), (3, 1.5), (6, 2))
        )
    )
    curve = train_text.curve_of(tmp_path / "log")
    assert curve == [(5, 0, 0), (1.5, 3, 3), (2, 6, 6)]
    targets = to_tokens([b"ab", b"cde"])[1:]
    train_text.show(curve[:2], targets, 3.0, 9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "bits per byte of 5 bytes that were held back:"
    assert lines[2] == f"{1.5 * 6 / 5 / math.log(2):8.3f} nano after step 3"
    assert len(lines) == 4
    train_text.show(curve, targets, 3.0, 9)
    assert f"lowest after step 3, {1.5 * 6 / 5 / math.log(2):.3f}, and rose" in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 3, 130])
def test_what_ended_is_shown(tmp_path, monkeypatch, capsys, code):
    pack = tmp_path / "book.txt"
    pack.write_bytes(np.random.default_rng(0).bytes(50_000).hex().encode())
    pack_text.main([str(pack), f"--out={tmp_path}/own"])
    monkeypatch.chdir(tmp_path)
    launched = []

    def cli(flags):
        launched.extend(flags)
        Path("logs", flags[-1].partition("=")[2] + ".txt").write_text("step:9/44 val_loss:2.7726 train_time:9000ms x\n")
        return code

    monkeypatch.setattr(train_text, "measure", lambda _: (0.01, 1.0))
    monkeypatch.setattr(train_text.train_gpt, "cli", cli)
    monkeypatch.setattr(train_text.sample, "main", Mock(return_value=0))
    is_late = code == 3  # starting took longer than all should: the smallest run, and little of xz
    began = time.monotonic() - 99 * is_late
    assert train_text.train([f"{tmp_path}/own", "--seconds=30", f"--began={began}"]) == code
    assert f"--num_iterations={20 if is_late else 44}" in launched
    out = capsys.readouterr().out
    assert f"has read {'1,99' if is_late else '90,'}" in out
    assert ("4.0" in out, "9 of them training" in out) == (True, True)
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
