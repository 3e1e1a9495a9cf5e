// Simulated tables: numbers drawn in sequence, and results that are kept.
#pragma once

#include <cmath>
#include <map>
#include <mutex>
#include <vector>

#include "engine/rng.h"
#include "eval/statistics.h"

namespace crossply {

// What is drawn in sequence.
class Draw {
 public:
  explicit Draw(const char* what) : random_(0, stream_of(what)) {}
  double normal() {
    const double first = random_.uniform();
    return normal_of(first, random_.uniform());
  }
  // A variance of so many degrees of freedom, whose mean is 1: two of them are an exponential number.
  double variance(int64_t degrees) {
    double sum = 0;
    for (int64_t i = 0; i + 1 < degrees; i += 2) sum -= 2 * std::log(1 - random_.uniform());
    if (degrees % 2 == 1) {
      const double z = normal();
      sum += z * z;
    }
    return sum / static_cast<double>(degrees);
  }

 private:
  Random random_;
};

// simulate() once for each of these sizes in a program, and for each caller of its own kind of key.
template <class Key, class F>
double once_for(const Key& key, F&& simulate) {
  static std::mutex mutex;
  static std::map<Key, double> known;
  const std::scoped_lock lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = simulate();
}

}  // namespace crossply
