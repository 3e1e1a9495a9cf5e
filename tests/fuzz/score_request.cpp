// Any text as a line for `score`, of requests or of minimal pairs.
#include "eval/score_request.h"
#include "eval/minimal_pairs.h"

#include <algorithm>

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer tokenizer = Tokenizer::bytes();
  static constexpr int64_t V = 256, longest = 8;
  accept_or_refuse([&] {
    const ScoreRequests requests(tokenizer, V, longest, 3);
    const TokenPair pair = parse_minimal_pair(text_of(data, size), "line 1", requests).tokens;
    require(tokens_read(pair).shared >= 1, "no token that begins both");
    require(std::ssize(pair.good) <= longest + 1 && std::ssize(pair.bad) <= longest + 1, "more than the model reads");
  });
  accept_or_refuse([&] {
    const ScoreRequest request = ScoreRequests(tokenizer, V, longest, 3).parse(text_of(data, size), "line 1");
    const auto is_token = [](int32_t id) { return id >= 0 && id < V; };
    for (const Passage& passage : request.passages) {
      require(passage.first >= 1 && passage.first < passage.tokens.size(), "nothing to score, or nothing before it");
      require(std::ssize(passage.tokens) <= longest + 1, "more than the model reads");
      require(std::all_of(passage.tokens.begin(), passage.tokens.end(), is_token), "no token");
    }
    if (request.kind != ScoreRequest::generation) return;
    require(!request.prompt.empty() && std::ssize(request.prompt) + request.max_new <= longest, "no room");
    require(std::all_of(request.prompt.begin(), request.prompt.end(), is_token), "no token in the prompt");
  });
  return 0;
}
