#!/usr/bin/env bash
# Is it right: gradients at real sizes against the CPU, and resuming in another process.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build all tests
[ "$DEVICE" != cuda ] || step "the GPU works" 60 "$BIN/tests" '-tc=convert*' || finish

# gradients NAME ARCH BATCH SEQ VOCAB FLAGS...: of a new model, on both devices, in both types.
gradients() {
  local name=$1 arch=$2 batch=$3 seq=$4 vocab=$5
  shift 5
  step "$name: a model" 60 "$BIN/train_$arch" --data "$(tokens "$vocab")" --vocab "$vocab" --seq "$seq" "$@" \
    --steps 0 --out "$work/model"
  step "$name: gradients" 180 "$tools/compare_devices.sh" "$work/model" "$(tokens "$vocab")" "$batch" "$seq"
  rm -rf "$work/model"
}
# resume DTYPE FLAGS...: of LIMe. The data's first eight sequences are trained on, the others left.
resume() {
  local dtype=$1
  shift
  step "resuming, $dtype: the same bits" 90 "$tools/resume.sh" "$BIN/train_lime" --device "$DEVICE" --dtype "$dtype" \
    --data "$(tokens 8192)" --vocab 8192 "$@"
}
if [ -n "$SMALL" ]; then
  gradients "tiny" llama 2 32 8192 --width 32 --layers 1 --heads 2 --ffn 48
  gradients "tiny, fewer words" lime 2 32 256 --width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48
  for dtype in fp32 bf16; do
    resume $dtype --width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48 --seq 32 --batch 2
  done
  finish
fi
gradients "C=768, T=1024" lime 4 1024 50257 --width 768 --layers 4 --heads 12 --kv-heads 4 --ffn 2048
for dtype in fp32 bf16; do
  resume $dtype --width 768 --layers 4 --heads 12 --kv-heads 4 --ffn 2048 --seq 512 --batch 4
done
gradients "several chunks of logits" llama 12 1024 50257 --width 64 --layers 1 --heads 1 --ffn 128
gradients "rows of 1B, T=2048" llama 1 2048 50257 --width 2048 --layers 1 --heads 32 --kv-heads 8 --ffn 8192
for program in "$BIN"/train_*; do
  arch=${program##*/train_}
  [ -x "$program" ] && [ "$arch" != inheritune ] || continue  # a recipe, no architecture
  gradients "$arch" "$arch" 2 512 8192 --width 512 --layers 4 --heads 8 --kv-heads 4 --ffn 1024
done
finish
