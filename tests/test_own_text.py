"""speedrun/own_text.py: what is chosen for a text, when training stops, and what is said at the end."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import train_gpt
from conftest import SMALL
from data.pack_nano import to_tokens
from data.shards import write_shard
from speedrun import ROOT, own_text
from speedrun.own_text import Text
from world_worker import wait_for


def test_steps_and_passes_by_size():
    sizes = [60_000, 500_000, 2_000_000, 5_000_000, 50_000_000]
    assert [own_text.steps_of(n) for n in sizes] == [29, 244, 976, 1562, 4941]
    assert [own_text.passes_of(n) for n in sizes] == [8, 8, 2, 1, 1]
    assert max(own_text.steps_of(n) * own_text.passes_of(n) for n in range(4096, 2_040_000, 7919)) <= 2000


def test_bits_per_byte_by_hand():
    """An end of text costs nats and is no byte. The first one is read only."""
    for tokens, size in {2: 2, 3: 2, 4: 3, 7: 5, 8: 6}.items():  # of |ab|cde|f
        text = Text([], [b"ab", b"cde", b"f"], 0, tokens)
        assert own_text.bits_per_byte(1.5, text) == pytest.approx(1.5 * tokens / size / math.log(2)), tokens


def test_others_know_the_training_text():
    noise = os.urandom(4000)
    assert all(bits < 0.2 for bits in own_text.compressed(Text([noise], [noise], 0, 4000)).values())
    assert all(bits > 7.9 for bits in own_text.compressed(Text([b"a" * 4000], [noise], 0, 4000)).values())


def test_a_mixture_is_scored_on_exactly_the_validation_of_the_runs(corpus, tmp_path, monkeypatch):
    """The last model's part of it is the loss that the run said, where its softmax has no padding."""
    monkeypatch.setattr(train_gpt.gc, "collect", lambda: 0)  # it takes as long as the run
    words = b"muon adam rotary window shard block ".split()
    rng = np.random.default_rng(0)
    text = Text(
        [b" ".join(rng.choice(words, 40)) for _ in range(40)],
        [b" ".join(rng.choice(words, 9)) for _ in range(9)],
        0,
        288,
    )
    for name, documents in dict(train=text.train, val=text.val).items():
        write_shard(tmp_path / f"{name}.bin", to_tokens(documents))
    files = f"--train_files {tmp_path}/train.bin --val_files {tmp_path}/val.bin --log_dir {tmp_path} --run_id r"
    result = train_gpt.main([*SMALL, *files.split(), "--dtype=float64", "--save_checkpoint", "--vocab_size=320"])
    found = own_text.mix([tmp_path / "r"], text)
    assert found["the last model alone"] == pytest.approx(own_text.bits_per_byte(result["val_loss"], text), abs=1e-9)
    assert found["all together"] < min(found["the last model alone"], found["counts alone"]) + 0.1
    assert (tmp_path / "r.mixture").exists()


@pytest.mark.parametrize(
    ("losses", "codes", "mixed"),
    [
        ([2.0, 1.9, 1.95], [0, 0, 0], "142"),
        ([2.0, 2.0], [0, 0], "12"),
        ([4.0, 3.0, 2.0, 1.0], [0, 0, 0, 0], "1248"),
        ([None], [3], ""),
        ([2.0, None], [0, 130], "1"),
        ([2.0, 1.5], [0, 1], "12"),
    ],
)
def test_it_trains_while_validation_falls_and_shows_what_is_finished(tmp_path, monkeypatch, losses, codes, mixed):
    """The best run is the last one of those that are mixed."""
    monkeypatch.setattr(own_text, "LOGS", tmp_path)
    launched, shown = [], []

    def launch(flags):
        named = dict(zip(flags[::2], flags[1::2], strict=True))
        if loss := losses[len(launched)]:
            (tmp_path / f"{named['--run_id']}.json").write_text(json.dumps(dict(val_loss=loss)))
        launched.append((int(named["--num_iterations"]), named["--muon_lr"]))
        return codes[len(launched) - 1]

    monkeypatch.setattr(own_text, "launch", launch)
    monkeypatch.setattr(own_text, "show", lambda runs, loss, _: shown.append((runs, loss)))
    assert own_text.train(["--preset", "nano"], ["--muon_lr", "0.1"], Text([], [], 60_000, 8192)) == codes[-1]
    assert launched == [(29 * 2**i, "0.1") for i in range(len(losses))]
    told = ["".join(run.name[-1] for run in runs) for runs, _ in shown], [loss for _, loss in shown]
    assert told == (([mixed], [min(filter(None, losses))]) if mixed else ([], []))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_second_pass_ends_with_the_figures_of_the_first(tmp_path, number):
    """A terminal's come to all. None outlives a kill."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.sh").write_text("""#!/bin/bash
trap 'touch told; exit 7' INT TERM
[[ $* =~ own-[0-9-]+ ]]
if [[ $BASH_REMATCH == *-2 ]]; then touch begun; for i in {1..60}; do sleep 0.05; done; fi
echo '{"val_loss": 1.0}' >logs/$BASH_REMATCH.json
""")
    (tmp_path / "run.sh").chmod(0o755)
    code = f"""
from speedrun import own_text
own_text.ROOT, own_text.LOGS = own_text.Path({str(tmp_path)!r}), own_text.Path({str(tmp_path)!r}, "logs")
raise SystemExit(own_text.train([], [], own_text.Text([b"words " * 99], [b"words " * 9], 60_000, 8)))"""
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
    monkeypatch.setattr(own_text, "mix", lambda runs, text: {"all together": 1.443})
    text = Text([b"some words"], ["  --- ä ß words on and on".encode()], 11, 8)
    (mixture := tmp_path / "own-1.mixture").touch()
    own_text.show([tmp_path / "own-1"], 1.0, text)
    assert "bits per byte of the validation text:\n   1.443 all together\n" in capsys.readouterr().out
    assert (prompts, mixture.stat().st_mtime > model.stat().st_mtime) == (["--prompt=  --- ä ß words "], True)
