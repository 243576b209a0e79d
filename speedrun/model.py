"""Find, load and ask a model that a run with --save_checkpoint wrote.

Beside RUN_ID.pt lie the rows of n-grams, a file for each process that trained, RUN_ID.ngrams0 and so on: only the rows
that a text needs are read. For each new token the model reads the whole text, as it does in training.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speedrun import needs

with needs.packages():
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    import train_gpt
    from train_gpt import GPT, Hyperparameters, Ranks, Reader, UserError

SLICE = 512  # tokens whose logits exist at a time
SMALL = 10_000_000  # parameters, below which a second thread costs more than it saves (nano, busy machine: 20 times)


class Model:
    """Hold a trained model, and what is set in its last validation.

    ngrams: the rows that were ever stepped, of each process that trained: `ids`, ascending, and their `rows`.
    """

    def __init__(self, gpt: GPT, ngrams: Sequence[dict[str, Tensor]]):
        self.gpt = gpt
        self.cfg = gpt.cfg
        self.device = gpt.lm_head.device
        self.ngrams = ngrams
        self.plan = train_gpt.plan_validation(self.cfg.num_iterations, self.cfg)
        self.settings = train_gpt.settings_of(self.plan, self.cfg, self.device)
        self.reader = Reader(self.cfg, Ranks(), self.device)
        bits = train_gpt.read_invalid_tokens(self.cfg)
        self.canon = torch.from_numpy(bits).to(self.device) if len(bits) else None
        self.size = sum(p.numel() for p in gpt.parameters())

    def find_ngrams(self, numbers: Tensor) -> Tensor:
        """Return rows (..., K) by their numbers: zeros where no step has changed them."""
        found = torch.zeros(*numbers.shape, self.cfg.model_dim, dtype=getattr(torch, self.cfg.dtype), device="cpu")
        for part in self.ngrams:
            places = torch.searchsorted(part["ids"], numbers.long()).clamp(max=len(part["ids"]) - 1)
            is_here = part["ids"][places] == numbers
            found[is_here] = part["rows"][places[is_here]].to(found.dtype)
        return found.to(self.device)

    def features(self, tokens: Sequence[int]) -> Tensor:
        """Return the head's input (T, K) for these tokens."""
        rest = -len(tokens) % self.cfg.block_size + 1  # to whole blocks, and a last target: no token sees what follows
        read = np.array([*tokens, *[self.cfg.eot_token] * rest])
        [[inputs]], requests = self.reader.make([self.plan], [[read]])
        ngrams = self.find_ngrams(requests.ids[inputs.ngram_index])
        # A mask is made where torch makes tensors; saying where takes a fifth of nano's time
        with torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext():
            return self.gpt.features(self.reader.on_device(inputs), ngrams, self.settings)[: len(tokens)]

    def logits(self, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the logits (n, vocab_size) of what follows the tokens at `places` (n,).

        x (T, K): the head's input for `tokens` (T,). With a pointer they are logarithms of probabilities.
        """
        cfg = self.cfg
        z = train_gpt.linear(x[places], self.gpt.lm_head)
        z = z.to(train_gpt.wide(z.dtype))
        logits = cfg.softcap_range * torch.sigmoid((z + cfg.softcap_shift) * 2 / cfg.lm_head_softcap)
        if self.canon is not None:
            bits = self.canon[tokens[places]][:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self.device) & 1
            logits = logits.masked_fill(bits.flatten(1) > 0, -60)  # as in the last validation
        if cfg.pointer_dim:
            logits = self.share_out_copies(logits, x, tokens, places)
        return logits[:, : cfg.vocab_size]

    def share_out_copies(self, logits: Tensor, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logarithms of probabilities: the pointer shares out that of a copy, see `train_gpt.Pointer`."""
        block = self.cfg.val_pointer_block
        q, k, sink = self.gpt.pointer.project(x)
        docs, t = (tokens == self.cfg.eot_token).cumsum(0), places[:, None]
        other = torch.arange(len(tokens), device=self.device)
        sees = (other < t) & (t // block - other // block < 2) & (docs == docs[t])
        scores = (q[places].to(sink.dtype) @ k.to(sink.dtype).T).masked_fill(~sees, -torch.inf)
        weights = torch.cat([scores, sink[t]], dim=1).softmax(1)
        p = logits.softmax(1)
        alpha = p[:, self.cfg.copy_row, None].clamp(max=1 - 1e-6)
        copied = torch.zeros_like(p).index_add_(1, tokens, weights[:, :-1].to(p.dtype))
        return train_gpt.copies_of_tensors(p, alpha, copied, weights[:, -1:], 1)[0].log()

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (vocab_size,) of the token that follows `tokens`."""
        read = torch.tensor(tokens, device=self.device)
        return self.logits(self.features(tokens), read, torch.tensor([len(tokens) - 1], device=self.device))[0]

    @torch.inference_mode()
    def predictions(self, tokens: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits (n, vocab_size) of what follows the first n tokens, the next n and so on, but the last."""
        x, read = self.features(tokens), torch.tensor(tokens, device=self.device)
        for places in torch.arange(len(tokens) - 1, device=self.device).split(SLICE):
            yield self.logits(x, read, places)

    def losses(self, tokens: Sequence[int]) -> Tensor:
        """Return the loss (n - 1,) in nats of each token of a sequence but the first."""
        targets = torch.tensor(tokens[1:], device=self.device).split(SLICE)
        both = zip(self.predictions(tokens), targets, strict=True)
        found = torch.cat([F.cross_entropy(z.double(), target, reduction="none").cpu() for z, target in both])
        if not found.isfinite().all():
            raise UserError("the model's losses are not finite: its training diverged")
        return found


def load_ngrams(model: Path, checksums: Sequence[str]) -> list[dict[str, Tensor]]:
    """Open the rows of n-grams beside a model, of each process that trained it.

    gpt2's take up to 130 GB: large files stay on the disk, and nothing looks for damage in them.
    """
    parts = []
    for rank, expected in enumerate(checksums):
        path = model.with_suffix(f".ngrams{rank}")
        with train_gpt.refusing(f"{path}: not a sound part of a model"):
            if path.stat().st_size < 2**30:
                parts.append(train_gpt.load(path, expected))
            elif train_gpt.checksum(path) == expected:
                parts.append(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            else:
                raise ValueError("it is of another model")
    return parts


def read_model(path: Path) -> dict:
    """Return what --save_checkpoint wrote to `path`. Raise UserError if it is nothing of the kind."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; train a model with --save_checkpoint, or name its file")
    path.open("rb").close()  # it may not be for us
    with contextlib.suppress(UserError):
        if "configuration" in (saved := train_gpt.load(path)):
            return saved
    raise UserError(f"{path}: is no model, or damaged: name a .pt that a run with --save_checkpoint wrote")


def load_model(path: Path, device: str) -> Model:
    """Load the model that --save_checkpoint wrote to `path`. Raise UserError if it is none, or another script's."""
    saved = read_model(path)
    with train_gpt.refusing(f"{path}: not a sound model of this script"):
        cfg = Hyperparameters(**json.loads(saved["configuration"]))
        # What was trained in bf16 is sampled in fp32 where that is faster
        dtype = "auto" if cfg.dtype == "bfloat16" else cfg.dtype
        canon = cfg.canon_file if Path(cfg.canon_file).is_file() else ""
        changes: dict = dict(device=device, dtype=dtype, prefix_file="", canon_file=canon)
        cfg = train_gpt.resolve(dataclasses.replace(cfg, **changes))
        cfg = dataclasses.replace(cfg, device="cpu")  # attention in plain PyTorch, which compiles for no length of text
        with torch.device("meta"):  # the initial values are not needed
            gpt = GPT(cfg).eval()
        gpt.to_empty(device=device).load_state_dict(saved["model"])
        parts = load_ngrams(path, saved["rows"])
    model = Model(gpt, [part for part in parts if len(part["ids"])])
    if model.size < SMALL:
        torch.set_num_threads(1)
    return model


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model, as FILE or --model FILE, and its device."""
    told = "a .pt that --save_checkpoint wrote, or the .mixture of an own text [the newest in logs/]"
    parser.add_argument("file", nargs="?", metavar="FILE", type=Path, help=told)
    parser.add_argument("--model", metavar="FILE", type=Path, help="the same")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[%(default)s]")


def tokenizer(cfg: Hyperparameters) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """Return how text becomes tokens and a token bytes, known by vocab_size and eot_token."""
    if (cfg.vocab_size, cfg.eot_token) == (257, 256):
        return lambda text: list(text.encode("utf-8", "surrogateescape")), lambda token: bytes([token])
    if (cfg.vocab_size, cfg.eot_token) != (50257, 50256):
        raise UserError(f"vocab_size {cfg.vocab_size} with eot_token {cfg.eot_token} is neither bytes nor GPT-2's")
    with needs.packages("text"):
        import tiktoken
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:  # the download fails in many ways
        raise UserError(f"tiktoken cannot get GPT-2's vocabulary: {' '.join(str(error).split())[:150]}") from None
    return gpt2.encode_ordinary, gpt2.decode_single_token_bytes


def choose(logits: Tensor, temperature: float, top_k: int, rng: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature) over the `top_k` largest, all if 0; at 0 the largest."""
    values, tokens = logits.double().cpu().topk(min(top_k or len(logits), len(logits)))
    if not values.isfinite().all():
        raise UserError("the model's logits are not finite: its training diverged")
    p = ((values - values[0]) / (temperature or 1e-300)).softmax(0)
    return int(tokens[torch.multinomial(p, 1, generator=rng)])


def generate(model: Any, prompt: Sequence[int], num_tokens: int, chooser: Callable[[Tensor], int]) -> Iterator[int]:
    """Yield at most `num_tokens` tokens that follow `prompt` at the beginning of a document, until it ends."""
    tokens = [model.cfg.eot_token, *prompt]
    for _ in range(num_tokens):
        tokens.append(chooser(model.next_logits(tokens)))
        if tokens[-1] == model.cfg.eot_token:
            return
        yield tokens[-1]


def run(program: str, action: Callable[[Sequence[str] | None], object], argv: Sequence[str] | None) -> int:
    """Do what the flags say, and return the exit code; what can be mended, and Ctrl-C, get one line."""
    try:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        action(argv)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # whoever read the text has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered shall not fail at the exit
        return 0
    except (UserError, OSError, KeyboardInterrupt) as error:
        message = "".join(c if c.isprintable() else "?" for c in str(error)) or "interrupted"
        print(f"{program}: {message}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
