# What scripts that try programs share; source it before going to a directory of one's own.
# shellcheck shell=bash
failures=0
# The smallest model and the shortest evaluation that train at all.
# shellcheck disable=SC2034  # used by who sources this
sizes=(--width 8 --ffn 8 --layers 1 --heads 1 --batch 2 --seq 32 --eval-samples 2)

# start_in_scratch BUILD_DIR [THREADS]: goes to $work, a directory of the script's own that is gone at its end. Whatever
# needs a relative $0 comes before it. $build: where the programs are.
start_in_scratch() {
  build=$(cd "$1" && pwd)
  work=$(mktemp -d)
  trap '[ $BASHPID = $$ ] && rm -rf "$work"' EXIT  # not in a child that a signal ends before it is a program
  cd "$work" || exit 1
  [ $# = 1 ] || export OMP_NUM_THREADS=$2
}
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
# interrupted FILE COMMAND...: the exit code of a program that gets SIGINT as soon as it has written something to FILE.
interrupted() {
  local file=$1 pid
  shift
  env --default-signal=INT "$@" >output 2>&1 &  # which a shell lets its background programs ignore
  pid=$!
  while [ ! -s "$file" ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
  kill -INT $pid
  wait $pid
}
# conclude NAME [WORDS]: the last line of a script, and its exit code. WORDS: where nothing failed.
conclude() {
  [ $failures = 0 ] || { echo "$1: $failures failures"; exit 1; }
  echo "$1: ${2:-all as documented}"
}
