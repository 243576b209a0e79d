"""data/cached_fineweb10B.py, with a hub that sends what it is told to."""

import struct
from pathlib import Path

import pytest

from data import cached_fineweb10B

NAMES = VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000001.bin"
SOUND = {name: struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + name[8:10].encode() * 100 for name in NAMES}


def test_shards_appear_whole_and_the_same_command_continues_whatever_happens(tmp_path, monkeypatch, capsys):
    asked, sent = [], {}

    def download(repository: str, name: str, *, repo_type: str, token: bool, local_dir: Path) -> None:
        asked.append(name)
        content = (SOUND | sent)[name]
        if isinstance(content, BaseException):
            raise content
        local_dir.mkdir(exist_ok=True)
        (local_dir / name).write_bytes(content)

    monkeypatch.setattr(cached_fineweb10B, "hf_hub_download", download)
    command = ["1", f"--out={tmp_path}/out"]
    for train, code, line in (
        (KeyboardInterrupt(), 130, "interrupted; the same command continues"),
        (ConnectionError("no network\nmore"), 1, f"{TRAIN}: ConnectionError: no network; the same command continues"),
        (SOUND[TRAIN][:-1], 1, f"{TRAIN}: RuntimeError: the hub has sent no shard; try another HF_ENDPOINT"),
    ):
        sent[TRAIN] = train
        with pytest.raises(SystemExit, match=str(code)):
            cached_fineweb10B.main(command)
        assert line in capsys.readouterr().err.strip().splitlines()[-1]
    sent.clear()
    cached_fineweb10B.main(command)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == SOUND
    assert asked == [VAL, TRAIN, TRAIN, TRAIN, TRAIN], "what is whole is not asked for again"
