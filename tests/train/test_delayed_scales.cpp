#include "engine/io/json.h"
#include "train/step/delayed_scales.h"

#include <cmath>

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

TEST_CASE("delayed scales: powers of two that just fit what was largest in the last 16 steps") {
  const float most = 448;
  DelayedScales scales({{"x", most}, {"d:y", 57344}});
  CHECK(!scales.empty());
  CHECK(DelayedScales({}).empty());
  CHECK(scales.scales() == std::vector<float>{1, 1});  // nothing is known
  scales.add({0, 3e-6f});
  CHECK(scales.scales()[0] == 1);  // of nothing but zeros
  std::vector<float> seen;
  for (int step = 0; step < 40; ++step) {
    const float amax = step == 5 ? 1000.f : 0.37f * static_cast<float>(1 + step % 7);
    seen.push_back(amax);
    scales.add({amax, 1e-7f});
    float m = 0;
    for (size_t i = seen.size() > 16 ? seen.size() - 16 : 0; i < seen.size(); ++i) m = std::max(m, seen[i]);
    const float scale = scales.scales()[0];
    CAPTURE(step);
    CHECK((m * scale <= most && 2 * m * scale > most));
    CHECK(scales.inverses()[0] * scale == 1);
    int exponent;
    CHECK(std::frexp(scale, &exponent) == 0.5f);
  }
  CHECK(scales.scales()[1] == std::ldexp(1.f, static_cast<int>(std::floor(std::log2(57344 / 1e-7)))));
}

TEST_CASE("delayed scales: of several ranks the largest, and what is not finite is not remembered") {
  DelayedScales one({{"x", 448}, {"y", 448}}), many = one;
  one.add({7, 3});
  many.add({2, 3, 7, 1, 5, 0.5f});
  CHECK(many.scales() == one.scales());
  CHECK(many.to_json() == one.to_json());
  CHECK(one.add({NAN, INFINITY}) == "x");
  CHECK(DelayedScales({{"x", 448}, {"y", 448}}).add({1, 2, 3, INFINITY}) == "y");
  CHECK(DelayedScales({{"x", 448}}).add({3e38f}).empty());
  CHECK_THROWS_AS(DelayedScales({{"x", 448}, {"x", 448}}), Error);
  CHECK(one.scales() == many.scales());
  DelayedScales far({{"x", 448}, {"y", 448}});
  far.add({1e-44f, 3e38f});
  CHECK(far.scales() == std::vector<float>{std::ldexp(1.f, 126), std::ldexp(1.f, -120)});
  for (const float inverse : far.inverses()) CHECK(std::isnormal(inverse));
}

TEST_CASE("delayed scales: the same after a way through JSON, and nothing else is taken for them") {
  const std::vector<QuantizedTensor> tensors = {{"x", 448}, {"d:y", 57344}};
  DelayedScales scales(tensors), read(tensors);
  for (int step = 0; step < 20; ++step) scales.add({0.1f * static_cast<float>(step), 1.f / 3});
  read.read(known_json(json_text(scales.to_json())), "there");
  CHECK(read.to_json() == scales.to_json());
  CHECK(read.scales() == scales.scales());
  for (const char* text : {"null", "[]", "{}", R"({"x": []})", R"({"x": [1], "d:y": 3})", R"({"x": [-1], "d:y": []})",
                           R"({"x": ["1"], "d:y": []})", R"({"x": [1e300], "d:y": []})",
                           R"({"x": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1], "d:y": []})"}) {
    CAPTURE(text);
    check_fails(Exit::bad_data, {"there", "eight_bits", "resume from another checkpoint"},
                [&] { read.read(known_json(text), "there"); });
    CHECK(read.scales() == scales.scales());
  }
}
