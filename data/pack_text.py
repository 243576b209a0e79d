"""Pack any text into shards that train_gpt.py reads, as bytes (nano preset) or GPT-2 tokens (gpt2 preset).

    python data/pack_text.py FILES_OR_FOLDERS...                     # writes data/own/train_000000.bin ..., val_...
    python data/pack_text.py FILES_OR_FOLDERS... --train             # and trains on them
    python data/pack_text.py FILES_OR_FOLDERS... --tokenizer gpt2    # needs: pip install -r data/requirements.txt
    python data/pack_text.py FILES_OR_FOLDERS... --train -- --num_iterations 600    # flags of train_gpt.py, after --

The last line of output is the command that trains on the shards. If they hold less than the preset's run takes, it has
fewer steps and a shorter validation. Of 20 and more files whole ones are for validation, by the hash of their names; of
fewer, documents are. A document is
- bytes: a piece of at least 256 bytes that ends at a blank line, as in pack_nano.py, cut after 2,048. What many files
  repeat (a licence, a quoted mail) then counts once, and the model's window of 256 bytes loses little.
- gpt2: a piece of at least 8 KiB that ends at a blank line, cut after 16 KiB and after 2,048 tokens, because training
  drops what follows. Bytes that are not UTF-8 become U+FFFD; names of special tokens are plain text.

Equal documents count once; one that both splits have stays in training. Documents are sorted by SHA-1, a fixed shuffle.
Memory needs room for three times the text.
Exit codes: 0 packed, 2 something has to be fixed first, 130 interrupted: older shards are as they were.
"""

import argparse
import dataclasses
import glob
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path


from speedrun import needs

with needs.packages("requirements.txt"):
    import numpy as np
    from tqdm import tqdm

    from speedrun import check
    import train_gpt
    from pack_nano import MAX_DOCUMENT_BYTES, MIN_DOCUMENT_BYTES, join_pieces, shuffle_documents, to_tokens
    from shards import lock_folder, write_shard
    from train_gpt import Hyperparameters, UserError

ROOT = needs.ROOT
SHARD_TOKENS = 100_000_000
MAX_TOKENS = 2048  # after which gpt2 cuts documents
BATCH_DOCUMENTS = 32  # encoded at a time
MANY_FILES = 20  # are split by file, fewer by document: a file is then too much or too little for validation
MIN_STEPS = 40  # the least that have one in each stage of gpt2 and in its extension
Tokenizer = namedtuple("Tokenizer", "preset min_bytes max_bytes")  # sizes of documents
TOKENIZERS = {
    "bytes": Tokenizer("nano", MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES),
    "gpt2": Tokenizer("gpt2", 2**13, 2**14),
}


def note(line: str) -> None:
    print("note: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr, flush=True)


def find_files(arguments: Iterable[Path], extensions: set[str]) -> dict[Path, str]:
    """Map each file to its name below its argument. Folders: what has an extension, and is not hidden or linked to."""
    files, left_out = {}, Counter[str]()
    for argument in arguments:
        if argument.is_dir():
            for path in filter(Path.is_file, sorted(argument.rglob("*"))):
                name, ending = path.relative_to(argument), path.suffix.lower()
                is_hidden = any(part.startswith(".") for part in name.parts)
                if ending in extensions and not is_hidden:
                    files[path.resolve()] = name.as_posix()
                else:
                    left_out["hidden" if is_hidden else ending or "without an ending"] += 1
        elif argument.exists() and not argument.is_file():  # reading a pipe or a device might never end
            raise RuntimeError(f"{argument}: not a regular file: copy its content to one, or leave it out")
        else:
            files[argument.resolve()] = argument.name
    told = ", ".join(f"{count:,} {kind}" for kind, count in left_out.most_common(6)) or "nothing"
    if not files:
        raise RuntimeError(f"no text: left out: {told}; --ext takes other endings, such as --ext .json,.csv")
    if left_out:
        note(f"left out: {told}; --ext takes other endings")
    return files


def cut_documents(text: bytes, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Cut a file into documents, without a character of UTF-8 cut in two."""
    # Windows newlines become \n first, or a file from there would have no double newlines
    for document in join_pieces(text.replace(b"\r\n", b"\n"), tokenizer.min_bytes):
        start = 0
        while len(document) > (end := start + tokenizer.max_bytes):
            end = next((i for i in range(end, end - 4, -1) if document[i] & 0xC0 != 0x80), end)  # one begins there
            yield document[start:end]
            start = end
        yield document[start:]


def read_documents(files: dict[Path, str], tokenizer: Tokenizer, val_fraction: float) -> dict[str, list[bytes]]:
    """Read all files, and split their documents. At least one file or document is for validation."""
    groups = []  # a name, and the documents that stay together
    odd: dict[str, list[str]] = {"binary or UTF-16, left out": [], "not UTF-8, packed as it is": []}
    binary, other = odd.values()
    for path, name in files.items():
        if b"\0" in (text := path.read_bytes()):
            binary.append(name)
        elif documents := [*cut_documents(text, tokenizer)]:
            groups.append((os.fsencode(name), documents))
            try:
                for document in documents:
                    document.decode()
            except UnicodeDecodeError:
                other.append(name)
    for what, names in odd.items():
        if names:
            note(f"{len(names):,} files ({', '.join(names[:3])} ...): {what}; iconv -t UTF-8 -f ENCODING converts")
    if len(groups) < MANY_FILES:
        groups = [(document, [document]) for document in {*chain(*(documents for _, documents in groups))}]
    groups.sort(key=lambda group: hashlib.sha1(group[0]).digest())
    num_val = max(1, round(val_fraction * len(groups)))
    val, train = (chain(*(documents for _, documents in part)) for part in (groups[:num_val], groups[num_val:]))
    return shuffle_documents(train, val)


def load_gpt2() -> Callable[[list[bytes]], np.ndarray]:
    """Return what turns text into documents of GPT-2 tokens; tiktoken downloads the vocabulary on first use."""
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
    except ImportError:
        files = needs.typed(ROOT / "data/requirements.txt")
        raise RuntimeError(f"--tokenizer gpt2 needs the package tiktoken: {needs.PIP} -r {files}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise RuntimeError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
    pool, step = ThreadPoolExecutor(os.cpu_count()), MAX_TOKENS - 1  # and the end of text

    def encode(document: bytes) -> np.ndarray:
        tokens = encoding.encode_to_numpy(document.decode(errors="replace"), disallowed_special=())  # without the GIL
        return np.insert(tokens, range(0, len(tokens), step), encoding.eot_token).astype(np.uint16)

    return lambda documents: np.concatenate(list(pool.map(encode, documents)))


def write_shards(folder: Path, split: str, documents: list[bytes], encode: Callable) -> dict[str, int]:
    """Write documents to SPLIT_000000.bin, SPLIT_000001.bin and so on. Return the tokens of each."""
    sizes: dict[str, int] = {}
    held: list[np.ndarray] = []

    def flush() -> None:
        name = f"{split}_{len(sizes):06d}.bin"
        write_shard(folder / name, tokens := np.concatenate(held))
        sizes[name] = len(tokens)
        held.clear()

    for start in tqdm(range(0, len(documents), BATCH_DOCUMENTS), desc=split, disable=None):  # only on terminals
        tokens = encode(documents[start : start + BATCH_DOCUMENTS])
        if held and sum(map(len, held)) + len(tokens) > SHARD_TOKENS:
            flush()
        held.append(tokens)
    if held:
        flush()
    return sizes


def fit(cfg: Hyperparameters, val_size: int) -> Hyperparameters:
    """Return `cfg` cut to what the shards hold; `val_size`: tokens of a shard for validation."""
    blocks = (val_size - 1) // cfg.block_size
    if blocks < 1:
        raise RuntimeError(f"too little text: {val_size:,} tokens for val, {cfg.block_size + 1} needed: add text")
    val_seq_len = min(cfg.val_seq_len, blocks * cfg.block_size)
    val_tokens = min(cfg.val_tokens, val_size - 1) // val_seq_len * val_seq_len
    cfg = dataclasses.replace(cfg, val_seq_len=val_seq_len, val_tokens=val_tokens)

    def shortened(steps: int) -> Hyperparameters:
        extension = cfg.extension_steps * steps // cfg.num_iterations
        return dataclasses.replace(cfg, num_iterations=steps, extension_steps=extension)

    def lacks_tokens(steps: int) -> bool:
        try:
            train_gpt.plan_data(shortened(steps))
        except UserError:
            return True
        return False

    least = min(MIN_STEPS, cfg.num_iterations)
    if lacks_tokens(least):
        needed = cfg.batch_sequences * sum(train_gpt.train_seq_len(i, shortened(least)) for i in range(least))
        told = f"a run of {least} steps takes more than {needed:,} tokens (equal documents count once)"
        others = ", or train nano, without --tokenizer gpt2" * (cfg.preset == "gpt2")
        raise RuntimeError(f"too little text: {told}: add text, or set a smaller --batch_tokens after --{others}")
    steps = range(least, cfg.num_iterations + 1)
    enough = steps[bisect_left(steps, True, key=lacks_tokens) - 1]
    if enough < cfg.num_iterations:
        note(f"the text is enough for {enough:,} of {cfg.num_iterations:,} steps")
    return shortened(enough)


def flags_of(cfg: Hyperparameters) -> list[str]:
    """Return the flags that change a preset to `cfg`, each once."""
    flags = ["--preset", cfg.preset]
    for name, usual in dataclasses.asdict(train_gpt.PRESETS[cfg.preset]).items():
        value = getattr(cfg, name)
        if name not in train_gpt.TABLES and value != usual:
            flags += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return flags


def pack(args: argparse.Namespace) -> list[str]:
    """Write the shards and return the trainer's flags for them."""
    tokenizer = TOKENIZERS[args.tokenizer]
    if own := [flag for flag in args.flags if flag.split("=")[0] in ("--preset", "--train_files", "--val_files")]:
        raise RuntimeError(f"{own[0]}: leave it out after --: bytes are for nano, --tokenizer gpt2 for gpt2")
    flags = ["--preset", tokenizer.preset, "--target_loss", "0", *args.flags]
    cfg = train_gpt.parse_args(flags)  # if this or the next fails, then now
    try:
        check.check_machine(flags, report := check.Report(is_full=False))
    except UserError as error:
        report.problems.append(str(error))
    if report.problems:
        why = f"cannot train here: {report.problems[0].partition(': free some')[0]}"
        if args.train:
            others = "train nano, without --tokenizer gpt2, or " * (args.tokenizer == "gpt2")
            raise RuntimeError(f"{why}; {others}only pack, without --train")
        note(f"for another machine: {why}")
    files = find_files(args.inputs, {end.strip().lower() for end in args.ext.split(",")})
    encode = load_gpt2() if args.tokenizer == "gpt2" else to_tokens
    with lock_folder(args.out):
        for killed in args.out.glob(".packing-*"):  # left behind by a killed packer, because we hold the lock
            shutil.rmtree(killed, ignore_errors=True)
        old = sorted([*args.out.glob("train_*.bin"), *args.out.glob("val_*.bin")])
        if old and not args.force:
            raise RuntimeError(f"{old[0]} is there already: --force replaces all {len(old)} shards, or change --out")
        documents = read_documents(files, tokenizer, args.val_fraction)
        if not documents["val"]:
            raise RuntimeError(f"too little text in {len(files)} files")
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".packing-") as name:
            shards = {split: write_shards(Path(name), split, texts, encode) for split, texts in documents.items()}
            here = glob.escape(name)
            cfg = dataclasses.replace(cfg, train_files=f"{here}/train_*.bin", val_files=f"{here}/val_*.bin")
            fitted = fit(cfg, max(shards["val"].values()))
            new = shards["train"] | shards["val"]
            for shard in new:
                os.replace(Path(name) / shard, args.out / shard)
            for path in {*old} - {args.out / shard for shard in new}:  # last: no failure loses both
                path.unlink()
    for split, sizes in shards.items():
        print(f"{args.out}: {split}: {len(documents[split]):,} documents, {sum(sizes.values()):,} tokens")
    out = args.out.resolve().as_posix().removeprefix(f"{ROOT.as_posix()}/")  # run.sh changes to ROOT
    train, val = (f"{glob.escape(out)}/{split}_*.bin" for split in ("train", "val"))
    return flags_of(dataclasses.replace(fitted, train_files=train, val_files=val))


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add, own = parser.add_argument, os.path.relpath(ROOT / "data/own")
    add("inputs", metavar="FILE_OR_FOLDER", nargs="+", type=Path)
    add("--tokenizer", choices=TOKENIZERS, default="bytes", help="[%(default)s]")
    add("--out", type=Path, default=own, help="folder for the shards [%(default)s]")
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
    print("train on it:", needs.typed(ROOT / "run.sh"), shlex.join(flags), flush=True)
    if args.train:
        os.execv(ROOT / "run.sh", ["./run.sh", *flags])


if __name__ == "__main__":
    main()
