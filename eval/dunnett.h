// Many arms against one backbone, each trained from a few seeds: which differences are more than chance, if all of them
// together may raise a false alarm in one table of twenty. As Dunnett's test, but for what is said of deviations:
//
//   t_i = (mean_i - mean_0) / sqrt(s_0^2 / n_0 + s^2 / n_i),   found where |t_i| > c
//
// s is pooled over the arms. s_0 is the backbone's own where it has seeds enough, since every comparison uses it; else
// it is pooled with the arms'. c is what the largest |t_i| stays below in 95 of 100 simulated tables of exactly these
// sizes, in which all means and deviations are equal.
//
// An arm of a deviation unlike the others' is no part of that: `unsteady` finds it by Cochran's test, at 1 %, whose
// limit is simulated, too. Welch's t tests it with the deviation of its own seeds, of which it should be given more, at
// the level that all arms together would have if each was tested so (Sidak).
//
// Where the backbone has its own deviation and those of the arms differ more than chance allows, each arm has a
// deviation of its own, moderated by what all have in common (eval/deviations.h); c is simulated for that. A pooled one
// would raise a false alarm in 18 of 100 tables of deviations like those of dev/experiments/twelve.
//
// Where all have the same seeds, of which each gives all of them the same batches, seeds are blocks: s is what is left
// of losses once the means of arms and of seeds are taken off, k (n - 1) degrees of freedom for k arms. Losses of one
// seed may go together so well that deviations are twenty times smaller then. Else seeds are not paired.
//
// Dunnett, A multiple comparison procedure, 1955. Cochran, The distribution of the largest of a set of estimated
// variances, 1941. Welch, The generalization of Student's problem, 1947.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "eval/statistics.h"

namespace crossply {

struct SeedLoss {
  uint64_t seed;
  double loss;  // not finite: this seed diverged
};
struct ArmLosses {
  std::string name;
  std::vector<SeedLoss> seeds;
  bool unsteady = false;  // by unsteady(), before it was given more seeds

  bool diverged() const;               // any of its seeds; then it is not tested
  std::vector<double> losses() const;  // the finite ones
};

// Places of arms whose deviation is larger than chance allows. Arms with fewer than two seeds, or with one that
// diverged, do not count.
std::vector<size_t> unsteady(const std::vector<ArmLosses>& arms);

struct Verdict {
  double difference = NAN;  // mean_i - mean_0
  double error = NAN;       // its standard error
  double interval = NAN;    // half of it: c times the error
  bool tested = false;      // no: a seed diverged, or there is nothing to know a deviation from
  bool found = false;       // the interval leaves out 0
  bool welch = false;       // tested with the deviation of its own seeds
};
struct FamilyVerdict {
  int64_t backbone_seeds = 0;
  double backbone_sd = NAN, arms_sd = NAN;         // deviations
  int64_t backbone_degrees = 0, arms_degrees = 0;  // of freedom, of these; 0 of the backbone's: it is pooled
  double prior_degrees = INFINITY;  // finite: arms' deviations are unlike each other, and arms_sd is what they have in
                                    // common (eval/deviations.h)
  std::vector<int64_t> seeds;       // of the arms that are judged together
  bool blocks = false;              // all have the same seeds: deviations are of what arms and seeds leave
  double critical = NAN;            // c
  double correlation = NAN;         // of losses from the same seed, backbone and arm, over all arms that have three in
                                    // common with it; NaN: none has
  std::vector<Verdict> arms;        // in their order
  int64_t fewest_seeds() const;     // of the arms that are judged together
};
// Arms without seeds are there to be waited for, and not judged. `beside` are arms of the same table that are compared
// with others: where seeds are blocks, those that have the same seeds add degrees of freedom to the deviation.
FamilyVerdict against_backbone(const ArmLosses& backbone, const std::vector<ArmLosses>& arms,
                               const std::vector<ArmLosses>& beside = {});
// Welch's test of one arm, at the level by which so many tests raise one false alarm in twenty tables (Sidak).
Verdict welch(const Spread& arm, const Spread& backbone, int64_t tests);
// Arms, each against a control of its own (first: the control): Student's t with one deviation, pooled over all of
// them; or, where the pairs' deviations differ more than chance allows, with a moderated one for each pair. The level
// is that by which all pairs together raise a false alarm in one table of twenty (Sidak). One verdict each.
std::vector<FamilyVerdict> against_controls(const std::vector<std::pair<ArmLosses, ArmLosses>>& pairs);
// The difference that an arm of the fewest seeds would be found by in 80 % of 10,000 simulated repeats; NaN where
// nothing can be tested.
double detectable_difference(const FamilyVerdict& verdict);

// How many seeds a backbone needs for a deviation of its own: with 8 that is known to a quarter.
constexpr size_t seeds_of_own_deviation = 8;

// c for arms of these numbers of seeds, whose deviations have `arms_degrees` degrees of freedom together; of a backbone
// of n_0 seeds, whose own have backbone_degrees (0: pooled). Simulated once for each of these.
double dunnett_critical(int64_t n0, int64_t backbone_degrees, const std::vector<int64_t>& n, int64_t arms_degrees);
// The share that the largest of these variances has of their sum, or less, in 99 of 100 tables.
double cochran_limit(const std::vector<int64_t>& degrees);

}  // namespace crossply
