#!/usr/bin/env bash
# The gradients of every architecture, four layers of width 512, against the CPU's.
. "$(dirname "${BASH_SOURCE[0]}")/../steps.sh"
sizes=(2 512 8192 --width 512 --layers 4 --heads 8 --kv-heads 4 --ffn 1024)
[ -z "$DRY" ] || sizes=(2 32 256 --width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48)
for program in "$BIN"/train_*; do
  arch=${program##*/train_}
  [ -x "$program" ] && [ "$arch" != inheritune ] || continue # a recipe, no architecture
  gradients "$arch" "$arch" "${sizes[@]}"
done
