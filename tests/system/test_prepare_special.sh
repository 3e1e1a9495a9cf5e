#!/usr/bin/env bash
# What `prepare` does with tokens and texts that are not as they should be, with a tokenizer that is slow, and with the
# program that trains a vocabulary.   tests/system/test_prepare_special.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
published=$(cd "$(dirname "$0")/../published/tokenizers" && pwd)
start_in_scratch "$1" 2
prepare() { "$build/prepare" "$@"; }
encode() { "$build/tokenize" --tokenizer t.json; }
cp "$published/gpt2.json" t.json  # its <|endoftext|> is 272
mkdir texts && printf 'the cat' >texts/a.txt

# --- begin, end and special tokens that the text has itself --------------------------------------------------------
template='{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],'
template+=' "special_tokens": {"<s>": {"ids": [273]}}}'
sed -e 's/^  "added_tokens": \[/& {"id": 273, "content": "<s>", "special": true, "normalized": false},/' \
  -e "s/^  \"post_processor\".*/  \"post_processor\": $template,/" t.json >begins.json
for text in 'the' '<s>the' '<s>the<|endoftext|>' 'the<|endoftext|>' 'the <|endoftext|> the' '<s>' '<|endoftext|>'; do
  printf '{"text": "%s"}\n' "$text"
done >own.jsonl
own() { prepare --tokenizer begins.json --val 0 --out own own.jsonl "$@"; }
expect 0 '^own: 7 documents' own
for line in 'documents that have the token that begins a text, which was not added again: 3' \
  'documents that have the token that ends a text, which was not added again: 3' \
  'special tokens within documents .--special-tokens token.: 1'; do
  grep -q "^$line$" output || fail "nobody says: $line"
done
tr -d ' \n' <own/manifest.json | grep -q '"special_tokens":{"begun_already":3,"ended_already":3,"inside":1}' ||
  fail "the manifest has no counts"
the=$(printf the | encode) space_the=$(printf ' the' | encode) space=$(printf ' ' | encode)
a="273 $the 272"
[ "$(ids own/train_000001.bin)" = "$a $a $a $a 273 $the $space 272 $space_the 272 273 272 273 272" ] ||
  fail "the tokens are $(ids own/train_000001.bin)"
expect 0 'own is complete already' own
expect 64 'own has --special-tokens "token", now it is "text"' own --special-tokens text
sed -i '/^    "special_tokens": "token",$/d' own/manifest.json  # as before there was a choice
expect 0 'own is complete already' own
expect 0 '^as_text: 7 documents' prepare --special-tokens text --tokenizer begins.json --val 0 --out as_text own.jsonl
"$build/tokenize" --tokenizer begins.json --decode <<<"$(ids as_text/train_000001.bin)" >decoded
b='<s>' e='<|endoftext|>'
printf %s "${b}the$e" "$b${b}the$e" "$b${b}the$e$e" "${b}the$e$e" "${b}the $e the$e" "$b$b$e" "$b$e$e" >want
cmp -s want decoded || fail "as text the documents are $(cat decoded)"
[ "$(ids as_text/train_000001.bin | tr ' ' '\n' | grep -c '^27[23]$')" = 14 ] || fail "text became a special token"
expect 65 'own.jsonl, line 2: has the special token "<s>" in its text; --special-tokens token' \
  prepare --special-tokens refuse --tokenizer begins.json --val 0 --out refused own.jsonl
expect 0 '^none: 1 document' prepare --special-tokens refuse --tokenizer begins.json --val 0 --out none texts/a.txt
# A token that others merge to has no other writing.
mkdir ends && cp t.json ends/tokenizer.json && echo '{"eos_token": "he"}' >ends/tokenizer_config.json
expect 65 'gives the special token "he" although' \
  prepare --special-tokens text --tokenizer ends --out other texts/a.txt

# --- tokens that do not fit, and the state of somebody's call ------------------------------------------------------
head -c 5000 /dev/zero | tr '\0' a >same.txt
expect 0 '^warning: 100.0 % of the tokens are one and the same, 64 ."a".; check' \
  prepare --tokenizer t.json --val 0 --out same same.txt
expect 0 '^fits: ' prepare --tokenizer t.json --val 0 --out fits texts/a.txt
grep -q warning output && fail "a warning for nothing"
sed -e 's/"truncation": null/"truncation": {"max_length": 2}/' -e 's/"padding": null/"padding": {"length": 8}/' \
  t.json >state.json
expect 0 '^note: state.json: ignored, since it is the state of somebody.s last call: truncation, padding$' \
  prepare --tokenizer state.json --val 0 --out state texts/a.txt
[ "$(grep -c '^note:' output)" = 1 ] || fail "the note stands more than once"
[ "$(ids state/train_000001.bin)" = "$(ids fits/train_000001.bin)" ] || fail "the state of a call changed tokens"
grep -q max_length state/tokenizer.json && fail "the state of a call was copied"

# --- a bad file among those that --field is for --------------------------------------------------------------------
mkdir mixed && printf '\377\376t\0h\0e\0' >mixed/a.txt && echo '{"body": "the cat"}' >mixed/b.jsonl
expect 65 'mixed/a.txt' prepare --tokenizer t.json --field body --out mixed_out mixed
expect 0 'bad documents, left out: 1' prepare --tokenizer t.json --skip-bad 3 --field body --out mixed_out mixed
expect 64 'field body has no effect' prepare --tokenizer t.json --skip-bad 3 --field body --out alone mixed/a.txt

# --- the program that trains a vocabulary ends with this one -------------------------------------------------------
printf '#!/bin/sh\necho $$ >child\nexec sleep 60\n' >slow-python && chmod +x slow-python
for way in writing waiting; do  # it does not read: a text that the pipe does not hold cannot be written
  rm -rf child slow.partial
  head -c $([ $way = waiting ] && echo 1000 || echo 3000000) /dev/zero | tr '\0' a >slow.txt
  PYTHON=./slow-python "$build/prepare" --vocab 300 --out slow slow.txt >output 2>&1 &
  pid=$!
  for _ in $(seq 200); do [ -s child ] && break; sleep 0.05; done
  [ -s child ] || fail "the other program never started ($way)"
  kill -KILL $pid
  wait $pid 2>/dev/null
  for _ in $(seq 40); do kill -0 "$(cat child)" 2>/dev/null || break; sleep 0.05; done
  kill "$(cat child)" 2>/dev/null && fail "the other program lives on ($way)"
done
rm -rf child slow.partial
printf '#!/bin/sh\ntrap "" TERM\necho $$ >child\nwhile :; do sleep 0.2; done\n' >slow-python  # does not listen
PYTHON=./slow-python "$build/prepare" --vocab 300 --out slow texts >output 2>&1 &
pid=$!
for _ in $(seq 200); do [ -s child ] && break; sleep 0.05; done
[ -s child ] || fail "the program that does not listen never started"
kill -TERM $pid
wait $pid
code=$?
[ $code = 75 ] || fail "exit code $code of a stopped training that does not listen, want 75"
kill "$(cat child)" 2>/dev/null && fail "a program that does not listen lives on"
mkdir unreadable-python && rm -rf slow.partial
PYTHON=./unreadable-python expect 74 'start ./unreadable-python' prepare --vocab 300 --out slow texts

# --- an expression that looks at all of the rest from each place ---------------------------------------------------
steps='{"type": "Split", "pattern": {"Regex": "\\\\s+$"}, "behavior": "Isolated", "invert": false},'
steps+=' {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}'
sed "s/^  \"pre_tokenizer\".*/  \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [$steps]},/" t.json >slow.json
(head -c 8000000 /dev/zero | tr '\0' ' '; echo x) >spaces.txt
timeout -s KILL 60 "$build/prepare" --tokenizer slow.json --out deaf texts/a.txt spaces.txt >output 2>&1 &
pid=$!
for _ in $(seq 200); do [ -e deaf.partial ] && break; sleep 0.05; done  # from then on it listens, however busy the machine
[ -e deaf.partial ] || fail "the search never started"
sleep 1
kill -TERM $pid  # timeout passes it on
wait $pid
code=$?
[ $code = 75 ] || fail "exit code $code of a stop while an expression searches, want 75"

# --- modules of the current directory, and the user's ---------------------------------------------------------------
python=${PYTHON:-python3}
if command -v "$python" >/dev/null; then
  mkdir -p cwd/user
  for name in tokenizers argparse io re; do echo 'open("run", "w")' >cwd/$name.py; done
  cd cwd || exit 1
  export PYTHONUSERBASE=$PWD/user PYTHONDONTWRITEBYTECODE=1
  prepare --vocab 300 --out vocab ../texts >output 2>&1 </dev/null
  [ ! -e run ] || fail "a file of the current directory was run"
  if (cd .. && "$python" -c 'import site, sys; sys.exit(not site.ENABLE_USER_SITE)'); then
    own=$(cd .. && "$python" -c 'import site; print(site.getusersitepackages())')
    mkdir -p "$own/tokenizers" && echo 'import sys; sys.exit(9)' >"$own/tokenizers/__init__.py"
    rm -rf vocab vocab.partial
    expect 74 'ended with exit code 9' prepare --vocab 300 --out vocab ../texts
    [ ! -e run ] || fail "a file of the current directory was run"
  else
    echo "skipped: $python has no user site"
  fi
  rm -rf vocab.partial
  for path in :/x /x: /x::/y; do
    rm -rf vocab vocab.partial run
    PYTHONPATH=$path prepare --vocab 300 --out vocab ../texts >output 2>&1 </dev/null
    [ ! -e run ] || fail "with PYTHONPATH=$path a file of the current directory was run"
  done
  rm -rf vocab vocab.partial run
  PYTHONPATH=$PWD prepare --vocab 300 --out vocab ../texts >output 2>&1 </dev/null
  [ -e run ] || fail "PYTHONPATH does not count"
  cd ..
fi

conclude prepare "special tokens and slow programs are as they should be"
