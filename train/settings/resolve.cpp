#include "train/settings/text_defaults.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "cli/format.h"
#include "models/model.h"

namespace crossply {

int64_t tokens_about(const DataOptions& data) {
  const DataSpec spec = parse_data_spec(data.spec);
  std::string files = data.spec;
  if (spec.kind == DataSpec::Kind::directory) {
    DataOptions expanded = data;
    expand_directories(expanded);
    files = expanded.spec;
  }
  uintmax_t bytes = 0;
  for (const std::string& file : data_files(files)) {
    std::error_code ignored;
    const uintmax_t size = std::filesystem::file_size(file, ignored);
    if (!ignored) bytes += size;
  }
  const bool subwords = !data.tokenizer.empty() || data.of_model.is_bpe();
  const bool text = spec.kind == DataSpec::Kind::text;
  return static_cast<int64_t>(bytes / (!text ? 2 : subwords ? 4 : 1));
}

int64_t usual_seq_of(int64_t tokens) {
  for (const auto& [fewer, seq] : {std::pair{1 << 19, 64}, {1 << 22, 128}, {1 << 28, 256}})
    if (tokens < fewer) return seq;
  return 512;
}

// Our trials found 0.002 to 0.004 best for 66 thousand to 2.4 million parameters (docs/claims.md). From ten million on
// it falls as in the papers: 0.001 for 130 million. One digit.
double usual_lr_of(int64_t parameters) {
  const double lr = 3e-3 * std::min(1.0, std::pow(1e7 / static_cast<double>(parameters), 0.4));
  const double digit = std::pow(10.0, std::floor(std::log10(lr)));
  return std::round(lr / digit) / std::round(1 / digit);
}

int64_t usual_steps_of(int64_t sequences, int64_t seq_len, int64_t batch, int64_t parameters) {
  const double enough = 20.0 * static_cast<double>(parameters) / static_cast<double>(seq_len);
  const double read = std::min(2.0 * static_cast<double>(sequences), enough);
  return std::max<int64_t>(1, std::llround(std::floor(read / static_cast<double>(batch))));
}

void choose_text_defaults(TrainOptions& o, const Source& train) {
  const OpenChoices open = std::exchange(o.open, {});
  if (!open.seq && !open.steps && !open.lr && !open.warmup) return;
  ParameterTable params;
  declare_model(params, o.config);
  const int64_t T = train.seq_len(), batch = o.batch * o.accumulate;
  std::string flags;
  const auto choose = [&](bool chosen, auto& setting, auto value, const char* flag) {
    if (!chosen) return;
    setting = value;
    flags += str(" ", flag, " ", value);
  };
  choose(open.seq, o.data.seq_len, T, "--seq");
  choose(open.steps, o.steps, usual_steps_of(train.size(), T, batch, params.count()), "--steps");
  choose(open.lr, o.lr, usual_lr_of(params.count()), "--lr");
  choose(open.warmup, o.warmup, o.steps / 20, "--warmup");
  o.chosen = str("chosen for ", format_count(train.size() * T), " tokens and ", format_count(params.count()),
                 " parameters:", flags);
}

}  // namespace crossply
