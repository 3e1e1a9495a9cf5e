#!/usr/bin/env bash
# Text into shards and back: every kind of input, stopped and killed at any moment, refused where something does not
# fit, and what trains and evaluates on it.   tests/system/test_prepare.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
prepare() { "$build/prepare" "$@"; }
field() { sed -nE "s/^  \"$2\": ([0-9.]+),?$/\1/p" "$1/manifest.json" | head -1; }
encode() { "$build/tokenize" --tokenizer t.json; }

tiny_tokenizer >t.json

# --- what is written ---------------------------------------------------------------------------------------------
mkdir -p texts/deeper
printf 'the cat' >texts/a.txt
printf 'no the' >texts/deeper/B.MD
printf 'not text' >texts/picture.png
printf 'hidden' >texts/.hidden.txt
: >texts/empty.txt
expect 0 '^two: 2 documents, 13 bytes of text, 11 tokens ' prepare --tokenizer t.json --val 0.45 --out two texts texts/a.txt
grep -q '^6 tokens for training, 5 for validation$' output || fail "nobody says what is for validation"
grep -q '^note: files of other names .*, passed over: 1$' output || fail "nobody says what was passed over"
grep -q '^note: files that are named more than once.*: 1 (texts/a.txt)$' output || fail "nobody says that a file is there twice"
grep -q '^empty documents, left out: 1$' output || fail "nobody says that a document is empty"
[ "$(ids two/train_000001.bin) $(ids two/val_000001.bin)" = "$(printf 'the cat' | encode) 256 $(printf 'no the' | encode) 256" ] ||
  fail "the tokens are others: $(ids two/train_000001.bin) $(ids two/val_000001.bin)"
cmp -s t.json two/tokenizer.json || fail "the tokenizer was not copied"
[ "$(field two bytes)" = 13 ] || fail "the manifest counts other bytes"
grep -q "$(sha256sum <texts/a.txt | cut -d' ' -f1)" two/manifest.json || fail "the manifest has no digest of a.txt"
[ ! -e two.partial ] || fail "something is left of the work"

# --- the same text in every form ---------------------------------------------------------------------------------
# 3,000 documents, with quotes, line breaks and other alphabets; every seventh twice as long.
awk 'BEGIN {
  srand(7)
  n = split("the,cat,\\\"sat\\\",on\\n,the,\\u00e9l\\u00e8ve,\\ud83d\\ude00,mat,1234", words, ",")
  for (d = 0; d < 3000; d++) {
    printf "{\"id\": %d, \"text\": \"", d
    for (w = (d % 7 == 0 ? 200 : 100); w > 0; w--) printf "%s ", words[1 + int(rand() * n)]
    print "\"}"
  }
}' >lines.jsonl
gzip -k lines.jsonl
(head -1000 lines.jsonl | gzip; tail -n +1001 lines.jsonl | gzip) >parts.jsonl.gz  # one packed file behind another
run() { prepare --tokenizer t.json --val 0.05 --shard-tokens 500000 "$@"; }
expect 0 '^plain: 3,000 documents, ' run --out plain lines.jsonl
[ "$(awk '{ if (length > most) most = length } END { print most }' output)" -le 80 ] || fail "a line has more than 80 columns"
[ -e plain/train_000002.bin ] || fail "there is only one shard"
[ "$(sed -nE '/"val": \{/,/\}/s/^ *"documents": ([0-9]+).*/\1/p' plain/manifest.json)" -gt 90 ] || fail "few documents for validation"
OMP_NUM_THREADS=1 expect 0 'gz: 3,000 documents' run --out gz lines.jsonl.gz
same plain gz
expect 0 'parts: 3,000 documents' run --out parts parts.jsonl.gz
same plain parts
expect 0 'named: 3,000 documents' run --out named "lines.json[l]"
same plain named
for packed in lines.jsonl lines.jsonl.gz; do
  rm -rf piped
  run --out piped - <$packed >output 2>&1 || fail "no shards from standard input: $packed"
  same plain piped
done
if command -v zstd >/dev/null; then
  zstd -q lines.jsonl -o oddly.gz  # what it is, its bytes say
  expect 0 'zst: 3,000 documents' run --out zst oddly.gz
  same plain zst
else
  echo "skipped: zstd is not here"
fi
sed 's/"text"/"content"/' lines.jsonl >content.jsonl
expect 0 'content: 3,000' run --field content --out content content.jsonl
same plain content
expect 0 'plain is complete already' run --out plain lines.jsonl
if run --out piped - </dev/null >output 2>&1; then
  grep -q 'standard input .* was not read, and not compared' output || fail "another standard input was taken for the same"
fi
touch lines.jsonl
expect 0 'plain is complete already' run --out plain lines.jsonl

# --- stopped and killed ------------------------------------------------------------------------------------------
for i in 1 2 3 4 5 6; do cat lines.jsonl; done >long.jsonl
expect 0 'whole: 18,000 documents' run --out whole long.jsonl
# Begins with the text up to a byte, waits for more (a pipe holds 64 KB: the rest was read) and gets the signal.
mkfifo pipe
interrupt() {
  local signal=$1 bytes=$2 pid code
  shift 2
  "$build/prepare" --tokenizer t.json --val 0.05 --shard-tokens 500000 "$@" - <pipe >output 2>&1 &
  pid=$!
  exec 3>pipe
  head -c "$bytes" long.jsonl >&3
  [ "$signal" = KILL ] || sleep 0.3  # so that it waits for what does not come
  kill -$signal $pid  # in the background SIGINT is ignored
  wait $pid 2>/dev/null
  code=$?
  exec 3>&-
  [ $code = $([ $signal = KILL ] && echo 137 || echo 75) ] || fail "exit code $code after SIG$signal at byte $bytes"
}
interrupt TERM 5000000 --out waits
grep -q '^stopped after [0-9,]* documents; the same command' output || fail "it does not say how to go on"
if "$build/prepare" --tokenizer t.json --val 0.05 --shard-tokens 500000 --out waits - < <(tail -n +2 long.jsonl) >output 2>&1; then
  fail "another text was taken for the rest"
fi
grep -q 'standard input is not what it was when waits.partial was begun' output || fail "nobody says that the text is another"
interrupt KILL 10000000 --out waits  # its files are longer now than the state says
interrupt TERM 10000000 --out waits
grep -q '^going on after' output || fail "it did not go on"
run --out waits - <long.jsonl >output 2>&1 || fail "it does not go on from standard input"
grep -q '^going on after' output || fail "it did not go on"
same waits whole
interrupt TERM 0 --out nothing
grep -q '^stopped after 0 documents' output || fail "it does not say that nothing came"
# With inputs that are mended, and with changed ones: what was encoded of them must be as it was.
head -8000 long.jsonl >first.jsonl
tail -n +8001 long.jsonl >second.jsonl
expect 0 'both: 18,000' run --out both first.jsonl second.jsonl
cp -p second.jsonl good.jsonl
printf '{"text": ' >>second.jsonl
expect 65 'second.jsonl, line 10001: is not a JSON object' run --out mended first.jsonl second.jsonl
grep -q '^[0-9,]* documents kept; the same command goes on' output || fail "it does not say that the work is kept"
cp -r mended.partial begun.partial
cp -p good.jsonl second.jsonl
touch first.jsonl  # another time, the same text
expect 0 '^going on after' run --out mended first.jsonl second.jsonl
same mended both
expect 64 'begun.partial has --val 0.05, now it is 0.1; remove begun.partial' run --val 0.1 --out begun first.jsonl second.jsonl
sed -i '1s/cat/dog/;1s/the/dog/' second.jsonl
expect 64 'second.jsonl is not what it was when begun.partial was begun' run --out begun first.jsonl second.jsonl
cp -p good.jsonl second.jsonl
sed -i '1s/the/dog/' first.jsonl
expect 64 'first.jsonl was changed since begun.partial was begun' run --out begun first.jsonl second.jsonl

# --- refused -----------------------------------------------------------------------------------------------------
refuses() {
  expect "$@" --out refused
  [ ! -e refused ] || fail "refused is there: $*"
  rm -rf refused.partial
}
refuses 64 'either --tokenizer FILE or --vocab N' prepare texts
refuses 64 'excludes' prepare --tokenizer t.json --vocab 300 texts
refuses 66 'missing.txt' prepare --tokenizer t.json missing.txt
refuses 66 'none[*].*no such file' prepare --tokenizer t.json 'none*.txt'
refuses 66 'missing.json' prepare --tokenizer missing.json texts
if [ -c /dev/full ]; then
  head -c 100000 long.jsonl | "$build/tokenize" --tokenizer t.json >/dev/full 2>output
  [ $? = 74 ] && grep -q 'standard output: No space left on device' output || fail "tokenize on a full disk: $(cat output)"
fi
mkdir -p bare/one bare/two && : >bare/one/picture.png
refuses 66 'bare/[*]: no file of text' prepare --tokenizer t.json 'bare/*'
refuses 65 'no text in these inputs' prepare --tokenizer t.json texts/empty.txt
refuses 64 '--eot the cat is no token of t.json, but [0-9]+' prepare --tokenizer t.json --eot 'the cat' texts
sed 's/<|endoftext|>/<|other|>/' t.json >no_eot.json
refuses 64 'no_eot.json has no end-of-text token.*--eot TOKEN' prepare --tokenizer no_eot.json texts
refuses 64 '--eot <.other.>: --vocab --style gpt2 trains' prepare --vocab 300 --eot '<|other|>' texts
printf '[{"text": "one"}]' >array.json
refuses 65 'array.json: is a JSON array' prepare --tokenizer t.json array.json
expect 64 "out: the name of the directory to make is empty" prepare --tokenizer t.json --out '' texts
printf '{"text": "fine"}\n\n{"text": ' >broken.jsonl
refuses 65 'broken.jsonl, line 3: is not a JSON object in UTF-8' prepare --tokenizer t.json broken.jsonl
printf '{"text": "fine"}\n["text"]\n' >list.jsonl
refuses 65 'list.jsonl, line 2: is no JSON object' prepare --tokenizer t.json list.jsonl
refuses 65 'lines.jsonl, line 1: has no field "body", but id, text' prepare --tokenizer t.json --field body lines.jsonl
refuses 65 'lines.jsonl, line 1: "id" is no text: 0' prepare --tokenizer t.json --field id lines.jsonl
printf 'fine\xff' >latin.txt
refuses 65 'latin.txt: the text is not UTF-8: wrong at byte 4, .xff; if it is Latin-1: iconv' prepare --tokenizer t.json latin.txt
head -c 20000 lines.jsonl.gz >early.jsonl.gz
refuses 65 'early.jsonl.gz: the gzip data ends early at byte 20000' prepare --tokenizer t.json early.jsonl.gz
(head -c 5000 lines.jsonl.gz; head -c 500 /dev/zero; tail -c +5500 lines.jsonl.gz) >damaged.gz
refuses 65 'damaged.gz: the gzip data is damaged' prepare --tokenizer t.json damaged.gz
mkdir full && echo mine >full/file
expect 64 'full exists and was not made by this program' prepare --tokenizer t.json --out full texts
mkdir full2.partial && echo mine >full2.partial/.tmp-file
expect 64 'full2.partial exists and was not made' prepare --tokenizer t.json --out full2 texts
[ -e full2.partial/.tmp-file ] || fail "somebody's file was removed"
cp -r plain/ gone && cp content.jsonl changed.jsonl
expect 0 'later: 3,000' run --field content --out later changed.jsonl
sleep 0.01
sed -i 's/cat/dog/' changed.jsonl
expect 64 'changed.jsonl was changed since later was made' run --field content --out later changed.jsonl
touch -d '2 days ago' changed.jsonl  # as where an older copy is put back
expect 64 'changed.jsonl was changed since later was made' run --field content --out later changed.jsonl
(ulimit -f 300; run --out disk lines.jsonl >output 2>&1 </dev/null)
code=$?
[ $code = 74 ] || fail "exit code $code of a full disk, want 74"
[ ! -e disk ] || fail "a full disk left something that looks complete"
expect 0 'disk: 3,000' run --out disk lines.jsonl
same disk plain

# --- training and evaluating on it -------------------------------------------------------------------------------
tiny=(--width 16 --ffn 24 --layers 1 --heads 2 --batch 4 --seq 16 --eval-samples 8 --save-every 2)
expect 0 'step 2: test loss' "$build/train_llama" --data plain "${tiny[@]}" --steps 2 --out run
cmp -s t.json run/step_00000002/tokenizer.json || fail "the model does not carry the tokenizer"
grep -q '"vocab_size": 259' run/step_00000002/config.json || fail "the vocabulary is not the tokenizer's"
grep -q '"eos_token_id": 256' run/step_00000002/config.json || fail "config.json does not say what ends a text"
expect 0 'step 4: test loss' "$build/train_llama" --resume --out run --steps 4
cp -r run moved-run && mv plain moved
expect 0 'step 5: test loss' "$build/train_llama" --resume --out moved-run --steps 5 --data moved
mv moved plain
expect 64 'there is no file or directory of that name' "$build/train_llama" --data tokens "${tiny[@]}" --steps 2 --out x
# A tokenizer whose end-of-text token has no usual name: the shards, and what trains on them, know the one that was
# chosen, by the flag or by what is beside the tokenizer's file.
expect 0 'named_eot: ' prepare --tokenizer no_eot.json --eot '<|other|>' --val 0.05 --out named_eot lines.jsonl
mkdir -p own && cp no_eot.json own/tokenizer.json && echo '{"eos_token": {"content": "the"}, "kept": 1}' >own/tokenizer_config.json
expect 0 'beside_eot: ' prepare --tokenizer own --val 0.05 --out beside_eot lines.jsonl
grep -q '"kept": 1' beside_eot/tokenizer_config.json || fail "what was beside the tokenizer is lost"
for eot in named_eot:256 beside_eot:258; do
  expect 0 'step 2: test loss' "$build/train_llama" --data "${eot%:*}" "${tiny[@]}" --steps 2 --out "run-${eot%:*}"
  grep -q "\"eos_token_id\": ${eot#*:}" "run-${eot%:*}/step_00000002/config.json" || fail "config.json has another end of a text: $eot"
done
expect 0 'bits per byte' "$build/evaluate" --model run-named_eot --data named_eot --samples 4
gzip -k texts/a.txt  # bytes of text, not of gzip
expect 65 'a.txt.gz: has 7 bytes' "$build/train_llama" --data text:texts/a.txt.gz "${tiny[@]}" --steps 2 --out x
rm texts/a.txt.gz
expect 0 'bits per byte' "$build/evaluate" --model run --data plain --samples 4
grep -q "run's validation data" output || fail "evaluate does not find the validation shards"
expect 0 'bits per byte' "$build/evaluate" --model run --data text:texts/a.txt --seq 16
expect 0 '^scored 5 of 6 tokens$' "$build/evaluate" --model run --data text:texts/a.txt --tokenizer t.json --seq 16
# The targets behind "the" are four bytes and the end of the text.
awk '/^loss/ {loss = $2} /^bits per byte/ {bits = $4}
     END {off = loss / log(2) * 5 / 4 - bits; exit !(off < 1e-3 && off > -1e-3)}' output || fail "the bits per byte are others"
expect 0 'step 2: test loss' "$build/train_llama" --data 'text:lines.jsonl' --tokenizer t.json "${tiny[@]}" --steps 2 --out text_run
cd texts
expect 0 'step 3: test loss' "$build/train_llama" --resume --out ../text_run --steps 3
cd ..
expect 0 'loss' "$build/evaluate" --model text_run --data text:lines.jsonl --samples 4
expect 0 'step 2: test loss' "$build/train_llama" --init run --data text:lines.jsonl --batch 4 --seq 16 --steps 2 --out tuned
cmp -s t.json tuned/step_00000002/tokenizer.json || fail "--init: the tokenizer is lost"
expect 0 'loss' "$build/gradients" --model run --tokens text:texts/a.txt --seq 4 --out g.safetensors
expect 64 '[-]-tokenizer t.json is for text:' "$build/train_llama" --data plain --tokenizer t.json "${tiny[@]}" --steps 2 --out x
expect 64 'is for text:.*own words' "$build/train_llama" --data arith:3 --tokenizer t.json "${tiny[@]}" --steps 2 --out x
sed 's/"t h", "th e"/"t h"/' t.json >fewer.json
expect 64 'has the tokenizer' "$build/train_llama" --init run --data text:lines.jsonl --tokenizer fewer.json --batch 4 --seq 16 --steps 2 --out x
cp fewer.json gone/tokenizer.json
expect 65 'gone/tokenizer.json: is not the tokenizer that gone/train_000001.bin was made with' \
  "$build/train_llama" --data gone "${tiny[@]}" --steps 2 --out x
rm gone/tokenizer.json
expect 66 'gone/tokenizer.json is missing' "$build/train_llama" --data gone "${tiny[@]}" --steps 2 --out x
expect 66 'texts: has no train_.*text:./texts' "$build/train_llama" --data ./texts "${tiny[@]}" --steps 2 --out x
tail -c +1025 plain/train_000001.bin >stream.bin
expect 65 'magic number is [0-9]+.*uint16:stream.bin' "$build/train_llama" --data stream.bin --vocab 259 "${tiny[@]}" --steps 2 --out x
expect 0 'step 2: test loss' "$build/train_llama" --data uint16:stream.bin --vocab 259 "${tiny[@]}" --steps 2 --out stream
expect 65 'leave out uint16:' "$build/train_llama" --data uint16:plain/train_000001.bin --vocab 259 "${tiny[@]}" --steps 2 --out x

# --- many small files in little memory ---------------------------------------------------------------------------
mkdir small
for i in $(seq 3000); do echo "the cat number $i" >small/$i.txt; done
printf '#!/bin/sh\nexit 9\n' >broken-python && chmod +x broken-python
(failures=0; ulimit -v 1000000
  expect 0 'small-shards: 3,000 documents' prepare --tokenizer t.json --out small-shards small
  # Every document is kept for the vocabulary: the failure is that of what stands in for Python.
  PYTHON=./broken-python expect 74 'ended with exit code 9' prepare --vocab 300 --out small-vocab small
  exit $failures) || failures=$((failures + 1))

# --- stopped while another program works ---------------------------------------------------------------------------
printf '#!/bin/sh\nexec sleep 60\n' >slow-python && chmod +x slow-python
: >output  # the child may empty it after we have looked
PYTHON=./slow-python "$build/prepare" --vocab 300 --out slow lines.jsonl >output 2>&1 &
pid=$!
for try in $(seq 1200); do grep -q '^training a vocabulary' output && break; sleep 0.05; done
kill -TERM $pid
wait $pid
code=$?
[ $code = 75 ] || fail "exit code $code of a stopped training, want 75"

# --- a vocabulary of one's own -----------------------------------------------------------------------------------
PYTHON=no-such-python expect 66 'no program no-such-python.*pip install tokenizers' prepare --vocab 300 --out vocab texts
python=${PYTHON:-python3}
if "$python" -c 'import tokenizers' 2>/dev/null; then
  for style in gpt2 llama3; do
    expect 0 "^$style: 3,000 documents" prepare --vocab 300 --style $style --out $style lines.jsonl
    expect 0 "^again-$style: 3,000 documents" prepare --vocab 300 --style $style --out again-$style lines.jsonl
    same $style again-$style
    expect 0 'step 2: test loss' "$build/train_llama" --data $style "${tiny[@]}" --steps 2 --out run-$style
    cmp -s $style/tokenizer.json run-$style/step_00000002/tokenizer.json || fail "$style: the model has another tokenizer"
  done
else
  PYTHON=$python expect 66 'tokenizers' prepare --vocab 300 --out vocab texts
  echo "skipped: $python has no package tokenizers"
fi

conclude prepare "everything is as it should be"
