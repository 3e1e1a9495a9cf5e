#!/usr/bin/env bash
# What a system allows only in part: open files, threads, memory; and long reading, which says how far it is.
#   tests/system/test_limits.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
start_in_scratch "$1"
chmod 755 .
flags="--vocab 300 --seq 16 --width 8 --ffn 8 --layers 1 --heads 1 --steps 2 --batch 2 --eval-samples 2"
train() { "$build/train_llama" $flags "$@"; }

# More shards than a process may ever have open.
head -c 400 /dev/zero >one.data
mkdir many
for i in $(seq 200); do ln -s ../one.data "many/$i.data"; done
few() { (ulimit -n 64 && "$@"); }
expect 0 'step 2/2' few train --data 'uint16:many/*.data' --out few
expect 0 'scored' few "$build/evaluate" --model few --data 'uint16:many/*.data' --split all

# Half a gigabyte and more of zeros takes a while: a terminal shows how far it is, a log of a few seconds does not.
if command -v script >/dev/null; then
  truncate -s 3G zeros.data
  TERM=xterm script -qec "'$build/train_llama' $flags --data uint16:zeros.data --out zeros" /dev/null >output 2>&1 </dev/null
  grep -q 'checking data: MB [0-9,]* of 3,072' output || fail "no progress of the reading on a terminal"
  expect 0 'step 2/2' train --data uint16:zeros.data --out zeros_log
  grep -q 'checking data' output && fail "progress of a short reading in a log"
  rm zeros.data
fi

# Fewer threads than asked for: the run goes on with those that start, and says so.
run_limited() {  # run_limited PROCESSES COMMAND...: as a user without privileges
  local most=$1
  shift
  if [ "$(id -u)" = 0 ]; then
    setpriv --reuid=48321 --regid=48321 --clear-groups bash -c 'ulimit -u "$0" && exec "$@"' "$most" "$@"
  else
    (ulimit -u $(($(ps -L -u "$(id -u)" | wc -l) + most - 1)) && exec "$@")
  fi
}
mkdir open && chmod 777 open
if run_limited 30 env OMP_NUM_THREADS=1 true 2>/dev/null && [ -x "$build/train_llama" ] &&
  run_limited 30 test -x "$build/train_llama"; then
  expect 0 'note: running with [1-6] threads? instead of 12: the system starts no more' \
    run_limited 8 env OMP_NUM_THREADS=12 "$build/train_llama" $flags --data uint16:one.data --out open/threads
  grep -q 'step 2/2' output || fail "a run with few threads"
  expect 0 'note: running with 1 thread instead of 4' \
    run_limited 1 env OMP_NUM_THREADS=4 "$build/train_llama" $flags --data uint16:one.data --out open/alone
else
  echo "no user without privileges here: threads are not tried"
fi

# Not enough memory: the flags that the program has, and no others.
small() { (ulimit -v 2000000 && OMP_NUM_THREADS=1 "$@"); }
head -c 40000 /dev/zero >more.data
truncate -s 13M zeros2
if small "$build/gradients" --help >/dev/null 2>&1; then  # not where sanitizers take their own memory
  expect 71 'use a smaller --batch with --accumulate, a shorter --seq, or a smaller model$' \
    small train --width 512 --ffn 512 --seq 1024 --batch 4096 --data uint16:more.data --out memory
  expect 71 'use a smaller --batch, --seq or model$' small "$build/gradients" --model few --tokens uint16:zeros2 \
    --batch 400000 --seq 16 --out grads.safetensors
fi
conclude limits "as documented"
