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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from conftest import TINY_FLAGS, pytest_configure
from speedrun import bench, plain_gpt
from speedrun.logs import Log
from speedrun.process import ROOT
from train_gpt import Plan, Ranks, Trainer


def test_figures_are_of_the_steps_that_train(tiny, script_flags, tmp_path, capsys):
    assert bench.main(["--quick", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "out/benchmark.json").read_text())
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf, name
        assert f"| {name} | {bench.shown(figure['median'])} {figure['unit']} |" in told
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    rate, peak = median["stage 1: throughput"], median["large matmul in float32"] * 1e12
    assert rate == pytest.approx(train_gpt.num_tokens(1, tiny) / median["stage 1: step"] * 1000)
    assert median["stage 1: utilization"] == pytest.approx(
        100 * bench.weight_flops(Trainer(tiny, Ranks()), 0) * rate / peak
    )
    assert "Self CPU" in (tmp_path / "out/profile.txt").read_text()


@pytest.mark.slow
def test_measured_steps_are_steps_of_training(gpt2, corpus):
    """Timed and profiled steps of a stage leave the same parameters; groups step as rarely as at its first step."""
    cfg = dataclasses.replace(gpt2, train_files=f"{corpus}/long.bin")
    trainer, other = Trainer(cfg, Ranks()), Trainer(cfg, Ranks())
    first = bench.first_steps(cfg)[2]
    now = Plan(first, cfg)
    batches = train_gpt.plan_batches(cfg.train_files, [(now.seq_len, now.stage.max_doc_len)] * 4, 1, cfg)
    with contextlib.closing(bench.read_steps(trainer, batches, first)) as steps:
        bench.step_ms(trainer, steps, 2)
        bench.profile(trainer, steps)
    with contextlib.closing(bench.read_steps(other, batches, first)) as steps:
        taken = list(itertools.islice(steps, 12))
    ends = [later is not reads for (*_, reads), (*_, later) in itertools.pairwise(taken)]
    assert ends == [now.is_due(train_gpt.row_of("ngrams", cfg)) for now, *_ in taken[:-1]]
    for step in taken:
        other.train_step(*step)
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert torch.equal(trainer.table.rows, other.table.rows)
    assert trainer.table.rows.any()


class Products(TorchDispatchMode):
    """Count the FLOPs of products of two matrices; attention's are others."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.flops += 2 * args[0].numel() * args[1].size(1)
        return func(*args, **(kwargs or {}))


def test_flops_are_those_of_the_products(gpt2, monkeypatch):
    trainer = Trainer(gpt2, Ranks())
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda *args: None)
    for now in Plan(0, gpt2), Plan(gpt2.num_iterations - 1, gpt2):
        with Products() as products:
            trainer.train_step(now, *trainer.dummies(now, now.seq_len))
        # A new parameter of a few numbers is counted as if it were multiplied
        assert now.seq_len * bench.weight_flops(trainer, now.step) == pytest.approx(products.flops, rel=0.005)


def test_plain_gpt_learns_causally_and_validates_every_position_once():
    tokens, seen = np.random.default_rng(0).integers(257, size=300 * 64 + 5), []
    loss = plain_gpt.validate(lambda x, y: seen.append((x, y)) or y.double().mean(), tokens, 300 * 64)
    pair = [torch.cat(part).flatten().numpy() for part in zip(*seen, strict=True)]
    assert np.array_equal(pair, [tokens[: 300 * 64], tokens[1 : 300 * 64 + 1]])
    assert loss == pytest.approx(pair[1].mean())
    model, losses, *_ = plain_gpt.train(np.tile(np.arange(50), 40), 9, 1)
    assert losses[0] == pytest.approx(math.log(plain_gpt.VOCAB_SIZE), abs=0.2)
    assert losses[-1] < losses[0] - 0.05
    x = torch.randn(1, 64, plain_gpt.WIDTH, requires_grad=True)
    model.blocks(x)[0, 40].sum().backward()
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == [True] * 41 + [False] * 23


def test_plain_gpt_writes_a_log_that_can_be_raced_on_any_text(corpus, tmp_path, monkeypatch, capsys):
    argv = f"plain --data {corpus}/ --steps 3 --val_every 1 --log_dir {tmp_path} --run_id r".split()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(plain_gpt, "THREADS", 1)
    plain_gpt.main()
    log, told = Log(tmp_path / "r.txt"), json.loads(capsys.readouterr().out)
    assert log.source == Path(plain_gpt.__file__).read_text().rstrip("\n")
    assert log.curve == {step: pytest.approx((loss, ms), abs=1) for step, loss, ms in told["val_curve"]}
    assert (log.incomplete, log.val_loss) == (None, pytest.approx(told["val_loss"], abs=1e-4))
    assert log.train_time == pytest.approx(told["train_time_ms"], abs=1)


@pytest.mark.parametrize("flags", ["--one_of 3", "--one_of 0", "--one_of 8 --stages 9"])
def test_a_share_that_there_is_not_is_refused(flags: str, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main([*flags.split(), "--preset=mini", "--device=cpu", "--batch_tokens=8192", f"--out={tmp_path}"])
    assert "expected " in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.exit.Exception, match="no GPU that torch can use") as stopped:  # ./test.sh -m gpu
        pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr="gpu")))
    assert stopped.value.returncode == 2


@pytest.mark.slow
def test_a_first_gpu_run_on_a_cpu_packs_what_its_parts_show(tmp_path):
    """Steps as one rank of eight among them, with the rows that it would exchange. Only the card is missing."""
    env = os.environ | dict(OUT=f"{tmp_path}/out", PYTHON=sys.executable, OMP_NUM_THREADS="1")
    flags = "--preset mini --device cpu --batch_tokens 512 --train_seq_len 64 --block_size 16 --stages 1".split()
    done = subprocess.run([ROOT / "docs/first_gpu_run.sh", *flags], env=env, capture_output=True, text=True)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.endswith(".txt")]
        texts = {name: archive.extractfile(name).read().decode() for name in names}
    failed = [line for line in texts["out/parts.txt"].splitlines() if ": ok, " not in line]
    assert [line.partition(":")[0] for line in failed] == ["card"], done.stdout
    assert "| with_tables |" in texts["out/one-of-8.txt"]
    assert not [name for name, text in texts.items() if str(ROOT) in text]
