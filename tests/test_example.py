"""docs/example.md: its commands, run in order with two seeds and 30 steps, and the shape of what they print."""

import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_gpt
from records import proof, race
from records.__main__ import main

ROOT = Path(train_gpt.__file__).parent
PAGE = (ROOT / "docs" / "example.md").read_text()
# What is shorter here than on the page
SHORTER = {"--pairs 10": "--pairs 2", "--preset nano": "--preset nano --num_iterations 30"}
# 30 steps are too few for the target: the last verify says so instead of ok, and no number of runs would help
TOO_FEW_STEPS = {
    r"^ok (\S+): .*": r"FAIL \1: mean 9.9 is above the target 1.45; train better or longer",
    r"(is likely to need .*): \d+ in all$": r"\1: never, at this mean",
}
UNSTEADY = "step times vary, "  # a line about the machine
NUMBER = r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?"
OWN_FOLDERS = shutil.ignore_patterns(".git", ".venv", "logs", "nano", "fineweb10B", "own", "__pycache__", ".*_cache")


def steps_of(page: str) -> list[tuple[str, int, list[str]]]:
    """The page's commands in order: each with the exit code that it says (0 where it says none) and its output."""
    found: list[tuple[str, int, list[str]]] = []
    for line in re.findall(r"^ {4}(.*)$", page, re.MULTILINE):
        if line.startswith("$ "):
            command, _, note = line[2:].partition("  # exit code ")
            found.append((command.strip(), int(note or 0), []))
        else:
            found[-1][2].append(line.rstrip())
    return found


def shape_of(line: str) -> re.Pattern:
    """What a line that was shown looks like: any numbers in place of its own, anything in place of ..."""
    parts = re.split(rf"(\.\.\.|{NUMBER})", line)
    return re.compile("".join(".*" if p == "..." else NUMBER if re.match(NUMBER, p) else re.escape(p) for p in parts))


def require_shown(shown: list[str], printed: list[str], command: str) -> None:
    """Every line that the page shows was printed, in this order."""
    rest = iter(printed)
    for line in shown:
        shape = shape_of(line)
        assert line == "..." or any(shape.fullmatch(other.rstrip()) for other in rest), (command, line, printed)


def files_of(folder: Path) -> dict[str, str]:
    """Of the repository, without what runs leave in data/ and logs/."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if not name.startswith(("logs/", "data/nano/"))
    }


def environment_of(folder: Path) -> dict[str, str]:
    """In which `python` is this one; one that is started through a link would not find its environment."""
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return dict(os.environ) | dict(PATH=path, PYTHONDONTWRITEBYTECODE="1", GOMP_SPINCOUNT="10000")


def test_the_page_is_one_of_commands():
    commands = [command for command, _, _ in steps_of(PAGE)]
    assert 10 <= len(commands) <= 20
    assert [code for _, code, _ in steps_of(PAGE)].count(1) == 1
    for old in SHORTER:
        assert any(old in command for command in commands), old
    for tool in "diff race stats new verify table".split():
        assert any(command.startswith(f"python -m records {tool} ") for command in commands), tool


def test_the_edit_of_the_page_is_the_idea(tmp_path):
    """One line changes, and the learning rates then fall as 1 - sqrt of the cooldown's part that is over."""
    edit = next(command for command, _, _ in steps_of(PAGE) if command.startswith("sed "))
    script = tmp_path / "my.py"
    assert edit.endswith(" train_gpt.py > my.py")
    subprocess.run(["sh", "-c", edit.replace("> my.py", f"> '{script}'")], cwd=ROOT, check=True)
    before, after = (path.read_text().splitlines() for path in (ROOT / "train_gpt.py", script))
    changed = [line for line, other in zip(after, before, strict=True) if line != other]
    shown = next(output for command, _, output in steps_of(PAGE) if " diff " in command)
    assert [f"+{line}" for line in changed] == [line for line in shown if line.startswith("+")]

    spec = importlib.util.spec_from_file_location("my", script)
    my = importlib.util.module_from_spec(spec)
    sys.modules["my"] = my  # where dataclasses look up what they are made of
    try:
        spec.loader.exec_module(my)
    finally:
        del sys.modules["my"]
    for cfg in train_gpt.PRESETS.values():
        start, steps = (1 - cfg.cooldown_frac) * cfg.num_iterations, cfg.num_iterations
        for step in range(steps + 1):
            over = max(0, (step - start) / (steps - start))
            expected = 1 - (1 - cfg.min_lr_frac) * math.sqrt(over)
            assert my.lr_multiplier(step, cfg) == pytest.approx(expected, abs=1e-6), step


def test_the_figures_of_the_page_are_those_of_its_runs(monkeypatch, capsys):
    """records/measurements.json has every run; what race and stats make of them stands on the page, and in NOTES.md."""
    measured = json.loads((ROOT / "records" / "measurements.json").read_text())["sqrt_cooldown"]["runs"]
    of_my, of_ours = (
        [race.Run(run["seed"], run["val_loss"], run["train_time_ms"], run["median_step_ms"], None) for run in runs]
        for runs in (measured["my.py"], measured["train_gpt.py"])
    )
    assert [run.seed for run in of_my] == [run.seed for run in of_ours] == list(range(201, 211))
    found = dict(a="my.py", b="train_gpt.py") | race.compare(of_my, of_ours)
    monkeypatch.setattr(race, "race", lambda *arguments: found)
    assert main(["race", "my.py", "train_gpt.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for side, runs in ("a", of_my), ("b", of_ours):
        for pair, run in enumerate(runs[:2]):
            told = f"val_loss {run.val_loss:.4f}, train time {run.train_time:.0f} ms, step {run.step_time:.2f} ms"
            lines.append(f"race-pair{pair}-{side}, seed {run.seed}: {told}")
        sample = proof.describe([round(run.val_loss, 4) for run in runs], 1.45)  # as logs state them
        lines.append(f"{sample} p={sample.p:.2g} against 1.45")
    printed = [line for _, _, output in steps_of(PAGE) for line in output]
    assert [line for line in lines if line not in printed] == []

    sd = proof.describe([a.val_loss - b.val_loss for a, b in zip(of_my, of_ours, strict=True)]).sd
    gain = proof.detectable(sd, 10)
    assert f"an sd of {sd:.4f}), so a gain of {gain:.3f} would have shown" in " ".join(PAGE.split())
    notes = (ROOT / "records" / "NOTES.md").read_text()
    loss, time = found["val_loss"], found["train_time"]
    assert f"| {loss['difference']:+.4f} ({loss['low']:+.4f} to {loss['high']:+.4f}) " in notes
    assert f"| {time['ratio']:.3f} ({time['low']:.3f} to {time['high']:.3f}) | 10 pairs, seeds 201 to 210: " in notes


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(tmp_path):
    if not (ROOT / "data/nano/nano_val_000000.bin").exists():
        subprocess.run([sys.executable, "data/pack_nano.py"], cwd=ROOT, check=True)
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=OWN_FOLDERS)
    (copy / "data" / "nano").symlink_to(ROOT / "data" / "nano")
    before, environment = files_of(copy), environment_of(tmp_path / "bin")
    for command, code, shown in steps_of(PAGE):
        for old, new in SHORTER.items():
            command = command.replace(old, new)
        expected = [line for line in shown if not line.startswith(UNSTEADY)]
        for old, new in TOO_FEW_STEPS.items():
            expected = [re.sub(old, new, line) for line in expected]
        code = 1 if any(line.startswith("FAIL") and line not in shown for line in expected) else code
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, (command, done.stdout)
        require_shown(expected, done.stdout.splitlines(), command)
    assert files_of(copy) == before, "the example leaves the repository as it was"
    assert len(list((copy / "logs" / "SqrtCooldown").glob("*.txt"))) == 4
