"""Graphs lowered for a GPU that is not here: what is counted is right, and what would fail there is reported."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from gpu_proof import gpu_graphs, pretend_gpu, roofline
from speedrun.process import ROOT, own_process

WHY_NOT = pretend_gpu.missing()
lowers = pytest.mark.skipif(bool(WHY_NOT), reason=f"gpu_graphs {WHY_NOT}")

GPT2 = train_gpt.PRESETS["gpt2"]
SCRIPT = ROOT / "train_gpt.py"
STAGES = [stage._replace(batch=1, mtp=((1, 1),), prefix=(0,), classes=(0,)) for stage in GPT2.stages]
SMALL: dict[str, Any] = dict(
    layers=[train_gpt.Layer("long", value_embed=True, net=True, ngram=True)], stages=STAGES, averages=()
)
SMALL |= dict(model_dim=128, num_heads=2, head_dim=64, mlp_dim=512, vocab_size=512, eot_token=511, batch_tokens=4096)
SMALL |= dict.fromkeys(("train_seq_len", "val_seq_len", "val_tokens", "lm_head_slice"), 512)
SMALL |= dict(prefix_file="", canon_file="", ngram_rows=64, tied_frac=0.0, smear_gate_inputs=0)
WORKER = "from gpu_proof import pretend_gpu; pretend_gpu.install(90); import test_gpu_graphs; test_gpu_graphs.worker()"
empty = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
weight = functools.partial(empty, requires_grad=True)


# ---- What is predicted -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("costs", "ms"),
    [
        (dict(bytes=3.35e9), 1 / 0.84),
        (dict(flops=989e9, bytes=3.35e8, kind="bfloat16"), 1 / 0.735),
        (dict(flops=989e9, kind="bfloat16 in Triton"), 1 / 0.45),
        (dict(flops=1979e9, kind="float8_e5m2"), 1 / 0.735),
    ],
)
def test_a_launch_takes_as_long_as_what_takes_longest(costs: dict, ms: float):
    call = dict(kind="kernel", bytes=0, flops=0) | costs
    assert 1000 * roofline.seconds(call, roofline.GPUS["h100"]) == pytest.approx(ms)


def test_a_step_is_the_sum_of_its_parts():
    """Of one sequence of a process, and of eight, of which two were lowered: the others cost as much as the second."""
    gpu, phase = dataclasses.replace(roofline.GPUS["h100"], host=0.0), "train 512 x 1 of all"
    launch = dict(
        world=8, phase=phase, count=2, kind="kernel", flops=0, bytes=gpu.bandwidth * gpu.memory / 1000
    )  # 1 ms
    calls = [
        launch | dict(graph="forward 512 x 1 of all", name="triton_poi_fused_relu_1"),
        launch | dict(graph="backward 512 x 1 of all", name="triton_tem_fused_flex_attention_2"),
        launch | dict(graph="", name="mul_"),
        launch | dict(world=1, graph="", name="mul_", count=4),
        *(launch | dict(world=n, graph="", name="zeros") for n in (8, 1)),
        *(launch | dict(world=n, phase=f"rows {phase}", graph="", name="index") for n in (8, 1)),
        *(launch | dict(world=n, phase=f"optimizers {phase}", graph="optimizers", name="adam") for n in (8, 1)),
        *(launch | dict(world=n, phase="validation", graph="validation", name="mm") for n in (8, 1)),
    ]
    stage = dict(phase=phase, steps=10, tokens=512, windows=dict(long=256, short=128))
    found = dict(calls=calls, stages=[stage], attention=dict(kinds=["short"], widths=[[64, 128]], block=128), cycle=2)
    found |= dict(configuration=dict(batch_tokens=4096, train_seq_len=512, num_heads=2), memory={})
    found |= dict(communication={n: {phase: gpu.link / 1000} for n in ("8", "1")})
    predicted = roofline.predict(found, gpu)
    (eight,), (one,) = predicted["steps"].values()
    relu, other, optimizers, rows = (
        "MLP: relu squared, scales of rows",
        "outside of graphs",
        "optimizers, averages",
        "n-grams: rows, their sums and steps",
    )
    factor = {part: factor for part, (_, factor, _) in roofline.PARTS.items()}
    named = {relu: factor[relu], "attention": 1, other: factor[other], rows: 2 * factor[rows], "communication": 7 / 8}
    named |= {optimizers: factor[optimizers]}
    assert eight["ms"] == pytest.approx(dict.fromkeys(roofline.PARTS, 0.0) | named)
    assert eight["launches"] == gpu_graphs.step_launches(found)[0] == 6
    named |= {relu: 8 * factor[relu], "attention": 8, other: (7 * 2 - 6) * factor[other], "communication": 0}
    assert one["ms"] == pytest.approx(dict.fromkeys(roofline.PARTS, 0.0) | named)
    assert {n: sum(run.values()) for n, run in predicted["seconds"].items()} == pytest.approx(
        {"8": eight["sum"] / 100, "1": one["sum"] / 100}
    )
    slow = dataclasses.replace(gpu, bfloat16=1e9, host=1.0)  # then attention's compute and the host take longer
    pairs = 512 * (690 * (1 - 2.718281828 ** (-128 / 690)) + 128)
    step = roofline.predict_step(found, slow, stage, 8)
    flops = 2 * pairs * ((2 * 64 + 2 * 128) / 0.311 + (6 * 64 + 4 * 128) / 0.238)
    assert step["ms"]["attention"] == pytest.approx(1000 * (flops / 1e9 + 2 * gpu.tail))
    assert step["sum"] == pytest.approx(5000)  # four launches, and a CUDA graph for the other two


def test_figures_of_the_page_are_those_of_the_prediction():
    page = " ".join((ROOT / "gpu_proof" / "README.md").read_text().split())
    found = json.loads((ROOT / "gpu_proof" / "h100.json").read_text())["gpus"]["h100"]
    sums, waits = zip(*((step["sum"], step["ms"]["waiting for the host"]) for step in found["steps"]["8"]), strict=True)
    memory = [{name: n / 2**20 for name, n in own.items()} for own in found["memory"].values()]
    peaks = [max(n for name, n in own.items() if name.startswith("train")) for own in memory]
    eight, one = (found["seconds"][world] for world in ("8", "1"))
    rows = [(sums, "sum", ".1f"), (waits, "waiting for the host", ".1f")]
    rows += [(peaks, "the step that needs most, stage 3's", ",.0f")]
    rows += [([own["validation"] for own in memory], "validation", ",.0f")]
    rows += [((eight[part], public), part, ".1f") for part, (_, _, public) in roofline.PARTS.items()]
    rows += [((sum(eight.values()), sum(public for *_, public in roofline.PARTS.values())), "sum", ".1f")]
    for numbers, name, form in rows:
        assert f"| {name} | {' | '.join(format(n, form) for n in numbers)} |" in page
    assert f"One H100: {sum(one.values()):.0f} s." in page
    assert max(memory[0].values()) * 2**20 < 60e9


def test_kernels_that_need_too_much_or_do_not_compile_are_reported():
    device = pretend_gpu.DEVICES[90]

    def kernel(name: str, **needs) -> dict:
        return dict(name=name, configurations=[dict(config="c") | needs])

    most = device.spills
    kernels = [
        kernel("fits", shared=device.shared_limit, spills=most),
        kernel("large", shared=device.shared_limit + 1, spills=0),
        kernel("spilled", shared=0, spills=most + 8),
        kernel("broken", error="CompilationError: why"),
    ]
    found = dict(failed="", graph_breaks={}, shared_limit=device.shared_limit, spill_limit=most)
    assert gpu_graphs.failures(found | dict(kernels=dict(one=kernels, other=kernels[-1:]))) == [
        f"large (c) needs {device.shared_limit + 1:,} bytes of shared memory",
        f"spilled spills at least {most + 8} bytes: more than any kernel before",
        "broken (c) does not compile: CompilationError: why",
    ]


# ---- What is lowered -------------------------------------------------------------------------------------------------
def head(x, w, targets, weights):
    softcap = GPT2.lm_head_softcap, GPT2.softcap_range, GPT2.softcap_shift
    return train_gpt.HeadLoss.apply(x, w, targets, weights, softcap, len(x) // 2, train_gpt.FP8_SCALES, True, None)


def worker() -> None:
    """Compile and run some functions for a GPU that is not here, and print what the recorder saw."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = gpu_graphs.Recorder(names="^$")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, recorder, torch.no_grad():
        integers, targets = (empty(*shape, dtype=torch.int64) for shape in ((1024,), (1024, 3)))
        cases = dict(
            chain=(lambda x, u, v, w: x @ u @ v @ w, *map(empty, (1024, 512, 1024, 512), (512, 1024, 512, 256))),
            gather=(F.embedding, integers, empty(50000, 64)),
            softmax=(lambda x: x.softmax(-1), empty(512, 50304)),
            in_place=(lambda x, w: (x @ w).relu(), empty(4096, 512), empty(512, 512)),
            head=(head, weight(1024, 16), weight(8192, 16), targets, empty(3, dtype=torch.float32)),
        )
        for name, (function, *inputs) in cases.items():
            with recorder.during(name), torch.set_grad_enabled(name == "head"):
                torch.compile(function, fullgraph=True, dynamic=False)(*inputs)
    print(json.dumps(dict(calls=list(recorder.calls.values()), peaks=recorder.peaks)))


@pytest.fixture(scope="module")
def seen() -> dict:
    return json.loads(
        own_process(["-c", WORKER], PYTHONPATH=f"{ROOT}:{ROOT / 'data'}:{ROOT / 'tests'}").splitlines()[-1]
    )


# Bytes by hand: what is read, then what is written
BYTES = dict(
    gather=1024 * 8 + 1024 * 64 * 2 + 1024 * 64 * 2,
    softmax=512 * 50304 * 2 + 512 * 50304 * 2,
    in_place=(4096 * 512 + 512 * 512 + 4096 * 512) * 2 + (4096 * 512 + 4096 * 512) * 2,
)


@lowers
@pytest.mark.slow
def test_bytes_and_memory_of_kernels_by_hand(seen: dict):
    calls = [call | dict(bytes=call["bytes"] * call["count"]) for call in seen["calls"]]
    for name, expected in BYTES.items():
        assert sum(call["bytes"] for call in calls if call["graph"] == name) == pytest.approx(expected, rel=0.001), name
    # Per logit of three targets: bf16 in and FP8 out, FP8 in and out for the other layout, little for all the rest
    own = [call["bytes"] for call in calls if call["graph"] == "head" and not call["flops"]]
    assert 5 < sum(own) / (1024 * 8192) < 5.5
    # Of three products in a row, two results are needed at a time
    assert seen["peaks"]["chain"] - seen["peaks"][""] == (1024 * 1024 + 1024 * 512) * 2
    products = [call for call in calls if call["graph"] == "chain"]
    assert {call["kind"] for call in products} == {"bfloat16"}
    assert sum(call["flops"] for call in products) == 2 * 1024 * (512 * 1024 + 1024 * 512 + 512 * 256)


@lowers
@pytest.mark.slow
def test_small_gpt2_compiles_for_an_h100_and_has_a_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = gpu_graphs.measure(90, SCRIPT, **SMALL)
    assert gpu_graphs.failures(found) == []
    phase = "512 x 1 of all"
    assert {*found["kernels"]} == {f"forward {phase}", f"backward {phase}", "optimizers", "rows", "validation"}
    entries = [e for graph in found["kernels"].values() for kernel in graph for e in kernel["configurations"]]
    assert all(0 < entry["registers"] <= 255 for entry in entries)
    # Head: forward 2 x K x V per token, twice that again for the gradients. MLP: forward 2 x K x 4 K, twice. q, k, v:
    # 2 x K x 3 K. Four steps, of one sequence with 8 processes and of two with 4, 2, 1
    in_fp8 = sum(call["flops"] * call["count"] for call in found["calls"] if call["kind"].startswith("float8"))
    assert in_fp8 == 4 * (1 + 3 * 2) * 512 * 2 * 128 * (3 * 512 + 2 * 512 + 3 * 128)
    assert "relu_squared_backward_kernel" in [kernel["name"] for kernel in found["kernels"][f"backward {phase}"]]
    own = [(call["name"], call["flops"]) for call in found["calls"] if call["kind"] == "bfloat16 in Triton"]
    assert {*own} == {("mm 512x128x512", 2 * 512 * 128 * 512)}
    assert all(found["memory"][world][f"train {phase}"] > 2 * 512 * 512 for world in ("8", "4", "2", "1"))
    told, launches = gpu_graphs.table(90, found), f"{gpu_graphs.step_launches(found)[0]:g}"
    assert f"Launches of a step, by stage, on one of 8 processes: {launches}," in told
    assert "DOES NOT FIT" not in told
    graphs, out = tmp_path / "graphs.json", tmp_path / "roofline.json"
    graphs.write_text(json.dumps(dict(script="", flags=[], architectures={"90": found})))
    assert roofline.main(["--gpu", "h100", "--graphs", str(graphs), "--out", str(out)]) == 0
    steps = json.loads(out.read_text())["gpus"]["h100"]["steps"]
    assert f"| launches | {launches} |" in capsys.readouterr().out
    assert all(ms > 0 for ms in steps["8"][0]["ms"].values())
    assert steps["1"][0]["launches"] > 4 * steps["8"][0]["launches"]


@lowers
@pytest.mark.slow
@pytest.mark.proof
def test_longest_step_of_gpt2_lowers_and_fits_one_of_8_h100():
    """At full size; of its kernels compile those that spill."""
    stages = [GPT2.stages[2]._replace(share=1, classes=(24576,))]
    found = gpu_graphs.measure(90, SCRIPT, names="tem_fused_flex_attention", stages=stages, num_iterations=60)
    assert gpu_graphs.failures(found | dict(spill_limit=pretend_gpu.DEVICES[90].spills)) == []
    assert max(found["memory"]["8"].values()) < 60e9


@lowers
@pytest.mark.slow
def test_a_graph_break_is_reported(tmp_path: Path):
    script, source = tmp_path / "train_gpt.py", SCRIPT.read_text()
    begin = "    def features(self, inputs: Inputs, ngrams: Tensor, settings: Settings) -> Tensor:\n"
    assert begin in source
    script.write_text(source.replace(begin, f"{begin}        torch._dynamo.graph_break()\n"))
    (line,) = gpu_graphs.failures(gpu_graphs.measure(90, script, **SMALL))
    assert "graph_break" in line


@lowers
@pytest.mark.slow
@pytest.mark.parametrize("arch", [89, 80])  # 86 has the shared memory of the one and the instructions of the other
def test_flex_attention_compiles_for_the_other_gpus(arch: int):
    """Its kernels alone, for whole and half heads like gpt2's: the command compiles all of gpt2."""
    layers = [*SMALL["layers"], train_gpt.Layer("paired", half_qk=True)]
    found = gpu_graphs.measure(
        arch, SCRIPT, names="flex_attention", **SMALL | dict(layers=layers, head_dim=128, batch_tokens=512)
    )
    assert sum(len(kernel["configurations"]) for graph in found["kernels"].values() for kernel in graph) >= 3
    assert gpu_graphs.failures(found | dict(spill_limit=pretend_gpu.DEVICES[arch].spills)) == []
