"""data/gpt2_canonical.py against tiktoken with a made-up vocabulary, in all short texts."""

import hashlib
import sys
from itertools import pairwise, product
from unittest.mock import Mock

import numpy as np
import pytest

from data import gpt2_canonical as canonical
from data import texts

tiktoken = pytest.importorskip("tiktoken")
# Contractions and a letter behind them, equal letters, joins that compete, spaces in a row, parts of a character
TOKENS = b"a|s|t|'| |\n|\xc3|\xa9|aa|sa|st|'s| a|'t|aaaa|a\xc3|\xc3\xa9|as|ast|  |''|\xc3\xa9s|\n\n".split(b"|")
TOKENS += b"ta| '|sta| aa|\xa9t|ss".split(b"|")
RANKS = {token: i for i, token in enumerate(TOKENS)}
PATTERN = pytest.importorskip("tiktoken_ext.openai_public").r50k_pat_str
TOY = tiktoken.Encoding("toy", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": len(TOKENS)})
ROWS = np.stack([*canonical.canonical_rows(TOKENS, 32)])


def test_the_mask_has_no_pair_of_a_short_text_and_all_that_letters_never_make():
    mask, seen = np.unpackbits(ROWS, axis=1, bitorder="little").astype(bool), np.zeros((32, 32), bool)
    for n in range(1, 7):
        for characters in product("ast' \né", repeat=n):
            for p, x in pairwise(TOY.encode_ordinary("".join(characters))):
                seen[p, x] = True
    assert not (seen & mask).any(), [(TOKENS[p], TOKENS[x]) for p, x in np.argwhere(seen & mask)]
    # Letters join as they do alone, whatever stands around them
    letters = [i for i, token in enumerate(TOKENS) if token.decode(errors="replace").isalpha()]
    alone = [[TOY.encode_ordinary((TOKENS[p] + TOKENS[x]).decode()) == [p, x] for x in letters] for p in letters]
    np.testing.assert_array_equal(mask[np.ix_(letters, letters)], ~np.array(alone))
    assert all(mask[RANKS[p], RANKS[x]] for p, x in [(b" ", b"a"), (b"'", b"'")])


def test_only_the_known_mask_is_kept_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    monkeypatch.setattr(canonical, "VOCAB_SIZE", 32)
    offline, other = Mock(get_encoding=Mock(side_effect=ConnectionError)), Mock(get_encoding={"gpt2": TOY}.get)
    for stand_in, line in {
        None: f'this needs the package tiktoken: {texts.PIP} -e "{texts.ROOT}[tools]"',
        offline: "could not be downloaded (ConnectionError): set TIKTOKEN",
        other: "another vocabulary or Unicode gave another mask: try another tiktoken or Python",
    }.items():
        monkeypatch.setitem(sys.modules, "tiktoken", stand_in)
        with pytest.raises(SystemExit, match="2"):
            canonical.main([])
        error = capsys.readouterr().err
        assert (line in error, error.count("\n"), [*tmp_path.iterdir()]) == (True, 1, [])
    monkeypatch.setattr(canonical, "SHA256", hashlib.sha256(ROWS).hexdigest())
    canonical.main([])
    assert (tmp_path / "mask.bin").read_bytes() == ROWS.tobytes()
