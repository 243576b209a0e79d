"""data/gpt2_canonical.py, with a made-up vocabulary."""

import hashlib
import re
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from data import gpt2_canonical as canonical
from speedrun import ROOT

# Contractions and a letter behind them, equal letters, joins that compete, spaces in a row, parts of a character
TOKENS = b"a|s|t|'| |\n|\xc3|\xa9|aa|sa|st|'s| a|'t|aaaa|a\xc3|\xc3\xa9|as|ast|  |''|\xc3\xa9s|\n\n".split(b"|")
TOKENS += b"ta| '|sta| aa|\xa9t|ss".split(b"|")
# Of its mask, which was compared with tiktoken's tokens of all texts of up to 6 of the characters
SHA256 = "9ff293654edd1ad639ff8bfd64548808c471707808cb7f2b2c88b890144ac985"


# The longest token that each begins with: of those of one byte and of the end of text none
PREFIXES = {8: 0, 9: 1, 10: 1, 11: 3, 12: 4, 13: 3, 14: 8, 15: 0, 16: 6, 17: 0, 18: 17, 19: 4, 20: 3, 21: 16, 22: 5}
PREFIXES |= {23: 2, 24: 4, 25: 10, 26: 12, 27: 7, 28: 1}


def test_the_prefixes_of_the_repository_are_the_known_ones():
    committed = (canonical.FOLDER / "gpt2_prefixes.bin").read_bytes()
    assert hashlib.sha256(committed).hexdigest() == canonical.SHA256["gpt2_prefixes.bin"]


def test_only_known_tables_are_kept_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "FOLDER", tmp_path)
    monkeypatch.setattr(canonical, "VOCAB_SIZE", 32)
    encoding = Mock(eot_token=len(TOKENS), decode_single_token_bytes=TOKENS.__getitem__)
    offline, other = Mock(get_encoding=Mock(side_effect=ConnectionError)), Mock(get_encoding={"gpt2": encoding}.get)
    for stand_in, line in {
        None: f'this needs the package tiktoken: {sys.executable} -m pip install -e "{ROOT}[tools]"',
        offline: "could not be downloaded (ConnectionError): set TIKTOKEN",
        other: "gpt2_canonical.bin: this vocabulary or Unicode is another: try another tiktoken or Python",
    }.items():
        monkeypatch.setitem(sys.modules, "tiktoken", stand_in)
        with pytest.raises(canonical.shards.UserError, match=re.escape(line)):
            canonical.main([])
        assert [*tmp_path.iterdir()] == []
    prefixes = np.array([PREFIXES.get(token, 65535) for token in range(len(TOKENS) + 1)], "<u2")
    known = {"gpt2_canonical.bin": SHA256, "gpt2_prefixes.bin": hashlib.sha256(prefixes).hexdigest()}
    monkeypatch.setattr(canonical, "SHA256", known)
    canonical.main([])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"gpt2_canonical.bin": 32 * 32 // 8, "gpt2_prefixes.bin": 2 * 30}
