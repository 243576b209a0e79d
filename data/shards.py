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


class ShardWriter:
    """Writes documents one after the other into `folder`/`prefix`_000000.bin and so on.

    A document is never cut: a shard is full when the next one would take it over `max_tokens`. While a shard grows its
    header says 0 tokens, so that one whose writing is interrupted is refused.
    """

    def __init__(self, folder: Path, prefix: str, eot: int, max_tokens: int) -> None:
        self.folder, self.prefix, self.eot, self.max_tokens = folder, prefix, eot, max_tokens
        self.shards: list[tuple[Path, int, int]] = []  # path, documents, tokens; the last may still grow
        self.file: typing.BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        """Appends whole documents: uint16 tokens, with `eot` at the beginning of each one and nowhere else."""
        starts = np.flatnonzero(tokens == self.eot)
        ends = np.append(starts[1:], len(tokens))
        first = 0
        while first < len(starts):
            path, num_documents, num_tokens = self.shards[-1] if self.file else self._open()
            last = int(np.searchsorted(ends, starts[first] + self.max_tokens - num_tokens, side="right"))
            if last <= first and num_documents:
                self.close()
                continue
            last = max(last, first + 1)  # longer than a shard: gets one of its own
            written = tokens[starts[first] : ends[last - 1]]
            assert self.file is not None
            self.file.write(np.ascontiguousarray(written, dtype="<u2"))
            self.shards[-1] = path, num_documents + last - first, num_tokens + len(written)
            first = last

    def _open(self) -> tuple[Path, int, int]:
        path = self.folder / f"{self.prefix}_{len(self.shards):06d}.bin"
        self.file = open(path, "wb")  # noqa: SIM115 (close does it)
        self.file.write(shard_header(0))
        self.shards.append((path, 0, 0))
        return self.shards[-1]

    def close(self) -> None:
        """Completes the header of the open shard, and syncs it."""
        if self.file:
            self.file.seek(0)
            self.file.write(shard_header(self.shards[-1][2]))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None


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
