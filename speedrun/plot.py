"""Draw loss against train time."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedrun import records
from speedrun.logs import TRACKS, Log, ToolError, read_json

ANCHOR = "plain GPT"


class Curve(NamedTuple):
    """The mean of runs: time in s and loss, at each step at which all have a loss."""

    name: str
    target: float | None
    steps: list[int]
    seconds: list[float]
    mean: list[float]


def average(name: str, target: float | None, runs: Sequence[dict[int, tuple[float, float]]]) -> Curve:
    """Return the curve of runs, of which each has loss and train time in ms by step."""
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    seconds = [statistics.fmean(run[step][1] for run in runs) / 1000 for step in steps]
    mean = [statistics.fmean(run[step][0] for run in runs) for step in steps]
    return Curve(name, target, steps, seconds, mean)


def curve_of(path: Path) -> Curve:
    """Return the curve of a log or a record. A run of a record for its curve is drawn on the clock of its race."""
    logs = [Log(path)] if path.is_file() else records.read_logs(path)
    name = str(path.with_suffix("")) if path.is_file() else records.short_name(path)
    track = TRACKS.get(logs[0].track or "")
    target = track.target if track and logs[0].val_tokens == track.val_tokens else None
    of_curve = [] if path.is_file() else records.read_logs(path, beside="curve")
    curve = average(name, target, [log.curve for log in of_curve or logs])
    scale = statistics.fmean(log.train_time for log in logs) / 1000 / curve.seconds[-1] if of_curve else 1.0
    return curve._replace(seconds=[seconds * scale for seconds in curve.seconds])


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    """Read the curves of records and logs; without names, of all ranked records and the plain GPT."""
    if names:
        return [curve_of(records.find_record(name, root)) for name in names]
    curves = [curve_of(folder) for folder in records.lineage(root) if records.read_info(folder).ranked]
    for track in TRACKS.values():
        if track.anchor and (path := root / track.anchor).is_file():  # as plain_gpt.py printed it
            plain = {step: (loss, ms) for step, loss, ms in read_json(path)["val_curve"]}
            curves.append(average(ANCHOR, track.target, [plain]))
    return curves


def plot(names: Sequence[str], root: Path, path: Path) -> None:
    """Draw curves as a PNG, which has their numbers as a comment. The plain GPT is grey."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise ToolError(f"{path}: the picture is a PNG; say -o NAME.png")
    curves = curves_of(names, root)
    if not curves:
        raise ToolError("nothing to draw: name records or logs of runs")
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    panel = figure.add_subplot()
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
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    numbers = json.dumps(dict(curves=[curve._asdict() for curve in curves]))
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": numbers})
