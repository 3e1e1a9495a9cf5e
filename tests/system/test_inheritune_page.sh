#!/usr/bin/env bash
# Every command of docs/inheritune.md is one that the programs take. Trainers only plan, with the flags of the page; the
# models that later commands start from are written, as deep as there and with as many heads, but 32 times narrower.
#   tests/system/test_inheritune_page.sh BUILD_DIR
set -uo pipefail
build=$(cd "$1" && pwd)
page=$(cd "$(dirname "$0")/../../docs" && pwd)/inheritune.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=2
failures=0 commands=0
takes() {
  "$@" >output 2>&1 </dev/null && return
  failures=$((failures + 1))
  echo "FAIL: ${*#"$build"/}"
  sed 's/^/  | /' output | tail -3
  return 1
}
declare -A heads=([small]=12 [medium]=16 [large]=20 [xl]=25 [none]=2)  # of 64 each; none: 128 wide, without a preset
train_gpt2() {
  commands=$((commands + 1))
  takes "$build/train_gpt2" "$@" --dry-run || return
  [[ " $* " != *" --init "* && " $* " != *" --teacher "* ]] || return 0
  local size seq=16
  size=$(sed -nE 's/.*--preset gpt2-([a-z]+).*/\1/p' <<<"$*")
  [ -n "$size" ] || size=none seq=256
  takes "$build/train_gpt2" "$@" --steps 0 --width $((2 * heads[$size])) --ffn 8 --seq $seq --batch 1 --device cpu \
    --dtype fp32
}
train_inheritune() {
  commands=$((commands + 1))
  takes "$build/train_inheritune" "$@" --dry-run
}
transplant() {
  commands=$((commands + 1))
  local flags=("$@") i
  for i in "${!flags[@]}"; do
    [ "${flags[i]}" != --width ] || flags[i + 1]=$((flags[i + 1] / 32))
  done
  takes "$build/transplant" "${flags[@]}"
}
analyze() {
  commands=$((commands + 1))
  takes "$build/analyze" "$@" --sequences 2
}
torchrun() {
  [ "$1 $2" = "--no-python --nproc-per-node" ] && shift 3
  "$@"
}

make() { :; }  # what it builds and runs has a test of its own

# A text, and shards of 4,000 zeros each.
yes | head -c 20000 >my.txt
for data in owt fineweb; do
  mkdir $data
  { printf '\x88\xd8\x34\x01\x01\x00\x00\x00\xa0\x0f\x00\x00' && head -c 9012 /dev/zero; } >$data/train_1.bin
  cp $data/train_1.bin $data/val.bin
done
awk '/^```/ { inside = !inside; next } inside' "$page" | sed 's|^build/||' >commands
# shellcheck disable=SC1091
. ./commands
[ $commands -ge 80 ] || { echo "FAIL: only $commands commands were found"; failures=1; }
[ $failures = 0 ] && echo "inheritune.md: $commands commands" || echo "inheritune.md: $failures of $commands commands fail"
[ $failures = 0 ]
