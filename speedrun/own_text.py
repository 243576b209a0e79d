"""Train nano on a text that pack_text.py packed as bytes: for as long as it pays, and show what came of it."""

import importlib.util
import json
import lzma
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.pack_nano import to_tokens
from speedrun import ROOT
from speedrun.process import STOPS, end_with_parent

LOGS = ROOT / "logs"
STEP = 2048  # tokens
# Up to so many steps a text is read whole, and again as long as that helps; of larger ones a part is read, whose size
# grows with the root of theirs. Rows for pairs and triples of bytes: half and twice as many ended alike on 500 kB of
# prose, and eight times as many on 5 MB (n = 1)
WHOLE, MOST_STEPS, MOST_PASSES, ROWS = 1000, 2000, 8, 262_144
MODEL = ["--ngram_order", "3", "--ngram_rows", str(ROWS)]  # the track allows nano pairs alone
READ_BEFORE = 8_000_000  # bytes of the training text that xz and PPMd read before: their time grows with them
MOST_COUNTED = 5_000_000  # tokens of the training text: their tables take up to 1 GB
PPMD_ORDERS = 4, 6, 8, 12, 16  # the best stands for it
# With one of these a run is the user's: what a pass is, what is validated, or where the results are
SINGLE = "--num_iterations --run_id --log_dir --resume --preset --train_files --val_files --val_tokens --batch_tokens"
SINGLE += " --vocab_size --eot_token"


class Text(NamedTuple):
    """Hold the bytes of a packed text, and the tokens of one pass and of the validation that is scored."""

    train: Sequence[bytes]
    val: Sequence[bytes]
    tokens: int
    val_tokens: int


def steps_of(tokens: int) -> int:
    """Return the steps of the first run on so many training tokens."""
    whole = (tokens - 1) // STEP
    return whole if whole <= WHOLE else round(math.sqrt(WHOLE * whole))


def passes_of(tokens: int) -> int:
    """Return how often a text may be read: 1, 2, 4 or 8 times."""
    steps = max(1, steps_of(tokens))
    return 1 if steps > WHOLE else 2 ** int(math.log2(min(MOST_PASSES, MOST_STEPS / steps)))


def say(*lines: str) -> None:
    """Print, as long as the console is there."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def why(text: Text, own: Sequence[str] = ()) -> list[str]:
    """Say in three lines what is chosen."""
    size, val, passes = sum(map(len, text.train)), sum(map(len, text.val)), passes_of(text.tokens)
    steps = steps_of(text.tokens)
    again = f", then up to {passes} passes as long as validation falls" if passes > 1 else ""
    part = min(1.0, steps * STEP / text.tokens)
    return [
        f"text: {size:,} bytes to train on, in random order, and {val:,} others to validate",
        f"steps: {steps:,} of {STEP:,} tokens read {part:.0%} of it{again}",
        "model: nano, with rows for triples of bytes, too; attention looks 512 bytes back"
        + f"; your flags: {shlex.join(own)}" * bool(own),
    ]


def launch(flags: Sequence[str]) -> int:
    """Start run.sh, pass on SIGTERM, and return its exit code, or 130 if it ended well in spite of a signal."""
    env, asked = os.environ | {"PYTHON": sys.executable}, list[int]()
    run = subprocess.Popen([ROOT / "run.sh", *flags], env=env, preexec_fn=end_with_parent)

    def ask(number: int, _: object) -> None:
        asked.append(number)
        if number == signal.SIGTERM:
            run.send_signal(number)  # a terminal's come to all

    before = {number: signal.signal(number, ask) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        code = run.wait()
        return 128 - code if code < 0 else code or 130 * bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bits_per_byte(loss: float, text: Text) -> float:
    """Return bits per byte of a mean loss in nats per token. An end of text is a token, and no byte."""
    starts = accumulate(1 + len(document) for document in text.val)  # of all documents but the first
    ends = sum(start <= text.val_tokens for start in islice(starts, len(text.val) - 1))
    return loss * text.val_tokens / (text.val_tokens - ends) / math.log(2)


def compressed(text: Text) -> dict[str, float]:
    """Return the bits that others take for a byte of the validation text, once they have read the training text."""
    train, val = b"".join(text.train)[:READ_BEFORE], b"".join(text.val)[: text.val_tokens]
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
    found = dict(zip(ways, bits, strict=True))
    orders = {name: found.pop(name) for name in [*found] if name.startswith("PPMd")}
    return found | ({min(orders, key=orders.__getitem__): min(orders.values())} if orders else {})


def mix(runs: Sequence[Path], text: Text) -> dict[str, float]:
    """Mix the models of runs with counts of the training text; write RUN.mixture beside the last one.

    Return bits per byte of exactly the validation that the runs score: of the mixture, the last model and the counts.
    """
    from speedrun.mixture import Counts, Mixture, load_model, write_mixture  # torch takes seconds to load

    tokens, val = to_tokens(text.train)[:MOST_COUNTED], to_tokens(text.val)[: text.val_tokens + 1].tolist()
    mixture = Mixture([load_model(run.with_suffix(".pt"), "cpu") for run in runs], Counts(tokens))
    length = mixture.cfg.val_seq_len
    sequences = [val[start : start + length + 1] for start in range(0, text.val_tokens, length)]
    parts = np.concatenate([mixture.parts(sequence) for sequence in sequences], axis=1)
    found = {"all together": mixture.mix(parts), "the last model alone": parts[-2], "counts alone": parts[-1]}
    write_mixture(runs[-1].with_suffix(".mixture"), runs, tokens, mixture.weights)
    return {name: bits_per_byte(-np.log(p).mean(), text) for name, p in found.items()}


def prompt_of(text: Text) -> str:
    """Return the first words of the validation text."""
    words = re.match(r"\s*(?:\S+\s+){1,4}", text.val[0].decode(errors="replace")[:60])
    return words[0] if words else ""


def show(runs: Sequence[Path], loss: float, text: Text) -> None:
    """Say how good runs are, the last the best; sample what they would go on with; draw the losses of the last."""
    size, last = min(READ_BEFORE, sum(map(len, text.train))), runs[-1]
    picture, model = last.with_suffix(".png"), last.with_suffix(".pt")
    found = {"the model": bits_per_byte(loss, text)}
    if all(run.with_suffix(".pt").exists() for run in runs):
        found, model = mix(runs, text), last.with_suffix(".mixture")
    found |= {f"{name}, given {size:,} bytes of the training text": n for name, n in compressed(text).items()}
    say("", "bits per byte of the validation text:", *(f"{bits:8.3f} {name}" for name, bits in found.items()))
    if model.exists():
        os.utime(model)  # the newest is what sample.py takes
        command = ["sample.py", str(model), f"--prompt={prompt_of(text)}"]
        subprocess.run([sys.executable, *command], cwd=ROOT)
    if importlib.util.find_spec("matplotlib"):
        plot = ["-m", "speedrun", "plot", str(last.with_suffix(".txt")), "-o", str(picture)]
        if subprocess.run([sys.executable, *plot], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0:
            say(f"curve: {picture}")
    else:
        say('no picture: pip install -e ".[race]" brings matplotlib')


def train(flags: Sequence[str], own: Sequence[str], text: Text) -> int:
    """Train on 1, 2, 4, ... passes until validation turns or a run fails. Show what is finished, return the last code.

    A run whose validation is no better than that of the run before is mixed in, too: it errs elsewhere.
    """
    start, steps, passes = time.strftime("own-%Y%m%d-%H%M%S"), steps_of(text.tokens), 1
    ended: list[tuple[float, Path]] = []
    code = 0
    while passes <= passes_of(text.tokens) and not code:
        run, count = LOGS / f"{start}-{passes}", steps * passes
        sizes = ["--num_iterations", str(count), "--val_loss_every", str(max(1, count // 8)), "--run_id", run.name]
        say(f"{run.name}: {'one pass' if passes == 1 else f'{passes} passes'}, {count:,} steps")
        code, result = launch([*flags, *sizes, *own]), run.with_suffix(".json")
        if not result.exists():  # it did not end
            break
        loss = json.loads(result.read_text())["val_loss"]
        is_better = all(loss < other for other, _ in ended)
        ended.append((loss, run))
        if not is_better:
            say(f"{passes} passes are no better")
            break
        passes *= 2
    if ended:
        ended.sort(key=lambda one: one[0], reverse=True)
        show([run for _, run in ended], ended[-1][0], text)
    return code
