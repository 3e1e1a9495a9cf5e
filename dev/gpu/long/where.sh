#!/usr/bin/env bash
# Where the time goes: a profile by op, every architecture beside LLaMA, each op beside a copy, counters.
. "$(dirname "${BASH_SOURCE[0]}")/../steps.sh"
random_tokens "$W/tokens.bin" 500000 $vocab
run=(--device "$device" --dtype bf16 --data "$W/tokens.bin" --eval-samples 4)
step "profile by op" 90 "$BIN/train_llama" "${run[@]}" "${m124[@]}" --steps 6 --warmup 1 --profile --out "$W/profiled"
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
