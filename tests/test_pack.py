"""data/: shards, the readers of text, the packers, and the commands that they print."""

import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import train_gpt
from data import cached_fineweb10B, pack_nano, pack_text, shards
from speedrun import ROOT


def packed(folder: Path, eot: int = 256) -> list[list[bytes]]:
    """Read the text of each document to train on, and to validate on, without the code under test."""
    tokens = [np.fromfile(folder / f"{split}_000000.bin", "<u2", offset=1024) for split in ("train", "val")]
    pieces = [np.split(some, np.flatnonzero(some == eot))[1:] for some in tokens]
    return [[bytes(piece[1:].tolist()) for piece in some] for some in pieces]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}


def fails(capsys, monkeypatch, *arguments, code: int = 2) -> str:
    monkeypatch.setattr(shards, "PROGRAM", "pack_text.py")
    with pytest.raises(SystemExit, match=str(code)):
        shards.run(lambda: pack_text.main([*map(str, arguments)]))
    (line,) = capsys.readouterr().err.splitlines()
    return line


def prose(seed: int, size: int) -> bytes:
    rng = np.random.default_rng(seed)
    return b"\n\n".join(rng.bytes(rng.integers(20, 201)).hex().encode() for _ in range(size // 222))


def test_a_shard_is_written_whole_or_not_at_all_and_damage_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "new" / "shard.bin"
    shards.write_shard(path, np.array([0, 1, 50256, 65535], dtype=np.int64))
    sound = struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + struct.pack("<4H", 0, 1, 50256, 65535)
    assert (cached_fineweb10B.is_shard(path), path.stat().st_mode & 0o777) == (True, 0o644)
    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, lambda *args: sys.exit())
        with pytest.raises(SystemExit):
            shards.write_shard(path, np.arange(10))
    assert contents(path.parent) == {"shard.bin": sound}, "a write that fails changes nothing"
    for content in b"", sound[:1024], sound + b"\0", b"\0" + sound[1:], sound[:8] + b"\6" + sound[9:]:
        path.write_bytes(content)
        assert not cached_fineweb10B.is_shard(path), content


@pytest.mark.slow
def test_nano_is_the_corpus_of_the_track(tmp_path):
    pack_nano.main(["--out", str(tmp_path)])
    digests = {hashlib.sha256(content).hexdigest()[:8] for content in contents(tmp_path).values()}
    assert digests == {"c468b0db", "1d93c563"}


def test_files_of_all_kinds_are_packed_and_what_is_none_is_told(tmp_path):
    """As a file that is started elsewhere: pytest's path would hide an import that does not work."""
    files = {f"{'more/' * (i % 2)}{i}.txt": prose(i, 20_000).replace(b"\n", b"\r\n") for i in range(30)}
    files |= {"copy.TXT": files["0.txt"], "latin.md": b"caf\xe9", "sixteen.txt": "sixteen".encode("utf-16")}
    others = "i.png", "j.PNG", "more/README", ".git/notes.txt", "more/.x.txt", "zero.txt"
    files |= dict.fromkeys(others, b"SECRET\0" * 999)
    files["named.html"] = b"<p>"
    for name, content in files.items():
        (path := tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    command = [sys.executable, pack_text.__file__, "texts", "texts/named.html", "--out=out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = ["texts/zero.txt: binary or unmarked UTF-16, left out"]
    told += ["left out of folders: 2 .png, 1 without ending; files that you name are taken"]
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, told[::-1])
    train, val = packed(tmp_path / "out")
    wanted = [content.replace(b"\r", b"") for name, content in files.items() if name[-5].isdigit()]
    wanted += [b"caf\xe9", b"sixteen", b"<p>"]
    assert {*train, *val} == {*chain(*map(pack_nano.split_documents, wanted))}
    assert len(val) / len(train + val) == pytest.approx(0.1, abs=0.01)


def test_validation_is_the_end_of_each_text_and_of_small_texts_every_tenth():
    large, small = [[b"%d %02d" % (i, j) for j in range(80)] for i in range(3)], [[b"%02d" % i] for i in range(80)]
    assert pack_text.split_texts(large)[1] == [*chain(*(text[-8:] for text in large))]
    assert pack_text.split_texts(small)[1] == [*chain(*small[9::10])]


def test_what_fails_leaves_older_shards_and_says_why(tmp_path, capsys, monkeypatch):
    for name, size in dict(page=300, book=100_000).items():
        (tmp_path / name).write_bytes(prose(1, size))
    book = f"{tmp_path}/book", f"--out={tmp_path}/out"
    pack_text.main([*book])
    before = contents(tmp_path / "out")
    (folder := tmp_path / "folder").mkdir()
    for i in range(20):
        (folder / f"{i}.{min(i, 9)}").touch()
    assert fails(capsys, monkeypatch, folder, book[1]) == (
        "pack_text.py: error: too little text: 0 and 0 tokens, nano needs 40,961 and 8,193; left out of folders: "
        "11 .9, 1 .0, 1 .1, 1 .2, 1 .3, 1 .4, 1 .5, 1 .6 and others; files that you name are taken"
    )
    assert fails(capsys, monkeypatch, tmp_path / "page", book[1]).endswith("nano needs 40,961 and 8,193")
    assert "no regular file" in fails(capsys, monkeypatch, tmp_path / "none", book[1])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    assert fails(capsys, monkeypatch, *book, code=130) == "pack_text.py: interrupted"
    assert contents(tmp_path / "out") == before


def test_val_txt_is_what_a_run_is_validated_on_in_the_order_of_the_text(tmp_path, capsys):
    """Of a large text it is not all that is held back."""
    for size in 100_000, 1_200_000:
        text = prose(0, size)
        (tmp_path / "book.txt").write_bytes(text)
        pack_text.main([f"{tmp_path}/book.txt", f"--out={tmp_path}/out"])
        train_on, _ = map(shlex.split, re.findall("^[a-z].*?: (/.*)", capsys.readouterr().out, re.MULTILINE))
        most = train_gpt.parse_args(train_on[1:]).val_tokens if size > 10**6 else size
        _, val = packed(tmp_path / "out")
        starts = np.cumsum([0, *(1 + len(document) for document in val)])
        read = sorted(
            (document for document, start in zip(val, starts[:-1], strict=True) if start < most),
            key=(text + b"\n\n").find,
        )
        assert (tmp_path / "out" / "val.txt").read_bytes() == b"".join(read)


@pytest.mark.slow
def test_the_printed_commands_train_and_score_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    (folder := tmp_path / "a folder").mkdir()
    (folder / "it's.txt").write_bytes(prose(0, 100_000))
    command = [sys.executable, pack_text.__file__, f"{folder}/it's.txt", f"--out={folder}"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    train_on, score = re.findall("^[a-z].*?: (/.*)", packed, re.MULTILINE)
    try:
        subprocess.run(train_on, shell=True, cwd=tmp_path, check=True)  # noqa: S602
        told = subprocess.run(score, shell=True, cwd=tmp_path, check=True, stdout=subprocess.PIPE).stdout  # noqa: S602
    finally:
        for path in ROOT.glob(f"logs/{train_on.split()[-1]}.*"):
            path.unlink()
    found = json.loads(told)
    assert (found["bytes"], 3 < found["bits_per_byte"] < 6) == ((folder / "val.txt").stat().st_size, True)


def test_gpt2_tokens_give_the_text_back(monkeypatch):
    """Use an encoding of single bytes, so that the test needs no vocabulary from the network."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks, end = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("x", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    documents = [f"a<|endoftext|>b äöü 漢 \U0001f600  [{i}]\n\n\tend ".encode() for i in range(600)]
    tokens = pack_text.encode_gpt2(documents)
    pieces = np.split(tokens, np.flatnonzero(tokens == 50256))[1:]
    assert [bytes(piece[1:].tolist()) for piece in pieces] == documents
