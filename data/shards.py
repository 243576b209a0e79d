"""Read and write the shard format: 256 int32 of header, then the tokens as uint16.

The header is [20240520, 1, number of tokens, 0, ...], all little-endian, as in the speedrun community's FineWeb shards.
train_gpt.py parses it with its own code, because it imports nothing from this repository.
"""

import os
import tempfile
from pathlib import Path

import numpy as np

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS


def shard_header(num_tokens: int) -> bytes:
    """Return the 1,024 header bytes of a shard of `num_tokens` tokens."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, num_tokens
    return header.tobytes()


def shard_problem(path: Path) -> str | None:
    """Return None for a complete shard, else a few words on what is wrong with it."""
    if not path.is_file():
        return "no such file"
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        return f"{size} bytes are too few for a shard header"
    magic, version, num_tokens = np.frombuffer(start, dtype="<i4")[:3].tolist()
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        return f"header starts with {magic}, {version} instead of {SHARD_MAGIC}, {SHARD_VERSION}"
    if size != HEADER_BYTES + 2 * num_tokens:
        return f"{size} bytes, but the header's {num_tokens} tokens need {HEADER_BYTES + 2 * num_tokens}"
    return None


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write `tokens` (0 ... 65535) to `path`.

    The file appears whole or not at all: it is written under a temporary name, synced and renamed.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**16:
        raise ValueError(f"{path.name}: tokens must be in 0 ... 65535, got {tokens.min()} ... {tokens.max()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(shard_header(len(tokens)))
            file.write(np.ascontiguousarray(tokens, dtype="<u2"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
