"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one command
    ./run.sh --preset nano                                    a small model on a CPU, in seconds
    torchrun --standalone --nproc_per_node=8 train_gpt.py     what run.sh starts on one 8xH100 node

The preset gpt2 has the mathematics of record 92 of the NanoGPT speedrun (ANVIL2 by Deven Pietrzak, 2026-08-30, 1,194
steps, https://github.com/KellerJordan/modded-nanogpt). mini is gpt2 in small, for a CPU. nano is a model of one layer
that looks for repetitions from the first step on. "Record n" credits the record in which an idea first appeared. The
file follows a token: configuration, schedules, data, inputs, layers, attention, model, head, optimizers, n-grams, log,
training, run. Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens, M visible blocks, K model width,
V vocabulary, C classes in the softmax.
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
import zipfile
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TextIO, get_args

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from torch.utils._pytree import tree_leaves, tree_map_only
    from tqdm import tqdm
except KeyboardInterrupt:  # they take seconds
    sys.exit(130)

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch comes without it on Windows, Macs and machines without a GPU
    triton = None


class UserError(Exception):
    """An error that the user can fix; exits with code 2."""

    code = 2


class AlreadyComplete(UserError):
    """A run to resume that has ended: nothing is left to do, and a job that was started again has not failed."""

    code = 0


# ---- Configuration: layers, stages, groups of parameters, averages are rows of tables; other numbers are flags ------
class Layer(NamedTuple):
    """Say what a layer has. Numbers name earlier layers, counted from 0."""

    # The kind of window, see `Stage`, or none. paired: the short one, and two heads share keys. alike: the long one,
    # without positions; a key is the token before's, and queries and keys begin equal
    attention: str
    half_qk: bool = False  # queries and keys are half as wide
    half_v: bool = False  # values are half as wide
    value_embed: bool = False  # values add a row of a table, by the token
    shift: tuple[int, ...] = ()  # the stream's channels, in as many parts, become those of so many tokens before
    reads: int | None = None  # attention reads the output of this layer, not the stream
    net: bool = False  # a net reads the stream here, and makes factors for each token up to the next such row
    # The next five have factors: from the net here or above, or else parameters; xsa and head_gate need a net
    xsa: bool = False  # heads subtract part of the token's own value
    head_gate: bool = False  # the output of each head has a factor
    x0: bool = False  # the stream adds the embedding
    ngram: bool = False  # the stream adds the embeddings of the n-grams that end with the token
    skip: int | None = None  # the stream adds the output of this layer (U-Net)
    mlps: int = 1  # all read the same stream
    # In the last layer; (7, 9, 3): mixtures of the first stream, output 7 and the stream join stream and values,
    # and one of the first stream, outputs 7, 9 and 3, value embeddings and what this layer reads joins the head's input
    mudd: tuple[int, ...] = ()


GPT2_LAYERS = (
    Layer("paired", half_qk=True, net=True, x0=True, ngram=True),
    Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True),
    Layer("paired", half_qk=True, value_embed=True, x0=True),
    Layer("long", xsa=True, head_gate=True),
    Layer("none", net=True, x0=True, ngram=True),
    Layer("paired", half_qk=True, x0=True, ngram=True),
    Layer("none", skip=3),
    Layer("none", x0=True, mlps=0),
    Layer("short", half_qk=True, half_v=True, value_embed=True, mlps=2),
    Layer("none", ngram=True),
    Layer("long", value_embed=True, reads=7, head_gate=True, x0=True, ngram=True, mudd=(7, 9, 3)),
)
MINI_LAYERS = (  # each kind of row once
    Layer("paired", half_qk=True, net=True, value_embed=True, x0=True, ngram=True),
    Layer("short", half_qk=True, half_v=True, value_embed=True, xsa=True, x0=True, ngram=True, mlps=2),
    Layer("long", xsa=True, head_gate=True),
    Layer("none", net=True, skip=1, x0=True, mlps=0),
    Layer("long", value_embed=True, reads=3, head_gate=True, x0=True, ngram=True, mudd=(3, 2, 1)),
)
NANO_LAYERS = (Layer("alike", value_embed=True, ngram=True, shift=(0, 0, 0, 1, 1, 2, 3, 4)),)


class Stage(NamedTuple):
    """Say what holds for a part of the steps."""

    share: float  # of the steps that `more_steps` of all stages leave over
    batch: float  # factor on batch_tokens and train_seq_len
    max_doc_len: int  # tokens at which documents are cut; 0 in all stages: a stream, nothing is cut
    windows: dict[str, int]  # by kind, how many tokens attention reaches back; the same kinds in all stages
    more_steps: int = 0  # in addition; those of the last stage have the lowest learning rates
    lr: float = 1.0  # factor on all learning rates
    # Multi-token prediction: weights of the losses of tokens +1, +2, ..., at the first step and after the last
    mtp: tuple[tuple[float, float], ...] = ((1, 1),)
    prefix: tuple[float, ...] = (0,)  # weight of the loss of the next token's prefix, in equal parts of the stage
    classes: tuple[int, ...] = (0,)  # tokens in the softmax of a sequence, in equal parts of the stage; 0: all


SHARES = [share / 0.9994 for share in (0.2854, 0.3209, 0.3931)]
GPT2_STAGES = (
    Stage(
        SHARES[0],
        batch=1,
        max_doc_len=896,
        windows=dict(short=128, long=384),
        mtp=((1, 1), (0.5, 0.5), (0.25, 0)),
        prefix=(0.25,),
        classes=(10240,),
    ),
    Stage(
        SHARES[1],
        batch=2,
        max_doc_len=2048,
        windows=dict(short=384, long=896),
        lr=1.52,
        mtp=((1, 1), (0.5, 0)),
        prefix=(0.20, 0.15, 0.10, 0.05),
        classes=(10240,),
    ),
    Stage(
        SHARES[2] - 0.06,
        batch=3,
        max_doc_len=3072,
        windows=dict(short=640, long=1408),
        more_steps=52,
        lr=1.73,
        classes=(14336, 14336, 24576),
    ),
    Stage(0.06, batch=2.5, max_doc_len=3072, windows=dict(short=640, long=1408), lr=1.73 * (20 / 24) ** 0.5),
    Stage(0, batch=1, max_doc_len=3072, windows=dict(short=768, long=1664), more_steps=20),
)
MINI_STAGES = tuple(
    stage._replace(
        max_doc_len=stage.max_doc_len // 2,
        windows={kind: tokens // 8 for kind, tokens in stage.windows.items()},
        more_steps=stage.more_steps // 5,
        classes=tuple(min(count, 192) for count in stage.classes),
    )
    for stage in GPT2_STAGES
)
NANO_STAGES = (Stage(1, batch=1, max_doc_len=0, windows=dict(long=512)),)


class Group(NamedTuple):
    """Say how the parameters whose names match one of `names` are stepped."""

    optimizer: str  # Muon, Adam, or RowAdam for the table of n-grams
    names: str  # globs, separated by spaces
    lr: float  # Adam's learning rate; a factor on muon_lr in rows of Muon, so another optimizer needs another lr
    decay: float = 0.0  # cautious weight decay; per step: Adam decay * rate^2, Muon decay * lr * rate^2
    beta1: float = 0.9  # decay of Adam's mean of gradients; Muon has muon_momentum instead
    beta2: float = 0.99  # decay of the mean of squares: of gradients in Adam, of updates in Muon
    every: tuple[int, int] = (2, 2)  # steps between updates, which take summed gradients: before and from rare_from


NET_GROUPS = (
    Group("Adam", "gate_nets.*.w?", lr=8e-4, decay=0.005),
    Group("Adam", "gate_nets.*.b2 gate_scale", lr=8e-4),
    Group("Adam", "*.mudd_net.w? head_net.w?*", lr=0.002, decay=0.005),
    Group("Adam", "*.mudd_net.b2 head_net.b2", lr=0.002),
    Group("Adam", "*.value_gate", lr=0.008, decay=0.005),
    Group("Adam", "smear_gate", lr=8e-5),
)
UP = (2816 / 768) ** 0.5  # root of an MLP's hidden units by the model width
GPT2_GROUPS = (
    Group("Muon", "*.qk_w *.v_w *.attn.c_proj", lr=1.0, decay=2.25, beta2=0.9, every=(1, 1)),
    Group("Muon", "*.c_fc", lr=UP, decay=2.25, beta2=0.9, every=(1, 1)),
    Group("Muon", "*.mlps.*.c_proj", lr=2 * UP, decay=2.25, beta2=0.9, every=(1, 1)),
    Group("Adam", "lm_head", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group("Adam", "embed.weight", lr=0.008, decay=0.75, beta1=0.5, beta2=0.95),
    Group("Adam", "value_embeds.*", lr=0.56, decay=0.025, beta1=0.75, beta2=0.95, every=(2, 4)),
    Group("RowAdam", "ngrams", lr=0.56, decay=0.025, beta1=0.0, beta2=0.95, every=(2, 4)),
    Group("Adam", "*.attn.lambdas *.x0_lambdas *.ngram_lambdas *.skip_lambda* smear_lambda", lr=0.04),
    Group("Adam", "*.resid_lambdas", lr=0.04, beta2=0.95),
    Group("Adam", "*.post_lambdas", lr=0.008, beta2=0.95),
    *NET_GROUPS,
)
NANO_GROUPS = tuple(
    group._replace(every=(1, 1))
    for group in (
        Group("Muon", "*.qk_w *.v_w *.c_proj", lr=1.0, beta2=0.95),
        Group("Muon", "*.c_fc", lr=2.0, beta2=0.95),
        Group("Adam", "lm_head", lr=0.015, beta1=0.5, beta2=0.9),
        Group("Adam", "embed.weight value_embeds.*", lr=0.18, beta1=0.5, beta2=0.9),
        Group("RowAdam", "ngrams", lr=0.25, beta1=0.0, beta2=0.9),
        Group("Adam", "*lambda *lambdas", lr=0.04, beta1=0.5, beta2=0.9),
        *NET_GROUPS,
    )
)


class Average(NamedTuple):
    """Say how the last steps' values of parameters are averaged, and what that changes after the last step."""

    names: str  # globs of parameters
    window: int  # last steps in which it ticks: average += rate * (value - average); the first tick copies
    rate: float
    blend: float  # after the last step, row after row: value += blend * (average - value)
    every: int = 4  # steps between ticks
    offset: int = 1  # a step in which it ticks; -1: the last one
    at_end: int = 0  # it also ticks in so many last steps
    same_norm: bool = True  # in the end matrices get their norm back, which averaging shortens, if any row says so

    def rate_at(self, step: int, num_iterations: int) -> float:
        """Return the rate of the tick after a step; 0: none."""
        start = max(0, num_iterations - self.window)
        is_due = (step - self.offset % num_iterations) % self.every == 0 or step >= num_iterations - self.at_end
        if step < start or not is_due:
            return 0.0
        return 1.0 if step < start + self.every else self.rate


VO_MLP = "*.v_w *.attn.c_proj *.mlps.*"
GPT2_AVERAGES = (
    Average("lm_head embed.weight", window=298, rate=2 / 299, blend=0.65, every=1),
    Average(VO_MLP, window=250, rate=4 / 53, blend=1.0, offset=-1),
    Average("value_embeds.*", window=250, rate=4 / 53, blend=1.0, offset=3, same_norm=False),
    Average("*.qk_w", window=298, rate=2 / 75, blend=0.55, at_end=2),
    Average(VO_MLP, window=298, rate=2 / 75, blend=0.55 - 0.2007, at_end=2),  # on from what the second row set
)
MINI_AVERAGES = tuple(row._replace(window=row.window // 6, rate=6 * row.rate) for row in GPT2_AVERAGES)


TABLES = dict(layers=Layer, stages=Stage, groups=Group, averages=Average)


@dataclasses.dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hold what defines a run, here gpt2's. Every field is a flag, except for the four tables."""

    layers: tuple[Layer, ...] = GPT2_LAYERS
    stages: tuple[Stage, ...] = GPT2_STAGES
    groups: tuple[Group, ...] = GPT2_GROUPS
    averages: tuple[Average, ...] = GPT2_AVERAGES
    # Data. Shards are read in sorted order; the log says so if the validation tokens do not have val_sha256
    preset: Literal["gpt2", "mini", "nano"] = "gpt2"  # all settings; by default gpt2 on a GPU and nano elsewhere
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # training shards: a glob
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # validation shards: a glob
    val_tokens: int = 10_485_760  # validation tokens, a multiple of val_seq_len
    val_sha256: str = ""  # SHA-256 of the validation tokens; empty: not compared
    target_loss: float = 3.28  # validation loss to reach; 0: none
    vocab_size: int = 50257  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: int = 50256  # end of text, opens every document
    prefix_file: str = "data/gpt2_prefixes.bin"  # the longest token that begins each token; empty: no such loss
    canon_file: str = "data/gpt2_canonical.bin"  # what the tokenizer never puts behind each token; empty: not used
    # Training
    num_iterations: int = 1194  # steps, `more_steps` included
    val_loss_every: int = 250  # steps between validations; 0: only after the last step
    batch_tokens: int = 8 * 16 * 1024  # tokens a step where a stage's batch is 1, a multiple of train_seq_len
    train_seq_len: int = 16 * 1024  # tokens a training sequence there, a multiple of block_size
    val_seq_len: int = 256 * 1024  # tokens of a validation sequence, a multiple of block_size
    segment: int = 2560  # tokens after which attention takes a document for a new one, in training
    final_window: int = 2560  # long window in the last validation; 0: that of the last stage
    cooldown_frac: float = 0.8  # last part of the scheduled steps, those without the last stage's more_steps
    min_lr_frac: float = 0.3  # factor on learning rates at the end of the cooldown and later
    tied_frac: float = 1.0  # first part of the scheduled steps, in which embedding and head are one table; 0: never
    grad_scale: float = 1.0  # factor on a sequence's summed loss before the backward pass
    # Model
    model_dim: int = 768  # width of the residual stream
    num_heads: int = 6  # attention heads, a multiple of heads_per_matrix
    head_dim: int = 128  # dimensions per head, a multiple of 4
    block_size: int = 128  # tokens per block of the attention mask
    mlp_dim: int = 2816  # hidden units of an MLP
    net_dim: int = 64  # hidden units of a net that makes factors
    attn_scale: float = 0.085  # initial factor on the scores of long attention; queries and keys have unit RMS
    short_attn_scale: float = 0.13  # of other kinds
    resid_lambda_init: float = 1.1**0.5  # initial factor on the residual stream
    mix_groups: int = 12  # groups of channels to which the last mix of the stream has factors of their own
    ngram_rows: int = 84_602_880  # rows of the hashed table for n-grams of tokens, a multiple of ngram_order - 1
    ngram_order: int = 3  # longest n-grams that have rows
    ngram_lambda_init: float = 0.05  # initial factor on the embeddings of n-grams in each layer
    sign_rows: int = 8192  # rows of the table of signs for n-grams that share a row; 0: no table
    value_embed_std: float = 0.01  # initial standard deviation of the value embeddings
    value_gate_inputs: int = 12  # inputs of value gates, half from x, half from the value embedding; 0: no gates
    smear_gate_inputs: int = 12  # input channels of the smear gate; 0: no smear
    # Head
    head_std: float = 0.005  # initial standard deviation of the head, and of the embedding that is tied to it
    lm_head_softcap: float = 15.0  # c in the softcap r sigmoid((z + d) 2 / c) of the logits z
    softcap_range: float = 23.0  # r in the softcap
    softcap_shift: float = 5.0  # d in the softcap
    lm_head_slice: int = 8192  # tokens whose logits exist at a time
    lm_head_fp8: bool = True  # train the head in FP8 where the GPU can; validation never uses it
    layers_fp8: bool = True  # the same for the forward passes of MLPs, and for queries, keys and values
    # Optimizers
    muon_lr: float = 0.023  # learning rate of Muon: the spectral norm of an update
    muon_momentum: float = 0.93  # momentum after its warm-up
    momentum_warmup_steps: int = 240  # steps at the start, over which momentum rises from 0.85
    momentum_cooldown_steps: int = 50  # steps at the end, over which momentum falls to 0.85
    heads_per_matrix: int = 2  # heads whose queries, or keys, are one matrix for Muon (record 80, @samacqua)
    slow_rail_from: int = 514  # step from which Muon's slow momentum takes part in updates; 0: never
    rare_from: int = 336  # step from which groups step as `every` says second
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
    init_from: str = ""  # a model, LOG_DIR/RUN_ID.pt, with whose weights and rows of n-grams to begin
    resume: str = ""  # LOG_DIR/RUN_ID.checkpoint, or latest: the newest in log_dir, of run_id if given

    def __post_init__(self) -> None:
        """Refuse what would train something else in silence. Torch refuses shapes that do not fit."""

        def require(name, holds, expected):
            if not holds:
                raise UserError(f"--{name} {str(getattr(self, name))[:100]}: expected {expected}")

        for name, row in TABLES.items():  # from JSON they come as lists
            object.__setattr__(self, name, tuple(row(*values) for values in getattr(self, name)))
        limits = dict(num_iterations=10**6, cpu_threads=1024)
        for name in self.__slots__:
            value = getattr(self, name)  # NaN is not below anything
            most = limits.get(name, 2**31 - 1)
            require(name, not isinstance(value, float | int) or abs(value) <= most, f"a number of at most {most}")
        for name in "num_iterations batch_tokens train_seq_len val_tokens val_seq_len segment vocab_size".split():
            require(name, getattr(self, name) > 0, "1 or more")
        require("run_id", Path(self.run_id).name == self.run_id, "a name, without folders")
        require("eot_token", self.eot_token < self.vocab_size, "a token below vocab_size")
        require("ngram_order", self.ngram_order in (2, 3), "2 or 3")
        require("ngram_rows", self.ngram_order < self.ngram_rows, "more than ngram_order")
        units = dict(batch_tokens=self.train_seq_len, val_tokens=self.val_seq_len)
        units |= dict(ngram_rows=self.ngram_order - 1, checkpoint_every=self.all_step, rare_from=self.all_step)
        for name, unit in units.items():
            require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        require("num_iterations", self.base_steps >= 0, "at least the more_steps of all stages")
        require("layers", not any(layer.mudd for layer in self.layers[:-1]), "mudd in the last layer alone")
        require("averages", all(row.window >= row.every for row in self.averages), "windows in which each ticks")
        require("stages", math.isclose(sum(stage.share for stage in self.stages), 1), "shares that add up to 1")
        kinds = {(stage.max_doc_len > 0, *sorted(stage.windows)) for stage in self.stages}
        require("stages", len(kinds) == 1, "the same kinds of windows in all, and max_doc_len 0 in all or in none")
        last = range(2**31 if "long" in self.stages[0].windows else 1)
        require("final_window", self.final_window in last, "0, or with long windows 1 or more")

    all_step = property(lambda self: math.lcm(*chain(*(group.every for group in self.groups))))  # steps till then
    base_steps = property(lambda self: self.num_iterations - sum(stage.more_steps for stage in self.stages))
    scheduled_steps = property(lambda self: self.num_iterations - self.stages[-1].more_steps)
    padded_vocab = property(lambda self: self.vocab_size + -self.vocab_size % 64)  # rows of the head, for matmul tiles
    batch_sequences = property(lambda self: self.batch_tokens // self.train_seq_len)


SMALL = dict(  # for CPUs, on the text in data/nano
    train_files="data/nano/nano_train_*.bin",
    val_files="data/nano/nano_val_*.bin",
    vocab_size=257,
    eot_token=256,
    prefix_file="",
    canon_file="",
    val_loss_every=0,
    batch_tokens=1024,
    train_seq_len=1024,
    val_seq_len=8192,
    lm_head_slice=1024,
    device="cpu",
    cpu_threads=2,
    save_checkpoint=True,
)
NANO = SMALL | dict(
    layers=NANO_LAYERS,
    stages=NANO_STAGES,
    groups=NANO_GROUPS,
    averages=(),
    preset="nano",
    val_tokens=262_144,
    val_sha256="e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33",
    target_loss=1.45,
    batch_tokens=2048,
    train_seq_len=2048,
    num_iterations=32,
    final_window=0,
    cooldown_frac=0.85,
    min_lr_frac=0.2,
    tied_frac=0.0,
    grad_scale=2**-10,
    model_dim=128,
    num_heads=1,
    head_dim=64,
    mlp_dim=384,
    block_size=128,
    attn_scale=0.12,
    resid_lambda_init=1.0,
    ngram_rows=8192,
    ngram_order=2,
    ngram_lambda_init=1.0,
    sign_rows=0,
    value_embed_std=0.2,
    value_gate_inputs=0,
    smear_gate_inputs=0,
    head_std=0.0,
    softcap_range=30.0,
    softcap_shift=0.0,
    lm_head_fp8=False,
    layers_fp8=False,
    muon_lr=0.075,
    muon_momentum=0.88,
    momentum_warmup_steps=30,
    momentum_cooldown_steps=0,
    slow_rail_from=0,
    rare_from=0,
    heads_per_matrix=1,
)
MINI = SMALL | dict(
    layers=MINI_LAYERS,
    stages=MINI_STAGES,
    averages=MINI_AVERAGES,
    preset="mini",
    val_tokens=65_536,
    target_loss=0.0,
    num_iterations=182,
    segment=1280,
    final_window=192,
    model_dim=96,
    head_dim=16,
    mlp_dim=352,
    net_dim=16,
    block_size=32,
    attn_scale=0.17,
    short_attn_scale=0.26,
    ngram_rows=16384,
    muon_lr=0.04,
    momentum_warmup_steps=30,
    momentum_cooldown_steps=5,
    slow_rail_from=78,
    rare_from=52,
)
GPT2 = Hyperparameters()
PRESETS = {"gpt2": GPT2, "mini": Hyperparameters(**MINI), "nano": Hyperparameters(**NANO)}


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # instead of exiting: other ranks have to hear of it
        raise UserError(f"{message}; see --help")


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset, changed by the flags in `argv`: every field of Hyperparameters but the tables is one."""
    if {"-h", "--help"} & {*argv}:
        print("Flags: --FIELD VALUE, or --FIELD and --no-FIELD\n")
        print(inspect.getsource(Hyperparameters).partition("    def ")[0])
        for preset in MINI, NANO:
            print("Instead:", *(f"--{name}={value}" for name, value in preset.items() if name not in TABLES), "\n")
        sys.exit()
    parser = FlagParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Hyperparameters)[len(TABLES) :]:
        kind, *others = get_args(field.type) or [field.type]  # the first of a Literal's choices, int of int | None
        if kind is bool:
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction)
        elif isinstance(kind, str):
            parser.add_argument(f"--{field.name}", choices=[kind, *others])
        else:
            parser.add_argument(f"--{field.name}", type=kind)
    flags = vars(parser.parse_args(argv))
    sees_gpu = torch.cuda.is_available() and flags.get("device") != "cpu"
    if "preset" not in flags and world_size > 1 and not sees_gpu:
        raise UserError(f"{world_size} processes, but torch {torch.__version__} sees no GPU: say --preset nano or gpt2")
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
    # FP8 products with scales of rows give nothing but bf16
    has_fp8 = on_cuda and torch.cuda.get_device_capability() >= (8, 9) and dtype == "bfloat16"
    return dataclasses.replace(
        cfg,
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
        compile=on_cuda if cfg.compile is None else cfg.compile,
        cuda_graphs=cfg.cuda_graphs and on_cuda and cfg.compile is not False,
        canon_file="" if cfg.canon_file == GPT2.canon_file and not Path(cfg.canon_file).exists() else cfg.canon_file,
        layers_fp8=cfg.layers_fp8 and has_fp8,
        lm_head_fp8=cfg.lm_head_fp8 and has_fp8,
        seed=seed,
        run_id=cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}",
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return fp32, or the precision itself if it is wider: for moments, norms, averages and losses."""
    return torch.promote_types(dtype, torch.float32)


# ---- Schedules -------------------------------------------------------------------------------------------------------
def matches(name: str, names: str) -> bool:
    """Say whether a parameter's name matches one of the globs in `names`."""
    return any(fnmatchcase(name, pattern) for pattern in names.split())


def row_of(name: str, cfg: Hyperparameters) -> Group:
    """Return the row of `groups` that names a parameter."""
    rows = [row for row in cfg.groups if matches(name, row.names)]
    if len(rows) != 1:
        raise UserError(f"{name}: {len(rows)} rows of `groups` name this parameter, expected one")
    return rows[0]


def stage_ends(cfg: Hyperparameters) -> list[int]:
    """Return the end of each stage: shares of the base steps, moved by the steps that have been added so far."""
    ends = accumulate(stage.share for stage in cfg.stages)
    more = accumulate(stage.more_steps for stage in cfg.stages)
    return [round(cfg.base_steps * end) + added for end, added in zip(ends, more, strict=True)]


class Plan:
    """Hold what is due in a step or, unless it `trains`, in a validation before it; the last is at num_iterations."""

    def __init__(self, step: int, cfg: Hyperparameters, trains: bool = True):
        self.step = step
        self.cfg = cfg
        self.trains = trains
        ends = stage_ends(cfg)
        self.index = sum(end <= min(step, ends[-1] - 1) for end in ends)
        start, end = [0, *ends][self.index : self.index + 2]
        self.stage = stage = cfg.stages[self.index]
        self.seq_len = int(cfg.train_seq_len * stage.batch)  # small batches first (record 46, @varunneal)
        # Learning rates rise with the batch, and fall linearly in the cooldown
        cooldown = int(cfg.scheduled_steps * (1 - cfg.cooldown_frac))
        u = min(max(0.0, (step - cooldown) / max(1, cfg.scheduled_steps - cooldown)), 1.0)
        self.lr = stage.lr * (1 - u) + cfg.min_lr_frac * u
        # Muon's momentum rises linearly in its warm-up and falls in its cooldown (record 39)
        left = cfg.num_iterations - step
        w = min(step / max(1, cfg.momentum_warmup_steps), left / max(1, cfg.momentum_cooldown_steps), 1.0)
        self.momentum = (1 - w) * 0.85 + w * cfg.muon_momentum
        self.two_rails = 0 < cfg.slow_rail_from <= step
        self.windows = dict(sorted(stage.windows.items()))
        if step == cfg.num_iterations and cfg.final_window:  # for the last validation: record 33 (@classiclarryd)
            self.windows["long"] = cfg.final_window
        # Weights of the losses of the next tokens (record 53, @varunneal) and of the prefix of the first, the longest
        # other token that begins it (88, @jvarho); tokens in the softmax
        done, length = min(step, end - 1) - start, end - start
        self.weights = [first + (last - first) * done / length for first, last in stage.mtp]
        self.num_next = len(self.weights)
        self.prefix = stage.prefix[len(stage.prefix) * done // length] if cfg.prefix_file else 0.0
        self.classes = stage.classes[len(stage.classes) * done // length]
        if not trains:
            self.weights, self.num_next, self.prefix, self.classes = [1.0], 1, 0.0, 0
        if self.prefix:
            self.weights.append(self.prefix)

    def every(self, group: Group) -> int:
        """Return the steps between the updates of a group."""
        return group.every[self.step >= self.cfg.rare_from]

    def is_due(self, group: Group) -> bool:
        """Say whether a group steps."""
        return (self.step + 1) % self.every(group) == 0

    def updates(self, group: Group) -> int:
        """Return how often a group has stepped before."""
        often, rarely = group.every
        border = min(self.step, self.cfg.rare_from)
        return border // often + self.step // rarely - border // rarely

    def adam(self, group: Group) -> tuple[float, float, float, float]:
        """Return Adam's rate with both bias corrections, decay, beta1, beta2.

        An update after more steps than at first stands for several (record 92).
        """
        n = self.every(group) / group.every[0]
        beta1, beta2 = group.beta1**n, group.beta2**n
        count = self.updates(group) + 1
        lr = group.lr * self.lr
        rate = lr * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        return rate, group.decay * n * lr**2, beta1, beta2

    @property
    def tied(self) -> bool:
        """Say whether embedding and head step as one table: up to the update with the last tied step's gradient."""
        last = round(self.cfg.tied_frac * self.cfg.scheduled_steps)
        return last > 0 and self.step - self.every(row_of("lm_head", self.cfg)) < last


def num_tokens(steps: int, cfg: Hyperparameters) -> int:
    """Return how many tokens the first `steps` steps train on."""
    return cfg.batch_sequences * sum(Plan(step, cfg).seq_len for step in range(steps))


def window_of(attention: str) -> str:
    """Return the kind of window of a kind of attention."""
    return dict(paired="short", alike="long").get(attention, attention)


def rotary_frequencies(window: str, now: Plan) -> tuple[Tensor, float]:
    """Return the rotary frequencies (D / 4,) of a kind of window, and its factor on scores.

    YaRN (arXiv:2309.00071; record 31, @classiclarryd): when the window grows from old to new tokens, frequencies of at
    most one turn in the old window shrink by old / new, those of 32 turns or more stay, and the factor grows.
    """
    cfg = now.cfg
    frequencies = (1 / 1024) ** torch.linspace(0, 1, steps=cfg.head_dim // 4, dtype=torch.float64)
    scale = cfg.attn_scale if window == "long" else cfg.short_attn_scale
    for old, new in pairwise(stage.windows[window] for stage in cfg.stages[: now.index + 1]):
        turns = old * frequencies / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)
        frequencies = frequencies * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return frequencies, scale


class Settings(NamedTuple):
    """Hold what a step sets in the model. They are tensors, so that nothing recompiles."""

    windows: Tensor  # (kinds,) int32, by the name of the kind
    frequencies: Tensor  # (kinds, D / 4)
    scales: Tensor  # (kinds,)
    weights: Tensor  # (n,): of the losses of the targets

    @classmethod
    def of(cls, now: Plan, device: torch.device) -> "Settings":
        dtype = wide(getattr(torch, now.cfg.dtype))
        frequencies, scales = zip(*(rotary_frequencies(window, now) for window in now.windows), strict=True)
        windows = torch.tensor([*now.windows.values()], dtype=torch.int32)
        numbers = torch.stack(frequencies).to(dtype), *(torch.tensor(x, dtype=dtype) for x in (scales, now.weights))
        return cls(*(t.to(device, non_blocking=True) for t in (windows, *numbers)))


# ---- Data: the tokens of every step are planned before the first one, the same for any number of processes -----------
# For each sequence a shard and an array (pieces, 2): where its pieces of documents begin and end
Batch = list[tuple[str, np.ndarray]]
Data = dict[str, list[Batch]]  # what to train on, and what to validate on


def read_numbers(path: str, dtype: str, count: int, offset: int) -> np.ndarray:
    """Return `count` numbers of a file from byte `offset` on, or fewer at its end."""
    try:
        if not os.path.isfile(path):  # a pipe would never end
            raise OSError("there is no such file")
        return np.fromfile(path, dtype, count, offset=offset)  # not mmap: a truncated mapped file raises SIGBUS
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; ./run.sh --check says what to do") from None


def find_documents(path: str, cfg: Hyperparameters, is_stream: bool) -> list[tuple[int, int]]:
    """Return where a shard's documents begin and end; of a stream all is one."""
    # The format of llm.c: a header of 256 int32 [20240520, 1, number of tokens, 0 ...], then uint16 tokens
    header = read_numbers(path, "<i4", 3, 0).tolist()
    if header != [20240520, 1, (os.path.getsize(path) - 1024) / 2]:
        raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
    count = header[2]
    if is_stream:
        return [(0, count)]
    begins = np.flatnonzero(read_numbers(path, "<u2", count, 1024) == cfg.eot_token)
    return list(pairwise([*begins.tolist(), count]))


def cut_sequence(documents: deque[tuple[int, int]], length: int, max_doc_len: int) -> np.ndarray | None:
    """Take a sequence of `length` tokens from the front of `documents`; None if they have fewer.

    Documents are cut to max_doc_len (record 29, @varunneal), and sequences begin with one (26, @classiclarryd).
    """
    pieces = []
    missing = length
    while missing and documents:
        begin, end = documents.popleft()
        stop = min(end, begin + missing, begin + (max_doc_len or missing))
        pieces.append((begin, stop))
        missing -= stop - begin
        if not max_doc_len:  # the next sequence begins with the last target of this one, else with a document
            documents.appendleft((stop - 1, end))
            break
    return np.array(pieces) if missing == 0 else None


def plan_batches(pattern: str, lengths, num_sequences: int, cfg: Hyperparameters) -> list[Batch]:
    """Plan a batch of `num_sequences` for each of `lengths`, shard after shard; the rest of each shard is dropped.

    lengths: (seq_len, max_doc_len) of each batch. Raise UserError if the shards have too few tokens.
    """
    paths = deque(sorted(glob.glob(pattern, recursive=True)))
    path = ""
    documents: deque[tuple[int, int]] = deque()  # those of the shard at `path` that are left
    plan: list[Batch] = []
    while len(plan) < len(lengths):
        seq_len, max_doc_len = lengths[len(plan)]
        sequences = [cut_sequence(documents, seq_len + 1, max_doc_len) for _ in range(num_sequences)]
        if all(sequence is not None for sequence in sequences):  # else the shard has too little left
            plan.append([(path, sequence) for sequence in sequences])
        elif paths:
            path = paths.popleft()
            documents = deque(find_documents(path, cfg, is_stream=max_doc_len == 0))
        else:
            found = f"{pattern} in {os.getcwd()}: tokens for {len(plan)} batches, the run needs {len(lengths)}"
            if max_doc_len:
                found += f"; documents begin with --eot_token {cfg.eot_token}"
            raise UserError(f"{found}; ./run.sh gets a preset's data, data/pack_text.py packs text")
    return plan


def plan_data(cfg: Hyperparameters) -> Data:
    """Return the batches of training and those of validation, which are one sequence each."""
    plans = [Plan(step, cfg) for step in range(cfg.num_iterations)]
    train_lengths = [(now.seq_len, now.stage.max_doc_len) for now in plans]
    train = plan_batches(cfg.train_files, train_lengths, cfg.batch_sequences, cfg)
    val_lengths = [(cfg.val_seq_len, 0)] * (cfg.val_tokens // cfg.val_seq_len)
    val = plan_batches(cfg.val_files, val_lengths, 1, cfg)
    if shared := {*paths_of(train)} & {*paths_of(val)}:
        raise UserError(f"{min(shared)}: trains and validates: change --train_files or --val_files")
    return dict(train=train, val=val)


def paths_of(plan: Sequence[Batch]) -> list[str]:
    """Return the shards of a plan, each once, in order."""
    return [*dict.fromkeys(path for batch in plan for path, _ in batch)]


def read_sequence(path: str, pieces: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the uint16 tokens of a sequence, the last target included."""
    first = pieces[0, 0]
    last = pieces[-1, 1]
    tokens = read_numbers(path, "<u2", last - first, 1024 + 2 * first)
    if len(tokens) < last - first:
        raise UserError(f"{path}: has become shorter: leave it alone while it is used")
    tokens = np.concatenate([tokens[begin:end] for begin, end in pieces - first])
    if tokens.max() >= vocab_size:
        raise UserError(f"{path}: has token {tokens.max()}, --vocab_size is {vocab_size}: another tokenizer's?")
    return tokens


def read_table(cfg: Hyperparameters, flag: str, dtype: str, count: int) -> np.ndarray:
    """Return the numbers of a file that a flag names, or none if it names none."""
    path = getattr(cfg, flag)
    table = read_numbers(path, dtype, -1, 0) if os.path.isfile(path) else np.empty(0, dtype)
    if path and len(table) != count:
        raise UserError(f"--{flag} {path}: not a file of {cfg.vocab_size} tokens; --{flag}= goes without")
    return table


def read_prefixes(cfg: Hyperparameters) -> np.ndarray:
    """Return for each token the longest other token that its bytes begin with, or -1 (data/gpt2_prefixes.py)."""
    table = read_table(cfg, "prefix_file", "<u2", cfg.vocab_size).astype(np.int64)
    return np.where(table < cfg.vocab_size, table, -1)


def read_canon(cfg: Hyperparameters) -> np.ndarray:
    """Return bits (V, V / 8): bit x of row p says that the tokenizer never puts x behind p (data/gpt2_canonical.py)."""
    V = cfg.padded_vocab
    return read_table(cfg, "canon_file", "u1", V * V // 8).reshape(-1, V // 8)


def hash_tokens(plan: Sequence[Batch], cfg: Hyperparameters, targets: bool) -> str:
    """Return the SHA-256 of all tokens of a plan; targets: with the last target of each sequence."""
    digest = hashlib.sha256()
    for path, pieces in chain(*plan):
        tokens = read_sequence(path, pieces, cfg.vocab_size)
        digest.update((tokens if targets else tokens[:-1]).tobytes())
    return digest.hexdigest()


# ---- Inputs: what the model reads of a sequence, made by a thread ahead of the steps ---------------------------------
class Inputs(NamedTuple):
    """Hold a sequence of T tokens."""

    tokens: Tensor  # (T,) int32
    doc_ids: Tensor  # (T,) int32, non-decreasing: attention stays within documents
    targets: Tensor  # (T, n): the next tokens, and the prefix of the first; -1 for none, -2 beyond the end
    classes: Tensor | None  # (C,): the tokens in the softmax, ascending; targets number them then. None: all
    signs: Tensor  # (n, T): rows of the table of signs, for bigrams, trigrams ...; (0,) without such a table
    rows: Tensor  # (n, T): where the rows of its n-grams are, in what `NgramTable.fetch` returns
    places: Tensor  # (n, T): where their gradients go, among `Reads.ids`


class Reads(NamedTuple):
    """Say what is read in a cycle: the steps from one update of the table of n-grams to the next.

    Each rank owns an equal part of the rows, and all make the same plan of who reads what.
    """

    ids: Tensor  # the rows that this rank reads, ascending, each once
    counts: list[int]  # how many of them each rank owns
    asked: Tensor  # which of its own rows each rank reads, rank after rank
    asked_counts: list[int]  # how many
    touched: Tensor  # of these each once, ascending
    merged: Tensor  # the place of each of `asked` in `touched`


HASHES = (  # factors of the current token, the one before, ...: for rows and for signs
    ((36313, 27191), (48271, 30011)),
    ((17351, 60961, 45259), (58699, 39779, 26801)),
)


def hash_ngrams(tokens: np.ndarray, factors: Sequence[int], modulus: int, first: int) -> np.ndarray:
    """Return (f0 t_p XOR f1 t_{p-1} ...) mod modulus for int32 tokens (T,), or `first` without enough tokens before.

    Products wrap.
    """
    hashed = tokens * np.int32(factors[0])
    for back, factor in enumerate(factors[1:], start=1):
        hashed[back:] ^= tokens[:-back] * np.int32(factor)
    hashed -= hashed // modulus * modulus  # as hashed % modulus, in a quarter of the time
    hashed[: len(factors) - 1] = first
    return hashed


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct numbers of `ids`, ascending, and the place of each of `ids` among them."""
    found, places = torch.unique(torch.from_numpy(ids), return_inverse=True)  # np.unique took 3 to 9 times as long
    return found.numpy(), places.numpy()


def find_ngrams(tokens: np.ndarray, cfg: Hyperparameters) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (n, T) of the table of n-grams, and of the table of signs.

    Bigrams (record 62, @classiclarryd) and trigrams (92, Deven Pietrzak @devenpzak) have equal parts of the table, with
    a last row for tokens with too few before them. N-grams that share a row interfere less with signs (83, @TrianX).
    """
    kinds = HASHES[: cfg.ngram_order - 1]
    last = cfg.ngram_rows // len(kinds) - 1
    quirk = np.concatenate([[last], tokens[1:]], dtype=np.int32)  # for bigrams, as in the record
    rows = [hash_ngrams(tokens if k else quirk, kinds[k][0], last, last) + k * (last + 1) for k in range(len(kinds))]
    signs = [hash_ngrams(tokens, factors, cfg.sign_rows, 0) for _, factors in kinds if cfg.sign_rows]
    return np.stack(rows), np.array(signs)


def plan_reads(rows: list[np.ndarray], rank: int, rows_per_rank: int) -> tuple[np.ndarray, Reads]:
    """Return what a rank does in a cycle, from the numbers of the rows that each rank reads.

    Also return the places of its own rows among those that it reads.
    """
    ids, places = distinct(rows[rank])
    first = rank * rows_per_rank
    asked = [distinct(r[(r >= first) & (r < first + rows_per_rank)])[0] - first for r in rows]
    all_asked = np.concatenate(asked).astype(np.int64)
    counts = np.bincount(ids // rows_per_rank, minlength=len(rows)).tolist()
    return places, Reads(ids, counts, all_asked, [*map(len, asked)], *distinct(all_asked))


def choose_classes(targets: np.ndarray, count: int, offset: int, vocab: int) -> tuple[np.ndarray, int]:
    """Return `count` tokens, ascending, for a softmax over fewer than all, and the next offset (record 92).

    They are all targets, and others from a sweep over all tokens, whose k-th is 20011 k mod V: each comes once in V.
    """
    chosen = np.zeros(vocab, bool)
    chosen[targets] = True
    missing = count - chosen.sum()
    if missing < 0:
        raise UserError(f"{chosen.sum()} different targets in a sequence: raise `classes` {count} of its stage")
    if missing:
        look = min(vocab, int(1.7 * missing) + 256)  # enough, as targets are few
        ids = 20011 * ((offset + np.arange(look)) % vocab) % vocab
        others = ids[~chosen[ids]]
        if len(others) < missing:  # in small vocabularies
            others = np.flatnonzero(~chosen)
            others = others[:: max(1, len(others) // missing)]
        chosen[others[:missing]] = True
        offset = (offset + look) % vocab
    return np.flatnonzero(chosen), offset


class Reader:
    """Make the inputs of this rank's sequences, cycle after cycle."""

    def __init__(self, cfg: Hyperparameters, ranks: "Ranks", device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.device = device
        self.prefixes = read_prefixes(cfg)
        n = cfg.batch_sequences
        # Of the sweep of each sequence of a step. It depends on all tokens before, and on nothing else
        self.offsets = [cfg.padded_vocab * i // n for i in range(n)]

    def targets(self, now: Plan, i: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return `Inputs.targets` and `Inputs.classes` of sequence i of a step, from its tokens and the last target."""
        following = tokens[1:].astype(np.int64)
        padded = np.pad(following, (0, now.num_next - 1), constant_values=-2)
        targets = np.lib.stride_tricks.sliding_window_view(padded, now.num_next)
        if now.prefix:
            targets = np.column_stack([targets, self.prefixes[following]])
        if not now.classes:
            return targets, None
        V = self.cfg.padded_vocab
        classes, self.offsets[i] = choose_classes(following, now.classes, self.offsets[i], V)
        numbers = np.full(V + 2, -1)
        numbers[-2] = -2
        numbers[classes] = np.arange(len(classes))
        return numbers[targets], classes

    def doc_ids(self, now: Plan, tokens: np.ndarray) -> np.ndarray:
        """Number the documents; in training, parts of at most `segment` tokens."""
        t = np.arange(len(tokens))
        starts = tokens == self.cfg.eot_token
        if now.trains:
            starts |= (t - np.maximum.accumulate(np.where(starts, t, 0))) % self.cfg.segment == 0
        return starts.cumsum(dtype=np.int32)

    def make(self, plans: Sequence[Plan], batches: Sequence[Sequence[np.ndarray]]) -> tuple[list[list[Inputs]], Reads]:
        """Return for each step of a cycle the inputs of this rank's sequences, and what the cycle reads, on the host.

        batches: for each step the tokens of all sequences, with their last targets.
        """
        rank, size = self.ranks[:2]
        batches = [[tokens.astype(np.int32) for tokens in batch] for batch in batches]
        hashes = [[find_ngrams(tokens[:-1], self.cfg) for tokens in batch] for batch in batches]
        nothing = np.empty(0, np.int32)
        read = [[rows for batch in hashes for rows, _ in batch[k::size]] for k in range(size)]  # by each rank
        rows_per_rank = -(-self.cfg.ngram_rows // size)
        places, reads = plan_reads([np.concatenate([nothing, *r], axis=None) for r in read], rank, rows_per_rank)
        own_places = iter(np.split(places.astype(np.int32), np.cumsum([rows.size for rows in read[rank]])[:-1]))
        steps: list[list[Inputs]] = []
        for now, batch, batch_hashes in zip(plans, batches, hashes, strict=True):
            steps.append([])
            for i in range(rank, len(batch), size):
                rows, signs = batch_hashes[i]
                places = next(own_places).reshape(rows.shape)
                ids = self.doc_ids(now, batch[i][:-1])
                targets = self.targets(now, i, batch[i])
                rows = rows if size == 1 else places
                steps[-1].append(Inputs(batch[i][:-1], ids, *targets, signs, rows, places))
        return tree_map_only(np.ndarray, self.on_host, (steps, reads))

    def on_host(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.require(array, requirements="CW"))
        return tensor.pin_memory() if self.device.type == "cuda" else tensor  # here, as pinning may allocate

    def on_device(self, made):
        """Return what `make` has made, on the device."""
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), made)

    def read(self, cycles: Iterable[tuple[list[Plan], Sequence[Batch]]]) -> Iterator[tuple[list[Inputs], Reads]]:
        """Yield for each step this rank's sequences and what its cycle reads, on the device."""

        def make(plans, batches):
            V = self.cfg.vocab_size
            return self.make(plans, [[read_sequence(path, pieces, V) for path, pieces in batch] for batch in batches])

        first = (torch.cuda.set_device, (self.device,)) if self.device.type == "cuda" else ()  # else it opens GPU 0
        with ThreadPoolExecutor(1, "reader", *first) as thread:  # ahead of the steps, from the first `next` on
            futures = (thread.submit(make, *cycle) for cycle in cycles)
            ready = deque(islice(futures, 2))  # cycles that are read or being read
            while ready:
                steps, reads = self.on_device(ready.popleft().result())
                ready.extend(islice(futures, 1))
                for sequences in steps:
                    yield sequences, reads


def train_cycles(batches: Sequence[Batch], cfg: Hyperparameters) -> Iterator[tuple[list[Plan], Sequence[Batch]]]:
    """Yield the plans and batches of each cycle of a training."""
    group = row_of("ngrams", cfg)
    plans: list[Plan] = []
    for step in range(cfg.num_iterations):
        plans.append(Plan(step, cfg))
        if plans[-1].is_due(group) or step == cfg.num_iterations - 1:
            yield plans, batches[plans[0].step : step + 1]
            plans = []


# ---- Layers: each draws its own initial values; MLPs begin with zero outputs (@Grad62304977) -------------------------
def uniform_weight(inputs: int, *shape: int) -> nn.Parameter:
    """Return a weight of standard deviation 0.5 / sqrt(inputs); PyTorch's is 0.58 / sqrt(inputs) (record 19)."""
    bound = (0.75 / inputs) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in the precision of x: weights may be wider."""
    return F.linear(x, weight.type_as(x))


def delay(x: Tensor, n: int) -> Tensor:
    """Return x (T, ...) moved n tokens later, for n <= T; the first n tokens keep their own rows."""
    return torch.cat([x[:n], x[: len(x) - n]])


def scaled(factor: Tensor, product: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return factor * product(weight), for one factor () or one for each token (T, 1).

    One for all tokens goes into the weight, which is smaller; then its gradient needs no product saved.
    """
    return factor * product(weight) if factor.ndim else product(factor * weight)


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return factors from 0 to 1 for each token, from its first channels."""
    return linear(x[:, : weight.size(1)], weight).sigmoid()


class RMSNorm(torch.autograd.Function):
    """Divide x by its RMS over the last dimension. Save the result y, which the next product saves anyway, and not x.

    With r = 1 / rms(x) and a gradient g by y = r x, that by x is r (g - y mean(g . y)).
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x32 = x.to(wide(x.dtype))
        scale = (x32.square().mean(-1, keepdim=True) + torch.finfo(x32.dtype).eps).rsqrt()
        y = x32 * scale
        y = y if x32 is x else y.to(x.dtype)  # torch 2.11 compiles a cast to the same type without its gradient
        ctx.save_for_backward(y, scale.to(x.dtype))
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        return scale * (grad - y * (grad * y).mean(-1, keepdim=True))


norm = RMSNorm.apply


def quantize(t: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return t in `dtype`, in FP8 scale * t. Beyond FP8's limit some devices saturate and others give NaN: clamp."""
    limit = torch.finfo(dtype).max
    return (t * scale).clamp(-limit, limit).to(dtype) if dtype.itemsize == 1 else t.to(dtype)


def matmul(a: Tensor, b: Tensor, scale: Tensor | float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ b. FP8 operands come multiplied by numbers whose product is `scale`: divide it out.

    fast: the hardware may sum up in less than fp32 (`use_fast_accum`).
    """
    if a.dtype.itemsize > 1:
        return (a @ b).to(dtype)
    a = a.contiguous()  # cuBLAS wants row-major by column-major
    b = b.t().contiguous().t()
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return torch._scaled_mm(a, b, one / scale, one, out_dtype=dtype, use_fast_accum=fast)


def has_kernels(t: Tensor) -> bool:
    """Say whether kernels of this script take t, or PyTorch does what they do."""
    return triton is not None and t.is_cuda and t.dtype == torch.bfloat16


if triton:

    @triton.jit
    def relu_squared_backward_kernel(grad, w, z, dz, y, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
        """Compute a block of dz and y, see `relu_squared_backward`. Hardware copies blocks, and sees to the edges."""
        t = tl.program_id(1) * BLOCK
        n = tl.program_id(0) * BLOCK  # programs that run side by side have the same tokens
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, K, BLOCK_K):
            total = tl.dot(grad.load([t, k]), w.load([k, n]), total)
        relu = tl.maximum(z.load([t, n]).to(tl.float32), 0)
        dz.store([t, n], (2 * relu * total).to(dz.dtype))
        y.store([t, n], (relu * relu).to(y.dtype))

    @triton.jit
    def relu_squared_fp8_kernel(z, y, scales, N, BLOCK: tl.constexpr):
        """Compute a row of `relu_squared_fp8_rows`."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        relu = tl.maximum(tl.load(z + row * N + columns, columns < N, other=0).to(tl.float32), 0)
        squares = relu * relu
        scale = 448 / tl.maximum(tl.max(squares), 1e-12)
        tl.store(scales + row, 1 / scale)
        tl.store(y + row * N + columns, tl.minimum(squares * scale, 448).to(y.dtype.element_ty), columns < N)


def relu_squared_backward(grad: Tensor, w: Tensor, z: Tensor, by_kernel: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of y @ w.T by z (T, N), and y = relu(z)^2 itself, for grad (T, K) and w (K, N).

    It is 2 relu(z) (grad @ w). A kernel multiplies while the product is in registers: in memory it would be written and
    read again, 0.6 GB in all for a layer at 48K tokens.
    """
    if not by_kernel:
        relu = F.relu(z)
        dz = (grad @ w).mul_(relu).mul_(2)
        return dz, relu.square_()
    K, N = w.shape
    grad = grad.contiguous()
    dz = torch.empty_like(z)
    y = torch.empty_like(z)
    block, block_k = 128, 64  # with 3 stages two programs fit into a multiprocessor: one stores, the other multiplies
    tile = [block, block]
    shapes = [block, block_k], [block_k, block], tile, tile, tile
    blocks = map(TensorDescriptor.from_tensor, (grad, w, z, dz, y), shapes)
    grid = triton.cdiv(N, block), triton.cdiv(len(z), block)
    relu_squared_backward_kernel[grid](*blocks, K, block, block_k, num_warps=8, num_stages=3)
    return dz, y


def fp8_rows(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return t in e4m3, and what its rows (n, 1) are to be multiplied by: their largest number becomes 448, e4m3's."""
    scale = 448 / t.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    return quantize(t, scale, torch.float8_e4m3fn).contiguous(), 1 / scale


def relu_squared_fp8_rows(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return `fp8_rows` of relu(z)^2 for z (T, N).

    A kernel holds a row in registers. The compiler's reads long rows twice, in twice the time (measured: one H100).
    """
    if not has_kernels(z):
        return fp8_rows(F.relu(z).square_())
    T, N = z.shape
    y = torch.empty_like(z, dtype=torch.float8_e4m3fn)
    scales = z.new_empty(T, 1, dtype=torch.float32)
    relu_squared_fp8_kernel[(T,)](z, y, scales, N, triton.next_power_of_2(N))
    return y, scales


def fp8_product(x: tuple[Tensor, Tensor], w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x @ w.T, multiplied in FP8 (records 84, @sisovicm, 89, @Mister-dev-oss and others, 90, @Glitchfix).

    x comes from `fp8_rows`. Records have one scale for a weight, and scale all hidden units of a rank by the largest of
    the step before, which a checkpoint would have to keep.
    """
    (x_q, x_scale), (w_q, w_scale) = x, fp8_rows(w)
    return torch._scaled_mm(x_q, w_q.t(), x_scale, w_scale.t(), out_dtype=dtype, use_fast_accum=True)


class FP8Linear(torch.autograd.Function):
    """Return x @ w.T, forward in FP8."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return fp8_product(fp8_rows(x), w, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class ReluSquaredMLP(torch.autograd.Function):
    """Return relu(x @ c_fc.T)^2 @ c_proj.T, forward in FP8 if `fp8`, backward by a kernel if `by_kernel`.

    The square of relu is 1 to 2% better than GELU (arXiv:2109.08668; @SKYLINEZ007 and @Grad62304977). Squares are not
    saved (3.6 GB, estimated): the backward pass makes them anew, and in FP8 the forward pass need not even write them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, c_fc: Tensor, c_proj: Tensor, fp8: bool, by_kernel: bool) -> Tensor:
        ctx.by_kernel = by_kernel
        z = fp8_product(fp8_rows(x), c_fc, x.dtype) if fp8 else F.linear(x, c_fc)
        ctx.save_for_backward(x, c_fc, c_proj, z)
        return fp8_product(relu_squared_fp8_rows(z), c_proj, x.dtype) if fp8 else F.linear(F.relu(z).square_(), c_proj)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, c_fc, c_proj, z = ctx.saved_tensors
        dz, y = relu_squared_backward(grad, c_proj, z, ctx.by_kernel)
        return dz @ c_fc, dz.t() @ x, grad.t() @ y, None, None


class MLP(nn.Module):
    """Map x (T, K) to (T, K) through hidden units, times a factor."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        K = cfg.model_dim
        self.c_fc = uniform_weight(K, K, cfg.mlp_dim)  # stored transposed, so that Muon can batch it with c_proj
        self.c_proj = nn.Parameter(torch.zeros(K, cfg.mlp_dim))
        self.fp8 = cfg.layers_fp8
        fits = cfg.device == "cuda" and cfg.dtype == "bfloat16" and K % 8 == 0
        self.by_kernel = fits and triton is not None and torch.cuda.get_device_capability() >= (9, 0)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        fp8 = self.fp8 and torch.is_grad_enabled()

        def product(c_proj: Tensor) -> Tensor:
            return ReluSquaredMLP.apply(x, self.c_fc.mT.type_as(x), c_proj, fp8, self.by_kernel)

        return scaled(factor, product, self.c_proj.type_as(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first two quarters of D against each other and keep any others, for x (..., 2, 2, D / 4).

    Half heads have two quarters, x (..., 1, 2, D / 4). One formula serves all: the compiler makes one kernel of it, but
    three of a split and a cat.
    """
    quarter = torch.arange(2 * x.size(-3), device=x.device).view(-1, 2, 1)
    return torch.where(quarter < 2, x * cos + x.flip(-2) * sin * (1 - 2 * quarter), x)


class NormRotate(torch.autograd.Function):
    """Divide heads x (..., D / 2 n, 2, n) by their RMS, rotate them, multiply by `scale`. Save the result, and not x.

    Two quarters of a head rotate by the position (arXiv:2104.09864; record 17).

    Forward, with a scale s, a rotation R and r = 1 / rms(x):    y = s R z,  z = r x
    Backward, for a gradient g by y:                             dx = r (s R'g - z mean(z . s R'g))
    A rotation keeps products, so z . s R'g = y . g, and z = R'y / s:   dx = r R'(s g - y mean(y . g) / s)
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, scale: Tensor) -> Tensor:
        x32 = x.to(cos.dtype)
        by_rms = (x32.square().mean((-3, -2, -1), keepdim=True) + torch.finfo(x32.dtype).eps).rsqrt()
        y = rotate(x32 * by_rms, cos, sin) * scale
        y = y if x32 is x else y.type_as(x)  # as in RMSNorm
        ctx.save_for_backward(y, by_rms, cos, sin, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, by_rms, cos, sin, scale = ctx.saved_tensors
        g = grad.to(cos.dtype)
        across = scale * g - y * ((g * y).mean((-3, -2, -1), keepdim=True) / scale)
        return (by_rms * rotate(across, cos, -sin)).type_as(y), None, None, None


# ---- Attention: causal, within documents, in sliding windows ---------------------------------------------------------
def document_block_mask(doc_ids: Tensor, window: Tensor, block: int, for_flex: bool = True) -> BlockMask:
    """Return the mask of causal attention within documents and a sliding window (records 20 and 29).

    doc_ids (T,): non-decreasing document id of each token. window () int32: how many tokens before itself a token sees;
    a tensor, so that a change never recompiles. for_flex: also build the key-major lists of FlexAttention's backward.

    A query block sees the key blocks from first_visible to its own. If it lies in one document, all of its tokens see
    all of the blocks from first_full to the one before: these are full and need no mask. Lists go from near to far.
    Eight tokens of the documents a and b, in blocks of two with a window of three:

        query  keys a a   a a   a b   b b
        0 a         x .   . .   . .   . .      query block 0: partial 0
        1 a         x x   . .   . .   . .
        2 a         x x   x .   . .   . .      query block 1: partial 1, full 0
        3 a         x x   x x   . .   . .
        4 a         . x   x x   x .   . .      query block 2: partial 2, 1, 0
        5 b         . .   . .   . x   . .
        6 b         . .   . .   . x   x .      query block 3: partial 3, 2
        7 b         . .   . .   . x   x x
    """
    first_doc = doc_ids.view(-1, block)[:, 0]
    last_doc = doc_ids.view(-1, block)[:, -1]
    own = torch.arange(len(first_doc), dtype=torch.int32, device=doc_ids.device)  # number of each query block
    seen_by_first = (window + block - 1) // block  # so many blocks back the first token sees something,
    seen_by_last = (window + 1) // block - 1  # and so many the last one sees whole
    blocks_ended_before = (last_doc[None, :] < first_doc[:, None]).sum(1, dtype=torch.int32)
    first_visible = torch.maximum(blocks_ended_before, own - seen_by_first)
    blocks_begun_before = (first_doc[None, :] < first_doc[:, None]).sum(1, dtype=torch.int32)
    first_full = torch.maximum(blocks_begun_before, own - seen_by_last)
    num_full = torch.where(first_doc == last_doc, own - first_full, 0).clamp(min=0)
    num_partial = own - first_visible + 1 - num_full
    query = own[:, None]
    slot = own[None, :]  # in the list of a query block
    full = (query - 1 - slot).clamp(min=0)
    partial = torch.where(slot == 0, query, query - num_full[:, None] - slot).clamp(min=0)
    lists = num_partial[None, None], partial[None, None], num_full[None, None], full[None, None]

    def causal_in_document(b, h, q, kv):
        return (q >= kv) & (q - kv <= window) & (doc_ids[q] == doc_ids[kv])

    return BlockMask.from_kv_blocks(*lists, block, causal_in_document, compute_q_blocks=for_flex)


class GatheredMask:
    """Hold a BlockMask for attention in plain PyTorch: FlexAttention has no backward on CPUs.

    kv_blocks (N, M): the key blocks of each query block, partial ones first. bias (N, block, M block): 0 where a
    token sees another, -inf where not. max_blocks: M, the most that any query block sees with the widest window.
    """

    def __init__(self, mask: BlockMask, max_blocks: int, dtype: torch.dtype):
        num_partial = mask.kv_num_blocks[0, 0, :, None]
        num_full = mask.full_kv_num_blocks[0, 0, :, None]
        N = len(num_partial)
        block = mask.BLOCK_SIZE[0]
        slot = torch.arange(min(max_blocks, N))
        full = mask.full_kv_indices[0, 0].gather(1, (slot - num_partial).clamp(min=0))
        self.kv_blocks = torch.where(slot < num_partial, mask.kv_indices[0, 0, :, : len(slot)], full)
        tokens = torch.arange(N * block, dtype=torch.int32).view(N, block)
        q = tokens[:, :, None, None]
        kv = tokens[self.kv_blocks][:, None]
        visible = (slot < num_partial + num_full)[:, None, :, None] & mask.mask_mod(None, None, q, kv)
        self.bias = torch.where(visible, torch.zeros((), dtype=dtype), -torch.inf).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q to k and v (T, H, D); v has a D of its own. The cost grows with the window, not as T^2."""
        T, H, D = v.shape
        N = len(self.kv_blocks)
        width = q.size(-1)
        q, k, v = (t.transpose(0, 1).reshape(H, N, -1) for t in (q, k, v))  # (H, N, block D): a block in one piece
        k, v = (t.index_select(1, self.kv_blocks.flatten()) for t in (k, v))  # (H, N M, block D)
        q, k = (t.view(H, N, -1, width) for t in (q, k))  # (H, N, block, D) and (H, N, M block, D)
        v = v.view(H, N, -1, D)
        # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries)
        y = torch.softmax((q @ k.mT).add_(self.bias), dim=-1) @ v  # (H, N, block, D)
        return y.view(H, T, D).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | GatheredMask, heads_per_pair: int) -> Tensor:
    """Return softmax(q k') v of each head (T, H, D), within the mask; v has a D of its own."""
    T, H, D = v.shape
    # The heads of a pair, h and h + H / 2, alternate in one sequence of 2 T and share keys (record 58, @classiclarryd)
    q, k, v = (t.reshape(T * heads_per_pair, H // heads_per_pair, -1) for t in (q, k, v))
    if isinstance(mask, GatheredMask):
        return mask.attend(q, k, v).reshape(T, H, D)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    warps = dict(bwd_num_warps=8)  # as on an H100; with the 4 of other GPUs the backward pass spills its registers,
    if q.size(-1) == 64:  # and so does the forward pass of half heads
        warps |= dict(fwd_num_warps=8)
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=warps)  # type: ignore[call-overload]
    return y.squeeze(0).transpose(0, 1).reshape(T, H, D)


class CausalSelfAttention(nn.Module):
    """Map x (T, K), of unit RMS, to (T, K): attention with QK-norm, rotary and value embeddings.

    Half heads (record 92) read the first half of a head's rows, or columns of c_proj. Matrices are whole all the same,
    so that Muon has few shapes: the rest is never read, and only decays.
    """

    def __init__(self, cfg: Hyperparameters, layer: Layer):
        super().__init__()
        H = cfg.num_heads
        D = cfg.head_dim
        K = cfg.model_dim
        self.cfg = cfg
        self.layer = layer
        self.heads_per_pair = 2 if layer.attention == "paired" else 1
        rows = cfg.heads_per_matrix * D
        self.qk_w = uniform_weight(K, 2 * H * D // rows, rows, K)  # a stack of matrices for Muon
        self.v_w = uniform_weight(K, H * D, K)
        self.c_proj = uniform_weight(H * D, K, H * D)  # not zero: record 64
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))  # records 47 (@roeeshenberg) and 48 (@ChrisJMcCormick)
        self.value_gate = None
        if layer.value_embed and cfg.value_gate_inputs and not layer.mudd:
            self.value_gate = nn.Parameter(torch.zeros(H, cfg.value_gate_inputs, dtype=getattr(torch, cfg.dtype)))
        if layer.attention == "alike":  # queries and keys begin alike (arXiv:2305.09828)
            q, k = self.qk_w.data.chunk(2)
            k.copy_(q)

    def forward(self, x: Tensor, value_embed: Tensor | None, mask, rotary: tuple, f: dict) -> Tensor:
        """Attend, with the layer's factors f: numbers, or made by nets for each token (..., T, 1)."""
        T, K = x.shape
        H = self.cfg.num_heads
        D = self.cfg.head_dim
        width = D // 2 if self.layer.half_qk else D
        v_width = D // 2 if self.layer.half_v else D
        v_lambda, out_lambda = self.lambdas
        qk_w = self.qk_w.view(2 * H, D, K)[:, :width]
        v_w = v_lambda * self.v_w.view(H, D, K)[:, :v_width]
        qkv_w = torch.cat([qk_w.flatten(0, 1), v_w.flatten(0, 1)])
        product = FP8Linear.apply if self.cfg.layers_fp8 and torch.is_grad_enabled() else F.linear
        # One split of all three: each then writes its gradient where the product reads it, and none is copied
        qkv = product(x, qkv_w.type_as(x)).split([H * width, H * width, H * v_width], dim=1)
        q, k, v = (t.unflatten(1, (H, -1)) for t in qkv)
        cos, sin, scale = rotary
        if self.layer.attention == "alike":  # a key is the token before's: what followed a token like this one?
            q, k = scale.type_as(q) * norm(q), delay(norm(k), 1)  # QK-norm: @Grad62304977
        else:
            split = T, -1, self.heads_per_pair, width // (D // 2), 2, D // 4
            q = NormRotate.apply(q.reshape(split), cos, sin, scale).view_as(q)
            k = NormRotate.apply(k.reshape(split), cos, sin, torch.ones_like(scale)).view_as(k)
        if self.layer.attention == "long":  # half of a key is the token before's: record 49
            own, before = k.split(D // 2, dim=-1)
            k = torch.cat([own, delay(before, 1)], dim=-1)
        v = self.add_embeddings(v, x, value_embed, f)
        y = attend(q, k, v, mask, self.heads_per_pair)
        if "xsa" in f:  # a head leaves out what its output shares with the token's own value: record 82 (@_djdumpling)
            overlap = (y * v).sum(-1, keepdim=True)
            share = overlap / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
            y = y - f["xsa"].transpose(0, 1).tanh() * share * v
        if "head_gate" in f:  # a head may attend to nothing: record 28 (@classiclarryd)
            y = y * f["head_gate"].transpose(0, 1)
        c_proj = self.c_proj.view(K, H, D)[..., :v_width].flatten(1)
        return scaled(f["post"][0], lambda weight: linear(y.flatten(1), weight), out_lambda * c_proj)

    def add_embeddings(self, v: Tensor, x: Tensor, value_embed: Tensor | None, f: dict) -> Tensor:
        """Add to the values v (T, H, D) the value embedding, as much as a gate lets through, and what MUDD mixed."""
        if value_embed is not None:  # after value residuals (arXiv:2410.17897): record 14 (@KoszarskyB)
            added = value_embed.unflatten(1, (v.size(1), -1))[..., : v.size(-1)]
            if self.value_gate is not None:  # record 55 (@classiclarryd); the embedding decides, too: 70 (@photon_mz)
                n = self.value_gate.size(1) // 2
                decides = torch.cat([x[:, :n], value_embed[:, :n]], dim=-1)
                added = 2 * gate(decides, self.value_gate)[:, :, None] * added
            elif "value_gate" in f:  # one for either half of the heads
                added = f["value_gate"].transpose(0, 1).repeat_interleave(v.size(1) // 2, dim=1) * added
            v = v + added
        if "value" in f:
            v = v + f["value"].view_as(v)
        return v


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
class GateNet(nn.Module):
    """Make factors for each token of the stream x (T, K): scale (W2 gelu(W1 x) + b2).

    wanted: for each layer by kind the numbers that its factors begin with. groups: factors also have a part for each
    group of channels, scale W2g gelu(W1 x) (record 92). Multiway dynamic dense connections (MUDD, arXiv:2502.12170;
    record 81) and gates (85): both by @Lisennlp.
    """

    def __init__(self, cfg: Hyperparameters, *wanted: dict[str, list[float]], groups: int = 0):
        super().__init__()
        dtype = getattr(torch, cfg.dtype)  # bf16 as in the record, though steps of 8e-4 cannot move a bias near 25
        self.wanted = wanted
        first = [*chain(*(numbers for kinds in wanted for numbers in kinds.values()))]
        w1 = torch.empty(cfg.net_dim, cfg.model_dim).uniform_(-1, 1) * cfg.model_dim**-0.5
        self.w1 = nn.Parameter(w1.to(dtype))
        self.w2 = nn.Parameter(torch.zeros(len(first), cfg.net_dim, dtype=dtype))
        self.b2 = nn.Parameter((torch.tensor(first) / 0.1).to(dtype))  # `scale` begins at 0.1
        self.w2g = nn.Parameter(torch.zeros(len(first), groups, cfg.net_dim, dtype=dtype)) if groups else None

    def forward(self, x: Tensor, scale: Tensor | float = 0.1) -> list[dict[str, Tensor]]:
        """Return for each layer by kind the factors (n, T, 1), in the precision of x: so the stream keeps its own.

        With groups they are (n, T, groups).
        """
        hidden = F.gelu(linear(x, self.w1))
        made = (scale * (linear(hidden, self.w2) + self.b2.type_as(x))).mT[:, :, None]
        if self.w2g is not None:
            by_group = linear(hidden, self.w2g.flatten(0, 1)).unflatten(1, self.w2g.shape[:2])
            made = made + scale * by_group.transpose(0, 1)
        sizes = [len(numbers) for kinds in self.wanted for numbers in kinds.values()]
        factors = iter(made.split(sizes))
        return [{kind: next(factors) for kind in kinds} for kinds in self.wanted]


def mix(factors: Iterable[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Return the sum of factors times sources."""
    return sum(factor * source for factor, source in zip(factors, sources, strict=True))  # type: ignore[return-value]


class Block(nn.Module):
    """Add attention, embeddings or an earlier layer to the stream and then MLPs, with factors on the stream and on all.

    A factor is a parameter of the block's `own`, or a net makes one for each token (`from_net` says which, and the
    values to begin with): the block's own net for MUDD, or else one that several blocks share.
    """

    def __init__(self, cfg: Hyperparameters, layer: Layer, has_net: bool):
        super().__init__()
        self.attn = CausalSelfAttention(cfg, layer) if layer.attention != "none" else None
        self.mlps = nn.ModuleList(MLP(cfg) for _ in range(layer.mlps))
        H = cfg.num_heads
        own = dict(resid=[cfg.resid_lambda_init] * 2)  # before attention and MLPs, and on what they add: record 73
        if self.attn or layer.mlps:
            own["post"] = [1.0] * 2
        first = dict(xsa=[0.0] * H, head_gate=[0.25] * H, x0=[0.0], ngram=[cfg.ngram_lambda_init], skip=[0.5])
        added = {kind: first[kind] for kind in first if getattr(layer, kind) not in (False, None)}
        if layer.skip is not None:
            self.skip_lambda = nn.Parameter(torch.tensor(-1.5))  # before a sigmoid: record 32 (@bernard24)
        self.mudd_net = None
        if layer.mudd:
            own |= {kind: added.pop(kind) for kind in ("x0", "ngram") if kind in added}
            mixes = dict(values=[0.0] * 3, stream=[0.0] * 3, value_gate=[2.0] * 2)
            self.mudd_net = GateNet(cfg, mixes | own)
            own = {}
        if not has_net:
            own |= added
            added = {}
        self.own = own
        self.from_net = added
        for kind, numbers in own.items():
            self.register_parameter(f"{kind}_lambdas", nn.Parameter(torch.tensor(numbers)))

    def forward(self, x, read, x0, ngrams, skipped, value_embed, view, f: dict) -> tuple[Tensor, Tensor]:
        """Return the new stream (T, K) from x, and what MLPs read.

        Attention reads `read`; view: its mask and rotary tables; f: all factors of the layer. The embedding x0 (record
        9, @KoszarskyB) and n-grams (62, @classiclarryd) stay at hand. `skipped`, an earlier output (U-Net: record 11,
        @brendanh0gan), comes without a factor on the stream.
        """
        x = f["resid"][0] * x if skipped is None else x + self.skip_lambda.sigmoid() * f["skip"][0] * skipped
        if self.attn is not None:
            x = x + self.attn(norm(read), value_embed, *view, f)
        if "x0" in f:
            x = x + f["x0"][0] * x0
        if "ngram" in f:
            x = x + f["ngram"][0] * ngrams
        m = norm(x)
        x = f["resid"][1] * x
        for mlp in self.mlps:
            x = x + mlp(m, f["post"][1])
        return x, m


class GPT(nn.Module):
    """Map the inputs of a sequence to the sum of losses.

    ngrams (n, T, K): the rows of its n-grams. never (T, V / 8): rows of `read_canon`'s table, for validation.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg = cfg
        K = cfg.model_dim
        V = cfg.vocab_size
        dtype = getattr(torch, cfg.dtype)  # of tables, nets and gates, as of activations; the rest is in fp32 at first
        self.embed = nn.Embedding(cfg.padded_vocab if cfg.tied_frac else V, K, dtype=dtype)
        self.value_embeds = nn.ModuleDict()
        for i, layer in enumerate(cfg.layers):
            if layer.value_embed:
                table = torch.empty(V, cfg.num_heads * cfg.head_dim, dtype=dtype).normal_(0, cfg.value_embed_std)
                self.value_embeds[str(i)] = nn.Embedding.from_pretrained(table, freeze=False)
        if cfg.sign_rows:  # a constant, the same in all runs
            generator = torch.Generator().manual_seed(83)
            signs = torch.randint(2, (cfg.sign_rows, K), generator=generator, device="cpu")
            self.register_buffer("signs", (2 * signs - 1).to(torch.int8))
        starts = [i for i, layer in enumerate(cfg.layers) if layer.net]
        nets = accumulate(layer.net for layer in cfg.layers)  # how many there are at or above each layer
        self.blocks = nn.ModuleList(Block(cfg, layer, n > 0) for layer, n in zip(cfg.layers, nets, strict=True))
        self.gate_nets = nn.ModuleDict()
        for start, end in pairwise([*starts, len(cfg.layers)]):
            self.gate_nets[str(start)] = GateNet(cfg, *(block.from_net for block in self.blocks[start:end]))
        self.gate_scale = nn.Parameter(torch.tensor(0.1)) if starts else None
        if mudd := cfg.layers[-1].mudd:
            # The head gets less of what only later layers needed: record 40 (@snimu, @classiclarryd)
            wanted = [0.0, -0.5] + [0.0] * (len(mudd) + len(self.value_embeds) + 1)
            self.head_net = GateNet(cfg, dict(out=wanted), groups=cfg.mix_groups)
        if n := cfg.smear_gate_inputs:
            self.smear_gate = nn.Parameter(torch.zeros(1, n, dtype=dtype))
            self.smear_lambda = nn.Parameter(torch.tensor(0.0))
        head = torch.empty(cfg.padded_vocab, K, dtype=dtype if cfg.tied_frac else torch.float32)
        self.lm_head = nn.Parameter(head.normal_(0, cfg.head_std))
        last = cfg.layers[-1]
        if last.attention == "alike" and last.value_embed:  # the head begins by predicting what attention finds:
            values = self.value_embeds[str(len(cfg.layers) - 1)].weight  # a row is what its value adds to the stream
            self.lm_head.data[:V] = F.normalize(linear(values, self.blocks[-1].attn.c_proj)).detach()
        if cfg.tied_frac:  # and equal they stay while `Plan.tied`
            self.embed.weight.data.copy_(head)
        if dtype == torch.float64:
            self.double()

    def forward(self, inputs: Inputs, ngrams: Tensor, settings: Settings, never=None) -> Tensor:
        """Return the summed loss, in FP8 where the configuration says so and gradients are wanted."""
        cfg = self.cfg
        x = self.features(inputs, ngrams, settings)
        with_grads = torch.is_grad_enabled()
        softcap = (cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift)
        scales = FP8_SCALES if cfg.lm_head_fp8 and with_grads else None
        head = self.lm_head if inputs.classes is None else F.embedding(inputs.classes, self.lm_head)
        return HeadLoss.apply(
            x, head, inputs.targets, settings.weights, softcap, cfg.lm_head_slice, scales, with_grads, never
        )

    def features(self, inputs: Inputs, ngrams: Tensor, settings: Settings) -> Tensor:
        """Return the head's input (T, K)."""
        tokens = inputs.tokens
        views = self.attention_views(inputs.doc_ids, settings)
        value_embeds = {int(i): table(tokens) for i, table in self.value_embeds.items()}
        if self.cfg.sign_rows:
            ngrams = ngrams * self.signs[inputs.signs].type_as(ngrams)
        ngrams = ngrams.sum(0)
        x = self.embed(tokens)
        if self.cfg.smear_gate_inputs:  # some of the token before, of another document too: record 34 (@classiclarryd)
            before = F.pad(x[:-1], (0, 0, 1, 0))
            x = x + self.smear_lambda * gate(x, self.smear_gate) * before
        x = x0 = norm(x)
        factors = [{kind: getattr(block, f"{kind}_lambdas") for kind in block.own} for block in self.blocks]
        outputs: list[Tensor] = []
        mudd = self.cfg.layers[-1].mudd
        for i, (layer, block, f) in enumerate(zip(self.cfg.layers, self.blocks, factors, strict=True)):
            if layer.net:
                for of_layer, made in zip(factors[i:], self.gate_nets[str(i)](x, self.gate_scale), strict=False):
                    of_layer |= made
            if i == 0 and layer.ngram:  # the first stream has its n-grams
                x = x + f.pop("ngram")[0] * ngrams
            if layer.shift:  # all that follows sees the last tokens in order: after RWKV (arXiv:2305.13048)
                parts = x.tensor_split(len(layer.shift), dim=1)
                x = torch.cat([delay(part, n) for part, n in zip(parts, layer.shift, strict=True)], dim=1)
            if i == 0:
                first = x
            if layer.mudd:
                sources = [first, outputs[mudd[0]], x]
                f |= block.mudd_net(x)[0]
                f["value"] = mix(f["values"], sources)
                x = x + mix(f["stream"], sources)
                x0 = first  # with n-grams, as in the record
            read = x if layer.reads is None else outputs[layer.reads]  # record 77 (@classiclarryd)
            skipped = None if layer.skip is None else outputs[layer.skip]
            x, m = block(x, read, x0, ngrams, skipped, value_embeds.get(i), views.get(layer.attention), f)
            outputs.append(x)
        if mudd:  # groups of channels have factors of their own (record 92)
            sources = [first, *(outputs[i] for i in mudd), *value_embeds.values(), m, norm(read)]
            by_group = [source.unflatten(1, (self.cfg.mix_groups, -1)) for source in sources]
            x = x + mix(self.head_net(x)[0]["out"][..., None], by_group).flatten(1)
        return norm(x)

    def attention_views(self, doc_ids: Tensor, settings: Settings) -> dict[str, tuple]:
        """Return for each kind of attention its mask, and what `NormRotate` takes: in pairs h rotates to 2 t + h % 2.

        The record pairs h with h + H / 2 (`attend`), but rotates by h % 2 too: of the pairs (0, 3), (1, 4), (2, 5) the
        second has its positions swapped.
        """
        cfg = self.cfg
        views: dict[str, tuple] = {}
        for kind in dict.fromkeys(layer.attention for layer in cfg.layers if layer.attention != "none"):
            heads_per_pair = 2 if kind == "paired" else 1
            i = sorted(cfg.stages[0].windows).index(window_of(kind))
            ids = doc_ids.repeat_interleave(heads_per_pair)  # a token has two positions then
            mask: BlockMask | GatheredMask = document_block_mask(
                ids, settings.windows[i], cfg.block_size, for_flex=cfg.device == "cuda"
            )
            if cfg.device != "cuda":
                longest = max(cfg.final_window, *chain(*(stage.windows.values() for stage in cfg.stages)))
                mask = GatheredMask(mask, 1 + math.ceil(longest / cfg.block_size), self.embed.weight.dtype)
            positions = torch.arange(len(ids), device=ids.device).view(-1, 1, heads_per_pair, 1, 1, 1)
            angles = positions * settings.frequencies[i]
            views[kind] = mask, (angles.cos(), angles.sin(), settings.scales[i])
        return views


# ---- Head: softcapped logits and their cross entropy, in slices of tokens, in FP8 where the GPU can ------------------
def softcapped_cross_entropy(z: Tensor, targets: Tensor, weights: Tensor, softcap: tuple, with_grad: bool, never=None):
    """Return the losses (T,) of logits z (T, V), which it overwrites, in nats, and their gradient by z or None.

    targets (T, n): -1 or, beyond the end, -2 for none. weights (n,): of their losses. softcap (c, r, d): a logit is
    l = r sigmoid((z + d) 2 / c), after Gemma 2's c tanh(z / c) (arXiv:2408.00118), with c = 15 since record 18
    (@KoszarskyB), lopsided since record 54 (@classiclarryd). never: bits (T, V / 8) of tokens whose logit becomes -60
    (record 91, @jvarho).

        s = sigmoid(-(z + d) 2 / c)
        l - r = -r s          a softmax ignores the shift by r; never above 0, so exp needs no maximum subtracted

    Written out, as log_softmax would keep the logits of all slices alive (10 GB more in gpt2, estimated).
    """
    c, r, d = softcap
    s = z.add_(d).mul_(-2 / c).sigmoid_()  # in place, as eager CPUs gain by it
    logits = -r * s
    if never is not None:
        bits = never[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=z.device) & 1
        logits.masked_fill_(bits.flatten(1) > 0, -60 - r)
    shares = (targets >= 0) * weights
    target_logits = (shares * logits.gather(1, targets.clamp(min=0))).sum(-1)
    exps = logits.exp_()
    total = exps.sum(-1)
    losses = shares.sum(-1) * total.log() - target_logits
    if not with_grad:
        return losses, None
    columns = torch.arange(z.size(1), device=z.device)
    total_weight = ((targets != -1) * weights).sum(-1)  # a quirk of the record, kept: missing targets (-2) count
    d_logits = exps.mul_((total_weight / total)[:, None])  # total_weight softmax(logits), less the weights of targets
    for k in range(len(weights)):
        d_logits.sub_(weights[k] * (targets[:, k, None] == columns))
    return losses, torch.ops.aten.sigmoid_backward(d_logits, s).mul_(r * 2 / c)


if triton:

    @triton.jit
    def cross_entropy_kernel(
        z, targets, weights, losses, grad, V, n,
        slope: tl.constexpr, shift: tl.constexpr, r: tl.constexpr, scale: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute the loss of a token, and its gradient by the logits times `scale`, as `cross_entropy_by_kernel`."""
        row = tl.program_id(0).to(tl.int64)
        z += row * V
        grad += row * V
        targets += row * n
        totals = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = tl.sigmoid(slope * tl.load(z + columns, columns < V, other=0).to(tl.float32) + shift)
            totals += tl.where(columns < V, tl.exp(-r * s), 0)
        total = tl.sum(totals)
        loss = 0.0
        total_weight = 0.0
        for k in range(n):
            target = tl.load(targets + k)
            weight = tl.load(weights + k)
            s = tl.sigmoid(slope * tl.load(z + tl.maximum(target, 0)).to(tl.float32) + shift)
            loss += tl.where(target >= 0, weight * (tl.log(total) + r * s), 0)
            total_weight += tl.where(target != -1, weight, 0)
        tl.store(losses + row, loss)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = tl.sigmoid(slope * tl.load(z + columns, columns < V, other=0).to(tl.float32) + shift)
            d = total_weight / total * tl.exp(-r * s)
            for k in range(n):
                d -= tl.where(columns == tl.load(targets + k), tl.load(weights + k), 0)
            tl.store(grad + columns, (scale * d * s * (1 - s)).to(grad.dtype.element_ty), columns < V)


def cross_entropy_by_kernel(z, targets, weights, softcap: tuple, scale: float, dtype: torch.dtype):
    """Return what `softcapped_cross_entropy` does, the gradient times `scale` in `dtype`.

    z is read twice, the second time from a cache; the compiler's kernel took up to twice as long (measured: one H100).
    """
    c, r, d = softcap
    losses = torch.empty(len(z), dtype=torch.float32, device=z.device)
    grad = torch.empty_like(z, dtype=dtype)
    numbers = -2 / c, -2 * d / c, r, scale * r * 2 / c
    cross_entropy_kernel[(len(z),)](z, targets, weights, losses, grad, z.size(1), len(weights), *numbers, 2048)
    return losses, grad


FP8_SCALES = 448 / 100, 448 / 2, 448 / 0.75  # of the head's input, its weight, the logits' gradient


class HeadLoss(torch.autograd.Function):
    """Return the summed `softcapped_cross_entropy` of z = x @ w.T, for x (T, K), w (V, K), targets (T, n).

    Only `slice_tokens` rows of the logits (T, V) exist at a time. The forward pass computes the gradients of a slice as
    well, as computing its logits again in the backward pass took 27 to 41% of the head's time.
    fp8_scales of x, w and the logits' gradient, or None: multiply in FP8 (record 19, @YouJiacheng), e4m3 forward and
    e5m2 for the gradient, which needs range more than precision. Static scales suffice: x has unit RMS, w saturates,
    and the gradient of a token's loss by a logit is below 1.6 in gpt2. never (T, V / 8): `read_canon`'s rows
    for the tokens.
    """

    @staticmethod
    def forward(ctx, x, w, targets, weights, softcap, slice_tokens, fp8_scales, with_grads, never) -> Tensor:
        x_scale, w_scale, grad_scale = fp8_scales or (1.0, 1.0, 1.0)
        low, grad_low = (torch.float8_e4m3fn, torch.float8_e5m2) if fp8_scales else (x.dtype, x.dtype)
        w_q = quantize(w, w_scale, low)
        losses = []
        grads_x = []
        grad_w = None
        for start in range(0, len(x), slice_tokens):
            part = slice(start, start + slice_tokens)
            x_slice, t = x[part], targets[part]
            x_q = quantize(x_slice, x_scale, low)
            z = matmul(x_q, w_q.t(), x_scale * w_scale, x.dtype, fast=True)
            if with_grads and has_kernels(z):
                loss, grad_q = cross_entropy_by_kernel(z, t, weights, softcap, grad_scale, grad_low)
            else:
                bits = None if never is None else never[part]
                loss, grad_z = softcapped_cross_entropy(z.to(wide(w.dtype)), t, weights, softcap, with_grads, bits)
                grad_q = quantize(grad_z, grad_scale, grad_low) if with_grads else None
            losses.append(loss)
            if with_grads:
                grads_x.append(matmul(grad_q, w_q, grad_scale * w_scale, x.dtype))
                # As (K, V), then transposed: faster than (V, K) directly (record 19)
                added = matmul(x_q.t(), grad_q, x_scale * grad_scale, wide(w.dtype)).t()
                grad_w = added if grad_w is None else grad_w + added
        if with_grads:
            ctx.save_for_backward(torch.cat(grads_x), grad_w.to(w.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        # grad_w is a transpose; autograd accumulates slowly unless it is as contiguous as the weight
        return grad * grad_x, (grad * grad_w).contiguous(), *[None] * 7


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
# The place of this process among all, as torchrun names it
Ranks = namedtuple("Ranks", "rank world_size local_rank local_world_size", defaults=(0, 1, 0, 1))
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def start_collective(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective and return a function that waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


def gather(own) -> list:
    """Return what each rank has. Hosts wait for each other, and for no device."""
    everyone = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    return everyone


class ShardedOptimizer:
    """Update parameters of one precision, every rank an equal share of their rows.

    Parameters become views of one buffer: each starts at a row and is zero-padded. groups: the table's row for each
    parameter; averages: by number the rows of `averages` that apply to all of them. A subclass defines
    init_state(values), which gets the rank's rows and returns by name what to keep, and update_shard(shard, grad, now),
    which writes new values into these rows and may overwrite `grad`.
    """

    update_shard: Callable
    init_state: Callable
    by_matrix = False  # a row is a matrix, or else 16 numbers, as kernels want addresses that are multiples of 16
    keeps_values = False  # True: the state has values in fp32; parameters and gradients travel as activations are

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        groups: list[Group],
        averages: dict[int, Average],
        cfg: Hyperparameters,
        ranks: Ranks,
    ):
        self.names = [*params]
        self.params = [*params.values()]
        self.groups = groups
        self.averages = averages
        self.cfg = cfg
        self.ranks = ranks
        row = self.params[0].shape[-2:] if self.by_matrix else (16,)
        self.rows_per_param = [-(-p.numel() // math.prod(row)) for p in self.params]
        self.rows_per_param[-1] += -sum(self.rows_per_param) % ranks.world_size  # padding: equal shares
        values = self.params[0].detach().new_zeros(sum(self.rows_per_param), *row)
        for p, view in zip(self.params, self.views(values), strict=True):
            view.copy_(p.detach())
        self.param_buffer = values.to(getattr(torch, cfg.dtype)) if self.keeps_values else values
        self.grad_buffer = torch.zeros_like(self.param_buffer)
        for p, view in zip(self.params, self.views(self.param_buffer), strict=True):
            p.data = view
        self.grad_views = self.views(self.grad_buffer)
        self.param_shard = self.share(self.param_buffer)
        self.grad_shard = self.grad_buffer if ranks.world_size == 1 else torch.zeros_like(self.param_shard)
        own = self.share(values)
        self.state = self.init_state(own if self.param_buffer is values else own.clone())  # frees the others'
        self.values = self.state.get("values", self.param_shard)  # in fp32 where there are such
        self.state |= {f"average {i}": torch.zeros_like(own, dtype=wide(own.dtype)) for i in averages}

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the part of a buffer that belongs to each parameter, in its shape."""
        parts = buffer.split(self.rows_per_param)
        return [part.flatten()[: p.numel()].view_as(p) for part, p in zip(parts, self.params, strict=True)]

    def share(self, buffer: Tensor) -> Tensor:
        """Return the rows of a buffer that belong to this rank."""
        return buffer.chunk(self.ranks.world_size)[self.ranks.rank]

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters to those before."""
        torch._foreach_add_(self.grad_views, grads)

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; each gets the sums of its rows."""
        self.wait_for_grads = start_collective(reduce_scatter, self.grad_shard, self.grad_buffer)

    def update(self, now: Plan) -> None:
        """Update this rank's rows with the mean over the sequences, and start to send them to the other ranks."""
        self.wait_for_grads()
        if self.cfg.batch_sequences > 1:
            self.grad_shard.div_(self.cfg.batch_sequences)
        self.update_shard(self.param_shard, self.grad_shard, now)
        self.grad_buffer.zero_()
        self.wait_for_params = self.gather()

    def gather(self) -> Callable[[], object]:
        """Start to send this rank's parameters to the others, and return a function that waits for theirs."""
        return start_collective(all_gather, self.param_buffer, self.param_shard)

    def tick(self, step: int) -> None:
        """Move the averages of this rank's rows."""
        for i, row in self.averages.items():
            if rate := row.rate_at(step, self.cfg.num_iterations):
                average = self.state[f"average {i}"]
                average.lerp_(self.values.to(average.dtype), rate)

    def finish(self) -> None:
        """Blend the averages in, and give the parameters together the norm that they had."""
        if not self.averages:
            return
        before = blended = self.values.to(wide(self.values.dtype))
        for i, row in self.averages.items():
            blended = blended.lerp(self.state[f"average {i}"], row.blend)
        squares = torch.stack([t.square().sum() for t in (before, blended)])
        start_collective(dist.all_reduce, squares)()
        if any(row.same_norm for row in self.averages.values()):
            blended *= (squares[0] / squares[1]).sqrt()
        self.values.copy_(blended)
        self.param_shard.copy_(blended)
        self.gather()()


def numbers(cfg: Hyperparameters, *values: float) -> Sequence[Tensor]:
    """Return numbers as tensors, as each new value of a Python number would need a graph of its own."""
    dtype = wide(getattr(torch, cfg.dtype))
    return torch.tensor(values, dtype=dtype).to(cfg.device, non_blocking=True).unbind()


@cache
def compiled(function: Callable, wanted: bool, dynamic: bool) -> Callable:
    """Return what an optimizer does to its rows, compiled if `wanted`. dynamic: one graph serves all sizes."""
    return torch.compile(function, fullgraph=True, dynamic=dynamic) if wanted else function


def adam_update(shard, grad, m, v, rate, eps, decay, beta1, beta2) -> None:
    """Step rows as `Adam.update_shard` does, in operations of which the compiler makes one kernel, casts and all."""
    assert shard.size(1) == 16  # tells the compiler that a thread may move several numbers at once
    grad = grad.to(m.dtype)
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    old = shard.to(m.dtype)
    shard.copy_(old - rate * m / (v.sqrt() + eps) - decay * old * (m * old > 0))


class Adam(ShardedOptimizer):
    """Step tables, head, scalars and gates by Adam (arXiv:1412.6980).

    In gpt2 it steps every other time, on the sum of two gradients (record 39, @classiclarryd), with moments in fp32
    (record 56, @ChrisJMcCormick). The weight decay is cautious (record 50, @roeeshenberg). Tables later step every
    fourth time (`Plan.adam`).
    """

    def init_state(self, values: Tensor) -> dict[str, Tensor]:
        dtype = wide(values.dtype)
        return {name: torch.zeros_like(values, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}

    def update_shard(self, shard: Tensor, grad: Tensor, now: Plan) -> None:
        m, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        rate, *others = now.adam(self.groups[0])  # all have the same row
        update = compiled(adam_update, self.cfg.compile, dynamic=True)
        update(shard, grad, m, v, *numbers(self.cfg, rate, self.cfg.adam_eps, *others))


MAPS = (  # a, b, c of each step: together they take singular values from 0.003 to 1 / 1.05 near 1
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def whiten(G: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Approximate U V' for every matrix U S V' of G (n, rows, cols), in `dtype`. A zero matrix stays zero.

    Six steps of a quintic Newton-Schulz iteration (Keller Jordan, https://kellerjordan.github.io/posts/muon), with
    coefficients that differ from step to step, like those of the Polar Express (arXiv:2505.16932; record 38,
    @varunneal).
    """
    norms = G.norm(dim=(-2, -1), keepdim=True)
    X = (G / (1.05 * norms + 1e-6)).to(dtype)
    for a, b, c in MAPS:  # X <- a X + b (X X') X + c (X X')^2 X
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def equalize(update: Tensor, lanes: Tensor, beta2: float, dim: int) -> Tensor:
    """Divide lanes of matrices by their RMS, which `lanes` averages over steps, and give the matrices their norm back.

    Means are over dimension `dim`, the shorter one: lanes are columns, or rows where these are no fewer. So there is
    one for each hidden unit of an MLP (NorMuon, arXiv:2510.05491; records 41, @li_zichong, 48, @ChrisJMcCormick).
    """
    lanes.lerp_(update.square().mean(dim, keepdim=True), 1 - beta2)
    even = update / lanes.clamp(min=1e-10).sqrt()
    norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, even))
    return even * (norms / new_norms.clamp(min=1e-10))


def muon_update(
    shard, grad, factors, values, fast, slow, lanes, fast_beta, fast_share, momentum, lr: Tensor, decay, beta2, dim
) -> None:
    """Step matrices as `Muon` says."""
    grad = grad.to(values.dtype)
    fast.lerp_(grad, 1 - fast_beta)
    slow.lerp_(grad, torch.full_like(lr, 0.02))
    u = whiten(grad.lerp(slow.lerp(fast, fast_share), momentum), shard.dtype)
    u = equalize(u.to(values.dtype), lanes, beta2, dim)
    if decay:
        u += decay * lr * values * (slow * values >= 0)
    values -= lr * factors * u
    shard.copy_(values)


class Muon(ShardedOptimizer):
    """Step hidden matrices of one shape by MomentUm Orthogonalized by Newton-Schulz (Keller Jordan and others, 2024).

    With g the mean gradient of the step, in the lerp form of record 15, and two momenta (ANVIL, record 92):

        fast <- b fast + (1 - b) g,    b = momentum, from slow_rail_from on 0.85
        slow <- 0.98 slow + 0.02 g
        m = fast, from slow_rail_from on 0.4385 fast + 0.5615 slow
        u <- equalize(whiten(momentum m + (1 - momentum) g))
        p <- p - factor lr (u + decay lr p [slow p >= 0])

    The factor is the lr of a matrix's group. The weight decay is cautious, only towards 0 (record 43, @varunneal).
    """

    by_matrix = True  # gpt2's MLPs have 22: each of 8 ranks steps 3, some of them padding
    keeps_values = True  # bf16 alone would round small steps away

    def init_state(self, values: Tensor) -> dict[str, Tensor]:
        rows, columns = values.shape[-2:]
        self.mean_dim = -1 if rows >= columns else -2
        rows_and_groups = zip(self.rows_per_param, self.groups, strict=True)
        self.factors = self.share(torch.cat([values.new_full((n, 1, 1), group.lr) for n, group in rows_and_groups]))
        lanes = torch.zeros_like(values.narrow(self.mean_dim, 0, 1))
        return dict(values=values, fast=torch.zeros_like(values), slow=torch.zeros_like(values), lanes=lanes)

    def update_shard(self, shard: Tensor, grad: Tensor, now: Plan) -> None:
        beta, share = (0.85, 0.4385) if now.two_rails else (now.momentum, 1.0)
        rates = numbers(self.cfg, beta, share, now.momentum, self.cfg.muon_lr * now.lr)
        group = self.groups[0]  # all agree in decay and beta2
        state = [self.state[name] for name in ("values", "fast", "slow", "lanes")]
        update = compiled(muon_update, self.cfg.compile, dynamic=False)
        update(shard, grad, self.factors, *state, *rates, group.decay, group.beta2, self.mean_dim)


OPTIMIZERS = {"Muon": Muon, "Adam": Adam}


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Put every parameter into exactly one group. Muon steps matrices of one shape together, also those of two rows."""
    cfg = gpt.cfg
    members: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in gpt.named_parameters():
        group = row_of(name, cfg)
        key: tuple = (group, p.dtype)
        if OPTIMIZERS[group.optimizer].by_matrix:
            key = (group._replace(names="", lr=0.0), p.shape[-2:])
        averages = tuple(i for i, row in enumerate(cfg.averages) if matches(name, row.names))
        members.setdefault((group.optimizer, averages, repr(key)), {})[name] = p  # rows from JSON have lists
    embed, head = (row_of(name, cfg)._replace(names="") for name in ("embed.weight", "lm_head"))
    if cfg.tied_frac and embed != head:
        raise UserError(f"embed.weight has {embed}, lm_head {head}: expected the same, or --tied_frac 0")
    optimizers = []
    for (kind, averages, _), params in members.items():
        rows = {i: cfg.averages[i] for i in averages}
        optimizers.append(OPTIMIZERS[kind](params, [row_of(name, cfg) for name in params], rows, cfg, ranks))
    # Largest first: its update overlaps the other reduce-scatters, and only the smallest all-gather overlaps nothing
    return sorted(optimizers, key=lambda optimizer: -optimizer.grad_buffer.nbytes)


@torch.no_grad()
def step_optimizers(optimizers: Sequence[ShardedOptimizer], now: Plan) -> None:
    """Take a step on the gradients, summed over this rank's sequences, and clear those that were used.

    Three phases, in which the due optimizers' gradients travel, are used, and values travel back: while one computes,
    the gradients of the next and the values of the last are on their way.
    """
    due = [optimizer for optimizer in optimizers if now.is_due(optimizer.groups[0])]
    for optimizer in due:
        optimizer.reduce()
    for optimizer in due:
        optimizer.update(now)
    for optimizer in due:
        optimizer.wait_for_params()
    for optimizer in optimizers:
        optimizer.tick(now.step)


# ---- N-grams: a table of which a cycle of steps reads few rows -------------------------------------------------------
def row_adam_update(rows, v, grad, rate, eps, decay, added, n) -> tuple[Tensor, Tensor]:
    """Return rows and their means of squares after a step as `NgramTable.update` says.

    grad: summed over n sequences. `added` is 1 - beta2.
    """
    grad = grad.to(v.dtype) / n
    v = v + added * grad.square().mean(1, keepdim=True)
    old = rows.to(v.dtype)
    u = rate * grad / (v.sqrt() + eps)
    return (old - u - decay * old * (u * old > 0)).to(rows.dtype), v


def add_rows(sums: Tensor, places: Tensor, grad: Tensor) -> None:
    """Add gradients of n-grams (n, T, K) to the rows of `sums` at `places` (n, T)."""
    sums.index_add_(0, places.flatten(), grad.flatten(0, 1).to(sums.dtype))


ROWS_AT_ONCE = 2**18  # that are copied: 400 MB in gpt2


class NgramTable:
    """Hold the embeddings of n-grams, and step those that were read.

    Each rank owns an equal part of the rows, and the table is there once: no other tensor has its size. When a cycle
    begins, its ranks fetch the rows that they will read; when it ends, summed gradients go back.
    """

    def __init__(self, cfg: Hyperparameters, ranks: Ranks, device: torch.device):
        self.cfg = cfg
        self.ranks = ranks
        self.group = row_of("ngrams", cfg)
        dtype = getattr(torch, cfg.dtype)
        rows = -(-cfg.ngram_rows // ranks.world_size)
        self.first = rows * ranks.rank  # number of the first row
        self.rows = torch.zeros(rows, cfg.model_dim, dtype=dtype, device=device)
        self.v = torch.zeros(rows, 1, dtype=wide(dtype), device=device)
        self.sum_dtype = torch.float16 if dtype == torch.bfloat16 else dtype  # sums need bits more than range

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send each rank its part of the rows, and return what all have sent."""
        got = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(got, rows, received, sent)
        return got

    def fetch(self, reads: Reads) -> Tensor:
        """Return the rows for `Inputs.rows`: with one process all, else those that this rank reads."""
        if self.ranks.world_size == 1:
            return self.rows
        return self.exchange(self.rows[reads.asked], reads.asked_counts, reads.counts)

    def update(self, reads: Reads, sums: Tensor, now: Plan) -> None:
        """Step the rows that the cycle has read by an Adam without momentum, and with one v for each row.

        v decays for all rows. sums: of the gradients of this rank's sequences.
        """
        if self.ranks.world_size > 1:
            got = self.exchange(sums, reads.counts, reads.asked_counts)
            sums = got.new_zeros(len(reads.touched), got.size(1)).index_add_(0, reads.merged, got)
        rate, decay, _, beta2 = now.adam(self.group)
        rates = numbers(self.cfg, rate, self.cfg.adam_eps, decay, 1 - beta2, self.cfg.batch_sequences)
        update = compiled(row_adam_update, self.cfg.compile, dynamic=True)
        self.v *= beta2
        for ids, grad in zip(reads.touched.split(ROWS_AT_ONCE), sums.split(ROWS_AT_ONCE), strict=True):
            rows, v = update(self.rows[ids], self.v[ids], grad, *rates)
            self.rows.index_copy_(0, ids, rows)
            self.v.index_copy_(0, ids, v)

    def state(self) -> dict[str, Tensor]:
        """Return the rows that ever had a gradient, on the host."""
        ids = self.v.flatten().nonzero().flatten()
        parts = ids.split(ROWS_AT_ONCE)
        rows, v = (torch.cat([t[part].cpu() for part in parts]) for t in (self.rows, self.v))
        return dict(ids=ids.cpu() + self.first, rows=rows, v=v)

    def restore(self, ids: Tensor, rows: Tensor, v: Tensor) -> None:
        """Set this rank's among these rows to what `state` returned on any rank."""
        for some in zip(*(t.split(ROWS_AT_ONCE) for t in (ids - self.first, rows, v)), strict=True):
            is_own = (some[0] >= 0) & (some[0] < len(self.rows))
            places, *values = (t[is_own].to(self.rows.device) for t in some)
            for own, new in zip((self.rows, self.v), values, strict=True):
                own.index_copy_(0, places, new.to(own.dtype))


# ---- Log: the clock, the curves and the files of a run ---------------------------------------------------------------
# How far a run is, as a checkpoint holds it. must_match: what has to be the same on all ranks and when the run goes on;
# curves: (step, loss, ms) by name; turn: which files have the tensors; marks: of these files
Saved = namedtuple(
    "Saved", "run_id seed must_match step ms curves turn marks", defaults=("", None, {}, 0, 0.0, {}, 0, [])
)


def first_line(error: BaseException) -> str:
    """Return what an error says in one line, or else its name."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def digest(value) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def mark(path: Path) -> str:
    """Return what tells a file of tensors from any other: a hash of the checksums in its zip archive."""
    if not path.is_file():  # a pipe would never end
        raise OSError("there is no such file")
    with zipfile.ZipFile(path) as archive:
        return digest([part.CRC for part in archive.infolist()])


class RunLog:
    """Keep the clock and the curves of a run. On rank 0 also write LOG_DIR/RUN_ID.txt and tell the console."""

    def __init__(self, cfg: Hyperparameters, is_main: bool, saved: Saved):
        self.cfg = cfg
        self.is_main = is_main
        self.saved = saved
        self.curves = dict(saved.curves)
        self.asked = False  # whether a signal has asked a rank to stop
        self.path = Path(cfg.log_dir) / f"{cfg.run_id}.txt"
        self.file = self.open(saved.step > 0) if is_main else None
        self.device = getattr(torch, cfg.device)  # torch.cuda, or torch.cpu, where there is nothing to wait for
        self.pending: deque = deque()  # losses on their way to the host

    def open(self, goes_on: bool) -> TextIO:
        """Open and lock the log. Refuse if another run has written, or is writing, under its name."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file: TextIO = self.path.open("a", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # dies with the process
            except BlockingIOError:
                raise OSError("another process is writing it") from None
            except OSError:  # the file system has no locks
                pass
            kinds = [".json"] if self.cfg.resume else [".json", ".checkpoint", ".pt", ".ngrams0", ".ngrams1"]
            taken = [kind for kind in kinds if self.path.with_suffix(kind).exists()]
            if taken or (file.tell() and not self.cfg.resume):
                raise OSError(f"this run is there already {' '.join(taken)}")
            if file.tell() and not goes_on:  # a run that was killed before its first checkpoint
                self.path.rename(self.path.with_suffix(f".{time.time_ns()}.torn"))
                file = self.open(goes_on)
            return file
        except (OSError, ValueError) as error:  # the latter: a null byte
            raise UserError(f"log {self.path}: {first_line(error)}; choose another --run_id or --log_dir") from None

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Show how far the run is. If it stops, say why, and how it goes on."""
        no_bar = not (self.is_main and os.isatty(1) and os.isatty(2))
        initial, total = (num_tokens(steps, self.cfg) for steps in (self.saved.step, self.cfg.num_iterations))
        options = dict(bar_format="{desc} |{bar}| {rate_fmt} {remaining} left", dynamic_ncols=True, disable=no_bar)
        self.bar = tqdm(initial=initial, total=total, unit="tok", unit_scale=True, **options)
        try:
            yield
        except BaseException as error:
            resume = f"; to go on, add --resume {self.path.with_suffix('.checkpoint')}" if self.saved.step else ""
            self.write(f"stopped: {first_line(error)}{resume}", console=bool(resume))
            raise
        finally:
            self.bar.close()
            if self.file:
                with contextlib.suppress(OSError):
                    self.file.close()

    def start_clock(self, ms: float) -> None:
        """Go on from `ms` of training, once the device has done all that it was given."""
        self.device.synchronize()
        self.bar.unpause()
        self.started = time.perf_counter() - ms / 1000

    def read_clock(self) -> float:
        """Return the milliseconds of training so far, without validations and checkpoints."""
        return 1000 * (time.perf_counter() - self.started)

    def write(self, text: str, console: bool = False) -> None:
        """Write a line. If the disk is full or the console has gone away, the training goes on."""
        if not self.is_main:
            return
        for stream in [self.file, sys.stdout] if console else [self.file]:
            with contextlib.suppress(OSError, ValueError), tqdm.external_write_mode(stream):  # above the bar
                print(text, file=stream, flush=True)

    def send_loss(self, step: int, sent: Tensor) -> None:
        """Send `Trainer.sent` of a step to the host without waiting, and log the loss of 8 steps ago."""
        on_host = sent.to("cpu", non_blocking=True)
        arrived = self.device.Event()
        arrived.record()
        self.pending.append((step, on_host, arrived))
        self.flush(lag=8 if sent.is_cuda else 0)

    def flush(self, lag: int = 0) -> None:
        """Wait for the losses of all but the last `lag` steps, and log them; a pipe sees every 25th."""
        while len(self.pending) > lag:
            step, sent, arrived = self.pending.popleft()
            arrived.synchronize()
            loss, asked = sent.tolist()
            self.asked |= asked > 0
            self.log_loss("train_loss", step, loss, self.read_clock(), self.bar.disable and step % 25 == 0)
            self.bar.update(self.cfg.batch_sequences * Plan(step - 1, self.cfg).seq_len)

    def log_loss(self, name: str, step: int, loss: float, ms: float, console: bool = True) -> None:
        """Log a loss, and add it to its curve."""
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} {loss:.4f} at step {step}: lower learning rates or change --seed")
        self.curves.setdefault(name, []).append((step, loss, ms))
        last = " ".join(f"{name} {curve[-1][1]:.4f}" for name, curve in self.curves.items())
        self.bar.set_description_str(f"step {step} {last}", refresh=False)
        timing = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self.write(f"step:{step}/{self.cfg.num_iterations} {name}:{loss:.4f} {timing}", console)

    def save(self, suffix: str, state: dict | bytes, note: str, by_all: bool = False) -> list[str]:
        """Write a file beside the log, whole or not at all, through to the disk, and say how it went.

        by_all: each rank has a file of its own. Return the files' marks, or none if a rank failed.
        """
        path = self.path.with_suffix(suffix)
        part = self.path.with_suffix(f"{suffix}.part")
        own: object = ""
        try:
            if self.is_main or by_all:
                part.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as file:
                    torch.save(state, file) if isinstance(state, dict) else file.write(state)
                    file.flush()
                    os.fsync(file.fileno())
                own = mark(part) if by_all else own
                part.replace(path)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            own = error
        marks = gather(own)
        problems = [f"not saved: {first_line(it)}; is the disk full?" for it in marks if isinstance(it, Exception)]
        self.write(f"{path}: {[*problems, f'saved; {note}'][0]}", console=bool(problems) or suffix != ".json")
        return [] if problems else marks


# ---- Training --------------------------------------------------------------------------------------------------------
def use_device(cfg: Hyperparameters, ranks: Ranks) -> torch.device:
    """Return this rank's device, or share out the threads of a CPU, and refuse one that multiplies wrongly."""
    if cfg.device == "cuda":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
        return device
    if cfg.cpu_threads:
        torch.set_num_threads(max(1, cfg.cpu_threads // ranks.local_world_size))
    ones = torch.ones(128, 1024, dtype=getattr(torch, cfg.dtype))
    if not (ones @ ones.T == 1024).all():  # seen in bf16 where OpenMP starts fewer threads than torch counts on
        raise UserError("products are wrong here: unset OMP_DYNAMIC and OMP_THREAD_LIMIT")
    return torch.device("cpu")


class CUDAGraphs:
    """Replay the launches of a function by a CUDA graph for each of its inputs' shapes (record 92).

    One by one, those of a step of gpt2 took a host 23 to 55 ms, more than the kernels of a small batch take (measured:
    one H100, 16 cores). A graph reads copies of its inputs, and its results last until the next call.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.captured: dict[tuple, tuple] = {}
        self.pool = torch.cuda.graph_pool_handle()  # of memory for all graphs, as one runs at a time

    def __call__(self, *args):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self.captured:
            result = self.function(*args)  # compiles; capturing computes nothing
            own = tree_map_only(Tensor, torch.clone, args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                later = self.function(*own)
            own_tensors = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)]
            self.captured[shapes] = graph, own_tensors, later
            return result
        graph, own_tensors, result = self.captured[shapes]
        for mine, theirs in zip(own_tensors, tensors, strict=True):
            mine.copy_(theirs)
        graph.replay()
        return result


class Trainer:
    """Hold model and optimizers, the same on all ranks from `warm_up` on, and take the steps of a run."""

    # Two hooks for tools that measure a step: who moves rows of n-grams, and a context for a part of it by its name
    table_class, part = NgramTable, contextlib.nullcontext

    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        self.cfg = cfg
        self.ranks = ranks
        self.device = use_device(cfg, ranks)
        torch.manual_seed(cfg.seed)
        self.gpt = GPT(cfg).to(self.device)
        self.base = begin_with(self.gpt, Path(cfg.init_from)) if cfg.init_from else []  # rows of n-grams
        self.model = torch.compile(self.gpt, fullgraph=True, dynamic=False) if cfg.compile else self.gpt
        self.optimizers = build_optimizers(self.gpt, ranks)
        self.grads = {name: grad for o in self.optimizers for name, grad in zip(o.names, o.grad_views, strict=True)}
        self.gradients = CUDAGraphs(self.add_gradients) if cfg.cuda_graphs else self.add_gradients
        self.table = self.table_class(cfg, ranks, self.device)
        self.reader = Reader(cfg, ranks, self.device)
        self.reads: Reads | None = None  # of the present cycle
        self.told: list[str] = []  # signals that asked this rank to stop

    def train_step(self, now: Plan, sequences: Sequence[Inputs], reads: Reads) -> Tensor:
        """Take a step on this rank's sequences, and return the mean loss over those of all ranks."""
        losses = []
        settings = Settings.of(now, self.device)
        if reads is not self.reads:  # a cycle begins
            self.reads = reads
            self.rows = self.table.fetch(reads)
            shape = len(reads.ids), self.cfg.model_dim
            self.sums = torch.zeros(shape, dtype=self.table.sum_dtype, device=self.device)
        for inputs in sequences:
            loss, grad = self.gradients(inputs, F.embedding(inputs.rows, self.rows), settings)
            compiled(add_rows, self.cfg.compile, dynamic=True)(self.sums, inputs.places, grad)
            losses.append(loss / len(inputs.tokens))
        mean = torch.stack(losses).sum() / self.cfg.batch_sequences
        # And how many signals ask to stop, of all ranks: so all stop at the same step
        self.sent = F.pad(mean[None], (0, 1), value=len(self.told))
        wait = start_collective(dist.all_reduce, self.sent)
        if now.tied and now.is_due(row_of("lm_head", self.cfg)):  # both step on the sum of their gradients
            self.grads["embed.weight"] += self.grads["lm_head"]  # (records 51, 53: @varunneal)
            self.grads["lm_head"].copy_(self.grads["embed.weight"])
        with self.part("optimizers"):
            step_optimizers(self.optimizers, now)
        if now.is_due(self.table.group):
            self.table.update(reads, self.sums, now)
        wait()
        return self.sent[0]

    def add_gradients(self, inputs: Inputs, ngrams: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """Add the gradients of a sequence to those before. Return its summed loss, and the gradient by its n-grams."""
        ngrams = ngrams.detach().requires_grad_()
        loss = self.model(inputs, ngrams, settings)
        # A sum over tokens, as in the record: gradients grow with train_seq_len. Only the optimizers divide by the
        # number of sequences: FP8 sees the same for any number of processes, and fewer gradients become 0
        sources = [ngrams, *chain(*(optimizer.params for optimizer in self.optimizers))]
        by_ngrams, *grads = torch.autograd.grad(loss * self.cfg.grad_scale, sources, allow_unused=True)
        parts = iter(grads)
        for optimizer in self.optimizers:
            optimizer.add([*islice(parts, len(optimizer.params))])
        return loss.detach(), torch.zeros_like(ngrams) if by_ngrams is None else by_ngrams  # None: no layer reads them

    def finish(self) -> None:
        """Blend the averages into the parameters, after the last step."""
        for optimizer in self.optimizers:
            optimizer.finish()
        getattr(torch, self.device.type).synchronize()

    def canon(self, is_last: bool) -> Tensor | None:
        """Return what no token may be followed by: nothing but in the last validation (record 91, @jvarho)."""
        bits = read_canon(self.cfg)
        return torch.from_numpy(bits * is_last).to(self.device) if len(bits) else None

    def score(self, now: Plan, sequences: Sequence[Inputs], reads: Reads, canon: Tensor | None) -> Tensor | int:
        """Return the summed loss of a rank's sequences, for all ranks at once."""
        rows = self.table.fetch(reads)
        settings = Settings.of(now, self.device)
        ngrams = [F.embedding(inputs.rows, rows) for inputs in sequences]
        # Looked up here: within the graph, all slices of logits would read one table, and so become one kernel
        never = [None if canon is None else F.embedding(inputs.tokens, canon) for inputs in sequences]
        return sum(self.model(i, n, settings, mask) for i, n, mask in zip(sequences, ngrams, never, strict=True))

    @torch.no_grad()
    def evaluate(self, step: int, batches: Sequence[Batch], may_stop: bool = False) -> float | None:
        """Return the mean loss over the validation tokens, or None if a rank was told to stop.

        A rank may score more sequences than others, or none.
        """
        now = Plan(step, self.cfg, trains=False)
        canon = self.canon(is_last=step == self.cfg.num_iterations)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.ranks.world_size
        cycles = (([now], [[*chain(*batches[i : i + size])]]) for i in range(0, len(batches), size))
        for sequences, reads in self.reader.read(cycles):
            if may_stop and any(gather(self.told)):
                return None
            total += self.score(now, sequences, reads, canon)
        start_collective(dist.all_reduce, total)()
        return total.item() / self.cfg.val_tokens

    def dummies(self, now: Plan, length: int) -> tuple[list[Inputs], Reads]:
        """Return inputs of sequences of some length."""
        tokens = np.arange(length + 1) % 16  # few, as all are classes of the softmax
        (sequences,), reads = self.reader.on_device(self.reader.make([now], [[tokens] * self.cfg.batch_sequences]))
        return sequences, reads

    def warm_up(self, saved: dict[str, Tensor] | None = None) -> None:
        """Run every graph once on dummy tokens, then restore this rank's state, or `saved`."""
        saved = saved or {name: t.to("cpu", copy=True) for name, t in self.state().items()}
        offsets = [*self.reader.offsets]
        plans = [Plan(step, self.cfg) for step in range(self.cfg.num_iterations)]
        for now in {(now.seq_len, now.classes, now.num_next, len(now.weights)): now for now in plans}.values():
            now.step = self.cfg.all_step - 1
            self.train_step(now, *self.dummies(now, now.seq_len))
        now = Plan(self.cfg.num_iterations, self.cfg, trains=False)
        with torch.no_grad():
            sequences, reads = self.dummies(now, self.cfg.val_seq_len)
            self.score(now, sequences[:1], reads, self.canon(is_last=False))
        self.table.rows.zero_()  # as all begin; of these there is no copy
        self.table.v.zero_()
        for part in self.base:
            self.table.restore(**part)
        self.reader.offsets = offsets
        self.restore(saved)

    def peak_memory_mib(self) -> int:
        """Return the most memory that torch allocated on the GPU, or that the whole process held on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() // 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's share of what a step changes, but for the rows of n-grams."""
        shares = [(o.names[0], o.state | dict(params=o.param_shard)) for o in self.optimizers]
        return {f"{first} {name}": tensor for first, state in shares for name, tensor in state.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Set this rank's share to what `state` returned, n-grams to those saved beside it, and send the parameters."""
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])
        if "ids" in saved:
            self.table.restore(saved["ids"], saved["rows"], saved["v"])
        for optimizer in self.optimizers:
            optimizer.gather()()


def save_checkpoint(trainer: Trainer, log: RunLog, step: int, ms: float) -> None:
    """Write the tensors of each rank, and then the file that names them. Two files of a rank take turns.

    So the checkpoint before is whole until there is a newer one.
    """
    turn = 1 - log.saved.turn
    tensors = trainer.state() | trainer.table.state()
    marks = log.save(f".{turn}.rank{trainer.ranks.rank}", tensors, "tensors", by_all=True)
    saved = log.saved._replace(step=step, ms=ms, curves=log.curves, turn=turn, marks=marks)
    if marks and log.save(".checkpoint", saved._asdict() | dict(seal=digest(saved)), f"step {step}"):
        log.saved = saved


@contextlib.contextmanager
def undisturbed(told: list[str]) -> Iterator[None]:
    """Put signals that ask to stop into `told`, so that a checkpoint comes first, and keep garbage collection short."""

    def tell(number: int, _) -> None:
        told.append(signal.Signals(number).name)
        if told.count("SIGINT") > 1 + dist.is_initialized():  # Ctrl-C again stops at once; torchrun repeats the first
            raise KeyboardInterrupt

    with contextlib.ExitStack() as stack:
        gc.collect()
        gc.freeze()  # one collection of all there is was measured at 0.6 s (nanochat issue 477)
        stack.callback(gc.unfreeze)
        with contextlib.suppress(ValueError):  # only the main thread may
            for name in "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU".split():
                number = getattr(signal, name)
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores one
                    stack.callback(signal.signal, number, signal.signal(number, tell))
        yield


def train(trainer: Trainer, data: Data, log: RunLog) -> int:
    """Train to the end. Return the number of graphs compiled on the clock: 0, or a bug.

    A signal, which schedulers send before they kill, lets the run save a checkpoint and stop, at the end even one of
    what only has to be validated.
    """
    cfg = trainer.cfg
    start = log.saved.step
    graphs = torch._dynamo.utils.counters["stats"] if cfg.compile else Counter()  # importing it takes a second
    batches = trainer.reader.read(train_cycles(data["train"], cfg))
    for _ in range(start):  # a resumed run has trained on them; classes depend on all tokens before
        next(batches)
    with undisturbed(trainer.told):
        compiled = graphs["unique_graphs"]
        log.start_clock(log.saved.ms)
        for step in range(start, cfg.num_iterations + 1):
            is_last = step == cfg.num_iterations
            can_stop = is_last or step % cfg.all_step == 0  # no gradients wait for an update
            stops = can_stop and log.asked
            saves = start < step and not is_last and cfg.checkpoint_every and step % cfg.checkpoint_every == 0
            validates = is_last or (cfg.val_loss_every and step % cfg.val_loss_every == 0)
            if is_last and start < step:
                trainer.finish()
            if stops or saves or validates:
                log.flush()
                ms = log.read_clock()
                if saves:
                    save_checkpoint(trainer, log, step, ms)
                if validates and not stops:  # after saving: a run that resumes here validates, too
                    loss = trainer.evaluate(step, data["val"], can_stop)
                    stops = loss is None
                    if loss is not None:
                        log.log_loss("val_loss", step, loss, ms)
                if stops:
                    if log.saved.step < step:
                        save_checkpoint(trainer, log, step, ms)
                    raise KeyboardInterrupt(" ".join({*chain(*gather(trainer.told))}))
                log.start_clock(ms)
            if not is_last:
                trainer.train_step(Plan(step, cfg), *next(batches))
                log.send_loss(step + 1, trainer.sent)
        return graphs["unique_graphs"] - compiled


# ---- Run: ranks that agree, checkpoints, summary ---------------------------------------------------------------------
def init_distributed() -> Ranks:
    """Join the ranks that torchrun's environment names. Objects travel by gloo: ranks need not agree on a device."""
    # Segments of GPU memory that grow waste less of it. torch reads this when CUDA starts, not when it is imported
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        ranks = Ranks(*(int(os.environ.get(name.upper(), default)) for name, default in Ranks._field_defaults.items()))
        if not 0 <= ranks.rank < ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
            raise ValueError(f"impossible {ranks}")
        # Every rank compiles in as many processes as there are cores, up to 32: let the ranks share the cores
        workers = (os.cpu_count() or 1) // ranks.local_world_size
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(max(1, workers), 32)))
        if ranks.world_size > 1:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG to SIGKILL: no rank outlives its launcher
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=30))  # one may compile while the others wait
        return ranks
    except (RuntimeError, ValueError) as error:
        raise UserError(f"RANK, WORLD_SIZE: {first_line(error)}; use torchrun, or unset them") from None


@contextlib.contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Do what can fail on one rank alone: then all ranks fail, and one of each node says why."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = error
    for rank, theirs in enumerate(gather(problem)):
        if theirs:
            if ranks.local_rank > 0:
                sys.exit(theirs.code)
            raise type(theirs)(f"rank {rank}: {theirs}" if ranks.world_size > 1 else str(theirs))


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Say in one line what is wrong with a file: damaged and odd ones fail in many ways."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = "it has no " * isinstance(error, KeyError) + first_line(error)
        raise UserError(f"{path}: not a sound {kind} of this script: {told}") from None


def load(path: Path, kind: str, expected: str = "", mmap: bool = False) -> dict:
    """Return what `RunLog.save` wrote, with the mark that is expected, if any.

    mmap: tensors stay on the disk until they are used, and in large files nothing looks for damage.
    """
    with reading(path, kind):
        if expected not in ("", mark(path)):
            raise OSError("it is of another run, step or rank")
        if (not mmap or path.stat().st_size < 2**30) and zipfile.ZipFile(path).testzip():
            raise OSError("it is damaged")
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))


def load_ngrams(model: Path, marks: Sequence[str]) -> list[dict[str, Tensor]]:
    """Open the rows of n-grams beside a model, of each process that trained it: gpt2's take up to 130 GB."""
    paths = map(model.with_suffix, (f".ngrams{rank}" for rank in range(len(marks))))
    return [load(path, "part of a model", expected, mmap=True) for path, expected in zip(paths, marks, strict=True)]


def begin_with(gpt: GPT, path: Path) -> list[dict[str, Tensor]]:
    """Give a model the weights that a run saved, and return its rows of n-grams. Tied tables begin as the head."""
    saved = load(path, "model")
    with reading(path, "model"):
        theirs = json.loads(saved["configuration"])
        for name in "ngram_rows", "ngram_order":  # else its rows would be those of other n-grams
            if theirs[name] != getattr(gpt.cfg, name):
                raise UserError(f"--init_from {path}: it has --{name} {theirs[name]}: give the same")
        gpt.load_state_dict(saved["model"])
        if gpt.cfg.tied_frac:
            gpt.embed.weight.data.copy_(gpt.lm_head.data)
        return load_ngrams(path, saved["rows"])


def load_checkpoint(given: Hyperparameters) -> Saved:
    """Return what --resume names. `latest`: the newest in log_dir, of run_id if given; a new run if there is none."""
    path = Path(given.resume) if given.resume else None
    if given.resume == "latest":
        paths = Path(given.log_dir).glob(f"{glob.escape(given.run_id) or '*'}.checkpoint")
        path = max(paths, key=lambda path: path.lstat().st_mtime_ns, default=None)
        if path and path.with_suffix(".json").exists():
            raise AlreadyComplete(f"{path.with_suffix('.json')}: this run is already complete")
    if path is None:
        return Saved(given.run_id, given.seed)
    state = load(path, "checkpoint")
    with reading(path, "checkpoint"):
        seal = state.pop("seal")
        saved = Saved(**state)
        if seal != digest(saved):
            raise ValueError("somebody edited it")
    if given.run_id not in ("", saved.run_id):
        raise UserError(f"--run_id {given.run_id}: {path} is of run {saved.run_id}")
    return saved


def plan_run(argv: Sequence[str], ranks: Ranks) -> tuple[Hyperparameters, Data, dict, Saved]:
    """Read flags, checkpoint and data. Return configuration, data, what ranks have to agree on, how far the run is."""
    given = parse_args(argv, ranks.world_size)
    saved = load_checkpoint(given) if ranks.rank == 0 else Saved(given.run_id, given.seed)
    cfg = resolve(dataclasses.replace(given, run_id=saved.run_id, seed=saved.seed))
    n = cfg.batch_sequences
    if n % ranks.world_size:
        raise UserError(f"{ranks.world_size} processes: expected a divisor of {n}, the number of sequences in a step")
    data = plan_data(cfg)
    may_differ = "run_id log_dir train_files val_files prefix_file canon_file save_checkpoint checkpoint_every resume"
    fields = dataclasses.asdict(cfg) | dict(seed=given.seed)
    if cfg.init_from:  # all nodes begin with the same, and so does a run that goes on, before it takes its own rows
        with reading(Path(cfg.init_from), "model"):
            fields["init_from"] = mark(Path(cfg.init_from))
    must_match = {f"--{name}": str(value) for name, value in fields.items() if name not in may_differ.split()}
    must_match |= {"processes": ranks.world_size, "torch": str(torch.__version__), "numpy": np.__version__}
    files = {"script": Path(__file__).read_bytes(), "prefixes": read_prefixes(cfg), "canonical mask": read_canon(cfg)}
    must_match |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    must_match["training tokens"] = hash_tokens(data["train"], cfg, targets=True)
    must_match["validation tokens"] = hash_tokens(data["val"], cfg, targets=False)
    return cfg, data, must_match, saved if saved.step else Saved(cfg.run_id, cfg.seed, must_match)


def describe(argv: Sequence[str], cfg: Hyperparameters, ranks: Ranks, data: Data, hashes: dict) -> str:
    """Return versions, hardware, environment, shards, hashes of tokens, flags and configuration, for the log."""
    lines = [f"Running Python {sys.version}", f"Running PyTorch {torch.__version__}, numpy {np.__version__}"]
    lines.append(f"{ranks.world_size} processes, {torch.get_num_threads()} threads each, {os.cpu_count()} cores")
    how: dict = dict(cwd=Path(__file__).parent, capture_output=True, text=True, errors="replace", timeout=20)
    for command in ("git --no-optional-locks describe --always --abbrev=40 --dirty", "lscpu", "nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            lines += [f"$ {command}", subprocess.run(command.split(), **how).stdout.strip()]
    prefixes = "TORCH", "PYTORCH", "TRITON", "CUDA", "NCCL", "OMP"  # of variables that change how it runs
    lines.append(f"environment: {json.dumps({k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)})}")
    for name, plan in data.items():
        for path in paths_of(plan):
            lines.append(f"{name} shard: {path}, {os.path.getsize(path)} bytes")
    note = "" if cfg.val_sha256 in ("", hashes["validation tokens"]) else " (not the track's: do not compare losses)"
    lines.append(f"training tokens: {num_tokens(cfg.num_iterations, cfg)}, sha256 {hashes['training tokens']}")
    lines.append(f"validation tokens: {cfg.val_tokens}, sha256 {hashes['validation tokens']}{note}")
    rows = PRESETS[cfg.preset].ngram_rows
    note = "" if cfg.ngram_rows == rows else f" (not the preset's {rows}: do not compare losses)"
    lines += [f"rows of n-grams: {cfg.ngram_rows}{note}", f"canonical mask: {cfg.canon_file or 'none'}"]
    lines += [f"flags: {json.dumps(argv)}", f"configuration: {json.dumps(dataclasses.asdict(cfg))}"]
    return "\n".join(lines)


def report(log: RunLog, data: Data, trainer: Trainer, recompiles: int) -> dict:
    """Log the summary, write the result and the model, and say what to try next."""
    cfg = trainer.cfg
    peak = trainer.peak_memory_mib()
    _, val_loss, ms = log.curves["val_loss"][-1]
    result = dict(
        num_iterations=cfg.num_iterations,
        seed=cfg.seed,
        target_loss=cfg.target_loss,
        val_loss=val_loss,
        train_time_ms=ms,
        peak_memory_mib=peak,
        recompiles=recompiles,
        log=str(log.path),
        val_curve=log.curves["val_loss"],
        train_curve=log.curves["train_loss"],
    )
    for name, batch in dict(first=data["train"][0], last=data["train"][-1]).items():
        path, pieces = batch[0]
        log.write(f"{name} batch: {path} position {pieces[0, 0]}")
    log.write(f"recompiles after the clock started: {recompiles}", console=recompiles > 0)
    log.write(f"peak memory: {peak} MiB")
    if cfg.save_checkpoint:
        rows = log.save(f".ngrams{trainer.ranks.rank}", trainer.table.state(), "rows of n-grams", by_all=True)
        model = dict(configuration=json.dumps(dataclasses.asdict(cfg)), model=trainer.gpt.state_dict(), rows=rows)
        log.save(".pt", model, f"next: {shlex.join([sys.executable, 'sample.py', str(log.path.with_suffix('.pt'))])}")
    log.save(".json", json.dumps(result).encode() + b"\n", "the result")
    text = f"val_loss {val_loss:.4f} after {ms / 1000:.2f} s"
    if cfg.target_loss and cfg.val_sha256 in ("", log.saved.must_match["validation tokens"]):  # or else another text
        text += f"; target {cfg.target_loss} {'reached' if val_loss <= cfg.target_loss else 'not reached'}"
    log.write(f"{text}; peak memory {peak} MiB; log: {log.path}", console=True)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. Raise UserError, FloatingPointError or KeyboardInterrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    source = Path(__file__).read_text(encoding="utf-8")  # before anybody edits it
    ranks = init_distributed()
    with together(ranks):
        cfg, data, must_match, own = plan_run(argv, ranks)
    saved = gather(own)[0]
    cfg = dataclasses.replace(cfg, run_id=saved.run_id, seed=saved.seed)
    with together(ranks):
        for name, value in saved.must_match.items():
            if value != (here := must_match.get(name)):
                raise UserError(f"has {name} {here}, and the run began with {value}: give the same")
        tensors = {}
        if saved.step:
            folder = Path(cfg.log_dir) if cfg.resume == "latest" else Path(cfg.resume).parent
            path = folder / f"{saved.run_id}.{saved.turn}.rank{ranks.rank}"
            tensors = load(path, "part of the checkpoint", saved.marks[ranks.rank])
        trainer = Trainer(cfg, ranks)
        log = RunLog(cfg, ranks.rank == 0, saved)
    with log.going_on():
        if saved.step:
            log.write(f"resumed at step {saved.step}, log: {log.path}, flags: {json.dumps(argv)}", console=True)
        elif log.is_main:
            rule = "=" * 100
            log.write(f"{source}\n{rule}\n{describe(argv, cfg, ranks, data, must_match)}\n{rule}")
            log.write(f"seed: {cfg.seed}, log: {log.path}", console=True)
            if cfg.resume:
                log.write(f"--resume latest: no checkpoint in {cfg.log_dir}, this is a new run", console=True)
        log.bar.set_description_str("warming up")
        trainer.warm_up(tensors)
        recompiles = train(trainer, data, log)
        result = report(log, data, trainer, recompiles)
    if dist.is_initialized():  # a thread that is left was seen to abort a process that ended well
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    try:
        main()
    except (UserError, FloatingPointError, KeyboardInterrupt) as error:
        print(f"train_gpt.py: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(getattr(error, "code", 3 if isinstance(error, FloatingPointError) else 130))
    except BrokenPipeError:  # whoever read the help has seen enough
        pass
    finally:
        try:
            sys.stdout.flush()
        except AttributeError:  # it began without a console
            pass
        except OSError:  # the console has gone away; what it has not read shall not fail later
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
