#!/usr/bin/env bash
# dev/table and dev/pairs: the report beside the records is the one that they make, file by file, and docs/table.md and
# docs/claims.md have its numbers.
#   tests/system/test_table.sh BUILD
#   tests/system/test_table.sh --rows     prints the rows of both pages
set -uo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)

# Of each architecture that is no control: difference from LLaMA, bold where it is found, steps that LLaMA would need,
# and these over time; FLOPs, time, memory, parameters.
rows() {
  awk -F, '
    function number(name) { return sprintf("%.2f", $column[name]) }
    NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i; next }
    $column["table"] == "connections" && $column["architecture"] !~ /@/ {
      difference = "-"
      if ($column["compared_with"] != "") {
        difference = sprintf("%+.3f ± %.3f", $column["difference"], $column["interval"])
        if ($column["found"] == "true") difference = "**" difference "**"
      }
      beyond = $column["steps_worth_beyond"]
      sign = beyond > 0 ? "more than " : beyond < 0 ? "less than " : ""
      steps = sign number("steps_worth")
      if (beyond == 0 && $column["steps_worth_low"] != "")
        steps = steps " [" ($column["steps_worth_low_open"] == "true" ? "less" : number("steps_worth_low")) ", " \
                ($column["steps_worth_high_open"] == "true" ? "more" : number("steps_worth_high")) "]"
      worth = $column["relative_time"] > 0 ? sign sprintf("%.2f", $column["steps_worth"] / $column["relative_time"]) : "-"
      printf "| %s | %s | %s | %s | %s | %s | %s | %.1f |\n", $column["architecture"], difference, steps, worth,
             number("relative_flops"), number("relative_time"), number("relative_memory"), $column["parameters"] / 1e6
    }' "$source/dev/table/results.csv"
}
# Of each control: its difference from LLaMA, and what its architecture gains by learning.
controls() {
  awk -F, '
    NR == FNR && FNR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i }
    NR == FNR && $column["table"] == "connections" { loss[$column["architecture"]] = $column["loss"] }
    NR == FNR { next }
    /^## / { inside = $0 == "## connections" }
    inside && /^[*] .*: (lower|higher) by / {
      split($0, word, " ")
      name = substr(word[2], 1, length(word[2]) - 1)
      gain = sprintf("%s%.3f ± %.3f", word[3] == "lower" ? "-" : "+", word[5], word[7])
      if ($0 !~ /not significant/) gain = "**" gain "**"
      printf "| %s | %+.3f | %s |\n", name, loss[name "@frozen"] - loss["llama"], gain
    }' "$source/dev/table/results.csv" "$source/dev/table/report.md"
}
# Of each pair: its difference from LLaMA, the sum of its parts', and what the first has beyond the second.
pairs() {
  awk '
    FNR == 1 { FS = FILENAME ~ /csv$/ ? "," : " *[|] *"; $0 = $0 }
    NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i }
    NR == FNR { difference[$column["architecture"]] = $column["difference"]; next }
    /^[|] combination / { inside = 1; next }
    inside && /^[|] [a-z]/ {
      split($3, of, / [+]- /)
      interaction = sprintf("%+.3f ± %.3f", of[1], of[2])
      if ($4 != "no") interaction = "**" interaction "**"
      printf "| `%s` | %+.3f | %+.3f | %s | %.3f |\n", $2, difference[$2], difference[$2] - of[1], interaction, $5
    }' "$source/dev/pairs/results.csv" "$source/dev/pairs/report.md"
}
[ "${1:-}" != --rows ] || { rows && controls && pairs; exit; }

. "$source/tests/support/expect.sh"
start_in_scratch "$1"

# Numbers may differ in what another compiler rounds otherwise.
same() {
  awk '
    function differ(a, b) { return a != b && !(a ~ number && b ~ number && (a - b) ^ 2 <= 1e-12 * a * a) }
    BEGIN { number = "^-?[0-9.]+(e[-+]?[0-9]+)?$" }
    NR == FNR { line[FNR] = $0; lines = FNR; next }
    {
      fields = split(line[FNR], a, /[ ,]/)
      if (split($0, b, /[ ,]/) != fields) wrong = 1
      for (i = 1; i <= fields; ++i) if (differ(a[i], b[i])) wrong = 1
      if (wrong) { print FNR ": " $0; exit }
    }
    END { exit wrong || FNR != lines }' "$1" "$2"
}
for name in table pairs; do
  kept=$source/dev/$name
  cp -r "$kept" $name
  expect 0 "report: +drawn-$name/report.md" "$build/sweep" report $name --out drawn-$name
  for file in drawn-$name/*; do
    same "$file" "$kept/${file##*/}" >output || fail "dev/$name/${file##*/} is not what its records make"
  done
  for file in "$kept"/*.{md,csv,svg} "$kept/results.json"; do
    [ -e "drawn-$name/${file##*/}" ] || fail "dev/$name/${file##*/} is made by nothing"
  done
  diff "$source/docs/$name.plan" $name/sweep.plan >output || fail "dev/$name/sweep.plan is not docs/$name.plan"
done

rows >rows && controls >>rows
pairs >of_pairs
[ "$(wc -l <rows)" = 40 ] || fail "dev/table has $(wc -l <rows) rows, not 29 and 11"
[ "$(wc -l <of_pairs)" = 10 ] || fail "dev/pairs has $(wc -l <of_pairs) pairs, not 10"
for page in "rows docs/table.md" "of_pairs docs/claims.md"; do
  while IFS= read -r row; do
    grep -qF "$row" "$source/${page#* }" || fail "${page#* } does not have: $row (tests/system/test_table.sh --rows)"
  done <"${page% *}"
done
[ $failures = 0 ] && echo passed
