#!/usr/bin/env bash
# dev/table: the report beside the records is the one that they make, file by file, and docs/table.md has its numbers.
#   tests/system/test_table.sh BUILD
#   tests/system/test_table.sh --rows     prints the rows of docs/table.md
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
[ "${1:-}" != --rows ] || { rows && controls; exit; }

. "$source/tests/support/expect.sh"
start_in_scratch "$1"

cp -r "$source/dev/table" table
expect 0 'report: +drawn/report.md' "$build/sweep" report table --out drawn
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
for file in drawn/*; do
  same "$file" "$source/dev/table/${file#drawn/}" >output || fail "dev/table/${file#drawn/} is not what its records make"
done
for file in "$source"/dev/table/*.{md,csv,svg} "$source/dev/table/results.json"; do
  [ -e "drawn/${file##*/}" ] || fail "dev/table/${file##*/} is made by nothing"
done
diff "$source/docs/table.plan" table/sweep.plan >output || fail "dev/table/sweep.plan is not docs/table.plan"

rows >rows && controls >>rows
[ "$(wc -l <rows)" = 40 ] || fail "dev/table has $(wc -l <rows) rows, not 29 and 11"
while IFS= read -r row; do
  grep -qF "$row" "$source/docs/table.md" || fail "docs/table.md does not have: $row (tests/system/test_table.sh --rows)"
done <rows
[ $failures = 0 ] && echo passed
