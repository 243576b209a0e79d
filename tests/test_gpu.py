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
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import train_gpt
from dense import dense_attention, dense_mask
from shards import write_shard
from speedrun import check
from speedrun.process import ROOT
from test_head import needs_fp8, whole, with_gradients
from train_gpt import GatheredMask

GPT2, NANO = (train_gpt.PRESETS[name] for name in ("gpt2", "nano"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
on_both = pytest.mark.parametrize("device", ["cpu", CUDA])


def write_documents(folder: Path, cfg: train_gpt.Hyperparameters) -> dict[str, str]:
    """Write shards of random text: frequent words and rare ones, in documents of about 700. Return settings.

    Words at odd positions are others than those at even ones, so none follows itself: while embedding and head are one
    table, the model favours the token that it has just seen.
    """
    rng = np.random.default_rng(0)
    for name, length in ("train_000001", 8 * cfg.batch_tokens), ("val_000000", cfg.val_tokens + cfg.val_seq_len):
        tokens = 2 * (rng.zipf(1.2, length) % (cfg.vocab_size // 2 - 1)) + np.arange(length) % 2
        tokens[rng.random(length) < 1 / 700] = cfg.eot_token
        write_shard(folder / f"{name}.bin", tokens)
    return dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin", val_sha256="")


def shortened(cfg: train_gpt.Hyperparameters, memory: float) -> train_gpt.Hyperparameters:
    """Halve the sequences until they fit by check.py's estimate."""
    report = check.Report(False)
    check.check_memory_and_time(dataclasses.replace(cfg, dtype="bfloat16"), [check.Gpu("", (0, 0), memory)], 1, report)
    if not report.problems:
        return cfg
    lengths = dict(train_seq_len=cfg.train_seq_len // 2, val_seq_len=cfg.val_seq_len // 2)
    return shortened(dataclasses.replace(cfg, **lengths, val_tokens=lengths["val_seq_len"]), memory)


# First, while this process holds nothing on the GPU: the runs may need most of it
@pytest.mark.parametrize(
    ("preset", "device"),
    [pytest.param("nano", "cpu", marks=pytest.mark.slow), pytest.param("gpt2", "cuda", marks=pytest.mark.gpu)],
)
def test_two_steps_are_the_same_on_one_process_and_on_all(preset: str, device: str, tmp_path: Path):
    """Random text of the preset's vocabulary is enough for two steps, and for a validation before and after them."""
    if device == "cuda":
        gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        cfg = dataclasses.replace(GPT2, val_tokens=GPT2.val_seq_len, extension_steps=0)
        cfg, sizes = shortened(cfg, 0.95 * min(gpus)), {1, max(n for n in (1, 2, 4, 8) if n <= len(gpus))}
    else:
        cfg, sizes = dataclasses.replace(NANO, batch_tokens=2048, val_tokens=NANO.val_seq_len, cpu_threads=1), {1, 2}
        cfg = dataclasses.replace(cfg, val_loss_every=2)
    files, results = write_documents(tmp_path, cfg), []
    cfg = dataclasses.replace(cfg, **files, num_iterations=2, seed=1, log_dir=str(tmp_path))
    default = dataclasses.asdict(train_gpt.PRESETS[cfg.preset])
    flags = [f"--{name}={value}" for name, value in dataclasses.asdict(cfg).items() if value != default[name]]
    flags += [f"--preset={cfg.preset}", f"--device={device}"]
    for size in sorted(sizes):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"] if size > 1 else []
        command = [sys.executable, *launcher, train_gpt.__file__, *flags, f"--run_id=on-{size}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results.append(json.loads((tmp_path / f"on-{size}.json").read_text()))
    guess = math.log(cfg.vocab_size + -cfg.vocab_size % 64)
    for result in results:
        assert abs(result["val_curve"][0][1] - guess) < 0.05
        assert result["val_loss"] < guess - 0.3
        assert abs(result["val_loss"] - results[0]["val_loss"]) < 0.02
        assert result["recompiles"] == 0


def relative_errors(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(actual, expected, strict=True)]


def within(errors: Iterable[float], limit: float) -> bool:
    """Say whether all errors are below a limit: NaN is not, while `max` may drop it."""
    return all(error < limit for error in errors)


def test_these_tests_need_no_package_but_torch_numpy_tqdm_and_pytest():
    """A machine with a GPU may have no network."""
    others = "hypothesis", "scipy", "matplotlib", "tiktoken", "triton", "xdist", "ruff", "mypy", "huggingface_hub"
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import conftest, test_gpu"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "data", ROOT / "tests")))
    subprocess.run([sys.executable, "-c", code], env=os.environ | dict(PYTHONPATH=path), check=True)


def attention(q: Tensor, k: Tensor, v: Tensor, docs: Tensor, window: Tensor, block: int) -> Tensor:
    """Attend as the model does. What differs between the tests is in tensors: they share one graph."""
    mask = train_gpt.document_block_mask(docs, window, block)
    mask = mask if q.is_cuda else GatheredMask(mask, len(docs) // block, q.dtype)
    return train_gpt.attend(q, k, v, mask, heads_per_pair=1)


@on_both
@pytest.mark.parametrize(("window", "mean_document"), [(100, 700), (256, 40), (650, 10**9), (4096, 700)])
def test_attention_equals_dense_forward_and_backward(window: int, mean_document: int, device: str):
    T, H, D, block = (4096, 6, 128, 128) if device == "cuda" else (512, 2, 32, 16)
    generator = torch.Generator().manual_seed(window)
    docs = (torch.rand(T, generator=generator) < 1 / mean_document).cumsum(0, dtype=torch.int32)
    dense = functools.partial(dense_attention, mask=dense_mask(docs, window).to(device))
    q, k, v, grad = (torch.randn(T, H, D, generator=generator).to(device) for _ in range(4))
    qkv = [0.12 * train_gpt.norm(q), train_gpt.norm(k), v]
    settings = dict(docs=docs.to(device), window=torch.tensor(window, dtype=torch.int32, device=device), block=block)
    function = functools.partial(compiled(attention) if device == "cuda" else attention, **settings)
    actual = with_gradients(function, *(t.bfloat16() for t in qkv), grad=grad)
    errors = relative_errors(actual, with_gradients(dense, *qkv, grad=grad))
    assert within(errors, 0.015), f"output, grad q, k, v: {errors}; bf16 gives 0.005, a CPU's softmax in it 0.01"


@on_both
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_head_equals_autograd_of_the_whole(precision: str, device: str):
    reason = needs_fp8.kwargs["reason"] if device == "cpu" else ""
    if precision == "fp8" and (reason or (device == "cuda" and torch.cuda.get_device_capability() < (8, 9))):
        pytest.skip(reason or "this GPU has no FP8")
    T, K, V = (4096, 768, 50304) if device == "cuda" else (64, 48, 320)
    generator = torch.Generator(device).manual_seed(0)
    x = train_gpt.norm(torch.randn(T, K, device=device, generator=generator)).bfloat16()
    w = (torch.randn(V, K, device=device, generator=generator) * 0.02).bfloat16()
    targets = torch.randint(V, (T,), device=device, generator=generator)
    weights = torch.tensor([1.0, 0.5, 0.25], device=device)
    softcap = GPT2.lm_head_softcap, GPT2.softcap_range, GPT2.softcap_shift
    scales = train_gpt.FP8_SCALES if precision == "fp8" else None

    def head(x, w):
        columns = train_gpt.next_targets(targets, len(weights))
        return train_gpt.HeadLoss.apply(x, w, columns, weights, softcap, T // 4, scales, True)

    expected, limit = whole(x, w, targets, weights, softcap), 0.09 if scales else 0.01
    for function in [head, compiled(head)] if device == "cuda" else [head]:
        errors = relative_errors(with_gradients(function, x, w), expected)
        assert within(errors, limit), f"loss, grad x, w: {errors}; e5m2 rounds by 0.066, root mean square"


@on_both
@pytest.mark.parametrize("T", [4096, 200])  # 200: the kernel's last tiles reach beyond the edge
def test_mlp_equals_autograd_in_float64(T: int, device: str):
    K = 768 if device == "cuda" else 32
    generator = torch.Generator(device).manual_seed(0)
    shapes = (T, K), (4 * K, K), (K, 4 * K), (T, K)
    x, c_fc, c_proj, grad = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
    args = x, c_fc / K**0.5, c_proj / K**0.5
    exact = with_gradients(lambda x, a, b: (x @ a.T).relu().square() @ b.T, *(t.double() for t in args), grad=grad)
    by_kernel = train_gpt.MLP(dataclasses.replace(GPT2, device=device, dtype="bfloat16")).by_kernel
    mlp = lambda *args: train_gpt.ReluSquaredMLP.apply(*args, False, by_kernel)  # noqa: E731
    for function in [mlp, compiled(mlp)] if device == "cuda" else [mlp]:
        errors = relative_errors(with_gradients(function, *args, grad=grad), exact)
        assert within(errors, 0.006), f"output, grad x, c_fc, c_proj: {errors}; on a CPU at most 0.0045"


@on_both
def test_a_look_up_sums_gradients_in_fp32(device: str):
    rows, T, K = (300_000, 8192, 768) if device == "cuda" else (300, 4096, 16)
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(rows, K, device=device, generator=generator).bfloat16()
    ids = torch.randint(rows, (T,), dtype=torch.int32, device=device, generator=generator)
    ids[T // 2 :] = ids[0]  # a GPU that sums in bf16 would lose most of it
    ids[-1] = rows - 1
    grad = torch.randn(T, K, device=device, generator=generator).add_(1).bfloat16()
    exact = torch.zeros_like(table, dtype=torch.float64).index_add_(0, ids, grad.double())
    look_up = lambda table: train_gpt.LookUp.apply(table, ids)  # noqa: E731
    for function in [look_up, compiled(look_up)] if device == "cuda" else [look_up]:
        found, grads = with_gradients(function, table, grad=grad)
        assert torch.equal(found, table[ids])
        assert within(relative_errors((grads,), (exact,)), 0.003)
        assert torch.equal(grads.any(1), exact.any(1)), "rows that no token has"
