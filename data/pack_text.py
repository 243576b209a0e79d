"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs: pip install -r data/requirements.txt

The last line of output is the command that trains on the shards, with flags that fit the amount of text. Each file goes
to training or validation by the hash of its name; a single file is split by document. A document is

- bytes: a piece of at least 256 bytes that ends at a blank line, as in pack_nano.py, cut after 8 MiB. What many files
  repeat (a licence, a quoted mail) then counts once, and the model's window of 128 bytes loses little.
- gpt2: a file. One over 64 KiB is cut at its next blank line, or after 1 MiB: ten times the model's window, yet a step
  still mixes two dozen documents. Bytes that are not UTF-8 become U+FFFD; names of special tokens are ordinary text.

Equal documents count once; one that both splits have stays in training. Documents are sorted by SHA-1, a fixed shuffle
after which any stretch is a fair sample. To need less than 0.3 GB of memory for any amount of text, documents first go
to buckets on disk by SHA-1, then each bucket is sorted and packed. The disk needs room for three times the text.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were.
"""

import argparse
import glob
import hashlib
import os
import shlex
import shutil
import signal
import stat
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from pack_nano import EOT, MIN_DOCUMENT_BYTES, to_tokens
from shards import ArgumentParser, ShardWriter, lock_folder

ROOT = Path(__file__).resolve().parent.parent
SHARD_TOKENS = 100_000_000
TEXT_EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
LINE_BYTES = 2**20  # longer lines are read in parts
BATCH_BYTES = 2**25  # text held in memory before it is appended to the buckets
BUCKET_BYTES = 2**23  # average text in a bucket; packing needs ten times that in memory
MAX_BUCKETS = 4096  # more would make writes tiny; above 32 GB of text the buckets grow instead
MAX_WORKERS = 4 * (os.cpu_count() or 1)  # far more threads than cores only take memory
RECORD = struct.Struct("<20sIQ")  # before each document in a bucket: SHA-1, file number, length
IsVal = Callable[[bytes, int], bool]  # whether the document with this SHA-1 from the file of this number is validation


class UserError(Exception):
    """An argument or a file has to be changed by the user."""


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes documents and tokens, and how many tokens the preset needs.

    The last four fields repeat the preset in train_gpt.py: importing that takes seconds, as it imports torch. A test
    compares them.
    """

    preset: str
    eot: int
    min_bytes: int  # per document, except the last of a file
    max_bytes: int
    file_end: bytes  # appended to every file
    batch_tokens: int
    num_iterations: int
    val_tokens: int
    val_seq_lens: tuple[int, ...]  # the preset's, then shorter ones for less text


TOKENIZERS = {
    "bytes": Tokenizer("nano", EOT, MIN_DOCUMENT_BYTES, BUCKET_BYTES, b"\n\n", 1024, 600, 262_144, (8192,)),
    "gpt2": Tokenizer("gpt2", 50256, 2**16, 2**20, b"", 393_216, 1770, 10_485_760, (262_144, 65_536)),
}


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """Map each file to pack to its name: the path below its argument, whose hash decides the split.

    Folders are searched for files with one of the `extensions`; what is hidden and links to folders are skipped.
    """
    found: list[tuple[Path, str]] = []
    for argument in arguments:
        folders = [argument] if argument.is_dir() else []
        if not folders:
            found.append((argument, argument.name))
        for folder in folders:  # which grows here
            for path in sorted(folder.iterdir()):  # unlike rglob and os.walk, this fails if the folder is unreadable
                if path.is_dir():
                    folders += [] if path.name.startswith(".") or path.is_symlink() else [path]
                elif path.suffix.lower() in extensions and not path.name.startswith("."):
                    found.append((path, path.relative_to(argument).as_posix()))
    files = {}
    for path, name in found:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device might never end
            raise UserError(f"{path}: not a regular file: copy its content to one, or leave it out")
        open(path, "rb").close()  # an unreadable file fails now, not after an hour
        files[path.resolve()] = name
    return files


def stream_documents(file: BinaryIO, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cut a file into documents like `pack_nano.split_documents`, holding only one document in memory.

    A document ends at the first double newline after `min_bytes`; longer ones are cut every `max_bytes`. Windows
    newlines become \\n first, or a file from there would have no double newlines.
    """
    document, searched = bytearray(), 0  # double newlines do not overlap: the next one begins at `searched` or later
    is_tail = False  # of a document longer than max_bytes
    while line := file.readline(LINE_BYTES):
        document += line
        if document.endswith(b"\r\n"):
            document[-2:] = b"\n"
        is_end = False
        if document.endswith(b"\n\n", searched):
            searched = len(document)
            is_end = is_tail or len(document) >= tokenizer.min_bytes
        while len(document) > tokenizer.max_bytes:
            yield bytes(document[: tokenizer.max_bytes])
            del document[: tokenizer.max_bytes]
            searched, is_tail = 0, True
        if is_end:
            yield bytes(document)
            document, searched, is_tail = bytearray(), 0, False
    document += tokenizer.file_end
    if is_tail or document.strip() or len(document) >= tokenizer.min_bytes:
        for start in range(0, len(document), tokenizer.max_bytes):
            yield bytes(document[start : start + tokenizer.max_bytes])


def load_gpt2():
    """Return tiktoken's GPT-2 encoding; tiktoken downloads the vocabulary on first use."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        command = [sys.executable, "-m", "pip", "install", "-r", str(Path(__file__).with_name("requirements.txt"))]
        raise UserError(f"--tokenizer gpt2 needs the package tiktoken: {shlex.join(command)}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise UserError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None


def encode_gpt2(documents: list[bytes], pool: ThreadPoolExecutor) -> np.ndarray:
    """Return uint16 tokens: for each document the end-of-text token, then its text."""
    encoding = load_gpt2()
    eot = np.array([encoding.eot_token], dtype=np.uint16)

    def encode(document: bytes) -> np.ndarray:
        text = document.decode("utf-8", errors="replace")
        return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)  # without the GIL

    return np.concatenate([piece for tokens in pool.map(encode, documents) for piece in (eot, tokens)])


def choose_split(names: list[str], found: dict[int, tuple[bytes, bytes]], val_fraction: float) -> IsVal:
    """Choose the files with the lowest SHA-1 of their names, or from a single file the documents with the lowest SHA-1.

    `found` has the lowest and highest SHA-1 in each file with documents. Both splits get at least one file or document.
    """
    end = min(int(val_fraction * 2**160), 2**160 - 1).to_bytes(20)
    if len(found) == 1:
        ((lowest, highest),) = found.values()
        end = min(max(end, lowest + b"\0"), highest)  # lowest + \0 is just above lowest
        return lambda digest, number: digest < end
    hashes = sorted((hashlib.sha1(names[number].encode()).digest(), number) for number in found)
    num_val = sum(digest < end for digest, _ in hashes)
    val_files = {number for _, number in hashes[: min(max(num_val, 1), len(hashes) - 1)]}
    return lambda digest, number: number in val_files


def flags_for(num_tokens: dict[str, list[int]], tokenizer: Tokenizer) -> list[str]:
    """Return the flags that fit the preset to shards of these sizes, none if they hold all that it needs."""

    def count(split: str, length: int) -> int:
        """Count batches as the trainer does: within one shard, with one more token for the last target."""
        return sum(max(n - 1, 0) // length for n in num_tokens[split])

    val_seq_len = next((n for n in tokenizer.val_seq_lens if count("val", n)), tokenizer.val_seq_lens[-1])
    for split, length in (("train", tokenizer.batch_tokens), ("val", val_seq_len)):
        if not count(split, length):
            held = f"{sum(num_tokens[split]):,} tokens for {split}, at least {length + 1:,} are needed"
            fewer = ", or leave out --tokenizer gpt2: the nano preset needs less" if tokenizer.preset == "gpt2" else ""
            raise UserError(f"too little text: {held}; give more text, or change --val_fraction{fewer}")
    fitting = {
        "--num_iterations": (count("train", tokenizer.batch_tokens), tokenizer.num_iterations),
        "--val_seq_len": (val_seq_len, tokenizer.val_seq_lens[0]),
        "--val_tokens": (count("val", val_seq_len) * val_seq_len, tokenizer.val_tokens),
    }
    return [part for flag, (fits, preset) in fitting.items() if fits < preset for part in (flag, str(fits))]


def fill_buckets(paths: Collection[Path], folder: Path, tokenizer: Tokenizer) -> dict[int, tuple[bytes, bytes]]:
    """Distribute all documents to bucket files by the first bytes of their SHA-1.

    Return the lowest and highest SHA-1 in each file that has documents, by the file's number.
    """
    total = sum(path.stat().st_size for path in paths)
    num_buckets = min(total // BUCKET_BYTES + 1, MAX_BUCKETS)
    buckets: defaultdict[int, bytearray] = defaultdict(bytearray)
    found: dict[int, tuple[bytes, bytes]] = {}
    held = 0

    def flush() -> None:
        for bucket, records in buckets.items():
            with open(folder / f"bucket-{bucket:04d}", "ab") as file:
                file.write(records)
        buckets.clear()
        progress.update(held)

    with tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=None) as progress:  # only on terminals
        for number, path in enumerate(paths):
            with open(path, "rb") as file:
                for document in stream_documents(file, tokenizer):
                    digest = hashlib.sha1(document).digest()
                    lowest, highest = found.get(number, (digest, digest))
                    found[number] = min(lowest, digest), max(highest, digest)
                    bucket = buckets[int.from_bytes(digest[:4]) * num_buckets >> 32]
                    bucket += RECORD.pack(digest, number, len(document)) + document
                    held += len(document)
                    if held >= BATCH_BYTES:
                        flush()
                        held = 0
        flush()
    return found


def read_bucket(path: Path, is_val: IsVal) -> dict[str, list[bytes]]:
    """Return the bucket's documents for both splits, without duplicates and sorted by SHA-1."""
    documents: dict[str, dict[bytes, bytes]] = {"train": {}, "val": {}}
    with open(path, "rb") as file:
        while head := file.read(RECORD.size):
            digest, number, length = RECORD.unpack(head)
            documents["val" if is_val(digest, number) else "train"][digest] = file.read(length)
    for digest in documents["train"]:
        documents["val"].pop(digest, None)
    return {split: [found[digest] for digest in sorted(found)] for split, found in documents.items()}


def write_shards(args: argparse.Namespace, files: dict[Path, str], folder: Path) -> dict[str, list]:
    """Write the shards of both splits into `folder` and return `ShardWriter.shards` of each."""
    tokenizer = TOKENIZERS[args.tokenizer]
    found = fill_buckets(files, folder, tokenizer)
    if not found:
        raise UserError(f"found no text in {len(files)} files: name files, or folders with {args.ext} (--ext)")
    is_val = choose_split(list(files.values()), found, args.val_fraction)
    writers = {split: ShardWriter(folder, split, tokenizer.eot, SHARD_TOKENS) for split in ("train", "val")}
    with ThreadPoolExecutor(args.workers) as pool:
        encode = partial(encode_gpt2, pool=pool) if args.tokenizer == "gpt2" else to_tokens
        for path in tqdm(sorted(folder.glob("bucket-*")), desc="packing", unit="bucket", disable=None):
            for split, documents in read_bucket(path, is_val).items():
                if documents:
                    writers[split].write(encode(documents))
            path.unlink()
    for writer in writers.values():
        writer.close()
    return {split: writer.shards for split, writer in writers.items()}


def pack(args: argparse.Namespace) -> list[str]:
    """Write the shards and return the trainer's flags for them."""
    files = find_files(args.inputs, {f".{extension.strip().lstrip('.').lower()}" for extension in args.ext.split(",")})
    tokenizer = TOKENIZERS[args.tokenizer]
    if args.tokenizer == "gpt2":
        load_gpt2()  # if this fails, then before the work
    with lock_folder(args.out):
        for killed in args.out.glob(".packing-*"):  # left behind by a killed packer, because we hold the lock
            shutil.rmtree(killed, ignore_errors=True)
        old = sorted([*args.out.glob("train_*.bin"), *args.out.glob("val_*.bin")])
        if old and not args.force:
            fix = f"--force replaces all {len(old)} shards in {args.out}, or choose another --out"
            raise UserError(f"{old[0]} is there already: {fix}")
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as folder:
            shards = write_shards(args, files, Path(folder))
            fitting = flags_for({split: [n for _, _, n in found] for split, found in shards.items()}, tokenizer)
            for path in old:
                path.unlink()
            for path, _, _ in (
                shards["train"] + shards["val"]
            ):  # in this order: the trainer refuses to start without val
                os.replace(path, args.out / path.name)
    for path, num_documents, num_tokens in shards["train"] + shards["val"]:
        print(f"{args.out / path.name}: {num_documents:,} documents, {num_tokens:,} tokens")
    out = args.out.resolve()
    out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out  # run.sh changes to ROOT
    train, val = (f"{glob.escape(out.as_posix())}/{split}_*.bin" for split in ("train", "val"))
    return ["--preset", tokenizer.preset, "--train_files", train, "--val_files", val, *fitting]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    own = os.path.relpath(ROOT / "data/own")
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    parser.add_argument(
        "--val_fraction", type=float, default=0.05, help="part of the files for validation [%(default)s]"
    )
    parser.add_argument("--ext", default=TEXT_EXTENSIONS, help="files to take from folders [%(default)s]")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads for GPT-2 tokens [%(default)s]")
    parser.add_argument("--force", action="store_true", help="replace all train_*.bin and val_*.bin in --out")
    parser.add_argument("--train", action="store_true", help="then train on the shards")
    args = parser.parse_args(argv)
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: expected more than 0 and less than 1")
    if not 1 <= args.workers <= MAX_WORKERS:
        parser.error(f"--workers {args.workers}: expected 1 to {MAX_WORKERS}, at most 4 per core")
    try:
        flags = pack(args)
    except UserError as error:
        parser.error(str(error))
    except BlockingIOError:
        parser.error(f"{args.out}: another process is packing there: wait for it, or choose another --out")
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}; fix that, or name another path")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    print("train on it: ./run.sh", shlex.join(flags), flush=True)
    if args.train:
        os.execv(ROOT / "run.sh", ["./run.sh", *flags])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the reader of our output (`| head`) leaves
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup, which ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # the default leaves the temporary folder
    main()
