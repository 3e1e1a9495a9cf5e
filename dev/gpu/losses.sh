#!/usr/bin/env bash
# The first 20 losses of a LLaMA of 124M parameters (12 layers of 768), from the same start and on the same text on
# every device: a line with step and loss for each.
#   dev/gpu/losses.sh cpu|cuda fp32|bf16 TEXT      BIN: the programs; DRY=1: of a tiny model
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
size=(--width 768 --layers 12 --heads 12 --ffn 2048 --vocab 50304 --seq 256 --batch 2)
[ -z "${DRY:-}" ] || size=(--width 64 --layers 2 --heads 2 --ffn 128 --vocab 300 --seq 32 --batch 2)
"$BIN/train_llama" --device "$1" --dtype "$2" --data "text:$3" "${size[@]}" --lr 6e-4 --steps 20 --warmup 5 \
  --eval-every 20 --eval-samples 2 --save-every 20 --out "$work/run" >&2
grep -oE '"(loss|step)":[0-9.e+-]+' "$work/run/metrics.jsonl" | awk -F: '/loss/ {loss = $2} /step/ {printf "%d %.6f\n", $2, loss}'
