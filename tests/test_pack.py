"""data/shards.py, data/pack_nano.py and data/pack_text.py."""

import glob
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import check
import pack_nano
import pack_text
import shards
import train_gpt
from test_train import wait_for

SCRIPT = Path(pack_text.__file__)
BYTES, GPT2 = pack_text.TOKENIZERS.values()


def packed(folder: Path, eot: int = 256) -> dict[str, list[bytes]]:
    """Read the text of each document, without the code under test."""
    documents = dict(train=[], val=[])
    for path in sorted(folder.glob("*.bin")):
        content, found = path.read_bytes(), documents[path.name.partition("_")[0]]
        tokens = np.frombuffer(content, dtype="<u2", offset=1024)
        assert content[:1024] == struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
        assert tokens[0] == eot
        found += [bytes(piece[1:].tolist()) for piece in np.split(tokens, np.flatnonzero(tokens == eot))[1:]]
    return documents


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def run(capsys, main, *arguments) -> str:
    main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == "", "the progress bar is for terminals"
    return out


def fails(capsys, main, *arguments) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    return err


def test_a_shard_is_written_whole_or_not_at_all_and_damage_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "new" / "shard.bin"
    shards.write_shard(path, np.array([0, 1, 50256, 65535], dtype=np.int64))
    sound = struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + struct.pack("<4H", 0, 1, 50256, 65535)
    assert (shards.shard_problem(path), path.stat().st_mode & 0o777) == (None, 0o644)
    for token in (-1, 65536):
        with pytest.raises(ValueError, match=r"shard\.bin: tokens must be in"):
            shards.write_shard(path, np.array([1, token]))
    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, lambda *args: sys.exit())
        with pytest.raises(SystemExit):
            shards.write_shard(path, np.arange(10))
    assert contents(path.parent) == {"shard.bin": sound}, "a write that fails changes nothing"
    headers = [b"\0" + sound[1:], sound[:4] + b"\2" + sound[5:], sound[:8] + b"\6" + sound[9:]]
    for content in [b"", sound[:1023], sound[:1024], sound[:-1], sound + b"\0", *headers, sound[:8] + b"\xff" * 1030]:
        path.write_bytes(content)
        assert shards.shard_problem(path), content
    assert shards.shard_problem(tmp_path) == "no such file"


PIECES = [b"\n", b"\n\n", b"\n\n\n", b" ", b"\r", b"\r\n", b"word", b"x" * 100, b"y" * 254, b"z" * 300]
texts = st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join)


@given(texts, st.sampled_from([2, 3, 7, 100, 255, 5000]), st.integers(256, 700), st.sampled_from([BYTES, GPT2]))
@example(b"x" * 300 + b" " * 9, 100, 300, BYTES)
@example(b"x" * 253 + b"\n\n\nword", 100, 300, BYTES)
@example(b"word\r\r\n", 100, 300, GPT2)
@example(b"x" * 299 + b"\r\n\r\n" + b"y" * 300, 300, 300, BYTES)
@settings(max_examples=150, deadline=None)
def test_streamed_documents_are_those_of_the_whole_file(text, line_bytes, longest, tokenizer):
    *pieces, last = text.replace(b"\r\n", b"\n").split(b"\n\n")
    expected, document = [], b""
    for piece in [*(piece + b"\n\n" for piece in pieces), last + tokenizer.file_end]:
        document += piece
        while len(document) > longest:
            expected, document = [*expected, document[:longest]], document[longest:]
        if len(document) >= 256:
            expected, document = [*expected, document], b""
    expected += [document] if document.strip() else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_text, "LINE_BYTES", line_bytes)
        limits = tokenizer._replace(min_bytes=256, max_bytes=longest)
        found = list(pack_text.stream_documents(io.BytesIO(text), limits))
    assert found == expected


def test_no_character_is_cut_in_two():
    """Of text in UTF-8; other bytes are cut all the same."""
    cut = lambda text: [*pack_text.stream_documents(io.BytesIO(text), BYTES._replace(max_bytes=301))]  # noqa: E731
    for character in "äx", "漢", "\U0001f600":
        documents = cut(character.encode() * 400)
        assert "".join(map(bytes.decode, documents)).rstrip("\n") == character * 400
        assert {len(document) for document in documents[:-1]} <= {298, 299, 300, 301}
    assert cut(b"\x80" * 1000) == [b"\x80" * 301] * 3 + [b"\x80" * 97 + b"\n\n"]


@pytest.mark.skipif(pack_nano.TRACK_TORCH not in importlib.metadata.version("torch"), reason="another torch's corpus")
def test_nano_is_the_corpus_of_the_track_and_packed_once(tmp_path, capsys):
    (tmp_path / "nano_val_000000.bin").write_bytes(b"damaged")
    run(capsys, pack_nano.main, "--out", tmp_path)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in contents(tmp_path).items()} == {
        "nano_train_000000.bin": "c468b0dbbe20b2eb747b07e8c3667cf914c15c64686145fc1bf28cc8d3614497",
        "nano_val_000000.bin": "1d93c563f7bdc2254d348b95a472178782ace4b2344bc11b31fc6ce035444802",
    }
    before = {path: path.stat() for path in tmp_path.iterdir()}
    assert "complete" in run(capsys, pack_nano.main, "--out", tmp_path)
    assert {path: path.stat() for path in tmp_path.iterdir()} == before


def test_another_or_a_changed_torch_is_noticed(tmp_path, monkeypatch, capsys):
    main, out = pack_nano.main, tmp_path / "out"
    for i in range(40):
        (tmp_path / f"{i}.py").write_bytes(b"value = %d\n" % i * 60)
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=Mock(origin=str(tmp_path / "__init__.py"))))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0+cpu")
    assert run(capsys, main, "--out", out).count("packed from torch 2.99.0; the nano track is torch 2.13.0") == 2
    before = contents(out)
    assert "File exists; fix that" in fails(capsys, main, "--out", tmp_path / "0.py")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert "pip install --force-reinstall --no-deps torch==2.13.0" in fails(capsys, main, "--out", out)
    assert contents(out) == before, "it replaces no shards, which may be sound"
    importlib.util.find_spec.return_value = None
    assert "torch is not installed" in fails(capsys, main, "--out", out)


def prose(seed: int, size: int) -> bytes:
    """Make about `size` bytes in paragraphs."""
    rng = np.random.default_rng(seed)
    return b"\n\n".join(rng.bytes(rng.integers(20, 201)).hex().encode() for _ in range(size // 222))


@pytest.fixture
def texts_folder(tmp_path):
    """Make 30 files with duplicates within files, between files and between splits."""
    folder, files = tmp_path / "texts", dict.fromkeys(("i.png", ".git/notes.txt", "more/.x.txt"), b"SECRET" * 999)
    for i in range(30):
        parts = prose(i % 7, 5000) + b"\r\n", prose(100 + i, 20_000), prose(i % 5, 5000)
        files[f"{'more/' * (i % 2)}{i}.txt"] = b"\r\n".join(parts)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to(folder)
    return folder


def test_a_folder_is_split_by_file_name_and_shuffled(texts_folder, tmp_path, capsys, monkeypatch):
    documents, fraction = {"train": [], "val": []}, 0.3
    for path in texts_folder.rglob("[0-9]*.txt"):
        digest = hashlib.sha1(path.relative_to(texts_folder).as_posix().encode()).hexdigest()
        is_val = int(digest[:8], 16) < fraction * 2**32
        documents["val" if is_val else "train"] += pack_nano.split_documents(path.read_bytes().replace(b"\r\n", b"\n"))
    assert set(documents["train"]) & set(documents["val"]), "choose other file names: no duplicate between splits"
    run(capsys, pack_text.main, texts_folder, "--val_fraction", fraction, "--out", tmp_path / "out")
    assert packed(tmp_path / "out") == pack_nano.shuffle_documents(**documents)
    monkeypatch.setattr(pack_text, "NUM_BUCKETS", 50)
    monkeypatch.setattr(pack_text, "BUFFER_BYTES", 1000)
    monkeypatch.setattr(train_gpt, "parse_args", lambda _: train_gpt.PRESETS["nano"])  # it reads its own source
    moved = texts_folder.rename(tmp_path / "moved")
    tracemalloc.start()
    run(capsys, pack_text.main, moved, moved / "0.txt", "--val_fraction", fraction, "--out", tmp_path / "again")
    assert tracemalloc.get_traced_memory()[1] < 400_000, "memory grows with the text, which is twice that"
    tracemalloc.stop()
    assert contents(tmp_path / "again") == contents(tmp_path / "out"), "place and buckets do not matter"


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_every_split_gets_a_file_or_document(fraction):
    low, high = b"\x33" * 20, b"\x99" * 20
    is_val = pack_text.choose_split(["a"], {0: (low, high)}, fraction)
    assert (is_val(low, 0), is_val(high, 0)) == (True, False)
    assert not pack_text.choose_split(["a"], {0: (low, low)}, fraction)(low, 0), "a single document is for training"
    few = {0: (low, high), 1: (b"\x22" * 20, low), 2: (high, b"\xaa" * 20)}
    is_val = pack_text.choose_split(["a"] * 3, few, fraction)
    assert (is_val(b"\x22" * 20, 1), is_val(b"\xaa" * 20, 2)) == (True, False), "of a few files, by document, too"
    many = pack_text.MANY_FILES
    names = ["empty", "not UTF-8 \udcff", *map(str, range(2, many + 1))]
    is_val = pack_text.choose_split(names, dict.fromkeys(range(1, many + 1), (low, high)), fraction)
    assert len({(is_val(low, i), is_val(high, i)) for i in range(1, many + 1)} & {(True, True), (False, False)}) == 2


def test_one_file_is_split_by_document_into_many_shards_and_trained_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "ROOT", tmp_path)
    monkeypatch.setattr(pack_text, "SHARD_TOKENS", 20_000)
    monkeypatch.setitem(pack_text.TOKENIZERS, "bytes", BYTES._replace(max_bytes=19_999))
    monkeypatch.setattr(os, "execv", Mock())
    text, long, folder = prose(0, 300_000), b"q" * 50_000, tmp_path / "[o]*ut $x'y"
    (tmp_path / "book").write_bytes(long + b"\n\n" + text)
    out = run(capsys, pack_text.main, tmp_path / "book", "--val_fraction", 0.2, "--out", folder, "--train")
    command = shlex.split(out.splitlines()[-1])[3:]
    os.execv.assert_called_once_with(tmp_path / "run.sh", command)
    assert command[:3] + command[7:9] == ["./run.sh", "--preset", "nano", "--target_loss", "0"]
    for split, pattern in (("train", command[4]), ("val", command[6])):
        sizes = {f"{folder.name}/{path.name}": path.stat().st_size for path in folder.glob(f"{split}_*.bin")}
        assert set(glob.glob(pattern, root_dir=tmp_path)) == sizes.keys()
        assert (len(sizes) > 2, max(sizes.values()) <= 1024 + 2 * 20_000) == (True, True)
    documents, whole = packed(folder), {*pack_nano.split_documents(text), long[:19_999], (long + b"\n\n")[39_998:]}
    assert sorted(documents["train"] + documents["val"]) == sorted(whole)
    assert 0.1 < sum(map(len, documents["val"])) / sum(map(len, whole)) < 0.3


def test_a_second_run_needs_force_and_leaves_no_old_shards(texts_folder, tmp_path, capsys):
    folder = tmp_path / "out"
    run(capsys, pack_text.main, texts_folder, "--out", folder)
    (folder / "train_000001.bin").write_bytes((folder / "train_000000.bin").read_bytes())
    before = contents(folder)
    message = f"{folder}/train_000000.bin is there already: --force replaces all 3 shards"
    assert message in fails(capsys, pack_text.main, texts_folder, "--out", folder)
    assert "absent: No such file" in fails(capsys, pack_text.main, tmp_path / "absent", "--out", folder)
    (tmp_path / "page").write_bytes(prose(1, 600))
    assert "too little text" in fails(capsys, pack_text.main, tmp_path / "page", "--out", folder, "--force")
    assert contents(folder) == before
    (folder / ".packing-killed").mkdir()
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(texts_folder / "0.txt")  # which locking does not empty
    with shards.lock_folder(folder):
        assert "packing there: wait" in fails(capsys, pack_text.main, texts_folder, "--out", folder, "--force")
        assert (folder / ".packing-killed").exists(), "it may be the other packer's"
    assert (texts_folder / "0.txt").stat().st_size > 0
    run(capsys, pack_text.main, texts_folder, "--out", folder, "--force")
    assert sorted(contents(folder)) == ["train_000000.bin", "val_000000.bin"]


ENDS = {"SIGINT": (130, "pack_text.py: interrupted\n"), "SIGTERM": (143, ""), "SIGKILL": (-9, "")}


@pytest.mark.slow
@pytest.mark.parametrize(("end", "stage"), [*zip(ENDS, ["bucket-*", "train_*.bin", "train_*.bin"], strict=True)])
def test_interrupted_packing_leaves_nothing(texts_folder, tmp_path, capsys, end, stage):
    folder, book = tmp_path / "out", tmp_path / "book.txt"
    run(capsys, pack_text.main, texts_folder, "--out", folder)
    before = contents(folder)
    book.write_bytes(b"".join(b"%d" % i * 50 + b"\n\n" for i in range(200_000)))
    command = [sys.executable, SCRIPT, book, "--out", folder, "--force"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: [*folder.glob(f".packing-*/{stage}")])
    process.send_signal(getattr(signal, end))
    error = process.communicate(timeout=20)[1]
    assert (process.returncode, error) == ENDS[end]
    assert len(list(folder.glob(".packing-*"))) == (end == "SIGKILL")
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    run(capsys, pack_text.main, texts_folder, "--out", folder, "--force")
    assert contents(folder) == before, "the next run removes what a killed one left"


ERRORS = {
    "texts absent.txt": "absent.txt: No such file or directory; fix that",
    "blank.txt": "no text in 1 files",
    "page.txt": "text: 0 tokens for val, 65 needed (equal documents count once): add text of some 1,300 tokens\n",
    "note.txt": "text: 703 tokens for train, 1,025 needed (equal documents count once): add text of some 339 tokens\n",
    "''": "argument FILE_OR_FOLDER: '': expected a path",
    "texts -- --num_iteration 3": "--num_iteration: no such flag",
    "pipe": "pipe: not a regular file",
    "outer": "outer/shut: Permission denied; fix that",
    "bare --ext ,TXT": "bare/pipe: not a regular file",
    "texts --tokenizer gpt2": "--tokenizer gpt2 needs the package tiktoken: ",
    "texts --val_fraction nan": "expected more than 0 and less than 1",
    "texts --out blank.txt": "blank.txt: File exists; fix that",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_errors_are_one_line_and_nothing_is_written(texts_folder, tmp_path, capsys, monkeypatch, arguments):
    def iterdir(folder, real=Path.iterdir):
        if folder.name == "shut":  # root, who may run the tests, could read it
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.chdir(tmp_path)
    for name in ("bare", "outer/shut"):
        Path(name).mkdir(parents=True)
    Path("blank.txt").write_bytes(b"\n" * 100)
    for name, lines in dict(page=100, note=50).items():
        Path(f"{name}.txt").write_bytes(b"one long line " * lines)  # which is one document
    os.mkfifo("pipe")
    os.mkfifo("bare/pipe")
    assert ERRORS[arguments] in fails(capsys, pack_text.main, "--out", "out", *shlex.split(arguments))
    assert not Path("out").exists() or contents(Path("out")) == {}


class FourCharacters:
    """A stand-in for GPT-2's encoding: quick, and about as many tokens."""

    eot_token = 50256

    def encode_to_numpy(self, text: str, **_) -> np.ndarray:
        return np.resize(np.frombuffer(text.encode(), np.uint8), -(-len(text) // 4)).astype(np.uint16)


@pytest.mark.parametrize("form", ["a file", "a thousand files", "a line"])
@pytest.mark.parametrize("megabytes", [0.3, 1, 3, 10, pytest.param(40, marks=pytest.mark.slow)])
def test_a_command_for_gpt2_suits_text_of_any_size_and_form(tmp_path, capsys, monkeypatch, megabytes, form):
    monkeypatch.setitem(sys.modules, "tiktoken", Mock(get_encoding=Mock(return_value=FourCharacters())))
    monkeypatch.setattr(check, "check_memory_and_time", Mock())
    text, parts = prose(0, round(megabytes * 1e6)), 1000 if form == "a thousand files" else 1
    text = text.replace(b"\n", b" ") if form == "a line" else text
    for i in range(parts):
        (tmp_path / f"{i}.txt").write_bytes(text[len(text) * i // parts : len(text) * (i + 1) // parts])
    out = run(capsys, pack_text.main, tmp_path, "--tokenizer=gpt2", "--out", tmp_path / "out", "--", "--device=cpu")
    used, command = re.search(r"uses ([\d.]+)% of the train", out), shlex.split(out.splitlines()[-1])[4:]
    assert check.main(command) == 0
    assert (float(used[1]) > 60, train_gpt.parse_args(command).num_iterations >= 40) == (True, megabytes > 3)


def test_gpt2_tokens_give_the_text_back(tmp_path, capsys, monkeypatch):
    """Use an encoding of single bytes, so that the test needs no vocabulary from the network."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks, end = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("x", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end)
    texts = [f"a<|endoftext|>b äöü 漢 \U0001f600  [{i}]\n\n\tend ".encode() + prose(i, 1500) for i in range(60)]
    for i, text in enumerate([*texts, b"before \xff\xfe\r\nafter", b"word " * 900]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    arguments = (tmp_path, "--tokenizer", "gpt2", "--out", tmp_path / "out")
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    assert "could not be downloaded (OSError): set TIKTOKEN_CACHE_DIR" in fails(capsys, pack_text.main, *arguments)
    assert not (tmp_path / "out").exists(), "it fails before the work"
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    assert "--preset gpt2" in run(capsys, pack_text.main, *arguments)
    found = packed(tmp_path / "out", eot=50256)
    texts += ["before \ufffd\ufffd\nafter".encode(), *((b"word " * 900)[i : i + 2047] for i in (0, 2047, 4094))]
    assert sorted(found["train"] + found["val"]) == sorted(texts)
