#include "kernels/block/gelu.h"

#include "tests/support/op.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr GeluKind kinds[] = {GeluKind::erf, GeluKind::tanh};

Op gelu(int64_t n, GeluKind kind, double scale = 1) {
  return {{input("inp", {n}, scale), output("out", {n})},
          [=](auto& t, Stream stream) { gelu_forward(t["out"], t["inp"], kind, stream); },
          [=](auto& t, Stream stream) { gelu_backward(t.grad("inp"), t["dout"], t["inp"], kind, stream); },
          [=](auto& z) { gelu_forward_ref(z["out"], z["inp"], n, kind); }};
}

// Below and beside a vector; several threads, or several blocks with both widths of access.
std::vector<int64_t> sizes_for(Backend backend) {
  return sizes_of<int64_t>(backend, {1, 31, 1000, 40001}, {1, 31, 1000, 5001, 5008});
}

// The largest |got - want| over all i; NaN if any is.
double worst_difference(const std::vector<double>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    if (!(difference <= worst)) worst = difference;
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

// Every multiple of 1/1024 in [-14, 14], and small numbers of both signs.
std::vector<float> sweep() {
  std::vector<float> x;
  for (int i = -14 * 1024; i <= 14 * 1024; ++i) x.push_back(static_cast<float>(i) / 1024);
  for (float tiny = 1e-30f; tiny < 1e-2f; tiny *= 1.7f) x.insert(x.end(), {tiny, -tiny});
  return x;
}

}  // namespace

TEST_CASE("gelu: reference forward, by values from tables of the normal distribution, and by tanh to 20 digits") {
  const std::vector<double> inp{0.0, 1.0, -1.0, 2.0, -6.0, 40.0, -40.0};
  const std::vector<double> by_erf{
      0.5, 0.841344746068542948, 0.158655253931457051, 0.977249868051820793, 9.8658764503769814e-10, 1.0, 0.0};
  const std::vector<double> by_tanh{
      0.5, 0.84119199060827670478, 0.15880800939172329520, 0.97729884704388750939, 1.4066077834603828473e-11, 1.0, 0.0};
  for (const GeluKind kind : kinds) {
    const auto& phi = kind == GeluKind::erf ? by_erf : by_tanh;
    const Op op = gelu(7, kind);
    Trial trial(op, Dtype::f64);
    trial.x["inp"] = inp;
    const auto& out = trial.forward(Backend::reference)["out"];
    for (size_t i = 0; i < 7; ++i) CHECK(std::abs(out[i] - inp[i] * phi[i]) <= 1e-14 * std::abs(inp[i] * phi[i]));
  }
}

TEST_CASE("gelu: reference backward is the derivative of the reference forward") {
  for (const GeluKind kind : kinds)
    for (double scale : {1e-3, 1.0, 5.0, 12.0})
      for (int64_t n : {1, 7, 33}) check_derivative(gelu(n, kind, scale), 1e-13);
}

// In units of 2^-24 = 6e-8: the tail is good to 8 + z^2 / 2 of itself, which is at most 1/2, and the last product or
// sum rounds once more. That takes exp to be good to 3 units and the quotient to 1. On a GPU both are off by up to 2
// units in the last place of the rounded value, so by 2.5 to 5. The quotient's error, and up to 1 of its denominator's
// roundings, count 1.3 to 2.35 times: so steep is t q(t - 1/2). With 2.3 for the polynomial, 1 for each product and
// 0.4 for the fit, each at its largest for the same z, all together is largest at z = 2.6: 9.6 + 5 + 1 + 2 + 0.4 = 18,
// and z^2 / 2. Where |z tail| is largest, 0.17 at z = 3/4, the output is off by 3.8. The slope has the tail's error,
// that of z times the density, (5 + 2 + z^2 / 2) of at most 0.24, and a rounding: 9.2 where z is small, less beyond.
//
// By tanh the argument of exp is a product, a square times a rounded number, a sum with another and a product: 5
// roundings of 2 |u|, which exp makes relative; exp itself 3, quotient 1, of its sum at most 1, product 1: 6 + 10 |u|
// of the tail. On a GPU exp and quotient have 5 each, so 12. Where |z tail| (6 + 10 |u|) is largest, 0.16 * 14.3 at 1,
// the last sum adds 0.9: 3.2, on a GPU 4.2. The slope has the tail's error, that of the moment, and a rounding:
// 0.16 (6 + 8.3) + 0.24 (6 + 8.3 + 5) + 1 = 8 there, on a GPU 0.16 (12 + 8.3) + 0.24 (17 + 8.3 + 5) + 1 = 11.5. The
// CPU's roundings are always the same, and never come together so: they are 1.1 and 2.
struct Limits {
  double tail = 0, out = 0, slope = 0;
};
Limits limits_of(GeluKind kind, Backend backend) {
  const bool cuda = backend == Backend::cuda;
  if (kind == GeluKind::erf) return cuda ? Limits{19, 2.5e-7, 6e-7} : Limits{8, 1e-7, 2e-7};
  return cuda ? Limits{18, 2.6e-7, 7e-7} : Limits{7, 1e-7, 2e-7};
}
// By how many of these units the error of the tail grows with z.
double growth(GeluKind kind, double z) { return kind == GeluKind::erf ? 0.5 * z * z : 10 * std::abs(tanh_argument(z)); }
void check_sweep(GeluKind kind, Backend backend) {
  CAPTURES(kind, backend);
  const auto inp = sweep();
  const Op op = gelu(static_cast<int64_t>(inp.size()), kind);
  Trial got(op, Dtype::f32);
  got.x["inp"] = convert<double>(inp), got.x["dout"].assign(inp.size(), 1.0);
  Trial exact = got.exact();
  got.run(backend), exact.run(Backend::reference);
  const auto &out = got["out"], &want = exact["out"];
  const Limits limits = limits_of(kind, backend);
  const double slope = worst_difference(got["dinp"], exact["dinp"]);
  CAPTURE(slope);
  CHECK(slope < limits.slope);
  double worst = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const double x = got["inp"][i], difference = std::abs(out[i] - want[i]);
    REQUIRE(std::isfinite(out[i]));
    worst = std::max(worst, difference / std::max(1.0, std::abs(x)));
    // Also relative: what is left of a large negative number, or of a small one, has its digits.
    if (x > (kind == GeluKind::erf ? -12 : -9.9)) {
      const double allowed = 6e-8 * (limits.tail + 1 + growth(kind, x)) * std::abs(want[i]);
      REQUIRE_MESSAGE(difference <= allowed, "gelu(" << x << ") = " << out[i]);
    }
  }
  CAPTURE(worst);
  CHECK(worst < limits.out);
}
TEST_CASE("gelu: the fast backends equal the reference to 1e-7, a GPU to 2.5e-7, everywhere") {
  for (const Backend backend : fast_backends())
    for (const GeluKind kind : kinds) check_sweep(kind, backend);
}

TEST_CASE_TEMPLATE("gelu: the fast backends equal the reference, set and added, and NaN shows", T, float, bf16) {
  for (const Backend backend : fast_backends())
    for (const GeluKind kind : kinds)
      for (double scale : {1e-3, 1.0, 12.0, 200.0})
        for (int64_t n : sizes_for(backend)) {
          const Op op = gelu(n, kind, scale);
          // A single number may be all tail, or have been added to and cancel.
          const bool exact = kind == GeluKind::erf && backend == Backend::cpu;
          const Limits limits = exact ? Limits{} : limits_of(kind, backend);
          check_backend(op, DtypeOf<T>::value, backend, {{"out", {1e-6, limits.out}}, {"dinp", {1e-6, limits.slope}}});
          const Where last = at({static_cast<size_t>(n - 1)});
          check_nans(op, DtypeOf<T>::value, backend, {{"inp", {static_cast<size_t>(n - 1)}}},
                     {{"out", last}, {"dinp", last}});
        }
}

TEST_CASE("gelu: NaN shows, very large numbers are harmless, and threads do not matter") {
  const std::vector<double> large{INFINITY, -INFINITY, static_cast<double>(3e38f), -static_cast<double>(3e38f)};
  for (const GeluKind kind : kinds) {
    for (const Backend backend : fast_backends()) {
      const size_t n = static_cast<size_t>(sizes_for(backend).back());
      const Op op = gelu(static_cast<int64_t>(n), kind, 4);
      const Trial all = check_nans(
          op, Dtype::f32, backend, {{"inp", {5}}, {"dout", {n - 1}}}, {{"out", at({5})}, {"dinp", at({5, n - 1})}},
          [&](Trial& trial) { std::copy(large.begin(), large.end(), trial.x["inp"].begin() + 16); });
      const auto &out = all["out"], &dinp = all["dinp"];
      CHECK(out[16] == INFINITY);
      CHECK(out[18] == large[2]);
      for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(out[i]) < 1e-31);
      for (size_t i : {size_t{16}, size_t{18}}) CHECK(dinp[i] == all["dout"][i]);
      for (size_t i : {size_t{17}, size_t{19}}) CHECK(std::abs(dinp[i]) < 1e-30);
    }
    check_threads(gelu(40001, kind, 4));
  }
}
