"""What the tools share: errors of one line, packages that are missing, a lock for a folder, and child processes."""

import contextlib
import ctypes
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from speedrun import ROOT

# Speed on CPUs. OpenMP's threads spin while they wait for each other, by default so long that a nano step takes up to
# 1.6 s instead of 0.04 where something else uses a core, too. glibc hands large freed blocks back to the system and
# faults them in anew, which takes 15% of a nano step: let it keep them. environment.sh exports the same (tested)
ENVIRONMENT = dict(GOMP_SPINCOUNT="10000", MALLOC_TRIM_THRESHOLD_="2147483647", MALLOC_MMAP_THRESHOLD_="33554432")


class ToolError(Exception):
    """An error that the user can fix, in one line; exits with code 2."""


def typed(path: Path | str) -> str:
    """Return a path as it can be typed here."""
    text = str(path).removeprefix(f"{os.getcwd()}/")
    return shlex.quote(text if "/" in text else f"./{text}")


PYTHON = typed(sys.executable)
# What installs packages for this Python: environments that uv made without --seed have no pip
PIP = f"{PYTHON} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {PYTHON}"


@contextlib.contextmanager
def packages(extra: str = "") -> Iterator[None]:
    """End the program with code 2 if an import fails, and say how to get the packages, of this extra, too."""
    try:
        yield
    except (ImportError, OSError) as error:  # the latter: a shared library is missing
        what = f'-e "{typed(ROOT)}[{extra}]"' if extra else f"-r {typed(ROOT / 'requirements.txt')}"
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}; {PIP} {what}", file=sys.stderr)
        sys.exit(2)


def printable(text: str) -> str:
    """Replace control characters, such as the escape sequences of a terminal, but no line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def run(program: str, action: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Do what the flags say, and return the exit code.

    Errors of the user, of files and of train_gpt.py (whose UserError has a code) get one line and code 2, a signal to
    stop 130. Other errors are bugs, and keep their traceback.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        code = action(argv) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the text, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered shall not fail at the exit
        return 0
    except KeyboardInterrupt:
        problem, code = "interrupted", 130
    except Exception as error:
        if not isinstance(error, ToolError | OSError) and not hasattr(error, "code"):
            raise
        problem, code = " ".join(str(error).split()), getattr(error, "code", 2)
    print(f"{program}: {printable(problem)}", file=sys.stderr)
    return code


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def held(folder: Path, told: str) -> Iterator[None]:
    """Make a folder and lock it until this process, or what takes its place, ends. Raise ToolError if one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(f"{folder}: {told}") from None
        except OSError:  # the file system has no locks
            pass
        os.set_inheritable(lock, True)  # by exec; subprocess closes it
        yield
    finally:
        os.close(lock)


def run_python(arguments: Sequence[str], **environment: str) -> str:
    """Run Python in the repository's root, and return its stdout.

    Raise ToolError with the last line of one that failed. Where this process is stopped, the other one is, first.
    """
    how: dict = dict(cwd=ROOT, env=ENVIRONMENT | dict(os.environ) | environment, text=True, errors="replace")
    pipes: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, *arguments], **how, **pipes) as child:
        try:
            stdout, stderr = child.communicate()
        except BaseException:
            child.terminate()  # torchrun ends its ranks, after 30 s by force
            raise
    if child.returncode != 0:
        *_, last = (stderr.strip() or stdout.strip() or "it printed nothing").splitlines()
        raise ToolError(f"exit code {child.returncode}: {last}")
    return stdout


# ---- Below: leaves with the modules that use it
LIBC = ctypes.CDLL(None)  # here, as a process that has just been forked should not load libraries
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
