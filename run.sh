#!/usr/bin/env bash
# Set up what is missing, check, and train: ./run.sh [flags of train_gpt.py]
#   ./run.sh                                            gpt2, the record configuration, on GPUs; nano elsewhere
#   ./run.sh --preset nano --num_iterations 300         any flags; --help lists them
#   ./run.sh --check                                    all but the training: checks, and data that are missing
#   NPROC=2 ./run.sh                                    two processes instead of as many as fit
#   PYTHON=python3.12 ./run.sh                          this Python, or an environment made with it
#   SCRIPT=records/TRACK/NAME/train_gpt.py ./run.sh     another script, with flags of its own
# Paths are relative to the repository. Exit codes: 0 trained, 2 something has to be fixed first (a line says what),
# 3 the loss became NaN or infinite, 130 interrupted; with several processes torchrun makes it 1.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")" # it may be started through a link
source speedrun/environment.sh
[ -f "${SCRIPT:=train_gpt.py}" ] || fail "SCRIPT=$SCRIPT: there is no such file in $PWD"
[[ ${NPROC:=0} =~ ^[0-9]+$ ]] || fail "NPROC=$NPROC: expected a number"
find_python
# Pages go on with `source .venv/bin/activate`. Say once, before the first run makes logs, or where that would mislead
if [ "$python" != .venv/bin/python ] && { is_stale || ! { [ -d .venv ] || [ -d logs ]; }; }; then
    echo "run.sh: $python has all packages, so no .venv was made: start the other commands with it" >&2
fi
SCRIPT=$SCRIPT exec "$python" -m speedrun run "$@"
