"""The shard format, written: 256 int32 of header, then the tokens as uint16.

The header is [20240520, 1, number of tokens, 0, ...], little-endian; it is the format of the speedrun
community's FineWeb shards. `train_gpt.py` reads it with code of its own, because it is self-contained.
"""

import argparse
import hashlib
import os
import tempfile
import typing
from pathlib import Path

import numpy as np

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS


class ArgumentParser(argparse.ArgumentParser):
    """The parser of the scripts beside this one: an error is one line, without the usage, and exit code 2."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def shard_header(num_tokens: int) -> bytes:
    """The 1,024 header bytes of a shard of `num_tokens` tokens."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, num_tokens
    return header.tobytes()


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Writes `tokens` (values below 65,536) to `path` and returns the SHA-256 of the file.

    The file appears whole or not at all: it is written under a temporary name, synced and renamed.
    """
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**16:
        raise ValueError(f"{path.name}: tokens must be in 0 ... 65535, got {tokens.min()} ... {tokens.max()}")
    header, body = shard_header(len(tokens)), np.ascontiguousarray(tokens, dtype="<u2")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    digest = hashlib.sha256(header)
    digest.update(body)
    return digest.hexdigest()


def shard_problem(path: Path) -> str | None:
    """None for a complete shard; otherwise what is wrong with the file, in a few words."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        return f"{size} bytes are no shard header"
    header = np.frombuffer(start, dtype="<i4")
    if header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        return f"header starts with {header[0]}, {header[1]} instead of {SHARD_MAGIC}, {SHARD_VERSION}"
    if size != HEADER_BYTES + 2 * int(header[2]):
        return f"{size} bytes, but the header's {header[2]} tokens need {HEADER_BYTES + 2 * int(header[2])}"
    return None
