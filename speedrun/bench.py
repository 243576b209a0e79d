"""Time the steps of train_gpt.py on this machine, part by part.

    python -m speedrun bench [--stages 3,1] [--out FOLDER] [flags of train_gpt.py, such as --preset nano]
    torchrun --standalone --nproc_per_node=8 -m speedrun bench     with communication
    python -m speedrun bench --one_of 8 --synthetic                one GPU as one rank of eight, without data
    python -m speedrun bench --one_of 8 --synthetic --stages 3,1 --against OTHER.py flex_tma  and in turns with others

--against times this script and each other one in turns, both in memory at once: their ratio, of ms a token, has a 95%
interval. The other is a record, a log, a file, or an edit of this script: {variants}.

As one of N a process has its sequences and its share of rows and matrices; nothing is communicated, and own rows stand
in for those of others. A cycle is as many steps as update all groups of parameters; times are of its mean step. The
table and all times as JSON go to the folder. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt
from data.shards import write_shard
from speedrun import ROOT, race, records
from speedrun.process import ToolError, defined_names, run
from train_gpt import Hyperparameters, Ranks, StepSchedule, Trainer

MODEL = "forward and backward"
PARTS = MODEL, "optimizers", "rows of n-grams", "waiting for other ranks"
# What a script has that can be timed
NEEDED = {"StepSchedule", "Trainer", "Ranks", "start_collective", "step_optimizers", "stage_ends", "plan_batches"}
# Edits of the script that only a card can judge
VARIANTS = {
    "flex_tma": ("ROWS_GUARANTEED_SAFE=True", "ROWS_GUARANTEED_SAFE=True, USE_TMA=True"),
    "flex_stages_2": ("SAFE=True, bwd_num_warps=8", "SAFE=True, bwd_num_warps=8, num_stages=2"),
    "flex_tiles_64": ("SAFE=True, bwd_num_warps=8", "SAFE=True, bwd_num_warps=8, fwd_BLOCK_M=64, fwd_BLOCK_N=64"),
    "dz_stages_4": ("num_warps=8, num_stages=3", "num_warps=8, num_stages=4"),
    "dz_warps_4": ("num_warps=8, num_stages=3", "num_warps=4, num_stages=3"),
}


class Stopwatch:
    """Marks where parts of steps begin: on CUDA events in the stream, for which nothing waits."""

    def __init__(self, trainer: Trainer):
        """Mark the parts of this trainer's steps. Whatever the script calls its parts is in this function."""
        self.on_cuda = trainer.device.type == "cuda"
        self.marks: list[tuple[Any, str]] = []
        _, optimizers, rows, waiting = PARTS
        train_gpt.step_optimizers = self.timed(optimizers, train_gpt.step_optimizers)
        for name in "fetch", "send", "update":
            setattr(trainer.table, name, self.timed(rows, getattr(trainer.table, name)))
        start = train_gpt.start_collective
        train_gpt.start_collective = lambda *args: self.timed(waiting, start(*args))

    def begin(self, part: str) -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter()
        if self.on_cuda:
            now.record()
        self.marks.append((now, part))

    def timed(self, name: str, function: Callable) -> Callable:
        def call(*args, **options):
            outer = self.marks[-1][1] if self.marks else MODEL
            self.begin(name)
            result = function(*args, **options)
            self.begin(outer)
            return result

        return call

    def read(self, marks: list[tuple[Any, str]]) -> dict[str, float]:
        """Return the ms of each part up to the last mark, once the device has done all."""
        ms = defaultdict[str, float](float)
        for (start, part), (end, _) in itertools.pairwise(marks):
            ms[part] += start.elapsed_time(end) if self.on_cuda else 1000 * (end - start)
        return ms


def own_rows(out: Tensor, rows: Tensor, out_counts: list[int], row_counts: list[int]) -> Callable[[], None]:
    """Stand in for `NgramTable.all_to_all` where there are no other ranks."""
    out.copy_(rows[torch.arange(len(out), device=rows.device) % max(1, len(rows))])
    return lambda: None


def find_stages(cfg: Hyperparameters, wanted: Sequence[int] | None) -> dict[int, list[StepSchedule]]:
    """Return of each stage, by its number from 1 on, the steps of its first whole cycle."""
    stages = {}
    for number, (first, end) in enumerate(itertools.pairwise([0, *train_gpt.stage_ends(cfg)]), start=1):
        first += -first % cfg.common_interval
        if first + cfg.common_interval <= end:
            stages[number] = cfg.step_schedules[first : first + cfg.common_interval]
    if strange := {*(wanted or ())} - {*stages}:
        raise ToolError(f"--stages {min(strange)}: expected numbers of {', '.join(map(str, stages))}")
    return {number: stages[number] for number in wanted or stages}


def read_steps(trainer: Trainer, schedules: list[StepSchedule]) -> Iterator[tuple]:
    """Read what `Trainer.train_step` takes in the steps of a cycle, again and again."""
    cfg = trainer.cfg
    lengths = [(schedule.seq_len, schedule.max_doc_len) for schedule in schedules]
    batches = [*train_gpt.plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)]
    ends = [i for i, schedule in enumerate(schedules, start=1) if trainer.table.group.name in schedule.updates]
    cycles = [(schedules[start:end], batches[start:end]) for start, end in itertools.pairwise([0, *ends])]
    with contextlib.closing(trainer.loader.steps(itertools.cycle(cycles))) as read:  # type: ignore[type-var]
        for schedule, inputs in zip(itertools.cycle(schedules), read, strict=False):
            yield schedule, *inputs


def time_stage(trainer: Trainer, watch: Stopwatch, schedules: list[StepSchedule], cycles: int) -> dict[str, list]:
    """Return the ms of each part of a step, and of the step, for each of some cycles after two that warm up."""
    marks_of_cycles = []
    with contextlib.closing(read_steps(trainer, schedules)) as steps:  # type: ignore[type-var]
        for _ in range(2 + cycles):
            watch.marks = []
            watch.begin(MODEL)
            for _ in schedules:
                trainer.train_step(*next(steps))
            watch.begin(MODEL)
            marks_of_cycles.append(watch.marks)
    getattr(torch, trainer.device.type).synchronize()
    found = defaultdict[str, list](list)
    for marks in marks_of_cycles[2:]:
        ms = {part: whole / len(schedules) for part, whole in watch.read(marks).items()}
        for part in PARTS:
            found[part].append(ms.get(part, 0.0))
        found["step"].append(sum(ms.values()))
    return dict(found)


def write_tokens(cfg: Hyperparameters, path: Path) -> Hyperparameters:
    """Write a shard of random tokens, few of them frequent, in documents of about 700. Return what trains on it.

    They are few enough for the smallest softmax.
    """
    rng, longest = np.random.default_rng(0), max(stage.batch for stage in cfg.stages)
    most = [schedule.sampled_classes // 2 for schedule in cfg.step_schedules if schedule.sampled_classes]
    count = max(int(2 * cfg.common_interval * longest * cfg.batch_tokens), cfg.val_tokens) + 2**16
    tokens = rng.zipf(1.2, count) % min([cfg.eot_token, *most])
    tokens[rng.random(count) < 1 / 700] = cfg.eot_token
    write_shard(path, tokens)
    return dataclasses.replace(cfg, train_files=str(path), val_files=str(path))


def table(document: dict) -> str:
    """Return the document as Markdown."""
    share = f"one of {document['one_of']}" if document["one_of"] else f"{document['processes']} processes"
    head = f"{document['machine']}, torch {document['torch']}, {share}, flags: {document['flags']}"
    stages = document["stages"]
    rows = [["ms a step: median (10th to 90th percentile)", *stages], ["---"] * (1 + len(stages))]
    for what in next(iter(stages.values())):
        rows.append([what])
        for figures in stages.values():
            low, median, high = np.percentile(figures[what], [10, 50, 90])
            spread = f" ({low:,.2f} to {high:,.2f})" if len(figures[what]) > 1 else ""
            rows[-1].append(f"{median:,.2f}{spread}")
    return "\n".join([head, "", *(f"| {' | '.join(row)} |" for row in rows)])


def conditions(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Return what figures depend on."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return dict(machine=machine, torch=torch.__version__, flags=" ".join(flags), one_of=args.one_of)


def measure(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Time stages, and write what there is after each."""
    ranks = Ranks(0, args.one_of, 0, args.one_of) if args.one_of else train_gpt.init_distributed()
    cfg = train_gpt.resolve(train_gpt.parse_args(flags, ranks.world_size))
    if cfg.batch_sequences % ranks.world_size:
        raise ToolError(f"{ranks.world_size} ranks: expected a divisor of {cfg.batch_sequences}, a step's sequences")
    stages = find_stages(cfg, args.stages)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.synthetic:
        cfg = write_tokens(cfg, args.out / f"random{ranks.rank}.bin")
    trainer = Trainer(cfg, ranks)
    if args.one_of:
        trainer.table.all_to_all = own_rows  # type: ignore[method-assign]
    watch = Stopwatch(trainer)
    gc.disable()  # as in training
    if args.turns:
        for number in map(int, sys.stdin):
            tokens = cfg.batch_sequences * statistics.fmean(schedule.seq_len for schedule in stages[number])
            ms = statistics.median(time_stage(trainer, watch, stages[number], args.cycles)["step"])
            os.write(args.turns, f"[{ms}, {tokens}]\n".encode())
        return
    document = conditions(args, flags) | dict(processes=ranks.world_size, stages={})
    document["configuration"] = dataclasses.asdict(cfg)
    for number, schedules in stages.items():
        if watch.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        figures = document["stages"][f"stage {number}"] = time_stage(trainer, watch, schedules, args.cycles)
        figures["peak memory, MiB"] = [trainer.peak_memory_mib()]
        if ranks.rank == 0:
            (args.out / "bench.md").write_text(table(document) + "\n")
            (args.out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
            print(f"stage {number}: measured", file=sys.stderr, flush=True)
    if ranks.rank == 0:
        print(f"{table(document)}\n\nwritten to {args.out}", flush=True)


@contextlib.contextmanager
def worker(name: str, script: str, args: argparse.Namespace, flags: Sequence[str]) -> Iterator[Callable]:
    """Start a process whose `train_gpt` is this script, and yield what returns ms and tokens of a stage's step there.

    It never outlives this process. Its answers have a pipe of their own, as the script may print.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train_gpt.py").write_text(script)
        answers, its_end = os.pipe()
        own = [f"--turns={its_end}", f"--out={folder}", f"--cycles={args.cycles}", f"--one_of={args.one_of}"]
        own += ["--stages", ",".join(map(str, args.stages))] + ["--synthetic"] * args.synthetic
        command = [sys.executable, "-P", "-m", "speedrun", "bench", *own, *flags]
        how: dict = dict(cwd=ROOT, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[its_end])
        how["env"] = os.environ | dict(PYTHONPATH=os.pathsep.join([folder, str(ROOT)]))
        with open(answers) as lines, subprocess.Popen(command, **how) as child:
            os.close(its_end)

            def time_turn(stage: int) -> list[float]:
                answer = ""
                with contextlib.suppress(BrokenPipeError):
                    os.write(child.stdin.fileno(), f"{stage}\n".encode())  # type: ignore[union-attr]
                    answer = lines.readline()
                if not answer:
                    raise ToolError(f"{name}: its process ended, as it says above")
                return json.loads(answer)

            try:
                yield time_turn
            except BaseException:
                child.kill()
                raise


def tell(pair: dict) -> str:
    """Say how steps of a script compare with the root's."""
    sides = [(pair["ms"], pair["tokens"]), (pair["ms_of_root"], pair["tokens_of_root"])]
    logs = ([math.log(value / tokens) for value in ms] for ms, tokens in sides)
    ratio = "ratio of ms a token {:.4f} (95% {:.4f} to {:.4f})".format(*map(math.exp, race.difference(*logs)))
    own, root = (f"{statistics.median(ms):.2f} ms a step of {tokens:,.0f} tokens" for ms, tokens in sides)
    return f"{pair['name']}, stage {pair['stage']}: {own}, the root {root}: {ratio}, n = {len(pair['ms'])}"


def compare(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Time the root in turns with each of the others, and write how their steps compare."""
    _, source = records.read_script(train_gpt.__file__, records.RECORDS)
    args.stages = [*find_stages(train_gpt.resolve(train_gpt.parse_args(flags, args.one_of or 1)), args.stages)]
    scripts = [
        (name, source.replace(*VARIANTS[name])) if name in VARIANTS else records.read_script(name, records.RECORDS)
        for name in args.against
    ]
    for name, script in scripts:
        if missing := sorted(NEEDED - defined_names(script, name)):
            raise ToolError(f"{name} lacks {', '.join(missing)}: bench times scripts that have what the root has")
    document = conditions(args, flags) | dict(pairs=[])
    args.out.mkdir(parents=True, exist_ok=True)
    with worker("the root", source, args, flags) as root:
        for name, script in scripts:
            with worker(name, script, args, flags) as other:
                for stage in args.stages:
                    pair: dict = dict(name=name, stage=stage, ms=[], ms_of_root=[])
                    document["pairs"].append(pair)
                    turns = [("", other), ("_of_root", root)]
                    for i in range(args.pairs):
                        for which, time_turn in turns[:: -1 if i % 2 else 1]:  # a drift of the machine's speed cancels
                            ms, pair[f"tokens{which}"] = time_turn(stage)
                            pair[f"ms{which}"].append(ms)
                    print(tell(pair), flush=True)
                    (args.out / "pairs.json").write_text(json.dumps(document, indent=1) + "\n")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def bench(argv: Sequence[str] | None) -> None:
    form: dict = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=argparse.SUPPRESS)
    description = __doc__.format(variants=", ".join(VARIANTS))
    parser = argparse.ArgumentParser(prog="python -m speedrun bench", description=description, **form)
    out = Path("logs") / time.strftime("bench-%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=out, help="[logs/bench-TIME]")
    parser.add_argument("--stages", type=numbers, metavar="N,N", help="these alone, in this order [all]")
    parser.add_argument("--cycles", type=int, default=20, metavar="N", help="to time of each stage [%(default)s]")
    parser.add_argument("--one_of", type=int, default=0, metavar="N", help="as one rank of N, without communication")
    parser.add_argument("--synthetic", action="store_true", help="train on random tokens, which need no data")
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME", help="scripts, or names of edits")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of turns with each [%(default)s]")
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)  # where to answer each stage on stdin
    args, flags = parser.parse_known_args(argv)
    if args.one_of < 0 or args.cycles < 1 or args.pairs < 2:
        raise ToolError("--one_of and --cycles: expected 1 or more; --pairs: expected 2 or more")
    try:
        (compare if args.against else measure)(args, flags)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    return run("python -m speedrun bench", bench, argv)
