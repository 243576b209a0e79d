"""Run scripts in turn on this machine and say by how much they differ; write and read race.json."""

import ast
import dataclasses
import datetime
import json
import os
import re
import shlex
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from speedrun import logs, proof
from speedrun.logs import Log, ToolError, digest, read_script, rivals, shown
from speedrun.process import ROOT, own_process
from speedrun.proof import MIN_PAIRS, SLACK, compare

FILE, OLDER = "race.json", "older"  # the latter: the folder of the older script's logs, beside the record's own
MAX_SCRIPTS = 26  # a letter each
MAX_CHANGED = 200  # lines, removed and added, of a script that carries an idea
# Flags of such a race: others would change the training of the record before, too
SAME_TRAINING = {f"--{name}" for name in "preset device val_loss_every cpu_threads train_files val_files".split()}
ON_ONE_GPU = {"--train_seq_len", "--ngram_rows"}  # for gpt2 on one GPU, where the preset's may not fit
BUSY = 0.7  # running processes, on average; two trainings at once were seen to take 5 to 10 times as long
LOWER_END = "2026-11-27"  # races before that day asked of the loss that the lower end of its interval is low enough
CONTRACT = (
    "A script has to accept --seed N, --log_dir FOLDER and --run_id NAME, and to write FOLDER/NAME.txt: its source, a "
    "line of 100 '=', what it says of itself, the line again, and a line "
    "'step:N/TOTAL val_loss:X train_time:Xms step_avg:Xms' for each validation, at last that of step TOTAL."
)


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
        return SLACK["nano" if self.trains("nano") else "gpt2"]

    def compared(self) -> Iterator[tuple[tuple[int, int], dict]]:
        """Compare each script with the next one, and all with the last, as far as they have runs of one seed."""
        last = len(self.scripts) - 1
        for a, b in [*((i, i + 1) for i in range(last)), *((i, last) for i in range(last - 1))]:
            if found := self.compare(self.of(a), self.of(b)):
                yield (a, b), found

    def compare(self, a: Sequence[Run], b: Sequence[Run]) -> dict:
        return compare(a, b, self.slack, "low" if self.date < LOWER_END else "high")

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
    found = logs.read_json(path)
    try:
        scripts, runs = [Script(**script) for script in found["scripts"]], [Run(**run) for run in found["runs"]]
        return Race(**found | dict(scripts=scripts, runs=runs))
    except logs.ODD as error:
        raise ToolError(f"{path}: not what `race` wrote ({shown(str(error))}); take the file as it was") from None


def figures_of(log: Log) -> dict:
    """Return the fields of Run that a log states; what the run wrote elsewhere does not count."""
    figures = dict(val_loss=log.val_loss, train_time=log.train_time, step_time=log.step_time or None)
    return figures | dict(val_sha256=log.val_sha256, hardware=log.hardware)


def run_script(script: Path, flags: Sequence[str], nproc: int, run_id: str, log_dir: Path, run: dict) -> Run:
    """Run a training script in the repository's root; `run` has index and seed, and the log says the rest."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc_per_node={nproc}"]
    own = ["--seed", str(run["seed"]), "--log_dir", str(log_dir), "--run_id", run_id]
    # What torchrun would choose, without its warning
    threads = dict(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")) if nproc > 1 else {}
    try:
        own_process([*torchrun * (nproc > 1), str(script), *own, *flags], **threads)
    except RuntimeError as error:
        fix = "with that mended, --resume the race; with other flags or scripts, begin a new one"
        raise ToolError(f"run {run_id} failed: {shown(str(error), 300)}; {fix}") from None
    if not (path := ROOT / log_dir / f"{run_id}.txt").is_file():
        raise ToolError(f"run {run_id} ended well, but wrote no {path}. {CONTRACT}")
    if (log := Log(path)).incomplete:
        raise ToolError(f"{path}: {log.incomplete}")
    try:
        return Run(**run, **figures_of(log))
    except ValueError as error:
        raise ToolError(f"{path}: {error}. {CONTRACT}") from None


def clear(folder: Path, run_id: str, *kept: str) -> None:
    """Remove what a run left: checkpoints, the model and its rows of n-grams, which a race needs no more."""
    for path in folder.glob(f"{run_id}.*"):
        if path.suffix not in kept:
            path.unlink()


def short_name(folder: str) -> str:
    """Return the name of a record without the number or date that its folder begins with."""
    name = Path(folder).name
    return name.partition("_")[2] if name[:1].isdigit() else name


def obstacle(race: Race, rivals: Sequence[tuple[str, str]]) -> str | None:
    """Say why no record can come of this race against one of `rivals` (name, source), or return None."""
    if race.trains("mini"):
        return "mini has no leaderboard"
    is_one_gpu = race.nproc_per_node == 1 and not race.trains("nano")
    allowed = SAME_TRAINING | ON_ONE_GPU if is_one_gpu else SAME_TRAINING
    names = [{word.split("=")[0] for word in words if word.startswith("--")} for words in (race.flags, race.own_flags)]
    if others := names[0] - allowed | names[1]:
        return f"flags {', '.join(sorted(others))}: put settings into the script, race without"
    if rivals and not any(digest(source) in race.hashes for _, source in rivals):
        older = [short_name(name) for name, _ in rivals]
        return f"none of its scripts is {' or '.join(older)}: race YOUR_SCRIPT {older[0]}"
    return (
        f"fewer than {MIN_PAIRS} pairs are a screen: race with --pairs {MIN_PAIRS}" if race.pairs < MIN_PAIRS else None
    )


def used_seeds(race: Race, paths: Iterable[Path]) -> str | None:
    """Say that one of these races had one of the planned seeds, or return None."""
    for path in paths:
        try:
            theirs = {run.seed for run in read_race(path).runs}
        except ToolError:
            continue
        if theirs & {*range(race.seed, race.seed + race.pairs)}:
            return f"its seeds are not fresh, as {path} has some: race with --seed {max(theirs) + 1} or higher"
    return None


def too_different(newer: tuple[str, str], older: tuple[str, str]) -> str | None:
    """Say that more lines change than an idea may, or return None."""
    changed = sum(logs.diff(older, newer)[1:])
    told = f"{changed} lines change against {older[0]}, for an idea at most {MAX_CHANGED}: take out what it can spare"
    return told if changed > MAX_CHANGED else None


def record_race(
    folder: Path, line: Sequence[Path], board: str, own: Sequence[Log] | None = None, others: Sequence[Log] = ()
) -> tuple[str, dict]:
    """Compare a record of a leaderboard with one of those before it, `line`, by its race.json; also return its name.

    Raise ToolError if the race proves nothing, or not by these logs: the record's own, and others of the script before.
    """
    path, before, (_, newer) = folder / FILE, rivals(line, board), read_script(str(folder), folder.parent)
    if not path.is_file():
        names = " or ".join(name for name, _ in before)
        raise ToolError(f"{path}: is missing; race the script against {names}, and put the {FILE} there")
    race = read_race(path)
    if digest(newer) not in race.hashes:
        raise ToolError(f"{path}: lacks this record's script, SHA-256 {digest(newer)}; race it as it is")
    problem = obstacle(race, before)
    name, older = next((rival for rival in before if digest(rival[1]) in race.hashes), ("", ""))
    if not older:
        raise ToolError(f"{path}: {problem}")
    race.check_order(path)
    a, b = (race.of(race.hashes.index(digest(script))) for script in (newer, older))
    found = race.compare(a, b)
    if not problem and len(race.runs) != len(race.order):
        problem = f"has {len(race.runs)} runs, not {race.pairs} of each script; --resume the race"
    if not problem and own is not None:
        others = [*others, *map(Log, logs.log_paths(folder.parent.parent / name))]
        others = [log for log in others if log.source in (older, digest(older)) and not log.incomplete]
        if len(own) != len(a):
            counts = f"{len(a)} runs of the script, there are {len(own)} sound logs"
            problem = f"has {counts}: leave none out"
        else:
            problem = run_problem(a, own, race.flags, "the folder")
            problem = problem or run_problem(b, others, race.flags, f"its folder {OLDER}, nor in {name}")
    if problem:
        raise ToolError(f"{path}: {problem}. So far {proof.standing(found) if found else 'it has no pair'}")
    return name, found


def older_logs(path: Path, line: Sequence[Path], board: str) -> dict[str, str]:
    """Return name and text of the logs beside a race.json of the script before, which its SHA-256 stands for."""
    hashes = read_race(path).hashes
    for _, script in rivals(line, board):
        if digest(script) in hashes:
            paths = path.parent.glob(run_id_of("*", hashes.index(digest(script))) + ".txt")
            return {path.name: logs.without_script(logs.read_text(path), script) for path in sorted(paths)}
    return {}


def run_problem(runs: Sequence[Run], found: Sequence[Log], flags: Sequence[str], where: str) -> str | None:
    """Say that one of the race's runs has no log that says the same, or return None."""
    for run in runs:
        run_id = run_id_of(run.seed, run.script)
        own = [log for log in found if log.flags[4:] == ["--run_id", run_id, *flags]]
        if not own:
            return f"no sound log of its run {run_id}, with the race's flags, is in {where}"
        if not any(Run(run.script, log.seed, **figures_of(log)) == run for log in own):
            return f"the log of its run {run_id} says otherwise; take the files that `race` left"
    return None


def run_id_of(seed: int | str, script: int) -> str:
    return f"race-{seed}-{string.ascii_lowercase[script]}"


def begin(plan: Race, folder: Path, is_resumed: bool) -> Race:
    """Start a race in the folder, or read what there is of the one to resume."""
    path = folder / FILE
    if not is_resumed:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path.open("x").close()
        except FileExistsError:
            raise ToolError(f"{path} is there already: go on with --resume {folder}, or choose another --out") from None
        plan.write(path)  # so that a race can go on whose first run fails
    race = read_race(path)
    if race.plan != plan.plan:
        raise ToolError(f"{path}: was begun with other scripts, flags, pairs or seed: use the same, or --out")
    race.check_order(path)
    return race


def in_turn(plan: Race, paths: Sequence[Path], folder: Path, is_resumed: bool) -> Race:
    """Run each script once per round, and return the race.

    Every other round is in reverse: a drift of the machine's speed that is linear in time cancels in two of them.
    """
    race = begin(plan, folder, is_resumed)
    stop = f"to stop it: kill -TERM {os.getpid()}; to go on: --resume {folder}"  # nohup and & ignore Ctrl-C
    print(f"{len(race.runs)}/{len(race.order)} runs; {stop}", file=sys.stderr, flush=True)
    log_dir = folder.resolve()
    log_dir = log_dir.relative_to(ROOT) if log_dir.is_relative_to(ROOT) else log_dir  # a log names no home folder
    left, began = race.order[len(race.runs) :], time.monotonic()
    if left and (load := os.getloadavg()[0]) > BUSY:
        print(f"the load of the last minute is {load:.1f}: times mean little if anything else runs", file=sys.stderr)
    for done, (seed, script) in enumerate(left, start=1):
        run_id, name = run_id_of(seed, script), race.scripts[script].name
        flags = race.flags + race.scripts[script].flags
        clear(folder, run_id)  # what a run left that was stopped
        try:
            it = dict(script=script, seed=seed)
            run = run_script(paths[script], flags, race.nproc_per_node, run_id, log_dir, it)
        finally:
            clear(folder, run_id, ".txt", ".json")
        if not run.val_sha256 and not race.of(script):
            print(f"{name} states no validation tokens: losses compare only if all read the same", file=sys.stderr)
        race.runs.append(run)
        race.check_order(folder / FILE)
        race.write(folder / FILE)
        seconds = (time.monotonic() - began) / done * (len(left) - done)
        told = f"val_loss {run.val_loss:.4f}, train time {run.train_time:.0f} ms"
        remaining = f"{len(race.runs)}/{len(race.order)}, {datetime.timedelta(seconds=round(seconds))} left"
        print(f"{run_id}: {told}; {remaining}", file=sys.stderr, flush=True)
    race.comparisons = [found for _, found in race.compared()]
    race.write(folder / FILE)
    for i, raced in enumerate(race.scripts):
        times = [run.train_time for run in race.of(i)]
        if (high := max(times)) > 2 * (low := min(times)):
            print(f"{raced.name} took {low:.0f} to {high:.0f} ms: something else ran; race again", file=sys.stderr)
    return race


def told(race: Race) -> str:
    """Return the comparisons in words."""
    names = [script.name for script in race.scripts]
    return "\n".join(proof.told(names[a], names[b], found) for (a, b), found in race.compared())


def find_script(name: str, root: Path) -> tuple[Path, str, Script]:
    """Return path and source of the script that `name` names, and what race.json says of it.

    Flags of its own may follow, as in "train_gpt.py --muon_lr 0.05".
    """
    try:
        path, *flags = [name] if os.path.exists(name) else shlex.split(name) or [name]
    except ValueError as error:
        raise ToolError(f"{shown(name)}: expected a script, perhaps with flags ({error})") from None
    label, source = read_script(path, root)
    return Path(path), source, Script(shlex.join([label, *flags]), digest(source), flags)


def is_ours(source: str) -> bool:
    """Tell, by a quick look, whether a script has the flags that a race gives it."""
    return "run_id" in source and "log_dir" in source


def modules_beside(path: Path, source: str) -> list[str]:
    """Return the modules in its folder that a script imports. Raise ToolError if it is no Python."""
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError) as error:
        raise ToolError(f"{path}: is not one Python script ({shown(str(error))})") from None
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    names = {name.split(".")[0] for name in names}
    return sorted(name for name in names if path.suffix == ".py" and any(path.parent.glob(f"{name}.py")))


def get_data(race: Race, sources: Sequence[str]) -> None:
    """Let the preflight get the data of the presets that our scripts train, before anything is written."""
    wanted: list[tuple[str, ...]] = []
    for script, source in zip(race.scripts, sources, strict=True):
        text = " ".join([*race.flags, *script.flags])
        if is_ours(source) and "--train_files" not in text:
            wanted.append(tuple(re.findall(r"--(?:preset|device)=\w+", re.sub(r"(--\w+) ", r"\1=", text))))
    for flags in dict.fromkeys(wanted):
        command = [sys.executable, "-m", "speedrun", "check", *flags]
        environment = os.environ | dict(
            SCRIPT="race", NPROC=str(race.nproc_per_node)
        )  # their other flags are their own
        if code := subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
            if code == 130:
                raise KeyboardInterrupt
            raise ToolError("the machine or the data are not ready, see above: mend that, then race again")


def race_scripts(
    names: Sequence[str], root: Path, flags: Sequence[str], out: Path | None, resume: Path | None, **settings
) -> Race:
    """Race training scripts, frozen as they are now, with these flags."""
    given, sources, scripts = zip(*(find_script(name, root) for name in names), strict=True)
    try:
        race = Race([*scripts], [*map(str, flags)], date=str(datetime.date.today()), **settings)
    except ValueError as error:
        raise ToolError(str(error)) from None
    if any(flag.split("=")[0] in ("--seed", "--log_dir", "--run_id") for flag in race.flags + race.own_flags):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out")
    board = "nano" if race.trains("nano") else "gpt2 on 8xH100" if race.nproc_per_node == 8 else "gpt2"
    before = rivals(logs.lineage(root), board)
    folder = resume or out or Path("logs") / time.strftime("race-%Y%m%d-%H%M%S")
    others = sorted({*folder.parent.glob(f"*/{FILE}"), *root.glob(f"*/*/{FILE}")} - {folder / FILE})
    size_problem = before and too_different((names[0], sources[0]), before[-1])
    if len({(script.sha256, *script.flags) for script in scripts}) < len(scripts):
        print("two of these scripts are the same: they differ by chance alone", file=sys.stderr)
    elif problem := obstacle(race, before) or size_problem or used_seeds(race, others):
        print(f"no record can come of this race: {problem}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        paths = []
        for i, (path, source) in enumerate(zip(given, sources, strict=True)):
            if not is_ours(source):
                print(f"{path} does not look like one of our scripts. {CONTRACT}", file=sys.stderr)
            if beside := modules_beside(path, source):
                told = f"imports {', '.join(beside)} beside it, so it runs where it lies: change nothing there"
                print(f"{path} {told}", file=sys.stderr)
                paths.append(path.resolve())
                continue
            paths.append(Path(temporary) / str(i) / "train_gpt.py")
            paths[-1].parent.mkdir()
            paths[-1].write_text(source + "\n", encoding="utf-8")
        get_data(race, sources)
        return in_turn(race, paths, folder, is_resumed=resume is not None)
