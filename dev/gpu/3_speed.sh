#!/usr/bin/env bash
# How fast, beside PyTorch: products, attention, training steps of 124M and 1B parameters. About 7 minutes.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build bench
step "speed" 570 "$BIN/bench" gpu --device "$DEVICE" --rounds "${ROUNDS:-3}" --json "$RESULTS/speed.json" \
  --only "${PARTS:-machine,products,attention,steps,torch}"
finish
