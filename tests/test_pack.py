"""data/shards.py, data/pack_nano.py and data/pack_text.py."""

import contextlib
import glob
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
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
from data import pack_nano, pack_text, shards
from speedrun import own_text


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
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(capsys, main, *arguments) -> str:
    main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert all(line.startswith("note: ") for line in err.splitlines()), "the progress bar is for terminals"
    return out


def fails(capsys, main, *arguments, code: int = 2) -> str:
    with pytest.raises(SystemExit, match=str(code)):
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    *notes, line = err.splitlines()
    assert (out, all(note.startswith("note: ") for note in notes)) == ("", True), err
    return line


def test_a_shard_is_written_whole_or_not_at_all_and_damage_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "new" / "shard.bin"
    shards.write_shard(path, np.array([0, 1, 50256, 65535], dtype=np.int64))
    sound = struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + struct.pack("<4H", 0, 1, 50256, 65535)
    assert (shards.is_shard(path), path.stat().st_mode & 0o777) == (True, 0o644)
    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, lambda *args: sys.exit())
        with pytest.raises(SystemExit):
            shards.write_shard(path, np.arange(10))
    assert contents(path.parent) == {"shard.bin": sound}, "a write that fails changes nothing"
    for content in b"", sound[:1024], sound + b"\0", b"\0" + sound[1:], sound[:8] + b"\6" + sound[9:]:
        path.write_bytes(content)
        assert not shards.is_shard(path), content


@pytest.mark.parametrize("tokenizer", pack_text.TOKENIZERS.values(), ids=pack_text.TOKENIZERS)
def test_documents_are_the_text_and_no_character_is_cut_in_two(tokenizer):
    for character in "äx", "漢", "\U0001f600":
        text = character.encode() * 9000 + b"\n\n" + b"x" * tokenizer.min_bytes + b"\n\n\nword\r"
        documents = [*pack_text.cut_documents(text, tokenizer)]
        assert b"".join(documents) == text + b"\n\n"
        assert "".join(map(bytes.decode, documents)), "each is UTF-8"
        assert {*map(len, documents[:-3])} <= {tokenizer.max_bytes - i for i in range(4)}
        assert documents[-2:] == [b"x" * tokenizer.min_bytes + b"\n\n", b"\nword\r\n\n"]
    other = b"\x80" * (tokenizer.max_bytes + 1)
    assert [*map(len, pack_text.cut_documents(other, tokenizer))] == [tokenizer.max_bytes, 3], "no UTF-8"


def test_nano_is_the_corpus_of_the_track_or_says_that_it_is_another(tmp_path, monkeypatch, capsys):
    out = run(capsys, pack_nano.main, "--out", tmp_path / "out")
    if importlib.metadata.version("torch").startswith("2.13.0"):
        assert (out.count("tokens"), out.count("losses do not compare")) == (2, 0)
        digests = {hashlib.sha256(content).hexdigest()[:8] for content in contents(tmp_path / "out").values()}
        assert digests == {"c468b0db", "1d93c563"}
    for i in range(40):
        (tmp_path / f"{i}.py").write_bytes(b"value = %d\n" % i * 60)
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=Mock(origin=str(tmp_path / "__init__.py"))))
    assert run(capsys, pack_nano.main, "--out", tmp_path / "out").count("losses do not compare; pip install") == 2
    assert "File exists" in fails(capsys, pack_nano.main, "--out", tmp_path / "0.py")


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
    return folder


def test_a_folder_is_split_by_file_name_and_shuffled(texts_folder, tmp_path, capsys):
    names = {path: path.relative_to(texts_folder).as_posix() for path in texts_folder.rglob("[0-9]*.txt")}
    order = sorted(names, key=lambda path: hashlib.sha1(names[path].encode()).digest())
    texts = [pack_nano.split_documents(path.read_bytes().replace(b"\r\n", b"\n")) for path in order]
    run(capsys, pack_text.main, texts_folder, texts_folder / "0.txt", "--val_fraction", 0.3, "--out", tmp_path / "out")
    found = packed(tmp_path / "out")
    splits = [[[*chain(*part)] for part in (texts[n:], texts[:n])] for n in range(31)]
    [(train, val)] = [parts for parts in splits if pack_nano.shuffle_documents(*parts) == found]
    assert {*train} & {*val}, "choose other file names: no duplicate between splits"
    assert sum(map(len, found["val"])) / sum(map(len, {*chain(*texts)})) == pytest.approx(0.32, abs=0.02)


LINES = b"".join(b'{"text": %s}\n' % json.dumps(prose(i, 1500).decode()).encode() for i in range(200))


@pytest.mark.parametrize(
    ("texts", "val"),
    [
        ([prose(0, 60_000)], 8193),  # for a sequence; a tenth would be less
        ([prose(0, 200_000) + b"\n" * i for i in range(20)], 18_000),
        ([prose(i // 2, 6000) + b"changed" * (i % 2) for i in range(120)], 35_000),
        ([prose(i, 500_000 if i == 9 else 3000) for i in range(20)], 50_000),
        ([LINES, LINES], 26_000),
    ],
    ids=["little", "copies", "a backup", "notes beside a book", "each line twice"],
)
def test_validation_has_its_share_of_different_text(texts, val, tmp_path, capsys):
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.{'jsonl' if text is LINES else 'txt'}").write_bytes(text)
    pack_text.main([str(tmp_path), "--ext", "txt,.jsonl", "--out", str(tmp_path / "out")])
    found = packed(tmp_path / "out")
    sizes = {split: len(b"".join(documents)) for split, documents in found.items()}
    assert (val <= sizes["val"] < 1.2 * val, 7 * val < sizes["train"] + sizes["val"] < 12 * val) == (True, True), sizes
    out, err = capsys.readouterr()
    assert "--num_iterations" in out
    assert ("equal to another, left out" in err) == (val in (18_000, 26_000))


def test_one_file_is_split_by_document_into_many_shards_and_trained_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "ROOT", tmp_path)
    monkeypatch.setattr(pack_text, "SHARD_TOKENS", 40_000)
    monkeypatch.setattr(pack_text, "BATCH_DOCUMENTS", 32)
    monkeypatch.setattr(os, "execve", Mock())
    text, folder = prose(0, 600_000), tmp_path / "[o]*ut $x'y"
    (tmp_path / "book").write_bytes(text)
    arguments = tmp_path / "book", "--out", folder, "--train", "--", "--seed", 7, "--run_id", "mine"
    command = shlex.split(run(capsys, pack_text.main, *arguments).splitlines()[-1])[3:]
    (path, argv, environment), _ = os.execve.call_args
    assert ([path, *argv[1:]], environment["PYTHON"]) == ([tmp_path / "run.sh", *command[1:]], sys.executable)
    cfg = train_gpt.parse_args(command[1:])
    assert (cfg.preset, cfg.target_loss, cfg.seed, cfg.ngram_order) == ("nano", 0, 7, 3)
    for pattern in cfg.train_files, cfg.val_files:
        sizes = [path.stat().st_size for path in map(tmp_path.joinpath, glob.glob(pattern, root_dir=tmp_path))]
        assert (len(sizes) > 1, max(sizes) <= 1024 + 2 * 40_000) == (True, True)
    found = packed(folder)
    once = {*found["train"]}
    assert once | {*found["val"]} == {*pack_nano.split_documents(text)}
    orders = [found["train"][i : i + len(once)] for i in range(0, len(found["train"]), len(once))]
    assert [{*order} for order in orders] == [once] * 4, "it can be read four times"
    assert len({*map(tuple, orders)}) == 4, "each time in another order"


def test_files_hold_several_texts_and_none_is_in_both_splits(tmp_path, capsys):
    texts = [b"caf\xc3\xa9 " + prose(i, 3000) for i in range(40)]
    lines = [json.dumps(dict(body=text.decode(), id=0)).encode() for text in texts[:20]]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n\n".join(lines))
    (tmp_path / "a.txt").write_bytes(b"<|end|>".join([b"", *texts[20:]]))
    options = "--ext", "txt,jsonl", "--field", "body", "--separator", "<|end|>", "--val_fraction", 0.25
    run(capsys, pack_text.main, tmp_path, *options, "--out", tmp_path / "out")
    train, val = map(set, packed(tmp_path / "out").values())
    whole = [{*pack_nano.split_documents(text)} for text in texts]
    assert train | val == set().union(*whole)
    in_val = [documents for documents in whole if documents & val]
    assert (len(in_val) in (10, 11), train & set().union(*in_val)) == (True, set())


def test_another_text_replaces_the_one_before_once_all_is_well(texts_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "OWN", folder := tmp_path / "own")
    arguments = texts_folder, "--out", folder
    run(capsys, pack_text.main, *arguments)
    (folder / "train_000001.bin").write_bytes((folder / "train_000000.bin").read_bytes())
    before = contents(folder)
    (tmp_path / "page").write_bytes(prose(1, 300))
    assert "too little text" in fails(capsys, pack_text.main, tmp_path / "page", "--out", folder)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(os, "fsync", Mock(side_effect=[None, KeyboardInterrupt]))  # in the second shard
        assert fails(capsys, pack_text.main, *arguments, code=130).endswith(": interrupted")
    assert contents(folder) == before
    run(capsys, pack_text.main, *arguments)
    assert sorted(contents(folder)) == ["train_000000.bin", "val_000000.bin"]
    monkeypatch.setattr(pack_text, "OWN", tmp_path)
    assert "train_000000.bin is there already: remove the 2 shards" in fails(capsys, pack_text.main, *arguments)


def test_a_text_does_not_replace_what_a_training_still_reads(texts_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "OWN", folder := tmp_path / "own")
    run(capsys, pack_text.main, texts_folder, "--out", folder)
    before = contents(folder)
    (tmp_path / "other").write_bytes(prose(3, 90_000))
    told = []

    def train(*_) -> int:
        capsys.readouterr()
        told.append(fails(capsys, pack_text.main, tmp_path / "other", "--out", folder))
        return 0

    monkeypatch.setattr(pack_text.own_text, "train", train)
    with pytest.raises(SystemExit, match="0"):
        pack_text.main([str(texts_folder), "--out", str(folder), "--train"])
    assert told[0].endswith(f"{folder}: another pack_text.py packs or trains there: choose another --out")
    assert contents(folder).keys() == before.keys()
    run(capsys, pack_text.main, tmp_path / "other", "--out", folder)
    assert contents(folder)["val_000000.bin"] != before["val_000000.bin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a.jsonl", "a.jsonl, line 3: TypeError: list indices must be integers"),
        ("a.jsonl --field n", "a.jsonl, line 1: TypeError: expected string"),
        ("a.jsonl --field m", "a.jsonl, line 1: KeyError: 'm'; expected a JSON object with a text 'm'; --field names"),
        ("cut.jsonl", "cut.jsonl, line 3: JSONDecodeError: Unterminated string"),
        ("deep.jsonl", "deep.jsonl, line 1: RecursionError: maximum recursion depth"),
        ("absent.txt", "absent.txt: no regular file and no folder"),
        ("pipe", "pipe: no regular file and no folder"),
        ("blank.txt", "too little text for nano: 0 tokens to train on and 0 to validate on, expected 40,961"),
        ("bare", "no text: left out: 2 .json, 1 hidden, 1 without an ending; --ext takes other endings, and --ext ''"),
        ("texts --tokenizer gpt2", "this needs the package tiktoken: pip install"),
        ("texts --out blank.txt", "File exists: 'blank.txt'"),
        ("texts --val_fraction nan", "--val_fraction nan: expected a number from 0 to less than 1"),
        ("texts --val_fraction -1", "--val_fraction -1.0: expected a number from 0 to less than 1"),
        ("texts --val_fraction 1.5", "--val_fraction 1.5: expected a number from 0 to less than 1"),
        ("texts -- --num_iterations 5000", "--num_iterations 5000: the text has enough for 277 at most"),
        ("texts -- --num_iterations=60 --batch_tokens=16384", "--num_iterations 60: the text has enough for 34 at"),
        ("texts -- --val_tokens 3000000", "--val_tokens 3000000: the text has enough for "),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(texts_folder, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.chdir(tmp_path)
    Path("bare/.hidden").mkdir(parents=True)
    for name in ("a.json", "b.JSON", "noending", ".hidden/c.txt"):
        Path("bare", name).write_bytes(prose(0, 9000))
    Path("blank.txt").write_bytes(b"\n" * 100)
    Path("a.jsonl").write_text('{"text": "a", "n": 1}\n\n["text"]\n')
    Path("cut.jsonl").write_text('{"text": null}\n\n{"text": "a')
    Path("deep.jsonl").write_text("[" * 100_000)
    os.mkfifo("pipe")
    assert message in fails(capsys, pack_text.main, "--out", "out", *shlex.split(arguments))
    assert not Path("out").exists() or contents(Path("out")) == {}


def test_what_is_left_out_or_odd_is_counted_and_named(texts_folder, tmp_path):
    """As a process elsewhere: pytest's path would hide an import that does not work."""
    for name, text in {
        "utf16.txt": "sixteen\r\n".encode("utf-16"),
        "no\x1bmark.txt": "text".encode("utf-16-le"),
        "latin.md": prose(9, 999) + b"caf\xe9",
        "a.ndjson": b'\xef\xbb\xbf{"text": "windows"}\r\n{"text": null}\n{"text": "  "}\n{"text": "half \\ud83d"}',
        "a.txt": gzip.compress(b"text"),
    }.items():
        (texts_folder / name).write_bytes(text)
    (texts_folder / "link").symlink_to(texts_folder / "more")
    env = os.environ | dict(PYTHONSAFEPATH="1")
    command = [sys.executable, pack_text.__file__, "texts", "texts/a.ndjson", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    told = [
        "note: left out: 1 linked folder(s), to be named themselves, 2 hidden, 1 .ndjson, 1 .png; --ext takes",
        "note: 2 texts (a.txt, no?mark.txt): compressed, binary or unmarked UTF-16, left out; unpack, or iconv",
        "note: 1 texts (latin.md): not UTF-8, packed as it is; iconv -f ENCODING -t UTF-8 converts",
        "note: 2 texts (a.ndjson 2, a.ndjson 3): without text or equal to another, left out",
        "note: 262,950 bytes are in documents that are equal to others: each counts once",
    ]
    assert done.returncode == 0
    assert [line[: len(note)] for line, note in zip(done.stderr.splitlines(), told, strict=True)] == told
    documents = {*chain(*packed(tmp_path / "out").values())}
    assert {b"windows\n\n", "half \ufffd\n\n".encode(), b"sixteen\n\n\n"} <= documents
    assert any(document.endswith(b"caf\xe9\n\n") for document in documents)


def test_folders_without_permission_are_told_before_files(tmp_path, monkeypatch, capsys):
    """Root may read all, so the system only seems to refuse."""
    for name in ["a/x.txt", "b/denied/x.txt", ".c/denied/x.txt", *(f"y.{i}" for i in range(9))]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    scan = os.scandir
    denied = PermissionError(13, "", tmp_path / "b/denied"), PermissionError(13, "", tmp_path / ".c/denied")
    refuse = {error.filename: Mock(side_effect=error) for error in denied}
    monkeypatch.setattr(os, "scandir", lambda path: refuse.get(Path(path), scan)(path))
    assert [*pack_text.find_files([tmp_path], {".txt"})] == [tmp_path / "a/x.txt"]
    assert capsys.readouterr().err.startswith("note: left out: 1 folder(s) without permission, 1 hidden, 1 .")


THEIRS = "num_iterations run_id log_dir resume preset train_files val_files val_tokens batch_tokens eot_token"


@pytest.mark.parametrize("flag", [*THEIRS.split(), "vocab_size", "muon_lr", "val_loss_every"])
def test_what_changes_passes_or_validation_makes_a_run_the_users(texts_folder, tmp_path, capsys, monkeypatch, flag):
    """Its loss would be of another text than the bits per byte, or it would read more often than we say."""
    is_single = flag not in ("muon_lr", "val_loss_every")
    monkeypatch.setattr(pack_text, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "execve", Mock())
    monkeypatch.setattr(own_text, "train", Mock(return_value=0))
    arguments = [str(texts_folder), "--out", str(tmp_path / "own"), "--train", "--", f"--{flag}=16"]
    with contextlib.nullcontext() if is_single else pytest.raises(SystemExit, match="0"):
        pack_text.main(arguments)
    out, err = capsys.readouterr()
    assert (os.execve.called, own_text.train.called) == (is_single, not is_single)
    assert (f"note: one run as you say, without bits per byte: --{flag}\n" in err) == is_single
    assert (f"512 bytes back; your flags: --{flag}=16\n" in out) != is_single


@pytest.mark.parametrize("tokenizer", pack_text.TOKENIZERS.values(), ids=pack_text.TOKENIZERS)
def test_a_text_too_small_for_the_preset_gets_a_run_that_fits(tmp_path, tokenizer):
    sizes = dict(train=tokenizer.min_steps * tokenizer.step_tokens + 1, val=tokenizer.val_seq_len + 1)
    flags = ["--preset", tokenizer.preset, "--device", "cpu", *pack_text.fit(tokenizer, **sizes)]
    for split, size in sizes.items():
        tokens = np.full(size, len(split))
        tokens[::2048] = train_gpt.PRESETS[tokenizer.preset].eot_token
        shards.write_shard(tmp_path / f"{split}.bin", tokens)
        flags += [f"--{split}_files", f"{tmp_path}/{split}.bin"]
        with pytest.raises(RuntimeError, match=rf"too little text for {tokenizer.preset}: .*\b{size - 1:,} to.*: add "):
            pack_text.fit(tokenizer, **sizes | {split: size - 1})
    train_gpt.plan_data(cfg := train_gpt.parse_args(flags))
    assert (cfg.num_iterations, cfg.val_tokens) == (tokenizer.min_steps, tokenizer.val_seq_len)
    val_tokens, tokens = tokenizer.val_sequences * tokenizer.val_seq_len, 10**9
    flags = ["--num_iterations", str(tokenizer.steps(tokens)), "--val_tokens", str(val_tokens)]
    assert pack_text.fit(tokenizer, tokens, 2 * val_tokens) == flags, "neither is more than it needs"


def test_gpt2_tokens_give_the_text_back(tmp_path, capsys, monkeypatch):
    """Use an encoding of single bytes, so that the test needs no vocabulary from the network."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks, end = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("x", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end)
    texts = [f"a<|endoftext|>b äöü 漢 \U0001f600  [{i}]\n\n\tend ".encode() + prose(i, 1500) for i in range(60)]
    for i, text in enumerate([*texts, b"before \xff\xfe\r\nafter", b"word " * 900]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    sizes = "--num_iterations=1", "--batch_tokens=1024", "--val_tokens=1024"
    arguments = tmp_path, "--tokenizer", "gpt2", "--out", tmp_path / "out", "--", *sizes
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    assert "could not be downloaded (OSError): set TIKTOKEN_CACHE_DIR" in fails(capsys, pack_text.main, *arguments)
    assert not (tmp_path / "out").exists(), "it fails before the work"
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    assert "--preset gpt2" in run(capsys, pack_text.main, *arguments)
    found = packed(tmp_path / "out", eot=50256)
    texts = [text + b"\n\n" for text in [*texts, "before \ufffd\ufffd\nafter".encode()]]
    texts += [(b"word " * 900 + b"\n\n")[i : i + 2047] for i in (0, 2047, 4094)]
    assert sorted(found["train"] + found["val"]) == sorted(texts)
