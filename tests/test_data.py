"""The plan of a run's batches, and the reader: the same tokens in the same order for any number of processes."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt
from shards import write_shard
from test_train import wait_for
from train_gpt import UserError

CPU = torch.device("cpu")
NANO = train_gpt.PRESETS["nano"]  # of a run's configuration the reader looks at vocab_size alone


def make_shards(folder: Path, *lengths: int, vocab_size: int = 257) -> str:
    """Write shards of random tokens, and return the pattern of their names."""
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        write_shard(folder / f"x_{i:06d}.bin", rng.integers(vocab_size, size=length))
    return f"{folder}/x_*.bin"


def tokens_of(path: str) -> np.ndarray:
    return np.fromfile(path, dtype="<u2", offset=1024).astype(np.int64)


def read_all(plan, sequences, seq_len) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for batch in train_gpt.read_batches(plan, sequences, seq_len, NANO, CPU) for pair in batch]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=5), size=st.integers(1, 20), count=st.integers(0, 20))
def test_plan_drops_the_tails_of_shards(tmp_path_factory, lengths, size, count):
    """A batch needs one token more than it trains on; where a shard has not that many left, the next one begins."""
    pattern = make_shards(tmp_path_factory.mktemp("shards"), *lengths)
    expected = []
    for i, length in enumerate(lengths):
        expected += [(f"x_{i:06d}.bin", at) for at in range(0, length, size) if at + size + 1 <= length]
    if count > len(expected):
        with pytest.raises(UserError, match=f"{len(expected)} .*{count}"):
            train_gpt.plan_batches(pattern, size, count)
    else:
        plan = train_gpt.plan_batches(pattern, size, count)
        assert [(Path(b.path).name, b.start) for b in plan] == expected[:count]


def test_sequences_of_all_ranks_are_one_stream_and_targets_the_next_tokens(tmp_path):
    plan = train_gpt.plan_batches(make_shards(tmp_path, 700, 650), 96, 13)
    shards = [torch.from_numpy(tokens_of(path)) for path in sorted(tmp_path.glob("*.bin"))]
    expected = [tokens[: n * 96 + 1].unfold(0, 9, 8) for tokens, n in zip(shards, (7, 6), strict=True)]
    whole = read_all(plan, range(12), 8)
    for (inputs, targets), row in zip(whole, torch.cat(expected), strict=True):
        assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
        assert (inputs.tolist(), targets.tolist()) == (row[:-1].tolist(), row[1:].tolist())
    for size, rank in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 3)]:
        for own, same in zip(read_all(plan, range(rank, 12, size), 8), whole[rank::size], strict=True):
            assert all(map(torch.equal, own, same))


def test_reader_starts_with_the_first_batch_and_later_ones_never_wait(tmp_path, monkeypatch):
    """Batches stay what they are while it reads ahead, in a thread of its own."""
    plan = train_gpt.plan_batches(make_shards(tmp_path, 2000), 64, 20)
    read, thread, readers = train_gpt.read_tokens, threading.current_thread, []
    monkeypatch.setattr(train_gpt, "read_tokens", lambda *args: (readers.append(thread()), read(*args))[1])
    batches = train_gpt.read_batches(plan, [0], 64, NANO, CPU)
    assert readers == []
    kept = [next(batches)]
    wait_for(lambda: len(readers) == 1 + train_gpt.READ_AHEAD)
    kept += batches
    assert thread() not in readers
    tokens = tokens_of(plan[0].path)
    for batch, [(inputs, _)] in zip(plan, kept, strict=True):
        assert np.array_equal(inputs.numpy(), tokens[batch.start : batch.start + 64])


def test_a_spoiled_shard_is_refused_by_name(tmp_path):
    pattern, path = make_shards(tmp_path, 100, 100), tmp_path / "x_000001.bin"
    whole = path.read_bytes()
    contents = (whole[:-2], whole + b"xx", b"PK" + whole[2:], whole[:100], b"", b"<!DOCTYPE html>")
    spoils = [lambda content=content: path.write_bytes(content) for content in contents]
    for spoil in (*spoils, path.mkdir, lambda: path.symlink_to("nowhere"), lambda: os.mkfifo(path)):
        path.rmdir() if path.is_dir() else path.unlink()
        spoil()
        with pytest.raises(UserError, match=r"^\S*x_000001\.bin[^\n]*$"):
            train_gpt.plan_batches(pattern, 10, 12)


@pytest.mark.parametrize("how", ["removed", "cut", "pipe", "replaced", "rewritten"])
def test_a_shard_that_changes_while_training_is_noticed(tmp_path, how):
    plan, path = train_gpt.plan_batches(make_shards(tmp_path, 2000), 64, 30), tmp_path / "x_000000.bin"
    batches, content = train_gpt.read_batches(plan, [0], 64, NANO, CPU), path.read_bytes()
    spoils = dict(removed=path.unlink, cut=lambda: os.truncate(path, 1200))
    spoils |= dict(pipe=lambda: (path.unlink(), os.mkfifo(path)))
    spoils |= dict(replaced=lambda: (path.rename(tmp_path / "old"), path.write_bytes(content)))
    spoils |= dict(rewritten=lambda: path.write_bytes(content[:1024] + content[1024:][::-1]))
    next(batches)
    spoils[how]()
    with pytest.raises(UserError, match=r"x_000000\.bin"):
        list(batches)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"token \d+, .*--vocab_size is 257"):
        read_all(train_gpt.plan_batches(make_shards(tmp_path, 500, vocab_size=50257), 64, 5), [0], 64)
