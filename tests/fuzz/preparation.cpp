// Any bytes as state.json or manifest.json of `prepare`, which the first line of the input names: as they are, and
// where they are a JSON object also as a state with the right checksum. What prepare then calls complete has the right
// tokens. In the input, @ stands for the directory of the test.
#include "data/sealed_json.h"
#include "data/tokenizer.h"
#include "engine/io/json.h"
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

namespace fs = std::filesystem;

std::string in(const std::string& name) { return scratch() + "/" + name; }

std::vector<std::string> command(const std::string& out) {
  return {"--tokenizer", in("bytes.json"), "--eot", "z", "--val", "0.1", "--out", in(out), in("text")};
}

// whole: complete. begun: the second file was refused, with the first one encoded.
void make_directories() {
  Tokenizer::bytes().save(scratch());
  fs::rename(in("tokenizer.json"), in("bytes.json"));
  fs::create_directory(in("text"));
  write_file(in("text/a.jsonl"), "{\"text\": \"" + std::string(4'300'000, 'a') + "\"}\n");
  write_file(in("text/b.jsonl"), "{\"text\": ");
  require(call("prepare", command("begun")) == 65, "damaged JSON is taken");
  write_file(in("text/b.jsonl"), "{\"text\": \"the end\"}\n");
  require(call("prepare", command("whole")) == 0, "prepare fails");
}

void try_state(std::string_view state) {
  fs::remove_all(in("out"));
  fs::remove_all(in("out.partial"));
  fs::copy(in("begun.partial"), in("out.partial"));
  write_file(in("out.partial/state.json"), state);
  call_and_check("prepare", command("out"));
  if (!fs::exists(in("out"))) return;
  for (const char* name : {"/train_000001.bin", "/val_000001.bin"})
    require(read_file(in("out") + name) == read_file(in("whole") + name), str(name, " has other tokens"));
}

void try_manifest(std::string_view manifest) {
  fs::remove_all(in("out"));
  fs::remove_all(in("out.partial"));
  fs::create_directory(in("out"));
  write_file(in("out/manifest.json"), manifest);
  call_and_check("prepare", command("out"));
  require(read_file(in("out/manifest.json")) == manifest, "the manifest was changed");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (!fs::exists(in("whole"))) make_directories();
  const std::string_view input = text_of(data, size);
  const size_t end = input.find('\n');
  if (end == std::string_view::npos) return 0;
  const std::string_view name = input.substr(0, end);
  std::string contents(input.substr(end + 1));
  for (size_t at = 0; (at = contents.find('@', at)) != std::string::npos; at += scratch().size())
    contents.replace(at, 1, scratch());
  if (name == "manifest.json") try_manifest(contents);
  if (name != "state.json") return 0;
  try_state(contents);
  const auto object = try_parse_json<nlohmann::ordered_json>(contents);
  if (object.is_object()) try_state(seal(object));
  return 0;
}
