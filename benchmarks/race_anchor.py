"""Race train_gpt.py's nano preset against the plain GPT of anchor_cpu.py, on nano's corpus or any other text.

    python -m benchmarks race_anchor [--text FILE] [--pairs 5] [--out FOLDER] [-- FLAGS OF train_gpt.py ...]

A text of 1 to 100 MB is packed as nano's corpus is, as bytes; its last tenth is for validation. Trials find how many
steps nano needs: the fewest, in tens, whose mean loss of 3 runs is 0.02 nats below that of a run of the anchor. To go
without trials, say `-- --num_iterations 140`. Then a pair is one run of each with the same seed. The ratio of train
times, trainer / anchor, counts if the trainer's mean validation loss is below the anchor's by more than chance: the 95%
interval of the difference within pairs lies below 0. Both clocks leave out warm-up and validation.
Exit codes: 0 the ratio counts, 1 it does not, 2 bad input or a failed run, 130 interrupted.
"""

import argparse
import functools
import glob
import hashlib
import json
import signal
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from pack_nano import shuffle_documents, split_documents, to_tokens
from records import race
from records.logs import ToolError, printable, read_script
from records.process import ROOT, STOPS, own_process
from shards import write_shard

OWN_FLAGS = ("--preset", "--seed", "--log_dir", "--run_id", "--train_files", "--val_files", "--val_tokens")
TRAINER, ANCHOR = ROOT / "train_gpt.py", ROOT / "benchmarks" / "anchor_cpu.py"
TEXT_BYTES, STEPS, TRIALS, MARGIN = range(10**6, 10**8 + 1), range(10, 641, 10), 3, 0.02
BATCH_TOKENS, VAL_SEQ_LEN, VAL_TOKENS = 1024, 8192, 262_144  # of nano


def pack(path: Path, folder: Path) -> tuple[list[str], str]:
    """Write the shards of a text to `folder`. Return the trainer's flags for them, and the text's SHA-256."""
    if not (path.is_file() and path.stat().st_size in TEXT_BYTES):  # reading a pipe or a device might never end
        raise ToolError(f"--text {path}: expected a regular file of {TEXT_BYTES[0]:,} to {TEXT_BYTES[-1]:,} bytes")
    text = path.read_bytes()
    cut = len(text) * 9 // 10
    documents = shuffle_documents(split_documents(text[:cut]), split_documents(text[cut:]))
    train, val = (sum(map(len, part)) for part in documents.values())
    if train < BATCH_TOKENS * STEPS[-1] or val < VAL_SEQ_LEN:
        told = f"{train:,} bytes for training and {val:,} for validation, as equal documents count once"
        raise ToolError(f"--text {path}: has only {told}; name a longer text")
    count = min(VAL_TOKENS, val // VAL_SEQ_LEN * VAL_SEQ_LEN)
    for split, end in ("train", None), ("val", count + 1):  # the anchor validates on all that is there
        write_shard(folder / f"nano_{split}_000000.bin", to_tokens(documents[split])[:end])
    files = [f"--{split}_files={glob.escape(str(folder))}/nano_{split}_000000.bin" for split in documents]
    return [f"--val_tokens={count}", *files], hashlib.sha256(text).hexdigest()


def run_anchor(flags: Sequence[str], seed: int, run_id: str, folder: Path) -> dict:
    """Run the anchor, keep its result, and return the figures of the race."""
    told = own_process([str(ANCHOR), "--seed", str(seed), *flags]).splitlines()[-1]
    (ROOT / folder / f"{run_id}.json").write_text(told + "\n", encoding="utf-8")
    result = json.loads(told)
    return dict(val_loss=result["val_loss"], train_time=result["train_time_ms"])


def find_steps(flags: Sequence[str], anchor: Callable[..., dict], first_seed: int, folder: Path) -> tuple[str, dict]:
    """Return the flag of the fewest steps that suffice, and the losses of all trials by steps."""
    seeds = [first_seed + race.MAX_PAIRS + i for i in range(TRIALS)]  # none of the race's own
    loss = anchor(seeds[0], "anchor", folder)["val_loss"]
    trials = dict(anchor=[loss])

    def suffices(steps: int) -> bool:
        runner = functools.partial(race.run_script, TRAINER, [*flags, f"--num_iterations={steps}"], 1)
        trials[steps] = [runner(seed, f"{steps}-{seed}", folder)["val_loss"] for seed in seeds]
        told = f"trial of {steps} steps: mean loss {fmean(trials[steps]):.4f}, the anchor's {loss:.4f}"
        print(told, file=sys.stderr, flush=True)
        return fmean(trials[steps]) <= loss - MARGIN

    index = bisect_left(STEPS, True, key=suffices)
    if index == len(STEPS):
        sys.exit(f"nano does not pass the anchor in {STEPS[-1]} steps: no ratio counts")
    return f"--num_iterations={STEPS[index]}", trials


def run(args: argparse.Namespace, folder: Path) -> dict:
    """Race as the arguments say, with shards and trials in `folder`, and return the document."""
    import scipy.stats  # noqa: F401  to miss it now, and not after the trials

    flags = ["--preset", "nano", "--val_loss_every", "0", *args.flags]
    data, text = pack(args.text, folder) if args.text else ([], "nano")
    source = [f"--data={folder}"] if args.text else []
    anchor = functools.partial(run_anchor, [f"--steps={args.anchor_steps}", *source])
    scripts, trials = [read_script(str(path), ROOT / "records") for path in (TRAINER, ANCHOR)], {}
    if not any(flag.startswith("--num_iterations") for flag in args.flags):
        if args.resume:
            flags += race.read_race(args.resume / race.FILE)[0]["flags"][-1:]  # what the trials found
        else:
            found, trials = find_steps([*data, *flags], anchor, args.seed, folder)
            flags.append(found)
    trainer = functools.partial(race.run_script, TRAINER, [*data, *flags], 1)
    plan = race.plan_of(
        scripts, [f"--anchor_steps={args.anchor_steps}", f"--text={text}", *flags], args.pairs, args.seed
    )
    return race.in_turn(plan | dict(trials=trials), [trainer, anchor], args.out, args.resume)


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks race_anchor", description=__doc__, **options)
    parser.add_argument("--text", type=Path, metavar="FILE", help="(default: nano's corpus)")
    parser.add_argument("--pairs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first pair (default: %(default)s)")
    parser.add_argument("--anchor_steps", type=int, default=2000, help="(default: %(default)s)")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="FOLDER", help="of race.json and logs (default: logs/race-TIME)")
    folder.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of train_gpt.py")
    args = parser.parse_args(argv)
    if not 2 <= args.pairs <= race.MAX_PAIRS or args.anchor_steps < 1 or args.seed < 0:
        parser.error(f"expected 2 to {race.MAX_PAIRS} --pairs, --anchor_steps of at least 1, --seed of at least 0")
    if taken := [flag for flag in args.flags if flag.split("=")[0] in OWN_FLAGS]:
        parser.error(f"{taken[0]} belongs to the race: leave it out after --")
    if args.out and (args.out / race.FILE).exists():  # to say it now, and not after the trials
        parser.error(f"{args.out / race.FILE} is there already: go on with --resume, or choose another --out")
    for number in STOPS:
        if signal.getsignal(number) == signal.SIG_DFL:  # which would leave the temporary folder
            signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="race-anchor-") as temporary:
            document = run(args, Path(temporary))
    except (ToolError, RuntimeError, OSError, ModuleNotFoundError) as error:
        install = "; pip install -r records/requirements.txt" * isinstance(error, ModuleNotFoundError)
        parser.error(printable(f"{error}{install}"))
    except KeyboardInterrupt:
        parser.exit(130, "python -m benchmarks race_anchor: interrupted\n")
    print(race.told(document))
    counts = document["comparisons"][0]["val_loss"]["high"] < 0
    if not counts:
        print("The mean loss is not below the anchor's by more than chance: the ratio does not count.")
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main())
