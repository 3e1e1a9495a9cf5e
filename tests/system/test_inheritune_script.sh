#!/usr/bin/env bash
# dev/inheritune.sh, as small as it gets: killed in the middle it goes on, a second start trains nothing, and other
# settings are refused.
#   tests/system/test_inheritune_script.sh BUILD_DIR
set -uo pipefail
build=$(cd "$1" && pwd)
script=$(cd "$(dirname "$0")/../../dev" && pwd)/inheritune.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=1 BUILD=$build LAYERS=4 WIDTH=16 STEPS=8 SEEDS=1
failures=0
fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' output | tail -8
}
refuses() {  # refuses CODE PATTERN COMMAND...
  "${@:3}" >output 2>&1
  [ $? = "$1" ] || fail "not exit code $1: ${*:3}"
  [ "$(wc -l <output)" = 1 ] && grep -qE "^error: .*$2" output || fail "not one line with '$2': ${*:3}"
}
awk 'BEGIN { for (i = 0; i < 9000; ++i) printf "%d ", (i * i + 7 * i) % 997 * 31 }' >text.txt
refuses 64 'LAYERS=6 is no multiple of 4' env LAYERS=6 "$script" out text.txt
refuses 66 'nowhere.txt: no such file' "$script" out nowhere.txt
[ ! -e out ] || fail "a refused start left something behind"

# A signal ends the trainer first, which leaves a checkpoint; in the middle of the list, whatever runs there.
stop_with() {  # stop_with SIGNAL RUN STEPS
  env --default-signal=INT STEPS="$3" "$script" "out$3" text.txt >output 2>&1 &
  local pid=$!
  while [ ! -s "out$3/seed_1/$2/metrics.jsonl" ] && kill -0 $pid 2>/dev/null; do sleep 0.02; done
  kill "-$1" $pid
  wait $pid
  [ $? = 75 ] || fail "SIG$1 does not end it with 75"
  [ "$(tail -1 output)" = "stopped on request; the same command goes on" ] || fail "SIG$1: nobody says how to go on"
}
stop_with INT reference 100000
grep -q '; to continue: ' output || fail "the trainer was not waited for"
compgen -G "out100000/seed_1/reference/step_*" >/dev/null || fail "the trainer left no checkpoint"
stop_with TERM random 8
"$script" out8 text.txt >output 2>&1 || fail "it does not go on"
grep -q 'resumed after step 8, the last one' output || fail "the reference was trained again"
for name in 'reference, 4 blocks' 'inherited, [24] blocks' 'random, 2 blocks' 'random, twice the steps' stacking \
  'hybrid stacking' 'half width, 4 blocks' 'distilled, 2 blocks'; do
  grep -qE "^$name +1 +(8|16) " out8/table.txt || fail "table.txt has no row for $name"
done
[ -s out8/inheritune.svg ] && [ -s out8/attention/attention.csv ] || fail "no picture, or no analysis"

# Nothing is trained or made again.
touch mark
SEEDS= "$script" out8 text.txt >/dev/null 2>&1 & pid=$!  # an empty SEEDS is the default: further seeds
while [ ! -e out8/seed_2 ] && kill -0 $pid 2>/dev/null; do sleep 0.02; done
kill $pid && wait $pid
[ -e out8/seed_2 ] || fail "an empty SEEDS is not three seeds"
"$script" out8 text.txt >output 2>&1 || fail "a second start fails"
[ -z "$(find out8/seed_1 -name '*.safetensors' -newer mark)" ] || fail "a second start writes models again"

# One directory, one setting.
cp text.txt other.txt
refuses 64 'has LAYERS=4 WIDTH=16 STEPS=8 TEXT=.*, not .*STEPS=9' env STEPS=9 "$script" out8 text.txt
refuses 64 'choose another OUT' env WIDTH=32 "$script" out8 text.txt
refuses 64 'choose another OUT' "$script" out8 other.txt
refuses 64 'TEXT=the sources; start' "$script" out8

[ $failures = 0 ] && echo "inheritune.sh: all as documented" || echo "inheritune.sh: $failures failures"
[ $failures = 0 ]
