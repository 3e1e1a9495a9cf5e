// Scatter plots as a self-contained SVG file: points in classes, in panels beside each other, in rows.
#pragma once

#include <string>
#include <vector>

#include "eval/inside/tsne.h"

namespace crossply {

struct ScatterPanel {
  std::string caption;
  std::vector<std::vector<PlanePoint>> classes;
};
struct ScatterRow {
  std::string caption;
  std::vector<ScatterPanel> panels;  // of more than six, the next six stand below
};

// Every panel has a scale of its own, the same in both directions, and no axes: for points of which only the
// neighbourhoods mean something. Up to 12 classes look different, in colour and in mark. Text may be any bytes.
std::string scatter_svg(const std::string& title, const std::vector<std::string>& classes,
                        const std::vector<ScatterRow>& rows);

}  // namespace crossply
