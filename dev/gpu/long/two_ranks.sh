#!/usr/bin/env bash
# Two steps of two micro-steps as one process; then six more, as one and as two that share the GPU: the weights must
# have the same bits. Both continue one checkpoint, so that they have the same algorithms for their products.
#   dev/gpu/long/two_ranks.sh TRAINER FLAGS...
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(--sum tree --accumulate 2 --warmup 2 --save-every 2 --eval-every 8 --eval-samples 4 --check-replicas 1)
"$@" "${flags[@]}" --steps 2 --out "$work/one"
cp -r "$work/one" "$work/two"
"$@" "${flags[@]}" --steps 8 --resume --out "$work/one"
"$(dirname "$0")/share.sh" "$@" "${flags[@]}" --steps 8 --resume --out "$work/two"
cmp "$work"/{one,two}/step_00000008/model.safetensors
