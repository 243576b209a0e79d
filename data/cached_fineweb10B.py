"""Download FineWeb in GPT-2 tokens: the validation shard and the first N training shards, 100 M tokens each.

    python data/cached_fineweb10B.py            # what the gpt2 preset reads: 6 files, 1.2 GB
    python data/cached_fineweb10B.py 103        # everything: 104 files, 21 GB

huggingface_hub fetches https://huggingface.co/datasets/kjj0/fineweb10B-gpt2; HF_ENDPOINT (a mirror) works.
Exit codes: 0 all shards are there, 1 a download failed, 2 bad argument, 130 interrupted.
"""

import argparse
from importlib import import_module
from pathlib import Path

shards = import_module("data.shards" if __package__ else "shards")  # started as a file, Python looks in its folder
with shards.loading():
    import numpy as np

    # Not snapshot_download, which after Ctrl-C waits until its threads are done, for minutes where a server stalls
    from huggingface_hub import hf_hub_download


def is_shard(path: Path) -> bool:
    """Tell whether a shard is there, and as long as its header says (see data/shards.py)."""
    return path.is_file() and np.fromfile(path, "<i4", 3).tolist() == [20240520, 1, (path.stat().st_size - 1024) / 2]


def main(argv: list[str] | None = None) -> None:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(__file__).with_name("fineweb10B")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("shards", metavar="N", nargs="?", type=int, default=5, help="up to 103 [%(default)s]")
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards")
    args = parser.parse_args(argv)
    try:
        for name in ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1))]:
            path = args.out / name
            if is_shard(path):
                continue
            path.unlink(missing_ok=True)  # the library would take a damaged file for what it downloaded
            # The data are public, but a token that has expired is refused
            hf_hub_download("kjj0/fineweb10B-gpt2", name, repo_type="dataset", token=False, local_dir=args.out)
            if not is_shard(path):
                raise RuntimeError("the hub has sent no shard; try another HF_ENDPOINT")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted; the same command continues\n")
    except Exception as error:  # of whatever kind: to the user it is a line
        why = error.__cause__ or error  # the error only says that the cache has no such file
        told = f"{type(why).__name__}: {why}".partition("\n")[0]
        parser.exit(1, f"{parser.prog}: {name}: {told}; the same command continues\n")
    print(f"{args.out}: complete")


if __name__ == "__main__":
    main()
