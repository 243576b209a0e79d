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

import check
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


SIZES = "model_dim num_heads head_dim lm_head_slice lm_head_softcap"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--batch_tokens 1024000000000000", "--batch_tokens 1024000000000000: expected a number"),
        ("--device cuda", "there is no NVIDIA GPU; nano trains on the CPU: --preset nano --device cpu"),
        ("--num_iterations 37", "tokens for 36 batches, the run needs 37; lower --num_iterations"),
        ("--val_tokens 2496", "tokens for 25 batches, the run needs 26; lower --val_tokens"),
        ("--val_files none_*.bin", "get it: python data/pack_text.py"),
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
        *((f"--{name} 0", ": expected more than 0") for name in SIZES.split()),
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
    parts = ["C compiler", "Python.h", "float32", "--train_seq_len", "--val_seq_len", "no shards"]
    assert [part in line for line, part in zip(problems, parts, strict=True)] == [True] * 6


@pytest.mark.parametrize(
    ("gpus", "expected", "notes"),
    [
        ([H100] * 8, "8", "8 x NVIDIA H100 80GB HBM3 (compute capability 9.0): bfloat16, head and MLPs in FP8"),
        ([H100] * 3, "2", "head and MLPs in FP8"),
        ([check.Gpu("A100", (8, 0), 80 * 10**9)], "1", "bfloat16, nothing in FP8"),
        ([FULL_4090], None, "19.1 are free: free some, or train otherwise, with --train_seq_len 8192"),
        ([H100, H100._replace(free=10**9)], None, "with a smaller model"),
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
    [([H100] * 8, "91 seconds"), ([H100], "12 minutes"), ([RTX_4090], "52 minutes"), ([], "709 hours")],
)
def test_estimates_are_those_of_the_machine(capsys, gpus, about):
    report = check.Report(is_full=True)
    check.check_memory_and_time(BF16, gpus, max(1, len(gpus)), report)
    *_, time = capsys.readouterr().out.splitlines()
    where = f"{len(gpus)} x {gpus[0].name}" if gpus else "2 CPU cores"
    assert time == f"time: about {about} of training on {where} (estimated)"
    assert bool(report.problems) == (gpus in ([], [RTX_4090]))


def test_estimates_on_a_cpu_count_attention_and_narrow_layers(capsys):
    """A run of the former took 1.8 GiB; a layer takes some 10 ms, however narrow it is."""
    (stage,) = train_gpt.PRESETS["nano"].stages
    long = dict(train_seq_len=8192, batch_tokens=8192, stages=(stage._replace(window=8192),))
    deep = dict(model_dim=16, num_heads=1, head_dim=16, layers=[Layer("long")] * 64, num_iterations=40)
    for changes in long, deep:
        cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype="bfloat16", **changes)
        check.check_memory_and_time(cfg, [], 1, check.Report(is_full=True))
    told = capsys.readouterr().out
    assert float(re.search(r"8192 takes ([\d.]+) GiB", told)[1]) == pytest.approx(1.8, rel=0.1)
    assert "time: about 26 seconds" in told


def test_estimated_memory_is_that_of_the_lowered_graphs(capsys):
    """To 10%: an idea may give an optimizer a moment more or less than the graphs of the page had."""
    page = (ROOT / "gpu_proof" / "README.md").read_text()
    table = re.search(r"^\| with all else \|((?: [\d,]+ \|){4})$", page, re.M)[1]  # MiB
    for processes, mib in zip((8, 4, 2, 1), re.findall(r"[\d,]+", table), strict=True):
        check.check_memory_and_time(BF16, [H100] * processes, processes, check.Report(is_full=True))
        told = re.search(r"takes ([\d.]+) GiB", capsys.readouterr().out)[1]
        assert float(told) == pytest.approx((int(mib.replace(",", "")) + check.SPARE_MIB) / 1024, rel=0.1)


A5000 = b"NVIDIA RTX A5000, %s\n"


@pytest.mark.parametrize(
    ("prints", "cuda", "part", "wheel"),
    [
        (A5000 % b"470.57.02", "13.0", "update the driver to 580", []),
        (A5000 % b"470.57.02", None, "update the driver to 580", []),
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
    assert (check.main([*SMALL, "--check"]), "run.sh gets them: python data" in capfd.readouterr().out) == (0, True)
    assert not [*tmp_path.glob("data/nano/*")]
    assert check.main(SMALL) == 0
    assert capfd.readouterr() == ("1\n", "getting the data: python data/pack_nano.py\npacking\n")
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


def test_missing_package_and_old_python_are_one_line(tmp_path):
    ast.parse((ROOT / "check.py").read_text(), feature_version=(3, 8))
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13:\\n cannot open')")
    done = program(sys.executable, "check.py", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("check.py: libcudart.so.13: cannot open; packages: ")


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


# ---- environment.sh, with stand-ins for Python and pip that only leave files behind ----------------------------------
# The probes are told by their words; what pip has installed, and what is missing of it, are files in .venv
PYTHON = r"""#!/bin/bash
folder=$(dirname "$(dirname "$0")")
echo "$*" | head -c 200 | tr '\n' ' ' >>"$LOG"; echo >>"$LOG"
case "$*" in
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
    text = (ROOT / "environment.sh").read_text()
    (folder / "environment.sh").write_text(text.replace("/proc/driver/nvidia/version", f"'{tmp_path}/driver'"))
    (folder / "requirements.txt").write_text("torch==2.13.0\n")
    python = folder / "base" / "bin" / "python3.12"
    python.write_text(PYTHON)
    python.chmod(0o755)
    script = "set -euo pipefail; source ./environment.sh; find_python requirements.txt; echo $python $GOMP_SPINCOUNT"

    def run(**env: str) -> tuple[int, str, str]:
        env = dict(PYTHON=str(python), LOG=str(tmp_path / "log"), FAULT="", GOMP_SPINCOUNT="") | env
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
    machine(prints=b"535.1")
    with ThreadPoolExecutor() as pool:
        assert [run[:2] for run in pool.map(lambda _: start(PIP="0.3"), range(3))] == [(0, READY)] * 3
    log = start.log.read_text()
    assert (log.count("-m venv"), log.count("install")) == (1, 2), "torch, then the files"


DRIVERS = {b"525.60": ["cu126"], b"580.65": [], b"470.1": [], b"": []}


@pytest.mark.parametrize("has_smi", [True, False])
@pytest.mark.parametrize("driver", DRIVERS)
def test_torch_suits_the_driver(start, machine, tmp_path, driver, has_smi):
    """Its version is what nvidia-smi prints, or else the kernel's file says."""
    line = b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build\nGCC version: 12.2.0 x\n"
    machine(prints=driver if has_smi else None)
    (tmp_path / "driver").write_bytes(line % driver)
    assert start()[0] == 0
    assert re.findall(r"/whl/(\w+)", start.log.read_text()) == DRIVERS[driver]
    if not has_smi:
        (tmp_path / "driver").unlink()
        shutil.rmtree(start.folder / ".venv")
        assert start()[0] == 0
        assert "/whl/cpu" in start.log.read_text()
