#!/usr/bin/env bash
# Set up what is missing, check, and train: ./run.sh [flags of train_gpt.py]
#
#   ./run.sh                                            gpt2, the record configuration, on GPUs; nano elsewhere
#   ./run.sh --preset nano --num_iterations 300         any flags; --help lists them
#   ./run.sh --check                                    only the checks, with any flags, and all that they find
#   ./run.sh --check --card H100                        what gpt2 would take on one such card
#   NPROC=2 ./run.sh                                    two processes instead of as many as fit
#   PYTHON=python3.12 ./run.sh                          this Python, or an environment made with it
#   SCRIPT=records/TRACK/NAME/train_gpt.py ./run.sh     another script, with flags of its own
#
# Paths are relative to the repository. Exit codes: 0 trained, 2 something has to be mended first (a line for each
# thing says what), 3 the loss became NaN or infinite, 130 interrupted; with several processes torchrun makes it 1.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")" # it may be started through a link
source speedrun/environment.sh
script=${SCRIPT:-train_gpt.py}
[ -f "$script" ] || fail "SCRIPT=$script: there is no such file in $PWD"
find_python

for flag in "$@"; do
    case $flag in
    --help | -h)
        text=$("$python" "$script" --help) # first all of it: `head` reads no more than its lines
        printf '%s\n' "$text"
        exit
        ;;
    --check)
        "$python" -m speedrun.check "$@" || code=$?
        [ "${code:-0}" != 137 ] || fail "the check was killed, as Linux does where memory is short: give it more"
        exit "${code:-0}"
        ;;
    esac
done
exec "$python" -m speedrun.launch "$script" "$@"
