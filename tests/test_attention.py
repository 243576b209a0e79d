"""Gathered attention against dense attention, compiled FlexAttention against it, and no leaks through the model."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import train_gpt
from test_masks import CASES, build, dense_mask, random_docs
from train_gpt import GPT, CausalSelfAttention, GatheredMask, Rotary

SCALE = 0.12


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Write down softmax attention of q, k, v (T, H, D)."""
    weights = (SCALE * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(~mask, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("window", [0, 1, 2, 5, 12])
@pytest.mark.parametrize(("docs", "block_size"), CASES)
def test_gathered_attention_is_dense_attention(docs: Tensor, block_size: int, window: int):
    """A key that is gathered twice, or not at all, changes the result; the window may be narrower than the widest."""
    *qkv, grad = torch.randn(4, len(docs), 3, 16, dtype=torch.float64).unbind()
    qkv = [(factor * t).requires_grad_() for factor, t in zip((3, 3, 1), qkv, strict=True)]  # uneven weights
    expected = dense_attention(*qkv, dense_mask(docs, window, block_size))
    expected_grads = torch.autograd.grad(expected, qkv, grad)
    for max_blocks in max(window, 1), window + 3:
        mask = GatheredMask(build(docs, window, block_size), max_blocks, torch.float64)
        assert mask.bias.shape == (len(docs) // block_size, 1, block_size, mask.kv_blocks.size(1) * block_size)
        actual = mask.attend(*qkv, SCALE)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(actual, qkv, grad), expected_grads, rtol=0, atol=1e-11)


@pytest.mark.slow  # 20 s where torch has nothing in its compile cache
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling FlexAttention for a CPU takes g++")
def test_attention_by_compiled_flex_attention_is_the_gathered_one(monkeypatch: pytest.MonkeyPatch):
    """The BlockMask means the same to FlexAttention, block lists included: eager FlexAttention would ignore them."""
    # Alone: fused with what follows, FlexAttention's template for CPUs fails
    monkeypatch.setattr(train_gpt, "flex_attention", torch.compile(flex_attention))
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], model_dim=64, head_dim=32, train_seq_len=1024)
    attention, rotary = CausalSelfAttention(cfg), Rotary(32, 1024, 1024.0)
    attention.c_proj.data.normal_()
    attention.qkv_w.data.mul_(2)
    x, value_embed = torch.randn(2, 1024, 64)
    for doc_len in 30, 300, 10**9, None:
        docs, outputs = random_docs(1024, 128, doc_len, seed=0), []
        for window in 0, 1, 2, 3, 7, 14:
            mask = build(docs, window, 128)
            with torch.no_grad():
                flex = attention(x, value_embed, rotary, mask)
                outputs.append(attention(x, value_embed, rotary, GatheredMask(mask, 14, torch.float32)))
            torch.testing.assert_close(flex, outputs[-1], rtol=0, atol=1e-4)
        assert not torch.allclose(outputs[1], outputs[-1]), "windows that make no difference test nothing"


def features(gpt: GPT, tokens: Tensor, window: int) -> Tensor:
    with torch.no_grad():
        return gpt.features(tokens, torch.tensor(window, dtype=torch.int32))


def different(tokens: Tensor) -> Tensor:
    """Replace `tokens` by other bytes, none an end of text."""
    return (tokens + torch.randint(1, 256, tokens.shape, dtype=tokens.dtype)) % 256


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize(("starts", "bigram_rows"), [([0, 128], 61), ([0, 3, 24, 25, 80, 96, 128], 0)])
def test_no_token_sees_the_future_or_another_document(tiny64, random_gpt, window: int, starts: list, bigram_rows: int):
    """Documents without bigrams, as an end-of-text token forms a pair with the token before it."""
    layouts = dict(attention_layout="LSS-SL", value_embed_layout="01..01", skip_layout="...210")  # spread every leak
    gpt = random_gpt(dataclasses.replace(tiny64, **layouts, window_tokens=64, bigram_rows=bigram_rows))
    tokens, position = torch.randint(256, (128,), dtype=torch.int32), torch.arange(128)
    tokens[starts[1:-1]] = tiny64.eot_token
    before = features(gpt, tokens, window)
    for start, end in itertools.pairwise(starts):
        for first in {start, (start + end) // 2, (start + end) // 2 + 1, end - 1}:
            may_change = (position >= first) & (position < end)
            changes = may_change & (tokens != tiny64.eot_token)
            after = features(gpt, torch.where(changes, different(tokens), tokens), window)
            assert torch.equal(after[~may_change], before[~may_change])
            assert torch.all(after[changes] != before[changes])
            # Documents that begin elsewhere change the lists of blocks, and with them the order of summation
            after = features(gpt, tokens.where(position < first, tiny64.eot_token), window)
            torch.testing.assert_close(after[:first], before[:first], rtol=0, atol=1e-11)
