"""Predict the times of gpt2 on GPUs that are not here, and show which parts cost most.

    python -m gpu_proof roofline [--gpu h100,a100,rtx4090] [--script FILE] [--graphs FILE] [FLAG ...]

Every launch of its graphs and optimizers takes as long as its bytes or its FLOPs, whichever takes longer, at the rates
below. --graphs reads a file that `python -m gpu_proof gpu_graphs` wrote instead of lowering anew, with the flags of
train_gpt.py. The tables go to a JSON file, too.
Exit codes: 0 done, 1 a graph failed, 2 something is missing, 130 interrupted.
"""

import argparse
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
    link: bus bandwidth of large collectives over 8 GPUs, as NCCL reaches it over NVLink or PCIe: assumed. attention,
    attention_backward: FlashAttention-2's share of the peak (arXiv:2407.08608 for the H100) times the 0.9 and 0.85
    that FlexAttention reaches of it (arXiv:2412.05496). matmul, memory: assumed, as large cuBLAS products and streaming
    kernels reach them; triton: products in a kernel of the script, assumed.
    """

    arch: int
    bfloat16: float
    fp8: float
    float32: float
    bandwidth: float
    link: float
    attention: float
    attention_backward: float
    matmul: float = 0.75
    triton: float = 0.64  # 15% less than cuBLAS
    memory: float = 0.85
    launch: float = 2e-6  # seconds of the smallest kernel, assumed
    gap: float = 1e-6  # seconds between a kernel and the next, assumed


FLEX_ATTENTION = "triton_tem"  # its kernels are the only templates: their names begin so
GPUS = {
    "h100": Gpu(90, 989e12, 1979e12, 67e12, 3.35e12, 340e9, attention=0.34, attention_backward=0.26),
    "a100": Gpu(80, 312e12, 312e12, 19.5e12, 2.04e12, 230e9, attention=0.6, attention_backward=0.5),
    "rtx4090": Gpu(89, 165e12, 330e12, 82.6e12, 1.01e12, 10e9, attention=0.6, attention_backward=0.5),
}
DOCUMENT = 690  # tokens of a document on average: FineWeb's sample of 10.2 billion in 14.9 million documents
# Parts of a step: the names of our launches, of which each belongs to the first part that fits, and ms of public record
# 89 in stages 1, 2, 3 on 8 H100 at the same rates. These are ESTIMATES, from reading its sources: what it moves and
# multiplies, with its own kernels
PARTS = {
    "attention": (FLEX_ATTENTION, (0.9, 4.0, 7.8)),
    "MLP: relu squared": ("relu|fused_mul_sqrt", (0.0, 0.0, 0.0)),
    "cross entropy": ("exp_gather", (1.5, 2.9, 4.3)),
    "QK-norm, rotary": ("flip|mul_squeeze_sub_transpose_view_where|stack|rsqrt_split_with_sizes_view", (1.0, 1.9, 2.8)),
    "XSA, heads that mix, nets": ("softmax|tanh|d_add_clamp_div|_div_exp|bmm|mm .*[ x]64(x|$)", (0.8, 1.7, 2.4)),
    "tables: lookups, gradients": ("embedding", (2.2, 2.7, 3.1)),
    "products of MLPs, head, attention": ("mm .*x", (11.5, 22.9, 34.5)),
    "norms, factors, sums, casts": ("", (4.2, 7.7, 11.4)),  # all else in graphs; the others lie outside
    "outside of graphs": ("", (0.8, 0.8, 0.8)),
    "optimizers": ("", (1.9, 1.9, 1.9)),  # Newton-Schulz: 0.3
    "communication": ("", (2.9, 2.9, 2.9)),
    "gaps between launches": ("", (1.0, 1.0, 1.0)),  # as many launches as ours
}
PUBLIC_RUN = sum(n * sum(ms) for n, *ms in zip((423, 424, 438), *(ms for _, ms in PARTS.values()), strict=True)) / 1000
# How many times as long as predicted they took: record 21, 101.6 ms a step by today's rules, of which README.md's
# command predicts 83.2; record 89, 73.8 s
CALIBRATION = 101.6 / 83.2, 73.8 / PUBLIC_RUN


def seconds(call: dict, gpu: Gpu) -> float:
    """Return the time of one launch."""
    precision, *own = call["kind"].split()
    peak = gpu.fp8 if precision.startswith("float8") else getattr(gpu, precision, math.inf)
    return max(
        gpu.launch,
        call["bytes"] / (gpu.bandwidth * gpu.memory),
        call["flops"] / (peak * (gpu.triton if own else gpu.matmul)),
    )


def visible_pairs(attention: dict, length: int, windows: dict[str, int]) -> float:
    """Return the (query, key) pairs per head that FlexAttention computes for a sequence, over all layers.

    Documents are exponentially distributed with mean DOCUMENT; blocks are computed whole, which adds about one to what
    a token sees. A pair of heads is one of twice the length, its documents too.
    """
    total = 0.0
    for kind in attention["kinds"]:
        if kind != "none":
            document = DOCUMENT * (1 + (kind == "paired"))
            seen = document * (1 - math.exp(-windows[kind] / document))
            total += length * (seen + attention["block"])
    return total


def part_of(call: dict) -> str:
    """Return the part of a step that a launch belongs to."""
    if call["phase"].startswith("optimizers"):
        return "optimizers"
    if not call["graph"]:
        return "outside of graphs"
    return next(part for part, (pattern, _) in PARTS.items() if re.search(pattern, call["name"]))


def predict_step(found: dict, gpu: Gpu, stage: dict, world: int) -> dict:
    """Return the launches of a step of a stage on one of `world` processes, and the ms of its parts.

    FlexAttention takes its bytes or its compute, the larger. Of many sequences of a process two were lowered: each
    after the first adds its gradients to those before.
    """
    cfg, many, phase = found["configuration"], gpu_graphs.WORLDS[0], stage["phase"]
    sequences = cfg["batch_tokens"] // cfg["train_seq_len"] // world
    times = {(world, phase, False): max(1, sequences - 1), (world, f"optimizers {phase}", False): 1}
    times |= {(many, phase, True): sequences, (world, f"optimizers {phase}", True): 1}
    if sequences > 1:
        times[many, phase, False] = 2 - sequences
    launches, ms = 0.0, dict.fromkeys(PARTS, 0.0)
    for call in found["calls"]:
        if n := times.get((call["world"], call["phase"], call["graph"] != ""), 0) * call["count"] / cfg["adam_every"]:
            ms[part_of(call)] += 1000 * n * seconds(call, gpu)
            launches += n
    pairs = sequences * cfg["num_heads"] * cfg["head_dim"]
    pairs *= visible_pairs(found["attention"], stage["tokens"], stage["windows"])
    compute = pairs * (4 / gpu.attention + 10 / gpu.attention_backward) / gpu.bfloat16
    ms["attention"] = max(ms["attention"], 1000 * compute)
    ms["communication"] = 1000 * (1 - 1 / world) * found["memory"][str(world)]["communication"] / gpu.link
    ms["gaps between launches"] = 1000 * gpu.gap * launches
    return dict(launches=launches, ms=ms, sum=sum(ms.values()))


def predict(found: dict, gpu: Gpu) -> dict:
    """Return the steps of all stages, and the seconds of all steps, on one of 8 processes and on the only one."""
    worlds = gpu_graphs.WORLDS[0], gpu_graphs.WORLDS[-1]
    steps = {str(world): [predict_step(found, gpu, stage, world) for stage in found["stages"]] for world in worlds}
    runs = {
        world: sum(stage["steps"] * step["sum"] for stage, step in zip(found["stages"], own, strict=True)) / 1000
        for world, own in steps.items()
    }
    return dict(steps=steps, seconds=runs, memory=found["memory"])


def table(name: str, found: dict, predicted: dict) -> str:
    lines = [f"## {name}: {found['device']}"]
    for world, steps in predicted["steps"].items():
        numbers = range(1, len(steps) + 1)
        lines += ["", f"| ms of a step of stage, processes: {world} | {' | '.join(map(str, numbers))} |"]
        lines += ["|---|" + "---|" * len(steps)]
        rows = {part: [f"{step['ms'][part]:.1f}" for step in steps] for part in PARTS}
        rows |= {"sum": [f"{step['sum']:.1f}" for step in steps]}
        rows |= {"launches": [f"{step['launches']:g}" for step in steps]}
        lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in rows.items()]
    factor = sum(CALIBRATION) / len(CALIBRATION)
    runs = [f"{run:.1f} s, calibrated {factor * run:.0f} (processes: {n})" for n, run in predicted["seconds"].items()]
    return "\n".join([*lines, "", f"All steps: {'; '.join(runs)}", *gpu_graphs.memory_lines(found)])


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
    document: dict = dict(script=known["script"], flags=known["flags"], calibration=CALIBRATION, gpus={})
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
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return int(any("failed" in gpu for gpu in document["gpus"].values()))
