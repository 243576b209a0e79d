"""The model of record 21: parameters, initial values, every formula of the forward pass, and the schedules.

The numbers and formulas are those of the record's description, written down here a second time.
"""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from test_masks import dense_mask
from train_gpt import GPT, PRESETS, CausalSelfAttention, Rotary, World, lr_multiplier, muon_momentum, window_blocks

GPT2 = dataclasses.replace(PRESETS["gpt2"], device="cpu", dtype="bfloat16")
HIDDEN_LAYERS, ATTENTION_LAYERS = range(12), [*range(7), *range(8, 12)]  # layer 7 has no attention
ONE_BLOCK = torch.ones((), dtype=torch.int32)


@pytest.fixture
def narrow():
    """The gpt2 preset with its 12 layers and vocabulary, but narrow and with short sequences."""
    lengths = dict(batch_tokens=128, train_seq_len=128, val_seq_len=256, val_tokens=256, block_size=32)
    sizes = dict(model_dim=32, num_heads=2, head_dim=16, window_tokens=192)
    return dataclasses.replace(GPT2, **lengths, **sizes, dtype="float32", lm_head_fp8=False)


@pytest.fixture
def narrow64(narrow):
    """`narrow` in double precision with 60 tokens."""
    return dataclasses.replace(narrow, vocab_size=60, eot_token=59, dtype="float64")


def random_batch(num_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab_size, (num_tokens + 1,))
    return tokens[:-1].int(), tokens[1:]


# ----------------------------------------------------------------------------------------------------------------------
# Parameters


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {"embed.weight": (50257, 768), "skip_weights": (6,), "lm_head.weight": (50304, 768)}
    shapes |= {f"value_embeds.{i}.weight": (50257, 768) for i in range(3)}
    for i in HIDDEN_LAYERS:
        shapes[f"blocks.{i}.lambdas"] = (2,)
        shapes[f"blocks.{i}.mlp.c_fc.weight"] = (3072, 768)
        shapes[f"blocks.{i}.mlp.c_proj.weight"] = (768, 3072)
    for i in ATTENTION_LAYERS:
        shapes[f"blocks.{i}.attn.qkv_w"] = (3, 768, 768)
        shapes[f"blocks.{i}.attn.lambdas"] = (2,)
        shapes[f"blocks.{i}.attn.c_proj.weight"] = (768, 768)
    return shapes


def test_gpt2_has_the_records_parameters():
    with torch.device("meta"):
        gpt = GPT(GPT2)
    params = dict(gpt.named_parameters())
    assert {name: tuple(p.shape) for name, p in params.items()} == gpt2_shapes()
    assert sum(p.numel() for p in params.values()) == 275_598_388
    for name, p in params.items():
        assert p.dtype == (torch.bfloat16 if "embed" in name else torch.float32), name
    assert gpt.FP8_SCALES == (2, 2**9, 2**19)


@pytest.mark.parametrize(("dtype", "rest"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")])
def test_precision_of_parameters(tiny, dtype: str, rest: str):
    gpt = GPT(dataclasses.replace(tiny, dtype=dtype))
    for name, tensor in (*gpt.named_parameters(), *gpt.named_buffers()):
        assert tensor.dtype == getattr(torch, dtype if "embed" in name else rest), name


def test_optimizers_divide_the_parameters_as_the_record(narrow):
    gpt = GPT(narrow)
    names = {id(p): name for name, p in gpt.named_parameters()}
    muon, adam = train_gpt.build_optimizers(gpt, narrow, World(), train_gpt.zeropower_via_newtonschulz5)

    def members(groups: list[dict]) -> list[str]:
        assert [name for g in groups for name in g["names"]] == [names[id(p)] for g in groups for p in g["params"]]
        return sorted(name for g in groups for name in g["names"])

    matrices = [f"blocks.{i}.mlp.{kind}.weight" for kind in ("c_fc", "c_proj") for i in HIDDEN_LAYERS]
    matrices += [f"blocks.{i}.attn.{kind}" for kind in ("qkv_w", "c_proj.weight") for i in ATTENTION_LAYERS]
    assert len(matrices) == 46
    assert members(muon.param_groups) == sorted(matrices)
    scalars = [f"blocks.{i}.lambdas" for i in HIDDEN_LAYERS] + [f"blocks.{i}.attn.lambdas" for i in ATTENTION_LAYERS]
    adam_groups = [
        (["lm_head.weight"], 0.008),
        (["embed.weight", *(f"value_embeds.{i}.weight" for i in range(3))], 0.6),
        ([*scalars, "skip_weights"], 0.04),
    ]
    assert len(adam.param_groups) == len(adam_groups)
    for group, (expected_names, lr) in zip(adam.param_groups, adam_groups, strict=True):
        assert members([group]) == sorted(expected_names)
        assert group["lr"] == group["initial_lr"] == lr
    assert all(group["lr"] == group["initial_lr"] == 0.05 for group in muon.param_groups)
    assert (adam.param_groups[0]["betas"], adam.eps) == ((0.8, 0.95), 1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# Initial values


def test_initial_values_at_the_width_of_gpt2():
    """Two layers and 1,024 tokens of vocabulary: enough for every kind of parameter."""
    layouts = dict(attention_layout="LS", value_embed_layout="0.")
    lengths = dict(batch_tokens=128, train_seq_len=128, val_seq_len=128)
    gpt = GPT(dataclasses.replace(GPT2, **layouts, **lengths, vocab_size=1024, eot_token=0))
    params = {name: p.detach().double() for name, p in gpt.named_parameters()}
    seen = set()
    for name, p in params.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        seen.add(kind)
        if "embed" in name:
            assert abs(p.mean()) < 0.01
            assert abs(p.std() - 1) < 0.01
            assert abs(p.pow(4).mean() - 3) < 0.1, "normal: the fourth moment is 3"
            assert p[-1].abs().sum() > 0, "the last row is a token like any other"
        elif kind in ("qkv_w", "c_fc"):
            assert 0.9999 * 0.03125 < p.max() <= 0.03125
            assert -0.9999 * 0.03125 > p.min() >= -0.03125
            assert abs(p.mean()) < 1e-4
            assert abs(p.std() / (0.5 * 768**-0.5) - 1) < 0.005
        elif kind in ("c_proj", "lm_head"):
            assert torch.all(p == 0)
        elif kind == "skip_weights":
            assert p.tolist() == [1]
        elif name.endswith("attn.lambdas"):
            assert p.tolist() == [0.5, 0.5]
        else:
            assert kind == "lambdas"
            assert p.tolist() == [1, 0]
    assert seen >= {"qkv_w", "c_fc", "c_proj", "lm_head", "lambdas", "skip_weights"}
    drawn = [p.flatten()[:1000] for name, p in params.items() if "embed" in name or "qkv_w" in name or "c_fc" in name]
    assert len(torch.stack(drawn).unique(dim=0)) == 6, "no two alike"


@pytest.mark.parametrize("is_training", [True, False])
def test_step_0_loss_of_the_gpt2_vocabulary(narrow, is_training: bool):
    """ln 50304: the head is zero, and its 47 rows without a token take part in the softmax."""
    gpt = GPT(narrow).train(is_training)
    loss = gpt(*random_batch(128, narrow.vocab_size), ONE_BLOCK)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(10.8258, abs=1e-4)
    assert loss.item() == pytest.approx(math.log(50304), abs=1e-4)


@pytest.mark.slow
def test_step_0_loss_of_gpt2():
    """At full width, on short sequences: 8 s, 1.5 GB."""
    lengths = dict(batch_tokens=256, train_seq_len=256, val_seq_len=256, val_tokens=256)
    gpt = GPT(dataclasses.replace(GPT2, **lengths, dtype="float32", lm_head_fp8=False))
    with torch.no_grad():
        loss = gpt(*random_batch(256, 50257), ONE_BLOCK)
    assert loss.item() == pytest.approx(10.8258, abs=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# Forward pass


def exact_angles(positions: range, head_dim: int) -> Tensor:
    """(T, head_dim / 2) in float64: a quarter of head_dim frequencies from 1 down to 1/1024, then as many zeros."""
    quarter = head_dim // 4
    frequencies = [1024 ** -(i / (quarter - 1)) for i in range(quarter)] + [0.0] * quarter
    return torch.outer(*(torch.tensor(values, dtype=torch.float64) for values in (positions, frequencies)))


def test_rotary_is_a_complex_rotation():
    T, D = 400, 128
    x = torch.randn(T, 3, D, dtype=torch.float64)
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    z = z * torch.polar(torch.ones(T, D // 2, dtype=torch.float64), -exact_angles(range(T), D))[:, None]
    expected = torch.cat([z.real, z.imag], dim=-1)
    y = Rotary(D, 512)(x)  # 512: the tables may be longer than the sequence
    assert y.dtype == torch.float64
    # The tables are fp32, and so is the exponent of 1024: the angles are right to 2^-20 of themselves
    torch.testing.assert_close(y, expected, rtol=0, atol=5 * T * 2**-20)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    for untouched in slice(D // 4, D // 2), slice(3 * D // 4, D):
        assert torch.equal(y[..., untouched], x[..., untouched])
    assert torch.equal(y[0], x[0])


def test_rotary_tables_reach_the_last_position_of_validation():
    gpt = GPT(dataclasses.replace(GPT2, attention_layout="--", value_embed_layout="..", vocab_size=1, eot_token=0))
    positions = range(0, 256 * 1024, 511)
    angles = exact_angles(positions, 128)
    for table, exact in (gpt.rotary.cos, angles.cos()), (gpt.rotary.sin, angles.sin()):
        assert table.shape == (256 * 1024, 64)
        assert table.dtype == torch.float32
        assert torch.all((table[positions] - exact).abs() <= 1e-7 + angles * 2**-20)


def test_rotary_rotates_bf16_in_fp32():
    x = torch.randn(200, 2, 32).bfloat16()
    rotary = Rotary(32, 200)
    y = rotary(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rotary(x.float()).bfloat16())


def rms_norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm_is_that_of_torch_with_its_gradient(dtype: torch.dtype):
    """The result bit for bit, of zeros too; the gradient to rounding, against double precision."""
    x = torch.randn(300, 96, dtype=dtype) * torch.logspace(-6, 3, 300)[:, None].to(dtype)
    x[7] = 0
    x, grad = x.requires_grad_(), torch.randn(300, 96, dtype=dtype)
    y = train_gpt.norm(x)
    assert torch.equal(y, F.rms_norm(x, (96,)))
    assert y.dtype == dtype
    (ours,) = torch.autograd.grad(y, x, grad)
    exact = x.detach().double().requires_grad_()
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    (theirs,) = torch.autograd.grad(F.rms_norm(exact, (96,), eps=eps), exact, grad.double())
    assert ours.dtype == dtype
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() < 2 * torch.finfo(dtype).eps


def test_norm_keeps_its_result_and_a_number_per_row():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = train_gpt.norm(torch.randn(300, 96, dtype=torch.bfloat16, requires_grad=True))
    assert sorted((t.numel(), t.dtype) for t in kept) == [(300, torch.bfloat16), (300 * 96, torch.bfloat16)]
    assert any(t.data_ptr() == y.data_ptr() for t in kept)


def reference_loss(params: dict[str, Tensor], cfg, tokens: Tensor, targets: Tensor, window: int) -> Tensor:
    """The forward pass of record 21, layer by layer, with dense masks. `params`: those of GPT, by name."""
    T, H, D = len(tokens), cfg.num_heads, cfg.head_dim
    docs = torch.tensor([(tokens[: t + 1] == cfg.eot_token).sum() for t in range(T)])
    masks = {"L": dense_mask(docs, window, cfg.block_size), "S": dense_mask(docs, window // 2, cfg.block_size)}
    cos, sin = exact_angles(range(T), D).cos()[:, None], exact_angles(range(T), D).sin()[:, None]

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], dim=-1)

    def attention(i: int, x: Tensor) -> Tensor:
        q, k, v = ((x @ w.T).view(T, H, D) for w in params[f"blocks.{i}.attn.qkv_w"])
        q, k = rotate(rms_norm(q)), rotate(rms_norm(k))
        lambda_v, lambda_value_embed = params[f"blocks.{i}.attn.lambdas"]
        v = lambda_v * v
        if i in (0, 1, 2, 9, 10, 11):
            table = params[f"value_embeds.{i if i < 3 else i - 9}.weight"]
            v = v + lambda_value_embed * table[tokens].view(T, H, D)
        mask = masks["L" if i in (0, 4, 11) else "S"]
        heads = []
        for h in range(H):
            scores = 0.12 * (q[:, h] @ k[:, h].T)
            heads.append(torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v[:, h])
        return torch.cat(heads, dim=-1) @ params[f"blocks.{i}.attn.c_proj.weight"].T

    x = params["embed.weight"][tokens]
    if cfg.bigram_rows:
        pairs = zip(tokens.tolist(), [cfg.eot_token, *tokens.tolist()], strict=False)
        x = x + params["bigram_embed.weight"][[((36313 * b) ^ (27191 * a)) % cfg.bigram_rows for b, a in pairs]]
    x = x0 = rms_norm(x)
    outputs = {}
    for i in range(12):
        if i >= 6:
            x = x + params["skip_weights"][i - 6] * outputs[11 - i]
        lambda_x, lambda_x0 = params[f"blocks.{i}.lambdas"]
        x = lambda_x * x + lambda_x0 * x0
        if i != 7:
            x = x + attention(i, rms_norm(x))
        hidden = rms_norm(x) @ params[f"blocks.{i}.mlp.c_fc.weight"].T
        x = x + hidden.clamp(min=0) ** 2 @ params[f"blocks.{i}.mlp.c_proj.weight"].T
        outputs[i] = x
    logits = 15 * torch.tanh(rms_norm(x) @ params["lm_head.weight"].T / 15) + 15
    return (logits.logsumexp(-1) - logits[torch.arange(T), targets]).mean()


@pytest.mark.parametrize(("num_tokens", "window", "bigram_rows"), [(128, 1, 0), (128, 3, 97), (256, 6, 0)])
def test_forward_and_gradients_are_those_of_the_reference(
    narrow64, random_gpt, num_tokens: int, window: int, bigram_rows: int
):
    narrow64 = dataclasses.replace(narrow64, bigram_rows=bigram_rows)
    gpt = random_gpt(narrow64)
    with torch.no_grad():
        if bigram_rows:
            gpt.bigram_embed.weight.normal_()
        gpt.lm_head.weight *= 8  # logits for which the softcap matters
        # Exact tables: to rounding in fp32 they are the model's own, see test_rotary_is_a_complex_rotation
        angles = exact_angles(range(256), narrow64.head_dim)
        gpt.rotary.cos, gpt.rotary.sin = angles.cos(), angles.sin()
    tokens, targets = random_batch(num_tokens, narrow64.vocab_size - 1)
    tokens[[9, 64, 65, 90]] = narrow64.eot_token
    params = {name: p.detach().clone().requires_grad_() for name, p in gpt.named_parameters()}
    expected = reference_loss(params, narrow64, tokens, targets, window)
    loss = gpt(tokens, targets, torch.tensor(window, dtype=torch.int32))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    loss.backward()
    expected.backward()
    for name, p in gpt.named_parameters():
        grad = params[name].grad
        assert grad.norm() > 1e-6, f"{name}: the test would not see it"
        assert (p.grad - grad).norm() < 1e-8 * grad.norm(), name


def test_bigrams_start_at_zero_and_few_pairs_of_bytes_share_a_row():
    """At initialization the loss is that of a model without them; 8,192 rows take the pairs of a text apart."""
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], dtype="float32", bigram_rows=8192)
    gpt = GPT(cfg)
    assert gpt.bigram_embed.weight.shape == (8192, cfg.model_dim)
    assert not gpt.bigram_embed.weight.any()
    pairs = torch.cartesian_prod(torch.arange(32, 127), torch.arange(32, 127)).int()  # printable ASCII
    rows = torch.stack([gpt.bigram_hashes(pair)[1] for pair in pairs])
    assert rows.min() >= 0
    assert rows.max() < 8192
    assert len(rows.unique()) > 0.6 * 8192  # random ones would take 0.67
    opening = gpt.bigram_hashes(torch.tensor([97], dtype=torch.int32))
    after_eot = gpt.bigram_hashes(torch.tensor([cfg.eot_token, 97], dtype=torch.int32))
    assert opening[0] == after_eot[1]


def test_unused_value_lambda_has_no_gradient(narrow64, random_gpt):
    """Layers without a value embedding have the second lambda all the same, as the record does."""
    gpt = random_gpt(narrow64)
    gpt(*random_batch(128, narrow64.vocab_size), ONE_BLOCK).backward()
    for i in ATTENTION_LAYERS:
        assert (gpt.blocks[i].attn.lambdas.grad[1] == 0) == (i in range(3, 9))


def test_attention_scale_is_the_configurations(tiny64):
    x = torch.randn(64, tiny64.model_dim, dtype=torch.float64)
    scales = []

    def attend(q, k, v, mask, scale):
        scales.append(scale)
        return v

    for scale in 0.12, 0.5:
        cfg = dataclasses.replace(tiny64, attention_scale=scale)
        attention = CausalSelfAttention(cfg).double()
        attention(x, None, Rotary(cfg.head_dim, 64), attend, None)
    assert scales == [0.12, 0.5]
    assert GPT2.attention_scale == 0.12


# ----------------------------------------------------------------------------------------------------------------------
# Schedules


def test_learning_rate_schedule():
    assert {lr_multiplier(step, GPT2) for step in range(1062)} == {1.0}
    assert lr_multiplier(1062, GPT2) == pytest.approx(1)
    for step in range(1062, 1771):
        assert lr_multiplier(step, GPT2) == pytest.approx(1 - 0.9 * (step - 1062) / 708)
    assert lr_multiplier(1770, GPT2) == pytest.approx(0.1)
    whole = dataclasses.replace(GPT2, cooldown_frac=1.0, min_lr_frac=0.0, num_iterations=4)
    assert [lr_multiplier(step, whole) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_momentum_schedule():
    assert muon_momentum(0, GPT2) == pytest.approx(0.85)
    assert muon_momentum(75, GPT2) == pytest.approx(0.875)
    assert muon_momentum(150, GPT2) == pytest.approx(0.9)
    assert muon_momentum(299, GPT2) < 0.95
    for step in 300, 301, 1770:
        assert muon_momentum(step, GPT2) == pytest.approx(0.95)
    assert muon_momentum(0, dataclasses.replace(GPT2, momentum_warmup_steps=0)) == 0.95


def test_window_schedule():
    windows = [window_blocks(step, GPT2) for step in range(1771)]
    assert windows[0] == windows[131] == 1
    assert windows[132] == 2
    assert windows[1705] == windows[1770] == 14
    changes = [step for step in range(1, 1771) if windows[step] != windows[step - 1]]
    assert changes == [132, 263, 394, 525, 656, 787, 918, 1049, 1181, 1312, 1443, 1574, 1705]
    for step, window in enumerate(windows):
        covered = Fraction(1728 * step, 1770)
        assert isinstance(window, int)
        assert window == min(w for w in range(1, 15) if 128 * w >= covered)
