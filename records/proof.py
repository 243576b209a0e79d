"""Compute from runs whether the target is reached, how many runs that needs, and how wide an interval is."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from records.logs import RECORDS, Log, ToolError, read_json

ALPHA = 0.01  # a record's p has to be below it
POWER = 0.9
MAX_RUNS = 1_000_000
TOLERANCE, AT_THE_END = 0.05, 0.01  # nats that a log may be away from a public curve, and from its last point
PEEKING = (
    "Fix the number of runs before the first one: who looks after each of 3 to 20 runs and stops at the first "
    "p < 0.01 passes about 6% of the time, not 1%, with a script whose true mean is the target itself."
)


@dataclass(frozen=True)
class Sample:
    """n runs; sd is None for one run, p also where there is no target."""

    n: int
    mean: float
    sd: float | None
    p: float | None

    def __str__(self) -> str:
        sd = "" if self.sd is None else f" sd {self.sd:.4f}"
        return f"n={self.n} mean {self.mean:.4f}{sd}"


def p_below(values: Sequence[float], target: float) -> float | None:
    """Return p of the one-sided one-sample t-test for a mean below `target`. None for fewer than two."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0 if values[0] < target else 1.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, target, alternative="less").pvalue)


def describe(values: Sequence[float], target: float | None = None) -> Sample:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Sample(len(values), statistics.fmean(values), sd, None if target is None else p_below(values, target))


def power_below(gap: float, sd: float, n: int) -> float:
    """Return how often the one-sided test passes with n runs, if the true mean is `gap` below the target."""
    from scipy.stats import nct, t

    return float(nct.sf(t.isf(ALPHA, n - 1), n - 1, gap / sd * math.sqrt(n)))


def runs_needed(gap: float, sd: float) -> int | None:
    """Return the smallest number of runs, at least 2, whose test has enough power; None if none up to MAX_RUNS has."""
    if gap <= 0:
        return None
    high = 2
    while sd and power_below(gap, sd, high) < POWER:
        high *= 2
        if high > MAX_RUNS:
            return None
    return bisect_left(range(high), True, lo=max(2, high // 2), key=lambda n: power_below(gap, sd, n) >= POWER)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of a - b, by pairs, and the ends of its 95% t-interval."""
    from scipy.stats import t

    pairs = [x - y for x, y in zip(a, b, strict=True)]
    mean, error = statistics.fmean(a) - statistics.fmean(b), statistics.stdev(pairs) / math.sqrt(len(pairs))
    half = float(t.isf(0.025, len(pairs) - 1)) * error
    return mean, mean - half, mean + half


def compare(a: Sequence, b: Sequence) -> dict:
    """Return ratios of times a / b and the difference of losses a - b, with 95% intervals.

    Runs have seed, val_loss, train_time and step_time, and are paired by seed.
    """
    by_seed = [{run.seed: run for run in runs} for runs in (a, b)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    a, b = ([runs[seed] for seed in seeds] for runs in by_seed)
    found: dict = dict(n=[len(a), len(b)], seeds=seeds)
    for key in ("train_time", "step_time", "val_loss"):
        is_time, values = key != "val_loss", [[getattr(run, key) for run in runs] for runs in (a, b)]
        if is_time and not all(value for side in values for value in side):
            continue  # a log that does not state it
        scaled = [[math.log(value) for value in side] for side in values] if is_time else values
        ends = difference(*scaled)
        mean, low, high = (math.exp(min(x, 700)) if is_time else x for x in ends)
        found[key] = {"ratio" if is_time else "difference": mean, "low": low, "high": high}
        found[key] = {name: round(value, 6) for name, value in found[key].items()}
        found[key]["means"] = [round(statistics.fmean(side), 6) for side in values]
    return found


def told(a: str, b: str, found: dict) -> str:
    """Return a comparison in words."""
    seeds = ", ".join(map(str, found["seeds"]))
    lines = [f"{a} against {b}: n={found['n'][0]} pairs of one seed ({seeds}); 95% intervals"]
    for key, label in (("train_time", "train time"), ("step_time", "median step")):
        if figures := found.get(key):
            means = "{:.2f} and {:.2f} ms".format(*figures["means"])
            lines.append("  {}: {ratio:.4f} ({low:.4f} to {high:.4f}) times, {}".format(label, means, **figures))
    loss = found["val_loss"]
    means = "{:.4f} and {:.4f}".format(*loss["means"])
    lines.append("  val_loss: {difference:+.4f} ({low:+.4f} to {high:+.4f}), {}".format(means, **loss))
    return "\n".join(lines)


def public_history() -> dict:
    """Read records/public.json, the public speedrun's history and curves, which were not measured here."""
    return read_json(RECORDS / "public.json")


def against_public(log: Log, name: str) -> dict:
    """Hold the validations of a gpt2 log against the curve of a public record, such as "record21"."""
    curves = {f"record{record['number']}": record["curve"] for record in public_history()["records"]}
    if name not in curves:
        raise ToolError(f"no public curve {name!r}; choose one of {', '.join(curves)}")
    if log.track != "gpt2":
        raise ToolError(f"{log.path}: a log of the {log.track} track; the public curves are of gpt2")
    points = [(int(step), loss) for step, loss in curves[name].items()]
    common = [(step, log.curve[step][0], loss) for step, loss in points if step in log.curve]
    if not common:
        raise ToolError(f"{log.path}: no validation at a step of the curve; run it with --val_loss_every 125")
    allowed = {points[-1][0]: AT_THE_END}
    off = next((point for point in common if abs(point[1] - point[2]) > allowed.get(point[0], TOLERANCE)), None)
    deviation = None if off is None else dict(zip(("step", "loss", "curve"), off, strict=True))
    found = dict(log=str(log.path), curve=name, compared=len(common), lacking=len(points) - len(common))
    return found | dict(first=deviation, ends=points[-1][0] in log.curve)
