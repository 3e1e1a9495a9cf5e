# What scripts that try programs share; source it before going to a directory of one's own.
# shellcheck shell=bash
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
