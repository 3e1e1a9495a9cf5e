#!/usr/bin/env bash
# Where the time goes: a profile by op, every architecture beside LLaMA, each op beside a copy, counters. About 6 minutes.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build bench train_llama
seq 100000 >"$work/text"
size=(--width 768 --layers 12 --heads 12 --kv-heads 12 --ffn 2048 --vocab 50304 --seq 1024 --batch 32)
wide=(--width 2048 --layers 2 --heads 32 --kv-heads 8 --ffn 8192 --vocab 50304 --seq 2048 --batch 8)
[ -z "$SMALL" ] || size=(--width 32 --layers 2 --heads 2 --kv-heads 1 --ffn 48 --vocab 256 --seq 32 --batch 2)
step "profile by op" 90 "$BIN/train_llama" --device "$DEVICE" --dtype bf16 --data "text:$work/text" "${size[@]}" --steps 6 \
  --warmup 1 --eval-samples 4 --profile --out "$work/profiled"
step "architectures and ops" 240 "$BIN/bench" gpu --device "$DEVICE" --rounds "${ROUNDS:-5}" --json "$RESULTS/where.json" \
  --only "${PARTS:-architectures,ops}"
[ "$DEVICE" = cuda ] || finish
for kernel in attention mma_kernel loss_kernel route rmsnorm; do
  step "counters of $kernel" 45 bash -c "echo 1 | ncu --clock-control none --section SpeedOfLight --section Occupancy \
    -k regex:$kernel -c 4 '$BIN/bench' serve --device cuda --dtype bf16 ${wide[*]}"
done
finish
