"""The self-test of a machine with GPUs, run before the first training there: ./test.sh -m gpu

Checks what no CPU can: compiled FlexAttention and the FP8 head against plain mathematics, and two steps of the true
gpt2 preset, compiled, on one GPU and on all of them. Takes some minutes, most of them compilation.
"""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt
from shards import write_shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SCRIPT = Path(train_gpt.__file__)


def random_documents(length: int, mean: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(length, generator=generator) < 1 / mean).cumsum(0, dtype=torch.int32).cuda()


@pytest.mark.parametrize("window", [1, 2, 5, 32])
@pytest.mark.parametrize("mean_document", [40, 700, 10**9])
def test_flex_attention_equals_dense_forward_and_backward(window, mean_document):
    T, H, D, block, scale = 4096, 6, 128, 128, 0.12
    generator = torch.Generator().manual_seed(window)
    docs = random_documents(T, mean_document, generator)
    q, k, v, g = (torch.randn(T, H, D, generator=generator).cuda() for _ in range(4))
    q, k = (train_gpt.norm(t) for t in (q, k))

    class Attend(torch.nn.Module):
        use_flex, kernel_options = True, train_gpt.flex_kernel_options()
        attend = train_gpt.GPT.attend

        def forward(self, q, k, v, docs, window):
            return self.attend(q, k, v, train_gpt.document_block_mask(docs, window, block), scale)

    def run(function, *tensors):
        tensors = [t.detach().clone().requires_grad_() for t in tensors]
        y = function(*tensors)
        y.backward(g.to(y.dtype))
        return y.float(), *(t.grad.float() for t in tensors)

    def dense(q, k, v):
        i = torch.arange(T, device="cuda")
        visible = (i[:, None] >= i) & (docs[:, None] == docs) & (i[:, None] // block - i // block < window)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    window_tensor = torch.tensor(window, dtype=torch.int32, device="cuda")
    compiled = torch.compile(Attend(), fullgraph=True, dynamic=False)
    expected = run(dense, q, k, v)
    actual = run(lambda q, k, v: compiled(q, k, v, docs, window_tensor), *(t.bfloat16() for t in (q, k, v)))
    for name, got, want in zip(("output", "grad q", "grad k", "grad v"), actual, expected, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error < 0.015, f"{name}: relative error {error:.4f}; bf16 rounding alone gives about 0.004"


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
)
def test_fp8_head_equals_bf16_within_what_fp8_resolves():
    T, K, V, cap = 4096, 768, 50304, 15.0
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = train_gpt.norm(torch.randn(T, K, device="cuda", generator=generator)).bfloat16()
    w = torch.randn(V, K, device="cuda", generator=generator) * 0.02
    targets = torch.randint(V, (T,), device="cuda", generator=generator)

    def whole(x, w):
        z = torch.nn.functional.linear(x, w.bfloat16()).float()
        return torch.nn.functional.cross_entropy(cap * torch.tanh(z / cap) + cap, targets)

    def head(scales):
        return lambda x, w: train_gpt.HeadLoss.apply(x, w, targets, cap, T // 4, scales)

    def run(function):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = function(a, b)
        loss.backward()
        return loss.detach(), a.grad.float(), b.grad

    expected = run(whole)
    x_s, w_s, _ = train_gpt.GPT.FP8_SCALES
    for scales, limit in (None, 0.01), ((x_s, w_s, 128.0 * T), 0.1):  # the gradient's scale is made for 49,152 tokens
        compiled = torch.compile(head(scales), fullgraph=True, dynamic=False)
        for function in compiled, head(scales):
            for name, got, want in zip(("loss", "grad x", "grad w"), run(function), expected, strict=True):
                error = ((got - want).norm() / want.norm()).item()
                assert error < limit, f"{name}: relative error {error:.3f}; e4m3 and e5m2 rounding gives 0.03 to 0.07"


def test_newton_schulz_compiled_in_bf16():
    G = torch.randn(5, 768, 3072, device="cuda")
    compiled = torch.compile(train_gpt.zeropower_via_newtonschulz5, fullgraph=True, dynamic=False)
    singular_values = torch.linalg.svdvals(compiled(G, torch.bfloat16).float())
    assert singular_values.min() > 0.6
    assert singular_values.max() < 1.3


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Random text of gpt2's vocabulary, enough for two steps and one validation sequence."""
    folder = tmp_path_factory.mktemp("shards")
    cfg = train_gpt.PRESETS["gpt2"]
    rng = np.random.default_rng(0)
    for name, length in ("train_000001", 3 * cfg.batch_tokens), ("val_000000", 2 * cfg.val_seq_len):
        tokens = np.minimum(rng.zipf(1.2, length), cfg.vocab_size - 2)
        tokens[rng.random(length) < 1 / 700] = cfg.eot_token
        write_shard(folder / f"{name}.bin", tokens)
    return folder


def train(shards: Path, log_dir: Path, processes: int, *flags: str) -> dict:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), "--preset", "gpt2", "--num_iterations", "2", "--seed", "1"]
    command += [
        "--train_files",
        f"{shards}/train_*.bin",
        "--val_files",
        f"{shards}/val_*.bin",
        "--val_tokens",
        "262144",
    ]
    done = subprocess.run([*command, "--log_dir", str(log_dir), *flags], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(next(log_dir.glob("*.json")).read_text())


@pytest.fixture(scope="module")
def one_gpu(shards, tmp_path_factory):
    return train(shards, tmp_path_factory.mktemp("one"), 1)


def test_first_validation_loss_is_ln_50304(one_gpu):
    step, val_loss, _ = one_gpu["val_curve"][0]
    assert step == 0
    assert abs(val_loss - math.log(50304)) < 1e-4  # the head is zero: all words are equally likely


def test_two_steps_of_gpt2_on_one_gpu(one_gpu):
    assert one_gpu["val_loss"] < 10.5
    assert one_gpu["recompiles"] == 0


def test_all_gpus_train_as_one_does(one_gpu, shards, tmp_path):
    fitting = [size for size in (8, 4, 2) if size <= torch.cuda.device_count()]
    if not fitting:
        pytest.skip("one GPU only")
    result = train(shards, tmp_path, fitting[0])
    assert abs(result["val_loss"] - one_gpu["val_loss"]) < 0.02
    assert result["recompiles"] == 0


def test_the_step_never_waits_for_the_device():
    """Forward, backward, optimizers and the loss watch, under CUDA's sync debug mode, which raises at a wait."""
    cfg = dataclasses.replace(
        train_gpt.PRESETS["gpt2"], device="cuda", train_seq_len=2048, batch_tokens=4096, val_seq_len=2048,
        val_tokens=2048, lm_head_fp8=False,
    )  # fmt: skip
    device = torch.device("cuda", 0)
    gpt = train_gpt.GPT(cfg).to(device)
    model = torch.compile(gpt, fullgraph=True, dynamic=False)
    optimizers = train_gpt.build_optimizers(gpt, cfg, train_gpt.World(), train_gpt.zeropower_via_newtonschulz5)
    batch = train_gpt.Batch(train_gpt.Shard("", 0, ""), 0, cfg.batch_tokens)
    watch = train_gpt.LossWatch([batch] * 8, device)
    tokens = torch.randint(cfg.vocab_size, (2, 2049), device=device)
    sequences = [(row[:-1].int(), row[1:]) for row in tokens]
    window = torch.ones((), dtype=torch.int32, device=device)

    def step(index: int) -> None:
        window.fill_(1 + index)
        loss = train_gpt.train_step(model, sequences, window)
        train_gpt.step_optimizers(optimizers)
        gpt.zero_grad(set_to_none=True)
        watch.put(index, loss)

    step(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(1, 4):
            step(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
