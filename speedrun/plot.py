"""Draw loss against train time."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun import records
from speedrun.logs import TRACKS, Log, ToolError, read_json

ANCHOR = "plain GPT"


def mean_curve(
    name: str, target: float | None, runs: Sequence[dict[int, tuple[float, float]]], last: float = 0
) -> dict:
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
    for path in [records.find_record(name, root) for name in names] + ranked:
        logs = [Log(path)] if path.is_file() else records.read_logs(path)
        name = str(path.with_suffix("")) if path.is_file() else records.short_name(path)
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

    if path.suffix.lower() != ".png":
        raise ToolError(f"{path}: the picture is a PNG; say -o NAME.png")
    curves = [*read_curves(names, root)]
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    panel = figure.add_subplot()
    for i, curve in enumerate(curves):
        color, line = ("0.5", "--") if curve["name"] == ANCHOR else (color_sequences["tab20"][i % 20], "-")
        panel.plot(curve["seconds"], curve["mean"], line, color=color, label=curve["name"].replace("$", r"\$"))
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
