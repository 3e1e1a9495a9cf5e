// One call for each of many things, by all threads.
#pragma once

#include <cstddef>
#include <exception>
#include <vector>

namespace crossply {

// Calls body(i) for i in 0, ..., n-1, in no order; then throws what the first of them that failed threw.
template <class F>
void at_once(size_t n, F&& body) {
  std::vector<std::exception_ptr> errors(n);
#pragma omp parallel for schedule(dynamic)
  for (size_t i = 0; i < n; ++i) {
    try {
      body(i);
    } catch (...) {  // none may leave a parallel region
      errors[i] = std::current_exception();
    }
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace crossply
