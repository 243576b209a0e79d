"""Train nano on a text that pack_text.py packed as bytes: in the seconds that are given. Show what came of it.

A short run says how fast this machine is. Then come runs that each read twice as much as the one before, so that all
end in time: models of different lengths err at different places, and are mixed. Longer runs whose loss is higher help,
too: C headers took 1.47 bits per byte with one, 1.56 without (n = 1).
"""

import contextlib
import importlib.util
import json
import lzma
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.pack_nano import to_tokens
from speedrun import ROOT
from speedrun.logs import STEP_LINE
from speedrun.process import STOPS, available_cores, end_with_parent

LOGS = ROOT / "logs"
STEP = 2048  # tokens
# Up to so many steps a text is read whole by a run with flags of one's own; of larger ones a part is read, whose size
# grows with the root of theirs
WHOLE = 1000
MOST_RUNS, MOST_PASSES = 4, 8  # beyond the short run
# A core is left to other programs. On two cores a step took 35 ms with two threads, and 200 to 440 beside one busy
# process; with one thread 49 and 54
THREADS = min(2, max(1, available_cores() - 1))
READ_FASTEST = 200_000  # tokens in a second: more than any CPU
# Rows for pairs and triples of bytes: half and twice as many ended alike on 500 kB of prose, and eight times as many on
# 5 MB (n = 1)
ROWS = 262_144
MODEL = f"--ngram_order 3 --ngram_rows {ROWS} --cpu_threads {THREADS}".split()  # the track allows nano pairs alone
READ_BEFORE = 8_000_000  # bytes of the training text that xz and PPMd read before: their time grows with them
MOST_COUNTED = 5_000_000  # tokens of the training text: their tables take up to 1 GB
PPMD_ORDERS = 4, 6, 8, 12, 16  # the best stands for it
LEAST = 20  # steps, one for each stage of the track
BUSY = 3.0  # stages differ less in time
# With one of these a run is the user's: what a pass is, what is validated, or where the results are
SINGLE = "--num_iterations --run_id --log_dir --resume --preset --train_files --val_files --val_tokens --batch_tokens"
SINGLE += " --vocab_size --eot_token"


class Text(NamedTuple):
    """Hold the bytes of a packed text, the tokens of one pass and of what validation scores, and the time for all."""

    train: Sequence[bytes]
    val: Sequence[bytes]
    tokens: int
    val_tokens: int
    seconds: float


class Run(NamedTuple):
    """Hold a run that ended: where it is, its validation loss, and its time.

    step: seconds of one; rest: all others, of the start and the validations.
    """

    path: Path
    loss: float
    step: float
    rest: float


class Pace:
    """Follow the losses that a run prints, and say what they tell."""

    def __init__(self, name: str, text: Text):
        self.name, self.text = name, text
        self.last, self.fastest, self.is_busy = (0, 0.0), math.inf, False

    def __call__(self, line: str) -> None:
        """Read a line of the run."""
        if not (found := STEP_LINE.fullmatch(line)):
            return
        step, loss, ms = int(found[1]), found[4], float(found[5])
        if step and loss:
            bits = bits_per_byte(float(loss), self.text)
            say(f"{self.name}, step {step:,} of {int(found[2]):,}: {bits:.3f} bits per byte")
        elif found[3]:
            pace, self.last = (ms - self.last[1]) / max(1, step - self.last[0]), (step, ms)
            self.fastest = min(pace, self.fastest)
            if pace > BUSY * self.fastest and not self.is_busy:
                self.is_busy = True
                say(f"note: steps take {pace / self.fastest:.0f} times as long as before: other programs run, too")


def steps_of(tokens: int) -> int:
    """Return the steps of a run with flags of one's own on so many training tokens."""
    whole = (tokens - 1) // STEP
    return whole if whole <= WHOLE else round(math.sqrt(WHOLE * whole))


def seconds_of(tokens: int) -> float:
    """Return the seconds that so many training tokens get if nobody says: 31 for 54 kB, 100 from 1 MB."""
    return min(100.0, 10 + 90 * math.sqrt(tokens / 1e6))


def passes_of(tokens: int, seconds: float) -> int:
    """Return how often a text can be read at most in this time."""
    return min(MOST_PASSES, math.ceil(seconds * READ_FASTEST / tokens))


def plan(text: Text, seconds: float, first: Run) -> list[int]:
    """Return the steps of the runs that fit into these seconds, by the time that the first one took.

    Counts take a second for a million tokens, mixing a dozen steps' time for 2,048 tokens of validation, a sample and a
    picture that of two starts (measured).
    """
    whole, validation = (text.tokens - 1) // STEP, text.val_tokens / STEP
    left = seconds - min(text.tokens, MOST_COUNTED) / 1e6 - 2 * first.rest - 12 * validation * first.step
    for count in range(MOST_RUNS, 1, -1):  # at least two, whatever part of the text the first then reads
        # Five validations, and what a model gives the mixture, take three steps' time for 2,048 tokens (measured)
        steps = (left - count * first.rest) / first.step - 3 * count * validation
        shortest = steps / (2**count - 1)
        if shortest >= whole:
            break
    longest = min(shortest * 2 ** (count - 1), (text.tokens * passes_of(text.tokens, text.seconds) - 1) // STEP)
    return [round(longest / 2**i) for i in reversed(range(count))] if longest >= 2 * LEAST else []


def say(*lines: str) -> None:
    """Print above the bar, as long as the console is there."""
    try:
        with tqdm.external_write_mode():
            print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def bar_over(began: float, end: float) -> Iterator[None]:
    """Show on a terminal how much of the time has passed."""
    is_over, columns = threading.Event(), shutil.get_terminal_size().columns
    form = dict(ncols=columns - 1, bar_format="{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s", disable=None)
    with tqdm(total=end - began, initial=time.monotonic() - began, **form) as bar:

        def tick() -> None:
            while not is_over.wait(1):
                bar.update(min(time.monotonic() - began, bar.total) - bar.n)

        (ticking := threading.Thread(target=tick, daemon=True)).start()
        try:
            yield
        finally:
            is_over.set()
            ticking.join()


def why(text: Text, own: Sequence[str] = ()) -> list[str]:
    """Say in three lines what is chosen."""
    size, val = sum(map(len, text.train)), sum(map(len, text.val))
    flags = f"; your flags: {shlex.join(own)}" * bool(own)
    return [
        f"text: {size:,} bytes to train on, in random order, and {val:,} others to validate",
        f"time: about {text.seconds:.0f} s; --seconds N takes another",
        f"model: nano, with rows for triples of bytes, too; attention looks 512 bytes back{flags}",
    ]


def launch(flags: Sequence[str], told: Callable[[str], None]) -> int:
    """Start run.sh, hand over the lines that it prints, and return its exit code, or 130 if a signal came.

    Pass on SIGTERM.
    """
    runs, asked = list[subprocess.Popen[str]](), list[int]()

    def ask(number: int, _: object) -> None:
        asked.append(number)
        for run in runs:
            if number == signal.SIGTERM:
                run.send_signal(number)  # a terminal's come to all

    before = {number: signal.signal(number, ask) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        how: dict = dict(stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
        how |= dict(env=os.environ | {"PYTHON": sys.executable}, preexec_fn=end_with_parent)
        try:
            runs.append(run := subprocess.Popen([ROOT / "run.sh", *flags], **how))
            for line in run.stdout or ():
                told(line)
            code = run.wait()
        finally:
            for run in runs:
                run.terminate()  # nothing, once it has ended
            for number, handler in before.items():
                signal.signal(number, handler)
        errors.seek(0)
        if (problems := errors.read().strip()) and not asked:  # who stops a run needs no traceback
            say(problems)
    return 128 - code if code < 0 else code or 130 * bool(asked)


def scored_bytes(text: Text) -> int:
    """Return how many bytes the validation scores. An end of text is a token, and no byte; the first is only read."""
    starts = accumulate(1 + len(document) for document in text.val)  # of all documents but the first
    return text.val_tokens - sum(start <= text.val_tokens for start in islice(starts, len(text.val) - 1))


def bits_per_byte(loss: float, text: Text) -> float:
    """Return bits per byte of a mean loss in nats per token."""
    return loss * text.val_tokens / scored_bytes(text) / math.log(2)


def compressed(text: Text) -> dict[str, float]:
    """Return the bits that others take for a byte of the validation text, once they have read the training text."""
    train, val = b"".join(text.train)[:READ_BEFORE], b"".join(text.val)[: scored_bytes(text)]
    ways: dict[str, Callable[[bytes], bytes]]
    ways = {"xz -9e": lambda part: lzma.compress(part, preset=9 | lzma.PRESET_EXTREME)}
    if importlib.util.find_spec("pyppmd"):
        import pyppmd

        for order in PPMD_ORDERS:
            ways[f"PPMd {order}"] = partial(pyppmd.compress, max_order=order, mem_size=2**28, variant="H")
    else:
        say('PPMd is left out: pip install -e ".[own]" brings pyppmd')
    with ThreadPoolExecutor(2) as threads:
        sizes = threads.map(lambda way: len(way(train + val)) - len(way(train)), ways.values())
        bits = [8 * size / len(val) for size in sizes]
    told = [f"{way}, given {len(train):,} bytes of the training text" for way in ways]
    xz, *orders = zip(bits, told, strict=True)
    return {name: bits for bits, name in (xz, *sorted(orders)[:1])}


def prompt_of(text: Text) -> str:
    """Return the first words of the validation text."""
    words = re.match(r"\s*(?:\S+\s+){1,4}", text.val[0].decode(errors="replace")[:60])
    return words[0] if words else ""


def mix(runs: Sequence[Path], text: Text) -> dict[str, float]:
    """Mix the models of runs with counts of the training text; write RUN.mixture beside the last one.

    Return bits per byte of exactly the validation that the runs score: of the mixture, the last model and the counts.
    """
    from speedrun.mixture import Mixture, counts_of, load_model, write_mixture  # torch takes seconds to load

    tokens, val = to_tokens(text.train)[:MOST_COUNTED], to_tokens(text.val)[: text.val_tokens + 1].tolist()
    mixture = Mixture([load_model(run.with_suffix(".pt"), "cpu") for run in runs], counts_of(tokens))
    length = mixture.cfg.val_seq_len
    sequences = [val[start : start + length + 1] for start in range(0, text.val_tokens, length)]
    losses = np.concatenate([mixture.score(sequence) for sequence in sequences], axis=1).mean(axis=1)
    write_mixture(runs[-1].with_suffix(".mixture"), runs, tokens, mixture.weights)
    found = {"all together": losses[0], "the best model alone": losses[-3], "counts alone": losses[-2]}
    return {name: bits_per_byte(loss, text) for name, loss in found.items()}


def figures(runs: Sequence[Run], text: Text, others: dict[str, float]) -> tuple[Path, dict[str, float]]:
    """Return the file of all runs together, or of the last and best where they are not mixed, and bits per byte."""
    best = runs[-1]
    try:
        return best.path.with_suffix(".mixture"), mix([run.path for run in runs], text) | others
    except (KeyboardInterrupt, Exception) as error:  # nothing that ended is lost
        say(f"the models are not mixed: {error!r:.200}")
    return best.path.with_suffix(".pt"), {"the best model alone": bits_per_byte(best.loss, text)} | others


def show(model: Path, bits: dict[str, float], text: Text) -> None:
    """Say how good a model is, sample what it would go on with, and draw its losses."""
    say("", "bits per byte of the validation text:", *(f"{bits:8.3f} {name}" for name, bits in bits.items()))
    if model.exists():
        os.utime(model)  # the newest is what sample.py takes
        subprocess.run([sys.executable, "sample.py", str(model), f"--prompt={prompt_of(text)}"], cwd=ROOT)
    if importlib.util.find_spec("matplotlib"):
        plot = [
            "-m",
            "speedrun",
            "plot",
            str(model.with_suffix(".txt")),
            "-o",
            str(picture := model.with_suffix(".png")),
        ]
        if not subprocess.run([sys.executable, *plot], cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            say(f"curve: {picture}; as a page: python -m speedrun view {model.with_suffix('.txt')}")
    else:
        say('no picture: pip install -e ".[race]" brings matplotlib')


def train_all(flags: Sequence[str], own: Sequence[str], text: Text, end: float, runs: list[Run]) -> int:
    """Train until a time, fill in the runs that ended, and return the last exit code."""
    name, code = time.strftime("own-%Y%m%d-%H%M%S"), 0
    todo = [max(LEAST, min(round(end - time.monotonic()), (text.tokens - 1) // STEP))]
    while todo and not code:
        path, steps = LOGS / f"{name}-{len(runs) + 1}", todo.pop(0)
        say(f"{path.name}: {steps:,} steps, which read the text {steps * STEP / text.tokens:.1f} times")
        sizes = f"--num_iterations {steps} --val_loss_every {math.ceil(steps / 4)} --run_id {path.name}"
        began, result = time.monotonic(), path.with_suffix(".json")
        code = launch([*flags, *sizes.split(), *own], Pace(path.name, text))
        if not result.exists():
            say(f"{path.name} did not end")
            break
        found = json.loads(result.read_text())
        seconds = found["train_time_ms"] / 1000
        runs.append(Run(path, found["val_loss"], seconds / steps, time.monotonic() - began - seconds))
        if len(runs) == 1:
            todo = plan(text, end - time.monotonic(), runs[0])
    return code


def train(flags: Sequence[str], own: Sequence[str], text: Text, began: float) -> int:
    """Train until the text's time is over. Show what is finished, and return the last exit code.

    began: when packing did, by time.monotonic.
    """
    for number in STOPS:  # what is finished is shown
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    runs, others, code = list[Run](), dict[str, float](), 0
    with bar_over(began, end := began + text.seconds):
        try:
            others = compressed(text)
            code = train_all(flags, own, text, end, runs)
        except KeyboardInterrupt:
            code = 130
        except Exception as error:  # nothing that ended is lost
            code = 1
            say(f"training ends: {error!r:.200}")
        runs.sort(key=lambda run: run.loss, reverse=True)
        found = figures(runs, text, others) if runs else None
    if found:
        show(*found, text)
    return code
