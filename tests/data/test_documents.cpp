#include "data/documents.h"

#include <zlib.h>
#include <zstd.h>

#include "data/document_feed.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::string gzip(const std::string& text) {
  z_stream z{};
  REQUIRE(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string packed(deflateBound(&z, text.size()), '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data())), z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(packed.data()), z.avail_out = static_cast<uInt>(packed.size());
  REQUIRE(deflate(&z, Z_FINISH) == Z_STREAM_END);
  packed.resize(z.total_out);
  deflateEnd(&z);
  return packed;
}

std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // as the program zstd does
  packed.resize(ZSTD_compress2(context, packed.data(), packed.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return packed;
}

std::vector<Document> all_of(const std::string& path) {
  DocumentReader reader(path);
  std::vector<Document> documents;
  while (read_batch(reader, 1 << 20, documents)) {
  }
  return documents;
}

// Much, and of what does not pack well, so that the buffers are filled more than once.
std::string much_text() {
  std::string text = "\n";
  uint64_t state = 1;
  while (text.size() < 3'000'000) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    text += static_cast<char>(state >> 57 == 0 ? '\n' : '!' + (state >> 33) % 90);
  }
  return text + std::string(2'000'000, 'z');
}

}  // namespace

TEST_CASE("documents: a text is the same however it is packed, and whatever its name says of that") {
  const TempDir dir;
  const std::string text = much_text(), half = text.substr(0, 1'000'000), rest = text.substr(half.size());
  for (const std::string& bytes : {text, gzip(text), zstd(text), gzip(half) + gzip(rest), zstd(half) + zstd(rest)}) {
    for (const char* name : {"a.txt", "a.txt.gz", "a.md.zst", "a"}) {
      write_text(dir.file(name), bytes);
      const std::vector<Document> documents = all_of(dir.file(name));
      REQUIRE(documents.size() == 1);
      CHECK(documents[0].text == text);
    }
  }
  const std::string skipped("\x50\x2a\x4d\x18\x04\0\0\0size", 12);
  for (const std::string& bytes : {skipped + zstd(text), gzip(text) + std::string(300'000, '\0')}) {
    write_text(dir.file("a.txt"), bytes);
    CHECK(all_of(dir.file("a.txt")).at(0).text == text);
  }
  for (const std::string& bytes : {std::string(), gzip(""), zstd("")}) {
    write_text(dir.file("empty.txt"), bytes);
    CHECK(all_of(dir.file("empty.txt")).at(0).text.empty());
  }
}

TEST_CASE("documents: packed data that is cut short or damaged is refused, wherever") {
  const TempDir dir;
  const std::string text = much_text().substr(0, 700'000);
  for (const std::string& packed : {gzip(text), zstd(text)}) {
    for (const size_t size : {size_t{5}, size_t{100}, packed.size() / 2, packed.size() - 1}) {
      write_text(dir.file("cut.gz"), packed.substr(0, size));
      check_fails(Exit::bad_data, {"cut.gz", "ends early", str("byte ", size)}, [&] { all_of(dir.file("cut.gz")); });
    }
    std::string damaged = packed;
    for (size_t i = 0; i < 64; ++i) damaged[packed.size() / 2 + i] = '\0';
    write_text(dir.file("damaged"), damaged);
    check_fails(Exit::bad_data, {"damaged", "data"}, [&] { all_of(dir.file("damaged")); });
    write_text(dir.file("behind"), packed + "more");
    check_fails(Exit::bad_data, {"behind", "damaged"}, [&] { all_of(dir.file("behind")); });
  }
}

TEST_CASE("documents: JSON lines, by name or by what they begin with") {
  const TempDir dir;
  const std::string lines = "{\"text\": \"one\"}\n\n \r\n{\"text\": \"t\\u00e9\\n\", \"n\": 1}\r\n{\"text\": \"\"}";
  for (const char* name : {"a.jsonl", "a.ndjson.gz", "a", "a.json"}) {
    write_text(dir.file(name), lines);
    std::vector<Document> documents = all_of(dir.file(name));
    parse_documents(documents, "text");
    REQUIRE(documents.size() == 3);
    CHECK((documents[0].text == "one" && documents[1].text == "t\xc3\xa9\n" && documents[2].text.empty()));
    CHECK((documents[0].line == 1 && documents[1].line == 4 && documents[2].line == 5));
  }
  for (const char* name : {"a.txt", "A.TXT"}) {
    write_text(dir.file(name), lines);
    CHECK(all_of(dir.file(name)).at(0).text == lines);
  }
  for (const char* before : {"\xef\xbb\xbf", " \n\t"}) {
    write_text(dir.file("a"), before + lines);
    std::vector<Document> documents = all_of(dir.file("a"));
    REQUIRE(documents.size() == 3);
    parse_documents(documents, "text");
    CHECK(documents[0].text == "one");
  }
  for (const char* name : {"a.json", "a.JSON.gz"}) {
    write_text(dir.file(name), " [{\"text\": \"one\"}]");
    check_fails(Exit::bad_data, {name, "JSON array", "lines"}, [&] { all_of(dir.file(name)); });
  }
  std::string many;
  for (int i = 0; i < 300'000; ++i) many += str("{\"text\": \"", i, "\"}\n");  // more than one buffer
  write_text(dir.file("many.jsonl"), many);
  std::vector<Document> documents = all_of(dir.file("many.jsonl"));
  parse_documents(documents, "text");
  REQUIRE(documents.size() == 300'000);
  for (size_t i = 0; i < documents.size(); i += 997) CHECK(documents[i].text == std::to_string(i));
}

TEST_CASE("documents: what is no JSON line is named by file and line, the first one of them") {
  const TempDir dir;
  const auto refuses = [&](const std::string& line, const std::string& why) {
    write_text(dir.file("a.jsonl"), "{\"text\": \"fine\"}\n" + line + "\n[]\n");
    std::vector<Document> documents = all_of(dir.file("a.jsonl"));
    check_fails(Exit::bad_data, {"a.jsonl, line 2", why}, [&] { parse_documents(documents, "text"); });
  };
  refuses("{\"text\": \"cut", "is not a JSON object in UTF-8");
  refuses("{\"text\": \"\xff\"}", "UTF-8");
  refuses("{\"text\": \"\\ud800\"}", "a lone surrogate, \\ud800, at byte 10");
  refuses("[\"text\"]", "no JSON object: [\"text\"]");
  refuses("{\"texts\": \"x\", \"id\": 1}", "no field \"text\", but id, texts");
  refuses("{}", "but none");
  refuses("{\"text\": 5}", "\"text\" is no text: 5");
}

TEST_CASE("documents: a byte order mark at the start is no text, and bytes count from the start of the file") {
  const TempDir dir;
  for (const char* name : {"a.txt", "a"}) {
    write_text(dir.file(name), "\xef\xbb\xbfone\xff");
    std::vector<Document> documents = all_of(dir.file(name));
    REQUIRE(documents.size() == 1);
    CHECK(documents[0].text == "one\xff");
    check_fails(Exit::bad_data, {name, "not UTF-8", "byte 6, \\xff"}, [&] { require_utf8(documents); });
    require_utf8(documents, Faults::keep);
    CHECK((documents[0].text.empty() && has(documents[0].fault, "byte 6")));
  }
}

TEST_CASE("documents: faults are kept in their documents, and only there") {
  const TempDir dir;
  write_text(dir.file("a.jsonl"), "{\"text\": \"1\"}\n{\"text\": NaN}\n");
  write_text(dir.file("b.txt"), std::string("\xff\xfeo\0n\0", 6));
  write_text(dir.file("c.txt"), "3");
  const std::vector<SourceFile> sources = list_sources({dir.path.string()});
  check_fails(Exit::bad_data, {"b.txt", "UTF-16"}, [&] { DocumentFeed(sources, {}, "x").next(); });
  FeedBatch all = DocumentFeed(sources, {}, "x", Faults::keep).next();
  parse_documents(all.documents, "text", Faults::keep);
  REQUIRE((all.documents.size() == 4 && all.finished.size() == 3));
  CHECK((all.documents[0].text == "1" && all.documents[0].fault.empty() && all.documents[3].text == "3"));
  CHECK(has(all.documents[1].fault, "line 2"));
  CHECK(has(all.documents[2].fault, "UTF-16"));
  CHECK(all.finished[1].sha256 == digest_of_file(dir.file("b.txt")));
}

TEST_CASE("documents: encoded with what begins and ends a text, by any number of threads") {
  const TempDir dir;
  const Tokenizer bpe = Tokenizer::read(write_tiny_bpe(dir.path.string()));
  std::vector<Document> documents;
  for (int i = 0; i < 200; ++i) {
    Document& document = documents.emplace_back();
    document.file = "a", document.line = i + 1;
    document.text = std::string(static_cast<size_t>(i), 'x') + "the";
  }
  documents[7].text.assign(2'000'000, 'y');  // a long one
  encode_documents(documents, bpe, bpe.eos());
  for (const Document& document : documents) {
    std::vector<int32_t> want = bpe.encode(document.text);
    want.push_back(256);
    CHECK(document.ids == want);
  }
  documents[150].text += "\xff", documents[33].text += "\xff";
  check_fails(Exit::bad_data, {"a, line 34", "UTF-8", "byte 36"}, [&] { encode_documents(documents, bpe, -1); });
}

TEST_CASE("documents: a feed goes on from every place, if the text before it is the same") {
  const TempDir dir;
  write_text(dir.file("a.jsonl"), "{\"text\": \"1\"}\n{\"text\": \"2\"}\n");
  write_text(dir.file("b.txt"), "3");
  write_text(dir.file("c.jsonl"), "{\"text\": \"4\"}\n{\"text\": \"5\"}\n");
  const std::vector<SourceFile> sources = list_sources({dir.path.string()});
  REQUIRE(sources.size() == 3);
  DocumentFeed feed(sources, {}, "x");
  const FeedBatch all = feed.next();
  REQUIRE((all.documents.size() == 5 && all.finished.size() == 3 && !all.more && all.taken == total_bytes(sources)));
  CHECK((all.after.source == 3 && all.finished[0].documents == 2 && all.finished[1].bytes == 1));
  CHECK(all.finished[1].sha256 == digest_of_file(dir.file("b.txt")));
  const FeedPosition middle{2, 1, document_digest(0, "{\"text\": \"4\"}")};
  FeedBatch rest = DocumentFeed(sources, middle, "x").next();
  REQUIRE(rest.documents.size() == 1);
  CHECK((rest.documents[0].line == 2 && rest.finished.size() == 1 && rest.finished[0].documents == 2));
  write_text(dir.file("c.jsonl"), "{\"text\": \"6\"}\n{\"text\": \"5\"}\n");
  check_fails(Exit::usage, {"c.jsonl", "not what it was when x.partial"},
              [&] { DocumentFeed(sources, middle, "x.partial"); });
}
