#include "cli/other_names.h"

#include <algorithm>

#include "engine/check.h"

namespace crossply {
namespace {

struct OtherNames {
  const char *ours, *theirs, *remark = "";
};

// Of Hugging Face's Trainer and configs, nanoGPT, llm.c, torchtitan, Megatron-LM and llama.cpp.
constexpr OtherNames other_names[] = {
    {"--lr", "--learning-rate --max-lr"},
    {"--lr-floor", "--min-lr", " (a multiple of --lr)"},
    {"--schedule", "--lr-scheduler-type --lr-decay-style"},
    {"--warmup", "--warmup-steps --warmup-iters --lr-warmup-iters"},
    {"--warmup", "--warmup-ratio", " (in steps)"},
    {"--batch",
     "--batch-size --micro-batch-size --per-device-train-batch-size --local-batch-size "
     "--device-batch-size"},
    {"--accumulate", "--global-batch-size", " (--batch x --accumulate sequences a step)"},
    {"--accumulate", "--gradient-accumulation-steps --grad-accum-steps"},
    {"--steps", "--epochs --num-epochs --num-train-epochs",
     " (one epoch is as many steps as there are sequences, divided by --batch)"},
    {"--steps", "--max-steps --max-iters --train-iters --num-iterations --training-steps"},
    {"--seq",
     "--block-size --seq-len --seq-length --sequence-length --max-seq-len --max-seq-length "
     "--context-length --ctx-size"},
    {"--width", "--hidden-size --d-model --n-embd --dim"},
    {"--layers", "--num-layers --n-layer --n-layers --num-hidden-layers --depth"},
    {"--heads", "--num-heads --n-head --n-heads --num-attention-heads"},
    {"--kv-heads", "--num-key-value-heads --num-query-groups --n-kv-heads"},
    {"--head-width", "--head-dim --kv-channels"},
    {"--ffn", "--intermediate-size --ffn-hidden-size"},
    {"--vocab", "--vocab-size"},
    {"--tie", "--tie-word-embeddings"},
    {"--clip", "--max-grad-norm --grad-clip --clip-grad"},
    {"--weight-decay", "--wd"},
    {"--beta1", "--adam-beta1"},
    {"--beta2", "--adam-beta2"},
    {"--seed", "--random-seed"},
    {"--out", "--output-dir --out-dir --output --save-dir"},
    {"--save-every", "--save-steps --save-interval"},
    {"--keep", "--save-total-limit"},
    {"--eval-every", "--eval-steps --eval-interval"},
    {"--eval-samples", "--eval-iters", " (in sequences)"},
    {"--resume", "--resume-from-checkpoint", " (of the run in --out)"},
    {"--init", "--model-name-or-path --init-from --pretrained"},
    {"--model", "--model-name-or-path --checkpoint --ckpt --model-path"},
    {"--data", "--dataset --train-file --data-path --input"},
    {"--dtype", "--precision"},
    {"--optimizer", "--optim --muon", " muon"},
    {"--documents", "--packing --sample-packing --reset-attention-mask --intra-doc-masking"},
    {"--attention-window", "--sliding-window"},
    {"--dtype", "--bf16 --fp16", " bf16"},
    {"--arch", "--architecture --models"},
    {"--max-new", "--max-new-tokens --max-tokens --n-predict"},
    {"--device", "--cuda", " cuda"},
    {"--device", "--cpu", " cpu"},
};

}  // namespace

std::string flag_of_other_name(const CLI::App& app, const std::string& typed) {
  std::string name = typed;
  std::replace(name.begin(), name.end(), '_', '-');
  for (const auto& [ours, theirs, remark] : other_names)
    if (str(" ", theirs, " ").find(" " + name + " ") != std::string::npos && has_flag_named(app, ours))
      return std::string(ours) + remark;
  return "";
}

}  // namespace crossply
