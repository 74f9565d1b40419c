#!/usr/bin/env bash
# Checks the runtime on a GPU: tests/gpu.sh ITHACA [PART…]
#
# ITHACA is the built program; nothing is built here but CUDA code, at run time by NVRTC. Needed are a GPU with its driver,
# NVRTC and cuBLASLt (CUDA_HOME, or where the loader finds them), and NCCL for the second kind of collectives (NCCL_HOME).
#
# The parts, all when none is named:
#   kernels     every kernel beside the oracle, on fresh random inputs, in memory that was filled with bits that are no number
#   goldens     logits of a model as its own framework gave them, under several strategies
#   decoding    the tokens and logits with which a model's own framework continues prompts, under several strategies
#   in-process  every strategy on 1, 2, 4 and 8 ranks of the GPU, forward and training, beside the oracle; collectives are copies
#   nccl        the same; collectives are NCCL's, 2.30.3 or later, which takes several ranks on one GPU
#   graph       a step captured as a CUDA graph
#   sanitizer   small shapes under compute-sanitizer, where that is installed
#   times       a table of times beside two floors, what the bytes and what the FLOPs take at least, and PyTorch's attention
#               where python3 has torch
#
# JOBS is how many runs of a part with many are there at a time (4), SEED that of random inputs.
#
# The exit status is 0 when all passed, 1 when something failed, 2 for wrong arguments, 77 when there is no GPU.
set -euo pipefail

known="kernels goldens decoding in-process nccl graph sanitizer times"
if [ $# -lt 1 ] || [ ! -x "$1" ]; then
    echo "usage: $0 ITHACA [PART…]   (the path of the built program; parts: $known)" >&2
    exit 2
fi
for part in "${@:2}"; do
    if [[ " $known " != *" $part "* ]]; then
        echo "$0: \`$part\` is no part; parts: $known" >&2
        exit 2
    fi
done
parts=" ${*:2} "
ithaca=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1; then
    echo "no GPU at hand: nvidia-smi is missing or finds none; nothing was run" >&2
    exit 77
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

# asked PART: whether it is to run.
asked() { [ "$parts" = "  " ] || [[ $parts == *" $1 "* ]]; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0
failed=0
seed=${SEED:-$RANDOM}
echo "seed $seed"

# check NAME COMMAND…: runs it, and shows what it says when it fails.
check() {
    local name=$1
    shift
    if "$@" >"$scratch/log" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        sed 's/^/        /' "$scratch/log"
    fi
}

# later NAME COMMAND…: as check, but beside others, and says it when it ends; `settle` waits for all and counts them.
jobs=${JOBS:-4}
begun=0
later() {
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    local at=$scratch/later-$begun name=$1
    begun=$((begun + 1))
    shift
    (
        if "$@" >"$at.log" 2>&1 </dev/null; then
            touch "$at.good"
            echo "ok      $name"
        else
            printf 'FAILED  %s\n%s\n' "$name" "$(sed 's/^/        /' "$at.log")"
        fi
    ) &
}
settle() {
    wait
    local good
    good=$(find "$scratch" -name 'later-*.good' | wc -l)
    passed=$((passed + good))
    failed=$((failed + begun - good))
    rm -f "$scratch"/later-*
    begun=0
}

# in_type PROGRAM TYPE: a program with tensors of another type; lse, losses, the optimizer and sums of squares stay as they
# are.
in_type() {
    local out=$scratch/$1-$2.ith
    sed -E "s/f32/$2/g" "$here/gpu/$1.ith" |
        sed -E "/^  %(lse|rw|squares|(d_)?nll[01]|counts|norm|clip|step|second|w0|m0|v0|w1)[ ,]/s/$2/f32/g" |
        sed -E "s/, $2\[b s h\]/, f32[b s h]/g; s/, $2\[h\]/, f32[h]/g; s/, $2\[u h\]/, f32[u h]/g; s/, $2\[b s\],/, f32[b s],/g" |
        sed -E "/%sinks = /s/$2/f32/" >"$out"
    echo "$out"
}

# of_sizes PROGRAM TYPE DIM=SIZE…: a program with tensors of another type and dimensions of these sizes.
of_sizes() {
    local out=$scratch/$1-$2-${*:3}.ith size
    out=${out// /-}
    cp "$(in_type "$1" "$2")" "$out"
    for size in "${@:3}"; do sed -i -E "s/^dim ${size%=*} = .*/dim ${size%=*} = ${size#*=}/" "$out"; done
    echo "$out"
}

widths="64,64 96,96 128,128 192,128 192,192 256,256 40,56"
# of_widths PROGRAM WIDTH VALUE_WIDTH TYPE HEADS: a program of attention with rows of these widths.
of_widths() {
    local out=$scratch/$1-$2-$3-$4.ith
    sed -E "s/^dim d = .*/dim d = $2/; s/^dim e = .*/dim e = $3/; s/bf16/$4/g; s/^dim h = 32$/dim h = ${5:-32}/" \
        "$here/gpu/$1.ith" >"$out"
    echo "$out"
}

part_kernels() {
    echo
    echo "== kernels against the oracle"
    for program in training rows attention attention_wide cached; do
        later "$program in f32" "$ithaca" run "$here/gpu/$program.ith" --device cuda --seed "$seed"
        for dtype in bf16 f16; do
            later "$program in $dtype" "$ithaca" run "$(in_type "$program" "$dtype")" --device cuda --seed "$seed"
        done
    done
    for dtype in bf16 f16; do
        sed "s/bf16/$dtype/g" "$here/gpu/slots.ith" >"$scratch/slots-$dtype.ith"
        later "slots in $dtype" "$ithaca" run "$scratch/slots-$dtype.ith" --device cuda --seed "$seed"
    done
    settle

    echo
    echo "== rows that several threads share against the oracle, by shape"
    for sizes in "t=7 m=832 v=404" "t=3 m=8212 v=8224" "t=37 m=45 v=51" "t=512 m=4096 v=1000"; do
        for dtype in f32 bf16; do
            later "rows of $sizes in $dtype" "$ithaca" run "$(of_sizes rows "$dtype" $sizes)" --device cuda --seed "$seed"
        done
    done
    settle

    echo
    echo "== attention on tensor cores against the oracle, by width of keys and of values"
    for pair in $widths; do
        for dtype in bf16 f16; do
            later "widths $pair in $dtype" "$ithaca" run "$(of_widths tensor_cores "${pair%,*}" "${pair#*,}" "$dtype")" \
                --device cuda --seed "$seed"
        done
    done
    settle
}

# golden OPTIONS…: logits of llama-gqa, as its own framework gave them.
golden() {
    local io=$here/goldens/llama-gqa/io.safetensors
    later "logits of llama-gqa: $*" "$ithaca" run "$here/goldens/llama-gqa" --inputs "$io" --expect "$io" --device cuda \
        --tolerance 1e-3 "$@"
}
part_goldens() {
    echo
    echo "== logits of another framework"
    golden
    golden --strategy ulysses --mesh ulysses=4
    golden --strategy ring --mesh ring=4 --pad-sequence
    golden --strategy loongtrain --mesh outer=2,ring=2,ulysses=2 --pad-sequence
    golden --strategy ulysses+megatron-tp --mesh ulysses=2,tp=2
    settle
}

# continued MODEL OPTIONS…: tokens and logits of a model, as its own framework continues prompts.
continued() {
    local io=$here/goldens/$1/decode.safetensors
    later "decoding of $*" "$ithaca" run "$here/goldens/$1" --mode decode --inputs "$io" --expect "$io" --steps 23 --device cuda \
        --tolerance 1e-3 "${@:2}"
}
part_decoding() {
    echo
    echo "== prompts continued as by another framework"
    for model in llama-gqa gpt2 mistral-swa qwen2; do
        continued "$model"
        continued "$model" --mesh tp=4 --chunk 7
    done
    continued t5
    continued t5 --mesh tp=4
    continued llama-gqa --mesh tp=2,dcp=2
    continued llama-gqa --mesh dp=2
    continued llama-gqa --strategy decode-reduce --mesh cp=2
    settle
}

# strategies COLLECTIVES: all lines of strategies.txt.
strategies() {
    echo
    echo "== strategies, collectives $1"
    local modes subject options
    while read -r modes subject options; do
        case $modes in '' | '#'*) continue ;; esac
        for mode in ${modes//,/ }; do
            local of=(--mode "$mode" --seq 32 --batch 8)
            if [ "$mode" = program ]; then of=(); fi
            # Options are words without blanks.
            later "$mode of $subject $options" "$ithaca" run "$here/$subject" "${of[@]}" --device cuda --collectives "$1" \
                --seed "$seed" $options
        done
    done <"$here/gpu/strategies.txt"
    settle
}

part_in-process() { strategies in-process; }
part_nccl() { strategies nccl; }

part_graph() {
    echo
    echo "== a step as a graph"
    golden --graph
    golden --strategy ulysses --mesh ulysses=4 --graph
    settle
}

part_sanitizer() {
    echo
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not installed: skipped"
        return
    fi
    echo "== compute-sanitizer"
    for tool in memcheck racecheck initcheck synccheck; do
        for program in training rows attention tensor_cores; do
            later "$tool of $program" compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "$ithaca" run "$here/gpu/$program.ith" --device cuda --seed "$seed"
        done
        later "$tool of cached in bf16" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$ithaca" run "$(in_type cached bf16)" --device cuda --seed "$seed"
        later "$tool of slots" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$ithaca" run "$here/gpu/slots.ith" --device cuda --seed "$seed"
    done
    settle
}

part_times() {
    echo
    echo "== times, one layer's pieces: 4096 tokens, 32 heads of 128 on 8, 4096 × 14336, bf16"
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
    # Peak TFLOP/s of dense bf16 and TB/s, from datasheets; others are given by hand.
    case $gpu in
        *H200*) peak="989 4.8" ;;
        *H100*PCIe*) peak="756 2.0" ;;
        *H100*) peak="989 3.35" ;;
        *A100*80GB*) peak="312 2.0" ;;
        *A100*) peak="312 1.55" ;;
        *) peak=${PEAK:-} ;;
    esac
    if "$ithaca" run "$here/gpu/times.ith" --device cuda --timings --unchecked >"$scratch/times" 2>&1; then
        if [ -z "$peak" ]; then
            echo "the peak of $gpu is not known: PEAK='TFLOPS TB/s' gives it"
            cat "$scratch/times"
        else
            # Seconds, tasks and name of each row; FLOPs and bytes of each piece are those of its shapes.
            awk -v peak="$peak" '
                BEGIN {
                    split(peak, of, " ")
                    s = 4096; h = 32; k = 8; d = 128; m = 4096; f = 14336
                    flops["attention"] = 2 * s * s * h * d; bytes["attention"] = 2 * s * d * (2 * h + 2 * k) + 4 * s * h
                    flops["attention_backward"] = 5 * s * s * h * d; bytes["attention_backward"] = 2 * s * d * (4 * h + 4 * k) + 8 * s * h
                    flops["rms_norm"] = 4 * s * m; bytes["rms_norm"] = 2 * (2 * s * m + m)
                    flops["einsum"] = 2 * s * m * f + 2 * s * h * d; bytes["einsum"] = 2 * (s * m + m * f + s * f) + 4 * s * h * d
                    flops["silu"] = 4 * s * f; bytes["silu"] = 4 * s * f
                    printf "%-20s %10s %12s %12s %8s\n", "piece", "ms", "bytes, ms", "FLOPs, ms", "of floor"
                }
                $NF in flops {
                    ms = 1e3 * $1; b = bytes[$NF] / of[2] / 1e9; c = flops[$NF] / of[1] / 1e9; floor = b > c ? b : c
                    printf "%-20s %10.3f %12.4f %12.4f %7.1f%%\n", $NF, ms, b, c, 100 * floor / ms
                }' "$scratch/times"
        fi
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        cat "$scratch/times"
    fi

    echo
    echo "== times of causal attention, 8192 tokens, 2048 columns of heads, bf16, by width"
    # The FLOPs of a matrix are counted where the mask shows it: half of all; backward has five products where forward has two,
    # though ours computes seven, to give each sum one order.
    printf "%-10s %14s %14s %14s %14s\n" "widths" "forward, ms" "TFLOP/s" "backward, ms" "TFLOP/s"
    for pair in $widths; do
        d=${pair%,*} e=${pair#*,}
        h=$((2048 / d))
        if "$ithaca" run "$(of_widths times_attention "$d" "$e" bf16 "$h")" --device cuda --timings --unchecked >"$scratch/times" 2>&1; then
            awk -v pair="$pair" -v d="$d" -v e="$e" -v h="$h" '
                $NF == "attention" { forward = 1e3 * $1 }
                $NF == "attention_backward" { backward = 1e3 * $1 }
                END {
                    half = 8192 * 8192 * h / 1e9
                    printf "%-10s %14.3f %14.1f %14.3f %14.1f\n", pair, forward, half * (d + e) / forward, backward, half * (3 * d + 2 * e) / backward
                }' "$scratch/times"
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            cat "$scratch/times"
        fi
    done
    if command -v python3 >/dev/null && python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        python3 "$here/gpu/attention.py"
    else
        echo "python3 with torch and a GPU is not there: no comparison with PyTorch"
    fi
}

export NCCL_MULTI_RANK_GPU_ENABLE=1
for part in $known; do
    if asked "$part"; then "part_$part"; fi
done

echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
