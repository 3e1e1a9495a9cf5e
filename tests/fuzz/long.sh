#!/usr/bin/env bash
# Every fuzz target for a while, under the sanitizers: by libFuzzer where clang has it, otherwise by our own driver.
# Inputs that fail stay in BUILD_DIR.   tests/fuzz/long.sh BUILD_DIR SECONDS
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
mkdir -p "$1" && build=$(cd "$1" && pwd) || exit 1
seconds=$2
# A process that dies leaves its files behind.
TMPDIR=$(if [ -w /dev/shm ]; then mktemp -d -p /dev/shm; else mktemp -d; fi) && export TMPDIR || exit 1
trap 'rm -rf "$TMPDIR"' EXIT

# Kernels without much optimization: they compile in a tenth of the time, and the models here are tiny. clang says which
# of their loops it then leaves as they are, which would be an error in continuous integration.
flags=(-DCROSSPLY_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug '-DCMAKE_CXX_FLAGS_DEBUG=-O1 -Wno-pass-failed')
libfuzzer=OFF
target='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if clang++ -x c++ -fsanitize=fuzzer,address -fopenmp - -o "$TMPDIR/probe" <<<"$target" 2>/dev/null; then
  libfuzzer=ON
  flags+=(-DCMAKE_CXX_COMPILER=clang++)
fi
cmake -S . -B "$build" -DCROSSPLY_LIBFUZZER=$libfuzzer "${flags[@]}" >/dev/null || exit 1
cmake --build "$build" -j "$(nproc)" --target fuzz_targets || exit 1

failures=0
for corpus in tests/fuzz/corpus/*/; do
  name=$(basename "$corpus")
  if [ $libfuzzer = ON ]; then
    mkdir -p "$build/corpus/$name"
    "$build/fuzz_$name" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 -malloc_limit_mb=4096 \
      -max_len=1000000 -close_fd_mask=3 -detect_leaks=0 -verbosity=0 -print_final_stats=1 \
      -artifact_prefix="$build/fuzz-$name-" "$build/corpus/$name" "$PWD/$corpus" >"$build/$name.log" 2>&1 ||
      { failures=$((failures + 1)); tail -40 "$build/$name.log"; }
    echo "$name: $(sed -n 's/stat::number_of_executed_units: *//p' "$build/$name.log") inputs"
  else
    end=$((SECONDS + seconds))
    for ((seed = 1; SECONDS < end; seed++)); do
      "$build/fuzz_$name" --seed $seed --count 1000 --keep "$build" "$corpus" || { failures=$((failures + 1)); break; }
    done
  fi
done
echo "fuzz: $failures targets failed"
[ $failures = 0 ]
