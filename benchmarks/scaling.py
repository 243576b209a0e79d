"""Measure how step time and memory grow with the model and the machine, and predict it for GPUs and nodes."""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import train_gpt
from benchmarks import measure
from gpu_proof import gpu_graphs, pretend_gpu, roofline
from records.process import ROOT, own_process
from train_gpt import Hyperparameters, Ranks, Trainer, UserError

INTRODUCTION = """Measure step time and memory of the nano architecture on this machine against sequence length, window,
width and number of processes, each point in processes of its own. Predict gpt2's step on H100s by the roofline. Print
tables with fitted exponents; write scaling.json and pictures to a folder.

    python -m benchmarks scaling [--passes N] [--graphs FILE] [--out FOLDER] [flags of train_gpt.py]
Exit codes: 0 done, 2 bad input, or a point failed, 130 interrupted."""
# Else a step is one sequence of 1,024 tokens, width and window are 128; "both": the window is as long as the sequence
AXES = {
    "sequence": {n: dict(train_seq_len=n, batch_tokens=n) for n in (512, 1024, 2048, 4096, 8192, 16384)},
    "both": {n: dict(train_seq_len=n, batch_tokens=n, window_tokens=n) for n in (256, 512, 1024, 2048, 4096)},
    "window": {
        n: dict(train_seq_len=4096, batch_tokens=4096, window_tokens=n) for n in (64, 128, 256, 512, 1024, 2048)
    },
    "width": {n: dict(model_dim=n, num_heads=n // 64) for n in (64, 128, 256, 512)},
    "processes": {n: dict(batch_tokens=8 * 1024) for n in (1, 2, 4, 8)},
}
LABELS = dict(sequence="tokens of a sequence", both="tokens of sequence and window", window="tokens of the window")
LABELS |= dict(width="model width, one head for 64")
GPT2 = dataclasses.replace(train_gpt.PRESETS["gpt2"], device="cuda", dtype="bfloat16", compile=False)
CLUSTERS = {  # nodes, and GPUs of each; a step is 8 sequences, so 8 GPUs are the most
    "GPUs of one node, predicted": {n: (1, n) for n in (1, 2, 4, 8)},
    "nodes that share 8 GPUs, predicted": {n: (n, 8 // n) for n in (1, 2, 4, 8)},
}
NETWORK = 50e9  # bytes per second of a GPU to other nodes: a DGX H100 has 400 Gbit/s for each (NVIDIA's data sheet)


def point(flags: Sequence[str]) -> dict:
    """Return the ms of steps, of an attention layer and its backward, of its mask; MiB beyond Python's and torch's."""
    ranks = train_gpt.init_distributed()
    cfg = train_gpt.resolve(train_gpt.parse_args(flags, ranks.world_size))
    train_gpt.check_same(ranks, None, {"--device": cfg.device})
    before = train_gpt.peak_memory_mib(torch.device("cpu")) if cfg.device == "cpu" else 0
    trainer, step = Trainer(cfg, ranks), cfg.num_iterations - 1
    trainer.set_schedules(step)
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len + 1,), device=trainer.device)  # in one document
    sequences = [(tokens[:-1].int(), tokens[1:].long())] * (cfg.batch_sequences // ranks.world_size)

    def timed(function: Callable[[], object]) -> dict[str, list[float]]:
        taken = []
        for _ in range(8):  # two of them warm up
            measure.mean_over_ranks(trainer, 0.0)  # all ranks begin together
            start = np.array([time.perf_counter(), time.process_time()])
            function()
            measure.synchronize(trainer.device)
            taken.append([time.perf_counter(), time.process_time()] - start)
        return dict(zip(("wall", "cpu"), (1000 * np.array(taken[2:])).T.tolist(), strict=True))

    found = dict(rank=ranks.rank, device=cfg.device, step=timed(lambda: trainer.train_step(step, sequences)))
    found |= dict(memory=train_gpt.peak_memory_mib(trainer.device) - before)
    found |= dict(mask=timed(lambda: trainer.gpt.attention_masks(sequences[0][0], trainer.windows)))
    mask = trainer.gpt.attention_masks(sequences[0][0], trainer.windows)[cfg.attention_layout[0]]
    layer, rotary = trainer.gpt.blocks[0].attn, trainer.gpt.rotary
    layer = torch.compile(layer, fullgraph=True, dynamic=False) if cfg.compile else layer
    x = torch.randn(cfg.train_seq_len, cfg.model_dim, device=trainer.device).to(getattr(torch, cfg.dtype))
    return found | dict(attention=timed(lambda: layer(x.requires_grad_(), None, rotary, mask, {}).sum().backward()))


def measure_point(axis: str, value: int, flags: Sequence[str]) -> dict:
    processes = value if axis == "processes" else 1
    fields = dict(seed=1, cpu_threads=processes, window_tokens=128)  # a thread each: else more share what one has
    flags = [*(f"--{name}={number}" for name, number in (fields | AXES[axis][value]).items()), *flags]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*(torchrun if processes > 1 else []), "-m", "benchmarks.scaling", "--preset=nano"]
    return json.loads(own_process([*command, *flags]).splitlines()[-1])


def summarize(raw: Sequence[dict]) -> measure.Figures:
    """Pool a point's passes: CPU times on a CPU, which others may use, but for `clock`, that of a step by the clock."""
    time_of, names = "cpu" if raw[0]["device"] == "cpu" else "wall", dict.fromkeys(("step", "attention", "mask"), "ms")
    found = {n: measure.figure([ms for one in raw for ms in one[n][time_of]], unit) for n, unit in names.items()}
    found |= dict(memory=measure.figure([one["memory"] for one in raw], "MiB"))
    return found | dict(clock=measure.figure([ms for one in raw for ms in one["step"]["wall"]], "ms"))


def fit(curve: dict[float, float]) -> dict:
    """Fit y = factor x^exponent by least squares of logarithms, zeros left out, with the exponent's standard error."""
    x, y = np.log([pair for pair in curve.items() if pair[1] > 0]).T
    exponent, offset = np.polyfit(x, y, 1)
    rest, spread = y - exponent * x - offset, ((x - x.mean()) ** 2).sum()
    error = float(np.sqrt((rest**2).sum() / (len(x) - 2) / spread)) if len(x) > 2 else None
    return dict(exponent=float(exponent), error=error, factor=float(np.exp(offset)))


def traffic(cfg: Hyperparameters, world: int) -> dict[str, list[int]]:
    """Return the bytes of gradients and of values a step of each group, of which a rank sends (world - 1) / world."""
    with torch.device("meta"):
        optimizers = train_gpt.build_optimizers(train_gpt.GPT(cfg), Ranks(0, world))
    moved = {f"{type(o).__name__} {o.names[0]} ...": (o.grad_buffer.nbytes, o.param_buffer.nbytes) for o in optimizers}
    return {name: [n // o.every for n in sizes] for (name, sizes), o in zip(moved.items(), optimizers, strict=True)}


def predict(found: dict, nodes: int, local: int) -> measure.Figures:
    """Return the parts of gpt2's longest step on `nodes` of `local` GPUs, nothing hidden, and the MB that each sends.

    With w processes optimizers take c + d / w, as the graphs of 1 and 8 say. Each byte leaves each node once, in rings.
    """
    gpu, world, (many, *_, few) = roofline.GPUS["h100"], nodes * local, gpu_graphs.WORLDS
    ms, own = {name: p["ms"] for name, p in roofline.predict(found, gpu)[0].items()}, GPT2.batch_sequences // world
    stage = f"stage {len(found['stages'])}: "
    outside = {w: ms[f"{stage}outside of graphs, {w}"] for w in (many, few)}
    adding = outside[few] - outside[many]  # a sequence's gradients to others'
    sequence = sum(ms[f"{stage}{kind}{way}"] for kind in ("", "FlexAttention ") for way in ("forward", "backward"))
    optimizers = outside[many]
    for name in ("Newton-Schulz", "optimizers"):
        divided = (ms[f"{name}, {few}"] - ms[f"{name}, {many}"]) * many / (many - few)
        optimizers += ms[f"{name}, {few}"] - divided + divided / world
    sent = (world - 1) / world * sum(map(sum, traffic(GPT2, world).values()))
    rate = gpu.link if nodes == 1 else min(gpu.link, NETWORK * local)
    parts = dict(compute=own * sequence + (own - 1) * adding, optimizers=optimizers, communication=1000 * sent / rate)
    figures = {name: measure.figure([value], "ms") for name, value in dict(step=sum(parts.values()), **parts).items()}
    return figures | dict(sent=measure.figure([sent / 1e6], "MB"))


def report(curves: dict[str, dict], fits: dict[str, dict]) -> str:
    lines = []
    for axis, curve in curves.items():
        names = [f"{name} ({figure['unit']})" for name, figure in next(iter(curve.values())).items()]
        lines += [f"| {' | '.join([axis, *names])} |", "|---" * (1 + len(names)) + "|"]
        for value, figures in curve.items():
            form = "{median:,.4g}" + " ({p10:,.4g} to {p90:,.4g})" * (axis in AXES)
            cells = [form.format(**figure) for figure in figures.values()]
            lines.append(f"| {value} | {' | '.join(cells)} |")
        cells = [f"{f['exponent']:.2f}" + (f" ± {f['error']:.2f}" if f["error"] else "") for f in fits[axis].values()]
        lines += [f"| exponent | {' | '.join(cells)} |", ""]
    return "\n".join(lines)


def draw(curves: dict[str, dict], fits: dict[str, dict], path: Path) -> None:
    from records.plots import new_figure, save  # needs matplotlib

    figure, panels = new_figure(len(curves), 3.2, 3.2)
    for panel, (axis, curve) in zip(panels, curves.items(), strict=True):
        for (name, f), marker in zip(fits[axis].items(), "os^D", strict=False):
            medians, unit = [figures[name]["median"] for figures in curve.values()], curve[min(curve)][name]["unit"]
            color, label = "#0072B2" if unit == "ms" else "0.6", f"{name} ({unit}): {f['exponent']:.2f}"
            panel.plot(list(curve), medians, marker, color=color, markersize=4, label=label)
            panel.plot(list(curve), [f["factor"] * n ** f["exponent"] for n in curve], color=color, linewidth=1)
        panel.set(xlabel=LABELS.get(axis, axis), xscale="log", yscale="log")
        panel.set_xticks(list(curve), list(curve))
        panel.minorticks_off()
        panel.tick_params(labelsize=7)
        above = dict(ncols=2, loc="lower left", bbox_to_anchor=(-0.1, 1), columnspacing=0.8, handlelength=1)
        panel.legend(frameon=False, fontsize=7, **above)
    save(figure, path, dict(curves=curves, fits=fits))


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=INTRODUCTION, **options)
    parser.add_argument("--passes", type=int, choices=range(1, 10), metavar="N", default=3, help="(default: 3)")
    parser.add_argument("--graphs", type=Path, metavar="FILE", help="JSON of gpu_graphs, else gpt2 is lowered anew")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path(time.strftime("logs/scaling-%Y%m%d-%H%M%S")))
    args, flags = parser.parse_known_args(argv)
    try:
        cfg = train_gpt.resolve(train_gpt.parse_args(["--preset=nano", *flags]))
        args.out.mkdir(parents=True, exist_ok=True)
        known = roofline.read_graphs(args.graphs, ["h100"])["architectures"]["90"] if args.graphs else None
        if known is None and not pretend_gpu.missing():
            known = gpu_graphs.measure(90, ROOT / "train_gpt.py", [], names="^$")
        most = max(2, torch.cuda.device_count() if cfg.device == "cuda" else os.cpu_count())
        keys = [(axis, n) for axis, values in AXES.items() for n in values if axis != "processes" or n <= most]
        raw: dict[tuple, list[dict]] = {key: [] for key in keys}
        for key in keys * args.passes:
            print("measuring:", *key, file=sys.stderr, flush=True)
            raw[key].append(measure_point(*key, flags))
        groups: dict[str, dict] = dict(measured={}, predicted={})
        for (axis, value), found in raw.items():
            groups["measured"].setdefault(axis, {})[value] = summarize(found)
        for axis, clusters in CLUSTERS.items() if known else ():
            groups["predicted"][axis] = {n: predict(known, *cluster) for n, cluster in clusters.items()}
        curves, fits = groups["measured"] | groups["predicted"], {}
        for axis, curve in curves.items():
            fits[axis] = {name: fit({n: f[name]["median"] for n, f in curve.items()}) for name in curve[min(curve)]}
        machine = f"torch {torch.__version__} {cfg.device} {cfg.dtype}, {os.cpu_count()} cores, load {os.getloadavg()}"
        document = dict(machine=machine, **groups, fits=fits, traffic=traffic(GPT2, 8))
        (args.out / "scaling.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{machine}\n\n{report(curves, fits)}")
        for name in filter(groups.get, groups):
            draw(groups[name], fits, args.out / f"scaling_{name}.png")
    except (RuntimeError, OSError, UserError, ImportError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks scaling: interrupted\n")
    return 0


if __name__ == "__main__":
    told = point(sys.argv[1:])
    print(json.dumps(told)) if told["rank"] == 0 else None
    if train_gpt.dist.is_initialized():
        train_gpt.dist.destroy_process_group()
