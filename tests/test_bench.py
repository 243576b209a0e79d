"""bench: its figures add up, and what it cannot measure is refused. The plain GPT learns."""

import json
import math
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from conftest import GPT2_FLAGS, TINY_FLAGS
from speedrun import bench, plain_gpt


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


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path, capsys):
    for flags, message in {"--stages=9": "--stages 9: expected", "--one_of=3": "3 ranks: expected a divisor"}.items():
        assert bench.main([flags, *GPT2_FLAGS, "--num_iterations=40", "--synthetic", f"--out={tmp_path}"]) == 2
        assert message in capsys.readouterr().err


def test_plain_gpt_learns(corpus, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", Mock())  # two would wait for each other on a busy machine
    monkeypatch.setattr(sys, "argv", f"plain --data {corpus}/ --steps 9 --val_every 3".split())
    plain_gpt.main()
    steps, losses, ms = zip(*json.loads(capsys.readouterr().out)["val_curve"], strict=True)
    assert (steps, sorted(ms)) == ((0, 3, 6, 9), [*ms])
    assert losses[-1] < math.log(257) - 0.05
