"""What the pages say holds: their commands know their flags, files and links are there, the notebook runs."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from speedrun import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("records/*.md")]
PROGRAM = re.compile(r"python -m (speedrun \w+)|python ([\w./]+\.py)|(?:^|[= ])(\./run\.sh|train_gpt\.py)(?: |$)")
FILE = re.compile(r"(?:\./)?\w[\w./-]*\.(?:py|sh|md|json|txt|slurm|toml|png)")
MADE_BY_RUNS = re.compile(r"(my|race|record|config)\.(py|json)|profile\.txt|(logs|data/(nano|own|fineweb10B))/.*")


def code(page: Path) -> list[str]:
    """Return a page's texts in backticks and lines of blocks, without comments."""
    text = page.read_text().replace("\\\n", " ")
    texts = [*re.findall(r"^ {4}(?:\$ )?(\S.*)$", text, re.M), *re.findall(r"`([^`\n]+)`", text)]
    return [text.partition(" # ")[0] for text in texts]


def flags_of_pages() -> dict[str, set[str]]:
    """Return the flags that pages give to each program. Behind ` -- ` they are train_gpt.py's."""
    flags: dict[str, set[str]] = defaultdict(set)
    for text in (part for page in PAGES for line in code(page) for part in line.split("&&")):
        if found := PROGRAM.search(text):
            program = found[1] or found[2] or found[3]
            own, _, of_script = re.sub('"[^"]*"', "", text[found.end() :]).partition(" -- ")
            flags[program] |= {*re.findall(r"--\w+", own)}
            flags["train_gpt.py"] |= {*re.findall(r"--\w+", of_script)}
    return flags


def run(*command: str) -> str:
    env = os.environ | dict(PYTHON=sys.executable)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FLAGS = flags_of_pages()


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(FLAGS))
def test_programs_of_the_pages_have_the_flags_that_pages_give_them(program: str):
    command = ["-m", *program.split()] if program.startswith("speedrun ") else [program]
    told = run(program, "--help") if program == "./run.sh" else run(sys.executable, *command, "--help")
    known = {*re.findall(r"--\w+", told), *(f"--{name}" for name in re.findall(r"^    (\w+): ", told, re.M))}
    known |= {name.replace("--no-", "--") for name in known} | {"--help", "--check", "--no"}
    assert FLAGS[program] <= known


@pytest.mark.slow
@pytest.mark.parametrize("text", ["python -m speedrun diff Sub3Min BatchSize", "python -m speedrun verify OneLayer"])
def test_a_command_of_the_records_page_runs_as_it_stands(text: str):
    assert f"    {text}\n" in (ROOT / "records" / "README.md").read_text()
    assert run(sys.executable, *text.split()[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_of_a_page_are_there(page: Path):
    words = {word for text in code(page) for word in text.split()}
    files = {word for word in words if FILE.fullmatch(word) and not MADE_BY_RUNS.fullmatch(word)}
    files |= {*re.findall(r"\]\((?!http)([^)#]*)", page.read_text())}
    assert [name for name in files if not any((folder / name).exists() for folder in (page.parent, ROOT))] == []


@pytest.mark.slow
def test_the_notebook_clones_trains_races_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    cells = json.loads((ROOT / "notebooks" / "train_gpt.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(source.replace("https://github.com/OWNER/train_gpt", str(ROOT)))
    plt.switch_backend("agg")
    plt.figure()
    runpy.run_path("notebook.py")
    told, changed = capsys.readouterr().out, (tmp_path / "train_gpt" / "my.py").read_text()
    assert ("target 1.45 reached" in told, "n=3 pairs" in told, "muon_lr=0.15" in changed) == (True, True, True)
    assert len(plt.gca().lines) == 6
