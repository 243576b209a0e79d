"""Runs the plain GPT of anchor_cpu.py and train_gpt.py's nano preset in turn, and says by how much the times differ.

    python -m benchmarks.race_anchor [--pairs 5] [--out FOLDER] [-- FLAGS OF train_gpt.py ...]

A pair is one run of each, with a fresh seed. The trainer's time is the train time at the end of its run. A ratio may be
claimed if the trainer's mean validation loss is below the anchor's by more than chance: the 95% interval of the
difference, by pair, lies below 0. If it does not, train longer, such as with `-- --num_iterations 500`. Exit codes: 0
there is a ratio to claim, 1 there is none, 2 something has to be mended, 130 interrupted.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from records.__main__ import ArgumentParser, count
from records.logs import RECORDS, ToolError, read_json, shown
from records.proof import interval, ratio_interval
from records.race import run_script

ROOT = RECORDS.parent
OWN_FLAGS = ("--preset", "--seed", "--log_dir", "--run_id")


def run_anchor(seed: int, log: Path, steps: int) -> dict:
    """The anchor's result. Raises ToolError with the last line that a failed run wrote to stderr."""
    script = Path(__file__).with_name("anchor_cpu.py")
    command = [sys.executable, str(script), "--seed", str(seed), "--steps", str(steps), "--log", str(log)]
    environment = {"GOMP_SPINCOUNT": "10000"} | dict(os.environ)  # as run_script does
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise ToolError(f"the anchor failed with exit code {done.returncode}: {shown(last, 300)}")
    return read_json(log)


def summary(pairs: Sequence[dict]) -> dict:
    """What the pairs come to; a ratio is the anchor's time over the trainer's."""
    anchor, trainer = ([pair[side]["train_time_ms"] for pair in pairs] for side in ("anchor", "trainer"))
    ratios = [a / b for a, b in zip(anchor, trainer, strict=True)]
    found = dict(pairs=len(pairs), pairs_at_or_below=sum(pair["at_or_below"] for pair in pairs), reached=False)
    found |= dict(median_ratio=statistics.median(ratios), lowest_ratio=min(ratios), highest_ratio=max(ratios))
    if len(pairs) > 1:
        found["ratio_95"] = dict(zip(("geometric_mean", "low", "high"), ratio_interval(anchor, trainer), strict=True))
        losses = [pair["trainer"]["val_loss"] - pair["anchor"]["val_loss"] for pair in pairs]
        found["loss_95"] = dict(zip(("difference", "low", "high"), interval(losses), strict=True))
        found["reached"] = found["loss_95"]["high"] < 0
    return found


def table(pairs: Sequence[dict], found: dict, flags: Sequence[str]) -> str:
    """The pairs and their summary, in Markdown."""
    lines = [
        f"`train_gpt.py {' '.join(['--preset', 'nano', *flags])}` against `benchmarks/anchor_cpu.py`",
        "",
        "| seed | anchor: val_loss | train time | trainer: val_loss | train time | ratio of times | at or below |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        a, b = pair["anchor"], pair["trainer"]
        sides = (f"{side['val_loss']:.4f} | {side['train_time_ms'] / 1000:.1f} s" for side in (a, b))
        ratio, reached = a["train_time_ms"] / b["train_time_ms"], "yes" if pair["at_or_below"] else "**no**"
        lines.append(f"| {pair['seed']} | {' | '.join(sides)} | {ratio:.2f} | {reached} |")
    span = f"{found['lowest_ratio']:.2f} to {found['highest_ratio']:.2f}"
    lines += ["", f"Ratio of times, anchor / trainer: median {found['median_ratio']:.2f} ({span})"]
    if "ratio_95" in found:
        ratio, loss = found["ratio_95"], found["loss_95"]
        lines[-1] += f", geometric mean {ratio['geometric_mean']:.2f} (95%: {ratio['low']:.2f} to {ratio['high']:.2f})"
        lines.append(
            f"val_loss, trainer - anchor: {loss['difference']:+.4f} (95%: {loss['low']:+.4f} to {loss['high']:+.4f})"
        )
    lines.append(
        f"Runs that end at or below the anchor of their pair: {found['pairs_at_or_below']} of {found['pairs']}"
    )
    if not found["reached"]:
        lines.append("**The mean loss is not below the anchor's by more than chance: no ratio to claim.**")
    return "\n".join(lines)


def race(number: int, seed: int, anchor_steps: int, flags: Sequence[str]) -> list[dict]:
    """`number` pairs in the order A T T A A T ..., in which a linear drift of the machine's speed cancels."""
    pairs = []
    with tempfile.TemporaryDirectory(prefix="race-anchor-") as folder:
        for i in range(number):
            pair: dict = dict(seed=seed + i)
            for side in ("anchor", "trainer") if i % 2 == 0 else ("trainer", "anchor"):
                if side == "anchor":
                    pair[side] = run_anchor(seed + i, Path(folder) / f"anchor{i}.json", anchor_steps)
                else:
                    run = run_script(
                        ROOT / "train_gpt.py", seed + i, f"pair{i}", Path(folder), ["--preset", "nano", *flags]
                    )
                    pair[side] = dict(val_loss=run.val_loss, train_time_ms=run.train_time, step_time_ms=run.step_time)
                told = f"val_loss {pair[side]['val_loss']:.4f}, train time {pair[side]['train_time_ms'] / 1000:.1f} s"
                print(f"pair {i + 1} of {number}, seed {seed + i}, {side}: {told}", file=sys.stderr, flush=True)
            pair["at_or_below"] = pair["trainer"]["val_loss"] <= pair["anchor"]["val_loss"]
            pairs.append(pair)
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    argv, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = ArgumentParser(
        prog="python -m benchmarks.race_anchor",
        usage="%(prog)s [options] [-- FLAGS ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=count, default=5, help="(default: %(default)s)")
    parser.add_argument("--seed", type=count, help="of the first pair, each next one is higher (default: a fresh one)")
    parser.add_argument("--anchor_steps", type=count, default=2000, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="also write race_anchor.md and race_anchor.json there"
    )
    args = parser.parse_args(argv)
    try:
        importlib.import_module("scipy.stats")  # to miss it now, and not after all runs
        if args.pairs < 1 or args.anchor_steps < 1:
            raise ToolError("--pairs and --anchor_steps: expected at least 1")
        if taken := [flag for flag in flags if flag.split("=")[0] in OWN_FLAGS]:
            raise ToolError(f"{taken[0]} is the race's own: leave it out after --")
        seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
        pairs = race(args.pairs, seed, args.anchor_steps, flags)
        found = summary(pairs)
        told = table(pairs, found, flags)
        print(told)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "race_anchor.md").write_text(told + "\n", encoding="utf-8")
            document = dict(flags=flags, anchor_steps=args.anchor_steps, **found, runs=pairs)
            (args.out / "race_anchor.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0 if found["reached"] else 1
    except (ToolError, OSError) as error:
        print(f"python -m benchmarks.race_anchor: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"python -m benchmarks.race_anchor: {error}; pip install -r {RECORDS / 'requirements.txt'}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("python -m benchmarks.race_anchor: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
