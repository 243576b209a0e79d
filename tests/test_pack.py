"""data/shards.py, data/pack_nano.py and data/pack_text.py."""

import hashlib
import importlib.metadata
import importlib.util
import os
import random
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pack_nano
import pack_text
import shards
import train_gpt

SHORT = settings(max_examples=200, deadline=None)


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
    return capsys.readouterr().out


def plan_of(out: str) -> tuple[list, list]:
    """The trainer's plan for the command that the packer printed last."""
    command = shlex.split(out.splitlines()[-1].removeprefix("train on it: "))
    assert command[0] == "./run.sh"
    cfg = train_gpt.parse_args(command[1:])
    assert cfg.preset == "nano"
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


@pytest.mark.parametrize("num_tokens", [[8193], [16384], [16385], [8192, 8194], [8193, 16385, 1, 0]])
def test_flags_count_batches_as_the_trainer_does(num_tokens):
    found = [train_gpt.Shard("", n, "") for n in num_tokens]
    batches = {length: len(train_gpt.plan_batches(found, length, 600)) for length in (1024, 8192)}
    flags = pack_text.flags_for({"train": num_tokens, "val": num_tokens})
    assert flags == f" --num_iterations {batches[1024]} --val_tokens {batches[8192] * 8192}"


@pytest.mark.parametrize("num_tokens", [[], [8192], [8192, 8192]])
def test_text_for_no_batch_is_too_little(num_tokens):
    with pytest.raises(pack_text.UserError, match=r"tokens for val, at least 8,193 are needed"):
        pack_text.flags_for({"train": [9999], "val": num_tokens})


def test_constants_are_the_nano_presets():
    nano = train_gpt.PRESETS["nano"]
    assert (nano.val_seq_len, nano.val_tokens, nano.batch_tokens, nano.num_iterations) == (
        pack_text.VAL_SEQ_LEN,
        pack_text.VAL_TOKENS,
        pack_text.BATCH_TOKENS,
        pack_text.NUM_ITERATIONS,
    )
    assert nano.eot_token == pack_nano.EOT
