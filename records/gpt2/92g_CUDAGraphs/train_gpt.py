"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one command
    ./run.sh --preset nano                                    a small model on a CPU, in seconds
    torchrun --standalone --nproc_per_node=8 train_gpt.py     what run.sh starts on one 8xH100 node

The preset gpt2 has the mathematics of record 92 of the NanoGPT speedrun (ANVIL2 by Deven Pietrzak, 2026-08-30,
https://github.com/KellerJordan/modded-nanogpt), and a pointer, proposal 379 (CPLM by Nathan Godey): 1,050 steps. nano
has one layer, whose initial weights make it copy what followed earlier tokens in similar contexts.
docs/tour.md explains all of it; `python -m speedrun site` puts it beside the code.

"Record n" credits the record in which an idea first appeared; a number without a reason is the record's. "Quirk" marks
what is kept only to reproduce a record's numbers. Shapes: T tokens, H heads, D dimensions per head, K model width,
V rows of the head (the vocabulary with padding), C sampled classes of the softmax, G kinds of n-grams.
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
import threading
import time
import traceback
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache
from itertools import accumulate, chain, islice, pairwise, repeat
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TextIO, get_args, get_origin

# Libraries read these when they load. OpenMP's threads spin while they wait for each other: by default so long that a
# step of nano takes up to 1.6 s instead of 0.04 where another program keeps a core. Segments of GPU memory that grow
# waste less of it
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
    from torch.utils._pytree import tree_leaves, tree_map_only
    from tqdm import tqdm
except KeyboardInterrupt:  # these imports take seconds
    sys.exit(130)

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch comes without it on Macs and machines without a GPU
    triton = None


class UserError(Exception):
    """An error that the user can mend: a flag, a file, what the machine lacks. One line, and exit code 2."""

    code = 2


class AlreadyComplete(UserError):
    """The end of a run whose result is there already: a job that was started again has not failed."""

    code = 0


ONE_LINE_ERRORS = (UserError, FloatingPointError, KeyboardInterrupt)  # all others have Python's traceback


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that an error ends."""
    if isinstance(error, UserError):
        return error.code
    return {FloatingPointError: 3, KeyboardInterrupt: 130}.get(type(error), 1)


def error_line(error: BaseException) -> str:
    """Return what an error says in one line."""
    if isinstance(error, ONE_LINE_ERRORS):
        return str(error) or "interrupted"
    return f"{type(error).__name__}: {error}"


# ---- Configuration: layers, stages, groups of parameters, EMAs are rows of tables; most other numbers are flags ------
class Attention(NamedTuple):
    """A kind of attention."""

    window: str  # the kind of window, see `Stage`
    heads_per_pair: int = 1  # 2: pairs of heads attend as one, in a sequence of twice the length, and share keys
    rotary: bool = True  # queries and keys are rotated by their positions; if not, both begin with equal weights
    key_offset: float = 0.0  # this fraction of a key, its last dimensions, comes from the token before


ATTENTION = {
    "long": Attention("long", key_offset=0.5),  # record 49
    "short": Attention("short"),
    "paired": Attention("short", heads_per_pair=2),  # record 58 (@classiclarryd)
    # No positions (NoPE). The weights of queries and keys begin equal, and a key is computed from the token before: so
    # a token attends to what followed earlier tokens like it
    "nope": Attention("long", rotary=False, key_offset=1.0),
}


class Layer(NamedTuple):
    """A layer: `Block` has its formula. attn_input, skip, mudd and head_mix name earlier layers, counted from 0."""

    attention: str | None  # one of ATTENTION
    half_qk: bool = False  # queries and keys are half as wide
    half_v: bool = False  # values are half as wide
    value_embed: bool = False  # values add a row of a table, by the token
    shift: tuple[int, ...] = ()  # token shift: equal groups of channels come from so many tokens before
    attn_input: int | None = None  # attention reads the output of this layer instead of the residual stream
    gate_net: bool = False  # a network reads the residual stream here and makes gates, up to the next such layer
    # The next six have gates: `MAKERS` says who makes them
    xsa: bool = False  # heads subtract part of the token's own value
    head_gate: bool = False  # the output of each head is gated
    x0: bool = False  # the embedding is added to the residual stream
    ngram_input: bool = False  # the embeddings of the n-grams that end with the token are added to the layer's input
    ngram: bool = False  # the same embeddings are added after attention
    skip: int | None = None  # the output of this layer is added to the residual stream (U-Net)
    mlps: int = 1  # all with the same input
    # MUDD: a network computes two weighted sums of three streams: the input of layer 0, the output of the layer named
    # here, and the residual stream. One is added to the residual stream, one to the values. The network also makes most
    # gates of this layer (`MAKERS`)
    mudd: int | None = None
    # Last layer only: the head reads the residual stream plus a weighted sum of the input of layer 0, the outputs of
    # the layers named here, all value embeddings, and the inputs of this layer's MLPs and attention
    head_mix: tuple[int, ...] = ()


GPT2_LAYERS = (
    Layer("paired", half_qk=True, gate_net=True, x0=True, ngram_input=True),  # 0
    Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True),  # 1
    Layer("paired", half_qk=True, value_embed=True, x0=True),  # 2
    Layer("long", xsa=True, head_gate=True),  # 3
    Layer(None, gate_net=True, x0=True, ngram=True),  # 4
    Layer("paired", half_qk=True, x0=True, ngram=True),  # 5
    Layer(None, skip=3),  # 6
    Layer(None, x0=True, mlps=0),  # 7
    Layer("short", half_qk=True, half_v=True, value_embed=True, mlps=2),  # 8
    Layer(None, ngram=True),  # 9
    Layer("long", value_embed=True, attn_input=7, head_gate=True, x0=True, ngram=True, mudd=7, head_mix=(7, 9, 3)),
)
NANO_LAYERS = (Layer("nope", value_embed=True, ngram_input=True, shift=(0, 0, 0, 1, 1, 2, 3, 4)),)


class Stage(NamedTuple):
    """A part of the training steps. Error messages count stages from 1."""

    duration: float  # fraction of `base_steps`: num_iterations less the extra_steps of all stages
    batch: float  # factor on batch_tokens and train_seq_len: small batches first (record 46, @varunneal)
    max_doc_len: int  # documents are cut to this many tokens; 0 in all stages: one stream, nothing is cut
    windows: dict[str, int]  # window size by kind, in positions: paired heads have two a token
    extra_steps: int = 0  # beyond the duration; those of the last stage run at the lowest learning rates
    lr: float = 1.0  # factor on learning rates before the cooldown, which leads from it to min_lr_frac
    # Multi-token prediction (record 53, @varunneal): weights of the losses of tokens +1, +2, ..., at the first step and
    # after the last
    mtp: tuple[tuple[float, float], ...] = ((1, 1),)
    # Weight of the loss of predicting the next token's prefix, the longest other token that the next one begins with
    # (record 88, @jvarho). The i-th value holds in the i-th of len(prefix) equal parts of the stage
    prefix: tuple[float, ...] = (0,)
    # Tokens in the sampled softmax of a sequence (record 92), by parts of the stage likewise; 0: all, as at the end
    sampled_classes: tuple[int, ...] = (0,)


DURATIONS = [duration / 0.9994 for duration in (0.2854, 0.3209, 0.3931)]  # record 92's add up to 0.9994
TAPER = 0.06  # record 92's: the last 6% of the base steps, cut from the third duration, take 5/6 of its batch
GPT2_STAGES = (
    Stage(
        DURATIONS[0],
        batch=1,
        max_doc_len=896,
        windows=dict(short=128, long=384),
        mtp=((1, 1), (0.5, 0.5), (0.25, 0)),
        prefix=(0.25,),
        sampled_classes=(10240,),
    ),
    Stage(
        DURATIONS[1],
        batch=2,
        max_doc_len=2048,
        windows=dict(short=384, long=896),
        lr=1.52,
        mtp=((1, 1), (0.5, 0)),
        prefix=(0.20, 0.15, 0.10, 0.05),
        sampled_classes=(10240,),
    ),
    Stage(
        DURATIONS[2] - TAPER,
        batch=3,
        max_doc_len=3072,
        windows=dict(short=640, long=1408),
        extra_steps=52,
        lr=1.73,
        sampled_classes=(14336, 14336, 24576),
    ),
    # Learning rates scale with the square root of the batch
    Stage(TAPER, batch=2.5, max_doc_len=3072, windows=dict(short=640, long=1408), lr=1.73 * (2.5 / 3) ** 0.5),
    Stage(0, batch=1, max_doc_len=3072, windows=dict(short=768, long=1664), extra_steps=20),
)
NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)


class Group(NamedTuple):
    """A group of parameters, and how it is updated."""

    name: str
    optimizer: str  # Muon, Adam, or RowAdam: of `NgramTable`, which is no parameter
    patterns: str  # globs of parameters, separated by spaces
    lr: float = 0.0  # Adam: learning rate
    lr_mul: float = 1.0  # Muon: factor on muon_lr
    # Cautious weight decay. Adam subtracts decay * lr^2 of a value, Muon decay * lr_mul * muon_lr^2, as scheduled
    decay: float = 0.0
    beta1: float = 0.9  # Adam: decay of the mean of gradients; Muon has muon_momentum instead
    beta2: float = 0.99  # decay of the mean of squares: of gradients in Adam, of updates in Muon
    # Steps from one update to the next, which has their accumulated gradients: before long_interval_from, and after
    update_interval: tuple[int, int] = (2, 2)
    keep_norm: bool = True  # blending the EMAs in at the end keeps the norm
    # Of tables in bf16: gradients are accumulated and reduced in fp16 instead of fp32, in half the bytes. Above 6e-5 it
    # has three bits more than bf16; sums above 65,504 would overflow
    fp16_sums: bool = False


EVERY_STEP = (1, 1)
MLP_LR_MUL = (2816 / 768) ** 0.5  # sqrt(mlp_dim / model_dim)
# Record 92's variant of Muon; `schedule_muon` has its other numbers
ANVIL = dict(decay=2.25, beta2=0.9, update_interval=EVERY_STEP)
# Tables of which a sequence reads few rows
SPARSE = dict(lr=0.56, decay=0.025, beta2=0.95, update_interval=(2, 4), fp16_sums=True)
GPT2_GROUPS = (
    Group("attention", "Muon", "*.qk_w *.v_w *.attn.c_proj", **ANVIL),
    Group("mlp_up", "Muon", "*.c_fc", lr_mul=MLP_LR_MUL, **ANVIL),
    Group("mlp_down", "Muon", "*.mlps.*.c_proj", lr_mul=2 * MLP_LR_MUL, **ANVIL),
    Group("lm_head", "Adam", "lm_head.weight", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group("embed", "Adam", "embed.weight", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group("value_embeds", "Adam", "value_embeds.*", beta1=0.75, keep_norm=False, **SPARSE),
    Group("ngrams", "RowAdam", "ngrams", beta1=0.0, **SPARSE),
    Group("lambdas", "Adam", "*.attn.lambdas *.skip_lambda smear_lambda", lr=0.04),
    Group("resid_gates", "Adam", "*.gates.resid", lr=0.04, beta2=0.95),
    Group("post_gates", "Adam", "*.gates.post", lr=0.008, beta2=0.95),
    Group("gate_nets", "Adam", "gate_nets.*.w?", lr=8e-4, decay=0.005),
    Group("gate_net_biases", "Adam", "gate_nets.*.b2 gate_scale", lr=8e-4),
    Group("mudd_nets", "Adam", "*.mudd_net.w? head_net.w?*", lr=0.002, decay=0.005),
    Group("mudd_net_biases", "Adam", "*.mudd_net.b2 head_net.b2", lr=0.002),
    Group("value_gates", "Adam", "*.value_gate", lr=0.008, decay=0.005),
    Group("smear_gate", "Adam", "smear_gate", lr=8e-5),
    Group("pointer", "Adam", "pointer.weight", lr=0.008, decay=0.005),
    Group("pointer_scalars", "Adam", "pointer.sink pointer.gain", lr=0.008),
)
NANO_GROUPS = tuple(
    group._replace(update_interval=EVERY_STEP)
    for group in (
        Group("matrices", "Muon", "*.qk_w *.v_w *.c_proj", beta2=0.95),
        Group("mlp_up", "Muon", "*.c_fc", lr_mul=2.0, beta2=0.95),
        Group("lm_head", "Adam", "lm_head.weight", lr=0.015, beta1=0.5, beta2=0.9),
        Group("embeds", "Adam", "embed.weight value_embeds.*", lr=0.18, beta1=0.5, beta2=0.9),
        Group("ngrams", "RowAdam", "ngrams", lr=0.25, beta1=0.0, beta2=0.9, fp16_sums=True),
        Group("lambdas", "Adam", "*.attn.lambdas *.gates.*", lr=0.04, beta1=0.5, beta2=0.9),
    )
)


class EMA(NamedTuple):
    """A moving average of parameters over the last steps, and its weight in the final parameters."""

    patterns: str  # globs of parameters
    window: int  # last steps in which it is updated: ema += rate * (value - ema); the first update copies
    rate: float
    blend: float  # after the last step, row after row: value += blend * (ema - value)
    interval: int = 4  # steps between updates
    offset: int = 1  # a step after which it is updated; -1 counts from the end: the last one
    at_end: int = 0  # it is also updated after each of this many last steps

    def rate_at(self, step: int, num_iterations: int) -> float:
        """Return the rate of the update after a step; 0: none."""
        start = max(0, num_iterations - self.window)
        first = self.offset % num_iterations
        is_due = (step - first) % self.interval == 0 or step >= num_iterations - self.at_end
        if step < start or not is_due:
            return 0.0
        return 1.0 if step < start + self.interval else self.rate


VO_MLP = "*.v_w *.attn.c_proj *.mlps.*"
# Record 92's rates, 2 / (n + 1): an average reaches back about n updates, 298, 74 and 25.5
SLOW, FAST, FASTEST = 2 / 299, 2 / 75, 4 / 53
GPT2_EMAS = (
    EMA("lm_head.weight embed.weight", window=298, rate=SLOW, blend=0.65, interval=1),
    EMA(VO_MLP, window=250, rate=FASTEST, blend=1.0, offset=-1),
    EMA("value_embeds.*", window=250, rate=FASTEST, blend=1.0, offset=3),
    EMA("*.qk_w", window=298, rate=FAST, blend=0.55, at_end=2),
    # Blends apply in order, and the second row has replaced these values already: record 92 lowers this one by 0.2007
    EMA(VO_MLP, window=298, rate=FAST, blend=0.55 - 0.2007, at_end=2),
)


TABLES = dict(layers=Layer, stages=Stage, groups=Group, emas=EMA)


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The configuration of a run, by default gpt2's. Every field but the four tables is a flag."""

    layers: tuple[Layer, ...] = GPT2_LAYERS
    stages: tuple[Stage, ...] = GPT2_STAGES
    groups: tuple[Group, ...] = GPT2_GROUPS
    emas: tuple[EMA, ...] = GPT2_EMAS
    # Data. Shards are read in sorted order; the log says so if the validation tokens do not have val_sha256
    preset: str = "gpt2"  # whose values the other flags change; by default gpt2 on a GPU and nano elsewhere
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # training shards: a glob
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # validation shards: a glob
    val_tokens: int = 10_485_760  # validation tokens, a multiple of val_seq_len
    val_sha256: str = ""  # SHA-256 of the validation tokens; empty, as FineWeb is not packed here: not compared
    target_loss: float = 3.28  # validation loss to reach; 0: none
    vocab_size: int = 50257  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: int = 50256  # end of text, opens every document
    prefix_file: str = "data/gpt2_prefixes.bin"  # the longest token that begins each token; empty: no such loss
    canon_file: str = "data/gpt2_canonical.bin"  # which tokens the tokenizer never puts behind each; empty: not used
    # Training
    num_iterations: int = 1050  # steps, `extra_steps` included
    val_loss_every: int = 250  # steps between validations; 0: only after the last step
    batch_tokens: int = 8 * 16 * 1024  # tokens a step where a stage's batch is 1, a multiple of train_seq_len
    train_seq_len: int = 16 * 1024  # tokens a training sequence there, a multiple of block_size
    val_seq_len: int = 256 * 1024  # tokens of a validation sequence, a multiple of block_size
    max_attn_len: int = 2560  # in training longer documents are split for attention, into parts of this many tokens
    final_window: int = 2560  # long window in the last validation; 0: that of the last stage
    cooldown_frac: float = 0.8  # last part of the scheduled steps, those without the last stage's extra_steps
    min_lr_frac: float = 0.3  # factor on learning rates at the end of the cooldown and later
    tied_frac: float = 1.0  # first part of the scheduled steps, in which embedding and head are one table; 0: none
    # Factor on the loss in the backward pass. It is not divided out: but for eps and what FP8 rounds, updates ignore it
    loss_scale: float = 1.0
    # Model
    model_dim: int = 768  # width of the residual stream
    num_heads: int = 6  # attention heads, a multiple of heads_per_matrix
    head_dim: int = 128  # dimensions per head, a multiple of 4, and with layers_fp8 a power of 2
    block_size: int = 128  # tokens per block of the attention mask
    mlp_dim: int = 2816  # hidden units of an MLP
    gate_net_dim: int = 64  # hidden units of a gate network
    attn_scale: float = 0.085  # factor on the scores of long attention in the first stage, see `Window.extended`
    short_attn_scale: float = 0.13  # the same for other kinds of windows
    resid_lambda_init: float = 1.1**0.5  # initial factor on the residual stream
    mix_groups: int = 12  # groups of channels that are weighted separately in the head's mix
    ngram_rows: int = 84_602_880  # rows of the hashed table for n-grams of tokens, a multiple of ngram_order - 1
    ngram_order: int = 3  # longest n-grams that have rows
    ngram_lambda_init: float = 0.05  # initial factor on the embeddings of n-grams in each layer
    sign_rows: int = 8192  # rows of the table of signs, which tell n-grams that share a row apart; 0: no table
    value_embed_std: float = 0.01  # initial standard deviation of the value embeddings
    value_gate_inputs: int = 12  # inputs of value gates, half from x, half from the value embedding; 0: no gates
    smear_gate_inputs: int = 12  # input channels of the smear gate; 0: no smear
    # Head
    head_from_values: bool = False  # the head begins as the last layer's values, and so copies what is attended
    head_std: float = 0.005  # initial standard deviation of the head, and of the embedding that is tied to it
    lm_head_softcap: float = 15.0  # c in the softcap r sigmoid((z + d) 2 / c) of the logits z
    softcap_range: float = 23.0  # r in the softcap
    softcap_shift: float = 5.0  # d in the softcap
    pointer_dim: int = 128  # dimensions of the pointer's queries and keys; 0: no pointer
    pointer_block: int = 2048  # the pointer sees its own block of this many tokens, and the block before
    val_pointer_block: int = 8192  # the same in validation
    # Tokens whose logits exist at a time, in training. Without a pointer take 8192: they are fp32 then
    logits_chunk: int = 49152
    val_logits_chunk: int = 8192  # the same in validation, where they are in fp32
    lm_head_fp8: bool = True  # train the head in FP8 where the GPU can; validation never uses it
    layers_fp8: bool = True  # the same for MLPs, and for queries, keys and values
    # Optimizers
    muon_lr: float = 0.023  # learning rate of Muon, times the factors of stage and group
    muon_momentum: float = 0.93  # momentum after its warm-up
    momentum_warmup_steps: int = 240  # steps at the start, over which momentum rises from 0.85
    momentum_cooldown_steps: int = 50  # steps at the end, over which momentum falls to 0.85
    heads_per_matrix: int = 2  # heads whose queries, or keys, are one matrix for Muon (record 80, @samacqua)
    slow_momentum_from: int = 514  # step from which Muon's slow momentum takes part in updates; 0: never
    long_interval_from: int = 336  # step from which the second number of a group's `update_interval` applies
    adam_eps: float = 1e-10  # added to the root of the second moment
    # Machine
    seed: int | None = None  # random seed; by default a fresh one, printed and logged
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where torch sees a GPU
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; by default on CUDA only
    cuda_graphs: bool = True  # replay compiled steps as CUDA graphs
    cpu_threads: int = 0  # CPU threads of all processes together; 0: torch's choice
    # Output
    log_dir: str = "logs"  # folder of the logs
    run_id: str = ""  # name of the log, without folders; by default preset, time and seed
    save_checkpoint: bool = False  # write the final model, for sample.py, to LOG_DIR/RUN_ID.pt
    checkpoint_every: int = 0  # steps between checkpoints to resume from, off the clock; 0: none
    resume: Literal["", "latest"] = ""  # latest: the newest run in log_dir that has not ended goes on, or run_id

    def __post_init__(self):
        """Refuse what would train something else without an error. Other mistakes fail before the first step."""
        for name, row in TABLES.items():  # sample.py reads them from JSON, where they are lists
            object.__setattr__(self, name, tuple(row(*values) for values in getattr(self, name)))
        self.check_rows()
        self.check_numbers()

    def require(self, name: str, holds: bool, expected: str):
        """Raise UserError unless a field is as expected."""
        if not holds:
            what = f"`{name}`" if name in TABLES else f"--{name} {getattr(self, name)}"
            raise UserError(f"{what}: expected {expected}")

    def check_numbers(self):
        """Check the flags."""
        for name, value in vars(self).items():
            if isinstance(value, float | int):  # no comparison holds for NaN
                self.require(name, 0 <= value < 2**31, "a number from 0 to 2**31 - 1")
        positive = """num_iterations batch_tokens train_seq_len val_tokens val_seq_len max_attn_len block_size
            vocab_size ngram_rows pointer_block val_pointer_block heads_per_matrix"""
        for name in positive.split():
            self.require(name, getattr(self, name) > 0, "1 or more")
        for name in "cooldown_frac min_lr_frac tied_frac muon_momentum".split():
            self.require(name, getattr(self, name) <= 1, "a number from 0 to 1")
        self.require("eot_token", self.eot_token < self.vocab_size, "a token below vocab_size")
        self.require("ngram_order", self.ngram_order in (2, 3), "2 or 3")
        units = dict(
            batch_tokens=self.train_seq_len,
            val_tokens=self.val_seq_len,
            val_seq_len=self.block_size,
            ngram_rows=self.ngram_order - 1,
            checkpoint_every=self.common_interval,
            long_interval_from=self.common_interval,
            num_heads=self.heads_per_matrix,
        )
        for name, unit in units.items():
            self.require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        self.require("ngram_rows", self.ngram_rows >= 2 * (self.ngram_order - 1), "2 or more for each kind of n-grams")
        self.require("run_id", Path(self.run_id).name == self.run_id, "a name, without folders")

    def check_rows(self):
        """Check the tables. The lengths of sequences, which stages and flags make, are checked in `plan_run`."""
        self.require("num_iterations", self.base_steps >= 0, "at least the extra_steps of all stages")
        self.require("emas", all(row.window >= row.interval for row in self.emas), "window >= interval in every row")
        whole = sum(stage.duration for stage in self.stages)
        self.require("stages", math.isclose(whole, 1), "durations that add up to 1")
        cuts = {stage.max_doc_len > 0 for stage in self.stages}
        self.require("stages", len(cuts) == 1, "max_doc_len 0 in all or in none")
        attentions = {layer.attention for layer in self.layers} - {None}
        self.require("layers", attentions <= ATTENTION.keys(), f"attention of {', '.join(ATTENTION)}")
        kinds = {ATTENTION[attention].window for attention in attentions}
        has_windows = all(kinds <= stage.windows.keys() == self.stages[0].windows.keys() for stage in self.stages)
        self.require(
            "stages", has_windows, f"in each the same windows, those for {', '.join(sorted(kinds))} among them"
        )
        is_complete = all(stage.mtp and stage.prefix and stage.sampled_classes for stage in self.stages)
        self.require("stages", is_complete, "something in mtp, prefix and sampled_classes of each")
        # Settings that would be ignored
        names = [row.name for row in self.groups]
        self.require("groups", len({*names}) == len(names), "a name of its own in each row")
        self.require("groups", all(min(row.update_interval) > 0 for row in self.groups), "update intervals from 1")
        for row in self.groups:
            is_row_adam = row.optimizer == "RowAdam"
            self.require(
                "groups", ("ngrams" in row.patterns.split()) == is_row_adam, "RowAdam for ngrams, and no other"
            )
            self.require("groups", row.beta1 == 0 or not is_row_adam, f"beta1=0 for {row.name}")
            self.require("groups", row.lr == 0 or row.optimizer != "Muon", f"lr_mul instead of lr for {row.name}")
            self.require("groups", row.lr > 0 or row.optimizer == "Muon", f"an lr for {row.name}")
        for number, layer in enumerate(self.layers):
            of_attention = layer.xsa or layer.head_gate or layer.attn_input is not None or layer.mudd is not None
            unread = {
                "xsa, head_gate, attn_input or mudd without attention": layer.attention is None and of_attention,
                "value_embed without attention or a head_mix": layer.value_embed
                and layer.attention is None
                and not self.layers[-1].head_mix,
                "head_mix before the last layer": layer.head_mix and number < len(self.layers) - 1,
                "ngram beside ngram_input": layer.ngram and layer.ngram_input,
            }
            for what, is_there in unread.items():
                self.require("layers", not is_there, f"no {what}, as in layer {number}")
            read = [layer.attn_input, layer.skip, layer.mudd, *layer.head_mix]
            is_earlier = all(other is None or 0 <= other < number for other in read)
            self.require("layers", is_earlier, f"layer {number} to name earlier ones, from 0")

    @property
    def batch_sequences(self) -> int:
        """Return the sequences of a step, of all ranks."""
        return self.batch_tokens // self.train_seq_len

    @property
    def base_steps(self) -> int:
        """Return the steps that the stages share."""
        return self.num_iterations - sum(stage.extra_steps for stage in self.stages)

    @property
    def scheduled_steps(self) -> int:
        """Return the steps to the end of the cooldown."""
        return self.num_iterations - self.stages[-1].extra_steps

    @property
    def common_interval(self) -> int:
        """Return the steps after which all groups are updated."""
        return math.lcm(*chain(*(group.update_interval for group in self.groups)))

    @property
    def copy_token(self) -> int:
        """Return the row of the head that stands for a copy, behind those of the tokens."""
        return self.vocab_size

    @property
    def padded_vocab(self) -> int:
        """Return the rows of the head: tokens, with a pointer one for a copy, and padding for matmul tiles."""
        return (self.vocab_size + (self.pointer_dim > 0) + 63) // 64 * 64

    @cached_property
    def step_schedules(self) -> list["StepSchedule"]:
        """Return the schedule of each step, made once."""
        return make_step_schedules(self)


NANO = dict(  # for CPUs, on the text in data/nano
    layers=NANO_LAYERS,
    stages=NANO_STAGES,
    groups=NANO_GROUPS,
    emas=(),
    preset="nano",
    device="cpu",
    cpu_threads=2,
    save_checkpoint=True,
    train_files="data/nano/nano_train_*.bin",
    val_files="data/nano/nano_val_*.bin",
    val_tokens=262_144,
    val_sha256="e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33",
    target_loss=1.45,
    vocab_size=257,
    eot_token=256,
    prefix_file="",
    canon_file="",
    num_iterations=32,
    val_loss_every=0,
    batch_tokens=2048,
    train_seq_len=2048,
    val_seq_len=8192,
    final_window=0,
    cooldown_frac=0.85,
    min_lr_frac=0.2,
    tied_frac=0.0,
    loss_scale=2**-10,
    model_dim=128,
    num_heads=1,
    head_dim=64,
    mlp_dim=384,
    attn_scale=0.12,
    resid_lambda_init=1.0,
    ngram_rows=8192,
    ngram_order=2,
    ngram_lambda_init=1.0,
    sign_rows=0,
    value_embed_std=0.2,
    value_gate_inputs=0,
    smear_gate_inputs=0,
    head_from_values=True,
    head_std=0.0,
    pointer_dim=0,
    logits_chunk=1024,
    val_logits_chunk=1024,
    softcap_range=30.0,
    softcap_shift=0.0,
    lm_head_fp8=False,
    layers_fp8=False,
    muon_lr=0.075,
    muon_momentum=0.88,
    momentum_warmup_steps=30,
    momentum_cooldown_steps=0,
    slow_momentum_from=0,
    long_interval_from=0,
    heads_per_matrix=1,
)
GPT2 = Hyperparameters()
PRESETS = {"gpt2": GPT2, "nano": Hyperparameters(**NANO)}


class FlagParser(argparse.ArgumentParser):
    """A parser that raises UserError where argparse exits: other ranks have to hear of it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def print_help():
    """Print the fields of `Hyperparameters` as they stand above, with their comments, and nano's values."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads it may have seen enough
    source = inspect.getsource(Hyperparameters)
    print("Flags: --FIELD VALUE, or --FIELD and --no-FIELD\n")
    print(source[: source.index("    def ")])
    print("nano instead:", *(f"--{name}={value}" for name, value in NANO.items() if name not in TABLES))


def make_parser() -> FlagParser:
    """Return a parser with a flag for each field of `Hyperparameters` but the tables."""
    parser = FlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Hyperparameters):
        flag = f"--{field.name}"
        args = get_args(field.type)  # the values of a Literal; of `int | None` its types
        if field.name in TABLES:
            continue
        if field.name == "preset":
            parser.add_argument(flag, choices=PRESETS)
        elif get_origin(field.type) is Literal:
            parser.add_argument(flag, choices=args)
        elif bool in (field.type, *args):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=args[0] if args else field.type)
    return parser


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset, changed by the flags in `argv`."""
    if {"-h", "--help"} & {*argv}:
        print_help()
        sys.exit()
    flags = vars(make_parser().parse_args(argv))
    sees_gpu = torch.cuda.is_available() and flags.get("device") != "cpu"
    # Under torchrun a node whose driver fails must not train nano instead
    if "preset" not in flags and world_size > 1 and not sees_gpu:
        raise UserError(f"{world_size} processes, but torch {torch.__version__} sees no GPU: say --preset nano or gpt2")
    canon_file = flags.get("canon_file")  # the preset's may be missing, see `resolve`; one that is named here may not
    if canon_file and not Path(canon_file).is_file():
        raise UserError(f"--canon_file {canon_file}: there is no such file; python -m data.gpt2_canonical makes gpt2's")
    default = "gpt2" if sees_gpu else "nano"
    return dataclasses.replace(PRESETS[flags.get("preset", default)], **flags)


def resolve(cfg: Hyperparameters) -> Hyperparameters:
    """Decide what `cfg` leaves open: device, precision, FP8, compilation, seed, name of the run."""
    on_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.device == "cuda" and not on_cuda:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU; ./run.sh --check says why")
    # A CPU with AVX512-BF16 or AMX multiplies bf16 2.1 times as fast as fp32; on others it is 3 to 10 times slower
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = "bfloat16" if on_cuda or (native and torch.ops.mkldnn._is_mkldnn_bf16_supported()) else "float32"
    seed = int.from_bytes(os.urandom(4)) // 2 if cfg.seed is None else cfg.seed  # below 2**31
    dtype = fast if cfg.dtype == "auto" else cfg.dtype
    # gpt2's mask is made by a tokenizer that may not be at hand; `main` logs that a run goes without
    is_canon_missing = cfg.canon_file == GPT2.canon_file and not Path(cfg.canon_file).exists()
    # FP8 takes compute capability 8.9. Products with a scale for each row can only output bf16
    has_fp8 = on_cuda and torch.cuda.get_device_capability() >= (8, 9) and dtype == "bfloat16"
    return dataclasses.replace(
        cfg,
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
        compile=on_cuda if cfg.compile is None else cfg.compile,
        cuda_graphs=cfg.cuda_graphs and on_cuda and cfg.compile is not False,
        canon_file="" if is_canon_missing else cfg.canon_file,
        layers_fp8=cfg.layers_fp8 and has_fp8,
        lm_head_fp8=cfg.lm_head_fp8 and has_fp8,
        seed=seed,
        run_id=cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}",
    )


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32, or the precision itself if it is wider: for moments, norms, averages and losses."""
    return torch.promote_types(dtype, torch.float32)


def sum_dtype(group: Group, dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which gradients of a group's tables of this dtype are summed up: `Group.fp16_sums`."""
    return torch.float16 if group.fp16_sums and dtype == torch.bfloat16 else accum_dtype(dtype)


@cache
def compiled(function: Callable, wanted: bool, dynamic: bool) -> Callable:
    """Return a function, compiled if `wanted`, apart from the model's graph. dynamic: one graph serves all sizes."""
    return torch.compile(function, fullgraph=True, dynamic=dynamic) if wanted else function


class Ranks(NamedTuple):
    """This process among all, as torchrun names it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# ---- Schedules: what the tables mean for each step, made once --------------------------------------------------------
def matches(name: str, patterns: str) -> bool:
    """Return whether a parameter's name matches one of the globs in `patterns`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def find_group(name: str, cfg: Hyperparameters) -> Group:
    """Return the row of `groups` that names a parameter."""
    rows = [row for row in cfg.groups if matches(name, row.patterns)]
    if len(rows) != 1:
        raise UserError(f"{name}: {len(rows)} rows of `groups` name this parameter, expected one")
    return rows[0]


class Window(NamedTuple):
    """A sliding window of attention, and what changes with its size.

    Sizes count positions; in paired attention each token takes two.
    """

    size: int  # positions
    attn_scale: float  # factor on scores
    frequencies: Tensor  # (D / 4,): rotary frequencies, in radians a position; half of a head is rotated

    def extended(self, size: int) -> "Window":
        """Return the window at another size, extended by YaRN (arXiv:2309.00071; record 31, @classiclarryd).

        Frequencies of at most one turn in the old window shrink by old / new, those of 32 turns or more stay.
        """
        ratio = self.size / size
        turns = self.size * self.frequencies / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
        scale = self.attn_scale * (1 + 0.2 * math.log(size / self.size))  # 0.2: the record's
        return Window(size, scale, self.frequencies * (ratio + kept * (1 - ratio)))


def schedule_windows(cfg: Hyperparameters) -> list[dict[str, Window]]:
    """Return for each stage its windows by kind."""
    frequencies = (1 / 1024) ** torch.linspace(0, 1, steps=cfg.head_dim // 4, dtype=torch.float64, device="cpu")
    windows = {}
    for kind, size in cfg.stages[0].windows.items():
        windows[kind] = Window(size, cfg.attn_scale if kind == "long" else cfg.short_attn_scale, frequencies)
    stages = [windows]
    for stage in cfg.stages[1:]:
        stages.append({kind: window.extended(stage.windows[kind]) for kind, window in stages[-1].items()})
    return stages


class AdamStep(NamedTuple):
    """The numbers of an update by Adam."""

    step_size: float  # the learning rate with both bias corrections
    decay: float  # subtracted from a value as a fraction of it: weight decay times lr^2
    beta1: float
    beta2: float


class MuonStep(NamedTuple):
    """The numbers of an update by Muon."""

    lr: float  # without the factor of the group
    momentum: float
    fast_beta: float  # decay of the fast momentum
    fast_share: float  # m = fast_share * fast + (1 - fast_share) * slow
    slow_rate: float  # slow += slow_rate * (gradient - slow)


def update_interval_at(group: Group, step: int, cfg: Hyperparameters) -> int:
    """Return the steps between the updates of a group, at a step."""
    often, rarely = group.update_interval
    return rarely if step >= cfg.long_interval_from else often


def schedule_adam(group: Group, count: int, step: int, lr_factor: float, cfg: Hyperparameters) -> AdamStep:
    """Return the numbers of a group's `count`-th update."""
    lr = group.lr * lr_factor
    # 2 once a group is updated half as often. An update then stands for two: betas are squared, the decay is doubled;
    # the learning rate stays. Quirk: bias corrections take the new betas for all `count` updates
    interval_ratio = update_interval_at(group, step, cfg) / group.update_interval[0]
    beta1, beta2 = group.beta1**interval_ratio, group.beta2**interval_ratio
    step_size = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
    return AdamStep(step_size, group.decay * interval_ratio * lr**2, beta1, beta2)


def schedule_muon(step: int, lr_factor: float, cfg: Hyperparameters) -> MuonStep:
    """Return the numbers of an update by Muon: those of ANVIL (record 92), which gives no reason for its constants."""
    momentum = schedule_momentum(step, cfg)
    has_slow_momentum = 0 < cfg.slow_momentum_from <= step
    return MuonStep(
        cfg.muon_lr * lr_factor,
        momentum,
        fast_beta=0.85 if has_slow_momentum else momentum,
        fast_share=0.4385 if has_slow_momentum else 1.0,
        slow_rate=0.02,
    )


def schedule_lr(step: int, stage: Stage, cfg: Hyperparameters) -> float:
    """Return the factor on learning rates: the stage's, and in the cooldown linearly down to min_lr_frac.

    The cooldown ends at `scheduled_steps`; the last stage's extra steps follow at min_lr_frac, as in the record.
    """
    start = int(cfg.scheduled_steps * (1 - cfg.cooldown_frac))
    done = min(max(0.0, (step - start) / max(1, cfg.scheduled_steps - start)), 1.0)
    return stage.lr * (1 - done) + cfg.min_lr_frac * done


def schedule_momentum(step: int, cfg: Hyperparameters) -> float:
    """Return Muon's momentum, which rises from 0.85 in its warm-up and falls back in its cooldown (record 39)."""
    left = cfg.num_iterations - step
    risen = min(step / max(1, cfg.momentum_warmup_steps), left / max(1, cfg.momentum_cooldown_steps), 1.0)
    return (1 - risen) * 0.85 + risen * cfg.muon_momentum


def is_tied_step(step: int, head: Group, cfg: Hyperparameters) -> bool:
    """Return whether a step updates embedding and head as one table (records 51, 53: @varunneal).

    Quirk: the condition is on the step of the previous update, so the first update after the tied steps is tied, too.
    """
    last = round(cfg.tied_frac * cfg.scheduled_steps)
    return last > 0 and step - update_interval_at(head, step, cfg) < last


class StepSchedule(NamedTuple):
    """The settings of a training step or, if `trains` is false, of a validation."""

    step: int
    stage: int  # number of its row
    trains: bool
    seq_len: int  # tokens of a sequence
    max_doc_len: int  # 0: documents are not cut
    windows: dict[str, Window]  # by kind
    mtp_weights: list[float]  # of the losses of tokens +1, +2, ...
    prefix_weight: float  # of the loss of the next token's prefix; 0: none
    sampled_classes: int  # tokens in the sampled softmax of a sequence; 0: all
    lr_factor: float  # on all learning rates
    updates: dict[str, AdamStep | MuonStep]  # by the names of the groups that are updated in this step
    tied: bool  # whether embedding and head are updated as one table
    ema_rates: list[float]  # of the rows of `emas`; 0: no update


def stage_ends(cfg: Hyperparameters) -> list[int]:
    """Return the step at which each stage ends: its share of the base steps, after the extra steps so far."""
    ends = accumulate(stage.duration for stage in cfg.stages)
    extra_steps = accumulate(stage.extra_steps for stage in cfg.stages)
    return [round(cfg.base_steps * end) + extra for end, extra in zip(ends, extra_steps)]


def make_step_schedules(cfg: Hyperparameters) -> list[StepSchedule]:
    """Return the schedule of each training step."""
    windows = schedule_windows(cfg)
    head = find_group("lm_head.weight", cfg)
    counts: Counter[str] = Counter()  # of updates, by group
    step_schedules: list[StepSchedule] = []
    for index, (start, end) in enumerate(pairwise([0, *stage_ends(cfg)])):
        stage, length = cfg.stages[index], end - start
        for step in range(start, end):
            done = step - start
            lr_factor = schedule_lr(step, stage, cfg)
            updates: dict[str, AdamStep | MuonStep] = {}
            for group in cfg.groups:
                if (step + 1) % update_interval_at(group, step, cfg) == 0:
                    counts[group.name] += 1
                    if group.optimizer == "Muon":
                        updates[group.name] = schedule_muon(step, lr_factor, cfg)
                    else:
                        updates[group.name] = schedule_adam(group, counts[group.name], step, lr_factor, cfg)
            schedule = StepSchedule(
                step,
                stage=index,
                trains=True,
                seq_len=int(cfg.train_seq_len * stage.batch),
                max_doc_len=stage.max_doc_len,
                windows=windows[index],
                mtp_weights=[first + (last - first) * done / length for first, last in stage.mtp],
                prefix_weight=stage.prefix[len(stage.prefix) * done // length] if cfg.prefix_file else 0.0,
                sampled_classes=stage.sampled_classes[len(stage.sampled_classes) * done // length],
                lr_factor=lr_factor,
                updates=updates,
                tied=head.name in updates and is_tied_step(step, head, cfg),
                ema_rates=[row.rate_at(step, cfg.num_iterations) for row in cfg.emas],
            )
            step_schedules.append(schedule)
    return step_schedules


def schedule_validation(step: int, cfg: Hyperparameters) -> StepSchedule:
    """Return the settings of a validation before a step.

    The last one has a longer window, without another extension by YaRN: record 33 (@classiclarryd).
    """
    schedule = cfg.step_schedules[min(step, cfg.num_iterations - 1)]
    windows = schedule.windows
    if step == cfg.num_iterations and cfg.final_window and "long" in windows:
        windows = windows | {"long": windows["long"]._replace(size=cfg.final_window)}
    return schedule._replace(
        step=step,
        trains=False,
        seq_len=cfg.val_seq_len,
        max_doc_len=0,
        windows=windows,
        mtp_weights=[1.0],
        prefix_weight=0.0,
        sampled_classes=0,
        updates={},
        tied=False,
    )


def num_tokens(steps: int, cfg: Hyperparameters) -> int:
    """Return the number of tokens that the first `steps` steps train on."""
    return cfg.batch_sequences * sum(schedule.seq_len for schedule in cfg.step_schedules[:steps])


class AttentionSettings(NamedTuple):
    """Window sizes, scales and rotary tables of a step, as tensors: a change of a Python number would recompile."""

    kinds: tuple[str, ...]  # of windows
    window_sizes: Tensor  # (kinds,) int32
    attn_scales: Tensor  # (kinds,)
    rotary: Tensor  # (kinds, 2, 2 T, D / 4): cosines and sines of 2 T positions, as in pairs a token has two


def rotary_cos_sin(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (kinds, cosine and sine, positions, D / 4)."""
    angles = positions[:, None] * frequencies[:, None]
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)


def make_attention_settings(schedule: StepSchedule, cfg: Hyperparameters, device: torch.device) -> AttentionSettings:
    """Return the attention settings of a step or a validation."""
    windows = schedule.windows.values()
    dtype = getattr(torch, cfg.dtype)
    wide = accum_dtype(dtype)
    window_sizes = torch.tensor([window.size for window in windows], dtype=torch.int32).to(device, non_blocking=True)
    attn_scales = torch.tensor([window.attn_scale for window in windows], dtype=wide).to(device, non_blocking=True)
    by_kind = torch.stack([window.frequencies for window in windows]).to(wide).to(device, non_blocking=True)
    positions = torch.arange(2 * schedule.seq_len, device=device)
    # Computed outside of the model's graph: inside, the compiler would recompute them at each use
    rotary = compiled(rotary_cos_sin, cfg.compile, dynamic=True)(by_kind, positions, dtype)
    return AttentionSettings(tuple(schedule.windows), window_sizes, attn_scales, rotary)


# ---- Data: the same tokens in every step for any number of processes -------------------------------------------------
# For each sequence a shard and an array (pieces, 2): where its pieces of documents begin and end
BatchPlan = list[tuple[str, np.ndarray]]
TOKENS_AT_ONCE = 2**20  # of a shard, in which documents are looked for


def file_version(path: str) -> tuple[int, int]:
    """Return what changes when somebody writes to a file, or puts another one in its place."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


first_version = cache(file_version)  # as it was when the run first read the file; `check_data` clears it


def read_numbers(path: str, dtype: str, count: int, offset: int) -> np.ndarray:
    """Return `count` numbers of a file from byte `offset` on; -1: all to its end.

    Raise UserError if the file has changed since the run first read it: it would train on what nobody has checked.
    """
    try:
        if not os.path.isfile(path):  # a pipe would never end
            raise OSError("there is no such file")
        version = first_version(path)
        numbers = np.fromfile(path, dtype, count, offset=offset)  # not mmap: a truncated mapped file raises SIGBUS
        if file_version(path) != version:
            raise OSError("it has changed since the run began: start anew, and keep it as it is")
        if len(numbers) < count:
            raise OSError("it is too short")
        return numbers
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; ./run.sh --check says what to do") from None


def find_documents(path: str, cfg: Hyperparameters, is_stream: bool) -> Iterator[tuple[int, int]]:
    """Yield where each document of a shard begins and ends; a stream is one. Tokens are read as they are needed.

    Those before the first document are left out. A shard has the format of llm.c: a header of 256 int32 [20240520, 1,
    number of tokens, 0 ...], then uint16 tokens.
    """
    header = read_numbers(path, "<i4", 3, 0).tolist()
    if header != [20240520, 1, (os.path.getsize(path) - 1024) / 2]:
        raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
    count = header[2]
    if is_stream:
        yield 0, count
        return
    begin = None
    for first in range(0, count, TOKENS_AT_ONCE):
        tokens = read_numbers(path, "<u2", min(TOKENS_AT_ONCE, count - first), 1024 + 2 * first)
        for i in np.flatnonzero(tokens == cfg.eot_token).tolist():
            if begin is not None:
                yield begin, first + i
            begin = first + i
    if begin is not None:
        yield begin, count


def cut_sequence(
    documents: Iterator[tuple[int, int]], rest: list[tuple[int, int]], length: int, max_doc_len: int
) -> np.ndarray | None:
    """Take a sequence of `length` tokens from the next documents; None if they have fewer.

    Documents are cut to max_doc_len, and what is left of them is dropped (record 29, @varunneal); sequences begin with
    a document (record 26, @classiclarryd). A stream, where max_doc_len is 0, goes on with its rest.
    """
    pieces = []
    missing = length
    while missing and (document := rest.pop() if rest else next(documents, None)):
        begin, end = document
        stop = min(end, begin + missing, begin + (max_doc_len or missing))
        pieces.append((begin, stop))
        missing -= stop - begin
        if not max_doc_len:  # a stream is one piece; the next sequence begins with the last target of this one
            rest.append((stop - 1, end))
            break
    return None if missing else np.array(pieces)


def plan_batches(
    pattern: str, lengths: Sequence[tuple[int, int]], num_sequences: int, cfg: Hyperparameters
) -> Iterator[BatchPlan]:
    """Yield a batch of `num_sequences` for each of `lengths`, shard after shard; the end of each shard is dropped.

    lengths: (seq_len, max_doc_len) of each batch. Raise UserError if the shards have too few tokens.
    """
    paths = deque(sorted(glob.glob(pattern, recursive=True)))
    path = ""  # at first no shard is open, so the first try finds too little
    documents: Iterator[tuple[int, int]] = iter(())  # those of the shard at `path` that are left
    rest: list[tuple[int, int]] = []  # what is left of a stream
    done = 0
    while done < len(lengths):
        seq_len, max_doc_len = lengths[done]
        sequences = [cut_sequence(documents, rest, seq_len + 1, max_doc_len) for _ in range(num_sequences)]
        if all(sequence is not None for sequence in sequences):  # else the shard has too little left
            yield [(path, sequence) for sequence in sequences]
            done += 1
        elif paths:
            path = paths.popleft()
            documents = find_documents(path, cfg, is_stream=max_doc_len == 0)
            rest.clear()
        else:
            raise UserError(
                f"{pattern} in {os.getcwd()}: tokens for {done} batches, the run needs {len(lengths)}; "
                f"documents begin with --eot_token {cfg.eot_token}; ./run.sh gets a preset's data, "
                "data/pack_text.py packs text"
            )


def train_batches(cfg: Hyperparameters) -> Iterator[BatchPlan]:
    """Yield the batch of each training step."""
    lengths = [(schedule.seq_len, schedule.max_doc_len) for schedule in cfg.step_schedules]
    return plan_batches(cfg.train_files, lengths, cfg.batch_sequences, cfg)


def val_batches(cfg: Hyperparameters) -> Iterator[BatchPlan]:
    """Yield the batches of a validation, of one sequence each."""
    return plan_batches(cfg.val_files, [(cfg.val_seq_len, 0)] * (cfg.val_tokens // cfg.val_seq_len), 1, cfg)


class DataSummary(NamedTuple):
    """The shards and the hash of a run's training or validation tokens, for checks before the clock starts."""

    paths: list[str]  # of the shards
    sha256: str  # of all tokens


def summarize(batches: Iterable[BatchPlan], schedules: Iterable[StepSchedule], cfg: Hyperparameters) -> DataSummary:
    """Read all tokens of batches. In a stream of a validation the last target is the next sequence's first token.

    Raise UserError if a token is missing, or if a sequence has more targets than its stage has sampled classes.
    """
    paths: dict[str, None] = {}  # in order
    sha256 = hashlib.sha256()
    for schedule, batch in zip(schedules, batches):
        for path, pieces in batch:
            paths[path] = None
            tokens = read_sequence(path, pieces, cfg)
            sha256.update((tokens if schedule.trains else tokens[:-1]).tobytes())
            if not schedule.sampled_classes:
                continue
            needed = chosen_targets(tokens[1:], cfg).sum()
            if not needed <= schedule.sampled_classes <= cfg.padded_vocab:
                raise UserError(
                    f"stage {schedule.stage + 1}: `sampled_classes` {schedule.sampled_classes}: expected {needed}, the "
                    f"different targets of a sequence, to {cfg.padded_vocab}, the rows of the head"
                )
    return DataSummary([*paths], sha256.hexdigest())


def check_data(cfg: Hyperparameters) -> dict[str, DataSummary]:
    """Return the summaries of a run's data. Raise UserError unless all of it is there."""
    first_version.cache_clear()
    data = dict(
        train=summarize(train_batches(cfg), cfg.step_schedules, cfg),
        val=summarize(val_batches(cfg), repeat(schedule_validation(0, cfg)), cfg),
    )
    if shared := {*data["train"].paths} & {*data["val"].paths}:
        raise UserError(f"{min(shared)}: trains and validates: change --train_files or --val_files")
    return data


def read_sequence(path: str, pieces: np.ndarray, cfg: Hyperparameters) -> np.ndarray:
    """Return the uint16 tokens of a sequence, the last target included."""
    first = pieces[0, 0]
    last = pieces[-1, 1]
    tokens = read_numbers(path, "<u2", last - first, 1024 + 2 * first)
    tokens = np.concatenate([tokens[begin:end] for begin, end in pieces - first])
    if tokens.max() >= cfg.vocab_size:
        raise UserError(f"{path}: has token {tokens.max()}, --vocab_size is {cfg.vocab_size}: another tokenizer's?")
    return tokens


def read_table(path: str, dtype: str, *shape: int) -> np.ndarray:
    """Return the numbers of a file in a shape, or an empty array if no file is named."""
    table = read_numbers(path, dtype, -1, 0) if path else np.empty(0, dtype)
    if path and len(table) != math.prod(shape):
        raise UserError(f"{path}: of another vocabulary; --prefix_file= and --canon_file= go without")
    return table.reshape(-1, *shape[1:])


NO_TARGET = -1  # of a token without a prefix, or whose prefix is not among the sampled classes
PAST_END = -2  # behind the end of the sequence: no loss, but a gradient, see `cross_entropy_gradients`


def read_prefixes(cfg: Hyperparameters) -> np.ndarray:
    """Return for each token the longest other token that its bytes begin with, or -1 (data/gpt2_prefixes.bin)."""
    table = read_table(cfg.prefix_file, "<u2", cfg.vocab_size).astype(np.int64)
    return np.where(table < cfg.vocab_size, table, NO_TARGET)


def read_invalid_tokens(cfg: Hyperparameters) -> np.ndarray:
    """Return bits (V, V / 8): bit x, of byte x // 8, in row p says that x never follows p (data/gpt2_canonical.py)."""
    return read_table(cfg.canon_file, "u1", cfg.padded_vocab, cfg.padded_vocab // 8)


# ---- Data loader: a thread prepares what the model reads of each sequence, ahead of the steps ------------------------
class ModelInputs(NamedTuple):
    """What the model reads of a sequence of T tokens."""

    tokens: Tensor  # (T,) int32
    next_tokens: Tensor  # (T,) int32
    doc_starts: Tensor  # (T,) int32: where the document of each token begins, within which attention stays
    targets: Tensor  # (T, n) int64: see `DistributedDataLoader.targets`; with sampled classes indices into these
    loss_weights: Tensor  # (n,): of the losses of the targets
    sampled_classes: Tensor | None  # (C,): the tokens in the sampled softmax, ascending. None: all are in it
    ngram_index: Tensor  # (G, T): indices of its n-grams into `RowExchange.recv_ids`
    sign_index: Tensor  # (G, T): rows of the table of signs; (0,) without such a table


# The record's factors of the current token, the one before, ...: of bigrams and of trigrams, for rows and for signs
ROW_FACTORS = (36313, 27191), (17351, 60961, 45259)
SIGN_FACTORS = (48271, 30011), (58699, 39779, 26801)


def hash_ngrams(tokens: np.ndarray, factors: Sequence[int], modulus: int, first: int) -> np.ndarray:
    """Return (f0 t_p XOR f1 t_{p-1} ...) mod modulus for int32 tokens (T,). Products wrap around.

    first: the hash of tokens at the beginning, which have too few before them.
    """
    hashed = tokens * np.int32(factors[0])
    for back, factor in enumerate(factors[1:], start=1):
        hashed[back:] ^= tokens[:-back] * np.int32(factor)
    hashed -= hashed // modulus * modulus  # as hashed % modulus, in a quarter of the time
    hashed[: len(factors) - 1] = first
    return hashed


def ngram_row_ids(tokens: np.ndarray, cfg: Hyperparameters) -> np.ndarray:
    """Return the table's rows (G, T) for the n-grams that end with each of the int32 tokens (T,).

    Bigrams (record 62, @classiclarryd) and trigrams (record 92, Deven Pietrzak @devenpzak) have equal parts of the
    table. The last row of a part is for tokens with too few before them.
    """
    kinds = ROW_FACTORS[: cfg.ngram_order - 1]
    size = cfg.ngram_rows // len(kinds)
    # Quirk: for bigrams the record first writes size - 1 over the first token, which changes that of the second
    for_bigrams = np.concatenate([[size - 1], tokens[1:]], dtype=np.int32)
    rows = []
    for i, (hashed_tokens, factors) in enumerate(zip([for_bigrams, tokens], kinds)):
        rows.append(i * size + hash_ngrams(hashed_tokens, factors, size - 1, first=size - 1))
    return np.stack(rows)


def sign_row_ids(tokens: np.ndarray, cfg: Hyperparameters) -> np.ndarray:
    """Return rows (G, T) of the table of signs, which tell n-grams that share a row apart (record 83, @TrianX)."""
    if not cfg.sign_rows:
        return np.empty(0)
    kinds = SIGN_FACTORS[: cfg.ngram_order - 1]
    return np.stack([hash_ngrams(tokens, factors, cfg.sign_rows, first=0) for factors in kinds])


# A cycle: the steps from one update of the table of n-grams to the next. Its rows are fetched once for all of them
Cycle = tuple[list[StepSchedule], list[BatchPlan]]


def train_cycles(batches: Iterator[BatchPlan], cfg: Hyperparameters, first: int = 0) -> Iterator[Cycle]:
    """Yield the cycles from the step `first` on, with which one begins. batches: those from that step on.

    The last cycle may end without an update of tables, and drops their gradients.
    """
    group = find_group("ngrams", cfg)
    for schedule in cfg.step_schedules[first:]:
        end = schedule.step + 1
        if group.name in schedule.updates or end == cfg.num_iterations:
            yield cfg.step_schedules[first:end], [*islice(batches, end - first)]
            first = end


class RowExchange(NamedTuple):
    """The all-to-all of rows of n-grams in a cycle: each rank owns an equal part of the table.

    All ranks know the tokens of all sequences, so nobody has to ask for rows. A cycle of two ranks, of a table of eight
    rows, in which rank 0 reads rows 1, 2, 5 and rank 1 reads rows 1, 7:

                        rank 0, owner of rows 0 to 3         rank 1, owner of rows 4 to 7
        recv_ids        1 2 5                                1 7
        recv_counts     2 1                                  1 1
        send_rows       1 2 (for rank 0), 1 (for rank 1)     5 (for rank 0), 7 (for rank 1)
        send_counts     2 1                                  1 1
        unique_rows     1 2                                  5 7
        order           0 2 1                                0 1
        offsets         0 2                                  0 1

    Rows travel from send_rows to recv_ids before the cycle. When it ends, gradients travel back, and those of equal
    rows, which `order` groups, are added up. On rank 1 send_rows and unique_rows are counted from its first row: 1, 3.
    """

    recv_ids: Tensor  # rows of the whole table that this rank reads, ascending, each once
    recv_counts: list[int]  # how many of them come from each rank
    send_rows: Tensor  # own rows that are sent to rank 0, then those sent to rank 1, ...
    send_counts: list[int]  # how many go to each rank
    unique_rows: Tensor  # send_rows, each once
    order: Tensor  # indices into send_rows that sort it: equal rows become neighbors
    offsets: Tensor  # for each of unique_rows, where its indices begin in `order`


def rows_per_rank(cfg: Hyperparameters, ranks: Ranks) -> int:
    """Return how many rows of the table of n-grams each rank owns; at the end some may have no n-gram."""
    return -(-cfg.ngram_rows // ranks.world_size)


def unique(ids: np.ndarray) -> np.ndarray:
    """Return what np.unique does, by torch: at gpt2's sizes in a half to a thirtieth of the time."""
    return torch.unique(torch.from_numpy(ids)).numpy()


def plan_exchange(
    ids_by_rank: Sequence[np.ndarray], ranks: Ranks, cfg: Hyperparameters
) -> tuple[RowExchange, np.ndarray]:
    """Return what this rank sends and receives in a cycle, and where in recv_ids each of its ids stands.

    ids_by_rank: the rows that each rank's sequences read.
    """
    owned = rows_per_rank(cfg, ranks)
    first_row = ranks.rank * owned
    # return_inverse takes a fifteenth of the time of np.searchsorted
    found = torch.unique(torch.from_numpy(ids_by_rank[ranks.rank]), return_inverse=True)
    recv_ids, places = (t.numpy() for t in found)
    recv_counts = np.bincount(recv_ids // owned, minlength=ranks.world_size).tolist()
    sent = []
    for rank, ids in enumerate(ids_by_rank):
        ids = recv_ids if rank == ranks.rank else ids  # the former are unique already
        ids = ids[(ids >= first_row) & (ids < first_row + owned)] - first_row
        sent.append(ids if rank == ranks.rank else unique(ids))
    send_rows = np.concatenate(sent).astype(np.int64)
    order = np.argsort(send_rows, kind="stable")  # fast, as the part for each rank is ascending already
    ascending = send_rows[order]
    offsets = np.flatnonzero(np.diff(ascending, prepend=-1))
    exchange = RowExchange(
        recv_ids=torch.from_numpy(recv_ids),
        recv_counts=recv_counts,
        send_rows=torch.from_numpy(send_rows),
        send_counts=[*map(len, sent)],
        unique_rows=torch.from_numpy(ascending[offsets]),
        order=torch.from_numpy(order),
        offsets=torch.from_numpy(offsets),
    )
    return exchange, places.astype(np.int32)


def chosen_targets(next_tokens: np.ndarray, cfg: Hyperparameters) -> np.ndarray:
    """Return a mask (V,) of what any sampled softmax has: all next tokens, with a pointer also the row of a copy."""
    chosen = np.zeros(cfg.padded_vocab, bool)
    chosen[next_tokens] = True
    if cfg.pointer_dim:
        chosen[cfg.copy_token] = True
    return chosen


def sample_classes(next_tokens: np.ndarray, count: int, offset: int, cfg: Hyperparameters) -> tuple[np.ndarray, int]:
    """Return `count` rows of the head, ascending, for a sampled softmax, and the next offset (record 92).

    All of `chosen_targets` are among them: `summarize` has seen that they fit. The rest come from a sweep over the
    head's V rows, padding included: its k-th row is 20011 k mod V. 20011 and V have no common factor (20011 is prime),
    so V steps visit each row once.
    """
    V = cfg.padded_vocab
    chosen = chosen_targets(next_tokens, cfg)
    missing = count - chosen.sum()
    if missing:
        sweep = 20011 * (offset + np.arange(V)) % V
        chosen[sweep[~chosen[sweep]][:missing]] = True
        # Quirk: the next sweep skips this many rows, however far this one got. 20011, 1.7 and 256 are the record's
        offset = (offset + min(V, int(1.7 * missing) + 256)) % V
    return np.flatnonzero(chosen), offset


class DistributedDataLoader:
    """A loader of this rank's sequences. It reads the tokens of all ranks, see `RowExchange`."""

    def __init__(self, cfg: Hyperparameters, ranks: Ranks, device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.device = device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None  # of copies to the device
        self.prefixes = read_prefixes(cfg)
        # For each sequence of a step, where its next sweep of `sample_classes` begins
        self.offsets = [cfg.padded_vocab * i // cfg.batch_sequences for i in range(cfg.batch_sequences)]

    def targets(self, schedule: StepSchedule, next_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the n targets of each token (T, n), and the weights (n,) of their losses, from the next tokens (T,).

        First come tokens +1, +2, ..., then the next one's prefix, then a copy. Some are NO_TARGET or PAST_END.
        """
        cfg = self.cfg
        T = len(next_tokens)
        padded = np.pad(next_tokens.astype(np.int64), (0, len(schedule.mtp_weights)), constant_values=PAST_END)
        columns = [(padded[k : k + T], weight) for k, weight in enumerate(schedule.mtp_weights)]
        if schedule.prefix_weight:
            columns.append((self.prefixes[next_tokens], schedule.prefix_weight))
        if cfg.pointer_dim:  # its weight is 0, as `mix_copies` makes it a part of the next token's loss
            columns.append((np.full(T, cfg.copy_token), 0.0))
        targets, weights = zip(*columns)
        return np.column_stack(targets), np.array(weights, "f8" if cfg.dtype == "float64" else "f4")

    def doc_starts(self, schedule: StepSchedule, tokens: np.ndarray) -> np.ndarray:
        """Return where each token's document begins; in training, its part of at most `max_attn_len` tokens."""
        t = np.arange(len(tokens), dtype=np.int32)
        starts = np.maximum.accumulate(np.where(tokens == self.cfg.eot_token, t, 0))
        return t - (t - starts) % self.cfg.max_attn_len if schedule.trains else starts

    def next_classes(self, schedule: StepSchedule, i: int, next_tokens: np.ndarray) -> np.ndarray | None:
        """Return the sampled classes of a step's i-th sequence, and move its sweep on. None: all rows of the head."""
        if not schedule.sampled_classes:
            return None
        classes, self.offsets[i] = sample_classes(next_tokens, schedule.sampled_classes, self.offsets[i], self.cfg)
        return classes

    def model_inputs(
        self, schedule: StepSchedule, sequence: np.ndarray, classes: np.ndarray | None, ngram_index: np.ndarray
    ) -> ModelInputs:
        """Return the inputs of a sequence (T + 1,), the last target included."""
        tokens, next_tokens = sequence[:-1], sequence[1:]
        targets, weights = self.targets(schedule, next_tokens)
        if classes is not None:
            index = np.full(self.cfg.padded_vocab, NO_TARGET)  # of each row of the head among the sampled classes
            index[classes] = np.arange(len(classes))
            targets = np.where(targets < 0, targets, index[targets])
        return ModelInputs(
            tokens=torch.from_numpy(tokens),
            next_tokens=torch.from_numpy(next_tokens),
            doc_starts=torch.from_numpy(self.doc_starts(schedule, tokens)),
            targets=torch.from_numpy(targets),
            loss_weights=torch.from_numpy(weights),
            sampled_classes=None if classes is None else torch.from_numpy(classes),
            ngram_index=torch.from_numpy(ngram_index),
            sign_index=torch.from_numpy(sign_row_ids(tokens, self.cfg)),
        )

    def skip(self, batches: Iterable[BatchPlan]):
        """Move the sweeps on past the first steps of a training, as a resumed run has taken them."""
        for schedule, batch in zip(self.cfg.step_schedules, batches):
            for i in range(self.ranks.rank, len(batch), self.ranks.world_size):
                if schedule.sampled_classes:
                    self.next_classes(schedule, i, read_sequence(*batch[i], self.cfg)[1:])

    def load_cycle(
        self, schedules: Sequence[StepSchedule], batches: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[list[ModelInputs]], RowExchange]:
        """Return for each step of a cycle this rank's inputs, and the cycle's exchange of rows, on the host.

        batches: for each step the tokens of all sequences (T + 1,), the last targets included. Rank r has the r-th of
        them, and every world_size-th after that.
        """
        rank, world_size = self.ranks.rank, self.ranks.world_size
        batches = [[tokens.astype(np.int32) for tokens in batch] for batch in batches]
        row_ids = [[ngram_row_ids(tokens[:-1], self.cfg) for tokens in batch] for batch in batches]  # (G, T) each
        # By rank, those of its sequences, one step after the other. In a validation a rank may have no sequence
        ids_by_rank = [np.empty(0, np.int32)] * world_size
        for of_step in row_ids:
            for r in range(world_size):
                ids_by_rank[r] = np.concatenate([ids_by_rank[r], *(ids.ravel() for ids in of_step[r::world_size])])
        exchange, places = plan_exchange(ids_by_rank, self.ranks, self.cfg)
        end = 0  # of `places` so far, which come in the same order
        steps: list[list[ModelInputs]] = []
        for schedule, batch, of_step in zip(schedules, batches, row_ids):
            steps.append([])
            for i in range(rank, len(batch), world_size):
                begin, end = end, end + of_step[i].size
                ngram_index = places[begin:end].reshape(of_step[i].shape)
                classes = self.next_classes(schedule, i, batch[i][1:])
                steps[-1].append(self.model_inputs(schedule, batch[i], classes, ngram_index))
        return tree_map_only(Tensor, self.pin, (steps, exchange))

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy, pinned where there is a GPU: here in the thread, as pinning may allocate."""
        # Contiguous, and at a multiple of 16 bytes, as compiled code wants it
        copy = tensor.clone(memory_format=torch.contiguous_format)
        return copy.pin_memory() if self.device.type == "cuda" else copy

    def to_device(self, loaded):
        """Return what `load_cycle` returned, on the device. A GPU copies on a stream of its own, beside the steps."""
        if self.stream is None:
            return loaded
        now = torch.cuda.current_stream()
        with torch.cuda.stream(self.stream):
            loaded = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), loaded)
        now.wait_stream(self.stream)
        tree_map_only(Tensor, lambda t: t.record_stream(now), loaded)  # its memory stays its own while a step reads it
        return loaded

    def steps(self, cycles: Iterable[Cycle]) -> Iterator[tuple[list[ModelInputs], RowExchange, RowExchange | None]]:
        """Yield for each step this rank's inputs, its cycle's exchange and, with a cycle's last step, the next cycle's.

        All are on the device. A thread plans and reads, two cycles ahead. It starts with the first `next`, which is on
        the clock.
        """
        cycles = iter(cycles)

        def read():
            cycle = next(cycles, None)
            if cycle is None:
                return None
            schedules, batches = cycle
            tokens = [[read_sequence(path, pieces, self.cfg) for path, pieces in batch] for batch in batches]
            return self.load_cycle(schedules, tokens)

        def start():
            if self.device.type == "cuda":  # or else the thread opens GPU 0
                torch.cuda.set_device(self.device)

        with ThreadPoolExecutor(1, "loader", start) as executor:
            queue = deque([executor.submit(read), executor.submit(read)])

            def take():
                queue.append(executor.submit(read))
                return self.to_device(queue.popleft().result())

            loaded = take()
            while loaded is not None:
                (*steps, last_step), exchange = loaded
                for inputs in steps:
                    yield inputs, exchange, None
                loaded = take()  # before the last step, as that fetches the next cycle's rows
                yield last_step, exchange, None if loaded is None else loaded[1]


# ---- Layers: linear maps, norm, products in FP8, MLP, rotary embedding -----------------------------------------------
def uniform_weight(inputs: int, *shape: int) -> nn.Parameter:
    """Return a weight of standard deviation 0.5 / sqrt(inputs); PyTorch's is 0.58 / sqrt(inputs) (record 19)."""
    bound = (0.75 / inputs) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the precision of x: weights may be wider."""
    return F.linear(x, weight.type_as(x))


def shift_later(x: Tensor, n: int) -> Tensor:
    """Return x (T, ...) moved n tokens later, for n <= T; the first n tokens keep their own rows."""
    return torch.cat([x[:n], x[: len(x) - n]])


def sigmoid_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return gates from 0 to 1 for each token, computed from its first channels."""
    return linear(x[:, : weight.size(1)], weight).sigmoid()


class RMSNorm(torch.autograd.Function):
    """x / rms(x) over the last dimension. It saves y and not x, as the next product, if in bf16, saves y anyway.

    With r = 1 / rms(x) and a gradient g with respect to y = r x, that with respect to x is r (g - y mean(g . y)).
    """

    @staticmethod
    def forward(ctx, x):
        x32 = x.to(accum_dtype(x.dtype))
        scale = (x32.square().mean(-1, keepdim=True) + torch.finfo(x32.dtype).eps).rsqrt()
        y = x32 * scale
        y = y if x32 is x else y.to(x.dtype)  # torch 2.11 compiles a cast to the same type without its gradient
        ctx.save_for_backward(y, scale.to(x.dtype))
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        return scale * (grad - y * (grad * y).mean(-1, keepdim=True))


norm = RMSNorm.apply

# Inputs, weights and gradients of the layers' products are multiplied by these before they are rounded to FP8. Inputs
# have unit RMS: over 768 channels |x| <= sqrt(768) = 27.7, so 16 |x| <= 443 < 448. Weights saturate beyond 7,
# gradients, in e5m2, beyond 896. FP8 came to layers with records 84 (@sisovicm), 89 (@Mister-dev-oss and others) and
# 90 (@Glitchfix)
FP8_X, FP8_W, FP8_GRAD = 2.0**4, 2.0**6, 2.0**6


if torch.version.cuda:  # elsewhere nothing is in FP8, and the import takes a second
    import torch._inductor.inductor_prims  # registers the operation that is looked up next
# An operation of PyTorch's compiler that stores a tensor in a given layout. Some versions lack it
FORCE_STRIDES = getattr(torch.ops.prims, "inductor_force_stride_order", None)


def materialize(t: Tensor) -> Tensor:
    """Return t, and make the compiler store it at this point, in its precision.

    Without this each reader may compute t again, or the compiler stores it before a cast and each reader casts.
    """
    return FORCE_STRIDES(t, t.stride()) if FORCE_STRIDES is not None and torch.compiler.is_compiling() else t


def can_use_kernels(t: Tensor) -> bool:
    """Return whether this script's kernels take t, in bf16 or FP8; if not, PyTorch does what they do."""
    return triton is not None and t.is_cuda and t.itemsize <= 2


def quantize(t: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return scale * t in FP8. Numbers beyond its limit are clamped: some devices saturate, others give NaN.

    By torch.where and not clamp: with ptxas 12.9 a kernel that clamps and stores both layouts writes wrong columns
    (triton issue 11111, torchao issue 4652).
    """
    limit = torch.finfo(dtype).max
    t = t * scale
    return materialize(torch.where(t > limit, limit, torch.where(t < -limit, -limit, t)).to(dtype))


def row_major(t: Tensor) -> Tensor:
    """Return FP8 numbers t (M, N) in row-major order.

    A kernel transposes: the compiler's kernels that reduce rows and also store columns take up to twice as long.
    """
    if not (can_use_kernels(t) and t.t().is_contiguous()):
        return t.contiguous()
    M, N = t.shape
    rows = t.new_empty(M, N)
    transpose_kernel[triton.cdiv(M, 128), triton.cdiv(N, 64)](t, rows, M, N)
    return rows


def fp8_matmul(a: Tensor, b: Tensor, scale: Tensor | float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ b / scale in `dtype`. scale: the product of the scales with which a and b were quantized.

    fast: the hardware may sum up in less than fp32 (`use_fast_accum`).
    """
    a = row_major(a)  # cuBLAS wants row-major by column-major
    b = row_major(b.t()).t()
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return torch._scaled_mm(a, b, one / scale, one, out_dtype=dtype, use_fast_accum=fast)


def fp8_linear_backward(
    dz_row: Tensor, dz_col: Tensor, x: Tensor, w: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to x (T, K) and w (N, K) of x @ w.T, from FP8_GRAD * dz in both layouts."""
    return fp8_matmul(dz_row, w, FP8_GRAD * FP8_W, dtype), fp8_matmul(dz_col.t(), x, FP8_GRAD * FP8_X, dtype)


def relu_squared_fp8(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return act = relu(z)^2 (T, N) in FP8, with the largest of each row as 448, and factors that undo it (T, 1).

    A kernel holds a row in registers. The compiler's reads long rows twice, in twice the time (measured: one H100).
    """
    if not can_use_kernels(z):
        act = F.relu(z).square_()
        scale = 448 / act.amax(1, keepdim=True).float().clamp(min=1e-12)
        return quantize(act, scale, torch.float8_e4m3fn), 1 / scale
    T, N = z.shape
    act_q = torch.empty_like(z, dtype=torch.float8_e4m3fn)
    scales = z.new_empty(T, 1, dtype=torch.float32)
    relu_squared_fp8_kernel[(T,)](z, act_q, scales, N, triton.next_power_of_2(N))
    return act_q, scales


def relu_squared_backward(
    grad_q: Tensor, w_q: Tensor, act_q: Tensor, scales: Tensor, act_scale: Tensor, has_tma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FP8_GRAD * dz (T, N), row-major and column-major, and act_scale * act, column-major, all in FP8.

    dz = 2 relu(z) (grad @ w) is the gradient with respect to z of act @ w.T, for grad (T, K), w (K, N) and
    act = relu(z)^2, which `relu_squared_fp8` stored as act_q (T, N) and scales (T, 1); so relu(z) is the root of act
    (record 87). Products that sum over tokens want both operands column-major. A kernel does it all while the product
    is in registers.
    """
    if not (has_tma and can_use_kernels(grad_q)):
        act = act_q.to(scales.dtype) * scales
        dz = fp8_matmul(grad_q, w_q, FP8_GRAD * FP8_W, scales.dtype) * act.sqrt() * 2
        dz = quantize(dz, FP8_GRAD, grad_q.dtype)
        return dz, dz, quantize(act, act_scale, act_q.dtype)  # `fp8_matmul` transposes where it has to
    T, N = act_q.shape
    K = len(w_q)
    dz_row = torch.empty_like(act_q, dtype=grad_q.dtype)
    dz_col = dz_row.new_empty(N, T)
    act_col = act_q.new_empty(N, T)
    block = 128  # with 3 stages two programs fit into a multiprocessor
    tensors = grad_q.contiguous(), w_q.t().contiguous(), act_q, dz_row, dz_col, act_col
    blocks = [TensorDescriptor.from_tensor(tensor, [block, block]) for tensor in tensors]
    grid = triton.cdiv(N, block), triton.cdiv(T, block)
    # The factor: the product comes times FP8_GRAD * FP8_W, and dz is to be times FP8_GRAD
    relu_squared_backward_kernel[grid](
        *blocks, scales, act_scale, T, K, factor=2 / FP8_W, BLOCK=block, num_warps=8, num_stages=3
    )
    return dz_row, dz_col.t(), act_col.t()


class FP8ReluSquaredMLP(torch.autograd.Function):
    """relu(x @ w1.T)^2 @ w2.T in FP8, with a scale for each row of the activation.

    w2_scales (1, K) is 1 / FP8_W for each column: with scales of rows `_scaled_mm` needs scales of columns, too.
    Records use the maximum of the step before instead, which would be state in a checkpoint.
    """

    @staticmethod
    def forward(ctx, x, w1, w2, w2_scales, has_tma):
        ctx.has_tma = has_tma
        x_q = quantize(x, FP8_X, torch.float8_e4m3fn)
        w1_q = quantize(w1, FP8_W, torch.float8_e4m3fn)
        w2_q = quantize(w2, FP8_W, torch.float8_e4m3fn)
        z = fp8_matmul(x_q, w1_q.t(), FP8_X * FP8_W, x.dtype, fast=True)  # (T, N)
        act_q, scales = relu_squared_fp8(z)
        ctx.save_for_backward(x_q, w1_q, w2_q, act_q, scales)
        return torch._scaled_mm(act_q, w2_q.t(), scales, w2_scales, out_dtype=x.dtype, use_fast_accum=True)  # (T, K)

    @staticmethod
    def backward(ctx, grad):
        x_q, w1_q, w2_q, act_q, scales = ctx.saved_tensors
        act_scale = 1 / scales.max()  # one for all: a product that sums over tokens cannot have a scale for each
        grad_q = quantize(grad, FP8_GRAD, torch.float8_e5m2)
        dz_row, dz_col, act_col = relu_squared_backward(grad_q, w2_q, act_q, scales, act_scale, ctx.has_tma)
        grad_w2 = fp8_matmul(grad_q.t(), act_col, FP8_GRAD * act_scale, grad.dtype)
        grad_x, grad_w1 = fp8_linear_backward(dz_row, dz_col, x_q, w1_q, grad.dtype)
        # In c_fc's layout: with another one `_foreach_add_` falls back to a launch for each tensor
        return grad_x, grad_w1.t().contiguous().t(), grad_w2, None, None


class MLP(nn.Module):
    """A map of x (T, K) to (T, K) through hidden units, whose activation is the square of relu.

    Its loss is 1 to 2% lower than GELU's (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977).
    """

    def __init__(self, cfg: Hyperparameters, scale_per_token: bool):
        super().__init__()
        K = cfg.model_dim
        self.c_fc = uniform_weight(K, K, cfg.mlp_dim)  # stored transposed, so that Muon can batch it with c_proj
        self.c_proj = nn.Parameter(torch.zeros(K, cfg.mlp_dim))
        self.scale_per_token = scale_per_token  # MUDD makes a scale for each token, else it is a parameter
        self.fp8 = cfg.layers_fp8
        if self.fp8:
            # A constant. As a buffer it is filled once, and not in every call
            self.register_buffer("w2_scales", torch.full((1, K), 1 / FP8_W), persistent=False)
        self.has_tma = cfg.device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return the MLP's output times `scale`, which is () for all tokens or (T, 1) for each.

        A scale for all tokens is folded into c_proj, so that its gradient needs no saved (T, K) product.
        """
        c_fc = self.c_fc.mT.type_as(x)
        c_proj = self.c_proj.type_as(x) if self.scale_per_token else scale * self.c_proj.type_as(x)
        if self.fp8 and torch.is_grad_enabled():
            y = FP8ReluSquaredMLP.apply(x, c_fc, c_proj, self.w2_scales, self.has_tma)
        else:
            y = F.linear(F.relu(F.linear(x, c_fc)).square(), c_proj)
        return scale * y if self.scale_per_token else y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of heads x (T, H / n, n, halves, 2, D / 4), in pairs of its two quarters (record 17).

    n heads attend as a pair, or each alone. A whole head has two halves, of which the second stays as it is; a half
    head has one. They are not split: with a split and a cat the compiler makes three kernels.
    """
    half = torch.arange(x.size(-3), device=x.device).view(-1, 1, 1)
    sign = 1 - 2 * torch.arange(2, device=x.device).view(2, 1)  # (a, b) becomes (a cos + b sin, b cos - a sin)
    return torch.where(half == 0, x * cos + x.flip(-2) * sin * sign, x)


def norm_rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return y = scale R (x / rms(x)), for the rotation R of `rotate`, and 1 / rms(x) (T, H / n, n, 1, 1, 1)."""
    x32 = x.to(scale.dtype)
    inverse_rms = (x32.square().mean((-3, -2, -1), keepdim=True) + torch.finfo(x32.dtype).eps).rsqrt()
    y = rotate(x32 * inverse_rms, cos, sin) * scale
    return y if x32 is x else y.type_as(x), inverse_rms  # as in RMSNorm


def norm_rotate_backward(grad, y, inverse_rms, cos, sin, scale) -> Tensor:
    """Return the gradient with respect to x of `norm_rotate`, from that with respect to y.

    With r = 1 / rms(x), z = r x and a gradient g:    dx = r (s R'g - z mean(z . s R'g))
    A rotation keeps products, so z . s R'g = y . g, and z = R'y / s:    dx = r (s R'g - (mean(y . g) / s) R'y)
    The sum is not formed before the rotation: the compiler would store it in fp32 first.
    """
    g = materialize(grad).to(scale.dtype)
    along_y = (g * y).mean((-3, -2, -1), keepdim=True) / scale
    dx = scale * rotate(g, cos, -sin) - along_y * rotate(y.to(scale.dtype), cos, -sin)
    return materialize((inverse_rms * dx).type_as(y))


class NormRotate(torch.autograd.Function):
    """QK-norm, rotary embedding (arXiv:2104.09864) and a scale for heads, shaped as in `rotate`. It saves y, not x."""

    @staticmethod
    def forward(ctx, x, cos, sin, scale):
        y, inverse_rms = norm_rotate(x, cos, sin, scale)
        ctx.save_for_backward(y, inverse_rms, cos, sin, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        return norm_rotate_backward(grad, *ctx.saved_tensors), None, None, None


class FP8QKV(torch.autograd.Function):
    """x @ w.T in FP8 as queries, keys and values, of which the first two pass through `NormRotate`.

    x (T, K); w (N, K): rows of queries, keys, values; split: the shape of a token's queries in `rotate`, without T.
    """

    @staticmethod
    def forward(ctx, x, w, cos, sin, scale, split):
        x_q = quantize(x, FP8_X, torch.float8_e4m3fn)
        w_q = quantize(w, FP8_W, torch.float8_e4m3fn)
        width = math.prod(split)
        qkv = fp8_matmul(x_q, w_q.t(), FP8_X * FP8_W, x.dtype, fast=True)
        q, k, v = qkv.split([width, width, len(w) - 2 * width], dim=1)
        one = torch.ones_like(scale)
        q, q_inverse_rms = norm_rotate(q.reshape(len(x), *split), cos, sin, scale)
        k, k_inverse_rms = norm_rotate(k.reshape(len(x), *split), cos, sin, one)
        ctx.save_for_backward(x_q, w_q, q, q_inverse_rms, scale, k, k_inverse_rms, one, cos, sin)
        return q, k, v

    @staticmethod
    def backward(ctx, *grads):
        x_q, w_q, *saved = ctx.saved_tensors
        backward = qkv_backward_with_kernel if can_use_kernels(grads[0]) else qkv_backward
        dz_row, dz_col = backward(grads, saved[:3], saved[3:6], *saved[6:])
        return *fp8_linear_backward(dz_row, dz_col, x_q, w_q, grads[0].dtype), None, None, None, None


def qkv_backward(grads, saved_q, saved_k, cos, sin) -> tuple[Tensor, Tensor]:
    """Return FP8_GRAD * dz (T, N) of the product in `FP8QKV`, in e5m2: row-major for x, column-major for w.

    grads: of queries, keys and values. saved_q, saved_k: y, 1 / rms(x) and the scale of `norm_rotate`.
    """
    q, k = (norm_rotate_backward(grad, y, r, cos, sin, s) for grad, (y, r, s) in zip(grads, (saved_q, saved_k)))
    dz = quantize(torch.cat([q.flatten(1), k.flatten(1), grads[2]], dim=1), FP8_GRAD, torch.float8_e5m2)
    return dz, dz  # `fp8_matmul` transposes where it has to


def qkv_backward_with_kernel(
    grads, saved_q, saved_k, cos, sin, dtype: torch.dtype = torch.float8_e5m2
) -> tuple[Tensor, Tensor]:
    """Do what `qkv_backward` does. A kernel stores both layouts, for queries, keys and values by a launch each.

    The compiler makes three passes, bf16 gradient, rows, columns: 1.8 GB more in a step of gpt2's stage 3. Tests set
    dtype, as Triton's interpreter keeps FP8 as bits.
    """
    T, n, quarter = len(cos), cos.size(2), cos.size(-1)
    widths = [grad.numel() // T for grad in grads]
    N = sum(widths)
    dz_row = torch.empty(T, N, dtype=dtype, device=cos.device)
    dz_col = dz_row.new_empty(N, T)
    first = 0  # column of dz
    for grad, width, saved in zip(grads, widths, (saved_q, saved_k, None)):
        grad = grad.contiguous()
        y, inverse_rms, scale = saved or [grad] * 3  # for values these are placeholders that the kernel does not read
        D = grad.shape[3:].numel() if saved else 128  # columns of a program: a head, or some of the values
        block = 4096 // D  # tokens of a program, which has that many numbers in registers
        qkv_backward_kernel[triton.cdiv(width, D), triton.cdiv(T, block)](
            grad, y, inverse_rms, scale, cos, sin, dz_row, dz_col, T, width, N, first,
            n=n, D=D, quarter=quarter, factor=FP8_GRAD, is_rotated=saved is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
        first += width
    return dz_row, dz_col.t()


# ---- Attention: causal, within documents, in sliding windows ---------------------------------------------------------
def first_visible_keys(doc_starts: Tensor, window, heads_per_pair: int = 1) -> Tensor:
    """Return the first key that each query sees, within its document and a sliding window; it never decreases.

    doc_starts (T,): where the document of each token begins. window () int32: how many positions back a query sees; a
    tensor, so that a change never recompiles. In pairs of heads a token has two positions, so there are 2 T queries.
    """
    start = doc_starts.repeat_interleave(heads_per_pair) * heads_per_pair
    return torch.maximum(start, torch.arange(len(start), dtype=torch.int32, device=start.device) - window)


def causal_mask(start: Tensor, extra_mask_mod: Callable | None = None) -> Callable:
    """Return a mask_mod sees(b, h, q, kv) for FlexAttention: causal, from `first_visible_keys` on.

    extra_mask_mod(b, h, q, kv): a further condition.
    """

    def sees(b, h, q, kv):
        visible = (q >= kv) & (kv >= start[q])
        # torch 2.11 cannot compile a function as a condition: `is None`
        return visible if extra_mask_mod is None else visible & extra_mask_mod(b, h, q, kv)

    return sees


def causal_block_mask(start: Tensor, block: int, extra_mask_mod: Callable | None = None) -> BlockMask:
    """Return `causal_mask` for FlexAttention (records 20 and 29). With extra_mask_mod all blocks count as partial.

    A query block sees the key blocks from first_visible to its own. All of its queries see all of the blocks from
    first_full to the one before its own: these are full and need no mask. Lists go from near to far. Eight tokens of
    the documents a and b, in blocks of two with a window of three:

        query  keys a a   a a   a b   b b      the query block's lists; entries behind | are padding
        0 a         x .   . .   . .   . .      partial 0 | 0 0 0     full none | 0 0 0 0
        1 a         x x   . .   . .   . .
        2 a         x x   x .   . .   . .      partial 1 | 0 0 0     full 0 | 0 0 0
        3 a         x x   x x   . .   . .
        4 a         . x   x x   x .   . .      partial 2 1 0 | 0     full none | 1 0 0 0
        5 b         . .   . .   . x   . .
        6 b         . .   . .   . x   x .      partial 3 2 | 1 0     full none | 2 1 0 0
        7 b         . .   . .   . x   x x

    The backward pass also wants the lists of each key block, of the queries that see it. As start never decreases,
    these are neighbors, too, and nothing has to be sorted.
    """
    first_visible = start[::block] // block
    first_full = (start[block - 1 :: block] + block - 1) // block
    own = torch.arange(len(first_visible), dtype=torch.int32, device=start.device)  # number of each block
    # For each key block: the query block behind the last that sees any of it, and behind the last that sees all of it.
    # As both starts never decrease, it is enough to count
    end_visible = (first_visible <= own[:, None]).sum(1, dtype=torch.int32)
    end_full = (first_full <= own[:, None]).sum(1, dtype=torch.int32)
    # With a further condition no block is known to be full
    num_full_keys = (own - first_full).clamp(min=0) * (extra_mask_mod is None)
    num_full_queries = (end_full - own - 1).clamp(min=0) * (extra_mask_mod is None)
    num_visible_keys = own - first_visible + 1  # from first_visible to its own
    num_visible_queries = end_visible - own  # from its own to the one before end_visible
    keys_of_queries = block_lists(own, num_visible_keys, num_full_keys, step=-1)
    queries_of_keys = block_lists(own, num_visible_queries, num_full_queries, step=1)
    lengths = len(start), len(start)
    sees = causal_mask(start, extra_mask_mod)
    return BlockMask(lengths, *keys_of_queries, *queries_of_keys, BLOCK_SIZE=(block, block), mask_mod=sees)  # type: ignore[misc]


def block_lists(own: Tensor, num_visible: Tensor, num_full: Tensor, step: int) -> tuple[Tensor, ...]:
    """Return what `BlockMask` wants for each of N blocks: how many blocks are partial, which, how many full, which.

    A block itself is partial. The next num_full blocks in the direction of `step` are full, those after them partial.
    """
    slot = torch.arange(len(own), dtype=torch.int32, device=own.device)  # positions in a list
    last = len(own) - 1  # padding names blocks, too: FlexAttention loads the first entry even of an empty list
    full = (own[:, None] + step * (1 + slot)).clamp(0, last)
    # How far away each partial block is: 0 (itself), then num_full + 1, num_full + 2, ...
    away = torch.where(slot == 0, 0, num_full[:, None] + slot)
    partial = (own[:, None] + step * away).clamp(0, last)
    return tuple(t[None, None] for t in (num_visible - num_full, partial, num_full, full))  # of all heads


class BandMask:
    """A mask for attention in plain PyTorch: FlexAttention has no backward pass on CPUs.

    A block of queries reads a band of keys: its own tokens and those before it, as far as the widest window reaches.
    Before the first token there is padding. bias (N, block, band): 0 where a token sees another, -1e30 where not. Of
    the pointer's two masks it is (2, N, block, band).
    """

    def __init__(self, sees: Callable, T: int, block: int, max_window: int, dtype: torch.dtype):
        band = block * (1 + math.ceil(max_window / block))
        q = torch.arange(T, dtype=torch.int32).view(-1, block, 1)
        kv = q[:, -1:] + torch.arange(1 - band, 1, dtype=torch.int32)
        heads = torch.arange(2)[:, None, None, None]  # the pointer's mask asks for the head: its bias is for both
        visible = (kv >= 0) & sees(None, heads, q, kv.clamp(min=0))
        # Not -inf, whose gradients are NaN where the pointer's second mask shows nothing
        self.bias = torch.where(visible, torch.zeros((), dtype=dtype), -1e30)

    def bands(self, t: Tensor) -> Tensor:
        """Return the band of t (T, H, D) for each of N blocks of queries, as (H, N, band, D)."""
        block, band = self.bias.shape[-2:]
        padded = F.pad(t, (0, 0, 0, 0, band - block, 0))
        parts = [padded[i : i + len(t)].unflatten(0, (-1, block)) for i in range(0, band, block)]
        return torch.cat(parts, dim=1).permute(2, 0, 1, 3)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the masked scores q k' of q and k (T, H, D), as (H, N, block, band)."""
        blocks = q.unflatten(0, (-1, self.bias.size(-2))).permute(2, 0, 1, 3)
        return blocks @ self.bands(k).mT + self.bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q k') v (T, H, D); v has a D of its own. The cost grows with the window, not as T^2."""
        # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries)
        y = torch.softmax(self.scores(q, k), dim=-1) @ self.bands(v)  # (H, N, block, D)
        return y.flatten(1, 2).transpose(0, 1)


def attention_mask(
    start: Tensor, max_window: int, cfg: Hyperparameters, extra_mask_mod: Callable | None = None
) -> BlockMask | BandMask:
    """Return `causal_mask` as the device takes it. max_window: the most positions back that any query ever sees."""
    if cfg.device == "cuda":
        return causal_block_mask(start, cfg.block_size, extra_mask_mod)
    return BandMask(
        causal_mask(start, extra_mask_mod), len(start), cfg.block_size, max_window, getattr(torch, cfg.dtype)
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | BandMask, heads_per_pair: int) -> Tensor:
    """Return softmax(q k') v of each head (T, H, D) within the mask; v has a D of its own.

    The heads of a pair, h and h + H / 2, alternate in one sequence of 2 T.
    """
    T, H, D = v.shape
    q, k, v = (t.reshape(T * heads_per_pair, H // heads_per_pair, -1) for t in (q, k, v))
    if isinstance(mask, BandMask):
        return mask.attend(q, k, v).reshape(T, H, D)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    # Rows are safe as each query sees a key: itself. On an H100 4 warps instead of 8 spill registers in the backward
    # pass, and for half heads in the forward pass, too
    options: dict = dict(ROWS_GUARANTEED_SAFE=True, bwd_num_warps=8)
    if q.size(-1) == 64:
        options["fwd_num_warps"] = 8
        # On 8.x and 12.x these blocks spill least in the backward pass: 0 bytes on 8.9 and 164 on 12.0, instead of 504
        # and 752 (compiled, never run)
        if torch.cuda.get_device_properties().major in (8, 12):
            options |= dict(bwd_BLOCK_M1=32, bwd_BLOCK_N1=128, bwd_BLOCK_M2=128, bwd_BLOCK_N2=32)
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=options)  # type: ignore[call-overload]
    return y.squeeze(0).transpose(0, 1).reshape(T, H, D)


class AttentionContext(NamedTuple):
    """What a kind of attention needs beside queries, keys and values."""

    mask: BlockMask | BandMask
    cos: Tensor  # (T, 1, heads_per_pair, 1, 1, D / 4): see `CausalSelfAttention.normalize`
    sin: Tensor
    scale: Tensor  # (): factor on scores


class CausalSelfAttention(nn.Module):
    """Attention with QK-norm, rotary and value embeddings, from x (T, K), of unit RMS, to (T, K).

    Half heads (record 92) use the first D / 2 rows of each head, or columns of c_proj. The matrices are whole all the
    same, so that Muon has few shapes: the other half is never read, and only decays.
    """

    def __init__(self, cfg: Hyperparameters, layer: Layer):
        super().__init__()
        H = cfg.num_heads
        D = cfg.head_dim
        K = cfg.model_dim
        self.cfg = cfg
        self.kind = ATTENTION[layer.attention]
        self.qk_dim = D // 2 if layer.half_qk else D
        self.v_dim = D // 2 if layer.half_v else D
        self.scale_per_token = layer.mudd is not None
        matrix_rows = cfg.heads_per_matrix * D
        self.qk_w = uniform_weight(K, 2 * H * D // matrix_rows, matrix_rows, K)  # a stack of matrices for Muon
        self.v_w = uniform_weight(K, H * D, K)
        self.c_proj = uniform_weight(H * D, K, H * D)  # not zero: record 64
        # On values and on the output: records 47 (@roeeshenberg) and 48 (@ChrisJMcCormick)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))
        self.value_gate = None
        if layer.value_embed and cfg.value_gate_inputs and layer.mudd is None:
            self.value_gate = nn.Parameter(torch.zeros(H, cfg.value_gate_inputs, dtype=getattr(torch, cfg.dtype)))
        if not self.kind.rotary:  # queries and keys begin alike (arXiv:2305.09828)
            q, k = self.qk_w.data.chunk(2)
            k.copy_(q)

    def forward(
        self,
        x: Tensor,
        value_embed: Tensor | None,
        mudd_values: Tensor | None,
        context: AttentionContext,
        gates: "Gates",
        scale: Tensor,
    ) -> Tensor:
        """Return the output (T, K) times `scale`, which is () or, with MUDD, (T, 1), as in `MLP.forward`.

        value_embed and mudd_values (T, H D): a row of a table, and a mix of streams, that are added to the values.
        """
        value_lambda, output_lambda = self.lambdas
        q, k, v = self.project(x, value_lambda, context)  # (T, H, qk_dim) twice, (T, H, v_dim)
        if value_embed is not None:
            v = v + self.gate_value_embed(value_embed, x, gates)
        if mudd_values is not None:
            v = v + mudd_values.view_as(v)
        y = attend(q, k, v, context.mask, self.kind.heads_per_pair)  # (T, H, v_dim)
        # A head leaves out what it shares with the token's own value: record 82 (@_djdumpling)
        if gates.xsa is not None:
            overlap = (y * v).sum(-1, keepdim=True)
            along_v = overlap / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
            y = y - gates.xsa.transpose(0, 1).tanh() * along_v * v
        if gates.head_gate is not None:  # a head may attend to nothing: record 28 (@classiclarryd)
            y = y * gates.head_gate.transpose(0, 1)
        c_proj = self.c_proj.unflatten(1, (y.size(1), -1))[..., : y.size(-1)].flatten(1)  # (K, H v_dim)
        if self.scale_per_token:
            return scale * linear(y.flatten(1), output_lambda * c_proj)
        return linear(y.flatten(1), scale * (output_lambda * c_proj))

    def project(self, x: Tensor, value_lambda: Tensor, context: AttentionContext) -> list[Tensor]:
        """Return queries, scaled, and keys (T, H, qk_dim), and values (T, H, v_dim), from one merged product."""
        H = self.cfg.num_heads
        D = self.cfg.head_dim
        qk_w = self.qk_w.view(2 * H, D, -1)[:, : self.qk_dim]
        v_w = value_lambda * self.v_w.view(H, D, -1)[:, : self.v_dim]
        qkv_w = torch.cat([qk_w.flatten(0, 1), v_w.flatten(0, 1)]).type_as(x)
        n = self.kind.heads_per_pair
        split = H // n, n, 2 * self.qk_dim // D, 2, D // 4  # of a token: H / n, n, halves, 2, D / 4
        # Attention without rotary embedding has no form in FP8: no preset for GPUs has it
        if self.cfg.layers_fp8 and torch.is_grad_enabled() and self.kind.rotary:
            q, k, v = FP8QKV.apply(x, qkv_w, context.cos, context.sin, context.scale, split)
        else:
            # One split of all three: so the backward pass writes their gradients into one buffer
            sizes = [H * self.qk_dim, H * self.qk_dim, H * self.v_dim]
            q, k, v = F.linear(x, qkv_w).split(sizes, dim=1)
            q, k = self.normalize(q.reshape(len(x), *split), k.reshape(len(x), *split), context)
        q, k, v = (t.reshape(len(x), H, -1) for t in (q, k, v))
        if self.kind.key_offset:
            offset_dims = int(self.kind.key_offset * k.size(-1))
            own, before = k.split([k.size(-1) - offset_dims, offset_dims], dim=-1)
            k = torch.cat([own, shift_later(before, 1)], dim=-1)
        return [q, k, v]

    def normalize(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return queries, scaled, and keys: QK-norm (@Grad62304977), and rotary embedding; all shaped as in `rotate`.

        Quirk: `attend` puts the heads h < H / 2 of pairs first, at 2 t, and the others at 2 t + 1, but rotations go by
        h % 2. So of gpt2's pairs (0, 3), (1, 4), (2, 5) the second has its positions swapped.
        """
        if self.kind.rotary:
            q = NormRotate.apply(q, context.cos, context.sin, context.scale)
            k = NormRotate.apply(k, context.cos, context.sin, torch.ones_like(context.scale))
            return q, k
        q, k = (norm(t.flatten(-3)) for t in (q, k))
        return context.scale.type_as(q) * q, k

    def gate_value_embed(self, value_embed: Tensor, x: Tensor, gates: "Gates") -> Tensor:
        """Return the gated value embedding (T, H, v_dim).

        After value residuals (arXiv:2410.17897): record 14 (@KoszarskyB). Gates: record 55 (@classiclarryd); they read
        the embedding, too: record 70 (@photon_mz).
        """
        H = self.cfg.num_heads
        embed = value_embed.unflatten(1, (H, -1))[..., : self.v_dim]
        if self.value_gate is not None:
            n = self.value_gate.size(1) // 2
            gate_inputs = torch.cat([x[:, :n], value_embed[:, :n]], dim=-1)
            return 2 * sigmoid_gate(gate_inputs, self.value_gate)[:, :, None] * embed
        if gates.value_embed is not None:  # one for either half of the heads
            return gates.value_embed.transpose(0, 1).repeat_interleave(H // 2, dim=1) * embed
        return embed


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
MUDD, GATE_NET, PARAMETER = "MUDD", "gate network", "parameter"
# Gates are factors that a layer learns, some for all tokens and some for each token. For each gate, its possible makers
# in order of preference: the first one that the layer has makes it. A gate network serves the layers from its own up to
# the next network's
MAKERS = dict(
    to_values=[MUDD],
    to_stream=[MUDD],
    value_embed=[MUDD],
    resid=[MUDD, PARAMETER],
    post=[MUDD, PARAMETER],
    xsa=[GATE_NET],
    head_gate=[GATE_NET],
    x0=[MUDD, GATE_NET],
    ngram=[MUDD, GATE_NET, PARAMETER],
    skip=[GATE_NET],
)


class Gates(NamedTuple):
    """A layer's gates, of n values each: (n,) for all tokens, if it is a parameter, or (n, T, 1) for each token."""

    resid: Tensor  # n = 2: on the residual stream, before attention and before the MLPs
    post: Tensor | None = None  # 2: on the outputs of attention and of the MLPs (record 73)
    x0: Tensor | None = None  # 1: on the embedding
    ngram: Tensor | None = None  # 1: on the embeddings of n-grams
    skip: Tensor | None = None  # 1: on the output of an earlier layer
    xsa: Tensor | None = None  # H: before a tanh, on the part along the token's own value that a head subtracts
    head_gate: Tensor | None = None  # H: on the output of each head
    to_stream: Tensor | None = None  # 3: weights of MUDD's mix for the residual stream
    to_values: Tensor | None = None  # 3: weights of its mix for the values
    value_embed: Tensor | None = None  # 2: on the value embedding, for either half of the heads


GateValues = dict[str, list[float]]  # by name the initial values of gates


def gate_inits(number: int, maker: str, cfg: Hyperparameters) -> GateValues:
    """Return those gates of a layer that `maker` makes, with the record's initial values.

    Raise UserError if one has no maker.
    """
    layer = cfg.layers[number]
    init: GateValues = {}
    if layer.mudd is not None:
        init |= dict(to_values=[0.0] * 3, to_stream=[0.0] * 3, value_embed=[2.0] * 2)
    init["resid"] = [cfg.resid_lambda_init] * 2
    if layer.attention is not None or layer.mlps:
        init["post"] = [1.0] * 2
    if layer.xsa:
        init["xsa"] = [0.0] * cfg.num_heads
    if layer.head_gate:
        init["head_gate"] = [0.25] * cfg.num_heads
    if layer.x0:
        init["x0"] = [0.0]
    if layer.ngram_input or layer.ngram:
        init["ngram"] = [cfg.ngram_lambda_init]
    if layer.skip is not None:
        init["skip"] = [0.5]
    has_net = any(row.gate_net for row in cfg.layers[: number + 1])
    available = {MUDD: layer.mudd is not None, GATE_NET: has_net, PARAMETER: True}
    made = {}
    for name, values in init.items():
        makers = [it for it in MAKERS[name] if available[it]]
        if not makers:
            raise UserError(f"layer {number}: its gate {name} needs a gate_net in this layer or before")
        if makers[0] == maker:
            made[name] = values
    return made


GATE_SCALE = 0.1  # factor on what networks output: fixed for MUDD and head_net, a parameter for gate_nets


class GateNet(nn.Module):
    """A network that computes gates for each token from the residual stream x (T, K): scale (W2 gelu(W1 x) + b2).

    init: its gates by layer. groups: if not 0, a gate has a value for each of so many groups of channels, the above
    plus scale W2g gelu(W1 x) (record 92). Multiway dynamic dense connections (MUDD, arXiv:2502.12170; record 81) and
    gates (record 85): both by @Lisennlp.
    """

    def __init__(self, cfg: Hyperparameters, init: dict[int, GateValues], groups: int = 0):
        super().__init__()
        # Quirk: bf16, in which a step of 8e-4 is lost beside a bias of 2.5 = 0.25 / GATE_SCALE: it never moves
        dtype = getattr(torch, cfg.dtype)
        self.init = init
        bias = [*chain(*(values for gates in init.values() for values in gates.values()))]
        w1 = torch.empty(cfg.gate_net_dim, cfg.model_dim).uniform_(-1, 1) * cfg.model_dim**-0.5
        self.w1 = nn.Parameter(w1.to(dtype))
        self.w2 = nn.Parameter(torch.zeros(len(bias), cfg.gate_net_dim, dtype=dtype))
        self.b2 = nn.Parameter((torch.tensor(bias) / GATE_SCALE).to(dtype))
        self.w2g = nn.Parameter(torch.zeros(len(bias), groups, cfg.gate_net_dim, dtype=dtype)) if groups else None

    def forward(self, x: Tensor, scale: Tensor | float = GATE_SCALE) -> dict[int, dict[str, Tensor]]:
        """Return the gates by layer and name: (n, T, 1), with groups (n, T, groups), in the precision of x."""
        hidden = F.gelu(linear(x, self.w1))  # (T, gate_net_dim)
        values = (scale * (linear(hidden, self.w2) + self.b2.type_as(x))).mT[:, :, None]  # (all gates, T, 1)
        if self.w2g is not None:
            by_group = linear(hidden, self.w2g.flatten(0, 1)).unflatten(1, self.w2g.shape[:2])  # (T, all gates, groups)
            values = values + scale * by_group.transpose(0, 1)
        sizes = [len(init) for gates in self.init.values() for init in gates.values()]
        parts = iter(values.split(sizes))
        return {number: {name: next(parts) for name in gates} for number, gates in self.init.items()}


def mix(weights: Iterable[Tensor], streams: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of streams."""
    return sum(weight * stream for weight, stream in zip(weights, streams))  # type: ignore[return-value]


class SharedInputs(NamedTuple):
    """What every layer may read beside the residual stream."""

    x0: Tensor  # (T, K): the normalized embedding (record 9, @KoszarskyB)
    ngrams: Tensor  # (T, K): the sum of the embeddings of the token's n-grams (record 62, @classiclarryd)
    value_embeds: dict[int, Tensor]  # (T, H D), by layer
    attention: dict[str, AttentionContext]  # by kind of attention


class BlockOutputs(NamedTuple):
    """What a layer read and made, each (T, K): later layers and the head read it."""

    block_input: Tensor  # the residual stream before the layer; with n-grams, if they are added to the input
    value_embed: Tensor | None  # (T, H D)
    attn_input: Tensor  # of unit RMS
    mlp_input: Tensor  # of unit RMS
    output: Tensor  # the residual stream after the layer


class Block(nn.Module):
    """A layer. With gates g, for the residual stream x (T, K); on the right, what in its row makes it so:

        x <- x + g.ngram * ngrams                                                   ngram_input
        x <- x, with channels of tokens before                                      shift
        x <- x + g.to_stream . streams                                              mudd
        attn_input = norm(x), or norm(outputs[attn_input])                          attn_input
        x <- g.resid[0] * x, or x + sigmoid(skip_lambda) * g.skip * outputs[skip]   skip
        x <- x + g.post[0] * attention(attn_input)                                  attention
        x <- x + g.x0 * x0                                                          x0
        x <- x + g.ngram * ngrams                                                   ngram
        mlp_input = norm(x)
        x <- g.resid[1] * x + g.post[1] * mlp(mlp_input) + ...                      mlps

    MUDD computes gates from x as it comes in, a gate network from x as it enters the network's own layer. With mudd,
    streams = (input of layer 0, outputs[mudd], x), x0 is replaced by the first of them (a quirk), and attention adds
    g.to_values . streams to its values.
    """

    def __init__(self, cfg: Hyperparameters, number: int):
        super().__init__()
        layer = cfg.layers[number]
        self.number = number
        self.layer = layer
        has_mudd = layer.mudd is not None
        if (has_mudd or layer.head_mix) and cfg.model_dim != cfg.num_heads * cfg.head_dim:
            raise UserError(f"layer {number} mixes streams with values: expected --model_dim num_heads * head_dim")
        self.attn = CausalSelfAttention(cfg, layer) if layer.attention is not None else None
        self.mlps = nn.ModuleList(MLP(cfg, scale_per_token=has_mudd) for _ in range(layer.mlps))
        if layer.skip is not None:
            self.skip_lambda = nn.Parameter(torch.tensor(-1.5))  # before a sigmoid: record 32 (@bernard24)
        self.mudd_net = GateNet(cfg, {number: gate_inits(number, MUDD, cfg)}) if has_mudd else None
        self.gates = nn.ParameterDict()
        for name, values in gate_inits(number, PARAMETER, cfg).items():
            self.gates[name] = nn.Parameter(torch.tensor(values))

    def all_gates(self, x: Tensor, net_gates: dict[str, Tensor]) -> Gates:
        """Return the layer's gates, whoever makes them. net_gates: those that a gate network has made for it."""
        of_mudd = self.mudd_net(x)[self.number] if self.mudd_net is not None else {}
        return Gates(**self.gates, **net_gates, **of_mudd)

    def forward(
        self, x: Tensor, net_gates: dict[str, Tensor], shared: SharedInputs, earlier: list[BlockOutputs]
    ) -> BlockOutputs:
        """Return what the layer makes of the residual stream x (T, K). earlier: the outputs of the layers before."""
        layer = self.layer
        gates = self.all_gates(x, net_gates)
        # By unbind, as two indexed elements would get two gradients, which are added up
        resid_attn, resid_mlp = gates.resid.unbind()
        post_attn, post_mlp = (None, None) if gates.post is None else gates.post.unbind()
        if layer.ngram_input:
            x = x + gates.ngram[0] * shared.ngrams
        block_input = x
        if layer.shift:
            # From here on some channels are those of earlier tokens, even of another document: after RWKV
            # (arXiv:2305.13048)
            parts = x.tensor_split(len(layer.shift), dim=1)
            x = torch.cat([shift_later(part, n) for part, n in zip(parts, layer.shift)], dim=1)
        mudd_values = None
        x0 = shared.x0
        if layer.mudd is not None:
            x0 = earlier[0].block_input  # Quirk: with n-grams, unlike the x0 of other layers
            streams = [x0, earlier[layer.mudd].output, x]
            mudd_values = mix(gates.to_values, streams)
            x = x + mix(gates.to_stream, streams)
        # Attention may read an earlier layer's output: record 77 (@classiclarryd)
        attn_input = norm(x if layer.attn_input is None else earlier[layer.attn_input].output)
        if layer.skip is None:
            x = resid_attn * x
        else:  # U-Net: record 11 (@brendanh0gan). Quirk: the skip has two factors, and resid[0] is not used
            x = x + self.skip_lambda.sigmoid() * gates.skip[0] * earlier[layer.skip].output
        value_embed = shared.value_embeds.get(self.number)
        if self.attn is not None:
            context = shared.attention[layer.attention]
            x = x + self.attn(attn_input, value_embed, mudd_values, context, gates, post_attn)
        if layer.x0:
            x = x + gates.x0[0] * x0
        if layer.ngram:
            x = x + gates.ngram[0] * shared.ngrams
        mlp_input = norm(x)
        x = resid_mlp * x
        for mlp in self.mlps:
            x = x + mlp(mlp_input, post_mlp)
        return BlockOutputs(block_input, value_embed, attn_input, mlp_input, x)


class AccumulatingEmbedding(torch.autograd.Function):
    """Rows (..., K) of a table (rows, K), by their index (...). Their gradients are added to `grad_buffer`.

    Autograd would make a gradient of the table's size for each sequence: a fill, a cast and an addition more.
    """

    @staticmethod
    def forward(ctx, table, index, grad_buffer):
        ctx.save_for_backward(index)
        ctx.grad_buffer = grad_buffer
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        grad = grad.flatten(0, -2).to(ctx.grad_buffer.dtype)
        ctx.grad_buffer.index_add_(0, index.flatten(), grad)
        return None, None, None


class Table(nn.Module):
    """A table of which a sequence reads rows.

    grad_buffer: the optimizer's, which `Trainer` sets. Without it autograd makes the gradient of `weight`.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.grad_buffer: Tensor | None = None

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows (..., K) of an index (...)."""
        if self.grad_buffer is None:
            return F.embedding(index, self.weight)
        return AccumulatingEmbedding.apply(self.weight, index, self.grad_buffer)


class GPT(nn.Module):
    """The language model, from the inputs of a sequence to the sum of its losses."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg = cfg
        K = cfg.model_dim
        vocab_size = cfg.vocab_size
        # Of activations, tables, networks, value and smear gates; the rest is in fp32
        dtype = getattr(torch, cfg.dtype)
        self.embed = Table(torch.empty(cfg.padded_vocab if cfg.tied_frac else vocab_size, K, dtype=dtype).normal_())
        self.value_embeds = nn.ModuleDict()
        for i, layer in enumerate(cfg.layers):
            if layer.value_embed:
                rows = torch.empty(vocab_size, cfg.num_heads * cfg.head_dim, dtype=dtype)
                self.value_embeds[str(i)] = Table(rows.normal_(0, cfg.value_embed_std))
        if cfg.sign_rows:  # a constant, the same in all runs
            generator = torch.Generator().manual_seed(83)
            signs = torch.randint(2, (cfg.sign_rows, K), generator=generator, device="cpu")
            self.register_buffer("signs", (2 * signs - 1).to(torch.int8))
        self.max_window = max(cfg.final_window, *chain(*(stage.windows.values() for stage in cfg.stages)))
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(len(cfg.layers)))
        self.gate_nets = self.make_gate_nets()
        self.gate_scale = nn.Parameter(torch.tensor(GATE_SCALE)) if self.gate_nets else None
        if outputs := cfg.layers[-1].head_mix:
            # Weights of `head_mix_streams`. The first output that is named begins at -0.5: record 40 (@snimu,
            # @classiclarryd)
            of_outputs = [-0.5] + [0.0] * (len(outputs) - 1)
            weights = [0.0, *of_outputs, *[0.0] * len(self.value_embeds), 0.0, 0.0]
            self.head_net = GateNet(cfg, {len(cfg.layers) - 1: dict(head_mix=weights)}, groups=cfg.mix_groups)
        if n := cfg.smear_gate_inputs:
            self.smear_gate = nn.Parameter(torch.zeros(1, n, dtype=dtype))
            self.smear_lambda = nn.Parameter(torch.tensor(0.0))
        self.pointer = Pointer(cfg) if cfg.pointer_dim else None
        head = torch.empty(cfg.padded_vocab, K, dtype=dtype if cfg.tied_frac else torch.float32)
        self.lm_head = Table(head.normal_(0, cfg.head_std))
        if cfg.head_from_values:
            # The head begins by predicting what attention finds. Its row for a token: what the token's value embedding
            # adds to the residual stream, normalized
            last = self.blocks[-1]
            values = self.value_embeds[str(last.number)].weight
            self.lm_head.weight.data[:vocab_size] = F.normalize(linear(values, last.attn.c_proj)).detach()
        if cfg.tied_frac:  # they begin equal, and stay so while updates tie them
            self.embed.weight.data.copy_(self.lm_head.weight)
        if dtype == torch.float64:
            self.double()

    def tables(self) -> list[Table]:
        """Return the tables, of which sequences read rows."""
        return [module for module in self.modules() if isinstance(module, Table)]

    def make_gate_nets(self) -> nn.ModuleDict:
        """Return the gate networks by layer. Each serves its own layer and those up to the next network's."""
        cfg = self.cfg
        numbers = [i for i, layer in enumerate(cfg.layers) if layer.gate_net]
        nets = nn.ModuleDict()
        for first, end in pairwise([*numbers, len(cfg.layers)]):
            nets[str(first)] = GateNet(cfg, {i: gate_inits(i, GATE_NET, cfg) for i in range(first, end)})
        return nets

    def forward(
        self,
        inputs: ModelInputs,
        attn_settings: AttentionSettings,
        ngram_rows: Tensor,
        ngram_grads: Tensor | None = None,
        invalid: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss, in FP8 where the configuration says so and gradients are wanted.

        ngram_rows (n, K): the rows that `ModelInputs.ngram_index` means; ngram_grads: where their gradients are added.
        invalid (T, V / 8): rows of `read_invalid_tokens`, for validation.
        """
        x = self.hidden_states(inputs, attn_settings, ngram_rows, ngram_grads)  # (T, K)
        pointer_mass = self.pointer(x, inputs) if self.pointer else None  # (T, 2)
        head = self.lm_head.weight if inputs.sampled_classes is None else self.lm_head(inputs.sampled_classes)
        if not torch.is_grad_enabled():
            return validation_loss(x, head, pointer_mass, inputs, self.cfg, invalid)
        return TrainingLoss.apply(x, head, pointer_mass, inputs.targets, inputs.loss_weights, self.cfg)

    def hidden_states(
        self,
        inputs: ModelInputs,
        attn_settings: AttentionSettings,
        ngram_rows: Tensor,
        ngram_grads: Tensor | None = None,
    ) -> Tensor:
        """Return the head's input (T, K), of unit RMS."""
        shared = SharedInputs(
            x0=self.embed_tokens(inputs.tokens),
            ngrams=self.embed_ngrams(inputs, ngram_rows, ngram_grads),
            value_embeds={int(i): table(inputs.tokens) for i, table in self.value_embeds.items()},
            attention=self.attention_contexts(inputs.doc_starts, attn_settings),
        )
        x = shared.x0
        gates: dict[int, dict[str, Tensor]] = {}  # of the last gate network, by layer and name
        outputs: list[BlockOutputs] = []
        for number, block in enumerate(self.blocks):
            if block.layer.gate_net:
                gates = self.gate_nets[str(number)](x, self.gate_scale)
            outputs.append(block(x, gates.get(number, {}), shared, outputs))
            x = outputs[-1].output
        if self.cfg.layers[-1].head_mix:
            x = x + self.head_mix(outputs)
        return norm(x)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return the normalized embedding (T, K)."""
        x = self.embed(tokens)
        if self.cfg.smear_gate_inputs:  # some of the token before, even of another document: record 34 (@classiclarryd)
            before = F.pad(x[:-1], (0, 0, 1, 0))
            x = x + self.smear_lambda * sigmoid_gate(x, self.smear_gate) * before
        return norm(x)

    def embed_ngrams(self, inputs: ModelInputs, rows: Tensor, grads: Tensor | None) -> Tensor:
        """Return the sum (T, K) of the embeddings of each token's n-grams, with their signs."""
        embeds = AccumulatingEmbedding.apply(rows, inputs.ngram_index, grads)  # (G, T, K)
        if self.cfg.sign_rows:
            embeds = embeds * self.signs[inputs.sign_index].type_as(embeds)
        return embeds.sum(0)

    def head_mix_streams(self, outputs: list[BlockOutputs]) -> list[Tensor]:
        """Return what the last layer's head_mix names, each (T, K)."""
        named = [outputs[i].output for i in self.cfg.layers[-1].head_mix]
        value_embeds = [block.value_embed for block in outputs if block.value_embed is not None]
        return [outputs[0].block_input, *named, *value_embeds, outputs[-1].mlp_input, outputs[-1].attn_input]

    def head_mix(self, outputs: list[BlockOutputs]) -> Tensor:
        """Return the mix (T, K) for the head, in which groups of channels have their own weights (record 92)."""
        groups = self.cfg.mix_groups
        weights = self.head_net(outputs[-1].output)[len(outputs) - 1]["head_mix"]  # (streams, T, groups)
        streams = [stream.unflatten(1, (groups, -1)) for stream in self.head_mix_streams(outputs)]  # (T, groups, K / g)
        return mix(weights[..., None], streams).flatten(1)

    def attention_contexts(self, doc_starts: Tensor, attn_settings: AttentionSettings) -> dict[str, AttentionContext]:
        """Return for each kind of attention its mask and rotary tables. In pairs a token has two positions."""
        contexts = {}
        for name in dict.fromkeys(layer.attention for layer in self.cfg.layers if layer.attention is not None):
            kind = ATTENTION[name]
            i = attn_settings.kinds.index(kind.window)
            start = first_visible_keys(doc_starts, attn_settings.window_sizes[i], kind.heads_per_pair)
            mask = attention_mask(start, self.max_window, self.cfg)
            cos, sin = attn_settings.rotary[i, :, : len(start)].unflatten(1, (-1, 1, kind.heads_per_pair, 1, 1))
            contexts[name] = AttentionContext(mask, cos, sin, attn_settings.attn_scales[i])
        return contexts


# ---- Pointer: the next token may stand in the document already (CPLM by Nathan Godey, proposal 379 of the speedrun) --
class Pointer(nn.Module):
    """Attention over the earlier tokens of a document: which of them comes next?

    One more token, row vocab_size of lm_head, takes part in the softmax: "a copy". Its probability is alpha. Attention
    without positions splits alpha among earlier tokens and a sink, a key of its own for "none of them", whose part
    returns to the vocabulary. `mix_copies` has the formulas. Queries and keys are projections of the head's input. A
    sequence is in blocks of pointer_block tokens; a token sees those of its document (in training of its part of
    max_attn_len) in its own block and the one before.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        K = cfg.model_dim
        D = cfg.pointer_dim
        self.cfg = cfg
        # 2, as the proposal draws it: with standard deviation 1 / sqrt(K)
        self.weight = nn.Parameter(2 * uniform_weight(K, 2 * D, K).to(getattr(torch, cfg.dtype)))
        self.sink = nn.Parameter(torch.empty(D).normal_(0, D**-0.5))
        self.gain = nn.Parameter(torch.ones(1))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys (T, D), and scores (T,) of the sink's key, from the head's input x (T, K)."""
        q, k = norm(linear(x, self.weight).unflatten(1, (2, -1))).unbind(1)
        q = (self.gain * self.cfg.pointer_dim**-0.5 * q).type_as(x)
        return q, k, q.to(self.sink.dtype) @ self.sink

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """Return each token's attention mass (T, 2): on all tokens that equal the next one, and on the sink.

        It takes two log-sum-exps of the same scores: `seen`, over all earlier tokens, and `equal`, over those of them
        that equal the next one. Attention has a head for each, which differ in their masks alone.
        """
        cfg = self.cfg
        tokens = inputs.tokens
        block = cfg.pointer_block if torch.is_grad_enabled() else cfg.val_pointer_block

        def is_earlier(b, h, q, kv):
            return (q > kv) & ((h == 0) | (tokens[kv] == inputs.next_tokens[q]))

        t = torch.arange(len(x), dtype=torch.int32, device=x.device)
        start = torch.maximum(inputs.doc_starts, (t // block - 1) * block)
        mask = attention_mask(start, min(2 * block, len(x)), cfg, extra_mask_mod=is_earlier)
        q, k, sink_scores = self.project(x)
        seen, equal = two_logsumexps(q, k, mask)  # (T,) each
        total = torch.logaddexp(seen, sink_scores)
        return torch.stack([equal - total, sink_scores - total], dim=1).exp()


def two_logsumexps(q: Tensor, k: Tensor, mask: BlockMask | BandMask) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps (T,) of the scores q k' of q and k (T, D), within either of the pointer's masks."""
    if isinstance(mask, BandMask):
        dtype = accum_dtype(q.dtype)
        seen, equal = mask.scores(q[:, None].to(dtype), k[:, None].to(dtype)).logsumexp(-1).flatten(1)
        return seen, equal
    # FlexAttention also returns sums of values, which nobody wants: 16 dimensions are the fewest that it takes. 8 warps
    # as by default on an H100: with 4 the backward pass spilled 1,368 bytes on 10.0, with 8 it spills 168
    k = k[None, None]
    options: dict = dict(scale=1.0, enable_gqa=True, kernel_options=dict(bwd_num_warps=8))
    y, aux = flex_attention(
        q.expand(1, 2, -1, -1), k, k[..., :16], block_mask=mask, return_aux=AuxRequest(lse=True), **options
    )
    # 0 * y gives y a gradient, without which torch 2.13 compiles nothing
    seen, equal = aux.lse[0] + 0 * y[0, ..., 0]
    return seen, equal


def mix_copies(p, alpha, copy_mass, sink_mass):
    """Return p', the probability of the next token after alpha, that of a copy, has been split.

    p is the softmax of the next token. copy_mass, sink_mass: what `Pointer` returns. alpha is split between copies and,
    through the sink, the vocabulary without "a copy", where the next token has p / (1 - alpha):

        p' = p + alpha (copy_mass + sink_mass p / (1 - alpha)) + 1e-9         (1e-9 keeps log p' finite)
    """
    return p + alpha * (copy_mass + sink_mass * (p / (1 - alpha))) + 1e-9


def mix_copies_backward(p, alpha, copy_mass, sink_mass, scale):
    """Return gradients of the loss -weight log p', with scale = weight / p'.

    With respect to the logits it has the form of a cross entropy with two targets, the next token and a copy. For
    logit j it is

        (next_weight + copy_weight) softmax_j - next_weight [j is the next token] - copy_weight [j is a copy]

    Returned are next_weight and copy_weight, and the gradients with respect to copy_mass and sink_mass.
    """
    p_alone = p / (1 - alpha)
    next_weight = scale * (p + alpha * sink_mass * p_alone)
    copy_weight = scale * alpha * (copy_mass + sink_mass * p_alone / (1 - alpha))
    return next_weight, copy_weight, -scale * alpha, -scale * alpha * p_alone


# ---- Head: softcapped logits and their cross entropy, in chunks of tokens, in FP8 where the GPU can ------------------
class Softmax(NamedTuple):
    """The softmax exps / total over softcapped logits of some tokens."""

    sigmoid: Tensor  # (T, V): s = sigmoid(-(z + d) 2 / c) of the logits z
    exps: Tensor  # (T, V): exponentials of the softcapped logits less r
    total: Tensor  # (T, 1): their sums
    log_p: Tensor  # (T, n): log probabilities of the targets


def softcapped_softmax(z: Tensor, targets: Tensor, cfg: Hyperparameters, invalid: Tensor | None = None) -> Softmax:
    """Return the softmax of the logits z (T, V), which it overwrites. targets (T, n): negative where there is none.

    A softcapped logit is l = r sigmoid((z + d) 2 / c), after Gemma 2's c tanh(z / c) (arXiv:2408.00118), with c = 15
    since record 18 (@KoszarskyB), asymmetric since record 54 (@classiclarryd). invalid: bits (T, V / 8) of tokens whose
    logit becomes -60 (record 91, @jvarho). The padding of the vocabulary is in the softmax, as in the record.

        s = sigmoid(-(z + d) 2 / c)
        l - r = -r s          a softmax ignores the shift by r; never above 0, so exp needs no maximum subtracted
    """
    s = z.add_(cfg.softcap_shift).mul_(-2 / cfg.lm_head_softcap).sigmoid_()  # in place: eager CPUs gain by it
    shifted = -cfg.softcap_range * s
    if invalid is not None:
        bits = (invalid[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=z.device)) & 1
        shifted.masked_fill_(bits.flatten(1) > 0, -60 - cfg.softcap_range)
    target_logits = shifted.gather(1, targets.clamp(min=0))
    exps = shifted.exp_()
    total = exps.sum(-1, keepdim=True)
    return Softmax(s, exps, total, target_logits - total.log())


def mix_arguments(softmax: Softmax, pointer_mass: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p, alpha, copy_mass and sink_mass of `mix_copies`: the first target is the next token, the last a copy."""
    alpha = softmax.log_p[:, -1].exp().clamp(max=1 - 1e-6)
    return softmax.log_p[:, 0].exp(), alpha, pointer_mass[:, 0], pointer_mass[:, 1]


def target_losses(softmax: Softmax, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None) -> Tensor:
    """Return the losses (T,) in nats, of the targets with weights (n,). pointer_mass (T, 2): None without a pointer."""
    log_p = softmax.log_p
    if pointer_mass is not None:
        mixed = mix_copies(*mix_arguments(softmax, pointer_mass))
        log_p = torch.cat([mixed.log()[:, None], log_p[:, 1:]], dim=1)
    return -(weights * (targets >= 0) * log_p).sum(-1)


def cross_entropy_gradients(
    softmax: Softmax, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None, cfg: Hyperparameters
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `target_losses` with respect to z (T, V) and to pointer_mass. Overwrites softmax.exps."""
    # Each target adds weight * (softmax - [its own logit]). Quirk: the weight of a target PAST_END still multiplies the
    # softmax, though it has no loss
    target_weights = weights * (targets != NO_TARGET)
    d_pointer_mass = None
    if pointer_mass is not None:
        arguments = mix_arguments(softmax, pointer_mass)
        scale = weights[0] / mix_copies(*arguments)
        next_weight, copy_weight, *d_masses = mix_copies_backward(*arguments, scale)
        target_weights = torch.cat([next_weight[:, None], target_weights[:, 1:-1], copy_weight[:, None]], dim=1)
        d_pointer_mass = torch.stack(d_masses, dim=1)
    d_logits = softmax.exps.mul_(target_weights.sum(-1, keepdim=True) / softmax.total)
    d_logits.scatter_add_(1, targets.clamp(min=0), -target_weights * (targets >= 0))
    dz = torch.ops.aten.sigmoid_backward(d_logits, softmax.sigmoid).mul_(cfg.softcap_range * 2 / cfg.lm_head_softcap)
    return dz, d_pointer_mass


def cross_entropy(
    z: Tensor, scale: float, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None, cfg: Hyperparameters
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses (T,), scale * dz (T, V) and d_pointer_mass (T, 2), their gradients.

    dz is in the precision of z, or in e5m2 where z is in e4m3; without FP8 scale is 1. z may be overwritten.
    """
    if can_use_kernels(z) and pointer_mass is not None:
        return cross_entropy_with_kernel(z, scale, targets, weights, pointer_mass, cfg)
    fp8 = z.dtype == torch.float8_e4m3fn
    softmax = softcapped_softmax(z.to(weights.dtype), targets, cfg)
    losses = target_losses(softmax, targets, weights, pointer_mass)
    dz, d_pointer_mass = cross_entropy_gradients(softmax, targets, weights, pointer_mass, cfg)
    return losses, quantize(dz, scale, torch.float8_e5m2) if fp8 else dz.to(z.dtype), d_pointer_mass


def cross_entropy_with_kernel(
    z: Tensor, scale: float, targets: Tensor, weights: Tensor, pointer_mass: Tensor, cfg: Hyperparameters
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `cross_entropy` does. The gradient overwrites z.

    z is read twice, the second time from a cache; the compiler's kernel took up to twice as long (measured: one H100).
    """
    c, r, d = cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    d_pointer_mass = torch.empty_like(pointer_mass)
    cross_entropy_kernel[(len(z),)](
        z, targets, weights, pointer_mass, losses, d_pointer_mass, z.size(1), len(weights),
        slope=-1 / c, shift=-d / c, range_log2=r / math.log(2), factor=scale * r * 2 / c, BLOCK=2048,
    )  # fmt: skip
    fp8 = z.dtype == torch.float8_e4m3fn
    return losses, z.view(torch.float8_e5m2) if fp8 else z, d_pointer_mass


# The head's scales are the record's and leave room: x, of unit RMS, may reach 100 and w 2 before they saturate at 448,
# e4m3's largest number. dz is at most the weights' sum of 2 times r (2 / c) / 4 = 0.77: 1.53, or 916 of e5m2's 57,344
HEAD_FP8_X, HEAD_FP8_W, HEAD_FP8_DZ = 448 / 100, 448 / 2, 448 / 0.75


def head_loss(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None, cfg: Hyperparameters
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return losses (T,), and their gradients with respect to x (T, K), w (V, K) and pointer_mass (T, 2)."""
    w_x = w.to(x.dtype)
    losses, dz, d_pointer_mass = cross_entropy(x @ w_x.T, 1.0, targets, weights, pointer_mass, cfg)
    # As (K, V), then transposed: faster than (V, K) directly (record 19)
    grad_w = (x.T @ dz).to(accum_dtype(w.dtype)).T
    return losses, dz @ w_x, grad_w, d_pointer_mass


def head_loss_fp8(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None, cfg: Hyperparameters
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what `head_loss` does, with products in FP8 (record 19, @YouJiacheng).

    x, w and the logits (record 92) are in e4m3, their gradient, which needs range more than precision, in e5m2.
    """
    x_q = quantize(x, HEAD_FP8_X, torch.float8_e4m3fn)
    w_q = quantize(w, HEAD_FP8_W, torch.float8_e4m3fn)
    z = fp8_matmul(x_q, w_q.t(), HEAD_FP8_X * HEAD_FP8_W, torch.float8_e4m3fn, fast=True)
    losses, dz, d_pointer_mass = cross_entropy(z, HEAD_FP8_DZ, targets, weights, pointer_mass, cfg)
    grad_x = fp8_matmul(dz, w_q, HEAD_FP8_DZ * HEAD_FP8_W, x.dtype)
    # As (V, K), unlike `head_loss`: sampled rows are then added to the table's gradient in atomics of four neighbors
    grad_w = fp8_matmul(dz.t(), x_q, HEAD_FP8_X * HEAD_FP8_DZ, accum_dtype(w.dtype))
    return losses, grad_x, grad_w, d_pointer_mass


class TrainingLoss(torch.autograd.Function):
    """The summed `cross_entropy` of z = x @ w.T, for x (T, K), w (V, K), targets (T, n), weights (n,).

    Its gradients are multiplied by loss_scale.

    Only a chunk of the logits (T, V) exists at a time. The forward pass computes the gradients of a chunk as well, as
    computing its logits again in the backward pass took 27 to 41% of the head's time.
    """

    @staticmethod
    def forward(ctx, x, w, pointer_mass, targets, weights, cfg):
        loss_of_chunk = head_loss_fp8 if cfg.lm_head_fp8 else head_loss
        losses, grads_x, grads_mass = [], [], []
        grad_w = None
        for start in range(0, len(x), cfg.logits_chunk):
            chunk = slice(start, start + cfg.logits_chunk)
            mass = None if pointer_mass is None else pointer_mass[chunk]
            loss, grad_x, grad_w_part, grad_mass = loss_of_chunk(x[chunk], w, targets[chunk], weights, mass, cfg)
            losses.append(loss)
            grads_x.append(grad_x)
            grads_mass.append(grad_mass)
            grad_w = grad_w_part if grad_w is None else grad_w + grad_w_part
        grad_pointer_mass = None if pointer_mass is None else torch.cat(grads_mass)
        ctx.loss_scale = cfg.loss_scale
        ctx.save_for_backward(torch.cat(grads_x), grad_pointer_mass, grad_w.to(w.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, grad):
        grad = ctx.loss_scale * grad  # here, where it is a part of other kernels
        grad_x, grad_pointer_mass, grad_w = ctx.saved_tensors
        grad_mass = None if grad_pointer_mass is None else grad * grad_pointer_mass
        # `head_loss` returns a transpose: it is stored by rows, as the buffer is to which it is added
        return grad * grad_x, (grad * grad_w).contiguous(), grad_mass, None, None, None


def validation_loss(
    x: Tensor, w: Tensor, pointer_mass: Tensor | None, inputs: ModelInputs, cfg: Hyperparameters, invalid: Tensor | None
) -> Tensor:
    """Return the summed loss of z = x @ w.T without gradients, in chunks. z is in the precision of x."""
    losses = []
    for start in range(0, len(x), cfg.val_logits_chunk):
        chunk = slice(start, start + cfg.val_logits_chunk)
        z = linear(x[chunk], w)
        bits = None if invalid is None else invalid[chunk]
        softmax = softcapped_softmax(z.to(inputs.loss_weights.dtype), inputs.targets[chunk], cfg, bits)
        mass = None if pointer_mass is None else pointer_mass[chunk]
        losses.append(target_losses(softmax, inputs.targets[chunk], inputs.loss_weights, mass))
    return torch.cat(losses).sum()


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
# torch 2.13 renamed both
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def start_collective(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective and return a function that waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


def all_gather_objects(own) -> list:
    """Return what each rank has. Hosts wait for each other, but not for GPUs."""
    everyone = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    return everyone


class ShardedOptimizer:
    """An optimizer of parameters of one precision. Every rank updates an equal shard of their rows.

    Parameters become views of one buffer: each starts at a row and is zero-padded.

        param_buffer, param_shard    all parameters, and this rank's rows; of Muon in the precision of activations
        grad_buffer, grad_shard      this rank's gradients of all, and the sums over all ranks of its own rows
        master                       this rank's rows, to which updates are added: param_shard, or an fp32 copy

    With one process a shard is the whole buffer, and grad_shard is grad_buffer.

    groups: the row of `groups` for each parameter; emas: the rows of `emas` that apply to all of them, by number;
    grad_dtype: of grad_buffer, if not the parameters': of tables, whose gradients `AccumulatingEmbedding` adds there.
    """

    wait_for_grads: Callable[[], object]
    wait_for_params: Callable[[], object]
    by_matrix = False  # whether a row of the buffers is a matrix; else it has 16 numbers, as kernels want aligned rows
    has_master = False  # True: master is an fp32 copy; parameters and gradients travel in the precision of activations

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        groups: list[Group],
        emas: dict[int, EMA],
        cfg: Hyperparameters,
        ranks: Ranks,
        grad_dtype: torch.dtype | None = None,
    ):
        self.names = [*params]
        self.params = [*params.values()]
        self.groups = groups
        self.emas = emas
        self.cfg = cfg
        self.ranks = ranks
        row = self.params[0].shape[-2:] if self.by_matrix else (16,)
        self.rows_per_param = [math.ceil(p.numel() / math.prod(row)) for p in self.params]
        shard_rows = math.ceil(sum(self.rows_per_param) / ranks.world_size)
        self.rows_per_param[-1] += shard_rows * ranks.world_size - sum(self.rows_per_param)  # padding: equal shards
        values = self.params[0].detach().new_zeros(sum(self.rows_per_param), *row)
        for p, view in zip(self.params, self.views(values)):
            view.copy_(p.detach())
        self.param_buffer = values.to(getattr(torch, cfg.dtype)) if self.has_master else values
        self.grad_buffer = torch.zeros_like(self.param_buffer, dtype=grad_dtype)
        for p, view in zip(self.params, self.views(self.param_buffer)):
            p.data = view
        self.grad_views = self.views(self.grad_buffer)
        self.param_shard = self.shard(self.param_buffer)
        self.grad_shard = self.grad_buffer
        if ranks.world_size > 1:
            # Gradients travel in the shorter precision of the two
            params_are_shorter = self.param_buffer.itemsize < self.grad_buffer.itemsize
            sent_dtype = self.param_buffer.dtype if params_are_shorter else self.grad_buffer.dtype
            self.grad_shard = torch.zeros_like(self.param_shard, dtype=sent_dtype)
        self.master = self.shard(values).clone() if self.has_master else self.param_shard
        self.state = self.init_state()
        if self.has_master:
            self.state["master"] = self.master
        ema_dtype = accum_dtype(self.master.dtype)
        self.state |= {f"ema {i}": torch.zeros_like(self.master, dtype=ema_dtype) for i in emas}

    def init_state(self) -> dict[str, Tensor]:
        """Return by name what to keep for this rank's rows."""
        raise NotImplementedError

    def update_shard(self, grad: Tensor, schedule: StepSchedule):
        """Write new values into `master` and, where that is a copy, into param_shard.

        grad: the sum over the sequences of all ranks, which the update divides by their number.
        """
        raise NotImplementedError

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the part of a buffer that belongs to each parameter, in its shape."""
        parts = buffer.split(self.rows_per_param)
        return [part.flatten()[: p.numel()].view_as(p) for part, p in zip(parts, self.params)]

    def shard(self, buffer: Tensor) -> Tensor:
        """Return the rows of a buffer that belong to this rank."""
        return buffer.chunk(self.ranks.world_size)[self.ranks.rank]

    def is_due(self, schedule: StepSchedule) -> bool:
        """Return whether a step updates the parameters, of whichever group; if not, it accumulates only."""
        return self.groups[0].name in schedule.updates

    @property
    def accumulates(self) -> bool:
        """Return whether gradients are added up. With one for each update, as of matrices on 8 GPUs, it overwrites."""
        is_single = self.cfg.batch_sequences == self.ranks.world_size and max(self.groups[0].update_interval) == 1
        return not (self.by_matrix and is_single)

    def reduce(self, tied: "ShardedOptimizer | None" = None):
        """Start to sum the gradients over the ranks; each gets the sums of its rows.

        They travel in their precision, or in that of the parameters if it is shorter. tied: the head's optimizer, whose
        gradients are added, while head and embedding are tied.
        """
        sent = self.grad_buffer  # with one process it is grad_shard, too
        if sent.dtype != self.grad_shard.dtype:
            sent = torch.empty_like(sent, dtype=self.grad_shard.dtype)
        if tied:
            torch.add(self.grad_buffer, tied.grad_buffer, out=sent)
        elif sent is not self.grad_buffer:
            sent.copy_(self.grad_buffer)
        self.wait_for_grads = start_collective(reduce_scatter, self.grad_shard, sent)

    def update(self, schedule: StepSchedule):
        """Update this rank's rows, and start to send them to the other ranks."""
        self.wait_for_grads()
        self.update_shard(self.grad_shard, schedule)
        self.wait_for_params = self.send_params()

    def send_params(self) -> Callable[[], object]:
        """Start to send this rank's parameters to the others, and return a function that waits for theirs."""
        return start_collective(all_gather, self.param_buffer, self.param_shard)

    def copy_state_from(self, other: "ShardedOptimizer"):
        """Take over the parameters and the state of another optimizer."""
        self.param_buffer.copy_(other.param_buffer)
        names = self.state.keys() & other.state.keys()
        torch._foreach_copy_([self.state[name] for name in names], [other.state[name] for name in names])

    def update_emas(self, schedule: StepSchedule):
        """Update the averages of this rank's rows."""
        for i in self.emas:
            if rate := schedule.ema_rates[i]:
                ema = self.state[f"ema {i}"]
                ema.lerp_(self.master.to(ema.dtype), rate)

    def blend_emas(self):
        """Blend the averages into the parameters. With keep_norm these get back the joint norm that they had."""
        if not self.emas:
            return
        before = blended = self.master.to(accum_dtype(self.master.dtype))
        for i, row in self.emas.items():
            blended = blended.lerp(self.state[f"ema {i}"], row.blend)
        if self.groups[0].keep_norm:
            squares = torch.stack([t.square().sum() for t in (before, blended)])
            start_collective(dist.all_reduce, squares)()
            blended *= (squares[0] / squares[1]).sqrt()
        self.master.copy_(blended)
        self.param_shard.copy_(blended)
        self.send_params()()


@lru_cache(maxsize=1)  # in gpt2 three Muon optimizers take the same numbers in a step
def to_tensors(dtype: torch.dtype, device: torch.device, **scalars: float) -> dict[str, Tensor]:
    """Return numbers as tensors, as each new value of a Python number would need a graph of its own."""
    tensors = torch.tensor([*scalars.values()], dtype=dtype).to(device, non_blocking=True).unbind()
    return dict(zip(scalars, tensors))


def adam_values(old: Tensor, mean: Tensor, squares: Tensor, scalars: dict) -> Tensor:
    """Return new values from the means of gradients and of their squares. Decay only where the step goes towards 0."""
    update = scalars["step_size"] * mean / (squares.sqrt() + scalars["eps"])
    return old - update - scalars["decay"] * old * (mean * old > 0)


def mean_gradient(total: Tensor, sequences: int, dtype: torch.dtype) -> Tensor:
    """Return the mean gradient from the sum over sequences."""
    total = total.to(dtype)
    return total if sequences == 1 else total / sequences  # nano has one, and eager code would copy it


def adam_update(shard: Tensor, grad: Tensor, m: Tensor, v: Tensor, scalars: dict, sequences: int):
    """Update rows as `Adam` says, in operations of which the compiler makes one kernel, casts and all."""
    assert shard.size(1) == 16  # tells the compiler that a thread may move several numbers at once
    grad = mean_gradient(grad, sequences, m.dtype)
    m += (1 - scalars["beta1"]) * (grad - m)
    v += (1 - scalars["beta2"]) * (grad * grad - v)
    shard.copy_(adam_values(shard.to(m.dtype), m, v, scalars))


class Adam(ShardedOptimizer):
    """Adam (arXiv:1412.6980), for tables, head, scalars and gates.

    In gpt2 it steps every other time, on the sum of two gradients (record 39, @classiclarryd), with moments in fp32
    (record 56, @ChrisJMcCormick). The weight decay is cautious (record 50, @roeeshenberg). Value embeddings later step
    every fourth time (`schedule_adam`). Small parameters of several groups share a buffer, whose rows have the numbers
    of their groups.
    """

    def init_state(self) -> dict[str, Tensor]:
        dtype = accum_dtype(self.master.dtype)
        self.param_of_row: Tensor | slice = slice(1)  # one group: the first parameter's numbers, broadcast to all rows
        if len({*self.groups}) > 1:
            params = [i for i, count in enumerate(self.rows_per_param) for _ in range(count)]
            self.param_of_row = self.shard(torch.tensor(params)).to(self.master.device)
        return dict(
            exp_avg=torch.zeros_like(self.master, dtype=dtype), exp_avg_sq=torch.zeros_like(self.master, dtype=dtype)
        )

    def update_shard(self, grad: Tensor, schedule: StepSchedule):
        m, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        by_param = [(*schedule.updates[group.name], self.cfg.adam_eps) for group in self.groups]
        numbers = torch.tensor(by_param, dtype=m.dtype).to(m.device, non_blocking=True)  # (params, numbers)
        by_row = numbers[self.param_of_row, :, None].unbind(1)  # each (rows, 1), in one group (1, 1)
        scalars = dict(zip((*AdamStep._fields, "eps"), by_row))
        update = compiled(adam_update, self.cfg.compile, dynamic=True)
        update(self.master, grad, m, v, scalars, self.cfg.batch_sequences)


NEWTON_SCHULZ = (  # a, b, c of each step: together they map singular values from 0.003 to 1 / 1.05 close to 1
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def zeropower_via_newtonschulz5(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate U V' for every matrix U S V' of G (n, rows, cols), in `dtype`. A zero matrix stays zero.

    Six steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon), with
    coefficients that differ from step to step, like those of the Polar Express (arXiv:2505.16932; record 38,
    @varunneal).
    """
    norms = G.norm(dim=(-2, -1), keepdim=True)
    X = (G / (1.05 * norms + 1e-6)).to(dtype)  # singular values are at most 1 / 1.05
    for a, b, c in NEWTON_SCHULZ:  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def normalize_neurons(update: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """Divide neurons of matrices by their RMS, and keep the norm of each matrix.

    The RMS is over the shorter dimension, so each hidden unit of an MLP has one; of queries and keys it is the input
    channels that have one. `squares`, (n, rows, 1) or (n, 1, columns), averages mean squares over steps (NorMuon,
    arXiv:2510.05491; record 41, @li_zichong, record 48, @ChrisJMcCormick).
    """
    dim = -1 if squares.size(-1) == 1 else -2
    squares.lerp_(update.square().mean(dim, keepdim=True), 1 - beta2)
    normalized = update / squares.clamp(min=1e-10).sqrt()
    norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, normalized))
    return normalized * (norms / new_norms.clamp(min=1e-10))


def muon_update(
    params: Tensor,
    grad: Tensor,
    factors: Tensor,
    state: dict,
    scalars: dict,
    decay: float,
    beta2: float,
    sequences: int,
):
    """Update matrices as `Muon` says, with its state and scalars by name. params: the master in the short precision."""
    master, fast, slow = state["master"], state["fast"], state["slow"]
    grad = mean_gradient(grad, sequences, master.dtype)
    fast.lerp_(grad, 1 - scalars["fast_beta"])
    slow.lerp_(grad, scalars["slow_rate"])
    m = slow.lerp(fast, scalars["fast_share"])
    u = zeropower_via_newtonschulz5(grad.lerp(m, scalars["momentum"]), params.dtype)
    u = normalize_neurons(u.to(master.dtype), state["squares"], beta2)
    if decay:
        u += decay * scalars["lr"] * master * (slow * master >= 0)
    master -= scalars["lr"] * factors * u
    params.copy_(master)


class Muon(ShardedOptimizer):
    """MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024), for hidden matrices of one shape.

    With g the mean gradient of the step, and two momenta that are moving averages (ANVIL, record 92):

        fast <- b fast + (1 - b) g,    b = momentum, from slow_momentum_from on 0.85
        slow <- 0.98 slow + 0.02 g
        m = fast, from slow_momentum_from on 0.4385 fast + 0.5615 slow
        u <- normalize_neurons(zeropower(momentum m + (1 - momentum) g))
        p <- p - factor lr (u + decay lr p [slow p >= 0])

    lr is muon_lr by the schedule, factor the lr_mul of a matrix's group. The weight decay is cautious: it acts only
    where a value and its slow momentum have the same sign, also before slow_momentum_from (record 43, @varunneal).
    Ranks have whole matrices: the 22 of gpt2's MLPs take 24 places on 8 ranks, two of them padding.
    """

    by_matrix = True
    has_master = True  # bf16 alone would round small steps away

    def init_state(self) -> dict[str, Tensor]:
        master = self.master
        factors = [master.new_full((n, 1, 1), group.lr_mul) for n, group in zip(self.rows_per_param, self.groups)]
        self.factors = self.shard(torch.cat(factors))
        rows, columns = master.shape[-2:]
        squares = torch.zeros_like(master[:, :, :1] if rows >= columns else master[:, :1])
        return dict(fast=torch.zeros_like(master), slow=torch.zeros_like(master), squares=squares)

    def update_shard(self, grad: Tensor, schedule: StepSchedule):
        group = self.groups[0]  # the others differ in their factors alone
        numbers = schedule.updates[group.name]._asdict()
        tensors = to_tensors(self.master.dtype, self.master.device, **numbers)
        update = compiled(muon_update, self.cfg.compile, dynamic=False)
        sequences = self.cfg.batch_sequences
        update(self.param_shard, grad, self.factors, self.state, tensors, group.decay, group.beta2, sequences)


OPTIMIZERS = {"Muon": Muon, "Adam": Adam}


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Return optimizers for all parameters, each in exactly one group.

    Muon batches all matrices of a shape. Tables of a group share an optimizer, and so do all small parameters that are
    updated in the same steps: fewer collectives.
    """
    cfg = gpt.cfg
    tables = {table.weight for table in gpt.tables()}
    members: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in gpt.named_parameters():
        group = find_group(name, cfg)
        if group.optimizer not in OPTIMIZERS:
            raise UserError(
                f"{name}: group {group.name} has optimizer {group.optimizer}, expected one of {[*OPTIMIZERS]}"
            )
        emas = tuple(i for i, row in enumerate(cfg.emas) if matches(name, row.patterns))
        key: tuple  # parameters with equal keys share an optimizer
        if OPTIMIZERS[group.optimizer].by_matrix:
            key = emas, group._replace(name="", patterns="", lr_mul=1.0), p.shape[-2:]  # lr_mul may differ
        elif p in tables:
            key = emas, group, p.dtype
        else:
            key = emas, group.optimizer, group.update_interval, group.keep_norm, p.dtype  # rates and betas may differ
        members.setdefault(key, {})[name] = p
    for row in cfg.emas:
        if not any(matches(name, row.patterns) for name, _ in gpt.named_parameters()):
            raise UserError(f"emas: no parameter is named by {row.patterns}")
    embed, head = (find_group(name, cfg) for name in ("embed.weight", "lm_head.weight"))
    if cfg.tied_frac and (
        embed.patterns != "embed.weight" or head != embed._replace(name=head.name, patterns="lm_head.weight")
    ):
        raise UserError(
            f"embed.weight has {embed}, lm_head.weight {head}: expected equal rows of their own, or --tied_frac 0"
        )
    optimizers = []
    for (emas, *_), params in members.items():
        groups = [find_group(name, cfg) for name in params]
        first = next(iter(params.values()))
        grad_dtype = sum_dtype(groups[0], first.dtype) if first in tables else None
        own_emas = {i: cfg.emas[i] for i in emas}
        optimizers.append(OPTIMIZERS[groups[0].optimizer](params, groups, own_emas, cfg, ranks, grad_dtype))
    # Largest first: its update overlaps the other reduce-scatters, and only the smallest all-gather overlaps nothing
    return sorted(optimizers, key=lambda optimizer: -optimizer.param_buffer.nbytes)


@torch.no_grad()
def step_optimizers(
    optimizers: Sequence[ShardedOptimizer], schedule: StepSchedule, while_reducing: Callable = lambda: None
):
    """Take a step on the gradients, summed over this rank's sequences, and clear those that were used.

    First the gradients of all due optimizers start to travel. Then one after the other updates its rows and starts to
    send them: meanwhile the next one's gradients and the last one's values are on their way. At last all values are
    waited for. while_reducing: what else is computed while the first gradients travel.
    """
    due = [optimizer for optimizer in optimizers if optimizer.is_due(schedule)]
    used = [optimizer.grad_buffer for optimizer in due if optimizer.accumulates]
    embed = head = None
    if schedule.tied:  # one table: the embedding is updated by the gradients of both, and the head copies it
        embed, head = (
            next(optimizer for optimizer in due if name in optimizer.names)
            for name in ("embed.weight", "lm_head.weight")
        )
        due.remove(head)
    for optimizer in due:
        optimizer.reduce(tied=head if optimizer is embed else None)
    while_reducing()
    for optimizer in due:
        optimizer.update(schedule)
    for dtype in {buffer.dtype for buffer in used}:  # a launch clears all buffers of one precision
        torch._foreach_zero_([buffer for buffer in used if buffer.dtype == dtype])
    for optimizer in due:
        optimizer.wait_for_params()
    if head:
        head.copy_state_from(embed)
    for optimizer in optimizers:
        optimizer.update_emas(schedule)


# ---- N-grams: a large table, of which a cycle of steps reads few rows ------------------------------------------------
def row_adam_update(rows: Tensor, v: Tensor, grad: Tensor, scalars: dict, sequences: int) -> tuple[Tensor, Tensor]:
    """Return rows and their means of squares after an update as in `NgramTable.update`. v: beta2 times the old one."""
    grad = mean_gradient(grad, sequences, v.dtype)
    v = v + scalars["added"] * grad.square().mean(1, keepdim=True)
    return adam_values(rows.to(v.dtype), grad, v, scalars).to(rows.dtype), v


ROWS_AT_ONCE = 2**18  # rows copied between device and host at a time: 400 MB in gpt2


class NgramTable:
    """The embeddings of n-grams, of which only those that were read are updated.

    Each rank owns an equal part of the rows, and the table exists once across all: no other tensor has its size. Before
    a cycle its ranks fetch the rows that they will read; when it ends, summed gradients go back: `RowExchange`. Then
    the next cycle's rows travel while the other parameters are updated.

        rows, v             this rank's part of the table, and the mean square of the gradients of each row
        fetched, grads      the rows that a cycle reads, in the order of recv_ids, and the sums of their gradients.
                            Their addresses stay: the model's CUDA graph reads the one and adds to the other
    """

    def __init__(self, cfg: Hyperparameters, ranks: Ranks, device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.exchange: RowExchange | None = None  # whose rows are in `fetched`, or on their way
        self.wait_for_rows: Callable[[], object] = lambda: None  # waits until they have arrived
        self.group = find_group("ngrams", cfg)
        dtype = getattr(torch, cfg.dtype)
        rows = rows_per_rank(cfg, ranks)
        self.first = rows * ranks.rank  # number of the first row
        self.rows = torch.zeros(rows, cfg.model_dim, dtype=dtype, device=device)
        self.v = torch.zeros(rows, 1, dtype=accum_dtype(dtype), device=device)
        longest = max(schedule.seq_len for schedule in cfg.step_schedules)
        tokens_in_cycle = max(self.group.update_interval) * longest * cfg.batch_sequences // ranks.world_size
        max_rows = min((cfg.ngram_order - 1) * max(tokens_in_cycle, cfg.val_seq_len), cfg.ngram_rows)
        self.fetched = torch.zeros(max_rows, cfg.model_dim, dtype=dtype, device=device, requires_grad=True)
        self.grads = torch.zeros(max_rows, cfg.model_dim, dtype=sum_dtype(self.group, dtype), device=device)

    def all_to_all(
        self, out: Tensor, rows: Tensor, out_counts: list[int], row_counts: list[int]
    ) -> Callable[[], object]:
        """Start to send each rank its part of `rows`, into its `out`. Return a function that waits for one's own."""
        if self.ranks.world_size == 1:
            out.copy_(rows)
        return start_collective(dist.all_to_all_single, out, rows, out_counts, row_counts)

    def fetch(self, exchange: RowExchange):
        """Start to fetch the rows that a cycle reads."""
        self.exchange = exchange
        self.wait_for_rows()  # an earlier fetch may still be writing to `fetched`
        rows = self.rows[exchange.send_rows]
        fetched = self.fetched.detach()[: len(exchange.recv_ids)]
        # `cache`: only the first call waits
        self.wait_for_rows = cache(self.all_to_all(fetched, rows, exchange.recv_counts, exchange.send_counts))

    def send(self, exchange: RowExchange) -> Callable[[], Tensor]:
        """Start to send the gradients of this rank's sequences to the rows' owners.

        Return a function that waits for those of own rows, and returns them (n, K), in the order of send_rows.
        """
        grads = self.grads[: len(exchange.recv_ids)]
        arrived = grads.new_empty(len(exchange.send_rows), grads.size(1))
        wait = self.all_to_all(arrived, grads, exchange.send_counts, exchange.recv_counts)

        def receive() -> Tensor:
            wait()
            return arrived

        return receive

    def update(self, sums: Tensor, exchange: RowExchange, schedule: StepSchedule):
        """Update the rows that the cycle has read by Adam without momentum, and with one v for each row.

        sums: what `send` has brought. As in the record v decays for all rows.
        """
        self.grads[: len(exchange.recv_ids)].zero_()
        if self.ranks.world_size > 1:  # several ranks may have read a row
            # embedding_bag as a sum of segments: in fp32, in a fixed order, without zeros to be written first, unlike
            # index_add_
            sums = F.embedding_bag(exchange.order, sums, exchange.offsets, mode="sum")
        now = schedule.updates[self.group.name]
        ids = exchange.unique_rows
        self.v *= now.beta2
        update = compiled(row_adam_update, self.cfg.compile, dynamic=True)
        scalars = dict(step_size=now.step_size, decay=now.decay, added=1 - now.beta2, eps=self.cfg.adam_eps)
        tensors = to_tensors(self.v.dtype, self.v.device, **scalars)
        rows, v = update(self.rows[ids], self.v[ids], sums, tensors, self.cfg.batch_sequences)
        self.rows.index_copy_(0, ids, rows)
        self.v.index_copy_(0, ids, v)

    def state(self) -> dict[str, Tensor]:
        """Return on the host the rows with a value or a v other than 0: v alone may have decayed to 0."""
        both = zip(self.rows.split(ROWS_AT_ONCE), self.v.split(ROWS_AT_ONCE))
        ids = torch.cat([rows.any(1) | v.any(1) for rows, v in both]).nonzero().flatten()
        parts = ids.split(ROWS_AT_ONCE)
        rows, v = (torch.cat([t[part].cpu() for part in parts]) for t in (self.rows, self.v))
        return dict(ids=ids.cpu() + self.first, rows=rows, v=v)

    def restore(self, ids: Tensor, rows: Tensor, v: Tensor):
        """Set rows of this rank to what `state` returned."""
        for places, *values in zip(*(t.split(ROWS_AT_ONCE) for t in (ids - self.first, rows, v))):
            for own, new in zip((self.rows, self.v), values):
                own.index_copy_(0, places.to(own.device), new.to(own))


# ---- Checkpoints: files that are whole or not there at all -----------------------------------------------------------
class Checkpoint(NamedTuple):
    """What RUN_ID.checkpoint holds. It names a file of tensors for each rank: RUN_ID.stepSTEP.rankRANK."""

    run_id: str
    seed: int
    must_match: dict[str, str]  # what has to be the same when the run goes on: see `fingerprint`
    step: int
    ms: float  # of training
    curves: dict[str, list[tuple[int, float, float]]]  # (step, loss, ms) by name
    checksums: list[str]  # of the files of tensors


def tensor_file(cfg: Hyperparameters, step: int, ranks: Ranks) -> Path:
    """Return the file of a rank's tensors in a checkpoint."""
    return Path(cfg.log_dir, f"{cfg.run_id}.step{step:06}.rank{ranks.rank}")


def checksum(path: Path) -> str:
    """Return a hash of the checksums that a file of tensors, a zip archive, has in it."""
    sums = [part.CRC for part in zipfile.ZipFile(path).infolist()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def load_file(path: Path, expected: str = "", into: Callable = dict):
    """Return what `save` wrote, as `into`. expected: its checksum, where that is known."""
    try:
        if expected not in ("", checksum(path)) or zipfile.ZipFile(path).testzip():
            raise ValueError("it is damaged, or of another run, step or rank")
        return into(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # reading can fail in many ways
        raise UserError(f"{path}: not a sound file of this script: {error!r:.300}") from error


def save(log: "Log", path: Path, content: dict | bytes | None) -> list[str]:
    """Save a file, whole or not at all, on each rank that has content. Return all checksums; none if a rank has failed.

    The disk may be full: the log says so, and training goes on.
    """
    part = path.with_name(f"{path.name}.part")
    problem = own = ""
    try:
        if content is not None:
            with part.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    torch.save(content, file)
            part.replace(path)
            own = "" if isinstance(content, bytes) else checksum(path)
    except (OSError, RuntimeError) as error:  # torch.save raises the latter
        problem = f"not saved: {error!r}"
        part.unlink(missing_ok=True)
    problems, checksums = zip(*all_gather_objects((problem, own)))
    log.write(f"{path}: {max(problems) or 'saved'}", console=True)
    return [] if any(problems) else [*checksums]


def save_checkpoint(trainer: "Trainer", log: "Log", must_match: dict[str, str], step: int, ms: float):
    """Save the tensors of each rank, then the file that names them. Until it is whole, the previous one is valid."""
    cfg = trainer.cfg
    rank = trainer.ranks.rank
    path = tensor_file(cfg, step, trainer.ranks)
    # Copies, as torch.save writes all of a storage of which a tensor is a part
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.state_dict().items()}
    checksums = save(log, path, tensors | trainer.table.state())
    new = Checkpoint(cfg.run_id, cfg.seed, must_match, step, ms, log.curves, checksums)
    if checksums and save(log, log.path.with_suffix(".checkpoint"), new._asdict() if rank == 0 else None):
        for other in {*path.parent.glob(f"{glob.escape(cfg.run_id)}.step*.rank{rank}")} - {path}:
            with contextlib.suppress(OSError):
                other.unlink()


def load_checkpoint(given: Hyperparameters) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is not complete, if --resume asks for it. None: a new run."""
    if not given.resume:
        return None
    paths = [*Path(given.log_dir).glob(f"{glob.escape(given.run_id) or '*'}.checkpoint")]
    unfinished = [path for path in paths if not path.with_suffix(".json").exists()]
    if_absent = Path(given.log_dir, f"{given.run_id}.checkpoint")  # its run may be complete without it
    path = max(unfinished or paths, key=os.path.getmtime, default=if_absent)
    if path.with_suffix(".json").exists():
        raise AlreadyComplete(f"{path.with_suffix('.json')}: this run is already complete")
    return load_file(path, into=Checkpoint) if path.exists() else None


# ---- Log: what a run tells, and when ---------------------------------------------------------------------------------
class Clock:
    """The clock of a run: milliseconds of training, without validations and checkpoints."""

    def __init__(self, cfg: Hyperparameters):
        self.synchronize = getattr(torch, cfg.device).synchronize  # torch.cpu.synchronize does nothing

    def start(self, ms: float):
        """Go on from `ms`, once the device has done all that it was given, and without the garbage so far."""
        gc.collect()
        self.synchronize()
        self.zero = time.perf_counter() - ms / 1000

    @property
    def ms(self) -> float:
        """Return the milliseconds so far."""
        return 1000 * (time.perf_counter() - self.zero)

    def stop(self) -> float:
        """Return the milliseconds, once the device has done all that it was given."""
        self.synchronize()
        return self.ms


class Log:
    """The log of a run: its curves and, on rank 0, the file LOG_DIR/RUN_ID.txt, lines on the console and the bar."""

    def __init__(self, cfg: Hyperparameters, curves: dict[str, list[tuple[int, float, float]]], is_main: bool):
        self.cfg = cfg
        self.curves = curves
        self.path = Path(cfg.log_dir) / f"{cfg.run_id}.txt"
        self.file: TextIO | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for suffix in [] if cfg.resume else [".json", ".checkpoint", ".pt", ".ngrams*"]:
                for old in self.path.parent.glob(glob.escape(cfg.run_id) + suffix):
                    raise FileExistsError(str(old))
            if is_main:
                self.file = self.path.open("a" if cfg.resume else "x", encoding="utf-8")
                try:
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
                except OSError as error:
                    if isinstance(error, BlockingIOError):  # others say that the file system has no locks
                        raise
        except OSError as error:
            raise UserError(f"log {self.path}: choose another --run_id or --log_dir: {error!r}") from error

    def __enter__(self) -> "Log":
        self.bar = tqdm(
            desc="warming up",
            initial=num_tokens(len(self.curves.get("train_loss", ())), self.cfg),
            total=num_tokens(self.cfg.num_iterations, self.cfg),
            unit="tok",
            unit_scale=True,
            disable=None if self.file and sys.stderr else True,  # None: shown on a terminal alone
        )
        return self

    def __exit__(self, *_):
        self.bar.close()
        if self.file:
            with contextlib.suppress(OSError):
                self.file.close()

    def write(self, text: str, console: bool = False):
        """Write a line. If the disk is full or the console has gone away, training goes on."""
        if self.file:
            for stream in [self.file, sys.stdout] if console else [self.file]:
                with contextlib.suppress(OSError, ValueError), tqdm.external_write_mode(stream):  # above the bar
                    print(text, file=stream, flush=True)

    def write_loss(self, name: str, step: int, loss: float, ms: float, console: bool = True):
        """Write a loss, and add it to its curve. Raise FloatingPointError if it is not finite."""
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} {loss:.4f} at step {step}: lower learning rates or change --seed")
        self.curves.setdefault(name, []).append((step, loss, ms))
        line = f"step:{step}/{self.cfg.num_iterations} {name}:{loss:.4f}"
        self.bar.set_description_str(line, refresh=False)
        self.write(f"{line} train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms", console)

    def write_stop(self, error: BaseException):
        """Write why the run stops and how it goes on, on any rank: so the file is opened once more."""
        trace = "" if isinstance(error, ONE_LINE_ERRORS) else "".join(traceback.format_exception(error))
        resume = ""
        if self.path.with_suffix(".checkpoint").exists():
            resume = f"; to go on, give the same flags and --resume latest --run_id {self.cfg.run_id}"
        line = f"stopped: {error_line(error):.300}{resume}"
        with contextlib.suppress(OSError, ValueError):
            if self.path.exists():  # on other nodes it may not
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{trace}{line}\n")
            if resume:
                print(line, flush=True)


class StepResults:
    """What the last steps returned, on its way to the host, so that no step waits for the device."""

    def __init__(self, clock: Clock, log: Log):
        self.clock = clock
        self.log = log
        self.pending: deque = deque()  # (step, what `train_step` returned, the event of its arrival)
        self.num_signals = 0  # that have asked a rank to stop: all ranks learn of them at the same step

    def send(self, step: int, loss_and_signals: Tensor):
        """Send what `train_step` returned to the host, and take what has arrived: the results of 8 steps before."""
        on_host = loss_and_signals.to("cpu", non_blocking=True)
        arrived = getattr(torch, loss_and_signals.device.type).Event()
        arrived.record()
        self.pending.append((step, on_host, arrived))
        self.take(but=8 if loss_and_signals.is_cuda else 0)

    def take(self, but: int = 0):
        """Wait for all results but the last, and log their losses. Without a bar the console shows some."""
        bar = self.log.bar
        cfg = self.log.cfg
        while len(self.pending) > but:
            step, on_host, arrived = self.pending.popleft()
            arrived.synchronize()
            loss, num_signals = on_host.tolist()
            self.num_signals = max(self.num_signals, num_signals)
            self.log.write_loss("train_loss", step, loss, self.clock.ms, console=bar.disable and step % 25 == 0)
            bar.update(cfg.batch_sequences * cfg.step_schedules[step - 1].seq_len)


# ---- Training --------------------------------------------------------------------------------------------------------
class CUDAGraphs:
    """A function whose launches are replayed by a CUDA graph, one for each of its inputs' shapes (record 92).

    Launching the kernels of a step one by one took a host 23 to 55 ms, more than those of a small batch run (one H100,
    16 cores). A graph reads copies of its inputs, and its results last until the next call.
    torch.cuda.make_graphed_callables would capture the forward and the backward pass apart; here one graph has both,
    and the additions to the optimizers' buffers.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.captured: dict[tuple, tuple] = {}
        self.copied: dict[tuple, list[Tensor]] = {}  # the last call's inputs, which are not changed in place
        self.pool = torch.cuda.graph_pool_handle()  # of memory for all graphs, as one runs at a time

    @staticmethod
    def tensors_in(args) -> list[Tensor]:
        """Return the tensors in nested tuples, in order."""
        return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]

    def __call__(self, *args):
        tensors = self.tensors_in(args)
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self.captured:
            result = self.function(*args)  # compiles, and computes this call's result: capturing computes nothing
            static_args = tree_map_only(Tensor, torch.clone, args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                static_result = self.function(*static_args)
            self.captured[shapes] = graph, self.tensors_in(static_args), static_result
            self.copied[shapes] = tensors
            return result
        graph, static_tensors, static_result = self.captured[shapes]
        # Rotary tables stay the same tensors throughout a stage
        changed = [i for i, tensor in enumerate(tensors) if tensor is not self.copied[shapes][i]]
        torch._foreach_copy_([static_tensors[i] for i in changed], [tensors[i] for i in changed])
        self.copied[shapes] = tensors
        graph.replay()
        return static_result


class Trainer:
    """The model of a run, its optimizers, the n-gram table and the data loader, and what a step does with them.

    From `warm_up` on the model's parameters are the same on all ranks. Each has its share of the optimizers' state and
    of the table.
    """

    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        self.cfg = cfg
        self.ranks = ranks
        self.device = torch.device("cuda", ranks.local_rank) if cfg.device == "cuda" else torch.device("cpu")
        if cfg.device == "cuda":
            torch.cuda.set_device(self.device)
        elif cfg.cpu_threads:  # of all processes
            torch.set_num_threads(max(1, cfg.cpu_threads // ranks.local_world_size))
        torch.manual_seed(cfg.seed)
        self.gpt = GPT(cfg).to(self.device)
        self.model = torch.compile(self.gpt, fullgraph=True, dynamic=False) if cfg.compile else self.gpt
        self.optimizers = build_optimizers(self.gpt, ranks)
        self.params = dict(self.gpt.named_parameters())
        # By parameter: where its gradient is summed up, in an optimizer's buffer
        self.grad_view_of = dict(chain(*(zip(optimizer.params, optimizer.grad_views) for optimizer in self.optimizers)))
        self.accumulated = {p for optimizer in self.optimizers if optimizer.accumulates for p in optimizer.params}
        self.table_weights = {table.weight for table in self.gpt.tables()}
        for table in self.gpt.tables():
            table.grad_buffer = self.grad_view_of[table.weight]
        self.run_add_gradients = CUDAGraphs(self.add_gradients) if cfg.cuda_graphs else self.add_gradients
        self.table = NgramTable(cfg, ranks, self.device)
        self.loader = DistributedDataLoader(cfg, ranks, self.device)
        self.attn_settings: tuple[int, AttentionSettings] | None = None  # number of a stage, and its settings
        self.stop_signals: list[str] = []  # those that asked this rank to stop

    def train_step(
        self,
        schedule: StepSchedule,
        sequences: Sequence[ModelInputs],
        exchange: RowExchange,
        next_exchange: RowExchange | None = None,
    ) -> Tensor:
        """Take a step on this rank's sequences. Return all ranks' mean loss, and how many signals ask to stop.

        next_exchange: in the last step of a cycle, that of the next one. Then the gradients of n-grams are sent first
        of all, and while those of parameters are reduced, rows are updated and the next cycle's are fetched.
        """
        if exchange is not self.table.exchange:  # the first cycle of a run, or what a validation read
            self.table.fetch(exchange)
        self.table.wait_for_rows()
        if self.attn_settings is None or self.attn_settings[0] != schedule.stage:
            self.attn_settings = schedule.stage, make_attention_settings(schedule, self.cfg, self.device)
        mean_loss = None
        for inputs in sequences:
            loss = self.run_add_gradients(inputs, self.attn_settings[1])  # a sum over tokens
            share = loss / (len(inputs.tokens) * self.cfg.batch_sequences)
            mean_loss = share if mean_loss is None else mean_loss + share
        # One sum over the ranks for both: so all stop at the same step
        loss_and_signals = F.pad(mean_loss[None], (0, 1), value=len(self.stop_signals))
        wait_for_loss = start_collective(dist.all_reduce, loss_and_signals)
        if self.table.group.name in schedule.updates:  # the cycle ends
            receive = self.table.send(exchange)  # first, as the next cycle waits for these rows

            def turn_cycle():
                self.table.update(receive(), exchange, schedule)
                if next_exchange is not None:
                    self.table.fetch(next_exchange)

            step_optimizers(self.optimizers, schedule, turn_cycle)
        else:
            step_optimizers(self.optimizers, schedule)
        wait_for_loss()
        return loss_and_signals

    def add_gradients(self, inputs: ModelInputs, attn_settings: AttentionSettings) -> Tensor:
        """Add the gradients of a sequence to those before it since the last update. Return its summed loss."""
        loss = self.model(inputs, attn_settings, self.table.fetched, self.table.grads)
        # The loss is a sum over tokens, as in the record: gradients grow with the sequence. Only the optimizers divide
        # by the number of sequences: FP8 sees the same for any number of processes, and fewer gradients become 0.
        # `fetched` is among those wanted only so that the backward pass of `AccumulatingEmbedding` runs, which adds to
        # the table's grads and returns None
        wanted = [self.table.fetched, *self.params.values()]
        _, *grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        by_kind: dict[tuple, list] = {}  # a launch takes many gradients, if all have one precision
        for (name, p), grad in zip(self.params.items(), grads):
            if grad is not None:
                view = self.grad_view_of[p]
                by_kind.setdefault((p in self.accumulated, view.dtype, grad.dtype), []).append((view, grad))
            elif p not in self.table_weights:  # rows of tables have added theirs already
                raise UserError(f"{name}: no loss depends on this parameter: use it, or leave it out")
        for (accumulates, *_), pairs in by_kind.items():
            (torch._foreach_add_ if accumulates else torch._foreach_copy_)(*zip(*pairs))
        return loss.detach()

    def invalid_tokens(self, is_last: bool) -> Tensor | None:
        """Return the mask of tokens that never follow each token, for the last validation (record 91, @jvarho).

        Those before get zeros, so that all run the same graph.
        """
        bits = read_invalid_tokens(self.cfg)
        return torch.from_numpy(bits * is_last).to(self.device) if len(bits) else None

    def eval_step(
        self, schedule: StepSchedule, sequences: Sequence[ModelInputs], exchange: RowExchange, mask: Tensor | None
    ) -> Tensor | int:
        """Return the summed loss of this rank's sequences, of which it may have none."""
        self.table.fetch(exchange)
        self.table.wait_for_rows()
        attn_settings = make_attention_settings(schedule, self.cfg, self.device)
        total = 0
        for inputs in sequences:
            # Looked up here: within the graph the compiler would fuse all chunks of logits, and have them in memory at
            # the same time
            invalid = None if mask is None else F.embedding(inputs.tokens, mask)
            total += self.model(inputs, attn_settings, self.table.fetched, invalid=invalid)
        return total

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        """Return the mean loss over the validation tokens. A rank may have more sequences than others, or none."""
        schedule = schedule_validation(step, self.cfg)
        batches = [*val_batches(self.cfg)]
        mask = self.invalid_tokens(is_last=step == self.cfg.num_iterations)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        world_size = self.ranks.world_size
        cycles = []  # each has one step, with a sequence for each rank
        for first in range(0, len(batches), world_size):
            sequences_of_ranks = [*chain(*batches[first : first + world_size])]
            cycles.append(([schedule], [sequences_of_ranks]))
        for sequences, exchange, _ in self.loader.steps(cycles):
            total += self.eval_step(schedule, sequences, exchange, mask)
        start_collective(dist.all_reduce, total)()
        return total.item() / self.cfg.val_tokens

    def dummy_batch(self, schedule: StepSchedule) -> tuple[list[ModelInputs], RowExchange]:
        """Return inputs of the sizes that a step or a validation has."""
        # 48 different tokens are few enough for the sampled classes. Spread over the vocabulary they have n-grams on
        # each of 8 ranks, several: with none or one a rank would compile again in training, as torch specializes on
        # sizes of 0 and 1
        tokens = np.arange(schedule.seq_len + 1) % 48 * (self.cfg.vocab_size // 48)
        loader = DistributedDataLoader(self.cfg, self.ranks, self.device)  # its sweep of sampled classes moves on
        loaded = loader.load_cycle([schedule], [[tokens] * self.cfg.batch_sequences])
        (sequences,), exchange = loader.to_device(loaded)
        return sequences, exchange

    def warm_up(self, saved: dict[str, Tensor] | None = None):
        """Run every graph once on dummy batches, then set this rank's state back, or to `saved`."""
        saved = saved or {name: t.to("cpu", copy=True) for name, t in self.state_dict().items()}
        by_graph = {}  # a schedule for each graph: its key has what the shapes of `ModelInputs` depend on
        updates: dict[str, AdamStep | MuonStep] = {}  # of all groups, so that each optimizer steps
        for schedule in self.cfg.step_schedules:
            num_targets = len(schedule.mtp_weights) + (schedule.prefix_weight > 0)
            by_graph[schedule.seq_len, schedule.sampled_classes, num_targets] = schedule
            updates |= schedule.updates
        for schedule in by_graph.values():
            self.train_step(schedule._replace(updates=updates), *self.dummy_batch(schedule))
        schedule = schedule_validation(self.cfg.num_iterations, self.cfg)
        with torch.no_grad():
            sequences, exchange = self.dummy_batch(schedule)
            self.eval_step(schedule, sequences[:1], exchange, self.invalid_tokens(is_last=False))
        for optimizer in self.optimizers:
            optimizer.blend_emas()
        self.table.rows.zero_()  # their initial values: a copy would be too large
        self.table.v.zero_()
        self.load_state_dict(saved)

    def peak_memory_mib(self) -> int:
        """Return the most memory that torch allocated on the GPU, or that the whole process held on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() // 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's share of what a checkpoint holds, beside the rows of n-grams."""
        state: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            first = optimizer.names[0]  # names the optimizer
            state |= {f"{first} {name}": tensor for name, tensor in optimizer.state.items()}
            state[f"{first} params"] = optimizer.param_shard
        return state

    def load_state_dict(self, saved: dict[str, Tensor]):
        """Set this rank's share to what `state_dict` returned, n-grams to those saved with it; send the parameters."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
        if "ids" in saved:
            self.table.restore(saved["ids"], saved["rows"], saved["v"])
        for optimizer in self.optimizers:
            optimizer.send_params()()


def first_collective(device: torch.device, ranks: Ranks, limit: float = 120) -> float:
    """Add up a number of each rank on the devices, and return the milliseconds that it took.

    Here NCCL connects the GPUs. Where it cannot, it hangs, and PyTorch would notice after half an hour.
    """

    def give_up():
        where = f"rank {ranks.rank} of {ranks.world_size}, {device} of {os.uname().nodename}"
        advice = "NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME names the network interface to take"
        print(f"train_gpt.py: {where}: no first collective in {limit} s: {advice}", file=sys.stderr)
        os._exit(2)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    began = time.perf_counter()
    timer.start()
    total = torch.ones((), device=device)
    start_collective(dist.all_reduce, total)()
    total.item()  # waits for the device
    timer.cancel()
    return 1000 * (time.perf_counter() - began)


@contextlib.contextmanager
def uninterrupted(received: list[str]) -> Iterator[None]:
    """Let nothing interrupt steps: signals that ask to stop go to a list, and the clock collects garbage in pauses."""

    def receive(number: int, _):
        received.append(signal.Signals(number).name)
        # A second Ctrl-C stops at once; torchrun repeats the first
        if received.count("SIGINT") > 1 + dist.is_initialized():
            raise KeyboardInterrupt

    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    gc.disable()  # one collection of all there is took 0.6 s (nanochat issue 477): what is there is looked at only once
    gc.collect()
    gc.freeze()
    before = {number: signal.signal(number, receive) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        gc.unfreeze()
        gc.enable()


def train(trainer: Trainer, log: Log, must_match: dict[str, str], first: int, ms: float) -> int:
    """Train from step `first` to the end. Return the most graphs that a rank compiled on the clock: 0, or a bug.

    A signal, which schedulers send before they kill, lets the run save a checkpoint and stop. ms: on the clock so far.
    """
    cfg = trainer.cfg
    end = cfg.num_iterations
    planned = train_batches(cfg)
    trainer.loader.skip(islice(planned, first))
    batches = trainer.loader.steps(train_cycles(planned, cfg, first))
    clock = Clock(cfg)
    results = StepResults(clock, log)
    counters = torch._dynamo.utils.counters["stats"] if cfg.compile else Counter()  # importing it takes a second
    graphs_before = counters["unique_graphs"]
    with uninterrupted(trainer.stop_signals):
        log.bar.unpause()
        clock.start(ms)
        for step in range(first, end + 1):
            # A resumed run has the checkpoint of its first step, of the last step with the averages blended in
            is_first = step == first
            if step == end and not is_first:
                for optimizer in trainer.optimizers:
                    optimizer.blend_emas()
            may_stop = step == end or step % cfg.common_interval == 0  # no gradient waits for an update
            stops = may_stop and results.num_signals > 0
            saves = step < end and cfg.checkpoint_every > 0 and step % cfg.checkpoint_every == 0 and not is_first
            validates = step == end or (cfg.val_loss_every > 0 and step % cfg.val_loss_every == 0)
            if stops or saves or validates:
                results.take()
                ms = clock.stop()
                if stops or saves:
                    save_checkpoint(trainer, log, must_match, step, ms)
                if stops:
                    raise KeyboardInterrupt(" ".join(sorted({*chain(*all_gather_objects(trainer.stop_signals))})))
                if validates:  # after saving: a run that resumes here validates, too
                    log.write_loss("val_loss", step, trainer.evaluate(step), ms)
                log.bar.unpause()
                clock.start(ms)
            if step < end:
                results.send(step + 1, trainer.train_step(cfg.step_schedules[step], *next(batches)))
    return max(all_gather_objects(counters["unique_graphs"] - graphs_before))


# ---- Run: parse, compare, restore, train, report ---------------------------------------------------------------------
def init_distributed() -> Ranks:
    """Join the ranks that torchrun's environment names. Objects are gathered by gloo, before devices are chosen."""
    try:
        given = {name: os.environ.get(name.upper()) for name in Ranks._fields}
        ranks = Ranks(**{name: int(value) for name, value in given.items() if value})
        if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size):
            raise ValueError(f"impossible {ranks}")
        if ranks.world_size > 1:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG to SIGKILL: no rank outlives its launcher
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=30))  # one may compile while the others wait
            all_gather_objects(None)  # a rank that failed while others still connect would fail them here
    except (ValueError, RuntimeError) as error:
        raise UserError(f"RANK, WORLD_SIZE: use torchrun, or unset them: {error!r:.300}") from error
    return ranks


def end_unless_first(error: BaseException, ranks: Ranks):
    """Return on the rank that fails first, which then reports. Others, which fail as it is gone, exit with its code.

    On each other node one says why.
    """
    if not dist.is_initialized():
        return
    node = ranks.rank - ranks.local_rank  # its first rank
    own = json.dumps([ranks.rank, node, exit_code(error), error_line(error)])
    try:
        first = dist.distributed_c10d._get_default_store().compare_set("first failure", "", own)
    except RuntimeError:  # it is gone, too
        return
    rank, its_node, code, line = json.loads(first)
    if rank != ranks.rank:
        if node != its_node and ranks.local_rank == 0:
            print(f"train_gpt.py: rank {rank}: {line}", file=sys.stderr)
        sys.exit(code)


def plan_run(given: Hyperparameters, ranks: Ranks) -> tuple[Hyperparameters, dict[str, DataSummary]]:
    """Return the whole configuration, and a summary of the data."""
    cfg = resolve(given)
    if cfg.batch_sequences % ranks.world_size:
        raise UserError(f"{ranks.world_size} processes: expected a divisor of {cfg.batch_sequences} sequences a step")
    for schedule in cfg.step_schedules:
        if schedule.seq_len < 1 or schedule.seq_len % cfg.block_size:
            raise UserError(
                f"stage {schedule.stage + 1}: --train_seq_len {cfg.train_seq_len} times its batch of "
                f"{cfg.stages[schedule.stage].batch} is {schedule.seq_len}: expected a multiple of --block_size "
                f"{cfg.block_size}"
            )
    return cfg, check_data(cfg)


def fingerprint(
    source: str, given: Hyperparameters, cfg: Hyperparameters, data: dict[str, DataSummary], ranks: Ranks
) -> dict[str, str]:
    """Return by name, as text, what has to be the same on all ranks, and when a run goes on."""
    may_differ = {"run_id", "log_dir", "train_files", "val_files", "prefix_file", "canon_file"}
    may_differ |= {"save_checkpoint", "checkpoint_every", "resume"}
    fields = dataclasses.asdict(cfg) | dict(seed=given.seed)  # where none is given, ranks draw different ones
    texts = {f"--{name}": str(value) for name, value in fields.items() if name not in may_differ}
    texts["processes"] = f"{ranks.world_size}, of torch {torch.__version__} and numpy {np.__version__}"
    files = {"script": source.encode(), "prefixes": read_prefixes(cfg), "canonical mask": read_invalid_tokens(cfg)}
    texts |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    tokens = num_tokens(cfg.num_iterations, cfg)
    texts["training tokens"] = f"{tokens}, sha256 {data['train'].sha256}"
    texts["validation tokens"] = f"{cfg.val_tokens}, sha256 {data['val'].sha256}"
    return texts


def agree(
    cfg: Hyperparameters, must_match: dict[str, str], saved: Checkpoint | None
) -> tuple[Hyperparameters, Checkpoint | None]:
    """Return what all ranks begin with: the name and the seed of the run, and the checkpoint, which rank 0 has read.

    Raise UserError on all ranks if `fingerprint` differs on one, or from that of the run to resume.
    """
    everyone = all_gather_objects((cfg.run_id, cfg.seed, must_match, saved))
    run_id, seed, reference, saved = everyone[0]
    if saved:
        run_id, seed, reference = saved.run_id, saved.seed, saved.must_match
    for rank, (_, _, own, _) in enumerate(everyone):
        if differing := {name: text for name, text in own.items() if text != reference.get(name)}:
            expected = {name: reference.get(name) for name in differing}
            advice = "give the same, or another --run_id"
            raise UserError(f"run {run_id} began with {expected}, rank {rank} has {differing}: {advice}")
    return dataclasses.replace(cfg, run_id=run_id, seed=seed), saved


def header(
    source: str, argv: Sequence[str], must_match: dict[str, str], trainer: Trainer, data: dict[str, DataSummary]
) -> str:
    """Return what begins a log: script, versions, hardware, environment, data, flags and configuration."""
    hardware = subprocess.getoutput("lscpu; timeout 20 nvidia-smi")  # noqa: S605 (it hangs where the driver does)
    kinds = "TORCH", "PYTORCH", "TRITON", "CUDA", "NCCL", "OMP"  # of variables that change how it runs
    environment = {name: value for name, value in os.environ.items() if name.startswith(kinds)}
    shards = [f"{name} shard: {path}, {os.path.getsize(path)} bytes" for name in data for path in data[name].paths]
    shard_lines = "\n".join(shards)
    counts = Counter(ngrams=trainer.cfg.ngram_rows * trainer.cfg.model_dim)
    for name, p in trainer.params.items():
        counts[name.partition(".")[0]] += p.numel()
    return f"""{source}
{"=" * 100}
Running Python {sys.version}, PyTorch {torch.__version__}, numpy {np.__version__}
{trainer.ranks.world_size} processes, {torch.get_num_threads()} threads each, {os.cpu_count()} cores
{hardware}
environment: {json.dumps(environment)}
parameters: {", ".join(f"{name} {count:,}" for name, count in counts.items())}
{shard_lines}
training tokens: {must_match["training tokens"]}
validation tokens: {must_match["validation tokens"]}
flags: {json.dumps(argv)}
configuration: {json.dumps(dataclasses.asdict(trainer.cfg))}
{"=" * 100}"""


def save_model(trainer: Trainer, log: Log, script: str):
    """Save for sample.py the final model, with the hash of the script that can run it, and each rank's n-grams."""
    rank = trainer.ranks.rank
    rows = save(log, log.path.with_suffix(f".ngrams{rank}"), trainer.table.state())
    model = dict(
        configuration=json.dumps(dataclasses.asdict(trainer.cfg)),
        model=trainer.gpt.state_dict(),
        rows=rows,
        script=script,
        script_path=os.path.relpath(__file__),
    )
    path = log.path.with_suffix(".pt")
    if rows and save(log, path, model if rank == 0 else None):
        log.write(f"next: python sample.py {path}", console=True)


def report(trainer: Trainer, log: Log, must_match: dict[str, str], recompiles: int) -> dict:
    """Log the summary, save the model and the result, and return the latter."""
    cfg = trainer.cfg
    _, val_loss, ms = log.curves["val_loss"][-1]
    reached = "reached" if val_loss <= cfg.target_loss else "not reached"
    verdict = f"target {cfg.target_loss} {reached}; " if cfg.target_loss else ""
    if cfg.val_sha256 not in must_match["validation tokens"]:
        verdict = "these are not the track's validation tokens: do not compare losses; "
    log.write(
        f"""recompiles after the clock started: {recompiles}
peak memory: {trainer.peak_memory_mib()} MiB
val_loss {val_loss:.4f} after {ms / 1000:.2f} s; {verdict}log: {log.path}""",
        console=True,
    )
    if cfg.save_checkpoint:
        save_model(trainer, log, must_match["script"])
    result = dict(
        val_loss=val_loss,
        train_time_ms=ms,
        recompiles=recompiles,
        log=str(log.path),
        val_curve=log.curves["val_loss"],
        train_curve=log.curves["train_loss"],
    )
    save(log, log.path.with_suffix(".json"), json.dumps(result).encode() if trainer.ranks.rank == 0 else None)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. What ends a run in one line is one of ONE_LINE_ERRORS."""
    argv = sys.argv[1:] if argv is None else argv
    source = Path(__file__).read_text(encoding="utf-8")  # before anybody edits it
    ranks = init_distributed()
    log = None
    try:
        given = parse_args(argv, ranks.world_size)
        saved = load_checkpoint(given) if ranks.rank == 0 else None
        cfg, data = plan_run(given, ranks)
        must_match = fingerprint(source, given, cfg, data, ranks)
        cfg, saved = agree(cfg, must_match, saved)
        first, ms, curves = (saved.step, saved.ms, saved.curves) if saved else (0, 0.0, {})
        tensors = load_file(tensor_file(cfg, first, ranks), saved.checksums[ranks.rank]) if saved else None
        log = Log(cfg, curves, is_main=ranks.rank == 0)
        all_gather_objects(None)  # fails if another rank has failed so far
        with log:
            trainer = Trainer(cfg, ranks)
            log.write(header(source, argv, must_match, trainer, data) if log.file else "")
            log.write(f"seed: {cfg.seed}, from step {first} on, log: {log.path}", console=True)
            if given.canon_file and not cfg.canon_file:
                log.write(f"without {given.canon_file}, which is missing: the last val_loss is higher", console=True)
            if ranks.world_size > 1:
                log.write(f"first collective: {first_collective(trainer.device, ranks):.0f} ms")
            trainer.warm_up(tensors)
            recompiles = train(trainer, log, must_match, first, ms)
            result = report(trainer, log, must_match, recompiles)
    except (Exception, KeyboardInterrupt) as error:
        end_unless_first(error, ranks)
        if log:
            log.write_stop(error)
        raise
    if dist.is_initialized():  # else a thread that is left may abort the finished process
        dist.destroy_process_group()
    return result


def cli(argv: Sequence[str] | None = None) -> int:
    """Do what `main` does, and return the exit code. Errors that are not expected have Python's traceback."""
    try:
        main(argv)
    except ONE_LINE_ERRORS as error:
        print(f"train_gpt.py: {error_line(error)}", file=sys.stderr)
        return exit_code(error)
    return 0


# ---- Appendix: kernels in Triton. The functions above that start them have a twin of each in plain PyTorch -----------
# Twins clamp before they cast to FP8; here casts of gradients saturate
if triton:
    # Not triton.jit(mix_copies): torch.compile writes a kernel's functions anew, by their own names
    @triton.jit
    def mix_copies_triton(p, alpha, copy_mass, sink_mass):
        """Twin: `mix_copies`."""
        return p + alpha * (copy_mass + sink_mass * (p / (1 - alpha))) + 1e-9

    @triton.jit
    def mix_copies_backward_triton(p, alpha, copy_mass, sink_mass, scale):
        """Twin: `mix_copies_backward`."""
        p_alone = p / (1 - alpha)
        next_weight = scale * (p + alpha * sink_mass * p_alone)
        copy_weight = scale * alpha * (copy_mass + sink_mass * p_alone / (1 - alpha))
        return next_weight, copy_weight, -scale * alpha, -scale * alpha * p_alone

    @triton.jit
    def relu_squared_backward_kernel(
        grad_q, w_q, act_q, dz_row, dz_col, act_col, scales, act_scale, T, K,
        factor: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute a block of dz and of the activation. The TMA unit copies blocks, and masks the edges.

        Twin: `relu_squared_backward` without TMA.
        """
        t = tl.program_id(1) * BLOCK
        n = tl.program_id(0) * BLOCK  # programs that run side by side have the same tokens
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, K, BLOCK):  # the hardware sums up in less than fp32, but e5m2 keeps only 2 bits of mantissa
            total = tl.dot(grad_q.load([t, k]), w_q.load([n, k]).T, total)
        rows = t + tl.arange(0, BLOCK)
        act = act_q.load([t, n]).to(tl.float32) * tl.load(scales + rows, rows < T, other=0)[:, None]
        dz = (factor * tl.sqrt(act) * total).to(dz_row.dtype)
        dz_row.store([t, n], dz)
        dz_col.store([n, t], dz.T)
        act_col.store([n, t], (act * tl.load(act_scale)).to(act_q.dtype).T)

    @triton.jit
    def qkv_backward_kernel(
        grad, y, inverse_rms, scale, cos, sin, dz_row, dz_col, T, width, N, first,
        n: tl.constexpr, D: tl.constexpr, quarter: tl.constexpr, factor: tl.constexpr, is_rotated: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute a head of dz for some tokens, and store it as (T, N) and as (N, T). Twin: `qkv_backward`.

        In registers the sum s g - mean(y . g) / s y can be rotated, instead of g and y (see `norm_rotate_backward`).
        """
        t = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
        head = tl.program_id(0)  # programs that run side by side have the same tokens
        d = tl.arange(0, D)
        inside = (t < T) & (head * D + d < width)
        at = t * width + head * D
        dz = tl.load(grad + at + d, inside, other=0).to(tl.float32)
        if is_rotated:
            s = tl.load(scale)
            y_own = tl.load(y + at + d, inside, other=0).to(tl.float32)
            along_y = tl.sum(dz * y_own, 1)[:, None] / D / s
            own = s * dz - along_y * y_own
            is_second = (d // quarter) % 2  # of the two quarters of a half
            partner = d + quarter * (1 - 2 * is_second)  # the dimension that d is rotated with
            g_partner = tl.load(grad + at + partner, inside, other=0).to(tl.float32)
            other = s * g_partner - along_y * tl.load(y + at + partner, inside, other=0)
            angle = (t * n + head % n) * quarter + d % quarter
            c = tl.load(cos + angle, inside, other=0).to(tl.float32)
            back = own * c + (2 * is_second - 1) * other * tl.load(sin + angle, inside, other=0)
            rotated = tl.where(d < 2 * quarter, back, own)
            dz = rotated * tl.load(inverse_rms + t * (width // D) + head, t < T)
        dz = (dz.to(grad.dtype.element_ty).to(tl.float32) * factor).to(dz_row.dtype.element_ty)
        tl.store(dz_row + t * N + first + head * D + d, dz, inside)
        tl.store(dz_col + (first + head * D + d).to(tl.int64) * T + t, dz, inside)

    @triton.jit
    def transpose_kernel(columns, rows, M, N):
        """Read a block of columns (N, M), and store it as rows (M, N). Twin: `row_major` without a kernel."""
        m = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)[:, None]
        n = tl.program_id(1) * 64 + tl.arange(0, 64)
        inside = (m < M) & (n < N)
        tl.store(rows + m * N + n, tl.load(columns + m + n.to(tl.int64) * M, inside), inside)

    @triton.jit
    def relu_squared_fp8_kernel(z, y, scales, N, BLOCK: tl.constexpr):
        """Compute a row of squares in FP8, and its scale. Twin: `relu_squared_fp8` where there are no kernels."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        relu = tl.maximum(tl.load(z + row * N + columns, columns < N, other=0).to(tl.float32), 0)
        squares = relu * relu
        scale = 448 / tl.maximum(tl.max(squares), 1e-12)
        tl.store(scales + row, 1 / scale)
        tl.store(y + row * N + columns, tl.minimum(squares * scale, 448).to(y.dtype.element_ty), columns < N)

    @triton.jit
    def tanh(x):
        """Return tanh(x) by one instruction. Its error moves a logit by at most 0.006, a tenth of what e4m3 rounds.

        With tl.sigmoid and tl.exp a logit of stage 3 took 58 instructions instead of 32, which decide the time.
        """
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)

    @triton.jit
    def sigmoid_at(columns, z, V, slope, shift):
        """Return s of `softcapped_softmax` for columns of a token's logits: sigmoid(2 x) = (1 + tanh(x)) / 2."""
        return 0.5 + 0.5 * tanh(slope * tl.load(z + columns, columns < V).to(tl.float32) + shift)

    @triton.jit
    def store_gradient(z, d, inside):
        """Overwrite logits by their gradient, in their precision, or in e5m2 where they are e4m3."""
        dtype = z.dtype.element_ty
        d = d.to(tl.float8e5 if dtype == tl.float8e4nv else dtype)
        tl.store(z, d.to(dtype, bitcast=True), inside)

    @triton.jit
    def cross_entropy_kernel(
        z, targets, weights, pointer_mass, losses, d_pointer_mass, V, n,
        slope: tl.constexpr, shift: tl.constexpr, range_log2: tl.constexpr, factor: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute the loss of a token, and its gradient with respect to the logits. Twin: `cross_entropy`.

        slope, shift: s = (1 + tanh(slope z + shift)) / 2. range_log2: softcap_range / ln 2, as
        tl.exp2 takes one instruction.
        factor: of dz, the FP8 scale and the derivative of the softcap.
        """
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        targets += row * n
        pointer_mass += row * 2
        d_pointer_mass += row * 2
        totals = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            totals += tl.where(columns < V, tl.exp2(-range_log2 * sigmoid_at(columns, z, V, slope, shift)), 0)
        total = tl.sum(totals)
        first = tl.load(targets)
        copy = tl.load(targets + n - 1)
        p = tl.exp2(-range_log2 * sigmoid_at(first, z, V, slope, shift)) / total
        alpha = tl.minimum(tl.exp2(-range_log2 * sigmoid_at(copy, z, V, slope, shift)) / total, 1 - 1e-6)
        weight = tl.load(weights)
        copy_mass = tl.load(pointer_mass)
        sink_mass = tl.load(pointer_mass + 1)
        mixed = mix_copies_triton(p, alpha, copy_mass, sink_mass)
        loss = -weight * tl.log(mixed)
        found = mix_copies_backward_triton(p, alpha, copy_mass, sink_mass, weight / mixed)
        next_weight, copy_weight, d_copy, d_sink = found
        tl.store(d_pointer_mass, d_copy)
        tl.store(d_pointer_mass + 1, d_sink)
        total_weight = next_weight + copy_weight
        for k in range(1, n - 1):
            target = tl.load(targets + k)
            weight = tl.load(weights + k)
            s = sigmoid_at(tl.maximum(target, 0), z, V, slope, shift)
            loss += tl.where(target >= 0, -weight * tl.log(tl.exp2(-range_log2 * s) / total), 0)
            total_weight += tl.where(target != -1, weight, 0)  # -1 is NO_TARGET, as in `cross_entropy_gradients`
        tl.store(losses + row, loss)
        tl.debug_barrier()  # no thread may overwrite logits of targets that another has not read yet
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = sigmoid_at(columns, z, V, slope, shift)
            d = total_weight / total * tl.exp2(-range_log2 * s)
            d -= tl.where(columns == first, next_weight, 0) + tl.where(columns == copy, copy_weight, 0)
            for k in range(1, n - 1):
                d -= tl.where(columns == tl.load(targets + k), tl.load(weights + k), 0)
            store_gradient(z + columns, factor * d * s * (1 - s), columns < V)


if __name__ == "__main__":
    sys.exit(cli())
