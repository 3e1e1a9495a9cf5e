#include "data/preparation.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>

#include "cli/flags.h"
#include "cli/format.h"
#include "cli/stop.h"
#include "data/document_feed.h"
#include "data/encoding_progress.h"
#include "data/paths.h"
#include "data/shard_writer.h"
#include "data/vocabulary.h"
#include "engine/json.h"
#include "engine/printable.h"
#include "engine/rng.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // people read these files

// What decides the result, as state.json and manifest.json keep it.
Json settings_of(const PrepareOptions& o, const std::vector<SourceFile>& sources) {
  Json settings;
  settings["tokenizer"] = o.tokenizer.empty() ? Json() : Json(digest_of_file(tokenizer_file(o.tokenizer)));
  if (o.vocab > 0) settings["vocab"] = o.vocab, settings["style"] = o.style;
  settings["eot"] = utf8_or_escaped(o.eot);
  settings["field"] = utf8_or_escaped(o.field);
  settings["val"] = o.val;
  settings["shard_tokens"] = o.shard_tokens;
  settings["inputs"] = Json::array();
  for (const SourceFile& source : sources) settings["inputs"].push_back({{"path", utf8_or_escaped(source.path)}});
  return settings;
}

// Throws Exit::usage with the first difference.
void require_same(const Json& was, const Json& is, const std::string& where, const std::string& advice) {
  const Json before = was.value("inputs", Json::array()), now = is["inputs"];
  if (!before.is_array()) fail(Exit::bad_data, where, ": \"inputs\" is no list");
  for (size_t i = 0; i < std::max(before.size(), now.size()); ++i) {
    const Json a = i < before.size() ? before[i] : Json::object(), b = i < now.size() ? now[i] : Json::object();
    const auto path = [](const Json& one) { return one.is_object() ? one.value("path", "none") : "none"; };
    if (path(a) != path(b))
      fail(Exit::usage, where, " is of other inputs: number ", i + 1, " was ", path(a), " and is ", path(b), "; ",
           advice);
  }
  for (const auto& [key, value] : is.items()) {
    const Json old = was.value(key, Json());
    if (key == "tokenizer" && value != old) fail(Exit::usage, where, " has another --tokenizer or --vocab; ", advice);
    if (key == "inputs" || value == old) continue;
    std::string flag = key;
    for (char& letter : flag) letter = letter == '_' ? '-' : letter;
    fail(Exit::usage, where, " has --", flag, " ", old.dump(), ", now it is ", value.dump(), "; ", advice);
  }
}

// "1 document".
std::string count_documents(int64_t count) { return format_count(count) + (count == 1 ? " document" : " documents"); }

// Of text: "13 bytes", "1.2 MB".
std::string format_size(int64_t bytes) {
  if (bytes < 1000) return str(bytes, " bytes");
  const auto size = static_cast<double>(bytes);
  if (size < 1e6) return format_number("%.1f kB", size / 1e3);
  return size < 1e9 ? format_number("%.1f MB", size / 1e6) : format_number("%.2f GB", size / 1e9);
}

// One split of the result.
struct Part {
  int64_t documents = 0, bytes = 0;  // bytes: of text
  int64_t kept = 0;                  // tokens that are on the disk for good
  std::unique_ptr<ShardWriter> writer;
  int64_t tokens() const { return writer->tokens(); }
};

class Preparation {
 public:
  explicit Preparation(const PrepareOptions& options);
  Exit run();

 private:
  bool is_done();  // in OUT, or but for the name in OUT.partial
  void hold();
  void read_state();
  void save_state();
  void take_tokenizer();
  int32_t choose_eot(const Tokenizer& tokenizer, const std::string& name) const;
  void write_tokenizer_config(const std::string& beside) const;
  void open_writers();
  void flush();
  bool encode_all();  // false: stopped
  void encode(FeedBatch& batch);
  void keep();  // what was encoded
  void take(const FeedBatch& batch, std::vector<Document>& documents);
  void cut_validation();
  void publish();
  void rename_partial();
  void summarise() const;
  ShardLayout layout(const char* name) const { return {partial_, name, format_, o_.shard_tokens}; }

  const PrepareOptions o_;
  const std::string out_, partial_;
  std::vector<SourceFile> sources_;
  Json settings_;
  Descriptor lock_;
  Tokenizer tokenizer_;
  int32_t eot_ = -1;
  ShardFormat format_ = ShardFormat::uint16;
  Part train_, val_;
  int64_t empty_ = 0;  // documents
  FeedPosition position_;
  Json finished_ = Json::array();  // sources
  bool encoded_ = false, by_document_ = true;
};

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

Preparation::Preparation(const PrepareOptions& options)
    : o_(options), out_(without_slash(options.out)), partial_(out_ + ".partial") {
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
  const auto has_field = [](const SourceFile& source) {
    return !source.is_file || DocumentReader(source.path).is_lines();
  };
  if (o_.field_given && std::none_of(sources_.begin(), sources_.end(), has_field))
    fail(Exit::usage, "--field ", o_.field, " has no effect without JSON lines, and no input has any; leave it out");
  settings_ = settings_of(o_, sources_);
}

bool Preparation::is_done() {
  const std::string manifest = out_ + "/manifest.json";
  std::error_code ignored;
  if (!path_exists(out_) || (fs::is_directory(out_, ignored) && fs::is_empty(out_, ignored))) return false;
  if (!path_exists(manifest))
    fail(Exit::usage, "--out ", out_, " exists and was not made by this program; choose another name");
  const Json was = parse_json<Json>(read_file(manifest, uint64_t{1} << 30), manifest);
  if (!was.is_object()) fail(Exit::bad_data, manifest, ": is no JSON object");
  require_same(was.value("settings", Json::object()), settings_, out_, "choose another --out, or remove it");
  require_unchanged(sources_, was.value("sources", Json()), out_ + " was made", "choose another --out, or remove it");
  std::printf("%s is complete already; nothing to do\n", printable(out_).c_str());
  for (const SourceFile& source : sources_)
    if (!source.is_file)
      std::printf("(what %s holds now was not read, and not compared)\n",
                  source.path == "-" ? "standard input" : printable(source.path).c_str());
  return true;
}

// Makes OUT.partial, and keeps others away from it for as long as this process lives.
void Preparation::hold() {
  std::error_code error;
  const bool is_new = fs::create_directories(partial_, error);
  if (error) fail_io("create", partial_, error.value());
  lock_ = Descriptor(uninterrupted([&] { return ::open(partial_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (lock_.get() < 0) fail_io("open", partial_, errno);
  if (uninterrupted([&] { return ::flock(lock_.get(), LOCK_EX | LOCK_NB); }) != 0 && errno == EWOULDBLOCK)
    fail(Exit::usage, partial_, " is in use by another process; wait for it or choose another --out");
  const bool known = path_exists(partial_ + "/state.json") || path_exists(partial_ + "/manifest.json");
  if (!is_new && !known && !fs::is_empty(partial_, error))
    fail(Exit::usage, partial_, " exists and was not made by this program; choose another --out");
  for (const auto& entry : fs::directory_iterator(partial_))
    if (entry.path().filename().string().starts_with(".tmp-")) fs::remove(entry.path(), error);  // of a killed process
}

void Preparation::save_state() {
  const auto part = [](const Part& p) {
    return Json{{"documents", p.documents}, {"bytes", p.bytes}, {"tokens", p.kept}};
  };
  const Json state = {{"settings", settings_}, {"position", {position_.source, position_.documents, position_.digest}},
                      {"finished", finished_}, {"train", part(train_)},
                      {"val", part(val_)},     {"empty", empty_},
                      {"encoded", encoded_},   {"by_document", by_document_}};
  write_file_atomically(partial_ + "/state.json", state.dump(2) + "\n");
}

void Preparation::read_state() {
  const std::string path = partial_ + "/state.json";
  if (!path_exists(path)) return save_state();
  const Json state = parse_json<Json>(read_file(path, uint64_t{1} << 30), path);
  const std::string advice = "remove " + partial_ + " to start anew, or choose another --out";
  try {
    require_same(state.at("settings"), settings_, partial_, advice);
    const Json& at = state.at("position");
    position_ = {at.at(0).get<size_t>(), at.at(1).get<int64_t>(), at.at(2).get<uint64_t>()};
    finished_ = state.at("finished");
    if (position_.source > sources_.size() || finished_.size() != position_.source)
      fail(Exit::bad_data, path, ": is damaged; ", advice);
    const auto first = sources_.begin();
    require_unchanged({first, first + static_cast<int64_t>(position_.source)}, finished_, partial_ + " was begun",
                      advice);
    for (const auto& [part, key] : {std::pair(&train_, "train"), {&val_, "val"}}) {
      state.at(key).at("documents").get_to(part->documents);
      state.at(key).at("bytes").get_to(part->bytes);
      state.at(key).at("tokens").get_to(part->kept);
    }
    state.at("empty").get_to(empty_);
    state.at("encoded").get_to(encoded_);
    state.at("by_document").get_to(by_document_);
  } catch (const nlohmann::json::exception&) {
    fail(Exit::bad_data, path, ": is damaged; ", advice);
  }
  if (position_.source > 0 || position_.documents > 0)
    std::printf("going on after %s\n", count_documents(train_.documents + val_.documents + empty_).c_str());
}

void Preparation::take_tokenizer() {
  const std::string path = partial_ + "/tokenizer.json";
  if (!path_exists(path) && o_.vocab > 0) {
    std::vector<std::string> files;
    for (const SourceFile& source : sources_) files.push_back(source.path);
    train_vocabulary(files, {o_.vocab, o_.style, o_.field}, path);
  }
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
  Json config = path_exists(beside) ? try_parse_json<Json>(read_file(beside, 64 << 20)) : Json();
  if (!config.is_object()) config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  if (!o_.eot.empty() || !config.contains("eos_token")) config["eos_token"] = tokenizer_.decode({eot_});
  write_file_atomically(partial_ + "/tokenizer_config.json",
                        config.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

void Preparation::open_writers() {
  train_.writer = std::make_unique<ShardWriter>(layout("train"), train_.kept);
  val_.writer = std::make_unique<ShardWriter>(layout("val"), val_.kept);
}

bool Preparation::encode_all() {
  DocumentFeed feed(sources_, position_, partial_);
  EncodingProgress progress("encoding", total_bytes(sources_), feed.taken());
  const auto read = [&] { return feed.next(); };  // while the batch before is encoded
  std::future<FeedBatch> next = std::async(std::launch::async, read);
  using Clock = std::chrono::steady_clock;
  auto saved = Clock::now();
  int64_t text = 0;
  const int64_t before = train_.tokens() + val_.tokens();
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
      if (const int64_t kept = train_.documents + val_.documents + empty_; kept > 0)
        std::printf("%s kept; the same command goes on from there\n", count_documents(kept).c_str());
      throw;
    }
    for (const Document& document : batch.documents) text += std::ssize(document.text);
    take(batch, batch.documents);
    progress.tell(batch.taken, text, train_.tokens() + val_.tokens() - before);
    const bool stop = more && stop_requested();
    if (!stop && Clock::now() - saved < std::chrono::seconds(3)) continue;
    keep();
    saved = Clock::now();
    if (stop) return false;
  }
  return true;
}

void Preparation::encode(FeedBatch& batch) {
  parse_documents(batch.documents, o_.field);
  const size_t all = batch.documents.size();
  std::erase_if(batch.documents, [](const Document& document) { return document.text.empty(); });
  encode_documents(batch.documents, tokenizer_, eot_);
  empty_ += static_cast<int64_t>(all - batch.documents.size());
}

void Preparation::keep() {
  flush();
  save_state();
}

void Preparation::flush() {
  for (Part* part : {&train_, &val_}) {
    part->writer->flush();
    part->kept = part->tokens();
  }
}

void Preparation::take(const FeedBatch& batch, std::vector<Document>& documents) {
  for (const Document& document : documents) {
    const double drawn = static_cast<double>(document_hash(document.text, stream_of("validation")) >> 11) * 0x1p-53;
    Part& part = train_.documents > 0 && drawn < o_.val ? val_ : train_;
    part.writer->append(document.ids);
    ++part.documents;
    part.bytes += std::ssize(document.text);
  }
  position_ = batch.after;
  for (const Finished& f : batch.finished)
    finished_.push_back({{"path", utf8_or_escaped(f.path)},
                         {"bytes", f.bytes},
                         {"modified", f.modified},
                         {"sha256", f.sha256},
                         {"documents", f.documents}});
}

// No document was drawn: the last tokens are for validation.
void Preparation::cut_validation() {
  const int64_t all = train_.tokens(), count = std::llround(static_cast<double>(all) * o_.val);
  if (o_.val == 0 || val_.tokens() > 0 || count == 0) return;
  for (int64_t at = all - count; at < all;) {
    const std::vector<int32_t> ids = train_.writer->read(at, 1 << 20);
    val_.writer->append(ids);
    at += std::ssize(ids);
  }
  val_.writer->flush();
  by_document_ = false;
  train_.kept = all - count, val_.kept = count;
}

void Preparation::publish() {
  train_.writer->finish(tokenizer_.fingerprint());
  val_.writer->finish(tokenizer_.fingerprint());
  const auto shards = [&](const char* name, const Part& part) {
    Json list = Json::array();
    for (int64_t i = 0; i < layout(name).files(part.tokens()); ++i)
      list.push_back(fs::path(layout(name).path(i)).filename().string());
    Json described = {{"tokens", part.tokens()}, {"shards", list}};
    if (by_document_) described["documents"] = part.documents, described["bytes"] = part.bytes;
    return described;
  };
  const int64_t bytes = train_.bytes + val_.bytes, tokens = train_.tokens() + val_.tokens();
  char fingerprint[17];
  std::snprintf(fingerprint, sizeof fingerprint, "%016llx", static_cast<unsigned long long>(tokenizer_.fingerprint()));
  const Json manifest = {{"program", "prepare of crossply, commit " + commit()},
                         {"settings", settings_},
                         {"tokenizer",
                          {{"vocab_size", tokenizer_.vocab_size()},
                           {"end_of_text", eot_},
                           {"fingerprint", fingerprint},
                           {"sha256", digest_of_file(partial_ + "/tokenizer.json")}}},
                         {"documents", train_.documents + val_.documents},
                         {"empty_documents", empty_},
                         {"bytes", bytes},
                         {"tokens", tokens},
                         {"bytes_per_token", static_cast<double>(bytes) / static_cast<double>(tokens)},
                         {"validation", by_document_ ? "documents, drawn by their content" : "the last tokens"},
                         {"train", shards("train", train_)},
                         {"val", shards("val", val_)},
                         {"sources", finished_}};
  write_file_atomically(partial_ + "/manifest.json", manifest.dump(2) + "\n");
}

void Preparation::rename_partial() {
  const std::string state = partial_ + "/state.json";
  if (::unlink(state.c_str()) != 0 && errno != ENOENT) fail_io("remove", state, errno);
  if (::rename(partial_.c_str(), out_.c_str()) != 0) fail_io("rename " + partial_ + " to", out_, errno);
  const std::string parent = fs::path(out_).parent_path().string();
  sync_directory(parent.empty() ? "." : parent);
}

void Preparation::summarise() const {
  const int64_t bytes = train_.bytes + val_.bytes, tokens = train_.tokens() + val_.tokens();
  std::printf("%s: %s, %s of text, %s tokens (%.2f bytes each)\n", printable(out_).c_str(),
              count_documents(train_.documents + val_.documents).c_str(), format_size(bytes).c_str(),
              format_count(tokens).c_str(), static_cast<double>(bytes) / static_cast<double>(tokens));
  std::printf("%s tokens for training, %s for validation (%s)\n", format_count(train_.tokens()).c_str(),
              format_count(val_.tokens()).c_str(),
              by_document_ ? count_documents(val_.documents).c_str() : "the last tokens");
  if (empty_ > 0) std::printf("empty documents, left out: %s\n", format_count(empty_).c_str());
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
  if (!encoded_) {
    if (!encode_all()) {
      std::printf("stopped after %s; the same command goes on from there\n",
                  count_documents(train_.documents + val_.documents + empty_).c_str());
      return Exit::stopped;
    }
    if (train_.documents == 0) fail(Exit::bad_data, "there is no text in these inputs");
    flush();
    cut_validation();
    encoded_ = true;
    save_state();
    open_writers();
  }
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
