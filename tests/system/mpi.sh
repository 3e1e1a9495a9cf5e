#!/usr/bin/env bash
# The cases of tests/ranks/test_comm_mpi.cpp as processes of every MPI that this machine has, and what a program says that
# another mpirun has started, or none.
#   tests/system/mpi.sh BUILD       BUILD/mpis.txt: an mpirun a line, and the module linked with its library. Exit 77: skipped
# CROSSPLY_MPI_MODULE names the module to a program, instead of comm_mpi.so beside it.
set -uo pipefail
build=$(cd "$1" && pwd)
ranks=$(cd "$(dirname "$0")/../.." && pwd)/dev/ranks.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$0")/mpi_jobs.sh"
export MPI_TEST_DIR=$work

# expect NAME EXIT_CODE|any COUNT WORDS COMMAND...: how it ends, and how many of its lines have the words
expect() {
  local name=$1 want=$2 count=$3 words=$4 code lines
  shift 4
  for _ in 1 2 3; do
    rm -f "$work"/*
    code=0
    timeout -s KILL 120 "$@" >"$work/output" 2>&1 || code=$?
    if [ "$want" != 0 ] || [ $code = 0 ] || ! lost_an_end; then break; fi
  done
  lines=$(grep -o -- "$words" "$work/output" | wc -l)  # two ranks may write one line, or into each other
  if [ "$want" != any ] && [ "$want" != $code ] || [ $code = 137 ] || [ "$((lines))" != "$count" ]; then
    failures=$((failures + 1))
    echo "FAILED: $name: exit code $code, $((lines)) of $count times \"$words\": $*"
    tail -n 60 "$work/output"
  fi
}

for i in "${!modules[@]}"; do
  mpirun=${mpiruns[i]}
  use_mpi "$i"
  for n in 2 4; do
    expect "$n ranks" 0 $n "SUCCESS!" "$mpirun" -n $n "$tests" -nc=1 -tc='mpi: *'
  done
  # The job ends without MPI_Finalize, which each mpirun reports in its own way.
  expect "differing calls" any 2 "told: .*\(do not make the same calls\|trunc\)" "$mpirun" -n 2 "$tests" \
    -nc=1 -tc='mpi alone: ranks that do not make the same calls'
  expect "an error" any 2 "told: the loss is nan" "$mpirun" -n 2 "$tests" \
    -nc=1 -tc='mpi alone: an error while others are waited for'
  alone="MPI says rank 0 of 1: processes on CPUs are started by the mpirun"
  expect "no mpirun" any 2 "$alone" "$ranks" 2 "$tests" -nc=1 -tc='mpi: gather'
  for other in "${mpiruns[@]}"; do
    [ "$other" = "$mpirun" ] || expect "another mpirun" any 2 "$alone" "$other" -n 2 "$tests" -nc=1 -tc='mpi: gather'
  done
done
echo "mpi: ${#modules[@]} MPIs, $failures failures"
[ $failures = 0 ]
