#!/usr/bin/env bash
# The programs as a user meets them: bad input of every kind gets one clear line and the documented exit code, a run can
# be stopped and resumed at any moment, and what is written is complete.   tests/system/test_programs.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
dev=$(cd "$(dirname "$0")/../../dev" && pwd)
train=$(cd "$(dirname "$0")/../../train" && pwd)
mapfile -t trainers < <(cd "$train" && printf '%s\n' train_*.cpp | sed 's/\.cpp$//')
start_in_scratch "$1" 2
tiny=(--data arith:3 --train-samples 400 --test-samples 50 --width 16 --ffn 24 --layers 2 --heads 2 --batch 8
  --eval-samples 16 --answer-samples 4)
# Whether a run has a checkpoint: any, because the first one is soon removed again.
saved() { compgen -G "$1/step_*" >/dev/null; }
train() { "$build/train_$1" "${tiny[@]}" "${@:2}"; }
compare() { "$build/compare" --arch "$1" "${tiny[@]}" "${@:2}"; }

# --- a run from start to end -------------------------------------------------------------------------------------
expect 0 'step 20: test loss [0-9.]+ [(]16 of 50 sequences[)], answers' train lime --steps 20 --out run
grep -qE '^lime answers: guessing gets 9[.]1%$' output || fail "nobody says what guessing gets"
for file in metrics.jsonl curve.svg flags.json; do [ -s run/$file ] || fail "run/$file is missing"; done
[ "$(wc -l <run/metrics.jsonl)" = 20 ] || fail "metrics.jsonl has $(wc -l <run/metrics.jsonl) lines, want 20"
expect 0 'perplexity' "$build/evaluate" --model run --data arith:3 --train-samples 400 --answers 4
# What a run ends with: where everything is, losses of which sequences, and two commands that work.
whole=(--data arith:3 --train-samples 400 --test-samples 600 --width 16 --ffn 24 --layers 2 --heads 2 --batch 8
  --answer-samples 4)
expect 0 'step 10: test loss [0-9.]+ [(]512 of 600 sequences[)], answers' "$build/train_lime" "${whole[@]}" --steps 20 \
  --eval-every 10 --out ends
for line in 'lime step 20: test loss [0-9.]+ [(]all 600 sequences[)], answers' 'model:    ends/step_00000020$' \
  'figure:   ends/curve[.]svg$' 'losses:   training [0-9.]+, test [0-9.]+ [(]all 600 test sequences[)]$' \
  'time:     [0-9].* of training, [0-9,]+ tokens/s$' \
  'read:     [0-9,]+ tokens, [0-9,]+ of them scored, 0[.]4 epochs$' 'FLOPs:    [0-9.e+]+, at [0-9.e+-]+ GFLOP/s$'; do
  grep -qE "^$line" output || fail "the end of a run lacks: $line"
done
sed -n '/^next:/,$ s/^\(next:\)* *//p' output >next
[ "$(wc -l <next)" = 2 ] || fail "the run does not name two commands"
expect 0 '=' bash -c "$(sed -n 1p next)"
expect 0 '^loss ' bash -c "$(sed -n 2p next)"
grep -q "^loss $(tail -1 ends/metrics.jsonl | sed 's/.*"test_loss":\([0-9.]*\).*/\1/' | xargs printf '%.6f')$" output ||
  fail "evaluate and the run's last test loss differ"
grep -q '"test_sequences":600' <(tail -1 ends/metrics.jsonl) || fail "metrics.jsonl does not say how many sequences"
expect 0 'step 21: test loss [0-9.]+ [(]16 of 600 sequences[)]' "$build/train_lime" --resume --steps 21 --eval-samples 16 \
  --out ends
# Runs from before there was a rule keep theirs.
sed -i '/"eval_rule"/d; s/"eval_samples": 16/"eval_samples": 512/' ends/flags.json
expect 0 'step 22: test loss [0-9.]+ [(]512 of 600 sequences[)]' "$build/train_lime" --resume --steps 22 --out ends
grep -q '"eval_rule": "first"' ends/flags.json || fail "an old run does not keep its rule"
# A comparison draws from the first evaluation on.
env --default-signal=INT "$build/compare" --arch llama,lime "${tiny[@]}" --steps 100000 --eval-every 5 --out drawn \
  >output 2>&1 &
pid=$!
while [ ! -s drawn/compare.svg ] && kill -0 $pid 2>/dev/null; do sleep 0.02; done
kill -INT $pid
wait $pid
[ $? = 75 ] && grep -q '^llama: stopped after' output || fail "compare drew nothing before a run had ended"
expect 0 '= .+' "$build/generate" --model run --prompt '3 + 4 * 2 - 1 =' --max-new 8
expect 0 '=' "$build/generate" --model run --prompt '3 + 4 * 2 - 1 =' --max-new 8 --temperature 1 --top-k 3 --seed 5
expect 0 'parameters: 1,?076,?081,?088' "$build/train_lime" --preset 1b --dry-run
expect 0 '^memory: 2[0-9][.][0-9] GiB in all, on the GPU$' "$build/train_lime" --preset 1b --dtype bf16 --device cuda --dry-run
for part in 'scratch of the kernels, about +[89][0-9]{2}[.]' 'CUDA and its libraries, about +600[.]0 MiB'; do
  grep -qE "^  $part" output || fail "what a GPU is planned to need has no line '$part'"
done
expect 0 'route' "$build/train_lime" --preset arith --dump-tape
expect 0 '^a step: B = 16 sequences of T = 2,048 tokens, 16 times$' "$build/train_lime" --preset 1b --batch 16 --accumulate 16 \
  --dry-run
expect 0 '^lime +[0-9,]+ ' "$build/compare" --out cmp "${tiny[@]}" --steps 6 --warmup 1
tail -1 output | grep -qE '^lime +[0-9,]+ ' || fail "compare's table is not its last word"
grep -q '"test_loss_sequences": 16,' cmp/results.json || fail "results.json does not say how many sequences"
[ -s cmp/compare.svg ] || fail "cmp/compare.svg is missing"
expect 0 '^hyper:rate=2 +[0-9,]+ ' compare llama,hyper:rate=2,vertical:map=unet --steps 2 --warmup 1 --out three
grep -qE '^vertical:map=unet +[0-9,]+ ' output || fail "no row for vertical:map=unet"
[ -s three/hyper-rate-2/metrics.jsonl ] || fail "three/hyper-rate-2 is missing"
grep -q '"rate":2' <(tr -d ' \n' <three/hyper-rate-2/step_00000002/config.json) || fail "hyper:rate=2 has another rate"
[ -z "$(sed -n '/^architecture/,/^$/p' output | awk 'length > 80')" ] || fail "compare's table is wider than 80 columns"
# Of data that is named, the sizes are the trainers', whatever the demonstration has; flags.json does not name a preset.
seq 9999 >numbers.txt
for data in text:numbers.txt arith:3; do
  expect 0 '^parameters: ' "$build/train_llama" --data $data --dry-run
  parameters=$(awk '/^parameters:/ {gsub(",", ""); print $2}' output)
  expect 0 '^lime ' "$build/compare" --data $data --dry-run
  [ "$(awk '/^llama/ {print $2}' output | tr -d ,)" = "$parameters" ] ||
    fail "compare --data $data has other sizes than the trainer"
done
# On files, what no flag says is chosen by their size, once for all architectures; the numbers are in flags.json.
seq 99999 >chosen.txt
expect 0 '^chosen for [0-9,]+ tokens and [0-9,]+ parameters: --seq 128 --steps 513 --lr 0.003 --warmup 25$' \
  "$build/train_llama" --data text:chosen.txt --dry-run
expect 0 '^chosen for .* parameters: --seq 128 --lr 0.003 --warmup 2$' "$build/train_llama" --data text:chosen.txt --steps 40 --dry-run
expect 0 "^chosen for .*: --seq 128 --steps " "$build/compare" --data text:chosen.txt --dry-run
[ "$(grep -c '^chosen' output)" = 1 ] || fail "compare does not choose once"
expect 64 "give --lr as it was best there" "$build/train_llama" --data text:chosen.txt --transfer mup --base-width 64 --dry-run
expect 0 '^parameters' "$build/train_llama" --data text:chosen.txt --preset arith-quick --dry-run
grep -q '^chosen' output && fail "a preset leaves nothing to choose"
expect 0 '^parameters' "$build/train_llama" --data arith:3 --dry-run
grep -q '^chosen' output && fail "a task leaves nothing to choose"
expect 0 '^chosen for .*: --lr 0.003 --warmup 0$' "$build/train_llama" --data text:chosen.txt --seq 32 --steps 2 --width 16 \
  --ffn 24 --heads 2 --eval-samples 4 --out by_size
grep -q '"lr": 0.003,' by_size/flags.json || fail "flags.json lacks the learning rate that was chosen"
expect 0 'step 3: test loss' "$build/train_llama" --resume --steps 3 --out by_size
grep -q '^chosen' output && fail "a run that is resumed leaves nothing to choose"
expect 0 '^warning: [0-9.]+ epochs: ' "$build/train_llama" --data text:numbers.txt --steps 1000 --dry-run
expect 0 '^time: .* for the steps' "$build/train_llama" --data text:chosen.txt --width 16 --ffn 24 --heads 2 --dry-run --time
expect 0 '^time: .* for the steps of all runs' compare llama,lime --dry-run --time
expect 0 '^llama +66,496 ' "$build/compare" --dry-run
expect 0 '^lime +66,640 ' "$build/quick_start" --dry-run
expect 64 'quick_start has only llama gpt2 lime; `make compare` has .hyper' "$build/quick_start" --arch hyper --dry-run
expect 0 '^llama +66,496 ' "$build/compare" --preset arith-quick --data arith:3 --dry-run
grep -q '"preset": ""' cmp/lime/flags.json || fail "flags.json names a preset that nobody gave"
expect 0 'warning: --warmup 5 of --steps 2:' compare llama --steps 2 --warmup 5 --out late
expect 0 'warning: --warmup 5 of --steps 2:' train llama --steps 2 --warmup 5 --out late_too
expect 0 '^warning: not as many parameters as llama: mudd [+][0-9]+ %$' compare llama,mudd --layers 6 --steps 1 --out more
expect 0 '^mudd +[0-9,]+ +[0-9.e+]+ +[0-9.]+ [KM]iB$' compare all,hyper:rate=2 --dry-run --out planned
[ "$(grep -cE '^[a-z_]+(:rate=2)? +[0-9,]+ ' output)" -ge 13 ] || fail "the plan does not list every architecture"
[ ! -e planned ] || fail "a dry run wrote something"
version=$(sed -nE 's/^project\(crossply VERSION ([0-9.]+) .*/\1/p' "$dev/../CMakeLists.txt")
for program in "${trainers[@]}" compare curves transplant generate evaluate gradients analyze score; do
  expect 0 'Exit codes' "$build/$program" --help
  [ "$(wc -l <output)" -le 48 ] || fail "$program --help takes more than two screens"
  expect 0 'Exit codes' "$build/$program" --help-all
  [ "$(awk 'length > 80 || /TEXT[^"]*\[/' output)" = '' ] || fail "$program --help-all is too wide or names no types"
  expect 0 "^$program \(crossply\) $version, commit [0-9a-z.-]+$" "$build/$program" --version
  expect 64 'not-a-flag|required|needed' "$build/$program" --not-a-flag
done
# What a dry run says of memory, and what a run then takes: replicas, a wide model, a large vocabulary.
if ! grep -qs '^CROSSPLY_SANITIZE:BOOL=ON' "$build/CMakeCache.txt"; then
  in_mib() { sed -nE "s/^$1: ([0-9.]+) MiB.*/\1/p" output; }
  head -c 200000 /dev/zero | tr '\0' 'a' >wide.txt
  small_run=(--steps 1 --warmup 0 --eval-samples 1)
  while read -r -a sizes; do
    expect 0 '^memory: [0-9.]+ MiB in all' "$build/train_lime" "${sizes[@]}" "${small_run[@]}" --dry-run
    planned=$(in_mib memory)
    expect 0 '^peak of resident memory' "$build/train_lime" "${sizes[@]}" "${small_run[@]}" --profile --out memory
    taken=$(in_mib 'peak of resident memory')
    awk -v p="$planned" -v t="$taken" 'BEGIN { exit !(p > 0.9 * t && p < 1.1 * t) }' ||
      fail "planned $planned MiB, took $taken MiB: ${sizes[*]}"
    rm -rf memory
  done <<END
--preset arith-quick
--data text:wide.txt --width 512 --ffn 2048 --layers 2 --heads 8 --seq 256 --batch 4
--data text:wide.txt --width 128 --layers 2 --vocab 50257 --seq 512 --batch 4
--data text:wide.txt --width 512 --ffn 2048 --layers 2 --heads 8 --seq 64 --batch 1 --optimizer muon
END
fi
expect 64 'known: llama ' "$build/compare" --arch none --out x
loop_of() { sed "1,/^#include/d; s/, \"$1\",/, ARCH,/" "$train"/train_"$1".* | tr -d ' \n'; }  # lines break elsewhere
for arch in $(sed -n 's/.*known: //p' output); do
  [[ " ${trainers[*]} " = *" train_$arch "* ]] || fail "$arch has no trainer"
  expect 0 '^parameters: [0-9,]+$' "$build/train_$arch" --preset arith-quick --dry-run
  expect 0 '^parameters: [0-9,]+$' "$build/train_$arch" --preset deep128 --dry-run
  [ -z "$(awk 'length > 80' output)" ] && [ "$(wc -l <output)" -lt 90 ] || fail "the dry run of $arch is a flood"
  [ "$(loop_of "$arch")" = "$(loop_of llama)" ] || fail "the loop of train_$arch is another than that of train_llama"
  grep -qs 'draft=\*/true' "$dev/../models/$arch".* && continue  # nobody's but its inventor's yet
  grep -q "arch: str = \"$arch\"" "$dev"/reference/*.py || fail "$arch has no PyTorch reference"
  grep -q "\"arch\": \"$arch\"" "$dev/compare_gradients.py" || fail "$arch is not compared with PyTorch"
done

# --- stopping and resuming ---------------------------------------------------------------------------------------
expect 0 'test loss' train llama --steps 60 --out whole --save-every 7
for signal in INT TERM HUP USR1; do
  rm -rf part
  env --default-signal=INT "$build/train_llama" "${tiny[@]}" --steps 60 --out part --save-every 7 >output 2>&1 &
  pid=$!
  while ! saved part && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  kill -$signal $pid
  wait $pid
  code=$?
  [ $code = 75 ] || [ $code = 0 ] || fail "SIG$signal: exit code $code, want 75"
  if [ $code = 0 ]; then echo "note: the run was faster than SIG$signal"
  else grep -qE "; to continue: $build/train_llama --resume --out part\$" output || fail "no command that continues"; fi
  train llama --steps 60 --out part --save-every 7 --resume >output 2>&1 || fail "resume after SIG$signal"
  cmp -s whole/step_00000060/model.safetensors part/step_00000060/model.safetensors || fail "SIG$signal: other weights"
  diff <(sed -E 's/"(seconds|tokens_per_s)":[^,}]*//g' whole/metrics.jsonl) \
       <(sed -E 's/"(seconds|tokens_per_s)":[^,}]*//g' part/metrics.jsonl) >output || fail "SIG$signal: other metrics"
done
rm -rf part
for _ in 1 2 3 4 5 6; do  # killed without warning
  "$build/train_llama" "${tiny[@]}" --steps 60 --out part --save-every 2 --resume >output 2>&1 &
  pid=$!
  sleep 0.0$((RANDOM % 50 + 20))
  kill -KILL $pid 2>/dev/null
  wait $pid 2>/dev/null
done
expect 0 'test loss|resumed' train llama --steps 60 --out part --save-every 2 --resume
cmp -s whole/step_00000060/model.safetensors part/step_00000060/model.safetensors || fail "SIGKILL: other weights"
# a signal at any moment of the start: a checkpoint and 75, or nothing
for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
  rm -rf early
  "$build/train_llama" "${tiny[@]}" --steps 4000 --save-every 4000 --out early >output 2>&1 &
  pid=$!
  sleep 0.0$((RANDOM % 8))$((RANDOM % 10))
  kill -TERM $pid 2>/dev/null
  wait $pid 2>/dev/null
  code=$?
  if [ $code = 75 ]; then expect 0 '=' "$build/generate" --model early --prompt '3 + 4 =' --max-new 2
  elif [ $code != 143 ] || [ -e early ]; then fail "SIGTERM at the start: exit code $code"; fi
done
# what was ignored before the start, as nohup does with SIGHUP, stays ignored
env --ignore-signal=HUP "$build/train_llama" "${tiny[@]}" --steps 60 --out ignoring --save-every 7 >output 2>&1 &
pid=$!
while ! saved ignoring && kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -HUP $pid 2>/dev/null
wait $pid || fail "SIGHUP was ignored before the start, but ended the run"
expect 64 'not empty' train llama --steps 60 --out whole
expect 64 'lr' train llama --steps 60 --out whole --lr 0.5 --resume
expect 64 'config.json' train llama --steps 60 --out whole --layers 3 --resume
expect 64 'dtype' train llama --steps 60 --out whole --dtype bf16 --resume
expect 0 'adamw .*%' train lime --steps 5 --out profiled --profile
calls_of_linear() { awk '$1 == "linear" && $2 != "backward" {print $4}' output; }
calls=$(calls_of_linear)
expect 0 'adamw .*%' train lime --steps 5 --eval-every 1 --eval-samples 50 --out profiled_too --profile
[ "$calls" = "$(calls_of_linear)" ] || fail "the profile of the steps counts evaluations"
expect 0 'bf16 copy' train lime --dry-run --dtype bf16

cp -r whole damaged
rm damaged/step_00000060/manifest.json
expect 0 'resumed after step' train llama --steps 60 --out damaged --save-every 7 --resume
cmp -s whole/step_00000060/model.safetensors damaged/step_00000060/model.safetensors || fail "damaged: other weights"
[ -d damaged/damaged_step_00000060 ] || fail "the damaged checkpoint was not set aside"
env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u KMP_BLOCKTIME "$build/train_llama" "${tiny[@]}" --steps 100000 --out busy \
  >output 2>&1 &
pid=$!
while [ ! -s busy/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
[ ! -r /proc/$pid/environ ] || tr '\0' '\n' </proc/$pid/environ | grep -qE '^(GOMP_SPINCOUNT|KMP_BLOCKTIME)=' ||
  fail "the spinning of OpenMP's threads has no bound"
expect 64 'in use' train llama --steps 100000 --out busy --resume
kill -KILL $pid
wait $pid 2>/dev/null
rm -rf busy
# a run directory that is gone is not a success
"$build/train_llama" "${tiny[@]}" --steps 100000 --save-every 100000 --out busy >output 2>&1 &
pid=$!
while [ ! -s busy/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
mv busy moved
wait $pid
[ $? = 74 ] || fail "the run directory was moved during the run: not exit code 74"
grep -q '^error: .*busy was removed, moved or replaced' output || fail "nobody said that the run directory is gone"
[ ! -e busy ] || fail "the run made its directory again"
rm -rf moved
# readers beside a run that keeps one checkpoint
"$build/train_llama" "${tiny[@]}" --steps 100000 --save-every 1 --keep 1 --out one >/dev/null 2>&1 &
pid=$!
while ! compgen -G 'one/step_*' >/dev/null && kill -0 $pid 2>/dev/null; do sleep 0.01; done
for _ in 1 2 3 4 5; do expect 0 '=' "$build/generate" --model one --prompt '3 + 4 =' --max-new 2; done
kill -KILL $pid
wait $pid 2>/dev/null
# --resume goes on with what the directory says, and takes over no directory that is not a run's
expect 0 'resumed after step 60, the last one: the run is done' "$build/train_llama" --resume --out whole
expect 64 'there is no run in nowhere' "$build/train_llama" --resume --out nowhere
expect 0 'initialised' train llama --steps 0 --out initialised
expect 64 'initialised is a model directory' train llama --steps 60 --out initialised --resume
rm -rf piped && cp -r whole piped && rm piped/metrics.jsonl && mkfifo piped/metrics.jsonl
expect 65 'metrics.jsonl: is not a regular file' timeout 20 "$build/train_llama" --resume --out piped

# Inheritune's rounds: a signal or a kill at any moment, in any round. Such a rate ends far from the reference.
inheritune=("$build/train_inheritune" --data arith:3 --train-samples 400 --reference whole --batch 8 --answer-samples 4
  --steps 60 --lr 10 --schedule constant --start 1 --grow 1 --save-every 7)
same_rounds() {
  for file in inheritune.json inheritune.md inheritune.svg round_{1_blocks_1,2_blocks_2}/step_00000060/model.safetensors; do
    cmp -s rounds/$file rounds_twice/$file || fail "$1: other rounds_twice/$file"
  done
}
expect 0 'round 2, 2 of 2 blocks, does not match' "${inheritune[@]}" --test-samples 50 --out rounds
expect 0 'perplexity' "$build/evaluate" --model rounds/round_1_blocks_1 --data arith:3 --train-samples 400 --answers 4
for signal in TERM INT; do
  rm -rf rounds_twice
  env --default-signal=INT "${inheritune[@]}" --test-samples 50 --out rounds_twice >output 2>&1 &
  pid=$!
  while ! saved rounds_twice/round_2_blocks_2 && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  kill -$signal $pid
  wait $pid
  code=$?
  [ $code = 75 ] || [ $code = 0 ] || fail "rounds, SIG$signal: exit code $code, want 75"
  if [ $code = 0 ]; then echo "note: the rounds were faster than SIG$signal"
  elif [ "$(grep -c 'to continue' output)" != 1 ]; then fail "stopped rounds do not say once how to go on"; fi
  expect 0 'round 2, 2 of 2 blocks, does not match' "$build/train_inheritune" --resume --out rounds_twice
  same_rounds "SIG$signal"
done
rm -rf rounds_twice
for signal in TERM KILL TERM KILL TERM KILL TERM KILL; do  # while it starts, measures, inherits or trains
  "${inheritune[@]}" --test-samples 50 --out rounds_twice --resume >output 2>&1 &
  pid=$!
  sleep 0.0$((RANDOM % 90 + 10))
  kill -$signal $pid 2>/dev/null
  wait $pid 2>/dev/null
  code=$?
  [[ " 0 75 137 143 " = *" $code "* ]] || fail "rounds, SIG$signal at any moment: exit code $code"
done
expect 0 'round 2, 2 of 2 blocks, does not match' "${inheritune[@]}" --test-samples 50 --out rounds_twice --resume
same_rounds "any moment"
"${inheritune[@]}" --test-samples 30000 --out measuring >output 2>&1 &  # the reference, first of all
pid=$!
while [ ! -s measuring/inheritune.json ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -TERM $pid
wait $pid
code=$?
[ $code = 75 ] || fail "while the reference is measured: exit code $code, want 75"
grep -q '"reference_loss": null' measuring/inheritune.json || echo "note: the reference was measured before SIGTERM"
"${inheritune[@]}" --test-samples 50 --steps 100000 --out busy_rounds >output 2>&1 &
pid=$!
while ! saved busy_rounds/round_1_blocks_1 && kill -0 $pid 2>/dev/null; do sleep 0.01; done
expect 64 'busy_rounds is in use by another' "${inheritune[@]}" --test-samples 50 --steps 100000 --out busy_rounds --resume
kill -KILL $pid
wait $pid 2>/dev/null

# A comparison: one run that fails leaves the others, and continues exactly after a stop.
expect 77 '^error: failed: lime;' compare llama,lime,resformer --steps 8 --router-lr 1e38 --clip 0 --out one_fails
grep -qE '^resformer +[0-9,]+ .* [0-9.]+ %$' output || fail "after a failed run, the next one has no numbers"
grep -qE '^lime: failed after step 0 of 8: the test loss' output || fail "the table does not say why lime failed"
[ "$(grep -cE '"state": "(done|failed)"' one_fails/results.json)" = 3 ] || fail "results.json lacks a run"
grep -q '^| lime .*| failed after' one_fails/results.md || fail "results.md does not say that lime failed"
grep -q 'lime' one_fails/compare.svg || fail "the picture does not name lime"
small_memory() (ulimit -v 350000 && exec "$build/compare" --data text:numbers.txt --width 64 --heads 2 --ffn 64 --layers 12 \
  --seq 512 --batch 8 --steps 1 --eval-samples 1 --arch "$1" "${@:2}")
if small_memory llama --dry-run >output 2>&1; then  # not where sanitizers take their own memory
  expect 71 '^1/2 hyper:rate=8 failed: not enough memory' small_memory hyper:rate=8,llama --out small_memory
  grep -qE '^llama +[0-9,]+ .* [0-9.]+$' output || fail "after a run without memory, the next one has no numbers"
fi
expect 0 '^relay +[0-9,]+ ' compare llama,relay --steps 60 --out compared
interrupted compared_twice/llama/metrics.jsonl \
  "$build/compare" --arch llama,relay "${tiny[@]}" --steps 60 --out compared_twice
code=$?
[ $code = 75 ] || [ $code = 0 ] || fail "compare, SIGINT: exit code $code, want 75"
[ $code = 0 ] && echo "note: the comparison was faster than SIGINT"
for file in compare.svg results.md results.json; do [ -s compared_twice/$file ] || fail "stopped: $file is missing"; done
[ $code = 0 ] || [ "$(grep -c 'to continue' output)" = 1 ] || fail "a stopped comparison says twice how to go on"
[ $code = 0 ] || grep -q "^to continue this comparison: $build/compare --resume --out compared_twice$" output ||
  fail "a stopped comparison does not say how to go on"
touch compared_twice/.tmp-results.json-999999999
expect 64 "compared_twice/llama has --lr 0[.][0-9]+, the flags say 0[.]5" \
  "$build/compare" --resume --out compared_twice --lr 0.5
expect 64 'hidden_size is 16, not 32' "$build/compare" --resume --out compared_twice --width 32
expect 0 '^relay +[0-9,]+ ' "$build/compare" --resume --out compared_twice
expect 0 '^llama +[0-9,]+ ' compare llama --steps 60 --out compared_twice --resume  # of fewer, the others are kept
grep -q '^relay' output && fail "compare shows relay, which --arch does not name"
grep -q '"name": "relay"' compared_twice/results.json || fail "results.json forgot relay"
expect 0 '^relay +[0-9,]+ ' compare llama,relay --steps 60 --out compared_twice --resume
grep -q 'step ' output && fail "a run that is done was begun again"
[ ! -e compared_twice/.tmp-results.json-999999999 ] || fail "what a kill left of results.json is still there"
expect 64 'no comparison in nothing yet' "$build/compare" --resume --out nothing
expect 0 '^130m +the SATFormer' "$build/train_lime" --list-presets
expect 0 '^With --data the values|--width 128' "$build/compare" --help
"$build/compare" --help-all | grep -qE -- '--(init|dump-tape)' && fail "compare --help lists flags that compare refuses"
for arch in llama relay; do
  cmp -s compared{,_twice}/$arch/step_00000060/model.safetensors || fail "compare --resume: other weights of $arch"
done
rm compared_twice/llama/metrics.jsonl && mkfifo compared_twice/llama/metrics.jsonl
expect 65 'metrics.jsonl: is not a regular file' timeout 20 "$build/compare" --arch llama,relay "${tiny[@]}" --steps 61 \
  --out compared_twice --resume
"$build/compare" --arch lime,relay "${tiny[@]}" --steps 600 --save-every 20 --out killed_early >output 2>&1 &
pid=$!
while [ ! -s killed_early/lime/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -KILL $pid 2>/dev/null
wait $pid 2>/dev/null
expect 0 '^relay +[0-9,]+ ' "$build/compare" --resume --out killed_early  # no run had ended
# Several seeds and rates: in turn, side by side, and killed and resumed again and again, the runs are the same to a bit.
seeds=(--seeds 1,2 --lr 3e-3,1e30 --clip 0 --answer-samples 0 --save-every 9)
expect 0 '^  lime: (low|high)er by [0-9.]+ [+]- [0-9.]+: ' compare llama,lime --steps 40 "${seeds[@]}" --jobs 1 --out in_turn
grep -q '^diverged at lr 1e+30: llama, lime$' output || fail "the table does not say which rate diverged"
[ "$(awk '/^architecture/,/^$/ {if (length > 80) ++wide} END {print wide + 0}' output)" = 0 ] || fail "the table is wider than 80"
expect 0 '^llama .* 0[.]003 +2 ' compare llama,lime --steps 40 "${seeds[@]}" --jobs 2 --out beside
"$build/compare" --arch llama,lime "${tiny[@]}" --steps 40 "${seeds[@]}" --jobs 2 --out killed_often >output 2>&1 &
pid=$!
for delay in 0.1 0.2 0.4 0.3; do
  sleep $delay
  kill -KILL $pid 2>/dev/null
  wait $pid 2>/dev/null
  [ -s killed_often/results.json ] || break
  "$build/compare" --resume --jobs 2 --out killed_often >output 2>&1 &
  pid=$!
done
wait $pid
expect 0 '^llama ' compare llama,lime --steps 40 "${seeds[@]}" --jobs 2 --out killed_often --resume
for run in {llama,lime}-lr-0.003-seed-{1,2}; do
  for other in beside killed_often; do
    cmp -s {in_turn,$other}/$run/step_00000040/model.safetensors || fail "$other: other weights of $run"
  done
done
cp numbers.txt changing.txt
expect 0 '^llama ' "$build/compare" --arch llama --data text:changing.txt "${tiny[@]:6:12}" --steps 2 --out changing
echo 5 >>changing.txt
expect 65 'changing.txt is not the data that the comparison in changing was begun on' "$build/compare" --resume --out changing
"$build/compare" --arch llama,lime --data text:changing.txt "${tiny[@]:6:12}" --steps 300 --jobs 1 --out mixed >output 2>&1 &
pid=$!
while [ ! -s mixed/llama/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
echo 6 >>changing.txt
wait $pid
[ $? = 65 ] && grep -q '^2/2 lime *failed: text:changing.txt was changed since' output || fail "a run on other data than its neighbours"
env --default-signal=INT "$build/compare" --arch llama,lime "${tiny[@]}" --steps 4000 "${seeds[@]}" --jobs 2 --out stopped >output 2>&1 &
pid=$!
while [ ! -s stopped/lime-lr-0.003-seed-0/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
for child in $(pgrep -P $pid); do  # what a killed comparison leaves behind holds the directory until it has ended
  # One that has ended meanwhile has no program any more.
  links=$(readlink /proc/$child/fd/*)  # not into a pipe: grep -q ends it early, which pipefail takes for a failure
  grep -q '/stopped$' <<<"$links" || ! readlink /proc/$child/exe >/dev/null ||
    fail "a run's process does not hold the comparison's directory"
done
kill -INT $pid
wait $pid
[ $? = 75 ] || fail "compare --jobs 2, SIGINT: not exit code 75"
grep -q '^7 runs are still to be done$' output || fail "a stopped comparison does not count what is left to do"
saved stopped/llama-lr-0.003-seed-0 && saved stopped/lime-lr-0.003-seed-0 || fail "SIGINT: a run has no checkpoint"
expect 0 '^lime ' compare llama,lime --steps 40 "${seeds[@]}" --seeds 2,1,3 --dry-run
grep -q '^10 runs: 2 architectures; each 2 learning rates with seed 0, then 3 seeds at the' output || fail "no number of runs"
expect 77 '^error: failed: llama, lime;' compare llama,lime --steps 4 --lr 1e30,1e31 --clip 0 --out no_rate
for run in {in_turn,beside}/lime-lr-0.003-seed-2; do  # also of a run in a process of its own
  grep -q '"command":[[].*"--arch","llama,lime",.*"--seeds"' $run/environment.jsonl || fail "$run: not the user's command line"
done
expect 0 ' 2 of the runs are left to do$' "$build/compare" --resume --seeds 1,2,3 --dry-run --out beside
expect 64 'done and was tested with --eval-samples 16, the flags say 8' "$build/compare" --resume --eval-samples 8 --out beside
expect 0 'beside/results.md' "$build/compare" --resume --seeds 1,2,3 --out beside
grep -qE '^12/12 lime lr 0.003 seed 3 ' output || fail "a third seed was not added"
expect 64 'excludes' compare llama --seed 1 --seeds 1,2 --out x
expect 64 'names 1 twice' compare llama --seeds 1,2,1 --out x
expect 64 '--lr' compare llama --lr 1e-3,fast --out x
expect 64 'for compare and sweep themselves' "$build/compare" --one-run '{"parent": 1'
mkdir diary && touch diary/page
expect 64 'holds files, but no comparison' compare llama --steps 1 --out diary --resume
if command -v python3 >/dev/null; then  # a parser of XML, on a name that XML cannot hold
  printf -v odd 'text:a\xef\xbf\xbf<&>.txt'
  cp numbers.txt "${odd#text:}"
  expect 0 '^llama ' "$build/compare" --arch llama --data "$odd" "${tiny[@]:6:12}" --steps 2 --out odd
  for file in odd/compare.svg odd/llama/curve.svg one_fails/compare.svg compared/relay/curve.svg; do
    python3 -c 'import sys, xml.dom.minidom as xml; xml.parse(sys.argv[1])' $file >output 2>&1 || fail "$file is not XML"
  done
fi

# --- wrong usage, wrong files ------------------------------------------------------------------------------------
expect 64 '--data is needed' "$build/train_llama" --out x
expect 64 '--out is needed' "$build/train_llama" --data arith:3
expect 64 'arith' train llama --out x --data arith:9
expect 64 'preset' "$build/train_llama" --preset huge
expect 64 "^error: unknown preset 'nosuch'" "$build/train_combined" --data arith:3 --preset nosuch --out x
expect 64 'there is no run in nosuch yet' "$build/train_combined" --resume --out nosuch
expect 64 "a name is missing beside '[+]'" "$build/train_combined" --arch lime+ --data arith:3 --out x
expect 64 'did you mean --lime-kv-init or --lime-dynamic-kv-init' "$build/train_combined" --arch lime+lime_dynamic \
  --kv-init normal --data arith:3 --out x
expect 64 '^error: --arch is needed' "$build/train_combined" --data arith:3 --out x
expect 64 '^error: --preset speedrun is a block of shortcuts; train it by train_shortcuts$' "$build/train_combined" \
  --preset speedrun --data arith:3 --out x
expect 64 'which sets --embed-norm true: mhc and shortcuts do not combine' "$build/train_combined" --preset d12 \
  --arch mhc+shortcuts --resid false --x0 false --backout false --vocab 100 --dry-run
expect 0 '^lime:$' "$build/train_combined" --help-all --arch lime+lime_dynamic
expect 0 '^lime_dynamic:$' "$build/train_combined" --help-all --arch lime+lime_dynamic
expect 64 'train it by train_lime$' "$build/train_combined" --arch lime --data arith:3 --out x
expect 64 'hyper and mhc do not combine: both change the stream' train combined --arch hyper+mhc --out x
expect 64 'is a block of mhc[+]kv_share; train it by train_combined --arch' train lime --preset v4_block --out x
expect 0 'test loss' train combined --arch lime+mhc --steps 2 --out pair
expect 0 'test loss' "$build/train_combined" --resume --steps 4 --out pair
expect 64 'leave out --preset v4_block, which sets --reads previous: it is for a new model' "$build/train_combined" \
  --preset v4_block --init pair --data arith:3 --out x
expect 64 'is of train_combined --arch mhc[+]lime, not of train_lime' "$build/train_lime" --resume --out pair
grep -q '"arch": "mhc+lime"' pair/step_00000004/config.json || fail "a pair's name is not in its order"
[ -s pair/step_00000004/modeling_crossply_mhc_and_lime.py ] || fail "a pair has no modelling file"
expect 0 'test loss' train mhc --steps 1 --out mhc_run
expect 0 'mhc[+]resformer starts as the mhc of mhc_run' "$build/train_combined" --arch mhc+resformer --init mhc_run \
  --data arith:3 --train-samples 40 --test-samples 8 --steps 1 --warmup 0 --out pair_of_mhc
expect 64 'num_attention_heads' train llama --out x --heads 3
expect 64 'num_key_value_heads' train llama --out x --heads 4 --kv-heads 3
expect 64 'odd' train llama --out x --head-width 5
expect 64 'layers' train llama --out x --layers 0
expect 64 'dtype' train llama --out x --dtype fp16
expect 64 'matmul' train llama --out x --matmul bf16
expect 64 'decays everything' train lime_dynamic --out x --decay-all --decay routers
expect 64 'multiplies in bf16 anyway' train llama --out x --dtype bf16 --matmul bf16x3
expect 64 'reference has no bf16' train llama --out x --dtype bf16 --device reference
# Of every architecture: what must be named, the trainer, a flag and a value that it refuses.
while read -r pattern arch flag value; do
  expect 64 "^error: flags: .*$pattern" train "$arch" --out x --dry-run "$flag" "$value"
done <<END
window lime --routing last
routing lime --routing sideways
top_p lime_static --top-p 1.5
top_p lime_static --top-p much
at.least.1/ lime_static --top-p 0.1
kv_init lime_dynamic --kv-init zero
router_init lime --router-init sideways
router_bound lime --router-bound code
decay lime_dynamic --decay all
lambda2 resformer --lambda2 fixed
rate hyper --rate 99
rate hyper --rate 0
norm hyper --norm batchnorm
dynamic_norm_eps hyper --dynamic-norm-eps 2
dynamic_norm_eps hyper --dynamic-norm-eps 1e-400
top_p_renormalize lime_static --top-p-renormalize often
dynamic hyper --dynamic maybe
map vertical --map sideways
residual vertical --residual 2
heads sla --sla-heads 99
num_attention_heads sla --heads 99
distance sla --distance -1
stride ala --stride 0
variant resformer --variant minus
last_k resformer --last-k some
gate satformer --gate nope
last_k satformer --last-k 1.5
dilation denseformer --dilation 0
period denseformer --period 0
attn_res_block_size attnres --attn-res-block-size -1
cla_factor kv_share --cla-factor 0
num_kv_shared_layers kv_share --num-kv-shared-layers 99
kv_owners kv_share --kv-owners 7
value_embeds shortcuts --value-embeds all
gate_channels shortcuts --gate-channels 999
gate_scale shortcuts --gate-scale 0
backout shortcuts --backout maybe
unet shortcuts --unet maybe
value_from shortcuts --value-from x1
lanes_from shortcuts --lanes-from 99
attn_saved shortcuts --attn-saved 99
mudd_tail shortcuts --mudd-tail all
mudd_width shortcuts --mudd-width -1
hc_mult mhc --hc-mult 9
mixing mhc --mixing birkhoff
reads mhc --reads next
hc_sinkhorn_iters mhc --hc-sinkhorn-iters 0
hc_eps mhc --hc-eps -1
hc_count gated_streams --hc-count 9
hc_lowrank gated_streams --hc-lowrank -1
laurel_rank gemma3n --laurel-rank -1
depth_start depth_attention --depth-start 0
depth_stride depth_attention --depth-stride -1
depth_recent depth_attention --depth-recent -1
depth_start moda --depth-start 0
depth_window moda --depth-window -1
ffn_kv moda --ffn-kv maybe
norm mudd --norm post
END
for sizes in '[1]' '[0,1]' 16; do  # in place of --ffn
  expect 64 '^error: flags: .*intermediate_sizes' "$build/train_mudd" --data arith:3 --layers 2 --out x --dry-run \
    --intermediate-sizes "$sizes"
done
for bad in '--seed -1' '--seed 99999999999999999999' '--lr nan' '--lr -1' '--batch abc' '--steps -1' '--clip inf'; do
  # shellcheck disable=SC2086
  expect 64 "is not (a number|an integer)" train llama --out x $bad
done
expect 64 'unknown flag --stpes; did you mean --steps[?]' train llama --out x --stpes 3
for huge in '--seq 9223372036854775807' '--batch 40000000000' '--batch 1073741824 --accumulate 100000' '--keep 4294967297' \
  '--train-samples 9223372036854775807' '--train-samples 1000000000'; do
  # shellcheck disable=SC2086
  expect 64 '(to [0-9]+$|the most is [0-9]+ sequences|at most [0-9]+)' train llama --out x $huge
done
cp -r run/step_00000020 wrong
rm wrong/manifest.json
for value in 1e30 18446744073709551615 -5 '"many"'; do
  sed -E "s/\"seq\": [0-9]+/\"seq\": $value/" run/step_00000020/train_state.json >wrong/train_state.json
  expect 65 '"seq"' "$build/evaluate" --model wrong --data arith:3
done
expect 64 'to [0-9]+$' "$build/evaluate" --model run --data arith:3 --batch 9223372036854775807
expect 64 'the most is [0-9]+ sequences' "$build/gradients" --model run --tokens none --batch 1073741824 --seq 1048576 --out x
expect 0 '10 steps x 8 sequences = 0[.]2 epochs; test set 50 sequences' train llama --steps 010 --warmup 0 --out octal
expect 64 'limo.*known: llama' compare llama,limo --out x
expect 64 "no option 'rat'; it has: rate" compare llama,hyper:rat=2 --out x
expect 64 'hyper:rate=99: .*1..8' compare llama,hyper:rate=99 --out x
expect 64 'llama twice' compare llama,lime,llama --out x
expect 64 'trainers' compare llama --out x --dump-tape
if grep -qs '^CROSSPLY_CUDA:BOOL=ON' "$build/CMakeCache.txt" && nvidia-smi -L >/dev/null 2>&1; then
  expect 0 'test loss' train llama --steps 1 --out on_gpu --device cuda
else
  expect 71 'cuda|CUDA' train llama --steps 1 --out x --device cuda
fi
if grep -qs '^CROSSPLY_EMULATOR:BOOL=ON' "$build/CMakeCache.txt"; then
  expect 0 'test loss' train llama --steps 1 --batch 1 --out emulated --device emulator
else
  expect 71 'emulator' train llama --steps 1 --out x --device emulator
fi
expect 66 'nowhere.txt' "$build/train_llama" --out x --data text:nowhere.txt
expect 64 'not a number' "$build/generate" --model run --prompt 1 --temperature nan
"$build/generate" --model run --prompt '3 + 4 =' >/dev/full 2>output
[ $? = 74 ] || fail "a full standard output is not an error"
expect 66 'nowhere' "$build/generate" --model nowhere --prompt 1
expect 77 '^error: .*last checkpoint is (untouched|from before)' train llama --steps 30 --save-every 1 --eval-every 30 \
  --out boom --lr 1e30 --clip 0 --warmup 0 --schedule constant
expect 77 '^error: .*there is no checkpoint yet' train llama --steps 30 --save-every 30 --eval-every 30 --out bang --lr 1e30 \
  --clip 0 --warmup 0 --schedule constant
expect 77 '^lime +[0-9,]+ .* - +-$' compare llama,lime --steps 3 --out booms --lr 1e30 --clip 0 --warmup 0 --schedule constant
grep -q '^1/2 llama failed: the test loss after step 1' output || fail "the reason of a stopped run is not said"
rmdir boom/step_* 2>/dev/null
[ ! -e x ] || fail "a refused run left x behind"
expect 65 'vocabulary' train llama --steps 1 --out y --vocab 20

expect 0 'initialised' train lime --steps 0 --out model
echo "3 5 10 11 7 20 4 9 2 12 13 14" >tokens.txt
gradients() { "$build/gradients" --tokens tokens.txt --batch 2 --seq 5 --out grads.safetensors "$@"; }
expect 0 '^loss [0-9]\.[0-9]{8,}' gradients --model model
expect 0 '^loss [0-9]\.[0-9]{8,}' gradients --model model --device reference
expect 65 'tokens' gradients --model model --seq 50
expect 65 'vocabulary' gradients --model model --tokens <(echo "1 2 3 99 1 2 3 4 5 6 7 8")
expect 65 'integer' gradients --model model --tokens <(echo "1 2 three 99 1 2 3 4 5 6 7 8")
expect 66 'missing.txt' gradients --model model --tokens missing.txt
broken() { rm -rf broken && cp -r model broken && rm broken/manifest.json; }
broken && sed -i 's/"hidden_size": 16/"hidden_size": 18/' broken/config.json
expect 65 'does not fit' gradients --model broken
broken && sed -i 's/"hidden_size"/"hiden_size"/' broken/config.json
expect 65 'hiden_size' gradients --model broken
broken && sed -i 's/"routing"/"rooting"/' broken/config.json
expect 65 'rooting' gradients --model broken
broken && echo '{' >broken/config.json
expect 65 'JSON' gradients --model broken
broken && rm broken/model.safetensors
expect 66 'model.safetensors' gradients --model broken
broken && truncate -s -5 broken/model.safetensors
expect 65 'model.safetensors' gradients --model broken
broken && printf '\xff\xff\xff\xff\xff\xff\xff\x7f' | dd of=broken/model.safetensors conv=notrunc status=none
expect 65 'model.safetensors' gradients --model broken
expect 74 'proc|grads' gradients --model model --out /proc/grads.safetensors
expect 74 'create|proc' train llama --steps 1 --out /proc/run

# a checkpoint with a flipped bit is skipped, and an older one takes its place
cp -r run flipped
printf 'X' | dd of=flipped/step_00000020/model.safetensors bs=1 seek=3000 conv=notrunc status=none
rm -rf flipped/step_00000018
expect 66 'step_00000020' "$build/generate" --model flipped --prompt '3 + 4 =' --max-new 2
cp -r run/step_00000018 flipped
expect 0 '^note: skipped .*step_00000020.*SHA-256' "$build/generate" --model flipped --prompt '3 + 4 =' --max-new 2
expect 0 '= .+' "$build/generate" --model flipped --prompt '3 + 4 =' --max-new 2

# shards: tokens beyond the vocabulary, a header that lies
shard() {  # shard FILE COUNT_IN_HEADER TOKENS...
  local file=$1 count=$2
  shift 2
  { printf '\x88\xd8\x34\x01\x01\x00\x00\x00'; printf "\\x$(printf %02x $((count % 256)))\\x$(printf %02x $((count / 256)))\\x00\\x00"
    head -c 1012 /dev/zero; for token; do printf "\\x$(printf %02x $((token % 256)))\\x$(printf %02x $((token / 256)))"; done; } >"$file"
}
tokens=(); for i in $(seq 600); do tokens+=($((i * 7 % 50))); done
shard good.bin 600 "${tokens[@]}"
shard lies.bin 601 "${tokens[@]}"
small=(--width 16 --ffn 24 --layers 2 --heads 2 --batch 2 --seq 8 --steps 2)
expect 0 'test loss' "$build/train_llama" --data good.bin --vocab 50 "${small[@]}" --out shards
expect 0 'kept from training' "$build/evaluate" --model shards --data good.bin
expect 64 '--vocab' "$build/train_llama" --data good.bin "${small[@]}" --out x
expect 65 'good.bin.*vocabulary' "$build/train_llama" --data good.bin --vocab 40 "${small[@]}" --out x
expect 65 'lies.bin' "$build/train_llama" --data lies.bin --vocab 50 "${small[@]}" --out x
expect 66 'none' "$build/train_llama" --data 'none*.bin' --vocab 50 "${small[@]}" --out x

# a file is scored from end to end, in the model's own length; the file that the run trained on, in its test part
evaluate() { "$build/evaluate" --model "$@"; }
cp good.bin other.bin
expect 0 '^scored 599 of 600 tokens' "$build/evaluate" --model shards --data other.bin
grep -q '^sequences 75 of 8 tokens' output || fail "evaluate has another length than the model"
expect 0 '^scored 1,198 of 1,200 tokens' "$build/evaluate" --model shards --data '[go]*[dr].bin' --seq 100
expect 0 '^split test: good.bin, kept from training$' evaluate shards --data good.bin
grep -q '^scored 8 of 600 tokens' output || fail "the test part of good.bin is not one window"
grep -q '^note' output && fail "the run's own test part gets a note"
expect 0 '^scored 599 of 600 tokens' evaluate shards --data good.bin --split all
# what is scored is named, and so is what the model was trained on
grep -q '^note: good.bin is among the files that the model was trained on$' output || fail "good.bin is trained on"
expect 0 '^split test: good.bin, cut for --seq 16$' evaluate shards --data good.bin --seq 16
grep -q '^note: the run cut its data for --seq 8: ' output || fail "another --seq mixes the parts, and nobody says so"
mkdir sh
for name in sh/1 sh/2 val; do cp good.bin $name.bin; done
expect 0 'test loss' "$build/train_llama" --data 'sh/*.bin' --val-data 'va*.bin' --test-samples 1 --vocab 50 "${small[@]}" \
  --out sharded
for data in 'sh/*.bin' './sh/?.bin'; do
  expect 0 "^split test: (/.*/)?val.bin, the run's validation data$" evaluate sharded --data "$data"
  grep -q '^note' output && fail "the run's validation data gets a note"
done
expect 0 '^split all: sh/2.bin, every token but a file.s first, once$' evaluate sharded --data sh/2.bin
grep -q '^note: sh/2.bin is among the files that the model was trained on$' output || fail "sh/2.bin is trained on"
expect 0 "^split test: ./val.bin, the run's validation data$" evaluate sharded --data 'sh/*.bin' --val-data ./val.bin
ln sh/2.bin linked.bin
expect 0 '^note: 1 of these 2 files are among those' evaluate sharded --data '[lo][it]*e[dr].bin'
expect 0 '^split all: \[lo\].* \(2 files\)$' evaluate sharded --data '[lo][it]*e[dr].bin' --samples 7
grep -q '^sequences 7 of 8 tokens: the first 7 of 150$' output || fail "nobody says which seven sequences"
expect 0 '^split test: linked.bin, as val' evaluate sharded --data other.bin --val-data linked.bin
grep -q '^note: linked.bin is among' output || fail "validation files that were trained on get no note"
expect 0 '^scored 1,198 of 1,200 tokens' evaluate sharded --data 'sh/*.bin' --split all
expect 0 '^split test: other.bin, what training on it would leave out$' evaluate shards --data other.bin --split test
task=(--train-samples 400 --test-samples 50 --answers 4)
expect 0 '^split test: arith:4, generated; the model was trained on arith:3$' evaluate run --data arith:4 "${task[@]}"
grep -q '^prompts 4: the first 4 of 50$' output || fail "nobody says which prompts"
expect 0 '^split test: arith:3, kept from training$' evaluate run --data arith:3 "${task[@]}"
expect 0 '^note: --seed or --train-samples differ' evaluate run --data arith:3 "${task[@]}" --seed 5
grep -q 'kept from' output && fail "a test set of another seed is not kept from training"
expect 64 'generated' "$build/evaluate" --model run --data arith:3 --split all
seq 300 >text
expect 0 'test loss' "$build/train_llama" --data text:text "${small[@]}" --out bytes
seq 200 >other
expect 0 '^scored 691 of 692 tokens' "$build/evaluate" --model bytes --data text:other
grep -q '^split all: other, every token' output || fail "the text that is scored has no name"
loss=$(sed -n 's/^loss //p' output) bits=$(sed -n 's/^bits per byte //p' output)
# Bits have four decimals: half of the last one, and the loss's own rounding.
awk "BEGIN { d = $loss / log(2) - $bits; exit !(d * d < 5.1e-5 ^ 2) }" || fail "bits per byte are '$bits', the loss $loss"

# minimal pairs: by file, phenomenon, field and in all; bad files say where
pair() { printf '{"sentence_good": "%s", "sentence_bad": "%s", "field": "f", "linguistics_term": "t"}\n' "$1" "$2"; }
pairs() { "$build/score" --model bytes --prefix-token 10 --pairs "$@"; }
mkdir pairs no_pairs
{ pair 12 1x; pair 1x 12; pair 12 12; } >pairs/one.jsonl  # one of the first two is right, whatever the model
pair 120 120 >pairs/two.jsonl
expect 0 '^one +3 +66[.]67% +1$' pairs pairs --json pairs.json
for row in 'two +1 +100[.]00% +1' 't +4 +75[.]00% +2' 'f +4 +75[.]00% +2' 'all +4 +75[.]00% +2' '[0-9]+ tokens in .* tokens/s'; do
  grep -qE "^$row$" output || fail "the tables have no row '$row'"
done
grep -qF '{"pairs":4,"right":3,"accuracy":0.75,"ties":2,"fields":{"f":' pairs.json || fail "the JSON is $(head -c 200 pairs.json)"
expect 66 'no_pairs: no file in it ends with .jsonl' pairs no_pairs
expect 66 'nowhere' pairs nowhere
expect 74 'nowhere' pairs pairs --json nowhere/it.json
expect 64 '--json.*--pairs' "$build/score" --model bytes --json it.json
expect 65 'one.jsonl: line 1: .*--prefix-token' "$build/score" --model bytes --pairs pairs
echo '{' >pairs/three.jsonl
expect 65 'three.jsonl: line 1: .*JSON' pairs pairs
{ pair 12 13; echo '{"sentence_good": "12"}'; } >pairs/three.jsonl
expect 65 'three.jsonl: line 2: "sentence_bad" is missing' pairs pairs
pair 12 '' >pairs/three.jsonl
expect 65 'three.jsonl: line 1: "sentence_bad" is ""' pairs pairs
pair 12 "$(seq -s ' ' 3000)" >pairs/three.jsonl
expect 65 'three.jsonl: line 1: "sentence_bad" has [0-9]+ tokens, the model.s longest sequence [0-9]+; take the pair out' pairs pairs

# the same split, in windows; several models have one table each and one picture
expect 0 '^split test: good.bin, kept from training$' "$build/analyze" --model shards --data good.bin --what attention
grep -q '^note: windows of 8 tokens, not of 100: ' output || fail "nobody says that windows are short"
grep -q '^100 windows of 8 tokens, seed 42, ' output || fail "nobody says what was looked at"
expect 0 '^wrote seen/attention.json, .csv and .svg$' "$build/analyze" --model shards bytes --data good.bin --what attention \
  --sequences 3 --out seen
[ "$(grep -c '^lazy layers: [0-2] of 2$' output)" = 2 ] || fail "there are not two tables"
[ "$(awk -F, '$1 == "bytes"' seen/attention.csv | wc -l)" = 4 ] || fail "not four heads of bytes in the .csv"
expect 64 'is not one of: lens' "$build/analyze" --model shards --data good.bin --what heads
echo mine >seen/attention.json
expect 64 'seen/attention.json exists and was not written by this program' "$build/analyze" --model shards \
  --data good.bin --what attention --out seen
[ "$(cat seen/attention.json)" = mine ] || fail "analyze has lost a file of the user's"
# On a full disk, and where a signal ends it while it measures, analyze leaves nothing behind.
look=("$build/analyze" --model shards --data good.bin --out left)
for what in "--dump *" "--what maps"; do
  read -r -a words <<<"$what"
  (ulimit -f 2; "${look[@]}" "${words[@]}" >output 2>&1 </dev/null)
  code=$?
  [ $code = 74 ] || fail "exit code $code of a full disk, want 74: analyze $what"
  [ -z "$(ls -A left)" ] || fail "analyze $what has left something on a full disk: $(ls -A left)"
done
: >output  # the child may empty it after we have looked
"${look[@]}" --what sinks attention --sequences 300000 >output 2>&1 </dev/null &
looking=$!
for _ in $(seq 200); do grep -q 'windows of' output && break; sleep 0.05; done
kill -TERM $looking
wait $looking
[ $? = 143 ] || fail "analyze is not stopped by a signal"
[ -z "$(ls -A left)" ] || fail "analyze has left something where it was stopped: $(ls -A left)"

cp -r bytes/step_00000002 long
rm long/train_state.json long/manifest.json
sed -Ei 's/"max_position_embeddings": [0-9]+/"max_position_embeddings": 131072/' long/config.json
seq 2000 >long.txt
expect 0 '^sequences 5 of 2,048 tokens; the model takes up to 131,072 \(--seq\)$' evaluate long --data text:long.txt
expect 0 '^sequences 3 of 4,000 tokens$' evaluate long --data text:long.txt --seq 4000

# the tokenizer belongs to the model; one of another library leaves token ids
expect 64 'run has .*words.*text:text has bytes.*shards' "$build/evaluate" --model run --data text:text
expect 0 '^split test: .*/text, kept from training$' "$build/evaluate" --model bytes --data text:../"$(basename "$work")"/text
expect 64 'init run .*words .*text:text has bytes' "$build/train_lime" --init run --data text:text --steps 1 --out x
cp -r shards/step_00000002 foreign
echo '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}' >foreign/tokenizer.json
expect 0 '^7 3 [0-9]+ [0-9]+$' "$build/generate" --model foreign --prompt '7 3' --max-new 2
[ "$(grep -c '^note: .*token ids' output)" = 1 ] || fail "generate does not say that it writes token ids"
expect 64 'BPE.*integers' "$build/generate" --model foreign --prompt 'ab' --max-new 2
expect 64 'BPE.*token shards' "$build/evaluate" --model foreign --data text:text
expect 0 '^scored 599 of' "$build/evaluate" --model foreign --data other.bin
expect 0 'starts as the llama of foreign' "$build/train_lime" --init foreign --data good.bin --layers 1 --batch 2 --seq 8 \
  --steps 2 --out init
cmp -s foreign/tokenizer.json init/step_00000002/tokenizer.json || fail "--init lost the tokenizer"
mv foreign moved
expect 0 'resumed after step 2' "$build/train_lime" --init foreign --data good.bin --layers 1 --batch 2 --seq 8 --steps 2 \
  --out init --resume
expect 64 'flags describe' "$build/train_lime" --init foreign --data good.bin --layers 2 --batch 2 --seq 8 --steps 2 \
  --out init --resume
expect 0 'stays the plain backbone' "$build/train_satformer" --init moved --data good.bin --seq 8 --steps 0 --out sat
expect 64 'gate' "$build/train_satformer" --init sat --gate tanh --data good.bin --seq 8 --steps 0 --out x
expect 64 'gate sigmoid' "$build/train_satformer" --init moved --gate sigmoid --data good.bin --seq 8 --steps 0 --out x
expect 64 'leave out --width' "$build/train_lime" --init moved --layers 1 --width 8 --data good.bin --steps 0 --out x
words=$(for i in $(seq 0 49); do printf ', "\\u001b]0;%d\\u0007": %d' "$i" "$i"; done)
printf '{"model": {"type": "WordLevel", "vocab": {%s}}, "pre_tokenizer": {"type": "WhitespaceSplit"}}' "${words#, }" \
  >moved/tokenizer.json
expect 0 '\\x1b\]0;[0-9]+\\x07' "$build/generate" --model moved --prompt $'\e]0;3\a' --max-new 2
grep -qa $'\e' <(cut -d' ' -f2- output) && fail "an escape code reached the terminal"
# --- the backbone gpt2 -------------------------------------------------------------------------------------------
size() { "$build/train_gpt2" --dry-run --vocab 50304 --seq 1024 --bias false --width "$1" --heads "$2" --layers "$3"; }
expect 0 '^parameters: 124,373,760' size 768 12 12
expect 0 '^parameters: 1,556,840,000' size 1600 25 48
expect 0 'step 20: test loss [0-9.]+ [(]16 of 50 sequences[)], answers' train gpt2 --steps 20 --out gpt2
positions=$(sed -n 's/.*"n_positions": \([0-9]*\).*/\1/p' gpt2/step_00000020/config.json)
expect 0 'perplexity' "$build/evaluate" --model gpt2 --data arith:3 --train-samples 400 --answers 4
seq 300 >gpt2.txt
expect 0 'initialised' "$build/train_gpt2" --data text:gpt2.txt --seq 16 --width 8 --heads 2 --steps 0 --out gpt2_bytes
expect 0 'longest sequence, 16 tokens' "$build/generate" --model gpt2_bytes --prompt '3 + 4' --max-new 500
grep -q 'ignored' output && fail "a gpt2 of our own has keys that are ignored"
expect 64 "longest sequence is $positions" "$build/generate" --model gpt2 --prompt "$(printf '3 + %.0s' {1..40})4"
expect 64 "learned $positions positions" "$build/evaluate" --model gpt2 --data arith:6 --test-samples 4
expect 64 "model has $positions positions; .*--seq" train gpt2 --steps 2 --positions "$positions" --out x --seq 99
expect 64 "has $positions positions; give a smaller --seq if .*, or start from" "$build/train_lime" --init gpt2 --data arith:6 --steps 2 --out x
expect 0 'starts as the gpt2 of gpt2$' "$build/train_lime" --init gpt2 "${tiny[@]:0:6}" --steps 4 --out gpt2_to_lime
grep -q '"backbone": "gpt2"' gpt2_to_lime/step_00000004/config.json || fail "--init lost the backbone"
expect 64 'holds a gpt2, not a llama; their blocks differ' "$build/train_llama" --init gpt2 "${tiny[@]:0:6}" --steps 2 --out x
expect 64 'holds a llama, not a gpt2; their blocks differ' "$build/train_gpt2" --init whole "${tiny[@]:0:6}" --steps 2 --out x
expect 64 'ask for that' train llama --backbone gpt2 --steps 2 --out x
expect 64 'backbone' train gpt2 --backbone llama --steps 2 --out x
expect 64 'rope-theta' train gpt2 --rope-theta 500 --steps 2 --out x
expect 64 'backbone gpt2 has .* heads as query heads, 2, not 1' train lime --backbone gpt2 --kv-heads 1 --steps 2 --out x
expect 64 'positions' train lime --positions 64 --steps 2 --out x
expect 0 'test loss' train resformer --backbone gpt2 --bias false --activation gelu --steps 8 --out gpt2_resformer
expect 0 'resumed after step 8' "$build/train_resformer" --resume --out gpt2_resformer --steps 12
expect 0 '^resformer +[0-9,]+ ' compare gpt2,lime,resformer --backbone gpt2 --steps 2 --warmup 1 --out gpt2s
[ "$(grep -l '"backbone": "gpt2"' gpt2s/*/step_00000002/config.json | wc -l)" = 2 ] || fail "compare lost the backbone"
expect 0 '^mudd ' "$build/compare" --arch all --backbone gpt2 --dry-run
expect 0 '^gpt2 +[0-9,]+ ' compare gpt2,llama --steps 2 --warmup 1 --out both
expect 0 '^llama +[0-9,]+ ' "$build/compare" --resume --out both
expect 0 '^gpt2 +[0-9,]+ ' "$build/compare" --resume --out gpt2s
grep -q "\"n_positions\": $positions," both/gpt2/step_00000002/config.json || fail "a gpt2 among llamas has other positions"
# --- the edges of a process --------------------------------------------------------------------------------------
# Closed standard streams are the null device: no file of a run gets their numbers, and with them what is printed.
"$build/train_llama" "${tiny[@]}" --steps 20 --out closed <&- >&- 2>&-
[ $? = 0 ] || fail "closed streams: not 0"
[ "$(grep -c '^{.*}$' closed/metrics.jsonl)" = 20 ] && [ "$(wc -l <closed/metrics.jsonl)" = 20 ] ||
  fail "closed streams: something else is in metrics.jsonl"
"$build/generate" --model run --prompt '3 + 4 =' >&- 2>output || fail "a closed standard output is an error"
# A reader that goes away ends what only prints, quietly, and leaves a training run alone.
for program in generate train_llama; do
  "$build/$program" --help 2>output | true
  [ "${PIPESTATUS[0]}" = 0 ] && [ ! -s output ] || fail "$program --help without a reader: not a quiet 0"
  "$build/$program" --help >/dev/full 2>output
  [ $? = 74 ] || fail "$program --help on a full standard output: not 74"
done
mkfifo pipe
read_one() { read -r _ <pipe; }
read_one & "$build/train_llama" "${tiny[@]}" --steps 200 --out unread >pipe 2>output
[ $? = 0 ] && [ -d unread/step_00000200 ] && [ ! -s output ] || fail "a training run did not go on without a reader"
wait
read_one & "$build/generate" --model run --prompt '3 + 4 =' --max-new 200 >pipe 2>output
[ $? = 0 ] && ! grep -vE '^(note: the model was trained on|prompt: 4 tokens, .*; written: .* tokens)' output ||
  fail "generate without a reader: not a quiet 0"
wait

"$build/train_llama" "${tiny[@]}" --steps 5 --out unheard >/dev/full 2>output
[ $? = 74 ] && [ -d unheard/step_00000005 ] || fail "a training run on a full standard output: not 74 at its end"

# Data that changes under a run: one line, and the last checkpoint stays.
changes() {  # changes CODE PATTERN DATA COMMAND...: runs COMMAND once the run on DATA has a checkpoint
  rm -rf changing
  timeout 120 "$build/train_llama" --data "$3" --seq 8 --width 16 --ffn 24 --layers 1 --heads 2 --batch 2 --steps 1000000 \
    --save-every 5 --vocab 256 --out changing >output 2>&1 </dev/null &
  pid=$!
  while ! saved changing && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  "${@:4}"
  wait $pid
  code=$?
  [ $code = "$1" ] || fail "data that changes: exit code $code, want $1: ${*:4}"
  grep -q "^error: .*$2" output || fail "data that changes: no line matches '$2': ${*:4}"
  expect 0 'loss' "$build/gradients" --model changing --tokens good.bin --batch 1 --seq 4 --out changed.safetensors
}
yes 'some text' | head -c 20000 >some_text
changes 74 'some_text.*shortened' text:some_text truncate -s 3 some_text
cp good.bin cut.bin
changes 74 'cut.bin.*shortened' cut.bin truncate -s 1030 cut.bin
cp good.bin other.bin
fill() { head -c 1200 /dev/zero | tr '\0' '\377' | dd of=other.bin bs=1024 seek=1 conv=notrunc status=none; }
changes 65 'other.bin.*changed.* 65535' other.bin fill

# Gradients replace gradients, and nothing else.
expect 0 '^loss' gradients --model model --out again.safetensors
expect 0 '^loss' gradients --model model --out again.safetensors
cp model/model.safetensors weights.safetensors
for file in weights.safetensors tokens.txt; do
  cp $file before
  expect 64 "$file" gradients --model model --out $file
  cmp -s $file before || fail "gradients changed $file"
done
expect 64 '--batch: .* is not an integer from 1 to [0-9]+$' gradients --model model --batch 4000000000 --seq 4
expect 64 '--seq: .* is not an integer from 1 to [0-9]+$' gradients --model model --batch 1 --seq 9223372036854775807

# Names that are not UTF-8, or look like patterns.
odd=$(printf 'odd\xff')
cp good.bin "$odd.bin"
expect 0 'test loss' "$build/train_llama" --data "$odd.bin" --vocab 50 "${small[@]}" --out "$odd"
expect 0 'resumed' "$build/train_llama" --data "$odd.bin" --vocab 50 "${small[@]}" --out "$odd" --resume
cp good.bin 'a[1].bin'
expect 0 'test loss' "$build/train_llama" --data 'a[1].bin' --vocab 50 "${small[@]}" --out pattern
expect 66 'a\[2\].bin' "$build/train_llama" --data 'a[2].bin' --vocab 50 "${small[@]}" --out x

# A model made of another one's blocks, and trained.
transplant() { "$build/transplant" --model run "$@"; }
expect 0 '^blocks: 0-1 <- 0-1, 2-3 <- 0-1$' transplant --blocks 0-1,0-1 --out stacked
grep -qE '^note: fresh, because the source has nothing that fits:' output && grep -q 'lime_router.weight and 1 more$' output || fail "nobody says that routers of moved blocks are new"
cp stacked/model.safetensors before
expect 0 'test loss' "$build/train_lime" --init stacked --data arith:3 --train-samples 400 --test-samples 50 --steps 2 \
  --warmup 0 --eval-samples 4 --answer-samples 2 --out restacked
for out in stacked run good.bin; do expect 64 "$out exists and is not empty" transplant --out $out; done
cmp -s stacked/model.safetensors before || fail "transplant changed stacked"
expect 74 'good.bin' transplant --out good.bin/x
for blocks in 2 0-2 1-0 '' ,; do expect 64 "blocks: '.*' is neither a block, 0 to 1" transplant --blocks "$blocks" --out x; done
expect 64 "no part is called 'router'; known: embedding" transplant --inherit router --out x
expect 64 'width 17 --heads 2: the source has width 16' transplant --width 17 --out x
expect 66 'nowhere: no such directory' "$build/transplant" --model nowhere --out x
[ ! -e x ] || fail "transplant left something behind"

# Damaged weights: by the manifest where there is one, by their numbers where there is none.
cp -r run/step_00000020 flip
printf 'X' | dd of=flip/model.safetensors bs=1 seek=3000 conv=notrunc status=none
for program in "generate --prompt 3" "evaluate --data arith:3" "gradients --tokens tokens.txt --seq 4 --out f.safetensors" \
  "transplant --out x"; do
  # shellcheck disable=SC2086
  expect 65 'flip/model.safetensors.*SHA-256' "$build"/${program/ / --model flip }
done
expect 65 'flip/model.safetensors.*SHA-256' "$build/train_lime" --init flip --data arith:3 --steps 1 --out x
rm flip/manifest.json
printf '\x00\x00\xc0\x7f' | dd of=flip/model.safetensors bs=1 seek=$(($(stat -c %s flip/model.safetensors) - 4)) conv=notrunc status=none
expect 65 'model.safetensors.*nan' "$build/generate" --model flip --prompt '3 + 4 ='
expect 65 'model.safetensors.*nan' "$build/evaluate" --model flip --data arith:3 --train-samples 400

# a full disk: the run ends with 74, and the checkpoint before is still valid
if mkdir disk && mount -t tmpfs -o size=400k tmpfs disk 2>/dev/null; then
  expect 74 'space' train llama --steps 400 --save-every 1 --keep 50 --out disk/run
  expect 0 '=' "$build/generate" --model disk/run --prompt '3 + 4 =' --max-new 2
  umount disk
else
  echo "note: no permission to mount a small disk; the full-disk test is skipped"
fi

conclude programs
