"""Draw loss against train time."""

import json
import math
import statistics
import sys
from collections import Counter, namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speedrun.logs import ODD, Log, ToolError, printable, read_json
from speedrun.rules import validation_problem
from speedrun.store import (
    CURVE,
    TRACKS,
    board_of,
    board_order,
    find_record,
    lineage,
    logs_of,
    read_card,
    record_logs,
    short_name,
)

# Target or None; lists over the steps at which all logs have a loss: mean time in s; mean, lowest and highest loss
Curve = namedtuple("Curve", "name track target steps seconds mean low high is_training", defaults=[False])
ANCHOR = "plain GPT"
WIDE = 5  # times of the quickest run, from which on the clock is logarithmic
SMOOTHING = 20  # a point of training losses is the mean over 1/20 of the run, before it


def curve_of(name: str, track: tuple[str, float | None], curves: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Take what track_of returns, and the curves of runs: loss, and train time in ms, by step."""
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    losses = [[curve[step][0] for curve in curves] for step in steps]
    seconds = [statistics.fmean(curve[step][1] for curve in curves) / 1000 for step in steps]
    mean, low, high = ([f(values) for values in losses] for f in (statistics.fmean, min, max))
    return Curve(name, *track, steps, seconds, mean, low, high)


def track_of(log: Log) -> tuple[str, float | None]:
    """Return the leaderboard of a log and its target; other validation tokens are a track of their own, without one."""
    track, board = TRACKS.get(log.track or ""), board_of(log)
    if track is None or validation_problem(log, track) is None:
        return board, track and track.target
    return f"{board}, validation tokens {(log.val_sha256 or 'unknown')[:6]}", None


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of these paths that tell them apart."""
    parts = [path.with_name(path.name.removesuffix(".txt")).absolute().parts for path in paths]
    ends = Counter(part[-n:] for part in {*parts} for n in range(1, len(part)))
    return ["/".join(next(part[-n:] for n in range(1, len(part)) if ends[part[-n:]] == 1)) for part in parts]


def read_result(path: Path) -> Curve:
    """Read what plain_gpt.py printed of its run on the nano track."""
    found = read_json(path)
    try:
        curve = {int(step): (float(loss), float(ms)) for step, loss, ms in found["val_curve"]}
    except ODD:
        raise ToolError(f"{path}: has no val_curve of [step, loss, ms], as plain_gpt.py prints it") from None
    return curve_of(ANCHOR, ("nano", TRACKS["nano"].target), [curve])


def training_curve(log: Log, smoothing: int) -> dict[int, tuple[float, float]]:
    """Return the mean of the last `smoothing` training losses, and train time in ms, by step."""
    import numpy as np

    lines = [line for line in log.training if line.train_loss is not None]
    means = np.convolve(log.train_losses, np.full(smoothing, 1 / smoothing), "valid").tolist() if lines else []
    return {line.step: (mean, line.time) for line, mean in zip(lines[smoothing - 1 :], means, strict=True)}


def curves_of_one(path: Path, label: str, with_training: bool) -> Iterator[Curve]:
    """Yield the curve of a record or log, or that of training losses, too, where there is at most one validation.

    Where a record has logs whose names begin with `curve`, they give its losses, on the clock of its race.
    """
    logs = [Log(path)] if path.is_file() else record_logs(path)
    last = max(log.lines[-1].step for log in logs)
    for log in logs:
        if (step := log.lines[-1].step) < log.num_steps:
            told = f"{log.path}: ends at step {step} of {log.num_steps}{': left out' if step < last else ''}"
            print(printable(told), file=sys.stderr)
    logs = [log for log in logs if log.lines[-1].step == min(last, log.num_steps)]
    often = [] if path.is_file() else logs_of(path, beside=CURVE)  # runs that validated often, at other times
    track, curves = track_of(logs[0]), [log.curve for log in often or logs]
    if all(curves):
        curve = curve_of(label, track, curves)
        if often:
            seconds = statistics.fmean(log.train_time for log in logs) / 1000
            curve = curve._replace(seconds=[x * seconds / curve.seconds[-1] for x in curve.seconds])
        if len(curve.steps) < 2 and not with_training:
            run = f"SCRIPT={path / 'train_gpt.py'} ./run.sh --preset {logs[0].track} --seed 1 --log_dir {path / CURVE}"
            every = max(1, logs[0].num_steps // 8)
            print(printable(f"{label}: no curve, only its end: {run} --val_loss_every {every}"), file=sys.stderr)
        yield curve
    fewest = min(len(log.train_losses) for log in logs)
    if not all(curves) or (with_training and fewest and min(map(len, curves)) < 2):
        curves = [training_curve(log, max(1, fewest // SMOOTHING)) for log in logs]
        yield curve_of(label, track, curves)._replace(is_training=True)


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, the validations of all ranked records.

    Say which cannot be drawn.
    """
    curves, paths, labels = list[Curve](), dict[Path, str](), list[str]()
    for name in names or [str(folder) for folder in lineage(root) if read_card(folder).ranked]:
        try:
            path = Path(name) if Path(name).is_file() else find_record(name, root)
            paths[path] = short_name(path.name) if path.is_dir() else ""
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    labels = labels_of([path.with_name(name) if name else path for path, name in paths.items()]) if paths else []
    for path, label in zip(paths, labels, strict=True):
        try:
            curves += curves_of_one(path, label, bool(names))
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    if not curves:
        raise ToolError("nothing to draw: name records or logs of runs")
    return curves


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return values, in ascending order, of which each is at least `gap` above the one before."""
    found = list[float]()
    for value in values:
        found.append(max(value, found[-1] + gap) if found else value)
    return found


def draw_panel(panel: Any, track: str, mine: Sequence[Curve]) -> None:
    """Draw the curves of one track, each with its name at its end. The plain GPT is grey."""
    from matplotlib import color_sequences

    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)
    known = [color for i, color in enumerate(color_sequences["tab10"]) if i != 7]  # that one is grey
    names = [*dict.fromkeys(curve.name for curve in mine if curve.name != ANCHOR)]
    colors = {name: known[i % len(known)] for i, name in enumerate(names)} | {ANCHOR: "0.5"}
    for curve in mine:
        style = dict(color=colors[curve.name], linestyle="--" if curve.name == ANCHOR else "-")
        width = 0.7 if curve.is_training else 1.4
        panel.plot(curve.seconds, curve.mean, marker="o", markersize=4, markevery=[-1], linewidth=width, **style)
        panel.fill_between(curve.seconds, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
    targets = {curve.target for curve in mine if curve.target}
    # The first fifth of a run, which falls steeply, may leave the picture at the top
    points = [(curve.steps[-1], *point) for curve in mine for point in zip(curve.steps, curve.high, strict=True)]
    high = max([*targets, *(loss for last, step, loss in points if step >= 0.2 * last)])
    low = min([*targets, *(min(curve.low) for curve in mine)])
    height = high - low or 0.05
    low, high = low - 0.05 * height, high + 0.05 * height
    ends = {curve.name: (curve.seconds[-1] or 1.0, curve.mean[-1]) for curve in mine}
    first, last = min(x for x, _ in ends.values()), max(x for x, _ in ends.values())
    text = dict(fontsize=8, parse_math=False)
    if last > WIDE * first:  # the first record takes many times as long as the newest: names stand below the ends
        low -= 0.02 * max(map(len, ends)) * height
        panel.set_xscale("log", nonpositive="mask")
        panel.set_xlim(first / 20, 1.2 * last)
        ordered = sorted(ends, key=lambda name: ends[name][0])
        places = spread([math.log(ends[name][0]) for name in ordered], 0.025 * math.log(24 * last / first))
        for name, x in zip(ordered, places, strict=True):
            arrow = dict(arrowstyle="-", color=colors[name], linewidth=0.6, shrinkB=4)
            at = dict(xytext=(math.exp(x), low), rotation=90, ha="center", va="bottom", arrowprops=arrow)
            panel.annotate(name, ends[name], color=colors[name], **at, **text)
    else:
        panel.set_xlim(0, 1.02 * last)
        ordered = sorted(ends, key=lambda name: ends[name][1])
        places = spread([ends[name][1] for name in ordered], 0.035 * height)
        for name, y in zip(ordered, places, strict=True):
            panel.text(1.01 * last, y, f" {name}", color=colors[name], va="center", **text)
    for target in targets:
        panel.axhline(target, color="0.2", linewidth=0.8)
        at = dict(xycoords=panel.get_yaxis_transform(), ha="left", va="bottom", fontsize=8)
        panel.annotate(f" target {target}", (0, target), **at)
    panel.set_ylim(low, high)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("train time (s)")
    panel.set_ylabel(f"validation loss (nats per {'byte' if track.startswith('nano') else 'token'})")
    thin = f"; thin: training loss, smoothed over 1/{SMOOTHING} of the run"
    thin *= any(curve.is_training for curve in mine)
    panel.set_title(f"{track}: validation loss against train time{thin}", fontsize=10, parse_math=False)


def plot_curves(curves: Sequence[Curve], path: Path) -> Any:
    """Draw loss against train time, one panel for each track, and return the figure.

    The PNG has what it shows in its metadata, so that a stale one can be told.
    """
    from matplotlib.figure import Figure

    tracks = sorted({curve.track for curve in curves}, key=board_order)
    figure = Figure(figsize=(8.4, 5.2 * len(tracks)), layout="constrained")
    for i, track in enumerate(tracks):
        panel = figure.add_subplot(len(tracks), 1, i + 1)
        draw_panel(panel, track, [curve for curve in curves if curve.track == track])
    found = dict(curves=[curve._asdict() for curve in curves])
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": json.dumps(found)})
    return figure
