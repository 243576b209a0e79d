"""Train nano on a text that pack_text.py has packed as bytes, in so many seconds, and show what came of it.

    python data/pack_text.py FILES_OR_FOLDERS... --train [--seconds N]

A run of 20 steps says how fast this machine is; another takes as many as fit, or read the text once. Exit codes:
train_gpt.py's; 130 interrupted, or stopped where the machine became much slower: what is known is shown.
"""

import argparse
import contextlib
import glob
import io
import lzma
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import sample
import train_gpt
from data.pack_nano import EOT
from speedrun.process import available_cores, run

STEP, SEQUENCE = 2048, 8192  # tokens of a step, and of a sequence of the validation
TRIAL, SAMPLE = 20, 25  # steps: one for each stage of the track, no run can have fewer; what the sample takes, in steps
PLANNED, LATE = 0.9, 1.1  # parts of the time: warm processors become slower; a run that is still going on is stopped
# On two cores a step took 35 ms with two threads, and 200 to 440 beside one busy process; with one thread 49 and 54
THREADS = min(2, max(1, available_cores() - 1))
MODEL = f"--preset nano --target_loss 0 --val_sha256= --ngram_order 3 --ngram_rows 262144 --cpu_threads {THREADS}"
Curve = list[tuple[float, int, float]]  # of each validation the loss, the step and the seconds of training


def bytes_of(tokens: np.ndarray) -> bytes:
    """Return the text of tokens. An end of text is no byte."""
    return tokens[tokens < EOT].astype(np.uint8).tobytes()


def xz_bits(train: bytes, val: bytes) -> float:
    """Return the bits that `xz -9e` takes for a byte of a text, once it has read another."""
    before, both = (len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in (train, train + val))
    return 8 * (both - before) / len(val)


def launch(flags: Sequence[str], log: Path, steps: int) -> tuple[int, Curve]:
    """Return the exit code of a run, and its curve, however it ended."""
    sizes = [f"--num_iterations={steps}", f"--val_loss_every={math.ceil(steps / 3)}"]
    code = train_gpt.cli([*MODEL.split(), *flags, *sizes, f"--log_dir={log.parent}", f"--run_id={log.stem}"])
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) train_time:(\d+)ms", text, re.MULTILINE)
    return code, [(float(loss), int(step), int(ms) / 1000) for step, loss, ms in found]


def show(curve: Curve, targets: np.ndarray, xz: float) -> None:
    """Say how well held-back text is predicted, and whether that became worse in the course of the run."""
    size = len(bytes_of(targets))
    bits = len(targets) / size / math.log(2)  # per byte, in a nat per token
    (last, step, _), (lowest, at, _) = curve[-1], min(curve)
    print(f"\nbits per byte of {size:,} bytes that were held back:")
    print(f"{bits * last:8.3f} nano after step {step:,}")
    if last > 1.01 * lowest:
        print(f"{bits * lowest:8.3f} nano after step {at:,}: longer is worse; more text helps, or fewer --seconds")
    print(f"{xz:8.3f} xz -9e, which has read up to 1 MB of the training text", flush=True)


def train(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.train_text", description="started by pack_text.py --train")
    for name, kind in dict(folder=Path, seconds=float, began=float).items():  # began: by time.monotonic
        parser.add_argument(name, type=kind)
    args = parser.parse_args(argv)
    files = [args.folder / f"{split}_000000.bin" for split in ("train", "val")]
    text, val = (np.fromfile(file, "<u2", offset=1024) for file in files)
    targets = val[1:][: SEQUENCE * max(1, min(8, (len(val) - 1) // SEQUENCE, int(args.seconds / 15)))]
    train_files, val_files = (glob.escape(str(file)) for file in files)
    flags = [f"--train_files={train_files}", f"--val_files={val_files}", f"--val_tokens={len(targets)}"]
    log = Path("logs", time.strftime("own-%Y%m%d-%H%M%S-20.txt"))
    print(f"measuring this machine by {TRIAL} steps; all is to take {args.seconds:.0f} s at most", flush=True)
    before = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        code, curve = launch(flags, log, TRIAL)
    if code:
        return code
    step = curve[-1][2] / TRIAL
    others = time.monotonic() - before - TRIAL * step  # seconds of a run beside its steps
    xz = xz_bits(bytes_of(text[: min(1_000_000, int(20_000 * args.seconds))]), bytes_of(targets))
    whole = (len(text) - 1) // STEP
    left = args.began + PLANNED * args.seconds - time.monotonic() - others
    steps = max(TRIAL, min(whole, int(left / step) - SAMPLE))
    print(f"{steps:,} steps, of {1000 * step:.0f} ms, read {steps / whole:.0%} of the text", flush=True)
    if steps > TRIAL:
        log = log.with_stem(log.stem.removesuffix("20") + str(steps))
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, max(args.began + LATE * args.seconds - time.monotonic(), 1))
        code, longer = launch(flags, log, steps)
        if signal.setitimer(signal.ITIMER_REAL, 0) == (0, 0):
            print("The time is over, as this machine became slower than it was when measured")
        curve = longer if len(longer) > 1 else curve  # that of the 20 steps, if it was stopped before a third
    show(curve, targets, xz)
    if code == 0:
        prompt = bytes_of(targets[:24]).decode(errors="ignore")
        code = sample.main([str(log.with_suffix(".pt")), f"--prompt={prompt}", "--tokens=200"])
    print(f"{time.monotonic() - args.began:.0f} s in all, of --seconds {args.seconds:.0f}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(run("train_text.py", train))
