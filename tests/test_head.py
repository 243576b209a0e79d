"""The head in FP8, in slices, against quantized factors. test_pointer has it in float64, test_gpu in bf16."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt
from dense import CAP, E4M3, E5M2, dense_head, quantized, randomize, softcapped_loss, with_gradients
from train_gpt import (
    FP8QKV,
    HEAD_FP8_DZ,
    HEAD_FP8_W,
    HEAD_FP8_X,
    FP8ReluSquaredMLP,
    Ranks,
    Trainer,
    TrainingLoss,
    make_attention_settings,
)

T, K, V = 80, 48, 112  # tokens, width, rows of the head: few, as the CPU's FP8 kernels are slow
THREE = torch.tensor([1.0, 0.5, 0.3])  # weights of the next tokens


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return x of unit RMS, w in float32 at least for logits that the cap bends, targets."""
    generator = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(T, K, generator=generator, dtype=torch.float64), (K,)).to(dtype)
    w = 0.2 * torch.randn(V, K, generator=generator, dtype=torch.float64)
    return x, w.to(torch.promote_types(dtype, torch.float32)), torch.randint(V, (T,), generator=generator)


def in_slices(x: Tensor, w: Tensor, targets: Tensor, slice_tokens: int = T) -> tuple[Tensor, ...]:
    """Return the script's loss and gradients in FP8. Beyond the end a next token is -2."""
    softcap = dict(zip(("lm_head_softcap", "softcap_range", "softcap_shift"), CAP, strict=True))
    changes = dict(logits_chunk=slice_tokens, lm_head_fp8=True, loss_scale=1.0)
    cfg = dataclasses.replace(train_gpt.PRESETS["nano"], **changes, **softcap)
    columns = F.pad(targets, (0, 2), value=-2).unfold(0, 3, 1)
    return with_gradients(lambda x, w: TrainingLoss.apply(x, w, None, columns, THREE, cfg), x, w)


def fp8_by_hand(x: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply quantized factors in float64; quantize the logits."""
    x_q, w_q = quantized(x, HEAD_FP8_X, E4M3), quantized(w, HEAD_FP8_W, E4M3)
    z = quantized((x_q @ w_q.T).float(), 1.0, E4M3).requires_grad_()
    loss = softcapped_loss(z, targets, THREE)
    loss.backward()
    grad = quantized(z.grad.float(), HEAD_FP8_DZ, E5M2)
    return loss.detach(), grad @ w_q, grad.T @ x_q


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_is_exact_but_for_quantization(dtype: torch.dtype):
    """Scales, formats and transpositions. In fp32 a number in the middle may be rounded to the other side, rarely."""
    x, w, targets = args = inputs(dtype)
    plain = dense_head(x.double(), w.double(), targets, THREE)
    actual = in_slices(*args)
    assert [t.dtype for t in actual] == [torch.float32, dtype, torch.float32]
    for got, want, other, limit in zip(actual, fp8_by_hand(*args), plain, (1e-4, 5e-3, 2e-3), strict=True):
        assert (got - want).norm() <= limit * want.norm()
        assert (got - other).norm() <= 0.1 * other.norm(), "FP8 as a whole is off by a few percent"
        assert (got - other).norm() > 3 * limit * other.norm() or got.ndim == 0, "as far from no quantization at all"
    for loss, grad_x, grad_w in (in_slices(*args, slice_tokens) for slice_tokens in (16, 48)):
        assert torch.equal(grad_x, actual[1])
        torch.testing.assert_close((loss, grad_w), actual[::2], rtol=1e-5, atol=1e-6)  # sums in fp32


@pytest.mark.published
def test_the_model_takes_fp8_in_training_only(gpt2, monkeypatch):
    """In MLPs and products to q, k, v."""
    sizes = dict(model_dim=96, num_heads=6, head_dim=16, mlp_dim=64)
    cfg = dataclasses.replace(gpt2, **sizes, dtype="bfloat16", logits_chunk=24, val_logits_chunk=40)
    trainer = Trainer(cfg, Ranks())
    plain = randomize(trainer.gpt)
    fp8 = Trainer(dataclasses.replace(cfg, lm_head_fp8=True, layers_fp8=True), Ranks()).gpt
    fp8.load_state_dict(plain.state_dict())
    schedule = cfg.step_schedules[0]
    [inputs], exchange = trainer.dummy_batch(schedule)
    trainer.table.rows.normal_()
    trainer.table.fetch(exchange)
    batch = inputs, make_attention_settings(schedule, cfg, trainer.device), trainer.table.fetched
    x = train_gpt.norm(torch.randn(32, 96)).bfloat16()
    got, want = (gpt.blocks[0].mlps[0](x, torch.tensor(1.0)) for gpt in (fp8, plain))
    assert 0 < (got - want).norm() < 0.1 * want.norm()
    calls = []
    for product in FP8QKV, FP8ReluSquaredMLP:
        apply = product.apply
        noted = lambda *args, product=product, apply=apply: (calls.append(product), apply(*args))[1]  # noqa: E731
        monkeypatch.setattr(product, "apply", noted)
    assert fp8(*batch) != plain(*batch)
    attentions = sum(layer.attention is not None for layer in cfg.layers)
    counts = {FP8QKV: attentions, FP8ReluSquaredMLP: sum(layer.mlps for layer in cfg.layers)}
    assert Counter(calls) == counts
    with torch.no_grad():
        assert fp8(*batch) == plain(*batch)
    assert Counter(calls) == counts, "not in validation"
