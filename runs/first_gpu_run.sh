#!/usr/bin/env bash
# Ask one GPU what it can say in nine minutes, without network: runs/first_gpu_run.sh [flags of train_gpt.py]
#
#   runs/first_gpu_run.sh --preset mini --device cpu --batch_tokens 8192         try it without a GPU
#   TEXT=FOLDER runs/first_gpu_run.sh       whole trainings, too, on shards of GPT-2 tokens, *train*.bin and *val*.bin
#
# Whole trainings are gpt2 with all its steps, each on one of its eight sequences, with and without FP8, and a plain GPT
# of GPT-2's size for the same minute; they take 41 M tokens. The flags are for stages 3 and 1 of the steps as one rank
# of eight. OUT=FOLDER names another folder than logs/first-gpu-run-TIME, MINUTES=30 another limit. If a part fails, the
# others still run. Exit codes: 0 done, 1 a part failed, 2 no Python or GPU.
#
# Compiling takes most of the time. On one H100, beside two other processes that compiled, too, the whole training's
# seven graphs took nine minutes: 52 s validation, 92 to 143 s a stage. What it compiled is kept: steps as one rank
# began 28 and 55 s a stage later, and a second call of this script goes on quicker, too. A process compiles its graphs
# one after another, each with up to 16 workers. Nothing is compiled beside it: a process needs 21 to 27 GB of the GPU
# for that, takes the workers' cores, and would still be at it when a measurement begins.
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

[ -e data/nano/nano_val_000000.bin ] || part pack "$python" data/pack_nano.py
shards=("$text"/*train*.bin)
steps=(--synthetic) # as one rank of eight; random tokens have few n-grams, whose sums collide
estimates=("one-of-8 300" "self-test 55") # seconds; of the plain GPT's compiling nothing is known
if [ -e "${shards[0]}" ]; then
    estimates=("whole 590" "one-of-8 100" "self-test 55" "plain 60" "whole-without-fp8 590")
    [[ " $* " == *" --preset"* && $text != data/nano ]] || steps=(--train_files "$text/*train*.bin")
fi
if [ "${device[1]}" = cuda ]; then
    ends=0 told=()
    for estimate in "${estimates[@]}"; do
        told+=("${estimate% *} $((ends += ${estimate#* })) s")
    done
    printf -v told '%s, ' "${told[@]}"
    echo "by one H100's times these end after: ${told}then nano and mini; the limit is $limit s, MINUTES sets another"
fi

run=("$python" train_gpt.py "${device[@]}" --seed 1 --no-save_checkpoint --log_dir "$out/logs")
part card nvidia-smi
part versions "$python" -m torch.utils.collect_env
whole+=(--train_files "$text/*train*.bin" --val_files "$text/*val*.bin" --val_sha256=)
if [ -e "${shards[0]}" ]; then
    part whole "${run[@]}" "${whole[@]}" --run_id whole
else
    echo "whole trainings: left out, $text has no shards; TEXT=FOLDER names some" | tee -a "$out/parts.txt"
fi
part one-of-8 "$python" -m speedrun bench --one_of 8 --stages 3,1 "${steps[@]}" --out "$out/one-of-8" "$@"
part self-test "$python" -m pytest -q tests/test_gpu.py "${self_test[@]}"
if [ -e "${shards[0]}" ]; then
    part plain "$python" speedrun/plain_gpt.py --data "${shards[0]%train*}" "${plain[@]}"
    part whole-without-fp8 "${run[@]}" "${whole[@]}" --run_id whole-without-fp8 --no-lm_head_fp8 --no-layers_fp8
fi
part nano "${run[@]}" --preset nano --run_id nano
part nano-without-graphs "${run[@]}" --preset nano --no-cuda_graphs --run_id nano-without-graphs
part mini "$python" -m speedrun mini "${run[@]:2}" "${wide[@]}" --run_id mini

hide() { # TEXT NEW: where no letter or digit is beside it; twice, as neighbours share what is between them
    local other='[^[:alnum:]]' rule
    rule="s#(^|$other)$(printf %s "$1" | sed 's/[][\.*^$+?(){}|#]/\\&/g')($other|\$)#\1$2\2#gI"
    find "$out" -type f -exec sed -i -E -e "$rule" -e "$rule" {} +
}
hide_name() { # NAME NEW: unless it is a word that logs have for other reasons
    if grep -rqsiwF -e "$1" README.md train_gpt.py docs speedrun "$out"/{card,versions}.txt; then
        echo "look for the $2's name, $1, yourself: it is a word of this repository or of the machine's description"
    else
        hide "$@"
    fi
}
hide "$PWD" REPOSITORY
[ "$HOME" = / ] || hide "$HOME" '~'
hide_name "$(uname -n)" HOST
[ "$(id -un)" = root ] || hide_name "$(id -un)" USER
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
grep -h '^|' "$out/one-of-8/benchmark.md"
tail -qn 1 "$out/self-test.txt"
grep '^val_loss' "$out"/{whole,whole-without-fp8,nano,nano-without-graphs,mini}.txt
grep -ho '^{"val_curve.*' "$out/plain.txt"
cat "$out/parts.txt"
echo "look through $out, and send back $out.tar.gz"
exit $failed
