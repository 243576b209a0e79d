"""The benchmarks: figures, report, the CPU starting point, the file of a first GPU run."""

import contextlib
import dataclasses
import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch

import train_gpt
from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import bench, plain_gpt
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
