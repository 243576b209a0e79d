"""sample.py: its logits are those of training, what it draws, its scores, what it prints, and how it ends."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
import train_gpt
from conftest import random_ngrams
from dense import randomize
from speedrun import ROOT
from speedrun.logs import load_script


def validation_text(corpus: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(corpus / "val_000000.bin", "<u2", 97, offset=1024).astype(np.int64))


@pytest.mark.parametrize("preset", ["nano", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_trained_model_scores_the_validation_text_as_its_run_did(flags, gpt2_flags, preset, corpus, tmp_path):
    """From the flag to the loss: every logit, with the last windows, the mask, and rows of n-grams."""
    canon = np.random.default_rng(0).integers(256, size=(320, 40), dtype=np.uint8)
    canon[:, : 256 // 8 + 1] = 0  # of bytes nothing
    canon.tofile(tmp_path / "canon")
    size = 320 if preset == "nano" else 319  # no padding of the head, which training's softmax sees, but a copy's row
    more = f"--vocab_size={size} --val_tokens=96 --final_window=40 --canon_file={tmp_path}/canon --dtype=float64"
    more += " --prefix_file= --seed=5 --run_id=r --save_checkpoint"
    result = train_gpt.main([*(flags if preset == "nano" else gpt2_flags), *more.split()])
    text = validation_text(corpus)
    model = sample.load_model(tmp_path / "logs" / "r.pt", "cpu")
    logits = torch.cat([*model.predictions(text[:96].tolist())])
    torch.testing.assert_close(next(model.predictions(text[:50].tolist(), first=49))[0], logits[49])
    score = F.cross_entropy if preset == "nano" else F.nll_loss  # with a pointer they are logarithms of probabilities
    assert score(logits, text[1:]).item() == pytest.approx(result["val_loss"], abs=1e-10)


def test_a_model_is_run_by_the_code_that_trained_it_alone(flags, corpus, tmp_path, monkeypatch, capsys):
    """That of a copy of the script whose forward differs: by its path, by its log, and never by the root's."""
    monkeypatch.chdir(tmp_path)
    source, text = Path(train_gpt.__file__).read_text(), validation_text(corpus)
    changed = "hidden_states = GPT.hidden_states\nGPT.hidden_states = lambda *args: 3 * hidden_states(*args)\n"
    Path("my.py").write_text(f"{source}{changed}")
    more = "--vocab_size=320 --val_tokens=96 --final_window=40 --dtype=float64 --run_id=r --save_checkpoint"
    trained = load_script(Path("my.py")).main([*flags, *more.split()])["val_loss"]
    path = Path(tmp_path, "logs", "r.pt")

    def loss(*script: Path) -> float:
        logits = torch.cat([*sample.load_model(path, "cpu", *script).predictions(text[:96].tolist())])
        return F.cross_entropy(logits, text[1:]).item()

    def refusal(*argv: str) -> str:
        code, (out, err) = sample.main([str(path), *argv]), capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), err
        return err

    capsys.readouterr()
    assert (loss(), capsys.readouterr().err) == (pytest.approx(trained, abs=1e-10), "")
    assert abs(loss(ROOT / "train_gpt.py") - trained) > 1e-3
    assert f"train_gpt.py is not what trained {path}" in capsys.readouterr().err
    Path("my.py").write_text("# another\n")
    assert f"was trained by my.py, which is not there as it was: --script {path.with_suffix('.txt')}" in refusal()
    assert (loss(path.with_suffix(".txt")), capsys.readouterr().err) == (pytest.approx(trained, abs=1e-10), "")
    Path("head.py").write_text(source.replace("mul_(-2 / cfg.lm_head_softcap)", "mul_(-3 / cfg.lm_head_softcap)"))
    with pytest.raises(sample.ToolError, match="computes another loss"):  # of a head that it does not know
        sample.load_model(path, "cpu", Path("head.py"))
    path.with_suffix(".txt").write_text("")
    capsys.readouterr()
    assert "name its file, or a log of it, by --script FILE" in refusal()
    assert "No such file or directory: 'none.py'" in refusal("--script=none.py")
    older = torch.load(path, weights_only=True)
    del older["script"], older["script_path"]
    torch.save(older, path)
    assert "was trained by an older script, which is not there as it was: name its file" in refusal()
    assert "the code in my.py does not run it here; name what trained it by --script" in refusal("--script=my.py")


def test_a_text_ends_with_its_document_but_not_while_it_is_blank(tiny):
    """Of three tokens the most likely is the end of the text, then that of a line."""
    logits = torch.full((1, 257), -1e4, dtype=torch.float64)
    logits[0, [256, ord("\n"), ord("x")]] = torch.tensor([9.0, 5.0, 4.0], dtype=torch.float64)
    model = SimpleNamespace(cfg=tiny, predictions=lambda tokens, first: iter([logits.clone()]))
    found = [b"".join(sample.generate(model, "a\n\n", 100, 1.0, 0, seed)) for seed in range(10)]
    assert all(b"x" in text and len(text) < 100 for text in found), found


def test_pieces_that_overlap_score_as_one_token_at_a_time(tiny, tmp_path, monkeypatch):
    """A text is cut into pieces of 36 tokens, of which 12 were read before."""
    stages = tuple(stage._replace(windows=dict.fromkeys(stage.windows, 1000)) for stage in tiny.stages)
    cfg = dataclasses.replace(tiny, dtype="float64", stages=stages, final_window=1000)
    model = sample.Model(train_gpt, randomize(train_gpt.GPT(cfg)), [random_ngrams(cfg)])
    (path := tmp_path / "text").write_bytes(text := b"Some text, which is read in pieces.\r\n" * 2)
    text, nats = text.replace(b"\r", b""), 0.0
    for i, token in enumerate(text):
        read = [cfg.eot_token, *text[max(0, i - i % 35 - 12) : i]]
        nats += F.cross_entropy(next(model.predictions(read, first=len(read) - 1))[0], torch.tensor(token)).item()
    monkeypatch.setattr(sample, "LENGTH", 48)
    found = sample.score(model, path)
    assert (found["bytes"], found["bits_per_byte"]) == (72, pytest.approx(nats / math.log(2) / 72))


def test_text_is_the_same_with_the_same_seed(model, capsys, monkeypatch):
    """Without a name the newest model is taken, though another lies beside it. No byte commands the terminal."""
    monkeypatch.chdir(model.parent.parent)
    Path("logs/older.pt").touch()
    os.utime("logs/older.pt", (1, 1))
    found = []
    for option in "--seed 1", "logs/random.pt --seed 1", "--seed 2", "--temperature 0", "--top_k 1":
        assert sample.main(["--tokens=30", "--prompt=naïve\t\x1b\udcff", *option.split()]) == 0
        found.append(capsys.readouterr())
    first, again, other, *greedy = (text for text, _ in found)
    assert (first == again != other, len({*greedy}), first.startswith("naïve\t\ufffd\ufffd")) == (True, 1, True)
    assert found[2].err == "logs/random.pt, seed 2\n"


def test_scores_are_of_what_is_packed_or_a_line_says_what_is_wrong(model, capsys, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    contents = dict(
        utf8="\ufeffnaïve\r\n".encode(), utf16="naïve\n".encode("utf-16"), latin="naïve\n".encode("latin-1")
    )
    for name, content in contents.items():
        Path(name).write_bytes(content)
    assert sample.main([f"--score={name}" for name in contents]) == 0
    utf8, utf16, latin = map(json.loads, capsys.readouterr().out.splitlines())
    assert (utf8["bytes"], utf16, latin["bytes"]) == (7, utf8 | dict(file="utf16"), 6)
    Path("empty").touch()
    for argv, message in {
        "--score=empty": "empty: is empty; name",
        "--score=logs/random.pt": "logs/random.pt: is binary; name",
        "none.pt": "none.pt: there is no such file; train",
        "utf8": "utf8: name a sound .pt",
        "--tokens=79998 --prompt=ab": "--tokens 79998, --prompt of 3: the model reads 80000 at most",
        "--top_k=-1": "--top_k -1: expected",
    }.items():
        code, (out, err) = sample.main(argv.split()), capsys.readouterr()
        assert (code, out, message in err.splitlines()[-1]) == (2, "", True), err


SCRIPTS = "sample data.cached_fineweb10B data.gpt2_canonical data.pack_nano data.pack_text"


@pytest.mark.parametrize("name", SCRIPTS.split())
def test_ctrl_c_while_a_program_loads_has_one_line(tmp_path, name):
    """It comes from the first package that takes long to load. The program is started as a file and as a module."""
    for package in "numpy", "huggingface_hub":
        (tmp_path / f"{package}.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)")
    for command in [f"{name.replace('.', '/')}.py"], ["-m", name]:
        how: dict = dict(cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(tmp_path)), capture_output=True, text=True)
        done = subprocess.run([sys.executable, *command, f"--out={tmp_path}"], **how)
        (line,) = done.stderr.strip().splitlines()
        assert (done.returncode, line.split(";")[0]) == (130, f"{name.removeprefix('data.')}.py: interrupted")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "lines"), [(0, 1), (130, 2)], ids=["reader leaves", "Ctrl-C"])
def test_program_ends_without_a_traceback(model, code, lines):
    command = [sys.executable, "sample.py", str(model), *"--tokens 70000 --top_k 1 --prompt a".split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT) if code else process.stdout.close()
    assert (process.stderr.read().count(b"\n"), process.wait(timeout=60)) == (lines, code)
