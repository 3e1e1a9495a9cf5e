#include "engine/io/safetensors.h"

#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>

#include "engine/rng.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A file of its own that is gone at the end of the test.
struct ScratchFile {
  const TempDir dir{memory_or_disk()};
  const std::string path = dir.file("x");
  void put(const std::string& bytes) const {
    std::filesystem::remove(path);  // much faster than truncating, for which some file systems wait for the disk
    write_text(path, bytes);
  }
};

std::string length_prefix(uint64_t n) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &n, 8);
  return out;
}

std::string file_of(const std::string& header, const std::string& data) {
  return length_prefix(header.size()) + header + data;
}

// The width in bytes of the dtypes that the tests use; independent of the parser's own table.
uint64_t width_of(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64" || dtype == "C64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  return dtype == "F4" || dtype.rfind("F6", 0) == 0 ? 0 : 1;  // 0: less than a byte, not checked
}

// Opens the file; whatever opens must be consistent and must read without touching a byte outside (the buffers have the
// exact size, for AddressSanitizer). Returns whether it opened. Only Exit::bad_data is a proper refusal.
bool opens_consistently(const ScratchFile& scratch, uint64_t file_bytes) {
  try {
    const SafetensorsFile file(scratch.path);
    uint64_t end = 0;
    std::set<std::string> names;
    for (const TensorInfo& info : file.tensors()) {
      CHECK(info.begin == end);
      end = info.end;
      CHECK(names.insert(info.name).second);
      CHECK(file.find(info.name) == &info);
      const uint64_t numel = std::accumulate(info.shape.begin(), info.shape.end(), uint64_t{1}, std::multiplies<>());
      if (width_of(info.dtype) != 0) CHECK(info.end - info.begin == numel * width_of(info.dtype));
      std::vector<char> raw(info.end - info.begin);
      file.read_raw(info, info.dtype, raw.data());
      if (info.dtype == "F64" || info.dtype == "F32" || info.dtype == "F16" || info.dtype == "BF16") {
        std::vector<float> f32(numel);
        file.read_f32(info, f32.data());
      }
    }
    CHECK(end < file_bytes);
    return true;
  } catch (const Error& error) {
    CHECK_MESSAGE(error.code == Exit::bad_data, error.what());
    return false;
  }
}

// A small file with two kinds of tensors, an empty one, and metadata.
std::string small_file() {
  return file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("e":{"dtype":"I64","shape":[0,3],"data_offsets":[8,8]},)"
                 R"("b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}})",
                 std::string("\0\0\x80\x3f\0\0\0\x40\x80\x3f\0\x40\x40\x40", 14));
}

void check_refused(const ScratchFile& scratch, const std::string& bytes, const std::string& words) {
  scratch.put(bytes);
  CAPTURE(bytes.substr(0, 200));
  check_fails(Exit::bad_data, {words, scratch.path}, [&] { SafetensorsFile(scratch.path); });
}

}  // namespace

TEST_CASE("safetensors: what is written is read back, any dtype, rank and order") {
  const ScratchFile scratch;
  const auto f32 = random_vector<float>(6, 1, 1e3);
  const auto f64 = random_vector<double>(5, 2);
  const std::vector<int32_t> i32{-1, 2, INT32_MAX};
  const std::vector<int64_t> i64{INT64_MIN};
  const std::vector<uint64_t> u64{~0ull, 1};
  const float scalar = -0.f;
  const std::vector<TensorToWrite> tensors{{"i32 \"quoted\" \n \xc3\xa9", "I32", {3}, i32.data()},
                                           {"f32", "F32", {2, 1, 3}, f32.data()},
                                           {"f64", "F64", {5}, f64.data()},
                                           {"empty", "F32", {4, 0}, nullptr},
                                           {"scalar", "F32", {}, &scalar},
                                           {"i64", "I64", {1}, i64.data()},
                                           {"u64", "U64", {2}, u64.data()}};
  write_safetensors(scratch.path, tensors, {{"step", "7"}});
  const SafetensorsFile file(scratch.path);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"step", "7"}});
  REQUIRE(file.tensors().size() == tensors.size());
  CHECK(file.tensors()[0].name == "f64");  // wide ones first, each group in the order given
  CHECK(file.tensors()[3].name == tensors[0].name);
  for (const TensorToWrite& want : tensors) {
    const TensorInfo* info = file.find(want.name);
    REQUIRE(info != nullptr);
    CHECK(info->dtype == want.dtype);
    CHECK(info->shape == want.shape);
    std::vector<char> raw(info->end - info->begin + 1, 'x');
    file.read_raw(*info, want.dtype, raw.data());
    if (want.data != nullptr) CHECK(std::memcmp(raw.data(), want.data, raw.size() - 1) == 0);
    CHECK(raw.back() == 'x');
  }
  auto got64 = poisoned<double>(6);
  file.read_f64(*file.find("f32"), got64.data());
  CHECK(got64 == convert<double>(f32));
  auto got32 = poisoned<float>(5);
  file.read_f32(*file.find("f64"), got32.data());
  CHECK(got32 == convert<float>(f64));
  CHECK(file.find("scalar")->numel() == 1);
  CHECK(file.find("empty")->numel() == 0);
  CHECK(file.find("nothing") == nullptr);
  check_fails(Exit::bad_data, {}, [&] { file.read_f32(*file.find("i64"), got32.data()); });
  check_fails(Exit::bad_data, {}, [&] { file.read_raw(*file.find("i64"), "U64", got32.data()); });
  // The layout that other readers rely on.
  const std::string bytes = read_text(scratch.path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  CHECK(bytes[8] == '{');
  CHECK(bytes.size() == 8 + length + 5 * 8 + 8 + 2 * 8 + 3 * 4 + 6 * 4 + 4);
  CHECK(opens_consistently(scratch, bytes.size()));
}

TEST_CASE("safetensors: more than one buffer of numbers") {
  const ScratchFile scratch;
  const auto want = random_vector<float>(300001, 3);
  write_safetensors(scratch.path, {{"w", "F32", {300001}, want.data()}});
  const SafetensorsFile file(scratch.path);
  auto got = poisoned<float>(300001);
  file.read_f32(file.tensors()[0], got.data());
  CHECK(got == want);
}

TEST_CASE("safetensors: every one of the 65536 halves and bfloats is converted exactly") {
  const ScratchFile scratch;
  std::vector<uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  write_safetensors(scratch.path, {{"half", "F16", {65536}, bits.data()}, {"bfloat", "BF16", {65536}, bits.data()}});
  const SafetensorsFile file(scratch.path);
  for (const int mantissa_bits : {10, 7}) {
    const std::string name = mantissa_bits == 10 ? "half" : "bfloat";
    std::vector<float> got(65536, 1.f);
    std::vector<double> got64(65536, 1.0);
    file.read_f32(*file.find(name), got.data());
    file.read_f64(*file.find(name), got64.data());
    int64_t wrong = 0;
    for (int b = 0; b < 65536; ++b) {
      // From the definition: sign, exponent with its bias, mantissa with or without the leading one.
      const int largest = (1 << (15 - mantissa_bits)) - 1, bias = largest / 2;
      const int exponent = (b & 0x7FFF) >> mantissa_bits, mantissa = b & ((1 << mantissa_bits) - 1);
      double want = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                  : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
      if (exponent == largest) want = mantissa != 0 ? NAN : INFINITY;
      if (b & 0x8000) want = -want;
      const size_t i = static_cast<size_t>(b);
      const bool same = std::isnan(want)
                            ? std::isnan(got[i]) && std::isnan(got64[i])
                            : got[i] == want && got64[i] == want && std::signbit(got[i]) == std::signbit(want);
      wrong += !same;
    }
    CHECK_MESSAGE(wrong == 0, name << ": " << wrong << " wrong");
  }
}

TEST_CASE("safetensors: each malformation is refused in words") {
  const ScratchFile scratch;
  const std::string four(4, 'x'), eight(8, 'x');
  const auto tensor = [](const std::string& rest) { return "{\"t\":{" + rest + "}}"; };
  const auto good = [](const std::string& name, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + offsets + "}";
  };
  check_refused(scratch, "", "0 bytes are too few");
  check_refused(scratch, "1234567", "7 bytes are too few");
  check_refused(scratch, length_prefix(1ull << 60) + "{}", "a header of 1152921504606846976 bytes");
  check_refused(scratch, length_prefix(~0ull) + "{}", "is announced");
  check_refused(scratch, length_prefix(3) + "{}", "is announced");
  check_refused(scratch, file_of("", ""), "does not begin with '{'");
  check_refused(scratch, file_of(" {}", ""), "does not begin with '{'");
  check_refused(scratch, file_of("\xef\xbb\xbf{}", ""), "does not begin with '{'");
  check_refused(scratch, file_of("[]", ""), "does not begin with '{'");
  check_refused(scratch, file_of(std::string("{}\0 ", 4), ""), "zero byte");
  check_refused(scratch, file_of("{", ""), "not a JSON object");
  check_refused(scratch, file_of("{}{}", ""), "not a JSON object");
  check_refused(scratch, file_of("{} x", ""), "not a JSON object");
  check_refused(scratch, file_of("{/**/}", ""), "not a JSON object");
  check_refused(scratch, file_of("{\"\xff\":{}}", ""), "in UTF-8");
  check_refused(scratch, file_of("{\"t\":null}", ""), "\"t\": null does not belong");
  check_refused(scratch, file_of("{\"t\":true}", ""), "a boolean does not belong");
  check_refused(scratch, file_of("{\"t\":7}", ""), "the number 7 does not belong");
  check_refused(scratch, file_of("{\"t\":[]}", ""), "a list does not belong");
  check_refused(scratch, file_of("{\"t\":\"s\"}", ""), "the string \"s\" does not belong");
  check_refused(scratch, file_of("{" + good("t", "[0,4]") + "," + good("t", "[4,8]") + "}", eight),
                "\"t\" occurs twice");
  check_refused(scratch, file_of(R"({"__metadata__":{},"__metadata__":{}})", ""), "\"__metadata__\" occurs twice");
  check_refused(scratch, file_of(R"({"__metadata__":{"a":"b","a":"b"}})", ""), "key \"a\" occurs twice");
  check_refused(scratch, file_of(R"({"__metadata__":{"a":1}})", ""), "the number 1 does not belong");
  check_refused(scratch, file_of(R"({"__metadata__":{"a":{}}})", ""), "an object does not belong");
  check_refused(scratch, file_of(R"({"__metadata__":["a"]})", ""), "a list does not belong");
  check_refused(scratch, file_of(R"({"__metadata__":"a"})", ""), "does not belong");
  check_refused(scratch, file_of(tensor(R"("dtype":"U8","dtype":"U8")"), ""), "key \"dtype\" occurs twice");
  check_refused(scratch, file_of(tensor(R"("dtype":"U8","shape":[],"offsets":[0,1])"), "x"), "is not one of dtype");
  check_refused(scratch, file_of(tensor(R"("shape":[4],"data_offsets":[0,4])"), four), "has no dtype");
  check_refused(scratch, file_of(tensor(R"("dtype":"U8","data_offsets":[0,4])"), four), "has no shape");
  check_refused(scratch, file_of(tensor(R"("dtype":"U8","shape":[4])"), four), "has no data_offsets");
  check_refused(scratch, file_of(tensor(R"("dtype":["U8"])"), ""), "a list does not belong");
  check_refused(scratch, file_of(tensor(R"("dtype":8)"), ""), "the number 8 does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":4)"), ""), "the number 4 does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":["4"])"), ""), "the string \"4\" does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":[[4]])"), ""), "a list does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":[{}])"), ""), "an object does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":[-1])"), ""), "the negative number -1");
  check_refused(scratch, file_of(tensor(R"("shape":[4.0])"), ""), "the number 4.0 does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":[1e3])"), ""), "the number 1e3 does not belong");
  check_refused(scratch, file_of(tensor(R"("shape":[9223372036854775808])"), ""), "too large");
  check_refused(scratch, file_of(tensor(R"("shape":[99999999999999999999])"), ""), "does not belong");
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  check_refused(scratch, file_of(tensor("\"shape\":[" + ones + "]"), ""), "more than 64 numbers");
  check_refused(scratch, file_of(tensor(R"("data_offsets":[0])"), ""), "has 1 numbers instead of 2");
  check_refused(scratch, file_of(tensor(R"("data_offsets":[0,1,2])"), ""), "has 3 numbers instead of 2");
  const auto typed = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return tensor("\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
  };
  check_refused(scratch, file_of(typed("F128", "[1]", "[0,4]"), four), "unknown dtype \"F128\"");
  check_refused(scratch, file_of(typed("f32", "[1]", "[0,4]"), four), "unknown dtype \"f32\"");
  check_refused(scratch, file_of(typed("F32", "[4294967296,4294967296]", "[0,0]"), ""), "no size in bytes");
  check_refused(scratch, file_of(typed("F32", "[4294967296,4294967296,0]", "[0,0]"), ""), "no size in bytes");
  check_refused(scratch, file_of(typed("F64", "[2305843009213693952]", "[0,0]"), ""), "no size in bytes");
  check_refused(scratch, file_of(typed("F4", "[3]", "[0,1]"), "x"), "no size in bytes");
  check_refused(scratch, file_of(typed("F32", "[1]", "[0,8]"), eight), "needs 4 bytes, but its data_offsets are [0, 8");
  check_refused(scratch, file_of(typed("F32", "[2]", "[4,0]"), eight), "data_offsets are [4, 0]");
  check_refused(scratch, file_of(typed("F32", "[1]", "[4,8]"), eight), "ends at 0: a hole");
  check_refused(scratch, file_of("{" + good("a", "[0,4]") + "," + good("b", "[2,6]") + "}", "xxxxxx"), "an overlap");
  check_refused(scratch, file_of("{" + good("a", "[0,4]") + "," + good("b", "[0,4]") + "}", four), "an overlap");
  check_refused(scratch, file_of("{" + good("b", "[5,9]") + "," + good("a", "[0,4]") + "}", "xxxxxxxxx"), "a hole");
  check_refused(scratch, file_of(typed("F32", "[2]", "[0,8]"), "1234567"), "it is truncated");
  check_refused(scratch, file_of(typed("F32", "[2]", "[0,8]"), "123456789"), "1 bytes follow the last tensor");
  check_refused(scratch, file_of("{}", "x"), "1 bytes follow the last tensor");
  check_refused(scratch, file_of("{" + good("\\u001b[2J" + std::string(500, 'n'), "[0,5]") + "}", "xxxxx"),
                "\"\\x1b[2Jnn");
  check_refused(scratch, file_of(std::string(99999, '['), ""), "does not begin");
  check_refused(scratch, file_of("{\"t\":" + std::string(99999, '['), ""), "a list does not belong");
}

TEST_CASE("safetensors: unusual but legal files open") {
  const ScratchFile scratch;
  for (const char* header : {"{}", "{}      ", "{ \"__metadata__\" : {} }"}) {
    scratch.put(file_of(header, ""));
    CHECK(SafetensorsFile(scratch.path).tensors().empty());
  }
  scratch.put(file_of(R"({"z":{"data_offsets":[2,3],"dtype":"F4","shape":[2]},)"
                      R"("y":{"shape":[2],"dtype":"U8","data_offsets":[0,2]}})",
                      "xxx"));
  const SafetensorsFile file(scratch.path);
  CHECK(file.tensors()[0].name == "y");
  CHECK(file.tensors()[1].name == "z");
}

TEST_CASE("safetensors: what cannot be opened, or changes underneath") {
  const ScratchFile scratch;
  check_fails(Exit::no_input, {}, [] { SafetensorsFile("/nonexistent/x.safetensors"); });
  check_fails(Exit::bad_data, {}, [] { SafetensorsFile("/dev/null"); });
  check_fails(Exit::bad_data, {}, [] { SafetensorsFile("/tmp"); });
  scratch.put(small_file());
  const SafetensorsFile file(scratch.path);
  std::filesystem::resize_file(scratch.path, small_file().size() - 1);
  std::vector<float> out(3);
  check_fails(Exit::io, {}, [&] { file.read_f32(*file.find("b"), out.data()); });
  check_fails(Exit::io, {}, [] { write_safetensors("/nonexistent/x", {}); });
  check_fails(Exit::io, {}, [] { write_safetensors("/dev/null", {}); });
  const float x = 1;
  const TensorToWrite a{"a", "F32", {}, &x}, not_utf8{"\xff", "F32", {}, &x};
  check_fails(Exit::internal, {}, [&] { write_safetensors(scratch.path, {a, a}); });
  check_fails(Exit::internal, {}, [&] { write_safetensors(scratch.path, {not_utf8}); });
  CHECK(read_text(scratch.path).size() == small_file().size() - 1);  // a refused write leaves what was there
}

TEST_CASE("safetensors: every truncation is refused") {
  const ScratchFile scratch;
  const std::string whole = small_file();
  scratch.put(whole);
  CHECK(opens_consistently(scratch, whole.size()));
  for (size_t n = 0; n < whole.size(); ++n) {
    scratch.put(whole.substr(0, n));
    CAPTURE(n);
    CHECK(!opens_consistently(scratch, n));
  }
}

TEST_CASE("safetensors: every flipped bit of the header is refused or leaves a consistent file") {
  const ScratchFile scratch;
  const std::string whole = small_file();
  int refused = 0;
  for (size_t i = 0; i < whole.size() - 14; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = whole;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      scratch.put(changed);
      CAPTURE(i);
      CAPTURE(bit);
      refused += !opens_consistently(scratch, changed.size());
    }
  }
  CHECK(refused > 1000);  // nearly all but letters inside names
}

TEST_CASE("safetensors: random mutations are refused or leave a consistent file") {
  const ScratchFile scratch;
  const std::string whole = small_file();
  const std::vector<std::string> pieces{
      "0",  "9",   "-",      "\"",    "[",       "]",       "{",   "}", ",", ":", "18446744073709551615",
      "e9", "F16", "\"a\":", "[0,8]", "\\u0000", {"\0", 1}, "\x80"};
  Random random(5, 0);
  const auto below = [&](size_t n) { return static_cast<size_t>(random.below(static_cast<int64_t>(n))); };
  int opened = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bytes = whole;
    for (size_t k = below(4) + 1; k > 0; --k) {
      const size_t at = below(bytes.size()), n = below(5);
      switch (below(5)) {
        case 0: bytes[at] = static_cast<char>(random.bits()); break;
        case 1: bytes.insert(at, pieces[below(pieces.size())]); break;
        case 2: bytes.erase(at, n); break;
        case 3: bytes.insert(at, bytes.substr(below(bytes.size()), 4 * n)); break;
        default: bytes.replace(at, 1, n, static_cast<char>('0' + below(10))); break;
      }
    }
    // Half of the time the length fits again, so that the parser gets past it.
    if (bytes.size() > 22 && trial % 2 == 0) bytes.replace(0, 8, length_prefix(bytes.size() - 22));
    scratch.put(bytes);
    CAPTURE(trial);
    opened += opens_consistently(scratch, bytes.size());
  }
  CHECK(opened > 100);  // otherwise the mutations were too coarse to test anything
}
