"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/{train,val}_000000.bin
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains nano on them (data/train_text.py)
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs tiktoken, of the extra "tools"

Without --train the last line of output is the command that trains on the shards. Files are UTF-8, or UTF-16 with a byte
order mark; of other encodings the bytes are packed. Of folders .txt, .md, .rst, .tex and sources of programs are taken.
Texts are cut, where possible at blank lines, into documents of 256 to 2,048 bytes, for gpt2 of 4 to 8 KiB; equal ones
count once. The last tenth of each text is for validation. Exit codes: 0; 2 bad input, and older shards stay; 130
interrupted.
"""

import argparse
import glob
import math
import os
import shlex
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

if __package__:
    from data import pack_nano, shards, texts
else:  # started as a file: this folder is where Python looks
    import pack_nano  # type: ignore[import-not-found, no-redef]
    import shards  # type: ignore[import-not-found, no-redef]
    import texts  # type: ignore[import-not-found, no-redef]

EXTENSIONS = ".txt .md .rst .tex .py .c .h .cpp .rs .go .java .js .ts".split()
MIN_SECONDS = 30  # of --train: starting, measuring, xz and sampling take about ten on two cores without AVX-512
# glibc hands large freed blocks back to the system, which takes 15% of a nano step (speedrun/process.py has the same)
ENVIRONMENT = dict(MALLOC_TRIM_THRESHOLD_="2147483647", MALLOC_MMAP_THRESHOLD_="33554432")


# Sizes of documents; the fewest steps, one a stage, and the most; tokens of the largest; sequences of the validation
Preset = namedtuple("Preset", "name min_bytes max_bytes min_steps max_steps step_tokens val_sequences val_seq_len")
PRESETS = {
    "bytes": Preset("nano", 2**8, 2**11, 20, 2000, 2048, 8, 2**13),
    "gpt2": Preset("gpt2", 2**12, 2**13, 81, 1050, 3 * 2**17, 40, 2**18),
}


def find_files(argument: Path) -> list[Path]:
    """Return the file, or of a folder those that have an ending of text and are not hidden."""
    if argument.is_file():
        return [argument]
    if not argument.is_dir():  # a pipe or a device might never end
        raise RuntimeError(f"{argument}: no regular file and no folder")
    paths = [path for path in sorted(argument.rglob("*")) if path.suffix.lower() in EXTENSIONS and path.is_file()]
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(argument).parts)]


def read_texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the text of each file, and leave out what is none."""
    for path in paths:
        content = texts.read_text(path)
        if "\0" in content:
            print(f"{path}: binary or unmarked UTF-16, left out", file=sys.stderr)
        else:
            yield content.encode(errors="surrogateescape")


def split_texts(documents: Sequence[Sequence[bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Return documents to train on, and to validate on a tenth of them, the ends of texts.

    So they do not lie between what is trained on. What a text is too small to give, the next ones give for it.
    """
    train, val = list[bytes](), list[bytes]()
    owed = 0
    for text in documents:
        owed += len(text)
        end = len(text) - owed // 10
        owed %= 10
        train += text[:end]
        val += text[end:]
    return train, val


def encode_gpt2(documents: Sequence[bytes]) -> np.ndarray:
    """Return GPT-2 tokens, with an end of text before each document."""
    encoding = texts.gpt2_encoding()
    arrays = []
    for start in range(0, len(documents), 256):  # lists of all would take much memory
        batch = [document.decode(errors="replace") for document in documents[start : start + 256]]
        for tokens in encoding.encode_ordinary_batch(batch):
            arrays.append(np.array([encoding.eot_token, *tokens], np.uint16))
    return np.concatenate(arrays)


def flags_of(preset: Preset, train: int, val: int) -> list[str]:
    """Return the flags of a run that reads so many tokens once. Raise RuntimeError if they are too few."""
    steps, sequences = (train - 1) // preset.step_tokens, (val - 1) // preset.val_seq_len
    if steps < preset.min_steps or sequences < 1:
        least = f"{preset.min_steps * preset.step_tokens + 1:,} and {preset.val_seq_len + 1:,}"
        raise RuntimeError(f"too little text: {train:,} and {val:,} tokens, {preset.name} needs {least}")
    val_tokens = min(sequences, preset.val_sequences) * preset.val_seq_len
    flags = f"--preset {preset.name} --num_iterations {min(steps, preset.max_steps)} --val_tokens {val_tokens}"
    return [*flags.split(), "--target_loss", "0", "--val_sha256", ""]


def pack(inputs: Iterable[Path], out: Path, tokenizer: str) -> list[str]:
    """Write the shards, and return the flags of a run on them."""
    preset = PRESETS[tokenizer]
    sizes = preset.min_bytes, preset.max_bytes
    paths = chain(*map(find_files, inputs))
    found = [pack_nano.split_documents(text, *sizes) for text in read_texts(paths)]
    splits = pack_nano.shuffle_documents(*split_texts(found))
    encode = pack_nano.to_tokens if tokenizer == "bytes" else encode_gpt2
    tokens = {split: encode(documents) if documents else np.zeros(0) for split, documents in splits.items()}
    flags = flags_of(preset, len(tokens["train"]), len(tokens["val"]))
    for split, documents in splits.items():
        path = out.resolve() / f"{split}_000000.bin"
        shards.write_shard(path, tokens[split])
        print(f"{path}: {len(documents):,} documents, {len(tokens[split]):,} tokens", flush=True)
        flags += [f"--{split}_files", glob.escape(str(path).removeprefix(f"{texts.ROOT}/"))]  # run.sh changes to it
    return flags


def main(argv: list[str] | None = None) -> None:
    began, raw = time.monotonic(), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add, own = parser.add_argument, Path(os.path.relpath(texts.ROOT / "data/own"))
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    add("--tokenizer", choices=PRESETS, default="bytes", help="[%(default)s]")
    add("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    add("--train", action="store_true", help="then train nano on the shards, and show what came of it")
    add("--seconds", type=float, default=100, help=f"what --train is to take at most, from {MIN_SECONDS} on [100]")
    args = parser.parse_args(argv)
    if not MIN_SECONDS <= args.seconds < math.inf:
        parser.error(f"--seconds {args.seconds}: expected {MIN_SECONDS} or more")
    if args.train and args.tokenizer != "bytes":
        parser.error("--train is for bytes: without it the last line of output is the command that trains gpt2")
    try:
        flags = pack(args.inputs, args.out, args.tokenizer)
        if args.train:
            command = ["-m", "data.train_text", str(args.out.resolve()), str(args.seconds), str(began)]
            os.chdir(texts.ROOT)
            os.execve(sys.executable, [sys.executable, *command], ENVIRONMENT | os.environ)
        print("train on it:", shlex.join([f"{texts.ROOT}/run.sh", *flags]))
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
