// Attention residuals: no residual stream; every sublayer reads a softmax mixture of what came before it.
// train/train_attnres.cpp explains them; kernels/depth/query_mix.h is the mixture.
#include <optional>

#include "models/registry.h"

namespace crossply {
namespace {

class AttentionResiduals : public Connection {
 public:
  explicit AttentionResiduals(const Config& config) : block_(config.integer("attn_res_block_size")) {
    if (block_ < 0)
      fail(Exit::usage, "attnres: attn_res_block_size ", block_, " must be 0 (every sublayer) or a number of layers");
  }

  void declare(ParameterTable& params, const Config& config) const override {
    for (int i = 0; i < config.num_hidden_layers; ++i)
      for (const bool mlp : {false, true}) add_pair(params, rows({i, mlp}), config);
    add_pair(params, output_rows, config);
  }

  std::string start_as_plain(ParameterTable&, const Config&) const override {
    fail(Exit::usage,
         "attnres computes the plain backbone where its queries are 0, as they start, but for the eps of the norms and "
         "the rounding of means, not bit for bit; train it from scratch");
  }

  std::string remark(const Config& config) const override {
    if (block_ < config.num_hidden_layers) return "";
    return str("note: blocks of ", block_, " layers make one block of these ", config.num_hidden_layers,
               ", and all there is to choose from is the embedding and one sum; a smaller attn_res_block_size gives "
               "more, 0 every sublayer");
  }

  void begin(const Build& build, Value* embeddings) override {
    build_ = &build;
    history_.emplace(build.tape, build.config.norm_eps);
    open("embedding", embeddings);
  }

  Value* read(const Sublayer& sublayer) override {
    Value* mixed = mixture(sublayer.name() + ".read", rows(sublayer));
    if (!sublayer.mlp) build_->mark("mixed", sublayer.layer, mixed);
    if (block_ == 0 || (!sublayer.mlp && sublayer.layer % block_ == 0)) close();
    return norm(sublayer, mixed);
  }

  void write(const Sublayer& sublayer, Value* y) override {
    open(sublayer.name() + ".source", x_ == nullptr ? y : ops::add(build_->tape, sublayer.name() + ".sum", x_, y));
    out_ = x_;
  }

  Value* finish() override { return mixture("output", output_rows); }
  bool has_stream() const override { return false; }
  // There is no stream: what the block has put out, or the sum of what those of its group have.
  Value* hidden() override { return out_; }

 private:
  static constexpr const char* output_rows = "model.output_attn_res";

  static std::string rows(const Sublayer& sublayer) {
    return layer_name(sublayer.layer, sublayer.mlp ? "mlp_res" : "self_attention_res");
  }
  static void add_pair(ParameterTable& params, const std::string& rows, const Config& config) {
    params.add(rows + "_proj.weight", Shape{1, config.hidden_size}, Init::constant(0), Role::width_router,
               {.wd_mul = 0});
    params.add(rows + "_norm.weight", Shape{config.hidden_size}, Init::constant(1), Role::norm);
  }

  // x is the sum within the present group of sublayers, a source as it is now; it takes the place of the last one.
  void open(const std::string& name, Value* x) {
    x_ = history_->add(name, x), ++last_;
    build_->mark("source", last_, x_);
  }
  // The group ends: its sum stays a source, and the next output begins another one.
  void close() {
    finished_.push_back(last_);
    x_ = nullptr;
  }
  Value* mixture(const std::string& name, const std::string& rows) {
    std::vector<int> sources = finished_;
    sources.push_back(last_);
    return history_->mix(name, sources, build_->parameter(rows + "_proj.weight"),
                         build_->parameter(rows + "_norm.weight"));
  }

  int64_t block_;              // layers of a group; 0: every sublayer is one
  std::vector<int> finished_;  // the sources that no longer change
  int last_ = -1;              // the latest source
  Value* out_ = nullptr;       // of the last sublayer
  std::optional<ops::QueryHistory> history_;
};

}  // namespace

Architecture attnres_architecture() {
  return {"attnres",
          "a sublayer attends over depth to what came before it",
          {{"attn_res_block_size",
            "4",
            "an integer: the layers whose outputs, of attention and feed-forward, are summed into one source; in the "
            "last one there may be fewer. 0: every output is a source, which is the full form",
            {}}},
          [](const Config& config) { return std::make_unique<AttentionResiduals>(config); }};
}

}  // namespace crossply
