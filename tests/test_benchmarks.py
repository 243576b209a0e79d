"""The figures of the benchmarks, their report, the race against the CPU starting point, that model, and scaling."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from benchmarks import ENVIRONMENT, ROOT, anchor_cpu, command, measure, race_anchor, roofline, scaling
from conftest import TINY_FLAGS
from records import race
from test_attention import build, dense_mask
from train_gpt import GPT, Ranks, Trainer

FLAGS = ["--quick", *TINY_FLAGS]
FIGURES = {"step: data", "step: forward", "step: backward", "step: optimizers", "loader, warm files, per rank"}
WHOLE, MATMUL = "step: whole, stage 1 (windows of 96 and 48 tokens)", "large matmul in float32"


@pytest.mark.slow
def test_report_of_two_processes(tmp_path):
    """test_first_gpu_run has one."""
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2 -m benchmarks".split()
    done = subprocess.run([*torchrun, *FLAGS, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "benchmark.json").read_text())
    assert (found["processes"], ENVIRONMENT.items() <= found["environment"].items()) == (2, True)
    stacks = {"Newton-Schulz of 8 x 32 x 32", "Newton-Schulz of 4 x 32 x 128", "step: communication"}
    assert FIGURES | stacks <= found["figures"].keys()


def test_report_is_complete_but_for_a_failed_stage(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where there is no data
    monkeypatch.setattr(command, "own_process", lambda *_, **__: '{"total": 1.0}')
    monkeypatch.setattr(measure, "newton_schulz", lambda *_: 1 / 0)
    assert command.main([*FLAGS, "--out=out"]) == 1
    told, found = capsys.readouterr().out, json.loads((tmp_path / "out/benchmark.json").read_text())
    assert found["data"].startswith("SYNTHETIC")
    exported = re.findall(r"export (\w+)=\$\{\w+:-([\w:]+)\}", (ROOT / "environment.sh").read_text())
    assert ENVIRONMENT.items() <= dict(exported).items()
    assert "| Newton-Schulz | FAILED: ZeroDivisionError: division by zero |" in told
    assert found["figures"].pop("Newton-Schulz")
    assert FIGURES | {"start: total"} <= found["figures"].keys()
    for name, figure in found["figures"].items():
        assert 0 < figure["p10"] <= figure["median"] <= figure["p90"] < math.inf, name
        assert f"| {name} | {command.shown(figure['median'])} {figure['unit']}".strip() in told
    median = {name: figure["median"] for name, figure in found["figures"].items()}
    attained = median["attained per rank"]
    assert median["throughput"] == pytest.approx(1000 * tiny.batch_tokens / median[WHOLE])
    assert attained == pytest.approx(median["model FLOPs per step and rank"] / median[WHOLE])
    assert median["utilization, relative to the large matmul"] == pytest.approx(100 * attained / median[MATMUL])


def test_instrumented_step_is_the_same_step_and_spans_leave_out_those_inside(tiny64, monkeypatch):
    trainer, other = Trainer(tiny64, Ranks()), Trainer(tiny64, Ranks())
    tokens = torch.randint(tiny64.vocab_size, (65,))
    sequences, launch, readings = [(tokens[:-1].int(), tokens[1:])] * 2, train_gpt.launch, itertools.count()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(readings) / 1000)  # each reading takes 1 ms
    n = 1 + 2 * len(trainer.optimizers)  # collectives: the loss, and the gradients and values of each group
    for step in range(3):
        found = measure.take_step(trainer, iter([sequences]), step, parts=True).ms()
        other.train_step(step, sequences)
        assert found == pytest.approx(dict(data=1, forward=2, backward=6, optimizers=n, communication=n))
    assert all(torch.equal(p, q) for p, q in zip(trainer.gpt.parameters(), other.gpt.parameters(), strict=True))
    assert (train_gpt.launch, trainer.model) == (launch, trainer.gpt)


@pytest.mark.parametrize("layout", ["LSSL", "L-PL"])
def test_flops_equal_those_that_torch_counts(layout, tiny64, monkeypatch):
    trainer = Trainer(dataclasses.replace(tiny64, attention_layout=layout), Ranks())
    tokens = torch.randint(tiny64.eot_token, (65,))
    sequences = [(tokens[:-1].int(), tokens[1:])] * 2
    monkeypatch.setattr(train_gpt, "step_optimizers", lambda *args: None)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(4, sequences)
    # The plain path multiplies every block that could be in the window
    monkeypatch.setattr(measure, "attended_pairs", lambda mask: mask.bias.numel())
    assert measure.step_flops(trainer, sequences, 4) == counter.get_total_flops()


@pytest.mark.parametrize(("window", "rate"), [(0, 0.06), (7, 0.3), (8, 0.02), (21, 0.06), (32, 0.0)])
def test_attended_pairs_are_those_of_the_dense_mask(window, rate, tiny64):
    tokens = torch.where(torch.rand(64) < rate, tiny64.eot_token, 1).int()
    ids = (tokens == tiny64.eot_token).cumsum(0)
    windows = dict(L=window, S=window // 2)
    masks = GPT(tiny64).attention_masks(tokens, torch.tensor([*windows.values()], dtype=torch.int32))
    for letter, back in windows.items():
        flex, dense = build(ids, back, 8), dense_mask(ids, back)
        assert measure.attended_pairs(masks[letter]) == measure.attended_pairs(flex) == dense.sum()


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


@pytest.mark.parametrize(("losses", "code"), [((1.4, 1.5), 0), ((1.4, 1.7), 1)])  # the latter lower by chance
def test_race_with_the_anchor_says_by_its_exit_code_whether_the_ratio_counts(losses, code, monkeypatch, tmp_path):
    def run_trainer(script: Path, flags: list[str], seed: int, run_id: str, folder: Path) -> dict:
        assert (script.name, flags) == ("train_gpt.py", ["--preset", "nano", "--num_iterations", "3"])
        return dict(val_loss=losses[seed], train_time=8.0)

    anchor = [f"first line\n{json.dumps(dict(val_loss=loss, train_time_ms=80.0))}" for loss in (1.6, 1.7)]
    monkeypatch.setattr(race, "run_script", run_trainer)
    monkeypatch.setattr(race_anchor, "own_process", lambda command: anchor[int(command[2])])
    assert race_anchor.main(["--pairs=2", "--seed=0", f"--out={tmp_path}", "--", "--num_iterations", "3"]) == code
    (found,) = json.loads((tmp_path / "race.json").read_text())["comparisons"]
    assert found["train_time"]["ratio"] == found["train_time"]["high"] == 0.1


def test_fit_recovers_planted_exponents_and_their_errors():
    values, random = [2.0**i for i in range(4, 10)], np.random.default_rng(0).normal
    assert scaling.fit({x: 3 * x**1.7 for x in values} | {1: 0}) == pytest.approx(dict(exponent=1.7, error=0, factor=3))
    assert scaling.fit({1: 8, 2: 4}) == dict(exponent=pytest.approx(-1), error=None, factor=pytest.approx(8))
    fits = [scaling.fit({x: x**0.5 * np.exp(random(scale=0.1)) for x in values}) for _ in range(400)]
    errors = [f["error"] for f in fits]
    assert np.std([f["exponent"] for f in fits]) == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.1)


def test_a_point_runs(monkeypatch):
    found = scaling.summarize([scaling.point(TINY_FLAGS)] * 2)
    assert (list(found), found["step"]["n"]) == (["step", "attention", "mask", "memory", "clock"], 12)
    assert found["attention"]["median"] > 0
    monkeypatch.setattr(scaling, "own_process", lambda command: f"a warning\n[{len(command)}]")
    assert scaling.measure_point("processes", 2, ["--seed=2"])[0] - scaling.measure_point("width", 64, [])[0] == 4


def test_prediction_is_the_roofline_where_that_has_one():
    stage = dict(phase="train 49152", tokens=49152, windows=(1664, 768), steps=40)
    keys = [(stage["phase"], g) for g in ("", "forward 49152", "backward 49152")]
    keys += [(f"optimizers {stage['phase']}", g) for g in ("", "Newton-Schulz")]
    calls = [dict(world=w, phase=p, graph=g, kind="kernel", count=1, flops=0) for w in (8, 1) for p, g in keys]
    calls = [call | dict(bytes=10**8 * (i + 2) ** 2) for i, call in enumerate(calls)]
    sizes = sum(map(sum, scaling.traffic(scaling.GPT2, 8).values()))
    found = dict(calls=calls, configuration=dataclasses.asdict(scaling.GPT2), memory={"8": dict(communication=sizes)})
    found["stages"] = [stage]
    parts, _ = roofline.predict(found, roofline.GPUS["h100"])
    one, eight, nodes = (scaling.predict(found, *cluster) for cluster in ((1, 1), (1, 8), (8, 1)))
    for world, figures in (1, one), (8, eight):
        assert figures["step"]["median"] == pytest.approx(parts[f"STEP of stage 1, processes: {world}"]["ms"])
    assert nodes["communication"]["median"] == pytest.approx(7 / 8 * sizes / 50e6)
