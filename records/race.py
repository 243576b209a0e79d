"""Run scripts in turn on this machine and say by how much they differ; write and read race.json."""

import datetime
import functools
import json
import os
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from records import proof
from records.logs import (
    RECORDS,
    Log,
    ToolError,
    diff,
    digest,
    lineage,
    log_paths,
    read_json,
    read_script,
    read_text,
    rivals,
    shown,
    without_script,
)
from records.process import own_process
from records.proof import compare

FILE, OLDER = "race.json", "older"  # the latter: the folder of the older script's logs, beside the record's own
MIN_PAIRS, MAX_PAIRS = 5, 1000  # of a record's race, and of any
MAX_SCRIPTS = 26  # a letter each
MAX_CHANGED = 200  # lines, removed and added, of a script that carries an idea
# Flags of such a race: others would change the training of the record before, too
SAME_TRAINING = {f"--{name}" for name in "preset device val_loss_every cpu_threads train_files val_files".split()}
ON_ONE_GPU = {"--train_seq_len"}  # for gpt2 on one GPU, where the preset's sequences may not fit
BUSY = 0.7  # running processes, on average; two trainings at once were seen to take 5 to 10 times as long


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


def figures_of(log: Log) -> dict:
    """Return the fields of Run that a log states; what the run wrote elsewhere does not count."""
    figures = dict(val_loss=log.val_loss, train_time=log.train_time, step_time=log.step_time or None)
    return figures | dict(val_sha256=log.val_sha256, hardware=log.hardware)


def run_script(script: Path, flags: Sequence[str], nproc: int, seed: int, run_id: str, log_dir: Path) -> dict:
    """Run a training script in the repository's root, and return its figures as fields of Run."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    own = ["--seed", str(seed), "--log_dir", str(log_dir), "--run_id", run_id]
    # What torchrun would choose, without its warning
    threads = dict(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")) if torchrun else {}
    try:
        own_process([*torchrun, str(script), *own, *flags], None, RECORDS.parent, **threads)
    except RuntimeError as error:
        fix = "with that mended, --resume the race; with other flags or scripts, begin a new one"
        raise ToolError(f"run {run_id} failed: {shown(str(error), 300)}; {fix}") from None
    log = Log(RECORDS.parent / log_dir / f"{run_id}.txt")
    if log.incomplete:
        raise ToolError(f"{log.path}: {log.incomplete}")
    return figures_of(log)


def read_race(path: Path) -> tuple[dict, list[Run]]:
    """Return the document and its runs. Raise ToolError if it is not a race's."""
    document = read_json(path)
    try:
        planned(document)
        return document, [Run(**run) for run in document["runs"]]
    except (KeyError, TypeError):
        raise ToolError(f"{path}: not the {FILE} of a race; take the file that `race` wrote") from None


def plan_of(scripts: Sequence[tuple[str, str]], flags: Sequence[str], pairs: int, seed: int, nproc: int = 1) -> dict:
    """Return the head of a race's document; scripts are (name, source)."""
    hashes = [dict(name=name, sha256=digest(source)) for name, source in scripts]
    return dict(scripts=hashes, flags=[*map(str, flags)], pairs=pairs, seed=seed, nproc_per_node=nproc)


def planned(document: dict) -> tuple:
    """Return what a race is fixed by: its scripts, by their SHA-256, flags, pairs, first seed and processes."""
    keys = ("flags", "pairs", "seed", "nproc_per_node")
    return [script["sha256"] for script in document["scripts"]], *(document[key] for key in keys)


def of(script: int, runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.script == script]


def obstacle(plan: dict, rivals: Sequence[tuple[str, str]]) -> str | None:
    """Say why no record can come of a race with this plan against one of `rivals` (name, source), or return None."""
    hashes, flags, pairs, _, nproc = planned(plan)
    is_one_gpu = nproc == 1 and not is_nano(flags)
    allowed = SAME_TRAINING | ON_ONE_GPU if is_one_gpu else SAME_TRAINING
    if others := {flag.split("=")[0] for flag in flags if flag.startswith("--")} - allowed:
        return f"flags {', '.join(sorted(others))}: put settings into the script, race without"
    if rivals and not any(digest(source) in hashes for _, source in rivals):
        return f"not the script of {' or '.join(name for name, _ in rivals)}: race against it as it is"
    return f"fewer than {MIN_PAIRS} pairs: race with --pairs {MIN_PAIRS}" if pairs < MIN_PAIRS else None


def is_nano(flags: Sequence[str]) -> bool:
    return any(flag.split("=")[-1] == "nano" for flag in flags)


def used_seeds(plan: dict, paths: Iterable[Path]) -> str | None:
    """Say that one of these races had one of the planned seeds, or return None."""
    for path in paths:
        try:
            theirs = {run.seed for run in read_race(path)[1]}
        except ToolError:
            continue
        if theirs & {*range(plan["seed"], plan["seed"] + plan["pairs"])}:
            return f"its seeds are not fresh, as {path} has some: race with --seed {max(theirs) + 1} or higher"
    return None


def too_different(newer: tuple[str, str], older: tuple[str, str]) -> str | None:
    """Say that more lines change than an idea may, or return None."""
    changed = sum(diff(older, newer)[1:])
    told = f"{changed} lines change against {older[0]}, for an idea at most {MAX_CHANGED}: take out what it can spare"
    return told if changed > MAX_CHANGED else None


def record_race(
    folder: Path, line: Sequence[Path], board: str, logs: Sequence[Log] | None = None, others: Sequence[Log] = ()
) -> tuple[str, dict]:
    """Compare a record of a leaderboard with one of those before it, `line`, by its race.json; also return its name.

    Raise ToolError if the race proves nothing, or not by these logs: the record's own, and others of the script before.
    """
    path, before, (_, newer) = folder / FILE, rivals(line, board), read_script(str(folder), folder.parent)
    if not path.is_file():
        names = " or ".join(name for name, _ in before)
        raise ToolError(f"{path}: is missing; race the script against {names}, and put the {FILE} there")
    document, runs = read_race(path)
    hashes, flags, pairs, *_ = planned(document)
    if digest(newer) not in hashes:
        raise ToolError(f"{path}: lacks this record's script, SHA-256 {digest(newer)}; race it as it is")
    if problem := obstacle(document, before):
        raise ToolError(f"{path}: {problem}")
    name, older = next(rival for rival in before if digest(rival[1]) in hashes)
    checked_order(path, document, runs)
    if len(runs) != pairs * len(hashes):
        raise ToolError(f"{path}: has {len(runs)} runs, not {pairs} of each script; --resume the race")
    a, b = (of(hashes.index(digest(script)), runs) for script in (newer, older))
    if logs is not None:
        if len(logs) != len(a):
            counts = f"{len(a)} runs of the script, there are {len(logs)} sound logs"
            raise ToolError(f"{path}: has {counts}: leave none out")
        check_runs(path, a, logs, flags, "the folder")
        others = [*others, *map(Log, log_paths(folder.parent / name))]
        others = [log for log in others if log.source in (older, digest(older)) and not log.incomplete]
        check_runs(path, b, others, flags, f"its folder {OLDER}, nor in {name}")
    return name, compare(a, b)


def older_logs(race: Path, line: Sequence[Path], board: str) -> dict[str, str]:
    """Return name and text of the logs beside `race` of the script before, which its SHA-256 stands for."""
    hashes = planned(read_race(race)[0])[0]
    for _, script in rivals(line, board):
        if digest(script) in hashes:
            paths = race.parent.glob(run_id_of("*", hashes.index(digest(script))) + ".txt")
            return {path.name: without_script(read_text(path), script) for path in sorted(paths)}
    return {}


def check_runs(path: Path, runs: Sequence[Run], logs: Sequence[Log], flags: Sequence[str], where: str) -> None:
    """Raise ToolError unless each of the race's runs has a log that says the same."""
    for run in runs:
        run_id = run_id_of(run.seed, run.script)
        own = [log for log in logs if log.flags[4:] == ["--run_id", run_id, *flags]]
        if not own:
            raise ToolError(f"{path}: no sound log of its run {run_id}, with the race's flags, is in {where}")
        if not any(Run(run.script, log.seed, **figures_of(log)) == run for log in own):
            raise ToolError(f"{path}: the log of its run {run_id} says otherwise; take the files that `race` left")


def checked_order(path: Path, document: dict, runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return seed and script of all runs, in the order A B C, C B A, A B C ...; all of a round have one seed.

    Raise ToolError unless `runs` are the first of them, on the same tokens and one kind of machine.
    """
    forwards, first = range(len(document["scripts"])), document["seed"]
    rounds = [forwards[::-1] if i % 2 else forwards for i in range(document["pairs"])]
    order = [(first + i, script) for i, scripts in enumerate(rounds) for script in scripts]
    if [(run.seed, run.script) for run in runs] != order[: len(runs)]:
        raise ToolError(f"{path}: its runs are not those of a race in order; begin a new race with --out")
    for what in ("val_sha256", "hardware"):
        if len({getattr(run, what) for run in runs} - {None}) > 1:
            raise ToolError(f"{path}: its runs differ in {what}: race with the same data, on one machine")
    return order


def comparisons(runs: Sequence[Run]) -> list[dict]:
    """Compare each script with the next one."""
    sides = [of(script, runs) for script in sorted({run.script for run in runs})]
    return [compare(a, b) for a, b in pairwise(sides)]


def run_id_of(seed: int | str, script: int) -> str:
    return f"race-{seed}-{string.ascii_lowercase[script]}"


def write(path: Path, document: dict) -> None:
    """Write the file whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def begin(plan: dict, out: Path | None, resume: Path | None) -> tuple[Path, dict, list[Run], IO]:
    """Start a race in the folder `out`, or read what there is of the one to resume. The last result is its lock."""
    folder = resume or out or Path("logs") / time.strftime("race-%Y%m%d-%H%M%S")
    path = folder / FILE
    if not resume and path.exists():
        raise ToolError(f"{path} is there already: go on with --resume {folder}, or choose another --out")
    sys.path.append(str(RECORDS.parent / "data"))
    from shards import lock_folder

    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise ToolError(f"{folder}: another process is racing there; choose another folder") from None
    if not resume:
        write(path, plan | dict(runs=[], comparisons=[]))  # so that a race can go on whose first run fails
    document, runs = read_race(path)
    if planned(document) != planned(plan):
        raise ToolError(f"{path}: was begun with other scripts, flags, pairs or seed: use the same, or --out")
    return folder, document, runs, lock


def in_turn(plan: dict, runners: Sequence[Callable[..., dict]], out: Path | None, resume: Path | None) -> dict:
    """Run each script once per round, and return the document of the race.

    Every other round is in reverse: a drift of the machine's speed that is linear in time cancels in two of them.
    A runner takes seed, run id and the folder of the logs, and returns the fields of Run after the first two.
    """
    if not (2 <= len(runners) <= MAX_SCRIPTS and 2 <= plan["pairs"] <= MAX_PAIRS):
        raise ToolError(f"a race needs 2 to {MAX_SCRIPTS} scripts, and for an interval --pairs from 2 to {MAX_PAIRS}")
    import scipy.stats  # noqa: F401  to miss it now, and not after all runs

    folder, document, runs, _lock = begin(plan, out, resume)
    order = checked_order(folder / FILE, document, runs)
    print(f"{len(runs)}/{len(order)} runs; if stopped, go on with --resume {folder}", file=sys.stderr, flush=True)
    log_dir, root = folder.resolve(), RECORDS.parent
    log_dir = log_dir.relative_to(root) if log_dir.is_relative_to(root) else log_dir  # a log names no home folder
    left, began = order[len(runs) :], time.monotonic()
    if left and (load := os.getloadavg()[0]) > BUSY:
        print(f"the load of the last minute is {load:.1f}: times mean little if anything else runs", file=sys.stderr)
    for done, (seed, script) in enumerate(left, start=1):
        run_id = run_id_of(seed, script)
        for suffix in (".txt", ".json"):  # of a run that was stopped
            (folder / f"{run_id}{suffix}").unlink(missing_ok=True)
        run = Run(script, seed, **runners[script](seed, run_id, log_dir))
        (folder / f"{run_id}.pt").unlink(missing_ok=True)  # the model is of no use here
        runs.append(run)
        checked_order(folder / FILE, document, runs)
        document["runs"].append(vars(run))
        write(folder / FILE, document)
        seconds = (time.monotonic() - began) / done * (len(left) - done)
        told = f"val_loss {run.val_loss:.4f}, train time {run.train_time:.0f} ms"
        remaining = f"{len(runs)}/{len(order)}, {datetime.timedelta(seconds=round(seconds))} left"
        print(f"{run_id}: {told}; {remaining}", file=sys.stderr, flush=True)
    document["comparisons"] = comparisons(runs)
    write(folder / FILE, document)
    for i, script in enumerate(document["scripts"]):
        low, *_, high = sorted(run.train_time for run in of(i, runs))
        if high > 2 * low:
            print(f"{script['name']} took {low:.0f} to {high:.0f} ms: something else ran; race again", file=sys.stderr)
    return document


def told(document: dict) -> str:
    """Return the comparisons in words."""
    names = [script["name"] for script in document["scripts"]]
    compared = zip(pairwise(names), document["comparisons"], strict=True)
    return "\n".join(proof.told(*pair, found) for pair, found in compared)


def race(
    names: Sequence[str], pairs: int, seed: int, nproc: int, flags: Sequence[str], root: Path, **folders: Path | None
) -> dict:
    """Race training scripts, frozen as they are now, with these flags."""
    if any(flag.split("=")[0] in ("--seed", "--log_dir", "--run_id") for flag in flags):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out after --")
    scripts = [read_script(name, root) for name in names]
    plan = plan_of(scripts, flags, pairs, seed, nproc)
    before = rivals(lineage(root), "nano" if is_nano(flags) else "gpt2 on 8xH100" if nproc == 8 else "gpt2")
    folder = folders["resume"] or folders["out"] or Path("logs/new")
    others = sorted({*folder.parent.glob(f"*/{FILE}"), *root.glob(f"*/{FILE}")} - {folder / FILE})
    problem = obstacle(plan, before) or (before and too_different(scripts[0], before[-1])) or used_seeds(plan, others)
    if len({source for _, source in scripts}) < len(scripts):
        print("two of these scripts are the same: they differ by chance alone", file=sys.stderr)
    elif problem:
        print(f"no record can come of this race: {problem}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        runners = []
        for i, (_, source) in enumerate(scripts):
            path = Path(temporary) / str(i) / "train_gpt.py"
            path.parent.mkdir()
            path.write_text(source + "\n", encoding="utf-8")
            runners.append(functools.partial(run_script, path, flags, nproc))
        return in_turn(plan, runners, **folders)
