#include "data/preparation.h"

#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>

#include "cli/format.h"
#include "cli/stop.h"
#include "cli/version.h"
#include "data/carried_settings.h"
#include "data/document_feed.h"
#include "data/encoding_progress.h"
#include "data/preparation_settings.h"
#include "data/sealed_json.h"
#include "data/shard_writer.h"
#include "data/token_counts.h"
#include "data/validation_split.h"
#include "data/vocabulary.h"
#include "engine/io/json.h"
#include "engine/io/new_directory.h"
#include "engine/io/printable.h"
#include "engine/rng.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // people read these files

// "1 document".
std::string count_documents(int64_t count) { return format_count(count) + (count == 1 ? " document" : " documents"); }

// Of text: "13 bytes", "1.2 MB".
std::string format_size(int64_t bytes) {
  if (bytes < 1000) return str(bytes, " bytes");
  const auto size = static_cast<double>(bytes);
  if (size < 1e6) return format_number("%.1f kB", size / 1e3);
  return size < 1e9 ? format_number("%.1f MB", size / 1e6) : format_number("%.2f GB", size / 1e9);
}

// What is written while documents are encoded.
struct Stream {
  int64_t kept = 0;     // tokens that are on the disk for good
  uint64_t digest = 0;  // of all tokens
  std::unique_ptr<ShardWriter> writer;
  void append(const std::vector<int32_t>& ids) {
    writer->append(ids);
    digest = token_digest(digest, ids);
  }
};

class Preparation {
 public:
  explicit Preparation(const PrepareOptions& options);
  Exit run();

 private:
  bool is_done();  // in OUT, or but for the name in OUT.partial
  void hold();
  void read_state();
  bool take_state(const Json& state);  // false: nothing is encoded, and something is different
  void save_state();
  void begin();
  void take_tokenizer();
  int32_t choose_eot(const Tokenizer& tokenizer, const std::string& name) const;
  void write_tokenizer_config(const std::string& beside) const;
  void open_writers();
  void check_tokens() const;
  void flush();
  bool encode_all();  // false: stopped
  void encode(FeedBatch& batch);
  void keep();  // what was encoded
  void take(const FeedBatch& batch, std::vector<Document>& documents);
  void split();
  void look_at_tokens();
  void publish();
  void rename_partial();
  void leave_out(const Document& document);
  void summarise() const;
  double validation_share() const {
    return static_cast<double>(val_.tokens()) / static_cast<double>(train_.tokens() + val_.tokens());
  }
  std::string start_anew() const { return "remove " + partial_ + " to start anew, or choose another --out"; }
  Faults faults() const { return o_.skip_bad > 0 ? Faults::keep : Faults::fail; }
  int64_t documents() const { return encoded_documents_ + empty_ + std::ssize(left_out_); }
  ShardLayout layout(const char* name) const { return {partial_, name, format_, o_.shard_tokens, start_anew()}; }
  const char* tokens_name() const { return o_.val > 0 ? "encoded" : "train"; }
  std::unique_ptr<ShardWriter> begin_part(const char* name) const {
    return std::make_unique<ShardWriter>(layout(name), 0);
  }

  const PrepareOptions o_;
  const std::string out_, partial_;
  std::vector<SourceFile> sources_;
  std::string sources_digest_;
  Json settings_;
  Descriptor lock_;
  Tokenizer tokenizer_, encoder_;  // encoder_: perhaps with_special_text()
  SpecialText special_text_ = SpecialText::token;
  SpecialCounts special_;
  int32_t eot_ = -1;
  ShardFormat format_ = ShardFormat::uint16;
  Stream tokens_, table_;  // of all documents; table_: a DocumentEntry of each
  int64_t encoded_documents_ = 0, text_bytes_ = 0, words_ = 0;
  SplitPart train_, val_;
  int64_t empty_ = 0;              // documents
  Json left_out_ = Json::array();  // bad documents
  FeedPosition position_;
  Json finished_ = Json::array();  // sources
  bool encoded_ = false, by_document_ = true;
  double drawn_ = 0;     // the share that whole documents gave
  std::string warning_;  // of the tokens
};

Preparation::Preparation(const PrepareOptions& options)
    : o_(options), out_(resolve_out(options.out)), partial_(out_ + ".partial") {
  if (out_.empty()) fail(Exit::usage, "--out: the name of the directory to make is empty");
  if (o_.tokenizer.empty() == (o_.vocab == 0))
    fail(Exit::usage,
         "either --tokenizer FILE or --vocab N is needed: which tokenizer, or how many tokens to train one of");
  const std::vector<std::string> specials = special_tokens(o_.style);
  if (o_.vocab > 0 && !o_.eot.empty() && std::find(specials.begin(), specials.end(), o_.eot) == specials.end())
    fail(Exit::usage, "--eot ", o_.eot, ": --vocab --style ", o_.style, " trains a tokenizer that ends texts with ",
         specials.back(), "; leave out --eot");
  sources_ = list_sources(options.inputs);
  for (const SourceFile& source : sources_)
    if (o_.vocab > 0 && !source.is_file)
      fail(Exit::usage, source.path, " can be read only once, but --vocab reads the text twice; store it in a file");
  const auto has_field = [&](const SourceFile& source) {
    try {
      return !source.is_file || DocumentReader(source.path, o_.field).is_lines();
    } catch (const Error& error) {  // of a bad file, which --skip-bad leaves out later
      if (faults() == Faults::fail || error.code != Exit::bad_data) throw;
      return false;
    }
  };
  if (o_.field_given && std::none_of(sources_.begin(), sources_.end(), has_field))
    fail(Exit::usage, "--field ", o_.field,
         " has no effect without JSON lines or Parquet, and no input has any; leave it out");
  settings_ = settings_of(o_, sources_);
  sources_digest_ = digest_of_sources(sources_);
}

bool Preparation::is_done() {
  const std::string manifest = out_ + "/manifest.json";
  std::error_code ignored;
  if (!path_exists(out_) || (fs::is_directory(out_, ignored) && fs::is_empty(out_, ignored))) return false;
  if (!path_exists(manifest))
    fail(Exit::usage, "--out ", out_, " exists and was not made by this program; choose another name");
  const Json was = parse_json<Json>(read_file(manifest, uint64_t{1} << 30), manifest);
  const std::string advice = "choose another --out, or remove it";
  require_same(member(was, "settings"), settings_, SIZE_MAX, manifest, out_, advice);
  require_unchanged(sources_, member(was, "sources"), out_ + " was made", advice);
  if (const auto left_out = member(was, "left_out").size(); left_out > static_cast<size_t>(o_.skip_bad))
    fail(Exit::usage, out_, " was made without ", left_out, " bad documents, now --skip-bad is ", o_.skip_bad, "; ",
         advice);
  std::printf("%s is complete already; nothing to do\n", printable(out_).c_str());
  for (const SourceFile& source : sources_)
    if (!source.is_file)
      std::printf("(what %s holds now was not read, and not compared)\n",
                  source.path == "-" ? "standard input" : printable(source.path).c_str());
  return true;
}

// Makes OUT.partial, and keeps others away from it for as long as this process lives.
void Preparation::hold() {
  require_replaceable(out_);
  std::error_code error, ignored;
  make_directories(partial_);
  if (!lock_directory(partial_, LOCK_EX, &lock_)) {
    if (lock_.get() < 0) fail_io("open", partial_, ENOENT);
    fail(Exit::usage, partial_, " is in use by another process; wait for it or choose another --out");
  }
  std::vector<fs::path> unfinished;  // files of a killed process
  bool known = false, others = false;
  for (fs::directory_iterator it(partial_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    known = known || name == "state.json" || name == "manifest.json";
    if (name.starts_with(".tmp-")) unfinished.push_back(it->path());
    others = others || !name.starts_with(".tmp-state.json-");  // before the first state there is nothing else
  }
  if (error) fail_io("list", partial_, error.value());
  if (!known && others) fail(Exit::usage, partial_, " exists and was not made by this program; choose another --out");
  for (const fs::path& file : unfinished) fs::remove(file, ignored);
}

// Nothing is encoded, and what there is of another beginning goes.
void Preparation::begin() {
  for (const char* name : {"/tokenizer.json", "/tokenizer_config.json"})
    if (::unlink((partial_ + name).c_str()) != 0 && errno != ENOENT) fail_io("remove", partial_ + name, errno);
  save_state();
}

void Preparation::save_state() {
  Json state = {{"settings", settings_},
                {"position", {position_.source, position_.documents, position_.digest}},
                {"finished", finished_},
                {"documents", encoded_documents_},
                {"bytes", text_bytes_},
                {"words", words_},
                {"tokens", {tokens_.kept, tokens_.digest}},
                {"table", {table_.kept, table_.digest}},
                {"empty", empty_},
                {"special_tokens", special_.json()},
                {"encoded", encoded_},
                {"left_out", left_out_},
                {"sources", sources_digest_}};
  write_file_atomically(partial_ + "/state.json", seal(std::move(state)));
}

void Preparation::read_state() {
  const std::string path = partial_ + "/state.json", advice = start_anew();
  if (!path_exists(path)) return begin();
  const Json state = unseal(read_file(path, uint64_t{1} << 30), path, advice);
  try {
    if (!take_state(state)) return begin();
  } catch (const nlohmann::json::exception&) {
    fail(Exit::bad_data, path, ": is damaged; ", advice);
  }
  if (std::ssize(left_out_) > o_.skip_bad)
    fail(Exit::usage, partial_, " has left out ", left_out_.size(), " bad documents, now --skip-bad is ", o_.skip_bad,
         "; ", advice);
  if (position_.source > 0 || position_.documents > 0)
    std::printf("going on after %s\n", count_documents(documents()).c_str());
}

// Throws the library's exception where a type is another one.
bool Preparation::take_state(const Json& state) {
  const std::string path = partial_ + "/state.json", advice = start_anew();
  const auto require = [&](bool right) {
    if (!right) fail(Exit::bad_data, path, ": is damaged; ", advice);
  };
  const auto count = [&](const Json& value) {
    require(value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{1} << 53);
    return value.get<int64_t>();
  };
  const Json &at = state.at("position"), &settings = state.at("settings");
  require(at.is_array() && at.size() == 3 && at[2].is_number_unsigned());
  position_ = {static_cast<size_t>(count(at[0])), count(at[1]), at[2].get<uint64_t>()};
  state.at("encoded").get_to(encoded_);
  if (position_.source == 0 && position_.documents == 0 && !encoded_) {
    position_ = {};
    return settings == settings_ && state.at("sources") == sources_digest_;
  }
  if (!state.contains("table")) fail(Exit::bad_data, path, ": is of an older version of this program; ", advice);
  finished_ = state.at("finished"), left_out_ = state.at("left_out");
  require(finished_.is_array() && finished_.size() == position_.source && left_out_.is_array());
  const size_t begun = position_.source + (position_.documents > 0 ? 1 : 0);
  require_same(settings, settings_, encoded_ || o_.vocab > 0 ? SIZE_MAX : begun, path, partial_, advice);
  require(begun <= sources_.size());
  const auto first = sources_.begin();
  require_unchanged({first, first + static_cast<int64_t>(position_.source)}, finished_, partial_ + " was begun",
                    advice);
  encoded_documents_ = count(state.at("documents")), text_bytes_ = count(state.at("bytes"));
  words_ = count(state.at("words"));
  for (const auto& [stream, key] : {std::pair(&tokens_, "tokens"), {&table_, "table"}}) {
    const Json& stored = state.at(key);
    require(stored.is_array() && stored.size() == 2 && stored[1].is_number_unsigned());
    stream->kept = count(stored[0]);
    stored[1].get_to(stream->digest);
  }
  empty_ = count(state.at("empty"));
  special_.read(state.at("special_tokens"));
  int64_t read = position_.documents;
  for (const Json& source : finished_) read += count(source.at("documents"));
  require(read == documents() && tokens_.kept >= encoded_documents_ && table_.kept == entry_words * encoded_documents_);
  require(!encoded_ || position_.source == sources_.size());
  return true;
}

void Preparation::take_tokenizer() {
  const std::string path = partial_ + "/tokenizer.json";
  if (!path_exists(path) && o_.vocab > 0) train_vocabulary(sources_, {o_.vocab, o_.style, o_.field, o_.skip_bad}, path);
  // The one of the user's directory knows the end-of-text token by what lies beside it.
  const std::string given = path_exists(path) ? path : tokenizer_file(o_.tokenizer);
  tokenizer_ = Tokenizer::read(given);
  const std::string name = o_.tokenizer.empty() ? path : o_.tokenizer;
  eot_ = choose_eot(tokenizer_, name);
  if (tokenizer_.is_bpe() && !path_exists(partial_ + "/tokenizer_config.json"))
    write_tokenizer_config(fs::path(given).parent_path() / "tokenizer_config.json");
  if (!path_exists(path)) tokenizer_.save(partial_);
  tokenizer_ = Tokenizer::read(path);
  if (tokenizer_.is_bpe() && tokenizer_.eos() != eot_)
    fail(Exit::usage, "--eot ", o_.eot, ": ", name, " itself ends each text with ",
         tokenizer_.decode({tokenizer_.eos()}), ", and whoever reads it goes by that; leave out --eot");
  if (tokenizer_.vocab_size() < o_.vocab)
    std::printf("the text gives no more than %s tokens\n", format_count(tokenizer_.vocab_size()).c_str());
  if (o_.special_tokens == "refuse") special_text_ = SpecialText::refuse;
  if (o_.special_tokens == "text") special_text_ = SpecialText::text;
  encoder_ = special_text_ == SpecialText::text ? tokenizer_.with_special_text() : tokenizer_;
  if (tokenizer_.vocab_size() > 1 << 16) format_ = ShardFormat::uint32;
}

int32_t Preparation::choose_eot(const Tokenizer& tokenizer, const std::string& name) const {
  if (!o_.eot.empty()) {
    const std::vector<int32_t> ids = tokenizer.encode(o_.eot);
    if (ids.size() != 1)
      fail(Exit::usage, "--eot ", o_.eot, " is no token of ", name, ", but ", ids.size(), " of them");
    return ids[0];
  }
  if (tokenizer.eos() < 0)
    fail(Exit::usage, name,
         " has no end-of-text token by one of the usual names; say with --eot TOKEN which one shall ",
         "end each document");
  return tokenizer.eos();
}

// What was beside the tokenizer, with the end-of-text token that was chosen.
void Preparation::write_tokenizer_config(const std::string& beside) const {
  const std::string text = path_exists(beside) ? carried_settings(read_file(beside, 64 << 20), beside) : "";
  Json config = try_parse_json<Json>(text);
  if (!config.is_object()) config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (!o_.eot.empty() || !config.contains("eos_token")) config["eos_token"] = tokenizer_.decode({eot_});
  write_file_atomically(partial_ + "/tokenizer_config.json", json_text_mended(config, 2) + "\n");
}

void Preparation::open_writers() {
  tokens_.writer = std::make_unique<ShardWriter>(layout(tokens_name()), tokens_.kept);
  const ShardLayout table = {partial_, "documents", ShardFormat::uint32, entry_words * 20'000'000, start_anew()};
  table_.writer = std::make_unique<ShardWriter>(table, table_.kept);
}

// What was written before is what is there.
void Preparation::check_tokens() const {
  for (const auto& [stream, name] : {std::pair(&tokens_, tokens_name()), {&table_, "documents"}})
    if (stream->writer->digest(stream->kept) != stream->digest)
      fail(Exit::bad_data, partial_, "/", name, "_*.bin: other tokens than were written; ", start_anew());
}

bool Preparation::encode_all() {
  DocumentFeed feed(sources_, position_, partial_, faults(), o_.field);
  EncodingProgress progress("encoding", total_bytes(sources_), feed.taken());
  const auto read = [&] { return feed.next(); };  // while the batch before is encoded
  std::future<FeedBatch> next = std::async(std::launch::async, read);
  using Clock = std::chrono::steady_clock;
  auto saved = Clock::now();
  int64_t text = 0;
  const int64_t before = tokens_.writer->tokens();
  for (bool more = true; more;) {
    FeedBatch batch;
    try {
      batch = next.get();
      more = batch.more;
      if (more) next = std::async(std::launch::async, read);
      encode(batch);
    } catch (const Error& error) {  // what came before is not lost
      keep();
      if (error.code == Exit::stopped) return false;
      if (const int64_t kept = documents(); kept > 0)
        std::printf("%s kept; the same command goes on from there\n", count_documents(kept).c_str());
      throw;
    }
    for (const Document& document : batch.documents) text += std::ssize(document.text);
    take(batch, batch.documents);
    progress.tell(batch.taken, text, tokens_.writer->tokens() - before);
    const bool stop = more && stop_requested();
    if (!stop && Clock::now() - saved < std::chrono::seconds(3)) continue;
    keep();
    saved = Clock::now();
    if (stop) return false;
  }
  return true;
}

void Preparation::encode(FeedBatch& batch) {
  parse_documents(batch.documents, o_.field, faults());
  const size_t all = batch.documents.size();
  std::erase_if(batch.documents, [](const Document& d) { return d.text.empty() && d.fault.empty(); });
  encode_documents(batch.documents, encoder_, eot_, special_text_, faults());
  int64_t bad = std::ssize(left_out_);
  for (const Document& document : batch.documents)
    if (!document.fault.empty() && ++bad > o_.skip_bad)
      fail(Exit::bad_data, document.fault, " (", bad - 1, " bad documents were left out before, as --skip-bad ",
           o_.skip_bad, " allows)");
  empty_ += static_cast<int64_t>(all - batch.documents.size());
}

void Preparation::keep() {
  flush();
  save_state();
}

void Preparation::flush() {
  for (Stream* stream : {&tokens_, &table_}) {
    stream->writer->flush();
    stream->kept = stream->writer->tokens();
  }
}

void Preparation::take(const FeedBatch& batch, std::vector<Document>& documents) {
  for (const Document& document : documents) {
    if (!document.fault.empty()) {
      leave_out(document);
      continue;
    }
    tokens_.append(document.ids);
    table_.append(words_of({document_hash(document.text, stream_of("validation")) >> 1, std::ssize(document.ids),
                            std::ssize(document.text), static_cast<int64_t>(document.source)}));
    ++encoded_documents_;
    text_bytes_ += std::ssize(document.text), words_ += words_in(document.text);
    special_.add(document);
  }
  position_ = batch.after;
  for (const Finished& f : batch.finished)
    finished_.push_back({{"path", utf8_or_escaped(f.source.path)},
                         {"bytes", f.bytes},
                         {"modified", f.source.modified},
                         {"inode", f.source.inode},
                         {"changed", f.source.changed},
                         {"sha256", f.sha256},
                         {"documents", f.documents}});
}

void Preparation::leave_out(const Document& document) {
  Json entry = {{"path", utf8_or_escaped(document.file)}};
  if (document.line > 0) entry["line"] = document.line;
  entry["reason"] = utf8_or_escaped(document.fault);
  left_out_.push_back(std::move(entry));
}

// A stop or a failure in it loses nothing: what is encoded stays, and the next call splits it anew.
void Preparation::split() {
  val_.writer = begin_part("val");
  if (o_.val == 0) {
    train_ = {encoded_documents_, text_bytes_, std::move(tokens_.writer)};
    return;
  }
  train_.writer = begin_part("train");
  const ValidationSplit split(*table_.writer, std::ssize(sources_), o_.val);
  split_tokens(*tokens_.writer, *table_.writer, split, train_, val_);
  by_document_ = split.by_document(), drawn_ = split.drawn();
}

// All tokens for training, or of many some from everywhere.
void Preparation::look_at_tokens() {
  constexpr int64_t piece = 1 << 20, most = 64;
  const int64_t all = train_.tokens(), pieces = std::min(most, (all + piece - 1) / piece);
  TokenCounts counts(tokenizer_.vocab_size());
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = all * i / pieces, end = all * (i + 1) / pieces;  // no token is in two pieces
    counts.add(train_.writer->read(begin, std::min(piece, end - begin)));
  }
  warning_ = counts.warning(tokenizer_);
}

void Preparation::publish() {
  look_at_tokens();
  train_.writer->finish(tokenizer_.fingerprint());
  val_.writer->finish(tokenizer_.fingerprint());
  const auto shards = [&](const char* name, const SplitPart& part) {
    Json list = Json::array();
    for (int64_t i = 0; i < layout(name).files(part.tokens()); ++i)
      list.push_back(fs::path(layout(name).path(i)).filename().string());
    Json described = {{"tokens", part.tokens()}, {"shards", list}};
    if (by_document_) described["documents"] = part.documents, described["bytes"] = part.bytes;
    return described;
  };
  const int64_t tokens = train_.tokens() + val_.tokens();
  char fingerprint[17];
  std::snprintf(fingerprint, sizeof fingerprint, "%016llx", static_cast<unsigned long long>(tokenizer_.fingerprint()));
  const Json manifest = {{"program", "prepare of crossply, commit " + commit()},
                         {"settings", settings_},
                         {"tokenizer",
                          {{"vocab_size", tokenizer_.vocab_size()},
                           {"end_of_text", eot_},
                           {"fingerprint", fingerprint},
                           {"sha256", digest_of_file(partial_ + "/tokenizer.json")}}},
                         {"documents", encoded_documents_},
                         {"empty_documents", empty_},
                         {"special_tokens", special_.json()},
                         {"left_out", left_out_},
                         {"bytes", text_bytes_},
                         {"words", words_},
                         {"tokens", tokens},
                         {"bytes_per_token", static_cast<double>(text_bytes_) / static_cast<double>(tokens)},
                         {"validation", by_document_ ? "documents, drawn by their content" : "the end of each file"},
                         {"validation_share", validation_share()},
                         {"train", shards("train", train_)},
                         {"val", shards("val", val_)},
                         {"sources", finished_}};
  write_file_atomically(partial_ + "/manifest.json", json_text(manifest, 2) + "\n");
}

// Of what is in OUT.partial, only the result goes with the name.
void Preparation::rename_partial() {
  std::vector<std::string> others;
  std::error_code error;
  for (fs::directory_iterator it(partial_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == "state.json" || name.starts_with("encoded_") || name.starts_with("documents_"))
      others.push_back(it->path().string());
  }
  if (error) fail_io("list", partial_, error.value());
  for (const std::string& path : others)
    if (::unlink(path.c_str()) != 0) fail_io("remove", path, errno);
  if (::rename(partial_.c_str(), out_.c_str()) != 0) fail_io("rename " + partial_ + " to", out_, errno);
  const std::string parent = fs::path(out_).parent_path().string();
  sync_directory(parent.empty() ? "." : parent);
}

void Preparation::summarise() const {
  const int64_t tokens = train_.tokens() + val_.tokens();
  std::printf("%s: %s, %s of text, %s tokens (%.2f bytes each)\n", printable(out_).c_str(),
              count_documents(encoded_documents_).c_str(), format_size(text_bytes_).c_str(),
              format_count(tokens).c_str(), static_cast<double>(text_bytes_) / static_cast<double>(tokens));
  std::printf("%s tokens for training, %s for validation\n", format_count(train_.tokens()).c_str(),
              format_count(val_.tokens()).c_str());
  const std::string rule = by_document_
                               ? count_documents(val_.documents)
                               : "the end of each file; documents give " + format_number("%.4g", 100 * drawn_) + " %";
  if (o_.val > 0) std::printf("validation share: %.4g %% (%s)\n", 100 * validation_share(), rule.c_str());
  if (special_.begun > 0)
    std::printf("documents that have the token that begins a text, which was not added again: %s\n",
                format_count(special_.begun).c_str());
  if (special_.ended > 0)
    std::printf("documents that have the token that ends a text, which was not added again: %s\n",
                format_count(special_.ended).c_str());
  if (special_.inside > 0)
    std::printf("special tokens within documents (--special-tokens %s): %s\n", o_.special_tokens.c_str(),
                format_count(special_.inside).c_str());
  if (!warning_.empty()) std::fprintf(stderr, "%s\n", warning_.c_str());
  if (empty_ > 0) std::printf("empty documents, left out: %s\n", format_count(empty_).c_str());
  if (!left_out_.empty())
    std::printf("bad documents, left out: %s; manifest.json lists them\n", format_count(std::ssize(left_out_)).c_str());
}

Exit Preparation::run() {
  if (is_done()) return Exit::done;
  hold();
  if (path_exists(partial_ + "/manifest.json")) {  // only the new name is missing
    rename_partial();
    is_done();
    return Exit::done;
  }
  read_state();
  take_tokenizer();
  open_writers();
  check_tokens();
  if (!encoded_) {
    if (!encode_all()) {
      std::printf("stopped after %s; the same command goes on from there\n", count_documents(documents()).c_str());
      return Exit::stopped;
    }
    if (encoded_documents_ == 0) fail(Exit::bad_data, "there is no text in these inputs");
    encoded_ = true;
    keep();
  }
  split();
  publish();
  rename_partial();
  summarise();
  return Exit::done;
}

}  // namespace

Exit prepare(const PrepareOptions& options) {
  catch_stop_signals();
  return Preparation(options).run();
}

}  // namespace crossply
