"""Say in one line which Python or package a command lacks. Commands import this first; it takes no packages.

python -m speedrun.needs [EXTRA...]    print the requirements that this Python lacks, one a line
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from speedrun import ROOT

OLDEST_TORCH = (2, 11)


def typed(path: Path | str) -> str:
    """Return a path as it can be typed here."""
    text = str(path).removeprefix(f"{os.getcwd()}/")
    return shlex.quote(text if "/" in text else f"./{text}")


PYTHON = typed(sys.executable)
PIP = f"{PYTHON} -m pip install"


def is_installed(name: str) -> bool:
    """Tell whether a package is there. Its version does not matter, but torch must not be too old."""
    try:
        version = importlib.metadata.version(name) or ""  # none where pip was killed
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return False
    return bool(version) and (name != "torch" or tuple(map(int, version.split(".")[:2])) >= OLDEST_TORCH)


def missing(*extras: str) -> list[str]:
    """List what this Python lacks of requirements.txt and of the extras in pyproject.toml; other names are packages."""
    import tomllib  # from Python 3.11 on

    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = (ROOT / "requirements.txt").read_text().split()
    wanted += [requirement for extra in extras for requirement in optional.get(extra, [extra])]
    return [requirement for requirement in wanted if not is_installed(requirement.partition("==")[0])]


@contextlib.contextmanager
def packages(*extras: str) -> Iterator[None]:
    """Let imports that fail end the program with code 2 and a line that says how to get what is missing."""
    path = Path(sys.argv[0])
    program = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    try:
        if sys.version_info < (3, 11):  # noqa: UP036
            raise ImportError(f"Python {platform.python_version()} is older than 3.11")
        yield
    except (ImportError, OSError) as error:  # the latter: a shared library is missing
        fix = f"{typed(ROOT / 'run.sh')} --check makes {typed(ROOT / '.venv/bin/python')}: use that"
        if sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ:  # else pip may refuse
            fix = " ".join([PIP, *missing(*extras)])
        print(f"{program}: {' '.join(str(error).split())}; {fix}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    print(*missing(*sys.argv[1:]), sep="\n")
