"""The plan of a run's batches, and the data loader: the same tokens in the same order for any number of processes."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import train_gpt
from data.shards import write_shard
from train_gpt import BatchPlan, DistributedDataLoader, Hyperparameters, Ranks, UserError, schedule_validation
from world_worker import wait_for

NANO = train_gpt.PRESETS["nano"]
SMALL = dataclasses.replace(NANO, vocab_size=9, eot_token=8)


@pytest.fixture(autouse=True, scope="module")
def few_tokens_at_once():
    """Look for documents in so few tokens at a time that some reach from one part to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "TOKENS_AT_ONCE", 16)
        yield


def make_shards(folder: Path, *lengths: int) -> str:
    """Write shards of random tokens, and return the pattern of their names."""
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        write_shard(folder / f"x_{i:06d}.bin", rng.integers(257, size=length))
    return f"{folder}/x_*.bin"


def plan_stream(pattern: str, seq_lens: list[int]) -> list[BatchPlan]:
    return [*train_gpt.plan_batches(pattern, [(seq_len, 0) for seq_len in seq_lens], 1, NANO)]


def read(batches: list[BatchPlan], cfg: Hyperparameters = NANO, rank: int = 0, size: int = 1):
    """Yield what a rank reads for each batch, as in validations."""
    cfg = dataclasses.replace(cfg, batch_tokens=len(batches[0]) * cfg.train_seq_len) if batches else cfg
    loader = DistributedDataLoader(cfg, Ranks(rank, size), torch.device("cpu"))
    cycles = (([schedule_validation(0, cfg)], [batch]) for batch in batches)
    return (sequences for sequences, *_ in loader.steps(cycles))


def slow_row(documents: list[list[int]], seq_len: int, cut: int) -> list[int] | None:
    """Take the begins of documents until there are seq_len + 1 tokens, and drop the rest of the last one."""
    row: list[int] = []
    while documents and len(row) <= seq_len:
        row += documents.pop(0)[:cut]
    return row[: seq_len + 1] if len(row) > seq_len else None


def slow_rows(shards: list[list[int]], seq_lens: list[int], num_sequences: int, cuts: list[int]) -> list[list]:
    """Return the sequences of each batch. A shard that has not enough for all of them gives none."""
    batches: list[list] = []
    for tokens in shards:
        begins = [i for i, token in enumerate(tokens) if token == SMALL.eot_token]
        documents = [tokens[i:j] for i, j in itertools.pairwise([*begins, len(tokens)])]
        stream = list(tokens)
        while len(batches) < len(seq_lens):
            seq_len, cut, rows = seq_lens[len(batches)], cuts[len(batches)], []
            for _ in range(num_sequences):
                rows.append(slow_row(documents, seq_len, cut) if cut else slow_row([stream], seq_len, len(stream)))
                del stream[:seq_len]
            if None in rows:
                break
            batches.append(rows)
    return batches


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.sampled_from([*range(8), 8]), min_size=30, max_size=80), max_size=4),
    seq_lens=st.lists(st.integers(2, 12), min_size=1, max_size=6).map(sorted),
    num_sequences=st.integers(1, 3),
    cuts=st.sampled_from([[0] * 6, [4] * 6, [100] * 6, [3, 3, 4, 100, 100, 100]]),
)
def test_batches_are_those_of_a_slow_reference(tmp_path_factory, shards, seq_lens, num_sequences, cuts):
    """With sequences and cuts that grow; where a shard has not enough left, the next one begins."""
    folder = tmp_path_factory.mktemp("shards")
    for i, tokens in enumerate(shards):
        write_shard(folder / f"{i}.bin", np.array(tokens, dtype=np.int64))
    expected = slow_rows(shards, seq_lens, num_sequences, cuts)
    lengths = [*zip(seq_lens, cuts, strict=False)]
    if len(expected) < len(seq_lens):
        with pytest.raises(UserError, match=f"{len(expected)} .*{len(seq_lens)}"):
            [*train_gpt.plan_batches(f"{folder}/*.bin", lengths, num_sequences, SMALL)]
    plan = [*train_gpt.plan_batches(f"{folder}/*.bin", lengths[: len(expected)], num_sequences, SMALL)]
    for rank in range(2):
        found = [x for sequences in read(plan, SMALL, rank, 2) for x in sequences]
        for x, row in zip(found, [row for batch in expected for row in batch[rank::2]], strict=True):
            assert (x.tokens.dtype, x.targets.dtype) == (torch.int32, torch.int64)
            assert (x.tokens.tolist(), x.targets[:, 0].tolist()) == (row[:-1], row[1:])


def test_the_loader_starts_with_the_first_batch_and_reads_ahead(tmp_path, monkeypatch):
    """Nothing is planned or read before that: the clock has started."""
    read_numbers, reads = train_gpt.read_numbers, list[int]()
    monkeypatch.setattr(train_gpt, "read_numbers", lambda *args: (reads.append(args[2]), read_numbers(*args))[1])
    cfg = dataclasses.replace(NANO, train_files=make_shards(tmp_path, 2000), batch_tokens=128, train_seq_len=64)
    batches = DistributedDataLoader(cfg, Ranks(), torch.device("cpu")).steps(
        train_gpt.train_cycles(train_gpt.train_batches(cfg), cfg)
    )
    assert reads == []
    next(batches)
    wait_for(lambda: reads == [3, *[65] * 8])  # the header, the first batch, and three ahead: the GPU waits for none


def test_a_resumed_run_reads_what_the_whole_one_does(gpt2, corpus):
    """Sampled classes depend on the tokens of all steps before, if the vocabulary is larger than a sweep."""
    changes = dict(vocab_size=2000, batch_tokens=128, train_files=f"{corpus}/long.bin", prefix_file="")
    cfg = dataclasses.replace(gpt2, **changes)

    def read_from(first: int) -> list:
        loader, batches = DistributedDataLoader(cfg, Ranks(1, 2), torch.device("cpu")), train_gpt.train_batches(cfg)
        loader.skip(itertools.islice(batches, first))
        return [*loader.steps(train_gpt.train_cycles(batches, cfg, first))]

    whole, resumed = (tree_leaves(steps) for steps in (read_from(0)[8:], read_from(8)))
    assert len(resumed) > 100
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize("same_size", [True, False])
def test_a_shard_that_changes_under_a_run_ends_it(tmp_path, same_size):
    """Written to, or replaced by another text of the same length, as pack_text.py does."""
    pattern = make_shards(tmp_path, 4000)
    batches = plan_stream(pattern, [64] * 40)
    sequences = read(batches)
    next(sequences)
    (tmp_path / "other").mkdir()
    make_shards(tmp_path / "other", 4000 if same_size else 4001)
    (tmp_path / "other" / "x_000000.bin").replace(tmp_path / "x_000000.bin")
    with pytest.raises(UserError, match=r"^\S*x_000000.bin: it has changed since the run began[^\n]*$"):
        list(sequences)


def test_a_spoiled_shard_is_refused_by_name(tmp_path):
    pattern, path = make_shards(tmp_path, 100, 100), tmp_path / "x_000001.bin"
    whole = path.read_bytes()
    contents = whole[:-2], whole[:-1], whole + b"x", whole + b"xx", b"PK" + whole[2:], whole[:100], b""
    spoils = [lambda content=content: path.write_bytes(content) for content in contents]
    for spoil in (*spoils, path.mkdir, lambda: path.symlink_to("nowhere")):
        path.rmdir() if path.is_dir() else path.unlink()
        spoil()
        train_gpt.first_version.cache_clear()
        with pytest.raises(UserError, match=r"^\S*x_000001\.bin[^\n]*$"):
            plan_stream(pattern, [10] * 12)
