#!/usr/bin/env bash
# Set up what is missing and run the tests: ./test.sh [flags of pytest]
#
#   ./test.sh            the unit tests: 35 s on two cores, which need neither a GPU nor the network
#   ./test.sh --idea     without those that hold train_gpt.py to a record's numbers: for a script with an idea in it
#   SCRIPT=my.py ./test.sh --idea    of a copy of train_gpt.py
#   ./test.sh -m slow    those that take longer: kills, processes, a record's numbers, compilation
#   ./test.sh -m frozen  those that run once a week: older records, and all layers on a pretended GPU
#   ./test.sh -m gpu     the self-test of a machine with GPUs: run it before the first training there
#
# Two processes run them; `-n 0` is none beside pytest's own, as --pdb needs.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")"
source speedrun/environment.sh
[ -f "${SCRIPT:-train_gpt.py}" ] || fail "SCRIPT=$SCRIPT: there is no such file in $PWD"
if [[ " $* " == *" -m gpu "* ]]; then # where there may be no network, and no need of the linter and the rest
    find_python pytest
    exec "$python" -m pytest tests/test_gpu.py "$@"
fi
find_python dev tools
exec "$python" -m pytest --numprocesses 2 --dist worksteal "$@"
