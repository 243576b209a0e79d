"""Parameters, initial values, every formula of the forward pass, schedules, Newton-Schulz, written a second time."""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from test_attention import dense_mask
from train_gpt import GPT, PRESETS, Rotary, lr_multiplier, muon_momentum, norm, resolve, window_blocks
from train_gpt import zeropower_via_newtonschulz5 as zeropower

NANO = PRESETS["nano"]
GPT2 = resolve(dataclasses.replace(PRESETS["gpt2"], device="cpu", dtype="bfloat16", seed=0, run_id="gpt2"))
NARROW = dict(batch_tokens=128, train_seq_len=128, val_seq_len=256, val_tokens=256, block_size=32, window_tokens=180)
NARROW |= dict(model_dim=32, num_heads=2, head_dim=16, vocab_size=60, eot_token=59, dtype="float64")


def random_batch(num_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab_size, (num_tokens + 1,))
    return tokens[:-1].int(), tokens[1:]


@pytest.mark.parametrize(("dtype", "rest"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")])
def test_precision_of_parameters(tiny, dtype: str, rest: str):
    gpt = GPT(dataclasses.replace(tiny, dtype=dtype))
    for name, tensor in (*gpt.named_parameters(), *gpt.named_buffers()):
        assert tensor.dtype == getattr(torch, dtype if "embed" in name else rest), name


def test_initial_values_at_the_width_of_gpt2():
    """Check two layers and 1,024 tokens of vocabulary: enough for every kind of parameter."""
    layouts = dict(attention_layout="LS", value_embed_layout="0.", skip_layout=".0", bigram_rows=100)
    gpt = GPT(dataclasses.replace(GPT2, **layouts, vocab_size=1024, eot_token=0))
    seen = set()
    for name, p in gpt.named_parameters():
        kind, p = name.removesuffix(".weight").rpartition(".")[2], p.detach().float()
        seen.add(kind)
        if kind in ("c_proj", "lm_head", "bigram_embed"):
            assert not p.any()
        elif kind in ("lambdas", "skip_weights"):
            assert p.tolist() == ([1] if kind == "skip_weights" else [0.5, 0.5] if "attn" in name else [1, 0])
        else:
            is_normal = "embed" in name
            std, least, most = (1, 4, 9) if is_normal else (0.5 * 768**-0.5, 0.9999 * 0.03125, 0.03125)
            assert all(least < bound <= most for bound in (p.max(), -p.min()))
            assert abs(p.mean()) < 0.004 * std
            assert abs(p.std() / std - 1) < 0.005
            assert abs((p / std).pow(4).mean() - (3 if is_normal else 1.8)) < 0.05
            assert abs(p[-1].std() / std - 1) < 0.15, "the last row is like any other"
    assert seen == set("embed 0 bigram_embed skip_weights lambdas qkv_w c_proj c_fc lm_head".split())


def exact_angles(positions: range, head_dim: int, base: float) -> Tensor:
    """Return (T, head_dim / 2) in float64: head_dim / 4 frequencies from 1 down to 1 / base, then as many zeros."""
    frequencies = torch.logspace(0, -1, head_dim // 4, base=base, dtype=torch.float64)
    return torch.outer(torch.tensor(positions, dtype=torch.float64), F.pad(frequencies, (0, head_dim // 4)))


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotate pairs of dimensions of x (T, H, D) as complex numbers."""
    angles = exact_angles(range(len(x)), x.size(-1), base)[:, None]
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), -angles)
    return torch.cat([z.real, z.imag], dim=-1)


def test_rotary_has_precise_tables_and_works_in_fp32():
    """The tables are fp32, and so is the exponent: the angles are right to 2^-20 of themselves."""
    rotary, angles = Rotary(64, 256 * 1024, 300.0), exact_angles(range(0, 256 * 1024, 511), 64, 300.0)
    for table, exact in (rotary.cos, angles.cos()), (rotary.sin, angles.sin()):
        assert torch.all((table[::511] - exact).abs() <= 1e-7 + angles * 2**-20)
    x = torch.randn(400, 3, 64).bfloat16()
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())


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


def reference_loss(params: dict[str, Tensor], cfg, tokens: Tensor, targets: Tensor, window: int) -> Tensor:
    """Compute the loss layer by layer, with dense masks. `params`: those of GPT, by name."""
    T, H, D = len(tokens), cfg.num_heads, cfg.head_dim
    docs = torch.tensor([(tokens[: t + 1] == cfg.eot_token).sum() for t in range(T)])
    masks = {"L": dense_mask(docs, window, cfg.block_size), "S": dense_mask(docs, window // 2, cfg.block_size)}

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])

    def attention(i: int, x: Tensor) -> Tensor:
        q, k, v = ((x @ w.T).view(T, H, D) for w in params[f"blocks.{i}.attn.qkv_w"])
        q, k = (rotate(rms_norm(t), cfg.rope_base).transpose(0, 1) for t in (q, k))
        lambda_v, lambda_value_embed = params[f"blocks.{i}.attn.lambdas"]
        v = lambda_v * v
        if (table := cfg.value_embed_layout[i]) != ".":
            v = v + lambda_value_embed * params[f"value_embeds.{table}.weight"][tokens].view(T, H, D)
        scores = (cfg.attention_scale * q @ k.mT).masked_fill(~masks[cfg.attention_layout[i]], -torch.inf)
        heads = torch.softmax(scores, dim=-1) @ v.transpose(0, 1)
        return heads.transpose(0, 1).flatten(1) @ params[f"blocks.{i}.attn.c_proj"].T

    x = params["embed.weight"][tokens]
    if cfg.bigram_rows:
        pairs = zip(tokens.tolist(), [cfg.eot_token, *tokens.tolist()], strict=False)
        x = x + params["bigram_embed.weight"][[((36313 * b) ^ (27191 * a)) % cfg.bigram_rows for b, a in pairs]]
    x = x0 = rms_norm(x)
    outputs, num_skips = [], 0
    for i, letter in enumerate(cfg.attention_layout):
        if (source := cfg.skip_layout[i]) != ".":
            x = x + params["skip_weights"][num_skips] * outputs[int(source, 36)]
            num_skips += 1
        lambda_x, lambda_x0 = params[f"blocks.{i}.lambdas"]
        x = lambda_x * x + lambda_x0 * x0
        if letter != "-":
            x = x + attention(i, rms_norm(x))
        hidden = rms_norm(x) @ params[f"blocks.{i}.mlp.c_fc"].T
        x = x + hidden.clamp(min=0) ** 2 @ params[f"blocks.{i}.mlp.c_proj"].T
        outputs.append(x)
    logits = cfg.lm_head_softcap * torch.tanh(rms_norm(x) @ params["lm_head"].T / cfg.lm_head_softcap)
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize(
    ("attention", "values", "skips", "window", "changes"),
    [
        pytest.param("LSSSLSS-SSSL", "012......012", "......543210", 3, {}, id="gpt2"),
        pytest.param("LS-S", "0.11", "..00", 1, dict(bigram_rows=97), id="shared-values-and-source"),
        pytest.param("SL", "..", "..", 6, dict(attention_scale=0.5, rope_base=50.0, lm_head_softcap=5.0), id="none"),
        pytest.param("--L", "..0", ".0.", 2, dict(bigram_rows=8192, num_heads=3), id="wider-than-the-model"),
    ],
)
def test_loss_and_gradients_are_those_of_the_reference(random_gpt, attention, values, skips, window, changes):
    layouts = dict(attention_layout=attention, value_embed_layout=values, skip_layout=skips)
    cfg = dataclasses.replace(GPT2, **NARROW | layouts | changes)
    gpt = random_gpt(cfg)
    gpt.lm_head.data *= 8  # logits for which the softcap matters
    angles = exact_angles(range(256), cfg.head_dim, cfg.rope_base)
    gpt.rotary.cos, gpt.rotary.sin = angles.cos(), angles.sin()  # the model's own are fp32
    tokens, targets = random_batch(192, cfg.vocab_size - 1)
    tokens[[9, 64, 65, 90]] = cfg.eot_token
    params = {name: p.detach().clone().requires_grad_() for name, p in gpt.named_parameters()}
    expected = reference_loss(params, cfg, tokens, targets, window)
    loss = gpt(tokens, targets, torch.tensor(window, dtype=torch.int32))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-11)
    loss.backward()
    expected.backward()
    for name, p in gpt.named_parameters():
        grad = params[name].grad
        assert grad.norm() > 1e-6, f"{name}: the test would not see it"
        assert (p.grad - grad).norm() < 1e-10 * grad.norm(), name
        if name.endswith("attn.lambdas"):
            assert (p.grad[1] == 0) == (values[int(name.split(".")[1])] == "."), "unused without a value embedding"


def test_learning_rate_schedule():
    assert {lr_multiplier(step, GPT2) for step in range(1062)} == {1.0}
    for step in range(1062, 1771):
        assert lr_multiplier(step, GPT2) == pytest.approx(1 - 0.9 * (step - 1062) / 708)
    whole = dataclasses.replace(GPT2, cooldown_frac=1.0, min_lr_frac=0.0, num_iterations=4)
    assert [lr_multiplier(step, whole) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_momentum_schedule():
    momenta = [muon_momentum(step, GPT2) for step in (0, 75, 150, 299, 300, 1770)]
    assert momenta == pytest.approx([0.85, 0.875, 0.9, 0.85 + 0.1 * 299 / 300, 0.95, 0.95])
    assert muon_momentum(0, dataclasses.replace(GPT2, momentum_warmup_steps=0)) == 0.95
    assert muon_momentum(150, dataclasses.replace(GPT2, momentum_warmup_start=0.5)) == pytest.approx(0.725)


@pytest.mark.parametrize(("cfg", "last"), [(GPT2, 14), (NANO, 4)], ids=["gpt2", "nano"])
def test_window_schedule(cfg, last: int):
    """Every step has the least window that covers its share of window_tokens, and at least one block."""
    for step in range(cfg.num_iterations + 1):
        share = Fraction(cfg.window_tokens * step, cfg.num_iterations * cfg.block_size)
        assert window_blocks(step, cfg) == max(1, math.ceil(share)) <= last
    assert window_blocks(step, cfg) == last


# Newton-Schulz makes of each singular value a polynomial of it. The band ends here: 0.0014 of the Frobenius norm comes
# out as 0.640, 0.001425 as 0.650
SMALLEST = 0.00143
# Largest difference to exact arithmetic, twice what was measured over these sizes. In float64 it is that of the 1e-7
# which is added to the norm; bf16 keeps 8 bits through 15 products
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.06}
STEEPEST = 8.7  # relative errors of a singular value grow at most so much, namely at 1


def matrices(rows: int, cols: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return U, s, V of matrices U diag(s) V' of norm 1. The least s of "edge" is SMALLEST."""
    generator, edge = torch.Generator().manual_seed(rows * cols), torch.logspace(0, -2, rows - 1, dtype=torch.float64)
    kinds = {
        "edge": torch.cat([edge * (1 - SMALLEST**2) ** 0.5 / edge.norm(), edge.new_tensor([SMALLEST])]),
        "equal": torch.ones(rows, dtype=torch.float64),
        "uniform": torch.rand(rows, dtype=torch.float64, generator=generator),
        "one": torch.eye(rows, dtype=torch.float64)[0],
    }

    def orthogonal(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(size, rows, dtype=torch.float64, generator=generator)).Q

    return {kind: (orthogonal(rows), s / s.norm(), orthogonal(cols)) for kind, s in kinds.items()}


def in_exact_arithmetic(s: Tensor) -> Tensor:
    """Apply five steps to singular values: X <- a X + b X X' X + c X X' X X' X leaves the vectors alone."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1, 1e15])
@pytest.mark.parametrize("size", [(64, 64), (32, 32), (48, 160)], ids=str)
def test_singular_values_end_in_the_band_and_vectors_stay(size: tuple, scale: float, dtype: torch.dtype):
    """Each matrix of a stack has its own norm, to which 1e-7 is added; a zero one stays zero, and nothing overflows."""
    kinds = matrices(*size)
    stack = [scale * 10**i * (u * s) @ v.T for i, (u, s, v) in enumerate(kinds.values())]
    g = torch.stack([*stack, torch.zeros(size)]).to(torch.promote_types(dtype, torch.float32))
    *actual, zero = x = zeropower(g, dtype)
    assert (x.dtype, x.shape, zero.any()) == (dtype, g.shape, False)
    for x, (kind, (u, s, v)) in zip(actual, kinds.items(), strict=True):
        # A matrix of rank 1 has its singular value where the polynomial is steepest, and 0.109 was measured there
        tolerance = TOLERANCE[dtype] * (4 if kind == "one" else 1) + STEEPEST * 1e-7 * (scale < 1) / scale
        margin, values = tolerance if dtype == torch.bfloat16 or scale < 1 else 0, torch.linalg.svdvals(x.double())
        assert values.max() <= 1.25 + margin
        if kind != "one" and s.min() >= SMALLEST:
            assert values.min() >= 0.65 - margin
        expected = in_exact_arithmetic(s).diag()
        torch.testing.assert_close(u.T @ x.double() @ v, expected, rtol=0, atol=tolerance)
