"""Gets FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the record configuration reads: 8 files, 1.6 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

From the Hugging Face dataset https://huggingface.co/datasets/kjj0/fineweb10B-gpt2; the library's environment
variables hold, such as HF_ENDPOINT (a mirror) and HF_HUB_OFFLINE. Complete shards are left alone, so the same
command goes on after a failure. Exit codes: 0 all there, 1 something could not be fetched, 2 bad argument,
130 interrupted.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from shards import ArgumentParser, shard_problem

REPO = "kjj0/fineweb10B-gpt2"
RECORD_SHARDS = 7  # 1,770 steps of 393,216 tokens; a shard holds 254 whole ones
MAX_SHARDS = 103
DEFAULT_OUT = Path(__file__).parent / "fineweb10B"
THREADS = 8  # the files of the record configuration, all at once
RETRY_WAITS = (1, 4, 16)  # seconds
TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)


def is_complete(path: Path) -> bool:
    return path.is_file() and shard_problem(path) is None


def is_transient(error: Exception) -> bool:
    """Whether to try again what huggingface_hub 2.4.0 gave up.

    It retries itself: the metadata request (refused, timed out or TRANSIENT_STATUS: 6 times), 408 and 429 of the
    download, and a download that stalls or ends early, which it resumes. It leaves to us: 5xx of the download,
    connections that are reset, bodies of the wrong length or content, and what its Xet backend raises.
    """
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in TRANSIENT_STATUS
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):  # its 6 metadata requests failed, or none may
        return False
    return not (isinstance(error, OSError) and error.errno)  # with an errno: disk full, no permission


def sha256(path: Path) -> str:
    """Which the hub states as the ETag of large files; the library compares no more than the length."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(error: Exception) -> str:
    """The error in one line: its kind, and the first line of its text."""
    told: BaseException = error
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        told = error.__cause__  # says what happened; the error itself, only that the file is not here
    return f"{type(told).__name__}: {str(told).strip().partition(chr(10))[0]}"


def fetch(name: str, out: Path) -> str | None:
    """Downloads the shard `name` into the folder `out`. Returns None, or in one line why it is not there.

    The library writes to a file of its own below `out`/.cache and renames that once it has all bytes.
    """
    path = out / name
    for wait in (*RETRY_WAITS, None):
        try:
            path.unlink(missing_ok=True)  # it is not complete, but the library could take it for up to date
            stated = get_hf_file_metadata(hf_hub_url(REPO, name, repo_type="dataset")).etag
            hf_hub_download(REPO, name, repo_type="dataset", local_dir=out)
            problem = shard_problem(path)
            is_sha256 = re.fullmatch("[0-9a-f]{64}", stated or "")  # some mirrors state something else
            if problem is None and is_sha256 and stated != (found := sha256(path)):
                path.unlink()
                raise OSError(f"its SHA-256 is {found}, {constants.ENDPOINT} states {stated}")
            if problem is None:
                return None
            path.unlink()
            fix = "removed; if it comes again, try another HF_ENDPOINT"
            return f"{name}: {constants.ENDPOINT} sent a wrong file: {problem}; {fix}"
        except Exception as error:  # whatever it is, the other files go on
            if wait is None or not is_transient(error):
                return f"{name}: {describe(error)}"
            print(f"{name}: {describe(error)}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last attempt returns")


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = f"training shards, 0 to {MAX_SHARDS} [{RECORD_SHARDS}]"
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=RECORD_SHARDS, help=about)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the shards")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= MAX_SHARDS:
        parser.error(f"N is {args.shards}: expected 0 to {MAX_SHARDS} training shards")

    try:
        args.out.mkdir(parents=True, exist_ok=True)
        lock = open(args.out / ".lock", "w")  # noqa: SIM115  dies with this process
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{args.out}: another download is under way there; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    try:
        missing = [name for name in names if not is_complete(args.out / name)]
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    again = f"python data/cached_fineweb10B.py {args.shards}"
    if args.out != DEFAULT_OUT:
        again += f" --out {shlex.quote(str(args.out))}"
    start = time.time()
    pool = ThreadPoolExecutor(THREADS)
    try:
        problems = [problem for problem in pool.map(partial(fetch, out=args.out), missing) if problem]
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for partial_file in args.out.glob(".cache/huggingface/download/*.incomplete"):
            with contextlib.suppress(FileNotFoundError):  # a thread was faster
                if partial_file.stat().st_mtime >= start:  # ours: the library gives every download a new name
                    partial_file.unlink()
        print(f"\ninterrupted; to go on: {again}", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} of {len(names)} files are missing in {args.out}; to go on: {again}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(names)} shards complete, {len(missing)} of them new")
    return 0


if __name__ == "__main__":
    code = main()
    if code == 130:
        os._exit(code)  # sys.exit would wait for the downloads under way
    sys.exit(code)
