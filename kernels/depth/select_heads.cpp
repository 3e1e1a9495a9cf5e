#include "kernels/depth/select_heads.h"

#include <cstring>
#include <limits>

#include "engine/node.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vec.h"
#include "kernels/depth/ops.h"
#include "kernels/dispatch.h"

namespace crossply {
namespace {

constexpr int64_t grain = 32768;

// Heads are too short for calls of memcpy and memset: whole lines, then the last one again, ending where the head does.
template <class F>
void for_lines(int64_t bytes, F&& line) {
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) line(at);
  if (at < bytes) line(bytes - 64);
}

template <class S>
void copy_head(S* to, const S* from, int64_t D) {
  const int64_t bytes = D * static_cast<int64_t>(sizeof(S));
  char* target = reinterpret_cast<char*>(to);
  const char* source = reinterpret_cast<const char*>(from);
  if (bytes < 64) std::copy_n(from, D, to);
  else for_lines(bytes, [=](int64_t at) { std::memcpy(target + at, source + at, 64); });
}

template <class S>
void clear_head(S* to, int64_t D) {
  const int64_t bytes = D * static_cast<int64_t>(sizeof(S));
  char* target = reinterpret_cast<char*>(to);
  if (bytes < 64) std::fill_n(to, D, S(0.f));
  else for_lines(bytes, [=](int64_t at) { std::memset(target + at, 0, 64); });
}

template <class S>
void select_heads_forward_cpu(S* out, const std::vector<const S*>& sources, const std::vector<HeadChoice>& choice,
                              int64_t N, int64_t K, int64_t D) {
  const int64_t J = static_cast<int64_t>(choice.size());
  parallel_for(N, grain / (J * D), [=, &sources, &choice](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      S* y = out + n * J * D;
      for (const HeadChoice& c : choice) {
        copy_head(y, sources[static_cast<size_t>(c.source)] + (n * K + c.head) * D, D);
        y += D;
      }
    }
  });
}

// Columns [begin, end) of one head: dx = (accumulate ? dx : 0) + the sum of the `count` heads js of dy, rounded once.
template <class Vec, class S>
void gather_columns(S* dx, const S* dy, const int64_t* js, int64_t count, int64_t D, int64_t begin, int64_t end,
                    bool accumulate) {
  for (int64_t d = begin; d < end; d += lanes_of<Vec>) {
    Vec sum = {}, term;
    int64_t i = 0;
    if (accumulate) load(sum, dx + d);
    else if (count > 0) load(sum, dy + js[i++] * D + d);
    for (; i < count; ++i) {
      load(term, dy + js[i] * D + d);
      sum += term;
    }
    store(dx + d, sum);
  }
}

template <class S>
void select_heads_backward_cpu(S* dsource, const S* dout, const std::vector<HeadChoice>& choice, int source, int64_t N,
                               int64_t K, int64_t D, bool accumulate) {
  // So that each element is written while it is in cache.
  static thread_local std::vector<int64_t> first, reader;
  const int64_t J = static_cast<int64_t>(choice.size());
  first.resize(static_cast<size_t>(K) + 1), reader.resize(choice.size());
  find_readers(first.data(), reader.data(), choice, source, K);
  parallel_for(N, grain / (K * D), [=, first = first.data(), reader = reader.data()](int64_t begin, int64_t end) {
    const int64_t whole = D / lanes_of<Vec16> * lanes_of<Vec16>;
    for (int64_t n = begin; n < end; ++n) {
      S* dx = dsource + n * K * D;
      const S* dy = dout + n * J * D;
      for (int64_t k = 0; k < K; ++k, dx += D) {
        const int64_t* js = reader + first[k];
        const int64_t count = first[k + 1] - first[k];
        if (!accumulate && count == 0) {
          clear_head(dx, D);
        } else if (!accumulate && count == 1) {
          copy_head(dx, dy + js[0] * D, D);
        } else if (count > 0) {
          gather_columns<Vec16>(dx, dy, js, count, D, 0, whole, accumulate);
          gather_columns<float>(dx, dy, js, count, D, whole, D, accumulate);
        }
      }
    }
  });
}

// wide (B,T,J,D) is out or its gradient, source (B,T,K,D) one of `sources` or its gradient.
void check_choice(const Tensor& wide, const Tensor& source, const std::vector<HeadChoice>& choice, int sources) {
  const Shape &w = wide.shape, &s = source.shape;
  CHECK_SHAPES(w.rank == 4 && s.rank == 4 && w[0] == s[0] && w[1] == s[1] && w[3] == s[3] && w[3] >= 1 && s[2] >= 1,
               wide, source);
  CHECK_THAT(!choice.empty() && w[2] == static_cast<int64_t>(choice.size()), choice.size(), " heads of ", wide.str());
  for (const HeadChoice& c : choice)
    CHECK_THAT(c.source >= 0 && c.source < sources && c.head >= 0 && c.head < s[2], "head ", c.head, " of source ",
               c.source, " for ", sources, " sources ", source.str());
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------------
// Entry points.

void select_heads_forward(const Tensor& out, const std::vector<Tensor>& sources, const std::vector<HeadChoice>& choice,
                          Stream stream) {
  CHECK_THAT(!sources.empty(), "no sources for ", out.str());
  check_choice(out, sources[0], choice, static_cast<int>(sources.size()));
  for (const Tensor& source : sources) CHECK_SHAPES(source.shape == sources[0].shape, source, sources[0]);
  const int64_t N = out.dim(0) * out.dim(1), K = sources[0].dim(2), D = out.dim(3);
  dispatch(
      stream, out.dtype, [&] { select_heads_forward_cuda(out, sources, choice, K, D); },
      [&]<class S>(S) { select_heads_forward_cpu(out.as<S>(), data_of<const S>(sources), choice, N, K, D); },
      [&]<class T>(T) { select_heads_forward_ref(out.as<T>(), data_of<const T>(sources), choice, N, K, D); });
}

void select_heads_backward(const Grad& dsource, const Tensor& dout, const std::vector<HeadChoice>& choice, int source,
                           Stream stream) {
  check_choice(dout, dsource, choice, std::numeric_limits<int>::max());
  const int64_t N = dout.dim(0) * dout.dim(1), K = dsource.dim(2), D = dout.dim(3);
  dispatch(
      stream, dout.dtype, [&] { select_heads_backward_cuda(dsource, dout, choice, source, K, D); },
      [&]<class S>(S) {
        select_heads_backward_cpu(dsource.as<S>(), dout.as<S>(), choice, source, N, K, D, dsource.accumulate);
      },
      [&]<class T>(T) {
        select_heads_backward_ref(dsource.as<T>(), dout.as<T>(), choice, source, N, K, D, dsource.accumulate);
      });
}

// -----------------------------------------------------------------------------------------------------------------
// On the tape.

namespace ops {
namespace {

struct SelectHeads : Node {
  std::vector<HeadChoice> choice;
  std::vector<Tensor> sources;
  const char* op() const override { return "select_heads"; }
  void prepare() override { sources = tensors_of(in); }
  void forward(const Step&, Stream stream) override { select_heads_forward(output(), sources, choice, stream); }
  void backward(const Step&, Stream stream) override {
    for (size_t s = 0; s < in.size(); ++s)
      select_heads_backward(gradient(s), doutput(), choice, static_cast<int>(s), stream);
  }
};

}  // namespace

Value* select_heads(Tape& t, const std::string& name, const std::vector<Value*>& sources,
                    const std::vector<Head>& choice) {
  const Shape& s = sources.at(0)->shape;
  for (const Head& head : choice)
    CHECK_THAT(head.source < static_cast<int>(sources.size()) && head.head < s[2], name, ": head ", head.head,
               " of source ", head.source);
  const Shape shape{s[0], s[1], static_cast<int64_t>(choice.size()), s[3]};
  auto node = make_node<SelectHeads>(name, sources, {t.activation(name, shape)});
  node->choice = choice;
  return t.record(std::move(node));
}

}  // namespace ops
}  // namespace crossply
