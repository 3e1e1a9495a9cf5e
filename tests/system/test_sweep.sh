#!/usr/bin/env bash
# sweep: killed again and again, several processes, parts of several machines, a row that is added, and what it refuses.
#   tests/system/test_sweep.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
[ -n "${TMPDIR:-}" ] || [ ! -w /dev/shm ] || export TMPDIR=/dev/shm  # many small files, each of which is synced
start_in_scratch "$1" 1
cat >tiny.plan <<'END'
keep = 1  # where a run was stopped it has saved, too
data = arith:3
train-samples = 40
test-samples = 16
width = 16
ffn = 16
heads = 1
layers = 2
batch = 2
seq = 32
eval-samples = 0
answer-samples = 0
steps = 40
eval-every = 20
save-every = 10

[one]
arch = llama,
       relay
lr = 1e-3, 1e-2, 10   # the middle one is the best
seeds = 1, 2
budgets = 2

[two]
arch = llama, lime, lime@frozen
seeds = 1, 2
END
sweep() { "$build/sweep" "$@"; }
weights() { (cd "$1" && find . -name model.safetensors | sort | xargs sha256sum); }
# same DIR WHAT: its cells and its report are those of the sweep that nobody disturbed.
same() {
  weights "$1" >output
  diff weights output >/dev/null || fail "$2: other weights"
  cmp -s whole/results.json "$1/results.json" || fail "$2: other results"
}
# once DIR WHAT: every cell was begun once.
once() {
  find "$1" -name environment.jsonl -exec wc -l {} + | grep -v total | grep -v '^ *1 ' >output
  [ ! -s output ] || fail "$2: a cell was trained twice"
}
narrow() { ! grep -E '.{81}' output || fail "a line of more than 80 columns: $*"; }

# --- the whole ---------------------------------------------------------------------------------------------------
expect 0 '^one-x2 +1 +5 ' sweep run tiny.plan --out whole --dry-run
narrow --dry-run
[ ! -e whole ] || fail "--dry-run writes"
expect 0 '^lime@frozen ' sweep run tiny.plan --out whole
[ "$(find whole -name 'step_00000040' | wc -l)" = 16 ] || fail "not 16 cells of 40 steps"
[ "$(find whole -name 'step_00000080' | wc -l)" = 5 ] || fail "not 5 cells of 80 steps"
weights whole >weights
once whole "a sweep"
sed -n '/^one: /,$p' output >summary && mv summary output
narrow summary
for file in report.md one.svg one-steps.svg two.svg results.csv; do [ -s whole/$file ] || fail "no $file"; done
expect 0 '^relay ' sweep report whole
narrow report
expect 0 '^relay ' sweep run tiny.plan --out whole --jobs 2
once whole "a sweep that is done"
expect 0 '^times: whole/times.json' sweep time tiny.plan --out whole --rounds 3
narrow time
cp -r whole timed && expect 0 '^relay +.* [0-9.<>]+$' sweep report timed
rm whole/times.json

# A combination beside its parts: is its gain the sum of theirs?
{ sed '/^\[one\]/,$d' tiny.plan && printf '[three]\narch = llama, lime, resformer, lime+resformer\nseeds = 1, 2\n'; } >gains.plan
expect 0 '^lime[+]resformer ' sweep run gains.plan --out gains
grep -qE '^[|] lime[+]resformer [|] [+-][0-9.]+ [+]- [0-9.]+ [|]' gains/report.md || fail "no interaction in the report"
grep -q '"combination": "lime+resformer"' gains/results.json || fail "no interaction in the results"
[ -s gains/three-interactions.svg ] || fail "no picture of interactions"

# The text is gone: records are enough for a report, and for nothing else.
seq 2000 >words.txt
{ sed '/^\[one\]/,$d; /-samples/d; s/^data.*/data = text:words.txt/' tiny.plan && printf '[words]\narch = llama, lime\nseeds = 1, 2\nbudgets = 2\n'; } >words.plan
expect 0 '^lime ' sweep run words.plan --out words
for table in words words-x2; do mkdir -p kept/$table && cp -r words/$table/records kept/$table; done
cp words/sweep.plan kept && mv words.txt other.txt
expect 0 '^lime ' sweep report kept
for file in results.json results.csv report.md words.svg words-steps.svg; do
  cmp -s kept/$file words/$file || fail "another $file without the data"
done
expect 66 'words.txt' sweep run words.plan --out kept
rm -r kept/words*/records
expect 66 'words.txt' sweep report kept

sed 's/^data/pairs = nowhere\ndata/' tiny.plan >pairs.plan
expect 66 'there is no such file' sweep run pairs.plan --out pairs

cp -r whole pruned
cell=$(echo pruned/two/llama-*-seed-1)
cp -r "$cell/step_00000040" "$cell/step_00000020" && rm pruned/two/records/"${cell##*/}".json pruned/two/results.json
expect 0 '^relay ' sweep run tiny.plan --out pruned
same pruned "killed before it had removed an older checkpoint"

# --- killed ------------------------------------------------------------------------------------------------------
# Each time a moment after another cell has ended. One that ended before its kill has done all cells: once more then,
# from the first.
ended() { find killed -path '*/records/*.json' | wc -l; }
kills=0
for i in {1..60}; do
  [ $kills -lt 20 ] || break
  before=$(ended)
  how=$([ $((i % 2)) = 0 ] && echo TERM || echo KILL)
  setsid "$build/sweep" run tiny.plan --out killed --jobs $((1 + i % 2)) >output 2>&1 &
  pid=$!
  until [ "$(ended)" -gt "$before" ] || ! kill -0 $pid; do sleep 0.01; done
  sleep "0.0$((RANDOM % 10))"
  [ $((i % 3)) = 0 ] && target=$pid || target=-$pid  # not the children: they end by themselves
  kill -$how -- "$target"
  wait $pid
  code=$?
  case $code in
    75 | 137 | 143) kills=$((kills + 1)) ;;  # 143: before it catches signals
    0) same killed "killed" && rm -r killed ;;
    *) fail "killed by $how: exit code $code" ;;
  esac
done 2>/dev/null  # the shell's word on each kill
[ $kills = 20 ] || fail "only $kills kills"
expect 0 '^relay ' sweep run tiny.plan --out killed
same killed "killed $kills times"
interrupted ctrl/one/records/llama-lr-0.001-seed-0.json "$build/sweep" run tiny.plan --out ctrl
[ $? = 75 ] || fail "SIGINT: not exit code 75"
eval "$(sed -n 's/^to continue: //p' output)" >output 2>&1 || fail "the command that continues does not work"
same ctrl "after Ctrl-C"

# --- several processes -------------------------------------------------------------------------------------------
for process in 1 2 3; do
  sweep run tiny.plan --out shared --jobs $((process % 2 + 1)) >shared.$process 2>&1 &
  pids[process]=$!
done
for process in 1 2 3; do wait "${pids[process]}" || fail "one of three processes ends with $?"; done
same shared "three processes"
once shared "three processes"
# One that hangs, and is killed then: the other one waits, and goes on with its cell.
"$build/sweep" run tiny.plan --out hung >first 2>&1 &
pid=$!
until [ -s hung/one/records/llama-lr-0.001-seed-0.json ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -STOP $pid
"$build/sweep" run tiny.plan --out hung >waiting 2>&1 &
waiting=$!
until grep -q '^waiting for other processes' waiting || ! kill -0 $waiting 2>/dev/null; do sleep 0.05; done
expect 64 'in use by another comparison' "$build/compare" --resume --out hung/one
{ kill -KILL $pid && wait $pid; } 2>/dev/null
wait $waiting || fail "beside a process that is killed: exit code $?"
same hung "beside a process that is killed"
# A cell's process holds its claim, too: a sweep that is killed may leave it behind for a moment.
"$build/sweep" run tiny.plan --out jobs --jobs 2 >output 2>&1 &
pid=$!
claim=
until claim=$(readlink "/proc/$(pgrep -P $pid | head -n 1)/fd/4") || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
[[ $claim = */jobs/claims/one/* ]] || fail "a cell's process holds '$claim', not its claim"
{ kill -KILL $pid && wait $pid; } 2>/dev/null
"$build/compare" --arch llama --data arith:3 --steps 100000 "${sizes[@]}" --out held/one >output 2>&1 &
pid=$!
until [ -s held/one/results.json ] || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
expect 64 'held/one is in use by a comparison' sweep run tiny.plan --out held
kill -KILL $pid
wait $pid 2>/dev/null

# --- records -----------------------------------------------------------------------------------------------------
cp -r whole moved
find moved/{one,one-x2,two} -mindepth 1 -maxdepth 1 -type d ! -name records -exec rm -r {} +
expect 0 '^relay ' sweep run tiny.plan --out moved
cmp -s whole/results.json moved/results.json || fail "records alone: other results"
[ -z "$(find moved -name model.safetensors)" ] || fail "a cell that has a record was trained again"
for part in 1 2; do expect 0 '^llama ' sweep run tiny.plan --out part$part --part $part/2; done
[ -z "$(find part1 -name 'relay*' -o -name 'lime*')" ] || fail "a part has the arms of another"
expect 0 '^relay ' sweep report part1 part2 --out merged
same_numbers() { diff <(sed '/"cells": {/,/}/d' "$1") <(sed '/"cells": {/,/}/d' "$2") >/dev/null; }
same_numbers whole/results.json merged/results.json || fail "two parts: other results"
# Of another commit: the backbone is compared.
cp -r part2 part2b && sed -i -E 's/"commit": "[^"]*"/"commit": "another"/' part2b/*/records/*.json
expect 0 '^relay ' sweep report part1 part2b --out merged
grep -q '^[*] one, llama with adamw: .*commit another: .* 2 seeds on average by +0[.]0000' merged/report.md ||
  fail "machines are not compared"
grep -q 'commit another: [0-9]' merged/report.md || fail "the report does not say where cells were trained"
same_numbers whole/results.json merged/results.json || fail "two parts of two commits: other results"
expect 0 '^relay ' sweep run tiny.plan --out part1 --records part2
same_numbers whole/results.json part1/results.json || fail "a part beside the records of the other: other results"
# A sweep that goes on with another commit: a few steps of the backbone are repeated.
# moved FROM TO: its records, but relay's.
moved() {
  for table in one one-x2 two; do mkdir -p "$2/$table" && cp -r "$1/$table/records" "$2/$table"; done
  cp "$1/sweep.plan" "$2" && rm "$2"/one/records/relay*
}
moved whole older && sed -i -E 's/"commit": "[^"]*"/"commit": "another"/' older/*/records/*.json
expect 0 'commit another: 20 steps of' sweep run tiny.plan --out older
grep -q 'differ here by up to 0 of the loss' output || fail "the same commit under another name differs"
moved older wrong && sed -i -E '/"first_losses"/,/]/s/[0-9]+[.]/9&/' wrong/one/records/llama-*.json
expect 64 'which is more than rounding' sweep run tiny.plan --out wrong
# With a table that is done, the next one still has its jobs; and one table alone.
{ cat tiny.plan && printf '[three]\narch = llama, relay\nseeds = 1, 2\n'; } >three.plan
expect 0 '^three +2 +4 +2 ' sweep run three.plan --out whole --jobs 2 --dry-run
expect 0 '^three ' sweep run three.plan --out whole --table three --dry-run
! grep -qE '^(one|two) ' output || fail "--table: other tables, too"
expect 64 'the plan has no table nowhere' sweep run three.plan --out whole --table nowhere
expect 0 'llama' sweep run tiny.plan --out row --arch sla --records whole
grep -q '^one: sla is number [1-3] of 3, ' output || fail "where the row stands is not said"
[ -z "$(find row -mindepth 2 -type d -name '[lr]*' ! -name records)" ] || fail "--arch trains more than it says"
[ "$(find row -name 'step_00000040' | wc -l)" = 7 ] || fail "--arch: not 7 cells"
expect 0 '^sla ' sweep report row --arch sla --records whole
grep -A 2 '"first_losses"' row/one/records/llama-*-seed-1.json | grep -q '[0-9][.]' || fail "a copy of a record loses its losses"
expect 0 'the plan does not have; --arch sla' sweep report row
cp -r whole grown && sed 's/^seeds = .*/seeds = 1, 2, 3/' tiny.plan >grown.plan
expect 0 '^relay ' sweep run grown.plan --out grown
[ "$(find grown -name 'step_00000040' | wc -l)" = 21 ] || fail "a seed more in each table: not 5 cells more"

# --- what is refused ---------------------------------------------------------------------------------------------
sed -i -E 's/"test_loss": ([0-9])/"test_loss": 1\1/' part2b/one/records/llama-*.json
expect 64 'part2b is not merged with part1. one, ' sweep report part1 part2b --out refused
cp tiny.plan other.plan && sed -i '/^\[one\]/,/^budgets/d' other.plan
expect 64 'was begun with a table one, which other.plan does not have' sweep run other.plan --out whole
sed 's/^steps = 40/steps = 50/' tiny.plan >other.plan
expect 64 '^error: other.plan:17: one was begun with steps = 40 in whole, not 50' sweep run other.plan --out whole
sed 's/^width = 16/width = 8/' tiny.plan >other.plan
expect 64 '^error: other.plan:17: one: .*hidden_size is 16, not 8' sweep run other.plan --out whole
cmp -s tiny.plan whole/sweep.plan || fail "a plan that is refused is kept"
cp -r part1 part3 && sed -i 's/^steps = 40/steps = 50/' part3/sweep.plan
expect 64 'is a sweep of another plan' sweep report part1 part3 --out refused
expect 66 'is no sweep' sweep report nowhere
expect 66 '--records: there is no nowhere' sweep run tiny.plan --out refused --arch sla --records nowhere
expect 64 '--part' sweep run tiny.plan --out refused --part 3/2
expect 64 '--hours with --part' sweep run tiny.plan --out refused --part 1/2 --hours 1
expect 64 'A subcommand is required' sweep
expect 66 'none.plan' sweep run none.plan --out refused
expect 65 'is not a regular file' sweep run . --out refused
yes 'some words to learn ' | head -400 >text.txt
{ grep -v '^data\|samples' tiny.plan | sed '/^\[one\]/,/^budgets/d' && echo data = text:text.txt; } >text.plan
expect 0 '^lime ' sweep run text.plan --out text
echo 'and more' >>text.txt
expect 65 'text.txt is not the data' sweep run text.plan --out text
rm -r text/two/results.json
expect 65 'was trained on other data' sweep run text.plan --out text
# bad CODE PATTERN PLAN
bad() {
  printf "$3" >bad.plan
  expect "$1" "$2" sweep run bad.plan --out refused
}
bad 65 'bad.plan: there is no table' ''
bad 65 'bad.plan: there is no table' 'data = arith:3\n'
bad 64 'bad.plan:1: .*no data' '[one]\nsteps = 3\n'
bad 64 'bad.plan:2: .*--width' 'data = arith:3\n[one]\nwidht = 3\n'
bad 65 'bad.plan:4: there is a table one already, by bad.plan:2' 'data = arith:3\n[one]\nsteps = 3\n[one]\n'
bad 65 "bad.plan:2: budgets are .*'1' is none" 'data = arith:3\n[one]\nsteps = 3\nbudgets = 1\n'
bad 65 'bad.plan:1: a line is a flag' '\xff\x00\x01 = 3\n[one]\n'
bad 65 'bad.plan:1: an indented line' '  3\n[one]\n'
bad 65 'bad.plan:1: a table is named' '[..]\n'
for flag in out resume jobs seed; do bad 64 "bad.plan:2: .*$flag is not for a plan" "data = arith:3\n[one]\n$flag = 3\n"; done
bad 65 "layers are whole numbers, '../../2' is none" 'data = arith:3\n[one]\nlayers = 1, ../../2\n'
bad 65 'ffn has 2 values, width 3' 'data = arith:3\n[one]\nwidth = 8, 16, 32\nffn = 8, 16\n'
bad 64 'bad.plan:2: one: --arch lime@frozen: ' 'data = arith:3\n[one]\narch = llama, lime, lime@frozen\nlayers = 1\n'
[ ! -e refused ] || fail "what is refused leaves a directory"
expect 74 'cannot create tiny.plan/one' sweep run tiny.plan --out tiny.plan
mkdir broken broken/report.md
expect 74 'broken/report.md' sweep run tiny.plan --out broken
rmdir broken/report.md
expect 0 '^relay ' sweep run tiny.plan --out broken
same broken "a report that could not be written"
once broken "a report that could not be written"

conclude sweep
