"""Attention over whole masks, for tests to compare with."""

import torch
from torch import Tensor


def dense_mask(docs: Tensor, window: int) -> Tensor:
    """Return (T, T): the same document, from `window` tokens back to the token itself."""
    back = torch.arange(len(docs))[:, None] - torch.arange(len(docs))
    return (back >= 0) & (back <= window) & (docs[:, None] == docs[None, :])


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Write down softmax attention of q, k, v (T, H, D); v has a D of its own."""
    weights = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)
