#!/usr/bin/env bash
# The programs as a user meets them: bad input of every kind gets one clear line and the documented exit code, a run can
# be stopped and resumed at any moment, and what is written is complete.   tests/test_programs.sh BUILD_DIR
set -uo pipefail
build=$(cd "$1" && pwd)
dev=$(cd "$(dirname "$0")/../dev" && pwd)
mapfile -t trainers < <(cd "$(dirname "$0")/../train" && printf '%s\n' train_*.cpp | sed 's/\.cpp$//')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=2
failures=0

fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' output | tail -5
}
# expect CODE PATTERN COMMAND...: the exit code, and a line of the output that names the cause.
expect() {
  local code=$1 pattern=$2 got
  shift 2
  "$@" >output 2>&1 </dev/null
  got=$?
  [ $got = "$code" ] || fail "exit code $got, want $code: $*"
  grep -qE -- "$pattern" output || fail "no line matches '$pattern': $*"
  [ "$code" = 0 ] || [ "$(grep -c '^error: ' output)" = 1 ] || fail "not exactly one error line: $*"
}
tiny=(--data arith:3 --train-samples 400 --test-samples 50 --width 16 --ffn 24 --layers 2 --heads 2 --batch 8
  --eval-samples 16 --answer-samples 4)
train() { "$build/train_$1" "${tiny[@]}" "${@:2}"; }
compare() { "$build/compare" --arch "$1" "${tiny[@]}" "${@:2}"; }

# --- a run from start to end -------------------------------------------------------------------------------------
expect 0 'test loss' train lime --steps 20 --out run
for file in metrics.jsonl curve.svg flags.json; do [ -s run/$file ] || fail "run/$file is missing"; done
[ "$(wc -l <run/metrics.jsonl)" = 20 ] || fail "metrics.jsonl has $(wc -l <run/metrics.jsonl) lines, want 20"
expect 0 'perplexity' "$build/evaluate" --model run --data arith:3 --train-samples 400 --answers 4
expect 0 '= .+' "$build/generate" --model run --prompt '3 + 4 * 2 - 1 =' --max-new 8
expect 0 '=' "$build/generate" --model run --prompt '3 + 4 * 2 - 1 =' --max-new 8 --temperature 1 --top-k 3 --seed 5
expect 0 'parameters: 1,?076,?081,?088' "$build/train_lime" --preset 1b --dry-run
expect 0 'route' "$build/train_lime" --preset arith --dump-tape
expect 0 '^lime +[0-9,]+ ' "$build/compare" --out cmp "${tiny[@]}" --steps 6 --warmup 1
[ -s cmp/compare.svg ] || fail "cmp/compare.svg is missing"
expect 0 '^hyper:rate=2 +[0-9,]+ ' compare llama,hyper:rate=2,vertical:map=unet --steps 2 --warmup 1 --out three
grep -qE '^vertical:map=unet +[0-9,]+ ' output || fail "no row for vertical:map=unet"
[ -s three/hyper-rate-2/metrics.jsonl ] || fail "three/hyper-rate-2 is missing"
grep -q '"rate":2' <(tr -d ' \n' <three/hyper-rate-2/step_00000002/config.json) || fail "hyper:rate=2 has another rate"
expect 0 '^mudd +[0-9,]+ +[0-9.e+]+ +[0-9.]+ [KM]iB$' compare all,hyper:rate=2 --dry-run --out planned
[ "$(grep -cE '^[a-z_]+(:rate=2)? +[0-9,]+ ' output)" -ge 13 ] || fail "the plan does not list every architecture"
[ ! -e planned ] || fail "a dry run wrote something"
for program in "${trainers[@]}" compare generate evaluate gradients; do
  expect 0 'Exit codes' "$build/$program" --help
  expect 64 'not-a-flag|required' "$build/$program" --not-a-flag
done
expect 64 'known: llama ' "$build/compare" --arch none --out x
for arch in $(sed -n 's/.*known: //p' output); do
  [[ " ${trainers[*]} " = *" train_$arch "* ]] || fail "$arch has no trainer"
  expect 0 '^parameters: [0-9]+$' "$build/train_$arch" --preset arith-quick --dry-run
  grep -q "arch: str = \"$arch\"" "$dev"/reference/*.py || fail "$arch has no PyTorch reference"
  grep -q "\"arch\": \"$arch\"" "$dev/compare_gradients.py" || fail "$arch is not compared with PyTorch"
done

# --- stopping and resuming ---------------------------------------------------------------------------------------
expect 0 'test loss' train llama --steps 60 --out whole --save-every 7
for signal in INT TERM; do
  rm -rf part
  "$build/train_llama" "${tiny[@]}" --steps 60 --out part --save-every 7 >output 2>&1 &
  pid=$!
  while [ ! -d part/step_00000007 ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  kill -$signal $pid
  wait $pid
  code=$?
  [ $code = 75 ] || [ $code = 0 ] || fail "SIG$signal: exit code $code, want 75"
  [ $code = 0 ] && echo "note: the run was faster than SIG$signal"
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
expect 64 'not empty' train llama --steps 60 --out whole
expect 64 'lr' train llama --steps 60 --out whole --lr 0.5 --resume
expect 64 'config.json' train llama --steps 60 --out whole --layers 3 --resume
expect 64 'dtype' train llama --steps 60 --out whole --dtype bf16 --resume
expect 0 'adamw .*%' train lime --steps 5 --out profiled --profile
expect 0 'bf16 copy' train lime --dry-run --dtype bf16

cp -r whole damaged
rm damaged/step_00000060/manifest.json
expect 0 'resumed after step' train llama --steps 60 --out damaged --save-every 7 --resume
cmp -s whole/step_00000060/model.safetensors damaged/step_00000060/model.safetensors || fail "damaged: other weights"
[ -d damaged/damaged_step_00000060 ] || fail "the damaged checkpoint was not set aside"
"$build/train_llama" "${tiny[@]}" --steps 100000 --out busy >output 2>&1 &
pid=$!
while [ ! -s busy/metrics.jsonl ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
expect 64 'in use' train llama --steps 100000 --out busy --resume
kill -KILL $pid
wait $pid 2>/dev/null

# --- wrong usage, wrong files ------------------------------------------------------------------------------------
expect 64 '--data is needed' "$build/train_llama" --out x
expect 64 '--out is needed' "$build/train_llama" --data arith:3
expect 64 'arith' train llama --out x --data arith:9
expect 64 'preset' "$build/train_llama" --preset huge
expect 64 'num_attention_heads' train llama --out x --heads 3
expect 64 'num_key_value_heads' train llama --out x --heads 4 --kv-heads 3
expect 64 'odd' train llama --out x --head-width 5
expect 64 'layers' train llama --out x --layers 0
expect 64 'dtype' train llama --out x --dtype fp16
expect 64 'matmul' train llama --out x --matmul bf16
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
kv_init lime_dynamic --kv-init zero
rate hyper --rate 99
rate hyper --rate 0
norm hyper --norm batchnorm
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
norm mudd --norm post
intermediate_sizes mudd --intermediate-sizes [1]
intermediate_sizes mudd --intermediate-sizes [0,1]
intermediate_sizes mudd --intermediate-sizes 16
END
for bad in '--seed -1' '--seed 99999999999999999999' '--lr nan' '--lr -1' '--batch abc' '--steps -1' '--clip inf'; do
  # shellcheck disable=SC2086
  expect 64 "is not (a number|an integer)" train llama --out x $bad
done
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
expect 66 'nowhere.txt' train llama --out x --data text:nowhere.txt
expect 64 'not a number' "$build/generate" --model run --prompt 1 --temperature nan
"$build/generate" --model run --prompt '3 + 4 =' >/dev/full 2>output
[ $? = 74 ] || fail "a full standard output is not an error"
expect 66 'nowhere' "$build/generate" --model nowhere --prompt 1
expect 77 '^error: step [0-9]+: loss' train llama --steps 30 --out boom --lr 1e30 --clip 0 --warmup 0 --schedule constant
expect 77 '^lime +[0-9,]+ .* - +-$' compare llama,lime --steps 3 --out booms --lr 1e30 --clip 0 --warmup 0 --schedule constant
grep -q '^llama stopped: the test loss after step 1' output || fail "the reason of a stopped run is not said"
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
expect 64 '--vocab' "$build/train_llama" --data good.bin "${small[@]}" --out x
expect 65 'good.bin.*vocabulary' "$build/train_llama" --data good.bin --vocab 40 "${small[@]}" --out x
expect 65 'lies.bin' "$build/train_llama" --data lies.bin --vocab 50 "${small[@]}" --out x
expect 66 'none' "$build/train_llama" --data 'none*.bin' --vocab 50 "${small[@]}" --out x

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
[ $? = 0 ] && [ ! -s output ] || fail "generate without a reader: not a quiet 0"
wait

"$build/train_llama" "${tiny[@]}" --steps 5 --out unheard >/dev/full 2>output
[ $? = 74 ] && [ -d unheard/step_00000005 ] || fail "a training run on a full standard output: not 74 at its end"

# Data that changes under a run: one line, and the last checkpoint stays.
changes() {  # changes CODE PATTERN DATA COMMAND...: runs COMMAND once the run on DATA has a checkpoint
  rm -rf changing
  timeout 120 "$build/train_llama" --data "$3" --seq 8 --width 16 --ffn 24 --layers 1 --heads 2 --batch 2 --steps 1000000 \
    --save-every 5 --vocab 256 --out changing >output 2>&1 </dev/null &
  pid=$!
  while [ ! -d changing/step_00000005 ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  "${@:4}"
  wait $pid
  code=$?
  [ $code = "$1" ] || fail "data that changes: exit code $code, want $1: ${*:4}"
  grep -q "^error: .*$2" output || fail "data that changes: no line matches '$2': ${*:4}"
  expect 0 'loss' "$build/gradients" --model changing --tokens good.bin --batch 1 --seq 4 --out changed.safetensors
}
head -c 20000 "$build/train_llama" >some_text
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
expect 64 'seq' gradients --model model --batch 4000000000 --seq 4000000000
expect 64 'seq' gradients --model model --batch 1 --seq 9223372036854775807
expect 64 'sequence length' "$build/train_llama" --data good.bin --vocab 50 --seq 9223372036854775807 --out x

# Names that are not UTF-8, or look like patterns.
odd=$(printf 'odd\xff')
cp good.bin "$odd.bin"
expect 0 'test loss' "$build/train_llama" --data "$odd.bin" --vocab 50 "${small[@]}" --out "$odd"
expect 0 'resumed' "$build/train_llama" --data "$odd.bin" --vocab 50 "${small[@]}" --out "$odd" --resume
cp good.bin 'a[1].bin'
expect 0 'test loss' "$build/train_llama" --data 'a[1].bin' --vocab 50 "${small[@]}" --out pattern
expect 66 'a\[2\].bin' "$build/train_llama" --data 'a[2].bin' --vocab 50 "${small[@]}" --out x

# Damaged weights: by the manifest where there is one, by their numbers where there is none.
cp -r run/step_00000020 flip
printf 'X' | dd of=flip/model.safetensors bs=1 seek=3000 conv=notrunc status=none
for program in "generate --prompt 3" "evaluate --data arith:3" "gradients --tokens tokens.txt --seq 4 --out f.safetensors"; do
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

[ $failures = 0 ] && echo "programs: all as documented" || echo "programs: $failures failures"
[ $failures = 0 ]
