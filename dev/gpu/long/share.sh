#!/usr/bin/env bash
# Runs a command as two ranks that share a GPU, which NCCL refuses on one machine: until 2.29 it is told that there are
# two, with nothing but a network between them; from 2.30 that it is allowed.
#   dev/gpu/long/share.sh COMMAND...
set -euo pipefail
export CROSSPLY_SHARE_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=2
ranks=$(dirname "$0")/../../ranks.sh
[ -e "$ranks" ] || ranks=$BIN/../dev/ranks.sh # in .gpu
exec "$ranks" 2 bash -c 'NCCL_HOSTID=rank$RANK exec "$@"' bash "$@"
