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

from gpu_proof import gpu_graphs
from records.process import ROOT

INTRODUCTION = """Predict the times of gpt2 on GPUs that are not here: every launch of its graphs and optimizers takes
as long as its bytes or its FLOPs, whichever takes longer, at the rates below. Print tables, write a JSON file.

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
    kernels reach them; strided: copies between two layouts, assumed.
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
    memory: float = 0.85
    strided: float = 0.4
    launch: float = 2e-6  # seconds of the smallest kernel


GPUS = {
    "h100": Gpu(90, 989e12, 1979e12, 67e12, 3.35e12, 340e9, attention=0.34, attention_backward=0.26),
    "a100": Gpu(80, 312e12, 312e12, 19.5e12, 2.04e12, 230e9, attention=0.6, attention_backward=0.5),
    "rtx4090": Gpu(89, 165e12, 330e12, 82.6e12, 1.01e12, 10e9, attention=0.6, attention_backward=0.5),
}
DOCUMENT = 690  # tokens of a document on average: FineWeb's sample of 10.2 billion in 14.9 million documents
PUBLIC = "Calibrated: times 1.16. Public record 89 on 8 H100: 73.8 s; record 85, by stage: 32.4, 58.1, 84.0, 84.4 ms"


def seconds(call: dict, gpu: Gpu) -> float:
    """Return the time of one launch."""
    rate = gpu.bandwidth * (gpu.strided if call["kind"] == "strided" else gpu.memory)
    peak = gpu.fp8 if call["kind"].startswith("float8") else getattr(gpu, call["kind"], math.inf)
    return max(gpu.launch, call["bytes"] / rate, call["flops"] / (peak * gpu.matmul))


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

    def part(name: str, world: int, phase: str, graph: str) -> float:
        own = [c for c in calls if (c["world"], c["phase"], c["graph"]) == (world, phase, graph)]
        sums = dict(launches=sum(c["count"] for c in own), ms=sum(c["ms"] for c in own))
        sums |= dict(GB=sum(c["count"] * c["bytes"] for c in own) / 1e9)
        parts[name] = sums | dict(TFLOP=sum(c["count"] * c["flops"] for c in own) / 1e12)
        return sums["ms"]

    def attention(name: str, length: int, windows: Sequence[int], flops: float, efficiency: float) -> float:
        total = flops * cfg["num_heads"] * cfg["head_dim"] * visible_pairs(found["attention"], length, windows)
        ms = 1000 * total / (gpu.bfloat16 * efficiency)
        parts[name] = dict(launches=0, ms=ms, GB=0.0, TFLOP=total / 1e12)
        return ms

    def result(name: str, ms: float) -> None:
        parts[name] = dict(launches=0, ms=ms, GB=0.0, TFLOP=0.0)

    many, few = gpu_graphs.WORLDS[0], gpu_graphs.WORLDS[-1]
    sequences = cfg["batch_tokens"] // cfg["train_seq_len"]
    moved = (many - 1) / many * found["memory"][str(many)]["communication"]
    ends = {}
    for world in (many, few):
        ends[world] = part(
            f"Newton-Schulz, {world}", world, f"optimizers {found['stages'][0]['phase']}", "Newton-Schulz"
        )
        ends[world] += part(f"optimizers, {world}", world, f"optimizers {found['stages'][0]['phase']}", "")
    parts[f"communication, {many}"] = dict(launches=0, ms=1000 * moved / gpu.link, GB=moved / 1e9, TFLOP=0.0)
    ends[many] += parts[f"communication, {many}"]["ms"]
    runs = dict.fromkeys((many, few), 0.0)
    for number, stage in enumerate(found["stages"], 1):
        phase, tokens, windows = stage["phase"], stage["tokens"], stage["windows"]
        graphs = {name: f"{name} {phase.partition(' ')[2]}" for name in ("forward", "backward")}
        sequence = sum(part(f"stage {number}: {name}", many, phase, graph) for name, graph in graphs.items())
        sequence += attention(f"stage {number}: FlexAttention forward", tokens, windows, 4, gpu.attention)
        sequence += attention(f"stage {number}: FlexAttention backward", tokens, windows, 10, gpu.attention_backward)
        outside = {w: part(f"stage {number}: outside of graphs, {w}", w, phase, "") for w in (many, few)}
        # With one process the second of its sequences adds to the gradients, and so do all that follow
        steps = {many: sequences / many * sequence + outside[many] + ends[many]}
        steps[few] = sequences * sequence + outside[few] + (sequences - 2) * (outside[few] - outside[many]) + ends[few]
        for world, ms in steps.items():
            result(f"STEP of stage {number}, processes: {world}", ms)
            runs[world] += stage["steps"] * ms
    for world, ms in runs.items():
        result(f"RUN, processes: {world}", ms)
    validation = part("validation", many, "validation", "validation")
    windows = found["stages"][-1]["windows"]
    validation += attention("FlexAttention validation", cfg["val_seq_len"], windows, 4, gpu.attention)
    result(f"VALIDATION, processes: {many}", cfg["val_tokens"] / cfg["val_seq_len"] / many * validation)
    return parts, sorted(calls, key=lambda call: -call["ms"])


def readable(name: str) -> str:
    """Return what a kernel's name says it computes."""
    return re.sub(r"^triton_(poi|red|per|tem|spl)_fused_?|_\d+$", "", name).strip("_") or name


def table(name: str, found: dict, parts: dict[str, dict], calls: list[dict]) -> str:
    lines = [f"## {name}: {found['device']}", "", "| part | launches | GB | TFLOP | ms |", "|---|---|---|---|---|"]
    for part, p in parts.items():
        cells = [f"{p['launches']:g}", *(f"{p[key]:,.2f}" for key in ("GB", "TFLOP", "ms"))]
        lines.append(f"| {part} | {' | '.join(cell if float(cell.replace(',', '')) else '' for cell in cells)} |")
    lines += ["", *gpu_graphs.memory_lines(found), *([PUBLIC] if name == "h100" else [])]
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
