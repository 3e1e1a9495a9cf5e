// What saved models carry for the transformers library.
#include "engine/io/json.h"
#include "models/disk/config_json.h"
#include "models/disk/library_files.h"

#include "models/disk/checkpoint.h"
#include "models/disk/modelling_file.h"
#include "models/registry.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Json = nlohmann::json;
using Files = std::map<std::string, std::string>;

bool is_there(const std::string& path) { return std::filesystem::exists(path); }

// The text of an architecture's modelling file, which needs no other file of ours.
std::string text_alone(const std::string& arch, const std::string& stem, const std::string& type) {
  CAPTURE(arch);
  CHECK(class_stem(arch) == stem);
  CHECK(library_name(arch) == type);
  REQUIRE(modelling_module(arch) == "modeling_" + type);
  const std::string text = modelling_file(arch);
  CHECK(text.starts_with("\"\"\""));
  CHECK(text.ends_with("reference, config_class = " + stem + ", Crossply" + stem + "Config\n"));
  CHECK(has(text, "  model_type = \"" + type + "\"\n"));
  for (const char* once : {"\nimport torch\n", "\nclass Config:", "\nclass Llama(", "\nclass LayerNorm("})
    CHECK_MESSAGE((has(text, once) && text.find(once) == text.rfind(once)), once);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    CHECK_MESSAGE(line.size() <= 120, line);
    CHECK_MESSAGE(!line.starts_with("from ."), line);
  }
  return text;
}

}  // namespace

TEST_CASE("library files: the modelling file of every architecture stands alone") {
  for (const Architecture& architecture : architectures())
    if (const std::string& name = architecture.name; !architecture.draft)
      CHECK(!has(text_alone(name, class_stem(name), "crossply_" + name), "combined("));
  CHECK(class_stem("my_idea2") == "MyIdea2");
  for (const char* unknown : {"my_idea2", "layer", "attention", "lime+my_idea2", "+", "lime+"})
    CHECK(modelling_module(unknown) == "");
}

TEST_CASE("library files: that of a combination has the classes of its parts once, and puts them together") {
  const std::string pair = text_alone("mhc+lime", "MhcAndLime", "crossply_mhc_and_lime");
  for (const char* once : {"\nclass Mhc(Llama):", "\nclass Lime(Llama):", "\nMhcAndLime = combined(Mhc, Lime)\n"})
    CHECK_MESSAGE((has(pair, once) && pair.find(once) == pair.rfind(once)), once);
  const std::string of_one_file = text_alone("ala+sla", "AlaAndSla", "crossply_ala_and_sla");
  CHECK(of_one_file.find("\nclass Sla(Llama):") == of_one_file.rfind("\nclass Sla(Llama):"));
  const std::string three =
      text_alone("gemma3n+lime_static+sla", "Gemma3nAndLimeStaticAndSla", "crossply_gemma3n_and_lime_static_and_sla");
  CHECK(has(three, " = combined(Gemma3n, LimeStatic, Sla)\n"));
}

TEST_CASE("library files: every pair has a modelling file, but where only options keep the parts apart") {
  for (const std::string& pair : pairs()) CHECK_MESSAGE(without_modelling_file(tiny_with(pair)).empty(), pair);
  for (const std::string choice :
       {"mhc+shortcuts:resid=false:x0=false:backout=false", "resformer+lime:block_norm=sum",
        "lime_static+shortcuts:value_embeds=none", "kv_share+hyper:cla_factor=1",
        "kv_share+depth_attention:cla_factor=1",
        "denseformer+shortcuts:resid=false:x0=false:backout=false:block_norm=branch", "mhc+resformer+lime",
        "gemma3n+relay+lime+depth_attention", "denseformer+shortcuts+lime:resid=false:x0=false:backout=false"})
    CHECK_MESSAGE(to_json(tiny_with(choice)).contains("auto_map"), choice);
  for (const auto& [choice, reason] : std::vector<std::pair<std::string, std::string>>{
           {"sla+lime:routing=own", "sla and lime both change the choice of keys and values"},
           {"mhc+gemma3n:hidden_size_per_layer_input=0:laurel_rank=0:embed_scale=none", "both change the stream"},
           {"lime+moda:depth_start=4", "moda attends to a layer's own keys and values"},
           {"kv_share+depth_attention:depth_start=4", "kv_share leaves some none"},
           {"mudd+shortcuts:value_embeds=none:resid=false:x0=false:backout=false", "mudd and shortcuts both change"},
           {"denseformer+kv_share+shortcuts:value_embeds=none:resid=false:x0=false:backout=false",
            "kv_share and shortcuts both change a layer's own queries"},
           {"gemma3n+kv_share:block_norm=branch", "--block-norm"}}) {
    CAPTURE(choice);
    const Config config = tiny_with(choice);
    CHECK_MESSAGE(has(without_modelling_file(config), reason), without_modelling_file(config));
    CHECK(!to_json(config).contains("auto_map"));
  }
}

TEST_CASE("library files: the modelling files of a directory are found by name") {
  const TempDir scratch;
  for (const char* name :
       {"modeling_crossply_lime.py", "modeling_crossply_mhc_and_lime.py", "modeling_crossply_none.py",
        "modeling_crossply_lime_and_none.py", "modeling_crossply_sla.txt", "lime.py"})
    write_text(scratch.file(name), "");
  CHECK(modelling_files_in(scratch.file("")) == std::vector<std::string>{"lime", "mhc+lime"});
  CHECK(modelling_files_in(scratch.file("nowhere")).empty());
}

TEST_CASE("library files: what is no plain model says where its module is, and has it") {
  Config lime = tiny_config("lime"), llama = tiny_config("llama"), gpt2 = tiny_gpt2();
  for (const Config& plain : {llama, gpt2}) {
    CHECK(!to_json(plain).contains("auto_map"));
    CHECK(library_files(plain, {}) == Files());
  }
  gpt2.bias = false;
  llama.qk_norm = true;  // of another epsilon than the other norms'
  for (const Config& config : {lime, gpt2, llama}) {
    CAPTURE(config.arch);
    const Json json = to_json(config);
    const std::string name = "Crossply" + class_stem(config.arch), module = "modeling_crossply_" + config.arch;
    CHECK(json["model_type"] == "crossply_" + config.arch);
    CHECK(json["architectures"] == Json{name + "ForCausalLM"});
    CHECK(json["auto_map"] == Json{{"AutoConfig", module + "." + name + "Config"},
                                   {"AutoModelForCausalLM", module + "." + name + "ForCausalLM"}});
    CHECK(library_files(config, {}) == Files{{module + ".py", modelling_file(config.arch)}});
  }
}

TEST_CASE("library files: tokens that end a text are those of the configuration, else the tokenizer's") {
  Config config = tiny_config("llama");
  const Tokenizer words = Tokenizer::words({"a", "<eos>"});
  Files files = library_files(config, words);
  CHECK(files.size() == 2);
  CHECK(known_json(files["tokenizer_config.json"]) == Json{{"tokenizer_class", "PreTrainedTokenizerFast"},
                                                           {"clean_up_tokenization_spaces", false},
                                                           {"model_input_names", {"input_ids", "attention_mask"}},
                                                           {"eos_token", "<eos>"},
                                                           {"pad_token", "<eos>"},
                                                           {"padding_side", "left"}});
  CHECK(known_json(files["generation_config.json"]) == Json{{"eos_token_id", 1}, {"pad_token_id", 1}});
  files = library_files(config, Tokenizer::words({"<pad>", "a", "<eos>"}));
  CHECK(known_json(files["tokenizer_config.json"])["pad_token"] == "<pad>");
  CHECK(known_json(files["generation_config.json"]) == Json{{"eos_token_id", 2}, {"pad_token_id", 0}});
  config.token_ids = {{"eos_token_id", "[0,1]"}, {"pad_token_id", "0"}};
  files = library_files(config, words);
  CHECK(known_json(files["generation_config.json"]) == Json{{"eos_token_id", {0, 1}}, {"pad_token_id", 0}});
  config.token_ids = {};
  files = library_files(config, Tokenizer::bytes());
  CHECK((files.size() == 1 && !has(files["tokenizer_config.json"], "eos")));
}

TEST_CASE("library files: every way to write a model carries them, and the manifest lists them") {
  const TempDir scratch;
  const std::vector<std::string> data = {"--data", "arith:3", "--train-samples", "8", "--test-samples", "4"};
  const std::vector<std::string> sizes = {"--width", "16", "--layers", "4", "--heads", "4"};
  const auto make = [&](const std::string& arch, const std::string& out, std::vector<std::string> more) {
    more.insert(more.end(), data.begin(), data.end());
    if (std::find(more.begin(), more.end(), "--init") == more.end())
      more.insert(more.end(), sizes.begin(), sizes.end());
    more.insert(more.end(), {"--batch", "2", "--answer-samples", "0", "--out", scratch.file(out)});
    check_outcome(train(scratch, more, arch), Exit::done, "");
    return scratch.file(out);
  };
  const auto check = [&](const std::string& dir, const std::string& module) {
    CAPTURE(dir);
    std::string why, manifest = read_text(dir + "/manifest.json");
    CHECK_MESSAGE(is_valid_checkpoint(dir, &why), why);
    for (const std::string& file :
         {module + ".py", std::string("tokenizer_config.json"), std::string("generation_config.json")})
      CHECK_MESSAGE((is_there(dir + "/" + file) && has(manifest, file)), file);
    CHECK(has(read_text(dir + "/config.json"), module));
  };
  const std::string plain = make("llama", "plain", {"--steps", "0"});
  for (const auto& entry : std::filesystem::directory_iterator(plain)) CHECK(entry.path().extension() != ".py");
  CHECK(!has(read_text(plain + "/config.json"), "auto_map"));

  const std::string lime = make("lime", "lime", {"--steps", "2", "--save-every", "1", "--keep", "2"});
  check(lime + "/step_00000002", "modeling_crossply_lime");
  std::filesystem::remove_all(lime + "/step_00000002");
  check_outcome(train(scratch, {"--resume", "--out", lime}, "lime"), Exit::done, "");
  check(lime + "/step_00000002", "modeling_crossply_lime");
  check(make("lime", "again", {"--steps", "0", "--init", lime}), "modeling_crossply_lime");
  check(make("relay", "relay", {"--steps", "0", "--init", plain}), "modeling_crossply_relay");
  check(make("gpt2", "nobias", {"--steps", "0", "--bias", "false"}), "modeling_crossply_gpt2");
  check_outcome(
      run_program_inside(scratch, {"transplant", "--model", lime, "--blocks", "0-1", "--out", scratch.file("half")}),
      Exit::done, "");
  check(scratch.file("half"), "modeling_crossply_lime");
}
