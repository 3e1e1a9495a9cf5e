// gradients: the loss and the gradient of every parameter for given tokens, so that anyone can check crossply against
// another implementation.
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <vector>

#include "data/shards.h"
#include "eval/loaded_model.h"
#include "eval/loss.h"
#include "models/model_dir.h"
#include "train/program.h"

using namespace crossply;

namespace {

// The first `count` tokens: whitespace-separated integers, or a token shard (*.bin).
std::vector<int32_t> read_tokens(const std::string& path, int64_t count, int64_t vocab) {
  std::vector<int32_t> tokens;
  if (path.ends_with(".bin")) {
    tokens = read_shard(path, count);
  } else {
    errno = 0;
    std::ifstream file(path);  // also a pipe
    if (!file && errno != ENOENT && errno != ENOTDIR) fail_io("open", path, errno);
    if (!file) fail(Exit::no_input, path, ": cannot open: check the path");
    for (std::string word; static_cast<int64_t>(tokens.size()) < count && file >> word;) {
      int64_t value = -1;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (error != std::errc() || end != word.data() + word.size())
        fail(Exit::bad_data, path, ": '", word.substr(0, 40), "' is not an integer");
      if (value < 0 || value >= vocab)
        fail(Exit::bad_data, path, ": token ", value, " is outside the vocabulary of ", vocab);
      tokens.push_back(static_cast<int32_t>(value));
    }
    if (file.bad()) fail_io("read", path, errno);
  }
  if (static_cast<int64_t>(tokens.size()) < count)
    fail(Exit::bad_data, path, ": ", tokens.size(), " tokens, --batch times --seq plus 1 is ", count);
  for (const int32_t token : tokens)
    if (token < 0 || token >= vocab)
      fail(Exit::bad_data, path, ": token ", token, " is outside the vocabulary of ", vocab);
  return tokens;
}

struct Options {
  std::string model, tokens, out, device = "cpu", plan = "reuse", dtype = "fp32", matmul = "fp32";
  int64_t batch = 1, seq = 0;
};

// Gradients replace gradients, which the metadata tells from weights; any other file stays.
const std::map<std::string, std::string> written_by_us = {{"crossply", "gradients"}};

void check_replaceable(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored) || std::filesystem::is_empty(path, ignored)) return;
  bool ours = false;
  try {
    const auto metadata = SafetensorsFile(path).metadata();
    const auto found = metadata.find("crossply");
    ours = found != metadata.end() && found->second == "gradients";
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  if (!ours)
    fail(Exit::usage, "--out ", path,
         " exists and was not written by this program; move it away or choose another name");
}

Exit run(const Options& o) {
  int64_t count = 0;
  constexpr int64_t most = int64_t{1} << 40;
  if (__builtin_mul_overflow(o.batch, o.seq, &count) || count > most)
    fail(Exit::usage, "--batch ", o.batch, " x --seq ", o.seq, " is beyond anything a machine can do");
  check_replaceable(o.out);
  LoadedModel model(o.model, o.device, true, o.matmul);
  const std::vector<int32_t> tokens = read_tokens(o.tokens, count + 1, model.config.vocab_size);
  const bool narrow = o.dtype == "bf16";
  if (narrow && model.params.dtype() != Dtype::f32) fail(Exit::usage, "--device ", o.device, " has no bf16");
  if (narrow) model.params.allocate_narrow();
  model.params.refresh_narrow();
  Tape tape(narrow ? Dtype::bf16 : model.params.dtype());
  const Graph graph = record_model(tape, model.params, model.config, o.batch, o.seq);
  tape.differentiate();
  tape.plan(plan_mode(o.plan));
  tape.allocate(*model.device);
  load_batch(*model.device, graph, tokens.data(), tokens.data() + 1);
  const Step step{true, 1 / static_cast<double>(count), 0};
  tape.forward(step);
  const double loss = sum_losses(*model.device, graph) * step.grad_scale;
  tape.backward(step);
  std::printf("loss %.12g\n", loss);
  if (!std::isfinite(loss)) fail(Exit::not_finite, "the loss is not finite; no gradients written");
  save_tensors(o.out, model.params, {{"", model.params.gradients()}}, written_by_us);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "One forward and backward over the first B*T+1 tokens of a file: prints the mean loss and writes the fp32\n"
      "gradient of every parameter, under the parameter's name.",
      "gradients");
  Options o;
  auto flags = [&] {
    app.add_option("--model", o.model, "model or run directory")->required();
    app.add_option("--tokens", o.tokens, "whitespace-separated integers, or a token shard (*.bin)")->required();
    app.add_option("--batch", o.batch, "B, sequences")->check(integer_from(1))->capture_default_str();
    app.add_option("--seq", o.seq, "T, tokens per sequence")->check(integer_from(1))->required();
    app.add_option("--out", o.out, "safetensors file to write; replaces only gradients")->required();
    app.add_option("--device", o.device, "cpu, cuda, or reference (plain loops in double)")->capture_default_str();
    app.add_option("--dtype", o.dtype, "of activations and products: fp32 or bf16")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
    app.add_option("--matmul", o.matmul, "products of --dtype fp32: fp32 or bf16x3")
        ->check(CLI::IsMember({"fp32", "bf16x3"}))
        ->capture_default_str();
    app.add_option("--plan", o.plan, "memory plan: reuse, distinct or poison")
        ->check(CLI::IsMember({"reuse", "distinct", "poison"}))
        ->capture_default_str();
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
