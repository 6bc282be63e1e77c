#!/usr/bin/env bash
# What waits for a GPU, the most useful parts first, 12 minutes together; no GPU has run it yet.
#
#   benchmarks/gpu_day.sh                       # those whose JSON is there are done, so it resumes
#   benchmarks/gpu_day.sh trace study           # these alone; study runs only when it is named
#   NANOGPT=~/nanoGPT benchmarks/gpu_day.sh     # GPT-2 beside nanoGPT's model.py, which is not here
#   QUICK=1 OUT=try benchmarks/gpu_day.sh       # tiny sizes on the CPU, to see that everything runs
#
# gpt2_SIZE is tokens/s and MFU of the trainers ddp (124M) and fsdp (355M) with bf16, flash attention and torch.compile,
# reference_SIZE those of a plain loop over nanoGPT's model or, without NANOGPT, over ours; its JSON says which.
# kernels: an epoch of the GPT from nothing on its own kernels. radius: seconds a step at 355M by density, in simulated
# ranks. trace: steps of DDP and FSDP, with files for ui.perfetto.dev. memory: with a snapshot. tests: those marked gpu.
# It needs one GPU (H100 or H200), Python 3.12 (PYTHON names another), torch 2.11 and no network, in a checkout as it is.
# A package that the machine lacks comes from wheels/, if that is there. Where there is a network, this fills it:
#   benchmarks/gpu_day.sh wheels
# OUT (default gpu_day) gets one JSON a part, in the form of src/aiscale/plan/published/measured, and a log of all parts.

set -uo pipefail  # no -e: a part that fails stops nothing
cd "$(dirname "$0")/.." || exit 1

OUT=${OUT:-gpu_day} QUICK=${QUICK:-} PYTHON=${PYTHON:-python3}
PARTS=(gpt2_124M reference_124M gpt2_355M reference_355M kernels radius trace memory tests)
declare -A LIMIT_S=( # of the default parts 720 together
    [gpt2_124M]=60 [reference_124M]=50 [gpt2_355M]=70 [reference_355M]=60
    [kernels]=110 [radius]=110 [trace]=75 [memory]=35 [tests]=150 [study]=480
)
WHEELS=(numba llvmlite numba-cuda pytest iniconfig pluggy pytest-xdist execnet pytest-timeout psutil)
WHEELS_MIB=64
mkdir -p "$OUT" || exit 1
part_log=$(mktemp) && trap 'rm -f "$part_log"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [[ $QUICK ]]; then
    export CUDA_VISIBLE_DEVICES="" NUMBA_ENABLE_CUDASIM=1 OMP_NUM_THREADS=1
fi

needs() { # PART: the packages without which it cannot run
    local packages=(torch numpy psutil)
    case $1 in
    tests) packages+=(pytest pytest-xdist pytest-timeout) ;;
    kernels) packages+=(numba) && [[ $QUICK ]] || packages+=(numba-cuda) ;;
    esac
    "$PYTHON" - "${packages[@]}" <<'END'
import sys
from importlib.metadata import distributions
here = {str(each.metadata["Name"]).lower().replace("_", "-") for each in distributions()}
print(*[name for name in sys.argv[1:] if name not in here])
END
}

run() { # PART
    local part=$1 json=$OUT/$1.json started=$SECONDS missing name status
    export PART_S=${LIMIT_S[$1]:-60}
    [[ $QUICK ]] && PART_S=480 # a CPU is slow
    if [[ -s $json ]]; then
        echo "$part: $json is there"
        return
    fi
    missing=$(needs "$part")
    if [[ $missing && -d wheels ]]; then
        for name in $missing; do # one by one: one that is not there must not keep out the others
            "$PYTHON" -m pip install -q --no-index --find-links wheels "$name" >>"$OUT/gpu_day.log" 2>&1
        done
        missing=$(needs "$part")
    fi
    if [[ $missing ]]; then
        echo "$part: left out, for Python has no $missing, and wheels/ neither"
        return
    fi
    timeout -k 10 "$PART_S" "$PYTHON" benchmarks/gpu_parts.py "$part" "$json" ${QUICK:+--quick} >"$part_log" 2>&1
    status=$?
    case $status in
    0) echo "$part: $json, in $((SECONDS - started)) s" ;;
    124 | 137) echo "$part: not finished in $PART_S s, see $OUT/gpu_day.log" ;;
    *) echo "$part: failed, $(grep -v '^ *$' "$part_log" | tail -n 1 | cut -c 1-200)" ;;
    esac
    { echo "== $part" && cat "$part_log"; } >>"$OUT/gpu_day.log"
}

fetch_wheels() {
    "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 -d wheels "${WHEELS[@]}" || return
    local mib
    mib=$(du -sm wheels | cut -f1)
    echo "wheels: $mib MiB in $(find wheels -name '*.whl' | wc -l) files"
    if [[ $mib -gt $WHEELS_MIB ]]; then
        echo "wheels: more than $WHEELS_MIB MiB, which is what may be carried: delete some" >&2
        return 1
    fi
}

if [[ "$*" == wheels ]]; then
    fetch_wheels
    exit
fi
if [[ $# -eq 0 ]]; then
    set -- "${PARTS[@]}"
fi
for part; do
    run "$part"
done
