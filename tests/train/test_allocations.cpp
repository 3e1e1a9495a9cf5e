// What a step allocates: its memory, and the lists that its nodes go through, are there before the first.
#include <atomic>
#include <cstdlib>
#include <new>

#include "data/loader.h"
#include "models/batch/batch_model.h"
#include "tests/support/cases.h"

namespace {

std::atomic<int64_t> allocations{0};  // of this program, by new

void* allocate(size_t bytes, size_t alignment) {
  ++allocations;
  void* data = nullptr;
  if (::posix_memalign(&data, std::max(alignment, sizeof(void*)), std::max<size_t>(bytes, 1)) != 0)
    throw std::bad_alloc();
  return data;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
// Not inlined, or a compiler sees free() meet new.
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }

using namespace crossply;
using namespace crossply::test;

namespace {

class Random5 : public Source {  // sequences of five tokens
 public:
  int64_t size() const override { return 6; }
  int64_t seq_len() const override { return 5; }
  int64_t vocab_size() const override { return 7; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    for (int64_t t = 0; t < 5; ++t) tokens[t] = static_cast<int32_t>((index * t) % 7), targets[t] = (tokens[t] + 1) % 7;
  }
};

}  // namespace

TEST_CASE("allocations: no node allocates in a step") {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const Case& c : cases_with_kernels()) {
      CAPTURE(c.name);
      TinyModel model(c.config, "cpu", PlanMode::reuse, dtype);
      for (int i = 0; i < 2; ++i) model.step();
      const auto& nodes = model.tape.nodes();
      std::vector<int64_t> after(2 * nodes.size());  // what the program had allocated after each node
      model.tape.watch([&](size_t n, bool backward) { after[backward ? after.size() - 1 - n : n] = allocations; });
      int64_t before = allocations;
      model.tape.run(Step{true, 1, 0});
      for (size_t time = 0; time < after.size(); before = after[time++])
        if (after[time] != before) FAIL_CHECK(nodes[std::min(time, after.size() - 1 - time)]->op());
    }
  }
}

TEST_CASE("allocations: a step allocates nothing, from the data to the update") {
  const Random5 source;
  for (const int64_t B : {1, 6}) {
    for (const Case& c : cases_with_kernels()) {
      CAPTURE(c.name);
      TinyModel tiny(c.config);
      BatchModel model(*tiny.device, tiny.params, tiny.config, {B, 5});
      CHECK((model.layout().replicas > 1) == (B > 1));
      Optimizer optimizer(tiny.params, Buckets(tiny.params), {});
      std::vector<double> squares(static_cast<size_t>(leaves_of(tiny.params.flat_size())));
      Loader loader(source, B, 1, true);
      std::vector<int32_t> tokens(static_cast<size_t>(B * 5)), targets(tokens.size());
      int64_t before = 0;
      for (int step = 1; step <= 5; ++step) {
        if (step == 3) before = allocations;
        loader.next(tokens.data(), targets.data());
        tiny.params.zero_gradients();
        model.run(tokens.data(), targets.data(), Step{true, 0.1, 0});
        leaf_squares(view(squares.data(), {std::ssize(squares)}), tiny.params.gradients(), tiny.device->stream());
        model.take_losses();
        const double all = std::accumulate(squares.begin(), squares.end(), 0.0);
        optimizer.begin_step(1e-3);
        clip_factor(optimizer.factor(), optimizer.scale(), view(&all, {1}), {}, 1, tiny.device->stream());
        optimizer.update();
      }
      const int64_t allocated = allocations - before;
      CHECK(allocated == 0);
    }
  }
}
