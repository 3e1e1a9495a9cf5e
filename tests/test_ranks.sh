#!/usr/bin/env bash
# dev/ranks.sh: what its ranks see, which exit code becomes its own, that it passes signals on, and leaves no process.
set -uo pipefail
cd "$(dirname "$0")/.."
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
echo "ranks: $failures failures"
[ $failures = 0 ]
