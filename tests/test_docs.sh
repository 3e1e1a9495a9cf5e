#!/usr/bin/env bash
# tests/docs.py and tests/doc_commands.sh find no mistake in README.md, docs/ and --help. First, that they find the
# mistakes that are planted in a small tree.
#   tests/test_docs.sh BUILD_DIR [pages]      pages: without the commands, which take most of the time
set -uo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "skipped: $python is not here"; exit 77; }
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
found() {
  [ "$2" = "$3" ] && return
  failures=$((failures + 1))
  echo "FAIL: $1 does not find what was planted:"
  diff <(echo "$2") <(echo "$3")
}

mkdir -p "$work"/{docs,dev,engine,eval,tests,train}
cp tests/banned_words.txt "$work/tests/"
cp Makefile CMakePresets.json "$work/"
touch "$work/dev/there.py" "$work/train/train_lime.cpp"
echo '// a seamless tape' >"$work/engine/tape.h"
echo 'Usage: a program that buries tensors' >"$work/help"
cat >"$work/docs/page.md" <<'PAGE'
# A page: of `words`

One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty, and [twenty-one](#a-page-of-words) `--loss` 23 24 25 26 27 28 29 30 31 32 33 34. Short.
* One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
  nineteen twenty, and [twenty-one](gone.md) `not --loss` 23 24 25 26 27 28 29 30 31 32 33 34 35.

[a heading](#gone), [another](../README.md#front) and [a third][gone]

The tally of `tally`, `--no-such` flag, least_x
and what was told
apart: of course.
PAGE
{ echo '# Front'; printf '\n%.0s' {1..160}; } >"$work/README.md"
expected="--help:1: 'buries': write poison dead buffers
README.md:161: more than 160 lines
docs/page.md:5: 36 words: One two three four five six seven eight ...
docs/page.md:6: gone.md: there is no such file
docs/page.md:8: #gone: there is no such heading
docs/page.md:8: [gone] is not defined
docs/page.md:10: 'least_x': write max_x, min_x
docs/page.md:10: 'tally': write all-reduce of step statistics
docs/page.md:10: --no-such: no program has this flag
docs/page.md:11: 'told apart': write separated, distinguished
docs/page.md:12: 'of course': write nothing
engine/tape.h:1: 'seamless': write a measurement"
echo "--loss NAME" >>"$work/help"
found docs.py "$expected" "$("$python" tests/docs.py "$work" "$work/help")"

# In each line of these a mistake, but for the comments.
cat >"$work/docs/page.md" <<'PAGE'
```
# Taken: models, data and tokenizers need not be there, nor a launcher, and ... stands for more flags.
build/train_lime --data text:a.txt --preset 1b --device cuda --dtype bf16 --tokenizer a/b.json  # a flag: --stpes
mpirun -n 2 build/train_lime --resume --out x --steps 9 && build/compare --resume --out x
torchrun --no-python build/train_llama ... --init x --data 'text:a/b/*.txt' && build/generate --model x --prompt "a b"
for i in 1 2; do build/evaluate --model $i --data uint16:i.bin; done; build/tests -tc='*' ; make CUDA=1 train_myidea
# Not taken: names and values of flags, needs, architectures, tests, programs, targets, variables, scripts, presets.
build/train_lime --stpes 3
build/train_lime --preset arith-quick --dtype fp17
build/compare --arch llama,limee
build/compare --arch lime:windows=1 --data tokens
build/train_lime --data arith:6 --heads 3 --width 32
build/evaluate --model x --data \
  y --answer 3
build/generate --model x --prompt y --top-k 3
build/curves --out a.svg --x tokns x
build/tests -tc='no such case'
build/gone --model x
make gone
make GONE=1 train_lime
python dev/gone.py
dev/there.py --gone
cmake --preset gone
curl x
```
    build/transplant --model m --gone
In prose, `make train_lime` and `make train_gone`, `build/analyze --whta` and `build/train_gone`.
PAGE
if [ "${2:-}" != pages ]; then
  expected=$(printf 'docs/page.md:%s\n' 8 9 10 11 12 13 15 16 17 18 19 20 21 22 23 24 26 27 27 27)
  found doc_commands.sh "$expected" \
    "$(tests/doc_commands.sh "$build" "$work" | grep -oE '^docs/page.md:[0-9]+' | sort -t: -k2n)"
  tests/doc_commands.sh "$build" . || failures=$((failures + 1))
fi

others="analyze average compare curves evaluate figures generate gradients prepare score tokenize transplant"
for program in $(cd "$build" && echo train_*) $others; do "$build/$program" --help-all || failures=1; done >"$work/help"
for part in run time report; do "$build/sweep" $part --help || failures=1; done >>"$work/help"
"$python" tests/docs.py . "$work/help" || failures=$((failures + 1))
[ $failures = 0 ] && echo "docs: as the programs are"
