#!/usr/bin/env bash
# clang-tidy over the rooms, with .clang-tidy's checks; without names over all but kernels/, whose templates take minutes.
# Exit code 77: skipped, there is no clang-tidy.   tests/tidy.sh BUILD [ROOM...]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
tidy=${CLANG_TIDY:-clang-tidy}
command -v "$tidy" >/dev/null || { echo "skipped: there is no $tidy"; exit 77; }
rooms=("$@")
[ $# -gt 0 ] || rooms=(engine cli ranks models data eval train)
find "${rooms[@]}" -name '*.cpp' -print0 | sort -z | xargs -0 -P "$(nproc)" -n 1 "$tidy" --quiet -p "$build"
