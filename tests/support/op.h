// An op as its test describes it, its tensors by name and its calls, and what is checked of every op: the reference's
// backward against the complex step, the fast backends against the reference, where a NaN shows, threads, places in
// memory. The numbers are kept in double, which holds every f32 and bf16, and stored in a type for each call.
#pragma once

#include <bit>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/threads.h"

namespace crossply::test {

constexpr Stream fast{Backend::cpu}, reference{Backend::reference};

// Calls body(backend, size) for what is to be tested against the reference.
template <class Size, class F>
void for_sizes(const std::vector<Size>& of_cpu, const std::vector<Size>& of_gpu, F&& body) {
  for (const Backend backend : fast_backends())
    for (const Size& size : sizes_of(backend, of_cpu, of_gpu)) {
      CAPTURE(static_cast<int>(backend));
      body(backend, size);
    }
}

// An input X has a gradient dX that is set or added to, a parameter's is always added to, an output's is given.
// Integers are constants that are i32 in every type.
enum class OperandRole { input, parameter, constant, integers, output, saved };
struct Operand {
  std::string name;
  Shape shape;
  OperandRole role;
  double scale = 1;              // of the random numbers
  bool f32 = false;              // f32 also beside activations in bf16
  std::vector<double> given{};   // instead of random numbers
  bool overwrites_only = false;  // an input whose gradient is never added to
  bool wide_gradient = false;    // f32 also where the value is in bf16
  double cotangent = NAN;        // of each element of an output, instead of random numbers
  bool can_be_added_to() const { return role == OperandRole::input && !overwrites_only; }
};
inline Operand input(const std::string& name, Shape shape, double scale = 1) {
  return {name, shape, OperandRole::input, scale};
}
inline Operand output(const std::string& name, Shape shape) { return {name, shape, OperandRole::output}; }
inline Operand saved(const std::string& name, Shape shape) { return {name, shape, OperandRole::saved, 1, true}; }
inline Operand parameter(const std::string& name, Shape shape, double scale = 1) {
  return {name, shape, OperandRole::parameter, scale, true};
}
// Stored as activations are, its gradient in f32.
inline Operand weight(const std::string& name, Shape shape, double scale = 1) {
  Operand stored{name, shape, OperandRole::parameter, scale};
  stored.wide_gradient = true;
  return stored;
}
inline Operand constant(const std::string& name, Shape shape, std::vector<double> numbers) {
  return {name, shape, OperandRole::constant, 1, true, std::move(numbers)};
}
inline Operand integers(const std::string& name, Shape shape, const std::vector<int32_t>& numbers) {
  return {name, shape, OperandRole::integers, 1, false, convert<double>(numbers)};
}
inline Operand in_f32(Operand value) { return value.f32 = true, value; }
inline Operand never_added(Operand value) { return value.overwrites_only = true, value; }

inline Operand unchanged(const std::string& name, Shape shape, double scale = 1) {
  return {name, shape, OperandRole::constant, scale};
}

// What a call gets: an unknown name is a tensor without data.
struct Tensors {
  std::map<std::string, Tensor> all;
  std::set<std::string> added;
  Tensor operator[](const std::string& name) const { return all.contains(name) ? all.at(name) : Tensor{}; }
  Grad grad(const std::string& name) const { return {(*this)["d" + name], added.contains("d" + name)}; }
};
struct Pointers {
  std::map<std::string, std::vector<Complex>>& all;
  Complex* operator[](const std::string& name) const { return all.contains(name) ? all.at(name).data() : nullptr; }
};
struct Op {
  std::vector<Operand> values;
  std::function<void(const Tensors&, Stream)> forward, backward;
  std::function<void(const Pointers&)> forward_ref;
  bool reads_outputs = false;  // the backward does, as they are stored

  std::string str() const {
    std::string list;
    for (const Operand& v : values) list += v.name + v.shape.str() + " ";
    return list;
  }
};

// What `get` makes of "NAME0", "NAME1" and so on, n of them.
template <class Get>
auto several(int64_t n, const std::string& name, const Get& get) {
  std::vector<decltype(get(name))> list;
  for (int64_t i = 0; i < n; ++i) list.push_back(get(crossply::str(name, i)));
  return list;
}

using Numbers = std::map<std::string, std::vector<double>>;
using Aliases = std::map<std::string, std::string>;  // {"out", "inp"}: out is written over inp

template <class F>
void with_type(Dtype dtype, F&& body) {
  if (dtype == Dtype::f64) body(double{});
  else if (dtype == Dtype::i32) body(int32_t{});
  else with_storage(dtype, body);
}
inline std::vector<std::byte> stored(const std::vector<double>& x, Dtype dtype) {
  std::vector<std::byte> bytes(x.size() * size_of(dtype));
  with_type(dtype, [&]<class T>(T) {
    T* to = reinterpret_cast<T*>(bytes.data());
    for (size_t i = 0; i < x.size(); ++i) to[i] = T(x[i]);
  });
  return bytes;
}
inline std::vector<double> loaded(const std::vector<std::byte>& bytes, Dtype dtype) {
  std::vector<double> x(bytes.size() / size_of(dtype));
  with_type(dtype, [&]<class T>(T) {
    const T* from = reinterpret_cast<const T*>(bytes.data());
    for (size_t i = 0; i < x.size(); ++i) x[i] = from[i];
  });
  return x;
}

// One op with numbers: random ones given, NaN where they are computed. Those without any are tensors without data.
struct Trial {
  const Op* op;
  Dtype dtype;
  std::set<std::string> added;  // of the inputs' gradients
  Numbers x;
  bool shifted = false;  // whether memory begins between two multiples of 16 bytes, but for what is in place
  std::set<std::string> in_place = {};

  // The gradient of the i-th input is added to if bit i says so, of 32 that recur.
  Trial(const Op& of, Dtype type, unsigned accumulates = 0) : op(&of), dtype(type) {
    uint64_t seed = 0;
    for (const Operand& v : op->values) {
      const int64_t n = v.shape.numel();
      const bool given = v.role != OperandRole::output && v.role != OperandRole::saved;
      const auto fresh = random_vector<double>(n, ++seed, v.scale);
      auto gradient = random_vector<double>(n, ++seed);
      if (!std::isnan(v.cotangent)) gradient.assign(gradient.size(), v.cotangent);
      x[v.name] = !given ? poisoned<double>(n) : rounded(v, v.given.empty() ? fresh : v.given);
      if (!has_gradient(v)) continue;
      const bool adds = v.can_be_added_to() && (accumulates & 1) != 0;
      const bool overwrites = v.role == OperandRole::input && !adds;
      if (adds) added.insert("d" + v.name);
      if (v.can_be_added_to()) accumulates = std::rotr(accumulates, 1);
      x["d" + v.name] = overwrites ? poisoned<double>(n) : loaded(stored(gradient, gradient_type(v)), gradient_type(v));
    }
  }
  static bool has_gradient(const Operand& v) {
    return v.role == OperandRole::input || v.role == OperandRole::parameter || v.role == OperandRole::output;
  }
  Dtype type_of(const Operand& v) const {
    if (v.role == OperandRole::integers) return Dtype::i32;
    return v.f32 && dtype == Dtype::bf16 ? Dtype::f32 : dtype;
  }
  Dtype gradient_type(const Operand& v) const {
    return v.wide_gradient && dtype == Dtype::bf16 ? Dtype::f32 : type_of(v);
  }
  std::vector<double> rounded(const Operand& v, const std::vector<double>& numbers) const {
    return loaded(stored(numbers, type_of(v)), type_of(v));
  }
  const std::vector<double>& operator[](const std::string& name) const { return x.at(name); }

  Trial exact() const {
    Trial copy = *this;
    copy.dtype = Dtype::f64;
    return copy;
  }
  Trial& forward(Backend backend, const Aliases& aliases = {}) { return call(op->forward, backend, aliases); }
  Trial& backward(Backend backend, const Aliases& aliases = {}) { return call(op->backward, backend, aliases); }
  Trial& run(Backend backend) { return forward(backend).backward(backend); }

  // The names of what is computed, each with the type it is stored in.
  std::map<std::string, Dtype> results() const {
    std::map<std::string, Dtype> names;
    for (const Operand& v : op->values) {
      const bool computed = v.role == OperandRole::output || v.role == OperandRole::saved;
      if (computed) names[v.name] = type_of(v);
      else if (has_gradient(v)) names["d" + v.name] = gradient_type(v);
    }
    return names;
  }
  std::vector<double> all_results() const {
    std::vector<double> all;
    for (const auto& [name, type] : results()) all = joined(all, x.at(name));
    return all;
  }

 private:
  Trial& call(const std::function<void(const Tensors&, Stream)>& body, Backend backend, const Aliases& aliases) {
    std::map<std::string, std::vector<std::byte>> memory;
    std::vector<std::string> names;
    std::vector<Tensor> whole;
    std::vector<Shape> shapes;
    const auto is_shifted = [&](const std::string& name) { return shifted && !in_place.contains(name); };
    for (const Operand& v : op->values)
      for (const std::string& name : {v.name, "d" + v.name}) {
        if (&body == &op->forward && name != v.name) continue;  // it needs no gradients
        const auto numbers = x.find(name);
        const bool absent = numbers == x.end() || numbers->second.empty();
        const std::vector<double> first(is_shifted(name), 0.0);
        const Dtype type = name == v.name ? type_of(v) : gradient_type(v);
        if (!absent) memory[name] = stored(joined(first, numbers->second), type);
        const int64_t n = v.shape.numel() + static_cast<int64_t>(first.size());
        whole.push_back(absent ? Tensor{} : Tensor{memory[name].data(), type, is_shifted(name) ? Shape{n} : v.shape});
        names.push_back(name), shapes.push_back(v.shape);
      }
    for (size_t i = 0; i < names.size(); ++i)
      if (aliases.contains(names[i])) whole[i].data = memory.at(aliases.at(names[i])).data();
    run_on(backend, whole, [&](const std::vector<Tensor>& there, Stream stream) {
      Tensors tensors{{}, added};
      for (size_t i = 0; i < names.size(); ++i) {
        Tensor t = there[i];
        if (is_shifted(names[i]) && t.data != nullptr) t.data = static_cast<std::byte*>(t.data) + size_of(t.dtype);
        if (t.data != nullptr) t.shape = shapes[i];
        tensors.all[names[i]] = t;
      }
      body(tensors, stream);
    });
    for (size_t i = 0; i < names.size(); ++i) {
      if (whole[i].data == nullptr) continue;
      const auto alias = aliases.find(names[i]);
      x[names[i]] = loaded(memory.at(alias == aliases.end() ? names[i] : alias->second), whole[i].dtype);
      if (is_shifted(names[i])) x[names[i]].erase(x[names[i]].begin());
    }
    return *this;
  }
};

// Which gradients to add to: every choice of two, every second of more.
inline std::vector<unsigned> add_patterns(const Op& op) {
  const auto inputs =
      std::count_if(op.values.begin(), op.values.end(), [](const Operand& v) { return v.can_be_added_to(); });
  if (inputs > 2) return {0x55555555u, 0xAAAAAAAAu};
  return std::vector<std::vector<unsigned>>{{0}, {0, 1}, {0, 1, 2, 3}}[static_cast<size_t>(inputs)];
}

// Relative, as check_close has it, or absolute, if that is more.
struct Tolerance {
  double relative, absolute = 0;
  Tolerance(double of_size, double of_all = 0) : relative(of_size), absolute(of_all) {}
};
using Tolerances = std::map<std::string, Tolerance>;

// The gradient of sum <dout, out> over all outputs with respect to the named value.
inline std::vector<double> derivative(const Trial& at, const std::string& name) {
  std::map<std::string, std::vector<Complex>> z;
  for (const auto& [value, numbers] : at.x) z[value] = convert<Complex>(numbers);
  return complex_step(at[name], [&](const std::vector<Complex>& changed) {
    z[name] = changed;
    at.op->forward_ref({z});
    Complex sum = 0;
    for (const Operand& v : at.op->values)
      if (v.role == OperandRole::output) sum += dot(at["d" + v.name], z[v.name]);
    return sum;
  });
}

// The reference's backward is the derivative of its forward, set and added; some gradients may be less exact.
inline void check_derivative(const Op& op, const Tolerance& tolerance, const Tolerances& others = {}) {
  INFO(op.str());
  for (const bool add : {false, true}) {
    CAPTURE(add);
    Trial trial(op, Dtype::f64, add ? ~0u : 0u);
    for (const Operand& v : op.values)
      if (v.role == OperandRole::parameter && !add) trial.x["d" + v.name].assign(trial.x[v.name].size(), 0.0);
    const Trial before = trial;
    trial.run(Backend::reference);
    for (const Operand& v : op.values) {
      if (v.role != OperandRole::input && v.role != OperandRole::parameter) continue;
      const std::string gradient = "d" + v.name;
      auto want = derivative(before, v.name);
      for (size_t i = 0; i < want.size() && add && !v.overwrites_only; ++i) want[i] += before[gradient][i];
      const Tolerance& allowed = others.contains(gradient) ? others.at(gradient) : tolerance;
      check_close(gradient, trial[gradient], want, allowed.relative, allowed.absolute);
    }
  }
}

// A backend gives what the reference does, whichever gradients are added to. All that is computed has its tolerance;
// what is stored in bf16 is rounded once. `prepare` may change the numbers.
inline void check_backend(const Op& op, Dtype dtype, Backend backend, const Tolerances& tolerances,
                          const std::function<void(Trial&)>& prepare = {}) {
  INFO(op.str());
  for (const unsigned accumulates : add_patterns(op)) {
    CAPTURES(backend, name_of(dtype), accumulates);
    Trial got(op, dtype, accumulates);
    if (prepare) prepare(got);
    Trial want = got.exact();
    const auto check = [&](const std::string& name, Dtype type) {
      const Tolerance& allowed = tolerances.at(name);
      check_close(name, got[name], want[name], type == Dtype::bf16 ? 0x1p-8 : allowed.relative, allowed.absolute);
    };
    got.forward(backend), want.forward(Backend::reference);
    for (const Operand& v : op.values)
      if (v.role == OperandRole::output && op.reads_outputs)
        check(v.name, got.type_of(v)), want.x[v.name] = got[v.name];
    got.backward(backend), want.backward(Backend::reference);
    for (const auto& [name, type] : got.results()) check(name, type);
  }
}

// The same bits on any number of threads.
inline void check_threads(const Op& op, Dtype dtype = Dtype::f32) {
  INFO(op.str());
  check_same_bits_on_any_threads<double>([&] { return Trial(op, dtype).run(Backend::cpu).all_results(); });
}

// Sets of elements.
using Where = std::function<bool(size_t)>;
inline Where at(const std::set<size_t>& elements) {
  return [=](size_t i) { return elements.contains(i); };
}
inline Where in_row(size_t row, int64_t width) {
  return [=](size_t i) { return i / static_cast<size_t>(width) == row; };
}
inline bool everywhere(size_t) { return true; }

// With NaN in these elements of what is given, exactly those of what is computed are NaN; none where nothing is said.
inline Trial check_nans(const Op& op, Dtype dtype, Backend backend,
                        const std::map<std::string, std::set<size_t>>& spoilt, const std::map<std::string, Where>& want,
                        const std::function<void(Trial&)>& prepare = {}) {
  INFO(op.str());
  CAPTURES(backend, name_of(dtype));
  Trial trial(op, dtype);
  if (prepare) prepare(trial);
  for (const auto& [name, elements] : spoilt)
    for (const size_t i : elements) trial.x.at(name).at(i) = NAN;
  trial.run(backend);
  for (const auto& [name, type] : trial.results()) {
    const auto where = want.find(name);
    for (size_t i = 0; i < trial[name].size(); ++i)
      CHECK_MESSAGE(std::isnan(trial[name][i]) == (where != want.end() && where->second(i)), name << "[" << i << "]");
  }
  return trial;
}

// Written over what they may alias, results are the same bits.
inline void check_in_place(const Op& op, Dtype dtype, Backend backend, const Aliases& forward,
                           const Aliases& backward) {
  INFO(op.str());
  CAPTURES(backend, name_of(dtype));
  Trial want(op, dtype), over = want;
  want.forward(backend), over.forward(backend, forward);
  for (const auto& [name, input] : forward) CHECK(over[name] == want[name]);
  over = want;
  want.backward(backend), over.backward(backend, backward);
  for (const auto& [name, type] : want.results()) CHECK(over[name] == want[name]);
}

// Memory that begins between two multiples of 16 bytes, but for that of `in_place`, makes no difference, or only of
// rounding.
inline void check_any_address(const Op& op, Dtype dtype, const Tolerances& tolerances = {},
                              const std::set<std::string>& in_place = {}) {
  INFO(op.str());
  for (const Backend backend : fast_backends()) {
    CAPTURES(backend, name_of(dtype));
    Trial shifted(op, dtype);
    shifted.shifted = true, shifted.in_place = in_place;
    const Trial want = Trial(op, dtype).run(backend);
    shifted.run(backend);
    for (const auto& [name, type] : want.results()) {
      if (!tolerances.contains(name)) CHECK(shifted[name] == want[name]);
      else
        check_close(name, shifted[name], want[name], type == Dtype::bf16 ? 0x1p-8 : tolerances.at(name).relative,
                    tolerances.at(name).absolute);
    }
  }
}

}  // namespace crossply::test
