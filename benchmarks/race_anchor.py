"""Race train_gpt.py's nano preset against the plain GPT of anchor_cpu.py, on nano's corpus or any other text.

    python -m benchmarks race_anchor [--text FILE] [--pairs 5] [--out FOLDER] [-- FLAGS OF train_gpt.py ...]

A text of 1 to 100 MB is packed as nano's corpus is, as bytes; its last tenth is for validation. Guess how many steps
nano needs to pass the anchor, and say so before the race: `-- --num_iterations 108`. A pair is one run of each with the
same seed. The ratio of train times, trainer / anchor, counts if the trainer's mean validation loss is below the
anchor's by more than chance: the 95% interval of the difference within pairs lies below 0. Both clocks leave out
warm-up and validation.
Exit codes: 0 the ratio counts, 1 it does not, 2 bad input or a failed run, 130 interrupted.
"""

import argparse
import functools
import glob
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pack_nano import shuffle_documents, split_documents, to_tokens
from records import race
from records.logs import ToolError, printable, read_script
from records.process import ROOT, own_process
from shards import write_shard

OWN_FLAGS = ("--preset", "--seed", "--log_dir", "--run_id", "--train_files", "--val_files", "--val_tokens")
TRAINER, ANCHOR = ROOT / "train_gpt.py", ROOT / "benchmarks" / "anchor_cpu.py"
VAL_SEQ_LEN, VAL_TOKENS = 8192, 262_144  # of nano


def pack(path: Path, folder: Path) -> tuple[list[str], str]:
    """Write the shards of a text to `folder`. Return the trainer's flags for them, and the text's SHA-256."""
    if not path.is_file():  # reading a pipe or a device might never end
        raise ToolError(f"--text {path}: expected a regular file")
    text = path.read_bytes()
    cut = len(text) * 9 // 10
    documents = shuffle_documents(split_documents(text[:cut]), split_documents(text[cut:]))
    count = min(VAL_TOKENS, sum(map(len, documents["val"])) // VAL_SEQ_LEN * VAL_SEQ_LEN)
    if not count:
        raise ToolError(f"--text {path}: its last tenth has too little text that comes once; name a longer text")
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


def run(args: argparse.Namespace, folder: Path) -> dict:
    """Race as the arguments say, with the text's shards in `folder`, and return the document."""
    flags = ["--preset", "nano", "--val_loss_every", "0", *args.flags]
    data, text = pack(args.text, folder) if args.text else ([], "nano")
    scripts = [read_script(str(path), ROOT / "records") for path in (TRAINER, ANCHOR)]
    trainer = functools.partial(race.run_script, TRAINER, [*data, *flags], 1)
    anchor = functools.partial(run_anchor, [f"--data={folder}"] if args.text else [])
    plan = race.plan_of(scripts, [f"--text={text}", *flags], args.pairs, args.seed)
    return race.in_turn(plan, [trainer, anchor], args.out, args.resume)


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks race_anchor", description=__doc__, **options)
    parser.add_argument("--text", type=Path, metavar="FILE", help="(default: nano's corpus)")
    parser.add_argument("--pairs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first pair (default: %(default)s)")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="FOLDER", help="of race.json and logs (default: logs/race-TIME)")
    folder.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with this race, with the same arguments")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of train_gpt.py")
    args = parser.parse_args(argv)
    if taken := [flag for flag in args.flags if flag.split("=")[0] in OWN_FLAGS]:
        parser.error(f"{taken[0]} belongs to the race: leave it out after --")
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
