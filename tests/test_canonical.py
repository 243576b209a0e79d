"""data/gpt2_canonical.py against tiktoken: a made-up tokenizer in all short texts, and GPT-2's by public numbers."""

import hashlib
import os
import sys
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data import gpt2_canonical as canonical

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


def test_only_the_known_mask_is_kept_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    monkeypatch.setattr(canonical, "VOCAB_SIZE", 32)
    offline, other = Mock(get_encoding=Mock(side_effect=ConnectionError)), Mock(get_encoding={"gpt2": TOY}.get)
    for stand_in, line in {
        None: 'this needs the package tiktoken: pip install -e ".[text]"',
        offline: "could not be downloaded (ConnectionError): set TIKTOKEN",
        other: "another vocabulary or Unicode gave another mask: try another tiktoken or Python",
    }.items():
        monkeypatch.setitem(sys.modules, "tiktoken", stand_in)
        with pytest.raises(SystemExit, match="2"):
            canonical.main([])
        error = capsys.readouterr().err
        assert (line in error, error.count("\n"), [*tmp_path.iterdir()]) == (True, 1, [])
    rows = b"".join(row.tobytes() for row in canonical.canonical_rows(TOKENS, 32))
    monkeypatch.setattr(canonical, "SHA256", hashlib.sha256(rows).hexdigest())
    canonical.main([])
    assert (tmp_path / "mask.bin").read_bytes() == rows


@pytest.mark.slow
def test_mask_of_gpt2(tmp_path, monkeypatch):
    """The numbers are the public record's."""
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "none")
    files = [hashlib.sha1(f"{GPT2_FILES}{name}".encode()).hexdigest() for name in ("vocab.bpe", "encoder.json")]
    if not all((cache / name).exists() for name in files):
        pytest.skip("TIKTOKEN_CACHE_DIR names no folder with the GPT-2 vocabulary")
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    canonical.main([])  # compares the hash of all
    table = np.memmap(tmp_path / "mask.bin", np.uint8, "r", shape=(50304, 6288))
    counts = np.array([int(np.bitwise_count(row).sum()) for row in table])
    assert (counts.sum(), (counts > 0).sum()) == (70_889_701, 47_432)
