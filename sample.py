"""Show what a model has learned: let it go on with a text, or say how well it predicts one.

    python sample.py                                                 the newest model in logs/
    python sample.py logs/RUN_ID.pt --prompt "class " --seed 1       this one, and the same text every time
    python sample.py --score README.md --score LICENSE               bits per byte, which all tokenizers share
    python sample.py logs/RUN_ID.pt --script logs/RUN_ID.txt         run by the script in this log, or in a file

A model is run by the script that trained it, if that is the root's or still where it was; else --script names one.
The sample, or scores as JSON, go to stdout, all else to stderr. Exit codes: 0; 2 bad input, in a line; 130 interrupted.
"""

import argparse
import codecs
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from data.shards import gpt2_encoding, loading, read_text
from speedrun import ROOT
from speedrun.logs import load_script, script_in
from speedrun.process import ToolError, packages, run

with loading(), packages():
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from tqdm import tqdm

CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}  # for terminals
SLICE = 512  # tokens whose logits exist at a time
SMALL = 10_000_000  # parameters, below which a second thread costs more than it saves (nano, busy machine: 20 times)
LENGTH = 4096  # tokens that are scored at a time, as plain attention takes memory


class Model:
    """A trained model, set as in its last validation. For each token to come it reads the whole text."""

    def __init__(self, script: ModuleType, gpt: Any, ngrams: Sequence[dict[str, Tensor]]):
        """Take the `GPT` of a script, whose code runs it."""
        self.script = script
        self.gpt = gpt
        self.cfg = gpt.cfg
        self.device = gpt.lm_head.weight.device
        self.ngrams = ngrams  # of each process that trained: `ids` of the rows that it ever updated, and the `rows`
        self.schedule = script.schedule_validation(self.cfg.num_iterations, self.cfg)
        self.attn_settings = script.make_attention_settings(self.schedule, self.cfg, self.device)
        self.loader = script.DistributedDataLoader(self.cfg, script.Ranks(), self.device)
        bits = script.read_invalid_tokens(self.cfg)
        self.canon = torch.from_numpy(bits).to(self.device) if len(bits) else None

    def inputs(self, tokens: Sequence[int]) -> tuple[Any, Any, Tensor]:
        """Return what the script's model reads for these tokens: its inputs, attention settings, rows of n-grams."""
        rest = -len(tokens) % self.cfg.block_size + 1  # to whole blocks, and a last target: no token sees what follows
        read = np.array([*tokens, *[self.cfg.eot_token] * rest])
        [[inputs]], exchange = self.loader.load_cycle([self.schedule], [[read]])
        ids = exchange.recv_ids.long()
        rows = torch.zeros(len(ids), self.cfg.model_dim, dtype=getattr(torch, self.cfg.dtype), device="cpu")
        for part in self.ngrams:
            places = torch.searchsorted(part["ids"], ids).clamp(max=len(part["ids"]) - 1)
            is_here = part["ids"][places] == ids
            rows[is_here] = part["rows"][places[is_here]].to(rows.dtype)
        return self.loader.to_device(inputs), self.attn_settings, rows.to(self.device)

    @torch.inference_mode()
    def check_head(self) -> None:
        """Raise ValueError unless `log_probabilities` gives the script's own loss: it may have changed its head."""
        read = torch.arange(self.cfg.block_size, device=self.device) % self.cfg.vocab_size
        inputs = self.inputs(read.tolist())
        invalid = None if self.canon is None else self.canon[read]
        log_p = self.log_probabilities(self.gpt.hidden_states(*inputs), read, torch.arange(len(read)))
        found = -log_p.gather(1, inputs[0].next_tokens[:, None].long()).sum()
        expected = self.gpt(*inputs, invalid=invalid)
        if not torch.isclose(found, expected.to(found.dtype), rtol=0.01):
            raise ValueError(f"sample.py computes another loss, {found:.2f} instead of {expected:.2f}")

    def log_probabilities(self, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Return those (n, V) of what follows `tokens` (T,) at `places` (n,). x (T, K): the head's input."""
        cfg = self.cfg
        z = self.script.linear(x[places], self.gpt.lm_head.weight)
        z = z.to(self.script.accum_dtype(z.dtype))
        logits = cfg.softcap_range * torch.sigmoid((z + cfg.softcap_shift) * 2 / cfg.lm_head_softcap)
        if self.canon is not None:
            bits = self.canon[tokens[places]][:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self.device) & 1
            logits = logits.masked_fill(bits.flatten(1) > 0, -60)  # as in the last validation
        if cfg.pointer_dim:
            return self.share_out_copies(logits, x, tokens, places)
        return logits.log_softmax(1)

    def share_out_copies(self, logits: Tensor, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logarithms of probabilities: the pointer shares out that of a copy, see `Pointer` in train_gpt.py."""
        block = self.cfg.val_pointer_block
        q, k, sink = self.gpt.pointer.project(x)
        docs, t = (tokens == self.cfg.eot_token).cumsum(0), places[:, None]
        other = torch.arange(len(tokens), device=self.device)
        sees = (other < t) & (t // block - other // block < 2) & (docs == docs[t])
        scores = (q[places].to(sink.dtype) @ k.to(sink.dtype).T).masked_fill(~sees, -torch.inf)
        weights = torch.cat([scores, sink[t]], dim=1).softmax(1)
        p = logits.softmax(1)
        alpha = p[:, self.cfg.copy_token, None].clamp(max=1 - 1e-6)
        copied = torch.zeros_like(p).index_add_(1, tokens, weights[:, :-1].to(p.dtype))
        return self.script.mix_copies(p, alpha, copied, weights[:, -1:]).log()

    @torch.inference_mode()
    def predictions(self, tokens: Sequence[int], first: int = 0) -> Iterator[Tensor]:
        """Yield log probabilities (n, vocab_size) after each token from the `first` on, at most SLICE at a time."""
        x = self.gpt.hidden_states(*self.inputs(tokens))[: len(tokens)]
        read = torch.tensor(tokens, device=self.device)
        for places in torch.arange(first, len(tokens), device=self.device).split(SLICE):
            yield self.log_probabilities(x, read, places)[:, : self.cfg.vocab_size].double().cpu()


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Say in one line what is wrong with a file, as reading and running it can fail in many ways."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "code"):  # UserError of a script, which is such a line
            raise
        raise ToolError(f"{what}: {error!r:.300}") from error


def find_script(path: Path, saved: dict, given: Path | None) -> Path:
    """Return the file of the script that runs the model at `path`: the one that is given, or that trained it."""

    def sha256(file: Path) -> str:
        return hashlib.sha256(script_in(file).encode()).hexdigest()

    if given:
        if saved.get("script", sha256(given)) != sha256(given):
            print(f"sample.py: the code in {given} is not what trained {path}", file=sys.stderr)
        return given
    name, log = saved.get("script_path", "an older script"), path.with_suffix(".txt")
    places = ROOT / "train_gpt.py", Path(name), log
    found = [file for file in places if file.is_file() and sha256(file) == saved.get("script")]
    if found and found[0] != log:
        return found[0]
    advice = f"--script {log}" if found else "name its file, or a log of it, by --script FILE"
    raise ToolError(f"{path}: was trained by {name}, which is not there as it was: {advice}")


def load_model(path: Path, device: str, script_file: Path | None = None) -> Model:
    """Load what --save_checkpoint wrote to `path`, and the script that runs it."""
    with file_errors(f"{path}: name a sound .pt that a run with --save_checkpoint wrote"):
        if zipfile.ZipFile(path).testzip():
            raise ValueError("it is damaged")
        saved = dict(torch.load(path, map_location="cpu", weights_only=True))
    file = find_script(path, saved, script_file)
    advice = "name what trained it by --script, or take the sample.py of its time"
    with file_errors(f"{path}: the code in {file} does not run it here; {advice}"):
        script = load_script(file)
        cfg = script.Hyperparameters(**json.loads(saved["configuration"]))
        # What was trained in bf16 is sampled in fp32 where that is faster
        dtype = "auto" if cfg.dtype == "bfloat16" else cfg.dtype
        canon = cfg.canon_file if Path(cfg.canon_file).is_file() else ""
        changes: dict = dict(device=device, dtype=dtype, prefix_file="", canon_file=canon)
        cfg = script.resolve(dataclasses.replace(cfg, **changes))
        if (device := cfg.device) == "cuda":
            torch.set_default_device(device)  # where masks are made
        cfg = dataclasses.replace(cfg, device="cpu")  # attention in plain PyTorch, which compiles for no length of text
        with torch.device("meta"):  # the initial values are not needed
            gpt = script.GPT(cfg).eval()
        gpt.to_empty(device=device).load_state_dict(saved["model"])
        rows = [path.with_suffix(f".ngrams{rank}") for rank in range(len(saved["rows"]))]
        if [script.checksum(file) for file in rows] != saved["rows"]:
            raise ValueError("the rows of n-grams beside it are of another model")
        # They stay on the disk until they are needed: gpt2's take up to 130 GB
        parts = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in rows]
        model = Model(script, gpt, [part for part in parts if len(part["ids"])])
        model.check_head()  # what another script lacks is missed here, too
    return model


def tokenizer(cfg: Any) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """Return how text becomes tokens, and a token bytes."""
    if cfg.vocab_size == 257:
        return lambda text: list(text.encode(errors="surrogateescape")), lambda token: bytes([token])
    gpt2 = gpt2_encoding()
    return gpt2.encode_ordinary, gpt2.decode_single_token_bytes


def score(model: Model, path: Path) -> dict:
    """Return bits per byte of a text at the beginning of a document, and its bytes.

    The model reads pieces, of which a quarter is what it has read before.
    """
    text = read_text(path)
    if not text or "\0" in text:
        raise ToolError(f"{path}: is {'binary' if text else 'empty'}; name a file of text")
    tokens, size = tokenizer(model.cfg)[0](text), len(text.encode(errors="surrogateescape"))
    length = min(LENGTH, model.cfg.val_seq_len)
    overlap = length // 4
    nats = 0.0
    for start in tqdm(range(0, len(tokens), length - 1 - overlap), disable=None):
        context = min(start, overlap)
        piece = tokens[start - context : start + length - 1 - overlap]
        predictions = model.predictions([model.cfg.eot_token, *piece[:-1]], first=context)
        for logits, targets in zip(predictions, torch.tensor(piece[context:], device="cpu").split(SLICE), strict=True):
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
    return dict(file=str(path), bytes=size, bits_per_byte=nats / math.log(2) / size)


@torch.inference_mode()
def generate(model: Model, prompt: str, num_tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[bytes]:
    """Yield `prompt`, then tokens that follow it at the beginning of a document, until that ends.

    They are drawn from softmax(logits / temperature) over the `top_k` largest, all if 0; at 0 the largest is taken. A
    document does not end while it is blank: after a blank line nine of ten samples were empty.
    """
    encode, decode = tokenizer(model.cfg)
    eot, most = model.cfg.eot_token, model.cfg.val_seq_len
    tokens = [eot, *encode(prompt)]
    if len(tokens) + num_tokens > most:
        raise ToolError(f"--tokens {num_tokens}, --prompt of {len(tokens)}: the model reads {most} at most")
    yield prompt.encode(errors="surrogateescape")
    rng, is_blank = torch.Generator("cpu").manual_seed(seed), True
    for _ in range(num_tokens):
        logits = next(model.predictions(tokens, first=len(tokens) - 1))[0]
        logits[eot] -= torch.inf if is_blank else 0
        values, choices = logits.topk(min(top_k or len(logits), len(logits)))
        p = ((values - values[0]) / (temperature or 1e-300)).softmax(0)
        tokens.append(int(choices[torch.multinomial(p, 1, generator=rng)]))
        if tokens[-1] == eot:
            return
        is_blank &= decode(tokens[-1]).isspace()
        yield decode(tokens[-1])


def write(pieces: Iterable[bytes]) -> None:
    """Print UTF-8 as it comes; print U+FFFD for what is none, and for control characters."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for text in codecs.iterdecode(pieces, "utf-8", "replace"):
        print(text.translate(CONTROLS), end="", flush=True)
    print(flush=True)


def sample_or_score(argv: Sequence[str] | None) -> None:
    form: dict = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__, **form)
    add = parser.add_argument
    add("model", nargs="?", metavar="FILE", type=Path, help="a .pt that --save_checkpoint wrote [the newest in logs/]")
    add("--script", type=Path, metavar="FILE", help="run the model by the script in this file or log")
    add("--score", type=Path, metavar="FILE", action="append", help="score this text, and sample none; repeatable")
    add("--prompt", metavar="TEXT", default="", help="what to go on from; --prompt=TEXT if it begins with - [nothing]")
    add("--tokens", type=int, metavar="N", default=300, help="the most tokens to add [%(default)s]")
    add("--temperature", type=float, metavar="X", default=0.8, help="0: the likeliest token always [%(default)s]")
    add("--top_k", type=int, metavar="K", default=50, help="only the K likeliest tokens; 0: all [%(default)s]")
    add("--seed", type=int, metavar="N", help="the same text again [a fresh one, which is told]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[%(default)s]")
    args = parser.parse_args(argv)
    for name, high in dict(tokens=100_000, temperature=100, top_k=2**16, seed=2**63 - 1).items():
        if not 0 <= (getattr(args, name) or 0) <= high:
            raise ToolError(f"--{name} {getattr(args, name)}: expected a number from 0 to {high}")
    path = args.model or max(Path("logs").glob("*.pt"), key=os.path.getmtime, default=Path("logs/*.pt"))
    if not path.is_file():
        raise ToolError(f"{path}: there is no such file; train a model with --save_checkpoint, or name its file")
    model = load_model(path, args.device, args.script)
    if sum(p.numel() for p in model.gpt.parameters()) < SMALL:
        torch.set_num_threads(1)
    for text in args.score or ():
        print(json.dumps(score(model, text)), flush=True)
    if not args.score:
        seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
        print(f"{path}, seed {seed}", file=sys.stderr)
        write(generate(model, args.prompt, args.tokens, args.temperature, args.top_k, seed))


def main(argv: Sequence[str] | None = None) -> int:
    return run("sample.py", sample_or_score, argv)


if __name__ == "__main__":
    sys.exit(main())
