#include "train/run/run.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "cli/format.h"
#include "cli/program.h"
#include "cli/stop.h"
#include "data/arith.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/leftovers.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "eval/answers.h"
#include "eval/inside/routing/routing_summary.h"
#include "eval/own_tensors.h"
#include "kernels/devices.h"
#include "models/disk/checkpoint.h"
#include "models/disk/model_dir.h"
#include "models/disk/modelling_file.h"
#include "models/loop.h"
#include "models/registry.h"
#include "ranks/launch.h"
#include "train/run/branch.h"
#include "train/run/dump_tensors.h"
#include "train/run/environment.h"
#include "train/run/ranks.h"
#include "train/settings/idle_flags.h"
#include "train/step/saved_model.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

TrainResult summarise(const Trainer& trainer, const TrainPlan& plan) {
  TrainResult result;
  result.run_dir = plan.out;
  result.accounting = account(plan, trainer.params(), trainer.flops_per_token());
  result.scored_tokens = trainer.scored_tokens, result.epochs = trainer.epochs();
  result.peak = peak_flops(plan, trainer.device(), trainer.group().world.size);
  result.memory = trainer.memory();
  result.tokens_per_second = tokens_per_second(trainer.steps_done() * trainer.tokens_per_step(), trainer.seconds);
  result.curves = read_curves(plan.out + "/metrics.jsonl");
  const auto last = [](const std::vector<double>& of, double none) { return of.empty() ? none : of.back(); };
  result.test_loss = last(result.curves.test_loss, NAN);  // where somebody removed the metrics of a run that is done
  result.answers = last(result.curves.answers, -1);
  result.steps_valid = last(result.curves.steps_valid, -1);
  result.train_loss = final_loss(result.curves);
  return result;
}

// "teacher: DIR, a gpt2 with 1,234 parameters; loss = 0.6 CE + 0.4 KL (tau 1, per token), of which the status shows CE"
std::string describe_teacher(const TrainPlan& plan, const Trainer& trainer) {
  const Teacher* teacher = trainer.teacher();
  if (teacher == nullptr) return "";
  return str("teacher: ", plan.teacher, ", ", with_article(teacher->config.arch), " with ",
             format_count(teacher->params.count()), " parameters; loss = ", plan.kd.alpha, " CE + ",
             (1 - plan.kd.alpha) * plan.kd.tau * plan.kd.tau, " KL (tau ", plan.kd.tau, ", mean per ",
             plan.kd_reduction, "); what is shown here is CE");
}

// "fp8: 14 of 14 linear layers; ..."
std::string describe_eight_bits(const Tape& tape) {
  if (tape.quantized().empty()) return "";
  int64_t eight = 0, all = 0;
  for (const QuantizedTensor& tensor : tape.quantized()) eight += tensor.name.ends_with(".weight");
  for (const auto& node : tape.nodes()) {
    if (node->frozen || node->op() != std::string("linear")) continue;
    for (size_t i = 0; i < node->in.size(); ++i) all += node->reads_bf16_copy(i);  // its weights
  }
  return str("fp8: ", eight, " of ", all, " linear layers; the others, the loss head and evaluation are in bf16");
}

// --steps 0: the initialised model itself, as a plain model directory.
void write_initialised(const TrainPlan& plan, const Dataset& dataset) {
  Trainer trainer(plan, *dataset.train);
  require_finite(trainer.params(), values_of(trainer.params(), plan.config), Exit::bad_data);
  CheckpointWriter writer;
  writer.begin(plan.out);
  write_model(writer, plan, {}, trainer.params(), dataset.tokenizer);
  writer.commit();
  std::printf("wrote an initialised %s with %s parameters to %s\n", plan.config.arch.c_str(),
              format_count(trainer.params().count()).c_str(), printable(plan.out).c_str());
}

// --dump-tensors: of the batch that the run would take next.
void write_tensors(const TrainPlan& plan, const Dataset& data) {
  const RunDir dir(plan.out);
  const std::string path = plan.out + "/tensors.safetensors";
  remove_leftovers_of(path);
  check_replaceable_tensors("--dump-tensors:", path, dumped_kind);
  Trainer trainer(plan, *data.train, plan.resume ? newest_valid_checkpoint(plan.out) : "");
  for (const auto& part : {&data.train, &data.test}) (*part)->check_when_read(plan.config.vocab_size);
  trainer.next_batch();
  Batch batch = batch_of(plan, data.train->seq_len(), trainer.teacher());
  batch.plan = PlanMode::distinct;
  batch.eight_bits = false;
  const Dumped dumped = dump_tensors(plan.dump_tensors, path, trainer.params(), plan.config, batch,
                                     trainer.tokens().data(), trainer.targets().data());
  const long long step = trainer.steps_done() + 1;
  std::printf("wrote %zu tensors of step %lld's %s batch%s to %s; its loss is %.9g\n", dumped.tensors, step,
              plan.accumulate > 1 ? "first" : "whole", plan.matmul == "fp8" ? ", by products in bf16," : "",
              printable(path).c_str(), dumped.loss);
}

void write_figure(const Settings& settings, const RunCurves& curves) {
  write_run_picture(settings.out + "/curve.svg", settings.config.arch + " on " + short_name(settings.data.spec),
                    curves);
}

}  // namespace

RunDir claim_run_dir(const TrainPlan& plan, std::shared_ptr<ProcessGroup>& group) {
  // A device that is not there is refused before the run directory exists, and so is a model that it has no room for.
  refuse_too_large(plan, *make_device(plan.device, plan.matmul), group->world.size);
  catch_stop_signals();  // before there is anything to leave behind
  RunDir dir(plan.out, group->world);
  if (group->world.leads()) {
    check_run_dir(plan);  // again, now that nobody else changes it
    remove_leftovers_of(plan.out);
    remove_leftovers_in(plan.out);
  }
  join_ranks(plan, group);
  dir.mark(group);
  return dir;
}

Run::Run(const TrainPlan& plan, const Dataset& data, const RunDir& dir, Trainer& trainer)
    : plan_(plan),
      data_(data),
      dir_(dir),
      trainer_(trainer),
      group_(trainer.group()),
      first_(trainer.steps_done()),
      eval_every_(plan.steps_between_evaluations()),
      save_every_(plan.steps_between_saves()),
      saved_(first_),
      progress_(plan.label + (group_.world.leads() ? "" : str(" rank ", group_.world.rank)), plan.steps,
                plan.runs_after,
                !group_.world.alone()),  // mpirun gives its processes a terminal where it has none
      kept_(plan.out, plan.data.spec) {
  if (group_.world.leads()) {
    write_run_settings(plan_);
    record_environment(plan_.out + "/environment.jsonl", plan_, trainer_, data_);
  }
  begin();
  if (!group_.world.leads()) return;
  metrics_.emplace(plan_.out + "/metrics.jsonl", first_);
  for (const std::string& note : metrics_->notes()) progress_.say(note);
  if (plan_.csv) table_.emplace(plan_.out + "/metrics.csv", plan_.out + "/metrics.jsonl");
  if (plan_.tensorboard) events_.emplace(plan_.out + "/tensorboard", first_, plan_.out + "/metrics.jsonl");
}

// Says what the run begins with.
void Run::begin() {
  const auto say = [&](const std::string& line) {
    if (!line.empty()) progress_.say(line);
  };
  if (!plan_.resume && first_ > 0) say(str("a branch of ", plan_.branch.run, " after step ", first_));
  else if (first_ > 0)
    say(str("resumed after step ", first_,
            first_ == plan_.steps ? ", the last one: the run is done; a larger --steps continues it" : ""));
  for (const std::string& change : trainer_.changes()) say(change);
  say(str(format_count(trainer_.params().count()), " parameters, ", trainer_.device().describe(), ", ",
          format_bytes(static_cast<double>(trainer_.memory())), " for the model and its activations"));
  if (first_ == 0) {
    const Config all = applied(plan_.config);
    std::istringstream remarks(find_architecture(all.arch).make(all)->remark(all));
    for (std::string line; std::getline(remarks, line);) say(line);
    say(loop_remark(plan_.config));
  }
  if (const std::string why = without_modelling_file(plan_.config); first_ == 0 && !why.empty()) say("note: " + why);
  say(describe_teacher(plan_, trainer_));
  say(describe_data(plan_, data_));
  say(validation_note(data_));
  const double chance = data_.test->task() != nullptr && plan_.answer_samples > 0 ? chance_of(plan_.data.spec) : NAN;
  if (std::isfinite(chance)) say(format_number("answers: guessing gets %.1f%%", 100 * chance));
  if (first_ == 0) say(vocabulary_note(plan_, data_));
  const Accounting accounting = account(plan_, trainer_.params(), trainer_.flops_per_token());
  for (const std::string& line : describe_optimizer(plan_, accounting, static_cast<double>(trainer_.tokens_per_step())))
    say(line);
  say(describe_ranks(plan_, group_));
  say(describe_eight_bits(trainer_.model().tape()));
}

bool Run::more() const {
  const int64_t done = trainer_.steps_done();
  const bool stop = group_.world.alone() ? stop_requested() : trainer_.stats.stop;  // what all ranks know
  if (done >= plan_.steps || (stop && done > first_)) return false;
  if (group_.world.leads()) dir_.check_present();
  return true;
}

void Run::show_progress() {
  const StepResult& step = trainer_.last;
  progress_.step(trainer_.steps_done(), step.ce, step.lr, step.norm, static_cast<double>(trainer_.tokens_per_step()),
                 step.seconds, plan_.z_loss > 0 ? step.z_loss : NAN);
  note_straggler();
}

void Run::note_straggler() {
  constexpr int64_t many = 20;
  const StepStats& stats = trainer_.stats;
  lagging_ = stats.max_busy > 1.5 * stats.median_busy ? (stats.slowest == laggard_ ? lagging_ + 1 : 1) : 0;
  laggard_ = stats.slowest;
  if (!times_waiting() || lagging_ != many) return;
  progress_.say(str("rank ", stats.slowest, " holds the others up: ", format_number("%.3g", stats.max_busy),
                    " s of its own for a step, others take ", format_number("%.3g s", stats.median_busy)));
}

// By rank 0, from the weights, and where tokens have weights of their own, from a few of the test sequences.
void Run::look_at_routing() {
  if (!has_learned_routing(trainer_.config())) return;
  trainer_.gather_values();
  if (group_.world.leads()) {
    try {
      routing_ = std::make_shared<const json>(
          routing_summary(trainer_.device(), trainer_.params(), trainer_.config(), *data_.test, plan_.documents));
    } catch (const Error& error) {
      if (error.code != Exit::not_finite) throw;
      progress_.say(str("note: metrics.jsonl has no routing of this step: ", error.what()));
    }
  }
  group_.barrier("routing");
}

void Run::evaluate() {
  group_.enter(Stage::evaluate, trainer_.steps_done());
  const int64_t size = data_.test->size(), tested = sequences_tested(plan_, size, trainer_.steps_done() == plan_.steps);
  if (plan_.eval_samples > 0 && tested / 8 > plan_.eval_samples)
    progress_.say(str("the last evaluation is over all ", format_count(size), " test sequences (--eval-samples)"));
  const SpreadSamples spread(*data_.test, tested);
  const Source& set = plan_.eval_rule == "first" ? *data_.test : static_cast<const Source&>(spread);
  const double loss = trainer_.evaluate(set, tested);
  scores_ = {{"test_loss", loss}};
  look_at_routing();
  std::string text = str("step ", trainer_.steps_done(), ": test loss ", format_number("%.4f", loss));
  if (tested < size) text += " (" + format_count(tested) + " of " + format_count(size) + " sequences)";
  else if (plan_.eval_samples < size) text += " (all " + format_count(size) + " sequences)";
  if (data_.test->task() != nullptr && plan_.answer_samples > 0) {
    trainer_.gather_values();
    const Answers answers = answer_task(trainer_.device(), trainer_.params(), trainer_.config(), *data_.test,
                                        plan_.answer_samples, answer_rows(plan_), group_);
    if (!group_.world.leads()) return;
    scores_.emplace_back("answers_correct", answers.correct());
    scores_.emplace_back("steps_valid", answers.steps_valid());
    if (answers.hard > 0) scores_.emplace_back("hard_correct", answers.hard_correct());
    text += format_number(", answers %.1f%%", 100 * answers.correct()) +
            format_number(", all steps valid %.1f%%", 100 * answers.steps_valid());
    progress_.say(text);
    std::string prompt = data_.tokenizer.decode(answers.sample_prompt), answer = data_.tokenizer.decode(answers.sample);
    if (prompt.size() > 60) prompt = "..." + prompt.substr(prompt.size() - 57);
    text = "sample: " + excerpt(prompt) + " >> " + excerpt(answer);
  }
  progress_.say(text);
}

void Run::write_metrics() {
  const StepResult& step = trainer_.last;
  const int64_t tokens = trainer_.tokens_per_step();
  json line = {{"step", trainer_.steps_done()},
               {"tokens", trainer_.steps_done() * tokens},
               {"loss", step.loss},
               {"lr", step.lr},
               {"grad_norm", step.norm},
               {"seconds", trainer_.seconds}};
  // What the test loss is of the test set; the loss has a teacher in it, or the earlier exits.
  if (trainer_.model().has_ce()) line["ce"] = step.ce;
  if (plan_.z_loss > 0) line["z_loss"] = step.z_loss;
  if (const double rate = tokens_per_second(tokens, step.seconds); rate > 0) line["tokens_per_s"] = rate;
  for (const auto& [name, score] : scores_) line[name] = score;
  if (!scores_.empty())
    line["test_sequences"] = sequences_tested(plan_, data_.test->size(), trainer_.steps_done() == plan_.steps);
  scores_.clear();
  if (const auto routing = std::exchange(routing_, nullptr)) line["routing"] = *routing;
  if (const StepStats& t = trainer_.stats; times_waiting()) {
    line["waiting_s"] = trainer_.waited;
    line["busy_least_s"] = t.min_busy, line["busy_median_s"] = t.median_busy, line["busy_most_s"] = t.max_busy;
  }
  if (metrics_) metrics_->write(line);
  if (table_) table_->write(line);
  if (events_) events_->write(line);
}

void Run::save() {
  saved_ = trainer_.steps_done();
  group_.enter(Stage::save, saved_);
  if (metrics_) metrics_->sync();
  if (events_) events_->sync();
  if (group_.world.leads() && plan_.kept_steps.contains(saved_)) kept_.add(saved_, saved_ * trainer_.tokens_per_step());
  trainer_.save(step_dir(plan_.out, saved_), data_.tokenizer, [&] { dir_.check_mine(); });
  if (!group_.world.leads()) return;
  dir_.check_present();
  remove_old();
  draw();
}

void Run::remove_old() { remove_old_checkpoints(plan_.out, plan_.keep, step_dir(plan_.out, saved_), kept_.steps()); }

// A figure that cannot be written does not end the run; its exit code says so at the end.
void Run::draw() {
  const std::string error = io_error_of([&] { write_figure(plan_, metrics_->curves()); });
  lacks_figure_ = !error.empty();
  if (lacks_figure_) progress_.say("note: " + error + "; the run goes on");
}

Exit Run::finish() {
  const int64_t done = trainer_.steps_done();
  if (saved_ != done) save();
  else if (first_ == done && group_.world.leads()) remove_old();  // a kill may have come between the last save and this
  if (done < plan_.steps) {
    const std::string command =
        plan_.program.empty() ? "" : shell_command(plan_.program) + " --resume --out " + shell_word(plan_.out);
    progress_.say(str("stopped on request after step ", done, command.empty() ? "" : "; to continue: "), command);
  }
  std::printf("%s", trainer_.profile().c_str());
  if (plan_.profile) std::printf("peak of resident memory: %s\n", format_bytes(peak_memory()).c_str());
  if (done == plan_.steps && metrics_ && !plan_.program.empty()) conclude();
  return done < plan_.steps ? Exit::stopped : lacks_figure_ ? Exit::io : Exit::done;
}

void Run::conclude() const {
  const RunCurves& c = curves();
  const std::string out = printable(plan_.out);
  const int64_t done = trainer_.steps_done(), size = data_.test->size(), tested = sequences_tested(plan_, size, true);
  std::string losses = format_number("training %.4f", final_loss(c));
  if (!c.test_loss.empty()) losses += format_number(", test %.4f", c.test_loss.back());
  losses += tested == size ? " (all " + format_count(size) + " test sequences)"
                           : " (" + format_count(tested) + " of " + format_count(size) + " test sequences)";
  const int64_t tokens = done * trainer_.tokens_per_step();
  const double rate = tokens_per_second(tokens, trainer_.seconds), flops = trainer_.flops_per_token();
  const double peak = peak_flops(plan_, trainer_.device(), group_.world.size);
  const bool text = data_.test->task() == nullptr && (data_.tokenizer.is_bytes() || data_.tokenizer.is_bpe());
  std::printf("\nmodel:    %s\nfigure:   %s/curve.svg\nlosses:   %s\n", printable(step_dir(plan_.out, done)).c_str(),
              out.c_str(), losses.c_str());
  std::printf("time:     %s of training, %s tokens/s\n", format_seconds(trainer_.seconds).c_str(),
              format_count(static_cast<int64_t>(rate)).c_str());
  const bool all_scored = trainer_.scored_tokens < 0 || trainer_.scored_tokens == tokens;
  std::printf("read:     %s tokens%s, %.3g epochs\n", format_count(tokens).c_str(),
              all_scored ? "" : str(", ", format_count(trainer_.scored_tokens), " of them scored").c_str(),
              trainer_.epochs());
  std::printf("FLOPs:    %.4g, at %.4g GFLOP/s%s\n", static_cast<double>(tokens) * flops, 1e-9 * rate * flops,
              peak > 0 ? format_number(", MFU %.1f %%", 100 * rate * flops / peak).c_str() : "");
  std::printf("next:     %s\n          %s --model %s --data %s\n",
              generate_command(plan_.program, plan_.out, plan_.data.spec, text).c_str(),
              shell_command(plan_.program, "evaluate").c_str(), shell_word(plan_.out).c_str(),
              shell_word(plan_.data.spec).c_str());
}

std::string generate_command(const std::string& program, const std::string& model, const std::string& data, bool text) {
  const auto arith = parse_arith(data);
  const bool integers = arith && arith->numbers == arith::Numbers::integers;  // 5 / 6 is none
  const char* prompt = integers ? "\"3 + 4 * 2 - 6 / 3 =\""
                       : arith  ? "\"3 + 4 * 2 - 5 / 6 =\""
                       : text   ? "\"Once upon a time\""
                                : "...";
  return shell_command(program, "generate") + " --model " + shell_word(model) + " --prompt " + prompt;
}

TrainResult train_run(const Settings& settings, const std::function<void(const RunCurves&)>& evaluated) {
  check_run_dir(settings);
  const auto [plan, data] = open_inputs(settings);
  if (!plan.data_digest.empty() && digest_of_files(plan, data) != plan.data_digest)
    fail(Exit::bad_data, plan.data.spec, " was changed since the first of these runs began; put it back");
  std::shared_ptr<ProcessGroup> group = one_rank_group();
  const RunDir dir = claim_run_dir(plan, group);
  Trainer trainer(plan, *data.train, find_checkpoint(plan, dir), dir.group());
  Run run(plan, data, dir, trainer);
  while (run.more()) {
    trainer.step();
    run.show_progress();
    if (run.time_to_evaluate()) run.evaluate();
    run.write_metrics();
    if (evaluated && run.time_to_evaluate()) evaluated(run.curves());
    if (run.time_to_save()) run.save();
  }
  const Exit code = run.finish();
  TrainResult result = summarise(trainer, plan);
  result.code = code;
  return result;
}

std::string draw_missing_figure(const Settings& settings) {
  std::error_code ignored;
  if (fs::is_regular_file(settings.out + "/curve.svg", ignored)) return "";
  return io_error_of([&] {
    const RunCurves curves = read_curves(settings.out + "/metrics.jsonl");
    if (!curves.step.empty()) write_figure(settings, curves);
  });
}

// Ranks end together, so that none takes another for lost.
static Exit train_to_end(const TrainPlan& plan, const Dataset& data, std::shared_ptr<ProcessGroup>& group,
                         const Train& train) {
  const RunDir dir = claim_run_dir(plan, group);
  const Exit code = train(plan, data, dir);
  group->finish();
  group = one_rank_group();
  if (code == Exit::io)
    fail(code, "the run is done and saved, but its figure ", plan.out,
         "/curve.svg could not be written: see the note above");
  return code;
}

// What the settings ask for.
static Exit run_plan(const Settings& settings, std::shared_ptr<ProcessGroup>& group, const Train& train) {
  if (!settings.plans_only()) check_run_dir(settings, group->world);
  const auto [plan, data] = open_inputs(settings);
  if (group->world.leads())
    for (const std::string& line : {plan.chosen, warmup_warning(plan), epochs_warning(plan, data)})
      if (!line.empty()) std::printf("%s\n", line.c_str());
  if (group->world.alone()) note_single_process(plan);
  if (plan.given.contains("--router-lr")) refuse_idle_router_lr({plan}, plan.config.arch);
  if (plan.given.contains("--freeze-routers")) refuse_idle_freeze(plan, plan.config.arch);
  if (plan.plans_only()) print_plan(plan, data);
  else if (!plan.dump_tensors.empty()) write_tensors(plan, data);
  else if (plan.steps == 0) write_initialised(plan, data);
  else return train_to_end(plan, data, group, train);
  return Exit::done;
}

int train_program(int argc, char** argv, const std::string& arch, const Train& train) {
  const bool combines = arch == combined_program;
  CommandLine app(combines ? "Trains several connections in one model."
                           : "Trains " + arch + ": " + find_architecture(arch).meaning + ".",
                  "train_" + arch);
  Settings settings;
  settings.program = argv[0];
  const auto flags = [&] {
    settings.label = settings.config.arch = combines ? chosen_combination(argc, argv) : arch;
    if (combines) add_arch_flag(app);
    if (arch == "gpt2" || find_flag(argc, argv, "--backbone") == "gpt2") use_gpt2(settings.config);
    // A run that is resumed has its flags; those given beside --resume come on top.
    if (has_flag(argc, argv, "--resume")) take_run_settings("--resume", find_flag(argc, argv, "--out"), settings);
    else take_branch_settings(find_flag(argc, argv, "--branch"), settings);
    const std::string preset = find_flag(argc, argv, "--preset");
    if (!preset.empty() && preset != settings.preset) apply_preset(preset, settings);
    add_train_flags(app, settings);
    add_architecture_flags(app, settings);
    set_short_help(
        app, combines ? training_help("train_combined --arch mhc+lime", {"--arch"}) : training_help("train_" + arch));
  };
  return run_program(app, argc, argv, flags, [&] {
    complete_flags(app, settings, !continued_run(settings).empty());
    const bool first = world_from_environment().leads();
    if (!settings.trains() && !first) return Exit::done;  // one process is enough
    if (first) std::fputs(notes_on_train_flags(app, settings.config).c_str(), stderr);
    std::shared_ptr<ProcessGroup> group = one_rank_group();
    try {
      if (settings.trains()) become_rank(settings, group);
      return run_plan(settings, group, train);
    } catch (const std::exception& failure) {
      if (group->world.alone()) throw;
      end_rank(settings, *group, failure, memory_remedy(app));
    }
  });
}

}  // namespace crossply
