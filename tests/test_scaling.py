"""benchmarks/scaling.py: exponents, a point, traffic, and the sum of the roofline's parts."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from benchmarks import roofline, scaling
from conftest import TINY
from test_optimizers import LIKE_GPT2, Network
from train_gpt import GPT, Ranks


def test_fit_recovers_planted_exponents_and_their_errors():
    values, random = [2.0**i for i in range(4, 10)], np.random.default_rng(0).normal
    assert scaling.fit({x: 3 * x**1.7 for x in values} | {1: 0}) == pytest.approx(dict(exponent=1.7, error=0, factor=3))
    assert scaling.fit({1: 8, 2: 4}) == dict(exponent=pytest.approx(-1), error=None, factor=pytest.approx(8))
    fits = [scaling.fit({x: x**0.5 * np.exp(random(scale=0.1)) for x in values}) for _ in range(400)]
    errors = [f["error"] for f in fits]
    assert np.std([f["exponent"] for f in fits]) == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.1)


def test_a_point_runs_and_a_larger_window_takes_more(monkeypatch):
    flags = [f"--{name}={value}" for name, value in (TINY | dict(train_seq_len=1024, batch_tokens=1024)).items()]
    flags = ["--preset=nano", *(flag for flag in flags if "compile" not in flag)]
    small, large = (scaling.summarize([scaling.point([*flags, f"--window_tokens={n}"])] * 2) for n in (32, 1024))
    assert (list(small), small["step"]["n"]) == (["step", "attention", "mask", "memory", "clock"], 12)
    assert large["attention"]["median"] > 2 * small["attention"]["median"] > 0
    monkeypatch.setattr(scaling, "own_process", lambda command: f"a warning\n[{len(command)}]")
    assert scaling.measure_point("processes", 2, ["--seed=2"])[0] - scaling.measure_point("width", 64, [])[0] == 4


@pytest.mark.parametrize("size", [2, 3])
def test_traffic_is_that_of_the_collectives(monkeypatch, size):
    cfg = dataclasses.replace(train_gpt.resolve(LIKE_GPT2), dtype="bfloat16")  # Muon's updates are half its gradients
    network = Network(monkeypatch, Ranks(0, size), SimpleNamespace)
    with torch.device("meta"):
        gpt = GPT(cfg)
        optimizers = train_gpt.build_optimizers(gpt, network.ranks)
    for p in gpt.parameters():
        p.grad = torch.empty_like(p)
    train_gpt.step_optimizers(optimizers, 0)
    gradients, updates = map(sum, zip(*scaling.traffic(cfg, size).values(), strict=True))
    assert network.bytes == dict(reduce_scatter=gradients, all_gather=updates)


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
