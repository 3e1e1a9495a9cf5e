#!/usr/bin/env bash
# Names and texts of others: none steers the terminal, none is a formula in a table, none reorders a figure or a page.
# And what a killed program left is gone after the next one.   tests/system/test_foreign_names.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
start_in_scratch "$1" 1
export LC_ALL=C
evil=$'\e[31m\xe2\x80\xae\xc2\x9b\r\x07'
controls=$'[\x01-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]'
plain_file() { ! grep -qP "$controls" "$1" || fail "${2:-$1}: a control character, as in: $(grep -P "$controls" "$1" | head -1 | cat -v)"; }
# quiet CODE COMMAND...: the exit code, and no control character in what is printed.
quiet() {
  local code=$1 got
  shift
  "$@" >output 2>&1 </dev/null
  got=$?
  [ $got = "$code" ] || fail "exit code $got, want $code: $(printf '%q ' "$@")"
  plain_file output "$(basename "$1")"
}

yes 'some words to learn ' | head -300 >"$evil.txt"
quiet 0 "$build/train_llama" --data "text:$evil.txt" "${sizes[@]}" --steps 3 --save-every 1 --out "run$evil"
quiet 0 "$build/train_llama" --resume --steps 5 --out "run$evil"
quiet 0 "$build/train_llama" --data "text:$evil.txt" "${sizes[@]}" --dry-run
quiet 0 "$build/train_llama" --data "text:$evil.txt" --init "run$evil" --seq 32 --batch 2 --eval-samples 2 --steps 1 --out "next$evil"
quiet 0 "$build/train_llama" --data "text:$evil.txt" --init "run$evil" --steps 0 --out "zero$evil"
quiet 0 "$build/train_lime" --data "text:$evil.txt" --init "run$evil" --seq 32 --batch 2 --eval-samples 2 --steps 1 --out "lime$evil"
quiet 0 "$build/train_llama" --data "text:$evil.txt" "${sizes[@]}" --dump-tensors '*' --out "dump$evil"
echo x >>"run$evil/step_00000005/model.safetensors"
quiet 0 "$build/train_llama" --resume --steps 6 --out "run$evil"
plain_file "run$evil/curve.svg"
quiet 0 "$build/evaluate" --model "run$evil" --data "text:$evil.txt"
quiet 0 "$build/generate" --model "run$evil" --prompt "a$evil" --max-new 4
printf '%s\n' "{\"prompt\": \"a\\u001b\\u009b\\u202e\"}" >prompts
quiet 0 "$build/generate" --model "run$evil" --prompts prompts --max-new 4
quiet 0 "$build/curves" "run$evil" --loss train --out "fig$evil.svg" --title "t$evil"
quiet 0 "$build/curves" "n$evil=run$evil" "m$evil=next$evil" --loss train --out "fig$evil.svg"
plain_file "fig$evil.svg"
quiet 64 "$build/curves" "$evil"
quiet 0 "$build/compare" --arch llama,lime --data "text:$evil.txt" "${sizes[@]}" --steps 2 --out "cmp$evil"
plain_file "cmp$evil/compare.svg"
plain_file "cmp$evil/results.md"
sed -E 's/"error": "[^"]*"/"error": "\\u001b[31m\\u202e"/; s/"state": "done"/"state": "failed"/; s/"lr": [0-9.e-]+/&/' \
  "cmp$evil/results.json" >changed.json
cp changed.json "cmp$evil/results.json"
quiet 0 "$build/curves" "cmp$evil"
quiet 0 "$build/compare" --resume --dry-run --out "cmp$evil"
printf '%s' '{"runs": [{"name": "a\u001b[31m\u202e", "directory": "llama"}]}' >"cmp$evil/results.json"
quiet 0 "$build/curves" "cmp$evil" --out "fig$evil.svg"
plain_file "fig$evil.svg"
quiet 65 "$build/compare" --resume --out "cmp$evil"

# --- analyses: terminal, tables, figures, the page ------------------------------------------------------------------
formula='=1+1'
cp -r "run$evil" "$formula" && rm -r "$formula"/damaged_* && cp -r "$formula" "@a$evil"
quiet 0 "$build/analyze" --model "$formula" "@a$evil" --data "text:$evil.txt" --what entropy lens --sequences 2 --length 8 --out found
for file in found/*.{csv,svg}; do plain_file "$file"; done
grep -q "^'=1+1," found/entropy.csv && grep -q "^'@a" found/entropy.csv || fail "a name is a formula in entropy.csv"
grep -qE '^"?[=+@-]' found/*.csv && fail "a formula in a CSV file: $(grep -hE '^"?[=+@-]' found/*.csv | head -1)"
quiet 0 "$build/analyze" --model "$formula" --data "text:$evil.txt" --what all --sequences 2 --length 8 --out page$evil
plain_file "page$evil/report.html"

# --- what a kill leaves --------------------------------------------------------------------------------------------
dead=999999999
model=$(ls -d "$formula"/step_*[0-9] | tail -1)
echo 1 2 3 4 5 6 7 8 9 >tokens.txt
touch .tmp-{fig.svg,grads.safetensors}-$dead found/.tmp-{entropy.json,entropy.csv,entropy.svg,values.safetensors}-$dead
mkdir fresh && touch fresh/.tmp-tensors.safetensors-$dead .tmp-thesis-$dead
quiet 0 "$build/curves" "$formula" --loss train --out fig.svg
quiet 0 "$build/gradients" --model "$model" --tokens tokens.txt --batch 1 --seq 8 --out grads.safetensors
quiet 0 "$build/analyze" --model "$formula" --data "text:$evil.txt" --what entropy --dump 'hidden.*' --sequences 2 --length 8 --out found
quiet 0 "$build/train_llama" --data "text:$evil.txt" "${sizes[@]}" --dump-tensors '*' --out fresh
[ -z "$(find . -name ".tmp-*-$dead" ! -name '*thesis*')" ] || fail "temporaries of killed programs stay: $(find . -name ".tmp-*-$dead")"
[ -e .tmp-thesis-$dead ] || fail "a file of somebody else is gone"

conclude "foreign names"
