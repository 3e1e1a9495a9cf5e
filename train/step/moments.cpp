#include "train/step/moments.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/io/safetensors.h"
#include "models/disk/model_dir.h"

namespace crossply {
namespace {

using nlohmann::json;

const std::string whole_name = "optimizer.safetensors", index_name = "optimizer.index.json";

std::string file_of(int rank, int size) {
  char name[64];
  std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", rank, size);
  return size == 1 ? whole_name : name;
}

std::string range_text(int64_t begin, int64_t end) { return str("[", begin, ":", end, "]"); }

json index_of(const ParameterTable& params, const Buckets& buckets, const MuonMatrices& muon) {
  json parameters = json::object(), row_moments = json::object();
  for (const Parameter& row : params.rows()) {
    json& parts = parameters[row.name] = json::array();
    for (int rank = 0; rank < buckets.size(); ++rank)
      for (const OwnPart& part : buckets.parts_of(row, rank))
        parts.push_back({file_of(rank, buckets.size()), part.begin, part.end});
  }
  for (size_t i = 0; muon.normalizes_rows() && i < muon.matrices().size(); ++i)
    row_moments[muon.matrices()[i]->name] = {
        {file_of(muon.owners()[i], buckets.size()), 0, muon.matrices()[i]->shape[0]}};
  return {{"parameters", parameters}, {"row_moments", row_moments}};
}

// Elements [begin, end) of a row, and the file that has them.
struct Piece {
  std::string file;
  int64_t begin, end;
};

// What an index says of one row, by their places; must be all its `size` elements.
std::vector<Piece> pieces_of(const json& parts, const std::string& row, int64_t size, const std::string& path) {
  std::vector<Piece> pieces;
  for (const json& part : parts) {
    const bool fits = part.is_array() && part.size() == 3 && part[0].is_string() && holds<int64_t>(part[1], 0) &&
                      holds<int64_t>(part[2], 0) && part[0].get<std::string>().find('/') == std::string::npos;
    if (!fits)
      fail(Exit::bad_data, path, ": ", excerpt(json_text(part)), " of \"", row, "\" is not [file, begin, end]");
    pieces.push_back({part[0].get<std::string>(), part[1].get<int64_t>(), part[2].get<int64_t>()});
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  int64_t end = 0;
  std::string last = "none";
  const auto check = [&](int64_t begin, const std::string& file) {
    if (begin != end)
      fail(Exit::bad_data, path, ": elements ", range_text(std::min(begin, end), std::max(begin, end)), " of \"", row,
           "\" are in ", begin > end ? "no file" : "two files", ", between ", excerpt(last), " and ", excerpt(file),
           "; resume from another checkpoint");
  };
  for (const Piece& piece : pieces) {
    check(piece.begin, piece.file);
    if (piece.end <= piece.begin || piece.end > size)
      fail(Exit::bad_data, path, ": ", excerpt(piece.file), " cannot have elements ",
           range_text(piece.begin, piece.end), " of \"", row, "\", which has ", size);
    end = piece.end, last = piece.file;
  }
  check(size, "the end");
  return pieces;
}

// Calls visit(prefix, row, shape, part, tensor) for each moment of this rank: m. and v. of a row's elements in `part`,
// whose shape is the row's, or v. of the rows of one of NorMuon's matrices, of which one rank has all.
template <class F>
void each_moment(const ParameterTable& params, const Buckets& buckets, const Optimizer& optimizer, F&& visit) {
  for (const std::string prefix : {"m.", "v."})
    for (const Parameter& row : params.rows()) {
      const bool second = prefix == "v.";
      if (second && row.muon) {
        const Tensor moments = optimizer.muon().row_moments(row);
        if (moments.data != nullptr) visit(prefix, row, moments.shape, OwnPart{0, moments.numel(), 0}, moments);
        continue;
      }
      for (const OwnPart& part : buckets.parts_of(row, buckets.rank())) {
        const Range own{part.own, part.own + part.end - part.begin};
        visit(prefix, row, row.shape, part, second ? optimizer.v(own) : part_of(optimizer.m(), own));
      }
    }
}

// Moments on disk, as many files as there are.
class MomentFiles {
 public:
  // of_rows: as NorMuon has, second moments of the rows of its matrices.
  MomentFiles(const std::string& dir, const ParameterTable& params, bool of_rows)
      : dir_(dir + "/"), index_path_(dir_ + index_name), indexed_(path_exists(index_path_)) {
    if (indexed_) read_index(params, of_rows);
    else open_whole(params, of_rows);
  }

  // Elements [begin, end) of the row's m. or v., from whatever has them. whole: its shape in a file of one rank.
  void read(const std::string& prefix, const Parameter& row, const Shape& whole, int64_t begin, int64_t end,
            float* out) {
    for (const Piece& piece : pieces_[prefix == "v." && row.muon ? prefix + row.name : row.name]) {
      const int64_t from = std::max(begin, piece.begin), to = std::min(end, piece.end);
      if (from >= to) continue;
      const SafetensorsFile& file = open(piece, row);
      const TensorInfo& info = find(file, prefix, piece, row, whole);
      file.read_f32(info, from - piece.begin, to - from, out + (from - begin));
    }
  }

 private:
  void read_index(const ParameterTable& params, bool of_rows) {
    const json index = read_json(index_path_), parameters = index.value("parameters", json()),
               row_moments = index.value("row_moments", json::object());
    if (!parameters.is_object()) fail(Exit::bad_data, index_path_, ": \"parameters\" is missing");
    if (!row_moments.is_object()) fail(Exit::bad_data, index_path_, ": \"row_moments\" is not an object");
    for (const Parameter& row : params.rows()) {
      pieces_[row.name] =
          pieces_of(parameters.value(row.name, json::array()), row.name, row.shape.numel(), index_path_);
      if (of_rows && row.muon)
        pieces_["v." + row.name] =
            pieces_of(row_moments.value(row.name, json::array()), row.name, row.shape[0], index_path_);
    }
    for (const auto& [name, parts] : parameters.items())
      if (!pieces_.contains(name))
        fail(Exit::bad_data, index_path_, ": \"", excerpt(name), "\" is not part of the model");
  }

  void open_whole(const ParameterTable& params, bool of_rows) {
    const SafetensorsFile& file = files_.emplace(whole_name, dir_ + whole_name).first->second;
    size_t tensors = 0;
    for (const Parameter& row : params.rows()) {
      tensors += !row.muon || of_rows ? 2 : 1;
      pieces_[row.name] = {{whole_name, 0, row.shape.numel()}};
      if (of_rows && row.muon) pieces_["v." + row.name] = {{whole_name, 0, row.shape[0]}};
    }
    if (file.tensors().size() != tensors)
      fail(Exit::bad_data, file.path(), ": ", file.tensors().size(), " tensors, expected ", tensors);
  }

  const SafetensorsFile& open(const Piece& piece, const Parameter& row) {
    const auto known = files_.find(piece.file);
    if (known != files_.end()) return known->second;
    const std::string path = dir_ + piece.file;
    if (!path_exists(path))
      fail(Exit::bad_data, path, " is missing; it has elements ", range_text(piece.begin, piece.end), " of \"",
           row.name, "\"; resume from another checkpoint");
    return files_.emplace(piece.file, path).first->second;
  }

  const TensorInfo& find(const SafetensorsFile& file, const std::string& prefix, const Piece& piece,
                         const Parameter& row, const Shape& whole) const {
    const std::string name = prefix + row.name + (indexed_ ? range_text(piece.begin, piece.end) : "");
    const TensorInfo* info = file.find(name);
    if (info == nullptr) fail(Exit::bad_data, file.path(), ": tensor \"", name, "\" is missing");
    const Shape shape = indexed_ ? Shape{piece.end - piece.begin} : whole;
    if (info->shape != sizes_of(shape))
      fail(Exit::bad_data, file.path(), ": ", info->str(), " does not fit the configuration, which makes it ",
           shape.str());
    return *info;
  }

  std::string dir_, index_path_;
  bool indexed_;                                      // by several ranks
  std::map<std::string, std::vector<Piece>> pieces_;  // of every row; "v." and its name: of NorMuon's
  std::map<std::string, SafetensorsFile> files_;      // opened so far
};

}  // namespace

std::string save_moments(const CheckpointWriter& writer, const ParameterTable& params, const Buckets& buckets,
                         const Optimizer& optimizer) {
  std::vector<NamedTensor> tensors;
  const bool whole = buckets.size() == 1;
  each_moment(
      params, buckets, optimizer,
      [&](const std::string& prefix, const Parameter& row, const Shape& shape, const OwnPart& part, Tensor tensor) {
        if (whole) tensor.shape = shape;
        const std::string range = whole ? "" : range_text(part.begin, part.end);
        tensors.push_back({prefix + row.name + range, tensor.shape, {tensor}});
      });
  const std::string name = file_of(buckets.rank(), buckets.size());
  save_tensors(writer.path(name), params, tensors);
  if (buckets.size() > 1 && buckets.rank() == 0)
    write_file_atomically(writer.path(index_name), json_text(index_of(params, buckets, optimizer.muon())) + "\n");
  return name;
}

void load_moments(const std::string& dir, const ParameterTable& params, const Buckets& buckets, Optimizer& optimizer) {
  MomentFiles files(dir, params, optimizer.muon().normalizes_rows());
  std::vector<float> host;
  each_moment(params, buckets, optimizer,
              [&](const std::string& prefix, const Parameter& row, const Shape& shape, const OwnPart& part,
                  const Tensor& tensor) {
                host.resize(static_cast<size_t>(tensor.numel()));
                files.read(prefix, row, shape, part.begin, part.end, host.data());
                params.device().copy_in(tensor.data, host.data(), host.size() * sizeof(float));
              });
}

}  // namespace crossply
