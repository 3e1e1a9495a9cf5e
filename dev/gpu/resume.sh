#!/usr/bin/env bash
# Eight steps, and the last four of them again in another process, from the checkpoint in between: the weights must have
# the same bits. On a GPU the second process chooses its kernels anew, unless the checkpoint says which.
#   dev/gpu/resume.sh TRAINER FLAGS...
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$@" --steps 8 --warmup 2 --save-every 4 --keep 2 --eval-every 8 --eval-samples 4 --out "$work/whole"
cp -r "$work/whole" "$work/again"
rm -r "$work/again/step_00000008"
"$1" --resume --out "$work/again" | tee "$work/output"
grep -q 'resumed after step 4' "$work/output"
cmp "$work"/{whole,again}/step_00000008/model.safetensors
