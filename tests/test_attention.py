"""Lists of blocks against dense masks. test_gpu has attention in bands, test_formulas that of whole layers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dense import dense_mask, find_doc_starts
from train_gpt import causal_block_mask, first_visible_keys


@st.composite
def cases(draw) -> tuple[Tensor, int, int]:
    """Draw the documents of a sequence, the tokens of a block, and a window. Documents are counted as in the model."""
    block, blocks = draw(st.sampled_from([1, 4, 8])), draw(st.integers(1, 12))
    places = st.integers(0, block * blocks - 1) | st.integers(0, blocks - 1).map(lambda i: i * block)
    is_eot = torch.zeros(block * blocks)
    is_eot[draw(st.lists(places, max_size=2 * blocks))] = 1
    return is_eot.cumsum(0).int(), block, draw(st.integers(0, block * blocks + 9))


def as_dense(mask: BlockMask, kind: str) -> Tensor:
    """Return which blocks each block has in its list of a kind: kv, full_kv, q or full_q."""
    counts, indices = (getattr(mask, kind + name)[0, 0] for name in ("_num_blocks", "_indices"))
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (counts, indices))
    # Kernels and `gather` read entries beyond the counts, too; FlexAttention on a CPU crashes at a count of -1
    assert min(counts.min(), indices.min()) >= 0
    assert indices.max() < len(counts)
    is_listed = torch.arange(len(counts)) < counts[:, None]
    distances = (indices - torch.arange(len(counts))[:, None]).abs()
    assert (distances.diff(dim=1)[is_listed[:, 1:]] > 0).all(), "nearest first, none twice"
    return torch.zeros(is_listed.shape).scatter_add(1, indices.long(), is_listed.float()).bool()


@settings(max_examples=150, deadline=None)
@given(case=cases(), also=st.sampled_from([None, lambda b, h, q, kv: kv % 2 == h]))
def test_blocks_with_element_mask_are_the_definition(case, also):
    """No block too few, none too many; full where no element of a block before the diagonal is masked.

    A full block would not ask for a further condition, so there is none then.
    """
    docs, block, window = case
    position = torch.arange(len(docs))
    start = first_visible_keys(find_doc_starts(docs), torch.tensor(window, dtype=torch.int32))
    mask, dense = causal_block_mask(start, block, extra_mask_mod=also), dense_mask(docs, window)
    partial, full = as_dense(mask, "kv"), as_dense(mask, "full_kv")
    assert partial.diagonal().all(), "every query block has a partial one: itself"
    blocks = dense.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    assert torch.equal(full, blocks.all(1).all(-1).tril(-1) & (also is None))
    assert torch.equal(partial, blocks.any(1).any(-1) & ~full)
    in_list = (partial | full).repeat_interleave(block, 0).repeat_interleave(block, 1)
    seen = in_list & mask.mask_mod(None, 1, position[:, None], position[None, :])
    assert torch.equal(seen, dense & (also is None or position % 2 == 1))
    assert torch.equal(as_dense(mask, "q"), partial.T), "the backward pass takes the lists by key block"
    assert torch.equal(as_dense(mask, "full_q"), full.T)
