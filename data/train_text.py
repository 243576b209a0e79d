"""Train nano on a text that pack_text.py has packed as bytes, in so many seconds, and show what came of it.

    python data/pack_text.py FILES_OR_FOLDERS... --train [--seconds N]

A few steps say how fast this machine is, and so how many fit. The run reads the text at most once. Then come bits per
byte of text that was held back, beside xz's, and a sample. Exit codes: train_gpt.py's; 130 interrupted, after the
figures that are known.
"""

import argparse
import contextlib
import io
import lzma
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import sample
import train_gpt
from data.pack_nano import EOT
from data.shards import write_shard
from speedrun.process import available_cores, run

TRIAL = 20  # steps, one for each stage of the track: no run can have fewer
STEP, SEQUENCE = 2048, 8192  # tokens of a step, and of a sequence of the validation
# In the time of a step: a sequence of a validation; loading the model and sampling (measured, one thread)
VALIDATION, SAMPLE = 2.5, 30
VALIDATIONS = 4  # before the first step and after each third
READ_BEFORE, READ_IN_A_STEP = 1_000_000, 40_000  # bytes of the training text that xz reads: in all, in a step's time
# A core is left to other programs. On two cores a step took 35 ms with two threads, and 200 to 440 beside one busy
# process; with one thread 49 and 54
THREADS = min(2, max(1, available_cores() - 1))
# Rows for pairs and triples of bytes: half and twice as many ended alike on 500 kB of prose (n = 1)
MODEL = "--preset nano --target_loss 0 --val_sha256= --ngram_order 3 --ngram_rows 262144".split()
MODEL += ["--cpu_threads", str(THREADS)]


def bytes_of(tokens: np.ndarray) -> bytes:
    """Return the text of tokens. An end of text is no byte."""
    return tokens[tokens < EOT].astype(np.uint8).tobytes()


def xz_bits(train: bytes, val: bytes) -> float:
    """Return the bits that `xz -9e` takes for a byte of a text, once it has read another."""
    before, both = (len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in (train, train + val))
    return 8 * (both - before) / len(val)


def measure(flags: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of a step here, and those that a run takes beside its steps."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as logs, contextlib.redirect_stdout(io.StringIO()):
        result = train_gpt.main([*flags, f"--num_iterations={TRIAL}", "--no-save_checkpoint", f"--log_dir={logs}"])
    training = result["train_time_ms"] / 1000
    return training / TRIAL, time.monotonic() - began - training


def steps_within(seconds: float, step: float, sequences: int, whole: int) -> int:
    """Return the steps of a run that is over in these seconds, its sample, too. It reads the text at most once.

    step: seconds of one. sequences: of a validation. whole: steps that read all of the text.
    """
    others = VALIDATIONS * VALIDATION * sequences + SAMPLE
    return max(TRIAL, min(whole, int(seconds / step - others)))


def curve_of(log: Path) -> list[tuple[float, int, float]]:
    """Return loss, step and seconds of training of each validation in a log, however the run ended."""
    line = re.compile(r"^step:(\d+)/\d+ val_loss:(\S+) train_time:(\d+)ms", re.MULTILINE)
    found = line.findall(log.read_text()) if log.exists() else []
    return [(float(loss), int(step), int(ms) / 1000) for step, loss, ms in found]


def show(curve: Sequence[tuple[float, int, float]], targets: np.ndarray, xz: float, before: int) -> None:
    """Say how well held-back text is predicted, and whether that became worse in the course of the run."""
    size = len(bytes_of(targets))
    bits = len(targets) / size / math.log(2)  # in a nat per token
    (last, step, _), (lowest, at, _) = curve[-1], min(curve)
    print(f"\nbits per byte of {size:,} bytes that were held back:")
    print(f"{bits * last:8.3f} nano after step {step:,}")
    print(f"{xz:8.3f} xz -9e, which has read {before:,} bytes of the training text")
    if last > 1.01 * lowest:
        print(f"They were lowest after step {at:,}, {bits * lowest:.3f}, and rose: a longer run does not help,")
        print("more text does, or fewer --seconds")


def train(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.train_text", description=__doc__)
    parser.add_argument("folder", type=Path, help="where pack_text.py has put the shards")
    parser.add_argument("--seconds", type=float, required=True, help="that all of it may take")
    parser.add_argument("--began", type=float, default=time.monotonic(), help="when it did, by time.monotonic")
    args = parser.parse_args(argv)
    end = args.began + args.seconds
    text, val = (np.fromfile(args.folder / f"{split}_000000.bin", "<u2", offset=1024) for split in ("train", "val"))
    log = Path("logs", time.strftime("own-%Y%m%d-%H%M%S.txt"))
    train_file, val_file = log.with_suffix(".train.bin"), log.with_suffix(".val.bin")
    flags = [*MODEL, f"--train_files={train_file}", f"--val_files={val_file}"]

    print(f"measuring this machine by {TRIAL} steps; all takes about {args.seconds:.0f} s", flush=True)
    write_shard(train_file, text[: TRIAL * STEP + 1])
    write_shard(val_file, val)
    step, rest = measure([*flags, f"--val_tokens={SEQUENCE}"])
    room = max(1, int((end - time.monotonic()) / step))  # in steps; if it is little, it is for training
    sequences = max(1, min(8, (len(val) - 1) // SEQUENCE, room // 150))
    targets = val[1 : sequences * SEQUENCE + 1]
    before = bytes_of(text[: min(READ_BEFORE, READ_IN_A_STEP * room // 20)])
    xz = xz_bits(before, bytes_of(targets))
    whole = (len(text) - 1) // STEP
    steps = steps_within(end - time.monotonic() - rest, step, sequences, whole)
    what = "all of the text, once: twice would be worse" if steps == whole else f"{steps / whole:.0%} of the text"
    print(f"{steps:,} steps, of {1000 * step:.0f} ms, read {what}", flush=True)
    write_shard(train_file, text[: steps * STEP + 1])  # a copy, as another text may be packed meanwhile
    every = math.ceil(steps / (VALIDATIONS - 1))
    sizes = [f"--num_iterations={steps}", f"--val_tokens={len(targets)}", f"--val_loss_every={every}"]
    code = train_gpt.cli([*flags, *sizes, f"--run_id={log.stem}"])

    if curve := curve_of(log):
        show(curve, targets, xz, len(before))
    if code == 0:
        prompt = bytes_of(targets[:24]).decode(errors="ignore")
        tokens = max(50, min(300, int(10 * (end - time.monotonic()) / step)))  # ten take as long as a step
        code = sample.main([str(log.with_suffix(".pt")), f"--prompt={prompt}", f"--tokens={tokens}"])
    training = curve[-1][2] if curve else 0
    print(f"{time.monotonic() - args.began:.0f} s in all, {training:.0f} of them training", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(run("train_text.py", train))
