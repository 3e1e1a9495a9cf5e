#include "kernels/matmul.h"

#include "kernels/cuda.cuh"

#if CROSSPLY_CUDA
#include <cublasLt.h>

#include <map>
#include <tuple>
#endif

namespace crossply {
namespace {

// c (M, N), f32 or bf16, set or added to, = a * b, where a is (M, K), or (K, M) to be transposed, b (K, N), or (N, K);
// a and b are both f32 or both bf16, the sums f32. The plain loop that both ways below are equivalent to:
//
//   for m, n: c[m, n] = (add ? c[m, n] : 0) + sum_k a[m, k] * b[k, n]
struct Operand {
  Tensor tensor;
  bool transposed;
};
struct Sizes {
  int64_t M, N, K;
};

#if CROSSPLY_CUDA

void check_cublas(cublasStatus_t status, const char* what, const Sizes& s, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(Exit::device, __FILE__, ":", line, ": ", what, ": ", cublasLtGetStatusString(status), ", for a product of ", s.M,
       " x ", s.K, " by ", s.K, " x ", s.N);
}
#define CHECK_CUBLAS(call, sizes) check_cublas((call), #call, sizes, __LINE__)

cublasLtHandle_t cublas() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t made;
    CHECK_CUBLAS(cublasLtCreate(&made), Sizes{});
    return made;
  }();
  return handle;
}

cudaDataType_t type_of(const Tensor& tensor) { return tensor.dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// The largest power of two that divides the address, up to what algorithms ask for.
uint32_t alignment_of(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data) | 256;
  return static_cast<uint32_t>(address & -address);
}

constexpr size_t workspace_bytes = size_t{32} << 20;  // what Hopper's algorithms ask for

struct Plan {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulAlgo_t algorithm;
};

// cuBLAS is column-major: a row-major c is its c^T = b^T a^T, so the operands change places.
Plan make_plan(const Tensor& c, const Operand& a, const Operand& b, const Sizes& s) {
  Plan plan;
  const cublasOperation_t op_a = b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_b = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  CHECK_CUBLAS(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), s);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a), s);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b), s);
  const auto layout = [&](cublasLtMatrixLayout_t* to, const Tensor& t, int64_t rows, int64_t cols) {
    const auto down = static_cast<uint64_t>(cols), across = static_cast<uint64_t>(rows);
    CHECK_CUBLAS(cublasLtMatrixLayoutCreate(to, type_of(t), down, across, cols), s);
  };
  layout(&plan.a, b.tensor, b.transposed ? s.N : s.K, b.transposed ? s.K : s.N);
  layout(&plan.b, a.tensor, a.transposed ? s.K : s.M, a.transposed ? s.M : s.K);
  layout(&plan.c, c, s.M, s.N);
  cublasLtMatmulPreference_t preference;
  CHECK_CUBLAS(cublasLtMatmulPreferenceCreate(&preference), s);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    CHECK_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), s);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b.tensor));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a.tensor));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(c));
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  CHECK_CUBLAS(cublasLtMatmulAlgoGetHeuristic(cublas(), plan.product, plan.a, plan.b, plan.c, plan.c, preference, 1,
                                              &found, &count),
               s);
  CHECK_CUBLAS(cublasLtMatmulPreferenceDestroy(preference), s);
  CHECK_CUBLAS(count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED, s);
  plan.algorithm = found.algo;
  return plan;
}

// Chosen at the first product of its kind, so in the first step of a run, and kept.
const Plan& plan_of(const Tensor& c, const Operand& a, const Operand& b, const Sizes& s) {
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, Dtype, Dtype, uint32_t, uint32_t, uint32_t>;
  static std::map<Key, Plan> plans;
  const Key key{s.M, s.N, s.K, a.transposed, b.transposed, a.tensor.dtype, c.dtype, alignment_of(a.tensor),
                alignment_of(b.tensor), alignment_of(c)};
  const auto at = plans.find(key);
  return at != plans.end() ? at->second : plans.emplace(key, make_plan(c, a, b, s)).first->second;
}

void multiply(const Tensor& c, const Operand& a, const Operand& b, const Sizes& s, bool add) {
  const Plan& plan = plan_of(c, a, b, s);
  const float one = 1, beta = add ? 1.f : 0.f;
  CHECK_CUBLAS(cublasLtMatmul(cublas(), plan.product, &one, b.tensor.data, plan.a, a.tensor.data, plan.b, &beta, c.data,
                              plan.c, c.data, plan.c, &plan.algorithm, scratch<std::byte>(workspace_bytes, matmul_slot),
                              workspace_bytes, cuda_stream()),
               s);
}

#else

void multiply(const Tensor& c, const Operand& a, const Operand& b, const Sizes& s, bool add) {
  with_storage(a.tensor.dtype, [&](auto factor) {
    using T = decltype(factor);
    with_storage(c.dtype, [&](auto result) {
      using C = decltype(result);
      emulator::enqueue([=, to = c.as<C>(), x = a.tensor.as<T>(), y = b.tensor.as<T>()] {
        for (int64_t m = 0; m < s.M; ++m)
          for (int64_t n = 0; n < s.N; ++n) {
            float sum = add ? static_cast<float>(to[m * s.N + n]) : 0.f;
            for (int64_t k = 0; k < s.K; ++k)
              sum += static_cast<float>(x[a.transposed ? k * s.M + m : m * s.K + k]) *
                     static_cast<float>(y[b.transposed ? n * s.K + k : k * s.N + n]);
            to[m * s.N + n] = C(sum);
          }
      });
    });
  });
}

#endif

}  // namespace

// -----------------------------------------------------------------------------------------------------------------

void matmul_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t rows) {
  multiply(out, {inp, false}, {weight, true}, {rows, weight.dim(0), weight.dim(1)}, false);
}

void matmul_backward_input_cuda(const Tensor& dinp, const Tensor& dout, const Tensor& weight, int64_t rows, bool acc) {
  multiply(dinp, {dout, false}, {weight, false}, {rows, weight.dim(1), weight.dim(0)}, acc);
}

void matmul_backward_weight_cuda(const Tensor& dweight, const Tensor& dout, const Tensor& inp, int64_t rows) {
  multiply(dweight, {dout, true}, {inp, false}, {dweight.dim(0), dweight.dim(1), rows}, true);
}

}  // namespace crossply
