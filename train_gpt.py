"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one command
    ./run.sh --preset nano                                    a small model on a CPU, in seconds
    torchrun --standalone --nproc_per_node=8 train_gpt.py     what run.sh starts on one 8xH100 node

The preset gpt2 has the mathematics of record 92 of the NanoGPT speedrun (ANVIL2 by Deven Pietrzak, 2026-08-30,
https://github.com/KellerJordan/modded-nanogpt), and a pointer, proposal 379 (CPLM by Nathan Godey): 1,050 steps. nano
is a model of one layer that looks for repetitions from the first step on. "Record n" credits the record in which an
idea first appeared. docs/tour.md explains all of it; `python -m speedrun site` puts it beside the code. The order:
configuration, schedules, data, data loader, layers, attention, model, pointer, head, optimizers, n-grams, checkpoints,
log, training, run, kernels. Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens (of an MLP: hidden
units), K model width, V rows of the head (the vocabulary with padding), C sampled classes of the softmax, G kinds of
n-grams, n targets of a token.
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
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from itertools import accumulate, chain, islice, pairwise
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


# ---- Configuration: layers, stages, groups of parameters, EMAs are rows of tables; most other numbers are flags ------
class Attention(NamedTuple):
    """A kind of attention."""

    window: str  # the kind of window, see `Stage`
    heads_per_pair: int = 1  # 2: pairs of heads attend as one, in a sequence of twice the length, and share keys
    rotary: bool = True  # queries and keys are rotated by their positions; if not, both start from equal weights
    key_offset: float = 0.0  # this fraction of a key, its last dimensions, comes from the token before


ATTENTION = {
    "long": Attention("long", key_offset=0.5),  # record 49
    "short": Attention("short"),
    "paired": Attention("short", heads_per_pair=2),  # record 58 (@classiclarryd)
    # No positions (NoPE): what followed a token like this one?
    "nope": Attention("long", rotary=False, key_offset=1.0),
}


class Layer(NamedTuple):
    """A layer. attn_input, skip, mudd and head_mix name earlier layers, counted from 0."""

    attention: str | None  # one of ATTENTION
    half_qk: bool = False  # queries and keys are half as wide
    half_v: bool = False  # values are half as wide
    value_embed: bool = False  # values add a row of a table, by the token
    shift: tuple[int, ...] = ()  # token shift: equal groups of channels come from so many tokens before
    attn_input: int | None = None  # attention reads the output of this layer instead of the residual stream
    gate_net: bool = False  # a gate network reads the residual stream here; it serves the layers up to the next one
    # The next five are gates. xsa and head_gate need a gate network; without one x0, ngram and skip have a parameter
    xsa: bool = False  # heads subtract part of the token's own value
    head_gate: bool = False  # the output of each head is gated
    x0: bool = False  # the embedding is added to the residual stream
    ngram: bool = False  # the embeddings of the n-grams that end with the token are added to the residual stream
    skip: int | None = None  # the output of this layer is added to the residual stream (U-Net)
    mlps: int = 1  # all with the same input
    # MUDD: a network of this layer mixes the first stream, the output of the layer named here and the residual stream,
    # once into the residual stream and once into the values. It also makes this layer's gates: on the stream, x0,
    # n-grams, outputs and the value embedding
    mudd: int | None = None
    # Last layer only: the head's input is the residual stream plus a mix of the first stream, the outputs of these
    # layers, all value embeddings, and the inputs of this layer's MLPs and attention
    head_mix: tuple[int, ...] = ()


GPT2_LAYERS = (
    Layer("paired", half_qk=True, gate_net=True, x0=True, ngram=True),
    Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True),
    Layer("paired", half_qk=True, value_embed=True, x0=True),
    Layer("long", xsa=True, head_gate=True),
    Layer(None, gate_net=True, x0=True, ngram=True),
    Layer("paired", half_qk=True, x0=True, ngram=True),
    Layer(None, skip=3),
    Layer(None, x0=True, mlps=0),
    Layer("short", half_qk=True, half_v=True, value_embed=True, mlps=2),
    Layer(None, ngram=True),
    Layer("long", value_embed=True, attn_input=7, head_gate=True, x0=True, ngram=True, mudd=7, head_mix=(7, 9, 3)),
)
NANO_LAYERS = (Layer("nope", value_embed=True, ngram=True, shift=(0, 0, 0, 1, 1, 2, 3, 4)),)


class Stage(NamedTuple):
    """A part of the training steps. Messages and pages count stages from 1."""

    share: float  # fraction of `base_steps`: num_iterations less the extra_steps of all stages
    batch: float  # factor on batch_tokens and train_seq_len: small batches first (record 46, @varunneal)
    max_doc_len: int  # documents are cut after so many tokens; 0 in all stages: one stream, nothing is cut
    windows: dict[str, int]  # window size by kind, in positions: paired heads have two a token
    extra_steps: int = 0  # beyond the share; those of the last stage run at the lowest learning rates
    lr: float = 1.0  # factor on all learning rates: larger batches take larger ones
    # Multi-token prediction (record 53, @varunneal): weights of the losses of tokens +1, +2, ..., at the first step and
    # after the last
    mtp: tuple[tuple[float, float], ...] = ((1, 1),)
    # Weight of the loss of predicting the next token's prefix, the longest other token that the next one begins with
    # (record 88, @jvarho). The i-th value holds in the i-th of len(prefix) equal parts of the stage
    prefix: tuple[float, ...] = (0,)
    # Tokens in the sampled softmax of a sequence (record 92), by parts of the stage likewise; 0: all
    sampled_classes: tuple[int, ...] = (0,)


SHARES = [share / 0.9994 for share in (0.2854, 0.3209, 0.3931)]  # the record's, which add up to 0.9994
GPT2_STAGES = (
    Stage(
        SHARES[0],
        batch=1,
        max_doc_len=896,
        windows=dict(short=128, long=384),
        mtp=((1, 1), (0.5, 0.5), (0.25, 0)),
        prefix=(0.25,),
        sampled_classes=(10240,),
    ),
    Stage(
        SHARES[1],
        batch=2,
        max_doc_len=2048,
        windows=dict(short=384, long=896),
        lr=1.52,
        mtp=((1, 1), (0.5, 0)),
        prefix=(0.20, 0.15, 0.10, 0.05),
        sampled_classes=(10240,),
    ),
    Stage(
        SHARES[2] - 0.06,
        batch=3,
        max_doc_len=3072,
        windows=dict(short=640, long=1408),
        extra_steps=52,
        lr=1.73,
        sampled_classes=(14336, 14336, 24576),
    ),
    Stage(0.06, batch=2.5, max_doc_len=3072, windows=dict(short=640, long=1408), lr=1.73 * (2.5 / 3) ** 0.5),
    Stage(0, batch=1, max_doc_len=3072, windows=dict(short=768, long=1664), extra_steps=20),
)
NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)


class Group(NamedTuple):
    """A group of parameters, named by patterns, and how it is updated."""

    optimizer: str  # Muon, Adam, or RowAdam for "ngrams": `NgramTable`, which is no parameter
    patterns: str  # globs, separated by spaces
    lr: float  # learning rate; in rows of Muon a factor on muon_lr
    # Cautious weight decay. Adam subtracts decay * lr^2 of a value, Muon decay * lr * muon_lr^2, at the scheduled rates
    decay: float = 0.0
    beta1: float = 0.9  # decay of Adam's mean of gradients; Muon has muon_momentum instead
    beta2: float = 0.99  # decay of the mean of squares: of gradients in Adam, of updates in Muon
    # Steps whose gradients an update accumulates: before step long_interval_from, and from there on
    update_interval: tuple[int, int] = (2, 2)
    keep_norm: bool = True  # blending the EMAs in at the end keeps the norm
    # Of tables in bf16: gradients are summed up, on a rank and between ranks, in fp16 instead of fp32. It takes half
    # the bytes, and has three bits more than bf16 from 6e-5 on. Sums above 65,504 would overflow
    fp16_sums: bool = False


MLP_LR = (2816 / 768) ** 0.5  # sqrt(mlp_dim / model_dim)
GPT2_GROUPS = (
    Group("Muon", "*.qk_w *.v_w *.attn.c_proj", lr=1.0, decay=2.25, beta2=0.9, update_interval=(1, 1)),
    Group("Muon", "*.c_fc", lr=MLP_LR, decay=2.25, beta2=0.9, update_interval=(1, 1)),
    Group("Muon", "*.mlps.*.c_proj", lr=2 * MLP_LR, decay=2.25, beta2=0.9, update_interval=(1, 1)),
    Group("Adam", "lm_head.weight", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group("Adam", "embed.weight", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group(
        "Adam",
        "value_embeds.*",
        lr=0.56,
        decay=0.025,
        beta1=0.75,
        beta2=0.95,
        update_interval=(2, 4),
        keep_norm=False,
        fp16_sums=True,
    ),
    Group("RowAdam", "ngrams", lr=0.56, decay=0.025, beta1=0.0, beta2=0.95, update_interval=(2, 4), fp16_sums=True),
    Group("Adam", "*.attn.lambdas *.skip_lambda smear_lambda", lr=0.04),
    Group("Adam", "*.resid_lambdas", lr=0.04, beta2=0.95),
    Group("Adam", "*.post_lambdas", lr=0.008, beta2=0.95),
    Group("Adam", "gate_nets.*.w?", lr=8e-4, decay=0.005),
    Group("Adam", "gate_nets.*.b2 gate_scale", lr=8e-4),
    Group("Adam", "*.mudd_net.w? head_net.w?*", lr=0.002, decay=0.005),
    Group("Adam", "*.mudd_net.b2 head_net.b2", lr=0.002),
    Group("Adam", "*.value_gate", lr=0.008, decay=0.005),
    Group("Adam", "smear_gate", lr=8e-5),
    Group("Adam", "pointer.weight", lr=0.008, decay=0.005),
    Group("Adam", "pointer.sink pointer.gain", lr=0.008),
)
NANO_GROUPS = tuple(
    group._replace(update_interval=(1, 1))
    for group in (
        Group("Muon", "*.qk_w *.v_w *.c_proj", lr=1.0, beta2=0.95),
        Group("Muon", "*.c_fc", lr=2.0, beta2=0.95),
        Group("Adam", "lm_head.weight", lr=0.015, beta1=0.5, beta2=0.9),
        Group("Adam", "embed.weight value_embeds.*", lr=0.18, beta1=0.5, beta2=0.9),
        Group("RowAdam", "ngrams", lr=0.25, beta1=0.0, beta2=0.9, fp16_sums=True),
        Group("Adam", "*lambdas", lr=0.04, beta1=0.5, beta2=0.9),
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
    at_end: int = 0  # it is also updated after each of so many last steps

    def rate_at(self, step: int, num_iterations: int) -> float:
        """Return the rate of the update after a step; 0: none."""
        start = max(0, num_iterations - self.window)
        first = self.offset % num_iterations
        is_due = (step - first) % self.interval == 0 or step >= num_iterations - self.at_end
        if step < start or not is_due:
            return 0.0
        return 1.0 if step < start + self.interval else self.rate


VO_MLP = "*.v_w *.attn.c_proj *.mlps.*"
GPT2_EMAS = (
    EMA("lm_head.weight embed.weight", window=298, rate=2 / 299, blend=0.65, interval=1),
    EMA(VO_MLP, window=250, rate=4 / 53, blend=1.0, offset=-1),
    EMA("value_embeds.*", window=250, rate=4 / 53, blend=1.0, offset=3),
    EMA("*.qk_w", window=298, rate=2 / 75, blend=0.55, at_end=2),
    # Blends apply in order: this one acts on the result of the second row. The difference is the record's
    EMA(VO_MLP, window=298, rate=2 / 75, blend=0.55 - 0.2007, at_end=2),
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
    preset: str = "gpt2"  # all settings; by default gpt2 on a GPU and nano elsewhere
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # training shards: a glob
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # validation shards: a glob
    val_tokens: int = 10_485_760  # validation tokens, a multiple of val_seq_len
    val_sha256: str = ""  # SHA-256 of the validation tokens; empty: not compared
    target_loss: float = 3.28  # validation loss to reach; 0: none
    vocab_size: int = 50257  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: int = 50256  # end of text, opens every document
    prefix_file: str = "data/gpt2_prefixes.bin"  # the longest token that begins each token; empty: no such loss
    canon_file: str = "data/gpt2_canonical.bin"  # invalid tokens: never put behind each token; empty: not used
    # Training
    num_iterations: int = 1050  # steps, `extra_steps` included
    val_loss_every: int = 250  # steps between validations; 0: only after the last step
    batch_tokens: int = 8 * 16 * 1024  # tokens a step where a stage's batch is 1, a multiple of train_seq_len
    train_seq_len: int = 16 * 1024  # tokens a training sequence there, a multiple of block_size
    val_seq_len: int = 256 * 1024  # tokens of a validation sequence, a multiple of block_size
    segment: int = 2560  # longer documents are split for attention, in training: it stays within so many tokens
    final_window: int = 2560  # long window in the last validation; 0: that of the last stage
    cooldown_frac: float = 0.8  # last part of the scheduled steps, those without the last stage's extra_steps
    min_lr_frac: float = 0.3  # factor on learning rates at the end of the cooldown and later
    tied_frac: float = 1.0  # first part of the scheduled steps, in which embedding and head are one table; 0: none
    loss_scale: float = 1.0  # factor on a sequence's summed loss; never undone, as updates depend on it by eps alone
    # Model
    model_dim: int = 768  # width of the residual stream
    num_heads: int = 6  # attention heads, a multiple of heads_per_matrix
    head_dim: int = 128  # dimensions per head, a multiple of 4
    block_size: int = 128  # tokens per block of the attention mask
    mlp_dim: int = 2816  # hidden units of an MLP
    gate_net_dim: int = 64  # hidden units of a gate network
    attn_scale: float = 0.085  # factor on the scores of long attention in the first stage, see `Window.extended`
    short_attn_scale: float = 0.13  # of other kinds
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
    pointer_block: int = 2048  # the pointer sees tokens of its own block of so many, and of the one before
    val_pointer_block: int = 8192  # the same in validation
    lm_head_slice: int = 49152  # tokens whose logits exist at a time, in training: in gpt2 a whole sequence
    val_lm_head_slice: int = 8192  # the same in validation and without a pointer, as logits are in fp32 then
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
    resume: str = ""  # LOG_DIR/RUN_ID.checkpoint, or latest: the newest in log_dir, of run_id if given

    def __post_init__(self):
        """Refuse what would train something else in silence. What cannot train at all fails before the first step."""
        for name, row in TABLES.items():  # from JSON they come as lists
            object.__setattr__(self, name, tuple(row(*values) for values in getattr(self, name)))
        self.check_numbers()
        self.check_rows()

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
        for name in """num_iterations batch_tokens train_seq_len val_tokens val_seq_len segment block_size vocab_size
            ngram_rows pointer_block val_pointer_block heads_per_matrix""".split():
            self.require(name, getattr(self, name) > 0, "1 or more")
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
        self.require("emas", all(row.window >= row.interval for row in self.emas), "windows in which each moves")
        shares = sum(stage.share for stage in self.stages)
        self.require("stages", math.isclose(shares, 1), "shares that add up to 1")
        cuts = {stage.max_doc_len > 0 for stage in self.stages}
        self.require("stages", len(cuts) == 1, "max_doc_len 0 in all or in none")
        momenta = [row.beta1 for row in self.groups if row.optimizer == "RowAdam"]
        self.require("groups", not any(momenta), "RowAdam's beta1 0")

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
    def copy_row(self) -> int:
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
    val_lm_head_slice=1024,
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
    source = inspect.getsource(Hyperparameters)
    print("Flags: --FIELD VALUE, or --FIELD and --no-FIELD\n")
    print(source[: source.index("    def ")])
    print("nano instead:", *(f"--{name}={value}" for name, value in NANO.items() if name not in TABLES))


def make_parser() -> FlagParser:
    """Return a parser with a flag for each field of `Hyperparameters` but the tables."""
    parser = FlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Hyperparameters):
        flag = f"--{field.name}"
        choices = get_args(field.type)  # of a Literal; of `int | None` its types
        if field.name in TABLES:
            continue
        if field.name == "preset":
            parser.add_argument(flag, choices=PRESETS)
        elif get_origin(field.type) is Literal:
            parser.add_argument(flag, choices=choices)
        elif bool in (field.type, *choices):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=choices[0] if choices else field.type)
    return parser


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset, changed by the flags in `argv`."""
    if {"-h", "--help"} & {*argv}:
        print_help()
        sys.exit()
    flags = vars(make_parser().parse_args(argv))
    sees_gpu = torch.cuda.is_available() and flags.get("device") != "cpu"
    if "preset" not in flags and world_size > 1 and not sees_gpu:
        raise UserError(f"{world_size} processes, but torch {torch.__version__} sees no GPU: say --preset nano or gpt2")
    canon_file = flags.get("canon_file")  # `resolve` goes without the preset's, but not without one that is named here
    if canon_file and not Path(canon_file).is_file():
        raise UserError(f"--canon_file {canon_file}: there is no such file; python -m data.gpt2_canonical makes gpt2's")
    default = "gpt2" if sees_gpu else "nano"
    return dataclasses.replace(PRESETS[flags.get("preset", default)], **flags)


def resolve(cfg: Hyperparameters) -> Hyperparameters:
    """Decide what `cfg` leaves open: device, precision, FP8, compilation, seed, name of the run."""
    on_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.device == "cuda" and not on_cuda:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU; ./run.sh --check says why")
    # A CPU with AVX512-BF16 or AMX multiplies bf16 2.1 times as fast as fp32, others 3 to 10 times slower
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = "bfloat16" if on_cuda or (native and torch.ops.mkldnn._is_mkldnn_bf16_supported()) else "float32"
    seed = int.from_bytes(os.urandom(4)) // 2 if cfg.seed is None else cfg.seed
    dtype = fast if cfg.dtype == "auto" else cfg.dtype
    # gpt2's mask is made by a tokenizer that may not be at hand; `main` says where a run goes without
    is_canon_missing = cfg.canon_file == GPT2.canon_file and not Path(cfg.canon_file).exists()
    # FP8 products with a scale for each row can only output bf16
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
    frequencies: Tensor  # (D / 4,): rotary frequencies, in radians a position

    def extended(self, size: int) -> "Window":
        """Return the window at another size, extended by YaRN (arXiv:2309.00071; record 31, @classiclarryd).

        Frequencies of at most one turn in the old window shrink by old / new, those of 32 turns or more stay.
        """
        shrunk = self.size / size
        turns = self.size * self.frequencies / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
        scale = self.attn_scale * (1 + 0.2 * math.log(size / self.size))  # 0.2: the record's
        return Window(size, scale, self.frequencies * (shrunk + kept * (1 - shrunk)))


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
    decay: float  # weight decay as in the group's row
    momentum: float
    fast_beta: float  # decay of the fast momentum
    fast_share: float  # its share beside the slow momentum
    beta2: float  # decay of the neurons' mean squares


def update_interval_at(group: Group, step: int, cfg: Hyperparameters) -> int:
    """Return the steps between the updates of a group, at a step."""
    often, rarely = group.update_interval
    return rarely if step >= cfg.long_interval_from else often


def schedule_adam(group: Group, count: int, step: int, lr_factor: float, cfg: Hyperparameters) -> AdamStep:
    """Return the numbers of a group's `count`-th update."""
    lr = group.lr * lr_factor
    # An update that accumulates twice as many steps as at first stands for two. As in the record the bias corrections
    # take the new betas for all `count` updates, also for those made with the old ones
    interval_ratio = update_interval_at(group, step, cfg) / group.update_interval[0]
    beta1, beta2 = group.beta1**interval_ratio, group.beta2**interval_ratio
    step_size = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
    return AdamStep(step_size, group.decay * interval_ratio * lr**2, beta1, beta2)


def schedule_muon(group: Group, step: int, lr_factor: float, cfg: Hyperparameters) -> MuonStep:
    """Return the numbers of a group's update. From slow_momentum_from on they are ANVIL's (record 92)."""
    momentum = schedule_momentum(step, cfg)
    has_slow_momentum = 0 < cfg.slow_momentum_from <= step
    fast_beta, fast_share = (0.85, 0.4385) if has_slow_momentum else (momentum, 1.0)
    return MuonStep(cfg.muon_lr * lr_factor, group.decay, momentum, fast_beta, fast_share, group.beta2)


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

    An accident of the record: the first update after the tied steps is tied, too.
    """
    last = round(cfg.tied_frac * cfg.scheduled_steps)
    return last > 0 and step - update_interval_at(head, step, cfg) < last


class StepSchedule(NamedTuple):
    """The settings of a training step or, if `trains` is false, of the validation before it."""

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
    updates: dict[str, AdamStep | MuonStep]  # by the `patterns` of the groups that are updated in this step
    tied: bool  # whether embedding and head are updated as one table
    ema_rates: list[float]  # of the rows of `emas`; 0: no update


def stage_ends(cfg: Hyperparameters) -> list[int]:
    """Return the step at which each stage ends: its share of the base steps, after the extra steps so far."""
    ends = accumulate(stage.share for stage in cfg.stages)
    more = accumulate(stage.extra_steps for stage in cfg.stages)
    return [round(cfg.base_steps * end) + added for end, added in zip(ends, more)]


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
                    counts[group.patterns] += 1
                    if group.optimizer == "Muon":
                        updates[group.patterns] = schedule_muon(group, step, lr_factor, cfg)
                    else:
                        updates[group.patterns] = schedule_adam(group, counts[group.patterns], step, lr_factor, cfg)
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
                tied=head.patterns in updates and is_tied_step(step, head, cfg),
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
    if step == cfg.num_iterations and cfg.final_window:
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
    """Return cosines and sines (kinds, 2, positions, D / 4). Inside the model's graph each use would recompute them."""
    angles = positions[:, None] * frequencies[:, None]
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)


def make_attention_settings(schedule: StepSchedule, cfg: Hyperparameters, device: torch.device) -> AttentionSettings:
    """Return the attention settings of a step or a validation."""
    sizes, scales, frequencies = zip(*schedule.windows.values())
    dtype = getattr(torch, cfg.dtype)
    window_sizes, attn_scales, by_kind = (
        tensor.to(device, non_blocking=True)
        for tensor in (
            torch.tensor(sizes, dtype=torch.int32),
            torch.tensor(scales, dtype=accum_dtype(dtype)),
            torch.stack(frequencies).to(accum_dtype(dtype)),
        )
    )
    positions = torch.arange(2 * schedule.seq_len, device=device)
    rotary = compiled(rotary_cos_sin, cfg.compile, dynamic=True)(by_kind, positions, dtype)
    return AttentionSettings(tuple(schedule.windows), window_sizes, attn_scales, rotary)


# ---- Data: the same tokens in every step for any number of processes -------------------------------------------------
NO_TARGET, PAST_END = -1, -2  # targets without a loss: see `DistributedDataLoader.targets`
# For each sequence a shard and an array (pieces, 2): where its pieces of documents begin and end
BatchPlan = list[tuple[str, np.ndarray]]
TOKENS_AT_ONCE = 2**20  # of a shard, in which documents are looked for


def file_version(path: str) -> tuple[int, int]:
    """Return what changes when somebody writes to a file, or puts another one in its place."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


first_version = cache(file_version)  # of a file when the run first read it: `check_data` begins anew


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
    """Yield where each document of a shard begins and ends; of a stream all is one. Tokens are read as they are needed.

    A shard has the format of llm.c: a header of 256 int32 [20240520, 1, number of tokens, 0 ...], then uint16 tokens.
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
        if not max_doc_len:
            rest.append((stop - 1, end))  # the next sequence begins with the last target of this one
            break
    return None if missing else np.array(pieces)


def plan_batches(
    pattern: str, lengths: Sequence[tuple[int, int]], num_sequences: int, cfg: Hyperparameters
) -> Iterator[BatchPlan]:
    """Yield a batch of `num_sequences` for each of `lengths`, shard after shard; the end of each shard is dropped.

    lengths: (seq_len, max_doc_len) of each batch. Raise UserError if the shards have too few tokens.
    """
    paths = deque(sorted(glob.glob(pattern, recursive=True)))
    path = ""
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
    """What is known before the clock starts of the tokens to train on, or to validate on. No step uses it."""

    paths: list[str]  # of the shards
    sha256: str  # of all tokens


def summarize(batches: Iterable[BatchPlan], cfg: Hyperparameters, targets: bool) -> DataSummary:
    """Read all tokens of batches; targets: with the last target of each sequence. Raise UserError if one is missing."""
    paths: dict[str, None] = {}  # in order
    sha256 = hashlib.sha256()
    for path, pieces in chain.from_iterable(batches):
        paths[path] = None
        tokens = read_sequence(path, pieces, cfg)
        sha256.update((tokens if targets else tokens[:-1]).tobytes())
    return DataSummary([*paths], sha256.hexdigest())


def check_data(cfg: Hyperparameters) -> dict[str, DataSummary]:
    """Return the summaries of a run's data. Raise UserError unless all of it is there."""
    first_version.cache_clear()
    data = dict(
        train=summarize(train_batches(cfg), cfg, targets=True), val=summarize(val_batches(cfg), cfg, targets=False)
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
    """Return the numbers of a file in a shape, or none if no file is named."""
    table = read_numbers(path, dtype, -1, 0) if path else np.empty(0, dtype)
    if path and len(table) != math.prod(shape):
        raise UserError(f"{path}: of another vocabulary; --prefix_file= and --canon_file= go without")
    return table.reshape(-1, *shape[1:])


def read_prefixes(cfg: Hyperparameters) -> np.ndarray:
    """Return for each token the longest other token that its bytes begin with, or -1 (data/gpt2_prefixes.bin)."""
    table = read_table(cfg.prefix_file, "<u2", cfg.vocab_size).astype(np.int64)
    return np.where(table < cfg.vocab_size, table, NO_TARGET)


def read_invalid_tokens(cfg: Hyperparameters) -> np.ndarray:
    """Return bits (V, V / 8): bit x of row p says that the tokenizer never puts x behind p (data/gpt2_canonical.py)."""
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


# The record's factors of the current token, the one before, ...: of bigrams and of trigrams
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

    Bigrams (record 62, @classiclarryd) and trigrams (92, Deven Pietrzak @devenpzak) have equal parts of the table. The
    last row of a part is for tokens with too few before them.
    """
    kinds = ROW_FACTORS[: cfg.ngram_order - 1]
    size = cfg.ngram_rows // len(kinds)
    # An accident of the record: the bigram of the second token is hashed as if the first token were size - 1
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


# A cycle: the steps up to and including an update of the table of n-grams, whose rows do not change before that
Cycle = tuple[list[StepSchedule], list[BatchPlan]]


def train_cycles(batches: Iterator[BatchPlan], cfg: Hyperparameters) -> Iterator[Cycle]:
    """Yield the cycles of a training. The last one may end without an update, and drops its n-grams' gradients."""
    patterns = find_group("ngrams", cfg).patterns
    first = 0
    for schedule in cfg.step_schedules:
        end = schedule.step + 1
        if patterns in schedule.updates or end == cfg.num_iterations:
            yield cfg.step_schedules[first:end], [*islice(batches, end - first)]
            first = end


class RowExchange(NamedTuple):
    """The rows of n-grams that travel between ranks in a cycle: each rank owns an equal part of the table.

    All ranks know the tokens of all sequences, so nobody has to ask for rows. A cycle of two ranks, of a table of eight
    rows, in which rank 0 reads rows 1, 2, 5 and rank 1 reads rows 1, 7:

                        rank 0, owner of rows 0 to 3         rank 1, owner of rows 4 to 7
        send_rows       1 2 (for rank 0), 1 (for rank 1)     5 (for rank 0), 7 (for rank 1)
        send_counts     2 1                                  1 1
        recv_ids        1 2 5                                1 7
        recv_counts     2 1                                  1 1
        unique_rows     1 2                                  5 7
        order           0 2 1                                0 1
        offsets         0 2                                  0 1

    Rows travel from send_rows to recv_ids when the cycle begins. When it ends, gradients travel back, and those of
    equal rows are added up. On rank 1 send_rows and unique_rows are counted from its first row: 1 and 3.
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
    first = ranks.rank * owned
    # The inverse takes a fifteenth of the time of a search for each id
    found = torch.unique(torch.from_numpy(ids_by_rank[ranks.rank]), return_inverse=True)
    recv_ids, places = (t.numpy() for t in found)
    recv_counts = np.bincount(recv_ids // owned, minlength=ranks.world_size).tolist()
    sent = [unique(ids[(ids >= first) & (ids < first + owned)]) - first for ids in ids_by_rank]
    send_rows = np.concatenate(sent).astype(np.int64)
    order = np.argsort(send_rows, kind="stable")  # merges what is ascending for each rank
    ascending = send_rows[order]
    offsets = np.flatnonzero(np.diff(ascending, prepend=-1))
    exchange = RowExchange(
        recv_ids=recv_ids,
        recv_counts=recv_counts,
        send_rows=send_rows,
        send_counts=[*map(len, sent)],
        unique_rows=ascending[offsets],
        order=order,
        offsets=offsets,
    )
    return exchange, places.astype(np.int32)


def sample_classes(next_tokens: np.ndarray, count: int, offset: int, cfg: Hyperparameters) -> tuple[np.ndarray, int]:
    """Return `count` tokens, ascending, for a sampled softmax, and the next offset (record 92).

    All next tokens are among them, with a pointer also the row of a copy. The rest come from a sweep over the
    vocabulary, whose k-th token is 20011 k mod V: 20011 and V have no common factor, so V steps visit each token once.
    As in the record, the next sweep begins after all tokens that this one looked at.
    """
    V = cfg.padded_vocab
    chosen = np.zeros(V, bool)
    chosen[next_tokens] = True
    if cfg.pointer_dim:
        chosen[cfg.copy_row] = True
    missing = count - chosen.sum()
    if missing < 0:
        raise UserError(f"{chosen.sum()} different targets in a sequence: raise `sampled_classes` {count} of its stage")
    if missing:
        look = min(V, int(1.7 * missing) + 256)  # the record's: some are chosen already
        ids = 20011 * (offset + np.arange(look)) % V
        others = ids[~chosen[ids]]
        if len(others) < missing:  # nearly all that the sweep looked at are chosen
            others = np.flatnonzero(~chosen)
            others = others[:: max(1, len(others) // missing)]
        chosen[others[:missing]] = True
        offset = (offset + look) % V
    return np.flatnonzero(chosen), offset


class DistributedDataLoader:
    """A loader of this rank's sequences. It reads the tokens of all ranks, see `RowExchange`."""

    def __init__(self, cfg: Hyperparameters, ranks: Ranks, device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.device = device
        self.prefixes = read_prefixes(cfg)
        # Where the next sweep of `sample_classes` begins, for each sequence of a step: where the one before ended
        self.offsets = [cfg.padded_vocab * i // cfg.batch_sequences for i in range(cfg.batch_sequences)]

    def targets(self, schedule: StepSchedule, next_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets (T, n) and the weights (n,) of their losses, from the next tokens (T,).

        A target without a loss is NO_TARGET, where a token has no prefix or its prefix is no sampled class, or
        PAST_END, behind the sequence.
        """
        cfg = self.cfg
        T = len(next_tokens)
        padded = np.pad(next_tokens.astype(np.int64), (0, len(schedule.mtp_weights)), constant_values=PAST_END)
        columns = [(padded[k : k + T], weight) for k, weight in enumerate(schedule.mtp_weights)]
        if schedule.prefix_weight:
            columns.append((self.prefixes[next_tokens], schedule.prefix_weight))
        if cfg.pointer_dim:  # the row of a copy comes last. Its weight is 0: the loss joins it to the next token
            columns.append((np.full(T, cfg.copy_row), 0.0))
        targets, weights = zip(*columns)
        return np.column_stack(targets), np.array(weights, "f8" if cfg.dtype == "float64" else "f4")

    def doc_starts(self, schedule: StepSchedule, tokens: np.ndarray) -> np.ndarray:
        """Return where each token's document begins; in training, its part of at most `segment` tokens."""
        t = np.arange(len(tokens), dtype=np.int32)
        starts = np.maximum.accumulate(np.where(tokens == self.cfg.eot_token, t, 0))
        return t - (t - starts) % self.cfg.segment if schedule.trains else starts

    def model_inputs(
        self, schedule: StepSchedule, i: int, sequence: np.ndarray, ngram_index: np.ndarray
    ) -> ModelInputs:
        """Return the inputs of a step's i-th sequence (T + 1,), the last target included, and move its sweep on."""
        tokens, next_tokens = sequence[:-1], sequence[1:]
        targets, weights = self.targets(schedule, next_tokens)
        classes = None
        if count := schedule.sampled_classes:
            classes, self.offsets[i] = sample_classes(next_tokens, count, self.offsets[i], self.cfg)
            index = np.full(self.cfg.padded_vocab, NO_TARGET)  # of each token among the sampled classes
            index[classes] = np.arange(count)
            targets = np.where(targets < 0, targets, index[targets])
        doc_starts = self.doc_starts(schedule, tokens)
        signs = sign_row_ids(tokens, self.cfg)
        arrays = tokens, next_tokens, doc_starts, targets, weights, classes, ngram_index, signs
        return ModelInputs(*(None if array is None else self.to_host_tensor(array) for array in arrays))

    def load_cycle(
        self, schedules: Sequence[StepSchedule], batches: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[list[ModelInputs]], RowExchange]:
        """Return for each step of a cycle this rank's inputs, and the cycle's exchange of rows, on the host.

        batches: for each step the tokens of all sequences (T + 1,), the last targets included. Rank r has the r-th of
        them, and every world_size-th after that.
        """
        rank, size = self.ranks.rank, self.ranks.world_size
        batches = [[tokens.astype(np.int32) for tokens in batch] for batch in batches]
        row_ids = [[ngram_row_ids(tokens[:-1], self.cfg) for tokens in batch] for batch in batches]
        nothing = np.empty(0, np.int32)  # in a validation a rank may have no sequence
        ids_by_rank = []
        for r in range(size):
            own_ids = [ids.ravel() for of_step in row_ids for ids in of_step[r::size]]
            ids_by_rank.append(np.concatenate([nothing, *own_ids]))
        exchange, places = plan_exchange(ids_by_rank, self.ranks, self.cfg)
        ends = np.cumsum([ids.size for of_step in row_ids for ids in of_step[rank::size]], dtype=int)
        places_of = iter(np.split(places, ends))  # of one sequence after the other
        steps = []
        for schedule, batch, of_step in zip(schedules, batches, row_ids):
            own = range(rank, len(batch), size)
            index = {i: next(places_of).reshape(of_step[i].shape) for i in own}
            steps.append([self.model_inputs(schedule, i, batch[i], index[i]) for i in own])
        return steps, tree_map_only(np.ndarray, self.to_host_tensor, exchange)

    def to_host_tensor(self, array: np.ndarray) -> Tensor:
        """Return a tensor on the host, pinned where there is a GPU."""
        # The copy is in C's order, and begins at a multiple of 16 bytes, as compiled code wants it
        tensor = torch.from_numpy(array.copy())
        return tensor.pin_memory() if self.device.type == "cuda" else tensor  # here, as pinning may allocate

    def to_device(self, loaded):
        """Return what `load_cycle` returned, on the device."""
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), loaded)

    def steps(self, cycles: Iterable[Cycle]) -> Iterator[tuple[list[ModelInputs], RowExchange]]:
        """Yield for each step this rank's inputs and its cycle's exchange, on the device.

        A thread plans and reads: from the first call on, which is on the clock, and two cycles ahead.
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
            while (loaded := queue.popleft().result()) is not None:
                queue.append(executor.submit(read))
                steps, exchange = self.to_device(loaded)
                for inputs in steps:
                    yield inputs, exchange


# ---- Layers: each draws its own initial values; MLPs begin with zero outputs (@Grad62304977) -------------------------
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
    """x / rms(x) over the last dimension. It saves its result y, which the next product saves anyway, and not x.

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
# have unit RMS: over 768 channels |x| <= 27.7, so 16 |x| <= 443 < 448. Weights saturate beyond 7, gradients, in e5m2,
# beyond 896. Records 84 (@sisovicm), 89 (@Mister-dev-oss and others) and 90 (@Glitchfix) brought FP8 to layers
FP8_X, FP8_W, FP8_GRAD = 2.0**4, 2.0**6, 2.0**6


if torch.version.cuda:  # elsewhere nothing is in FP8, and the import takes a second
    import torch._inductor.inductor_prims  # registers the operation that is looked up next
# Of PyTorch's compiler: a tensor is stored in a given layout. Versions without it compute the same, but store twice
FORCE_STRIDES = getattr(torch.ops.prims, "inductor_force_stride_order", None)


def store_once(t: Tensor) -> Tensor:
    """Return t, and let compiled code store it here, in its precision.

    Without this each reader may compute t again, or a wider t is stored and each reader casts it.
    """
    return FORCE_STRIDES(t, t.stride()) if FORCE_STRIDES is not None and torch.compiler.is_compiling() else t


def quantize(t: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return scale * t in FP8. Numbers beyond its limit are clamped: some devices saturate, others give NaN.

    By torch.where and not clamp: with ptxas 12.9, kernels that clamped and stored both layouts corrupted the columns
    (triton issue 11111, torchao issue 4652).
    """
    limit = torch.finfo(dtype).max
    t = t * scale
    return store_once(torch.where(t > limit, limit, torch.where(t < -limit, -limit, t)).to(dtype))


def row_major(t: Tensor) -> Tensor:
    """Return FP8 numbers t (M, N) in row-major order.

    A kernel transposes: where a compiler stores columns beside a reduction over rows, it takes up to twice as long.
    """
    if triton is None or not t.is_cuda or not t.t().is_contiguous():
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
    grad_rows: Tensor, grad_columns: Tensor, x: Tensor, w: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x @ w.T with respect to x and w, from that of the product in both layouts."""
    return fp8_matmul(grad_rows, w, FP8_GRAD * FP8_W, dtype), fp8_matmul(grad_columns.t(), x, FP8_GRAD * FP8_X, dtype)


class FP8Linear(torch.autograd.Function):
    """x @ w.T in FP8."""

    @staticmethod
    def forward(ctx, x, w):
        x_q = quantize(x, FP8_X, torch.float8_e4m3fn)
        w_q = quantize(w, FP8_W, torch.float8_e4m3fn)
        ctx.save_for_backward(x_q, w_q)
        return fp8_matmul(x_q, w_q.t(), FP8_X * FP8_W, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_q = quantize(grad, FP8_GRAD, torch.float8_e5m2)
        return fp8_linear_backward(grad_q, grad_q, x, w, grad.dtype)


def can_use_kernels(t: Tensor) -> bool:
    """Return whether this script's kernels take t; if not, PyTorch does what they do."""
    return triton is not None and t.is_cuda and t.dtype == torch.bfloat16


def relu_squared_fp8(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return relu(z)^2 (T, N) in FP8, the largest of each row as 448, and what to multiply the rows by (T, 1).

    A kernel holds a row in registers. The compiler's reads long rows twice, in twice the time (measured: one H100).
    """
    if not can_use_kernels(z):
        squares = F.relu(z).square_()
        scale = 448 / squares.amax(1, keepdim=True).float().clamp(min=1e-12)
        return quantize(squares, scale, torch.float8_e4m3fn), 1 / scale
    T, N = z.shape
    squares_q = torch.empty_like(z, dtype=torch.float8_e4m3fn)
    scales = z.new_empty(T, 1, dtype=torch.float32)
    relu_squared_fp8_kernel[(T,)](z, squares_q, scales, N, triton.next_power_of_2(N))
    return squares_q, scales


def relu_squared_backward(grad_q, w_q, squares_q, scales, column_scale, use_kernel: bool) -> tuple[Tensor, ...]:
    """Return dz (T, N) row-major, dz column-major, and column_scale * relu(z)^2 column-major, all in FP8.

    squares_q and scales are what `relu_squared_fp8` made of z. dz = 2 relu(z) (grad @ w) is the gradient with respect
    to z of relu(z)^2 @ w.T, for grad (T, K) and w (K, N); relu(z) is the root of its square (record 87). A kernel
    multiplies while the product is in registers: in memory it would be written and read again. Where products sum over
    tokens, FP8 wants both operands column-major: tokens of a hidden unit side by side. Without the kernel all are
    row-major, and `fp8_matmul` copies.
    """
    if not use_kernel:
        squares = squares_q.to(scales.dtype) * scales
        dz = fp8_matmul(grad_q, w_q, FP8_GRAD * FP8_W, scales.dtype) * squares.sqrt() * 2
        dz = quantize(dz, FP8_GRAD, grad_q.dtype)
        return dz, dz, quantize(squares, column_scale, squares_q.dtype)
    (T, N), K = squares_q.shape, len(w_q)
    dz = torch.empty_like(squares_q, dtype=grad_q.dtype)
    dz_columns = dz.new_empty(N, T)
    squares_columns = squares_q.new_empty(N, T)
    block = 128  # with 3 stages two programs fit into a multiprocessor
    tensors = grad_q.contiguous(), w_q.t().contiguous(), squares_q, dz, dz_columns, squares_columns
    blocks = [TensorDescriptor.from_tensor(tensor, [block, block]) for tensor in tensors]
    grid = triton.cdiv(N, block), triton.cdiv(T, block)
    # The factor: the product comes times FP8_GRAD * FP8_W, and dz is to be times FP8_GRAD
    relu_squared_backward_kernel[grid](
        *blocks, scales, column_scale, T, K, factor=2 / FP8_W, BLOCK=block, num_warps=8, num_stages=3
    )
    return dz, dz_columns.t(), squares_columns.t()


class FP8ReluSquaredMLP(torch.autograd.Function):
    """relu(x @ w1.T)^2 @ w2.T in FP8, with a scale for each row of squares.

    w2_scales (1, K) is 1 / FP8_W for each column: where a product has scales of rows, it wants some of columns, too.
    Records scale squares by the maximum of the step before, which a checkpoint would have to keep.
    """

    @staticmethod
    def forward(ctx, x, w1, w2, w2_scales, use_kernel):
        ctx.use_kernel = use_kernel
        x_q = quantize(x, FP8_X, torch.float8_e4m3fn)
        w1_q = quantize(w1, FP8_W, torch.float8_e4m3fn)
        w2_q = quantize(w2, FP8_W, torch.float8_e4m3fn)
        z = fp8_matmul(x_q, w1_q.t(), FP8_X * FP8_W, x.dtype, fast=True)
        squares_q, scales = relu_squared_fp8(z)
        ctx.save_for_backward(x_q, w1_q, w2_q, squares_q, scales)
        return torch._scaled_mm(squares_q, w2_q.t(), scales, w2_scales, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad):
        x_q, w1_q, w2_q, squares_q, scales = ctx.saved_tensors
        scale = 1 / scales.max()  # one for all: a product that sums over tokens cannot have a scale for each
        grad_q = quantize(grad, FP8_GRAD, torch.float8_e5m2)
        dz, dz_columns, squares = relu_squared_backward(grad_q, w2_q, squares_q, scales, scale, ctx.use_kernel)
        grad_w2 = fp8_matmul(grad_q.t(), squares, FP8_GRAD * scale, grad.dtype)
        grad_x, grad_w1 = fp8_linear_backward(dz, dz_columns, x_q, w1_q, grad.dtype)
        # Laid out as c_fc: with one gradient in another order PyTorch adds all of them one by one, in 0.28 ms
        # (measured: one H100)
        return grad_x, grad_w1.t().contiguous().t(), grad_w2, None, None


class MLP(nn.Module):
    """A map of x (T, K) to (T, K) through hidden units, whose activation is the square of relu.

    That is 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977).
    """

    def __init__(self, cfg: Hyperparameters, scale_per_token: bool):
        super().__init__()
        K = cfg.model_dim
        self.c_fc = uniform_weight(K, K, cfg.mlp_dim)  # stored transposed, so that Muon can batch it with c_proj
        self.c_proj = nn.Parameter(torch.zeros(K, cfg.mlp_dim))
        self.scale_per_token = scale_per_token
        self.fp8 = cfg.layers_fp8
        if self.fp8:
            # A constant. As a buffer it is filled once, and not in every call
            self.register_buffer("w2_scales", torch.full((1, K), 1 / FP8_W), persistent=False)
        fits = cfg.device == "cuda" and cfg.dtype == "bfloat16" and K % 16 == cfg.mlp_dim % 16 == 0
        self.use_kernel = fits and triton is not None and torch.cuda.get_device_capability() >= (9, 0)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return the MLP's output times `scale`, which is () for all tokens or (T, 1) for each.

        A scale for all tokens is folded into c_proj, so that its gradient needs no saved (T, K) product.
        """
        c_fc = self.c_fc.mT.type_as(x)
        c_proj = self.c_proj.type_as(x) if self.scale_per_token else scale * self.c_proj.type_as(x)
        if self.fp8 and torch.is_grad_enabled():
            y = FP8ReluSquaredMLP.apply(x, c_fc, c_proj, self.w2_scales, self.use_kernel)
        else:
            y = F.linear(F.relu(F.linear(x, c_fc)).square(), c_proj)
        return scale * y if self.scale_per_token else y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of heads x (..., halves, 2, D / 4), in pairs of its two quarters (record 17).

    A second half, if there is one, stays as it is. It is not split off: with a split and a cat the compiler makes three
    kernels.
    """
    half = torch.arange(x.size(-3), device=x.device).view(-1, 1, 1)
    sign = 1 - 2 * torch.arange(2, device=x.device).view(2, 1)  # (a, b) becomes (a cos + b sin, b cos - a sin)
    return torch.where(half == 0, x * cos + x.flip(-2) * sin * sign, x)


class NormRotate(torch.autograd.Function):
    """QK-norm, rotary embedding (arXiv:2104.09864) and a scale for heads x, shaped as in `rotate`. It saves y, not x.

    Forward, with a scale s, a rotation R and r = 1 / rms(x):      y = s R z,  z = r x
    Backward, for a gradient g with respect to y:                  dx = r (s R'g - z mean(z . s R'g))
    A rotation keeps products, so z . s R'g = y . g, and z = R'y / s:    dx = r (s R'g - (mean(y . g) / s) R'y)
    g and y are rotated, and not their sum, which would be stored in fp32 between the mean and the rotation.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, scale):
        x32 = x.to(scale.dtype)
        inverse_rms = (x32.square().mean((-3, -2, -1), keepdim=True) + torch.finfo(x32.dtype).eps).rsqrt()
        y = rotate(x32 * inverse_rms, cos, sin) * scale
        y = y if x32 is x else y.type_as(x)  # as in RMSNorm
        ctx.save_for_backward(y, inverse_rms, cos, sin, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, inverse_rms, cos, sin, scale = ctx.saved_tensors
        g = store_once(grad).to(scale.dtype)
        along_y = (g * y).mean((-3, -2, -1), keepdim=True) / scale
        dx = scale * rotate(g, cos, -sin) - along_y * rotate(y.to(scale.dtype), cos, -sin)
        return store_once((inverse_rms * dx).type_as(y)), None, None, None


# ---- Attention: causal, within documents, in sliding windows ---------------------------------------------------------
def first_visible_keys(doc_starts: Tensor, window, heads_per_pair: int = 1) -> Tensor:
    """Return the first key (T,) that each query sees, within its document and a sliding window; it never decreases.

    doc_starts (T,): where the document of each token begins. window () int32: how many positions back a query sees; a
    tensor, so that a change never recompiles. In pairs of heads a token has two positions.
    """
    start = doc_starts.repeat_interleave(heads_per_pair) * heads_per_pair
    return torch.maximum(start, torch.arange(len(start), dtype=torch.int32, device=start.device) - window)


def causal_mask(start: Tensor, extra_mask_mod: Callable | None = None) -> Callable:
    """Return a mask_mod sees(b, h, q, kv) for FlexAttention: causal, from `first_visible_keys` on.

    extra_mask_mod(b, h, q, kv): a further condition.
    """

    def sees(b, h, q, kv):
        visible = (q >= kv) & (kv >= start[q])
        # torch 2.11 compiles no `if extra_mask_mod`
        return visible if extra_mask_mod is None else visible & extra_mask_mod(b, h, q, kv)

    return sees


def causal_block_mask(start: Tensor, block: int, extra_mask_mod: Callable | None = None) -> BlockMask:
    """Return `causal_mask` for FlexAttention (records 20 and 29). With extra_mask_mod all blocks count as partial.

    A query block sees the key blocks from first_visible to its own. All of its queries see all of the blocks from
    first_full to the one before its own: these are full and need no mask. Lists go from near to far. Eight tokens of
    the documents a and b, in blocks of two with a window of three:

        query  keys a a   a a   a b   b b      lists of the query block, and after | padding, which nobody attends to:
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
    num_full = (own - first_full).clamp(min=0) * (extra_mask_mod is None)
    num_full_queries = (end_full - own - 1).clamp(min=0) * (extra_mask_mod is None)
    keys_of_queries = block_lists(own, own - first_visible + 1, num_full, step=-1)
    queries_of_keys = block_lists(own, end_visible - own, num_full_queries, step=1)
    lengths = len(start), len(start)
    sees = causal_mask(start, extra_mask_mod)
    return BlockMask(lengths, *keys_of_queries, *queries_of_keys, BLOCK_SIZE=(block, block), mask_mod=sees)  # type: ignore[misc]


def block_lists(own: Tensor, num_visible: Tensor, num_full: Tensor, step: int) -> tuple[Tensor, ...]:
    """Return what `BlockMask` wants for each of N blocks: how many blocks are partial, which, how many full, which.

    A block itself is partial. The next num_full blocks in the direction of `step` are full, those after them partial.
    """
    slot = own  # 0 to N - 1 again, now as positions in a list
    last = len(own) - 1  # padding names blocks, too: FlexAttention loads the first entry even of an empty list
    full = (own[:, None] + step * (1 + slot)).clamp(0, last)
    partial = (own[:, None] + step * torch.where(slot == 0, 0, num_full[:, None] + slot)).clamp(0, last)
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
        # Not -inf, which has no gradient where the pointer's second mask shows nothing
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
    # Each query sees a key: itself. 8 warps, as on an H100: with 4 the backward pass, and for half heads the forward
    # pass, spill registers
    options: dict = dict(ROWS_GUARANTEED_SAFE=True, bwd_num_warps=8)
    if q.size(-1) == 64:
        options["fwd_num_warps"] = 8
        # On 8.x and 12.x 8 warps want blocks of 128 rows: with 64, the default, they compute products twice. With 32
        # beside them the backward pass spills 0 bytes (8.9) and 164 (12.0), not 504 and 752 (compiled, never run)
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

    Half heads (record 92) use the first half of a head's rows, or columns of c_proj. The matrices are whole all the
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
        rows = cfg.heads_per_matrix * D
        self.qk_w = uniform_weight(K, 2 * H * D // rows, rows, K)  # a stack of matrices for Muon
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
    ) -> Tensor:
        """Return the output times post[0] of the gates.

        value_embed and mudd_values (T, H D): a row of a table, and a mix of streams, that are added to the values.
        """
        value_lambda, output_lambda = self.lambdas
        q, k, v = self.project(x, value_lambda)
        q, k = self.normalize(q, k, context)
        if value_embed is not None:
            v = v + self.gate_value_embed(value_embed, x, gates)
        if mudd_values is not None:
            v = v + mudd_values.view_as(v)
        y = attend(q, k, v, context.mask, self.kind.heads_per_pair)
        # A head leaves out what it shares with the token's own value: record 82 (@_djdumpling)
        if gates.xsa is not None:
            overlap = (y * v).sum(-1, keepdim=True)
            along_v = overlap / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
            y = y - gates.xsa.transpose(0, 1).tanh() * along_v * v
        if gates.head_gate is not None:  # a head may attend to nothing: record 28 (@classiclarryd)
            y = y * gates.head_gate.transpose(0, 1)
        c_proj = self.c_proj.unflatten(1, (y.size(1), -1))[..., : y.size(-1)].flatten(1)
        if self.scale_per_token:
            return gates.post[0] * linear(y.flatten(1), output_lambda * c_proj)
        return linear(y.flatten(1), gates.post[0] * (output_lambda * c_proj))  # as in `MLP.forward`

    def project(self, x: Tensor, value_lambda: Tensor) -> list[Tensor]:
        """Return queries and keys (T, H, qk_dim), and values (T, H, v_dim), from one merged product."""
        H = self.cfg.num_heads
        D = self.cfg.head_dim
        qk_w = self.qk_w.view(2 * H, D, -1)[:, : self.qk_dim]
        v_w = value_lambda * self.v_w.view(H, D, -1)[:, : self.v_dim]
        qkv_w = torch.cat([qk_w.flatten(0, 1), v_w.flatten(0, 1)])
        product = FP8Linear.apply if self.cfg.layers_fp8 and torch.is_grad_enabled() else F.linear
        # One split of all three: each then writes its gradient where the product reads it, and none is copied
        qkv = product(x, qkv_w.type_as(x)).split([H * self.qk_dim, H * self.qk_dim, H * self.v_dim], dim=1)
        return [t.unflatten(1, (H, -1)) for t in qkv]

    def normalize(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Return queries, scaled, and keys: QK-norm (@Grad62304977), rotary embedding and key offset.

        An accident of the record: of pairs of heads, head h is rotated to the position 2 t + h % 2, but `attend` pairs
        the heads h and h + H / 2. So of the pairs (0, 3), (1, 4), (2, 5) the second has its positions swapped.
        """
        if self.kind.rotary:
            n = self.kind.heads_per_pair
            quarter = self.cfg.head_dim // 4
            split = len(q), -1, n, self.qk_dim // (2 * quarter), 2, quarter  # T, H / n, n, halves, 2, D / 4
            q = NormRotate.apply(q.reshape(split), context.cos, context.sin, context.scale).view_as(q)
            k = NormRotate.apply(k.reshape(split), context.cos, context.sin, torch.ones_like(context.scale)).view_as(k)
        else:
            q = context.scale.type_as(q) * norm(q)
            k = norm(k)
        if self.kind.key_offset:
            offset_dims = int(self.kind.key_offset * k.size(-1))
            own, before = k.split([k.size(-1) - offset_dims, offset_dims], dim=-1)
            k = torch.cat([own, shift_later(before, 1)], dim=-1)
        return q, k

    def gate_value_embed(self, value_embed: Tensor, x: Tensor, gates: "Gates") -> Tensor:
        """Return the gated value embedding (T, H, v_dim).

        After value residuals (arXiv:2410.17897): record 14 (@KoszarskyB). Gates: record 55 (@classiclarryd); they read
        the embedding, too: 70 (@photon_mz).
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
GATE_SCALE = 0.1  # factor on what gate networks output; that of GPT.gate_nets is a parameter, and begins so


class GateNet(nn.Module):
    """A network that computes gates for each token from the residual stream x (T, K): scale (W2 gelu(W1 x) + b2).

    init: the initial values of the gates, in lists by a key. groups: if not 0, gates differ for so many groups of
    channels, by scale W2g gelu(W1 x) (record 92). Multiway dynamic dense connections (MUDD, arXiv:2502.12170; record
    81) and gates (85): both by @Lisennlp.
    """

    def __init__(self, cfg: Hyperparameters, init: dict, groups: int = 0):
        super().__init__()
        # bf16 as in the record, where steps of 8e-4 do not move a bias of 2.5 = 0.25 / GATE_SCALE
        dtype = getattr(torch, cfg.dtype)
        self.sizes = {key: len(values) for key, values in init.items()}
        bias = [*chain(*init.values())]
        w1 = torch.empty(cfg.gate_net_dim, cfg.model_dim).uniform_(-1, 1) * cfg.model_dim**-0.5
        self.w1 = nn.Parameter(w1.to(dtype))
        self.w2 = nn.Parameter(torch.zeros(len(bias), cfg.gate_net_dim, dtype=dtype))
        self.b2 = nn.Parameter((torch.tensor(bias) / GATE_SCALE).to(dtype))
        self.w2g = nn.Parameter(torch.zeros(len(bias), groups, cfg.gate_net_dim, dtype=dtype)) if groups else None

    def forward(self, x: Tensor, scale: Tensor | float = GATE_SCALE) -> dict:
        """Return the gates by key: (n, T, 1), with groups (n, T, groups), in the precision of x."""
        hidden = F.gelu(linear(x, self.w1))
        gates = (scale * (linear(hidden, self.w2) + self.b2.type_as(x))).mT[:, :, None]
        if self.w2g is not None:
            by_group = linear(hidden, self.w2g.flatten(0, 1)).unflatten(1, self.w2g.shape[:2])
            gates = gates + scale * by_group.transpose(0, 1)
        return dict(zip(self.sizes, gates.split([*self.sizes.values()])))


class Gates(NamedTuple):
    """A layer's gates: parameters (n,), for all tokens, or (n, T, 1), which a gate network computes for each token.

    resid and post are pairs, of which each is () or (T, 1).
    """

    resid: tuple[Tensor, Tensor]  # on the residual stream, before attention and before the MLPs
    post: tuple[Tensor, Tensor]  # on the outputs of attention and of the MLPs: record 73
    x0: Tensor | None  # n = 1: on the embedding
    ngram: Tensor | None  # 1: on the embeddings of n-grams
    skip: Tensor | None  # 1: on the output of an earlier layer
    xsa: Tensor | None  # H
    head_gate: Tensor | None  # H
    # MUDD alone makes these:
    to_stream: Tensor | None  # 3: weights of the mix for the residual stream
    to_values: Tensor | None  # 3: weights of the mix for the values
    value_embed: Tensor | None  # 2: on the value embedding, for either half of the heads


def gate_net_init(layer: Layer, cfg: Hyperparameters) -> dict[str, list[float]]:
    """Return by name the initial values of those of a layer's `Gates` that a gate network computes, if there is one."""
    init = {}
    if layer.xsa:
        init["xsa"] = [0.0] * cfg.num_heads
    if layer.head_gate:
        init["head_gate"] = [0.25] * cfg.num_heads
    if layer.x0 and layer.mudd is None:
        init["x0"] = [0.0]
    if layer.ngram and layer.mudd is None:
        init["ngram"] = [cfg.ngram_lambda_init]
    if layer.skip is not None:
        init["skip"] = [0.5]
    return init


def mudd_net_init(layer: Layer, cfg: Hyperparameters) -> dict[str, list[float]]:
    """Return by name the initial values of those of a layer's `Gates` that its MUDD network computes."""
    init = dict(to_values=[0.0] * 3, to_stream=[0.0] * 3, value_embed=[2.0] * 2)
    init |= dict(resid=[cfg.resid_lambda_init] * 2, post=[1.0] * 2)
    if layer.x0:
        init["x0"] = [0.0]
    if layer.ngram:
        init["ngram"] = [cfg.ngram_lambda_init]
    return init


def mix(weights: Iterable[Tensor], streams: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of streams."""
    return sum(weight * stream for weight, stream in zip(weights, streams))  # type: ignore[return-value]


class SharedInputs(NamedTuple):
    """What every layer may read beside the residual stream."""

    x0: Tensor  # (T, K): the normalized embedding (record 9, @KoszarskyB)
    ngrams: Tensor  # (T, K): the sum of the embeddings of the token's n-grams (62, @classiclarryd)
    value_embeds: dict[int, Tensor]  # (T, H D), by layer
    attention: dict[str, AttentionContext]  # by kind of attention


class BlockOutputs(NamedTuple):
    """What a layer read and made, each (T, K): later layers and the head read it."""

    first: Tensor  # the residual stream before the layer; in layer 0 with n-grams
    value_embed: Tensor | None
    attn_input: Tensor  # of unit RMS
    mlp_input: Tensor  # of unit RMS
    output: Tensor  # the residual stream after the layer


class Block(nn.Module):
    """A layer: attention, embeddings or an earlier layer, and then MLPs, are added to the residual stream, all gated.

    The first layer adds its n-grams before all else, later layers after attention.
    """

    def __init__(self, cfg: Hyperparameters, number: int, has_gate_net: bool):
        super().__init__()
        layer = cfg.layers[number]
        self.number = number
        self.layer = layer
        has_mudd = layer.mudd is not None
        if (has_mudd or layer.head_mix) and cfg.model_dim != cfg.num_heads * cfg.head_dim:
            raise UserError(f"layer {number} mixes streams with values: expected --model_dim num_heads * head_dim")
        if (layer.xsa or layer.head_gate) and not has_gate_net:
            raise UserError(f"layer {number}: xsa and head_gate need a gate_net in this layer or before")
        self.attn = CausalSelfAttention(cfg, layer) if layer.attention is not None else None
        self.mlps = nn.ModuleList(MLP(cfg, scale_per_token=has_mudd) for _ in range(layer.mlps))
        if layer.skip is not None:
            self.skip_lambda = nn.Parameter(torch.tensor(-1.5))  # before a sigmoid: record 32 (@bernard24)
        self.mudd_net = GateNet(cfg, mudd_net_init(layer, cfg)) if has_mudd else None
        # The gates that no network computes are parameters
        self.resid_lambdas = self.post_lambdas = self.x0_lambdas = self.ngram_lambdas = self.skip_gate = None
        if not has_mudd:
            self.resid_lambdas = nn.Parameter(torch.full((2,), cfg.resid_lambda_init))
            if self.attn or self.mlps:
                self.post_lambdas = nn.Parameter(torch.ones(2))
        if not (has_mudd or has_gate_net):
            if layer.x0:
                self.x0_lambdas = nn.Parameter(torch.zeros(1))
            if layer.ngram:
                self.ngram_lambdas = nn.Parameter(torch.full((1,), cfg.ngram_lambda_init))
        if layer.skip is not None and not has_gate_net:
            self.skip_gate = nn.Parameter(torch.full((1,), 0.5))

    def gates(self, x: Tensor, net_gates: dict[str, Tensor]) -> Gates:
        """Return the layer's gates. net_gates: those that a gate network computed for this layer, by name."""
        if self.mudd_net is not None:
            net_gates = net_gates | self.mudd_net(x)
        post = net_gates.get("post", self.post_lambdas)
        return Gates(
            # By unbind, as two indexed elements would get two gradients, which are added up
            resid=net_gates.get("resid", self.resid_lambdas).unbind(),
            post=(None, None) if post is None else post.unbind(),
            x0=net_gates.get("x0", self.x0_lambdas),
            ngram=net_gates.get("ngram", self.ngram_lambdas),
            skip=net_gates.get("skip", self.skip_gate),
            xsa=net_gates.get("xsa"),
            head_gate=net_gates.get("head_gate"),
            to_stream=net_gates.get("to_stream"),
            to_values=net_gates.get("to_values"),
            value_embed=net_gates.get("value_embed"),
        )

    def forward(
        self, x: Tensor, shared: SharedInputs, earlier: list[BlockOutputs], net_gates: dict[str, Tensor]
    ) -> BlockOutputs:
        """Return what the layer makes of the residual stream x (T, K). earlier: the outputs of the layers before."""
        layer = self.layer
        gates = self.gates(x, net_gates)
        if layer.ngram and not earlier:  # in the first layer
            x = x + gates.ngram[0] * shared.ngrams
        first = x
        if layer.shift:
            # From here on some channels are those of earlier tokens, even of another document: after RWKV
            # (arXiv:2305.13048)
            parts = x.tensor_split(len(layer.shift), dim=1)
            x = torch.cat([shift_later(part, n) for part, n in zip(parts, layer.shift)], dim=1)
        mudd_values = None
        if layer.mudd is not None:
            mudd_inputs = [earlier[0].first, earlier[layer.mudd].output, x]
            mudd_values = mix(gates.to_values, mudd_inputs)
            x = x + mix(gates.to_stream, mudd_inputs)
        # From an earlier layer: record 77 (@classiclarryd)
        attn_input = norm(x if layer.attn_input is None else earlier[layer.attn_input].output)
        if layer.skip is None:
            x = gates.resid[0] * x
        else:  # U-Net: record 11 (@brendanh0gan). As in the record the skip has two factors, and resid[0] is not used
            x = x + self.skip_lambda.sigmoid() * gates.skip[0] * earlier[layer.skip].output
        value_embed = shared.value_embeds.get(self.number)
        if self.attn is not None:
            x = x + self.attn(attn_input, value_embed, mudd_values, shared.attention[layer.attention], gates)
        if layer.x0:  # with MUDD that is the input of layer 0, n-grams included, as in the record
            x = x + gates.x0[0] * (shared.x0 if layer.mudd is None else earlier[0].first)
        if layer.ngram and earlier:
            x = x + gates.ngram[0] * shared.ngrams
        mlp_input = norm(x)
        x = gates.resid[1] * x
        for mlp in self.mlps:
            x = x + mlp(mlp_input, gates.post[1])
        return BlockOutputs(first, value_embed, attn_input, mlp_input, x)


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
        dtype = getattr(torch, cfg.dtype)  # of tables, networks and gates, as of activations; the rest begins in fp32
        self.embed = Table(torch.empty(cfg.padded_vocab if cfg.tied_frac else vocab_size, K, dtype=dtype).normal_())
        self.value_embeds = nn.ModuleDict()
        for i, layer in enumerate(cfg.layers):
            if layer.value_embed:
                table = torch.empty(vocab_size, cfg.num_heads * cfg.head_dim, dtype=dtype).normal_(
                    0, cfg.value_embed_std
                )
                self.value_embeds[str(i)] = Table(table)
        # The rows of n-grams that a cycle reads, and where their gradients go: `NgramTable` has these buffers
        self.fetched_ngrams: Tensor | None = None
        self.ngram_grads: Tensor | None = None
        if cfg.sign_rows:  # a constant, the same in all runs
            generator = torch.Generator().manual_seed(83)
            signs = torch.randint(2, (cfg.sign_rows, K), generator=generator, device="cpu")
            self.register_buffer("signs", (2 * signs - 1).to(torch.int8))
        self.max_window = max(cfg.final_window, *chain(*(stage.windows.values() for stage in cfg.stages)))
        self.add_blocks()
        if n := cfg.smear_gate_inputs:
            self.smear_gate = nn.Parameter(torch.zeros(1, n, dtype=dtype))
            self.smear_lambda = nn.Parameter(torch.tensor(0.0))
        self.pointer = Pointer(cfg) if cfg.pointer_dim else None
        head = torch.empty(cfg.padded_vocab, K, dtype=dtype if cfg.tied_frac else torch.float32)
        self.lm_head = Table(head.normal_(0, cfg.head_std))
        if cfg.head_from_values:
            # The head begins by predicting what attention finds: a row is what its value adds to the residual stream
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

    def add_blocks(self):
        """Make the layers, and the gate networks that serve them."""
        cfg = self.cfg
        self.blocks = nn.ModuleList()
        net_inits: dict[int, dict[tuple[int, str], list[float]]] = {}  # by the network's layer, then layer and gate
        last_net = None
        for i, layer in enumerate(cfg.layers):
            if layer.gate_net:
                last_net = i
                net_inits[i] = {}
            self.blocks.append(Block(cfg, i, has_gate_net=last_net is not None))
            if last_net is not None:
                for name, values in gate_net_init(layer, cfg).items():
                    net_inits[last_net][i, name] = values
        self.gate_nets = nn.ModuleDict({str(i): GateNet(cfg, init) for i, init in net_inits.items()})
        self.gate_scale = nn.Parameter(torch.tensor(GATE_SCALE)) if self.gate_nets else None
        if outputs := cfg.layers[-1].head_mix:
            # Weights of `head_mix_inputs`. Half of the output that is named first is taken off: record 40 (@snimu,
            # @classiclarryd)
            of_outputs = [-0.5] + [0.0] * (len(outputs) - 1)
            weights = [0.0, *of_outputs, *[0.0] * len(self.value_embeds), 0.0, 0.0]
            self.head_net = GateNet(cfg, dict(weights=weights), groups=cfg.mix_groups)

    def forward(self, inputs: ModelInputs, attn_settings: AttentionSettings, invalid: Tensor | None = None) -> Tensor:
        """Return the summed loss, in FP8 where the configuration says so and gradients are wanted.

        invalid (T, V / 8): rows of `read_invalid_tokens`, for validation.
        """
        x = self.features(inputs, attn_settings)
        pointer_mass = self.pointer(x, inputs) if self.pointer else None
        head = self.lm_head.weight if inputs.sampled_classes is None else self.lm_head(inputs.sampled_classes)
        if not torch.is_grad_enabled():
            return validation_loss(x, head, pointer_mass, inputs, self.cfg, invalid)
        return TrainingLoss.apply(x, head, pointer_mass, inputs.targets, inputs.loss_weights, self.cfg)

    def features(self, inputs: ModelInputs, attn_settings: AttentionSettings) -> Tensor:
        """Return the head's input (T, K)."""
        tokens = inputs.tokens
        value_embeds = {int(i): table(tokens) for i, table in self.value_embeds.items()}
        if torch.is_grad_enabled():
            ngram_embeds = AccumulatingEmbedding.apply(self.fetched_ngrams, inputs.ngram_index, self.ngram_grads)
        else:
            ngram_embeds = F.embedding(inputs.ngram_index, self.fetched_ngrams)
        if self.cfg.sign_rows:
            ngram_embeds = ngram_embeds * self.signs[inputs.sign_index].type_as(ngram_embeds)
        x = self.embed(tokens)
        if self.cfg.smear_gate_inputs:  # some of the token before, even of another document: record 34 (@classiclarryd)
            before = F.pad(x[:-1], (0, 0, 1, 0))
            x = x + self.smear_lambda * sigmoid_gate(x, self.smear_gate) * before
        x = norm(x)
        contexts = self.attention_contexts(inputs.doc_starts, attn_settings)
        shared = SharedInputs(x, ngram_embeds.sum(0), value_embeds, contexts)
        net_gates: dict[tuple[int, str], Tensor] = {}  # of the last network, by layer and name
        outputs: list[BlockOutputs] = []
        for block in self.blocks:
            if block.layer.gate_net:
                net_gates = self.gate_nets[str(block.number)](x, self.gate_scale)
            own = {name: gate for (number, name), gate in net_gates.items() if number == block.number}
            outputs.append(block(x, shared, outputs, own))
            x = outputs[-1].output
        return norm(self.mix_for_head(outputs) if self.cfg.layers[-1].head_mix else x)

    def head_mix_inputs(self, outputs: list[BlockOutputs]) -> list[Tensor]:
        """Return what the last layer's head_mix names, each (T, K)."""
        named = [outputs[i].output for i in self.cfg.layers[-1].head_mix]
        value_embeds = [block.value_embed for block in outputs if block.value_embed is not None]
        return [outputs[0].first, *named, *value_embeds, outputs[-1].mlp_input, outputs[-1].attn_input]

    def mix_for_head(self, outputs: list[BlockOutputs]) -> Tensor:
        """Return the last stream (T, K) plus a mix, in which groups of channels have their own weights (record 92)."""
        x = outputs[-1].output
        streams = [stream.unflatten(1, (self.cfg.mix_groups, -1)) for stream in self.head_mix_inputs(outputs)]
        return x + mix(self.head_net(x)["weights"][..., None], streams).flatten(1)

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

    One more token, row vocab_size of lm_head, takes part in the softmax: "a copy". Attention without positions
    distributes its probability alpha over earlier tokens and a sink, a key of its own for "none of them", whose mass
    goes back to the vocabulary. `mix_copies` has the formulas. Queries and keys are projections of the head's input. A
    sequence is in blocks of pointer_block tokens; a token sees those of its document in its own block and the one
    before.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        K = cfg.model_dim
        D = cfg.pointer_dim
        self.cfg = cfg
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

        There are two masks: the first shows all tokens that a token sees, the second those of them that equal the next
        one. Both run as two heads with the same queries and keys, whose log-sum-exps are `seen` and `equal`.
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
        if isinstance(mask, BandMask):
            scores = mask.scores(q[:, None].type_as(sink_scores), k[:, None].type_as(sink_scores))
            seen, equal = scores.logsumexp(-1).flatten(1)
        else:
            q, k = q.expand(1, 2, -1, -1), k[None, None]
            values = k[..., :16]  # their sums are not wanted: 16 dimensions are the fewest that the kernel takes
            # 8 warps, as by default on an H100: with 4 the backward pass spilled 1,368 bytes on 10.0, with 8 168
            options: dict = dict(scale=1.0, enable_gqa=True, kernel_options=dict(bwd_num_warps=8))
            y, aux = flex_attention(q, k, values, block_mask=mask, return_aux=AuxRequest(lse=True), **options)
            # 0 * y changes nothing: torch 2.13 cannot compile a y that gets no gradient
            seen, equal = aux.lse[0] + 0 * y[0, ..., 0]
        total = torch.logaddexp(seen, sink_scores)
        return torch.stack([equal - total, sink_scores - total], dim=1).exp()


def mix_copies(p, alpha, copy_mass, sink_mass):
    """Return p', the probability of the next token with its part of alpha, the probability of a copy.

    p is the softmax of the next token. copy_mass, sink_mass: what `Pointer` returns. alpha is split between copies and,
    through the sink, the vocabulary without "a copy", where the next token has p / (1 - alpha):

        p' = p + alpha (copy_mass + sink_mass p / (1 - alpha)) + 1e-9
    """
    return p + alpha * (copy_mass + sink_mass * (p / (1 - alpha))) + 1e-9


def mix_copies_backward(p, alpha, copy_mass, sink_mass, scale):
    """Return gradients of the loss -weight log p', with scale = weight / p'.

    With respect to the logits it is as of two targets, the next token and a copy: that of logit j is

        (next_weight + copy_weight) softmax_j - next_weight [j is the next token] - copy_weight [j is a copy]

    Returned are next_weight and copy_weight, and the gradients with respect to copy_mass and sink_mass.
    """
    p_alone = p / (1 - alpha)
    next_weight = scale * (p + alpha * sink_mass * p_alone)
    copy_weight = scale * alpha * (copy_mass + sink_mass * p_alone / (1 - alpha))
    return next_weight, copy_weight, -scale * alpha, -scale * alpha * p_alone


# ---- Head: softcapped logits and their cross entropy, in slices of tokens, in FP8 where the GPU can ------------------
class Softmax(NamedTuple):
    """The softmax over softcapped logits of some tokens, up to the sum of exponentials."""

    s: Tensor  # (T, V): sigmoid(-(z + d) 2 / c) of the logits z
    exps: Tensor  # (T, V): exponentials of the softcapped logits less r
    total: Tensor  # (T, 1): their sums
    log_p: Tensor  # (T, n): log probabilities of the targets


def softcapped_softmax(z: Tensor, targets: Tensor, cfg: Hyperparameters, invalid: Tensor | None = None) -> Softmax:
    """Return the softmax of the logits z (T, V), which it overwrites. targets (T, n): negative where there is none.

    A softcapped logit is l = r sigmoid((z + d) 2 / c), after Gemma 2's c tanh(z / c) (arXiv:2408.00118), with c = 15
    since record 18 (@KoszarskyB), lopsided since record 54 (@classiclarryd). invalid: bits (T, V / 8) of tokens whose
    logit becomes -60 (record 91, @jvarho). The padding of the vocabulary is in the softmax, as in the record.

        s = sigmoid(-(z + d) 2 / c)
        l - r = -r s          a softmax ignores the shift by r; never above 0, so exp needs no maximum subtracted

    """
    s = z.add_(cfg.softcap_shift).mul_(-2 / cfg.lm_head_softcap).sigmoid_()  # in place: eager CPUs gain by it
    shifted = -cfg.softcap_range * s
    if invalid is not None:
        bits = invalid[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=z.device) & 1
        shifted.masked_fill_(bits.flatten(1) > 0, -60 - cfg.softcap_range)
    target_logits = shifted.gather(1, targets.clamp(min=0))
    exps = shifted.exp_()
    total = exps.sum(-1, keepdim=True)
    return Softmax(s, exps, total, target_logits - total.log())


def copy_arguments(softmax: Softmax, pointer_mass: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p, alpha, copy_mass and sink_mass of `mix_copies`: the first target is the next token, the last a copy."""
    alpha = softmax.log_p[:, -1].exp().clamp(max=1 - 1e-6)
    return softmax.log_p[:, 0].exp(), alpha, pointer_mass[:, 0], pointer_mass[:, 1]


def target_losses(softmax: Softmax, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None) -> Tensor:
    """Return the losses (T,) in nats, of the targets with weights (n,). pointer_mass (T, 2): None without a pointer."""
    log_p = softmax.log_p
    if pointer_mass is not None:
        mixed = mix_copies(*copy_arguments(softmax, pointer_mass))
        log_p = torch.cat([mixed.log()[:, None], log_p[:, 1:]], dim=1)
    return -(weights * (targets >= 0) * log_p).sum(-1)


def cross_entropy_gradients(
    softmax: Softmax, targets: Tensor, weights: Tensor, pointer_mass: Tensor | None, cfg: Hyperparameters
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `target_losses` with respect to z (T, V) and to pointer_mass. Overwrites softmax.exps."""
    # A target raises its own logit and lowers all by its weight. An accident of the record: a target PAST_END has no
    # loss, but its weight lowers the logits
    target_weights = weights * (targets != NO_TARGET)
    d_pointer_mass = None
    if pointer_mass is not None:
        arguments = copy_arguments(softmax, pointer_mass)
        scale = weights[0] / mix_copies(*arguments)
        next_weight, copy_weight, *d_masses = mix_copies_backward(*arguments, scale)
        target_weights = torch.cat([next_weight[:, None], target_weights[:, 1:-1], copy_weight[:, None]], dim=1)
        d_pointer_mass = torch.stack(d_masses, dim=1)
    d_logits = softmax.exps.mul_(target_weights.sum(-1, keepdim=True) / softmax.total)
    d_logits.scatter_add_(1, targets.clamp(min=0), -target_weights * (targets >= 0))
    dz = torch.ops.aten.sigmoid_backward(d_logits, softmax.s).mul_(cfg.softcap_range * 2 / cfg.lm_head_softcap)
    return dz, d_pointer_mass


def softcapped_cross_entropy(z, scale: float, targets, weights, pointer_mass, cfg: Hyperparameters):
    """Return losses (T,), `scale` times their gradients with respect to z (T, V), and those of pointer_mass.

    Gradients with respect to the logits z are in the precision of z, or in e5m2 where z is e4m3. z may be overwritten.
    """
    softmax = softcapped_softmax(z.to(weights.dtype), targets, cfg)
    losses = target_losses(softmax, targets, weights, pointer_mass)
    dz, d_pointer_mass = cross_entropy_gradients(softmax, targets, weights, pointer_mass, cfg)
    dz = quantize(dz, scale, torch.float8_e5m2) if z.itemsize == 1 else dz.to(z.dtype)
    return losses, dz, d_pointer_mass


def cross_entropy_with_kernel(z, scale: float, targets, weights, pointer_mass, cfg: Hyperparameters):
    """Do what `softcapped_cross_entropy` does. The gradient overwrites z.

    z is read twice, the second time from a cache; the compiler's kernel took up to twice as long (measured: one H100).
    """
    c, r, d = cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    d_pointer_mass = torch.empty_like(pointer_mass)
    cross_entropy_kernel[(len(z),)](
        z, targets, weights, pointer_mass, losses, d_pointer_mass, z.size(1), len(weights),
        slope=-1 / c, shift=-d / c, bits=r / math.log(2), factor=scale * r * 2 / c, BLOCK=2048,
    )  # fmt: skip
    return losses, z.view(torch.float8_e5m2) if z.itemsize == 1 else z, d_pointer_mass


# The head's scales, the record's: x of 100 and w of 2 become 448, e4m3's largest number; a gradient of 1.6
# with respect to a logit, about the largest, becomes 956 of e5m2's 57,344
HEAD_FP8_X, HEAD_FP8_W, HEAD_FP8_DZ = 448 / 100, 448 / 2, 448 / 0.75


def head_loss(x: Tensor, w: Tensor, cross_entropy: Callable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses, and their gradients with respect to x (T, K), w (V, K) and pointer mass.

    cross_entropy(z, scale): `softcapped_cross_entropy` of these tokens.
    """
    w_x = w.to(x.dtype)
    losses, dz, d_pointer_mass = cross_entropy(x @ w_x.T, scale=1.0)
    # As (K, V), then transposed: faster than (V, K) directly (record 19)
    grad_w = (x.T @ dz).to(accum_dtype(w.dtype)).T
    return losses, dz @ w_x, grad_w, d_pointer_mass


def head_loss_fp8(x: Tensor, w: Tensor, cross_entropy: Callable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `head_loss` does, with products in FP8 (record 19, @YouJiacheng).

    x, w and the logits (record 92) are in e4m3, their gradient, which needs range more than precision, in e5m2. Static
    scales suffice: x has unit RMS, w saturates, and the gradient of a token's loss with respect to a logit is below 1.6
    in gpt2.
    """
    x_q = quantize(x, HEAD_FP8_X, torch.float8_e4m3fn)
    w_q = quantize(w, HEAD_FP8_W, torch.float8_e4m3fn)
    z = fp8_matmul(x_q, w_q.t(), HEAD_FP8_X * HEAD_FP8_W, torch.float8_e4m3fn, fast=True)
    losses, dz, d_pointer_mass = cross_entropy(z, scale=HEAD_FP8_DZ)
    grad_x = fp8_matmul(dz, w_q, HEAD_FP8_DZ * HEAD_FP8_W, x.dtype)
    # As (V, K), unlike `head_loss`: sampled rows are then added to the table's gradient four numbers at a time, and not
    # each number alone
    grad_w = fp8_matmul(dz.t(), x_q, HEAD_FP8_X * HEAD_FP8_DZ, accum_dtype(w.dtype))
    return losses, grad_x, grad_w, d_pointer_mass


class TrainingLoss(torch.autograd.Function):
    """The summed `softcapped_cross_entropy` of z = x @ w.T, for x (T, K), w (V, K), targets (T, n), weights (n,).

    Only a slice of the logits (T, V) exists at a time. The forward pass computes the gradients of a slice as well, as
    computing its logits again in the backward pass took 27 to 41% of the head's time.
    """

    @staticmethod
    def forward(ctx, x, w, pointer_mass, targets, weights, cfg):
        # The kernel is for heads with a pointer. Without one logits are in fp32, so slices are smaller
        has_pointer = pointer_mass is not None
        size = cfg.lm_head_slice if has_pointer else cfg.val_lm_head_slice
        loss_of_slice = head_loss_fp8 if cfg.lm_head_fp8 else head_loss
        function = cross_entropy_with_kernel if can_use_kernels(x) and has_pointer else softcapped_cross_entropy
        losses, grads_x, grads_mass = [], [], []
        grad_w = None
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            mass = pointer_mass[part] if has_pointer else None
            cross_entropy = partial(function, targets=targets[part], weights=weights, pointer_mass=mass, cfg=cfg)
            loss, grad_x, grad_w_part, grad_mass = loss_of_slice(x[part], w, cross_entropy)
            losses.append(loss)
            grads_x.append(grad_x)
            grads_mass.append(grad_mass)
            grad_w = grad_w_part if grad_w is None else grad_w + grad_w_part
        grad_pointer_mass = torch.cat(grads_mass) if has_pointer else None
        ctx.save_for_backward(torch.cat(grads_x), grad_pointer_mass, grad_w.to(w.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_pointer_mass, grad_w = ctx.saved_tensors
        grad_mass = None if grad_pointer_mass is None else grad * grad_pointer_mass
        # `head_loss` returns a transpose: it is stored by rows, as the buffer is to which it is added
        return grad * grad_x, (grad * grad_w).contiguous(), grad_mass, None, None, None


def validation_loss(
    x: Tensor, w: Tensor, pointer_mass: Tensor | None, inputs: ModelInputs, cfg: Hyperparameters, invalid: Tensor | None
) -> Tensor:
    """Return the summed loss of z = x @ w.T without gradients, in slices, in the precision of x."""
    losses = []
    for start in range(0, len(x), cfg.val_lm_head_slice):
        part = slice(start, start + cfg.val_lm_head_slice)
        z = linear(x[part], w)
        bits = None if invalid is None else invalid[part]
        softmax = softcapped_softmax(z.to(inputs.loss_weights.dtype), inputs.targets[part], cfg, bits)
        mass = None if pointer_mass is None else pointer_mass[part]
        losses.append(target_losses(softmax, inputs.targets[part], inputs.loss_weights, mass))
    return torch.cat(losses).sum()


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def start_collective(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective and return a function that waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


def all_gather_objects(own) -> list:
    """Return what each rank has. Hosts wait for each other, and for no device."""
    everyone = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    return everyone


class ShardedOptimizer:
    """An optimizer of parameters of one precision. Every rank updates an equal shard of their rows.

    Parameters become views of one buffer: each starts at a row and is zero-padded. With one process its shard is the
    whole buffer.

        param_buffer, param_shard    all parameters, of Muon in the precision of activations, and this rank's rows
        grad_buffer, grad_shard      this rank's gradients of all, and the sums over all ranks of its own rows
        master                       this rank's rows, to which updates are added: param_shard, or an fp32 copy

    groups: the table's row for each parameter; emas: the rows of `emas` that apply to all of them, by number;
    grad_dtype: of grad_buffer, if not the parameters': of tables, whose gradients `AccumulatingEmbedding` adds there.
    """

    wait_for_grads: Callable[[], object]
    wait_for_params: Callable[[], object]
    by_matrix = False  # True: a row is a matrix; else 16 numbers, as kernels want addresses that are multiples of 16
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
        self.rows_per_param = [-(-p.numel() // math.prod(row)) for p in self.params]
        self.rows_per_param[-1] += -sum(self.rows_per_param) % ranks.world_size  # padding: equal shards
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
            # The shorter one; fp16 sums of bf16 tables stay fp16, as min takes the first of equals
            sent_dtype = min(self.grad_buffer.dtype, self.param_buffer.dtype, key=lambda dtype: dtype.itemsize)
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

    def scheduled_update(self, schedule: StepSchedule) -> AdamStep | MuonStep | None:
        """Return the numbers of the update in a step, or None if it accumulates only. Groups differ in lr alone."""
        return schedule.updates.get(self.groups[0].patterns)

    @property
    def accumulates(self) -> bool:
        """Return whether a rank adds up several gradients for an update. A single one is copied, not added to zeros.

        Tables always add: of a table a sequence has a gradient for some rows.
        """
        is_single = self.cfg.batch_sequences == self.ranks.world_size and max(self.groups[0].update_interval) == 1
        return not (self.by_matrix and is_single)

    def reduce(self):
        """Start to sum the gradients over the ranks; each gets the sums of its rows.

        They travel in their precision, or in that of the parameters if it is shorter.
        """
        sent = self.grad_buffer.type_as(self.grad_shard)  # with one process they are one tensor
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
        for name in self.state.keys() & other.state.keys():
            self.state[name].copy_(other.state[name])

    def update_emas(self, schedule: StepSchedule):
        """Update the averages of this rank's rows."""
        for i in self.emas:
            if rate := schedule.ema_rates[i]:
                ema = self.state[f"ema {i}"]
                ema.lerp_(self.master.to(ema.dtype), rate)

    def blend_emas(self):
        """Blend the averages into the parameters, and give these together the norm that they had, see `Group`."""
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


def to_tensors(cfg: Hyperparameters, scalars: dict[str, float]) -> dict[str, Tensor]:
    """Return numbers as tensors, as each new value of a Python number would need a graph of its own."""
    dtype = accum_dtype(getattr(torch, cfg.dtype))
    tensors = torch.tensor([*scalars.values()], dtype=dtype).to(cfg.device, non_blocking=True).unbind()
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
    (record 56, @ChrisJMcCormick). The weight decay is cautious (record 50, @roeeshenberg). Tables later step every
    fourth time (`schedule_adam`).
    """

    def init_state(self) -> dict[str, Tensor]:
        dtype = accum_dtype(self.master.dtype)
        return dict(
            exp_avg=torch.zeros_like(self.master, dtype=dtype), exp_avg_sq=torch.zeros_like(self.master, dtype=dtype)
        )

    def update_shard(self, grad: Tensor, schedule: StepSchedule):
        scalars = to_tensors(self.cfg, self.scheduled_update(schedule)._asdict() | dict(eps=self.cfg.adam_eps))
        m, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        update = compiled(adam_update, self.cfg.compile, dynamic=True)
        update(self.master, grad, m, v, scalars, self.cfg.batch_sequences)


NEWTON_SCHULZ = (  # a, b, c of each step: together they take singular values from 0.003 to 1 / 1.05 near 1
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
    X = (G / (1.05 * norms + 1e-6)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def normalize_neurons(update: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """Divide neurons of matrices by their RMS, and keep the norm of each matrix.

    Neurons are the longer dimension, rows if both are equal: one for each hidden unit of an MLP. `squares`,
    (n, rows, 1) or (n, 1, columns), averages their mean squares over steps (NorMuon, arXiv:2510.05491; records 41,
    @li_zichong, 48, @ChrisJMcCormick).
    """
    dim = -1 if squares.size(-1) == 1 else -2
    squares.lerp_(update.square().mean(dim, keepdim=True), 1 - beta2)
    even = update / squares.clamp(min=1e-10).sqrt()
    norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, even))
    return even * (norms / new_norms.clamp(min=1e-10))


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
    """Update matrices as `Muon` says, with its state and scalars by name. params: rounded copies of the master."""
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

    With g the mean gradient of the step, in the lerp form of record 15, and two momenta (ANVIL, record 92):

        fast <- b fast + (1 - b) g,    b = momentum, from slow_momentum_from on 0.85
        slow <- 0.98 slow + 0.02 g
        m = fast, from slow_momentum_from on 0.4385 fast + 0.5615 slow
        u <- normalize_neurons(zeropower(momentum m + (1 - momentum) g))
        p <- p - factor lr (u + decay lr p [slow p >= 0])

    lr is muon_lr by the schedule, factor the lr of a matrix's group. The weight decay is cautious: it acts only where a
    step along the slow momentum would shrink the value, too, from the first step on (record 43, @varunneal). Ranks
    have whole matrices: the 22 of gpt2's MLPs take 24 places on 8 ranks, two of them padding.
    """

    by_matrix = True
    has_master = True  # bf16 alone would round small steps away

    def init_state(self) -> dict[str, Tensor]:
        master = self.master
        factors = [master.new_full((n, 1, 1), group.lr) for n, group in zip(self.rows_per_param, self.groups)]
        self.factors = self.shard(torch.cat(factors))
        rows, columns = master.shape[-2:]
        squares = torch.zeros_like(master[:, :, :1] if rows >= columns else master[:, :1])
        return dict(fast=torch.zeros_like(master), slow=torch.zeros_like(master), squares=squares)

    def update_shard(self, grad: Tensor, schedule: StepSchedule):
        now = self.scheduled_update(schedule)
        scalars = dict(lr=now.lr, momentum=now.momentum, fast_beta=now.fast_beta, fast_share=now.fast_share)
        tensors = to_tensors(self.cfg, scalars | dict(slow_rate=0.02))
        update = compiled(muon_update, self.cfg.compile, dynamic=False)
        sequences = self.cfg.batch_sequences
        update(self.param_shard, grad, self.factors, self.state, tensors, now.decay, now.beta2, sequences)


OPTIMIZERS = {"Muon": Muon, "Adam": Adam}


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Return optimizers for all parameters, each in exactly one group. Muon batches all matrices of a shape."""
    cfg = gpt.cfg
    members: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in gpt.named_parameters():
        group = find_group(name, cfg)
        emas = tuple(i for i, row in enumerate(cfg.emas) if matches(name, row.patterns))
        key: tuple
        if OPTIMIZERS[group.optimizer].by_matrix:
            key = emas, group._replace(patterns="", lr=0.0), p.shape[-2:]
        else:
            key = emas, group, p.dtype
        members.setdefault(key, {})[name] = p  # those with equal keys share an optimizer
    embed, head = (find_group(name, cfg) for name in ("embed.weight", "lm_head.weight"))
    if cfg.tied_frac and (embed.patterns != "embed.weight" or head != embed._replace(patterns="lm_head.weight")):
        raise UserError(
            f"embed.weight has {embed}, lm_head.weight {head}: expected equal rows of their own, or --tied_frac 0"
        )
    tables = {table.weight for table in gpt.tables()}
    optimizers = []
    for (emas, group, _), params in members.items():
        groups = [find_group(name, cfg) for name in params]
        first = next(iter(params.values()))
        grad_dtype = sum_dtype(group, first.dtype) if first in tables else None
        own_emas = {i: cfg.emas[i] for i in emas}
        optimizers.append(OPTIMIZERS[group.optimizer](params, groups, own_emas, cfg, ranks, grad_dtype))
    # Largest first: its update overlaps the other reduce-scatters, and only the smallest all-gather overlaps nothing
    return sorted(optimizers, key=lambda optimizer: -optimizer.param_buffer.nbytes)


class TiedTables:
    """Embedding and head while they are one table: the embedding is updated, and the head copies it."""

    def __init__(self, optimizers: Sequence[ShardedOptimizer]):
        self.embed = next(optimizer for optimizer in optimizers if "embed.weight" in optimizer.names)
        self.head = next(optimizer for optimizer in optimizers if "lm_head.weight" in optimizer.names)

    def merge_gradients(self):
        """Move the gradient of the head to that of the embedding."""
        self.embed.grad_buffer += self.head.grad_buffer
        self.head.grad_buffer.zero_()

    def copy_to_head(self):
        """Copy the embedding's parameters, moments and averages to the head."""
        self.head.copy_state_from(self.embed)


@torch.no_grad()
def step_optimizers(
    optimizers: Sequence[ShardedOptimizer],
    schedule: StepSchedule,
    while_reducing: Callable = lambda: None,
    while_gathering: Callable = lambda: None,
):
    """Take a step on the gradients, summed over this rank's sequences, and clear those that were used.

    First the gradients of all due optimizers start to travel. Then one after the other updates its rows and starts to
    send them: meanwhile the next one's gradients and the last one's values are on their way. At last all values are
    waited for. while_reducing starts what else may travel, while_gathering computes while the last values travel.
    """
    due = [optimizer for optimizer in optimizers if optimizer.scheduled_update(schedule)]
    tied = TiedTables(due) if schedule.tied else None
    if tied:
        tied.merge_gradients()
        due.remove(tied.head)
    for optimizer in due:
        optimizer.reduce()
    while_reducing()
    for optimizer in due:
        optimizer.update(schedule)
    used = [optimizer.grad_buffer for optimizer in due if optimizer.accumulates]
    for dtype in {buffer.dtype for buffer in used}:  # a launch clears all buffers of one precision
        torch._foreach_zero_([buffer for buffer in used if buffer.dtype == dtype])
    while_gathering()
    for optimizer in due:
        optimizer.wait_for_params()
    if tied:
        tied.copy_to_head()
    for optimizer in optimizers:
        optimizer.update_emas(schedule)


# ---- N-grams: a large table, of which a cycle of steps reads few rows ------------------------------------------------
def row_adam_update(rows: Tensor, v: Tensor, grad: Tensor, scalars: dict, sequences: int) -> tuple[Tensor, Tensor]:
    """Return rows and their means of squares after an update as in `NgramTable.update`. v has decayed already."""
    grad = mean_gradient(grad, sequences, v.dtype)
    v = v + scalars["added"] * grad.square().mean(1, keepdim=True)
    return adam_values(rows.to(v.dtype), grad, v, scalars).to(rows.dtype), v


ROWS_AT_ONCE = 2**18  # rows copied between device and host at a time: 400 MB in gpt2


class NgramTable:
    """The embeddings of n-grams, of which only those that were read are updated.

    Each rank owns an equal part of the rows, and the table exists once across all: no other tensor has its size. When a
    cycle begins, its ranks fetch the rows that they will read; when it ends, summed gradients go back: `RowExchange`.

        rows, v             this rank's part of the table, and the mean square of the gradients of each row
        fetched, grads      the rows that a cycle reads, in the order of recv_ids, and the sums of their gradients.
                            Their addresses stay: the model's CUDA graph reads the one and adds to the other
    """

    arriving: Tensor  # the gradients that all ranks send for rows of this one
    wait: Callable[[], object]  # waits for them

    def __init__(self, cfg: Hyperparameters, ranks: Ranks, device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.group = find_group("ngrams", cfg)
        dtype = getattr(torch, cfg.dtype)
        rows = rows_per_rank(cfg, ranks)
        self.first = rows * ranks.rank  # number of the first row
        self.rows = torch.zeros(rows, cfg.model_dim, dtype=dtype, device=device)
        self.v = torch.zeros(rows, 1, dtype=accum_dtype(dtype), device=device)
        longest = max(schedule.seq_len for schedule in cfg.step_schedules)
        in_cycle = max(self.group.update_interval) * longest * cfg.batch_sequences // ranks.world_size
        most = min((cfg.ngram_order - 1) * max(in_cycle, cfg.val_seq_len), cfg.ngram_rows)
        self.fetched = torch.zeros(most, cfg.model_dim, dtype=dtype, device=device, requires_grad=True)
        self.grads = torch.zeros(most, cfg.model_dim, dtype=sum_dtype(self.group, dtype), device=device)

    def all_to_all(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> Callable[[], object]:
        """Start to send each rank its part of `rows`, into its `out`. Return a function that waits for one's own."""
        if self.ranks.world_size == 1:
            out.copy_(rows)
        return start_collective(dist.all_to_all_single, out, rows, received, sent)

    @torch.no_grad()
    def fetch(self, exchange: RowExchange):
        """Fetch the rows that a cycle reads."""
        rows = self.rows[exchange.send_rows]
        fetched = self.fetched[: len(exchange.recv_ids)]
        self.all_to_all(fetched, rows, exchange.recv_counts, exchange.send_counts)()

    def send(self, exchange: RowExchange):
        """Start to send the gradients of this rank's sequences to the rows' owners."""
        grads = self.grads[: len(exchange.recv_ids)]
        self.arriving = grads.new_empty(len(exchange.send_rows), grads.size(1))
        self.wait = self.all_to_all(self.arriving, grads, exchange.send_counts, exchange.recv_counts)

    def update(self, exchange: RowExchange, schedule: StepSchedule):
        """Update the rows that the cycle has read by Adam without momentum, and with one v for each row.

        As in the record v decays for all rows.
        """
        self.wait()
        self.grads[: len(exchange.recv_ids)].zero_()
        sums = self.arriving
        if self.ranks.world_size > 1:  # several ranks may have read a row
            # It sums in fp32 and in a fixed order. index_add_ adds fp16 numbers one by one, atomically, to zeros that
            # are written first
            sums = F.embedding_bag(exchange.order, sums, exchange.offsets, mode="sum")
        now = schedule.updates[self.group.patterns]
        scalars = dict(
            step_size=now.step_size,
            eps=self.cfg.adam_eps,
            decay=now.decay,
            added=1 - now.beta2,
        )
        ids = exchange.unique_rows
        self.v *= now.beta2
        update = compiled(row_adam_update, self.cfg.compile, dynamic=True)
        tensors = to_tensors(self.cfg, scalars)
        rows, v = update(self.rows[ids], self.v[ids], sums, tensors, self.cfg.batch_sequences)
        self.rows.index_copy_(0, ids, rows)
        self.v.index_copy_(0, ids, v)
        del self.arriving  # as large as the rows that were sent

    def state(self) -> dict[str, Tensor]:
        """Return the rows that differ from their initial zeros, on the host. v alone may have decayed to 0."""
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
    """What a checkpoint has beside the tensors, or with what a new run begins."""

    run_id: str
    seed: int
    must_match: dict[str, str]  # what has to be the same on all ranks, and when the run goes on
    step: int
    ms: float  # of training
    curves: dict[str, list[tuple[int, float, float]]]  # (step, loss, ms) by name
    slot: int  # which of a rank's two files has the tensors
    checksums: list[str]  # of the ranks' files; none before there are any


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Say in one line what is wrong with a file of the user's, as reading it can fail in many ways."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {error!r:.300}") from error


def checksum(path: Path) -> str:
    """Return a hash of the checksums that a file of tensors, a zip archive, has in it."""
    sums = [part.CRC for part in zipfile.ZipFile(path).infolist()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def load_file(path: Path, expected: str = "") -> dict:
    """Return what `save_file` wrote. expected: its checksum, where that is known."""
    with file_errors(f"{path}: not a sound file of this script"):
        if expected not in ("", checksum(path)) or zipfile.ZipFile(path).testzip():
            raise ValueError("it is damaged, or of another run, step or rank")
        return dict(torch.load(path, map_location="cpu", weights_only=True))


def save_file(path: Path, content: dict | bytes):
    """Write a file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # there is one after a failure


def find_checkpoint(given: Hyperparameters) -> Path | None:
    """Return the file that --resume names. `latest`: the newest in log_dir, of run_id if given, of a run not complete.

    If all are complete, it is the newest.
    """
    if given.resume != "latest":
        return Path(given.resume) if given.resume else None
    paths = [*Path(given.log_dir).glob(f"{glob.escape(given.run_id) or '*'}.checkpoint")]
    unfinished = [path for path in paths if not path.with_suffix(".json").exists()]
    return max(unfinished or paths, key=os.path.getmtime, default=None)


def load_checkpoint(given: Hyperparameters) -> Checkpoint | None:
    """Return the checkpoint that --resume names; None: a new run."""
    path = find_checkpoint(given)
    if path is None:
        return None
    if path.with_suffix(".json").exists():
        raise AlreadyComplete(f"{path.with_suffix('.json')}: this run is already complete")
    with file_errors(f"{path}: not a sound checkpoint of this script"):
        saved = Checkpoint(**load_file(path))
    if given.run_id not in ("", saved.run_id):
        raise UserError(f"--run_id {given.run_id}: {path} is of run {saved.run_id}")
    return saved


def load_tensors(cfg: Hyperparameters, saved: Checkpoint, ranks: Ranks) -> dict[str, Tensor] | None:
    """Return this rank's tensors of a checkpoint; None: a new run."""
    if not saved.checksums:
        return None
    folder = Path(cfg.log_dir) if cfg.resume == "latest" else Path(cfg.resume).parent
    return load_file(folder / f"{saved.run_id}.{saved.slot}.rank{ranks.rank}", saved.checksums[ranks.rank])


# ---- Log: what a run tells, and when ---------------------------------------------------------------------------------
class Clock:
    """The clock of a run: milliseconds of training, without validations and checkpoints."""

    def __init__(self, ms: float, cfg: Hyperparameters):
        self.ms_before = ms  # until it was started
        self.started: float | None = None
        self.synchronize = getattr(torch, cfg.device).synchronize  # of torch.cpu, where nothing is to be waited for

    @property
    def ms(self) -> float:
        """Return the milliseconds so far."""
        return self.ms_before + (0.0 if self.started is None else 1000 * (time.perf_counter() - self.started))

    def start(self):
        """Go on, once the device has done all that it was given."""
        self.synchronize()
        self.started = time.perf_counter()

    def stop(self):
        """Stop, once the device has done all that it was given."""
        self.synchronize()
        self.ms_before = self.ms
        self.started = None


def open_log(path: Path, cfg: Hyperparameters, is_main: bool) -> TextIO | None:
    """Open the file of a log, on rank 0, to add to it. Refuse to overwrite what another run has written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        goes_on_here = cfg.resume == "latest" or (cfg.resume and Path(cfg.resume).parent.samefile(path.parent))
        # A resumed run finds its own files here; only a result, of a run that has ended, is in the way
        suffixes = [".json"] if goes_on_here else [".json", ".checkpoint", ".pt", ".ngrams*"]
        for suffix in suffixes:
            for old in path.parent.glob(glob.escape(cfg.run_id) + suffix):
                raise FileExistsError(str(old))
        if not is_main:
            return None
        if not cfg.resume:
            path.touch(exist_ok=False)
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        except BlockingIOError:  # another run writes it
            raise
        except OSError:  # the file system has no locks
            pass
        return file
    except OSError as error:
        raise UserError(f"log {path}: choose another --run_id or --log_dir: {error!r}") from error


class Log:
    """The log of a run: its curves and, on rank 0, the file LOG_DIR/RUN_ID.txt, lines on the console and the bar."""

    def __init__(self, cfg: Hyperparameters, start: Checkpoint, is_main: bool):
        self.cfg = cfg
        self.start = start
        self.curves = dict(start.curves)
        self.path = Path(cfg.log_dir) / f"{cfg.run_id}.txt"
        self.file = open_log(self.path, cfg, is_main)

    def __enter__(self) -> "Log":
        self.bar = tqdm(
            desc="warming up",
            initial=num_tokens(self.start.step, self.cfg),
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
        """Write why the run stops and how it goes on. Any rank may have to, so the file is opened once more."""
        trace = "" if isinstance(error, ONE_LINE_ERRORS) else "".join(traceback.format_exception(error))
        checkpoint = self.path.with_suffix(".checkpoint")
        resume = f"; to go on, give the same flags and --resume {checkpoint}" if checkpoint.exists() else ""
        kind = type(error).__name__
        what = str(error) or kind if isinstance(error, ONE_LINE_ERRORS) else f"{kind}: {error}"
        line = f"stopped: {what:.300}{resume}"
        with contextlib.suppress(OSError, ValueError):
            if self.path.exists():  # on other nodes it may not
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{trace}{line}\n")
            if resume:
                print(line, flush=True)


class LossQueue:
    """The training losses of the last steps, on their way to the host, so that no step waits for the device."""

    def __init__(self, cfg: Hyperparameters, clock: Clock, log: Log):
        self.cfg = cfg
        self.clock = clock
        self.log = log
        self.pending: deque = deque()  # (step, what `train_step` returned, the event of its arrival)
        self.asked_to_stop = False  # whether a signal has asked any rank to stop, as all ranks learn at the same step

    def send(self, step: int, loss_and_signals: Tensor):
        """Send what `train_step` returned to the host, and log what has arrived: the loss of 8 steps before."""
        on_host = loss_and_signals.to("cpu", non_blocking=True)
        arrived = getattr(torch, self.cfg.device).Event()
        arrived.record()
        self.pending.append((step, on_host, arrived))
        self.flush(keep=8 if loss_and_signals.is_cuda else 0)

    def flush(self, keep: int = 0):
        """Wait for all losses but the last `keep`, and log them. Without a bar the console shows some."""
        bar = self.log.bar
        while len(self.pending) > keep:
            step, on_host, arrived = self.pending.popleft()
            arrived.synchronize()
            loss, num_signals = on_host.tolist()
            self.asked_to_stop |= num_signals > 0
            self.log.write_loss("train_loss", step, loss, self.clock.ms, console=bar.disable and step % 25 == 0)
            bar.update(self.cfg.batch_sequences * self.cfg.step_schedules[step - 1].seq_len)


def save_beside_log(log: Log, suffix: str, content: dict | bytes | None) -> bool:
    """Save a file beside the log, on each rank that has content. Return whether no rank failed; all ranks take part.

    The disk may be full: the log says so, and training goes on.
    """
    path = log.path.with_suffix(suffix)
    problem = ""
    try:
        if content is not None:
            save_file(path, content)
    except (OSError, RuntimeError) as error:  # torch.save raises the latter
        problem = f"not saved: {error!r}"
    problems = [theirs for theirs in all_gather_objects(problem) if theirs]
    log.write(f"{path}: {problems[0] if problems else 'saved'}", console=True)
    return not problems


# ---- Training --------------------------------------------------------------------------------------------------------
def setup_device(cfg: Hyperparameters, ranks: Ranks) -> torch.device:
    """Return this rank's device, or share out the threads of a CPU."""
    if cfg.device == "cuda":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
        return device
    if cfg.cpu_threads:
        torch.set_num_threads(max(1, cfg.cpu_threads // ranks.local_world_size))
    return torch.device("cpu")


class CUDAGraphs:
    """A function whose launches are replayed by a CUDA graph, one for each of its inputs' shapes (record 92).

    One by one, those of a step of gpt2 took a host 23 to 55 ms, more than the kernels of a small batch take (measured:
    one H100, 16 cores). A graph reads copies of its inputs, and its results last until the next call.
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
            result = self.function(*args)  # compiles, and computes this call's; capturing below computes nothing
            static_args = tree_map_only(Tensor, torch.clone, args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                static_result = self.function(*static_args)
            self.captured[shapes] = graph, self.tensors_in(static_args), static_result
            self.copied[shapes] = tensors
            return result
        graph, static_tensors, static_result = self.captured[shapes]
        # Rotary tables stay the same tensors throughout a stage
        if new := [pair for *pair, old in zip(static_tensors, tensors, self.copied[shapes]) if pair[1] is not old]:
            torch._foreach_copy_(*zip(*new))
        self.copied[shapes] = tensors
        graph.replay()
        return static_result


class Trainer:
    """The model of a run, its optimizers, the n-gram table and the data loader, and what a step does with them.

    From `warm_up` on the model's parameters are the same on all ranks. Each has its share of the optimizers' state and
    of the table.
    """

    # For tools that measure a step: a table that moves its rows otherwise, and a profiler's context for a named part
    table_class = NgramTable
    part = contextlib.nullcontext

    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        self.cfg = cfg
        self.ranks = ranks
        self.device = setup_device(cfg, ranks)
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
        self.table = self.table_class(cfg, ranks, self.device)
        self.gpt.fetched_ngrams = self.table.fetched
        self.gpt.ngram_grads = self.table.grads
        self.loader = DistributedDataLoader(cfg, ranks, self.device)
        self.attn_settings: tuple[int, AttentionSettings] | None = None  # number of a stage, and its settings
        self.exchange: RowExchange | None = None  # of the cycle that a step belongs to: see `train_cycles`
        self.stop_signals: list[str] = []  # those that asked this rank to stop

    def train_step(self, schedule: StepSchedule, sequences: Sequence[ModelInputs], exchange: RowExchange) -> Tensor:
        """Take a step on this rank's sequences. Return all ranks' mean loss, and how many signals ask to stop."""
        if exchange is not self.exchange:  # a cycle begins
            self.exchange = exchange
            self.table.fetch(exchange)
        if self.attn_settings is None or self.attn_settings[0] != schedule.stage:
            self.attn_settings = schedule.stage, make_attention_settings(schedule, self.cfg, self.device)
        mean_loss: Tensor | float = 0.0
        for inputs in sequences:
            loss = self.run_add_gradients(inputs, self.attn_settings[1])
            mean_loss += loss / (len(inputs.tokens) * self.cfg.batch_sequences)
        # One sum over the ranks for both: so all stop at the same step
        loss_and_signals = F.pad(mean_loss[None], (0, 1), value=len(self.stop_signals))
        wait_for_loss = start_collective(dist.all_reduce, loss_and_signals)
        with self.part("optimizers"):
            if self.table.group.patterns in schedule.updates:  # the cycle ends: its rows travel and are updated, too
                self.exchange = None
                send = partial(self.table.send, exchange)
                update = partial(self.table.update, exchange, schedule)
                step_optimizers(self.optimizers, schedule, while_reducing=send, while_gathering=update)
            else:
                step_optimizers(self.optimizers, schedule)
        wait_for_loss()
        return loss_and_signals

    def add_gradients(self, inputs: ModelInputs, attn_settings: AttentionSettings) -> Tensor:
        """Add the gradients of a sequence to those before it since the last update. Return its summed loss."""
        loss = self.model(inputs, attn_settings)
        # The loss is a sum over tokens, as in the record: gradients grow with the sequence. Only the optimizers divide
        # by the number of sequences: FP8 sees the same for any number of processes, and fewer gradients become 0
        # `fetched` gets no gradient, as `AccumulatingEmbedding` adds it to the table's grads. It is named so that
        # autograd goes there
        wanted = [self.table.fetched, *self.params.values()]
        _, *grads = torch.autograd.grad(loss * self.cfg.loss_scale, wanted, allow_unused=True)
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

    def blend_emas(self):
        """Blend the averages into the parameters, after the last step."""
        for optimizer in self.optimizers:
            optimizer.blend_emas()

    def invalid_tokens(self, is_last: bool) -> Tensor | None:
        """Return the mask of what no token may be followed by, for the last validation (record 91, @jvarho).

        Validations before the last get zeros, so that all run the same graph.
        """
        bits = read_invalid_tokens(self.cfg)
        return torch.from_numpy(bits * is_last).to(self.device) if len(bits) else None

    def eval_step(
        self, schedule: StepSchedule, sequences: Sequence[ModelInputs], exchange: RowExchange, mask: Tensor | None
    ) -> Tensor | int:
        """Return the summed loss of this rank's sequences, of which it may have none."""
        self.table.fetch(exchange)
        attn_settings = make_attention_settings(schedule, self.cfg, self.device)
        total = 0
        for inputs in sequences:
            # Looked up here: within the graph, all slices of logits would read one table, so become one kernel, and
            # exist at the same time
            invalid = None if mask is None else F.embedding(inputs.tokens, mask)
            total += self.model(inputs, attn_settings, invalid)
        return total

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        """Return the mean loss over the validation tokens. A rank may have more sequences than others, or none."""
        schedule = schedule_validation(step, self.cfg)
        batches = [*val_batches(self.cfg)]
        mask = self.invalid_tokens(is_last=step == self.cfg.num_iterations)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.ranks.world_size
        # A cycle has one sequence for each rank
        cycles = (([schedule], [[*chain(*batches[i : i + size])]]) for i in range(0, len(batches), size))
        for sequences, exchange in self.loader.steps(cycles):
            total += self.eval_step(schedule, sequences, exchange, mask)
        if self.exchange is not None:  # within a cycle of the training: its rows are fetched again
            self.table.fetch(self.exchange)
        start_collective(dist.all_reduce, total)()
        return total.item() / self.cfg.val_tokens

    def dummy_batch(self, schedule: StepSchedule) -> tuple[list[ModelInputs], RowExchange]:
        """Return inputs of the sizes that a step or a validation has."""
        # Few tokens, as all are sampled classes, and so far apart that each of 8 ranks owns several of their n-grams: a
        # rank with none or one would compile again in training, as torch takes a dimension of 0 or 1 for a constant
        tokens = np.arange(schedule.seq_len + 1) % 48 * (self.cfg.vocab_size // 48)
        loaded = self.loader.load_cycle([schedule], [[tokens] * self.cfg.batch_sequences])
        (sequences,), exchange = self.loader.to_device(loaded)
        return sequences, exchange

    def warm_up(self, saved: dict[str, Tensor] | None = None):
        """Run every graph once on dummy batches, then set this rank's state back, or to `saved`."""
        saved = saved or {name: t.to("cpu", copy=True) for name, t in self.state_dict().items()}
        offsets = [*self.loader.offsets]
        by_graph = {}  # a schedule for each graph: what its shape depends on
        updates: dict[str, AdamStep | MuonStep] = {}  # of all groups, so that each optimizer steps
        for schedule in self.cfg.step_schedules:
            has_prefix = schedule.prefix_weight > 0
            by_graph[schedule.seq_len, schedule.sampled_classes, len(schedule.mtp_weights), has_prefix] = schedule
            updates |= schedule.updates
        for schedule in by_graph.values():
            self.train_step(schedule._replace(updates=updates), *self.dummy_batch(schedule))
        schedule = schedule_validation(self.cfg.num_iterations, self.cfg)
        with torch.no_grad():
            sequences, exchange = self.dummy_batch(schedule)
            self.eval_step(schedule, sequences[:1], exchange, self.invalid_tokens(is_last=False))
        self.exchange = None
        self.table.rows.zero_()  # their initial values: a copy would be too large
        self.table.v.zero_()
        self.loader.offsets = offsets
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


def save_checkpoint(trainer: Trainer, log: Log, last: Checkpoint, step: int, ms: float) -> Checkpoint:
    """Save the tensors of each rank, then the file that names them. Return the newest whole checkpoint.

    Two files of a rank take turns, so that the last checkpoint is whole until this one is.
    """
    slot = 1 - last.slot
    tensors = trainer.state_dict() | trainer.table.state()
    suffix = f".{slot}.rank{trainer.ranks.rank}"
    if not save_beside_log(log, suffix, tensors):
        return last
    checksums = all_gather_objects(checksum(log.path.with_suffix(suffix)))
    new = last._replace(step=step, ms=ms, curves=log.curves, slot=slot, checksums=checksums)
    return new if save_beside_log(log, ".checkpoint", new._asdict() if trainer.ranks.rank == 0 else None) else last


@contextlib.contextmanager
def deferred_signals(received: list[str]) -> Iterator[None]:
    """Add signals that ask to stop to a list, instead of stopping: a checkpoint comes first."""

    def receive(number: int, _):
        received.append(signal.Signals(number).name)
        # A second Ctrl-C stops at once; torchrun repeats the first
        if received.count("SIGINT") > 1 + dist.is_initialized():
            raise KeyboardInterrupt

    handlers = {}  # what stood there before
    try:
        with contextlib.suppress(ValueError):  # only the main thread may set them
            for number in (
                signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
            ):  # fmt: skip
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores one
                    handlers[number] = signal.signal(number, receive)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector off the clock: one collection of all there is took 0.6 s (nanochat issue 477)."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def off_the_clock(clock: Clock, losses: LossQueue) -> Iterator[None]:
    """Log all losses, and stop the clock for what is no training. Garbage is collected here."""
    losses.flush()
    clock.stop()
    yield
    gc.collect()
    losses.log.bar.unpause()
    clock.start()


def may_stop(step: int, cfg: Hyperparameters) -> bool:
    """Return whether a run may stop before a step: no gradient waits for an update."""
    return step == cfg.num_iterations or step % cfg.common_interval == 0


def is_save_due(step: int, cfg: Hyperparameters) -> bool:
    """Return whether a checkpoint is due before a step. After the last one there is the result."""
    return cfg.checkpoint_every > 0 and step % cfg.checkpoint_every == 0 and step < cfg.num_iterations


def is_validation_due(step: int, cfg: Hyperparameters) -> bool:
    """Return whether a validation is due before a step, or after the last one."""
    return step == cfg.num_iterations or (cfg.val_loss_every > 0 and step % cfg.val_loss_every == 0)


def num_graphs(cfg: Hyperparameters) -> int:
    """Return how many graphs this rank has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] if cfg.compile else 0  # importing it takes a second


def train(trainer: Trainer, start: Checkpoint, log: Log) -> int:
    """Train to the end. Return the most graphs that a rank compiled on the clock: 0, or a bug.

    A signal, which schedulers send before they kill, lets the run save a checkpoint and stop.
    """
    cfg = trainer.cfg
    end = cfg.num_iterations
    batches = trainer.loader.steps(train_cycles(train_batches(cfg), cfg))
    for _ in range(start.step):  # a resumed run has trained on them; sampled classes depend on all tokens before
        next(batches)
    clock = Clock(start.ms, cfg)
    losses = LossQueue(cfg, clock, log)
    checkpoint = start
    graphs_before = num_graphs(cfg)
    with deferred_signals(trainer.stop_signals), without_garbage_collection():
        log.bar.unpause()
        clock.start()
        for step in range(start.step, end + 1):
            just_resumed = step == start.step  # its checkpoint exists and, after the last step, has blended already
            if step == end and not just_resumed:
                trainer.blend_emas()
            should_stop = losses.asked_to_stop and may_stop(step, cfg)
            if should_stop or (is_save_due(step, cfg) and not just_resumed):
                with off_the_clock(clock, losses):
                    checkpoint = save_checkpoint(trainer, log, checkpoint, step, clock.ms)
            if should_stop:
                raise KeyboardInterrupt(" ".join({*chain(*all_gather_objects(trainer.stop_signals))}))
            if is_validation_due(step, cfg):  # after saving: a run that resumes here validates, too
                with off_the_clock(clock, losses):
                    log.write_loss("val_loss", step, trainer.evaluate(step), clock.ms)
            if step < end:
                losses.send(step + 1, trainer.train_step(cfg.step_schedules[step], *next(batches)))
    return max(all_gather_objects(num_graphs(cfg) - graphs_before))


# ---- Run: parse, compare, restore, train, report ---------------------------------------------------------------------
def init_distributed() -> Ranks:
    """Join the ranks that torchrun's environment names. Objects travel by gloo: ranks need not agree on a device."""
    env = os.environ
    try:
        ranks = Ranks(
            rank=int(env.get("RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        )
        if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size):
            raise ValueError(f"impossible {ranks}")
        if ranks.world_size > 1:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG to SIGKILL: no rank outlives its launcher
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=30))  # one may compile while the others wait
    except (ValueError, RuntimeError) as error:
        raise UserError(f"RANK, WORLD_SIZE: use torchrun, or unset them: {error!r:.300}") from error
    return ranks


def leave_process_group():
    """Leave the other ranks: a thread that is left was seen to abort a process that had done its work."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def fail_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """End all ranks if one of them fails in this block. On each node one says why, and the others end in silence."""
    error = own_failure = None
    try:
        yield
    except Exception as exception:
        error = exception
        own_failure = exit_code(error), str(error) if isinstance(error, UserError) else repr(error)
    failures = {rank: failure for rank, failure in enumerate(all_gather_objects(own_failure)) if failure}
    if not failures:
        return
    leave_process_group()
    first_failed = min(failures)
    code, text = failures[first_failed]
    # On a node where a rank has failed the first of these speaks, on others their first rank
    first_here = ranks.rank - ranks.local_rank
    failed_here = failures.keys() & range(first_here, first_here + ranks.local_world_size)
    if ranks.rank != min(failed_here, default=first_here):
        sys.exit(code)
    if error is None:
        error = UserError(f"rank {first_failed}: {text}")
        error.code = code
    raise error


def is_first_to_fail() -> bool:
    """Return whether no other rank has failed before: then this one knows why the run ends. Asks the ranks' store."""
    if not dist.is_initialized():
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("ranks that failed", 1) == 1
    except RuntimeError:  # it is gone, too
        return True


@contextlib.contextmanager
def report_first_failure(log: Log) -> Iterator[None]:
    """Let the rank that fails first say why the run stops. Others, which fail as it is gone, end in silence."""
    try:
        yield
    except BaseException as error:
        if not is_first_to_fail():
            sys.exit(exit_code(error))
        if dist.is_initialized():
            error.add_note(f"on rank {dist.get_rank()} of {dist.get_world_size()}")
        log.write_stop(error)
        raise


@contextlib.contextmanager
def note_flags(argv: Sequence[str]) -> Iterator[None]:
    """Name the flags below the traceback of an error before the first step: sizes may not fit each other."""
    try:
        yield
    except Exception as error:
        error.add_note(f"before the first step; do these flags fit each other? {shlex.join(argv) or '(none)'}")
        raise


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
    texts["validation sha256"] = data["val"].sha256
    texts["validation tokens"] = f"{cfg.val_tokens}, sha256 {data['val'].sha256}"
    return texts


def check_fingerprint(here: dict[str, str], began: dict[str, str]):
    """Raise UserError if anything of `fingerprint` differs from what rank 0, or the run to resume, began with."""
    if differing := {name: text for name, text in here.items() if text != began.get(name)}:
        theirs = {name: began.get(name) for name in differing}
        raise UserError(f"the run began with {theirs}, this has {differing}: give the same")


def header(source: str, argv: Sequence[str], start: Checkpoint, trainer: Trainer, data: dict[str, DataSummary]) -> str:
    """Return what begins a log: script, versions, hardware, environment, data, flags and configuration."""
    hardware = subprocess.getoutput("lscpu; timeout 20 nvidia-smi")  # noqa: S605 (it hangs where the driver does)
    kinds = "TORCH", "PYTORCH", "TRITON", "CUDA", "NCCL", "OMP"  # of variables that change how it runs
    environment = {name: value for name, value in os.environ.items() if name.startswith(kinds)}
    shards = [f"{name} shard: {path}, {os.path.getsize(path)} bytes" for name in data for path in data[name].paths]
    shard_lines = "\n".join(shards)
    return f"""{source}
{"=" * 100}
Running Python {sys.version}, PyTorch {torch.__version__}, numpy {np.__version__}
{trainer.ranks.world_size} processes, {torch.get_num_threads()} threads each, {os.cpu_count()} cores
{hardware}
environment: {json.dumps(environment)}
{shard_lines}
training tokens: {start.must_match["training tokens"]}
validation tokens: {start.must_match["validation tokens"]}
flags: {json.dumps(argv)}
configuration: {json.dumps(dataclasses.asdict(trainer.cfg))}
{"=" * 100}"""


def save_model(trainer: Trainer, log: Log):
    """Save the final model for sample.py: RUN_ID.pt, and each rank's rows of n-grams beside it."""
    suffix = f".ngrams{trainer.ranks.rank}"
    if not save_beside_log(log, suffix, trainer.table.state()):
        return
    checksums = all_gather_objects(checksum(log.path.with_suffix(suffix)))
    configuration = json.dumps(dataclasses.asdict(trainer.cfg))
    model = dict(configuration=configuration, model=trainer.gpt.state_dict(), rows=checksums)
    if save_beside_log(log, ".pt", model if trainer.ranks.rank == 0 else None):
        log.write(f"next: python sample.py {log.path.with_suffix('.pt')}", console=True)


def report(trainer: Trainer, start: Checkpoint, log: Log, recompiles: int) -> dict:
    """Log the summary, save the model and the result, and return the latter."""
    cfg = trainer.cfg
    _, val_loss, ms = log.curves["val_loss"][-1]
    reached = "reached" if val_loss <= cfg.target_loss else "not reached"
    verdict = f"target {cfg.target_loss} {reached}; " if cfg.target_loss else ""
    if cfg.val_sha256 and cfg.val_sha256 != start.must_match["validation sha256"]:
        verdict = "these are not the track's validation tokens: do not compare losses; "
    log.write(
        f"""recompiles after the clock started: {recompiles}
peak memory: {trainer.peak_memory_mib()} MiB
val_loss {val_loss:.4f} after {ms / 1000:.2f} s; {verdict}log: {log.path}""",
        console=True,
    )
    if cfg.save_checkpoint:
        save_model(trainer, log)
    result = dict(
        val_loss=val_loss,
        train_time_ms=ms,
        recompiles=recompiles,
        log=str(log.path),
        val_curve=log.curves["val_loss"],
        train_curve=log.curves["train_loss"],
    )
    save_beside_log(log, ".json", json.dumps(result).encode() if trainer.ranks.rank == 0 else None)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. What ends a run in one line is one of ONE_LINE_ERRORS."""
    argv = sys.argv[1:] if argv is None else argv
    source = Path(__file__).read_text(encoding="utf-8")  # before anybody edits it
    ranks = init_distributed()
    is_main = ranks.rank == 0
    with note_flags(argv):
        with fail_on_all_ranks(ranks):  # parse
            given = parse_args(argv, ranks.world_size)
            saved = load_checkpoint(given) if is_main else None
            cfg, data = plan_run(given, ranks)
            must_match = fingerprint(source, given, cfg, data, ranks)
            new = Checkpoint(cfg.run_id, cfg.seed, must_match, step=0, ms=0.0, curves={}, slot=0, checksums=[])
        start = all_gather_objects(saved or new)[0]  # rank 0's: its run_id and seed, too
        with fail_on_all_ranks(ranks):  # compare and restore
            check_fingerprint(must_match, start.must_match)
            cfg = dataclasses.replace(cfg, run_id=start.run_id, seed=start.seed)
            tensors = load_tensors(cfg, start, ranks)
            log = Log(cfg, start, is_main)
    with report_first_failure(log), log:
        with note_flags(argv):
            trainer = Trainer(cfg, ranks)
            if is_main:
                log.write(header(source, argv, start, trainer, data))
            log.write(f"seed: {cfg.seed}, from step {start.step} on, log: {log.path}", console=True)
            if given.canon_file and not cfg.canon_file:
                log.write(f"without {given.canon_file}, which is missing: the last val_loss is higher", console=True)
            trainer.warm_up(tensors)
        recompiles = train(trainer, start, log)
        result = report(trainer, start, log, recompiles)
    leave_process_group()
    return result


def cli(argv: Sequence[str] | None = None) -> int:
    """Do what `main` does, and return the exit code. Errors that are not expected have Python's traceback."""
    try:
        main(argv)
    except ONE_LINE_ERRORS as error:
        print(f"train_gpt.py: {str(error) or 'interrupted'}", file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:  # who reads the help or the console has seen enough
        pass
    finally:
        try:
            sys.stdout.flush()
        except (AttributeError, OSError):  # there is no console, or it has gone away: the flush at exit must not fail
            sys.stdout = None
    return 0


# ---- Appendix: kernels in Triton. The functions above that start them have a twin of each in plain PyTorch -----------
if triton:

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
        grad_q, w_q, squares_q, dz, dz_columns, squares_columns, scales, column_scale, T, K,
        factor: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute a block of dz and of the squares. The TMA unit copies blocks, and masks the edges.

        Twin: `relu_squared_backward` without `use_kernel`.
        """
        t = tl.program_id(1) * BLOCK
        n = tl.program_id(0) * BLOCK  # programs that run side by side have the same tokens
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, K, BLOCK):  # the hardware sums up in less than fp32: dz keeps 2 bits of mantissa
            total = tl.dot(grad_q.load([t, k]), w_q.load([n, k]).T, total)
        rows = t + tl.arange(0, BLOCK)
        squares = squares_q.load([t, n]).to(tl.float32) * tl.load(scales + rows, rows < T, other=0)[:, None]
        d = (factor * tl.sqrt(squares) * total).to(dz.dtype)
        dz.store([t, n], d)
        dz_columns.store([n, t], d.T)
        squares_columns.store([n, t], (squares * tl.load(column_scale)).to(squares_q.dtype).T)

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
        """Return tanh(x) by one instruction, to 2^-11 of it: a logit moves by at most 0.006, by e4m3 0.06.

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
        slope: tl.constexpr, shift: tl.constexpr, bits: tl.constexpr, factor: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute the loss of a token, and its gradient with respect to the logits. Twin: `softcapped_cross_entropy`.

        bits: softcap_range / ln 2, as tl.exp2 takes one instruction.
        """
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        targets += row * n
        pointer_mass += row * 2
        d_pointer_mass += row * 2
        totals = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            totals += tl.where(columns < V, tl.exp2(-bits * sigmoid_at(columns, z, V, slope, shift)), 0)
        total = tl.sum(totals)
        first = tl.load(targets)
        copy = tl.load(targets + n - 1)
        p = tl.exp2(-bits * sigmoid_at(first, z, V, slope, shift)) / total
        alpha = tl.minimum(tl.exp2(-bits * sigmoid_at(copy, z, V, slope, shift)) / total, 1 - 1e-6)
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
            loss += tl.where(target >= 0, -weight * tl.log(tl.exp2(-bits * s) / total), 0)
            total_weight += tl.where(target != -1, weight, 0)  # -1 is NO_TARGET, as in `cross_entropy_gradients`
        tl.store(losses + row, loss)
        tl.debug_barrier()  # no thread may overwrite logits of targets that another has not read yet
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = sigmoid_at(columns, z, V, slope, shift)
            d = total_weight / total * tl.exp2(-bits * s)
            d -= tl.where(columns == first, next_weight, 0) + tl.where(columns == copy, copy_weight, 0)
            for k in range(1, n - 1):
                d -= tl.where(columns == tl.load(targets + k), tl.load(weights + k), 0)
            store_gradient(z + columns, factor * d * s * (1 - s), columns < V)


if __name__ == "__main__":
    sys.exit(cli())
