// The tiny models that every check of whole models runs through.
#pragma once

#include <string>
#include <vector>

#include "kernels/reference/ops.h"
#include "models/registry.h"
#include "tests/support/tier.h"
#include "tests/support/tiny.h"

namespace crossply::test {

struct Case {
  std::string name;
  Config config;
};

// Has the model an op of plain loops only, which no GPU computes; or, per_sequence, one that cannot generate?
inline bool has_loops(const Config& config, bool per_sequence = false) {
  ParameterTable params;
  declare_model(params, config);
  Tape tape(Dtype::f32);
  record_model(tape, params, config, 1, 2);
  for (const auto& node : tape.nodes())
    if (const auto* op = dynamic_cast<const ReferenceNode*>(node.get()))
      if (op->loops->per_sequence() || !per_sequence) return true;
  return false;
}

// With tables of a few rows, which several n-grams share, and a boundary. seed: where a gate's logit comes near 0 its
// slope is so steep that finite differences say nothing; another one draws others.
inline Config with_engram(Config config, const std::string& layers = "[1]", int64_t seed = 0) {
  config.engram = {.layers = layers, .heads = 2, .rows = 5, .boundary = "[4]", .pad_id = 2, .seed = seed};
  config.check(Exit::usage, "test");
  return config;
}
// Two passes through the middle, of which each has an Engram of its own.
inline Config looped_with_engram(Config config) {
  config.loop.kind = "anchor", config.loop.passes = 2;
  return with_engram(config, "[1,3]");
}

// GPT-2 with its options, every architecture on both of tiny_gpt2, and the options that meet a GPT-2's own rows.
inline std::vector<Case> gpt2_cases() {
  std::vector<Case> list = {{"gpt2", tiny_gpt2()}, {"gpt2, all options", tiny_gpt2(false)}};
  auto plain_with = [&](const std::string& name, const auto& change) {
    list.push_back({"gpt2, " + name, tiny_gpt2()});
    change(list.back().config);
    list.back().config.check(Exit::usage, "test");
  };
  plain_with("no biases", [](Config& c) { c.bias = false; });
  plain_with("gelu, scaled logits", [](Config& c) {
    c.activation_function = "gelu";
    c.scale_attn_by_inverse_layer_idx = true;
  });
  plain_with("untied, heads of odd width", [](Config& c) {
    c.tie_word_embeddings = false;
    c.hidden_size = 12, c.head_dim = 0;
  });
  list.push_back({"gpt2 with Engram", with_engram(tiny_gpt2(), "[0,2]")});
  for (const Architecture& architecture : architectures()) {
    const std::string& arch = architecture.name;
    if (arch == "llama" || arch == "gpt2") continue;
    list.push_back({arch + " on gpt2", connected(arch, tiny_gpt2())});
    list.push_back({arch + " on gpt2, all options", connected(arch, tiny_gpt2(false))});
  }
  for (const ArchChoice& choice :
       parse_arch_list("lime:routing=last:window=2,lime_static:top_p=0.6,hyper:norm=layernorm:prenorm=rmsnorm:rate=2,"
                       "vertical:map=unet,sla:distance=1:heads=1,ala:include_self=false,"
                       "resformer:last_k=2:variant=svformer,mudd:norm=none:intermediate_sizes=[4,5,6,9]"))
    list.push_back({choice.text + " on gpt2", connected(choice.text, tiny_gpt2())});
  return list;
}

inline bool has_stream(const Config& config) { return find_architecture(config.arch).make(config)->has_stream(); }
// Repeats a model's core of two blocks, with a prelude and a coda of one. Where there is no stream nothing but that.
inline Config looped(Config config) {
  config.loop.kind = "anchor", config.loop.passes = 2, config.loop.layers = "[1,2,1]", config.loop.alpha = 0.7;
  if (!has_stream(config)) config.loop.norm = "none", config.loop.alpha = 0;
  config.check(Exit::usage, "test");
  return config;
}

// Loops beside every connection, the options of a loop, and second norms.
inline std::vector<Case> loop_cases() {
  std::vector<Case> list;
  for (const Architecture& architecture : architectures())
    for (const Config& backbone : {tiny_config("llama", 2, true), tiny_gpt2(false)})
      if (const std::string& arch = architecture.name; arch != "gpt2" && (arch != "llama" || !backbone.gpt2()))
        list.push_back({str(arch, " on ", backbone.backbone, ", looped"), looped(connected(arch, backbone))});
  list.push_back({"mhc:reads=previous, looped", looped(tiny_with("mhc:reads=previous"))});
  const auto add = [&](const std::string& name, Config config, const auto& change) {
    change(config);
    config.check(Exit::usage, "test");
    list.push_back({name, config});
  };
  const Config llama = tiny_config("llama");
  add("gpt2, looped", tiny_gpt2(), [](Config& c) { c = looped(c); });
  add("Operator-1", llama, [](Config& c) { c.loop.kind = "anchor"; });
  add("loop: norms everywhere, no prelude, no coda, no anchor at the end", llama,
      [](Config& c) { c.loop = {"anchor", 3, "[0,4,0]", true, "all", -1.5, false}; });
  add("loop: an anchor without norms, the core at the end", llama,
      [](Config& c) { c.loop = {"anchor", 2, "[3,1,0]", true, "none", 1, true}; });
  add("loop: two cores", llama, [](Config& c) { c.loop = {"anchor", 2, "[0,1,2]", false, "passes", 1, true}; });
  for (const std::string choice : {"llama", "lime", "mhc:reads=previous", "attnres", "shortcuts:unet=true"})
    add(choice + ", stacked", tiny_with(choice), [](Config& c) { c.loop.kind = "stack", c.loop.passes = 2; });
  add("stacked, with an exit gate", llama,
      [](Config& c) { c.loop.kind = "stack", c.loop.passes = 3, c.loop.exit_gate = true; });
  add("gpt2, stacked, block_norm branch", tiny_gpt2(), [](Config& c) {
    c.loop.kind = "stack", c.loop.passes = 3, c.block_norm = "branch", c.scale_attn_by_inverse_layer_idx = true;
  });
  for (const std::string norm : {"branch", "sum"})
    for (const Config& config : {llama, tiny_gpt2(), tiny_with("hyper:rate=2"), tiny_with("resformer")})
      add(str("block_norm ", norm, ", ", config.arch), config, [&](Config& c) { c.block_norm = norm; });
  add("block_norm branch, mudd, looped", tiny_with("mudd"), [](Config& c) { c = looped(c), c.block_norm = "branch"; });
  add("block_norm sum, mhc:reads=previous", tiny_with("mhc:reads=previous"), [](Config& c) { c.block_norm = "sum"; });
  return list;
}

// Windows of two or three tokens in some layers, a letter for each.
inline std::vector<Case> window_cases() {
  std::vector<Case> list;
  const auto add = [&](const std::string& choice, int64_t window, const std::string& pattern, int64_t K = 2) {
    Config config = tiny_with(choice, K);
    config.sliding_window = window, config.window_pattern = pattern;
    config.check(Exit::usage, "test");
    list.push_back({str(choice, " with windows ", pattern), config});
  };
  add("llama", 3, "SSSL");
  add("lime", 2, "SLSS");
  add("sla", 2, "SSLS", 4);
  add("ala", 3, "LSSL", 4);
  add("kv_share", 2, "SSLL");
  add("moda", 2, "SLSL");
  add("depth_attention", 2, "SSSL");
  add("mhc+lime", 2, "SSSS");
  list.push_back({"llama with windows, looped", looped(list[0].config)});
  list.push_back({"llama with windows, stacked", list[0].config});
  list.back().config.loop.kind = "stack", list.back().config.loop.passes = 2;
  list.back().config.check(Exit::usage, "test");
  return list;
}

// A low cap on logits, which bends many of them.
inline Config with_cap(Config config, double cap = 0.8) {
  config.final_logit_softcapping = cap;
  config.check(Exit::usage, "test");
  return config;
}
inline std::vector<Case> capped_cases() {
  std::vector<Case> list;
  Config exits = tiny_config("llama");
  exits.loop.kind = "stack", exits.loop.passes = 2, exits.loop.exit_gate = true;
  for (const Config& config : {tiny_config("llama"), tiny_gpt2(false), tiny_with("mhc"), tiny_with("mhc+lime"), exits})
    list.push_back({str(config.arch, config.loop.exit_gate ? ", exit gate" : "", ", capped logits"), with_cap(config)});
  return list;
}

// Pairs of connections that do not want the same thing; all of them in the second tier, else each connection in one.
inline std::vector<std::string> pairs() {
  if (!everything())
    return {"mhc+lime",
            "hyper+moda",
            "gated_streams+resformer",
            "vertical+satformer",
            "denseformer+sla",
            "attnres+relay",
            "gemma3n+kv_share",
            "mudd+ala",
            "shortcuts+depth_attention",
            "gemma3n+lime_static",
            "lime_dynamic+lime",
            "resformer+lime",
            "depth_attention+lime"};
  std::vector<std::string> list;
  const auto& all = architectures();
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = i + 1; j < all.size(); ++j) try {
        list.push_back(tiny_with(all[i].name + "+" + all[j].name).arch);
      } catch (const Error&) {  // test_combined.cpp knows which
      }
  return list;
}
inline std::vector<Case> pair_cases() {
  std::vector<Case> list;
  for (const std::string& pair : pairs())
    list.push_back({pair, tiny_with(pair, pair.find("sla") != std::string::npos ? 4 : 2, pair.size() % 2 == 0)});
  list.push_back({"mhc+lime on gpt2", connected("mhc+lime", tiny_gpt2())});
  list.push_back(
      {"shortcuts+lime, block_norm", tiny_with("shortcuts+lime:unet=true:mudd_tail=residual:block_norm=sum")});
  list.push_back(
      {"kv_share+gemma3n on gpt2, block_norm", connected("kv_share+gemma3n:block_norm=branch", tiny_gpt2())});
  for (const std::string choice :
       {"mhc+shortcuts:resid=false:x0=false:backout=false:value_from=x0:reads=previous", "mhc+resformer+lime:hc_mult=2",
        "resformer+lime:variant=svformer:last_k=2", "lime_dynamic+lime:lime_kv_init=normal:lime_dynamic_kv_init=fan_in",
        "lime_static+shortcuts:value_embeds=none",
        "vertical+shortcuts:value_from=x0:resid=false:x0=false:backout=false"})
    list.push_back({choice, tiny_with(choice)});
  list.push_back({"mhc+kv_share with Engram", with_engram(tiny_with("mhc+kv_share:reads=previous"), "[1]", 1)});
  return list;
}

// Every architecture and every option that changes what is computed.
inline std::vector<Case> cases() {
  std::vector<Case> list = gpt2_cases();
  for (const auto& more : {loop_cases(), pair_cases(), window_cases(), capped_cases()})
    list.insert(list.end(), more.begin(), more.end());
  for (const Architecture& architecture : architectures()) {
    const std::string& arch = architecture.name;
    if (arch == "gpt2") continue;
    list.push_back({arch + " grouped heads", tiny_config(arch, 2)});
    list.push_back({arch + " full heads, q/k norm", tiny_config(arch, 4, true)});
    list.push_back({arch + " one key head, untied, H*D != C", tiny_config(arch, 1, true, false, 6)});
    if (!arch.starts_with("lime_")) list.push_back({arch + " biases, yarn", tiny_qwen2(arch)});  // those take none
  }
  const char* grouped =
      "lime:routing=average:window=2,lime:routing=own,lime:routing=last:window=2,lime:routing=first:window=2,"
      "lime_static:top_p=0.6:top_p_renormalize=true,lime_static:top_p=0.6:top_p_renormalize=false,"
      "hyper:rate=1:dynamic=true,hyper:rate=2:dynamic=false,hyper:rate=3:dynamic=true,"
      "hyper:norm=rmsnorm:output_init_scale=true:dynamic_norm_eps=0.01,vertical:map=unet,vertical:map=inet,"
      "vertical:map=unet:mirror_offset=2,vertical:residual=false,sla:distance=1:heads=1,ala:stride=1,"
      "ala:stride=3,ala:include_self=false,resformer:variant=identity,resformer:variant=constant,"
      "resformer:variant=learnable,resformer:variant=sparse,resformer:variant=svformer,resformer:last_k=2,"
      "resformer:last_k=2:variant=svformer,satformer:gate=sigmoid,satformer:gate=softmax,"
      "satformer:gate=softmax_sigmoid,satformer:gate=tanh,satformer:gate=identity,denseformer:dilation=2,"
      "denseformer:dilation=2:period=3,mudd:norm=none,mudd:intermediate_sizes=[4,5,6,9],"
      "attnres:attn_res_block_size=0,attnres:attn_res_block_size=1,attnres:attn_res_block_size=3,"
      "kv_share:sharing=suffix:num_kv_shared_layers=2,kv_share:sharing=list:kv_owners=[0,3],"
      "shortcuts:value_embeds=none,shortcuts:resid=false:embed_norm=true:gate_channels=3,"
      "shortcuts:value_embeds=list:value_layers=[0,1]:x0=false:gate_scale=1.5,"
      "shortcuts:resid=false:x0=false:backout=false,shortcuts:unet=true:value_from=x0,"
      "shortcuts:lanes_from=1:attn_saved=1:value_embeds=none,shortcuts:mudd_tail=residual:mudd_width=5,"
      "shortcuts:unet=true:resid=false:x0=false:backout=false:lanes_from=2:mudd_tail=residual:mudd_width=3,"
      "mhc:reads=previous,mhc:mixing=identity,mhc:mixing=permutations:hc_mult=3:reads=previous,"
      "mhc:hc_mult=2:mixing=permutations,mhc:hc_mult=8:hc_sinkhorn_iters=1:hc_eps=0.01,"
      "gated_streams:hc_count=3:hc_lowrank=5,gated_streams:hc_count=1,"
      "gemma3n:hidden_size_per_layer_input=3:laurel_rank=5,gemma3n:laurel_form=paper:hidden_size_per_layer_input=0,"
      "gemma3n:laurel_rank=0:hidden_size_per_layer_input=5:embed_scale=none,"
      "depth_attention:depth_stride=1,depth_attention:depth_start=2:depth_stride=4:depth_recent=1,"
      "moda:depth_start=2:depth_window=1,moda:depth_window=2:ffn_kv=false";
  const char* full =
      "hyper:norm=layernorm:prenorm=rmsnorm:layer_index=sublayer:rate=2,sla:distance=2:heads=3,satformer:last_k=2,"
      "shortcuts:unet=true:value_from=x0:lanes_from=3:attn_saved=1:mudd_tail=both:mudd_width=5";
  for (const ArchChoice& choice : parse_arch_list(grouped))
    list.push_back({choice.text, tiny_with(choice.text, 2, false)});
  for (const ArchChoice& choice : parse_arch_list(full)) list.push_back({choice.text, tiny_with(choice.text, 4)});
  list.push_back({"llama with Engram, grouped heads", with_engram(tiny_config("llama"), "[0,3]")});
  list.push_back({"llama with Engram, looped", looped_with_engram(tiny_config("llama"))});
  for (const std::string choice : {"hyper:rate=2", "mhc:hc_mult=2", "gated_streams:hc_count=1", "shortcuts", "lime"})
    list.push_back({choice + " with Engram", with_engram(tiny_with(choice), choice == "lime" ? "[2]" : "[0,2]", 6)});
  for (const Case& capped : capped_cases()) list.push_back(capped);
  return list;
}

// A model with an exit gate learns of its own exits, and of no teacher.
inline std::vector<Case> cases_but_exits() {
  std::vector<Case> list = cases();
  std::erase_if(list, [](const Case& c) { return c.config.loop.exit_gate; });
  return list;
}

// Drafts know nothing of memory: their plain loops may allocate.
inline std::vector<Case> cases_with_kernels() {
  std::vector<Case> list = cases();
  std::erase_if(list, [](const Case& c) { return has_loops(c.config); });
  return list;
}

}  // namespace crossply::test
