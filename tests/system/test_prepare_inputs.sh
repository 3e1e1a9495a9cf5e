#!/usr/bin/env bash
# What people give as text and is none, or only almost: byte order marks, other encodings, tables, archives, damaged
# lines. prepare says what is wrong and leaves out what it may.   tests/system/test_prepare_inputs.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
tiny_tokenizer >t.json
number=0
# prepare FLAG...: into a new directory, made.
prepare() { made=made$((++number)); "$build/prepare" --tokenizer t.json --val 0 --out $made "$@"; }
bytes() { printf '%s' "$1" | od -An -v -tu1 -w1 | tr -d ' ' | paste -sd' ' -; }
mark=$'\xef\xbb\xbf'

# --- a byte order mark at the start ------------------------------------------------------------------------------
for name in plain.txt plain.md unnamed; do
  printf '%sone' "$mark" >$name
  prepare $name >output 2>&1
  [ "$(ids $made/train_000001.bin)" = "$(bytes one) 256" ] || fail "$name: a byte order mark is text: $(ids $made/train_000001.bin)"
done
printf '%s{"text": "one"}\n{"text": "two"}\n' "$mark" >lines.jsonl
prepare lines.jsonl >output 2>&1
[ "$(ids $made/train_000001.bin)" = "$(bytes one) 256 $(bytes two) 256" ] || fail "lines.jsonl: a byte order mark is text"
gzip -k plain.txt && mv plain.txt.gz packed.txt.gz
prepare packed.txt.gz >output 2>&1
[ "$(ids $made/train_000001.bin)" = "$(bytes one) 256" ] || fail "packed: a byte order mark is text"
printf 'one%stwo' "$mark" >inside.txt  # there it is a character
prepare inside.txt >output 2>&1
[ "$(ids $made/train_000001.bin | wc -w)" = 10 ] || fail "a mark inside a text was taken out"
printf '%scaf\xe9' "$mark" >latin.txt
expect 65 'latin.txt: the text is not UTF-8: wrong at byte 6, ' prepare latin.txt
[ "$(printf '%sone' "$mark" | "$build/tokenize" --tokenizer t.json)" = "$(bytes one)" ] || fail "tokenize: a byte order mark is text"
printf '%s111 110' "$mark" | "$build/tokenize" --tokenizer t.json --decode >output
[ "$(cat output)" = on ] || fail "tokenize --decode: a byte order mark is text"
printf '%scaf\xe9' "$mark" | "$build/tokenize" --tokenizer t.json >output 2>&1 && fail "latin text is UTF-8"
grep -q 'wrong at byte 6' output || fail "tokenize counts bytes from somewhere else"

# --- other formats, by their first bytes -------------------------------------------------------------------------
# foreign FORMAT COMMAND FILE: refused with the format's name and the command, never with "use text:".
foreign() {
  expect 65 "$3: (unpacked, it )?is $1" prepare "$3"
  sed -i "s|$work/||g" output
  grep -qE -- "$2" output || fail "$3: the command is another one than $2"
  grep -q 'text:' output && fail "$3: somebody advises text:"
  "$build/tokenize" --tokenizer t.json <"$3" >output 2>&1 && fail "tokenize takes $3"
  return 0
}
printf 'one two\n' >utf8
for code in 16 32; do
  iconv -f utf-8 -t utf-$code utf8 >utf$code.txt
  foreign "text in UTF-$code" "iconv -f utf-$code -t utf-8 utf$code.txt > utf$code.utf8.txt" utf$code.txt
  for end in le be; do
    [ $code = 16 ] || continue
    printf 'one two three\n' | iconv -f utf-8 -t utf-$code$end >bare$end.txt
    foreign "text in UTF-16" "iconv -f utf-16$end" bare$end.txt
  done
done
printf '{"text": "one"}\n' | iconv -f utf-8 -t utf-16 >wide.jsonl
foreign "text in UTF-16" "iconv -f utf-16 -t utf-8 wide.jsonl > wide.utf8.jsonl" wide.jsonl
printf '\xfe\xff\0o\0n\0e' >big.txt
foreign "text in UTF-16" "iconv -f utf-16" big.txt
export PYTHON=./no-python  # of Parquet, what is said without one; test_prepare_parquet.sh has the rest
printf 'PAR1\x15\x04\x15\x00PAR1' >table.parquet
foreign 'a Parquet table' "pandas.read_parquet.*table.parquet table.jsonl" table.parquet
cp table.parquet "some table.txt"
expect 65 "some table.txt' '.*some table.jsonl'" prepare "some table.txt"
touch table.jsonl  # the command must not replace it
foreign 'a Parquet table' "table.parquet table.converted.jsonl" table.parquet
rm table.jsonl
printf 'ARROW1\0\0\xff\xff\xff\xff' >table.arrow
foreign 'an Arrow table' 'read_feather' table.arrow
printf '\xff\xff\xff\xff\x70\x01\0\0\x10\0\0\0\0\0\x0a\0' >data-00000-of-00001.arrow
foreign "an Arrow table .of Hugging Face" 'Dataset.from_file' data-00000-of-00001.arrow
printf 'ORC\x0a\x03\x00\x12' >table.orc
foreign 'an ORC table' 'read_orc' table.orc
for packer in xz bzip2 lz4; do
  command -v $packer >/dev/null || continue
  case $packer in xz) end=xz ;; bzip2) end=bz2 ;; lz4) end=lz4 ;; esac
  $packer -c utf8 >corpus.jsonl.$end 2>output
  foreign "packed by $packer" "$packer -dc corpus.jsonl.$end > corpus.jsonl$" corpus.jsonl.$end
done
printf '\xfd7zXZ\0\0\x04' >small.txt
foreign 'packed by xz' 'xz -dc small.txt > small.txt.unpacked' small.txt
printf 'BZh91AY&SY\x01\x02' >small.bz2
foreign 'packed by bzip2' 'bzip2 -dc small.bz2 > small' small.bz2
printf 'PK\x03\x04\x14\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0a.txt' >some.zip
foreign 'a zip archive' 'unzip -d some.zip.files some.zip' some.zip
printf 'PK\x03\x04\x14\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x13\0\0\0[Content_Types].xml' >report.docx
foreign 'an Office document' 'soffice --convert-to txt report.docx' report.docx
printf 'PK\x03\x04\x14\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x07\0\0\0ids.npy.' >ids.npz
foreign 'NumPy arrays' 'Python' ids.npz
printf '7z\xbc\xaf\x27\x1c\0\x04' >some.7z
foreign 'a 7z archive' '7z x' some.7z
tar -cf some.tar utf8
foreign 'a tar archive' 'tar -xf some.tar -C some.tar.files' some.tar
gzip -k some.tar
expect 65 'some.tar.gz: unpacked, it is a tar archive' prepare some.tar.gz
gzip -c packed.txt.gz >twice.txt.gz
expect 65 'twice.txt.gz: unpacked, it is packed by gzip' prepare twice.txt.gz
printf '\x93NUMPY\x01\0v\0{}' >ids.npy
foreign 'a NumPy array' 'numpy.load.*--data uint32:ids.bin' ids.npy
printf '%%PDF-1.4\n' >paper.pdf
foreign 'a PDF' 'pdftotext paper.pdf paper.txt' paper.pdf
printf '{\\rtf1\\ansi one}' >letter.rtf
foreign 'a Rich Text document' 'pandoc' letter.rtf
printf 'SQLite format 3\0\x10\0' >some.db
foreign 'an SQLite database' 'sqlite3 some.db' some.db
printf '\x89HDF\r\n\x1a\n\0' >some.h5
foreign 'an HDF5 file' 'h5py' some.h5
printf '\x80\x04\x95\x1a\0' >some.pkl
foreign 'a Python pickle' 'Python' some.pkl
printf '\x10\0\0\0\0\0\0\0{"a": {}}' >some.safetensors
foreign "a model's weights" 'leave it out' some.safetensors
printf '\x89PNG\r\n\x1a\n\0' >picture.txt
foreign 'an image' 'leave it out' picture.txt
prepare plain.txt >output 2>&1
foreign 'a token shard' '[-]-data' $made/train_000001.bin
# A text that begins like one of them is a text.
for words in 'ORCHESTRA' 'PARENTS' 'PAR1' 'BZh9' 'RIFF' 'GIF89a' 'Obj' 'PK' 'DUCK' 'ID3' 'GGUF' 'MM'; do
  printf '%s and more words\n' "$words" >words.txt
  prepare words.txt >output 2>&1 || fail "a text that begins with $words is refused"
done
# The trainers say the same.
tiny=(--width 16 --ffn 24 --layers 1 --heads 2 --batch 1 --seq 4 --vocab 512 --dry-run)
expect 65 'table.parquet: is a Parquet table' "$build/train_llama" --data table.parquet "${tiny[@]}"
expect 65 'table.parquet: is a Parquet table' "$build/train_llama" --data text:table.parquet "${tiny[@]}"
expect 65 'utf16.txt: is text in UTF-16' "$build/train_llama" --data text:utf16.txt "${tiny[@]}"
cat ids.npy ids.npy >even.bin
expect 65 'even.bin: is a NumPy array' "$build/train_llama" --data uint16:even.bin "${tiny[@]}"
expect 65 'even.bin: is a NumPy array' "$build/train_llama" --data even.bin "${tiny[@]}"
# Bytes of somebody's own, which are no text, are tokens.
head -c 300 /dev/zero | tr '\0' '\351' >bytes.dat
(printf '\xff\xfe'; for byte in $(seq 253 -1 0); do printf "\\x$(printf %02x "$byte")"; done) >down.dat
for bytes in bytes.dat down.dat; do
  expect 0 'parameters' "$build/train_llama" --data text:$bytes "${tiny[@]}"
done

# --- JSON lines: what is wrong, and at which byte from 0 ----------------------------------------------------------
json() {
  printf '{"text": "fine"}\n%b\n' "$1" >bad.jsonl
  expect 65 "bad.jsonl, line 2: $2" prepare bad.jsonl
}
json '{"text":"one","score":NaN}' 'is not a JSON object in UTF-8: NaN at byte 22: JSON has no such number; write null'
json '{"a": -Infinity, "text": ""}' '.*-Infinity at byte 6: JSON has no such number'
json '{"a": [1, inf]}' '.*inf at byte 10: JSON has no such number'
json '{"text": "\\ud800"}' '.*a lone surrogate, .ud800, at byte 10: half of a character'
json '{"text": "\\ud800\\u0041"}' '.*a lone surrogate, .ud800, at byte 10'
json '{"text": "ab\\udc00"}' '.*a lone surrogate, .udc00, at byte 12'
json '{"text":"one\xff"}' '.*.xff at byte 12 is not UTF-8; iconv -f latin1'
json '{"text": "a\x01"}' '.*a control character in a string, .x01, at byte 11'
json "{'text': 'one'}" '.*a single quote at byte 1: JSON writes strings in double quotes'
json '{"text": None}' '.*None at byte 9: JSON writes true, false and null'
json '{"text": "one"' '.*it ends too early, at byte 14'
json '{"text": "one' '.*it ends too early, at byte 13, inside a string'
json '{"text": "one"} {"text": "two"}' '.*more text behind the value, wrong at byte 16'
json '{"text": "one",}' '.*wrong at byte 15'
json '{"text": 5}' '"text" is no text: 5'

# --- --skip-bad --------------------------------------------------------------------------------------------------
printf '{"text": "one"}\n{"text": NaN}\n{"text": "two"}\n{"texts": 1}\n' >some.jsonl
expect 65 'some.jsonl, line 2: .*NaN' prepare some.jsonl
expect 65 'some.jsonl, line 4: .*no field.*1 bad documents were left out before, as --skip-bad 1' prepare --skip-bad 1 some.jsonl
expect 0 '^bad documents, left out: 2; manifest.json lists them$' prepare --skip-bad 2 some.jsonl
[ "$(ids $made/train_000001.bin)" = "$(bytes one) 256 $(bytes two) 256" ] || fail "other documents than the bad ones are left out"
python3 - $made/manifest.json <<'END' || fail "manifest.json does not list the bad documents"
import json, sys
manifest = json.load(open(sys.argv[1]))
left = manifest["left_out"]
assert manifest["documents"] == 2 and [one["line"] for one in left] == [2, 4], manifest
assert left[0]["path"].endswith("some.jsonl") and "NaN at byte 9" in left[0]["reason"], left
END
mkdir folder
printf 'one' >folder/a.txt
cp utf16.txt folder/b.txt
printf 'caf\xe9' >folder/c.txt
head -c 30 packed.txt.gz >folder/d.txt.gz
printf 'two' >folder/e.txt
expect 65 'folder/b.txt: is text in UTF-16' prepare folder
expect 0 'bad documents, left out: 3' prepare --skip-bad 3 folder
[ "$(ids $made/train_000001.bin)" = "$(bytes one) 256 $(bytes two) 256" ] || fail "the good files of a folder are not what is encoded"
"$build/prepare" --tokenizer t.json --val 0 --out $made --skip-bad 2 folder >output 2>&1
grep -q 'was made without 3 bad documents, now --skip-bad is 2' output || fail "a smaller --skip-bad is said to be complete"
awk 'BEGIN { for (i = 0; i < 2000; ++i) print "{\"text\": \"one\"}" }' | gzip >cut.jsonl.gz
head -c -20 cut.jsonl.gz >broken.jsonl.gz  # how many documents that would be, nobody knows
expect 65 'broken.jsonl.gz: the gzip data' prepare --skip-bad 9 broken.jsonl.gz

# --- memory ------------------------------------------------------------------------------------------------------
if command -v zstd >/dev/null; then
  awk 'BEGIN { for (i = 0; i < 4000000; ++i) print "{\"text\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}" }' |
    zstd -q >bomb.jsonl.zst
  (failures=0; ulimit -v 1000000
    expect 71 'out of memory: the text has [0-9]+ tokens so far.*prepare writes them' \
      "$build/train_llama" --data text:bomb.jsonl.zst "${tiny[@]}"
    exit $failures) || failures=$((failures + 1))
  head -c 300000000 /dev/zero | zstd -q --long=29 -1 >window.zst
  (failures=0; ulimit -v 700000
    expect 71 'window.zst: out of memory: the zstd data needs a window of more than [0-9]+ MB' prepare window.zst
    exit $failures) || failures=$((failures + 1))
else
  echo "skipped: zstd is not here"
fi

conclude prepare "says what is wrong with its inputs"
