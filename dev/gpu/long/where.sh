#!/usr/bin/env bash
# Where the time goes: a profile by op, every architecture beside LLaMA, each op beside a copy, counters.
. "$(dirname "${BASH_SOURCE[0]}")/../steps.sh"
size=(--width 768 --layers 12 --heads 12 --kv-heads 12 --ffn 2048 --vocab 50304 --seq 1024 --batch 32)
wide=(--width 2048 --layers 2 --heads 32 --kv-heads 8 --ffn 8192 --vocab 50304 --seq 2048 --batch 8)
vocab=50304
[ -z "$DRY" ] || { size=(--width 32 --layers 2 --heads 2 --kv-heads 1 --ffn 48 --vocab 256 --seq 32 --batch 2) && vocab=256; }
"$PYTHON" "$tools/random_tokens.py" "$W/tokens.bin" 500000 $vocab
run=(--device "$device" --dtype bf16 --data "$W/tokens.bin" --eval-samples 4)
step "profile by op" 90 "$BIN/train_llama" "${run[@]}" "${size[@]}" --steps 6 --warmup 1 --profile --out "$W/profiled"
step "architectures and ops" 240 "$BIN/bench" gpu --device "$device" --rounds "${ROUNDS:-5}" \
  --json "$OUT/where.json" --only "${PARTS:-architectures,ops}"
[ -z "$DRY" ] || exit
counters=(ncu --clock-control none --section SpeedOfLight --section Occupancy -c 4)
for kernel in attention loss_kernel rmsnorm swiglu; do
  # shellcheck disable=SC2016
  step "counters of $kernel" 45 bash -c 'echo 1 | "$@"' - "${counters[@]}" -k "regex:$kernel" "$BIN/bench" serve \
    --device cuda --dtype bf16 "${wide[@]}"
done
for kernel in mma_kernel mix_kernel correlate; do
  step "counters of $kernel" 45 "${counters[@]}" -k "regex:$kernel" "$BIN/train_lime" "${run[@]}" "${wide[@]}" \
    --steps 1 --warmup 0 --out "$W/$kernel"
done
