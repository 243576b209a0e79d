"""Train 20 steps from fixed numbers and compare with golden_steps.json, which an earlier script computed.

golden_run works in one process, and in each process of a run whose size divides six. The numbers are raw bits of PCG64,
which no version of numpy or torch changes, and the rotary tables are exact: fp32 ones differ between processors.
"""

import dataclasses
import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch

import train_gpt
from train_gpt import GPT, Hyperparameters, Ranks, Trainer

STEPS = 20
COMMON = dict(num_iterations=STEPS, batch_tokens=6 * 64, train_seq_len=64, val_seq_len=64, val_tokens=64)
COMMON |= dict(block_size=8, head_dim=8, momentum_warmup_steps=10, lm_head_slice=50, lm_head_fp8=False)
COMMON |= dict(device="cpu", dtype="float64", compile=False, seed=1, cpu_threads=0)
SHAPES = {
    "gpt2": COMMON | dict(vocab_size=101, eot_token=100, model_dim=24, num_heads=3, window_tokens=64),
    "nano": COMMON | dict(vocab_size=65, eot_token=64, model_dim=16, num_heads=2, window_tokens=32, bigram_rows=37),
}


def numbers(name: str, *shape: int) -> np.ndarray:
    """Return numbers from -1 to 1 that depend on the name alone."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((bits >> np.uint64(11)) * 2.0**-52 - 1).reshape(shape)


def load_numbers(name: str, p: torch.Tensor) -> None:
    """Give a parameter values at which every gradient is large: many start at zero."""
    values, scale = torch.from_numpy(numbers(name, *p.shape)), 1 if "embed" in name else p.size(-1) ** -0.5
    p.detach().copy_(0.8 + 0.4 * values if p.ndim < 2 else 1.7 * values * scale)


def load_rotary(gpt: GPT, cfg: Hyperparameters) -> None:
    """Compute the tables in float64."""
    frequencies = np.pad(np.logspace(0, -1, cfg.head_dim // 4, base=1024), (0, cfg.head_dim // 4))
    angles = np.outer(np.arange(cfg.train_seq_len), frequencies)
    gpt.rotary.cos, gpt.rotary.sin = (torch.from_numpy(f(angles)) for f in (np.cos, np.sin))


def sequences(shape: str, cfg: Hyperparameters, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and targets of a step: random tokens in documents of about 30."""
    x = numbers(f"{shape} tokens {step}", 2, cfg.batch_tokens // cfg.train_seq_len, cfg.train_seq_len + 1)
    rows = torch.from_numpy(np.where(x[1] < -0.94, cfg.eot_token, (x[0] + 1) / 2 * cfg.vocab_size).astype(np.int64))
    return [(row[:-1].int(), row[1:]) for row in rows]


def figures(name: str, p: torch.Tensor) -> list[float]:
    """Return mean, root mean square, and mean of the product with fixed numbers."""
    x, weights = p.detach().flatten(), torch.from_numpy(numbers(f"weights of {name}", p.numel()))
    return [x.mean().item(), x.square().mean().sqrt().item(), (x * weights).mean().item()]


def golden_run(ranks: Ranks = Ranks()) -> dict[str, dict]:  # noqa: B008
    """Return for each shape the 20 losses, and the parameters' figures after step 1 and step 20."""
    result = {}
    for shape, changes in SHAPES.items():
        cfg = train_gpt.resolve(dataclasses.replace(train_gpt.PRESETS[shape], **changes, run_id=shape))
        trainer = Trainer(cfg, ranks)
        load_rotary(trainer.gpt, cfg)
        for name, p in trainer.gpt.named_parameters():
            load_numbers(name, p)
        result[shape] = dict(losses=[])
        for step in range(STEPS):
            own = sequences(shape, cfg, step)[ranks.rank :: ranks.world_size]
            result[shape]["losses"].append(trainer.train_step(step, own).item())
            if step + 1 in (1, STEPS):
                found = {name: figures(name, p) for name, p in trainer.gpt.named_parameters()}
                result[shape][f"step {step + 1}"] = found
    return result


def differences(result: dict[str, dict], loss_limit: float = 0) -> list[str]:
    """Name what differs from golden_steps.json: by 1e-12 after one step, by 1e-9 after 20. Losses may have a limit."""
    wrong = []
    for shape, expected in json.loads(Path(__file__).with_name("golden_steps.json").read_text())["runs"].items():
        for step, (got, want) in enumerate(zip(result[shape]["losses"], expected["losses"], strict=True), start=1):
            if not abs(got - want) <= (loss_limit or (1e-12 if step == 1 else 1e-9)) * want:
                wrong.append(f"{shape}: loss of step {step} is {got}, not {want}")
        for when, limit in ("step 1", 1e-12), (f"step {STEPS}", 1e-9):
            for name in sorted(result[shape][when].keys() | expected[when].keys()):
                got, want = (figures[when].get(name, [math.nan] * 3) for figures in (result[shape], expected))
                if not np.allclose(got, want, rtol=0, atol=limit * want[1]):
                    wrong.append(f"{shape}: {name} after {when} is {got}, not {want}")
    return wrong
