"""The starting point: a plain GPT on torch.nn, trained as people train one, with AdamW and a cosine schedule.

    python records/plain_gpt.py --seed 1 --val_every 200     # in the repository's root

4 layers of width 128, 4 heads, a context of 64; 2,000 steps of 12 random windows of the nano track's training shard, in
fp32, on two threads of a CPU. Validation is on the shard's first 262,144 tokens, each position once, in consecutive
contexts. Warm-up and validation are off the clock, as in train_gpt.py. It imports nothing of this repository, and
prints the result as a line of JSON. Exit codes: 0 done, 2 bad input.
"""

import argparse
import glob
import json
import math
import random
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 257  # bytes and the end of text
CONTEXT = 64
BATCH = 12  # windows a step
LAYERS, WIDTH, HEADS = 4, 128, 4
LEARNING_RATE = 1e-3  # the largest; it falls to a tenth
WARMUP = 100  # steps over which the rate rises
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 0.1, 1.0


class Block(nn.Module):
    """Pre-norm attention and MLP. x (batch, context, width) -> the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc, self.fc_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_proj(F.gelu(self.fc(self.norm2(x))))


class PlainGPT(nn.Module):
    """forward(tokens, targets (batch, context)) returns the mean cross entropy in nats."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # as in GPT-2: smaller where a layer adds to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if "proj" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.size(1)]
        logits = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a linear warm-up, then a cosine down to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))
    return LEARNING_RATE * (min(1.0, (step + 1) / (WARMUP + 1)) if step < WARMUP else 0.1 + 0.9 * cosine)


def loss_at(model: Callable, tokens: np.ndarray, starts: np.ndarray) -> Tensor:
    """Return the mean loss of the windows that begin at `starts` (n,)."""
    window = torch.from_numpy(tokens[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return model(window[:, :-1], window[:, 1:])


@torch.no_grad()
def validate(model: Callable, tokens: np.ndarray) -> float:
    """Return the mean loss of predicting all tokens but the first, each once, in consecutive contexts, 16 at a time."""
    starts = np.arange(0, len(tokens) - CONTEXT, CONTEXT)
    parts = np.split(starts, range(16, len(starts), 16))
    return sum(loss_at(model, tokens, part).item() * len(part) for part in parts) / len(starts)


def train(tokens: np.ndarray, val_tokens: np.ndarray, steps: int, val_every: int, seed: int) -> list[tuple]:
    """Return the curve: step, validation loss, and train time in ms, at last after all steps."""
    torch.manual_seed(seed)
    model = PlainGPT()
    parameters = [*model.parameters()]
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    model(*torch.zeros(2, BATCH, CONTEXT, dtype=torch.long)).backward()  # warms up
    optimizer.zero_grad(set_to_none=True)
    rng = np.random.default_rng(seed)
    curve, start = [], time.perf_counter()
    for step in range(steps + 1):
        if step == steps or (val_every and step % val_every == 0):
            elapsed = time.perf_counter() - start
            curve.append((step, validate(model, val_tokens), 1000 * elapsed))
            start = time.perf_counter() - elapsed
        if step < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            loss_at(model, tokens, rng.integers(len(tokens) - CONTEXT, size=BATCH)).backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return curve


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="(default: fresh)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--val_tokens", type=int, default=262_144, help="(default: %(default)s)")
    parser.add_argument("--val_every", type=int, default=0, help="steps, for a curve (default: at the end alone)")
    parser.add_argument("--data", default="data/nano/nano_", help="begins the shards' names (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    patterns = [f"{args.data}{part}*.bin" for part in ("train", "val")]
    shards = [min(glob.glob(pattern), default=pattern) for pattern in patterns]  # the first, or no file
    try:
        tokens, val_tokens = (np.fromfile(path, "<u2", offset=1024) for path in shards)
    except OSError as error:
        parser.error(f"{error}: python data/pack_nano.py packs the shards")
    curve = train(tokens, val_tokens[: args.val_tokens + 1], args.steps, args.val_every, args.seed)
    print(json.dumps(dict(val_curve=curve, seed=args.seed, steps=args.steps, torch=torch.__version__)))


if __name__ == "__main__":
    main()
