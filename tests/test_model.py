"""What is true of any model here: which tokens an output depends on, gradients, precision, schedules, Newton-Schulz.

The formulas of gpt2 are held by numbers of the public record that it equals (test_root.py).
"""

import dataclasses
import functools
import inspect
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from test_attention import dense_mask
from train_gpt import GPT, POLAR_EXPRESS, PRESETS, Layer, Rotary, Stage, norm, rotary_frequencies
from train_gpt import zeropower_via_newtonschulz5 as zeropower

LOW = "embed.weight value_embeds.* bigram_embed.* *.w? *.b2 *.value_gate smear_gate".split()
DOCUMENTS = [0, 5, 6, 11]  # where they begin; the last is longer than the windows
WINDOWS = torch.tensor([36, 16], dtype=torch.int32)


@pytest.mark.parametrize("tied_frac", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_precision_of_parameters(gpt2, dtype: str, tied_frac: float):
    """Tables, nets and gates are in the precision of the activations; all else, also a head of its own, in fp32."""
    gpt = GPT(dataclasses.replace(gpt2, dtype=dtype, tied_frac=tied_frac))
    for name, p in gpt.named_parameters():
        is_low = any(fnmatch(name, glob) for glob in [*LOW, *["lm_head"] * (tied_frac > 0)])
        assert p.dtype == getattr(torch, dtype if is_low or dtype == "float64" else "float32"), name
    assert gpt.rotary.cos.dtype == gpt.rotary.scale.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_products_are_in_the_precision_of_the_activations(request, random_gpt, monkeypatch, preset: str):
    """A factor of shape (1,) in fp32 once made fp32 of nano's stream, and bf16 brought nothing."""
    cfg, seen = dataclasses.replace(request.getfixturevalue(preset), dtype="bfloat16"), []
    linear, attend = train_gpt.linear, train_gpt.attend
    monkeypatch.setattr(train_gpt, "linear", lambda x, w: seen.append(x.dtype) or linear(x, w))
    monkeypatch.setattr(train_gpt, "attend", lambda *qkv: seen.extend(t.dtype for t in qkv[:3]) or attend(*qkv))
    assert random_gpt(cfg).features(text(cfg)[:-1], WINDOWS).dtype == torch.bfloat16
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


@pytest.mark.parametrize("step", [0, 4, 8])
@pytest.mark.parametrize("kind", ["long", "short", "paired"])
def test_a_layer_sees_its_window_of_its_document(tiny64, random_gpt, kind: str, step: int):
    """Each of two paired heads has a slot for each token, so the window reaches half as many tokens.

    Half of a key of a long layer is the token before's, whatever its document, where there is a choice of keys.
    """
    stages = Stage(0.5, batch=1, max_doc_len=0, window=20), Stage(0.5, batch=1, max_doc_len=0, window=36)
    cfg = dataclasses.replace(tiny64, layers=(Layer(kind),), stages=stages, final_window=50)
    gpt = random_gpt(cfg)
    gpt.bigram_embed.weight.data.zero_()
    long, short = train_gpt.attention_windows(step, cfg)
    tokens = text(cfg)[:-1].int()
    seen = dependence(gpt, tokens, torch.tensor([long, short], dtype=torch.int32))
    docs, is_inside = (tokens == cfg.eot_token).cumsum(0), tokens != cfg.eot_token
    expected = dense_mask(docs, dict(long=long, short=short, paired=(short + 1) // 2)[kind])
    if kind == "long":
        expected |= F.pad(expected[:, 1:], (0, 1)) & (expected.sum(1, keepdim=True) > 1)
    assert torch.equal(seen[:, is_inside], expected[:, is_inside])
    assert long > short > 0


@pytest.mark.parametrize("is_strict", [False, True])
def test_no_output_depends_on_later_tokens_or_other_documents(gpt2_64, random_gpt, is_strict: bool):
    """Long keys, bigrams and the smear look at the token before, which may end another document: strict without."""
    cfg, tokens = gpt2_64, text(gpt2_64)[:-1].int()
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


def test_gradients_are_those_of_the_loss(gpt2_64, random_gpt):
    """Compare with the change of the loss as all parameters take a small step to either side, in a few directions."""
    gpt, sample, weights = random_gpt(gpt2_64), text(gpt2_64), torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    targets = train_gpt.next_targets(sample[1:], 3).clamp(min=-1)  # beyond the end the gradient is another, on purpose
    inputs = (sample[:-1].int(), targets, WINDOWS, weights)
    gpt(*inputs).backward()
    for _ in range(3):
        directions = {p: torch.randn_like(p) / p.grad.norm() for p in gpt.parameters()}
        losses = []
        with torch.no_grad():
            for size in (1e-5, -2e-5):
                for p, direction in directions.items():
                    p += size * direction
                losses.append(gpt(*inputs).item())
            for p, direction in directions.items():
                p += 1e-5 * direction
        slopes = [(p.grad * direction).sum().item() for p, direction in directions.items()]
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(sum(slopes), abs=1e-3)
    assert all(abs(slope) > 1e-6 for slope in slopes), "each parameter has its part"


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
    long = dict(layers=(Layer("paired"),), dtype="bfloat16", head_dim=64, val_seq_len=2**16, val_tokens=2**16)
    cfg = dataclasses.replace(tiny, **long, stages=PRESETS["gpt2"].stages)
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


# What holds at each step, in numbers and not by the rows: first steps of the stages, then of each stage the long and
# short window, the length of sequences, where documents are cut, and the factor on learning rates; cooldown, last rate,
# steps and values of the momentum, last tied step
GPT2 = dict(starts=[423, 847, 1270], windows=[(384, 128), (896, 384), (1408, 640), (1664, 768)], last_window=2560)
GPT2 |= dict(lengths=[16384, 32768, 49152, 49152], cuts=[896, 2048, 2048, 2048], rates=[1, 1.52, 1.73, 1.73])
GPT2 |= dict(cooldown=(508, 1270, 0.15), momentum=([0, 300, 1235, 1285], [0.85, 0.95, 0.95, 0.85]), last_tied=847)
NANO = dict(starts=[], windows=[(256, 128)], last_window=256, lengths=[1024], cuts=[0], rates=[1], last_tied=-1)
NANO |= dict(cooldown=(29, 196, 0.1), momentum=([0, 50, 196], [0.85, 0.9, 0.9]))
SCHEDULES = dict(gpt2=GPT2, nano=NANO)


@pytest.mark.parametrize("preset", SCHEDULES)
def test_schedules_at_every_step(preset: str):
    """The long window of the last validation is that of the last step alone."""
    want, cfg = SCHEDULES[preset], PRESETS[preset]
    steps = np.arange(cfg.num_iterations + 1)
    stages = np.searchsorted(want["starts"], steps, side="right")
    windows = np.array(want["windows"])[stages]
    windows[-1, 0] = want["last_window"]
    left = 1 - np.interp(steps, want["cooldown"][:2], [0, 1])
    expected = dict(attention_windows=windows, train_seq_len=np.array(want["lengths"])[stages])
    expected |= dict(lr_multiplier=left * np.array(want["rates"])[stages] + (1 - left) * want["cooldown"][2])
    expected |= dict(muon_momentum=np.interp(steps, *want["momentum"]), is_tied=steps <= want["last_tied"])
    for name, values in expected.items():
        found = [getattr(train_gpt, name)(step, cfg) for step in steps]
        np.testing.assert_allclose(found, values, rtol=1e-12, err_msg=name)
    assert [train_gpt.stage_of(step, cfg).max_doc_len for step in steps] == [want["cuts"][i] for i in stages]
    assert train_gpt.num_tokens(len(steps) - 1, cfg) == cfg.batch_sequences * sum(expected["train_seq_len"][:-1])


@pytest.mark.parametrize("preset", SCHEDULES)
def test_weights_of_losses_at_every_step(preset: str):
    """In gpt2 a third token fades in the first stage, second token and prefix in the second; then one is left."""
    cfg = PRESETS[preset]
    for step in range(cfg.num_iterations):
        expected = [1], []
        if preset == "gpt2" and step < 423:
            expected = [1, 0.5, 0.25 * (423 - step) / 423], [0.25]
        elif preset == "gpt2" and step < 847:
            expected = [1, 0.5 * (847 - step) / 424], [0.25 * (847 - step) / 424]
        for found, weights in zip(train_gpt.loss_weights(step, cfg), expected, strict=True):
            assert found == pytest.approx(weights, rel=1e-12), step
    without = dataclasses.replace(cfg, prefix_file="")
    assert all(train_gpt.loss_weights(step, without)[1] == [] for step in range(cfg.num_iterations))


def test_yarn_bends_slow_frequencies_at_every_change_of_the_window():
    """Slow is a turn or less in the old window; from 32 turns on frequencies stay. Scores grow by 0.2 of the log."""
    cfg, windows, factor = PRESETS["gpt2"], [384, 896, 1408, 1664], 0.1
    expected = [1024 ** (-i / 31) for i in range(32)]
    for stage in range(4):
        if stage:
            old, new = windows[stage - 1 : stage + 1]
            kept = [min(max((old * f / (2 * np.pi) - 1) / 31, 0), 1) for f in expected]
            expected = [f * (k + (1 - k) * old / new) for f, k in zip(expected, kept, strict=True)]
            factor *= 1 + 0.2 * np.log(new / old)
        frequencies, scale = rotary_frequencies(stage, cfg, torch.float64)
        assert (frequencies.tolist(), scale) == (pytest.approx(expected, rel=1e-12), pytest.approx(factor, rel=1e-12))
    assert rotary_frequencies(0, PRESETS["nano"], torch.float64)[1] == 0.12


def test_tables_part_right_after_a_step_of_adam():
    """The last tied step is the second of a pair, for any number of steps."""
    for steps in range(1, 2001):
        cfg = dataclasses.replace(PRESETS["gpt2"], num_iterations=steps, extension_steps=0)
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
