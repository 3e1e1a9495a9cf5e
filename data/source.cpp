#include "data/source.h"

#include <cmath>

#include "data/arith.h"
#include "data/digest.h"
#include "data/prosqa.h"
#include "data/shards.h"
#include "data/text.h"
#include "engine/rng.h"

namespace crossply {

uint64_t Source::digest() const {
  const size_t T = static_cast<size_t>(seq_len());
  std::vector<int32_t> sample(2 * T);
  Digest digest;
  for (int64_t i = 0; i < size(); ++i) {
    read(i, sample.data(), sample.data() + T);
    digest.add(sample.data(), sample.size() * sizeof sample[0]);
  }
  return digest.value();
}

void RandomSamples::read(int64_t index, int32_t* tokens, int32_t* targets) const {
  CHECK_THAT(index >= 0 && index < count_, "sample ", index, " of ", count_);
  Random random(seed_, static_cast<uint64_t>(index));
  source_.read_at(random.below(offsets_), seq_len(), tokens, targets);
}

int64_t count_samples(const std::string& where, const char* split, int64_t asked, int64_t available) {
  if (asked > available)
    fail(Exit::usage, where, ": asked for ", asked, " ", split, " samples, but there are only ", available);
  return asked ? asked : available;
}

Dataset open_dataset(const DataOptions& options) {
  const std::string& spec = options.spec;
  if (options.seq_len < 0 || options.train_samples < 0 || options.test_samples < 0)
    fail(Exit::usage, "sequence length and numbers of samples must not be negative");
  constexpr int64_t longest = int64_t{1} << 30;  // of any model
  if (options.seq_len > longest)
    fail(Exit::usage, "a sequence length of ", options.seq_len, " is more than any model has, ", longest);
  if (!options.val_spec.empty() && !spec.ends_with(".bin"))
    fail(Exit::usage, "validation files go with token shards only, not with \"", spec, "\"");
  for (int k = 3; k <= 6; ++k)
    if (spec == "arith:" + std::to_string(k)) return open_arith(k, options);
  if (spec == "prosqa") return open_prosqa(options);
  if (spec.starts_with("text:")) return open_text(spec.substr(5), options);
  if (spec.ends_with(".bin")) return open_shards(options);
  fail(Exit::usage, "unknown data \"", spec, "\": expected arith:3, arith:4, arith:5, arith:6, prosqa, text:FILE, or ",
       "a glob of token shards that ends with .bin");
}

std::vector<std::string> data_files(const std::string& spec) {
  if (spec.starts_with("text:")) return {spec.substr(5)};
  return spec.ends_with(".bin") ? shard_paths(spec) : std::vector<std::string>();
}

double chance_of(const std::string& spec) {
  return spec.starts_with("arith:") ? 1.0 / arith::modulus : spec == "prosqa" ? 0.5 : NAN;
}

}  // namespace crossply
