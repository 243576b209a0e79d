"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs: pip install -r data/requirements.txt
    python data/pack_text.py FILES_OR_FOLDERS... --train -- --num_iterations 600    # flags of train_gpt.py, after --

The last line of output is the command that trains on the shards. If they hold less than the preset's run takes, its
flags lower steps, stages and validation to what is there, and halve the batch while there are fewer than 40 steps. Each
file goes to training or validation by the hash of its name; fewer than 20 files are split by document. A document is
- bytes: a piece of at least 256 bytes that ends at a blank line, as in pack_nano.py, cut after 2,048. What many files
  repeat (a licence, a quoted mail) then counts once, and the model's window of 256 bytes loses little.
- gpt2: a piece of at least 8 KiB that ends at a blank line, cut after 16 KiB and where it exceeds --max_doc_len tokens,
  because training drops what follows. Bytes that are not UTF-8 become U+FFFD; names of special tokens are plain text.

Equal documents count once; one that both splits have stays in training. Documents are sorted by SHA-1, a fixed shuffle,
in buckets on disk: memory does not grow with the text. The disk needs room for three times the text.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were.
"""

import argparse
import dataclasses
import glob
import hashlib
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
from bisect import bisect_left
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # both first, or what PYTHONPATH has under these names
sys.path.insert(0, str(Path(__file__).resolve().parent))  # would be taken

import train_gpt
from pack_nano import MAX_DOCUMENT_BYTES, MIN_DOCUMENT_BYTES, shuffle_documents, to_tokens
from shards import ArgumentParser, ShardWriter, lock_folder, path_argument
from train_gpt import Hyperparameters, UserError

ROOT = Path(__file__).resolve().parent.parent
SHARD_TOKENS = 100_000_000
LINE_BYTES = 2**20  # longer lines are read in parts
NUM_BUCKETS = 200  # all are open at once: macOS lets a process open 256 files
BUFFER_BYTES = 2**17  # text that goes to a bucket at a time
BATCH_DOCUMENTS = 32  # encoded at a time
MANY_FILES = 20  # are split by file, fewer by document: a file is then too much or too little for validation
MIN_STEPS = 40  # the least that have one in each stage of gpt2 and in its extension
Tokenizer = namedtuple("Tokenizer", "preset min_bytes max_bytes file_end")  # sizes of documents; what ends a file
TOKENIZERS = {
    "bytes": Tokenizer("nano", MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES, b"\n\n"),
    "gpt2": Tokenizer("gpt2", 2**13, 2**14, b""),
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

    A document ends at the first double newline after `min_bytes`; after `max_bytes` the next one begins, without a
    character cut in two. Windows newlines become \\n first, or a file from there would have no double newlines.
    """
    document, searched, line = bytearray(), 0, b"\n"
    while line:
        line = file.readline(LINE_BYTES)
        document += line or tokenizer.file_end
        if line and document.endswith(b"\r\n"):
            document[-2:] = b"\n"
        may_end = not line or document.endswith(b"\n\n", searched)  # double newlines do not overlap
        searched = len(document) if may_end else searched
        while len(document) > (end := tokenizer.max_bytes):
            end = next((i for i in range(end, end - 4, -1) if document[i] & 0xC0 != 0x80), end)  # one begins there
            yield bytes(document[:end])
            del document[:end]
            searched = max(0, searched - end)
        if may_end and (len(document) >= tokenizer.min_bytes or (not line and document.strip())):
            yield bytes(document)
            document, searched = bytearray(), 0


def load_gpt2(max_doc_len: int) -> Callable[[list[bytes]], np.ndarray]:
    """Return what turns text into documents of GPT-2 tokens; tiktoken downloads the vocabulary on first use."""
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
    except ImportError:
        pip = shlex.join([sys.executable, "-m", "pip", "install", "-r", str(ROOT / "data/requirements.txt")])
        raise RuntimeError(f"--tokenizer gpt2 needs the package tiktoken: {pip}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise RuntimeError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
    pool, step = ThreadPoolExecutor(os.cpu_count()), max(max_doc_len or 2**27, 2) - 1  # with end of text max_doc_len

    def encode(document: bytes) -> np.ndarray:
        tokens = encoding.encode_to_numpy(document.decode(errors="replace"), disallowed_special=())  # without the GIL
        return np.insert(tokens, range(0, len(tokens), step), encoding.eot_token).astype(np.uint16)

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


def shorten(cfg: Hyperparameters, num_iterations: int) -> Hyperparameters:
    """Return `cfg` with fewer steps. The extension shrinks with them, and each stage that is left has a step."""
    extension = cfg.extension_steps * num_iterations // cfg.num_iterations
    stages = len(cfg.window_tokens) - (cfg.extension_steps > extension == 0)
    fields = ("batch_factors", "max_doc_len", "lr_factors", "window_tokens")
    parts = {name: getattr(cfg, name)[: min(stages, num_iterations)] for name in fields}
    return dataclasses.replace(cfg, num_iterations=num_iterations, extension_steps=extension, **parts)


def seq_lens(cfg: Hyperparameters) -> list[int]:
    return [train_gpt.train_seq_len(step, cfg) for step in range(cfg.num_iterations)]


def most(limit: int, plan: Callable[[int], object]) -> int:
    """Return the highest number up to `limit` that the trainer can plan; 0 if none."""

    def lacks_tokens(number: int) -> bool:
        try:
            plan(number)
        except UserError:
            return True
        return False

    return bisect_left(range(1, limit + 1), True, key=lacks_tokens) if lacks_tokens(limit) else limit


def too_little(split: str, held: list[int], needed: int, part: float) -> RuntimeError:
    """Return an error that says how much text is missing, if a split gets such a part of it."""
    told = f"{sum(held):,} tokens for {split}, {needed:,} needed (equal documents count once)"
    more = math.ceil((needed - sum(held)) / part)
    return RuntimeError(f"too little text: {told}: add text of some {more:,} tokens")


def fit(cfg: Hyperparameters, num_tokens: dict[str, list[int]], val_fraction: float) -> Hyperparameters:
    """Return `cfg` with no more training and validation than its shards, of `num_tokens` each, hold."""

    def plan_steps(n: int) -> None:
        short = shorten(cfg, n)
        cuts = [cfg.max_doc_len[train_gpt.stage_of(step, short)] for step in range(n)]
        train_gpt.plan_batches(cfg.train_files, seq_lens(short), cfg.batch_sequences, cfg, cuts)

    def plan_val(n: int) -> None:
        train_gpt.plan_batches(cfg.val_files, [val_seq_len] * n, 1, cfg)

    is_preset = cfg.batch_tokens == train_gpt.PRESETS[cfg.preset].batch_tokens  # else it was asked for
    enough = min(MIN_STEPS, cfg.num_iterations)
    while (steps := most(cfg.num_iterations, plan_steps)) < enough and is_preset and cfg.batch_sequences % 2 == 0:
        cfg = dataclasses.replace(cfg, batch_tokens=cfg.batch_tokens // 2)
    if steps < (least := min(cfg.adam_every, cfg.num_iterations)):  # the head would never be trained
        # A sequence takes its length and a last target; if it starts with a document, it may drop the rest of the last
        needed = cfg.batch_sequences * sum(n + max(*cfg.max_doc_len, 1) for n in seq_lens(shorten(cfg, least)))
        raise too_little("train", num_tokens["train"], needed, 1 - val_fraction)
    blocks = (max(num_tokens["val"], default=1) - 1) // cfg.mask_block
    if not blocks:
        raise too_little("val", num_tokens["val"], cfg.mask_block + 1, val_fraction)
    val_seq_len = min(cfg.val_seq_len, blocks * cfg.mask_block)
    val_tokens = val_seq_len * most(cfg.val_tokens // val_seq_len, plan_val)
    return dataclasses.replace(shorten(cfg, steps), val_seq_len=val_seq_len, val_tokens=val_tokens)


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
    cfg = train_gpt.parse_args(["--preset", tokenizer.preset, *args.flags])  # if this or the next fails, then now
    encode = load_gpt2(max(cfg.max_doc_len)) if args.tokenizer == "gpt2" else to_tokens
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
            eot = train_gpt.PRESETS[tokenizer.preset].eot_token
            writers = {split: ShardWriter(folder, split, eot, SHARD_TOKENS) for split in ("train", "val")}
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
            num_tokens = {split: [n for _, _, n in writer.shards] for split, writer in writers.items()}
            here = glob.escape(name)
            cfg = dataclasses.replace(cfg, train_files=f"{here}/train_*.bin", val_files=f"{here}/val_*.bin")
            fitted = fit(cfg, num_tokens, args.val_fraction)
            shards = writers["train"].shards + writers["val"].shards
            for path, _, _ in shards:
                os.replace(path, args.out / path.name)
            for path in {*old} - {args.out / path.name for path, _, _ in shards}:  # last: no failure loses both
                path.unlink()
    for path, number, tokens in shards:
        print(f"{args.out / path.name}: {number:,} documents, {tokens:,} tokens")
    used = dict(train=fitted.batch_sequences * sum(seq_lens(fitted)), val=fitted.val_tokens)
    parts = (f"{used[split] / sum(num_tokens[split]):.1%} of the {split} tokens" for split in used)
    print(f"the run uses {' and '.join(parts)} ({fitted.num_iterations} steps)")
    changed = {name: value for name, value in dataclasses.asdict(fitted).items() if value != getattr(cfg, name)}
    fitting = [w for name, v in changed.items() for w in (f"--{name}", *map(str, v if isinstance(v, tuple) else [v]))]
    out = args.out.resolve().as_posix().removeprefix(f"{ROOT.as_posix()}/")  # run.sh changes to ROOT
    train, val = (f"{glob.escape(out)}/{split}_*.bin" for split in ("train", "val"))
    shown = ["--train_files", train, "--val_files", val]
    return ["--preset", tokenizer.preset, *shown, "--target_loss", "0", *args.flags, *fitting]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, own = parser.add_argument, os.path.relpath(ROOT / "data/own")
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=path_argument)
    add("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    add("--out", type=path_argument, default=own, help="folder for the shards [%(default)s]")
    add("--val_fraction", type=float, default=0.05, help="part of the files for validation [%(default)s]")
    extensions = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
    add("--ext", default=extensions, help="files to take from folders, '' for those without an ending [%(default)s]")
    add("--force", action="store_true", help="replace all train_*.bin and val_*.bin in --out")
    add("--train", action="store_true", help="then train on the shards; after -- with other flags of train_gpt.py")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end], argparse.Namespace(flags=argv[end + 1 :]))
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: expected more than 0 and less than 1")
    try:
        flags = pack(args)
    except (RuntimeError, UserError) as error:
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
