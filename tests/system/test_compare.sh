#!/usr/bin/env bash
# compare: two at a time in one directory, names of any bytes, damaged results, files that cannot be written, and commands
# to paste.   tests/system/test_compare.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
start_in_scratch "$1" 1
tiny=(--data arith:3 --train-samples 40 --test-samples 8 "${sizes[@]}" --answer-samples 0)
compare() { "$build/compare" "${tiny[@]}" "$@"; }
count() { grep -c "\"state\": \"$1\"" "$2/results.json"; }

# --- refused before the first run, in a dry run, too -------------------------------------------------------------
expect 64 'mudd has no rule' compare --arch llama,mudd --transfer mup --base-width 16 --dry-run
expect 64 'z-loss 0.001 with an exit gate' compare --arch llama,llama:loop=stack:loop_passes=2:exit_gate=true --z-loss 1e-3 --dry-run

expect 0 '^note: llama and llama:attention_window_pattern=SSSL are the same model$' compare \
  --arch llama,llama:attention_window_pattern=SSSL --dry-run

# --- two started together ----------------------------------------------------------------------------------------
pids=()
for arch in llama,relay llama,sla; do
  compare --arch $arch --steps 300 --out together >together.$arch 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || fail "one of two comparisons that started together ends with $?"; done
for dir in together together-2; do [ "$(count done $dir)" = 2 ] || fail "$dir: results.json does not know both runs"; done
pids=()
for arch in llama,sla,lime llama,relay,hyper; do
  compare --arch $arch --steps 300 --resume --out together >resumed.$arch 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  [ $code = 0 ] || [ $code = 64 ] || fail "one of two resumed comparisons ends with $code, want 0, or 64: in use"
done
compare --arch llama --steps 300 --resume --out together >output 2>&1
[ "$(count done together)" -ge 4 ] || fail "a comparison beside another one lost the runs of the other"
mkdir refused
expect 64 'no option' compare --arch llama:x=1 --steps 2 --out refused
expect 64 'hidden_size' compare --arch llama --width 7 --heads 2 --steps 2 --out refused_too
[ ! -e refused_too ] && [ -d refused ] || fail "a refused comparison leaves a directory, or takes one away"

# --- names of any bytes ------------------------------------------------------------------------------------------
odd=$'n\xff o'
mkdir "$odd" && yes 'some words to learn ' | head -200 >"$odd/text.txt"
for jobs in 1 2; do
  expect 0 '^llama ' "$build/compare" --arch llama --seeds 1,2 --jobs $jobs --data "text:$odd/text.txt" "${sizes[@]}" \
    --steps 4 --out "$odd/$jobs"
done
for seed in 1 2; do
  cmp -s "$odd"/{1,2}/llama*-seed-$seed/step_00000004/model.safetensors || fail "--jobs 2: other weights"
done

# --- damaged results.json ----------------------------------------------------------------------------------------
compare --arch llama,relay --steps 2 --out good >output 2>&1 || fail "no comparison to damage"
damage() { rm -rf bad && cp -r good bad && rm -r bad/records && sed -zE "$1" good/results.json >bad/results.json; }
while read -r line; do
  change=${line% => *} what=${line#* => }
  damage "$change"
  expect 65 "bad/results.json: .*$what.*; restore results.json from a copy, or start a new comparison" \
    "$build/compare" --resume --out bad
  grep -q 'json[.]exception' output && fail "a message of a library: $change"
done <<'END'
s/"flags": [{]/"flags": 3, "x": {/ => has no "flags"
s/"flags": [{]/"flags": "x", "x": {/ => has no "flags"
s/"(flags|rates|seeds)": /"x": /g => has no "flags"
s/"rates": \[(\s+[0-9])/"x": [\1/;s/(.*)"flags": [{]/\1"flags": 3, "y": {/ => relay has no "flags"
s/"seeds": \[/"x": [/;s/(.*)"flags": [{]/\1"flags": null, "y": {/ => relay has no "flags"
s/"steps": 2/"steps": "2"/ => "steps"
s/"batch": 2/"batch": -2/ => "batch"
s/"config": [{]/"config": [], "y": {/ => config
s/"rates": \[(\s+[0-9])/"rates": {}, "y": [\1/ => "rates"
s/"seeds": \[/"seeds": [null,/ => "seed"
s/"name": "llama"/"name": "lama"/g => name of a run is wrong
s/"name": "llama"/"name": "llama,lime"/g => name of a run is wrong
s/"runs": \[/"runs": {}, "y": [/ => "runs"
s/"exit_code": 0/"exit_code": "0"/ => "exit_code"
s/"directory": "llama"/"directory": "..\/good"/ => "directory"
s/[}][^}]*$// => it ends too early, at byte
END

expect 64 'begun with one learning rate.*another --out' "$build/compare" --resume --out good --lr 1e-3,2e-3,4e-3

# --- rates that one half of the test set chooses, killed again and again -------------------------------------------
tuned() {
  compare --arch llama,lime --optimizer adamw,muon --lr 1e-2,2e-2 --muon-lr 0.05,0.1 --seeds 1,2 --steps 40 "$@"
}
expect 0 '^lime muon ' tuned --out whole
for ((i = 0; i < 60; ++i)); do
  timeout -s KILL 0.$((2 + i % 5)) "$build/compare" "${tiny[@]}" --arch llama,lime --optimizer adamw,muon --lr 1e-2,2e-2 \
    --muon-lr 0.05,0.1 --seeds 1,2 --steps 40 --resume --jobs $((1 + i % 2)) --out killed >output 2>&1
  code=$?
  [ $code = 0 ] && break
  [ $code = 137 ] || { fail "killed and resumed: exit code $code"; break; }
done 2>/dev/null  # the shell's word on each kill
[ $i -gt 2 ] || fail "only $i kills"
expect 0 '^lime muon ' "$build/compare" --resume --out killed
runs() { sed -n '/^## Runs/,$p' "$1/results.md" | grep '^| l'; }
diff <(runs whole) <(runs killed) >output || fail "a comparison that was killed has other runs or losses"
for dir in whole killed; do
  [ "$(runs $dir | grep -c '0, chooses')" -ge 8 ] || fail "$dir: rates were not tried"
  [ "$(count 'not started' $dir)" = 0 ] || fail "$dir: runs are left"
done
# A record of an --lr that Muon's best rate needs may be read before the records that say what that is.
for ((i = 0; i < 700; ++i)); do echo "line $i of $((i * i % 97))"; done >lines.txt
expect 0 '^llama muon ' "$build/compare" --data text:lines.txt --arch llama --optimizer adamw,muon --lr 1e-3 --muon-lr 1e-3,2e-3,4e-3 \
  --seeds 1,2 --layers 2 --width 32 --heads 2 --ffn 64 --steps 4 --batch 2 --seq 32 --warmup 0 --out edges
cp edges/results.md before
expect 0 '^llama muon ' "$build/compare" --resume --out edges
diff <(sed -n '/^## Runs/,$p' before) <(sed -n '/^## Runs/,$p' edges/results.md) >output || fail "--resume tries further rates"
expect 64 'seed 0 chooses' tuned --seeds 0,1 --out refused_seed
expect 64 'several --lr are for AdamW' tuned --optimizer muon --out refused_lr
expect 64 'has no effect without --optimizer muon' tuned --optimizer adamw --out refused_muon
expect 64 'has no effect with one learning rate' compare --every-rate --out refused_rate
expect 64 '--resume: this comparison was begun to choose' tuned --every-rate --resume --out whole
expect 64 'excludes|cannot' tuned --every-rate --more-seeds --out refused_more
expect 64 "cannot be 'sgd'" tuned --optimizer adamw,sgd --out refused_name
for dir in refused_*; do [ ! -e "$dir" ] || [ "$dir" = refused_too ] || fail "$dir: refused, and there"; done

# --- every rate from every seed: stopped, gone on with, and nothing chosen ------------------------------------------
expect 0 '^12 runs: 1 architecture x 2 optimizers; each at every learning rate, 3 seeds;' \
  tuned --arch llama --seeds 0,1,2 --every-rate --dry-run
expect 0 '^llama muon muon-lr 0.1 ' tuned --arch llama --every-rate --out every
[ "$(runs every | grep -c chooses)" = 0 ] || fail "every rate: a seed chose"
[ "$(count done every)" = 8 ] || fail "every rate: not two seeds at four rates"
rm -r every/llama-adamw-lr-0.01-seed-1 every/records/llama-adamw-lr-0.01-seed-1.json
expect 0 '^llama muon muon-lr 0.1 ' "$build/compare" --resume --out every
[ "$(grep -c 'step 40: test loss' output)" = 1 ] || fail "every rate: --resume trained what was done"

# --- files that cannot be written --------------------------------------------------------------------------------
rm good/compare.svg && mkdir good/compare.svg
expect 74 '^note: cannot write good/compare.svg: .*; the runs go on$' \
  compare --arch llama,relay,sla --steps 2 --resume --out good
[ "$(count done good)" = 3 ] || fail "a figure that cannot be written ends the runs"
grep -qE '^sla +[0-9,]+ ' output || fail "no table where a figure cannot be written"
expect 74 'the runs are done and kept' \
  compare --arch llama,relay,sla --jobs 2 --seeds 42,2 --steps 2 --resume --out good
rmdir good/compare.svg
expect 0 '^sla ' compare --arch llama,relay,sla --steps 2 --resume --out good
[ -s good/compare.svg ] || fail "the figure is not written when it can be"
rm good/llama/curve.svg && mkdir good/llama/curve.svg
expect 74 'llama seed 42: its figure could not be written' compare --arch llama,relay --steps 4 --resume --out good
grep -q '^1/[0-9]* llama .*note: cannot write good/llama/curve.svg' output || fail "no note about the figure of a run"
[ "$(count done good)" -ge 2 ] || fail "a run whose figure cannot be written is not done"
"$build/train_llama" "${tiny[@]}" --steps 4 --save-every 2 --out run >output 2>&1 || fail "no run"
rm run/curve.svg && mkdir run/curve.svg
expect 74 'run/curve.svg could not be written' "$build/train_llama" --resume --out run --steps 8 --save-every 2
[ -d run/step_00000008 ] || fail "a figure that cannot be written ends the run"

# --- commands to paste -------------------------------------------------------------------------------------------
odd=$'it\'s $(touch pasted) "a";`touch pasted`\n\e[31m \xe2\x80\xae*\\ \xff'
expect 0 '^next: ' compare --arch llama --steps 2 --out "$odd"
eval "$(sed -n 's/^next: *//p' output)" >pasted_output 2>&1 || fail "the next command does not work as it is printed"
interrupted "$odd 2/llama/metrics.jsonl" \
  "$build/compare" --arch llama,relay "${tiny[@]}" --steps 20000 --out "$odd 2"
[ $? = 75 ] || fail "compare, SIGINT: not exit code 75"
eval "$(sed -n 's/^to continue this comparison: //p' output) --dry-run" >pasted_output 2>&1 && grep -q left pasted_output ||
  fail "the command that continues a comparison does not work as it is printed"
interrupted "$odd 3/metrics.jsonl" "$build/train_llama" "${tiny[@]}" --steps 20000 --out "$odd 3"
eval "$(sed -n 's/.*; to continue: //p' output) --dry-run" >pasted_output 2>&1 && grep -q parameters pasted_output ||
  fail "the command that continues a run does not work as it is printed"
[ ! -e pasted ] || fail "a printed command runs what stands in a name"

conclude compare
