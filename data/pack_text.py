"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/{train,val}_000000.bin
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs tiktoken, of the extra "tools"

The last lines of output are the command that trains on the shards, and the one that scores the model on val.txt beside
them: the text that the run is validated on. Files are UTF-8, or UTF-16 with a byte order mark; of other encodings the
bytes are packed. Of folders .txt, .md, .rst, .tex and sources of programs are taken; what is left out is told. Texts
are cut, where possible at blank lines, into documents of 256 to 2,048 bytes, for gpt2 of 4 to 8 KiB; equal ones count
once. The last tenth of each text is for validation. Exit codes: 0; 2 bad input, and older shards stay; 130 interrupted.
"""

import argparse
import glob
import os
import shlex
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

shards = import_module("data.shards" if __package__ else "shards")  # started as a file, Python looks in its folder
pack_nano = import_module("data.pack_nano" if __package__ else "pack_nano")
with shards.loading():
    import numpy as np

EXTENSIONS = ".txt .md .rst .tex .py .c .h .cpp .rs .go .java .js .ts".split()

# Bytes of a document; steps, from one a stage on; tokens of the largest; sequences of the validation; more flags
Preset = namedtuple("Preset", "name sizes min_steps max_steps step_tokens val_sequences val_seq_len flags")
PRESETS = {
    "bytes": Preset("nano", (2**8, 2**11), 20, 2000, 2048, 8, 2**13, "--ngram_order 3 --ngram_rows 262144"),
    "gpt2": Preset("gpt2", (2**12, 2**13), 81, 1050, 3 * 2**17, 40, 2**18, "--save_checkpoint"),
}


def find_files(argument: Path) -> list[Path]:
    """Return the file, or all of a folder that are not hidden."""
    if argument.is_file():
        return [argument]
    if not argument.is_dir():  # a pipe or a device might never end
        raise shards.UserError(f"{argument}: no regular file and no folder")
    paths = sorted(argument.rglob("*"))
    return [path for path in paths if "/." not in f"/{path.relative_to(argument)}" and path.is_file()]


def choose_files(inputs: Sequence[Path]) -> tuple[list[Path], str]:
    """Return the files that are named or have an ending of text, and say what else folders have, if anything."""
    chosen, others, named = [], Counter[str](), {*inputs}
    for path in dict.fromkeys(path for argument in inputs for path in find_files(argument)):
        if (ending := path.suffix.lower()) in EXTENSIONS or path in named:
            chosen.append(path)
        else:
            others[ending or "without ending"] += 1
    counts = ", ".join(f"{count:,} {ending}" for ending, count in others.most_common(8))
    more = " and others" if len(others) > 8 else ""
    return chosen, f"left out of folders: {counts}{more}; files that you name are taken" if others else ""


def read_texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the text of each file, and leave out what is none."""
    for path in paths:
        content = shards.read_text(path)
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
    encoding = shards.gpt2_encoding()
    arrays = []
    for start in range(0, len(documents), 256):  # lists of all would take much memory
        batch = [document.decode(errors="replace") for document in documents[start : start + 256]]
        for tokens in encoding.encode_ordinary_batch(batch):
            arrays.append(np.array([encoding.eot_token, *tokens], np.uint16))
    return np.concatenate(arrays)


def flags_of(preset: Preset, train: int, val: int, hint: str) -> list[str]:
    """Return the flags of a run that reads so many tokens once. Raise shards.UserError if they are too few."""
    steps, sequences = (train - 1) // preset.step_tokens, (val - 1) // preset.val_seq_len
    if steps < preset.min_steps or sequences < 1:
        least = f"{preset.min_steps * preset.step_tokens + 1:,} and {preset.val_seq_len + 1:,}"
        found = f"{train:,} and {val:,} tokens"
        raise shards.UserError(f"too little text: {found}, {preset.name} needs {least}{hint and f'; {hint}'}")
    val_tokens = min(sequences, preset.val_sequences) * preset.val_seq_len
    flags = f"--preset {preset.name} --num_iterations {min(steps, preset.max_steps)} --val_tokens {val_tokens}"
    return f"{flags} {preset.flags} --target_loss 0 --val_sha256=".split()


def pack(inputs: Sequence[Path], out: Path, tokenizer: str) -> list[str]:
    """Write the shards, and the text that is validated on. Return the flags of a run on them."""
    preset = PRESETS[tokenizer]
    paths, hint = choose_files(inputs)
    found = [pack_nano.split_documents(text, *preset.sizes) for text in read_texts(paths)]
    train, val = split_texts(found)
    splits = pack_nano.shuffle_documents(train, val)
    encode = pack_nano.to_tokens if tokenizer == "bytes" else encode_gpt2
    tokens = {split: encode(documents) if documents else np.zeros(0) for split, documents in splits.items()}
    flags = flags_of(preset, len(tokens["train"]), len(tokens["val"]), hint)
    if hint:
        print(hint, file=sys.stderr)
    for split, documents in splits.items():
        path = out / f"{split}_000000.bin"
        shards.write_shard(path, tokens[split])
        print(f"{path}: {len(documents):,} documents, {len(tokens[split]):,} tokens", flush=True)
        flags += [f"--{split}_files", glob.escape(str(path).removeprefix(f"{shards.ROOT}/"))]  # run.sh changes to it
    # Documents that begin in what the run is validated on, in the order of the texts
    begins = tokens["val"][: preset.val_sequences * preset.val_seq_len] == tokens["val"][0]  # the end of a text
    validated = {*splits["val"][: begins.sum()]}
    shards.write_file(out / "val.txt", *(document for document in dict.fromkeys(val) if document in validated))
    return flags


def main(argv: list[str] | None = None) -> None:
    raw, own = argparse.RawDescriptionHelpFormatter, Path(os.path.relpath(shards.ROOT / "data/own"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    parser.add_argument("--tokenizer", choices=PRESETS, default="bytes", help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    args = parser.parse_args(argv)
    out, run_id = args.out.resolve(), time.strftime("own-%Y%m%d-%H%M%S")
    flags = pack(args.inputs, out, args.tokenizer)
    score = [sys.executable, shards.ROOT / "sample.py", shards.ROOT / f"logs/{run_id}.pt", "--score", out / "val.txt"]
    print("train on it:", shlex.join([f"{shards.ROOT}/run.sh", *flags, "--run_id", run_id]))
    print("then score it, or without --score see a sample:", shlex.join(map(str, score)))


if __name__ == "__main__":
    shards.run(main)
