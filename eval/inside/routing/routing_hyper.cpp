// Of hyper, mhc and gated_streams: how much of every sublayer's output, and of the embeddings, each later sublayer
// reads.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "eval/inside/routing/routing.h"

namespace crossply {
namespace {

// One token's streams as sums of the outputs: y_0 the embeddings, y_1 the first attention's, y_2 the first MLP's ...
// H_i = sum_t share[i][t] y_t.
class HyperStreams {
 public:
  HyperStreams(size_t E, size_t outputs) : share_(E, std::vector<double>(outputs)) { begin(); }
  void begin() {
    for (auto& stream : share_) std::fill(stream.begin(), stream.end(), 0.0), stream[0] = 1;
  }
  // Adds to row what is read by `weights`, of stream i at [i * apart].
  void read(const double* weights, size_t apart, std::vector<double>& row) const {
    for (size_t i = 0; i < share_.size(); ++i)
      for (size_t t = 0; t < row.size(); ++t) row[t] += weights[i * apart] * share_[i][t];
  }
  // mixing (E, E+2): a sublayer's A, then b. It puts out number `own`.
  void write(const double* mixing, size_t own) {
    const size_t E = share_.size();
    next_ = share_;
    for (size_t t = 0; t < own; ++t)
      for (size_t i = 0; i < E; ++i) {
        double sum = 0;
        for (size_t k = 0; k < E; ++k) sum += mixing[k * (E + 2) + i + 1] * share_[k][t];
        next_[i][t] = sum;
      }
    for (size_t i = 0; i < E; ++i) next_[i][own] = mixing[i * (E + 2) + E + 1];
    share_.swap(next_);
  }

 private:
  RoutingRows share_, next_;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The weights by which mhc's last read takes in a token's streams x (E,C), where they are its own.
std::vector<double> last_weights(const RoutingInput& in, const double* x) {
  const std::vector<double> fn = in.parameter("model.hc_head.hc_fn"), base = in.parameter("model.hc_head.hc_base");
  const double scale = in.parameter("model.hc_head.hc_scale")[0];
  const size_t E = base.size(), width = fn.size() / E;
  const double square = std::inner_product(x, x + width, x, 0.0) / static_cast<double>(width);
  std::vector<double> weights;
  for (size_t i = 0; i < E; ++i) {
    const double product = std::inner_product(x, x + width, &fn[i * width], 0.0);
    const double logit = scale * product / std::sqrt(square + in.config.norm_eps) + base[i];
    weights.push_back(sigmoid(logit) + in.config.number("hc_eps"));
  }
  return weights;
}

// From sums over so many tokens to means; NaN where there is nothing to read.
RoutingRows mean_of(RoutingRows sums, double tokens) {
  for (size_t s = 0; s < sums.size(); ++s)
    for (size_t t = 0; t < sums.size(); ++t) sums[s][t] = t <= s ? sums[s][t] / tokens : NAN;
  return sums;
}

// A sublayer's network of gated_streams, or that of the last read.
struct GatedNetwork {
  std::vector<double> gain, down, up;  // (E*C), (R,E*C), (E*C,R)
  GatedNetwork(const RoutingInput& in, const std::string& rows)
      : gain(in.parameter(rows + "hc_norm.weight")),
        down(in.parameter(rows + "input_mix_weight_down.weight")),
        up(in.parameter(rows + "input_mix_weight_up.weight")) {}

  // Of a token's streams x (E,C) the factors by which it reads them, each the mean over its channels: of the gate, the
  // gain and what the norm divides by.
  std::vector<double> factors(const double* x, size_t E, double eps) const {
    const size_t width = gain.size(), C = width / E, R = down.size() / width;
    std::vector<double> rstd(E), normed(width), hidden(R), weights(E);
    for (size_t i = 0; i < E; ++i) {
      const double* own = x + i * C;
      rstd[i] = 1 / std::sqrt(std::inner_product(own, own + C, own, 0.0) / static_cast<double>(C) + eps);
      for (size_t c = i * C; c < (i + 1) * C; ++c) normed[c] = x[c] * rstd[i] * (1 + gain[c]);
    }
    for (size_t r = 0; r < R; ++r) {
      const double z = std::inner_product(normed.begin(), normed.end(), &down[r * width], 0.0) / static_cast<double>(E);
      hidden[r] = z * sigmoid(z);
    }
    for (size_t c = 0; c < width; ++c)
      weights[c / C] += sigmoid(std::inner_product(hidden.begin(), hidden.end(), &up[c * R], 0.0)) * (1 + gain[c]) *
                        rstd[c / C] / static_cast<double>(width);
    return weights;
  }
};

// As mean_coefficients, of gated_streams: what is read of an output is what each stream took in of it, times that
// stream's factor.
RoutingRows mean_gated_coefficients(const RoutingInput& in) {
  const size_t S = 2 * static_cast<size_t>(in.layers()), E = static_cast<size_t>(in.config.integer("hc_count"));
  std::vector<std::string> streams, injects, names;
  std::vector<GatedNetwork> networks;
  for (size_t s = 0; s < S; ++s) {
    const std::string site = s % 2 == 0 ? "attn_" : "mlp_";
    streams.push_back(str(site, "streams.", s / 2)), injects.push_back(str(site, "inject.", s / 2));
    networks.emplace_back(in, str("model.layers.", s / 2, ".", site, "hyper_connection."));
  }
  streams.push_back("last_streams.0");
  networks.emplace_back(in, "model.hyper_connection_mixer.");
  for (const auto* list : {&streams, &injects}) names.insert(names.end(), list->begin(), list->end());
  RoutingRows sums(S + 1, std::vector<double>(S + 1));
  double tokens = 0;
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    std::vector<const double*> x, logits;
    for (const std::string& name : streams) x.push_back(in.probe.at(name).data());
    for (const std::string& name : injects) logits.push_back(in.probe.at(name).data());
    std::vector<double> taken;  // of each output so far, by each stream
    for (size_t token = 0; token < static_cast<size_t>(n); ++token) {
      taken.assign(E, 1);  // the embeddings
      for (size_t s = 0; s <= S; ++s) {
        const double* own = x[s] + token * networks[s].gain.size();
        const std::vector<double> read = networks[s].factors(own, E, in.config.norm_eps);
        for (size_t e = 0; e < taken.size(); ++e) sums[s][e / E] += read[e % E] * taken[e];
        for (size_t i = 0; i < E && s < S; ++i)
          taken.push_back(2 * sigmoid(logits[s][token * E + i] / static_cast<double>(E)));
      }
    }
  });
  return mean_of(std::move(sums), tokens);
}

// (2L+1, 2L+1): the mean over tokens; rows are the sublayers and the final norm.
RoutingRows mean_coefficients(const RoutingInput& in) {
  const bool hyper = in.config.arch == "hyper", previous = !hyper && in.config.text("reads") == "previous";
  const size_t S = 2 * static_cast<size_t>(in.layers());
  const size_t E = static_cast<size_t>(in.config.integer(hyper ? "rate" : "hc_mult"));
  std::vector<std::string> names;
  for (size_t s = 0; s < S; ++s) names.push_back(str(s % 2 == 0 ? "attn_mixing." : "mlp_mixing.", s / 2));
  RoutingRows mean(S + 1, std::vector<double>(S + 1));
  HyperStreams streams(E, S + 1);
  const std::vector<double> even(E, 1.0 / static_cast<double>(E));
  double tokens = 0;
  if (!hyper && !previous) names.push_back("last_streams.0");
  in.run_all(names, [&](int64_t n) {
    tokens += static_cast<double>(n);
    std::vector<const double*> mixing;
    for (const std::string& name : names) mixing.push_back(in.probe.at(name).data());
    for (size_t t = 0; t < static_cast<size_t>(n); ++t) {
      streams.begin();
      for (size_t s = 0; s < S; ++s) {
        const size_t at = t * E * (E + 2);
        if (!previous) streams.read(mixing[s] + at, E + 2, mean[s]);
        else if (s > 0) streams.read(mixing[s - 1] + at, E + 2, mean[s]);
        else mean[0][0] += 1;  // the embedding
        streams.write(mixing[s] + at, s + 1);
      }
      const auto C = static_cast<size_t>(in.config.hidden_size);
      if (previous) streams.read(mixing[S - 1] + t * E * (E + 2), E + 2, mean[S]);
      else if (hyper) streams.read(even.data(), 1, mean[S]);
      else streams.read(last_weights(in, mixing[S] + t * E * C).data(), 1, mean[S]);
    }
  });
  return mean_of(std::move(mean), tokens);
}

// (L+1, L+1): the mean over the pairs of a layer's readers and another one's outputs where there is something to read.
RoutingRows folded_to_layers(const RoutingRows& c) {
  const size_t L = c.size() / 2;
  const auto layer = [](size_t output) { return (output + 1) / 2; };  // 0: the embeddings
  RoutingRows sum(L + 1, std::vector<double>(L + 1)), count = sum;
  for (size_t s = 0; s < c.size(); ++s)
    for (size_t t = 0; t <= s; ++t) sum[s / 2][layer(t)] += c[s][t], ++count[s / 2][layer(t)];
  for (size_t l = 0; l <= L; ++l)
    for (size_t j = 0; j <= L; ++j) sum[l][j] /= count[l][j];  // NaN: nothing to read
  return sum;
}

RoutingFound look_hyper(const RoutingInput& in) {
  const bool gated = in.config.arch == "gated_streams";
  const RoutingRows c = gated ? mean_gated_coefficients(in) : mean_coefficients(in);
  const std::string last = gated ? "head" : "final norm";
  RoutingFound found;
  found.table = {{"reader", "embedding", "last output", "smallest", "largest"}};
  for (size_t s = 0; s < c.size(); ++s)
    found.table.push_back({s + 1 == c.size() ? last : str("layer ", s / 2, s % 2 == 0 ? " attention" : " mlp"),
                           routing_number(c[s][0]), routing_number(c[s][s]), smallest_of(c[s], c.size()),
                           largest_of(c[s], c.size())});
  found.bands = {{"coefficient of each output (column) in what each sublayer reads (row)",
                  HeatScale::signs,
                  {{"coefficients", "by sublayer; column 0: the embeddings; last row: the " + last, c}},
                  "output, from 0",
                  true},
                 {"the same by layer (row) and the layers' outputs (column)",
                  HeatScale::signs,
                  {{"layers", "column 0: the embeddings; last row: the " + last, folded_to_layers(c)}},
                  "output, from 0",
                  true}};
  found.notes = "columns of \"of\": 0 the embeddings, 2l+1 and 2l+2 attention and MLP of layer l;\n";
  found.notes += in.config.arch == "hyper" ? "a plain residual stream, as at the start of training, has 1 everywhere\n"
                 : gated                   ? "a plain residual stream has one number in all of a row\n"
                                           : "a plain residual stream has one number in all of a row; at the start\n"
                                             "of training 1, but for the last row, whose weights need not sum to 1\n";
  return found;
}

}  // namespace

std::vector<RoutingKind> routing_of_streams() {
  return {
      {"hyper", true, look_hyper,
       "hyper: c[s,t], the coefficient of output t in what sublayer s reads before its norm: the mixing matrices of "
       "all streams unrolled for every token exactly, then the mean over tokens, with sign. Rows: 2l is layer l's "
       "attention, 2l+1 its MLP, the last one the final norm, which reads the mean of the streams here, as a norm sees "
       "no factor. Columns: 0 is the embeddings, 2l+1 and 2l+2 what they put out. By layer: means over its two readers "
       "and the two outputs of another one; but for column l+1 of layer l, one number: its MLP reading its own "
       "attention. A plain residual stream has 1 everywhere up to the diagonal. In the picture each row is divided by "
       "its largest magnitude, as the norm that each reader has sees no factor of a row; the numbers of the files are "
       "not.",
       "Hyper-Connections (arXiv 2409.19606): the paper's own picture is not at hand, so nothing is claimed of it."},
      {"mhc", true, look_hyper,
       "mhc: c[s,t], the coefficient of output t in what sublayer s reads before its norm: the mixing matrices of all "
       "streams unrolled for every token exactly, then the mean over tokens. Rows: 2l is layer l's attention, 2l+1 its "
       "MLP, the last one the final norm. Columns: 0 is the embeddings, 2l+1 and 2l+2 what they put out. By layer: "
       "means over its two readers and the two outputs of another one. Where all streams are equal and read by weights "
       "that sum to 1, as nearly at the start, there is 1 everywhere up to the diagonal, but for the last row where "
       "the last read has weights of its own, which need not sum to 1. In the picture each row is divided by its "
       "largest magnitude, as the norm that each reader has sees no factor of a row; the numbers of the files are not.",
       ""},
      {"gated_streams", true, look_hyper,
       "gated_streams: c[s,t], the coefficient of output t in what sublayer s reads: for every token the factor by "
       "which each stream took t in, times the mean over channels of gate, gain and what the stream's norm divides by, "
       "over the number of streams; then the mean over tokens. Rows: 2l is layer l's attention, 2l+1 its MLP, the last "
       "one the head. Columns: 0 is the embeddings, 2l+1 and 2l+2 what they put out. By layer: means over its two "
       "readers and the two outputs of another one. What a gate does to one channel and not to another is not in these "
       "means. In the picture each row is divided by its largest magnitude; the numbers of the files are not.",
       ""}};
}

}  // namespace crossply
