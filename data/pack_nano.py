"""Pack the corpus of the nano track: the Python sources of the installed torch package, as bytes.

    python data/pack_nano.py            # writes data/nano/nano_{train,val}_000000.bin in about 3 s

Everybody who can run the trainer already has this text, so nothing is downloaded. With torch 2.13.0 the shards are the
track's, byte for byte. Another torch version gives another corpus: it trains as well, but its losses are not
comparable, and the packer says so. Exit codes: 0 the shards are there, 2 torch is missing, its sources have been
changed, or the shards cannot be written.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

if __name__ == "__main__" and sys.flags.safe_path:  # under -P or PYTHONSAFEPATH nothing beside this file is found
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONSAFEPATH": ""})

from shards import shard_header, write_shard

EOT = 256  # opens every document; the bytes themselves are tokens 0 ... 255
MIN_DOCUMENT_BYTES = 256
MAX_DOCUMENT_BYTES = 2048
VAL_DIVISOR = 20  # a file is validation if the first byte of SHA-1(path) is divisible by this
TRACK_TORCH = "2.13.0"
TRACK_SHA256 = {
    "train": "c468b0dbbe20b2eb747b07e8c3667cf914c15c64686145fc1bf28cc8d3614497",
    "val": "1d93c563f7bdc2254d348b95a472178782ace4b2344bc11b31fc6ce035444802",
}


def corpus_files(torch_folder: Path) -> list[str]:
    """List the corpus: sorted POSIX paths relative to the torch package."""
    paths = (path.relative_to(torch_folder).as_posix() for path in torch_folder.rglob("*.py"))
    # Both exceptions are generated when torch is built, so they differ between builds of one version
    return sorted(p for p in paths if p != "version.py" and not p.startswith("testing/_internal/generated/"))


def join_pieces(text: bytes, min_bytes: int) -> list[bytes]:
    """Cut a file at its double newlines and join consecutive pieces into documents of at least `min_bytes`.

    Each piece keeps a double newline at its end. The last document may be shorter; it is dropped if it is blank.
    """
    documents, current = [], b""
    for piece in text.split(b"\n\n"):
        current += piece + b"\n\n"
        if len(current) >= min_bytes:
            documents.append(current)
            current = b""
    return [*documents, current] if current.strip() else documents


def split_documents(text: bytes) -> list[bytes]:
    """Cut a file into documents of 256 to 2,048 bytes: one long list would fill many training steps in a row.

    What a longer document leaves is dropped if it has fewer than 256 bytes. The last of the file may be shorter.
    """
    parts = []
    for document in join_pieces(text, MIN_DOCUMENT_BYTES):
        cuts = [document[i : i + MAX_DOCUMENT_BYTES] for i in range(0, len(document), MAX_DOCUMENT_BYTES)]
        parts += cuts[:-1] if len(cuts) > 1 and len(cuts[-1]) < MIN_DOCUMENT_BYTES else cuts
    return parts


def shuffle_documents(train: Iterable[bytes], val: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Remove duplicates, from validation also what training has, and sort by SHA-1.

    The order is a fixed shuffle: neighbouring documents come from different files, so any stretch of the validation
    split is a fair sample of all of it.
    """
    kept = {*train}
    splits = dict(train=kept, val={*val} - kept)
    return {split: sorted(documents, key=lambda d: hashlib.sha1(d).digest()) for split, documents in splits.items()}


def build_corpus(torch_folder: Path) -> dict[str, list[bytes]]:
    """Collect the track's documents; all documents of a file go to the same split."""
    documents: dict[str, list[bytes]] = {"train": [], "val": []}
    for path in corpus_files(torch_folder):
        split = "train" if hashlib.sha1(path.encode()).digest()[0] % VAL_DIVISOR else "val"
        documents[split] += split_documents((torch_folder / path).read_bytes())
    return shuffle_documents(**documents)


def to_tokens(documents: list[bytes]) -> np.ndarray:
    """Return uint16 tokens: for each document the end-of-text token, then its bytes."""
    eot = np.array([EOT], dtype=np.uint16)
    parts = (part for document in documents for part in (eot, np.frombuffer(document, dtype=np.uint8)))
    return np.concatenate([*parts], dtype=np.uint16)


def is_track_shard(path: Path, split: str) -> bool:
    """Tell whether the file is the nano track's shard for this split."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == TRACK_SHA256[split]


def main(argv: list[str] | None = None) -> None:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(__file__).with_name("nano")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards")
    args = parser.parse_args(argv)
    pip, spec = f"{shlex.quote(sys.executable)} -m pip install", importlib.util.find_spec("torch")  # not imported
    if spec is None or spec.origin is None:
        parser.error(f"torch is not installed here: {pip} torch=={TRACK_TORCH}")
    version = importlib.metadata.version("torch").split("+")[0]
    paths = {split: args.out / f"nano_{split}_000000.bin" for split in ("train", "val")}
    try:
        if all(is_track_shard(path, split) for split, path in paths.items()):
            print(f"{args.out}: the corpus of the nano track is complete")
            return
        for split, documents in build_corpus(Path(spec.origin).parent).items():
            path, tokens = paths[split], to_tokens(documents)
            digest = hashlib.sha256(shard_header(len(tokens)) + tokens.astype("<u2").tobytes()).hexdigest()
            if version == TRACK_TORCH and digest != TRACK_SHA256[split]:  # before it replaces a sound shard
                changed = f"the sources of the installed torch {version} have been changed; reinstall it"
                parser.error(f"{path} is not written: {changed}: {pip} --force-reinstall --no-deps torch=={version}")
            write_shard(path, tokens)
            print(f"{path}: {len(documents):,} documents, {len(tokens):,} tokens, sha256 {digest}")
            if version != TRACK_TORCH:
                print(f"  packed from torch {version}; the nano track is torch {TRACK_TORCH}: trains, not comparable")
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}; fix that, or choose another --out")


if __name__ == "__main__":
    main()
