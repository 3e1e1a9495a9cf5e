#!/usr/bin/env bash
# Lines of C++ and CUDA by room, and how they changed since a commit.
#   dev/count.sh [COMMIT]      or: make count [SINCE=COMMIT]
set -euo pipefail
cd "$(dirname "$0")/.."
# "ROOM LINES" of a tree: the working tree without an argument.
lines() {
  if [ $# = 0 ]; then
    git ls-files -z -- '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 wc -l
  else
    mkdir "$work/tree" && git archive "$1" | tar -xf - -C "$work/tree"
    (cd "$work/tree" && find . -regex '.*\.\(h\|cpp\|cu\|cuh\)' -print0 | sed -z 's|^\./||' | xargs -0 wc -l)
  fi | awk '$2 != "total" {room = $2; sub(/\/[^\/]*$/, "", room); n[room] += $1} END {for (r in n) print r, n[r]}'
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
lines | sort >"$work/now"
if [ $# -gt 0 ]; then lines "$1" | sort >"$work/before"; else : >"$work/before"; fi
join -a 1 -a 2 -e 0 -o 0,1.2,2.2 "$work/before" "$work/now" | awk -v since="${1:-}" '
  function show(room, lines, change) {
    printf "%-24s %7d", room, lines
    if (since != "") printf " %+6d", change
    print ""
  }
  {show($1, $3, $3 - $2); old += $2; sum += $3}
  END {show(since == "" ? "all" : "all, and since " since, sum, sum - old)}'
