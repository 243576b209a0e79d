"""check.py, run.sh's use of it, needs.py and environment.sh: on invented machines, with data of a few tokens."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import TINY_FLAGS
from speedrun import ROOT, __main__, cards, check, launch, needs, page_tables, publish

SMALL = [*TINY_FLAGS, *"--num_iterations 4 --val_seq_len 96 --val_tokens 288 --block_size 16".split()]
GPT2 = "--preset gpt2 --num_iterations 2 --val_tokens 262144".split()
BF16 = dataclasses.replace(train_gpt.GPT2, dtype="bfloat16")
# GPUs with memory for a model of the script's width, as these have for that of 768
H100 = check.Gpu(cards.H100.name, (9, 0), int(80e9 * train_gpt.GPT2.model_dim / 768))
RTX_4090 = check.Gpu(cards.RTX_4090.name, (8, 9), int(25e9 * train_gpt.GPT2.model_dim / 768))
PAGE = (ROOT / "docs" / "gpu.md").read_text()
CPU_RUNS = "; --preset nano trains on a CPU"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Invent what torch sees and what nvidia-smi, a program on the PATH, prints; at first there is neither."""
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC", "SCRIPT"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    which = shutil.which  # not this machine's own
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name != program.name or program.exists() else None)

    def invent(*gpus: check.Gpu, prints: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpus[0].capability)
        monkeypatch.setattr(check, "try_gpu", lambda index: gpus[index])
        if prints:
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
            program.chmod(0o755)

    invent()
    return invent


@pytest.fixture
def outcome(capfd, corpus, monkeypatch):
    """Run check.main: the exit code, the lines of stdout and those of stderr. Two steps of gpt2 are a run."""
    stages = [stage._replace(more_steps=0) for stage in BF16.stages]
    monkeypatch.setitem(train_gpt.PRESETS, "gpt2", dataclasses.replace(train_gpt.PRESETS["gpt2"], stages=stages))

    def run(*argv: str, small: bool = True) -> tuple[int, list[str], list[str]]:
        files = f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin"
        if "gpt2" in argv:
            files = f"--train_files={corpus}/gpt2.bin", f"--val_files={corpus}/other_gpt2.bin"
        code = check.main([*SMALL * small, *files, *argv])
        out, errors = map(str.splitlines, capfd.readouterr())
        return code, out, errors

    return run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--device cuda", f"there is no NVIDIA GPU{CPU_RUNS}"),
        ("--num_iterations 999", "999; documents begin with --eot_token 256; data/pack_text.py packs text; --num_"),
        ("--val_files none_*.bin", "none_*.bin in {cwd}: tokens for 0 batches, the run needs 3; documents"),
        ("--train_files {tmp}/short.bin", "{tmp}/short.bin: not a whole shard of tokens; data/pack_text.py"),
        ("--train_files {corpus}/gpt2.bin", "gpt2.bin: has token 50256, --vocab_size is 257: another tokenizer's?"),
        ("NPROC=two", "NPROC=two: expected a number of processes"),
        ("NPROC=3", "NPROC=3: 2 sequences a step, no GPUs: expected a divisor"),
        ("--canon_file {corpus}/prefixes", "of another vocabulary; --prefix_file= and --canon_file= go without"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(outcome, corpus, tmp_path, monkeypatch, argv, message):
    (tmp_path / "short.bin").write_bytes((corpus / "val_000000.bin").read_bytes()[:-1])
    argv, message = (text.format(tmp=tmp_path, corpus=corpus, cwd=os.getcwd()) for text in (argv, message))
    variable, is_set, rest = argv.partition("=")
    if is_set and variable.isupper():
        value, _, argv = rest.partition(" ")
        monkeypatch.setenv(variable, value)
    code, out, [line] = outcome(*argv.split())
    assert (code, out, line.startswith("check: ")) == (2, [], True)
    assert message in line


@pytest.mark.parametrize(
    ("gpus", "expected", "notes"),
    [
        ([H100] * 7, "4", "7 x NVIDIA H100 80GB HBM3 (compute capability 9.0)"),
        ([H100], "1 --ngram_rows N", "record's 84602880; by public runs loss 3.28"),
        ([RTX_4090], "1 --ngram_rows N --no-cuda_graphs", "note: CUDA graphs: left out, as their memory does not fit"),
        ([RTX_4090._replace(free=3 * 10**9)], None, "2.8 are free: free some, or halve --train_seq_len"),
        ([H100, H100._replace(capability=(7, 5))], None, "(A100, RTX 30); CUDA_VISIBLE_DEVICES leaves it out;"),
    ],
)
def test_machines_with_gpus(machine, outcome, tmp_path, monkeypatch, gpus, expected, notes):
    machine(*gpus)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(check.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))  # no tokenizer
    code, out, errors = outcome(*GPT2, small=False)
    flags = " ".join(out).split()[1:]
    assert (code, re.sub(r"(?<=rows )\d+", "N", "".join(out))) == ((0, expected) if expected else (2, ""))
    assert notes in "\n".join(errors)
    if "--ngram_rows" in flags:  # twice as many do not fit
        twice = str(2 * int(flags[flags.index("--ngram_rows") + 1]))
        code, out, _ = outcome(*GPT2, "--ngram_rows", twice, "--check", small=False)
        assert (code, bool(re.search("minutes for 1,050 on 1 x .* an idea: 8 pairs", " ".join(out)))) == (2, True)


@pytest.mark.published
def test_a_card_that_is_not_here_has_the_figures_of_the_page(capsys):
    for card in cards.CARDS.values():
        assert check.main(["--check", "--card", card.name, "--price", "60"]) == 0
        told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {card.name.removeprefix('NVIDIA ')} |"))
        _, rows, gib, _, _, loss, pairs = row.strip("| ").split(" | ")
        assert told["memory"].startswith(f"{gib} GiB of the card with --ngram_rows {rows.replace(',', '')};")
        assert (told["loss"][:5], told["an eighth"].endswith(f"8 pairs: {pairs} minutes")) == (loss, True)
        minutes = cards.costs(card)[1] + cards.COMPILE_MINUTES
        assert float(told["price"].split()[0][1:]) == pytest.approx(minutes, abs=0.01)
    assert check.main(["--check", "--card", "A100"]) == 2
    assert "--card A100: is in 2 of these names, expected 1: NVIDIA H200, " in capsys.readouterr().err


@pytest.mark.published
@pytest.mark.parametrize("name", page_tables.TABLES)
def test_a_table_of_the_page_is_what_is_predicted(name):
    """Else: python -m speedrun table. Rows that fit, GiB, times and losses of cards are seen here alone."""
    assert f"<!-- table {name}: python -m speedrun table -->\n\n{page_tables.TABLES[name]()}\n\n<!--" in PAGE


def test_a_changed_number_of_the_page_is_out_of_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(publish, "leaderboards", lambda root: "none")
    (tmp_path / "docs").mkdir()
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "README.md").write_text(f"{publish.BEGIN}\n\n{publish.END}\n")
    (page := tmp_path / "docs" / "gpu.md").write_text(PAGE)
    shutil.copy(ROOT / "docs" / "running.md", tmp_path / "docs")
    table = ["table", f"--root={tmp_path / 'records'}"]
    assert (__main__.main(table), __main__.main([*table, "--check"])) == (0, 0)
    (row,) = re.findall(r"^\| attention .*\n", text := page.read_text(), re.M)
    page.write_text(text.replace(row, row.replace("1", "2")))
    assert __main__.main([*table, "--check"]) == 1
    assert f"{page}: out of date: run" in capsys.readouterr().out
    assert (__main__.main(table), page.read_text()) == (0, text)


def test_layers_train_in_bf16_where_fp8_hangs(machine, outcome, monkeypatch):
    machine(RTX_4090)
    for version, told in ("2.11.0", True), ("2.12.0", False):
        monkeypatch.setattr(check, "VERSION", version)
        assert ("--no-layers_fp8" in " ".join(outcome(*GPT2, small=False)[2])) == told


@pytest.mark.slow
@pytest.mark.published
def test_estimates_are_those_of_the_lowered_graphs():
    """Training to 10%: an idea may need a moment more."""
    for processes, found in json.loads(cards.PREDICTED.read_text())["processes"].items():
        cfg = dataclasses.replace(BF16, ngram_rows=found["ngram_rows"], cuda_graphs=False)  # one pool of memory
        _, need = check.fit(cfg, H100, int(processes))
        for total, mib, within in zip(need.values(), (found["train"], found["validation"]), (0.1, 0.08), strict=True):
            assert total / 2**20 == pytest.approx(mib + check.SPARE_MIB, rel=within)


@pytest.mark.parametrize(
    ("prints", "part"),
    [
        ("535.1, NVIDIA RTX A5000", "nvidia-smi says 535.1, NVIDIA RTX A5000: update .*whl/cu126 torch=="),
        ("580.65.06, NVIDIA RTX A5000", "restart the machine, or .*whl/cu130 torch=="),
        ("NVIDIA-SMI has failed", "nvidia-smi says NVIDIA-SMI has failed: update the driver"),
    ],
)
def test_gpu_that_torch_cannot_use_is_a_problem(machine, outcome, monkeypatch, prints, part):
    """Whatever the preset: never a silent run on the CPU, unless it is asked for."""
    machine(prints=prints)
    for small in (True, False):
        code, out, [line] = outcome("--device", "auto", small=small)
        assert (code, out, line.endswith(CPU_RUNS)) == (2, [], True)
        assert re.search(part, line)
    assert outcome()[0] == 0  # --device cpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert outcome("--device", "auto")[0] == 0


def test_a_broken_gpu_is_named(machine, outcome, monkeypatch):
    machine(H100, H100)
    monkeypatch.setattr(check, "try_gpu", lambda index: H100 if index == 0 else torch.zeros(2).reshape(3))
    assert "GPU 1 does not work: shape '[3]' is invalid" in outcome("--device", "auto")[2][-1]


def test_presets_data_are_fetched_when_they_are_missing(corpus, tmp_path, monkeypatch, capfd):
    """With the packer replaced by one that copies a small corpus into place; --check does not run it."""
    monkeypatch.chdir(tmp_path)
    packer = tmp_path / "data" / "pack_nano.py"
    (tmp_path / "data" / "nano").mkdir(parents=True)
    copy = f"shutil.copy(f'{corpus}/{{role}}_000000.bin', f'data/nano/nano_{{role}}_0.bin')"
    packer.write_text(f"import shutil\nfor role in ('train', 'val'):\n    {copy}")
    assert check.main([*SMALL, "--check"]) == 0
    assert "run.sh gets them: " in capfd.readouterr().out
    assert not [*tmp_path.glob("data/nano/*")]
    assert check.main(SMALL) == 0
    assert capfd.readouterr() == ("1\n", f"getting data: {needs.PYTHON} data/pack_nano.py\n")
    (tmp_path / "data/nano/nano_train_0.bin").write_text("damaged")
    packer.write_text("raise SystemExit(1)")
    assert (check.main(SMALL), "the data could not be fetched" in capfd.readouterr().err) == (2, True)


def test_as_much_of_fineweb_is_fetched_as_the_run_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for batch, steps, shards in ((1, 1, 1), (1, 508, 1), (1, 509, 2), (2, 255, 2)):  # 508 train on 2/3 of a shard
        stages = tuple(stage._replace(batch=batch, more_steps=0) for stage in BF16.stages)
        problem, command = check.data_problem(dataclasses.replace(BF16, stages=stages, num_iterations=steps))
        assert (command, "the run needs" in problem) == (f"data/cached_fineweb10B.py {shards}", True)


# ---- needs.py, run.sh and environment.sh ----------------------------------------------------------------------------
def program(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    env = os.environ | dict(PYTHON=sys.executable) | env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("prefix", "fix"), [(sys.base_prefix, "run.sh --check makes "), ("/own", "install scipy==")])
def test_missing_package_is_one_line_that_says_what_to_type(monkeypatch, capfd, prefix, fix):
    """In a system's Python pip may refuse."""
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(needs, "is_installed", lambda name: name != "scipy")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    with pytest.raises(SystemExit, match="2"), needs.packages("race", "text"):
        raise ModuleNotFoundError("no\nscipy")
    told = capfd.readouterr().err
    assert (": no scipy; " in told, fix in told, told.count("\n")) == (True, True, 1)


def test_the_exit_code_of_a_training_is_that_of_run_sh(monkeypatch):
    monkeypatch.setattr(check, "prepare", lambda *_, **__: (0, ["1", "--seed=1"]))
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train_gpt, "program", lambda flags: len(flags))
    assert launch.main([train_gpt.__file__, "--preset=nano", "--device=cpu"]) == 3


def test_the_oldest_torch_that_is_accepted_compiles_every_week():
    weekly = (ROOT / ".github" / "workflows" / "weekly.yml").read_text()
    assert f"torch=={'.'.join(map(str, needs.OLDEST_TORCH))}.0\n" in weekly


@pytest.mark.slow
def test_run_sh(corpus, tmp_path):
    flags = [*SMALL, f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin", f"--log_dir={tmp_path}"]
    done = program("./run.sh", *flags, "--foo", "3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    (tmp_path / "run").symlink_to(ROOT / "run.sh")
    done = program(tmp_path / "run", *flags, cwd=tmp_path, NPROC="2", PYTHONSAFEPATH="1")
    assert (done.returncode, "val_loss" in done.stdout) == (0, True)
    assert program("./run.sh", SCRIPT="none.py").stderr == f"run.sh: SCRIPT=none.py: there is no such file in {ROOT}\n"


@pytest.mark.parametrize(
    ("prints", "wheels"),
    [("", "cpu"), ("579.1\n579.1", "cu126"), ("580.65.06", "")],
)
def test_wheels_of_torch_suit_the_driver(machine, prints, wheels):
    machine(prints=prints or "nvidia-smi has failed")
    done = program("bash", "-c", "set -euo pipefail; source speedrun/environment.sh; torch_index")
    assert (done.returncode, done.stdout.strip().rpartition("/")[2], done.stderr) == (0, wheels, "")


@pytest.mark.slow
def test_environment_is_made_once_and_completed(tmp_path):
    """With pip itself and a package of one file, from a folder."""
    folder = tmp_path / "a clone"
    (folder / "speedrun").mkdir(parents=True)
    for name in ("speedrun/__init__.py", "speedrun/needs.py", "speedrun/environment.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "requirements.txt").write_text("tiny==1.0\n")
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    (tmp_path / "bin" / "uv").symlink_to("/bin/false")  # where it is there, it may fail
    pip = dict(PIP_FIND_LINKS=str(tmp_path), PIP_NO_INDEX="1", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    script = "set -euo pipefail; source speedrun/environment.sh; find_python; echo $python $GOMP_SPINCOUNT"

    def start(**env: str) -> tuple[int, str, str]:
        done = program("bash", "-c", script, "run.sh", cwd=folder, **pip | env)
        return done.returncode, done.stdout, done.stderr

    code, out, errors = start()
    assert (code, out, "completing the environment" in errors) == (0, ".venv/bin/python 10000\n", True), errors
    [metadata] = folder.glob(".venv/lib/*/site-packages/tiny*/METADATA")
    metadata.unlink()  # pip writes it last, so it is missing where pip was killed
    assert start()[:2] == (0, ".venv/bin/python 10000\n")
    assert metadata.exists()
    assert start(PYTHON="/nowhere") == (2, "", "run.sh: PYTHON=/nowhere is not Python 3.11 or newer\n")
