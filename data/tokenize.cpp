// tokenize: text on standard input, its token ids out, separated by spaces; or back with --decode.
#include <cstdio>
#include <iostream>
#include <iterator>

#include "cli/program.h"
#include "cli/standard_streams.h"
#include "data/tokenizer.h"
#include "engine/numbers.h"
#include "engine/printable.h"

using namespace crossply;

namespace {

struct Options {
  std::string tokenizer;
  bool decode = false;
};

Exit run(const Options& o) {
  const Tokenizer tokenizer = Tokenizer::read(o.tokenizer);
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  if (o.decode) {
    const std::string decoded = tokenizer.decode(Tokenizer().encode(text));
    std::fwrite(decoded.data(), 1, decoded.size(), stdout);
  } else {
    const char* separator = "";
    for (const int32_t id : tokenizer.encode(text)) {
      std::printf("%s%d", separator, id);
      separator = " ";
    }
    std::printf("\n");
  }
  flush_standard_output();
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Token ids of the text on standard input, separated by spaces.", "tokenize");
  Options o;
  auto flags = [&] {
    add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json, or a directory that has one")->required();
    app.add_flag("--decode", o.decode, "ids on standard input, their text out");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
