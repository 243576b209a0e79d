"""Run scripts in turn on this machine, and say by how much they differ."""

import dataclasses
import itertools
import json
import math
import os
import statistics
import string
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speedrun import ROOT, TRACKS
from speedrun.logs import DAMAGED, Log, ToolError, quote, read_json
from speedrun.process import held, run_python

RACE = "race.json"
ALPHA = 0.01  # a record's p has to be below it
MIN_PAIRS = 5  # of a race that decides; fewer are a screen
OWN_FLAGS = {"--seed", "--log_dir", "--run_id"}  # that a race sets


# ---- Statistics


class Sample:
    """A summary of runs. p is that of the one-sided t-test for a mean below `target`; one run has neither p nor sd."""

    def __init__(self, values: Sequence[float], target: float = math.nan):
        from scipy.stats import ttest_1samp

        self.n, self.mean, self.sd, self.p = len(values), statistics.fmean(values), math.nan, math.nan
        if self.n > 1:
            self.sd = statistics.stdev(values)
            self.p = float(ttest_1samp(values, target, alternative="less").pvalue)

    def __str__(self) -> str:
        return f"n={self.n} mean {self.mean:.4f}" + (f" sd {self.sd:.4f}" if self.n > 1 else "")


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of a - b, by pairs, and if there are several the ends of its 95% t-interval."""
    from scipy.stats import t

    deltas = [x - y for x, y in zip(a, b, strict=True)]
    mean, n = statistics.fmean(deltas), len(deltas)
    if n == 1:
        return (mean,)
    half_width = float(t.isf(0.025, n - 1)) * statistics.stdev(deltas) / math.sqrt(n)
    return mean, mean - half_width, mean + half_width


def interval(figures: dict, form: str) -> str:
    """Return a difference or a ratio with its interval, if it has one."""
    value = format(figures.get("difference", figures.get("ratio")), form)
    return f"{value} ({figures['low']:{form}} to {figures['high']:{form}})" if "low" in figures else value


def verdict(n: int, times: dict, losses: dict, slack: float) -> str:
    """Return what n pairs say of the first script, "faster" as RULES.md defines it."""
    from scipy.stats import t

    if n == 1:
        return "screen of 1 pair: no interval"
    if times["high"] < 1:
        result = "faster" if losses["high"] <= slack else "faster at a loss that may be too high"
    elif times["low"] > 1:
        result = "slower"
    else:
        half_width, effect = math.log(times["high"] / times["low"]) / 2, abs(math.log(times["ratio"])) or 1e-6
        sd = half_width * math.sqrt(n) / float(t.isf(0.025, n - 1))
        # So that the interval excludes 1 nine times in ten; 1.96 and 1.28 are quantiles of the normal distribution
        pairs = ((1.96 + 1.28) * sd / effect) ** 2 + 1.96**2 / 2
        result = f"undecided, would take about {pairs:,.0f} pairs"
    if result != "faster" and losses["high"] < 0:
        result += " at a lower loss"
    return f"screen of {n} pairs: {result}" if n < MIN_PAIRS else result


def summary(comparison: dict) -> str:
    """Return the verdict on a comparison with its figures, in one line."""
    time_ratio, loss = interval(comparison["train_time"], ".3f"), interval(comparison["val_loss"], "+.4f")
    return f"{comparison['verdict']}: train time {time_ratio}, loss {loss}"


# ---- What race.json holds


@dataclass(frozen=True)
class Run:
    """A run of the script of this index, and its time in ms."""

    script: int
    seed: int
    val_loss: float
    train_time: float
    preset: str | None
    is_on_track: bool  # it read the tokens of its track
    val_sha256: str | None
    hardware: str | None


@dataclass(frozen=True)
class Script:
    """A script by its label and hash."""

    name: str
    sha256: str


@dataclass
class Race:
    """The content of race.json. The fields before `date` are its plan, which stays."""

    scripts: list[Script]
    flags: list[str]
    pairs: int
    seed: int
    nproc_per_node: int
    date: str = ""
    runs: list[Run] = field(default_factory=list)
    comparisons: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (2 <= len(self.scripts) <= 26 and self.pairs >= 1 and self.seed >= 0 and self.nproc_per_node >= 1):
            raise ToolError("a race needs 2 to 26 scripts, --pairs and --nproc_per_node from 1, --seed from 0")

    @property
    def hashes(self) -> list[str]:
        return [script.sha256 for script in self.scripts]

    @property
    def plan(self) -> tuple:
        return self.hashes, self.flags, self.pairs, self.seed, self.nproc_per_node

    @property
    def order(self) -> list[tuple[int, int]]:
        """Return seed and script of all runs, in the order A B C, C B A, A B C ...; all of a round have one seed."""
        order = []
        for i in range(self.pairs):  # a linear drift of the machine's speed cancels
            scripts = reversed(range(len(self.scripts))) if i % 2 else range(len(self.scripts))
            order += [(self.seed + i, script) for script in scripts]
        return order

    def runs_of(self, script: int) -> list[Run]:
        """Return the runs of the script of this index, in the order of seeds."""
        return [run for run in self.runs if run.script == script]

    def compare(self, newer: int, older: int) -> dict:
        """Compare two scripts, by their indices, of a whole race: ratio of times, difference of losses, verdict."""
        a, b = self.runs_of(newer), self.runs_of(older)
        times = difference([math.log(run.train_time) for run in a], [math.log(run.train_time) for run in b])
        losses = difference([run.val_loss for run in a], [run.val_loss for run in b])
        ratio = {key: round(math.exp(x), 6) for key, x in zip(("ratio", "low", "high"), times, strict=False)}
        loss = {key: round(x, 6) for key, x in zip(("difference", "low", "high"), losses, strict=False)}
        track = TRACKS.get(a[0].preset or "")
        slack = track.slack if track else 0
        result = verdict(self.pairs, ratio, loss, slack)
        return dict(newer=newer, older=older, n=self.pairs, train_time=ratio, val_loss=loss, verdict=result)

    def run_id(self, seed: int, script: int) -> str:
        """Name a run; the round lets a reader see that none before it is left out."""
        return f"race-{seed - self.seed + 1}of{self.pairs}-{seed}-{string.ascii_lowercase[script]}"

    def check(self, path: Path) -> None:
        """Raise ToolError unless the runs are on the same tokens and one kind of machine."""
        for name in ("val_sha256", "hardware"):
            if len({getattr(run, name) for run in self.runs} - {None}) > 1:
                raise ToolError(f"{path}: its runs differ in {name}: race with the same data, on one machine")

    def write(self, path: Path) -> None:
        """Write the file whole or not at all, with a line for each run and comparison."""
        from data.shards import write_file  # imports numpy

        fields = dataclasses.asdict(self)
        rows = {name: ",\n  ".join(map(json.dumps, fields.pop(name))) for name in ("scripts", "runs", "comparisons")}
        lines = [f'"{name}": {json.dumps(value)}' for name, value in fields.items()]
        lines += [f'"{name}": [\n  {text}\n ]' for name, text in rows.items()]
        write_file(path, ("{\n " + ",\n ".join(lines) + "\n}\n").encode())


def read_race(path: Path) -> Race:
    fields = read_json(path)
    try:
        fields["scripts"] = [Script(**script) for script in fields["scripts"]]
        fields["runs"] = [Run(**run) for run in fields["runs"]]
        return Race(**fields)
    except (*DAMAGED, ToolError) as error:
        raise ToolError(f"{path}: not what `race` wrote ({quote(str(error))}); take the file as it was") from None


# ---- Racing


def run_script(command: Sequence[str], log: Path, script: int, seed: int) -> Run:
    """Run a training that writes this log."""
    try:
        run_python(command)
    except ToolError as error:
        needs = "a script has to take --seed, --log_dir and --run_id, and to write a log as train_gpt.py does"
        raise ToolError(f"run {log.stem} failed, {error}: mend it, go on with --out; {needs}") from None
    run = Log(log)
    if run.problem:
        raise ToolError(f"{log}: {run.problem}")
    is_on_track = run.other_tokens is None
    return Run(script, seed, run.val_loss, run.train_time, run.track, is_on_track, run.val_sha256, run.hardware)


def remove_files(folder: Path, run_id: str, keep: Sequence[str] = ()) -> None:
    """Remove what a run left, such as checkpoints and the model."""
    for path in folder.glob(f"{run_id}.*"):
        if path.suffix not in keep:
            path.unlink()


def run_race(plan: Race, sources: Sequence[str], folder: Path) -> Race:
    """Run what is left of a race of these scripts, and return it; it is stored after each run."""
    if any(flag.partition("=")[0] in OWN_FLAGS for flag in plan.flags):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    launcher = [*torchrun, f"--nproc_per_node={plan.nproc_per_node}"] if plan.nproc_per_node > 1 else []
    log_dir = os.path.relpath(folder, ROOT)  # so that a log names no home folder
    path = folder / RACE
    with (
        tempfile.TemporaryDirectory(prefix="race-") as copies,
        held(folder, "another race runs there: wait for it, or choose another --out"),
    ):
        if not path.is_file():  # so that a race goes on whose first run fails
            plan.write(path)
        race = read_race(path)
        if race.plan != plan.plan:
            raise ToolError(f"{path}: was begun with other scripts, flags, pairs or seed: use those, or another --out")
        for i, source in enumerate(sources):  # who edits one while they race does not change it
            Path(copies, f"script_{i}.py").write_text(source + "\n", encoding="utf-8")
        how = f"to stop: kill -TERM {os.getpid()}; to go on: the same with --out {folder}"  # nohup ignores Ctrl-C
        print(f"{len(race.runs)}/{len(race.order)} runs; {how}", file=sys.stderr, flush=True)
        for seed, i in race.order[len(race.runs) :]:
            run_id = race.run_id(seed, i)
            own_flags = ["--seed", str(seed), "--log_dir", log_dir, "--run_id", run_id]
            command = [*launcher, f"{copies}/script_{i}.py", *own_flags, *race.flags]
            remove_files(folder, run_id)  # of a run that was stopped
            run = run_script(command, folder / f"{run_id}.txt", i, seed)
            remove_files(folder, run_id, keep=(".txt", ".json"))
            race.runs.append(run)
            race.check(path)
            race.write(path)
            result = f"{run_id}: val_loss {run.val_loss:.4f}, {run.train_time:.0f} ms"
            print(f"{result}; {len(race.runs)}/{len(race.order)}", file=sys.stderr, flush=True)
        race.comparisons = [race.compare(*pair) for pair in itertools.combinations(range(len(race.scripts)), 2)]
        race.write(path)
    return race


def report(race: Race) -> str:
    """Say how the runs of the first script stand to their track's target, and how any two scripts differ."""
    runs, lines = race.runs_of(0), list[str]()
    if track := TRACKS.get(runs[0].preset or ""):
        sample = Sample([run.val_loss for run in runs], track.target)
        is_on_track = all(run.is_on_track for run in race.runs)
        result = f"p={sample.p:.2g} against {track.target}" if is_on_track else "no target: of other tokens"
        lines.append(f"{race.scripts[0].name}: {sample}, {result}")
    lines.append(f"{race.pairs} pairs from seed {race.seed} on, 95% intervals")
    for comparison in race.comparisons:
        newer, older = (race.scripts[comparison[which]] for which in ("newer", "older"))
        lines.append(f"{newer.name} against {older.name}: {summary(comparison)}")
        if newer.sha256 == older.sha256:
            lines.append("the two are equal: the interval is how far this machine's runs differ")
    return "\n".join(lines)
