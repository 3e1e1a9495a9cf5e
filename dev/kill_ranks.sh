#!/usr/bin/env bash
# Kills random ranks (SIGKILL) at random moments of runs of 2 and 4 ranks that save after every step or every third one,
# under each MPI in turn. After each kill the survivors must have ended within 10 s, with 76, unless mpirun was quicker,
# which is asked in half of the jobs to wait for them; nothing of the job may be left, and the newest checkpoint must be whole: a copy of the run is continued to its end by a random
# number of ranks, and must have the bits of the run that nobody disturbed. The run itself goes on to the next kill.
#   dev/kill_ranks.sh N [SEED] [BUILD]      a line for each kill; SIGTERM ends it, with a summary; needs make tests_of_mpi
set -uo pipefail
kills=${1:?dev/kill_ranks.sh N [SEED] [BUILD]} seed=${2:-1}
root=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "${3:-$root/build}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$root/tests/system/mpi_jobs.sh"
RANDOM=$seed
steps=600 done_kills=0 saving=0 slowest=0 with_76=0 after_end=0 other_ends=0 damaged=0 stopped=0
trap 'stopped=1' INT TERM

flags=("${run_of_ranks[@]}" --steps $steps --eval-every 300)
summary() {
  echo "$done_kills kills ($saving while a checkpoint was written), slowest end of a survivor $slowest ms," \
    "$with_76 survivors ended with 76, $other_ends by mpirun, $after_end with 0 after their last step, $damaged damaged checkpoints, $failures failures"
}
run_job 0 1 train_lime "${flags[@]}" --save-every $steps --out "$work/whole"
[ $code = 0 ] || { cat "$work/output"; exit 1; }
pick() { local all=("$@"); picked=${all[RANDOM % $#]}; }
all_started() { for ((r = 0; r < ranks; ++r)); do [ -s "$job_dir/pid_$r" ] || return 1; done; }

round=0
while [ $done_kills -lt "$kills" ] && [ $stopped = 0 ]; do
  i=$((round++ % ${#mpiruns[@]})) run=$work/run
  pick 2 4; ranks=$picked
  pick 1 1 3; every=$picked
  pick yes ""; wait_for_all=$picked how=${picked:+, which waits}
  start $i "$ranks" train_lime "${flags[@]}" --save-every "$every" --out "$run" \
    $([ ! -e "$run/flags.json" ] || echo --resume)
  wait_for 30 all_started || { failed "the ranks did not start"; break; }
  # Before they have met, nobody but mpirun notices a rank that is gone.
  [ -z "$wait_for_all" ] || wait_for 30 grep -q " parameters, " "$work/output" || { failed "they did not meet"; break; }
  victim=$((RANDOM % ranks))
  sleep "$((RANDOM % 3)).$(printf '%03d' $((RANDOM % 1000)))"
  if ! kill -0 "$job" 2>/dev/null || ! kill -KILL "$(process_of $victim)" 2>/dev/null; then
    finish
    [ $code = 0 ] || failed "round $round: not killed, and exit code $code"
    same_numbers "$run" "$work/whole" $steps || failed "round $round: the run came to its end with other numbers"
    echo "round $round: the run came to its end before the kill"
    rm -rf "$run"
    continue
  fi
  killed=$(date +%s%N)
  : $((++done_kills))
  # A checkpoint that is being written has this name.
  during=$(compgen -G "$run/.tmp-step_*" >/dev/null && echo "(saving)")
  [ -z "$during" ] || : $((++saving))
  finish
  ended=$(date +%s%N)
  codes="" last=0
  for ((r = 0; r < ranks; ++r)); do
    [ "$r" != $victim ] || continue
    codes+=" $(code_of $r)"
    [ "$(code_of $r)" != 0 ] || ! compgen -G "$run/step_*$steps" >/dev/null || { after_end=$((after_end + 1)); continue; }
    case $(code_of $r) in
      76 | 143) took=$((($(cut -d' ' -f2 "$job_dir/code_$r") - killed) / 1000000)) ;;
      *) took=$(((ended - killed) / 1000000)) ;;
    esac
    if [ "$(code_of $r)" = 76 ]; then with_76=$((with_76 + 1)); else other_ends=$((other_ends + 1)); fi
    [ $took -le $last ] || last=$took
    # 143: not yet one of several ranks, it does not know the signal of mpirun.
    [[ $(code_of $r) = 76 || -z $wait_for_all && $(code_of $r) =~ ^(none|143)$ ]] || failed "kill $done_kills: rank $r ended with $(code_of $r)"
  done
  [ $last -le $slowest ] || slowest=$last
  [ $last -lt 10000 ] || failed "kill $done_kills: the last survivor ended after $last ms"
  ! left=$(left_behind) || failed "kill $done_kills: processes are left: $left"
  cp "$work/output" "$work/killed_output"

  rm -rf "$work/copy"
  pick 1 2 4
  if [ -e "$run/flags.json" ]; then
    cp -a "$run" "$work/copy"
    newest=$(cd "$run" && compgen -G 'step_????????' | sort | tail -n 1)
    run_job $i $picked train_lime --resume --save-every 1000 --out "$work/copy"
    [ $code = 0 ] || failed "kill $done_kills: the copy ended with $code, continued by $picked"
    same_numbers "$work/copy" "$work/whole" $steps || failed "kill $done_kills: other numbers, continued by $picked"
    ! grep -qiE "skip|damaged|not valid" "$work/output" || { damaged=$((damaged + 1)); failed "kill $done_kills: damaged"; }
  else
    newest="before its first file" picked=none
  fi
  echo "kill $done_kills: $(basename "${mpiruns[i]}")$how, $ranks ranks, rank $victim, newest ${newest:-none} ${during:-}:" \
    "survivors$codes after $last ms, mpirun after $(((ended - killed) / 1000000)) ms; continued by $picked"
done
summary
[ $failures = 0 ]
