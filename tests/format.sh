#!/usr/bin/env bash
# Every C++ and CUDA file is as clang-format would write it. Versions differ in what they write, so it must be 14: else
# exit code 77, skipped. CLANG_FORMAT names it where it has another name.   tests/format.sh [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."
for format in ${CLANG_FORMAT:-clang-format-14 clang-format} none; do
  if "$format" --version 2>/dev/null | grep -q 'version 14\.'; then break; fi
done
[ "$format" != none ] || { echo "skipped: there is no clang-format 14"; exit 77; }
mode=(--dry-run --Werror)
if [ "${1:-}" = --fix ]; then mode=(-i); fi
find engine cli kernels ranks models data train eval tests dev -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' |
  xargs -P "$(nproc)" -n 20 "$format" "${mode[@]}"
