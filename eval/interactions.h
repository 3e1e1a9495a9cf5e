// Is the gain of a combination the sum of its parts' gains? For k parts a, b, .. of mean losses m_a, m_b, .., and a
// backbone of m_0, the interaction is
//
//   I = m_ab.. - (m_a + m_b + ..) + (k - 1) m_0
//
// 0: the gains add up. Above 0: the parts do the same work in part. Below 0: they need each other. Its variance is
//
//   s_ab^2 / n_ab + sum_i s_i^2 / n_i + (k - 1)^2 s_0^2 / n_0
//
// Deviations s are pooled over all arms where these differ no more than chance allows; else each is moderated by what
// all have in common (eval/deviations.h), and degrees of freedom are Satterthwaite's. All interactions of a table are
// one family: the level of each is such that a table of none has one false alarm in twenty (Sidak).
#pragma once

#include <vector>

#include "eval/dunnett.h"

namespace crossply {

// Places of arms in a list.
struct Combination {
  size_t whole;
  std::vector<size_t> parts;
};
struct Interaction {
  double value = NAN, error = NAN;
  double interval = NAN;    // half of it
  double detectable = NAN;  // found in 80 % of repeats, nearly: as Student's t with known deviations of this size
  bool tested = false;      // no: a seed of one of them diverged, or has not ended
  bool found = false;       // the interval leaves out 0
};
// arms[0] is the backbone. One verdict for each combination.
std::vector<Interaction> interactions(const std::vector<ArmLosses>& arms, const std::vector<Combination>& list);

}  // namespace crossply
