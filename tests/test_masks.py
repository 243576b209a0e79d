"""document_block_mask and GatheredMask against oracles written from the definition of record 21's masks.

A block is visible where a token of it is: causal, same document. It is full where all are (never the diagonal),
else partial. The visible blocks of either kind are listed nearest first, and a window limits the two counts.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import train_gpt
from train_gpt import GatheredMask, document_block_mask, window_blocks

WINDOWS = range(21)
# tokens, tokens per block, tokens of a typical document; None: a document begins at every block edge
SHAPES = [
    (48, 4, 2),
    (48, 4, 6),
    (48, 4, 30),
    (48, 4, 10**9),
    (48, 4, None),
    (8, 8, 4),
    (16, 1, 3),
    (160, 8, 5),
    (160, 8, 40),
    (256, 16, 100),
]


def random_docs(num_tokens: int, block_size: int, doc_len: int | None, seed: int) -> Tensor:
    """Document numbers as the model counts them: one up at every end-of-text token."""
    generator = torch.Generator().manual_seed(seed)
    if doc_len is None:
        is_eot = torch.arange(num_tokens) % block_size == 0
        is_eot &= torch.rand(num_tokens, generator=generator) < 0.6
    else:
        is_eot = torch.rand(num_tokens, generator=generator) < 1 / doc_len
    if seed % 2:  # a run of end-of-text tokens, each a document of its own
        start = int(torch.randint(num_tokens, (), generator=generator))
        is_eot[start : start + block_size + 2] = True
    return is_eot.cumsum(0, dtype=torch.int32)


CASES = [
    pytest.param(random_docs(*shape, seed), shape[1], id=f"{shape[0]}-{shape[1]}-{shape[2]}-{seed}")
    for shape in SHAPES
    for seed in range(2)
]


def build(docs: Tensor, window: int, block_size: int) -> BlockMask:
    return document_block_mask(docs, torch.tensor(window, dtype=torch.int32), block_size)


def listed(counts: Tensor, indices: Tensor) -> list[list[int]]:
    return [row[:count].tolist() for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]


def listed_blocks(mask: BlockMask) -> tuple[list[list[int]], list[list[int]]]:
    """The key blocks of every query block: partial ones, full ones."""
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    return partial, listed(mask.full_kv_num_blocks, mask.full_kv_indices)


def dense_mask(docs: Tensor, window: int, block_size: int) -> Tensor:
    """The definition, token by token: causal, same document, less than max(window, 1) blocks back."""
    position = torch.arange(len(docs))
    block = position // block_size
    causal = position[:, None] >= position[None, :]
    near = block[:, None] - block[None, :] < max(window, 1)
    return causal & near & (docs[:, None] == docs[None, :])


def tiles(dense: Tensor, block_size: int) -> Tensor:
    """(T, T) as (query block, key block, query, key)."""
    return dense.unflatten(1, (-1, block_size)).unflatten(0, (-1, block_size)).transpose(1, 2)


def record_lists(docs: Tensor, window: int, block_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The record's rule, block by block: first and last document of each block, then counts clamped to the window."""
    blocks = [(row[0], row[-1]) for row in docs.view(-1, block_size).tolist()]
    partial, full = [], []
    for q, (low, high) in enumerate(blocks):
        visible = [k for k in reversed(range(q + 1)) if low <= blocks[k][1] and high >= blocks[k][0]]
        q_full = [k for k in visible if k < q and low == blocks[k][1] and high == blocks[k][0]]
        q_partial = [k for k in visible if k not in q_full]
        partial.append(q_partial[: max(window - len(q_full), 1)])
        full.append(q_full[: max(window - 1, 0)])
    return partial, full


@pytest.mark.parametrize(("docs", "block_size"), CASES)
def test_lists_are_the_records(docs: Tensor, block_size: int):
    for window in WINDOWS:
        assert listed_blocks(build(docs, window, block_size)) == record_lists(docs, window, block_size)


@pytest.mark.parametrize(("docs", "block_size"), CASES)
def test_lists_are_well_formed(docs: Tensor, block_size: int):
    num_blocks = len(docs) // block_size
    for window in WINDOWS:
        mask = build(docs, window, block_size)
        for q, (partial, full) in enumerate(zip(*listed_blocks(mask), strict=True)):
            for blocks in partial, full:
                assert blocks == sorted(set(blocks), reverse=True), "nearest first, none twice"
            assert not set(partial) & set(full)
            assert partial[0] == q, "every query sees itself"
            assert max(full, default=-1) < q
        for name in "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices":
            tensor = getattr(mask, name)
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            # Kernels and `gather` read entries beyond the counts, too; FlexAttention on a CPU crashes at a count of -1
            assert tensor.min() >= 0
            assert tensor.max() < num_blocks + ("num" in name)


@pytest.mark.parametrize(("docs", "block_size"), CASES)
def test_blocks_with_element_mask_are_the_definition(docs: Tensor, block_size: int):
    """No block too few, none too many, and full only where no element of it is masked."""
    position = torch.arange(len(docs))
    num_blocks = len(docs) // block_size
    for window in WINDOWS:
        mask, dense = build(docs, window, block_size), dense_mask(docs, window, block_size)
        partial, full = (
            torch.stack([torch.isin(torch.arange(num_blocks), torch.tensor(row)) for row in rows])
            for rows in listed_blocks(mask)
        )
        assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)
        in_list = (partial | full).repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
        element = mask.mask_mod(None, None, position[:, None], position[None, :])
        assert torch.equal(in_list & element, dense)
        assert torch.equal(partial | full, tiles(dense, block_size).any(-1).any(-1))
        diagonal = torch.eye(num_blocks, dtype=torch.bool)
        assert torch.equal(full, tiles(dense, block_size).all(-1).all(-1) & ~diagonal)


@pytest.mark.parametrize("doc_len", [40, 700, 20_000, None], ids=str)
def test_lists_at_the_length_of_validation(doc_len: int | None):
    """262,144 tokens: the record's rule on whole tensors, its order by sorting a 0/1 mask."""
    num_tokens, block_size = 256 * 1024, 128
    docs = random_docs(num_tokens, block_size, doc_len, seed=1)
    low, high = docs[::block_size], docs[block_size - 1 :: block_size]
    q, k = torch.meshgrid(torch.arange(len(low)), torch.arange(len(low)), indexing="ij")
    visible = (q >= k) & (low[q] <= high[k]) & (high[q] >= low[k])
    is_full = (q > k) & (low[q] == high[k]) & (high[q] == low[k])
    lists = {"": visible & ~is_full, "full_": is_full}
    order = {kind: m.int().argsort(dim=1, stable=True).flip(1) for kind, m in lists.items()}
    num_full, num_partial = is_full.sum(1), (visible & ~is_full).sum(1)
    for window in (0, 1, 7, 14, 5000):
        mask = document_block_mask(docs, torch.tensor(window, dtype=torch.int32), block_size, for_flex=False)
        assert mask.q_indices is None, "these lists, which are torch's work, take a second each"
        counts = {
            "": torch.minimum(num_partial, (window - num_full).clamp(min=1)),
            "full_": num_full.clamp(max=max(window - 1, 0)),
        }
        for kind, count in counts.items():
            assert torch.equal(getattr(mask, f"{kind}kv_num_blocks")[0, 0].long(), count)
            is_listed = torch.arange(len(low)) < count[:, None]
            indices = getattr(mask, f"{kind}kv_indices")[0, 0].long()
            assert torch.equal(indices[is_listed], order[kind][is_listed])


@pytest.mark.parametrize("max_blocks", [1, 3, 20])
@pytest.mark.parametrize(("docs", "block_size"), CASES)
def test_gathered_mask_is_the_definition(docs: Tensor, block_size: int, max_blocks: int):
    """In every window that fits into `max_blocks`, each visible key is gathered exactly once, and no other is seen."""
    num_blocks = len(docs) // block_size
    width = min(max_blocks, num_blocks)
    for window in range(max_blocks + 1):
        gathered = GatheredMask(build(docs, window, block_size), max_blocks, torch.float64)
        assert gathered.kv_blocks.shape == (num_blocks, width)
        assert gathered.bias.shape == (num_blocks, 1, block_size, width * block_size)
        assert gathered.bias.dtype == torch.float64
        assert torch.all((gathered.bias == 0) | (gathered.bias == -torch.inf))
        seen = (gathered.bias[:, 0] == 0).int().unflatten(-1, (width, block_size)).transpose(1, 2)
        times_seen = torch.zeros(num_blocks, num_blocks, block_size, block_size, dtype=torch.int32)
        for slot in range(width):
            times_seen[torch.arange(num_blocks), gathered.kv_blocks[:, slot]] += seen[:, slot]
        assert torch.equal(times_seen, tiles(dense_mask(docs, window, block_size), block_size).int())


@pytest.mark.parametrize("window_tokens", [8, 40, 64, 500])
def test_model_masks_hold_every_window_of_the_run(tiny, window_tokens: int):
    """Long and short masks from tokens; GatheredMask is as wide as the last window, so no step's window is cut."""
    cfg = dataclasses.replace(tiny, window_tokens=window_tokens)
    gpt = train_gpt.GPT(cfg)
    tokens = torch.randint(256, (cfg.train_seq_len,), dtype=torch.int32)
    tokens[[13, 14, 40]] = cfg.eot_token
    docs = torch.tensor([0] * 13 + [1] + [2] * 26 + [3] * 24)
    for step in range(cfg.num_iterations + 1):
        window = window_blocks(step, cfg)
        masks = gpt.attention_masks(tokens, torch.tensor(window, dtype=torch.int32))
        for letter, blocks in ("L", window), ("S", window // 2):
            num_visible = (masks[letter].bias == 0).sum((1, 3)).flatten()
            assert torch.equal(num_visible, dense_mask(docs, blocks, cfg.block_size).sum(1)), (step, letter)
