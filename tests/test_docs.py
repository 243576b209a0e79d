"""What the documentation says is there."""

import ast
import dataclasses
import re
from pathlib import Path

import train_gpt
from records.__main__ import build_parser

ROOT = Path(__file__).parent.parent
TOUR = (ROOT / "docs" / "tour.md").read_text()


def defined_tests() -> set[str]:
    return {
        name for path in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }


def names_of_the_script() -> set[str]:
    """Definitions at the top level, what classes define, as Class.name, and what objects have, by its bare name."""
    tree = ast.parse(Path(train_gpt.__file__).read_text())
    names = set(vars(train_gpt)) | {field.name for field in dataclasses.fields(train_gpt.Hyperparameters)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in vars(getattr(train_gpt, node.name, object))}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def test_every_test_that_the_fault_table_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    assert len(named) > 20
    assert named <= defined_tests(), named - defined_tests()


def test_all_that_the_tour_names_exists():
    """Whatever stands in backticks is a definition of train_gpt.py, a flag of it, a test, a file, or a command."""
    known, flags = names_of_the_script(), {field.name for field in dataclasses.fields(train_gpt.Hyperparameters)}
    missing = []
    for quoted in re.findall(r"`([^`]+)`", TOUR):
        if quoted.startswith("python -m "):
            found = re.search(rf"^\s+{quoted.split()[3]}\b", build_parser().format_help(), re.M) is not None
        elif quoted.startswith("--"):
            found = quoted[2:] in flags
        elif "/" in quoted or quoted.endswith(".py"):
            found = (ROOT / quoted).exists()
        else:
            found = quoted in known or quoted in defined_tests()
        missing += [] if found else [quoted]
    assert not missing
    assert len(set(re.findall(r"`([A-Za-z_.]+)`", TOUR)) & known) > 50


def test_every_definition_that_a_reader_needs_is_in_the_tour():
    """Classes of the model and the optimizers, and what the run is made of: a new one is to be told of."""
    tree = ast.parse(Path(train_gpt.__file__).read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    faults_and_parser = {"UserError", "ShardError", "NonFiniteLoss", "ArgumentParser"}
    assert {name for name in classes - faults_and_parser if f"`{name}" not in TOUR} == set()


def test_links_of_the_documents_lead_somewhere():
    for page in ["README.md", "CONTRIBUTING.md", "records/README.md", *sorted(ROOT.glob("docs/*.md"))]:
        path = ROOT / page
        targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
        missing = [t for t in targets if not t.startswith("http") and not (path.parent / t).exists()]
        assert not missing, (page, missing)


def test_every_record_is_in_the_tour_and_the_other_way_round():
    folders = {path.name for path in (ROOT / "records").iterdir() if re.match(r"\d{4}-", path.name)}
    assert set(re.findall(r"\d{4}-\d{2}-\d{2}_\w+", TOUR)) == folders


def test_what_the_tour_says_was_measured_stands_on_the_pages_of_the_records():
    pages = "".join((ROOT / "records" / name).read_text() for name in ("README.md", "CLAIMS.md"))
    intervals = re.findall(r"[-+]?\d\.\d+ \([-+]?\d\.\d+ to [^)]*\)", TOUR)
    assert len(intervals) > 5
    assert [figure for figure in intervals if figure not in pages] == []


def test_tools_have_one_version():
    """Those of the commit hook are those that CI runs."""
    pinned = dict(line.split("==") for line in (ROOT / "tests" / "requirements.txt").read_text().split())
    hooked = re.findall(r"\[ruff==([\d.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooked == [pinned["ruff"]] * 2


def test_every_tool_says_its_exit_codes():
    """In its module's text, which --help shows; those of train_gpt.py stand in README.md."""
    tools = ["check.py", "sample.py", *(f"data/{name}.py" for name in ("cached_fineweb10B", "pack_nano", "pack_text"))]
    tools += [f"benchmarks/{name}.py" for name in ("command", "race_anchor", "anchor_cpu")]
    silent = [tool for tool in [*tools, "records/__main__.py"] if "Exit codes: 0" not in (ROOT / tool).read_text()]
    assert not silent
    assert "Exit codes: 0" in (ROOT / "README.md").read_text()
