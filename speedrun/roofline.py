"""Predict the ms of a step on one H100: each launch takes as long as its bytes or its FLOPs, whichever takes longer."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from speedrun.cards import H100 as CARD
from speedrun.logs import markdown

DOCUMENT = 690  # tokens of a document on average: FineWeb's sample of 10.2 billion in 14.9 million documents


class Rates(NamedTuple):
    """Hold the H100's peaks per second, and what kernels reach.

    link: bus bandwidth of large collectives over 8 GPUs, as NCCL reaches it over NVLink: assumed. `matmul`, `triton`,
    `memory` and `host` were measured on one H100 on 2026-11-26, all others on 2026-11-28 (docs/gpu.md).
    """

    bfloat16: float = CARD.bf16 * 1e12
    fp8: float = CARD.fp8 * 1e12
    float32: float = 67e12
    bandwidth: float = CARD.bandwidth * 1e12
    link: float = 340e9
    attention: float = 0.308
    attention_backward: float = 0.236
    matmul: float = 0.735
    triton: float = 0.45  # products in a kernel of the script: measured in bf16
    triton_fp8: float = 0.253  # the same in FP8, as it transposes blocks byte by byte
    memory: float = 0.84
    tail: float = 41e-6  # seconds that a kernel of attention takes beyond its products
    product: float = 5e-6  # the same of a product: many launch a second kernel, or end with few blocks
    launch: float = 1.25e-6  # seconds of any kernel beyond its bytes
    gap: float = 0.45e-6  # from one kernel to the next: a step took 0.25 and 0.43 ms more than its kernels
    host: float = 42e-6  # seconds of a CPU for each launch outside of CUDA graphs; a step takes no less


H100 = Rates()
# Parts of a step: the names of their launches, of which each belongs to the first part that fits, and how many times as
# long as the longer of bytes and FLOPs says it took on one H100 (2026-11-28), in the mean of stages 1 and 3
PARTS = {
    "attention": ("triton_tem", 1.0),  # FlexAttention's kernels are the only templates
    "MLP: relu squared, scales of rows": ("relu(?!_squared_backward)", 0.945),
    "cross entropy": ("cross_entropy|gather", 4.81),  # exponentials decide: see TARGET
    "n-grams: sums": ("copy_index_add_view_0$", 1.32),  # of 2026-11-26, as random tokens collide
    "QK-norm, rotary": ("flip|mul_squeeze_sub_transpose_view_where|stack|rsqrt_split_with_sizes_view", 1.09),
    "XSA, nets": ("tanh|clamp_div|_div_exp|bmm|mm .*[ x]64(x|$)", 1.08),
    "tables: lookups, gradients": ("embedding|index_add", 1.647),  # sums and reads of scattered rows
    "products in FP8": ("_scaled_mm .*x|relu_squared_backward", 1.0),
    "products in bf16": ("mm .*x", 1.0),
    "norms, factors, sums, casts": ("", 1.225),  # all else in graphs: 29 of them store copies with rows for columns
    "n-grams: rows and their steps": ("", 1.32),  # the same
    "outside of graphs": ("", 2.5),  # MLPs' gradients, by columns: PyTorch adds them one by one, at a third of the rate
    "optimizers, averages": ("", 0.93),
    "between kernels": ("", 1.0),
    "communication": ("", 1.0),
    "waiting for the host": ("", 1.0),
}
TARGET = 0.89  # that the cross entropy takes longer for each target, with which every logit is compared


def seconds(call: dict, gpu: Rates, factor: float = 1.0) -> float:
    """Return the time of one launch. factor: how many times as long as said it takes for its bytes or FLOPs."""
    precision, *own = call["kind"].split()
    is_fp8 = precision.startswith("float8")
    peak = gpu.fp8 if is_fp8 else getattr(gpu, precision, math.inf)
    share = (gpu.triton_fp8 if is_fp8 else gpu.triton) if own else gpu.matmul
    return gpu.launch + factor * max(call["bytes"] / (gpu.bandwidth * gpu.memory), call["flops"] / (peak * share))


def attention_seconds(found: dict, stage: dict, gpu: Rates) -> float:
    """Return the time of FlexAttention for a sequence, over all layers and the pointer.

    Documents are exponentially distributed; blocks are computed whole, which adds about one to what a token sees. A
    pair of heads is one of twice the length, its documents too.
    """
    total = 0.0
    cfg = found["configuration"]
    for layer in found["attention"]:
        qk, v = layer["qk_dim"], layer["v_dim"]
        document = DOCUMENT * layer["heads_per_pair"]
        seen = document * (1 - math.exp(-stage["windows"][layer["window"]] / document))
        pairs = layer["heads"] * stage["tokens"] * (seen + cfg["block_size"])
        flops = (2 * qk + 2 * v) / gpu.attention + (6 * qk + 4 * v) / gpu.attention_backward
        total += pairs * flops / gpu.bfloat16 + 2 * gpu.tail
    return total


def rows_apart(table_class: type, part: Callable) -> type:
    """Return a table of n-grams whose steps on its rows are told apart from others. part(name): a context."""

    class Rows(table_class):
        def fetch(self, *args):
            with part("rows"):
                return super().fetch(*args)

        def update(self, *args):
            with part("rows"):
                super().update(*args)

    return Rows


LOOK_UPS = "embedding", "index_select", "zeros", "zero_", "fill_"  # as ATen calls them, and as a profile does


def part_of(call: dict) -> str:
    """Return the part of a step that a launch belongs to."""
    kind = call["phase"].split()[0]
    if kind == "optimizers":
        return "optimizers, averages"
    if kind == "communication":  # in a profile
        return kind
    if not call["graph"] and call["name"] == "index_add_":
        return "n-grams: sums"
    if kind == "rows" or (not call["graph"] and call["name"] in LOOK_UPS):
        return "n-grams: rows and their steps"
    if not call["graph"]:
        return "outside of graphs"
    return next(part for part, (pattern, _) in PARTS.items() if re.search(pattern, call["name"]))


def predict_step(found: dict, stage: dict, gpu: Rates = H100) -> dict:
    """Return the launches of a step of a stage, and the ms of its parts.

    FlexAttention takes its bytes or its compute, the larger.
    """
    phase, world = stage["phase"], found["one_of"]
    launches, by_host, ms = 0.0, 1.0, dict.fromkeys(PARTS, 0.0)
    logit = 1 if any(call["kind"].startswith("float8") for call in found["calls"]) else 2  # bytes
    for call in found["calls"]:
        if call["phase"].endswith(phase):
            n = call["count"] / found["cycle"]
            part = part_of(call)
            factor = PARTS[part][1]
            if part == "cross entropy":
                factor = (factor + TARGET * int(phase.split()[3])) / logit
            tail = gpu.product * (call["flops"] > 0 and part != "XSA, nets")  # which are narrow, and one kernel each
            ms[part] += 1000 * n * (seconds(call, gpu, factor) + tail)
            launches += n
            by_host += n * (call["phase"] != phase or not call["graph"])  # others are replayed by a CUDA graph
    ms["attention"] = max(ms["attention"], 1000 * attention_seconds(found, stage, gpu))
    ms["between kernels"] = 1000 * gpu.gap * launches
    ms["communication"] = 1000 * (1 - 1 / world) * found["communication"][phase] / gpu.link
    ms["waiting for the host"] = max(0.0, 1000 * gpu.host * by_host - sum(ms.values()))
    return dict(first=stage["first"], launches=launches, ms=ms, sum=sum(ms.values()))


def predict(found: dict) -> list[dict]:
    """Return a step of each stage, if it has a sequence for each process."""
    cfg = found["configuration"]
    is_whole = cfg["batch_tokens"] == cfg["train_seq_len"] * found["one_of"]
    return [predict_step(found, stage) for stage in found["stages"] if is_whole]


def table(found: dict, measured: dict[str, dict[str, float]]) -> str:
    """Return the ms of parts by stage and the seconds of all steps.

    measured: by first step; if there are any, only those stages are shown, with the ms measured in brackets.
    """
    firsts = [str(step["first"]) for step in found["predicted"]]
    shown = [i for i, first in enumerate(firsts) if not measured or first in measured]
    rows = []
    for name in dict.fromkeys(part.partition(" in ")[0] for part in (*PARTS, "sum")):  # "products" are two parts
        steps = [step["ms"] | {"sum": step["sum"]} for step in found["predicted"]]
        ms = [sum(n for part, n in step.items() if part.startswith(name)) for step in steps]
        took = [measured.get(first, {}).get(name) for first in firsts]
        cells = [f"{n:.2f}" if own is None else f"{n:.2f} ({own:.2f})" for n, own in zip(ms, took, strict=True)]
        run = sum(stage["steps"] * n for stage, n in zip(found["stages"], ms, strict=True)) / 1000
        rows += [[name, *(cells[i] for i in shown), f"{run:.1f}"]] if run else []
    rows.append(["launches", *(f"{found['predicted'][i]['launches']:g}" for i in shown), ""])
    return markdown(f"ms of a step (as measured), from step|{'|'.join(firsts[i] for i in shown)}|run, s", rows)
