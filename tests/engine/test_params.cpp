// The table of parameters: what initialise() puts where.
#include "engine/params.h"

#include "engine/rng.h"
#include "kernels/devices.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A rule as cheap as the test needs, with a value that float cannot hold.
const Init cheap = {"cheap", [](uint64_t seed, uint64_t stream, int64_t i) { return random_uniform(seed, stream, i); }};

// Rows below, at and beyond the size of the pieces in which they are made.
void declare(ParameterTable& params) {
  params.add("few", {3, 5}, Init::normal(0.02), 1, 1);
  params.add("one piece", {int64_t{4} << 20}, cheap, 1, 1);
  params.add("pieces", {3, (int64_t{3} << 20) + 7}, cheap, 1, 1);
  params.add("constant", {65}, Init::constant(0.1), 1, 1);
}

// The first element that is not what a plain loop by the rule gives, as "row[i]"; "" if there is none.
template <class T>
std::string first_difference(const ParameterTable& params, uint64_t seed) {
  for (const Parameter& row : params.rows()) {
    const T* values = row.value.as<T>();
    for (int64_t i = 0; i < row.shape.numel(); ++i)
      if (values[i] != static_cast<T>(row.init.at(seed, stream_of(row.name), i))) return str(row.name, "[", i, "]");
  }
  return "";
}

}  // namespace

TEST_CASE("params: a value that is lent to its gradient is refused until it is back") {
  const auto device = make_device("cpu");
  ParameterTable params;
  params.add("own", {64}, Init::constant(2), 1, 1);
  params.add("lent", {64}, Init::constant(3), 1, 1).narrow_only = true;
  params.allocate(*device, Dtype::f32, true, true);
  params.initialise(11);
  const Parameter &own = params.rows()[0], &lent = params.rows()[1];
  const std::vector<double> numbers(64, 4);
  CHECK(params.read(params.lent_values()) == std::vector<float>(64, 3));
  params.lend_values(true);
  CHECK(params.read(own.value)[63] == 2);
  CHECK(params.read(lent.grad)[63] == 3);
  const char* says = "since a step began their memory holds gradients";
  check_fails(Exit::internal, {says}, [&] { params.read(lent.value); });
  check_fails(Exit::internal, {says}, [&] { params.write(lent, numbers.data()); });
  check_fails(Exit::internal, {says}, [&] { params.initialise(11); });
  check_fails(Exit::internal, {says}, [&] { params.lent_values(); });
  params.lend_values(false);
  params.write(lent, numbers.data());
  CHECK(params.read(lent.value) == std::vector<float>(64, 4));
  CHECK(params.read(lent.grad) == std::vector<float>(64, 4));
}

TEST_CASE("params: initialised by threads and in pieces, the numbers are those of a plain loop by the rules") {
  for (const char* name : {"cpu", "reference"}) {
    CAPTURE(name);
    const auto device = make_device(name);
    ParameterTable params;
    declare(params);
    const bool wide = std::string(name) == "reference";
    params.allocate(*device, wide ? Dtype::f64 : Dtype::f32, false);
    params.initialise(11);
    CHECK((wide ? first_difference<double>(params, 11) : first_difference<float>(params, 11)) == "");
    const Parameter& row = params.rows()[0];
    CHECK(params.read(row.value)[14] == static_cast<float>(row.init.at(11, stream_of("few"), 14)));
  }
}
