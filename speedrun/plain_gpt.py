"""The CPU starting point: a plain GPT on torch.nn, trained as people train a small one on a CPU.

    python speedrun/plain_gpt.py [--seed 1] [--val_every 100]     # in the repository's root

4 layers of width 128, 4 heads, a context of 64; 2,000 steps of 12 random windows of the nano track's training shard;
AdamW with a cosine schedule, in fp32, on 2 threads. Validation is that of the nano track: the first 262,144 tokens of
its validation shard, each position once, here in consecutive contexts of 64. Warm-up and validation are off the clock,
as in train_gpt.py. It imports nothing of this repository. Prints the result as a line of JSON, and with --run_id writes
a log that `python -m speedrun` can read, so it can be raced. Exit codes: 0 done, 2 bad input.
"""

import argparse
import json
import math
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
VAL_TOKENS, THREADS, RULE = 262_144, 2, "=" * 100


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
    """Return the rate of a linear warm-up, then a cosine from LR to MIN_LR."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step - LR_WARMUP) / max(1, steps - LR_WARMUP)))
    return LR * (step + 1) / (LR_WARMUP + 1) if step < LR_WARMUP else MIN_LR + (LR - MIN_LR) * cosine


def train(tokens: np.ndarray, val_tokens: np.ndarray, steps: int, seed: int, val_every: int) -> list[tuple]:
    """Train a model and return its curve: step, validation loss, and train time in ms, at last after all steps."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = PlainGPT()
    matrices, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    curve, start = [], time.perf_counter()
    for step in range(steps + 1):
        if step == steps or (val_every and step % val_every == 0):
            elapsed = time.perf_counter() - start
            curve.append((step, validate(model, val_tokens), 1000 * elapsed))
            start = time.perf_counter() - elapsed
        if step == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        at = rng.integers(len(tokens) - CONTEXT, size=(BATCH, 1)) + np.arange(CONTEXT + 1)
        window = torch.from_numpy(tokens[at].astype(np.int64))
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1}/{steps}: training loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return curve


@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, count: int = VAL_TOKENS) -> float:
    """Return the mean loss of predicting tokens 1 ... count, or all, each once, in consecutive contexts."""
    count = min(count, (len(tokens) - 1) // CONTEXT * CONTEXT)
    read = torch.from_numpy(tokens[: count + 1].astype(np.int64))
    inputs, targets = read[:-1].view(-1, CONTEXT).split(256), read[1:].view(-1, CONTEXT).split(256)
    return sum(model(x, y).item() * y.numel() for x, y in zip(inputs, targets, strict=True)) / count


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="(default: fresh)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--val_every", type=int, default=0, help="steps, for a curve (default: at the end alone)")
    parser.add_argument("--data", default="data/nano/nano_", help="begins the names of shards (default: %(default)s)")
    parser.add_argument("--log_dir", type=Path, default=Path("logs"), help="of the log (default: %(default)s)")
    parser.add_argument("--run_id", default="", help="name of the log (default: none is written)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    try:
        shards = [Path(f"{args.data}{part}_000000.bin") for part in ("train", "val")]
        tokens, val_tokens = (np.fromfile(path, "<u2", offset=1024) for path in shards)
        train(tokens, val_tokens[:257], 10, args.seed, 0)  # warm-up, off the clock
        curve = train(tokens, val_tokens, args.steps, args.seed, args.val_every)
        if args.run_id:
            text = [Path(__file__).read_text().rstrip("\n"), RULE, f"Running PyTorch {torch.__version__}", RULE]
            for step, loss, ms in curve:
                timing = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
                text.append(f"step:{step}/{args.steps} val_loss:{loss:.4f} {timing}")
            args.log_dir.mkdir(parents=True, exist_ok=True)
            (args.log_dir / f"{args.run_id}.txt").write_text("\n".join([*text, ""]))
    except OSError as error:
        parser.error(f"{error}: python data/pack_nano.py packs the shards")
    print(json.dumps(dict(val_curve=curve, seed=args.seed, steps=args.steps, torch=torch.__version__)))


if __name__ == "__main__":
    main()
