"""What the pages say holds: commands, files, links and the worked changes."""

import argparse
import dataclasses
import functools
import importlib.util
import inspect
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import train_gpt
from conftest import GPT2_FLAGS
from speedrun import lower, mini
from world_worker import ROOT

FOLDERS = ("*.md", ".github/**/*.md", "docs/*.md", "speedrun/*.md", "records/**/*.md")
PAGES = [page for pattern in FOLDERS for page in ROOT.glob(pattern)]
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
        found = filter(COMMAND.match, map(str.strip, line.split("&&")))
        yield from (text for text in found if "--help" not in text)


class Understood(BaseException):
    """A program has parsed its flags."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # what these tests have imported
@pytest.mark.parametrize("text", sorted({text for page in PAGES for text in commands(page)}))
def test_a_command_of_the_pages_is_understood(monkeypatch, text: str):
    """Start the program in this process, and end it as soon as it has parsed its flags."""
    words = [word for word in shlex.split(text, comments=True) if not re.match("[A-Z]+=|--check$", word)]
    end = [*words, "--"].index("--")
    train_gpt.parse_args(words[end + 1 :])
    program, *argv = words[:end]
    if program == "torchrun":
        args = get_args_parser().parse_args(argv)
        argv = [*["-m"] * args.module, args.training_script, *args.training_script_args]
    elif program != "python":
        argv.insert(0, "train_gpt.py")
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


def anchors(page: Path) -> set[str]:
    """Return where links into a page may point: its headings as GitHub names them, and ids."""
    text = (page / "README.md" if page.is_dir() else page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    names = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'id="(.+?)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_of_a_page_are_there(page: Path):
    words = {word for text in code(page) for word in text.split()}
    files = {word for word in words if FILE.fullmatch(word) and not MADE_BY_RUNS.fullmatch(word)}
    files |= set(re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text()))
    assert [name for name in files if not any((folder / name).exists() for folder in (page.parent, ROOT))] == []
    places = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text())
    assert [link for link in places if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []


SOURCE = (ROOT / "train_gpt.py").read_text()
CHANGES = (ROOT / "docs" / "change.md").read_text()


def train(path: Path, corpus: Path) -> list[float]:
    """Train a small gpt2 with a script; return the losses."""
    spec = importlib.util.spec_from_file_location("changed", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.PRESETS["mini"] = module.Hyperparameters(**mini.MINI)
    # Six heads, of which 1, 2, 3 or 6 are a matrix
    wide = [*"--batch_tokens=16 --num_heads=6 --head_dim=8 --model_dim=48".split(), f"--prefix_file={corpus}/prefixes"]
    files = [f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin"]
    cfg = module.resolve(module.parse_args([*GPT2_FLAGS, *wide, *files, "--seed=0"]))
    cfg = dataclasses.replace(cfg, layers=module.GPT2_LAYERS)
    data, trainer = module.plan_data(cfg), module.Trainer(cfg, module.Ranks())
    batches = trainer.reader.read(module.train_cycles(data["train"], cfg))
    losses = [trainer.train_step(plan, *batch)[0].item() for plan, batch in zip(cfg.plans, batches, strict=True)]
    trainer.finish()
    return [*losses, trainer.evaluate(cfg.num_iterations, data["val"])]


def test_the_path_of_reading_names_what_there_is_and_how_much():
    """In the script's own order of names. An idea may make a part longer."""
    path = (ROOT / "docs" / "tour.md").read_text().partition("## An hour's path")[2].partition("What can wait")[0]
    most, lines = int(re.search(r"these (\d+) lines", path)[1]), 0
    for name in re.findall(r"`([\w.]+)`", path):
        found = functools.reduce(getattr, name.split("."), train_gpt)
        if isinstance(found, tuple):
            lines += SOURCE.partition(f"\n{name} = (")[2].partition("\n)\n")[0].count("\n") + 2
        else:
            lines += len(inspect.getsource(found).splitlines())
    assert 0.8 * most < lines < 1.1 * most


@pytest.mark.published
def test_changes_of_the_page_apply_and_train_something_else(tmp_path, corpus):
    for text in re.findall(r"\| `([^`]+)` → ", CHANGES):
        assert SOURCE.count(text) == 1, f"train_gpt.py lacks `{text}`: update docs/change.md"
    before = train(ROOT / "train_gpt.py", corpus)
    diffs = re.findall(r"^```diff\n(.*?)^```", CHANGES, re.M | re.S)
    assert len(diffs) == 3
    for diff in diffs:
        (tmp_path / "train_gpt.py").write_text(SOURCE)
        applied = subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path)
        assert applied.returncode == 0, "train_gpt.py has changed where docs/change.md changes it: update the page"
        losses = train(tmp_path / "train_gpt.py", corpus)
        assert all(0 < loss < 20 for loss in losses)  # and so not NaN
        assert losses != before
