// score: how likely a model finds texts, and what it would write, for lm-evaluation-harness (lm_eval_crossply.py) and
// for scripts. One request a line, one answer a line, in the order of the requests:
//
//   {"id": 1, "context": "2 + 2 =", "continuation": " 4"}     {"id":1,"logprob":-1.25,"greedy":true,"tokens":1}
//   {"id": 2, "text": "a whole text"}                         {"id":2,"logprob":-9.5,"tokens":4}
//   {"id": 3, "context": "Q:", "until": ["\n"],
//    "max_new_tokens": 8}                                     {"id":3,"text":" why","ids":[521]}
//
// Each text may be a list of token ids. A context that is too long loses its beginning, and the answer has
// "truncated":true. Answers come at the end of the input, or at an empty line; then the next requests are read. A line
// that is no request ends the program, after what came before it has been answered.
//
// In a whole text, the tokens that begin every text, such as <s>, are given and not scored. With "score_begin": true
// they are scored, and <s> is given before itself: lm-evaluation-harness counts this.
//
// --pairs: instead of requests, files of minimal pairs, and in how many the good sentence is the likelier one.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "cli/standard_streams.h"
#include "cli/ticker.h"
#include "engine/io/control_characters.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "eval/decode.h"
#include "eval/loaded_model.h"
#include "eval/minimal_pairs.h"
#include "eval/score_request.h"
#include "eval/stop_strings.h"

using namespace crossply;

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model, tokenizer, device = "cpu", pairs, json;
  std::optional<int32_t> prefix;
  int64_t batch_tokens = 4096;
};

// --prefix-token, or the model's.
int32_t prefix_token(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer) {
  const int64_t V = model.config.vocab_size;
  if (o.prefix && *o.prefix >= V) fail(Exit::usage, "--prefix-token ", *o.prefix, " is outside the vocabulary of ", V);
  return o.prefix ? *o.prefix : beginning_token(model, tokenizer);
}

// What was written, up to the first of the stops. Special tokens end it where a stop is their text, and are not shown.
std::string written_text(const Tokenizer& tokenizer, std::vector<int32_t> ids, const std::vector<std::string>& until) {
  std::erase_if(ids, [&](int32_t id) { return tokenizer.is_special(id); });
  StopStrings stop(until);
  const std::string text = stop.add(tokenizer.decode(ids));
  return text + stop.finish();
}

class Answers {
 public:
  Answers(LoadedModel& model, const Tokenizer& tokenizer, int64_t batch_tokens)
      : model_(model),
        tokenizer_(tokenizer),
        batch_tokens_(batch_tokens),
        ends_(ending_tokens(model, tokenizer)),
        scorer_(*model.device, model.params, model.config, batch_tokens) {}

  // Prints the answers to all requests, in order, and forgets them.
  void give(std::vector<ScoreRequest>& requests) {
    std::vector<Json> answers(requests.size());
    score(requests, answers);
    generate_all(requests, answers);
    for (size_t i = 0; i < requests.size(); ++i) {
      Json line;
      if (!requests[i].id.is_discarded()) line["id"] = requests[i].id;
      line.update(answers[i]);
      if (requests[i].truncated) line["truncated"] = true;
      // A model of bytes may write what is no UTF-8.
      std::printf("%s\n", printable_json(json_text_mended(line)).c_str());
    }
    flush_standard_output();
    requests.clear();
  }

 private:
  void score(const std::vector<ScoreRequest>& requests, std::vector<Json>& answers) {
    std::vector<Passage> passages;
    for (const ScoreRequest& request : requests)
      passages.insert(passages.end(), request.passages.begin(), request.passages.end());
    Ticker ticker("score", "token");
    const auto scores = scorer_.score(passages, [&](int64_t done, int64_t all) { ticker.tell(done, all); });
    size_t next = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].kind == ScoreRequest::generation) continue;
      Score sum;
      size_t tokens = 0;
      for (const Passage& passage : requests[i].passages) {
        tokens += passage.tokens.size() - passage.first;
        sum.logprob += scores[next].logprob, sum.greedy = sum.greedy && scores[next].greedy;
        ++next;
      }
      answers[i]["logprob"] = sum.logprob;
      if (requests[i].kind == ScoreRequest::pair) answers[i]["greedy"] = sum.greedy;
      answers[i]["tokens"] = tokens;
    }
  }

  void generate_all(const std::vector<ScoreRequest>& requests, std::vector<Json>& answers) {
    std::vector<size_t> order;
    for (size_t i = 0; i < requests.size(); ++i)
      if (requests[i].kind == ScoreRequest::generation) order.push_back(i);
    const auto length = [&](size_t i) { return std::ssize(requests[i].prompt) + requests[i].max_new; };
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return length(a) > length(b); });
    Ticker ticker("score", "text");
    for (size_t begin = 0, end; begin < order.size(); begin = end) {
      const int64_t longest = length(order[begin]);
      end = std::min(begin + static_cast<size_t>(std::clamp<int64_t>(batch_tokens_ / longest, 1, 64)), order.size());
      generate_batch(requests,
                     {order.begin() + static_cast<ptrdiff_t>(begin), order.begin() + static_cast<ptrdiff_t>(end)},
                     longest, answers);
      ticker.tell(static_cast<int64_t>(end), std::ssize(order));
    }
  }

  void generate_batch(const std::vector<ScoreRequest>& requests, const std::vector<size_t>& which, int64_t longest,
                      std::vector<Json>& answers) {
    std::vector<std::vector<int32_t>> prompts, ids(which.size());
    std::vector<StopStrings> stops;
    std::vector<bool> begun(which.size());  // has the row a text?
    int64_t max_new = 0;
    for (const size_t i : which) {
      prompts.push_back(requests[i].prompt), stops.emplace_back(requests[i].until);
      max_new = std::max(max_new, requests[i].max_new);
    }
    Decoder decoder(*model_.device, model_.params, model_.config, std::ssize(which), longest);
    generate(decoder, prompts, max_new, ends_, most_likely, [&](size_t row, int32_t token) {
      const std::string text = tokenizer_.decode({token});
      if (!text.empty()) stops[row].add((begun[row] ? tokenizer_.separator() : "") + text), begun[row] = true;
      ids[row].push_back(token);
      return std::ssize(ids[row]) < requests[which[row]].max_new && !stops[row].found();
    });
    for (size_t row = 0; row < which.size(); ++row) {
      answers[which[row]]["text"] = written_text(tokenizer_, ids[row], requests[which[row]].until);
      answers[which[row]]["ids"] = ids[row];
    }
  }

  LoadedModel& model_;
  const Tokenizer& tokenizer_;
  int64_t batch_tokens_;
  std::vector<int32_t> ends_;
  Scorer scorer_;
};

// The tables on standard output, and the speed on standard error.
Exit score_pairs(const Options& o, LoadedModel& model, const ScoreRequests& requests) {
  std::optional<OutputFile> json;  // before the work, so that a name that cannot be written costs nothing
  if (!o.json.empty()) json.emplace(o.json, 0);
  const std::vector<PairFile> files = read_minimal_pairs(o.pairs, requests);
  std::vector<TokenPair> pairs;
  int64_t tokens = 0;
  for (const PairFile& file : files)
    for (const MinimalPair& pair : file.pairs) pairs.push_back(pair.tokens), tokens += tokens_read(pair.tokens).sum();
  PairScorer scorer(*model.device, model.params, model.config, o.batch_tokens);
  double seconds = 0;
  std::vector<PairScore> scores;
  {
    Ticker ticker("score", "token");
    scores = scorer.score(pairs, [&](int64_t done, int64_t all) { ticker.tell(done, all); });
    seconds = ticker.seconds();
  }
  const PairResults results = count_pairs(files, scores);
  std::printf("%s", describe(files, results).c_str());
  flush_standard_output();
  if (json) {
    const std::string text = json_text(to_json(files, scores, results)) + "\n";
    json->write(text.data(), text.size());
    json->commit();
  }
  std::fprintf(stderr, "%s tokens in %.1f s, %.0f tokens/s\n", format_count(tokens).c_str(), seconds,
               static_cast<double>(tokens) / seconds);
  return Exit::done;
}

Exit run(const Options& o) {
  LoadedModel model(o.model, o.device, false);
  const Tokenizer tokenizer = model_tokenizer(model, o.tokenizer);
  const ScoreRequests read(tokenizer, model.config.vocab_size, model.config.max_position_embeddings,
                           prefix_token(o, model, tokenizer));
  if (!o.pairs.empty()) return score_pairs(o, model, read);
  Answers answers(model, tokenizer, o.batch_tokens);
  std::vector<ScoreRequest> requests;
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) {
      answers.give(requests);
      continue;
    }
    try {
      requests.push_back(read.parse(line, str("line ", number)));
    } catch (const Error&) {
      answers.give(requests);
      throw;
    }
  }
  const int error = std::ferror(stdin) != 0 ? errno : 0;
  answers.give(requests);
  if (error != 0) fail_io("read", "standard input", error);
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app(
      "Log-probabilities and greedy continuations. Standard input has one request a line, as JSON: {\"context\": T, "
      "\"continuation\": T}, {\"text\": T} or {\"context\": T, \"max_new_tokens\": N, \"until\": [TEXT]}, where T is a "
      "text or a list of token ids; with an \"id\", which the answer then has, or none. The answers come at an "
      "empty line and at the end, in the order of the requests. The tokens that begin every text are given and not "
      "scored; {\"text\": T, \"score_begin\": true} scores them, as lm-evaluation-harness does. With --pairs no "
      "requests are read.",
      "score");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory").required();
    add_text(app, "--pairs", o.pairs, "DIR",
             "accuracy on minimal pairs: a directory of .jsonl files like BLiMP's, or one such file");
    needs(app, add_text(app, "--json", o.json, "FILE", "where to write the accuracies and all log-probabilities, too"),
          {{"--pairs"}});
    add_text(
        app, "--tokenizer", o.tokenizer, "FILE",
        "tokenizer.json, or a directory that has one (default: the model's own; without one, texts are token ids)");
    add_integer(app, "--prefix-token", o.prefix, 0, max_size,
                "what stands before a text without context (default: the tokenizer's beginning of text, else its end)");
    add_integer(app, "--batch-tokens", o.batch_tokens, 1, max_size, "tokens that go through the model together");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
