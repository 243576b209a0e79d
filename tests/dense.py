"""What tests compare with: plain attention and head; models with random values in every parameter."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAP = 6.0, 9.0, 1.5


def dense_mask(docs: Tensor, window: int) -> Tensor:
    """Return (T, T): the same document, from `window` tokens back to the token itself."""
    back = torch.arange(len(docs))[:, None] - torch.arange(len(docs))
    return (back >= 0) & (back <= window) & (docs[:, None] == docs[None, :])


def find_doc_starts(docs: Tensor) -> Tensor:
    """Return where the document of each token begins, for documents that are counted."""
    return torch.searchsorted(docs, docs).int()


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Write down softmax attention of q, k, v (T, H, D); v has a D of its own."""
    weights = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


def dense_pointer(y, weight, sink, gain, tokens: Tensor, next_tokens: Tensor, docs: Tensor, block: int) -> Tensor:
    """Return the pointer's weights (T, 2) on tokens that equal the next one, and on the sink."""
    w_q, w_k = weight.chunk(2)
    q, k = (F.rms_norm(y @ w.T, (len(w),)) for w in (w_q, w_k))
    t = torch.arange(len(tokens), device=y.device)
    sees = (t < t[:, None]) & (t >= (t[:, None] // block - 1) * block) & (docs == docs[:, None])
    scores = torch.cat([(gain * q @ k.T).masked_fill(~sees, -torch.inf), (gain * q @ sink)[:, None]], dim=1)
    weights = (scores / len(sink) ** 0.5).softmax(1)
    return torch.stack([(weights[:, :-1] * (tokens == next_tokens[:, None])).sum(1), weights[:, -1]], dim=1)


def with_gradients(function: Callable, *inputs: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return what the function of `inputs` returns, and their gradients."""
    inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, grad if grad is None else grad.to(y.dtype))


def softcapped_loss(z: Tensor, targets: Tensor, weights: Tensor, cap=CAP, pointer=None, copy: int = -1) -> Tensor:
    """Return the loss of logits. pointer (T, 2): the weights on the next token and on the sink; copy: its row."""
    softcap, span, shift = cap
    logits = span * torch.sigmoid((z + shift) * 2 / softcap)
    losses = [F.cross_entropy(logits[: len(z) - k], targets[k:], reduction="sum") for k in range(len(weights))]
    if pointer is not None:
        p = logits.softmax(-1)
        alpha, of_next = p[:, copy], p.gather(1, targets[:, None])[:, 0]
        copied, sink = pointer.to(z.dtype).unbind(1)
        mixed = of_next / (1 - alpha) * (1 - alpha * (1 - sink)) + alpha * copied
        losses[0] = -(mixed + 1e-9).log().sum()  # with a copy's row in the softmax of all others
    beyond = torch.stack([logits[len(z) - k :].logsumexp(-1).sum() for k in range(len(weights))])  # gradients count it
    return weights.to(z.dtype) @ (torch.stack(losses) + beyond - beyond.detach())


def dense_head(x, w, targets: Tensor, weights: Tensor, cap=CAP, *pointer: Tensor, copy: int = -1) -> tuple[Tensor, ...]:
    """Return the loss of all logits (T, V) and its gradients by x, w and any pointer, by autograd."""
    wide = torch.promote_types(w.dtype, torch.float32)
    z = lambda x, w: F.linear(x, w.type_as(x)).to(wide)  # noqa: E731
    loss = lambda x, w, *pointer: softcapped_loss(z(x, w), targets, weights, cap, *pointer, copy=copy)  # noqa: E731
    return with_gradients(loss, x, w, *pointer)


def assert_trained_alike(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """Compare trained tensors by name, to `limit` of the largest number of each.

    An Adam step divides by the root of v: where a gradient is nearly zero, the order of sums decides a visible part of
    a step. So one number of a thousand may be further off, by a hundredth of a step of tables.
    """
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        off = (found[name] - wanted).abs() / wanted.abs().max().clamp(min=1e-9)
        count = int((off > limit).sum())
        assert count <= off.numel() // 1000, f"{name}: {count} of {off.numel()} numbers, by {off.max():.1e} at most"
        assert off.max() <= 1e-3, f"{name}: a number by {off.max():.1e}"


def quantized(t: Tensor, scale: float | Tensor, kind: torch.dtype) -> Tensor:
    """Return what FP8 makes of numbers, in float64."""
    limit = torch.finfo(kind).max
    return (t * scale).clamp(-limit, limit).to(kind).double() / scale


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
