// generate: continues a prompt, token by token, with a key/value cache.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "cli/program.h"
#include "cli/standard_streams.h"
#include "data/tokenizer.h"
#include "engine/printable.h"
#include "engine/rng.h"
#include "eval/decode.h"
#include "eval/loaded_model.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, prompt, device = "cpu";
  int64_t max_new = 256, top_k = 0;
  double temperature = 0;
  uint64_t seed = 42;
};

// Softmax over logits / temperature, restricted to the top_k most likely tokens (0: all).
int32_t sample(const float* logits, int64_t V, const Options& o, Random& random) {
  std::vector<int32_t> order(static_cast<size_t>(V));
  std::iota(order.begin(), order.end(), 0);
  const int64_t k = o.top_k > 0 ? std::min(o.top_k, V) : V;
  std::partial_sort(order.begin(), order.begin() + k, order.end(),
                    [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  order.resize(static_cast<size_t>(k));
  std::vector<double> weight(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    weight[i] =
        std::exp((static_cast<double>(logits[order[i]]) - static_cast<double>(logits[order[0]])) / o.temperature);
  double left = random.uniform() * std::accumulate(weight.begin(), weight.end(), 0.0);
  for (size_t i = 0; i < order.size(); ++i)
    if ((left -= weight[i]) < 0) return order[i];
  return order.back();
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const Tokenizer tokenizer = Tokenizer::load(model.dir);
  if (tokenizer.is_foreign())
    std::fprintf(stderr, "note: %s has %s: the prompt is token ids, and so is what follows\n", o.model.c_str(),
                 tokenizer.describe().c_str());
  const std::vector<int32_t> prompt = tokenizer.encode(o.prompt);
  if (prompt.empty()) fail(Exit::usage, "--prompt is empty; the model needs at least one token to continue");
  for (const int32_t token : prompt)
    if (token < 0 || token >= model.config.vocab_size)
      fail(Exit::usage, "--prompt: token ", token, " is outside the vocabulary of ", model.config.vocab_size);
  const int64_t longest = model.config.max_position_embeddings, used = static_cast<int64_t>(prompt.size());
  if (used > longest) fail(Exit::usage, "--prompt has ", used, " tokens, the model's longest sequence is ", longest);
  const int64_t length = std::min(used + std::min(o.max_new, longest), longest);
  Decoder decoder(*model.device, model.params, model.config, 1, length);
  Random random(o.seed, stream_of("generate"));
  const Sampler sampler = [&](const float* logits, int64_t V) {
    return o.temperature > 0 ? sample(logits, V, o, random) : most_likely(logits, V);
  };
  std::printf("%s", o.prompt.c_str());
  Printable terminal;
  auto show = [&](size_t, int32_t token) {
    if (token != tokenizer.eos())
      std::printf("%s%s", tokenizer.separator(), terminal.add(tokenizer.decode({token})).c_str());
    flush_standard_output();
    return true;
  };
  const auto written = generate(decoder, {prompt}, o.max_new, tokenizer.eos(), sampler, show)[0];
  std::printf("%s\n", terminal.finish().c_str());
  if (std::ssize(written) < o.max_new && written.back() != tokenizer.eos())
    std::fprintf(stderr, "note: ended at the model's longest sequence, %lld tokens\n", static_cast<long long>(longest));
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Continues a prompt. Greedy unless --temperature is given.", "generate");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory")->required();
    add_text(app, "--prompt", o.prompt, "TEXT", "the model's own words or bytes; with any other tokenizer, token ids")
        ->required();
    add_integer(app, "--max-new", o.max_new, 1, most_size, "most tokens to write");
    add_number(app, "--temperature", o.temperature, 0, most_number, "0: the most likely token");
    add_integer(app, "--top-k", o.top_k, 0, most_size, "sample among the k most likely (0: all)");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of the sampling");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
