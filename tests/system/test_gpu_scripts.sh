#!/usr/bin/env bash
# What is run on a machine with a GPU, as far as it can be tried without one: dev/gpu/ and make bench-gpu.
#   tests/system/test_gpu_scripts.sh BUILD_DIR
set -uo pipefail
[ "$(uname)" = Linux ] || { echo "skipped: the machines with GPUs run Linux"; exit 77; }
command -v "${PYTHON:-python3}" >/dev/null || { echo "skipped: ${PYTHON:-python3} is not here"; exit 77; }
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.." || exit 1
box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
export OMP_NUM_THREADS=2 BIN=$build PYTHON=${PYTHON:-python3}
failures=0
fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' "$box/output" 2>/dev/null | tail -8
}
for script in dev/gpu/*.sh dev/gpu/long/*.sh; do bash -n "$script" || fail "$script is no script"; done

# Every name that a script gives to the tests is one that they have, also where only those of the GPU are built.
of_gpu="$(sed -nE 's/^set\(of_gpu "(.*)"\)$/\1/p' CMakeLists.txt)|has_hopper|NCCL"
{
  grep -ohE "[\"']-(tc|tce|sf)=[^\"'\$]*[\"']" dev/gpu/*.sh dev/gpu/long/*.sh
  sed -n '/for family in/,/; do/p' dev/gpu/long/sanitize.sh | grep -oE "'[^']*'" | sed "s/^'/'-tc=/"
} | sed -E "s/[\"']//g" | sed -E 's/^(-[a-z]+=)([^,]*),(.*)/\1\2\n\1\3/; P; D' | sort -u >"$box/names"
[ "$(wc -l <"$box/names")" -ge 60 ] || fail "only $(wc -l <"$box/names") filters of tests were found in dev/gpu"
while IFS= read -r filter; do
  "$build/tests" -ltc -r=xml "${filter/-tce=/-tc=}" >"$box/output"
  grep -q '<TestCase name' "$box/output" || { fail "no test is selected by $filter"; continue; }
  [[ $filter != -tce=* ]] || continue
  grep -oE 'filename="[^"]*"' "$box/output" | sed 's|.*tests/|tests/|; s/"//' | sort -u | xargs grep -qE -- "$of_gpu" ||
    fail "$filter selects no test of a GPU"
done <"$box/names"

# Each call from end to end on the CPU, without the longest steps.
call() { OUT=$box/out DRY=${DRY-1} "$box/gpu/quarter.sh" "$@" >"$box/output" 2>&1; }
has() { grep -qE -- "$1" "$box/out/summary.txt" || fail "no line of the summary matches '$1'"; }
cp -r dev/gpu "$box/gpu"
head -c 30000 dev/LOG.md >"$box/gpu/losses_text.txt"
SKIP='copies|by shape|a few' call first || fail "quarter.sh first fails on the CPU"
has 'passed +20 losses of 124M, bf16$'
has '^ +20 +[0-9.]+ '
has 'own124 .* tokens/s  MFU'
has 'failed or not done: 0$'
RETEST='rope*,matmul: on a GPU*' SKIP='architectures|ops' call second || fail "quarter.sh second fails on the CPU"
has 'passed +tests: again: rope\*$'
has 'passed +tiny: gradients$'
has 'passed +resuming, bf16: the same bits$'
grep -qE '^21 tensors, the largest relative error is [1-9.]+e-0[67], ' "$box/out/all.log" || fail "no gradients were compared"
call third && fail "quarter.sh third passes without text"
has 'CANNOT: there is no text/'
. tests/support/tiny_tokenizer.sh
tiny_tokenizer >"$box/tokenizer.json"
"$build/prepare" --tokenizer "$box/tokenizer.json" --val 0.1 --out "$box/gpu/text" CHANGELOG.md >"$box/output" 2>&1 || fail "no text"
# From an archive, as stage.sh leaves it, in another directory, with a system's own commands only.
mkdir -p "$box/crossply-x" "$box/elsewhere" "$box/tmp"
ln -s "$build" "$box/crossply-x/bin"
(cd "$box" && "$PYTHON" -m tarfile -c gpu/crossply-x.tar.xz crossply-x) || fail "no archive"
(
  PYTHON=$(command -v "$PYTHON")
  cd "$box/elsewhere" && unset BIN
  PATH=/usr/bin:/bin TMPDIR=$box/tmp call third
) || fail "quarter.sh third fails on the CPU"
rm "$box/gpu/crossply-x.tar.xz"
left_behind=$(find "$box/tmp" "$box/elsewhere" -mindepth 1 | head -3)
[ -z "$left_behind" ] || fail "quarter.sh leaves files behind: $left_behind"
has 'passed +lime: 20 steps$'
for file in curves.svg llama.metrics.jsonl lime.metrics.jsonl; do [ -s "$box/out/$file" ] || fail "third leaves no $file"; done
BUDGET=5 call second && fail "quarter.sh second passes without time"
has 'NO TIME: '
BIN=$box/elsewhere call second
[ $? = 66 ] || fail "quarter.sh passes without programs"
grep -q 'has no programs: dev/gpu/stage.sh' "$box/output" || fail "nobody says what is missing"
"$box/gpu/quarter.sh" fourth >"$box/output" 2>&1
[ $? = 64 ] || fail "quarter.sh does anything"

# Where it cannot run, first ends at once, and says why in one line.
mkdir "$box/bin" "$box/programs"
stand_in() { printf '#!/bin/bash\n%s\n' "$2" >"$1" && chmod +x "$1"; }
ln -s "$build/generate" "$box/programs/generate"
stand_in "$box/bin/nvidia-smi" 'case "$*" in *compute_cap*) echo "$CAPABILITY" ;; *) echo "Driver Version: 580.1  CUDA Version: $DRIVER |" ;; esac'
stand_in "$box/programs/tests" 'echo "ERROR: test case THREW exception: cannot open libcublasLt.so.13; tried: the loader"; exit 1'
refused() { # WORDS CAPABILITY DRIVER
  CAPABILITY=$2 DRIVER=$3 PATH=$box/bin:$PATH BIN=$box/programs DRY='' call first && fail "first passes: $1"
  has "CANNOT run here: .*$1"
  grep -qE 'GPU copies|tests:' "$box/out/summary.txt" && fail "first goes on: $1"
}
refused 'compute capability is 8.0; the package is for 9.0' 8.0 13.0
refused 'the driver is for CUDA 12; the package needs one for CUDA 13' 9.0 12.8
refused 'cannot open libcublasLt.so.13' 9.0 13.1
stand_in "$box/bin/nvidia-smi" 'echo "NVIDIA-SMI has failed"; exit 9'
refused 'no GPU: nvidia-smi says: NVIDIA-SMI has failed' 0 0
stand_in "$box/bin/nvidia-smi" 'case "$*" in *compute_cap*) echo 9.0 ;; *) echo "CUDA Version: 13.0" ;; esac'
stand_in "$box/programs/tests" 'echo "Tests of the GPU are skipped: no usable GPU: cudaErrorNoDevice"'
refused 'Tests of the GPU are skipped: no usable GPU' 0 0
stand_in "$box/programs/tests" 'printf "TEST CASE:  convert: one\nERROR: CHECK( 1 == 2 ) is NOT correct\n"; exit 1'
BUDGET=60 PATH=$box/bin:$PATH BIN=$box/programs DRY='' call first && fail "first passes though no test does"
has 'FAILED \(1\) the GPU works$'
has 'FAILED \(1\) tests: '
has 'MISSING: .*/bench attention by shape'
grep -q 'CANNOT run' "$box/out/summary.txt" && fail "a wrong number ends the call"

# A test that fails is run again alone; one that hangs is named; a signal ends all of it.
stand_in "$box/programs/tests" 'printf "TEST CASE:  attention: one\nerror: cudaErrorX, bad\n"; exit 1'
BIN=$box/programs RETEST='attention*' SKIP='gradients|resuming|tiny|ops|archi|serve' call second && fail "a failing test passes"
has 'FAILED \(1\) tests: again: attention'
has 'FAILED \(1\)   alone, blocking: attention: one'
has '\| +1 error: cudaErrorX, bad'
grep -qx 'attention: one' "$box/out/failed_cases.txt" || fail "nobody names the case that failed"
nap=1$$ # seconds that nobody else sleeps
stand_in "$box/programs/tests" "case \"\$*\" in -ltc*) printf 'rope: a\\nrope: b\\n' ;; *) echo '0.1 s: rope: a' && exec sleep $nap ;; esac"
BUDGET=16 BIN=$box/programs RETEST='rope*' SKIP='serve' call second && fail "a test that hangs passes"
has 'NOT DONE after [0-9]+ s tests: again: rope'
grep -qx 'hung: rope: b' "$box/out/failed_cases.txt" || fail "nobody names the case that hangs"
BIN=$box/programs RETEST='rope*' SKIP='serve' OUT=$box/out DRY=1 "$box/gpu/quarter.sh" second >"$box/output" 2>&1 &
for ((i = 0; i < 100; ++i)); do pgrep -f "^sleep $nap\$" >/dev/null && break || sleep 0.1; done
kill -TERM $!
wait $! && fail "a signal is no failure"
pgrep -f "^sleep $nap\$" >/dev/null && fail "a signal leaves processes behind"
has 'ENDED by a signal'
seq 2000 >"$box/text"
awk 'BEGIN {for (i = 0; i < 65; ++i) print (i * 37) % 256}' >"$box/tokens"
"$build/train_llama" --data "text:$box/text" --steps 0 --vocab 256 --width 16 --layers 1 --heads 2 --ffn 24 --seq 32 \
  --out "$box/model" >"$box/output" 2>&1 || fail "no model"
for dtype in fp32 bf16; do
  "$build/gradients" --model "$box/model" --tokens "$box/tokens" --batch 2 --seq 32 --dtype $dtype --out "$box/$dtype" >"$box/output" 2>&1
done
"$PYTHON" dev/gpu/compare_files.py "$box/fp32" "$box/bf16" 0.2 >"$box/output" 2>&1 || fail "bf16 is too far from fp32"
"$PYTHON" dev/gpu/compare_files.py "$box/fp32" "$box/bf16" 1e-5 >"$box/output" 2>&1 && fail "bf16 passes for fp32"
"$PYTHON" dev/gpu/compare_files.py "$box/fp32" "$box/bf16" 0 --beside "$box/bf16" >"$box/output" 2>&1 ||
  fail "bf16 is more than twice as far from fp32 as itself"
"$PYTHON" dev/gpu/compare_files.py "$box/fp32" "$box/bf16" 0 --beside "$box/fp32" >"$box/output" 2>&1 &&
  fail "bf16 is twice as far from fp32 as fp32"

# What ends well without a GPU, or without having seen a kernel, has not passed. The sanitizers see every family.
stand_in "$box/programs/tests" 'echo "Tests of the GPU are skipped: no usable GPU"'
stand_in "$box/bin/compute-sanitizer" 'shift 4; exec "$@"'
for dry in '' 1; do
  PATH=$box/bin:$PATH BIN=$box/programs OUT=$box/out DRY=$dry TOOLS=memcheck dev/gpu/long/sanitize.sh >"$box/output" 2>&1
  code=$?
  [ "$code:$dry" = 1: ] || [ "$code:$dry" = 0:1 ] || fail "sanitize.sh ends with $code where the tests are skipped, DRY='$dry'"
done
SKIP='^([^l]|l[^l])' BIN=$build OUT=$box/out DRY=1 dev/gpu/long/gradients.sh >"$box/output" 2>&1 ||
  fail "gradients.sh fails on the CPU"
has 'passed +llama: gradients$'
BIN=$build OUT=$box/out DRY=1 PARTS=machine ROUNDS=1 dev/gpu/long/where.sh >"$box/output" 2>&1 || fail "where.sh fails on the CPU"

# Two ranks that share a GPU are two machines to NCCL; one rank's weights are asked of both. A trainer whose weights are
# others, or that does not end with 76 when a rank is lost, does not pass.
stand_in "$box/bin/trainer" 'weights=${SAME:-${WORLD_SIZE:-1}}
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/step_00000008" && echo $weights >"$2/step_00000008/model.safetensors" && echo "$RANK ${NCCL_HOSTID:-}"
[ -z "${CROSSPLY_FAULT:-}" ] || { echo "$CROSSPLY_FAULT"; [ "$RANK" = 1 ] && kill -9 $$; exit "$CODE"; }'
SAME=1 dev/gpu/long/two_ranks.sh "$box/bin/trainer" >"$box/output" 2>&1 || fail "two_ranks.sh does not pass with the same bits"
[ "$(grep -cE '^([01]) rank\1$' "$box/output")" = 2 ] || fail "two ranks have one name of a machine"
dev/gpu/long/two_ranks.sh "$box/bin/trainer" >"$box/output" 2>&1 && fail "two_ranks.sh passes with other bits"
CODE=76 dev/gpu/long/lost_rank.sh kill "$box/bin/trainer" >"$box/output" 2>&1 || fail "lost_rank.sh does not pass with 76"
grep -qx '1:3:kill' "$box/output" || fail "no rank is lost"
CODE=71 dev/gpu/long/lost_rank.sh kill "$box/bin/trainer" >"$box/output" 2>&1 && fail "lost_rank.sh passes with 71"

# make bench-gpu builds for CUDA though no flag says so, and measures though a test fails; its exit code tells.
for codes in "0 0" "3 0" "0 4"; do
  set -- $codes
  rm -f "$box/log"
  for program in "cmake 0" "tests $1" "bench $2"; do
    stand_in "$box/${program% *}" "echo ${program% *} \"\$@\" >>$box/log; exit ${program#* }"
  done
  PATH=$box:$PATH make -s bench-gpu BUILD="$box" ARGS=--no-torch >"$box/output" 2>&1
  code=$?
  [ $((code != 0)) = $(($1 + $2 != 0)) ] || fail "make bench-gpu ends with $code where tests and bench end with $codes"
  grep -q "^exit codes: tests $1, bench $2" "$box/output" || fail "make bench-gpu does not say $codes"
  grep -qE '^cmake .*-DCROSSPLY_CUDA=ON' "$box/log" || fail "make bench-gpu builds without CUDA"
  [ "$(grep -cE '^tests -tce?=real sizes: \*$' "$box/log")" = 2 ] || fail "make bench-gpu runs other tests"
  grep -qE '^bench gpu .*--no-torch' "$box/log" || fail "make bench-gpu measures nothing where tests end with $1"
done

# Where bench was built: a table is in the file as soon as its part is done, also when another part is killed.
if [ -x "$build/bench" ]; then
  # A torch.py of the current directory is somebody's file, and not PyTorch.
  mkdir -p "$box/trap" && echo 'open("ran", "w")' >"$box/trap/torch.py"
  (cd "$box/trap" && timeout -s KILL 20 "$build/bench" products --rounds 1 >"$box/output" 2>&1)
  grep -qE '^PyTorch |has no PyTorch' "$box/output" || fail "bench does not look for PyTorch"
  [ ! -e "$box/trap/ran" ] || fail "bench ran torch.py of the current directory"
  "$build/bench" gpu --device cpu --only attention,nothing >"$box/output" 2>&1
  [ $? = 64 ] || fail "bench gpu takes any --only"
  grep -q 'is none of machine, products, attention, steps, architectures, ops, plain, torch$' "$box/output" || fail "no names of parts"
  "$build/bench" gpu --device cpu --no-torch --only steps,machine --rounds 1 --json "$box/gpu.json" >"$box/output" 2>&1 &
  for ((i = 0; i < 600; ++i)); do
    grep -q '^--- steps$' "$box/output" && part=$(pgrep -P $! -f 'part steps') && break
    sleep 0.1
  done
  [ -z "${part:-}" ] || kill -SEGV "$part"
  wait $!
  [ $? = 71 ] || fail "bench gpu does not end with 71 where a part crashed"
  grep -q '^FAILED: steps: ended by signal 11$' "$box/output" || fail "bench gpu does not say that a part crashed"
  "$PYTHON" -c 'import json, sys; tables = json.load(open(sys.argv[1])); assert tables["machine"] and "failures of parts" in tables' \
    "$box/gpu.json" 2>>"$box/output" || fail "the tables are not in the file"
fi

echo "$failures failures"
[ $failures = 0 ]
