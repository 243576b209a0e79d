"""bench: its figures are of the steps that train. The plain GPT learns."""

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


@pytest.mark.parametrize("share", [["--validation"], ["--one_of=2", "--synthetic"]], ids=["alone", "as one of two"])
def test_parts_of_a_step_add_up_to_it(share: list[str], script_flags, tmp_path, capsys):
    assert bench.main(["--cycles=3", *share, *TINY_FLAGS, *script_flags, f"--out={tmp_path}"]) == 0
    told, document = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    [figures] = document["stages"].values()
    assert all(min(values) > 0 and max(values) < math.inf for values in figures.values())
    assert ("validation, ms of all" in figures) == ("--validation" in share)
    np.testing.assert_allclose(np.sum([figures[part] for part in bench.PARTS], axis=0), figures["step"])
    assert f"| step | {np.median(figures['step']):,.2f} (" in told
    assert told.startswith((tmp_path / "bench.md").read_text().strip())


@pytest.mark.slow
def test_measured_steps_are_steps_of_training(gpt2, corpus):
    """They leave the same parameters as steps that nobody measures; groups step as rarely as in training."""
    cfg = dataclasses.replace(gpt2, train_files=f"{corpus}/long.bin")
    trainer, other = Trainer(cfg, Ranks()), Trainer(cfg, Ranks())
    [schedules] = bench.find_stages(cfg, [3]).values()
    bench.time_stage(trainer, bench.Stopwatch(trainer), schedules, cycles=1)
    taken = [*itertools.islice(bench.read_steps(other, schedules), 3 * cfg.common_interval)]
    ends = [later is not exchange for (*_, exchange), (*_, later) in itertools.pairwise(taken)]
    assert ends == [(step + 1) % 2 == 0 for step in range(len(ends))]
    for step in taken:
        other.train_step(*step)
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert torch.equal(trainer.table.rows, other.table.rows)


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path, capsys):
    for flags, message in {"--stages=9": "--stages 9: expected", "--one_of=3": "3 ranks: expected a divisor"}.items():
        assert bench.main([flags, *GPT2_FLAGS, "--num_iterations=40", "--synthetic", f"--out={tmp_path}"]) == 2
        assert message in capsys.readouterr().err
    cfg = train_gpt.resolve(train_gpt.parse_args([*GPT2_FLAGS, "--num_iterations=40"]))
    assert [*bench.find_stages(cfg, [2, 1])] == [2, 1]


def test_plain_gpt_learns(corpus, monkeypatch, capsys):
    tokens = np.random.default_rng(0).integers(257, size=300 * 64 + 5)
    mean = plain_gpt.validate(lambda read, targets: (read + 2 * targets).double().mean(), tokens)
    assert mean == pytest.approx(np.mean(tokens[:-5] + 2 * tokens[1:-4])), "each position once"
    monkeypatch.setattr(sys, "argv", f"plain --data {corpus}/ --steps 9 --val_every 3".split())
    plain_gpt.main()
    steps, losses, ms = zip(*json.loads(capsys.readouterr().out)["val_curve"], strict=True)
    assert (steps, sorted(ms)) == ((0, 3, 6, 9), [*ms])
    assert losses[-1] < math.log(257) - 0.05
