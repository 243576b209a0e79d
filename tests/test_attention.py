"""Masks against dense ones, and gathered attention, also of paired heads, against dense attention."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from train_gpt import GatheredMask, attend, document_block_mask

# tokens, tokens per block, tokens of a typical document; None: documents begin at block edges
SHAPES = [(48, 4, 2), (48, 4, 6), (48, 4, 30), (48, 4, 10**9), (48, 4, None)]
SHAPES += [(8, 8, 4), (16, 1, 3), (160, 8, 5), (160, 8, 40), (256, 16, 100)]


def random_docs(num_tokens: int, mask_block: int, doc_len: int | None, seed: int) -> Tensor:
    """Count documents as the model does: one up at every end-of-text token."""
    generator = torch.Generator().manual_seed(seed)
    chance = 1 / doc_len if doc_len else 0.6 * (torch.arange(num_tokens) % mask_block == 0)
    is_eot = torch.rand(num_tokens, generator=generator) < chance
    if seed % 2:  # a run of end-of-text tokens, each a document of its own
        start = int(torch.randint(num_tokens, (), generator=generator))
        is_eot[start : start + mask_block + 2] = True
    return is_eot.cumsum(0, dtype=torch.int32)


SEEDED = itertools.product(SHAPES, range(2))
CASES = [pytest.param(random_docs(*shape, seed), shape[1], id=f"{shape}-{seed}") for shape, seed in SEEDED]


def build(docs: Tensor, window: int, mask_block: int) -> BlockMask:
    return document_block_mask(docs, torch.tensor(window, dtype=torch.int32), mask_block)


def dense_mask(docs: Tensor, window: int) -> Tensor:
    """Return (T, T): the same document, from `window` tokens back to the token itself."""
    back = torch.arange(len(docs))[:, None] - torch.arange(len(docs))
    return (back >= 0) & (back <= window) & (docs[:, None] == docs[None, :])


def as_dense(mask: BlockMask, kind: str) -> Tensor:
    """Return which key blocks each query block has in its list."""
    counts, indices = (getattr(mask, kind + name)[0, 0] for name in ("kv_num_blocks", "kv_indices"))
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (counts, indices))
    # Kernels and `gather` read entries beyond the counts, too; FlexAttention on a CPU crashes at a count of -1
    assert min(counts.min(), indices.min()) >= 0
    assert indices.max() < len(counts)
    is_listed = torch.arange(len(counts)) < counts[:, None]
    assert (indices.diff(dim=1)[is_listed[:, 1:]] < 0).all(), "nearest first, none twice"
    return torch.zeros(is_listed.shape).scatter_add(1, indices.long(), is_listed.float()).bool()


@pytest.mark.parametrize(("docs", "mask_block"), CASES)
def test_blocks_with_element_mask_are_the_definition(docs: Tensor, mask_block: int):
    """No block too few, none too many; full where no element of a block before the diagonal is masked."""
    position = torch.arange(len(docs))
    for window in {0, 1, *(n * mask_block + i for n in (1, 2, 5) for i in (-1, 0, 1)), len(docs) - 1, 2 * len(docs)}:
        mask, dense = build(docs, window, mask_block), dense_mask(docs, window)
        partial, full = as_dense(mask, ""), as_dense(mask, "full_")
        assert partial.diagonal().all(), "every query block has a partial one: itself"
        blocks = dense.unflatten(1, (-1, mask_block)).unflatten(0, (-1, mask_block))
        assert torch.equal(full, blocks.all(1).all(-1).tril(-1))
        assert torch.equal(partial, blocks.any(1).any(-1) & ~full)
        in_list = (partial | full).repeat_interleave(mask_block, 0).repeat_interleave(mask_block, 1)
        assert torch.equal(in_list & mask.mask_mod(None, None, position[:, None], position[None, :]), dense)
        assert mask.q_indices is not None, "FlexAttention's backward pass takes the lists by key block"
        assert torch.equal(mask.q_num_blocks[0, 0].long(), partial.sum(0))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Write down softmax attention of q, k, v (T, H, D)."""
    weights = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("window", [0, 7, 8, 30])
@pytest.mark.parametrize(("docs", "mask_block"), CASES)
def test_gathered_attention_is_dense_attention(docs: Tensor, mask_block: int, window: int):
    """A key that is gathered twice, or not at all, changes the result; the window may be narrower than the widest."""
    *qkv, grad = torch.randn(4, len(docs), 3, 16, dtype=torch.float64).unbind()
    qkv = [(factor * t).requires_grad_() for factor, t in zip((1, 0.5, 1), qkv, strict=True)]  # uneven weights
    expected = dense_attention(*qkv, dense_mask(docs, window))
    expected_grads = torch.autograd.grad(expected, qkv, grad)
    for max_blocks in 1 - (-window // mask_block), window + 3:
        mask = GatheredMask(build(docs, window, mask_block), max_blocks, torch.float64)
        assert mask.bias.shape == (len(docs) // mask_block, mask_block, mask.kv_blocks.size(1) * mask_block)
        actual = mask.attend(*qkv)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(actual, qkv, grad), expected_grads, rtol=0, atol=1e-11)


def test_paired_heads_attend_as_one_of_twice_the_length():
    """Heads 0 and 2 of four alternate in one sequence, and so do heads 1 and 3; a token's second sees its first."""
    q, k, v = torch.randn(3, 24, 4, 16, dtype=torch.float64).unbind()
    docs = random_docs(24, 4, 9, seed=0).repeat_interleave(2)
    actual = attend(q, k, v, GatheredMask(build(docs, 6, 4), 12, torch.float64), heads_per_pair=2)
    for pair in (0, 1):
        slots = (t[:, [pair, pair + 2]].reshape(48, 1, 16) for t in (q, k, v))
        expected = dense_attention(*slots, dense_mask(docs, 6)).view(24, 2, 16)
        torch.testing.assert_close(actual[:, [pair, pair + 2]], expected, rtol=0, atol=1e-12)
