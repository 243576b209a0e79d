#!/usr/bin/env bash
# Ask one GPU what it can say in nine minutes, without network: docs/first_gpu_run.sh [flags of train_gpt.py]
#
#   docs/first_gpu_run.sh --preset mini --device cpu --batch_tokens 8192         try it without a GPU
#   TEXT=FOLDER docs/first_gpu_run.sh       whole trainings, too, on shards of GPT-2 tokens, *train*.bin and *val*.bin
#
# Whole trainings are gpt2 with all its steps, each on one of its eight sequences, with and without FP8, and a plain GPT
# of GPT-2's size for the same minute; they take 41 M tokens. The flags are for the steps as one rank of eight.
# OUT=FOLDER names another folder than logs/first-gpu-run-TIME, MINUTES=20 another limit. If a part fails, the others
# still run. Exit codes: 0 done, 1 a part failed, 2 no Python or GPU.
set -uo pipefail
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." || exit
source speedrun/environment.sh
find_python pytest
device=(--device cuda --block_size 128)
wide=(--model_dim 192 --head_dim 32) # mini's own heads are too narrow for FlexAttention
text=${TEXT:-data/fineweb10B}
whole=(--preset gpt2 --batch_tokens 16384 --ngram_rows 21150720 --val_tokens 1048576 --val_loss_every 210)
plain=(--size gpt2 --seconds 60 --val_tokens 1048576 --val_every 100)
self_test=(-m gpu -k 'not four_steps')
case " $* " in *" --device cpu "* | *" --device=cpu "*)
    device=(--device cpu --num_iterations 14)
    wide=()
    text=data/nano
    whole=(--preset nano --val_tokens 8192) # mini comes below
    plain=(--seconds 1 --val_tokens 8192)
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
[ -e data/nano/nano_val_000000.bin ] || part pack "$python" data/pack_nano.py
shards=("$text"/*train*.bin)
if [ -e "${shards[0]}" ]; then
    whole+=(--train_files "$text/*train*.bin" --val_files "$text/*val*.bin" --val_sha256=)
    part whole "${run[@]}" "${whole[@]}" --run_id whole
    part plain "$python" speedrun/plain_gpt.py --data "${shards[0]%train*}" "${plain[@]}"
    part whole-without-fp8 "${run[@]}" "${whole[@]}" --run_id whole-without-fp8 --no-lm_head_fp8 --no-layers_fp8
else
    echo "whole trainings: left out, $text has no shards; TEXT=FOLDER names some" | tee -a "$out/parts.txt"
fi
part self-test "$python" -m pytest -q tests/test_gpu.py "${self_test[@]}"
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
grep '^val_loss' "$out"/{whole,whole-without-fp8,nano,nano-without-graphs,mini}.txt
grep -ho '^{"val_curve.*' "$out/plain.txt"
cat "$out/parts.txt"
echo "look through $out, and send back $out.tar.gz"
exit $failed
