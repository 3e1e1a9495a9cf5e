// average: the mean of some checkpoints of a run, as a model of its own.
//
//   average --model RUN --last 5 --out DIR                            its newest five
//   average --model RUN --steps 800,900,1000 --out DIR                those of these steps
//   average --model RUN --steps 800,900 --weights 1,2 --out DIR       in these shares
//
// Each weight is sum(c_i w_i) / sum(c_i) over the checkpoints, in double, by ascending step, rounded to fp32 once. So
// the order in which they are named changes nothing, and a mean of equal numbers is that number.
//
// Where the learning rate stays up, late weights move about a place of lower loss, and their mean is nearer to it
// (Izmailov et al., arXiv 1803.05407). Of a run whose rate fell to nothing there is little to gain. What a run does
// after a mean is not defined: it has no moments, so that training goes on from it by --init, as from any model.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/new_directory.h"
#include "engine/io/printable.h"
#include "engine/split.h"
#include "kernels/devices.h"
#include "models/disk/model_dir.h"
#include "models/model.h"
#include "train/run/inputs.h"
#include "train/run/run_dir.h"
#include "train/step/saved_model.h"

using namespace crossply;
using nlohmann::json;

namespace {

struct Options {
  std::string model, steps, weights, out;
  std::optional<int> last;
};

struct Part {
  int64_t step;
  double share;
  std::string dir;
};

// The numbers between commas.
template <class T>
std::vector<T> parse_numbers(const char* flag, const std::string& text) {
  std::vector<T> numbers;
  if (text.empty()) return numbers;
  for (const std::string& word : split_commas(text)) {
    T number{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc() || end != word.data() + word.size() || !(number > 0) || !std::isfinite(1.0 * number))
      fail(Exit::usage, flag, ": '", excerpt(word), "' is no number above 0");
    numbers.push_back(number);
  }
  return numbers;
}

// The parts by ascending step; their shares have the sum 1.
std::vector<Part> choose_parts(const Options& o) {
  if (path_exists(o.model + "/config.json"))
    fail(Exit::usage, "--model ", o.model, " is one model; give a run directory, in which there are checkpoints ",
         "(step_*)");
  std::vector<int64_t> there = checkpoint_steps(o.model);
  std::ranges::reverse(there);
  std::vector<int64_t> steps = parse_numbers<int64_t>("--steps", o.steps);
  if (o.last && *o.last > std::ssize(there))
    fail(Exit::usage, "--last ", *o.last, ": ", o.model, " has ", there.size(), " checkpoints, of the steps ",
         list_of(there), "; a larger --keep in training leaves more");
  if (o.last) steps.assign(there.end() - *o.last, there.end());
  std::vector<double> shares = parse_numbers<double>("--weights", o.weights);
  if (shares.empty()) shares.assign(steps.size(), 1);
  if (shares.size() != steps.size())
    fail(Exit::usage, "--weights has ", shares.size(), " numbers for ", steps.size(), " checkpoints");
  std::vector<Part> parts;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!std::ranges::binary_search(there, steps[i]))
      fail(Exit::usage, "--steps: ", o.model, " has no checkpoint of step ", steps[i], "; it has those of ",
           list_of(there));
    parts.push_back({steps[i], shares[i], step_dir(o.model, steps[i])});
  }
  std::ranges::sort(parts, {}, &Part::step);
  const auto twice = std::ranges::adjacent_find(parts, {}, &Part::step);
  if (twice != parts.end()) fail(Exit::usage, "--steps has ", twice->step, " twice; --weights makes it count more");
  return parts;
}

// Adds the share of one checkpoint's weights to the sums, which are by row.
void add_checkpoint(const Part& part, const Config& config, ParameterTable& params,
                    std::vector<std::vector<double>>& sums) {
  refuse_other_config(load_model_config(part.dir), config, part.dir + "/config.json", "--model");
  load_weights(part.dir, config, params);
  size_t row = 0;
  for (const Parameter& parameter : params.rows()) {
    const std::vector<float> values = params.read(parameter.value);
    std::vector<double>& sum = sums[row++];
    sum.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) sum[i] += part.share * static_cast<double>(values[i]);
  }
}

// What the mean is of; and the data of the run, so that evaluate takes the part that training did not see.
void describe_origin(const Options& o, const std::vector<Part>& parts, std::map<std::string, std::string>& files) {
  json origin = {{"mean_of", json::array()}};
  for (const Part& part : parts)
    origin["mean_of"].push_back({{"run", o.model}, {"step", part.step}, {"weight", part.share}});
  files["average.json"] = json_text(origin, 2) + "\n";
  const std::string state = parts.back().dir + "/train_state.json";
  if (!path_exists(state)) return;
  files["train_state.json"] =
      json_text(json{{"trajectory", read_json(state).value("trajectory", json::object())}}, 2) + "\n";
}

Exit run(const Options& o) {
  require_new_directory(o.out);
  const std::vector<Part> parts = choose_parts(o);
  std::vector<ModelDir> held;  // by a training run beside this none of them is removed
  for (const Part& part : parts) held.emplace_back(part.dir), check_manifest(part.dir);
  TrainPlan plan;
  plan.config = load_model_config(parts.back().dir);
  plan.carried = read_carried_files(parts.back().dir);
  describe_origin(o, parts, plan.carried);
  const auto device = make_device("cpu", "fp32");
  ParameterTable params;
  declare_model(params, plan.config);
  params.allocate(*device, Dtype::f32, /*with_gradients=*/false);
  std::vector<std::vector<double>> sums(params.rows().size());
  double shares = 0;
  for (const Part& part : parts) add_checkpoint(part, plan.config, params, sums), shares += part.share;
  size_t row = 0;
  for (const Parameter& parameter : params.rows()) {
    std::vector<double>& sum = sums[row++];
    for (double& value : sum) value /= shares;
    params.write(parameter, sum.data());
  }
  require_finite(params, values_of(params, plan.config), Exit::bad_data);
  CheckpointWriter writer;
  writer.begin(o.out);
  write_model(writer, plan, {}, params, Tokenizer::load(parts.back().dir));
  writer.commit({}, [&] { require_new_directory(o.out); });
  std::vector<int64_t> steps;
  for (const Part& part : parts) steps.push_back(part.step);
  std::printf("%s\n", printable(wrap(str("wrote ", o.out, ", the ", o.weights.empty() ? "" : "weighted ", "mean of ",
                                         o.model, " after the steps ", list_of(steps)),
                                     78, 2))
                          .c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("Makes a model directory with the mean weights of some checkpoints of a run.", "average");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "RUN", "run directory with the checkpoints").required();
    const Flag last = add_integer(app, "--last", o.last, 1, 1 << 30, "the newest so many checkpoints");
    add_text(app, "--steps", o.steps, "LIST", "those of these steps: 800,900,1000").excludes(last);
    needs(app, add_text(app, "--weights", o.weights, "LIST", "shares, in the order of --steps (each the same)"),
          {{"--steps"}});
    add_text(app, "--out", o.out, "DIR", "model directory to make; nothing is overwritten").required();
  };
  return run_program(app, argc, argv, flags, [&] {
    if (!o.last && o.steps.empty()) fail(Exit::usage, "--last or --steps is required: which checkpoints?");
    return run(o);
  });
}
