"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one command
    torchrun --standalone --nproc_per_node=8 train_gpt.py     the record configuration on one 8xH100 node
    python train_gpt.py --preset nano                         a small model on a CPU, in seconds

Unreleased. The preset gpt2 has the mathematics of record 65 of the NanoGPT speedrun (2026-01-30, 1,555 steps,
https://github.com/KellerJordan/modded-nanogpt), nano uses part of it, and its attention heads begin with weights that
they would otherwise have to learn. "Record n" credits the record of that history in which an idea first appeared.
Reading order: configuration, head, layers, attention, model, optimizers, data, schedules, run. Start at `main`.
Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens, M visible blocks, K model width, V vocabulary.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
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
import zipfile
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam
from tqdm import tqdm

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # layer numbers in skip_layout and backout_layer
# Types of the fields of Hyperparameters, with the lowest and the highest value
Count = Annotated[int, 1, 2**27]
Natural = Annotated[int, 0, 2**24]
Size = Annotated[int, 1, 2**14]
Positive = Annotated[float, 1e-9, 2**30]
Rate = Annotated[float, 0, 100]
Decay = Annotated[float, 0, 0.99999]
Counts = Annotated[tuple[int, ...], 1, 2**27]
Rates = Annotated[tuple[float, ...], 0, 100]
# Renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class UserError(Exception):
    """Say what the user can mend: a flag, a file, the hardware. Exit code 2."""


# ---- Configuration ---------------------------------------------------------------------------------------------------
def both(gpt2, nano):
    """Return a field with its value in gpt2 and its value in nano."""
    return dataclasses.field(default=gpt2, metadata=dict(nano=nano))


@dataclasses.dataclass(frozen=True, slots=True)
class Hyperparameters:
    # Data. Shards are read in sorted order; the log marks validation tokens with another SHA-256 than val_sha256
    preset: Literal["gpt2", "nano"] = both("gpt2", "nano")  # by default gpt2 where torch sees a GPU, else nano
    train_files: str = both("data/fineweb10B/fineweb_train_*.bin", "data/nano/nano_train_*.bin")  # glob for training
    val_files: str = both("data/fineweb10B/fineweb_val_*.bin", "data/nano/nano_val_*.bin")  # glob for validation
    val_tokens: Count = both(10_485_760, 262_144)  # validation tokens, a multiple of val_seq_len
    val_sha256: str = both("", "3dedcd4e56e9f6d188eb07c5347f5c44f84bc9cc7e98ccea3eb898c7bfd415bf")  # if known
    target_loss: Annotated[float, 0, 100] = both(3.28, 1.45)  # validation loss to reach; 0: none
    vocab_size: Annotated[int, 1, 2**16] = both(50257, 257)  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: Natural = both(50256, 256)  # end of text, opens every document; below vocab_size
    # Training
    num_iterations: Annotated[int, 1, 2**20] = both(1555, 310)  # steps: stages of equal length, then the extension
    extension_steps: Natural = both(40, 0)  # steps of the extension, a last stage at the lowest learning rates; 0: none
    stage_growth: Counts = both((1, 2, 3, 3), (1,))  # per stage: factor on batch_tokens and train_seq_len
    lr_factors: Rates = both((1.0, 1.52, 1.73, 1.73), (1.0,))  # per stage: factor on learning rates
    cooldown_frac: Annotated[float, 1e-9, 1] = both(0.55, 0.85)  # last part of the scheduled steps, with falling rates
    min_lr_frac: Rate = 0.1  # factor on learning rates at the end of the cooldown and in the extension
    next_weights: Rates = both((1.0, 0.5, 0.25), (1.0,))  # weights of the next tokens' losses; each stage fades one out
    loss_scale: Positive = both(2.0, 2**-10)  # factor on the summed loss of a sequence before the backward pass
    tied_frac: Rate = both(2 / 3, 0.0)  # first part of the scheduled steps, with embedding and head tied; 0: never
    val_loss_every: Natural = both(250, 155)  # steps between validations; 0: only after the last step
    batch_tokens: Count = both(8 * 16 * 1024, 1024)  # tokens per step at first, in all; a multiple of train_seq_len
    train_seq_len: Count = both(16 * 1024, 1024)  # tokens per training sequence at first, a multiple of block_size
    max_doc_len: Natural = both(2048, 0)  # tokens used of each document, which open sequences; 0: the stream
    val_seq_len: Count = both(256 * 1024, 8192)  # tokens per validation sequence, a multiple of block_size
    # Model
    model_dim: Size = both(768, 128)  # width of the residual stream
    num_heads: Size = both(6, 2)  # attention heads
    head_dim: Size = both(128, 64)  # dimensions per head, a multiple of 4
    attention_layout: str = both("PSPLSP-SSPL", "L-")  # per layer: L long window, S short, P paired heads, - none
    value_embed_layout: str = both("01......234", "0.")  # per layer: digit of its value embedding, or .
    skip_layout: str = both("......3....", ".0")  # per layer: the earlier layer (0-9a-z) whose output it adds, or .
    skip_init: Annotated[float, -100, 100] = both(-1.5, 1.0)  # first weight of a skip, before a sigmoid
    backout_layer: str = both("7", ".")  # layer (0-9a-z) subtracted before the head, half of it at first, or .
    resid_lambda_init: Rate = both(1.1, 1.0)  # first factor on the residual stream before each layer
    gate_inputs: Natural = both(12, 0)  # channels that feed gates of heads, value embeddings, skips, smear; 0: no gates
    embed_mean: Annotated[float, -100, 100] = both(0.0, 0.5)  # mean of the untied embedding at first
    head_std: Rate = both(0.005, 0.0)  # standard deviation of the head at the start
    bigram_rows: Natural = both(5 * 50304, 8192)  # rows of the hashed table for pairs of adjacent tokens; 0: no table
    bigram_lambda_init: Rate = both(0.1, 1.0)  # first factor on the pairs' embeddings before each layer
    rope_base: Positive = 1024.0  # base of the rotary frequencies
    local_heads: Natural = both(0, 1)  # heads whose unrotated half begins at 0; k begins as q in all. 0: at random
    attention_scale: Annotated[float, 0, 2**20] = both(0.1, 0.12)  # first factor on scores; q, k have unit RMS
    yarn_scale: Rate = 0.2  # growth of that factor with the logarithm of the long window (YaRN)
    yarn_turns: Annotated[float, 1.1, 2**20] = 32.0  # YaRN keeps frequencies of at least so many turns in a window
    lm_head_softcap: Positive = 15.0  # c in the softcap r sigmoid((z + d) 2 / c) of the logits z
    lm_head_range: Positive = both(23.0, 30.0)  # r in the softcap
    lm_head_shift: Annotated[float, -100, 100] = both(5.0, 0.0)  # d in the softcap
    lm_head_slice: Count = both(8192, 1024)  # tokens whose logits exist at a time
    lm_head_fp8: bool = both(True, False)  # train the head in FP8 where the GPU can; validation never is
    fp8_x_scale: Positive = 448 / 100  # static FP8 scale of the head's input
    fp8_w_scale: Positive = 448 / 1.6  # static FP8 scale of the head's weight
    fp8_grad_scale: Positive = 448 / 0.75  # static FP8 scale of the gradient of the summed loss by the logits
    block_size: Count = both(128, 64)  # tokens per block of the attention mask
    window_tokens: Counts = both((384, 896, 1408, 1664), (256,))  # per stage: tokens that a long window reaches back
    final_window_tokens: Natural = both(2560, 0)  # long window in the last validation; 0: as in training
    # Optimizers
    muon_lr: Rate = both(0.023, 0.06)  # Muon, for hidden matrices: an update has about this spectral norm
    c_fc_factor: Rate = 2.0  # factor on muon_lr for the first matrix of each MLP
    c_proj_factor: Rate = both(4.0, 1.0)  # factor on muon_lr for the second matrix of each MLP
    muon_momentum: Decay = both(0.95, 0.9)  # momentum after its warm-up
    momentum_warmup_start: Decay = 0.85  # momentum of the first step, and after the cooldown
    momentum_warmup_steps: Natural = both(300, 50)  # first steps, in which momentum rises
    momentum_cooldown_steps: Natural = both(50, 0)  # last steps, in which momentum falls
    muon_beta2: Decay = 0.95  # decay of NorMuon's second moment
    muon_decay: Rate = both(1.2, 0.0)  # cautious weight decay, times the squared learning rate
    adam_every: Annotated[int, 1, 16] = both(2, 1)  # Adam steps once in so many steps, on the sum of their gradients
    adam_eps: Rate = 1e-10  # added to the root of the second moment
    # Groups of Adam: learning rate, weight decay as Muon's, beta1, beta2
    head_adam: Rates = both((0.008, 0.75, 0.5, 0.95), (0.006, 0.0, 0.5, 0.9))  # head, embedding while tied
    embed_adam: Rates = both((0.008, 0.75, 0.5, 0.95), (0.25, 0.0, 0.5, 0.9))  # embedding
    table_adam: Rates = both((0.6, 0.025, 0.75, 0.95), (0.25, 0.0, 0.5, 0.9))  # value and bigram embeddings
    scalar_adam: Rates = both((0.04, 0.0, 0.9, 0.99), (0.04, 0.0, 0.5, 0.9))  # all scalar factors but x0_lambda
    x0_adam: Rates = both((0.04, 0.0, 0.65, 0.95), (0.04, 0.0, 0.5, 0.9))  # x0_lambda, factors on the embedding
    gate_adam: Rates = (0.008, 0.005, 0.9, 0.99)  # gates of attention and value embeddings
    smear_adam: Rates = (8e-5, 0.0, 0.9, 0.99)  # gate of the smear
    skip_adam: Rates = (4e-4, 0.0, 0.9, 0.99)  # gates of the skips
    # Machine
    seed: Annotated[int | None, 0, 2**63 - 1] = None  # random seed; by default a fresh one, printed and logged
    device: Literal["auto", "cuda", "cpu"] = both("auto", "cpu")  # auto: cuda where torch sees a GPU
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; by default on CUDA only
    cpu_threads: Annotated[int, 0, 1024] = both(0, 2)  # CPU threads over all processes of a machine; 0: torch's choice
    # Output
    log_dir: str = "logs"  # folder of the logs
    run_id: str = ""  # name of the log, without folders; by default preset, time and seed
    save_checkpoint: bool = both(False, True)  # write the final model, which sample.py reads, to LOG_DIR/RUN_ID.pt
    checkpoint_every: Natural = 0  # steps between checkpoints to resume from, off the clock; 0: none
    resume: str = ""  # LOG_DIR/RUN_ID.checkpoint, or latest: the newest in log_dir, of run_id if given

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with, in one line that names the flag."""

        def require(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise UserError(f"--{name} {str(getattr(self, name))[:100]}: expected {expected}")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)  # argparse makes "=--" an empty list
            require(field.name, 0 < len(values) < 8, "1 to 7 values")  # torch.compile makes 8 graphs at most
            if get_origin(field.type) is Annotated and value is not None:
                low, high = field.type.__metadata__
                require(field.name, all(low <= n <= high for n in values), f"a number from {low} to {high}")
            require(field.name, field.type is not str or value.isprintable(), "printable characters")
            if field.name.endswith("_adam"):
                require(field.name, len(value) == 4 and max(value[2:]) < 1, "rate, decay and two betas below 1")

        multiples = dict(head_dim=4, num_heads=1 + ("P" in self.attention_layout), val_tokens=self.val_seq_len)
        multiples |= dict(batch_tokens=self.train_seq_len, train_seq_len=self.block_size, val_seq_len=self.block_size)
        multiples |= dict(checkpoint_every=self.adam_every)
        for name, unit in multiples.items():
            require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        require("eot_token", self.eot_token < self.vocab_size, f"a token below vocab_size {self.vocab_size}")
        require("run_id", "/" not in self.run_id and len(self.run_id) < 200, "a short name without folders")
        require("bigram_rows", self.bigram_rows != 1, "0, or at least 2")
        require("gate_inputs", self.gate_inputs <= self.model_dim, f"at most model_dim {self.model_dim}")
        require("tied_frac", not self.tied_frac or self.head_std > 0, "0 with --head_std 0: one table, all zeros")
        require("extension_steps", self.scheduled_steps > 0, f"less than num_iterations {self.num_iterations}")
        stages = {len(self.stage_growth), len(self.lr_factors), len(self.window_tokens)}
        holds = len(stages) == 1 and min(stages) > (self.extension_steps > 0)
        require("window_tokens", holds, "as many stages as stage_growth and lr_factors, 2 or more with extension_steps")

        letters, embeds, skips = self.attention_layout, self.value_embed_layout, self.skip_layout
        layers = len(letters)
        require("attention_layout", 0 < layers <= len(DIGITS) and {*letters} <= {*"LSP-"}, "letters L, S, P and -")
        used = {embed for embed, letter in zip(embeds, letters, strict=False) if letter != "-"} - {"."}
        holds = len(embeds) == layers and {*embeds} - {"."} == used == {*DIGITS[: len(used)]}
        require("value_embed_layout", holds, f"{layers} characters: . or, where there is attention, a digit, from 0 on")
        holds = len(skips) == layers and all(source in "." + DIGITS[:i] for i, source in enumerate(skips))
        require("skip_layout", holds, f"{layers} digits of earlier layers or .")
        require("backout_layer", self.backout_layer in [".", *DIGITS[: layers - 1]], "a layer before the last, or .")

    batch_sequences = property(lambda self: self.batch_tokens // self.train_seq_len)
    scheduled_steps = property(lambda self: self.num_iterations - self.extension_steps)


NANO = {field.name: field.metadata["nano"] for field in dataclasses.fields(Hyperparameters) if field.metadata}
PRESETS = {"gpt2": Hyperparameters(), "nano": Hyperparameters(**NANO)}


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset, changed by the flags in `argv`; every field of Hyperparameters is a flag."""
    fields = inspect.getsource(Hyperparameters).partition("\n\n")[0]
    help_text = f"{__doc__}\nEach field is a flag (--no-FIELD for false); both(a, b): a in gpt2, b in nano:\n\n{fields}"
    form, hidden = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    parser = argparse.ArgumentParser("train_gpt.py", hidden, help_text, formatter_class=form, allow_abbrev=False)
    for name, hint in get_type_hints(Hyperparameters).items():  # without the bounds
        kind, *others = get_args(hint) or [hint]  # int of int | None and of tuple[int, ...]
        options = dict(choices=[kind, *others]) if get_origin(hint) is Literal else dict(type=kind)
        options = dict(action=argparse.BooleanOptionalAction) if kind is bool else options
        options |= dict(nargs="*") if get_origin(hint) is tuple else {}
        parser.add_argument(f"--{name}", **options, help=hidden, default=hidden)  # absent unless given
    flags = vars(parser.parse_args(argv))
    sees_gpu = torch.cuda.is_available() and flags.get("device") != "cpu"
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    if "preset" not in flags and world_size > 1 and not sees_gpu:
        raise UserError(f"{world_size} processes, but torch {torch.__version__} sees no GPU: say --preset nano or gpt2")
    return dataclasses.replace(PRESETS[flags.get("preset", "gpt2" if sees_gpu else "nano")], **flags)


def resolve(cfg: Hyperparameters) -> Hyperparameters:
    """Decide what `cfg` leaves open: device, precision, FP8, compilation, seed, name of the run."""
    on_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.device == "cuda" and not on_cuda:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU; ./run.sh --check says why")
    # A CPU with AVX512-BF16 or AMX multiplies bf16 2.1 times as fast as fp32, others 3 to 10 times slower
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = "bfloat16" if on_cuda or (native and torch.ops.mkldnn._is_mkldnn_bf16_supported()) else "float32"
    seed = int.from_bytes(os.urandom(4)) // 2 if cfg.seed is None else cfg.seed
    decided = dict(device="cuda" if on_cuda else "cpu", dtype=fast if cfg.dtype == "auto" else cfg.dtype, seed=seed)
    has_fp8 = on_cuda and torch.cuda.get_device_capability() >= (8, 9)  # with matmuls of multiples of 16
    decided["lm_head_fp8"] = cfg.lm_head_fp8 and has_fp8 and cfg.model_dim % 16 == cfg.lm_head_slice % 16 == 0
    decided["compile"] = on_cuda if cfg.compile is None else cfg.compile
    decided["run_id"] = cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    return dataclasses.replace(cfg, **decided)


# ---- Head: softcapped logits and their cross entropy, in slices of tokens, in FP8 where the GPU can ------------------
class HeadLoss(torch.autograd.Function):
    """Return the summed cross entropy, in nats, of softcapped logits z = x @ w.T, for x (T, K), w (V, K), targets (T,).

    weights (n,): those of the losses of the next n tokens (multi-token prediction: record 53, @varunneal).

    Only `slice_tokens` rows of the logits (T, V) exist at a time. The forward pass computes the gradients of a slice as
    well, as computing its logits again in the backward pass took 27 to 41% of the head's time.

    fp8_scales of x, w and the logits' gradient, or None: multiply in FP8 (record 19, @YouJiacheng), e4m3 forward and
    e5m2 for the gradient, which needs range more than precision. Static scales do: x has unit RMS, w saturates, and the
    gradient of a token's loss by a logit is below 1.4 in gpt2.

    cap (c, r, d): the softcap r sigmoid((z + d) 2 / c), after Gemma 2's c tanh(z / c) (arXiv:2408.00118), with c = 15
    since record 18 (@KoszarskyB), lopsided since record 54 (@classiclarryd). A softmax ignores a shift, so the logits
    are computed less r: -r s, with s = sigmoid(-(z + d) 2 / c). None is above 0, so exp needs no maximum subtracted.
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
        # (T, n): views of the targets; the compiler would write copies out anew for every slice
        ahead = F.pad(targets, (0, len(weights) - 1), value=-1).as_strided((len(targets), len(weights)), (1, 1))
        for x_slice, t in zip(x.split(slice_tokens), ahead.split(slice_tokens), strict=True):
            x_q = quantize(x_slice, x_s, torch.float8_e4m3fn)
            z = product(x_q, w_q.t(), x_s, w_s, x.dtype, fast=True).to(wide)
            s = (z.add_(shift) if shift else z).mul_(-2 / softcap).sigmoid_()  # in place, as eager CPUs gain by it
            logits = s * -span
            shares = (t >= 0) * weights  # none for targets beyond the end of the sequence
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
        # grad_w is a transpose; autograd accumulates slowly unless it is as contiguous as the weight
        return grad * grad_x, (grad * grad_w).contiguous(), None, None, None, None, None, None


# ---- Layers: each draws its own initial values; MLPs begin with zero outputs (@Grad62304977) -------------------------
def uniform_weight(inputs: int, *shape: int) -> nn.Parameter:
    """Return a weight of standard deviation 0.5 / sqrt(inputs); PyTorch's is 0.58 / sqrt(inputs) (record 19)."""
    bound = (0.75 / inputs) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.type_as(x))  # weights are fp32, activations bf16


def gates(x: Tensor, weight: Tensor) -> Tensor:
    """Return factors from 0 to 1 for each token, from its first channels."""
    return linear(x[:, : weight.size(1)], weight).sigmoid()


class RMSNorm(torch.autograd.Function):
    """Divide x by its RMS over the last dimension. Save the result, which the next matmul saves anyway, and not x."""

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
    """Return relu(x)^2: 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := F.relu(x).square_())  # the next matmul saves it anyway (record 87): -3.6 GB
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].sqrt().mul_(grad).mul_(2)  # 2 relu(x) grad


class Rotary(nn.Module):
    """Rotate half of the dimensions of q and k by the token's position (arXiv:2104.09864; record 17), and scale q."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        dtype = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        length = max(cfg.train_seq_len * max(cfg.stage_growth), cfg.val_seq_len) * (1 + ("P" in cfg.attention_layout))
        for name, shape in dict(cos=(length, cfg.head_dim // 4), sin=(length, cfg.head_dim // 4), scale=(1,)).items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)
        self.set_stage(0, cfg)

    def set_stage(self, stage: int, cfg: Hyperparameters) -> None:
        """Overwrite tables and scale, which are tensors so that nothing recompiles."""
        frequencies, scale = rotary_frequencies(stage, cfg, self.cos.dtype)
        positions = torch.arange(len(self.cos), device=self.cos.device)
        angles = torch.outer(positions, frequencies.to(self.cos.device, non_blocking=True))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        self.scale.fill_(scale)

    def forward(self, qk_THD: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Return q and k (T, H, D). slots: positions per token, 2 with paired heads; odd heads take the second."""
        T, _, D = qk_THD.shape
        cos, sin = (table[: T * slots].view(T, 1, slots, D // 4) for table in (self.cos, self.sin))
        x1, x2, still = qk_THD.view(T, -1, slots, D).split([D // 4, D // 4, D // 2], dim=-1)
        rotated = torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin, still], dim=-1)  # the fp32 tables promote bf16
        q, k = rotated.view_as(qk_THD).chunk(2, dim=1)
        return (q * self.scale).type_as(qk_THD), k.type_as(qk_THD)


class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = uniform_weight(dim, dim, 4 * dim)  # (in, out), the shape of c_proj, (out, in): Muon stacks both
        self.c_proj = nn.Parameter(torch.zeros(dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        return linear(ReluSquared.apply(linear(x, self.c_fc.mT)), self.c_proj)


# ---- Attention: causal, within documents, in sliding windows ---------------------------------------------------------
def document_block_mask(doc_ids: Tensor, window: Tensor, block_size: int, for_flex: bool = True) -> BlockMask:
    """Return the mask of causal attention within documents and a sliding window (records 20 and 29).

    doc_ids (T,): non-decreasing document id of each token. window () int32: how many tokens before itself a token sees;
    a tensor, so that a change never recompiles. for_flex: also build the key-major lists of FlexAttention's backward.

    Query block i sees the key blocks first..i. If i is within one document, every token of i sees all of the blocks
    whole..i - 1: they are full and need no mask. The others are partial. Both lists go from near to far.
    """

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= window) & (doc_ids[q] == doc_ids[kv])

    low, high = doc_ids.view(-1, block_size)[:, 0], doc_ids.view(-1, block_size)[:, -1]
    block = torch.arange(len(low), dtype=torch.int32, device=doc_ids.device)
    reach = (window + block_size - 1) // block_size  # the first token of a block sees into this many before it,
    whole_reach = (window + 1) // block_size - 1  # and the last one sees this many entirely
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

    kv_blocks (N, M): the key blocks of each query block, partial ones first. bias (N, 1, block, M block): 0 where a
    token sees another, -inf where not. max_blocks: M, the most that any query block sees with the widest window.
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
    """Map x (T, K), of unit RMS, to (T, K): attention with QK-norm, rotary, value embeddings and gated heads."""

    def __init__(self, cfg: Hyperparameters, kind: str, has_value_embed: bool):
        super().__init__()
        self.cfg, self.kind, H, G, K = cfg, kind, cfg.num_heads, cfg.gate_inputs, cfg.model_dim
        self.qkv_w = uniform_weight(K, 3, H * cfg.head_dim, K)  # three matrices for Muon: record 20
        self.c_proj = uniform_weight(H * cfg.head_dim, K, H * cfg.head_dim)  # not zero: record 64
        if cfg.local_heads:  # equal q and k: a token attends to those like it from the start (arXiv:2305.09828)
            q, k, _ = self.qkv_w.data.view(3, H, cfg.head_dim, K)
            q[: cfg.local_heads, cfg.head_dim // 2 :] = 0
            k.copy_(q)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))
        self.gate = nn.Parameter(torch.zeros(H, G)) if G else None
        self.value_gate = nn.Parameter(torch.zeros(H, G)) if G and has_value_embed else None

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, mask: BlockMask | GatheredMask) -> Tensor:
        H, D, slots = self.cfg.num_heads, self.cfg.head_dim, 2 if self.kind == "P" else 1
        # Learned factors on the weights: records 47 (@roeeshenberg) and 48 (@ChrisJMcCormick)
        qkv = linear(x, self.lambdas[0] * self.qkv_w.flatten(0, 1)).view(len(x), 3 * H, D)
        qk, v = qkv.split([2 * H, H], dim=1)
        # QK-norm (@Grad62304977). F.rms_norm saves its input, which v keeps alive anyway: 1.7 GB less than `norm`
        q, k = rotary(F.rms_norm(qk, (D,)), slots)
        if self.kind == "L":  # unrotated half from the token before: what followed a token like this one? (record 49)
            k = torch.cat([k[..., : D // 2], torch.cat([k[:1], k[:-1]])[..., D // 2 :]], dim=-1)
        if self.value_gate is not None:  # record 55 (@classiclarryd)
            v = v + 2 * gates(x, self.value_gate)[:, :, None] * value_embed.view_as(v)
        elif value_embed is not None:  # after value residuals (arXiv:2410.17897): @KoszarskyB, record 14
            v = v + value_embed.view_as(v)
        # Paired heads h and h + H / 2 alternate in one sequence of 2 T slots and share keys (record 58, @classiclarryd)
        # But rotary goes by odd and even h: as in the record, the middle of three pairs has its positions in reverse
        q, k, v = (t.reshape(len(x) * slots, H // slots, D) for t in (q, k, v))
        if isinstance(mask, BlockMask):
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            y = flex_attention(q, k, v, block_mask=mask, scale=1.0).squeeze(0).transpose(0, 1)
        else:
            y = mask.attend(q, k, v)
        y = y.reshape(len(x), H, D)
        if self.gate is not None:  # a head may attend to nothing: record 28 (@classiclarryd)
            y = y * gates(x, self.gate)[:, :, None]
        return linear(y.flatten(1), self.lambdas[1] * self.c_proj)


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
class Block(nn.Module):
    def __init__(self, cfg: Hyperparameters, kind: str, value_embed: str):
        super().__init__()
        self.attn = CausalSelfAttention(cfg, kind, value_embed != ".") if kind != "-" else None
        self.mlp = MLP(cfg.model_dim)
        self.resid_lambda = nn.Parameter(torch.tensor(cfg.resid_lambda_init))
        self.x0_lambda = nn.Parameter(torch.tensor(0.0))
        self.bigram_lambda = nn.Parameter(torch.tensor(cfg.bigram_lambda_init)) if cfg.bigram_rows else None

    def forward(self, x: Tensor, x0: Tensor, pairs: Tensor | None, value_embed: Tensor | None, rotary, mask) -> Tensor:
        x = self.resid_lambda * x + self.x0_lambda * x0  # the embedding stays at hand: @KoszarskyB, record 9
        if self.bigram_lambda is not None:  # and so does that of the last two tokens: @classiclarryd, record 62
            x = x + self.bigram_lambda * pairs
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embed, rotary, mask)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Map tokens (T,) int32 and targets (T,) int64 to the sum of losses.

    windows (2,) int32: the long and the short one. weights (n,): of the losses of the next n tokens.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg, K, V = cfg, cfg.model_dim, cfg.vocab_size
        dtype = getattr(torch, cfg.dtype)  # tables are in the precision of the activations, the rest in fp32
        is_tied, gate_inputs = cfg.tied_frac > 0, cfg.gate_inputs
        rows = V + -V % 64  # aligned for matmul tiles
        self.embed = nn.Embedding(rows if is_tied else V, K, dtype=dtype)
        self.embed.weight.data += cfg.embed_mean  # a part that all tokens share lets scores go by position alone
        num_values, width = len({*cfg.value_embed_layout} - {"."}), cfg.num_heads * cfg.head_dim
        tables = [torch.zeros(V, width, dtype=dtype) for _ in range(num_values)]
        self.value_embeds = nn.ModuleList(nn.Embedding.from_pretrained(table, freeze=False) for table in tables)
        table = torch.zeros(cfg.bigram_rows, K, dtype=dtype)
        self.bigram_embed = nn.Embedding.from_pretrained(table, freeze=False) if cfg.bigram_rows else None
        layouts = zip(cfg.attention_layout, cfg.value_embed_layout, strict=True)
        self.blocks = nn.ModuleList(Block(cfg, *letters) for letters in layouts)
        num_skips = len(cfg.skip_layout.replace(".", ""))
        self.skip_weights = nn.Parameter(torch.full((num_skips,), cfg.skip_init)) if num_skips else None
        self.skip_gate = nn.Parameter(torch.zeros(num_skips, gate_inputs)) if num_skips and gate_inputs else None
        self.smear_gate = nn.Parameter(torch.zeros(1, gate_inputs)) if gate_inputs else None
        self.smear_lambda = nn.Parameter(torch.tensor(0.0)) if gate_inputs else None
        self.backout_lambda = nn.Parameter(torch.tensor(0.5)) if cfg.backout_layer != "." else None
        head = torch.empty(rows, K, dtype=dtype if is_tied else torch.float32)
        self.lm_head = nn.Parameter(head.normal_(0, cfg.head_std))
        if is_tied:  # Adam keeps both equal until tied_frac
            self.embed.weight.data.copy_(head)
        self.rotary = Rotary(cfg)
        self.widest = [max(attention_windows(step, cfg)[i] for step in stage_starts(cfg)) for i in (0, 1)]
        if dtype == torch.float64:
            self.double()

    def forward(self, tokens: Tensor, targets: Tensor, windows: Tensor, weights: Tensor) -> Tensor:
        cfg, x, with_grads = self.cfg, self.features(tokens, windows), torch.is_grad_enabled()
        cap = (cfg.lm_head_softcap, cfg.lm_head_range, cfg.lm_head_shift)
        scales = (cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale) if cfg.lm_head_fp8 and with_grads else None
        return HeadLoss.apply(x, self.lm_head, targets, weights, cap, cfg.lm_head_slice, scales, with_grads)

    def features(self, tokens: Tensor, windows: Tensor) -> Tensor:
        """Return the head's input (T, K)."""
        cfg, masks = self.cfg, self.attention_masks(tokens, windows)
        value_embeds = {DIGITS[i]: embed(tokens) for i, embed in enumerate(self.value_embeds)}
        x = self.embed(tokens)
        pairs = self.bigram_embed(self.bigram_hashes(tokens)) if self.bigram_embed is not None else None
        if self.smear_gate is not None:  # some of the token before, of another document too: record 34 (@classiclarryd)
            x = x + self.smear_lambda * gates(x, self.smear_gate) * F.pad(x[:-1], (0, 0, 1, 0))
        x = x0 = norm(x)
        outputs: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            if (source := cfg.skip_layout[i]) != ".":  # U-Net: later layers add earlier ones (@brendanh0gan, record 11)
                n = i - cfg.skip_layout[:i].count(".")
                weight = self.skip_weights[n].sigmoid()  # record 32 (@bernard24)
                if self.skip_gate is not None:  # record 55 (@classiclarryd)
                    weight = weight * 2 * gates(x0, self.skip_gate[n : n + 1])
                x = x + weight * outputs[source]
            value_embed, mask = value_embeds.get(cfg.value_embed_layout[i]), masks.get(cfg.attention_layout[i])
            x = outputs[DIGITS[i]] = block(x, x0, pairs, value_embed, self.rotary, mask)
        if self.backout_lambda is not None:  # what served later layers only (@snimu, @classiclarryd, record 40)
            x = x - self.backout_lambda * outputs[cfg.backout_layer]
        return norm(x)

    def bigram_hashes(self, tokens: Tensor) -> Tensor:
        """Hash (previous token, token) to a row of the table, for tokens (T,) int32 (record 62, @classiclarryd).

        The first position has the last row. As in the record, the number of that row replaces the first token, so it
        goes into the second position's hash as well, where the product overflows int32 and wraps.
        """
        last = self.cfg.bigram_rows - 1
        tokens = F.pad(tokens[1:], (1, 0), value=last)
        return F.pad(((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % last, (1, 0), value=last)

    def attention_masks(self, tokens: Tensor, windows: Tensor) -> dict[str, BlockMask | GatheredMask]:
        """Return the masks by their letter in the layout: L with the long window, S and P with the short one."""
        cfg, on_cuda, masks = self.cfg, self.cfg.device == "cuda", {}
        doc_ids = (tokens == cfg.eot_token).cumsum(0, dtype=torch.int32)
        for letter, i in dict(L=0, S=1, P=1).items():
            if letter in cfg.attention_layout:
                ids = doc_ids.repeat_interleave(2) if letter == "P" else doc_ids  # two slots per token
                mask = document_block_mask(ids, windows[i], cfg.block_size, for_flex=on_cuda)
                max_blocks = 1 - (-self.widest[i] // cfg.block_size)
                masks[letter] = mask if on_cuda else GatheredMask(mask, max_blocks, self.embed.weight.dtype)
        return masks


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
# The place of this process among all, in torchrun's terms
Ranks = namedtuple("Ranks", "rank world_size local_rank local_world_size", defaults=(0, 1, 0, 1))


def launch(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective and return a function that waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


class ShardedOptimizer:
    """Update a group of parameters of one precision, every rank an equal share of their rows.

    A subclass defines update_shard(shard, grad, step, lr), which writes new values into the shard and may overwrite
    grad, and lists in `moments` what `state` keeps for the shard. Each parameter becomes a view of one buffer, which
    begins with a row. Zeros fill its last row.
    """

    moments: tuple[str, ...] = ()
    by_matrix = False  # a row is a matrix, or else 16 numbers, as kernels want addresses that are multiples of 16
    every = 1  # step once in so many steps, on the sum of their gradients

    def __init__(self, params: dict[str, nn.Parameter], lr: float, cfg: Hyperparameters, ranks: Ranks):
        self.names, self.params, self.lr, self.cfg, self.ranks = [*params], [*params.values()], lr, cfg, ranks
        assert len({p.dtype for p in self.params}) == 1, f"one precision per group: {self.names}"
        row = self.params[0].shape[-2:] if self.by_matrix else (16,)
        self.counts = counts = [-(-p.numel() // math.prod(row)) for p in self.params]  # rows of each, rounded up
        counts[-1] += -sum(counts) % ranks.world_size
        self.grads, self.values = (self.params[0].new_zeros(sum(counts), *row) for _ in range(2))
        self.grad_views = []
        for p, *parts in zip(self.params, self.grads.split(counts), self.values.split(counts), strict=True):
            grad, value = (part.flatten()[: p.numel()].view_as(p) for part in parts)
            self.grad_views.append(grad)
            p.data = value.copy_(p.detach())
        self.shard = self.share(self.values)
        self.grad = self.grads if ranks.world_size == 1 else torch.zeros_like(self.shard)
        self.state = {name: torch.zeros_like(self.grad) for name in self.moments}

    def share(self, buffer: Tensor) -> Tensor:
        return buffer.chunk(self.ranks.world_size)[self.ranks.rank]

    def phases(self, step: int) -> Iterator[None]:
        """Take a step. Pause while gradients travel, and while new values do: other groups compute meanwhile."""
        torch._foreach_copy_(self.grad_views, [p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        wait = launch(reduce_scatter, self.grad, self.grads)
        yield
        wait()
        if self.cfg.batch_sequences > 1:
            self.grad.div_(self.cfg.batch_sequences)  # gradients are sums over the sequences
        self.update_shard(self.shard, self.grad, step, self.lr * lr_multiplier(step, self.cfg))
        wait = launch(all_gather, self.values, self.shard)
        yield
        wait()


class Adam(ShardedOptimizer):
    """Step tables, head, scalars and gates by Adam (arXiv:1412.6980). settings: learning rate, decay, beta1, beta2.

    It steps every other time, on the sum of two gradients (record 39, @classiclarryd). With a weight decay, which is
    cautious (record 50, @roeeshenberg), its moments are in fp32 (record 56, @ChrisJMcCormick). Head and embedding begin
    equal, and stay so while both step on the sum of their gradients (records 51 and 53, @varunneal).
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: dict[str, nn.Parameter], settings: Sequence[float], cfg: Hyperparameters, ranks: Ranks):
        lr, self.decay, *self.betas = settings
        super().__init__(params, lr, cfg, ranks)
        self.every = cfg.adam_every
        if self.decay:  # not for nano's bf16 tables, which would step 5 times slower
            self.state = {name: m.to(torch.promote_types(m.dtype, torch.float32)) for name, m in self.state.items()}

    def phases(self, step: int) -> Iterator[None]:
        if "lm_head" in self.names and step - self.every < self.cfg.tied_frac * self.cfg.scheduled_steps:
            total = torch.stack([p.grad for p in self.params]).sum(0)
            for p in self.params:
                p.grad = total
        yield from super().phases(step)

    def update_shard(self, shard: Tensor, grad: Tensor, step: int, lr: float) -> None:
        (beta1, beta2), (m, v) = self.betas, self.state.values()
        count = step // self.every  # updates before this one
        eps = self.cfg.adam_eps / (1 - beta2 ** (count + 1)) ** 0.5  # the records add it before the bias correction
        options = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, amsgrad=False, maximize=False)
        counts = [torch.full((), count, dtype=torch.float32, device=grad.device)]
        new = shard.to(m.dtype, copy=self.decay > 0)
        adam([new], [grad.to(m.dtype)], [m], [v], [], counts, fused=True, **options)  # PyTorch's kernel
        if self.decay:  # cautious: only where the update, which has the sign of m, moves a weight towards 0
            new.addcmul_(shard, m * shard > 0, value=-self.decay * lr**2)
        shard.copy_(new)


POLAR_EXPRESS = [  # a, b, c of each Newton-Schulz step
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def zeropower_via_newtonschulz5(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate U V' for every matrix U S V' of G (n, rows, cols), in `dtype`. A zero matrix stays zero.

    Five steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon), with the
    coefficients of the Polar Express, which differ from step to step (arXiv:2505.16932; record 38, @varunneal).
    """
    X = (G / (1.02 * G.norm(dim=(-2, -1), keepdim=True) + 1e-6)).to(dtype)
    for a, b, c in POLAR_EXPRESS:  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


class Muon(ShardedOptimizer):
    """Step hidden matrices of one shape by MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024).

    With g the mean gradient of the step, in the lerp form of record 15:

        m <- momentum m + (1 - momentum) g
        u <- zeropower(momentum m + (1 - momentum) g)
        v <- beta2 v + (1 - beta2) mean(u^2)
        u <- u / sqrt(v), with the norm that u had
        p <- p - factor lr (u + decay lr p [u p >= 0])

    The means of u^2, which even out neurons, are over the columns of MLPs, one for each hidden unit, and else over
    rows, one for each output (NorMuon, arXiv:2510.05491; record 41, @li_zichong, and 48, @ChrisJMcCormick). The weight
    decay is cautious: only where the update moves a weight towards 0 (record 43, @varunneal).
    """

    moments = ("momentum_buffer",)
    by_matrix = True  # of the 22 in gpt2's MLPs, each of 8 ranks has 3, with padding

    def __init__(self, *args):
        super().__init__(*args)
        ns = zeropower_via_newtonschulz5
        self.orthogonalize = torch.compile(ns, fullgraph=True, dynamic=False) if self.cfg.compile else ns
        self.dim = -2 if "mlp" in self.names[0] else -1
        self.state["second_moment"] = self.grad.sum(self.dim, keepdim=True)  # zeros
        factors = dict(c_fc=self.cfg.c_fc_factor, c_proj=self.cfg.c_proj_factor)
        by_row = np.repeat([factors.get(name.partition("mlp.")[2], 1.0) for name in self.names], self.counts)
        self.factors = self.share(self.grads.new_tensor(by_row)[:, None, None])

    def update_shard(self, shard: Tensor, grad: Tensor, step: int, lr: float) -> None:
        cfg, momentum, (momentum_buffer, second_moment) = self.cfg, muon_momentum(step, self.cfg), self.state.values()
        momentum_buffer.lerp_(grad, 1 - momentum)
        update = self.orthogonalize(grad.lerp_(momentum_buffer, momentum), getattr(torch, cfg.dtype)).to(grad.dtype)
        second_moment.lerp_(update.square().mean(self.dim, keepdim=True), 1 - cfg.muon_beta2)
        even = update / second_moment.clamp(min=1e-10).sqrt()
        norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, even))
        update = even * (norms / new_norms.clamp(min=1e-10))
        if cfg.muon_decay:
            update.addcmul_(shard, update * shard >= 0, value=cfg.muon_decay * lr)
        shard.addcmul_(self.factors, update, value=-lr)


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Put every parameter into exactly one group, by a component of its name."""
    cfg, is_tied = gpt.cfg, gpt.cfg.tied_frac > 0
    table = [
        (Muon, cfg.muon_lr, "qkv_w c_fc c_proj"),
        (Adam, cfg.head_adam, "lm_head embed" if is_tied else "lm_head"),
        (Adam, cfg.embed_adam, "" if is_tied else "embed"),
        (Adam, cfg.table_adam, "value_embeds bigram_embed"),
        (Adam, cfg.scalar_adam, "lambdas resid_lambda bigram_lambda skip_weights smear_lambda backout_lambda"),
        (Adam, cfg.x0_adam, "x0_lambda"),
        (Adam, cfg.gate_adam, "gate value_gate"),
        (Adam, cfg.smear_adam, "smear_gate"),
        (Adam, cfg.skip_adam, "skip_gate"),
    ]
    groups: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in gpt.named_parameters():
        claims = [row for row in table if {*row[2].split()} & {*name.split(".")}]
        if len(claims) != 1:
            raise ValueError(f"each parameter needs exactly one group in build_optimizers: {name}")
        stack = (p.shape[-2:], "mlp" in name) if claims[0][0].by_matrix else None  # matrices of one shape
        groups.setdefault((*claims[0], stack), {})[name] = p
    optimizers = [kind(params, settings, cfg, ranks) for (kind, settings, *_), params in groups.items()]
    # Largest first: its update overlaps the other reduce-scatters, and only the smallest all-gather overlaps nothing
    return sorted(optimizers, key=lambda optimizer: -optimizer.grads.nbytes)


@torch.no_grad()
def step_optimizers(optimizers: Sequence[ShardedOptimizer], step: int) -> None:
    """Take a step on the gradients, summed over this rank's sequences, and clear those that were used."""
    due = [optimizer.phases(step) for optimizer in optimizers if (step + 1) % optimizer.every == 0]
    for _ in range(3):  # each phase in all groups, then the next one: communication overlaps compute
        for phases in due:
            next(phases, None)


# ---- Data: the tokens of every step are planned before the first one, the same for any number of processes -----------
# Sequences from one shard, the first of which begins at token `start`; `stamp` tells whether the file changes. Each
# sequence is an array (pieces, 2): where its pieces begin and end in the shard, the last target included
Batch = namedtuple("Batch", "path start stamp sequences")


def read_shard(path: str, dtype: str, offset: int, count: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return `count` numbers from byte `offset` on, fewer at the end, and the file's inode, size and time of change."""
    try:
        if not os.path.isfile(path):  # opening a pipe would wait forever
            raise OSError("not a regular file")
        numbers = np.fromfile(path, dtype, count, offset=offset)  # not mmap: a truncated mapped file raises SIGBUS
        status = os.stat(path)
        return numbers, (status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; ./run.sh --check says what to do") from None


def plan_batches(pattern: str, seq_lens: Sequence[int], num_sequences: int, cfg: Hyperparameters, max_doc_len: int = 0):
    """Plan a batch of `num_sequences` for each of seq_lens, shard after shard, and drop the rest of each shard.

    A shard is 256 int32 of header [20240520, 1, number of tokens, 0 ...], then uint16 tokens: the format of llm.c.
    Without `max_doc_len` it is one piece, and a sequence begins with the last target of the one before. With it, its
    documents are the pieces (record 26, @classiclarryd), only their first tokens are used (record 29, @varunneal), and
    each sequence begins with a document: the rest of the one before is dropped.
    """
    plan: list[Batch] = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        if len(plan) == len(seq_lens):
            break
        header, stamp = read_shard(path, "<i4", 0, 3)
        if header.tolist() != [20240520, 1, (stamp[1] - 1024) / 2]:
            raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
        begins, ends = np.array([0]), header[2:].astype(np.int64)
        if max_doc_len:
            begins = np.flatnonzero(read_shard(path, "<u2", 1024, ends[0])[0] == cfg.eot_token)
            ends = np.minimum(np.append(begins[1:], ends), begins + max_doc_len)
        before = np.append(0, np.cumsum(ends - begins))  # tokens in the pieces before each, and in all
        at, sequences = 0, []  # tokens before the next sequence; the sequences of the batch so far
        while len(plan) < len(seq_lens) and (end := at + seq_lens[len(plan)] + 1) <= before[-1]:
            first, last = np.searchsorted(before, at, "right") - 1, np.searchsorted(before, end)
            pieces = np.stack([begins[first:last], ends[first:last]], axis=1)
            pieces[0, 0] += at - before[first]
            pieces[-1, 1] -= before[last] - end
            sequences.append(pieces)
            at = before[last] if max_doc_len else end - 1
            if len(sequences) == num_sequences:
                plan.append(Batch(path, int(sequences[0][0, 0]), stamp, sequences))
                sequences = []
    if len(plan) < len(seq_lens):
        found = f"{pattern} in {os.getcwd()}: tokens for {len(plan)} batches, the run needs {len(seq_lens)}"
        raise UserError(f"{found}; ./run.sh gets a preset's data, data/pack_text.py packs text")
    return plan


def plan_data(cfg: Hyperparameters) -> dict[str, list[Batch]]:
    """Return the batches of training and those of validation, which are one sequence each."""
    train_lens = [train_seq_len(step, cfg) for step in range(cfg.num_iterations)]
    train = plan_batches(cfg.train_files, train_lens, cfg.batch_sequences, cfg, cfg.max_doc_len)
    val_lens = [cfg.val_seq_len] * (cfg.val_tokens // cfg.val_seq_len)
    return dict(train=train, val=plan_batches(cfg.val_files, val_lens, 1, cfg))


def read_tokens(batch: Batch, begin: int, count: int, vocab_size: int) -> np.ndarray:
    """Return `count` uint16 tokens of the batch's shard from `begin` on."""
    tokens, stamp = read_shard(batch.path, "<u2", 1024 + 2 * begin, count)
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
            tokens = read_tokens(batch, first, last - first, cfg.vocab_size)
            rows.append(np.concatenate([tokens[begin:end] for begin, end in pieces - first]))
        whole = torch.from_numpy(np.stack(rows))
        return whole.pin_memory() if device.type == "cuda" else whole

    with ThreadPoolExecutor(max_workers=1) as reader:  # ahead of the steps, from the first `next` on
        futures = (reader.submit(read, batch) for batch in plan)
        ahead = deque(islice(futures, 2))  # batches that are kept ready
        while ahead:
            tokens = ahead.popleft().result().to(device, non_blocking=True).to(torch.int32)
            ahead.extend(islice(futures, 1))
            yield [(row[:-1], row[1:].long()) for row in tokens]


# ---- Schedules: functions of the step and the configuration ----------------------------------------------------------
def stage_starts(cfg: Hyperparameters) -> list[int]:
    """Return the first step of each stage (equal parts of the scheduled steps, then the extension), and the end."""
    parts = len(cfg.window_tokens) - (cfg.extension_steps > 0)
    starts = [round(cfg.scheduled_steps * i / parts) for i in range(len(cfg.window_tokens))]
    return [*starts, cfg.num_iterations]


def stage_of(step: int, cfg: Hyperparameters) -> int:
    return sum(step >= start for start in stage_starts(cfg)[1:-1])


def train_seq_len(step: int, cfg: Hyperparameters) -> int:
    """Return the tokens of each sequence of a step: small batches first (record 46, @varunneal)."""
    return cfg.train_seq_len * cfg.stage_growth[stage_of(step, cfg)]


def lr_multiplier(step: int, cfg: Hyperparameters) -> float:
    """Return the factor on all learning rates: it rises with the batch, and falls linearly in the cooldown."""
    start = int(cfg.scheduled_steps - cfg.cooldown_frac * cfg.scheduled_steps)
    w = min(max(0.0, (cfg.scheduled_steps - step) / (cfg.scheduled_steps - start)), 1.0)
    return w * cfg.lr_factors[stage_of(step, cfg)] + (1 - w) * cfg.min_lr_frac


def next_weights(step: int, cfg: Hyperparameters) -> list[float]:
    """Return the weights of the losses of the next tokens: one less from stage to stage (record 53, @varunneal)."""
    stage = stage_of(step, cfg)
    start, end = stage_starts(cfg)[stage : stage + 2]
    *first, last = cfg.next_weights[: max(1, len(cfg.next_weights) - stage)]
    return [*first, last * (end - step) / max(1, end - start)] if first else [last]


def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Return Muon's momentum, which rises linearly in its warm-up and falls in its cooldown (record 39)."""
    warmup, cooldown = cfg.momentum_warmup_steps, cfg.momentum_cooldown_steps
    w = min(step / warmup if warmup else 1.0, (cfg.num_iterations - step) / cooldown if cooldown else 1.0, 1.0)
    return (1 - w) * cfg.momentum_warmup_start + w * cfg.muon_momentum


def attention_windows(step: int, cfg: Hyperparameters) -> tuple[int, int]:
    """Return how many tokens a long window reaches back, and a short one: half as many, in whole blocks."""
    window = cfg.window_tokens[stage_of(step, cfg)]
    is_last = step == cfg.num_iterations and cfg.final_window_tokens  # only the long one: record 33 (@classiclarryd)
    return cfg.final_window_tokens if is_last else window, window // (2 * cfg.block_size) * cfg.block_size


def rotary_frequencies(stage: int, cfg: Hyperparameters, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return a stage's rotary frequencies (head_dim / 4,) and factor on attention scores.

    YaRN (arXiv:2309.00071; record 31, @classiclarryd): when the long window grows from old to new tokens, frequencies
    of at most one turn in the old window shrink by old / new, those of `yarn_turns` or more stay, and the factor grows.
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
    """Hold model and optimizers, the same on all ranks from `warm_up` on, and take the steps of a run."""

    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        self.cfg, self.ranks, on_cuda = cfg, ranks, cfg.device == "cuda"
        self.device = torch.device("cuda", ranks.local_rank) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self.device)
        elif cfg.cpu_threads:
            torch.set_num_threads(max(1, cfg.cpu_threads // ranks.local_world_size))
        torch.manual_seed(cfg.seed)
        self.gpt = GPT(cfg).to(self.device)
        self.model = torch.compile(self.gpt, fullgraph=True, dynamic=False) if cfg.compile else self.gpt
        self.optimizers = build_optimizers(self.gpt, ranks)
        self.windows, self.stage = torch.zeros(2, dtype=torch.int32, device=self.device), 0
        self.weights = torch.ones(len(cfg.next_weights), dtype=self.gpt.rotary.scale.dtype, device=self.device)

    def set_schedules(self, step: int) -> None:
        """Overwrite windows, weights, rotary tables and attention scale with a step's. Nothing recompiles."""
        values = (*attention_windows(step, self.cfg), *next_weights(step, self.cfg))
        for scalar, value in zip((*self.windows, *self.weights), values, strict=False):
            scalar.fill_(value)
        if self.stage != stage_of(step, self.cfg):
            self.stage = stage_of(step, self.cfg)
            self.gpt.rotary.set_stage(self.stage, self.cfg)

    def train_step(self, step: int, sequences: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Take a step on this rank's sequences, and return the mean loss over those of all ranks."""
        losses, weights = [], self.weights[: len(next_weights(step, self.cfg))]
        self.set_schedules(step)
        for tokens, targets in sequences:
            loss = self.model(tokens, targets, self.windows, weights)
            # A sum over tokens, as in the record: gradients grow with train_seq_len. Only the optimizers divide by the
            # number of sequences: FP8 sees the same for any number of processes, and fewer gradients become 0
            (loss * self.cfg.loss_scale).backward()
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

    def warm_up(self, saved: dict[str, Tensor] | None = None) -> None:
        """Compile and run all graphs on made-up tokens: real ones wait for the clock. End in `saved` or as before."""
        is_needed = self.ranks.rank == 0 and not saved
        before = {name: t.to("cpu", copy=True) for name, t in self.state().items() if is_needed}

        def sequence(length: int) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(length + 1, device=self.device) % self.cfg.vocab_size
            return tokens[:-1].int(), tokens[1:]

        for start in stage_starts(self.cfg)[:-1]:
            count = self.cfg.batch_sequences // self.ranks.world_size
            for step in range(start, start + self.cfg.adam_every):
                self.train_step(step, [sequence(train_seq_len(step, self.cfg))] * count)
        with torch.no_grad():
            self.model(*sequence(self.cfg.val_seq_len), self.windows, torch.ones_like(self.weights[:1]))
        self.gpt.zero_grad(set_to_none=True)
        self.restore(saved or before)

    def state(self) -> dict[str, Tensor]:
        """Return all that a step changes: parameters, and the optimizers' moments, gathered from all ranks."""
        tensors = {name: p.detach() for name, p in self.gpt.named_parameters()}
        for optimizer in self.optimizers:
            for name, shard in optimizer.state.items():
                whole = shard.new_empty(len(optimizer.grads), *shard.shape[1:]) if self.ranks.world_size > 1 else shard
                launch(all_gather, whole, shard)()
                tensors[f"{optimizer.names[0]} {name}"] = whole
        return tensors

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Set all ranks to what `state` returned; only rank 0 needs `saved`."""
        whole = self.state()
        for name, tensor in whole.items():
            if self.ranks.rank == 0:
                tensor.copy_(saved[name])
            launch(dist.broadcast, tensor, 0)()
        for optimizer in self.optimizers:
            for name, shard in optimizer.state.items():
                shard.copy_(optimizer.share(whole[f"{optimizer.names[0]} {name}"]))


# ---- Run: ranks that agree, log, checkpoints -------------------------------------------------------------------------
def find_ranks() -> Ranks:
    """Return what torchrun's environment says, or a single process."""
    texts = [os.environ.get(name.upper(), str(default)) for name, default in Ranks._field_defaults.items()]
    ranks = Ranks(*(int(text) if text.isdecimal() and len(text) < 9 else -1 for text in texts))
    if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size):
        raise UserError(f"{', '.join(Ranks._fields).upper()} are {', '.join(texts)}: use torchrun, or unset them")
    return ranks


def agree(ranks: Ranks, problem: str, facts: dict) -> None:
    """Join the other ranks within a minute. Raise on all if one has a problem, or other facts than rank 0."""
    told = [(f"rank {ranks.rank} on {os.uname().nodename}: " * (ranks.world_size > 1), problem, facts)]
    if ranks.world_size > 1:
        try:  # through the store, as the ranks may not even agree on a device for collectives
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(minutes=1)))
            store.set(f"facts {ranks.rank}", json.dumps(told[0]))
            told = [json.loads(store.get(f"facts {rank}")) for rank in range(ranks.world_size)]
            store.set(f"seen {ranks.rank}", "")
            if ranks.rank == 0:  # with whom the store may end
                store.wait([f"seen {rank}" for rank in range(ranks.world_size)])
        except (RuntimeError, ValueError) as error:
            problem = problem or f"does not reach the others: {' '.join(str(error).split())[:200]}"
            told = [(f"rank {ranks.rank}: ", problem, facts)]
    for who, problem, its_facts in told:
        for name, value in told[0][2].items():
            if its_facts.get(name) != value:
                problem = problem or f"has {name} {its_facts.get(name)} instead of {value}: start all alike"
        if problem:  # one rank per node says it
            raise UserError(who + problem) if ranks.local_rank == 0 else SystemExit(2)
    if ranks.world_size > 1:
        backend = "nccl" if facts["--device"] == "cuda" else "gloo"
        patience = timedelta(minutes=30)  # one rank may compile while the others find the result in their caches
        store.set_timeout(patience)
        dist.init_process_group(backend, store=store, timeout=patience, rank=ranks.rank, world_size=ranks.world_size)


class RunLog:
    """Keep the clock and the curves of a run, write LOG_DIR/RUN_ID.txt and tell the console. Only rank 0 writes."""

    def __init__(self, cfg: Hyperparameters, is_main: bool, saved: dict):
        self.cfg, self.is_main, self.path = cfg, is_main, Path(cfg.log_dir) / f"{cfg.run_id}.txt"
        self.saved, self.curves = saved, saved["curves"]  # what a checkpoint holds, without the tensors
        self.pending = deque()  # losses on their way to the host
        self.device = getattr(torch, cfg.device)  # torch.cuda, or torch.cpu, where there is nothing to wait for
        try:
            self.file = open(os.devnull, "w")  # noqa: SIM115
            if is_main:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                goes_on = cfg.resume and not self.path.is_fifo()  # which would wait forever
                self.file = open(self.path, "a" if goes_on else "x", encoding="utf-8")  # noqa: SIM115
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # dies with the process
        except OSError as error:
            reason = "another process is writing it" if isinstance(error, BlockingIOError) else error
            raise UserError(f"log {self.path}: {reason}; choose another --run_id or --log_dir") from None
        self.tokens = [cfg.batch_sequences * train_seq_len(step, cfg) for step in range(cfg.num_iterations)]
        total, done = sum(self.tokens), sum(self.tokens[: saved["step"]])
        is_terminal = is_main and os.isatty(1) and os.isatty(2)
        self.bar = tqdm(None, None, total, disable=not is_terminal, initial=done, unit="tokens", unit_scale=True)

    def start_clock(self, ms: float) -> None:
        self.device.synchronize()
        self.started = time.perf_counter() - ms / 1000

    def read_clock(self) -> float:
        """Return the milliseconds of training so far, without validations and checkpoints."""
        return 1000 * (time.perf_counter() - self.started)

    def stop_clock(self) -> float:
        """Wait for the device, and return the milliseconds so far."""
        self.flush()
        self.device.synchronize()
        return self.read_clock()

    def write(self, text: str, console: bool = False) -> None:
        for stream in [self.file, sys.stdout] if console and self.is_main else [self.file]:
            try:
                with tqdm.external_write_mode(stream):  # above the bar
                    print(text, file=stream, flush=True)
            except OSError as error:  # the disk is full or the console has gone away: the rest goes nowhere
                for fd in [self.file.fileno()] if stream is self.file else [1, 2]:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
                self.write(f"{stream.name}: {error}: it ends here, the training goes on", console=True)

    def loss(self, step: int, loss: Tensor) -> None:
        """Send the loss of a step to the host without waiting, and log those that were sent 8 steps ago."""
        on_host, arrived = loss.to("cpu", non_blocking=True), self.device.Event()
        arrived.record()
        self.pending.append((step, on_host, arrived))
        self.flush(lag=8 if loss.is_cuda else 0)

    def flush(self, lag: int = 0) -> None:
        """Log the losses of all but the last `lag` steps; a pipe sees every 25th."""
        while len(self.pending) > lag:
            step, loss, arrived = self.pending.popleft()
            arrived.synchronize()
            self.point("train_loss", step, loss.item(), self.read_clock(), self.bar.disable and step % 25 == 0)
            self.bar.update(self.tokens[step - 1])

    def point(self, name: str, step: int, loss: float, ms: float, console: bool = True) -> None:
        """Log a loss, and add it to its curve."""
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} {loss:.4f} at step {step}: lower learning rates or change --seed")
        self.curves.setdefault(name, []).append((step, loss, ms))
        last = {name: f"{curve[-1][1]:.4f}" for name, curve in self.curves.items()}
        self.bar.set_postfix(step=step, **last, refresh=False)
        timing = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self.write(f"step:{step}/{self.cfg.num_iterations} {name}:{loss:.4f} {timing}", console)

    def save(self, suffix: str, state: dict, note: str) -> None:
        """Write `state` beside the log, whole or not at all, through to the disk, and say how it went."""
        path, part = self.path.with_suffix(suffix), self.path.with_suffix(f"{suffix}.part")
        try:
            if self.is_main:
                torch.save(state, part)
                with open(part, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(part, path)
            self.write(f"{path}: saved; {note}", console=True)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
            with contextlib.suppress(OSError):
                part.unlink()
            self.write(f"{path}: not saved: {str(error).partition(chr(10))[0]}", console=True)


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
    tokens = b"".join(read_tokens(b, b.start, cfg.val_seq_len, cfg.vocab_size).tobytes() for b in plans["val"])
    val_sha256 = hashlib.sha256(tokens).hexdigest()
    note = "" if cfg.val_sha256 in ("", val_sha256) else " (not the track's: do not compare losses)"
    return "\n".join([*lines, f"validation tokens: {cfg.val_tokens}, sha256 {val_sha256}{note}"])


def load(path: Path, *names: str) -> dict:
    """Return the `names` of what `save` wrote. Refuse a damaged file, by the checksums of its zip archive."""
    try:
        if not path.is_file() or zipfile.ZipFile(path).testzip():
            raise OSError("missing or damaged")
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {name: state[name] for name in names}
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path}: not a sound checkpoint: {str(error).partition(chr(10))[0][:100]}") from None


def train(trainer: Trainer, plans: dict[str, list[Batch]], log: RunLog) -> int:
    """Train to the end. Return the number of graphs that were compiled on the clock: 0, or a bug."""
    cfg, ranks, graphs = trainer.cfg, trainer.ranks, torch._dynamo.utils.counters["stats"]
    gc.collect()
    gc.disable()  # one collection in the middle of a run was measured at 0.6 s (nanochat issue 477)
    start = torch.tensor(log.saved["step"], device=trainer.device)
    launch(dist.all_reduce, start)()  # all begin together, at rank 0's step: the others have 0
    start, compiled = int(start), graphs["unique_graphs"]
    sequences = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    batches = read_batches(plans["train"][start:], sequences, cfg, trainer.device)
    log.start_clock(log.saved["elapsed"])
    for step in range(start, cfg.num_iterations + 1):
        is_last = step == cfg.num_iterations
        saves = cfg.checkpoint_every and step % cfg.checkpoint_every == 0 and start < step and not is_last
        validates = is_last or (cfg.val_loss_every and step % cfg.val_loss_every == 0)
        if saves or validates:
            ms = log.stop_clock()
            if saves:
                log.saved |= dict(step=step, elapsed=ms)
                log.save(".checkpoint", log.saved | dict(tensors=trainer.state()), f"step {step}")
            if validates:  # after saving: a run that resumes here validates, too
                log.point("val_loss", step, trainer.evaluate(step, plans["val"]), ms)
            log.start_clock(ms)
        if not is_last:
            log.loss(step + 1, trainer.train_step(step, next(batches)))
    return graphs["unique_graphs"] - compiled


def check_world(cfg: Hyperparameters, ranks: Ranks) -> None:
    """Refuse processes that do not divide a step's sequences or exceed the GPUs, and blocks that are wrong for GPUs."""
    fitting = [n for n in range(1, 1025) if cfg.batch_sequences % n == 0]
    if ranks.world_size not in fitting:
        raise UserError(f"{ranks.world_size} processes do not divide {cfg.batch_sequences} sequences: {fitting} do")
    if cfg.device == "cuda" and ranks.local_world_size > (gpus := torch.cuda.device_count()):
        raise UserError(f"{ranks.local_world_size} processes on a machine with {gpus} GPUs: lower --nproc_per_node")
    if cfg.device == "cuda" and cfg.block_size % 128:
        raise UserError(f"--block_size {cfg.block_size}: FlexAttention takes multiples of 128 on a GPU")


def prepare(argv: Sequence[str], ranks: Ranks) -> tuple[Hyperparameters, dict, dict]:
    """Do all that can fail on a rank alone. Return configuration, plans, and what a checkpoint holds."""
    given = parse_args(argv, ranks.world_size)
    saved = dict(run_id=given.run_id, seed=given.seed, facts={}, tensors={}, step=0, elapsed=0.0, curves={})
    if given.resume and ranks.rank == 0:  # the other ranks get step and tensors from rank 0
        names = glob.glob(f"{glob.escape(given.run_id) or '*'}.checkpoint", root_dir=given.log_dir)
        newest = sorted((Path(given.log_dir, name) for name in names), key=lambda path: path.lstat().st_mtime_ns)[-1:]
        for path in newest if given.resume == "latest" else [Path(given.resume)]:
            saved = load(path, *saved)
    cfg = resolve(dataclasses.replace(given, run_id=saved["run_id"], seed=saved["seed"]))
    check_world(cfg, ranks)
    plans = plan_data(cfg)
    data = b"".join(read_tokens(b, b.start, 16, cfg.vocab_size).tobytes() for b in plans["train"] + plans["val"])
    may_differ = ("run_id", "log_dir", "train_files", "val_files", "save_checkpoint", "checkpoint_every", "resume")
    facts = {f"--{name}": value for name, value in dataclasses.asdict(cfg).items() if name not in may_differ}
    facts |= {"--seed": given.seed, "processes": ranks.world_size, "data": hashlib.sha256(data).hexdigest()}
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    facts |= dict(script=script, torch=str(torch.__version__), numpy=np.__version__)
    for name, value in saved["facts"].items():
        if facts.get(name) != value:
            raise UserError(f"the checkpoint has {name} {value} instead of {facts.get(name)}: resume with the same")
    return cfg, plans, saved | dict(facts=facts, run_id=cfg.run_id, seed=cfg.seed)


def peak_memory_mib(device: torch.device) -> int:
    """Return the most memory that torch allocated on the GPU, or that the whole process held on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def report(log: RunLog, plans: dict[str, list[Batch]], trainer: Trainer, recompiles: int) -> dict:
    """Log the summary, write the result and the model, and say what to try next."""
    cfg, path, (_, val_loss, train_time) = trainer.cfg, log.path, log.curves["val_loss"][-1]
    ms, peak = np.diff([0.0, *(ms for _, _, ms in log.curves["train_loss"])]), peak_memory_mib(trainer.device)
    result = dict(val_loss=val_loss, target_loss=cfg.target_loss, train_time_ms=train_time, log=str(path))
    result |= dict(num_iterations=cfg.num_iterations, seed=cfg.seed, peak_memory_mib=peak, recompiles=recompiles)
    result |= dict(val_curve=log.curves["val_loss"], train_curve=log.curves["train_loss"])
    for name, batch in dict(first=plans["train"][0], last=plans["train"][-1]).items():
        log.write(f"{name} batch: {batch.path} position {batch.start}")
    log.write(f"recompiles after the clock started: {recompiles}", console=recompiles > 0)
    median, p99 = np.percentile(ms, [50, 99])
    log.write(f"step time: median {median:.2f}ms p99 {p99:.2f}ms", console=p99 > 1.5 * median)
    log.write(f"peak memory: {peak} MiB", console=True)
    if cfg.save_checkpoint:
        model = dict(configuration=dataclasses.asdict(cfg), model=trainer.gpt.state_dict())
        log.save(".pt", model, "next: python sample.py")
    with contextlib.suppress(OSError):  # of a full disk: the console has told it all
        if log.is_main:
            path.with_suffix(".json").write_text(json.dumps(result) + "\n")
    reached = "reached" if val_loss <= cfg.target_loss else "not reached"
    verdict = f"; target {cfg.target_loss} {reached}" if cfg.target_loss else ""
    log.write(f"val_loss {val_loss:.4f} after {train_time / 1000:.2f} s{verdict}; log: {path}", console=True)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. Raise UserError, FloatingPointError or KeyboardInterrupt."""
    argv, ranks = sys.argv[1:] if argv is None else list(argv), find_ranks()
    source = Path(__file__).read_text(encoding="utf-8")  # before anybody edits it
    if ranks.world_size > 1 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG to SIGTERM: no rank outlives its launcher
    try:
        cfg, plans, saved = prepare(argv, ranks)
        log = RunLog(cfg, ranks.rank == 0, saved)
    except UserError as error:
        agree(ranks, str(error), {})  # raises, on all ranks
    agree(ranks, "", saved["facts"])
    try:
        trainer = Trainer(cfg, ranks)
        if saved["step"]:
            log.write(f"resumed at step {saved['step']}, log: {log.path}, flags: {json.dumps(argv)}", console=True)
        else:
            log.write(f"{source}\n{'=' * 100}\n{describe(cfg, ranks, plans) if log.is_main else ''}")
            log.write(f"flags: {json.dumps(argv)}\nconfiguration: {json.dumps(dataclasses.asdict(cfg))}\n{'=' * 100}")
            log.write(f"seed: {cfg.seed}, log: {log.path}", console=True)
        trainer.warm_up(saved.pop("tensors"))
        return report(log, plans, trainer, train(trainer, plans, log))
    except BaseException as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        log.write(f"stopped: {reason}")
        if "out of memory" in str(error) or "allocate memory" in str(error):
            advice = "lower --train_seq_len, --val_seq_len, --lm_head_slice or the size of the model"
            raise UserError(f"{reason}: {advice}") from None
        raise
    finally:
        gc.enable()
        log.bar.close()
        log.file.close()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    try:
        main()
    except (UserError, FloatingPointError, KeyboardInterrupt) as error:
        print(f"train_gpt.py: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 3 if isinstance(error, FloatingPointError) else 130)
    if dist.is_initialized():
        dist.destroy_process_group()
