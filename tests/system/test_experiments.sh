#!/usr/bin/env bash
# dev/experiments: pictures and tables are those that the records make; the small experiment, trained again, has the
# same bits where the same compiler may use the same instructions; what is wrong is refused.
#   tests/system/test_experiments.sh BUILD
set -uo pipefail
export BUILD
BUILD=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/../.." && pwd)
. "$source/tests/support/expect.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# What figures writes is what is there, file by file.
cp -r "$source/dev/experiments" drawn
find drawn \( -name '*.svg' -o -name results.md -o -name budget.md \) -delete
expect 0 'small/results.md' "$BUILD/figures" drawn
diff -r "$source/dev/experiments" drawn >output || fail "dev/experiments is not what its records make: make figures"

# Numbers that are not of the clock, and what decides their last digits.
bits() { sed -n '/"runs": \[/,$p' "$1" | sed -E 's/"(training_seconds|tokens_per_second|runs_side_by_side)":[^,}]*[,}]//g'; }
made_by() { grep -oE '"(compiler|cpu)":"[^"]*"|"instruction_sets":\[[^]]*\]' "$1" | sort -u; }
recorded=$source/dev/experiments/small/small.json
small() { env "OUT=$work/$1" "RECORDS=$work/$1" "JOBS=$2" "$source/dev/experiments/run.sh" small; }
expect 0 'results:' small one 1
# Stopped, and gone on with, two runs side by side; then once more, with nothing left to do.
timeout --preserve-status -s TERM 2 env "OUT=$work/two" "RECORDS=$work/two" JOBS=2 "$source/dev/experiments/run.sh" small >output 2>&1
code=$?
[ $code = 75 ] || [ $code = 0 ] || fail "a stopped experiment ended with $code"
expect 0 'results:' small two 2
diff <(bits one/small/small.json) <(bits two/small/small.json) >output || fail "a stop, or two side by side, changed bits"
expect 0 'results:' small two 2
grep -q 'step 400: test loss' output && fail "what was done was trained again"
if [ "$(made_by one/small/small.json)" = "$(made_by "$recorded")" ]; then
  diff <(bits one/small/small.json) <(bits "$recorded") >output || fail "the small experiment has other numbers than its record"
else
  echo "the record is of another CPU or compiler, which change last digits: compared only with itself"
fi
expect 0 '^0.003$' "$BUILD/figures" --best lime --as "$recorded"

expect 66 'nowhere: no such directory' "$BUILD/figures" nowhere
expect 66 'nowhere/results.json' "$BUILD/figures" --take nowhere --as record.json
expect 64 '--as' "$BUILD/figures" --take one/small/small
expect 64 'nothing is no experiment' "$source/dev/experiments/run.sh" nothing
mkdir -p bad/small
echo '{"format": "other"}' >bad/small/small.json
expect 65 'is no record' "$BUILD/figures" bad
head -c 2000 "$recorded" >bad/small/small.json
expect 65 'bad/small/small.json' "$BUILD/figures" bad
[ ! -e bad/small/results.md ] || fail "a page of a bad record"
[ $failures = 0 ] && echo passed
