#include "data/foreign_format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "engine/io/file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;

// In an advice, %f is the file and %u the file without the ending of its packer; %.EXT% is a new file with this ending,
// %8 one in UTF-8, and %d a new directory.
struct ForeignFormat {
  std::string_view mark;
  size_t offset;
  const char* name;
  const char* advice;
};

constexpr const char* no_text = "leave it out, it holds no text";

constexpr std::array formats = {
    ForeignFormat{"\xff\xfe\0\0"sv, 0, "text in UTF-32", "iconv -f utf-32 -t utf-8 %f > %8"},
    ForeignFormat{"\0\0\xfe\xff"sv, 0, "text in UTF-32", "iconv -f utf-32 -t utf-8 %f > %8"},
    ForeignFormat{"\xff\xfe"sv, 0, "text in UTF-16", "iconv -f utf-16 -t utf-8 %f > %8"},
    ForeignFormat{"\xfe\xff"sv, 0, "text in UTF-16", "iconv -f utf-16 -t utf-8 %f > %8"},
    ForeignFormat{"PAR1"sv, 0, "a Parquet table", "%pandas.read_parquet"},
    ForeignFormat{"PARE"sv, 0, "an encrypted Parquet table", "decrypt it and write JSON lines"},
    ForeignFormat{"ARROW1\0\0"sv, 0, "an Arrow table", "%pandas.read_feather"},
    ForeignFormat{"FEA1"sv, 0, "a Feather table", "%pandas.read_feather"},
    ForeignFormat{"ORC"sv, 0, "an ORC table", "%pandas.read_orc"},
    ForeignFormat{"Obj\x01"sv, 0, "an Avro file", "avro cat --format json %f > %.jsonl% (pip install avro)"},
    ForeignFormat{"\xfd\x37zXZ\0"sv, 0, "packed by xz", "xz -dc %f > %u"},
    ForeignFormat{"\x5d\0\0\x80\0"sv, 0, "packed by lzma", "xz --format=lzma -dc %f > %u"},
    ForeignFormat{"BZh"sv, 0, "packed by bzip2", "bzip2 -dc %f > %u"},
    ForeignFormat{"\x04\x22\x4d\x18"sv, 0, "packed by lz4", "lz4 -dc %f > %u"},
    ForeignFormat{"LZIP"sv, 0, "packed by lzip", "lzip -dc %f > %u"},
    ForeignFormat{"\x89LZO\0\r\n\x1a\n"sv, 0, "packed by lzop", "lzop -dc %f > %u"},
    ForeignFormat{"\xff\x06\0\0sNaPpY"sv, 0, "packed by Snappy", "snzip -dc %f > %u"},
    ForeignFormat{"\x1f\x9d\x90"sv, 0, "packed by compress", "gzip -dc %f > %u"},
    ForeignFormat{"\x1f\x8b\x08"sv, 0, "packed by gzip", "gzip -dc %f > %u"},
    ForeignFormat{"\x28\xb5\x2f\xfd"sv, 0, "packed by zstd", "zstd -dc %f > %u"},
    ForeignFormat{"7z\xbc\xaf\x27\x1c"sv, 0, "a 7z archive", "7z x -o%d %f"},
    ForeignFormat{"Rar!\x1a\x07"sv, 0, "a RAR archive", "unrar x %f %d/"},
    ForeignFormat{"ustar"sv, 257, "a tar archive", "mkdir %d && tar -xf %f -C %d"},
    ForeignFormat{
        "\x93NUMPY"sv, 0, "a NumPy array",
        "of token ids: python3 -c \"import numpy, sys; numpy.load(sys.argv[1]).astype('uint32').tofile(sys.argv[2])\" "
        "%f %.bin%, then --data uint32:%.bin%"},
    ForeignFormat{"%PDF-"sv, 0, "a PDF", "pdftotext %f %.txt%"},
    ForeignFormat{"{\\rtf"sv, 0, "a Rich Text document", "pandoc -f rtf -t plain %f -o %.txt%"},
    ForeignFormat{"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, 0, "an old Office document", "soffice --convert-to txt %f"},
    ForeignFormat{"SQLite format 3\0"sv, 0, "an SQLite database",
                  "sqlite3 %f \"select json_object('text', COLUMN) from TABLE\" > %.jsonl%"},
    ForeignFormat{"DUCK"sv, 8, "a DuckDB database", "duckdb %f \"copy TABLE to '%.jsonl%' (format json)\""},
    ForeignFormat{"\x89HDF\r\n\x1a\n"sv, 0, "an HDF5 file",
                  "python3 -c \"import h5py, json, sys; [print(json.dumps({'text': t.decode()})) for t in "
                  "h5py.File(sys.argv[1])['NAME']]\" %f > %.jsonl%"},
    ForeignFormat{"\x80\x04\x95"sv, 0, "a Python pickle", "load it in Python and write JSON lines"},
    ForeignFormat{"\x80\x05\x95"sv, 0, "a Python pickle", "load it in Python and write JSON lines"},
    ForeignFormat{"\x88\xd8\x34\x01"sv, 0, "a token shard",
                  "the trainers take it as --data %f, if its name ends with .bin"},
    ForeignFormat{"\xa1\xd9\x34\x01"sv, 0, "a token shard",
                  "the trainers take it as --data %f, if its name ends with .bin"},
    ForeignFormat{"GGUF"sv, 0, "a model's weights", no_text},
    ForeignFormat{"\x7f"
                  "ELF"sv,
                  0, "an executable file", no_text},
    ForeignFormat{"\x89PNG\r\n\x1a\n"sv, 0, "an image", no_text},
    ForeignFormat{"\xff\xd8\xff"sv, 0, "an image", no_text},
    ForeignFormat{"GIF8"sv, 0, "an image", no_text},
    ForeignFormat{"RIFF"sv, 0, "an image, sound or video", no_text},
    ForeignFormat{"OggS"sv, 0, "sound or video", no_text},
    ForeignFormat{"ftyp"sv, 4, "sound or video", no_text},
};

constexpr ForeignFormat zip = {"PK\x03\x04"sv, 0, "a zip archive", "unzip -d %d %f"};
constexpr ForeignFormat office = {"PK\x03\x04"sv, 0, "an Office document", "soffice --convert-to txt %f"};
constexpr ForeignFormat book = {"PK\x03\x04"sv, 0, "an EPUB or OpenDocument file", "pandoc -t plain %f -o %.txt%"};
constexpr ForeignFormat arrays = {"PK\x03\x04"sv, 0, "NumPy arrays (npz)",
                                  "load one in Python; token ids: .astype('uint32').tofile"};
constexpr ForeignFormat torch = {"PK\x03\x04"sv, 0, "a file of PyTorch's", "load it in Python and write JSON lines"};
constexpr ForeignFormat arrow_stream = {
    "\xff\xff\xff\xff"sv, 0, "an Arrow table (of Hugging Face's datasets)",
    "python3 -c \"import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_json("
    "sys.argv[2])\" %f %.jsonl%"};
constexpr ForeignFormat safetensors = {"12345678"sv, 0, "a model's weights (safetensors)", no_text};
// Without a mark of their own; what is asked for by long marks is none of these.
constexpr ForeignFormat utf16_le = {"??"sv, 0, "text in UTF-16", "iconv -f utf-16le -t utf-8 %f > %8"};
constexpr ForeignFormat utf16_be = {"??"sv, 0, "text in UTF-16", "iconv -f utf-16be -t utf-8 %f > %8"};

uint32_t number_at(std::string_view bytes, size_t at) {
  uint32_t number = 0;
  std::memcpy(&number, bytes.data() + at, sizeof number);  // little-endian
  return number;
}

// Text does not hold control characters, and it is UTF-8. A character may be cut at the end.
bool looks_like_text(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto [length, code] = first_character(bytes);
    if (length == 0) return bytes.size() < 4;
    if (code < 0x20 && std::strchr("\t\n\v\f\r\x1b", static_cast<int>(code)) == nullptr) return false;
    if (code == 0) return false;
    bytes.remove_prefix(length);
  }
  return true;
}

// A mark of two bytes does not say enough: what follows must be characters, each of two bytes or of a pair of them.
bool is_utf16(std::string_view bytes) {
  const bool big = bytes[0] == '\xfe';
  bool half = false;
  for (size_t i = 2; i + 1 < bytes.size(); i += 2) {
    const auto high = static_cast<unsigned char>(bytes[big ? i : i + 1]);
    const auto low = static_cast<unsigned char>(bytes[big ? i + 1 : i]);
    const bool second = high >= 0xDC && high < 0xE0;
    const bool control = high == 0 && low < 0x20 && (low == 0 || std::strchr("\t\n\v\f\r", low) == nullptr);
    if (second != half || control) return false;
    half = high >= 0xD8 && high < 0xDC;
  }
  return true;
}

// The kind of a zip archive by the name of its first file.
const ForeignFormat* format_of_zip(std::string_view first) {
  if (first.size() < 30) return &zip;
  const std::string_view name = first.substr(30, number_at(first, 26) & 0xFFFF);
  if (name == "[Content_Types].xml" || name.starts_with("_rels/")) return &office;
  if (name == "mimetype") return &book;
  if (name.ends_with(".npy")) return &arrays;
  return name.ends_with("/data.pkl") ? &torch : &zip;
}

// UTF-16 without a mark: Latin text has a zero in every second byte.
const ForeignFormat* format_of_utf16(std::string_view first) {
  const std::string_view some = first.substr(0, std::min<size_t>(first.size(), 64) / 2 * 2);
  const auto alternates = [&](size_t text) {  // which byte of two is the text
    for (size_t i = 0; i < some.size(); ++i)
      if (i % 2 == text ? !looks_like_text(some.substr(i, 1)) : some[i] != '\0') return false;
    return some.size() >= 8;
  };
  return alternates(0) ? &utf16_le : alternates(1) ? &utf16_be : nullptr;
}

const ForeignFormat* find_format(std::string_view first) {
  const bool is_text = looks_like_text(first);
  for (const ForeignFormat& format : formats) {
    if (format.offset > first.size() || !first.substr(format.offset).starts_with(format.mark)) continue;
    if (format.mark.size() == 2 && !is_utf16(first)) continue;
    if (!is_text || format.mark == "%PDF-" || format.mark == "{\\rtf") return &format;
  }
  if (first.starts_with("PK\x03\x04") || first.starts_with("PK\x05\x06")) return format_of_zip(first);
  if (first.size() < 16) return format_of_utf16(first);
  if (number_at(first, 0) == UINT32_MAX && number_at(first, 4) > 0 && number_at(first, 4) < 1 << 24)
    return &arrow_stream;
  if (number_at(first, 4) == 0 && first.substr(8).starts_with("{\"")) return &safetensors;
  return format_of_utf16(first);
}

// A name beside `path`, of no file that is there.
std::string free_name(const fs::path& path) {
  std::error_code ignored;
  fs::path free = path;
  if (fs::exists(path, ignored)) free.replace_extension(".converted" + path.extension().string());
  return shell_word(free.string());
}

std::string unpacked(const fs::path& path) {
  static constexpr std::array packers = {".xz", ".lzma", ".bz2", ".lz4", ".lz", ".lzo", ".sz", ".Z", ".gz", ".zst"};
  const bool known = std::find(packers.begin(), packers.end(), path.extension().string()) != packers.end();
  return free_name(known ? fs::path(path).replace_extension() : fs::path(path.string() + ".unpacked"));
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

std::string command(std::string advice, const std::string& path) {
  const fs::path file = path.empty() ? "FILE" : path;
  constexpr std::string_view pandas = "%pandas.";
  if (advice.starts_with(pandas))
    advice = "python3 -c \"import pandas, sys; pandas." + advice.substr(pandas.size()) +
             "(sys.argv[1]).to_json(sys.argv[2], orient='records', lines=True)\" %f %.jsonl%";
  const std::string own = file.extension().string();  // JSON lines stay JSON lines
  replace_all(advice, "%8", free_name(fs::path(file).replace_extension(".utf8" + (own.empty() ? ".txt" : own))));
  for (const std::string ending : {".jsonl", ".bin", ".txt"})
    replace_all(advice, "%" + ending + "%", free_name(fs::path(file).replace_extension(ending)));
  replace_all(advice, "%d", shell_word(file.string() + ".files"));
  replace_all(advice, "%u", unpacked(file));
  replace_all(advice, "%f", shell_word(file.string()));
  return advice;
}

}  // namespace

std::string foreign_format(std::string_view first, const std::string& path, size_t min_mark) {
  const ForeignFormat* format = find_format(first.substr(0, foreign_format_bytes));
  if (format == nullptr || format->mark.size() < min_mark) return "";
  const bool packed = std::string_view(format->name).starts_with("packed by");
  return str("is ", format->name, packed || format->advice == no_text ? "" : ", not text in UTF-8", "; ",
             command(format->advice, path));
}

std::string foreign_format_of(const InputFile& file, size_t min_mark) {
  std::string first(std::min<uint64_t>(file.size(), foreign_format_bytes), '\0');
  file.read(0, first.data(), first.size());
  return foreign_format(first, file.path(), min_mark);
}

std::string foreign_format_of(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return "";
  try {
    return foreign_format_of(InputFile(path));
  } catch (const Error&) {
    return "";  // who opens it says why it cannot be read
  }
}

}  // namespace crossply
