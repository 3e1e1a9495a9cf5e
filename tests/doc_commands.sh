#!/usr/bin/env bash
# Every command that README.md and docs/ quote is one that the programs take: blocks without a language, and names in
# code that begin with build/, make, cmake, python or a script. Bash reads the pages, with functions in the place of all
# programs. Trainers and compare only plan. Other programs read all flags before they find that a model is missing.
#   tests/doc_commands.sh BUILD_DIR TREE
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) build=$(cd "$1" && pwd) tree=$(cd "$2" && pwd) tools=$PATH
# shellcheck disable=SC1091
. "$here/support/tiny_tokenizer.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=1

# A finding, with the line of the page whose command it is about.
fail() {
  local i=1
  while [[ $i -lt ${#BASH_SOURCE[@]} && ${BASH_SOURCE[i]} != *.md ]]; do i=$((i + 1)); done
  echo "${BASH_SOURCE[i]}:${BASH_LINENO[i - 1]}: $*" >>"$work/found"
}
# supply DATA: what a trainer would read is there.
supply() {
  local file=${1#*:}
  file=${file//\*/1}
  [[ $file != */* ]] || mkdir -p "${file%/*}"
  case $1 in
    arith* | prosqa) ;;
    *.json) [ -f "$file" ] || cp "$work/tokenizer.json" "$file" ;;
    uint*) head -c 20000 "$work/text.txt" >"$file" ;;
    *.bin) cp "$work/zeros.bin" "$file" ;;
    text:*.*) cp "$work/text.txt" "$file" ;;
    text:*) mkdir -p "$file" && cp "$work/text.txt" "$file" ;;
    *) mkdir -p "$file" && cp "$work"/shard/* "$file" ;;
  esac
}
# takes PROGRAM FLAG...: it runs, or lacks only what other commands would have made.
takes() {
  local output missing="[Nn]o such |neither config.json nor a "
  echo "$1" >>"$work/commands"
  output=$("$build/$1" "${@:2}" 2>&1 </dev/null) && return
  case $1 in
    curves) missing=" is no directory, and is not NAME=DIR" ;;
    sweep) missing="[Nn]o such| is no sweep" ;;
    # The first two are a model and a run that are missing; the third, a flag that shows something else than the plan.
    train_* | compare) missing="; expected a model or run directory|: there is no run in it|--dry-run excludes --dump-t" ;;
  esac
  grep -qE -- "$missing" <<<"$output" || fail "$(grep -m 1 -o 'error: .*' <<<"$output" | cut -c8-200) in: $*"
}
program() {
  local PATH=$tools name=${1/myidea/lime} flags=() flag last=
  [ $# -gt 1 ] || return 0  # only its name
  for flag in "${@:2}"; do
    flag=${flag//myidea/lime}
    case $last in
      --data | --val-data | --tokenizer) flag=${flag/#prosqa:*/prosqa} && supply "$flag" ;;
      --sae-labels) echo id,label >"$flag" ;;
    esac
    last=$flag
    [[ $flag = ... || $name$flag = compare--resume ]] || flags+=("$flag")
  done
  case $name in
    tests) "$build/tests" --count "${flags[@]}" | grep -q ': [1-9]' || fail "no test is selected by: $*"; return ;;
    bench) script dev/bench.cpp "${flags[@]}"; return ;;
    train_*) [[ " ${flags[*]}" == *" --"@(data|preset)\ * ]] || { supply text:a.txt; flags+=(--data text:a.txt); } ;;&
    train_* | compare) flags+=(--dry-run) ;;
  esac
  takes "$name" "${flags[@]}"
}
# script FILE FLAG...: the file is there, and has the flags; bench.cpp has some in files of its own.
script() {
  local PATH=$tools file=$1 flag
  echo "$file" >>"$work/commands"
  [ -f "$tree/$file" ] || { fail "there is no script $file"; return; }
  for flag in "${@:2}"; do
    [[ $flag != --* ]] || grep -qE -- "(^|[^a-z-])$flag($|[^a-z-])" "$tree/${file%.*}"*".${file##*.}" ||
      fail "$file has no flag $flag"
  done
}
python() { [[ ${1:--} = -* ]] || script "$@"; }
bash() { script "${1/#.gpu/dev/gpu}" "${@:2}"; }  # .gpu/ is made of dev/gpu/
# What starts a program on several ranks.
launch() {
  until [ $# = 0 ] || [[ $1 = build/* || $1 = train_* ]]; do shift; done
  [ $# = 0 ] || "$@"
}
make() {
  local PATH=$tools word output
  echo make >>"$work/commands"
  for word; do
    [[ $word != *=* ]] || grep -qw "${word%%=*}" "$tree/Makefile" || fail "the Makefile knows no ${word%%=*}"
  done
  output=$(command make -n -C "$tree" "${@//myidea/lime}" 2>&1) || fail "$(grep -oE '\*\*\* .*' <<<"$output")"
}
cmake() {
  local PATH=$tools
  until [ $# = 0 ] || [ "$1" = --preset ]; do shift; done
  [[ $# = 0 || $2 = NAME ]] || grep -q "\"name\": \"$2\"" "$tree/CMakePresets.json" || fail "there is no preset $2"
}

for name in mpirun srun torchrun dev/ranks.sh; do eval "$name() { launch \"\$@\"; }"; done
for name in bench train_myidea $(cd "$build" && ls); do
  eval "build/$name() { program $name \"\$@\"; }"
  # docs/inheritune.md calls these without the directory.
  [[ $name != train_* && $name != transplant && $name != analyze ]] || eval "$name() { program $name \"\$@\"; }"
done
for name in $(cd "$tree" && find dev eval tests -name '*.sh' -o -name '*.py'); do
  [ "$name" = dev/ranks.sh ] || eval "$name() { script $name \"\$@\"; }"
done
pretend() { for name in cd cmp ctest exit git pip scontrol; do eval "$name() { :; }"; done; }

tiny_tokenizer >tokenizer.json
for i in {1..4000}; do echo "line $i of a text"; done >text.txt
"$build/prepare" --tokenizer tokenizer.json --val 0.3 --out shard text.txt >output 2>&1 || { cat output; exit 1; }
{ printf '\x88\xd8\x34\x01\x01\x00\x00\x00\x20\x4e\x00\x00' && head -c 41012 /dev/zero; } >zeros.bin  # 20,000 tokens
touch found commands
# The pages with their commands alone, each in the line where it stands.
for page in $(cd "$tree" && find README.md docs -name '*.md'); do
  mkdir -p "$(dirname "pages/$page")" "at/$page"
  awk '
    /^ *```/ { inside = !inside; commands = inside && $0 ~ /^ *```(sh|bash)?$/; print ""; next }
    inside { print commands ? $0 : ""; next }
    /^    / && substr($0, 5) ~ command { print; next }
    {
      spans = split($0, span, "`")
      for (i = 2; i < spans; i += 2) if (span[i] ~ command) printf "%s; ", span[i]
      print ""
    }' command='^([A-Z]+=[^ ]+ )*(build/[a-z_0-9]+|(dev|eval|tests)/[a-z_/]+\\.(sh|py)|make|cmake|bash|python)( |$)' \
    "$tree/$page" >"pages/$page"
  cd "at/$page" || exit 1
  # shellcheck disable=SC2046
  touch found $(grep -oE '< *[a-z._]+' "$work/pages/$page" | cut -c2-)  # what commands read
  # shellcheck disable=SC1090,SC2123
  (pretend; set +u; PATH=; . "$work/pages/$page") >>"$work/output" 2>>"$work/found"
  cd "$work" || exit 1
done
sed -E "s|^$0: ||; s|^$work/pages/||; s|^([^ ]*[.]md): line |\1:|" found | sort -u
[ -s found ] && exit 1
echo "docs: $(wc -l <commands) commands"
