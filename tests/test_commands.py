"""What the pages say holds: commands, files, links, tests, names and the worked changes."""

import argparse
import dataclasses
import functools
import importlib.util
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
from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import lower
from world_worker import ROOT

SOURCE = (ROOT / "train_gpt.py").read_text()
FOLDERS = ("*.md", ".github/**/*.md", "docs/*.md", "speedrun/*.md", "records/**/*.md")
PAGES = [page for pattern in FOLDERS for page in ROOT.glob(pattern)]
COMMAND = re.compile(r"(?:[A-Z]+=\S+ )?(?:[\w./]*python|torchrun|\./run\.sh|train_gpt\.py)(?: [^=]|$)")
FILE = re.compile(r"(?:\./)?\w[\w./-]*\.(?:py|sh|md|json|txt|slurm|toml|png)")
MADE_BY_RUNS = re.compile(
    r"my\.py|profile\.txt|race\.json|record\.json|config\.json|logs/.*|data/(nano|own|fineweb10B)/.*"
)


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text())


def blocks(page: Path) -> list[str]:
    return re.findall(r"^ {4}(?:\$ )?(\S.*)$", page.read_text().replace("\\\n", " "), re.M)


def commands(page: Path):
    """Find the commands of a page, in blocks and in backticks, with its shell variables filled in."""
    for line in [*blocks(page), *quoted(page)]:
        line = re.sub(r"\$\(.*\)|\$r/|\$\w+|\bS\b", "1", re.sub(r"^(for \w+ in [^;]*; do ?)*|; done\b", "", line))
        yield from filter(COMMAND.match, map(str.strip, line.split("&&")))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # what these tests have imported
def test_commands_of_the_pages_are_understood(monkeypatch):
    """Start each program in this process, and end it as soon as it has parsed its flags."""
    Understood, parse = type("Understood", (BaseException,), {}), argparse.ArgumentParser.parse_args
    parse_flags = train_gpt.parse_args

    def end(*_, **__):
        raise Understood

    def parse_and_end(self, *args, **settings):
        parse(self, *args, **settings)
        end()

    def start(program, argv: list[str]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
            patch.setattr(lower, "measure", end)  # it passes on what it does not know
            patch.setattr(sys, "argv", ["program", *argv])
            patch.setattr(signal, "signal", lambda *_: None)  # a script ignores SIGHUP, and so would our children
            with pytest.raises(Understood):
                program()

    def understand(text: str) -> None:
        words = [word for word in shlex.split(text, comments=True) if not re.match("[A-Z]+=", word)]
        words[0] = re.sub(r"^\S+/python$", "python", words[0])
        words, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
        match words:
            case [_] | ["./run.sh" | "python", *_, "--help"] | ["python", "-m", "pip" | "ruff" | "mypy" | "timeit", *_]:
                pass
            case ["torchrun", *argv]:
                args = get_args_parser().parse_args(argv if argv[-1][0] != "-" else [*argv, "train_gpt.py"])
                module = ["-m"] if args.module else []
                understand(shlex.join(["python", *module, args.training_script, *args.training_script_args]))
            case ["python", "-m", "speedrun", "lower", *argv] if "--script" in argv:
                pass  # the rest may be flags of that script
            case ["python", "-m", module, *argv]:
                start(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), argv)
            case ["python", "train_gpt.py" | "my.py", *argv] | ["train_gpt.py" | "./run.sh", *argv]:
                flags = [flag for flag in argv if flag != "--check"]
            case ["python", script, *argv]:
                start(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), argv)
        if flags is not None:
            parse_flags(flags)

    found = {text: page for page in PAGES for text in commands(page)}
    assert len(found) > 30
    for text, page in found.items():
        try:
            understand(text)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            raise AssertionError(f"{page.relative_to(ROOT)}: {text}: {error!r}") from error


def anchors(page: Path) -> set[str]:
    """Return where links into a page may point: its headings as GitHub names them, and ids."""
    text = (page / "README.md" if page.is_dir() else page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    names = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'id="(.+?)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_links_tests_and_flags_of_a_page_are_there(page: Path):
    words = {word for text in [*quoted(page), *blocks(page)] for word in text.split()}
    files = {word for word in words if FILE.fullmatch(word) and not MADE_BY_RUNS.fullmatch(word)}
    files |= set(re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text()))
    assert [name for name in files if not any((folder / name).exists() for folder in (page.parent, ROOT))] == []
    places = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text())
    assert [link for link in places if link[1] not in anchors(page.parent / link[0] if link[0] else page)] == []
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*.py"))
    assert [word for word in words if re.fullmatch(r"test_\w+", word) and f"def {word}(" not in tests] == []
    paths = [path for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)]
    sources = "".join(path.read_text() for path in (*paths, *page.parent.glob("train_gpt.py")))
    texts = [text for text in quoted(page) if text.startswith("--")]
    flags = {flag for text in texts for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", text)}
    known = {flag for flag in flags if re.search(rf'"{flag}"|^    {flag[2:].removeprefix("no-")}: ', sources, re.M)}
    assert flags - known - {"--help"} == set()


@pytest.mark.published
def test_names_on_the_tour_are_in_the_script():
    """Identifiers, such as `Adam.state`, for readers who search for them."""
    page = ROOT / "docs" / "tour.md"
    texts = {text for text in quoted(page) if re.fullmatch("[A-Za-z_.]+", text) and not FILE.fullmatch(text)}
    names = {part for text in texts for part in text.split(".") if not part.startswith("test_")}
    assert len(names) > 40
    assert names - set(re.findall(r"\w+", SOURCE)) == set()


CHANGES = (ROOT / "docs" / "change.md").read_text()
DIFFS = dict(re.findall(r"^### (.*?)\n.*?^```diff\n(.*?)^```", CHANGES, re.M | re.S))
TABLE = CHANGES.partition("## Take one idea out")[2].partition("\n## ")[0]
IDEAS = {idea: re.findall("`(.*?)`", cell) for idea, cell in re.findall(r"^\| (.*) \| (`.*`) \|$", TABLE, re.M)}
TRIED = [*DIFFS, *(pytest.param(idea, marks=pytest.mark.slow) for idea in [*IDEAS][::3])]


def take_out(idea: str) -> tuple[str, list[str]]:
    """Return the script with a row's change, a flag or a text and its replacement, and all flags."""
    change = IDEAS[idea]
    preset = [f"--preset={'nano' if idea.startswith('nano') else 'gpt2'}"]
    if rows := re.fullmatch(r"(GPT2_\w+): (.*)", change[0]):  # the short form
        change = [f"= {rows[1]}", f"= tuple(row._replace({rows[2]}) for row in {rows[1]})"]
    if len(change) == 1:
        return SOURCE, [*preset, *change[0].split()]
    old, new = change
    assert SOURCE.count(old) == 1, f"train_gpt.py has `{old}` {SOURCE.count(old)} times: update docs/change.md"
    if old.startswith("= "):  # a table of gpt2's, of which mini makes its own
        old, new = rf"(= |\bin ){old[2:]}\b", rf"\g<1>{new[2:]}"
        return re.sub(old, new, SOURCE), preset
    return SOURCE.replace(old, new), preset


@pytest.fixture(scope="module")
def train(corpus, tmp_path_factory):
    """Return a function that trains all steps with a script, and returns the trainer and the losses."""
    files = [f"--train_files={corpus}/long.bin", f"--val_files={corpus}/val_*.bin", "--seed=0"]
    # Six heads, of which 1, 2, 3 or 6 are a matrix
    wide = [*"--batch_tokens=16 --num_heads=6 --head_dim=8 --model_dim=48".split(), f"--prefix_file={corpus}/prefixes"]
    path = tmp_path_factory.mktemp("changed") / "train_gpt.py"

    @functools.cache
    def run(source: str, preset: str, *flags: str) -> tuple:
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("changed", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        small = TINY_FLAGS if preset.endswith("nano") else [*GPT2_FLAGS, *wide]
        cfg = module.resolve(module.parse_args([*small, *files, *flags]))
        cfg = dataclasses.replace(cfg, layers=module.PRESETS[preset.removeprefix("--preset=")].layers)
        data, trainer = module.plan_data(cfg), module.Trainer(cfg, module.Ranks())
        batches = trainer.reader.read(module.train_cycles(data["train"], cfg))
        losses = [trainer.train_step(module.Plan(step, cfg), *batch).item() for step, batch in enumerate(batches)]
        trainer.finish()
        return trainer, [*losses, trainer.evaluate(cfg.num_iterations, data["val"])]

    return run


@pytest.mark.published
def test_the_page_of_changes_fits_the_script():
    assert (len(IDEAS) > 20, len(DIFFS)) == (True, 3)
    for idea in IDEAS:
        train_gpt.parse_args([*take_out(idea)[1], "--num_heads=6"])


@pytest.mark.published
@pytest.mark.parametrize("name", TRIED)
def test_a_change_of_the_page_trains_something_else(tmp_path, train, name: str):
    source, flags = SOURCE, ["--preset=gpt2"]
    if name in IDEAS:
        source, flags = take_out(name)
    else:
        (tmp_path / "train_gpt.py").write_text(SOURCE)
        applied = subprocess.run(["git", "apply"], input=DIFFS[name], text=True, cwd=tmp_path)
        assert applied.returncode == 0, "train_gpt.py has changed where docs/change.md changes it: update the page"
        source = (tmp_path / "train_gpt.py").read_text()
    trainer, losses = train(source, *flags)
    _, before = train(SOURCE, flags[0])
    assert all(0 < loss < 20 for loss in losses)  # and so not NaN
    assert losses != before
    if "sharply" in name:  # neutral at the start, and then trained
        assert losses[0] == before[0]
        assert all((block.attn.sharpness != 1).all() for block in trainer.gpt.blocks if block.attn)
