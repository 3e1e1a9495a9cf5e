#!/usr/bin/env bash
# The way in for an inventor: what `make new` writes compiles and keeps the rules, what it cannot do it refuses and
# changes nothing, and the listing of docs/add-a-connection.md is the code that is tested.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "new_architecture: $*"; exit 1; }

mkdir -p "$work/dev" "$work/train"
cp -r "$repo/models" "$work"
cp "$repo/train/train_llama.cpp" "$work/train"
cp "$repo/dev/new_architecture.sh" "$work/dev"
cp -r "$work" "$work.before"
trap 'rm -rf "$work" "$work.before"' EXIT

for name in '' llama gpt2 lime ala relay all Upper 9x a-b a__b a_ ../a 'a b' 'a"' config this_name_is_too_long_to_be_typed_ever; do
  code=0
  "$work/dev/new_architecture.sh" "$name" >"$work.before/said" 2>&1 || code=$?
  [ $code = 64 ] || fail "'$name' ended with $code"
  [ "$(wc -l <"$work.before/said")" = 1 ] || fail "'$name': $(cat "$work.before/said")"
  rm "$work.before/said"
  diff -r "$work" "$work.before" || fail "'$name' was refused, and something changed"
done

names=(x my_idea2 abcdefghij_abcdefghij_abcdefghi)
for name in "${names[@]}"; do "$work/dev/new_architecture.sh" "$name" >/dev/null; done
for name in "${names[@]}"; do
  grep -q "\"$name\"" "$work/train/train_$name.cpp" || fail "train_$name.cpp does not train $name"
  [ "$(grep -c " ${name}_architecture()" "$work/models/registry.h" "$work/models/registry.cpp" | cut -d: -f2 | paste -sd,)" = 1,1 ] ||
    fail "$name is not registered once"
  if awk 'length > 120 {exit 1}' "$work/models/$name.cpp"; then :; else fail "models/$name.cpp has a long line"; fi
done
cd "$work"
${CXX:-c++} -std=c++20 -Wall -Wextra -Wshadow -Werror -fsyntax-only -I. -I"$repo" models/my_idea2.cpp models/registry.cpp

# listing FILE FIRST LAST: what stands between these two lines.
listing() { awk -v first="$2" -v last="$3" '$0 == last && on {exit} on {print} $0 == first {on = 1}' "$1"; }
diff <(listing "$repo/docs/add-a-connection.md" '```cpp' '```') \
  <(listing "$repo/tests/kernels/test_reference.cpp" '// --- listing ---' '// --- end of the listing ---') ||
  fail "docs/add-a-connection.md shows other code than tests/kernels/test_reference.cpp"
echo "new_architecture: passed"
