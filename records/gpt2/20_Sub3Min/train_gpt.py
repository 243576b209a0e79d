"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    SCRIPT=records/NAME/train_gpt.py ./run.sh                              environment, data, checks and launch
    torchrun --standalone --nproc_per_node=8 records/NAME/train_gpt.py     the record configuration on 8xH100
    python records/NAME/train_gpt.py --preset nano                         a small model on a CPU, in seconds

Sub3Min (2025-01-16): record 20 of the NanoGPT speedrun (https://github.com/KellerJordan/modded-nanogpt);
"record n": of that history.
Reading order: configuration, head, layers, attention, model, optimizers, data, schedules, run. Start at `main`.
Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens, M visible blocks, K model width, V vocabulary.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import glob
import hashlib
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam
from tqdm import tqdm

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # number the layers in skip_layout
READ_AHEAD = 2  # batches that the reader keeps ready
LOSS_LAG = 8  # look at losses this many steps late, so that no step waits for the GPU
# Ranges of the numbers in Hyperparameters
Count = Annotated[int, 1, 2**27]
Natural = Annotated[int, 0, 2**24]
Size = Annotated[int, 1, 2**14]
Positive = Annotated[float, 1e-9, 2**30]
Rate = Annotated[float, 0, 100]
Decay = Annotated[float, 0, 0.99999]
# torch 2.13 renames it
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class UserError(Exception):
    """Say what the user can mend: a flag, a file, the hardware. Exit code 2."""


# ---- Configuration ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Hyperparameters:
    # Data
    preset: Literal["gpt2", "nano"] = "gpt2"  # by default gpt2 where torch sees a GPU, else nano
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards, read in sorted order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    val_tokens: Count = 10_485_760  # validation tokens, a multiple of val_seq_len
    val_sha256: str = ""  # SHA-256 of the track's validation tokens, where known; the log marks others
    target_loss: Annotated[float, 0, 100] = 3.28  # validation loss to reach
    vocab_size: Annotated[int, 1, 2**16] = 50257  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: Natural = 50256  # end of text, opens every document; below vocab_size
    # Training
    num_iterations: Count = 1393  # training steps
    cooldown_frac: Annotated[float, 1e-9, 1] = 0.4  # last part of the run, in which learning rates fall
    min_lr_frac: Rate = 0.1  # learning rate after the last step, relative to the one before the cooldown
    val_loss_every: Natural = 125  # steps between validations; 0: only after the last step
    batch_tokens: Count = 8 * 64 * 1024  # tokens per step, over all processes; a multiple of train_seq_len
    train_seq_len: Count = 64 * 1024  # tokens per training sequence, a multiple of block_size
    val_seq_len: Count = 64 * 1024  # tokens per validation sequence, a multiple of block_size
    # Model
    model_dim: Size = 768  # width of the residual stream
    num_heads: Size = 6  # attention heads
    head_dim: Size = 128  # dimensions per head, a multiple of 4
    attention_layout: str = "LSSSLSS-SSSL"  # per layer: L long window, S half of it, - no attention
    value_embed_layout: str = "012......012"  # per layer: digit of its value embedding, or .
    skip_layout: str = "......543210"  # per layer: the earlier layer (0-9a-z) whose output it adds, or .
    rope_base: Positive = 1024.0  # base of the rotary frequencies
    attention_scale: Annotated[float, 0, 2**20] = 0.12  # factor on the attention scores; q and k have unit RMS
    lm_head_softcap: Positive = 15.0  # logits are squashed into a range of twice this size
    lm_head_fp8: bool = True  # train the head in FP8 where the GPU can
    fp8_x_scale: Positive = 2.0  # static FP8 scale of the head's input,
    fp8_w_scale: Positive = 2.0**5  # of its weight,
    fp8_grad_scale: Positive = 2.0**29  # and of the logits' gradient, which shrinks with 1 / train_seq_len
    block_size: Count = 128  # tokens per block of the attention mask
    window_tokens: Count = 1728  # long window at the end of the run; it grows linearly from one block
    # Optimizers
    muon_lr: Rate = 0.05  # Muon, for hidden matrices: spectral norm of an update
    muon_momentum: Decay = 0.95  # momentum after its warm-up
    momentum_warmup_start: Decay = 0.85  # momentum of the first step
    momentum_warmup_steps: Natural = 300  # steps of that warm-up
    embed_lr: Rate = 0.6  # Adam, for token and value embeddings
    head_lr: Rate = 0.008  # Adam: head
    scalar_lr: Rate = 0.04  # Adam: scalars
    adam_beta1: Decay = 0.8  # decay of the first moment
    adam_beta2: Decay = 0.95  # decay of the second moment
    adam_eps: Rate = 1e-10  # added to the root of the second moment
    # Machine
    seed: Annotated[int | None, 0, 2**63 - 1] = None  # random seed; by default a fresh one, printed and logged
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where torch sees a GPU
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; by default on CUDA only
    cpu_threads: Annotated[int, 0, 1024] = 0  # CPU threads over all processes of a machine; 0: torch's choice
    # Output
    log_dir: str = "logs"  # folder of the logs
    run_id: str = ""  # name of the log, without folders; by default preset, time and seed

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise UserError(f"--{name} {str(getattr(self, name))[:100]}: expected {expected}")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Annotated and value is not None:
                low, high = field.type.__metadata__
                require(field.name, low <= value <= high, f"a number from {low} to {high}")
            if field.type is str:
                require(field.name, value.isprintable() and len(value) < 1000, "printable characters")
        multiples = dict(head_dim=4, train_seq_len=self.block_size, val_seq_len=self.block_size)
        multiples |= dict(batch_tokens=self.train_seq_len, val_tokens=self.val_seq_len)
        for name, unit in multiples.items():
            require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        require("eot_token", self.eot_token < self.vocab_size, f"a token below vocab_size {self.vocab_size}")
        require("run_id", "/" not in self.run_id and len(self.run_id) < 200, "a short name without folders")
        layers, embeds = len(self.attention_layout), set(self.value_embed_layout) - {"."}
        require("attention_layout", 0 < layers <= 36 and set(self.attention_layout) <= set("LS-"), "letters L, S and -")
        pairs = zip(self.value_embed_layout, self.attention_layout, strict=False)
        used = {digit for digit, letter in pairs if letter != "-"}
        holds = len(self.value_embed_layout) == layers and embeds == used & set(DIGITS[: len(embeds)])
        require("value_embed_layout", holds, f"{layers} characters: . or, where there is attention, a digit, from 0 on")
        holds = [source in "." + DIGITS[:i] for i, source in enumerate(self.skip_layout)]
        require("skip_layout", all(holds) and len(holds) == layers, f"{layers} digits of earlier layers or .")

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.train_seq_len


# fmt: off
PRESETS = {
    "gpt2": Hyperparameters(),
    "nano": Hyperparameters(
        preset="nano", train_files="data/nano/nano_train_*.bin", val_files="data/nano/nano_val_*.bin",
        val_tokens=262_144, val_sha256="e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33",
        target_loss=1.45, vocab_size=257, eot_token=256, num_iterations=610, cooldown_frac=0.7, val_loss_every=300,
        batch_tokens=1024, train_seq_len=1024, val_seq_len=1024, model_dim=192, num_heads=3, head_dim=64,
        attention_layout="LL", value_embed_layout="00", skip_layout=".0", lm_head_fp8=False, block_size=64,
        window_tokens=128, muon_lr=0.025, momentum_warmup_steps=100, cpu_threads=2,
    ),
}
# fmt: on


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset with the flags `argv` in place; every field of Hyperparameters is a flag."""
    gpt2, nano = (set(dataclasses.asdict(preset).items()) for preset in PRESETS.values())
    changes = " ".join(f"{name}={value}" for name, value in sorted(nano - gpt2))
    fields = inspect.getsource(Hyperparameters).partition("\n\n")[0]
    help_text = f"{__doc__}\nEvery field is a flag (--no-FIELD for false):\n\n{fields}\n\nnano: {changes}"
    form, hidden = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    parser = argparse.ArgumentParser("train_gpt.py", hidden, help_text, formatter_class=form, allow_abbrev=False)
    for field in dataclasses.fields(Hyperparameters):
        kind = field.type
        while get_args(kind) and get_origin(kind) is not Literal:  # as in Annotated[int | None, ...]
            kind = get_args(kind)[0]
        how = dict(choices=get_args(kind)) if get_origin(kind) is Literal else dict(type=kind)
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else how
        parser.add_argument(f"--{field.name}", **how, help=hidden, default=hidden)
    flags, sees_gpu = vars(parser.parse_args(argv)), torch.cuda.is_available()
    if "preset" not in flags and world_size > 1 and not sees_gpu:
        raise UserError(f"{world_size} processes, but torch {torch.__version__} sees no GPU: say --preset nano or gpt2")
    return dataclasses.replace(PRESETS[flags.get("preset", "gpt2" if sees_gpu else "nano")], **flags)


def resolve(cfg: Hyperparameters) -> Hyperparameters:
    """Decide what `cfg` leaves open: device, precision, FP8, compilation, seed, name of the run."""
    sees_gpu = torch.cuda.is_available()
    on_cuda = cfg.device == "cuda" or (cfg.device == "auto" and sees_gpu)
    if on_cuda and not sees_gpu:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU; ./run.sh --check says why")
    # A CPU with AVX512-BF16 or AMX multiplies bf16 2.1 times as fast as fp32, others 3 to 10 times slower
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = "bfloat16" if on_cuda or (native and torch.ops.mkldnn._is_mkldnn_bf16_supported()) else "float32"
    seed = int.from_bytes(os.urandom(4)) // 2 if cfg.seed is None else cfg.seed
    dtype, fp8 = fast if cfg.dtype == "auto" else cfg.dtype, cfg.lm_head_fp8 and on_cuda
    fp8 = fp8 and torch.cuda.get_device_capability() >= (8, 9)
    compile = on_cuda if cfg.compile is None else cfg.compile
    run_id = cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    decided = dict(device="cuda" if on_cuda else "cpu", dtype=dtype, lm_head_fp8=fp8, compile=compile)
    return dataclasses.replace(cfg, **decided, seed=seed, run_id=run_id)


# ---- Head: in FP8 where the GPU can ----------------------------------------------------------------------------------
class Fp8Linear(torch.autograd.Function):
    """Compute x @ w.T in FP8, and its gradients, for x (T, K) and w (V, K) (record 19, @YouJiacheng).

    e4m3 forward, e5m2 for the gradient, which needs range more than precision. The scales, of x, w and the gradient,
    are static: x has unit RMS, w saturates, and the gradient of a mean over T tokens is at most 1 / T.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float) -> Tensor:
        x_q, w_q = quantize(x, x_s, torch.float8_e4m3fn), quantize(w, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x_q, w_q)
        ctx.scales, ctx.dtypes = (x_s, w_s, grad_s), (x.dtype, w.dtype)
        return scaled_mm(x_q, w_q.t(), x_s, w_s, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_q, w_q), (x_s, w_s, grad_s), (x_dtype, w_dtype) = ctx.saved_tensors, ctx.scales, ctx.dtypes
        grad = quantize(grad, grad_s, torch.float8_e5m2)
        # As (K, V), then transposed: faster than (V, K) directly (record 19)
        grad_w = scaled_mm(x_q.t(), grad, x_s, grad_s, w_dtype).t()
        return scaled_mm(grad, w_q, grad_s, w_s, x_dtype), grad_w, None, None, None


def quantize(t: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    limit = torch.finfo(kind).max  # beyond it a cast saturates on some devices and gives NaN on others
    return (t * scale).clamp(-limit, limit).to(kind)


def scaled_mm(a: Tensor, b: Tensor, a_s: float, b_s: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    scales = [torch.full((), 1 / scale, dtype=torch.float32, device=a.device) for scale in (a_s, b_s)]
    a, b = a.contiguous(), b.t().contiguous().t()  # cuBLAS wants row-major by column-major
    return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=fast)


# ---- Layers: each draws its own initial values; outputs (c_proj, lm_head) start at zero (@Grad62304977) --------------
def uniform_weight(*shape: int) -> nn.Parameter:
    """Return a weight (..., out, in) of deviation 0.5 / sqrt(in), a bit better than PyTorch's 3^-0.5 (record 19)."""
    bound = (0.75 / shape[-1]) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.type_as(x))  # weights are kept in full precision


def norm(x: Tensor) -> Tensor:
    """Divide x by its RMS over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))


class Rotary(nn.Module):
    """Rotate each pair of dimensions d, d + D / 2 by the token's position in its sequence (arXiv:2104.09864)."""

    def __init__(self, head_dim: int, max_seq_len: int, base: float):
        super().__init__()
        frequencies = (1 / base) ** torch.linspace(0, 1, steps=head_dim // 4, dtype=torch.float32)
        angles = torch.outer(torch.arange(max_seq_len), F.pad(frequencies, (0, head_dim // 4)))  # half are 0: record 17
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_THD: Tensor) -> Tensor:
        cos, sin = (table[: len(x_THD), None, :] for table in (self.cos, self.sin))
        x1, x2 = x_THD.chunk(2, dim=-1)  # the fp32 tables promote bf16
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x_THD)


class MLP(nn.Module):
    """Square the ReLU: 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977)."""

    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = uniform_weight(4 * dim, dim)
        self.c_proj = nn.Parameter(torch.zeros(dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.relu(linear(x, self.c_fc)).square(), self.c_proj)


# ---- Attention: causal, within documents, in sliding windows of blocks -----------------------------------------------
def document_block_mask(doc_ids: Tensor, window_blocks: Tensor, block_size: int) -> BlockMask:
    """Return which tokens see which: causal, within a document, no further back than a window of blocks.

    doc_ids (T,): the non-decreasing document id of each token. window_blocks () int32: a query block sees the nearest
    max(window_blocks, 1) key blocks, its own included; a tensor, so that a growing window never recompiles.

    As the ids never decrease, query block i sees blocks first..i; those from whole to i-1 need no mask. Both kinds are
    listed nearest first, so that a window only limits their counts (windows by block: record 16; two lengths: 20).
    """

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (doc_ids[q] == doc_ids[kv])

    low, high = doc_ids.view(-1, block_size)[:, 0], doc_ids.view(-1, block_size)[:, -1]
    block = torch.arange(len(low), dtype=torch.int32, device=doc_ids.device)
    first = (high[None, :] < low[:, None]).sum(1, dtype=torch.int32)
    whole = (low[None, :] < low[:, None]).sum(1, dtype=torch.int32)
    num_full = torch.where(low == high, block - whole, 0)
    num_partial = block - first + 1 - num_full
    i, j = block[:, None], block[None, :]
    full = (i - 1 - j).clamp(min=0)
    partial = torch.where(j == 0, i, i - num_full[:, None] - j).clamp(min=0)
    num_partial = torch.minimum(num_partial, (window_blocks - num_full).clamp(min=1))
    num_full = torch.minimum(num_full, window_blocks - 1).clamp(min=0)
    lists = (t[None, None].contiguous() for t in (num_partial, partial, num_full, full))
    return BlockMask.from_kv_blocks(*lists, block_size, causal_in_document)


class GatheredMask:
    """Hold a BlockMask for attention in plain PyTorch: FlexAttention has no backward on CPUs.

    kv_blocks (N, M): the key blocks of each query block, partial ones first; bias (N, 1, block, M block): 0 where a
    token sees another, -inf where not. M = `max_blocks` is the largest number of blocks that any query block sees.
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from q to k and v, all (T, H, D). The cost grows with the window, not as T^2."""
        (T, H, D), (N, M) = q.shape, self.kv_blocks.shape
        q = q.reshape(N, T // N, H, D).transpose(1, 2)
        k, v = (t.reshape(N, -1).index_select(0, self.kv_blocks.flatten()) for t in (k, v))
        k, v = (t.view(N, M * (T // N), H, D).transpose(1, 2) for t in (k, v))
        # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries)
        y = torch.softmax((q * scale) @ k.mT + self.bias, dim=-1) @ v
        return y.transpose(1, 2).reshape(T, H, D)


class CausalSelfAttention(nn.Module):
    """Attend with QK-norm, rotary and value embeddings. x (T, K) -> the same."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = cfg.num_heads, cfg.head_dim, cfg.attention_scale
        self.qkv_w = uniform_weight(3, cfg.num_heads * cfg.head_dim, cfg.model_dim)  # Muon sees three: record 20
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.c_proj = nn.Parameter(torch.zeros(cfg.model_dim, cfg.num_heads * cfg.head_dim))

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, mask: BlockMask | GatheredMask) -> Tensor:
        H, D = self.num_heads, self.head_dim
        qkv = linear(x, self.qkv_w.flatten(0, 1)).view(len(x), 3 * H, D)
        qk, v = qkv.split([2 * H, H], dim=1)
        q, k = rotary(norm(qk)).split(H, dim=1)  # QK-norm: @Grad62304977
        v = self.lambdas[0] * v  # two free factors: record 15
        if value_embed is not None:  # after value residuals (arXiv:2410.17897): @KoszarskyB, record 14
            v = v + self.lambdas[1] * value_embed.view_as(v)
        if isinstance(mask, BlockMask):
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            y = flex_attention(q, k, v, block_mask=mask, scale=self.scale).squeeze(0).transpose(0, 1)
        else:
            y = mask.attend(q, k, v, self.scale)
        return linear(y.flatten(1), self.c_proj)


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
class Block(nn.Module):
    def __init__(self, cfg: Hyperparameters, has_attention: bool):
        super().__init__()
        self.attn = CausalSelfAttention(cfg) if has_attention else None
        self.mlp = MLP(cfg.model_dim)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, *attention_inputs) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # the embedding stays at hand: @KoszarskyB, record 9
        if self.attn is not None:
            x = x + self.attn(norm(x), *attention_inputs)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Map tokens (T,) int32, targets (T,) int64 and window_blocks () int32 to the mean cross entropy in nats."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg, K, V = cfg, cfg.model_dim, cfg.vocab_size
        dtype = getattr(torch, cfg.dtype)  # embeddings are in the precision of the activations, the rest in fp32
        self.embed = nn.Embedding(V, K, dtype=dtype)
        values = (nn.Embedding(V, cfg.num_heads * cfg.head_dim, dtype=dtype) for _ in {*cfg.value_embed_layout} - {"."})
        self.value_embeds = nn.ModuleList(values)
        self.blocks = nn.ModuleList(Block(cfg, has_attention=letter != "-") for letter in cfg.attention_layout)
        num_skips = len(cfg.skip_layout.replace(".", ""))
        self.skip_weights = nn.Parameter(torch.ones(num_skips)) if num_skips else None
        self.lm_head = nn.Parameter(torch.zeros(V + -V % 128, K))  # more rows, for aligned matmul tiles
        self.rotary = Rotary(cfg.head_dim, max(cfg.train_seq_len, cfg.val_seq_len), cfg.rope_base)
        if dtype == torch.float64:
            self.double()

    def forward(self, tokens: Tensor, targets: Tensor, window_blocks: Tensor) -> Tensor:
        cfg, masks = self.cfg, self.attention_masks(tokens, window_blocks)
        value_embeds = {DIGITS[i]: embed(tokens) for i, embed in enumerate(self.value_embeds)}
        x = x0 = norm(self.embed(tokens))
        outputs: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            if (source := cfg.skip_layout[i]) != ".":  # U-Net: later layers add earlier ones (@brendanh0gan, record 11)
                x = x + self.skip_weights[i - cfg.skip_layout[:i].count(".")] * outputs[source]
            value_embed, mask = value_embeds.get(cfg.value_embed_layout[i]), masks.get(cfg.attention_layout[i])
            x = outputs[DIGITS[i]] = block(x, x0, value_embed, self.rotary, mask)
        x = norm(x)
        if cfg.lm_head_fp8 and torch.is_grad_enabled():  # validation is never in FP8
            z = Fp8Linear.apply(x, self.lm_head, cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale)
        else:
            z = linear(x, self.lm_head)
        # The softcap c tanh(z / c) is that of Gemma 2 (arXiv:2408.00118); c is 15 instead of 30 since record 18
        # (@KoszarskyB). A softmax ignores a shift, so the logits here are c tanh(z / c) + c = 2 c sigmoid(2 z / c)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return F.cross_entropy(2 * cfg.lm_head_softcap * torch.sigmoid(z * (2 / cfg.lm_head_softcap)), targets)

    def attention_masks(self, tokens: Tensor, window_blocks: Tensor) -> dict[str, BlockMask | GatheredMask]:
        """Return the masks by their letter in the layout: L with the whole window, S with half of it."""
        cfg, on_cuda, masks = self.cfg, self.cfg.device == "cuda", {}
        doc_ids = (tokens == cfg.eot_token).cumsum(0, dtype=torch.int32)
        for letter in sorted(set(cfg.attention_layout) - {"-"}):
            share = 1 if letter == "L" else 2
            mask = document_block_mask(doc_ids, window_blocks // share, cfg.block_size)
            max_blocks = max(1, -(-cfg.window_tokens // cfg.block_size) // share)
            masks[letter] = mask if on_cuda else GatheredMask(mask, max_blocks, self.embed.weight.dtype)
        return masks


# ---- Optimizers: the ranks sum their gradients; each updates its share of the matrices, and all the rest -------------
# This process among all of them, as torchrun's environment describes it
Ranks = namedtuple("Ranks", "rank world_size local_rank local_world_size", defaults=(0, 1, 0, 1))


def launch(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective, and return what waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


class Adam:
    """Step embeddings, head and scalars by Adam (arXiv:1412.6980): PyTorch's kernel, moments in their precision."""

    def __init__(self, params: dict[str, nn.Parameter], lr: float, cfg: Hyperparameters, ranks: Ranks):
        self.name, self.params, self.cfg = "+".join(params), list(params.values()), cfg
        self.initial_lr, self.lr, self.step = lr, lr, 0
        moments = product(params.items(), ("exp_avg", "exp_avg_sq"))
        self.state = {f"{name} {moment}": torch.zeros_like(p) for (name, p), moment in moments}

    def update(self) -> None:
        cfg, grads, moments = self.cfg, [p.grad for p in self.params], list(self.state.values())
        steps = [torch.full((), self.step, dtype=torch.float32, device=p.device) for p in self.params]
        options = dict(lr=self.lr, beta1=cfg.adam_beta1, beta2=cfg.adam_beta2, eps=cfg.adam_eps, weight_decay=0.0)
        options |= dict(fused=True, amsgrad=False, maximize=False)
        adam(self.params, grads, moments[::2], moments[1::2], [], steps, **options)


def zeropower_via_newtonschulz5(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return about the orthogonal factor U V' of every matrix U S V' in G (..., rows, cols), in `dtype`.

    Five steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon). Its
    coefficients do not converge, which does no harm, and in return small singular values grow fast: all of at least
    0.00143 of the Frobenius norm end in [0.65, 1.25]. A zero matrix stays zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = G.size(-2) > G.size(-1)
    X = (G.mT if is_tall else G).reshape(-1, *sorted(G.shape[-2:]))
    X = (X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(5):  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if is_tall else X).reshape(G.shape)


class Muon:
    """Step hidden matrices of one size by MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024).

    With g the mean gradient of the step, in the lerp form of record 15:

        m <- momentum m + (1 - momentum) g
        p <- p - lr sqrt(max(1, rows / cols)) zeropower(momentum m + (1 - momentum) g)

    Each rank takes every W-th parameter, keeps its momentum and computes its update. The ranks gather the updates into
    one buffer while they compute the next ones. In the last round some may send what nobody reads.
    """

    def __init__(self, params: dict[str, nn.Parameter], lr: float, cfg: Hyperparameters, ranks: Ranks):
        self.name, self.params, self.cfg, self.ranks = "+".join(params), list(params.values()), cfg, ranks
        self.initial_lr, self.lr, self.step = lr, lr, 0
        own = list(params.items())[ranks.rank :: ranks.world_size]
        self.state = {f"{name} momentum_buffer": torch.zeros_like(p) for name, p in own}
        shape = (ranks.world_size, self.params[0].numel())
        self.updates = self.params[0].new_zeros(shape, dtype=getattr(torch, cfg.dtype))
        ns = zeropower_via_newtonschulz5
        self.orthogonalize = torch.compile(ns, fullgraph=True, dynamic=False) if cfg.compile else ns

    def update(self) -> None:
        momentum, (W, rank) = muon_momentum(self.step, self.cfg), (self.ranks.world_size, self.ranks.rank)
        momentum_buffers, wait, members = iter(self.state.values()), lambda: None, []
        for i in range(0, len(self.params), W):
            update, following = torch.empty_like(self.updates[rank]), self.params[i : i + W]
            if rank < len(following):
                grad = following[rank].grad
                momentum_buffer = next(momentum_buffers).lerp_(grad, 1 - momentum)
                update = self.orthogonalize(grad.lerp_(momentum_buffer, momentum), update.dtype).flatten()
            wait()
            self.apply(members)
            members = following
            wait = launch(all_gather, self.updates, update[None]) if W > 1 else lambda u=update: self.updates.copy_(u)
        wait()
        self.apply(members)

    def apply(self, params: Sequence[nn.Parameter]) -> None:
        for p, update in zip(params, self.updates, strict=False):
            p.add_(update.view_as(p), alpha=-self.lr * max(1, p.size(-2) / p.size(-1)) ** 0.5)


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[Muon | Adam]:
    """Put every parameter into exactly one group, by the components of its name. Refuse what none claims, or two."""
    cfg, named = gpt.cfg, dict(gpt.named_parameters())

    def claim(*components: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in named.items() if set(components) & set(name.split("."))}

    sizes: dict[int, dict[str, nn.Parameter]] = {}  # Muon's parameters
    for name, p in claim("qkv_w", "c_fc", "c_proj").items():
        sizes.setdefault(p.numel(), {})[name] = p
    optimizers = [
        *(Muon(params, cfg.muon_lr, cfg, ranks) for params in sizes.values()),
        Adam(claim("lm_head"), cfg.head_lr, cfg, ranks),
        Adam(claim("embed", "value_embeds"), cfg.embed_lr, cfg, ranks),
        Adam(claim("lambdas", "skip_weights"), cfg.scalar_lr, cfg, ranks),
    ]
    claimed = "+".join(optimizer.name for optimizer in optimizers).split("+")
    if wrong := [name for name in named if claimed.count(name) != 1]:
        raise ValueError(f"each parameter needs exactly one group in build_optimizers: {', '.join(wrong)}")
    return optimizers


@torch.no_grad()
def step_optimizers(optimizers: Sequence[Muon | Adam], step: int) -> None:
    """Take step `step`, from the sums of the gradients of this rank's sequences."""
    grads = [p.grad for optimizer in optimizers for p in optimizer.params]
    for grad, wait in [(grad, launch(dist.all_reduce, grad)) for grad in grads]:
        wait()
        grad.div_(optimizers[0].cfg.batch_sequences)  # gradients are sums over the sequences
    for optimizer in optimizers:
        optimizer.step, optimizer.lr = step, optimizer.initial_lr * lr_multiplier(step, optimizer.cfg)
        optimizer.update()


# ---- Data: which tokens each step trains on is planned before the first one, the same for any number of processes ----
# The tokens of a shard from `start` on; the stamp tells whether the file changes
Batch = namedtuple("Batch", "path start stamp")


def read_shard(path: str, dtype: str, offset: int, count: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return `count` numbers from byte `offset` on, fewer at the end, and the file's inode, size and time of change."""
    try:
        if not os.path.isfile(path):  # opening a pipe would wait forever
            raise OSError("not a regular file")
        with open(path, "rb") as file:  # not mmap: a truncated mapped file raises SIGBUS
            status = os.fstat(file.fileno())
            file.seek(offset)
            return np.fromfile(file, dtype, count), (status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; ./run.sh --check says what to do") from None


def plan_batches(pattern: str, batch_tokens: int, num_batches: int) -> list[Batch]:
    """Plan consecutive batches, shard after shard in sorted order; drop the tail of a shard shorter than a batch.

    A shard is 256 int32 of header [20240520, 1, number of tokens, 0 ...], then uint16 tokens: the format of llm.c.
    """
    plan: list[Batch] = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        header, stamp = read_shard(path, "<i4", 0, 3)
        if header.tolist() != [20240520, 1, (stamp[1] - 1024) / 2]:
            raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
        starts = range(0, int(header[2]) - batch_tokens, batch_tokens)[: num_batches - len(plan)]  # and a last target
        plan += [Batch(path, start, stamp) for start in starts]
    if len(plan) < num_batches:
        found = f"{pattern} in {os.getcwd()}: {len(plan)} batches of {batch_tokens} tokens, the run needs {num_batches}"
        raise UserError(f"{found}; ./run.sh gets a preset's data, data/pack_text.py packs text")
    return plan


def plan_data(cfg: Hyperparameters) -> dict[str, list[Batch]]:
    """Return the batches of training, and those of validation, one sequence each."""
    val_plan = plan_batches(cfg.val_files, cfg.val_seq_len, cfg.val_tokens // cfg.val_seq_len)
    return dict(train=plan_batches(cfg.train_files, cfg.batch_tokens, cfg.num_iterations), val=val_plan)


def read_tokens(batch: Batch, offset: int, count: int, vocab_size: int) -> np.ndarray:
    """Return `count` of the batch's uint16 tokens from `offset` on."""
    tokens, stamp = read_shard(batch.path, "<u2", 1024 + 2 * (batch.start + offset), count)
    if stamp != batch.stamp or len(tokens) < count:
        raise UserError(f"{batch.path}: has changed since the run was planned: start again, and leave it alone")
    if tokens.max() >= vocab_size:
        raise UserError(f"{batch.path}: has token {tokens.max()}, --vocab_size is {vocab_size}: another tokenizer's?")
    return tokens


def read_batches(plan, sequences: Sequence[int], seq_len: int, cfg: Hyperparameters, device: torch.device) -> Iterator:
    """Yield for each batch the [(inputs (T,) int32, targets (T,) int64), ...] of its `sequences`, on the device."""

    def read(batch: Batch) -> Tensor:
        tokens = torch.empty(len(sequences), seq_len + 1, dtype=torch.uint16, pin_memory=device.type == "cuda")
        for sequence, row in zip(sequences, tokens.numpy(), strict=True):
            row[:] = read_tokens(batch, sequence * seq_len, seq_len + 1, cfg.vocab_size)
        return tokens

    with ThreadPoolExecutor(max_workers=1) as reader:  # ahead of the steps, from the first `next` on
        futures = (reader.submit(read, batch) for batch in plan)
        ahead = deque(islice(futures, READ_AHEAD))
        while ahead:
            tokens = ahead.popleft().result().to(device, non_blocking=True).to(torch.int32)
            ahead.extend(islice(futures, 1))
            yield [(row[:-1], row[1:].long()) for row in tokens]


# ---- Schedules: functions of the step and the configuration ----------------------------------------------------------
def lr_multiplier(step: int, cfg: Hyperparameters) -> float:
    """Return the factor on all learning rates: 1, and in the cooldown linearly down to `min_lr_frac`."""
    w = min((1 - step / cfg.num_iterations) / cfg.cooldown_frac, 1.0)
    return w + (1 - w) * cfg.min_lr_frac


def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Return Muon's momentum, which rises linearly during its warm-up."""
    w = min(step / cfg.momentum_warmup_steps, 1.0) if cfg.momentum_warmup_steps else 1.0
    return (1 - w) * cfg.momentum_warmup_start + w * cfg.muon_momentum


def window_blocks(step: int, cfg: Hyperparameters) -> int:
    """Return the blocks of the long window: its share of `window_tokens` at this step, rounded up."""
    return max(1, -(-cfg.window_tokens * step // (cfg.num_iterations * cfg.block_size)))


# ---- Training --------------------------------------------------------------------------------------------------------
class Trainer:
    """Build model and optimizers, the same on all ranks, and take the steps of a run."""

    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        self.cfg, self.ranks, on_cuda = cfg, ranks, cfg.device == "cuda"
        self.device = torch.device("cuda", ranks.local_rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        elif cfg.cpu_threads:
            torch.set_num_threads(max(1, cfg.cpu_threads // ranks.local_world_size))
        torch.manual_seed(cfg.seed)
        self.gpt = GPT(cfg).to(self.device)
        if ranks.world_size > 1:
            # By default gloo for tensors on CPUs, NCCL for those on GPUs. One rank may compile while the others wait
            dist.init_process_group(timeout=timedelta(minutes=30))
        for p in self.gpt.parameters():
            launch(dist.broadcast, p.detach(), 0)()
        self.model = torch.compile(self.gpt, fullgraph=True, dynamic=False) if cfg.compile else self.gpt
        self.optimizers = build_optimizers(self.gpt, ranks)
        self.window_blocks = torch.ones((), dtype=torch.int32, device=self.device)

    def train_step(self, step: int, sequences: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Take a step on this rank's sequences, and return the mean loss over those of all ranks."""
        losses = []
        self.window_blocks.fill_(window_blocks(step, self.cfg))
        for tokens, targets in sequences:
            loss = self.model(tokens, targets, self.window_blocks)
            loss.backward()  # undivided: FP8 sees the same gradients for any number of processes, and fewer become 0
            losses.append(loss.detach())
        mean = torch.stack(losses).sum() / self.cfg.batch_sequences
        wait = launch(dist.all_reduce, mean)
        step_optimizers(self.optimizers, step)
        self.gpt.zero_grad(set_to_none=True)
        wait()
        return mean

    @torch.no_grad()
    def evaluate(self, step: int, val_plan: Sequence[Batch]) -> float:
        """Return the mean loss over the validation tokens. A rank may score more sequences than others, or none."""
        self.window_blocks.fill_(window_blocks(step, self.cfg))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        own = val_plan[self.ranks.rank :: self.ranks.world_size]
        for [(tokens, targets)] in read_batches(own, [0], self.cfg.val_seq_len, self.cfg, self.device):
            total += self.model(tokens, targets, self.window_blocks)
        launch(dist.all_reduce, total)()
        return total.item() / len(val_plan)

    def warm_up(self) -> None:
        """Compile and run every graph on random tokens, and leave no trace: the first real one is read on the clock."""
        cfg, generator = self.cfg, torch.Generator(self.device)
        trained = [*self.gpt.parameters(), *(shard for o in self.optimizers for shard in o.state.values())]
        saved = [tensor.detach().to("cpu", copy=True) for tensor in trained]  # not on the GPU's peak
        length, options = cfg.train_seq_len + cfg.val_seq_len, dict(device=self.device, generator=generator)
        tokens = torch.randint(cfg.vocab_size, (length,), **options)
        train, val = ((tokens[:n].int(), tokens[1 : n + 1]) for n in (cfg.train_seq_len, cfg.val_seq_len))
        for _ in range(2):
            self.train_step(0, [train] * min(2, cfg.batch_sequences // self.ranks.world_size))
        with torch.no_grad():
            self.model(*val, self.window_blocks)
            for tensor, value in zip(trained, saved, strict=True):
                tensor.copy_(value)


# ---- Run -------------------------------------------------------------------------------------------------------------
class RunLog:
    """Keep the clock and the curves of a run, write LOG_DIR/RUN_ID.txt and tell the console. Only rank 0 writes."""

    def __init__(self, cfg: Hyperparameters, is_main: bool):
        self.cfg, self.path, self.is_main, self.file = cfg, Path(cfg.log_dir) / f"{cfg.run_id}.txt", is_main, None
        self.elapsed, self.curves, self.pending, self.last_line = 0.0, dict(train_loss=[], val_loss=[]), deque(), 0.0
        self.synchronize = torch.cuda.synchronize if cfg.device == "cuda" else lambda: None
        try:
            if is_main:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"log {self.path}: {error}; choose another --run_id or --log_dir") from None
        options = dict(total=cfg.num_iterations * cfg.batch_tokens)
        options |= dict(disable=not (is_main and os.isatty(1) and os.isatty(2)), unit_scale=True, dynamic_ncols=True)
        self.bar = tqdm(unit="tokens", **options)

    def start_clock(self) -> None:
        self.synchronize()
        self.started = time.perf_counter()

    def read_clock(self) -> float:
        """Return the milliseconds of training, without validations."""
        return self.elapsed + 1000 * (time.perf_counter() - self.started)

    @contextlib.contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Stop the clock, with the device idle at both edges."""
        self.flush()
        self.synchronize()
        self.elapsed = self.read_clock()
        yield
        self.start_clock()

    def write(self, text: str, console: bool = False) -> None:
        try:
            if self.file is not None:
                print(text, file=self.file, flush=True)
        except OSError as error:
            self.file, text, console = None, f"{self.path}: {error}: the log ends here, the training goes on", True
        if console and self.is_main:
            print(text, flush=True) if self.bar.disable else tqdm.write(text)

    def loss(self, step: int, loss: Tensor) -> None:
        """Take the loss of a step, which travels to the host on its own, and log those that have long arrived."""
        event = torch.cuda.current_stream().record_event() if loss.is_cuda else None
        self.pending.append((step, loss.to("cpu", non_blocking=True), event))
        self.flush(lag=LOSS_LAG if loss.is_cuda else 0)

    def flush(self, lag: int = 0) -> None:
        """Log the losses of all but the last `lag` steps; a pipe sees one every two seconds."""
        while len(self.pending) > lag:
            step, loss, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            if not loss.isfinite():
                raise FloatingPointError(f"train_loss {loss:.4f} at step {step}: lower learning rates or change --seed")
            is_due = self.bar.disable and time.monotonic() > self.last_line + 2
            self.last_line = time.monotonic() if is_due else self.last_line
            self.point("train_loss", step, loss.item(), self.read_clock(), is_due)
            self.bar.update(self.cfg.batch_tokens)

    def point(self, name: str, step: int, loss: float, ms: float, console: bool = True) -> None:
        """Log a loss, and add it to its curve."""
        self.curves[name].append((step, loss, ms))
        last = {name: f"{curve[-1][1]:.4f}" for name, curve in self.curves.items() if curve}
        self.bar.set_postfix(step=step, **last, refresh=False)
        timing = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self.write(f"step:{step}/{self.cfg.num_iterations} {name}:{loss:.4f} {timing}", console)

    def close(self) -> None:
        self.bar.close()
        if self.file is not None:
            self.file.close()


def describe(cfg: Hyperparameters, ranks: Ranks, plans: dict[str, list[Batch]]) -> str:
    """Return versions, hardware, shards and the hash of the validation tokens, for the log."""
    lines = [f"Running Python {sys.version}", f"Running PyTorch {torch.__version__}, numpy {np.__version__}"]
    lines += [f"{ranks.world_size} processes, {torch.get_num_threads()} threads each, {os.cpu_count()} cores"]
    options = dict(cwd=Path(__file__).resolve().parent, capture_output=True, text=True, errors="replace", timeout=20)
    for command in ("git --no-optional-locks describe --always --abbrev=40 --dirty", "lscpu", "nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            lines += [f"$ {command}", subprocess.run(command.split(), **options).stdout.strip()]
    for name, plan in plans.items():
        lines += [f"{name} shard: {path}, {size} bytes" for path, size in {b.path: b.stamp[1] for b in plan}.items()]
    tokens = b"".join(read_tokens(b, 0, cfg.val_seq_len, cfg.vocab_size).tobytes() for b in plans["val"])
    val_sha256 = hashlib.sha256(tokens).hexdigest()
    note = "" if cfg.val_sha256 in ("", val_sha256) else " (not the track's: do not compare losses)"
    return "\n".join([*lines, f"validation tokens: {cfg.val_tokens}, sha256 {val_sha256}{note}"])


def train(trainer: Trainer, plans: dict[str, list[Batch]], log: RunLog) -> int:
    """Train from the first step to the last. Return the number of graphs compiled on the way, which should be 0."""
    cfg, ranks, graphs = trainer.cfg, trainer.ranks, torch._dynamo.utils.counters["stats"]
    sequences = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    batches = read_batches(plans["train"], sequences, cfg.train_seq_len, cfg, trainer.device)
    gc.collect()
    gc.freeze()
    gc.disable()  # one collection in the middle of a run was measured at 0.6 s (nanochat issue 477)
    launch(dist.all_reduce, torch.zeros(1, device=trainer.device))()  # all begin together
    compiled = graphs["unique_graphs"]
    log.start_clock()
    for step in range(cfg.num_iterations + 1):
        is_last = step == cfg.num_iterations
        if is_last or (cfg.val_loss_every and step % cfg.val_loss_every == 0):
            with log.off_the_clock():
                log.point("val_loss", step, trainer.evaluate(step, plans["val"]), log.elapsed)
        if not is_last:
            log.loss(step + 1, trainer.train_step(step, next(batches)))
    return graphs["unique_graphs"] - compiled


def report(log: RunLog, plans: dict[str, list[Batch]], trainer: Trainer, recompiles: int) -> dict:
    """Log the summary, and write the result."""
    cfg, path, (_, val_loss, train_time) = trainer.cfg, log.path, log.curves["val_loss"][-1]
    ms, on_cuda = np.diff([0.0, *(ms for _, _, ms in log.curves["train_loss"])]), cfg.device == "cuda"
    used = torch.cuda.max_memory_allocated() if on_cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = used // 2**20
    result = dict(val_loss=val_loss, target_loss=cfg.target_loss, train_time_ms=train_time, log=str(path))
    result |= dict(num_iterations=cfg.num_iterations, seed=cfg.seed, peak_memory_mib=peak, recompiles=recompiles)
    result |= dict(val_curve=log.curves["val_loss"], train_curve=log.curves["train_loss"])
    for name, batch in dict(first=plans["train"][0], last=plans["train"][-1]).items():
        log.write(f"{name} batch: {batch.path} position {batch.start}")
    log.write(f"recompiles after the clock started: {recompiles}", console=recompiles > 0)
    median, p99 = np.percentile(ms, [50, 99])
    slowest = f"slowest {ms.max():.2f}ms at step {ms.argmax() + 1}"
    log.write(f"step time: median {median:.2f}ms p99 {p99:.2f}ms {slowest}", console=p99 > 1.5 * median)
    log.write(f"peak memory: {peak} MiB", console=True)
    with contextlib.suppress(OSError):  # of a full disk: the console has told it all
        if log.is_main:
            path.with_suffix(".json").write_text(json.dumps(result) + "\n")
    verdict = f"target {cfg.target_loss} {'' if val_loss <= cfg.target_loss else 'not '}reached"
    log.write(f"val_loss {val_loss:.4f} after {train_time / 1000:.2f} s; {verdict}; log: {path}", console=True)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. Raise UserError, FloatingPointError or KeyboardInterrupt."""
    argv, source = sys.argv[1:] if argv is None else list(argv), Path(__file__).read_text(encoding="utf-8")
    ranks = Ranks(*(int(os.environ.get(name.upper(), value)) for name, value in Ranks._field_defaults.items()))
    log = None
    if ranks.world_size > 1 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG to SIGTERM: no rank outlives its launcher
    try:
        cfg = resolve(parse_args(argv, ranks.world_size))
        if cfg.batch_sequences % ranks.world_size:
            raise UserError(f"{ranks.world_size} processes do not divide a step's {cfg.batch_sequences} sequences")
        plans, log = plan_data(cfg), RunLog(cfg, ranks.rank == 0)
        trainer = Trainer(cfg, ranks)
        log.write(f"{source}\n{'=' * 100}\n{describe(cfg, ranks, plans) if log.is_main else ''}")
        log.write(f"flags: {json.dumps(argv)}\nconfiguration: {json.dumps(dataclasses.asdict(cfg))}\n{'=' * 100}")
        log.write(f"seed: {cfg.seed}, log: {log.path}", console=True)
        trainer.warm_up()
        return report(log, plans, trainer, train(trainer, plans, log))
    except (UserError, FloatingPointError, KeyboardInterrupt) as error:
        if log is not None:
            log.write(f"stopped: {str(error) or 'interrupted'}")
        raise
    finally:
        gc.unfreeze()
        gc.enable()
        if log is not None:
            log.close()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    try:
        main()
    except (UserError, FloatingPointError, KeyboardInterrupt) as error:
        print(f"train_gpt.py: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 3 if isinstance(error, FloatingPointError) else 130)
    if dist.is_initialized():
        dist.destroy_process_group()
