"""Compute from runs whether the target is reached, how many runs that needs, and how wide an interval is."""

import dataclasses
import json
import math
import os
import re
import statistics
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speedrun.logs import ODD, Log, ToolError, read_json, shown
from speedrun.store import DEFAULT, TRACKS

ALPHA = 0.01  # a record's p has to be below it
MIN_PAIRS = 5  # of a race that decides; fewer are a screen
OLD_RACES = "2026-11-27"  # before, the lower end of the loss's interval had to be low enough, and runs named no round
SLACKS = ", ".join(f"{name}: {track.slack:g}" for name, track in TRACKS.items() if name != DEFAULT)
FASTER = (
    "A script is faster if the 95% interval of the ratio of train times lies below 1, and that of the difference of "
    f"losses ends at {TRACKS[DEFAULT].slack:g} or below ({SLACKS})."
)
OWN_FLAGS = {"--seed", "--log_dir", "--run_id"}  # that a race sets
PEEKING = """Fix the number of runs before the first one: who tests after each of 3 to 20 runs and stops at p < 0.01
passes about 6% of the time, not 1%, with a script whose true mean is the target."""


class Sample:
    """Sum up runs. p is that of the one-sided t-test for a mean below `target`; one run has neither p nor sd."""

    def __init__(self, values: Sequence[float], target: float = math.nan):
        from scipy.stats import ttest_1samp

        self.n, self.mean, self.sd, self.p = len(values), statistics.fmean(values), math.nan, math.nan
        if self.n > 1:
            self.sd = statistics.stdev(values)
            self.p = float(ttest_1samp(values, target, alternative="less").pvalue)

    def __str__(self) -> str:
        return f"n={self.n} mean {self.mean:.4f} sd {self.sd:.4f}"


def runs_needed(gap: float, sd: float, alpha: float = ALPHA) -> str:
    """Return the smallest number of runs whose one-sided test has a power of 0.9 if the mean is `gap` below."""
    from scipy.stats import nct, t

    for n in range(2, 1001):
        if gap > 0 and (sd == 0 or nct.sf(t.isf(alpha, n - 1), n - 1, gap / sd * math.sqrt(n)) >= 0.9):
            return str(n)
    return "more than 1000"


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of a - b, by pairs, and if there are several the ends of its 95% t-interval."""
    from scipy.stats import ttest_rel

    mean = statistics.fmean(a) - statistics.fmean(b)
    return (mean, *map(float, ttest_rel(a, b).confidence_interval())) if len(a) > 1 else (mean,)


def compare(a: Sequence, b: Sequence, slack: float, end: str = "high") -> dict:
    """Compare times a / b and losses a - b, by pairs of one seed, with 95% intervals and the verdict."""
    by_seed = [{run.seed: run for run in runs} for runs in (a, b)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if not seeds:
        return {}
    a, b = ([runs[seed] for seed in seeds] for runs in by_seed)
    found: dict = dict(n=[len(a), len(b)], seeds=seeds)
    times = difference(*([math.log(run.train_time) for run in runs] for runs in (a, b)))
    losses = difference(*([run.val_loss for run in runs] for runs in (a, b)))
    for key, name, ends in ("train_time", "ratio", map(math.exp, times)), ("val_loss", "difference", losses):
        found[key] = {what: round(value, 6) for what, value in zip((name, "low", "high"), ends, strict=False)}
    return found | dict(verdict=verdict(found, slack, end))


def interval(figures: dict, form: str) -> str:
    """Return a difference or a ratio with its interval, if it has one."""
    value = format(figures.get("difference", figures.get("ratio")), form)
    return f"{value} ({figures['low']:{form}} to {figures['high']:{form}})" if "low" in figures else value


def verdict(found: dict, slack: float, end: str) -> str:
    """Return what a comparison says of its first script, "faster" as in FASTER. docs/submit.md says what to do next."""
    from scipy.stats import t

    n, times, losses = found["n"][0], found["train_time"], found["val_loss"]
    if n == 1:
        return "screen of 1 pair: no interval"
    if times["high"] < 1:
        said = "faster" if losses[end] <= slack else "faster at a loss that may be too high"
    elif times["low"] > 1:
        said = "slower"
    else:
        low, middle, high = (math.log(times[key]) for key in ("low", "ratio", "high"))
        sd = (high - low) / 2 / float(t.isf(0.025, n - 1)) * math.sqrt(n)
        said = f"undecided, would take about {runs_needed(abs(middle), sd, 0.025)} pairs"
    if said != "faster" and losses["high"] < 0:
        said += " at a lower loss"
    return f"screen of {n} pairs: {said}" if n < MIN_PAIRS else said


def standing(found: dict) -> str:
    """Return the verdict on a comparison with its figures, in one line."""
    time, loss = interval(found["train_time"], ".3f"), interval(found["val_loss"], "+.4f")
    return f"{found['verdict']}: train time {time}, loss {loss}"


@dataclass(frozen=True)
class Run:
    """Hold a run of the script of this index, and its time in ms."""

    script: int
    seed: int
    val_loss: float
    train_time: float
    step_time: float | None = field(default=None, compare=False)  # of races before 2026-11-27
    val_sha256: str | None = None
    hardware: str | None = None


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
        self.own_flags = [flag for script in self.scripts for flag in script.flags]
        if not (2 <= len(self.scripts) <= 26 and self.pairs >= 1 and self.seed >= 0 and self.nproc_per_node >= 1):
            raise ValueError("a race needs 2 to 26 scripts, --pairs and --nproc_per_node from 1, --seed from 0")

    @property
    def plan(self) -> tuple:
        own_flags = [script.flags for script in self.scripts]
        return self.hashes, own_flags, self.flags, self.pairs, self.seed, self.nproc_per_node

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

    @property
    def preset(self) -> str:
        found = re.search(r"--preset[= ](\S+)", " ".join([*self.flags, *self.own_flags]))
        return found[1] if found else DEFAULT

    def compared(self) -> Iterator[tuple[tuple[int, int], dict]]:
        """Compare each script with the next one, and all with the last, as far as they have runs of one seed."""
        last = len(self.scripts) - 1
        for a, b in [*((i, i + 1) for i in range(last)), *((i, last) for i in range(last - 1))]:
            if found := self.compare(self.of(a), self.of(b)):
                yield (a, b), found

    def compare(self, a: Sequence[Run], b: Sequence[Run]) -> dict:
        slack = TRACKS.get(self.preset, TRACKS[DEFAULT]).slack
        return compare(a, b, slack, "low" if self.date < OLD_RACES else "high")

    def run_id(self, seed: int, script: int) -> str:
        """Name a run; the round lets a reader see that none before it is left out."""
        number = "" if self.date < OLD_RACES else f"{seed - self.seed + 1}of{self.pairs}-"
        return f"race-{number}{seed}-{string.ascii_lowercase[script]}"

    def check_order(self, path: Path) -> None:
        """Raise ToolError unless the runs are the first ones of a race, on the same tokens and one kind of machine."""
        if [(run.seed, run.script) for run in self.runs] != self.order[: len(self.runs)]:
            raise ToolError(f"{path}: its runs are not those of a race in order; begin a new race with --out")
        for what in ("val_sha256", "hardware"):
            if len({getattr(run, what) for run in self.runs} - {None}) > 1:
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
    return dict(val_loss=log.val_loss, train_time=log.train_time, val_sha256=log.val_sha256, hardware=log.hardware)
