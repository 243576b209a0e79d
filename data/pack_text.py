"""Packs any text into shards that train_gpt.py reads, as bytes (the nano preset) or GPT-2 tokens (the gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs: pip install -r data/requirements.txt

and prints the command that trains on them, with flags that fit. A file is wholly in training or in validation, by the
hash of its name; where there is one file only, this holds for its documents. Documents are

- bytes: those of `pack_nano.py`: pieces of at least 256 bytes cut at blank lines (at the latest after 8 MiB). The
  model's window is 128 bytes: it loses little, and what many files repeat (a licence, a quoted mail) counts once.
- gpt2: files; those over 64 KiB are cut at the first blank line after so many bytes, at the latest after 1 MiB. That is
  ten times the model's window: few tokens miss what stood before them, and a step still mixes two dozen documents.
  They are decoded as UTF-8, with U+FFFD for what is none; the names of special tokens in them are ordinary text.

Equal documents count once, and training keeps what both splits have. The order is that of the documents' SHA-1: a fixed
shuffle, after which any stretch is a fair sample of all. For this the documents first go to buckets on the disk, by the
beginning of their SHA-1, and then each bucket is sorted and packed. So memory does not grow with the text (0.2 GB per
process), and the shards depend neither on the number of workers nor on where the text lies. The disk needs room for
three times the text. Exit codes: 0 packed, 2 something has to be mended, 130 interrupted: then nothing is left behind.
"""

import argparse
import contextlib
import hashlib
import itertools
import multiprocessing
import os
import shlex
import signal
import struct
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pack_nano import EOT, MIN_DOCUMENT_BYTES, to_tokens
from shards import ArgumentParser, ShardWriter

ROOT = Path(__file__).resolve().parent.parent
SHARD_TOKENS = 100_000_000
TEXT_EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
CHUNK_BYTES = 2**20  # read at once
BATCH_BYTES = 2**24  # of text that a worker holds before it appends to the buckets
BUCKET_BYTES = 2**23  # of text in a bucket, on average; tokens and copies take ten times that in memory
MAX_BUCKETS = 4096  # more would be tiny writes; beyond 32 GB the buckets grow instead
RECORD = struct.Struct("<20sIQ")  # of a document in a bucket: SHA-1, number of its file, length


class UserError(Exception):
    """Something outside of this script has to change: an argument or a file."""


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes documents and tokens, and what the preset that trains on them needs.

    The latter repeats train_gpt.py, which takes seconds to import; a test compares them.
    """

    preset: str
    eot: int
    min_bytes: int  # of a document, unless it ends its file
    max_bytes: int
    file_end: bytes  # what is put behind every file
    batch_tokens: int
    num_iterations: int
    val_tokens: int
    val_seq_lens: tuple[int, ...]  # the preset's, and smaller ones for less text


TOKENIZERS = {
    "bytes": Tokenizer("nano", EOT, MIN_DOCUMENT_BYTES, BUCKET_BYTES, b"\n\n", 1024, 580, 262_144, (8192,)),
    "gpt2": Tokenizer("gpt2", 50256, 2**16, 2**20, b"", 393_216, 1770, 10_485_760, (262_144, 65_536)),
}


# ----------------------------------------------------------------------------------------------------------------------
# Files and documents


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """The files to pack, each with the name whose hash decides on its split: its path below the argument.

    Of a folder: what ends in one of `extensions` and is not hidden. A file named itself is taken as it is.
    """
    files = {}
    for argument in arguments:
        if argument.is_file():
            files[argument.resolve()] = argument.name
        elif argument.is_dir():
            for path in sorted(argument.rglob("*")):
                name = path.relative_to(argument)
                is_hidden = any(part.startswith(".") for part in name.parts)
                if not is_hidden and path.suffix.lower() in extensions and path.is_file():
                    files[path.resolve()] = name.as_posix()
        else:
            raise UserError(f"{argument}: no such file or folder")
    return files


def unify_newlines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks with \\n for every \\r\\n, else text from Windows would have no blank lines."""
    held = b""
    for chunk in chunks:
        text = held + chunk
        held = b"\r" if text.endswith(b"\r") else b""  # its \n may come with the next chunk
        yield text[: len(text) - len(held)].replace(b"\r\n", b"\n")
    yield held


def stream_documents(chunks: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cuts a file at double newlines into documents of min_bytes or more, which keep the double newline.

    The rest, with `file_end`, is a document too, unless it is only white space. Longer documents than max_bytes are cut
    after so many. As `pack_nano.split_documents`, but holds one chunk and one document.
    """
    text, searched = bytearray(), 0  # from the beginning of the document on; up to here there is no cut to find
    is_tail = False  # of a document longer than max_bytes
    for chunk in chunks:
        text += chunk
        start = 0  # of the document, in `text`
        while (end := text.find(b"\n\n", searched) + 2) > 1:
            searched = end
            if is_tail or end - start >= tokenizer.min_bytes:
                yield from cut(bytes(text[start:end]), tokenizer.max_bytes)
                start, is_tail = end, False
        searched = max(searched, len(text) - 1)
        while len(text) - start > tokenizer.max_bytes:
            yield bytes(text[start : start + tokenizer.max_bytes])
            start, is_tail = start + tokenizer.max_bytes, True
        del text[:start]
        searched -= start
    text += tokenizer.file_end
    if is_tail or text.strip() or len(text) >= tokenizer.min_bytes:
        yield from cut(bytes(text), tokenizer.max_bytes)


def cut(document: bytes, max_bytes: int) -> Iterator[bytes]:
    return (document[i : i + max_bytes] for i in range(0, len(document), max_bytes))


# ----------------------------------------------------------------------------------------------------------------------
# What workers do


bytes_read: Any  # of all workers, for the progress bar
stop: Any  # an event


def start_worker(*shared) -> None:
    global bytes_read, stop  # only a start can pass them
    bytes_read, stop = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_the_main_process() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)  # it was killed: else workers would wait for tasks for ever

    threading.Thread(target=end_with_the_main_process, daemon=True).start()


def read_chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if stop.is_set():
                raise KeyboardInterrupt
            yield chunk
            with bytes_read:
                bytes_read.value += len(chunk)


def fill_buckets(
    files: list[tuple[int, Path]], folder: Path, num_buckets: int, tokenizer: Tokenizer
) -> dict[int, tuple[bytes, bytes]]:
    """Puts the documents of numbered files into buckets by the beginning of their SHA-1.

    Returns the lowest and the highest SHA-1 of every file that has documents.
    """
    buckets: defaultdict[int, bytearray] = defaultdict(bytearray)
    held, found = 0, dict[int, tuple[bytes, bytes]]()

    def flush() -> None:
        for bucket, records in buckets.items():
            with open(folder / f"{bucket}.{os.getpid()}", "ab") as file:  # each worker has files of its own: no locks
                file.write(records)
        buckets.clear()

    for number, path in files:
        for document in stream_documents(unify_newlines(read_chunks(path)), tokenizer):
            digest = hashlib.sha1(document).digest()
            lowest, highest = found.get(number, (digest, digest))
            found[number] = min(lowest, digest), max(highest, digest)
            bucket = buckets[int.from_bytes(digest[:4]) * num_buckets >> 32]
            bucket += RECORD.pack(digest, number, len(document))
            bucket += document
            held += len(document)
            if held >= BATCH_BYTES:
                flush()
                held = 0
    flush()
    return found


def read_records(paths: list[Path]) -> Iterator[tuple[bytes, int, bytes]]:
    """The (SHA-1, number of the file, text) of a bucket's documents; its files are removed."""
    for path in paths:
        with open(path, "rb") as file:
            while head := file.read(RECORD.size):
                digest, number, length = RECORD.unpack(head)
                yield digest, number, file.read(length)
        path.unlink()


def pack_bucket(bucket: int, folder: Path, split: "Split", tokenizer: Tokenizer) -> dict[str, Path]:
    """Tokens of the bucket's documents for both splits, without doubles, in order of SHA-1.

    Files of them: of a worker that dies while it sends more than a few bytes, the main process would wait for the rest.
    """
    documents: dict[str, dict[bytes, bytes]] = {"train": {}, "val": {}}
    for digest, number, document in read_records(list(folder.glob(f"{bucket}.*"))):
        documents["val" if split.is_val(digest, number) else "train"][digest] = document
    for digest in documents["train"]:
        documents["val"].pop(digest, None)
    encode = encode_gpt2 if tokenizer.preset == "gpt2" else to_tokens
    paths = {name: folder / f"{bucket}-{name}" for name, found in documents.items() if found}
    for name, path in paths.items():
        encode([documents[name][digest] for digest in sorted(documents[name])]).tofile(path)
    return paths


def load_gpt2():
    """tiktoken's GPT-2 encoding, which it downloads where it has not yet done so."""
    try:
        import tiktoken
    except ImportError:
        requirements = shlex.quote(os.path.relpath(Path(__file__).with_name("requirements.txt")))
        fix = f"{shlex.quote(sys.executable)} -m pip install -r {requirements}"
        raise UserError(f"--tokenizer gpt2 needs the package tiktoken: {fix}") from None
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # OSError: of requests, too; ValueError: another content than expected
        fix = "set TIKTOKEN_CACHE_DIR to a folder that it was downloaded to, here or elsewhere"
        raise UserError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None


def encode_gpt2(documents: list[bytes]) -> np.ndarray:
    """uint16 tokens: for each document the end-of-text token, then its text."""
    encoding = load_gpt2()
    eot, pieces = np.array([encoding.eot_token], dtype=np.uint16), list[np.ndarray]()
    for document in documents:
        tokens = encoding.encode_to_numpy(document.decode("utf-8", errors="replace"), disallowed_special=())
        pieces += eot, tokens.astype(np.uint16)
    return np.concatenate(pieces)


# ----------------------------------------------------------------------------------------------------------------------
# Splits and flags


@dataclass(frozen=True)
class Split:
    """Which documents are validation: those of `val_files`, or where this is None, those of a SHA-1 below `end`."""

    val_files: frozenset[int] | None = None
    end: bytes = b""

    def is_val(self, digest: bytes, number: int) -> bool:
        return digest < self.end if self.val_files is None else number in self.val_files


def choose_split(names: list[str], found: dict[int, tuple[bytes, bytes]], val_fraction: float) -> Split:
    """By the SHA-1 of the names of the files in which documents were `found`; of the documents, if it is one file.

    The splits both get a file or document, if there are two.
    """
    end = min(int(val_fraction * 2**160), 2**160 - 1).to_bytes(20)
    if len(found) == 1:
        ((lowest, highest),) = found.values()
        return Split(end=min(max(end, lowest + b"\0"), highest))  # \0: just above it
    hashes = sorted((hashlib.sha1(names[number].encode()).digest(), number) for number in sorted(found))
    num_val = sum(digest < end for digest, _ in hashes)
    num_val = min(max(num_val, 1), len(hashes) - 1)
    return Split(val_files=frozenset(number for _, number in hashes[:num_val]))


def flags_for(num_tokens: dict[str, list[int]], tokenizer: Tokenizer) -> list[str]:
    """Flags that fit the preset to shards of so many tokens; where they hold what it needs, none."""

    def count(split: str, length: int) -> int:
        """As the trainer counts: each piece needs one token more, for its last target."""
        return sum(max(n - 1, 0) // length for n in num_tokens[split])

    val_seq_lens = tokenizer.val_seq_lens
    val_seq_len = next((length for length in val_seq_lens if count("val", length)), val_seq_lens[-1])
    for split, length in (("train", tokenizer.batch_tokens), ("val", val_seq_len)):
        if not count(split, length):
            advice = "give more text" if split == "train" else "give more text, or a larger --val_fraction"
            if tokenizer.preset == "gpt2":
                advice += ", or pack it as bytes for the nano preset: without --tokenizer gpt2"
            held = f"{sum(num_tokens[split]):,} tokens for {split}"
            raise UserError(f"too little text: {held}, at least {length + 1:,} are needed; {advice}")
    steps, val_tokens = count("train", tokenizer.batch_tokens), count("val", val_seq_len) * val_seq_len
    flags = {
        "--num_iterations": steps if steps < tokenizer.num_iterations else None,
        "--val_seq_len": val_seq_len if val_seq_len != val_seq_lens[0] else None,
        "--val_tokens": val_tokens if val_tokens < tokenizer.val_tokens else None,
    }
    return [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]


# ----------------------------------------------------------------------------------------------------------------------
# The two passes


def batches_of(files: dict[Path, int], batch_bytes: int) -> Iterator[list[tuple[int, Path]]]:
    """The numbered files in groups of so many bytes, the largest first: none is left to one worker at the end."""
    batch, held = [], 0
    for number, (path, size) in sorted(enumerate(files.items()), key=lambda file: -file[1][1]):
        batch.append((number, path))
        held += size
        if held >= batch_bytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def write_shards(args: argparse.Namespace, folder: Path) -> dict[str, ShardWriter]:
    """Reads the text and writes the shards of both splits into `folder`."""
    extensions = {f".{extension.strip().lstrip('.').lower()}" for extension in args.ext.split(",")}
    names, tokenizer = find_files(args.inputs, extensions), TOKENIZERS[args.tokenizer]
    sizes = {path: path.stat().st_size for path in names}
    total = sum(sizes.values())
    num_buckets = min(max(total // BUCKET_BYTES, 4 * args.workers), MAX_BUCKETS)
    shared = shared_bytes_read, shared_stop = multiprocessing.Value("q", 0), multiprocessing.Event()
    bar = partial(tqdm, total=total, unit="B", unit_scale=True, disable=None)  # silent where stderr is no terminal
    with ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=shared) as pool:
        try:
            batches = batches_of(sizes, min(BATCH_BYTES, total // (4 * args.workers)))
            pending = {pool.submit(fill_buckets, batch, folder, num_buckets, tokenizer) for batch in batches}
            found: dict[int, tuple[bytes, bytes]] = {}
            with bar(desc="reading") as progress:
                while pending:
                    done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                    progress.update(shared_bytes_read.value - progress.n)
                    for future in done:
                        found |= future.result()
            if not found:
                kinds = ",".join(sorted(extensions))
                raise UserError(f"found no text in {len(names)} files: name files, or folders with {kinds} (--ext)")
            split = choose_split(list(names.values()), found, args.val_fraction)
            writers = {name: ShardWriter(folder, name, tokenizer.eot, SHARD_TOKENS) for name in ("train", "val")}
            futures = (pool.submit(pack_bucket, i, folder, split, tokenizer) for i in range(num_buckets))
            ahead = deque(itertools.islice(futures, args.workers + 1))  # no more: they wait on the disk for their turn
            with bar(desc="packing") as progress:
                while ahead:
                    for name, path in ahead.popleft().result().items():
                        writers[name].write(np.fromfile(path, dtype=np.uint16))
                        path.unlink()
                    ahead.extend(itertools.islice(futures, 1))
                    progress.update(total / num_buckets)
        except BaseException:
            shared_stop.set()
            pool.shutdown(cancel_futures=True)  # and waits for buckets that are being packed, a second or two
            raise
    for writer in writers.values():
        writer.close()
    return writers


def pack(args: argparse.Namespace) -> list[str]:
    """Writes the shards and returns the trainer's flags for them."""
    old = sorted(path for split in ("train", "val") for path in args.out.glob(f"{split}_*.bin"))
    if old and not args.force:
        fix = f"--force replaces all {len(old)} shards in {args.out}, or choose another --out"
        raise UserError(f"{old[0]} is there already: {fix}")
    if args.tokenizer == "gpt2":
        load_gpt2()  # fails now or never; where workers are forked, they have it, too
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as folder:
            writers = write_shards(args, Path(folder))
            num_tokens = {split: [shard[2] for shard in writer.shards] for split, writer in writers.items()}
            fitting = flags_for(num_tokens, TOKENIZERS[args.tokenizer])
            for path in old:
                path.unlink()
            for split in ("train", "val"):  # validation last: without it the trainer refuses what was interrupted
                for path, documents, tokens in writers[split].shards:
                    os.replace(path, args.out / path.name)
                    print(f"{args.out / path.name}: {documents:,} documents, {tokens:,} tokens")
    finally:
        with contextlib.suppress(OSError):
            args.out.rmdir()  # which leaves it where it is not empty
    folder = args.out.resolve()
    if folder.is_relative_to(ROOT):
        folder = folder.relative_to(ROOT)  # as run.sh takes it
    flags = ["--preset", TOKENIZERS[args.tokenizer].preset]
    for split in ("train", "val"):
        flags += f"--{split}_files", f"{folder.as_posix()}/{split}_*.bin"
    return flags + fitting


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    default = Path(os.path.relpath(Path(__file__).parent / "own"))
    parser.add_argument("--out", type=Path, default=default, help="folder for the shards [%(default)s]")
    about = "part of the files for validation; of the documents, where there is one file [%(default)s]"
    parser.add_argument("--val_fraction", type=float, default=0.05, help=about)
    parser.add_argument("--ext", default=TEXT_EXTENSIONS, help="what to take from folders [%(default)s]")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes [all cores: %(default)s]")
    parser.add_argument("--force", action="store_true", help="replace all train_*.bin and val_*.bin in --out")
    parser.add_argument("--train", action="store_true", help="train on the shards then")
    args = parser.parse_args(argv)
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: expected more than 0 and less than 1")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: expected at least 1")
    try:
        flags = pack(args)
    except UserError as error:
        parser.error(str(error))
    except BrokenProcessPool:
        parser.error("a worker was killed, perhaps because memory ran out: try fewer --workers")
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror}")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    print("train on it: ./run.sh", shlex.join(flags), flush=True)
    if args.train:
        os.execv(ROOT / "run.sh", ["./run.sh", *flags])


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # which would leave the temporary folder; nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
