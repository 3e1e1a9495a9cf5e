#!/usr/bin/env bash
# The time of each test that ctest ran in a build directory: the ten longest, and what grew against tests/budget.txt.
# Machines differ, so a test's time is counted in units: the seconds of a fixed calculation on the same machine.
#   tests/times.sh unit                      this machine's unit, in seconds
#   tests/times.sh show BUILD_DIR
#   tests/times.sh write BUILD_DIR           writes tests/budget.txt from what ran; other lines stay
set -euo pipefail
cd "$(dirname "$0")/.."
budget=tests/budget.txt

unit() {  # the shortest of three: a busy neighbour makes it longer, nothing makes it shorter
  local start times=()
  for _ in 1 2 3; do
    start=$EPOCHREALTIME
    awk 'BEGIN { for (i = 0; i < 3000000; ++i) x = (x * 31 + i) % 65521; exit x < 0 }'
    times+=("$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')")
  done
  printf '%s\n' "${times[@]}" | sort -g | head -1
}

# NAME SECONDS of what ran: ctest keeps a mean over the runs in this directory.
ran() { awk 'NF == 3 && $2 > 0 { print $1, $3 }' "$1/Testing/Temporary/CTestCostData.txt"; }

case $1 in
  unit) unit ;;
  show)
    unit=$(unit)
    echo "the ten longest tests, in seconds:"
    ran "$2" | sort -k2,2gr | head -10 | awk '{ printf "  %7.1f  %s\n", $2, $1 }'
    # A test of a second or two is mostly luck; beside others one may take twice its time.
    awk -v unit="$unit" 'NR == FNR { if ($1 != "#") budget[$1] = $2; next }
      $1 in budget && $2 / unit > 1.6 * budget[$1] && $2 / unit > budget[$1] + 8 {
        printf "  grew: %s took %.0f units of %.2f s, tests/budget.txt has %.0f\n", $1, $2 / unit, unit, budget[$1] }
      !($1 in budget) && $2 / unit > 8 { printf "  new: %s took %.0f units; tests/budget.txt does not have it\n", $1, $2 / unit }' \
      "$budget" <(ran "$2")
    ;;
  write)
    unit=$(unit)
    {
      grep '^#' "$budget"
      awk -v unit="$unit" 'NR == FNR { if ($1 != "#") units[$1] = $2; next } { units[$1] = sprintf("%.1f", $2 / unit) }
        END { for (name in units) print name, units[name] }' "$budget" <(ran "$2") | sort
    } >"$budget.new"
    mv "$budget.new" "$budget"
    ;;
  *) sed -n '2,6p' "$0" && exit 64 ;;
esac
