"""Measure the steps of train_gpt.py on this machine: their parts, memory.

    python -m speedrun bench [--quick] [--stages 3,1] [--out FOLDER] [flags of train_gpt.py, such as --preset nano]
    torchrun --standalone --nproc_per_node=8 -m speedrun bench     with communication
    python -m speedrun bench --one_of 8 --synthetic                one GPU as one rank of eight, without data

As one of N a process has its sequences and its share of rows and matrices. Nothing is communicated: rows that other
ranks own are replaced by own ones. --stages: these alone, in this order. docs/gpu.md says what the figures mean. The
table, a JSON document and a profile go to the folder. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

import train_gpt
from data.shards import write_shard
from speedrun import cards, roofline
from speedrun.logs import markdown
from train_gpt import Batch, Hyperparameters, Inputs, NgramTable, Plan, Ranks, Requests, Trainer, UserError

Steps = Iterator[tuple[Plan, list[Inputs], Requests]]  # what `Trainer.train_step` takes
Figures = dict[str, dict]  # by name: a median with its 10th and 90th percentiles, n and a unit
OWN = "triton_|relu_squared|cross_entropy"  # kernels of the compiler and of the script
PHASES = "optimizers", "rows", "communication"
PRODUCTS = dict(mm=0, addmm=1, bmm=0, baddbmm=1, _scaled_mm=0)  # which input is the first factor


Rows: Any = roofline.rows_apart(NgramTable, record_function)


class OwnRows(Rows):
    def exchange(self, rows, sent, received):
        with record_function("communication"):
            return rows[torch.arange(sum(received), device=rows.device) % max(1, len(rows))], lambda: None


class Measured(Trainer):
    table_class, part = Rows, record_function  # type: ignore[assignment]


class OneOf(Measured):
    table_class = OwnRows


def figure(values: Sequence[float], unit: str = "") -> dict:
    low, median, high = np.percentile(values, [10, 50, 90]).tolist()
    return dict(median=median, p10=low, p90=high, n=len(values), unit=unit)


# ---- Time ------------------------------------------------------------------------------------------------------------
def synchronize(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def read_steps(trainer: Trainer, batches: Sequence[Batch], first: int) -> Steps:
    """Read batches again and again, for steps like `first`. Groups are due as in the whole cycle in which it is."""
    cfg = trainer.cfg
    start = first - first % cfg.all_step
    plans = [
        cfg.plans[first]._replace(step=plan.step, updates=plan.updates, ties=plan.ties, ema_rates=plan.ema_rates)
        for plan in cfg.plans[start : start + cfg.all_step]
    ]
    ends = [i + 1 for i, plan in enumerate(plans) if trainer.table.group.names in plan.updates]
    cycles = [plans[start:end] for start, end in itertools.pairwise([0, *ends])]
    endless = itertools.cycle(batches)
    planned = ((cycle, [next(endless) for _ in cycle]) for cycle in itertools.cycle(cycles))
    with contextlib.closing(trainer.reader.read(planned)) as read:  # type: ignore[type-var]
        for plan, inputs in zip(itertools.cycle(plans), read, strict=False):
            yield plan, *inputs


def take_cycle(trainer: Trainer, steps: Steps) -> None:
    """Take as many steps as it takes until all groups have stepped."""
    for _ in range(trainer.cfg.all_step):
        trainer.train_step(*next(steps))


def time_steps(trainer: Trainer, steps: Steps, n: int) -> Figures:
    """Return the ms of n cycles of steps as in training, and of launching one step.

    On CUDA the clock is events in the stream, which wait for nothing. A step is the mean of its cycle: a median of
    single steps would be that of one kind.
    """
    on_cuda, every = trainer.device.type == "cuda", trainer.cfg.all_step
    marks: list[Any] = []
    due, launched = [], []
    for i in range(n * every + 1):
        marks.append(torch.cuda.Event(enable_timing=True) if on_cuda else time.perf_counter())
        if on_cuda:
            marks[-1].record()
        if i < n * every:
            step = next(steps)
            due.append(trainer.table.group.names in step[0].updates)
            trainer.train_step(*step)
    synchronize(trainer)
    ms = np.array([a.elapsed_time(b) if on_cuda else 1000 * (b - a) for a, b in itertools.pairwise(marks)])
    for _ in range(every * on_cuda):  # on a CPU that is the step itself
        step = next(steps)
        synchronize(trainer)
        began = time.perf_counter()
        trainer.train_step(*step)
        launched.append(1000 * (time.perf_counter() - began))
    found = {"step": ms.reshape(n, every).mean(1), "step with tables": ms[due], "step without": ms[np.invert(due)]}
    found["launching by the host"] = launched
    return {name: figure(values, "ms") for name, values in found.items() if len(values)}


def host_waits(trainer: Trainer, steps: Steps) -> int:
    """Count the operations of these steps that wait for the device, and print where they are. None is the aim."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        take_cycle(trainer, steps)
        torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    for warning in found:
        print(f"host waits at {warning.filename}:{warning.lineno}", file=sys.stderr)
    return len(found)


# ---- Parts of a step -------------------------------------------------------------------------------------------------
def label_of(op) -> str:
    """Return a product's name as the roofline writes it, such as mm 49152x768x3072, or the operation's."""
    name = op.name.removeprefix("aten::")
    if name not in PRODUCTS:
        return name
    a, b = op.input_shapes[PRODUCTS[name] :][:2]
    return f"{name} {'x'.join(map(str, [*a, b[-1]]))}"


def phase_of(op) -> str:
    """Say whether an operation is one of the optimizers', the rows', or in the place of communication."""
    while op is not None and op.name not in PHASES:
        op = op.cpu_parent
    return "" if op is None else op.name


def profile(trainer: Trainer, steps: Steps) -> tuple[str, dict[str, dict]]:
    """Return the operations of a cycle of steps, the longest first, as text.

    On CUDA also ms and launches of a step by kernel: Triton's by name, products by shape, others by operation.
    """
    on_cuda, count, gradients = trainer.device.type == "cuda", trainer.cfg.all_step, trainer.gradients
    trainer.gradients = trainer.add_gradients  # the kernels of a CUDA graph have no operation
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
    synchronize(trainer)  # kernels of steps before do not count
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        take_cycle(trainer, steps)
        synchronize(trainer)
    trainer.gradients = gradients
    found: dict[str, dict] = defaultdict(lambda: dict(ms=0.0, launches=0.0))
    unowned: dict[str, float] = defaultdict(float)
    for op in profiler.events() or ():
        if op.device_type == DeviceType.CUDA and not op.name.startswith((*PHASES, "ProfilerStep", "## Call", "cuda")):
            unowned[op.name] += op.time_range.elapsed_us() / 1000 / count
        for kernel in getattr(op, "kernels", None) or () if op.device_type == DeviceType.CPU else ():
            name = kernel.name if re.match(OWN, kernel.name) else label_of(op)
            row = found[f"{phase_of(op)} {name}".strip()]
            row["ms"] += kernel.duration / 1000 / count
            row["launches"] += 1 / count
            unowned[kernel.name] -= kernel.duration / 1000 / count
    for name, ms in unowned.items():
        if ms > 0.002:
            found[name]["ms"] += ms
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    told = profiler.key_averages().table(sort_by=order, row_limit=-1)
    return told, dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def by_part(kernels: dict[str, dict]) -> dict[str, float]:
    """Sum the ms of kernels by the parts of the roofline."""
    parts: dict[str, float] = defaultdict(float)
    for label, row in kernels.items():
        phase, _, name = label.partition(" ") if label.startswith(PHASES) else ("train", "", label)
        graph = "graph" if re.search(f"mm|{OWN}", name) else ""
        parts[roofline.part_of(dict(phase=phase, graph=graph, name=name))] += row["ms"]
    return dict(parts)


def predicted_parts(trainer: Trainer, first: int) -> dict[str, float]:
    """Return the ms that the roofline predicts for the parts of a step of gpt2 on an H100, of one rank of 8."""
    is_h100 = trainer.device.type == "cuda" and torch.cuda.get_device_name() == cards.H100.name
    if trainer.cfg.preset != "gpt2" or trainer.ranks.world_size != 8 or not is_h100:
        return {}
    return next((step["ms"] for step in reversed(cards.predicted()["predicted"]) if step["first"] <= first), {})


def write_tokens(cfg: Hyperparameters, path: Path) -> Hyperparameters:
    """Write a shard of random tokens, few of them frequent, in documents of about 700. Return what trains on it.

    They are few enough for the smallest softmax.
    """
    rng, longest = np.random.default_rng(0), max(stage.batch for stage in cfg.stages)
    most = [plan.candidates // 2 for plan in cfg.plans if plan.candidates]
    tokens = rng.zipf(1.2, int(3 * cfg.all_step * longest * cfg.batch_tokens) + 2**16) % min([cfg.eot_token, *most])
    tokens[rng.random(len(tokens)) < 1 / 700] = cfg.eot_token
    write_shard(path, tokens)
    return dataclasses.replace(cfg, train_files=str(path))


# ---- The report ------------------------------------------------------------------------------------------------------
def measure_stage(trainer: Trainer, first: int, n: int) -> tuple[Figures, tuple[str, dict]]:
    """Return the figures of the steps like `first`, and their profile."""
    cfg, plan = trainer.cfg, trainer.cfg.plans[first]
    lengths = [(plan.seq_len, plan.max_doc_len)] * (2 * cfg.all_step)
    batches = train_gpt.plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)
    with contextlib.closing(read_steps(trainer, batches, first)) as steps:  # type: ignore[type-var]
        began = time.perf_counter()
        for _ in range(2):
            take_cycle(trainer, steps)
        synchronize(trainer)
        found = {f"first {2 * cfg.all_step} steps": figure([time.perf_counter() - began], "s")}
        found |= time_steps(trainer, steps, n)
        rate = cfg.batch_sequences * plan.seq_len / found["step"]["median"] * 1000
        found["throughput"] = figure([rate], "tokens/s")
        if trainer.device.type == "cuda":
            found["host waits"] = figure([host_waits(trainer, steps)])
            torch.cuda.reset_peak_memory_stats()
        profiled = profile(trainer, steps)  # without CUDA graphs, whose memory counts only while they are captured
    return found | {"peak memory": figure([trainer.peak_memory_mib()], "MiB")}, profiled


def shown(value: float) -> str:
    """Show three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(document: dict) -> str:
    """Return the document as Markdown."""
    kind = f", as one of {document['one_of']}" if document["one_of"] else ""
    lines = [f"# Preset {document['configuration']['preset']}, processes: {document['processes']}{kind}", ""]
    lines += [f"- {name}: {document[name]}" for name in ("machine", "torch", "flags")]
    rows = []
    for name, found in document["figures"].items():
        spread = f"{shown(found['p10'])} to {shown(found['p90'])}" if found["n"] > 1 else ""
        rows.append([name, f"{shown(found['median'])} {found['unit']}", spread, str(found["n"])])
    lines += ["", markdown("what|median|10th to 90th percentile|n", rows), ""]
    parts, predicted = document["parts"], document["predicted"]
    if not any(parts.values()):
        return "\n".join([*lines, "Parts of a step are told apart by a GPU's kernels; profile.txt has operations."])
    rows = []
    for name in roofline.PARTS:
        guesses = {stage: f" ({own[name]:.2f})" if name in own else "" for stage, own in predicted.items()}
        rows.append([name, *(f"{own.get(name, 0.0):.2f}{guesses[stage]}" for stage, own in parts.items())])
    rows.append(["all kernels", *(f"{sum(own.values()):.2f}" for own in parts.values())])
    return "\n".join([*lines, markdown("|".join(["ms of a step by part (predicted)", *parts]), rows)])


def run(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Measure, and write what there is after each stage."""
    ranks = Ranks(0, args.one_of, 0, args.one_of) if args.one_of else train_gpt.init_distributed()
    cfg = train_gpt.resolve(train_gpt.parse_args(flags, ranks.world_size))
    if cfg.batch_sequences % ranks.world_size:
        name = f"--one_of {args.one_of}" if args.one_of else f"{ranks.world_size} processes"
        raise UserError(f"{name}: expected a divisor of {cfg.batch_sequences}, the sequences of a step")
    ends = enumerate(itertools.pairwise([0, *train_gpt.stage_ends(cfg)]), start=1)
    stages = {number: first for number, (first, end) in ends if first < end}
    if strange := [number for number in args.stages or () if number not in stages]:
        raise UserError(f"--stages {strange[0]}: expected numbers of {', '.join(map(str, stages))}")
    args.out.mkdir(parents=True, exist_ok=True)
    cfg = write_tokens(cfg, args.out / f"random{ranks.rank}.bin") if args.synthetic else cfg
    trainer, n = (OneOf if args.one_of else Measured)(cfg, ranks), 3 if args.quick else 20
    machine = torch.cuda.get_device_name() if trainer.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    document: dict = dict(machine=machine, torch=torch.__version__, flags=" ".join(flags), one_of=args.one_of)
    document |= dict(processes=1 if args.one_of else ranks.world_size, configuration=dataclasses.asdict(cfg))
    document |= dict(figures={}, parts={}, predicted={}, kernels={})
    gc.disable()  # as in training
    for number in args.stages or stages:
        first, stage = stages[number], f"stage {number}"
        found, (operations, kernels) = measure_stage(trainer, first, n)
        document["figures"] |= {f"{stage}: {name}": value for name, value in found.items()}
        document["parts"][stage], document["predicted"][stage] = by_part(kernels), predicted_parts(trainer, first)
        document["kernels"][stage] = dict(itertools.islice(kernels.items(), 60))
        if ranks.rank == 0:
            texts = {"benchmark.md": table(document), "benchmark.json": json.dumps(document, indent=1)}
            for name, text in (texts | {"profile.txt": operations}).items():
                (args.out / name).write_text(text + "\n", encoding="utf-8")
            print(f"{stage}: measured", file=sys.stderr, flush=True)
    if ranks.rank == 0:
        print(f"{table(document)}\n\nwritten to {args.out}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options: dict[str, Any] = dict(usage=argparse.SUPPRESS, allow_abbrev=False)
    options |= dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m speedrun bench", description=__doc__, **options)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    out = Path("logs") / time.strftime("benchmark-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=out, help="default: logs/benchmark-TIME")
    parser.add_argument("--stages", type=numbers, metavar="N,N", help="these alone, in this order (default: all)")
    parser.add_argument("--one_of", type=int, metavar="N", help="as one rank of N, without communication")
    parser.add_argument("--synthetic", action="store_true", help="train on random tokens, which need no data")
    args, flags = parser.parse_known_args(argv)
    if args.one_of is not None and args.one_of < 1:
        parser.error(f"--one_of {args.one_of}: expected 1 or more")
    try:
        run(args, flags)
    except (UserError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m speedrun bench: interrupted\n")
    finally:
        gc.enable()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
