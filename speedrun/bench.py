"""Measure train_gpt.py on this machine: its steps, utilization, memory.

    python -m speedrun bench [--quick] [--out FOLDER] [flags of train_gpt.py, such as --preset nano]
    torchrun --standalone --nproc_per_node=8 -m speedrun bench       with communication

The table, a JSON document and a profile go to the folder. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

import train_gpt
from train_gpt import Batch, Hyperparameters, Inputs, Plan, Ranks, Reads, Trainer, UserError

Steps = Iterator[tuple[Plan, list[Inputs], Reads]]  # what `Trainer.train_step` takes
Figures = dict[str, dict]  # by name: a median with its 10th and 90th percentiles, n and a unit


def figure(values: Sequence[float], unit: str = "") -> dict:
    low, median, high = np.percentile(values, [10, 50, 90]).tolist()
    return dict(median=median, p10=low, p90=high, n=len(values), unit=unit)


# ---- Time ------------------------------------------------------------------------------------------------------------
def synchronize(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def timed(trainer: Trainer, function: Callable[[], object], n: int) -> list[float]:
    """Return the ms of n calls that all ranks begin together, from idle device to idle device."""
    taken = []
    for _ in range(n):
        train_gpt.start_collective(dist.all_reduce, torch.zeros(1, device=trainer.device))()
        synchronize(trainer)
        start = time.perf_counter()
        function()
        synchronize(trainer)
        taken.append(1000 * (time.perf_counter() - start))
    return taken


def read_steps(trainer: Trainer, batches: Sequence[Batch], first: int) -> Steps:
    """Read batches again and again, for steps like `first`. Groups step as in a whole cycle of `all_step` steps."""
    cfg = trainer.cfg
    plans = [Plan(first, cfg) for _ in range(cfg.all_step)]
    for i, now in enumerate(plans):
        now.step = first + -first % cfg.all_step + i
    group = train_gpt.row_of("ngrams", cfg)
    ends = [i + 1 for i, now in enumerate(plans) if now.is_due(group)]
    cycles = [plans[start:end] for start, end in itertools.pairwise([0, *ends])]
    endless = itertools.cycle(batches)
    planned = ((cycle, [next(endless) for _ in cycle]) for cycle in itertools.cycle(cycles))
    with contextlib.closing(trainer.reader.read(planned)) as read:  # type: ignore[type-var]
        for now, inputs in zip(itertools.cycle(plans), read, strict=False):
            yield now, *inputs


def each_step_ms(trainer: Trainer, steps: Steps, n: int) -> np.ndarray:
    """Return the ms of n steps as in training. On CUDA the clock is events in the stream, which wait for nothing."""
    on_cuda = trainer.device.type == "cuda"
    marks: list[Any] = []
    for i in range(n + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if on_cuda else time.perf_counter())
        if on_cuda:
            marks[-1].record()
        if i < n:
            trainer.train_step(*next(steps))
    synchronize(trainer)
    return np.array([a.elapsed_time(b) if on_cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)])


def step_ms(trainer: Trainer, steps: Steps, n: int) -> list[float]:
    """Return n times the mean ms over as many steps as it takes until all groups have stepped.

    A median of single steps would be that of one kind.
    """
    every = trainer.cfg.all_step
    return each_step_ms(trainer, steps, n * every).reshape(n, every).mean(1).tolist()


def profile(trainer: Trainer, steps: Steps) -> str:
    """Return the operations that take longest in steps in which all groups step."""
    on_cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(trainer.cfg.all_step):
            trainer.train_step(*next(steps))
        synchronize(trainer)
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=20)


def host_waits(trainer: Trainer, steps: Steps) -> int:
    """Count the operations of these steps that wait for the device, and print where they are. None is the aim."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(trainer.cfg.all_step):
                trainer.train_step(*next(steps))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    for warning in found:
        print(f"host waits at {warning.filename}:{warning.lineno}", file=sys.stderr)
    return len(found)


# ---- Work ------------------------------------------------------------------------------------------------------------
def weight_flops(trainer: Trainer, step: int) -> float:
    """Count the FLOPs of a token's forward and backward pass: 6 per weight of blocks and head that takes part."""
    count = 0.0
    for name, p in trainer.gpt.named_parameters():
        part = 1.0
        if name == "lm_head":  # few tokens may be in the softmax
            part = (Plan(step, trainer.cfg).classes or len(p)) / len(p)
        elif ".attn." in name:  # heads may be half as wide
            layer = trainer.cfg.layers[int(name.split(".")[1])]
            is_half = layer.half_qk if name.endswith("qk_w") else layer.half_v and name.endswith(("v_w", "c_proj"))
            part = 0.5 if is_half else 1.0
        count += part * p.numel() * (p.ndim >= 2 and "embed" not in name)
    return 6 * count


def large_matmul(trainer: Trainer, n: int) -> list[float]:
    """Return the TFLOP/s of a large square matmul: what utilization is measured against."""
    size = 16384 if trainer.device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=trainer.device).to(getattr(torch, trainer.cfg.dtype)) for _ in range(2))
    return [2 * size**3 / ms / 1e9 for ms in timed(trainer, lambda: a @ b, n)]


# ---- The report ------------------------------------------------------------------------------------------------------
def first_steps(cfg: Hyperparameters) -> list[int]:
    """Return the first step of each stage that has steps."""
    return sorted({0, *train_gpt.stage_ends(cfg)} - {cfg.num_iterations})


def plan(cfg: Hyperparameters, quick: bool) -> dict:
    """Plan the validation, and equally many batches for each stage of training, which are read again and again."""
    share = -(-(16 if quick else max(64, 2**21 // cfg.batch_tokens)) // len(first_steps(cfg)))
    plans = [Plan(first, cfg) for first in first_steps(cfg) for _ in range(share)]
    lengths = [(now.seq_len, now.stage.max_doc_len) for now in plans]
    val_tokens = min(cfg.val_tokens, 4 * cfg.val_seq_len) if quick else cfg.val_tokens
    val_lengths = [(cfg.val_seq_len, 0)] * (val_tokens // cfg.val_seq_len)
    train = train_gpt.plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)
    return dict(train=train, val=train_gpt.plan_batches(cfg.val_files, val_lengths, 1, cfg))


def measure_stage(trainer: Trainer, steps: Steps, first: int, n: int, matmul_tflops: float) -> Figures:
    now = Plan(first, trainer.cfg)
    step_ms(trainer, steps, 1)
    ms = figure(step_ms(trainer, steps, n), "ms")
    rate = trainer.cfg.batch_sequences * now.seq_len / ms["median"] * 1000
    found = dict(step=ms, throughput=figure([rate], "tokens/s"))
    share = weight_flops(trainer, first) * rate / trainer.ranks.world_size / matmul_tflops / 1e12
    found |= dict(utilization=figure([100 * share], "%"))
    return {f"stage {now.index + 1}: {name}": value for name, value in found.items()}


def measure(cfg: Hyperparameters, ranks: Ranks, plans: dict, quick: bool) -> tuple[Figures, str]:
    """Return all figures and the profile of the last stage."""
    began, profiled = time.perf_counter(), ""

    def tell(name: str) -> None:
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s: {name}", file=sys.stderr, flush=True)

    tell("warm-up, which compiles")
    trainer = Trainer(cfg, ranks)
    figures, n = {"warm-up": figure(timed(trainer, trainer.warm_up, 1), "ms")}, 3 if quick else 20
    rates = large_matmul(trainer, n)
    figures[f"large matmul in {cfg.dtype}"] = figure(rates, "TFLOP/s")
    firsts = first_steps(cfg)
    share = len(plans["train"]) // len(firsts)
    gc.disable()  # as in training
    for number, first in enumerate(firsts):
        tell(f"steps from {first} on")
        steps: Any = read_steps(trainer, plans["train"][number * share : (number + 1) * share], first)
        with contextlib.closing(steps):
            figures |= measure_stage(trainer, steps, first, n, float(np.median(rates)))
            if first == firsts[-1]:
                if trainer.device.type == "cuda":
                    figures["host waits"] = figure([host_waits(trainer, steps)])
                profiled = profile(trainer, steps)
    gc.enable()
    tell("validation")
    name = f"validation of {len(plans['val']) * cfg.val_seq_len:,} tokens"
    figures[name] = figure(timed(trainer, lambda: trainer.evaluate(cfg.num_iterations, plans["val"]), 1), "ms")
    figures["peak memory"] = figure([trainer.peak_memory_mib()], "MiB")
    return figures, profiled


def shown(value: float) -> str:
    """Show three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(document: dict) -> str:
    """Return the document as Markdown."""
    lines = [f"# Preset {document['configuration']['preset']}, processes: {document['processes']}", ""]
    lines += [f"- {name}: {document[name]}" for name in ("machine", "torch", "flags", "load_average", "seconds")]
    lines += ["", "| what | median | 10th to 90th percentile | n |", "|---|---|---|---|"]
    for name, found in document["figures"].items():
        spread = f"{shown(found['p10'])} to {shown(found['p90'])}" if found["n"] > 1 else ""
        lines.append(f"| {name} | {shown(found['median'])} {found['unit']} | {spread} | {found['n']} |")
    return "\n".join(lines)


def run(flags: Sequence[str], quick: bool, out: Path, ranks: Ranks) -> None:
    load, began = os.getloadavg()[0], time.perf_counter()
    cfg = train_gpt.resolve(train_gpt.parse_args(flags, ranks.world_size))
    if cfg.batch_sequences % ranks.world_size:
        raise UserError(f"{ranks.world_size} processes do not divide {cfg.batch_sequences} sequences")
    plans = plan(cfg, quick)
    out.mkdir(parents=True, exist_ok=True)
    figures, profiled = measure(cfg, ranks, plans, quick)
    if ranks.rank == 0:
        on_cuda = torch.cuda.is_available()
        machine = torch.cuda.get_device_name() if on_cuda else f"{os.cpu_count()} CPU cores"
        document: dict = dict(
            machine=machine, torch=torch.__version__, processes=ranks.world_size, flags=" ".join(flags)
        )
        document |= dict(load_average=f"{load:.1f} before, {os.getloadavg()[0]:.1f} after")
        document |= dict(seconds=round(time.perf_counter() - began))
        document |= dict(configuration=dataclasses.asdict(cfg), figures=figures)
        texts = {"benchmark.md": table(document), "benchmark.json": json.dumps(document, indent=1)}
        for name, text in (texts | {"profile.txt": profiled}).items():
            (out / name).write_text(text + "\n", encoding="utf-8")
        print(f"{texts['benchmark.md']}\n\nwritten to {out}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options: dict[str, Any] = dict(usage=argparse.SUPPRESS, allow_abbrev=False)
    options |= dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m speedrun bench", description=__doc__, **options)
    parser.add_argument("--quick", action="store_true", help="few repetitions, and only a part of the validation")
    out = Path("logs") / time.strftime("benchmark-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=out, help="default: logs/benchmark-TIME")
    parser.add_argument("--one_of", type=int, metavar="N", help="as one rank of N, without communication")
    parser.add_argument("--stages", type=int, nargs="+", help="with --one_of: which, such as 1 3 (default: all)")
    parser.add_argument("--synthetic", action="store_true", help="with --one_of: on random tokens, which need no data")
    args, flags = parser.parse_known_args(argv)
    try:
        if args.one_of is not None:
            from speedrun import one_of  # which needs this module

            cfg = train_gpt.resolve(train_gpt.parse_args(flags))
            one_of.measure(cfg, args.one_of, args.stages, args.out, args.synthetic)
            return 0
        run(flags, args.quick, args.out, train_gpt.init_distributed())
    except (UserError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m speedrun bench: interrupted\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
