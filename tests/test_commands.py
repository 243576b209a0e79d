"""What the pages say holds: flags, files and links that they name are there, and the notebook runs."""

import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from speedrun import ROOT
from train_gpt import Hyperparameters

PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("records/*.md")]
FILE = re.compile(r"(?:\./)?\w[\w./-]*\.(?:py|sh|md|json|txt|slurm|toml|png)")
MADE_BY_RUNS = re.compile(r"(my|race|record|config)\.(py|json)|profile\.txt|(logs|data/(nano|own|fineweb10B))/.*")
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
    assert ("target 1.45 reached" in told, "3 pairs from seed" in told, "muon_lr=0.15" in changed) == (True, True, True)
    assert len(plt.gca().lines) == 6
