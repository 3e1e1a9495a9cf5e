#!/usr/bin/env bash
# The rules of the house that a compiler does not check. Prints every breach and ends with exit code 1 if there is one.
#   tests/lint.sh [DIRECTORY]      default: this repository
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

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
    find . \( -name .git -o -name 'build*' -o -name runs -o -name __pycache__ \) -prune -o -type f -print | sed 's|^\./||'
  fi
}
mapfile -t files < <(list_files | while IFS= read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done)
code() { printf '%s\n' "${files[@]}" | grep -E "^($1)/.*\.(h|cpp|cuh?)$" || true; }

# Includes run one way: train, eval, tests -> models, data -> engine -> kernels. For each room, what it may include.
declare -A may_include=(
  [kernels]='kernels/.*|engine/(check|dtype|tensor|stream)\.h'
  [engine]='(engine|kernels)/.*'
  [data]='data/.*|engine/(check|rng|file|json|numbers|printable)\.h'
  [models]='(models|engine)/.*'
  [train]='(train|eval|models|data|engine|kernels)/.*'
  [eval]='(train|eval|models|data|engine|kernels)/.*'
  [tests]='(tests|train|eval|models|data|engine|kernels)/.*'
)
forbidden_includes() {
  xargs -r grep -HnE '^ *# *include *"' <<<"$2" | grep -vE "\"($1)\"" | sed -E 's/^([^:]*:[0-9]+):.*"(.*)".*/\1: "\2"/'
}
for room in "${!may_include[@]}"; do
  report "$room/ may not include this" forbidden_includes "${may_include[$room]}" "$(code "$room")"
done

# A kernel family is complete.
for header in $(code kernels | grep '\.h$'); do
  name=$(basename "$header" .h)
  case $name in
    cpu | cuda | vec | amx | gemm | gemm_bf16 | gemm_bf16_tile | gemm_split | attention_tile | attention_cpu | attention_amx | hyper_token) continue ;;
  esac
  for part in kernels/$name.cpp tests/test_$name.cpp; do
    [ -f "$part" ] || breach "$header: $part is missing"
  done
done

# Files that fit in a head.
for file in $(code 'engine|kernels|models|data|train|eval|tests|dev'); do
  lines=$(wc -l <"$file")
  [ "$lines" -le 600 ] || breach "$file: $lines lines, more than 600"
done

# Lines that fit on a screen.
long_lines() { printf '%s\0' "${files[@]}" | grep -zE '\.(h|cpp|cuh?|py)$' | xargs -0 awk 'length > 120 {print FILENAME ":" FNR}'; }
report "a line of more than 120 characters" long_lines

# What no text file may hold. The patterns are written so that they do not match themselves.
search() { printf '%s\0' "${files[@]}" | xargs -0 grep -HnIE "$@" | cut -c1-160; }
search_except_makefile() { search "$@" | grep -vE '^(.*/)?Makefile:'; }
report "a path of one machine" search '(^|[^A-Za-z0-9_.)}*-])/(work|opt|home|root|Users)(/|["'"'"' ]|$)'
report "trailing space" search '[ '$'\t'']$'
report "a tab" search_except_makefile $'\t'

[ $breaches = 0 ] || { echo "lint: $breaches breaches"; exit 1; }
echo "lint: ${#files[@]} files keep the rules"
