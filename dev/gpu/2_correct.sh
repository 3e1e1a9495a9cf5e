#!/usr/bin/env bash
# Is it right: gradients at real sizes against the CPU, resume, the sanitizers. About 8 minutes.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build all tests

tokens=$work/tokens data=$work/text
seq 100000 >"$data"
awk -v vocab="${SMALL:+256}" 'BEGIN {
  if (vocab == "") vocab = 50257
  for (i = 0; i < 16385; ++i) { x = (x * 69069 + 12345) % 4294967296; print int(x / 4294967296 * vocab) }
}' >"$tokens"

# gradients NAME ARCH BATCH SEQ FLAGS...: of a new model, on both devices, in both types. Limits, of the norm of a
# tensor's difference over its own norm: the order of sums in fp32 costs about 1e-5, rounding to bf16 about 1e-2.
gradients() {
  local name=$1 arch=$2 batch=$3 seq=$4
  shift 4
  step "$name: a model" 60 "$BIN/train_$arch" --data "text:$data" --seq "$seq" --steps 0 "$@" --out "$work/model"
  step "$name: fp32" 90 "$tools/compare_devices.sh" "$work/model" "$tokens" "$batch" "$seq" fp32 1e-3
  step "$name: bf16" 90 "$tools/compare_devices.sh" "$work/model" "$tokens" "$batch" "$seq" bf16 1e-1
  rm -rf "$work/model"
}
if [ -n "$SMALL" ]; then
  gradients "tiny" lime 2 32 --vocab 256 --width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48
  finish
fi
gradients "C=768, T=1024" lime 4 1024 --vocab 50257 --width 768 --layers 4 --heads 12 --kv-heads 4 --ffn 2048
gradients "several chunks of logits" llama 12 1024 --vocab 50257 --width 64 --layers 1 --heads 1 --ffn 128
gradients "rows of 1B, T=2048" llama 1 2048 --vocab 50257 --width 2048 --layers 1 --heads 32 --kv-heads 8 --ffn 8192
step "resume, bit for bit" 60 "$BIN/tests" '-tc=train: a GPU*'
for program in "$BIN"/train_*; do
  arch=${program##*/train_}
  [ -x "$program" ] || continue
  gradients "$arch" "$arch" 2 512 --vocab 8192 --width 512 --layers 4 --heads 8 --kv-heads 4 --ffn 1024
done
chosen='-tc=attention*GPU*,route: the fast*,rmsnorm*,cross_entropy: the fast*,embedding: CUDA*,hyper*,multiway_mix*,head_mix*'
for tool in memcheck racecheck synccheck initcheck; do
  step "$tool" 75 compute-sanitizer --tool $tool --error-exitcode 99 "$BIN/tests" "$chosen"
done
finish
