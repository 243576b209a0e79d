"""Draw loss against train time, and the history of record times."""

import json
import math
import statistics
import sys
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun.logs import (
    Log,
    ToolError,
    board_of,
    find_record,
    is_ranked,
    lineage,
    log_paths,
    printable,
    read_json,
    record_logs,
)
from speedrun.proof import public_history
from speedrun.publish import ranked
from speedrun.rules import TRACKS, board_order

# Lists over the steps at which all logs have a loss: mean time in s; mean, lowest and highest loss
Curve = namedtuple("Curve", "name track steps seconds mean low high is_training", defaults=[False])
ANCHOR = {"val_curve": [(range(10**9), float, float)]}  # kind of JSON: step, loss, ms
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
    """Read the JSON of a run on the nano track that wrote no log, as benchmarks/anchor_cpu.py prints it."""
    curve = {step: (loss, ms) for step, loss, ms in read_json(path, ANCHOR)["val_curve"]}
    return curve_of(path.stem, "nano", [curve])


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
    for name in names or map(str, filter(is_ranked, lineage(root))):
        try:
            curves += curves_of_one(name, root)
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    if not curves:
        raise ToolError("nothing to draw: name records or logs of runs")
    return curves


def save(figure, path: Path, found: dict) -> None:
    """Write the picture as PNG, with `found`, what it shows, in its metadata, so that a stale one can be told."""
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": json.dumps(found)})


def new_figure(num_panels: int, width: float, height: float):
    """Return a figure and its panels, three in a row, each of so many inches."""
    from matplotlib.figure import Figure

    rows, columns = -(-num_panels // 3), min(num_panels, 3)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(num_panels)]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, panels


def plot_curves(curves: Sequence[Curve], anchor: Curve | None, path: Path) -> None:
    """Draw loss against train time, one panel for each track, the newest curve darkest and the anchor in grey."""
    from matplotlib import colormaps

    tracks = sorted({curve.track for curve in curves}, key=board_order)
    figure, panels = new_figure(len(tracks), 8.4, 5.2)
    for panel, track in zip(panels, tracks, strict=True):
        mine = [curve for curve in curves if curve.track == track]
        names = [*dict.fromkeys(curve.name for curve in mine)]
        colors = {name: colormaps["viridis_r"]((i + 1) / len(names)) for i, name in enumerate(names)}
        styles = [dict(color=colors[curve.name], linewidth=0.7 if curve.is_training else 1.4) for curve in mine]
        if anchor and anchor.track == track:
            mine, styles = [*mine, anchor], [*styles, dict(color="0.5", linewidth=1.4, linestyle="--")]
        for curve, style in zip(mine, styles, strict=True):
            name = (curve.name.partition("_")[2] or curve.name).replace("$", r"\$") + ", training" * curve.is_training
            panel.plot(curve.seconds, curve.mean, marker="o", markersize=4, markevery=[-1], label=name, **style)
            panel.fill_between(curve.seconds, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
        targets = [known.target for known in TRACKS.values() if known.name == track.split()[0]]
        for target in targets:
            panel.axhline(target, color="0.2", linewidth=0.8)
            at, style = dict(xycoords=panel.get_yaxis_transform()), dict(ha="right", va="bottom", fontsize=8)
            panel.annotate(f"target {target} ", (1, target), **at, **style)
        # The first fifth of a run, which falls steeply, may leave the picture at the top
        points = [(curve.steps[-1], *point) for curve in mine for point in zip(curve.steps, curve.high, strict=True)]
        high = max(loss for last, step, loss in points if step >= 0.2 * last)
        low = min([*targets, *(min(curve.low) for curve in mine)])
        height = high - low or 0.05
        panel.set_ylim(low - 0.05 * height, high + 0.05 * height)
        width = max(curve.seconds[-1] for curve in mine) or 1.0
        panel.set_xlim(0, 1.05 * width)
        panel.legend(loc="upper right", fontsize=8, frameon=False)
        panel.set_xlabel("train time (s)")
        panel.set_ylabel(f"validation loss (nats per {'byte' if track == 'nano' else 'token'})")
        thin = f"; thin: training loss, smoothed over 1/{SMOOTHING} of the run"
        thin *= any(curve.is_training for curve in mine)
        panel.set_title(f"{track}: validation loss against train time{thin}", fontsize=10)
    save(figure, path, dict(curves=[curve._asdict() for curve in [*curves, *([anchor] if anchor else [])]]))


def plot_history(root: Path, path: Path) -> None:
    """Draw the train times of the ranked records, in times of the first's, and the public history's."""
    own: dict[str, list[dict]] = {}
    for track, folder, _, _, times in ranked(root):
        own.setdefault(track, []).append(dict(name=folder.name, times=times or math.nan))
    public, name = public_history(), "{date} {name} (#{number})".format
    theirs = [dict(name=name(**record), minutes=record["official_minutes"]) for record in public["records"]]
    rows = max([len(theirs), *(len(records) for records in own.values())])
    figure, panels = new_figure(len(own) + 1, 6.6, 1.8 + 0.4 * rows)
    for panel, (track, records) in zip(panels, own.items(), strict=False):
        draw_bars(panel, [record["name"].replace("_", " ", 1) for record in records], [r["times"] for r in records])
        panel.set_title(f"{track} track, measured here: each raced against the one before", fontsize=10)
        panel.set_xlabel("train time, in times of the first record's")
    draw_bars(panels[-1], [r["name"] for r in theirs], [r["minutes"] for r in theirs])
    panels[-1].set_title(f"{public['credit']} on {public['hardware']},\npublished, not measured here", fontsize=10)
    panels[-1].set_xlabel("official record time (minutes)")
    save(figure, path, dict(own=own, public=theirs))


def draw_bars(panel, names: Sequence[str], values: Sequence[float]) -> None:
    panel.bar_label(panel.barh(names, values, height=0.6, color="#0072B2"), fmt="%.3g", padding=3)
    panel.margins(x=0.15)
    panel.grid(False, axis="y")
    panel.invert_yaxis()
