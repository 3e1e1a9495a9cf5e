#!/usr/bin/env bash
# What other programs on the cores cost a training run, by how long OpenMP's threads spin before they sleep.
#   dev/bench_neighbours.sh [BUILD_DIR [ROUNDS]]
# For 0, 1 and 2 busy neighbours and two models, medians of tokens/s over the rounds; within a round the settings take
# turns. `ours` is the bound that the programs set themselves, `default` the runtime's own, `passive` no spinning.
set -euo pipefail
build=$(cd "${1:-build}" && pwd) rounds=${2:-3}
work=$(mktemp -d)
neighbours=()
quiet() { for pid in "${neighbours[@]}"; do kill "$pid" 2>/dev/null || true; done; neighbours=(); }
trap 'quiet; rm -rf "$work"' EXIT
head -c 400000 /dev/urandom >"$work/data"

declare -A flags=(
  [narrow]="--width 32 --ffn 128 --layers 4 --heads 4 --seq 1024 --batch 8 --steps 40"
  [wide]="--width 256 --ffn 1024 --layers 4 --heads 8 --seq 512 --batch 4 --steps 6"
)
setting() {
  case $1 in
    ours) ;;
    default) export GOMP_SPINCOUNT=300000 KMP_BLOCKTIME=200 ;;
    passive) export OMP_WAIT_POLICY=passive ;;
    *) export GOMP_SPINCOUNT=$1 ;;
  esac
}
rate() {  # MODEL SETTING: the median step's tokens/s
  rm -rf "$work/run"
  # shellcheck disable=SC2086
  (unset OMP_WAIT_POLICY GOMP_SPINCOUNT KMP_BLOCKTIME; setting "$2"
   "$build/train_llama" --data "text:$work/data" ${flags[$1]} --eval-samples 1 --out "$work/run" >/dev/null)
  sed 's/.*"tokens_per_s":\([0-9.e+]*\).*/\1/' "$work/run/metrics.jsonl" | sort -g | awk '{x[NR]=$1} END {printf "%.0f\n", x[int((NR+1)/2)]}'
}

settings=(${SETTINGS:-ours default passive})
printf '%-8s %-11s' model neighbours; printf ' %10s' "${settings[@]}"; echo
for model in narrow wide; do
  for count in 0 1 2; do
    for ((i = 0; i < count; ++i)); do (while :; do :; done) & neighbours+=($!); done
    for ((round = 0; round < rounds; ++round)); do
      for s in "${settings[@]}"; do rate $model "$s" >>"$work/$s"; done
    done
    quiet
    printf '%-8s %-11s' $model $count
    for s in "${settings[@]}"; do printf ' %10s' "$(sort -g "$work/$s" | sed -n "$(((rounds + 1) / 2))p")"; rm "$work/$s"; done
    echo
  done
done
