"""Draw loss against train time, and the line of records."""

import json
import os
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun import TRACKS, records
from speedrun.logs import Log, ToolError, read_json

ANCHOR = "plain GPT"
TITLES = """KellerJordan/modded-nanogpt: 8xH100 80GB
to a loss of 3.28 on FineWeb; published, not measured here
filled: ported, the script is here; hollow: it is not

Ours, the preset nano: 2 CPU cores
to a loss of 1.45 on PyTorch's Python sources; measured here
line broken: times of two races do not compare""".split("\n\n")
LIGHT, DARK = "#1f2328 #fff #0969da #bc4c00", "#e6edf3 #0d1117 #4493f8 #f0883e"  # ink, paper, colors of both


def mean_curve(name: str, target: float | None, runs: Sequence[dict[int, tuple]], last: float = 0) -> dict:
    """Return the mean of runs, of which each has loss and train time in ms by step.

    With `last`, times are scaled so that the last one is that.
    """
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        raise ToolError(f"{name}: no step at which all its logs have a loss; name logs that do")
    losses = [statistics.fmean(run[step][0] for run in runs) for step in steps]
    times = [statistics.fmean(run[step][1] for run in runs) / 1000 for step in steps]
    scale = last / 1000 / times[-1] if last else 1.0
    return dict(name=name, target=target, steps=steps, seconds=[time * scale for time in times], mean=losses)


def read_curves(names: Sequence[str], root: Path) -> Iterator[dict]:
    """Read the curves of records and logs; without names, of all ranked records and the plain GPT."""
    ranked = [] if names else [folder for folder in records.lineage(root) if records.read_info(folder).ranked]
    paths = [records.find_record(name, root) for name in names] + ranked
    shared = os.path.commonpath([str(path.absolute().parent) for path in paths if path.is_file()] or ["/"])
    for path in paths:
        logs = [Log(path)] if path.is_file() else records.read_logs(path)
        name = os.path.relpath(path.with_suffix(""), shared) if path.is_file() else records.short_name(path)
        track = TRACKS.get(logs[0].track or "")
        target = track.target if track and logs[0].val_tokens == track.val_tokens else None
        if path.is_dir() and (more := records.read_logs(path, beside="curve")):  # with more validations than the race
            last = statistics.fmean(log.train_time for log in logs)
            yield mean_curve(name, target, [log.curve for log in more], last)
        else:
            yield mean_curve(name, target, [log.curve for log in logs])
    for track in TRACKS.values():
        if ranked and track.anchor and (path := root / track.anchor).is_file():  # as plain_gpt.py printed it
            plain = {step: (loss, ms) for step, loss, ms in read_json(path)["val_curve"]}
            yield mean_curve(ANCHOR, track.target, [plain])


def plot(names: Sequence[str], root: Path, path: Path) -> None:
    """Draw curves as a PNG, which has their numbers as a comment. The plain GPT is grey."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    colors = color_sequences["tab20"]
    if len(names) > len(colors):
        raise ToolError(f"{len(names)} curves: name {len(colors)} at most, as there are no more colors to tell apart")
    curves = [*read_curves(names, root)]
    labels = [textwrap.fill(curve["name"], 40).replace("$", r"\$") for curve in curves]
    height = max(5.2, 1 + 0.15 * "\n".join(labels).count("\n"))  # so that the legend fits
    figure = Figure(figsize=(8.4, height), layout="constrained")
    panel = figure.add_subplot()
    for i, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        color, line = ("0.5", "--") if curve["name"] == ANCHOR else (colors[i % len(colors)], "-")
        marker = "o" if len(curve["steps"]) == 1 else ""
        panel.plot(curve["seconds"], curve["mean"], line, marker=marker, color=color, label=label)
    targets = {curve["target"] for curve in curves if curve["target"]}
    for target in targets:
        panel.axhline(target, color="0.2", linewidth=0.8, label=f"target {target}")
    # The first fifth of a run, which falls steeply, may leave the picture at the top
    losses = [loss for curve in curves for loss in curve["mean"][len(curve["mean"]) // 5 :]] + [*targets]
    margin = 0.05 * (max(losses) - min(losses)) or 0.05
    panel.set_ylim(min(losses) - margin, max(losses) + margin)
    ends = [curve["seconds"][-1] or 1.0 for curve in curves]
    if max(ends) > 5 * min(ends):  # the first record takes many times as long as the newest
        panel.set_xscale("log", nonpositive="mask")
        panel.set_xlim(min(ends) / 20, 1.2 * max(ends))
        panel.xaxis.set_major_formatter("{x:g}")
    panel.grid(color="0.9", linewidth=0.6)
    panel.set(xlabel="train time (s)", ylabel="validation loss (nats)")
    panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=110, format="png", metadata={"Comment": json.dumps(dict(curves=curves))})


def read_line(root: Path) -> Iterator[list[tuple]]:
    """Yield the public records, then ours, as (name, seconds, whether its script is in the tree, race)."""
    line = {folder: records.read_info(folder) for folder in records.lineage(root)}
    here = {info.evidence for info in line.values()}
    public = [(it["number"], it["name"], it["train_time_s"]) for it in read_json(records.PUBLIC)["records"]]
    yield [(f"{number} {name}", second, f"public record {number}" in here, None) for number, name, second in public]
    ours = [(folder.name.replace("_", " "), records.read_logs(folder)) for folder, info in line.items() if info.ranked]
    means = [statistics.fmean(log.train_time for log in logs) / 1000 for _, logs in ours]
    yield [(name, mean, True, {log.seed for log in logs}) for (name, logs), mean in zip(ours, means, strict=True)]


def plot_line(root: Path, path: Path) -> None:
    """Draw the train times of all records as SVGs: NAME.svg for light pages, NAME-dark.svg for dark ones."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = [*read_line(root)]
    if not all(lines):
        raise ToolError(f"{root}: expected public records, and a ranked one")
    for suffix, ink, paper, *colors in ("", *LIGHT.split()), ("-dark", *DARK.split()):
        style: dict = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "axes.edgecolor"), ink)
        with rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": ""}):  # text stays text
            figure = Figure(figsize=(5, 5.8), layout="constrained")
            panels = figure.subplots(2, gridspec_kw=dict(hspace=0.09))
            for panel, color, title, rows in zip(panels, colors, TITLES, lines, strict=True):
                head, _, text = title.partition("\n")
                panel.set_title(head, loc="left", pad=32, color=color, weight="bold", size=11)
                panel.text(0, 1.03, text, transform=panel.transAxes)
                fastest = min(second for _, second, *_ in rows)
                margin = (rows[0][1] / fastest) ** 0.05
                for i, (name, second, is_here, race) in enumerate(rows):
                    if i and race == rows[i - 1][3]:
                        panel.plot([rows[i - 1][1], second, second], [i - 1, i - 1, i], color=color, zorder=1)
                    panel.plot(second, i, "o", color=color, markerfacecolor=color if is_here else paper)
                    panel.text(second * margin, i, f"{name}: {second:.3g} s", va="center")
                panel.set(xscale="log", xticks=[1, 2, 5, 10, 20, 50, 100, 200], yticks=[], ylim=(len(rows) - 0.3, -0.7))
                panel.set(xlim=(fastest / margin, rows[0][1] * margin**15), xlabel="mean train time, log scale")
                panel.xaxis.set_major_formatter("{x:g} s")
                panel.minorticks_off()
                panel.spines[["left", "right", "top"]].set_visible(False)
            figure.savefig(path.with_name(f"{path.stem}{suffix}.svg"), transparent=True, metadata=dict(Date=None))
