// Combinations. Four things can be owned, each by one part at most; what no part owns is the plain backbone's:
//
//   the stream              what flows between sublayers: read, write, finish, hidden
//   own q, k, v             project
//   keys and values read    kv, after project, norms and rotation
//   attention               attend, which asks kv for keys and values
//
// Nobody declares what it owns. A part is recorded alone, and again with one of the four things done by the plain
// backbone: it owns what changes the tape. So ownership follows the options, and a new connection combines without a
// word. Of the numbers that an op has beside its tensors it sees Node::setting().
#include "models/combined.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "engine/io/printable.h"
#include "models/gpt2.h"
#include "models/llama.h"
#include "models/model.h"

namespace crossply {

class Combined : public Connection {
 public:
  enum Thing { the_stream, the_projections, the_choice, the_attention };
  static constexpr size_t things = 4;
  // Which values are copied, because one part keeps what another one writes over.
  struct Copies {
    bool embeddings = false;
    std::set<int> keys = {}, values = {};  // layers
  };
  struct Part {
    std::string name;
    Config config;
    std::unique_ptr<Connection> connection;
    bool reads_stream = false;  // in one of its other hooks
    bool idle = false;          // owns nothing
  };
  // owners: of each thing the place of a part in the list.
  using Owners = std::array<size_t, things>;

  Combined(std::vector<Part> parts, const Owners& owners, Copies copies)
      : parts_(std::move(parts)), owners_(owners), copies_(std::move(copies)) {
    for (const Part& part : parts_) part.connection->asks_ = this;
  }

  // Those who remove rows come last, so that nobody misses one.
  void declare(ParameterTable& params, const Config&) const override {
    for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) part->connection->declare(params, part->config);
  }
  void all_declared(ParameterTable& params) const override {
    for (const Part& part : parts_) part.connection->all_declared(params);
  }
  std::string start_as_plain(ParameterTable& params, const Config& c) const override {
    return start_beside(c.backbone, params, c);
  }
  std::string remark(const Config&) const override {
    std::string all;
    const auto add = [&](const std::string& one) { all += (all.empty() || one.empty() ? "" : "\n") + one; };
    for (const Part& part : parts_) {
      const std::string own = part.connection->remark(part.config);
      add(own);
      if (own.empty() && part.idle) add(str("note: with these options ", part.name, " computes nothing of its own"));
    }
    add(starts_of_two());
    return all;
  }

  void begin(const Build& build, Value* embeddings) override {
    Connection::begin(build, embeddings);
    x_ = nullptr;  // which is the owner's
    Value* others = copies_.embeddings ? ops::copy(build.tape, "embeddings.copy", embeddings) : embeddings;
    builds_.clear();
    for (const Part& part : parts_)
      builds_.push_back(
          std::make_unique<Build>(Build{build.tape, build.params, part.config, build.B, build.T, build.tokens,
                                        build.documents, build.names, build.rope, part.name}));
    for (size_t i = 0; i < parts_.size(); ++i) {
      const bool owner = i == owners_[the_stream];
      parts_[i].connection->begin(*builds_[i], owner ? embeddings : others);
      if (!owner) parts_[i].connection->x_ = nullptr;  // only an owner's write() moves it
    }
  }
  Value* read(const Sublayer& sublayer) override {
    for (size_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].reads_stream && i != owners_[the_stream]) parts_[i].connection->x_ = stream_for(parts_[i]);
    return of(the_stream).read(sublayer);
  }
  void offer(const Sublayer& sublayer, Value* x) override {
    for (const Part& part : parts_) part.connection->offer(sublayer, x);
  }
  QueryKeyValue project(int layer, Value* x) override { return of(the_projections).project(layer, x); }
  KeyValue kv(int layer, KeyValue own) override {
    ++asked_;
    if (copies_.keys.contains(layer)) own.k = ops::copy(build_->tape, str("L", layer, ".own_k"), own.k);
    if (copies_.values.contains(layer)) own.v = ops::copy(build_->tape, str("L", layer, ".own_v"), own.v);
    if (own.k != nullptr) build_->mark("given_key", layer, own.k);
    const KeyValue chosen = of(the_choice).kv(layer, own);
    if (chosen.k == nullptr || chosen.v == nullptr)
      fail(Exit::usage, "layer ", layer, " has no keys and values of its own, and nobody gives it others");
    return chosen;
  }
  Value* attend(int layer, QueryKeyValue own) override {
    const size_t attends = owners_[the_attention];
    if (own.k == nullptr && attends + 1 < parts_.size() && attends != owners_[the_projections])
      fail(Exit::usage, parts_[attends].name, " reads a layer's own keys and values, and ",
           parts_[owners_[the_projections]].name, " leaves layer ", layer, " none");
    return of(the_attention).attend(layer, own);
  }
  void write(const Sublayer& sublayer, Value* y) override { of(the_stream).write(sublayer, y); }
  Value* finish() override { return of(the_stream).finish(); }
  bool has_stream() const override { return of(the_stream).has_stream(); }
  int64_t streams() const override { return of(the_stream).streams(); }
  Value* stream() override { return of(the_stream).stream(); }
  void set_stream(Value* x) override { of(the_stream).set_stream(x); }
  Value* hidden() override { return of(the_stream).hidden(); }

  int64_t asked() const { return asked_; }
  // For trials: what parts who do not own the stream are given in its place.
  void stand_in(Value* x) { stand_in_ = x; }

 private:
  // (B, T, C)
  Value* stream_for(const Part& part) const {
    if (stand_in_ != nullptr) return stand_in_;
    Value* one = of(the_stream).has_stream() ? of(the_stream).stream() : nullptr;
    if (one == nullptr || one->shape.rank != 3)
      fail(Exit::usage, part.name, " makes keys and values of the stream, and ", parts_[owners_[the_stream]].name,
           " has none or several");
    return one;
  }
  Connection& of(Thing thing) const { return *parts_[owners_[thing]].connection; }
  std::string starts_of_two() const;

  std::vector<Part> parts_;  // the last one is the plain backbone
  Owners owners_;
  Copies copies_;
  std::vector<std::unique_ptr<Build>> builds_;  // of each part
  Value* stand_in_ = nullptr;
  int64_t asked_ = 0;  // for keys and values
};

namespace {

using enum Combined::Thing;
using Part = Combined::Part;
using Copies = Combined::Copies;
constexpr size_t things = Combined::things;
constexpr const char* thing_words[things] = {owned_stream, owned_heads, owned_choice, owned_attention};

// Without what all architectures can have beside their connection.
Config bare(Config config) {
  config.engram = {}, config.loop = {}, config.block_norm = "pre";
  return config;
}
Config plain_config(Config config) {
  config.arch = config.backbone;
  config.options.clear();
  return bare(config);
}

// The parts by these names, and the plain backbone behind them.
std::vector<Part> make_parts(const Config& config, const std::vector<std::string>& names) {
  std::vector<Part> parts;
  for (const std::string& name : names) {
    Config own = part_config(config, name);
    std::unique_ptr<Connection> connection = find_architecture(name).make(own);
    parts.push_back({name, std::move(own), std::move(connection)});
  }
  parts.push_back({config.backbone, plain_config(config), std::make_unique<Connection>()});
  return parts;
}

// The combination of some of its parts.
Config of_parts(const Config& whole, const std::vector<std::string>& names) {
  Config some = whole;
  some.arch = joined_names(names, "+");
  some.options.clear();
  for (const std::string& name : names)
    for (const auto& [key, value] : part_config(whole, name).options)
      some.options[option_key(some.arch, name, key)] = value;
  return some;
}

// A model that is recorded to see what its parts do: no numbers, so no memory.
class Trial {
 public:
  Trial(std::vector<Part> parts, const Combined::Owners& owners, const Copies& copies, bool stand_in = false)
      : config_(parts.back().config), connection_(std::move(parts), owners, copies) {
    try {
      record(stand_in);
    } catch (const Error& error) {
      error_ = error.what(), code_ = error.code;
    }
  }

  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }
  Exit code() const { return code_; }
  const Tape& tape() const { return tape_; }
  bool asks_in_every_layer() const { return connection_.asked() == config_.num_hidden_layers; }
  bool reads_stand_in() const { return stand_in_ != nullptr && is_read(stand_in_, nullptr); }

  // Does any node but this one read the value?
  bool is_read(const Value* value, const Node* but) const {
    return std::ranges::any_of(tape_.nodes(), [&](const auto& node) {
      return node.get() != but && std::ranges::count(node->in, value) + std::ranges::count(node->reads, value) > 0;
    });
  }

  // Each node with what it reads and makes.
  std::vector<std::string> nodes() const {
    std::unordered_map<const Value*, size_t> place;
    for (const Value& value : tape_.values()) place.emplace(&value, place.size());
    std::vector<std::string> lines;
    for (const auto& node : tape_.nodes()) {
      std::string line = str(node->op(), " ", node->name, " ", node->flops(), " ", node->setting());
      for (const auto* list : {&node->in, &node->reads, &node->out}) {
        line += " |";
        for (const Value* value : *list)
          line += value == nullptr ? " -" : str(" ", place.at(value), value->shape.str());
      }
      lines.push_back(line);
    }
    return lines;
  }

 private:
  void record(bool stand_in) {
    constexpr int64_t B = 1, T = 2;
    declare_applications(params_, config_);
    connection_.declare(params_, config_);
    Build b{tape_, params_, config_, B, T, tape_.input("tokens", Shape{B, T}, Dtype::i32)};
    if (!config_.gpt2()) b.rope = ops::rope_positions(tape_, T, config_.rope_frequencies(), config_.rope_factor());
    Value* x = ops::embedding(tape_, "embed", b.tokens, b.parameter("model.embed_tokens.weight"));
    if (stand_in) {
      stand_in_ = tape_.constant("stand_in", x->shape, std::vector<double>(static_cast<size_t>(x->shape.numel())));
      connection_.stand_in(stand_in_);
    }
    connection_.begin(b, x);
    for (int i = 0; i < config_.num_hidden_layers; ++i)
      config_.gpt2() ? record_gpt2_block(b, connection_, i) : record_llama_block(b, connection_, i);
    record_head(b, connection_.finish());
  }

  const Config config_;  // of the plain backbone
  ParameterTable params_;
  Tape tape_{Dtype::f32};
  Combined connection_;
  Value* stand_in_ = nullptr;
  std::string error_;
  Exit code_ = Exit::done;
};

// What a part does of the four things, at its options.
struct Owned {
  bool changes[things] = {};
  bool reads_stream = false, asks = false;
};

std::vector<Part> alone(const Config& config, const std::string& name) {
  std::vector<Part> parts = make_parts(config, {name});
  parts[0].reads_stream = true;  // where the stream is the plain one's, it is what the part's own would be
  return parts;
}

Owned owned_by(const Config& config, const std::string& name) {
  const Combined::Owners all{};
  const Trial whole(alone(config, name), all, {});
  if (whole.failed()) fail(Exit::usage, name, ": ", whole.error());
  Owned owned;
  owned.asks = whole.asks_in_every_layer();
  const auto nodes = whole.nodes();
  for (size_t thing = 0; thing < things; ++thing) {
    Combined::Owners but = all;
    but[thing] = 1;
    const Trial trial(alone(config, name), but, {});
    owned.changes[thing] = trial.failed() || trial.nodes() != nodes;
  }
  if (owned.changes[the_stream]) return owned;
  Combined::Owners but = all;
  but[the_stream] = 1;
  owned.reads_stream = Trial(alone(config, name), but, {}, /*stand_in=*/true).reads_stand_in();
  return owned;
}

// The parts that a combination has, in order, and who owns what.
struct Agreement {
  std::vector<std::string> names;
  std::vector<Owned> owned;
  Combined::Owners owners{};
  Copies copies;

  std::vector<Part> make(const Config& config) const {
    std::vector<Part> parts = make_parts(config, names);
    for (size_t i = 0; i < owned.size(); ++i) {
      parts[i].reads_stream = owned[i].reads_stream;
      parts[i].idle = is_idle(i);
    }
    return parts;
  }
  bool is_idle(size_t part) const { return std::ranges::count(owned[part].changes, true) == 0; }
};

// By the first thing that each owns; those that own nothing as they are registered.
void sort_parts(Agreement& all) {
  std::vector<std::array<ptrdiff_t, 3>> order;
  for (size_t i = 0; i < all.names.size(); ++i)
    order.push_back({std::ranges::find(all.owned[i].changes, true) - all.owned[i].changes,
                     std::ranges::find(architectures(), all.names[i], &Architecture::name) - architectures().begin(),
                     static_cast<ptrdiff_t>(i)});
  std::ranges::sort(order);
  Agreement sorted;
  for (const auto& [first, registered, i] : order)
    sorted.names.push_back(all.names[static_cast<size_t>(i)]),
        sorted.owned.push_back(all.owned[static_cast<size_t>(i)]);
  all = sorted;
}

void choose_owners(Agreement& all) {
  for (size_t thing = 0; thing < things; ++thing) {
    all.owners[thing] = all.names.size();
    for (size_t i = 0; i < all.names.size(); ++i) {
      if (!all.owned[i].changes[thing]) continue;
      if (all.owners[thing] < all.names.size())
        fail(Exit::usage, all.names[all.owners[thing]], " and ", all.names[i], " do not combine: both change ",
             thing_words[thing]);
      all.owners[thing] = i;
    }
  }
}

void refuse_equal_rows(const Config& config, const std::vector<std::string>& names) {
  std::map<std::string, std::string> owner;
  ParameterTable plain;
  declare_applications(plain, plain_config(config));
  for (const std::string& name : names) {
    ParameterTable own;
    declare_applications(own, bare(part_config(config, name)));
    for (const Parameter& row : own.rows()) {
      if (plain.contains(row.name)) continue;
      const auto [other, is_new] = owner.emplace(row.name, name);
      if (!is_new) fail(Exit::usage, other->second, " and ", name, " do not combine: both have the tensor ", row.name);
    }
  }
}

// Whoever chooses keys and values needs an attention that asks.
void refuse_deaf(const Agreement& all) {
  const size_t attends = all.owners[the_attention], chooses = all.owners[the_choice], plain = all.names.size();
  if (attends < plain && chooses < plain && attends != chooses && !all.owned[attends].asks)
    fail(Exit::usage, all.names[chooses], " and ", all.names[attends], " do not combine: ", all.names[attends],
         " attends to a layer's own keys and values, and nobody would read those that ", all.names[chooses],
         " chooses");
}

Agreement find_agreement(const Config& config);

// Where two of more parts do not combine, they alone are named.
void refuse_pairs_of(const Config& config, const std::vector<std::string>& names) {
  for (size_t i = 0; names.size() > 2 && i < names.size(); ++i)
    for (size_t j = i + 1; j < names.size(); ++j) find_agreement(of_parts(config, {names[i], names[j]}));
}

// Copies are made where without them a part reads what another one has written over.
void choose_copies(const Config& config, Agreement& all) {
  if (!Trial(all.make(config), all.owners, {}).failed()) return;
  Copies every{.embeddings = true};
  for (int i = 0; i < config.num_hidden_layers; ++i) every.keys.insert(i), every.values.insert(i);
  const Trial trial(all.make(config), all.owners, every);
  if (trial.failed()) {
    refuse_pairs_of(config, all.names);
    fail(Exit::usage, joined_names(all.names, " and "), " do not combine: ",
         trial.code() == Exit::usage ? trial.error()
                                     : "with these options one hands on what the other cannot take, such as the same "
                                       "values in several layers");
  }
  for (const auto& node : trial.tape().nodes()) {
    if (node->name == "embeddings.copy") all.copies.embeddings = trial.is_read(node->out[0], nullptr);
    for (const int i : every.keys) {
      const bool keys = node->name == str("L", i, ".own_k"), values = node->name == str("L", i, ".own_v");
      if (!(keys || values) || !trial.is_read(node->in[0], node.get())) continue;
      (keys ? all.copies.keys : all.copies.values).insert(i);
    }
  }
  if (Trial(all.make(config), all.owners, all.copies).failed()) all.copies = every;
}

// config: bare.
Agreement find_agreement(const Config& config) {
  Agreement all;
  all.names = parts_of(config.arch);
  refuse_equal_rows(config, all.names);
  for (const std::string& name : all.names) all.owned.push_back(owned_by(config, name));
  sort_parts(all);
  choose_owners(all);
  refuse_deaf(all);
  choose_copies(config, all);
  return all;
}

// All that parts may look at, of a bare configuration.
std::string key_of(const Config& c) {
  std::string key =
      str(c.arch, " ", c.backbone, " ", c.norm_eps, " ", c.qk_norm, c.qk_norm_eps, c.qkv_bias, c.bias,
          c.scale_attn_by_inverse_layer_idx, c.tie_word_embeddings, " ", c.sliding_window, c.window_pattern);
  for (const SizeKey& size : size_keys) key += str(" ", c.*size.value);
  for (const auto& [name, value] : c.options) key += str(" ", name, "=", value);
  return key;
}

// A model is made several times of one configuration.
Agreement agree(const Config& config) {
  static std::map<std::string, Agreement> known;
  static std::mutex one_at_a_time;
  if (has_loop(config)) fail(Exit::usage, config.arch, " takes no loop: one connection alone does");
  const Config alone = bare(config);
  const std::string key = key_of(alone);
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, find_agreement(alone)).first->second;
}

std::unique_ptr<Connection> make_combined(const Config& config) {
  const Agreement all = agree(config);
  return std::make_unique<Combined>(all.make(config), all.owners, all.copies);
}

}  // namespace

// Rows of the backbone whose start two parts say differently: the first part's counts, because it declares last.
std::string Combined::starts_of_two() const {
  ParameterTable plain;
  declare_applications(plain, parts_.back().config);
  std::map<std::string, std::pair<std::string, std::string>> taken;  // row: the part, and its rule
  std::map<std::string, std::vector<std::string>> lost;              // the two parts, in words: rows
  for (const Part& part : parts_) {
    ParameterTable own;
    declare_applications(own, bare(part.config));
    for (const Parameter& row : plain.rows()) {
      if (!own.contains(row.name) || own.at(row.name).init.rule == row.init.rule) continue;
      const std::string& rule = own.at(row.name).init.rule;
      const auto& first = taken.try_emplace(row.name, part.name, rule).first->second;
      if (first.second != rule) lost[str(first.first, " has it, not as ", part.name)].push_back(row.name);
    }
  }
  std::string all;
  for (const auto& [two, rows] : lost)
    all += str(all.empty() ? "" : "\n", "note: ", rows[0],
               rows.size() > 1 ? str(" and ", rows.size() - 1, " more") : "", " start as ", two);
  return all;
}

std::string joined_names(const std::vector<std::string>& names, const char* between) {
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : between) + name;
  return joined;
}

std::vector<std::string> parts_of(const std::string& arch) {
  std::vector<std::string> names(1);
  for (const char c : arch)
    if (c == '+') names.emplace_back();
    else names.back() += c;
  return names;
}

bool same_architecture(const std::string& a, const std::string& b) {
  std::vector<std::string> of_a = parts_of(a), of_b = parts_of(b);
  std::ranges::sort(of_a), std::ranges::sort(of_b);
  return of_a == of_b;
}

std::string option_key(const std::string& arch, const std::string& part, const std::string& key) {
  for (const std::string& other : parts_of(arch)) {
    if (other == part) continue;
    if (std::ranges::count(find_architecture(other).options, key, &Option::key) > 0) return part + "_" + key;
  }
  return key;
}

Config part_config(const Config& config, const std::string& part) {
  Config own = config;
  own.arch = part;
  own.options.clear();
  for (const Option& option : find_architecture(part).options)
    own.options[option.key] = config.options.at(option_key(config.arch, part, option.key));
  return own;
}

Architecture combined_architecture(const std::string& name, Exit code, const std::string& where) {
  const std::vector<std::string> names = parts_of(name);
  Architecture all{name, "", {}, make_combined};
  for (const std::string& part : names) {
    if (part.empty()) fail(code, where, ": ", excerpt(name), ": a name is missing beside '+', as in mhc+lime");
    const Architecture& one = find_architecture(part, code, where);
    if (is_plain(part)) fail(code, where, ": ", excerpt(name), ": ", part, " is the plain backbone; leave it out");
    if (std::ranges::count(names, part) > 1) fail(code, where, ": ", excerpt(name), " names ", part, " twice");
    all.meaning += (all.meaning.empty() ? "" : "; ") + one.meaning;
    all.draft = all.draft || one.draft;
  }
  for (const std::string& part : names)
    for (Option option : find_architecture(part).options) {
      option.key = option_key(name, part, option.key);
      for (OptionNeed& need : option.needs) need.key = option_key(name, part, need.key);
      all.options.push_back(option);
    }
  return all;
}

std::string ordered_name(const Config& config) { return joined_names(agree(config).names, "+"); }

bool is_idle(const Config& config, const std::string& part) {
  if (!is_combined(config.arch)) return false;
  const Agreement all = agree(config);
  return all.is_idle(static_cast<size_t>(std::ranges::find(all.names, part) - all.names.begin()));
}

namespace {

// One that starts as the plain backbone does, with its configuration.
struct Starting {
  Config config;
  std::unique_ptr<Connection> connection;
};
std::vector<Starting> starting_beside(const std::string& from, const Config& config) {
  std::vector<Starting> list;
  for (const std::string& name : parts_of(config.arch)) {
    if (name == from) continue;
    Config own = is_combined(config.arch) ? part_config(config, name) : config;
    std::unique_ptr<Connection> connection = find_architecture(name).make(own);
    list.push_back({std::move(own), std::move(connection)});
  }
  return list;
}

}  // namespace

std::string start_beside(const std::string& from, ParameterTable& params, const Config& config) {
  std::string remarks;
  ParameterTable before;
  declare_applications(before, plain_config(config));
  for (const Starting& part : starting_beside(from, config)) {
    ParameterTable own;  // a part sees its own rows and the backbone's alone
    declare_applications(own, part.config);
    const std::string remark = part.connection->start_as_plain(own, part.config);
    if (!remark.empty()) remarks += (remarks.empty() ? "" : "; ") + remark;
    for (const Parameter& row : own.rows())
      if (params.contains(row.name) && !(before.contains(row.name) && before.at(row.name).init.rule == row.init.rule))
        params.at(row.name).init = row.init;
  }
  return remarks;
}

std::function<std::string(std::string)> names_beside(const std::string& from, const Config& config) {
  const auto parts = std::make_shared<const std::vector<Starting>>(starting_beside(from, config));
  return [parts](std::string name) {
    for (const Starting& part : *parts) name = part.connection->plain_name(name);
    return name;
  };
}

}  // namespace crossply
