#!/usr/bin/env bash
# Two ranks on one GPU, by NCCL: they move memory, recorded too; their weights have one rank's bits; they end when they
# must. For what is right only: ranks that share a GPU take turns.     DEVICE=emulator DRY=1: without a GPU
. "$(dirname "${BASH_SOURCE[0]}")/../steps.sh"
long=$(dirname "${BASH_SOURCE[0]}") device=${DEVICE:-cuda}
export CROSSPLY_SHARE_GPU=1
# The first line that NCCL prints is its version.
step "memory moves" 120 "$BIN/tests" -d '-tc=nccl: ranks move memory*' || exit
step "ranks' slices are summed" 60 "$BIN/tests" -d '-tc=sum_slices*'
step "a recorded step has the bits of the step" 120 "$BIN/tests" -d '-tc=nccl: a recorded step*'
step "a rank leaves while its GPU waits" 60 "$BIN/tests" -d '-tc=nccl: a rank can leave*'

trainer=("$BIN/train_lime")
[ "$device" != emulator ] || trainer=("$BIN/tests" run train_lime)
sizes=(--width 512 --layers 4 --heads 8 --kv-heads 4 --ffn 1536 --seq 512 --batch 4)
[ -z "$DRY" ] || sizes=(--width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48 --seq 32 --batch 2)
random_tokens "$W/tokens.bin" 65536 8192
run=("${trainer[@]}" --device "$device" --data "$W/tokens.bin" --vocab 8192 "${sizes[@]}")
for dtype in fp32 bf16; do
  step "two ranks have the bits of one, $dtype" 90 "$long/two_ranks.sh" "${run[@]}" --dtype $dtype
done
for fault in kill hang; do
  step "a rank's $fault ends both" 150 "$long/lost_rank.sh" $fault "${run[@]}"
done
