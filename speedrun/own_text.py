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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

from speedrun import ROOT
from speedrun.process import STOPS, end_with_parent

LOGS = ROOT / "logs"
STEP = 2048  # tokens
# Up to so many steps a text is read whole, and again as long as that helps; of larger ones a part is read, whose size
# grows with the root of theirs. Rows for pairs and triples of bytes: half and twice as many ended alike on 500 kB of
# prose, and eight times as many on 5 MB (n = 1)
WHOLE, MOST_STEPS, MOST_PASSES, ROWS = 1000, 2000, 8, 262_144
MODEL = ["--ngram_order", "3", "--ngram_rows", str(ROWS)]  # the track allows nano pairs alone
XZ_BYTES = 8_000_000  # of the training text that xz reads before: its time grows with them
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


def xz_bits_per_byte(text: Text) -> float:
    """Return the bits that `xz -9e` takes for a byte of the validation text, once it has read the training text."""
    train, val = b"".join(text.train)[:XZ_BYTES], b"".join(text.val)[: text.val_tokens]
    with ThreadPoolExecutor(2) as threads:
        sizes = threads.map(lambda part: len(lzma.compress(part, preset=9 | lzma.PRESET_EXTREME)), (train, train + val))
        alone, both = sizes
    return 8 * (both - alone) / len(val)


def prompt_of(text: Text) -> str:
    """Return the first words of the validation text."""
    words = re.match(r"\s*(?:\S+\s+){1,4}", text.val[0].decode(errors="replace")[:60])
    return words[0] if words else ""


def show(run: Path, loss: float, text: Text) -> None:
    """Say how good a run is, let its model go on from the first words of the validation text, and draw its losses."""
    size = min(XZ_BYTES, sum(map(len, text.train)))
    told = f"{xz_bits_per_byte(text):.3f} of xz -9e that has read {size:,} bytes of the training text"
    say(f"\n{bits_per_byte(loss, text):.3f} bits per byte of the validation text; {told}")
    model, picture = run.with_suffix(".pt"), run.with_suffix(".png")
    if model.exists():
        os.utime(model)  # the newest is what sample.py takes
        command = ["sample.py", str(model), f"--prompt={prompt_of(text)}"]
        subprocess.run([sys.executable, *command], cwd=ROOT)
    if importlib.util.find_spec("matplotlib"):
        plot = ["-m", "speedrun", "plot", str(run.with_suffix(".txt")), "-o", str(picture)]
        if subprocess.run([sys.executable, *plot], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0:
            say(f"curve: {picture}")
    else:
        say('no picture: pip install -e ".[race]" brings matplotlib')


def train(flags: Sequence[str], own: Sequence[str], text: Text) -> int:
    """Train on 1, 2, 4, ... passes until validation turns or a run fails. Show the best, return the last one's code."""
    start, steps, passes = time.strftime("own-%Y%m%d-%H%M%S"), steps_of(text.tokens), 1
    best: tuple[float, Path] | None = None
    code = 0
    while passes <= passes_of(text.tokens) and not code:
        run, count = LOGS / f"{start}-{passes}", steps * passes
        sizes = ["--num_iterations", str(count), "--val_loss_every", str(max(1, count // 8)), "--run_id", run.name]
        say(f"{run.name}: {'one pass' if passes == 1 else f'{passes} passes'}, {count:,} steps")
        code, result = launch([*flags, *sizes, *own]), run.with_suffix(".json")
        loss = json.loads(result.read_text())["val_loss"] if result.exists() else math.inf  # it did not end
        if loss >= (best[0] if best else math.inf):
            if best:
                told = "are no better" if loss < math.inf else "did not come to their end"
                say(f"{passes} passes {told}: the run before is kept")
            break
        best = loss, run
        passes *= 2
    if best:
        show(best[1], best[0], text)
    return code
