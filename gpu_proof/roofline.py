"""Predict the time of a step from the bytes and FLOPs of what it launches, and show what costs most."""

import argparse
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gpu_proof import gpu_graphs
from speedrun.process import ROOT

INTRODUCTION = """Predict the times of gpt2 on GPUs that are not here: every launch of its graphs and optimizers takes
as long as its bytes, FLOPs or special functions, whichever takes longest, at the rates below. Print tables and write a
JSON file.

    python -m gpu_proof roofline [--gpu h100,a100,rtx4090] [--script FILE] [--graphs FILE] [flags of train_gpt.py]

--graphs reads a file that `python -m gpu_proof gpu_graphs` wrote instead of lowering anew.
Exit codes: 0 done, 1 a graph failed, 2 something is missing, 130 interrupted."""


@dataclass(frozen=True)
class Gpu:
    """Hold a GPU's rates per second, and the shares of them that kernels reach.

    Peaks: NVIDIA's data sheets (H100 SXM, A100 80GB SXM) and the Ada whitepaper (RTX 4090), dense, accumulated in fp32.
    link: bus bandwidth of large collectives over 8 GPUs, as NCCL reaches it over NVLink or PCIe: assumed. attention,
    attention_backward: FlashAttention-2's share of the peak (arXiv:2407.08608 for the H100) times the 0.9 and 0.85
    that FlexAttention reaches of it (arXiv:2412.05496). matmul, memory: assumed, as large cuBLAS products and streaming
    kernels reach them; triton: products in a kernel of the script, assumed; strided: copies between two layouts,
    assumed. special: operations of the special function units, 16 a clock and multiprocessor (CUDA C++ Programming
    Guide) at the clock of the peaks; kernels reach `memory` of it.
    """

    arch: int
    bfloat16: float
    fp8: float
    float32: float
    bandwidth: float
    special: float
    link: float
    attention: float
    attention_backward: float
    matmul: float = 0.75
    triton: float = 0.64  # 15% less than cuBLAS
    memory: float = 0.85
    strided: float = 0.4
    launch: float = 2e-6  # seconds of the smallest kernel, assumed
    gap: float = 1e-6  # seconds between a kernel and the next, assumed


FLEX_ATTENTION = "triton_tem"  # its kernels are the only templates: their names begin so
GPUS = {
    "h100": Gpu(90, 989e12, 1979e12, 67e12, 3.35e12, 4.2e12, 340e9, attention=0.34, attention_backward=0.26),
    "a100": Gpu(80, 312e12, 312e12, 19.5e12, 2.04e12, 2.4e12, 230e9, attention=0.6, attention_backward=0.5),
    "rtx4090": Gpu(89, 165e12, 330e12, 82.6e12, 1.01e12, 5.2e12, 10e9, attention=0.6, attention_backward=0.5),
}
DOCUMENT = 690  # tokens of a document on average: FineWeb's sample of 10.2 billion in 14.9 million documents
# Parts of a step: which of our launches and parts they are, and ms of public record 89 in stages 1, 2, 3 on 8 H100 at
# the same rates. These are ESTIMATES, from reading its sources: what it moves and multiplies, with its own kernels
PUBLIC = {
    "attention": ("FlexAttention", (0.9, 4.0, 7.8)),
    "MLP: relu squared": ("relu|fused_mul_sqrt", (0.0, 0.0, 0.0)),
    "cross entropy": ("exp_gather", (1.5, 2.9, 4.3)),
    "QK-norm, rotary": ("flip|mul_squeeze_sub_transpose_view_where|stack|rsqrt_split_with_sizes_view", (1.0, 1.9, 2.8)),
    "XSA, heads that mix, nets": ("softmax|tanh|d_add_clamp_div|_div_exp|bmm|mm .*[ x]64(x|$)", (0.8, 1.7, 2.4)),
    "tables: lookups, gradients": ("embedding", (2.2, 2.7, 3.1)),
    "products of MLPs, head, attention": ("mm .*x", (11.5, 22.9, 34.5)),
    "outside of graphs": ("outside", (0.8, 0.8, 0.8)),
    "optimizers": ("optimizers", (1.9, 1.9, 1.9)),  # Newton-Schulz: 0.3
    "communication": ("communication", (2.9, 2.9, 2.9)),
    "gaps between launches": ("gaps", (1.0, 1.0, 1.0)),  # as many launches as ours
    "norms, factors, sums, casts": ("", (4.2, 7.7, 11.4)),  # all else
}
PUBLIC_RUN = sum(n * sum(ms) for n, *ms in zip((423, 424, 438), *(ms for _, ms in PUBLIC.values()), strict=True)) / 1000
# How many times as long as predicted they took: record 21, 101.6 ms a step by today's rules, of which README.md's
# command predicts 84.2; record 89, 73.8 s
CALIBRATION = 101.6 / 84.2, 73.8 / PUBLIC_RUN


def seconds(call: dict, gpu: Gpu) -> float:
    """Return the time of one launch."""
    rate = gpu.bandwidth * (gpu.strided if call["kind"] == "strided" else gpu.memory)
    precision, *own = call["kind"].split()
    peak = gpu.fp8 if precision.startswith("float8") else getattr(gpu, precision, math.inf)
    peak *= gpu.triton if own else gpu.matmul
    moved, specials = call["bytes"] + call["scattered"], call["specials"]
    return max(gpu.launch, moved / rate, call["flops"] / peak, specials / (gpu.special * gpu.memory))


def visible_pairs(attention: dict, length: int, windows: Sequence[int]) -> float:
    """Return the (query, key) pairs per head that FlexAttention computes for a sequence, over all layers.

    Documents are exponentially distributed with mean DOCUMENT; blocks are computed whole, which adds about one to what
    a token sees. A pair of heads is one of twice the length, its documents too.
    """
    total, (long, short) = 0.0, windows
    for kind in attention["kinds"]:
        if kind != "none":
            document = DOCUMENT * (1 + (kind == "paired"))
            seen = document * (1 - math.exp(-(long if kind == "long" else short) / document))
            total += length * (seen + attention["block"])
    return total


def predict(found: dict, gpu: Gpu) -> tuple[dict[str, dict], list[dict]]:
    """Return each part's launches, GB, TFLOP and ms, and the launches themselves, with their ms, most costly first."""
    cfg, calls, parts = found["configuration"], [dict(call) for call in found["calls"]], defaultdict(dict)
    for call in calls:
        call["count"] /= 1 if call["phase"] == "validation" else cfg["adam_every"]  # so many steps were taken
        call["ms"] = 1000 * call["count"] * seconds(call, gpu)

    def part(name: str, world: int, phase: str, graph: str, flops: float = 0.0, rate: float = math.inf) -> np.ndarray:
        """Add a row, and return its ms and launches. With `flops` it is FlexAttention's: its compute, or its bytes."""
        own = [c for c in calls if (c["world"], c["phase"], c["graph"]) == (world, phase, graph)]
        own = [c for c in own if c["name"].startswith(FLEX_ATTENTION) == ("FlexAttention" in name)]
        launches = sum(c["count"] for c in own)
        ms = max(sum(c["ms"] for c in own), 1000 * flops / rate)
        flops += sum(c["count"] * c["flops"] for c in own)
        row(name, ms, launches, sum(c["count"] * (c["bytes"] + c["scattered"]) for c in own), flops)
        return np.array([ms, launches])

    def row(name: str, ms: float, launches: float = 0, num_bytes: float = 0.0, flops: float = 0.0) -> None:
        parts[name] = dict(launches=float(launches), ms=float(ms), GB=num_bytes / 1e9, TFLOP=flops / 1e12)

    many, few = gpu_graphs.WORLDS[0], gpu_graphs.WORLDS[-1]
    sequences, width = cfg["batch_tokens"] // cfg["train_seq_len"], cfg["num_heads"] * cfg["head_dim"]
    moved = (many - 1) / many * found["memory"][str(many)]["communication"]
    phase, ends = f"optimizers {found['stages'][0]['phase']}", {}
    for world in (many, few):
        ends[world] = part(f"optimizers' graphs, {world}", world, phase, "optimizers")
        ends[world] += part(f"optimizers, {world}", world, phase, "")
    row(f"communication, {many}", 1000 * moved / gpu.link, num_bytes=moved)
    ends[many] += [1000 * moved / gpu.link, 0]
    runs = dict.fromkeys((many, few), 0.0)
    for number, stage in enumerate(found["stages"], 1):
        phase = stage["phase"]
        pairs = width * visible_pairs(found["attention"], stage["tokens"], stage["windows"])
        sequence = np.zeros(2)
        for name, flops, share in (("forward", 4, gpu.attention), ("backward", 10, gpu.attention_backward)):
            graph = f"{name} {phase.partition(' ')[2]}"
            sequence += part(f"stage {number}: {name}", many, phase, graph)
            attention = f"stage {number}: FlexAttention {name}"
            sequence += part(attention, many, phase, graph, flops * pairs, gpu.bfloat16 * share)
        outside = {w: part(f"stage {number}: outside of graphs, {w}", w, phase, "") for w in (many, few)}
        # With one process the second of its sequences adds to the gradients, and so do all that follow
        steps = {many: sequences / many * sequence + outside[many] + ends[many]}
        steps[few] = sequences * sequence + outside[few] + (sequences - 2) * (outside[few] - outside[many]) + ends[few]
        for world, (ms, launches) in steps.items():
            gaps = 1000 * gpu.gap * launches
            row(f"stage {number}: gaps between launches, {world}", gaps, launches)
            row(f"STEP of stage {number}, processes: {world}", ms + gaps)
            runs[world] += stage["steps"] * (ms + gaps)
    for world, ms in runs.items():
        row(f"RUN, processes: {world}", ms)
    pairs = width * visible_pairs(found["attention"], cfg["val_seq_len"], found["stages"][-1]["windows"])
    validation = part("validation", many, "validation", "validation")
    rate = gpu.bfloat16 * gpu.attention
    validation += part("FlexAttention validation", many, "validation", "validation", 4 * pairs, rate)
    ms = validation @ [1, 1000 * gpu.gap]
    row(f"VALIDATION, processes: {many}", cfg["val_tokens"] / cfg["val_seq_len"] / many * ms)
    return parts, sorted(calls, key=lambda call: -call["ms"])


def compare(found: dict, parts: dict[str, dict], calls: list[dict], number: int) -> dict[str, float]:
    """Return our ms of a step of a stage by the parts of PUBLIC: everything belongs to the first that fits."""
    world, shape = gpu_graphs.WORLDS[0], found["stages"][number - 1]["phase"].partition(" ")[2]
    launches = [c for c in calls if c["world"] == world and c["graph"] in (f"forward {shape}", f"backward {shape}")]
    own = [(c["name"], c["ms"]) for c in launches if not c["name"].startswith(FLEX_ATTENTION)]
    names = [f"stage {number}: FlexAttention {way}" for way in ("forward", "backward")]
    names += [f"stage {number}: {name}, {world}" for name in ("outside of graphs", "gaps between launches")]
    names += [f"{name}, {world}" for name in ("optimizers' graphs", "optimizers", "communication")]
    own += [(name, parts[name]["ms"]) for name in names]
    ours = dict.fromkeys(PUBLIC, 0.0)
    for name, ms in own:
        ours[next(part for part, (pattern, _) in PUBLIC.items() if re.search(pattern, name))] += ms
    return ours


def readable(name: str) -> str:
    """Return what a kernel's name says it computes."""
    return re.sub(r"^triton_(poi|red|per|tem|spl)_fused_?|_\d+$", "", name).strip("_") or name


def table(name: str, found: dict, parts: dict[str, dict], calls: list[dict]) -> str:
    lines = [f"## {name}: {found['device']}", "", "| part | launches | GB | TFLOP | ms |", "|---|---|---|---|---|"]
    for part, p in parts.items():
        cells = [f"{p['launches']:g}", *(f"{p[key]:,.2f}" for key in ("GB", "TFLOP", "ms"))]
        lines.append(f"| {part} | {' | '.join(cell if float(cell.replace(',', '')) else '' for cell in cells)} |")
    lines += ["", *gpu_graphs.memory_lines(found), f"Calibrated: times {sum(CALIBRATION) / 2:.2f} (README.md)"]
    if name == "h100":
        stages = [compare(found, parts, calls, number) for number, _ in enumerate(found["stages"], 1)]
        lines += ["", "| ms of a step, by stage | here | public record 89, estimated |", "|---|---|---|"]
        lines += [f"| {part} | {[round(s[part], 1) for s in stages]} | {[*ms]} |" for part, (_, ms) in PUBLIC.items()]
    lines += ["", "| graph | computes | kind | times | GB each | ms |", "|---|---|---|---|---|---|"]
    longest = max(found["stages"], key=lambda stage: stage["tokens"])["phase"]
    for call in [c for c in calls if c["world"] == gpu_graphs.WORLDS[0] and c["phase"].endswith(longest)][:20]:
        cells = [call["graph"] or call["phase"], readable(call["name"])[:90], call["kind"], f"{call['count']:g}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {call['bytes'] / 1e9:.3f} | {call['ms']:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    rates = "\n".join(
        f"{name}: {', '.join(f'{k} {v:g}' for k, v in asdict(gpu).items())}" for name, gpu in GPUS.items()
    )
    introduction = f"{INTRODUCTION}\n\nRates per second:\n{rates}"
    parser = argparse.ArgumentParser(prog="python -m gpu_proof roofline", description=introduction, **options)
    parser.add_argument("--gpu", default=",".join(GPUS), help="(default: %(default)s)")
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", metavar="FILE")
    parser.add_argument("--graphs", type=Path, metavar="FILE", help="JSON of gpu_graphs")
    out = Path("logs") / time.strftime("roofline-%Y%m%d-%H%M%S.json")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help="default: logs/roofline-TIME.json")
    args, flags = parser.parse_known_args(argv)
    if unknown := set(names := args.gpu.split(",")) - set(GPUS):
        parser.error(f"--gpu {args.gpu}: {min(unknown)!r} is none of {','.join(GPUS)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(args.graphs.read_text()) if args.graphs else dict(script=str(args.script), flags=flags)
    document = dict(script=known["script"], flags=known["flags"], document_tokens=DOCUMENT, gpus={})
    for name in names:
        gpu = GPUS[name]
        if args.graphs:
            found = known["architectures"][str(gpu.arch)]
        else:
            found = gpu_graphs.measure(gpu.arch, args.script, flags, names="^$")
        if not found["failed"] and len(found["memory"]) < len(gpu_graphs.WORLDS):
            found["failed"] = "the step's sequences do not divide by 8: another --batch_tokens"
        if found["failed"]:
            print(f"## {name}\n\nFAILED: {found['failed']}")
            document["gpus"][name] = dict(failed=found["failed"])
            continue
        parts, calls = predict(found, gpu)
        document["gpus"][name] = dict(rates=asdict(gpu), parts=parts, calls=calls)
        print(f"{table(name, found, parts, calls)}\n", flush=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")
    return int(any("failed" in gpu for gpu in document["gpus"].values()))
