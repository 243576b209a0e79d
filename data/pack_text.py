"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs tiktoken: pip install -e ".[text]"
    python data/pack_text.py FILES_OR_FOLDERS... --train -- --seed 1 --compile    # flags of train_gpt.py, after --
    python data/pack_text.py corpus.jsonl --field text               # a text on each line, as JSON
    python data/pack_text.py corpus.txt --separator '<|endoftext|>'  # texts with this between them

The last line of output is the command that trains on the shards. For bytes --train chooses steps by the size of the
text, says why, goes on while validation falls, and ends with bits per byte, a sample and a picture of the losses; with
steps, batches, data, a run id, a log folder or a checkpoint of your own it trains once, as you say. A file is one text,
or holds several, as above, in UTF-8, or in UTF-16 with a byte order mark; ./-NAME is one that begins so. Equal texts
count once. A tenth of the bytes is for validation: whole texts, by the hash of their names, where each is less than
half of that; else documents. A document is
- bytes: a piece of at least 256 bytes that ends at a blank line, as in pack_nano.py, cut after 2,048. What many files
  repeat (a licence, a quoted mail) then counts once, and the model, which sees 512 bytes, loses little.
- gpt2: a piece of at least 8 KiB that ends at a blank line, cut after 16 KiB and after 2,048 tokens, because training
  drops what follows. Bytes that are not UTF-8 become U+FFFD; names of special tokens are plain text.

Equal documents count once; one that both splits have stays in training. Documents are sorted by SHA-1, a fixed shuffle.
Memory needs room for three times the text. What data/own had of an earlier text is replaced once all is well.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were; or run.sh's.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

if not __package__:  # `python data/pack_text.py` is `python -m data.pack_text`
    env = os.environ | dict(PYTHONPATH=f"{Path(__file__).resolve().parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    os.execve(sys.executable, [sys.executable, "-m", "data.pack_text", *sys.argv[1:]], env)

from data.pack_nano import MAX_DOCUMENT_BYTES, MIN_DOCUMENT_BYTES, join_pieces, shuffle_documents, to_tokens
from data.shards import write_shard
from data.texts import decode, gpt2_encoding, without_surrogates
from speedrun import ROOT, own_text
from speedrun.process import held

OWN = ROOT / "data/own"
SHARD_TOKENS = 100_000_000
MAX_TOKENS = 2048  # after which gpt2 cuts documents
BATCH_DOCUMENTS = 256  # encoded at a time
JSON_LINES = (".jsonl", ".ndjson")
EXTENSIONS = ".txt,.md,.rst,.tex,.py,.c,.h,.cpp,.rs,.go,.java,.js,.ts"
# Sizes of documents; what a run takes: its steps, by tokens, the least that have one in each stage, tokens of the
# largest step, sequences of its validation
Tokenizer = namedtuple("Tokenizer", "preset min_bytes max_bytes steps min_steps step_tokens val_sequences val_seq_len")
TOKENIZERS = {
    "bytes": Tokenizer("nano", MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES, own_text.steps_of, 20, own_text.STEP, 8, 2**13),
    "gpt2": Tokenizer("gpt2", 2**13, 2**14, lambda tokens: 1050, 81, 3 * 2**17, 40, 2**18),
}


def note(line: str) -> None:
    print("note: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr, flush=True)


def walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what is in a folder, at any depth, and why it is not read. A linked folder might hold this one."""
    denied: list[str] = []
    for top, folders, names in os.walk(folder, onerror=lambda error: denied.append(error.filename)):
        for path in map(Path(top).joinpath, [*folders, *names]):  # os.path: those of pathlib may raise
            if not os.path.isdir(path):
                yield path, "" if os.path.isfile(path) else "no regular file(s)"
            elif os.path.islink(path):
                yield path, "linked folder(s), to be named themselves"
    yield from ((Path(name), "folder(s) without permission") for name in denied)


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """Map each file to its name below its argument. Folders: what has an extension, and is not hidden or linked to."""
    files, left_out = {}, Counter[str]()
    for argument in arguments:
        if argument.is_file():
            files[argument.resolve()] = argument.name
            continue
        if not argument.is_dir():  # a pipe or a device might never end
            raise RuntimeError(f"{argument}: no regular file and no folder")
        for path, problem in sorted(walk(argument)):
            name, ending = path.relative_to(argument), path.suffix.lower()
            is_hidden = any(part.startswith(".") for part in name.parts)
            if ending in extensions and not is_hidden and not problem:
                files[path.resolve()] = name.as_posix()
            else:
                left_out["hidden" if is_hidden else problem or ending or "without an ending"] += 1
    kinds = sorted(left_out.most_common(), key=lambda found: "(s)" not in found[0])[:6]  # folders first
    told = ", ".join(f"{count:,} {kind}" for kind, count in kinds) or "nothing"
    told = f"left out: {told}; --ext takes other endings, and --ext '' files without one"
    if not files:
        raise RuntimeError(f"no text: {told}")
    if left_out:
        note(told)
    return files


def read_file(path: Path) -> tuple[str, str]:
    """Return a file's text, and what is odd about it. Bytes that are not UTF-8 become surrogates, which keep them."""
    odd, content = "", path.read_bytes()
    try:
        text = decode(content)
    except UnicodeDecodeError:
        odd = "not UTF-8, packed as it is; iconv -f ENCODING -t UTF-8 converts"
        text = content.replace(b"\r\n", b"\n").decode(errors="surrogateescape")
    if "\0" in text:
        return "", "compressed, binary or unmarked UTF-16, left out; unpack, or iconv -f UTF-16LE -t UTF-8 converts"
    return text, odd


def split_file(name: str, text: str, separator: str, field: str) -> list[str]:
    """Return the texts of a file: of JSON lines a field, of others what is between separators, if there is one."""
    if not name.lower().endswith(JSON_LINES):
        return text.split(separator) if separator else [text]
    texts = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                texts.append(without_surrogates(json.loads(line)[field] or ""))
        except (RecursionError, ValueError, TypeError, KeyError) as error:
            told = f"{type(error).__name__}: {error}; expected a JSON object with a text {field!r}"
            raise RuntimeError(f"{name}, line {number}: {told}; --field names another field") from None
    return texts


def cut_documents(text: bytes, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cut a text into documents, without a character of UTF-8 cut in two."""
    for document in join_pieces(text, tokenizer.min_bytes):
        start = 0
        while len(document) > (end := start + tokenizer.max_bytes):
            end = next((i for i in range(end, end - 4, -1) if document[i] & 0xC0 != 0x80), end)  # one begins there
            yield document[start:end]
            start = end
        yield document[start:]


def read_documents(files: dict[Path, str], args: argparse.Namespace) -> dict[str, list[bytes]]:
    """Read all files, and split their documents. Tell what is left out or odd."""
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


def split_texts(texts: list[tuple[bytes, list[bytes]]], fraction: float, least: int) -> dict[str, list[bytes]]:
    """Give validation a fraction of the bytes, or enough for a sequence. A text that is large is split by documents.

    So are all if one is, or if they have most in common, which does not count as it may stay in training.
    """
    times = Counter(chain.from_iterable({*documents} for _, documents in texts))
    total = sum(map(len, times))
    if equal := sum(len(document) for _, documents in texts for document in documents) - total:
        note(f"{equal:,} bytes are in documents that are equal to others: each counts once")
    wanted = max(fraction * total, min(least + 1, total / 4))
    sizes = [sum(len(document) for document in documents if times[document] == 1) for _, documents in texts]
    if max(sizes, default=0) > wanted / 2 or sum(sizes) < max(wanted, total / 2):
        texts, sizes = [(document, [document]) for document in times], [*map(len, times)]
    train, val, begin = list[bytes](), list[bytes](), 0
    order = sorted(zip(texts, sizes, strict=True), key=lambda part: hashlib.sha1(part[0][0]).digest())
    for (_, documents), size in order:
        (val if begin < wanted else train).extend(documents)
        begin += size
    return shuffle_documents(train, val)


def encode_gpt2(encoding, documents: list[bytes]) -> np.ndarray:
    """Return GPT-2 tokens, with an end of text before each document and each part of one that is too long."""
    texts = [document.decode(errors="replace") for document in documents]
    lists = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
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


def scored_tokens(tokenizer: Tokenizer, val: int) -> int:
    """Return how many of so many validation tokens a run scores."""
    return min((val - 1) // tokenizer.val_seq_len, tokenizer.val_sequences) * tokenizer.val_seq_len


def fit(tokenizer: Tokenizer, train: int, val: int, own: Sequence[str] = (), times: int = 1) -> list[str]:
    """Return the flags of a run for which the text, read so often, is enough. The user's own flags may need less."""
    flags = " ".join(own)
    given = {name: int(size) for name, size in re.findall(r"--(\w+)[= ]([1-9]\d{0,9})(?!\S)", flags)}
    batches = 3 if tokenizer.preset == "gpt2" else 1  # in the largest step
    batch = given.get("batch_tokens", tokenizer.step_tokens // batches)
    for name, most in dict(num_iterations=(train * times - 1) // batch, val_tokens=val - 1).items():
        if given.get(name, 0) > max(0, most) and not re.search("--(preset|train_files|val_files)", flags):
            raise RuntimeError(f"--{name} {given[name]}: the text has enough for {max(0, most):,} at most")
    steps, scored = (train - 1) // (batch * batches), scored_tokens(tokenizer, val)
    if not own and (steps < tokenizer.min_steps or scored < 1):
        least = f"{tokenizer.min_steps * tokenizer.step_tokens + 1:,} and {tokenizer.val_seq_len + 1:,}"
        told = f"{train:,} tokens to train on and {val:,} to validate on, expected {least}"
        raise RuntimeError(f"too little text for {tokenizer.preset}: {told}: add some, or your own flags after --")
    sizes = {"--num_iterations": max(1, min(steps, tokenizer.steps(train)))}
    if scored > 0:
        sizes["--val_tokens"] = scored
    return [word for name, size in sizes.items() for word in (name, str(size))]


def passes(documents: list[bytes], count: int) -> list[bytes]:
    """Return the documents `count` times, each time in another order."""
    orders = (sorted(documents, key=lambda d: hashlib.sha1(b"%d " % i + d).digest()) for i in range(1, count))
    return [*documents, *chain(*orders)]


def pack(args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[list[str], own_text.Text]:
    """Write the shards, in a folder that is held as long as `stack`. Return the flags of a run, and what is in them."""
    tokenizer = TOKENIZERS[args.tokenizer]
    if not 0 <= args.val_fraction < 1:  # nor is NaN
        raise RuntimeError(f"--val_fraction {args.val_fraction}: expected a number from 0 to less than 1")
    files = find_files(args.inputs, {f".{end.strip(' .').lower()}" if end else "" for end in args.ext.split(",")})
    encode = partial(encode_gpt2, gpt2_encoding()) if args.tokenizer == "gpt2" else to_tokens
    sizes, flags = Counter[str](), ["--preset", tokenizer.preset, "--target_loss", "0", "--val_sha256", ""]
    out = str(args.out.resolve()).removeprefix(f"{ROOT}/")  # run.sh changes to ROOT
    stack.enter_context(held(args.out, "another pack_text.py packs or trains there: choose another --out"))
    old = {*args.out.glob("train_*.bin"), *args.out.glob("val_*.bin")}
    if old and args.out.resolve() != OWN:
        raise RuntimeError(f"{min(old)} is there already: remove the {len(old)} shards, or choose another --out")
    documents = read_documents(files, args)
    is_bytes = args.tokenizer == "bytes"
    times = own_text.passes_of(sum(1 + len(d) for d in documents["train"])) if args.train and is_bytes else 1
    with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as folder:
        for split, texts in documents.items():
            texts = passes(texts, times if split == "train" else 1)
            for i, tokens in enumerate(cut_shards(texts, encode, split)):
                write_shard(Path(folder, f"{split}_{i:06d}.bin"), tokens)
                sizes[split] += len(tokens)
            flags += [f"--{split}_files", f"{glob.escape(out)}/{split}_*.bin"]
        sizes["train"] //= times
        flags += [*fit(tokenizer, sizes["train"], sizes["val"], args.flags, times), *own_text.MODEL * is_bytes]
        new = {args.out / shard.name: shard for shard in Path(folder).iterdir()}
        for path, shard in new.items():
            os.replace(shard, path)
    for path in old - new.keys():  # last: no failure loses both
        path.unlink()
    for split, texts in documents.items():
        print(f"{args.out}: {split}: {len(texts):,} documents, {sizes[split]:,} tokens")
    scored = scored_tokens(tokenizer, sizes["val"])
    return flags, own_text.Text(documents["train"], documents["val"], sizes["train"], scored)


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
    add("--train", action="store_true", help="then train on the shards; after -- with other flags of train_gpt.py")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end], argparse.Namespace(flags=argv[end + 1 :]))
    with contextlib.ExitStack() as stack:
        try:
            flags, text = pack(args, stack)
            run = "./run.sh" if Path.cwd() == ROOT else str(ROOT / "run.sh")
            print("train on it:", shlex.join([run, *flags, *args.flags]), flush=True)
            theirs = {flag.partition("=")[0] for flag in args.flags} & {*own_text.SINGLE.split()}
            if args.train and args.tokenizer == "bytes" and not theirs:
                own_text.say(*own_text.why(text, args.flags))
                sys.exit(own_text.train(flags, args.flags, text))
            if args.train and args.tokenizer == "bytes":
                note(f"one run as you say, without bits per byte: {', '.join(sorted(theirs))}")
            if args.train:  # with this Python, so that run.sh makes no other environment
                os.execve(ROOT / "run.sh", ["./run.sh", *flags, *args.flags], os.environ | {"PYTHON": sys.executable})
        except (OSError, RuntimeError) as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            parser.exit(130, f"{parser.prog}: interrupted\n")


if __name__ == "__main__":
    main()
