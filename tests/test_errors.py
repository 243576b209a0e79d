"""Who may mend an error sees one line of it, who has to find it a traceback, once for all ranks; none is swallowed."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import train_gpt
from conftest import refusal
from train_gpt import Group, Ranks, Trainer, UserError
from world_worker import Run

SLIPS = {  # on all ranks, on one while the others wait to agree with it, on one while the others train
    "plans": ("    start = int(cfg.scheduled_steps *", "    1 / (step - 3)\n    start = int(cfg.scheduled_steps *"),
    "agrees": ("    cfg = resolve(given)\n", "    1 / (1 - ranks.rank)\n    cfg = resolve(given)\n"),
    "trains": (
        "        mean_loss = None",
        "        1 / (2 - schedule.step * self.ranks.rank)\n        mean_loss = None",
    ),
}


@pytest.mark.slow
def test_a_slip_keeps_its_traceback_once_for_all_ranks(flags, tmp_path):
    """On the console, and in the log if there is one. No rank goes on."""
    headers = tmp_path / "headers"
    counted = ("lscpu; timeout 20 nvidia-smi", f"echo built >> {headers}")
    runs = {}
    for name, slip in SLIPS.items():
        source = Path(train_gpt.__file__).read_text()
        for old, new in (slip, counted):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        (script := tmp_path / f"{name}.py").write_text(source)
        argv = [*flags, "--batch_tokens=256", "--num_iterations=5", "--dtype=float32", f"--run_id={name}"]
        runs[name] = Run([argv] * 2, tmp_path / name, scripts=[script] * 2)
    for name, run in runs.items():
        assert run.wait() == [1, 1], name
        log = tmp_path / "logs" / f"{name}.txt"
        assert log.exists() == (name == "trains")
        texts = [run.text("err") + run.text("err", 1), log.read_text() if log.exists() else ""]
        for text in filter(None, texts):
            told = text.split("=" * 100)[-1]
            assert told.count("ZeroDivisionError") == 1 + (text is texts[1]), "the log's last line names it, too"
            assert told.count("Traceback (most recent call last)") == 1, told
        assert not log.exists() or texts[1].splitlines()[-1] == "stopped: ZeroDivisionError: division by zero"
    assert headers.read_text() == "built\n", "rank 0 alone asks for the hardware, once it is known to train"


@pytest.mark.slow
def test_a_first_collective_that_hangs_ends_in_a_line(flags, tmp_path):
    """One that rank 1 does not join. One that all join is timed in the log."""
    source, runs = Path(train_gpt.__file__).read_text(), {}
    for name, begin in dict(hangs="time.sleep(60 * ranks.rank)", works="").items():
        changed = source.replace("limit: float = 120", "limit: float = 4").replace(
            "    timer.start()\n", f"    {begin}\n    timer.start()\n"
        )
        (script := tmp_path / f"{name}.py").write_text(changed)
        runs[name] = Run(
            [[*flags, "--batch_tokens=128", f"--run_id={name}"]] * 2, tmp_path / name, scripts=[script] * 2
        )
    assert runs["works"].wait() == [0, 0], runs["works"].text("err")
    assert re.search(r"\nfirst collective: \d+ ms\n", (tmp_path / "logs" / "works.txt").read_text())
    runs["hangs"].processes[0].join(20)
    assert runs["hangs"].processes[0].exitcode == 2
    line = rf"train_gpt.py: rank 0 of 2, cpu of {os.uname().nodename}: no first collective in 4 s: NCCL_DEBUG=INFO .*\n"
    assert re.fullmatch(line, runs["hangs"].text("err"))
    runs["hangs"].wait(0)


def test_a_size_that_fits_nothing_has_its_traceback_in_the_log(flags, tmp_path):
    with pytest.raises((RuntimeError, ValueError, ArithmeticError)):  # whatever torch says
        train_gpt.main([*flags, "--num_heads=0", "--run_id=odd"])
    log = (tmp_path / "logs" / "odd.txt").read_text().split("=" * 100)[-1]
    assert "Traceback (most recent call last)" in log
    assert log.splitlines()[-1].startswith("stopped: ")


def test_lengths_that_blocks_do_not_fit_into_are_named(flags, tiny):
    assert refusal([*flags, "--block_size=0"]) == "--block_size 0: expected 1 or more"
    assert refusal([*flags, "--block_size=17"]) == "--val_seq_len 96: expected a multiple of 17"
    for batch, length in (0.3, 19), (-1, -64):
        cfg = dataclasses.replace(tiny, stages=[tiny.stages[0]._replace(batch=batch)])
        wanted = rf"^stage 1: .* 64 times its batch of {batch} is {length}: expected a multiple of --block_size 8$"
        with pytest.raises(UserError, match=wanted):
            train_gpt.plan_run(cfg, Ranks())


def test_a_parameter_that_no_loss_uses_is_named(tiny, monkeypatch):
    build = train_gpt.GPT.__init__

    def build_with_spare(gpt, cfg):
        build(gpt, cfg)
        gpt.spare = nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(train_gpt.GPT, "__init__", build_with_spare)
    trainer = Trainer(dataclasses.replace(tiny, groups=[*tiny.groups, Group("spare", "Adam", "spare", 0.1)]), Ranks())
    with pytest.raises(UserError, match=r"^spare: no loss depends on this parameter"):
        trainer.warm_up()


def test_a_missing_mask_is_told_and_one_named_by_hand_is_refused(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = train_gpt.GPT2.canon_file
    preset = dataclasses.replace(train_gpt.PRESETS["nano"], preset="masked", canon_file=path)
    monkeypatch.setitem(train_gpt.PRESETS, "masked", preset)
    train_gpt.main([*flags, "--preset=masked", "--run_id=masked"])
    for text in capsys.readouterr().out, (tmp_path / "logs" / "masked.txt").read_text().split("=" * 100)[-1]:
        assert f"without {path}, which is missing" in text
    assert refusal([*flags, f"--canon_file={path}"]).startswith(f"--canon_file {path}: there is no such file; ")


def test_latest_is_the_newest_run_that_is_not_complete(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "load_file", lambda path, into: path)
    for i, name in enumerate("abc"):
        (tmp_path / f"{name}.checkpoint").touch()
        os.utime(tmp_path / f"{name}.checkpoint", (i, i))
    given = dataclasses.replace(tiny, resume="latest", run_id="", log_dir=str(tmp_path))
    assert train_gpt.load_checkpoint(dataclasses.replace(given, run_id="b")) == tmp_path / "b.checkpoint"
    assert train_gpt.load_checkpoint(dataclasses.replace(given, run_id="d")) is None
    for complete, expected in ("", "c"), ("c", "b"), ("b", "a"):
        if complete:
            (tmp_path / f"{complete}.json").touch()
        assert train_gpt.load_checkpoint(given) == tmp_path / f"{expected}.checkpoint"
    (tmp_path / "a.json").touch()
    with pytest.raises(train_gpt.AlreadyComplete, match=r"c.json: this run is already complete"):
        train_gpt.load_checkpoint(given)
