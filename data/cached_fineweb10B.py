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
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

# Not snapshot_download, which after Ctrl-C waits until its threads are done, for minutes where a server stalls
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

if not __package__:  # `python data/cached_fineweb10B.py` is `python -m data.cached_fineweb10B`
    env = os.environ | dict(PYTHONPATH=f"{Path(__file__).resolve().parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    os.execve(sys.executable, [sys.executable, "-m", "data.cached_fineweb10B", *sys.argv[1:]], env)

from data.shards import is_shard


def fetch(path: Path) -> None:
    """Let the shard of this name appear, whole or not at all."""
    # What is in the cache may be damaged, as the library compares only the length. And a user's token that has expired
    # is refused, though the data are public
    get = partial(hf_hub_download, "kjj0/fineweb10B-gpt2", path.name, repo_type="dataset")
    for again in (False, True):
        try:
            blob = Path(get(force_download=True, token=False) if again else get()).resolve()
        except HfHubHTTPError as error:
            if again or error.response.status_code != 401:
                raise
            continue
        with open(blob, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if is_shard(blob) and (len(blob.name) != 64 or blob.name == found):  # the name of a large one is its SHA-256
            break
    else:
        raise RuntimeError(f"{constants.ENDPOINT} sends no such shard, but SHA-256 {found}: try another HF_ENDPOINT")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        new = Path(folder) / path.name
        try:
            os.link(blob, new)
        except OSError:  # another disk, or a cache that belongs to somebody else
            shutil.copyfile(blob, new)
        os.replace(new, path)


def main(argv: list[str] | None = None) -> None:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(__file__).with_name("fineweb10B")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= 103:
        parser.error(f"N is {args.shards}: expected 0 to 103 training shards")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]
    try:
        for name in names:
            if not is_shard(args.out / name):
                fetch(args.out / name)
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted; the same command continues\n")
    except Exception as error:  # of whatever kind: to the user it is a line
        why = error.__cause__ or error  # the error only says that the cache has no such file
        text = str(why).strip().partition("\n")[0]
        parser.exit(1, f"{parser.prog}: {name}: {type(why).__name__}: {text}; the same command continues\n")
    print(f"{args.out}: {len(names)} shards complete")


if __name__ == "__main__":
    main()
