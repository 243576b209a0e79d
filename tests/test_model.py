"""What is true of any model here: which tokens an output depends on, derivatives, precision, Newton-Schulz.

Formulas and schedules of gpt2 are held by numbers of the public record that it equals (test_root.py).
"""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from test_attention import dense_mask
from train_gpt import GPT, PRESETS, Layer, Rotary
from train_gpt import zeropower_via_newtonschulz5 as zeropower

DOCUMENTS = [0, 5, 6, 11]  # where they begin; the last is longer than the windows
WINDOWS = torch.tensor([36, 16], dtype=torch.int32)


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_products_are_in_the_precision_of_the_activations(request, random_gpt, monkeypatch, preset: str):
    """A factor of shape (1,) in fp32 once made fp32 of nano's stream, and bf16 brought nothing."""
    cfg, seen = dataclasses.replace(request.getfixturevalue(preset), dtype="bfloat16"), []
    gpt = random_gpt(cfg)
    assert gpt.lm_head.dtype == (torch.bfloat16 if cfg.tied_frac else torch.float32), "of its own"
    linear, attend, mlp = train_gpt.linear, train_gpt.attend, train_gpt.ReluSquaredMLP.apply
    monkeypatch.setattr(train_gpt, "linear", lambda x, w: seen.append(x.dtype) or linear(x, w))
    monkeypatch.setattr(train_gpt, "attend", lambda *qkv: seen.extend(t.dtype for t in qkv[:3]) or attend(*qkv))
    note = lambda *args: seen.extend(t.dtype for t in args[:3]) or mlp(*args)  # noqa: E731
    monkeypatch.setattr(train_gpt.ReluSquaredMLP, "apply", note)
    assert gpt.features(text(cfg)[:-1], WINDOWS).dtype == torch.bfloat16
    assert {*seen} == {torch.bfloat16}
    assert len(seen) >= 6 * len(cfg.layers)


def text(cfg) -> Tensor:
    """Return a training sequence and its last target, of a few documents."""
    tokens = torch.randint(cfg.eot_token, (cfg.train_seq_len + 1,))
    tokens[DOCUMENTS] = cfg.eot_token
    return tokens


@torch.no_grad()
def dependence(gpt: GPT, tokens: Tensor, windows: Tensor) -> Tensor:
    """Return (T, T): does the output at a token depend on another, by the change of one token after the other?"""
    before, columns = gpt.features(tokens, windows), []
    for place in range(len(tokens)):
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % gpt.cfg.eot_token
        columns.append((gpt.features(changed, windows) - before).abs().amax(1) > 1e-11)
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("is_strict", [False, True])
def test_no_output_depends_on_later_tokens_or_other_documents(gpt2, random_gpt, is_strict: bool):
    """Long keys, bigrams and the smear look at the token before, which may end another document: strict without."""
    cfg, tokens = dataclasses.replace(gpt2, dtype="float64"), text(gpt2)[:-1].int()
    if is_strict:
        layers = (layer._replace(attention=layer.attention.replace("long", "short")) for layer in cfg.layers)
        cfg = dataclasses.replace(cfg, layers=tuple(layers), smear_gate_inputs=0)
    gpt = random_gpt(cfg)
    if is_strict:
        gpt.bigram_embed.weight.data.zero_()
    seen, docs = dependence(gpt, tokens, WINDOWS), (tokens == cfg.eot_token).cumsum(0)
    in_document = dense_mask(docs, len(docs))
    assert not (seen & ~(in_document if is_strict else torch.ones_like(seen).tril())).any()
    assert torch.equal(seen & in_document, in_document), "through all layers a token sees its whole document"


ONE_INPUT = ["ctx", "x"]  # functions of a tensor with a derivative by hand: the norm, and what MLPs use
FUNCTIONS = [f for f in vars(train_gpt).values() if inspect.isclass(f) and issubclass(f, torch.autograd.Function)]
FUNCTIONS = [f for f in FUNCTIONS if [*inspect.signature(f.forward).parameters] == ONE_INPUT]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_by_hand_are_right_to_rounding(function):
    """The result is kept, as the next matmul does anyway: the input as well would cost memory."""
    x, grad = torch.randn(2, 300, 96, dtype=torch.float64)
    torch.autograd.gradcheck(function.apply, x[:4].clone().requires_grad_())
    assert not function.apply(torch.zeros(2, 96)).any(), "nor NaN"
    for dtype in torch.bfloat16, torch.float32:
        rounded, kept = x.to(dtype).requires_grad_(), []
        exact = rounded.detach().double().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            y = function.apply(rounded)
        assert {t.data_ptr() for t in kept if t.numel() > 300} == {y.data_ptr()}
        ys = y, function.apply(exact)
        pairs = zip(ys, (rounded, exact), strict=True)
        grads = [torch.autograd.grad(y, x, grad.to(dtype).type_as(y))[0] for y, x in pairs]
        for got, want in ys, grads:
            error = (got.double() - want).norm(dim=-1)
            assert (error < 2 * torch.finfo(dtype).eps * want.norm(dim=-1)).all()
            assert got.dtype == dtype


def test_rotary_tables_are_precise(tiny):
    """The angles are right to 2^-20 of themselves, for 128K positions."""
    long = dict(layers=(Layer("paired"),), dtype="bfloat16", head_dim=64, val_seq_len=2**16, val_tokens=2**16)
    cfg = dataclasses.replace(tiny, **long)
    rotary, freqs = Rotary(cfg), train_gpt.rotary_frequencies(0, cfg, torch.float64)[0]
    angles = torch.outer(torch.arange(0, 128 * 1024, 511, dtype=torch.float64), freqs)
    for table, exact in (rotary.cos, angles.cos()), (rotary.sin, angles.sin()):
        assert (table.dtype, len(table)) == (torch.float32, 128 * 1024), "pairs have two positions a token"
        assert torch.all((table[::511] - exact).abs() <= 1e-7 + angles * 2**-20)
    q, k = torch.randn(2, 400, 2, 64).bfloat16()
    for got, want in zip(rotary(q, k, 2), rotary(q.float(), k.float(), 2), strict=True):
        assert torch.equal(got, want.bfloat16()), "it computes in fp32"


def test_tables_part_right_after_a_step_of_adam():
    """The last tied step is the second of a pair, for any number of steps."""
    for steps in range(1, 2001):
        cfg = dataclasses.replace(PRESETS["gpt2"], num_iterations=steps, extension_steps=0)
        last = round(2 * steps / 3) | 1
        assert [train_gpt.is_tied(step, cfg) for step in (0, last, last + 1)] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1e15])
@pytest.mark.parametrize("size", [(64, 64), (48, 160)], ids=str)
def test_singular_values_end_near_1_and_vectors_stay(size: tuple, scale: float, dtype: torch.dtype):
    """Each matrix of a stack has its own norm; a zero one stays zero, and nothing overflows."""
    norms = scale * torch.tensor([1, 10, 1000, 0])
    g = F.normalize(torch.randn(4, *size, dtype=torch.float64), dim=(1, 2)) * norms[:, None, None]
    x = zeropower(g.float(), dtype)
    assert (x.dtype, x[3].any()) == (dtype, False)
    u, _, vh = torch.linalg.svd(g[:3], full_matrices=False)
    turned = u.mT @ x[:3].double() @ vh.mT
    values, margin = turned.diagonal(dim1=1, dim2=2), 0.05 if dtype == torch.bfloat16 else 1e-3
    assert values.max() <= 1.1412 + margin
    assert values[:, : size[0] - 2].min() >= 0.8588 - margin, "but for the smallest"
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=2 * margin)
