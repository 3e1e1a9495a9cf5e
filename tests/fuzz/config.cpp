// Any bytes as a config.json. One that is accepted is written and read back as the same.
#include "models/config.h"

#include "engine/io/json.h"
#include "models/disk/config_json.h"
#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = scratch() + "/config.json";
  write_file(path, text_of(data, size));
  Config config;
  accept_or_refuse([&] { config = load_config(path); });
  if (config.vocab_size == 0) return 0;  // refused
  const nlohmann::json written = to_json(config);
  require(to_json(parse_config(known_json(json_text(written)), "written")) == written,
          "a configuration changes when it is written and read back");
  return 0;
}
