"""Compute from runs whether the target is reached, how many runs that needs, and how wide an interval is."""

import dataclasses
import json
import math
import os
import statistics
import string
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from speedrun.logs import ODD, Log, ToolError, read_json, shown
from speedrun.store import RECORDS, TRACKS

ALPHA = 0.01  # a record's p has to be below it
MIN_PAIRS = 5  # of a race that decides; fewer are a screen
MAX_SCRIPTS = 26  # of a race, a letter each
# Races before that day asked of the loss that the lower end of its interval is low enough, and their runs do not say
# which of how many rounds they are
OLD_RACES = "2026-11-27"
FASTER = (
    "A script is faster if the 95% interval of the ratio of train times lies below 1, and that of the difference of "
    f"losses ends at {TRACKS['gpt2'].slack:g} or below (nano: {TRACKS['nano'].slack:g})."
)
POWER = 0.9
MAX_RUNS = 1_000
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


def describe(values: Sequence[float], target: float | None = None) -> Sample:
    """Summarize runs; p is that of the one-sided t-test for a mean below `target`."""
    sd, p = statistics.stdev(values) if len(values) > 1 else None, None
    if sd is not None and target is not None:
        from scipy.stats import ttest_1samp

        p = float(ttest_1samp(values, target, alternative="less").pvalue)
    return Sample(len(values), statistics.fmean(values), sd, p)


def runs_needed(gap: float, sd: float, alpha: float = ALPHA) -> str:
    """Return the smallest number of runs whose one-sided test has enough power if the mean is `gap` below."""
    from scipy.stats import nct, t

    for n in range(2, MAX_RUNS + 1):
        if gap > 0 and (sd == 0 or nct.sf(t.isf(alpha, n - 1), n - 1, gap / sd * math.sqrt(n)) >= POWER):
            return str(n)
    return f"more than {MAX_RUNS}"


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of a - b, by pairs, and if there are several the ends of its 95% t-interval."""
    from scipy.stats import ttest_rel

    mean = statistics.fmean(a) - statistics.fmean(b)
    with warnings.catch_warnings(action="ignore"):  # of pairs that hardly differ
        return (mean, *map(float, ttest_rel(a, b).confidence_interval())) if len(a) > 1 else (mean,)


def compare(a: Sequence, b: Sequence, slack: float, end: str = "high") -> dict:
    """Return ratios of times a / b and the difference of losses a - b, with 95% intervals, and the verdict.

    Runs have seed, val_loss, train_time and step_time, and are paired by seed; without a pair there is nothing. This
    end of the interval of the losses may be `slack` at most.
    """
    by_seed = [{run.seed: run for run in runs} for runs in (a, b)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return {}
    a, b = ([runs[seed] for seed in seeds] for runs in by_seed)
    found: dict = dict(n=[len(a), len(b)], seeds=seeds)
    for key in ("train_time", "step_time", "val_loss"):
        values = [[getattr(run, key) for run in runs] for runs in (a, b)]
        if any(value is None for side in values for value in side):
            continue  # a run that does not state it
        if key == "val_loss":
            ends = dict(zip(("difference", "low", "high"), difference(*values), strict=False))
        else:
            scaled = difference(*([math.log(value) for value in side] for side in values))
            ends = dict(zip(("ratio", "low", "high"), map(math.exp, scaled), strict=False))
        means = [round(statistics.fmean(side), 6) for side in values]
        found[key] = {name: round(value, 6) for name, value in ends.items()} | dict(means=means)
    return found | verdict(found, slack, end)


def interval(figures: dict, form: str) -> str:
    """Return a difference or a ratio with its interval, if it has one."""
    value = format(figures.get("difference", figures.get("ratio")), form)
    return f"{value} ({figures['low']:{form}} to {figures['high']:{form}})" if "low" in figures else value


def verdict(found: dict, slack: float, end: str) -> dict[str, str]:
    """Return what a comparison says of its first script, "faster" as in FASTER, and what to do next."""
    from scipy.stats import t

    n, times, losses = found["n"][0], found["train_time"], found["val_loss"]
    again = "race again with fresh seeds"
    decide = f"to decide, {again} and --pairs {MIN_PAIRS} or more"
    if n == 1:
        return dict(verdict="screen of 1 pair: no interval", advice=decide)
    advice = ""
    if times["high"] < 1 and losses[end] <= slack:
        said = "faster"
    elif times["high"] < 1:
        alike = "take more steps, until both end alike" if losses["low"] > 0 else "take more pairs, or more steps"
        said, advice = "faster at a loss that may be too high", f"{alike}, and {again}"
    elif times["low"] > 1:
        said = "slower"
    else:
        low, middle, high = (math.log(times[key]) for key in ("low", "ratio", "high"))
        sd = (high - low) / 2 / float(t.isf(0.025, n - 1)) * math.sqrt(n)
        needed = runs_needed(abs(middle), sd, 0.025)
        said, advice = f"undecided, would take about {needed} pairs", f"{again} and as many --pairs, or leave it"
    if said != "faster" and losses["high"] < 0:
        advice = f"its loss is lower: take fewer steps, until both end alike, and {again}"
    if n < MIN_PAIRS:
        said, advice = f"screen of {n} pairs: {said}", decide
    return dict(verdict=said, advice=advice)


def standing(found: dict) -> str:
    """Return the verdict on a comparison with its figures, in one line."""
    time, loss = interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
    return f"{found['verdict']}: train time {time}, loss {loss}" + f"; {found['advice']}" * bool(found["advice"])


def told(a: str, b: str, found: dict) -> str:
    """Return a comparison and its verdict in words."""
    seeds = ", ".join(map(str, found["seeds"]))
    lines = [f"{a} against {b}: n={found['n'][0]} pairs of one seed ({seeds}); 95% intervals"]
    for key, label in (("train_time", "train time"), ("step_time", "median step")):
        if figures := found.get(key):
            means = "{:.2f} and {:.2f} ms".format(*figures["means"])
            lines.append(f"  {label}: {interval(figures, '.4f')} times, {means}")
    loss = found["val_loss"]
    lines.append("  val_loss: {}, {:.4f} and {:.4f}".format(interval(loss, "+.4f"), *loss["means"]))
    lines.append("  verdict: " + "; ".join(filter(None, (found["verdict"], found["advice"]))))
    return "\n".join(lines)


@dataclass(frozen=True)
class Run:
    """Hold a run of the script of this index; times in ms, the step time is the median of the step lines."""

    script: int
    seed: int
    val_loss: float
    train_time: float
    step_time: float | None = None
    val_sha256: str | None = None
    hardware: str | None = None

    def __post_init__(self):
        if not all(
            0 < number < 1e15
            for number in (self.val_loss, self.train_time, 1 if self.step_time is None else self.step_time)
        ):
            raise ValueError(f"val_loss {self.val_loss}, train_time {self.train_time}: expected numbers above 0")


@dataclass(frozen=True)
class Script:
    name: str
    sha256: str
    flags: list[str] = field(default_factory=list)  # that it has alone


@dataclass
class Race:
    """Hold what race.json does. The fields before `note` are its plan, which stays."""

    scripts: list[Script]
    flags: list[str]
    pairs: int
    seed: int
    nproc_per_node: int
    note: str = ""
    date: str = ""
    runs: list[Run] = field(default_factory=list)
    comparisons: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.own_flags = [*chain(*(script.flags for script in self.scripts))]
        " ".join([*self.flags, *self.own_flags, *self.hashes, self.note, self.date])  # TypeError where one is no text
        if not (2 <= len(self.scripts) <= MAX_SCRIPTS and 1 <= self.pairs <= 1000 and 1 <= self.nproc_per_node <= 1024):
            numbers = f"2 to {MAX_SCRIPTS} scripts, --pairs from 1 to 1000, --nproc_per_node from 1 to 1024"
            raise ValueError(f"a race needs {numbers}")
        if not 0 <= self.seed <= 2**31 - self.pairs:
            raise ValueError(f"--seed {self.seed}: all seeds of a race have to be from 0 to 2^31 - 1")

    @property
    def plan(self) -> tuple:
        scripts = [(script.sha256, script.flags) for script in self.scripts]
        return scripts, self.flags, self.pairs, self.seed, self.nproc_per_node

    @property
    def hashes(self) -> list[str]:
        return [script.sha256 for script in self.scripts]

    @property
    def order(self) -> list[tuple[int, int]]:
        """Return seed and script of all runs, in the order A B C, C B A, A B C ...; all of a round have one seed."""
        forwards = range(len(self.scripts))
        rounds = (forwards[::-1] if i % 2 else forwards for i in range(self.pairs))
        return [(self.seed + i, script) for i, scripts in enumerate(rounds) for script in scripts]

    def of(self, script: int) -> list[Run]:
        return [run for run in self.runs if run.script == script]

    def trains(self, preset: str) -> bool:
        return any(flag.split("=")[-1] == preset for flag in chain(self.flags, self.own_flags))

    @property
    def slack(self) -> float:
        return TRACKS["nano" if self.trains("nano") else "gpt2"].slack

    def compared(self) -> Iterator[tuple[tuple[int, int], dict]]:
        """Compare each script with the next one, and all with the last, as far as they have runs of one seed."""
        last = len(self.scripts) - 1
        for a, b in [*((i, i + 1) for i in range(last)), *((i, last) for i in range(last - 1))]:
            if found := self.compare(self.of(a), self.of(b)):
                yield (a, b), found

    def compare(self, a: Sequence[Run], b: Sequence[Run]) -> dict:
        return compare(a, b, self.slack, "low" if self.date < OLD_RACES else "high")

    def run_id(self, seed: int, script: int) -> str:
        """Name a run; the round lets a reader see that none before it is left out."""
        number = "" if self.date < OLD_RACES else f"{seed - self.seed + 1}of{self.pairs}-"
        return f"race-{number}{seed}-{string.ascii_lowercase[script]}"

    def check_order(self, path: Path) -> None:
        """Raise ToolError unless the runs are the first ones of a race, on the same tokens and one kind of machine."""
        if [(run.seed, run.script) for run in self.runs] != self.order[: len(self.runs)]:
            raise ToolError(f"{path}: its runs are not those of a race in order; begin a new race with --out")
        for what in ("val_sha256", "hardware"):
            if len({str(getattr(run, what)) for run in self.runs} - {"None"}) > 1:
                raise ToolError(f"{path}: its runs differ in {what}: race with the same data, on one machine")

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)


def read_race(path: Path) -> Race:
    found = read_json(path)
    try:
        scripts, runs = [Script(**script) for script in found["scripts"]], [Run(**run) for run in found["runs"]]
        return Race(**found | dict(scripts=scripts, runs=runs))
    except ODD as error:
        raise ToolError(f"{path}: not what `race` wrote ({shown(str(error))}); take the file as it was") from None


def figures_of(log: Log) -> dict:
    """Return the fields of Run that a log states; what the run wrote elsewhere does not count."""
    figures = dict(val_loss=log.val_loss, train_time=log.train_time, step_time=log.step_time or None)
    return figures | dict(val_sha256=log.val_sha256, hardware=log.hardware)


def public_history() -> dict:
    """Read records/public.json, the public speedrun's history and curves, which were not measured here."""
    return read_json(RECORDS / "public.json")


def against_public(log: Log, name: str) -> tuple[str, bool]:
    """Hold a gpt2 log's validations against the curve of a public record, such as "record21"; say if it follows."""
    known = public_history()["records"]
    curves = {f"record{record['number']}": record["curve"] for record in known if "curve" in record}
    if name not in curves:
        raise ToolError(f"no public curve {name!r}; choose one of {', '.join(curves)}")
    if log.track not in (None, "gpt2"):
        raise ToolError(f"{log.path}: a log of the {log.track} track; the public curves are of gpt2")
    curve = {int(step): loss for step, loss in curves[name].items()}
    common = {step: log.curve[step][0] for step in curve if step in log.curve}
    if not common:
        raise ToolError(f"{log.path}: no validation at a step of the curve; run it with --val_loss_every 125")
    lacking = len(curve) - len(common)
    points = f"{len(common)} points" + (f"; {lacking} more it lacks" if lacking else "")
    for step, loss in common.items():
        if abs(loss - curve[step]) > (AT_THE_END if step == max(curve) else TOLERANCE):
            losses = f"{loss:.4f}, the curve {curve[step]:.4f}"
            return f"leaves {name} first at step {step}: {losses} (compared at {points})", False
    at_end = f", within {AT_THE_END} at its end" if max(curve) in common else ""
    return f"follows {name} within {TOLERANCE} at {points}{at_end}", True
