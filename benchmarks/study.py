"""Take the ideas of gpt2 out of mini, one at a time, and hold what each is worth beside its gain in the public history.

    python -m benchmarks study run --seeds 8     all ideas with seed 1, then all with seed 2 ...; goes on where it was
    python -m benchmarks study table             what there is so far, as Markdown
    python -m benchmarks study draw              the same as a picture
    python -m benchmarks study clock             how long the steps take without each idea; nothing else may run

docs/change.md says how an idea is taken out, docs/mini.md what the study found. Each run that has ended is a line of
the file of results. Exit codes: 0 done, 1 a run failed, 2 bad input, 130 interrupted.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import scipy.stats
import torch

import train_gpt
from records import plots
from records.process import ROOT, own_process
from train_gpt import UserError

# Ideas of docs/change.md, the public record that brought each, and its stated gain. The first six chose mini's size
PILOT = 6
STUDIED: dict[str, tuple[int, str]] = {
    "bigrams": (62, "1765 to 1600 steps"),
    "value embeddings": (14, "4.66 to 4.41 min"),
    "paired heads": (58, "1840 to 1775 steps"),
    "MUDD, in the last layer and the head": (81, "1480 to 1415 steps"),
    "losses of further tokens": (53, "2000 to 1920 steps"),
    "Muon: Adam for all": (3, "31.4 to 24.9 min"),
    "XSA": (82, "1415 to 1385 steps"),
    "gated heads": (28, "1750 to 1695 steps"),
    "heads that mix": (85, "1385 to 1325 steps, with the nets"),
    "late attention": (77, "1.446 to 1.435 min"),
    "nets for several layers, and what needs them": (85, "1385 to 1325 steps, with heads that mix"),
    "signs of bigrams": (83, "85.39 to 84.43 s"),
    "the skip": (45, "0.0025 of loss"),
    "smear": (34, "1660 to 1645 steps"),
    "key offset": (49, "2160 to 2110 steps"),
    "gates of value embeddings": (55, "about 0.004 of loss"),
    "windows that grow": (29, "1695 to 1670 steps"),
    "a longer window in the last validation": (33, "1670 to 1660 steps"),
    "YaRN": (31, "1705 to 1670 steps"),
    "shorter documents at first": (72, "1547 to 1530 steps"),
    "batches that grow": (46, "2225 to 2160 steps"),
    "steps at the lowest rate": (35, "0.001 of loss"),
    "a lopsided softcap": (54, "1920 to 1880 steps"),
    "a head that is the embedding at first": (51, "2090 to 2035 steps"),
    "Adam at every other step": (39, "147.4 to 146.8 s"),
    "weight decay": (43, "2285 to 2245 steps"),
    "NorMuon": (41, "2330 to 2315 steps"),
    "the Polar Express": (38, "1680 to 1670 steps"),
    "Muon by pairs of heads": (80, "1490 to 1480 steps"),
}


def ideas() -> dict[str, list[str]]:
    """Return what docs/change.md changes to take out each idea: flags, or a text of the script and its replacement."""
    page = (ROOT / "docs" / "change.md").read_text(encoding="utf-8")
    part = page.partition("## Take one idea out")[2].partition("\n## ")[0]
    return {idea: re.findall("`(.*?)`", cell) for idea, cell in re.findall(r"^\| (.*) \| (`.*`) \|$", part, re.M)}


def take_out(source: str, change: list[str], mini: bool = False) -> tuple[str, list[str]]:
    """Return the script without an idea, and flags. mini: its stages are a table of their own."""
    if len(change) == 1:
        return source, change[0].split()
    if mini and "GPT2_STAGES" in change[0]:
        change = [text.replace("GPT2_STAGES", "MINI_STAGES").replace("= ", "=", 1) for text in change]
    old, new = change
    if (count := source.count(old)) != 1:
        raise UserError(f"train_gpt.py has `{old}` {count} times: update docs/change.md")
    return source.replace(old, new), []


class Run(NamedTuple):
    """Hold a run that has ended, a line of the file of results."""

    idea: str  # that was taken out; empty: none
    seed: int
    script: str  # the first digits of the SHA-256 of the script that all were taken out of
    flags: str  # besides those of the idea
    steps: int
    val_loss: float
    train_loss: float  # mean over the last tenth of the steps


def read(path: Path) -> list[Run]:
    """Return the runs of a file. Damaged lines, as a kill may leave, are named on stderr and left out."""
    runs = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            run = Run(**json.loads(line))
            if not math.isfinite(run.val_loss):
                raise ValueError
            runs.append(run)
        except (ValueError, TypeError):
            print(f"{path}, line {number}: not a run: left out", file=sys.stderr)
    return runs


def train(source: str, idea: str, seed: int, flags: Sequence[str], threads: int) -> dict:
    """Train mini without an idea, and return the losses."""
    changed, own = take_out(source, ideas()[idea], mini=True) if idea else (source, [])
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        script = Path(folder) / "train_gpt.py"
        script.write_text(changed, encoding="utf-8")
        where = [f"--seed={seed}", f"--log_dir={folder}", "--run_id=run", f"--cpu_threads={threads}"]
        fixed = ["--preset=mini", "--dtype=bfloat16", "--no-save_checkpoint"]  # losses in fp32 are others
        own_process([str(script), *fixed, *flags, *own, *where], None, ROOT, OMP_NUM_THREADS=str(threads))
        result = json.loads((Path(folder) / "run.json").read_text())
    losses = [loss for _, loss, _ in result["train_curve"]]
    last = losses[-max(1, len(losses) // 10) :]
    return dict(steps=len(losses), val_loss=result["val_loss"], train_loss=round(sum(last) / len(last), 5))


def select(args: argparse.Namespace, script: str) -> dict[tuple[str, int], Run]:
    """Return by idea and seed the runs of this script, or of those that --like names, with these flags."""
    runs = read(args.results)
    mine = [run for run in runs if run.script in (script, *args.like) and run.flags == shlex.join(args.flags)]
    if left := len(runs) - len(mine):
        print(f"{args.results}: {left} runs of other scripts or flags are left out; --like HASH adds", file=sys.stderr)
    return {(run.idea, run.seed): run for run in mine}


def run(args: argparse.Namespace, source: str, script: str) -> int:
    """Do the runs that are missing. One that fails is tried again by the next call."""
    failed = 0
    with args.results.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # dies with the process
        except BlockingIOError:
            raise UserError(f"{args.results}: another study is writing it") from None
        there = select(args, script)
        plan = [(idea, seed) for seed in range(1, args.seeds + 1) for idea in ("", *args.ideas)]
        missing = [place for place in plan if place not in there]
        for number, (idea, seed) in enumerate(missing, start=1):
            name = f"{number}/{len(missing)}, seed {seed}, {f'without {idea}' if idea else 'whole'}"
            try:
                found = train(source, idea, seed, args.flags, args.threads)
            except RuntimeError as error:
                print(f"{name}: failed: {error}", file=sys.stderr)
                failed += 1
                continue
            line = json.dumps(dict(idea=idea, seed=seed, script=script, flags=shlex.join(args.flags)) | found)
            is_cut = args.results.read_bytes()[-1:] not in (b"", b"\n")  # by a kill, or a full disk
            file.write("\n" * is_cut + line + "\n")
            file.flush()
            os.fsync(file.fileno())
            print(f"{name}: val_loss {found['val_loss']:.4f}", file=sys.stderr)
    return int(failed > 0)


def compare(args: argparse.Namespace, script: str) -> dict[str, tuple[int, float, float, float]]:
    """Return for each idea n, mean, half of the 95% interval and sd of the loss without it less that with it."""
    runs = select(args, script)
    found = {}
    for idea in STUDIED:
        pairs = [(runs[idea, seed], runs["", seed]) for of, seed in runs if of == idea and ("", seed) in runs]
        differences = [without.val_loss - whole.val_loss for without, whole in pairs]
        if n := len(differences):
            sd = statistics.stdev(differences) if n > 1 else math.nan
            half = float(scipy.stats.t.ppf(0.975, n - 1)) * sd / n**0.5
            found[idea] = n, statistics.fmean(differences), half, sd
    if not found:
        raise UserError(f"{args.results}: no pair of runs yet")
    return found


def table(args: argparse.Namespace, source: str, script: str) -> int:
    """Print what each idea is worth here and there, and how many pairs show it."""
    found = compare(args, script)
    print("| without | n | mini's loss (95% interval) | public record | its gain |\n|---|---|---|---|---|")
    for idea, (n, mean, half, _) in found.items():
        interval = f" ({mean - half:+.4f} to {mean + half:+.4f})" if n > 1 else ""
        print(f"| {idea} | {n} | {mean:+.4f}{interval} | {' | '.join(map(str, STUDIED[idea]))} |")
    spreads = [sd for n, _, _, sd in found.values() if n > 1]
    if spreads:
        held_out = [found[idea] for idea in [*STUDIED][PILOT:] if idea in found]
        clear = [mean > 0 for n, mean, half, _ in held_out if n > 1 and abs(mean) > half]
        helps = sum(mean > 0 for _, mean, *_ in held_out)
        print(f"\nOf {len(held_out)} ideas that did not choose mini's size, {helps} help in mini on average. ", end="")
        print(f"Of {len(clear)} whose interval excludes 0, {sum(clear)} help.")
        sd = statistics.median(spreads)  # one run that diverges would decide the mean
        # So many that nine of ten studies see the difference, by their 95% interval
        needed = {size: 2 + math.ceil(((1.96 + 1.28) * sd / size) ** 2) for size in (0.001, 0.002, 0.005, 0.01, 0.02)}
        told = ", ".join(f"{n} for {size}" for size, n in needed.items())
        print(f"\nsd of a difference, the median over ideas: {sd:.4f}. Pairs of runs that a difference needs: {told}.")
    return 0


def draw(args: argparse.Namespace, source: str, script: str) -> int:
    """Draw the differences with their intervals."""
    found = compare(args, script)
    ideas = sorted(found, key=lambda idea: found[idea][1])
    figure, (panel,) = plots.new_figure(1, 10.4, 1.2 + 0.24 * len(ideas))
    for place, (n, mean, half, _) in enumerate(map(found.__getitem__, ideas)):
        panel.errorbar(mean, place, xerr=half if n > 1 else None, fmt="o", markersize=4, color="0.2", elinewidth=1)
    panel.axvline(0, color="0.2", linewidth=0.8)
    panel.set_xscale("symlog", linthresh=0.01)
    panel.set_yticks(range(len(ideas)), [f"{idea} (n = {found[idea][0]})" for idea in ideas], fontsize=8)
    public = panel.secondary_yaxis("right")
    public.set_yticks(range(len(ideas)), [f"{STUDIED[idea][0]}: {STUDIED[idea][1]}" for idea in ideas], fontsize=7)
    panel.set_xlabel("validation loss of mini without the idea, less that with it (95% interval)")
    plots.save(figure, args.out, found)
    return 0


def build(source: str, idea: str, flags: Sequence[str]) -> tuple[ModuleType, train_gpt.Trainer]:
    """Return the script without an idea as a module, and its trainer."""
    changed, own = take_out(source, ideas()[idea], mini=True) if idea else (source, [])
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        path = Path(folder) / "taken_out.py"
        path.write_text(changed, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(module)
    try:
        given = module.parse_args(["--preset=mini", "--dtype=bfloat16", "--seed=1", *flags, *own])
        return module, module.Trainer(module.resolve(given), module.Ranks())
    except module.UserError as error:  # a class of its own
        raise UserError(str(error)) from None


def steps_seconds(module: ModuleType, trainer: train_gpt.Trainer) -> float:
    """Return how long all steps would take, by as many of each stage as Adam makes one of, on dummy tokens."""
    cfg, total = trainer.cfg, 0.0
    for first, end in pairwise(sorted({*module.stage_starts(cfg), cfg.num_iterations})):
        length = module.train_seq_len(first, cfg)
        tokens = torch.arange(length + 1, dtype=torch.int32) % cfg.vocab_size
        batch = [(tokens[:-1], tokens[1:].long())] * cfg.batch_sequences
        even = -(-first // cfg.adam_every) * cfg.adam_every
        began = time.perf_counter()
        for step in range(even, even + cfg.adam_every):
            trainer.train_step(step, batch)
        getattr(torch, cfg.device).synchronize()  # a GPU only begins them
        total += (time.perf_counter() - began) * (end - first) / cfg.adam_every
    return total


def clock(args: argparse.Namespace, source: str, script: str) -> int:
    """Print how long the steps take without an idea, as a multiple of the whole script's: steps of both in turn."""
    if min(args.repeats, args.threads) < 1:
        raise UserError(f"--repeats {args.repeats}, --threads {args.threads}: expected at least 1")
    torch.set_num_threads(args.threads)
    whole = build(source, "", args.flags)
    print("| without | time of the steps, median (all of them) |\n|---|---|")
    for idea in args.ideas:
        without = build(source, idea, args.flags)
        ratios = [steps_seconds(*without) / steps_seconds(*whole) for _ in range(args.repeats + 1)]
        del ratios[0]  # a warm-up
        print(f"| {idea} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    form: dict = dict(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="python -m benchmarks study", description=__doc__, **form)
    commands = parser.add_subparsers(required=True)
    for function in (run, table, draw, clock):
        command = commands.add_parser(function.__name__, help=function.__doc__, allow_abbrev=False)
        command.set_defaults(function=function)
        add = command.add_argument
        add("--results", type=Path, default=ROOT / "benchmarks" / "study.jsonl", help="the file of results")
        add("--like", nargs="+", default=[], metavar="HASH", help="scripts that train the same")
        add("flags", nargs="*", help="more flags of train_gpt.py, after --")
        if function is run:
            add("--seeds", type=int, default=8, help="seeds 1 to this one [%(default)s]")
        if function is clock:
            add("--repeats", type=int, default=7, help="rounds of steps [%(default)s]")
        if function in (run, clock):
            add("--threads", type=int, default=2, help="of a run [%(default)s]")
            add("--ideas", nargs="+", choices=STUDIED, default=[*STUDIED], metavar="IDEA", help="by default all")
        elif function is draw:
            add("--out", type=Path, default=ROOT / "benchmarks" / "study.png")
    args = parser.parse_args(argv)
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    try:
        return args.function(args, source, hashlib.sha256(source.encode()).hexdigest()[:12])
    except (UserError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks study: interrupted; `study run` goes on where it was\n")
