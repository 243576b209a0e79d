#!/usr/bin/env bash
# Set up what is missing and run the tests: ./test.sh [flags of pytest]
#
#   ./test.sh            the fast ones, which need neither a GPU nor the network
#   ./test.sh -m slow    those that take longer
#   ./test.sh -m gpu     the self-test of a machine with GPUs: run it before the first training there
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")"
source speedrun/environment.sh
find_python requirements.txt data/requirements.txt tests/requirements.txt records/requirements.txt
[ $# -gt 0 ] || set -- --numprocesses 2 --dist loadfile # two files at a time; a few tests start sooner alone
exec "$python" -m pytest "$@"
