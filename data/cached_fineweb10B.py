"""Download FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the gpt2 preset reads: 7 files, 1.4 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

huggingface_hub fetches https://huggingface.co/datasets/kjj0/fineweb10B-gpt2; its environment variables work, such as
HF_ENDPOINT (a mirror). The same command continues after a failure.
Exit codes: 0 all shards are there, 1 a download failed, 2 bad argument, 130 interrupted.
"""

import argparse
import sys
from pathlib import Path

from huggingface_hub import constants, hf_hub_download

from shards import shard_problem

REPO = "kjj0/fineweb10B-gpt2"
RECORD_SHARDS = 6  # enough for the gpt2 preset, which takes seconds to import; a test compares them
MAX_SHARDS = 103


def fetch(path: Path) -> str | None:
    """Get the shard of this name. Return None, or what is wrong with the hub's."""
    if not shard_problem(path):
        return None  # another process has got it meanwhile
    path.unlink(missing_ok=True)  # or the library takes a damaged one for its own
    # The data are public: a token that has expired would only hinder
    hf_hub_download(REPO, path.name, repo_type="dataset", local_dir=path.parent, token=False)
    if problem := shard_problem(path):
        path.unlink()
        return f"{constants.ENDPOINT} sends a wrong file: {problem}: try another HF_ENDPOINT"
    return None


def main(argv: list[str] | None = None) -> int:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(__file__).with_name("fineweb10B")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=RECORD_SHARDS, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= MAX_SHARDS:
        parser.error(f"N is {args.shards}: expected 0 to {MAX_SHARDS} training shards")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        missing = [name for name in names if shard_problem(args.out / name)]
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}; fix that, or choose another --out")
    for i, name in enumerate(missing):
        try:
            problem = fetch(args.out / name)
        except KeyboardInterrupt:
            parser.exit(130, f"\n{parser.prog}: interrupted; the same command continues\n")
        except Exception as error:  # of whatever kind: to the user it is a line
            why = error.__cause__ or error  # the error itself may only say that there is no such file here
            problem = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"
        if problem:
            left = f"{len(missing) - i} of {len(names)} files are missing, the same command continues"
            print(f"{parser.prog}: {name}: {problem}; {left}", file=sys.stderr)
            return 1
    print(f"{args.out}: {len(names)} shards complete, {len(missing)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
