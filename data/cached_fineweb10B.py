"""Download FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the gpt2 preset reads: 7 files, 1.4 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

The source is the Hugging Face dataset https://huggingface.co/datasets/kjj0/fineweb10B-gpt2. huggingface_hub fetches it
to its cache, and its environment variables work, such as HF_HOME (where the cache is), HF_ENDPOINT (a mirror) and
HF_HUB_OFFLINE. The shards are hard links to that cache, or copies where it lies on another disk. Complete shards are
kept, so repeating the command continues after a failure.
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
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from shards import shard_problem

REPO = "kjj0/fineweb10B-gpt2"
RECORD_SHARDS = 6  # enough for the gpt2 preset, which takes seconds to import; a test compares them
MAX_SHARDS = 103
DEFAULT_OUT = Path(__file__).parent / "fineweb10B"


def download(name: str, force: bool) -> Path:
    """Return the path of a shard in the hub's cache. Fetch it if it is not there, or in any case."""
    get = partial(hf_hub_download, REPO, name, repo_type="dataset", force_download=force)
    try:
        return Path(get())
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        return Path(get(token=False))  # the data are public, and the user's token has expired


def file_problem(path: Path) -> str | None:
    """Return None for the shard that the hub has, else a few words: the library itself compares only the length."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""  # the ETag, for large files their SHA-256
    problem = shard_problem(path)
    if not problem and re.fullmatch("[0-9a-f]{64}", name):
        with open(path, "rb") as file:
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != name:
                problem = f"its SHA-256 is {found}, the hub states {name}"
    return problem


def put(cached: Path, path: Path) -> None:
    """Let `cached` appear at `path`, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        new = Path(folder) / path.name
        try:
            os.link(cached.resolve(), new)
        except OSError:  # another disk, or a cache that belongs to somebody else
            shutil.copyfile(cached, new)
        os.replace(new, path)


def fetch(path: Path) -> str | None:
    """Get the shard of this name. Return None, or a line on what is wrong with the one that the hub has."""
    if problem := file_problem(cached := download(path.name, force=False)):
        print(f"note: {cached}: {problem}; fetching it again", file=sys.stderr)
        cached.unlink()  # else it stays the cache's file of that name
        if problem := file_problem(cached := download(path.name, force=True)):
            return f"{constants.ENDPOINT} sends a wrong file: {problem}: try another HF_ENDPOINT"
    put(cached, path)
    return None


def describe(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the reason; the error itself only says that the file is not here
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    about = f"training shards, 0 to {MAX_SHARDS} [{RECORD_SHARDS}]"
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=RECORD_SHARDS, help=about)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the shards")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= MAX_SHARDS:
        parser.error(f"N is {args.shards}: expected 0 to {MAX_SHARDS} training shards")
    paths = [args.out / f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    paths.insert(0, args.out / "fineweb_val_000000.bin")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        missing = [path for path in paths if shard_problem(path)]
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}; fix that, or choose another --out")
    for i, path in enumerate(missing):
        try:
            problem = fetch(path)
        except KeyboardInterrupt:
            print(f"\n{parser.prog}: interrupted; the same command continues", file=sys.stderr)
            return 130
        except Exception as error:  # of whatever kind: to the user it is a line
            problem = describe(error)
        if problem:
            left = f"{len(missing) - i} of {len(paths)} files are missing, the same command continues"
            print(f"{parser.prog}: {path.name}: {problem}; {left}", file=sys.stderr)
            return 1
    print(f"{args.out}: {len(paths)} shards complete, {len(missing)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
