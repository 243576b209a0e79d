"""data/gpt2_canonical.py against tiktoken: a made-up tokenizer in all short texts, and GPT-2's by public numbers."""

import hashlib
import os
import sys
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import gpt2_canonical as canonical

tiktoken = pytest.importorskip("tiktoken")
# GPT-2's pattern, as tiktoken had it first
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Contractions and a letter behind them, equal letters in a row, joins that compete, runs of spaces, and a character of
# two bytes, which merges find in parts
BYTES = [b"a", b"s", b"t", b"'", b" ", b"\n", b"\xc3", b"\xa9"]
MERGES = [b"aa", b"sa", b"st", b"'s", b" a", b"'t", b"aaaa", b"a\xc3", b"\xc3\xa9", b"as", b"ast", b"  ", b"''"]
MERGES += [b"\xc3\xa9s", b"\n\n", b"ta", b" '", b"sta", b" aa", b"\xa9t", b"ss"]
TOKENS = [*BYTES, *MERGES]
RANKS = {token: i for i, token in enumerate(TOKENS)}
TOY = tiktoken.Encoding("toy", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": len(TOKENS)})
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


@pytest.fixture(scope="module")
def toy_mask():
    rows = np.stack([*canonical.canonical_rows(TOKENS, 32)])
    return np.unpackbits(rows, axis=1, bitorder="little").astype(bool)


def test_no_short_text_has_a_pair_of_the_mask(toy_mask):
    seen = np.zeros((32, 32), bool)
    for n in range(1, 7):
        for characters in product("ast' \né", repeat=n):
            for p, x in pairwise(TOY.encode_ordinary("".join(characters))):
                seen[p, x] = True
    assert not (seen & toy_mask).any(), [(TOKENS[p], TOKENS[x]) for p, x in np.argwhere(seen & toy_mask)]
    # Where the rule looks, it misses nothing: letters join as they do alone, whatever stands around them
    letters = [i for i, token in enumerate(TOKENS) if token.decode(errors="replace").isalpha()]
    here = np.ix_(letters, letters)
    alone = [[TOY.encode_ordinary((TOKENS[p] + TOKENS[x]).decode()) == [p, x] for x in letters] for p in letters]
    np.testing.assert_array_equal(toy_mask[here], ~np.array(alone))


def test_where_a_cut_is_possible_the_mask_is_empty(toy_mask):
    pairs = {(b" ", b"a"): True, (b"'", b"'"): True, (b"\xc3", b"\xa9"): False}
    pairs |= {(b" ", b" "): False, (b"'", b"s"): False, (b"'s", b"t"): False}  # "  a", "''s", "'st"
    assert {pair: toy_mask[tuple(map(TOKENS.index, pair))] for pair in pairs} == pairs
    assert not toy_mask[len(TOKENS) :].any()
    assert not toy_mask[:, len(TOKENS) :].any()


NO_PACKAGE = 'this needs the package tiktoken: pip install -e ".[text]"'
OFFLINE, OTHER = (
    Mock(get_encoding=Mock(side_effect=ConnectionError)),
    Mock(get_encoding={"gpt2": TOY}.get, __version__=9),
)


@pytest.mark.parametrize(
    ("stand_in", "line"),
    [
        (None, NO_PACKAGE),
        (OFFLINE, "could not be downloaded (ConnectionError): set TIKTOKEN"),
        (OTHER, "another mask came out: tiktoken 9 or Python 3."),
    ],
)
def test_only_the_known_mask_is_kept_and_errors_are_one_line(stand_in, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    monkeypatch.setattr(canonical, "VOCAB_SIZE", 32)
    monkeypatch.setitem(sys.modules, "tiktoken", stand_in)
    with pytest.raises(SystemExit, match="2"):
        canonical.main([])
    error = capsys.readouterr().err
    assert (line in error, error.count("\n"), [*tmp_path.iterdir()]) == (True, 1, [])
    rows = b"".join(row.tobytes() for row in canonical.canonical_rows(TOKENS, 32))
    monkeypatch.setattr(canonical, "SHA256", hashlib.sha256(rows).hexdigest())
    assert canonical.write_mask(TOKENS)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("mask.bin", rows)]


@pytest.fixture(scope="module")
def gpt2():
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "none")
    files = [hashlib.sha1(f"{GPT2_FILES}{name}".encode()).hexdigest() for name in ("vocab.bpe", "encoder.json")]
    if not all((cache / name).exists() for name in files):
        pytest.skip("TIKTOKEN_CACHE_DIR names no folder with the GPT-2 vocabulary")
    return tiktoken.get_encoding("gpt2")


@pytest.mark.slow
def test_first_thousand_tokens_of_gpt2(gpt2):
    """Compare with what the public record's code makes of the vocabulary's first 1,000 tokens."""
    rows = np.stack([*canonical.canonical_rows([gpt2.decode_single_token_bytes(i) for i in range(1000)], 1000)])
    assert int(np.bitwise_count(rows).sum()) == 18889
    assert hashlib.sha256(rows).hexdigest() == "ebbfcb6192643da12bd8b6de2d2458cd0dc87dba32b6b5d808fb5552fa235919"


@pytest.mark.slow
def test_mask_of_gpt2(gpt2, tmp_path, monkeypatch):
    """Compare with public numbers; pairs of the mask are joined by tiktoken."""
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    canonical.main([])  # compares the hash of all
    table = np.memmap(tmp_path / "mask.bin", np.uint8, "r", shape=(50304, 6288))
    counts = np.array([int(np.bitwise_count(row).sum()) for row in table])
    assert (counts.sum(), (counts > 0).sum()) == (70_889_701, 47_432)

    def is_set(p, x):
        return table[p, x // 8] >> (x % 8) & 1

    pairs = [(13250, 23108), (33777, 276), (1981, 29730), (3969, 40716), (9293, 14640), (37783, 660), (10325, 42034)]
    assert all(is_set(p, x) for p, x in [*pairs, (31536, 9869)])
    pairs = [(36638, 33327), (4758, 10991), (16753, 5337), (5962, 26536), (9421, 7641), (26876, 11273), (11256, 28786)]
    assert not any(is_set(p, x) for p, x in [*pairs, (45760, 40770)])

    random = np.random.default_rng(92)
    for p in random.choice(np.flatnonzero(counts), 2000):
        x = random.choice(np.flatnonzero(np.unpackbits(table[p], bitorder="little")))
        text = gpt2.decode_bytes([p, x])
        assert gpt2.encode_ordinary(text.decode(errors="ignore")) != [p, x], text
