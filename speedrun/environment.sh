# shellcheck shell=bash
# Sourced by run.sh, test.sh and .ci/run, in the repository's root. `find_python FILE...` sets $python to one that meets
# the requirements files: $PYTHON or the python3 on the PATH if they do, else that of .venv, which is made, completed or
# rebuilt if need be. Before that downloads anything, needs.py looks at the machine, and at the flags in $flags.

# Speed on CPUs. OpenMP's threads spin while they wait for each other, by default so long that a nano step takes up to
# 1.6 s instead of 0.04 where something else uses a core, too; with this 0.15, and as fast as before where not. glibc
# hands large freed blocks back to the system and faults them in anew, which takes 15% of a nano step: let it keep them.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}

# Exit with 0 if the packages of the requirements files are installed
probe='
import re, sys
from importlib.metadata import version
names = [re.split("[=<>~ ]", line)[0] for path in sys.argv[1:] for line in open(path) if line[0].isalpha()]
versions = [version(name) for name in names]
sys.exit(sys.version_info < (3, 11) or tuple(map(int, version("torch").split(".")[:2])) < (2, 11))
'
# Exit with 0 if no file is missing that pip says it installed
whole='
from importlib.metadata import distributions
files = [file for package in distributions() for file in package.files or () if file.suffix != ".pyc"]
raise SystemExit(not all(file.locate().exists() for file in files))
'

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

case $(uname -s) in
MINGW* | MSYS* | CYGWIN*) fail "Windows is not supported: start this in WSL" ;;
esac
flags='--device cpu' # of train_gpt.py; run.sh has its own

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

meets() { # PYTHON FILE...
    "$1" -c "$probe" "${@:2}" >/dev/null 2>&1
}

is_whole() {
    [ -e .venv/bin/activate ] && "$python" -I -c "$whole" >/dev/null 2>&1
}

# Make, complete or rebuild .venv. It holds the file `unfinished` while that is going on, so that what was interrupted
# is recognized. File descriptor 9 is a file to lock.
make_environment() { # FILE...
    local base=$python candidate file index requirements=()
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        echo "waiting for another ${0##*/} to finish .venv" >&2
        flock 9 || true # a file system without locks
    fi
    if [ ! -e .venv/unfinished ] && meets "$python" "$@"; then
        return # the other one has made it
    fi
    if ! "$python" -c '' >/dev/null 2>&1 || { [ -e .venv/unfinished ] && ! is_whole; }; then
        base=
        for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
            if is_new_enough "$candidate"; then
                base=$candidate
                break
            fi
        done
        [ -n "$base" ] || fail "no Python 3.11 or newer found: install one, or name it: PYTHON=/path/to/python $0"
    fi
    # The default wheels of torch need CUDA 13, and bring gigabytes of CUDA that are useless without an NVIDIA GPU
    index=$("$base" speedrun/needs.py "$flags") || fail "$index"
    if [ "$base" != "$python" ]; then
        if [ -L .venv ] && [ ! -e .venv ]; then
            rm .venv # a link to a folder that is gone
        elif [ -e .venv ] && [ ! -e .venv/unfinished ] && [ ! -e .venv/pyvenv.cfg ] && ! rmdir .venv 2>/dev/null; then
            fail ".venv is in the way and no Python environment: move it away"
        fi
        echo "making the environment .venv, once: this can take some minutes" >&2
        mkdir -p .venv && : >.venv/unfinished || fail ".venv cannot be written in $PWD"
        rm -rf .venv/bin .venv/include .venv/lib .venv/lib64 .venv/share .venv/pyvenv.cfg
        "$base" -m venv .venv ||
            fail "$base cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"
    fi
    is_new_enough "$python" || fail ".venv is of a Python older than 3.11: remove it, or name a newer one: PYTHON=... $0"
    : >.venv/unfinished || fail ".venv cannot be written in $PWD"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || fail ".venv has no pip"
    if [ -n "$index" ]; then # if that fails, the default wheels will do
        "$python" -m pip --disable-pip-version-check install --quiet --timeout 5 --retries 0 \
            --index-url "https://download.pytorch.org/whl/$index" "$(grep '^torch==' requirements.txt)" >/dev/null 2>&1 || true
    fi
    for file in "$@"; do
        requirements+=(--requirement "$file")
    done
    "$python" -m pip --disable-pip-version-check install --quiet "${requirements[@]}" >&2 ||
        fail "the packages of $* could not be installed: see above; then run $0 again"
    rm -f .venv/unfinished
}

find_python() { # FILE...
    [ -z "${PYTHON:-}" ] || is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer"
    python=${PYTHON:-python3}
    meets "$python" "$@" && return
    python=.venv/bin/python
    if [ -e .venv/unfinished ] || ! meets "$python" "$@"; then
        trap 'exit 130' INT # pip ends with 1 when it is interrupted, as if it had failed
        make_environment "$@" 9<speedrun/environment.sh
        trap - INT
    fi
}
