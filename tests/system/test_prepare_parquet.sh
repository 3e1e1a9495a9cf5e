#!/usr/bin/env bash
# prepare reads a Parquet table as it reads the same rows as JSON lines. Without Python or pyarrow it says how to convert
# the table. Exit 77: $PYTHON (default python3) has no pyarrow, so only the latter was tried.
#   tests/system/test_prepare_parquet.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
python=${PYTHON:-python3}
tiny_tokenizer >t.json
number=0
# prepare FLAG...: into a new directory, made.
prepare() { made=made$((++number)); "$build/prepare" --tokenizer t.json --val 0 --out $made "$@"; }

# --- without Python, and without pyarrow -------------------------------------------------------------------------
printf 'PAR1\x15\x04\x15\x00PAR1' >table.parquet
printf '#!/bin/sh\nexit 3\n' >bare && chmod +x bare
convert='is a Parquet table, not text in UTF-8; python3 -c .*pandas.read_parquet.*table.parquet.* .*table.jsonl'
PYTHON=./no-such expect 65 "table.parquet: $convert; or install Python .*no program ./no-such" prepare table.parquet
PYTHON=./bare expect 65 "table.parquet: $convert; or give ./bare pyarrow .pip install pyarrow" prepare table.parquet
PYTHON=./bare expect 65 "table.parquet: $convert; or give" prepare --skip-bad 5 table.parquet  # no single document
expect 65 'standard input: is a Parquet table' bash -c '"$0" --tokenizer t.json --out piped - <table.parquet' "$build/prepare"
[ $failures = 0 ] || conclude prepare "reads Parquet"

"$python" -c 'import pyarrow.parquet' 2>/dev/null ||
  { echo "skipped: $python has no pyarrow; only what prepare says without it was tried"; exit 77; }

# --- the same shards as from JSON lines --------------------------------------------------------------------------
"$python" - <<'END' || fail "the tables were not written"
import json, pyarrow, pyarrow.parquet as parquet
texts = [f"row {i}: the caf\u00e9\n\"{'the ' * (i % 90)}\"" for i in range(3000)] + [""]
table = pyarrow.table({"id": list(range(3001)), "text": texts, "other": texts[::-1], "raw": [b"x"] * 3001})
parquet.write_table(table, "big.parquet", row_group_size=700, compression="snappy")
with open("big.jsonl", "w") as file:
    for text in texts:
        file.write(json.dumps({"text": text}) + "\n")
table = pyarrow.table({"text": ["one", "two", None, "four"], "large": pyarrow.array(["a"] * 4, pyarrow.large_string()),
                       "named": pyarrow.array(["b", "c", "b", "b"]).dictionary_encode()})
parquet.write_table(table, "holes.parquet")
END
shards() { cat "$1"/train_*.bin | sha256sum; }
prepare big.jsonl >output 2>&1 || fail "big.jsonl"
lines=$made
prepare big.parquet >output 2>&1 || fail "big.parquet"
[ "$(shards $made)" = "$(shards $lines)" ] || fail "big.parquet has other tokens than big.jsonl"
expect 0 'is complete already' "$build/prepare" --tokenizer t.json --val 0 --out $made big.parquet
sed -n 's/.*"sha256": "\([0-9a-f]*\)".*/\1/p' $made/manifest.json | grep -q "$(sha256sum <big.parquet | cut -d' ' -f1)" ||
  fail "the manifest has another digest than the file"
mkdir folder && cp big.parquet folder/part-0.parquet && echo read me >folder/README
expect 0 'of other names.*: 1' prepare folder
[ "$(shards $made)" = "$(shards $lines)" ] || fail "a folder of tables has other tokens"
echo 'raise SystemExit("mine")' | tee json.py >pyarrow.py  # somebody's own, in the current directory
PYTHONPATH=: expect 0 '' prepare --field other big.parquet
rm json.py pyarrow.py
[ "$(stat -c %s $made/train_000001.bin)" = "$(stat -c %s $lines/train_000001.bin)" ] || fail "--field other"
[ "$(shards $made)" != "$(shards $lines)" ] || fail "--field other has no effect"
for column in large named; do
  expect 0 '' prepare --field $column holes.parquet
  [ "$(ids $made/train_000001.bin | wc -w)" = 8 ] || fail "column $column: $(ids $made/train_000001.bin)"
done
expect 0 'step 1: test loss' "$build/train_llama" --data text:big.parquet "${sizes[@]}" --steps 1 --out run

# --- stopped while it waits for Python, and started again --------------------------------------------------------
interrupted stopped.partial/state.json "$build/prepare" --tokenizer t.json --val 0 --out stopped big.parquet
[ $? = 75 ] || fail "SIGINT: not exit code 75"
expect 0 'stopped: 3,00[01] documents' "$build/prepare" --tokenizer t.json --val 0 --out stopped big.parquet
[ "$(shards stopped)" = "$(shards $lines)" ] || fail "stopped and started again, it has other tokens"

# --- what is wrong with a table ----------------------------------------------------------------------------------
expect 65 'big.parquet: has no column "body", but id, text, other, raw$' prepare --field body big.parquet
expect 65 'error: .*big.parquet: .* did not read this Parquet table to its end .exit code 1.' prepare --field body big.parquet
expect 65 'big.parquet: column "raw" is binary, not text' prepare --field raw big.parquet
expect 65 'big.parquet: column "id" is int64, not text' prepare --field id big.parquet
expect 65 'holes.parquet, line 3: "text" is no text: null' prepare holes.parquet
expect 0 'bad documents, left out: 1' prepare --skip-bad 1 holes.parquet
grep -q 'holes.parquet, line 3' $made/manifest.json || fail "manifest.json does not name the row"
expect 65 'error: .*table.parquet: .* did not read this Parquet table' prepare table.parquet
head -c 20000 big.parquet >cut.parquet
expect 65 'error: .*cut.parquet: .* did not read this Parquet table' prepare cut.parquet
printf '#!/bin/sh\necho "{\\"text\\": \\"one\\"}"\nkill -9 $$\n' >dies && chmod +x dies
PYTHON=./dies expect 65 'big.parquet: ./dies did not read this Parquet table to its end .signal 9.' prepare big.parquet
[ ! -e $made ] || fail "what a broken table gives was published"

conclude prepare "reads Parquet"
