"""sample.py: its logits are those of training, what it draws, what it prints, and how it ends."""

import dataclasses
import os
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
from conftest import SMALL, SMALL_GPT2
from dense import randomize
from speedrun import ROOT
from speedrun import model as models


@pytest.mark.parametrize("preset", ["nano", "gpt2"])
def test_a_trained_model_scores_the_validation_text_as_its_run_did(preset, corpus, tmp_path, monkeypatch):
    """From the flag to the loss: every logit, with the last windows, the mask, and rows of n-grams in several files."""
    monkeypatch.setattr(train_gpt.gc, "collect", lambda: 0)  # it takes as long as the run
    files = f"--train_files {corpus}/long.bin --val_files {corpus}/val_*.bin --log_dir {tmp_path} --run_id {preset}"
    canon = np.random.default_rng(0).integers(256, size=(320, 40), dtype=np.uint8)
    canon[:, : 256 // 8 + 1] = 0  # of bytes nothing
    canon.tofile(tmp_path / "canon")
    size = 320 if preset == "nano" else 319  # no padding of the head, which training's softmax sees, but a copy's row
    more = f"--vocab_size={size} --val_tokens=96 --final_window=40 --canon_file={tmp_path}/canon --dtype=float64"
    flags = [*(SMALL if preset == "nano" else SMALL_GPT2), *files.split(), *more.split(), "--save_checkpoint"]
    result = train_gpt.main(flags)
    text = torch.from_numpy(np.fromfile(corpus / "val_000000.bin", "<u2", 97, offset=1024).astype(np.int64))
    path, rows = tmp_path / f"{preset}.pt", [tmp_path / f"{preset}.ngrams{rank}" for rank in range(4)]
    saved, whole = torch.load_file(path), torch.load(rows[0])
    for file, part in zip(rows, (slice(20), slice(20, None), slice(0), slice(20)), strict=True):
        torch.save({name: values[part] for name, values in whole.items()}, file)
    torch.save(saved | dict(rows=[*map(train_gpt.checksum, rows[:3])]), path)  # the last is of an older run
    model = models.load_model(path, "cpu")
    logits = torch.stack([model.next_logits(text[:n].tolist()) for n in range(1, 97)])
    score = F.cross_entropy if preset == "nano" else F.nll_loss  # with a pointer they are logarithms of probabilities
    assert eval_step(logits, text[1:]).item() == pytest.approx(result["val_loss"], abs=1e-10)


def test_probabilities_with_copies_add_up_to_1_and_none_is_0(gpt2):
    gpt = randomize(train_gpt.GPT(dataclasses.replace(gpt2, vocab_size=255, eot_token=254, canon_file="")))
    model, read = models.Model(gpt.float(), []), torch.randint(254, (192,))
    x = model.features(read.tolist())
    gpt.lm_head.data[255] = 0.1 * x[5]
    logits = model.logits(x, read, torch.arange(192))
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(192), rtol=1e-5, atol=0)
    gpt.lm_head.data[:] = -1e3 * x[5]
    gpt.lm_head.data[255] = 1e3 * x[5]  # in float32 a copy has all of the probability
    assert model.logits(x, read, torch.tensor([5])).isfinite().all()


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 4)])
def test_tokens_come_as_often_as_the_softmax_says(temperature, top_k):
    logits, rng = torch.tensor([2.0, 0.5, 3.0, 1.0, -1.0, 2.5, 0.0]), torch.Generator().manual_seed(0)
    kept = np.argsort(logits.numpy())[-top_k:]
    p = np.exp(logits.double().numpy()[kept] / temperature)
    seen = np.bincount([models.choose(logits, temperature, top_k, rng) for _ in range(4000)], minlength=7)
    assert seen[kept].sum() == 4000
    assert stats.chisquare(seen[kept], 4000 * p / p.sum()).pvalue > 0.001


def test_a_text_ends_with_its_document(tiny):
    model, script = models.Model(randomize(train_gpt.GPT(tiny)), []), iter([7, 8, tiny.eot_token, 9])
    assert list(models.generate(model, [1, 2], 10, lambda logits: next(script))) == [7, 8]
    assert list(models.generate(model, [], 3, lambda logits: 7)) == [7, 7, 7]


def test_text_is_the_same_with_the_same_seed(model, capsys, monkeypatch):
    """Without a name the newest model is taken, though another lies beside it."""
    monkeypatch.chdir(model.parent.parent)
    Path("logs/older.pt").touch()
    os.utime("logs/older.pt", (1, 1))
    found = []
    for option in "--seed 1", "--model logs/random.pt --seed 1", "--seed 2", "--temperature 0", "--top_k 1":
        sample.main(["--tokens=30", "--prompt=naïve \x1b\udcff", *option.split()])  # a byte that is no text is a token
        found.append(capsys.readouterr())
    first, again, other, *greedy = (text for text, _ in found)
    assert (first == again != other, len({*greedy}), first.startswith("naïve \ufffd\ufffd")) == (True, 1, True)
    assert found[2].err.endswith("seed 2]\n"), "a fresh seed is told, too"


def test_text_of_single_bytes_is_printed_but_nothing_that_would_command_a_terminal(capsys):
    sample.write(bytes([byte]) for byte in "é😀".encode() + b"\xff\x1b[\t\xe2\x82")
    assert capsys.readouterr().out == "é😀\ufffd\ufffd[\t\ufffd\n"


def test_what_can_be_mended_gets_one_line_and_exit_code_2(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent)
    saved = torch.load_file(model, weights_only=True)
    saved["model"]["lm_head"].fill_(torch.nan)
    torch.save(saved | dict(rows=[]), "nan.pt")
    for argv, message in {
        "random.ngrams0": "random.ngrams0: is no model, or damaged: name a .pt that a run with --save_checkpoint wrote",
        "nan.pt": "logits are not finite",
        "random.pt --prompt ab --tokens 79999": "--prompt of 2 tokens, --tokens 79999: the model reads 80000 at most",
    }.items():
        code, (_, errors) = sample.main(argv.split()), capsys.readouterr()
        *told, line = errors.splitlines()  # the model's size comes before its first token
        assert (code, message in line, len(told)) == (2, True, argv == "nan.pt"), errors


@pytest.mark.slow
@pytest.mark.parametrize(("code", "lines"), [(0, 1), (130, 2)], ids=["reader leaves", "Ctrl-C"])
def test_program_ends_without_a_traceback(model, code, lines):
    command = [sys.executable, "sample.py", str(model), *"--tokens 70000 --top_k 1 --prompt a".split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT) if code else process.stdout.close()
    assert (process.stderr.read().count(b"\n"), process.wait(timeout=60)) == (lines, code)
