#include "engine/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is read as it is");

constexpr uint64_t max_header = 100'000'000;
constexpr size_t max_rank = 64;  // bounds the memory that a hostile header can ask for
const std::string metadata_key = "__metadata__";

// 0 for a dtype that the format does not know.
uint64_t bits_of(const std::string& dtype) {
  static const std::map<std::string, uint64_t> bits{
      {"BOOL", 8}, {"U8", 8},          {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"I16", 16}, {"F8_E5M2FNUZ", 8}, {"F8_E4M3FNUZ", 8}, {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},
      {"U16", 16}, {"F16", 16},        {"BF16", 16},       {"I32", 32},    {"U32", 32},    {"F32", 32},
      {"C64", 64}, {"F64", 64},        {"I64", 64},        {"U64", 64}};
  const auto found = bits.find(dtype);
  return found == bits.end() ? 0 : found->second;
}

std::string show_name(const std::string& name) { return "\"" + excerpt(name) + "\""; }

std::string list(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

// The number of bytes of a tensor; false if the dtype is unknown, or the number is too large or not whole.
bool bytes_of(const TensorInfo& info, uint64_t* bytes) {
  int64_t count = 1;  // a later 0 does not excuse an overflow: numel() multiplies in the same order
  for (int64_t size : info.shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) return false;
  }
  const uint64_t bits = bits_of(info.dtype);
  uint64_t total;
  if (bits == 0 || __builtin_mul_overflow(static_cast<uint64_t>(count), bits, &total) || total % 8 != 0) return false;
  *bytes = total / 8;
  return true;
}

// Receives the header from the JSON parser value by value and accepts only what the format allows, so that no tree of a
// hostile document is ever built.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& path, std::vector<TensorInfo>* tensors, std::map<std::string, std::string>* metadata)
      : path_(path), tensors_(*tensors), metadata_(*metadata) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { unexpected(str("the negative number ", value)); }
  bool number_float(number_float_t, const string_t& text) override { unexpected("the number " + text.substr(0, 40)); }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) unexpected(str("the number ", value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      unexpected(str("the number ", value, ", which is too large"));
    }
    if (numbers_.size() == max_rank) unexpected(str("a list of more than ", max_rank, " numbers"));
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) metadata_[key_] = value;
    else if (depth_ == 2 && key_ == "dtype") tensors_.back().dtype = value;
    else unexpected("the string " + show_name(value));
    return true;
  }

  bool start_object(size_t) override {
    if (depth_ == 2) unexpected("an object");
    if (++depth_ == 2) keys_.clear();
    return true;
  }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      if (!names_.insert(name).second) fail(Exit::bad_data, path_, ": the name ", show_name(name), " occurs twice");
      in_metadata_ = name == metadata_key;
      if (!in_metadata_) tensors_.emplace_back().name = name;
      key_.clear();
      return true;
    }
    key_ = name;
    if (!keys_.insert(name).second) fail(Exit::bad_data, path_, ": ", where(), " occurs twice");
    if (!in_metadata_ && name != "dtype" && name != "shape" && name != "data_offsets") {
      fail(Exit::bad_data, path_, ": ", where(), " is not one of dtype, shape, data_offsets");
    }
    return true;
  }

  bool end_object() override {
    if (--depth_ != 1 || in_metadata_) return true;
    for (const char* needed : {"dtype", "shape", "data_offsets"}) {
      if (keys_.count(needed) == 0) {
        fail(Exit::bad_data, path_, ": tensor ", show_name(tensors_.back().name), " has no ", needed);
      }
    }
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_ || in_array_ || key_ == "dtype") unexpected("a list");
    in_array_ = true;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    in_array_ = false;
    TensorInfo& tensor = tensors_.back();
    if (key_ == "shape") {
      tensor.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2) {
      fail(Exit::bad_data, path_, ": ", where(), " has ", numbers_.size(), " numbers instead of 2");
    }
    tensor.begin = static_cast<uint64_t>(numbers_[0]), tensor.end = static_cast<uint64_t>(numbers_[1]);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail(Exit::bad_data, path_, ": the header is not a JSON object in UTF-8, at its byte ",
         position > 0 ? position - 1 : 0, ": is this a safetensors file, and complete?");
  }

 private:
  std::string where() const {
    if (tensors_.empty() && !in_metadata_) return "the header";
    const std::string object = in_metadata_ ? metadata_key : "tensor " + show_name(tensors_.back().name);
    return key_.empty() ? object : object + ", key " + show_name(key_);
  }
  [[noreturn]] void unexpected(const std::string& value) const {
    fail(Exit::bad_data, path_, ": ", where(), ": ", value, " does not belong there");
  }

  const std::string& path_;
  std::vector<TensorInfo>& tensors_;
  std::map<std::string, std::string>& metadata_;
  std::set<std::string> names_, keys_;  // seen so far at depth 1, and in the object at depth 2
  std::string key_;
  std::vector<int64_t> numbers_;
  int depth_ = 0;
  bool in_metadata_ = false, in_array_ = false;
};

void check_size(const std::string& path, const TensorInfo& tensor) {
  if (bits_of(tensor.dtype) == 0) {
    fail(Exit::bad_data, path, ": tensor ", show_name(tensor.name), " has the unknown dtype ", show_name(tensor.dtype));
  }
  uint64_t bytes = 0;
  if (!bytes_of(tensor, &bytes)) {
    fail(Exit::bad_data, path, ": tensor ", tensor.str(), " has no size in bytes: too large, or not whole");
  }
  if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
    fail(Exit::bad_data, path, ": tensor ", tensor.str(), " needs ", bytes, " bytes, but its data_offsets are [",
         tensor.begin, ", ", tensor.end, "]: the program that wrote the file is at fault, or it was changed since");
  }
}

// Sorts by position and makes sure that the tensors cover the data exactly once.
void check_layout(const std::string& path, std::vector<TensorInfo>* tensors, uint64_t data_bytes) {
  std::stable_sort(tensors->begin(), tensors->end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t end = 0;
  for (const TensorInfo& tensor : *tensors) {
    if (tensor.begin != end) {
      fail(Exit::bad_data, path, ": tensor ", tensor.str(), " begins at byte ", tensor.begin,
           " of the data, but the one before it ends at ", end, tensor.begin > end ? ": a hole" : ": an overlap");
    }
    end = tensor.end;
  }
  if (end > data_bytes) {
    fail(Exit::bad_data, path, ": the tensors need ", end, " bytes of data, but the file has only ", data_bytes,
         ": it is truncated, copy or download it again");
  }
  if (end < data_bytes) {
    fail(Exit::bad_data, path, ": ", data_bytes - end, " bytes follow the last tensor, which ends at ", end,
         ": something was appended to the file");
  }
}

float float_of_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3FFu;
  if (exponent == 0) {  // zero and subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;  // infinity and NaN keep the largest exponent
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

float float_of_bfloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Elements [first, first + numel) of those that begin at a byte.
template <class Raw, class Out, class Decode>
void read_converted(const InputFile& file, uint64_t begin, int64_t first, int64_t numel, Out* out, Decode decode) {
  const size_t count = static_cast<size_t>(numel), chunk = std::min<size_t>(count, 1 << 17);
  const uint64_t offset = begin + static_cast<uint64_t>(first) * sizeof(Raw);
  std::vector<Raw> raw(chunk);
  for (size_t i = 0; i < count; i += chunk) {
    const size_t n = std::min(chunk, count - i);
    file.read(offset + i * sizeof(Raw), raw.data(), n * sizeof(Raw));
    for (size_t j = 0; j < n; ++j) out[i + j] = static_cast<Out>(decode(raw[j]));
  }
}

std::string json_string(const std::string& text) {
  try {
    return json_text(nlohmann::json(text));
  } catch (const nlohmann::json::exception&) {
    fail(Exit::internal, "a safetensors header must be UTF-8, but this is not: ", show_name(text));
  }
}

// The tensors get their byte ranges here.
std::string header_of(std::vector<TensorInfo>* tensors, std::map<std::string, std::string> metadata) {
  metadata["format"] = "pt";
  std::string header = "{" + json_string(metadata_key) + ":{";
  for (const auto& [key, value] : metadata) {
    header += (header.back() == '{' ? "" : ",") + json_string(key) + ":" + json_string(value);
  }
  header += "}";
  uint64_t end = 0;
  std::set<std::string> names{metadata_key};
  for (TensorInfo& tensor : *tensors) {
    CHECK_THAT(names.insert(tensor.name).second, "two tensors are named ", show_name(tensor.name));
    uint64_t bytes = 0;
    CHECK_THAT(bytes_of(tensor, &bytes), "tensor ", tensor.str(), " has no size in bytes");
    tensor.begin = end, tensor.end = end += bytes;
    header += str(",", json_string(tensor.name), ":{\"dtype\":", json_string(tensor.dtype),
                  ",\"shape\":", list(tensor.shape), ",\"data_offsets\":[", tensor.begin, ",", tensor.end, "]}");
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  CHECK_THAT(header.size() <= max_header, "the header has ", header.size(), " bytes");
  return header;
}

}  // namespace

int64_t TensorInfo::numel() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

std::string TensorInfo::str() const { return show_name(name) + " " + dtype + " " + list(shape); }

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  uint64_t length = 0;
  if (file_.size() < sizeof length) {
    fail(Exit::bad_data, path, ": ", file_.size(), " bytes are too few for a safetensors file: it is truncated");
  }
  file_.read(0, &length, sizeof length);
  const uint64_t available = file_.size() - sizeof length;
  if (length > max_header || length > available) {
    fail(Exit::bad_data, path, ": a header of ", length, " bytes is announced, but ", available,
         " bytes follow and at most ", max_header, " are allowed: is this a safetensors file, and complete?");
  }
  std::string header(length, '\0');
  file_.read(sizeof length, header.data(), length);
  // The parser would skip blanks or a byte-order mark in front, and take a zero byte for the end of the text.
  if (header.empty() || header.front() != '{') fail(Exit::bad_data, path, ": the header does not begin with '{'");
  if (header.find('\0') != std::string::npos) fail(Exit::bad_data, path, ": the header contains a zero byte");
  HeaderReader reader(file_.path(), &tensors_, &metadata_);
  nlohmann::json::sax_parse(header, &reader);
  for (const TensorInfo& tensor : tensors_) check_size(path, tensor);
  data_start_ = sizeof length + length;
  check_layout(path, &tensors_, file_.size() - data_start_);
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

template <class Out>
void SafetensorsFile::read_real(const TensorInfo& info, int64_t first, int64_t count, Out* out) const {
  CHECK_THAT(first >= 0 && count >= 0 && first + count <= info.numel(), first, " + ", count, " of ", info.str());
  const uint64_t begin = data_start_ + info.begin;
  const auto same = [](auto x) { return x; };
  if (info.dtype == "F32") read_converted<float>(file_, begin, first, count, out, same);
  else if (info.dtype == "F64") read_converted<double>(file_, begin, first, count, out, same);
  else if (info.dtype == "F16") read_converted<uint16_t>(file_, begin, first, count, out, float_of_half);
  else if (info.dtype == "BF16") read_converted<uint16_t>(file_, begin, first, count, out, float_of_bfloat);
  else fail(Exit::bad_data, path(), ": tensor ", info.str(), " is not F64, F32, F16 or BF16: convert it first");
}

void SafetensorsFile::read_f32(const TensorInfo& info, float* out) const { read_real(info, 0, info.numel(), out); }
void SafetensorsFile::read_f32(const TensorInfo& info, int64_t first, int64_t count, float* out) const {
  read_real(info, first, count, out);
}
void SafetensorsFile::read_f64(const TensorInfo& info, double* out) const { read_real(info, 0, info.numel(), out); }
void SafetensorsFile::read_f64(const TensorInfo& info, int64_t first, int64_t count, double* out) const {
  read_real(info, first, count, out);
}

void SafetensorsFile::read_raw(const TensorInfo& info, const std::string& dtype, void* out) const {
  if (info.dtype != dtype) {
    fail(Exit::bad_data, path(), ": tensor ", info.str(), " should have the dtype ", dtype);
  }
  file_.read(data_start_ + info.begin, out, info.end - info.begin);
}

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return bits_of(a->dtype) > bits_of(b->dtype);
  });
  std::vector<TensorInfo> infos;
  for (const TensorToWrite* tensor : order) infos.push_back({tensor->name, tensor->dtype, tensor->shape});
  const std::string header = header_of(&infos, metadata);
  const uint64_t length = header.size(), data_bytes = infos.empty() ? 0 : infos.back().end;
  OutputFile file(path, sizeof length + length + data_bytes);
  file.write(&length, sizeof length);
  file.write(header.data(), length);
  for (size_t i = 0; i < infos.size(); ++i) file.write(order[i]->data, infos[i].end - infos[i].begin);
  file.commit();
}

}  // namespace crossply
