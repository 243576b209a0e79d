# shellcheck shell=bash
# Sourced by run.sh and test.sh. `find_python FILE...` sets $python to one that meets the requirements files: $PYTHON or
# the python3 on the PATH if they do, else that of .venv, which is made or completed.

probe='
import re, sys
from importlib.metadata import version
names = [re.split("[=<>~ ]", line)[0] for path in sys.argv[1:] for line in open(path) if line[0].isalpha()]
versions = [version(name) for name in names]
sys.exit(sys.version_info < (3, 11) or tuple(map(int, version("torch").split(".")[:2])) < (2, 11))
'

find_python() {
    local base candidate file torch requirements=()
    for candidate in "${PYTHON:-python3}" .venv/bin/python; do
        if "$candidate" -c "$probe" "$@" >/dev/null 2>&1; then
            python=$candidate
            return
        fi
    done
    if [ ! -x .venv/bin/python ]; then
        base=
        for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
                base=$candidate
                break
            fi
        done
        if [ -z "$base" ]; then
            echo "${0##*/}: ${PYTHON:-python3} is not Python 3.11 or newer: install one, or name it: PYTHON=/path/to/python $0" >&2
            exit 2
        fi
        echo "making the environment .venv, once: this can take some minutes" >&2
        if ! "$base" -m venv .venv; then
            rm -rf .venv
            echo "${0##*/}: $base cannot make environments: install its venv package (Debian, Ubuntu: python3-venv)" >&2
            exit 2
        fi
    fi
    python=.venv/bin/python
    # The default Linux build of torch brings gigabytes of CUDA; without an NVIDIA GPU the CPU build does
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then
        torch=$(grep '^torch==' requirements.txt)
        "$python" -m pip --disable-pip-version-check install --quiet --timeout 5 --retries 0 \
            --index-url https://download.pytorch.org/whl/cpu "$torch" >/dev/null 2>&1 || true
    fi
    for file in "$@"; do
        requirements+=(--requirement "$file")
    done
    if ! "$python" -m pip --disable-pip-version-check install --quiet "${requirements[@]}" >&2; then
        echo "${0##*/}: the packages of $* could not be installed: see above; then run $0 again" >&2
        exit 2
    fi
}
