"""Graphs lowered for a GPU that is not here: what is counted is right, and what would fail there is reported."""

import json
import math
from pathlib import Path

import pytest

from speedrun import ROOT, lower, pretend_gpu, roofline

lowers = pytest.mark.skipif(bool(WHY_NOT := pretend_gpu.missing()), reason=f"lower {WHY_NOT}")
SCRIPT, H100 = (ROOT / "train_gpt.py").read_text(), pretend_gpu.GPUS[90]
SMALL = """
GPT2 = PRESETS["gpt2"]
STAGES = [stage._replace(batch=1, mtp=((1, 1),), prefix=(0,), candidates=(0,)) for stage in GPT2.stages]
PRESETS["gpt2"] = dataclasses.replace(
    GPT2, layers=[Layer("long", value_embed=True, net=True, ngram=True)], stages=STAGES, emas=(), tied_frac=0.0,
    model_dim=128, num_heads=2, head_dim=64, mlp_dim=512, vocab_size=511, eot_token=510, batch_tokens=4096,
    train_seq_len=512, val_seq_len=512, val_tokens=512, lm_head_slice=512, prefix_file="", canon_file="",
    ngram_rows=64, smear_gate_inputs=0)
"""


def test_a_step_is_the_sum_of_its_parts():
    gpu, phase = roofline.H100._replace(host=0.0), "train 512 x 1 of all"
    launch = dict(phase=phase, count=2, kind="kernel", flops=0, bytes=gpu.bandwidth * gpu.memory / 1000)  # 1 ms
    calls = [
        launch | dict(graph="forward 512 x 1 of all", name="triton_poi_fused_relu_1"),
        launch | dict(graph="", name="mul_"),
        launch | dict(phase=f"rows {phase}", graph="", name="index"),
        launch | dict(phase=f"optimizers {phase}", graph="optimizers", name="adam"),
        launch | dict(phase="validation", graph="validation", name="mm"),
    ]
    stage = dict(first=0, phase=phase, steps=10, tokens=512, windows=dict(long=256, short=128))
    attention = dict(window="short", heads_per_pair=1, heads=2, qk_dim=64, v_dim=128)
    found = dict(calls=calls, attention=[attention], cycle=2, one_of=8)
    found |= dict(configuration=dict(block_size=128), communication={phase: gpu.link / 1000})
    pairs = 2 * 512 * (690 * (1 - math.exp(-128 / 690)) + 128)
    flops = pairs * ((2 * 64 + 2 * 128) / 0.308 + (6 * 64 + 4 * 128) / 0.236)
    parts = "MLP: relu squared, scales of rows", "outside of graphs"
    parts += "n-grams: rows and their steps", "optimizers, averages"
    named = {part: roofline.PARTS[part][1] + 1000 * gpu.launch for part in parts} | dict(communication=7 / 8)
    named["between kernels"] = 4 * 1000 * gpu.gap
    named["attention"] = 1000 * (flops / gpu.bfloat16 + 2 * gpu.tail)
    ms = roofline.predict_step(found, stage, gpu)["ms"]
    assert ms == pytest.approx(dict.fromkeys(roofline.PARTS, 0.0) | named)
    slow = roofline.predict_step(found, stage, gpu._replace(host=1.0))
    assert (slow["launches"], slow["sum"]) == (4, pytest.approx(4000))  # three launches, and a CUDA graph for the other
    for kind, flops in (("bfloat16", 989e9), ("float8_e5m2", 1979e9)):
        costs = dict(flops=flops, kind=kind, bytes=0)
        assert 1000 * (roofline.seconds(launch | costs, gpu, 2) - gpu.launch) == pytest.approx(2 / 0.735)


def test_the_prediction_is_what_one_h100_took():
    """Each part of a step of stages 1 and 3 within 3%, and the whole, but for sums of n-grams."""
    found = json.loads((ROOT / "speedrun" / "h100_measured.json").read_text())
    for stage in found["launched"]["stages"]:
        ms, first = roofline.predict_step(found["launched"], stage)["ms"], str(stage["first"])
        measured = found["measured"][first]
        predicted = {name: sum(n for part, n in ms.items() if part.startswith(name)) for name in measured}
        assert predicted == pytest.approx(measured, rel=0.03)
        others = sum(ms.values()) - ms["communication"] - ms["n-grams: sums"]
        assert others == pytest.approx(found["step"][first][0] - found["sums_of_ngrams"][first], rel=0.03)


def test_an_update_keeps_what_is_known_of_other_architectures(tmp_path: Path, monkeypatch):
    found = json.loads((ROOT / "speedrun" / "h100_measured.json").read_text())["launched"]
    found["configuration"] |= dict(batch_tokens=8, train_seq_len=1)
    found |= dict(failed="", graph_breaks={}, kernels={}, graphs=1, memory=dict(validation=2**30))
    (path := tmp_path / "h100.json").write_text(json.dumps(dict(gpus={"80": "old", "90": "old"})))
    monkeypatch.setattr(lower, "PREDICTED", path)
    monkeypatch.setattr(lower, "measure", lambda *args: found)
    assert lower.main(["--arch=90", "--update", f"--out={tmp_path / 'out.json'}"]) == 0
    gpus = json.loads(path.read_text())["gpus"]
    assert gpus["80"] == "old"
    assert [step["sum"] for step in gpus["90"]["predicted"]] == [round(s["sum"], 3) for s in roofline.predict(found)]


def test_kernels_that_need_too_much_or_do_not_compile_are_reported():
    needs = dict(
        fits=dict(shared=H100.shared_limit),
        large=dict(shared=H100.shared_limit + 1),
        broken=dict(error="CompilationError: why"),
    )
    kernels = [dict(name=name, configurations=[dict(config="c") | own]) for name, own in needs.items()]
    found = dict(failed="", graph_breaks={}, kernels=dict(one=kernels, other=kernels[-1:]))
    assert lower.failures(90, found) == [
        f"large (c) needs {H100.shared_limit + 1:,} bytes of shared memory",
        "broken (c) does not compile: CompilationError: why",
    ]


@lowers
@pytest.mark.slow
def test_a_small_gpt2_lowers_for_an_h100_and_has_a_prediction(tmp_path: Path, monkeypatch, capsys):
    measure, found = lower.measure, {}
    monkeypatch.setattr(lower, "measure", lambda *args: found.setdefault("h100", measure(*args)))
    (script := tmp_path / "train_gpt.py").write_text(SCRIPT + SMALL)
    assert lower.main(["--arch=90", f"--script={script}", f"--out={tmp_path / 'out.json'}"]) == 0
    told, h100, phase = capsys.readouterr().out, found["h100"], "512 x 1 of all"
    assert {*h100["kernels"]} == {f"forward {phase}", f"backward {phase}", "optimizers", "rows", "validation"}
    entries = [e for graph in h100["kernels"].values() for kernel in graph for e in kernel["configurations"]]
    assert all(0 < entry["registers"] <= 255 for entry in entries)
    # Head: forward 2 x K x V per token, twice that again for the gradients. MLP: forward 2 x K x 4 K, twice. q, k, v:
    # 2 x K x 3 K. And twice as much backward. Four steps of one sequence
    in_fp8 = sum(call["flops"] * call["count"] for call in h100["calls"] if call["kind"].startswith("float8"))
    assert in_fp8 == 4 * 512 * 2 * 128 * (3 * 512 + 6 * 512 + 9 * 128)
    own = {(call["name"], call["flops"]) for call in h100["calls"] if call["kind"] == "float8_e5m2 in Triton"}
    assert own == {("_scaled_mm 512x128x512", 2 * 512 * 128 * 512)}
    # Adam reads and writes an eighth of the head with its moments, and reads the gradient and five numbers. A row of a
    # table is read by its index, and written
    moved = {(call["graph"], call["bytes"]) for call in h100["calls"]}
    assert ("optimizers", 511 * 128 // 8 * (2 * 2 + 2 + 2 * 2 * 4) + 5 * 4) in moved
    assert (f"forward {phase}", 512 * (8 + 2 * 128 * 2)) in moved
    assert h100["memory"][f"train {phase}"] > 2 * 512 * 512
    assert all(text in told for text in ("| launches |", "This fits into"))
    (step,) = json.loads((tmp_path / "out.json").read_text())["gpus"]["90"]["predicted"][:1]
    assert all(ms > 0 for ms in step["ms"].values())


@lowers
@pytest.mark.slow
def test_a_graph_break_is_reported(tmp_path: Path):
    begin = "    def features(self, inputs: Inputs, ngram_embeds: Tensor, settings: Settings) -> Tensor:\n"
    assert begin in SCRIPT
    script = tmp_path / "train_gpt.py"
    script.write_text(SCRIPT.replace(begin, f"{begin}        torch._dynamo.graph_break()\n") + SMALL)
    (line,) = lower.failures(90, lower.measure(90, script))
    assert "graph_break" in line
