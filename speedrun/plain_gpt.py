"""The starting point: a plain GPT on torch.nn, trained as people train one, with AdamW and a cosine schedule.

    python speedrun/plain_gpt.py [--seed 1] [--val_every 100]     # in the repository's root
    python speedrun/plain_gpt.py --size gpt2 --seconds 60 --data FOLDER/fineweb_

nano: 4 layers of width 128, 4 heads, a context of 64; 2,000 steps of 12 random windows of the nano track's training
shard, in fp32, on --threads of a CPU. gpt2: GPT-2 small, a context of 1,024, 16 windows a step; on a GPU compiled and
in bf16. Validation is on the shard's first --val_tokens tokens, each position once, in consecutive contexts. Warm-up
and validation are off the clock, as in train_gpt.py. It imports nothing of this repository, and prints the result as a
line of JSON. Exit codes: 0 done, 2 bad input.
"""

import argparse
import glob
import json
import math
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 1.0


class Size(NamedTuple):
    vocab_size: int  # with padding
    context: int
    batch: int  # windows a step
    layers: int
    width: int
    heads: int
    lr: float  # the largest; it falls to a tenth
    warmup: int  # steps over which the rate rises


SIZES = {
    "nano": Size(257, 64, 12, layers=4, width=128, heads=4, lr=1e-3, warmup=100),  # bytes and the end of text
    "gpt2": Size(50304, 1024, 16, layers=12, width=768, heads=12, lr=6e-4, warmup=100),
}


class Block(nn.Module):
    """Pre-norm attention and MLP. x (batch, context, width) -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fc, self.fc_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_proj(F.gelu(self.fc(self.norm2(x))))


class PlainGPT(nn.Module):
    """forward(tokens, targets (batch, context)) returns the mean cross entropy in nats."""

    def __init__(self, size: Size):
        super().__init__()
        self.embed, self.positions = nn.Embedding(size.vocab_size, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # as in GPT-2: smaller where a layer adds to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers) if "proj" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.size(1)]
        logits = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int, size: Size) -> float:
    """Return the rate of a linear warm-up, then a cosine down to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step - size.warmup) / max(1, steps - size.warmup)))
    return size.lr * (min(1.0, (step + 1) / (size.warmup + 1)) if step < size.warmup else 0.1 + 0.9 * cosine)


class Trainer:
    """Hold a model and its optimizer on a device, and take steps on random windows of `tokens`."""

    def __init__(self, size: Size, tokens: np.ndarray, seed: int, device: str):
        torch.manual_seed(seed)
        self.size, self.tokens, self.seed, self.device = size, tokens, seed, device
        self.plain = PlainGPT(size).to(device)
        self.first = {name: t.clone() for name, t in self.plain.state_dict().items()}
        self.model = torch.compile(self.plain) if device == "cuda" else self.plain
        self.restart()

    def restart(self) -> None:
        """Begin anew, with the same windows to come."""
        self.plain.load_state_dict(self.first)
        self.rng = np.random.default_rng(self.seed)
        parameters = [*self.plain.parameters()]
        matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
        groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=self.size.lr, betas=BETAS, fused=True)

    def loss(self, read: np.ndarray) -> Tensor:
        """Return the mean loss of windows (batch, context + 1)."""
        window = torch.from_numpy(read.astype(np.int64)).to(self.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device == "cuda"):
            return self.model(window[:, :-1], window[:, 1:])

    def step(self, lr: float) -> Tensor:
        """Take a step, and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        context = self.size.context
        at = self.rng.integers(len(self.tokens) - context, size=(self.size.batch, 1)) + np.arange(context + 1)
        loss = self.loss(self.tokens[at])
        loss.backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def seconds(self, steps: int) -> float:
        """Return the seconds that steps at a learning rate of 0 take."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(0.0)
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        getattr(torch, self.device).synchronize()

    def train(self, val_tokens: np.ndarray, steps: int, val_every: int) -> list[tuple]:
        """Return the curve: step, validation loss, and train time in ms, at last after all steps."""
        curve, start = [], time.perf_counter()
        for step in range(steps + 1):
            if step == steps or (val_every and step % val_every == 0):
                self.synchronize()
                elapsed = time.perf_counter() - start
                curve.append((step, validate(self.loss, val_tokens, self.size.context), 1000 * elapsed))
                start = time.perf_counter() - elapsed
            if step < steps:
                loss = self.step(learning_rate(step, steps, self.size))
                if step % 100 == 99:
                    print(f"step {step + 1}/{steps}: training loss {loss.item():.3f}", file=sys.stderr, flush=True)
        return curve


@torch.no_grad()
def validate(loss: Callable, tokens: np.ndarray, context: int) -> float:
    """Return the mean loss of predicting all tokens but the first, each once, in consecutive contexts, 16 at a time."""
    starts = np.arange(0, len(tokens) - context, context)
    parts = np.split(starts, range(16, len(starts), 16))
    return sum(loss(tokens[part[:, None] + np.arange(context + 1)]).item() * len(part) for part in parts) / len(starts)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="(default: fresh)")
    parser.add_argument("--size", choices=SIZES, default="nano", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="to train for, instead of so many steps")
    parser.add_argument("--val_tokens", type=int, default=262_144, help="(default: %(default)s)")
    parser.add_argument("--val_every", type=int, default=0, help="steps, for a curve (default: at the end alone)")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default: %(default)s)")
    parser.add_argument("--data", default="data/nano/nano_", help="begins the shards' names (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        patterns = [f"{args.data}{part}*.bin" for part in ("train", "val")]
        shards = [min(glob.glob(pattern), default=pattern) for pattern in patterns]  # the first, or no file
        tokens, val_tokens = (np.fromfile(path, "<u2", offset=1024) for path in shards)
        size = SIZES[args.size]
        trainer = Trainer(size, tokens, args.seed, "cuda" if size.width > 128 and torch.cuda.is_available() else "cpu")
        validate(trainer.loss, val_tokens[: 16 * size.context + 1], size.context)  # warm-up, off the clock
        trainer.seconds(10)
        if args.seconds:
            args.steps = max(1, round(10 * args.seconds / trainer.seconds(10)))
        trainer.restart()
        curve = trainer.train(val_tokens[: args.val_tokens + 1], args.steps, args.val_every)
    except OSError as error:
        parser.error(f"{error}: python data/pack_nano.py packs the shards")
    print(json.dumps(dict(val_curve=curve, seed=args.seed, steps=args.steps, torch=torch.__version__)))


if __name__ == "__main__":
    main()
