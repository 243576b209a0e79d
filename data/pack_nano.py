"""Packs the corpus of the nano track: the Python sources of the installed torch package, as bytes.

    python data/pack_nano.py            # writes data/nano/nano_{train,val}_000000.bin, about 3 s

Everybody who can run the trainer has this text already, so nothing is downloaded. With torch 2.13.0 the
shards are byte for byte the track's; any other torch version packs another corpus, which trains just as
well but is not comparable, and the packer says so. Exit codes: 0 the shards are there, 2 torch is missing or
its sources have been changed.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shards import ArgumentParser, shard_problem, write_shard

EOT = 256  # opens every document; the bytes themselves are tokens 0 ... 255
MIN_DOCUMENT_BYTES = 256
VAL_DIVISOR = 20  # a file is validation where the first byte of SHA-1(path) is divisible by this
TRACK_TORCH = "2.13.0"
TRACK_SHA256 = {
    "train": "5292b62244336e34eaa8412a6d99c7635b7826b5b35d873cdab0e32b30e98e13",
    "val": "7ae01962c367985c81f9b24274edb9d25135bc712ed11165c07c8ef96716d8ba",
}


def corpus_files(torch_folder: Path) -> list[str]:
    """Paths of the corpus relative to the torch package, in POSIX form, sorted."""
    paths = (path.relative_to(torch_folder).as_posix() for path in torch_folder.rglob("*.py"))
    return sorted(
        path for path in paths if path != "version.py" and not path.startswith("testing/_internal/generated/")
    )


def split_documents(text: bytes) -> list[bytes]:
    """Cuts a file at its double newlines and joins consecutive pieces into documents of at least 256 bytes.

    Every piece keeps a double newline behind it; a shorter rest at the end is a document too, unless it is
    only white space.
    """
    documents, current = [], b""
    for piece in text.split(b"\n\n"):
        current += piece + b"\n\n"
        if len(current) >= MIN_DOCUMENT_BYTES:
            documents.append(current)
            current = b""
    if current.strip():
        documents.append(current)
    return documents


def shuffle_documents(train: Iterable[bytes], val: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Documents of both splits, without doubles, in order of their SHA-1 digest. Training keeps what both have.

    The order is a fixed shuffle: neighbouring documents come from different files, so that any stretch of
    the validation split is a fair sample of all of it.
    """
    found = {
        split: {hashlib.sha1(document).digest(): document for document in documents}
        for split, documents in (("train", train), ("val", val))
    }
    for digest in found["train"]:
        found["val"].pop(digest, None)
    return {split: [documents[digest] for digest in sorted(documents)] for split, documents in found.items()}


def build_corpus(torch_folder: Path) -> dict[str, list[bytes]]:
    """The track's documents: those of the torch package's files, each file in one of the splits."""
    documents: dict[str, list[bytes]] = {"train": [], "val": []}
    for path in corpus_files(torch_folder):
        split = "train" if hashlib.sha1(path.encode()).digest()[0] % VAL_DIVISOR else "val"
        documents[split] += split_documents((torch_folder / path).read_bytes())
    return shuffle_documents(**documents)


def to_tokens(documents: list[bytes]) -> np.ndarray:
    """uint16 tokens: for each document the end-of-text token, then its bytes."""
    lengths = np.array([len(document) + 1 for document in documents])
    tokens = np.empty(lengths.sum(), dtype=np.uint16)
    starts = np.concatenate(([0], lengths.cumsum()[:-1]))
    is_text = np.ones(len(tokens), dtype=bool)
    is_text[starts] = False
    tokens[starts] = EOT
    tokens[is_text] = np.frombuffer(b"".join(documents), dtype=np.uint8)
    return tokens


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "nano", help="folder for the shards")
    args = parser.parse_args(argv)
    found = importlib.util.find_spec("torch")  # located, not imported: only its sources are needed
    if found is None or found.origin is None:
        parser.error("torch is not installed here: pip install -r requirements.txt")
    version = importlib.metadata.version("torch").split("+")[0]
    paths = {split: args.out / f"nano_{split}_000000.bin" for split in ("train", "val")}
    if version == TRACK_TORCH and all(
        path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == TRACK_SHA256[split]
        for split, path in paths.items()
    ):
        print(f"{args.out}: the corpus of the nano track is complete")
        return
    for split, documents in build_corpus(Path(found.origin).parent).items():
        tokens = to_tokens(documents)
        digest = write_shard(paths[split], tokens)
        print(f"{paths[split]}: {len(documents):,} documents, {len(tokens):,} tokens, sha256 {digest}")
        if version != TRACK_TORCH:
            print(f"  packed from torch {version}; the nano track is torch {TRACK_TORCH}: trains, not comparable")
        elif digest != TRACK_SHA256[split]:
            parser.error(
                f"{paths[split]} is not the track's {split} shard (sha256 {TRACK_SHA256[split]}): "
                "the installed torch 2.13.0 has changed sources; reinstall it: "
                "pip install --force-reinstall --no-deps torch==2.13.0"
            )
        assert shard_problem(paths[split]) is None


if __name__ == "__main__":
    main()
