"""Write the shard format: 256 int32 of header, then the tokens as uint16.

The header is [20240520, 1, number of tokens, 0, ...], all little-endian, as in the speedrun community's FineWeb shards.
train_gpt.py parses it with its own code, because it imports nothing from this repository.
"""

import os
import tempfile
from pathlib import Path

import numpy as np


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
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    write_file(path, header, np.ascontiguousarray(tokens, dtype="<u2"))
