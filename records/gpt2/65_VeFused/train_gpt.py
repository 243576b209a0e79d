"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    SCRIPT=records/NAME/train_gpt.py ./run.sh                              environment, data, checks and launch
    torchrun --standalone --nproc_per_node=8 records/NAME/train_gpt.py     the record configuration on 8xH100
    python records/NAME/train_gpt.py --preset nano                         a small model on a CPU, in seconds

VeFused: equal in mathematics to record 65 of the NanoGPT speedrun (2026-01-30, 1,555 steps,
https://github.com/KellerJordan/modded-nanogpt). "Record n" says where an idea entered that history.
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
import math
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
from itertools import islice, pairwise
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

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # number the layers in skip_layout and backout_layer
READ_AHEAD = 2  # batches that the reader keeps ready
LOSS_LAG = 8  # look at losses this many steps late, so that no step waits for the GPU
# Ranges of the numbers in Hyperparameters
Count = Annotated[int, 1, 2**27]
Natural = Annotated[int, 0, 2**24]
Size = Annotated[int, 1, 2**14]
Positive = Annotated[float, 1e-9, 2**30]
Rate = Annotated[float, 0, 100]
Decay = Annotated[float, 0, 0.99999]
Counts = Annotated[tuple[int, ...], 1, 2**27]
Rates = Annotated[tuple[float, ...], 0, 100]
Decays = Annotated[tuple[float, float], 0, 0.99999]
# torch 2.13 renames these two
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
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
    num_iterations: Count = 1555  # training steps: scheduled ones, in stages of equal length, then the extension
    extension_steps: Natural = 40  # steps of the extension, a stage of its own with the lowest learning rates; 0: none
    stage_growth: Counts = (1, 2, 3, 3)  # per stage: factor on batch_tokens and train_seq_len
    lr_factors: Rates = (1.0, 1.52, 1.73, 1.73)  # and on learning rates
    cooldown_frac: Annotated[float, 1e-9, 1] = 834 / 1515  # last part of the scheduled steps: learning rates fall
    min_lr_frac: Rate = 0.1  # factor on learning rates after the last scheduled step
    next_weights: Rates = (1.0, 0.5, 0.25)  # weights of the next tokens' losses; each stage fades the last one out
    tied_frac: Rate = 2 / 3  # part of the scheduled steps in which embedding and head are one table; 0: never
    val_loss_every: Natural = 250  # steps between validations; 0: only after the last step
    batch_tokens: Count = 8 * 16 * 1024  # tokens per step at first, over all processes; a multiple of train_seq_len
    train_seq_len: Count = 16 * 1024  # tokens per training sequence at first, a multiple of block_size
    max_doc_len: Natural = 2048  # pack sequences from documents, cut after so many tokens; 0: the stream as it is
    val_seq_len: Count = 256 * 1024  # tokens per validation sequence, a multiple of block_size; 64K: +0.0015 loss
    # Model
    model_dim: Size = 768  # width of the residual stream
    num_heads: Size = 6  # attention heads
    head_dim: Size = 128  # dimensions per head, a multiple of 4
    attention_layout: str = "PSPLSP-SSPL"  # per layer: L long window, S half of it, P the same and paired heads, - none
    value_embed_layout: str = "01......234"  # per layer: digit of its value embedding, or .
    skip_layout: str = "......3...."  # per layer: the earlier layer (0-9a-z) whose output it adds, or .
    skip_init: Annotated[float, -100, 100] = -1.5  # first weight of a skip; with gates it passes a sigmoid
    backout_layer: str = "7"  # the layer (0-9a-z) half of whose output the head's input gives up at first, or .
    lambda_init: Rate = 1.1  # first factor on the residual stream before each layer
    key_offset: bool = True  # in long windows, half of what is not rotated of a key comes from the token before
    gate_inputs: Natural = 12  # channels from which attention, value embeddings, skips and the smear are gated; 0: none
    attention_out_std: Rate = 0.5  # deviation of attention's first output weights, times the root of their inputs
    value_embed_std: Rate = 0.0  # deviation of the first value embeddings
    head_std: Rate = 0.005  # deviation of the first head
    bigram_rows: Natural = 5 * 50304  # rows of the table for pairs of consecutive tokens; 0: no table
    bigram_lambda: Rate = 0.1  # first factor on their embeddings before each layer; 0: added to those of tokens, once
    rope_base: Positive = 1024.0  # base of the rotary frequencies
    attention_scale: Annotated[float, 0, 2**20] = 0.1  # first factor on the attention scores; q and k have unit RMS
    yarn_scale: Rate = 0.2  # its relative growth with the logarithm of the long window
    yarn_turns: Annotated[float, 1.1, 2**20] = 32.0  # what turns so often in a window keeps its frequency
    lm_head_softcap: Positive = 15.0  # logits z are squashed to range x sigmoid((z + shift) / half of this)
    lm_head_range: Positive = 23.0  # that range
    lm_head_shift: Annotated[float, -100, 100] = 5.0  # and that shift
    lm_head_slice: Count = 8192  # tokens whose logits exist at a time
    lm_head_fp8: bool = True  # train the head in FP8 where the GPU can
    fp8_x_scale: Positive = 448 / 100  # static FP8 scale of the head's input,
    fp8_w_scale: Positive = 448 / 1.6  # of its weight,
    fp8_grad_scale: Positive = 448 / 0.75  # and of the gradient of the summed loss with respect to the logits
    loss_scale: Rate = 2.0  # factor on the summed loss of a sequence, for its gradient; 0: the mean instead
    block_size: Count = 128  # tokens per block of the attention mask
    window_tokens: Counts = (384, 896, 1408, 1664)  # per stage: tokens that a long window reaches back
    final_window_tokens: Natural = 2560  # the same in the last validation; 0: as before
    block_windows: bool = False  # windows in whole blocks, the token's own included, that grow linearly over the run
    # Optimizers
    muon_lr: Rate = 0.023  # Muon, for hidden matrices: spectral norm of an update
    c_fc_factor: Rate = 2.0  # factor on it for the first matrix of each MLP,
    c_proj_factor: Rate = 4.0  # and for the second
    muon_momentum: Decay = 0.95  # momentum after its warm-up
    momentum_warmup_start: Decay = 0.85  # momentum of the first step
    momentum_warmup_steps: Natural = 300  # steps of that warm-up
    momentum_cooldown_steps: Natural = 50  # last steps, in which momentum goes back there
    muon_polynomial: Literal["polar express", "newton-schulz"] = "polar express"  # how updates become orthogonal
    muon_beta2: Decay = 0.95  # decay of NorMuon's second moment; 0: plain Muon
    muon_decay: Rate = 1.2  # weight decay, times the squared learning rate, where an update moves a weight towards 0
    adam_every: Count = 2  # steps that Adam makes one of, from the sum of their gradients
    adam_eps: Rate = 1e-10  # added to the root of the second moment,
    adam_eps_corrected: bool = False  # after the correction of its bias, as in PyTorch, or before
    embed_lr: Rate = 0.6  # Adam, for value and bigram embeddings, and a token embedding that is never tied
    embed_decay: Rate = 0.025  # their weight decay, times the squared rate, where an update moves a weight towards 0
    embed_betas: Decays = (0.75, 0.95)  # decays of their moments
    head_lr: Rate = 0.008  # Adam: head, and embedding of tokens
    head_decay: Rate = 0.75  # their weight decay, likewise
    head_betas: Decays = (0.5, 0.95)  # decays of their moments
    gate_lr: Rate = 0.008  # Adam: gates of heads and of value embeddings,
    smear_gate_lr: Rate = 8e-5  # of the smear,
    skip_gate_lr: Rate = 4e-4  # and of the skips
    gate_decay: Rate = 0.005  # weight decay of the first two
    scalar_lr: Rate = 0.04  # Adam: scalars
    scalar_betas: Decays = (0.9, 0.99)  # decays of their moments and of the gates',
    x0_betas: Decays = (0.65, 0.95)  # and of the factors' on the embedding
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
                numbers = value if isinstance(value, tuple) else (value,)
                require(field.name, all(low <= n <= high for n in numbers), f"a number from {low} to {high}")
            if field.type is str:
                require(field.name, value.isprintable() and len(value) < 1000, "printable characters")
        multiples = dict(head_dim=4, num_heads=1 + ("P" in self.attention_layout), val_tokens=self.val_seq_len)
        multiples |= dict(batch_tokens=self.train_seq_len, train_seq_len=self.block_size, val_seq_len=self.block_size)
        for name, unit in multiples.items():
            require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        require("eot_token", self.eot_token < self.vocab_size, f"a token below vocab_size {self.vocab_size}")
        require("run_id", "/" not in self.run_id and len(self.run_id) < 200, "a short name without folders")
        layers, embeds = len(self.attention_layout), set(self.value_embed_layout) - {"."}
        require("attention_layout", 0 < layers <= 36 and {*self.attention_layout} <= {*"LSP-"}, "letters L, S, P and -")
        pairs = zip(self.value_embed_layout, self.attention_layout, strict=False)
        used = {digit for digit, letter in pairs if letter != "-"}
        holds = len(self.value_embed_layout) == layers and embeds == used & set(DIGITS[: len(embeds)])
        require("value_embed_layout", holds, f"{layers} characters: . or, where there is attention, a digit, from 0 on")
        holds = [source in "." + DIGITS[:i] for i, source in enumerate(self.skip_layout)]
        require("skip_layout", all(holds) and len(holds) == layers, f"{layers} digits of earlier layers or .")
        holds = len(self.backout_layer) == 1 and self.backout_layer in "." + DIGITS[:layers]
        require("backout_layer", holds, "the digit of a layer or .")
        require("next_weights", 0 < len(self.next_weights) <= 8, "1 to 8 weights")
        require("gate_inputs", self.gate_inputs <= self.model_dim, f"at most model_dim {self.model_dim}")
        require("extension_steps", self.scheduled_steps > 0, f"less than num_iterations {self.num_iterations}")
        stages = len(self.window_tokens)
        require("window_tokens", stages > (self.extension_steps > 0), "one more stage with an extension")
        for name in ("stage_growth", "lr_factors"):
            require(name, len(getattr(self, name)) == stages, f"as many stages as window_tokens: {stages}")

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.train_seq_len

    @property
    def scheduled_steps(self) -> int:
        return self.num_iterations - self.extension_steps


# fmt: off
PRESETS = {
    "gpt2": Hyperparameters(),
    "nano": Hyperparameters(
        preset="nano", train_files="data/nano/nano_train_*.bin", val_files="data/nano/nano_val_*.bin",
        val_tokens=262_144, val_sha256="e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33",
        target_loss=1.45, vocab_size=257, eot_token=256, num_iterations=480, extension_steps=0, stage_growth=(1,),
        lr_factors=(1.0,), cooldown_frac=0.85, next_weights=(1.0,), tied_frac=0.0, val_loss_every=300,
        batch_tokens=1024, train_seq_len=1024, max_doc_len=0, val_seq_len=8192, model_dim=128, num_heads=2, head_dim=64,
        attention_layout="L-", value_embed_layout="0.", skip_layout=".0", skip_init=1.0, backout_layer=".",
        lambda_init=1.0, key_offset=False, gate_inputs=0, attention_out_std=0.0, value_embed_std=1.0, head_std=0.0,
        bigram_rows=8192, bigram_lambda=0.0, attention_scale=0.12, lm_head_range=30.0, lm_head_shift=0.0,
        lm_head_slice=1024, lm_head_fp8=False, loss_scale=0.0, block_size=32, window_tokens=(128,),
        final_window_tokens=0, block_windows=True, muon_lr=0.06, c_proj_factor=1.0, muon_momentum=0.9,
        momentum_warmup_steps=50, momentum_cooldown_steps=0, muon_polynomial="newton-schulz", muon_beta2=0.0,
        muon_decay=0.0, adam_every=1, adam_eps_corrected=True, embed_lr=0.25, embed_decay=0.0, embed_betas=(0.5, 0.9),
        head_lr=0.006, head_decay=0.0, head_betas=(0.5, 0.9), scalar_betas=(0.5, 0.9), x0_betas=(0.5, 0.9),
        cpu_threads=2,
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
        how |= dict(nargs=2 if field.type is Decays else "*") if isinstance(field.default, tuple) else {}
        parser.add_argument(f"--{field.name}", **how, help=hidden, default=hidden)
    flags, sees_gpu = vars(parser.parse_args(argv)), torch.cuda.is_available()
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
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


# ---- Head: softcapped logits and their cross entropy, in slices of tokens, in FP8 where the GPU can ------------------
class HeadLoss(torch.autograd.Function):
    """Sum the cross entropy of softcapped logits x @ w.T over x (T, K), w (V, K), targets (T,), in nats.

    Each token predicts several (record 53, @varunneal): weights (n,) are those of its target and of the n - 1 behind.

    The logits (T, V) exist for `slice_tokens` tokens at a time; the forward pass computes the gradients, too: computing
    the slices again in the backward pass took 27 to 41% of the head's time. With `fp8_scales`, of x, w and the logits'
    gradient, the products are in FP8 (record 19, @YouJiacheng): e4m3 forward, e5m2 for the gradient, which needs range
    more than precision. They are static: x has unit RMS, w saturates, and the gradient of a token's loss with respect
    to a logit is at most 1.

    The softcap c tanh(z / c) is that of Gemma 2 (arXiv:2408.00118); c is 15 instead of 30 since record 18
    (@KoszarskyB), and lopsided since record 54 (@classiclarryd): `cap` is (c, r, d), for r sigmoid((z + d) 2 / c). A
    softmax ignores a shift, so the logits here are less by r: -r s, with s = sigmoid(-(z + d) 2 / c). They are never
    above 0, so exp needs no maximum subtracted.
    """

    @staticmethod
    def forward(ctx, x, w, targets, weights, cap, slice_tokens, fp8_scales, with_grads) -> Tensor:
        (softcap, span, shift), wide = cap, torch.promote_types(w.dtype, torch.float32)
        x_s, w_s, grad_s = fp8_scales or (1.0, 1.0, 1.0)

        def quantize(t: Tensor, scale: float, kind: torch.dtype) -> Tensor:
            limit = torch.finfo(kind).max  # beyond it a cast saturates on some devices and gives NaN on others
            return (t * scale).clamp(-limit, limit).to(kind) if fp8_scales else t.to(x.dtype)

        def product(a: Tensor, b: Tensor, a_s: float, b_s: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
            if fp8_scales is None:
                return (a @ b).to(dtype)
            scales = [torch.full((), 1 / scale, dtype=torch.float32, device=a.device) for scale in (a_s, b_s)]
            a, b = a.contiguous(), b.t().contiguous().t()  # cuBLAS wants row-major by column-major
            return torch._scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=fast)

        w_q, losses, grads_x, grad_w = quantize(w, w_s, torch.float8_e4m3fn), [], [], None
        ahead = torch.stack([F.pad(targets[k:], (0, k), value=-1) for k in range(len(weights))], dim=1)
        for x_slice, t in zip(x.split(slice_tokens), ahead.split(slice_tokens), strict=True):
            x_q = quantize(x_slice, x_s, torch.float8_e4m3fn)
            z = product(x_q, w_q.t(), x_s, w_s, x.dtype, fast=True).to(torch.promote_types(x.dtype, torch.float32))
            s = (z.add_(shift) if shift else z).mul_(-2 / softcap).sigmoid_()  # in place for CPUs
            logits = s * -span
            shares = (t >= 0) * weights  # no target behind the sequence's end
            target_logits = (shares * logits.gather(1, t.clamp(min=0))).sum(-1)
            # Written out instead of log_softmax and nll_loss: compiled, one kernel then reads z for all that follows
            # from it, and no slice outlives its turn (10 GB less for gpt2)
            p = logits.exp_()
            total, weight = p.sum(-1), shares.sum(-1)
            losses.append(weight * total.log() - target_logits)
            if with_grads:  # d loss / d z = (weight p / total - hits) r 2 / c s (1 - s)
                columns, hits, slope = torch.arange(len(w), device=t.device), 0.0, span * 2 / softcap
                for k in range(len(weights)):
                    hits = hits + weights[k] * (t[:, k, None] == columns)
                p.mul_((slope * weight / total)[:, None]).sub_(hits, alpha=slope)
                grad = quantize(p.mul_(s.addcmul_(s, s, value=-1)), grad_s, torch.float8_e5m2)
                grads_x.append(product(grad, w_q, grad_s, w_s, x.dtype))
                # As (K, V), then transposed: faster than (V, K) directly (record 19)
                part = product(x_q.t(), grad, x_s, grad_s, wide).t()
                grad_w = part if grad_w is None else grad_w + part
        if with_grads:
            ctx.save_for_backward(torch.cat(grads_x), grad_w.to(w.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        # Contiguous as the weight is: else autograd copies it, and adds it up slowly
        return grad * grad_x, (grad * grad_w).contiguous(), None, None, None, None, None, None


# ---- Layers: each draws its own initial values; outputs (c_proj, lm_head) start at zero (@Grad62304977) --------------
def uniform_weight(*shape: int, std: float = 0.5) -> nn.Parameter:
    """Return a weight (..., out, in) of deviation std / sqrt(in); 0.5 is a bit better than 3^-0.5 (record 19)."""
    bound = (3 * std**2 / shape[-1]) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound) if std else torch.zeros(shape))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.type_as(x))  # weights are kept in full precision


class RMSNorm(torch.autograd.Function):
    """Divide x by its RMS over the last dimension. The backward needs only the result, which the next matmul keeps."""

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


class ReluSquared(torch.autograd.Function):
    """Square relu(x): 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := F.relu(x).square_())  # the next matmul keeps y anyway (record 87): -3.6 GB for gpt2
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].sqrt().mul_(grad).mul_(2)  # 2 relu(x) grad


class Rotary(nn.Module):
    """Rotate each pair of dimensions d, d + D / 2 of q and k by the token's position (arXiv:2104.09864), and scale q.

    The tables and the scale are tensors, which `set_stage` overwrites: a change never recompiles.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        dtype = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        length = max(cfg.train_seq_len * max(cfg.stage_growth), cfg.val_seq_len) * (1 + ("P" in cfg.attention_layout))
        table = (length, cfg.head_dim // 2)
        for name, shape in dict(cos=table, sin=table, scale=()).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)
        self.set_stage(0, cfg)

    def set_stage(self, stage: int, cfg: Hyperparameters) -> None:
        frequencies, scale = rotary_frequencies(stage, cfg, self.cos.dtype)
        frequencies = F.pad(frequencies, (0, cfg.head_dim // 4)).to(self.cos.device)  # half are 0: record 17
        angles = torch.outer(torch.arange(len(self.cos), device=self.cos.device), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        self.scale.fill_(scale)

    def forward(self, qk_THD: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Return q and k. With two `slots` a token, the second of each two heads is at the odd position."""
        T, _, D = qk_THD.shape
        cos, sin = (table[: T * slots].view(T, 1, slots, D // 2) for table in (self.cos, self.sin))
        x1, x2 = qk_THD.view(T, -1, slots, D).chunk(2, dim=-1)  # the fp32 tables promote bf16
        rotated = torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)
        q, k = rotated.view_as(qk_THD).chunk(2, dim=1)
        return (q * self.scale).type_as(qk_THD), k.type_as(qk_THD)


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = uniform_weight(4 * dim, dim)
        self.c_proj = nn.Parameter(torch.zeros(dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        return linear(ReluSquared.apply(linear(x, self.c_fc)), self.c_proj)


# ---- Attention: causal, within documents, in sliding windows of blocks -----------------------------------------------
def document_block_mask(
    doc_ids: Tensor, window: Tensor, block_size: int, whole_blocks: bool = False, for_flex: bool = True
) -> BlockMask:
    """Return which tokens see which: causal, within a document, no further back than a window of tokens.

    doc_ids (T,): the non-decreasing document id of each token. window () int32: a token sees its own position and
    `window` before it (record 29); a tensor, so that a change never recompiles. `whole_blocks`: it sees all of these
    tokens' blocks, where `window` is a multiple of block_size (record 16). `for_flex`: also build FlexAttention's
    key-major lists.

    As the ids never decrease, query block i sees blocks first..i; those from whole to i-1 need no mask. Both kinds are
    listed nearest first: the partial ones are i and those behind the full ones (two lengths of windows: record 20).
    """

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (q >= kv) & (doc_ids[q] == doc_ids[kv])
        return seen if whole_blocks else seen & (q - kv <= window)

    low, high = doc_ids.view(-1, block_size)[:, 0], doc_ids.view(-1, block_size)[:, -1]
    block = torch.arange(len(low), dtype=torch.int32, device=doc_ids.device)
    reach = (window + block_size - 1) // block_size  # blocks back that a block's first token sees some of,
    whole_reach = reach if whole_blocks else (window + 1) // block_size - 1  # and that its last token sees all of
    first = torch.maximum((high[None, :] < low[:, None]).sum(1, dtype=torch.int32), block - reach)
    whole = torch.maximum((low[None, :] < low[:, None]).sum(1, dtype=torch.int32), block - whole_reach)
    num_full = torch.where(low == high, block - whole, 0).clamp(min=0)
    num_partial = block - first + 1 - num_full
    i, j = block[:, None], block[None, :]
    full = (i - 1 - j).clamp(min=0)
    partial = torch.where(j == 0, i, i - num_full[:, None] - j).clamp(min=0)
    lists = (t[None, None].contiguous() for t in (num_partial, partial, num_full, full))
    return BlockMask.from_kv_blocks(*lists, block_size, causal_in_document, compute_q_blocks=for_flex)


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q to k and v, all (T, H, D). The cost grows with the window, not as T^2."""
        (T, H, D), (N, M) = q.shape, self.kv_blocks.shape
        q = q.reshape(N, T // N, H, D).transpose(1, 2)
        k, v = (t.reshape(N, -1).index_select(0, self.kv_blocks.flatten()) for t in (k, v))
        k, v = (t.view(N, M * (T // N), H, D).transpose(1, 2) for t in (k, v))
        # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries)
        y = torch.softmax(q @ k.mT + self.bias, dim=-1) @ v
        return y.transpose(1, 2).reshape(T, H, D)


class CausalSelfAttention(nn.Module):
    """Attend with QK-norm, rotary and value embeddings, and gated heads. x (T, K), of unit RMS -> the same shape.

    Paired heads h and h + H / 2 attend as one that has two slots a token, in this order (record 58, @classiclarryd): a
    window reaches half as many tokens, each of them seen by both. Two heads rotate by a token's first position and two
    by its second in turn, as in the record: so every other pair has its positions in reverse.
    """

    def __init__(self, cfg: Hyperparameters, attention: str, has_value_embed: bool):
        super().__init__()
        self.cfg, self.shifts_keys, self.slots = cfg, cfg.key_offset and attention == "L", 1 + (attention == "P")
        self.qkv_w = uniform_weight(3, cfg.num_heads * cfg.head_dim, cfg.model_dim)  # three: record 20
        self.c_proj = uniform_weight(cfg.model_dim, cfg.num_heads * cfg.head_dim, std=cfg.attention_out_std)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0 if cfg.gate_inputs else 0.5]))
        gates = [cfg.gate_inputs > 0, cfg.gate_inputs > 0 and has_value_embed]
        gates = [nn.Parameter(torch.zeros(cfg.num_heads, cfg.gate_inputs)) if gate else None for gate in gates]
        self.gate, self.value_gate = gates

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, mask: BlockMask | GatheredMask) -> Tensor:
        T, H, D, c_proj = len(x), self.cfg.num_heads, self.cfg.head_dim, self.c_proj
        qkv_w = self.lambdas[0] * self.qkv_w.flatten(0, 1)  # record 47 (@roeeshenberg): for values, q and k are normed
        qk, v = linear(x, qkv_w).view(T, 3 * H, D).split([2 * H, H], dim=1)
        # QK-norm (@Grad62304977). F.rms_norm keeps its input, a part of qkv that v keeps alive: 1.7 GB less for gpt2
        q, k = rotary(F.rms_norm(qk, (D,)), self.slots)
        if self.shifts_keys:  # so a token finds what followed one like it: record 49 (@classiclarryd)
            is_still = torch.arange(D, device=k.device) % (D // 2) >= D // 4
            k = torch.where(is_still, torch.cat([k[:1], k[:-1]]), k)
        if self.value_gate is not None:  # record 55 (@classiclarryd)
            v = v + 2 * self.gates(x, self.value_gate) * value_embed.view_as(v)
        elif value_embed is not None:  # after value residuals (arXiv:2410.17897): @KoszarskyB, record 14
            v = v + self.lambdas[1] * value_embed.view_as(v)
        q, k, v = (t.reshape(T * self.slots, -1, D) for t in (q, k, v))
        if isinstance(mask, BlockMask):
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            y = flex_attention(q, k, v, block_mask=mask, scale=1.0).squeeze(0).transpose(0, 1)
        else:
            y = mask.attend(q, k, v)
        y = y.reshape(T, H, D)
        if self.gate is not None:  # a head may attend to nothing: record 28 (@classiclarryd)
            y, c_proj = y * self.gates(x, self.gate), self.lambdas[1] * c_proj  # and record 48 (@ChrisJMcCormick)
        return linear(y.flatten(1), c_proj)

    def gates(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return a factor from 0 to 1 for each token and head (T, H, 1)."""
        return linear(x[:, : weight.size(1)], weight).sigmoid()[:, :, None]


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
class Block(nn.Module):
    def __init__(self, cfg: Hyperparameters, attention: str, value_embed: str):
        super().__init__()
        self.attn = CausalSelfAttention(cfg, attention, value_embed != ".") if attention != "-" else None
        self.mlp = MLP(cfg.model_dim)
        self.resid_lambda, self.x0_lambda = (nn.Parameter(torch.tensor(init)) for init in (cfg.lambda_init, 0.0))
        has_pairs = cfg.bigram_rows and cfg.bigram_lambda
        self.bigram_lambda = nn.Parameter(torch.tensor(cfg.bigram_lambda)) if has_pairs else None

    def forward(self, x: Tensor, x0: Tensor, pairs: Tensor | None, *attention_inputs) -> Tensor:
        x = self.resid_lambda * x + self.x0_lambda * x0  # the embedding stays at hand: @KoszarskyB, record 9
        if self.bigram_lambda is not None:  # and that of the last two tokens: @classiclarryd, record 62
            x = x + self.bigram_lambda * pairs
        if self.attn is not None:
            x = x + self.attn(norm(x), *attention_inputs)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Map tokens (T,) int32, targets (T,) int64, windows (2,) int32, long and short, and weights to the sum of losses.

    weights (n,): those of the next n tokens, in training.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg, K, V = cfg, cfg.model_dim, cfg.vocab_size
        dtype = getattr(torch, cfg.dtype)  # tables are in the precision of the activations, the rest in fp32
        rows, is_tied, gate_inputs = V + -V % 64, cfg.tied_frac > 0, cfg.gate_inputs  # aligned for matmul tiles
        self.embed = nn.Embedding(rows if is_tied else V, K, dtype=dtype)
        values = (nn.Embedding(V, cfg.num_heads * cfg.head_dim, dtype=dtype) for _ in {*cfg.value_embed_layout} - {"."})
        self.value_embeds = nn.ModuleList(values)
        self.bigram_embed = nn.Embedding(cfg.bigram_rows, K, dtype=dtype) if cfg.bigram_rows else None
        layouts = zip(cfg.attention_layout, cfg.value_embed_layout, strict=True)
        self.blocks = nn.ModuleList(Block(cfg, *letters) for letters in layouts)
        num_skips = len(cfg.skip_layout.replace(".", ""))
        self.skip_weights = nn.Parameter(torch.full((num_skips,), cfg.skip_init)) if num_skips else None
        self.skip_gate = nn.Parameter(torch.zeros(num_skips, gate_inputs)) if num_skips and gate_inputs else None
        self.smear_gate = nn.Parameter(torch.zeros(1, gate_inputs)) if gate_inputs else None
        self.smear_lambda = nn.Parameter(torch.tensor(0.0)) if gate_inputs else None
        self.backout_lambda = nn.Parameter(torch.tensor(0.5)) if cfg.backout_layer != "." else None
        self.lm_head = nn.Parameter(torch.zeros(rows, K, dtype=dtype if is_tied else torch.float32))
        with torch.no_grad():
            for embed in self.value_embeds:
                embed.weight.mul_(cfg.value_embed_std)
            if cfg.head_std:
                self.lm_head.normal_(0, cfg.head_std)
            if is_tied:  # Adam keeps them equal
                self.embed.weight.copy_(self.lm_head)
        self.rotary = Rotary(cfg)
        self.widest = [max(attention_windows(step, cfg)[i] for step in range(cfg.num_iterations + 1)) for i in (0, 1)]
        if self.bigram_embed is not None:
            nn.init.zeros_(self.bigram_embed.weight)
        if dtype == torch.float64:
            self.double()

    def forward(self, tokens: Tensor, targets: Tensor, windows: Tensor, weights: Tensor) -> Tensor:
        cfg, x = self.cfg, self.features(tokens, windows)
        with_grads, cap = torch.is_grad_enabled(), (cfg.lm_head_softcap, cfg.lm_head_range, cfg.lm_head_shift)
        fp8_scales = (cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale)
        fp8_scales = fp8_scales if cfg.lm_head_fp8 and with_grads else None  # validation is never in FP8
        return HeadLoss.apply(x, self.lm_head, targets, weights, cap, cfg.lm_head_slice, fp8_scales, with_grads)

    def features(self, tokens: Tensor, windows: Tensor) -> Tensor:
        """Return the head's input (T, K)."""
        cfg, masks = self.cfg, self.attention_masks(tokens, windows)
        value_embeds = {DIGITS[i]: embed(tokens) for i, embed in enumerate(self.value_embeds)}
        x = self.embed(tokens)
        pairs = self.bigram_embed(self.bigram_hashes(tokens)) if self.bigram_embed is not None else None
        if pairs is not None and not cfg.bigram_lambda:
            x = x + pairs
        if self.smear_gate is not None:  # some of the token before, of another document too: record 34 (@classiclarryd)
            gate = linear(x[:, : cfg.gate_inputs], self.smear_gate).sigmoid()
            x = x + self.smear_lambda * gate * F.pad(x[:-1], (0, 0, 1, 0))
        x = x0 = norm(x)
        outputs: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            if (source := cfg.skip_layout[i]) != ".":  # U-Net: later layers add earlier ones (@brendanh0gan, record 11)
                n = i - cfg.skip_layout[:i].count(".")
                weight = self.skip_weights[n]
                if self.skip_gate is not None:  # records 32 (@bernard24) and 55 (@classiclarryd)
                    gate = linear(x0[:, : cfg.gate_inputs], self.skip_gate[n : n + 1]).sigmoid()
                    weight = weight.sigmoid() * 2 * gate
                x = x + weight * outputs[source]
            value_embed, mask = value_embeds.get(cfg.value_embed_layout[i]), masks.get(cfg.attention_layout[i])
            x = outputs[DIGITS[i]] = block(x, x0, pairs, value_embed, self.rotary, mask)
        if self.backout_lambda is not None:  # what served the context, not the prediction (@snimu, @classiclarryd: 40)
            x = x - self.backout_lambda * outputs[cfg.backout_layer]
        return norm(x)

    def bigram_hashes(self, tokens: Tensor) -> Tensor:
        """Hash (previous token, token) to a row of the table, for tokens (T,) (record 62, @classiclarryd).

        The first position has the last row. The record writes that number over the first token, too, so the second
        position's hash is made from it, and wraps in int32.
        """
        last = self.cfg.bigram_rows - 1
        if not self.cfg.bigram_lambda:  # nano's own: it counts pairs, so end of text comes before the first token
            before = F.pad(tokens[:-1], (1, 0), value=self.cfg.eot_token)
            return ((36313 * tokens) ^ (27191 * before)) % (last + 1)
        tokens = F.pad(tokens[1:], (1, 0), value=last)
        return F.pad(((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % last, (1, 0), value=last)

    def attention_masks(self, tokens: Tensor, windows: Tensor) -> dict[str, BlockMask | GatheredMask]:
        """Return the masks by their letter in the layout: L with the long window, S and P with the short one."""
        cfg, on_cuda, masks = self.cfg, self.cfg.device == "cuda", {}
        doc_ids = (tokens == cfg.eot_token).cumsum(0, dtype=torch.int32)
        for letter, i in dict(L=0, S=1, P=1).items():
            if letter in cfg.attention_layout:
                ids = doc_ids.repeat_interleave(2) if letter == "P" else doc_ids  # P's windows are in slots
                mask = document_block_mask(ids, windows[i], cfg.block_size, cfg.block_windows, for_flex=on_cuda)
                max_blocks = 1 - (-self.widest[i] // cfg.block_size)
                masks[letter] = mask if on_cuda else GatheredMask(mask, max_blocks, self.embed.weight.dtype)
        return masks


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
# This process among all of them, as torchrun's environment describes it
Ranks = namedtuple("Ranks", "rank world_size local_rank local_world_size", defaults=(0, 1, 0, 1))


def launch(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective, and return what waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


class ShardedOptimizer:
    """Update a group of parameters of one precision, every rank an equal share of their elements.

    A step has three phases, which `step_optimizers` runs for all groups in turn, so that communication overlaps
    compute: `reduce` launches the reduce-scatter of the gradients, `update` turns this rank's share of their mean into
    new values and launches the all-gather of those, `gather` waits for it. Subclasses define update_shard(shard, grad),
    which writes new values into the shard and may overwrite grad, and name in `moments` the tensors that `state` keeps
    for a shard. Shares are cut from buffers of rows, padded with zeros: here a row is an element, parameters are views.
    With `every` = n only each n-th step is one, on the sum of n gradients.
    """

    moments: tuple[str, ...] = ()
    alignment = 16  # rows: kernels want tensors to begin at multiples of 16 bytes
    every = 1

    def __init__(self, params: dict[str, nn.Parameter], lr: float, cfg: Hyperparameters, ranks: Ranks):
        self.name, self.params, self.cfg, self.ranks = "+".join(params), list(params.values()), cfg, ranks
        self.initial_lr, self.lr, self.step = lr, lr, 0
        rows = [self.as_rows(p.detach()) for p in self.params]
        assert len({r.dtype for r in rows}) == 1, f"one precision per group: {self.name}"
        self.counts = [len(r) for r in rows]
        self.spans = [count + -count % self.alignment for count in self.counts]
        self.grads = rows[0].new_zeros(sum(self.spans) + -sum(self.spans) % ranks.world_size, *rows[0].shape[1:])
        self.grad = self.grads if ranks.world_size == 1 else torch.zeros_like(self.share(self.grads))
        self.state = {name: torch.zeros_like(self.grad) for name in self.moments}
        self.grad_pieces = self.pieces(self.grads)
        self.values = self.place(rows)  # what the ranks exchange
        self.shard = self.share(self.values)

    def as_rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1)

    def share(self, buffer: Tensor) -> Tensor:
        """Return this rank's rows of `buffer`."""
        return buffer.chunk(self.ranks.world_size)[self.ranks.rank]

    def pieces(self, buffer: Tensor) -> list[Tensor]:
        """Return each parameter's rows of `buffer`, without the padding."""
        spans = buffer[: sum(self.spans)].split(self.spans)
        return [span[:count] for span, count in zip(spans, self.counts, strict=True)]

    def place(self, rows: list[Tensor]) -> Tensor:
        values = torch.zeros_like(self.grads)
        for p, r, piece in zip(self.params, rows, self.pieces(values), strict=True):
            p.data = piece.copy_(r).view_as(p)
        return values

    def reduce(self) -> None:
        torch._foreach_copy_(self.grad_pieces, [self.as_rows(p.grad) for p in self.params])
        self.wait = launch(reduce_scatter, self.grad, self.grads)

    def update(self) -> None:
        self.wait()
        if self.cfg.batch_sequences > 1:
            self.grad.div_(self.cfg.batch_sequences)  # gradients are sums over the sequences
        self.update_shard(self.shard, self.grad)
        self.wait = launch(all_gather, self.values, self.shard)

    def gather(self) -> None:
        self.wait()


class Adam(ShardedOptimizer):
    """Step embeddings, head, scalars and gates by Adam (arXiv:1412.6980).

    Every other step, on the sum of two gradients (record 39, @classiclarryd), with a cautious weight decay (record 50,
    @roeeshenberg), and where there is one with moments in fp32 (record 56, @ChrisJMcCormick). Head and embedding begin
    as equals; until they part both step on the sum of their gradients, and so stay one table, moments included (records
    51 and 53, @varunneal).
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: dict[str, nn.Parameter], lr: float, decay: float, betas: tuple[float, float], *args):
        super().__init__(params, lr, *args)
        self.every, self.decay, self.betas = self.cfg.adam_every, decay, betas
        if decay:  # what is computed in fp32 anyway
            self.state = {name: m.to(torch.promote_types(m.dtype, torch.float32)) for name, m in self.state.items()}

    def reduce(self) -> None:
        if "lm_head" in self.name and self.step - self.every < self.cfg.tied_frac * self.cfg.scheduled_steps:
            total = torch.stack([p.grad for p in self.params]).sum(0)
            for p in self.params:
                p.grad = total
        super().reduce()

    def update_shard(self, shard: Tensor, grad: Tensor) -> None:
        cfg, count, (beta1, beta2) = self.cfg, self.step // self.every, self.betas  # count: updates before this one
        step, (m, v) = torch.full((), count, dtype=torch.float32, device=grad.device), self.state.values()
        p, grad = shard.to(m.dtype), grad.to(m.dtype)
        correction1, correction2 = 1 - beta1 ** (count + 1), (1 - beta2 ** (count + 1)) ** 0.5
        eps, decay = cfg.adam_eps if cfg.adam_eps_corrected else cfg.adam_eps / correction2, self.decay * self.lr**2
        options = dict(lr=0.0 if decay else self.lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0)
        options |= dict(fused=True, amsgrad=False, maximize=False)
        adam([p], [grad], [m], [v], [], [step], **options)  # PyTorch's kernel
        if decay:  # in one go with the update: alone it would be lost in the rounding of bf16
            update = self.lr / correction1 * m / (v.sqrt() / correction2 + eps)
            p = p - update - decay * p * (update * p > 0)
        shard.copy_(p)


# Factor on the Frobenius norm, what is added to it, and the coefficients a, b, c of each step
# fmt: off
POLYNOMIALS = {
    "newton-schulz": (1.0, 1e-7, [(3.4445, -4.7750, 2.0315)] * 5),
    "polar express": (1.02, 1e-6, [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ]),
}
# fmt: on


def zeropower(G: Tensor, polynomial: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return about the orthogonal factor U V' of every matrix U S V' in G (n, rows, cols), rows <= cols, in `dtype`.

    Five steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon). One set
    of coefficients does not converge, which does no harm, and in return small singular values grow fast; those of the
    Polar Express differ from step to step (arXiv:2505.16932; record 38, @varunneal). A zero matrix stays zero.
    """
    factor, eps, coefficients = POLYNOMIALS[polynomial]
    X = (G / (factor * G.norm(dim=(-2, -1), keepdim=True) + eps)).to(dtype)
    for a, b, c in coefficients:  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def normalize(updates: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Even out the rows or columns of each update (n, rows, cols), and keep its norm (NorMuon, arXiv:2510.05491).

    second_moment: the running mean, from 0 on, of the mean squares along the dimension that it has one of; which one is
    record 41 (@li_zichong) as record 48 mended it (@ChrisJMcCormick).
    """
    updates, dim = updates.to(second_moment.dtype), -1 if second_moment.size(-1) == 1 else -2
    second_moment.lerp_(updates.square().mean(dim, keepdim=True), 1 - beta2)
    even = updates / second_moment.clamp(min=1e-10).sqrt()
    norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (updates, even))
    return even * (norms / new_norms.clamp(min=1e-10))


class Muon(ShardedOptimizer):
    """Step hidden matrices of one shape by MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024).

    With g the mean gradient of the step, in the lerp form of record 15:

        m <- momentum m + (1 - momentum) g
        u <- normalize(zeropower(momentum m + (1 - momentum) g))
        p <- p - factor lr (u + decay lr p [u p >= 0])

    The factors are the configuration's. The weight decay is cautious: only where the update moves a weight towards 0
    (record 43, @varunneal).

    Rows of the buffers are whole matrices, tall ones on their side: the 22 of gpt2's MLPs on 8 ranks are 3 on each, and
    a column is a hidden unit in both matrices of an MLP. NorMuon evens these out, elsewhere the outputs.
    The ranks exchange updates, which all of them apply.
    """

    moments, alignment = ("momentum_buffer",), 1

    def __init__(self, *args):
        super().__init__(*args)
        self.orthogonalize = torch.compile(zeropower, fullgraph=True, dynamic=False) if self.cfg.compile else zeropower
        if self.cfg.muon_beta2:
            n, rows, cols = self.grad.shape
            self.state["second_moment"] = self.grad.new_zeros((n, 1, cols) if "mlp" in self.name else (n, rows, 1))
        factors = {"mlp.c_fc": self.cfg.c_fc_factor, "mlp.c_proj": self.cfg.c_proj_factor}
        kinds = [".".join(name.split(".")[-2:]) for name in self.name.split("+")]
        self.factors = [factors.get(kind, 1.0) for kind in kinds]

    def as_rows(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *x.shape[-2:])
        return x.mT if x.size(-2) > x.size(-1) else x

    def place(self, rows: list[Tensor]) -> Tensor:
        return torch.zeros_like(self.grads, dtype=getattr(torch, self.cfg.dtype))

    def update_shard(self, shard: Tensor, grad: Tensor) -> None:
        cfg, momentum = self.cfg, muon_momentum(self.step, self.cfg)
        momentum_buffer = self.state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = self.orthogonalize(grad.lerp_(momentum_buffer, momentum), cfg.muon_polynomial, shard.dtype)
        if cfg.muon_beta2:
            update = normalize(update, self.state["second_moment"], cfg.muon_beta2)
        shard.copy_(update)

    def gather(self) -> None:
        super().gather()
        for p, update, factor in zip(self.params, self.pieces(self.values), self.factors, strict=True):
            update = (update.mT if p.size(-2) > p.size(-1) else update).view_as(p)
            if self.cfg.muon_decay:
                update = update + self.cfg.muon_decay * self.lr * p * (update * p >= 0)
            p.add_(update, alpha=-self.lr * factor)


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Put every parameter into exactly one group, by the components of its name. Refuse what none claims, or two."""
    cfg, named = gpt.cfg, dict(gpt.named_parameters())

    def claim(*components: str) -> dict[str, nn.Parameter]:
        return {name: p for name, p in named.items() if set(components) & set(name.split("."))}

    stacks: dict[tuple, dict[str, nn.Parameter]] = {}  # Muon's matrices by shape, tall ones on their side
    for name, p in claim("qkv_w", "c_fc", "c_proj").items():
        stacks.setdefault(tuple(sorted(p.shape[-2:])), {})[name] = p
    scalars = ("lambdas", "resid_lambda", "bigram_lambda", "skip_weights", "smear_lambda", "backout_lambda")
    groups = [  # components of names, learning rate, weight decay, betas: records 52 (@ChrisJMcCormick) and 57
        (("value_embeds", "bigram_embed"), cfg.embed_lr, cfg.embed_decay, cfg.embed_betas),
        (("gate", "value_gate"), cfg.gate_lr, cfg.gate_decay, cfg.scalar_betas),  # record 56 (@ChrisJMcCormick)
        (("smear_gate",), cfg.smear_gate_lr, 0.0, cfg.scalar_betas),
        (("skip_gate",), cfg.skip_gate_lr, 0.0, cfg.scalar_betas),
        (scalars, cfg.scalar_lr, 0.0, cfg.scalar_betas),
        (("x0_lambda",), cfg.scalar_lr, 0.0, cfg.x0_betas),
        (("lm_head",), cfg.head_lr, cfg.head_decay, cfg.head_betas),
        (("embed",), cfg.embed_lr, cfg.embed_decay, cfg.embed_betas),
    ]
    if cfg.tied_frac:
        groups[-2:] = [(("lm_head", "embed"), cfg.head_lr, cfg.head_decay, cfg.head_betas)]
    adams = [Adam(claim(*names), *settings, cfg, ranks) for names, *settings in groups if claim(*names)]
    optimizers = [*(Muon(stack, cfg.muon_lr, cfg, ranks) for stack in stacks.values()), *adams]
    claimed = "+".join(optimizer.name for optimizer in optimizers).split("+")
    if wrong := [name for name in named if claimed.count(name) != 1]:
        raise ValueError(f"each parameter needs exactly one group in build_optimizers: {', '.join(wrong)}")
    # Largest first: its update overlaps the remaining reduce-scatters, and the last update is the smallest
    return sorted(optimizers, key=lambda optimizer: -optimizer.grads.nbytes)


@torch.no_grad()
def step_optimizers(optimizers: Sequence[ShardedOptimizer], step: int) -> None:
    """Take step `step`, from the sums of the gradients of this rank's sequences, in the same order on all ranks.

    The gradients that it used are gone after it; those of an optimizer whose turn it is not wait for more.
    """
    due = [optimizer for optimizer in optimizers if (step + 1) % optimizer.every == 0]
    for optimizer in due:
        optimizer.step, optimizer.lr = step, optimizer.initial_lr * lr_multiplier(step, optimizer.cfg)
        optimizer.reduce()
    for optimizer in due:
        optimizer.update()
    for optimizer in due:
        optimizer.gather()
        for p in optimizer.params:
            p.grad = None


# ---- Data: which tokens each step trains on is planned before the first one, the same for any number of processes ----
# Tokens of a shard from `start` on; the stamp tells whether the file changes. sequences: for each the (pieces, 2)
# positions in the shard where its pieces begin and end, with the target of its last token
Batch = namedtuple("Batch", "path start stamp sequences")


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


def plan_batches(pattern: str, seq_lens: Sequence[int], num_sequences: int, cfg: Hyperparameters, max_doc_len: int = 0):
    """Plan a batch of `num_sequences` for each of seq_lens, shard after shard in sorted order; drop a shard's rest.

    A shard is 256 int32 of header [20240520, 1, number of tokens, 0 ...], then uint16 tokens: the format of llm.c.
    With `max_doc_len` a sequence begins with a document (record 26, @classiclarryd), and takes so many tokens at most
    of each (record 29, @varunneal); the rest of its last document is dropped. Without, the stream is cut as it is.
    """
    plan: list[Batch] = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        header, stamp = read_shard(path, "<i4", 0, 3)
        if header.tolist() != [20240520, 1, (stamp[1] - 1024) / 2]:
            raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
        if len(plan) == len(seq_lens):
            continue
        size, at = int(header[2]), 0  # `at`: the next token, or the next document
        if max_doc_len:
            begins = np.flatnonzero(read_shard(path, "<u2", 1024, size)[0] == cfg.eot_token)
            documents = np.stack([begins, np.minimum(np.append(begins, size)[1:], begins + max_doc_len)], axis=1)
            filled = np.append(0, np.cumsum(documents[:, 1] - documents[:, 0]))
        for seq_len in seq_lens[len(plan) :]:
            sequences = []
            for _ in range(num_sequences):
                if max_doc_len:
                    end = np.searchsorted(filled, filled[at] + seq_len + 1)  # first document that it does not need
                    if end == len(filled):
                        break
                    sequences.append(pieces := documents[at:end].copy())
                    pieces[-1, 1] -= filled[end] - filled[at] - seq_len - 1
                    at = end
                elif at + seq_len < size:
                    sequences.append(np.array([[at, at + seq_len + 1]]))
                    at += seq_len
            if len(sequences) < num_sequences:
                break
            plan.append(Batch(path, int(sequences[0][0, 0]), stamp, sequences))
    if len(plan) < len(seq_lens):
        found = f"{pattern} in {os.getcwd()}: tokens for {len(plan)} batches, the run needs {len(seq_lens)}"
        raise UserError(f"{found}; ./run.sh gets a preset's data, data/pack_text.py packs text")
    return plan


def plan_data(cfg: Hyperparameters) -> dict[str, list[Batch]]:
    """Return the batches of training, and those of validation, one sequence each."""
    train_lens = [train_seq_len(step, cfg) for step in range(cfg.num_iterations)]
    train = plan_batches(cfg.train_files, train_lens, cfg.batch_sequences, cfg, cfg.max_doc_len)
    val_lens = [cfg.val_seq_len] * (cfg.val_tokens // cfg.val_seq_len)
    return dict(train=train, val=plan_batches(cfg.val_files, val_lens, 1, cfg))


def read_tokens(batch: Batch, offset: int, count: int, vocab_size: int) -> np.ndarray:
    """Return `count` of the batch's uint16 tokens from `offset` on."""
    tokens, stamp = read_shard(batch.path, "<u2", 1024 + 2 * (batch.start + offset), count)
    if stamp != batch.stamp or len(tokens) < count:
        raise UserError(f"{batch.path}: has changed since the run was planned: start again, and leave it alone")
    if tokens.max() >= vocab_size:
        raise UserError(f"{batch.path}: has token {tokens.max()}, --vocab_size is {vocab_size}: another tokenizer's?")
    return tokens


def read_batches(plan, sequences: Sequence[int], cfg: Hyperparameters, device: torch.device) -> Iterator:
    """Yield for each batch the [(inputs (T,) int32, targets (T,) int64), ...] of its `sequences`, on the device."""

    def read(batch: Batch) -> Tensor:
        rows = []
        for pieces in (batch.sequences[i] for i in sequences):
            first, last = int(pieces[0, 0]), int(pieces[-1, 1])
            tokens = read_tokens(batch, first - batch.start, last - first, cfg.vocab_size)
            rows.append(np.concatenate([tokens[begin:end] for begin, end in pieces - first]))
        tokens = torch.empty(len(rows), len(rows[0]), dtype=torch.uint16, pin_memory=device.type == "cuda")
        return tokens.copy_(torch.from_numpy(np.stack(rows)))

    with ThreadPoolExecutor(max_workers=1) as reader:  # ahead of the steps, from the first `next` on
        futures = (reader.submit(read, batch) for batch in plan)
        ahead = deque(islice(futures, READ_AHEAD))
        while ahead:
            tokens = ahead.popleft().result().to(device, non_blocking=True).to(torch.int32)
            ahead.extend(islice(futures, 1))
            yield [(row[:-1], row[1:].long()) for row in tokens]


# ---- Schedules: functions of the step and the configuration ----------------------------------------------------------
def stage_starts(cfg: Hyperparameters) -> list[int]:
    """Return the stages' first steps: the scheduled steps in equal parts, then the extension (records 29, 35, 46)."""
    parts = len(cfg.window_tokens) - (cfg.extension_steps > 0)
    return [round(cfg.scheduled_steps * i / parts) for i in range(len(cfg.window_tokens))]


def stage_of(step: int, cfg: Hyperparameters) -> int:
    return sum(step >= start for start in stage_starts(cfg)) - 1


def train_seq_len(step: int, cfg: Hyperparameters) -> int:
    """Return the tokens of each sequence of a step: small batches first (record 46, @varunneal)."""
    return cfg.train_seq_len * cfg.stage_growth[stage_of(step, cfg)]


def lr_multiplier(step: int, cfg: Hyperparameters) -> float:
    """Return the factor on all learning rates: it rises with the batch, and falls linearly in the cooldown."""
    x = min(step / cfg.scheduled_steps, 1.0)
    w = min((1 - x) / cfg.cooldown_frac, 1.0)
    return w * cfg.lr_factors[stage_of(step, cfg)] + (1 - w) * cfg.min_lr_frac


def next_weights(step: int, cfg: Hyperparameters) -> list[float]:
    """Return the weights of the losses of the next tokens: one less from stage to stage (record 53, @varunneal)."""
    stage, starts = stage_of(step, cfg), [*stage_starts(cfg), cfg.num_iterations]
    *first, last = cfg.next_weights[: max(1, len(cfg.next_weights) - stage)]
    return [*first, last * (starts[stage + 1] - step) / (starts[stage + 1] - starts[stage])] if first else [last]


def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Return Muon's momentum, which rises linearly in its warm-up and falls in its cooldown (record 39)."""
    warmup, cooldown = cfg.momentum_warmup_steps, cfg.momentum_cooldown_steps
    w = min(step / warmup if warmup else 1.0, (cfg.num_iterations - step) / cooldown if cooldown else 1.0, 1.0)
    return (1 - w) * cfg.momentum_warmup_start + w * cfg.muon_momentum


def attention_windows(step: int, cfg: Hyperparameters) -> tuple[int, int]:
    """Return how many tokens before its own a token sees with a long and with a short window: half, in whole blocks."""
    block, window = cfg.block_size, cfg.window_tokens[stage_of(step, cfg)]
    if cfg.block_windows:  # the token's own block is one of them
        blocks = max(1, -(-window * step // (cfg.num_iterations * block)))
        return (blocks - 1) * block, max(blocks // 2 - 1, 0) * block
    is_last = step == cfg.num_iterations and cfg.final_window_tokens  # record 33 (@classiclarryd)
    return cfg.final_window_tokens if is_last else window, window // (2 * block) * block


def rotary_frequencies(stage: int, cfg: Hyperparameters, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the frequencies (head_dim / 4,) in a stage, and the factor on attention scores.

    When the long window widens, frequencies that turn once in it are stretched with it, those that turn `yarn_turns`
    times are not, and the factor grows: YaRN (arXiv:2309.00071; record 31, @classiclarryd).
    """
    frequencies = (1 / cfg.rope_base) ** torch.linspace(0, 1, steps=cfg.head_dim // 4, dtype=dtype)
    scale = cfg.attention_scale
    for old, new in pairwise(cfg.window_tokens[: stage + 1]):
        turns = old * frequencies / (2 * math.pi)
        kept = ((turns - 1) / (cfg.yarn_turns - 1)).clamp(0, 1)
        frequencies = frequencies * (old / new + kept * (1 - old / new))
        scale *= 1 + cfg.yarn_scale * math.log(new / old)
    return frequencies, scale


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
        self.windows, self.stage = torch.zeros(2, dtype=torch.int32, device=self.device), 0
        self.weights = torch.ones(len(cfg.next_weights), dtype=self.gpt.rotary.scale.dtype, device=self.device)

    def set_schedules(self, step: int) -> None:
        """Set windows, weights, rotary tables and attention scale to a step's: tensors, so that nothing recompiles."""
        for window, tokens in zip(self.windows, attention_windows(step, self.cfg), strict=True):
            window.fill_(tokens)
        for weight, value in zip(self.weights, next_weights(step, self.cfg), strict=False):
            weight.fill_(value)
        if self.stage != stage_of(step, self.cfg):
            self.stage = stage_of(step, self.cfg)
            self.gpt.rotary.set_stage(self.stage, self.cfg)

    def train_step(self, step: int, sequences: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Take a step on this rank's sequences, and return the mean loss over those of all ranks."""
        losses, weights = [], self.weights[: len(next_weights(step, self.cfg))]
        self.set_schedules(step)
        for tokens, targets in sequences:
            loss = self.model(tokens, targets, self.windows, weights)
            # Undivided: FP8 sees the same gradients for any number of processes, and fewer become 0. The sum grows with
            # the batch, and the optimizers' moments remember
            (loss * self.cfg.loss_scale if self.cfg.loss_scale else loss / len(tokens)).backward()
            losses.append(loss.detach() / len(tokens))
        mean = torch.stack(losses).sum() / self.cfg.batch_sequences
        wait = launch(dist.all_reduce, mean)
        step_optimizers(self.optimizers, step)
        wait()
        return mean

    @torch.no_grad()
    def evaluate(self, step: int, val_plan: Sequence[Batch]) -> float:
        """Return the mean loss over the validation tokens. A rank may score more sequences than others, or none."""
        self.set_schedules(step)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        own = val_plan[self.ranks.rank :: self.ranks.world_size]
        for [(tokens, targets)] in read_batches(own, [0], self.cfg, self.device):
            total += self.model(tokens, targets, self.windows, torch.ones_like(self.weights[:1]))
        launch(dist.all_reduce, total)()
        return total.item() / self.cfg.val_tokens

    def warm_up(self) -> None:
        """Compile and run every graph on random tokens, and leave no trace: the first real one is read on the clock."""
        cfg, generator = self.cfg, torch.Generator(self.device)
        trained = [*self.gpt.parameters(), *(shard for o in self.optimizers for shard in o.state.values())]
        saved = [tensor.detach().to("cpu", copy=True) for tensor in trained]  # not on the GPU's peak
        stages = {stage_of(step, cfg): step for step in reversed(range(cfg.num_iterations))}  # and their first steps
        lengths, options = [train_seq_len(step, cfg) for step in stages.values()], dict(device=self.device)
        tokens = torch.randint(cfg.vocab_size, (max(*lengths, cfg.val_seq_len) + 1,), generator=generator, **options)
        *trains, val = ((tokens[:n].int(), tokens[1 : n + 1]) for n in (*lengths, cfg.val_seq_len))
        for first, train in zip(stages.values(), trains, strict=True):
            for step in range(first, first + max(2, cfg.adam_every)):
                self.train_step(step, [train] * min(2, cfg.batch_sequences // self.ranks.world_size))
        with torch.no_grad():
            self.model(*val, self.windows, torch.ones_like(self.weights[:1]))
            for tensor, value in zip(trained, saved, strict=True):
                tensor.copy_(value)
        self.gpt.zero_grad(set_to_none=True)


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
        options = dict(total=cfg.batch_sequences * sum(train_seq_len(step, cfg) for step in range(cfg.num_iterations)))
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
            self.bar.update(self.cfg.batch_sequences * train_seq_len(step - 1, self.cfg))

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
    batches = read_batches(plans["train"], sequences, cfg, trainer.device)
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
