"""What the tools share: errors of one line, packages that are missing, a lock for a folder, and child processes."""

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import symtable
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


PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip install"  # environment.sh sees to it that .venv has pip, which uv leaves out


@contextlib.contextmanager
def packages(extra: str = "") -> Iterator[None]:
    """End the program with code 2 if an import fails, and say how to get the packages, of this extra, too."""
    try:
        yield
    except (ImportError, OSError) as error:  # the latter: a shared library is missing
        if getattr(error, "name", None) in sys.modules:  # no package is missing, but a name in one
            raise
        what = f'-e "{ROOT}[{extra}]"' if extra else f'-r "{ROOT}/requirements.txt"'
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}; {PIP} {what}", file=sys.stderr)
        sys.exit(2)


def defined_names(source: str, path: str) -> set[str]:
    """Return the names that a script defines or imports, without running it."""
    symbols = symtable.symtable(source, path, "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_local()}


def printable(text: str) -> str:
    """Replace control characters, such as the escape sequences of a terminal, but no line ends and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def run(program: str, action: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Do what the flags say, and return the exit code.

    Errors of the user, of files (a script may be no Python) and of train_gpt.py (whose UserError has a code) get one
    line and code 2, a signal to stop 130. Other errors are bugs, and keep their traceback.
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
    except (KeyboardInterrupt, SystemExit) as error:
        if getattr(error, "code", 130) != 130:  # with which train_gpt.py exits if it is stopped while it loads
            raise
        problem, code = "interrupted", 130
    except Exception as error:
        if not isinstance(error, ToolError | OSError | SyntaxError) and not hasattr(error, "code"):
            raise
        problem, code = " ".join(str(error).split()), getattr(error, "code", 2)
    print(f"{program}: {printable(problem)}", file=sys.stderr)
    return code


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def held(folder: Path, message: str) -> Iterator[None]:
    """Make a folder and lock it until this process, and what run_python started, ends; one that is locked is refused.

    What takes the place of this process by exec holds it, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(f"{folder}: {message}") from None
        except OSError:  # the file system has no locks
            pass
        os.set_inheritable(lock, True)
        yield
    finally:
        os.close(lock)


def run_python(arguments: Sequence[str]) -> None:
    """Run Python in the repository's root. Raise ToolError if it fails, after what it had to say.

    Where this process is stopped, the other one is, first.
    """
    how: dict = dict(cwd=ROOT, env=ENVIRONMENT | os.environ, text=True, errors="replace")
    how |= dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, close_fds=False)  # so that it has our locks, too
    with subprocess.Popen([sys.executable, *arguments], **how) as child:
        try:
            _, told = child.communicate()
        except BaseException:
            child.terminate()  # torchrun ends its ranks, after 30 s by force
            raise
    if child.returncode != 0:
        print(printable(told), file=sys.stderr)
        raise ToolError(f"exit code {child.returncode}, see above")
