#include "eval/score_request.h"

#include <algorithm>
#include <array>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/loaded_model.h"

namespace crossply {
namespace {

using Json = nlohmann::ordered_json;

// Characters that are space to Unicode, and to lm-evaluation-harness: its length in bytes where `text` ends in one.
size_t space_at_end(std::string_view text) {
  static constexpr std::array<std::string_view, 28> spaces = {
      " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f"};
  for (const std::string_view space : spaces)
    if (text.ends_with(space)) return space.size();
  return text.ends_with("\u3000") ? 3 : 0;
}

void refuse_other_keys(const Json& object, const std::vector<std::string>& known) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      fail(Exit::bad_data, "\"", excerpt(key), "\" is no part of such a request");
}

std::vector<std::string> texts_of(const Json& value) {
  std::vector<std::string> texts;
  const Json list = value.is_array() ? value : Json::array({value});
  for (const Json& text : list) {
    if (!text.is_string() || text.get_ref<const std::string&>().empty())
      fail(Exit::bad_data, "\"until\" is ", excerpt(json_text(value)), ", expected texts that are not empty");
    texts.push_back(text);
  }
  return texts;
}

}  // namespace

std::vector<int32_t> ScoreRequests::ids_of(const Json& value, const std::string& key) const {
  std::vector<int32_t> ids;
  if (value.is_string()) {
    ids = tokenizer_.encode(value.get_ref<const std::string&>());
  } else if (value.is_array()) {
    for (const Json& id : value) {
      if (!id.is_number_integer())
        fail(Exit::bad_data, "\"", key, "\" has the token ", excerpt(json_text(id)), ", which is no integer");
      ids.push_back(id.is_number_unsigned() && id.get<uint64_t>() < uint64_t{1} << 31 ? id.get<int32_t>() : -1);
      if (ids.back() < 0) fail(Exit::bad_data, "\"", key, "\" has the token ", json_text(id), ", which is no token id");
    }
  } else {
    fail(Exit::bad_data, "\"", key, "\" is ", excerpt(json_text(value)), ", expected a text or a list of token ids");
  }
  return checked(std::move(ids), key);
}

std::vector<int32_t> ScoreRequests::checked(std::vector<int32_t> ids, const std::string& key) const {
  for (const int32_t id : ids)
    if (id < 0 || id >= V_) fail(Exit::bad_data, "\"", key, "\": token ", id, " is outside the vocabulary of ", V_);
  return ids;
}

// Of a text also what its tokenizer begins texts with; token ids are as they are.
std::vector<int32_t> ScoreRequests::prompt_of(const Json& value, const std::string& key) const {
  if (!value.is_string()) return ids_of(value, key);
  return checked(encode_prompt(tokenizer_, value.get_ref<const std::string&>()), key);
}

std::vector<int32_t> ScoreRequests::beginning() const {
  if (prefix_ < 0)
    fail(Exit::bad_data,
         "there is no token before the first one, and the model knows none that begins or ends a text; give "
         "--prefix-token ID");
  return {prefix_};
}

std::vector<int32_t> ScoreRequests::sentence(const std::string& text, const std::string& key) const {
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) fail(Exit::bad_data, "\"", key, "\" is empty");
  std::vector<int32_t> ids = checked(tokenizer_.encode(" " + text), key);
  const std::vector<int32_t> begin = beginning();
  if (ids.empty() || ids[0] != begin[0]) ids.insert(ids.begin(), begin[0]);
  if (ids.size() == 1) fail(Exit::bad_data, "\"", key, "\" has no tokens: ", excerpt(text));
  if (std::ssize(ids) - 1 > longest_)
    fail(Exit::bad_data, "\"", key, "\" has ", ids.size() - 1, " tokens, the model's longest sequence ", longest_,
         "; take the pair out: ", excerpt(text));
  return ids;
}

void ScoreRequests::parse_pair(const Json& before, const Json& after, ScoreRequest& request) const {
  std::vector<int32_t> context, continuation;
  const bool begun = !before.is_string() || !before.get_ref<const std::string&>().empty();
  if (begun && before.is_string() && after.is_string()) {
    // Spaces belong to what follows them, and the whole decides where tokens end.
    const std::string whole = before.get<std::string>() + after.get<std::string>();
    std::string_view kept = before.get_ref<const std::string&>();
    while (const size_t space = space_at_end(kept)) kept.remove_suffix(space);
    context = prompt_of(std::string(kept), "context"), continuation = prompt_of(whole, "continuation");
    const size_t split = std::min(context.size(), continuation.size());
    continuation.erase(continuation.begin(), continuation.begin() + static_cast<ptrdiff_t>(split));
  } else {
    if (begun) context = prompt_of(before, "context");
    continuation = ids_of(after, "continuation");
  }
  if (context.empty() && !continuation.empty()) {
    context = beginning();
    if (continuation[0] == context[0]) continuation.erase(continuation.begin());
  }
  if (continuation.empty())
    fail(Exit::bad_data, "the \"continuation\" ", excerpt(json_text(after)),
         " has no tokens of its own after its context: there is nothing to score");
  if (std::ssize(continuation) > longest_)
    fail(Exit::bad_data, "the continuation has ", continuation.size(), " tokens, the model's longest sequence ",
         longest_);
  request.truncated = std::ssize(context) + std::ssize(continuation) > longest_ + 1;
  request.passages = {passage_of(context, continuation, longest_)};
}

void ScoreRequests::parse_generation(const Json& object, ScoreRequest& request) const {
  const nlohmann::json most = object.value("max_new_tokens", Json());
  if (!holds<int64_t>(most, 1, static_cast<double>(longest_ - 1)))
    fail(Exit::bad_data, "\"max_new_tokens\" is ", excerpt(json_text(most)), ", expected 1 to ", longest_ - 1,
         ": the model's longest sequence is ", longest_, " tokens, with the context");
  request.max_new = most.get<int64_t>();
  if (object.contains("until")) request.until = texts_of(object["until"]);
  request.prompt = prompt_of(object["context"], "context");
  if (request.prompt.empty()) request.prompt = beginning();
  const int64_t left_out = std::ssize(request.prompt) - (longest_ - request.max_new);
  request.truncated = left_out > 0;
  if (left_out > 0) request.prompt.erase(request.prompt.begin(), request.prompt.begin() + left_out);
}

// A model is asked for the tokens of the text. Those that begin every text are given: it never had to predict them.
void ScoreRequests::parse_text(const Json& object, ScoreRequest& request) const {
  const Json scores_begin = object.value("score_begin", Json(false));
  if (!scores_begin.is_boolean())
    fail(Exit::bad_data, "\"score_begin\" is ", excerpt(json_text(scores_begin)), ", expected true or false");
  std::vector<int32_t> ids = prompt_of(object["text"], "text");
  if (ids.empty()) return;
  const std::vector<int32_t>& prefix = tokenizer_.prefix();
  size_t begin = 0;  // how many tokens begin the text
  if (!scores_begin.get<bool>()) {
    const bool has_prefix = ids.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
    begin = has_prefix ? prefix.size() : 0;
    if (begin == 0 && ids[0] == prefix_) begin = 1;
  }
  if (begin == 0) ids.insert(ids.begin(), beginning()[0]), begin = 1;
  if (static_cast<int64_t>(begin) > longest_)
    fail(Exit::bad_data, "a text begins with ", begin, " tokens, the model's longest sequence has ", longest_);
  request.passages = rolling_passages(ids, begin, longest_);
}

ScoreRequest ScoreRequests::parse(std::string_view line, const std::string& where) const {
  const Json object = parse_json<Json>(line, where);
  ScoreRequest request;
  request.id = Json(Json::value_t::discarded);
  try {
    if (!object.is_object()) fail(Exit::bad_data, "a request is a JSON object");
    if (object.contains("id")) request.id = object["id"];
    if (object.contains("context") && object.contains("continuation")) {
      refuse_other_keys(object, {"id", "context", "continuation"});
      parse_pair(object["context"], object["continuation"], request);
    } else if (object.contains("context") && object.contains("max_new_tokens")) {
      refuse_other_keys(object, {"id", "context", "until", "max_new_tokens"});
      request.kind = ScoreRequest::generation;
      parse_generation(object, request);
    } else if (object.contains("text")) {
      refuse_other_keys(object, {"id", "text", "score_begin"});
      request.kind = ScoreRequest::text;
      parse_text(object, request);
    } else {
      fail(Exit::bad_data,
           "a request has \"context\" and \"continuation\", or \"context\" and \"max_new_tokens\", or \"text\"");
    }
  } catch (const Error& error) {  // also of a tokenizer, for which a word it does not know is wrong usage
    fail(Exit::bad_data, where, ": ", error.what());
  }
  return request;
}

}  // namespace crossply
