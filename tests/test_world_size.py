"""The same training on any number of processes: run for real, compared with what one process does."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from conftest import train
from data.shards import write_shard
from dense import assert_trained_alike
from world_worker import Run

# No size divides 7 sequences of validation; 4 divides no number of matrices of a shape in nano, nor 3 the rows of gpt2
SLOW = [pytest.param(preset, size, marks=pytest.mark.slow) for preset, size in (("nano", 4), ("gpt2", 2))]
SIZES = [("gpt2", 3), *SLOW]
MORE = "--dtype float64 --seed 0 --num_iterations 6 --val_loss_every 3 --model_dim 25 --batch_tokens 768 "
MORE += "--val_tokens 672 --momentum_warmup_steps 3"


@pytest.fixture
def flags(flags) -> list[str]:
    """Return flags for two shards with tails that are dropped."""
    return [*flags, *MORE.split()]


@pytest.mark.parametrize(("preset", "size"), SIZES)
def test_run_is_that_of_one_process(flags, gpt2_flags, tmp_path, preset, size):
    if preset == "gpt2":
        flags = [*gpt2_flags, "--seed=5", "--dtype=float64", f"--batch_tokens={16 * size}", "--val_tokens=672"]
        flags += ["--ngram_rows=64", "--val_loss_every=10"]
    flags = [*flags, "--save_checkpoint", "--run_id"]
    run = Run([[*flags, "several"]] * size, tmp_path / "several")
    expected = train([*flags, "one"])
    assert run.wait(timeout=200) == [0] * size, "".join(run.text("err", rank) for rank in range(size))
    assert all(run.text(name, rank) == "" for name in ("out", "err") for rank in range(1, size)), "rank 0 alone speaks"
    logs = tmp_path / "logs"
    got = json.loads((logs / "several.json").read_text())
    for curve in "val_curve", "train_curve":
        steps, losses, _ = zip(*expected[curve], strict=True)
        assert losses[-1] < losses[0] - 0.1
        assert tuple(point[0] for point in got[curve]) == steps
        np.testing.assert_allclose([point[1] for point in got[curve]], losses, rtol=1e-9)
    alone, model = (torch.load(logs / f"{name}.pt")["model"] for name in ("one", "several"))
    head = alone["lm_head.weight"]
    assert not torch.equal(head, alone["embed.weight"][: len(head)]), "they part in gpt2"
    for name, p in alone.items():
        assert p.dtype == (torch.int8 if name == "signs" else torch.float64)
    parts = [torch.load(logs / f"several.ngrams{rank}") for rank in range(size)]
    rows = torch.load(logs / "one.ngrams0")  # that were ever read
    assert len(rows["ids"]) > 20
    model |= {name: torch.cat([part[name] for part in parts]) for name in rows}
    assert_trained_alike(model, alone | rows, limit=1e-8)


def test_nodes_that_differ_or_fail_are_named_on_every_node(flags, tmp_path):
    for seed in (0, 9):  # of equal size
        write_shard(tmp_path / f"{seed}.bin", np.random.default_rng(seed).integers(256, size=6 * 768 + 1))
    changed = tmp_path / "train_gpt.py"
    changed.write_text(Path(train_gpt.__file__).read_text() + "# changed\n")
    cases = {
        "script": ([], []),
        "num_iterations": ([], ["--num_iterations", "5"]),
        "training tokens": [["--train_files", f"{tmp_path}/{seed}.bin"] for seed in (0, 9)],
        "validation tokens": ([], ["--val_files", f"{tmp_path}/9.bin"]),
        "missing.bin": (["--val_files", "missing.bin"], []),
    }
    runs = {}
    for name, changes in cases.items():
        ranks = [[*flags, f"--run_id={name}{i}", *more] for i, more in enumerate(changes)]
        scripts = [train_gpt.__file__, changed] if name == "script" else ()
        runs[name] = Run(ranks, tmp_path / name, nodes=True, scripts=scripts)
    for name, run in runs.items():
        assert run.wait() == [2, 2], name
        for rank in range(2):
            assert re.search(rf"(?<!\w){name}\b", run.text("err", rank)), run.text("err", rank)
            assert run.text("err", rank).count("\n") == 1
            assert "step:" not in run.text("out", rank)
