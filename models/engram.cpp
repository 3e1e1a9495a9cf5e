#include "models/engram.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

constexpr int64_t largest = std::numeric_limits<int64_t>::max();

// The numbers of a list, and whether it is one of numbers in least..most.
bool read_list(const nlohmann::json& list, int64_t least, int64_t most, std::vector<int64_t>& numbers) {
  if (!list.is_array()) return false;
  for (const nlohmann::json& item : list) {
    if (!holds<int64_t>(item)) return false;
    const auto number = item.get<int64_t>();
    if (number < least || number > most) return false;
    numbers.push_back(number);
  }
  return true;
}
std::vector<int64_t> numbers_of(const std::string& text) {
  std::vector<int64_t> numbers;
  read_list(try_parse_json(text), std::numeric_limits<int64_t>::min(), largest, numbers);
  return numbers;
}

bool is_prime(int64_t n) {
  if (n < 4) return n > 1;
  if (n % 2 == 0) return false;
  for (int64_t d = 3; d * d <= n; d += 2)
    if (n % d == 0) return false;
  return true;
}
// Numbers first .. first + count - 1 of the primes from `least` on.
std::vector<int64_t> primes_from(int64_t least, int64_t first, int64_t count) {
  std::vector<int64_t> primes;
  for (int64_t n = least, seen = 0; std::ssize(primes) < count; ++n)
    if (is_prime(n) && seen++ >= first) primes.push_back(n);
  return primes;
}

uint64_t mixed(uint64_t z) {  // splitmix64's
  z ^= z >> 30, z *= 0xBF58476D1CE4E5B9;
  z ^= z >> 27, z *= 0x94D049BB133111EB;
  return z ^ (z >> 31);
}
// Odd numbers m, order of them, with V m below 2^63.
std::vector<int64_t> drawn_multipliers(int64_t seed, int64_t which, int64_t order, int64_t V) {
  const auto half = static_cast<uint64_t>(std::max<int64_t>(1, largest / V / 2));
  std::vector<int64_t> multipliers;
  for (int64_t i = 0; i < order; ++i) {
    const uint64_t s = static_cast<uint64_t>(seed) + 10007 * static_cast<uint64_t>(which) +
                       0x9E3779B97F4A7C15 * static_cast<uint64_t>(i + 2);
    multipliers.push_back(static_cast<int64_t>(2 * (mixed(s) % half) + 1));
  }
  return multipliers;
}

int64_t columns_of(const EngramOptions& engram) { return (engram.order - 1) * engram.heads; }
int64_t width_of(const Config& config) { return config.engram.width > 0 ? config.engram.width : config.hidden_size; }

// What tokens are told apart by: the size of the map, or of the vocabulary.
int64_t words_of(const std::vector<int64_t>& map, int64_t V) {
  return map.empty() ? V : 1 + *std::max_element(map.begin(), map.end());
}

// The file's {"map": [...], "size": V'} as the option's list.
std::string read_map(const std::string& path) {
  const nlohmann::json object = read_json(path);
  std::vector<int64_t> map;
  if (!object.contains("map") || !read_list(object["map"], 0, 1 << 30, map) || map.empty())
    fail(Exit::bad_data, path, ": \"map\" must be a list with a number for each token");
  const nlohmann::json size = object.value("size", nlohmann::json());
  if (size != words_of(map, 0))
    fail(Exit::bad_data, path, ": \"size\" is ", json_text(size), ", the numbers of \"map\" are below ",
         words_of(map, 0));
  return json_text(object["map"]);
}

struct Refuse {
  Exit code;
  const std::string& where;
  template <class... T>
  [[noreturn]] void operator()(const T&... words) const {
    fail(code, where, ": ", words...);
  }
};

void check_multipliers(const Config& config, int64_t words, size_t layers, const Refuse& refuse) {
  const EngramOptions& engram = config.engram;
  const nlohmann::json lists = try_parse_json(engram.multipliers);
  if (!lists.is_array() || (!lists.empty() && lists.size() != layers))
    refuse("engram_multipliers must be a list of engram_order odd numbers for each of engram_layers, or []");
  const int64_t most = words > 1 ? largest / (words - 1) : largest;
  for (const nlohmann::json& list : lists) {
    std::vector<int64_t> numbers;
    const bool odd = read_list(list, 1, most, numbers) && std::ssize(numbers) == engram.order &&
                     std::all_of(numbers.begin(), numbers.end(), [](int64_t m) { return m % 2 == 1; });
    if (!odd)
      refuse("engram_multipliers has ", excerpt(json_text(list)), ", which must be ", engram.order,
             " odd numbers, none above ", most, ", for a product with ", words - 1, " must stay below 2^63");
  }
}

void check_words(const Config& config, size_t layers, const Refuse& refuse) {
  const EngramOptions& engram = config.engram;
  const int64_t V = config.vocab_size;
  std::vector<int64_t> map, ends;
  if (engram.map != "none" && (!read_list(try_parse_json(engram.map), 0, V - 1, map) || std::ssize(map) != V))
    refuse("engram_map must have a number in 0..", V - 1, " for each of the ", V, " tokens; it is ",
           excerpt(engram.map), ", with ", map.size(), " such numbers");
  if (engram.pad_id < 0 || engram.pad_id >= V) refuse("engram_pad_id ", engram.pad_id, " must be in 0..", V - 1);
  if (!read_list(try_parse_json(engram.boundary), 0, V - 1, ends))
    refuse("engram_boundary ", excerpt(engram.boundary), " must be a list of tokens in 0..", V - 1, ", as in [0]");
  check_multipliers(config, words_of(map, V), layers, refuse);
}

}  // namespace

bool has_engram(const Config& config) { return config.engram.layers != "[]"; }

void check_engram(Config& config, Exit code, const std::string& where) {
  EngramOptions& engram = config.engram;
  const Refuse refuse{code, where};
  if (!has_engram(config)) {
    if (engram != EngramOptions()) refuse("without engram_layers the other options of Engram have no effect");
    return;
  }
  const int64_t applications = applications_of(config).count();
  std::vector<int64_t> layers;
  if (!read_list(try_parse_json(engram.layers), 0, applications - 1, layers) || layers.empty() ||
      std::adjacent_find(layers.begin(), layers.end(), std::greater_equal<>()) != layers.end())
    refuse("engram_layers ", excerpt(engram.layers), " must be layers below ", applications, ", ascending, as in [1]");
  const std::pair<const char*, std::pair<int64_t, int64_t>> sizes[] = {{"engram_order", {engram.order, 16}},
                                                                       {"engram_heads", {engram.heads, 1024}},
                                                                       {"engram_rows", {engram.rows, 1 << 28}}};
  for (const auto& [key, size] : sizes)
    if (const int64_t least = key == std::string("engram_heads") ? 1 : 2;
        size.first < least || size.first > size.second)
      refuse(key, " must be in ", least, "..", size.second, ", is ", size.first);
  if (engram.seed < 0) refuse("engram_seed must be at least 0, is ", engram.seed);
  const int64_t Z = columns_of(engram), M = width_of(config);
  if (engram.width < 0 || engram.width > 1 << 30 || M % Z != 0)
    refuse("engram_width ", M, engram.width == 0 ? ", the model's," : "",
           " must be a multiple of (engram_order - 1) * ", "engram_heads = ", Z);
  if (engram.rows * Z > 1 << 30)
    refuse("engram_rows ", engram.rows, " for each of ", Z, " n-grams and heads are more than a table may have, ",
           1 << 30);
  if (engram.map != "none" && !engram.map.starts_with('[')) engram.map = read_map(engram.map);
  check_words(config, layers.size(), refuse);
}

void declare_engram(ParameterTable& params, const Config& config, int64_t streams) {
  const std::vector<int64_t> layers = numbers_of(config.engram.layers);
  const int64_t C = config.hidden_size, M = width_of(config);
  for (size_t j = 0; j < layers.size(); ++j) {
    const EngramHash hash(config, j);
    const std::string rows = layer_name(static_cast<int>(layers[j]), "engram.");
    params.add(rows + "embed.weight", Shape{hash.table_rows(), M / hash.columns()}, Init::normal(0.02), Role::table,
               {.lr_mul = 5, .wd_mul = 0});
    params.add(rows + "wkv.weight", Shape{(streams + 1) * C, M}, Init::normal(config.initializer_range),
               Role::input_projection);
    for (const char* gain : {"q_weight", "k_weight"})
      params.add(rows + gain, Shape{streams, C}, Init::constant(1), Role::norm);
  }
}

void start_engram_as_plain(ParameterTable& params) {
  for (Parameter& row : params.rows()) {
    if (!row.name.ends_with(".engram.wkv.weight")) continue;
    const Init keys = row.init;
    const int64_t streams = params.at(row.name.substr(0, row.name.rfind("wkv")) + "q_weight").shape[0];
    const int64_t values = row.shape.numel() / (streams + 1) * streams;
    row.init = {keys.rule + ", values 0", [keys, values](uint64_t seed, uint64_t stream, int64_t i) {
                  return i < values ? keys.at(seed, stream, i) : 0;
                }};
  }
}

// -----------------------------------------------------------------------------------------------------------------

EngramHash::EngramHash(const Config& config, size_t which)
    : V_(config.vocab_size), heads_(config.engram.heads), pad_(config.engram.pad_id) {
  const EngramOptions& engram = config.engram;
  const std::vector<int64_t> map = numbers_of(engram.map);
  map_.assign(map.begin(), map.end());
  const std::vector<int64_t> ends = numbers_of(engram.boundary);
  if (!ends.empty()) ends_.assign(static_cast<size_t>(V_), 0);
  for (const int64_t token : ends) ends_[static_cast<size_t>(token)] = 1;
  pad_ = mapped(static_cast<int32_t>(engram.pad_id));
  const nlohmann::json given = try_parse_json(engram.multipliers);
  const auto j = static_cast<int64_t>(which);
  if (given.empty()) multipliers_ = drawn_multipliers(engram.seed, j, engram.order, words_of(map, V_));
  else read_list(given.at(which), 1, largest, multipliers_);
  const int64_t Z = columns_of(engram);
  primes_ = primes_from(engram.rows, j * Z, Z);
  offsets_.push_back(0);
  for (const int64_t prime : primes_) offsets_.push_back(offsets_.back() + prime);
}

void EngramHash::rows_of(int32_t* to, const int32_t* tokens, int64_t count, int64_t before,
                         const int32_t* documents) const {
  const auto beyond = std::find_if(tokens, tokens + count, [V = V_](int32_t t) { return t < 0 || t >= V; });
  CHECK_THAT(beyond == tokens + count, "token ", *beyond, " of a vocabulary of ", V_);
#pragma omp parallel for schedule(static) if (count * columns() > 16384)
  for (int64_t t = 0; t < count; ++t)
    row_of(to + t * columns(), tokens + t, documents != nullptr ? t - documents[2 * t] : before + t);
}

void EngramHash::row_of(int32_t* to, const int32_t* token, int64_t before) const {
  int64_t hash = mapped(*token) * multipliers_[0];
  bool stopped = false;
  for (int64_t i = 1; i < std::ssize(multipliers_); ++i) {
    stopped = stopped || i > before || (!ends_.empty() && ends_[static_cast<size_t>(token[-i])] != 0);
    hash ^= (stopped ? pad_ : mapped(token[-i])) * multipliers_[static_cast<size_t>(i)];
    for (int64_t head = 0; head < heads_; ++head) {
      const auto column = static_cast<size_t>((i - 1) * heads_ + head);
      *to++ = static_cast<int32_t>(hash % primes_[column] + offsets_[column]);
    }
  }
}

void EngramInput::load(Device& device, const int32_t* tokens, int64_t stride, int64_t before,
                       const int32_t* documents) {
  const int64_t B = rows->shape[0], T = rows->shape[1];
  for (int64_t b = 0; b < B; ++b)
    hash.rows_of(host.data() + b * T * hash.columns(), tokens + b * stride, T, before,
                 documents != nullptr ? documents + 2 * b * T : nullptr);
  device.copy_in(rows->tensor.data, host.data(), rows->bytes());
}

// -----------------------------------------------------------------------------------------------------------------

Engrams::Engrams(const Build& build, Connection& connection, EngramInputs& inputs)
    : b_(build), connection_(connection), inputs_(inputs), layers_(numbers_of(build.config.engram.layers)) {}

void Engrams::before(int64_t application) {
  const auto found = std::find(layers_.begin(), layers_.end(), application);
  if (found == layers_.end()) return;
  const std::string name = str("L", application, ".engram");
  const std::string rows = layer_name(static_cast<int>(application), "engram.");
  EngramHash hash(b_.config, static_cast<size_t>(found - layers_.begin()));
  Value* at = b_.tape.input(name + ".rows", Shape{b_.B, b_.T, hash.columns()}, Dtype::i32);
  std::vector<int32_t> host(static_cast<size_t>(at->shape.numel()));
  inputs_.push_back(std::make_shared<EngramInput>(EngramInput{std::move(hash), at, std::move(host)}));
  Value *table = b_.parameter(rows + "embed.weight"), *wkv = b_.parameter(rows + "wkv.weight");
  const int64_t C = b_.config.hidden_size, M = wkv->shape[1];
  Value* looked_up = ops::embedding(b_.tape, name + ".lookup", at, table, Shape{b_.B, b_.T, M});
  Value* kv = ops::linear(b_.tape, name + ".kv", looked_up, wkv, Shape{b_.B, b_.T, wkv->shape[0] / C, C});
  connection_.set_stream(ops::engram_gate(b_.tape, name, connection_.stream(), kv, b_.parameter(rows + "q_weight"),
                                          b_.parameter(rows + "k_weight"), b_.config.norm_eps));
}

}  // namespace crossply
