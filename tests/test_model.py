"""Parameters, initial values, every formula of the forward pass, schedules, Newton-Schulz, written a second time."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from test_attention import dense_mask
from train_gpt import GPT, POLAR_EXPRESS, PRESETS, Rotary, norm, resolve
from train_gpt import zeropower_via_newtonschulz5 as zeropower

NANO = PRESETS["nano"]
GPT2 = resolve(dataclasses.replace(PRESETS["gpt2"], device="cpu", dtype="bfloat16", seed=0, run_id="gpt2"))
THREE_STAGES = dict(num_iterations=50, extension_steps=0, window_tokens=(300, 600, 800), final_window_tokens=0)
THREE_STAGES |= dict(stage_growth=(2, 1, 3), lr_factors=(1.0, 2.0, 1.5), momentum_warmup_steps=0)


@pytest.mark.parametrize("tied_frac", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_precision_of_parameters(tiny, dtype: str, tied_frac: float):
    """Tables are in the precision of the activations; all else, also a head of its own, in fp32 at least."""
    gpt = GPT(dataclasses.replace(tiny, dtype=dtype, tied_frac=tied_frac, head_std=tied_frac))
    for name, tensor in (*gpt.named_parameters(), *gpt.named_buffers()):
        is_table = "embed" in name or (name == "lm_head" and tied_frac)
        assert tensor.dtype == getattr(torch, dtype if is_table or dtype == "float64" else "float32"), name


PLAIN = dict(tied_frac=0.0, head_std=0.0, gate_inputs=0, skip_init=1.0, resid_lambda_init=1.0)
FIRST = dict(resid_lambda=1.1, x0_lambda=0, bigram_lambda=0.1, skip_weights=-1.5, smear_lambda=0, backout_lambda=0.5)
FIRST |= dict.fromkeys("bigram_embed value_embeds mlp.c_proj gate value_gate skip_gate smear_gate".split(), 0)
LIKE_GPT2 = ({}, FIRST, dict(embed=0.005, lm_head=0.005))
LIKE_PLAIN = (PLAIN, FIRST | dict(skip_weights=1, resid_lambda=1, lm_head=0), dict(embed=1))


@pytest.mark.parametrize(("changes", "constants", "normal"), [LIKE_GPT2, LIKE_PLAIN], ids=["gpt2", "plain"])
def test_initial_values_at_the_width_of_gpt2(changes: dict, constants: dict, normal: dict):
    """Check two layers and 1,024 tokens of vocabulary: enough for every kind of parameter."""
    layouts = dict(attention_layout="LP", value_embed_layout="0.", skip_layout=".0", backout_layer="0", bigram_rows=100)
    gpt, seen = GPT(dataclasses.replace(GPT2, **layouts | changes, vocab_size=1024, eot_token=0)), set()
    for name, p in gpt.named_parameters():
        parts, p = name.removesuffix(".weight").removesuffix(".0").split("."), p.detach().float()
        kind = "mlp.c_proj" if parts[-2:] == ["mlp", "c_proj"] else parts[-1]
        seen.add(kind)
        if kind == "lambdas":
            assert p.tolist() == [0.5, 1]
        elif kind in constants:
            assert torch.all(p == torch.tensor(constants[kind], dtype=torch.float32)), name
        else:
            std, kurtosis = (normal[kind], 3) if kind in normal else (0.5 * 768**-0.5, 1.8)  # 1.8: uniform
            for x in p / std, p[-1:] / std:
                moments, limit = [x.pow(n).mean().item() for n in (1, 2, 4)], 0.05 if len(x) > 1 else 0.6
                assert moments == pytest.approx([0, 1, kurtosis], abs=limit), name
    gates = {name for name in constants if "gate" in name} | {"smear_lambda"} if changes else set()
    assert seen == {*constants, *normal, "lambdas", "qkv_w", "c_proj", "c_fc"} - gates
    assert torch.equal(gpt.embed.weight, gpt.lm_head) == (not changes), "two tables begin as one"


def test_heads_begin_as_one_that_sees_itself_and_one_that_copies():
    """Let token s have the value e_s: then token t gets as its channel s what it attends to s."""
    cfg = dataclasses.replace(NANO, dtype="float32", train_seq_len=64, block_size=32)
    gpt, tokens = GPT(cfg), torch.randperm(256)[:32].repeat(2).int()
    assert gpt.embed.weight.mean().item() == pytest.approx(0.5, abs=0.03)
    attn, values = gpt.blocks[0].attn, torch.eye(64).repeat(1, 2)
    attn.qkv_w.data[2], attn.c_proj.data = 0, torch.eye(128)
    masks = gpt.attention_masks(tokens, torch.tensor([64, 0], dtype=torch.int32))
    local, copy = attn(norm(gpt.embed(tokens)), values, gpt.rotary, masks["L"]).view(64, 2, 64).unbind(1)
    later = torch.arange(32, 64)  # each saw its token 32 before, and what followed it 31 before
    weights = [[head[later, later - n].mean().item() for n in range(32)] for head in (local, copy)]
    assert weights[0][0] > 0.7 > 0.02 > max(weights[0][1:]), "itself"
    assert weights[1][31] > 10 * max(weights[1][1:31]) > 0.05, "what followed"


def frequencies(stage: int, cfg) -> tuple[list[float], float]:
    """Return the frequencies of the rotary embedding, and the factor on attention scores, one number at a time."""
    count, scale = cfg.head_dim // 4, cfg.attention_scale
    freqs = [cfg.rope_base ** (-j / (count - 1)) for j in range(count)]
    for old, new in itertools.pairwise(cfg.window_tokens[: stage + 1]):
        kept = [min(max((old * f / (2 * math.pi) - 1) / (cfg.yarn_turns - 1), 0), 1) for f in freqs]
        freqs = [f * (gamma + (1 - gamma) * old / new) for f, gamma in zip(freqs, kept, strict=True)]
        scale *= 1 + cfg.yarn_scale * math.log(new / old)
    return freqs, scale


@pytest.mark.parametrize("stage", range(4))
def test_rotary_has_precise_tables_and_works_in_fp32(stage: int):
    """The tables are fp32, and so is the exponent: the angles are right to 2^-20 of themselves."""
    cfg = dataclasses.replace(GPT2, val_seq_len=64 * 1024)
    rotary, (freqs, scale) = Rotary(cfg), frequencies(stage, cfg)
    rotary.set_stage(stage, cfg)
    assert rotary.cos.shape == (128 * 1024, 32), "pairs have two positions a token"
    angles = torch.outer(torch.arange(0, 128 * 1024, 511, dtype=torch.float64), torch.tensor(freqs).double())
    for table, exact in (rotary.cos, angles.cos()), (rotary.sin, angles.sin()):
        assert torch.all((table[::511] - exact).abs() <= 1e-7 + angles * 2**-20)
    assert rotary.scale.item() == pytest.approx(scale)
    x = torch.randn(400, 4, 128).bfloat16()
    for got, want in zip(rotary(x, 2), rotary(x.float(), 2), strict=True):
        assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_torch_with_its_gradient(dtype: torch.dtype):
    """Expect the result bit for bit, of zeros too; the gradient to rounding, against double precision."""
    x = torch.randn(300, 96, dtype=dtype) * torch.logspace(-6, 3, 300)[:, None].to(dtype)
    x[7] = 0
    x, grad, kept = x.requires_grad_(), torch.randn(300, 96, dtype=dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = norm(x)
    assert torch.equal(y, F.rms_norm(x, (96,)))
    assert {t.data_ptr() for t in kept if t.numel() > 300} == {y.data_ptr()}, "keep the result, not the input"
    (ours,) = torch.autograd.grad(y, x, grad)
    assert y.dtype == ours.dtype == dtype
    exact = x.detach().double().requires_grad_()
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    (theirs,) = torch.autograd.grad(F.rms_norm(exact, (96,), eps=eps), exact, grad.double())
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() < 2 * torch.finfo(dtype).eps


def bigram_row(position: int, tokens: list[int], cfg) -> int:
    """Hash a token and the one before, in 32 bits with a sign."""
    last = cfg.bigram_rows - 1
    if position == 0:
        return last
    before = tokens[position - 1] if position > 1 else last
    a, b = ((product + 2**31) % 2**32 - 2**31 for product in (36313 * tokens[position], 27191 * before))
    return (a ^ b) % last


def reference_loss(params: dict[str, Tensor], cfg, tokens: Tensor, targets: Tensor, stage: int, weights) -> Tensor:
    """Compute the loss layer by layer, with dense masks. `params`: those of GPT, by name."""
    T, H, D, G = len(tokens), cfg.num_heads, cfg.head_dim, cfg.gate_inputs
    docs = torch.tensor([(tokens[: t + 1] == cfg.eot_token).sum() for t in range(T)])
    window = cfg.window_tokens[stage]
    short = window // 2 // cfg.block_size * cfg.block_size
    masks = dict(L=dense_mask(docs, window), S=dense_mask(docs, short), P=dense_mask(docs.repeat_interleave(2), short))
    freqs, scale = frequencies(stage, cfg)

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])

    def rotate(x: Tensor, slots: int) -> Tensor:
        """Rotate pairs of dimensions of x (T, H, D) as complex numbers, by the positions of tokens and heads."""
        positions = slots * torch.arange(T)[:, None] + torch.arange(H) % slots
        angles = positions[:, :, None] * torch.tensor(freqs, dtype=torch.float64)
        u, w, still = x.split([D // 4, D // 4, D // 2], dim=-1)
        z = torch.complex(u, w) * torch.polar(torch.ones_like(angles), -angles)
        return torch.cat([z.real, z.imag, still], dim=-1)

    def attention(i: int, letter: str, x: Tensor) -> Tensor:
        lambda_in, lambda_out = params[f"blocks.{i}.attn.lambdas"]
        q, k, v = ((x @ (lambda_in * w).T).view(T, H, D) for w in params[f"blocks.{i}.attn.qkv_w"])
        slots = 2 if letter == "P" else 1
        q, k = (rotate(rms_norm(t), slots) for t in (q, k))
        if letter == "L":  # the half that never rotates is that of the token before
            k = torch.stack([torch.cat([k[t, :, : D // 2], k[max(t - 1, 0), :, D // 2 :]], dim=-1) for t in range(T)])
        if (table := cfg.value_embed_layout[i]) != ".":
            value_embed = params[f"value_embeds.{table}.weight"][tokens].view(T, H, D)
            gate = 2 * torch.sigmoid(x[:, :G] @ params[f"blocks.{i}.attn.value_gate"].T) if G else x.new_ones(T, H)
            v = v + gate[:, :, None] * value_embed
        # Each stream of a pair has, token by token, a head of the first half and one of the second
        q, k, v = (torch.stack(t.chunk(slots, dim=1), dim=1).flatten(0, 1).transpose(0, 1) for t in (q, k, v))
        y = torch.softmax((scale * q @ k.mT).masked_fill(~masks[letter], -torch.inf), dim=-1) @ v
        y = torch.cat([y[:, slot::slots] for slot in range(slots)]).transpose(0, 1)
        if G:
            y = y * torch.sigmoid(x[:, :G] @ params[f"blocks.{i}.attn.gate"].T)[:, :, None]
        return y.flatten(1) @ (lambda_out * params[f"blocks.{i}.attn.c_proj"]).T

    x = params["embed.weight"][tokens]
    if G:
        gate = torch.sigmoid(x[1:, :G] @ params["smear_gate"].T)
        x = torch.cat([x[:1], x[1:] + params["smear_lambda"] * gate * x[:-1]])
    x = x0 = rms_norm(x)
    outputs, num_skips = [], 0
    for i, letter in enumerate(cfg.attention_layout):
        if (source := cfg.skip_layout[i]) != ".":
            gate = 2 * torch.sigmoid(x0[:, :G] @ params["skip_gate"][num_skips]) if G else x.new_ones(T)
            x = x + torch.sigmoid(params["skip_weights"][num_skips]) * gate[:, None] * outputs[int(source, 36)]
            num_skips += 1
        x = params[f"blocks.{i}.resid_lambda"] * x + params[f"blocks.{i}.x0_lambda"] * x0
        if cfg.bigram_rows:
            rows = [bigram_row(t, tokens.tolist(), cfg) for t in range(T)]
            x = x + params[f"blocks.{i}.bigram_lambda"] * params["bigram_embed.weight"][rows]
        if letter != "-":
            x = x + attention(i, letter, rms_norm(x))
        hidden = rms_norm(x) @ params[f"blocks.{i}.mlp.c_fc"]
        x = x + hidden.clamp(min=0) ** 2 @ params[f"blocks.{i}.mlp.c_proj"].T
        outputs.append(x)
    if cfg.backout_layer != ".":
        x = x - params["backout_lambda"] * outputs[int(cfg.backout_layer, 36)]
    z = rms_norm(x) @ params["lm_head"].T
    logits = cfg.lm_head_range * torch.sigmoid((z + cfg.lm_head_shift) * 2 / cfg.lm_head_softcap)
    losses = [F.cross_entropy(logits[: T - k], targets[k:], reduction="sum") for k in range(len(weights))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


# Widths for which a loss takes milliseconds; bigrams whose hash overflows; YaRN that bends and stretches
NARROW = dict(train_seq_len=192, batch_tokens=192, val_seq_len=192, val_tokens=192, block_size=16, dtype="float64")
NARROW |= dict(model_dim=32, num_heads=6, head_dim=16, vocab_size=60, eot_token=59, bigram_rows=90_001)
NARROW |= dict(window_tokens=(60, 130), stage_growth=(1, 1), lr_factors=(1.0, 1.0), yarn_turns=16.0)
NARROW |= dict(attention_scale=0.5)
ALL = dict(attention_layout="PLS-LP", value_embed_layout="0.1.01", skip_layout="..0.1.", backout_layer="3")
LIKE_NANO = dict(attention_layout="L-", value_embed_layout="0.", skip_layout=".0", backout_layer=".", gate_inputs=0)
WIDE = dict(attention_layout="--S", value_embed_layout="..0", skip_layout=".0.", backout_layer="1", bigram_rows=0)


@pytest.mark.parametrize(
    ("stage", "weights", "changes"),
    [
        pytest.param(1, [1.0, 0.5, 0.2], ALL, id="all"),
        pytest.param(0, [1.0], LIKE_NANO | dict(num_heads=1, lm_head_shift=0.0, tied_frac=0.0), id="nano"),
        pytest.param(1, [1.0, 0.3], WIDE | dict(head_dim=24), id="no-bigrams"),
    ],
)
def test_loss_and_gradients_are_those_of_the_reference(random_gpt, stage: int, weights: list[float], changes: dict):
    cfg = dataclasses.replace(GPT2, **NARROW | changes)
    gpt = random_gpt(cfg)
    gpt.lm_head.data *= 8  # logits for which the softcap matters
    gpt.rotary.set_stage(stage, cfg)
    sample = torch.randint(cfg.vocab_size - 1, (193,))
    sample[[9, 64, 65, 90]] = cfg.eot_token
    tokens, targets = sample[:-1].int(), sample[1:]
    params = {name: p.detach().clone().requires_grad_() for name, p in gpt.named_parameters()}
    expected = reference_loss(params, cfg, tokens, targets, stage, weights)
    windows = torch.tensor([cfg.window_tokens[stage], cfg.window_tokens[stage] // 32 * 16], dtype=torch.int32)
    loss = gpt(tokens, targets, windows, torch.tensor(weights, dtype=torch.float64))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    for name, p in gpt.named_parameters():
        grad = params[name].grad
        assert grad.norm() > 1e-6, f"{name}: the test would not see it"
        assert (p.grad - grad).norm() < 1e-10 * grad.norm(), name


@pytest.mark.parametrize("cfg", [GPT2, NANO, dataclasses.replace(GPT2, **THREE_STAGES)], ids=["gpt2", "nano", "three"])
def test_schedules(cfg):
    """Straight lines between a few points, and stages."""
    end, n, parts = cfg.scheduled_steps, cfg.num_iterations, len(cfg.window_tokens) - (cfg.extension_steps > 0)
    borders = [*(round(end * i / parts) for i in range(parts + 1)), n]
    cooldown = [int(end * (1 - cfg.cooldown_frac) + 1e-9), end]
    points = [0, cfg.momentum_warmup_steps, n - cfg.momentum_cooldown_steps, n]
    low, high = cfg.momentum_warmup_start, cfg.muon_momentum
    for step in range(n):
        stage = int(np.searchsorted(borders[1:-1], step, side="right")) if step < end else len(cfg.window_tokens) - 1
        window, first, last = cfg.window_tokens[stage], borders[stage], borders[stage + 1]
        done = np.interp(step, cooldown, [0, 1])
        rate = (1 - done) * cfg.lr_factors[stage] + done * cfg.min_lr_frac
        assert train_gpt.lr_multiplier(step, cfg) == pytest.approx(rate)
        assert train_gpt.muon_momentum(step, cfg) == pytest.approx(np.interp(step, points, [low, high, high, low]))
        assert train_gpt.train_seq_len(step, cfg) == cfg.train_seq_len * cfg.stage_growth[stage]
        short = window // 2 - window // 2 % cfg.block_size
        assert train_gpt.attention_windows(step, cfg) == (window, short)
        *weights, fading = cfg.next_weights[: max(len(cfg.next_weights) - stage, 1)]
        fading = np.interp(step, [first, last], [fading, 0]) if weights else fading
        assert train_gpt.next_weights(step, cfg) == pytest.approx([*weights, fading])
    assert train_gpt.attention_windows(n, cfg) == (cfg.final_window_tokens or window, short)


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
