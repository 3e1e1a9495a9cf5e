#!/usr/bin/env bash
# What the words after `make` do: each program's name builds it, and starts nothing. Only printed, by make -n.
set -uo pipefail
cd "$(dirname "$0")/.."
failures=0
fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
}
planned() { make -n BUILD=build-none "$@" 2>&1; }

# Never `make | grep -q`: make under another make still writes "Leaving directory", and dies when grep has gone.
help=$(make help)
programs=$(grep -lE '^int main\(' train/*.cpp train/lab/*.cpp eval/*.cpp eval/inside/*.cpp data/*.cpp | sed 's|.*/||; s|\.cpp$||')
[ "$(wc -w <<<"$programs")" -ge 30 ] || fail "found only these programs: $programs"
for program in $programs tests; do
  output=$(planned "$program") || fail "make $program: exit code $?"
  grep -q -- "--target $program\$" <<<"$output" || fail "make $program does not build $program: $output"
  ! grep -q '^build-none/\|^dev/setup.sh' <<<"$output" || fail "make $program does more than build it: $output"
  grep -qwF -- "$program" <<<"$help" || fail "make help does not name $program"
done
output=$(planned compare generate)
[ "$(grep -c -- '--target' <<<"$output")" = 2 ] && ! grep -q '^build-none/' <<<"$output" ||
  fail "make compare generate builds more or less than these two: $output"
for action in "compare-all compare --arch all" "bench bench" "figures figures"; do
  read -r target command <<<"$action"
  output=$(planned "$target")
  grep -q "^build-none/$command" <<<"$output" || fail "make $target does not start $command: $output"
done
# The first tier leaves out the second, which builds what nobody else does.
output=$(planned test)
grep -q -- '-LE second' <<<"$output" && grep -q -- '--target all quick_start tests fault_injection$' <<<"$output" ||
  fail "make test does not build and run the first tier: $output"
output=$(planned test-second END=5)
grep -q '^tests/second_tier.sh build-none [0-9]* 5;' <<<"$output" && grep -q -- 'fuzz_targets .*bench coordinates$' <<<"$output" ||
  fail "make test-second does not build and run the second tier: $output"
output=$(planned test-one TEST=test_gate)
grep -q -- '-DCROSSPLY_TEST=test_gate' <<<"$output" || fail "make test-one does not name the file: $output"
# `make run` waits for quick_start alone, and compiles the rest after it has begun.
output=$(planned run)
first=$(grep -m1 -n -- '--target' <<<"$output") start=$(grep -n '^echo "build-none/quick_start' <<<"$output")
grep -q -- '--target quick_start$' <<<"$first" && [ "${first%%:*}" -lt "${start%%:*}" ] ||
  fail "make run builds more than quick_start first: $output"
# It ends with the spread of five seeds, in the numbers of README's table.
numbers=$(planned run | grep -oE '[0-9.]+ ± [0-9.]+ %')
[ "$(wc -l <<<"$numbers")" = 2 ] || fail "make run does not say how far seeds differ: $numbers"
while read -r number; do
  grep -qF "$number" README.md || fail "make run says $number, README.md does not"
done <<<"$numbers"
[ $failures = 0 ] || exit 1
