"""Draw loss against train time."""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speedrun import records
from speedrun.logs import TRACKS, ToolError, read_json
from speedrun.process import printable

ANCHOR = "plain GPT"


class Curve(NamedTuple):
    """The mean of runs: time in s and loss, at each step at which all have a loss."""

    name: str
    board: str
    target: float | None
    steps: list[int]
    seconds: list[float]
    mean: list[float]


def average(name: str, board: str, target: float | None, runs: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Return the curve of runs, of which each has loss and train time in ms by step."""
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    seconds = [statistics.fmean(run[step][1] for run in runs) / 1000 for step in steps]
    return Curve(
        name, board, target, steps, seconds, [statistics.fmean(run[step][0] for run in runs) for step in steps]
    )


def curve_of(path: Path) -> Curve:
    """Return the curve of a log or a record. Runs in a record's folder `curve` give the losses on the race's clock."""
    logs = records.record_logs(path)
    often = [] if path.is_file() else [*records.read_logs(path, beside="curve")]
    name = str(path.with_suffix("")) if path.is_file() else records.short_name(path.name)
    track = TRACKS.get(logs[0].track or "")
    target = track.target if track and not records.validation_problem(logs[0], track) else None
    curve = average(name, records.board_of(logs[0]), target, [log.curve for log in often or logs])
    if often:
        scale = statistics.fmean(log.train_time for log in logs) / 1000 / curve.seconds[-1]
        curve = curve._replace(seconds=[seconds * scale for seconds in curve.seconds])
    return curve


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, of all ranked records and plain GPTs."""
    paths = [records.find_record(name, root) for name in names]
    curves = []
    for path in paths or [folder for folder in records.lineage(root) if records.read_info(folder).ranked]:
        try:
            curves.append(curve_of(path))
        except ToolError as error:
            print(printable(f"left out: {error}"), file=sys.stderr)
    for track in TRACKS.values():
        if not names and track.anchor and (path := root / track.anchor).is_file():  # as plain_gpt.py printed it
            curve = {step: (loss, ms) for step, loss, ms in read_json(path)["val_curve"]}
            curves.append(average(ANCHOR, track.name, track.target, [curve]))
    if curves:
        return curves
    raise ToolError("nothing to draw: name records or logs of runs")


def draw_panel(panel: Any, board: str, curves: Sequence[Curve]) -> None:
    """Draw the curves of one leaderboard. The plain GPT is grey."""
    from matplotlib import color_sequences

    for i, curve in enumerate(curves):
        color, line = ("0.5", "--") if curve.name == ANCHOR else (color_sequences["tab20"][i % 20], "-")
        label = curve.name.replace("$", r"\$")
        panel.plot(curve.seconds, curve.mean, line, color=color, label=label, marker="o", markevery=[-1], markersize=4)
    targets = {curve.target for curve in curves if curve.target}
    for target in targets:
        panel.axhline(target, color="0.2", linewidth=0.8, label=f"target {target}")
    # The first fifth of a run, which falls steeply, may leave the picture at the top
    late = [loss for it in curves for step, loss in zip(it.steps, it.mean, strict=True) if step >= 0.2 * it.steps[-1]]
    margin = 0.05 * (max([*targets, *late]) - min([*targets, *late])) or 0.05
    panel.set_ylim(min([*targets, *late]) - margin, max([*targets, *late]) + margin)
    ends = [curve.seconds[-1] or 1.0 for curve in curves]
    if max(ends) > 5 * min(ends):  # the first record takes many times as long as the newest
        panel.set_xscale("log", nonpositive="mask")
        panel.set_xlim(min(ends) / 20, 1.2 * max(ends))
        panel.xaxis.set_major_formatter("{x:g}")
    panel.grid(color="0.9", linewidth=0.6)
    panel.set(xlabel="train time (s)", ylabel="validation loss (nats)")
    panel.set_title(f"{board}: validation loss against train time", fontsize=10, parse_math=False)
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def plot(names: Sequence[str], root: Path, path: Path) -> None:
    """Draw one panel for each leaderboard as a PNG, which has its numbers as a comment."""
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise ToolError(f"{path}: the picture is a PNG; say -o NAME.png")
    if path.exists() and any(path.samefile(records.find_record(name, root)) for name in names):
        raise ToolError(f"{path} is one of the logs: choose another -o")
    curves = curves_of(names, root)
    boards = sorted({curve.board for curve in curves})
    figure = Figure(figsize=(8.4, 5.2 * len(boards)), layout="constrained")
    for i, board in enumerate(boards, start=1):
        panel = figure.add_subplot(len(boards), 1, i)
        draw_panel(panel, board, [curve for curve in curves if curve.board == board])
    numbers = json.dumps(dict(curves=[curve._asdict() for curve in curves]))
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": numbers})
