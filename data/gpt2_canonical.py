"""Write data/gpt2_canonical.bin: for each GPT-2 token the tokens that the tokenizer never puts right behind it.

    python data/gpt2_canonical.py       # needs tiktoken, of the extra "tools"; some ten seconds

" under" and "stand" never follow each other, because the tokenizer writes " understand". A model need not know that:
where this mask is set, the last validation takes the logit away. The mask follows from the vocabulary alone, and
training does not read it. The idea is @jvarho's, of public record 91; the rule in code is ours.

The file has bits (50304, 6288) uint8, 316 MB: bit x % 8 of byte x // 8 in row p is 1 if x never stands right behind p.
Rows and columns of the end of text and of padding are 0. The repository has data/gpt2_prefixes.bin, which is written,
too: for each token the longest other one that it begins with, which training predicts beside it (`Stage.prefix`).
No other files are written than those with the known hashes.
"""

import hashlib
import unicodedata
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

shards = import_module("data.shards" if __package__ else "shards")  # started as a file, Python looks in its folder
with shards.loading():
    import numpy as np

FOLDER, VOCAB_SIZE = Path(__file__).parent, 50304
SHA256 = {
    "gpt2_canonical.bin": "3bc096d452b0497e12da82158856669bc3bb3735281f3d676d0bf2ac20d95998",
    "gpt2_prefixes.bin": "369d2091939994f1ff771dd3d52912ad53bb3daf1c7941840a1cd50d0d72f373",
}
CONTRACTIONS = [b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"]  # the tokenizer always cuts behind one
NEVER = 2**31 - 1
Pieces = list[tuple[int, int]]  # a token, and the merge from which on it is no longer that piece


def build_up(text: bytes, ranks: dict[bytes, int]) -> tuple[tuple[int, int] | None, Pieces, Pieces]:
    """Return how byte pair encoding makes a token: the pair joined last, and its first and last pieces over time.

    Merge r joins all neighbours that make token r, from left to right through the text. When it comes to the border of
    two tokens, it is done with the end of the left one, and has not begun with the right one. What takes a piece comes
    after the merge that makes it, so only the end of its time counts.
    """
    parts = [text[i : i + 1] for i in range(len(text))]
    first, last, pair = [], [], None
    while len(parts) > 1:
        rank, i = min((ranks.get(a + b, NEVER), i) for i, (a, b) in enumerate(pairwise(parts)))
        pair = ranks[parts[i]], ranks[parts[i + 1]]
        if i == 0:
            first.append((pair[0], rank + 1))
        if i == len(parts) - 2:
            last.append((pair[1], rank))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    whole = (ranks[text], NEVER)
    return pair, [*first, whole], [*last, whole]


def character_class(text: bytes, at_end: bool) -> str:
    """Return the class of a token's first or last character: S space, L letter, N number, O other, ? a part of one."""
    for n in range(1, 5):
        try:
            character = (text[-n:] if at_end else text[:n]).decode()
        except UnicodeDecodeError:
            continue
        if character.isspace() and not "\x1c" <= character <= "\x1f":  # these are spaces for Python alone
            return "S"
        return dict(L="L", N="N").get(unicodedata.category(character)[0], "O")
    return "?"


def canonical_rows(tokens: list[bytes], vocab_size: int) -> Iterator[np.ndarray]:
    """Yield each row of the mask, as bytes. tokens[r] is what merge r makes, or a single byte.

    x never stands right behind p if some merge would have joined the two: it takes what p ends in at its time, and what
    x begins with. But the tokenizer first cuts the text into words, and joins nothing across a cut. Where the two
    characters at the border do not tell whether there is one, the mask stays 0:

        between two spaces      of several before a word, the last one belongs to the word
        other before letter     "'" and "s" belong together behind a word, and not behind another "'"
        inside a character      its class is not known
    """
    ranks = {text: rank for rank, text in enumerate(tokens)}
    built = [build_up(text, ranks) for text in tokens]
    begun_by = defaultdict(list)  # a piece: the tokens that begin with it, and up to which merge
    for x, (_, first, _) in enumerate(built):
        for piece, end in first:
            begun_by[piece].append((x, end))
    excluded = defaultdict(list)  # a left piece: its merges, and what begins with the right one
    for rank, (pair, _, _) in enumerate(built):
        if pair:
            x, end = np.array(begun_by[pair[1]], np.int32).T
            excluded[pair[0]].append((rank, x[rank < end]))
    starts = np.array([character_class(text, at_end=False) for text in tokens])
    joined = {end: (starts != "?") & (starts != dict(S="S", O="L").get(end)) for end in "SLNO?"}
    for text, (_, _, last) in zip(tokens, built, strict=True):
        row = np.zeros(vocab_size, bool)
        for piece, end in [] if text in CONTRACTIONS else last:
            for rank, x in excluded[piece]:
                if rank >= end:
                    break
                row[x] = True
        row[: len(tokens)] &= joined[character_class(text, at_end=True)]
        yield np.packbits(row, bitorder="little")
    for _ in range(len(tokens), vocab_size):
        yield np.zeros(vocab_size // 8, np.uint8)


def longest_prefixes(tokens: list[bytes]) -> np.ndarray:
    """Return for each token, and the end of text, the longest other token that it begins with; 65535: none."""
    places = {token: i for i, token in enumerate(tokens)}
    found = ([places[text[:n]] for n in range(1, len(text)) if text[:n] in places] for text in tokens)
    return np.array([*((shorter or [65535])[-1] for shorter in found), 65535], "<u2")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, usage=SUPPRESS)
    parser.parse_args(argv)
    encoding = shards.gpt2_encoding()
    tokens = [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)]
    mask = np.concatenate([*canonical_rows(tokens, VOCAB_SIZE)])
    for table, (name, sha256) in zip((mask, longest_prefixes(tokens)), SHA256.items(), strict=True):
        if hashlib.sha256(table).hexdigest() != sha256:
            raise shards.UserError(f"{name}: this vocabulary or Unicode is another: try another tiktoken or Python")
        shards.write_file(FOLDER / name, table)
        print(f"{FOLDER / name}: {table.nbytes:,} bytes")


if __name__ == "__main__":
    shards.run(main)
