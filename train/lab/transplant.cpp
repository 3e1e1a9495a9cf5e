// transplant: a new model out of the blocks of a trained one, for another training to start from. Inheritune (Sanyal et
// al., arXiv 2404.08634) is compared with such models; each of these lines makes one, with the reference in M:
//
//   first half     transplant --model M --out D --blocks 0-11
//   hybrid stack   transplant --model M --out D --blocks 0-8,0-8        the reference's first 9 blocks, twice
//   stacking       transplant --model S --out D --blocks 0-8,0-8        S: a model of 9 blocks, trained from scratch
//   half width     transplant --model M --out D --width 640 --heads 10  Medium: 512, 8. XL, of 25 heads: 768, 12
//   DistilBERT     transplant --model M --out D --blocks 0,2,4,6,8,10,12,14,16,18,20,22,18-21
//   sub-modules    transplant --model M --out D --blocks 0-15 --inherit PARTS
//     attention                PARTS = embedding,attention,attention_norm
//     MLP                      PARTS = embedding,mlp,mlp_norm
//     both, without norms      PARTS = embedding,attention,mlp
//     all                      PARTS = embedding,attention,attention_norm,mlp,mlp_norm
//   lazy layers    transplant --model M --out D --blocks 8-11           Small's last four
//                  transplant --model M --out D --blocks fresh:15,15-23 Medium's last nine at their place
//
// and `train_gpt2 --init D` trains it. A random model of the same size is `train_gpt2 --layers`; the recipe itself,
// which grows until it is as good as its reference, is train_inheritune.
//
// A block is its attention, its feed-forward layer, the norms in front of both, and what a connection added to it. All
// other parts come along, too, unless --inherit names those that do: the published code leaves the positions and the
// final norm behind. What does not come along starts as in a new model, with other random numbers than a source of
// the same seed began with. Of a narrower model each matrix is the leading part: of queries, keys and values the first
// heads.
//
// Where logits are divided by the layer's number (--scale-attn-by-layer), a block that moves from layer a to b, counted
// from 0, gets logits times (a + 1) / (b + 1): block 8 as the first one has logits that are 9 times as large. Nobody
// mends that in the published experiments. --rescale-q true does, by the queries' weights.
//
// `transplant --refresh D` makes no model. It rewrites the modelling file that D, or each checkpoint of a run D,
// carries for the transformers library, where another version of crossply has written it.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "cli/format.h"
#include "cli/program.h"
#include "engine/io/new_directory.h"
#include "engine/io/printable.h"
#include "engine/split.h"
#include "eval/loaded_model.h"
#include "models/disk/model_dir.h"
#include "models/transplant.h"
#include "train/run/inputs.h"
#include "train/step/saved_model.h"
#include "train/step/trainer.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, out, blocks = "all", inherit = "all", refresh;
  int64_t width = 0, heads = 0;
  bool rescale = false;
  uint64_t seed = 42;
  bool seed_given = false;
};

void say(const std::string& line) { std::printf("%s\n", printable(wrap(line, 78, 2)).c_str()); }

std::string joined(const std::vector<std::string>& words) {
  return std::accumulate(words.begin(), words.end(), std::string(),
                         [](const std::string& a, const std::string& b) { return a.empty() ? b : a + ", " + b; });
}

std::string described(const Config& c, const ParameterTable& params) {
  return str(with_article(c.arch), c.arch != "gpt2" && c.gpt2() ? " on gpt2" : "", " of ", c.num_hidden_layers,
             " blocks, width ", c.hidden_size, ", ", c.num_attention_heads, " heads, ", format_count(params.count()),
             " parameters");
}

std::set<std::string> parse_parts(const std::string& text) {
  std::set<std::string> parts;
  for (const std::string& part : split_commas(text)) {
    if (std::find(transplant_parts.begin(), transplant_parts.end(), part) == transplant_parts.end())
      fail(Exit::usage, "--inherit: no part is called '", excerpt(part), "'; known: ", joined(transplant_parts));
    parts.insert(part);
  }
  return parts;
}

// "0-5 <- 0-5, 6-11 <- 0-5": runs of blocks that follow each other in both models.
std::string mapping(const std::vector<int>& blocks) {
  const auto range = [](size_t first, size_t count) {
    return count > 1 ? str(first, "-", first + count - 1) : str(first);
  };
  std::vector<std::string> runs;
  for (size_t i = 0, n; i < blocks.size(); i += n) {
    const bool fresh = blocks[i] == fresh_block;
    for (n = 1; i + n < blocks.size() && blocks[i + n] == (fresh ? fresh_block : blocks[i] + static_cast<int>(n));) ++n;
    runs.push_back(range(i, n) + (fresh ? " fresh" : " <- " + range(static_cast<size_t>(blocks[i]), n)));
  }
  return joined(runs);
}

// Of the blocks that move where logits are divided by the layer's number: what becomes of their logits.
void note_logits(const Options& o, const Config& source, const Transplant& t) {
  std::vector<std::pair<int, int>> moved;  // from, to
  for (int b = 0; b < std::ssize(t.blocks); ++b)
    if (const int a = t.blocks[static_cast<size_t>(b)]; a != fresh_block && a != b) moved.emplace_back(a, b);
  if (!source.scale_attn_by_inverse_layer_idx || !t.parts.contains("attention")) moved.clear();
  if (moved.empty() && o.rescale)
    say("note: --rescale-q has nothing to do: no block's logits are divided by another number than before");
  if (moved.empty() || o.rescale) return;
  const auto [least, most] = std::minmax_element(moved.begin(), moved.end(), [](const auto& x, const auto& y) {
    return (x.first + 1) * (y.second + 1) < (y.first + 1) * (x.second + 1);
  });
  const auto shown = [](const std::pair<int, int>& m) {
    return str(m.first + 1, "/", m.second + 1, " (", m.second, " <- ", m.first, ")");
  };
  say(str("note: logits are divided by the layer's number, so those of the ", moved.size(),
          " blocks that moved are now times ", shown(*least), least == most ? "" : " to " + shown(*most),
          "; --rescale-q true keeps them as they were"));
}

// What was asked for by name comes, or nothing does.
void require_some(const std::string& part, const ParameterTable& params, const Transplant& t,
                  const std::set<std::string>& kept) {
  const auto taken = [&](const Parameter& row) {
    return transplant_part(row.name) == part && !kept.contains(row.name);
  };
  const bool fresh = std::all_of(t.blocks.begin(), t.blocks.end(), [](int block) { return block == fresh_block; });
  const bool of_all = part == "embedding" || part == "positions" || part == "final_norm";
  if ((fresh && !of_all) || std::none_of(params.rows().begin(), params.rows().end(), taken))
    fail(Exit::usage, "--inherit ", part, ": the source has nothing of this that fits; leave it out");
}

void report(const Options& o, const LoadedModel& source, const Config& target, const ParameterTable& params,
            const Transplant& t, const std::vector<std::string>& kept) {
  say("source: " + o.model + ", " + described(source.config, source.params));
  const bool narrower = o.width > 0 || o.heads > 0;
  say("blocks: " + mapping(t.blocks) + (narrower ? "; of all matrices the leading parts" : ""));
  std::set<std::string> left;
  for (const Parameter& row : params.rows())
    if (const std::string part = transplant_part(row.name); !t.parts.contains(part)) left.insert(part);
  if (!left.empty()) say("fresh, not in --inherit: " + joined({left.begin(), left.end()}));
  if (!kept.empty())
    say("note: fresh, because the source has nothing that fits: " + kept.front() +
        (kept.size() > 1 ? str(" and ", kept.size() - 1, " more") : ""));
  note_logits(o, source.config, t);
  say("wrote " + o.out + ", " + described(target, params));
}

Exit run(const Options& o) {
  require_new_directory(o.out);
  Transplant t;
  if (o.inherit != "all") t.parts = parse_parts(o.inherit);
  t.rescale_queries = o.rescale;
  const LoadedModel source(o.model, "cpu", /*with_gradients=*/false);
  if (has_loop(source.config))
    fail(Exit::usage, "--model ", o.model,
         " has a loop, whose runs are no blocks that could be listed; "
         "take a model without one");
  const int64_t L = source.config.num_hidden_layers;
  t.blocks = parse_blocks(o.blocks == "all" ? str("0-", L - 1) : o.blocks, L);

  TrainPlan plan;
  plan.config = transplanted_config(source.config, t, o.width, o.heads);
  plan.carried = read_carried_files(source.dir);
  const Tokenizer tokenizer = Tokenizer::load(source.dir);
  ParameterTable params;
  declare_model(params, plan.config);
  params.allocate(*source.device, Dtype::f32, /*with_gradients=*/false);
  initialise_fresh(params, o.seed);
  const std::vector<std::string> kept = transplant(source.params, source.config, params, plan.config, t);
  if (o.inherit != "all")
    for (const std::string& part : t.parts) require_some(part, params, t, {kept.begin(), kept.end()});
  const auto is_fresh = [&](const Parameter& row) {
    return !t.parts.contains(transplant_part(row.name)) || std::ranges::count(kept, row.name) > 0;
  };
  if (o.seed_given && std::ranges::none_of(params.rows(), is_fresh) && std::ranges::count(t.blocks, fresh_block) == 0)
    fail(Exit::usage, "--seed ", o.seed, " has no effect: nothing starts fresh without --inherit or --blocks fresh:N");

  require_finite(params, values_of(params, plan.config), Exit::bad_data);  // --rescale-q multiplies
  CheckpointWriter writer;
  writer.begin(o.out);
  write_model(writer, plan, {}, params, tokenizer);
  writer.commit({}, [&] { require_new_directory(o.out); });

  report(o, source, plan.config, params, t, kept);
  return Exit::done;
}

// --refresh. A damaged checkpoint of a run is left alone, as all programs do.
Exit refresh(const std::string& path) {
  if (path.empty()) fail(Exit::usage, "--refresh is empty; give a model or run directory");
  const std::vector<std::string> dirs = model_dirs_in(path);
  size_t damaged = 0;
  for (const std::string& dir : dirs) {
    try {
      const std::vector<std::string> names = refresh_model_dir(dir);
      say(dir + (names.empty() ? ": nothing to rewrite" : ": rewrote " + joined(names)));
    } catch (const Error& error) {
      const bool is_damage = error.code == Exit::bad_data || error.code == Exit::no_input;
      if (!is_damage || dir == path || ++damaged == dirs.size()) throw;
      say(str("note: skipped the checkpoint ", dir, ": ", error.what()));
    }
  }
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app("Makes a model directory out of the blocks of another one, to start a training from (--init).",
                  "transplant");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory to take blocks from");
    add_text(app, "--out", o.out, "DIR", "model directory to make; nothing is overwritten");
    add_text(app, "--blocks", o.blocks, "LIST",
             "for each block of the new model the one it comes from, from 0: 0-5,0-5 or 0,2,4; fresh:N for N new ones");
    add_text(app, "--inherit", o.inherit, "PARTS",
             "what comes along, separated by commas: " + joined(transplant_parts));
    add_integer(app, "--width", o.width, 0, max_size, "C, the leading part of the source's (0: all of it)");
    add_integer(app, "--heads", o.heads, 0, max_size, "H, the first of the source's (0: by the width)");
    add_truth(app, "--rescale-q", o.rescale,
              "queries of moved blocks scaled so that logits stay, where they are divided by the layer's number");
    add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(), "of what starts fresh");
    const Flag alone = add_text(app, "--refresh", o.refresh, "DIR",
                                "makes no model: rewrites the modelling files that a model directory, or every "
                                "checkpoint of a run, carries for transformers, if another version wrote them");
    stand_alone(app, alone, {"--model", "--out"});
  };
  return run_program(app, argc, argv, flags, [&] {
    o.seed_given = is_given(app, "--seed");
    return is_given(app, "--refresh") ? refresh(o.refresh) : run(o);
  });
}
