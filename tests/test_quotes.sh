#!/usr/bin/env bash
# The code that Markdown pages quote is the code that is there. A quote is a block that begins with ```cpp FILE; its
# lines stand in FILE one after the other, whatever their indentation; a line with ... alone leaves some out.
#   tests/test_quotes.sh [PAGE...]      default: every page of the repository
set -euo pipefail
if [ $# = 0 ]; then
  cd "$(dirname "$0")/.."
  mapfile -t pages < <(find . -name '*.md' -not -path './build*' -not -path './.git/*')
  set -- "${pages[@]}"
fi

awk '
  function trimmed(line) { sub(/^[ \t]+/, "", line); sub(/[ \t]+$/, "", line); return line }
  function complain(text) { print at ": " text; wrong = 1 }
  function read_file(name,   line) {
    count = 0
    while ((getline line < name) > 0) code[++count] = trimmed(line)
    close(name)
    if (count == 0) complain(name " is not there")
  }
  # Where lines first..last of the quote stand one after the other in the file, behind `from`; 0: nowhere.
  function find(first, last, from,   i, k) {
    for (i = from + 1; i + last - first <= count; ++i) {
      for (k = first; k <= last && code[i + k - first] == quote[k]; ++k) {}
      if (k > last) return i + last - first
    }
    return 0
  }
  function check(   first, last, from) {
    from = 0
    for (first = 1; first <= lines; first = last + 2) {
      for (last = first; last + 1 <= lines && quote[last + 1] != "..."; ++last) {}
      from = find(first, last, from)
      if (from == 0) return complain(file " does not have: " quote[first])
    }
    ++quotes
  }
  /^```cpp [^ ]+$/ { file = $2; at = FILENAME ":" FNR; lines = 0; inside = 1; read_file(file); next }
  /^```/ { if (inside && count > 0) check(); inside = 0; next }
  inside { quote[++lines] = trimmed($0) }
  END { if (wrong || quotes == 0) { print "quotes found: " quotes + 0; exit 1 } print quotes + 0 " quotes are in the code" }
' "$@"
