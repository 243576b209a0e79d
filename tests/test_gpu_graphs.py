"""Graphs lowered for a GPU that is not here: what is counted is right, and what would fail there is reported."""

import dataclasses
import functools
import json
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from speedrun import check
import train_gpt
from gpu_proof import gpu_graphs, pretend_gpu, roofline
from speedrun.process import ROOT, own_process

WHY_NOT = pretend_gpu.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=f"gpu_graphs {WHY_NOT}")]

GPT2 = train_gpt.PRESETS["gpt2"]
SCRIPT = ROOT / "train_gpt.py"
H100 = "gpu_proof/h100.json"
STAGES = [stage._replace(batch=1, mtp=((1, 1),), prefix=(0, 0)) for stage in GPT2.stages]
SMALL = dict(layers=[train_gpt.Layer("long", value_embed=True)], stages=STAGES, prefix_file="", bigram_rows=61)
SMALL |= dict(model_dim=128, num_heads=2, head_dim=64, vocab_size=512, eot_token=511, batch_tokens=4096)
SMALL |= dict.fromkeys(("train_seq_len", "val_seq_len", "val_tokens", "lm_head_slice"), 512)
WORKER = "from gpu_proof import pretend_gpu; pretend_gpu.install(90); import test_gpu_graphs; test_gpu_graphs.worker()"
empty = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
weight = functools.partial(empty, requires_grad=True)


def rotate(x, cos, sin):
    (x1, x2), cos, sin = x[:, :12].chunk(2, dim=-1), cos[:1024, None], sin[:1024, None]
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).bfloat16()


def head(x, w, targets, weights):
    softcap = GPT2.lm_head_softcap, GPT2.softcap_range, GPT2.softcap_shift
    columns = train_gpt.next_targets(targets, 3)
    return train_gpt.HeadLoss.apply(x, w, columns, weights, softcap, len(x) // 2, train_gpt.FP8_SCALES, True)


def worker() -> None:
    """Compile and run some functions for a GPU that is not here, and print what the recorder saw."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    recorder = gpu_graphs.Recorder()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, recorder, torch.no_grad():
        table, integers = empty(4096, 64, dtype=torch.float32), empty(1024, dtype=torch.int64)
        cases = dict(
            chain=(lambda x, u, v, w: x @ u @ v @ w, *map(empty, (1024, 512, 1024, 512), (512, 1024, 512, 256))),
            rotate=(rotate, empty(1024, 18, 128), table, table.clone()),
            gather=(F.embedding, integers, empty(50000, 64)),
            softmax=(lambda x: x.softmax(-1), empty(512, 50304)),
            broadcast=(lambda x, y: x + y, empty(64, 50304), empty(50304)),
            in_place=(lambda x, w: (x @ w).relu(), empty(4096, 512), empty(512, 512)),
            head=(head, weight(1024, 16), weight(8192, 16), integers, empty(3, dtype=torch.float32)),
        )
        for name, (function, *inputs) in cases.items():
            with recorder.during(name), torch.set_grad_enabled(name == "head"):
                torch.compile(function, fullgraph=True, dynamic=False)(*inputs)
        with recorder.during("adam"):  # of any number of rows
            step = torch.compile(train_gpt.adam_update, fullgraph=True, dynamic=True)
            numbers = empty(5, dtype=torch.float32).unbind()
            for n in (100_000, 4097):
                wide = empty(2, n, 16, dtype=torch.float32).unbind()
                step(empty(n, 16), empty(n, 16), *wide, *numbers)
        rows, big = empty(1024, 64), empty(50000, 64)
        with recorder.during("looked up"):
            big[integers], big.index_add_(0, integers, rows)
    calls = [call for call in recorder.calls.values() if call["graph"] or call["phase"] == "looked up"]
    print(json.dumps(dict(calls=calls, peaks=recorder.peaks, adam=recorder.kernels["adam"])))


@pytest.fixture(scope="module")
def seen() -> dict:
    return json.loads(own_process(["-c", WORKER], PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}").splitlines()[-1])


# Bytes by hand: what is read, then what is written
BYTES = dict(
    rotate=1024 * 12 * 128 * 2 + 2 * 1024 * 64 * 4 + 1024 * 12 * 128 * 2,
    gather=1024 * 8 + 1024 * 64 * 2 + 1024 * 64 * 2,
    softmax=512 * 50304 * 2 + 512 * 50304 * 2,
    broadcast=(64 + 1) * 50304 * 2 + 64 * 50304 * 2,
    in_place=(4096 * 512 + 512 * 512 + 4096 * 512) * 2 + (4096 * 512 + 4096 * 512) * 2,
)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_kernel_are_those_of_what_it_touches(seen: dict, name: str):
    counted = sum(call["bytes"] * call["count"] for call in seen["calls"] if call["graph"] == name)
    assert counted == pytest.approx(BYTES[name], rel=0.05 if name == "rotate" else 0.001)  # it has masks


def test_adam_is_one_kernel_that_reads_several_numbers_at_once(seen: dict):
    [configurations] = seen["adam"].values()
    assert max(entry["vector"] for entry in configurations) >= 2
    calls = [call for call in seen["calls"] if call["phase"] == "adam"]
    assert [call["bytes"] // 16 for call in calls] == [n * (2 + 2 + 4 + 4 + 2 + 4 + 4) + 1 for n in (100_000, 4097)]


def test_a_slice_of_logits_is_read_once_and_its_gradient_written_once_in_each_layout(seen: dict):
    """Bytes of the head's kernels per logit, with three targets: bf16 in, FP8 out twice, little for all the rest.

    Where a kernel computes too much at once, the compiler writes the gradient in fp32 between: 12 bytes, and each
    slice's outlives its turn. Padding that is computed anew for each target did that.
    """
    own = [call for call in seen["calls"] if call["graph"] == "head" and not call["flops"]]
    assert 4 < sum(call["bytes"] * call["count"] for call in own) / (1024 * 8192) < 5


def test_special_functions_and_second_reads_of_the_head(seen: dict):
    """Per logit: a sigmoid (2) and an exp, for the sum and again for the gradient, which reads it (bf16) once more.

    A slice of 512 x 8192 exceeds the L2 cache: of the tiles, those with few rows would scatter the transposed gradient.
    """
    own = [call for call in seen["calls"] if call["graph"] == "head"]
    specials, scattered = (sum(call[key] * call["count"] for call in own) for key in ("specials", "scattered"))
    assert specials / (1024 * 8192) == pytest.approx(6, rel=0.01)
    assert scattered / (1024 * 8192) == pytest.approx(2, rel=0.01)


def test_lookups_count_the_rows_that_they_touch(seen: dict):
    counted = {call["name"]: call["bytes"] for call in seen["calls"] if call["phase"] == "looked up"}
    assert counted == dict(index=1024 * (8 + 2 * 64 * 2), index_add_=1024 * (8 + 3 * 64 * 2))


FUNCTION = """
import triton
import triton.language as tl
from triton.language import math as tl_math
from triton.language.extra.cuda import libdevice

@triton.jit
def function(in_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(in_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, N), {})
"""
CALLS = [
    "libdevice.exp(x)",
    "tl_math.exp(x)",
    "libdevice.exp2(x)",
    "libdevice.rsqrt(x)",
    "tl.sqrt_rn(x)",
    "tl.sigmoid(x)",
]
CALLS += ["libdevice.tanh(x)", "libdevice.erf(x)", "1 / x"]


@pytest.mark.parametrize("call", CALLS)
def test_special_functions_are_those_of_the_machine_code(tmp_path: Path, call: str):
    """One thread computes one value here, so its instructions for the special function units count."""
    import triton
    import triton.backends.nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    (path := tmp_path / "function.py").write_text(FUNCTION.format(call))
    source = ASTSource(runpy.run_path(str(path))["function"], dict(in_ptr="*fp32", out_ptr="*fp32"), dict(N=128))
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-sass", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    kernel = f"    xnumel = 128\n    x0 = xindex\n    x = tl.load(in_ptr0 + (x0))\n    tmp0 = {call}\n"
    assert told.count("MUFU") * 128 == gpu_graphs.special_functions(kernel, {})


KERNEL = """
    xnumel = 8192
    r0_numel = 4096
    x0 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask)
        _tmp1 = _tmp1 + libdevice.exp(tmp0)
    tmp1 = tl.sum(_tmp1, 1)[:, None]
    tmp2 = tl.full([1, 1], 3.0, tl.float32)
    tmp3 = (tmp1 / tmp2)
    tmp4 = libdevice.rsqrt(tmp3)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp5 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask)
        tmp6 = (tmp5 / tmp4)
        tl.store(out_ptr0 + (x0 + 8192*r0_1), tmp6, r0_mask)
"""


@pytest.mark.parametrize(
    ("tiles", "sectors", "reads"),
    [([(1, 2048)], 31, 0), ([(8, 512)], 3, 0), ([(64, 64)], 0, 1), ([(1, 2048), (8, 512), (64, 64)], 0, 1)],
)
def test_what_a_tile_scatters_and_reads_again(monkeypatch, tiles, sectors: int, reads: int):
    """A transposed byte costs 32, 8 in a row cost 4 each; 132 x 64 rows of 8 KB exceed the 50 MB of a cache."""
    gpu = pretend_gpu.DEVICES[90]
    device = SimpleNamespace(multi_processor_count=gpu.processors, L2_cache_size=gpu.l2_cache << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    meta = functools.partial(torch.empty, 8192, 4096, device="meta")
    launch = KERNEL, dict(in_ptr0=meta(dtype=torch.bfloat16), out_ptr0=meta(dtype=torch.float8_e5m2))
    tiles = [dict(XBLOCK=x, R0_BLOCK=r) for x, r in tiles]
    assert gpu_graphs.scattered_bytes(*launch, tiles) == (sectors + 2 * reads) * 8192 * 4096
    assert gpu_graphs.special_functions(*launch) == 2 * 8192 * 4096 + 8192  # exp and a division; rsqrt of a row


COSTS = dict(kind="kernel", bytes=0, scattered=0, flops=0, specials=0)


@pytest.mark.parametrize(
    ("costs", "ms"),
    [
        (dict(), 0.002),
        (dict(bytes=3.35e9), 1 / 0.85),
        (dict(bytes=3.35e9, scattered=3.35e9), 2 / 0.85),
        (dict(bytes=3.35e9, kind="strided"), 1 / 0.4),
        (dict(specials=4.2e9), 1 / 0.85),
        (dict(specials=4.2e9, bytes=2 * 3.35e9), 2 / 0.85),
        (dict(flops=989e9, kind="bfloat16"), 1 / 0.75),
        (dict(flops=1979e9, kind="float8_e5m2"), 1 / 0.75),
    ],
)
def test_a_launch_takes_as_long_as_what_takes_longest(costs: dict, ms: float):
    assert 1000 * roofline.seconds(COSTS | costs, roofline.GPUS["h100"]) == pytest.approx(ms)


def test_figures_of_the_page_are_those_of_the_prediction():
    """The table by stage, the public record's estimates, what both sum to, and what calibrates them."""
    page, document = (ROOT / "gpu_proof" / "README.md").read_text(), json.loads((ROOT / H100).read_text())
    found, (public, steps) = document["gpus"]["h100"], zip(*roofline.PUBLIC.values(), strict=True)
    stages, parts, total = found["by_stage"], found["parts"], [sum(column) for column in zip(*steps, strict=True)]
    assert len(public) == len(stages[0])
    for number, stage in enumerate(stages, 1):
        assert sum(stage.values()) == pytest.approx(parts[f"STEP of stage {number}, processes: 8"]["ms"], abs=0.002)
    for name in roofline.PUBLIC:
        cells = " | ".join(f"{stage[name]:.1f}" for stage in stages)
        estimates = ", ".join(dict.fromkeys(f"{ms:g}" if ms == 0 else f"{ms:.1f}" for ms in roofline.PUBLIC[name][1]))
        assert f"| {name} | {cells} | {estimates}" in page, name
    sums = " | ".join(f"**{sum(stage.values()):.1f}**" for stage in stages)
    assert f"| **sum** | {sums} | **{', '.join(f'{ms:.1f}' for ms in total)}** |" in page
    run = (423 * total[0] + 424 * total[1] + 438 * total[2]) / 1000  # the steps of its stages
    (record21, record89), factor = roofline.CALIBRATION, sum(roofline.CALIBRATION) / 2
    assert document["calibration"] == pytest.approx([record21, record89], abs=1e-4)
    assert f"84.2 on average | 101.6 | {record21:.2f} | {84.2 * factor:.1f}, {84.2 * factor / 101.6 - 1:+.1%} |" in page
    ends = f"73.8 | {73.8 / run:.2f} | {run * factor:.1f}, {run * factor / 73.8 - 1:+.1%} |"
    assert f"| {run:.1f}, its own kernels estimated | {ends}" in page
    assert record89 == pytest.approx(73.8 / run)
    eight, one = (parts[f"RUN, processes: {world}"]["ms"] / 1000 for world in (8, 1))
    assert f"{eight:.1f} s, calibrated {factor * eight:.0f} s; the public" in page
    assert f"One H100: {one:.0f} s, calibrated {factor * one:.0f}." in page
    named = re.search(r"are (\d+), (\d+), (\d+) and (\d+), calibrated", (ROOT / "docs/first_gpu_run.md").read_text())
    assert [int(ms) for ms in named.groups()] == [round(factor * sum(stage.values())) for stage in stages]


def test_special_function_units_make_16_results_a_clock():
    """At the clock of the fp32 peak, which is 2 FLOP of each of 128 lanes, on A100 64 lanes."""
    for gpu, lanes in zip(("h100", "a100", "rtx4090"), (128, 64, 128), strict=True):
        rates = roofline.GPUS[gpu]
        assert rates.special == pytest.approx(16 * rates.float32 / (2 * lanes), rel=0.02)


def test_peak_and_flops_of_three_products_in_a_row(seen: dict):
    """Of the results, (1024, 1024), (1024, 512) and (1024, 256), two are needed at a time."""
    assert seen["peaks"]["chain"]["buffers"] == (1024 * 1024 + 1024 * 512) * 2
    products = [call for call in seen["calls"] if call["graph"] == "chain"]
    flops = sum(call["flops"] * call["count"] for call in products)
    assert flops == 2 * 1024 * (512 * 1024 + 1024 * 512 + 512 * 256)
    assert {call["kind"] for call in products} == {"bfloat16"}


def test_kernels_that_need_too_much_or_do_not_compile_are_reported():
    device = pretend_gpu.DEVICES[90]
    fits, large = (dict(config="c", shared=device.shared_limit + more, spills=0) for more in (0, 1))
    spills, chosen = (
        [dict(config="c", shared=0, spills=device.spills + n) for n in least] for least in ((8, 900), (0, 900))
    )
    broken = [dict(config="c", error="CompilationError: why")]
    kernels = dict(fits=[fits], large=[large], spilled=spills, chosen=chosen, broken=broken)
    found = dict(failed="", graph_breaks={}, shared_limit=device.shared_limit, spill_limit=device.spills)
    assert gpu_graphs.failures(found | dict(kernels=dict(one=kernels, other=dict(broken=broken)))) == [
        f"large (c) needs {device.shared_limit + 1:,} bytes of shared memory",
        f"spilled spills at least {device.spills + 8} bytes: more than any kernel before",
        "broken (c) does not compile: CompilationError: why",
    ]


def test_small_gpt2_compiles_for_an_h100_and_has_a_roofline(tmp_path: Path):
    found = gpu_graphs.measure(90, SCRIPT, **SMALL)
    assert gpu_graphs.failures(found) == []
    told = gpu_graphs.table(90, found)
    assert {*found["kernels"]} == {"forward 512 x 1", "backward 512 x 1", "optimizers", "validation"}
    assert "_scaled_mm" in told
    assert "DOES NOT FIT" not in told
    entries = [e for graph in found["kernels"].values() for configs in graph.values() for e in configs]
    assert all(0 < entry["registers"] <= 255 for entry in entries)
    # Head: forward 2 x K x V per token, twice that again for the gradients. MLP: forward 2 x K x 4 K, twice. Two
    # steps, of one sequence with 8 processes and of two with 4, 2, 1
    in_fp8 = sum(call["flops"] * call["count"] for call in found["calls"] if call["kind"].startswith("float8"))
    assert in_fp8 == 2 * (1 + 3 * 2) * 512 * (3 * 2 * 128 * 512 + 2 * 2 * 128 * 4 * 128)
    assert "relu_squared_backward_kernel" in found["kernels"]["backward 512 x 1"]
    own = [(call["name"], call["flops"]) for call in found["calls"] if call["kind"] == "bfloat16 in Triton"]
    assert {*own} == {("mm 512x128x512", 2 * 512 * 128 * 512)}
    for world in ("8", "4", "2", "1"):
        peak = found["memory"][world]["train 512 x 1"]
        assert peak["total"] > peak["buffers"] > 2 * 512 * 512
    graphs, out = tmp_path / "graphs.json", tmp_path / "roofline.json"
    graphs.write_text(json.dumps(dict(script="", flags=[], architectures={"90": found})))
    assert roofline.main(["--gpu", "h100", "--graphs", str(graphs), "--out", str(out)]) == 0
    parts = json.loads(out.read_text())["gpus"]["h100"]["parts"]
    assert parts["STEP of stage 1, processes: 1"]["ms"] > 7 * parts["stage 1: forward"]["ms"]
    launches = parts["stage 1: forward"]["launches"] + parts["stage 1: FlexAttention forward"]["launches"]
    assert f"| forward 512 x 1 | {launches:g} |" in told  # of one sequence
    steps = [parts[f"STEP of stage {n}, processes: 8"]["ms"] for n in (1, 2, 3, 4)]
    run = sum(stage["steps"] * ms for stage, ms in zip(found["stages"], steps, strict=True))
    assert parts["RUN, processes: 8"]["ms"] == pytest.approx(run)
    check_parts(found, parts)


def check_parts(found: dict, parts: dict) -> None:
    """FlexAttention counts once, by its bytes or its compute; a launch has its gap; PUBLIC's parts sum to the step."""
    gpu, ms = roofline.GPUS["h100"], {name: part["ms"] for name, part in parts.items()}
    own = [call for call in found["calls"] if call["world"] == 8 and call["graph"] == "backward 512 x 1"]
    times = dict.fromkeys((True, False), 0.0)
    for call in own:  # of the two steps
        times["tem_fused" in call["name"]] += 1000 * call["count"] / 2 * roofline.seconds(call, gpu)
    pairs = 2 * 64 * roofline.visible_pairs(found["attention"], 512, found["stages"][0]["windows"])
    assert ms["stage 1: backward"] == pytest.approx(times[False])
    compute = 1000 * 10 * pairs / (gpu.bfloat16 * gpu.attention_backward)
    assert ms["stage 1: FlexAttention backward"] == pytest.approx(max(times[True], compute))
    names = ["forward", "backward", "FlexAttention forward", "FlexAttention backward", "outside of graphs, 8"]
    names = [f"stage 1: {name}" for name in names] + ["optimizers' graphs, 8", "optimizers, 8"]
    gaps = sum(parts[name]["launches"] for name in names) / 1000
    assert ms["stage 1: gaps between launches, 8"] == pytest.approx(gaps)
    step = gaps + sum(ms[name] for name in names) + ms["communication, 8"]
    assert ms["STEP of stage 1, processes: 8"] == pytest.approx(step)
    predicted, calls = roofline.predict(found, gpu)
    columns = roofline.compare(found, predicted, calls, 1)
    assert sum(columns.values()) == pytest.approx(step)
    both = sum(ms[f"stage 1: FlexAttention {way}"] for way in ("forward", "backward"))
    whole = {"attention": both, "communication": ms["communication, 8"], "gaps between launches": gaps}
    whole |= {"optimizers": ms["optimizers' graphs, 8"] + ms["optimizers, 8"]}
    assert {name: columns[name] for name in whole} == pytest.approx(whole)
    large = gpu.__class__(**dataclasses.asdict(gpu) | dict(bfloat16=1e9))  # then its compute takes longer
    part, compute = roofline.predict(found, large)[0]["stage 1: FlexAttention backward"], compute * gpu.bfloat16 / 1e9
    assert part["ms"] == pytest.approx(compute)


@pytest.mark.proof
def test_longest_step_and_validation_of_gpt2_lower_and_take_what_the_check_says(capsys: pytest.CaptureFixture[str]):
    """At full size, for one process and one sequence; of its kernels compile those that spill."""
    stages = [GPT2.stages[-1]._replace(share=1)]
    changes = dict(stages=stages, extension_steps=0, prefix_file="", batch_tokens=16384, val_tokens=262144)
    found = gpu_graphs.measure(90, SCRIPT, names="tem_fused_flex_attention_backward", **changes)
    assert gpu_graphs.failures(found | dict(spill_limit=pretend_gpu.DEVICES[90].spills)) == []
    assert any(map(len, found["kernels"]["backward 49152 x 1"].values()))
    cfg = train_gpt.resolve(dataclasses.replace(GPT2, dtype="bfloat16", **changes))  # as a GPU has it
    check.check_memory_and_time(cfg, [check.Gpu("", (9, 0), 10**12)], 1, check.Report(is_full=True))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("memory:")]
    for name, line in zip(("train 49152 x 1", "validation"), lines, strict=True):
        estimated = float(line[4]) * 2**30 - check.SPARE_MIB * 2**20
        # Validation has no gradients, which the check counts
        share = found["memory"]["1"][name]["total"] / estimated
        assert (0.97 if "train" in name else 0.9) < share < 1.03, name


def test_a_graph_break_is_reported(tmp_path: Path):
    script, source = tmp_path / "train_gpt.py", SCRIPT.read_text()
    begin = "    def features(self, tokens: Tensor, windows: Tensor) -> Tensor:\n"
    assert begin in source
    script.write_text(source.replace(begin, f"{begin}        torch._dynamo.graph_break()\n"))
    (line,) = gpu_graphs.failures(gpu_graphs.measure(90, script, **SMALL))
    assert "graph_break" in line


@pytest.mark.parametrize("arch", [89, 80])  # 86 has the shared memory of the one and the instructions of the other
def test_flex_attention_compiles_for_the_other_gpus(arch: int):
    """Its kernels alone, for heads like gpt2's: the command compiles all of gpt2."""
    found = gpu_graphs.measure(arch, SCRIPT, names="flex_attention", **SMALL | dict(head_dim=128, batch_tokens=512))
    assert len([e for graph in found["kernels"].values() for configs in graph.values() for e in configs]) >= 3
    assert gpu_graphs.failures(found | dict(spill_limit=pretend_gpu.DEVICES[arch].spills)) == []
