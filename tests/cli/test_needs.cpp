// Flags that have an effect only beside others. --help-all says what each one needs; every row of that table is tried
// in every program, and a flag without a row must be known here to need nothing.
#include <map>
#include <set>

#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Words = std::vector<std::string>;

// A flag as --help-all shows it.
struct Shown {
  std::string name, type, about;
  // "--temperature", "--schedule other than constant", "--world|--x": each of them is needed.
  Words needs() const {
    Words found;
    const std::string mark = "(needs --";  // other needs are no flags
    for (size_t at = about.find(mark); at != std::string::npos; at = about.find(mark, at + 1))
      found.push_back(about.substr(at + mark.size() - 2, about.find(')', at) - at - mark.size() + 2));
    return found;
  }
};

std::vector<Shown> flags_of(const TempDir& scratch, const std::string& program) {
  std::vector<Shown> all;
  std::istringstream lines(run_program_inside(scratch, {program, "--help-all"}).output);
  for (std::string line; std::getline(lines, line);) {
    const size_t text = line.find_first_not_of(' ');
    if (line.starts_with("  --")) {
      const size_t gap = std::min(line.find("  ", 2), line.size()), space = std::min(line.find(' ', 2), gap);
      all.push_back({line.substr(2, space - 2), line.substr(space, gap - space), line.substr(gap)});
    } else if (text == 26 && !all.empty()) {
      all.back().about += " " + line.substr(text);
    }
  }
  return all;
}

// "--a 1 --b 2" as a map.
std::map<std::string, std::string> pairs_of(const std::string& text) {
  std::map<std::string, std::string> pairs;
  const Words words = split_words(text);
  for (size_t i = 0; i < words.size(); i += 2) pairs[words[i]] = words[i + 1];
  return pairs;
}

// A value that the flag takes and that is not its default; "" of a switch.
std::string value_of(const Shown& flag) {
  static const auto values = pairs_of(
      "--kd-tau 2 --kd-reduction element --muon-lr 0.5 --muon-scale original --muon-polynomial polar_express --gpu "
      "h200 --mode "
      "continue --kv-owners [0,2] --value-layers [1] --norm rmsnorm --x tokens --style llama3 --lambda-scale frozen "
      "--vectors 30 --tsne-vectors 30 --rank-rate 100 --num-kv-shared-layers 1 --heads 0.0 --ffn 24 --mirror-offset 2 "
      "--attention-window-pattern SL --documents after --router-init random --decay routers --lambda2 frozen "
      "--router-bound literal --loss train "
      "--loop-norm all --value-from x0 --depth-alpha 0.75 "
      "--engram-order 2 --engram-boundary [0] --engram-multipliers [[1,3,5]]");
  if (values.contains(flag.name)) return values.at(flag.name);
  if (flag.type.empty()) return "";
  return flag.type.starts_with(" INT") ? "3" : flag.type == " FLOAT" ? "0.5" : flag.type == " BOOL" ? "false" : "x";
}

// Words that meet a need, by its first alternative.
Words meeting(const std::string& need) {
  static const std::map<std::string, std::string> values = [] {
    auto pairs = pairs_of(
        "--temperature 1 --out made --teacher none --weight-decay 0.1 --world 2 --vocab 300 --prompts none --top-p 0.9 "
        "--estimate 2 --num-kv-shared-layers 1 --branch none --steps 3 --engram-layers [1] "
        "--attention-window 5");
    pairs["--schedule other than constant"] = "linear", pairs["--schedule wsd_*"] = "wsd_linear",
    pairs["--rounds other than 1"] = "3";
    pairs["--data arith:*|prosqa*"] = "arith:3", pairs["--tokens text:*"] = "text:none";
    return pairs;
  }();
  if (need == "--exit-gate true") return split_words("--loop stack --loop-passes 2 --exit-gate true");
  const std::string first = need.substr(0, need.find(" or "));
  const size_t space = first.find(' ');
  const std::string flag = first.substr(0, space);
  if (values.contains(first)) return {flag, values.at(first)};
  if (space == std::string::npos) return {flag};  // a switch
  return {flag, first.substr(space + 1, first.find('|') - space - 1)};
}

// Words that leave it unmet; none where the default does.
Words against(const std::string& need) {
  static const auto values = pairs_of(
      "--schedule constant --shuffle windows --weight-decay 0 --dynamic false --value-embeds none --mixing identity "
      "--map inet --variant identity --rounds 1 --routing own --sharing cla "
      "--intermediate-sizes [24,24,24,24] --data text:none --top-p 1 --y routing");
  const std::string flag = need.substr(0, need.find(' '));
  if (need == "--sharing cla") return {flag, "list"};
  return values.contains(flag) ? Words{flag, values.at(flag)} : Words{};
}

// A model and data that take no time.
const Words small =
    split_words("--data arith:3 --train-samples 40 --test-samples 8 --width 8 --ffn 24 --layers 4 --heads 2 --batch 1");

// What else the program asks for.
Words usual_words(const std::string& program, const std::string& need) {
  static const std::map<std::string, std::string> all = {{"train_inheritune", "--data arith:3 --out none"},
                                                         {"compare", "--data arith:3 --out none --dry-run"},
                                                         {"generate", "--model none --prompt x"},
                                                         {"evaluate", "--model none --data text:none"},
                                                         {"score", "--model none"},
                                                         {"gradients", "--model none --tokens none --seq 4 --out none"},
                                                         {"analyze", "--model none --data text:none"},
                                                         {"curves", "none"},
                                                         {"prepare", "none --out none"},
                                                         {"transplant", "--model none --out none"},
                                                         {"average", "--model none --out none"},
                                                         {"tokenize", "--tokenizer none"}};
  if (program == "compare" && need.starts_with("--dry-run")) return split_words("--data arith:3 --out none");
  if (all.contains(program)) return split_words(all.at(program));
  Words words = joined(small, Words{"--out", "none"});
  if (program == "train_combined") words = joined(words, Words{"--arch", "mhc+lime"});
  if (!need.starts_with("--dry-run")) words.push_back("--dry-run");
  return words;
}

Outcome call(const TempDir& scratch, const std::string& program, std::initializer_list<Words> parts) {
  Words words = {program};
  for (const Words& part : parts) words = joined(words, part);
  std::erase(words, "");
  return run_program_inside(scratch, words);
}

}  // namespace

TEST_CASE("needs: a flag without what it needs is refused by its name; with that, it is not") {
  const TempDir scratch;
  int rows = 0;
  for (const auto& [program, main] : programs_inside())
    for (const Shown& flag : flags_of(scratch, program)) {
      const Words all = flag.needs(), typed = {flag.name, value_of(flag)};
      for (const std::string& need : all) {
        CAPTURE(program);
        CAPTURE(flag.name);
        CAPTURE(need);
        ++rows;
        Words others;
        for (const std::string& other : all)
          if (other != need) others = joined(others, meeting(other));
        const Words usual = usual_words(program, need);
        const Outcome without = call(scratch, program, {usual, others, against(need), typed});
        check_outcome(without, Exit::usage,
                      "error: " + flag.name + " has no effect without " + need.substr(0, need.find(' ')));
        const Outcome with = call(scratch, program, {usual, others, against(need), typed, meeting(need)});
        CHECK_MESSAGE(!has(with.output, "has no effect"), with.output);
      }
    }
  CHECK(rows > 200);
}

TEST_CASE("needs: every flag has a row, or is known to need nothing") {
  // What is refused elsewhere, with more words, stands here too. The launcher says how many processes there are. With
  // --dry-run and --steps 0 all flags describe the run that is looked at.
  const Words of_training = split_words(
      "--preset --data --tokenizer --val-data --shuffle --documents --train-samples --test-samples --seq --seed --init "
      "--vocab "
      "--width "
      "--layers --heads --kv-heads --head-width --ffn --rope-theta --norm-eps --tie --qk-norm --engram-layers --loop "
      "--block-norm --attention-window --logit-softcap "
      "--backbone --teacher "
      "--steps --batch --accumulate --lr --router-lr --freeze-routers --z-loss --schedule --warmup --weight-decay "
      "--beta1 "
      "--beta2 --adam-eps "
      "--clip --optimizer --decay-schedule --transfer --out --resume --branch --eval-every --eval-samples --save-every "
      "--save-at "
      "--keep "
      "--tensorboard --csv --dry-run --dump-tape --dump-tensors --profile --device --dtype --matmul --sum "
      "--peer-timeout --check-replicas --log-ranks");
  const std::map<std::string, std::string> own = {
      {"train_combined", "--arch"},
      {"train_gpt2", "--positions --bias --activation --scale-attn-by-layer"},
      {"train_lime", "--routing --kv-init"},
      {"train_lime_static", "--top-p --kv-init --decay"},
      {"train_lime_dynamic", "--kv-init --decay"},
      {"train_hyper", "--rate --dynamic --prenorm --layer-index --output-init-scale"},
      {"train_vertical", "--map --residual"},
      {"train_sla", "--distance --sla-heads"},
      {"train_ala", "--stride --include-self"},
      {"train_resformer", "--variant --last-k"},
      {"train_satformer", "--gate --last-k --gate-init"},
      {"train_denseformer", "--dilation --period"},
      {"train_mudd", "--norm --intermediate-sizes --w1-init"},
      {"train_attnres", "--attn-res-block-size"},
      {"train_kv_share", "--sharing"},
      {"train_mhc", "--hc-mult --mixing --reads --start --hc-eps"},
      {"train_shortcuts",
       "--value-embeds --resid --x0 --backout --embed-norm --unet --lanes-from --attn-saved --mudd-tail"},
      {"train_gated_streams", "--hc-count --hc-lowrank"},
      {"train_gemma3n", "--hidden-size-per-layer-input --laurel-rank --laurel-form --embed-scale"},
      {"train_depth_attention", "--depth-start --depth-stride --depth-recent"},
      {"train_moda", "--depth-start --depth-window --ffn-kv"},
      {"train_inheritune",
       "--reference --start --grow --mode --inherit-positions --inherit-final-norm --tolerance --rounds"},
      {"compare", "--arch --seeds --backbone-seeds --more-seeds --every-rate --hold-decay --pairs --jobs"},
      {"generate",
       "--model --prompt --prompts --tokenizer --max-new --keep-last --stop --temperature "
       "--repetition-penalty --show-special --dtype --device"},
      {"evaluate",
       "--model --data --tokenizer --split --seq --documents --val-data --test-samples --batch --samples --estimate "
       "--device"},
      {"score", "--model --pairs --tokenizer --prefix-token --batch-tokens --device"},
      {"gradients", "--model --tokens --batch --seq --documents --out --device --dtype --matmul"},
      {"analyze", "--model --data --what --dump --out --sequences --length --seed --split --val-data --device"},
      {"curves", "--out --y"},
      {"prepare", "--out --tokenizer --vocab --eot --field --special-tokens --skip-bad --val --shard-tokens"},
      {"average", "--model --last --steps --out"},
      {"transplant", "--model --out --blocks --inherit --width --heads --rescale-q --seed --refresh"},
      {"tokenize", "--tokenizer --decode"}};
  const TempDir scratch;
  for (const auto& [program, main] : programs_inside()) {
    std::set<std::string> known = {"--help", "--help-all", "--version", "--list-presets"};
    if (program.starts_with("train_") || program == "compare") known.insert(of_training.begin(), of_training.end());
    if (const auto found = own.find(program); found != own.end())
      for (const std::string& flag : split_words(found->second)) known.insert(flag);
    for (const Shown& flag : flags_of(scratch, program)) {
      const bool decided = known.contains(flag.name) || !flag.needs().empty();
      CHECK_MESSAGE(decided, program << " " << flag.name << ": state its needs beside it, or add it here");
    }
  }
}

TEST_CASE("needs: a value of an option may need another option") {
  const TempDir scratch;
  const auto plan = [&](const std::string& arch, const std::string& more) {
    return train(scratch, joined(usual_words("train_" + arch, ""), split_words(more)), arch);
  };
  check_outcome(plan("kv_share", "--sharing suffix"), Exit::usage,
                "--sharing suffix has no effect without --num-kv-shared-layers");
  check_outcome(plan("kv_share", "--sharing suffix --num-kv-shared-layers 1"), Exit::done, "parameters");
  check_outcome(plan("shortcuts", "--value-embeds list"), Exit::usage,
                "--value-embeds list has no effect without --value-layers");
  check_outcome(plan("shortcuts", "--value-embeds list --value-layers [1]"), Exit::done, "parameters");
}

TEST_CASE("needs: the options of compare's --arch have the trainers' needs") {
  const TempDir scratch;
  const auto compare = [&](const std::string& archs, const std::string& more = "") {
    const Words words = {"compare", "--arch", archs};
    return run_program_inside(scratch, joined(words, usual_words("train_llama", ""), split_words(more)));
  };
  check_outcome(compare("llama,kv_share:num_kv_shared_layers=1"), Exit::usage,
                "num_kv_shared_layers has no effect without sharing=suffix");
  check_outcome(compare("kv_share:sharing=suffix"), Exit::usage,
                "sharing=suffix has no effect without num_kv_shared_layers");
  check_outcome(compare("mhc:mixing=identity:hc_sinkhorn_iters=3"), Exit::usage,
                "hc_sinkhorn_iters has no effect without mixing=sinkhorn");
  check_outcome(compare("hyper:dynamic=false:norm=rmsnorm"), Exit::usage, "norm has no effect without dynamic=true");
  const Outcome good = compare("kv_share:sharing=suffix:num_kv_shared_layers=1,mhc:hc_sinkhorn_iters=3");
  check_outcome(good, Exit::done, "mhc:hc_sinkhorn_iters=3");
  CHECK(!has(good.output, "has no effect"));
  check_outcome(compare("llama,attnres", "--router-lr 0.1"), Exit::usage, "--router-lr has no effect");
  check_outcome(compare("llama,lime", "--router-lr 0.1"), Exit::done, "lime");
}

TEST_CASE("needs: what a preset, a file or an earlier run set is a note, and no refusal") {
  const TempDir scratch;
  const Words tiny = split_words("--width 8 --layers 2 --heads 2 --vocab 256 --seq 16 --dry-run");
  const auto preset = [&](const std::string& more) { return train(scratch, joined(tiny, split_words(more)), "gpt2"); };
  const Outcome noted = preset("--preset gpt2-medium-fineweb --schedule constant");
  check_outcome(noted, Exit::done, "note: --lr-floor 0.05 of the preset or the run has no effect without --schedule");
  CHECK(!has(preset("--preset gpt2-medium-fineweb").output, "has no effect"));

  const std::string dir = scratch.file("model"), config = dir + "/config.json", none = "\"num_kv_shared_layers\": 0";
  check_outcome(train(scratch, joined(small, Words{"--steps", "0", "--out", dir}), "kv_share"), Exit::done, "");
  std::string text = read_text(config);
  REQUIRE(has(text, none));
  text.replace(text.find(none) + none.size() - 1, 1, "1");
  write_text(config, text);
  std::filesystem::remove(dir + "/manifest.json");
  check_outcome(run_program_inside(scratch, {"evaluate", "--model", dir, "--data", "arith:3", "--test-samples", "8"}),
                Exit::done, "config.json: num_kv_shared_layers 1 has no effect without sharing suffix");
}

TEST_CASE("needs: what the data or the model decides") {
  const TempDir scratch;
  const std::string model = scratch.file("model"), other = scratch.file("other");
  check_outcome(train(scratch, joined(small, Words{"--steps", "0", "--out", model})), Exit::done, "");
  check_outcome(train(scratch, joined(small, Words{"--steps", "0", "--out", other, "--router-lr", "0.1"})), Exit::usage,
                "--router-lr has no effect");
  const Words inherit = split_words("train_inheritune --data arith:3 --train-samples 40 --batch 1 --dry-run");
  check_outcome(run_program_inside(scratch, joined(inherit, Words{"--reference", model, "--router-lr", "0.1"})),
                Exit::usage, "--router-lr has no effect");
  const auto transplant = [&](const std::string& more) {
    const Words words = {"transplant", "--model", scratch.file("model"), "--out", scratch.file("made")};
    return run_program_inside(scratch, joined(words, split_words(more)));
  };
  check_outcome(transplant("--seed 7"), Exit::usage, "--seed 7 has no effect");
  check_outcome(transplant("--seed 7 --blocks 0,fresh:1"), Exit::done, "wrote");
  write_text(scratch.file("plain.txt"), "no JSON lines here");
  const auto prepare = [&](const std::string& input) {
    return run_program_inside(scratch, {"prepare", "--tokenizer", "none", "--field", "body", "--out",
                                        scratch.file("tokens"), scratch.file(input)});
  };
  check_outcome(prepare("plain.txt"), Exit::usage, "--field body has no effect without JSON lines");
  write_text(scratch.file("lines.jsonl"), "{\"body\": \"a text\"}\n");
  check_outcome(prepare("lines.jsonl"), Exit::no_input, "none");
}
