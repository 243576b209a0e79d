# shellcheck shell=bash disable=SC2086 # $missing is a list
# Sourced in the repository's root. `find_python [EXTRA...]` sets $python to one that has the packages of requirements.txt
# and these extras: $PYTHON or python3 if they do, else that of .venv, which is made or completed, without removing any;
# one that does not start, or came here from another folder, is made anew.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000} # as in speedrun/process.py, which says why
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
unset PYTHONSAFEPATH     # `python -m speedrun` is found in this folder
trap 'echo "${0##*/}: interrupted" >&2; exit 130' INT TERM # pip and uv, stopped, end as if they had failed

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

lacks() { # PYTHON NAME...: print what it lacks of requirements.txt and of these extras or packages; or fail
    "$1" - "${@:2}" 2>/dev/null <<'END_OF_PYTHON'
import os, sys, tomllib  # the latter came with Python 3.11
from importlib.metadata import version

assert sys.version_info < (3, 14)  # as pyproject.toml says

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
wanted = sum((extras.get(name, [name]) for name in sys.argv[1:]), open("requirements.txt").read().split())
# Every line that tells people to install something needs pip, and uv leaves it out
wanted += ["pip"] if os.path.realpath(sys.prefix) == os.path.realpath(".venv") else []
for requirement in wanted:
    name = requirement.partition("==")[0]
    try:
        is_there = version(name) and (name != "torch" or [*map(int, version(name).split(".")[:2])] >= [2, 11])
    except Exception:  # or pip was killed, and there is a part of it
        is_there = False
    if not is_there and (";" not in requirement or sys.platform in requirement):
        print(requirement)
END_OF_PYTHON
}

meets() { # NAME...: set $missing to what $python lacks, and tell whether that is nothing
    missing=$(lacks "$python" "$@") && [ -z "$missing" ]
}

is_stale() { # tell whether .venv has a Python that is gone, or an `activate` and a pip of another folder
    [ -d .venv ] && ! { .venv/bin/python -c "" && (
        set +u
        VIRTUAL_ENV=.venv # if there is no `activate`
        source .venv/bin/activate
        [ "$VIRTUAL_ENV" -ef .venv ]
    ); } &>/dev/null
}

make_environment() { # NAME..., with a file to lock as file descriptor 9
    local missing base=${PYTHON:-python3}
    flock 9 2>/dev/null || true # not all file systems have locks
    ! is_stale || rm -rf .venv || true # where it is mounted, its folder stays
    meets "$@" && return # another process has made it
    echo "completing the environment .venv, once: this can take some minutes" >&2
    if command -v uv >/dev/null; then # finds or fetches a Python, and chooses the wheels of torch; else pip goes on
        [ -n "$missing" ] || uv venv --quiet --allow-existing --python "${PYTHON:->=3.11,<3.14}" .venv >&2 || true
        meets "$@" || uv pip install --quiet --python .venv --torch-backend=auto $missing >&2 || true
    fi
    lacks "$python" >/dev/null || { lacks "$base" >/dev/null && "$base" -m venv .venv &>/dev/null; } ||
        fail "$base is not Python 3.11 to 3.13, or lacks venv (apt install python3-venv): name another, PYTHON=python3.12 $0"
    "$python" -m pip --version &>/dev/null || "$python" -m ensurepip --default-pip &>/dev/null || true
    meets "$@" || [ "$missing" = pip ] && return
    local pip=("$python" -m pip install --quiet --disable-pip-version-check)
    if [[ $missing == torch==* ]] && ! nvidia-smi &>/dev/null; then # the default wheels bring gigabytes for GPUs
        PIP_INDEX_URL=https://download.pytorch.org/whl/cpu "${pip[@]}" --timeout 5 --retries 0 ${missing%%$'\n'*} &>/dev/null || true
    fi
    "${pip[@]}" $missing >&2 && meets "$@" || fail "pip failed, see above: run $0 again, or remove .venv first"
}

find_python() { # NAME...
    python=${PYTHON:-python3}
    [ -z "${PYTHON:-}" ] || lacks "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not Python 3.11 to 3.13"
    meets "$@" && return
    python=.venv/bin/python
    ! is_stale && meets "$@" || make_environment "$@" 9<speedrun/environment.sh
}
