#!/usr/bin/env bash
# The protocol of `score`: what a caller sends, line by line, and what a bad line, an early end or a wrong tokenizer
# costs.   tests/system/test_score.sh BUILD_DIR
set -uo pipefail
build=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=2
failures=0

fail() {
  failures=$((failures + 1))
  echo "FAIL: $*"
  sed 's/^/  | /' answers errors | tail -5
}
# expect CODE LINES PATTERN FLAGS...: of the requests on standard input, the exit code, the number of answers, and a
# line of what is said.
expect() {
  local code=$1 lines=$2 pattern=$3 got
  shift 3
  "$build/score" "$@" >answers 2>errors
  got=$?
  [ $got = "$code" ] || fail "exit code $got, want $code: $*"
  [ "$(wc -l <answers)" = "$lines" ] || fail "$(wc -l <answers) answers, want $lines: $*"
  [ -z "$pattern" ] || cat answers errors | grep -qE -- "$pattern" || fail "no line matches '$pattern': $*"
  [ "$(grep -c '^error: ' errors)" = $((code != 0)) ] || fail "not exactly one error line, or one too many: $*"
}

seq 3000 >numbers.txt
"$build/train_gpt2" --data text:numbers.txt --width 16 --layers 2 --heads 2 --seq 16 --batch 8 --steps 60 \
  --lr 1e-2 --out run >output 2>&1 || { cat output; exit 1; }
bytes=(--model run --prefix-token 10)

# --- requests of each kind ----------------------------------------------------------------------------------------
cat >requests <<'END'
{"id": "a", "context": "12\n13\n", "continuation": "14"}
{"id": {"n": [1, null]}, "text": "100\n101\n"}
{"context": [49, 50, 10], "continuation": [49]}
{"id": 3, "context": "2998\n29", "until": "\n", "max_new_tokens": 9}
{"id": 4, "context": "", "continuation": "7"}
END
expect 0 5 '^\{"id":"a","logprob":-[0-9.]+,"greedy":(true|false),"tokens":3\}$' "${bytes[@]}" <requests
for pattern in '^\{"id":\{"n":\[1,null\]\},"logprob":-[0-9.]+,"tokens":8\}$' \
  '^\{"logprob":-[0-9.]+,"greedy":(true|false),"tokens":1\}$' \
  '^\{"id":3,"text":"[0-9]*","ids":\[[0-9,]+\]\}$' '^\{"id":4,"logprob":-[0-9.]+,"greedy":false,"tokens":1\}$'; do
  grep -qE -- "$pattern" answers || fail "no answer matches '$pattern'"
done
cp answers at_once
# An empty line asks for the answers so far; Windows ends its lines otherwise; the last line may lack its end.
sed 's/$/\r/; 2s/$/\n\r/' requests | head -c -2 >parts
expect 0 5 tokens "${bytes[@]}" <parts
# One answer begins with its number, whose last digits depend on what it is computed with.
order() { cut -d, -f1 "$1" | sed 's/-[0-9.]*$//'; }
diff <(order at_once) <(order answers) >/dev/null || fail "the order of the answers is another one"
# One process answers several times.
coproc score { "$build/score" "${bytes[@]}"; }
pid=$score_PID  # which bash forgets when the process has ended
for _ in 1 2; do
  printf '%s\n\n' '{"context": "1", "continuation": "2"}' >&"${score[1]}"
  IFS= read -r -t 60 -u "${score[0]}" line || fail "no answer to an empty line"
  [[ $line == *'"tokens":1}' ]] || fail "the answer is $line"
done
exec {score[1]}>&-
wait "$pid" || fail "score ends with $? at the end of its input"
expect 0 0 '' "${bytes[@]}" </dev/null
printf '\n\n\n' | expect 0 0 '' "${bytes[@]}"
long=$(printf '%s' {0..9})
long=${long//[0-9]/&$long}
expect 0 1 '"tokens":1,"truncated":true' "${bytes[@]}" <<<"{\"context\": \"$long\", \"continuation\": \"2\"}"
expect 0 1 '^.{0,60}"tokens":110\}$' "${bytes[@]}" <<<"{\"text\": \"$long\"}"

# --- bad lines ----------------------------------------------------------------------------------------------------
good='{"context": "1", "continuation": "2"}'
expect 65 2 '^error: line 3: .*wrong at byte' "${bytes[@]}" <<<"$good"$'\n'"$good"$'\nnothing\n'"$good"
expect 65 1 '^error: line 3: .*"tokens".* is no part' "${bytes[@]}" <<<"$good"$'\n\n{"text": "1", "tokens": 5}'
expect 65 0 'line 1: .*256 is outside the vocabulary of 256' "${bytes[@]}" <<<'{"context": [256], "continuation": [1]}'
expect 65 0 'line 1: .*--prefix-token' --model run <<<'{"context": "", "continuation": "a"}'
expect 65 0 'line 1: .*JSON' "${bytes[@]}" < <(printf '{"text": "\xff"}\n')
expect 65 0 'line 1: .*JSON' "${bytes[@]}" < <(head -c 100000 /dev/zero | tr '\0' '[')
expect 65 0 'line 1: .*JSON' "${bytes[@]}" < <(head -c 1000 /dev/zero)
expect 64 0 '--prefix-token 256' --model run --prefix-token 256 <<<"$good"
expect 64 0 'tokenz' --model run --tokenz x <<<"$good"
expect 66 0 'nowhere' --model nowhere <<<"$good"
expect 74 0 'standard input' "${bytes[@]}" </

# --- tokenizers ---------------------------------------------------------------------------------------------------
"$build/train_llama" --data arith:3 --train-samples 100 --test-samples 10 --width 16 --ffn 24 --layers 2 --heads 2 \
  --batch 8 --steps 2 --warmup 0 --out sums >output 2>&1 || { cat output; exit 1; }
sums=$(printf '%s\n' sums/step_* | tail -1)
expect 0 2 '"tokens":2' --model sums <<<$'{"context": "3 + 4 = ", "continuation": "7 <eos>"}\n{"text": "3 + 4"}'
expect 65 0 'line 1: .*"apples"' --model sums <<<'{"text": "3 apples"}'
expect 64 0 '--tokenizer .*bytes.* words' --model sums --tokenizer run/step_00000060 <<<"$good"
expect 66 0 'nowhere' --model sums --tokenizer nowhere <<<"$good"
cp -r "$sums" unknown
rm unknown/tokenizer.json unknown/manifest.json
expect 65 0 '256 tokens.* only 21: .*another model' --model unknown --tokenizer run/step_00000060 <<<"$good"
expect 0 1 '"tokens":2' --model unknown <<<'{"context": "3 4", "continuation": " 5 6"}'
expect 65 0 'line 1: .*"a"' --model unknown --prefix-token 1 <<<'{"text": "a b"}'
cp run/step_00000060/tokenizer.json unknown
expect 65 0 'unknown: the tokenizer has 256 tokens.* only 21: ' --model unknown <<<"$good"

# --- ids that the tokenizer does not have have no text, and no stop text is in it ---------------------------------
"$build/train_gpt2" --data text:numbers.txt --vocab 2000 --width 16 --layers 1 --heads 2 --seq 16 --steps 0 \
  --out padded >output 2>&1 || { cat output; exit 1; }
expect 0 4 '"ids":\[[0-9,]*(2[6-9][0-9]|[3-9][0-9][0-9]|1[0-9][0-9][0-9])' --model padded < <(
  for id in 300 700 1500 1999; do printf '{"context": [%s], "max_new_tokens": 4, "until": ["<", "0>"]}\n' $id; done)
grep -q '"text":"[^"]*<[0-9]' answers && fail "an id became text"

# --- a reader that goes away, a full disk -------------------------------------------------------------------------
for _ in {1..20000}; do echo "$good"; done >many
"$build/score" "${bytes[@]}" <many 2>errors | head -1 >answers
codes=("${PIPESTATUS[@]}")
[[ ${codes[0]} = 0 && ! -s errors && $(wc -l <answers) = 1 ]] || fail "a reader that goes away ends it with ${codes[0]}"
if [ -e /dev/full ]; then
  "$build/score" "${bytes[@]}" <requests >/dev/full 2>errors
  code=$?
  [ $code = 74 ] || fail "a full disk ends it with $code"
fi

[ $failures = 0 ] || { echo "$failures failures"; exit 1; }
echo "score answers what it is asked"
