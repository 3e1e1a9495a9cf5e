#!/usr/bin/env bash
# Eight steps of two micro-steps, as one process and as two that share the GPU: the weights must have the same bits.
#   dev/gpu/two_ranks.sh TRAINER FLAGS...
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(--sum tree --accumulate 2 --steps 8 --warmup 2 --save-every 8 --eval-every 8 --eval-samples 4)
"$@" "${flags[@]}" --out "$work/one"
"$(dirname "$0")/share.sh" "$@" "${flags[@]}" --out "$work/two"
cmp "$work"/{one,two}/step_00000008/model.safetensors
