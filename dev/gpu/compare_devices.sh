#!/usr/bin/env bash
# The gradients of a model on DEVICE and on the CPU, in both types.   dev/gpu/compare_devices.sh MODEL TOKENS BATCH SEQ
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
compare() { "${PYTHON:-python3}" "$(dirname "$0")/compare_files.py" "$@"; }
gradients() {
  echo "$1, $2:"
  "${BIN:-build}/gradients" --model "$model" --tokens "$tokens" --batch "$batch" --seq "$seq" --device "$1" \
    --dtype "$2" --out "$work/$1.$2"
}
model=$1 tokens=$2 batch=$3 seq=$4 device=${DEVICE:-cuda} failed=0
if [ "$device" = cpu ]; then device=reference; fi  # to try this script: something else than the CPU
gradients cpu fp32
gradients "$device" fp32
# The order of sums costs about 1e-5.
compare "$work/cpu.fp32" "$work/$device.fp32" 1e-3 || failed=1
[ "$device" != reference ] || exit $failed  # which has no bf16
gradients cpu bf16
gradients "$device" bf16
# What bf16 costs on the CPU is the baseline: what nearly cancels, such as the gradient of a single scale, it may well
# change by a third. Each rounding is a draw, so twice as much, and something.
compare "$work/cpu.fp32" "$work/$device.bf16" 0.02 --beside "$work/cpu.bf16" || failed=1
exit $failed
