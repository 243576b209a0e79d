"""Predict the times of gpt2 on GPUs that are not here, and show which parts cost most.

    python -m gpu_proof roofline [--gpu h100,a100,rtx4090] [--script FILE] [--graphs FILE] [FLAG ...]

Every launch of its graphs and optimizers takes as long as its bytes or its FLOPs, whichever takes longer, at the rates
below. --graphs reads a file that `python -m gpu_proof gpu_graphs` wrote instead of lowering anew, with the flags of
train_gpt.py. The tables go to a JSON file, too.
Exit codes: 0 done, 1 a graph failed, 2 something is missing, 130 interrupted.
"""

import argparse
import itertools
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_proof import gpu_graphs


@dataclass(frozen=True)
class Gpu:
    """Hold a GPU's rates per second, and the shares of them that kernels reach.

    Peaks: NVIDIA's data sheets (H100 SXM, A100 80GB SXM) and the Ada whitepaper (RTX 4090), dense, accumulated in fp32.
    link: bus bandwidth of large collectives over 8 GPUs, as NCCL reaches it over NVLink or PCIe: assumed. All else was
    measured on one H100 (README.md), and is assumed for the others but for attention: there it is FlashAttention-2's
    share of the peak times the 0.9 and 0.85 that FlexAttention reaches of it (arXiv:2412.05496).
    """

    arch: int
    bfloat16: float
    fp8: float
    float32: float
    bandwidth: float
    link: float
    attention: float
    attention_backward: float
    matmul: float = 0.735
    triton: float = 0.45  # products in a kernel of the script
    memory: float = 0.84
    tail: float = 35e-6  # seconds that a kernel of attention takes beyond its products
    launch: float = 2e-6  # seconds of the smallest kernel
    host: float = 42e-6  # seconds of a CPU for each launch outside of CUDA graphs; a step takes no less


FLEX_ATTENTION = "triton_tem"  # its kernels are the only templates: their names begin so
GPUS = {
    "h100": Gpu(90, 989e12, 1979e12, 67e12, 3.35e12, 340e9, attention=0.311, attention_backward=0.238),
    "a100": Gpu(80, 312e12, 312e12, 19.5e12, 2.04e12, 230e9, attention=0.6, attention_backward=0.5),
    "rtx4090": Gpu(89, 165e12, 330e12, 82.6e12, 1.01e12, 10e9, attention=0.6, attention_backward=0.5),
}
# Parts of a step: the names of their launches, of which each belongs to the first part that fits; how many times as
# long as its bytes and FLOPs say it took on one H100; and the seconds of a run of public record 92 on 8 H100. These are
# ESTIMATES at the same rates: what it moves and multiplies, with its own kernels
PARTS = {
    "attention": (FLEX_ATTENTION, 1.0, 3.4),
    "MLP: relu squared, scales of rows": ("relu(?!_squared_backward)", 1.03, 1.2),
    "cross entropy": ("cross_entropy|gather", 1.98, 1.0),
    "n-grams: rows, their sums and steps": ("index_add", 1.32, 1.0),
    "QK-norm, rotary": ("flip|mul_squeeze_sub_transpose_view_where|stack|rsqrt_split_with_sizes_view", 1.83, 1.5),
    "XSA, nets": ("tanh|clamp_div|_div_exp|bmm|mm .*[ x]64(x|$)", 1.25, 0.8),
    "tables: lookups, gradients": ("embedding", 1.18, 0.9),
    "products of MLPs, head, attention": ("mm .*x|relu_squared_backward", 1.0, 13.0),
    "norms, factors, sums, casts": ("", 1.1, 7.4),  # all else in graphs; the others lie outside
    "outside of graphs": ("", 1.32, 0.2),
    "optimizers, averages": ("", 1.36, 1.4),
    "communication": ("", 1.0, 2.6),
    "waiting for the host": ("", 1.0, 0.0),
}


def seconds(call: dict, gpu: Gpu) -> float:
    """Return the time of one launch."""
    precision, *own = call["kind"].split()
    peak = gpu.fp8 if precision.startswith("float8") else getattr(gpu, precision, math.inf)
    return max(
        gpu.launch,
        call["bytes"] / (gpu.bandwidth * gpu.memory),
        call["flops"] / (peak * (gpu.triton if own else gpu.matmul)),
    )


def attention_seconds(found: dict, stage: dict, gpu: Gpu) -> float:
    """Return the time of FlexAttention for a sequence, over all layers.

    Documents are exponentially distributed; blocks are computed whole, which adds about one to what a token sees. A
    pair of heads is one of twice the length, its documents too.
    """
    total = 0.0
    for kind, (qk, v) in zip(found["attention"]["kinds"], found["attention"]["widths"], strict=True):
        is_pair = kind == "paired"
        document = gpu_graphs.DOCUMENT * (1 + is_pair)
        seen = document * (1 - math.exp(-stage["windows"]["short" if is_pair else kind] / document))
        pairs = found["configuration"]["num_heads"] * stage["tokens"] * (seen + found["attention"]["block"])
        flops = (2 * qk + 2 * v) / gpu.attention + (6 * qk + 4 * v) / gpu.attention_backward
        total += pairs * flops / gpu.bfloat16 + 2 * gpu.tail
    return total


def part_of(call: dict) -> str:
    """Return the part of a step that a launch belongs to."""
    kind = call["phase"].split()[0]
    if kind == "optimizers":
        return "optimizers, averages"
    if kind == "rows" or (not call["graph"] and call["name"] in ("embedding", "index_add_", "zeros")):
        return "n-grams: rows, their sums and steps"
    if not call["graph"]:
        return "outside of graphs"
    return next(part for part, (pattern, *_) in PARTS.items() if re.search(pattern, call["name"]))


def predict_step(found: dict, gpu: Gpu, stage: dict, world: int) -> dict:
    """Return the launches of a step of a stage on one of `world` processes, and the ms of its parts.

    FlexAttention takes its bytes or its compute, the larger. Of many sequences of a process two were lowered: each
    after the first adds its gradients to those before.
    """
    cfg, many, phase = found["configuration"], gpu_graphs.WORLDS[0], stage["phase"]
    sequences = cfg["batch_tokens"] // cfg["train_seq_len"] // world
    launches, by_host, ms = 0.0, 1.0 * sequences, dict.fromkeys(PARTS, 0.0)
    for call in found["calls"]:
        is_own = call["world"] == world
        if call["phase"] != phase or call["name"] == "zeros":  # once in a step or cycle
            times = is_own * call["phase"].endswith(phase)
        elif call["graph"]:
            times = sequences * (call["world"] == many)
        else:
            times = is_own * max(1, sequences - 1) + (call["world"] == many) * min(0, 2 - sequences)
        if n := times * call["count"] / found["cycle"]:
            part = part_of(call)
            ms[part] += 1000 * n * seconds(call, gpu) * PARTS[part][1]
            launches += n
            by_host += n * (call["phase"] != phase or not call["graph"])  # others are replayed by a CUDA graph
    ms["attention"] = max(ms["attention"], 1000 * sequences * attention_seconds(found, stage, gpu))
    ms["communication"] = 1000 * (1 - 1 / world) * found["communication"][str(world)][phase] / gpu.link
    ms["waiting for the host"] = max(0.0, 1000 * gpu.host * by_host - sum(ms.values()))
    return dict(launches=launches, ms=ms, sum=sum(ms.values()))


def predict(found: dict, gpu: Gpu) -> dict:
    """Return the steps of all stages, and the seconds of all steps, on one of 8 processes and on the only one."""
    worlds = gpu_graphs.WORLDS[0], gpu_graphs.WORLDS[-1]
    firsts = [0, *itertools.accumulate(stage["steps"] for stage in found["stages"])]
    steps = {
        str(world): [
            predict_step(found, gpu, stage, world) | dict(first=first)
            for stage, first in zip(found["stages"], firsts, strict=False)
        ]
        for world in worlds
    }
    runs = {
        world: {
            part: sum(stage["steps"] * step["ms"][part] for stage, step in zip(found["stages"], own, strict=True))
            / 1000
            for part in PARTS
        }
        for world, own in steps.items()
    }
    return dict(steps=steps, seconds=runs, memory=found["memory"])


def table(name: str, found: dict, predicted: dict) -> str:
    lines = [f"## {name}: {found['device']}"]
    for world, steps in predicted["steps"].items():
        numbers = range(1, len(steps) + 1)
        lines += ["", f"| ms of a step of part, processes: {world} | {' | '.join(map(str, numbers))} | run, s |"]
        lines += ["|---|" + "---|" * (len(steps) + 1)]
        runs = predicted["seconds"][world]
        rows = {part: [f"{step['ms'][part]:.1f}" for step in steps] + [f"{runs[part]:.1f}"] for part in PARTS}
        rows |= {"sum": [f"{step['sum']:.1f}" for step in steps] + [f"{sum(runs.values()):.1f}"]}
        rows |= {"launches": [f"{step['launches']:g}" for step in steps] + [""]}
        lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items()]
    return "\n".join([*lines, "", *gpu_graphs.memory_lines(found)])


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options: dict[str, Any] = dict(usage=argparse.SUPPRESS, allow_abbrev=False)
    options |= dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    rates = [f"{name}: {', '.join(f'{k} {v:g}' for k, v in asdict(gpu).items())}" for name, gpu in GPUS.items()]
    introduction = "\n".join([__doc__, "Rates per second:", *rates])
    parser = argparse.ArgumentParser(prog="python -m gpu_proof roofline", description=introduction, **options)
    parser.add_argument("--gpu", default=",".join(GPUS), help="(default: %(default)s)")
    parser.add_argument("--script", type=Path, default=Path("train_gpt.py"), metavar="FILE")
    parser.add_argument("--graphs", type=Path, metavar="FILE", help="JSON of gpu_graphs")
    out = Path("logs") / time.strftime("roofline-%Y%m%d-%H%M%S.json")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="default: logs/roofline-TIME.json")
    args, flags = parser.parse_known_args(argv)
    if unknown := set(names := args.gpu.split(",")) - set(GPUS):
        parser.error(f"--gpu {args.gpu}: {min(unknown)!r} is none of {','.join(GPUS)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known: dict = json.loads(args.graphs.read_text()) if args.graphs else dict(script=str(args.script), flags=flags)
    document: dict = dict(script=known["script"], flags=known["flags"], gpus={})
    for name in names:
        arch = GPUS[name].arch
        if args.graphs:
            found = known["architectures"][str(arch)]
        else:
            found = gpu_graphs.measure(arch, args.script, flags, names="^$")
        if not found["failed"] and len(found["memory"]) < len(gpu_graphs.WORLDS):
            found["failed"] = "the step's sequences do not divide by 8: another --batch_tokens"
        if found["failed"]:
            print(f"## {name}\n\nFAILED: {found['failed']}")
            document["gpus"][name] = dict(failed=found["failed"])
            continue
        document["gpus"][name] = dict(rates=asdict(GPUS[name])) | predict(found, GPUS[name])
        print(f"{table(name, found, document['gpus'][name])}\n", flush=True)
    args.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return int(any("failed" in gpu for gpu in document["gpus"].values()))
