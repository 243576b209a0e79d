"""Run scripts in turn on this machine and say by how much they differ; write and read race.json."""

import datetime
import json
import os
import re
import shlex
import string
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from speedrun import proof, tried
from speedrun.logs import (
    FLAGS,
    RECORDS,
    TEXT,
    Log,
    ToolError,
    check,
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
from speedrun.process import own_process
from speedrun.proof import MIN_PAIRS, SLACK, compare

FILE, OLDER = "race.json", "older"  # the latter: the folder of the older script's logs, beside the record's own
MAX_SCRIPTS = 26  # a letter each
PAIRS, SEEDS, PROCESSES, SHA256 = range(1, 1001), range(2**64), range(1, 1025), re.compile("[0-9a-f]{64}")
# Kinds, see `check`. Flags of a script are those that it has alone
SCRIPT = {"name": TEXT, "sha256": SHA256, "flags?": FLAGS}
RUN = {"script": range(MAX_SCRIPTS), "seed": SEEDS, "val_loss": float, "train_time": float}
RUN |= {"step_time?": float, "val_sha256?": SHA256, "hardware?": TEXT}
RACE = {"scripts": [SCRIPT], "flags": FLAGS, "pairs": PAIRS, "seed": SEEDS, "nproc_per_node": PROCESSES, "runs": [RUN]}
RACE |= {"comparisons": [{}]}
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
    document = read_json(path, RACE)
    check(path, len(document["scripts"]), range(2, MAX_SCRIPTS + 1), "scripts (their number)")
    return document, [Run(**{name: run.get(name) for name in Run.__annotations__}) for run in document["runs"]]


def planned(document: dict) -> tuple:
    """Return what a race is fixed by: its scripts, by SHA-256, flags, pairs, first seed, processes, scripts' flags."""
    scripts, keys = document["scripts"], ("flags", "pairs", "seed", "nproc_per_node")
    own = [script.get("flags") or [] for script in scripts]
    return [script["sha256"] for script in scripts], *(document[key] for key in keys), own


def of(script: int, runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.script == script]


def obstacle(plan: dict, rivals: Sequence[tuple[str, str]]) -> str | None:
    """Say why no record can come of a race with this plan against one of `rivals` (name, source), or return None."""
    hashes, flags, pairs, _, nproc, own = planned(plan)
    if trains(plan, "mini"):
        return "mini has no leaderboard, it screens ideas for gpt2"
    is_one_gpu = nproc == 1 and not is_nano(plan)
    allowed = SAME_TRAINING | ON_ONE_GPU if is_one_gpu else SAME_TRAINING
    names = [{word.split("=")[0] for word in words if word.startswith("--")} for words in (flags, [*chain(*own)])]
    if others := names[0] - allowed | names[1]:
        return f"flags {', '.join(sorted(others))}: put settings into the script, race without"
    if rivals and not any(digest(source) in hashes for _, source in rivals):
        return f"not the script of {' or '.join(name for name, _ in rivals)}: race against it as it is"
    return f"fewer than {MIN_PAIRS} pairs are a screen: race with --pairs {MIN_PAIRS}" if pairs < MIN_PAIRS else None


def trains(plan: dict, preset: str) -> bool:
    _, flags, *_, own = planned(plan)
    return any(flag.split("=")[-1] == preset for flag in chain(flags, *own))


def is_nano(plan: dict) -> bool:
    return trains(plan, "nano")


def slack_of(plan: dict) -> float:
    return SLACK["nano" if is_nano(plan) else "gpt2"]


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
    problem = obstacle(document, before)
    name, older = next((rival for rival in before if digest(rival[1]) in hashes), ("", ""))
    if not older:
        raise ToolError(f"{path}: {problem}")
    checked_order(path, document, runs)
    a, b = (of(hashes.index(digest(script)), runs) for script in (newer, older))
    found = compare(a, b, slack_of(document)) if a and b else {}
    if not problem and len(runs) != pairs * len(hashes):
        problem = f"has {len(runs)} runs, not {pairs} of each script; --resume the race"
    if not problem and logs is not None:
        others = [*others, *map(Log, log_paths(folder.parent / name))]
        others = [log for log in others if log.source in (older, digest(older)) and not log.incomplete]
        if len(logs) != len(a):
            counts = f"{len(a)} runs of the script, there are {len(logs)} sound logs"
            problem = f"has {counts}: leave none out"
        else:
            problem = run_problem(a, logs, flags, "the folder")
            problem = problem or run_problem(b, others, flags, f"its folder {OLDER}, nor in {name}")
    if problem:
        raise ToolError(f"{path}: {problem}. So far {proof.standing(found) if found else 'it has no pair'}")
    return name, found


def older_logs(race: Path, line: Sequence[Path], board: str) -> dict[str, str]:
    """Return name and text of the logs beside `race` of the script before, which its SHA-256 stands for."""
    hashes = planned(read_race(race)[0])[0]
    for _, script in rivals(line, board):
        if digest(script) in hashes:
            paths = race.parent.glob(run_id_of("*", hashes.index(digest(script))) + ".txt")
            return {path.name: without_script(read_text(path), script) for path in sorted(paths)}
    return {}


def run_problem(runs: Sequence[Run], logs: Sequence[Log], flags: Sequence[str], where: str) -> str | None:
    """Say that one of the race's runs has no log that says the same, or return None."""
    for run in runs:
        run_id = run_id_of(run.seed, run.script)
        own = [log for log in logs if log.flags[4:] == ["--run_id", run_id, *flags]]
        if not own:
            return f"no sound log of its run {run_id}, with the race's flags, is in {where}"
        if not any(Run(run.script, log.seed, **figures_of(log)) == run for log in own):
            return f"the log of its run {run_id} says otherwise; take the files that `race` left"
    return None


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


def matches(document: dict) -> list[tuple[int, int]]:
    """Return which scripts are compared: each with the next one, and all with the last."""
    last = len(document["scripts"]) - 1
    return [(i, i + 1) for i in range(last)] + [(i, last) for i in range(last - 1)]


def comparisons(document: dict, runs: Sequence[Run]) -> list[dict]:
    return [compare(of(a, runs), of(b, runs), slack_of(document)) for a, b in matches(document)]


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


def in_turn(plan: dict, paths: Sequence[Path], note: str, out: Path | None, resume: Path | None) -> dict:
    """Run each script once per round, and return the document of the race. The table of what was tried gets its rows.

    Every other round is in reverse: a drift of the machine's speed that is linear in time cancels in two of them.
    """
    import scipy.stats  # noqa: F401  to miss it now, and not after all runs

    folder, document, runs, _lock = begin(plan, out, resume)
    order = checked_order(folder / FILE, document, runs)
    stop = f"to stop it: kill -TERM {os.getpid()}; to go on: --resume {folder}"  # nohup and & ignore Ctrl-C
    print(f"{len(runs)}/{len(order)} runs; {stop}", file=sys.stderr, flush=True)
    log_dir, root = folder.resolve(), RECORDS.parent
    log_dir = log_dir.relative_to(root) if log_dir.is_relative_to(root) else log_dir  # a log names no home folder
    left, began = order[len(runs) :], time.monotonic()
    if left and (load := os.getloadavg()[0]) > BUSY:
        print(f"the load of the last minute is {load:.1f}: times mean little if anything else runs", file=sys.stderr)
    for done, (seed, script) in enumerate(left, start=1):
        run_id = run_id_of(seed, script)
        for suffix in (".txt", ".json"):  # of a run that was stopped
            (folder / f"{run_id}{suffix}").unlink(missing_ok=True)
        flags = document["flags"] + planned(document)[-1][script]
        run = Run(script, seed, **run_script(paths[script], flags, plan["nproc_per_node"], seed, run_id, log_dir))
        (folder / f"{run_id}.pt").unlink(missing_ok=True)  # the model is of no use here
        runs.append(run)
        checked_order(folder / FILE, document, runs)
        document["runs"].append(vars(run))
        write(folder / FILE, document)
        seconds = (time.monotonic() - began) / done * (len(left) - done)
        told = f"val_loss {run.val_loss:.4f}, train time {run.train_time:.0f} ms"
        remaining = f"{len(runs)}/{len(order)}, {datetime.timedelta(seconds=round(seconds))} left"
        print(f"{run_id}: {told}; {remaining}", file=sys.stderr, flush=True)
    document["comparisons"] = comparisons(document, runs)
    write(folder / FILE, document)
    tried.append(document, matches(document), note)
    for i, script in enumerate(document["scripts"]):
        times = [run.train_time for run in of(i, runs)]
        if (high := max(times)) > 2 * (low := min(times)):
            print(f"{script['name']} took {low:.0f} to {high:.0f} ms: something else ran; race again", file=sys.stderr)
    return document


def told(document: dict) -> str:
    """Return the comparisons in words."""
    names = [script["name"] for script in document["scripts"]]
    compared = zip(matches(document), document["comparisons"], strict=True)
    return "\n".join(proof.told(names[a], names[b], found) for (a, b), found in compared)


def script_of(name: str, root: Path) -> tuple[str, dict]:
    """Return the source of the script that `name` names, and what race.json says of it.

    Flags of its own may follow, as in "train_gpt.py --muon_lr 0.05".
    """
    try:
        script, *flags = [name] if os.path.exists(name) else shlex.split(name) or [name]
    except ValueError as error:
        raise ToolError(f"{shown(name)}: expected a script, perhaps with flags ({error})") from None
    label, source = read_script(script, root)
    return source, dict(name=shlex.join([label, *flags]), sha256=digest(source)) | (dict(flags=flags) if flags else {})


def race(
    names: Sequence[str], pairs: int, seed: int, nproc: int, flags: Sequence[str], root: Path, note: str, **folders
) -> dict:
    """Race training scripts, frozen as they are now, with these flags."""
    sources, scripts = zip(*(script_of(name, root) for name in names), strict=True)
    plan = dict(scripts=[*scripts], flags=[*map(str, flags)], pairs=pairs, seed=seed, nproc_per_node=nproc)
    if any(flag.split("=")[0] in ("--seed", "--log_dir", "--run_id") for flag in chain(flags, *planned(plan)[-1])):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out")
    if not (2 <= len(names) <= MAX_SCRIPTS and pairs in PAIRS and seed in SEEDS and nproc in PROCESSES):
        numbers = f"--pairs from 1 to {PAIRS[-1]}, --seed from 0, --nproc_per_node from 1"
        raise ToolError(f"a race needs 2 to {MAX_SCRIPTS} scripts, {numbers}")
    before = rivals(lineage(root), "nano" if is_nano(plan) else "gpt2 on 8xH100" if nproc == 8 else "gpt2")
    folder = folders["resume"] or folders["out"] or Path("logs/new")
    others = sorted({*folder.parent.glob(f"*/{FILE}"), *root.glob(f"*/{FILE}")} - {folder / FILE})
    size_problem = before and too_different((names[0], sources[0]), before[-1])
    problem = obstacle(plan, before) or size_problem or used_seeds(plan, others)
    if len({(script["sha256"], *script.get("flags", [])) for script in scripts}) < len(scripts):
        print("two of these scripts are the same: they differ by chance alone", file=sys.stderr)
    elif problem:
        print(f"no record can come of this race: {problem}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        paths = [Path(temporary) / str(i) / "train_gpt.py" for i in range(len(sources))]
        for path, source in zip(paths, sources, strict=True):
            path.parent.mkdir()
            path.write_text(source + "\n", encoding="utf-8")
        return in_turn(plan, paths, note, **folders)
