"""Run scripts in turn on this machine and say by how much they differ."""

import contextlib
import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from speedrun import proof
from speedrun.logs import Log, ToolError, digest, shown
from speedrun.process import ROOT, held, own_process
from speedrun.proof import Race, Run, Script, figures_of, read_race
from speedrun.rules import obstacle, too_different
from speedrun.store import RACE, SCRIPT, TRACKS, lineage, read_script, rivals

Copy = tuple[Path, Path]  # of a script, and the folder where it imports from what lay beside it
CONTRACT = """A script has to accept --seed N, --log_dir FOLDER and --run_id NAME, and to write FOLDER/NAME.txt: its
source, a line of 100 '=', what it says of itself, the line again, and for each validation, at last that of step TOTAL,
'step:N/TOTAL val_loss:X train_time:Xms step_avg:Xms'."""


def run_script(copy: Copy, flags: Sequence[str], nproc: int, run_id: str, log_dir: Path, run: dict) -> Run:
    """Run a training script in the repository's root; `run` has index and seed, and the log says the rest."""
    script, beside = copy
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", f"--nproc_per_node={nproc}"]
    own = ["--seed", str(run["seed"]), "--log_dir", str(log_dir), "--run_id", run_id]
    paths = os.pathsep.join([str(beside), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    try:
        own_process([*torchrun * (nproc > 1), str(script), *own, *flags], PYTHONPATH=paths)
    except RuntimeError as error:
        fix = "with that mended, the same with --out goes on; with other flags or scripts, begin a new one"
        raise ToolError(f"run {run_id} failed: {shown(str(error), 300)}; {fix}") from None
    if not (path := ROOT / log_dir / f"{run_id}.txt").is_file():
        raise ToolError(f"run {run_id} ended well, but wrote no {path}; `race --help` says what a script has to do")
    if (log := Log(path)).problem:
        raise ToolError(f"{path}: {log.problem}")
    return Run(**run, **figures_of(log))


def clear(folder: Path, run_id: str, *kept: str) -> None:
    """Remove what a run left, such as checkpoints and the model."""
    for path in folder.glob(f"{run_id}.*"):
        if path.suffix not in kept:
            path.unlink()


def used_seeds(race: Race, paths: Iterable[Path]) -> str | None:
    """Say that one of these races had one of the planned seeds, or return None."""
    for path in paths:
        with contextlib.suppress(ToolError):  # what lies in logs/ may be old or cut
            theirs = {run.seed for run in read_race(path).runs}
            if theirs & {*range(race.seed, race.seed + race.pairs)}:
                return f"its seeds are not fresh, as {path} has some: race with --seed {max(theirs) + 1} or higher"
    return None


def in_turn(plan: Race, copies: Sequence[Copy], folder: Path) -> Race:
    """Run what is left of the rounds; every other one is in reverse, so that a linear drift of the speed cancels."""
    if not (path := folder / RACE).is_file():
        plan.write(path)  # so that a race can go on whose first run fails
    race = read_race(path)
    if race.plan != plan.plan:
        raise ToolError(f"{path}: was begun with other scripts, flags, pairs or seed: use the same, or another --out")
    race.check_order(path)
    stop = f"to stop it: kill -TERM {os.getpid()}; to go on: the same with --out {folder}"  # nohup and & ignore Ctrl-C
    print(f"{len(race.runs)}/{len(race.order)} runs; {stop}", file=sys.stderr, flush=True)
    log_dir = Path(str(folder.resolve()).removeprefix(f"{ROOT}/"))  # a log names no home folder
    left, began = race.order[len(race.runs) :], time.monotonic()
    if left and (load := os.getloadavg()[0]) > 0.7:  # two trainings at once were seen to take 5 to 10 times as long
        print(f"the load of the last minute is {load:.1f}: times mean little if anything else runs", file=sys.stderr)
    for done, (seed, script) in enumerate(left, start=1):
        run_id = race.run_id(seed, script)
        flags = race.flags + race.scripts[script].flags
        clear(folder, run_id)  # what a run left that was stopped
        try:
            run = run_script(
                copies[script], flags, race.nproc_per_node, run_id, log_dir, dict(script=script, seed=seed)
            )
        finally:
            clear(folder, run_id, ".txt", ".json")
        race.runs.append(run)
        race.check_order(path)
        race.write(path)
        seconds = (time.monotonic() - began) / done * (len(left) - done)
        rest = f"{len(race.runs)}/{len(race.order)}, {datetime.timedelta(seconds=round(seconds))} left"
        print(f"{run_id}: val_loss {run.val_loss:.4f}, {run.train_time:.0f} ms; {rest}", file=sys.stderr, flush=True)
    race.comparisons = [found for _, found in race.compared()]
    race.write(path)
    logs = " ".join(f"{folder / race.run_id(race.runs[-1].seed, i)}.txt" for i in range(len(race.scripts)))
    print(f"the last round as a page: python -m speedrun view {logs}", file=sys.stderr)
    return race


def get_data(race: Race, sources: Sequence[str]) -> None:
    """Let the preflight get the data before anything is written, if the scripts have our flags."""
    text = re.sub(r"(--\w+) ", r"\1=", " ".join([*race.flags, *race.own_flags]))
    if "--train_files" in text or not any("run_id" in source for source in sources):
        return
    command = [sys.executable, "-m", "speedrun", "check", *re.findall(r"--(?:preset|device)=\w+", text)]
    environment = os.environ | dict(SCRIPT="race", NPROC=str(race.nproc_per_node))  # other flags are their own
    if subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode:
        raise ToolError("the machine or the data are not ready, see above: mend that, then race again")


def race_scripts(names: Sequence[str], root: Path, flags: Sequence[str], out: Path | None, **settings) -> Race:
    """Race training scripts, frozen as they are now, but not what they import from their folders, with these flags."""
    folders, sources, scripts = list[Path](), list[str](), list[Script]()
    for name in names:  # a script, perhaps with flags of its own
        path, *own_flags = [name] if os.path.exists(name) else shlex.split(name) or [name]
        label, source = read_script(path, root)
        scripts.append(Script(shlex.join([label, *own_flags]), digest(source), own_flags))
        folders.append(Path(path).resolve().parent)
        sources.append(source)
    try:
        race = Race(scripts, [*map(str, flags)], date=str(datetime.date.today()), **settings)
    except ValueError as error:
        raise ToolError(str(error)) from None
    if any(flag.split("=")[0] in proof.OWN_FLAGS for flag in race.flags + race.own_flags):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out")
    track = TRACKS.get(race.preset)
    board = race.preset + (f" on {race.nproc_per_node}x" if track and track.machines else "")
    before = rivals(lineage(root), board)
    folder = out or Path("logs") / time.strftime("race-%Y%m%d-%H%M%S")
    others = sorted({*folder.parent.glob(f"*/{RACE}"), *root.glob(f"*/*/{RACE}")} - {folder / RACE})
    size_problem = before and too_different((names[0], sources[0]), before[-1], root.parent / SCRIPT)
    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        copies = [(Path(temporary) / f"script_{i}.py", beside) for i, beside in enumerate(folders)]
        for copy, source in zip(copies, sources, strict=True):
            copy[0].write_text(source + "\n", encoding="utf-8")
        get_data(race, sources)
        with held(folder, "another race runs there: wait for it, or choose another --out"):
            if problem := obstacle(race, before) or size_problem or used_seeds(race, others):
                print(f"no record can come of this race: {problem}", file=sys.stderr)
            return in_turn(race, copies, folder)
