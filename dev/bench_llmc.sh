#!/usr/bin/env bash
# Compiles dev/bench_llmc.c with llm.c's CPU trainer, by the flags of its Makefile, and runs it.
#   LLMC=DIR dev/bench_llmc.sh FLAGS      DIR: a clone of github.com/karpathy/llm.c; CC: another compiler
set -euo pipefail
[ -f "${LLMC:?}/train_gpt2.c" ] || { echo "LLMC=$LLMC: there is no train_gpt2.c" >&2; exit 66; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${CC:-cc}" -Ofast -march=native -fopenmp -DOMP -Wno-unused-result -I"$LLMC" "$(dirname "$0")/bench_llmc.c" -lm \
  -o "$work/llmc" >&2
"$work/llmc" "$@"
