"""speedrun/own_text.py: what is chosen for a text, when training stops, and what is said at the end."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import train_gpt
from conftest import SMALL
from data.pack_nano import to_tokens
from data.shards import write_shard
from speedrun import ROOT, counts, own_text, texts
from speedrun.own_text import Pace, Run, Text
from train_gpt import UserError
from world_worker import wait_for


def test_steps_seconds_and_passes_by_size():
    sizes = [60_000, 500_000, 2_000_000, 5_000_000, 50_000_000]
    assert [own_text.steps_of(n) for n in sizes] == [29, 244, 976, 1562, 4941]
    assert [round(own_text.seconds_of(n)) for n in sizes] == [32, 74, 100, 100, 100]
    assert [own_text.passes_of(n, 100) for n in sizes] == [8, 8, 8, 4, 1]


@pytest.mark.parametrize("size", [54_000, 300_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("seconds", [10, 60, 600])
def test_runs_are_planned_to_fill_the_time(size, seconds):
    text = Text([], [], size, min(65_536, size // 16), seconds)
    first = Run(own_text.LOGS, 1.0, step=0.04, rest=3.0)
    steps = own_text.plan(text, seconds, first)
    takes = sum(first.rest + first.step * (n + 3 * text.val_tokens / own_text.STEP) for n in steps)
    takes += size / 1e6 if size < 5e6 else 5
    takes += 2 * first.rest + 12 * text.val_tokens / own_text.STEP * first.step
    most = (size * own_text.passes_of(size, seconds) - 1) // own_text.STEP
    assert steps == sorted(steps)
    assert all(0.48 < a / b < 0.52 for a, b in pairwise(steps))
    assert not steps or (takes == pytest.approx(seconds, rel=0.02) if steps[-1] < most else takes < seconds * 1.01)
    assert not steps or max(steps) <= most
    assert bool(steps) == (seconds > 10)
    assert len(steps) <= 2 or steps[0] * own_text.STEP >= 0.9 * min(size, most * own_text.STEP / 8)


def test_bits_are_told_while_it_trains_and_slow_steps(capsys):
    pace = Pace("r", Text([], [b"x" * 100], 0, 64, 60))
    for line in (
        "0/100 val_loss:5.0@0",
        "25/100 val_loss:1.9@9",
        "25/100 train_loss:1.5@1000",
        "50/100 train_loss:1.5@3900",
    ):
        loss, _, ms = line.partition("@")
        pace(f"step:{loss} train_time:{ms}ms step_avg:1ms\n")
    assert capsys.readouterr().out == "r, step 25 of 100: 2.741 bits per byte\n"
    pace("step:75/100 train_loss:1.5 train_time:7900ms step_avg:1ms\n")
    pace("step:100/100 train_loss:1.5 train_time:15000ms step_avg:1ms\n")
    assert capsys.readouterr().out == "note: steps take 4 times as long as before: other programs run, too\n"


def test_bits_per_byte_by_hand():
    """An end of text costs nats and is no byte. The first one is read only."""
    for tokens, size in {2: 2, 3: 2, 4: 3, 7: 5, 8: 6}.items():  # of |ab|cde|f
        text = Text([], [b"ab", b"cde", b"f"], 0, tokens, 60)
        assert own_text.bits_per_byte(1.5, text) == pytest.approx(1.5 * tokens / size / math.log(2)), tokens


def test_others_know_the_training_text():
    noise = os.urandom(4000)
    more = noise + os.urandom(4000)  # which is not scored
    assert all(bits < 0.2 for bits in own_text.compressed(Text([noise], [more], 0, 4000, 60)).values())
    assert all(bits > 7.9 for bits in own_text.compressed(Text([b"a" * 4000], [noise], 0, 4000, 60)).values())


def test_a_mixture_is_scored_on_exactly_the_validation_of_the_runs(corpus, tmp_path, monkeypatch):
    """The last model's part of it is the loss that the run said, where its softmax has no padding."""
    monkeypatch.setattr(train_gpt.gc, "collect", lambda: 0)  # it takes as long as the run
    monkeypatch.setattr(counts, "SYMBOLS", 320)
    words = b"muon adam rotary window shard block ".split()
    rng = np.random.default_rng(0)
    text = Text(
        [b" ".join(rng.choice(words, 40)) for _ in range(40)],
        [b" ".join(rng.choice(words, 9)) for _ in range(9)],
        0,
        288,
        60,
    )
    for name, documents in dict(train=text.train, val=text.val).items():
        write_shard(tmp_path / f"{name}.bin", to_tokens(documents))
    files = f"--train_files {tmp_path}/train.bin --val_files {tmp_path}/val.bin --log_dir {tmp_path} --run_id r"
    result = train_gpt.main([*SMALL, *files.split(), "--dtype=float64", "--save_checkpoint", "--vocab_size=320"])
    found = own_text.mix([tmp_path / "r"], text)
    assert found["the best model alone"] == pytest.approx(own_text.bits_per_byte(result["val_loss"], text), abs=1e-9)
    assert found["all together"] < found["the best model alone"]
    assert (tmp_path / "r.mixture").exists()


@pytest.mark.parametrize(
    ("losses", "codes", "mixed"),
    [
        ([4.0, 3.0, 2.0, 1.0], [0, 0, 0, 0], "1234"),
        ([2.0, 1.9, 1.95, 2.1], [0, 0, 0, 0], "4132"),
        ([None], [3], ""),
        ([2.0, None], [0, 130], "1"),
        ([2.0, 1.5], [0, 1], "12"),
        ([2.0, OSError("no memory")], [0, 1], "1"),
    ],
)
def test_it_trains_what_is_planned_and_shows_what_is_finished(tmp_path, monkeypatch, losses, codes, mixed):
    """The best run is the last one of those that are mixed."""
    monkeypatch.setattr(own_text, "LOGS", tmp_path)
    launched, shown = [], []

    def launch(flags, pace):
        named = dict(zip(flags[::2], flags[1::2], strict=True))
        loss = losses[len(launched)]
        if isinstance(loss, OSError):
            launched.append((29, "0.1"))
            raise loss
        if loss:
            result = dict(val_loss=loss, train_time_ms=1000)
            (tmp_path / f"{named['--run_id']}.json").write_text(json.dumps(result))
        launched.append((int(named["--num_iterations"]), named["--muon_lr"]))
        return codes[len(launched) - 1]

    monkeypatch.setattr(own_text, "launch", launch)
    monkeypatch.setattr(own_text, "plan", lambda *_: [29, 58, 116])
    monkeypatch.setattr(own_text, "compressed", lambda _: {"xz": 3.0})
    monkeypatch.setattr(own_text, "figures", lambda runs, *_: shown.append(runs) or (tmp_path, {}))
    monkeypatch.setattr(own_text, "show", lambda *_: None)
    text = Text([], [], 60_000, 8192, 24)
    now, flags = time.monotonic(), (["--preset", "nano"], ["--muon_lr", "0.1"])
    assert own_text.train(*flags, text, now) == codes[-1]
    assert launched == [(n, "0.1") for n in (24, 29, 58, 116)[: len(losses)]]
    assert ["".join(run.path.name[-1] for run in runs) for runs in shown] == ([mixed] if mixed else [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_second_pass_ends_with_the_figures_of_the_first(tmp_path, number):
    """A terminal's come to all. None outlives a kill."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.sh").write_text("""#!/bin/bash
trap 'touch told; exit 7' INT TERM
[[ $* =~ own-[0-9-]+ ]]
if [[ $BASH_REMATCH == *-2 ]]; then touch begun; for i in {1..60}; do sleep 0.05; done; fi
echo '{"val_loss": 1.0, "train_time_ms": 1}' >logs/$BASH_REMATCH.json
""")
    (tmp_path / "run.sh").chmod(0o755)
    code = f"""
from speedrun import own_text
own_text.ROOT, own_text.LOGS = own_text.Path({str(tmp_path)!r}), own_text.Path({str(tmp_path)!r}, "logs")
raise SystemExit(own_text.train([], [], own_text.Text([b"words " * 99], [b"words " * 9], 60_000, 8, 1e9), 0))"""
    how = dict(cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], **how, start_new_session=True)
    wait_for((tmp_path / "begun").exists)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 7)
    assert ("bits per byte of the validation text" in out) == (number != signal.SIGKILL)
    wait_for((tmp_path / "told").exists)


def test_a_model_goes_on_from_the_first_words_and_is_then_the_newest(tmp_path, monkeypatch, capsys):
    prompts = []
    monkeypatch.setattr(own_text.subprocess, "run", lambda argv, **_: prompts.append(argv[-1]))
    monkeypatch.setattr(own_text.importlib.util, "find_spec", lambda name: None)  # no picture
    (model := tmp_path / "own-1.pt").touch()
    os.utime(model, (1, 1))
    text = Text([b"some words"], ["  --- ä ß words on and on".encode()], 11, 8, 60)
    (mixture := tmp_path / "own-1.mixture").touch()
    own_text.show(mixture, {"all together": 1.443}, text)
    assert "bits per byte of the validation text:\n   1.443 all together\n" in capsys.readouterr().out
    assert (prompts, mixture.stat().st_mtime > model.stat().st_mtime) == (["--prompt=  --- ä ß words "], True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("damaged"), MemoryError()])
def test_what_stops_the_mixing_loses_no_figure(monkeypatch, capsys, error):
    monkeypatch.setattr(own_text, "mix", Mock(side_effect=error))
    run = Run(own_text.LOGS / "own-1", math.log(2), 1.0, 1.0)
    found = own_text.figures([run], Text([], [b"x" * 100], 0, 64, 60), {"xz": 2.0})
    assert found == (own_text.LOGS / "own-1.pt", {"the best model alone": pytest.approx(1), "xz": 2.0})
    assert "the models are not mixed: " in capsys.readouterr().out


def test_a_text_is_held_against_others_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "FIGURES", tmp_path / "figures.json")
    val = [b"abc", b"de"]  # scored: a b c | d, of which four are bytes
    says = """train on it: run.sh --val_tokens 5
text: 1,200 bytes to train on
bits per byte of the validation text:
   1.500 all together
   2.000 the best model alone
   1.750 counts alone
   2.500 xz -9e, given 1,200 bytes of the training text
   2.000 PPMd 6, given 1,200 bytes of the training text
"""

    def run(argv):
        if argv[0] == "data/pack_text.py":
            write_shard(Path(argv[argv.index("--out") + 1], "val_000000.bin"), to_tokens(val))
            return says
        return json.dumps(dict(val_curve=[[0, 9.0, 0], [9, 2 * math.log(2), 1]]))

    monkeypatch.setattr(texts, "own_process", run)
    assert texts.main([str(tmp_path / "notes.txt"), "--runs", "2"]) == 0
    assert "| notes | 1 | 0 | 1.500 | 2.000 | 1.750 | 2.000 | 2.500 | 2.500 | 2 |" in texts.table()
    assert (tmp_path / "figures.png").stat().st_size > 1000
