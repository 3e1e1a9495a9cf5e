#include "cli/other_names.h"

#include <algorithm>

namespace crossply {
namespace {

struct OtherName {
  const char *theirs, *ours, *remark = "";
};

constexpr const char* no_epochs = " (one epoch is as many steps as there are sequences, divided by --batch)";

// Of Hugging Face's Trainer and configs, nanoGPT, llm.c, torchtitan, Megatron-LM and llama.cpp.
constexpr OtherName other_names[] = {
    {"--learning-rate", "--lr"},
    {"--max-lr", "--lr"},
    {"--min-lr", "--lr-floor", " (a multiple of --lr)"},
    {"--lr-scheduler-type", "--schedule"},
    {"--lr-decay-style", "--schedule"},
    {"--warmup-steps", "--warmup"},
    {"--warmup-iters", "--warmup"},
    {"--lr-warmup-iters", "--warmup"},
    {"--warmup-ratio", "--warmup", " (in steps)"},
    {"--batch-size", "--batch"},
    {"--micro-batch-size", "--batch"},
    {"--per-device-train-batch-size", "--batch"},
    {"--local-batch-size", "--batch"},
    {"--device-batch-size", "--batch"},
    {"--global-batch-size", "--accumulate", " (--batch x --accumulate sequences a step)"},
    {"--gradient-accumulation-steps", "--accumulate"},
    {"--grad-accum-steps", "--accumulate"},
    {"--epochs", "--steps", no_epochs},
    {"--num-epochs", "--steps", no_epochs},
    {"--num-train-epochs", "--steps", no_epochs},
    {"--max-steps", "--steps"},
    {"--max-iters", "--steps"},
    {"--train-iters", "--steps"},
    {"--num-iterations", "--steps"},
    {"--training-steps", "--steps"},
    {"--block-size", "--seq"},
    {"--seq-len", "--seq"},
    {"--seq-length", "--seq"},
    {"--sequence-length", "--seq"},
    {"--max-seq-len", "--seq"},
    {"--max-seq-length", "--seq"},
    {"--context-length", "--seq"},
    {"--ctx-size", "--seq"},
    {"--hidden-size", "--width"},
    {"--d-model", "--width"},
    {"--n-embd", "--width"},
    {"--dim", "--width"},
    {"--num-layers", "--layers"},
    {"--n-layer", "--layers"},
    {"--n-layers", "--layers"},
    {"--num-hidden-layers", "--layers"},
    {"--depth", "--layers"},
    {"--num-heads", "--heads"},
    {"--n-head", "--heads"},
    {"--n-heads", "--heads"},
    {"--num-attention-heads", "--heads"},
    {"--num-key-value-heads", "--kv-heads"},
    {"--num-query-groups", "--kv-heads"},
    {"--n-kv-heads", "--kv-heads"},
    {"--head-dim", "--head-width"},
    {"--kv-channels", "--head-width"},
    {"--intermediate-size", "--ffn"},
    {"--ffn-hidden-size", "--ffn"},
    {"--vocab-size", "--vocab"},
    {"--tie-word-embeddings", "--tie"},
    {"--max-grad-norm", "--clip"},
    {"--grad-clip", "--clip"},
    {"--clip-grad", "--clip"},
    {"--wd", "--weight-decay"},
    {"--adam-beta1", "--beta1"},
    {"--adam-beta2", "--beta2"},
    {"--random-seed", "--seed"},
    {"--output-dir", "--out"},
    {"--out-dir", "--out"},
    {"--output", "--out"},
    {"--save-dir", "--out"},
    {"--save-steps", "--save-every"},
    {"--save-interval", "--save-every"},
    {"--save-total-limit", "--keep"},
    {"--eval-steps", "--eval-every"},
    {"--eval-interval", "--eval-every"},
    {"--eval-iters", "--eval-samples", " (in sequences)"},
    {"--resume-from-checkpoint", "--resume", " (of the run in --out)"},
    {"--model-name-or-path", "--init"},
    {"--model-name-or-path", "--model"},
    {"--init-from", "--init"},
    {"--pretrained", "--init"},
    {"--checkpoint", "--model"},
    {"--ckpt", "--model"},
    {"--model-path", "--model"},
    {"--dataset", "--data"},
    {"--train-file", "--data"},
    {"--data-path", "--data"},
    {"--input", "--data"},
    {"--precision", "--dtype"},
    {"--bf16", "--dtype", " bf16"},
    {"--fp16", "--dtype", " bf16"},
    {"--architecture", "--arch"},
    {"--models", "--arch"},
    {"--max-new-tokens", "--max-new"},
    {"--max-tokens", "--max-new"},
    {"--n-predict", "--max-new"},
    {"--cuda", "--device", " cuda"},
    {"--cpu", "--device", " cpu"},
};

}  // namespace

std::string flag_of_other_name(const CLI::App& app, const std::string& typed) {
  std::string name = typed;
  std::replace(name.begin(), name.end(), '_', '-');
  for (const OtherName& other : other_names)
    if (name == other.theirs && has_flag_named(app, other.ours)) return std::string(other.ours) + other.remark;
  return "";
}

}  // namespace crossply
