"""gathered_attention against dense masked attention and compiled FlexAttention; and nothing leaks into the model's
predictions from later tokens or from other documents."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from test_masks import build, dense_mask, random_docs
from train_gpt import GPT, GatheredMask, gathered_attention

SCALE = 0.12
SHAPES = [(96, 8, 4), (96, 8, 30), (96, 8, 10**9), (96, 16, None), (64, 64, 20)]  # as in test_masks


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of q, k, v (T, H, D), written down."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("window", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_attention_is_dense_attention(shape: tuple, window: int):
    num_tokens, block_size, _ = shape
    docs = random_docs(*shape, seed=1)
    q, k, v, grad = torch.randn(4, num_tokens, 3, 16, dtype=torch.float64)
    qkv = [3 * q, 3 * k, v]  # uneven weights
    for t in qkv:
        t.requires_grad_()
    mask = GatheredMask(build(docs, window, block_size), max(window, 1), torch.float64)
    actual = gathered_attention(*qkv, mask, SCALE)
    expected = dense_attention(*qkv, dense_mask(docs, window, block_size))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    actual_grads, expected_grads = (torch.autograd.grad(y, qkv, grad) for y in (actual, expected))
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-10)


def test_gathered_attention_gradcheck():
    docs = random_docs(16, 4, 6, seed=2)
    qkv = tuple(torch.randn(3, 16, 2, 4, dtype=torch.float64).requires_grad_().unbind())
    mask = GatheredMask(build(docs, 2, 4), 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *qkv: gathered_attention(*qkv, mask, SCALE), qkv)


@pytest.mark.slow  # 20 s where torch has nothing in its compile cache
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling FlexAttention for a CPU takes g++")
def test_compiled_flex_attention_is_gathered_attention():
    """The BlockMask means the same to FlexAttention, block lists included: eager FlexAttention would ignore them."""
    compiled = torch.compile(flex_attention)
    q, k, v = torch.randn(3, 1024, 2, 32)
    q, k = 3 * q, 3 * k
    for doc_len in 30, 300, 10**9, None:
        docs = random_docs(1024, 128, doc_len, seed=0)
        outputs = []
        for window in 0, 1, 2, 3, 7, 14:
            mask = build(docs, window, 128)
            with torch.no_grad():
                flex = compiled(*(t.transpose(0, 1)[None] for t in (q, k, v)), block_mask=mask, scale=SCALE)
            gathered = gathered_attention(q, k, v, GatheredMask(mask, 14, torch.float32), SCALE)
            torch.testing.assert_close(flex[0].transpose(0, 1), gathered, rtol=0, atol=1e-5)
            outputs.append(gathered)
        assert not torch.allclose(outputs[1], outputs[-1]), "windows that make no difference test nothing"


def head_output(gpt: GPT, tokens: Tensor, window: int) -> Tensor:
    """(T, vocabulary): what the losses are made of, each row from one position."""
    with torch.no_grad():
        return gpt.logits(gpt.features(tokens, torch.tensor(window, dtype=torch.int32)))


@pytest.fixture
def leak_cfg(tiny64):
    """As many windows and layers as it takes for a leak to spread over the whole sequence."""
    layouts = dict(attention_layout="LSS-SL", value_embed_layout="01..01")
    return dataclasses.replace(tiny64, **layouts, train_seq_len=128, window_tokens=64)


def different(tokens: Tensor) -> Tensor:
    """Other bytes than `tokens`, none an end of text."""
    return (tokens + torch.randint(1, 256, tokens.shape, dtype=tokens.dtype)) % 256


@pytest.mark.parametrize("eot_every", [None, 29])
@pytest.mark.parametrize("window", [1, 8])
def test_no_token_sees_the_future(leak_cfg, random_gpt, window: int, eot_every: int | None):
    gpt = random_gpt(leak_cfg)
    tokens = torch.randint(256, (128,), dtype=torch.int32)
    if eot_every:
        tokens[5::eot_every] = leak_cfg.eot_token
    before = head_output(gpt, tokens, window)
    for position in 1, 31, 32, 33, 77, 127:
        changed = tokens.clone()
        is_eot = tokens[position:] == leak_cfg.eot_token
        changed[position:] = torch.where(is_eot, leak_cfg.eot_token, different(tokens[position:]))
        after = head_output(gpt, changed, window)
        assert torch.equal(after[:position], before[:position])
        assert torch.all(after[position:][~is_eot] != before[position:][~is_eot])
        # Documents that begin elsewhere change the lists of blocks, and with them the order of summation
        changed[position:] = leak_cfg.eot_token
        after = head_output(gpt, changed, window)
        torch.testing.assert_close(after[:position], before[:position], rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [1, 8])
def test_no_token_sees_another_document(leak_cfg, random_gpt, window: int):
    gpt = random_gpt(leak_cfg)
    tokens = torch.randint(256, (128,), dtype=torch.int32)
    starts = [0, 3, 24, 25, 80, 96, 128]  # the first and the last document are fragments; three begin at a block's edge
    tokens[starts[1:-1]] = leak_cfg.eot_token
    before = head_output(gpt, tokens, window)
    for start, end in itertools.pairwise(starts):
        inside = torch.arange(128) == start  # its end-of-text token stays
        first = start if start == 0 else start + 1
        inside[first:end] = True
        changed = tokens.clone()
        changed[first:end] = different(tokens[first:end])
        after = head_output(gpt, changed, window)
        assert torch.equal(after[~inside], before[~inside])
        assert torch.all(after[first:end] != before[first:end])


def test_window_reaches_as_far_as_it_says(leak_cfg, random_gpt):
    """One long layer: a token is seen from its own block and the window - 1 after it, and from none later."""
    cfg = dataclasses.replace(leak_cfg, attention_layout="L-", value_embed_layout="..")
    gpt = random_gpt(cfg)
    tokens = torch.randint(256, (128,), dtype=torch.int32)
    changed = tokens.clone()
    changed[42] = different(tokens[42])
    for window in 1, 2, 5:
        differs = (head_output(gpt, changed, window) != head_output(gpt, tokens, window)).all(-1)
        sees = (torch.arange(128) >= 42) & (torch.arange(128) < 40 + 8 * window)
        assert torch.equal(differs, sees)
