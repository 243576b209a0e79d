"""Draw loss against train time."""

import json
import statistics
import sys
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speedrun import logs
from speedrun.logs import Log, ToolError, board_of, find_record, log_paths, printable, record_logs
from speedrun.rules import TRACKS, board_order

# Lists over the steps at which all logs have a loss: mean time in s; mean, lowest and highest loss
Curve = namedtuple("Curve", "name track steps seconds mean low high is_training", defaults=[False])
SMOOTHING = 20  # a point of training losses is the mean over 1/20 of the run, before it


def curve_of(name: str, track: str, curves: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Take the curves of runs: loss, and train time in ms, by step."""
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    losses = [[curve[step][0] for curve in curves] for step in steps]
    seconds = [statistics.fmean(curve[step][1] for curve in curves) / 1000 for step in steps]
    mean, low, high = ([f(values) for values in losses] for f in (statistics.fmean, min, max))
    return Curve(name, track, steps, seconds, mean, low, high)


def read_result(path: Path) -> Curve:
    """Read what plain_gpt.py printed of its run on the nano track."""
    found = logs.read_json(path)
    try:
        curve = {int(step): (float(loss), float(ms)) for step, loss, ms in found["val_curve"]}
    except logs.ODD:
        raise ToolError(f"{path}: has no val_curve of [step, loss, ms], as plain_gpt.py prints it") from None
    return curve_of("plain GPT", "nano", [curve])


def training_curve(log: Log, smoothing: int) -> dict[int, tuple[float, float]]:
    """Return the mean of the last `smoothing` training losses, and train time in ms, by step."""
    import numpy as np

    lines = [line for line in log.training if line.train_loss is not None]
    means = np.convolve(log.train_losses, np.full(smoothing, 1 / smoothing), "valid").tolist() if lines else []
    return {line.step: (mean, line.time) for line, mean in zip(lines[smoothing - 1 :], means, strict=True)}


def curves_of_one(name: str, root: Path) -> Iterator[Curve]:
    """Yield the curve of a record or log, and that of training losses where there is at most one validation.

    Where a record has logs in a folder `curve`, they give its losses, on the clock of its race.
    """
    path = Path(name)
    logs = [Log(path)] if path.is_file() else record_logs(path := find_record(name, root))
    last = max(log.lines[-1].step for log in logs)
    for log in logs:
        if (step := log.lines[-1].step) < log.num_steps:
            told = f"{log.path}: ends at step {step} of {log.num_steps}{': left out' if step < last else ''}"
            print(printable(told), file=sys.stderr)
    logs = [log for log in logs if log.lines[-1].step == min(last, log.num_steps)]
    often = [Log(log) for log in log_paths(path / "curve")]  # runs that validated often, at other times
    label, curves = path.name.removesuffix(".txt"), [log.curve for log in often or logs]
    if all(curves):
        curve = curve_of(label, board_of(logs[0]), curves)
        if often:
            seconds = statistics.fmean(log.train_time for log in logs) / 1000
            curve = curve._replace(seconds=[x * seconds / curve.seconds[-1] for x in curve.seconds])
        yield curve
    fewest = min(len(log.train_losses) for log in logs)
    if not all(curves) or (fewest and min(map(len, curves)) < 2):
        curves = [training_curve(log, max(1, fewest // SMOOTHING)) for log in logs]
        yield curve_of(label, board_of(logs[0]), curves)._replace(is_training=True)


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, of all ranked records. Say which cannot be drawn."""
    curves = list[Curve]()
    for name in names or [str(folder) for folder in logs.lineage(root) if logs.read_card(folder).ranked]:
        try:
            curves += curves_of_one(name, root)
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    if not curves:
        raise ToolError("nothing to draw: name records or logs of runs")
    return curves


def plot_curves(curves: Sequence[Curve], anchor: Curve | None, path: Path) -> None:
    """Draw loss against train time, one panel for each track, the newest curve darkest and the anchor in grey.

    The PNG has what it shows in its metadata, so that a stale one can be told.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    tracks = sorted({curve.track for curve in curves}, key=board_order)
    figure = Figure(figsize=(8.4, 5.2 * len(tracks)), layout="constrained")
    for i, track in enumerate(tracks):
        panel = figure.add_subplot(len(tracks), 1, i + 1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
        mine = [curve for curve in curves if curve.track == track]
        names = [*dict.fromkeys(curve.name for curve in mine)]
        colors = {name: colormaps["viridis_r"]((i + 1) / len(names)) for i, name in enumerate(names)}
        styles: list[dict[str, Any]] = [
            dict(color=colors[curve.name], linewidth=0.7 if curve.is_training else 1.4) for curve in mine
        ]
        if anchor and anchor.track == track:
            mine, styles = [*mine, anchor], [*styles, dict(color="0.5", linewidth=1.4, linestyle="--")]
        for curve, style in zip(mine, styles, strict=True):
            name = (curve.name.partition("_")[2] or curve.name).replace("$", r"\$") + ", training" * curve.is_training
            panel.plot(curve.seconds, curve.mean, marker="o", markersize=4, markevery=[-1], label=name, **style)
            panel.fill_between(curve.seconds, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
        targets = [known.target for known in TRACKS.values() if known.name == track.split()[0]]
        for target in targets:
            panel.axhline(target, color="0.2", linewidth=0.8)
            at = dict(xycoords=panel.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
            panel.annotate(f"target {target} ", (1, target), **at)  # type: ignore[arg-type]
        # The first fifth of a run, which falls steeply, may leave the picture at the top
        points = [(curve.steps[-1], *point) for curve in mine for point in zip(curve.steps, curve.high, strict=True)]
        high = max(loss for last, step, loss in points if step >= 0.2 * last)
        low = min([*targets, *(min(curve.low) for curve in mine)])
        height = high - low or 0.05
        panel.set_ylim(low - 0.05 * height, high + 0.05 * height)
        ends = [curve.seconds[-1] or 1.0 for curve in mine]
        panel.set_xscale("log", nonpositive="mask")  # the first record takes many times as long as the newest
        panel.set_xlim(min(ends) / 20, 1.2 * max(ends))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(loc="lower left", fontsize=8, framealpha=1, edgecolor="none")
        panel.set_xlabel("train time (s)")
        panel.set_ylabel(f"validation loss (nats per {'byte' if track == 'nano' else 'token'})")
        thin = f"; thin: training loss, smoothed over 1/{SMOOTHING} of the run"
        thin *= any(curve.is_training for curve in mine)
        panel.set_title(f"{track}: validation loss against train time{thin}", fontsize=10)
    found = dict(curves=[curve._asdict() for curve in [*curves, *([anchor] if anchor else [])]])
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": json.dumps(found)})
