// The emulator itself: that it computes as a GPU would, and that it catches what was planted.
#if !CROSSPLY_CUDA

#include "kernels/cuda/cuda.cuh"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "tests/support/backends.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// out[block] = the sum of inp over the block's threads, by way of shared memory. `barrier`: as it should be.
__global__ void block_sum_kernel(float* out, const float* inp, bool barrier) {
  float* values = dynamic_shared<float>();
  values[threadIdx.x] = inp[blockIdx.x * blockDim.x + threadIdx.x];
  if (barrier) __syncthreads();
  float sum = 0;
  if (threadIdx.x == blockDim.x - 1) {
    for (uint32_t i = 0; i < blockDim.x; ++i) sum += values[i];
    out[blockIdx.x] = sum;
  }
}

__global__ void read_kernel(float* out, const float* inp, int64_t i) { out[0] = inp[i]; }

template <int width>
__global__ void copy_kernel(float* out, const float* inp, int64_t from, int64_t to) {
  store<width>(out + to, load<width>(inp + from));
}

__global__ void fill_kernel(float* out, int64_t n) {
  float* values = dynamic_shared<float>();
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(i);
  out[0] = values[n - 1];
}

// Stores that say they go to one memory, for addresses in either.
template <Space space>
__global__ void store_kernel(float* out, bool to_shared) {
  SHARED(values, Array<float, 4>);
  float local[4];
  store<4, space>(out == nullptr ? &local[0] : to_shared ? &values[0] : out, Floats<4>{});
}

__global__ void shuffle_kernel(float* out, float* largest, const float* inp) {
  const float x = inp[threadIdx.x];
  out[threadIdx.x] = warp_sum(x);
  largest[threadIdx.x] = warp_max(x);
}

__global__ void divergent_kernel(bool half) {
  if (!half || threadIdx.x < blockDim.x / 2) __syncthreads();
}
__global__ void two_places_kernel() {
  if (threadIdx.x < 5) __syncthreads();
  else __syncthreads();
}
__global__ void lane_kernel(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, static_cast<int>(threadIdx.x), 16);
}

// How far y is from the rounded x, in units of the last place.
int64_t ulps(float y, double x) {
  const auto place = [](float z) { return int64_t{std::bit_cast<int32_t>(z)}; };
  return place(y) - place(static_cast<float>(x));
}
// The largest and the smallest error over x from `from` to `to`, in 5,000 steps.
template <class F, class G>
std::pair<int64_t, int64_t> errors(float from, float to, F&& function, G&& exact) {
  int64_t least = 0, most = 0;
  for (int i = 0; i <= 5000; ++i) {
    const float x = from + (to - from) * static_cast<float>(i) / 5000;
    const int64_t error = ulps(function(x), exact(static_cast<double>(x)));
    least = std::min(least, error), most = std::max(most, error);
  }
  return {least, most};
}

// How many of `seeds` runs gave the right sums.
int right_sums(bool barrier, int seeds) {
  const auto inp = random_vector<float>(3 * 40, 1);
  const OnDevice there(inp);
  int right = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    emulator::seed(static_cast<uint64_t>(seed));
    const OnDevice sums(poisoned<float>(3));
    launch({"block_sum", 3, 40, 40 * sizeof(float)}, block_sum_kernel, sums.data, there.data, barrier);
    const std::vector<float> out = sums.host();
    bool all = true;
    for (size_t b = 0; b < 3; ++b) {
      float want = 0;
      for (size_t i = 0; i < 40; ++i) want += inp[b * 40 + i];
      all &= out[b] == want;
    }
    right += all;
  }
  return right;
}

// Whether body, in a process of its own, was killed or ended with an error.
template <class F>
bool dies(F&& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // without the test runner's report
    if (freopen("/dev/null", "w", stdout) == nullptr || freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

}  // namespace

TEST_CASE("emulator: barriers hold, and a missing one shows") {
  CHECK(right_sums(true, 20) == 20);
  CHECK(right_sums(false, 20) == 0);
}

TEST_CASE("emulator: lanes exchange values, in whole warps and the last part of one") {
  for (const int threads : {1, 7, 32, 50, 96}) {
    CAPTURE(threads);
    const auto inp = random_vector<float>(threads, 2);
    const OnDevice from(inp), to(poisoned<float>(threads)), max_of(poisoned<float>(threads));
    const Launch shuffle{"shuffle", 1, static_cast<uint32_t>(threads)};
    if (threads % 32 != 0) {
      // A mask of all lanes is right on a GPU only where they are there.
      CHECK_THROWS_AS(launch(shuffle, shuffle_kernel, to.data, max_of.data, from.data), Error);
      continue;
    }
    launch(shuffle, shuffle_kernel, to.data, max_of.data, from.data);
    const std::vector<float> out = to.host(), largest = max_of.host();
    for (int first = 0; first < threads; first += 32) {
      double sum = 0;
      float most = -2;
      for (int i = first; i < first + 32; ++i)
        sum += static_cast<double>(inp[static_cast<size_t>(i)]), most = std::max(most, inp[static_cast<size_t>(i)]);
      for (int i = first; i < first + 32; ++i) {
        CHECK(static_cast<double>(out[static_cast<size_t>(i)]) == doctest::Approx(sum).epsilon(1e-5));
        CHECK(largest[static_cast<size_t>(i)] == most);
      }
    }
  }
}

TEST_CASE("emulator: what would hang a GPU is an error") {
  CHECK_THROWS_AS(launch({"divergent", 1, 8}, divergent_kernel, true), Error);
  CHECK_NOTHROW(launch({"divergent", 1, 8}, divergent_kernel, false));
  CHECK_THROWS_AS(launch({"two_places", 1, 8}, two_places_kernel), Error);
  const OnDevice out(std::vector<int>(32));
  CHECK_THROWS_AS(launch({"lane", 1, 32}, lane_kernel, out.data), Error);
  CHECK_THROWS_AS(launch({"too_large", 1, 1025}, divergent_kernel, false), Error);
  CHECK_THROWS_AS(launch({"too_large", 1, 8, 228 * 1024}, divergent_kernel, false), Error);
}

TEST_CASE("emulator: reading past the end of device memory kills the process") {
  const OnDevice inp(random_vector<float>(64, 1)), out(std::vector<float>(1));
  CHECK_FALSE(dies([&] { launch({"read", 1, 1}, read_kernel, out.data, inp.data, int64_t{63}); }));
  CHECK(dies([&] { launch({"read", 1, 1}, read_kernel, out.data, inp.data, int64_t{64}); }));
}

TEST_CASE("emulator: neither may the host touch device memory, nor a kernel get the host's") {
  const OnDevice inp(random_vector<float>(8, 1)), out(std::vector<float>(1));
  CHECK(dies([&] { static_cast<void>(*const_cast<const volatile float*>(inp.data)); }));
  CHECK(dies([&] { *const_cast<volatile float*>(out.data) = 1; }));
  std::vector<float> host(8);
  CHECK_THROWS_AS(launch({"read", 1, 1}, read_kernel, out.data, host.data(), int64_t{0}), Error);
  CHECK_THROWS_AS(launch({"read", 1, 1}, read_kernel, host.data(), inp.data, int64_t{0}), Error);
}

TEST_CASE("emulator: an access that is not aligned is an error") {
  const OnDevice inp(random_vector<float>(8, 1)), out(std::vector<float>(8));
  CHECK_NOTHROW(launch({"copy", 1, 1}, copy_kernel<4>, out.data, inp.data, int64_t{4}, int64_t{0}));
  CHECK_THROWS_AS(launch({"copy", 1, 1}, copy_kernel<4>, out.data, inp.data, int64_t{2}, int64_t{0}), Error);
  CHECK_THROWS_AS(launch({"copy", 1, 1}, copy_kernel<4>, out.data, inp.data, int64_t{4}, int64_t{1}), Error);
}

TEST_CASE("emulator: a store goes to the memory that it names") {
  const OnDevice out(std::vector<float>(4));
  float* const local = nullptr;
  const Launch one{"store", 1, 1};
  CHECK_NOTHROW(launch(one, store_kernel<Space::global>, out.data, false));
  CHECK_NOTHROW(launch(one, store_kernel<Space::shared>, out.data, true));
  for (const bool to_shared : {false, true}) CHECK_NOTHROW(launch(one, store_kernel<Space::any>, out.data, to_shared));
  CHECK_THROWS_AS(launch(one, store_kernel<Space::global>, out.data, true), Error);
  CHECK_THROWS_AS(launch(one, store_kernel<Space::shared>, out.data, false), Error);
  CHECK_THROWS_AS(launch(one, store_kernel<Space::global>, local, false), Error);
}

TEST_CASE("emulator: a recording may have more shared memory than its kernel's last launch") {
  const int64_t many = 20000, few = 15000;  // both above 48 KiB
  const OnDevice out(std::vector<float>(1));
  const auto fill = [&](int64_t n) {
    launch({"fill", 1, 1, static_cast<size_t>(n) * sizeof(float)}, fill_kernel, out.data, n);
  };
  begin_capture();
  fill(many);
  const std::shared_ptr<void> recording = end_capture().graph;
  fill(few);
  CHECK(out.host()[0] == static_cast<float>(few - 1));
  launch_graph(recording);
  CHECK(out.host()[0] == static_cast<float>(many - 1));
  const auto* kernel = reinterpret_cast<const void*>(fill_kernel);
  emulator::set_shared_limit(kernel, few * sizeof(float));  // as nobody should
  CHECK_THROWS_AS(launch_graph(recording), Error);
  emulator::set_shared_limit(kernel, many * sizeof(float));
}

TEST_CASE("emulator: functions are as inexact as CUDA says, and exact where it says so") {
  using Range = std::pair<int64_t, int64_t>;
  for (const uint64_t seed : {1, 2}) {
    emulator::seed_errors(seed);
    CHECK(errors(
              -80, 80, [](float x) { return crossply::expf(x); }, [](double x) { return std::exp(x); }) ==
          Range{-2, 2});
    CHECK(errors(
              0.01f, 9, [](float x) { return crossply::logf(x); }, [](double x) { return std::log(x); }) ==
          Range{-1, 1});
    CHECK(errors(
              0.01f, 9, [](float x) { return crossply::log2f(x); }, [](double x) { return std::log2(x); }) ==
          Range{-1, 1});
    CHECK(errors(
              0.01f, 8, [](float x) { return crossply::tanhf(x); }, [](double x) { return std::tanh(x); }) ==
          Range{-2, 2});
    CHECK(errors(
              0.01f, 99, [](float x) { return rsqrtf(x); }, [](double x) { return 1 / std::sqrt(x); }) == Range{-2, 2});
    CHECK(errors(
              0.01f, 99, [](float x) { return __fdividef(3, x); }, [](double x) { return 3 / x; }) == Range{-2, 2});
    CHECK(errors(
              -99, 99, [](float x) { return emulator::exp2_approximately(x); },
              [](double x) { return std::exp2(x); }) == Range{-2, 2});
  }
  emulator::seed_errors(1);
  const float infinity = INFINITY;
  CHECK(crossply::expf(-0.f) == 1);
  CHECK(crossply::expf(-infinity) == 0);
  CHECK(crossply::expf(infinity) == infinity);
  CHECK(crossply::logf(1) == 0);
  CHECK(crossply::logf(0) == -infinity);
  CHECK(crossply::log2f(1) == 0);
  CHECK(crossply::tanhf(-infinity) == -1);
  CHECK(rsqrtf(0) == infinity);
  CHECK(rsqrtf(infinity) == 0);
  CHECK(__fdividef(1, 0x1p127f) == 0);
  CHECK(__fdividef(1, infinity) == 0);
  CHECK(emulator::exp2_approximately(0) == 1);
  CHECK(emulator::exp2_approximately(-126.5f) == 0);
  for (const float x : {crossply::expf(NAN), crossply::logf(-1), crossply::tanhf(NAN), rsqrtf(-1), __fdividef(0, 0),
                        __fdividef(infinity, 0x1p127f), emulator::exp2_approximately(NAN)})
    CHECK(std::isnan(x));
}

TEST_CASE("emulator: new device memory is full of NaN, and a recording must not wait") {
  auto* data = static_cast<float*>(allocate_device_memory(3 * sizeof(float)));
  float host[3] = {};
  copy_from_device(host, data, sizeof host);
  for (const float x : host) CHECK(std::isnan(x));
  begin_capture();
  CHECK_THROWS_AS(copy_from_device(host, data, sizeof host), Error);
  CHECK_THROWS_AS(copy_to_device(data, host, sizeof host), Error);
  CHECK_THROWS_AS(synchronize_device(), Error);
  abandon_capture();
  release_device_memory(data);
}

#endif
