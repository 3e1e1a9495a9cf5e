#!/usr/bin/env bash
# dev/experiments: pictures and tables are those that the records make; the small experiment, trained again, has the
# same bits where the same compiler may use the same instructions; what is wrong is refused.
#   tests/test_experiments.sh BUILD
set -uo pipefail
export BUILD
BUILD=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/.." && pwd)
. "$source/tests/expect.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# What figures writes is what is there, file by file.
cp -r "$source/dev/experiments" drawn
find drawn \( -name '*.svg' -o -name results.md -o -name budget.md \) -delete
expect 0 'small/results.md' "$BUILD/figures" drawn
diff -r "$source/dev/experiments" drawn >output || fail "dev/experiments is not what its records make: make figures"

# Numbers that are not of the clock.
bits() { sed -n '/"runs": \[/,$p' "$1" | sed -E 's/"(training_seconds|tokens_per_second|runs_side_by_side)":[^,}]*[,}]//g'; }
made_by() { grep -o '"build":{[^}]*}' "$1" | sed 's/"commit":"[^"]*",//' | sort -u; }
recorded=$source/dev/experiments/small/small.json
expect 0 'results:' env "OUT=$work/runs" "RECORDS=$work" "$source/dev/experiments/run.sh" small
if [ "$(made_by small/small.json)" = "$(made_by "$recorded")" ]; then
  diff <(bits small/small.json) <(bits "$recorded") >output || fail "the small experiment has other numbers than its record"
else
  echo "another compiler or other instructions than the record's, which change last digits: only tried whether it runs"
fi
expect 0 'results:' env "OUT=$work/runs" "RECORDS=$work" "$source/dev/experiments/run.sh" small  # nothing is left to do

expect 66 'nowhere: no such directory' "$BUILD/figures" nowhere
expect 66 'nowhere/results.json' "$BUILD/figures" --take nowhere --as record.json
expect 64 '--as' "$BUILD/figures" --take runs/small/small
expect 64 'nothing is no experiment' "$source/dev/experiments/run.sh" nothing
mkdir -p bad/small
echo '{"format": "other"}' >bad/small/small.json
expect 65 'is no record' "$BUILD/figures" bad
head -c 2000 "$recorded" >bad/small/small.json
expect 65 'bad/small/small.json' "$BUILD/figures" bad
[ ! -e bad/small/results.md ] || fail "a page of a bad record"
[ $failures = 0 ] && echo passed
