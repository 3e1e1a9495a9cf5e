#include "train/initial.h"

#include <cstdio>

#include "models/checkpoint.h"
#include "models/model.h"
#include "models/registry.h"

namespace crossply {
namespace {

// The files of a model directory that are not ours to understand: they belong to the model wherever it goes.
std::map<std::string, std::string> read_carried_files(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
        "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"}) {
    const std::string path = dir + "/" + name;
    if (path_exists(path)) files[name] = read_file(path, uint64_t{1} << 30);
  }
  return files;
}

InitialModel read_initial(const std::string& dir) {
  return {load_config(dir + "/config.json"), Tokenizer::load(dir), read_carried_files(dir)};
}

// The same architecture: the note says what is taken of it.
void note_start(const TrainOptions& o) {
  const int64_t taken = o.config.num_hidden_layers, all = o.initial.config.num_hidden_layers;
  const std::string part = taken < all ? str(", the first ", taken, " of its ", all, " blocks") : "";
  std::fprintf(stderr, "note: starting from the weights of %s, a %s%s\n", o.init.c_str(), o.config.arch.c_str(),
               part.c_str());
}

// What --init's model becomes: its own architecture, or from a plain LLaMA one that can start as it.
void choose_architecture(TrainOptions& o, const Config& asked) {
  Config& c = o.config;
  const std::string from = c.arch;
  if (from == asked.arch) {
    if (!o.given_options.empty())
      fail(Exit::usage, "--init takes the options from its config.json; leave out ", o.given_options.front());
    note_start(o);
    return;
  }
  if (from != "llama")
    fail(Exit::usage, "--init ", o.init, " holds a ", from, ", not a ", asked.arch,
         "; only a llama can become another architecture");
  c.arch = asked.arch;
  c.options = asked.options;
  c.check(Exit::usage, "flags");
  ParameterTable params;
  declare_model(params, c);
  const std::string remark = find_architecture(c.arch).make(c)->start_as_llama(params, c);
  std::fprintf(stderr, "note: %s starts as the llama of %s%s%s\n", c.arch.c_str(), o.init.c_str(),
               remark.empty() ? "" : ": ", remark.c_str());
}

}  // namespace

void take_initial(TrainOptions& o, bool started) {
  const std::string newest = started ? newest_valid_checkpoint(o.out) : "";
  if (!newest.empty()) {
    o.initial = read_initial(newest);
    return;
  }
  o.initial = read_initial(ModelDir(o.init).path());
  if (started) return;
  const Config asked = o.config;
  const bool fewer = o.given_sizes == std::vector<std::string>{"--layers"};
  if (!o.given_sizes.empty() && !fewer)
    fail(Exit::usage, "--init takes the sizes from its config.json; leave out ",
         o.given_sizes[o.given_sizes[0] == "--layers" ? 1 : 0]);
  o.config = o.initial.config;
  if (fewer && (asked.num_hidden_layers < 1 || asked.num_hidden_layers > o.config.num_hidden_layers))
    fail(Exit::usage, "--layers ", asked.num_hidden_layers, ": --init ", o.init, " has ", o.config.num_hidden_layers,
         " blocks, of which the first so many can be taken");
  if (fewer) o.config.num_hidden_layers = asked.num_hidden_layers;
  choose_architecture(o, asked);
}

}  // namespace crossply
