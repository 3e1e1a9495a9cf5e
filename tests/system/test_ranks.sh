#!/usr/bin/env bash
# dev/ranks.sh: what its ranks see, which exit code becomes its own, that it passes signals on, and leaves no process;
# and trainers as its ranks, whose GPU is the emulator.
#   tests/system/test_ranks.sh BUILD
set -uo pipefail
tests=$(cd "$1" && pwd)/tests
cd "$(dirname "$0")/../.."
box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
failures=0
failed() { failures=$((failures + 1)); echo "FAILED: $*"; }

# codes WANT CODE...: the exit code of ranks that end with these
codes() {
  local want=$1 got=0
  shift
  dev/ranks.sh $# bash -c 'codes=("$@"); exit "${codes[RANK]}"' rank "$@" || got=$?
  [ $got = "$want" ] || failed "ranks that end with $*: exit code $got instead of $want"
}
codes 0 0 0 0
codes 75 75 75
codes 65 76 65 76
codes 71 76 71 65
got=0
dev/ranks.sh 2 bash -c 'sleep 0.$((5 - 5 * RANK)); exit $((71 - 6 * RANK))' || got=$?
[ $got = 71 ] || failed "rank 0 with 71 after rank 1 with 65: exit code $got instead of 71"
codes 77 0 76 77
codes 76 137 76 76
codes 76 76 1
codes 1 0 1
codes 74 74

seen=$(dev/ranks.sh 3 bash -c 'echo "$RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE: $*"' rank 'a b' | sort | paste -sd';')
want='0 of 3, here 0 of 3: a b;1 of 3, here 1 of 3: a b;2 of 3, here 2 of 3: a b'
[ "$seen" = "$want" ] || failed "the ranks saw: $seen"

# Each rank saves for a while when it is told to stop; nobody waits long for one that is not.
cat >"$box/rank" <<'END'
trap 'sleep 0.3; touch "$1/saved_$RANK"; exit 75' USR1
touch "$1/ready_$RANK"
for i in {1..300}; do sleep 0.1; done
END
for signal in TERM HUP USR1; do  # a script's background process does not hear SIGINT
  rm -f "$box"/{saved,ready}_*
  dev/ranks.sh 2 bash "$box/rank" "$box" &
  job=$!
  until [ -e "$box/ready_0" ] && [ -e "$box/ready_1" ]; do sleep 0.02; done
  kill -$signal $job
  code=0
  wait $job || code=$?
  [ $code = 75 ] && [ -e "$box/saved_0" ] && [ -e "$box/saved_1" ] || failed "SIG$signal: exit code $code, $(ls "$box")"
done
! pgrep -f "$box/rank" >/dev/null || failed "a rank is left behind"

# One rank's checkpoint, continued by one, two and four: the same numbers in the metrics, and the same weights.
export OMP_NUM_THREADS=1
train() {
  local name=$1
  shift
  local ranks=("$@")
  "${ranks[@]}" "$tests" run train_lime --device emulator --data arith:3 --train-samples 40 --test-samples 8 --width 16 \
    --ffn 24 --layers 2 --heads 2 --batch 1 --accumulate 4 --sum tree --eval-every 2 --save-every 2 --eval-samples 4 \
    --answer-samples 2 --check-replicas 1 "${flags[@]}" --out "$box/$name" >"$box/output" 2>&1
}
# expect CODE NAME RANKS...: how it ends
expect() {
  local want=$1 code=0
  shift
  train "$@" || code=$?
  [ $code = "$want" ] || { failed "$*: exit code $code instead of $want"; tail -5 "$box/output"; }
  pgrep -f "$tests run .*$box" >/dev/null && failed "$*: a trainer is left behind"
  grep 'stand-in for NCCL' "$box/output" && failed "$*: misuse of NCCL"
}
numbers() { grep -oE '"(step|loss|grad_norm|test_loss|answers_correct)":[^,}]*' "$box/$1/metrics.jsonl"; }
if grep -qs '^CROSSPLY_CUDA:BOOL=ON' "$1/CMakeCache.txt"; then
  echo "no trainers: the tests of this build have no emulator"
else
  flags=(--steps 2)
  expect 0 one env
  for name in 2 4 profiled; do cp -r "$box/one" "$box/$name"; done
  flags=(--steps 6 --resume)
  expect 0 one env
  CROSSPLY_TRANSFERS=3 expect 0 2 dev/ranks.sh 2
  CROSSPLY_TRANSFERS=eager expect 0 4 dev/ranks.sh 4
  flags+=(--profile)  # and nothing is recorded
  expect 0 profiled dev/ranks.sh 2
  for name in 2 4 profiled; do
    cmp "$box"/{one,$name}/step_00000006/model.safetensors || failed "$name: other weights than one rank's"
    diff <(numbers one) <(numbers $name) || failed "$name: other metrics than one rank's"
  done
  flags=(--steps 1000000)
  CROSSPLY_FAULT=1:4:kill expect 76 killed dev/ranks.sh 2
  CROSSPLY_FAULT=1:4:exit=71 expect 71 error dev/ranks.sh 2
  CROSSPLY_FAULT=1:4:nan expect 77 nan dev/ranks.sh 2
fi
echo "ranks: $failures failures"
[ $failures = 0 ]
