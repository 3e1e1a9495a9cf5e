#!/usr/bin/env bash
# The cases of tests/test_comm_mpi.cpp as processes of every MPI that this machine has, and what a program says that
# another mpirun has started, or none.
#   tests/mpi.sh BUILD       BUILD/mpis.txt: an mpirun a line, and the module linked with its library. Exit 77: skipped
# CROSSPLY_MPI_MODULE names the module to a program, instead of comm_mpi.so beside it.
set -uo pipefail
build=$(cd "$1" && pwd)
ranks=$(cd "$(dirname "$0")/.." && pwd)/dev/ranks.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
[ -s "$build/mpis.txt" ] || { echo "skipped: built without MPI"; exit 77; }

# What both MPIs need: as root, with more ranks than cores, in a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl_vader_single_copy_mechanism=none
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
export OMP_NUM_THREADS=1 MPI_TEST_DIR=$work ASAN_OPTIONS=detect_leaks=0

# expect NAME EXIT_CODE|any COUNT WORDS COMMAND...: how it ends, and how many of its lines have the words
expect() {
  local name=$1 want=$2 count=$3 words=$4 code=0 lines
  shift 4
  rm -f "$work"/*
  timeout -s KILL 120 "$@" >"$work/output" 2>&1 || code=$?
  lines=$(grep -c -- "$words" "$work/output")
  if [ "$want" != any ] && [ "$want" != $code ] || [ $code = 137 ] || [ "$lines" != "$count" ]; then
    failures=$((failures + 1))
    echo "FAILED: $name: exit code $code, $lines of $count times \"$words\": $*"
    tail -n 60 "$work/output"
  fi
}

mpiruns=() modules=() tests=$build/tests
while read -r mpirun module; do
  if [ -f "$module" ]; then
    mpiruns+=("$mpirun") modules+=("$module")
  else
    echo "skipped: $mpirun, for make tests_of_mpi has not built $module"
  fi
done <"$build/mpis.txt"

for i in "${!modules[@]}"; do
  mpirun=${mpiruns[i]}
  export CROSSPLY_MPI_MODULE=${modules[i]}
  [ "$CROSSPLY_MPI_MODULE" != "$build/comm_mpi.so" ] || unset CROSSPLY_MPI_MODULE  # the program finds it
  for n in 2 4; do
    expect "$n ranks" 0 $n "Status: SUCCESS" "$mpirun" -n $n "$tests" -nc=1 -tc='mpi: *'
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
