"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, as fast as the hardware allows.

    ./run.sh                                                  environment, data, checks and launch in one command
    torchrun --standalone --nproc_per_node=8 train_gpt.py     the record configuration on one 8xH100 node
    python train_gpt.py --preset nano                         a small model on a CPU, in seconds

The preset gpt2 has the mathematics of record 89 of the NanoGPT speedrun (2026-07-17, 1,285 steps,
https://github.com/KellerJordan/modded-nanogpt). nano uses part of it, and its attention heads begin with weights that
they would otherwise have to learn. "Record n" credits the record of that history in which an idea first appeared.
The file follows a token: configuration, data, schedules, layers, attention, model, head, optimizers, training, run.
Shapes: T tokens, H heads, D dimensions per head, N blocks of tokens, M visible blocks, K model width, V vocabulary.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
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
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Annotated, Literal, NoReturn, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam
from tqdm import tqdm


class UserError(Exception):
    """An error that the user can fix; exits with code 2."""

    code = 2


class AlreadyComplete(UserError):
    """A run to resume that has ended: nothing is left to do, and a job that was started again has not failed."""

    code = 0


# ---- Configuration: one field, one flag, one comment -----------------------------------------------------------------
# Types of the fields, with the lowest and the highest value
Count = Annotated[int, 1, 2**27]
Natural = Annotated[int, 0, 2**24]
Size = Annotated[int, 1, 2**14]
Positive = Annotated[float, 1e-9, 2**30]
Rate = Annotated[float, 0, 100]
Signed = Annotated[float, -100, 100]
Decay = Annotated[float, 0, 0.99999]
Counts = Annotated[tuple[int, ...], 1, 2**27]
Naturals = Annotated[tuple[int, ...], 0, 2**24]
Rates = Annotated[tuple[float, ...], 0, 100]
Scales = Annotated[tuple[float, ...], 1e-9, 2**30]
AdamGroup = namedtuple("AdamGroup", "lr decay beta1 beta2")  # the decay is cautious, as Muon's
AdamField = Annotated[AdamGroup, 0, 100]


def both(gpt2, nano):
    """Return a field with its value in gpt2 and its value in nano."""
    return dataclasses.field(default=gpt2, metadata=dict(nano=nano))


@dataclasses.dataclass(frozen=True, slots=True)
class Hyperparameters:
    # Data. Shards are read in sorted order; the log marks validation tokens with another SHA-256 than val_sha256
    preset: Literal["gpt2", "nano"] = both("gpt2", nano="nano")  # model and all settings; by default gpt2 on a GPU
    train_files: str = both("data/fineweb10B/fineweb_train_*.bin", nano="data/nano/nano_train_*.bin")  # shards: a glob
    val_files: str = both("data/fineweb10B/fineweb_val_*.bin", nano="data/nano/nano_val_*.bin")  # a glob
    val_tokens: Count = both(10_485_760, nano=262_144)  # validation tokens, a multiple of val_seq_len
    val_sha256: str = both("", nano="e68a8584e00cd966bf543face589717086b72c931fab6296a72e280c8a8eab33")  # "": unknown
    target_loss: Rate = both(3.28, nano=1.45)  # validation loss to reach; 0: none
    vocab_size: Annotated[int, 1, 2**16] = both(50257, nano=257)  # tokens are 0 ... vocab_size - 1, stored in 16 bits
    eot_token: Natural = both(50256, nano=256)  # end of text, opens every document; below vocab_size
    # Training
    num_iterations: Annotated[int, 1, 2**20] = both(1285, nano=196)  # steps: equal stages, then the extension
    extension_steps: Natural = both(15, nano=0)  # steps of a last stage, at the lowest learning rates; 0: none
    val_loss_every: Natural = both(250, nano=0)  # steps between validations; 0: only after the last step
    batch_tokens: Count = both(8 * 16 * 1024, nano=1024)  # tokens of a first step, a multiple of train_seq_len
    train_seq_len: Count = both(16 * 1024, nano=1024)  # tokens of a first training sequence, a multiple of mask_block
    val_seq_len: Count = both(256 * 1024, nano=8192)  # tokens of a validation sequence, a multiple of mask_block
    cooldown_frac: Annotated[float, 1e-9, 1] = both(0.6, nano=0.85)  # last part of the stages, with falling rates
    min_lr_frac: Rate = both(0.15, nano=0.1)  # factor on learning rates at the end of the cooldown and in the extension
    tied_frac: Rate = both(2 / 3, nano=0.0)  # first part of the stages, with embedding and head tied; 0: never
    grad_factor: Positive = both(1.0, nano=2**-10)  # factor on a sequence's summed loss before the backward pass
    # What changes from stage to stage; the last value is that of the extension, if there is one
    batch_factors: Counts = both((1, 2, 3, 3), nano=(1,))  # factor on batch_tokens and train_seq_len
    max_doc_len: Naturals = both((896, 2048, 2048, 2048), nano=(0,))  # where documents are cut; 0: plain stream
    lr_factors: Rates = both((1.0, 1.52, 1.73, 1.73), nano=(1.0,))  # factor on learning rates
    window_tokens: Counts = both((384, 896, 1408, 1664), nano=(256,))  # tokens that a long window reaches back
    final_window_tokens: Natural = both(2560, nano=0)  # long window in the last validation; 0: as in training
    mtp_weights: Rates = both((1.0, 0.5, 0.25), nano=(1.0,))  # of the losses of tokens +1, +2, +3; the last fades to 0
    prefix_file: str = both("data/gpt2_prefixes.bin", nano="")  # for each token the longest that begins it; "": none
    prefix_weight: Rate = 0.25  # of the loss of that token as the next one; it fades in the second stage
    # Model
    model_dim: Size = both(768, nano=128)  # width of the residual stream
    num_heads: Size = both(6, nano=2)  # attention heads
    head_dim: Size = both(128, nano=64)  # dimensions per head, a multiple of 4
    attention_layout: str = both("PSPLSP-SSPL", nano="L")  # per layer: L long window, S short, P paired heads, - none
    source_layout: str = both("........777", nano="")  # per layer: earlier layer whose output attention reads, or .
    xsa_layout: str = both(".x.xx..x...", nano="")  # per layer: x if heads leave out some of a token's value, or .
    gate_layout: str = both("...x......x", nano="")  # per layer: x if the output of each head has a factor, or .
    dc_layout: str = both("..........x", nano="")  # per layer: x if heads mix what they see near by, or .
    dc_keys: Count = 112  # how near: so many tokens, at most mask_block + 1
    gate_layer: Natural = both(4, nano=0)  # before this layer and the first a net makes factors for each token; 0: none
    value_embed_layout: str = both(".01.....234", nano="0")  # per layer: digit of its value embedding, or .
    value_embed_std: Rate = both(0.01, nano=0.0)  # standard deviation of the value embeddings at first
    skip_layout: str = both("......3....", nano="")  # per layer: earlier layer (0-9a-z) whose output it adds, or .
    skip_init: Signed = -1.5  # first weight of a skip, before a sigmoid
    mudd_layers: str = both("73", nano="")  # layers that the head reads, and of them the last layer the first; "": none
    resid_lambda_init: Rate = both(1.1**0.5, nano=1.0)  # first factor on the residual stream
    # Channels that decide how much of a value embedding counts, half of them the embedding's; 0: all of it does
    value_gate_inputs: Natural = both(12, nano=0)
    smear_gate_inputs: Natural = both(12, nano=0)  # the same for the embedding of the token before; 0: no smear
    embed_mean: Signed = both(0.0, nano=0.5)  # mean of the untied embedding at first
    bigram_rows: Natural = both(15 * 25152, nano=8192)  # rows of the hashed table for bigrams of tokens; 0: no table
    bigram_lambda_init: Rate = both(0.05, nano=1.0)  # first factor on the bigram embeddings in each layer
    sign_rows: Natural = both(8192, nano=0)  # rows of the table of signs for bigrams that share a row; 0: no table
    # Attention
    mask_block: Count = both(128, nano=64)  # tokens per block of the attention mask
    rope_base: Positive = 1024.0  # base of the rotary frequencies
    attention_scale: Annotated[float, 0, 2**20] = both(0.1, nano=0.12)  # first factor on scores; q, k have unit RMS
    yarn_scale: Rate = 0.2  # growth of that factor with the logarithm of the long window (YaRN)
    yarn_turns: Annotated[float, 1.1, 2**20] = 32.0  # YaRN keeps frequencies of at least so many turns in a window
    key_offset: bool = True  # in L layers, half of a key is that of the token before
    local_heads: Natural = both(0, nano=1)  # heads that begin by distance, the others by likeness; 0: all at random
    # Head
    head_std: Rate = both(0.005, nano=0.0)  # standard deviation of the head at first, and of what is tied to it
    lm_head_softcap: Positive = 15.0  # c in the softcap r sigmoid((z + d) 2 / c) of the logits z
    softcap_range: Positive = both(23.0, nano=30.0)  # r in the softcap
    softcap_shift: Signed = both(5.0, nano=0.0)  # d in the softcap
    lm_head_slice: Count = both(8192, nano=1024)  # tokens whose logits exist at a time
    lm_head_fp8: bool = both(True, nano=False)  # train the head in FP8 where the GPU can; validation never is
    fp8_scales: Scales = (448 / 100, 448 / 1.6, 448 / 0.75)  # of the head's input, its weight, the logits' gradient
    mlp_fp8: bool = both(True, nano=False)  # the same for the forward passes of MLPs
    # Optimizers
    muon_lr: Rate = both(0.023, nano=0.06)  # learning rate of Muon, for hidden matrices; the spectral norm of an update
    c_fc_factor: Rate = 2.0  # factor on muon_lr for the first matrix of each MLP
    c_proj_factor: Rate = both(4.0, nano=1.0)  # factor on muon_lr for the second matrix of each MLP
    muon_momentum: Decay = both(0.95, nano=0.9)  # momentum after its warm-up
    momentum_warmup_start: Decay = 0.85  # momentum of the first step, and after the cooldown
    momentum_warmup_steps: Natural = both(300, nano=50)  # first steps, in which momentum rises
    momentum_cooldown_steps: Natural = both(50, nano=0)  # last steps, in which momentum falls
    heads_per_matrix: Size = both(2, nano=1)  # heads whose queries or keys are a matrix for Muon (record 80, @samacqua)
    muon_beta2: Decay = both(0.9, nano=0.95)  # decay of NorMuon's second moment
    muon_decay: Rate = both(1.2, nano=0.0)  # cautious weight decay, times the squared learning rate
    adam_every: Annotated[int, 1, 16] = both(2, nano=1)  # run Adam every so many steps, on accumulated gradients
    adam_eps: Rate = 1e-10  # added to the root of the second moment
    # Groups of Adam: learning rate, weight decay, beta1, beta2. head_adam is for the embedding, too, while it is tied
    head_adam: AdamField = both(AdamGroup(0.008, 0.75, 0.5, 0.95), nano=AdamGroup(0.01, 0.0, 0.5, 0.9))
    embed_adam: AdamField = both(AdamGroup(0.008, 0.75, 0.5, 0.95), nano=AdamGroup(0.25, 0.0, 0.5, 0.9))
    table_adam: AdamField = both(AdamGroup(0.6, 0.025, 0.75, 0.95), nano=AdamGroup(0.25, 0.0, 0.5, 0.9))
    scalar_adam: AdamField = both(AdamGroup(0.04, 0.0, 0.9, 0.99), nano=AdamGroup(0.04, 0.0, 0.5, 0.9))
    resid_adam: AdamField = both(AdamGroup(0.04, 0.0, 0.9, 0.95), nano=AdamGroup(0.04, 0.0, 0.5, 0.9))
    x0_adam: AdamField = both(AdamGroup(0.008, 0.0, 0.9, 0.95), nano=AdamGroup(0.04, 0.0, 0.5, 0.9))
    net_adam: AdamField = AdamGroup(8e-4, 0.005, 0.9, 0.99)
    mudd_adam: AdamField = AdamGroup(0.002, 0.005, 0.9, 0.99)
    gate_adam: AdamField = AdamGroup(0.008, 0.005, 0.9, 0.99)
    smear_adam: AdamField = AdamGroup(8e-5, 0.0, 0.9, 0.99)
    # Machine
    seed: Annotated[int | None, 0, 2**63 - 1] = None  # random seed; by default a fresh one, printed and logged
    device: Literal["auto", "cuda", "cpu"] = both("auto", nano="cpu")  # auto: cuda where torch sees a GPU
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # use torch.compile; by default on CUDA only
    cpu_threads: Annotated[int, 0, 1024] = both(0, nano=2)  # CPU threads of all processes together; 0: torch's choice
    # Output
    log_dir: str = "logs"  # folder of the logs
    run_id: str = ""  # name of the log, without folders; by default preset, time and seed
    save_checkpoint: bool = both(False, nano=True)  # write the final model, for sample.py, to LOG_DIR/RUN_ID.pt
    checkpoint_every: Natural = 0  # steps between checkpoints to resume from, off the clock; 0: none
    resume: str = ""  # LOG_DIR/RUN_ID.checkpoint, or latest: the newest in log_dir, of run_id if given

    def __post_init__(self) -> None:
        """Refuse in one line what would train something else in silence. Torch refuses shapes that do not fit."""

        def require(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise UserError(f"--{name} {str(getattr(self, name))[:100]}: expected {expected}")

        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # as flags and JSON have them
                value = AdamGroup(*value) if field.type is AdamField else tuple(value)
                object.__setattr__(self, field.name, value)
            if get_origin(field.type) is Annotated and value is not None:
                low, high = get_args(field.type)[1:]
                values = value if isinstance(value, tuple) else (value,)
                require(field.name, 0 < len(values) < 8, "1 to 7 values")  # torch.compile makes 8 graphs at most
                require(field.name, all(low <= n <= high for n in values), f"a number from {low} to {high}")
            if field.type is AdamField:
                require(field.name, max(value.beta1, value.beta2) < 1, "betas below 1")
        units = dict(batch_tokens=self.train_seq_len, val_tokens=self.val_seq_len, checkpoint_every=self.adam_every)
        for name, unit in units.items():
            require(name, getattr(self, name) % unit == 0, f"a multiple of {unit}")
        require("eot_token", self.eot_token < self.vocab_size, f"a token below vocab_size {self.vocab_size}")
        require("tied_frac", not self.tied_frac or self.head_std > 0, "0 with --head_std 0: one table, all zeros")
        require("extension_steps", self.scheduled_steps > 0, f"less than num_iterations {self.num_iterations}")
        counts = {*map(len, (self.batch_factors, self.max_doc_len, self.lr_factors, self.window_tokens))}
        require("max_doc_len", len({*map(bool, self.max_doc_len)}) == 1, "all 0, or none")
        holds = len(counts) == 1 and min(counts) > (self.extension_steps > 0)
        require("window_tokens", holds, "as many as batch_factors, max_doc_len, lr_factors; over 1 with an extension")
        require("run_id", "/" not in self.run_id, "a name without folders; --log_dir names one")
        layers, letters = len(self.attention_layout), {*self.attention_layout}
        require("attention_layout", layers > 0 and letters <= {*"LSP-"}, "letters L, S, P and -")
        for name in [name for name in self.__slots__ if name.endswith("_layout")]:
            require(name, len(getattr(self, name)) in (0, layers), f"a character for each of {layers} layers, or none")
        require("gate_layer", self.gate_layer < layers, f"less than {layers}, the number of layers")
        require("dc_keys", self.dc_keys <= self.mask_block + 1 or "x" not in self.dc_layout, "at most mask_block + 1")

    batch_sequences = property(lambda self: self.batch_tokens // self.train_seq_len)
    scheduled_steps = property(lambda self: self.num_iterations - self.extension_steps)  # those of the equal stages


NANO = {field.name: field.metadata["nano"] for field in dataclasses.fields(Hyperparameters) if field.metadata}
PRESETS = {"gpt2": Hyperparameters(), "nano": Hyperparameters(**NANO)}


def refuse(message: str) -> NoReturn:
    raise UserError(message)


def help_text() -> str:
    """Return what --help prints: first the flags that people change, then the source of all fields."""
    fields = inspect.getsource(Hyperparameters).partition("    def ")[0]
    comments = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in fields.splitlines()}
    often = "preset num_iterations val_loss_every seed train_files val_files muon_lr run_id checkpoint_every resume"
    lines = ["Flags that people change:", *(f"  --{name:17} {comments[name]}" for name in often.split())]
    return "\n".join([*lines, "All flags, one a field (--no-FIELD: false); both(a, nano=b): a in gpt2", fields])


def parse_args(argv: Sequence[str], world_size: int = 1) -> Hyperparameters:
    """Return a preset, changed by the flags in `argv`; every field of Hyperparameters is a flag."""
    if {"-h", "--help"} & {*argv}:
        with contextlib.suppress(BrokenPipeError):  # of `--help | head`
            print(help_text(), flush=True)
        sys.exit()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]  # instead of exiting: other ranks have to hear of it
    hints = get_type_hints(Hyperparameters)  # without the bounds
    for name, hint in hints.items():
        kind, *others = get_args(hint) or [hint]  # int of int | None and of tuple[int, ...]
        options = dict(choices=[kind, *others]) if get_origin(hint) is Literal else dict(type=kind)
        if kind is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        elif hint is AdamGroup:
            options = dict(type=float, nargs=4)
        elif get_origin(hint) is tuple:
            options |= dict(nargs="+")
        parser.add_argument(f"--{name}", **options, default=argparse.SUPPRESS)  # absent unless given
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].strip("-").partition("=")[0], hints, cutoff=0.4)
        raise UserError(f"{unknown[0]}: no such flag; see --{', --'.join(nearest or ['help'])}")
    flags = vars(known)
    sees_gpu = torch.cuda.is_available() and flags.get("device") != "cpu"
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
    # With matmuls of multiples of 16
    has_fp8 = on_cuda and torch.cuda.get_device_capability() >= (8, 9) and cfg.model_dim % 16 == 0
    decided["mlp_fp8"] = cfg.mlp_fp8 and has_fp8
    decided["lm_head_fp8"] = cfg.lm_head_fp8 and has_fp8 and cfg.lm_head_slice % 16 == 0
    decided["run_id"] = cfg.run_id or f"{cfg.preset}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    return dataclasses.replace(cfg, **decided, compile=on_cuda if cfg.compile is None else cfg.compile)


# ---- Data: the tokens of every step are planned before the first one, the same for any number of processes -----------
# A shard, and for each sequence of a step an array (pieces, 2): where its pieces of documents begin and end there
Batch = namedtuple("Batch", "path sequences")


def read_shard(path: str, dtype: str, count: int, offset: int) -> np.ndarray:
    """Return `count` numbers of a file from byte `offset` on, or fewer at its end."""
    try:
        if not os.path.isfile(path):  # opening a pipe would wait forever
            raise OSError("not a regular file")
        return np.fromfile(path, dtype, count, offset=offset)  # not mmap: a truncated mapped file raises SIGBUS
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; ./run.sh --check says what to do") from None


def find_documents(path: str, cfg: Hyperparameters, is_stream: bool) -> list[tuple[int, int]]:
    """Return where a shard's documents begin and end; of a stream all is one."""
    # The format of llm.c: a header of 256 int32 [20240520, 1, number of tokens, 0 ...], then uint16 tokens
    header = read_shard(path, "<i4", 3, 0).tolist()
    num_tokens = (os.path.getsize(path) - 1024) // 2
    if header != [20240520, 1, num_tokens]:
        raise UserError(f"{path}: not a whole shard of tokens; ./run.sh --check says what to do")
    if is_stream:
        return [(0, num_tokens)]
    begins = np.flatnonzero(read_shard(path, "<u2", num_tokens, 1024) == cfg.eot_token)
    return list(pairwise([*begins.tolist(), num_tokens]))


def cut_sequence(documents: deque[tuple[int, int]], length: int, max_doc_len: int) -> np.ndarray | None:
    """Take a sequence of `length` tokens from the front of `documents`; None if they have fewer.

    Documents are cut to max_doc_len (record 29, @varunneal), and sequences begin with one (26, @classiclarryd).
    """
    pieces = []
    while length and documents:
        begin, end = documents.popleft()
        cut = min(end, begin + length, begin + (max_doc_len or length))
        pieces.append((begin, cut))
        length -= cut - begin
        if not max_doc_len:  # the next sequence begins with the last target of this one, else with a document
            documents.appendleft((cut - 1, end))
            break
    return np.array(pieces) if length == 0 else None


def plan_batches(pattern: str, seq_lens, num_sequences: int, cfg: Hyperparameters, max_doc_len=(0,)) -> list[Batch]:
    """Plan a batch of `num_sequences` for each of seq_lens, shard after shard; the rest of each shard is dropped.

    max_doc_len: where documents are cut in each batch; the last is for all others, too. 0: not at all, as a stream.
    """
    paths, path = deque(sorted(glob.glob(pattern, recursive=True))), ""
    documents: deque[tuple[int, int]] = deque()  # those of the shard at `path` that are left
    plan: list[Batch] = []
    while len(plan) < len(seq_lens):
        length, longest = seq_lens[len(plan)] + 1, max_doc_len[min(len(plan), len(max_doc_len) - 1)]
        sequences = [cut_sequence(documents, length, longest) for _ in range(num_sequences)]
        if sequences[-1] is not None:
            plan.append(Batch(path, sequences))
        elif paths:
            path = paths.popleft()
            documents = deque(find_documents(path, cfg, max_doc_len[0] == 0))
        else:
            found = f"{pattern} in {os.getcwd()}: tokens for {len(plan)} batches, the run needs {len(seq_lens)}"
            found += f"; documents begin with --eot_token {cfg.eot_token}" * (max_doc_len[0] > 0)
            raise UserError(f"{found}; ./run.sh gets a preset's data, data/pack_text.py packs text")
    return plan


def plan_data(cfg: Hyperparameters) -> dict[str, list[Batch]]:
    """Return the batches of training and those of validation, which are one sequence each."""
    train_lens = [train_seq_len(step, cfg) for step in range(cfg.num_iterations)]
    doc_lens = [cfg.max_doc_len[stage_of(step, cfg)] for step in range(cfg.num_iterations)]
    train = plan_batches(cfg.train_files, train_lens, cfg.batch_sequences, cfg, doc_lens)
    val_lens = [cfg.val_seq_len] * (cfg.val_tokens // cfg.val_seq_len)
    plans = dict(train=train, val=plan_batches(cfg.val_files, val_lens, 1, cfg))
    paths = ({os.path.realpath(batch.path) for batch in plan} for plan in plans.values())
    if common := set.intersection(*paths):
        raise UserError(f"{min(common)}: to train and to validate: change --train_files or --val_files")
    return plans


def read_sequence(path: str, pieces: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the uint16 tokens of a sequence, the last target included."""
    first, last = pieces[0, 0], pieces[-1, 1]
    tokens = read_shard(path, "<u2", last - first, 1024 + 2 * first)
    if len(tokens) < last - first:
        raise UserError(f"{path}: has become shorter: leave it alone while it is used")
    tokens = np.concatenate([tokens[begin:end] for begin, end in pieces - first])
    if tokens.max() >= vocab_size:
        raise UserError(f"{path}: has token {tokens.max()}, --vocab_size is {vocab_size}: another tokenizer's?")
    return tokens


def read_prefixes(cfg: Hyperparameters) -> np.ndarray:
    """Return for each token the longest other token that its bytes begin with, or -1 (data/gpt2_prefixes.py)."""
    if not cfg.prefix_file:
        return np.empty(0, np.int64)
    table = read_shard(cfg.prefix_file, "<u2", 2**16, 0).astype(np.int64)
    if len(table) != cfg.vocab_size:
        raise UserError(f"--prefix_file {cfg.prefix_file}: not of {cfg.vocab_size} tokens; --prefix_file= goes without")
    return np.where(table < cfg.vocab_size, table, -1)


def hash_tokens(plan: Sequence[Batch], cfg: Hyperparameters, targets: bool) -> str:
    """Return the SHA-256 of all tokens of a plan; targets: with the last target of each sequence."""
    digest = hashlib.sha256()
    for path, sequences in plan:
        for pieces in sequences:
            tokens = read_sequence(path, pieces, cfg.vocab_size)
            digest.update((tokens if targets else tokens[:-1]).tobytes())
    return digest.hexdigest()


def read_batches(plan, sequences: Sequence[int], cfg: Hyperparameters, device: torch.device) -> Iterator:
    """Yield for each batch the [(inputs (T,) int32, targets (T,) int64), ...] of its `sequences`, on the device."""

    def read(batch: Batch) -> Tensor:
        rows = [read_sequence(batch.path, batch.sequences[i], cfg.vocab_size) for i in sequences]
        tokens = torch.from_numpy(np.stack(rows))
        return tokens.pin_memory() if device.type == "cuda" else tokens

    on_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())  # else it opens GPU 0
    with ThreadPoolExecutor(1, "reader", *on_device) as reader:  # ahead of the steps, from the first `next` on
        futures = (reader.submit(read, batch) for batch in plan)
        ready = deque(islice(futures, 2))  # batches that are read or being read
        while ready:
            tokens = ready.popleft().result().to(device, non_blocking=True).to(torch.int32)
            ready.extend(islice(futures, 1))
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
    return cfg.train_seq_len * cfg.batch_factors[stage_of(step, cfg)]


def lr_multiplier(step: int, cfg: Hyperparameters) -> float:
    """Return the factor on all learning rates: it rises with the batch, and falls linearly in the cooldown."""
    start = int(cfg.scheduled_steps - cfg.cooldown_frac * cfg.scheduled_steps)
    w = min(max(0.0, (cfg.scheduled_steps - step) / (cfg.scheduled_steps - start)), 1.0)
    return w * cfg.lr_factors[stage_of(step, cfg)] + (1 - w) * cfg.min_lr_frac


def mtp_weights(step: int, cfg: Hyperparameters) -> list[float]:
    """Return the weights of the losses of the next tokens: one less from stage to stage (record 53, @varunneal)."""
    stage = stage_of(step, cfg)
    start, end = stage_starts(cfg)[stage : stage + 2]
    *first, last = cfg.mtp_weights[: max(1, len(cfg.mtp_weights) - stage)]
    return [*first, last * (end - step) / max(1, end - start)] if first else [last]


def prefix_weights(step: int, cfg: Hyperparameters) -> list[float]:
    """Return the weight of the loss of the next token's prefix, if any: it fades in stage 2 (record 88, @jvarho)."""
    stage = stage_of(step, cfg)
    start, end = stage_starts(cfg)[stage : stage + 2]
    left = 1.0 if stage == 0 else (end - step) / max(1, end - start)
    return [cfg.prefix_weight * left] if cfg.prefix_file and stage < 2 else []


def is_tied(step: int, cfg: Hyperparameters) -> bool:
    """Say whether embedding and head are one table after a step; the last such step is odd, as Adam's are in gpt2."""
    return cfg.tied_frac > 0 and step <= round(cfg.tied_frac * cfg.scheduled_steps) | 1


def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Return Muon's momentum, which rises linearly in its warm-up and falls in its cooldown (record 39)."""
    warmup, cooldown = cfg.momentum_warmup_steps, cfg.momentum_cooldown_steps
    w = min(step / warmup if warmup else 1.0, (cfg.num_iterations - step) / cooldown if cooldown else 1.0, 1.0)
    return (1 - w) * cfg.momentum_warmup_start + w * cfg.muon_momentum


def attention_windows(step: int, cfg: Hyperparameters) -> tuple[int, int]:
    """Return how many tokens a long window reaches back, and a short one: half as many, in whole blocks."""
    window = cfg.window_tokens[stage_of(step, cfg)]
    is_last = step == cfg.num_iterations and cfg.final_window_tokens  # only the long one: record 33 (@classiclarryd)
    return cfg.final_window_tokens if is_last else window, window // (2 * cfg.mask_block) * cfg.mask_block


def rotary_frequencies(stage: int, cfg: Hyperparameters, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return a stage's rotary frequencies (D / 4,) and factor on attention scores.

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
        # The next matmul saves the result anyway (record 87): 3.6 GB less than x, by the compiled graph of gpt2
        ctx.save_for_backward(y := F.relu(x).square_())
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].sqrt().mul_(grad).mul_(2)  # 2 relu(x) grad


def quantize(t: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return scale * t in FP8. Beyond its limit a cast saturates on some devices and gives NaN on others."""
    limit = torch.finfo(dtype).max
    return (t * scale).clamp(-limit, limit).to(dtype) if dtype.itemsize == 1 else t.to(dtype)


def matmul(a: Tensor, b: Tensor, scale: Tensor | float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return a @ b, or in FP8 a @ b / scale. fast: sum up in less than fp32."""
    if a.dtype.itemsize > 1:
        return (a @ b).to(dtype)
    a, b = a.contiguous(), b.t().contiguous().t()  # cuBLAS wants row-major by column-major
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return torch._scaled_mm(a, b, one / scale, one, out_dtype=dtype, use_fast_accum=fast)


class FP8Linear(torch.autograd.Function):
    """Return x @ w.T, in FP8 forward and not backward (records 84, @sisovicm, and 89, @Mister-dev-oss and others).

    x_max, and w's largest number, become 448, the largest of e4m3. Larger ones saturate.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_max: Tensor | float) -> Tensor:
        ctx.save_for_backward(x, w)
        x_scale, w_scale = 448 / x_max, 448 / w.abs().amax().float().clamp(min=1e-12)
        x_q, w_q = quantize(x, x_scale, torch.float8_e4m3fn), quantize(w, w_scale, torch.float8_e4m3fn)
        return matmul(x_q, w_q.t(), x_scale * w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, None


class MLP(nn.Module):
    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        K = cfg.model_dim
        self.c_fc = uniform_weight(K, K, 4 * K)  # (in, out), the shape of c_proj, (out, in): Muon stacks both
        self.c_proj = nn.Parameter(torch.zeros(K, 4 * K))
        for weight, factor in (self.c_fc, cfg.c_fc_factor), (self.c_proj, cfg.c_proj_factor):
            weight.lr_factor = factor  # type: ignore[attr-defined]  # for Muon
        self.fp8 = cfg.mlp_fp8
        # The largest hidden unit of the step before, in all sequences, and so far of this one
        self.register_buffer("hidden_max", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        fp8, c_fc = self.fp8 and torch.is_grad_enabled(), self.c_fc.mT
        # At unit RMS no input is larger than the root of the width
        x = FP8Linear.apply(x, c_fc.type_as(x), x.size(1) ** 0.5) if fp8 else linear(x, c_fc)
        x = ReluSquared.apply(x)
        if not fp8:
            return linear(x, self.c_proj)
        before, now = self.hidden_max.clamp(min=1e-12)
        # By rows first: the compiler then finds it where it computes x, and does not read x once more
        self.hidden_max[1] = torch.maximum(now, x.detach().amax(1).amax())
        # Room to grow since the step before: to find the largest of x first would take another pass
        return FP8Linear.apply(x, self.c_proj.type_as(x), 1.8 * before)


class Rotary(nn.Module):
    """Rotate half of the dimensions of q and k by the token's position (arXiv:2104.09864; record 17), and scale q."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        dtype = torch.promote_types(getattr(torch, cfg.dtype), torch.float32)
        length = max(cfg.train_seq_len * max(cfg.batch_factors), cfg.val_seq_len)
        length *= 2 if "P" in cfg.attention_layout else 1  # paired heads have two positions per token
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

    def forward(self, qk: Tensor, heads_per_pair: int) -> tuple[Tensor, Tensor]:
        """Return q and k (T, H, D) from both (T, 2 H, D), rotated to position t, in pairs 2 t + h % 2 for head h."""
        # Odd and even heads, as in the record, though `attend` pairs h and h + H / 2: the middle pair of 3 is reversed
        T, _, D = qk.shape
        cos, sin = (t[: T * heads_per_pair].view(T, 1, heads_per_pair, D // 4) for t in (self.cos, self.sin))

        def rotate(x: Tensor) -> Tensor:
            x1, x2, *still = x.view(T, -1, heads_per_pair, 4, D // 4).unbind(-2)
            # The fp32 tables promote bf16
            return torch.stack([x1 * cos + x2 * sin, x2 * cos - x1 * sin, *still], dim=-2).view_as(x)

        q, k = map(rotate, qk.chunk(2, dim=1))  # apart, or the compiled graph stores in fp32 what both are cut from
        return (q * self.scale).type_as(qk), k.type_as(qk)


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
    first_doc, last_doc = doc_ids.view(-1, block)[:, 0], doc_ids.view(-1, block)[:, -1]
    own = torch.arange(len(first_doc), dtype=torch.int32, device=doc_ids.device)  # number of each query block
    seen_by_first = (window + block - 1) // block  # so many blocks back the first token sees something,
    seen_by_last = (window + 1) // block - 1  # and so many the last one sees whole
    blocks_of_older_docs = (last_doc[None, :] < first_doc[:, None]).sum(1, dtype=torch.int32)
    first_visible = torch.maximum(blocks_of_older_docs, own - seen_by_first)
    blocks_begun_by_older_docs = (first_doc[None, :] < first_doc[:, None]).sum(1, dtype=torch.int32)
    first_full = torch.maximum(blocks_begun_by_older_docs, own - seen_by_last)
    num_full = torch.where(first_doc == last_doc, own - first_full, 0).clamp(min=0)
    num_partial = own - first_visible + 1 - num_full
    query, place = own[:, None], own[None, :]  # place in the list of a query block
    full = (query - 1 - place).clamp(min=0)
    partial = torch.where(place == 0, query, query - num_full[:, None] - place).clamp(min=0)
    lists = num_partial[None, None], partial[None, None], num_full[None, None], full[None, None]

    def causal_in_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= window) & (doc_ids[q] == doc_ids[kv])

    return BlockMask.from_kv_blocks(*lists, block, causal_in_document, compute_q_blocks=for_flex)


class GatheredMask:
    """Hold a BlockMask for attention in plain PyTorch: FlexAttention has no backward on CPUs.

    kv_blocks (N, M): the key blocks of each query block, partial ones first. bias (N, block, M block): 0 where a
    token sees another, -inf where not. max_blocks: M, the most that any query block sees with the widest window.
    """

    def __init__(self, mask: BlockMask, max_blocks: int, dtype: torch.dtype):
        num_partial, num_full = mask.kv_num_blocks[0, 0, :, None], mask.full_kv_num_blocks[0, 0, :, None]
        N, block = len(num_partial), mask.BLOCK_SIZE[0]
        place = torch.arange(min(max_blocks, N), device=num_partial.device)
        full = mask.full_kv_indices[0, 0].gather(1, (place - num_partial).clamp(min=0))
        self.kv_blocks = torch.where(place < num_partial, mask.kv_indices[0, 0, :, : len(place)], full)
        tokens = torch.arange(N * block, dtype=torch.int32, device=place.device).view(N, block)
        q, kv = tokens[:, :, None, None], tokens[self.kv_blocks][:, None]
        visible = (place < num_partial + num_full)[:, None, :, None] & mask.mask_mod(None, None, q, kv)
        self.bias = torch.where(visible, torch.zeros((), dtype=dtype), -torch.inf).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q to k and v, all (T, H, D). The cost grows with the window, not as T^2."""
        (T, H, D), N = q.shape, len(self.kv_blocks)
        q, k, v = (t.transpose(0, 1).reshape(H, N, -1) for t in (q, k, v))  # heads first: blocks lie in one piece
        k, v = (t.index_select(1, self.kv_blocks.flatten()) for t in (k, v))
        q, k, v = (t.view(H, N, -1, D) for t in (q, k, v))
        # Written out: scaled_dot_product_attention took 2.5 times as long, forward and backward (16 x 64 queries)
        y = torch.softmax((q @ k.mT).add_(self.bias), dim=-1) @ v
        return y.view(H, T, D).transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | GatheredMask, heads_per_pair: int) -> Tensor:
    """Return softmax(q k') v of each head, within the mask; all (T, H, D)."""
    T, H, D = q.shape
    # The heads of a pair, h and h + H / 2, alternate in one sequence of 2 T and share keys (record 58, @classiclarryd)
    q, k, v = (t.reshape(T * heads_per_pair, H // heads_per_pair, D) for t in (q, k, v))
    if isinstance(mask, GatheredMask):
        return mask.attend(q, k, v).reshape(T, H, D)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    warps = dict(bwd_num_warps=8)  # as on an H100; with the 4 of other GPUs the backward pass spills its registers
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=warps)  # type: ignore[call-overload]
    return y.squeeze(0).transpose(0, 1).reshape(T, H, D)


def mix_heads(q, k, v, doc_ids: Tensor, factors: Tensor, keys: int, block: int) -> Tensor:
    """Return what all heads get of what they see together (T, H, D): w_h sum_g (u_g P_g) v_h.

    P_g is the softmax of head g's scores over the last `keys` tokens of the document. factors (2 H, T, 1): u, which
    loses its RMS, and w. A part of DCMHA (arXiv:2405.08553): record 85 (@Lisennlp).
    """
    H, D = q.shape[1:]
    u, w = factors.transpose(0, 1).chunk(2, dim=1)
    q, k, u = (t.reshape(-1, block, H, t.size(-1)).transpose(1, 2) for t in (q, k, u))
    ids, v = (doc_ids + 1).view(-1, 1, block, 1), v.reshape(-1, 1, block, H * D)  # 0: none, before the first block
    k, v, key_ids = (torch.cat([F.pad(t[:-1], (0, 0) * 3 + (1, 0)), t], dim=2) for t in (k, v, ids))  # two blocks
    distance = torch.arange(block, device=q.device)[:, None] - torch.arange(-block, block, device=q.device)
    visible = (distance >= 0) & (distance < keys) & (ids == key_ids.mT)
    maps = torch.softmax((q @ k.mT).masked_fill(~visible, -torch.inf), dim=-1)
    wide = u.to(torch.promote_types(u.dtype, torch.float32))
    u = (wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()).type_as(u)
    return w * ((u * maps).sum(1, keepdim=True) @ v).view(-1, H, D)


class CausalSelfAttention(nn.Module):
    """Map x (T, K), of unit RMS, to (T, K): attention with QK-norm, rotary and value embeddings."""

    def __init__(self, cfg: Hyperparameters, letter: str, has_value_gate: bool):
        super().__init__()
        H, D, K = cfg.num_heads, cfg.head_dim, cfg.model_dim
        self.cfg, self.heads_per_pair, self.has_key_offset = cfg, 1 + (letter == "P"), letter == "L" and cfg.key_offset
        rows = math.gcd(H, cfg.heads_per_matrix) * D
        self.qk_w = uniform_weight(K, 2 * H * D // rows, rows, K)  # a stack of matrices for Muon
        self.v_w = uniform_weight(K, H * D, K)
        self.c_proj = uniform_weight(H * D, K, H * D)  # not zero: record 64
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))  # records 47 (@roeeshenberg) and 48 (@ChrisJMcCormick)
        has_value_gate &= cfg.value_gate_inputs > 0
        self.value_gate = nn.Parameter(torch.zeros(H, cfg.value_gate_inputs)) if has_value_gate else None
        if n := cfg.local_heads:
            q, k = self.qk_w.data.view(2, H, D, K)
            # The first n heads begin with what all tokens share (`embed_mean`), rotated: they see by distance
            q[:n, : D // 2] += 4 / K
            q[:n, D // 2 :] = 0
            # The others begin with what tokens do not share, hardly rotated: they see those like them
            q[n:] -= q[n:].mean(-1, keepdim=True)
            q[n:, : D // 2] /= 4
            k.copy_(q)  # a token attends to those like it from the start (arXiv:2305.09828)

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, mask, f: dict) -> Tensor:
        """Attend, with the factors f that nets make for each token; those of heads are (H, T, 1)."""
        T, H, D = len(x), self.cfg.num_heads, self.cfg.head_dim
        qkv_w = torch.cat([self.qk_w.flatten(0, 1), self.lambdas[0] * self.v_w])
        qk, v = linear(x, qkv_w).view(T, 3 * H, D).split([2 * H, H], dim=1)
        # QK-norm (@Grad62304977). F.rms_norm saves its input, which v keeps alive anyway: 1.7 GB less (compiled graph)
        q, k = rotary(F.rms_norm(qk, (D,)), self.heads_per_pair)
        if self.has_key_offset:  # half of a key is the token before's: what followed a token like this one? (record 49)
            own, shifted = k.split(D // 2, dim=-1)
            k = torch.cat([own, torch.cat([shifted[:1], shifted[:-1]])], dim=-1)
        if value_embed is not None:  # after value residuals (arXiv:2410.17897): record 14 (@KoszarskyB)
            added = value_embed.view_as(v)
            if self.value_gate is not None:  # record 55 (@classiclarryd); the embedding decides, too: 70 (@photon_mz)
                n = self.value_gate.size(1) // 2
                decides = torch.cat([x[:, :n], value_embed[:, :n]], dim=-1)
                added = 2 * gates(decides, self.value_gate)[:, :, None] * added
            elif "value_gate" in f:  # one for either half of the heads
                added = f["value_gate"].transpose(0, 1).repeat_interleave(H // 2, dim=1) * added
            v = v + added
        if "value" in f:
            v = v + f["value"].view_as(v)
        y = attend(q, k, v, mask, self.heads_per_pair)
        if "dc" in f:
            doc_ids = (f["tokens"] == self.cfg.eot_token).cumsum(0)
            y = y + mix_heads(q, k, v, doc_ids, f["dc"], self.cfg.dc_keys, self.cfg.mask_block)
        if "xsa" in f:  # a head leaves out what its output shares with the token's own value: record 82 (@_djdumpling)
            share = (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
            y = y - f["xsa"].transpose(0, 1).tanh() * share * v
        if "gate" in f:  # a head may attend to nothing: record 28 (@classiclarryd)
            y = y * f["gate"].transpose(0, 1)
        return linear(y.flatten(1), self.lambdas[1] * self.c_proj)


# ---- Model: a decoder-only transformer, with what the speedrun's records changed in GPT-2 ----------------------------
class FactorNet(nn.Module):
    """Make factors for each token of the stream x (T, K). first: what they begin with, by kind and layer.

    Multiway dynamic dense connections (MUDD, arXiv:2502.12170; record 81) and gates (85): both by @Lisennlp.
    """

    def __init__(self, cfg: Hyperparameters, first: dict[tuple[str, int], list[float]]):
        super().__init__()
        self.keys, self.sizes = [*first], [*map(len, first.values())]
        self.w1 = nn.Parameter(torch.empty(64, cfg.model_dim).uniform_(-1, 1) * cfg.model_dim**-0.5)
        self.w2 = nn.Parameter(torch.zeros(sum(self.sizes), 64))
        self.b2 = nn.Parameter(torch.tensor([*chain(*first.values())]) / 0.1)

    def forward(self, x: Tensor, scale: Tensor | float, factors: Sequence[dict]) -> None:
        """Write each kind, (n, T, 1), to the factors of its layer."""
        made = scale * (linear(F.gelu(linear(x, self.w1)), self.w2) + self.b2.type_as(x))
        for (kind, layer), piece in zip(self.keys, made.mT[:, :, None].split(self.sizes), strict=True):
            factors[layer][kind] = piece


def numbers(layout: str) -> dict[int, int]:
    """Return what a layout has for some layers: 0-9, then a-z."""
    return {layer: int(letter, 36) for layer, letter in enumerate(layout) if letter != "."}


def mix(factors: Iterable[Tensor], sources: Sequence[Tensor]) -> Tensor:
    return sum(factor * source for factor, source in zip(factors, sources, strict=True))  # type: ignore[return-value]


class Block(nn.Module):
    """Add attention to the stream and then the MLP, with factors of its own where no net makes them."""

    def __init__(self, cfg: Hyperparameters, attn: CausalSelfAttention | None, has_lambdas: bool, has_embeds: bool):
        super().__init__()
        self.attn, self.mlp = attn, MLP(cfg)
        self.resid_lambdas = nn.Parameter(torch.full((2,), cfg.resid_lambda_init)) if has_lambdas else None
        self.post_lambdas = nn.Parameter(torch.ones(2)) if has_lambdas else None
        first = torch.tensor([0.0, cfg.bigram_lambda_init])
        self.embed_lambdas = nn.Parameter(first) if has_embeds else None

    def lambdas(self) -> dict:
        """Return the factors (stream, attention), (x0, bigrams), (stream, MLP): record 73 (@sisovicm)."""
        lambdas = dict(embeds=self.embed_lambdas)
        if self.post_lambdas is not None:
            lambdas["attn"], lambdas["mlp"] = zip(self.resid_lambdas, self.post_lambdas, strict=True)
        return lambdas

    def forward(self, x, source, x0, bigrams, value_embed, rotary, mask, f: dict) -> Tensor:
        """Return the new stream. source: what attention reads. f: all factors."""
        if self.attn is not None:
            (resid, post), (x0_factor, bigram_factor) = f["attn"], f["embeds"]
            x = resid * x + post * self.attn(norm(source), value_embed, rotary, mask, f)
            x = x + x0_factor * x0  # the embedding stays at hand: @KoszarskyB, record 9
            if bigrams is not None:  # and so does that of the last two tokens: @classiclarryd, record 62
                x = x + bigram_factor * bigrams
        resid, post = f["mlp"]
        return resid * x + post * self.mlp(norm(x))


def first_factors(cfg: Hyperparameters) -> dict[str, dict[tuple[str, int], list[float]]]:
    """Return for each net what it makes, by kind and layer: the first values of these factors.

    attn, mlp: on the stream and on what is added. embeds: on x0 and bigrams. skip. For each head: xsa, gate, and u and
    w of dc. values, stream, out: on the sources that the last layer's values, its stream and the head's input mix.
    """
    H, last, lambdas = cfg.num_heads, len(cfg.attention_layout) - 1, [cfg.resid_lambda_init, 1.0]
    embeds, nets = [0.0, cfg.bigram_lambda_init], {}
    if cfg.mudd_layers:
        kinds = dict(values=[0.0] * 3, stream=[0.0] * 3, value_gate=[2.0] * 2, attn=lambdas, embeds=embeds, mlp=lambdas)
        nets["last"] = {(kind, last): values for kind, values in kinds.items()}
        # The head gets less of what served later layers only: record 40 (@snimu, @classiclarryd)
        more = [0.0] * (("0" in cfg.value_embed_layout) + len(cfg.mudd_layers) - 1)
        nets["out"] = {("out", last): [0.0, -0.5, 0.0, *more]}
    if cfg.gate_layer:
        with_embeds = cfg.attention_layout[: last + (not cfg.mudd_layers)].replace("-", ".")
        table = dict(xsa=(cfg.xsa_layout, [0.0] * H), gate=(cfg.gate_layout, [0.25] * H), embeds=(with_embeds, embeds))
        table |= dict(skip=(cfg.skip_layout, [0.5]), dc=(cfg.dc_layout, [1.0] * H + [0.0] * H))
        every = {(kind, layer): first for kind, (layout, first) in table.items() for layer in numbers(layout)}
        nets["early"] = {key: first for key, first in every.items() if key[1] < cfg.gate_layer}
        nets["mid"] = {key: first for key, first in every.items() if key[1] >= cfg.gate_layer}
    return nets


class GPT(nn.Module):
    """Map tokens (T,) int32 and targets (T, n) int64 to the sum of losses.

    windows (2,) int32: the long and the short one. weights (n,): of the losses of the targets.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg, K, V = cfg, cfg.model_dim, cfg.vocab_size
        dtype = getattr(torch, cfg.dtype)  # tables are in the precision of the activations, the rest in fp32
        padded = V + -V % 64  # rows of the head, aligned for matmul tiles
        is_tied_first = cfg.tied_frac > 0
        self.embed = nn.Embedding(padded if is_tied_first else V, K, dtype=dtype)
        self.embed.weight.data += cfg.embed_mean  # a part that all tokens share lets scores go by position alone
        # For some layers: the number of the table of value embeddings; the source and the number of the skip
        self.value_tables, self.sources = numbers(cfg.value_embed_layout), numbers(cfg.source_layout)
        skips = numbers(cfg.skip_layout).items()
        self.skips = {layer: (source, n) for n, (layer, source) in enumerate(skips)}
        num_tables, width = len({*self.value_tables.values()}), cfg.num_heads * cfg.head_dim
        tables = [torch.empty(V, width, dtype=dtype).normal_(0, cfg.value_embed_std) for _ in range(num_tables)]
        self.value_embeds = nn.ModuleList(nn.Embedding.from_pretrained(table, freeze=False) for table in tables)
        table = torch.zeros(cfg.bigram_rows, K, dtype=dtype)
        self.bigram_embed = nn.Embedding.from_pretrained(table, freeze=False) if cfg.bigram_rows else None
        if cfg.sign_rows:  # a constant, the same in all runs
            signs = torch.randint(2, (cfg.sign_rows, K), generator=torch.Generator().manual_seed(83), device="cpu")
            self.register_buffer("signs", (2 * signs - 1).to(torch.int8))
        made, self.mudd_layers = first_factors(cfg), [int(layer, 36) for layer in cfg.mudd_layers]
        self.nets = nn.ModuleDict({name: FactorNet(cfg, first) for name, first in made.items()})
        self.gate_scale = nn.Parameter(torch.tensor(0.1)) if cfg.gate_layer else None
        self.blocks, by_nets = nn.ModuleList(), {*chain(*made.values())}
        for layer, letter in enumerate(cfg.attention_layout):
            has_value_gate = layer in self.value_tables and ("value_gate", layer) not in by_nets
            attn = CausalSelfAttention(cfg, letter, has_value_gate) if letter != "-" else None
            has_embeds = ("embeds", layer) not in by_nets and attn is not None
            self.blocks.append(Block(cfg, attn, ("attn", layer) not in by_nets, has_embeds))
        self.skip_weights = nn.Parameter(torch.full((len(skips),), cfg.skip_init)) if skips else None
        self.smear_gate = nn.Parameter(torch.zeros(1, cfg.smear_gate_inputs)) if cfg.smear_gate_inputs else None
        self.smear_lambda = nn.Parameter(torch.tensor(0.0)) if cfg.smear_gate_inputs else None
        head = torch.empty(padded, K, dtype=dtype if is_tied_first else torch.float32)
        self.lm_head = nn.Parameter(head.normal_(0, cfg.head_std))
        if is_tied_first:  # and equal they stay while `is_tied`
            self.embed.weight.data.copy_(head)
        self.rotary = Rotary(cfg)
        if dtype == torch.float64:
            self.double()

    def forward(self, tokens: Tensor, targets: Tensor, windows: Tensor, weights: Tensor) -> Tensor:
        cfg, x, with_grads = self.cfg, self.features(tokens, windows), torch.is_grad_enabled()
        softcap = (cfg.lm_head_softcap, cfg.softcap_range, cfg.softcap_shift)
        scales = cfg.fp8_scales if cfg.lm_head_fp8 and with_grads else None
        targets = targets.view(len(x), -1)
        return HeadLoss.apply(x, self.lm_head, targets, weights, softcap, cfg.lm_head_slice, scales, with_grads)

    def features(self, tokens: Tensor, windows: Tensor) -> Tensor:
        """Return the head's input (T, K)."""
        cfg, masks = self.cfg, self.attention_masks(tokens, windows)
        tables = [embed(tokens) for embed in self.value_embeds]
        value_embeds = {layer: tables[n] for layer, n in self.value_tables.items()}
        bigrams = self.bigrams(tokens) if self.bigram_embed is not None else None
        x = self.embed(tokens)
        if self.smear_gate is not None:  # some of the token before, of another document too: record 34 (@classiclarryd)
            before = F.pad(x[:-1], (0, 0, 1, 0))
            x = x + self.smear_lambda * gates(x, self.smear_gate) * before
        x = x0 = norm(x)
        outputs: list[Tensor] = []
        factors = [block.lambdas() | dict(tokens=tokens) for block in self.blocks]
        if cfg.gate_layer:
            self.nets["early"](x, self.gate_scale, factors)
        if bigrams is not None and self.blocks[0].attn is not None:
            x = x + factors[0]["embeds"][1] * bigrams
        first, last = x, len(factors) - 1
        for layer, (block, f) in enumerate(zip(self.blocks, factors, strict=True)):
            if cfg.gate_layer and layer == cfg.gate_layer:
                self.nets["mid"](x, self.gate_scale, factors)
            if layer in self.skips:  # U-Net: later layers add earlier ones (record 11, @brendanh0gan)
                source, n = self.skips[layer]
                weight = self.skip_weights[n].sigmoid()  # record 32 (@bernard24)
                x = x + (weight * f["skip"][0] if "skip" in f else weight) * outputs[source]
            if self.mudd_layers and layer == last:  # it mixes the first stream, an early output and its own stream
                sources = [first, outputs[self.mudd_layers[0]], x]
                self.nets["last"](x, 0.1, factors)
                f["value"] = mix(f["values"], sources)
                x, x0 = x + mix(f["stream"], sources), first  # with bigrams, as in the record
            read = outputs[self.sources[layer]] if layer in self.sources else x  # record 77 (@classiclarryd)
            embeds = x0, bigrams if layer else None, value_embeds.get(layer)
            x = block(x, read, *embeds, self.rotary, masks.get(cfg.attention_layout[layer]), f)
            outputs.append(x)
        if self.mudd_layers:
            self.nets["out"](x, 0.1, factors)
            sources += tables[:1] + [outputs[layer] for layer in self.mudd_layers[1:]]
            x = x + mix(factors[last]["out"], sources)
        return norm(x)

    def bigrams(self, tokens: Tensor) -> Tensor:
        """Return the bigram embeddings (T, K)."""
        bigrams = self.bigram_embed(self.bigram_hashes(tokens))
        if self.cfg.sign_rows:  # bigrams that share a row interfere less: record 83 (@TrianX)
            bigrams = bigrams * self.signs[self.sign_hashes(tokens)].type_as(bigrams)
        return bigrams

    def sign_hashes(self, tokens: Tensor) -> Tensor:
        return F.pad((tokens[1:] ^ tokens[:-1]) % self.cfg.sign_rows, (1, 0))

    def bigram_hashes(self, tokens: Tensor) -> Tensor:
        """Hash (previous token, token) to a row of the table, for tokens (T,) int32; the first has the last row."""
        last = self.cfg.bigram_rows - 1
        tokens = F.pad(tokens[1:], (1, 0), value=last)  # as in the record: the second hash has it, too; products wrap
        return F.pad(((36313 * tokens[1:]) ^ (27191 * tokens[:-1])) % last, (1, 0), value=last)

    def attention_masks(self, tokens: Tensor, windows: Tensor) -> dict[str, BlockMask | GatheredMask]:
        """Return the masks by their letter in the layout: L with the long window, S and P with the short one."""
        cfg, on_cuda, masks = self.cfg, self.cfg.device == "cuda", {}
        max_blocks = 1 - (-max(*cfg.window_tokens, cfg.final_window_tokens) // cfg.mask_block)  # of a query block
        doc_ids = (tokens == cfg.eot_token).cumsum(0, dtype=torch.int32)
        for letter, i, heads_per_pair in ("L", 0, 1), ("S", 1, 1), ("P", 1, 2):
            if letter in cfg.attention_layout:
                ids = doc_ids.repeat_interleave(heads_per_pair)
                mask = document_block_mask(ids, windows[i], cfg.mask_block, for_flex=on_cuda)
                masks[letter] = mask if on_cuda else GatheredMask(mask, max_blocks, self.embed.weight.dtype)
        return masks


# ---- Head: softcapped logits and their cross entropy, in slices of tokens, in FP8 where the GPU can ------------------
def next_targets(targets: Tensor, num: int, prefixes: Tensor | None = None) -> Tensor:
    """Return for each token the next `num` (T, n), -2 beyond the end, and the prefix of the first, or -1 for none."""
    columns = F.pad(targets, (0, num - 1), value=-2).unfold(0, num, 1)
    return columns if prefixes is None else torch.cat([columns, prefixes[targets, None]], dim=1)


def softcapped_cross_entropy(z: Tensor, targets: Tensor, weights: Tensor, softcap: tuple, with_grad: bool):
    """Return the losses (T,) of logits z (T, V), which it overwrites, in nats, and their gradient by z or None.

    targets (T, n): -1 or, beyond the end, -2 for none. weights (n,): of their losses. softcap (c, r, d): a logit is
    r sigmoid((z + d) 2 / c), after Gemma 2's c tanh(z / c) (arXiv:2408.00118), with c = 15 since record 18
    (@KoszarskyB), lopsided since record 54 (@classiclarryd). A softmax ignores a shift, so the logits are computed less
    r: -r s, with s = sigmoid(-(z + d) 2 / c). None is above 0, so exp needs no maximum subtracted. Written out: with
    log_softmax and nll_loss, compiled, slices outlive their turn (10 GB more, by the compiled graph of gpt2).
    """
    c, r, d = softcap
    s = z.add_(d).mul_(-2 / c).sigmoid_()  # in place, as eager CPUs gain by it
    logits = -r * s
    shares = (targets >= 0) * weights
    target_logits = (shares * logits.gather(1, targets.clamp(min=0))).sum(-1)
    exps = logits.exp_()
    total = exps.sum(-1)
    losses = shares.sum(-1) * total.log() - target_logits
    if not with_grad:
        return losses, None
    columns = torch.arange(z.size(1), device=z.device)
    weight = ((targets != -1) * weights).sum(-1)  # as in the record, its gradient counts targets beyond the end, too
    d_logits = exps.mul_((weight / total)[:, None])  # weight softmax(logits), less the weights of the targets
    for k in range(len(weights)):
        d_logits.sub_(weights[k] * (targets[:, k, None] == columns))
    return losses, torch.ops.aten.sigmoid_backward(d_logits, s).mul_(r * 2 / c)


class HeadLoss(torch.autograd.Function):
    """Return the summed `softcapped_cross_entropy` of z = x @ w.T, for x (T, K), w (V, K), targets (T, n).

    Only `slice_tokens` rows of the logits (T, V) exist at a time. The forward pass computes the gradients of a slice as
    well, as computing its logits again in the backward pass took 27 to 41% of the head's time.
    fp8_scales of x, w and the logits' gradient, or None: multiply in FP8 (record 19, @YouJiacheng), e4m3 forward and
    e5m2 for the gradient, which needs range more than precision. Static scales do: x has unit RMS, w saturates, and the
    gradient of a token's loss by a logit is below 1.6 in gpt2.
    """

    @staticmethod
    def forward(ctx, x, w, targets, weights, softcap, slice_tokens, fp8_scales, with_grads) -> Tensor:
        wide = torch.promote_types(w.dtype, torch.float32)
        x_scale, w_scale, grad_scale = fp8_scales or (1.0, 1.0, 1.0)
        low, grad_low = (torch.float8_e4m3fn, torch.float8_e5m2) if fp8_scales else (x.dtype, x.dtype)
        w_q = quantize(w, w_scale, low)
        losses, grads_x, grad_w = [], [], None
        for x_slice, t in zip(x.split(slice_tokens), targets.split(slice_tokens), strict=True):
            x_q = quantize(x_slice, x_scale, low)
            z = matmul(x_q, w_q.t(), x_scale * w_scale, x.dtype, fast=True)
            loss, grad_z = softcapped_cross_entropy(z.to(wide), t, weights, softcap, with_grads)
            losses.append(loss)
            if with_grads:
                grad_q = quantize(grad_z, grad_scale, grad_low)
                grads_x.append(matmul(grad_q, w_q, grad_scale * w_scale, x.dtype))
                # As (K, V), then transposed: faster than (V, K) directly (record 19)
                part = matmul(x_q.t(), grad_q, x_scale * grad_scale, wide).t()
                grad_w = part if grad_w is None else grad_w + part
        if with_grads:
            ctx.save_for_backward(torch.cat(grads_x), grad_w.to(w.dtype))
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        # grad_w is a transpose; autograd accumulates slowly unless it is as contiguous as the weight
        return grad * grad_x, (grad * grad_w).contiguous(), None, None, None, None, None, None


# ---- Optimizers: every rank updates its share of each group of parameters, as in ZeRO-1 (arXiv:1910.02054) -----------
# The place of this process among all, in torchrun's terms
Ranks = namedtuple("Ranks", "rank world_size local_rank local_world_size", defaults=(0, 1, 0, 1))
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def start_collective(collective: Callable, *args) -> Callable[[], object]:
    """Start a collective and return a function that waits for it. With one process there is nothing to do."""
    return collective(*args, async_op=True).wait if dist.is_initialized() else lambda: None


class ShardedOptimizer:
    """Update a group of parameters of one precision, every rank an equal share of their rows.

    Parameters are packed into one buffer, each from a new row on, zero-padded, and become views of it. settings: an
    AdamGroup, or the like, with an lr. A subclass defines update_shard(shard, grad, step, lr), which writes new values
    into the rank's rows `shard` and may overwrite their gradient; `moments` names what `state` keeps for these rows.
    """

    moments: tuple[str, ...] = ()
    update_shard: Callable[[Tensor, Tensor, int, float], None]
    by_matrix = False  # a row is a matrix, or else 16 numbers, as kernels want addresses that are multiples of 16
    every = 1  # step once in so many steps, on the sum of their gradients

    def __init__(self, params: dict[str, nn.Parameter], settings, cfg: Hyperparameters, ranks: Ranks):
        self.names, self.params = [*params], [*params.values()]
        self.settings, self.cfg, self.ranks = settings, cfg, ranks
        assert len({p.dtype for p in self.params}) == 1, f"one precision per group: {self.names}"
        row = self.params[0].shape[-2:] if self.by_matrix else (16,)
        self.rows_per_param = [-(-p.numel() // math.prod(row)) for p in self.params]
        self.rows_per_param[-1] += -sum(self.rows_per_param) % ranks.world_size  # equal shares
        self.param_buffer = self.params[0].new_zeros(sum(self.rows_per_param), *row)
        self.grad_buffer = torch.zeros_like(self.param_buffer)
        for p, view in zip(self.params, self.views(self.param_buffer), strict=True):
            p.data = view.copy_(p.detach())
        self.grad_views = self.views(self.grad_buffer)
        self.param_shard = self.share(self.param_buffer)
        self.grad_shard = self.grad_buffer if ranks.world_size == 1 else torch.zeros_like(self.param_shard)
        self.state = {name: torch.zeros_like(self.grad_shard) for name in self.moments}

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the part of a buffer that belongs to each parameter, in its shape."""
        parts = buffer.split(self.rows_per_param)
        return [part.flatten()[: p.numel()].view_as(p) for part, p in zip(parts, self.params, strict=True)]

    def share(self, buffer: Tensor) -> Tensor:
        """Return the rows of a buffer that belong to this rank."""
        return buffer.chunk(self.ranks.world_size)[self.ranks.rank]

    def reduce(self, step: int) -> None:
        """Start to sum the gradients over the ranks; each gets the sums of its rows."""
        torch._foreach_copy_(self.grad_views, [p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        self.wait = start_collective(reduce_scatter, self.grad_shard, self.grad_buffer)

    def update(self, step: int) -> None:
        """Update this rank's rows with the mean over the sequences, and start to send them to the other ranks."""
        self.wait()
        if self.cfg.batch_sequences > 1:
            self.grad_shard.div_(self.cfg.batch_sequences)
        self.update_shard(self.param_shard, self.grad_shard, step, self.settings.lr * lr_multiplier(step, self.cfg))
        self.wait = start_collective(all_gather, self.param_buffer, self.param_shard)

    def gather(self) -> None:
        """Wait for the rows of the other ranks."""
        self.wait()


class Adam(ShardedOptimizer):
    """Step tables, head, scalars and gates by Adam (arXiv:1412.6980).

    In gpt2 it steps every other time, on the sum of two gradients (record 39, @classiclarryd). With a weight decay,
    which is cautious (record 50, @roeeshenberg), its moments are in fp32 (record 56, @ChrisJMcCormick).
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: dict[str, nn.Parameter], settings: AdamGroup, cfg: Hyperparameters, ranks: Ranks):
        super().__init__(params, settings, cfg, ranks)
        self.every = cfg.adam_every
        if settings.decay:  # not for nano's bf16 tables, which would step 5 times slower
            self.state = {name: m.to(torch.promote_types(m.dtype, torch.float32)) for name, m in self.state.items()}

    def update_shard(self, shard: Tensor, grad: Tensor, step: int, lr: float) -> None:
        m, v = self.state["exp_avg"], self.state["exp_avg_sq"]
        _, decay, beta1, beta2 = self.settings
        count = step // self.every  # updates before this one
        eps = self.cfg.adam_eps / (1 - beta2 ** (count + 1)) ** 0.5  # the records add it before the bias correction
        options = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, amsgrad=False, maximize=False)
        counts = [torch.full((), count, dtype=torch.float32, device=grad.device)]
        new = shard.to(m.dtype, copy=decay > 0)
        adam([new], [grad.to(m.dtype)], [m], [v], [], counts, fused=True, **options)  # PyTorch's kernel
        if decay:  # cautious: only where the update, which has the sign of m, moves a weight towards 0
            new.addcmul_(shard, m * shard > 0, value=-decay * lr**2)
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

    The means of u^2, which even out neurons, are over columns, or over rows where these are fewer, as there is one for
    each hidden unit of an MLP (NorMuon, arXiv:2510.05491; record 41, @li_zichong, and 48, @ChrisJMcCormick). The factor
    is the `lr_factor` of a weight, or 1. The weight decay is cautious, only towards 0 (record 43, @varunneal).
    """

    moments = ("momentum_buffer",)
    by_matrix = True  # of the 22 in gpt2's MLPs, each of 8 ranks has 3, with padding

    def __init__(self, params: dict[str, nn.Parameter], settings, cfg: Hyperparameters, ranks: Ranks):
        super().__init__(params, settings, cfg, ranks)
        rows, columns = self.grad_shard.shape[-2:]
        self.mean_dim = -1 if rows >= columns else -2
        self.state["second_moment"] = torch.zeros_like(self.grad_shard.narrow(self.mean_dim, 0, 1))
        factors = self.grad_buffer.new_ones(len(self.grad_buffer), 1, 1)
        for part, p in zip(factors.split(self.rows_per_param), self.params, strict=True):
            part.fill_(getattr(p, "lr_factor", 1.0))
        self.factors = self.share(factors)
        ns = zeropower_via_newtonschulz5
        self.orthogonalize = torch.compile(ns, fullgraph=True, dynamic=False) if cfg.compile else ns

    def update_shard(self, shard: Tensor, grad: Tensor, step: int, lr: float) -> None:
        cfg, momentum = self.cfg, muon_momentum(step, self.cfg)
        momentum_buffer, second_moment = self.state["momentum_buffer"], self.state["second_moment"]
        momentum_buffer.lerp_(grad, 1 - momentum)
        nesterov = grad.lerp_(momentum_buffer, momentum)
        update = self.orthogonalize(nesterov, getattr(torch, cfg.dtype)).to(grad.dtype)
        second_moment.lerp_(update.square().mean(self.mean_dim, keepdim=True), 1 - cfg.muon_beta2)
        even = update / second_moment.clamp(min=1e-10).sqrt()
        norms, new_norms = (t.norm(dim=(-2, -1), keepdim=True) for t in (update, even))
        update = even * (norms / new_norms.clamp(min=1e-10))
        if cfg.muon_decay:
            update.addcmul_(shard, update * shard >= 0, value=cfg.muon_decay * lr)
        shard.addcmul_(self.factors, update, value=-lr)


MuonGroup = namedtuple("MuonGroup", "lr")
# Which optimizer steps the parameters that have one of `names` in their name, with which settings
Group = namedtuple("Group", "optimizer names settings")


def build_optimizers(gpt: GPT, ranks: Ranks) -> list[ShardedOptimizer]:
    """Put every parameter into exactly one group."""
    cfg = gpt.cfg
    table = [
        Group(Muon, "qk_w v_w attn.c_proj c_fc mlp.c_proj", MuonGroup(cfg.muon_lr)),
        Group(Adam, "lm_head", cfg.head_adam),
        Group(Adam, "embed", cfg.head_adam if cfg.tied_frac else cfg.embed_adam),
        Group(Adam, "value_embeds bigram_embed", cfg.table_adam),
        Group(Adam, "attn.lambdas skip_weights smear_lambda", cfg.scalar_adam),
        Group(Adam, "resid_lambdas", cfg.resid_adam),
        Group(Adam, "post_lambdas embed_lambdas", cfg.x0_adam),
        Group(Adam, "early.w1 early.w2 mid.w1 mid.w2", cfg.net_adam),
        Group(Adam, "early.b2 mid.b2 gate_scale", cfg.net_adam._replace(decay=0.0)),
        Group(Adam, "last.w1 last.w2 out.w1 out.w2", cfg.mudd_adam),
        Group(Adam, "last.b2 out.b2", cfg.mudd_adam._replace(decay=0.0)),
        Group(Adam, "value_gate", cfg.gate_adam),
        Group(Adam, "smear_gate", cfg.smear_adam),
    ]
    members: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in gpt.named_parameters():
        rows = [i for i, group in enumerate(table) if any(f".{part}." in f".{name}." for part in group.names.split())]
        if len(rows) != 1:
            raise ValueError(f"each parameter needs exactly one group in build_optimizers: {name}")
        stack = p.shape[-2:] if table[rows[0]].optimizer.by_matrix else None  # matrices of one shape
        members.setdefault((rows[0], stack), {})[name] = p
    optimizers = [table[i].optimizer(params, table[i].settings, cfg, ranks) for (i, _), params in members.items()]
    # Largest first: its update overlaps the other reduce-scatters, and only the smallest all-gather overlaps nothing
    return sorted(optimizers, key=lambda optimizer: -optimizer.grad_buffer.nbytes)


@torch.no_grad()
def step_optimizers(optimizers: Sequence[ShardedOptimizer], step: int) -> None:
    """Take a step on the gradients, summed over this rank's sequences, and clear those that were used."""
    due = [optimizer for optimizer in optimizers if (step + 1) % optimizer.every == 0]
    for optimizer in due:
        optimizer.reduce(step)
    for optimizer in due:  # while one computes, the gradients of the next and the values of the last travel
        optimizer.update(step)
    for optimizer in due:
        optimizer.gather()


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
        self.prefixes = torch.from_numpy(read_prefixes(cfg)).to(self.device)
        self.stage = 0
        self.set_schedules(0)

    def set_schedules(self, step: int) -> None:
        """Set windows, weights of the losses, rotary tables and attention scale to a step's. Nothing recompiles."""
        windows, weights = attention_windows(step, self.cfg), mtp_weights(step, self.cfg)
        self.num_next, weights = len(weights), weights + prefix_weights(step, self.cfg)
        self.windows = torch.tensor(windows, dtype=torch.int32).to(self.device, non_blocking=True)
        self.weights = torch.tensor(weights, dtype=self.gpt.rotary.scale.dtype).to(self.device, non_blocking=True)
        if self.stage != stage_of(step, self.cfg):
            self.stage = stage_of(step, self.cfg)
            self.gpt.rotary.set_stage(self.stage, self.cfg)

    def train_step(self, step: int, sequences: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Take a step on this rank's sequences, and return the mean loss over those of all ranks."""
        losses = []
        self.set_schedules(step)
        prefixes = self.prefixes if prefix_weights(step, self.cfg) else None
        for tokens, targets in sequences:
            columns = next_targets(targets, self.num_next, prefixes)  # not in the graph, which would keep more of them
            loss = self.model(tokens, columns, self.windows, self.weights)
            # A sum over tokens, as in the record: gradients grow with train_seq_len. Only the optimizers divide by the
            # number of sequences: FP8 sees the same for any number of processes, and fewer gradients become 0
            (loss * self.cfg.grad_factor).backward()
            losses.append(loss.detach() / len(tokens))
        mean = torch.stack(losses).sum() / self.cfg.batch_sequences
        wait = start_collective(dist.all_reduce, mean)
        embed, head = self.gpt.embed.weight, self.gpt.lm_head
        if is_tied(step, self.cfg) and (step + 1) % self.cfg.adam_every == 0:  # both step on the sum of their gradients
            embed.grad = head.grad = embed.grad + head.grad  # (records 51, 53: @varunneal)
        step_optimizers(self.optimizers, step)
        wait()
        if self.cfg.mlp_fp8:
            self.share_hidden_max()
        return mean

    def share_hidden_max(self) -> None:
        """Let all ranks go by the largest hidden units of this step, in any sequence."""
        buffers = [t for name, t in self.gpt.named_buffers() if "hidden_max" in name]
        largest = torch.stack(buffers)[:, 1].contiguous()
        start_collective(dist.all_reduce, largest, dist.ReduceOp.MAX)()
        torch._foreach_copy_(buffers, [*F.pad(largest[:, None], (0, 1))])

    @torch.no_grad()
    def score(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of the next tokens."""
        return self.model(tokens, targets, self.windows, torch.ones_like(self.weights[:1]))

    def evaluate(self, step: int, val_plan: Sequence[Batch]) -> float:
        """Return the mean loss over the validation tokens. A rank may score more sequences than others, or none."""
        self.set_schedules(step)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        own = val_plan[self.ranks.rank :: self.ranks.world_size]
        for [(tokens, targets)] in read_batches(own, [0], self.cfg, self.device):
            total += self.score(tokens, targets)
        start_collective(dist.all_reduce, total)()
        return total.item() / self.cfg.val_tokens

    def warm_up(self, saved: dict[str, Tensor] | None = None) -> None:
        """Run every graph once on dummy tokens, then restore all state, or load `saved`. Rank 0 has the state."""
        is_kept = self.ranks.rank == 0 and not saved
        before = {name: t.to("cpu", copy=True) for name, t in self.state().items() if is_kept}
        tokens = (torch.arange(len(self.gpt.rotary.cos) + 1) % self.cfg.vocab_size).to(torch.uint16)
        tokens = tokens.pin_memory() if self.device.type == "cuda" else tokens  # the way of `read_batches`
        tokens = tokens.to(self.device).to(torch.int32)
        for start in stage_starts(self.cfg)[:-1]:
            length, count = train_seq_len(start, self.cfg), self.cfg.batch_sequences // self.ranks.world_size
            for step in range(start, start + self.cfg.adam_every):
                self.train_step(step, [(tokens[:length], tokens[1 : length + 1].long())] * count)
        self.score(tokens[: self.cfg.val_seq_len], tokens[1 : self.cfg.val_seq_len + 1].long())
        self.gpt.zero_grad(set_to_none=True)
        self.restore(saved or before)

    def state(self) -> dict[str, Tensor]:
        """Return all that a step changes: parameters, FP8 maxima, and moments, gathered from all ranks."""
        tensors = {name: p.detach() for name, p in self.gpt.named_parameters()}
        tensors |= {name: t for name, t in self.gpt.named_buffers() if "hidden_max" in name}
        for optimizer in self.optimizers:
            for name, shard in optimizer.state.items():
                whole = shard
                if self.ranks.world_size > 1:
                    whole = shard.new_empty(len(optimizer.grad_buffer), *shard.shape[1:])
                    start_collective(all_gather, whole, shard)()
                tensors[f"{optimizer.names[0]} {name}"] = whole
        return tensors

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Set all ranks to what `state` returned; only rank 0 needs `saved`."""
        tensors = self.state()
        for name, tensor in tensors.items():
            if self.ranks.rank == 0:
                tensor.copy_(saved[name])
            start_collective(dist.broadcast, tensor, 0)()
        for optimizer in self.optimizers:
            for name, shard in optimizer.state.items():
                shard.copy_(optimizer.share(tensors[f"{optimizer.names[0]} {name}"]))


# ---- Run: ranks that agree, log, checkpoints -------------------------------------------------------------------------
def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]


def init_distributed() -> Ranks:
    """Join the ranks that torchrun's environment names. Objects travel by gloo: ranks need not agree on a device."""
    texts = [os.environ.get(name.upper(), str(default)) for name, default in Ranks._field_defaults.items()]
    ranks = Ranks(*(int(text) if text.isdecimal() and len(text) < 9 else -1 for text in texts))
    if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size):
        raise UserError(f"{', '.join(Ranks._fields).upper()} are {', '.join(texts)}: use torchrun, or unset them")
    if ranks.world_size > 1:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG to SIGTERM: no rank outlives its launcher
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))  # one may compile while the others wait
        except (RuntimeError, ValueError) as error:
            raise UserError(f"rank {ranks.rank} does not reach the others: {first_line(error)}") from None
    return ranks


def check_same(ranks: Ranks, problem: UserError | None, facts: dict) -> dict:
    """Return the facts of rank 0. Raise on all ranks if one has a problem, or knows another fact than rank 0."""
    everyone = [own := (os.uname().nodename, problem, facts)] * ranks.world_size
    if ranks.world_size > 1:
        try:
            dist.all_gather_object(everyone, own)
        except RuntimeError as error:  # rank 0 may load for long, but not for 30 minutes
            raise UserError(f"rank {ranks.rank} waits for the others in vain: {first_line(error)}") from None
    expected = everyone[0][2]
    for rank, (host, problem, its_facts) in enumerate(everyone):
        for name, value in expected.items():
            if not problem and its_facts.get(name, value) != value:
                problem = UserError(f"has {name} {its_facts[name]} instead of {value}: start all alike")
        if problem:  # one rank per node says it
            who = f"rank {rank} on {host}: " if ranks.world_size > 1 else ""
            raise type(problem)(f"{who}{problem}") if ranks.local_rank == 0 else SystemExit(problem.code)
    return expected


# How far a run is, as a checkpoint holds it. curves: (step, loss, ms) by name; tensors: `Trainer.state`
Saved = namedtuple("Saved", "run_id seed facts step ms curves tensors")


def load(path: Path, *names: str) -> dict:
    """Return the `names` of what `RunLog.save` wrote. Refuse a damaged file, by the checksums of its zip archive."""
    try:
        if not path.is_file() or zipfile.ZipFile(path).testzip():
            raise OSError("missing or damaged")
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
        return {name: state[name] for name in names}
    except Exception as error:  # a damaged file fails in many ways
        raise UserError(f"{path}: not a sound checkpoint: {first_line(error)[:100]}") from None


def load_checkpoint(given: Hyperparameters) -> Saved:
    """Return what --resume names. `latest`: the newest in log_dir, of run_id if given; a new run if there is none."""
    path = Path(given.resume) if given.resume else None
    if given.resume == "latest":
        paths = Path(given.log_dir).glob(f"{glob.escape(given.run_id) or '*'}.checkpoint")
        path = max(paths, key=lambda path: path.lstat().st_mtime_ns, default=None)
        if path and path.with_suffix(".json").exists():
            raise AlreadyComplete(f"{path.with_suffix('.json')}: this run is already complete")
    if not path:
        return Saved(given.run_id, given.seed, facts={}, step=0, ms=0.0, curves={}, tensors={})
    saved = Saved(**load(path, *Saved._fields))
    if given.run_id not in ("", saved.run_id):
        raise UserError(f"--run_id {given.run_id}: {path} is of run {saved.run_id}")
    return saved


class RunLog:
    """Keep the clock and the curves of a run, write LOG_DIR/RUN_ID.txt and tell the console. Only rank 0 writes."""

    def __init__(self, cfg: Hyperparameters, is_main: bool, saved: Saved):
        self.cfg, self.is_main, self.path = cfg, is_main, Path(cfg.log_dir) / f"{cfg.run_id}.txt"
        self.saved, self.curves = saved, {name: [*curve] for name, curve in saved.curves.items()}
        self.pending: deque = deque()  # losses on their way to the host
        self.device = getattr(torch, cfg.device)  # torch.cuda, or torch.cpu, where there is nothing to wait for
        self.file = self.open() if is_main else open(os.devnull, "w")  # noqa: SIM115
        self.tokens = [cfg.batch_sequences * train_seq_len(step, cfg) for step in range(cfg.num_iterations)]
        options = dict(total=sum(self.tokens), initial=sum(self.tokens[: saved.step]), unit="tok", unit_scale=True)
        options |= dict(desc="starting", bar_format="{desc} |{bar}| {rate_fmt} {remaining} left", dynamic_ncols=True)
        self.bar = tqdm(**options, disable=not (is_main and os.isatty(1) and os.isatty(2)))

    def open(self):
        """Create the log, or go on with it. Refuse to if another run has written, or is writing, under its name."""
        theirs = [".json"] if self.cfg.resume else [".json", ".txt", ".checkpoint"]
        theirs += [] if self.saved.step else [".pt"]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for path in map(self.path.with_suffix, theirs):
                if os.path.lexists(path):
                    raise OSError(f"{path.name} is there already")
            if os.path.lexists(self.path) and not self.path.is_file():  # opening a pipe would wait forever
                raise OSError("not a regular file")
            file = open(self.path, "a" if self.cfg.resume else "x", encoding="utf-8")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # dies with the process
            return file
        except OSError as error:
            reason = "another process is writing it" if isinstance(error, BlockingIOError) else error
            raise UserError(f"log {self.path}: {reason}; choose another --run_id or --log_dir") from None

    def start_clock(self, ms: float) -> None:
        self.device.synchronize()
        self.bar.unpause()
        self.started = time.perf_counter() - ms / 1000

    def read_clock(self) -> float:
        """Return the milliseconds of training so far, without validations and checkpoints."""
        return 1000 * (time.perf_counter() - self.started)

    def write(self, text: str, console: bool = False) -> None:
        """Write a line. If the disk is full or the console has gone away, the training goes on."""
        for stream in [self.file, sys.stdout] if console and self.is_main else [self.file]:
            with contextlib.suppress(OSError), tqdm.external_write_mode(stream):  # above the bar
                print(text, file=stream, flush=True)

    def loss(self, step: int, loss: Tensor) -> None:
        """Send the loss of a step to the host without waiting, and log those that were sent 8 steps ago."""
        on_host, arrived = loss.to("cpu", non_blocking=True), self.device.Event()
        arrived.record()
        self.pending.append((step, on_host, arrived))
        self.flush(lag=8 if loss.is_cuda else 0)

    def flush(self, lag: int = 0) -> None:
        """Wait for the losses of all but the last `lag` steps, and log them; a pipe sees every 25th."""
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
        last = " ".join(f"{name.removesuffix('_loss')} {curve[-1][1]:.4f}" for name, curve in self.curves.items())
        self.bar.set_description_str(f"step {step} {last}", refresh=False)
        timing = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self.write(f"step:{step}/{self.cfg.num_iterations} {name}:{loss:.4f} {timing}", console)

    def save(self, suffix: str, write: Callable, note: str) -> None:
        """Let `write` fill a file beside the log, whole or not at all, through to the disk, and say how it went."""
        path, part = self.path.with_suffix(suffix), self.path.with_suffix(f"{suffix}.part")
        try:
            if self.is_main:
                part.unlink(missing_ok=True)  # of a run that was killed, or a link to anywhere
                with open(part, "xb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            self.write(f"{path}: saved; {note}", console=suffix != ".json")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
            with contextlib.suppress(OSError):
                part.unlink()
            self.write(f"{path}: not saved: {first_line(error)}", console=True)


def describe(cfg: Hyperparameters, ranks: Ranks, plans: dict[str, list[Batch]], facts: dict) -> str:
    """Return versions, hardware, shards and the hashes of the tokens, for the log."""
    lines = [f"Running Python {sys.version}", f"Running PyTorch {torch.__version__}, numpy {np.__version__}"]
    lines += [f"{ranks.world_size} processes, {torch.get_num_threads()} threads each, {os.cpu_count()} cores"]
    options = dict(cwd=Path(__file__).resolve().parent, capture_output=True, text=True, errors="replace", timeout=20)
    for command in ("git --no-optional-locks describe --always --abbrev=40 --dirty", "lscpu", "nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            lines += [f"$ {command}", subprocess.run(command.split(), **options).stdout.strip()]
    for name, plan in plans.items():
        paths = dict.fromkeys(batch.path for batch in plan)
        lines += [f"{name} shard: {path}, {os.path.getsize(path)} bytes" for path in paths]
    note = "" if cfg.val_sha256 in ("", facts["validation tokens"]) else " (not the track's: do not compare losses)"
    num_tokens = cfg.batch_sequences * sum(train_seq_len(step, cfg) for step in range(cfg.num_iterations))
    lines += [f"training tokens: {num_tokens}, sha256 {facts['training tokens']}"]
    return "\n".join([*lines, f"validation tokens: {cfg.val_tokens}, sha256 {facts['validation tokens']}{note}"])


def prepare(argv: Sequence[str], ranks: Ranks) -> tuple[Hyperparameters, dict[str, list[Batch]], Saved]:
    """Do all that can fail on a rank alone. Return configuration, plans, and how far the run is, with its facts."""
    given = parse_args(argv, ranks.world_size)
    saved = load_checkpoint(given if ranks.rank == 0 else dataclasses.replace(given, resume=""))
    cfg = resolve(dataclasses.replace(given, run_id=saved.run_id, seed=saved.seed))
    divisors = [n for n in range(1, 1025) if cfg.batch_sequences % n == 0]
    if ranks.world_size not in divisors:
        raise UserError(f"{ranks.world_size} processes do not divide {cfg.batch_sequences} sequences: {divisors} do")
    plans = plan_data(cfg)
    may_differ = "run_id log_dir train_files val_files prefix_file save_checkpoint checkpoint_every resume".split()
    fields = dataclasses.asdict(cfg) | dict(seed=given.seed)
    # What all ranks have to agree on, and a checkpoint with them
    facts = {f"--{name}": str(value) for name, value in fields.items() if name not in may_differ}
    facts |= {"processes": ranks.world_size, "torch": str(torch.__version__), "numpy": np.__version__}
    facts["script"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    facts["training tokens"] = hash_tokens(plans["train"], cfg, targets=True)
    facts["prefixes"] = hashlib.sha256(read_prefixes(cfg)).hexdigest()
    facts["validation tokens"] = hash_tokens(plans["val"], cfg, targets=False)
    for name, value in saved.facts.items():
        if facts.get(name) != value:
            raise UserError(f"the checkpoint has {name} {value} instead of {facts.get(name)}: resume with the same")
    return cfg, plans, saved._replace(facts=facts, run_id=cfg.run_id, seed=cfg.seed)


def train(trainer: Trainer, plans: dict[str, list[Batch]], log: RunLog, start: int) -> int:
    """Train from step `start` to the end. Return the number of graphs compiled on the clock: 0, or a bug."""
    cfg, ranks, graphs = trainer.cfg, trainer.ranks, torch._dynamo.utils.counters["stats"]
    sequences = range(ranks.rank, cfg.batch_sequences, ranks.world_size)
    batches = read_batches(plans["train"][start:], sequences, cfg, trainer.device)
    gc.collect()
    gc.disable()  # one collection in the middle of a run was measured at 0.6 s (nanochat issue 477)
    compiled = graphs["unique_graphs"]
    log.start_clock(log.saved.ms)
    for step in range(start, cfg.num_iterations + 1):
        is_last = step == cfg.num_iterations
        saves = cfg.checkpoint_every and step % cfg.checkpoint_every == 0 and start < step and not is_last
        validates = is_last or (cfg.val_loss_every and step % cfg.val_loss_every == 0)
        if saves or validates:
            log.flush()
            ms = log.read_clock()
            if saves:
                log.bar.set_description_str("saving")
                log.saved = log.saved._replace(step=step, ms=ms, curves=log.curves)
                state = log.saved._replace(tensors=trainer.state())._asdict()
                log.save(".checkpoint", partial(torch.save, state), f"step {step}")
            if validates:  # after saving: a run that resumes here validates, too
                log.bar.set_description_str("validating")
                log.point("val_loss", step, trainer.evaluate(step, plans["val"]), ms)
            log.start_clock(ms)
        if not is_last:
            log.loss(step + 1, trainer.train_step(step, next(batches)))
    return graphs["unique_graphs"] - compiled


def peak_memory_mib(device: torch.device) -> int:
    """Return the most memory that torch allocated on the GPU, or that the whole process held on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def report(log: RunLog, plans: dict[str, list[Batch]], trainer: Trainer, recompiles: int) -> dict:
    """Log the summary, write the result and the model, and say what to try next."""
    cfg, path, (_, val_loss, train_time) = trainer.cfg, log.path, log.curves["val_loss"][-1]
    peak, step_ms = peak_memory_mib(trainer.device), np.diff([0.0, *(ms for _, _, ms in log.curves["train_loss"])])
    result = dict(val_loss=val_loss, target_loss=cfg.target_loss, train_time_ms=train_time, log=str(path))
    result |= dict(num_iterations=cfg.num_iterations, seed=cfg.seed, peak_memory_mib=peak, recompiles=recompiles)
    result |= dict(val_curve=log.curves["val_loss"], train_curve=log.curves["train_loss"])
    for name, batch in dict(first=plans["train"][0], last=plans["train"][-1]).items():
        log.write(f"{name} batch: {batch.path} position {batch.sequences[0][0, 0]}")
    log.write(f"recompiles after the clock started: {recompiles}", console=recompiles > 0)
    log.write(f"step time: median {np.median(step_ms):.2f}ms\npeak memory: {peak} MiB")
    if cfg.save_checkpoint:
        model = dict(configuration=json.dumps(dataclasses.asdict(cfg)), model=trainer.gpt.state_dict())
        log.save(".pt", partial(torch.save, model), "next: python sample.py")
    log.save(".json", lambda file: file.write(json.dumps(result).encode() + b"\n"), "the result")
    text = f"val_loss {val_loss:.4f} after {train_time / 1000:.2f} s"
    if cfg.target_loss and cfg.val_sha256 in ("", log.saved.facts["validation tokens"]):  # or else another text
        text += f"; target {cfg.target_loss} {'reached' if val_loss <= cfg.target_loss else 'not reached'}"
    log.write(f"{text}; peak memory {peak} MiB; log: {path}", console=True)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Train as the flags say, and return the result. Raise UserError, FloatingPointError or KeyboardInterrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    source = Path(__file__).read_text(encoding="utf-8")  # before anybody edits it
    # Segments of GPU memory that grow waste less of it. torch reads this when CUDA starts, not when it is imported
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    ranks = init_distributed()
    try:
        cfg, plans, saved = prepare(argv, ranks)
    except UserError as error:
        check_same(ranks, error, {})  # raises, on all ranks
    facts = check_same(ranks, None, saved.facts | (dict(start=saved.step) if ranks.rank == 0 else {}))
    try:  # after the ranks have agreed: one that is refused leaves no log behind
        log, problem = RunLog(cfg, ranks.rank == 0, saved), None
    except UserError as error:
        problem = error
    check_same(ranks, problem, {})
    try:
        trainer = Trainer(cfg, ranks)
        if saved.step:
            log.write(f"resumed at step {saved.step}, log: {log.path}, flags: {json.dumps(argv)}", console=True)
        else:
            log.write(f"{source}\n{'=' * 100}\n{describe(cfg, ranks, plans, facts) if log.is_main else ''}")
            log.write(f"flags: {json.dumps(argv)}\nconfiguration: {json.dumps(dataclasses.asdict(cfg))}\n{'=' * 100}")
            log.write(f"seed: {cfg.seed}, log: {log.path}", console=True)
        log.bar.set_description_str("compiling" if cfg.compile else "warming up")
        trainer.warm_up(saved.tensors)
        return report(log, plans, trainer, train(trainer, plans, log, facts["start"]))
    except BaseException as error:
        resume = f"; to go on, add --resume {log.path.with_suffix('.checkpoint')}" if log.saved.step else ""
        log.write(f"stopped: {first_line(error)}{resume}", console=bool(resume))
        raise
    finally:
        gc.enable()
        log.bar.close()
        with contextlib.suppress(OSError):
            log.file.close()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # None: closed from the start
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # nor do names that it cannot show
    code = 0
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (UserError, FloatingPointError, KeyboardInterrupt) as error:
        code = error.code if isinstance(error, UserError) else 3 if isinstance(error, FloatingPointError) else 130
        with contextlib.suppress(OSError):
            print(f"train_gpt.py: {str(error) or 'interrupted'}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what is left for a console that has gone away would make the exit code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
