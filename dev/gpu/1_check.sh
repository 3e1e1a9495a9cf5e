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
# What the kernels for sm_90 take for granted, one thing after the other, each in a process: a wrong wait hangs. If one
# fails the script ends, because attention's tests would do the same.
if [ "$DEVICE" = cuda ] && [ -z "${ARCHITECTURES:-}" ] &&
  [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)" = 9.0 ]; then
  sm_90=passed
  step "sm_90: is in this build" 20 \
    bash -c '! "$BIN/tests" "-tc=hopper: barriers*" 2>&1 | grep "Nothing of sm_90"' || sm_90=
  for part in 'hopper: barriers' 'hopper: a box' 'hopper: a single one' 'hopper: products' 'hopper: a pipeline' \
    'hopper: rates' 'attention: the warpgroup products'; do
    step "sm_90: $part" 60 "$BIN/tests" -d "-tc=$part*" || sm_90=
  done
  if [ -z "$sm_90" ]; then
    say "=== ARCHITECTURES=90 builds without these kernels: attention then uses those of sm_80"
    finish
  fi
fi
step "all tests but those at real sizes" 240 "$BIN/tests" -d '-tce=real sizes: *' && all=passed
step "tests at real sizes" 240 "$BIN/tests" -d '-tc=real sizes: *' && [ -n "${all:-}" ] && finish
# After one error a GPU does no more in that process. So: each family in its own, and blocking, so that an error is told
# of the kernel that made it.
for family in 'matmul*' 'rmsnorm*' 'attention*' 'cross_entropy*' 'route*' 'adamw*' 'models: a step from a GPU*'; do
  CUDA_LAUNCH_BLOCKING=1 step "tests of $family, blocking" 60 "$BIN/tests" -d "-tc=$family"
done
finish
