"""Runs two scripts in turn on this machine, and says by how much they differ."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from records.logs import RECORDS, ToolError, read_json, read_log, read_script, shown
from records.proof import detectable, interval, ratio_interval


@dataclass(frozen=True)
class Run:
    """Times in ms; the step time is the median of the step lines."""

    seed: int
    val_loss: float
    train_time: float
    step_time: float
    val_sha256: str | None


def run_script(script: Path, seed: int, run_id: str, log_dir: Path, flags: Sequence[str]) -> Run:
    """Runs it from the repository's root. Raises ToolError with the last line that a failed run wrote to stderr."""
    command = [sys.executable, str(script), "--seed", str(seed), "--log_dir", str(log_dir), "--run_id", run_id, *flags]
    # Threads that wait for long with a busy loop take the core from those that work
    environment = {"GOMP_SPINCOUNT": "10000"} | dict(os.environ)
    done = subprocess.run(
        command, cwd=RECORDS.parent, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise ToolError(
            f"run {run_id} failed with exit code {done.returncode}: {shown(last, 300)}; mend it, race again"
        )
    log = read_log(log_dir / f"{run_id}.txt")
    result = read_json(log.path.with_suffix(".json"))
    loss, time = result.get("val_loss"), result.get("train_time_ms")
    step_time = log.step_time or 0.0
    if not isinstance(loss, float) or not isinstance(time, float) or time <= 0 or step_time <= 0:
        raise ToolError(f"run {run_id} states no val_loss, train_time_ms or step times; race for at least 2 steps")
    if result.get("seed") != seed:
        raise ToolError(
            f"run {run_id} took seed {shown(str(result.get('seed')))}, not {seed}; leave --seed to the race"
        )
    return Run(seed, loss, time, step_time, log.val_sha256)


def compare(a: Sequence[Run], b: Sequence[Run]) -> dict:
    """Ratios a / b and the difference of losses a - b, each with its 95% interval; a[i] and b[i] are a pair."""
    ratios = {}
    for key in ("train_time", "step_time"):
        of_a, of_b = ([getattr(run, key) for run in runs] for runs in (a, b))
        ratios[key] = dict(zip(("ratio", "low", "high"), ratio_interval(of_a, of_b), strict=True))
        ratios[key] |= {"a_ms": statistics.fmean(of_a), "b_ms": statistics.fmean(of_b)}
    differences = [x.val_loss - y.val_loss for x, y in zip(a, b, strict=True)]
    loss = dict(zip(("difference", "low", "high"), interval(differences), strict=True))
    spread = statistics.stdev(x.train_time / y.train_time for x, y in zip(a, b, strict=True))
    return dict(pairs=len(a), **ratios, val_loss=loss, detectable=detectable(spread, len(a)))


def race(names: Sequence[str], pairs: int, warmup: int, seed: int, flags: Sequence[str], root: Path, keep: Path | None):
    """The comparison of two scripts after `pairs` runs of each, in the order A B B A A B ...

    A drift of the machine's speed that is linear in time cancels in each two pairs. `warmup`: runs of each beforehand
    that do not count.
    """
    if pairs < 2:
        raise ToolError("an interval needs at least --pairs 2")
    if any(flag.split("=")[0] in ("--seed", "--log_dir", "--run_id") for flag in flags):
        raise ToolError("--seed, --log_dir and --run_id are the race's own: leave them out after --")
    scripts = [read_script(name, root) for name in names]
    import scipy.stats  # noqa: F401  to miss it now, and not after all runs

    with tempfile.TemporaryDirectory(prefix="race-") as temporary:
        folder = Path(temporary)
        log_dir = (keep or folder / "logs").resolve()
        if keep is not None and keep.exists() and not keep.is_dir():
            raise ToolError(f"{keep} is a file; choose another --keep")
        paths = []
        for side, (_, script) in zip("ab", scripts, strict=True):
            path = folder / side / "train_gpt.py"
            path.parent.mkdir()
            path.write_text(script + "\n", encoding="utf-8")
            paths.append(path)
        runs: dict[str, list[Run]] = {"a": [], "b": []}
        tokens: str | None = None
        for pair in range(-warmup, pairs):
            for side in "ab" if pair % 2 == 0 else "ba":
                run_id = f"race-{'warmup' if pair < 0 else 'pair'}{pair if pair >= 0 else pair + warmup}-{side}"
                run = run_script(paths["ab".index(side)], seed + max(pair, 0), run_id, log_dir, flags)
                tokens = tokens or run.val_sha256
                if run.val_sha256 != tokens:
                    raise ToolError("the two scripts validate on different tokens: give both the same data after --")
                told = f"val_loss {run.val_loss:.4f}, train time {run.train_time:.0f} ms, step {run.step_time:.2f} ms"
                print(f"{run_id}, seed {run.seed}: {told}", file=sys.stderr, flush=True)
                if pair >= 0:
                    runs[side].append(run)
        each = {side: [vars(run) for run in found] for side, found in runs.items()}
        return dict(a=scripts[0][0], b=scripts[1][0]) | compare(runs["a"], runs["b"]) | dict(runs=each)
