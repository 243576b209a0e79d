"""check.py, run.sh's use of it, and environment.sh: on invented machines, with data of a few tokens."""

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from speedrun import check
from speedrun import needs
import train_gpt
from cached_fineweb10B import RECORD_SHARDS
from conftest import TINY_FLAGS
from shards import write_shard
from train_gpt import Group, Layer
from world_worker import ROOT

SMALL = [*TINY_FLAGS, *"--num_iterations 4 --val_seq_len 96 --val_tokens 288 --block_size 16".split()]
H100 = check.Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * 10**9)
RTX_4090 = check.Gpu("NVIDIA GeForce RTX 4090", (8, 9), 25 * 10**9)
FULL_4090 = RTX_4090._replace(free=205 * 10**8)
BF16 = dataclasses.replace(train_gpt.PRESETS["gpt2"], dtype="bfloat16")


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Invent what torch sees and what nvidia-smi, a program on the PATH, prints; at first there is neither."""
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC", "SCRIPT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DRIVER_FILE", "AMD_FILE"):
        monkeypatch.setattr(needs, name, "/nowhere")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    which = shutil.which  # not this machine's own
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name != program.name or program.exists() else None)

    def invent(*gpus: check.Gpu, prints: bytes | None = None, code: int = 0, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpus[0].capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(check, "try_gpu", lambda index: gpus[index])
        if prints is not None:
            (tmp_path / "answer").write_bytes(prints)
            program.write_text(f"#!/bin/sh\ncat '{tmp_path}/answer'\nexit {code}\n")
            program.chmod(0o755)

    invent(cuda=torch.version.cuda)
    return invent


@pytest.fixture
def outcome(capfd, corpus):
    """Run check.main: the exit code, the lines of stdout and those of stderr."""

    def run(*argv: str, small: bool = True) -> tuple[int, list[str], list[str]]:
        files = f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin"
        if "gpt2" in argv:
            files = f"--train_files={corpus}/gpt2.bin", f"--val_files={corpus}/other_gpt2.bin"
        return check.main([*SMALL * small, *files, *argv]), *map(str.splitlines, capfd.readouterr())

    return run


GPT2 = "--preset gpt2 --num_iterations 2 --extension_steps 0 --val_tokens 262144".split()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--batch_tokens 1024000000000000", "--batch_tokens 1024000000000000: expected a number"),
        ("--device cuda", "there is no NVIDIA GPU; nano trains on the CPU: --preset nano --device cpu"),
        ("--num_iterations 37", "tokens for 36 batches, the run needs 37; lower --num_iterations"),
        ("--val_tokens 2496", "tokens for 25 batches, the run needs 26; lower --val_tokens"),
        ("--val_files none_*.bin", f"get it: {needs.PYTHON} data/pack_text.py"),
        ("--train_files {tmp}/fifo.bin", "{tmp}/fifo.bin: no such file; get it"),
        ("--train_files {tmp}/short.bin", "{tmp}/short.bin: 5849 bytes, but "),
        ("--train_files {corpus}/gpt2.bin", "gpt2.bin: has tokens up to 50256, not of 257"),
        ("--vocab_size 50257", ".bin: has tokens up to 256, not of 50257"),
        *((f"NPROC={wish}", f"NPROC={wish}: expected") for wish in ("-1", "9" * 9)),
        ("NPROC=3", "NPROC=3: 2 sequences a step, no GPUs: another number, or --preset nano --batch_tokens 384"),
        ("CXX=/none --compile", "torch.compile finds no C compiler, /none (CXX): install one"),
        ("--adam_every 4 --num_iterations 3", "--adam_every 4: expected at most num_iterations"),
        ("--train_files {corpus}/val_000000.bin", "val_000000.bin: begins as "),
        ("--head_dim 18", "--head_dim 18: expected a multiple of 4"),
        ("--bigram_rows 1", "--bigram_rows 1: expected at least 2"),
        *((f"--{name} 0", ": expected more than 0") for name in check.SIZES if name != "block_size"),
        *((f"--value_gate_inputs {n}", f"--value_gate_inputs {n}: expected an even number up to 64") for n in (5, 66)),
        ("--smear_gate_inputs 33", "--smear_gate_inputs 33: expected at most model_dim 32"),
        ("--train_seq_len 72 --batch_tokens 144", "--train_seq_len 72: expected a multiple of block_size"),
        ("--val_seq_len 72 --val_tokens 72", "--val_seq_len 72: expected a multiple of block_size"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(outcome, corpus, tmp_path, monkeypatch, argv, message):
    (tmp_path / "short.bin").write_bytes((corpus / "val_000000.bin").read_bytes()[:-1])
    os.mkfifo(tmp_path / "fifo.bin")
    argv, message = (text.format(tmp=tmp_path, corpus=corpus) for text in (argv, message))
    variable, is_set, rest = argv.partition("=")
    if is_set and variable.isupper():
        value, _, argv = rest.partition(" ")
        monkeypatch.setenv(variable, value)
    code, out, errors = outcome(*argv.split())
    assert (code, out, len(errors)) == (2, [], 1 + (argv == "--vocab_size 50257"))
    assert errors[0].startswith("check.py: ")
    assert message in errors[0]


LONG, BARE = Layer("long", net=True), Layer("none")
EARLIER, NEEDS_NET = "expected earlier layers", "need net=True in this row or an earlier one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=()), "layers (): expected a row at least"),
        (dict(layers=(LONG._replace(attention="wide"),)), "layer 0 has attention 'wide': expected long or short or"),
        (dict(layers=(BARE, LONG)), "layer 0 has no attention: the first layer needs it"),
        *(
            (dict(layers=(LONG, BARE._replace(**{name: value}))), f"layer 1 has no attention: {name} needs it")
            for name, value in dict(value_embed=True, reads=0, xsa=True, head_gate=True, dc=True).items()
        ),
        *((dict(layers=(LONG, LONG._replace(reads=n))), f"reads {n}, skip None, mudd (): {EARLIER}") for n in (1, -1)),
        (dict(layers=(LONG, LONG._replace(skip=1))), f"layer 1 has reads None, skip 1, mudd (): {EARLIER}"),
        (dict(layers=(LONG, LONG._replace(mudd=(0, 2)), LONG)), f"skip None, mudd (0, 2): {EARLIER}"),
        *(
            (dict(layers=(Layer("long"), Layer("long", **factors), LONG)), NEEDS_NET)
            for factors in (dict(xsa=True), dict(head_gate=True), dict(dc=True), dict(skip=0))
        ),
        (dict(groups=(Group("SGD", "*", 0.1, 0, 0, 0),)), "group * has optimizer 'SGD': expected Muon or Adam"),
        (dict(groups=(Group("Adam", "lm_head", 0.1, 0, 0, 0),)), "embed.weight: 0 rows of `groups` name this"),
        (dict(groups=(Group("Adam", "*", 0.1, 0, 0, 0),), dtype="bfloat16"), "one precision per group"),
        (dict(layers=(LONG, Layer("none", net=True))), "rows of layers: nothing uses gate_nets.1.w1"),
        (dict(layers=(Layer("paired"),), num_heads=3), "--num_heads 3: expected an even number"),
        (dict(layers=(LONG, LONG._replace(mudd=(0,), value_embed=True)), num_heads=1, head_dim=32), "an even number"),
        (
            dict(layers=(LONG, LONG._replace(mudd=(0,))), num_heads=1),
            "--num_heads 1: expected num_heads * head_dim = model_dim 32",
        ),
    ],
)
def test_rows_that_contradict_each_other_or_a_flag_are_one_line(outcome, monkeypatch, changes, message):
    flags = [f"--{name}={changes.pop(name)}" for name in ("num_heads", "head_dim", "dtype") if name in changes]
    preset = dataclasses.replace(train_gpt.PRESETS["nano"], dc_keys=9, **changes)
    monkeypatch.setitem(train_gpt.PRESETS, "nano", preset)
    code, out, errors = outcome(*flags)
    assert (code, out, len(errors)) == (2, [], 1)
    assert errors[0].startswith("check.py: ")
    assert message in errors[0]


def test_three_heads_of_gpt2_are_one_line(outcome):
    three_heads = [*GPT2, "--num_heads", "3"]
    message = "check.py: --heads_per_matrix 2: expected a divisor of num_heads"
    assert outcome(*three_heads, small=False) == (2, [], [message])
    message = "check.py: --num_heads 3: expected num_heads * head_dim = model_dim 768, for mudd"
    assert outcome(*three_heads, "--heads_per_matrix", "1", small=False) == (2, [], [message])


def test_other_shapes_that_do_not_fit_are_one_line(outcome, monkeypatch):
    monkeypatch.setattr(train_gpt, "attend", lambda q, *_: q.view(3, -1))
    code, out, [line] = outcome()
    assert (code, out) == (2, [])
    assert line.startswith("check.py: rows of layers and groups, or sizes, do not fit each other: ")


def test_processes_on_a_cpu_need_a_preset_and_a_batch(outcome, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    message = "check.py: NPROC=2: 1 sequences a step, no GPUs: another number, or --preset nano --batch_tokens 2048"
    assert outcome(small=False)[2][0] == message
    assert "say --preset nano" in outcome("--batch_tokens=2048", small=False)[2][0]


def test_several_problems_are_reported_at_once(machine, outcome, monkeypatch, tmp_path):
    machine(check.Gpu("Tesla T4", (7, 5), 10**9))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(check.sysconfig, "get_path", lambda *_: str(tmp_path))
    write_shard(tmp_path / "gpt2.bin", np.arange(300_000) % 50257)
    _, _, errors = outcome(*GPT2, f"--val_files={tmp_path}/none", f"--train_files={tmp_path}/gpt2.bin", small=False)
    problems = [line for line in errors if line.startswith("check.py: ")]
    parts = [
        "C compiler",
        "Python.h",
        "Tesla T4 (compute capability 7.5) is too old: gpt2 needs a GPU",
        "--train_seq_len",
        "--val_seq_len",
        "no shards",
    ]
    assert [part in line for line, part in zip(problems, parts, strict=True)] == [True] * 6


@pytest.mark.parametrize(
    ("gpus", "expected", "notes"),
    [
        ([H100] * 8, "8", "8 x NVIDIA H100 80GB HBM3 (compute capability 9.0): bfloat16, head and MLPs in FP8"),
        ([H100] * 3, "2", "head and MLPs in FP8"),
        ([check.Gpu("A100", (8, 0), 80 * 10**9)], "1", "bfloat16, nothing in FP8"),
        ([FULL_4090], None, "19.1 are free: free some, or train otherwise, with --train_seq_len 8192"),
        ([H100, H100._replace(free=10**9)], None, "with a smaller model"),
        ([H100, H100._replace(capability=(7, 5))], None, "A100, RTX 30); leave it out with CUDA_VISIBLE_DEVICES"),
        ([H100._replace(capability=(7, 5))], None, "(A100, RTX 30); nano trains on the CPU: --preset nano"),
    ],
)
def test_machines_with_gpus(machine, outcome, tmp_path, monkeypatch, gpus, expected, notes):
    machine(*gpus)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(check.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    code, out, errors = outcome(*GPT2, small=False)
    assert (code, out) == ((0, [expected]) if expected else (2, []))
    assert notes in "\n".join(errors)
    if gpus == [FULL_4090]:  # what is named helps
        assert outcome(*GPT2, "--train_seq_len", "8192", small=False)[0] == 0


def test_processes_and_blocks_have_to_suit_the_gpus(machine, outcome, monkeypatch):
    """Two processes on a GPU wait for each other forever; FlexAttention's kernels have tiles of up to 128 tokens."""
    machine(H100, H100)
    monkeypatch.setenv("NPROC", "4")
    sizes = "--block_size=64", "--dc_keys=64", "--model_dim=760", "--lm_head_slice=1000"
    errors = "\n".join(outcome(*GPT2, *sizes, "--no-compile", small=False)[2])
    assert "--block_size 64: expected a multiple of 128 on a GPU" in errors
    assert "--model_dim 760: expected a multiple of 16, for FP8" in errors
    assert "--lm_head_slice 1000: expected a multiple of 16, for FP8" in errors
    assert "for FP8" not in "\n".join(outcome(*GPT2, *sizes, "--no-mlp_fp8", "--no-lm_head_fp8", small=False)[2])
    assert "NPROC=4: 8 sequences a step, 2 GPUs: another" in errors


@pytest.mark.parametrize(
    ("gpus", "about"),
    [([H100] * 8, "91 seconds"), ([H100], "12 minutes"), ([RTX_4090], "52 minutes"), ([], "715 hours")],
)
def test_estimates_are_those_of_the_machine(capsys, gpus, about):
    report = check.Report(is_full=True)
    check.check_memory_and_time(BF16, gpus, max(1, len(gpus)), report)
    *_, time = capsys.readouterr().out.splitlines()
    where = f"{len(gpus)} x {gpus[0].name}" if gpus else "2 CPU cores"
    assert time == f"time: about {about} of training on {where} (estimated)"
    assert bool(report.problems) == (gpus in ([], [RTX_4090]))


def test_estimates_on_a_cpu_count_attention_and_narrow_layers(capsys):
    """A run of the former took 1.8 GiB; a layer takes some 5 ms, however narrow it is."""
    (stage,) = train_gpt.PRESETS["nano"].stages
    long = dict(train_seq_len=8192, batch_tokens=8192, stages=(stage._replace(window=8192),))
    deep = dict(model_dim=16, num_heads=1, head_dim=16, layers=[Layer("long")] * 64, num_iterations=40)
    for changes in long, deep:
        cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype="bfloat16", **changes)
        check.check_memory_and_time(cfg, [], 1, check.Report(is_full=True))
    told = capsys.readouterr().out
    assert float(re.search(r"8192 takes ([\d.]+) GiB", told)[1]) == pytest.approx(1.8, rel=0.1)
    assert "time: about 14 seconds" in told


@pytest.mark.parametrize(("dtype", "about"), [("bfloat16", 5), ("float32", 8)])
def test_estimate_of_nano_is_that_of_its_precision(capsys, dtype, about):
    """Measured on 2 quiet cores: 4.8 s in bf16 (n = 1), 7.5 to 11.3 in float32 (n = 8)."""
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype=dtype)
    check.check_memory_and_time(cfg, [], 1, check.Report(is_full=True))
    assert f"time: about {about} seconds of training on 2 CPU cores" in capsys.readouterr().out


MEMORY = {"with all else": 0.1, "validation with all else": 0.01}


def test_estimated_memory_is_that_of_the_lowered_graphs(capsys):
    """Training to 10%: an idea may give an optimizer a moment more or less than the graphs of the page had."""
    page = (ROOT / "gpu_proof" / "README.md").read_text().replace(",", "")
    rows = [re.search(rf"^\| {name} \|((?: \d+ \|){{4}})$", page, re.M)[1] for name in MEMORY]  # MiB
    for processes, *mib in zip((8, 4, 2, 1), *(re.findall(r"\d+", row) for row in rows), strict=True):
        check.check_memory_and_time(BF16, [H100] * processes, processes, check.Report(is_full=True))
        told = re.findall(r"takes ([\d.]+) GiB", capsys.readouterr().out)
        for gib, expected, within in zip(told, mib, MEMORY.values(), strict=True):
            assert float(gib) == pytest.approx((int(expected) + check.SPARE_MIB) / 1024, rel=within)


A5000 = b"NVIDIA RTX A5000, %s\n"


@pytest.mark.parametrize(
    ("prints", "cuda", "part", "wheel"),
    [
        (A5000 % b"470.57.02", None, "update it to 580", []),
        (b"Tesla V100-SXM2-16GB, 470.57.02\n", "13.0", "V100-SXM2-16GB is too old: gpt2 needs a GPU of compute", []),
        (A5000 % b"535.183.01", "13.0", "pip install", ["cu126"]),
        (A5000 % b"525.60.13", None, "pip install", ["cu126"]),
        (A5000 % b"580.65.06", "13.0", "restart the machine", []),
        (A5000 % b"580.65.06", None, "pip install", ["cu130"]),
        (A5000 % b"535.1", "12.6", "restart the machine", []),
        (A5000 % b"[N/A]", "13.0", "nvidia-smi fails: NVIDIA RTX A5000, [N/A]", []),
        (b"NVIDIA-SMI has failed\nbecause", "13.0", "nvidia-smi fails: NVIDIA-SMI has failed; nano", []),
        (b"\x1b[31mGPU\xff, 535.1\n", "13.0", "cannot use the ?[31mGPU\ufffd with driver 535.1", ["cu126"]),
    ],
)
def test_gpu_that_torch_cannot_use_is_a_problem(machine, outcome, prints, cuda, part, wheel):
    """Whatever the preset: never a silent run on the CPU, unless it is asked for."""
    machine(prints=prints, code=9 if b"failed" in prints else 0, cuda=cuda)
    for small in (True, False):
        code, out, [line] = outcome("--device", "auto", small=small)
        assert (code, out, part in line, re.findall(r"whl/(\w+) torch==", line)) == (2, [], True, wheel)
        assert line.endswith("; nano trains on the CPU: --preset nano --device cpu")
    assert b"failed" not in prints or outcome()[0] == 0  # --device cpu


def test_machine_whose_gpus_are_hidden_or_none_trains_on_the_cpu(machine, outcome, monkeypatch):
    machine(prints=b"No devices were found\n", code=6)
    note = f"note: hardware: {os.cpu_count()} CPU cores, nvidia-smi finds no GPU"
    assert outcome("--device", "auto") == (0, ["1"], [note])
    machine(prints=A5000 % b"580.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert outcome("--device", "auto")[0] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7 may name none" in outcome("--device", "auto")[2][0]


def test_gpu_or_nvidia_smi_that_does_not_work_is_named(machine, outcome, monkeypatch):
    machine(H100, H100, prints=b"")
    monkeypatch.setattr(check, "try_gpu", lambda index: H100 if index == 0 else torch.zeros(2).reshape(3))
    assert "GPU 1 does not work: shape '[3]' is invalid" in outcome("--device", "auto")[2][-1]
    Path(shutil.which("nvidia-smi")).write_text("#!/bin/sh\nexec sleep 60\n")  # it is not waited for
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, timeout, **options: run(*a, timeout=timeout / 100, **options))
    assert "timed out" in check.why_no_gpu()[0]


def test_presets_data_are_fetched_when_they_are_missing(corpus, tmp_path, monkeypatch, capfd):
    """With the packer replaced by one that copies a small corpus into place; --check does not run it."""
    monkeypatch.chdir(tmp_path)
    packer = tmp_path / "data" / "pack_nano.py"
    (tmp_path / "data" / "nano").mkdir(parents=True)
    copy = f"shutil.copy(f'{corpus}/{{role}}_000000.bin', f'data/nano/nano_{{role}}_0.bin')"
    packer.write_text(f"import shutil\nprint('packing')\nfor role in ('train', 'val'):\n    {copy}")
    assert (check.main([*SMALL, "--check"]), f"run.sh gets them: {needs.PYTHON} data" in capfd.readouterr().out) == (
        0,
        True,
    )
    assert not [*tmp_path.glob("data/nano/*")]
    assert check.main(SMALL) == 0
    assert capfd.readouterr() == ("1\n", f"getting the data: {needs.PYTHON} data/pack_nano.py\npacking\n")
    (tmp_path / "data/nano/nano_train_0.bin").write_text("damaged")
    for program, message in (("raise SystemExit(1)", "the data could not be fetched"), ("", "7 bytes are too few")):
        packer.write_text(program)
        assert (check.main(SMALL), message in capfd.readouterr().err) == (2, True)


def test_as_much_of_fineweb_is_fetched_as_the_run_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpt2 = train_gpt.PRESETS["gpt2"]
    stages = tuple(stage._replace(batch=1) for stage in gpt2.stages)
    even = dataclasses.replace(gpt2, extension_steps=0, stages=stages)  # 508 steps train on 2/3 of a shard
    record = gpt2, gpt2.num_iterations, RECORD_SHARDS
    for cfg, steps, shards in ((even, 1, 1), (even, 508, 1), (even, 509, 2), record, (even, 52388, 103)):
        found = check.check_data(dataclasses.replace(cfg, num_iterations=steps), check.Report(False))
        assert [*found] == [f"data/cached_fineweb10B.py {shards}"]
    with pytest.raises(check.UserError, match="needs 104 shards of FineWeb's 103"):
        check.check_data(dataclasses.replace(even, num_iterations=52389), check.Report(False))
    (tmp_path / "data" / "fineweb10B").mkdir(parents=True)
    write_shard(tmp_path / "data/fineweb10B/fineweb_val_000000.bin", np.arange(300_000) % 50257)
    write_shard(tmp_path / "train.bin", np.arange(300_000) % 50257)
    few = dataclasses.replace(even, num_iterations=1, batch_tokens=1024, train_seq_len=1024, train_files="train.bin")
    check.check_data(few, report := check.Report(False))  # there is one shard of validation and no more
    assert "for 1 batches, the run needs 40; lower --val_tokens" in report.problems[0]


def program(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    env = os.environ | dict(PYTHON=sys.executable) | env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


SCRIPTS = [path.relative_to(ROOT) for folder in (".", "data") for path in ROOT.glob(f"{folder}/*.py")]
SCRIPTS = [path for path in SCRIPTS if path.name not in ("train_gpt.py", "needs.py", "shards.py")]
COMMANDS = [*SCRIPTS, "benchmarks/anchor_cpu.py", "-m benchmarks", "-m gpu_proof roofline"]


@pytest.mark.parametrize("command", [*map(str, COMMANDS)])
def test_a_python_without_the_packages_is_told_what_to_type(command):
    """With -S this one has none. `python -m records` imports what it needs when it needs it, and says the same."""
    done = program(sys.executable, "-S", *command.split(), "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    name = "python -m " + command.split()[1] if command.startswith("-m") else Path(command).name
    fix = r"\S+ -m pip install -r ./requirements.txt.*|\.venv/bin/python .*--help"  # the latter: where run.sh has been
    assert re.fullmatch(rf"{name}: No module named '\w+'; ({fix})\n", done.stderr)
    if command[0] != "-":  # a Python that is too old gets as far
        ast.parse((ROOT / command).read_text(), feature_version=(3, 8))


def test_what_to_type_is_for_this_shell_and_this_python(tmp_path, monkeypatch, capfd):
    """pip, if it would install for this Python; or run.sh; or the environment that run.sh has made."""
    monkeypatch.chdir(tmp_path)
    changes = dict(argv=["sample.py"], orig_argv=["python3", "sample.py", "a b.pt"], prefix=sys.base_prefix)
    for name, value in changes.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    monkeypatch.setattr(check.sysconfig, "get_path", lambda _: str(tmp_path))

    def told() -> str:
        with pytest.raises(SystemExit, match="2"), needs.packages("requirements.txt", "x/y.txt"):
            raise ModuleNotFoundError("no torch")
        return capfd.readouterr().err.strip()

    assert told() == f"sample.py: no torch; {needs.PYTHON} -m pip install -r ./requirements.txt -r x/y.txt"
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert told() == "sample.py: no torch; ./run.sh --check && .venv/bin/python sample.py 'a b.pt'"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    assert told() == "sample.py: no torch; .venv/bin/python sample.py 'a b.pt'"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert told().endswith("-m pip install -r ./requirements.txt -r x/y.txt")
    monkeypatch.setattr(sys, "version_info", (3, 10))
    assert "is older than 3.11; ./run.sh --check && .venv/bin/python sample.py" in told()
    monkeypatch.setattr(sys, "platform", "win32")
    assert told() == "sample.py: Windows is not supported: start this in WSL"


def test_a_mac_is_named(outcome, monkeypatch, capfd):
    monkeypatch.setattr(sys, "platform", "darwin")
    for cpu, code in dict(arm64=0, x86_64=2).items():
        monkeypatch.setattr(needs.platform, "machine", lambda cpu=cpu: cpu)
        assert needs.main(["--preset=nano"]) == code
    told = "\nPyTorch has no builds for Macs with Intel processors since 2.3\n"
    assert capfd.readouterr() == (told, 2 * "note: GPUs of Macs are not supported\n")
    assert "CPU cores, GPUs of Macs are not supported" in outcome()[2][0]


def test_missing_library_and_old_python_are_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13:\\n cannot open')")
    done = program(sys.executable, "check.py", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("check.py: libcudart.so.13: cannot open; ")


@pytest.mark.slow
def test_run_sh(corpus, tmp_path):
    flags = [*SMALL, f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin", f"--log_dir={tmp_path}"]
    done = program("./run.sh", *flags, "--foo", "3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    (tmp_path / "run").symlink_to(ROOT / "run.sh")
    (tmp_path / "shards.py").write_text("not ours")
    done = program(tmp_path / "run", *flags, cwd=tmp_path, NPROC="2", PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
    assert (done.returncode, "val_loss" in done.stdout) == (0, True)
    assert program("./run.sh", SCRIPT="none.py").stderr == f"run.sh: SCRIPT=none.py: there is no such file in {ROOT}\n"
    script = tmp_path / "own.py"
    script.write_text("import sys, os; print(sys.argv[1:], os.environ['MALLOC_TRIM_THRESHOLD_'])")
    done = program("./run.sh", "--own", "3", "--preset", "nano", SCRIPT=str(script))
    assert done.stdout.splitlines()[-1] == "['--own', '3', '--preset', 'nano'] 2147483647"
    script.write_text("import os; print('workers', os.environ['TORCHINDUCTOR_COMPILE_THREADS'])")
    (tmp_path / "cores").mkdir()
    for cores, workers in (1, 1), (7, 4), (208, 32):
        (tmp_path / "cores" / "nproc").write_text(f"#!/bin/sh\necho {cores}\n")
        (tmp_path / "cores" / "nproc").chmod(0o755)
        path = f"{tmp_path}/cores:{os.environ['PATH']}"
        done = program("./run.sh", "--preset", "nano", SCRIPT=str(script), NPROC="2", PATH=path)
        assert done.stdout.count(f"workers {workers}\n") == 2


# ---- environment.sh, with stand-ins for Python and pip that only leave files behind ----------------------------------
# The probes are told by their words; what pip has installed, and what is missing of it, are files in .venv
PYTHON = r"""#!/bin/bash
folder=$(dirname "$(dirname "$0")")
echo "$*" | head -c 200 | tr '\n' ' ' >>"$LOG"; echo >>"$LOG"
case "$*" in
*needs.py*) exec "$REAL" "$@" ;;
*distributions*) [ ! -e "$folder/missing" ] ;;
*importlib.metadata*) [ -e "$folder/installed" ] ;;
"-m venv .venv")
    mkdir -p .venv/bin; touch .venv/pyvenv.cfg; cp "$0" .venv/bin/python
    [ "$FAULT" != venv ] || exec kill $PPID
    touch .venv/bin/activate ;;
*pip*install*)
    sleep "${PIP:-0}"; touch "$folder/installed"
    [ "$FAULT" != pip ] || { touch "$folder/missing"; kill $PPID; } ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Run a script that needs the environment, in a folder with spaces in its name: exit code, stdout and stderr."""
    folder = tmp_path / "a clone"
    (folder / "base" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "environment.sh", folder)
    text = (ROOT / "needs.py").read_text().replace("/proc/driver/nvidia/version", f"{tmp_path}/driver")
    (folder / "needs.py").write_text(text.replace("/dev/kfd", f"{tmp_path}/kfd"))
    (folder / "requirements.txt").write_text("torch==2.13.0\n")
    python = folder / "base" / "bin" / "python3.12"
    python.write_text(PYTHON)
    python.chmod(0o755)
    script = "set -euo pipefail; source ./environment.sh; flags=$FLAGS; find_python requirements.txt"
    script += "; echo $python $GOMP_SPINCOUNT"

    def run(**env: str) -> tuple[int, str, str]:
        env = dict(LOG=str(tmp_path / "log"), FAULT="", FLAGS="", GOMP_SPINCOUNT="", REAL=sys.executable) | env
        env = dict(PYTHON=str(python)) | env
        done = program("bash", "-c", script, "run.sh", cwd=folder, **env)
        return done.returncode, done.stdout, done.stderr

    run.folder, run.log = folder, tmp_path / "log"
    return run


READY = ".venv/bin/python 10000\n"
FAULTS = {
    "venv": "",  # killed while that runs
    "pip": "",
    "its Python is gone": "mkdir -p .venv/bin .venv/lib; touch .venv/pyvenv.cfg; ln -s /nowhere .venv/bin/python",
    "a link to nowhere": "ln -s /nowhere .venv",
    "killed while it was removed": "mkdir .venv; touch .venv/unfinished",
    "empty": "mkdir .venv",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_was_interrupted_is_rebuilt(start, fault):
    subprocess.run(["sh", "-c", FAULTS[fault]], cwd=start.folder, check=True)
    venv = start.folder / ".venv"
    if not FAULTS[fault]:
        assert start(FAULT=fault)[0] != 0
        assert (venv / "unfinished").exists()
    code, out, errors = start()
    assert (code, out, "making the environment" in errors) == (0, READY, True), errors
    assert start() == (0, READY, "")
    assert not {"lib", "unfinished"} & {path.name for path in venv.iterdir()}


def test_an_environment_that_works_is_kept(start):
    """It lacks a package, or it was only marked; neither what it holds nor anything in its place is removed."""
    assert start(PYTHON="/nowhere") == (2, "", "run.sh: PYTHON=/nowhere is not Python 3.11 or newer\n")
    assert start()[0] == 0
    venv, own = start.folder / ".venv", start.folder / ".venv" / "lib" / "own"
    own.mkdir(parents=True)
    for change in (venv / "installed").unlink, (venv / "unfinished").touch:
        change()
        assert (*start(), own.exists()) == (0, READY, "", True)
    shutil.rmtree(venv / "bin")
    (venv / "pyvenv.cfg").unlink()
    message = "run.sh: .venv is in the way and no Python environment: move it away\n"
    assert (*start(), own.exists()) == (2, "", message, True)


def test_two_at_once_make_one_environment(start, machine):
    machine(prints=A5000 % b"535.1")
    with ThreadPoolExecutor() as pool:
        assert [run[:2] for run in pool.map(lambda _: start(PIP="0.3"), range(3))] == [(0, READY)] * 3
    log = start.log.read_text()
    assert (log.count("-m venv"), log.count("install")) == (1, 2), "torch, then the files"


WHY = " is too old: gpt2 needs a GPU of compute capability 8.0 or newer (A100, RTX 30)"
MACHINES = {  # what nvidia-smi prints, or the kernel's file says: the wheels of torch, and what is wrong
    b"NVIDIA RTX 2000 Ada, 525.60\n": ("cu126", ""),
    b"NVIDIA GeForce GT 710, 535.1\nNVIDIA GeForce RTX 4090, 535.1\n": ("cu126", ""),
    b"NVIDIA GeForce MX570, 535.1\n": ("cu126", ""),
    A5000 % b"580.65": ("", ""),
    b"": ("", ""),
    A5000 % b"470.57.02": ("cpu", "driver 470.57.02 is too old: update it to 580 or newer"),
    b"Tesla T4, 580.65.06\n": ("cpu", f"Tesla T4{WHY}"),
    b"Quadro RTX 6000, 580.1\nTITAN V, 580.1\nNVIDIA GeForce GTX 1660, 580.1\nNVIDIA GeForce MX450, 580.1\n"
    b"NVIDIA GeForce RTX 2080 Ti, 580.1\nGeForce GT 1030, 580.1\n": ("cpu", f"GeForce GT 1030{WHY}"),
    b"Tesla V100-SXM2-16GB, 470.57.02\n": ("cpu", f"Tesla V100-SXM2-16GB{WHY}"),
    b"NVIDIA-SMI has failed\nbecause": ("", "nvidia-smi fails: NVIDIA-SMI has failed"),
    b"NVRM version: Kernel Module for x86_64  525.60  Release Build\nGCC version: 12.2.0 x\n": ("cu126", ""),
    b"NVRM version: Kernel Module for x86_64  580.65  Release Build\n": ("", ""),
    b"neither": ("cpu", ""),
}


@pytest.mark.parametrize("told", MACHINES)
def test_torch_suits_the_machine_and_what_cannot_train_is_named_before(start, machine, tmp_path, told):
    """Before anything is installed; nano is, if the flags ask for it."""
    wheels, trouble = MACHINES[told]
    if told.startswith(b"NVRM"):
        (tmp_path / "driver").write_bytes(told)
    elif told != b"neither":
        machine(prints=told)
    if trouble:
        assert start() == (2, "", f"run.sh: {trouble}; nano trains on the CPU: --preset nano --device cpu\n")
        assert "install" not in start.log.read_text()
    assert start(FLAGS="--seed 3 --preset nano")[:2] == (0, READY)
    assert re.findall(r"/whl/(\w+)", start.log.read_text()) == [wheels] * bool(wheels)


def test_windows_and_an_amd_gpu_are_named_at_once(start, tmp_path, machine):
    (tmp_path / "kfd").touch()
    assert "note: AMD GPUs are not supported\n" in start()[2]
    (uname := tmp_path / "bin" / "uname").write_text("#!/bin/sh\necho MINGW64_NT-10.0")
    uname.chmod(0o755)
    assert start() == (2, "", "run.sh: Windows is not supported: start this in WSL\n")
