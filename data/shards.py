"""What the scripts of this folder share: how they end, the shard format, reading of texts, GPT-2's vocabulary.

A shard is 256 int32 of header, [20240520, 1, number of tokens, 0, ...], then the tokens as uint16, all little-endian,
as in the speedrun community's FineWeb shards. train_gpt.py parses it with its own code, because it imports nothing from
this repository.
"""

import codecs
import contextlib
import os
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT, PROGRAM = Path(__file__).resolve().parents[1], Path(sys.argv[0]).name


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """End with a line at Ctrl-C while packages load: their code in C may turn the exception into another."""

    def end(*_: object) -> None:
        os.write(2, f"{PROGRAM}: interrupted\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    yield
    signal.signal(signal.SIGINT, before)


with loading():
    import numpy as np


class UserError(Exception):
    """An error that the user can fix, in one line; exits with code 2, in sample.py, too."""

    code = 2


def run(main: Callable[[], None]) -> None:
    """Do what a script's `main` does. Errors of the user and of files have a line and code 2, Ctrl-C a line and 130."""
    try:
        return main()
    except (OSError, UserError) as error:
        problem, code = f"error: {error}", 2
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    print(f"{PROGRAM}: {problem}", file=sys.stderr)
    sys.exit(code)


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
    write_file(path, struct.pack("<3i1012x", 20240520, 1, len(tokens)), tokens.astype("<u2"))


def read_text(path: Path) -> str:
    r"""Return a file's text without a byte order mark, and with \n at the end of each line.

    Files are UTF-8, or UTF-16 with a mark. Bytes that are no UTF-8, as in Latin-1, become surrogates, which keep them:
    `text.encode(errors="surrogateescape")` has them again.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode("utf-16", errors="replace")
    else:
        text = content.decode("utf-8-sig", errors="surrogateescape")
    return text.replace("\r\n", "\n")


def gpt2_encoding():
    """Return tiktoken's GPT-2 encoding, which it downloads on first use."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        install = f'{sys.executable} -m pip install -e "{ROOT}[tools]"'
        raise UserError(f"this needs the package tiktoken: {install}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise UserError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
