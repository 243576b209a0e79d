"""Who may mend an error sees one line of it, who has to find it a traceback, once for all ranks; none is swallowed."""

import dataclasses

import pytest

import train_gpt
from conftest import refusal
from speedrun import ROOT
from world_worker import Run

SLIPS = {  # on one while the others wait to agree with it, on one while the others train
    "agrees": ("    cfg = resolve(given)\n", "    1 / (1 - ranks.rank)\n    cfg = resolve(given)\n"),
    "trains": ("        mean_loss = 0\n", "        mean_loss = 0\n        1 / (2 - schedule.step * self.ranks.rank)\n"),
}


@pytest.mark.slow
def test_a_slip_keeps_its_traceback_once_for_all_ranks(flags, tmp_path):
    """On the console, in the log if there is one, with the flags if no step was taken. No rank goes on."""
    runs = {}
    for name, slip in SLIPS.items():
        source = (ROOT / "train_gpt.py").read_text()
        assert source.count(slip[0]) == 1, slip
        (script := tmp_path / f"{name}.py").write_text(source.replace(*slip))
        argv = [*flags, "--batch_tokens=256", "--num_iterations=5", "--dtype=float32", f"--run_id={name}"]
        runs[name] = Run([argv] * 2, tmp_path / name, scripts=[script] * 2)
    for name, run in runs.items():
        assert run.wait() == [1, 1], name
        log = tmp_path / "logs" / f"{name}.txt"
        assert log.exists() == (name == "trains")
        told = run.text("err") + run.text("err", 1)
        assert told.count("Traceback (most recent call last)") == told.count("ZeroDivisionError") == 1, told
        assert ("\non rank 1 of 2\n" in told) == (name == "trains")
        assert ("before the first step; " in told and "--batch_tokens=256" in told) == (name != "trains")
    steps = log.read_text().split("=" * 100)[-1]
    assert steps.count("Traceback (most recent call last)") == 1, steps
    assert steps.splitlines()[-1] == "stopped: ZeroDivisionError('division by zero')"


def test_a_missing_mask_is_told_and_one_named_by_hand_is_refused(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = train_gpt.GPT2.canon_file
    preset = dataclasses.replace(train_gpt.PRESETS["nano"], preset="masked", canon_file=path)
    monkeypatch.setitem(train_gpt.PRESETS, "masked", preset)
    train_gpt.main([*flags, "--preset=masked", "--run_id=masked"])
    for text in capsys.readouterr().out, (tmp_path / "logs" / "masked.txt").read_text().split("=" * 100)[-1]:
        assert f"without {path}, which is missing" in text
    assert refusal([*flags, f"--canon_file={path}"]).startswith(f"--canon_file {path}: there is no such file; ")
