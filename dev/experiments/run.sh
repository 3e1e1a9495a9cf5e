#!/usr/bin/env bash
# The papers on trial, small: every experiment of this directory, in order, or those that are named. Stop it at any time
# (exit code 75); started again it goes on where it was. Results land beside this script, thinned; figures follow by
# `make figures`.
#   dev/experiments/run.sh [NAME...]     small arith prosqa twelve longer newer routers variants literal depth recipe
#                                        operator1 depth_2026 arith_grid; only if they are named: speed (on an idle
#                                        machine), fine_tuning, arith_long, operator1_d12 and transfer (hours), words
#                                        and corpus (the texts of docs/table.plan)
#   BUILD=build OUT=runs/experiments RECORDS=dev/experiments SEEDS=1,2,3 JOBS=0 (runs side by side; 0: compare chooses)
# arith, prosqa and small make their own data; recipe trains on the text of `make text`, the others on the sources of
# Python's library. Both need Python with `pip install tokenizers` once.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build} out=${OUT:-runs/experiments} seeds=${SEEDS:-1,2,3} jobs=${JOBS:-0}
scripts=dev/experiments records=${RECORDS:-dev/experiments}

# In the background, where a signal reaches the shell at once, which passes it on.
run() {
  "$@" &
  wait $!
}
stopped() {
  trap '' INT TERM HUP
  # shellcheck disable=SC2046
  kill -TERM $(jobs -p) 2>/dev/null || true
  wait
  echo "stopped on request; the same command goes on"
  exit 75
}
trap stopped INT TERM HUP

# part NAME/PART FLAGS...: one comparison, begun or continued, and its record. Until then NAME/PART.begun has the records
# of those of its runs that have ended, so that it goes on on another machine.
part() {
  local name=$1 begun=$records/$1.begun
  shift
  echo "== $name"
  mkdir -p "$out/$name" "$begun"
  ln -sfn "$(realpath "$begun")" "$out/$name/records"
  # 77: at some rate or seed the loss was not finite, which is a result, too.
  run "$build/compare" --resume --jobs "$jobs" "$@" --out "$out/$name" || {
    local code=$?
    [ $code = 77 ] || exit $code
  }
  "$build/figures" --take "$out/$name" --as "$records/$name.json"
  rm -r "$begun" "$out/$name/records"
}

corpus() {
  [ ! -e "$out/corpus/tokens/manifest.json" ] || return 0
  mkdir -p "$out/corpus"
  [ -e "$out/corpus/python.jsonl" ] || "${PYTHON:-python3}" "$scripts/corpus.py" "$out/corpus/python.jsonl"
  run "$build/prepare" --vocab 2048 --val 0.05 --out "$out/corpus/tokens" "$out/corpus/python.jsonl"
}

# 1,049k tokens of code, 2.4M parameters but for the embedding. --steps, --layers and others may follow.
text() {
  local name=$1
  shift
  corpus
  part "$name" --data "$out/corpus/tokens" --seq 256 --batch 8 --width 128 --layers 12 --heads 4 --ffn 352 --steps 512 \
    --warmup 51 --dtype bf16 --eval-every 64 --eval-samples 192 --save-every 256 --keep 1 --seeds "$seeds" "$@"
}

all="llama,lime,lime_static,lime_dynamic,hyper,vertical,sla,ala,resformer,satformer,denseformer,mudd"

newer="attnres,attnres:attn_res_block_size=0,mhc,kv_share,shortcuts,gated_streams"
mhcs="mhc:start=one_hot:reads=previous,mhc:start=one_hot:mixing=identity,mhc:start=one_hot:mixing=permutations"

# Twelve architectures, each at the best of four rates; and what LLaMA does with more tokens, for equal FLOPs and time.
twelve() {
  text twelve/equal-tokens --arch "$all" --lr 1e-3,2e-3,4e-3,8e-3
  for steps in 640 1024 2048; do
    text "twelve/llama-$steps-steps" --arch llama --lr "$(best_rate llama)" --steps "$steps" --warmup $((steps / 10)) \
      --eval-every $((steps / 8))
  done
}

# Four times the tokens, each at the rate that was best before: does a lead last once all have left the plateau that
# deep, narrow models begin on? LLaMA's are among the twelve's.
longer() {
  for arch in lime lime_dynamic hyper resformer; do
    text "twelve/$arch-2048-steps" --arch "$arch" --lr "$(best_rate "$arch")" --steps 2048 --warmup 204 --eval-every 256
  done
}

# What the largest open models connect by, and what an independent sweep (marin #9290) found best: attention residuals in
# blocks and in full, mHC, shared keys and values, embedding shortcuts, gated streams. Two rates, which were the best ones
# of all twelve; LLaMA is among the twelve. mHC again from another start, then its variants at the rate that is best for
# that.
newer() {
  text newer/equal-tokens --lr 2e-3,4e-3 --arch "$newer"
  text newer/mhc --lr 2e-3,4e-3 --arch mhc:start=one_hot
  text newer/mhc-variants --lr "$(best_rate mhc:start=one_hot newer/mhc)" --arch "$mhcs"
}

# Steps timed with nothing beside them: run it on an idle machine.
speed() {
  jobs=1
  text twelve/speed --arch "$all" --lr 2e-3 --seeds 1 --steps 24 --warmup 2 --eval-every 24 --save-every 24
  text newer/speed --arch "llama,$newer,mhc:start=one_hot,$mhcs" --lr 2e-3 --seeds 1 --steps 24 --warmup 2 \
    --eval-every 24 --save-every 24
}

# Table 7 of LIMe, and its confound: own is LLaMA with LIMe's initialisation, kv_init=normal LIMe with LLaMA's.
routers() {
  text routers/ablation --lr "$(best_rate lime)" --arch "lime:routing=own,lime:routing=average,lime:routing=last:window=2,\
lime:routing=last:window=4,lime:routing=last:window=6,lime:routing=first:window=2,lime:routing=first:window=4,\
lime:routing=first:window=6,lime:kv_init=normal"
}

# Orders that papers claim: gates, value residuals, dilation and period, streams, re-allocation. last_k is our question.
variants() {
  text variants/satformer --lr "$(best_rate satformer)" --arch "satformer:gate=sigmoid,satformer:gate=softmax,\
satformer:gate=softmax_sigmoid,satformer:gate=tanh,satformer:gate=identity,satformer:last_k=8,satformer:last_k=4,\
satformer:last_k=2"
  text variants/resformer --lr "$(best_rate resformer)" --arch "resformer:variant=identity,resformer:variant=constant,\
resformer:variant=learnable,resformer:variant=sparse,resformer:variant=svformer,resformer:last_k=4"
  text variants/denseformer --lr "$(best_rate denseformer)" --arch "denseformer:dilation=2,denseformer:dilation=4,\
denseformer:period=3,denseformer:dilation=4:period=5"
  text variants/hyper --lr "$(best_rate hyper)" --arch "hyper:rate=1,hyper:rate=2,hyper:rate=8,hyper:dynamic=false"
  text variants/mudd --lr "$(best_rate mudd)" --arch "mudd:intermediate_sizes=[192,221,250,279,308,337,367,396,425,454,483,512]"
}

# Where a paper and its code disagree: the other reading, against the default in twelve; two are among the others.
literal() {
  text literal/lime_static --lr 2e-3,4e-3 --arch lime_static:kv_init=fan_in  # not for the default's best rate alone:
  text literal/lime_dynamic --lr 2e-3,4e-3 --arch lime_dynamic:kv_init=fan_in  # LLaMA's keys and values want a lower one
  text literal/hyper --lr "$(best_rate hyper)" --arch "hyper:norm=rmsnorm:prenorm=rmsnorm,hyper:layer_index=sublayer,\
hyper:output_init_scale=true"
  text literal/vertical --lr "$(best_rate vertical)" --arch vertical:residual=false
  text literal/resformer --lr "$(best_rate resformer)" --arch resformer:lambda_scale=frozen
  text literal/satformer --lr "$(best_rate satformer)" --arch satformer:gate_init=uniform
  text literal/mudd --lr "$(best_rate mudd)" --arch mudd:w1_init=literal,mudd:norm=none
  text literal/gpt2 --lr 2e-3 --arch gpt2 --backbone gpt2
  text literal/gpt2-index-scaling --lr 2e-3 --arch gpt2 --backbone gpt2 --scale-attn-by-layer true
}

# Depth at a fixed, narrow width. LIMe's paper compares depths; for the other three the question is ours.
depth() {
  for layers in 8 16 32; do
    text "depth/layers-$layers" --arch llama,lime,hyper,denseformer,vertical --lr 2e-3 --layers $layers --width 64 --heads 2 --ffn 176
  done
}

# The LIMe paper's task with as few updates as show who leaves the plateau; each setting changes one thing.
setting() { part "arith/$1" --preset arith-quick --arch llama,lime --seeds 1,2,3,4,5 --save-every 6000 --keep 1 "${@:2}"; }
arith() {
  setting base
  setting rate --lr 3e-3
  setting batch-512 --batch 512 --steps 750 --warmup 25
  setting operators-6 --data arith:6
}
# Less likely reasons, with two seeds.
arith_grid() {
  for reason in "warm-up --warmup 0" "integers --data arith:4i" "operators-5 --data arith:5" "tiers --data arith:4-6" \
    "decay --weight-decay 0.1" "untied --tie false" "bf16 --dtype bf16" "router-rate --router-lr 1e-3 --arch lime"; do
    # shellcheck disable=SC2086
    setting $reason --seeds 1,2
  done
}
# Hours: the paper's task at 40 % of its updates; named alone.
arith_long() {
  part arith/updates-7812 --preset arith --arch llama,lime --seeds 1,2,3,4,5 --steps 7812 --warmup 195 --answer-samples 512
}

# The text of `make text` in 260 tokens, nearly bytes; words: in 2,048. The first half of what is held out is the
# validation part, which chooses the learning rates; the second half is the test part.
english() { text_in 260 "$out/english"; }
words() { text_in 2048 "$out/words"; }
text_in() {
  [ ! -e "$2/held/manifest.json" ] || return 0
  mkdir -p "$out/english" "$2"
  local text=$out/english/text
  [ -e "$text/corpus.json" ] || run "${PYTHON:-python3}" dev/text/make_text.py "$text"
  run "$build/prepare" --vocab "$1" --val 0 --out "$2/tokens" "$text/train.jsonl"
  run "$build/prepare" --tokenizer "$2/tokens" --val 0 --out "$2/held" "$text/validation.jsonl" "$text/test.jsonl"
}

# AdamW, Muon and NorMuon, each at its own best rate, for LLaMA and LIMe; and AdamW with other betas and decays, each again
# at its own best rate.
recipe() {
  english
  of_recipe optimizers --optimizer adamw,muon,normuon --muon-lr 5e-3,1e-2,2e-2,4e-2,8e-2
  of_recipe adamw-betas-0.9-0.99 --beta2 0.99
  of_recipe adamw-betas-0.8-0.95 --beta1 0.8
  of_recipe adamw-decay-0 --weight-decay 0
  of_recipe adamw-decay-0.4 --weight-decay 0.4
  # LLaMA with more steps of the best AdamW: how many of them are worth Muon's?
  for steps in 450 600 1200; do
    of_recipe "adamw-$steps-steps" --arch llama --beta1 0.8 --lr 2e-3,4e-3,8e-3 --steps $steps --eval-every 150 \
      --save-every $steps
  done
}
of_recipe() {
  part "recipe/$1" --arch llama,lime --data "$out/english/tokens" --val-data "$out/english/held/train_*.bin" --width 64 \
    --layers 4 --heads 4 --ffn 192 --tie true --seq 64 --batch 16 --steps 300 --warmup 20 --schedule cosine_to_floor \
    --lr-floor 0.1 --weight-decay 0.1 --clip 1 --lr 1e-3,2e-3,4e-3,8e-3,1.6e-2 --seeds 1,2,3,4,5,6,7,8 --eval-every 50 \
    --eval-samples 512 --save-every 300 --keep 1 "${@:2}"
}

# QLabs' Operator-1 at equal tokens: six a parameter, width 16 d, heads of 16, d layers. d 12 only if it is named: hours.
operator1() { operator1_d4 && operator1_d6 && operator1_d8; }
operator1_d4() { of_operator1 4 176 320 16 "$both,$halves" adamw,muon; }
operator1_d6() { of_operator1 6 256 1000 16 "$both,$halves" adamw,muon; }
operator1_d8() { of_operator1 8 352 400 32 "$both" muon; }  # two a parameter: six are 12 hours of a core
operator1_d12() { of_operator1 12 512 3500 64 "$both" muon; }
both=llama,llama:loop=anchor halves=llama:loop=anchor:loop_norm=none,llama:loop=anchor:loop_alpha=0
# d, feed-forward width, steps, batch, architectures, optimizers
of_operator1() {
  english
  local lr=2e-3,4e-3,8e-3
  [ "$6" != muon ] || lr=4e-3  # several are for AdamW to choose among; Muon tries half of it and twice
  part "operator1/d$1" --arch "$5" --optimizer "$6" --data "$out/english/tokens" \
    --val-data "$out/english/held/train_*.bin" --width $((16 * $1)) --layers "$1" --heads "$1" --ffn "$2" --tie true \
    --seq 256 --batch "$4" --steps "$3" --warmup $(($3 / 20)) --schedule wsd_linear --weight-decay 0.1 --clip 1 --beta1 0.8 \
    --lr "$lr" --muon-lr 1e-2,2e-2,4e-2 --seeds 1,2,3 --eval-every $(($3 / 4)) --eval-samples 1024 \
    --save-every "$3" --keep 1
}
# All of it by one command, at one rate.
depth_2026() {
  english
  local loops=llama:loop=anchor,llama:loop=anchor:loop_passes=2,llama:loop=stack:loop_passes=2
  loops=$loops,llama:loop=stack:loop_passes=2:exit_gate=true,llama:block_norm=branch
  local packs=shortcuts,shortcuts:unet=true,shortcuts:value_from=x0,shortcuts:lanes_from=3,shortcuts:attn_saved=2
  packs=$packs,shortcuts:mudd_tail=both,gemma3n,moda
  part depth_2026/d6 --arch "llama,$loops,llama:engram_layers=[1]:engram_rows=4096,depth_attention,$packs" \
    --data "$out/english/tokens" --val-data "$out/english/held/train_*.bin" --width 96 --layers 6 --heads 6 --ffn 256 \
    --tie true --seq 128 --batch 16 --steps 300 --warmup 15 --schedule wsd_linear --weight-decay 0.1 --clip 1 \
    --beta1 0.8 --lr 4e-3 --seeds 1,2 --eval-every 75 --eval-samples 512 --save-every 300 --keep 1
}

# Does the best rate of one size stay the best of another? Widths at L = 4 and depths at C = 64, without rules and by
# --transfer; and the base shape, where the rules change no bit. AdamW at each --lr, Muon at each --muon-lr.
transfer() {
  of_transfer base 64 4
  local rules
  for rules in none completep; do
    of_transfer "width-128-$rules" 128 4
    of_transfer "layers-8-$rules" 64 8
    of_transfer "layers-16-$rules" 64 16
    of_transfer "width-256-$rules" 256 4
  done
}
# NAME-RULES, width, layers
of_transfer() {
  english
  local base=()
  [[ $1 != *-completep ]] || base=(--transfer completep --base-width 64 --base-layers 4)
  part "transfer/$1" --arch llama --data "$out/english/tokens" --val-data "$out/english/held/train_*.bin" --width "$2" \
    --layers "$3" --heads $(($2 / 16)) --ffn $((3 * $2)) --tie true --seq 64 --batch 16 --steps 300 --warmup 20 \
    --schedule cosine_to_floor --lr-floor 0.1 --weight-decay 0.1 --clip 1 --beta1 0.8 --optimizer adamw,muon \
    --lr 5e-4,1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2 --muon-lr 2.5e-3,5e-3,1e-2,2e-2,4e-2,8e-2,1.6e-1 --every-rate \
    --seeds 1,2 --eval-every 300 --eval-samples 512 --save-every 300 --keep 1 "${base[@]}"
}

# Tested on the published questions where PROSQA names their file, prosqa_test.json of github.com/facebookresearch/coconut.
prosqa() {
  part prosqa/prosqa --data "prosqa${PROSQA:+:$PROSQA}" --train-samples 50000 --arch llama,lime,hyper,denseformer --width 64 \
    --heads 4 --ffn 176 --layers 6 --batch 8 --steps 12000 --warmup 600 --lr 2e-3 --schedule cosine --dtype bf16 \
    --eval-every 1000 --eval-samples 64 --answer-samples 500 --save-every 1000 --keep 1 --seeds "$seeds"
}

# A model of text, fine-tuned on tasks in the text's tokens: LLaMA beside LIMe. The record is what evaluate prints.
fine_tuning() {
  corpus
  for arch in llama lime; do
    trained text "$out/corpus/tokens" --width 64 --layers 6 --heads 4 --ffn 176 --seq 256 --steps 1200 --warmup 60 --lr 3e-3 \
      --seed 1 --eval-every 300
    trained arith arith:3 --init "$out/fine_tuning/text_$arch" --batch 32 --steps 6000 --warmup 300 --eval-every 1000
    trained prosqa "prosqa${PROSQA:+:$PROSQA}" --init "$out/fine_tuning/text_$arch" --batch 8 --steps 1000 --warmup 50 \
      --eval-every 250 --eval-samples 64 --answer-samples 64
  done
}
# trained NAME DATA FLAGS...: one run of $arch, begun or continued, and its record.
trained() {
  local run=$out/fine_tuning/$1_$arch record=$records/fine_tuning/$1_$arch.txt answers=()
  if [ -e "$run/flags.json" ]; then run "$build/train_$arch" --resume --out "$run"
  else run "$build/train_$arch" --data "$2" --out "$run" "${@:3}"; fi
  [ "$1" = text ] || answers=(--answers 500)
  mkdir -p "${record%/*}"
  "$build/evaluate" --model "$run" --data "$2" "${answers[@]}" >"$record.part" && mv "$record.part" "$record"
}

# Minutes on any machine; tests/system/test_experiments.sh trains it again and wants the same bits.
small() {
  part small/small --preset arith-quick --data arith:3 --arch llama,lime --seeds 1,2 --steps 400 --warmup 40 --lr 3e-3 \
    --train-samples 5000 --test-samples 500 --eval-every 50 --answer-samples 64 --save-every 400 --keep 1
}

# For those that come after: the rate at which an architecture was best, of the twelve or of a named record.
best_rate() { "$build/figures" --best "$1" --as "$records/${2:-twelve/equal-tokens}.json"; }

main() {
  [ $# -gt 0 ] || set -- small arith prosqa twelve longer newer routers variants literal depth recipe operator1 \
    depth_2026 arith_grid
  for experiment in "$@"; do
    case $experiment in
      small | arith | arith_grid | arith_long | prosqa | twelve | longer | newer | speed | routers | variants | literal | \
        depth | words | corpus | fine_tuning | recipe | transfer | operator1 | operator1_d4 | operator1_d6 | operator1_d8 | operator1_d12 | depth_2026)
        "$experiment" ;;
      *) echo "error: $experiment is no experiment; see the head of $0" >&2 && exit 64 ;;
    esac
  done
}
main "$@"; exit  # in one line, so that whoever edits this script does not change what runs
