"""Figures: validation curves, and the history of record times."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from records.logs import (
    RECORD_FOLDER,
    Log,
    ToolError,
    find_record,
    log_paths,
    read_log,
    record_folders,
    record_logs,
    require_one_experiment,
)
from records.proof import public_history

# Okabe and Ito's colours, told apart by colour-blind people too; with them markers, for print without colours
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"


@dataclass(frozen=True)
class Curve:
    """Over the steps that all logs validate at: mean time in s, and mean, lowest and highest loss."""

    name: str
    steps: list[int]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def late(self) -> list[int]:
        """Indices of the points after the first fifth of the steps, which the loss axis shows whole."""
        return [i for i, step in enumerate(self.steps) if step >= 0.2 * self.steps[-1]]


def curve_of(name: str, logs: Sequence[Log]) -> Curve:
    steps = sorted(set.intersection(*(set(log.curve) for log in logs)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs validate; name logs that do")
    losses = [[log.curve[step][0] for log in logs] for step in steps]
    seconds = [statistics.fmean(log.curve[step][1] for log in logs) / 1000 for step in steps]
    mean, low, high = ([f(values) for values in losses] for f in (statistics.fmean, min, max))
    return Curve(name, steps, seconds, mean, low, high)


def curves_of(names: Sequence[str], root: Path) -> list[Curve]:
    curves = []
    for name in names:
        if Path(name).is_file():
            curves.append(curve_of(Path(name).stem, [read_log(Path(name))]))
        else:
            folder = find_record(name, root)
            parent = folder.resolve().parent.name
            label = f"{parent}/{folder.name}" if RECORD_FOLDER.fullmatch(parent) else folder.name
            curves.append(curve_of(label, record_logs(folder)))
    return curves


def save(figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ToolError(f"{path}: {reason}; choose another -o FILE.png") from None


def new_figure(num_panels: int, width: float, height: float, **settings):
    """`width` inches per panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * num_panels, height), layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False, **settings)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, panels


def plot_curves(curves: Sequence[Curve], path: Path) -> None:
    figure, panels = new_figure(2, 5.4, 4.8, sharey=True)
    for i, curve in enumerate(curves):
        style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.4)
        for panel, x in zip(panels, (curve.steps, curve.seconds), strict=True):
            panel.plot(x, curve.mean, label=curve.name, **style)
            panel.fill_between(x, curve.low, curve.high, color=style["color"], alpha=0.2, linewidth=0)
    low = min(curve.low[i] for curve in curves for i in curve.late)
    high = max(curve.high[i] for curve in curves for i in curve.late)
    margin = 0.06 * (high - low) or 0.05
    panels[0].set_ylim(low - margin, high + margin)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].set_xlabel("step")
    panels[1].set_xlabel("train time (s)")
    for panel, x in zip(panels, ("steps", "seconds"), strict=True):
        panel.set_xlim(left=0.95 * min(getattr(curve, x)[curve.late[0]] for curve in curves))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
    figure.suptitle("Validation loss: mean of the runs, band from lowest to highest")
    save(figure, path)


def own_history(root: Path) -> dict[str, list[dict]]:
    """Per track the records with logs, oldest first: name and mean train time in s."""
    history: dict[str, list[dict]] = {}
    for folder in record_folders(root):
        if log_paths(folder):
            logs = record_logs(folder)
            require_one_experiment(logs)
            seconds = statistics.fmean(log.train_time for log in logs) / 1000
            history.setdefault(logs[0].track or "unknown", []).append(dict(name=folder.name, seconds=seconds))
    return history


def plot_history(root: Path, path: Path) -> dict:
    own = own_history(root)
    public = public_history()
    theirs = [
        dict(name=f"{r['date']} {r['name']} (#{r['number']})", minutes=r["official_minutes"]) for r in public["records"]
    ]
    rows = max([len(theirs), *(len(records) for records in own.values())])
    figure, panels = new_figure(len(own) + 1, 6.6, 1.6 + 0.4 * rows)
    titles = [f"{track} track, measured here" for track in own]
    columns = [
        ([r["name"].replace("_", " ", 1) for r in records], [r["seconds"] for r in records]) for records in own.values()
    ]
    titles.append(f"{public['credit']} on {public['hardware']},\npublished, not measured here")
    columns.append(([r["name"] for r in theirs], [r["minutes"] for r in theirs]))
    for i, (panel, title, (names, values)) in enumerate(zip(panels, titles, columns, strict=True)):
        is_public = i == len(own)
        bars = panel.barh(names, values, height=0.6, color="0.6" if is_public else COLOURS[i % len(COLOURS)])
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.margins(x=0.15)
        panel.grid(False, axis="y")
        panel.invert_yaxis()
        panel.set_xlabel("official record time (minutes)" if is_public else "mean train time (s)")
        panel.set_title(title, fontsize=10)
    figure.suptitle("History of record times")
    save(figure, path)
    return dict(own=own, public=theirs)
