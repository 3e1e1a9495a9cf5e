// train_inheritune: a smaller model that starts from a trained one's first blocks, and grows until it is as good.
//
// In deep transformers the attention of the later blocks often collapses to rank one: such lazy blocks add little to
// the model, and nothing to one that starts from them. So Inheritune takes the early blocks only (Sanyal et al.,
// "Inheritune: Training Smaller Yet More Attentive Language Models", arXiv 2404.08634, algorithm 1). Given a reference
// of L blocks, whose validation loss is measured once:
//
//   l = --start                                        (default: half of L, rounded down)
//   each round:
//     make a new model of l blocks                     (a GPT-2's residual projections start with 0.02 / sqrt(2 l))
//     copy the embedding, the head, and the first l blocks of the reference: attention, feed-forward and norms
//     train it for --steps steps, from the first one of the schedule on, with a new optimizer
//     end if its validation loss <= the reference's + --tolerance
//     l = l + --grow                                   (end, without a match, where that is more than L)
//
// A round's blocks stand where they stood, so that logits which are divided by the layer's number are what they were,
// and no weights have to be rescaled. Where the paper, its pseudo-code and its code differ:
//
//   --mode reinherit            every round starts from the reference's first l blocks, as in the paper's logs; default
//   --mode continue             a round keeps the blocks that the one before has trained, and everything else of that,
//                               and adds the reference's next ones: "grow", in the pseudo-code's word
//   --inherit-positions false   the learned positions of a GPT-2 start anew: what the released code does
//   --inherit-final-norm false  so does the last norm
//
// The reference is a model or run directory, of crossply's or Hugging Face's, of either backbone and any architecture;
// what a connection adds is inherited where a model of l blocks has it in the same shape, and starts anew elsewhere.
// Anew means as in a new model, with other random numbers than a reference of the same seed began with. Rounds that are
// stopped and resumed want the weights that were measured, as long as there may be another round.
//
// All losses that decide, and those of step 0, are over all of the validation set (the test part of --data, or
// --val-data), in order, in fp32, as `evaluate` has them: the paper's 200 random batches are as noisy as what they are
// to tell apart. The curves between them are over the first --eval-samples sequences; all, by default.
//
// --out holds a run directory for each round, round_1_blocks_4, with what it starts from beside it,
// initial_1_blocks_4: complete model directories, for `evaluate`, `generate` and so on. inheritune.json has the
// recipe and its numbers, inheritune.md the table, inheritune.svg the loss by step. A signal stops it anywhere, with
// exit code 75; --resume --out DIR continues bit for bit, and takes a larger --rounds. The directory may have been
// renamed. A reference or a teacher that has moved is named anew, with --reference or --teacher: it must have the same
// weights. Exit code 0 says that the recipe has run to its end; the line under the table, and "matches" in
// inheritune.json, say whether the last model is as good. Exit code 74 says so, too, where all rounds are done and kept
// but a page or a figure could not be written; --resume writes it.
//
// A round costs what training a model of l blocks costs, and the rounds see the same batches. The paper's, with steps,
// rates and batches from --preset:
//
//   GPT-2 Medium, 24 blocks: 12, 14, then 16        --start 12 --grow 2
//   GPT-2 Large, 36 blocks: 18                      --start 18 --rounds 1
//   GPT-2 XL, 48 blocks: 24                         --start 24 --rounds 1
#include "train/lab/inheritune.h"

#include <cstdio>
#include <filesystem>
#include <numeric>

#include "cli/format.h"
#include "cli/program.h"
#include "cli/stop.h"
#include "engine/io/leftovers.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "eval/loaded_model.h"
#include "eval/mean_loss.h"
#include "models/disk/model_dir.h"
#include "models/transplant.h"
#include "ranks/launch.h"
#include "train/run/progress.h"
#include "train/run/run.h"
#include "train/settings/idle_flags.h"
#include "train/step/saved_model.h"

using namespace crossply;

namespace {

// Its samples, as long as no signal asks to stop.
class Stoppable : public Source {
 public:
  explicit Stoppable(const Source& source) : source_(source) {}
  int64_t size() const override { return source_.size(); }
  int64_t seq_len() const override { return source_.seq_len(); }
  int64_t vocab_size() const override { return source_.vocab_size(); }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    if (stop_requested()) fail(Exit::stopped, "stopped on request");
    source_.read(index, tokens, targets);
  }

 private:
  const Source& source_;
};

// Over all of the validation set, in order, with products in fp32 whatever the training has. Throws Exit::stopped where
// a signal asks for it.
MeanLoss validate(LoadedModel& model, const Inheritance& all, const Source& validation) {
  const int64_t B = std::min(all.plan.batch, validation.size()), T = validation.seq_len();
  BatchModel batches(
      *model.device, model.params, model.config,
      Batch{.B = B, .T = T, .dtype = model.params.dtype(), .training = false, .documents = all.plan.documents});
  const MeanLoss mean = mean_loss(batches, Stoppable(validation), validation.size(), *one_rank_group());
  if (mean.scored == 0) fail(Exit::bad_data, "the validation set of ", all.plan.data.spec, " has no token to score");
  if (!std::isfinite(mean.loss)) fail(Exit::not_finite, "the validation loss of ", model.dir, " is ", mean.loss);
  return mean;
}
double validation_loss(const std::string& dir, const Inheritance& all, const Source& validation) {
  LoadedModel model(dir, all.plan.device, false);
  return validate(model, all, validation).loss;
}

void measure_reference(Inheritance& all, const Source& validation) {
  LoadedModel reference(all.reference_dir, all.plan.device, false);
  const MeanLoss mean = validate(reference, all, validation);
  all.reference_digest = digest_of(LoadedModel(all.reference_dir, "cpu", false).params);  // on any --device the same
  all.sequences = mean.sequences;
  all.tokens = mean.scored;
  all.reference_loss = mean.loss;
}

// Blocks 0 to l - 1, of which those from `known` on are new.
Transplant first_blocks(int64_t l, int64_t known) {
  Transplant transplant;
  transplant.blocks.resize(static_cast<size_t>(l), fresh_block);
  std::iota(transplant.blocks.begin(), transplant.blocks.begin() + known, 0);
  return transplant;
}

// "round 1 (4 blocks):", in front of its lines.
std::string label_of(const Inheritance& all, size_t i) {
  return str("round ", i + 1, " (", all.rounds[i].blocks, " blocks):");
}

// What a round trains.
TrainPlan round_plan(const Inheritance& all, size_t i) {
  const int64_t l = all.rounds[i].blocks;
  TrainPlan plan = all.plan;
  plan.config = transplanted_config(all.plan.config, first_blocks(l, l));
  plan.init = std::filesystem::weakly_canonical(all.initial_dir(i)).string();  // however --out is written
  plan.out = all.run_dir(i);
  plan.resume = plan.init_moved = path_exists(plan.out + "/flags.json");
  plan.program = "";
  plan.label = label_of(all, i);
  return plan;
}

int64_t count_parameters(const Config& config) {
  ParameterTable params;
  declare_model(params, config);
  return params.count();
}

void check_weights(const LoadedModel& reference, const Inheritance& all, const std::string& or_else = "") {
  if (digest_of(reference.params) != all.reference_digest)
    fail(Exit::bad_data, reference.dir, " holds other weights than when its loss was measured; put them back", or_else);
}

// Of a run that is resumed, where another round may have to be made of the reference, which may have been trained on.
void check_reference(const Inheritance& all) {
  if (all.reference_digest.empty()) return;  // it is still to be measured
  const size_t n = all.rounds.size();
  const bool made = n > 0 && path_exists(all.initial_dir(n - 1));
  const bool matched = n > 0 && all.rounds.back().is_done() && all.matches(all.rounds.back());
  if (matched || (made && all.next_blocks() == 0)) return;
  check_weights(LoadedModel(all.reference_dir, "cpu", false), all,
                made ? str(", or let this round be the last one: --rounds ", n) : "");
}

// Writes the model that round i starts from: a new one, with what it inherits.
void inherit(const Inheritance& all, size_t i, const Tokenizer& tokenizer) {
  const TrainPlan plan = round_plan(all, i);
  const auto host = make_device("cpu");
  ParameterTable params;
  declare_model(params, plan.config);
  params.allocate(*host, Dtype::f32, false);
  initialise_fresh(params, plan.seed);
  const LoadedModel reference(all.reference_dir, "cpu", false);
  check_weights(reference, all);
  const int64_t l = plan.config.num_hidden_layers;
  Transplant taken = first_blocks(l, l);
  if (!all.recipe.positions) taken.parts.erase("positions");
  if (!all.recipe.final_norm) taken.parts.erase("final_norm");
  const std::vector<std::string> anew = transplant(reference.params, reference.config, params, plan.config, taken);
  if (!anew.empty())
    std::printf("%s what the connection adds starts anew in %zu of its tensors, the first is %s\n", plan.label.c_str(),
                anew.size(), anew[0].c_str());
  if (i > 0 && all.recipe.mode == "continue") {
    const LoadedModel before(all.run_dir(i - 1), "cpu", false);
    transplant(before.params, before.config, params, plan.config, first_blocks(l, before.config.num_hidden_layers));
  }
  CheckpointWriter writer;
  writer.begin(plan.init);
  write_model(writer, plan, {}, params, tokenizer);
  writer.commit();
}

void say_losses(const Inheritance& all, size_t i, const char* when, double loss) {
  std::printf("%s validation loss %.4f %s, the reference's %.4f\n", label_of(all, i).c_str(), loss, when,
              all.reference_loss);
}

// What could not be written, which ends no round: the error of the last attempt to write the results, and of the
// figure of a round.
struct Unwritten {
  std::string results, figure;
};

// Writes the results, and notes an error that is new.
void write_or_note(const Inheritance& all, Unwritten& unwritten) {
  const std::string error = write_rounds(all);
  if (!error.empty() && error != unwritten.results) print_line("note: " + error, false);
  unwritten.results = error;
}

// The figure of a round that was done before, where it lacks one.
void draw_or_note(const Inheritance& all, size_t i, Unwritten& unwritten) {
  const std::string error = draw_missing_figure(round_plan(all, i));
  if (error.empty()) return;
  print_line(label_of(all, i) + " note: " + error, false);
  unwritten.figure = error;
}

// Trains round i, and measures its loss.
void train_round(Inheritance& all, size_t i, const Source& validation, Unwritten& unwritten) {
  if (stop_requested()) fail(Exit::stopped, "stopped on request");
  const Exit code = train_run(round_plan(all, i)).code;
  if (code == Exit::stopped) fail(Exit::stopped, "stopped on request");
  if (code == Exit::io) unwritten.figure = "the figure of " + all.run_dir(i) + " could not be written";
  all.rounds[i].final_loss = validation_loss(all.run_dir(i), all, validation);
  write_or_note(all, unwritten);
}

// Algorithm 1, from wherever a stop has left it: what is there is not done again. Throws Exit::stopped.
void inheritune(Inheritance& all, const Dataset& data, Unwritten& unwritten) {
  if (!std::isfinite(all.reference_loss)) measure_reference(all, *data.test);
  write_or_note(all, unwritten);
  std::printf("validation: %s sequences, %s tokens, all of it, in order\nreference: %s blocks, validation loss %.4f\n",
              format_count(all.sequences).c_str(), format_count(all.tokens).c_str(), format_count(all.depth()).c_str(),
              all.reference_loss);
  for (size_t i = 0;; ++i) {
    if (i == all.rounds.size()) {
      const int64_t l = all.next_blocks();
      if (l == 0) return;
      all.rounds.push_back({l});
      all.rounds[i].parameters = count_parameters(round_plan(all, i).config);
    }
    Round& round = all.rounds[i];

    remove_leftovers_of(all.initial_dir(i));
    if (!path_exists(all.initial_dir(i))) inherit(all, i, data.tokenizer);
    if (!std::isfinite(round.initial_loss)) round.initial_loss = validation_loss(all.initial_dir(i), all, *data.test);
    write_or_note(all, unwritten);
    say_losses(all, i, "at step 0", round.initial_loss);
    if (round.is_done()) draw_or_note(all, i, unwritten);
    else train_round(all, i, *data.test, unwritten);
    say_losses(all, i, "at the end", round.final_loss);
    if (all.matches(round)) return;
  }
}

struct Options {
  Recipe recipe;
  Settings settings;
};

// --dry-run: what the rounds would be.
void print_plans(const Inheritance& all) {
  std::vector<std::vector<std::string>> table = {{"round", "blocks", "parameters", "FLOP/token", "memory"}};
  Inheritance plan = all;
  for (int64_t l = all.recipe.start; l <= all.depth(); l += all.recipe.grow) {
    plan.rounds.push_back({l});
    const size_t i = plan.rounds.size() - 1;
    const TrainResult result = plan_training(round_plan(plan, i));
    table.push_back({std::to_string(i + 1), std::to_string(l), format_count(result.accounting.parameters),
                     format_number("%.4g", result.accounting.flops_per_token), format_bytes(result.planned_memory)});
    if (std::ssize(plan.rounds) == all.recipe.rounds) break;
  }
  std::printf(
      "%sFLOP/token: forward and backward. memory: of the whole run, about.\nThe first round that matches the "
      "reference, of %lld blocks, is the last.\n",
      format_table(table).c_str(), static_cast<long long>(all.depth()));
}

// Refuses what would only fail after hours of training.
void check_recipe(const Recipe& r, const TrainPlan& plan, const CLI::App& app) {
  const int64_t L = plan.config.num_hidden_layers;
  if (has_loop(plan.config))
    fail(Exit::usage, "--reference ", r.reference, " has a loop, of which no first blocks can be taken");
  if (r.start < 1 || r.start > L)
    fail(Exit::usage, "--start ", r.start, ": the reference has ", L, " blocks, of which the first so many are taken");
  if (is_given(app, "--inherit-positions") && !plan.config.gpt2())
    fail(Exit::usage, "--inherit-positions has no effect: ", r.reference, " has no learned positions; leave it out");
  if (is_given(app, "--grow") && r.start + r.grow > L)
    fail(Exit::usage, "--grow ", r.grow, ": a second round would have ", r.start + r.grow,
         " blocks, the reference has ", L, "; give a smaller --start or --grow, or --rounds 1 in place of --grow");
  if (is_given(app, "--router-lr")) refuse_idle_router_lr({plan}, plan.config.arch);
}

// Opens the data, and plans the first round.
Inheritance prepare(const Options& o, const CLI::App& app, Dataset& data) {
  Recipe recipe = o.recipe;
  Settings settings = o.settings;
  if (settings.resume && recipe.reference.empty())
    fail(Exit::usage, "--resume: there is no run of train_inheritune in ", settings.out,
         " yet; to start one, give its flags");
  if (recipe.reference.empty()) fail(Exit::usage, "--reference is needed: the model to inherit from");
  if (settings.out.empty() && !settings.dry_run) fail(Exit::usage, "--out is needed: the directory for the rounds");
  if (settings.steps == 0) fail(Exit::usage, "--steps 0: a round without steps has nothing to compare");
  if (settings.resume && !path_exists(recipe.reference))
    fail(Exit::no_input, "--reference ", recipe.reference,
         ": no such directory; if it has moved, say with --reference where it is now");
  settings.init = recipe.reference;
  Inputs inputs = open_inputs(settings);
  const TrainPlan& plan = inputs.plan;
  data = std::move(inputs.data);
  if (recipe.start == 0) recipe.start = std::max<int64_t>(1, plan.config.num_hidden_layers / 2);
  check_recipe(recipe, plan, app);
  if (data.test != nullptr && data.test->size() == 0)
    fail(Exit::bad_data, plan.data.spec, ": the validation set is empty");
  Inheritance all{recipe, plan, count_parameters(plan.config)};
  if (!plan.dry_run) all.data_digest = str(std::hex, data.train->digest());
  return all;
}

// The state of the run in --out; a directory with anything else in it is refused.
void take_up_or_begin(Inheritance& all) {
  const std::string& out = all.plan.out;
  for (const char* file : {"/inheritune.json", "/inheritune.md", "/inheritune.svg"}) remove_leftovers_of(out + file);
  if (all.plan.resume && take_up(all)) return;
  if (!holds_only_leftovers(out))
    fail(Exit::usage, out,
         all.plan.resume ? " holds files, but no run of train_inheritune; choose another --out"
                         : " exists and is not empty; choose another --out, or --resume to continue the run in it");
}

Exit run(const Options& o, const CLI::App& app, const char* program) {
  Dataset data;
  Inheritance all = prepare(o, app, data);
  if (o.settings.dry_run) {
    print_plans(all);
    return Exit::done;
  }
  make_device(o.settings.device, o.settings.matmul);  // refuses one that is not there
  const ModelDir reference(all.recipe.reference);     // held: a run beside this one does not remove it
  all.reference_dir = reference.path();
  catch_stop_signals();
  const RunDir dir(o.settings.out);
  take_up_or_begin(all);
  check_reference(all);
  if (const std::string warning = warmup_warning(all.plan); !warning.empty()) std::printf("%s\n", warning.c_str());
  write_state(all);  // before anything else
  Unwritten unwritten;
  try {
    inheritune(all, data, unwritten);
  } catch (const Error& error) {
    if (error.code != Exit::stopped) throw;
    write_or_note(all, unwritten);
    std::printf("\n%sstopped on request; to continue: %s --resume --out %s\n",
                all.rounds.empty() ? "" : rounds_table(all).c_str(), shell_command(program).c_str(),
                shell_word(o.settings.out).c_str());
    return Exit::stopped;
  }
  write_or_note(all, unwritten);
  const std::string out = printable(o.settings.out);
  const std::string model = printable(all.run_dir(all.rounds.size() - 1));
  std::printf("\n%s\nresults:  %s/inheritune.md, inheritune.json\npicture:  %s/inheritune.svg\nmodel:    %s\n",
              rounds_table(all).c_str(), out.c_str(), out.c_str(), model.c_str());
  const std::string& error = unwritten.results.empty() ? unwritten.figure : unwritten.results;
  if (!error.empty())
    fail(Exit::io, error, "; the rounds are done and kept: mend that, then --resume --out ", shell_word(o.settings.out),
         " writes what is missing");
  return Exit::done;
}

// A run that is resumed has its flags. The reference says the backbone, which presets ask for.
void set_defaults(int argc, char** argv, Options& o) {
  const std::string out = find_flag(argc, argv, "--out"), reference = find_flag(argc, argv, "--reference"),
                    preset = find_flag(argc, argv, "--preset");
  o.settings.eval_samples = 0;
  const bool found = has_flag(argc, argv, "--resume") && take_recipe(out, o.recipe, o.settings);
  if (!found && !reference.empty()) o.settings.config = load_model_config(resolve_model_dir(reference));
  if (reference.empty() && o.recipe.reference.empty()) return;  // prepare() says what is missing
  if (!preset.empty() && preset != o.settings.preset) apply_preset(preset, o.settings);
}

void add_recipe_flags(CLI::App& app, Recipe& r) {
  set_group(app, "Inheritune");
  const auto set_reference = [&r](const std::string& dir) { r.reference = absolute_path(dir); };
  add_parsed(app, "--reference", set_reference, "DIR",
             "model or run directory to inherit from; with --resume, where it is now");
  add_integer(app, "--start", r.start, 1, 4096, "blocks of the first round (default: half of the reference's)")
      .default_str("");
  // With --rounds 1, too: a later --resume --rounds 2 goes on with these.
  add_integer(app, "--grow", r.grow, 1, 4096, "blocks that each later round has more");
  add_choice(app, "--mode", r.mode, grow_modes,
             "reinherit: each round starts from the reference; continue: from the round before");
  add_truth(app, "--inherit-positions", r.positions, "take over learned positions");
  add_truth(app, "--inherit-final-norm", r.final_norm, "take over the last norm");
  add_number(app, "--tolerance", r.tolerance, 0, 1000, "nats above the reference's loss that still match");
  add_integer(app, "--rounds", r.rounds, 0, 4096, "rounds at most (0: until one matches, or no larger one is there)");
  set_group(app, "Options");
}

// The trainers' flags that have no meaning here: hidden, and refused when given.
std::vector<std::string> hide_flags(CLI::App& app) {
  std::vector<std::string> hidden = {"--dump-tape", "--dump-tensors", "--world",    "--node-gpus",
                                     "--time",      "--gpu",          "--nvlink",   "--net",
                                     "--rank-rate", "--branch",       "--from-step"};
  hidden.insert(hidden.end(), std::begin(flags_of_ranks), std::end(flags_of_ranks));
  for (const std::string& name : flags_in_group(app, "Model")) hidden.push_back(name);
  for (const std::string& name : hidden) flag_named(app, name).group(hidden_group);
  return hidden;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app(
      "Trains a model that starts from the first blocks of a trained one, and larger ones until one is as good.",
      "train_inheritune");
  Options o;
  std::vector<std::string> refused;
  auto flags = [&] {
    set_defaults(argc, argv, o);
    add_recipe_flags(app, o.recipe);
    add_train_flags(app, o.settings);
    refused = hide_flags(app);
    flag_named(app, "--steps").description("optimizer steps of each round");
    flag_named(app, "--eval-samples")
        .description("test sequences for the curves, evenly spread (default: all, as for what decides)");
    flag_named(app, "--eval-samples").default_str("");
    flag_named(app, "--out").description("directory: inheritune.md, .json, .svg, a run directory per round");
    set_short_help(app, {{"--reference", "--data", "--out"},
                         {"--start", "--grow", "--rounds", "--tolerance", "--preset", "--steps", "--batch", "--lr",
                          "--resume", "--dry-run"},
                         {"train_inheritune --reference runs/large --data text:my.txt --out runs/small",
                          "train_inheritune --resume --out runs/small"}});
    flag_named(app, "--resume").description("continue the rounds in --out, bit for bit; needs no other flags");
  };
  return run_program(app, argc, argv, flags, [&] {
    for (const std::string& name : refused)
      if (is_given(app, name))
        fail(Exit::usage, name,
             " is for the trainers; here models are made of the --reference's blocks, in one process");
    std::fputs(notes_on_train_flags(app, o.settings.config).c_str(), stderr);
    complete_flags(app, o.settings, !o.settings.preset.empty());
    for (const std::string& name : flags_in_group(app, "Inheritune"))
      o.settings.given.erase(name);           // mhc has a --start, too
    o.settings.open = {o.settings.open.seq};  // the rest as the reference's, of the same files
    if (!world_from_environment().alone())
      fail(Exit::usage, "train_inheritune trains in one process; start it without mpirun, torchrun or srun");
    return run(o, app, argv[0]);
  });
}
