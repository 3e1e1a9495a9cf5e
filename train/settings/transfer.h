// --transfer: rates, starts, weight decay, epsilons and the clipped norm as a smaller model's, the base shape, so that
// what was tuned there holds here: muP (Yang et al., arXiv 2203.03466) across the width, CompleteP (Dey et al., arXiv
// 2505.01618) across the depth, too.
//
//   mN = C / C0,  mL = L / L0,  h = sqrt(D0 / D);    completep: r = mL^-alpha, d = mL^(alpha - 1);    mup: r = d = 1
//
// These papers multiply in the forward: the residual by r, the logits by 1 / mN. Here the same functions come from the
// numbers of rows: a weight that is folded, W' = c W, starts at c times as much and learns at c times the rate, its
// epsilon is divided by c, and its gradients count c times in the norm. So a trained model is a plain LLaMA or GPT-2.
//
//   row                               start x         AdamW x   Muon x (1)   decay x       epsilon x   norm x
//   embedding, head, value tables     1               1                      1             1/mN        1
//   q, k, v, gate, up                 mN^-1/2         d/mN      d mN^-1/2    1/(rate/d)    r/mN        1
//   o, down                           mN^-1/2 r (2)   r d/mN    r d mN^-1/2  1/(rate/d)    1/mN        r
//   biases of o and down              r               r d                    1             1/mN        r
//   norms, other biases, scalars      1               d                      1             r/mN        1
//   final norm                        1/mN            1/mN                   1             1           1/mN
//   routers that read the width       mN^-1/2 (3)     d/mN      d mN^-1/2    1/(rate/d)    r/mN        1
//   routers that weigh sources        1               1/mL (4)               1             r/mN        1
//
// With another width of heads than the base's also h for the start, the rate and the norm, and 1/h for the epsilon and
// a matrix's decay: of q and its bias, or where there is one of the gain of its norm.
// (1) of --muon-scale rms; else without mN^-1/2. (2) GPT-2's in completep also sqrt(mL): it is sigma / sqrt(2 L0).
// (3) where it is normal; what is uniform has a bound of 1/sqrt(C) already. (4) mup: 1.
#pragma once

#include <string>
#include <vector>

#include "engine/params.h"
#include "models/config.h"

namespace crossply {

inline const std::vector<std::string> transfer_rules = {"none", "mup", "completep"};

struct TransferOptions {
  std::string rule = "none";    // one of transfer_rules
  int64_t base_width = 0;       // C0
  int64_t base_layers = 0;      // L0, of completep
  int64_t base_head_width = 0;  // D0; 0: the model's
  double depth_alpha = 1;       // of completep
};

// What of a model the rules say nothing of, and nobody has checked; "": nothing.
std::string without_rule(const Config& config);
// Throws Exit::usage for a rule without its base shape, and by name for what has no row in the table above.
void check_transfer(const Config& config, const TransferOptions& options);
// Of declared rows whose `muon` is set. muon_scale: one of muon_scales. starts: their starts, too, as in a new run; a
// model that is trained already keeps its weights.
void apply_transfer(ParameterTable& params, const Config& config, const TransferOptions& options,
                    const std::string& muon_scale, bool starts);

}  // namespace crossply
