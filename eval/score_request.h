// The lines that `score` reads: what a request asks for, in tokens. Texts become tokens as lm-evaluation-harness does
// it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "eval/scorer.h"

namespace crossply {

struct ScoreRequest {
  nlohmann::ordered_json id;  // discarded: the line has none
  enum Kind { pair, text, generation } kind = pair;
  bool truncated = false;          // the context is too long, and its beginning left out
  std::vector<Passage> passages;   // pair: one; text: its windows
  std::vector<int32_t> prompt;     // generation
  std::vector<std::string> until;  // texts that end it
  int64_t max_new = 0;
};

class ScoreRequests {
 public:
  // prefix: the token that stands for the beginning where there is no context; -1: there is none.
  ScoreRequests(const Tokenizer& tokenizer, int64_t vocab_size, int64_t longest, int32_t prefix)
      : tokenizer_(tokenizer), V_(vocab_size), longest_(longest), prefix_(prefix) {}

  // {"context", "continuation"}, {"text"} or {"context", "max_new_tokens", "until"}, each with any "id" or none. A text
  // may be a list of token ids. {"text", "score_begin": true} also scores the tokens that begin the text, the first of
  // them given itself, as lm-evaluation-harness does. Throws Exit::bad_data, with `where`, for anything else.
  ScoreRequest parse(std::string_view line, const std::string& where) const;
  // What lm-evaluation-harness scores of a choice after an empty context: the token that stands for the beginning, then
  // a space and the sentence. Throws Exit::bad_data, with the key, for one without tokens or with too many.
  std::vector<int32_t> sentence(const std::string& text, const std::string& key) const;

 private:
  using Json = nlohmann::ordered_json;
  std::vector<int32_t> ids_of(const Json& value, const std::string& key) const;
  std::vector<int32_t> prompt_of(const Json& value, const std::string& key) const;
  std::vector<int32_t> checked(std::vector<int32_t> ids, const std::string& key) const;
  std::vector<int32_t> beginning() const;
  void parse_pair(const Json& context, const Json& continuation, ScoreRequest& request) const;
  void parse_generation(const Json& object, ScoreRequest& request) const;
  void parse_text(const Json& object, ScoreRequest& request) const;

  const Tokenizer& tokenizer_;
  int64_t V_, longest_;
  int32_t prefix_;
};

}  // namespace crossply
