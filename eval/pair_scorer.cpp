#include "eval/pair_scorer.h"

#include <algorithm>
#include <tuple>

#include "eval/decode.h"
#include "eval/scorer.h"
#include "kernels/block/softcap.h"

namespace crossply {

// Tokens of padding in a batch. With more, another batch is faster, although its products have fewer rows.
constexpr int64_t max_padding = 128;

PairTokens tokens_read(const TokenPair& pair) {
  const std::vector<int32_t>&good = pair.good, &bad = pair.bad;
  CHECK_THAT(good.size() > 1 && bad.size() > 1 && good[0] == bad[0], "a pair of ", good.size(), " and ", bad.size(),
             " tokens");
  // Where one sentence begins the other, its last token is not shared: it is only predicted.
  const auto last = std::min(good.size(), bad.size()) - 1;
  const auto shared =
      std::mismatch(good.begin(), good.begin() + static_cast<ptrdiff_t>(last), bad.begin()).first - good.begin();
  return {shared, std::ssize(good) - 1 - shared, std::ssize(bad) - 1 - shared};
}

PairScorer::Pass::Pass(Device& device, ParameterTable& params, const Config& config, int64_t rows, int64_t length,
                       int64_t cached)
    : T(length), tape(params.dtype(), cached) {
  graph = record_continuation(tape, params, config, rows, T);
  tape.plan(PlanMode::reuse);
  tape.allocate(device);
}

PairScorer::PairScorer(Device& device, ParameterTable& params, const Config& config, int64_t batch_tokens)
    : device_(device), params_(params), config_(config), batch_tokens_(batch_tokens) {
  CHECK_THAT(params.dtype() == Dtype::f32, "scores are computed in f32");
}

void PairScorer::record(const Sizes& sizes) {
  if (sizes == sizes_) return;
  first_.reset(), second_.reset();  // their memory first
  const auto pass = [&](int64_t T) {
    return std::make_unique<Pass>(device_, params_, config_, sizes.B, T, sizes.cached());
  };
  first_ = pass(sizes.first);
  if (sizes.second > 0) {
    second_ = pass(sizes.second);
    const std::vector<Value*> filled = caches_of(first_->tape), read = caches_of(second_->tape);
    CHECK_THAT(filled.size() == read.size(), "pairs: ", read.size(), " caches of ", filled.size());
    for (size_t i = 0; i < read.size(); ++i) read[i]->tensor.data = filled[i]->tensor.data;
  }
  sizes_ = sizes;
}

std::vector<PairScore> PairScorer::score(const std::vector<TokenPair>& pairs,
                                         const std::function<void(int64_t, int64_t)>& told) {
  std::vector<PairScore> scores(pairs.size());
  std::vector<Job> jobs;
  int64_t all = 0, done = 0;
  for (size_t i = 0; i < pairs.size(); ++i) {
    jobs.push_back({&pairs[i], tokens_read(pairs[i]), &scores[i]});
    all += jobs.back().tokens.sum();
  }
  const auto order = [](const Job& job) { return std::tuple(job.tokens.shared, job.tokens.good, job.tokens.bad); };
  std::stable_sort(jobs.begin(), jobs.end(), [&](const Job& a, const Job& b) { return order(a) < order(b); });
  for (size_t begin = 0, end; begin < jobs.size(); begin = end) {
    end = end_of_batch(jobs, begin);
    score_batch({jobs.begin() + static_cast<ptrdiff_t>(begin), jobs.begin() + static_cast<ptrdiff_t>(end)});
    for (size_t i = begin; i < end; ++i) done += jobs[i].tokens.sum();
    if (told) told(done, all);
  }
  return scores;
}

// Behind the last job that goes together with this one.
size_t PairScorer::end_of_batch(const std::vector<Job>& jobs, size_t begin) const {
  PairTokens row = jobs[begin].tokens;  // of the batch, which is as long as its longest
  int64_t padding = 0;
  size_t end = begin + 1;
  for (; end < jobs.size() && jobs[end].tokens.shared == row.shared; ++end) {
    const PairTokens& next = jobs[end].tokens;
    const PairTokens longer{row.shared, std::max(row.good, next.good), std::max(row.bad, next.bad)};
    const int64_t rows = static_cast<int64_t>(end - begin);
    padding += rows * (longer.sum() - row.sum()) + longer.sum() - next.sum();
    if (padding > max_padding || (rows + 1) * longer.sum() > batch_tokens_) break;
    row = longer;
  }
  return end;
}

void PairScorer::score_batch(const std::vector<Job>& jobs) {
  Sizes sizes{std::ssize(jobs), jobs[0].tokens.shared, 0, 0};
  std::vector<const std::vector<int32_t>*> good, bad;
  for (const Job& job : jobs) {
    sizes.first = std::max(sizes.first, job.tokens.shared + job.tokens.good);
    sizes.second = std::max(sizes.second, job.tokens.bad);
    good.push_back(&job.pair->good), bad.push_back(&job.pair->bad);
  }
  record(sizes);
  const size_t shared = static_cast<size_t>(sizes.shared), first = static_cast<size_t>(sizes.first);
  const std::vector<float> losses = run(*first_, good, 0);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const std::vector<int32_t>&of_good = *good[i], &of_bad = *bad[i];
    double before = 0, after = 0;  // of the tokens that both have, and of the others
    for (size_t t = 0; t + 1 < of_good.size(); ++t)
      (t + 1 < shared ? before : after) += finite_logprob(losses[i * first + t], of_good[t + 1], t);
    const size_t branch = i * first + shared - 1;
    jobs[i].score->good = before + after;
    jobs[i].score->bad = before - static_cast<double>(losses[branch]) +
                         logit_difference(static_cast<int64_t>(branch), of_bad[shared], of_good[shared]);
  }
  if (sizes.second == 0) return;
  const size_t second = static_cast<size_t>(sizes.second);
  const std::vector<float> rest = run(*second_, bad, sizes.shared);
  for (size_t i = 0; i < jobs.size(); ++i)
    for (size_t t = shared; t + 1 < bad[i]->size(); ++t)
      jobs[i].score->bad += finite_logprob(rest[i * second + t - shared], (*bad[i])[t + 1], t);
}

// The losses (B, T) of what follows each token of the texts from this position on; 0 where a text has no more.
std::vector<float> PairScorer::run(Pass& pass, const std::vector<const std::vector<int32_t>*>& texts,
                                   int64_t position) {
  const int64_t T = pass.T, S = sizes_.cached();
  const size_t size = texts.size() * static_cast<size_t>(T);
  std::vector<int32_t> all(texts.size() * static_cast<size_t>(S), 0), tokens(size, 0), targets(size, -1);
  for (int64_t i = 0; i < std::ssize(texts); ++i) {
    const std::vector<int32_t>& text = *texts[static_cast<size_t>(i)];
    std::copy(text.begin(), text.end() - 1, all.begin() + i * S);
    std::copy_n(all.begin() + i * S + position, T, tokens.begin() + i * T);
    if (std::ssize(text) > position + 1) std::copy(text.begin() + position + 1, text.end(), targets.begin() + i * T);
  }
  device_.copy_in(pass.graph.tokens->tensor.data, tokens.data(), size * sizeof(int32_t));
  device_.copy_in(pass.graph.targets->tensor.data, targets.data(), size * sizeof(int32_t));
  for (const auto& engram : pass.graph.engrams) engram->load(device_, all.data() + position, S, position);
  pass.tape.forward(Step{.position = position});
  std::vector<float> losses(size);
  device_.copy_out(losses.data(), pass.graph.losses->tensor.data, size * sizeof(float));
  return losses;
}

// How much larger the logit of one token is than that of another after this row of the first pass.
double PairScorer::logit_difference(int64_t row, int32_t token, int32_t other) {
  const int64_t C = config_.hidden_size;
  const ops::LogitHead& head = first_->graph.head;
  const auto row_of = [&](const Value& matrix, int64_t i) {
    std::vector<float> numbers(static_cast<size_t>(C));
    device_.copy_out(numbers.data(), matrix.tensor.as<float>() + i * C, numbers.size() * sizeof(float));
    return numbers;
  };
  const std::vector<float> h = row_of(*head.inp, row), a = row_of(*head.weight, token), b = row_of(*head.weight, other);
  const auto product = [&](const auto& weight) {
    double sum = 0;
    for (size_t c = 0; c < h.size(); ++c) sum += weight(c) * static_cast<double>(h[c]);
    return sum;
  };
  const auto of_a = [&](size_t c) { return static_cast<double>(a[c]); };
  const auto of_b = [&](size_t c) { return static_cast<double>(b[c]); };
  if (head.softcap == 0) return product([&](size_t c) { return of_a(c) - of_b(c); });
  return softcap_ref(product(of_a), head.softcap) - softcap_ref(product(of_b), head.softcap);
}

}  // namespace crossply
