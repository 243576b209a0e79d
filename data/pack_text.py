"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs: pip install -r data/requirements.txt

The last line of output is the command that trains on the shards, with flags that fit the amount of text. Each file goes
to training or validation by the hash of its name; fewer than 20 files are split by document. A document is
- bytes: a piece of at least 256 bytes that ends at a blank line, as in pack_nano.py, cut after 64 KiB. What many files
  repeat (a licence, a quoted mail) then counts once, and the model's window of 256 bytes loses little.
- gpt2: a file. One over 64 KiB is cut at its next blank line, or after 1 MiB: ten times the model's window, yet a step
  still mixes two dozen documents. Bytes that are not UTF-8 become U+FFFD; names of special tokens are ordinary text.

Equal documents count once; one that both splits have stays in training. Documents are sorted by SHA-1, a fixed shuffle,
in buckets on disk: 0.3 GB of memory is enough for 20 GB of text. The disk needs room for three times the text.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were.
"""

import argparse
import glob
import hashlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from pack_nano import EOT, MIN_DOCUMENT_BYTES, shuffle_documents, to_tokens
from shards import ArgumentParser, ShardWriter, lock_folder

ROOT = Path(__file__).resolve().parent.parent
SHARD_TOKENS = 100_000_000
LINE_BYTES = 2**20  # longer lines are read in parts
NUM_BUCKETS = 200  # all are open at once: macOS lets a process open 256 files
BUFFER_BYTES = 2**17  # text that goes to a bucket at a time
BATCH_DOCUMENTS = 32  # encoded at a time
MANY_FILES = 20  # are split by file, fewer by document: a file is then too much or too little for validation
# How text becomes documents: least size, but for a file's last one, and largest; what ends a file. Then what the preset
# needs, as train_gpt.py says (1.5 tokens for each that gpt2's packing keeps); shorter val_seq_lens are for less text
Tokenizer = namedtuple(
    "Tokenizer", "preset eot min_bytes max_bytes file_end batch_tokens num_iterations val_tokens val_seq_lens"
)
TOKENIZERS = {
    "bytes": Tokenizer("nano", EOT, MIN_DOCUMENT_BYTES, 2**16, b"\n\n", 1024, 310, 262_144, (8192,)),
    "gpt2": Tokenizer("gpt2", 50256, 2**16, 2**20, b"", 400_000, 1555, 10_485_760, (262_144, 65_536)),
}


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """Map each file to its name below its argument. Folders: what has an extension, and is not hidden or linked to."""
    files = {}
    for argument in arguments:
        paths = [argument]
        for path in paths:  # which grows here
            if path.is_dir():
                if path == argument or not path.is_symlink():  # unlike rglob, iterdir fails if the folder is unreadable
                    paths += [inner for inner in sorted(path.iterdir()) if not inner.name.startswith(".")]
            elif path == argument or path.suffix.lower() in extensions:
                if path.exists() and not path.is_file():  # reading a pipe or a device might never end
                    raise RuntimeError(f"{path}: not a regular file: copy its content to one, or leave it out")
                open(path, "rb").close()  # an unreadable file fails now, not after an hour
                files[path.resolve()] = path.name if path == argument else path.relative_to(argument).as_posix()
    return files


def stream_documents(file: BinaryIO, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cut a file into documents like `pack_nano.split_documents`, holding only one document in memory.

    A document ends at the first double newline after `min_bytes`; longer ones are cut every `max_bytes`. Windows
    newlines become \\n first, or a file from there would have no double newlines.
    """
    document, searched, is_tail, line = bytearray(), 0, False, b"\n"  # is_tail: of a document longer than max_bytes
    while line:
        line = file.readline(LINE_BYTES)
        document += line or tokenizer.file_end
        if line and document.endswith(b"\r\n"):
            document[-2:] = b"\n"
        may_end = not line or document.endswith(b"\n\n", searched)  # double newlines do not overlap
        is_end = may_end and (is_tail or len(document) >= tokenizer.min_bytes or (not line and document.strip()))
        searched = len(document) if may_end else searched
        while len(document) > tokenizer.max_bytes:
            yield bytes(document[: tokenizer.max_bytes])
            del document[: tokenizer.max_bytes]
            searched, is_tail = 0, True
        if is_end:
            yield bytes(document)
            document, searched, is_tail = bytearray(), 0, False


def load_gpt2() -> Callable[[list[bytes]], np.ndarray]:
    """Return what turns documents into GPT-2 tokens; tiktoken downloads the vocabulary on first use."""
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
    except ImportError:
        pip = shlex.join([sys.executable, "-m", "pip", "install", "-r", str(ROOT / "data/requirements.txt")])
        raise RuntimeError(f"--tokenizer gpt2 needs the package tiktoken: {pip}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise RuntimeError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
    pool = ThreadPoolExecutor(os.cpu_count())

    def encode(document: bytes) -> np.ndarray:
        tokens = encoding.encode_to_numpy(document.decode(errors="replace"), disallowed_special=())  # without the GIL
        return np.insert(tokens, 0, encoding.eot_token).astype(np.uint16)

    return lambda documents: np.concatenate(list(pool.map(encode, documents)))


def choose_split(names: list[str], found: dict[int, tuple[bytes, bytes]], val_fraction: float) -> Callable:
    """Choose the files whose names have the lowest SHA-1, of few files the documents that have; at least one each.

    `found` has the lowest and highest SHA-1 in each file with documents.
    """
    by_file = len(found) >= MANY_FILES
    hashes = {number: hashlib.sha1(os.fsencode(names[number])).digest() + number.to_bytes(8) for number in found}
    candidates = hashes.values() if by_file else {edge for edges in found.values() for edge in edges}
    end = min(int(val_fraction * 2**160), 2**160 - 1).to_bytes(20)
    end = min(max(end, min(candidates) + b"\0"), max(candidates))  # that + \0 is just above the lowest
    return lambda digest, number: (hashes[number] if by_file else digest) < end


def flags_for(num_tokens: dict[str, list[int]], tokenizer: Tokenizer) -> list[str]:
    """Return the flags that fit the preset to shards of these sizes, none if they hold all that it needs."""
    fitting_lens = [n for n in tokenizer.val_seq_lens if n < max(num_tokens["val"], default=0)]
    val_seq_len = [*fitting_lens, tokenizer.val_seq_lens[-1]][0]
    lengths = dict(train=tokenizer.batch_tokens, val=val_seq_len)
    # Batches as the trainer counts them: within one shard, with one more token for the last target
    counts = {split: sum(max(n - 1, 0) // length for n in num_tokens[split]) for split, length in lengths.items()}
    for split in (split for split, count in counts.items() if not count):
        held = f"{sum(num_tokens[split]):,} tokens for {split}, {lengths[split] + 1:,} needed"
        fewer = ", or leave out --tokenizer gpt2: the nano preset needs less" if tokenizer.preset == "gpt2" else ""
        need = (lengths["val"] + 1) / sum(map(sum, num_tokens.values()))  # what validation needs of all
        hint = f", or try --val_fraction {min(2 * need, (1 + need) / 2):.2g}" if num_tokens["val"] and need < 1 else ""
        raise RuntimeError(f"too little text: {held} (equal documents count once); give more text{hint}{fewer}")
    fitting = {
        "--num_iterations": (counts["train"], tokenizer.num_iterations),
        "--val_seq_len": (val_seq_len, tokenizer.val_seq_lens[0]),
        "--val_tokens": (counts["val"] * val_seq_len, tokenizer.val_tokens),
    }
    return [part for flag, (fits, preset) in fitting.items() if fits < preset for part in (flag, str(fits))]


def fill_buckets(paths: Collection[Path], folder: Path, tokenizer: Tokenizer) -> dict[int, tuple[bytes, bytes]]:
    """Put documents into files by their SHA-1. Return the lowest and highest SHA-1 of each file that has any."""
    buckets = [open(folder / f"bucket-{i:03d}", "wb", BUFFER_BYTES) for i in range(NUM_BUCKETS)]  # noqa: SIM115
    found: dict[int, tuple[bytes, bytes]] = {}
    total = sum(path.stat().st_size for path in paths)
    with tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=None) as progress:  # only on terminals
        for number, path in enumerate(paths):
            with open(path, "rb") as file:
                for document in stream_documents(file, tokenizer):
                    digest = hashlib.sha1(document).digest()
                    lowest, highest = found.get(number, (digest, digest))
                    found[number] = min(lowest, digest), max(highest, digest)
                    head = digest + number.to_bytes(8) + len(document).to_bytes(8)
                    buckets[int.from_bytes(digest[:4]) * len(buckets) >> 32].write(head + document)
                    progress.update(len(document))
    for bucket in buckets:
        bucket.close()
    return found


def pack(args: argparse.Namespace) -> list[str]:
    """Write the shards and return the trainer's flags for them."""
    files = find_files(args.inputs, {f".{end.strip().lstrip('.')}".lower().rstrip(".") for end in args.ext.split(",")})
    tokenizer = TOKENIZERS[args.tokenizer]
    encode = load_gpt2() if args.tokenizer == "gpt2" else to_tokens  # if this fails, then before the work
    with lock_folder(args.out):
        for killed in args.out.glob(".packing-*"):  # left behind by a killed packer, because we hold the lock
            shutil.rmtree(killed, ignore_errors=True)
        old = sorted([*args.out.glob("train_*.bin"), *args.out.glob("val_*.bin")])
        if old and not args.force:
            raise RuntimeError(f"{old[0]} is there already: --force replaces all {len(old)} shards, or change --out")
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as name:
            folder = Path(name)
            if not (found := fill_buckets(files, folder, tokenizer)):
                raise RuntimeError(f"no text in {len(files)} files: name files, or folders with {args.ext} (--ext)")
            is_val = choose_split(list(files.values()), found, args.val_fraction)
            writers = {split: ShardWriter(folder, split, tokenizer.eot, SHARD_TOKENS) for split in ("train", "val")}
            for path in tqdm(sorted(folder.glob("bucket-*")), desc="packing", unit="bucket", disable=None):
                splits: dict[str, set[bytes]] = {"train": set(), "val": set()}
                with open(path, "rb") as file:
                    while head := file.read(36):
                        split = "val" if is_val(head[:20], int.from_bytes(head[20:28])) else "train"
                        splits[split].add(file.read(int.from_bytes(head[28:])))
                for split, documents in shuffle_documents(**splits).items():
                    for start in range(0, len(documents), BATCH_DOCUMENTS):
                        writers[split].write(encode(documents[start : start + BATCH_DOCUMENTS]))
                path.unlink()
            for writer in writers.values():
                writer.close()
            fitting = flags_for({split: [n for _, _, n in w.shards] for split, w in writers.items()}, tokenizer)
            shards = writers["train"].shards + writers["val"].shards
            for path, _, _ in shards:
                os.replace(path, args.out / path.name)
            for path in {*old} - {args.out / path.name for path, _, _ in shards}:  # last: no failure loses both
                path.unlink()
    for path, num_documents, num_tokens in shards:
        print(f"{args.out / path.name}: {num_documents:,} documents, {num_tokens:,} tokens")
    out = args.out.resolve().as_posix().removeprefix(f"{ROOT.as_posix()}/")  # run.sh changes to ROOT
    train, val = (f"{glob.escape(out)}/{split}_*.bin" for split in ("train", "val"))
    return ["--preset", tokenizer.preset, "--train_files", train, "--val_files", val, "--target_loss", "0", *fitting]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, own = parser.add_argument, os.path.relpath(ROOT / "data/own")
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    add("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    add("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    add("--val_fraction", type=float, default=0.05, help="part of the files for validation [%(default)s]")
    extensions = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
    add("--ext", default=extensions, help="files to take from folders, '' for those without an ending [%(default)s]")
    add("--force", action="store_true", help="replace all train_*.bin and val_*.bin in --out")
    add("--train", action="store_true", help="then train on the shards")
    args = parser.parse_args(argv)
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: expected more than 0 and less than 1")
    try:
        flags = pack(args)
    except RuntimeError as error:
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
