#!/usr/bin/env bash
# Where there is nvcc: the CUDA kernels compile without a warning for sm_80, sm_90 and sm_100, none of them spills
# registers, and the hot ones stay within the registers that they were written for. Needs no GPU.
#   tests/test_cuda_build.sh BUILD      builds in BUILD/cuda
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1/cuda

nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null) || {
  echo "no nvcc here: skipped"
  exit 77
}
cmake -S . -B "$build" -DCROSSPLY_CUDA=ON -DCROSSPLY_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES='80-real;90-real;100' >/dev/null
cmake --build "$build" --target cuda_kernels -j "$(nproc)" >"$build/log" 2>&1 || {
  tail -50 "$build/log"
  exit 1
}

# Registers a thread may have where a block, or several, must fit into a multiprocessor; the others may have 255.
declare -A budget=(
  [attention_forward_kernel]=255
  [attention_dkdv_kernel]=255
  [attention_dq_kernel]=255
  [rmsnorm_forward_kernel]=64
  [rmsnorm_backward_kernel]=64
  [route_forward_kernel]=128
  [depth_mix]=128
  [adamw_kernel]=64
  [loss_kernel]=64
)
failures=0 functions=0 name=
while IFS= read -r line; do
  if [[ $line =~ Function\ ([^:]+): ]]; then
    name=$(c++filt "${BASH_REMATCH[1]}")
  elif [[ $line =~ REG:([0-9]+)\ STACK:([0-9]+).*LOCAL:([0-9]+) ]]; then
    functions=$((functions + 1))
    registers=${BASH_REMATCH[1]} stack=${BASH_REMATCH[2]} local=${BASH_REMATCH[3]}
    if [ "$stack" -gt 0 ] || [ "$local" -gt 0 ]; then
      failures=$((failures + 1))
      echo "spills, or an array that is indexed at run time ($stack bytes of stack, $local local): $name"
    fi
    for kernel in "${!budget[@]}"; do
      if [[ $name == *"$kernel"* ]] && [ "$registers" -gt "${budget[$kernel]}" ]; then
        failures=$((failures + 1))
        echo "$registers registers, more than ${budget[$kernel]}: $name"
      fi
    done
  fi
done < <(find "$build" -name '*.cu.o' -exec "$(dirname "$nvcc")/cuobjdump" -res-usage {} \;)
echo "$functions kernels of three architectures, $failures over their budgets"
[ "$functions" -gt 0 ] && [ "$failures" -eq 0 ]
