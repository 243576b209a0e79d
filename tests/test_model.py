"""What is true of any model here: which tokens an output depends on, gradients, precision, schedules, Newton-Schulz.

The formulas themselves are held by the frozen records, with numbers of the public scripts: an idea may change them.
"""

import dataclasses
import functools
import inspect
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from test_attention import dense_mask
from train_gpt import GPT, POLAR_EXPRESS, PRESETS, Rotary, norm, rotary_frequencies
from train_gpt import zeropower_via_newtonschulz5 as zeropower

# Two stages and the last validation, with windows of their own; YaRN bends the frequencies
STAGES = dict(batch_factors=(1, 1), lr_factors=(1.0, 1.0), window_tokens=(20, 36), final_window_tokens=50)
STAGES |= dict(max_doc_len=(0, 0), num_iterations=8, extension_steps=0, yarn_turns=1.5)
PLAIN = dict(value_embed_layout=".", skip_layout=".", key_offset=False, bigram_rows=0)
# Every part of gpt2; bigrams whose hash overflows; logits that the softcap bends
DEEP = dict(attention_layout="PLS-LS", value_embed_layout="0.1.01", skip_layout="..0.1.", mudd_layers="31")
DEEP |= dict(source_layout="....33", xsa_layout=".xx...", gate_layout=".x...x", dc_layout=".....x", dc_keys=8)
DEEP |= dict(gate_layer=2, sign_rows=7, value_gate_inputs=6, smear_gate_inputs=6)
DEEP |= dict(bigram_rows=90_001, head_std=0.3, lm_head_softcap=3.0, softcap_shift=1.0, lm_head_slice=24)
DOCUMENTS = [0, 5, 6, 11]  # where they begin; the last is longer than the windows


@pytest.mark.parametrize("tied_frac", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_precision_of_parameters(tiny, dtype: str, tied_frac: float):
    """Tables are in the precision of the activations; all else, also a head of its own, in fp32 at least."""
    gpt = GPT(dataclasses.replace(tiny, dtype=dtype, tied_frac=tied_frac, head_std=tied_frac))
    for name, tensor in (*gpt.named_parameters(), *gpt.named_buffers()):
        is_table = "embed" in name.replace("embed_lambdas", "") or (name == "lm_head" and tied_frac)
        assert tensor.dtype == getattr(torch, dtype if is_table or dtype == "float64" else "float32"), name


@pytest.mark.parametrize("ideas", [{}, DEEP], ids=["nano", "all"])
def test_products_are_in_the_precision_of_the_activations(tiny, random_gpt, monkeypatch, ideas: dict):
    """A factor of shape (1,) in fp32 once made fp32 of nano's stream, and bf16 brought nothing."""
    cfg, seen = train_gpt.resolve(dataclasses.replace(tiny, dtype="bfloat16", **ideas)), []
    linear, attend = train_gpt.linear, train_gpt.attend
    monkeypatch.setattr(train_gpt, "linear", lambda x, w: seen.append(x.dtype) or linear(x, w))
    monkeypatch.setattr(train_gpt, "attend", lambda *qkv: seen.extend(t.dtype for t in qkv[:3]) or attend(*qkv))
    windows = torch.tensor([16, 8], dtype=torch.int32)
    assert random_gpt(cfg).features(text(cfg)[:-1], windows).dtype == torch.bfloat16
    assert {*seen} == {torch.bfloat16}
    assert len(seen) > 7


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


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("letter", "LSP-")
def test_a_layer_sees_its_window_of_its_document(tiny64, random_gpt, letter: str, step: int):
    """Each of two paired heads has a slot for each token, so the window reaches half as many tokens."""
    gpt = random_gpt(cfg := dataclasses.replace(tiny64, **STAGES | PLAIN, attention_layout=letter))
    long, short = train_gpt.attention_windows(step, cfg)
    tokens = text(cfg)[:-1].int()
    seen = dependence(gpt, tokens, torch.tensor([long, short], dtype=torch.int32))
    docs, is_inside = (tokens == cfg.eot_token).cumsum(0), tokens != cfg.eot_token
    expected = dense_mask(docs, {"L": long, "S": short, "P": (short + 1) // 2, "-": 0}[letter])
    assert torch.equal(seen[:, is_inside], expected[:, is_inside])
    assert long > short > 0


@pytest.mark.parametrize("is_strict", [False, True])
def test_no_output_depends_on_later_tokens_or_other_documents(tiny64, random_gpt, is_strict: bool):
    """Keys, bigrams and the smear look at the token before, which may end another document, unless they are off."""
    off = dict(key_offset=False, bigram_rows=0, smear_gate_inputs=0) if is_strict else {}
    gpt = random_gpt(cfg := dataclasses.replace(tiny64, **STAGES | DEEP | off))
    tokens, windows = text(cfg)[:-1].int(), torch.tensor(train_gpt.attention_windows(8, cfg), dtype=torch.int32)
    seen, docs = dependence(gpt, tokens, windows), (tokens == cfg.eot_token).cumsum(0)
    in_document = dense_mask(docs, len(docs))
    assert not (seen & ~(in_document if is_strict else torch.ones_like(seen).tril())).any()
    assert torch.equal(seen & in_document, in_document), "through six layers a token sees its whole document"


def test_gradients_are_those_of_the_loss(tiny64, random_gpt):
    """Compare with the change of the loss as each parameter takes a small step to either side."""
    gpt = random_gpt(cfg := dataclasses.replace(tiny64, **STAGES | DEEP))
    gpt.rotary.set_stage(1, cfg)
    sample, weights = text(cfg), torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    targets = train_gpt.next_targets(sample[1:], 3).clamp(min=-1)  # beyond the end the gradient is another, on purpose
    inputs = (sample[:-1].int(), targets, torch.tensor([36, 16], dtype=torch.int32), weights)
    gpt(*inputs).backward()
    for name, p in gpt.named_parameters():
        direction = torch.randn_like(p) + p.grad / p.grad.norm()
        losses, values = [], p.detach().clone()
        with torch.no_grad():
            for size in (1e-5, -1e-5):
                p.copy_(values + size * direction)
                losses.append(gpt(*inputs).item())
            p.copy_(values)
        slope = (p.grad * direction).sum().item()
        assert abs(slope) > 1e-4, f"{name}: the test would not see it"
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-6 * p.grad.norm().item()), name


ONE_INPUT = ["ctx", "x"]  # functions of a tensor with a derivative by hand: the norm, and what MLPs use
FUNCTIONS = [f for f in vars(train_gpt).values() if inspect.isclass(f) and issubclass(f, torch.autograd.Function)]
FUNCTIONS = [f for f in FUNCTIONS if [*inspect.signature(f.forward).parameters] == ONE_INPUT]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_by_hand_are_right_to_rounding(function):
    x, grad = torch.randn(2, 300, 96, dtype=torch.float64)
    torch.autograd.gradcheck(function.apply, x[:4].clone().requires_grad_())
    for dtype in torch.bfloat16, torch.float32:
        rounded = x.to(dtype).requires_grad_()
        exact = rounded.detach().double().requires_grad_()
        ys = function.apply(rounded), function.apply(exact)
        pairs = zip(ys, (rounded, exact), strict=True)
        grads = [torch.autograd.grad(y, x, grad.to(dtype).type_as(y))[0] for y, x in pairs]
        for got, want in ys, grads:
            error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
            assert error.max() < 2 * torch.finfo(dtype).eps
            assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_torch_bit_for_bit_and_keeps_its_result(dtype: torch.dtype):
    """Of zeros, too. The next matmul keeps the result anyway: the input as well would cost memory."""
    x, kept = torch.randn(300, 96, dtype=dtype) * torch.logspace(-6, 3, 300)[:, None].to(dtype), []
    x[7] = 0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = norm(x.requires_grad_())
    assert torch.equal(y, F.rms_norm(x, (96,)))
    assert {t.data_ptr() for t in kept if t.numel() > 300} == {y.data_ptr()}


@pytest.mark.parametrize("stage", [0, 1])
def test_rotary_turns_by_the_position_in_precise_tables(tiny, stage: int):
    """The angles are right to 2^-20 of themselves, for 128K positions; scores depend on distances alone."""
    long = PLAIN | dict(attention_layout="P", dtype="bfloat16", head_dim=64, val_seq_len=2**16, val_tokens=2**16)
    cfg = dataclasses.replace(tiny, **STAGES, **long)
    rotary, freqs = Rotary(cfg), rotary_frequencies(stage, cfg, torch.float64)[0]
    rotary.set_stage(stage, cfg)
    angles = torch.outer(torch.arange(0, 128 * 1024, 511, dtype=torch.float64), freqs)
    for table, exact in (rotary.cos, angles.cos()), (rotary.sin, angles.sin()):
        assert (table.dtype, len(table)) == (torch.float32, 128 * 1024), "pairs have two positions a token"
        assert torch.all((table[::511] - exact).abs() <= 1e-7 + angles * 2**-20)
    x = torch.randn(400, 4, 64).bfloat16()
    for got, want in zip(rotary(x, 2), rotary(x.float(), 2), strict=True):
        assert torch.equal(got, want.bfloat16()), "it computes in fp32"
    q, k = (t[:, 0] for t in rotary(torch.randn(2, 64).repeat(400, 1, 1), 1))
    scores = (q @ k.T)[[0, 100, 300], [99, 199, 399]]
    assert scores == pytest.approx(scores[[0, 0, 0]].tolist(), abs=1e-3)
    assert len({*(q @ k.T)[0].tolist()}) == 400
    assert q.norm(dim=1).max() / q.norm(dim=1).min() < 1 + 1e-5


@pytest.mark.parametrize("preset", PRESETS)
def test_schedules_do_what_training_and_warm_up_rely_on(preset: str):
    """A graph is compiled in the warm-up for each length and number of weights, and the masks for the widest window."""
    cfg = PRESETS[preset]
    steps, starts = range(cfg.num_iterations), train_gpt.stage_starts(cfg)
    assert (starts[0], starts[-1]) == (0, cfg.num_iterations)
    assert [train_gpt.stage_of(step, cfg) for step in starts[:-1]] == [*range(len(starts) - 1)]
    lengths, weights = ([f(step, cfg) for step in steps] for f in (train_gpt.train_seq_len, train_gpt.mtp_weights))
    graphs = [*zip(lengths, map(len, weights), strict=True)]
    assert {*graphs} == {graphs[start] for start in starts[:-1]}
    assert lengths == sorted(lengths)
    assert all(n % cfg.mask_block == 0 for n in lengths)
    assert all(w[0] == 1 and [*w] == sorted(w, reverse=True) and w[-1] > 0 for w in weights), "the next token counts"
    long, short = zip(*(train_gpt.attention_windows(step, cfg) for step in range(cfg.num_iterations + 1)), strict=True)
    assert [*long] == sorted(long)
    assert all(0 <= s <= w and s % cfg.mask_block == 0 for w, s in zip(long, short, strict=True))
    assert {*long} == {long[start] for start in starts}
    rates, momenta = ([f(step, cfg) for step in steps] for f in (train_gpt.lr_multiplier, train_gpt.muon_momentum))
    assert 0 < rates[-1] < max(rates) / 2
    assert min(rates) == rates[-1]
    assert all(math.isfinite(rate) for rate in rates)
    assert all(0 <= momentum < 1 for momentum in momenta)
    tied = [train_gpt.is_tied(step, cfg) for step in steps]
    assert tied == sorted(tied, reverse=True), "what has parted stays apart"
    for stage in range(1, len(starts) - 1):
        (old, _), (new, scale) = (train_gpt.rotary_frequencies(i, cfg, torch.float64) for i in (stage - 1, stage))
        assert (new <= old).all()
        assert scale > 0


def test_tables_part_where_the_public_ones_do():
    """Their last tied step is odd, for any number of scheduled steps."""
    for steps in range(1, 2001):
        cfg = types.SimpleNamespace(tied_frac=PRESETS["gpt2"].tied_frac, scheduled_steps=steps)
        last = round(2 * steps / 3) | 1
        assert [train_gpt.is_tied(step, cfg) for step in (0, last, last + 1)] == [True, True, False]


# Newton-Schulz makes of each singular value a polynomial of it. From this part of the Frobenius norm on they end in
# the band: 0.001 comes out as 0.847
SMALLEST, BAND = 0.0012, (0.8588, 1.1412)
# Largest difference to exact arithmetic. Relative errors of a singular value grow up to 212 times, namely at 1
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-4}


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1e15])
@pytest.mark.parametrize("size", [(64, 64), (48, 160)], ids=str)
def test_singular_values_end_in_the_band_and_vectors_stay(size: tuple, scale: float, dtype: torch.dtype):
    """Each matrix of a stack has its own norm, to which 1e-6 is added; a zero one stays zero, and nothing overflows."""
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    edge = torch.logspace(0, -2, size[0] - 1, dtype=torch.float64)
    edge = torch.cat([edge * (1 - SMALLEST**2) ** 0.5 / edge.norm(), edge.new_tensor([SMALLEST])])
    spectra = torch.stack([edge, torch.ones_like(edge), draw(size[0]), torch.eye(size[0], dtype=torch.float64)[0]])
    spectra = spectra.abs() / spectra.norm(dim=1, keepdim=True)
    u, v = (torch.linalg.qr(draw(4, n, size[0])).Q for n in size)
    scales = scale * torch.logspace(0, 3, 4, dtype=torch.float64)[:, None]
    g = torch.cat([u * (scales * spectra)[:, None] @ v.mT, torch.zeros(1, *size)])
    *actual, zero = x = zeropower(g.to(torch.promote_types(dtype, torch.float32)), dtype)
    assert (x.dtype, x.shape, zero.any()) == (dtype, g.shape, False)
    actual = torch.stack(actual).double()
    values, margin = torch.linalg.svdvals(actual), 0.05 if dtype == torch.bfloat16 else 1e-3
    assert values.max() <= BAND[1] + margin
    assert values[:2].min() >= BAND[0] - margin - 0.01 * (scale < 1)
    if dtype in TOLERANCE:
        expected = spectra / (1.02 + 1e-6 / scales)
        for a, b, c in POLAR_EXPRESS:  # X <- a X + b X X' X + c X X' X X' X leaves the vectors alone
            expected = a * expected + b * expected**3 + c * expected**5
        torch.testing.assert_close(u.mT @ actual @ v, torch.diag_embed(expected), rtol=0, atol=TOLERANCE[dtype])
