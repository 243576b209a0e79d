"""The benchmarks: figures, report, the CPU starting point, the file of a first GPU run."""

import dataclasses
import itertools
import json
import math
import os
import re
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
from speedrun import bench, measure, plain_gpt
from conftest import TINY_FLAGS, pytest_configure
from speedrun.logs import Log
from speedrun.process import ENVIRONMENT, ROOT, own_process
from test_attention import dense_mask
from train_gpt import Ranks, Trainer

FIGURES = {"step: data", "step: forward", "step: backward", "step: optimizers", "peak memory"}
WHOLE, MATMUL = "step: whole, stage 1 (windows of 256 and 128 tokens)", "large matmul in float32"


def test_report_is_complete_but_for_a_failed_stage(tiny, script_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "profile", lambda *_: 1 / 0)
    assert command.main(["--quick", *TINY_FLAGS, *script_flags, f"--out={tmp_path}/out"]) == 1
    told, found = capsys.readouterr().out, json.loads((tmp_path / "out/benchmark.json").read_text())
    exported = re.findall(r"export (\w+)=\$\{\w+:-([\w:]+)\}", (ROOT / "environment.sh").read_text())
    assert ENVIRONMENT.items() <= dict(exported).items()
    assert "| profile | FAILED: ZeroDivisionError: division by zero |" in told
    assert found["figures"].pop("profile")
    assert found["figures"].keys() >= FIGURES
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf, name
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    attained = median["attained per rank"]
    assert median["throughput"] == pytest.approx(1000 * tiny.batch_tokens / median[WHOLE])
    assert attained == pytest.approx(median["model FLOPs per step and rank"] / median[WHOLE])
    assert median["utilization, relative to the large matmul"] == pytest.approx(100 * attained / median[MATMUL])


def test_instrumented_step_is_the_same_step_and_spans_leave_out_those_inside(tiny64, monkeypatch):
    trainer, other = Trainer(tiny64, Ranks()), Trainer(tiny64, Ranks())
    tokens = torch.randint(tiny64.vocab_size, (65,))
    sequences, start, readings = [(tokens[:-1].int(), tokens[1:])] * 2, train_gpt.start_collective, itertools.count()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(readings) / 1000)  # each reading takes 1 ms
    n = 1 + 2 * len(trainer.optimizers)  # collectives: the loss, and the gradients and values of each group
    for step in range(3):
        found = measure.take_step(trainer, iter([sequences]), step, parts=True).ms()
        other.train_step(step, sequences)
        assert found == pytest.approx(dict(data=1, forward=2, backward=6, optimizers=n, communication=n))
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert (train_gpt.start_collective, trainer.model) == (start, trainer.gpt)


def test_flops_are_those_that_torch_counts(tiny64, monkeypatch):
    layers = [train_gpt.Layer(kind) for kind in ("long", "short", "none", "paired")]
    trainer = Trainer(dataclasses.replace(tiny64, layers=layers), Ranks())
    tokens = torch.randint(tiny64.eot_token, (65,))
    sequences = [(tokens[:-1].int(), tokens[1:])] * 2
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda *args: None)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(4, sequences)
    one_document = torch.zeros(64, dtype=torch.int32)
    masks, long = trainer.gpt.attention_masks(one_document, trainer.windows), trainer.windows[0]

    def multiplied(tokens, window, eot_token, rows=1):  # the plain path takes every block that could be in the window
        return masks["paired" if rows == 2 else "long" if window == long else "short"].bias.numel()

    monkeypatch.setattr(measure, "attended_pairs", multiplied)
    # A new parameter of a few numbers is counted as if it were multiplied
    assert measure.step_flops(trainer, sequences, 4) == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.parametrize(("window", "rate", "rows"), [(0, 0.06, 1), (21, 0.06, 1), (32, 0.0, 1), (15, 0.1, 2)])
def test_attended_pairs_are_those_of_the_dense_mask(window, rate, rows):
    tokens = torch.where(torch.rand(64) < rate, 256, 1)
    ids = (tokens == 256).cumsum(0).repeat_interleave(rows)
    assert measure.attended_pairs(tokens, window, 256, rows) == dense_mask(ids, window).sum()


def test_anchor_learns_causally_and_validates_every_position_once():
    tokens, seen = np.random.default_rng(0).integers(257, size=300 * 64 + 5), []
    loss = anchor_cpu.validate(lambda x, y: seen.append((x, y)) or y.double().mean(), tokens, 300 * 64)
    pair = [torch.cat(part).flatten().numpy() for part in zip(*seen, strict=True)]
    assert np.array_equal(pair, [tokens[: 300 * 64], tokens[1 : 300 * 64 + 1]])
    assert loss == pytest.approx(pair[1].mean())
    model, losses, *_ = anchor_cpu.train(np.tile(np.arange(50), 40), 9, 1)
    assert losses[0] == pytest.approx(math.log(anchor_cpu.VOCAB_SIZE), abs=0.2)
    assert losses[-1] < losses[0] - 0.05
    x = torch.randn(1, 64, anchor_cpu.WIDTH, requires_grad=True)
    model.blocks(x)[0, 40].sum().backward()
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == [True] * 41 + [False] * 23


def test_anchor_writes_a_log_that_can_be_raced_on_any_text(corpus, tmp_path, monkeypatch, capsys):
    argv = f"anchor --data {corpus}/ --val_tokens 128 --steps 3 --val_every 1 --log_dir {tmp_path} --run_id r".split()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(anchor_cpu, "THREADS", 1)
    anchor_cpu.main()
    log, told = Log(tmp_path / "r.txt"), json.loads(capsys.readouterr().out)
    assert log.source == Path(anchor_cpu.__file__).read_text().rstrip("\n")
    assert log.curve == {step: pytest.approx((loss, ms), abs=1) for step, loss, ms in told["val_curve"]}
    assert (log.incomplete, log.val_loss) == (None, pytest.approx(told["val_loss"], abs=1e-4))
    assert log.train_time == pytest.approx(told["train_time_ms"], abs=1)
    monkeypatch.setattr(sys, "argv", [*argv, "--val_tokens=1"])
    with pytest.raises(SystemExit, match="2"):
        anchor_cpu.main()


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.exit.Exception, match="no GPU that torch can use") as stopped:  # ./test.sh -m gpu
        pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr="gpu")))
    assert stopped.value.returncode == 2


@pytest.mark.slow
def test_a_first_gpu_run_on_a_cpu_packs_what_its_stages_show(tmp_path):
    env = os.environ | dict(OUT=f"{tmp_path}/out", PYTHON=sys.executable)
    command = [ROOT / "benchmarks" / "first_gpu_run.sh", *TINY_FLAGS, "--num_iterations=4", "--dtype=float16"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    outcomes = dict(line.split(": ") for line in (tmp_path / "out/stages.txt").read_text().splitlines())
    assert [name for name, outcome in outcomes.items() if outcome == "ok"] == ["versions", "self-test"]
    assert [outcomes[name] for name in ("check", "run", "benchmarks")] == ["FAILED, exit code 2"] * 3
    done = subprocess.run(command[:-1], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        texts = {name: archive.extractfile(name).read().decode() for name in archive.getnames() if "." in name}
    assert json.loads(texts["out/short.json"])["num_iterations"] == 4
    assert "| step: forward |" in texts["out/benchmarks/benchmark.md"]
    assert not [name for name, text in texts.items() if str(ROOT) in text]


@pytest.mark.slow
def test_two_processes_have_figures_of_communication(tmp_path):
    flags = ["--quick", *TINY_FLAGS, "--train_seq_len=512", "--batch_tokens=1024", f"--out={tmp_path}/out"]
    own_process(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "benchmarks", *flags])
    both = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert (both["processes"], ENVIRONMENT.items() <= both["environment"].items()) == (2, True)
    assert "step: communication" in both["figures"]
