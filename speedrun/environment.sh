# shellcheck shell=bash disable=SC2086 # $missing is a list
# Sourced in the repository's root by run.sh, test.sh, runs/first_gpu_run.sh and .ci/run. `find_python [EXTRA...]` sets
# $python to one that has the packages of requirements.txt and of these extras of pyproject.toml: $PYTHON or the python3
# on the PATH if they do, else that of .venv, which is made or completed. Nothing there is ever removed.

# Speed on CPUs. OpenMP's threads spin while they wait for each other, by default so long that a nano step takes up to
# 1.6 s instead of 0.04 where something else uses a core, too; with this 0.15, and as fast as before where not. glibc
# hands large freed blocks back to the system and faults them in anew, which takes 15% of a nano step: let it keep them.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
unset PYTHONSAFEPATH # `python -m speedrun` is found in this folder

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

case $(uname -sm) in
MINGW* | MSYS* | CYGWIN*) fail "Windows is not supported: start this in WSL" ;;
"Darwin x86_64") fail "PyTorch has no builds for Macs with Intel processors since 2.3" ;;
esac

lacks() { # PYTHON EXTRA...: print the requirements that it lacks. Fails if this is no Python from 3.11 on
    "$1" -m speedrun.needs "${@:2}" 2>/dev/null
}

meets() { # EXTRA...: set $missing to what $python lacks, and tell whether that is nothing
    missing=$(lacks "$python" "$@") && [ -z "$missing" ]
}

# The default wheels of torch need driver 580 for CUDA 13, and bring gigabytes that are useless without an NVIDIA GPU
torch_index() {
    local driver
    driver=$({ nvidia-smi --query-gpu=driver_version --format=csv,noheader || cat /proc/driver/nvidia/version; } 2>/dev/null |
        grep -oE '[0-9]{3}\.[0-9.]+' | head -n 1) || true
    driver=${driver%%.*}
    if [ "${driver:-0}" -lt 580 ]; then
        echo --index-url "https://download.pytorch.org/whl/$([ "${driver:-0}" -lt 525 ] && echo cpu || echo cu126)"
    fi
}

make_environment() { # EXTRA..., with a file to lock as file descriptor 9
    local base missing
    flock 9 2>/dev/null || true # not all file systems have locks
    meets "$@" && return # another process has made it
    echo "completing the environment .venv, once: this can take some minutes" >&2
    # uv, where it is installed, finds or fetches a Python, and chooses the wheels of torch by itself
    if command -v uv >/dev/null && uv venv --quiet --allow-existing --python "${PYTHON:->=3.11}" .venv >&2; then
        meets "$@" || uv pip install --quiet --python .venv --torch-backend=auto $missing >&2 && meets "$@" && return
        echo "uv failed, see above: pip goes on" >&2
    fi
    if ! "$python" -m pip --version &>/dev/null; then # there is none, or making it was interrupted
        for base in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python ''; do
            lacks "$base" >/dev/null && break
        done
        [ -n "$base" ] || fail "no Python 3.11 or newer found: install one, or name it: PYTHON=/path/to/python $0"
        "$base" -m venv .venv >&2 || fail "$base could not make .venv (Debian, Ubuntu: apt install python3-venv)"
    fi
    meets "$@" && return
    [ -n "$missing" ] || fail ".venv has no Python from 3.11 on, or it is gone: rm -r .venv"
    local install=("$python" -m pip install --quiet --disable-pip-version-check)
    if [[ $missing == torch==* ]]; then # if that fails, the default wheels will do
        # shellcheck disable=SC2046 # a flag and its value
        "${install[@]}" --timeout 5 --retries 0 $(torch_index) "${missing%%$'\n'*}" &>/dev/null || true
    fi
    "${install[@]}" $missing >&2 || fail "pip failed, see above; then run $0 again"
    meets "$@" || fail "pip has put packages elsewhere: see $python -m pip config list"
}

find_python() { # EXTRA...
    python=${PYTHON:-python3}
    [ -z "${PYTHON:-}" ] || lacks "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not Python 3.11 or newer"
    meets "$@" && return
    python=.venv/bin/python
    meets "$@" && return
    make_environment "$@" 9<speedrun/environment.sh
}
