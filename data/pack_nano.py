"""Pack the corpus of the nano track: the Python sources of the installed torch package, as bytes.

    python data/pack_nano.py            # writes data/nano/nano_{train,val}_000000.bin in about 3 s

Everybody who can run the trainer already has this text, so nothing is downloaded. With torch 2.13.0 the shards are the
track's, byte for byte. Another version gives another corpus: it trains as well, and train_gpt.py says that its losses
are not comparable. Exit codes: 0 packed, 2 it could not be.
"""

import argparse
import hashlib
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path

shards = import_module("data.shards" if __package__ else "shards")  # started as a file, Python looks in its folder
with shards.loading():
    import numpy as np

EOT = 256  # opens every document; the bytes themselves are tokens 0 ... 255
VAL_DIVISOR = 20  # a file is validation if the first byte of SHA-1(path) is divisible by this


def split_documents(text: bytes, min_bytes: int = 256, max_bytes: int = 2048) -> list[bytes]:
    """Cut a file at its double newlines into documents of these sizes: one long list would fill many training steps.

    Each piece keeps a double newline at its end. What a longer document leaves is dropped if it has less than
    `min_bytes`. The last of the file may be shorter; it is dropped if it is blank.
    """
    documents, parts = [b""], list[bytes]()
    for piece in text.split(b"\n\n"):
        if len(documents[-1]) >= min_bytes:
            documents.append(b"")
        documents[-1] += piece + b"\n\n"
    if len(documents[-1]) < min_bytes and not documents[-1].strip():
        documents.pop()
    for document in documents:
        cuts = [document[i : i + max_bytes] for i in range(0, len(document), max_bytes)]
        parts += cuts[:-1] if len(cuts) > 1 and len(cuts[-1]) < min_bytes else cuts
    return parts


def shuffle_documents(train: list[bytes], val: list[bytes]) -> dict[str, list[bytes]]:
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
    for file in torch_folder.rglob("*.py"):
        path = file.relative_to(torch_folder).as_posix()
        # Both are generated when torch is built, so they differ between builds of one version
        if path != "version.py" and not path.startswith("testing/_internal/generated/"):
            split = "train" if hashlib.sha1(path.encode()).digest()[0] % VAL_DIVISOR else "val"
            documents[split] += split_documents(file.read_bytes())
    return shuffle_documents(**documents)


def to_tokens(documents: Sequence[bytes]) -> np.ndarray:
    """Return uint16 tokens: for each document the end-of-text token, then its bytes."""
    eot = np.array([EOT], dtype=np.uint16)
    parts = (part for document in documents for part in (eot, np.frombuffer(document, dtype=np.uint8)))
    return np.concatenate([*parts], dtype=np.uint16)


def main(argv: list[str] | None = None) -> None:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(__file__).with_name("nano")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards")
    args = parser.parse_args(argv)
    spec = util.find_spec("torch")  # which is not imported
    if spec is None or spec.origin is None:
        parser.error("torch is not installed here: ./run.sh makes an environment that has it")
    for split, documents in build_corpus(Path(spec.origin).parent).items():
        path, tokens = args.out / f"nano_{split}_000000.bin", to_tokens(documents)
        shards.write_shard(path, tokens)
        print(f"{path}: {len(documents):,} documents, {len(tokens):,} tokens")


if __name__ == "__main__":
    shards.run(main)
