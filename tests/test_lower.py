"""Graphs lowered for a GPU that is not here: what is counted is right, and what would fail there is reported."""

import json
from pathlib import Path

import pytest

from speedrun import ROOT, cards, lower, pretend_gpu, roofline

lowers = pytest.mark.skipif(bool(WHY_NOT := pretend_gpu.missing()), reason=f"lower {WHY_NOT}")
SCRIPT = (ROOT / "train_gpt.py").read_text()
MEASURED = json.loads((ROOT / "speedrun" / "h100_measured.json").read_text())
SMALL = """
GPT2 = PRESETS["gpt2"]
STAGES = [stage._replace(batch=1, mtp=((1, 1),), prefix=(0,), candidates=(0,)) for stage in GPT2.stages]
PRESETS["gpt2"] = dataclasses.replace(
    GPT2, layers=[Layer("long", value_embed=True, net=True, ngram=True)], stages=STAGES, emas=(), tied_frac=0.0,
    model_dim=128, num_heads=2, head_dim=64, mlp_dim=512, vocab_size=511, eot_token=510, batch_tokens=4096,
    train_seq_len=512, val_seq_len=512, val_tokens=512, lm_head_slice=512, prefix_file="", canon_file="",
    ngram_rows=64, smear_gate_inputs=0)
"""


def test_the_prediction_is_what_one_h100_took():
    """Each part of a step of stages 1 and 3 within 3%, and the whole, but for sums of n-grams. Launches alike are one
    here, so parts differ a little from those of the page."""
    for stage in MEASURED["launched"]["stages"]:
        step, first = roofline.predict_step(MEASURED["launched"], stage), str(stage["first"])
        (page,) = (step for step in cards.predicted()["predicted"] if step["first"] == stage["first"])
        assert step["ms"] == pytest.approx(page["ms"], rel=0.04, abs=1e-3)
        measured = MEASURED["measured"][first]
        predicted = {name: sum(n for part, n in step["ms"].items() if part.startswith(name)) for name in measured}
        assert predicted == pytest.approx(measured, rel=0.03)
        others = step["sum"] - step["ms"]["communication"] - step["ms"]["n-grams: sums"]
        assert others == pytest.approx(MEASURED["step"][first][0] - MEASURED["sums_of_ngrams"][first], rel=0.03)
        slow = roofline.predict_step(MEASURED["launched"], stage, roofline.H100._replace(host=1.0))
        assert 100_000 < slow["sum"] < 300_000 < 1000 * slow["launches"], "a CUDA graph replays most launches"


def test_an_update_keeps_what_is_known_of_others(tmp_path: Path, monkeypatch):
    found = MEASURED["launched"] | dict(failed="", graph_breaks={}, kernels={}, graphs=1)
    found |= dict(configuration=dict(block_size=128, batch_tokens=8, train_seq_len=1, ngram_rows=9))
    found |= dict(memory=dict(validation=2**30, train=2**31))
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(dict(gpus={"80": "old", "90": "old"}, processes={"1": "old"})))
    monkeypatch.setattr(cards, "PREDICTED", path)
    monkeypatch.setattr(lower, "measure", lambda *args: found)
    assert lower.main(["--arch=90", "--update"]) == 0
    document = json.loads(path.read_text())
    assert document["processes"] == {"1": "old", "8": dict(ngram_rows=9, train=2048, validation=1024)}
    gpus = document["gpus"]
    assert gpus["80"] == "old"
    assert [step["sum"] for step in gpus["90"]["predicted"]] == [round(s["sum"], 3) for s in roofline.predict(found)]


def test_graphs_that_break_and_kernels_that_need_too_much_or_do_not_compile_are_reported():
    needs = dict(shared=cards.H100.shared_limit), dict(shared=cards.H100.shared_limit + 1), dict(error="why")
    kernel = dict(name="k", configurations=[dict(config=str(i)) | own for i, own in enumerate(needs)])
    found = dict(failed="Unsupported", graph_breaks=dict(call=1), kernels=dict(one=[kernel], other=[kernel]))
    graphs, kernels = ["Unsupported", "graph break: call"], ["k (1) needs 232,449 bytes of shared memory"]
    assert lower.failures(90, found) == [*graphs, *kernels, "k (2) does not compile: why"]


@lowers
@pytest.mark.slow
def test_a_small_gpt2_lowers_for_an_h100_and_has_a_prediction(tmp_path: Path, monkeypatch, capsys):
    measure, found = lower.measure, {}
    monkeypatch.setattr(lower, "measure", lambda *args: found.setdefault("h100", measure(*args)))
    (script := tmp_path / "train_gpt.py").write_text(SCRIPT + SMALL)
    assert lower.main(["--arch=90", f"--script={script}"]) == 0
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
    assert all(ms > 0 for ms in roofline.predict(h100)[0]["ms"].values())
