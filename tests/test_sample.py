"""sample.py: its logits are those of training, what it draws, what it prints, and how it ends."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import sample
import train_gpt
from synthetic_logs import ROOT
from test_train import SMALL, SMALL_GPT2


@pytest.fixture
def model(tiny, random_gpt, tmp_path) -> Path:
    """A model with random values, of bytes."""
    cfg = dataclasses.replace(tiny, val_seq_len=80_000, val_tokens=80_000)
    path, state = tmp_path / "logs" / "random.pt", dict(configuration=json.dumps(dataclasses.asdict(cfg)))
    path.parent.mkdir()
    torch.save(state | dict(model=random_gpt(cfg).state_dict()), path)
    return path


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_a_trained_model_scores_the_validation_text_as_its_run_did(preset, corpus, tmp_path, monkeypatch):
    """From the flag to the loss: what is written, what is loaded, and every logit, with the last windows."""
    monkeypatch.setattr(train_gpt.gc, "collect", lambda: 0)  # it takes as long as the run
    files = f"--train_files {corpus}/long.bin --val_files {corpus}/val_*.bin --log_dir {tmp_path} --run_id {preset}"
    flags = [*(SMALL if preset == "nano" else SMALL_GPT2), *files.split(), "--dtype=float64", "--save_checkpoint"]
    # No padding of the head, which the softmax of training sees, too
    result = train_gpt.main([*flags, "--vocab_size=320", "--val_tokens=96", "--final_window=40"])
    gpt = sample.load_model(tmp_path / f"{preset}.pt", "cpu")
    text = torch.from_numpy(np.fromfile(corpus / "val_000000.bin", "<u2", 97, offset=1024).astype(np.int64))
    logits = torch.stack([sample.next_logits(gpt, text[:n].tolist()) for n in range(1, 97)])
    assert F.cross_entropy(logits, text[1:]).item() == pytest.approx(result["val_loss"], abs=1e-10)
    assert result["val_loss"] < 5.6


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 4)])
def test_tokens_come_as_often_as_the_softmax_says(temperature, top_k):
    logits, rng = torch.tensor([2.0, 0.5, 3.0, 1.0, -1.0, 2.5, 0.0]), torch.Generator().manual_seed(0)
    kept = np.argsort(logits.numpy())[-top_k:]
    p = np.exp(logits.double().numpy()[kept] / temperature)
    seen = np.bincount([sample.choose(logits, temperature, top_k, rng) for _ in range(4000)], minlength=7)
    assert seen[kept].sum() == 4000
    assert stats.chisquare(seen[kept], 4000 * p / p.sum()).pvalue > 0.001


def test_a_text_ends_with_its_document(tiny, random_gpt):
    gpt, script = random_gpt(tiny), iter([7, 8, tiny.eot_token, 9])
    assert list(sample.generate(gpt, [1, 2], 10, lambda logits: next(script))) == [7, 8]
    assert list(sample.generate(gpt, [], 3, lambda logits: 7)) == [7, 7, 7]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    return sample.main([*argv]), *capsys.readouterr()


def test_text_is_the_same_with_the_same_seed(model, capsys, monkeypatch):
    """Without a name the newest model is taken, though another lies beside it."""
    monkeypatch.chdir(model.parent.parent)
    Path("logs/older.pt").touch()
    os.utime("logs/older.pt", (1, 1))
    options = "--seed 1", "logs/random.pt --seed 1", "--seed 2", "--temperature 0", "--top_k 1"
    found = [run(capsys, "--tokens", "30", "--prompt", "naïve \x1b", *option.split()) for option in options]
    first, again, other, *greedy = (text for _, text, _ in found)
    assert (first == again != other, len({*greedy}), first.startswith("naïve \ufffd")) == (True, 1, True)
    assert found[2][2].endswith("seed 2]\n"), "a fresh seed is told, too"


def test_text_is_printed_as_it_comes(capsys):
    """Characters as soon as they are complete; broken ones, and what would command a terminal, as U+FFFD."""
    seen = []

    def pieces():
        for byte in "é😀".encode() + b"\xff\x1b[\t\xe2\x82":
            yield bytes([byte])
            seen.append(capsys.readouterr().out)

    sample.write(pieces())
    assert seen == ["", "é", "", "", "", "😀", "\ufffd", "\ufffd", "[", "\t", "", ""]
    assert capsys.readouterr().out == "\ufffd\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cfg, values: cfg.update(odd=1), "use the one that wrote it: .*odd"),
        (lambda cfg, values: cfg.update(model_dim=64), "not a model of this train_gpt.py"),
        (lambda cfg, values: values["lm_head"].fill_(torch.nan), "logits are not finite"),
    ],
)
def test_an_odd_model_gets_one_line(model, capsys, change, message):
    saved = torch.load(model, weights_only=True)
    cfg, values = json.loads(saved["configuration"]), dict(saved["model"])
    change(cfg, values)
    torch.save(dict(configuration=json.dumps(cfg), model=values), model)
    code, _, errors = run(capsys, str(model))
    assert code == 2
    assert re.search(message, errors.splitlines()[-1])
    assert len(errors) < 400


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nowhere.pt", "nowhere.pt: there is no such file"),
        ("", "logs/*.pt: there is no such file"),
        ("LICENSE", "LICENSE: not a sound checkpoint: "),
        ("random.pt --prompt ab --tokens 79999", "of 2 tokens, --tokens 79999: the model reads 80000 at most"),
        ("random.pt --temperature nan", "--temperature nan: expected a number from 0 to 100"),
    ],
)
def test_what_can_be_mended_gets_one_line_and_exit_code_2(model, capsys, monkeypatch, argv, message):
    monkeypatch.chdir(model.parent)
    Path("LICENSE").write_text("not a model")
    code, text, errors = run(capsys, *argv.split())
    assert (code, text, errors.count("\n"), message in errors) == (2, "", 1, True), errors


@pytest.mark.slow
def test_ctrl_c_ends_without_a_traceback(model):
    command = [sys.executable, "sample.py", str(model), *"--tokens 70000 --top_k 1 --prompt a".split()]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read().decode()
    assert (process.wait(timeout=60), errors.count("\n")) == (130, 2)
