"""Read and write the shard format: 256 int32 of header, then the tokens as uint16.

The header is [20240520, 1, number of tokens, 0, ...], all little-endian, as in the speedrun community's FineWeb shards.
train_gpt.py parses it with its own code, because it imports nothing from this repository.
"""

import os
import tempfile
from pathlib import Path

import numpy as np


def shard_header(num_tokens: int) -> bytes:
    """Return the 1,024 header bytes of a shard of `num_tokens` tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, num_tokens
    return header.tobytes()


def is_shard(path: Path) -> bool:
    """Tell whether a file is there, and is a complete shard."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(12) == shard_header((path.stat().st_size - 1024) // 2)[:12] and path.stat().st_size % 2 == 0


def write_file(path: Path, *parts: bytes | np.ndarray) -> None:
    """Write a file that appears whole or not at all: under a temporary name, synced and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name
        with open(new, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write `tokens` (0 ... 65535) to `path`."""
    write_file(path, shard_header(len(tokens)), np.ascontiguousarray(tokens, dtype="<u2"))
