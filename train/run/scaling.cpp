#include "train/run/scaling.h"

#include <algorithm>

#include "engine/check.h"

namespace crossply {

double assumed_mfu(int64_t parameters) {
  return parameters < 500'000'000 ? 0.40 : parameters < 3'000'000'000 ? 0.45 : 0.50;
}

double slowdown(int64_t W) { return W == 1 ? 1 : W <= 8 ? 1.02 : W <= 64 ? 1.03 : 1.06; }

// Every rank needs the other W-1 slices of `bytes`, or sends them away: so much must leave it. With two levels the
// slices of all nodes move inside the node first, and then only sums, or only once, to the n-1 other nodes. A ring
// leaves its node at one of g ranks.
Sent sent(double bytes, Route route, int64_t W, int64_t g) {
  g = std::min(g, W);
  const auto ranks = static_cast<double>(W), in_node = static_cast<double>(g);
  const double n = static_cast<double>((W + g - 1) / g);
  switch (route) {
    case Route::flat: return {bytes * (in_node - 1) / ranks, bytes * (ranks - in_node) / ranks};
    case Route::two_levels: return {bytes * (in_node - 1) / in_node, bytes / in_node * (n - 1) / n};
    case Route::ring: break;
  }
  const double all = bytes * (ranks - 1) / ranks, outside = n > 1 ? all / in_node : 0;
  return {all - outside, outside};
}

// Flat, two levels: a launch, and a message to each peer in other nodes; assumed. MPI's thread looks every 50 us.
// Ring: NCCL 2.28's hwLatencies and baseLatencies of the Simple protocol (tuning.cc).
double latency(Route route, int64_t W, const Links& links) {
  constexpr double us = 1e-6;
  const int64_t g = std::min(links.g, W), n = (W + g - 1) / g;
  const auto ranks = static_cast<double>(W), nodes = static_cast<double>(n);
  if (links.polls) return 50 * us + ranks * us;
  if (route == Route::ring) return ((ranks - nodes) * 3.4 + (n > 1 ? nodes * 14 : 0) + 8.4) * us;
  const double peers = route == Route::flat ? static_cast<double>(W - g) : nodes;
  return (30 + (n > 1 ? 25 + peers : 0)) * us;
}

// Links inside and outside work at the same time.
static double beside(const Sent& each, const Links& links) {
  const double inside = each.inside > 0 ? each.inside / links.b_nv : 0;
  return each.outside > 0 ? std::max(inside, each.outside / links.b_ib) : inside;
}

// A ring is as fast as its slowest link, and has all cards of a node.
double transfer_time(double bytes, int64_t nb, Route route, int64_t W, const Links& links) {
  if (W == 1) return 0;
  const Sent each = sent(bytes, route, W, links.g);
  double seconds = 0;
  if (route == Route::ring) {
    const double cards = links.b_ib * static_cast<double>(std::min(links.g, W));
    seconds = (each.inside + each.outside) / (each.outside > 0 ? std::min(links.b_nv, cards) : links.b_nv);
  } else {
    seconds = beside(each, links);
  }
  return seconds + static_cast<double>(nb) * latency(route, W, links);
}

Scaling predict(const ScalingInput& in) {
  Scaling out{};
  out.t_c = in.t_c, out.s = slowdown(in.W);
  out.t_rs = transfer_time(in.gradients, in.nb, in.reduce, in.W, in.links);
  out.t_ag = transfer_time(in.weights, in.nb, in.gather, in.W, in.links);
  out.t_sums = transfer_time(in.sums, in.sums > 0 ? 1 : 0, in.gather, in.W, in.links);
  out.t_muon = in.newton_schulz;
  if (in.directions.inside + in.directions.outside > 0)
    out.t_muon += beside(in.directions, in.links) + 2 * latency(Route::flat, in.W, in.links);
  out.t_hbm = in.b_hbm > 0 ? in.swept / in.b_hbm : 0;
  out.t_bwd = in.t_c / static_cast<double>(in.A) * 2 / 3, out.t_fwd = out.t_bwd / 2;
  const auto exposed = [](double t, double tail, double hidden) { return std::max(tail, t - 0.9 * hidden); };
  out.rs_tail = in.reduce_beside ? in.tail * out.t_rs : out.t_rs;
  out.rs_exposed = in.reduce_beside ? exposed(out.t_rs, out.rs_tail, out.t_bwd) : out.t_rs;
  const double first = out.t_ag / static_cast<double>(in.nb);  // without which the forward cannot begin
  out.ag_exposed = in.gather_beside ? exposed(out.t_ag, first, out.t_fwd) : out.t_ag;
  out.t = out.s * out.t_c + out.rs_exposed + out.ag_exposed + out.t_hbm + out.t_sums + out.t_muon;
  out.t_plain = out.s * out.t_c + out.t_rs + out.t_ag + out.t_hbm + out.t_sums + out.t_muon;
  return out;
}

}  // namespace crossply
