"""data/gpt2_canonical.py, with a made-up vocabulary."""

import sys
from unittest.mock import Mock

import pytest

from data import gpt2_canonical as canonical
from speedrun import ROOT

# Contractions and a letter behind them, equal letters, joins that compete, spaces in a row, parts of a character
TOKENS = b"a|s|t|'| |\n|\xc3|\xa9|aa|sa|st|'s| a|'t|aaaa|a\xc3|\xc3\xa9|as|ast|  |''|\xc3\xa9s|\n\n".split(b"|")
TOKENS += b"ta| '|sta| aa|\xa9t|ss".split(b"|")
# Of its mask, which was compared with tiktoken's tokens of all texts of up to 6 of the characters
SHA256 = "9ff293654edd1ad639ff8bfd64548808c471707808cb7f2b2c88b890144ac985"


def test_only_the_known_mask_is_kept_and_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(canonical, "PATH", tmp_path / "mask.bin")
    monkeypatch.setattr(canonical, "VOCAB_SIZE", 32)
    encoding = Mock(eot_token=len(TOKENS), decode_single_token_bytes=TOKENS.__getitem__)
    offline, other = Mock(get_encoding=Mock(side_effect=ConnectionError)), Mock(get_encoding={"gpt2": encoding}.get)
    for stand_in, line in {
        None: f'this needs the package tiktoken: {sys.executable} -m pip install -e "{ROOT}[tools]"',
        offline: "could not be downloaded (ConnectionError): set TIKTOKEN",
        other: "another vocabulary or Unicode gave another mask: try another tiktoken or Python",
    }.items():
        monkeypatch.setitem(sys.modules, "tiktoken", stand_in)
        with pytest.raises(SystemExit, match="2"):
            canonical.main([])
        error = capsys.readouterr().err
        assert (line in error, error.count("\n"), [*tmp_path.iterdir()]) == (True, 1, [])
    monkeypatch.setattr(canonical, "SHA256", SHA256)
    canonical.main([])
    assert (tmp_path / "mask.bin").stat().st_size == 32 * 32 // 8
