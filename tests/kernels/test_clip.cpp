#include "kernels/optim/clip.h"

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

double factor_of(Backend backend, std::vector<double> sums, std::vector<float> largest, double scale, double clip) {
  double factor = -1;
  std::vector<double> scales{scale};
  const Tensor others = largest.empty() ? Tensor{} : view(largest);
  run_on(backend, {view(&factor, {1}), view(scales), view(sums), others},
         [&](auto& t, Stream stream) { clip_factor(t[0], t[1], t[2], t[3], clip, stream); });
  return factor;
}

}  // namespace

TEST_CASE("clip: gradients longer than the clip get its length, others keep theirs") {
  for (const Backend backend : all_backends()) {
    CAPTURE(backend);
    for (const double scale : {1.0, 0.25, 3.0}) {
      for (const double norm : {0.0, 1e-9, 0.499, 2.0, 1e30}) {
        CAPTURES(scale, norm);
        const double squares = norm / scale * (norm / scale);
        const double by = factor_of(backend, {squares, 7}, {}, scale, 0.5);
        CHECK(by == doctest::Approx(norm > 0.5 ? scale * 0.5 / (norm + 1e-6) : scale).epsilon(1e-14));
        CHECK(by * norm / scale <= 0.5);
        CHECK(factor_of(backend, {squares, 7}, {}, scale, 0) == scale);
      }
    }
  }
}

TEST_CASE("clip: one number that is not finite, anywhere, and there is no factor") {
  for (const Backend backend : all_backends()) {
    for (const size_t sums : {1u, 2u, 4u}) {
      for (const size_t largest : {0u, 1u, 300u}) {
        for (size_t at = 0; at < sums + largest; at += at < sums + 2 ? 1 : 97) {
          for (const double clip : {0.0, 1.0}) {
            CAPTURES(backend, sums, largest, at, clip);
            for (const float spoilt : {NAN, INFINITY, -INFINITY}) {
              std::vector<double> of_step(sums, 2.0);
              std::vector<float> others(largest, 3.f);
              CHECK(std::isfinite(factor_of(backend, of_step, others, 1, clip)));
              if (at < sums) of_step[at] = static_cast<double>(spoilt);
              else others[at - sums] = spoilt;
              CHECK(std::isnan(factor_of(backend, of_step, others, 1, clip)));
            }
          }
        }
      }
    }
  }
}
