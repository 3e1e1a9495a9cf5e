#!/usr/bin/env bash
# Linux on ARM, emulated: the cases of the CPU's kernels, then a short run, whose losses must be those of this machine.
# Exit code 77: skipped, there is no cross-compiler, no emulator, or no library for ARM.
#   tests/arm/test.sh BUILD_DIR PROGRAMS_OF_THIS_MACHINE
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$1" && out=$(cd "$1" && pwd) && here=$(cd "$2" && pwd) || exit 1
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do
  command -v $tool >/dev/null && continue
  echo "skipped: there is no $tool; install it by: apt-get install g++-aarch64-linux-gnu qemu-user-static"
  exit 77
done
# The libraries of Debian's or Ubuntu's packages for arm64, unpacked here instead of installed.
root=$out/root lib=$out/root/usr/lib/aarch64-linux-gnu
if [ ! -e "$lib/libzstd.a" ]; then
  mkdir -p "$root"
  (cd "$root" && apt-get download libpcre2-dev:arm64 zlib1g-dev:arm64 libzstd-dev:arm64) >/dev/null 2>&1
  for package in "$root"/*.deb; do [ ! -e "$package" ] || dpkg -x "$package" "$root"; done
fi
for file in libpcre2-8.a libz.a libzstd.a; do
  [ -e "$lib/$file" ] && continue
  echo "skipped: no $file for ARM; once, as root: dpkg --add-architecture arm64 && apt-get update"
  exit 77
done
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
cmake -S . -B "$out" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static \
  -DCROSSPLY_NATIVE=OFF -DCROSSPLY_MPI=OFF -DCROSSPLY_CUDA=OFF -DCMAKE_PREFIX_PATH="$root/usr" \
  -DPCRE2_LIBRARY="$lib/libpcre2-8.a" -DZLIB_LIBRARY="$lib/libz.a" -DZSTD_LIBRARY="$lib/libzstd.a" \
  ${CMAKE_FLAGS:-} >/dev/null || exit 1
cmake --build "$out" -j "${JOBS:-$(nproc)}" --target train_lime kernel_tests || exit 1
export OMP_NUM_THREADS=2
qemu-aarch64-static "$out/kernel_tests" || { echo "FAIL: the kernels' cases under emulation"; exit 1; }
# losses RUN PROGRAM...: of 20 steps, as metrics.jsonl has them to all digits, here to four.
losses() {
  local run=$out/$1
  shift
  rm -rf "$run"
  "$@" --data arith:3 --steps 20 --seed 1 --test-samples 64 --eval-samples 16 --answer-samples 2 --out "$run" \
    >"$run.log" 2>&1 || { cat "$run.log" >&2; return 1; }
  grep -oE '"(step|loss)":[0-9.]+' "$run/metrics.jsonl" | sed -E 's/(\.[0-9]{4})[0-9]*/\1/'
}
want=$(losses x86 "$here/train_lime") && got=$(losses arm qemu-aarch64-static "$out/train_lime") || exit 1
if [ -z "$want" ] || [ "$got" != "$want" ]; then
  echo "FAIL: other losses than here:"
  diff <(echo "$want") <(echo "$got")
  exit 1
fi
echo "ARM, emulated: the kernels' cases pass, and the losses of 20 steps are those of this machine"
