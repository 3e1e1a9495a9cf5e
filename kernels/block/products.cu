// Not yet run on hardware: only in the emulator.
#include "kernels/block/matmul.cuh"

#include "engine/rng.h"
#include "kernels/block/gelu.h"
#include "kernels/block/matmul.h"
#include "kernels/cuda/arithmetic.h"

#if CROSSPLY_CUDA
#include <cublasLt.h>

#include <limits>
#include <map>
#include <set>
#include <vector>
#endif

namespace crossply {
namespace {

// The largest power of two that divides the address of every matrix, up to what every allocation has.
int64_t alignment_of(const void* data, const Matrix& of) {
#if CROSSPLY_CUDA
  constexpr uint64_t most = 256;
#else
  constexpr uint64_t most = 16;
#endif
  const auto apart = static_cast<uint64_t>(of.apart) * size_of(of.dtype);
  const uint64_t address = reinterpret_cast<uintptr_t>(data) | apart | most;
  return static_cast<int64_t>(address & -address);
}

// M, N, K, batch, the addend's alignment; of c, a and b: type and transposition, stride, distance, alignment. c, which
// is never transposed, says instead whether there is a bias, and in larger numbers what gelu does, which sums are fast,
// and whether one matrix decides for all.
ProductKind kind_of(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* addend,
                    const Bias& bias, const Gelu& gelu) {
  ProductKind kind{z.M, z.N, z.K, z.batch, alignment_of(addend, c)};
  const int64_t epilogue = (bias.data != nullptr) +
                           (gelu.inp == nullptr ? 0
                            : gelu.backward     ? 32
                                                : 16) +
                           (z.fast ? 64 : 0) + (z.as_alone ? 128 : 0);
  size_t next = 5;
  for (const Matrix* m : {&c, &a, &b}) {
    const int64_t type = 2 * static_cast<int64_t>(m->dtype) + (m == &c ? epilogue : m->transposed);
    for (const int64_t part : {type, m->stride, m->apart, alignment_of(m->data, *m)}) kind.at(next++) = part;
  }
  return kind;
}

// cuBLASLt may read a bias by as many bytes at once, and no preference tells it where the bias lies. An address that
// is no multiple gives error 716, after which a process can use the GPU no more.
constexpr int64_t bias_alignment = 16;
bool is_aligned(const void* bias) { return reinterpret_cast<uintptr_t>(bias) % bias_alignment == 0; }
void check_bias(const Bias& bias, Dtype dtype) {
  CHECK_THAT(is_aligned(bias.data) && bias.apart * static_cast<int64_t>(size_of(dtype)) % bias_alignment == 0,
             "a bias that is not at a multiple of ", bias_alignment, " bytes");
}

// The first of the batch, by itself.
ProductKind kind_of_one(Matrix c, Matrix a, Matrix b, ProductSize z, const void* addend) {
  for (Matrix* m : {&c, &a, &b}) {
    CHECK_THAT(m->apart * static_cast<int64_t>(size_of(m->dtype)) % 256 == 0, "matrices that are ", m->apart, " apart");
    m->apart = 0;
  }
  z.batch = 1;
  return kind_of(c, a, b, z, addend, {}, {});
}

std::string text_of(const ProductSize& z) {
  return str(z.batch, " products of ", z.M, " x ", z.K, " by ", z.K, " x ", z.N);
}

}  // namespace

#if CROSSPLY_CUDA

namespace {

void check_cublas(cublasStatus_t status, const char* what, const ProductSize& z, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(Exit::device, __FILE__, ":", line, ": ", what, ": ", cublasLtGetStatusString(status), ", for ", text_of(z));
}
#define CHECK_CUBLAS(call, size) check_cublas((call), #call, size, __LINE__)

cublasLtHandle_t cublas() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t made;
    CHECK_CUBLAS(cublasLtCreate(&made), ProductSize{});
    return made;
  }();
  return handle;
}

cudaDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::bf16   ? CUDA_R_16BF
         : dtype == Dtype::e4m3 ? CUDA_R_8F_E4M3
         : dtype == Dtype::e5m2 ? CUDA_R_8F_E5M2
                                : CUDA_R_32F;
}

constexpr size_t workspace_bytes = matmul_workspace;

struct MatmulCall {
  Matrix c, a, b;
  ProductSize z;
  const void* addend;
  float alpha, beta;  // times the product, times the addend
  Bias bias;
  Gelu gelu;
  bool in_place() const { return beta != 0 && addend == c.data; }
  cudaDataType_t bias_type() const { return a.inverse != nullptr ? CUDA_R_16BF : type_of(c.dtype); }
};

// cuBLASLt's words for a kind of product.
struct MatmulLayouts {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t a, b, c;
};

// (rows, columns) as stored. cuBLAS is column-major, so for it this is the transpose.
cublasLtMatrixLayout_t make_layout(const Matrix& of, int64_t rows, int64_t columns, const ProductSize& z) {
  cublasLtMatrixLayout_t layout;
  const auto down = static_cast<uint64_t>(columns), across = static_cast<uint64_t>(rows);
  const auto batch = static_cast<int32_t>(z.batch);
  CHECK_CUBLAS(cublasLtMatrixLayoutCreate(&layout, type_of(of.dtype), down, across, of.stride), z);
  CHECK_CUBLAS(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch), z);
  CHECK_CUBLAS(
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &of.apart, sizeof of.apart),
      z);
  return layout;
}

// What of a product is another from call to call: where scales, bias and gelu's inp are. The bias has a number for each
// row of cuBLAS's c, so for each column of ours.
void set_pointers(cublasLtMatmulDesc_t product, const MatmulCall& p) {
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value), p.z);
  };
  if (p.a.inverse != nullptr) {
    const int8_t fast = p.z.fast ? 1 : 0;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.inverse);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.inverse);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
  }
  if (p.bias.data != nullptr) {
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.bias_type());
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
    set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, p.bias.apart);
  }
  if (p.gelu.inp != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.gelu.inp);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.c.stride);
  }
  const cublasLtEpilogue_t forward =
      p.bias.data != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  const cublasLtEpilogue_t epilogue = p.gelu.inp != nullptr    ? p.gelu.backward ? CUBLASLT_EPILOGUE_DGELU : forward
                                      : p.bias.data != nullptr ? CUBLASLT_EPILOGUE_BIAS
                                                               : CUBLASLT_EPILOGUE_DEFAULT;
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
}

// A row-major c is cuBLAS's c^T = b^T a^T: the factors change places.
MatmulLayouts make_plan(const MatmulCall& p) {
  const ProductSize& z = p.z;
  MatmulLayouts plan;
  const cublasOperation_t first = p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  CHECK_CUBLAS(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), z);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), z);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), z);
  set_pointers(plan.product, p);
  plan.a = make_layout(p.b, p.b.transposed ? z.N : z.K, p.b.transposed ? z.K : z.N, z);
  plan.b = make_layout(p.a, p.a.transposed ? z.K : z.M, p.a.transposed ? z.M : z.K, z);
  plan.c = make_layout(p.c, z.M, z.N, z);
  return plan;
}

cublasLtMatmulAlgo_t algorithm_of(const Choice& choice) {
  cublasLtMatmulAlgo_t algorithm;
  static_assert(sizeof algorithm == sizeof choice);
  std::memcpy(&algorithm, &choice, sizeof algorithm);
  return algorithm;
}

cublasStatus_t run(const MatmulLayouts& plan, const MatmulCall& p, const Choice& choice, void* to) {
  const cublasLtMatmulAlgo_t algorithm = algorithm_of(choice);
  return cublasLtMatmul(cublas(), plan.product, &p.alpha, p.b.data, plan.a, p.a.data, plan.b, &p.beta, p.addend, plan.c,
                        to, plan.c, &algorithm, scratch<std::byte>(workspace_bytes, matmul_slot), workspace_bytes,
                        cuda_stream());
}

// Whether these addresses are as the algorithm needs them, which cuBLASLt does not look at itself. An algorithm that
// does not say what it needs suits: not every one answers, and the heuristic was told the alignments.
bool suits(const cublasLtMatmulAlgo_t& algorithm, const MatmulCall& p) {
  const auto good = [&](cublasLtMatmulAlgoCapAttributes_t attribute, const void* data, const Matrix& of) {
    uint32_t min = 0;
    size_t bytes = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, &min, sizeof min, &bytes);
    return status != CUBLAS_STATUS_SUCCESS || min <= alignment_of(data, of);
  };
  return good(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES, p.b.data, p.b) &&
         good(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES, p.a.data, p.a) &&
         good(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES, p.addend, p.c) &&
         good(CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES, p.c.data, p.c);
}

// What the heuristic offers, by its guess the fastest first; perhaps nothing. With all wishes: with workspace, and told
// how the addresses are aligned; otherwise it supposes that they are multiples of 256.
std::vector<Choice> ask_heuristic(const MatmulLayouts& plan, const MatmulCall& p, bool all_wishes) {
  cublasLtMatmulPreference_t preference;
  CHECK_CUBLAS(cublasLtMatmulPreferenceCreate(&preference), p.z);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    CHECK_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), p.z);
  };
  // Not in the type of c: parts of a sum would be rounded to bf16.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         p.z.as_alone ? uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE} : uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  if (all_wishes) {
    const auto align = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void* data, const Matrix& of) {
      prefer(attribute, static_cast<uint32_t>(alignment_of(data, of)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b.data, p.b);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a.data, p.a);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.addend, p.c);
    align(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.c.data, p.c);
  }
  constexpr int most = 8;
  cublasLtMatmulHeuristicResult_t found[most];
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cublas(), plan.product, plan.a, plan.b, plan.c, plan.c,
                                                               preference, most, found, &count);
  CHECK_CUBLAS(cublasLtMatmulPreferenceDestroy(preference), p.z);
  std::vector<Choice> offers;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return offers;
  check_cublas(status, "cublasLtMatmulAlgoGetHeuristic", p.z, __LINE__);
  for (int i = 0; i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS && suits(found[i].algo, p))
      std::memcpy(&offers.emplace_back(), &found[i].algo, sizeof(Choice));
  return offers;
}

// Milliseconds that the GPU takes for some work, the mean of some in a row: events are precise to half a microsecond,
// and a small product takes five.
struct Timer {
  static constexpr int in_a_row = 4;
  cudaEvent_t begin, end;
  Timer() {
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
  }
  ~Timer() { cudaEventDestroy(begin), cudaEventDestroy(end); }
  template <class F>
  float time(F&& work) const {
    // While the GPU fills the workspace, the host gets ahead of it; otherwise launching would be timed. A fill takes
    // about as long as the host needs for one launch, so there is one for each.
    for (int i = 0; i < in_a_row; ++i)
      fill_device_memory(scratch<std::byte>(workspace_bytes, matmul_slot), 0, workspace_bytes);
    float taken = 0;
    CHECK_CUDA(cudaEventRecord(begin, cuda_stream()));
    for (int i = 0; i < in_a_row; ++i) work();
    CHECK_CUDA(cudaEventRecord(end, cuda_stream()));
    CHECK_CUDA(cudaEventSynchronize(end));
    CHECK_CUDA(cudaEventElapsedTime(&taken, begin, end));
    return taken / in_a_row;
  }
};

// Times the offers, writing to `to`: each once to load it, which takes longer and is not timed, then the least of
// two. A kind of product gets about 30 ms of the GPU, so of large ones some offers go untried.
std::vector<float> time_offers(const std::vector<Choice>& offers, const MatmulLayouts& plan, const MatmulCall& p,
                               void* to) {
  constexpr float most = 30, is_long = 0.5f;
  const Timer timer;
  std::vector<float> times;
  float spent = 0;
  for (const Choice& offer : offers) {
    float least = std::numeric_limits<float>::infinity();
    const bool runs = spent < most && run(plan, p, offer, to) == CUBLAS_STATUS_SUCCESS;
    for (int round = 0; runs && round < 2; ++round) {
      const float taken = timer.time([&] { CHECK_CUBLAS(run(plan, p, offer, to), p.z); });
      least = std::min(least, taken);
      spent += (Timer::in_a_row + (round == 0)) * taken;  // with the first run, which no event could time
      if (taken > is_long) break;                         // and so precise
    }
    times.push_back(least);
  }
  return times;
}

// The algorithm for a kind of product that has none yet: at its first product, so in the first step of a run. What the
// product adds to in place must not change, so trials then write into memory of their own; where there is too little
// of it, the heuristic decides.
Choice choose_for(const MatmulLayouts& plan, const MatmulCall& p) {
  cudaStreamCaptureStatus recording;
  CHECK_CUDA(cudaStreamIsCapturing(cuda_stream(), &recording));
  CHECK_THAT(recording == cudaStreamCaptureStatusNone, "a recording has a product of a new kind");
  const auto ask = [&](bool all_wishes) { return ask_heuristic(plan, p, all_wishes); };
  const auto time = [&](const std::vector<Choice>& offers) {
    if (!p.in_place()) return time_offers(offers, plan, p, p.c.data);
    const int64_t elements = (p.z.batch - 1) * p.c.apart + (p.z.M - 1) * p.c.stride + p.z.N;
    const std::unique_ptr<void, void (*)(void*)> to(
        allocate_device_memory(static_cast<size_t>(elements) * size_of(p.c.dtype)), release_device_memory);
    return to == nullptr ? std::vector<float>() : time_offers(offers, plan, p, to.get());
  };
  return choose(text_of(p.z), ask, time);
}

bool is_offered(const MatmulLayouts& plan, const MatmulCall& p) {
  return !ask_heuristic(plan, p, true).empty() || !ask_heuristic(plan, p, false).empty();
}

// What cuBLASLt says of an algorithm for these layouts.
struct Verdict {
  cublasStatus_t status;
  size_t workspace;
  bool good() const { return status == CUBLAS_STATUS_SUCCESS && workspace <= workspace_bytes; }
};
Verdict judge(const MatmulLayouts& plan, const Choice& choice) {
  const cublasLtMatmulAlgo_t algorithm = algorithm_of(choice);
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(cublas(), plan.product, plan.a, plan.b, plan.c, plan.c, &algorithm, &result);
  return {status, result.workspaceSize};
}

// Matrix i of a batch.
MatmulCall one_of(const MatmulCall& p, int64_t i) {
  MatmulCall one = p;
  for (Matrix* m : {&one.c, &one.a, &one.b})
    m->data = static_cast<std::byte*>(m->data) + i * m->apart * static_cast<int64_t>(size_of(m->dtype)), m->apart = 0;
  one.addend = static_cast<const std::byte*>(p.addend) + i * p.c.apart * static_cast<int64_t>(size_of(p.c.dtype));
  one.z.batch = 1;
  return one;
}

// Reads a choice that was recorded: these bytes come from a file.
void check_recorded(const MatmulLayouts& plan, const MatmulCall& p, const Choice& choice) {
  const Verdict verdict = judge(plan, choice);
  if (!verdict.good() || !suits(algorithm_of(choice), p))
    fail(Exit::bad_data, "what the checkpoint chose for ", text_of(p.z),
         " is no algorithm of this cuBLASLt: ", cublasLtGetStatusString(verdict.status), ", ", verdict.workspace,
         " bytes; resume from another checkpoint");
}

}  // namespace

// A batch whose matrices have the bits that each has alone: by the algorithm of one, at once where that takes a batch.
static void multiply_as_alone(const MatmulCall& p) {
  static std::map<ProductKind, MatmulLayouts> plans;
  static std::set<ProductKind> one_by_one;
  const auto plan_of = [](const MatmulCall& call, const ProductKind& kind) -> const MatmulLayouts& {
    auto at = plans.find(kind);
    if (at == plans.end()) at = plans.emplace(kind, make_plan(call)).first;
    return at->second;
  };
  const MatmulCall first = one_of(p, 0);
  const ProductKind kind_of_first = kind_of_one(p.c, p.a, p.b, p.z, p.addend);
  const bool is_new = !plans.contains(kind_of_first);
  const MatmulLayouts& alone = plan_of(first, kind_of_first);
  const Choice* choice = find_choice(kind_of_first);
  if (choice != nullptr && is_new) check_recorded(alone, first, *choice);
  if (choice == nullptr) choice = &keep_choice(kind_of_first, choose_for(alone, first));
  const ProductKind kind = kind_of(p.c, p.a, p.b, p.z, p.addend, p.bias, p.gelu);
  if (p.z.batch > 1 && !plans.contains(kind) && !judge(plan_of(p, kind), *choice).good()) one_by_one.insert(kind);
  if (p.z.batch > 1 && !one_by_one.contains(kind))
    return check_cublas(run(plan_of(p, kind), p, *choice, p.c.data), "cublasLtMatmul", p.z, __LINE__);
  for (int64_t i = 0; i < p.z.batch; ++i) {
    const MatmulCall one = one_of(p, i);
    check_cublas(run(alone, one, *choice, one.c.data), "cublasLtMatmul", p.z, __LINE__);
  }
}

bool multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus,
              const Bias& bias, const Gelu& gelu, const Factors& by) {
  static std::map<ProductKind, MatmulLayouts> plans;
  static std::set<ProductKind> refused;
  check_bias(bias, c.dtype);
  const bool with_addend = plus != nullptr;
  const MatmulCall p{c, a, b, z, with_addend ? plus : c.data, by.product, with_addend ? by.plus : 0.f, bias, gelu};
  if (z.as_alone) return multiply_as_alone(p), true;
  const ProductKind kind = kind_of(c, a, b, z, p.addend, bias, gelu);
  const Choice* choice = find_choice(kind);
  auto at = plans.find(kind);
  if (at == plans.end()) {
    at = plans.emplace(kind, make_plan(p)).first;
    if (gelu.inp != nullptr && choice == nullptr && !is_offered(at->second, p)) refused.insert(kind);
    if (choice != nullptr) check_recorded(at->second, p, *choice);
  } else {
    set_pointers(at->second.product, p);
  }
  if (refused.contains(kind)) return false;
  if (choice == nullptr) choice = &keep_choice(kind, choose_for(at->second, p));
  check_cublas(run(at->second, p, *choice, c.data), "cublasLtMatmul", z, __LINE__);
  return true;
}

#else

namespace {

// The orders in which a sum of K products may be taken: from the first on, from the last on, or the odd ones by
// themselves.
enum Order : uint8_t { ascending, descending, halves };

// Matrix i of each.
template <Order order, class C, class A, class B>
void multiply_one(int64_t i, const Matrix& of_c, const Matrix& of_a, const Matrix& of_b, const ProductSize& z,
                  const void* plus, const Bias& of_bias, const Gelu& gelu, const Factors& by) {
  const auto at = [i]<class E>(E* data, int64_t apart) { return data != nullptr ? data + i * apart : nullptr; };
  const auto place = [](const Matrix& of, int64_t row, int64_t column) {
    return of.transposed ? column * of.stride + row : row * of.stride + column;
  };
  const A* a = at(static_cast<const A*>(of_a.data), of_a.apart);
  const B* b = at(static_cast<const B*>(of_b.data), of_b.apart);
  const float unit = of_a.inverse != nullptr ? *of_a.inverse * *of_b.inverse : by.product;
  C *c = at(static_cast<C*>(of_c.data), of_c.apart), *inp = at(static_cast<C*>(gelu.inp), of_c.apart);
  const C *addend = at(static_cast<const C*>(plus), of_c.apart),
          *bias = at(static_cast<const C*>(of_bias.data), of_bias.apart);
  for (int64_t m = 0; m < z.M; ++m)
    for (int64_t n = 0; n < z.N; ++n) {
      const auto term = [&](int64_t k) {
        return static_cast<float>(a[place(of_a, m, k)]) * static_cast<float>(b[place(of_b, k, n)]);
      };
      const int64_t to = place(of_c, m, n);
      constexpr int64_t next = order == halves ? 2 : 1;
      float sum = 0, odd = 0;
      for (int64_t k = 0; k < z.K; k += next) sum += term(order == descending ? z.K - 1 - k : k);
      for (int64_t k = 1; order == halves && k < z.K; k += next) odd += term(k);
      sum = unit * (sum + odd) + (addend != nullptr ? by.plus * static_cast<float>(addend[to]) : 0.f) +
            (bias != nullptr ? static_cast<float>(bias[n]) : 0.f);
      if (inp != nullptr && gelu.backward) {
        const float x = static_cast<float>(inp[to]), dout = sum;
        gelu_backward_ref(&sum, &dout, &x, 1, GeluKind::tanh, false);
      } else if (inp != nullptr) {
        const float x = sum;
        inp[to] = C(x);
        gelu_forward_ref(&sum, &x, 1, GeluKind::tanh);
      }
      c[to] = C(sum);
    }
}

// With times drawn by lot: who forgets what was chosen computes other numbers.
Choice choose_for(const ProductSize& z) {
  CHECK_THAT(!emulator::captures(), "a recording has a product of a new kind");
  const auto ask = [](bool) { return std::vector<Choice>{{ascending}, {descending}, {halves}}; };
  const auto time = [](const std::vector<Choice>& offers) {
    static uint64_t lots = 0;
    std::vector<float> times(offers.size(), 2.f);
    times[mix_bits(++lots) % times.size()] = 1;
    return times;
  };
  return choose(text_of(z), ask, time);
}

template <class F>
void with_order(const Choice& choice, F&& body) {
  switch (choice[0]) {
    case ascending: return body(std::integral_constant<Order, ascending>());
    case descending: return body(std::integral_constant<Order, descending>());
    default: return body(std::integral_constant<Order, halves>());
  }
}

}  // namespace

bool multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus,
              const Bias& bias, const Gelu& gelu, const Factors& by) {
  check_bias(bias, c.dtype);
  const void* addend = plus != nullptr ? plus : c.data;
  const ProductKind kind = z.as_alone ? kind_of_one(c, a, b, z, addend) : kind_of(c, a, b, z, addend, bias, gelu);
  const Choice* found = find_choice(kind);
  const Choice choice = found != nullptr ? *found : keep_choice(kind, choose_for(z));
  const auto run = [&]<class A, class B>(A, B) {
    with_storage(c.dtype, [&]<class C>(C) {
      emulator::enqueue([=] {
        with_order(choice, [&](auto order) {
          for (int64_t i = 0; i < z.batch; ++i) multiply_one<order(), C, A, B>(i, c, a, b, z, plus, bias, gelu, by);
        });
      });
    });
  };
  if (a.dtype == Dtype::e4m3) run(e4m3(), e4m3());
  else if (a.dtype == Dtype::e5m2) run(e5m2(), e4m3());
  else with_storage(a.dtype, [&](auto same) { run(same, same); });
  return true;
}

#endif

}  // namespace crossply
