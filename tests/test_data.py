"""Shards that are no shards, or go away. test_record92 and test_world_size hold the order of tokens."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from data.shards import write_shard
from train_gpt import BatchPlan, DistributedDataLoader, Ranks, UserError, schedule_validation

NANO = train_gpt.PRESETS["nano"]


def plan(folder: Path, seq_len: int, num_batches: int, *shards: int) -> list[BatchPlan]:
    """Plan batches of random tokens, from shards with so many of them."""
    for i, length in enumerate(shards):
        write_shard(folder / f"x_{i:06d}.bin", np.random.default_rng(i).integers(257, size=length))
    return train_gpt.plan_batches(f"{folder}/x_*.bin", [(seq_len, 0)] * num_batches, 1, NANO)


def test_a_spoiled_shard_is_refused_by_name(tmp_path):
    plan(tmp_path, 10, 12, 100, 100)
    path = tmp_path / "x_000001.bin"
    whole = path.read_bytes()
    contents = whole[:-2], whole[:-1], whole + b"x", whole + b"xx", b"PK" + whole[2:], whole[:100], b""
    spoils = [lambda content=content: path.write_bytes(content) for content in contents]
    for spoil in (*spoils, path.mkdir, lambda: path.symlink_to("nowhere")):
        path.rmdir() if path.is_dir() else path.unlink()
        spoil()
        with pytest.raises(UserError, match=r"^\S*x_000001\.bin[^\n]*$"):
            plan(tmp_path, 10, 12)


@pytest.mark.parametrize("spoil", [os.remove, lambda path: os.truncate(path, 1200)])
def test_a_shard_that_goes_away_while_training_is_noticed(tmp_path, spoil):
    batches = plan(tmp_path, 64, 30, 2000)
    cfg = dataclasses.replace(NANO, batch_tokens=NANO.train_seq_len)
    loader = DistributedDataLoader(cfg, Ranks(), torch.device("cpu"))
    steps = loader.steps(([schedule_validation(0, cfg)], [batch]) for batch in batches)
    next(steps)
    spoil(tmp_path / "x_000000.bin")
    with pytest.raises(UserError, match=r"x_000000\.bin"):
        list(steps)
