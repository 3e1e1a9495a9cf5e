// What each architecture must be equal to: the plain backbone at its neutral setting, the papers' parameter
// and FLOP counts. How new models start is in test_initial.cpp, golden values of whole models in test_golden.cpp.
#include <set>

#include "tests/support/twin.h"
#include "train/settings/settings.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// One parameter becomes another one's values.
void copy(TinyModel& model, const std::string& to, const Parameter& from, TinyModel& owner) {
  const auto values = owner.values<float>(from.value);
  model.fill(to, [&](int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); });
}

// A connection on LLaMAs with different numbers of key/value heads, and on GPT-2s.
std::vector<Config> on_backbones(const std::string& choice) {
  std::vector<Config> list;
  for (const int64_t K : {1, 2, 4}) list.push_back(tiny_with(choice, K));
  for (const bool plain : {true, false}) list.push_back(connected(choice, tiny_gpt2(plain)));
  if (!choice.starts_with("lime_")) list.push_back(connected(choice, tiny_qwen2()));  // those take no biases
  return list;
}

// Its own parameters as the architecture itself starts them from a plain backbone, which it is bit for bit then.
void starts_as_plain(const std::string& choice) {
  CAPTURE(choice);
  for (const Config& config : on_backbones(choice))
    check_same_bits(Twin(config, [](TinyModel& m) {
      ParameterTable plain;
      declare_model(plain, plain_of(m.config));
      find_architecture(m.config.arch).make(m.config)->start_as_plain(m.params, m.config);
      for (const Parameter& row : m.params.rows())
        if (!plain.contains(row.name))
          m.fill(row.name, [&](int64_t i) { return row.init.at(1, stream_of(row.name), i); });
    }));
}

// Both lanes stay the stream; what sublayers put out is added to it behind its bias, and gradients by lanes.
void lanes_are_plain() {
  for (const Config& config : on_backbones("shortcuts:lanes_from=2:value_embeds=none")) {
    const auto start = [](TinyModel& m) { set(m, "lambda", 0), set(m, "resid_lambdas", 1), set(m, "lane_", 1); };
    check_same(Twin(config, start), 1e-6);
    Twin twin(config, start);
    if (!config.gpt2() || !config.bias) CHECK(twin.plain.loss() == twin.model.loss());
  }
}

// Each layer's own gain becomes that of its mixtures.
void share_gains(TinyModel& m) {
  for (int l = 1; l < 4; ++l)
    copy(m, layer_name(l, "lime_layernorm.weight"), m.params.at(layer_name(l, "input_layernorm.weight")), m);
}
// Normalised streams times a gain, instead of rms(x) * gain in one: another order of two products.
const std::vector<std::string> v1_norms = {"input_layernorm", "lime_layernorm"};

void lime_static_is_plain() {
  for (const std::string top_p : {"0.25", "1"})
    for (const Config& config : on_backbones("lime_static:top_p=" + top_p))
      if (!(config.gpt2() && config.bias))
        check_same(Twin(config,
                        [](TinyModel& m) {
                          set(m, "lime_router",
                              [](const Parameter& row, int64_t i) { return 200 * last_column(row, i); });
                          share_gains(m);
                        }),
                   1e-5, v1_norms);
}

// The router is linear in the stream, so it needs something that every token has: here nothing writes to channel 0,
// where all embeddings hold a 5, and the router reads this channel alone.
void lime_dynamic_is_plain() {
  for (const Config& config : on_backbones("lime_dynamic")) {
    if (config.gpt2() && config.bias) continue;
    Twin twin(config);
    const int64_t C = config.hidden_size, K = config.num_key_value_heads;
    const auto embeddings = twin.plain.values<float>(twin.plain.params.at("model.embed_tokens.weight").value);
    twin.plain.fill("model.embed_tokens.weight", [&](int64_t i) {
      return i % C == 0 ? 5.0 : static_cast<double>(embeddings[static_cast<size_t>(i)]);
    });
    for (int l = 0; l < 4; ++l)
      for (const char* name : {"self_attn.o_proj.weight", "mlp.down_proj.weight"}) {
        const Parameter& row = twin.plain.params.at(layer_name(l, name));
        const auto values = twin.plain.values<float>(row.value);
        twin.plain.fill(row.name, [&](int64_t i) {
          return i < row.shape[1] ? 0.0 : static_cast<double>(values[static_cast<size_t>(i)]);
        });
      }
    twin.model.take(twin.plain);
    share_gains(twin.model);
    set(twin.model, "lime_router", [K](const Parameter& row, int64_t i) {  // (K sources, C), heads outside
      const int64_t sources = row.shape[0] / K, width = row.shape[1];
      return i % width == 0 && i / width % sources == sources - 1 ? 200 : 0;
    });
    check_same(std::move(twin), 1e-5, v1_norms);
  }
}

// With routers at zero both versions read the uniform mixture.
void lime_dynamic_is_lime_static() {
  TinyModel fixed(tiny_with("lime_static"), "cpu"), dynamic(tiny_with("lime_dynamic"), "cpu");
  dynamic.take(fixed);
  for (TinyModel* m : {&fixed, &dynamic}) set(*m, "lime_router", 0);
  CHECK(fixed.step() == dynamic.step());
  for (const Parameter& row : fixed.params.rows()) {
    if (!dynamic.params.contains(row.name)) continue;
    // The same gradients summed in another order: some ulps (6e-8) of terms that partly cancel.
    const Parameter& other = dynamic.params.at(row.name);
    check_close(row.name, dynamic.values<float>(other.grad), fixed.values<float>(row.grad), 1e-5);
  }
}

void hyper_is_plain() {
  auto start = [](TinyModel& m) {  // the values of a new model
    for (Parameter& row : m.params.rows())
      if (row.name.find("_hc.") != std::string::npos) m.fill(row.name, [&](int64_t i) { return row.init.at(1, 2, i); });
  };
  // E equal streams: the final norm removes the factor E up to its epsilon. One stream is the plain one, in the same
  // bits.
  for (const std::string rate : {"1", "2", "4"})
    for (Config config : on_backbones("hyper:prenorm=rmsnorm:layer_index=sublayer:rate=" + rate)) {
      config.norm_eps = 1e-6;
      check_same(Twin(config, start), 1e-5);
      Twin twin(config, start);
      const bool rounds = config.gpt2() && config.bias;  // the plain one adds a bias to product and stream together
      if (rate == "1" && !rounds) CHECK(twin.plain.loss() == twin.model.loss());
    }
}

void dynamic_hyper_is_static_hyper() {
  TinyModel still(tiny_with("hyper:dynamic=false"), "cpu"), dynamic(tiny_with("hyper"), "cpu");
  dynamic.take(still);
  set(dynamic, "scale", 0);
  CHECK(still.loss() == dynamic.loss());
}

void mudd_is_plain() {
  const std::vector<std::string> norms = {"input_layernorm_q", "input_layernorm_k", "input_layernorm_v"};
  for (const std::string norm : {"prepost", "none"})
    for (const Config& config : on_backbones("mudd:norm=" + norm)) {
      Twin twin(config, [&](TinyModel& m) {
        set(m, "w2.weight", 0);
        set(m, "static_weight", 0);
        if (norm == "none") set(m, "static_weight", last_column);
      });
      for (const Parameter& row : twin.plain.params.rows())
        if (const size_t at = row.name.find("input_layernorm"); at != std::string::npos)
          for (const std::string& name : norms)
            copy(twin.model, row.name.substr(0, at) + name + row.name.substr(row.name.rfind('.')), row, twin.plain);
      CHECK(twin.plain.loss() == twin.model.loss());
      check_same(std::move(twin), 1e-6, norms);
    }
}

// With queries of 0 every sublayer reads a mean of what the plain one adds up, and its norm, of an eps far below, sees
// no difference.
void attnres_is_plain() {
  for (const std::string size : {"0", "1", "3", "4"})
    for (Config config : on_backbones("attnres:attn_res_block_size=" + size)) {
      config.norm_eps = 1e-12;
      check_same(Twin(config, [](TinyModel& m) { set(m, "_res_proj", 0); }), 1e-5);
    }
}

// With scales of 0 every read is the mean of streams that are all equal, and stay so whatever comb is.
void mhc_is_plain() {
  for (const std::string mixing : {"sinkhorn", "identity", "permutations"})
    for (const std::string reads : {"own", "previous"})
      for (const Config& config : on_backbones("mhc:hc_eps=0:mixing=" + mixing + ":reads=" + reads))
        check_same(Twin(config,
                        [](TinyModel& m) {
                          set(m, "hc.scale", 0), set(m, "hc_scale", 0);
                          const auto mean = [](const Parameter&, int64_t i) {
                            return i < 4 ? -std::log(3) : i < 8 ? 0 : std::sin(static_cast<double>(i));
                          };
                          set(m, "hc.base", mean), set(m, "hc_base", mean);
                        }),
                   1e-5);
}

// With matrices of 0 all gates are 1/2 and all factors 1; gains that make up for it are 1 + w = 2 g, so that the plain
// gain's gradient is twice the sum of the streams'. A GPT-2's norm takes off a mean, which these do not.
void gated_streams_is_plain() {
  const auto of_norm = [](const std::string& row) -> std::string {  // the plain gain's row in place of ours
    if (row == "model.norm.weight") return "model.hyper_connection_mixer.hc_norm.weight";
    for (const auto& [norm, site] : {std::pair{"input_layernorm", "attn_hyper_connection.hc_norm"},
                                     {"post_attention_layernorm", "mlp_hyper_connection.hc_norm"}})
      if (const size_t at = row.find(norm); at != std::string::npos) return row.substr(0, at) + site + ".weight";
    return "";
  };
  for (const int64_t streams : {1, 3, 4})
    for (const int64_t K : {1, 2, 4}) {
      Twin twin(tiny_with(str("gated_streams:hc_count=", streams), K), [](TinyModel& m) {
        for (const char* matrix : {"mix_weight_down", "mix_weight_up", "inject_weight"}) set(m, matrix, 0);
      });
      for (const Parameter& row : twin.plain.params.rows()) {
        if (of_norm(row.name).empty()) continue;
        const auto gain = twin.plain.values<float>(row.value);
        twin.model.fill(of_norm(row.name), [&](int64_t i) {
          return 2.0 * static_cast<double>(gain[static_cast<size_t>(i) % gain.size()]) - 1;
        });
      }
      CHECK(twin.plain.step() == doctest::Approx(twin.model.step()).epsilon(1e-5));
      for (const Parameter& row : twin.plain.params.rows()) {
        const bool norm = !of_norm(row.name).empty();
        const auto parts = twin.model.values<float>(twin.model.params.at(norm ? of_norm(row.name) : row.name).grad);
        const auto want = twin.plain.values<float>(row.grad);
        std::vector<float> sum(want.size());
        for (size_t i = 0; i < parts.size(); ++i) sum[i % sum.size()] += (norm ? 2.f : 1.f) * parts[i];
        check_close(row.name, sum, want, 1e-3);
      }
    }
}

// A fixed map reads the sources that the papers name, l from 1: i-Net the first two, U-Net the mirrored one. In the
// learned map that is a score of 0 for these, and for the others one so low that their weight is 0.
void fixed_maps_are_learned_ones(int64_t L, const std::string& map,
                                 const std::function<bool(int64_t, int64_t)>& reads) {
  CAPTURE(L);
  CAPTURE(map);
  const auto sized = [L](const std::string& choice) {
    Config config = tiny_with(choice);
    config.num_hidden_layers = L;
    return config;
  };
  TinyModel fixed(sized("vertical:map=" + map), "reference", PlanMode::reuse, Dtype::f64);
  TinyModel learned(sized("vertical"), "reference", PlanMode::reuse, Dtype::f64);  // of the same seed
  for (int64_t l = 1; l <= L; ++l)
    learned.fill(layer_name(static_cast<int>(l - 1), "vertical_attention.scores"),
                 [&](int64_t i) { return i + 1 == l || reads(l, i + 1) ? 0.0 : -1e4; });
  CHECK(fixed.step() == doctest::Approx(learned.step()).epsilon(1e-13));
  for (const Parameter& row : fixed.params.rows())
    check_close(row.name, learned.values<double>(learned.params.at(row.name).grad), fixed.values<double>(row.grad),
                1e-11);
}

}  // namespace

TEST_CASE("architectures: each contains the plain backbone, bit for bit where it computes the same products") {
  const std::map<std::string, void (*)()> to_rounding = {{"lime_static", lime_static_is_plain},
                                                         {"lime_dynamic", lime_dynamic_is_plain},
                                                         {"hyper", hyper_is_plain},
                                                         {"mudd", mudd_is_plain},
                                                         {"attnres", attnres_is_plain},
                                                         {"mhc", mhc_is_plain},
                                                         {"gated_streams", gated_streams_is_plain}};
  std::set<std::string> tested = {"llama", "gpt2"};
  for (const auto& [arch, test] : to_rounding) test(), tested.insert(arch);
  lanes_are_plain();
  for (const ArchChoice& choice : parse_arch_list(
           "lime,vertical,sla:distance=4,ala:stride=4,resformer,satformer,satformer:gate=tanh,satformer:gate=identity,"
           "denseformer,denseformer:dilation=2,denseformer:period=3,denseformer:dilation=3:period=2,relay,"
           "moda:depth_start=4,moda:depth_start=4:depth_window=2,"
           "depth_attention:depth_start=4,kv_share:cla_factor=1,kv_share:sharing=suffix,kv_share:sharing=list:kv_"
           "owners=[0,1,2,3],"
           "gemma3n:embed_scale=none:laurel_form=paper:hidden_size_per_layer_input=6:laurel_rank=3,"
           "shortcuts,shortcuts:resid=false,shortcuts:value_embeds=none:x0=false,shortcuts:unet=true:value_from=x0,"
           "shortcuts:mudd_tail=residual:resid=false")) {
    starts_as_plain(choice.text);
    tested.insert(choice.arch);
  }
  for (const Architecture& architecture : architectures())
    CHECK_MESSAGE((architecture.draft || tested.contains(architecture.name)),
                  architecture.name << " has no identity test");
}

TEST_CASE("architectures: dynamic versions contain the static ones") {
  lime_dynamic_is_lime_static();
  dynamic_hyper_is_static_hyper();
}

TEST_CASE(
    "architectures: the fixed maps of vertical attention are learned ones with the sources that the papers name") {
  for (const int64_t L : {4, 5}) {
    fixed_maps_are_learned_ones(L, "inet", [](int64_t, int64_t i) { return i <= 2; });
    for (const int64_t offset : {1, 2})
      fixed_maps_are_learned_ones(L, str("unet:mirror_offset=", offset),
                                  [L, offset](int64_t l, int64_t i) { return l > (L + 1) / 2 && i == L + offset - l; });
  }
}

TEST_CASE("architectures: constrained routers keep unread entries at zero, without a gradient") {
  for (const std::string routing : {"last", "first"}) {
    TinyModel model(tiny_with("lime:window=1:routing=" + routing, 2, false), "reference", PlanMode::reuse, Dtype::f64);
    model.step();
    const Parameter& router = model.params.at("model.layers.3.self_attn.lime_router.weight");
    const auto value = model.values<double>(router.value), grad = model.values<double>(router.grad);
    for (int64_t i = 0; i < router.shape.numel(); ++i) {
      const int64_t source = i % 8 / 2;
      const bool read = source == 3 || (routing == "first" && source == 0);
      CHECK((grad[static_cast<size_t>(i)] != 0) == read);
      if (!read) CHECK(value[static_cast<size_t>(i)] == 0);
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// Published sizes and costs.

namespace {

Config preset_config(const std::string& preset, const std::string& text) {
  const ArchChoice choice = parse_arch_list(text)[0];
  Settings settings;
  apply_preset(preset, settings);
  settings.config.arch = choice.arch;
  for (const auto& [key, value] : choice.options) settings.config.options[key] = value;
  add_preset_options(preset, settings.config);
  if (settings.config.vocab_size == 0) settings.config.vocab_size = 21;
  settings.config.check(Exit::usage, "test");
  return settings.config;
}

int64_t count_parameters(const Config& config) {
  ParameterTable params;
  declare_model(params, config);
  return params.count();
}

}  // namespace

TEST_CASE("architectures: parameter counts of the papers, to the last digit") {
  // Sizes, with the counts of architectures; a plus: so many more than the size's llama, which comes first.
  std::istringstream lines(R"(arith  llama 66496  lime 66640  hyper +1488  relay +384  attnres 67072
    arith  llama 66496  kv_share 62400  mhc +25309  shortcuts 67945
    150m  llama 151862784  lime 151873872  hyper +92784  attnres 151901184
    arith  gated_streams 73760  depth_attention 66496  gemma3n 203200  moda 72640  moda:ffn_kv=false 66496
    150m  gated_streams 155901696  moda 164838912  moda:depth_start=3:depth_window=2 163659264
    150m  kv_share 144784896  mhc 153645197  shortcuts 383447929
    1b  llama 1076072448  lime 1076081088  hyper 1076400960  attnres 1076207616
    1b  kv_share 1059295232  kv_share:sharing=suffix:num_kv_shared_layers=4 1067683840
    1b  mhc 1082397541  shortcuts 1281925921
    1b  gated_streams 1111926784  moda 1107529728
    1.2b  llama 1176735744  lime 1176873984  hyper 1177064256  lime_static 1176770784  lime_dynamic 1185613824
    deep32  llama 46436864  lime 46470592  hyper +83584  lime_dynamic +1087232  lime_static +12152  attnres 46470144
    deep32  mhc 48015557  gated_streams 47813888
    deep64  llama 80007680  lime 80140736  hyper +167168  lime_static +32760
    deep128  llama 147149312  lime 147677632  hyper +334336  lime_static +98552  attnres 147280896
    deep128  mhc 153451781  gated_streams 152605952
    130m  llama 128404096  satformer +92160  resformer +21  denseformer +77  denseformer:dilation=4:period=5 +5
    130m  mudd 128729008  hyper +101596  hyper:rate=4:norm=rmsnorm +118844  attnres 128439424
    130m  depth_attention +0  moda 140201216  kv_share 122505536  mhc 130038999  gated_streams 132118912
    340m  llama 334798080  satformer +278528  resformer +35  denseformer +189  mudd 335849700  hyper +221544
    340m  attnres 334873856  mhc 338354385  gated_streams 345200896
    760m  llama 766440320  satformer +663552  resformer +37  denseformer +209  denseformer:dilation=4:period=5 +9
    760m  mudd 768164456  hyper +350588  hyper:rate=4:norm=rmsnorm +409564
    1.3b  llama 1298764800  satformer 1300272128  resformer +47  denseformer +324
    1.3b  denseformer:dilation=4:period=5 +15  attnres 1298965504  mhc 1308236053
    1.3b  shortcuts 2085201457  gated_streams 1352018944
    760m-thin  llama 757020672  satformer +565248
    d12  llama 135288576  shortcuts 286283977
    d20  llama 480436480  shortcuts 899868121
    va50m  llama 53086656  vertical 53086677  vertical:map=unet +0  sla +0  ala +0
    va100m  llama 119740800  vertical 119740836
    va300m  llama 319703808  vertical 319703886)");
  std::map<std::string, int> counted;
  int64_t llama = 0;
  for (std::string line, size, choice, count; std::getline(lines, line);) {
    std::istringstream words(line);
    for (words >> size; words >> choice >> count;) {
      const Config config = preset_config(size, choice);
      const int64_t want = std::stoll(count) + (count[0] == '+' ? llama : 0);
      if (choice == "llama") llama = want;
      CHECK_MESSAGE(count_parameters(config) == want, size << " " << choice);
      ++counted[config.arch];
    }
  }
  for (const Architecture& architecture : architectures())
    CHECK_MESSAGE((architecture.draft || architecture.name == "gpt2" || counted[architecture.name] > 0),
                  architecture.name);
}

namespace {

Config gpt2_config(int64_t C, int64_t H, int64_t L, int64_t V, bool bias) {
  Config config;
  config.arch = "gpt2";
  config.vocab_size = V;
  config.hidden_size = C, config.num_attention_heads = H, config.num_hidden_layers = L;
  config.max_position_embeddings = 1024;
  config.tie_word_embeddings = true;
  config.bias = bias;
  config.check(Exit::usage, "test");
  return config;
}

}  // namespace

TEST_CASE("architectures: parameter counts of GPT-2, the Inheritune paper's without biases and OpenAI's with them") {
  struct Family {
    int64_t C, H;
    std::vector<std::pair<int64_t, int64_t>> counts;  // layers, parameters
  };
  const std::vector<Family> paper = {
      {768, 12, {{12, 124373760}, {4, 67738368}}},
      {1024, 16, {{24, 354599936}, {18, 279090176}, {16, 253920256}, {14, 228750336}, {12, 203580416}, {8, 153240576}}},
      {1280, 20, {{36, 773582080}, {18, 419641600}, {9, 242671360}}},
      {1280, 20, {{32, 694928640}, {16, 380314880}}},
      {1600, 25, {{48, 1556840000}, {24, 819483200}, {12, 450804800}}}};
  for (const Family& family : paper)
    for (const auto& [L, count] : family.counts)
      CHECK(count_parameters(gpt2_config(family.C, family.H, L, 50304, false)) == count);
  const std::vector<Family> openai = {{768, 12, {{12, 124439808}, {6, 81912576}}},
                                      {1024, 16, {{24, 354823168}}},
                                      {1280, 20, {{36, 774030080}}},
                                      {1600, 25, {{48, 1557611200}}}};
  for (const Family& family : openai)
    for (const auto& [L, count] : family.counts)
      CHECK(count_parameters(gpt2_config(family.C, family.H, L, 50257, true)) == count);
}

TEST_CASE("architectures: a connection adds as many parameters to a GPT-2 as to a LLaMA, but for biases") {
  const auto added = [](const Config& config) { return count_parameters(config) - count_parameters(plain_of(config)); };
  const int64_t C = 8, L = 4;
  const std::map<std::string, int64_t> biases = {{"lime_static", -2 * C * (L - 1)},
                                                 {"lime_dynamic", -2 * C * (L - 1)},
                                                 {"hyper", -2 * C * L},
                                                 {"resformer:variant=svformer", -C * (L - 1)},
                                                 {"mudd", 2 * C * L},
                                                 {"kv_share", -2 * C * (L / 2)},
                                                 {"gated_streams", -C * (2 * L + 1)}};
  std::string choices = "hyper:prenorm=rmsnorm,resformer:variant=svformer,vertical:map=unet,lime:routing=average";
  for (const Architecture& one : architectures())
    if (one.name != "llama" && one.name != "gpt2") choices += "," + one.name;
  for (const ArchChoice& choice : parse_arch_list(choices)) {
    CAPTURE(choice.text);
    const int64_t want = added(tiny_with(choice.text, 4, false));
    CHECK(added(connected(choice.text, tiny_gpt2(false))) == want);
    CHECK(added(connected(choice.text, tiny_gpt2())) ==
          want + (biases.contains(choice.text) ? biases.at(choice.text) : 0));
  }
}

namespace {

// Forward FLOPs a token beyond the plain backbone's of the same sizes, from the recorded tape; nothing is computed.
double added_flops(const Config& config) {
  constexpr int64_t B = 2, T = 5;
  auto forward = [](const Config& c) {
    ParameterTable params;
    declare_model(params, c);
    Tape tape(Dtype::f32);
    record_model(tape, params, c, B, T);
    return tape.forward_flops();
  };
  return (forward(config) - forward(plain_of(config))) / static_cast<double>(B * T);
}

// The formulas of the specification, in the letters of the trainers' head comments. Integers: the sizes are small.
struct Sizes {
  int64_t C, L, K, D, H;
  int64_t streams() const { return L * (L + 1) / 2 - 1; }  // pairs of a layer, from the second on, and what it reads
};
int64_t mudd_flops(const Sizes& s) {
  int64_t sum = 4 * s.C * (s.L + 1) + 2 * (s.L + 1) * (s.L + 1);
  for (int64_t n = 1; n < s.L; ++n) sum += 16 * s.C * (n + 1) + 32 * (n + 1) * (n + 1);
  return sum;
}
int64_t dense_flops(const Sizes& s, int64_t k, int64_t p) {
  int64_t read = 0;
  for (int64_t i = p; i <= s.L; i += p) read += i / k + 1;
  return 2 * s.C * read;
}
// A layer's mixtures read the embedding, the blocks that are finished by then, and the present one once it has begun.
int64_t attnres_flops(const Sizes& s, int64_t m) {
  int64_t read = 1 + (s.L + m - 1) / m;  // of the last mixture
  for (int64_t i = 0; i < s.L; ++i) read += 1 + (i + m - 1) / m + 2 + i / m;
  return 4 * s.C * read + 2 * s.C * (2 * s.L + 1);
}
int64_t gated_flops(const Sizes& s, int64_t E, int64_t R) {
  return 2 * s.L * 2 * E * s.C * (2 * R + E + 2) + 2 * E * s.C * (2 * R + 1);
}

}  // namespace

TEST_CASE("architectures: FLOPs a token beyond the plain backbone's are the formulas of the trainers' pages") {
  struct Cost {
    std::string choice;
    std::function<int64_t(const Sizes&)> want;
  };
  const std::vector<Cost> costs = {
      {"llama", [](const Sizes&) { return 0; }},
      {"lime", [](const Sizes& s) { return 4 * s.K * s.K * s.D * s.streams(); }},
      {"lime_static", [](const Sizes& s) { return 2 * s.K * s.C * s.streams(); }},
      {"lime_static:top_p=0.5", [](const Sizes& s) { return 2 * s.K * s.C * s.streams(); }},
      {"lime_dynamic", [](const Sizes& s) { return 4 * s.K * s.C * s.streams(); }},
      {"hyper", [](const Sizes& s) { return 2 * s.L * 4 * 4 * s.C * (4 + 2); }},
      {"hyper:rate=3:norm=rmsnorm:prenorm=rmsnorm", [](const Sizes& s) { return 2 * s.L * 4 * 3 * s.C * (3 + 2); }},
      {"hyper:dynamic=false", [](const Sizes& s) { return 2 * s.L * 2 * 4 * s.C * (4 + 2); }},
      {"vertical", [](const Sizes& s) { return s.C * s.L * (s.L + 1) + 2 * s.C * s.L - 2 * s.C; }},
      {"sla", [](const Sizes&) { return 0; }},
      {"sla:distance=1:heads=1", [](const Sizes&) { return 0; }},
      {"ala", [](const Sizes&) { return 0; }},
      {"resformer", [](const Sizes& s) { return 3 * s.K * s.D * (s.L - 1); }},
      {"resformer:last_k=2", [](const Sizes& s) { return 3 * s.K * s.D * 2; }},
      {"resformer:variant=svformer", [](const Sizes& s) { return -2 * s.C * s.K * s.D * (s.L - 1); }},
      {"satformer", [](const Sizes& s) { return (s.L - 1) * (2 * s.C * s.K + 2 * s.K * s.D); }},
      {"satformer:last_k=2", [](const Sizes& s) { return 2 * (2 * s.C * s.K + 2 * s.K * s.D); }},
      {"denseformer", [](const Sizes& s) { return s.C * s.L * (s.L + 3); }},
      {"denseformer:dilation=2:period=3", [](const Sizes& s) { return dense_flops(s, 2, 3); }},
      {"mudd", mudd_flops},
      {"mudd:norm=none", mudd_flops},
      {"attnres:attn_res_block_size=0",
       [](const Sizes& s) { return 4 * s.C * (2 * s.L + 1) * (s.L + 1) + 2 * s.C * (2 * s.L + 1); }},
      {"attnres", [](const Sizes& s) { return attnres_flops(s, 4); }},
      {"attnres:attn_res_block_size=2", [](const Sizes& s) { return attnres_flops(s, 2); }},
      {"kv_share", [](const Sizes& s) { return -4 * s.C * s.K * s.D * (s.L / 2); }},
      {"kv_share:sharing=suffix:num_kv_shared_layers=3", [](const Sizes& s) { return -4 * s.C * s.K * s.D * 3; }},
      {"mhc", [](const Sizes& s) { return 480 * s.L * s.C + 40 * s.C; }},
      {"mhc:reads=previous", [](const Sizes& s) { return 480 * s.L * s.C; }},
      {"mhc:mixing=identity:hc_mult=2",
       [](const Sizes& s) { return 2 * s.L * 4 * s.C * (4 + 1 + 2 + 1) + 4 * s.C * (2 + 1); }},
      {"shortcuts",  // a table in layers 0, 2 and 4; all 8 channels of a tiny model
       [](const Sizes& s) { return 3 * s.C * s.L + 3 * s.C + 3 * (2 * s.K * s.C + 2 * s.K * s.D); }},
      {"shortcuts:value_embeds=list:value_layers=[1]:gate_channels=3:backout=false",
       [](const Sizes& s) { return 3 * s.C * s.L + 2 * s.K * 3 + 2 * s.K * s.D; }},
      {"shortcuts:resid=false:x0=false:value_embeds=none", [](const Sizes& s) { return 3 * s.C; }},
      {"shortcuts:resid=false:x0=false:backout=false:value_embeds=none:unet=true:attn_saved=1",
       [](const Sizes& s) { return 3 * s.C * (s.L / 2); }},
      {"shortcuts:resid=false:x0=false:backout=false:value_from=x0",
       [](const Sizes& s) { return 3 * (2 * s.K * s.C + 2 * s.K * s.D + 2 * s.C * s.K * s.D); }},
      {"shortcuts:backout=false:value_embeds=none:lanes_from=2",  // of 5 layers
       [](const Sizes& s) { return 3 * s.C * (s.L + 3) + 3 * 12 * s.C; }},
      {"shortcuts:resid=false:x0=false:backout=false:value_embeds=none:mudd_tail=residual:mudd_width=5",
       [](const Sizes& s) { return 2 * (2 * 5 * s.C + 2 * 5 * 3 + 2 * 3 * s.C); }},
      {"gated_streams", [](const Sizes& s) { return gated_flops(s, 4, 1); }},
      {"gated_streams:hc_count=3:hc_lowrank=5", [](const Sizes& s) { return gated_flops(s, 3, 5); }},
      {"gemma3n:hidden_size_per_layer_input=6:laurel_rank=3",
       [](const Sizes& s) { return 6 * s.L * 6 * s.C + 4 * s.L * 3 * s.C; }},
      {"gemma3n:hidden_size_per_layer_input=0", [](const Sizes& s) { return 4 * s.L * 64 * s.C; }},
      // Of 5 layers, 0, 2 and 4 are read: 1, 1, 2 and 2 sources.
      {"depth_attention", [](const Sizes& s) { return 4 * s.K * s.D * (2 + 2 + 3 + 3); }},
      {"depth_attention:depth_start=2:depth_stride=4:depth_recent=1",
       [](const Sizes& s) { return 4 * s.K * s.D * (3 + 3 + 3); }},
      // Two slots a layer below: 2, 4, 6 and 8 in layers 1 to 4.
      {"moda", [](const Sizes& s) { return 4 * s.H * s.D * 20 + 4 * s.C * s.K * s.D * 4; }},
      {"moda:depth_start=2:depth_window=1",  // layers 2 to 4 read one layer each
       [](const Sizes& s) { return 4 * s.H * s.D * 6 + 4 * s.C * s.K * s.D * 3; }},
      {"moda:depth_window=2:ffn_kv=false", [](const Sizes& s) { return 4 * s.H * s.D * (1 + 2 + 2 + 2); }},
      {"moda:depth_start=5", [](const Sizes&) { return 0; }},
      {"relay", [](const Sizes& s) { return (s.L - 1) * (2 * s.C * s.K + 2 * s.K * s.D); }},
  };
  std::map<std::string, int> counted;
  for (const Cost& cost : costs) {
    const ArchChoice choice = parse_arch_list(cost.choice)[0];
    ++counted[choice.arch];
    std::vector<Config> backbones;
    for (const int64_t K : {1, 2, 4}) backbones.push_back(tiny_config("llama", K, true, true, 6));  // H D is not C
    if (choice.arch != "llama")
      for (const bool plain : {true, false}) backbones.push_back(tiny_gpt2(plain));
    for (Config& config : backbones) {
      config.num_hidden_layers = 5;
      config = connected(cost.choice, config);
      const Sizes sizes{config.hidden_size, config.num_hidden_layers, config.num_key_value_heads, config.head_dim,
                        config.num_attention_heads};
      CHECK_MESSAGE(added_flops(config) == static_cast<double>(cost.want(sizes)),
                    cost.choice << " on " << config.backbone << " K=" << sizes.K);
    }
  }
  for (const Architecture& architecture : architectures())
    CHECK_MESSAGE((architecture.draft || architecture.name == "gpt2" || counted[architecture.name] > 0),
                  architecture.name);
}
