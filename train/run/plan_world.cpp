// --dry-run --world N: what a job of N ranks would be.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "cli/format.h"
#include "kernels/devices.h"
#include "train/run/planned_run.h"
#include "train/run/ranks.h"
#include "train/run/scaling.h"
#include "train/settings/gpus.h"
#include "train/step/muon_routes.h"
#include "train/step/reduction.h"

namespace crossply {
namespace {

const Gpu& gpu_of(const TrainPlan& plan) { return find_gpu(plan.world.gpu.empty() ? "h100" : plan.world.gpu); }

int64_t tokens_of_rank(const TrainPlan& plan, const PlannedRun& planned) {
  return plan.batch * planned.micro_steps * plan.data.seq_len;
}

// -----------------------------------------------------------------------------------------------------------------
// Buckets

// In the order in which they are exchanged (train/step/reduction.cpp).
std::vector<FinalBucket> final_buckets(const PlannedRun& planned) {
  return final_buckets(planned.tape, planned.params, planned.buckets);
}

size_t time_of(const PlannedRun& planned, size_t node) { return 2 * planned.tape.nodes().size() - 1 - node; }

double gradient_bytes(const Range& range) { return 4.0 * static_cast<double>(range.size()); }

// Of the gradients, what is final only when the backward ends.
double share_of_tail(const PlannedRun& planned) {
  double all = 0, last = 0;
  const std::vector<FinalBucket> buckets = final_buckets(planned);
  for (const FinalBucket& b : buckets) {
    all += gradient_bytes(b.bucket->flat);
    if (b.node == buckets.back().node) last += gradient_bytes(b.bucket->flat);
  }
  return last / all;
}

// "layers 3 to 5, embed_tokens": the rows in this range, in so many letters.
std::string rows_in(const ParameterTable& params, const Range& range, size_t room) {
  constexpr const char* layer_prefix = "model.layers.";
  int first = -1, last = -1;
  std::string others;
  for (const Parameter& row : params.rows()) {
    if (row.offset >= range.end || row.offset + row.shape.numel() <= range.begin) continue;
    int layer = -1;
    if (row.name.starts_with(layer_prefix)) {
      layer = std::stoi(row.name.substr(std::string(layer_prefix).size()));
      first = first < 0 ? layer : std::min(first, layer), last = std::max(last, layer);
      continue;
    }
    std::string name = row.name;
    for (const char* part : {"model.", ".weight"})
      if (const size_t at = name.find(part); at != std::string::npos) name.erase(at, std::string(part).size());
    others += (others.empty() ? "" : ", ") + name;
  }
  std::string text = first < 0 ? "" : first == last ? str("layer ", first) : str("layers ", first, " to ", last);
  text += (text.empty() || others.empty() ? "" : ", ") + others;
  return text.size() <= room ? text : text.substr(0, room - 3) + "...";
}

std::string bucket_lines(const TrainPlan& plan, const PlannedRun& planned) {
  const std::vector<FinalBucket> buckets = final_buckets(planned);
  const bool replicas = planned.layout.replicas > 1, in_bf16 = storage_type(plan) == Dtype::bf16;
  char line[200];
  const int64_t nodes = std::ssize(planned.tape.nodes());
  std::string out = str("buckets of gradients: ", format_count(std::ssize(buckets)),
                        ", in the order in which the backward finishes them;\n  time: its index among the ",
                        format_count(2 * nodes), " ops of a micro-step, half of them forward\n");
  if (replicas) out += "  (they are exchanged later, when the replicas' gradients have been added)\n";
  std::snprintf(line, sizeof line, "  %6s %12s %11s %7s  %s\n", "number", "bytes", "weights as", "time", "of");
  out += line;
  constexpr size_t shown = 5;
  for (size_t k = 0; k < buckets.size(); ++k) {
    if (buckets.size() > 2 * shown + 2 && k == shown) {
      out += str("  ... ", format_count(std::ssize(buckets) - static_cast<int64_t>(2 * shown)),
                 " more; --dump-tape shows all\n");
      k = buckets.size() - shown;
    }
    const auto& [bucket, node] = buckets[k];
    std::snprintf(line, sizeof line, "  %6zu %12s %11s %7zu  %s\n", k,
                  format_bytes(gradient_bytes(bucket->flat)).c_str(), in_bf16 && bucket->bf16_only ? "bf16" : "fp32",
                  time_of(planned, node), rows_in(planned.params, bucket->flat, 36).c_str());
    out += line;
  }
  return out;
}

// -----------------------------------------------------------------------------------------------------------------
// Memory and transfers

double bytes_of(const std::vector<MemoryPart>& parts, const std::string& name) {
  const auto part = std::find_if(parts.begin(), parts.end(), [&](const MemoryPart& p) { return p.name == name; });
  return part == parts.end() ? 0 : part->bytes;
}

std::string memory_table(const std::vector<MemoryPart>& many, const std::vector<MemoryPart>& one, int64_t W) {
  std::vector<MemoryPart> all = many;
  for (const MemoryPart& part : one)
    if (bytes_of(all, part.name) == 0) all.push_back({part.name, 0});
  std::vector<std::vector<std::string>> rows = {{"memory of a rank", str("of ", format_count(W)), "of one alone"}};
  const auto cell = [](double bytes) { return bytes > 0 ? format_bytes(bytes) : std::string("-"); };
  for (const MemoryPart& part : all)
    rows.push_back({"  " + part.name, cell(part.bytes), cell(bytes_of(one, part.name))});
  rows.push_back({"  in all", cell(total(many)), cell(total(one))});
  return format_table(rows);
}

// Bytes of the weights as they are gathered.
double weight_bytes(const PlannedRun& planned, Dtype storage) {
  double bytes = 0;
  for (const Bucket& bucket : planned.buckets.list())
    bytes += gradient_bytes(bucket.flat) / (storage == Dtype::bf16 && bucket.bf16_only ? 2 : 1);
  return bytes;
}

// Muon's directions, both ways; of a rank, on the average.
Sent sent_directions(const TrainPlan& plan, const PlannedRun& planned, int64_t node_ranks) {
  const double bytes = storage_type(plan) == Dtype::bf16 ? 2 : 4;
  Sent all;
  for (const RoutedPart& part : routed_parts(planned.params, planned.buckets))
    (part.holder / node_ranks == part.owner / node_ranks ? all.inside : all.outside) +=
        2 * bytes * static_cast<double>(part.flat.size()) / static_cast<double>(planned.buckets.size());
  return all;
}

// FLOPs of the rank that has most to make orthogonal.
double newton_schulz_of_busiest(const TrainPlan& plan, const PlannedRun& planned) {
  const std::vector<const Parameter*> matrices = muon_matrices(planned.params);
  const std::vector<int> owners = muon_owners(planned.params, planned.buckets.size());
  const size_t steps = newton_schulz_of(plan.muon.polynomial, plan.muon.steps).steps.size();
  std::vector<double> loads(static_cast<size_t>(planned.buckets.size()));
  for (size_t i = 0; i < matrices.size(); ++i)
    loads[static_cast<size_t>(owners[i])] += newton_schulz_flops(matrices[i]->shape[0], matrices[i]->shape[1], steps);
  return *std::max_element(loads.begin(), loads.end());
}

// What moves, which way, and in what time the rest is done. Without a rate to compute by, t_c stays 0.
ScalingInput scaling_input(const TrainPlan& plan, const PlannedRun& planned) {
  const PlannedWorld& world = plan.world;
  const auto flat = static_cast<double>(planned.params.flat_size()),
             tokens = static_cast<double>(tokens_of_rank(plan, planned));
  ScalingInput in;
  in.W = world.ranks, in.A = planned.micro_steps;
  in.gradients = 4 * flat, in.weights = weight_bytes(planned, storage_type(plan));
  in.sums = 8 * (flat / leaf + static_cast<double>(plan.accumulate * planned.layout.replicas));
  in.nb = std::ssize(planned.buckets.list()), in.tail = share_of_tail(planned);
  in.reduce_beside = planned.layout.replicas == 1;
  if (world.rate > 0) in.t_c = tokens / world.rate;
  if (!on_gpus(plan)) {
    in.gather = Route::flat;
    in.links = {world.net * 1e9, world.net * 1e9, 1, true};
    in.directions = sent_directions(plan, planned, 1);
    return in;
  }
  const Gpu& gpu = gpu_of(plan);
  in.links = {world.nvlink > 0 ? world.nvlink * 1e9 : gpu.b_nv, world.net > 0 ? world.net * 1e9 : gpu.b_ib,
              world.node_gpus};
  in.directions = sent_directions(plan, planned, in.links.g);
  if (plan.sum == "library") in.reduce = Route::ring;
  if (world.rate > 0) return in;
  const bool in_bf16 = storage_type(plan) == Dtype::bf16;
  const double peak = assumed_mfu(planned.params.count()) * (in_bf16 ? gpu.bf16 : gpu.fp32);
  in.t_c = planned.training_flops_per_token * tokens / peak;
  in.newton_schulz = newton_schulz_of_busiest(plan, planned) / peak;
  // AdamW reads four numbers and writes three, and a bf16 copy, after the norm has read one; the tree reads and writes
  // six for each micro-step but one: a sum, a copy, zeros.
  in.swept = (in_bf16 ? 34 : 32) * static_cast<double>(planned.buckets.own_size());
  // Adding up what other ranks sent: a copy of the own slice to theirs, then all of them, and the sum.
  if (in.W > 1 && plan.sum != "library") in.swept += 4 * flat + 12 * static_cast<double>(planned.buckets.own_size());
  if (plan.sum == "tree") in.swept += 24 * flat * static_cast<double>(planned.micro_steps - 1);
  in.b_hbm = gpu.b_hbm;
  return in;
}

std::string sent_table(const TrainPlan& plan, const ScalingInput& in) {
  std::vector<std::vector<std::string>> rows = {{"sent by a rank in a step"}};
  if (on_gpus(plan)) rows[0].insert(rows[0].end(), {"inside its node", "to other nodes"});
  else rows[0].push_back("to other ranks");
  const auto add_sent = [&](const std::string& what, const Sent& each) {
    rows.push_back({"  " + what});
    if (on_gpus(plan)) rows.back().push_back(format_bytes(each.inside));
    rows.back().push_back(format_bytes(each.outside));
  };
  const auto add = [&](const std::string& what, double bytes, Route route) {
    add_sent(what + (route == Route::ring ? ", round a ring" : ", to each rank"), sent(bytes, route, in.W, in.links.g));
  };
  add("gradients, fp32", in.gradients, in.reduce);
  add(in.weights < in.gradients ? "weights, bf16 and fp32" : "weights, fp32", in.weights, in.gather);
  add("losses and squares, fp64", in.sums, in.gather);
  if (has_muon(plan.optimizer)) add_sent("Muon's directions, to owners and back", in.directions);
  return format_table(rows);
}

// -----------------------------------------------------------------------------------------------------------------
// Time

std::string format_time(double seconds) {
  return seconds < 1 ? format_number("%.2f ms", 1e3 * seconds) : format_number("%.2f s", seconds);
}

std::string rates_line(const TrainPlan& plan, const ScalingInput& in) {
  const auto rate = [](double bytes) { return format_number("%.4g GB/s", 1e-9 * bytes); };
  if (!on_gpus(plan)) return str("  a rank sends ", rate(in.links.b_ib), " (--net); nodes are not told apart\n");
  const PlannedWorld& world = plan.world;
  const auto source = [](bool given, const char* flag) { return str(given ? " (" : " (assumed; ", flag, ")"); };
  const int64_t g = std::min(in.links.g, in.W), nodes = (in.W + g - 1) / g;
  return str("  ", gpu_of(plan).name, ": ", format_count(nodes), nodes == 1 ? " node of " : " nodes of ",
             format_count(g), " ranks\n  a rank sends ", rate(in.links.b_nv), " inside its node",
             source(world.nvlink > 0, "--nvlink"), "\n  and ", rate(in.links.b_ib), " to other nodes",
             source(world.net > 0, "--net"), "\n");
}

std::string computing(const TrainPlan& plan, const PlannedRun& planned) {
  if (plan.world.rate > 0) return str("by --rank-rate; the optimizer is in it");
  const bool in_bf16 = storage_type(plan) == Dtype::bf16;
  return str(format_number("%.3g", planned.training_flops_per_token), " FLOPs each, ",
             format_number("%.0f%% of ", 100 * assumed_mfu(planned.params.count())),
             format_number("%.4g TFLOP/s, assumed", 1e-12 * (in_bf16 ? gpu_of(plan).bf16 : gpu_of(plan).fp32)),
             plan.matmul == "fp8" ? ", as in bf16" : "");
}

std::string time_lines(const TrainPlan& plan, const PlannedRun& planned, const ScalingInput& in, const Scaling& t) {
  char line[200];
  std::string out = "time of a step, predicted; nothing of it was measured here\n" + rates_line(plan, in);
  const auto add = [&](const char* name, const std::string& value, const std::string& what) {
    std::snprintf(line, sizeof line, "  %-8s %10s  %s\n", name, value.c_str(), what.c_str());
    out += line;
  };
  add("t_c", format_time(t.t_c),
      str("forward and backward of a rank's ", format_count(tokens_of_rank(plan, planned)), " tokens:"));
  add("", "", computing(plan, planned));
  add("s", format_number("%.2f", t.s), "slower by transfers and the slowest rank (assumed)");
  const auto waits = [&](Route route) {
    return str("; ", format_time(static_cast<double>(in.nb) * latency(route, in.W, in.links)), " latency",
               route == Route::ring ? "\n                       (by NCCL's own figures)" : "");
  };
  add("t_rs", format_time(t.t_rs), "gradients to their owners" + waits(in.reduce));
  add("t_bwd", format_time(in.reduce_beside ? t.t_bwd : 0),
      in.reduce_beside ? "the last micro-step's backward, which may hide them" : "replicas: no backward hides them");
  add("tail", format_time(t.rs_tail), "their last part, final when the backward ends");
  add("t_ag", format_time(t.t_ag), "updated weights to all, not hidden" + waits(in.gather));
  if (in.b_hbm > 0)
    add("t_hbm", format_time(t.t_hbm),
        str("AdamW", plan.sum == "tree" ? ", parked sums," : "", " at ", format_number("%.4g GB/s", 1e-9 * in.b_hbm),
            " of memory"));
  add("t_sums", format_time(t.t_sums), "losses and squares of the gradients");
  if (has_muon(plan.optimizer))
    add("t_muon", format_time(t.t_muon),
        in.newton_schulz > 0 ? str("directions to owners and back; Newton-Schulz ", format_time(in.newton_schulz))
                             : std::string("directions to owners and back; Newton-Schulz is in t_c"));
  const double tokens = static_cast<double>(tokens_of_rank(plan, planned) * in.W);
  add("t", format_time(t.t), "a step");
  add("tokens/s", format_count(std::llround(tokens / t.t)), "of all ranks");
  out += str("  t = s t_c + max(tail, t_rs - 0.9 t_bwd) + t_ag", in.b_hbm > 0 ? " + t_hbm" : "", " + t_sums",
             has_muon(plan.optimizer) ? " + t_muon\n" : "\n");
  out += str("  efficiency t_c / t: ", format_number("%.1f%%", 100 * t.efficiency()),
             "; without overlap, with t_rs in full: ", format_number("%.1f%%", 100 * t.plain_efficiency()), "\n");
  return out;
}

// -----------------------------------------------------------------------------------------------------------------
// What binds

std::string memory_limit(const TrainPlan& plan, const std::vector<MemoryPart>& parts) {
  if (!on_gpus(plan) || total(parts) <= gpu_of(plan).memory) return "";
  const bool batch = bytes_of(parts, "activations") > total(parts) - gpu_of(plan).memory && plan.batch > 1;
  const bool tree = bytes_of(parts, "parked gradients (--sum tree)") > 0;
  return str("memory: ", format_bytes(total(parts)), ", and the ", gpu_of(plan).name, " has ",
             format_bytes(gpu_of(plan).memory), ";\n  ",
             tree    ? "--sum running parks no gradients"
             : batch ? "a smaller --batch with a larger --accumulate, or a shorter --seq"
                     : "a shorter --seq, a smaller --batch or model; --dtype bf16");
}

std::string time_limit(const TrainPlan& plan, const ScalingInput& in, const Scaling& t) {
  const double slower = (t.s - 1) * t.t_c;
  const double most = std::max({slower, t.rs_exposed, t.ag_exposed, t.t_hbm, t.t_sums, t.t_muon});
  const auto costs = [&](const char* what) {
    return str(what, format_number(", %.1f%% of the step;\n  ", 100 * most / t.t));
  };
  const std::string more = "more tokens a rank and step weigh it less: --accumulate, fewer ranks";
  if (most == slower) return costs("no transfer, but the assumed slowdown s") + "no flag moves it";
  if (most == t.rs_exposed && t.rs_exposed > t.rs_tail)
    return costs("gradients that the last backward does not hide") +
           "a larger --batch with a smaller --accumulate makes it longer";
  if (most == t.rs_exposed) return costs("the gradients' tail") + more;
  if (most == t.t_hbm) return costs("sweeps over memory") + (plan.sum == "tree" ? "--sum running parks nothing" : more);
  if (most == t.t_muon) return costs("Muon's matrices") + more;
  if (most == t.t_sums) return costs("the gather of losses and squares") + more;
  return costs("the gather of weights") + (in.weights < in.gradients ? more : more + ";\n  or --dtype bf16");
}

std::string bits_line(const TrainPlan& plan, int64_t micro_steps, int64_t W) {
  if (W == 1) return "bits: one rank's own";
  if (plan.sum == "library") return "bits: in an order of the library's; not those of one rank";
  if (has_bits_of_one_rank(plan.sum, micro_steps)) return "bits: those of one rank with --sum tree";
  if (plan.sum == "running")
    return str("bits: not those of one rank. --sum tree gives them where a rank's micro-steps\n  (",
               format_count(micro_steps), ") are a power of two");
  return str("bits: not those of one rank, because a rank's ", format_count(micro_steps),
             " micro-steps are no\n  power of two");
}

std::string checkpoint_lines(const PlannedRun& planned, int64_t W) {
  const auto count = static_cast<double>(planned.params.count());
  double moments = 2 * count;  // Muon's matrices have the first alone
  for (const Parameter* row : muon_matrices(planned.params)) moments -= static_cast<double>(row->shape.numel());
  const double each = 4 * moments / static_cast<double>(W);
  return str("a checkpoint: ", format_bytes(4 * (count + moments)), "; weights in fp32, ", format_bytes(4 * count),
             ";\n  moments in ", W == 1 ? "a file" : format_count(W) + " files", " of ", format_bytes(each),
             ";\n  config.json, train_state.json, tokenizer and manifest\n");
}

}  // namespace

std::string describe_world(const TrainPlan& plan, PlannedRun& planned) {
  const int64_t W = plan.world.ranks;
  PlannedRun one(plan, 1);
  const std::vector<MemoryPart> parts = planned_parts(plan, planned);
  const ScalingInput in = scaling_input(plan, planned);
  const bool timed = in.t_c > 0 && in.links.b_ib > 0;
  std::string out = str("\na job of ", format_count(W), W == 1 ? " rank: " : " ranks: ", format_count(plan.accumulate),
                        " micro-steps a step, ", format_count(planned.micro_steps), " a rank;\n  ",
                        format_count(tokens_of_rank(plan, planned) * W), " tokens a step\n\n");
  out += memory_table(parts, planned_parts(plan, one), W) + "\n";
  if (W > 1) out += bucket_lines(plan, planned) + "\n" + sent_table(plan, in) + "\n";
  const Scaling t = predict(in);
  if (timed) out += time_lines(plan, planned, in, t);
  else out += "no times: give --rank-rate (tokens/s of one rank, from its status line)\n  and --net (GB/s it sends)\n";
  const std::string memory = memory_limit(plan, parts);
  if (!memory.empty() || timed) out += "\nfirst limit: " + (memory.empty() ? time_limit(plan, in, t) : memory) + "\n";
  out += str("last limit: ", format_count(plan.batch * plan.accumulate), " sequences a step, so not more ranks\n");
  return out + bits_line(plan, planned.micro_steps, W) + "\n" + checkpoint_lines(planned, W);
}

std::multimap<size_t, std::string> bucket_notes(const PlannedRun& planned) {
  std::multimap<size_t, std::string> notes;
  size_t k = 0;
  for (const auto& [bucket, node] : final_buckets(planned))
    notes.emplace(node, str("time ", time_of(planned, node), ": bucket ", k++, " is final, ",
                            format_bytes(gradient_bytes(bucket->flat)), ": ", rows_in(planned.params, bucket->flat, 50),
                            planned.layout.replicas > 1 ? " (of one replica)" : ""));
  return notes;
}

}  // namespace crossply
