"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/{train,val}_000000.bin
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains nano on them (data/train_text.py)
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs tiktoken, of the extra "tools"
    python data/pack_text.py corpus.jsonl --field text               # a text on each line, as JSON

Without --train the last line of output is the command that trains on the shards. Files are UTF-8, or UTF-16 with a byte
order mark; of other encodings the bytes are packed. Texts are cut at blank lines, or else at line ends, into documents
of 256 to 2,048 bytes, for gpt2 of 4 to 8 KiB; equal ones count once. Validation is the end of each text, a tenth of the
bytes. Exit codes: 0; 2 something has to be fixed first: older shards are as they were; 130 interrupted.
"""

import argparse
import glob
import json
import math
import os
import re
import shlex
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

if __package__:
    from data import pack_nano, shards, texts
else:  # started as a file: this folder is where Python looks
    import pack_nano  # type: ignore[import-not-found, no-redef]
    import shards  # type: ignore[import-not-found, no-redef]
    import texts  # type: ignore[import-not-found, no-redef]

EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
MIN_SECONDS = 30  # of --train: starting, measuring, xz and sampling take about ten on two cores without AVX-512
# glibc hands large freed blocks back to the system, which takes 15% of a nano step (speedrun/process.py has the same)
ENVIRONMENT = dict(MALLOC_TRIM_THRESHOLD_="2147483647", MALLOC_MMAP_THRESHOLD_="33554432")


# Sizes of documents; the fewest steps, one a stage, and the most; tokens of the largest; sequences of the validation
Preset = namedtuple("Preset", "name min_bytes max_bytes min_steps max_steps step_tokens val_sequences val_seq_len")
PRESETS = {
    "bytes": Preset("nano", pack_nano.MIN_DOCUMENT_BYTES, pack_nano.MAX_DOCUMENT_BYTES, 20, 2000, 2048, 8, 2**13),
    "gpt2": Preset("gpt2", 2**12, 2**13, 81, 1050, 3 * 2**17, 40, 2**18),
}


def note(line: str) -> None:
    print("note: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)


def find_files(arguments: Iterable[Path], extensions: Sequence[str]) -> list[Path]:
    """Return the files, and of folders those that have an extension and are not hidden."""
    files, left_out = dict[Path, None](), 0
    for argument in arguments:
        if argument.is_file():
            files[argument] = None
        elif not argument.is_dir():  # a pipe or a device might never end
            raise RuntimeError(f"{argument}: no regular file and no folder")
        for path in sorted(argument.rglob("*")):
            is_hidden = any(part.startswith(".") for part in path.relative_to(argument).parts)
            if path.is_file() and path.suffix.lower() in extensions and not is_hidden:
                files[path] = None
            elif path.is_file():
                left_out += 1
    if left_out:
        note(f"{left_out:,} files left out, hidden or with other endings: --ext takes more, --ext '' those without one")
    if not files:
        raise RuntimeError("no text was found")
    return [*files]


def read_texts(path: Path, field: str) -> Iterator[str]:
    """Yield the text of a file, or of JSON lines the text in a field of each. Tell what is odd."""
    content = texts.read_text(path)
    if "\0" in content:
        note(f"{path}: binary or unmarked UTF-16, left out")
        return
    if re.search("[\udc80-\udcff]", content):
        note(f"{path}: not UTF-8, packed as it is; iconv -f ENCODING -t UTF-8 converts")
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        try:
            if line.strip():
                yield re.sub("[\ud800-\udfff]", "\ufffd", json.loads(line)[field] or "")  # no encoding has these
        except (ValueError, TypeError, KeyError) as error:
            told = f"no JSON object with a text {field!r}, see --field ({type(error).__name__}: {error})"
            raise RuntimeError(f"{path}, line {number}: {told}") from None


def cut_documents(text: bytes, preset: Preset) -> Iterator[bytes]:
    """Cut a text into documents: where none may end at a blank line, at the end of a line or else of a character."""
    for document in pack_nano.join_pieces(text, preset.min_bytes):
        start = 0
        while len(document) > (end := start + preset.max_bytes):
            end = next((i for i in range(end, end - 4, -1) if document[i] & 0xC0 != 0x80), end)  # one begins there
            end = document.rfind(b"\n", start + preset.min_bytes, end) + 1 or end
            yield document[start:end]
            start = end
        yield document[start:]


def split_texts(documents: Sequence[Sequence[bytes]], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Return documents to train on, and to validate on the ends of texts, which have this fraction of the bytes.

    So they do not lie between what is trained on. What a text is too small to give, the next ones give for it.
    """
    train, val = list[bytes](), list[bytes]()
    owed = 0.0
    for text in documents:
        owed += fraction * sum(map(len, text))
        end = len(text)
        while end and owed >= len(text[end - 1]):
            end -= 1
            owed -= len(text[end])
        train += text[:end]
        val += text[end:]
    return train, val


def encode_gpt2(documents: Sequence[bytes]) -> np.ndarray:
    """Return GPT-2 tokens, with an end of text before each document."""
    encoding = texts.gpt2_encoding()
    lists = []
    for start in tqdm(range(0, len(documents), 256), desc="tokens", disable=None):  # on terminals alone
        batch = [document.decode(errors="replace") for document in documents[start : start + 256]]
        lists += [
            np.array([encoding.eot_token, *tokens], np.uint16) for tokens in encoding.encode_ordinary_batch(batch)
        ]
    return np.concatenate(lists)


def flags_of(preset: Preset, train: int, val: int) -> list[str]:
    """Return the flags of a run that reads so many tokens once. Raise RuntimeError if they are too few."""
    steps, sequences = (train - 1) // preset.step_tokens, (val - 1) // preset.val_seq_len
    if steps < preset.min_steps or sequences < 1:
        needed = f"{preset.min_steps * preset.step_tokens + 1:,} and {preset.val_seq_len + 1:,}"
        told = f"{train:,} tokens to train on and {val:,} to validate on, expected {needed}"
        raise RuntimeError(f"too little text for {preset.name}: {told}")
    val_tokens = min(sequences, preset.val_sequences) * preset.val_seq_len
    flags = f"--preset {preset.name} --num_iterations {min(steps, preset.max_steps)} --val_tokens {val_tokens}"
    return [*flags.split(), "--target_loss", "0", "--val_sha256", ""]


def pack(args: argparse.Namespace) -> list[str]:
    """Write the shards, and return the flags of a run on them."""
    preset = PRESETS[args.tokenizer]
    found = [
        [*cut_documents(text.encode(errors="surrogateescape"), preset)]
        for path in find_files(args.inputs, args.ext.lower().split(","))
        for text in read_texts(path, args.field)
    ]
    documents = [*chain(*found)]
    total, distinct = (sum(map(len, some)) for some in (documents, {*documents}))
    if total > distinct:
        note(f"{total - distinct:,} bytes are in documents that are equal to others: each counts once")
    least = min((preset.val_seq_len + preset.max_bytes) / max(distinct, 1), 0.25)  # a sequence to validate on
    splits = pack_nano.shuffle_documents(*split_texts(found, max(args.val_fraction, least)))
    encode = pack_nano.to_tokens if args.tokenizer == "bytes" else encode_gpt2
    tokens = {split: encode(own) for split, own in splits.items() if own}
    flags = flags_of(preset, *(len(tokens.get(split, [])) for split in splits))
    for split, own in splits.items():
        path = args.out.resolve() / f"{split}_000000.bin"
        shards.write_shard(path, tokens[split])
        print(f"{path}: {len(own):,} documents, {len(tokens[split]):,} tokens", flush=True)
        flags += [f"--{split}_files", glob.escape(str(path).removeprefix(f"{texts.ROOT}/"))]  # run.sh changes to it
    return flags


def train(folder: Path, seconds: float | None, began: float) -> NoReturn:
    """Become a process that trains on the shards."""
    megabytes = (folder / "train_000000.bin").stat().st_size / 2e6
    seconds = seconds or max(MIN_SECONDS, min(100, 10 + 90 * math.sqrt(megabytes)))
    command = ["-m", "data.train_text", str(folder.resolve()), f"--seconds={seconds}", f"--began={began}"]
    os.chdir(texts.ROOT)
    os.execve(sys.executable, [sys.executable, *command], ENVIRONMENT | os.environ)


def main(argv: list[str] | None = None) -> None:
    began, raw = time.monotonic(), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add, own = parser.add_argument, os.path.relpath(texts.ROOT / "data/own")
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    add("--tokenizer", choices=PRESETS, default="bytes", help="[%(default)s]")
    add("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    add("--val_fraction", type=float, default=0.1, help="part of the text for validation [%(default)s]")
    add("--field", default="text", help="that holds the text of a line of .jsonl and .ndjson [%(default)s]")
    add("--ext", default=EXTENSIONS, help="files to take from folders; --ext '' those without an ending [%(default)s]")
    add("--train", action="store_true", help="then train nano on the shards, and show what came of it")
    told = f"that --train takes in all, from {MIN_SECONDS} on [10 + 90 sqrt(MB of text), at most 100]"
    add("--seconds", type=float, help=told)
    args = parser.parse_args(argv)
    if args.seconds is not None and not MIN_SECONDS <= args.seconds < math.inf:
        parser.error(f"--seconds {args.seconds}: expected {MIN_SECONDS} or more")
    if not 0 <= args.val_fraction < 1:  # nor is NaN
        parser.error(f"--val_fraction {args.val_fraction}: expected a number from 0 to less than 1")
    if args.train and args.tokenizer != "bytes":
        parser.error("--train is for bytes: without it the last line of output is the command that trains gpt2")
    try:
        flags = pack(args)
        if args.train:
            train(args.out, args.seconds, began)
        print("train on it:", shlex.join([f"{texts.ROOT}/run.sh", *flags]))
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
