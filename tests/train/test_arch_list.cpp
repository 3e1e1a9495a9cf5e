#include "cli/format.h"
#include "models/disk/config_json.h"
#include "train/settings/arch_list.h"

#include <nlohmann/json.hpp>

#include "models/config.h"
#include "models/registry.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("arch list: names, options in place, and lists inside options") {
  const auto choices =
      parse_arch_list("llama,hyper:rate=2:dynamic=false,mudd:intermediate_sizes=[64,96]:norm=none,hyper");
  REQUIRE(choices.size() == 4);
  CHECK(choices[0].text == "llama");
  CHECK(choices[0].options.empty());
  CHECK(choices[1].text == "hyper:rate=2:dynamic=false");
  CHECK(choices[1].arch == "hyper");
  CHECK(choices[1].options == std::map<std::string, std::string>{{"rate", "2"}, {"dynamic", "false"}});
  CHECK(choices[2].options == std::map<std::string, std::string>{{"intermediate_sizes", "[64,96]"}, {"norm", "none"}});
  CHECK(choices[3].options.empty());
  const char* names[] = {"llama", "hyper-rate-2-dynamic-false", "mudd-intermediate_sizes-64-96-norm-none", "hyper"};
  for (size_t i = 0; i < 4; ++i) CHECK(choices[i].file_name() == names[i]);
  CHECK(parse_arch_list("lime_static:top_p=0.9")[0].file_name() == "lime_static-top_p-0.9");
}

TEST_CASE("arch list: all is every registered architecture of a backbone, and others may stand beside it") {
  for (const std::string backbone : {"llama", "gpt2"}) {
    const auto choices = parse_arch_list("all,hyper:rate=2", backbone);
    REQUIRE(choices.size() == architectures().size());
    CHECK(choices[0].arch == backbone);
    size_t i = 0;
    for (const Architecture& architecture : architectures()) {
      CHECK(has(arch_list_help(), " " + architecture.name));
      if (architecture.name != (backbone == "llama" ? "gpt2" : "llama")) CHECK(choices[i++].text == architecture.name);
    }
    CHECK(choices.back().text == "hyper:rate=2");
  }
}

TEST_CASE("arch list: an option may be written as the trainer's flag is") {
  CHECK(parse_arch_list("mhc:hc-mult=2")[0].options == parse_arch_list("mhc:hc_mult=2")[0].options);
}

TEST_CASE("arch list: what does not exist is refused by name") {
  const auto refused = [](const std::string& list, const std::string& says) {
    check_fails(Exit::usage, {says}, [&] { parse_arch_list(list); });
  };
  refused("llama,limo", "unknown architecture 'limo'; known: llama gpt2 lime");
  refused("", "unknown architecture ''");
  refused("llama,", "unknown architecture ''");
  refused("hyper:rat=2", "hyper has no option 'rat'; it has: rate dynamic");
  refused("mhc:hc_mult=2:hc-mult=2", "gives hc_mult twice");
  refused("mhc:hc_mult=2+lime", "options stand behind the last name");
  CHECK(parse_arch("llama:loop=anchor:loop_alpha=1e+0").arch == "llama");
  refused("llama:rate=2", "llama has no option 'rate'; it has: none");
  refused("hyper:rate", "key=value, not 'rate'");
  refused("hyper:", "key=value, not ''");
  refused("hyper:rate=2:rate=4", "gives rate twice");
  refused("llama,lime,llama", "names llama twice");
  refused("all,lime", "names lime twice");
  refused("mhc+lime,llama,lime+mhc", "names lime+mhc twice");
  refused("hyper:rate=2,hyper:rate=2", "names hyper:rate=2 twice");
}

TEST_CASE("progress: a table has straight columns") {
  CHECK(format_table({{"a", "bb", "c"}, {"long", "1", "22"}, {"x", "-"}}) == "a     bb   c\nlong   1  22\nx      -\n");
  CHECK(format_table({}) == "");
  CHECK(format_table({{"\xC3\xA4", "\xE6\xBC\xA2"}, {"ab", "cde"}}) ==
        "\xC3\xA4     \xE6\xBC\xA2\nab  cde\n");  // characters
}

TEST_CASE("format: counts have their digits in threes, also below zero") {
  CHECK(format_count(0) == "0");
  CHECK(format_count(-12) == "-12");
  CHECK(format_count(1234) == "1,234");
  CHECK(format_count(-393216) == "-393,216");
  CHECK(format_count(-7077888) == "-7,077,888");
}

TEST_CASE("arch list: options that amount to nothing are refused, or said") {
  const auto remark = [](const std::string& text) {
    const ArchChoice choice = parse_arch_list(text)[0];
    Config config;
    choice.apply(config);
    config.vocab_size = 11, config.hidden_size = 8, config.intermediate_size = 16, config.num_hidden_layers = 4;
    config.num_attention_heads = 2;
    config.check(Exit::usage, "test");
    return find_architecture(config.arch).make(config)->remark(config);
  };
  CHECK(has(remark("attnres"), "one block of these 4"));
  CHECK(has(remark("kv_share:sharing=suffix"), "kv_share changes nothing"));
  CHECK(has(remark("kv_share:cla_factor=1"), "kv_share changes nothing"));
  CHECK(has(remark("shortcuts:value_embeds=list"), "no layer has a value table"));
  CHECK(has(remark("depth_attention:depth_start=4"), "depth_attention adds nothing"));
  CHECK(has(remark("depth_attention:depth_stride=1:depth_recent=1"), "depth_recent has no effect"));
  CHECK(has(remark("depth_attention:depth_stride=3:depth_recent=3"), "depth_stride has no effect"));
  CHECK(has(remark("moda:depth_start=4"), "moda adds nothing"));
  CHECK(has(remark("moda:depth_window=3"), "depth_window 3 has no effect"));
  for (const char* text : {"attnres:attn_res_block_size=0", "attnres:attn_res_block_size=3", "kv_share", "shortcuts",
                           "kv_share:sharing=suffix:num_kv_shared_layers=1", "shortcuts:value_embeds=none",
                           "shortcuts:value_embeds=list:value_layers=[1]", "mhc:mixing=identity", "llama",
                           "depth_attention", "depth_attention:depth_start=3:depth_stride=3:depth_recent=2", "moda",
                           "moda:depth_start=2:depth_window=2:ffn_kv=false"})
    CHECK(remark(text).empty());
}

TEST_CASE("arch list: a model of an architecture that came after this build") {
  const nlohmann::json config = {{"vocab_size", 16},         {"hidden_size", 16},
                                 {"intermediate_size", 16},  {"num_hidden_layers", 1},
                                 {"num_attention_heads", 2}, {"crossply", {{"arch", "later"}}}};
  check_fails(Exit::bad_data, {"m/config.json: this build does not know the architecture 'later'", "make generate"},
              [&] { parse_config(config, "m/config.json"); });
}

TEST_CASE("arch list: every need names an option of the architecture and values that it takes") {
  for (const Architecture& architecture : architectures())
    for (const Option& option : architecture.options)
      for (const OptionNeed& need : option.needs) {
        CAPTURE(architecture.name + " " + option.key);
        const auto other = std::ranges::find(architecture.options, need.key, &Option::key);
        REQUIRE(other != architecture.options.end());
        for (const std::string& value : need.values)
          CHECK((other->choices.empty() || std::ranges::count(other->choices, value) == 1));
        CHECK((need.only_for.empty() || std::ranges::count(option.choices, need.only_for) == 1));
      }
}
