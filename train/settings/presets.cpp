// The settings of the papers. Where a paper is silent, the value is ours and the line says so.
#include <algorithm>
#include <cmath>

#include "models/combined.h"
#include "train/settings/settings.h"

namespace crossply {
namespace {

void set_size(Settings& settings, const Preset& preset) {
  settings.config.hidden_size = preset.C;
  settings.config.intermediate_size = preset.F;
  settings.config.num_hidden_layers = preset.L;
  settings.config.num_attention_heads = preset.H;
  settings.config.num_key_value_heads = preset.K;
  settings.config.head_dim = 0;
  settings.config.tie_word_embeddings = true;
}

// Language modelling: 20,000 steps of 1024 sequences of 2048 tokens, GPT-2's vocabulary.
void language_model(Settings& settings, const Preset& preset) {
  set_size(settings, preset);
  settings.config.vocab_size = 50257;
  settings.config.max_position_embeddings = 2048;
  settings.data.seq_len = 2048;
  settings.steps = 20000;
  settings.batch = 4;
  settings.accumulate = 256;
  settings.lr = 1e-3;
  settings.schedule = "cosine";
  settings.warmup = 200;
  settings.lr_floor = 1e-6;
  settings.adamw.weight_decay = 0.1;
}

// The deep models of LIMe's first version: narrow, a quarter of the steps.
void deep_model(Settings& settings, const Preset& preset) {
  language_model(settings, preset);
  settings.steps = 5000;
}

// Generated tasks: 4 blocks, 4 heads, width 32, as in the paper; F and the decay are ours.
void arithmetic(Settings& settings, const Preset& preset) {
  set_size(settings, preset);
  settings.config.vocab_size = 0;
  settings.data.spec = "arith:6";
  settings.batch = 128;
  settings.accumulate = 4;
  settings.steps = 19531;  // 200 epochs of 50,000 samples
  settings.lr = 1e-3;
  settings.schedule = "linear";
  settings.warmup = 488;  // 5 epochs, ours
  settings.adamw.weight_decay = 0.01;
}

// The same model at the same rate with 4 operators, for minutes instead of hours.
void arithmetic_quick(Settings& settings, const Preset& preset) {
  arithmetic(settings, preset);
  settings.data.spec = "arith:4";
  settings.batch = 64;
  settings.accumulate = 1;
  settings.steps = 6000;
  settings.warmup = 200;
}

// Fine-tuning on ProsQA, 10 epochs of about 18,000 graphs; the paper starts from a pre-trained 150M model (--init),
// whose own tokenizer encodes questions, steps and answers. Without --init the tokens are the task's words.
void prosqa(Settings& settings, const Preset& preset) {
  language_model(settings, preset);
  settings.config.vocab_size = 0;
  settings.data.spec = "prosqa";
  settings.data.seq_len = 0;
  settings.data.train_samples = 17886;
  settings.batch = 16;
  settings.accumulate = 8;
  settings.steps = 1400;
  settings.warmup = 140;
  settings.lr = 1e-4;
  settings.schedule = "linear";
  settings.lr_floor = 0;
}

// The SATFormer paper: V 32,000, q/k norm, 524,288 tokens a step in rows of 4096, cosine to a tenth.
void sat_model(Settings& settings, const Preset& preset) {
  language_model(settings, preset);
  settings.config.vocab_size = 32000;
  settings.config.qk_norm = true;
  settings.config.max_position_embeddings = settings.data.seq_len = 4096;
  settings.batch = 4;
  settings.accumulate = 32;
  settings.steps = preset.steps;
  settings.lr = preset.lr;
  settings.schedule = "cosine_to_floor";
  settings.warmup = preset.warmup;
  settings.lr_floor = 0.1;
}

// MUDDFormer's feed-forward widths over depth: from F/2 to 3F/2, to the nearest 256 (halves down).
std::string rising_widths(int64_t F, int64_t L) {
  std::string list;
  for (int64_t n = 0; n < L; ++n) {
    const double depth = L > 1 ? static_cast<double>(n) / static_cast<double>(L - 1) : 0.5;
    const double ffn = static_cast<double>(F) * (0.5 + depth);
    list += (n > 0 ? "," : "") + std::to_string(std::max<int64_t>(256, (std::lrint(ffn) + 127) / 256 * 256));
  }
  return "[" + list + "]";
}

// The structure of a block, of any size, of an architecture that the preset names.
void block_alone(Settings&, const Preset&) {}
void block_with_engram(Settings& settings, const Preset&) { settings.config.engram.layers = "[1]"; }

// Of a layer count: "3/7" stands for that part of it.
std::string part_of_layers(const std::string& fraction, int64_t L) {
  const size_t slash = fraction.find('/');
  return std::to_string(std::max<int64_t>(1, std::stoll(fraction) * L / std::stoll(fraction.substr(slash + 1))));
}

// What the SATFormer paper sets for its baselines. "rising" stands for rising_widths of the model's own sizes.
const std::vector<Preset::Own> sat_own = {{"hyper", "rate", "2"},
                                          {"hyper", "norm", "layernorm"},
                                          {"hyper", "prenorm", "rmsnorm"},
                                          {"hyper", "layer_index", "sublayer"},
                                          {"hyper", "output_init_scale", "true"},
                                          {"mudd", "intermediate_sizes", "rising"}};

// What the SATFormer paper's text says against its files and code. The -text presets have the text's rates, too.
const std::vector<Preset::Own> sat_text_own = [] {
  std::vector<Preset::Own> own = sat_own;
  own.insert(own.end(), {{"denseformer", "dilation", "4"},
                         {"denseformer", "period", "5"},
                         {"resformer", "lambda2", "frozen"},
                         {"satformer", "gate_init", "uniform"}});
  return own;
}();

// The vertical attention paper: Llama 3's vocabulary and rotation, heads of 128, a constant rate without warm-up. The
// initialisation, the second moment's decay and the absence of clipping are ours.
void vertical_model(Settings& settings, const Preset& preset) {
  language_model(settings, preset);
  settings.config.vocab_size = 128256;
  settings.config.head_dim = 128;
  settings.config.tie_word_embeddings = false;
  settings.config.rope_theta = 500000;
  settings.config.norm_eps = 1e-5;
  settings.config.max_position_embeddings = settings.data.seq_len = 4096;
  settings.batch = 4;
  settings.accumulate = 64;
  settings.lr = 1e-4;
  settings.router_lr = 1e-2;
  settings.schedule = "constant";
  settings.warmup = 0;
  settings.adamw.weight_decay = 0.01;
  settings.adamw.beta2 = 0.999;
  settings.adamw.clip = 0;
}

// nanochat's sizes, tokens and vocabulary on this backbone: a SwiGLU of as many weights in place of a squared ReLU,
// norms of queries and keys in front of the rotation, attention to all tokens in every layer. It has another optimiser,
// Muon: AdamW, the rate and its cosine are ours.
void nanochat(Settings& settings, const Preset& preset) {
  language_model(settings, preset);
  settings.config.vocab_size = 32768;
  settings.config.head_dim = 128;
  settings.config.tie_word_embeddings = false;
  settings.config.qk_norm = true;
  settings.config.rope_theta = 100000;
  settings.accumulate = preset.L > 12 ? 128 : 64;  // 524,288 tokens a step, or twice as many
  settings.steps = preset.steps;
  settings.lr = preset.lr;
  settings.warmup = preset.warmup;
  settings.schedule = "cosine_to_floor";
  settings.lr_floor = 0.05;
}

// GPT-2 as in the Inheritune paper's code: no biases, V padded, 384 sequences of 1024 tokens a step. Where text and
// code disagree: Medium's rate ends at the text's 1e-5, not at the code's 6e-5; logits are divided by i + 1, too, which
// the code alone says, and not for the small size, whose tokens a step are ours. docs/inheritune.md has the runs.
void gpt2_medium(Settings& settings, const Preset& preset) {
  if (!settings.config.gpt2())
    fail(Exit::usage, "--preset ", preset.name, " is of the backbone gpt2: train_gpt2 has it, and other architectures ",
         "have it with --backbone gpt2");
  set_size(settings, preset);
  settings.config.vocab_size = 50304;
  settings.config.max_position_embeddings = settings.data.seq_len = 1024;
  settings.config.bias = false;
  settings.config.scale_attn_by_inverse_layer_idx = true;
  settings.steps = 100000;
  settings.batch = 12;
  settings.accumulate = 32;
  settings.lr = preset.lr;
  settings.schedule = "cosine_from_zero";
  settings.warmup = 2000;
  settings.lr_floor = 1e-5 / preset.lr;
  settings.adamw.weight_decay = 0.1;
}

void gpt2_small(Settings& settings, const Preset& preset) {
  gpt2_medium(settings, preset);
  settings.config.scale_attn_by_inverse_layer_idx = false;
  settings.lr_floor = 0.05;
}

// Large and XL: 128 sequences a step.
void gpt2_large(Settings& settings, const Preset& preset) {
  gpt2_medium(settings, preset);
  settings.batch = 4;
}

// FineWeb-Edu: 60 sequences a step, and another decay of the second moment.
void gpt2_fineweb(Settings& settings, const Preset& preset) {
  gpt2_medium(settings, preset);
  settings.batch = 5;
  settings.accumulate = 12;
  settings.adamw.beta2 = 0.999;
}

// Students of --teacher: half the steps, the rate ends at a tenth. An earlier version of the text has 49,152 tokens a
// step.
void gpt2_student(Settings& settings, const Preset& preset) {
  gpt2_medium(settings, preset);
  settings.steps = 50000;
  settings.lr_floor = 0.1;
}

// The extra runs of the paper's appendix: 48 sequences a step.
void gpt2_extra(Settings& settings, const Preset& preset) {
  gpt2_medium(settings, preset);
  settings.batch = 6;
  settings.accumulate = 8;
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset::Own> pruned = {{"lime_static", "top_p", "0.9"}};
  static const std::vector<Preset::Own> nano_own = {{"shortcuts", "embed_norm", "true"}};
  // DeepSeek-V4.1: streams that are read by the weights of the sublayer before. Gemma 3n: 15 of 35 layers share.
  // modded-nanogpt, record of April 2026: two lanes and attention to a saved stream from layer 7 of 11 on.
  static const std::vector<Preset::Own> v4_own = {{"mhc+kv_share", "reads", "previous"}};
  static const std::vector<Preset::Own> gemma_own = {{"gemma3n+kv_share", "sharing", "suffix"},
                                                     {"gemma3n+kv_share", "num_kv_shared_layers", "3/7"}};
  static const std::vector<Preset::Own> values_own = {
      {"mhc+shortcuts", "resid", "false"}, {"mhc+shortcuts", "x0", "false"}, {"mhc+shortcuts", "backout", "false"}};
  static const std::vector<Preset::Own> speed_own = {{"shortcuts", "embed_norm", "true"},
                                                     {"shortcuts", "lanes_from", "7/11"},
                                                     {"shortcuts", "attn_saved", "7/11"},
                                                     {"shortcuts", "mudd_tail", "both"}};
  const auto block = [](const char* name, const char* about, auto apply, const std::vector<Preset::Own>& own,
                        const char* arch) {
    Preset preset{name, about, apply, 0, 0, 0, 0};
    preset.options = own, preset.arch = arch;
    return preset;
  };
  // clang-format off
  static const std::vector<Preset> all = {
      // name, about, setting, C, F, L, H, K, rate, steps, warm-up, options of single architectures, for students
      {"arith-quick", "the arithmetic task with 4 operators, minutes on a laptop", arithmetic_quick, 32, 128, 4, 4},
      {"arith", "the LIMe paper's arithmetic task: 6 operators, 50,000 samples, 200 epochs", arithmetic, 32, 128, 4, 4},
      {"prosqa", "the LIMe paper's ProsQA fine-tuning: of --init, or 150M sizes", prosqa, 768, 3072, 12, 12},
      {"150m", "150M, the LIMe paper's router ablation (sizes ours)", language_model, 768, 3072, 12, 12},
      {"1b", "1B with 8 key/value heads", language_model, 2048, 8192, 16, 32, 8},
      {"1.2b", "1.2B, full attention", language_model, 2048, 8192, 16, 32},
      {"deep32", "32 narrow layers, LIMe's first version", deep_model, 256, 1024, 32, 8, 0, 0, 0, 0, pruned},
      {"deep64", "64 narrow layers, LIMe's first version", deep_model, 256, 1024, 64, 8, 0, 0, 0, 0, pruned},
      {"deep128", "128 narrow layers, LIMe's first version", deep_model, 256, 1024, 128, 8, 0, 0, 0, 0, pruned},
      {"130m", "the SATFormer paper's small size", sat_model, 768, 3072, 11, 12, 0, 2e-3, 9536, 95, sat_own},
      {"340m", "its medium size", sat_model, 1024, 4096, 18, 16, 0, 1.5e-3, 19073, 190, sat_own},
      {"760m", "its large size", sat_model, 1536, 6144, 19, 24, 0, 1e-3, 38146, 381, sat_own},
      {"760m-thin", "its thin, long size (schedule ours)", sat_model, 1536, 4352, 24, 16, 0, 1e-3, 38146, 381, sat_own},
      {"1.3b", "its largest size", sat_model, 2048, 5632, 24, 32, 0, 8e-4, 57220, 572, sat_own},
      {"130m-text", "130m with what its text says", sat_model, 768, 3072, 11, 12, 0, 1e-3, 9536, 95, sat_text_own},
      {"340m-text", "340m, the same", sat_model, 1024, 4096, 18, 16, 0, 1.5e-3, 19073, 190, sat_text_own},
      {"760m-text", "760m, the same", sat_model, 1536, 6144, 19, 24, 0, 2e-3, 38146, 381, sat_text_own},
      {"d12", "nanochat's small model (optimiser ours)", nanochat, 768, 2048, 12, 6, 0, 1e-3, 2520, 40, nano_own},
      {"d20", "its usual size (optimiser ours)", nanochat, 1280, 3456, 20, 10, 0, 7e-4, 4980, 40, nano_own},
      {"va50m", "the vertical attention paper's small size", vertical_model, 192, 768, 6, 3, 1},
      {"va100m", "its medium size", vertical_model, 384, 1536, 8, 6, 3},
      {"va300m", "its large size", vertical_model, 768, 3072, 12, 12, 4},
      {"gpt2-small", "the Inheritune paper's GPT-2, small, of any --layers", gpt2_small, 768, 3072, 12, 12, 0, 6e-4},
      {"gpt2-medium", "its medium size", gpt2_medium, 1024, 4096, 24, 16, 0, 3e-4},
      {"gpt2-large", "its large size", gpt2_large, 1280, 5120, 36, 20, 0, 2e-4},
      {"gpt2-xl", "its largest size", gpt2_large, 1600, 6400, 48, 25, 0, 1.5e-4},
      {"gpt2-medium-fineweb", "its medium size on FineWeb-Edu", gpt2_fineweb, 1024, 4096, 24, 16, 0, 2e-4},
      {"gpt2-large-fineweb", "its large size on FineWeb-Edu", gpt2_fineweb, 1280, 5120, 32, 20, 0, 2e-4},
      {"gpt2-medium-kd", "its medium size as a student", gpt2_student, 1024, 4096, 16, 16, 0, 3e-4, 0, 0, {}, true},
      {"gpt2-medium-50k", "its medium size with 49,152 tokens a step", gpt2_extra, 1024, 4096, 24, 16, 0, 3e-4},
      block("v4_block", "DeepSeek-V4.1's block: mHC in a single pass, shared keys and values, Engram",
            block_with_engram, v4_own, "mhc+kv_share"),
      block("gemma_like", "Gemma 3n's: per-layer embeddings, LAuReL, shared keys and values", block_alone, gemma_own,
            "gemma3n+kv_share"),
      block("mhc_values", "mHC beside value embeddings of speed runs", block_alone, values_own, "mhc+shortcuts"),
      block("speedrun", "modded-nanogpt's of April 2026: two lanes, saved attention input, mixed tail", block_alone,
            speed_own, "shortcuts"),
  };
  // clang-format on
  return all;
}

const Preset* find_preset(const std::string& name) {
  const auto found = std::ranges::find(presets(), name, &Preset::name);
  return found == presets().end() ? nullptr : &*found;
}

void refuse_preset(const Preset& preset) {
  fail(Exit::usage, "--preset ", preset.name, " is a block of ", preset.arch, "; train it by ",
       trainer_of(preset.arch));
}

void apply_preset(const std::string& name, Settings& settings) {
  const Preset* preset = find_preset(name);
  if (preset == nullptr) {
    std::string known;
    for (const Preset& one : presets()) known += " " + one.name;
    fail(Exit::usage, "unknown preset '", name, "'; known:", known);
  }
  if (!preset->arch.empty() && !same_architecture(preset->arch, settings.config.arch)) refuse_preset(*preset);
  preset->apply(settings, *preset);
  settings.preset = name;
}

static std::map<std::string, std::string> preset_options(const std::string& name, const Config& config) {
  std::map<std::string, std::string> options;
  const Preset* preset = find_preset(name);
  if (preset == nullptr) return options;
  const int64_t F = config.intermediate_size, L = config.num_hidden_layers;
  const std::vector<std::string> parts = parts_of(config.arch);
  for (const Preset::Own& own : preset->options) {
    const bool of_part = std::ranges::count(parts, own.arch) > 0;  // or of the architecture itself
    if (!of_part && !same_architecture(own.arch, config.arch)) continue;
    std::string value = own.value;
    if (value == "rising") value = rising_widths(F, L);
    else if (value.find('/') != std::string::npos) value = part_of_layers(value, L);
    options.emplace(of_part ? option_key(config.arch, own.arch, own.key) : own.key, value);
  }
  return options;
}

void add_preset_options(const std::string& name, Config& config) { config.options.merge(preset_options(name, config)); }

std::string described_preset(const std::string& name, const Config& config) {
  std::string all;
  for (const auto& [key, value] : preset_options(name, config))
    if (const auto set = config.options.find(key); set == config.options.end() || set->second == value)
      all += (all.empty() ? "" : " ") + option_flag(config.arch, key) + " " + value;
  return "--preset " + name + (all.empty() ? "" : ", which sets " + all);
}

}  // namespace crossply
