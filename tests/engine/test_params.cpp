// The table of parameters: what initialise() puts where, and what a role says.
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
  params.add("few", {3, 5}, Init::normal(0.02), Role::input_projection);
  params.add("one piece", {int64_t{4} << 20}, cheap, Role::input_projection);
  params.add("pieces", {3, (int64_t{3} << 20) + 7}, cheap, Role::input_projection);
  params.add("constant", {65}, Init::constant(0.1), Role::input_projection);
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
  params.add("own", {64}, Init::constant(2), Role::input_projection);
  params.add("lent", {64}, Init::constant(3), Role::input_projection).bf16_only = true;
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
    const bool in_f64 = std::string(name) == "reference";
    params.allocate(*device, in_f64 ? Dtype::f64 : Dtype::f32, false);
    params.initialise(11);
    CHECK((in_f64 ? first_difference<double>(params, 11) : first_difference<float>(params, 11)) == "");
    const Parameter& row = params.rows()[0];
    CHECK(params.read(row.value)[14] == static_cast<float>(row.init.at(11, stream_of("few"), 14)));
  }
}

TEST_CASE("params: a role, or else the declaration, says how a row decays") {
  ParameterTable params;
  const auto add = [&](Role role, const Learning& learning = {}) -> Parameter& {
    return params.add(str("row ", params.rows().size()), Shape{3, 4}, cheap, role, learning);
  };
  for (const Role role : {Role::head, Role::input_projection, Role::output_projection}) CHECK(add(role).wd_mul == 1);
  for (const Role role : {Role::embedding, Role::norm, Role::final_norm, Role::bias}) {
    CHECK(add(role).wd_mul == 0);
    CHECK_THROWS_AS(add(role, {.wd_mul = 0}), Error);
  }
  for (const Role role : {Role::width_router, Role::source_router, Role::scalar, Role::table}) {
    CHECK_THROWS_AS(add(role), Error);
    CHECK(add(role, {.wd_mul = 0.25}).wd_mul == 0.25);
  }
}

TEST_CASE("params: --router-lr is for routers with a multiplier") {
  ParameterTable params;
  const auto follows = [&](Role role, double lr_mul) {
    return params.add(str("row ", params.rows().size()), Shape{3}, cheap, role, {.lr_mul = lr_mul, .wd_mul = 0})
        .follows_router_lr();
  };
  for (const Role role : {Role::width_router, Role::source_router})
    CHECK((follows(role, 10) && follows(role, 0.5) && !follows(role, 1) && !follows(role, 0)));
  for (const Role role : {Role::scalar, Role::table}) CHECK((!follows(role, 10) && !follows(role, 1)));
}

TEST_CASE("params: matrices are the projections of a block and what says so, with more than one row and column") {
  ParameterTable params;
  const auto matrix = [&](Shape shape, Role role, const Learning& learning = {}) {
    return params.add(str("row ", params.rows().size()), shape, cheap, role, learning).matrix();
  };
  for (const Role role : {Role::input_projection, Role::output_projection})
    CHECK((matrix({2, 3}, role) && !matrix({1, 3}, role) && !matrix({3, 1}, role) && !matrix({3}, role)));
  for (const Role role : {Role::embedding, Role::head, Role::norm, Role::final_norm, Role::bias})
    CHECK(!matrix({2, 3}, role));
  for (const Role role : {Role::width_router, Role::source_router, Role::scalar, Role::table}) {
    CHECK(!matrix({2, 3}, role, {.wd_mul = 1}));
    CHECK(matrix({2, 3}, role, {.wd_mul = 1, .matrix = true}));
    CHECK(!matrix({1, 3}, role, {.wd_mul = 1, .matrix = true}));
  }
}
