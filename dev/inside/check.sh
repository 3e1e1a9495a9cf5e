#!/usr/bin/env bash
# Checks what the program analyze measures against short computations of the same with NumPy, SciPy or scikit-learn, on
# tiny models of every architecture.   dev/inside/check.sh BUILD_DIR [SUBJECT...]
#
# A subject is a SUBJECT.py beside this file, which ends with 0 where `SUBJECT.py DIR` finds the numbers of
# DIR/SUBJECT.json in the tensors of DIR/values.safetensors. Its docstring has, in lines of their own, what analyze is
# called with:
#   dump: hidden.* value.*       --dump; none: no dump
#   flags: --sequences 8         beside --what SUBJECT, in place of --sequences 4 --length 24 --seed 5 (may be left out)
#   architectures: all bpe       which models; all: one of every architecture (may be left out: all)
# A file without a line `dump:` helps the others and is no subject. The models are ARCH, of bytes, on the backbone LLaMA
# (but gpt2), ARCH-gpt2, on the other backbone, and bpe, a LLaMA with tokens of words: " is are was were the and of to".
#
# Exit 0: all agree. 1: one does not. 77: skipped, no Python with NumPy, SciPy and scikit-learn ($PYTHON, else python3).
set -euo pipefail
build=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
shift
python=${PYTHON:-python3}
cd "$here/../.."  # Python looks for modules there first
"$python" -c 'import numpy, scipy, sklearn' 2>/dev/null ||
  { echo "skipped: $python with numpy, scipy and sklearn is not here"; exit 77; }
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)  # files are synchronised with a disk, one by one
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
data=text:docs/walk.md

# A tokenizer of bytes and a few words.
mkdir "$work/tokenizer"
"$python" - "$work/tokenizer/tokenizer.json" <<'PYTHON'
import json, sys
kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
moved = [byte for byte in range(256) if byte not in kept]
names = [chr(b) if b in kept else chr(256 + moved.index(b)) for b in range(256)]
vocab, merges = {name: b for b, name in enumerate(names)}, []
for word in "the and of to is are was were".split():
  made = "\u0120"
  for letter in word:
    if made + letter not in vocab:
      merges.append(f"{made} {letter}")
      vocab[made + letter] = len(vocab)
    made += letter
json.dump({"added_tokens": [], "normalizer": None, "post_processor": None, "decoder": {"type": "ByteLevel"},
           "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
           "model": {"type": "BPE", "vocab": vocab, "merges": merges}}, open(sys.argv[1], "w"))
PYTHON

# The words of a docstring's line, by its key.
line() { sed -nE "/\"\"\"/,/\"\"\"/s/^$1: *//p" "$here/$2.py" | head -1; }
archs=()
for trainer in "$build"/train_*; do
  name=${trainer##*/train_}
  [ "$name" = inheritune ] || [[ $name = *.* ]] || archs+=("$name")  # inheritune makes its models of others
done
# Trains the model NAME, once.
make_model() {
  [ -d "$work/$1" ] && return
  local arch=${1%-gpt2} more=(--heads 4 --kv-heads 2)
  [ "$1" = "$arch" ] || more=(--heads 4 --backbone gpt2)
  [ "$arch" = gpt2 ] && more=(--heads 4)
  [ "$arch" = bpe ] && arch=llama && more+=(--tokenizer "$work/tokenizer")
  "$build/train_$arch" --data $data --seq 48 --width 16 --ffn 24 --layers 4 "${more[@]}" --steps 6 --warmup 1 --lr 0.01 \
    --batch 4 --eval-samples 1 --out "$work/$1" >"$work/output" 2>&1 ||
    { echo "train_$arch: $(tail -1 "$work/output")"; exit 1; }
}

failures=0
check() {
  local subject=$1 model=$2 dump=() flags=()
  make_model "$model"
  read -r -a dump <<<"$(line dump "$subject")"
  read -r -a flags <<<"$(line flags "$subject")"
  local call=() usual
  for usual in "--sequences 4" "--length 24" "--seed 5"; do
    [[ " ${flags[*]} " = *" ${usual% *} "* ]] || read -r -a call <<<"${call[*]} $usual"
  done
  set -f  # a name with a * is no file here
  "$build/analyze" --model "$work/$model" --data $data --what "$subject" --out "$work/out-$subject-$model" \
    "${call[@]}" ${dump[0]:+--dump "${dump[@]}"} "${flags[@]}" >"$work/output" 2>&1 &&
    "$python" "$here/$subject.py" "$work/out-$subject-$model" >"$work/output" 2>&1
  local code=$?
  set +f
  echo "$subject of $model: $(tail -1 "$work/output")"
  [ $code = 0 ] || { sed 's/^/  | /' "$work/output" | tail -20; failures=$((failures + 1)); }
}

subjects=("$@")
[ $# -gt 0 ] || for file in "$here"/*.py; do
  subject=$(basename "$file" .py)
  if grep -qE '^dump:' "$file"; then subjects+=("$subject"); fi
done
for subject in "${subjects[@]}"; do
  models=$(line architectures "$subject")
  for model in ${models:-all}; do
    if [ "$model" = all ]; then
      for arch in "${archs[@]}"; do check "$subject" "$arch" || true; done
    else check "$subject" "$model" || true; fi
  done
done
[ $failures = 0 ] || { echo "$failures checks failed"; exit 1; }
