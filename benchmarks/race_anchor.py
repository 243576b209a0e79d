"""Race train_gpt.py's nano preset against the plain GPT of anchor_cpu.py, run in turn.

    python -m benchmarks.race_anchor [--pairs 5] [--out FILE] [-- FLAGS OF train_gpt.py ...]

A pair is one run of each with the same seed. The ratio of train times counts if the trainer's mean validation loss is
below the anchor's by more than chance: the 95% interval of the difference within pairs lies below 0. If it does not,
train longer, for instance with `-- --num_iterations 500`.
Exit codes: 0 the ratio counts, 1 it does not, 2 bad input or a failed run, 130 interrupted.
"""

import argparse
import importlib
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.startup import own_process
from records.proof import interval, ratio_interval

OWN_FLAGS = ("--preset", "--seed", "--log_dir", "--run_id")


def run(side: str, seed: int, anchor_steps: int, flags: Sequence[str]) -> dict:
    if side == "anchor":
        command = [str(ROOT / "benchmarks" / "anchor_cpu.py"), "--seed", str(seed), "--steps", str(anchor_steps)]
        return json.loads(own_process(command).splitlines()[-1])
    with tempfile.TemporaryDirectory(prefix="race-anchor-") as folder:
        own = ["--preset", "nano", "--seed", str(seed), "--log_dir", folder, "--run_id", "run"]
        own_process([str(ROOT / "train_gpt.py"), *own, *flags])
        return json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))


def race(number: int, seed: int, anchor_steps: int, flags: Sequence[str]) -> list[dict]:
    """Run pairs in the order A T T A A T ..., in which a linear drift of the machine's speed cancels."""
    pairs = []
    for i in range(number):
        pair: dict = dict(seed=seed + i)
        for side in ("anchor", "trainer") if i % 2 == 0 else ("trainer", "anchor"):
            found = run(side, seed + i, anchor_steps, flags)
            pair[side] = {name: found[name] for name in ("val_loss", "train_time_ms")}
            result = f"val_loss {found['val_loss']:.4f}, train time {found['train_time_ms'] / 1000:.1f} s"
            print(f"pair {i + 1} of {number}, seed {seed + i}, {side}: {result}", file=sys.stderr, flush=True)
        pairs.append(pair)
    return pairs


def summary(pairs: Sequence[dict]) -> dict:
    """Return the ratio of times, anchor / trainer, and the loss difference, trainer - anchor, with 95% intervals."""
    anchor, trainer = ([pair[side]["train_time_ms"] for pair in pairs] for side in ("anchor", "trainer"))
    losses = [pair["trainer"]["val_loss"] - pair["anchor"]["val_loss"] for pair in pairs]
    intervals = dict(ratio=ratio_interval(anchor, trainer), loss=interval(losses))
    found = {name: dict(zip(("mean", "low", "high"), values, strict=True)) for name, values in intervals.items()}
    return found | dict(counts=found["loss"]["high"] < 0)


def told(found: dict) -> str:
    lines = ["Ratio of times, anchor / trainer: {mean:.2f} (95%: {low:.2f} to {high:.2f})".format(**found["ratio"])]
    lines += ["val_loss, trainer - anchor: {mean:+.4f} (95%: {low:+.4f} to {high:+.4f})".format(**found["loss"])]
    verdict = "The mean loss is not below the anchor's by more than chance: the ratio does not count."
    return "\n".join(lines if found["counts"] else [*lines, verdict])


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race_anchor", description=__doc__, **options)
    parser.add_argument("--pairs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="first (default: fresh)"
    )
    parser.add_argument("--anchor_steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write runs and summary there, as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of train_gpt.py")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.anchor_steps < 1 or args.seed < 0:
        parser.error("expected --pairs of at least 2, --anchor_steps of at least 1, --seed of at least 0")
    if taken := [flag for flag in args.flags if flag.split("=")[0] in OWN_FLAGS]:
        parser.error(f"{taken[0]} belongs to the race: leave it out after --")
    try:
        importlib.import_module("scipy.stats")  # miss it now, not after all runs
        pairs = race(args.pairs, args.seed, args.anchor_steps, args.flags)
        found = summary(pairs)
        print(told(found))
        if args.out:
            document = dict(flags=args.flags, anchor_steps=args.anchor_steps, **found, runs=pairs)
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0 if found["counts"] else 1
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        parser.error(f"{error}{'; pip install -r records/requirements.txt' * isinstance(error, ModuleNotFoundError)}")
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks.race_anchor: interrupted\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # take the running child along
    sys.exit(main())
