#include "data/documents.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "cli/stop.h"
#include "data/bpe/regex.h"
#include "data/digest.h"
#include "data/foreign_format.h"
#include "data/paths.h"
#include "engine/at_once.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "engine/memory.h"
#include "engine/rng.h"

namespace crossply {
namespace {

constexpr size_t max_piece = 1 << 20;
// A document from here on is encoded by all threads together, shorter ones are encoded at the same time.
constexpr size_t long_document = 1 << 20;
constexpr const char* byte_order_mark = "\xef\xbb\xbf";

enum class Form { text, lines, unknown };
Form form_of(const std::string& path) {
  const std::string name = unpacked_name(path);
  const auto ends = [&](auto... endings) { return (name.ends_with(endings) || ...); };
  return ends(".jsonl", ".ndjson") ? Form::lines : ends(".txt", ".text", ".md") ? Form::text : Form::unknown;
}

std::string place_of(const Document& document) {
  return document.file + (document.line > 0 ? str(", line ", document.line) : "");
}

std::string parse_line(const Document& document, const std::string& field) {
  const std::string where = place_of(document);
  const nlohmann::json object = parse_json(document.text, where);
  if (!object.is_object()) fail(Exit::bad_data, where, ": is no JSON object: ", excerpt(document.text));
  const auto found = object.find(field);
  std::string keys;
  for (const auto& [key, value] : object.items()) keys += (keys.empty() ? "" : ", ") + excerpt(key);
  if (found == object.end())
    fail(Exit::bad_data, where, ": has no field \"", excerpt(field), "\", but ", keys.empty() ? "none" : excerpt(keys));
  if (!found->is_string())
    fail(Exit::bad_data, where, ": \"", excerpt(field), "\" is no text: ", excerpt(json_text(*found)));
  return found->get<std::string>();
}

// Throws Exit::bad_data if there is one.
void refuse_special_tokens(const std::vector<int32_t>& ids, const Tokenizer& tokenizer, SpecialText special) {
  const auto found = std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer.is_special(id); });
  if (found == ids.end()) return;
  const std::string name = "the special token \"" + excerpt(tokenizer.name_of(*found)) + "\"";
  if (special == SpecialText::text)
    fail(Exit::bad_data, "its text gives ", name,
         " although --special-tokens text is on: that token is made as others ",
         "are; choose --special-tokens token or refuse");
  fail(Exit::bad_data, "has ", name, " in its text; --special-tokens token takes it as that token, --special-tokens ",
       "text as text");
}

// What encoding takes at least, in bytes for each byte of text: the ids, of 4 bytes, and a copy of them. A token of a
// subword vocabulary has two bytes of text or more.
uint64_t encoding_bytes(const Tokenizer& tokenizer) { return tokenizer.is_bytes() ? 8 : 4; }

void check_utf8(const Document& document) {
  const std::string_view text = document.text;
  const size_t at = valid_utf8(text);
  if (at == text.size()) return;
  const std::string file = document.file == "standard input" ? "FILE" : shell_word(document.file);
  fail(Exit::bad_data, place_of(document), ": the text is not UTF-8: wrong at byte ", document.offset + at, ", ",
       printable(text.substr(at, 1)), "; if it is Latin-1: iconv -f latin1 -t utf-8 ", file, " > NEW");
}

// Calls `work` for those documents from `from` to `to` bytes that have no fault; all of them at the same time, or one
// by one, with all threads each.
template <class F>
void for_each_document(std::vector<Document>& documents, Faults faults, size_t from, size_t to, bool together,
                       F&& work) {
  const auto one = [&](size_t i) {
    Document& d = documents[i];
    if (!d.fault.empty() || d.text.size() < from || d.text.size() >= to) return;
    try {
      work(d);
    } catch (const Error& error) {
      if (faults == Faults::fail || error.code != Exit::bad_data) throw;
      d.fault = error.what();
      d.text.clear();
      d.ids.clear();
    }
  };
  if (together) return at_once(documents.size(), one);
  for (size_t i = 0; i < documents.size(); ++i) one(i);
}

void encode(Document& document, const Tokenizer& tokenizer, int32_t eot, SpecialText special) {
  if (document.text.size() >= long_document)
    require_memory(encoding_bytes(tokenizer) * document.text.size(), "encoding " + place_of(document) + " takes",
                   "cut the document into several");
  try {
    const std::vector<int32_t>& prefix = tokenizer.prefix();
    const std::vector<int32_t> ids = tokenizer.encode(document.text);
    if (special != SpecialText::token) refuse_special_tokens(ids, tokenizer, special);
    document.begun =
        !prefix.empty() && ids.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
    const size_t begin = document.begun ? prefix.size() : 0;
    document.ended = eot >= 0 && ids.size() > begin && ids.back() == eot;
    document.special = std::count_if(ids.begin() + static_cast<ptrdiff_t>(begin), ids.end() - document.ended,
                                     [&](int32_t id) { return tokenizer.is_special(id); });
    if (!document.begun) document.ids = prefix;
    document.ids.insert(document.ids.end(), ids.begin(), ids.end());
    if (eot >= 0 && !document.ended) document.ids.push_back(eot);
  } catch (const Error& error) {
    if (error.code == Exit::stopped) throw;
    if (tokenizer.is_bpe()) check_utf8(document);  // which has a message of its own
    fail(Exit::bad_data, place_of(document), ": ", error.what());
  }
}

}  // namespace

DocumentReader::DocumentReader(const std::string& path, const std::string& field) : stream_(path) {
  const Form form = form_of(path);
  fill();
  const bool is_file = path != "-" && !stream_.is_packed();
  if (const std::string format = foreign_format(buffer_, is_file ? path : ""); !format.empty()) {
    std::error_code ignored;
    if (!is_file || !is_parquet(buffer_) || !std::filesystem::is_regular_file(path, ignored))
      fail(Exit::bad_data, stream_.name(), ": ", stream_.is_packed() ? "unpacked, it " : "", format);
    table_ = std::make_unique<ParquetTable>(path, field, format);
    buffer_.clear();
    is_lines_ = true;
    return;
  }
  const size_t mark = buffer_.starts_with(byte_order_mark) ? std::strlen(byte_order_mark) : 0;
  const size_t first = buffer_.find_first_not_of(" \t\r\n", mark);
  const char begins = first == std::string::npos ? '\0' : buffer_[first];
  if (begins == '[' && unpacked_name(path).ends_with(".json"))
    fail(Exit::bad_data, stream_.name(), ": is a JSON array, and JSON is read as lines with an object each; ",
         "jq -c '.[]' makes them");
  is_lines_ = form == Form::lines || (form == Form::unknown && begins == '{');
  if (!is_lines_) text_begin_ = begin_ = mark;  // a parser of JSON passes over it
}

bool is_one_document(const std::string& path) { return form_of(path) != Form::lines; }

bool DocumentReader::fill() {
  if (begin_ > 0) buffer_.erase(0, begin_), begin_ = 0;
  const size_t before = buffer_.size();
  if (before > max_document_bytes)
    fail(Exit::bad_data, stream_.name(), is_lines_ ? str(", line ", line_ + 1) : "", ": the document has more than ",
         max_document_bytes, " bytes; cut it into several files or JSON lines");
  if (before >= long_document && buffer_.capacity() < before + piece_)  // it becomes twice as long
    require_memory(3 * before, str("reading ", stream_.name(), " takes"), "cut the document into several");
  buffer_.resize(before + piece_);
  char* to = buffer_.data() + before;
  buffer_.resize(before + (table_ ? table_->read(to, piece_) : stream_.read(to, piece_)));
  piece_ = std::min(2 * piece_, max_piece);
  return buffer_.size() > before;
}

bool DocumentReader::next(Document& document) {
  document = {};
  document.file = stream_.name();
  document.offset = text_begin_;
  if (is_lines_) {
    while (next_line(document.text)) {
      document.line = line_;
      if (document.text.find_first_not_of(" \t\r") != std::string::npos) return true;
    }
    return false;
  }
  if (done_) return false;
  while (fill()) {
  }
  document.text = std::move(buffer_);
  if (document.text.size() < max_piece) document.text.shrink_to_fit();  // thousands of them may be kept
  return done_ = true;
}

bool DocumentReader::next_line(std::string& line) {
  size_t end = buffer_.find('\n', begin_), looked = buffer_.size() - begin_;
  while (end == std::string::npos && fill()) {
    end = buffer_.find('\n', looked);
    looked = buffer_.size();
  }
  if (begin_ == buffer_.size()) return false;
  line = buffer_.substr(begin_, end == std::string::npos ? end : end - begin_);
  begin_ = end == std::string::npos ? buffer_.size() : end + 1;
  ++line_;
  return true;
}

bool read_batch(DocumentReader& reader, size_t bytes, std::vector<Document>& batch) {
  constexpr size_t each = 256;  // what a document needs beside its text
  bool more = true;
  for (size_t have = 0; more && have < bytes;) {
    Document document;
    more = reader.next(document);
    have += document.text.size() + each;
    if (more) batch.push_back(std::move(document));
  }
  return more;
}

void parse_documents(std::vector<Document>& documents, const std::string& field, Faults faults) {
  for_each_document(documents, faults, 0, SIZE_MAX, true, [&](Document& d) {
    if (d.line > 0) d.text = parse_line(d, field);
  });
}

void require_utf8(std::vector<Document>& documents, Faults faults) {
  for_each_document(documents, faults, 0, SIZE_MAX, true, [](const Document& d) { check_utf8(d); });
}

void encode_documents(std::vector<Document>& documents, const Tokenizer& tokenizer, int32_t eot, SpecialText special,
                      Faults faults) {
  set_search_stop(stop_requested);
  const auto one = [&](Document& d) { encode(d, tokenizer, eot, special); };
  for_each_document(documents, faults, long_document, SIZE_MAX, false, one);
  for_each_document(documents, faults, 0, long_document, true, one);
}

uint64_t document_hash(const std::string& text, uint64_t purpose) {
  Digest digest;
  digest.add(text.data(), text.size());
  return mix_bits(digest.value() ^ mix_bits(purpose));
}

}  // namespace crossply
