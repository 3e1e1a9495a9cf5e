#!/usr/bin/env bash
# Runs N processes of a command on this machine, as the ranks of one job: where each has a GPU, and there is no torchrun.
#   dev/ranks.sh N COMMAND...     dev/ranks.sh 8 build/train_lime --device cuda ...     (processes on CPUs need mpirun)
# SIGTERM, SIGINT and SIGHUP ask all ranks to stop, as SIGUSR1 does. It ends when the last rank does, with the
# lowest rank's error that is its own (64 to 75, 77), else 76 (it lost another), else any other, else 0.
set -u
count=${1:?dev/ranks.sh N COMMAND...}
shift
ranks=()
trap 'kill -USR1 "${ranks[@]}" 2>/dev/null' TERM INT HUP USR1
trap 'kill -KILL "${ranks[@]}" 2>/dev/null' EXIT
for ((rank = 0; rank < count; ++rank)); do
  RANK=$rank WORLD_SIZE=$count LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$count "$@" &
  ranks+=($!)
done

codes=() failed_at=""
while [ ${#ranks[@]} != 0 ]; do
  for rank in "${!ranks[@]}"; do
    if kill -0 "${ranks[rank]}" 2>/dev/null; then continue; fi
    wait "${ranks[rank]}"
    codes[rank]=$?
    unset "ranks[rank]"
    if [ "${codes[rank]}" != 0 ] && [ -z "$failed_at" ]; then failed_at=$SECONDS; fi
  done
  # Ranks that have met end by themselves; one that waits for others to come would wait for minutes.
  if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -gt ${RANKS_PATIENCE:-60} ]; then
    kill -KILL "${ranks[@]}" 2>/dev/null
  fi
  sleep 0.1
done
trap - EXIT
lost=0 other=0
for code in "${codes[@]}"; do  # by rank, whoever ended first
  case $code in
    0) ;;
    6[4-9] | 7[0-5] | 77) exit "$code" ;;
    76) lost=76 ;;
    *) other=$code ;;
  esac
done
if [ $lost != 0 ]; then exit $lost; else exit "$other"; fi
