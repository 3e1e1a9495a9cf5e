# Jobs of several ranks under each MPI of this machine, for scripts that source this with $build and $work, a directory
# for their own: mpiruns[i] starts $tests, with the module of its library in modules[i]. Skips where there is none.
[ -s "$build/mpis.txt" ] || { echo "skipped: built without MPI"; exit 77; }

# What both MPIs need: as root, with more ranks than cores, in a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl_vader_single_copy_mechanism=none
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0

failures=0
failed() {
  failures=$((failures + 1))
  echo "FAILED: $*"
  [ ! -s "$work/output" ] || tail -n 20 "$work/output" | sed 's/^/  | /'
}

# Whether Open MPI's mpirun took ranks for lost that had ended well. It does where it gets no CPU for some two seconds
# while they end: then it sees that a process has ended before it sees that it was about to. Stopping mpirun for 2.6 s
# at that moment gives the same at will.
lost_an_end() { grep -q 'exiting improperly' "$work/output"; }

tests=$build/tests
mpiruns=() modules=() patient=()  # patient: an mpirun that does not end the others when one rank has failed
while read -r mpirun module; do
  if [ -f "$module" ] && [ -x "$tests" ]; then
    mpiruns+=("$mpirun") modules+=("$module")
    if [[ $("$mpirun" --version 2>&1) = *HYDRA* ]]; then patient+=(-disable-auto-cleanup); else patient+=(--enable-recovery); fi
  else
    echo "skipped: $mpirun, for make tests_of_mpi has not built $module"
  fi
done <"$build/mpis.txt"
[ ${#modules[@]} -gt 0 ] || exit 77

# One rank: leaves its process's number and its exit code, which mpirun hides, in $JOB_DIR. on_rank_1 is for rank 1
# alone; it sees the command as "$@". A rank that was killed counts as killed, unless mpirun shall be patient.
# What is sent to the whole group, as mpirun does, is for the program.
cat >"$work/one_rank" <<'SCRIPT'
#!/usr/bin/env bash
rank=${OMPI_COMM_WORLD_RANK-${PMI_RANK}}
[ "$rank" != 1 ] || eval "${on_rank_1-}"
trap : TERM USR1 INT HUP
trap '' XFSZ
bash -c 'echo $$ >"$1.new" && mv "$1.new" "$1"; shift; exec "$@"' rank "$JOB_DIR/pid_$rank" "$@"
code=$?
trap '' TERM USR1 INT HUP
echo "$code $(date +%s%N)" >"$JOB_DIR/code_$rank.new" && mv "$JOB_DIR/code_$rank.new" "$JOB_DIR/code_$rank"
[ $code != 137 ] || [ "$PATIENT" != "" ] || kill -KILL $$
exit $code
SCRIPT
chmod +x "$work/one_rank"

# The I-th MPI for what follows. That of the build is found beside the program, without being told.
use_mpi() {
  if [ "${modules[$1]}" = "$build/comm_mpi.so" ]; then unset CROSSPLY_MPI_MODULE; else export CROSSPLY_MPI_MODULE=${modules[$1]}; fi
}

job_dir=$work/job
# start I W COMMAND...: W ranks under the I-th MPI, in the background, as $job; the output goes to $work/output.
# Where mpirun shall be patient, $wait_for_all is not empty.
wait_for_all=yes
start() {
  rm -rf "$job_dir"
  mkdir "$job_dir"
  use_mpi "$1"
  JOB_DIR=$job_dir PATIENT=$wait_for_all timeout -s KILL 120 "${mpiruns[$1]}" ${wait_for_all:+${patient[$1]}} -n "$2" \
    "$work/one_rank" "$tests" run "${@:3}" >"$work/output" 2>&1 </dev/null &
  job=$!
}
# Waits for the job; its exit code, that of mpirun, is $code.
finish() {
  code=0
  wait "$job" || code=$?
}
run_job() { start "$@" && finish; }
code_of() { cut -d' ' -f1 "$job_dir/code_$1" 2>/dev/null || echo none; }  # of a rank; none: killed by mpirun
process_of() { cat "$job_dir/pid_$1"; }
# wait_for SECONDS COMMAND...: until it succeeds
wait_for() {
  local end=$((SECONDS + $1))
  until "${@:2}"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.02
  done
}
# Processes of the job that are still there, five seconds after its end; false if there are none.
left_behind() {
  local found
  for _ in {1..25}; do
    found=$(grep -lz "^JOB_DIR=$job_dir\$" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | tr '\n' ' ')
    [ -n "$found" ] || return 1
    sleep 0.2
  done
  echo "$found"
}

# A run of 8 micro-steps a step, whose bits do not depend on the number of ranks.
run_of_ranks=(--data arith:3 --train-samples 400 --test-samples 50 --width 32 --ffn 48 --layers 2 --heads 2 --batch 1
  --accumulate 8 --sum tree --eval-samples 16 --answer-samples 4)
# Metrics without times; and weights.
numbers_of() {
  sed -E 's/"(seconds|tokens_per_s|[a-z_]+_s)":[0-9.e+-]+//g; s/,+/,/g; s/\{,/{/; s/,\}/}/' "$1/metrics.jsonl"
  cat "$1"/step_*"$2"/model.safetensors
}
same_numbers() { cmp -s <(numbers_of "$1" "$3") <(numbers_of "$2" "$3"); }  # of two runs, and their last step
