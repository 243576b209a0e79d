#!/usr/bin/env bash
# Sets up what is missing, checks, and trains: ./run.sh [flags of train_gpt.py]
#
#   ./run.sh                                      gpt2, the record configuration, on GPUs; nano elsewhere
#   ./run.sh --preset nano --num_iterations 300   any flags; --help lists them
#   ./run.sh --check                              only the checks, with any flags, and what they find
#   NPROC=2 ./run.sh                              two processes instead of as many as fit
#   PYTHON=python3.12 ./run.sh                    this Python, or an environment made with it
#
# On a CPU the model is saved (--no-save_checkpoint: not), and a sample of what it writes ends the run.
# Paths in the flags are relative to the repository. Exit codes: 0 trained, 2 something has to be mended first (a line
# for each thing says what), 3 the loss became NaN or infinite, 130 interrupted.
set -euo pipefail
cd "$(dirname "$0")"
source ./environment.sh
find_python requirements.txt

for flag in "$@"; do
    if [ "$flag" = --help ] || [ "$flag" = -h ]; then
        exec "$python" train_gpt.py --help
    fi
    if [ "$flag" = --check ]; then
        exec "$python" check.py "$@"
    fi
done
nproc=$("$python" check.py "$@")
# How long OpenMP's threads spin for each other: by default so long that a nano step takes up to 1.6 s instead of 0.04
# where something else uses a core, too. With this 0.15, and as fast as before where not.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
if [ "$nproc" = 1 ]; then
    exec "$python" sample.py --train "$@" # train_gpt.py, and on a CPU a sample of what the model has learned
fi
# torchrun would set 1 and say so at length; on a CPU train_gpt.py shares out the threads of its preset
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$nproc" train_gpt.py "$@"
