#!/usr/bin/env bash
# Set up what is missing, check, and train: ./run.sh [flags of train_gpt.py]
#
#   ./run.sh                                            gpt2, the record configuration, on GPUs; nano elsewhere
#   ./run.sh --preset nano --num_iterations 300         any flags; --help lists them
#   ./run.sh --check                                    only the checks, with any flags, and all that they find
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
    --check) exec "$python" -m speedrun.check "$@" ;;
    esac
done
plan=$("$python" -m speedrun.check "$@") # how many processes, and flags that this machine needs
nproc=${plan%% *}
# shellcheck disable=SC2086 # one argument for each flag
set -- ${plan#"$nproc"} "$@"
trap '' HUP # a console that goes away does not end a training
if [ "$nproc" = 1 ]; then
    exec "$python" "$script" "$@"
fi
# torchrun would set 1 and say so at length; on a CPU train_gpt.py shares out the threads of its preset
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Every process would compile in as many workers as there are cores, up to 32: let them share the cores
cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
workers=$(((cores + nproc - 1) / nproc))
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$((workers < 32 ? workers : 32))}
# Without --local-addr the ranks look for this machine by its name, for ten minutes where that does not resolve
exec "$python" -m torch.distributed.run --standalone --local-addr localhost --nproc_per_node="$nproc" \
    --signals-to-handle SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU "$script" "$@"
