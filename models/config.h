// The configuration of a model: Hugging Face's LLaMA or GPT-2 keys, plus one object "crossply" for what HF has no key
// for.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/check.h"

namespace crossply {

// How rotary frequencies are divided by `factor`, for sequences longer than those that a model was first trained on.
// The fields are transformers' keys of rope_parameters.
//
//   linear   all of them
//   llama3   those that turn less than low_freq_factor times in the original length; those that turn more than
//            high_freq_factor times stay; in between it is gradual
//   yarn     those of the channels where a pair turns less than beta_slow times in the original length; those that turn
//            more than beta_fast times stay; in between it is gradual, channel by channel. Cosines and sines are
//            multiplied by attention_factor (arXiv 2309.00071).
struct RopeScaling {
  std::string rope_type = "llama3";
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
  double beta_fast = 32, beta_slow = 1;
  std::optional<double> attention_factor, mscale, mscale_all_dim;  // without the first it follows from the others
  bool truncate = true;                                            // yarn's limits are whole channels
  bool operator==(const RopeScaling&) const = default;
};

// Blocks that are applied several times. Of L blocks on disk, P are the prelude, M the core and Q the coda (thirds,
// unless loop_layers says so). The core runs R times; after each pass the stream, or each of several streams, becomes
//
//   x = RMS(x) + alpha e          e: the stream after the prelude
//
// With R = 1 this is QLabs' Operator-1: one norm and one addition, no loop at all. Every execution of a block is an
// application, of which there are A = P + R M + Q (models/loop.h).
//
// A stack is the whole model R times, final norm included, each pass on what the one before has put out; the head reads
// the last. With an exit gate every pass is an exit (kernels/block/exit_gate.h).
struct LoopOptions {
  std::string kind = "none";    // none, anchor, stack
  int64_t passes = 1;           // R
  std::string layers = "[]";    // [P,M,Q]; []: thirds
  bool tied = true;             // false: each pass has a core of its own, so that P + R M + Q blocks are stored
  std::string norm = "passes";  // none; passes: after every pass; all: after the prelude, too
  double alpha = 1;             // 0: nothing is added
  bool end = true;              // is it added after the last pass, too?
  bool exit_gate = false;       // of a stack: training weighs all passes' losses, token by token
  double exit_beta = 0.05;      // what the entropy of these weights counts beside them
  bool operator==(const LoopOptions&) const = default;
};

// Tables of n-grams that are written into the stream before some applications of blocks (models/engram.h). Lists are
// JSON.
struct EngramOptions {
  std::string layers = "[]";       // applications, ascending; []: none, and no Engram
  int64_t order = 3;               // the largest n
  int64_t heads = 8;               // hashes of each n
  int64_t width = 0;               // M, of all rows of a token together; 0: C
  int64_t rows = 65536;            // the least size of the table of an n and head
  std::string boundary = "[]";     // tokens that end a document
  int64_t pad_id = 0;              // stands for what is before it
  int64_t seed = 0;                // of the multipliers
  std::string map = "none";        // a number for each token, equal where they are taken for the same; or a file of it
  std::string multipliers = "[]";  // in place of drawn ones: a list of `order` odd numbers for each Engram
  bool operator==(const EngramOptions&) const = default;
};

struct Config {
  std::string arch = "llama";
  std::string backbone = "llama";          // llama or gpt2, the block; that of arch gpt2 is gpt2
  int64_t vocab_size = 0;                  // V
  int64_t hidden_size = 0;                 // C
  int64_t intermediate_size = 0;           // F
  int64_t num_hidden_layers = 0;           // L
  int64_t num_attention_heads = 0;         // H
  int64_t num_key_value_heads = 0;         // K; 0: H
  int64_t head_dim = 0;                    // D; 0: C / H
  int64_t max_position_embeddings = 2048;  // gpt2: P, the rows of the table of positions
  double norm_eps = 1e-6;                  // of the backbone's norms; gpt2: usually 1e-5
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  bool qk_norm = false;  // RMSNorm over the head width on q and k, before RoPE, as in Qwen3
  double qk_norm_eps = 1e-5;
  bool qkv_bias = false;       // the projections of queries, keys and values have biases, as in Qwen2
  bool mistral = false;        // a plain LLaMA is saved as a Mistral, which is the same model
  int64_t sliding_window = 0;  // W: in some layers tokens see the W last ones only, themselves among them. 0: in none
  // Which layers those are: S (sliding) or L (all that is before), a letter for each. check() repeats a shorter one
  // over the layers, of which the last is then L.
  std::string window_pattern = "SSSL";
  // Of the backbone gpt2 only:
  bool bias = true;                              // false: no biases anywhere, norms with a gain only
  std::string activation_function = "gelu_new";  // the tanh form, or gelu, the erf form
  bool scale_attn_by_inverse_layer_idx = false;  // the logits of layer i (from 0) are divided by i + 1, too
  LoopOptions loop;
  double final_logit_softcapping = 0;  // c: logits z are c tanh(z / c), as in Gemma 2; 0: no cap
  std::string block_norm = "pre";  // branch: a second norm on a sublayer's output; sum: on the stream after it is added
  EngramOptions engram;
  std::map<std::string, std::string> token_ids;  // bos_token_id and the like, as JSON: kept for other readers
  std::map<std::string, std::string> options;    // the connection's own keys, as text; complete after check()

  // One of the options, which check() has found to be of its kind.
  const std::string& text(const std::string& key) const { return options.at(key); }
  bool flag(const std::string& key) const { return options.at(key) == "true"; }
  bool gpt2() const { return backbone == "gpt2"; }
  int64_t integer(const std::string& key) const;
  double number(const std::string& key) const;

  // What a layer attends within, as ops::Attended has it; 0: no window.
  int64_t window_of(int64_t layer) const {
    return sliding_window > 0 && window_pattern.at(static_cast<size_t>(layer)) == 'S' ? sliding_window : 0;
  }

  // This model with these of its blocks, each with its own attention window; a negative number is a fresh block, which
  // has the window of the block in front of it.
  Config with_blocks(const std::vector<int>& blocks) const;

  // (D/2): the angles, in radians, by which RoPE turns each pair of channels from one position to the next.
  std::vector<double> rope_frequencies() const;
  // What RoPE multiplies queries and keys by.
  double rope_factor() const;

  // Fills in what other keys imply, the connection's defaults included, and refuses what cannot be: throws `code` with
  // `where` (a file, or "flags") and the offending values.
  void check(Exit code, const std::string& where);
};

// The sizes: their keys in Hugging Face's LLaMA and in its GPT-2, which has those with a name. The first five must be
// in a LLaMA's config.json.
struct SizeKey {
  const char *key, *gpt2_key;
  int64_t Config::*value;
  int64_t max = int64_t{1} << 30;
};
inline constexpr SizeKey size_keys[] = {
    {"vocab_size", "vocab_size", &Config::vocab_size},
    {"hidden_size", "n_embd", &Config::hidden_size},
    {"intermediate_size", "n_inner", &Config::intermediate_size},
    {"num_hidden_layers", "n_layer", &Config::num_hidden_layers, 4096},
    {"num_attention_heads", "n_head", &Config::num_attention_heads},
    {"num_key_value_heads", nullptr, &Config::num_key_value_heads},
    {"max_position_embeddings", "n_positions", &Config::max_position_embeddings},
    {"head_dim", nullptr, &Config::head_dim, 1 << 16}};  // RoPE's angles are made while a model is recorded
// An option of every architecture: a key of the object "crossply", a flag of trainers, an option in compare's --arch.
struct GeneralOption {
  const char* key;
  std::variant<std::string*, int64_t*, double*, bool*> (*member)(Config&);
  bool list = false;     // the text is a list in JSON, or a word
  bool outside = false;  // config.json has it as Hugging Face's own key, outside of "crossply"
};
const std::vector<GeneralOption>& general_options();
// From text; false where that is not of its kind.
bool set_option(Config& config, const GeneralOption& option, const std::string& text);
// The keys of the object "crossply" beside the architecture's options, between spaces.
std::string general_keys(const Config& config);
// Is there anything for which neither Hugging Face's LLaMA nor its GPT-2 has a key, in all architectures alike?
bool has_general_options(const Config& config);

// An architecture that is the backbone itself, without a connection?
inline bool is_plain(const std::string& arch) { return arch == "llama" || arch == "gpt2"; }

}  // namespace crossply
