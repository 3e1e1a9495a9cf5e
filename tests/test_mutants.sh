#!/usr/bin/env bash
# Every planted mistake of dev/mutants applies in one place, and dev/mutants.py says so of one that does not.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "skipped: python3 is not here"; exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

count=$(dev/mutants.py --check | sed -n 's/ mutants apply, each in one place$//p')
[ "$count" -ge 44 ] || { echo "dev/mutants has '$count' mutants, fewer than 44"; exit 1; }

refuse() { # what is said of a mutant whose text is $1
  printf 'name: planted\nwas: %s\nnow: 0\n' "$1" >"$dir/engine.txt"
  if said=$(dev/mutants.py --check "$dir" 2>&1); then echo "accepted: $1"; exit 1; fi
  case $said in *"planted $2"*) ;; *) echo "'$1' is refused with: $said"; exit 1 ;; esac
}
refuse "no line has this text" "does not apply: its text is in 0 places"
refuse "namespace crossply {" "does not apply: its text is in "
refuse "" "needs a 'was'"
echo "$count mutants apply, and what does not is named"
