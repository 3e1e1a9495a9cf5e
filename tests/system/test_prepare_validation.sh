#!/usr/bin/env bash
# How much text `prepare --val` holds out, of which documents, and what a failure in it leaves.
#   tests/system/test_prepare_validation.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
tiny_tokenizer >t.json
prepare() { "$build/prepare" --tokenizer t.json "$@"; }
# holds_out DIR FROM TO RULE: of the tokens in the files, as the manifest and the output say.
holds_out() {
  local train val
  train=$(cat "$1"/train_*.bin | wc -c)
  val=$(cat "$1"/val_*.bin | wc -c)
  awk -v a="$(((train - 1024) / 2))" -v b="$(((val - 1024) / 2))" -v from="$2" -v to="$3" \
    -v said="$(sed -n 's/^validation share: \([0-9.]*\) % (.*/\1/p' output)" \
    -v noted="$(sed -n 's/^  "validation_share": \(.*\),/\1/p' "$1/manifest.json")" 'BEGIN {
      share = b / (a + b)
      close_to(share, noted, 1e-9); close_to(100 * share, said, 0.006)
      exit !(share >= from && share <= to) || wrong
    }
    function close_to(a, b, by) { if (b == "" || a - b > by || b - a > by) wrong = 1 }' ||
    fail "$1 holds out another share than from $2 to $3, or says another"
  grep -q "^  \"validation\": \"$4" "$1/manifest.json" || fail "the manifest of $1 does not say: $4"
  [ "$(awk '{ if (length > longest) longest = length } END { print longest }' output)" -le 80 ] || fail "a long line"
}
# texts FILE: the documents in it, one a line.
texts() { ids "$1" | "$build/tokenize" --tokenizer t.json --decode | sed 's/<|endoftext|>/\n/g'; }
words() { awk -v n="$1" -v seed="$2" 'BEGIN { srand(seed); while (n-- > 0) printf "%s%d ", "the cat", rand() * 1000 }'; }

# --- small files beside a large one -------------------------------------------------------------------------------
mkdir mixed
for i in $(seq 200); do words 5 "$i" >"mixed/$i.txt"; done
words 40000 0 >mixed/large.txt
expect 0 '^mixed_out: 201 documents' prepare --val 0.1 --out mixed_out mixed
holds_out mixed_out 0.09 0.11 'the end of each file'
grep -q 'the end of each file; documents give [0-9.]* %' output || fail "nobody says why files are cut"
texts mixed_out/val_000001.bin >held
tail -c 1000 mixed/large.txt | grep -qFf - held || fail "the end of the large file is not held out"
head -n -1 held | while IFS= read -r text; do
  [ ${#text} -gt 200 ] || grep -qxF -- "$text" mixed/*.txt || echo "$text"
done >cut
[ ! -s cut ] || fail "small documents are cut: $(head -1 cut)"
OMP_NUM_THREADS=1 expect 0 '^again: ' prepare --val 0.1 --out again mixed
same mixed_out again
expect 0 '^shards: ' prepare --val 0.1 --shard-tokens 65536 --out shards mixed
[ -e shards/train_000002.bin ] || fail "there is only one shard"
[ "$(for shard in shards/train_*.bin; do ids $shard; done | paste -sd' ' -)" = "$(ids mixed_out/train_000001.bin)" ] ||
  fail "more shards have other tokens"

# --- many documents, each of them three times ---------------------------------------------------------------------
for i in $(seq 600); do echo "{\"text\": \"$(words $((3 + i % 9)) "$i")\"}"; done >once.jsonl
cat once.jsonl once.jsonl once.jsonl >lines.jsonl
for share in 0.01 0.1 0.5; do
  expect 0 "^drawn$share: 1,800 documents" prepare --val $share --out drawn$share lines.jsonl
  holds_out drawn$share "$(awk "BEGIN { print $share * 0.8 }")" "$(awk "BEGIN { print $share * 1.2 }")" documents
  texts drawn$share/train_000001.bin | sort -u >trained
  texts drawn$share/val_000001.bin | sort -u >held
  [ -z "$(comm -12 trained held | tr -d '\n')" ] || fail "with $share, a document is on both sides"
  prepare --val $share --out piped$share - <lines.jsonl >output 2>&1 || fail "no shards from standard input"
  same drawn$share piped$share
done

# --- one document, equal ones, tiny ones, none held out -----------------------------------------------------------
for share in 0.1 0.5; do
  expect 0 "^one$share: 1 document," prepare --val $share --out one$share mixed/large.txt
  holds_out one$share "$(awk "BEGIN { print $share - 1e-5 }")" "$(awk "BEGIN { print $share + 1e-5 }")" 'the end of each file'
  rm -rf piped
  prepare --val $share --out piped - <mixed/large.txt >output 2>&1 || fail "no shards from standard input"
  same one$share piped
done
for i in $(seq 1000); do echo '{"text": "the cat"}'; done >equal.jsonl
expect 0 '^equal: 1,000 documents' prepare --val 0.1 --out equal equal.jsonl
holds_out equal 0.1 0.1 'the end of each file'
[ "$(texts equal/val_000001.bin | sort | uniq -c | tr -s ' ')" = ' 100 the cat' ] || fail "equal documents are cut"
printf x >tiny.txt
expect 0 '^2 tokens for training, 0 for validation$' prepare --val 0.1 --out tiny tiny.txt
expect 0 '^1 tokens for training, 1 for validation$' prepare --val 0.5 --out tiny_half tiny.txt
expect 0 ' 0 for validation$' prepare --val 0 --out none mixed
grep -q '^validation share' output && fail "a share is printed that nobody asked for"
for made in mixed_out none; do
  [ -z "$(find $made -name 'encoded_*' -o -name 'documents_*' -o -name 'state.json')" ] || fail "$made has more"
done
all=$(ids none/train_000001.bin | wc -w)
[ "$all" = $(($(ids mixed_out/train_000001.bin | wc -w) + $(ids mixed_out/val_000001.bin | wc -w))) ] ||
  fail "without validation there are other tokens"

# --- a failure while tokens are split loses nothing ---------------------------------------------------------------
printf '{"text": ' >bad.jsonl
for name in train val; do
  expect 65 'bad.jsonl, line 1' prepare --val 0.1 --out again_$name lines.jsonl bad.jsonl
  mkdir again_$name.partial/${name}_000001.bin
  expect 74 "${name}_000001.bin" prepare --val 0.1 --out again_$name lines.jsonl
  [ ! -e again_$name ] || fail "a failure left something that looks complete"
  rmdir again_$name.partial/${name}_000001.bin
  expect 0 '^going on after 1,800 documents' prepare --val 0.1 --out again_$name lines.jsonl
  same again_$name drawn0.1
done
# Killed with the result complete, but for its name.
cp -r drawn0.1 named.partial
: >named.partial/encoded_000002.bin
expect 0 'named is complete already' prepare --val 0.1 --out named lines.jsonl
same named drawn0.1
# The table of documents is not believed either.
expect 65 'bad.jsonl, line 1' prepare --val 0.1 --out changed lines.jsonl bad.jsonl
mkdir changed.partial/val_000001.bin
expect 74 "val_000001.bin" prepare --val 0.1 --out changed lines.jsonl
rmdir changed.partial/val_000001.bin
printf '\1' | dd of=changed.partial/documents_000001.bin bs=1 seek=1100 conv=notrunc 2>output
expect 65 'documents_.*: other tokens than were written' prepare --val 0.1 --out changed lines.jsonl
# Work of a version that had no such table, with the right checksum.
state=$(tr -d ' \n' <changed.partial/state.json | sed 's/"table":\[[^]]*\],//; s/,"checksum":"[^"]*"//')
printf '%s,"checksum":"%s"}\n' "${state%\}}" "$(printf %s "$state" | sha256sum | cut -d' ' -f1)" >changed.partial/state.json
expect 65 'state.json: is of an older version of this program; remove changed.partial to start anew' \
  prepare --val 0.1 --out changed lines.jsonl

conclude prepare_validation "the share that was asked for is held out"
