#!/usr/bin/env bash
# What is run on a machine with a GPU, as far as it can be tried without one: dev/gpu/ and make bench-gpu.
#   tests/test_gpu_scripts.sh BUILD_DIR
set -uo pipefail
[ "$(uname)" = Linux ] || { echo "skipped: the machines with GPUs run Linux"; exit 77; }
command -v "${PYTHON:-python3}" >/dev/null || { echo "skipped: ${PYTHON:-python3} is not here"; exit 77; }
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
export OMP_NUM_THREADS=2 BIN=$build DEVICE=cpu SMALL=1 RESULTS=$box/results PYTHON=${PYTHON:-python3}
failures=0
fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' "$box/output" 2>/dev/null | tail -8
}
for script in dev/gpu/*.sh; do bash -n "$script" || fail "$script is no script"; done

# Every name that a script gives to the tests is one that they have.
{ grep -ohE "'-tce?=[^\$'][^']*'" dev/gpu/*.sh; sed -n '/for family in/,/; do/p' dev/gpu/*.sh | grep -oE "'[^']*'"; } |
  sed -E "s/'//g; s/^-tce?=//" | tr , '\n' | sort -u >"$box/names"
[ "$(wc -l <"$box/names")" -ge 25 ] || fail "only $(wc -l <"$box/names") names of tests were found in dev/gpu"
while IFS= read -r name; do
  "$build/tests" -c "-tc=$name" >"$box/output"
  grep -qE 'filters: [1-9]' "$box/output" || fail "no test is called '$name'"
done <"$box/names"

# Gradients of a tiny model, from end to end; then what must not pass: too small a limit, a program that is not there,
# and no time.
dev/gpu/2_correct.sh >"$box/output" 2>&1 || fail "2_correct.sh fails on the CPU"
grep -qE '^21 tensors, the largest relative error is [1-9.]+e-0[67], ' "$RESULTS/2_correct.log" || fail "no gradients were compared"
[ "$(grep -cE '^ +[0-9]+ s  (tiny|resuming).* passed$' "$RESULTS/2_correct.log")" = 6 ] || fail "the summary has other steps"
BIN=$box dev/gpu/2_correct.sh >"$box/output" 2>&1 && fail "2_correct.sh passes without programs"
grep -q 'tiny: a model .*MISSING: ' "$box/output" || fail "nobody says what is missing"
BUDGET=0 dev/gpu/2_correct.sh >"$box/output" 2>&1 && fail "2_correct.sh passes without time"
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
mkdir "$box/bin"
stand_in() { printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod +x "$1"; }
stand_in "$box/bin/tests" 'echo "Tests of the GPU are skipped: no usable GPU"'
stand_in "$box/bin/compute-sanitizer" 'shift 4; exec "$@"'
for device in cuda cpu; do
  PATH=$box/bin:$PATH BIN=$box/bin DEVICE=$device TOOLS=memcheck dev/gpu/3_sanitize.sh >"$box/output" 2>&1
  code=$?
  [ "$code:$device" = 1:cuda ] || [ "$code:$device" = 0:cpu ] || fail "3_sanitize.sh ends with $code where the tests are skipped on $device"
done

# Two ranks that share a GPU are two machines to NCCL; one rank's weights are asked of both. A trainer whose weights are
# others, or that does not end with 76 when a rank is lost, does not pass.
stand_in "$box/bin/trainer" 'weights=${SAME:-${WORLD_SIZE:-1}}
while [ "$1" != --out ]; do shift; done
mkdir -p "$2/step_00000008" && echo $weights >"$2/step_00000008/model.safetensors" && echo "$RANK ${NCCL_HOSTID:-}"
[ -z "${CROSSPLY_FAULT:-}" ] || { echo "$CROSSPLY_FAULT"; [ "$RANK" = 1 ] && kill -9 $$; exit "$CODE"; }'
SAME=1 dev/gpu/two_ranks.sh "$box/bin/trainer" >"$box/output" 2>&1 || fail "two_ranks.sh does not pass with the same bits"
[ "$(grep -cE '^([01]) rank\1$' "$box/output")" = 2 ] || fail "two ranks have one name of a machine"
dev/gpu/two_ranks.sh "$box/bin/trainer" >"$box/output" 2>&1 && fail "two_ranks.sh passes with other bits"
CODE=76 dev/gpu/lost_rank.sh kill "$box/bin/trainer" >"$box/output" 2>&1 || fail "lost_rank.sh does not pass with 76"
grep -qx '1:3:kill' "$box/output" || fail "no rank is lost"
CODE=71 dev/gpu/lost_rank.sh kill "$box/bin/trainer" >"$box/output" 2>&1 && fail "lost_rank.sh passes with 71"

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
  grep -q 'is none of machine, products, attention, steps, architectures, ops, torch$' "$box/output" || fail "no names of parts"
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
