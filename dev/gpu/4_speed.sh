#!/usr/bin/env bash
# How fast, beside PyTorch: products, attention, training steps of 124M and 1B parameters.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build bench generate tests
[ "$DEVICE" != cuda ] || step "the GPU works" 60 "$BIN/tests" '-tc=convert*' || finish
step "speed" 550 "$BIN/bench" gpu --device "$DEVICE" --rounds "${ROUNDS:-3}" --json "$RESULTS/speed.json" \
  --only "${PARTS:-machine,products,attention,steps,torch}"
finish
