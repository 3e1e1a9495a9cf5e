#!/usr/bin/env bash
# A model that was pre-trained on text learns a task in the tokens of its own tokenizer: LLaMA beside LIMe.
#   tests/system/test_fine_tuning.sh BUILD_DIR
set -uo pipefail
. "$(dirname "$0")/../support/expect.sh"
. "$(dirname "$0")/../support/tiny_tokenizer.sh"
start_in_scratch "$1" 2
small=(--width 16 --ffn 24 --layers 2 --heads 2 --batch 2 --seq 32 --steps 2 --eval-samples 4)
few=(--train-samples 20 --test-samples 4 --batch 2 --accumulate 1 --warmup 1 --steps 4 --answer-samples 2)
for i in $(seq 400); do echo "the $i cats and the dog"; done >text
tiny_tokenizer >t.json
newest() { ls -d "$1"/step_* | tail -1; }

# --- pre-train, fine-tune, ask -------------------------------------------------------------------------------------
for arch in llama lime; do
  expect 0 'test loss' "$build/train_$arch" --data text:text --tokenizer t.json "${small[@]}" --out text_$arch
  expect 0 'answers: guessing gets 50.0%' "$build/train_$arch" --preset prosqa --init text_$arch "${few[@]}" --save-every 2 \
    --out qa_$arch
  grep -q 'step 4: test loss [0-9.]*, answers [0-9.]*%, all steps valid' output || fail "$arch has no answers"
  cmp -s "$(newest qa_$arch)/tokenizer.json" t.json || fail "$arch's tokenizer was lost"
  expect 0 '^answers correct [0-9.]+%$' "$build/evaluate" --model qa_$arch --data prosqa --answers 2
  [ "$(grep -c '^note' output)" = 0 ] || fail "evaluate takes the run's own data for others"
done
expect 0 'sequences of [0-9,]+; 4 steps' "$build/train_llama" --preset prosqa --init text_llama "${few[@]}" --out x
length=$(sed -nE 's/.* sequences of ([0-9,]+); 4 steps.*/\1/p' output | tr -d ,)
[ "$length" -gt 384 ] || fail "sequences of $length tokens are too short for text"
expect 64 "at least $length, not 400; give --seq $length" "$build/train_llama" --preset prosqa --init text_llama "${few[@]}" \
  --seq 400 --out y
expect 0 'lempus' "$build/generate" --model qa_llama --prompt $'Tom is a terpus. Is Tom a lempus or terpus?\n' --max-new 4
# resumed, it has the same bits
cp -r qa_lime again && rm -r again/step_00000004
expect 0 'step 4: test loss' "$build/train_lime" --resume --out again
cmp -s again/step_00000004/model.safetensors qa_lime/step_00000004/model.safetensors || fail "a resumed run differs"

# --- the same of bytes, and arithmetic -----------------------------------------------------------------------------
expect 0 'test loss' "$build/train_llama" --data text:text "${small[@]}" --out bytes
expect 0 'step 4: test loss .*answers' "$build/train_llama" --preset prosqa --init bytes "${few[@]}" --out qa_bytes
grep -q '"eos_token_id": 0' "$(newest qa_bytes)/config.json" || fail "a task's answers in bytes have no end"
for model in text_lime bytes; do
  arch=${model#text_}
  [ "$arch" = lime ] || arch=llama
  for spec in arith:3 arith:4-6i; do
    expect 0 'step 4: test loss .*answers' "$build/train_$arch" --preset arith --data $spec --init $model "${few[@]}" \
      --out "$model-$spec"
    expect 0 '^answers correct [0-9.]+%$' "$build/evaluate" --model "$model-$spec" --data $spec --answers 2
  done
done
expect 0 '^answers correct [0-9.]+%$' "$build/evaluate" --model bytes --data arith:3 --test-samples 4

# --- what does not go together -------------------------------------------------------------------------------------
expect 0 'test loss' "$build/train_gpt2" --data text:text "${small[@]}" --out gpt2
expect 64 'has 32 positions; .* start from a model with more positions$' "$build/train_gpt2" --data arith:3 --init gpt2 \
  --steps 2 --out y
expect 64 'has its own words, or the tokens of the model' "$build/train_llama" --data prosqa --tokenizer t.json --steps 2 \
  --out y
sed -e 's/, "<|endoftext|>": 256/, "zz": 256/' -e 's/"added_tokens": \[{.*}\]/"added_tokens": []/' t.json |
  sed -e ':a;N;$!ba;s/"added_tokens": \[{[^]]*\]/"added_tokens": []/' >endless.json
cp -r "$(newest text_llama)" endless && rm endless/manifest.json endless/train_state.json
cp endless.json endless/tokenizer.json
sed -i '/"eos_token/d' endless/tokenizer_config.json
expect 65 'no token that ends a text.*eos_token' "$build/train_llama" --preset prosqa --init endless "${few[@]}" --out y
expect 64 'init qa_words has .*66 words.*arith:3 has .*21 words' bash -c '
  "$1/train_llama" --data prosqa --train-samples 20 --test-samples 4 --width 16 --ffn 24 --layers 1 --heads 2 --batch 2 \
    --steps 0 --out qa_words >/dev/null 2>&1
  "$1/train_llama" --data arith:3 --init qa_words --steps 1 --out y' - "$build"
conclude fine_tuning
