// Learning-rate schedules: the multiplier of the base rate for the update after k finished ones, of K in total.
//
//   cosine           warm-up k/W (so the first update has rate 0), then max(floor, (1 + cos(pi q)) / 2)  [LIMe's code]
//   cosine_to_floor  warm-up (k+1)/W, then floor + (1 - floor) (1 + cos(pi q)) / 2                 [llm.c, SATFormer]
//   cosine_from_zero warm-up k/W, then as cosine_to_floor                                          [Inheritune's code]
//   linear           warm-up (k+1)/W, then 1 - (1 - floor) q
//   constant         warm-up (k+1)/W, then 1
//   wsd_linear       warm-up (k+1)/W, then 1, and in the last D steps as p rises:
//                    floor + (1 - floor) (1 - p)                                                 [nanochat's trapezoid]
//   wsd_sqrt         the same with 1 - sqrt(p)                                                   [arXiv 2405.18392]
//   with q = (k - W) / (K - W), and p = (k - (K - D)) / D, so that the first step of a cool-down still has rate 1 and
//   the last one 1/D of the way left. W = 0 means no warm-up.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "engine/check.h"

namespace crossply {

enum class ScheduleKind { cosine, cosine_to_floor, linear, constant, cosine_from_zero, wsd_linear, wsd_sqrt };
inline const std::vector<std::string> schedules = {"cosine",           "cosine_to_floor", "linear",  "constant",
                                                   "cosine_from_zero", "wsd_linear",      "wsd_sqrt"};

// name: one of schedules.
inline ScheduleKind schedule_kind(const std::string& name) {
  const auto found = std::find(schedules.begin(), schedules.end(), name);
  if (found == schedules.end()) fail(Exit::usage, "unknown schedule '", name, "'");
  return static_cast<ScheduleKind>(found - schedules.begin());
}

// Whether a run of this schedule has a stable phase after its warm-up, from which other runs can branch; and whether it
// ends with a cool-down.
inline bool has_cooldown(const std::string& schedule) { return schedule.starts_with("wsd_"); }
inline bool has_stable_phase(const std::string& schedule) { return schedule == "constant" || has_cooldown(schedule); }

// Schedules of the weight decay: its multiplier for the update after k finished ones, of K.
inline const std::vector<std::string> decay_schedules = {"constant", "linear", "cosine"};
inline double decay_at(const std::string& name, int64_t k, int64_t K) {
  const double q = static_cast<double>(k) / static_cast<double>(K);
  return name == "linear" ? 1 - q : name == "cosine" ? 0.5 * (1 + std::cos(std::numbers::pi * q)) : 1;
}

struct Schedule {
  ScheduleKind kind = ScheduleKind::cosine;
  int64_t warmup = 0;    // W, in optimizer steps
  int64_t total = 1;     // K
  double floor = 0;      // of the multiplier
  int64_t cooldown = 0;  // D

  double at(int64_t k) const {
    const double w = static_cast<double>(warmup), step = static_cast<double>(k);
    const bool from_zero = kind == ScheduleKind::cosine || kind == ScheduleKind::cosine_from_zero;
    if (k < warmup) return (from_zero ? step : step + 1) / w;
    const double q = std::min(1.0, (step - w) / std::max(1.0, static_cast<double>(total) - w));
    const double half = 0.5 * (1 + std::cos(std::numbers::pi * q));
    const double p = std::max(0.0, step - static_cast<double>(total - cooldown)) /
                     static_cast<double>(std::max<int64_t>(1, cooldown));
    switch (kind) {
      case ScheduleKind::cosine: return std::max(floor, half);
      case ScheduleKind::cosine_to_floor:
      case ScheduleKind::cosine_from_zero: return floor + (1 - floor) * half;
      case ScheduleKind::linear: return 1 - (1 - floor) * q;
      case ScheduleKind::wsd_linear: return 1 - (1 - floor) * std::min(1.0, p);
      case ScheduleKind::wsd_sqrt: return 1 - (1 - floor) * std::sqrt(std::min(1.0, p));
      case ScheduleKind::constant: break;
    }
    return 1;
  }
};

}  // namespace crossply
