"""Run Python in a process that ends with this one, and say why it failed. Keep a second process out of a folder."""

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from speedrun import ROOT

# What environment.sh exports: short spinning of OpenMP's threads, freed memory that stays with the process
EXPORTS = Path(__file__).with_name("environment.sh").read_text(encoding="utf-8")
ENVIRONMENT = dict(re.findall(r"^export (\w+)=\$\{\1:-(\d+)\}$", EXPORTS, re.M))
LIBC = ctypes.CDLL(None)  # here, as a process that has just been forked should not load libraries
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def held(folder: Path, told: str) -> Iterator[None]:
    """Make a folder and lock it until this process, or what takes its place, ends. Raise OSError if one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder}: {told}") from None
        except OSError:  # the file system has no locks
            pass
        os.set_inheritable(lock, True)  # by exec; subprocess closes it
        yield
    finally:
        os.close(lock)


def last_words(text: str) -> str:
    """Return the last line that a failed process printed, or under torchrun the rank that failed first."""
    lines, (before, report, after) = text.splitlines(), text.partition("] failed (exitcode: ")
    if report:
        *lines, line = before.splitlines()
        rank = f"[rank{after.partition('local_rank: ')[2].split()[0]}]: "  # begins each line of its traceback
        own = [line for line in lines if line.startswith(rank)]
        own = own or [line for line in lines if not re.match(r"\[rank|[WE]\d{4} ", line)]  # the latter are torchrun's
        lines = own or [line + report + after.partition("\n")[0]]
    return lines[-1]


def end_with_parent() -> None:
    """Let this process get SIGTERM when its parent is killed, on Linux."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_all(process: subprocess.Popen[str]) -> None:
    """End a process with all that it started: torchrun's ranks are in sessions of their own."""
    import psutil

    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        tree = [top := psutil.Process(process.pid), *top.children(recursive=True)]
    for action, patience in (("terminate", 40), ("kill", None)):  # torchrun ends its ranks by force after 30 s
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(one, action)()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience)


def own_process(command: Sequence[str], **environment: str) -> str:
    """Run Python with these arguments in the repository's root and return its stdout.

    Raise RuntimeError with a failed one's last words. Ctrl-C, SIGTERM and SIGHUP end the process with all that it
    started, and raise KeyboardInterrupt here.
    """
    before = {number: signal.getsignal(number) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    process: subprocess.Popen[str] | None = None
    try:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=ENVIRONMENT | dict(os.environ) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that a terminal's Ctrl-C comes here alone
            preexec_fn=end_with_parent,
        )
        stdout, stderr = process.communicate()
    except BaseException:
        for number in before:  # all goes on to its end
            signal.signal(number, signal.SIG_IGN)
        if process is not None:
            end_all(process)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if process.returncode != 0:
        told = last_words(stderr.strip() or stdout.strip() or "it printed nothing")
        raise RuntimeError(f"exit code {process.returncode}: {told}")
    return stdout
