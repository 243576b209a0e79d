"""Train a GPT-2-small-sized language model to a fixed validation loss, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one
    torchrun --standalone --nproc_per_node=8 train_gpt.py     the record configuration on one 8xH100 node
    python train_gpt.py --preset nano                         one process; the default where there is no GPU

WrittenNorm: what record 21 of the NanoGPT speedrun computes (2025-01-26), with sharded optimizers and a head that goes
over slices of tokens: 1,770 steps of 393,216 FineWeb tokens to a validation loss of 3.28. The nano preset also embeds
pairs of tokens (record 62). The speedrun: https://github.com/KellerJordan/modded-nanogpt.
Both presets go through the same code; as the global batch is fixed, any number of processes trains the same model.

Reading order: configuration, model, optimizers, data, schedules, run. Start at `main`.
Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens, M blocks in a window. "Record n" is record n of
the speedrun's public history, where an idea entered.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import glob
import hashlib
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam
from tqdm import tqdm

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024  # the format of llm.c
HEAD_MULTIPLE = 64  # the head's rows are padded to a multiple of it, for aligned matmul tiles
LOSS_LAG = 8  # steps after which a training loss is looked at
READ_AHEAD = 2  # batches that the reader keeps ready

# torch 2.13 renames these two
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class UserError(Exception):
    """Something outside of this script has to change: a flag, a file, the hardware. Exit code 2."""


class ShardError(UserError):
    """A shard that was sound at the start can no longer be read, on this rank."""


class NonFiniteLoss(Exception):
    """The training loss became NaN or infinite. Exit code 3."""


# ----------------------------------------------------------------------------------------------------------------------
# Configuration: the only place where a number of the training is chosen. The defaults are the record.


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    # data
    preset: Annotated[str, "gpt2 or nano; by default gpt2 where CUDA is, nano elsewhere"] = "gpt2"
    train_files: Annotated[str, "glob of the training shards, read in sorted order"] = (
        "data/fineweb10B/fineweb_train_*.bin"
    )
    val_files: Annotated[str, "glob of the validation shards"] = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: Annotated[int, "validation tokens, a multiple of val_seq_len"] = 10_485_760
    val_sha256: Annotated[str, "SHA-256 of the track's validation tokens, where it is known"] = ""
    vocab_size: Annotated[int, "tokens are 0 ... vocab_size - 1"] = 50257
    eot_token: Annotated[int, "end of text: the token that opens every document"] = 50256
    # training
    num_iterations: Annotated[int, "training steps"] = 1770
    cooldown_frac: Annotated[float, "part of the run, at its end, over which the learning rates fall"] = 0.4
    min_lr_frac: Annotated[float, "learning rate at the end, relative to the one before the cooldown"] = 0.1
    val_loss_every: Annotated[int, "steps between validations; 0: only after the last step"] = 125
    batch_tokens: Annotated[int, "tokens per step, over all processes"] = 8 * 48 * 1024
    train_seq_len: Annotated[int, "tokens per training sequence"] = 48 * 1024
    val_seq_len: Annotated[int, "tokens per validation sequence; 256K instead of 64K: -0.0015 loss"] = 256 * 1024
    # model
    model_dim: Annotated[int, "width of the residual stream"] = 768
    num_heads: Annotated[int, "attention heads"] = 6
    head_dim: Annotated[int, "dimensions per head, a multiple of 4"] = 128
    attention_layout: Annotated[str, "a letter per layer: L long window, S short, - no attention"] = "LSSSLSS-SSSL"
    value_embed_layout: Annotated[str, "a character per layer: digit of its value embedding, or ."] = "012......012"
    bigram_rows: Annotated[int, "rows of the table for pairs of consecutive tokens; 0: none"] = 0
    attention_scale: Annotated[float, "factor on the attention scores; q and k have unit RMS"] = 0.12
    lm_head_softcap: Annotated[float, "logits are squashed into this range on both sides of 0"] = 15.0
    lm_head_fp8: Annotated[bool, "train the head in FP8 where the device can"] = True
    lm_head_slice: Annotated[int, "tokens whose logits exist at a time"] = 8192
    block_size: Annotated[int, "tokens per block of the attention mask"] = 128
    window_tokens: Annotated[int, "long window at the end of the run; the short one is half as many blocks"] = 1728
    # optimizers
    muon_lr: Annotated[float, "Muon, for hidden matrices: spectral norm of an update"] = 0.05
    muon_momentum: Annotated[float, "Muon: momentum after its warm-up from 0.85"] = 0.95
    momentum_warmup_steps: Annotated[int, "Muon: steps of that warm-up"] = 300
    embed_lr: Annotated[float, "Adam: token and value embeddings"] = 0.6
    head_lr: Annotated[float, "Adam: head"] = 0.008
    scalar_lr: Annotated[float, "Adam: scalars"] = 0.04
    adam_beta1: Annotated[float, "Adam: decay of the first moment"] = 0.8
    adam_beta2: Annotated[float, "Adam: decay of the second moment"] = 0.95
    adam_eps: Annotated[float, "Adam: added to the root of the second moment"] = 1e-10
    # machine
    seed: Annotated[int | None, "random seed; by default a fresh one, printed and logged"] = None
    device: Annotated[str, "cuda, cpu or auto"] = "auto"
    dtype: Annotated[str, "bfloat16, float32, float64, or auto: bfloat16 where it is fast"] = "auto"
    compile: Annotated[bool | None, "use torch.compile; by default on CUDA only"] = None
    cpu_threads: Annotated[int, "CPU threads over a machine's processes; 0: torch's choice"] = 0
    # output
    log_dir: Annotated[str, "folder of the logs"] = "logs"
    run_id: Annotated[str, "name of the log; by default preset, time and seed"] = ""
    checkpoint_every: Annotated[int, "steps between checkpoints, which are off the clock; 0: none"] = 0
    resume: Annotated[str, "folder of a checkpoint, or latest: the newest in log_dir, of run_id if given"] = ""
    save_checkpoint: Annotated[bool, "write the final model, which sample.py reads, to LOG_DIR/RUN_ID.pt"] = False

    def __post_init__(self) -> None:
        def require(holds: bool, field: str, expected: str) -> None:
            if not holds:
                raise UserError(f"--{field} {getattr(self, field)}: expected {expected}")

        may_be_zero = "val_loss_every momentum_warmup_steps cpu_threads eot_token seed checkpoint_every bigram_rows"
        for field in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, field)
            if isinstance(value, float):
                require(math.isfinite(value) and value >= 0, field, "a finite number of at least 0")
            elif isinstance(value, int) and not isinstance(value, bool):
                least = int(field not in may_be_zero.split())
                require(value >= least, field, f"a whole number of at least {least}")
        layers = len(self.attention_layout)
        require(layers > 0 and layers % 2 == 0, "attention_layout", "an even number of layers, for the U-Net skips")
        require(set(self.attention_layout) <= set("LS-"), "attention_layout", "only the letters L, S and -")
        holds = len(self.value_embed_layout) == layers and set(self.value_embed_layout) <= set(".0123456789")
        expected = f"{layers} characters, one per letter of attention_layout, each a digit or ."
        require(holds, "value_embed_layout", expected)
        require(self.head_dim % 4 == 0, "head_dim", "a multiple of 4")
        require(self.vocab_size <= 2**16, "vocab_size", "at most 65536: tokens are stored in 16 bits")
        require(self.eot_token < self.vocab_size, "eot_token", f"a token below vocab_size {self.vocab_size}")
        multiples = "train_seq_len/block_size val_seq_len/block_size batch_tokens/train_seq_len val_tokens/val_seq_len"
        for field, divisor in (pair.split("/") for pair in multiples.split()):
            d = getattr(self, divisor)
            require(getattr(self, field) % d == 0, field, f"a multiple of --{divisor} {d}")
        require(0 < self.cooldown_frac <= 1, "cooldown_frac", "more than 0 and at most 1")
        require(self.lm_head_softcap > 0, "lm_head_softcap", "more than 0")
        for field in ("adam_beta1", "adam_beta2", "muon_momentum"):
            require(getattr(self, field) < 1, field, "less than 1")
        require(self.device in ("auto", "cpu", "cuda"), "device", "cuda, cpu or auto")
        require(self.dtype in ("auto", "bfloat16", "float32", "float64"), "dtype", "bfloat16, float32, float64 or auto")
        require(self.run_id == Path(self.run_id).name, "run_id", "a file name without folders")

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.train_seq_len


PRESETS = {
    "gpt2": Hyperparameters(),
    "nano": Hyperparameters(
        preset="nano",
        train_files="data/nano/nano_train_*.bin",
        val_files="data/nano/nano_val_*.bin",
        val_tokens=262_144,
        val_sha256="3dedcd4e56e9f6d188eb07c5347f5c44f84bc9cc7e98ccea3eb898c7bfd415bf",
        vocab_size=257,  # bytes
        eot_token=256,
        num_iterations=580,
        cooldown_frac=0.85,
        val_loss_every=300,
        batch_tokens=1024,
        train_seq_len=1024,
        val_seq_len=8192,
        model_dim=128,
        num_heads=2,
        head_dim=64,
        attention_layout="L-",
        value_embed_layout="0.",
        bigram_rows=8192,
        lm_head_fp8=False,
        lm_head_slice=1024,
        block_size=32,
        window_tokens=128,
        muon_lr=0.06,
        muon_momentum=0.9,
        momentum_warmup_steps=50,
        embed_lr=0.25,
        head_lr=0.006,
        adam_beta1=0.5,
        adam_beta2=0.9,
        cpu_threads=2,
    ),
}
# The command that gets a preset's data; {shards} is the number of training shards that the run reads.
DATA_COMMANDS = {"gpt2": "python data/cached_fineweb10B.py {shards}", "nano": "python data/pack_nano.py"}
# Where a group of flags begins in --help
HELP_GROUPS = dict(
    preset="data", num_iterations="training", model_dim="model", muon_lr="optimizers", seed="machine", log_dir="output"
)


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}; --help lists the flags")


def parse_args(argv: Sequence[str]) -> Hyperparameters:
    """The configuration that the flags `argv` ask for: a preset, with a flag for every field."""
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    options |= dict(description=__doc__, epilog=f"Defaults: [{' | '.join(PRESETS)}], one where they are alike")
    parser = group = ArgumentParser(prog="train_gpt.py", allow_abbrev=False, **options)
    for name, hint in typing.get_type_hints(Hyperparameters, include_extras=True).items():
        group = parser.add_argument_group(HELP_GROUPS[name]) if name in HELP_GROUPS else group
        kind, text = typing.get_args(hint)
        kind = next((k for k in typing.get_args(kind) if k is not type(None)), kind)  # X of X | None
        values = dict.fromkeys(str(getattr(cfg, name)) for cfg in PRESETS.values())
        text += f" [{' | '.join(values)}]"
        form = dict(type=kind, metavar=kind.__name__, choices=PRESETS if name == "preset" else None)
        form = dict(action=argparse.BooleanOptionalAction) if kind is bool else form
        group.add_argument(f"--{name}", **form, help=text)
    flags = vars(parser.parse_args(argv))
    preset = flags.get("preset", "gpt2" if torch.cuda.is_available() else "nano")
    return dataclasses.replace(PRESETS[preset], **flags)


def activation_dtype(cfg: Hyperparameters) -> torch.dtype:
    """Precision of activations, embeddings and Newton-Schulz; the rest is fp32, or fp64 if this is."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype)
    if is_on_cuda(cfg):
        return torch.bfloat16
    # bf16 is 2.1 times as fast as fp32 on a CPU with AVX512-BF16 or AMX, and 3 to 10 times slower on others
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def is_on_cuda(cfg: Hyperparameters) -> bool:
    return cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())


def resolve(cfg: Hyperparameters) -> Hyperparameters:
    """Replaces what is left to the machine: device, precision, FP8, compilation; and draws a seed."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu or a CUDA build of torch"
        )
    on_cuda = is_on_cuda(cfg)
    return dataclasses.replace(
        cfg,
        device="cuda" if on_cuda else "cpu",
        dtype=str(activation_dtype(cfg)).removeprefix("torch."),
        lm_head_fp8=cfg.lm_head_fp8 and on_cuda and torch.cuda.get_device_capability() >= (8, 9),
        compile=on_cuda if cfg.compile is None else cfg.compile,
        seed=random.SystemRandom().randrange(2**31) if cfg.seed is None else cfg.seed,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2.


class HeadLoss(torch.autograd.Function):
    """The loss of `head_loss`, gradients made on the way: recomputing slices cost 27 to 41% of its time."""

    @staticmethod
    def forward(ctx, *args) -> Tensor:
        loss, *grads = head_loss(*args, True)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return grad * grad_x, grad * grad_w, None, None, None, None


def head_loss(
    x: Tensor, w: Tensor, targets: Tensor, softcap: float, slice_tokens: int, fp8_scales: tuple | None, with_grads: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean cross entropy of softcapped logits x @ w.T, and its gradients to x (T, K) and w (V, K) if asked for.

    The (T, V) logits never exist whole, but for `slice_tokens` tokens at a time. With `fp8_scales`, of x, w and the
    logits' gradient, the three products are in FP8 (record 19, @YouJiacheng): e4m3 forward, e5m2 for the gradient,
    which needs range more than precision. The scales are static: x has unit RMS, w saturates, and the gradient of a
    mean loss over T tokens is at most 1 / T, T being the tokens of the sequence, not of the slice.

    The cap, cap tanh(z / cap) + cap, is the softcap of Gemma 2 (arXiv:2408.00118) but for a shift that the softmax does
    not see; 15 instead of 30 since record 18 (@KoszarskyB).
    """
    x_s, w_s, grad_s = fp8_scales or (1.0, 1.0, 1.0)

    def quantize(t: Tensor, scale: float, kind: torch.dtype) -> Tensor:
        if fp8_scales is None:
            return t.to(x.dtype)
        limit = torch.finfo(kind).max  # a cast of more saturates on some devices and gives NaN on others
        return (t * scale).clamp(-limit, limit).to(kind)

    def product(a: Tensor, b: Tensor, a_s: float, b_s: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
        return (a @ b).to(dtype) if fp8_scales is None else scaled_mm(a, b, a_s, b_s, dtype, fast)

    w_q = quantize(w, w_s, torch.float8_e4m3fn)
    loss, grads_x, grad_w = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32)), [], None
    for x_slice, t in zip(x.split(slice_tokens), targets.split(slice_tokens), strict=True):
        x_q = quantize(x_slice, x_s, torch.float8_e4m3fn)
        z = product(x_q, w_q.t(), x_s, w_s, x.dtype, fast=True)
        u = z.to(loss.dtype).mul_(2 / softcap).sigmoid_()  # in place: a CPU reads and writes less
        log_p = F.log_softmax(2 * softcap * u, dim=-1)
        loss = loss + F.nll_loss(log_p, t, reduction="sum")
        if with_grads:
            hits = t[:, None] == torch.arange(len(w), device=t.device)
            dz = log_p.exp_().sub_(hits.to(torch.uint8)).mul_(u.addcmul_(u, u, value=-1)).mul_(4 / len(x))
            grad = quantize(dz, grad_s, torch.float8_e5m2)
            grads_x.append(product(grad, w_q, grad_s, w_s, x.dtype))
            # As (K, V), then transposed: faster than (V, K) directly (record 19)
            part = product(x_q.t(), grad, x_s, grad_s, w.dtype).t()
            grad_w = part if grad_w is None else grad_w + part
    return loss / len(x), torch.cat(grads_x) if with_grads else None, grad_w


def scaled_mm(a: Tensor, b: Tensor, a_s: float, b_s: float, dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """a @ b / (a_s b_s) for FP8 factors, `a` made row-major and `b` column-major, as cuBLAS wants them."""
    a, b = a.contiguous(), b.t().contiguous().t()
    scale_a, scale_b = (torch.full((), 1 / scale, dtype=torch.float32, device=a.device) for scale in (a_s, b_s))
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=use_fast_accum)


class CastedLinear(nn.Linear):
    """A linear map without bias: the weight is kept in full precision, the product is in that of the input."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass  # GPT.init_weights does it for all parameters

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


class RMSNorm(torch.autograd.Function):
    """x / rms(x) over the last dimension. Its backward needs its result, which the next matmul keeps anyway, not x."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + torch.finfo(wide.dtype).eps).rsqrt()
        ctx.save_for_backward(y := (wide * scale).to(x.dtype), scale.to(x.dtype))
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        return scale * (grad - y * (grad * y).mean(-1, keepdim=True))


norm = RMSNorm.apply


class Rotary(nn.Module):
    """Rotary embeddings (arXiv:2104.09864), half-truncated: the second half of the frequencies is 0, base 1024.

    Since record 17 (@YouJiacheng). Positions count from the start of the sequence, not of the document. One fp32
    table serves all layers. x_THD (T, H, D) -> the same, pairs being D / 2 apart.
    """

    def __init__(self, head_dim: int, max_seq_len: int):
        super().__init__()
        frequencies = (1 / 1024) ** torch.linspace(0, 1, steps=head_dim // 4, dtype=torch.float32)
        frequencies = torch.cat([frequencies, frequencies.new_zeros(head_dim // 4)])
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_THD: Tensor) -> Tensor:
        cos, sin = (table[: len(x_THD), None, :] for table in (self.cos, self.sin))
        x1, x2 = x_THD.chunk(2, dim=-1)  # the fp32 tables promote bf16
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x_THD)


def document_block_mask(docs: Tensor, window: Tensor, block_size: int, for_flex: bool = True) -> BlockMask:
    """Which tokens see which: causal, within a document, and no further back than a window of blocks.

    docs (T,) numbers each token's document and never falls. A query block sees the nearest max(window, 1) key blocks,
    its own included; window () int32 is a tensor, so that its growth never recompiles. `for_flex`: by key block, too.

    As document numbers never fall, the key blocks that query block i sees are a range first ... i, and those of them
    that it sees whole a range whole ... i - 1. Both are listed nearest first, so that a window is no more than a limit
    on the counts (windows by block: record 16; long and short ones: record 20).
    """

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (docs[q] == docs[kv])

    low, high = docs.view(-1, block_size)[:, 0], docs.view(-1, block_size)[:, -1]
    block = torch.arange(len(low), dtype=torch.int32, device=docs.device)
    first = (high[None, :] < low[:, None]).sum(1, dtype=torch.int32)
    whole = (low[None, :] < low[:, None]).sum(1, dtype=torch.int32)
    num_full = torch.where(low == high, block - whole, 0)
    num_partial = block - first + 1 - num_full
    i, j = block[:, None], block[None, :]
    full = (i - 1 - j).clamp(min=0)
    partial = torch.where(j == 0, i, i - num_full[:, None] - j).clamp(min=0)
    num_partial = torch.minimum(num_partial, (window - num_full).clamp(min=1))
    num_full = torch.minimum(num_full, window - 1).clamp(min=0)
    lists = (t[None, None].contiguous() for t in (num_partial, partial, num_full, full))
    return BlockMask.from_kv_blocks(*lists, block_size, causal_in_document, compute_q_blocks=for_flex)


class GatheredMask:
    """A BlockMask made ready for attention in plain PyTorch, as FlexAttention has no backward on CPUs.

    kv_blocks (N, M): each query block's key blocks, partial ones first; bias (N, 1, block, M block): 0 where a token
    sees another, -inf where not. M = `max_blocks` is the largest number that any query block sees.
    """

    def __init__(self, mask: BlockMask, max_blocks: int, dtype: torch.dtype):
        num_partial, num_full = mask.kv_num_blocks[0, 0, :, None], mask.full_kv_num_blocks[0, 0, :, None]
        N, block_size = len(num_partial), mask.BLOCK_SIZE[0]
        slot = torch.arange(min(max_blocks, N), device=num_partial.device)
        full = mask.full_kv_indices[0, 0].gather(1, (slot - num_partial).clamp(min=0))
        self.kv_blocks = torch.where(slot < num_partial, mask.kv_indices[0, 0, :, : len(slot)], full)
        tokens = torch.arange(N * block_size, device=slot.device).view(N, block_size)
        q, kv = tokens[:, :, None, None], tokens[self.kv_blocks][:, None]
        visible = (slot < num_partial + num_full)[:, None, :, None] & mask.mask_mod(None, None, q, kv)
        self.bias = torch.where(visible, 0.0, -torch.inf).to(dtype).flatten(2)[:, None]


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, mask: GatheredMask, scale: float) -> Tensor:
    """Attention of q, k, v (T, H, D) over the blocks that `mask` names: its cost grows with the window, not as T^2."""
    (T, H, D), (N, M) = q.shape, mask.kv_blocks.shape
    q = q.reshape(N, T // N, H, D).transpose(1, 2)
    k, v = (
        t.reshape(N, -1).index_select(0, mask.kv_blocks.flatten()).view(N, M * (T // N), H, D).transpose(1, 2)
        for t in (k, v)
    )
    # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries, n = 35)
    y = torch.softmax((q * scale) @ k.mT + mask.bias, dim=-1) @ v
    return y.transpose(1, 2).reshape(T, H, D)


def flex_kernel_options() -> dict[str, int] | None:
    """Smaller FlexAttention tiles for GPUs with little shared memory: consumer ones have 99 KB, an H100 227."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.shared_memory_per_block_optin >= 160 * 1024:
        return None
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)


class CausalSelfAttention(nn.Module):
    """Attention with QK-norm, rotary and value embeddings. x (T, dim) -> the same.

    The projections to q, k and v are one parameter and one matmul; Muon sees three matrices (record 20).
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = cfg.num_heads, cfg.head_dim, cfg.attention_scale
        self.qkv_w = nn.Parameter(torch.empty(3, cfg.num_heads * cfg.head_dim, cfg.model_dim))
        self.lambdas = nn.Parameter(torch.empty(2))
        self.c_proj = CastedLinear(cfg.num_heads * cfg.head_dim, cfg.model_dim)

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, attend: Callable, mask) -> Tensor:
        H, D = self.num_heads, self.head_dim
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x)).view(len(x), 3 * H, D)
        qk, v = qkv.split([2 * H, H], dim=1)
        q, k = rotary(norm(qk)).split(H, dim=1)  # QK-norm: @Grad62304977
        v = self.lambdas[0] * v  # two free factors: record 15
        if value_embed is not None:  # after value residuals (arXiv:2410.17897): @KoszarskyB, record 14
            v = v + self.lambdas[1] * value_embed.view_as(v)
        return self.c_proj(attend(q, k, v, mask, self.scale).flatten(1))


class ReluSquared(torch.autograd.Function):
    """relu(x)^2, 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977).

    Its result, which the next matmul keeps anyway, is all that its backward needs (record 87): 3.6 GB less for gpt2.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x).square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.sqrt().mul_(grad).mul_(2)


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = CastedLinear(dim, 4 * dim)
        self.c_proj = CastedLinear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(ReluSquared.apply(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, cfg: Hyperparameters, has_attention: bool):
        super().__init__()
        self.attn = CausalSelfAttention(cfg) if has_attention else None
        self.mlp = MLP(cfg.model_dim)
        self.lambdas = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor, x0: Tensor, *attention_inputs) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # the embedding stays at hand: @KoszarskyB, record 9
        if self.attn is not None:
            x = x + self.attn(norm(x), *attention_inputs)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The record's model, in the shape that `cfg` gives it.

    forward(tokens (T,) int32, targets (T,) int64, window () int32, in blocks) is the mean cross entropy in nats.
    """

    # Of the head's input, weight and gradient (weight and gradient: record 21). The last fits a mean loss over
    # train_seq_len tokens, which is what every backward pass sees, whatever the number of processes.
    FP8_SCALES = (2.0, 2.0**9, 2.0**19)

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg = cfg
        num_value_embeds = 1 + max((int(digit) for digit in cfg.value_embed_layout if digit != "."), default=-1)
        value_dim = cfg.num_heads * cfg.head_dim
        head_rows = -(-cfg.vocab_size // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self.embed = nn.Embedding(cfg.vocab_size, cfg.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(cfg.vocab_size, value_dim) for _ in range(num_value_embeds))
        self.bigram_embed = nn.Embedding(cfg.bigram_rows, cfg.model_dim) if cfg.bigram_rows else None
        self.blocks = nn.ModuleList(Block(cfg, has_attention=letter != "-") for letter in cfg.attention_layout)
        self.skip_weights = nn.Parameter(torch.empty(len(self.blocks) // 2))
        self.lm_head = CastedLinear(cfg.model_dim, head_rows)
        self.rotary = Rotary(cfg.head_dim, max(cfg.train_seq_len, cfg.val_seq_len))
        self.use_flex = is_on_cuda(cfg)
        self.kernel_options = flex_kernel_options() if self.use_flex and torch.cuda.is_available() else None
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Every parameter, once; embeddings are in the precision of the activations, the rest in fp32."""
        for name, p in self.named_parameters():
            match name.removesuffix(".weight").split("."):
                case ["embed"] | ["value_embeds", _]:
                    p.normal_()
                case [*_, "qkv_w" | "c_fc"]:
                    bound = 3**0.5 * 0.5 * p.size(-1) ** -0.5  # 0.5: a bit better than PyTorch's 3^-0.5 (record 19)
                    p.uniform_(-bound, bound)
                case [*_, "c_proj" | "lm_head" | "bigram_embed"]:
                    p.zero_()  # c_proj and lm_head: @Grad62304977
                case [*_, "attn", "lambdas"]:
                    p.fill_(0.5)
                case [*_, "lambdas"]:
                    p.copy_(torch.tensor([1.0, 0.0]))
                case ["skip_weights"]:
                    p.fill_(1)
                case _:
                    raise AssertionError(f"no initialization for parameter {name}")
        dtype = activation_dtype(self.cfg)
        if dtype == torch.float64:
            self.double()
        for embed in filter(None, (self.embed, self.bigram_embed, *self.value_embeds)):
            embed.to(dtype)

    def forward(self, tokens: Tensor, targets: Tensor, window: Tensor) -> Tensor:
        x = self.features(tokens, window)
        head = (self.lm_head.weight, targets, self.cfg.lm_head_softcap, self.cfg.lm_head_slice)
        if not torch.is_grad_enabled():  # validation is never in FP8
            return head_loss(x, *head, None, False)[0]
        return HeadLoss.apply(x, *head, self.FP8_SCALES if self.cfg.lm_head_fp8 else None)

    def logits(self, x: Tensor) -> Tensor:
        """What `head_loss` takes the loss of, for sampling: features (..., dim) -> (..., head_rows), at least fp32."""
        z, cap = self.lm_head(x), self.cfg.lm_head_softcap
        return 2 * cap * torch.sigmoid(z.to(torch.promote_types(z.dtype, torch.float32)) / (cap / 2))

    def features(self, tokens: Tensor, window: Tensor) -> Tensor:
        """The head's input (T, dim)."""
        masks = self.attention_masks(tokens, window)
        value_embeds = {str(i): embed(tokens) for i, embed in enumerate(self.value_embeds)}
        x = self.embed(tokens)
        if self.bigram_embed is not None:
            x = x + self.bigram_embed(self.bigram_hashes(tokens))
        x = x0 = norm(x)
        skips: list[Tensor] = []  # U-Net: the later half of the layers adds the outputs of the earlier, last one first
        for i, block in enumerate(self.blocks):
            j = i - len(self.blocks) // 2
            if j >= 0:
                x = x + self.skip_weights[j] * skips.pop()
            value_embed = value_embeds.get(self.cfg.value_embed_layout[i])
            x = block(x, x0, value_embed, self.rotary, self.attend, masks.get(self.cfg.attention_layout[i]))
            if j < 0:
                skips.append(x)
        return norm(x)

    def bigram_hashes(self, tokens: Tensor) -> Tensor:
        """For each token (T,) the row that it shares with few other pairs of a token and the one before (record 62)."""
        before = F.pad(tokens[:-1], (1, 0), value=self.cfg.eot_token)
        return ((36313 * tokens) ^ (27191 * before)) % self.cfg.bigram_rows

    def attention_masks(self, tokens: Tensor, window: Tensor) -> dict[str, BlockMask | GatheredMask]:
        """The long and the short mask, by their letter in `attention_layout`."""
        docs = (tokens == self.cfg.eot_token).cumsum(0, dtype=torch.int32)
        masks: dict[str, BlockMask | GatheredMask] = {}
        for letter in sorted(set(self.cfg.attention_layout) - {"-"}):
            share = 1 if letter == "L" else 2
            masks[letter] = mask = document_block_mask(docs, window // share, self.cfg.block_size, self.use_flex)
            if not self.use_flex:
                max_blocks = max(1, window_blocks(self.cfg.num_iterations, self.cfg) // share)
                masks[letter] = GatheredMask(mask, max_blocks, self.embed.weight.dtype)
        return masks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | GatheredMask, scale: float) -> Tensor:
        if not self.use_flex:
            return gathered_attention(q, k, v, mask, scale)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        y = flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=self.kernel_options)
        return y[0].transpose(0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers: Muon for the hidden matrices, Adam for the rest; every rank updates its share.
#
# A step has three phases, so that communication overlaps compute: `reduce` launches a reduce-scatter of every group's
# gradients; `update` consumes them one by one, while later ones are on their way, and launches the all-gathers;
# `finish` waits for those. No two collectives under way share a buffer, and each keeps its own until it is done. One
# process goes the same way, without collectives.


@dataclass
class Pending:
    """The result of a collective, to be waited for; until then it keeps the collective's input alive."""

    result: Tensor
    work: "dist.Work | None" = None
    source: Tensor | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class World:
    """This process among all processes, as torchrun describes it, and what they do together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def from_env() -> "World":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name, "") for name in names]
        if any(values) and not all(value.isdecimal() for value in values):
            raise UserError(f"{', '.join(names)} are {values}: launch with torchrun, or unset all four")
        return World(*map(int, values)) if any(values) else World()

    def reduce_scatter(self, tensor: Tensor) -> Pending:
        """Of the sum of `tensor` (size n, ...) over the ranks, this rank's (n, ...)."""
        if self.size == 1:
            return Pending(tensor)
        result = tensor.new_empty(tensor.size(0) // self.size, *tensor.shape[1:])
        return Pending(result, reduce_scatter(result, tensor, async_op=True), tensor)

    def all_gather(self, tensor: Tensor, into: Tensor | None = None) -> Pending:
        """The ranks' `tensor` (n, ...) as (size n, ...), in `into` if given."""
        if self.size == 1:
            return Pending(tensor)
        result = tensor.new_empty(self.size * tensor.size(0), *tensor.shape[1:]) if into is None else into
        return Pending(result, all_gather(result, tensor, async_op=True), tensor)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """The sum of `tensor` over the ranks, in place."""
        return Pending(tensor, dist.all_reduce(tensor, async_op=True) if self.size > 1 else None)


def zeropower_via_newtonschulz5(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """About the orthogonal factor U V' of every matrix U S V' in G (..., rows, cols), in `dtype`.

    Five steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon). Its
    coefficients buy a steep slope at 0 with convergence to no better than about [0.7, 1.2], which does no harm:
    singular values of at least 0.00143 of the Frobenius norm end in [0.65, 1.25]. A zero matrix stays zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = G.size(-2) > G.size(-1)
    X = (G.mT if is_tall else G).reshape(-1, *sorted(G.shape[-2:]))
    X = (X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if is_tall else X).reshape(G.shape)


def as_stack(x: Tensor) -> Tensor:
    """(..., rows, cols) as (matrices, short side, long side)."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.size(-2) > x.size(-1) else x


class Muon:
    """MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024), sharded over the ranks.

    For parameters (..., rows, cols) that are matrices or batches of them; not for embeddings, heads, vectors. With g
    the mean gradient of the step, in the lerp form of record 15:

        m <- momentum m + (1 - momentum) g
        p <- p - lr sqrt(max(1, rows / cols)) zeropower(momentum m + (1 - momentum) g)

    so the update's spectral norm is about `lr` times that root. All matrices of one shape, tall ones on their side,
    are a stack, padded with zeros to equal shares: the 24 of gpt2's MLPs on 8 ranks are 3 on each, for one batched
    Newton-Schulz. A rank's state is the momentum of its share. `grad_divisor` makes a mean of the gradients' sum.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        grad_divisor: int,
        world: World,
        dtype: torch.dtype,
        orthogonalize: Callable[[Tensor, torch.dtype], Tensor] = zeropower_via_newtonschulz5,
    ):
        self.grad_divisor, self.world, self.dtype, self.orthogonalize = grad_divisor, world, dtype, orthogonalize
        stacks: dict[torch.Size, dict[str, nn.Parameter]] = {}
        for name, p in named_params:
            stacks.setdefault(as_stack(p).shape[1:], {})[name] = p
        self.param_groups: list[dict] = []
        for shape, members in sorted(stacks.items(), key=lambda item: -sum(p.numel() for p in item[1].values())):
            params, counts = list(members.values()), [len(as_stack(p)) for p in members.values()]
            share = -(-sum(counts) // world.size)
            group = dict(params=params, names=list(members), counts=counts, lr=lr, initial_lr=lr, momentum=0.95)
            group["grads"] = params[0].new_zeros(share * world.size, *shape)
            group["momentum_buffer"] = params[0].new_zeros(share, *shape)
            self.param_groups.append(group)

    def state(self) -> dict[str, Tensor]:
        """This rank's state by name; to restore it, write into the tensors."""
        return {f"{'+'.join(group['names'])}.momentum_buffer": group["momentum_buffer"] for group in self.param_groups}

    @torch.no_grad()
    def reduce(self, group: dict) -> None:
        torch.cat([as_stack(p.grad) for p in group["params"]], out=group["grads"][: sum(group["counts"])])
        group["pending"] = self.world.reduce_scatter(group["grads"])

    @torch.no_grad()
    def update(self, group: dict) -> None:
        grad = group["pending"].wait().div_(self.grad_divisor)
        momentum_buffer = group["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = self.orthogonalize(grad.lerp_(momentum_buffer, group["momentum"]), self.dtype)
        group["pending"] = self.world.all_gather(update)

    @torch.no_grad()
    def finish(self, group: dict) -> None:
        updates = group.pop("pending").wait()[: sum(group["counts"])].split(group["counts"])
        for p, update in zip(group["params"], updates, strict=True):
            aspect = p.size(-2) / p.size(-1)
            p.add_((update.mT if aspect > 1 else update).view_as(p), alpha=-group["lr"] * max(1, aspect) ** 0.5)


class Adam:
    """Adam (arXiv:1412.6980) sharded over the ranks as in ZeRO-1 (arXiv:1910.02054); the arithmetic is PyTorch's.

    `groups`: named parameters of one precision and their lr. A group's parameters become views of one flat buffer, of
    which every rank updates an equal run, whatever their number and sizes; a rank's state are the moments of its run,
    in the parameters' precision. `grad_divisor` makes a mean of the gradients' sum.
    """

    ALIGNMENT = 16  # elements: kernels want tensors to begin at multiples of 16 bytes

    def __init__(
        self, groups: Iterable[tuple[Sequence, float]], betas: tuple, eps: float, grad_divisor: int, world: World
    ):
        self.eps, self.world = eps, world
        self.param_groups: list[dict] = []
        for named_params, lr in groups:
            params = [p for _, p in named_params]
            starts = list(accumulate((p.numel() + -p.numel() % self.ALIGNMENT for p in params), initial=0))
            flat = params[0].detach().new_zeros(starts[-1] + -starts[-1] % world.size)
            grads = torch.zeros_like(flat)
            for p, start in zip(params, starts, strict=False):
                flat[start : start + p.numel()] = p.detach().view(-1)
                p.data = flat[start : start + p.numel()].view_as(p)
            group = dict(params=params, names=[name for name, _ in named_params], lr=lr, initial_lr=lr, betas=betas)
            group |= dict(flat=flat, own=flat.view(world.size, -1)[world.rank], grads=grads)
            group["grad_views"] = [grads[a : a + p.numel()].view_as(p) for p, a in zip(params, starts, strict=False)]
            group |= dict(exp_avg=torch.zeros_like(group["own"]), exp_avg_sq=torch.zeros_like(group["own"]))
            group["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            group["divisor"] = torch.full_like(group["step"], grad_divisor)
            self.param_groups.append(group)

    def state(self) -> dict[str, Tensor]:
        """This rank's state by name; to restore it, write into the tensors."""
        kinds = ("exp_avg", "exp_avg_sq", "step")
        return {f"{'+'.join(group['names'])}.{kind}": group[kind] for group in self.param_groups for kind in kinds}

    @torch.no_grad()
    def reduce(self, group: dict) -> None:
        torch._foreach_copy_(group["grad_views"], [p.grad for p in group["params"]])
        group["pending"] = self.world.reduce_scatter(group["grads"])

    @torch.no_grad()
    def update(self, group: dict) -> None:
        beta1, beta2 = group["betas"]
        options = dict(lr=group["lr"], beta1=beta1, beta2=beta2, eps=self.eps, fused=True, grad_scale=group["divisor"])
        grad = group["pending"].wait()
        own, *state = ([group[kind]] for kind in ("own", "exp_avg", "exp_avg_sq"))
        adam(own, [grad], *state, [], [group["step"]], **options, amsgrad=False, weight_decay=0.0, maximize=False)
        if self.world.size > 1:
            group["pending"] = self.world.all_gather(grad.copy_(group["own"]), into=group["flat"])

    @torch.no_grad()
    def finish(self, group: dict) -> None:
        group.pop("pending").wait()


def build_optimizers(gpt: GPT, cfg: Hyperparameters, world: World, orthogonalize: Callable) -> tuple[Muon, Adam]:
    """Muon for the matrices of the blocks, Adam for head, embeddings and scalars, each with its learning rate."""
    named = list(gpt.named_parameters())
    matrices = [(name, p) for name, p in named if name.startswith("blocks.") and p.ndim >= 2]
    head = [(name, p) for name, p in named if name.startswith("lm_head.")]
    embeds = [(name, p) for name, p in named if "embed" in name]
    scalars = [(name, p) for name, p in named if p.ndim < 2]
    grouped = [name for name, _ in (*matrices, *head, *embeds, *scalars)]
    misplaced = [name for name, _ in named if grouped.count(name) != 1]
    assert not misplaced, f"parameters not in exactly one group: {misplaced}"
    muon = Muon(matrices, cfg.muon_lr, cfg.batch_sequences, world, activation_dtype(cfg), orthogonalize)
    groups = ((head, cfg.head_lr), (embeds, cfg.embed_lr), (scalars, cfg.scalar_lr))
    return muon, Adam(groups, (cfg.adam_beta1, cfg.adam_beta2), cfg.adam_eps, cfg.batch_sequences, world)


def step_optimizers(optimizers: Sequence[Muon | Adam]) -> None:
    """One step of every group of all of them, from the sum of the gradients of this rank's sequences."""
    # Collectives run one at a time as they were launched, so the groups are taken in that order in every phase, which
    # has to be the same on all ranks. The biggest first: its update has the other reduce-scatters to hide behind, the
    # first all-gather is ready when the last of them ends, and what then is left to update is the smallest group.
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    groups.sort(key=lambda pair: -pair[1]["grads"].nbytes)
    for phase in ("reduce", "update", "finish"):
        for optimizer, group in groups:
            getattr(optimizer, phase)(group)


# ----------------------------------------------------------------------------------------------------------------------
# Data: which tokens each step trains on is planned before the first one, and is the same for any number of processes.


@dataclass(frozen=True)
class Shard:
    """A file of tokens: 256 int32 of header [20240520, 1, number of tokens, 0 ...], then uint16 tokens."""

    path: str
    num_tokens: int
    header_sha256: str


def find_shards(pattern: str, fix: str) -> list[Shard]:
    """The shards that `pattern` matches, sorted; each has a sound header and the size that it states.

    `fix`: the command that gets the shards, for the UserError.
    """
    shards = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        try:
            with open(path, "rb") as file:
                header, size = file.read(SHARD_HEADER_BYTES), os.path.getsize(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; get it again: {fix}") from None
        magic, version, num_tokens = np.frombuffer(header.ljust(12, b"\0"), dtype="<i4", count=3).tolist()
        problem, expected = "", SHARD_HEADER_BYTES + 2 * num_tokens
        if (magic, version) != (SHARD_MAGIC, SHARD_VERSION) or num_tokens < 0:
            problem = f"not a token shard: begins with {magic}, {version}, not {SHARD_MAGIC}, {SHARD_VERSION}"
        elif size != expected:
            problem = f"{size} bytes long, but its header's {num_tokens} tokens make {expected}"
        if problem:
            raise UserError(f"{path}: {problem}; remove it and get it again: {fix}")
        shards.append(Shard(path, num_tokens, hashlib.sha256(header).hexdigest()))
    if not shards:
        raise UserError(f"no shards match {pattern} in {os.getcwd()}; get them: {fix}")
    return shards


@dataclass(frozen=True)
class Batch:
    """Consecutive tokens of a shard: inputs from `start` on, and one more token for the last target."""

    shard: Shard
    start: int
    num_tokens: int


def plan_batches(shards: Iterable[Shard], batch_tokens: int, num_batches: int) -> list[Batch]:
    """At most `num_batches` batches, shard after shard; a rest of a shard too short for one is skipped."""
    starts = ((shard, start) for shard in shards for start in range(0, shard.num_tokens - batch_tokens, batch_tokens))
    return [Batch(shard, start, batch_tokens) for shard, start in islice(starts, num_batches)]


def data_command(cfg: Hyperparameters) -> str:
    """The command that gets the data of a run."""
    if cfg.train_files != PRESETS[cfg.preset].train_files:
        return "python data/pack_text.py FILES ..., or correct --train_files and --val_files"
    batches_per_shard = max(1, (100_000_000 - 1) // cfg.batch_tokens)  # of FineWeb
    return DATA_COMMANDS[cfg.preset].format(shards=-(-cfg.num_iterations // batches_per_shard))


def plan_data(cfg: Hyperparameters) -> tuple[list[Batch], list[Batch]]:
    """The batches of training and of validation (there one sequence each). Refuses data too short for the run."""
    fix = data_command(cfg)

    def plan(pattern: str, batch_tokens: int, num_batches: int, flag: str) -> list[Batch]:
        shards = find_shards(pattern, fix)
        batches = plan_batches(shards, batch_tokens, num_batches)
        if len(batches) < num_batches:
            held = f"the {len(shards)} shards of {pattern} hold {len(batches)} batches of {batch_tokens} tokens"
            raise UserError(f"{held}, the run needs {num_batches}; get more: {fix}; or lower {flag}")
        return batches

    train_plan = plan(cfg.train_files, cfg.batch_tokens, cfg.num_iterations, "--num_iterations")
    return train_plan, plan(cfg.val_files, cfg.val_seq_len, cfg.val_tokens // cfg.val_seq_len, "--val_tokens")


def read_tokens(batch: Batch, offset: int, out: np.ndarray, vocab_size: int) -> None:
    """Fills `out` with the batch's uint16 tokens from `offset` on. Read, as a mapped file that shrinks kills us."""
    path, view = batch.shard.path, memoryview(out).cast("B")
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(SHARD_HEADER_BYTES + 2 * (batch.start + offset))
            while len(view) and (count := file.readinto(view)):
                view = view[count:]
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}; it was there when the run started") from None
    if len(view):
        raise ShardError(f"{path}: has become shorter than the {batch.shard.num_tokens} tokens of its header")
    if out.max() >= vocab_size:
        raise ShardError(
            f"{path}: holds token {out.max()}, but --vocab_size is {vocab_size}: another tokenizer's shard?"
        )


def read_batches(
    plan: Iterable[Batch], seq_len: int, sequences: Sequence[int], vocab_size: int, device: torch.device
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields for each batch the (inputs (T,) int32, targets (T,) int64) of its `sequences`, on the device.

    From the first `next` on, a thread reads ahead into pinned buffers, which are used again once copied.
    """
    is_cuda = device.type == "cuda"
    shape = (len(sequences), seq_len + 1)
    buffers = [torch.empty(shape, dtype=torch.uint16, pin_memory=is_cuda) for _ in range(READ_AHEAD + 1)]
    copied = [torch.cuda.Event() if is_cuda else None for _ in buffers]

    def read(batch: Batch, slot: int) -> int:
        if is_cuda:
            copied[slot].synchronize()  # in the reader's thread: the training loop does not wait
        for sequence, row in zip(sequences, buffers[slot].numpy(), strict=True):
            read_tokens(batch, sequence * seq_len, row, vocab_size)
        return slot

    with ThreadPoolExecutor(max_workers=1) as reader:
        slots = (reader.submit(read, batch, i % len(buffers)) for i, batch in enumerate(plan))
        ahead = deque(islice(slots, READ_AHEAD))
        while ahead:
            slot = ahead.popleft().result()
            tokens = buffers[slot].to(device, non_blocking=True).to(torch.int32)
            if is_cuda:
                copied[slot].record()
            ahead.extend(islice(slots, 1))
            yield [(row[:-1], row[1:].long()) for row in tokens]


# ----------------------------------------------------------------------------------------------------------------------
# Schedules: functions of the step and the configuration.


def lr_multiplier(step: int, cfg: Hyperparameters) -> float:
    """On all learning rates: 1, and over the last `cooldown_frac` of the run linearly down to `min_lr_frac`."""
    w = min((1 - step / cfg.num_iterations) / cfg.cooldown_frac, 1.0)
    return w + (1 - w) * cfg.min_lr_frac


def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """From 0.85 linearly to `muon_momentum` over the first `momentum_warmup_steps`."""
    w = min(step / cfg.momentum_warmup_steps, 1.0) if cfg.momentum_warmup_steps else 1.0
    return (1 - w) * 0.85 + w * cfg.muon_momentum


def window_blocks(step: int, cfg: Hyperparameters) -> int:
    """Blocks of the long window: as few as cover the part of `window_tokens` that the run has come to."""
    return max(1, -(-cfg.window_tokens * step // (cfg.num_iterations * cfg.block_size)))


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: off by default and off the clock. One file per rank, in a folder that gets its name when all are on disk.


def run_identity(cfg: Hyperparameters, world: World) -> dict:
    """What a run and its continuation have in common."""
    free = ("run_id", "log_dir", "checkpoint_every", "resume", "save_checkpoint")
    identity = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in free}
    return identity | dict(processes=world.size, script=hashlib.sha256(Path(__file__).read_bytes()).hexdigest())


def load_checkpoint(cfg: Hyperparameters, world: World) -> tuple[Hyperparameters, dict | None]:
    """The resolved configuration, and what this rank saved in the checkpoint that --resume names.

    None where that is the latest and there is none. Refuses the checkpoint of another script or configuration.
    """
    folder = Path(cfg.resume)
    if cfg.resume == "latest":
        found = Path(cfg.log_dir).glob(f"{glob.escape(cfg.run_id) or '*'}.checkpoints/step-*[0-9]")
        folder = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    if not cfg.resume or folder is None:
        return resolve(cfg), None
    try:
        saved = torch.load(folder / f"rank{world.rank}.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        advice = "name a folder .../step-N that a run of as many processes left, or latest"
        raise UserError(f"--resume {folder}: {str(error).partition(chr(10))[0][:100]}; {advice}") from None
    seed = saved["identity"]["seed"] if cfg.seed is None else cfg.seed
    cfg = resolve(dataclasses.replace(cfg, seed=seed, run_id=saved["run_id"]))
    for name, value in run_identity(cfg, world).items():
        if (old := saved["identity"].get(name)) != value:
            raise UserError(f"--resume {folder}: another {name}, its run has {old}, this one {value}: start it alike")
    return cfg, saved


def save(state: dict, path: Path) -> str:
    """Writes `state` to `path`, down to the disk. Returns why that failed, or ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        return str(error).partition("\n")[0]
    return ""


def write_checkpoint(folder: Path, state: dict, world: World, device: torch.device) -> str:
    """Writes this rank's `state`, then removes older checkpoints. Returns why it failed, or "".

    A kill at any moment leaves the last checkpoint that is whole.
    """
    part = folder.with_suffix(".part")
    if world.local_rank == 0:  # left by a run that was resumed from before it; later it may be another node's, new
        shutil.rmtree(folder, ignore_errors=True)
    failure = save(state, part / f"rank{world.rank}.pt")
    flag = torch.tensor([float(bool(failure))], device=device)
    if world.all_reduce(flag).wait().item():  # and all ranks have written
        return failure or "another rank could not write its part"
    if world.local_rank == 0:
        with contextlib.suppress(FileNotFoundError):  # another node has done it, on a disk that they share
            os.rename(part, folder)
        os.sync()  # the names, too
    world.all_reduce(flag).wait().item()  # no node lacks the new one when another removes the old ones
    if world.local_rank == 0:
        for path in set(folder.parent.iterdir()) - {folder}:
            with contextlib.suppress(OSError):  # renamed first: what a kill leaves of it shall not look like one
                os.rename(path, gone := path.with_suffix(".part"))
                shutil.rmtree(gone, ignore_errors=True)
    return ""


def write_model(gpt: GPT, cfg: Hyperparameters, path: Path) -> str:
    """Writes {"configuration": fields of `cfg`, "model": state dict}, a whole file or none. Returns why not, or ""."""
    model = {name: tensor.to("cpu", copy=True) for name, tensor in gpt.state_dict().items()}
    failure = save(dict(configuration=dataclasses.asdict(cfg), model=model), part := path.with_suffix(".pt.part"))
    part.unlink(missing_ok=True) if failure else os.replace(part, path)
    return failure


# ----------------------------------------------------------------------------------------------------------------------
# Run


class Clock:
    """Training time in ms. Stands still while stopped; the device is idle at both edges."""

    def __init__(self, device: torch.device):
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.elapsed, self.started = 0.0, 0.0

    def start(self) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.synchronize()
        self.elapsed = self.read()

    def read(self) -> float:
        """The running clock; what the device is still working on is not in it."""
        return self.elapsed + 1000 * (time.perf_counter() - self.started)


class LossWatch:
    """Stops all ranks when the training loss is not finite, without a step that waits for the device.

    The losses, summed over the ranks, travel to the host on their own. Each is looked at `LOSS_LAG` steps later, when
    it has long been there, and so at the same step on every rank.
    """

    def __init__(self, plan: Sequence[Batch], device: torch.device):
        self.plan, self.is_cuda = plan, device.type == "cuda"
        self.losses = torch.zeros(len(plan), pin_memory=self.is_cuda)
        self.unseen: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def put(self, step: int, loss: Tensor) -> None:
        self.losses[step].copy_(loss, non_blocking=True)
        self.unseen.append((step, torch.cuda.current_stream().record_event() if self.is_cuda else None))
        self.check(LOSS_LAG)

    def check(self, lag: int = 0) -> None:
        """Raises NonFiniteLoss for all but the last `lag` losses."""
        while len(self.unseen) > lag:
            step, arrived = self.unseen.popleft()
            if arrived is not None:
                arrived.synchronize()
            if not math.isfinite(self.losses[step]):
                where = f"step {step}, data {self.plan[step].shard.path} position {self.plan[step].start}"
                raise NonFiniteLoss(f"loss {self.losses[step]} at {where}: lower the learning rates or change --seed")


class RunLog:
    """The log `log_dir`/`run_id`.txt and the console; silent on every rank but 0.

    Form: the script's source, a line of 100 "=", the environment, another such line, then the lines of the steps. On a
    terminal a progress bar stands for the lines of the steps. A resumed run goes on in its log. A lock that dies with
    the process keeps others out. A full disk ends the log, not the training.
    """

    RULE = "=" * 100

    def __init__(self, cfg: Hyperparameters, world: World, start: int):
        self.cfg, self.path, self.file, self.is_full = cfg, Path(cfg.log_dir) / f"{cfg.run_id}.txt", None, False
        try:
            if world.rank == 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "a" if cfg.resume else "x", encoding="utf-8")  # noqa: SIM115
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = f": {error.strerror}; choose another --log_dir"
            if isinstance(error, FileExistsError):
                problem = " is another run's log: choose another --run_id, or leave it out"
            elif isinstance(error, BlockingIOError):
                problem = " is being written by another process: wait for it, or stop it"
            raise UserError(f"{self.path}{problem}") from None
        hidden = world.rank > 0 or not (sys.stdout.isatty() and sys.stderr.isatty())
        self.bar = tqdm(total=cfg.num_iterations, initial=start, unit="step", dynamic_ncols=True, disable=hidden)

    def write(self, text: str, console: bool = False) -> None:
        try:
            if self.file is not None and not self.is_full:
                print(text, file=self.file, flush=True)
        except OSError as error:
            self.is_full, problem = True, f"{self.path}: {error.strerror}: the log ends here, the training goes on"
            print(f"train_gpt.py: {problem}", file=sys.stderr)
        if console and self.file is not None:
            print(text, flush=True) if self.bar.disable else tqdm.write(text)

    def step(self, text: str, val_loss: float) -> None:
        self.write(text, console=self.bar.disable)
        if not self.bar.disable and self.bar.update():  # it is time to draw the bar anew
            rate = self.cfg.batch_tokens * (self.bar.format_dict["rate"] or 0)
            self.bar.set_postfix_str(f"{rate:,.0f} tokens/s, val_loss {val_loss:.4f}")

    def close(self) -> None:
        self.bar.close()
        if self.file is not None:
            with contextlib.suppress(OSError):  # of a full disk
                self.file.close()


def describe_machine(cfg: Hyperparameters, world: World) -> str:
    """Versions and hardware, for the log."""

    def output(*command: str) -> str:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        return ""

    cpu = output("sed", "-n", "s/^model name.*: //p", "/proc/cpuinfo").partition("\n")[0] or os.uname().machine
    git = ("git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parent))
    edited = " and edits" if output(*git, "status", "--porcelain", "--untracked-files=no") else ""
    lines = [
        f"Running Python {sys.version}",
        f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}, numpy {np.__version__}",
        f"commit: {output(*git, 'rev-parse', 'HEAD') or 'unknown'}{edited}",
        f"cpu: {cpu}, {os.cpu_count()} cores; {world.size} processes, {torch.get_num_threads()} threads each",
        f"precision: {cfg.dtype}, head in training: {'FP8' if cfg.lm_head_fp8 else cfg.dtype}",
        f"attention: {'FlexAttention' if cfg.device == 'cuda' else 'gathered blocks'}; compiled: {cfg.compile}",
    ]
    if cfg.device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        lines.append(f"gpu: {gpu.name}, {gpu.total_memory // 2**20} MiB, NCCL {torch.cuda.nccl.version()}")
        lines.append(output("nvidia-smi"))
    return "\n".join(lines)


def describe_data(cfg: Hyperparameters, plans: Iterable[Sequence[Batch]]) -> str:
    """The shards that the run reads, and the hash of the validation tokens, for the log."""
    lines, digest = [], hashlib.sha256()
    for role, plan in zip(("train", "val"), plans, strict=True):
        for shard in dict.fromkeys(batch.shard for batch in plan):
            lines.append(f"{role} shard: {shard.path}, {shard.num_tokens} tokens, header sha256 {shard.header_sha256}")
    for batch in plan:
        tokens = np.empty(batch.num_tokens, dtype=np.uint16)
        read_tokens(batch, 0, tokens, cfg.vocab_size)
        digest.update(tokens)
    note = " (not the track's: do not compare losses)" if cfg.val_sha256 not in ("", digest.hexdigest()) else ""
    return "\n".join([*lines, f"validation tokens: {cfg.val_tokens}, sha256 {digest.hexdigest()}{note}"])


@dataclass(frozen=True)
class Result:
    """What a run came to. val_curve: (step, val_loss, train_time_ms) of every validation."""

    val_loss: float
    train_time_ms: float
    num_iterations: int
    seed: int
    peak_memory_mib: int
    recompiles: int
    log: str
    val_curve: tuple[tuple[int, float, float], ...]


def train_step(model: Callable, sequences: Iterable[tuple[Tensor, Tensor]], window: Tensor) -> Tensor:
    """Forward and backward over this rank's sequences. Returns the sum of their losses.

    Every backward pass is that of one sequence's mean loss, unscaled: the gradients that low precision has to hold are
    the same for any number of processes (scaled down first, 65 instead of 25% of FP8's became 0). The sum is divided
    when the optimizers step.
    """
    total = torch.zeros((), device=window.device)
    for tokens, targets in sequences:
        loss = model(tokens, targets, window)
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(model: Callable, batches: Iterable, window: Tensor, world: World) -> float:
    """Mean loss over the validation tokens. Each rank scores its own sequences; the others may have more or fewer."""
    total = torch.zeros(2, dtype=torch.float64, device=window.device)
    for [(tokens, targets)] in batches:
        total[0] += model(tokens, targets, window) * len(tokens)
        total[1] += len(tokens)
    loss, count = world.all_reduce(total).wait().tolist()
    return loss / count


def warm_up(gpt: GPT, model: Callable, optimizers: Sequence[Muon | Adam], cfg: Hyperparameters, world: World) -> None:
    """Compiles and runs every graph on random tokens, then restores every bit of parameters and optimizers.

    RNG and readers are not touched: the first real token is read on the clock.
    """
    device = gpt.skip_weights.device
    state = [*gpt.parameters(), *(tensor for optimizer in optimizers for tensor in optimizer.state().values())]
    saved = [tensor.detach().to("cpu", copy=True) for tensor in state]  # not on top of the step's peak
    window = torch.ones((), dtype=torch.int32, device=device)

    def dummy(seq_len: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(cfg.vocab_size, (seq_len + 1,), device=device, generator=torch.Generator(device))
        return tokens[:-1].int(), tokens[1:]

    for _ in range(2):
        train_step(model, [dummy(cfg.train_seq_len)] * min(2, cfg.batch_sequences // world.size), window)
        step_optimizers(optimizers)
        gpt.zero_grad(set_to_none=True)
    evaluate(model, [[dummy(cfg.val_seq_len)]], window, world)

    with torch.no_grad():
        for tensor, original in zip(state, saved, strict=True):
            tensor.copy_(original)


def check_world(cfg: Hyperparameters, world: World) -> None:
    """Refuses a number of processes that does not divide a step's sequences, or is larger than that of the GPUs."""
    n = cfg.batch_sequences
    fitting = [size for size in range(1, n + 1) if n % size == 0]
    if world.size not in fitting:
        nearest = [size for size in fitting if size < world.size][-1:] + [s for s in fitting if s > world.size][:1]
        advice = f"start {' or '.join(map(str, nearest))}, or change --batch_tokens"
        raise UserError(f"{world.size} processes do not divide the {n} sequences of a step: {advice}")
    if cfg.device == "cuda" and world.local_size > (gpus := torch.cuda.device_count()):
        advice = f"--nproc_per_node={max(size for size in fitting if size <= gpus)}"
        raise UserError(f"{world.local_size} processes, but {gpus} GPUs on this machine: {advice}")


def set_up(cfg: Hyperparameters, world: World) -> tuple[Hyperparameters, torch.device]:
    """Device, threads and process group; and all ranks agree on seed and run id."""
    if cfg.device == "cuda":
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        options = dict(backend="nccl", device_id=device)
    else:
        device, options = torch.device("cpu"), dict(backend="gloo")
        if cfg.cpu_threads:
            torch.set_num_threads(max(1, cfg.cpu_threads // world.local_size))
        with contextlib.suppress(OSError, AttributeError):
            # glibc hands large freed blocks back and faults them in anew: 15% of a nano step. Now it keeps them:
            libc = ctypes.CDLL(None)
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
            libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum
    agreed = [cfg.seed, cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{cfg.seed}"]
    if world.size > 1:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG to SIGTERM: no rank outlives its launcher
        # longer than NCCL's 10 minutes: one rank may compile while the others have the result in their caches
        dist.init_process_group(timeout=timedelta(minutes=30), **options)
        dist.broadcast_object_list(agreed, src=0)
    return dataclasses.replace(cfg, seed=agreed[0], run_id=agreed[1]), device


def peak_memory_mib(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def late_events() -> np.ndarray:
    """What no step should meet: graphs compiled so far, and garbage collections."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return np.array([graphs, sum(generation["collections"] for generation in gc.get_stats())])


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains as the flags say. Raises UserError, NonFiniteLoss or KeyboardInterrupt; the log has it, too."""
    source = Path(__file__).read_text(encoding="utf-8")
    argv = sys.argv[1:] if argv is None else list(argv)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    world = World.from_env()
    cfg, checkpoint = load_checkpoint(parse_args(argv), world)
    check_world(cfg, world)
    plans = plan_data(cfg)
    cfg, device = set_up(cfg, world)
    log = RunLog(cfg, world, start=checkpoint["step"] if checkpoint else 0)
    try:
        if checkpoint is not None:
            log.write(f"resumed at step {checkpoint['step']}, flags: {json.dumps(argv)}", console=True)
        elif world.rank == 0:
            log.write(f"{source}\n{log.RULE}\n{describe_machine(cfg, world)}")
            log.write(f"flags: {json.dumps(argv)}\nconfiguration: {json.dumps(dataclasses.asdict(cfg))}")
            log.write(describe_data(cfg, plans))
            log.write(f"seed: {cfg.seed}, log: {log.path}", console=True)
            if cfg.resume:
                log.write(f"--resume latest: no checkpoint in {cfg.log_dir}, starting from the beginning", console=True)
            log.write(log.RULE)
        result = train(cfg, world, device, plans, log, checkpoint)
        if world.rank == 0:
            with contextlib.suppress(OSError):  # of a full disk: the console has told it all
                log.path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    except (UserError, NonFiniteLoss, KeyboardInterrupt) as error:
        log.write(f"stopped: {error}" if str(error) else "interrupted: the run is not complete")
        raise
    finally:
        gc.unfreeze()
        gc.enable()
        log.close()
    if world.size > 1:
        dist.destroy_process_group()
    return result


def train(
    cfg: Hyperparameters, world: World, device: torch.device, plans: Sequence[list[Batch]], log: RunLog, checkpoint
) -> Result:
    torch.manual_seed(cfg.seed)
    gpt = GPT(cfg).to(device)
    if checkpoint is not None and world.rank == 0:
        gpt.load_state_dict(checkpoint["model"])
    if world.size > 1:
        for p in gpt.parameters():
            dist.broadcast(p.detach(), src=0)
    model: Callable = gpt
    orthogonalize: Callable = zeropower_via_newtonschulz5
    if cfg.compile:
        compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
        model, orthogonalize = compiled(gpt), compiled(orthogonalize)
    optimizers = muon, adam = build_optimizers(gpt, cfg, world, orthogonalize)
    groups = [*muon.param_groups, *adam.param_groups]
    warm_up(gpt, model, optimizers, cfg, world)

    clock, start, times, val_loss, val_curve = Clock(device), 0, [0.0], math.nan, []
    if checkpoint is not None:
        kept = ("step", "train_time_ms", "times", "val_curve")
        start, clock.elapsed, times, val_curve = (checkpoint[name] for name in kept)
        for name, tensor in (muon.state() | adam.state()).items():
            tensor.copy_(checkpoint["optimizers"][name])
        torch.set_rng_state(checkpoint["rng"])
    train_plan, val_plan = plans
    if checkpoint is not None and checkpoint["next"] != (at := dataclasses.astuple(train_plan[start])):
        raise UserError(f"--resume: the shards have changed: goes on with {checkpoint['next']}, here that is {at}")
    own_sequences = range(world.rank, cfg.batch_sequences, world.size)
    batches = read_batches(train_plan[start:], cfg.train_seq_len, own_sequences, cfg.vocab_size, device)
    watch = LossWatch(train_plan, device)
    window = torch.ones((), dtype=torch.int32, device=device)
    saves = range((cfg.checkpoint_every or cfg.num_iterations) - 1, cfg.num_iterations - 1, cfg.checkpoint_every or 1)
    pauses = {0, cfg.num_iterations // 2, cfg.num_iterations - 1, *saves}
    gc.collect()
    gc.freeze()
    gc.disable()  # one collection in the middle of a run was measured at 0.6 s (nanochat issue 477)
    if world.all_reduce(torch.tensor(start, device=device)).wait() != start * world.size:  # all begin together
        raise UserError("--resume: the nodes have checkpoints of different steps: name one that all of them have")
    late = late_events()
    clock.start()
    for step in range(start, cfg.num_iterations + 1):
        window.fill_(window_blocks(step, cfg))
        is_last = step == cfg.num_iterations
        if is_last or (cfg.val_loss_every and step % cfg.val_loss_every == 0):
            clock.stop()
            watch.check()
            val_batches = read_batches(val_plan[world.rank :: world.size], cfg.val_seq_len, [0], cfg.vocab_size, device)
            val_loss = evaluate(model, val_batches, window, world)
            val_curve.append((step, val_loss, clock.elapsed))
            timing = f"train_time:{clock.elapsed:.0f}ms step_avg:{clock.elapsed / max(step, 1):.2f}ms"
            log.write(f"step:{step}/{cfg.num_iterations} val_loss:{val_loss:.4f} {timing}", console=True)
            clock.start()
        if is_last:
            break
        loss = world.all_reduce(train_step(model, next(batches), window))
        for group in groups:
            group["lr"] = group["initial_lr"] * lr_multiplier(step, cfg)
        for group in muon.param_groups:
            group["momentum"] = muon_momentum(step, cfg)
        step_optimizers(optimizers)
        gpt.zero_grad(set_to_none=True)
        watch.put(step, loss.wait())
        times.append(clock.read())
        timing = f"train_time:{times[-1]:.0f}ms step_avg:{times[-1] / (step + 1):.2f}ms"
        log.step(f"step:{step + 1}/{cfg.num_iterations} {timing}", val_loss)
        if step in pauses:
            clock.stop()
            for group in groups:
                used = {name: value for name, value in group.items() if name in ("lr", "momentum", "betas")}
                log.write(f"effective at step {step}: window {int(window)}, {'+'.join(group['names'])}: {used}")
            if step in saves:
                watch.check()
                state = dict(identity=run_identity(cfg, world), run_id=cfg.run_id, step=step + 1, times=times)
                state |= dict(train_time_ms=clock.elapsed, val_curve=val_curve, rng=torch.get_rng_state())
                state["next"] = dataclasses.astuple(train_plan[step + 1])
                state["model"] = gpt.state_dict() if world.rank == 0 else {}  # the others get it from there
                state["optimizers"] = muon.state() | adam.state()
                folder = log.path.with_suffix(".checkpoints") / f"step-{step + 1:06d}"
                failure = write_checkpoint(folder, state, world, device)
                log.write(f"checkpoint: {f'not saved: {failure}' if failure else folder}", console=bool(failure))
            clock.start()

    (recompiles, collections), peak = (late_events() - late).tolist(), peak_memory_mib(device)
    for name, batch in ("first", train_plan[0]), ("last", train_plan[-1]):
        log.write(f"{name} batch: {batch.shard.path} position {batch.start}")
    log.write(f"recompiles after the clock started: {recompiles}", console=recompiles > 0)
    log.write(f"garbage collections after the clock started: {collections}")
    ms = np.diff(times)
    median, p99 = np.percentile(ms, [50, 99])
    log.write(f"step time: median {median:.2f}ms p99 {p99:.2f}ms slowest {ms.max():.2f}ms at step {ms.argmax()}")
    if p99 > 1.5 * median:
        log.write("step times vary, p99 is over 1.5 times the median: is something else running?", console=True)
    log.write(f"peak memory: {peak} MiB", console=True)
    if cfg.save_checkpoint and world.rank == 0:
        failure = write_model(gpt, cfg, path := log.path.with_suffix(".pt"))
        log.write(f"model: {f'not saved: {failure}' if failure else path}", console=True)
    outcome = dict(seed=cfg.seed, peak_memory_mib=peak, recompiles=recompiles, log=str(log.path))
    return Result(val_loss, clock.elapsed, cfg.num_iterations, **outcome, val_curve=tuple(val_curve))


def run_as_program() -> int:
    """`main` with one line for what the user can mend, and the exit code for how it ended."""
    try:
        main()
        return 0
    except (UserError, NonFiniteLoss) as error:
        # What all ranks of a machine find alike, one says
        if isinstance(error, ShardError) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train_gpt.py: {error}", file=sys.stderr)
        return 3 if isinstance(error, NonFiniteLoss) else 2
    except KeyboardInterrupt:
        print("train_gpt.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run_as_program())
