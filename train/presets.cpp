// The settings of the LIMe papers. Where a paper is silent, the value is ours and the line says so.
#include "train/options.h"

namespace crossply {
namespace {

struct Size {
  int64_t C, F, L, H, K;  // K = 0: as many key/value heads as query heads
};

void set_size(TrainOptions& o, const Size& size) {
  o.config.hidden_size = size.C;
  o.config.intermediate_size = size.F;
  o.config.num_hidden_layers = size.L;
  o.config.num_attention_heads = size.H;
  o.config.num_key_value_heads = size.K;
  o.config.head_dim = 0;
  o.config.tie_word_embeddings = true;
}

// Language modelling: 20,000 steps of 1024 sequences of 2048 tokens, GPT-2's vocabulary.
void language_model(TrainOptions& o, const Size& size) {
  set_size(o, size);
  o.config.vocab_size = 50257;
  o.config.max_position_embeddings = 2048;
  o.data.seq_len = 2048;
  o.steps = 20000;
  o.batch = 4;
  o.accumulate = 256;
  o.lr = 1e-3;
  o.schedule = "cosine";
  o.warmup = 200;
  o.lr_floor = 1e-6;
  o.adamw.weight_decay = 0.1;
}

// Generated tasks: 4 blocks, 4 heads, width 32, as in the paper; F and the decay are ours.
void arithmetic(TrainOptions& o) {
  set_size(o, {32, 128, 4, 4, 0});
  o.config.vocab_size = 0;
  o.data.spec = "arith:6";
  o.batch = 128;
  o.accumulate = 4;
  o.steps = 19531;  // 200 epochs of 50,000 samples
  o.lr = 1e-3;
  o.schedule = "linear";
  o.warmup = 488;  // 5 epochs, ours
  o.adamw.weight_decay = 0.01;
}

// The same model at the same rate with 4 operators, for minutes instead of hours.
void arithmetic_quick(TrainOptions& o) {
  arithmetic(o);
  o.data.spec = "arith:4";
  o.batch = 64;
  o.accumulate = 1;
  o.steps = 6000;
  o.warmup = 200;
}

// Fine-tuning on ProsQA, 10 epochs of about 18,000 graphs; the paper starts from a pre-trained 150M model (--init).
void prosqa(TrainOptions& o) {
  language_model(o, {768, 3072, 12, 12, 0});
  o.config.vocab_size = 0;
  o.data.spec = "prosqa";
  o.data.seq_len = 0;
  o.data.train_samples = 17886;
  o.batch = 16;
  o.accumulate = 8;
  o.steps = 1400;
  o.warmup = 140;
  o.lr = 1e-4;
  o.schedule = "linear";
  o.lr_floor = 0;
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"arith-quick", "the arithmetic task with 4 operators, minutes on a laptop", arithmetic_quick},
      {"arith", "the LIMe paper's arithmetic task: 6 operators, 50,000 samples, 200 epochs", arithmetic},
      {"prosqa", "the LIMe paper's ProsQA fine-tuning, 150M sizes", prosqa},
      {"150m", "150M, the LIMe paper's router ablation (sizes ours)",
       [](TrainOptions& o) { language_model(o, {768, 3072, 12, 12, 0}); }},
      {"1b", "1B with 8 key/value heads", [](TrainOptions& o) { language_model(o, {2048, 8192, 16, 32, 8}); }},
      {"1.2b", "1.2B, full attention", [](TrainOptions& o) { language_model(o, {2048, 8192, 16, 32, 0}); }},
      {"deep32", "32 layers (width ours)", [](TrainOptions& o) { language_model(o, {512, 2048, 32, 8, 0}); }},
      {"deep64", "64 layers (width ours)", [](TrainOptions& o) { language_model(o, {512, 2048, 64, 8, 0}); }},
      {"deep128", "128 layers (width ours)", [](TrainOptions& o) { language_model(o, {512, 2048, 128, 8, 0}); }},
  };
  return all;
}

}  // namespace crossply
