"""Figures: validation curves, and the history of record times."""

import json
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


def save(figure, path: Path, found: dict) -> None:
    """Write the picture; a PNG carries `found`, what it shows, in its metadata, so that a stale one can be told."""
    try:
        comment = dict(metadata={"Comment": json.dumps(found)}) if path.suffix == ".png" else {}
        figure.savefig(path, dpi=110, **comment)
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


def plot_curves(curves: Sequence[Curve], path: Path) -> dict:
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
    found = dict(curves=[vars(curve) for curve in curves])
    save(figure, path, found)
    return found


def settings_of_a_step(log: Log) -> dict:
    free = ("seed", "num_iterations", "run_id", "log_dir")
    return {name: value for name, value in (log.configuration or {}).items() if name not in free}


def step_times(folder: Path, logs: Sequence[Log]) -> dict[tuple[str | None, int | None], float]:
    """The median step in ms of a record's runs, by hardware and seed; those in its subfolders may be longer or shorter.

    A median that the log does not state is taken from its step lines.
    """
    more = [read_log(path) for path in sorted(folder.glob("*/*.txt"))]
    runs = [*[log for log in more if settings_of_a_step(log) == settings_of_a_step(logs[0])], *logs]
    return {(r.hardware, r.seed): r.stated_step_time or r.step_time or r.train_time / r.num_steps for r in runs}


def own_history(root: Path) -> dict[str, list[dict]]:
    """Per track the records with logs, oldest first: their steps, and how long these take in s.

    Times compare only where scripts took turns on one machine, which runs of the same seeds on the same hardware are
    taken for. So a step's time is the mean over the runs that a record has in common with the ones before, and these
    are one `series`; a record that has none in common begins another.
    """
    history: dict[str, list[dict]] = {}
    common: dict[str, set[tuple[str | None, int | None]]] = {}
    for folder in record_folders(root):
        if not log_paths(folder):
            continue
        logs = record_logs(folder)
        require_one_experiment(logs)
        track, steps, times = logs[0].track or "unknown", logs[0].num_steps, step_times(folder, logs)
        records = history.setdefault(track, [])
        shared = common.get(track, set()) & set(times)
        series = records[-1]["series"] + (not shared) if records else 1
        common[track] = shared or set(times)
        step_ms = statistics.fmean(times[run] for run in common[track])
        seeds = sorted(seed for _, seed in common[track] if seed is not None)
        records.append(
            dict(name=folder.name, steps=steps, step_ms=step_ms, seconds=steps * step_ms / 1000)
            | dict(series=series, seeds=seeds)
        )
    return history


def plot_history(root: Path, path: Path) -> dict:
    own = own_history(root)
    public = public_history()
    theirs = [
        dict(name=f"{r['date']} {r['name']} (#{r['number']})", minutes=r["official_minutes"]) for r in public["records"]
    ]
    rows = max([len(theirs), *(len(records) for records in own.values())])
    figure, panels = new_figure(len(own) + 1, 6.6, 1.8 + 0.4 * rows)
    for panel, (track, records) in zip(panels, own.items(), strict=False):
        draw_bars(panel, [r["name"].replace("_", " ", 1) for r in records], [r["seconds"] for r in records])
        for bar, record in zip(panel.patches, records, strict=True):
            bar.set_color(COLOURS[(record["series"] - 1) % len(COLOURS)])
        note = "bars of one colour were timed in turn, others do not compare" if records[-1]["series"] > 1 else ""
        panel.set_title(f"{track} track, measured here\n{note}".strip(), fontsize=10)
        panel.set_xlabel("time to the target (s): steps times median step")
    draw_bars(panels[-1], [r["name"] for r in theirs], [r["minutes"] for r in theirs])
    panels[-1].set_title(f"{public['credit']} on {public['hardware']},\npublished, not measured here", fontsize=10)
    panels[-1].set_xlabel("official record time (minutes)")
    figure.suptitle("History of record times")
    found = dict(own=own, public=theirs)
    save(figure, path, found)
    return found


def draw_bars(panel, names: Sequence[str], values: Sequence[float]) -> None:
    panel.bar_label(panel.barh(names, values, height=0.6, color="0.6"), fmt="%.2f", padding=3)
    panel.margins(x=0.15)
    panel.grid(False, axis="y")
    panel.invert_yaxis()
