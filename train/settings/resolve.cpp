#include "train/settings/resolve.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <utility>

#include "cli/format.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "engine/split.h"
#include "models/combined.h"
#include "models/model.h"
#include "train/settings/flag_table.h"
#include "train/settings/idle_flags.h"

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

int64_t usual_seq_len(int64_t tokens) {
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

namespace {

// Where a configuration comes from, for messages.
std::string flags_of(const Settings& settings) {
  return settings.preset.empty() ? "flags" : "flags and " + described_preset(settings.preset, settings.config);
}

// The same architecture: the note says what is taken of it.
std::string note_of_start(const Settings& settings, const Config& model, int64_t blocks) {
  const int64_t taken = model.num_hidden_layers;
  const std::string part = taken < blocks ? str(", the first ", taken, " of its ", blocks, " blocks") : "";
  return str("note: starting from the weights of ", printable(settings.init), ", ", with_article(model.arch), part,
             "\n");
}

bool is_of_engram(const std::string& flag) { return flag.starts_with("--engram-"); }

// --init's model with the Engram that is asked for.
void add_engram(const Settings& settings, Config& model, std::string& notes) {
  const auto asked = std::find_if(settings.given.begin(), settings.given.end(), is_of_engram);
  if (asked != settings.given.end()) {
    if (has_engram(model)) fail(Exit::usage, "--init takes its Engram from its config.json; leave out ", *asked);
    model.engram = settings.config.engram;
    notes += "note: Engram is added, and starts as writing nothing\n";
  }
  if (has_engram(model)) model.check(Exit::usage, "--init");  // it may be of a block that --layers leaves out
}

// An option that --init's model has decided.
void refuse_option(const Settings& settings, const std::string& key) {
  if (const std::string flag = option_flag(settings.config.arch, key); settings.given.contains(flag))
    fail(Exit::usage, "--init takes the options from its config.json; leave out ", flag);
}

// What --init's model becomes: its own architecture; from a plain LLaMA or GPT-2 one that can start as it; or a
// combination of which it is a part.
Config choose_architecture(const Settings& settings, Config model, int64_t blocks, std::string& notes) {
  const std::string from = model.arch, &asked = settings.config.arch;
  if (same_architecture(from, asked)) {
    for (const Option& option : find_architecture(asked).options) refuse_option(settings, option.key);
    notes += note_of_start(settings, model, blocks);
    return model;
  }
  const bool part = std::ranges::count(parts_of(asked), from) > 0;
  if (!(is_plain(from) || part) || is_plain(asked))
    fail(Exit::usage, "--init ", settings.init, " holds ", with_article(from), ", not ", with_article(asked),
         is_plain(from) ? "; their blocks differ"
                        : "; only a llama, a gpt2 or a part of a combination can become another architecture");
  if (has_loop(model))
    fail(Exit::usage, "--init ", settings.init, " has a loop; only without one can it become another architecture");
  const std::map<std::string, std::string> own = std::exchange(model.options, settings.config.options);
  for (const Option& option : find_architecture(from).options) {
    const std::string key = option_key(asked, from, option.key);
    refuse_option(settings, key);
    model.options[key] = own.at(option.key);
  }
  model.arch = asked;
  model.check(Exit::usage, "flags");
  ParameterTable params;
  declare_model(params, model);
  std::string remark;
  try {
    remark = start_beside(from, params, model);
  } catch (const Error& error) {
    fail(error.code, "--init ", settings.init, " is ", with_article(from), ", as which ", with_article(asked),
         " cannot start: ", error.what());
  }
  notes += str("note: ", asked, " starts as the ", from, " of ", printable(settings.init), remark.empty() ? "" : ": ",
               remark, "\n");
  return model;
}

// The sizes of --init's model, of which --layers may take the first blocks.
Config take_initial(const Settings& settings, const Config& initial, std::string& notes) {
  Config model = initial;
  bool fewer = false;
  for (const FlagGroup& group : training_flags())
    for (const FlagRow& row : group.rows) {
      if (row.resume != Resume::of_model || !settings.given.contains(row.flag)) continue;
      if (row.flag == "--layers") fewer = true;
      else if (row.flag.starts_with("--loop") || row.flag.starts_with("--exit-") || row.flag == "--block-norm")
        fail(Exit::usage, row.flag,
             " with --init: norms of the stream and more runs change what trained weights "
             "compute; train such a model from scratch");
      // Presets of the backbone need it.
      else if (!is_of_engram(row.flag) && (row.flag != "--backbone" || settings.config.backbone != initial.backbone))
        fail(Exit::usage, "--init takes the sizes from its config.json; leave out ", row.flag);
    }
  const int64_t layers = settings.config.num_hidden_layers, blocks = initial.num_hidden_layers;
  if (fewer && (layers < 1 || layers > blocks))
    fail(Exit::usage, "--layers ", layers, ": --init ", settings.init, " has ", blocks,
         " blocks, of which the first so many can be taken");
  if (fewer && has_loop(initial))
    fail(Exit::usage, "--layers ", layers, ": --init ", settings.init,
         " has a loop, of which no first blocks can be "
         "taken");
  if (fewer) {
    std::vector<int> first(static_cast<size_t>(layers));
    std::iota(first.begin(), first.end(), 0);
    model = model.with_blocks(first);
  }
  model = choose_architecture(settings, model, blocks, notes);
  add_engram(settings, model, notes);
  return model;
}

// A LLaMA takes sequences of any length; a GPT-2 has learned so many positions.
void choose_positions(TrainPlan& plan) {
  const int64_t T = plan.data.seq_len;
  int64_t& positions = plan.config.max_position_embeddings;
  if (!plan.config.gpt2() || positions == 0) positions = std::max(positions, T);
  const bool task = parse_data_spec(plan.data.spec).kind == DataSpec::Kind::generated;
  if (positions < T)
    fail(Exit::usage, "sequences of ", T, " tokens: the model has ", positions, " positions; give a smaller --seq",
         task ? " if the samples of " + plan.data.spec + " fit into it" : "",
         plan.init.empty() ? ", or more --positions"
         : task            ? ", or start from a model with more positions"
                           : "");
}

void choose_vocabulary(TrainPlan& plan, const DataFacts& data) {
  int64_t& vocab = plan.config.vocab_size;
  if (vocab == 0) vocab = data.vocab;
  if (vocab < 1) fail(Exit::usage, "--vocab is needed: token shards do not say their vocabulary");
  if (vocab < data.vocab)
    fail(Exit::bad_data, plan.data.spec, " has a vocabulary of ", data.vocab, ", the model's is ", vocab,
         plan.init.empty() ? str("; give --vocab ", data.vocab) : " (" + plan.init + ")");
}

// The settings that were left open, from the size of the data and of the model.
void choose_open(TrainPlan& plan, const DataFacts& data) {
  const LeftOpen open = std::exchange(plan.open, {});
  if (!open.seq && !open.steps && !open.lr && !open.warmup) return;
  ParameterTable params;
  declare_model(params, plan.config);
  const int64_t batch = plan.batch * plan.accumulate;
  std::string flags;
  const auto choose = [&](bool chosen, auto& setting, auto value, const char* flag) {
    if (!chosen) return;
    setting = value;
    flags += str(" ", flag, " ", value);
  };
  choose(open.seq, plan.data.seq_len, data.seq_len, "--seq");
  choose(open.steps, plan.steps, usual_steps_of(data.sequences, data.seq_len, batch, params.count()), "--steps");
  if (open.lr && plan.transfer.rule != "none")
    fail(Exit::usage, "--transfer ", plan.transfer.rule, " is for learning rates of the base shape: give --lr as it ",
         "was best there");
  choose(open.lr, plan.lr, usual_lr_of(params.count()), "--lr");
  choose(open.warmup, plan.warmup, plan.steps / 20, "--warmup");
  plan.chosen = str("chosen for ", format_count(data.sequences * data.seq_len), " tokens and ",
                    format_count(params.count()), " parameters:", flags);
}

void choose_cooldown(TrainPlan& plan) {
  if (!has_cooldown(plan.schedule)) return;
  if (plan.cooldown == 0) plan.cooldown = std::max<int64_t>(1, (plan.steps + 2) / 5);  // a fifth, rounded
  if (plan.steps > 0 && plan.warmup + plan.cooldown > plan.steps)
    fail(Exit::usage, "--warmup ", plan.warmup, " and --cooldown ", plan.cooldown, " are more than --steps ",
         plan.steps);
}

// --save-at: after which steps so many tokens are reached for the first time; and the end of the stable phase, from
// which another run may branch.
void choose_kept_steps(TrainPlan& plan, std::string& notes) {
  const int64_t tokens = plan.tokens_per_step();
  for (const std::string& text : plan.save_at.empty() ? std::vector<std::string>() : split_commas(plan.save_at)) {
    const auto count = parse_number(text);
    if (!count || *count < 1 || *count > 1e18 || *count != std::floor(*count))
      fail(Exit::usage, "--save-at ", plan.save_at, ": '", text, "' is no number of tokens; give such as 1e6,2e6,5e6");
    if (const int64_t step = (static_cast<int64_t>(*count) + tokens - 1) / tokens; step > plan.steps)
      notes += str("note: --save-at ", text, ": the run ends after ", format_count(plan.steps * tokens), " tokens\n");
    else plan.kept_steps.insert(step);
  }
  if (has_cooldown(plan.schedule) && plan.steps > plan.cooldown) plan.kept_steps.insert(plan.steps - plan.cooldown);
}

// The teacher's logits are for the same tokens as the model's.
void check_teacher(const TrainPlan& plan, const Config& teacher) {
  if (const int64_t theirs = teacher.vocab_size, own = plan.config.vocab_size; theirs != own)
    fail(Exit::usage, "--teacher ", plan.teacher, " has a vocabulary of ", theirs, ", the model's is ", own,
         "; a teacher needs the same one", plan.init.empty() && theirs > own ? str(": give --vocab ", theirs) : "");
  if (teacher.gpt2() && teacher.max_position_embeddings < plan.data.seq_len)
    fail(Exit::usage, "sequences of ", plan.data.seq_len, " tokens: --teacher ", plan.teacher, " has ",
         teacher.max_position_embeddings, " positions; give a smaller --seq");
}

}  // namespace

void choose_muon(TrainPlan& plan) {
  plan.muon.normalize_rows = plan.optimizer == "normuon";
  if (!has_muon(plan.optimizer) || plan.muon.lr > 0) return;
  if (plan.muon.scale == "spectral")
    fail(Exit::usage, "--muon-scale spectral has no usual learning rate: give --muon-lr");
  plan.muon.lr = plan.muon.scale == "rms" ? 5 * plan.lr : 0.03;
}

Config resolve_model(const Settings& settings, const InitialModel* initial, std::string& notes) {
  if (initial != nullptr && initial->goes_on) return settings.config;
  const Preset* preset = find_preset(settings.preset);
  if (initial != nullptr && preset != nullptr && !preset->arch.empty())
    fail(Exit::usage, "with --init leave out ", described_preset(settings.preset, settings.config),
         ": it is for a new model");
  if (initial != nullptr) return take_initial(settings, initial->config, notes);
  Config model = settings.config;
  add_preset_options(settings.preset, model);
  return model;
}

// A GPT-2 of --init limits it by its positions.
int64_t resolve_seq_len(const Settings& settings, const Config& model, const Tokenizer& tokenizer) {
  if (settings.data.seq_len > 0 || !parse_data_spec(settings.data.spec).files()) return settings.data.seq_len;
  DataOptions data = settings.data;
  data.of_model = tokenizer;
  const int64_t usual = usual_seq_len(tokens_about(data));
  return settings.init.empty() || !model.gpt2() ? usual : std::min(usual, model.max_position_embeddings);
}

TrainPlan resolve(const Settings& settings, Config model, const InitialModel* initial, const DataFacts& data,
                  const std::optional<Config>& teacher, std::string& notes) {
  TrainPlan plan(settings);
  plan.config = std::move(model);
  if (initial != nullptr) plan.initial_config = initial->config, plan.carried = initial->files;
  if (data.seq_len > 0) {
    plan.config.token_ids.insert(data.token_ids.begin(), data.token_ids.end());
    plan.data = data.opened;
    plan.documents = data.documents;
    plan.data.seq_len = data.seq_len;
    choose_vocabulary(plan, data);
  }
  choose_positions(plan);
  plan.config.check(Exit::usage, flags_of(plan));
  check_transfer(plan.config, plan.transfer);
  notes += check_options(plan);
  if (data.seq_len > 0) choose_open(plan, data);
  choose_muon(plan);
  choose_cooldown(plan);
  if (teacher) check_teacher(plan, *teacher);
  plan.teacher_config = teacher;
  check_together(plan);
  if (plan.trains()) choose_kept_steps(plan, notes);
  return plan;
}

}  // namespace crossply
