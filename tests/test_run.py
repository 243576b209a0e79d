"""run.py, run.sh and environment.sh: on invented machines, with data of a few tokens, and environments of one file."""

import ensurepip
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
from speedrun import ROOT, process, run

SMALL = [*TINY_FLAGS, *"--num_iterations 4 --val_seq_len 96 --val_tokens 288 --block_size 16".split()]
H100, RTX_4090 = ((9, 0), 79e9), ((8, 9), 24.5e9)  # compute capability, and bytes that are free


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Invent what torch sees, and what nvidia-smi, a program on the PATH, prints."""
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC", "SCRIPT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)

    def invent(*gpus: tuple, nvidia_smi: str = "echo No devices were found; exit 6") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpus[0][0])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (gpus[i][1], 0))
        (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (tmp_path / "bin" / "nvidia-smi").chmod(0o755)

    invent()
    return invent


@pytest.fixture
def outcome(corpus, capfd):
    """Check a small run of nano: the exit code and the lines of stderr."""

    def check(*flags: str) -> tuple[int, list[str]]:
        files = f"--train_files={corpus}/train_*.bin", f"--val_files={corpus}/val_*.bin"
        code = run.main(["train_gpt.py", "--check", *SMALL, *files, *flags])
        return code, capfd.readouterr().err.splitlines()

    return check


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--foo 3", "unrecognized arguments: --foo 3; see --help"),
        ("--preset", "--preset: expected one argument"),
        ("--device cuda", "there is no NVIDIA GPU; --preset nano trains on a CPU"),
        ("--preset gpt2 --device auto", "there is no NVIDIA GPU; --preset nano trains on a CPU"),
        ("--num_iterations 999", "the run needs 999; documents begin with --eot_token 256"),
        ("--val_files none_*.bin", f"none_*.bin in {os.getcwd()}: tokens for 0 batches, the run needs 3"),
        ("--train_files {tmp}/short.bin", "short.bin: not a whole shard of tokens; data/pack_text.py packs text"),
        ("NPROC=two", "NPROC=two: expected one of [1, 2], as a step has 2 sequences"),
        ("NPROC=3", "NPROC=3: expected one of [1, 2]"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(outcome, corpus, tmp_path, monkeypatch, flags, message):
    (tmp_path / "short.bin").write_bytes((corpus / "val_000000.bin").read_bytes()[:-1])
    if flags.startswith("NPROC"):
        monkeypatch.setenv(*flags.split("="))
        flags = ""
    code, [line] = outcome(*flags.format(tmp=tmp_path).split())
    assert (code, line.startswith("run.sh: "), message in line) == (2, True, True), line


@pytest.mark.parametrize(
    ("nvidia_smi", "told"),
    [("echo 'GPU 0: RTX A5000'", "(GPU 0: RTX A5000)"), ("echo NVML: mismatch; exit 18", "(NVML: mismatch)")],
)
def test_a_gpu_that_torch_cannot_use_is_never_a_silent_run_on_the_cpu(
    machine, outcome, monkeypatch, nvidia_smi, told
):
    machine(nvidia_smi=nvidia_smi)
    assert run.main(["train_gpt.py", "--check", "--num_iterations=2"]) == 2
    code, [*_, line] = outcome("--device=auto")
    assert (code, told in line, "update the driver to 580" in line) == (2, True, True)
    assert outcome() == (0, [])  # --device cpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert outcome("--device=auto") == (0, [])


@pytest.mark.parametrize(
    ("gpus", "processes", "fitting"),
    [
        ([H100] * 8, 8, ""),
        ([H100] * 7, 4, ""),
        ([H100], 1, "--ngram_rows=21150720"),
        ([RTX_4090] * 2, 2, "--no-cuda_graphs --ngram_rows=5287680"),
        ([((8, 0), 8e9)], 0, "free some, or halve --train_seq_len"),
        ([((7, 5), 8e10)], 0, "compute capability 8.0 or newer"),
    ],
)
def test_processes_and_rows_of_ngrams_fit(machine, monkeypatch, capfd, gpus, processes, fitting):
    machine(*gpus)
    monkeypatch.setattr(train_gpt, "plan_data", lambda cfg: None)
    monkeypatch.setattr(run, "get", lambda command: False)  # no mask
    code = run.main(["train_gpt.py", "--check"])
    out, told = capfd.readouterr()
    if not processes:
        assert (code, out, fitting in told) == (2, "", True)
        return
    assert (code, out) == (0, " ".join(f"ready to start {processes} process{'es' * (processes > 1)} {fitting}".split()) + "\n")
    if rows := re.search(r"--ngram_rows=(\d+)", fitting):  # twice as many do not fit
        assert "is what fits here, not the record's" in told
        assert run.main(["train_gpt.py", "--check", f"--ngram_rows={2 * int(rows[1])}"]) == 2


def test_layers_train_in_bf16_where_fp8_hangs(machine, monkeypatch, capfd):
    machine(((8, 9), 8e10))
    monkeypatch.setattr(train_gpt, "plan_data", lambda cfg: None)
    monkeypatch.setattr(run, "get", lambda command: True)
    for version, hangs in ("2.9.1", True), ("2.11.0", True), ("2.12.0+cu126", False):
        monkeypatch.setattr(torch, "__version__", version)
        assert run.main(["train_gpt.py", "--check"]) == 0
        assert ("--no-layers_fp8" in capfd.readouterr().out) == hangs


def test_a_presets_data_are_fetched_where_they_are_missing_or_damaged(corpus, tmp_path, monkeypatch, capfd):
    """With the packer replaced by one that copies a small corpus into place; for another script, too, as race does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "nano").mkdir(parents=True)
    packer, shard = tmp_path / "data" / "pack_nano.py", tmp_path / "data" / "nano" / "nano_train_0.bin"
    copy = f"shutil.copy(f'{corpus}/{{role}}_000000.bin', f'data/nano/nano_{{role}}_0.bin')"
    packer.write_text(f"import shutil\nfor role in ('train', 'val'):\n    {copy}")
    for damaged in (None, "damaged"):
        if damaged:
            shard.write_text(damaged)
        assert run.main(["train_gpt.py", "--check", *SMALL]) == 0
        assert capfd.readouterr().err == f"run.sh: getting data: {process.PYTHON} data/pack_nano.py\n"
    assert run.main(["train_gpt.py", "--check", *SMALL]) == 0
    assert capfd.readouterr().err == ""  # they are there
    shard.unlink()
    monkeypatch.setenv("SCRIPT", "another.py")
    packer.write_text("raise SystemExit(1)")
    assert (run.main(["--check", "--preset=nano", "--own_flag", "3"]), "see above" in capfd.readouterr().err) == (2, True)
    packer.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(20)")
    assert (run.main(["--check"]), capfd.readouterr().err.splitlines()[-1]) == (130, "run.sh: interrupted")
