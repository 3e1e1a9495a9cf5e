#!/usr/bin/env bash
# The first thing on a new machine: what it has, and whether the tests pass. About 6 minutes with the build.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [ "$DEVICE" = cuda ]; then
  step "the GPU" 20 nvidia-smi
  step "CUDA's compiler" 10 nvcc --version
fi
step "the CPU" 10 lscpu
step "PyTorch" 60 "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())'
build all tests bench
if [ -n "$SMALL" ]; then
  step "tests: a few" 60 "$BIN/tests" -d '-tc=params*'
  finish
fi
# Blocking, so that an error is told of the kernel that made it. Each family at a time: after one error a GPU does no more.
for family in 'matmul*' 'rmsnorm*' 'attention*' 'cross_entropy*' 'route*' 'adamw*'; do
  CUDA_LAUNCH_BLOCKING=1 step "tests of $family, blocking" 60 "$BIN/tests" -d "-tc=$family"
done
step "a model's step" 60 "$BIN/tests" -d '-tc=models: a step from a GPU*'
step "all tests" 300 "$BIN/tests" -d
finish
