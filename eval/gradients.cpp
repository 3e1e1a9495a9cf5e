// gradients: the loss and the gradient of every parameter for given tokens, so that anyone can check crossply against
// another implementation.
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <vector>

#include "cli/needs.h"
#include "cli/program.h"
#include "data/document_marks.h"
#include "data/documents.h"
#include "data/foreign_format.h"
#include "data/shards.h"
#include "engine/io/file.h"
#include "engine/numbers.h"
#include "eval/loaded_model.h"
#include "eval/own_tensors.h"
#include "kernels/optim/optimizer.h"
#include "models/batch/batch_model.h"
#include "models/disk/model_dir.h"

using namespace crossply;

namespace {

// One file, which is no longer than a document may be.
std::vector<int32_t> read_text(const std::string& path, int64_t count, const Tokenizer& tokenizer) {
  if (!tokenizer.knows_texts())
    fail(Exit::usage, "--tokens text:", path, " needs the model's tokenizer: --tokenizer FILE, or token ids in a file");
  std::vector<Document> documents(1);
  documents[0].file = path, documents[0].text = read_file(path, max_document_bytes);
  encode_documents(documents, tokenizer, -1);
  std::vector<int32_t>& ids = documents[0].ids;
  ids.resize(std::min(ids.size(), static_cast<size_t>(count)));
  return ids;
}

// The first `count` tokens: whitespace-separated integers, a token shard (*.bin), or text as the model's tokens.
std::vector<int32_t> read_tokens(const std::string& path, int64_t count, const LoadedModel& model,
                                 const std::string& tokenizer) {
  std::vector<int32_t> tokens;
  const int64_t vocab = model.config.vocab_size;
  const DataSpec spec = parse_data_spec(path);
  if (spec.kind == DataSpec::Kind::shards) {
    tokens = read_shard(path, count);
  } else if (spec.kind == DataSpec::Kind::text) {
    tokens = read_text(spec.path, count, model_tokenizer(model, tokenizer));
  } else {
    std::ifstream file;  // also a pipe, whose writer may let it wait
    uninterrupted([&] {
      errno = 0;
      file.clear();
      file.open(path);
      return file ? 0 : -1;
    });
    if (!file && errno != ENOENT && errno != ENOTDIR) fail_io("open", path, errno);
    if (!file) fail(Exit::no_input, path, ": cannot open: check the path");
    if (const std::string format = foreign_format_of(path); !format.empty()) fail(Exit::bad_data, path, ": ", format);
    for (std::string word; static_cast<int64_t>(tokens.size()) < count && file >> word;) {
      if (tokens.empty() && word.starts_with("\ufeff")) word.erase(0, 3);  // a byte order mark
      if (word.empty()) continue;
      const auto value = parse_integer(word);
      if (!value) fail(Exit::bad_data, path, ": '", word.substr(0, 40), "' is not an integer");
      if (*value < 0 || *value >= vocab)
        fail(Exit::bad_data, path, ": token ", *value, " is outside the vocabulary of ", vocab);
      tokens.push_back(static_cast<int32_t>(*value));
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
  std::string model, tokenizer, tokens, out, device = "cpu", plan = "reuse", dtype = "fp32", matmul = "fp32";
  int64_t batch = 1, seq_len = 0, eot = -1;
  std::string documents = "none";
};

DocumentMark mark_of(const Options& o, const LoadedModel& model, const std::vector<int32_t>& tokens) {
  if (o.documents == "none") return {};
  const int64_t eot = o.eot >= 0 ? o.eot : model_tokenizer(model, o.tokenizer).eos();
  if (eot < 0)
    fail(Exit::usage, "--documents ", o.documents, ": ", o.model, " has no end-of-text token; give --eot ID");
  return {static_cast<int32_t>(eot), begin_with_eot(o.documents, tokens[0], eot)};
}

// Gradients replace gradients; any other file stays.
const std::string kind = "gradients";

Exit run(const Options& o) {
  if (o.matmul == "bf16x3" && o.dtype == "bf16")
    fail(Exit::usage, "--matmul bf16x3 is for --dtype fp32; --dtype bf16 multiplies in bf16 anyway");
  check_batch(o.batch, 1, o.seq_len);
  check_replaceable_tensors("--out", o.out, kind);
  const int64_t count = o.batch * o.seq_len;
  LoadedModel model(o.model, o.device, true, o.matmul);
  const std::vector<int32_t> tokens = read_tokens(o.tokens, count + 1, model, o.tokenizer);
  const bool in_bf16 = o.dtype == "bf16";
  if (in_bf16 && model.params.dtype() != Dtype::f32) fail(Exit::usage, "--device ", o.device, " has no bf16");
  if (in_bf16) model.params.allocate_bf16_copy();
  refresh_bf16_copy(model.params);
  Tape tape(in_bf16 ? Dtype::bf16 : model.params.dtype());
  const Graph graph =
      record_model(tape, model.params, model.config, o.batch, o.seq_len, {.documents = mark_of(o, model, tokens)});
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
  const std::vector<NamedTensor> gradients = gradients_of(model.params, model.config);
  require_finite(model.params, gradients, Exit::not_finite);
  save_tensors(o.out, model.params, gradients, kind_of_tensors(kind));
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app(
      "One forward and backward over the first B*T+1 tokens of a file: prints the mean loss and writes the fp32 "
      "gradient of every parameter, under the parameter's name.",
      "gradients");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory").required();
    add_text(app, "--tokens", o.tokens, "FILE", "whitespace-separated integers, a token shard (*.bin), or text:FILE")
        .required();
    needs(app,
          add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json of a model that has none, for text:FILE"),
          {{"--tokens", {"text:*"}}});
    add_integer(app, "--batch", o.batch, 1, max_size, "B, sequences");
    add_integer(app, "--seq", o.seq_len, 1, max_size, "T, tokens per sequence").required().default_str("");
    add_choice(app, "--documents", o.documents, document_marks,
               "tokens attend within their document, which begins after or before the token --eot; auto: before where "
               "the file begins with it");
    needs(app,
          add_integer(app, "--eot", o.eot, -1, std::numeric_limits<int32_t>::max(),
                      "id of the token between documents (-1: the tokenizer's)"),
          {{"--documents", {"auto", "after", "before"}}});
    add_text(app, "--out", o.out, "FILE", "safetensors file to write; replaces only gradients").required();
    add_text(app, "--device", o.device, "NAME", "cpu, cuda, or reference (plain loops in double)");
    add_choice(app, "--dtype", o.dtype, {"fp32", "bf16"}, "of activations and products: fp32 or bf16");
    add_choice(app, "--matmul", o.matmul, {"fp32", "bf16x3"}, "products of --dtype fp32: fp32 or bf16x3");
    add_choice(app, "--plan", o.plan, plan_modes, "memory plan; all give the same numbers").group(hidden_group);
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
