"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs tiktoken: pip install -e ".[text]"
    python data/pack_text.py corpus.jsonl --field text               # a text on each line, as JSON
    python data/pack_text.py corpus.txt --separator '<|endoftext|>'  # texts with this between them

The last line of output is the command that trains on the shards. For bytes --train takes --seconds, trains models of
several lengths, mixes them with counts, and shows bits per byte, a sample and a picture; with your own steps, data, run
id or checkpoint it trains once. Files are UTF-8, or UTF-16 with a byte order mark. Texts are cut at blank lines, or
else at line ends, into documents of 256 to 2,048 bytes, or for gpt2 of 8 to 16 KiB and at most 2,048 tokens; equal ones
count once. A tenth of the bytes is for validation: whole texts, or the ends of those that have more than half of that.
Memory has to hold the text three times.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were; or run.sh's.
"""

import argparse
import glob
import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, compress
from pathlib import Path

import numpy as np
from tqdm import tqdm

if not __package__:  # `python data/pack_text.py` is `python -m data.pack_text`
    env = os.environ | dict(PYTHONPATH=f"{Path(__file__).resolve().parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    os.execve(sys.executable, [sys.executable, "-P", "-m", "data.pack_text", *sys.argv[1:]], env)

from data.pack_nano import MAX_DOCUMENT_BYTES, MIN_DOCUMENT_BYTES, join_pieces, shuffle_documents, to_tokens
from data.shards import write_shard
from data.texts import decode, gpt2_encoding, without_surrogates
from speedrun import ROOT, own_text
from speedrun.process import held

OWN = ROOT / "data/own"
SHARD_TOKENS = 100_000_000
MAX_TOKENS = 2048  # after which gpt2 cuts documents
BATCH_DOCUMENTS = 256  # encoded at a time
EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
# Sizes of documents; steps by tokens, the least (one a stage), tokens of the largest; sequences of the validation
Tokenizer = namedtuple("Tokenizer", "preset min_bytes max_bytes steps min_steps step_tokens val_sequences val_seq_len")
TOKENIZERS = {
    "bytes": Tokenizer("nano", MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES, own_text.steps_of, 20, own_text.STEP, 8, 2**13),
    "gpt2": Tokenizer("gpt2", 2**13, 2**14, lambda tokens: 1050, 81, 3 * 2**17, 40, 2**18),
}


def note(line: str) -> None:
    print("note: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr, flush=True)


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """Map each file to its name below its argument. Folders: what has an extension, and is not hidden or linked to."""
    files, left_out = {}, Counter[str]()
    for argument in arguments:
        if argument.is_file():
            files[argument.resolve()] = argument.name
        elif not argument.is_dir():  # a pipe or a device might never end
            raise RuntimeError(f"{argument}: no regular file and no folder")
        for path in sorted(argument.rglob("*")):
            name, ending = path.relative_to(argument), path.suffix.lower()
            if any(part.startswith(".") for part in name.parts):
                left_out["hidden"] += 1
            elif path.is_dir():
                if path.is_symlink() or not os.access(path, os.R_OK | os.X_OK):
                    note(f"{path}: left out, as it is a link or not readable")
            elif ending in extensions and path.is_file():
                files[path.resolve()] = name.as_posix()
            else:
                left_out[ending or "without an ending"] += 1
    told = ", ".join(f"{count:,} {kind}" for kind, count in left_out.most_common(6)) or "nothing"
    told = f"left out: {told}; --ext takes other endings, and --ext '' files without one"
    if not files:
        raise RuntimeError(f"no text: {told}")
    if left_out:
        note(told)
    return files


def read_file(path: Path) -> tuple[str, str]:
    """Return a file's text, and what is odd about it. Bytes that are not UTF-8 become surrogates, which keep them."""
    content = path.read_bytes()
    try:
        text, odd = decode(content), ""
    except UnicodeDecodeError:
        odd = "not UTF-8, packed as it is; iconv -f ENCODING -t UTF-8 converts"
        text = content.replace(b"\r\n", b"\n").decode(errors="surrogateescape")
    return ("", "binary or unmarked UTF-16, left out") if "\0" in text else (text, odd)


def split_file(name: str, text: str, separator: str, field: str) -> list[str]:
    """Return the texts of a file: of JSON lines a field, of others what is between separators, if there is one."""
    if not name.lower().endswith((".jsonl", ".ndjson")):
        return text.split(separator) if separator else [text]
    texts = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                texts.append(without_surrogates(json.loads(line)[field] or ""))
        except (ValueError, TypeError, KeyError) as error:
            told = f"no JSON object with a text {field!r}, see --field ({type(error).__name__}: {error})"
            raise RuntimeError(f"{name}, line {number}: {told}") from None
    return texts


def cut_documents(text: bytes, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cut a text into documents: where none may end at a blank line, at the end of a line or else of a character."""
    for document in join_pieces(text, tokenizer.min_bytes):
        start = 0
        while len(document) > (end := start + tokenizer.max_bytes):
            end = next((i for i in range(end, end - 4, -1) if document[i] & 0xC0 != 0x80), end)  # one begins there
            end = document.rfind(b"\n", start + tokenizer.min_bytes, end) + 1 or end
            yield document[start:end]
            start = end
        yield document[start:]


def read_documents(files: dict[Path, str], args: argparse.Namespace) -> dict[str, list[bytes]]:
    """Return the documents of each split. Tell what is left out or odd."""
    odd: dict[str, list[str]] = defaultdict(list)
    texts: dict[bytes, tuple[bytes, list[bytes]]] = {}  # a name, and the documents that stay together
    for path, name in files.items():
        content, what = read_file(path)
        odd[what].append(name)
        parts = split_file(name, content, args.separator, args.field) if content else []
        for i, part in enumerate(parts, start=1):
            this, text = f"{name} {i}" if len(parts) > 1 else name, part.encode(errors="surrogateescape")
            key = hashlib.sha1(text.strip()).digest()
            if key in texts or not text.strip():
                odd["without text or equal to another, left out"].append(this)
            else:
                texts[key] = os.fsencode(this), [*cut_documents(text, TOKENIZERS[args.tokenizer])]
    odd.pop("", None)
    for what, names in odd.items():
        note(f"{len(names):,} texts ({', '.join(names[:3])}{' ...' * (len(names) > 3)}): {what}")
    return split_texts([*texts.values()], args.val_fraction, TOKENIZERS[args.tokenizer].val_seq_len)


def without_end(documents: list[bytes], share: float) -> int:
    """Return how many documents remain if the last ones, at least this share of the bytes, are taken away."""
    left = (1 - share) * sum(map(len, documents))
    return sum(end <= left for end in accumulate(map(len, documents)))


def split_texts(texts: list[tuple[bytes, list[bytes]]], fraction: float, least: int) -> dict[str, list[bytes]]:
    """Give validation a fraction of the bytes, or a sequence: whole texts, or the ends of large texts.

    So it does not lie between what is trained on. If texts are alike, or the large ones few, all are one large text.
    """
    read = sum(len(document) for _, documents in texts for document in documents)
    texts = [(name, [*dict.fromkeys(documents)]) for name, documents in texts]
    times = Counter(chain.from_iterable(documents for _, documents in texts))
    total = sum(map(len, times))
    if equal := read - total:
        note(f"{equal:,} bytes are in documents that are equal to others: each counts once")
    wanted = max(fraction * total, min(least + 1, total / 4))
    sizes = [sum(len(document) for document in documents if times[document] == 1) for _, documents in texts]
    large = [size > wanted / 2 for size in sizes]
    if sum(sizes) < max(wanted, total / 2) or 0 < sum(compress(sizes, large)) < 2 * wanted:
        texts, sizes, large = [(b"all texts, one after another", [*times])], [total], [True]
    train, val = list[bytes](), list[bytes]()
    if any(large):
        share = wanted / sum(compress(sizes, large))
        names = [os.fsdecode(name) for name, _ in compress(texts, large)]
        note(f"validation: the last {min(share, 1):.0%} of {', '.join(names[:3])}{' ...' * (len(names) > 3)}")
        for (_, documents), is_large in zip(texts, large, strict=True):
            end = without_end(documents, share * is_large)
            train += documents[:end]
            val += documents[end:]
    else:
        begin = 0
        order = sorted(zip(texts, sizes, strict=True), key=lambda part: hashlib.sha1(part[0][0]).digest())
        for (_, documents), size in order:
            (val if begin < wanted else train).extend(documents)
            begin += size
        note("validation: whole texts, chosen by a hash of their names")
    return shuffle_documents(train, val)


def encode_gpt2(encoding, documents: list[bytes]) -> np.ndarray:
    """Return GPT-2 tokens, with an end of text before each document and each part of one that is too long."""
    texts = [document.decode(errors="replace") for document in documents]
    lists = encoding.encode_ordinary_batch(texts)
    begins = (range(0, len(tokens), MAX_TOKENS - 1) for tokens in lists)
    parts = [np.insert(tokens, places, encoding.eot_token) for tokens, places in zip(lists, begins, strict=True)]
    return np.concatenate(parts).astype(np.uint16)


def cut_shards(documents: list[bytes], encode: Callable, split: str) -> Iterator[np.ndarray]:
    """Return the tokens of each shard."""
    held: list[np.ndarray] = []
    for start in tqdm(range(0, len(documents), BATCH_DOCUMENTS), desc=split, disable=None):  # only on terminals
        tokens = encode(documents[start : start + BATCH_DOCUMENTS])
        if held and sum(map(len, held)) + len(tokens) > SHARD_TOKENS:
            yield np.concatenate(held)
            held.clear()
        held.append(tokens)
    if held:
        yield np.concatenate(held)


def fit(tokenizer: Tokenizer, train: int, val: int, own: Sequence[str] = ()) -> tuple[int, int]:
    """Return the steps and the validation tokens of a run for which the text is enough. Flags of one's own may help."""
    steps = (train - 1) // tokenizer.step_tokens
    scored = min((val - 1) // tokenizer.val_seq_len, tokenizer.val_sequences) * tokenizer.val_seq_len
    if not own and (steps < tokenizer.min_steps or scored < 1):
        told = f"{train:,} tokens to train on and {val:,} to validate on, expected "
        told += f"{tokenizer.min_steps * tokenizer.step_tokens + 1:,} and {tokenizer.val_seq_len + 1:,}"
        raise RuntimeError(f"too little text for {tokenizer.preset}: {told}: add some, or your own flags after --")
    return max(1, min(steps, tokenizer.steps(train))), max(scored, tokenizer.val_seq_len)


def pack(args: argparse.Namespace) -> tuple[list[str], own_text.Text]:
    """Write the shards. Return the flags of a run, and what is in them."""
    tokenizer, is_bytes = TOKENIZERS[args.tokenizer], args.tokenizer == "bytes"
    if args.seconds is not None and not 15 <= args.seconds < math.inf:
        raise RuntimeError(f"--seconds {args.seconds}: expected 15 or more")
    if not 0 <= args.val_fraction < 1:  # nor is NaN
        raise RuntimeError(f"--val_fraction {args.val_fraction}: expected a number from 0 to less than 1")
    files = find_files(args.inputs, {f".{end.strip(' .').lower()}" if end else "" for end in args.ext.split(",")})
    encode = to_tokens if is_bytes else partial(encode_gpt2, gpt2_encoding())
    old = {*args.out.glob("train_*.bin"), *args.out.glob("val_*.bin")}
    if old and args.out.resolve() != OWN:
        raise RuntimeError(f"{min(old)} is there already: remove the {len(old)} shards, or choose another --out")
    documents, sizes = read_documents(files, args), Counter[str]()
    size = sum(1 + len(document) for document in documents["train"])
    seconds = args.seconds or own_text.seconds_of(size)
    times = own_text.passes_of(size, seconds) if args.train and is_bytes else 1
    with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as folder:
        for split, texts in documents.items():
            count = times if split == "train" else 1  # each time in another order
            more = (sorted(texts, key=lambda d: hashlib.sha1(b"%d " % i + d).digest()) for i in range(1, count))
            for i, tokens in enumerate(cut_shards([*texts, *chain(*more)], encode, split)):
                write_shard(Path(folder, f"{split}_{i:06d}.bin"), tokens)
                sizes[split] += len(tokens)
        sizes["train"] //= times
        steps, scored = fit(tokenizer, sizes["train"], sizes["val"], args.flags)
        for shard in Path(folder).iterdir():
            os.replace(shard, args.out / shard.name)
            old.discard(args.out / shard.name)
    for path in old:  # last: no failure loses both
        path.unlink()
    flags = ["--preset", tokenizer.preset, "--target_loss", "0", "--val_sha256", ""]
    flags += ["--num_iterations", str(steps), "--val_tokens", str(scored), *own_text.MODEL * is_bytes]
    out = glob.escape(str(args.out.resolve()).removeprefix(f"{ROOT}/"))  # run.sh changes to ROOT
    for split, texts in documents.items():
        print(f"{args.out}: {split}: {len(texts):,} documents, {sizes[split]:,} tokens")
        flags += [f"--{split}_files", f"{out}/{split}_*.bin"]
    return flags, own_text.Text(documents["train"], documents["val"], sizes["train"], scored, seconds)


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add, own = parser.add_argument, os.path.relpath(OWN)
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    add("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    add("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
    add("--val_fraction", type=float, default=0.1, help="part of the text for validation [%(default)s]")
    add("--separator", default="", help="text between texts of a file, such as '<|endoftext|>'")
    add("--field", default="text", help="that holds the text of a line of .jsonl and .ndjson [%(default)s]")
    add("--ext", default=EXTENSIONS, help="files to take from folders; --ext '' those without an ending [%(default)s]")
    told = "that --train takes in all, from 15 on [10 + 90 sqrt(MB of text), at most 100]"
    add("--seconds", type=float, help=told)
    add("--train", action="store_true", help="then train on the shards; after -- with other flags of train_gpt.py")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end], argparse.Namespace(flags=argv[end + 1 :]))
    began = time.monotonic()
    try:
        with held(args.out, "another pack_text.py packs or trains there: choose another --out"):
            flags, text = pack(args)
            print("train on it:", shlex.join([f"{ROOT}/run.sh", *flags, *args.flags]), flush=True)
            theirs = {flag.partition("=")[0] for flag in args.flags} & {*own_text.SINGLE.split()}
            if args.train and (theirs or args.tokenizer != "bytes"):  # with this Python: run.sh makes no environment
                os.execve(ROOT / "run.sh", ["./run.sh", *flags, *args.flags], os.environ | {"PYTHON": sys.executable})
            elif args.train:
                own_text.say(*own_text.why(text, args.flags))
                sys.exit(own_text.train(flags, args.flags, text, began))
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
