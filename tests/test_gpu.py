"""The self-test of a machine with GPUs, ./test.sh -m gpu: what no CPU can check. It mostly compiles, for minutes."""

import dataclasses
import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import train_gpt
from shards import write_shard
from train_gpt import Ranks, Trainer

GPT2 = train_gpt.PRESETS["gpt2"]
HAS_FP8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()  # else the graphs of one test count towards the limit on recompilations in the next


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


def run(function, inputs, grad=None) -> tuple[Tensor, ...]:
    """Return what the function of `inputs` returns, and their gradients."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, grad if grad is None else grad.to(y.dtype))


def relative_errors(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("window", [1, 2, 5, 32])
@pytest.mark.parametrize("mean_document", [40, 700, 10**9])
def test_flex_attention_equals_dense_forward_and_backward(window: int, mean_document: int):
    T, H, D, block, scale = 4096, 6, 128, 128, 0.12
    generator = torch.Generator().manual_seed(window)
    docs = (torch.rand(T, generator=generator) < 1 / mean_document).cumsum(0, dtype=torch.int32).cuda()
    q, k, v, grad = (torch.randn(T, H, D, generator=generator).cuda() for _ in range(4))
    qkv = [train_gpt.norm(q), train_gpt.norm(k), v]
    window_blocks = torch.tensor(window, dtype=torch.int32, device="cuda")

    def flex(q, k, v):
        mask = train_gpt.document_block_mask(docs, window_blocks, block)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, scale=scale)[0].transpose(0, 1)

    def dense(q, k, v):
        i = torch.arange(T, device="cuda")
        visible = (i[:, None] >= i) & (docs[:, None] == docs) & (i[:, None] // block - i // block < window)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    errors = relative_errors(run(compiled(flex), [t.bfloat16() for t in qkv], grad), run(dense, qkv, grad))
    assert max(errors) < 0.015, f"output, grad q, k, v: {errors}; bf16 rounding alone gives about 0.004"


@pytest.mark.skipif(not HAS_FP8, reason="this GPU has no FP8")
def test_fp8_head_equals_bf16_within_what_fp8_resolves():
    T, K, V, cap = 4096, 768, 50304, 15.0
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = train_gpt.norm(torch.randn(T, K, device="cuda", generator=generator)).bfloat16()
    w = torch.randn(V, K, device="cuda", generator=generator) * 0.02
    targets = torch.randint(V, (T,), device="cuda", generator=generator)

    def whole(x, w):
        z = torch.nn.functional.linear(x, w.bfloat16()).float()
        return torch.nn.functional.cross_entropy(cap * torch.tanh(z / cap) + cap, targets)

    expected = run(whole, [x, w])
    fp8 = GPT2.fp8_x_scale, GPT2.fp8_w_scale, 128.0 * T  # the preset's scale is made for gradients of 49,152 tokens
    for scales, limit in (None, 0.01), (fp8, 0.1):

        def head(x, w, scales=scales):
            return train_gpt.HeadLoss.apply(x, w, targets, cap, T // 4, scales, True)

        for function in compiled(head), head:
            errors = relative_errors(run(function, [x, w]), expected)
            assert max(errors) < limit, f"loss, grad x, w: {errors}; rounding to e4m3 and e5m2 gives 0.03 to 0.07"


def test_the_step_never_waits_for_the_device():
    """CUDA's sync debug mode raises at a wait."""
    lengths = dict(train_seq_len=2048, batch_tokens=4096, val_seq_len=2048, val_tokens=2048)
    trainer = Trainer(train_gpt.resolve(dataclasses.replace(GPT2, **lengths, seed=0, run_id="waits")), Ranks())
    rows = torch.randint(GPT2.vocab_size, (2, 2049), device="cuda")
    sequences = [(row[:-1].int(), row[1:]) for row in rows]
    trainer.train_step(0, sequences)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [trainer.train_step(step, sequences).to("cpu", non_blocking=True) for step in range(1, 4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(loss.isfinite() for loss in losses)


def write_random_text(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, length in ("train_000001", 3 * GPT2.batch_tokens), ("val_000000", 2 * GPT2.val_seq_len):
        tokens = np.minimum(rng.zipf(1.2, length), GPT2.vocab_size - 2)
        tokens[rng.random(length) < 1 / 700] = GPT2.eot_token
        write_shard(folder / f"{name}.bin", tokens)


def train(folder: Path, processes: int) -> dict:
    gc.collect()
    torch.cuda.empty_cache()  # the preset takes most of a GPU
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    flags = dict(preset="gpt2", num_iterations=2, seed=1, val_tokens=GPT2.val_seq_len, log_dir=folder)
    flags |= dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", run_id=f"on-{processes}")
    command = [sys.executable, *launcher, train_gpt.__file__, *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / f"on-{processes}.json").read_text())


def test_two_steps_of_gpt2_are_the_same_on_one_gpu_and_on_all(tmp_path: Path):
    """Random text of gpt2's vocabulary is enough for two steps, and for a validation before and after them."""
    write_random_text(tmp_path)
    most = max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())
    results = [train(tmp_path, size) for size in sorted({1, most})]
    for result in results:
        assert abs(result["val_curve"][0][1] - math.log(50304)) < 1e-4, "the head is zero: all words are equally likely"
        assert result["val_loss"] < 10.5
        assert abs(result["val_loss"] - results[0]["val_loss"]) < 0.02
        assert result["recompiles"] == 0
