"""Draw loss against train time, and the history of record times."""

import json
import math
import statistics
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

from records.logs import Log, ToolError, board_of, find_record, is_ranked, lineage, log_paths, read_json, record_logs
from records.proof import public_history
from records.publish import ranked
from records.rules import TRACKS, board_order

# Lists over the steps at which all logs validate: mean time in s; mean, lowest and highest loss
Curve = namedtuple("Curve", "name track steps seconds mean low high")


def curve_of(name: str, track: str, curves: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Take the curves of runs: loss, and train time in ms, by step."""
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs validate; name logs that do")
    losses = [[curve[step][0] for curve in curves] for step in steps]
    seconds = [statistics.fmean(curve[step][1] for curve in curves) / 1000 for step in steps]
    mean, low, high = ([f(values) for values in losses] for f in (statistics.fmean, min, max))
    return Curve(name, track, steps, seconds, mean, low, high)


def read_result(path: Path) -> Curve:
    """Read the JSON of a run on the nano track that wrote no log, as benchmarks/anchor_cpu.py prints it."""
    curve = {step: (loss, ms) for step, loss, ms in read_json(path)["val_curve"]}
    return curve_of(path.stem, "nano", [curve])


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, of all ranked records.

    Where a record has logs in a folder `curve`, they give its losses, on the clock of its race.
    """
    curves = []
    for name in names or map(str, filter(is_ranked, lineage(root))):
        path = Path(name)
        logs = [Log(path)] if path.is_file() else record_logs(path := find_record(name, root))
        often = [Log(log) for log in log_paths(path / "curve")]  # runs that validated often, at other times
        curve = curve_of(path.name.removesuffix(".txt"), board_of(logs[0]), [log.curve for log in often or logs])
        if often:
            seconds = statistics.fmean(log.train_time for log in logs) / 1000
            curve = curve._replace(seconds=[x * seconds / curve.seconds[-1] for x in curve.seconds])
        curves.append(curve)
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
        styles = [dict(color=colormaps["viridis_r"]((i + 1) / len(mine)), linewidth=1.4) for i in range(len(mine))]
        if anchor and anchor.track == track:
            mine, styles = [*mine, anchor], [*styles, dict(color="0.5", linewidth=1.4, linestyle="--")]
        for curve, style in zip(mine, styles, strict=True):
            panel.plot(curve.seconds, curve.mean, marker="o", markersize=4, markevery=[-1], **style)
            panel.fill_between(curve.seconds, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
        target = TRACKS[track.split()[0]].target
        panel.axhline(target, color="0.2", linewidth=0.8, linestyle=":")
        # The first fifth of a run, which falls steeply, may leave the picture at the top
        points = [(curve.steps[-1], *point) for curve in mine for point in zip(curve.steps, curve.high, strict=True)]
        high = max(loss for last, step, loss in points if step >= 0.2 * last)
        low = min([target, *(min(curve.low) for curve in mine)])
        height = high - low or 0.05
        panel.set_ylim(low - 0.3 * height, high + 0.05 * height)  # below the ends there is room for the names
        width = max(curve.seconds[-1] for curve in mine) or 1.0
        panel.set_xlim(0, 1.05 * width)
        panel.annotate(f"target {target} ", (1.05 * width, target), ha="right", va="bottom", fontsize=8, color="0.2")
        name_ends(panel, mine, [style["color"] for style in styles], low - 0.08 * height, 0.022 * width)
        panel.set_xlabel("train time (s)")
        panel.set_ylabel(f"validation loss (nats per {'byte' if track == 'nano' else 'token'})")
        panel.set_title(f"{track}: validation loss against train time, as far as the target", fontsize=10)
    save(figure, path, dict(curves=[curve._asdict() for curve in [*curves, *([anchor] if anchor else [])]]))


def name_ends(panel, curves: Sequence[Curve], colors: Sequence, y: float, distance: float) -> None:
    """Write the name of each curve below its end, at least `distance` right of the name before."""
    x = -math.inf
    for curve, color in sorted(zip(curves, colors, strict=True), key=lambda pair: pair[0].seconds[-1]):
        x = max(x + distance, curve.seconds[-1])
        style = dict(rotation=40, ha="right", va="top", rotation_mode="anchor", fontsize=8, color=color)
        name = curve.name.partition("_")[2] or curve.name
        line = dict(arrowstyle="-", linewidth=0.6, color=color)
        panel.annotate(name, (curve.seconds[-1], curve.mean[-1]), (x, y), arrowprops=line, **style)


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
