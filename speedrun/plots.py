"""Draw loss against train time."""

import json
import statistics
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedrun import store
from speedrun.logs import Log, ToolError, printable, read_json
from speedrun.rules import validation_problem

# Target or None; lists over the steps at which all logs have a loss: mean time in s; mean, lowest and highest loss
Curve = namedtuple("Curve", "name track target steps seconds mean low high")
ANCHOR = "plain GPT"


def curve_of(name: str, track: tuple[str, float | None], curves: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Average runs. `track` is what track_of returns; curves hold loss and train time in ms by step."""
    steps = sorted(set.intersection(*map(set, curves)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    losses = [[curve[step][0] for curve in curves] for step in steps]
    seconds = [statistics.fmean(curve[step][1] for curve in curves) / 1000 for step in steps]
    mean, low, high = ([f(values) for values in losses] for f in (statistics.fmean, min, max))
    return Curve(name, *track, steps, seconds, mean, low, high)


def track_of(log: Log) -> tuple[str, float | None]:
    """Return the leaderboard of a log and its target; other validation tokens are a track of their own, without one."""
    track, board = store.TRACKS.get(log.track or ""), store.board_of(log)
    if track is None or validation_problem(log, track) is None:
        return board, track.target if track else None
    return f"{board}, validation tokens {(log.val_sha256 or 'unknown')[:6]}", None


def curve_of_runs(path: Path) -> Curve:
    """Return the curve of a log or a record. Runs in a record's folder `curve` give the losses on the race's clock."""
    logs, often = store.record_logs(path), [] if path.is_file() else store.logs_of(path, beside=store.CURVE)
    name = str(path.with_suffix("")) if path.is_file() else store.short_name(path.name)
    curve = curve_of(name, track_of(logs[0]), [log.curve for log in often or logs])
    if often:
        seconds = statistics.fmean(log.train_time for log in logs) / 1000
        curve = curve._replace(seconds=[x * seconds / curve.seconds[-1] for x in curve.seconds])
    if len(curve.steps) < 2 and path.is_dir():
        run = f"SCRIPT={path / store.SCRIPT} ./run.sh --preset {logs[0].track} --seed 1"
        run += f" --log_dir {path / store.CURVE} --val_loss_every {max(1, logs[0].num_steps // 8)}"
        print(printable(f"{curve.name}: no curve, only its end: {run}"), file=sys.stderr)
    return curve


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, of all ranked records and plain GPTs."""
    curves = []
    for name in names or [str(folder) for folder in store.lineage(root) if store.read_card(folder).ranked]:
        try:
            curves.append(curve_of_runs(store.find_record(name, root)))
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    for track in store.TRACKS.values():
        if not names and track.anchor and (path := root / track.anchor).is_file():  # as plain_gpt.py printed it
            curve = {step: (loss, ms) for step, loss, ms in read_json(path)["val_curve"]}
            curves.append(curve_of(ANCHOR, (track.name, track.target), [curve]))
    if curves:
        return curves
    raise ToolError("nothing to draw: name records or logs of runs")


def draw_panel(panel: Any, track: str, mine: Sequence[Curve]) -> None:
    """Draw the curves of one track. The plain GPT is grey."""
    from matplotlib import color_sequences

    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.9", linewidth=0.6)
    for i, curve in enumerate(mine):
        color, line = ("0.5", "--") if curve.name == ANCHOR else (color_sequences["tab20"][i % 20], "-")
        label = curve.name.replace("$", r"\$")
        panel.plot(curve.seconds, curve.mean, line, color=color, label=label, marker="o", markevery=[-1], markersize=4)
        panel.fill_between(curve.seconds, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    targets = {curve.target for curve in mine if curve.target}
    for target in targets:
        panel.axhline(target, color="0.2", linewidth=0.8, label=f"target {target}")
    # The first fifth of a run, which falls steeply, may leave the picture at the top
    points = [(curve.steps[-1], *point) for curve in mine for point in zip(curve.steps, curve.high, strict=True)]
    high = max([*targets, *(loss for last, step, loss in points if step >= 0.2 * last)])
    low = min([*targets, *(min(curve.low) for curve in mine)])
    margin = 0.05 * (high - low) or 0.05
    panel.set_ylim(low - margin, high + margin)
    ends = [curve.seconds[-1] or 1.0 for curve in mine]
    if max(ends) > 5 * min(ends):  # the first record takes many times as long as the newest
        panel.set_xscale("log", nonpositive="mask")
        panel.set_xlim(min(ends) / 20, 1.2 * max(ends))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("train time (s)")
    unit = getattr(store.TRACKS.get(track.split()[0].rstrip(",")), "unit", "token")
    panel.set_ylabel(f"validation loss (nats per {unit})")
    panel.set_title(f"{track}: validation loss against train time", fontsize=10, parse_math=False)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def plot_curves(curves: Sequence[Curve], path: Path) -> Any:
    """Draw one panel for each track, in the format of the path's ending, a PNG with its numbers; return the figure."""
    from matplotlib.figure import Figure

    tracks = sorted({curve.track for curve in curves})
    figure = Figure(figsize=(8.4, 5.2 * len(tracks)), layout="constrained")
    for i, track in enumerate(tracks):
        panel = figure.add_subplot(len(tracks), 1, i + 1)
        draw_panel(panel, track, [curve for curve in curves if curve.track == track])
    kind = path.suffix[1:].lower() or "png"
    numbers = {"Comment": json.dumps(dict(curves=[curve._asdict() for curve in curves]))}
    try:
        figure.savefig(path, dpi=110, format=kind, metadata=numbers if kind == "png" else None)
    except ValueError as error:
        raise ToolError(f"{path}: {error}") from None
    return figure
