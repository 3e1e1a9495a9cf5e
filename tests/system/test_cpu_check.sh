#!/usr/bin/env bash
# A program that is compiled for instructions that this CPU lacks says so and ends with 71. XOP is such an instruction
# set: AMD dropped it in 2017. Exit 77: skipped, not Linux on x86-64, or a CPU or a compiler for which this cannot be tried.
#   tests/system/test_cpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "skipped: not Linux on x86-64"; exit 77; }
! grep -qw xop /proc/cpuinfo || { echo "skipped: this CPU has XOP"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
read -ra compiler <<<"${CXX:-c++} -std=c++20 -O1 -I."
# Constructors of other files may use any instruction. The check comes before them, wherever it is linked.
cat >"$work/main.cpp" <<'END'
#include <cstdio>
static const int constructed = std::fputs("a constructor ran\n", stderr);
int main() { return constructed < 0 ? 1 : 3; }
END
"${compiler[@]}" -march=x86-64 -mgeneral-regs-only -c engine/cpu_check.cpp -o "$work/check.o" || exit 1
failures=0
# expect CODE OUTPUT FLAG...
expect() {
  local code=$1 words=$2 said got
  shift 2
  "${compiler[@]}" "$@" "$work/main.cpp" engine/cpu_built_for.cpp "$work/check.o" -o "$work/program" || exit 77
  said=$("$work/program" 2>&1)
  got=$?
  if [ $got != "$code" ] || [[ $said != *"$words"* ]] || { [ -n "$words" ] && [ "$(wc -l <<<"$said")" != 1 ]; }; then
    failures=$((failures + 1))
    echo "FAIL: exit code $got, want $code, with $*: $said"
  fi
}
expect 3 '' -march=x86-64
expect 71 'error: this program is compiled for a CPU with fma4, which this CPU lacks' -march=x86-64 -mxop
expect 3 '' -march=native
[ $failures = 0 ]
