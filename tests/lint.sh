#!/usr/bin/env bash
# The rules of the house that a compiler does not check. Prints every breach and ends with exit code 1 if there is one.
#   tests/lint.sh [DIRECTORY]      default: this repository
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
breaches=0
breach() { breaches=$((breaches + 1)); echo "lint: $*"; }

# Runs a command that prints breaches, one a line, and adds what they mean.
report() {
  local meaning=$1 line
  shift
  while IFS= read -r line; do breach "$line: $meaning"; done < <("$@" || true)
}

# The text files of the repository: what git knows or would add; without git, everything outside build directories.
list_files() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files --cached --others --exclude-standard
  else
    find . \( -name .git -o -name 'build*' -o -name deps -o -name runs -o -name __pycache__ \) -prune -o -type f -print | sed 's|^\./||'
  fi
}
mapfile -t files < <(list_files | while IFS= read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done)
code() { printf '%s\n' "${files[@]}" | grep -E "^($1)/.*\.(h|cpp|cuh?)$" || true; }

# Includes run one way. A room may look into itself and into the rooms that stand after the colon, and into nothing else;
# no room stands after the colon of one above it, so there is no circle. Tests and dev/ may look everywhere.
rooms='
engine:
engine/io: engine
kernels/cpu: engine
kernels/emulator: engine
kernels/cuda: engine kernels/emulator
kernels: engine kernels/cpu kernels/cuda
kernels/block: engine kernels kernels/cpu kernels/cuda
kernels/depth: engine kernels kernels/cpu kernels/cuda kernels/block
kernels/attention: engine kernels kernels/cpu kernels/cuda kernels/depth
kernels/depth/streams: engine kernels kernels/cpu kernels/cuda kernels/block kernels/depth
kernels/optim: engine kernels kernels/block kernels/cpu kernels/cuda
kernels/reference: engine kernels/cpu
ranks: engine engine/io kernels kernels/optim kernels/cuda
cli: engine engine/io
data/bpe: engine engine/io
data: engine engine/io cli data/bpe
models: engine engine/io kernels/block kernels/attention kernels/depth kernels/reference
models/disk: engine engine/io data models
models/batch: engine kernels/block kernels/optim models
eval: engine engine/io kernels kernels/block kernels/attention kernels/optim ranks cli data models models/disk models/batch
eval/inside: engine engine/io kernels kernels/block kernels/attention kernels/optim cli data models models/disk models/batch eval
eval/inside/routing: engine engine/io kernels/block cli data models eval/inside
train/settings: engine engine/io kernels kernels/block kernels/optim ranks cli data models models/disk
train/step: engine engine/io kernels kernels/block kernels/optim ranks cli data models models/disk models/batch eval train/settings
train/run: engine engine/io kernels kernels/block kernels/attention kernels/depth kernels/optim ranks cli data models models/disk models/batch eval eval/inside eval/inside/routing train/settings train/step
train/lab: engine engine/io kernels kernels/block kernels/optim ranks cli data models models/disk models/batch eval eval/inside eval/inside/routing train/settings train/step train/run
train: engine engine/io kernels ranks cli data models models/disk models/batch eval train/settings train/step train/run train/lab

'
# file:line: room -> room, for every include of the repository's own files.
includes() {
  code "$all_rooms|tests|dev" | xargs grep -HnE '^ *# *include *"' |
    sed -E 's|^(([^:]*)/[^/:]*:[0-9]+):.*"([^"]*)/[^"/]*".*|\1: \2 -> \3|'
}
all_rooms='engine|cli|kernels|ranks|data|models|eval|train'
declare -A may_include=()
while IFS=: read -r room others; do
  [ -z "$room" ] && continue
  may_include[$room]=" $room$others "
  for other in $others; do
    [ -n "${may_include[$other]:-}" ] || breach "tests/lint.sh: $room may include $other, which does not stand above it"
  done
done <<<"$rooms"
includes >"$work/includes"
while read -r where from _ to; do
  case $from in tests* | dev*) continue ;; esac
  [[ ${may_include[$from]:-} == *" $to "* ]] || breach "$where $from may not include $to"
done <"$work/includes"
# Models see nodes, never a raw kernel, but for what runs them; only .cu and the CUDA rooms see CUDA.
raw_kernels() { code models | grep -v '^models/batch/' | xargs grep -HnE '^ *# *include *"kernels/' | grep -v '/ops\.h"'; }
report "models/ may include a kernel's ops.h only" raw_kernels
raw_cuda() {
  code "$all_rooms" | grep -vE '\.cuh?$|^kernels/cuda/' | xargs grep -HnE '^ *# *include *[<"](cuda|cublas|[^">]*\.cuh)'
}
report "only .cu, .cuh and kernels/cuda/ may include CUDA" raw_cuda
raw_library() { code "$all_rooms" | grep -v "^ranks/comm_$1\.cpp$" | xargs grep -HnE "^ *# *include *[<\"]([^\">]*/)?$1\.h"; }
report "only ranks/comm_mpi.cpp may include MPI" raw_library mpi
report "only ranks/comm_nccl.cpp may include NCCL" raw_library nccl

# A room of more than five files has a page: what it is, the rule above in words, where to begin reading.
for room in $(code "$all_rooms" | sed 's|/[^/]*$||' | sort | uniq -c | awk '$1 > 5 {print $2}'); do
  page=$room/README.md others=${may_include[$room]:-}
  if [ ! -f "$page" ]; then breach "$page: is missing, but $room has more than five files"; continue; fi
  [ "$(wc -l <"$page")" -le 20 ] || breach "$page: more than 20 lines"
  others=$(sed -E 's/^ *[^ ]+ *//; s/ +$//; s/ +/, /g' <<<"$others")
  [[ $(tr -s '\n ' ' ' <"$page") == *"May include: ${others:-no other room}."* ]] ||
    breach "$page: it must say: May include: ${others:-no other room}."
done

# A by-hand file has everything inside, to be read and compiled alone.
by_hand_headers() { code train | grep '_by_hand\.cpp$' | xargs -r grep -HnE '^ *# *include *"'; }
report "a by-hand file includes no header of the project: write what it needs into the file" by_hand_headers

# A kernel family is complete: X.h with X.cpp, X.cu and tests/kernels/test_X.cpp. X_*.h belongs to X, and ops.h to the room.
for header in $(code kernels/block; code kernels/attention; code kernels/depth; code kernels/optim); do
  name=$(basename "$header" .h) room=$(dirname "$header")
  if [[ $header != *.h || $name == ops || ! -f $room/$name.cu ]]; then continue; fi
  for part in "$room/$name.cpp" "tests/kernels/test_$name.cpp"; do
    [ -f "$part" ] || breach "$header: $part is missing"
  done
done

# Files that fit in a head. A by-hand file is one on purpose.
for file in $(code "$all_rooms|tests|dev"); do
  lines=$(wc -l <"$file") max_lines=600
  if [[ $file == train/*_by_hand.cpp ]]; then max_lines=900; fi
  [ "$lines" -le $max_lines ] || breach "$file: $lines lines, more than $max_lines"
done

# Lines that fit on a screen.
long_lines() {
  printf '%s\0' "${files[@]}" | grep -zE '\.(h|cpp|cuh?|py)$|^(docs/.*|[A-Z]+)\.md$' |
    xargs -0 awk 'length > 120 {print FILENAME ":" FNR}'
}
report "a line of more than 120 characters" long_lines

# The example of engine/tape.h is the one that tests/engine/test_tape.cpp runs.
[ ! -f engine/tape.h ] || diff <(sed -n 's|^//   ||p' engine/tape.h) <(sed -n '/These eight lines/,/tape.run/{/These eight lines/d;s/^  //p}' tests/engine/test_tape.cpp) ||
  breach "engine/tape.h: its example is not that of tests/engine/test_tape.cpp"

# What no text file may hold. The patterns are written so that they do not match themselves.
search() { printf '%s\0' "${files[@]}" | xargs -0 grep -HnIE "$@" | cut -c1-160; }
search_except_makefile() { search "$@" | grep -vE '^(.*/)?Makefile:'; }
report "a path of one machine" search '(^|[^A-Za-z0-9_.)}*-])/(work|opt|home|root|Users)(/|["'"'"' ]|$)'
report "trailing space" search '[ '$'\t'']$'
report "a tab" search_except_makefile $'\t'

# Names have the field's words. banned_names ROOMS WORDS: lists where code has one of these words.
banned_names() { code "$1" | xargs grep -HnowE "$2" | grep -v ':most_likely$'; }
everywhere="$all_rooms|tests|dev"
report "write max_x or min_x" banned_names "$everywhere" '(most|least)_[a-z0-9_]+'
report "write bf16_copy or bf16_only" banned_names "$everywhere" '[a-z]+_narrow_only|(reads|refresh|allocate)_narrow|narrow_(only|begin|bytes|copy)'
report "write accumulation_type" banned_names "$everywhere" 'Wide|wide\((Dtype|real_?)'
report "write overwrite or accumulate" banned_names "$everywhere" 'bool acc(_[a-z0-9]+)?|(set|store)_or_add|can_set|only_adds'
report "write replica" banned_names 'models|train|eval' '(max|run|of)_lanes?_?|Lanes?'
report "write time" banned_names engine '[Tt]icks?'
report "write record_batch" banned_names "$everywhere" record_replay

# Every path of this repository, and every source file, that a comment or a page names is there. X, NAME, <...> and *
# stand for any part of one. The lab book may name what was.
named_paths() {
  printf '%s\0' "${files[@]}" | grep -zE '\.(h|cpp|cuh?|py|sh|md|yml)$|(^|/)(CMakeLists\.txt|Makefile)$' |
    grep -zv '^dev/LOG\.md$' | xargs -0 awk '
    function after(mark, at) { at = index($0, mark); return at ? substr($0, at + length(mark)) : "" }
    { text = FILENAME ~ /\.(h|cpp|cuh?)$/ ? after("//") : FILENAME ~ /\.(py|md)$/ ? $0 : after("#") }
    { while (match(text, /[A-Za-z0-9_.<>*\/-]+/)) {
        path = substr(text, RSTART, RLENGTH)
        text = substr(text, RSTART + RLENGTH)
        sub(/[.-]+$/, "", path)
        if (path ~ /^\.\.?\//) { folder = FILENAME; sub(/[^\/]*$/, "", folder); path = folder path }
        while (sub(/[^\/]+\/\.\.\//, "", path)) {}
        gsub(/<[A-Za-z ]*>/, "*", path)
        while (match(path, /(^|[\/_])(X|NAME)([._\/]|$)/)) sub(/X|NAME/, "*", path)
        print FILENAME ":" FNR, path } }'
}
missing_paths() {
  local -A there=()
  local file where path
  for file in "${files[@]}"; do
    there[$file]=1 there[${file##*/}]=1
    while [[ $file == */* ]]; do file=${file%/*} there[$file]=1 there[$file/]=1; done
  done
  local names
  names=$(printf '%s\n' "${!there[@]}")
  while read -r where path; do
    [[ $path == */* && -n ${there[${path%%/*}/]:-} || $path =~ ^[A-Za-z0-9_*]+\.(h|cpp|cuh?)$ ]] || continue
    [ -z "${there[$path]:-}" ] || continue
    [[ $path == *\** ]] && grep -qE "^$(sed 's/\./\\./g; s/\*/.*/g' <<<"$path")$" <<<"$names" ||
      echo "$where: $path"
  done < <(named_paths | sort -u)
}
report "is named here, but is not there" missing_paths

# The rooms: lines of code, share of the whole, and how often each looks into which others.
declare -A lines_of=()
total=0
while read -r lines file; do
  [[ $file == total || $file != */* ]] && continue
  room=${file%/*}
  lines_of[$room]=$((${lines_of[$room]:-0} + lines)) total=$((total + lines))
done < <(code "$all_rooms|tests|dev" | xargs wc -l)
for room in $(printf '%s\n' "${!lines_of[@]}" | sort); do
  share=$((100 * lines_of[$room] / total))
  [ $share -le 30 ] || breach "$room/ holds $share % of the code, more than 30"
  looks=$(awk -v room="$room" '$2 == room && $4 != room {n[$4]++} END {for (o in n) print o " " n[o]}' "$work/includes" |
    sort | paste -sd, | sed 's/,/, /g')
  printf '%-20s %6d lines %3d %%  -> %s\n' "$room" "${lines_of[$room]}" "$share" "$looks"
done

[ $breaches = 0 ] || { echo "lint: $breaches breaches"; exit 1; }
echo "lint: ${#files[@]} files keep the rules"
