#!/usr/bin/env bash
# Of two ranks that share the GPU the second is killed, or hangs, in its third step: the job must end with exit code 76,
# and no process stay, though the first one's GPU waits for what will not come.
#   dev/gpu/long/lost_rank.sh kill|hang TRAINER FLAGS...
set -uo pipefail
fault=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
start=$SECONDS
CROSSPLY_FAULT=1:3:$fault "$(dirname "$0")/share.sh" "$@" --accumulate 2 --steps 1000000 --out "$work/run"
code=$?
echo "exit code $code after $((SECONDS - start)) s"
[ $code = 76 ]
