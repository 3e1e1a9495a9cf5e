// Kernels at the sizes of training, on the GPU against the fast CPU: the reference's loops would take minutes. In the
// emulator the same with tiny sizes. Every element is compared; outputs begin as NaN, inputs must stay what they are,
// and nothing may be written beside an array (DeviceMemory).
#pragma once

#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"

namespace crossply::test {

// The first on a GPU, the second in the emulator.
template <class T>
constexpr T sized(T real, T tiny) {
  return emulated ? tiny : real;
}

// How far two f32 sums of the same n random terms may be apart, relative to their size: each addition rounds a partial
// sum about as large as the result by 0.3 units of 2^-24, independently, so the errors grow like sqrt(n). The emulator
// and the CPU are 0.3 sqrt(n) units apart in the mean, and 2 sqrt(n) at most, of 10^5 elements; here there are up to
// 10^8. Eight units for the functions and products around it.
inline double of_sum(int64_t n) { return 0x1p-24 * (8 + 4 * std::sqrt(static_cast<double>(n))); }
// Of products on tensor cores, which may cut off what they do not keep: always downwards, up to 2^-23 of the partial
// sum for every 16 terms.
inline double of_products(int64_t n) { return of_sum(n) + 0x1p-23 * static_cast<double>(n) / 16; }
inline double of_products(Dtype dtype, int64_t n) { return dtype == Dtype::bf16 ? of_products(n) : of_sum(n); }
// What was rounded to bf16 on the way, by up to 2^-9 of each term, and not alike on both sides. An element may be the
// sum of terms several times larger than most elements are, such as an early row of attention: of 10^5 elements the
// furthest was 12 times 2^-9 away.
constexpr double of_bf16 = 32 * 0x1p-9;

// The numbers of an array in host memory, in its own type. Not filled.
class Numbers {
 public:
  Numbers(Dtype dtype, Shape shape) : tensor_{nullptr, dtype, shape} {
    memory_ = std::make_unique_for_overwrite<std::byte[]>(tensor_.bytes());
    tensor_.data = memory_.get();
  }
  const Tensor& tensor() const { return tensor_; }
  void fill(float value) {
    each([&](auto* x, int64_t i) { x[i] = value; });
  }
  void fill_randomly(uint64_t seed, double scale) {
    each(
        [&](auto* x, int64_t i) { x[i] = static_cast<float>(scale * (2 * random_uniform(seed, 0, as_index(i)) - 1)); });
  }
  // Tokens: most of them anything below `count`, every other one the same.
  void fill_tokens(uint64_t seed, int64_t count) {
    auto* x = tensor_.as<int32_t>();
    for (int64_t i = 0; i < tensor_.numel(); ++i)
      x[i] = static_cast<int32_t>(random_bits(seed, 0, as_index(i)) % static_cast<uint64_t>(i % 2 == 0 ? count : 1));
  }

 private:
  static uint64_t as_index(int64_t i) { return static_cast<uint64_t>(i); }
  template <class F>
  void each(F&& body) {
    with_storage(tensor_.dtype, [&]<class S>(S) {
      S* x = tensor_.as<S>();
#pragma omp parallel for
      for (int64_t i = 0; i < tensor_.numel(); ++i) body(x, i);
    });
  }
  std::unique_ptr<std::byte[]> memory_;
  Tensor tensor_;
};

constexpr double exact = 0;

// The first element of got that is further from want than tolerance * max(|want|, size), and what is stored as bf16 one
// unit in its last place, 2^-7; -1 if there is none. size: the root mean square of want, or, if that is more, what is
// given. A NaN in either is such an element. want may be shorter: it then repeats. Exact: not even one unit.
inline int64_t first_wrong(const Tensor& got, const Tensor& want, double tolerance, double min_size = 0) {
  int64_t wrong = got.numel();
  with_storage(got.dtype, [&]<class S>(S) {
    const S *g = got.as<S>(), *w = want.as<S>();
    const int64_t n = want.numel();
    double square = 0;
#pragma omp parallel for reduction(+ : square)
    for (int64_t i = 0; i < n; ++i) {
      const float x = w[i];
      square += static_cast<double>(x) * static_cast<double>(x);
    }
    const float scale = static_cast<float>(std::max(std::sqrt(square / static_cast<double>(n)), min_size));
    const float unit = std::is_same_v<S, bf16> && tolerance != exact ? 0x1p-7f : 0.f,
                relative = static_cast<float>(tolerance);
    for (int64_t begin = 0; begin < got.numel(); begin += n) {
#pragma omp parallel for reduction(min : wrong)
      for (int64_t i = 0; i < std::min(n, got.numel() - begin); ++i) {
        const float x = g[begin + i], y = w[i], size = std::abs(y);
        if (!(std::abs(x - y) <= unit * size + relative * std::max(size, scale))) wrong = std::min(wrong, begin + i);
      }
    }
  });
  return wrong == got.numel() ? -1 : wrong;
}
// |got - want| / |want|, Euclidean. NaN where either has one.
inline double relative_distance(const Tensor& got, const Tensor& want) {
  double square = 0, whole = 0;
  with_storage(got.dtype, [&]<class S>(S) {
    const S *g = got.as<S>(), *w = want.as<S>();
#pragma omp parallel for reduction(+ : square, whole)
    for (int64_t i = 0; i < got.numel(); ++i) {
      const double x = static_cast<double>(static_cast<float>(g[i])), y = static_cast<double>(static_cast<float>(w[i]));
      square += (x - y) * (x - y), whole += y * y;
    }
  });
  return square == 0 ? 0 : std::sqrt(square / whole);
}
inline float element(const Tensor& t, int64_t i) {
  return t.dtype == Dtype::bf16 ? static_cast<float>(t.as<bf16>()[i]) : t.as<float>()[i];
}

// Arrays by their numbers, which the functions that add them return.
class RealSizes {
 public:
  using Body = std::function<void(const std::vector<Tensor>&, Stream)>;

  // Random, and only read.
  size_t input(const std::string& name, Dtype dtype, Shape shape, double scale = 1) {
    return add(name, dtype, shape, -1).fill_randomly(arrays_.size(), scale), arrays_.size() - 1;
  }
  size_t tokens(const std::string& name, Shape shape, int64_t count) {
    return add(name, Dtype::i32, shape, -1).fill_tokens(arrays_.size(), count), arrays_.size() - 1;
  }
  // Set, from NaN.
  size_t output(const std::string& name, Dtype dtype, Shape shape, double tolerance) {
    return add(name, dtype, shape, tolerance).fill(NAN), arrays_.size() - 1;
  }
  // Random, and added to. Where elements are so few that all of them may be small by cancellation: how many terms each
  // sums, and of which size.
  size_t sum(const std::string& name, Dtype dtype, Shape shape, double tolerance, int64_t terms = 0, double size = 1) {
    add(name, dtype, shape, tolerance).fill_randomly(arrays_.size(), 1);
    arrays_.back().size = size * std::sqrt(static_cast<double>(terms));
    return arrays_.size() - 1;
  }
  // A gradient, overwritten or accumulated into.
  size_t gradient(const std::string& name, Dtype dtype, Shape shape, double tolerance, bool accumulates) {
    return accumulates ? sum(name, dtype, shape, tolerance) : output(name, dtype, shape, tolerance);
  }
  // The numbers of one before run().
  Tensor numbers(size_t i) const { return arrays_[i].numbers.tensor(); }

  // Calls the body on both sides, which begin alike, and compares. What the CPU has computed is what both begin with
  // the next time.
  void run(const Body& body) {
    std::vector<DeviceMemory> copies;
    std::vector<Tensor> here, there;
    for (const Array& array : arrays_) {
      Tensor t = array.numbers.tensor();
      here.push_back(t);
      copies.emplace_back(t.bytes());
      copy_to_device(copies.back().data(), t.data, t.bytes());
      t.data = copies.back().data();
      there.push_back(t);
    }
    body(there, Stream{Backend::cuda});
    body(here, Stream{Backend::cpu});  // at the same time
    for (size_t i = 0; i < arrays_.size(); ++i) compare(arrays_[i], copies[i]);
  }

 private:
  struct Array {
    std::string name;
    double tolerance;  // negative: it must not change
    double size;
    Numbers numbers;
  };
  Numbers& add(const std::string& name, Dtype dtype, Shape shape, double tolerance) {
    return arrays_.emplace_back(Array{name, tolerance, 0, Numbers(dtype, shape)}).numbers;
  }
  static void compare(const Array& array, const DeviceMemory& copy) {
    CAPTURE(array.name);
    const Tensor want = array.numbers.tensor();
    const Numbers back(want.dtype, want.shape);
    const Tensor got = back.tensor();
    copy_from_device(got.data, copy.data(), got.bytes());
    CHECK_MESSAGE(copy.kept_inside(), "written beside " << array.name);
    if (array.tolerance < 0) {
      CHECK_MESSAGE(std::memcmp(got.data, want.data, got.bytes()) == 0, "written to " << array.name);
      return;
    }
    const int64_t wrong = first_wrong(got, want, array.tolerance, array.size);
    CHECK_MESSAGE(wrong < 0, array.name << got.shape.str() << "[" << wrong << "]: got " << element(got, wrong)
                                        << ", the CPU has " << element(want, wrong));
    // All together must be closer than the furthest may be: a fourth of that, and half a unit in the last place.
    if (array.size == 0)
      CHECK(relative_distance(got, want) <= array.tolerance / 4 + (want.dtype == Dtype::bf16 ? 0x1p-8 : 0));
  }
  std::vector<Array> arrays_;
};

inline const std::vector<Dtype> storage_types{Dtype::f32, Dtype::bf16};

}  // namespace crossply::test
