#!/usr/bin/env bash
# Where there is nvcc: the CUDA kernels compile without a warning for sm_80, sm_90 and sm_100, none of them spills
# registers, and the hot ones stay within the registers that they were written for. Needs no GPU.
#   tests/system/test_cuda_build.sh BUILD [ARCHITECTURES]     builds in BUILD/cuda
# Without ARCHITECTURES and with fewer than four cores only sm_90: three take these four minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1/cuda
architectures=${2:-$([ "$(nproc)" -lt 4 ] && echo '90a-real' || echo '80-real;90a-real;100')}

nvcc=$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null) || {
  echo "no nvcc here: skipped"
  exit 77
}
# What the compiler says of the kernels of a file is kept beside its object; without that, it is compiled again.
mapfile -t logs < <(
  find kernels -name '*.cu' -printf "$build/CMakeFiles/cuda_kernels.dir/%p.o.log\n"
  find tests -name '*.cu' -printf "$build/CMakeFiles/cuda_tests.dir/%p.o.log\n"
)
for log in "${logs[@]}"; do
  [ -e "$log" ] || rm -f "${log%.log}"
done
# The three architectures of a file side by side: with many cores the longest file decides, with few it only costs.
threads=$(($(nproc) > 6 ? 3 : 1))
cmake -S . -B "$build" -G 'Unix Makefiles' -DCROSSPLY_CUDA=ON -DCROSSPLY_WERROR=ON \
  -DCMAKE_CUDA_FLAGS="--resource-usage --threads $threads" -DCMAKE_CUDA_ARCHITECTURES="$architectures" \
  -DCMAKE_CUDA_COMPILER_LAUNCHER="$PWD/tests/support/keep_output.sh${CMAKE_CUDA_COMPILER_LAUNCHER:+;$CMAKE_CUDA_COMPILER_LAUNCHER}" >/dev/null
cmake --build "$build" --target cuda_kernels cuda_tests -j "$(nproc)" -- -O >"$build/log" 2>&1 || {
  tail -50 "$build/log"
  exit 1
}

# Registers a thread may have, so that as many blocks fit into a multiprocessor as the kernel was written for; attention
# takes all 255.
declare -A budget=(
  [adamw_kernel]=64
  [correlate_kernel]=168
  [depth_mix_backward_kernel]=80
  [depth_mix_forward_kernel]=64
  [hyper_read_backward_mma_kernel]=128
  [hyper_read_forward_kernel]=168
  [hyper_read_mma_kernel]=128
  [layernorm_backward_kernel]=168
  [layernorm_forward_kernel]=80
  [loss_kernel]=64
  [mix_backward_kernel]=64
  [mma_kernel]=128
  [rmsnorm_backward_kernel]=168
  [rmsnorm_forward_kernel]=80
  [rope_kernel]=64
  [swiglu]=40
  [sums_kernel]=64
  [unmix_kernel]=128
  [vertical]=80
  [multiway_mix_backward_kernel]=128
)
declare -A stack registers
kernel=
while IFS= read -r line; do
  if [[ $line =~ Compiling\ entry\ function\ \'(.*)\'\ for\ \'(.*)\' ]]; then
    kernel="${BASH_REMATCH[2]}: ${BASH_REMATCH[1]}"
  elif [[ $line =~ ([0-9]+)\ bytes\ stack\ frame ]]; then
    stack[$kernel]=${BASH_REMATCH[1]}
  elif [[ $line =~ Used\ ([0-9]+)\ registers ]]; then
    registers[$kernel]=${BASH_REMATCH[1]}
  fi
done < <(cat "${logs[@]}" | c++filt)

failures=0
# What the compiler says where it makes one after the other of what should run together, or ignores setmaxnreg.
if cat "${logs[@]}" | grep -E 'C75[0-9]{2}.*(serializ|ignored)'; then
  failures=$((failures + 1))
fi
for kernel in "${!registers[@]}"; do
  if [ "${stack[$kernel]:-1}" -gt 0 ]; then
    failures=$((failures + 1))
    echo "registers are spilled, or an array is indexed at run time (${stack[$kernel]} bytes): $kernel"
  fi
  for hot in "${!budget[@]}"; do
    if [[ $kernel == *"::$hot"* ]] && [ "${registers[$kernel]}" -gt "${budget[$hot]}" ]; then
      failures=$((failures + 1))
      echo "${registers[$kernel]} registers, more than ${budget[$hot]}: $kernel"
    fi
  done
done
# panel_memory of kernels/cuda/hopper.cuh checks an address at run time: neither compiler may drop that.
if [[ $architectures != *90a* ]]; then
  :
elif dump=$(command -v cuobjdump || ls "$(dirname "$nvcc")/cuobjdump" 2>/dev/null); then
  unchecked=$(
    for part in forward backward; do
      "$dump" -sass -arch sm_90a "$build/CMakeFiles/cuda_kernels.dir/kernels/attention/attention_hopper_$part.cu.o"
    done | awk '/Function :/ {name = $3; ++count; left[name]} /BPT.TRAP/ {delete left[name]}
      END {for (name in left) print name; if (count < 6) print "of 6 kernels only", count + 0}'
  )
  if [ -n "$unchecked" ]; then
    failures=$((failures + 1))
    printf 'no check of the alignment of shared memory: %s\n' $unchecked
  fi
else
  echo "no cuobjdump here: the check of the alignment of shared memory was not looked for"
fi

# Comm by NCCL compiles with the real nccl.h that CMake has found, and the library, if it is here, opens without a GPU.
nccl=$(sed -n 's/^NCCL_INCLUDE:PATH=//p' "$build/CMakeCache.txt")
if [ -e "$nccl/nccl.h" ]; then
  cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  flags=(-std=c++20 -O1 -Wall -Wextra -Wshadow -Werror -DCROSSPLY_CUDA=1 -DCROSSPLY_NCCL=1 -I. "-I$nccl" "-I$cuda/include")
  cat >"$build/nccl_id.cpp" <<'EOF'
#include <cstdio>
#include "ranks/comm.h"
int main() try {
  std::printf("%s: an id of %zu bytes\n", crossply::nccl_library().c_str(), crossply::new_nccl_id().size());
} catch (const crossply::Error& error) {
  std::printf("%s\n", error.what());
}
EOF
  "${CXX:-g++}" "${flags[@]}" "$build/nccl_id.cpp" ranks/comm_nccl.cpp kernels/cuda/library.cpp engine/platform.cpp \
    "$build/CMakeFiles/cuda_kernels.dir/kernels/cuda/cuda.cu.o" -o "$build/nccl_id" \
    "$(ls "$cuda"/lib*/libcudart_static.a | head -1)" \
    -ldl -lrt -lpthread
  said=$("$build/nccl_id")
  case $said in
    NCCL*) echo "Comm by NCCL compiles, its library answers: $said" ;;
    'cannot open libnccl'*) echo "Comm by NCCL compiles; its library is not here" ;;
    *)
      echo "Comm by NCCL says: $said"
      exit 1
      ;;
  esac
else
  echo "no nccl.h here: Comm by NCCL was not compiled"
fi

echo "${#registers[@]} kernels for $architectures, $failures over their budgets"
[ "${#registers[@]}" -gt 0 ] && [ "$failures" -eq 0 ]
