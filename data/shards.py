"""Read and write the shard format: 256 int32 of header, then the tokens as uint16.

The header is [20240520, 1, number of tokens, 0, ...], all little-endian, as in the speedrun community's FineWeb shards.
train_gpt.py parses it with its own code, because it imports nothing from this repository.
"""

import argparse
import errno
import fcntl
import os
import sys
import tempfile
import typing
from pathlib import Path

import numpy as np

SHARD_MAGIC, SHARD_VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS


class ArgumentParser(argparse.ArgumentParser):
    """Report an error in one line, without the usage, and exit with code 2."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def path_argument(text: str) -> Path:
    """Return the path of an argument; not '', an unset variable, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'': expected a path")
    return Path(text)


def lock_folder(folder: Path, wait: bool = False) -> typing.BinaryIO:
    """Create `folder` and lock it until the returned file is closed or this process dies.

    If another process holds the lock, wait for it or raise BlockingIOError. The file itself stays: if each process
    removed it, two could hold locks on different files of that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "ab")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            lock.close()
            raise
        print(f"{folder}: this file system has no locks; let only one process write there", file=sys.stderr)
    return lock


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


class ShardWriter:
    """Write documents to `folder`/`prefix`_000000.bin, ..._000001.bin and so on.

    Documents are never cut: one that would take a shard over `max_tokens` starts the next shard. Until a shard is
    complete its header says 0 tokens, so readers refuse one whose writing was interrupted.
    """

    def __init__(self, folder: Path, prefix: str, eot: int, max_tokens: int) -> None:
        self.folder, self.prefix, self.eot, self.max_tokens = folder, prefix, eot, max_tokens
        self.shards: list[tuple[Path, int, int]] = []  # path, documents, tokens; the last one may still grow
        self.file: typing.BinaryIO | None = None

    def write(self, tokens: np.ndarray) -> None:
        """Append whole documents: uint16 tokens, each document beginning with `eot`."""
        starts = np.flatnonzero(tokens == self.eot).tolist()
        tokens = np.ascontiguousarray(tokens, dtype="<u2")
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=False):
            if self.file and self.shards[-1][2] + end - start > self.max_tokens:
                self.close()
            file = self.file or self._open()
            file.write(tokens[start:end])
            path, num_documents, num_tokens = self.shards[-1]
            self.shards[-1] = path, num_documents + 1, num_tokens + end - start

    def _open(self) -> typing.BinaryIO:
        path = self.folder / f"{self.prefix}_{len(self.shards):06d}.bin"
        self.file = open(path, "wb")  # noqa: SIM115 (close does it)
        self.file.write(shard_header(0))
        self.shards.append((path, 0, 0))
        return self.file

    def close(self) -> None:
        """Complete the header of the open shard, if there is one, and sync it."""
        if self.file:
            self.file.seek(0)
            self.file.write(shard_header(self.shards[-1][2]))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None
