#!/usr/bin/env bash
# The Inheritune paper in small, on a CPU: a reference of 8 blocks, what it hands down to models of half its depth, and
# the paper's baselines, all on the same text with the same fixed validation set. It can be stopped at any time, and
# goes on where it was when it is started again.
#   dev/inheritune.sh OUT [TEXT]     TEXT: a file of a megabyte or more (default: the project's own sources)
#   SEEDS="1 2 3" STEPS=2000 BUILD=build LAYERS=8 WIDTH=64
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: dev/inheritune.sh OUT [TEXT]} text=${2:-}
build=${BUILD:-build} seeds=${SEEDS:-1 2 3} steps=${STEPS:-2000} L=${LAYERS:-8} C=${WIDTH:-64}
half=$((L / 2)) quarter=$((L / 4))
mkdir -p "$out"
if [ -z "$text" ]; then
  text=$out/text.txt
  [ -e "$text" ] || cat ./*.md */*.cpp */*.h kernels/*/*.cpp kernels/*/*.h kernels/*/*.cu > "$text"
fi
data=(--data "text:$text" --seq 128)
sizes=(--width "$C" --heads 4 --bias false)
recipe=(--batch 16 --lr 2e-3 --warmup "$((steps / 20))" --schedule cosine_to_floor --lr-floor 0.1 --weight-decay 0.1 --beta2 0.95
  --eval-samples 0 --keep 1 --save-every "$steps" --eval-every $((steps / 4)))

# train NAME STEPS FLAGS...: a run of this seed, from the start, or from where it stopped.
train() {
  local run=$dir/$1 n=$2
  shift 2
  if [ -e "$run/flags.json" ]; then "$build/train_gpt2" --resume --out "$run"
  else "$build/train_gpt2" --out "$run" --seed "$seed" --steps "$n" "${data[@]}" "${recipe[@]}" "$@"; fi
}
# start NAME FLAGS...: a model made of another one's blocks.
start() {
  local to=$dir/start_$1
  shift
  [ -e "$to" ] || "$build/transplant" --out "$to" --seed "$seed" "$@"
}

for seed in $seeds; do
  dir=$out/seed_$seed
  mkdir -p "$dir"
  train reference "$steps" --layers "$L" "${sizes[@]}"
  if [ -e "$dir/inheritune" ]; then "$build/train_inheritune" --resume --out "$dir/inheritune"
  else
    "$build/train_inheritune" --reference "$dir/reference" --start "$half" --grow 2 --out "$dir/inheritune" \
      --seed "$seed" --steps "$steps" "${data[@]}" "${recipe[@]}"
  fi
  train random "$steps" --layers "$half" "${sizes[@]}"
  train random_double "$((2 * steps))" --layers "$half" "${sizes[@]}"
  train small "$steps" --layers "$quarter" "${sizes[@]}"
  start stacking --model "$dir/small" --blocks "0-$((quarter - 1)),0-$((quarter - 1))"
  train stacking "$steps" --init "$dir/start_stacking"
  start hybrid --model "$dir/reference" --blocks "0-$((quarter - 1)),0-$((quarter - 1))"
  train hybrid "$steps" --init "$dir/start_hybrid"
  start half_width --model "$dir/reference" --width "$((C / 2))" --heads 2
  train half_width "$steps" --init "$dir/start_half_width"
  train distilled "$steps" --layers "$half" "${sizes[@]}" --teacher "$dir/reference"
done

runs=()
for seed in $seeds; do
  dir=$out/seed_$seed
  runs+=("reference, $L blocks=$dir/reference")
  for round in "$dir"/inheritune/round_*; do
    runs+=("inherited, ${round##*_} blocks=$round")
  done
  runs+=("random, $half blocks=$dir/random" "random, twice the steps=$dir/random_double" "stacking=$dir/stacking"
    "hybrid stacking=$dir/hybrid" "half width, $L blocks=$dir/half_width" "distilled, $half blocks=$dir/distilled")
done
"$build/curves" --out "$out/inheritune.svg" --title "Inheritune in small: test loss" "${runs[@]}" | tee "$out/table.txt"
first=${seeds%% *}
"$build/analyze" --what attention "${data[@]}" --out "$out/attention" \
  --model "$out/seed_$first/reference" "$(ls -d "$out/seed_$first"/inheritune/round_* | tail -1)"
