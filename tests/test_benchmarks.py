"""The benchmarks: figures, report, the CPU starting point, the file of a first GPU run."""

import dataclasses
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
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from conftest import TINY_FLAGS, pytest_configure
from speedrun import bench, plain_gpt
from speedrun.logs import Log
from speedrun.process import ROOT
from train_gpt import Ranks, Trainer


def test_figures_are_of_the_steps_that_train(tiny, script_flags, tmp_path, capsys):
    assert bench.main(["--quick", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "out/benchmark.json").read_text())
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf, name
        assert f"| {name} | {bench.shown(figure['median'])} {figure['unit']} |" in told
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    rate, peak = median["stage 1: throughput"], median["large matmul in float32"] * 1e12
    assert rate == pytest.approx(tiny.batch_tokens / median["stage 1: step"] * 1000)
    assert median["stage 1: utilization"] == pytest.approx(
        100 * bench.weight_flops(Trainer(tiny, Ranks())) * rate / peak
    )
    assert "Self CPU" in (tmp_path / "out/profile.txt").read_text()


def test_measured_steps_are_steps_of_training(tiny64):
    """Timed and profiled steps, of a pair where Adam takes every other one, leave the same parameters."""
    cfg = dataclasses.replace(tiny64, adam_every=2)
    trainer, other = Trainer(cfg, Ranks()), Trainer(cfg, Ranks())
    tokens = torch.randint(cfg.vocab_size, (65,))
    sequences = [(tokens[:-1].int(), tokens[1:])] * 2
    bench.step_ms(trainer, iter([sequences] * 4), 0, 2)
    bench.profile(trainer, iter([sequences] * 2), 4)
    for step in (0, 1, 0, 1, 4, 5):
        other.train_step(step, sequences)
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))


def test_flops_are_those_of_the_products_that_torch_counts(tiny64, monkeypatch):
    trainer = Trainer(dataclasses.replace(tiny64, layers=[train_gpt.Layer("long"), train_gpt.Layer("none")]), Ranks())
    tokens = torch.randint(tiny64.eot_token, (65,))
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda *args: None)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(4, [(tokens[:-1].int(), tokens[1:])])
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]  # attention's are others
    # A new parameter of a few numbers is counted as if it were multiplied
    assert 64 * bench.weight_flops(trainer) == pytest.approx(products, rel=0.005)


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


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.exit.Exception, match="no GPU that torch can use") as stopped:  # ./test.sh -m gpu
        pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr="gpu")))
    assert stopped.value.returncode == 2


@pytest.mark.slow
def test_a_first_gpu_run_on_a_cpu_packs_what_its_stages_show(tmp_path):
    env = os.environ | dict(OUT=f"{tmp_path}/out", PYTHON=sys.executable)
    command = [ROOT / "docs" / "first_gpu_run.sh", *TINY_FLAGS, "--num_iterations=4"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        texts = {name: archive.extractfile(name).read().decode() for name in archive.getnames() if "." in name}
    assert json.loads(texts["out/short.json"])["num_iterations"] == 4
    assert "| stage 1: step |" in texts["out/bench/benchmark.md"]
    assert not [name for name, text in texts.items() if str(ROOT) in text]
