#!/usr/bin/env bash
# Ask one GPU what it can say in nine minutes, without network or data: docs/first_gpu_run.sh [flags of train_gpt.py]
#
#   docs/first_gpu_run.sh --preset mini --device cpu --batch_tokens 8192         try it without a GPU
#
# The flags are for the steps as one rank of eight. OUT=FOLDER names another folder than logs/first-gpu-run-TIME,
# MINUTES=20 another limit. If a part fails, the others still run. Exit codes: 0 done, 1 a part failed, 2 no Python or GPU.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." || exit
source speedrun/environment.sh
find_python pytest
device=(--device cuda --block_size 128)
wide=(--model_dim 192 --head_dim 32) # mini's own heads are too narrow for FlexAttention
self_test=(-m gpu -k 'not four_steps')
case " $* " in *" --device cpu "* | *" --device=cpu "*)
    device=(--device cpu --num_iterations 14)
    wide=()
    self_test=(-k newton_schulz) # all of it is in ./test.sh
    ;;
*)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        fail "there is no GPU that torch can use: ./run.sh --check says why; flags to try it on a CPU are in this file"
    ;;
esac
limit=$((60 * ${MINUTES:-9}))
out=${OUT:-logs/first-gpu-run-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out"
failed=0
SECONDS=0

part() { # NAME COMMAND...
    if [ $((limit - SECONDS)) -lt 30 ]; then
        echo "$1: skipped, the time is over" | tee -a "$out/parts.txt"
        return
    fi
    echo "$1: ${*:2}"
    local began=$SECONDS
    if timeout --kill-after=5 $((limit - SECONDS)) "${@:2}" >"$out/$1.txt" 2>&1 </dev/null; then
        echo "$1: ok, $((SECONDS - began)) s" | tee -a "$out/parts.txt"
    else
        echo "$1: FAILED, exit code $?, $((SECONDS - began)) s" | tee -a "$out/parts.txt"
        failed=1
    fi
}

run=("$python" train_gpt.py "${device[@]}" --seed 1 --no-save_checkpoint --log_dir "$out/logs")
part card nvidia-smi
part versions "$python" -m torch.utils.collect_env
part one-of-8 "$python" -m speedrun bench --one_of 8 --synthetic --out "$out/one-of-8" "$@"
part self-test "$python" -m pytest -q tests/test_gpu.py "${self_test[@]}"
[ -e data/nano/nano_val_000000.bin ] || part pack "$python" data/pack_nano.py
part nano "${run[@]}" --preset nano --run_id nano
part nano-without-graphs "${run[@]}" --preset nano --no-cuda_graphs --run_id nano-without-graphs
part mini "${run[@]}" --preset mini "${wide[@]}" --run_id mini

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
grep -h '^|' "$out/one-of-8/benchmark.md"
tail -qn 1 "$out/self-test.txt"
grep -h '^val_loss' "$out"/{nano,nano-without-graphs,mini}.txt
cat "$out/parts.txt"
echo "look through $out, and send back $out.tar.gz"
exit $failed
