#!/usr/bin/env bash
# analyze --what all, stopped by Ctrl-C: the page of what is done stays, with one line and exit code 75.
#   tests/system/test_analyze_stop.sh BUILD_DIR
set -uo pipefail
# shellcheck source=tests/support/expect.sh
. "$(dirname "$0")/../support/expect.sh"
start_in_scratch "$1" 2
for _ in $(seq 200); do echo "the quick brown fox jumps over the lazy dog"; done >text
expect 0 'step 2/2' "$build/train_llama" "${sizes[@]}" --steps 2 --data text:text --out llama
interrupted page/report.html "$build/analyze" --model llama --data text:text --what all --sae-tokens 50000000 --out page
got=$?
[ $got = 75 ] || fail "exit code $got, want 75"
[ "$(grep -c '^stopped: page/report.html has [0-9]* of 13 analyses$' output)" = 1 ] || fail "no line says what there is"
grep -q 'Not complete: [0-9]* of 13 analyses' page/report.html || fail "the page does not say that it is not complete"
tail -1 page/report.html | grep -qx '</html>' || fail "the page has no end"
conclude test_analyze_stop
