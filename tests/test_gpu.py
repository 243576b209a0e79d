"""The self-test of a machine with GPUs, ./test.sh -m gpu. It mostly compiles, for minutes.

On CPUs they run, too, small and not compiled. Only a GPU shows the generated kernels, FP8 on tensor cores, NCCL, and
whether gpt2 fits.
"""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from data.shards import write_shard
from dense import (
    E4M3,
    E5M2,
    dense_attention,
    dense_head,
    dense_mask,
    dense_pointer,
    find_doc_starts,
    quantized,
    with_gradients,
)
from speedrun import ROOT
from train_gpt import BandMask

GPT2 = train_gpt.PRESETS["gpt2"]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])
HAS_FP8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def randn(device: str, *shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))


def both(function: Callable, device: str) -> list[Callable]:
    """Return a function, and on a GPU also compiled."""
    return [function, compiled(function)] if device == "cuda" else [function]


# Flags reach all but the rows of stages: without `extra_steps` four steps are one of each of gpt2's first two stages
# and two of the third
FEW_STEPS = """
import dataclasses, conftest, train_gpt
cfg = train_gpt.PRESETS["gpt2"]
stages = tuple(stage._replace(extra_steps=0) for stage in cfg.stages)
train_gpt.PRESETS["gpt2"] = dataclasses.replace(cfg, stages=stages)
train_gpt.main()
"""


# First, while this process holds nothing on the GPU: the runs may need most of it
@pytest.mark.gpu
def test_four_steps_are_the_same_on_one_gpu_and_on_all(tmp_path: Path):
    """Random tokens are enough for them, and for a validation before and after them.

    They have every kind of collective: sums of losses, reduce-scatter, all-gather, and n-grams' all-to-all both ways.
    """
    tokens = np.random.default_rng(0).zipf(1.2, 4 * 3 * GPT2.batch_tokens + 2**16) % 5000
    tokens[::700] = GPT2.eot_token
    flags = "--num_iterations=4 --ngram_rows=262144 --canon_file= --seed=1".split()
    flags.append(f"--val_tokens={GPT2.val_seq_len}")
    for name in "train", "val":
        write_shard(tmp_path / f"{name}.bin", tokens)
        flags.append(f"--{name}_files={tmp_path}/{name}.bin")
    if torch.cuda.get_device_properties(0).total_memory < 32 * 2**30:  # the need is about 25 GiB, without graphs 16
        flags.append("--no-cuda_graphs")
    (script := tmp_path / "few_steps.py").write_text(FEW_STEPS)
    env = os.environ | dict(SCRIPT=train_gpt.__file__, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    results = []
    for size in sorted({1, max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())}):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}", str(script)]
        command = [sys.executable, *launch, *flags, f"--log_dir={tmp_path}", f"--run_id=on-{size}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results.append(json.loads((tmp_path / f"on-{size}.json").read_text()))
    for result in results:
        assert result["val_loss"] < math.log(GPT2.vocab_size) - 0.3
        assert abs(result["val_loss"] - results[0]["val_loss"]) < 0.02
        losses, of_one = ([loss for _, loss, _ in r["train_curve"]] for r in (result, results[0]))
        assert losses == pytest.approx(of_one, rel=0.01)
        assert result["recompiles"] == 0


def relative_errors(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(actual, expected, strict=True)]


def within(errors: Iterable[float], limit: float) -> bool:
    """Say whether all errors are below a limit: NaN is not, while `max` may drop it."""
    return all(error < limit for error in errors)


def attention(q: Tensor, k: Tensor, v: Tensor, doc_starts: Tensor, window: Tensor, block: int) -> Tensor:
    """Attend as the model does. What differs between the tests is in tensors: they share one graph."""
    start = train_gpt.first_visible_keys(doc_starts, window)
    if q.is_cuda:
        mask = train_gpt.causal_block_mask(start, block)
    else:
        mask = BandMask(train_gpt.causal_mask(start), len(start), block, len(start), q.dtype)
    return train_gpt.attend(q, k, v, mask, heads_per_pair=1)


@on_both
@pytest.mark.parametrize(
    ("window", "mean_document", "is_half"),
    [(100, 700, (0, 0)), (256, 40, (1, 0)), (650, 10**9, (1, 1)), (4096, 700, (1, 0)), (4096, 10**9, (0, 0))],
)
def test_attention_equals_dense_forward_and_backward(window: int, mean_document: int, is_half: tuple, device: str):
    """Queries and keys, or values, may be half as wide."""
    T, H, D, block = (4096, 6, 128, 128) if device == "cuda" else (512, 2, 32, 16)
    half_qk, half_v = is_half
    widths = [D >> half_qk, D >> half_qk, D >> half_v, D >> half_v]
    generator = torch.Generator().manual_seed(window)
    docs = (torch.rand(T, generator=generator) < 1 / mean_document).cumsum(0, dtype=torch.int32)
    dense = functools.partial(dense_attention, mask=dense_mask(docs, window).to(device))
    q, k, v, grad = (torch.randn(T, H, width, generator=generator).to(device) for width in widths)
    qkv = [0.12 * train_gpt.norm(q), train_gpt.norm(k), v]
    settings = dict(doc_starts=find_doc_starts(docs).to(device), block=block)
    settings |= dict(window=torch.tensor(window, dtype=torch.int32, device=device))
    function = functools.partial(compiled(attention) if device == "cuda" else attention, **settings)
    actual = with_gradients(function, *(t.bfloat16() for t in qkv), grad=grad)
    errors = relative_errors(actual, with_gradients(dense, *qkv, grad=grad))
    assert within(errors, 0.015), f"output, grad q, k, v: {errors}; bf16 gives 0.005, a CPU's softmax in it 0.01"


@on_both
@pytest.mark.parametrize("mean_document", [700, 40, 10**9])
def test_the_pointer_equals_a_dense_one_forward_and_backward(mean_document: int, device: str):
    """In blocks that are no multiple of the mask's; many tokens are repeated, and in short documents few."""
    T, K, D, block, mask_block = (4096, 768, 128, 500, 128) if device == "cuda" else (512, 48, 16, 56, 16)
    changes = dict(model_dim=K, pointer_dim=D, pointer_block=block, block_size=mask_block, dtype="bfloat16")
    pointer = train_gpt.Pointer(dataclasses.replace(GPT2, **changes, device=device)).to(device)
    generator = torch.Generator().manual_seed(0)
    docs = (torch.rand(T, generator=generator) < 1 / mean_document).cumsum(0, dtype=torch.int32)
    read = (torch.rand(T + 1, generator=generator) ** 3 * 300).int()
    x = train_gpt.norm(torch.randn(T, K, generator=generator)).bfloat16()
    grad = torch.randn(T, 2, generator=generator).to(device)
    x, docs, tokens, next_tokens = (t.to(device) for t in (x, docs, read[:-1], read[1:]))
    inputs = train_gpt.ModelInputs(tokens, next_tokens, find_doc_starts(docs), *[None] * 5)
    names = ("weight", "sink", "gain")
    values = [x, 2 * pointer.weight, 3 * pointer.sink, 4 * pointer.gain]  # uneven weights

    def ours(x, *values):
        return torch.func.functional_call(pointer, dict(zip(names, values, strict=True)), (x, inputs))

    dense = functools.partial(dense_pointer, tokens=tokens, next_tokens=next_tokens, docs=docs, block=block)
    expected = with_gradients(dense, *(t.double() for t in values), grad=grad)
    assert min(expected[0].amax(0)) > 0.5 > 0.2 > max(expected[0].amin(0))
    for function in both(ours, device):
        errors = relative_errors(with_gradients(function, *values, grad=grad), expected)
        # The gain's gradient is a sum that cancels: test_pointer has it, in float64
        assert within(errors[:-1], 0.02), f"weights, grad x, weight, sink: {errors}"


@on_both
@pytest.mark.parametrize("precision", ["bf16", "fp8"][: 1 + HAS_FP8])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_head_equals_autograd_of_the_whole(precision: str, is_sampled: bool, device: str):
    """Over all tokens, or over some that are the sequence's own, with a pointer and by its kernel."""
    T, K, V, C = (4096, 768, 50304, 10240) if device == "cuda" else (64, 48, 320, 192)
    generator = torch.Generator(device).manual_seed(0)
    x = train_gpt.norm(torch.randn(T, K, device=device, generator=generator)).bfloat16()
    w = (torch.randn(V, K, device=device, generator=generator) * 0.02).bfloat16()
    sampled_classes = torch.randperm(V, device=device, generator=generator)[: C if is_sampled else V].sort().values
    targets = torch.randint(len(sampled_classes), (T,), device=device, generator=generator)
    weights = torch.tensor([1.0, 0.5, 0.25], device=device)
    softcap = GPT2.lm_head_softcap, GPT2.softcap_range, GPT2.softcap_shift
    cfg = dataclasses.replace(GPT2, logits_chunk=T // 4, lm_head_fp8=precision == "fp8")
    copy = len(sampled_classes) - 2
    columns = torch.nn.functional.pad(targets, (0, 2), value=-2).unfold(0, 3, 1)
    columns = torch.cat([columns, torch.full_like(targets, copy)[:, None]], dim=1)
    pointer = torch.rand(T, 3, device=device, generator=generator).softmax(1)[:, :2].contiguous()
    w[sampled_classes[copy]] += 0.1 * x[0]  # a copy has a part

    def head(x, w, pointer):
        rows = torch.nn.functional.embedding(sampled_classes, w)
        with_copy = torch.cat([weights, weights.new_zeros(1)])
        return train_gpt.TrainingLoss.apply(x, rows, pointer, columns, with_copy, cfg)

    loss, grad_x, grad_rows, *rest = dense_head(x, w[sampled_classes], targets, weights, softcap, pointer, copy=copy)
    expected = loss, grad_x, torch.zeros_like(w).index_copy_(0, sampled_classes, grad_rows), *rest
    limit = 0.09 if cfg.lm_head_fp8 else 0.01
    for function in both(head, device):
        found = with_gradients(function, x, w, pointer)
        errors = relative_errors(found, expected)
        assert within(errors, limit), f"loss, grad x, w, pointer: {errors}; e5m2 rounds by 0.066, root mean square"
        assert found[2].any(1).sum() == len(sampled_classes)


def fp8_by_hand(x: Tensor, grad: Tensor, w1: Tensor, w2: Tensor | None = None, then: Callable = Tensor.clone) -> list:
    """Return an MLP, or without w2 then(x @ w1.T), and its gradients, of factors that FP8 has rounded, in float64."""
    found, dz = [], quantized(grad, train_gpt.FP8_GRAD, E5M2)
    x, w1 = quantized(x, train_gpt.FP8_X, E4M3), quantized(w1, train_gpt.FP8_W, E4M3)
    y = x @ w1.T
    if w2 is None:
        z = then(y := y.bfloat16().double().requires_grad_())
        dz = quantized(torch.autograd.grad(z, y, grad.double())[0].bfloat16(), train_gpt.FP8_GRAD, E5M2)
        y = z.detach()
    else:
        w2 = quantized(w2, train_gpt.FP8_W, E4M3)
        squares = y.bfloat16().double().relu().square()
        scales = squares.amax(1, keepdim=True).clamp(min=1e-12) / 448
        squares = quantized(squares, 1 / scales, E4M3)
        y = squares @ w2.T
        found = [dz.T @ quantized(squares, 1 / scales.max(), E4M3)]
        dz = quantized((2 * squares.sqrt() * (dz @ w2)).float(), train_gpt.FP8_GRAD, E5M2)
    return [y, dz @ w1, dz.T @ x, *found]


def normalized(y: Tensor, split: tuple, cos: Tensor, sin: Tensor) -> Tensor:
    """Return y (T, N) with its first columns, queries and keys, as `NormRotate` makes them: all without scale."""
    width, one = math.prod(split), torch.ones((), dtype=y.dtype, device=y.device)
    q, k, v = y.split([width, width, y.size(1) - 2 * width], dim=1)
    q, k = (train_gpt.NormRotate.apply(t.reshape(-1, *split), cos.to(t), sin.to(t), one).flatten(1) for t in (q, k))
    return torch.cat([q, k, v], dim=1)


@pytest.mark.skipif(not HAS_FP8, reason="this GPU has no FP8")
@on_both
@pytest.mark.parametrize(("is_mlp", "T"), [(False, 4096), (True, 4096), (True, 208)])
def test_fp8_equals_rounded_factors_and_is_near_the_exact_product(is_mlp: bool, T: int, device: str):
    """Forward and backward. One token has nearly all in one channel, within the range of FP8; zeros stay zeros.

    The MLP takes its relu from squares that FP8 rounded once more: 0.0131 on one H100 (2026-11-28), 0.0147 on CPUs.
    With 208 tokens the kernel's last tiles reach beyond the edge.
    """
    T, K, N = (T, 768, 2816) if device == "cuda" else (32, 768, 80)
    x, w1, w2, grad = (randn(device, *shape, seed=n) for n, shape in enumerate(((T, K), (N, K), (K, N), (T, K))))
    x[0, 1] = 1e4
    x[1] *= not is_mlp  # the gradient of the norm of zeros is beyond FP8
    x = train_gpt.norm(x).bfloat16()
    weights = [(w1 / K**0.5).bfloat16()] + [(w2 / N**0.5).bfloat16()] * is_mlp
    grad = ((grad if is_mlp else grad[:, :1] * w1[:, 0]) * torch.logspace(-3, 1, T, device=device)[:, None]).bfloat16()
    then: Callable = Tensor.clone
    if is_mlp:
        plain = lambda x, w1, w2: (x @ w1.T).relu().square() @ w2.T  # noqa: E731
        cfg = dataclasses.replace(GPT2, device=device, dtype="bfloat16")
        has_tma = train_gpt.MLP(cfg, scale_per_token=False).has_tma
        w2_scales = torch.full((1, K), 1 / train_gpt.FP8_W, device=device)
        ours = lambda *args: train_gpt.FP8ReluSquaredMLP.apply(*args, w2_scales, has_tma)  # noqa: E731
    else:  # queries and keys of six heads, two of them a pair, and values
        split = (3, 2, 1, 2, 32) if device == "cuda" else (1, 2, 1, 2, 8)
        angles = 99 * randn(device, T, 1, 2, 1, 1, split[-1], seed=9)
        cos, sin, one = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.ones((), device=device)
        then = functools.partial(normalized, split=split, cos=cos, sin=sin)
        plain = lambda x, w1: then(x @ w1.T)  # noqa: E731
        ours = lambda x, w1: torch.cat(  # noqa: E731
            [t.flatten(1) for t in train_gpt.FP8QKV.apply(x, w1, cos, sin, one, split)], dim=1
        )
    exact = with_gradients(plain, *(t.double() for t in (x, *weights)), grad=grad)
    rounded = fp8_by_hand(x, grad, *weights, then=then)
    for function in both(ours, device):
        found = with_gradients(function, x, *weights, grad=grad)
        limit = 0.02 if is_mlp else 0.015  # y of QK-norm is saved in bf16
        assert within(errors := relative_errors(found, rounded), limit), f"output, grad x and weights: {errors}"
        assert within(errors := relative_errors(found, exact), 0.12), f"output, grad x and weights: {errors}"
        assert min(errors) > 0.02, "it was not FP8"
        assert within(relative_errors(found[0][:1], exact[0][:1]), 0.12), "that token is beyond the range"
        assert not is_mlp or not found[0][1].any()
