#!/usr/bin/env bash
# Compiles every .cpp file for macOS on Apple silicon, on Linux, by zig's clang; it links and runs none.
# Exit code 77: skipped, there is no zig.
#   tests/macos.sh BUILD_DIR BUILD_DIR_OF_THIS_MACHINE [FILE...]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$1 here=$2
shift 2
mkdir -p "$out/include" || exit 1
if command -v zig >/dev/null; then zig=(zig)
elif "${PYTHON:-python3}" -c 'import ziglang' 2>/dev/null; then zig=("${PYTHON:-python3}" -m ziglang)
else
  echo "skipped: there is no zig; install it by: pip install ziglang"
  exit 77
fi
# Libraries are the same headers everywhere. Those of /usr/include as a whole would hide macOS's.
for header in nlohmann CLI doctest pcre2.h zlib.h zconf.h zstd.h zstd_errors.h; do
  from=$(find /usr/include deps/usr/include -maxdepth 2 -name "$header" -print -quit 2>/dev/null)
  [ -n "$from" ] || { echo "skipped: there is no $header; make setup installs it"; exit 77; }
  ln -sfn "$(realpath "$from")" "$out/include/$header"
done
# What the programs call of OpenMP; compiling needs no more.
cat >"$out/include/omp.h" <<'END'
#pragma once
extern "C" {
int omp_get_max_threads(void);
int omp_get_num_procs(void);
int omp_get_num_threads(void);
int omp_get_thread_num(void);
int omp_in_parallel(void);
void omp_set_num_threads(int);
}
END
# DBL_EPSILON: doctest up to 2.4.9 does not include what defines it.
flags=(-target aarch64-macos -std=c++20 -c -g0 -Xclang -fopenmp -Wall -Wextra -Werror -Wno-unknown-pragmas -I.
  -isystem "$out/include" -I"$here/programs_inside" -DCROSSPLY_PUBLISHED='""' -DBENCH_SCRIPTS='""'
  -DDBL_EPSILON=__DBL_EPSILON__)
files=("$@")
# Without those that need MPI's or NVIDIA's headers, and those that make Linux's system calls fail.
[ $# -gt 0 ] || mapfile -t files < <(find engine cli kernels ranks models data train eval dev tests -name '*.cpp' \
  ! -name comm_mpi.cpp ! -name comm_nccl.cpp ! -name cublaslt.cpp ! -name mpi_promises.cpp \
  ! -name preload.cpp ! -name test_file.cpp ! -name test_checkpoint.cpp | sort)
compile() {
  local object
  object=$(mktemp "$out/XXXXXX.o")
  "${zig[@]}" c++ "${flags[@]}" -o "$object" "$1" || echo "$1" >>"$out/failed"
  rm -f "$object"
}
rm -f "$out/failed"
jobs=${JOBS:-$(nproc)}
for file in "${files[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
  compile "$file" &
done
wait
[ ! -e "$out/failed" ] || { echo "FAIL: these do not compile for macOS:"; cat "$out/failed"; exit 1; }
echo "${#files[@]} files compile for macOS on Apple silicon; none of them has been run there"
