"""What tests compare with: attention over whole masks; models with random values in every parameter."""

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


@torch.no_grad()
def randomize(gpt: torch.nn.Module) -> torch.nn.Module:
    """Draw every parameter: those that start at zero hide the rest."""
    for name, p in gpt.named_parameters():
        if p.ndim < 2:
            p.uniform_(0.5, 1.5)
        else:
            p.normal_(std=1 if "embed" in name else p.size(-1) ** -0.5)
        if name.endswith(("w2", "w2g", "gate_scale")):  # or factors that grow with the stream let it explode
            p.mul_(0.1)
    return gpt
