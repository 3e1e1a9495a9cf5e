#include "data/document_feed.h"

#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/stop.h"
#include "data/digest.h"
#include "data/paths.h"
#include "engine/io/printable.h"
#include "engine/platform.h"
#include "engine/rng.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

constexpr size_t batch_bytes = 4 << 20;

SourceFile source_of(const std::string& path) {
  if (path == "-") return {path};
  struct stat status {};
  const int error = ::stat(path.c_str(), &status) == 0 ? 0 : errno;
  if (error == ENOENT || error == ENOTDIR) fail(Exit::no_input, "cannot open ", path, ": no such file; check the path");
  if (error != 0) fail_io("inspect", path, error);
  std::error_code ignored;
  const std::string absolute = fs::absolute(path, ignored).lexically_normal().string();
  if (!S_ISREG(status.st_mode)) return {absolute};
  const auto nanoseconds = [](const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  return {absolute,      static_cast<uint64_t>(status.st_size), nanoseconds(modified_time(status)), true,
          status.st_ino, nanoseconds(changed_time(status))};
}

}  // namespace

uint64_t document_digest(uint64_t before, const std::string& text) {
  Digest digest;
  digest.add(text.data(), text.size());
  return mix_bits(before ^ digest.value()) + 1;
}

std::vector<SourceFile> list_sources(const std::vector<std::string>& inputs) {
  std::vector<SourceFile> sources;
  std::set<std::string> known;
  std::string again;  // one of those that are named again
  int64_t passed_over = 0, named_again = 0;
  for (const std::string& input : inputs) {
    const std::vector<std::string> files = input == "-" ? std::vector{input} : text_files(input, &passed_over);
    for (const std::string& file : files) {
      SourceFile source = source_of(file);
      if (known.insert(source.path).second) sources.push_back(std::move(source));
      else again = file, ++named_again;
    }
  }
  if (named_again > 0)
    std::fprintf(stderr, "note: files that are named more than once, and taken once: %lld (%s)\n",
                 static_cast<long long>(named_again), printable(again).c_str());
  if (passed_over > 0)
    std::fprintf(stderr, "note: files of other names in these directories, passed over: %lld\n",
                 static_cast<long long>(passed_over));
  return sources;
}

uint64_t total_bytes(const std::vector<SourceFile>& sources) {
  uint64_t sum = 0;
  for (const SourceFile& source : sources) {
    if (!source.is_file) return 0;
    sum += source.bytes;
  }
  return sum;
}

std::string digest_of_file(const std::string& path) {
  const InputFile file(path);
  Sha256 sha;
  std::string chunk(std::min<uint64_t>(file.size(), 1 << 20), '\0');
  for (uint64_t at = 0; at < file.size(); at += chunk.size()) {
    if (at > 0 && stop_requested()) fail(Exit::stopped, "stopped while reading ", path, "; the same command goes on");
    const uint64_t n = std::min<uint64_t>(chunk.size(), file.size() - at);
    file.read(at, chunk.data(), n);
    sha.update(chunk.data(), n);
  }
  return sha.hex();
}

std::string tokenizer_file(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? path + "/tokenizer.json" : path;
}

void require_unchanged(const std::vector<SourceFile>& sources, const nlohmann::ordered_json& finished,
                       const std::string& where, const std::string& advice) {
  using Json = nlohmann::ordered_json;
  for (size_t i = 0; i < sources.size(); ++i) {
    const SourceFile& source = sources[i];
    if (!source.is_file) continue;
    const Json was =
        finished.is_array() && i < finished.size() && finished[i].is_object() ? finished[i] : Json::object();
    if (was.value("bytes", Json()) == source.bytes && was.value("modified", Json()) == source.modified &&
        was.value("inode", Json()) == source.inode && was.value("changed", Json()) == source.changed)
      continue;
    if (was.value("sha256", Json()) != digest_of_file(source.path))
      fail(Exit::usage, source.path, " was changed since ", where, "; ", advice);
  }
}

std::string digest_of_sources(const std::vector<SourceFile>& sources) {
  Sha256 sha;
  for (const SourceFile& s : sources) {
    const std::string line = str(s.path, '\0', s.bytes, ' ', s.modified, ' ', s.inode, ' ', s.changed, '\n');
    sha.update(line.data(), line.size());
  }
  return sha.hex();
}

DocumentFeed::DocumentFeed(const std::vector<SourceFile>& sources, const FeedPosition& from, const std::string& where,
                           Faults faults, const std::string& field)
    : sources_(sources), faults_(faults), field_(field) {
  for (at_.source = 0; at_.source < std::min(from.source, sources_.size()); ++at_.source)
    before_ += sources_[at_.source].bytes;
  if (at_.source == sources_.size() || from.documents == 0) return;
  open();
  Document document;
  bool same = true;
  while (same && at_.documents < from.documents && (same = reader_->next(document))) {
    at_.digest = document_digest(at_.digest, document.text);
    ++at_.documents;
  }
  if (!same || at_.digest != from.digest)
    fail(Exit::usage, reader_->bytes().name(), " is not what it was when ", where, " was begun; remove that to start ",
         "anew, or choose another --out");
}

void DocumentFeed::open() { reader_ = std::make_unique<DocumentReader>(sources_[at_.source].path, field_); }

uint64_t DocumentFeed::taken() const { return before_ + (reader_ ? reader_->taken() : 0); }

// Adds the next documents of the source; false after its last, or where it is one that cannot be read as text.
bool DocumentFeed::read(size_t bytes, std::vector<Document>& documents) {
  const SourceFile& source = sources_[at_.source];
  try {
    if (!reader_) open();
    return read_batch(*reader_, bytes, documents);
  } catch (const Error& error) {
    const bool one = source.is_file && is_one_document(source.path) && !(reader_ && reader_->is_lines());
    if (faults_ == Faults::fail || error.code != Exit::bad_data || !one) throw;
    reader_.reset();
    Document bad;
    bad.file = source.path;
    bad.fault = error.what();
    documents.push_back(std::move(bad));
    return false;
  }
}

void DocumentFeed::finish_source(FeedBatch& batch, uint64_t bytes, const std::string& sha256) {
  batch.finished.push_back({sources_[at_.source], bytes, sha256, at_.documents});
  before_ += bytes;
  reader_.reset();
  at_ = {at_.source + 1, 0, 0};
}

FeedBatch DocumentFeed::next() {
  FeedBatch batch;
  for (size_t bytes = 0; bytes < batch_bytes && at_.source < sources_.size();) {
    const size_t first = batch.documents.size();
    const bool more = read(batch_bytes - bytes, batch.documents);
    for (size_t i = first; i < batch.documents.size(); ++i) {
      batch.documents[i].source = at_.source;
      bytes += batch.documents[i].text.size() + 1;
      at_.digest = document_digest(at_.digest, batch.documents[i].text);
    }
    at_.documents += static_cast<int64_t>(batch.documents.size() - first);
    if (more) break;
    if (reader_ && !reader_->is_table()) finish_source(batch, reader_->bytes().taken(), reader_->bytes().sha256());
    else finish_source(batch, sources_[at_.source].bytes, digest_of_file(sources_[at_.source].path));
  }
  batch.after = at_;
  batch.taken = taken();
  batch.more = at_.source < sources_.size();
  return batch;
}

}  // namespace crossply
