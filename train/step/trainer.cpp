#include "train/step/trainer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "cli/format.h"
#include "cli/stop.h"
#include "data/digest.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/rng.h"
#include "eval/mean_loss.h"
#include "kernels/devices.h"
#include "kernels/optim/clip.h"
#include "kernels/optim/sum_slices.h"
#include "models/disk/config_json.h"
#include "models/disk/library_files.h"
#include "models/disk/model_dir.h"
#include "models/registry.h"
#include "ranks/agree.h"
#include "train/step/fault.h"
#include "train/step/moments.h"

namespace crossply {

using nlohmann::json;

void declare(ParameterTable& params, const TrainOptions& options) {
  declare_model(params, options.config);
  const Config& c = options.config;
  if (!options.init.empty() && options.initial.config.arch != c.arch)
    find_architecture(c.arch).make(c)->start_as_plain(params, c);
  for (Parameter& row : params.rows()) {
    const bool router = row.lr_mul != 1 && row.lr_mul != 0;  // 0: it stays as it starts
    if (router && options.router_lr > 0) row.lr_mul = options.router_lr / options.lr;
    if (options.decay_all) row.wd_mul = 1;
  }
}

Batch batch_of(const TrainOptions& options, int64_t T, Teacher* teacher) {
  return {options.batch, T, storage_type(options), true, plan_mode(options.plan), teacher, options.matmul == "fp8"};
}

std::vector<std::string> write_model(const CheckpointWriter& writer, const TrainOptions& o,
                                     const ParameterTable& params, const Tokenizer& tokenizer) {
  const Place& place = o.job->place;
  std::vector<std::string> weights = save_weights(writer, params, o.config, place.rank, place.size, o.shard_bytes);
  if (!place.leads()) return weights;
  save_config(writer.path("config.json"), o.config);
  tokenizer.save(std::filesystem::path(writer.path("config.json")).parent_path());
  auto files = o.initial.files;  // which are of the same model, and may say more than what is known here
  files.merge(library_files(o.config, tokenizer));
  for (const auto& [name, contents] : files) write_file_atomically(writer.path(name), contents);
  return weights;
}

std::string digest_of(const ParameterTable& params) {
  Digest digest;
  for (const Tensor& weights : {params.values(), params.narrow()}) {
    const size_t bytes = weights.data != nullptr ? weights.bytes() : 0;
    std::vector<std::byte> piece(std::min(bytes, size_t{64} << 20));
    for (size_t at = 0; at < bytes; at += piece.size()) {
      const size_t n = std::min(piece.size(), bytes - at);
      params.device().copy_out(piece.data(), static_cast<const std::byte*>(weights.data) + at, n);
      digest.add(piece.data(), n);
    }
  }
  return str(std::hex, digest.value());
}

namespace {

// The parameters without their memory, in buckets.
Buckets declare_and_divide(ParameterTable& params, const TrainOptions& options) {
  declare(params, options);
  return divide(params, options, options.job->place);
}

// The parameters with their memory and first values: done before the optimizer sees them. A checkpoint's values come
// later, with its moments.
ParameterTable& prepare(ParameterTable& params, const TrainOptions& options, Device& device, bool resumed) {
  const bool narrow = storage_type(options) == Dtype::bf16;
  params.allocate(device, Dtype::f32, true, narrow && !options.job->place.alone());
  if (narrow) params.allocate_narrow();
  params.initialise(options.seed);
  if (!options.init.empty() && !resumed)
    load_initial_weights(ModelDir(options.init).path(), options.initial.config, options.config, params);
  refresh_narrow(params);
  return params;
}

// What only looks at a batch, or at nothing, does not read all of the data.
bool needs_digest(const TrainOptions& o, const std::string& checkpoint) {
  return !checkpoint.empty() || (o.steps > 0 && o.dump_tensors.empty());
}

// All that older checkpoints know of their data: its size and the contents of some samples.
std::string fingerprint(const Source& source) {
  const size_t T = static_cast<size_t>(source.seq_len());
  std::vector<int32_t> tokens(2 * T);
  uint64_t hash = static_cast<uint64_t>(source.size());
  for (int64_t i = 0; i < 16; ++i) {
    source.read(i * (source.size() - 1) / 15, tokens.data(), tokens.data() + T);
    for (const int32_t token : tokens) hash = mix_bits(hash * 31 + static_cast<uint32_t>(token));
  }
  return str(std::hex, hash);
}

// A count, or a time, in train_state.json.
template <class T>
T state_number(const json& state, const char* key, const std::string& path) {
  const json number = state.value(key, json());
  if (!holds<T>(number, 0))
    fail(Exit::bad_data, path, ": \"", key, "\" is ", json_text(number), ", not a ",
         std::is_integral_v<T> ? "count" : "time");
  return number.get<T>();
}

// One half of a checkpoint's Arithmetic.
std::map<std::string, std::string> texts(const json& record, const char* key, const std::string& path) {
  const json part = record.is_object() ? record.value(key, json()) : json();
  if (!part.is_object() || !std::all_of(part.begin(), part.end(), [](const json& text) { return text.is_string(); }))
    fail(Exit::bad_data, path, ": \"", key, "\" of \"device\" must be an object of texts; ",
         "resume from another checkpoint");
  return part.get<std::map<std::string, std::string>>();
}

// "cuBLASLt was 130002, is 130100"; "" for the same versions.
std::string differences(std::map<std::string, std::string> was, std::map<std::string, std::string> is) {
  std::string list;
  for (const auto& [of, version] : is) was.insert({of, "unknown"});
  for (const auto& [of, version] : was)
    if (const std::string now = is.contains(of) ? is[of] : "unknown"; version != now)
      list += str(list.empty() ? "" : "; ", of, " was ", version, ", is ", now);
  return printable(list);
}

// The device goes on with what a checkpoint's train_state.json says of it. Returns what differs: where it says nothing,
// being of a CPU, or older, all that this device knows of itself.
std::string adopt_arithmetic(Device& device, const json& state, bool other_gpu, const std::string& path) {
  std::map<std::string, std::string> versions, choices;
  if (state.contains("device"))
    versions = texts(state["device"], "versions", path), choices = texts(state["device"], "choices", path);
  const std::string different = differences(versions, device.arithmetic().versions);
  if (different.empty()) device.adopt(choices, path);
  else if (!other_gpu)
    fail(Exit::device, "--resume: ", path, " is not of this machine: ", different, ". Last digits would differ; ",
         "resume it where it ran, or add --other-gpu to go on without equal bits");
  return different;
}

// Throws Exit::bad_data at all ranks if what they read is not the same, by its Source::digest.
void compare_data(const TrainOptions& o, const std::string& digest) {
  if (o.job->place.alone()) return;
  if (const std::string others = ranks_that_differ(*o.job, digest); !others.empty())
    fail_at_all(*o.job, Exit::bad_data,
                str("what ", others, " read as ", o.data.spec,
                    " has other contents than rank 0's: all ranks need the same files"));
}

constexpr const char* remedy = ". Try a lower --lr, a longer --warmup or --clip";

}  // namespace

Trainer::Trainer(const TrainOptions& options, const Source& train, const std::string& checkpoint)
    : options_(options),
      device_(make_device(options.device, options.matmul)),
      teacher_(load_teacher(options, *device_)),
      buckets_(declare_and_divide(params_, options)),
      model_(*device_, prepare(params_, options, *device_, !checkpoint.empty()), options.config,
             batch_of(options, train.seq_len(), teacher_.get())),
      T_(train.seq_len()),
      optimizer_(params_, buckets_, options.adamw),
      exchange_(*options.job, params_, buckets_, model_, options.sum, micro_steps()),
      sums_(*device_, "sums of a step", static_cast<size_t>(options.job->place.size * sums_size()) * sizeof(double)),
      scales_(model_.tape().scaled()),
      verdict_(
          *device_, "verdict on a step",
          verdicts * sizeof(double) +
              (scales_.empty() ? 0 : static_cast<size_t>(options.job->place.size) * model_.tape().amaxes().bytes())),
      host_verdict_(verdict_.bytes()),
      loader_(train, options.batch, options.seed, true),
      replay_{true, 1 / static_cast<double>(tokens_per_step()), 0},
      schedule_{schedule_kind(options.schedule), options.warmup, std::max<int64_t>(options.steps, 1), options.lr_floor},
      data_(fingerprint(train)),
      digest_(needs_digest(options, checkpoint) ? str(std::hex, train.digest()) : ""),
      teacher_digest_(teacher_ != nullptr ? digest_of(teacher_->params) : "") {
  compare_data(options, digest_);
  tokens_.resize(static_cast<size_t>(options.batch * micro_steps() * T_));
  targets_.resize(tokens_.size());
  if (!checkpoint.empty()) restore(checkpoint);
  squares_ = on_device(order_of_squares()), losses_ = on_device(order_of_losses(false));
  if (teacher_ != nullptr) ces_ = on_device(order_of_losses(true));
  if (checkpoint.empty() && !scales_.empty()) measure_scales();
  if (!scales_.empty()) set_scales();
  if (checkpoint.empty() || !device_change_.empty()) share_choices();  // else they are the checkpoint's
  if (!scales_.empty()) set_scales();                                  // again: that has looked for largest numbers
  if (options_.profile) model_.start_profile();
}

void Trainer::next_batch() {
  start_ = Clock::now();
  Job& job = *options_.job;
  job.enter(Stage::step, steps_done() + 1);
  spoil_ = inject_fault(job.place, steps_done() + 1);
  waited_before_ = job.place.alone() ? 0 : job.comm().seconds_waited();
  const int64_t micro = options_.batch * T_, own = options_.batch * micro_steps(), position = loader_.position();
  loader_.seek(position + own * job.place.rank);
  for (int64_t a = 0; a < micro_steps(); ++a) loader_.next(&tokens_[a * micro], &targets_[a * micro]);
  loader_.seek(position + own * job.place.size);
  const int64_t scored = std::count_if(targets_.begin(), targets_.end(), [](int32_t target) { return target >= 0; });
  job.start_vote({steps_done(), position, exchange_.transfers(), scored, stop_requested(), busy_});
}

// Without scales the first step's gradients would vanish: a replay in bf16 of the batch at the data's current position,
// at every rank the same one.
void Trainer::measure_scales() {
  const int64_t position = loader_.position();
  loader_.next(tokens_.data(), targets_.data());
  loader_.seek(position);
  Step measuring = replay_;
  measuring.measures = measuring.first = true;
  model_.run(tokens_.data(), targets_.data(), measuring);
  model_.take_losses();
  gather_amaxes();
  std::vector<float> host(static_cast<size_t>(all_amaxes().numel()));
  device_->copy_out(host.data(), all_amaxes().data, all_amaxes().bytes());
  scales_.add(host);
}

// The scales of the next step, once those that a step used are known.
void Trainer::set_scales() {
  const Tape& tape = model_.tape();
  const std::vector<float> scales = scales_.scales(), inverses = scales_.inverses();
  device_->copy_in(tape.scales().data, scales.data(), tape.scales().bytes());
  device_->copy_in(tape.inverses().data, inverses.data(), tape.inverses().bytes());
  device_->fill(tape.amaxes().data, 0, tape.amaxes().bytes());
}

Tensor Trainer::all_amaxes() const {
  if (scales_.empty()) return {};
  const int64_t n = options_.job->place.size * model_.tape().amaxes().numel();
  return {verdict_.data() + verdicts * sizeof(double), Dtype::f32, Shape{n}};
}

void Trainer::gather_amaxes() {
  Job& job = *options_.job;
  const int64_t n = model_.tape().amaxes().numel();
  copy(part_of(all_amaxes(), {job.place.rank * n, (job.place.rank + 1) * n}), model_.tape().amaxes(),
       device_->stream());
  if (!job.place.alone()) job.comm().gather(all_amaxes()), job.comm().wait(job.comm().mark());
}

Tensor Trainer::all_sums() const { return {sums_.data(), Dtype::f64, Shape{options_.job->place.size * sums_size()}}; }

Tensor Trainer::own_sums(const Range& range) const {
  const int64_t first = options_.job->place.rank * sums_size();
  return part_of(all_sums(), {first + range.begin, first + range.end});
}

void Trainer::forward_backward() {
  const int64_t micro = options_.batch * T_, each = sums_of_run();
  device_->fill(sums_.data(), 0, sums_.bytes());
  Step replay = replay_;
  replay.first = true;
  for (int64_t a = 0; a < micro_steps(); ++a) {
    const bool more = a + 1 < micro_steps();
    replay.last = !more && exchange_.hooked();
    model_.run(&tokens_[a * micro], &targets_[a * micro], replay, own_sums({a * each, (a + 1) * each}));
    if (!more) continue;
    replay.first = exchange_.after_micro_step(a);
    options_.job->enter(Stage::step, steps_done() + 1);  // a long step, but not a rank that hangs
  }
  exchange_.finish();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  if (spoil_) device_->copy_in(own_sums({0, 1}).data, &nan, sizeof nan);
}

std::vector<int32_t> Trainer::order_of_losses(bool ce) const {
  const int64_t ranks = options_.job->place.size, lanes = model_.layout().lanes;
  std::vector<int32_t> order;
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t a = 0; a < micro_steps(); ++a)
      for (int64_t i = 0; i < lanes; ++i)
        order.push_back(static_cast<int32_t>(r * sums_size() + a * sums_of_run() + (ce ? lanes : 0) + i));
  return order;
}

// Leaves between the rows are left out: how many there are depends on the number of ranks.
std::vector<int32_t> Trainer::order_of_squares() const {
  std::vector<bool> used(static_cast<size_t>(leaves_of(params_.flat_size())));
  for (const Parameter& row : params_.rows())
    for (int64_t l = row.offset / leaf; l < leaves_of(row.offset + row.shape.numel()); ++l)
      used[static_cast<size_t>(l)] = true;
  std::vector<int32_t> order;
  for (auto bucket = buckets_.list().rbegin(); bucket != buckets_.list().rend(); ++bucket)
    for (int r = 0; r < buckets_.size(); ++r)
      for (int64_t l = 0; l < leaves_of(bucket->slice); ++l)
        if (used[static_cast<size_t>(bucket->slice_of(r).begin / leaf + l)])
          order.push_back(static_cast<int32_t>(r * sums_size() + losses_size() + bucket->own / leaf + l));
  return order;
}

Arena Trainer::on_device(const std::vector<int32_t>& order) const {
  Arena arena(*device_, "order of a step's sums", order.size() * sizeof(int32_t));
  device_->copy_in(arena.data(), order.data(), arena.bytes());
  return arena;
}

std::string Trainer::first_spoilt() {
  if (options_.job->place.alone()) return "";
  std::vector<double> numbers(static_cast<size_t>(all_sums().numel()));
  device_->copy_out(numbers.data(), sums_.data(), sums_.bytes());
  for (int64_t r = 0; r < options_.job->place.size; ++r)
    for (int64_t i = 0; i < losses_size(); ++i)
      if (!std::isfinite(numbers[static_cast<size_t>(r * sums_size() + i)]))
        return str("; the first loss that is not finite is of rank ", r, "'s micro-step ", i / sums_of_run() + 1);
  return "; all losses are finite, a gradient is not";
}

void Trainer::share_choices() {
  Job& job = *options_.job;
  if (job.place.alone() || device_->arithmetic().versions.empty()) return;
  std::fill(targets_.begin(), targets_.end(), 0);
  if (job.place.leads()) {  // finds them; nobody reads the results
    Step first = replay_;
    first.first = true;
    model_.run(tokens_.data(), targets_.data(), first);
    if (!scales_.empty()) model_.run(tokens_.data(), targets_.data(), Step{});  // whose products are others
  }
  model_.take_losses();
  const json choices = known_json(job.share(json_text(json(device_->arithmetic().choices))));
  device_->adopt(choices.get<std::map<std::string, std::string>>(), "rank 0");
}

void Trainer::check_replicas() {
  Job& job = *options_.job;
  if (job.place.alone() || options_.check_replicas == 0) return;
  job.enter(Stage::check, steps_done());
  if (const std::string others = ranks_that_differ(job, digest_of(params_)); !others.empty())
    fail_at_all(job, Exit::internal,
                str("after step ", steps_done(), " the weights of ", others, " are not those of rank 0: ",
                    "memory or network may be broken; resume from a checkpoint, without these machines"));
}

void Trainer::decide() {
  phase("gradient norm", flat_bytes() / buckets_.size(), [&] {
    for (const Bucket& bucket : buckets_.list())
      leaf_squares(own_sums({losses_size() + bucket.own / leaf, losses_size() + leaves_of(bucket.own + bucket.slice)}),
                   part_of(params_.gradients(), bucket.slice_of(buckets_.rank())), device_->stream());
  });
  if (Job& job = *options_.job; !job.place.alone()) {
    job.comm().gather(all_sums());
    job.comm().wait(job.comm().mark());
  }
  if (!scales_.empty()) gather_amaxes();
  const auto add = [&](int64_t to, const Arena& order) {
    const int64_t n = static_cast<int64_t>(order.bytes() / sizeof(int32_t));
    ordered_sum(verdict({to, to + 1}), all_sums(), {order.data(), Dtype::i32, Shape{n}}, device_->stream());
  };
  add(0, squares_), add(1, losses_);
  if (teacher_ != nullptr) add(2, ces_);
  clip_factor(optimizer_.factor(), optimizer_.scale(), verdict({0, verdicts}), all_amaxes(), options_.adamw.clip,
              device_->stream());
}

void Trainer::change_weights() {
  phase("adamw", (7 * flat_bytes() + static_cast<double>(params_.narrow_bytes())) / buckets_.size(),
        [&] { optimizer_.update(); });
  exchange_.gather_weights();
}

void Trainer::update() {
  Job& job = *options_.job;
  if (!job.place.alone())
    busy_ =
        std::chrono::duration<double>(Clock::now() - start_).count() - (job.comm().seconds_waited() - waited_before_);
  tally = job.finish_vote();
  last.scored = tally.scored;
  last.lr = options_.lr * schedule_.at(steps_done());
  optimizer_.begin_step(last.lr, scale());
  const auto recorded = [&](Recording& recording, const auto& work) {
    if (options_.profile) work();  // which waits
    else device_->replay(recording, work);
  };
  recorded(deciding_, [&] { decide(); });
  device_->begin_read(verdict_.data(), verdict_.bytes());  // between the two: the host waits for the first only
  recorded(changing_, [&] { change_weights(); });
  exchange_.count_gathers();
}

void Trainer::take_loss_and_norm() {
  device_->end_read(host_verdict_.data());  // here alone does a step wait for the device
  Job& job = *options_.job;
  if (!job.place.alone()) job.comm().wait(job.comm().mark());  // to be told of an error in a recorded transfer
  double of_step[verdicts];
  std::memcpy(of_step, host_verdict_.data(), sizeof of_step);
  last.norm = scale() * std::sqrt(of_step[0]);
  last.loss = scale() * replay_.grad_scale * of_step[1];
  last.ce = teacher_ == nullptr ? last.loss : scale() * replay_.grad_scale * of_step[2];
  std::string overflown;
  if (!scales_.empty()) {
    std::vector<float> amaxes(static_cast<size_t>(all_amaxes().numel()));
    std::memcpy(amaxes.data(), host_verdict_.data() + sizeof of_step, all_amaxes().bytes());
    overflown = scales_.add(amaxes);
    set_scales();
  }
  const double all = last.loss + last.ce + last.norm;  // of which the device has looked at each
  if (!std::isfinite(all) || !overflown.empty()) fail_not_finite(overflown);
  if (!job.place.alone()) {
    waited = job.comm().seconds_waited() - waited_before_;
    if (options_.profile && waited > 0) add_cost(phases_, OpCost{"waiting for other ranks", 1, waited, 0, 0});
  }
  if (options_.check_replicas > 0 && steps_done() % options_.check_replicas == 0) check_replicas();
  ++profiled_;
  last.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  seconds += last.seconds;
}

void Trainer::fail_not_finite(const std::string& overflown) {
  const int64_t step = optimizer_.step--, position = loader_.position();  // that step has changed nothing
  fail(Exit::not_finite, "step ", step, ": loss ", last.loss, ", gradient norm ", last.norm, ", at positions ",
       position - options_.batch * options_.accumulate, " to ", position - 1, " of the stream of training samples",
       first_spoilt(), overflown.empty() ? "" : "; " + overflown + " has numbers that are not finite",
       ". No update was made", has_checkpoint_ ? "; the last checkpoint is untouched" : "; there is no checkpoint yet",
       remedy);
}

StepResult Trainer::step() {
  next_batch();
  forward_backward();
  update();
  take_loss_and_norm();
  return last;
}

double Trainer::evaluate(const Source& test, int64_t samples) {
  const double loss = mean_loss(model_, test, samples, *options_.job).loss;
  if (!std::isfinite(loss))
    fail(Exit::not_finite, "the test loss after step ", steps_done(), " is ", loss,
         has_checkpoint_ ? ". The last checkpoint is from before that" : ". There is no checkpoint yet", remedy);
  return loss;
}

void Trainer::save(const std::string& dir, const Tokenizer& tokenizer, const std::function<void()>& may_publish) {
  Job& job = *options_.job;
  gather_values();
  CheckpointWriter writer;
  if (job.place.leads()) writer.begin(dir);
  const std::string building = job.share(job.place.leads() ? writer.building() : "");
  if (!job.place.leads()) writer.join(dir, building);
  std::vector<std::string> written = write_model(writer, options_, params_, tokenizer);
  written.push_back(save_moments(writer, params_, buckets_, optimizer_));
  if (job.place.leads()) {
    json state = {
        {"step", optimizer_.step}, {"position", loader_.position()},     {"seconds", seconds},          {"data", data_},
        {"data_digest", digest_},  {"trajectory", trajectory(options_)}, {"world_size", job.place.size}};
    if (teacher_ != nullptr) state["teacher_digest"] = teacher_digest_;
    if (!scales_.empty()) state["eight_bits"] = scales_.to_json();
    if (const Arithmetic a = device_->arithmetic(); !a.versions.empty())
      state["device"] = {{"versions", a.versions}, {"choices", a.choices}};
    write_file_atomically(writer.path("train_state.json"), json_text(state, 2) + "\n");
  }
  const std::vector<std::string> records = job.collect(job.place.leads() ? "" : writer.record(written));
  if (job.place.leads()) writer.commit({records.begin() + 1, records.end()}, may_publish);
  job.barrier("checkpoint");
  has_checkpoint_ = true;
}

void Trainer::restore(const std::string& dir) {
  refuse_other_config(load_config(dir + "/config.json"), options_.config, dir + "/config.json");
  const std::string path = dir + "/train_state.json";
  const json state = read_json(path), trajectory = state.value("trajectory", json());
  std::set<std::string> moved;
  if (state.value("data", json()) == data_ && state.value("data_digest", json()) == digest_) moved = data_settings;
  if (teacher_ != nullptr && state.value("teacher_digest", json()) == teacher_digest_) moved.insert("teacher");
  refuse_other_settings(trajectory, options_, dir, moved);
  if (state.value("data", json()) != data_ || state.value("data_digest", json(digest_)) != digest_)
    fail(Exit::bad_data, "--resume: ", options_.data.spec,
         options_.data.val_spec.empty() ? "" : " or " + options_.data.val_spec, " is not the data that the run in ",
         dir, " was trained on; its size or contents changed");
  if (teacher_ != nullptr && state.value("teacher_digest", json()) != teacher_digest_)
    fail(Exit::bad_data, "--resume: --teacher ", options_.teacher, " has other weights than those that the run in ",
         dir, " learned from; put them back, or start a new run");
  const auto step = state_number<int64_t>(state, "step", path),
             position = state_number<int64_t>(state, "position", path);
  const int64_t samples = options_.batch * options_.accumulate;  // of a step
  if (step > options_.steps || position % samples != 0 || position / samples != step)
    fail(Exit::bad_data, path, ": \"step\" ", step, " and \"position\" ", position, " do not go together, at ", samples,
         " samples a step and ", options_.steps, " steps");
  seconds = state_number<double>(state, "seconds", path);
  ranks_before_ = state.contains("world_size") ? state_number<int64_t>(state, "world_size", path) : 1;
  if (const std::string different = adopt_arithmetic(*device_, state, options_.other_gpu, path); !different.empty())
    device_change_ = "--other-gpu: " + different + "; last digits differ from here on";
  load_weights(dir, options_.config, params_);
  optimizer_.take_masters();
  refresh_narrow(params_);
  load_moments(dir, params_, buckets_, optimizer_);
  optimizer_.step = step;
  if (!scales_.empty()) scales_.read(state.value("eight_bits", json()), path);
  loader_.seek(position);
  check_replicas();
  has_checkpoint_ = true;
  steps_before_ = trajectory["steps"].get<int64_t>();
}

std::string Trainer::schedule_change() const {
  if (steps_before_ == 0 || steps_before_ == options_.steps) return "";
  Schedule before = schedule_;
  before.total = steps_before_;
  const double rate = options_.lr * schedule_.at(steps_done()), old = options_.lr * before.at(steps_done());
  return str("--steps grows from ", steps_before_, " to ", options_.steps, ": from here on the ", options_.schedule,
             " schedule is that of ", options_.steps, " steps; the next rate is ", format_number("%.3g", rate),
             rate == old ? ", as before" : format_number(", it would have been %.3g", old));
}

std::string Trainer::ranks_change() const {
  const int64_t ranks = options_.job->place.size;
  if (ranks_before_ == 0 || ranks_before_ == ranks) return "";
  return str("resumed by ", ranks, ranks == 1 ? " rank" : " ranks", ", saved by ", ranks_before_,
             options_.sum == "tree"
                 ? ": the steps stay what they are"
                 : ": the steps stay what they are, but for last digits (--sum " + options_.sum + ")");
}

double Trainer::scale() const {
  return last.scored > 0 ? static_cast<double>(tokens_per_step()) / static_cast<double>(last.scored) : 0;
}

size_t Trainer::memory() const {
  return params_.values().bytes() + params_.gradients().bytes() + params_.narrow_bytes() + optimizer_.bytes() +
         exchange_.bytes() + model_.bytes() + (scales_.empty() ? 0 : all_amaxes().bytes()) +
         (teacher_ != nullptr ? teacher_->params.values().bytes() + teacher_->params.narrow_bytes() : 0);
}

template <class F>
void Trainer::phase(const char* name, double bytes, F&& body) {
  const auto start = Clock::now();
  body();
  if (!options_.profile) return;
  device_->wait();
  const double taken = std::chrono::duration<double>(Clock::now() - start).count();
  add_cost(phases_, OpCost{name, 1, taken, 0, bytes});
}

namespace {

// A table: ms a step, share of all, calls a step, GFLOP/s, GB/s, dearest first. workers: threads that ran ops side by
// side, each taking its own time; steps: how many the costs are of.
std::string format_profile(std::vector<OpCost> costs, int64_t workers, int64_t steps) {
  OpCost all{"all"};
  for (const OpCost& cost : costs) all += cost;
  std::stable_sort(costs.begin(), costs.end(), [](const OpCost& a, const OpCost& b) { return a.seconds > b.seconds; });
  costs.push_back(all);
  std::vector<std::vector<std::string>> table = {{"op", "ms/step", "share", "calls/step", "GFLOP/s", "GB/s"}};
  const double parallel = static_cast<double>(workers), n = static_cast<double>(steps);
  for (const OpCost& cost : costs) {
    const double seconds = cost.seconds / parallel;
    const auto rate = [&](double amount) {
      return amount > 0 && seconds > 0 ? format_number("%.1f", amount / seconds * 1e-9) : "";
    };
    table.push_back({cost.op, format_number("%.3f", seconds / n * 1e3),
                     format_number("%.1f%%", all.seconds > 0 ? 100 * cost.seconds / all.seconds : 0),
                     format_number("%.0f", static_cast<double>(cost.calls) / n), rate(cost.flops), rate(cost.bytes)});
  }
  return format_table(table) +
         "GFLOP/s: two per multiply-add, the backward as two forwards. GB/s: every tensor that an op names, once.\n";
}

}  // namespace

std::string Trainer::profile() const {
  if (!options_.profile || profiled_ == 0) return "";
  // Lanes run side by side and each takes its own time.
  const int64_t workers = std::min<int64_t>(model_.layout().lanes, omp_get_max_threads());
  std::vector<OpCost> costs = model_.costs();
  for (OpCost cost : phases_) {
    cost.seconds *= static_cast<double>(workers);
    costs.push_back(cost);
  }
  return format_profile(std::move(costs), workers, profiled_);
}

}  // namespace crossply
