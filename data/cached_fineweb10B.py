"""Download FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the gpt2 preset reads: 7 files, 1.4 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

The source is the Hugging Face dataset https://huggingface.co/datasets/kjj0/fineweb10B-gpt2; the environment variables
of huggingface_hub work, such as HF_ENDPOINT (a mirror) and HF_HUB_OFFLINE. Complete shards are kept, so repeating the
command continues after a failure. Exit codes: 0 all shards are there, 1 a download failed, 2 bad argument,
130 interrupted.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path


from speedrun import needs

with needs.packages("requirements.txt"):
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    from shards import lock_folder, shard_problem

REPO = "kjj0/fineweb10B-gpt2"
RECORD_SHARDS = 6  # enough for the gpt2 preset, which takes seconds to import; a test compares them
MAX_SHARDS = 103
DEFAULT_OUT = Path(__file__).parent / "fineweb10B"
THREADS = 8  # downloads at once
RETRY_WAITS = (1, 4, 16)  # seconds
TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)


def is_transient(error: Exception) -> bool:
    """Tell whether to try again after an error of huggingface_hub, which itself resumes what stalls or ends early."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in TRANSIENT_STATUS
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):  # its metadata requests failed or are off
        return False
    return not (isinstance(error, OSError) and error.errno)  # with an errno: disk full, permission denied


def sha256(path: Path) -> str:
    """Return the SHA-256, which the hub gives as ETag of large files; the library only compares the length."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(error: Exception) -> str:
    """Describe the error in one line: its class and the first line of its text."""
    shown: BaseException = error
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        shown = error.__cause__  # the reason; the error itself only says that the file is not here
    return f"{type(shown).__name__}: {str(shown).strip().partition(chr(10))[0]}"


def fetch(name: str, out: Path) -> str | None:
    """Download the shard `name` to the folder `out`. Return None, or one line on why it failed.

    The library downloads to a temporary file below `out`/.cache and renames that when it is complete.
    """
    path = out / name
    for wait in (*RETRY_WAITS, None):
        try:
            path.unlink(missing_ok=True)  # an incomplete shard, which the library might take for up to date
            etag = get_hf_file_metadata(hf_hub_url(REPO, name, repo_type="dataset")).etag
            hf_hub_download(REPO, name, repo_type="dataset", local_dir=out)
            if problem := shard_problem(path):
                path.unlink()
                fix = "removed; if it comes again, try another HF_ENDPOINT"
                return f"{name}: {constants.ENDPOINT} sent a wrong file: {problem}; {fix}"
            is_sha256 = re.fullmatch("[0-9a-f]{64}", etag or "")  # some mirrors give another ETag
            if is_sha256 and etag != (found := sha256(path)):
                path.unlink()
                raise OSError(f"its SHA-256 is {found}, {constants.ENDPOINT} states {etag}")
            return None
        except Exception as error:  # any error: the other downloads have to continue
            if wait is None or not is_transient(error):
                return f"{name}: {describe(error)}"
            print(f"{name}: {describe(error)}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last attempt returns")


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    about = f"training shards, 0 to {MAX_SHARDS} [{RECORD_SHARDS}]"
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=RECORD_SHARDS, help=about)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the shards")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= MAX_SHARDS:
        parser.error(f"N is {args.shards}: expected 0 to {MAX_SHARDS} training shards")

    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    try:
        try:
            _lock = lock_folder(args.out)  # held until this function returns
        except BlockingIOError:
            print(f"{args.out}: another download is running there; waiting for it", file=sys.stderr, flush=True)
            _lock = lock_folder(args.out, wait=True)
        missing = [name for name in names if shard_problem(args.out / name) is not None]
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}; fix that, or choose another --out")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    again = f"{needs.PYTHON} {needs.typed(Path(__file__).resolve())} {args.shards}"
    if args.out != DEFAULT_OUT:
        again += f" --out {shlex.quote(str(args.out))}"
    pool = ThreadPoolExecutor(THREADS)
    try:
        problems = [problem for problem in pool.map(partial(fetch, out=args.out), missing) if problem]
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for partial_file in args.out.glob(".cache/huggingface/download/*.incomplete"):
            with contextlib.suppress(FileNotFoundError):  # its thread has just finished
                partial_file.unlink()  # the library never reuses the name
        print(f"\ninterrupted; to continue: {again}", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} of {len(names)} files are missing in {args.out}; to continue: {again}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(names)} shards complete, {len(missing)} of them new")
    return 0


if __name__ == "__main__":
    code = main()
    if code == 130:
        os._exit(code)  # sys.exit would wait for the running downloads
    sys.exit(code)
