"""Shards, the plan of a run's batches, and the reader: the same tokens in the same order for any world size."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import train_gpt
from shards import shard_header, write_shard
from train_gpt import Batch, Shard, ShardError, UserError

CPU = torch.device("cpu")


def make_shards(folder: Path, *lengths: int, vocab_size: int = 257) -> list[Shard]:
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        write_shard(folder / f"x_{i:06d}.bin", rng.integers(vocab_size, size=length))
    return train_gpt.find_shards(f"{folder}/x_*.bin", "fix")


def tokens_of(shard: Shard) -> np.ndarray:
    return np.fromfile(shard.path, dtype="<u2", offset=1024)


def read_all(plan, seq_len, sequences) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for batch in train_gpt.read_batches(plan, seq_len, sequences, 257, CPU) for pair in batch]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=5), batch_tokens=st.integers(1, 20), num_batches=st.integers(0, 20)
)
def test_plan_follows_the_rule_of_the_record(lengths, batch_tokens, num_batches):
    """A batch needs one token more than it trains on; where a shard has not that many left, the next one begins."""
    shards = [Shard(str(i), length, "") for i, length in enumerate(lengths)]
    expected = []
    for shard in shards:
        position = 0
        while position + batch_tokens + 1 <= shard.num_tokens:
            expected.append(Batch(shard, position, batch_tokens))
            position += batch_tokens
    assert train_gpt.plan_batches(shards, batch_tokens, num_batches) == expected[:num_batches]


def test_fineweb_shards_give_254_steps_each():
    cfg = train_gpt.PRESETS["gpt2"]
    shards = [Shard(f"{i}", 100_000_000, "") for i in range(1, 8)]
    plan = train_gpt.plan_batches(shards, cfg.batch_tokens, cfg.num_iterations)
    assert len(plan) == 1770
    assert [sum(batch.shard is shard for batch in plan) for shard in shards] == [254] * 6 + [246]
    assert "cached_fineweb10B.py 7" in train_gpt.data_command(cfg)


def test_ranks_read_what_one_process_reads(tmp_path):
    shards = make_shards(tmp_path, 700, 650)
    plan = train_gpt.plan_batches(shards, 96, 13)
    assert {batch.shard.path for batch in plan} == {shard.path for shard in shards}
    whole = read_all(plan, 8, range(12))
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            own = read_all(plan, 8, range(rank, 12, world_size))
            same = [whole[step * 12 + i] for step in range(13) for i in range(rank, 12, world_size)]
            assert len(own) == len(same)
            for (inputs, targets), (inputs_, targets_) in zip(own, same, strict=True):
                assert torch.equal(inputs, inputs_)
                assert torch.equal(targets, targets_)


def test_sequences_are_consecutive_tokens_and_targets_the_next_ones(tmp_path):
    [shard] = make_shards(tmp_path, 200)
    tokens = torch.from_numpy(tokens_of(shard).astype(np.int64))
    pairs = read_all(train_gpt.plan_batches([shard], 32, 6), 16, range(2))
    assert len(pairs) == 12
    for i, (inputs, targets) in enumerate(pairs):
        assert inputs.dtype == torch.int32
        assert targets.dtype == torch.int64
        assert torch.equal(inputs.long(), tokens[16 * i : 16 * i + 16])
        assert torch.equal(targets, tokens[16 * i + 1 : 16 * i + 17])


def test_batches_are_not_overwritten_by_reading_ahead(tmp_path):
    [shard] = make_shards(tmp_path, 2000)
    plan = train_gpt.plan_batches([shard], 64, 30)
    kept = list(train_gpt.read_batches(plan, 64, [0], 257, CPU))
    tokens = tokens_of(shard)
    for batch, [(inputs, _)] in zip(plan, kept, strict=True):
        assert np.array_equal(inputs.numpy(), tokens[batch.start : batch.start + 64])


def test_nothing_is_read_before_the_first_batch_is_asked_for(tmp_path, monkeypatch):
    [shard] = make_shards(tmp_path, 500)
    read, readers = train_gpt.read_tokens, []
    monkeypatch.setattr(
        train_gpt, "read_tokens", lambda *args: (readers.append(threading.current_thread()), read(*args))
    )
    batches = train_gpt.read_batches(train_gpt.plan_batches([shard], 32, 9), 32, [0], 257, CPU)
    assert readers == []
    next(batches)
    batches.close()
    assert 1 <= len(readers) <= 1 + train_gpt.READ_AHEAD
    assert threading.current_thread() not in readers


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "bytes long, but its header's"),
        (lambda path: path.write_bytes(path.read_bytes() + b"xx"), "bytes long, but its header's"),
        (lambda path: path.write_bytes(b"PK" + path.read_bytes()[2:]), "not a token shard"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "bytes long"),
        (lambda path: path.write_bytes(b""), "not a token shard"),
        (lambda path: path.write_bytes(b"<!DOCTYPE html>"), "not a token shard"),
        (lambda path: (path.unlink(), path.mkdir()), "irectory"),
    ],
)
def test_a_spoiled_shard_is_refused_with_the_command_that_mends_it(tmp_path, spoil, message):
    make_shards(tmp_path, 100, 100)
    spoil(tmp_path / "x_000001.bin")
    with pytest.raises(UserError, match=message) as error:
        train_gpt.find_shards(f"{tmp_path}/x_*.bin", "python fetch.py 7")
    assert "x_000001.bin" in str(error.value)
    assert "python fetch.py 7" in str(error.value)
    assert "\n" not in str(error.value)


@given(st.binary(max_size=1100), st.integers(-5, 5))
def test_any_bytes_are_a_shard_or_a_user_error(tmp_path_factory, content, num_tokens):
    path = tmp_path_factory.mktemp("fuzz") / "x.bin"
    for data in (content, shard_header(num_tokens) + content):
        path.write_bytes(data)
        try:
            [shard] = train_gpt.find_shards(str(path), "fix")
        except UserError:
            continue
        assert len(data) == 1024 + 2 * shard.num_tokens


def test_no_shards_names_the_pattern_and_the_command(tmp_path):
    with pytest.raises(UserError, match=r"no shards match .*none_\*\.bin.* get them: python fetch\.py"):
        train_gpt.find_shards(f"{tmp_path}/none_*.bin", "python fetch.py")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:1200]), "shorter than"),
    ],
)
def test_a_shard_that_changes_while_training_is_caught(tmp_path, spoil, message):
    [shard] = make_shards(tmp_path, 2000)
    batches = train_gpt.read_batches(train_gpt.plan_batches([shard], 64, 30), 64, [0], 257, CPU)
    next(batches)
    spoil(Path(shard.path))
    with pytest.raises(ShardError, match=message):
        list(batches)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    [shard] = make_shards(tmp_path, 500, vocab_size=50257)
    with pytest.raises(ShardError, match=r"holds token \d+, but --vocab_size is 257"):
        read_all(train_gpt.plan_batches([shard], 64, 5), 64, [0])
