// analyze --what routing: what the connections across depth do in a trained model. Every architecture has measures of
// its own, one function for each; what they find is told in one way (routing.cpp).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "eval/inside/heat_map.h"
#include "eval/inside/probe.h"
#include "eval/inside/windows.h"

namespace crossply {

using RoutingRows = std::vector<std::vector<double>>;

// From row r and column c, both from 0: how much the r-th reader takes of the c-th source. NaN: it cannot read it.
struct RoutingMap {
  std::string name, caption;  // in files, and in the picture
  RoutingRows rows;
};
// Maps with one scale.
struct RoutingBand {
  std::string caption;
  HeatScale scale;
  std::vector<RoutingMap> maps;
  std::string column = "source, from 0";  // what a column is
  bool by_row = false;                    // in the picture each row is divided by its largest magnitude
};
// One number for each layer, or for each stream, from 0; NaN: none.
struct RoutingCurve {
  std::string name;   // in files
  std::string panel;  // what it is; those of all models stand in one panel
  std::vector<double> y;
  std::vector<double> low = {}, high = {};  // around y, or nothing
  bool reference = false;                   // not of this model: of the plain backbone
  bool shares = false;                      // of a whole, for an axis in percent
};

struct RoutingFound {
  std::vector<RoutingBand> bands;
  std::vector<RoutingCurve> curves;
  std::vector<std::pair<std::string, double>> facts = {};  // in files
  std::vector<std::vector<std::string>> table = {};        // of at most 80 columns
  std::string notes = "";                                  // lines below it
};

// A model to look at.
struct RoutingInput {
  Probe& probe;  // of one sequence as long as the windows; without windows, of routing_tokens
  ParameterTable& params;
  const Config& config;
  std::string name;
  const std::vector<TokenWindow>& windows;
  std::function<void(int64_t done)> tell = [](int64_t) {};

  int layers() const { return static_cast<int>(applications_of(config).count()); }
  // A parameter's numbers.
  std::vector<double> parameter(const std::string& name) const;
  // Runs a few tokens of the vocabulary, for what is the same for all.
  void run_any(const std::vector<std::string>& names) const;
  // Runs all windows, and calls see(n) after each, where the first n tokens count.
  void run_all(const std::vector<std::string>& names, const std::function<void(int64_t n)>& see) const;
};
constexpr int64_t routing_tokens = 4;

struct RoutingKind {
  std::string arch;
  bool reads_data;  // else the weights say it all
  RoutingFound (*look)(const RoutingInput& in);
  const char *measured, *paper;  // captions
  bool fixed = false;            // training changes nothing of it
};
std::vector<RoutingKind> routing_of_lime();
std::vector<RoutingKind> routing_of_lime_v1();
std::vector<RoutingKind> routing_of_vertical();
std::vector<RoutingKind> routing_of_streams();
std::vector<RoutingKind> routing_of_mixtures();
std::vector<RoutingKind> routing_of_values();
std::vector<RoutingKind> routing_of_attnres();
std::vector<RoutingKind> routing_of_depth_attention();
std::vector<RoutingKind> routing_of_moda();

// Null where an architecture's layers read the one below alone.
const RoutingKind* find_routing(const std::string& arch);

// Of a combination each part's, with that part's options.
struct RoutingPart {
  const RoutingKind* kind;
  Config config;
};
struct Routings {
  std::vector<RoutingPart> parts;

  bool reads_data() const;
  bool fixed() const;
  std::string texts(const char* RoutingKind::*caption) const;
  // Where several parts have maps, the part stands in front of their names.
  RoutingFound look(const RoutingInput& in) const;
};
// None also where something changes the streams between sublayers, which are no sums of outputs then.
Routings find_routings(const Config& config);

// Adds to the facts what the maps of the first band say in one number each. Rows are taken as shares of magnitudes:
//   entropy.MAP        -sum a ln a in nats, the mean over rows
//   newest_share.MAP   of the diagonal, what a reader's own layer or the one below has made; rows with several sources
//   first_share.MAP    the same of column 0
// Without maps, mean.CURVE: of each curve.
void add_summary(RoutingFound& found);

// The weights W_l (K, (l+1)*K) with which layer l of a lime mixes the heads of all layers so far, whatever its routing.
std::vector<double> lime_weights(const RoutingInput& in, int l);

// rows x columns of NaN.
RoutingRows routing_rows(size_t rows, size_t columns);
// "0.41 of 3": the largest number of a row, or the smallest, and where it stands, but for one column; "-" without any.
std::string largest_of(const std::vector<double>& row, size_t but);
std::string smallest_of(const std::vector<double>& row, size_t but);
std::string strongest_of(const std::vector<double>& row);  // the largest magnitude
// -sum a ln a of a mixture's weights, in nats; NaN counts as 0.
double map_entropy(const std::vector<double>& row);
// "0.412", or "-" for NaN.
std::string routing_number(double x);

}  // namespace crossply
