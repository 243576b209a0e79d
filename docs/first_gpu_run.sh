#!/usr/bin/env bash
# Run what docs/first_gpu_run.md describes, and pack what it shows: docs/first_gpu_run.sh [flags of train_gpt.py]
#
#   docs/first_gpu_run.sh --train_seq_len 8192              where memory is short
#   docs/first_gpu_run.sh --preset nano --device cpu        try it without a GPU
#
# OUT=FOLDER names another folder than logs/first-gpu-run-TIME. Every stage has an hour; if one fails, the others still
# run. Exit codes: 0 done, 1 a stage failed, 2 no Python.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." || exit
source speedrun/environment.sh
find_python
export PYTHON=$python
out=${OUT:-logs/first-gpu-run-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out"
failed=0

stage() { # NAME COMMAND...
    echo "$1: ${*:2}"
    if timeout --kill-after=60 3600 "${@:2}" >"$out/$1.txt" 2>&1 </dev/null; then
        echo "$1: ok" | tee -a "$out/stages.txt"
    else
        echo "$1: FAILED, exit code $?" | tee -a "$out/stages.txt"
        failed=1
    fi
}

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU)
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac
if [ "$gpus" = 0 ]; then
    self_test=(tests/test_gpu.py)
    quick=(--quick)
else
    self_test=(-m gpu)
    quick=()
    stage nvidia-smi nvidia-smi
    stage topology nvidia-smi topo -m
fi
run=(--num_iterations 100 --no-save_checkpoint "$@")
stage versions "$python" -m torch.utils.collect_env
stage check ./run.sh --check "${run[@]}"
stage self-test ./test.sh "${self_test[@]}"
stage run ./run.sh "${run[@]}" --log_dir "$out" --run_id short
stage bench "$python" -m speedrun bench "${quick[@]}" --out "$out/bench" "$@"
for processes in 8 4 2; do
    if [ "$processes" -le "$gpus" ]; then
        stage "bench-on-$processes" "$python" -m torch.distributed.run --standalone --nproc_per_node=$processes \
            -m speedrun bench --out "$out/bench-on-$processes" "$@"
        break
    fi
done

hide() { # TEXT NEW: where no letter or digit is beside it; twice, as neighbours share what is between them
    local other='[^[:alnum:]]'
    local rule="s#(^|$other)$1($other|\$)#\1$2\2#gI"
    find "$out" -type f -exec sed -i -E -e "$rule" -e "$rule" {} +
}
hide "$PWD" REPOSITORY
hide "$HOME" '~'
hide "$(uname -n)" HOST
[ "$(id -un)" = root ] || hide "$(id -un)" USER
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
echo "look through $out, and send back $out.tar.gz"
exit $failed
