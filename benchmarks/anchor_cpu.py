"""The CPU starting point: a plain GPT on torch.nn, trained as people train a small one on a CPU.

    python benchmarks/anchor_cpu.py [--seed 1] [--log anchor.jsonl]

4 layers of width 128, 4 heads, a context of 64; 2,000 steps of 12 random windows of the nano track's training shard;
AdamW with a cosine schedule, in fp32, on 2 threads. Validation is that of the nano track: the first 262,144 tokens of
its validation shard, every position once, here in consecutive contexts of 64. Timed like `train_gpt.py`: some steps of
warm-up and the validation are off the clock. It shares no code with the trainer.
Exit codes: 0 trained, 1 no data, 2 bad argument.
"""

import argparse
import glob
import json
import math
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE, CONTEXT, BATCH, LAYERS, WIDTH, HEADS = 257, 64, 12, 4, 128, 4  # bytes and the end of text
LR, MIN_LR, LR_WARMUP, BETAS, WEIGHT_DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
VAL_TOKENS, DATA = 262_144, Path(__file__).resolve().parent.parent / "data" / "nano"


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
    """forward(tokens, targets (batch, context)) is the mean cross entropy in nats."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # GPT-2's: smaller where a layer adds to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if "proj" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.size(1)]
        logits = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_shards(pattern: str) -> np.ndarray:
    """All tokens of the shards (256 int32 of header, then uint16)."""
    parts = []
    for path in sorted(glob.glob(pattern)):
        magic, version, count = np.fromfile(path, dtype="<i4", count=256)[:3]
        parts.append(np.fromfile(path, dtype="<u2", offset=1024))
        if (magic, version, count) != (20240520, 1, len(parts[-1])):
            sys.exit(f"anchor_cpu.py: {path}: no token shard, or cut short; get it again: python data/pack_nano.py")
    if not parts:
        sys.exit(f"anchor_cpu.py: no shards match {pattern}; get them: python data/pack_nano.py")
    return np.concatenate(parts)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine from LR to MIN_LR."""
    if step < LR_WARMUP:
        return LR * (step + 1) / (LR_WARMUP + 1)
    progress = (step - LR_WARMUP) / max(1, steps - LR_WARMUP)
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def train(tokens: np.ndarray, steps: int, seed: int, planned: int | None = None) -> tuple[PlainGPT, list[float], float]:
    """The model after `steps` steps of a run of `planned`, the loss of each, and the train time in ms."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = PlainGPT()
    matrices, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, planned or steps)
        at = rng.integers(len(tokens) - CONTEXT, size=(BATCH, 1)) + np.arange(CONTEXT + 1)
        window = torch.from_numpy(tokens[at].astype(np.int64))
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return model, losses, 1000 * (time.perf_counter() - start)


@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, count: int = VAL_TOKENS) -> float:
    """Mean loss of predicting tokens 1 ... count, each once, in consecutive contexts."""
    tokens = torch.from_numpy(tokens[: count + 1].astype(np.int64))
    inputs, targets = tokens[:-1].view(-1, CONTEXT).split(256), tokens[1:].view(-1, CONTEXT).split(256)
    return sum(model(x, y).item() * y.numel() for x, y in zip(inputs, targets, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"anchor_cpu.py: {message}\n")
    parser.add_argument("--seed", type=int, help="by default a fresh one")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--train_files", default=str(DATA / "nano_train_*.bin"))
    parser.add_argument("--val_files", default=str(DATA / "nano_val_*.bin"))
    parser.add_argument("--log", type=Path, help="append the result to this file, as a line of JSON")
    args = parser.parse_args()
    if min(args.steps, args.threads) < 1:
        parser.error(f"--steps {args.steps} --threads {args.threads}: expected whole numbers of at least 1")
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    train_tokens, val_tokens = read_shards(args.train_files), read_shards(args.val_files)
    if len(val_tokens) <= VAL_TOKENS:
        parser.error(f"{args.val_files}: {len(val_tokens)} tokens, validation needs {VAL_TOKENS + 1}")
    torch.set_num_threads(args.threads)
    train(train_tokens, steps=10, seed=seed)  # warm-up, off the clock
    model, losses, train_time = train(train_tokens, args.steps, seed)
    result = dict(val_loss=validate(model, val_tokens), train_time_ms=train_time, seed=seed, steps=args.steps)
    result |= dict(train_loss=float(np.mean(losses[-100:])), parameters=sum(p.numel() for p in model.parameters()))
    result |= dict(
        threads=args.threads, torch=torch.__version__, numpy=np.__version__, python=platform.python_version()
    )
    print(json.dumps(result), flush=True)
    if args.log:
        with args.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
