"""What the pages say holds: commands, files, links, the worked changes, and the notebook."""

import argparse
import importlib.util
import itertools
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import mini
import train_gpt
from conftest import GPT2_FLAGS
from speedrun import ROOT, lower

PAGES = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("records/*.md")]
COMMAND = re.compile(r"(?:[A-Z]+=\S+ )?(?:[\w./]*python|torchrun|\./run\.sh|train_gpt\.py)(?: [^=]|$)")
FILE = re.compile(r"(?:\./)?\w[\w./-]*\.(?:py|sh|md|json|txt|slurm|toml|png)")
MADE_BY_RUNS = re.compile(r"(my|race|record|config)\.(py|json)|profile\.txt|(logs|data/(nano|own|fineweb10B))/.*")


def code(page: Path) -> list[str]:
    """Return a page's texts in backticks and lines of blocks."""
    text = page.read_text().replace("\\\n", " ")
    return [*re.findall(r"^ {4}(?:\$ )?(\S.*)$", text, re.M), *re.findall(r"`([^`\n]+)`", text)]


def commands(page: Path):
    """Find the commands of a page, with its shell variables filled in."""
    for line in code(page):
        line = re.sub(r"\$\(.*\)|\$r/|\$\w+|\bS\b", "1", re.sub(r"^(for \w+ in [^;]*; do ?)*|; done\b", "", line))
        yield from (text for text in map(str.strip, line.split("&&")) if COMMAND.match(text) and "--help" not in text)


class Understood(BaseException):
    pass


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # what these tests have imported
@pytest.mark.parametrize("text", sorted({text for page in PAGES for text in commands(page)}))
def test_a_command_of_the_pages_is_understood(monkeypatch, text: str):
    """Start the program in this process, and end it as soon as it has parsed its flags."""
    words = [word for word in shlex.split(text, comments=True) if not re.match("[A-Z]+=|--check$", word)]
    end = [*words, "--"].index("--")
    train_gpt.parse_args(words[end + 1 :])
    program, *argv = words[:end]
    if program == "torchrun":
        argv = [*itertools.dropwhile(lambda word: word.startswith("--"), argv)]
    elif program != "python":
        argv[:0] = ["-m", "speedrun.check"] if "--card" in argv else ["train_gpt.py"]
    if argv[0].startswith("data/"):
        argv[:1] = "-m", argv[0].removesuffix(".py").replace("/", ".")
    is_module, parse = argv[0] == "-m", argparse.ArgumentParser.parse_args

    def stop(*_):
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda *args: stop(parse(*args)))
    monkeypatch.setattr(lower, "measure", stop)  # it passes on what it does not know
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a script ignores SIGHUP, and so would our children
    monkeypatch.setattr(sys, "argv", argv[is_module:])
    run, name = (runpy.run_module, argv[1]) if is_module else (runpy.run_path, str(ROOT / argv[0]))
    with pytest.raises(Understood):
        run(name, run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_of_a_page_are_there(page: Path):
    words = {word for text in code(page) for word in text.split()}
    files = {word for word in words if FILE.fullmatch(word) and not MADE_BY_RUNS.fullmatch(word)}
    files |= {*re.findall(r"\]\((?!http)([^)#]*)", page.read_text())}
    assert [name for name in files if not any((folder / name).exists() for folder in (page.parent, ROOT))] == []


SOURCE = (ROOT / "train_gpt.py").read_text()
CHANGES = (ROOT / "docs" / "change.md").read_text()


def train(path: Path, corpus: Path, folder: Path) -> list[float]:
    """Train gpt2's layers in small with a script; return the losses."""
    spec = importlib.util.spec_from_file_location("changed", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.PRESETS["mini"] = module.Hyperparameters(**mini.MINI | dict(layers=module.GPT2_LAYERS))
    # Six heads, of which 1, 2, 3 or 6 are a matrix
    flags = "--batch_tokens=16 --num_heads=6 --head_dim=8 --model_dim=48 --seed=0 --run_id=r --val_loss_every=0".split()
    flags += [f"--prefix_file={corpus}/prefixes", f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin"]
    result = module.main([*GPT2_FLAGS, *flags, f"--log_dir={folder}"])
    return [loss for _, loss, _ in result["train_curve"] + result["val_curve"]]


@pytest.mark.published
def test_changes_of_the_page_and_ideas_apply_and_train_something_else(tmp_path, corpus):
    """But for the kernel that transposes, which only a GPU runs."""
    for text in re.findall(r"\| `([^`]+)` → ", CHANGES):
        assert SOURCE.count(text) == 1, f"train_gpt.py lacks `{text}`: update docs/change.md"
    before = train(ROOT / "train_gpt.py", corpus, tmp_path / "before")
    diffs = re.findall(r"^```diff\n(.*?)^```", CHANGES, re.M | re.S)
    ideas = [path.read_text() for path in (ROOT / "docs" / "ideas").glob("*.diff")]
    assert (len(diffs), len(ideas)) == (3, 5)
    for i, diff in enumerate(diffs + ideas):
        (tmp_path / "train_gpt.py").write_text(SOURCE)
        applied = subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path)
        assert applied.returncode == 0, "train_gpt.py has changed where a diff in docs/ changes it: update that"
        losses = train(tmp_path / "train_gpt.py", corpus, tmp_path / str(i))
        differs = "transpose_kernel" not in diff
        assert (losses != before, all(0 < loss < 20 for loss in losses)) == (differs, True)  # and so not NaN


@pytest.mark.slow
def test_the_notebook_clones_trains_races_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    cells = json.loads((ROOT / "notebooks" / "train_gpt.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code.replace("https://github.com/OWNER/train_gpt", str(ROOT)))
    plt.switch_backend("agg")
    plt.figure()
    runpy.run_path("notebook.py")
    told, changed = capsys.readouterr().out, (tmp_path / "train_gpt" / "my.py").read_text()
    assert ("target 1.45 reached" in told, "n=3 pairs" in told, "muon_lr=0.15" in changed) == (True, True, True)
    assert len(plt.gca().lines) == 6
