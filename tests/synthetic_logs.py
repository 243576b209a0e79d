"""Logs and records that no run wrote, for the tests of the tools in records/."""

import hashlib
import json
import struct
from pathlib import Path

RULE = "=" * 100
SOURCE = "import torch\n\nmodel = torch.compile(torch.nn.Identity(), dynamic=False)\n"
NANO_VAL = "3dedcd4e56e9f6d188eb07c5347f5c44f84bc9cc7e98ccea3eb898c7bfd415bf"
SHARDS = {"nano": ("data/nano/nano_train_{:06d}.bin", 0, 43_564_420), "gpt2": ("fineweb_train_{:06d}.bin", 1, 10**8)}
README = "# Name: one line that says what\n\nText.\n"


def header_sha256(num_tokens: int) -> str:
    return hashlib.sha256(struct.pack("<256i", 20240520, 1, num_tokens, *[0] * 253)).hexdigest()


def log_text(
    seed: int = 1,
    val_loss: float = 1.43,
    steps: int = 20,
    source: str = SOURCE,
    preset: str = "nano",
    step_ms: float = 40.3,
    val_every: int = 5,
    curve: dict[int, float] | None = None,
    val_tokens: int | None = None,
    val_sha256: str = NANO_VAL,
    batch_tokens: int = 1024,
    threads: str = "1 processes, 2 threads",
    recompiles: int = 0,
    **configuration,
) -> str:
    """Our form, of a whole run whose step k ends at k times step_ms."""
    pattern, first_shard, shard_tokens = SHARDS[preset]
    starts = range(0, shard_tokens - batch_tokens, batch_tokens)
    num_shards = (steps - 1) // len(starts) + 1
    shards = [pattern.format(first_shard + i) for i in range(num_shards)]
    config = {
        "preset": preset,
        "batch_tokens": batch_tokens,
        "num_iterations": steps,
        "seed": seed,
        "run_id": str(seed),
    }
    header = header_sha256(shard_tokens)
    lines = [
        source,
        RULE,
        "Running Python 3.11.7 (main, May  9 2026) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None, numpy 2.4.6",
        "commit: unknown",
        f"cpu: Some Processor, 2 cores; {threads} each",
        "flags: []",
        f"configuration: {json.dumps(config | configuration)}",
        *(f"train shard: {shard}, {shard_tokens} tokens, header sha256 {header}" for shard in shards),
        f"val shard: data/nano/nano_val_000000.bin, 2164840 tokens, header sha256 {'0' * 64}",
        f"validation tokens: {val_tokens or (262144 if preset == 'nano' else 10485760)}, sha256 {val_sha256}",
        f"seed: {seed}, log: logs/{seed}.txt",
        RULE,
    ]
    if curve is None:
        curve = {step: val_loss + 1 - step / steps for step in [*range(0, steps, val_every), steps]}
    for step in range(steps + 1):
        timing = f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms if step else 0:.2f}ms"
        lines += [f"step:{step}/{steps} {timing}"] if step else []
        lines += [f"step:{step}/{steps} val_loss:{curve[step]:.4f} {timing}"] if step in curve else []
    lines += [
        f"first batch: {shards[0]} position 0",
        f"last batch: {shards[-1]} position {starts[(steps - 1) % len(starts)]}",
        f"recompiles after the clock started: {recompiles}",
        f"step time: median {step_ms:.2f}ms p99 {step_ms:.2f}ms slowest {step_ms:.2f}ms at step 3",
        "peak memory: 499 MiB",
        "",
    ]
    return "\n".join(lines)


def public_text(curve: dict[int, float], steps: int) -> str:
    """The public form in its older shape: train losses, and ten steps that are not timed."""
    lines = ["import sys", "print(sys.version)", "", RULE, "Running Python 3.12.7 (main) [GCC 13.2.0]"]
    lines += ["Running PyTorch 2.7.0.dev20250125+cu126 compiled for CUDA 12.6", "Sat Feb  1 00:00:00 2025"]
    lines += [f"|   {i}  NVIDIA H100 80GB HBM3          On  | 00000000:0{i}:00.0 Off |" for i in range(8)]
    lines += [RULE]
    for step in range(steps + 1):
        timed = step - 10
        timing = f"train_time:{100 * max(timed, 0)}ms step_avg:{'100.00' if timed > 0 else 'nan'}ms"
        lines += [f"step:{step}/{steps} train_loss:5.0000 {timing}"] if step else []
        lines += [f"step:{step}/{steps} val_loss:{curve[step]:.4f} {timing}"] if step in curve else []
    return "\n".join([*lines, "peak memory allocated: 29898 MiB reserved: 44552 MiB", ""])


def write_record(root: Path, name: str, texts: list[str], source: str = SOURCE, readme: str = README) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "train_gpt.py").write_text(source)
    (folder / "README.md").write_text(readme)
    for i, text in enumerate(texts):
        (folder / f"run{i}.txt").write_text(text)
    return folder
