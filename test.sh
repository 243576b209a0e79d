#!/usr/bin/env bash
# Set up what is missing and run the tests: ./test.sh [flags of pytest]
#
#   ./test.sh            the fast ones, which need neither a GPU nor the network
#   ./test.sh --idea     without those that hold train_gpt.py to a record's numbers: for a script with an idea in it
#   ./test.sh -m slow    those that take longer
#   ./test.sh -m gpu     the self-test of a machine with GPUs: run it before the first training there
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")"
source speedrun/environment.sh
if [[ " $* " == *" -m gpu "* ]]; then # where there may be no network, and no need of the linter and the rest
    find_python pytest
    exec "$python" -m pytest tests/test_gpu.py "$@"
fi
find_python dev race text
case "$*" in
"" | --idea) set -- --numprocesses 2 --dist loadfile "$@" ;; # two files at a time; a few tests start sooner alone
esac
exec "$python" -m pytest "$@"
