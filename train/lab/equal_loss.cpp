#include "train/lab/equal_loss.h"

#include <algorithm>
#include <cmath>

#include "cli/format.h"
#include "engine/check.h"

namespace crossply {
namespace {

// y at a place between two points.
double between(double x0, double y0, double x1, double y1, double x) {
  return x1 == x0 ? y1 : y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

// NaN outside of the points over so many sequences.
double loss_at(const MeasuredLoss& loss, double x, double sequences) {
  size_t before = loss.x.size();
  for (size_t i = 0; i < loss.x.size(); ++i) {
    if (loss.sequences[i] != sequences) continue;
    if (loss.x[i] == x) return loss.y[i];
    if (loss.x[i] > x)
      return before == loss.x.size() ? NAN : between(loss.x[before], loss.y[before], loss.x[i], loss.y[i], x);
    before = i;
  }
  return NAN;
}

}  // namespace

Curve difference_of(const MeasuredLoss& b, const MeasuredLoss& a) {
  Curve out;
  for (size_t i = 0; i < b.x.size(); ++i)
    if (const double other = loss_at(a, b.x[i], b.sequences[i]); std::isfinite(other))
      out.x.push_back(b.x[i]), out.y.push_back(b.y[i] - other);
  return out;
}

MeasuredLoss mean_of_last(const MeasuredLoss& loss, size_t n) {
  MeasuredLoss out;
  for (size_t i = n - 1; i < loss.x.size(); ++i) {
    double sum = 0, sequences = loss.sequences[i];
    for (size_t k = i + 1 - n; k <= i; ++k) {
      sum += loss.y[k];
      if (loss.sequences[k] != sequences) sequences = NAN;  // comparable with nothing
    }
    out.x.push_back(loss.x[i]), out.y.push_back(sum / static_cast<double>(n));
    out.sequences.push_back(sequences), out.step.push_back(loss.step[i]);
  }
  return out;
}

size_t last_comparable(const MeasuredLoss& loss) {
  size_t last = loss.x.size() - 1;
  while (last > 0 && loss.sequences[last] != loss.sequences[0]) --last;
  return last;
}

Reached reach(const MeasuredLoss& loss, double wanted, double sequences) {
  Reached found{Reached::How::never, NAN, INFINITY, NAN};
  size_t before = loss.x.size();
  for (size_t i = 0; i < loss.x.size(); ++i) {
    if (loss.sequences[i] != sequences) continue;
    const bool above = loss.y[i] > wanted, first = before == loss.x.size();
    found.lowest = std::min(found.lowest, loss.y[i]), found.last = loss.y[i];
    if (above) {
      found.how = found.lowest <= wanted ? Reached::How::not_for_good : Reached::How::never, found.x = NAN;
    } else if (first) {
      found.how = Reached::How::before_first;
    } else if (loss.y[before] > wanted) {
      found.how = Reached::How::there;
      found.x = between(loss.y[before], loss.x[before], loss.y[i], loss.x[i], wanted);
    }
    before = i;
  }
  return found;
}

// -----------------------------------------------------------------------------------------------------------------
// The report

namespace {

struct Axis {
  const char *key, *name;
};
constexpr Axis cost_axes[] = {{"tokens", "tokens"}, {"flops", "FLOPs"}, {"seconds", "seconds"}};

// The loss to be reached, and where the run that others are compared with has it.
struct Wanted {
  double loss, sequences, step;
  bool last;  // of that run
};

Wanted wanted_of(const RunLosses& a) {
  const MeasuredLoss& loss = a.over.at("step");
  const size_t at = last_comparable(loss);
  return {loss.y[at], loss.sequences[at], loss.step[at], at + 1 == loss.x.size()};
}

double place_of_step(const MeasuredLoss& loss, double step) {
  const auto found = std::ranges::find(loss.step, step);
  return found == loss.step.end() ? NAN : loss.x[static_cast<size_t>(found - loss.step.begin())];
}

// "84.7 %", or "-" with a line that says why.
struct Ratio {
  double share = NAN;
  std::string note = "";
};

Ratio ratio_of(const RunLosses& a, const RunLosses& b, const Wanted& wanted, const Axis& axis) {
  for (const RunLosses* run : {&a, &b})
    if (const auto why = run->lacks.find(axis.key); why != run->lacks.end())
      return {NAN, str("note: no ", axis.name, " for ", run->name, ": ", why->second, "\n")};
  const Reached there = reach(b.over.at(axis.key), wanted.loss, wanted.sequences);
  const double whole = place_of_step(a.over.at(axis.key), wanted.step);
  return {there.how == Reached::How::there && whole > 0 ? there.x / whole : NAN};
}

std::string percent(double share) { return std::isnan(share) ? "-" : format_number("%.1f %%", 100 * share); }

// Why there is no ratio at all, as a line; "" where there is one.
std::string refusal(const RunLosses& a, const RunLosses& b, const Wanted& wanted, const std::string& loss) {
  const Reached there = reach(b.over.at("step"), wanted.loss, wanted.sequences);
  const std::string goal = str(a.name, "'s ", loss, format_number(" %.4f", wanted.loss));
  if (there.how == Reached::How::there) return "";
  if (there.how == Reached::How::before_first)
    return str("note: ", b.name, " is below ", goal,
               " from its first point on: where it came below is not known; take ",
               "a smaller --eval-every or --smooth\n");
  if (std::isinf(there.lowest))
    return str("note: ", b.name, " has no loss over ", wanted.sequences, " test sequences, as ", goal, " is\n");
  if (there.how == Reached::How::not_for_good)
    return str("note: ", b.name, " does not stay below ", goal, format_number(": its lowest is %.4f", there.lowest),
               format_number(", its last %.4f; no place is given\n", there.last));
  return str("note: ", b.name, " never reaches ", goal, format_number(": its lowest is %.4f", there.lowest), "\n");
}

// "lime reaches llama's final test loss 2.3100 after 84.7 % of its FLOPs: 15.3 % fewer"
std::string sentence(const RunLosses& a, const RunLosses& b, const Wanted& wanted, const std::string& loss,
                     double share, const Axis& axis) {
  return str(b.name, " reaches ", a.name, "'s ", wanted.last ? "final " : "", loss, format_number(" %.4f", wanted.loss),
             wanted.last ? "" : str(" of step ", wanted.step), " after ", percent(share), " of its ", axis.name, ": ",
             percent(std::abs(1 - share)), share > 1 ? " more\n" : " fewer\n");
}

}  // namespace

std::string comparison_against(const RunLosses& a, const std::vector<RunLosses>& others, const std::string& loss) {
  const Wanted wanted = wanted_of(a);
  std::vector<std::vector<std::string>> rows = {{"run", "difference", "+-", "tokens", "FLOPs", "seconds"}};
  std::string sentences, notes;
  if (!wanted.last)
    notes += str("note: ", a.name, "'s last test loss is over other test sequences than those before; equal loss is ",
                 "taken at step ", wanted.step, ", over ", wanted.sequences, "; --eval-samples 0 compares the ends\n");
  const auto once = [&](const std::string& note) {
    if (notes.find(note) == std::string::npos) notes += note;
  };
  for (const RunLosses& b : others) {
    const bool same = a.sequences == b.sequences;
    const double error = std::hypot(a.error, b.error);
    rows.push_back({b.name, same ? format_number("%+.4f", b.last - a.last) : "-",
                    same && !std::isnan(error) ? format_number("%.4f", error) : "-"});
    if (!same)
      notes += str("note: no difference for ", b.name, ": its last test loss is over ", b.sequences,
                   " test sequences, that of ", a.name, " over ", a.sequences, "\n");
    notes += refusal(a, b, wanted, loss);
    for (const Axis& axis : cost_axes) {
      const Ratio ratio = ratio_of(a, b, wanted, axis);
      rows.back().push_back(percent(ratio.share));
      once(ratio.note);
      if (!std::isnan(ratio.share)) sentences += sentence(a, b, wanted, loss, ratio.share, axis);
    }
  }
  return str("\nagainst ", a.name, ", ", loss, format_number(" %.4f", a.last), "\n", format_table(rows),
             "difference: of the last losses; +-: its standard error over the seeds\n",
             "tokens, FLOPs, seconds: until ", a.name, "'s loss is reached, of what ", a.name, " took\n", sentences,
             notes);
}

}  // namespace crossply
