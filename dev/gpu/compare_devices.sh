#!/usr/bin/env bash
# The gradients of a model on the CPU and on DEVICE.   dev/gpu/compare_devices.sh MODEL TOKENS BATCH SEQ DTYPE LIMIT
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0
for device in cpu "${DEVICE:-cuda}"; do
  echo "$device:"
  "${BIN:-build}/gradients" --model "$1" --tokens "$2" --batch "$3" --seq "$4" --dtype "$5" --device "$device" --out "$work/grads"
  mv "$work/grads" "$work/${n}.safetensors"
  n=$((n + 1))
done
"${PYTHON:-python3}" "$(dirname "$0")/compare_files.py" "$work/0.safetensors" "$work/1.safetensors" "$6"
