// A tiny model that `analyze --what routing` looks at.
#pragma once

#include "eval/inside/routing/routing.h"
#include "models/registry.h"
#include "tests/support/inside.h"

namespace crossply::test {

// A tiny model with windows to look at, of which so many tokens count.
class Routed {
 public:
  explicit Routed(const Config& config, std::vector<int64_t> lengths = {1})
      : model(config), weights_only_(!find_routings(config).reads_data()) {
    for (size_t i = 0; i < lengths.size() && !weights_only_; ++i) {
      const auto from = model.tokens.begin() + static_cast<std::ptrdiff_t>(i) * TinyModel::T;
      windows.push_back({{from, from + TinyModel::T}, {}, lengths[i]});
    }
  }
  // As training starts; plain: as an --init of the plain backbone does.
  void start(bool plain) {
    if (plain) find_architecture(model.config.arch).make(model.config)->start_as_plain(model.params, model.config);
    model.params.initialise(1);
  }
  RoutingFound look(const DocumentMark& documents = {}) {
    const int64_t T = weights_only_ ? routing_tokens : TinyModel::T;
    Probe probe(*model.device, model.params, model.config, 1, T, "tiny", documents);
    return find_routings(model.config).look(input(probe));
  }
  RoutingInput input(Probe& probe) { return {probe, model.params, model.config, "tiny", windows}; }
  // What the model makes of the first window.
  void run() {
    values.emplace(*model.device, model.params, model.config, 1, TinyModel::T, "tiny");
    for (const std::string& name : values->names()) values->keep(name);
    values->run(model.tokens.data());
  }
  double at(const std::string& name, int64_t i) { return values->at(name)[static_cast<size_t>(i)]; }
  int64_t layers() const { return applications_of(model.config).count(); }

  TinyModel model;
  std::optional<Probe> values;
  std::vector<TokenWindow> windows;

 private:
  bool weights_only_;
};

inline const RoutingRows& map_of(const RoutingFound& found, const std::string& name) {
  for (const RoutingBand& band : found.bands)
    for (const RoutingMap& map : band.maps)
      if (map.name == name) return map.rows;
  FAIL("no map " << name);
  return found.bands[0].maps[0].rows;
}
inline const std::vector<double>& curve_of(const RoutingFound& found, const std::string& name) {
  for (const RoutingCurve& curve : found.curves)
    if (curve.name == name) return curve.y;
  FAIL("no curve " << name);
  return found.curves[0].y;
}
inline double fact_of(const RoutingFound& found, const std::string& name) {
  for (const auto& [key, value] : found.facts)
    if (key == name) return value;
  FAIL("no number " << name);
  return 0;
}

}  // namespace crossply::test
