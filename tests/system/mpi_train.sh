#!/usr/bin/env bash
# Training by several ranks gives the numbers of one, to the bit: every architecture in fp32 and bf16, as 1 x 8, 2 x 4 and
# 4 x 2 micro-steps; and a run that some ranks save and others resume. As real programs.
#   tests/system/mpi_train.sh BUILD [STEPS [all]]     all: 2 and 4 ranks under every MPI of this machine; else by turns
#                                              Exit 77: skipped, without MPI
set -uo pipefail
build=$(cd "$1" && pwd)
steps=${2:-3} turns=${3:-by turns}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$root/tests/system/mpi_jobs.sh"
wait_for_all=""
mapfile -t trainers < <(cd "$root/train" && grep -l 'return train_program(' train_*.cpp | sed 's/\.cpp$//')

# train I W TRAINER DIR FLAG...: a job that mpirun takes for lost though all ranks have ended well is run again, from
# the same directory, up to three times in all.
train() {
  local rank lost
  rm -rf "$work/before"
  [ ! -e "$4" ] || cp -a "$4" "$work/before"
  for _ in 1 2 3; do
    rm -rf "$4"
    [ ! -e "$work/before" ] || cp -a "$work/before" "$4"
    lost=""
    run_job "$1" "$2" "$3" --out "$4" "${@:5}"
    for ((rank = 0; rank < $2; ++rank)); do [ "$(code_of $rank)" = 0 ] || lost=$rank; done
    if [ $code = 0 ] || [ -n "$lost" ] || ! lost_an_end; then break; fi
  done
  [ $code = 0 ] || failed "$3, $2 ranks by ${mpiruns[$1]}: exit code $code: ${*:5}"
  jobs=$((jobs + 1))
}
jobs=0 turn=0
for trainer in "${trainers[@]}"; do
  for dtype in fp32 bf16; do
    flags=("${run_of_ranks[@]}" --dtype $dtype --steps "$steps" --save-every "$steps" --eval-every "$steps")
    [ "$trainer" != train_combined ] || flags+=(--arch mhc+lime)
    # Every third with Muon, every third with NorMuon.
    case $((turn % 3)) in 1) flags+=(--optimizer muon) ;; 2) flags+=(--optimizer normuon) ;; esac
    "$tests" run "$trainer" "${flags[@]}" --out "$work/one" >"$work/output" 2>&1 || failed "$trainer, one rank"
    : $((++turn))
    for i in "${!mpiruns[@]}"; do
      for ranks in 2 4; do
        [ "$turns" = all ] || [ $(((ranks / 2 + turn) % ${#mpiruns[@]})) = "$i" ] || continue
        train "$i" $ranks "$trainer" "$work/many" "${flags[@]}"
        same_numbers "$work/one" "$work/many" "$steps" ||
          failed "$trainer, $dtype, $ranks ranks by ${mpiruns[i]}: not the numbers of one rank"
        rm -rf "$work/many"
      done
    done
    rm -rf "$work/one"
  done
done

# 1 -> 2 -> 4 -> 1 ranks, two steps each.
for dtype in fp32 bf16; do
  optimizer=adamw
  [ $dtype = fp32 ] || optimizer=normuon
  flags=("${run_of_ranks[@]}" --dtype $dtype --optimizer $optimizer --schedule constant --eval-every 2)
  "$tests" run train_lime "${flags[@]}" --steps 8 --out "$work/one" >"$work/output" 2>&1 || failed "one rank"
  for i in "${!mpiruns[@]}"; do
    last=0
    for ranks in 1 2 4 1; do
      last=$((last + 2))
      train "$i" $ranks train_lime "$work/many" "${flags[@]}" --steps $last --resume
      [ $last = 2 ] || grep -q "resumed by $ranks rank" "$work/output" || failed "nobody says that $ranks ranks resume"
    done
    same_numbers "$work/one" "$work/many" 8 || failed "$dtype, 1, 2, 4 and 1 ranks by ${mpiruns[i]}: other numbers"
    cmp -s "$work"/{one,many}/step_00000008/optimizer.safetensors || failed "$dtype, 1, 2, 4 and 1 ranks: other moments"
    rm -rf "$work/many"
  done
  rm -rf "$work/one"
done
echo "mpi_train: ${#modules[@]} MPIs, $jobs jobs, $failures failures"
[ $failures = 0 ]
