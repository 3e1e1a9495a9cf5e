// Parameters are rows of one table: name, shape, how they start, what they are for, how they learn.
// The table alone answers "how many?"; allocate() gives it flat memory for the values and the gradients.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/device.h"
#include "engine/tensor.h"

namespace crossply {

// What the gradient norm is summed from (kernels/optim/gradient_norm.h).
constexpr int64_t leaf = 4096;

// How a parameter starts: element i is at(seed, stream, i), so initialisation has no order.
struct Init {
  std::string rule;  // for the printed table: "normal(0.02)", "0.5 x normal(0.02)"
  std::function<double(uint64_t seed, uint64_t stream, int64_t i)> at;

  static Init constant(double value);
  static Init normal(double std);
  static Init uniform(double bound);  // in (-bound, bound)
  Init times(double factor) const;
};

// What a row is for. Every row says it once, where it is declared.
enum class Role {
  embedding,          // one vector for each token or position. It does not decay
  head,               // makes logits. It decays
  input_projection,   // of a block, reads the width: q, k, v, gate, up. It decays and is a matrix
  output_projection,  // of a block, writes the width: o, down. It decays and is a matrix
  norm,               // gain of a norm. It does not decay
  final_norm,         // gain and bias of the norm in front of the head. They do not decay
  bias,               // does not decay
  width_router,       // reads the width: computes gates or mixing weights from activations
  source_router,      // weighs streams, layers or other sources; its size does not depend on the width
  scalar,             // a number, or some, that are none of the above
  table,              // any other vectors that are looked up
};

// How a row learns, beyond what its role says.
struct Learning {
  double lr_mul = 1;                  // times the base learning rate
  std::optional<double> wd_mul = {};  // times the weight decay. A role that says nothing of decay needs it
  bool matrix = false;                // for a map between widths; projections of a block are matrices without it
};

struct Parameter {
  std::string name;  // Hugging Face's name where there is one
  Shape shape;
  Init init;
  Role role = Role::scalar;
  double lr_mul = 1;            // times the base learning rate; 0: never trained
  double wd_mul = 1;            // times the weight decay
  bool between_widths = false;  // a projection of a block, or declared a matrix
  bool bf16_only = false;       // a bf16 tape reads nothing but bf16_copy; set by Tape::mark_bf16_only()
  bool muon = false;            // a matrix that Muon updates in this run; set before lay_out()
  double eps_mul = 1;           // times AdamW's epsilon
  double norm_mul = 1;          // times its gradient, in the norm that is clipped; set before lay_out()
  int64_t offset = 0;  // first element in the flat arrays; set by lay_out(), and by allocate() with value and grad
  Tensor value = {}, grad = {};
  Tensor bf16_copy = {};  // bf16 copy of the value, for the matrix products of bf16 tapes; set by allocate_bf16_copy()

  bool router() const { return role == Role::width_router || role == Role::source_router; }
  // Does it weigh what a connection puts together? --freeze-routers keeps what it starts with.
  bool weighs() const { return router() || role == Role::scalar; }
  // --router-lr sets the learning rate of routers that have a multiplier. The others learn at --lr or are frozen.
  bool follows_router_lr() const { return router() && lr_mul != 1 && lr_mul != 0; }
  // Is it Muon's, whose updates are orthogonal matrices? With a single row or column it is not: every update would have
  // the same norm.
  bool matrix() const { return between_widths && shape.rank == 2 && shape[0] > 1 && shape[1] > 1; }
};

class ParameterTable {
 public:
  // CHECKs that the name is new, and that either the role or `learning` says how the row decays.
  Parameter& add(const std::string& name, Shape shape, Init init, Role role, const Learning& learning = {});
  Parameter& add(Parameter row);           // as it is declared elsewhere; CHECKs that the name is new
  Parameter& at(const std::string& name);  // CHECKs that it exists; init and shape may be changed until allocate()
  void remove(const std::string& name);    // before any tape knows the rows
  bool contains(const std::string& name) const { return index_.contains(name); }

  std::deque<Parameter>& rows() { return rows_; }
  const std::deque<Parameter>& rows() const { return rows_; }
  int64_t count() const;  // number of parameters
  // How the rows lie in the flat arrays: in two regions, those that are bf16_only in the second one, each in the
  // order of the table, from multiples of 64. Muon's matrices are the end of the first and the begin of the second, so
  // that they lie together. A row with a norm_mul has leaves of its own. The second region begins at a multiple of
  // `unit` elements, all of it ends at one of `end_unit`; both are 64 by default. What lies between rows stays zero.
  // Before allocate(), which keeps the offsets that the rows get here.
  void lay_out(int64_t unit, int64_t end_unit);
  int64_t flat_size() const;        // elements of the flat arrays
  int64_t bf16_only_begin() const;  // where the second region begins
  int64_t rows_size() const;        // elements without what rounds the regions up

  // Flat, zero-filled arrays of the given dtype; gradients only when asked for. lend: the values of rows that are
  // bf16_only have no memory of their own. Between steps they are in that of the row's gradient
  // (kernels/optim/optimizer.h).
  void allocate(Device& device, Dtype dtype, bool with_gradients, bool lend = false);
  // Also a bf16 copy of all values, which refresh_bf16_copy() and the optimizer (kernels/optim/) keep up to date.
  void allocate_bf16_copy();
  // Every row by its rule; the numbers depend on (seed, name, element) only.
  void initialise(uint64_t seed);
  void zero_gradients();

  bool lends() const { return values_size_ < flat_size(); }
  // If it lends: true before gradients are written. row.value is then empty, and to read or write it is refused. false
  // when all values are in the gradients' memory again, as they are after allocate().
  void lend_values(bool lent);
  Tensor lent_values() const;  // the second region, (flat_size() - values().numel()); refused during a step
  // If it lends, only the first region.
  Tensor values() const { return Tensor{values_.data(), dtype_, Shape{values_size_}}; }
  Tensor gradients() const { return Tensor{gradients_.data(), dtype_, Shape{flat_size()}}; }
  size_t bf16_copy_bytes() const { return bf16_copy_.bytes(); }
  Tensor bf16_copy() const { return Tensor{bf16_copy_.data(), Dtype::bf16, Shape{flat_size()}}; }  // data null: none
  Device& device() const { return *device_; }
  Dtype dtype() const { return dtype_; }

  // Sets one row's values from host numbers.
  void write(const Parameter& row, const double* host);
  // A row's value or gradient, or any other tensor on the device, as host numbers. Refuses a value that is lent.
  std::vector<float> read(const Tensor& tensor) const;

  std::string report() const;

 private:
  // Calls visit(row, offset) for the rows of a region that begins at `begin`. Returns its end.
  template <class Table, class F>
  static int64_t walk(Table& table, bool bf16_only, int64_t begin, F&& visit);
  int64_t size_of_rows(bool bf16_only) const;
  void place_rows();
  std::deque<Parameter> rows_;  // a deque, because recorded tapes point at rows
  std::unordered_map<std::string, size_t> index_;
  Device* device_ = nullptr;
  Dtype dtype_ = Dtype::f32;
  int64_t unit_ = 64, end_unit_ = 64, values_size_ = 0;
  bool lent_ = false;  // the gradients have the lent memory now
  Arena values_, gradients_, bf16_copy_;
};

}  // namespace crossply
