// How long a step of W ranks takes, predicted from sizes and rates. Seconds, bytes, bytes a second:
//
//   t_c         forward and backward of a rank's tokens, the only part that one rank alone has, too
//   s           by how much transfers beside it, and waiting for the slowest rank, slow that down
//   t_rs, t_ag  gradients to their owners; updated weights to all ranks
//   t_hbm       sweeps over the flat arrays: AdamW, parked sums
//   t_sums      the gather of losses and squares, for which the update waits
//   t_muon      Muon's directions to the owners of the matrices and back, and the work of the busiest owner
//   t           = s t_c + exposed t_rs + exposed t_ag + t_hbm + t_sums + t_muon;  efficiency = t_c / t
//
// A transfer that runs while the device computes is exposed by max(tail, t - 0.9 of the time it may hide behind): the
// tail is what only begins when the computing is done.
#pragma once

#include <cstdint>
#include <string>

namespace crossply {

// The share of its peak that a GPU is assumed to attain with a model of so many parameters.
double assumed_mfu(int64_t parameters);
// s, by the number of ranks: assumed, from nothing that was measured.
double slowdown(int64_t W);

// Who sends what to whom.
//   flat        every rank to every other one, as Comm::exchange
//   ring        NCCL's: each rank passes on to the next one
//   two_levels  inside the nodes, then between ranks of the same place in theirs
enum class Route { flat, ring, two_levels };

struct Links {
  double b_nv = 0, b_ib = 0;
  int64_t g = 1;       // ranks of a node; the last node may have fewer
  bool polls = false;  // as MPI's thread does, instead of NCCL's kernels
};

// What a rank sends, on the average, to have `bytes` in slices exchanged or gathered.
struct Sent {
  double inside = 0, outside = 0;  // its node
};
Sent sent(double bytes, Route route, int64_t W, int64_t g);
// What a piece takes, however small it is.
double latency(Route route, int64_t W, const Links& links);
// How long that takes, in nb pieces; 0 for one rank.
double transfer_time(double bytes, int64_t nb, Route route, int64_t W, const Links& links);

struct ScalingInput {
  int64_t W = 1;
  double t_c = 0;
  int64_t A = 1;                // micro-steps of a rank; gradients move in the last one's backward
  double gradients = 0;         // bytes
  double weights = 0;           // bytes, as they are gathered
  double sums = 0;              // bytes
  Sent directions;              // bytes of a rank, on the average
  double newton_schulz = 0;     // seconds
  int64_t nb = 1;               // buckets
  double tail = 1;              // share of the gradients that is final only when the backward ends
  double swept = 0, b_hbm = 0;  // bytes for t_hbm, and their rate; 0: in t_c
  Route reduce = Route::flat, gather = Route::ring;
  bool reduce_beside = true, gather_beside = false;  // the backward, and the next forward
  Links links;
};

struct Scaling {
  double t_c, s, t_rs, t_ag, t_hbm, t_sums, t_muon;
  double t_bwd, t_fwd;  // of one micro-step, without s
  double rs_tail, rs_exposed, ag_exposed;
  double t, t_plain;  // with and without overlap
  double efficiency() const { return t_c / t; }
  double plain_efficiency() const { return t_c / t_plain; }
};
Scaling predict(const ScalingInput& input);

}  // namespace crossply
