// Several connections in one model (models/combined.h). Gradients, plans, generation and the like of pairs are among
// those of all models (tests/support/cases.h).
#include "models/combined.h"

#include <set>

#include "tests/support/cases.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Architectures that are registered as long as this lives.
class Drafts {
 public:
  template <class C>
  void add(const std::string& name) {
    architectures().push_back({name, "a draft", {}, [](const Config&) { return std::make_unique<C>(); }, true});
    ++count_;
  }
  ~Drafts() {
    for (; count_ > 0; --count_) architectures().pop_back();
  }

 private:
  int count_ = 0;
};

// Reads the stream where it does not own it.
class Peeks : public Connection {
 public:
  QueryKeyValue project(int layer, Value* x) override {
    QueryKeyValue own = Connection::project(layer, x);
    Value* seen = ops::rmsnorm(build_->tape, str("L", layer, ".seen"), x_, nullptr, 1e-6);
    own.q = ops::add(build_->tape, str("L", layer, ".peek"), own.q, linears(layer, seen, {queries(layer)})[0]);
    return own;
  }
};
// Attends without asking which keys and values. On the tape it differs by a number alone.
class Deaf : public Connection {
 public:
  Value* attend(int layer, QueryKeyValue own) override {
    return ops::attention(build_->tape, Sublayer{layer, false}.name(), own.q, own.k, own.v, {.divisor = 2});
  }
};
// Attends to the last two tokens, likewise deaf, where the plain backbone attends to all.
class Nearsighted : public Connection {
 public:
  Value* attend(int layer, QueryKeyValue own) override {
    return ops::attention(build_->tape, Sublayer{layer, false}.name(), own.q, own.k, own.v, {.window = 2});
  }
};
// Two with a mark of one name.
class MarksValues : public Connection {
 public:
  QueryKeyValue project(int layer, Value* x) override {
    QueryKeyValue own = Connection::project(layer, x);
    own.v = ops::scaled(build_->tape, str("L", layer, ".halved"), own.v, 0.5);
    build_->mark("gate", layer, own.v);
    return own;
  }
};
class MarksKeys : public Connection {
 public:
  KeyValue kv(int layer, KeyValue own) override {
    own.k = ops::scaled(build_->tape, str("L", layer, ".doubled"), own.k, 2);
    build_->mark("gate", layer, own.k);
    return own;
  }
};

std::string refusal(const std::string& choice, const Config& backbone = tiny_config("llama")) {
  try {
    connected(choice, backbone);
  } catch (const Error& error) {
    CHECK(error.code == Exit::usage);
    return error.what();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

constexpr const char* allowed =
    "ala+depth_attention attnres+ala attnres+depth_attention attnres+kv_share attnres+lime attnres+moda "
    "attnres+relay attnres+resformer attnres+satformer attnres+sla denseformer+ala denseformer+depth_attention "
    "denseformer+kv_share denseformer+lime denseformer+moda denseformer+relay denseformer+resformer "
    "denseformer+satformer denseformer+sla gated_streams+ala gated_streams+depth_attention gated_streams+kv_share "
    "gated_streams+lime gated_streams+moda gated_streams+relay gated_streams+resformer gated_streams+satformer "
    "gated_streams+sla gemma3n+ala gemma3n+depth_attention gemma3n+kv_share gemma3n+lime gemma3n+lime_dynamic "
    "gemma3n+lime_static gemma3n+moda gemma3n+relay gemma3n+resformer gemma3n+satformer gemma3n+sla hyper+ala "
    "hyper+depth_attention hyper+kv_share hyper+lime hyper+moda hyper+relay hyper+resformer hyper+satformer "
    "hyper+sla lime+depth_attention lime_dynamic+ala lime_dynamic+depth_attention lime_dynamic+lime "
    "lime_dynamic+moda lime_dynamic+sla lime_static+ala lime_static+depth_attention lime_static+moda lime_static+sla "
    "mhc+ala mhc+depth_attention mhc+kv_share mhc+lime mhc+moda mhc+relay mhc+resformer mhc+satformer mhc+sla "
    "mudd+ala mudd+depth_attention mudd+lime mudd+moda mudd+sla relay+ala relay+depth_attention relay+lime "
    "relay+moda relay+sla resformer+ala resformer+depth_attention resformer+lime resformer+moda resformer+sla "
    "satformer+ala satformer+depth_attention satformer+lime satformer+moda satformer+sla shortcuts+ala "
    "shortcuts+depth_attention shortcuts+lime shortcuts+moda shortcuts+sla sla+depth_attention vertical+ala "
    "vertical+depth_attention vertical+kv_share vertical+lime vertical+moda vertical+relay vertical+resformer "
    "vertical+satformer vertical+sla";

}  // namespace

TEST_CASE("combined: these pairs are allowed, and every other one is refused by both names") {
  std::set<std::string> want, got;
  std::istringstream words(allowed);
  for (std::string word; words >> word;) want.insert(word);
  const auto& all = architectures();
  int refused = 0;
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = i + 1; j < all.size(); ++j) {
      if (all[i].draft || all[j].draft || all[j].name == "gpt2" || i < 2) continue;
      const std::string &a = all[i].name, &b = all[j].name, why = refusal(a + "+" + b);
      CAPTURE(why);
      CHECK(refusal(b + "+" + a).empty() == why.empty());
      if (why.empty()) {
        got.insert(tiny_with(a + "+" + b).arch);
        continue;
      }
      ++refused;
      CHECK((has(why, a) && has(why, b)));
    }
  std::string list;
  for (const std::string& name : got) list += name + " ";
  INFO(list);
  CHECK(got == want);
  MESSAGE(got.size() << " pairs are allowed, " << refused << " refused");
}

TEST_CASE("combined: a connection beside one that does nothing has its bits") {
  Drafts drafts;
  drafts.add<Connection>("nothing");
  for (const Architecture& architecture : one_in(2, architectures())) {
    if (architecture.draft || architecture.name == "llama" || architecture.name == "gpt2") continue;
    CAPTURE(architecture.name);
    TinyModel alone(tiny_with(architecture.name, 4)), beside(tiny_with("nothing+" + architecture.name, 4));
    CHECK(beside.config.arch == architecture.name + "+nothing");
    CHECK(alone.step() == beside.step());
    REQUIRE(alone.params.rows().size() == beside.params.rows().size());
    for (const Parameter& row : alone.params.rows())
      CHECK(alone.values<float>(row.grad) == beside.values<float>(beside.params.at(row.name).grad));
    CHECK(alone.tape.arena_bytes() == beside.tape.arena_bytes());
  }
}

TEST_CASE("combined: both orders of a name are one model; options that two parts have carry the part") {
  CHECK(tiny_with("lime+mhc").arch == "mhc+lime");
  CHECK(tiny_with("depth_attention+sla+resformer+hyper").arch == "hyper+resformer+sla+depth_attention");
  Drafts drafts;  // which own nothing
  drafts.add<Connection>("one_idle");
  drafts.add<Connection>("another_idle");
  for (const char* name : {"another_idle+lime+one_idle", "one_idle+another_idle+lime"})
    CHECK(tiny_with(name).arch == "lime+one_idle+another_idle");
  const Config both = tiny_with("lime+lime_dynamic:lime_kv_init=normal");
  CHECK(both.options.at("lime_kv_init") == "normal");
  CHECK(both.options.at("lime_dynamic_kv_init") == "literal");
  CHECK(both.options.at("routing") == "full");
  CHECK(part_config(both, "lime").text("kv_init") == "normal");
  CHECK(same_architecture("mhc+lime", "lime+mhc"));
  CHECK_FALSE(same_architecture("mhc+lime", "mhc"));
}

TEST_CASE("combined: what is no combination is refused by name") {
  for (const auto& [choice, words] : std::vector<std::pair<std::string, std::string>>{
           {"lime+lime", "twice"},
           {"llama+lime", "llama is the plain backbone"},
           {"lime+gpt2", "gpt2 is the plain backbone"},
           {"lime+", "a name is missing"},
           {"+", "a name is missing"},
           {"lime+foo", "foo"},
           {"lime+lime_static", "both have the tensor model.layers.1.self_attn.lime_router.weight"},
           {"hyper+mhc", "both change the stream"},
           {"moda+lime", "nobody would read those that lime chooses"},
           {"kv_share+depth_attention", "kv_share leaves layer 1 none"},
           {"mhc+lime_static", "makes keys and values of the stream"},
           {"hyper+lime_static:rate=1", "makes keys and values of the stream"},
           {"vertical+lime_dynamic", "makes keys and values of the stream"}}) {
    CAPTURE(choice);
    CHECK_MESSAGE(has(refusal(choice), words), refusal(choice));
  }
  Config looped = tiny_config("llama");
  looped.loop.kind = "anchor";
  CHECK(has(refusal("mhc+lime", looped), "takes no loop"));
  // What both want follows the options.
  CHECK(has(refusal("mhc+shortcuts"), "both change the stream"));
  CHECK(refusal("mhc+shortcuts:resid=false:x0=false:backout=false").empty());
  CHECK(has(refusal("mhc+shortcuts:resid=false:x0=false:backout=false:embed_norm=true"), "both change the stream"));
  CHECK(refusal("kv_share+depth_attention:depth_start=4").empty());
}

TEST_CASE("combined: of three parts those two are named that do not combine, and never what a check inside says") {
  const std::string shared = refusal("denseformer+kv_share+depth_attention");
  CHECK(has(shared, "kv_share and depth_attention do not combine"));
  CHECK_FALSE(has(shared, "denseformer"));
  for (const std::string choice : {"resformer+depth_attention", "mhc+resformer+depth_attention"}) {
    const std::string twice = refusal(choice + ":variant=svformer");
    CHECK(has(twice, "resformer and depth_attention do not combine: with these options"));
    CHECK_FALSE(has(twice, "mhc"));
    CHECK_FALSE(has(twice, ".cpp"));
  }
}

TEST_CASE("combined: a run says which part computes nothing, and whose start a parameter has that two start") {
  const auto remark = [](const std::string& choice) {
    const Config config = tiny_with(choice);
    return find_architecture(config.arch).make(config)->remark(config);
  };
  CHECK(remark("mhc+lime") == "");
  CHECK(remark("mhc+lime:routing=own") == "note: with these options lime computes nothing of its own");
  const std::string share = remark("mhc+kv_share:cla_factor=1");
  CHECK(has(share, "kv_share changes nothing"));
  CHECK_FALSE(has(share, "of its own\n"));
  CHECK(has(remark("lime_dynamic+lime"), "start as lime_dynamic has it, not as lime"));
  CHECK(remark("lime_dynamic+lime:lime_kv_init=normal") == "");
}

TEST_CASE("combined: a second norm changes neither who owns what, nor which model a name stands for") {
  const std::string values = "shortcuts:resid=false:x0=false:backout=false:attn_saved=1";
  for (const char* norm : {":block_norm=pre", ":block_norm=branch", ":block_norm=sum"}) {
    CHECK(has(refusal("mhc+" + values + norm), "both change the stream"));
    Config config = tiny_with("lime+" + values + ":value_embeds=none" + norm);
    TinyModel model(config);
    CHECK_FALSE(is_idle(config, "shortcuts"));
    CHECK(std::isfinite(model.loss()));
  }
}

TEST_CASE("combined: --decay routers is of all that there is, declared before or after") {
  Config config = tiny_with("gemma3n+lime:decay=routers");
  config.engram.layers = "[1]";
  ParameterTable params;
  declare_model(params, config);
  for (const Parameter& row : params.rows()) CHECK_MESSAGE(row.wd_mul == (row.router() ? 1 : 0), row.name);
}

TEST_CASE("combined: a connection that reads the stream out of turn gets the owner's, or is refused") {
  Drafts drafts;
  drafts.add<Peeks>("peeks");
  CHECK(has(refusal("mhc+peeks"), "peeks makes keys and values of the stream"));
  CHECK(has(refusal("denseformer+peeks"), "peeks makes keys and values of the stream"));
  // The owner's in front of every layer: with what adds nothing, the numbers of peeks alone.
  TinyModel alone(tiny_with("peeks")), beside(tiny_with("gemma3n+peeks:hidden_size_per_layer_input=0:laurel_rank=5"));
  for (Parameter& row : beside.params.rows())
    if (has(row.name, "laurel")) beside.fill(row.name, [](int64_t) { return 0.0; });
  beside.take(alone);
  CHECK(alone.loss() != beside.loss());  // gemma scales the embeddings
  TinyModel paper(
      tiny_with("gemma3n+peeks:hidden_size_per_layer_input=0:laurel_rank=5:laurel_form=paper:embed_scale=none"));
  for (Parameter& row : paper.params.rows())
    if (has(row.name, "laurel")) paper.fill(row.name, [](int64_t) { return 0.0; });
  paper.take(alone);
  CHECK(alone.loss() == paper.loss());
}

TEST_CASE("combined: attention that does not ask is refused beside every choice of keys and values") {
  Drafts drafts;
  drafts.add<Deaf>("deaf");
  drafts.add<Nearsighted>("nearsighted");
  for (const std::string deaf : {"deaf", "nearsighted"}) {
    for (const std::string choice : {"lime", "sla", "ala"})
      CHECK(has(refusal(choice + "+" + deaf), "nobody would read those that " + choice));
    CHECK(refusal("resformer+" + deaf).empty());
  }
}

TEST_CASE("combined: a mark that two parts have carries the part in front") {
  Drafts drafts;
  drafts.add<MarksValues>("marks_values");
  drafts.add<MarksKeys>("marks_keys");
  TinyModel model(tiny_with("marks_values+marks_keys"));
  std::set<std::string> names;
  for (const auto& [name, value] : model.tape.marks()) CHECK_MESSAGE(names.insert(name).second, name);
  CHECK(names.contains("gate.1"));
  CHECK(names.contains("marks_keys.gate.1"));
  for (const std::string& pair : pairs()) {
    TinyModel real(tiny_with(pair));
    std::set<std::string> marks;
    for (const auto& [name, value] : real.tape.marks()) CHECK_MESSAGE(marks.insert(name).second, pair << " " << name);
  }
}

TEST_CASE("combined: values that one part keeps and another writes over are copied, and no others") {
  const auto copies = [](const std::string& choice) {
    TinyModel model(tiny_with(choice));
    std::string names;
    for (const auto& node : model.tape.nodes())
      if (std::string(node->op()) == "copy") names += node->name + " ";
    return names;
  };
  CHECK(copies("resformer+lime") == "L0.own_v ");
  CHECK(copies("relay+lime") == "L0.own_v L1.own_v L2.own_v ");
  CHECK(copies("resformer+sla") == "");
  CHECK(copies("mhc+lime") == "");
  CHECK(copies("lime+depth_attention") == "L0.own_k L0.own_v L1.own_k L2.own_k L2.own_v L3.own_k ");
}

TEST_CASE("combined: from the weights of a part, or of the plain backbone, a pair starts with its numbers") {
  int started = 0;
  for (const Case& c : pair_cases()) {
    if (c.config.gpt2() || c.config.block_norm != "pre" || has_engram(c.config)) continue;
    std::vector<std::string> froms = parts_of(c.config.arch);
    froms.push_back("llama");
    for (const std::string& from : froms) {
      CAPTURE(c.name);
      CAPTURE(from);
      const auto device = make_device("cpu");
      ParameterTable rows;
      declare_model(rows, c.config);
      try {
        start_beside(from, rows, c.config);
      } catch (const Error& error) {
        CHECK(error.code == Exit::usage);
        continue;
      }
      if (parts_of(c.config.arch).size() > 2 && from != "llama") continue;
      TinyModel source(from == "llama" ? plain_of(c.config) : part_config(c.config, from)), pair(c.config);
      rows.allocate(*device, Dtype::f32, false);
      rows.initialise(1);
      const auto name_there = names_beside(from, c.config);
      for (Parameter& row : pair.params.rows()) {
        const std::string name = name_there(row.name);
        const bool taken = source.params.contains(name);
        const std::vector<float> numbers =
            taken ? source.params.read(source.params.at(name).value) : rows.read(rows.at(row.name).value);
        pair.fill(row.name, [&](int64_t i) { return static_cast<double>(numbers[static_cast<size_t>(i)]); });
      }
      CHECK(pair.loss() == source.loss());
      ++started;
    }
  }
  CHECK(started > 10);
}
