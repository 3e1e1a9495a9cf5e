// Any text as --arch of compare.
#include "train/settings/arch_list.h"

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  accept_or_refuse([&] {
    for (const ArchChoice& choice : parse_arch_list(std::string(text_of(data, size)))) {
      const std::string name = choice.file_name();
      require(!name.empty() && name.find('/') == std::string::npos && name[0] != '.', "not a name for a directory");
    }
  });
  return 0;
}
