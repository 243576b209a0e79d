"""data/shards.py, data/pack_nano.py and data/pack_text.py."""

import glob
import hashlib
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
from data import cached_fineweb10B, pack_nano, pack_text, shards
from data.pack_nano import shuffle_documents, split_documents
from speedrun import own_text


def packed(folder: Path, eot: int = 256) -> dict[str, list[bytes]]:
    """Read the text of each document, without the code under test."""
    documents = dict(train=[], val=[])
    for path in sorted(folder.glob("*.bin")):
        tokens = np.fromfile(path, "<u2", offset=1024)
        texts = [bytes(piece[1:].tolist()) for piece in np.split(tokens, np.flatnonzero(tokens == eot))[1:]]
        documents[path.name.partition("_")[0]] += texts
    return documents


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}


def fails(capsys, *arguments, code: int = 2) -> str:
    with pytest.raises(SystemExit, match=str(code)):
        pack_text.main([*map(str, arguments)])
    [line] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
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


def test_nano_is_the_corpus_of_the_track_or_says_that_it_is_another(tmp_path, monkeypatch, capsys):
    pack_nano.main(["--out", str(tmp_path / "out")])
    assert "losses do not compare" not in capsys.readouterr().out
    digests = {hashlib.sha256(content).hexdigest()[:8] for content in contents(tmp_path / "out").values()}
    assert digests == {"c468b0db", "1d93c563"}
    for i in range(40):
        (tmp_path / f"{i}.py").write_bytes(b"value = %d\n" % i * 60)
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=Mock(origin=str(tmp_path / "__init__.py"))))
    pack_nano.main(["--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("losses do not compare; pip install") == 2


@pytest.mark.parametrize("tokenizer", pack_text.TOKENIZERS.values(), ids=pack_text.TOKENIZERS)
def test_documents_are_the_text_and_no_character_is_cut_in_two(tokenizer):
    for character in "äx", "漢", "\U0001f600":
        text = character.encode() * 9000 + b"\n\n" + b"x" * tokenizer.min_bytes + b"\n\n\nword\r"
        documents = [*pack_text.cut_documents(text, tokenizer)]
        assert "".join(map(bytes.decode, documents)) == text.decode() + "\n\n"
        assert {*map(len, documents[:-3])} <= {tokenizer.max_bytes - i for i in range(4)}


def test_texts_are_split_by_name_and_what_is_left_out_or_odd_is_told(tmp_path):
    """As a process elsewhere: pytest's path would hide an import that does not work."""
    texts = {f"{'more/' * (i % 2)}{i}.txt": prose(i % 7, 5000) + b"\n" + prose(100 + i, 20_000) for i in range(30)}
    texts |= {"latin.md": prose(99, 3000) + b"caf\xe9" + b"\x80" * 5000}
    files = {name: text.replace(b"\n", b"\r\n") for name, text in texts.items()} | {"copy": texts["0.txt"]}
    files |= dict.fromkeys(("i.png", ".git/notes.txt", "more/.x.txt"), b"SECRET" * 999)
    files |= {"utf16.txt": "sixteen\r\n".encode("utf-16")}
    several = [b"caf\xc3\xa9 " + prose(200 + i, 3000) for i in range(10)]
    files["ends.rst"] = b"<|end|>".join([*several[:5], b" \n"])
    lines = [*(json.dumps(dict(body=text.decode())) for text in several[5:]), '{"body": null}', r'{"body": "\ud83d"}']
    files["lines.ndjson"] = "\r\n\n".join(lines).encode("utf-8-sig")
    for name, content in files.items():
        (path := tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    argv = "texts texts/lines.ndjson --ext txt,.MD,rst, --field body --separator <|end|> --val_fraction 0.3 --out out"
    how = dict(cwd=tmp_path, env=os.environ | dict(PYTHONSAFEPATH="1"), capture_output=True, text=True)
    done = subprocess.run([sys.executable, pack_text.__file__, *argv.split()], **how)
    told = [
        "note: left out: 3 hidden, 1 .png, 1 .ndjson; --ext takes other endings, and --ext '' files without one",
        "note: 3 texts (copy, ends.rst 6, lines.ndjson 6): without text or equal to another, left out",
        "note: 1 texts (latin.md): not UTF-8, packed as it is; iconv -f ENCODING -t UTF-8 converts",
        "note: 113,372 bytes are in documents that are equal to others: each counts once",
        "note: validation: whole texts, chosen by a hash of their names",
    ]
    assert done.stderr.splitlines() == told, "nor is there a progress bar, which is for terminals"
    texts |= {f"{'lines.ndjson' if i > 4 else 'ends.rst'} {i % 5 + 1}": text for i, text in enumerate(several)}
    texts |= {"utf16.txt": b"sixteen\n", "lines.ndjson 7": "\ufffd".encode()}
    order = [split_documents(texts[name]) for name in sorted(texts, key=lambda n: hashlib.sha1(n.encode()).digest())]
    splits = [[[*chain(*part)] for part in (order[n:], order[:n])] for n in range(len(order))]
    found = packed(tmp_path / "out")
    [(train, val)] = [parts for parts in splits if shuffle_documents(*parts) == found]
    assert {*train} & {*val}, "choose other names: no duplicate between splits"
    assert sum(map(len, found["val"])) / sum(map(len, {*train, *val})) == pytest.approx(0.32, abs=0.03)


def test_validation_has_its_share_of_different_text(tmp_path):
    for name, (texts, share) in {
        "little": ([prose(0, 60_000)], 8193),  # for a sequence; a tenth would be less
        "copies": ([prose(0, 200_000) + b"\n" * i for i in range(20)], 18_000),
        "one of 18": ([prose(i, 4800 if i == 9 else 3400) for i in range(18)], 8193),
        "a half twice": ([prose(0, 100_000) * 2], 10_000),
        "book and notes": ([prose(i, 500_000 if i == 9 else 3000) for i in range(20)], 50_000),
    }.items():
        (tmp_path / name).mkdir()
        for i, text in enumerate(texts):
            (tmp_path / name / f"{i}.txt").write_bytes(text)
        pack_text.main([f"{tmp_path}/{name}", f"--out={tmp_path}/{name}"])
        train, val = (len(b"".join(documents)) for documents in packed(tmp_path / name).values())
        assert (share <= val < 1.2 * share, 7 * share < train + val < 12 * share) == (True, True), name


def test_a_log_is_cut_at_line_ends(tmp_path):
    lines = [b"%06d %s\n" % (i, b"x" * (i % 90)) for i in range(9000)]
    documents = [*pack_text.cut_documents(b"".join(lines), pack_text.TOKENIZERS["bytes"])]
    assert b"".join(documents) == b"".join(lines) + b"\n\n"
    assert all(document.endswith(b"\n") and len(document) <= 2048 for document in documents)


def test_one_file_is_split_by_document_into_many_shards_and_trained_on(tmp_path, capsys, monkeypatch):
    for name, value in dict(ROOT=tmp_path, SHARD_TOKENS=40_000, BATCH_DOCUMENTS=32).items():
        monkeypatch.setattr(pack_text, name, value)
    monkeypatch.setattr(os, "execve", Mock())
    (tmp_path / "book").write_bytes(text := prose(0, 600_000))
    folder = tmp_path / "[o]*ut $x'y"
    pack_text.main([f"{tmp_path}/book", f"--out={folder}", "--train", "--", "--seed=7", "--run_id=mine"])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(":")[2])
    (path, argv, environment), _ = os.execve.call_args
    assert ([str(path), *argv[1:]], environment["PYTHON"]) == (command, sys.executable)
    cfg = train_gpt.parse_args(command[1:])
    assert (cfg.preset, cfg.target_loss, cfg.seed, cfg.ngram_order) == ("nano", 0, 7, 3)
    for pattern in cfg.train_files, cfg.val_files:
        sizes = [path.stat().st_size for path in map(tmp_path.joinpath, glob.glob(pattern, root_dir=tmp_path))]
        assert (len(sizes) > 1, max(sizes) <= 1024 + 2 * 40_000) == (True, True)
    train, val = packed(folder).values()
    assert {*train, *val} == {*(documents := split_documents(text))}
    assert {*val} == {*documents[-len(val) :]}, "validation does not lie between what is trained on"
    orders = {tuple(train[i : i + len(train) // 8]) for i in range(0, len(train), len(train) // 8)}
    assert [{*order} for order in orders] == [{*train}] * 8, "it can be read eight times, each time in another order"


def test_another_text_replaces_the_one_before_once_all_is_well_and_nobody_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "OWN", folder := tmp_path / "own")
    for name, size in dict(page=300, book=100_000).items():
        (tmp_path / name).write_bytes(prose(1, size))
    book = f"{tmp_path}/book", f"--out={folder}"
    pack_text.main([*book])
    (folder / "train_000001.bin").write_bytes((folder / "train_000000.bin").read_bytes())
    before = contents(folder)
    assert "too little text" in fails(capsys, tmp_path / "page", "--out", folder)
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n\n{"text": "cut')
    assert "cut.jsonl, line 3: no JSON object" in fails(capsys, tmp_path / "cut.jsonl", book[1])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=[None, KeyboardInterrupt, *[None] * 9]))  # in the second shard
    assert fails(capsys, *book, code=130).endswith(": interrupted")
    assert contents(folder) == before
    monkeypatch.setattr(own_text, "train", lambda *_: pack_text.main([*book]))
    assert "another pack_text.py packs or trains there" in fails(capsys, *book, "--train")
    assert sorted(contents(folder)) == ["train_000000.bin", "val_000000.bin"]
    monkeypatch.setattr(pack_text, "OWN", tmp_path)
    assert "train_000000.bin is there already: remove the 2 shards" in fails(capsys, *book)


def test_what_changes_passes_or_validation_makes_a_run_the_users(capsys, monkeypatch):
    monkeypatch.setattr(pack_text, "pack", Mock(return_value=([], own_text.Text([b"text"], [b"x"], 60_000, 1, 60))))
    monkeypatch.setattr(os, "execve", lambda *_: sys.exit("single"))
    monkeypatch.setattr(own_text, "train", Mock(return_value="passes"))
    theirs = "num_iterations run_id log_dir resume preset train_files val_files val_tokens batch_tokens eot_token"
    for flag in [*theirs.split(), "vocab_size", "muon_lr", "val_loss_every"]:
        with pytest.raises(SystemExit, match="passes" if flag in ("muon_lr", "val_loss_every") else "single"):
            pack_text.main(["text", "--train", "--", f"--{flag}=16"])
    assert "512 bytes back; your flags: --muon_lr=16\n" in capsys.readouterr().out


@pytest.mark.parametrize("tokenizer", pack_text.TOKENIZERS.values(), ids=pack_text.TOKENIZERS)
def test_a_run_fits_the_text_or_there_is_too_little(tokenizer):
    sizes = dict(train=tokenizer.min_steps * tokenizer.step_tokens + 1, val=tokenizer.val_seq_len + 1)
    assert pack_text.fit(tokenizer, **sizes) == (tokenizer.min_steps, tokenizer.val_seq_len)
    for split, size in sizes.items():
        with pytest.raises(RuntimeError, match=rf"too little text for {tokenizer.preset}: .*\b{size - 1:,} to.*: add "):
            pack_text.fit(tokenizer, **sizes | {split: size - 1})
    flags = f"--preset={tokenizer.preset} --num_iterations={tokenizer.min_steps} --val_tokens={tokenizer.val_seq_len}"
    cfg = train_gpt.parse_args([*flags.split(), "--device=cpu"])
    assert train_gpt.num_tokens(tokenizer.min_steps, cfg) < sizes["train"]


def test_gpt2_tokens_give_the_text_back(tmp_path, monkeypatch):
    """Use an encoding of single bytes, so that the test needs no vocabulary from the network."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks, end = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 50256}
    encoding = tiktoken.Encoding("x", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    texts = [f"a<|endoftext|>b äöü 漢 \U0001f600  [{i}]\n\n\tend ".encode() + prose(i, 1500) for i in range(60)]
    for i, text in enumerate([*texts, b"before \xff\xfe\r\nafter", b"word " * 900]):
        (tmp_path / f"{i}.txt").write_bytes(text)
    pack_text.main([str(tmp_path), "--tokenizer=gpt2", f"--out={tmp_path}/out", "--", "--num_iterations=1"])
    texts = [text + b"\n\n" for text in [*texts, "before \ufffd\ufffd\nafter".encode()]]
    texts += [(b"word " * 900 + b"\n\n")[i : i + 2047] for i in (0, 2047, 4094)]
    assert sorted(chain(*packed(tmp_path / "out", eot=50256).values())) == sorted(texts)
