"""Every command that the documents name: its flags are understood and its files are there, without running it."""

import argparse
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import cached_fineweb10B
import pack_nano
import pack_text
import sample
import train_gpt
from benchmarks import anchor_cpu, command, race_anchor
from records.__main__ import build_parser
from records.logs import RECORDS, find_record

ROOT = Path(train_gpt.__file__).parent
# docs/clusters.md has tests/test_clusters.py; docs/example.md is also run, by tests/test_example.py
PAGES = ["README.md", "CONTRIBUTING.md", "records/README.md", "benchmarks/README.md"]
PAGES += [f"docs/{name}.md" for name in ("example", "tour", "reliability")]
PROGRAM = r"(?:[\w./]*python|pip|torchrun|\./run\.sh|\./test\.sh|\.ci/run|train_gpt\.py)"
OUTPUT = re.compile(r"step:\d|data/own/|train on it: |def |  ")  # of the commands in README.md
PLACEHOLDERS = {r"\$\(.*\)": "FOLDER", r"\$r/": "", r"\$s(eed)?\b|\bS\b": "1", r"-k NAME\b": "-k muon"}
TOOLS = {
    "data/pack_nano.py": pack_nano.main,
    "data/pack_text.py": pack_text.main,
    "data/cached_fineweb10B.py": cached_fineweb10B.main,
    "benchmarks/anchor_cpu.py": lambda argv: anchor_cpu.main(),
}
TESTS = [name for p in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", p.read_text(), re.M)]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKERS = {text.split(":")[0] for text in SETTINGS["tool"]["pytest"]["ini_options"]["markers"]}


class Understood(BaseException):
    """Ends a tool as soon as it has read its flags."""


@pytest.fixture
def only_read(monkeypatch) -> Callable[[Callable, Sequence[str]], None]:
    """Calls a tool with arguments, and ends it when it has understood them."""

    def call(tool: Callable, argv: Sequence[str]) -> None:
        read = argparse.ArgumentParser.parse_args

        def read_and_end(self, *args, **settings):
            read(self, *args, **settings)
            raise Understood

        def read_configuration_and_end(cfg):
            raise Understood

        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["tool", *argv])
            if tool is command.run:  # which reads its own flags and those of train_gpt.py
                patch.setattr(train_gpt, "resolve", read_configuration_and_end)
            else:
                patch.setattr(argparse.ArgumentParser, "parse_args", read_and_end)
            with pytest.raises(Understood):
                tool(argv)

    return call


def commands(page: str) -> Iterator[str]:
    """Of its blocks of code and in backticks, one by one; with all lines of a block that are not known for output."""
    text = (ROOT / page).read_text()
    lines = re.findall(r"^ {4}(\$ .*)$" if page == "docs/example.md" else r"^ {4}(.*)$", text, re.MULTILINE)
    inline = re.findall(rf"`((?:[A-Z]+=\S+ )?{PROGRAM}(?: [^`]*)?)`", text)
    for line in (*lines, *inline):
        if page == "README.md" and OUTPUT.match(line):
            continue
        for pattern, value in PLACEHOLDERS.items():
            line = re.sub(pattern, value, line)
        line = re.sub(r"^\s*(\$ )?(for \w+ in [^;]*; do ?)*|(; )?done\b", "", line)
        yield from filter(None, (part.strip() for part in line.split("&&")))


def check_records(argv: list[str]) -> None:
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    argv = argv[: len(argv) - len(flags) - bool(flags)]
    train_gpt.parse_args(flags)
    if argv == ["--help"]:
        return
    args = build_parser().parse_args(argv)
    names = getattr(args, "records", None) or [getattr(args, "a", ""), getattr(args, "b", "")]
    for name in names:
        if args.root == RECORDS and name != "MyIdea" and re.fullmatch(r"[\w-]+", name):
            find_record(name, RECORDS)


def check_packages(argv: list[str]) -> None:
    assert argv.pop(0) == "install"
    while argv:
        word = argv.pop(0)
        assert word == "pre-commit" or (word == "-r" and (ROOT / argv.pop(0)).is_file()), word


def check_pytest(argv: list[str]) -> None:
    for option, expression in zip(argv[::2], argv[1::2], strict=True):
        names = set(re.findall(r"\w+", expression)) - {"not", "and", "or"}
        if option == "-m":
            assert names <= MARKERS
        else:
            assert option == "-k"
            assert all(any(name in test for test in TESTS) for name in names), expression


def check_command(text: str, only_read: Callable) -> None:
    words = shlex.split(text, comments=True)
    while words and re.match(r"[A-Z]+=", words[0]):
        words = words[1:]
    match words:
        case [] | ["python" | ".venv/bin/python" | "/path/to/python"]:
            pass
        case ["./run.sh", *flags]:
            if flags != ["--help"]:
                train_gpt.parse_args([flag for flag in flags if flag != "--check"])
        case ["./test.sh", *flags]:
            check_pytest(flags)
        case ["source", ".venv/bin/activate"]:
            assert ".venv" in (ROOT / "environment.sh").read_text(), "which makes it"
        case [".ci/run"]:
            assert os.access(ROOT / ".ci" / "run", os.X_OK)
        case ["torchrun", *argv]:
            args = get_args_parser().parse_args(argv if argv[-1][0] != "-" else [*argv, "train_gpt.py"])
            module = ["-m"] if args.module else []
            check_command(shlex.join(["python", *module, args.training_script, *args.training_script_args]), only_read)
        case ["python", "-m", "records", *argv]:
            check_records(argv)
        case ["python", "-m", "benchmarks", *argv]:
            only_read(command.run, argv)
        case ["python", "-m", "benchmarks.race_anchor", *argv]:
            only_read(race_anchor.main, argv)
            train_gpt.parse_args(["--preset", "nano", *(argv[argv.index("--") + 1 :] if "--" in argv else [])])
        case ["pip", *argv] | ["python", "-m", "pip", *argv]:
            check_packages(argv)
        case ["python", "-m", "ruff" | "mypy" as tool, *argv]:
            assert tool in SETTINGS["tool"]
            assert not argv or argv[0] in ("check", "format")
        case ["pre-commit", "install"]:
            assert (ROOT / ".pre-commit-config.yaml").is_file()
        case ["python", "sample.py", *argv]:
            sample.parse_args(argv)
        case ["python", script, *argv] if script in TOOLS:
            only_read(TOOLS[script], argv)
        case ["python", "train_gpt.py" | "my.py", *argv] | ["train_gpt.py", *argv]:
            train_gpt.parse_args(argv)
        case ["cp", "train_gpt.py", "my.py"]:
            pass
        case ["sed" | "cp" | "rm" | "grep", *_]:
            assert text in (ROOT / "docs" / "example.md").read_text(), "which is run"
        case _:
            pytest.fail(f"{text}: say here how it can be checked")


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_documents_are_understood(page, only_read):
    found = list(commands(page))
    assert len(found) >= {"README.md": 25, "CONTRIBUTING.md": 14}.get(page, 1)
    for text in found:
        try:
            check_command(text, only_read)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}: {text}: {error}") from error


def test_flags_in_the_text_of_the_documents_are_there():
    """Those in backticks, alone or with a value: of train_gpt.py, or of a tool."""
    tools = [ROOT / "check.py", ROOT / "sample.py", *ROOT.glob("data/*.py"), *ROOT.glob("benchmarks/*.py")]
    tools += ROOT.glob("records/*.py")
    known = {flag for tool in tools for flag in re.findall(r'"(--[a-z_]+)"', tool.read_text())} | {"--help"}
    known |= {f"--{name}" for name in train_gpt.Hyperparameters.__slots__}
    text = " ".join(quoted for page in PAGES for quoted in re.findall(r"`(--[^`]+)`", (ROOT / page).read_text()))
    flags = set(re.findall(r"(?<!\S)--[a-z][\w-]*", text))
    assert len(flags) > 20
    assert {flag for flag in flags if flag.replace("--no-", "--") not in known} == set()


@pytest.mark.parametrize(
    "text",
    [
        "python my.py --preset nano --sead 1",
        "python train_gpt.py --preset pico",
        "./run.sh --num_iterations many",
        "./test.sh -k no_such_test",
        "./test.sh -m fast",
        "torchrun --standalone --processes=8 train_gpt.py",
        "torchrun --standalone --nproc_per_node=8 train_gpt.py --sead 1",
        "torchrun --standalone --nproc_per_node=8 -m benchmarks --sead 1",
        "python -m benchmarks --quik",
        "python -m benchmarks.race_anchor --pair_count 5",
        "python -m benchmarks.race_anchor --pairs 5 -- --sead 1",
        "python -m records race my.py train_gpt.py -- --presets nano",
        "python -m records diff Sub3Min NoSuchRecord",
        "python data/pack_text.py FILES --tokenizer gpt3",
        "python data/pack_nano.py --folder data/nano",
        "python data/cached_fineweb10B.py seven",
        "python benchmarks/anchor_cpu.py --logs anchor.jsonl",
        "python sample.py --prompts x",
        "pip install -r no/requirements.txt",
        "python no_such_script.py",
        "conda install torch",
    ],
)
def test_a_wrong_command_is_seen(text, only_read):
    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check_command(text, only_read)
