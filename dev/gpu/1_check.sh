#!/usr/bin/env bash
# The first thing on a new machine: what it has, and whether the tests pass. From a checkout with the build.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ "$DEVICE" != cuda ] || step "the GPU" 20 nvidia-smi
step "the CPU" 10 lscpu
step "PyTorch" 60 "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())'
build all tests bench
step "the GPU works" 60 "$BIN/bench" gpu --device "$DEVICE" --only machine || finish
if [ -n "$SMALL" ]; then
  step "tests: a few" 60 "$BIN/tests" -d '-tc=params*'
  finish
fi
# What the kernels for sm_90 take for granted, one thing after the other, each in its own process: a wrong wait hangs.
if [ "$DEVICE" = cuda ] && [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)" = 9.0 ]; then
  sm_90=passed
  step "sm_90: is in this build" 20 bash -c '! "$BIN/tests" "-tc=hopper: barriers*" 2>&1 | grep "Nothing of sm_90"' || sm_90=
  for part in 'barriers*' 'a box*' 'a single one*' 'products*' 'a pipeline*'; do
    step "sm_90: $part" 30 "$BIN/tests" -d "-tc=hopper: $part" || sm_90=
  done
  [ -z "$sm_90" ] || step "sm_90: attention" 60 "$BIN/tests" -d '-tc=attention: the warpgroup products of sm_90*' || sm_90=
  [ -n "$sm_90" ] || say "=== attention goes the way of sm_80 with ARCHITECTURES=90 for all that follows"
fi
step "all tests but those at real sizes" 240 "$BIN/tests" -d '-tce=real sizes: *' && all=passed
step "tests at real sizes" 240 "$BIN/tests" -d '-tc=real sizes: *' && [ -n "${all:-}" ] && finish
# After one error a GPU does no more in that process. So: each family in its own, and blocking, so that an error is told
# of the kernel that made it.
for family in 'matmul*' 'rmsnorm*' 'attention*' 'cross_entropy*' 'route*' 'adamw*' 'models: a step from a GPU*'; do
  CUDA_LAUNCH_BLOCKING=1 step "tests of $family, blocking" 60 "$BIN/tests" -d "-tc=$family"
done
finish
