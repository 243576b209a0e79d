"""What the pages say holds: flags, files and links that they name are there, and the notebook runs."""

import dataclasses
import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import matplotlib.pyplot as plt
import pytest

from speedrun import ROOT
from train_gpt import Hyperparameters

PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("records/*.md")]
FILE = re.compile(r"(?:\./)?\w[\w./-]*\.(?:py|sh|md|json|txt|slurm|toml|png)")
MADE_BY_RUNS = re.compile(r"(my|a|b|race|record|config)\.(py|json)|profile\.txt|(logs|data/(nano|own|fineweb10B))/.*")
TOOLS = [ROOT / "sample.py", ROOT / "test.sh", *ROOT.glob("speedrun/*.py"), *ROOT.glob("data/*.py")]
TOOLS += [ROOT / "tests" / "fake_gpu.py"]
FLAGS = {f"--{no}{field.name}" for field in dataclasses.fields(Hyperparameters) for no in ("", "no-")}
FLAGS |= {flag for path in TOOLS for flag in re.findall(r"--\w+", path.read_text())}


def code(page: Path) -> list[str]:
    """Return a page's texts in backticks and lines of blocks, without comments."""
    text = page.read_text().replace("\\\n", " ")
    texts = [*re.findall(r"^ {4}(?:\$ )?(\S.*)$", text, re.M), *re.findall(r"`([^`\n]+)`", text)]
    return [text.partition(" # ")[0] for text in texts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_files_and_links_of_a_page_are_there(page: Path):
    texts = code(page)
    if page.name != "CHANGELOG.md":  # which has former names
        ours = " ".join(text for text in texts if not text.startswith(("torchrun", "sbatch")))
        assert {*re.findall(r"(?<!\S)--\w[\w-]*", ours)} <= FLAGS
    words = {word for text in texts for word in text.split()}
    files = {word for word in words if FILE.fullmatch(word) and not MADE_BY_RUNS.fullmatch(word)}
    files |= {*re.findall(r"\]\((?!http)([^)#]*)", page.read_text())}
    assert [name for name in files if not any((folder / name).exists() for folder in (page.parent, ROOT))] == []


def code_cells(folder: Path) -> list[str]:
    """Return the notebook's cells of code: find the clone, train, race, draw."""
    cells = json.loads((folder / "notebooks" / "train_gpt.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_a_cell_of_the_notebook_fails_if_its_command_does_and_no_old_race_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train_gpt.py").write_text("muon_lr=0.075")
    Path("run.sh").touch()
    failed, done = CompletedProcess([], 2, "no such flag"), CompletedProcess([], 0, "done")
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=[failed, done, done, failed]))
    monkeypatch.setattr(time, "strftime", Mock(side_effect=["old", "new"]))
    find, train, race, draw = code_cells(ROOT)
    names = dict[str, object]()
    exec(find, names)  # noqa: S102 (and below: Jupyter does this)
    with pytest.raises(RuntimeError, match=r"exit code 2: \./run\.sh .*\nno such flag"):
        exec(train, names)  # noqa: S102
    exec(f"{train}\n{race}", names)  # noqa: S102
    Path("old").mkdir()
    Path("old/1-a.txt").touch()
    with pytest.raises(RuntimeError, match="no such flag"):
        exec(race, names)  # noqa: S102
    assert Path("my.py").read_text() == "muon_lr=0.15"
    with pytest.raises(AssertionError, match="run the race's cell first"):
        exec(draw, names)  # noqa: S102


@pytest.mark.slow
def test_the_notebook_finds_its_clone_trains_races_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHON", sys.executable)
    clone = tmp_path / "a clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", clone], check=True)
    sources = code_cells(clone)
    for name, text in ("first.py", sources[0]), ("all.py", "\n".join(sources)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)  # where Colab is
    runpy.run_path(str(tmp_path / "first.py"))
    assert Path.cwd() == clone
    monkeypatch.chdir(clone / "notebooks")  # where Jupyter is
    plt.switch_backend("agg")
    plt.figure()
    runpy.run_path(str(tmp_path / "all.py"))
    told, changed = capsys.readouterr().out, (clone / "my.py").read_text()
    assert ("target 1.45 reached" in told, "3 pairs from seed" in told, "muon_lr=0.15" in changed) == (True, True, True)
    assert len(plt.gca().lines) == 6
