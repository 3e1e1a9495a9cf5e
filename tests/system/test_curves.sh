#!/usr/bin/env bash
# curves, on run directories that are written by hand: means, what has no mean, and what it does not overwrite.
#   tests/system/test_curves.sh BUILD_DIR
set -uo pipefail
curves=$(cd "$1" && pwd)/curves
compare=${curves%curves}compare
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0
fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' output | tail -8
}
expect() {  # expect CODE PATTERN ARGUMENTS...
  local code=$1 pattern=$2 got
  shift 2
  "$curves" "$@" >output 2>&1
  got=$?
  [ $got = "$code" ] || fail "exit code $got, want $code: curves $*"
  grep -qE -- "$pattern" output || fail "no line matches '$pattern': curves $*"
  [ "$code" = 0 ] || [ "$(grep -c '^error: ' output)" = 1 ] || fail "not exactly one error line: curves $*"
}
# run DIR FLAGS STEP LOSS [STEP LOSS]...: a run directory.
run() {
  mkdir -p "$1"
  [ -z "$2" ] || echo "{$2}" >"$1/flags.json"
  local dir=$1
  shift 2
  printf '{"step":%s,"loss":9,"test_loss":%s}\n' "$@" >"$dir/metrics.jsonl"
}
flags() { echo "\"seed\": $1, \"batch\": ${2:-8}, \"init\": \"${3:-}\", \"data\": \"text:${4:-a}\", \"eval_samples\": ${5:-0}, \"config\": {\"n_layer\": ${6:-4}}"; }

# 4 and 5: mean 4.5, deviation of the sample sqrt(0.5); a file that is torn at its end; directories without flags.
run a1 "$(flags 1)" 10 6 20 4
run a2 "$(flags 2)" 10 6 20 5
printf '{"step":30,"lo' >>a2/metrics.jsonl
run b "$(flags 1)" 20 3
run bare1 "" 20 2
run bare2 "" 20 2
expect 0 '^a +2 +20 +4[.]5000 +0[.]7071$' a=a1 a=a2 b=b --out fig.svg --title T
grep -qE '^b +1 +20 +3[.]0000 +-$' output || fail "no row for b"
grep -q note: output && fail "a note where there is nothing to say"
grep -q '<svg' fig.svg || fail "no picture"
expect 0 '^bare +2 +20 +2[.]0000 +0[.]0000$' bare=bare1 bare=bare2 a=a1
expect 0 '^a +2 +20 +9[.]0000' a=a1 a=a2 --loss train

# What has no mean: other flags, other ends, no common step. A model's start may have another name, or more blocks.
run other_batch "$(flags 2 16)" 20 5
expect 64 "'a' is .*more than the seed: batch is 8 in a1, 16 in other_batch" a=a1 a=other_batch
expect 0 '^c +1 ' a=a1 c=other_batch
run started "$(flags 2 8 x)" 20 5
expect 64 'init is "" in a1' a=a1 a=started
run started_too "$(flags 3 8 y)" 20 6
expect 0 '^a +2 +20 +5[.]5000' a=started a=started_too
run deeper "$(flags 2 8 "" a 0 6)" 20 5
expect 0 "note: 'a' is the mean of models of different depth, such as 4 and 6 blocks" a=a1 a=deeper
run longer "" 20 5 30 4
expect 64 "'a': a1 ends at step 20, longer at step 30" a=a1 a=longer
run apart "" 15 5 25 4
expect 65 "'a': its runs have no step in common" a=a1 a=apart

# What is tested otherwise is said.
run few "$(flags 1 8 "" a 5)" 20 5
run elsewhere "$(flags 1 8 "" b)" 20 5
expect 0 'note: .* eval_samples differs' a=a1 few=few
grep -qx '  few: 5' output && grep -qx '  a: 0 (all)' output || fail "nobody says who tests on how much"
expect 0 'note: .* data differs' a=a1 elsewhere=elsewhere

# Directories without names are called by their last part, or, where that is no name of their own, by all of it.
expect 0 '^a1 +1 +20 +4' a1 ./b/ --out plain.svg
grep -qE '^b +1 ' output || fail "no row for b"
mkdir -p x y && cp -r a1 x && cp -r a2 y
expect 0 '^x/a1 +1 +20 +4' x/a1 y/a2 a1
grep -qE '^a1 +1 +20 +4' output && grep -qE '^a2 +1 +20 +5' output || fail "names of their own are no longer short"
expect 0 '^a1 +2 +20 +4[.]5' a1=a1 a1=a2 x/a1
grep -qE '^x/a1 +1 ' output || fail "a directory was taken for one of the runs of a name"
(cd a1 && expect 0 '^a1 +1 +20' . && [ $failures = 0 ]) || fail "curves . does not name this directory"

# A comparison is its runs, but for those that have not begun; several runs of one name end where all are.
mkdir -p cmp/lime && cp -r a1 cmp/llama && cp -r a2 cmp/llama-2
cp b/metrics.jsonl cmp/lime
printf '{"step":10,"loss":9,"test_loss":5}\n' >cmp/llama-2/metrics.jsonl
cat >cmp/results.json <<'EOF'
{"runs": [{"name": "llama", "directory": "llama"}, {"name": "llama", "directory": "llama-2"},
  {"name": "lime", "directory": "lime"}, {"name": "hyper", "directory": "hyper"}]}
EOF
expect 0 "note: the runs of 'llama' do not end together; their curve ends at step 10" cmp
grep -qE '^lime +1 +20 +3' output && ! grep -q hyper output || fail "not the runs of the comparison"
cp -r cmp cmp2
expect 0 '^cmp2 lime +1 ' cmp cmp2 --out both.svg
expect 0 '^first lime +1 ' first=cmp
echo '{"runs": [{"name": 3}]}' >cmp2/results.json
expect 65 'cmp2/results.json: a run has no "name" or no "directory"' cmp2
echo '{"runs": []}' >cmp2/results.json
expect 65 'cmp2/results.json: no run of this comparison has a test loss yet' cmp2
echo '{' >cmp2/results.json
expect 65 'cmp2/results.json: ' cmp2

# Of a comparison of several rates, the runs at the best of each architecture; a run without losses is passed over.
tiny=(--data arith:3 --train-samples 40 --test-samples 8 --width 16 --ffn 24 --layers 2 --heads 2 --batch 8 --steps 4
  --answer-samples 0)
"$compare" --arch llama,lime "${tiny[@]}" --lr 1e-6,1e-2,10 --seeds 1,2 --jobs 2 --out rates >output 2>&1 || fail "compare"
expect 0 "^note: of 'lime' the runs at lr [0-9.e-]+, its best$" rates --out axis.svg
for arch in llama lime; do grep -qE "^$arch +2 +4 " output || fail "no row for two seeds of $arch"; done
grep -q '<polygon' axis.svg || fail "no band around the seeds of a comparison"
losses=$(echo rates/llama-lr-*-seed-2/metrics.jsonl)
: >"$losses"
expect 0 "note: passed over: $losses: it has no test loss yet" rates
grep -qE '^llama +1 +4 ' output && grep -qE '^lime +2 +4 ' output || fail "a run without losses ends the others"

# Other x axes, of the same losses: 100 tokens a step, 2 FLOPs a token, half a second a step.
mkdir measured
for step in 1 2 4; do
  echo "{\"step\":$step,\"tokens\":${step}00,\"seconds\":$step.5,\"loss\":$step,\"test_loss\":$step}"
done >measured/metrics.jsonl
expect 65 'environment.jsonl: has no "flops_per_token"' measured --x flops --out axis.svg
printf '%s\n' '{"flops_per_token":1}' '{"flops_per_token":2}' '{"flo' >measured/environment.jsonl
for axis in step:'>step<':'>4<' tokens:'>tokens<':'>400<' flops:'>FLOPs of training<':'>800<' \
  seconds:'>seconds of training, without pauses<':'>4.5<'; do
  IFS=: read -r kind label tick <<<"$axis"
  expect 0 picture measured --x "$kind" --out axis.svg
  grep -q -- "$label" axis.svg && grep -q -- "$tick" axis.svg || fail "--x $kind: no $label, or no tick $tick"
done
expect 0 picture measured --x tokens --log-x --log-y --out axis.svg
grep -q '>tokens; logarithmic<' axis.svg && grep -q '>test loss; logarithmic<' axis.svg || fail "no logarithmic axes"
expect 65 'a1/metrics.jsonl: its lines have no number of tokens, which --x needs' a1 --x tokens --out axis.svg
# Against another run: 100 tokens a step, so many FLOPs a token and seconds a step. lime is at llama's last loss, 2,
# after 1.75 of 4 steps.
measure() {  # measure DIR FLOPS SECONDS LOSS...
  local dir=$1 flops=$2 seconds=$3 step=0 loss
  shift 3
  mkdir -p "$dir" && : >"$dir/metrics.jsonl"
  [ "$flops" = none ] || echo "{\"flops_per_token\":$flops}" >"$dir/environment.jsonl"
  for loss; do
    step=$((step + 1))
    echo "{\"step\":$step,\"tokens\":${step}00,\"seconds\":$((step * seconds)),\"loss\":$loss,\"test_loss\":$loss,\"test_sequences\":8}"
  done >>"$dir/metrics.jsonl"
}
measure llama 1 2 5 4 3 2
measure lime 2 2 5 1
expect 0 "^lime reaches llama's final test loss 2[.]0000 after 87[.]5 % of its FLOPs: 12[.]5 % fewer$" --against llama llama lime
grep -qE '^lime +-1[.]0000 +- +43[.]8 % +87[.]5 % +43[.]8 %$' output || fail "no row of differences and ratios"
expect 0 'picture' --against llama --x flops --out against.svg llama lime
grep -q "test loss minus llama's" against.svg || fail "the picture has no difference"
expect 0 "^llama never reaches lime's|^note: llama never reaches lime's test loss 1[.]0000: its lowest is 2[.]0000$" --against lime llama lime
grep -qE '^llama +[+]1[.]0000 +- +- +- +-$' output && ! grep -q 'reaches lime.s final' output || fail "a ratio where there is none"
measure late 2 2 5 1 1  # means 3 and 1, of steps 2 and 3: 2.25 steps of 4
expect 0 "^late reaches llama's final training loss .mean over 2 steps. 2[.]5000 after 56[.]2 % of its tokens" --loss train --smooth 2 \
  --against llama llama late
measure unknown none 2 5 1
expect 0 '^note: no FLOPs for unknown: unknown/environment.jsonl has no "flops_per_token"; resume the run' --against llama llama unknown
grep -q "unknown reaches llama's final test loss 2.0000 after 43.8 % of its tokens" output || fail "no ratio of tokens"
expect 64 "--against lima: no run has this name; the names are: llama, lime" --against lima llama lime
expect 64 "there is no other run" --against llama llama
echo '{"data": "text:a", "seq": 8}' >llama/flags.json
echo '{"data": "text:b", "seq": 8}' >lime/flags.json
expect 64 "the runs' losses are not of the same sequences: data differs" --against llama llama lime
rm llama/flags.json lime/flags.json
for where in llama lime; do
  echo "{\"build\":1,\"device\":\"cpu\",\"machine\":\"of $where\",\"flops_per_token\":1}" >$where/environment.jsonl
done
expect 0 '^note: no seconds for lime: it ran on another machine than llama' --against llama llama lime

# Routing, as evaluations of a run write it: a panel for each number, and maps over training.
mkdir routed
for step in 1 2 3; do
  echo "{\"step\":$step,\"loss\":1,\"test_loss\":1,\"routing\":{\"numbers\":{\"entropy.m\":0.$step},\"curves\":{\"c\":[null,0.5]},\"maps\":{\"m\":[[1],[0.$step,0.5]]}}}"
done >routed/metrics.jsonl
expect 0 '^entropy[.]m +routed +0[.]100 +0[.]300$' --y routing routed --out routing.svg
grep -q 'entropy over the sources' routing.svg || fail "no panel of the entropy"
expect 0 '^note: passed over: a1/metrics.jsonl: no evaluation has "routing"' --y routing routed a1
expect 0 picture --y maps routed --out maps.svg
grep -q '>step 2<' maps.svg && grep -q '>m<' maps.svg || fail "no maps over training"
expect 65 'no evaluation of these runs has "routing"' --y routing a1
expect 64 '^error: --against' --y routing --against routed routed a1
# A file that may not be read; root may read all, so somebody else looks where that is possible.
cp -r a1 forbidden && chmod 000 forbidden/metrics.jsonl
other=()
[ ! -r forbidden/metrics.jsonl ] || other=(setpriv --reuid 65534 --clear-groups)
chmod 755 .
if "${other[@]}" test -x "$curves" 2>/dev/null && "${other[@]}" test -d "$PWD/forbidden" 2>/dev/null; then
  said=$("${other[@]}" "$curves" forbidden 2>&1)
  [ $? = 74 ] && [[ $said = *'cannot open forbidden/metrics.jsonl: Permission denied'* ]] ||
    fail "metrics.jsonl that may not be read: $said"
fi
expect 64 '^error: --x' a1 --x hours
expect 64 '^error: --smooth' a1 --smooth -1
expect 0 picture a1 --loss train --smooth 2 --out axis.svg
grep -q 'running mean over 2 points' axis.svg || fail "the picture does not say what it draws"
expect 0 picture a=a1 a=a2 --out axis.svg
grep -q '<polygon' axis.svg && grep -q 'one standard deviation over the seeds' axis.svg || fail "no band"
expect 0 picture a1 a2 --out axis.svg
grep -q 'standard deviation' output && fail "one seed each has a standard deviation"
expect 0 'mean and standard deviation over the seeds' a=a1 a=a2
grep -q '<polygon' axis.svg && fail "a band around one run"

# A long run, of which a point is the mean of two steps: the table has the last loss itself, and --smooth counts steps.
mkdir long
for step in {1..19999}; do echo "{\"step\":$step,\"loss\":1}"; done >long/metrics.jsonl
echo '{"step":20000,"loss":5}' >>long/metrics.jsonl
expect 0 '^long +1 +20,000 +5[.]0000 ' long --loss train
grep -q note: output && fail "a note about --smooth, which was not given"
expect 0 '^note: .*mean of 2 steps: --smooth 8 draws the mean of 4 points' long --loss train --smooth 8 --out axis.svg
grep -q 'running mean over 4 points' axis.svg || fail "--smooth 8 spans more than 8 steps"

# Lines that are no numbers are passed over.
run nan "" 10 6 20 4
printf '{"step":30,"loss":NaN,"test_loss":NaN}\n{"step":40,"loss":null,"test_loss":null}\n' >>nan/metrics.jsonl
expect 0 '^nan +1 +20 +4[.]0000' nan
printf '{"step":40,"loss":3}\n' >untested.jsonl && mkdir untested && mv untested.jsonl untested/metrics.jsonl
expect 65 'untested/metrics.jsonl: it has no test loss yet; --loss train draws what there is' untested

# Bad input. A picture may go, another file stays.
expect 66 'nowhere/metrics.jsonl: no such file' a=nowhere
mkdir nothing && expect 66 'nothing/metrics.jsonl: no such file; nothing must be a run directory' nothing
expect 64 "'nowhere' is no directory, and is not NAME=DIR" nowhere
expect 64 "is not NAME=DIR" "$(printf 'x%.0s' {1..5000})"
mkdir empty && : >empty/metrics.jsonl
expect 65 'no test loss yet' a=empty
expect 65 'flags.json' a="$(cp -r a1 torn && echo '{' >torn/flags.json && echo torn)"
for bad in a =a1 a=; do expect 64 'is not NAME=DIR' "$bad"; done
expect 0 'picture: fig.svg' a=a1 --out fig.svg
echo precious >notes.svg
expect 64 'notes.svg exists and is no picture' a=a1 --out notes.svg
[ "$(cat notes.svg)" = precious ] || fail "a file that is no picture was overwritten"
cp a1/metrics.jsonl before
expect 64 'is no picture' a=a1 --out a1/metrics.jsonl
cmp -s a1/metrics.jsonl before || fail "the metrics were overwritten"

# PNG and PDF where a program draws them; else one line says what to install, and nothing is left.
mkdir none
PATH=$PWD/none PYTHON=$PWD/none/python "$curves" a1 --out fig.pdf >output 2>&1
[ $? = 66 ] && grep -q '^error: fig.pdf: a pdf needs rsvg-convert .*pip install cairosvg' output ||
  fail "no line says what a PDF needs"
[ -z "$(ls fig.pdf* 2>/dev/null)" ] || fail "a picture that failed leaves files"
mkdir tools
printf '#!/bin/bash\nwhile [ "$1" != --output ]; do shift; done\ngrep -q "<svg" "$3" && printf "%%%%PDF-" >"$2"\n' >tools/rsvg-convert
chmod +x tools/rsvg-convert
PATH=$PWD/tools:$PATH expect 0 'picture: fig.pdf' a1 --out fig.pdf
grep -q '%PDF' fig.pdf && [ "$(echo fig.pdf*)" = fig.pdf ] || fail "no PDF, or more than that"
PATH=$PWD/tools:$PATH expect 0 'picture: fig.pdf' a1 --out fig.pdf
# Python takes cairosvg from where it is installed, not from where somebody has a file of that name.
if python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)' 2>/dev/null); then
  mkdir installed
  printf 'def svg2pdf(url, write_to, scale):\n  open(write_to, "w").write("%%PDF-")\n' >installed/cairosvg.py
  echo 'raise SystemExit(1)' >cairosvg.py
  for path in "$PWD/installed" "$PWD/installed:"; do
    PATH=$PWD/none PYTHON=$python PYTHONPATH=$path "$curves" a1 --out fig.pdf >output 2>&1 || fail "a cairosvg.py here is imported"
  done
  rm cairosvg.py
fi

[ $failures = 0 ] && echo "curves: all as documented" || echo "curves: $failures failures"
[ $failures = 0 ]
