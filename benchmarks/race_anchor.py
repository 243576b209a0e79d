"""Race train_gpt.py's nano preset against the plain GPT of anchor_cpu.py, run in turn.

    python -m benchmarks.race_anchor [--pairs 5] [--out FOLDER] [-- FLAGS OF train_gpt.py ...]

A pair is one run of each with the same seed. The ratio of train times, trainer / anchor, counts if the trainer's mean
validation loss is below the anchor's by more than chance: the 95% interval of the difference within pairs lies below 0.
If it does not, train longer, for instance with `-- --num_iterations 500`.
Exit codes: 0 the ratio counts, 1 it does not, 2 bad input or a failed run, 130 interrupted.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from records import race
from records.logs import ToolError, printable, read_script
from records.process import ROOT, own_process

OWN_FLAGS = ("--preset", "--seed", "--log_dir", "--run_id")
TRAINER, ANCHOR = ROOT / "train_gpt.py", ROOT / "benchmarks" / "anchor_cpu.py"


def run_anchor(steps: int, seed: int, run_id: str, folder: Path) -> dict:
    """Run the anchor, keep its result, and return the figures of the race."""
    told = own_process([str(ANCHOR), "--seed", str(seed), "--steps", str(steps)]).splitlines()[-1]
    (ROOT / folder / f"{run_id}.json").write_text(told + "\n", encoding="utf-8")
    result = json.loads(told)
    return dict(val_loss=result["val_loss"], train_time=result["train_time_ms"])


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race_anchor", description=__doc__, **options)
    parser.add_argument("--pairs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first pair (default: %(default)s)")
    parser.add_argument("--anchor_steps", type=int, default=2000, help="(default: %(default)s)")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="FOLDER", help="of race.json and logs (default: logs/race-TIME)")
    folder.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of train_gpt.py")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.anchor_steps < 1 or args.seed < 0:
        parser.error("expected --pairs of at least 2, --anchor_steps of at least 1, --seed of at least 0")
    if taken := [flag for flag in args.flags if flag.split("=")[0] in OWN_FLAGS]:
        parser.error(f"{taken[0]} belongs to the race: leave it out after --")
    flags = ["--preset", "nano", *args.flags]
    scripts = [read_script(str(path), ROOT / "records") for path in (TRAINER, ANCHOR)]
    runners = [functools.partial(race.run_script, TRAINER, flags, 1), functools.partial(run_anchor, args.anchor_steps)]
    try:
        plan = race.plan_of(scripts, [*flags, f"--anchor_steps={args.anchor_steps}"], args.pairs, args.seed)
        document = race.in_turn(plan, runners, args.out, args.resume)
    except (ToolError, RuntimeError, OSError, ModuleNotFoundError) as error:
        install = "; pip install -r records/requirements.txt" * isinstance(error, ModuleNotFoundError)
        parser.error(printable(f"{error}{install}"))
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks.race_anchor: interrupted\n")
    print(race.told(document))
    counts = document["comparisons"][0]["val_loss"]["high"] < 0
    if not counts:
        print("The mean loss is not below the anchor's by more than chance: the ratio does not count.")
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main())
