"""Packs any text, as bytes, into shards for the nano preset.

    python data/pack_text.py FILES_OR_FOLDERS...     # writes data/own/train_000000.bin ... and val_000000.bin

and prints the command that trains on them. The documents are those of `pack_nano.py`: pieces of at least 256 bytes
cut at blank lines, not whole files. So one large file is enough for both splits, what many files repeat (a licence,
a quoted mail) counts once, and after the shuffle any stretch of the text is a fair sample of all of it; and the
model, whose window is 128 bytes, loses little. All text is held in memory, at up to five times its size.
"""

import argparse
import hashlib
import itertools
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pack_nano import shuffle_documents, split_documents, to_tokens
from shards import ArgumentParser, write_shard

SHARD_TOKENS = 100_000_000
TEXT_EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
# Of the nano preset, in tokens; a test compares them with train_gpt.py, which takes seconds to import
VAL_SEQ_LEN, VAL_TOKENS, BATCH_TOKENS, NUM_ITERATIONS = 8192, 262_144, 1024, 714


class UserError(Exception):
    """Something outside of this script has to change: an argument or a file."""


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


def read_documents(path: Path) -> list[bytes]:
    text = path.read_bytes().replace(b"\r\n", b"\n")  # else text from Windows would have no blank lines
    longest = SHARD_TOKENS - 1
    return [document[i : i + longest] for document in split_documents(text) for i in range(0, len(document), longest)]


def split_by_hash(groups: list[tuple[bytes, list[bytes]]], val_fraction: float) -> dict[str, list[bytes]]:
    """Puts each (name, documents) into a split by the SHA-1 of its name; each split gets at least one, if it can."""
    hashes = [int.from_bytes(hashlib.sha1(name).digest()) for name, _ in groups]
    ranked = [documents for _, (_, documents) in sorted(zip(hashes, groups, strict=True), key=lambda item: item[0])]
    num_val = sum(value < val_fraction * 2**160 for value in hashes)
    num_val = min(max(num_val, 1), len(groups) - 1)
    chain = itertools.chain.from_iterable
    return {"train": list(chain(ranked[num_val:])), "val": list(chain(ranked[:num_val]))}


def cut_shards(documents: list[bytes]) -> Iterator[list[bytes]]:
    """Consecutive documents, for shards of at most SHARD_TOKENS."""
    ends = np.cumsum([0] + [len(document) + 1 for document in documents])
    first = 0
    while first < len(documents):
        last = int(np.searchsorted(ends, ends[first] + SHARD_TOKENS, side="right")) - 1
        yield documents[first:last]
        first = last


def build_corpus(arguments: Iterable[Path], extensions: set[str], val_fraction: float) -> dict[str, list[bytes]]:
    """Documents of both splits, as the packer writes them."""
    files = find_files(arguments, extensions)
    groups = [(name.encode(), read_documents(path)) for path, name in files.items()]
    groups = [(name, documents) for name, documents in groups if documents]
    if not groups:
        kinds = ",".join(sorted(extensions))
        raise UserError(f"found no text in {len(files)} files: name files, or folders with {kinds} (--ext)")
    if len(groups) == 1:
        groups = [(document, [document]) for document in groups[0][1]]
    return shuffle_documents(**split_by_hash(groups, val_fraction))


def flags_for(num_tokens: dict[str, list[int]]) -> str:
    """Flags that fit the nano preset to shards of so many tokens; where they hold what it needs, none."""

    def count(split: str, length: int) -> int:
        """As the trainer counts: each piece needs one token more, for its last target."""
        found = sum(max(n - 1, 0) // length for n in num_tokens[split])
        if not found:
            advice = "give more text" if split == "train" else "give more text, or a larger --val_fraction"
            held = f"{sum(num_tokens[split]):,} tokens for {split}"
            raise UserError(f"too little text: {held}, at least {length + 1:,} are needed; {advice}")
        return found

    steps, val_tokens = count("train", BATCH_TOKENS), count("val", VAL_SEQ_LEN) * VAL_SEQ_LEN
    flags = f" --num_iterations {steps}" if steps < NUM_ITERATIONS else ""
    return flags + (f" --val_tokens {val_tokens}" if val_tokens < VAL_TOKENS else "")


def pack(args: argparse.Namespace) -> None:
    old = sorted(path for split in ("train", "val") for path in args.out.glob(f"{split}_*.bin"))
    if old and not args.force:
        fix = f"--force replaces all {len(old)} shards in {args.out}, or choose another --out"
        raise UserError(f"{old[0]} is there already: {fix}")
    extensions = {f".{extension.strip().lstrip('.').lower()}" for extension in args.ext.split(",")}
    corpus = build_corpus(args.inputs, extensions, args.val_fraction)
    shards = {split: list(cut_shards(documents)) for split, documents in corpus.items()}
    flags = flags_for(
        {split: [len(shard) + sum(map(len, shard)) for shard in found] for split, found in shards.items()}
    )
    for path in old:
        path.unlink()
    for split in ("train", "val"):  # validation last: without it the trainer refuses what was interrupted
        for i, documents in enumerate(shards[split]):
            path, tokens = args.out / f"{split}_{i:06d}.bin", to_tokens(documents)
            write_shard(path, tokens)
            print(f"{path}: {len(documents):,} documents, {len(tokens):,} tokens")
    folder = Path(os.path.relpath(args.out))
    if ".." in folder.parts:
        folder = args.out.resolve()
    train_files, val_files = (shlex.quote(f"{folder.as_posix()}/{split}_*.bin") for split in ("train", "val"))
    print(f"train on it: ./run.sh --preset nano --train_files {train_files} --val_files {val_files}{flags}")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "own", help="folder for the shards")
    about = "part of the files for validation; of the documents, where there is one file [0.05]"
    parser.add_argument("--val_fraction", type=float, default=0.05, help=about)
    parser.add_argument("--ext", default=TEXT_EXTENSIONS, help="what to take from folders [%(default)s]")
    parser.add_argument("--force", action="store_true", help="replace all train_*.bin and val_*.bin in --out")
    args = parser.parse_args(argv)
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: expected more than 0 and less than 1")
    try:
        pack(args)
    except UserError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror}")


if __name__ == "__main__":
    main()
