// coordinates: does --transfer keep what the network computes of one size, at every width and depth? A few updates from
// scratch, always by one batch, at each shape, and how far they have moved its stream and its logits. Where that grows
// with the shape, a rate that was good for the base is too high for the model.
//
//   coordinates [DIR]       writes coordinates.svg and coordinates.md, minutes on a CPU
//
// After Yang et al., arXiv 2203.03466, appendix D.1: base shape C0 = 32, L0 = 4, heads of 16, untied head, no clipping,
// 8 updates; the root mean square change of the last stream, relative to its start, and of the logits.
#include <cmath>
#include <cstdio>
#include <map>

#include "cli/curve.h"
#include "cli/format.h"
#include "cli/program.h"
#include "data/source.h"
#include "engine/io/file.h"
#include "engine/rng.h"
#include "models/registry.h"
#include "train/settings/arch_list.h"
#include "train/settings/resolve.h"
#include "train/step/trainer.h"

using namespace crossply;

namespace {

constexpr int64_t base_width = 32, base_layers = 4, head_width = 16, vocabulary = 16, sequences = 16, updates = 8;
const std::vector<int64_t> widths = {32, 64, 128, 256}, depths = {4, 8, 16, 32};
constexpr double flat = 1.5;  // the largest over the smallest of a row that passes

// One batch of a text of 16 words, fewer than the least width, so that their vectors overlap little at any width. Of
// these each is followed by one of four, most often by the first.
class Chain : public Source {
 public:
  int64_t size() const override { return sequences; }
  int64_t seq_len() const override { return 32; }
  int64_t vocab_size() const override { return vocabulary; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    uint64_t word = random_bits(1, 0, static_cast<uint64_t>(index)) % vocabulary;
    for (int64_t t = 0; t < seq_len(); ++t) {
      tokens[t] = static_cast<int32_t>(word);
      const uint64_t lot = random_bits(2, static_cast<uint64_t>(index), static_cast<uint64_t>(t)) % 8;
      word = random_bits(3, word, lot < 5 ? 0 : lot - 4) % vocabulary;
      targets[t] = static_cast<int32_t>(word);
    }
  }
};

struct Arm {
  std::string arch, rule, optimizer;
  double alpha = 1;
  std::string name() const {
    return str(rule == "completep" && alpha != 1 ? str("completep, alpha ", alpha) : rule, ", ", optimizer);
  }
};

Config config_of(const Arm& arm, int64_t width, int64_t layers) {
  Config c;
  parse_arch(arm.arch).apply(c);
  if (arm.arch == "gpt2") use_gpt2(c);
  c.vocab_size = vocabulary, c.hidden_size = width, c.num_hidden_layers = layers;
  c.num_attention_heads = width / head_width, c.num_key_value_heads = 0, c.head_dim = 0;
  c.intermediate_size = c.gpt2() ? 4 * width : 2 * width, c.max_position_embeddings = 64;
  c.tie_word_embeddings = c.gpt2();
  c.check(Exit::usage, "coordinates");
  return c;
}

TrainPlan plan_of(const Arm& arm, int64_t width, int64_t layers) {
  TrainPlan plan;
  plan.config = config_of(arm, width, layers);
  plan.batch = sequences, plan.steps = updates, plan.adamw.clip = 0, plan.adamw.weight_decay = 0;
  plan.schedule = "constant", plan.lr = 3e-3;
  plan.optimizer = arm.optimizer == "adamw" ? "adamw" : "muon";
  if (plan.optimizer == "muon") plan.muon.scale = arm.optimizer.substr(5), plan.muon.lr = 0.01;
  plan.transfer = {arm.rule, base_width, base_layers, 0, arm.alpha};
  check_transfer(plan.config, plan.transfer);
  return plan;
}

struct Coordinates {
  std::vector<float> stream, logits;
};

// Of one batch, by the trainer's weights.
class Look {
 public:
  Look(Trainer& trainer, const TrainPlan& plan, const Source& data) : device_(trainer.device()) {
    const int64_t B = sequences, T = data.seq_len();
    graph_ = record_model(tape_, trainer.params(), plan.config, B, T);
    const std::string last = str("hidden.", plan.config.num_hidden_layers);
    for (const auto& [name, value] : tape_.marks())
      if (name == last) stream_ = value;
    CHECK_THAT(stream_ != nullptr, plan.config.arch, " marks no ", last);
    tape_.plan(PlanMode::distinct);
    tape_.allocate(device_);
    std::vector<int32_t> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
    for (int64_t i = 0; i < B; ++i) data.read(i, &tokens[i * T], &targets[i * T]);
    load_batch(device_, graph_, tokens.data(), targets.data());
  }
  Coordinates now() {
    tape_.forward(Step{});
    const std::vector<float> x = read(graph_.head.inp), w = read(graph_.head.weight);
    const auto C = static_cast<size_t>(graph_.head.weight->shape[1]), V = w.size() / C, N = x.size() / C;
    Coordinates seen{read(stream_), std::vector<float>(N * V)};
    for (size_t n = 0; n < N; ++n)
      for (size_t v = 0; v < V; ++v)
        for (size_t c = 0; c < C; ++c) seen.logits[n * V + v] += x[n * C + c] * w[v * C + c];
    return seen;
  }

 private:
  std::vector<float> read(const Value* value) const {
    std::vector<float> host(static_cast<size_t>(value->shape.numel()));
    device_.copy_out(host.data(), value->tensor.data, host.size() * sizeof(float));
    return host;
  }
  Device& device_;
  Tape tape_{Dtype::f32};
  Graph graph_;
  Value* stream_ = nullptr;
};

double rms(const std::vector<float>& x, const std::vector<float>& minus = {}) {
  double squares = 0;
  for (size_t i = 0; i < x.size(); ++i) squares += std::pow(double{x[i]} - (minus.empty() ? 0 : minus[i]), 2);
  return std::sqrt(squares / static_cast<double>(x.size()));
}

struct Change {
  double stream, logits;
};
Change change_of(const Arm& arm, int64_t width, int64_t layers) {
  const Chain data;
  const TrainPlan plan = plan_of(arm, width, layers);
  Trainer trainer(plan, data);
  Look look(trainer, plan, data);
  const Coordinates before = look.now();
  for (int64_t i = 0; i < updates; ++i) trainer.step();
  const Coordinates after = look.now();
  return {rms(after.stream, before.stream) / rms(before.stream), rms(after.logits, before.logits)};
}

// One arm across widths or depths.
struct Line {
  Arm arm;
  bool across_width;
  std::vector<double> stream, logits;
};
double spread_of(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end()) / *std::min_element(values.begin(), values.end());
}
Line line_of(const Arm& arm, bool across_width) {
  Line line{arm, across_width, {}, {}};
  for (const int64_t size : across_width ? widths : depths) {
    const Change change = across_width ? change_of(arm, size, base_layers) : change_of(arm, base_width, size);
    line.stream.push_back(change.stream), line.logits.push_back(change.logits);
  }
  std::printf("%-14s %-28s across %s: stream x%.2f, logits x%.2f\n", arm.arch.c_str(), arm.name().c_str(),
              across_width ? "width" : "depth", spread_of(line.stream), spread_of(line.logits));
  std::fflush(stdout);
  return line;
}

std::string row_of(const std::string& name, const std::vector<double>& values, bool must_be_flat) {
  std::string row = "| " + name + " |";
  for (const double x : values) row += format_number(" %.3g |", x);
  const double spread = spread_of(values);
  return row + format_number(" %.2f", spread) +
         (!must_be_flat    ? ""
          : spread <= flat ? ", flat"
                           : ", **not flat**") +
         " |\n";
}

std::string table_of(const std::vector<Line>& lines, bool across_width) {
  std::string text = across_width ? "| change | C = 32 | 64 | 128 | 256 | largest / smallest |\n"
                                  : "| change | L = 4 | 8 | 16 | 32 | largest / smallest |\n";
  text += "|---|---|---|---|---|---|\n";
  for (const Line& line : lines) {
    if (line.across_width != across_width) continue;
    const bool ruled = across_width ? line.arm.rule != "none" : line.arm.rule == "completep";
    const std::string name = str(line.arm.arch, ", ", line.arm.name());
    text += row_of(name + ": stream", line.stream, ruled) + row_of(name + ": logits", line.logits, ruled);
  }
  return text;
}

Panel panel_of(const std::vector<Line>& lines, bool across_width) {
  Panel panel{across_width ? "change of the stream, LLaMA: by width" : "change of the stream, LLaMA: by depth", "", {}};
  panel.log_y = panel.whole = true;
  for (const Line& line : lines)
    if (line.across_width == across_width && line.arm.arch == "llama") {
      const std::vector<int64_t>& sizes = across_width ? widths : depths;
      panel.curves.push_back({line.arm.name(), {sizes.begin(), sizes.end()}, line.stream});
    }
  return panel;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("Trains small models of many shapes for a few steps, and compares how far they move.", "coordinates");
  std::string directory = "dev/transfer";
  const auto flags = [&] { add_text(app, "directory", directory, "DIR", "for coordinates.svg and coordinates.md"); };
  return run_program(app, argc, argv, flags, [&] {
    std::vector<Line> lines;
    const std::vector<std::string> optimizers = {"adamw", "muon rms", "muon spectral"};
    for (const std::string& optimizer : optimizers) {
      for (const char* rule : {"none", "mup"}) lines.push_back(line_of({"llama", rule, optimizer}, true));
      for (const char* rule : {"none", "completep"}) lines.push_back(line_of({"llama", rule, optimizer}, false));
      lines.push_back(line_of({"llama", "completep", optimizer, 0.5}, false));
    }
    std::vector<Line> others;
    for (const Architecture& architecture : architectures()) {
      const std::string choice = architecture.name + (architecture.name == "lime" ? ":kv_init=normal" : "");
      const Arm adamw{choice, "completep", "adamw"}, muon{choice, "completep", "muon rms"};
      if (architecture.name == "llama" || !without_rule(config_of(adamw, base_width, base_layers)).empty()) continue;
      for (const Arm& arm : {adamw, muon})
        for (const bool across_width : {true, false}) others.push_back(line_of(arm, across_width));
    }
    write_curve_svg(directory + "/coordinates.svg", "How far 8 updates move the last stream", "width or depth",
                    {panel_of(lines, true), panel_of(lines, false)}, true);
    std::string page = "# Coordinates: what 8 updates change, by width and depth\n\n";
    page +=
        str("Written by `build/coordinates`. Base shape C = ", base_width, ", L = ", base_layers,
            "; AdamW at 0.003, Muon at 0.01. Root mean square change of the last stream, relative to its start, and ",
            "of the logits. A row with a rule passes where the largest is at most ", flat, " times the smallest.\n\n",
            "![change of the stream by width and depth](coordinates.svg)\n\n");
    for (const auto* part : {&lines, &others})
      for (const bool across_width : {true, false}) page += table_of(*part, across_width) + "\n";
    write_file_atomically(directory + "/coordinates.md", page);
    return Exit::done;
  });
}
