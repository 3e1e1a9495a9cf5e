#!/usr/bin/env bash
# The Inheritune paper in small, on a CPU: a reference of 8 blocks, what it hands down to models of half its depth, and
# the paper's baselines, all on the same text with the same fixed validation set. A signal stops it at any time, with
# exit code 75; started again it goes on where it was.
#   dev/inheritune.sh OUT [TEXT]     TEXT: a file of a megabyte or more (default: the project's own sources)
#   SEEDS="1 2 3" STEPS=2000 BUILD=build LAYERS=8 WIDTH=64
set -euo pipefail
absolute() { case $1 in /* | '') echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
stop() {
  echo "error: ${*:2}" >&2
  exit "$1"
}
out=$(absolute "${1:?usage: dev/inheritune.sh OUT [TEXT]}") text=$(absolute "${2:-}")
cd "$(dirname "$0")/.."
build=${BUILD:-build} seeds=${SEEDS:-1 2 3} steps=${STEPS:-2000} L=${LAYERS:-8} C=${WIDTH:-64}
half=$((L / 2)) quarter=$((L / 4))
[ "$L" -gt 0 ] && [ $((L % 4)) = 0 ] || stop 64 "LAYERS=$L is no multiple of 4; the baselines have a half and a quarter of the blocks"
[ -z "$text" ] || [ -e "$text" ] || stop 66 "$text: no such file"

# A step of all this, in the background: only so does a signal reach the shell at once, which passes it on.
run() {
  "$@" &
  wait $!
}
stopped() {
  trap '' INT TERM HUP
  local children
  children=$(jobs -p)
  if [ -n "$children" ]; then
    # shellcheck disable=SC2086
    kill -TERM $children 2>/dev/null || true
    wait
  fi
  echo "stopped on request; the same command goes on"
  exit 75
}
trap stopped INT TERM HUP

# One directory has runs of one setting; further seeds may come later.
mkdir -p "$out"
settings="LAYERS=$L WIDTH=$C STEPS=$steps TEXT=${text:-the sources}"
if [ -e "$out/settings" ]; then
  [ "$(cat "$out/settings")" = "$settings" ] ||
    stop 64 "$out has $(cat "$out/settings"), not $settings; start it as it was, or choose another OUT"
else
  printf '%s\n' "$settings" >"$out/settings.part" && mv "$out/settings.part" "$out/settings"
fi

# The same for the same sources: those that git knows, where there is git, in one order everywhere.
own_sources() {
  { git ls-files 2>/dev/null || find . -type f | sed 's|^\./||'; } | LC_ALL=C sort |
    grep -E '^(([A-Z]+|docs/[a-z/-]+)\.md|(cli|data|dev|engine|eval|kernels|models|ranks|tests|train)/.*\.(cpp|h|cu))$'
}
if [ -z "$text" ]; then
  text=$out/text.txt
  [ -e "$text" ] || { own_sources | tr '\n' '\0' | xargs -0 cat >"$text.part" && mv "$text.part" "$text"; }
fi

data=(--data "text:$text")
sizes=(--width "$C" --heads 4 --bias false)
recipe=(--seq 128 --steps "$steps" --batch 16 --lr 2e-3 --warmup "$((steps / 20))" --schedule cosine_to_floor --lr-floor 0.1
  --weight-decay 0.1 --beta2 0.95 --eval-samples 0 --keep 1 --save-every "$steps" --eval-every "$(((steps + 3) / 4))")

# train NAME FLAGS...: a run of this seed, from the start, or from where it stopped.
train() {
  local to=$dir/$1
  shift
  if [ -e "$to/flags.json" ]; then run "$build/train_gpt2" --resume --out "$to"
  else run "$build/train_gpt2" --out "$to" --seed "$seed" "${data[@]}" "${recipe[@]}" "$@"; fi
}
# start NAME FLAGS...: a model made of another one's blocks.
start() {
  local to=$dir/start_$1
  shift
  [ -e "$to" ] || run "$build/transplant" --out "$to" "$@"
}
inheritune() {
  local to=$dir/inheritune
  if [ -e "$to/inheritune.json" ]; then run "$build/train_inheritune" --resume --out "$to"
  else
    run "$build/train_inheritune" --reference "$dir/reference" --start "$half" --grow 2 --out "$to" --seed "$seed" \
      "${data[@]}" "${recipe[@]}"
  fi
}
last_round() { printf '%s\n' "$out/seed_$1"/inheritune/round_* | sort -V | tail -1; }

for seed in $seeds; do
  dir=$out/seed_$seed
  mkdir -p "$dir"
  train reference --layers "$L" "${sizes[@]}"
  inheritune
  train random --layers "$half" "${sizes[@]}"
  train random_double --steps "$((2 * steps))" --layers "$half" "${sizes[@]}"
  train small --layers "$quarter" "${sizes[@]}"
  start stacking --model "$dir/small" --blocks "0-$((quarter - 1)),0-$((quarter - 1))"
  train stacking --init "$dir/start_stacking"
  start hybrid --model "$dir/reference" --blocks "0-$((quarter - 1)),0-$((quarter - 1))"
  train hybrid --init "$dir/start_hybrid"
  start half_width --model "$dir/reference" --width "$((C / 2))" --heads 2
  train half_width --init "$dir/start_half_width"
  train distilled --layers "$half" "${sizes[@]}" --teacher "$dir/reference"
done

# Each seed's last round, the recipe's result; with its number of blocks, where that is always the same.
blocks=$(for seed in $seeds; do last_round "$seed"; done | sed 's/.*_//' | sort -nu)
inherited=inherited
[ "$(wc -l <<<"$blocks")" != 1 ] || inherited="inherited, $blocks blocks"
runs=()
for seed in $seeds; do
  dir=$out/seed_$seed
  runs+=("reference, $L blocks=$dir/reference" "$inherited=$(last_round "$seed")" "random, $half blocks=$dir/random"
    "random, twice the steps=$dir/random_double" "stacking=$dir/stacking" "hybrid stacking=$dir/hybrid"
    "half width, $L blocks=$dir/half_width" "distilled, $half blocks=$dir/distilled")
done
"$build/curves" --out "$out/inheritune.svg" --title "Inheritune in small: test loss" "${runs[@]}" | tee "$out/table.txt"
first=${seeds%% *}
run "$build/analyze" --what attention "${data[@]}" --out "$out/attention" \
  --model "$out/seed_$first/reference" "$(last_round "$first")"
