"""Hold --train against others on texts of your own, and draw the figures of docs/own_texts.json.

    python -m speedrun texts FILES... [--runs 3]     measure: bits per byte of each text, added to the file
    python -m speedrun texts                         draw docs/own_texts.png again

Each text is packed and trained on by `data/pack_text.py --train`, in the time that it takes by itself. A plain GPT then
trains for as long on the same bytes (speedrun/plain_gpt.py; starting and validating are off its clock alone).
"""

import argparse
import importlib
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from speedrun import ROOT, needs
from speedrun.logs import markdown
from speedrun.own_text import THREADS
from speedrun.process import own_process

with needs.packages("race"):
    import matplotlib.pyplot as plt
    import numpy as np

    from speedrun.model import run
    from train_gpt import UserError

FIGURES = ROOT / "docs/own_texts.json"
# Columns, by how a line of --train begins
WAYS = {"all": "ours", "the best model": "model", "counts": "counts", "PPMd": "PPMd", "xz": "xz -9e"}
PLAIN = "plain GPT"
WIDEST = 1.9  # of the bars: what is longer says so
COLUMNS = [*WAYS.values(), PLAIN]


def run_once(path: Path, seed: int) -> dict[str, float]:
    """Return the training bytes, the seconds, and bits per byte of each way."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        own = ["--out", folder, "--train", "--", "--seed", str(seed)]
        told = own_process(["data/pack_text.py", str(path.resolve()), *own])
        size = re.findall(r"text: ([\d,]+)", told)[0].replace(",", "")
        found = dict(seconds=time.monotonic() - start, bytes=int(size))
        for bits, name in re.findall(r"^ +(\d+\.\d{3}) (.+)", told.partition("bits per byte of the")[2], re.M):
            found |= {way: float(bits) for begin, way in WAYS.items() if name.startswith(begin)}
        val_tokens = int(re.findall(r"--val_tokens (\d+)", told)[0])
        val = np.fromfile(min(Path(folder).glob("val_*.bin")), "<u2", offset=1024)[1 : val_tokens + 1]
        plain = f"--seconds {found['seconds']} --val_tokens {val_tokens} --seed {seed} --threads {THREADS}".split()
        curve = json.loads(own_process(["speedrun/plain_gpt.py", "--data", f"{folder}/", *plain]))["val_curve"]
    return found | {PLAIN: curve[-1][1] * len(val) / int((val < 256).sum()) / math.log(2)}


def table() -> str:
    """Return the means of each text's runs."""
    rows = []
    for name, runs in json.loads(FIGURES.read_text()).items():
        size, seconds, *bits = (statistics.fmean(run[key] for run in runs) for key in ("bytes", "seconds", *COLUMNS))
        rows.append([name, f"{size / 1000:,.0f}", f"{seconds:.0f}", *(f"{x:.3f}" for x in bits), str(len(runs))])
    return markdown("|".join(["text", "kB", "s", *COLUMNS, "n"]), rows)


def draw(path: Path) -> None:
    """Draw bits per byte of each text relative to PPMd's."""
    texts = json.loads(FIGURES.read_text())
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(texts) + 1.2), layout="constrained")
    ways = ["ours", "xz -9e", PLAIN]
    for i, way in enumerate(ways):
        means = [statistics.fmean(run[way] / run["PPMd"] for run in runs) for runs in texts.values()]
        axes.barh(np.arange(len(texts)) + (i - 1) * 0.27, means, 0.25, label=way, color=("C0", "0.75", "0.55")[i])
        for y, x in enumerate(means):
            axes.text(min(x, WIDEST) + 0.01, y + (i - 1) * 0.27, f"{x:.2f}", va="center", fontsize=7)
    names = [f"{name} ({runs[0]['bytes'] / 1000:,.0f} kB)" for name, runs in texts.items()]
    axes.set_xlim(0, WIDEST + 0.1)
    axes.set_yticks(np.arange(len(texts)), names)
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_xlabel("bits per byte of held-out text, PPMd's = 1 (best of five orders); shorter is better")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def texts(argv: Sequence[str] | None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m speedrun texts", description=__doc__, formatter_class=raw)
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path)
    parser.add_argument("--runs", type=int, default=1, help="of each [%(default)s]")
    args = parser.parse_args(argv)
    if args.files:
        with needs.packages("own"):  # before all runs
            importlib.import_module("pyppmd")
    for path, seed in product(args.files, range(1, args.runs + 1)):
        try:
            found = run_once(path, seed)
        except RuntimeError as error:
            raise UserError(f"{path}: {error}") from None
        figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
        figures.setdefault(path.stem, []).append(found)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        print(path.stem, found, flush=True)
    draw(FIGURES.with_suffix(".png"))


main = partial(run, "python -m speedrun texts", texts)
