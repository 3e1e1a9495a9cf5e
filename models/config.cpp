#include "models/config.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "models/combined.h"
#include "models/engram.h"
#include "models/loop.h"
#include "models/registry.h"

namespace crossply {

using nlohmann::json;

namespace {

constexpr int64_t max_integer = int64_t{1} << 30;

bool allowed(const Option& option, const std::string& value) {
  if (!option.choices.empty())
    return std::find(option.choices.begin(), option.choices.end(), value) != option.choices.end();
  if (parse_truth(option.default_value)) return parse_truth(value).has_value();
  if (parse_integer(option.default_value)) {
    const auto number = parse_integer(value);
    return number && *number >= 0 && *number <= max_integer;
  }
  if (parse_number(option.default_value)) return parse_number(value).has_value();
  return try_parse_json(value).is_array();
}

// An allowed value as it stands in JSON.
std::string as_json(const Option& option, const std::string& value) {
  if (!option.choices.empty() || parse_truth(value)) return value;
  if (parse_integer(option.default_value)) return std::to_string(*parse_integer(value));
  if (const auto number = parse_number(value)) return json_text(json(*number));
  return json_text(known_json(value));
}

// Norms of the stream and additions to it need one; a core that is only repeated does not.
void require_stream(const Config& c, const Connection& connection) {
  const bool by_loop = has_anchor(c) && (c.loop.norm != "none" || c.loop.alpha != 0);
  if (connection.has_stream() || !(by_loop || has_engram(c) || c.block_norm == "sum")) return;
  std::string who = c.arch;
  for (const std::string& part : parts_of(c.arch))
    if (!find_architecture(part).make(part_config(c, part))->has_stream()) who = part;
  fail(Exit::usage, who, " has no stream, for its layers read the outputs of all lower ones, or two lanes; give ",
       has_engram(c) ? "no engram_layers"
       : by_loop     ? "loop_norm none and loop_alpha 0, a loop that only repeats"
                     : "block_norm branch");
}

void check_options(Config& config, Exit code, const std::string& where) {
  const Architecture& architecture = find_architecture(config.arch, code, where);
  std::map<std::string, std::string> complete;
  for (const Option& option : architecture.options) {
    const auto it = config.options.find(option.key);
    const std::string value = it == config.options.end() ? option.default_value : it->second;
    if (!allowed(option, value)) {
      fail(code, where, ": \"", option.key, "\" is ", excerpt(value), ", must be: ", option.help,
           parse_integer(option.default_value) && option.help.find("..") == std::string::npos
               ? str(" (0 to ", max_integer, ")")
               : "");
    }
    complete[option.key] = as_json(option, value);
  }
  for (const auto& [key, value] : config.options) {
    if (complete.contains(key)) continue;
    std::string known = general_keys(config);
    for (const Option& option : architecture.options) known += " " + option.key;
    fail(code, where, ": unknown key \"crossply.", excerpt(key), "\"; ", config.arch, " knows: ", known);
  }
  config.options = complete;
  try {
    if (is_combined(config.arch)) config.arch = ordered_name(config);
    require_stream(config, *architecture.make(applied(config)));  // the connection refuses what only it can judge
  } catch (const Error& error) {
    fail(code, where, ": ", error.what());
  }
}

// What only one of the backbones asks for.
void check_gpt2(const Config& c, Exit code, const std::string& where) {
  if (c.arch == "llama") fail(code, where, ": a llama on the backbone gpt2 is the architecture gpt2; ask for that");
  if (c.num_key_value_heads != c.num_attention_heads)
    fail(code, where, ": the backbone gpt2 has as many key/value heads as query heads, ", c.num_attention_heads,
         ", not ", c.num_key_value_heads);
  if (c.head_dim * c.num_attention_heads != c.hidden_size)
    fail(code, where, ": the backbone gpt2 has heads of width C / H = ", c.hidden_size, " / ", c.num_attention_heads,
         ", not ", c.head_dim);
  if (c.qk_norm) fail(code, where, ": the backbone gpt2 has no q/k norm");
  if (c.activation_function != "gelu_new" && c.activation_function != "gelu")
    fail(code, where, ": \"activation_function\": '", excerpt(c.activation_function),
         "' is not computed here; gelu_new and gelu are");
}

void check_rope(const Config& config, Exit code, const std::string& where) {
  if (config.head_dim % 2 != 0)
    fail(code, where, ": head_dim ", config.head_dim, " is odd; RoPE rotates pairs, so it must be even");
  if (!(config.rope_theta > 0) || !std::isfinite(config.rope_theta))
    fail(code, where, ": rope_theta must be positive and finite, is ", config.rope_theta);
  if (!config.rope_scaling) return;
  if (config.rope_scaling->rope_type == "yarn" && !(config.rope_theta > 1))
    fail(code, where, ": rope_type yarn needs a rope_theta above 1, is ", config.rope_theta);
  if (const double factor = config.rope_factor(); !(factor > 0) || !std::isfinite(factor))
    fail(code, where, ": \"rope_scaling\" leads to an attention_factor of ", factor, "; it must be positive");
}

// Makes the pattern one letter for each layer.
void check_windows(Config& config, Exit code, const std::string& where) {
  std::string& pattern = config.window_pattern;
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  if (config.sliding_window < 0 || config.sliding_window > max_integer)
    fail(code, where, ": attention_window must be in 0..", max_integer, ", is ", config.sliding_window);
  const bool usual = pattern == Config().window_pattern;
  if (!usual && config.sliding_window == 0)
    fail(code, where, ": attention_window_pattern has no effect without attention_window");
  if (!usual && (pattern.empty() || pattern.find_first_not_of("SL") != std::string::npos || pattern.size() > layers))
    fail(code, where, ": attention_window_pattern '", excerpt(pattern),
         "' must be letters S (in the window) and L (all that is before), one for each of ", layers,
         " layers or fewer, which are repeated, as in SSSL");
  if (config.sliding_window == 0) return;
  if (config.gpt2()) fail(code, where, ": the backbone gpt2 has no attention_window; leave it out");
  if (pattern.size() != layers) {
    std::string all;
    while (all.size() < layers) all += pattern;
    all.resize(layers);
    all.back() = 'L';
    pattern = all;
  }
  if (pattern.find('S') == std::string::npos)
    fail(code, where, ": attention_window ", config.sliding_window, " is that of no layer: ", pattern,
         ", for the last one sees all; leave it out, or give more layers");
}

}  // namespace

const std::vector<GeneralOption>& general_options() {
  using M = std::variant<std::string*, int64_t*, double*, bool*>;
  static const std::vector<GeneralOption> options = {
      {"loop", [](Config& c) -> M { return &c.loop.kind; }},
      {"loop_passes", [](Config& c) -> M { return &c.loop.passes; }},
      {"loop_layers", [](Config& c) -> M { return &c.loop.layers; }, true},
      {"loop_tied", [](Config& c) -> M { return &c.loop.tied; }},
      {"loop_norm", [](Config& c) -> M { return &c.loop.norm; }},
      {"loop_alpha", [](Config& c) -> M { return &c.loop.alpha; }},
      {"loop_end", [](Config& c) -> M { return &c.loop.end; }},
      {"exit_gate", [](Config& c) -> M { return &c.loop.exit_gate; }},
      {"exit_beta", [](Config& c) -> M { return &c.loop.exit_beta; }},
      {"block_norm", [](Config& c) -> M { return &c.block_norm; }},
      {"logit_softcap", [](Config& c) -> M { return &c.final_logit_softcapping; }, false, true},
      {"engram_layers", [](Config& c) -> M { return &c.engram.layers; }, true},
      {"engram_order", [](Config& c) -> M { return &c.engram.order; }},
      {"engram_heads", [](Config& c) -> M { return &c.engram.heads; }},
      {"engram_width", [](Config& c) -> M { return &c.engram.width; }},
      {"engram_rows", [](Config& c) -> M { return &c.engram.rows; }},
      {"engram_boundary", [](Config& c) -> M { return &c.engram.boundary; }, true},
      {"engram_pad_id", [](Config& c) -> M { return &c.engram.pad_id; }},
      {"engram_seed", [](Config& c) -> M { return &c.engram.seed; }},
      {"engram_map", [](Config& c) -> M { return &c.engram.map; }, true},
      {"engram_multipliers", [](Config& c) -> M { return &c.engram.multipliers; }, true},
      {"attention_window", [](Config& c) -> M { return &c.sliding_window; }, false, /*outside=*/true},
      {"attention_window_pattern", [](Config& c) -> M { return &c.window_pattern; }, false, /*outside=*/true},
  };
  return options;
}

bool set_option(Config& config, const GeneralOption& option, const std::string& text) {
  const auto take = [](const auto& parsed, auto* to) {
    if (parsed) *to = *parsed;
    return parsed.has_value();
  };
  return std::visit(
      [&]<class T>(T* to) {
        if constexpr (std::is_same_v<T, std::string>) *to = text;
        else if constexpr (std::is_same_v<T, bool>) return take(parse_truth(text), to);
        else if constexpr (std::is_same_v<T, int64_t>) return take(parse_integer(text), to);
        else return take(parse_number(text), to);
        return true;
      },
      option.member(config));
}

bool has_general_options(const Config& config) {
  return config.loop != LoopOptions() || config.block_norm != "pre" || config.final_logit_softcapping != 0 ||
         config.engram != EngramOptions();
}

std::string general_keys(const Config& config) {
  std::string keys = config.gpt2() ? "arch backbone bias" : "arch backbone qk_norm qk_norm_eps qkv_bias";
  for (const GeneralOption& option : general_options())
    if (!option.outside) keys += str(" ", option.key);
  return keys;
}

int64_t Config::integer(const std::string& key) const { return parse_integer(options.at(key)).value(); }
double Config::number(const std::string& key) const { return parse_number(options.at(key)).value(); }

Config Config::with_blocks(const std::vector<int>& blocks) const {
  Config config = *this;
  config.num_hidden_layers = std::ssize(blocks);
  if (sliding_window == 0) return config;
  config.window_pattern.clear();
  char letter = window_pattern[0];
  for (const int block : blocks) {
    if (block >= 0) letter = window_pattern.at(static_cast<size_t>(block));
    config.window_pattern += letter;
  }
  if (config.window_pattern.find('S') == std::string::npos)
    config.sliding_window = 0, config.window_pattern = Config().window_pattern;
  return config;
}

void Config::check(Exit code, const std::string& where) {
  auto check_size = [&](const SizeKey& size) {
    const int64_t value = this->*size.value;
    const char* own = gpt2() ? size.gpt2_key : nullptr;
    if (value < 1 || value > size.max)
      fail(code, where, ": ", own != nullptr ? own : size.key, " must be in 1..", size.max, ", is ", value);
  };
  if (num_key_value_heads == 0) num_key_value_heads = num_attention_heads;
  if (arch == "gpt2") backbone = "gpt2";
  if (backbone != "llama" && backbone != "gpt2")
    fail(code, where, ": unknown backbone '", excerpt(backbone), "'; known: llama gpt2");
  if (gpt2() && intermediate_size == 0) intermediate_size = 4 * hidden_size;
  const SizeKey& last = *std::rbegin(size_keys);
  std::for_each(std::begin(size_keys), &last, check_size);
  if (head_dim == 0) {
    if (hidden_size % num_attention_heads != 0)
      fail(code, where, ": ", gpt2() ? "n_embd " : "hidden_size ", hidden_size, " is not a multiple of ",
           gpt2() ? "n_head " : "num_attention_heads ", num_attention_heads, "; change one of them",
           gpt2() ? "" : " or set head_dim");
    head_dim = hidden_size / num_attention_heads;
  }
  check_size(last);
  gpt2() ? check_gpt2(*this, code, where) : check_rope(*this, code, where);
  if (num_attention_heads % num_key_value_heads != 0)
    fail(code, where, ": num_attention_heads ", num_attention_heads, " is not a multiple of num_key_value_heads ",
         num_key_value_heads);
  const std::pair<const char*, double> positive[] = {{gpt2() ? "layer_norm_epsilon" : "rms_norm_eps", norm_eps},
                                                     {"crossply.qk_norm_eps", qk_norm_eps}};
  for (const auto& [key, number] : positive)
    if (!(number > 0) || !std::isfinite(number))
      fail(code, where, ": ", key, " must be positive and finite, is ", number);
  check_windows(*this, code, where);
  // Beyond these floats lose the cap, or all that is below it.
  if (const double cap = final_logit_softcapping; cap != 0 && !(cap >= 1e-3 && cap <= 1e6))
    fail(code, where, ": final_logit_softcapping must be in 0.001..1e6, or 0 for none, is ", cap);
  check_loop(*this, code, where);
  check_engram(*this, code, where);
  check_options(*this, code, where);
}

}  // namespace crossply
