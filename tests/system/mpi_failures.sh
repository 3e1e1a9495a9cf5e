#!/usr/bin/env bash
# What becomes of a job when one of its ranks fails, as real programs under every MPI of this machine: each rank's exit
# code, what last_exit.json says, within which time, that no process stays, and that any number of ranks can continue
# the run, to the bits of one that nothing disturbed.
#   tests/system/mpi_failures.sh BUILD [slow]       slow: also what takes minutes        Exit 77: skipped, without MPI
set -uo pipefail
build=$(cd "$1" && pwd)
slow=${2-}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$root/tests/system/mpi_jobs.sh"
steps=24
flags=("${run_of_ranks[@]}" --optimizer normuon --steps $steps --save-every 3 --eval-every 12)
"$tests" run train_lime "${flags[@]}" --out "$work/one" >"$work/output" 2>&1 || failed "one rank"

now() { echo $(($(date +%s%N) / 1000000)); }
# begin NAME W FLAG...: a job in $work/run; FAULT and on_rank_1 are those of the environment
begin() {
  name="$1, by $(basename "${mpiruns[i]}")" began=$(now)
  start "$i" "$2" train_lime "${flags[@]}" --out "$work/run" "${@:3}"
}
# ends SECONDS CODES WORDS: within so many seconds of its beginning, or of $began; each rank's code; a line of its output
ends() {
  local codes="" rank
  finish
  took=$(($(now) - began))
  for rank in 0 1 2 3; do
    [ ! -e "$job_dir/pid_$rank" ] || codes+="${codes:+ }$(code_of $rank)"
  done
  [[ $codes =~ ^($2)$ ]] || failed "$name: exit codes $codes, not $2"
  grep -qE -- "$3" "$work/output" || failed "$name: no line matches '$3'"
  [ $took -lt $(($1 * 1000)) ] || failed "$name: took $took ms, more than $1 s"
  ! left=$(left_behind) || failed "$name: processes are left: $left"
  [ -z "${VERBOSE-}" ] || echo "$name: codes $codes after $took ms; $(cat "$work/run/last_exit.json" 2>/dev/null)"
}
# All ranks find it, and rank 0 says it.
one_line() { [ "$(grep -c "error:" "$work/output")" = 1 ] || failed "$name: not exactly one line says it"; }
# What rank 0 leaves for those whom mpirun tells nothing.
leaves() { grep -qE -- "$1" "$work/run/last_exit.json" || failed "$name: last_exit.json does not match '$1'"; }
# The run goes on, as so many ranks.
continues() {
  run_job "$i" "$1" train_lime --resume --save-every $steps --out "$work/run"
  [ $code = 0 ] || failed "$name: continued by $1: exit code $code"
  same_numbers "$work/one" "$work/run" $steps || failed "$name: continued by $1: other numbers"
  ! grep -qE "skipped|line [0-9]" "$work/output" || failed "$name: continued by $1: something was damaged"
  [ ! -e "$work/run/last_exit.json" ] || [ "$1" = 1 ] || failed "$name: last_exit.json is still there"
  rm -rf "$work/run"
}
saved() { compgen -G "$work/run/step_*" >/dev/null; }
all_saved() { saved && [ -e "$job_dir/pid_1" ]; }

for i in "${!mpiruns[@]}"; do
  # --- a rank is gone -------------------------------------------------------------------------------------------------
  export CROSSPLY_FAULT=1:8:kill
  begin "kill" 2
  ends 10 "76 137" "error: rank 1 is lost in step [78]"
  leaves '"code":76,"rank":1'
  CROSSPLY_FAULT="" continues 4
  export CROSSPLY_FAULT=0:8:kill
  begin "kill of rank 0" 4
  ends 10 "137 76 76 76" "rank 3: error: rank 0 is lost"
  leaves '"code":76,"rank":0'
  CROSSPLY_FAULT="" continues 2
  # As mpirun does it when nobody asks it to wait: whatever it makes of it, no process is left.
  wait_for_all="" CROSSPLY_FAULT=1:8:kill
  begin "kill, mpirun ends the others" 2
  ends 10 "(76|none) (137|none)" .
  [ $code != 0 ] || failed "$name: exit code 0"
  CROSSPLY_FAULT="" continues 1
  wait_for_all=yes

  # --- a rank stands still --------------------------------------------------------------------------------------------
  # The others do not wait for it. When it goes on, it finds that they are gone.
  export CROSSPLY_FAULT=1:8:stop
  begin "stop" 2 --peer-timeout 2
  wait_for 10 test -e "$job_dir/code_0" || failed "$name: rank 0 goes on"
  took=$(($(now) - began))
  [ $took -gt 2000 ] || failed "$name: after $took ms"
  kill -CONT "$(process_of 1)"
  ends 10 "76 76" "error: rank 1 is lost in step [78]: silent for 2 s"
  leaves '"code":76,"rank":1'
  CROSSPLY_FAULT="" continues 1
  # A short stop is none.
  export CROSSPLY_FAULT=0:4:slow=0.1
  begin "stop for a while" 2 --peer-timeout 2
  wait_for 10 all_saved || failed "$name: does not begin"
  kill -STOP "$(process_of 1)"
  sleep 0.7
  kill -CONT "$(process_of 1)"
  ends 20 "0 0" "step $steps"
  same_numbers "$work/one" "$work/run" $steps || failed "$name: other numbers"
  rm -rf "$work/run"

  # --- a rank fails ---------------------------------------------------------------------------------------------------
  export CROSSPLY_FAULT=1:8:exit=74
  begin "exit" 2
  ends 10 "76 74" "rank 0: error: rank 1 ended with code 74: CROSSPLY_FAULT"
  leaves '"code":74,"rank":1,"step":8'
  CROSSPLY_FAULT="" continues 1
  export CROSSPLY_FAULT=1:8:nan
  begin "nan" 4
  ends 10 "77 77 77 77" "^error: step 8: loss nan.*the first loss that is not finite is of rank 1's micro-step 1"
  one_line
  CROSSPLY_FAULT="" continues 2

  export CROSSPLY_FAULT=1:1:slow=0.01
  begin "slow" 2
  ends 10 "0 0" "rank 1 holds the others up: 0.0[0-9]+ s of its own for a step, others take 0.00"
  rm -rf "$work/run"

  # --- asked to stop --------------------------------------------------------------------------------------------------
  export CROSSPLY_FAULT=0:4:slow=0.1
  begin "USR1 to rank 1" 2
  wait_for 10 all_saved || failed "$name: does not begin"
  kill -USR1 "$(process_of 1)"
  ends 10 "75 75" "stopped on request after step"
  CROSSPLY_FAULT="" continues 4
  begin "TERM to both" 2
  wait_for 10 all_saved || failed "$name: does not begin"
  kill -TERM "$(process_of 0)" "$(process_of 1)"
  ends 10 "75 75" "stopped on request after step"
  CROSSPLY_FAULT="" continues 1

  # --- the disk of one rank is full -----------------------------------------------------------------------------------
  if command -v prlimit >/dev/null; then
    begin "full disk of rank 1" 2
    wait_for 10 all_saved || failed "$name: does not begin"
    prlimit --fsize=8192:8192 --pid "$(process_of 1)"
    ends 10 "76 74" "error: rank 1: cannot write .*: File too large"
    leaves '"code":74,"rank":1'
    CROSSPLY_FAULT="" continues 4
  else
    echo "skipped: a full disk, for there is no prlimit"
  fi
  export CROSSPLY_FAULT=""

  # --- ranks that do not belong together ------------------------------------------------------------------------------
  on_rank_1='set -- "$@" --seed 7' begin "another seed" 2
  ends 10 "64 64" "^error: rank 1: other seed than rank 0: .*7.*42"
  one_line
  rm -rf "$work/run"
  mkdir -p "$work"/data_{0,1}
  printf 'the quick brown fox jumps over the lazy dog. %.0s' {1..100} | tee "$work/data_0/text" >"$work/data_1/text"
  printf 'X' | dd of="$work/data_1/text" bs=1 seek=1000 conv=notrunc status=none
  if [ -e /proc/self/cwd ]; then  # one name, two files
    cd "$work/data_0" || exit 1
    usual=("${flags[@]}")
    flags=("${flags[@]/--answer-samples/--eval-samples}")  # a text has no answers
    on_rank_1="cd $work/data_1" begin "other data" 2 --data text:/proc/self/cwd/text --seq 16 --train-samples 0 --test-samples 0
    ends 10 "65 65" "^error: what rank 1 read as .*text has other contents than rank 0's"
    one_line
    flags=("${usual[@]}")
    cd "$root" || exit 1
    rm -rf "$work/run"
  fi
  begin "3 ranks for 8 micro-steps" 3
  ends 10 "64 64 64" "3 ranks cannot share the 8 micro-steps.*Possible are 2 or 4 ranks; --accumulate 6 or 9"
  [ ! -e "$work/run" ] || failed "$name: leaves a run directory"

  if [ "$slow" = slow ]; then  # limits of a minute and more
    on_rank_1="set -- \"\$@\" --out $work/other" begin "another directory" 2
    ends 120 "76 66" "is not the directory that rank 0 has under this name"
    rm -rf "$work"/{run,other}
    CROSSPLY_FAULT=1:8:hang begin "hang" 2
    ends 115 "76 76" "no progress for [0-9]+ s in step 8, stage step; furthest behind: rank 1"
    continues 4
  fi
done
echo "mpi_failures: ${#modules[@]} MPIs, $failures failures"
[ $failures = 0 ]
