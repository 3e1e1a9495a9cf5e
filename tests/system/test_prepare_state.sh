#!/usr/bin/env bash
# What prepare finds where it worked before: killed early, refused, changed by somebody, or no directory that a rename
# can replace.   tests/system/test_prepare_state.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
tiny_tokenizer >t.json
prepare() { "$build/prepare" --tokenizer t.json --val 0.05 "$@"; }
for i in $(seq 2000); do echo "{\"text\": \"the cat number $i, and more of the text that it sat on\"}"; done >lines.jsonl
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do cat lines.jsonl; done | split -l 10000 - long-
for part in long-*; do mv "$part" "$part.jsonl"; done
expect 0 '^plain: ' prepare --out plain lines.jsonl

# --- killed before the first state has its name -------------------------------------------------------------------
mkdir early.partial && printf '{"settings"' >early.partial/.tmp-state.json-4711
expect 0 '^early: ' prepare --out early lines.jsonl
same early plain
mkdir mine.partial && : >mine.partial/.tmp-state.json-1 && : >mine.partial/thesis
expect 64 'mine.partial exists and was not made by this program' prepare --out mine lines.jsonl
[ -e mine.partial/.tmp-state.json-1 ] || fail "a file of somebody's directory was removed"

# --- refused with nothing encoded: the corrected command works ----------------------------------------------------
printf '{"text": ' >bad.jsonl
expect 65 'bad.jsonl, line 1' prepare --out mended bad.jsonl
expect 0 '^mended: ' prepare --out mended lines.jsonl
same mended plain
expect 65 'bad.jsonl, line 1' prepare --out removed lines.jsonl bad.jsonl
expect 0 '^removed: ' prepare --out removed lines.jsonl
same removed plain
expect 64 'the cat is no token' prepare --eot 'the cat' --out eot lines.jsonl
expect 0 '^eot: ' prepare --out eot lines.jsonl
same eot plain
sed 's/"t h", "th e"/"t h"/' t.json >other.json
expect 65 'bad.jsonl, line 1' "$build/prepare" --tokenizer other.json --val 0.05 --out another bad.jsonl
expect 0 '^another: ' prepare --out another lines.jsonl
same another plain
# And where much is encoded, the inputs behind it may be others.
expect 65 'bad.jsonl, line 1' prepare --out behind long-*.jsonl bad.jsonl
cp -r behind.partial half.partial
expect 0 '^going on after' prepare --out behind long-*.jsonl
expect 0 '^long: ' prepare --out long long-*.jsonl
same behind long
expect 64 'half.partial is of other inputs: number 1 was .*long-aa.jsonl and is .*lines.jsonl' \
  prepare --out half lines.jsonl long-*.jsonl
expect 0 'bad documents, left out: 1' prepare --skip-bad 1 --out half long-*.jsonl bad.jsonl
same half long

# --- state.json and manifest.json are not believed ----------------------------------------------------------------
begin() {
  rm -rf begun.partial
  expect 65 'bad.jsonl, line 1' prepare --out begun long-*.jsonl bad.jsonl
}
damaged() {
  begin
  sed -i "$2" begun.partial/state.json
  expect 65 "begun.partial/.*$1.*remove begun.partial to start anew" prepare --out begun long-*.jsonl
  [ ! -e begun ] || fail "begun is there: $2"
}
damaged 'does not fit its checksum' '0,/"bytes": [0-9]*/s//"bytes": 5/'
damaged 'does not fit its checksum' '0,/"documents": [0-9]*/s//"documents": -3/'
damaged 'has no checksum' '/"checksum"/d;s/\("sources": "[^"]*"\),/\1/'
damaged 'state.json: is damaged' '1s/{/[/'
begin
rm begun.partial/encoded_000001.bin
expect 65 'encoded_000001.bin: is missing.*remove begun.partial to start anew' prepare --out begun long-*.jsonl
begin
truncate -s -2 begun.partial/encoded_000001.bin
expect 65 'encoded_000001.bin: has [0-9]+ bytes.*remove begun.partial to start anew' prepare --out begun long-*.jsonl
begin
printf '\1\1' | dd of=begun.partial/encoded_000001.bin bs=1 seek=2000 conv=notrunc 2>output
expect 65 'encoded_.*: other tokens than were written' prepare --out begun long-*.jsonl
for change in 's/"settings": {/"settings": 5, "x": {/' 's/"inputs": \[/"inputs": "one", "x": [/' \
  's/"path": "[^"]*"/"path": 7/' 's/"sources": \[/"sources": 4, "x": [/' '1s/{/[/'; do
  rm -rf wrong && cp -r plain wrong
  sed -i "$change" wrong/manifest.json
  prepare --out wrong lines.jsonl >output 2>&1
  code=$?
  [ $code = 65 ] || [ $code = 64 ] || { [ $code = 0 ] && [[ $change = *sources* ]]; } ||
    fail "exit code $code of a manifest with $change"
done
for text in 5 '"one"' '[]' 'null' '{}' '{"settings": {}}'; do
  echo "$text" >wrong/manifest.json
  expect 65 'wrong/manifest.json: ' prepare --out wrong lines.jsonl
done
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
  mkdir hidden hidden/out.partial && chmod 777 hidden && chmod 733 hidden/out.partial
  chmod 755 "$work" && cp lines.jsonl t.json hidden
  expect 74 'out.partial: Permission denied' setpriv --reuid 65534 --clear-groups \
    "$build/prepare" --tokenizer hidden/t.json --out hidden/out hidden/lines.jsonl
else
  echo "skipped: nobody to whom a directory could be closed"
fi

# --- a source that was changed behind its size and time -----------------------------------------------------------
cp lines.jsonl source.jsonl
expect 0 '^made: ' prepare --out made source.jsonl
touch -r source.jsonl time
sed 's/cat/dog/' source.jsonl >changed && cat changed >source.jsonl
touch -r time source.jsonl
expect 64 'source.jsonl was changed since made was made' prepare --out made source.jsonl
sed 's/dog/cat/' changed >source.jsonl && touch -r time source.jsonl
expect 0 'made is complete already' prepare --out made source.jsonl

# --- where no rename can put a directory --------------------------------------------------------------------------
mkdir here
inside() { (cd here && "$@"); }
expect 64 'out .* is the current directory, which cannot be replaced' \
  inside "$build/prepare" --tokenizer ../t.json --out . ../lines.jsonl
[ -d here ] && [ ! -e here.partial ] || fail "something was done for --out ."
mkdir -p up/x
expect 0 ': ' prepare --out "up/x/../y" lines.jsonl
same up/y plain
expect 64 'exists and was not made' prepare --out up/x/.. lines.jsonl
mkdir empty
expect 0 ': ' prepare --out empty/. lines.jsonl
same empty plain
mkdir target && ln -s target link
expect 0 ': ' prepare --out link lines.jsonl
[ -L link ] || fail "the link was replaced"
same target plain
expect 0 'is complete already' prepare --out link/ lines.jsonl
tiny=(--width 16 --ffn 24 --layers 1 --heads 2 --batch 1 --seq 16 --steps 0)
expect 64 'is the current directory' inside "$build/train_llama" --data ../plain "${tiny[@]}" --out .
expect 0 'wrote an initialised' "$build/train_llama" --data plain "${tiny[@]}" --out model
expect 64 'is the current directory' inside "$build/transplant" --model ../model --out .
mkdir linked && ln -s linked model-link
expect 0 'wrote model-link' "$build/transplant" --model model --out model-link
[ -e linked/config.json ] || fail "the model is not where the link leads"
mkdir mount
if unshare -m true 2>/dev/null; then
  mkdir bound
  for how in "-t tmpfs none" "--bind bound"; do
    for command in "$build/prepare --tokenizer t.json --out mount lines.jsonl" \
      "$build/train_llama --data plain ${tiny[*]} --out mount" "$build/transplant --model model --out mount"; do
      expect 64 'mount is a mount point, which cannot be replaced' unshare -m sh -c "mount $how mount && $command"
    done
  done
  [ ! -e mount.partial ] || fail "something was done for a mount point"
else
  echo "skipped: nothing can be mounted here"
fi

conclude prepare "goes on where it may, and nowhere else"
