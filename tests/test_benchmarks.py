"""The benchmarks: figures, report, the CPU starting point, the file of a first GPU run."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import ROOT, bench, plain_gpt
from train_gpt import Ranks, Trainer


@pytest.mark.parametrize("share", [[], ["--one_of=2", "--synthetic"]], ids=["alone", "as one of two"])
def test_figures_are_of_the_steps_that_train(share: list[str], tiny, script_flags, tmp_path, capsys):
    assert bench.main(["--quick", *share, *TINY_FLAGS, *script_flags, f"--out={tmp_path}"]) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "benchmark.json").read_text())
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf, name
        assert f"| {name} | {bench.shown(figure['median'])} {figure['unit']} |" in told
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    rate = train_gpt.num_tokens(1, tiny) / median["stage 1: step"] * 1000
    assert median["stage 1: throughput"] == pytest.approx(rate)
    assert "Self CPU" in (tmp_path / "profile.txt").read_text()


@pytest.mark.slow
def test_measured_steps_are_steps_of_training(gpt2, corpus):
    """Timed and profiled steps of a stage leave the same parameters; groups step as rarely as at its first step."""
    cfg = dataclasses.replace(gpt2, train_files=f"{corpus}/long.bin")
    trainer, other = bench.Measured(cfg, Ranks()), Trainer(cfg, Ranks())
    plan = cfg.plans[first := train_gpt.stage_ends(cfg)[1]]
    batches = train_gpt.plan_batches(cfg.train_files, [(plan.seq_len, plan.max_doc_len)] * 4, 1, cfg)
    with contextlib.closing(bench.read_steps(trainer, batches, first)) as steps:
        bench.time_steps(trainer, steps, 2)
        told, _ = bench.profile(trainer, steps)
    with contextlib.closing(bench.read_steps(other, batches, first)) as steps:
        taken = [next(steps) for _ in range(3 * cfg.all_step)]
    ends = [later is not requests for (*_, requests), (*_, later) in itertools.pairwise(taken)]
    assert ends == [(step + 1) % 2 == 0 for step in range(len(ends))]
    for step in taken:
        other.train_step(*step)
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert torch.equal(trainer.table.rows, other.table.rows)
    assert "optimizers" in told


def test_stages_are_measured_in_the_order_given(monkeypatch, tmp_path, capsys):
    measured = []
    monkeypatch.setattr(bench, "measure_stage", lambda trainer, first, n: measured.append(first) or ({}, ("", {})))
    flags = [*GPT2_FLAGS, "--num_iterations=40", "--synthetic", f"--out={tmp_path}"]
    assert bench.main([*flags, "--stages=2,1"]) == bench.main(flags) == 0
    assert measured[:2] == [measured[3], 0]
    assert measured[2:] == sorted(measured[2:])


def test_a_profile_has_the_parts_of_the_prediction():
    parts = {"rows index": "n-grams: rows and their steps", "rows index_add_": "n-grams: sums"}
    parts |= {"communication index": "communication", "optimizers copy_": "optimizers, averages"}
    parts |= {"_scaled_mm 8x4x2": "products in FP8", "mm 8x4x2": "products in bf16", "add_": "outside of graphs"}
    assert [bench.by_part({name: dict(ms=2.0)}) for name in parts] == [{part: 2.0} for part in parts.values()]


def test_plain_gpt_learns(corpus, monkeypatch, capsys):
    tokens = np.random.default_rng(0).integers(257, size=300 * 64 + 5)
    mean = plain_gpt.validate(lambda read: torch.from_numpy(read[:, :-1] + 2 * read[:, 1:]).double().mean(), tokens, 64)
    assert mean == pytest.approx(np.mean(tokens[:-5] + 2 * tokens[1:-4])), "each position once"
    monkeypatch.setattr(sys, "argv", f"plain --data {corpus}/ --steps 9 --val_every 3 --threads 1".split())
    plain_gpt.main()
    steps, losses, ms = zip(*json.loads(capsys.readouterr().out)["val_curve"], strict=True)
    assert (steps, sorted(ms)) == ((0, 3, 6, 9), [*ms])
    assert losses[-1] < math.log(257) - 0.05


def first_gpu_run(out: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    env = os.environ | dict(OUT=str(out), PYTHON=sys.executable, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    script = ROOT / "runs/first_gpu_run.sh"
    return subprocess.run([script, *flags], env=env | variables, capture_output=True, text=True)


def test_a_first_gpu_run_hides_names(tmp_path):
    """Where no part has time."""
    (uname := tmp_path / "uname").write_text('#!/bin/sh\n[ "$1" = -n ] && echo box.7 || exec /bin/uname "$@"\n')
    uname.chmod(0o755)
    home, out = f"{tmp_path}/home", tmp_path / "out"
    out.mkdir()
    (out / "some.txt").write_text(f"bye in {home}/logs at box.7: boxy7")
    variables = dict(MINUTES="0", HOME=home, PATH=f"{tmp_path}:{os.environ['PATH']}")
    first_gpu_run(out, "--device", "cpu", **variables)
    assert (out / "some.txt").read_text() == "bye in ~/logs at HOST: boxy7"
    parts = (out / "parts.txt").read_text().splitlines()
    assert {"card: skipped, the time is over", "mini: skipped, the time is over"} <= set(parts), parts
    assert not [line for line in parts if line.endswith(" s")], "a part ran"


@pytest.mark.slow
def test_a_first_gpu_run_on_a_cpu_packs_what_its_parts_show(tmp_path):
    """Steps as one rank of eight among them, with the rows that it would exchange. Only the card is missing."""
    flags = "--preset mini --device cpu --batch_tokens 512 --train_seq_len 64 --block_size 16".split()
    done = first_gpu_run(tmp_path / "out", *flags)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.endswith((".txt", ".md"))]
        texts = {name: archive.extractfile(name).read() for name in names}
    failed = [line for line in texts["out/parts.txt"].splitlines() if b": ok, " not in line]
    assert [line.partition(b":")[0] for line in failed] == [b"card"], done.stdout
    assert b"| stage 1: step with tables |" in texts["out/one-of-8/benchmark.md"]
    assert all(b"\nval_loss " in texts[f"out/{name}.txt"] for name in ("whole", "whole-without-fp8", "nano", "mini"))
    assert b'{"val_curve": [[' in texts["out/plain.txt"]
    assert not [name for name, text in texts.items() if bytes(ROOT) in text]
