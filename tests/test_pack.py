"""data/shards.py, data/pack_nano.py and data/pack_text.py."""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import random
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pack_nano
import pack_text
import shards
import train_gpt

ROOT = Path(__file__).parent.parent
SHORT = settings(max_examples=200, deadline=None)
BYTES, GPT2 = pack_text.TOKENIZERS["bytes"], pack_text.TOKENIZERS["gpt2"]


def read_shard(path: Path) -> np.ndarray:
    """The tokens, read without the code under test."""
    content = path.read_bytes()
    magic, version, num_tokens = struct.unpack_from("<3i", content)
    assert (magic, version, content[12:1024]) == (20240520, 1, bytes(1012))
    assert len(content) == 1024 + 2 * num_tokens
    return np.frombuffer(content, dtype="<u2", offset=1024)


def read_documents(*paths: Path) -> list[bytes]:
    documents = []
    for path in paths:
        tokens = read_shard(path)
        assert tokens[0] == 256
        documents += [
            piece[1:].astype(np.uint8).tobytes() for piece in np.split(tokens, np.flatnonzero(tokens == 256))[1:]
        ]
    return documents


def sha1(document: bytes) -> bytes:
    return hashlib.sha1(document).digest()


# ----------------------------------------------------------------------------------------------------------------------
# Shards


def test_write_shard(tmp_path):
    tokens = np.array([0, 1, 50256, 65535], dtype=np.int64)
    path = tmp_path / "new" / "shard.bin"
    digest = shards.write_shard(path, tokens)
    assert path.read_bytes() == struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + struct.pack("<4H", *tokens)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert shards.shard_problem(path) is None
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [False, True])
def test_a_write_that_fails_leaves_no_trace(tmp_path, monkeypatch, call, error, there):
    path = tmp_path / "shard.bin"
    if there:
        path.write_bytes(b"before")

    def fail(*args):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        shards.write_shard(path, np.arange(10))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"shard.bin": b"before"} if there else {})


@pytest.mark.parametrize("token", [-1, 65536])
def test_tokens_beyond_16_bits_are_refused(tmp_path, token):
    with pytest.raises(ValueError, match=r"shard\.bin: tokens must be in 0 \.\.\. 65535"):
        shards.write_shard(tmp_path / "shard.bin", np.array([1, token]))
    assert not list(tmp_path.iterdir())


SOUND = shards.shard_header(7) + bytes(range(14))
damaged = st.one_of(
    st.binary(max_size=1100),
    st.integers(0, len(SOUND)).map(lambda n: SOUND[:n]),
    st.binary(min_size=1, max_size=9).map(lambda more: SOUND + more),
    st.tuples(st.integers(0, 12), st.integers(0, 255)).map(
        lambda change: SOUND[: change[0]] + bytes([change[1]]) + SOUND[change[0] + 1 :]
    ),
    st.tuples(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), st.binary(max_size=30)).map(
        lambda parts: struct.pack("<256i", *parts[0], *[0] * 253) + parts[1]
    ),
)


@given(damaged)
@SHORT
def test_shard_problem_names_every_damage_to_header_and_size(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    path.write_bytes(content)
    problem = shards.shard_problem(path)
    sound = len(content) >= 1024 and content[:8] == SOUND[:8]
    sound = sound and len(content) == 1024 + 2 * struct.unpack_from("<i", content, 8)[0]
    assert (problem is None) == sound
    if problem is not None:
        assert "\n" not in problem
        with pytest.raises(train_gpt.UserError):
            train_gpt.find_shards(str(path), "")


@given(st.lists(st.lists(st.integers(1, 12), max_size=8), max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_shard_writer_fills_shards_with_whole_documents(tmp_path_factory, writes):
    folder = tmp_path_factory.mktemp("shards")
    writer, expected, room, value = shards.ShardWriter(folder, "own", eot=7, max_tokens=10), [], 0, 100
    for lengths in writes:
        documents = []
        for length in lengths:
            documents.append([7, *range(value, value + length - 1)])
            value += length
            if length > room:
                expected.append([])
                room = 10
            expected[-1] += documents[-1]
            room -= length
        writer.write(np.array([token for document in documents for token in document], dtype=np.uint16))
    if expected:
        open_shard = folder / f"own_{len(expected) - 1:06d}.bin"
        assert shards.shard_problem(open_shard), "nobody takes it for complete"
    writer.close()
    assert [path for path, _, _ in writer.shards] == sorted(folder.iterdir())
    found = [read_shard(path).tolist() for path in sorted(folder.iterdir())]
    assert found == expected
    assert [(shard.count(7), len(shard)) for shard in found] == [shard[1:] for shard in writer.shards]


# ----------------------------------------------------------------------------------------------------------------------
# Documents

texts = st.lists(
    st.sampled_from([b"\n", b"\n\n", b"\n\n\n", b" ", b"\r\n", b"word", b"x" * 100, b"y" * 254, b"z" * 300]),
    max_size=40,
).map(b"".join)


@given(st.one_of(texts, st.binary(max_size=600)))
@SHORT
def test_split_documents(text):
    documents = pack_nano.split_documents(text)
    whole = text + b"\n\n"
    joined = b"".join(documents)
    assert whole.startswith(joined)
    rest = whole[len(joined) :]
    assert not rest.strip(), "only white space is dropped"
    assert len(rest) < 256, "and only where it is no document of 256 bytes"
    assert all(len(document) >= 256 for document in documents[:-1])
    assert all(len(document) >= 256 or document.strip() for document in documents)
    for document in documents:
        assert document.endswith(b"\n\n")
        *earlier, _ = document.removesuffix(b"\n\n").split(b"\n\n")
        assert sum(len(piece) + 2 for piece in earlier) < 256, "a document ends as soon as it has 256 bytes"


def in_chunks(text: bytes, size: int) -> list[bytes]:
    return [text[i : i + size] for i in range(0, len(text), size)]


chunk_sizes = st.sampled_from([1, 2, 3, 7, 100, 255, 256, 257, 5000])


def stream(chunks: list[bytes], tokenizer: pack_text.Tokenizer) -> list[bytes]:
    return list(pack_text.stream_documents(pack_text.unify_newlines(chunks), tokenizer))


@given(st.one_of(texts, st.binary(max_size=600)), chunk_sizes, st.integers(256, 700))
@example(b"x" * 300 + b" " * 9, 100, 300)
@SHORT
def test_streamed_documents_are_those_of_the_whole_file(text, size, longest):
    whole = pack_nano.split_documents(text.replace(b"\r\n", b"\n"))
    expected = [document[i : i + longest] for document in whole for i in range(0, len(document), longest)]
    assert stream(in_chunks(text, size), dataclasses.replace(BYTES, max_bytes=longest)) == expected


@given(texts, chunk_sizes)
@SHORT
def test_documents_for_gpt2_are_whole_files_cut_only_where_they_are_long(text, size):
    chunks, text = in_chunks(text, size), text.replace(b"\r\n", b"\n")
    assert stream(chunks, GPT2) == ([text] if text.strip() else [])
    documents = stream(chunks, dataclasses.replace(GPT2, min_bytes=300, max_bytes=900))
    joined = b"".join(documents)
    assert text.startswith(joined)
    assert not text[len(joined) :].strip(), "only white space at the end is dropped"
    for before, document in zip([b"", *documents], documents[:-1], strict=False):
        is_tail = len(before) == 900 and not before.endswith(b"\n\n")
        assert (document.endswith(b"\n\n") and (len(document) >= 300 or is_tail)) or len(document) == 900
    assert max(map(len, documents), default=0) <= 900


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20))
@SHORT
def test_to_tokens(documents):
    expected = [token for document in documents for token in (256, *document)]
    tokens = pack_nano.to_tokens(documents)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected


documents_lists = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), max_size=12)


@given(documents_lists, documents_lists)
@SHORT
def test_shuffle_documents(train, val):
    found = pack_nano.shuffle_documents(train, val)
    assert found["train"] == sorted(set(train), key=sha1)
    assert found["val"] == sorted(set(val) - set(train), key=sha1)


# ----------------------------------------------------------------------------------------------------------------------
# The nano corpus

NANO = {"train": "nano_train_000000.bin", "val": "nano_val_000000.bin"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano")
    pack_nano.main(["--out", str(folder)])
    return folder


def test_nano_is_the_corpus_of_the_track(nano):
    version = importlib.metadata.version("torch").split("+")[0]
    if version != "2.13.0":
        pytest.skip(f"the nano track is torch 2.13.0; this is {version}, another corpus")
    hashes = {split: hashlib.sha256((nano / name).read_bytes()).hexdigest() for split, name in NANO.items()}
    assert hashes == {
        "train": "5292b62244336e34eaa8412a6d99c7635b7826b5b35d873cdab0e32b30e98e13",
        "val": "7ae01962c367985c81f9b24274edb9d25135bc712ed11165c07c8ef96716d8ba",
    }
    val_tokens = read_shard(nano / NANO["val"])[:262_145]
    preset = train_gpt.PRESETS["nano"]
    assert len(val_tokens) == preset.val_tokens + 1


def test_nano_documents(nano):
    documents = {split: read_documents(nano / name) for split, name in NANO.items()}
    for found in documents.values():
        digests = [sha1(document) for document in found]
        assert digests == sorted(set(digests)), "in order of SHA-1, without doubles"
    assert not set(documents["train"]) & set(documents["val"])


def test_nano_is_packed_once(nano, capsys):
    if importlib.metadata.version("torch").split("+")[0] != pack_nano.TRACK_TORCH:
        pytest.skip("only the track's corpus is known")
    before = {path: path.stat() for path in nano.iterdir()}
    pack_nano.main(["--out", str(nano)])
    assert {path: path.stat() for path in nano.iterdir()} == before
    assert "complete" in capsys.readouterr().out


@pytest.fixture
def tiny_torch(tmp_path, monkeypatch):
    """A torch package of 40 files instead of the installed one."""
    folder = tmp_path / "torch"
    for i in range(40):
        path = folder / f"part{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"# licence " * 40 + b"\n\n" + f"value_{i} = {i}\n".encode() * 60)
    for name in ("version.py", "testing/_internal/generated/x.py", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"SECRET " * 100)
    spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return folder


def test_another_torch_packs_another_corpus_and_says_so(tiny_torch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0+cpu")
    pack_nano.main(["--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert out.count("packed from torch 2.99.0; the nano track is torch 2.13.0: trains, not comparable") == 2
    documents = {split: read_documents(tmp_path / "out" / name) for split, name in NANO.items()}
    texts = documents["train"] + documents["val"]
    assert sum(b"licence" in document for document in texts) == 1, "what all files begin with counts once"
    assert sum(b"value_" in document for document in texts) == 40
    assert not any(b"SECRET" in document for document in texts)
    for i in range(40):
        is_val = hashlib.sha1(f"part{i % 3}/module_{i}.py".encode()).digest()[0] % 20 == 0
        split = documents["val" if is_val else "train"]
        assert sum(f"value_{i} = {i}\n".encode() in document for document in split) == 1


def test_changed_sources_of_the_tracks_torch_are_refused(tiny_torch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(SystemExit) as stop:
        pack_nano.main(["--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "pip install --force-reinstall --no-deps torch==2.13.0" in err


# ----------------------------------------------------------------------------------------------------------------------
# Any text


def prose(seed: int, size: int) -> bytes:
    """About `size` bytes in paragraphs."""
    rng = random.Random(seed)
    return b"\n\n".join(rng.randbytes(rng.randint(20, 200)).hex().encode() for _ in range(size // 222))


def packed(folder: Path) -> dict[str, list[bytes]]:
    return {split: read_documents(*sorted(folder.glob(f"{split}_*.bin"))) for split in ("train", "val")}


@pytest.fixture
def texts_folder(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for i in range(30):
        (folder / ("more" if i % 2 else ".") / f"{i}.txt").write_bytes(prose(i, 20_000))
    return folder


def run_pack(capsys, *arguments) -> str:
    pack_text.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert err == "", "the progress bar is for terminals"
    return out


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plan_of(out: str, preset: str = "nano") -> tuple[list, list]:
    """The trainer's plan for the command that the packer printed last."""
    command = shlex.split(out.splitlines()[-1].removeprefix("train on it: "))
    assert command[0] == "./run.sh"
    cfg = train_gpt.parse_args(command[1:])
    assert cfg.preset == preset
    return train_gpt.plan_data(cfg)


def test_pack_a_folder(texts_folder, tmp_path, capsys):
    (texts_folder / "image.png").write_bytes(b"SECRET" * 1000)
    (texts_folder / ".git").mkdir()
    (texts_folder / ".git" / "notes.txt").write_bytes(b"SECRET" * 1000)
    out = run_pack(capsys, texts_folder, "--out", tmp_path / "out")
    documents = packed(tmp_path / "out")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["train_000000.bin", "val_000000.bin"]
    names = {path.relative_to(texts_folder).as_posix(): path for path in texts_folder.rglob("[0-9]*.txt")}
    val = {name for name in names if int(hashlib.sha1(name.encode()).hexdigest()[:8], 16) < 0.05 * 2**32}
    assert 0 < len(val) < 5, "choose other file names: this test wants some by hash"
    for split, expected in (("val", val), ("train", names.keys() - val)):
        pieces = {piece for name in expected for piece in pack_nano.split_documents(names[name].read_bytes())}
        assert documents[split] == sorted(pieces, key=sha1)
    train_plan, val_plan = plan_of(out)
    assert train_plan[0].shard.path == str(tmp_path / "out" / "train_000000.bin")
    tokens = np.empty(1025, dtype=np.uint16)
    train_gpt.read_tokens(train_plan[0], 0, tokens, 257)
    assert tokens.tolist() == read_shard(tmp_path / "out" / "train_000000.bin")[:1025].tolist()
    assert val_plan


def test_the_same_text_elsewhere_gives_the_same_shards(texts_folder, tmp_path, capsys):
    run_pack(capsys, texts_folder, "--out", tmp_path / "a")
    texts_folder = texts_folder.rename(tmp_path / "moved")
    run_pack(capsys, texts_folder, texts_folder / "0.txt", "--out", tmp_path / "b")
    for name in ("train_000000.bin", "val_000000.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_equal_documents_count_once_and_in_training(texts_folder, tmp_path, capsys):
    """Against the same thing in memory, with doubles inside of files, between them, and between the splits."""
    files = {path.relative_to(texts_folder).as_posix(): path for path in sorted(texts_folder.rglob("*.txt"))}
    for i, path in enumerate(files.values()):
        path.write_bytes(prose(i % 7, 5000) + b"\r\n\r\n" + prose(100 + i, 20_000) + b"\n\n" + prose(i % 5, 5000))
    run_pack(capsys, texts_folder, "--val_fraction", 0.3, "--out", tmp_path / "out")
    documents = {"train": [], "val": []}
    for name, path in files.items():
        is_val = int(hashlib.sha1(name.encode()).hexdigest()[:8], 16) < 0.3 * 2**32
        text = path.read_bytes().replace(b"\r\n", b"\n")
        documents["val" if is_val else "train"] += pack_nano.split_documents(text)
    assert set(documents["train"]) & set(documents["val"])
    assert packed(tmp_path / "out") == pack_nano.shuffle_documents(**documents)


def test_neither_workers_nor_buckets_change_the_shards(texts_folder, tmp_path, capsys, monkeypatch):
    run_pack(capsys, texts_folder, "--workers", 1, "--out", tmp_path / "1")
    monkeypatch.setattr(pack_text, "BUCKET_BYTES", 10_000)
    monkeypatch.setattr(pack_text, "BATCH_BYTES", 20_000)
    for workers in (2, 5):
        run_pack(capsys, texts_folder, "--workers", workers, "--out", tmp_path / f"{workers}")
        assert shards_in(tmp_path / f"{workers}") == shards_in(tmp_path / "1")


@pytest.mark.parametrize("fraction", [0.0001, 0.05, 0.5, 0.9999])
def test_every_split_gets_a_file(tmp_path, capsys, fraction):
    files = [tmp_path / f"{i}.dat" for i in range(3)]
    for i, path in enumerate(files):
        path.write_bytes(prose(i, 30_000))
    (tmp_path / "empty.dat").write_bytes(b"")
    run_pack(capsys, *files, tmp_path / "empty.dat", "--val_fraction", fraction, "--out", tmp_path / "out")
    documents = packed(tmp_path / "out")
    for path in files:
        pieces = set(pack_nano.split_documents(path.read_bytes()))
        assert pieces <= set(documents["train"]) or pieces <= set(documents["val"])
    assert documents["train"]
    assert documents["val"]


def test_one_file_is_split_by_document_and_the_command_fits_it(tmp_path, capsys):
    path = tmp_path / "book"
    path.write_bytes(prose(0, 400_000).replace(b"\n", b"\r\n"))
    out = run_pack(capsys, path, "--out", tmp_path / "out")
    documents = packed(tmp_path / "out")
    pieces = set(pack_nano.split_documents(prose(0, 400_000)))
    assert set(documents["train"]) | set(documents["val"]) == pieces
    assert len(documents["train"]) + len(documents["val"]) == len(pieces)
    tokens = {split: sum(len(document) + 1 for document in found) for split, found in documents.items()}
    assert 0.03 < tokens["val"] / sum(tokens.values()) < 0.07
    train_plan, val_plan = plan_of(out)
    assert len(train_plan) == (tokens["train"] - 1) // 1024 < 700
    assert len(val_plan) == (tokens["val"] - 1) // 8192 < 32


@pytest.mark.parametrize(("fraction", "splits"), [(1e-9, [1, 0, 0]), (0.5, [1, 1, 0]), (1 - 1e-9, [1, 1, 0])])
def test_of_one_file_every_split_gets_a_document(fraction, splits):
    digests = [bytes([first]) * 20 for first in (0x33, 0x66, 0x99)]
    split = pack_text.choose_split(["book.txt"], {0: (digests[0], digests[-1])}, fraction)
    assert [split.is_val(digest, 0) for digest in digests] == splits
    split = pack_text.choose_split(["book.txt"], {0: (digests[0], digests[0])}, fraction)
    assert not split.is_val(digests[0], 0), "a single document is for training"


def test_enough_text_needs_no_flags(tmp_path, capsys):
    path = tmp_path / "book.txt"
    path.write_bytes(prose(0, 1_250_000))
    out = run_pack(capsys, path, "--val_fraction", 0.3, "--out", tmp_path / "out")
    assert "--num_iterations" not in out
    assert "--val_tokens" not in out
    plans = plan_of(out)
    assert [len(plan) for plan in plans] == [train_gpt.PRESETS["nano"].num_iterations, 32]


def test_many_shards(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "SHARD_TOKENS", 20_000)
    monkeypatch.setitem(pack_text.TOKENIZERS, "bytes", dataclasses.replace(BYTES, max_bytes=19_999))
    text, long = prose(0, 300_000), b"q" * 50_000
    (tmp_path / "book.txt").write_bytes(long + b"\n\n" + text)
    out = run_pack(capsys, tmp_path / "book.txt", "--val_fraction", 0.2, "--out", tmp_path / "out")
    for split in ("train", "val"):
        paths = sorted((tmp_path / "out").glob(f"{split}_*.bin"))
        assert len(paths) > 2
        found = [read_documents(path) for path in paths]
        lengths = [sum(len(document) + 1 for document in documents) for documents in found]
        assert max(lengths) <= 20_000
        for length, following in zip(lengths, found[1:], strict=False):
            assert length + len(following[0]) + 1 > 20_000, "a shard is full when the next document does not fit"
    documents = packed(tmp_path / "out")
    assert documents["train"] == sorted(documents["train"], key=sha1)
    pieces = {*pack_nano.split_documents(text), long[:19_999], (long + b"\n\n")[39_998:]}
    assert set(documents["train"] + documents["val"]) == pieces
    plan_of(out)


def test_a_second_run_needs_force_and_leaves_no_old_shards(texts_folder, tmp_path, capsys):
    folder = tmp_path / "out"
    run_pack(capsys, texts_folder, "--out", folder)
    (folder / "train_000001.bin").write_bytes((folder / "train_000000.bin").read_bytes())
    before = {path: path.read_bytes() for path in folder.iterdir()}
    error = fails(capsys, texts_folder, "--out", folder)
    assert f"{folder / 'train_000000.bin'} is there already: --force replaces all 3 shards" in error
    assert "too little text" in fails(capsys, texts_folder / "0.txt", "--out", folder, "--force")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    run_pack(capsys, texts_folder, "--out", folder, "--force")
    assert sorted(path.name for path in folder.iterdir()) == ["train_000000.bin", "val_000000.bin"]


def test_train_starts_the_command_that_is_printed(texts_folder, tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append((path, command)))
    out = run_pack(capsys, texts_folder, "--out", tmp_path / "out", "--train")
    assert started == [(ROOT / "run.sh", shlex.split(out.splitlines()[-1].removeprefix("train on it: ")))]


def test_paths_in_the_command_are_those_that_run_sh_takes(texts_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "ROOT", tmp_path)
    monkeypatch.chdir(texts_folder)
    out = run_pack(capsys, ".", "--out", "../own text")
    assert "--train_files 'own text/train_*.bin' --val_files 'own text/val_*.bin'" in out


# What a process group that packs is told, and its exit code; None: the system kills a worker
ENDS = {"Ctrl-C": 130, "SIGTERM": 143, "a worker dies": 2, "SIGKILL": -9}


@pytest.fixture(scope="module")
def long_book(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "book.txt"
    path.write_bytes(prose(0, 100_000_000))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stage", ["reading", "packing"])
def test_interrupted_packing_leaves_nothing(long_book, texts_folder, tmp_path, capsys, end, stage):
    folder = tmp_path / "out"
    run_pack(capsys, texts_folder, "--out", folder)
    before = shards_in(folder)
    command = [sys.executable, ROOT / "data" / "pack_text.py", long_book, "--out", folder, "--force", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not list(folder.glob(".packing-*/" + {"reading": "*.*", "packing": "train_*.bin"}[stage])):
        assert process.poll() is None
        time.sleep(0.01)
    workers = [int(worker) for worker in children.read_text().split()]
    assert len(workers) == 2
    match end:
        case "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        case "SIGTERM":
            process.terminate()
        case "a worker dies":
            os.kill(workers[0], signal.SIGKILL)
        case "SIGKILL":
            process.kill()
    error = process.communicate(timeout=20)[1]
    assert process.returncode == ENDS[end], error
    expected = {
        "Ctrl-C": "pack_text.py: interrupted\n",
        "a worker dies": "pack_text.py: a worker was killed, perhaps because memory ran out: try fewer --workers\n",
    }
    assert error == expected.get(end, "")
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers), (
        "no worker outlives the main process"
    )
    if end == "SIGKILL":  # nobody is there to remove them
        for path in folder.glob(".packing-*"):
            path.rename(tmp_path / "left")
    assert shards_in(folder) == before


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
    """Of the largest process. Measured by a small one in between: a process begins with the peak of its parent."""
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    measure += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    peaks = {}
    for mb in (30, 300):
        with open(tmp_path / "book.txt", "wb") as file:
            for i in range(mb):
                file.write(prose(i, 1_000_000) + b"\n\n")
        command = [ROOT / "data" / "pack_text.py", tmp_path / "book.txt", "--out", tmp_path / f"{mb}", "--workers", "2"]
        result = subprocess.run(
            [sys.executable, "-c", measure, sys.executable, *command], capture_output=True, check=True
        )
        peaks[mb] = int(result.stdout) / (1024 if sys.platform == "linux" else 1024**2)
    print(peaks)
    assert peaks[300] < peaks[30] + 120, f"MiB: {peaks}"


def fails(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        pack_text.main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def test_errors_are_one_line_and_nothing_is_written(texts_folder, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    assert "absent.txt: no such file or folder" in fails(capsys, texts_folder, tmp_path / "absent.txt", *out)
    assert "found no text in 0 files: name files, or folders with .md" in fails(
        capsys, texts_folder, "--ext", "md", *out
    )
    (tmp_path / "blank.txt").write_bytes(b"\n" * 100)
    assert "found no text in 1 files" in fails(capsys, tmp_path / "blank.txt", *out)
    assert "--workers 0: expected at least 1" in fails(capsys, texts_folder, "--workers", 0, *out)
    assert "invalid choice: 'bpe'" in fails(capsys, texts_folder, "--tokenizer", "bpe", *out)
    for fraction in ("0", "1", "nan", "-0.5"):
        assert "expected more than 0 and less than 1" in fails(capsys, texts_folder, f"--val_fraction={fraction}", *out)
    assert "invalid float value: 'x'" in fails(capsys, texts_folder, "--val_fraction", "x", *out)
    assert "the following arguments are required: FILE_OR_FOLDER" in fails(capsys, *out)
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").write_bytes(b"")
    assert "taken: File exists" in fails(capsys, texts_folder, "--out", tmp_path / "taken")


def test_too_little_text(tmp_path, capsys):
    path = tmp_path / "book.txt"
    advice = {"train": "give more text", "val": "give more text, or a larger --val_fraction"}
    for size, fraction, split, needed in ((100_000, 0.05, "val", "8,193"), (100_000, 0.9999, "train", "1,025")):
        path.write_bytes(prose(0, size))
        error = fails(capsys, path, "--val_fraction", fraction, "--out", tmp_path / "out")
        assert "too little text" in error
        assert f"tokens for {split}, at least {needed} are needed; {advice[split]}\n" in error
    path.write_bytes(b"one long line " * 100_000)
    assert "too little text: 0 tokens for val" in fails(capsys, path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize(
    "num_tokens",
    [[8193], [16384], [16385], [8192, 8194], [8193, 16385, 1, 0], [393_217], [786_433, 9, 786_432], [10**8]],
)
def test_flags_count_batches_as_the_trainer_does(num_tokens, name):
    tokenizer = pack_text.TOKENIZERS[name]
    found = [train_gpt.Shard("", n, "") for n in num_tokens]
    preset = train_gpt.PRESETS[tokenizer.preset]

    def num_batches(length: int, most: int) -> int:
        return len(train_gpt.plan_batches(found, length, most))

    if not num_batches(preset.batch_tokens, 1):
        with pytest.raises(pack_text.UserError, match=r"tokens for train, at least 393,217 are needed; .* as bytes"):
            pack_text.flags_for({"train": num_tokens, "val": num_tokens}, tokenizer)
        return
    flags = pack_text.flags_for({"train": num_tokens, "val": num_tokens}, tokenizer)
    cfg = train_gpt.parse_args(["--preset", tokenizer.preset, *flags])
    assert cfg.num_iterations == num_batches(preset.batch_tokens, preset.num_iterations)
    assert cfg.val_seq_len == preset.val_seq_len
    most = preset.val_tokens // preset.val_seq_len
    assert cfg.val_tokens == num_batches(preset.val_seq_len, most) * preset.val_seq_len
    assert len(flags) == 2 * sum(a != b for a, b in zip(astuple(cfg), astuple(preset), strict=True))


def astuple(cfg: train_gpt.Hyperparameters) -> tuple:
    return dataclasses.astuple(cfg)


def test_little_validation_text_gets_shorter_sequences():
    flags = pack_text.flags_for({"train": [10**9], "val": [150_000, 262_144, 10]}, GPT2)
    cfg = train_gpt.parse_args(["--preset", "gpt2", *flags])
    assert (cfg.val_seq_len, cfg.val_tokens, cfg.num_iterations) == (65_536, 2 * 65_536 + 3 * 65_536, 1770)


@pytest.mark.parametrize("num_tokens", [[], [8192], [8192, 8192]])
def test_text_for_no_batch_is_too_little(num_tokens):
    with pytest.raises(pack_text.UserError, match=r"tokens for val, at least 8,193 are needed"):
        pack_text.flags_for({"train": [9999], "val": num_tokens}, BYTES)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_constants_are_the_presets(name):
    tokenizer = pack_text.TOKENIZERS[name]
    preset = train_gpt.PRESETS[tokenizer.preset]
    for field in ("batch_tokens", "num_iterations", "val_tokens"):
        assert getattr(tokenizer, field) == getattr(preset, field)
    assert tokenizer.val_seq_lens[0] == preset.val_seq_len
    assert tokenizer.eot == preset.eot_token
    assert all(length % preset.block_size == 0 for length in tokenizer.val_seq_lens)


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2 tokens


@pytest.fixture
def gpt2(monkeypatch):
    """The encoding, from a vocabulary that was downloaded earlier: the tests need no network."""
    tiktoken = pytest.importorskip("tiktoken")
    cache = ROOT.parent / "shared" / "tiktoken_cache"
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        if not cache.is_dir():
            pytest.skip(
                "no GPT-2 vocabulary: set TIKTOKEN_CACHE_DIR to a folder that it was, or is to be, downloaded to"
            )
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    return tiktoken.get_encoding("gpt2")


def test_gpt2_tokens_give_the_text_back(gpt2, tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    special = "a<|endoftext|>b äöü 漢字 \U0001f600  x = [1, 2]\n\n\tend"
    texts = {f"{i}.txt": special + f" {i} " + prose(i, 60_000).decode() for i in range(60)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bad.txt").write_bytes(b"before \xff\xfe\r\nafter")
    texts["bad.txt"] = "before \ufffd\ufffd\nafter"
    long = "\n\n".join([prose(7, 40_000).decode()] * 4)
    (folder / "long.txt").write_text(long)
    out = run_pack(capsys, folder, "--tokenizer", "gpt2", "--out", tmp_path / "out", "--workers", 2)
    found = {}
    for split in ("train", "val"):
        tokens = np.concatenate([read_shard(path) for path in sorted((tmp_path / "out").glob(f"{split}_*.bin"))])
        assert tokens[0] == 50256
        found[split] = [gpt2.decode(piece[1:]) for piece in np.split(tokens, np.flatnonzero(tokens == 50256))[1:]]
        digests = [sha1(text.encode()) for text in found[split] if "\ufffd" not in text]
        assert digests == sorted(digests)
    val = {name for name in texts if int(hashlib.sha1(name.encode()).hexdigest()[:8], 16) < 0.05 * 2**32}
    assert 0 < len(val) < 10
    for split, expected in (("val", val), ("train", texts.keys() - val)):
        pieces = [text for text in found[split] if text not in long]
        assert sorted(pieces) == sorted(texts[name] for name in expected)
    pieces = [text for text in found["train"] + found["val"] if text in long]
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == len(long)
    train_plan, val_plan = plan_of(out, "gpt2")
    assert len(train_plan) >= 3
    assert val_plan


def test_one_line_where_tiktoken_is_missing(texts_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    error = fails(capsys, texts_folder, "--tokenizer", "gpt2", "--out", tmp_path / "out")
    assert "--tokenizer gpt2 needs the package tiktoken: " in error
    assert error.endswith(f" -m pip install -r {os.path.relpath(ROOT / 'data' / 'requirements.txt')}\n")
    assert not (tmp_path / "out").exists()


def test_one_line_where_the_vocabulary_is_missing(texts_folder, tmp_path):
    pytest.importorskip("tiktoken")
    offline = dict(os.environ, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), HTTPS_PROXY="http://127.0.0.1:9")
    command = [sys.executable, ROOT / "data" / "pack_text.py", texts_folder, "--tokenizer", "gpt2"]
    result = subprocess.run([*command, "--out", tmp_path / "out"], env=offline, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "the GPT-2 vocabulary could not be downloaded (ProxyError): set TIKTOKEN_CACHE_DIR to" in result.stderr
    assert not (tmp_path / "out").exists()
