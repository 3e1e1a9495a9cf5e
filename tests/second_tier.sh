#!/usr/bin/env bash
# The second tier of the tests, which `make test-second` has built. Given a time to end by, only as much of it as fits:
# the short ones always, of the long ones those whose turn it is, which the commit decides. FULL=1: all of it.
#   tests/second_tier.sh BUILD_DIR JOBS [END]      END: in seconds since 1970
set -euo pipefail
build=$(cd "$1" && pwd) jobs=$2 end=${3:-}
cd "$(dirname "$0")/.."
mapfile -t names < <(ctest --test-dir "$build" -N -L second | sed -n 's/^ *Test *#[0-9]*: //p')
[ ${#names[@]} -gt 0 ] || { echo "no test of the second tier is in $build"; exit 1; }
chosen=("${names[@]}") left_out=()
if [ -n "$end" ] && [ "${FULL:-0}" != 1 ]; then
  turn=$((16#$(git rev-parse HEAD 2>/dev/null | cut -c1-6 || echo 0)))
  # The seconds of each, longest last; of one that tests/budget.txt does not have, as if it were long.
  mapfile -t timed < <(awk -v unit="$(tests/times.sh unit)" 'NR == FNR { if ($1 != "#") units[$1] = $2; next }
    { printf "%d %s\n", ($1 in units ? units[$1] : 300) * unit + 1, $1 }' tests/budget.txt <(printf '%s\n' "${names[@]}") | sort -n)
  long=0
  while [ $long -lt ${#timed[@]} ] && [ "${timed[$long]%% *}" -lt 15 ]; do long=$((long + 1)); done
  count=$((${#timed[@]} - long)) seconds=$(((end - $(date +%s)) * jobs * 8 / 10))  # some jobs wait for others
  order=("${timed[@]:0:$long}")
  for ((i = 0; i < count; ++i)); do order+=("${timed[$((long + (i + turn) % count))]}"); done
  chosen=()
  for line in "${order[@]}"; do
    if [ "${line%% *}" -le $seconds ]; then
      seconds=$((seconds - ${line%% *})) chosen+=("${line#* }")
    else
      left_out+=("${line#* }")
    fi
  done
fi
echo "second tier: ${#chosen[@]} of ${#names[@]} tests${left_out[*]:+; left to other commits, or to FULL=1: ${left_out[*]}}"
[ ${#chosen[@]} = 0 ] || ctest --test-dir "$build" --output-on-failure -j "$jobs" -R "^($(IFS='|'; echo "${chosen[*]}"))$"
