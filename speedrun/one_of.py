"""Measure steps as one rank of several would take them, on one device: its sequence, its share of rows and matrices.

    python -m speedrun bench --one_of 8 [flags of train_gpt.py]

Nothing is communicated: rows that other ranks own are replaced by own ones. `bench` says what the figures mean.
"""

import dataclasses
import itertools
import json
import re
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

import train_gpt
from speedrun import roofline
from speedrun.bench import Steps, each_step_ms, read_steps, synchronize
from speedrun.process import ROOT
from train_gpt import Hyperparameters, Plan, Ranks, Trainer, UserError

CYCLES = 8  # that are timed, per stage
OWN = "triton_|relu_squared|cross_entropy"  # kernels of the compiler and of the script
PRODUCTS = dict(mm=0, addmm=1, bmm=0, baddbmm=1, _scaled_mm=0)  # which input is the first factor


def build(cfg: Hyperparameters, size: int) -> Trainer:
    """Return the trainer of rank 0 of `size`. It fetches own rows instead of those of others."""
    trainer = Trainer(cfg, Ranks(0, size, 0, size))

    def exchange(rows, sent, received):
        return rows[torch.arange(sum(received), device=rows.device) % max(1, len(rows))]

    trainer.table.exchange = exchange  # type: ignore[method-assign]
    return trainer


def time_steps(trainer: Trainer, steps: Steps, count: int) -> dict:
    """Return the ms of steps: by the device's clock, of the host when it waits for nothing, and of reading."""
    due, waited = [], []

    def noted() -> Steps:
        while True:
            began = time.perf_counter()
            step = next(steps)
            waited.append(1000 * (time.perf_counter() - began))
            due.append(step[0].is_due(trainer.table.group))
            yield step

    ms = each_step_ms(trainer, noted(), count)
    host = []
    for _ in range(trainer.cfg.all_step):
        step = next(steps)
        synchronize(trainer)
        began = time.perf_counter()
        trainer.train_step(*step)
        host.append(1000 * (time.perf_counter() - began))
    rare = np.array(due)
    whole = ms.reshape(-1, trainer.cfg.all_step).mean(1)
    return dict(
        ms=float(np.median(whole)),
        p10=float(np.percentile(whole, 10)),
        p90=float(np.percentile(whole, 90)),
        with_tables=float(np.median(ms[rare])),
        without_tables=float(np.median(ms[~rare])) if not rare.all() else None,
        host_ms=float(np.mean(host)),
        wait_for_reader_ms=float(np.mean(waited)),
        n=len(whole),
    )


def label_of(op) -> str:
    """Return a product's name as the roofline writes it, such as mm 49152x768x3072, or the operation's."""
    name = op.name.removeprefix("aten::")
    shapes = [list(shape) for shape in op.input_shapes or ()]
    if name in PRODUCTS and len(shapes) > PRODUCTS[name] + 1:
        a, b = shapes[PRODUCTS[name] :][:2]
        return f"{name} {'x'.join(map(str, [*a, b[-1]]))}"
    return name


def phase_of(op) -> str:
    """Say whether an operation is one of the optimizers'."""
    while op is not None:
        if op.name == "optimizers":
            return op.name
        op = op.cpu_parent
    return ""


def profile(trainer: Trainer, steps: Steps) -> dict[str, dict]:
    """Return ms and launches of a step by kernel: Triton's by name, products by shape, others by operation."""
    count, step_optimizers, gradients = trainer.cfg.all_step, train_gpt.step_optimizers, trainer.gradients

    def marked(*args):
        with record_function("optimizers"):
            step_optimizers(*args)

    train_gpt.step_optimizers, trainer.gradients = marked, trainer.add_gradients  # a graph's kernels have no operation
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (trainer.device.type == "cuda")]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        for _ in range(count):
            trainer.train_step(*next(steps))
        synchronize(trainer)
    train_gpt.step_optimizers, trainer.gradients = step_optimizers, gradients
    found: dict[str, dict] = defaultdict(lambda: dict(ms=0.0, launches=0.0))
    owned: dict[str, float] = defaultdict(float)
    for op in profiler.events():
        for kernel in getattr(op, "kernels", None) or () if op.device_type == DeviceType.CPU else ():
            own = re.match(OWN, kernel.name)
            phase = phase_of(op)
            name = f"{phase} {kernel.name if own else label_of(op)}".strip()
            found[name]["ms"] += kernel.duration / 1000 / count
            found[name]["launches"] += 1 / count
            owned[kernel.name] += kernel.duration / 1000 / count
    seen: dict[str, float] = defaultdict(float)
    for op in profiler.events():
        if op.device_type == DeviceType.CUDA and not op.name.startswith(("optimizers", "ProfilerStep", "## Call")):
            seen[op.name] += op.time_range.elapsed_us() / 1000 / count
    for name, ms in seen.items():  # kernels that no operation owns
        if ms - owned[name] > 0.002:
            found[name]["ms"] += ms - owned[name]
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def by_part(kernels: dict[str, dict]) -> dict[str, float]:
    """Sum the ms of kernels by the parts of the roofline."""
    parts: dict[str, float] = defaultdict(float)
    for name, row in kernels.items():
        in_graph = re.search(f"mm|{OWN}", name)
        phase, graph = name.partition(" ")[0], "graph" if in_graph else ""
        parts[roofline.part_of(dict(phase=phase, graph=graph, name=name))] += row["ms"]
    return dict(parts)


def write_tokens(cfg: Hyperparameters, folder: Path) -> Hyperparameters:
    """Write a shard of random tokens, few of them frequent, in documents of about 700. Return what trains on it.

    They are few enough for the smallest softmax.
    """
    rng = np.random.default_rng(0)
    longest = max(stage.batch for stage in cfg.stages)
    count = int(3 * cfg.all_step * longest * cfg.batch_tokens) + 2**16
    classes = [number for stage in cfg.stages for number in stage.classes if number]
    tokens = rng.zipf(1.2, count) % min([cfg.eot_token, *(number // 2 for number in classes)])
    tokens[rng.random(count) < 1 / 700] = cfg.eot_token
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, count
    (folder / "random.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return dataclasses.replace(cfg, train_files=str(folder / "random.bin"))


def predicted(size: int, start: int) -> dict[str, float]:
    """Return the ms that the roofline predicts for the parts of a step of gpt2 on an H100, of one rank of 8 or of 1."""
    steps = json.loads((ROOT / "speedrun" / "h100.json").read_text())["gpus"]["h100"]["steps"].get(str(size), [])
    return next((step["ms"] for step in reversed(steps) if step["first"] <= start), {})


def measure(cfg: Hyperparameters, size: int, stages: list[int] | None, out: Path, synthetic: bool) -> None:
    """Measure stages, numbered from 1 and by default all; print and write what each shows as soon as it is there."""
    numbers = range(1, 1 + len(cfg.stages))
    if size < 1 or cfg.batch_sequences % size:
        raise UserError(f"--one_of {size}: expected a divisor of {cfg.batch_sequences}, the sequences of a step")
    if stages and not {*stages} <= {*numbers}:
        raise UserError(f"--stages {' '.join(map(str, stages))}: expected some of 1 to {len(cfg.stages)}")
    out.mkdir(parents=True, exist_ok=True)
    if synthetic:
        cfg = write_tokens(cfg, out)
    document: dict = dict(size=size, cuda_graphs=cfg.cuda_graphs, stages={})
    began = time.perf_counter()
    trainer = build(cfg, size)
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    starts = [0, *train_gpt.stage_ends(cfg)[:-1]]
    for stage in stages or numbers:
        start = starts[stage - 1]
        now = Plan(start, cfg)
        lengths = [(now.seq_len, now.stage.max_doc_len)] * (2 * cfg.all_step)
        batches = train_gpt.plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)
        steps = read_steps(trainer, batches, start)
        began = time.perf_counter()
        for _ in range(2 * cfg.all_step):
            loss = trainer.train_step(*next(steps))
        found: dict = dict(step=start, tokens=now.seq_len, loss=float(loss) * cfg.batch_sequences)
        found["compile_s"] = time.perf_counter() - began
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found |= time_steps(trainer, steps, CYCLES * cfg.all_step)
        kernels = profile(trainer, steps)  # without CUDA graphs, whose memory counts only while they are captured
        found["peak_mib"] = trainer.peak_memory_mib()
        parts = by_part(kernels)
        found |= dict(kernels_ms=sum(parts.values()), parts=parts, kernels=dict(itertools.islice(kernels.items(), 60)))
        if cfg.preset == "gpt2" and trainer.device.type == "cuda" and "H100" in torch.cuda.get_device_name():
            found["predicted"] = predicted(size, start)
        document["stages"][str(stage)] = found
        (out / "one_of.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(table(stage, found), flush=True)


def table(stage: int, found: dict) -> str:
    """Return what a stage shows as Markdown."""
    plain = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    lines = [f"## Stage {stage}", "", "| what | measured |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in plain.items()]
    lines += ["", "| ms of a step by part | measured | predicted |", "|---|---|---|"]
    guess = found.get("predicted", {})
    for part in sorted({*found["parts"], *guess}, key=lambda part: -found["parts"].get(part, 0.0)):
        lines.append(f"| {part} | {found['parts'].get(part, 0.0):.2f} | {guess.get(part, float('nan')):.2f} |")
    kernels = itertools.islice(found["kernels"].items(), 30)
    lines += ["", *(f"{row['ms']:8.3f} {row['launches']:6.1f}  {name[:110]}" for name, row in kernels)]
    return "\n".join([*lines, ""])
