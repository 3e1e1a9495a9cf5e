// generate: continues prompts, token by token, with a key/value cache. One prompt is written to the terminal as it
// grows; those of a file are continued side by side, and become JSON lines.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "cli/standard_streams.h"
#include "cli/ticker.h"
#include "data/foreign_format.h"
#include "data/tokenizer.h"
#include "engine/io/control_characters.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "eval/decode.h"
#include "eval/loaded_model.h"
#include "eval/sampling.h"
#include "eval/stop_strings.h"
#include "kernels/optim/optimizer.h"

using namespace crossply;

namespace {

struct Options {
  std::string model, prompts, tokenizer, dtype = "fp32", device = "cpu";
  std::optional<std::string> prompt;
  std::vector<std::string> stop;
  SamplingOptions sampling;
  int64_t max_new = 256, samples = 1, batch = 8, keep_last = 0;
  uint64_t seed = 42;
  bool show_special = false;
};

struct Prompt {
  std::string text, where;  // where: for messages
  std::vector<int32_t> tokens;
};

// One prompt a line, or where the file begins with {, an object with a "prompt".
std::vector<Prompt> read_prompts(const std::string& path) {
  std::string text = read_file(path, 256 << 20);
  if (const std::string format = foreign_format(text, path); !format.empty()) fail(Exit::bad_data, path, ": ", format);
  if (text.starts_with("\ufeff")) text.erase(0, 3);  // some editors begin UTF-8 with it
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) fail(Exit::bad_data, path, ": has no prompts; write one on each line");
  const bool json = text[first] == '{';
  std::vector<Prompt> prompts;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.pop_back();
    const std::string where = str(path, ": line ", prompts.size() + 1);
    if (line.find_first_not_of(" \t") == std::string::npos) fail(Exit::bad_data, where, " is empty; take it out");
    if (json) {
      const auto object = parse_json(line, where);
      if (!object.is_object() || !object.contains("prompt") || !object["prompt"].is_string())
        fail(Exit::bad_data, where, " is no JSON object with a \"prompt\" that is a string: ", excerpt(line));
      line = object["prompt"];
    }
    prompts.push_back({line, where, {}});
  }
  return prompts;
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, const Prompt& prompt) {
  try {
    return encode_prompt(tokenizer, prompt.text);
  } catch (const Error& error) {
    fail(error.code, prompt.where, ": ", error.what());
  }
}

// Fills in the tokens; returns how many prompts --keep-last made shorter.
int64_t encode_all(std::vector<Prompt>& prompts, const Tokenizer& tokenizer, const Config& config, const Options& o) {
  const Exit wrong = o.prompt ? Exit::usage : Exit::bad_data;
  const int64_t prefix = std::ssize(tokenizer.prefix());
  const int64_t longest = config.max_position_embeddings;
  int64_t cut = 0;
  for (Prompt& prompt : prompts) {
    std::vector<int32_t>& tokens = prompt.tokens = encode(tokenizer, prompt);
    if (o.keep_last > 0 && std::ssize(tokens) - prefix > o.keep_last)
      tokens.erase(tokens.begin() + prefix, tokens.end() - o.keep_last), ++cut;
    if (prompt.tokens.empty()) fail(wrong, prompt.where, " is empty; the model needs at least one token to continue");
    for (const int32_t token : prompt.tokens)
      if (token < 0 || token >= config.vocab_size)
        fail(wrong, prompt.where, ": token ", token, " is outside the vocabulary of ", config.vocab_size);
    if (std::ssize(prompt.tokens) >= longest)
      fail(wrong, prompt.where, " has ", prompt.tokens.size(), " tokens, the model's longest sequence is ", longest,
           std::ssize(prompt.tokens) == longest ? ", and nothing can follow" : "",
           "; --keep-last N takes its last N tokens");
  }
  return cut;
}

// Tokens of a sequence in the run that trained the model; 0 where that is not known.
int64_t trained_length(const std::string& dir) {
  const std::string path = dir + "/train_state.json";
  int64_t length = 0;
  if (!path_exists(path)) return length;
  const nlohmann::json state = read_json(path);
  const auto flags = state.find("trajectory");
  if (flags != state.end() && flags->is_object()) read(*flags, "seq", length, path);
  return length;
}

// What a row has written, as text.
class Row {
 public:
  Row(const Options& o, const Tokenizer& tokenizer)
      : stop_(o.stop), tokenizer_(tokenizer), show_special_(o.show_special) {}
  // Returns what the token adds to the text for certain.
  std::string add(int32_t token) {
    if (!show_special_ && tokenizer_.is_special(token)) return "";
    const std::string text = tokenizer_.decode({token});
    return text.empty() ? "" : keep(stop_.add(tokenizer_.separator() + text));
  }
  std::string finish() { return keep(stop_.finish()); }
  bool stopped() const { return stop_.found(); }
  const std::string& text() const { return text_; }

 private:
  std::string keep(const std::string& more) {
    text_ += more;
    return more;
  }
  StopStrings stop_;
  const Tokenizer& tokenizer_;
  bool show_special_;
  std::string text_;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string rate(int64_t tokens, double seconds) {
  return format_number(seconds > 0 && static_cast<double>(tokens) < 100 * seconds ? "%.1f" : "%.0f",
                       seconds > 0 ? static_cast<double>(tokens) / seconds : 0) +
         " tokens/s";
}

struct Generator {
  const Options& o;
  const Tokenizer& tokenizer;
  const std::vector<Prompt>& prompts;
  std::vector<int32_t> ends;
  int64_t longest;
  Decoder decoder;

  const Prompt& prompt_of(int64_t r) const { return prompts[static_cast<size_t>(r / o.samples)]; }

  // At most as many rows as the decoder has; row r is sample r % samples of prompt r / samples.
  std::vector<std::vector<int32_t>> write(const std::vector<int64_t>& which,
                                          const std::function<bool(size_t, int32_t)>& on_token) {
    std::vector<std::vector<int32_t>> begin;
    for (const int64_t r : which) begin.push_back(prompt_of(r).tokens);
    std::vector<std::vector<int32_t>> seen = begin;  // with what is written
    const Sampler sampler = [&](size_t row, const float* logits, int64_t V) {
      const int64_t r = which[row], n = std::ssize(seen[row]) - std::ssize(begin[row]);
      const auto candidates = probabilities(logits, V, seen[row], o.sampling);
      seen[row].push_back(draw(candidates, sampling_number(o.seed, r / o.samples, r % o.samples, n)));
      return seen[row].back();
    };
    // A last token could be written behind the longest sequence, since nothing reads it; Hugging Face's ends before it.
    const auto goes_on = [&](size_t row, int32_t token) {
      return on_token(row, token) && std::ssize(seen[row]) < longest;
    };
    return generate(decoder, begin, o.max_new, ends, sampler, goes_on);
  }

  const char* ending(const Row& row, const std::vector<int32_t>& written) const {
    if (row.stopped()) return "stop";
    if (std::find(ends.begin(), ends.end(), written.back()) != ends.end()) return "eos";
    return std::ssize(written) < o.max_new ? "longest" : "max_new";
  }

  // To the terminal, as it comes.
  void stream() {
    const Prompt& prompt = prompts[0];
    Printable terminal;
    std::printf("%s", terminal.add(prompt.text).c_str());
    Row row(o, tokenizer);
    const double start = now();
    double first = 0;
    const auto written = write({0}, [&](size_t, int32_t token) {
      if (first == 0) first = now();
      std::printf("%s", terminal.add(row.add(token)).c_str());
      flush_standard_output();
      return !row.stopped();
    })[0];
    const double end = now();
    std::printf("%s%s\n", terminal.add(row.finish()).c_str(), terminal.finish().c_str());
    flush_standard_output();
    if (std::string("longest") == ending(row, written))
      say_note(str("ended at the model's longest sequence, ", longest, " tokens"));
    const std::string wrote = std::ssize(written) > 1 ? ", " + rate(std::ssize(written) - 1, end - first) : "";
    std::fprintf(stderr, "prompt: %s tokens, %s; written: %s tokens%s\n",
                 format_count(std::ssize(prompt.tokens)).c_str(),
                 rate(std::ssize(prompt.tokens), first - start).c_str(), format_count(std::ssize(written)).c_str(),
                 wrote.c_str());
  }

  void print(int64_t r, Row& row, const std::vector<int32_t>& written) const {
    row.finish();
    nlohmann::ordered_json line = {{"index", r / o.samples}};
    if (o.samples > 1) line["sample"] = r % o.samples;
    line.update(
        {{"prompt", prompt_of(r).text}, {"text", row.text()}, {"tokens", written}, {"ended", ending(row, written)}});
    // A byte that is no UTF-8, JSON cannot have: the tokens are exact.
    const std::string json = json_text_mended(line);
    std::printf("%s\n", printable_json(json).c_str());
  }

  // The rows [first, last), those of about the same length together, and then prints them in order. told: how many
  // are done, after each token.
  void write_some(int64_t first, int64_t last, const std::function<void(int64_t)>& told) {
    std::vector<int64_t> order(static_cast<size_t>(last - first));
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return prompt_of(a).tokens.size() > prompt_of(b).tokens.size(); });
    std::vector<Row> rows(order.size(), Row(o, tokenizer));
    std::vector<std::vector<int32_t>> written(order.size());
    for (int64_t begin = 0, end; begin < last - first; begin = end) {
      end = std::min(begin + decoder.rows(), last - first);
      const std::vector<int64_t> which(order.begin() + begin, order.begin() + end);
      auto tokens = write(which, [&](size_t row, int32_t token) {
        Row& to = rows[static_cast<size_t>(which[row] - first)];
        to.add(token), told(first + begin);
        return !to.stopped();
      });
      for (size_t row = 0; row < which.size(); ++row)
        written[static_cast<size_t>(which[row] - first)] = std::move(tokens[row]);
    }
    for (size_t i = 0; i < rows.size(); ++i) print(first + static_cast<int64_t>(i), rows[i], written[i]);
    flush_standard_output();
  }

  // As JSON lines, in order, which come after every few batches.
  void write_lines() {
    const int64_t count = std::ssize(prompts) * o.samples, some = 16 * decoder.rows();
    int64_t read = 0, wrote = 0;
    const double start = now();
    for (const Prompt& prompt : prompts) read += std::ssize(prompt.tokens) * o.samples;
    {
      Ticker ticker("", "row");
      for (int64_t first = 0; first < count; first += some)
        write_some(first, std::min(first + some, count), [&](int64_t done) {
          ++wrote;
          if (done > 0) ticker.tell(done, count, rate(wrote, now() - start));
        });
    }
    const double seconds = now() - start;
    std::fprintf(stderr, "prompts: %s tokens, written: %s tokens, in %.1f s: %s\n", format_count(read).c_str(),
                 format_count(wrote).c_str(), seconds, rate(wrote, seconds).c_str());
  }
};

Exit run(const Options& o) {
  if (o.prompt.has_value() != o.prompts.empty()) fail(Exit::usage, "give either --prompt TEXT or --prompts FILE");
  if (std::any_of(o.stop.begin(), o.stop.end(), [](const std::string& stop) { return stop.empty(); }))
    fail(Exit::usage, "--stop is empty; every text has that");
  std::vector<Prompt> prompts;
  if (o.prompt) prompts = {{*o.prompt, "--prompt", {}}};
  else prompts = read_prompts(o.prompts);
  LoadedModel model(o.model, o.device, false);
  const Config& config = model.config;
  const Tokenizer tokenizer = model_tokenizer(model, o.tokenizer);
  if (tokenizer.is_foreign())
    say_note(str(o.model, " has ", tokenizer.describe(), ": the prompt is token ids, and so is what follows"));
  if (const int64_t cut = encode_all(prompts, tokenizer, config, o); cut > 0)
    say_note(str("of ", o.prompt ? "the prompt" : format_count(cut) + " of the prompts", " the model sees the last ",
                 format_count(o.keep_last), " tokens only (--keep-last)"));
  int64_t used = 0;
  for (const Prompt& prompt : prompts) used = std::max<int64_t>(used, std::ssize(prompt.tokens));
  const int64_t longest = config.max_position_embeddings, trained = trained_length(model.dir);
  const int64_t length = std::min(used + std::min(o.max_new, longest), longest);
  if (trained > 0 && length > trained)
    say_note(str("the model was trained on sequences of ", format_count(trained),
                 " tokens; what it writes beyond may be poor"));
  const Dtype real = o.dtype == "bf16" ? Dtype::bf16 : Dtype::f32;
  if (real == Dtype::bf16) model.params.allocate_bf16_copy(), refresh_bf16_copy(model.params);
  const int64_t rows = std::min<int64_t>(o.batch, std::ssize(prompts) * o.samples);
  Generator generator{o,       tokenizer,
                      prompts, ending_tokens(model, tokenizer),
                      longest, {*model.device, model.params, config, rows, length, real}};
  if (o.prompt && o.samples == 1) generator.stream();
  else generator.write_lines();
  return Exit::done;
}

void add_sampling_flags(CLI::App& app, SamplingOptions& s) {
  add_number(app, "--temperature", s.temperature, 0, max_number, "divides the logits; 0: the most likely token");
  for (const Flag flag :
       {add_integer(app, "--top-k", s.top_k, 0, max_size, "sample among the k most likely (0: all)"),
        add_number(app, "--top-p", s.top_p, 0, 1, "among the most likely that together reach this probability"),
        add_number(app, "--min-p", s.min_p, 0, 1, "among those with this share of the most likely one's probability")})
    needs(app, flag, {{"--temperature"}});
  add_number(app, "--repetition-penalty", s.repetition_penalty, 1e-3, 1e3,
             "above 1: tokens that are there already become less likely; also without --temperature");
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine app(
      "Continues prompts. Greedy unless --temperature is given. Settings mean what they mean in Hugging Face's "
      "generate(). The last line on standard error says how fast it was.",
      "generate");
  Options o;
  auto flags = [&] {
    add_text(app, "--model", o.model, "DIR", "model or run directory").required();
    add_parsed(
        app, "--prompt", [&](const std::string& text) { o.prompt = text; }, "TEXT",
        "the model's own words, bytes or text; without a tokenizer, token ids. Where the tokenizer begins texts with "
        "a token of its own, that comes first");
    add_text(app, "--prompts", o.prompts, "FILE",
             "a prompt on each line, or JSON lines with a \"prompt\"; prints JSON lines in the same order");
    add_text(app, "--tokenizer", o.tokenizer, "FILE", "tokenizer.json (default: the model's own)");
    add_integer(app, "--max-new", o.max_new, 1, max_size, "most tokens to write");
    add_integer(app, "--keep-last", o.keep_last, 0, max_size,
                "of a prompt, take the last so many tokens (0: all). Prompt and new tokens together are at most the "
                "model's max_position_embeddings: a longer prompt is refused, and writing ends there");
    add_texts(app, "--stop", o.stop, "TEXT", "end before this text; may be given several times").one_each();
    add_sampling_flags(app, o.sampling);
    const Flag seed =
        add_integer(app, "--seed", o.seed, 0, std::numeric_limits<int64_t>::max(),
                    "of the sampling; what a prompt gets depends on it and on the prompt's place, not on the batch");
    const Flag samples =
        add_integer(app, "--samples", o.samples, 1, max_size, "so many for each prompt; more than one: JSON lines");
    for (const Flag flag : {seed, samples}) needs(app, flag, {{"--temperature"}});
    needs(app, add_integer(app, "--batch", o.batch, 1, max_size, "rows to continue side by side"),
          {{"--prompts"}, {"--samples", {"!1"}}});
    add_switch(app, "--show-special", o.show_special, "print special tokens, as the one that ends a text");
    add_choice(app, "--dtype", o.dtype, {"fp32", "bf16"}, "of activations, caches and products: fp32 or bf16");
    add_choice(app, "--device", o.device, {"cpu", "cuda"}, "where to run: cpu or cuda");
  };
  return run_program(app, argc, argv, flags, [&] { return run(o); });
}
