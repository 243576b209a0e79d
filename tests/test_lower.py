"""Graphs lowered for a GPU that is not here: what is counted is right, and what would fail there is reported."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from speedrun import lower, pretend_gpu, roofline
from speedrun.process import ROOT, own_process

lowers = pytest.mark.skipif(bool(WHY_NOT := pretend_gpu.missing()), reason=f"lower {WHY_NOT}")
SCRIPT, GPT2, H100 = ROOT / "train_gpt.py", train_gpt.PRESETS["gpt2"], pretend_gpu.GPUS[90]
STAGES = [stage._replace(batch=1, mtp=((1, 1),), prefix=(0,), classes=(0,)) for stage in GPT2.stages]
SMALL: dict[str, Any] = dict(
    layers=[train_gpt.Layer("long", value_embed=True, net=True, ngram=True)], stages=STAGES, averages=()
)
SMALL |= dict(model_dim=128, num_heads=2, head_dim=64, mlp_dim=512, vocab_size=512, eot_token=511, batch_tokens=4096)
SMALL |= dict.fromkeys(("train_seq_len", "val_seq_len", "val_tokens", "lm_head_slice"), 512)
SMALL |= dict(prefix_file="", canon_file="", ngram_rows=64, tied_frac=0.0, smear_gate_inputs=0)
WORKER = "from speedrun import pretend_gpu; pretend_gpu.install(90); import test_lower; test_lower.worker()"


def test_a_step_is_the_sum_of_its_parts():
    """Of one sequence of a process, and of eight, of which two were lowered: the others cost as much as the second."""
    gpu, phase = roofline.H100._replace(host=0.0), "train 512 x 1 of all"
    launch = dict(
        world=8, phase=phase, count=2, kind="kernel", flops=0, bytes=gpu.bandwidth * gpu.memory / 1000
    )  # 1 ms
    calls = [
        launch | dict(graph="forward 512 x 1 of all", name="triton_poi_fused_relu_1"),
        launch | dict(graph="", name="mul_"),
        launch | dict(world=1, graph="", name="mul_", count=4),
        *(launch | dict(world=n, phase=f"rows {phase}", graph="", name="index") for n in (8, 1)),
        *(launch | dict(world=n, phase=f"optimizers {phase}", graph="optimizers", name="adam") for n in (8, 1)),
        *(launch | dict(world=n, phase="validation", graph="validation", name="mm") for n in (8, 1)),
    ]
    stage = dict(phase=phase, steps=10, tokens=512, windows=dict(long=256, short=128))
    found = dict(calls=calls, stages=[stage], attention=dict(kinds=["short"], widths=[[64, 128]], block=128), cycle=2)
    found |= dict(configuration=dict(batch_tokens=4096, train_seq_len=512, num_heads=2))
    found |= dict(communication={n: {phase: gpu.link / 1000} for n in ("8", "1")})
    ms = {world: step["ms"] for world, (step,) in roofline.predict(found, gpu).items()}
    pairs = 2 * 512 * (690 * (1 - math.exp(-128 / 690)) + 128)
    flops = pairs * ((2 * 64 + 2 * 128) / 0.311 + (6 * 64 + 4 * 128) / 0.238)
    parts = "attention", "MLP: relu squared, scales of rows", "outside of graphs"
    parts += "n-grams: rows, their sums and steps", "optimizers, averages", "communication"
    attention = 1000 * (flops / gpu.bfloat16 + 2 * gpu.tail)
    for world, numbers in {"8": (attention, 1, 1, 1, 1, 7 / 8), "1": (8 * attention, 8, 8, 1, 1, 0)}.items():
        named = {part: n * roofline.PARTS[part][1] for part, n in zip(parts, numbers, strict=True)}
        assert ms[world] == pytest.approx(dict.fromkeys(roofline.PARTS, 0.0) | named)
    slow = roofline.predict_step(found, gpu._replace(host=1.0), stage, 8)
    assert (slow["launches"], slow["sum"]) == (4, pytest.approx(4000))  # three launches, and a CUDA graph for the other
    for costs, expected in (
        (dict(flops=989e9, kind="bfloat16"), 0.735),
        (dict(flops=1979e9, kind="float8_e5m2"), 0.735),
    ):
        assert 1000 * roofline.seconds(launch | costs | dict(bytes=0), gpu) == pytest.approx(1 / expected)


def test_kernels_that_need_too_much_or_do_not_compile_are_reported():
    def kernel(name: str, **needs) -> dict:
        return dict(name=name, configurations=[dict(config="c") | needs])

    kernels = [
        kernel("fits", shared=H100.shared_limit, spills=H100.spills),
        kernel("large", shared=H100.shared_limit + 1, spills=0),
        kernel("spilled", shared=0, spills=H100.spills + 8),
        kernel("broken", error="CompilationError: why"),
    ]
    found = dict(failed="", graph_breaks={}, spill_limit=H100.spills, kernels=dict(one=kernels, other=kernels[-1:]))
    assert lower.failures(90, found) == [
        f"large (c) needs {H100.shared_limit + 1:,} bytes of shared memory",
        f"spilled spills at least {H100.spills + 8} bytes: more than any kernel before",
        "broken (c) does not compile: CompilationError: why",
    ]


def worker() -> None:
    """Compile and run some functions for a GPU that is not here, and print what the recorder saw."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder, empty = lower.Recorder(names="^$"), functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        cases = dict(
            chain=(lambda x, u, v, w: x @ u @ v @ w, *map(empty, (1024, 512, 1024, 512), (512, 1024, 512, 256))),
            gather=(F.embedding, empty(1024, dtype=torch.int64), empty(50000, 64)),
            softmax=(lambda x: x.softmax(-1), empty(512, 50304)),
            in_place=(lambda x, w: (x @ w).relu(), empty(4096, 512), empty(512, 512)),
        )
        for name, (function, *inputs) in cases.items():
            with recorder.during(name):
                torch.compile(function, fullgraph=True, dynamic=False)(*inputs)
    print(json.dumps(dict(calls=list(recorder.calls.values()), peaks=recorder.peaks)))


@lowers
@pytest.mark.slow
def test_bytes_and_memory_of_kernels_by_hand():
    told = own_process(["-c", WORKER], PYTHONPATH=f"{ROOT}:{ROOT / 'data'}:{ROOT / 'tests'}")
    seen = json.loads(told.splitlines()[-1])
    expected = dict(  # what is read, then what is written
        gather=1024 * 8 + 1024 * 64 * 2 + 1024 * 64 * 2,
        softmax=512 * 50304 * 2 + 512 * 50304 * 2,
        in_place=(4096 * 512 + 512 * 512 + 4096 * 512) * 2 + (4096 * 512 + 4096 * 512) * 2,
    )
    for name, n in expected.items():
        moved = sum(call["bytes"] * call["count"] for call in seen["calls"] if call["graph"] == name)
        assert moved == pytest.approx(n, rel=0.001), name
    # Of three products in a row, two results are needed at a time
    assert seen["peaks"]["chain"] - seen["peaks"][""] == (1024 * 1024 + 1024 * 512) * 2
    products = [call for call in seen["calls"] if call["graph"] == "chain"]
    assert {call["kind"] for call in products} == {"bfloat16"}
    assert sum(call["flops"] for call in products) == 2 * 1024 * (512 * 1024 + 1024 * 512 + 512 * 256)


@lowers
@pytest.mark.slow
def test_a_small_gpt2_lowers_for_an_h100_and_has_a_prediction(tmp_path: Path, monkeypatch, capsys):
    """By the command, but for its layers, which are no flag."""
    changed, found = functools.partial(lower.measure, **SMALL), {}
    monkeypatch.setattr(lower, "measure", lambda *args: found.setdefault(args[0], changed(*args)))
    assert lower.main(["--arch=90", f"--out={tmp_path / 'out.json'}"]) == 0
    told, (h100,), phase = capsys.readouterr().out, found.values(), "512 x 1 of all"
    assert {*h100["kernels"]} == {f"forward {phase}", f"backward {phase}", "optimizers", "rows", "validation"}
    entries = [e for graph in h100["kernels"].values() for kernel in graph for e in kernel["configurations"]]
    assert all(0 < entry["registers"] <= 255 for entry in entries)
    # Head: forward 2 x K x V per token, twice that again for the gradients. MLP: forward 2 x K x 4 K, twice. q, k, v:
    # 2 x K x 3 K. Four steps, of one sequence with 8 processes and of two with 4, 2, 1
    in_fp8 = sum(call["flops"] * call["count"] for call in h100["calls"] if call["kind"].startswith("float8"))
    assert in_fp8 == 4 * (1 + 3 * 2) * 512 * 2 * 128 * (3 * 512 + 2 * 512 + 3 * 128)
    own = {(call["name"], call["flops"]) for call in h100["calls"] if call["kind"] == "bfloat16 in Triton"}
    assert own == {("mm 512x128x512", 2 * 512 * 128 * 512)}
    assert all(h100["memory"][world][f"train {phase}"] > 2 * 512 * 512 for world in ("8", "4", "2", "1"))
    assert all(text in told for text in ("| launches |", "Processes: 8. ", "This fits into"))
    steps = json.loads((tmp_path / "out.json").read_text())["gpus"]["90"]["predicted"]
    assert all(ms > 0 for ms in steps["8"][0]["ms"].values())
    assert steps["1"][0]["launches"] > 4 * steps["8"][0]["launches"]


@lowers
@pytest.mark.slow
def test_a_graph_break_is_reported(tmp_path: Path):
    script, source = tmp_path / "train_gpt.py", SCRIPT.read_text()
    begin = "    def features(self, inputs: Inputs, ngrams: Tensor, settings: Settings) -> Tensor:\n"
    assert begin in source
    script.write_text(source.replace(begin, f"{begin}        torch._dynamo.graph_break()\n"))
    (line,) = lower.failures(90, lower.measure(90, script, **SMALL))
    assert "graph_break" in line


@lowers
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("arch", [89, 80])
def test_flex_attention_compiles_for_the_other_gpus(arch: int):
    """Its kernels alone, for whole and half heads like gpt2's: the command compiles all of gpt2."""
    layers = dict(layers=[*SMALL["layers"], train_gpt.Layer("paired", half_qk=True)], head_dim=128, batch_tokens=512)
    found = lower.measure(arch, SCRIPT, names="flex_attention", **SMALL | layers)
    assert sum(len(kernel["configurations"]) for graph in found["kernels"].values() for kernel in graph) >= 3
    assert lower.failures(arch, found | dict(spill_limit=pretend_gpu.GPUS[arch].spills)) == []
