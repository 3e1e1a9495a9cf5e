// train_inheritune as a user runs it: rounds that inherit and grow, what each starts from, where it ends, resuming in
// any round, and bad input.
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "cli/format.h"
#include "data/shards.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "eval/loaded_model.h"
#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t L = 4;  // blocks of the reference

struct Fault {
  explicit Fault(const char* text) { setenv("CROSSPLY_FAULT", text, 1); }
  ~Fault() { unsetenv("CROSSPLY_FAULT"); }
};

// A text, and a reference that has learned a little of it.
struct Lab {
  TempDir scratch{memory_or_disk()};
  const std::string data = "text:" + scratch.file("text"), reference = scratch.file("reference");

  explicit Lab(const std::string& arch = "gpt2", const std::string& sizes = "--bias false --scale-attn-by-layer true") {
    std::string text;
    for (int i = 0; i < 500; ++i) text += str("the ", i % 7, " of ", (i * i) % 10, i % 3 == 0 ? "\n" : ", ");
    write_text(scratch.file("text"), text);
    const Outcome done = test::train(scratch,
                                     split_words(str("--data ", data, " --layers ", L,
                                                     " --width 16 --heads 2 --seq 16 --batch 4 --steps 200 --lr 0.01",
                                                     " --out ", reference, " ", sizes)),
                                     arch);
    REQUIRE_MESSAGE(done.code == 0, done.output);
  }
  Outcome run(const std::string& flags) const {
    return run_program_inside(scratch, split_words("train_inheritune " + flags));
  }
  Outcome start(const std::string& out, const std::string& flags) const {
    return run(str("--reference ", reference, " --data ", data, " --seq 16 --batch 4 --steps 6 --save-every 2 --out ",
                   scratch.file(out), " ", flags));
  }
  json state(const std::string& out) const { return read_json(scratch.file(out + "/inheritune.json")); }
};

// A row of a model directory, by its name in memory.
std::vector<float> row(const std::string& dir, const std::string& name) {
  LoadedModel model(dir, "cpu", false);
  return model.params.read(model.params.at(name).value);
}
const std::string query = "self_attn.q_proj.weight", norm = "post_attention_layernorm.weight";
std::string of_block(int i, const std::string& rest) { return str("model.layers.", i, ".", rest); }

TEST_CASE("inheritune: grows by the reference's blocks until it is as good, and then is the reference itself") {
  const Lab lab;
  const Outcome done = lab.start("out", "--lr 0 --grow 1");  // what is inherited stays
  check_outcome(done, Exit::done, "round 3, 4 of 4 blocks, matches the reference: ");
  check_outcome(done, Exit::done, "tokens, all of it, in order\n");
  const json state = lab.state("out");
  REQUIRE(state["rounds"].size() == 3);
  for (int i = 0; i < 3; ++i) {
    const json& round = state["rounds"][static_cast<size_t>(i)];
    CHECK(round["blocks"] == 2 + i);
    CHECK(round["matches"] == (i == 2));
    CHECK(round["final_loss"] == round["initial_loss"]);
    const std::string initial = lab.scratch.file("out/" + round["initial"].get<std::string>());
    for (int block = 0; block < 2 + i; ++block)
      for (const std::string& name : {query, norm})
        CHECK(row(initial, of_block(block, name)) == row(lab.reference, of_block(block, name)));
  }
  // All blocks: bit for bit, weights and loss.
  CHECK(state["rounds"][2]["initial_loss"] == state["reference_loss"]);
  CHECK(state["rounds"][2]["parameters"] == state["reference_parameters"]);
  CHECK(read_text(lab.scratch.file("out/initial_3_blocks_4/model.safetensors")) ==
        read_text(lab.reference + "/step_00000200/model.safetensors"));
  // The validation set is the test part of the data, and all of it; evaluate finds the same.
  const Outcome scored = run_program_inside(
      lab.scratch, split_words(str("evaluate --model ", lab.reference, " --data ", lab.data, " --split test")));
  CHECK(has(scored.output, format_number("loss %.6f\n", state["reference_loss"])));
  CHECK(has(scored.output, "scored " + format_count(state["validation_tokens"]) + " of "));
  const Outcome of_round = run_program_inside(
      lab.scratch, split_words("evaluate --model " + lab.scratch.file("out/round_1_blocks_2") + " --data " + lab.data));
  CHECK(has(of_round.output, format_number("loss %.6f\n", state["rounds"][0]["final_loss"])));
}

TEST_CASE("inheritune: ends with a table for 80 columns, a page and a picture") {
  const Lab lab;
  const Outcome done = lab.start("out", "--lr 0.001 --rounds 1");
  const size_t table = done.output.find("\nround  blocks  parameters");
  REQUIRE_MESSAGE(table != std::string::npos, done.output);
  std::istringstream lines(done.output.substr(table + 1));
  for (std::string line; std::getline(lines, line) && !line.starts_with("results:");)
    CHECK_MESSAGE(line.size() <= 80, line);
  check_outcome(done, Exit::done, "does not match the reference");
  const std::string parameters = format_count(lab.state("out")["rounds"][0]["parameters"]) + " parameters, ";
  for (const std::string& line : {parameters, std::string("step 6/6  loss "), std::string("validation loss ")})
    CHECK_MESSAGE(has(done.output, "\nround 1 (2 blocks): " + line), done.output);
  const std::string page = read_text(lab.scratch.file("out/inheritune.md"));
  CHECK(has(page, "| 1 | 2 | "));
  CHECK(has(page, "does not match the reference"));
  const std::string picture = read_text(lab.scratch.file("out/inheritune.svg"));
  CHECK(has(picture, "reference, 4 blocks"));
  CHECK(has(picture, "round 1, 2 blocks"));
  CHECK(!has(picture, "of the first"));
  check_outcome(lab.start("fewer", "--lr 0 --rounds 1 --eval-samples 5"), Exit::done, "(5 of 34 sequences)");
  CHECK(lab.state("fewer")["validation_sequences"] == 34);
  CHECK(has(read_text(lab.scratch.file("fewer/inheritune.svg")), "between the ends: of 5 sequences"));
}

TEST_CASE("inheritune: a run that fails or is stopped in any round is resumed bit for bit") {
  const Lab lab;
  const std::string recipe = "--lr 0.0003 --warmup 2 --grow 1 --rounds 2";
  check_outcome(lab.start("whole", recipe), Exit::done, "round 2, 3 of 4 blocks, does not match the reference");
  const std::string resume = "--resume --out " + lab.scratch.file("part");
  {
    const Fault fault("0:4:exit=74");
    check_outcome(lab.start("part", recipe), Exit::io, "CROSSPLY_FAULT");  // in round 1
  }
  {
    const Fault fault("0:1:exit=74");  // round 1 goes on behind its first step, round 2 does not begin
    check_outcome(lab.run(resume), Exit::io, "round 2 (3 blocks): validation loss");
  }
  {
    const Fault fault("0:4:exit=75");
    check_outcome(lab.run(resume), Exit::stopped, "to continue: train_inheritune --resume --out ");
  }
  CHECK(lab.state("part")["rounds"][1]["final_loss"].is_null());
  check_outcome(lab.run(resume + "/."), Exit::done, "resumed after step 2");  // the same directory
  for (const std::string file :
       {"/inheritune.json", "/inheritune.md", "/inheritune.svg", "/round_2_blocks_3/step_00000006/model.safetensors",
        "/round_2_blocks_3/step_00000006/optimizer.safetensors"})
    CHECK_MESSAGE(read_text(lab.scratch.file("whole" + file)) == read_text(lab.scratch.file("part" + file)), file);
  // A run that is done says so again, and goes on where more rounds are allowed.
  check_outcome(lab.run(resume), Exit::done, "round 2, 3 of 4 blocks, does not match the reference");
  check_outcome(lab.run(resume + " --rounds 3"), Exit::done, "round 3, 4 of 4 blocks, ");
  // What a kill left beside a model that another process then wrote; a process of this number there never is.
  const std::string killed = lab.scratch.file("part/.tmp-initial_1_blocks_2-1073741824");
  fs::create_directory(killed);
  check_outcome(lab.run(resume + " --rounds 3"), Exit::done, "round 3, 4 of 4 blocks, ");
  CHECK(!fs::exists(killed));
  check_outcome(lab.run(resume + " --grow 2"), Exit::usage, "has grow 1, the flags say 2");
  check_outcome(lab.run(resume + " --steps 9"), Exit::usage, "has --steps 6 a round, the flags say 9");
  check_outcome(lab.run(resume + " --lr 0.1"), Exit::usage, "--lr");
}

TEST_CASE("inheritune: reinherit starts each round from the reference, continue from what the last one has trained") {
  const Lab lab;
  for (const std::string mode : {"reinherit", "continue"}) {
    CAPTURE(mode);
    check_outcome(lab.start(mode, "--lr 0.0003 --grow 1 --rounds 2 --mode " + mode), Exit::done, "round 2");
    const std::string initial = lab.scratch.file(mode + "/initial_2_blocks_3"),
                      trained = lab.scratch.file(mode + "/round_1_blocks_2");
    for (const std::string& name : {query, norm}) {
      CHECK(row(trained, of_block(1, name)) != row(lab.reference, of_block(1, name)));
      CHECK(row(initial, of_block(1, name)) == row(mode == "continue" ? trained : lab.reference, of_block(1, name)));
      CHECK(row(initial, of_block(2, name)) == row(lab.reference, of_block(2, name)));
    }
    for (const std::string name : {"model.embed_tokens.weight", "model.embed_positions.weight", "model.norm.weight"})
      CHECK(row(initial, name) == row(mode == "continue" ? trained : lab.reference, name));
  }
}

TEST_CASE("inheritune: positions and the last norm start anew where they are not inherited") {
  const Lab lab;
  check_outcome(lab.start("out", "--lr 0 --rounds 1 --inherit-positions false --inherit-final-norm false"), Exit::done,
                "round 1");
  const std::string initial = lab.scratch.file("out/initial_1_blocks_2"), fresh = lab.scratch.file("fresh");
  REQUIRE(test::train(lab.scratch,
                      split_words(str("--data ", lab.data, " --layers 2 --width 16 --heads 2 --seq 16 --steps 0",
                                      " --bias false --scale-attn-by-layer true --out ", fresh)),
                      "gpt2")
              .code == 0);
  // A new model of the same seed is what the reference was before its training: that is not what starts anew.
  const std::string positions = "model.embed_positions.weight";
  CHECK(row(initial, positions) != row(fresh, positions));
  CHECK(row(initial, positions) != row(lab.reference, positions));
  CHECK(row(initial, "model.norm.weight") == row(fresh, "model.norm.weight"));
  CHECK(row(initial, "model.embed_tokens.weight") == row(lab.reference, "model.embed_tokens.weight"));
  CHECK(row(initial, of_block(1, query)) == row(lab.reference, of_block(1, query)));
}

TEST_CASE("inheritune: the tolerance decides, and a start of all blocks is one round") {
  const Lab lab;
  check_outcome(lab.start("near", "--lr 0 --tolerance 100"), Exit::done, "round 1, 2 of 4 blocks, matches");
  CHECK(lab.state("near")["rounds"].size() == 1);
  check_outcome(lab.start("all", "--lr 0 --start 4"), Exit::done, "round 1, 4 of 4 blocks, matches");
  check_outcome(lab.start("far", "--lr 0 --start 2 --steps 1 --rounds 1"), Exit::done, "\n--rounds 1 ends it");
  check_outcome(lab.start("last", "--lr 10 --start 3"), Exit::done, "5 blocks would be more than it has");
}

TEST_CASE("inheritune: takes LLaMAs, and models whose layers are connected") {
  const std::string run = "--lr 0 --grow 1 --rounds 3";
  for (const std::string arch : {"llama", "lime", "denseformer", "resformer"}) {
    CAPTURE(arch);
    const Lab lab(arch, "--ffn 24");
    check_outcome(lab.start("out", run), Exit::done, "round 3, 4 of 4 blocks, matches the reference");
    CHECK(lab.state("out")["rounds"][2]["initial_loss"] == lab.state("out")["reference_loss"]);
  }
}

TEST_CASE("inheritune: a loss that is not finite ends it with 77, and the checkpoint stays") {
  const Lab lab;
  {
    const Fault fault("0:4:nan");
    check_outcome(lab.start("out", "--lr 0 --rounds 1"), Exit::not_finite, "step 4: loss nan");
  }
  CHECK(fs::exists(lab.scratch.file("out/round_1_blocks_2/step_00000002")));
  check_outcome(lab.run("--resume --out " + lab.scratch.file("out")), Exit::done, "resumed after step 2");
}

TEST_CASE("inheritune: a dry run plans the rounds and writes nothing") {
  const Lab lab;
  const Outcome plan = lab.start("out", "--dry-run --grow 1");
  check_outcome(plan, Exit::done, "\n3           4 ");
  CHECK(!fs::exists(lab.scratch.file("out")));
  const Lab streams("mhc", "--ffn 24");  // which has an option of this name
  check_outcome(streams.start("out", "--dry-run --start 3 --grow 1"), Exit::done, "\n2           4 ");
}

TEST_CASE("inheritune: bad input is refused in a line before anything is written") {
  const Lab lab;
  const TempDir& scratch = lab.scratch;
  const auto refuses = [&](const std::string& flags, Exit code, const std::string& says) {
    CAPTURE(flags);
    const Outcome got = lab.start("bad", flags);
    check_outcome(got, code, says);
    CHECK(got.output.rfind("error: ") == got.output.find("error: "));
    CHECK(!fs::exists(scratch.file("bad")));
  };
  refuses("--start 5", Exit::usage, "--start 5: the reference has 4 blocks");
  refuses("--start 0", Exit::usage, "--start");
  refuses("--start 3 --grow 2", Exit::usage, "a second round would have 5 blocks, the reference has 4");
  refuses("--grow 0", Exit::usage, "--grow");
  refuses("--reference " + scratch.file("nowhere"), Exit::no_input, "nowhere");
  refuses("--width 8", Exit::usage, "--width is for the trainers");
  refuses("--init " + lab.reference, Exit::usage, "--init is for the trainers");
  refuses("--backbone llama", Exit::usage, "--backbone: 'llama' is not one of: gpt2");
  refuses("--vocab 300", Exit::usage, "--vocab is for the trainers");
  refuses("--log-ranks", Exit::usage, "in one process");
  const std::pair<const char*, const char*> of_torchrun[] = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}};
  for (const auto& [name, value] : of_torchrun) setenv(name, value, 1);
  refuses("", Exit::usage, "train_inheritune trains in one process");
  for (const auto& [name, value] : of_torchrun) unsetenv(name);
  refuses("--steps 0", Exit::usage, "--steps 0");
  refuses("--mode other", Exit::usage, "--mode");
  refuses("--data arith:3 --seq 0", Exit::usage, "sequences of 57 tokens: the model has 16 positions");
  refuses("--seq 32", Exit::usage, "the model has 16 positions");
  refuses("--test-samples 100000", Exit::usage, "there are only");
  refuses("--resume --reference " + scratch.file("nowhere"), Exit::no_input, "nowhere");
  check_outcome(lab.run("--resume --out " + scratch.file("bad")), Exit::usage, "there is no run of train_inheritune");
  for (const std::string preset : {"", " --preset gpt2-medium"})
    check_outcome(lab.run("--data " + lab.data + preset), Exit::usage, "--reference is needed");

  write_text(scratch.file("empty"), "");
  refuses("--data text:" + scratch.file("empty"), Exit::bad_data, "empty");

  // Token shards, which need no tokenizer: no window to validate, tokens beyond the vocabulary.
  write_shard(scratch.file("train.bin"), std::vector<uint32_t>(400, 7), ShardFormat::uint16);
  write_shard(scratch.file("short.bin"), std::vector<uint32_t>(9, 7), ShardFormat::uint16);
  write_shard(scratch.file("large.bin"), std::vector<uint32_t>(400, 300), ShardFormat::uint16);
  const std::string shards = "--data " + scratch.file("train.bin") + " --val-data " + scratch.file("");
  refuses(shards + "short.bin", Exit::bad_data, "no shard has the 17 tokens of one window");
  refuses(shards + "large.bin", Exit::bad_data, "large.bin: token 0 is 300");
  const std::string small = scratch.file("small");
  REQUIRE(test::train(scratch,
                      split_words("--vocab 50 --layers 2 --width 16 --heads 2 --seq 16 --steps 0 --data " +
                                  scratch.file("train.bin") + " --out " + small),
                      "gpt2")
              .code == 0);
  refuses("--reference " + small, Exit::bad_data, "has a vocabulary of 256, the model's is 50 (" + small + ")");

  // A directory of somebody else's stays as it is, with and without --resume.
  for (const std::string flags : {"", "--resume"}) {
    fs::create_directory(scratch.file("taken"));
    write_text(scratch.file("taken/notes"), "mine");
    check_outcome(lab.start("taken", flags), Exit::usage, "choose another --out");
    CHECK(read_text(scratch.file("taken/notes")) == "mine");
    CHECK(std::distance(fs::directory_iterator(scratch.file("taken")), {}) == 1);
  }
}

TEST_CASE("inheritune: a reference that was trained on while the rounds were stopped is refused where it is needed") {
  const Lab lab;
  const std::string resume = "--resume --out " + lab.scratch.file("out");
  {
    const Fault fault("0:4:exit=75");
    check_outcome(lab.start("out", "--lr 0 --grow 1"), Exit::stopped, "to continue: ");
  }
  const std::string measured = lab.reference + "/step_00000200", kept = lab.scratch.file("kept");
  fs::copy(measured, kept, fs::copy_options::recursive);
  check_outcome(test::train(lab.scratch, split_words("--resume --keep 1 --steps 202 --out " + lab.reference), "gpt2"),
                Exit::done, "step 202/202");
  REQUIRE(!fs::exists(measured));
  check_outcome(lab.run(resume), Exit::bad_data,
                "other weights than when its loss was measured; put them back, or let this round be the last one: "
                "--rounds 1\n");
  check_outcome(lab.run(resume + " --rounds 1"), Exit::done, "--rounds 1 ends it");
  check_outcome(lab.run(resume + " --rounds 2"), Exit::bad_data, "other weights");
  fs::remove_all(lab.reference + "/step_00000202");
  fs::rename(kept, measured);
  check_outcome(lab.run(resume + " --rounds 2"), Exit::done, "round 2, 3 of 4 blocks");
}

TEST_CASE("inheritune: the losses that decide have products in fp32, whatever the rounds are trained with") {
  const Lab lab;
  check_outcome(lab.start("fp32", "--lr 0 --rounds 1"), Exit::done, "round 1");
  check_outcome(lab.start("split", "--lr 0 --rounds 1 --matmul bf16x3"), Exit::done, "round 1");
  CHECK(lab.state("split")["reference_loss"] == lab.state("fp32")["reference_loss"]);
  CHECK(lab.state("split")["rounds"][0]["initial_loss"] == lab.state("fp32")["rounds"][0]["initial_loss"]);
}

TEST_CASE("inheritune: does not go on with another reference, other data or a damaged record") {
  const Lab lab;
  const TempDir& scratch = lab.scratch;
  const std::string out = scratch.file("out"), resume = "--resume --out " + out, path = out + "/inheritune.json";
  check_outcome(lab.start("out", "--lr 0 --grow 1 --rounds 1"), Exit::done, "round 1");
  const std::string record = read_text(path);

  const std::string text = read_text(scratch.file("text"));
  write_text(scratch.file("text"), text + "more");
  check_outcome(lab.run(resume), Exit::bad_data, "is not the data");
  write_text(scratch.file("text"), text);

  json changed = known_json(record);
  changed["reference_digest"] = "0";
  write_text(path, json_text(changed));
  check_outcome(lab.run(resume + " --rounds 2"), Exit::bad_data, "holds other weights than when its loss was measured");

  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"mode\": \"reinherit\"", "\"mode\": \"sideways\""},
           {"\"blocks\": 2", "\"blocks\": 3"},
           {"\"rounds\": [", "\"circles\": ["},
           {"\"recipe\"", "\"receipt\""},
           {"\"start\": 2", "\"start\": -2"},
           {"\"reference_loss\": ", "\"reference_loss\": \"low\", \"x\": "}}) {
    CAPTURE(from);
    std::string damaged = record;
    damaged.replace(damaged.rfind(from), from.size(), to);
    write_text(path, damaged);
    check_outcome(lab.run(resume), Exit::bad_data, "inheritune.json");
    CHECK(read_text(path) == damaged);
  }
  write_text(path, record);
  check_outcome(lab.run(resume + " --rounds 2"), Exit::done, "round 2, 3 of 4 blocks");
}

}  // namespace

TEST_CASE("inheritune: a run goes on after its directory was renamed in a round, with and without a checkpoint") {
  const Lab lab;
  const std::string recipe = "--lr 0.0003 --warmup 2 --grow 1 --rounds 2";
  check_outcome(lab.start("whole", recipe), Exit::done, "round 2");
  const std::string place = lab.scratch.file("part");
  {
    const Fault fault("0:1:exit=74");  // round 1 has no checkpoint yet
    check_outcome(lab.start("part", recipe), Exit::io, "CROSSPLY_FAULT");
  }
  fs::rename(place, place + "2");
  {
    const Fault fault("0:4:exit=74");
    check_outcome(lab.run("--resume --out " + place + "2"), Exit::io, "CROSSPLY_FAULT");
  }
  fs::rename(place + "2", place + "3");
  check_outcome(lab.run("--resume --out " + place + "3"), Exit::done, "resumed after step 2");
  for (const std::string file :
       {"/round_1_blocks_2/step_00000006/model.safetensors", "/round_2_blocks_3/step_00000006/optimizer.safetensors"})
    CHECK_MESSAGE(read_text(lab.scratch.file("whole" + file)) == read_text(place + "3" + file), file);
}

TEST_CASE("inheritune: a reference under another name is taken where it has the weights that were measured") {
  const Lab lab;
  {
    const Fault fault("0:4:exit=74");
    check_outcome(lab.start("out", "--lr 0.0003 --grow 1 --rounds 2"), Exit::io, "CROSSPLY_FAULT");
  }
  const std::string resume = "--resume --out " + lab.scratch.file("out"), moved = lab.scratch.file("elsewhere");
  const std::string first = lab.reference + "/step_00000180";
  REQUIRE(fs::exists(first));
  check_outcome(lab.run(resume + " --reference " + first), Exit::bad_data, "holds other weights than");
  fs::rename(lab.reference, moved);
  check_outcome(lab.run(resume), Exit::no_input, "if it has moved, say with --reference where it is now");
  check_outcome(lab.run(resume + " --reference " + moved), Exit::done, "round 2, 3 of 4 blocks");
  CHECK(lab.state("out")["recipe"]["reference"] == moved);
  check_outcome(lab.run(resume + " --rounds 3"), Exit::done, "round 3, 4 of 4 blocks");  // the new name is kept
}

TEST_CASE("inheritune: a result or a figure that cannot be written ends no round, and --resume writes it") {
  const Lab lab;
  {
    const Fault fault("0:4:exit=74");
    check_outcome(lab.start("out", "--lr 0.0003 --grow 1 --rounds 2"), Exit::io, "CROSSPLY_FAULT");
  }
  const std::string out = lab.scratch.file("out"), resume = "--resume --out " + out;
  const std::vector<std::string> blocked = {out + "/inheritune.md", out + "/inheritune.svg",
                                            out + "/round_1_blocks_2/curve.svg"};
  for (const std::string& path : blocked) {
    REQUIRE(fs::remove(path));
    fs::create_directory(path);
  }
  Outcome done = lab.run(resume);
  check_outcome(done, Exit::io, "the rounds are done and kept: mend that, then --resume --out");
  CHECK_MESSAGE(has(done.output, "round 2, 3 of 4 blocks"), done.output);
  CHECK_MESSAGE(has(done.output, "note: cannot write " + blocked[0]), done.output);
  CHECK(lab.state("out")["rounds"].size() == 2);
  for (int i = 0; i < 2; ++i) fs::remove(blocked[static_cast<size_t>(i)]);
  done = lab.run(resume);
  check_outcome(done, Exit::io, "cannot write " + blocked[2]);  // of a round that was done before
  fs::remove(blocked[2]);
  check_outcome(lab.run(resume), Exit::done, "round 2, 3 of 4 blocks");
  for (const std::string& path : blocked) CHECK_MESSAGE(fs::is_regular_file(path), path);
}

TEST_CASE("inheritune: before the first checkpoint the teacher may have moved") {
  const Lab lab;
  const std::string teacher = lab.scratch.file("teacher"), moved = lab.scratch.file("moved");
  fs::copy(lab.reference, teacher, fs::copy_options::recursive);
  {
    const Fault fault("0:1:exit=74");
    check_outcome(lab.start("out", "--lr 0.0003 --rounds 1 --teacher " + teacher), Exit::io, "CROSSPLY_FAULT");
  }
  fs::rename(teacher, moved);
  check_outcome(lab.run("--resume --out " + lab.scratch.file("out") + " --teacher " + moved), Exit::done,
                "starting at step 0");
}

TEST_CASE("inheritune: with --documents validation attends within documents, too") {
  const Lab lab("llama", "--documents after --eot 10");  // the line break
  check_outcome(lab.start("out", "--start 4 --rounds 1 --documents after --eot 10"), Exit::done, "within documents");
  const Outcome scored =
      run_program_inside(lab.scratch, split_words("evaluate --model " + lab.reference + " --data " + lab.data));
  CHECK(has(scored.output, format_number("loss %.6f\n", lab.state("out")["reference_loss"])));
}
