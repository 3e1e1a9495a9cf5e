#!/usr/bin/env bash
# Before a machine with an H100 or H200 is asked for, in a checkout whose changes are committed: makes .gpu/, which is
# carried there: the package for sm_90a, quarter.sh and what it needs. It needs nvcc of CUDA 13, and no GPU.
#   dev/gpu/stage.sh              less than 10 MB; also trains 20 steps of 124M parameters, for the CPU's losses
#   dev/gpu/stage.sh third [TEXT...]  and tokens for the third call, of these files or of Python's own library
#                                 (with PYTHON, one that has the package tokenizers); 40 MB at most
# BUILD: where it is built (build-gpu); a second time only what has changed
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build-gpu} text=
if [ "${1:-}" = third ]; then text=1 && shift; elif [ $# != 0 ]; then sed -n '4,7s/^# *//p' "$0" && exit 64; fi

git diff --quiet HEAD 2>/dev/null || echo "note: the package gets the commit's name, but there are changes that are not committed"
cmake -S . -B "$build" -DCROSSPLY_PACK=ON -DCROSSPLY_CUDA=ON -DCROSSPLY_GPU_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES=90a-real >/dev/null
cmake --build "$build" -j "$(nproc)" --target pack
rm -rf .gpu.new
mkdir .gpu.new
cp -r "$build"/crossply-*.tar.xz dev/gpu/. docs/gpu.md .gpu.new
export BIN=$build/stage/bin

# Sources of this commit, as many as 20 steps see and some for the test.
head -c 100000 <(cat engine/*.h engine/*.cpp) >.gpu.new/losses_text.txt
for dtype in fp32 bf16; do
  echo "the CPU's losses in $dtype ..."
  dev/gpu/losses.sh cpu $dtype .gpu.new/losses_text.txt >.gpu.new/losses_cpu_$dtype.txt 2>"$build/losses.log" ||
    { cat "$build/losses.log" && exit 1; }
done
du -sh .gpu.new | sed 's/\t.*/ without text/'

if [ -n "$text" ]; then
  if [ $# = 0 ] && [ ! -e "$build/text/manifest.json" ]; then
    "${PYTHON:-python3}" dev/experiments/corpus.py "$build/text.jsonl"
    "$BIN/prepare" --vocab 16384 --val 0.02 --out "$build/text" "$build/text.jsonl"
  elif [ $# != 0 ]; then
    rm -rf "$build/text"
    "$BIN/prepare" --vocab 16384 --val 0.02 --out "$build/text" "$@"
  fi
  cp -r "$build/text" .gpu.new/text
fi
rm -rf .gpu
mv .gpu.new .gpu
size=$(du -sm .gpu | cut -f1)
[ "$size" -lt "$([ -n "$text" ] && echo 40 || echo 10)" ] || { echo ".gpu has $size MB, more than can be carried" && exit 1; }
echo ".gpu: $size MB. Carry it, and there: bash .gpu/quarter.sh first"
