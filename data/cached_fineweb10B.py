"""Download FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the gpt2 preset reads: 6 files, 1.2 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

huggingface_hub fetches https://huggingface.co/datasets/kjj0/fineweb10B-gpt2 to its cache; its environment variables
work, such as HF_HOME (where the cache is), HF_ENDPOINT (a mirror) and HF_HUB_OFFLINE. The shards are hard links to that
cache, or copies where it lies on another disk. The same command continues after a failure.
Exit codes: 0 all shards are there, 1 a download failed, 2 bad argument, 130 interrupted.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from shards import shard_problem

REPO = "kjj0/fineweb10B-gpt2"
RECORD_SHARDS = 5  # enough for the gpt2 preset, which takes seconds to import; a test compares them
MAX_SHARDS = 103


def download(name: str) -> Path:
    """Return the path of a shard in the hub's cache, where it may be already."""
    get = partial(hf_hub_download, REPO, name, repo_type="dataset")
    try:
        return Path(get())
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        return Path(get(token=False))  # the data are public, and the user's token has expired


def cached_problem(path: Path) -> str | None:
    """Return None for the shard that the hub has, else a few words: the library compares only the length."""
    etag = os.path.basename(os.readlink(path)) if path.is_symlink() else ""  # of large files their SHA-256
    if (problem := shard_problem(path)) or not re.fullmatch("[0-9a-f]{64}", etag):
        return problem
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == etag else f"its SHA-256 is {found}, the hub states {etag}"


def fetch(path: Path) -> str | None:
    """Let the shard of this name appear, whole or not at all. Return None, or what is wrong with the hub's."""
    for _ in range(2):  # what is in the cache may be damaged
        cached = download(path.name)
        if not (problem := cached_problem(cached)):
            break
        for wrong in {cached.resolve(), cached}:
            wrong.unlink(missing_ok=True)
    else:
        return f"{constants.ENDPOINT} sends a wrong file: {problem}: try another HF_ENDPOINT"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        new = Path(folder) / path.name
        try:
            os.link(cached.resolve(), new)
        except OSError:  # another disk, or a cache that belongs to somebody else
            shutil.copyfile(cached, new)
        os.replace(new, path)
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
            why = (
                error.__cause__ or error
            )  # where there is a cause, the error only says that the cache has no such file
            problem = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"
        if problem:
            left = f"{len(missing) - i} of {len(names)} files are missing, the same command continues"
            print(f"{parser.prog}: {name}: {problem}; {left}", file=sys.stderr)
            return 1
    print(f"{args.out}: {len(names)} shards complete, {len(missing)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
