"""What is measured when, and the report."""

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import train_gpt
from speedrun import measure
from speedrun.process import ENVIRONMENT
from train_gpt import Hyperparameters, Ranks, Trainer, UserError

INTRODUCTION = """Measure train_gpt.py on this machine: parts of a step, utilization, memory.
Print a table; write it, a JSON document and a profile to a folder.

    python -m benchmarks [--quick] [--out FOLDER] [flags of train_gpt.py, such as --preset nano]
    torchrun --standalone --nproc_per_node=8 -m benchmarks       with communication

All other flags are those of train_gpt.py. Exit codes: 0 done, 1 a stage failed, 2 bad input, 130 interrupted."""


def first_steps(cfg: Hyperparameters) -> list[int]:
    """Return the first step of each stage that has steps."""
    return sorted({*train_gpt.stage_starts(cfg)} - {cfg.num_iterations})


def plan(cfg: Hyperparameters, quick: bool) -> dict:
    """Plan the validation, and equally many batches for each stage of training."""
    steps = 16 if quick else max(64, 2**21 // cfg.batch_tokens)
    firsts = first_steps(cfg)
    firsts = [first for first in firsts for _ in range(-(-steps // len(firsts)))]
    lengths = [(train_gpt.train_seq_len(first, cfg), train_gpt.stage_of(first, cfg).max_doc_len) for first in firsts]
    val_tokens = min(cfg.val_tokens, 4 * cfg.val_seq_len) if quick else cfg.val_tokens
    val_lengths = [(cfg.val_seq_len, 0)] * (val_tokens // cfg.val_seq_len)
    train = train_gpt.plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)
    return dict(train=train, val=train_gpt.plan_batches(cfg.val_files, val_lengths, 1, cfg))


def measure_all(cfg: Hyperparameters, ranks: Ranks, plans: dict, quick: bool) -> tuple[dict, str]:
    """Return all figures and the profile. A stage that fails says why in the place of its figures."""
    began, figures, profiles = time.perf_counter(), {}, []
    calls, passes, min_steps, max_steps = (3, 1, 3, 3) if quick else (20, 3, 5, 50)

    def stage(name: str, function: Callable[..., dict], *args) -> None:
        if ranks.rank == 0:
            print(f"{time.perf_counter() - began:6.1f} s: {name}", file=sys.stderr, flush=True)
        try:
            figures.update(function(*args))
        except Exception as error:  # the other figures are worth having
            if ranks.world_size > 1:
                raise  # the other ranks would wait
            figures[name] = f"FAILED: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def timed(name: str, function: Callable[[], object], n: int) -> None:
        stage(name, lambda: {name: measure.figure(measure.together(trainer, function, n), "ms")})

    trainer = Trainer(cfg, ranks)
    timed("warm-up", trainer.warm_up, 1)
    *earlier, last = first_steps(cfg)
    share = len(plans["train"]) // (len(earlier) + 1)
    parts = [cycle(plans["train"][i * share : (i + 1) * share]) for i in range(len(earlier) + 1)]
    *others, batches = (measure.read(trainer, part) for part in parts)
    gc.disable()  # as in training
    probe = measure.mean_over_ranks(trainer, measure.whole_steps(trainer, batches, last, 2)[1])
    n = int(min(max_steps, max(min_steps, 20_000 / probe)))  # about 40 s, and 20 s for each stage before
    for step, own in zip(earlier, others, strict=True):
        title = measure.title(step, cfg)
        stage(title, lambda s, b, t: {t: measure.figure(measure.whole_steps(trainer, b, s, n), "ms")}, step, own, title)
        own.close()
    title = f"validation of {len(plans['val']) * cfg.val_seq_len:,} tokens"
    timed(title, lambda: trainer.evaluate(cfg.num_iterations, plans["val"]), passes)
    figures["peak memory"] = measure.figure([trainer.peak_memory_mib()], "MiB")
    rates = measure.matmul_tflops(trainer, calls)
    figures[f"large matmul in {cfg.dtype}"] = measure.figure(rates, "TFLOP/s")
    stage("steps", measure.steps, trainer, batches, last, n, float(np.median(rates)))
    if trainer.device.type == "cuda":
        stage("host waits", measure.host_waits, trainer, batches, last)
    stage("profile", lambda: profiles.append(measure.profile(trainer, batches, last)) or {})
    gc.enable()
    batches.close()
    return figures, "".join(profiles)


def shown(value: float) -> str:
    """Show three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(document: dict) -> str:
    """Return the document as Markdown."""
    lines = [f"# Preset {document['configuration']['preset']}, processes: {document['processes']}", ""]
    lines += [f"- {line}" for line in document["machine"]]
    lines += [f"- {name}: {document[name]}" for name in ("flags", "environment", "load_average", "seconds")]
    lines += ["", "| what | median | 10th to 90th percentile | n |", "|---|---|---|---|"]
    for name, found in document["figures"].items():
        cells = [name, str(found).replace("|", "/"), "", ""]
        if isinstance(found, dict):
            spread = f"{shown(found['p10'])} to {shown(found['p90'])}" if found["n"] > 1 else ""
            cells = [name, f"{shown(found['median'])} {found['unit']}".strip(), spread, str(found["n"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(flags: Sequence[str], quick: bool, out: Path) -> int:
    ranks, load, began = train_gpt.init_distributed(), f"{os.getloadavg()[0]:.1f}", time.perf_counter()
    problem, facts = None, {"flags": list(flags), "--quick": quick}
    try:
        cfg = train_gpt.resolve(train_gpt.parse_args(flags, ranks.world_size))
        if cfg.batch_sequences % ranks.world_size:
            raise UserError(f"{ranks.world_size} processes do not divide {cfg.batch_sequences} sequences")
        facts["--device"], plans = cfg.device, plan(cfg, quick)
        if ranks.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        problem = error if isinstance(error, UserError) else UserError(error)
    train_gpt.agree(ranks, problem, train_gpt.Saved("", None, facts))
    figures, profile = measure_all(cfg, ranks, plans, quick)
    hashes = {"training tokens": "", "validation tokens": ""}  # which the report leaves out
    lines = (" ".join(line.split()) for line in train_gpt.describe(cfg, ranks, plans, hashes).splitlines())
    machine = [line for line in lines if line.startswith(("Running", "Model name:")) or " processes, " in line]
    machine += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    document = dict(machine=machine, processes=ranks.world_size, flags=" ".join(flags))
    document |= dict(environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ})
    load += f" before, {os.getloadavg()[0]:.1f} after"
    document |= dict(load_average=load, seconds=round(time.perf_counter() - began))
    document |= dict(configuration=dataclasses.asdict(cfg), figures=figures)
    if ranks.rank == 0:
        told = table(document)
        texts = {"benchmark.md": told, "benchmark.json": json.dumps(document, indent=1), "profile.txt": profile}
        for name, text in texts.items():
            (out / name).write_text(text + "\n", encoding="utf-8")
        print(f"{told}\n\nwritten to {out}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(any(isinstance(found, str) for found in figures.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = dict(usage=argparse.SUPPRESS, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=INTRODUCTION, **options)
    parser.add_argument("--quick", action="store_true", help="few repetitions, and only what is fast")
    out = Path("logs") / time.strftime("benchmark-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=out, help="default: logs/benchmark-TIME")
    args, flags = parser.parse_known_args(argv)
    try:
        return run(flags, args.quick, args.out)
    except (UserError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks: interrupted\n")
