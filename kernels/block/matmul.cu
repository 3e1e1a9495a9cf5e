#include "kernels/block/matmul.h"

#include "kernels/block/matmul.cuh"

#if CROSSPLY_CUDA
#include <cublasLt.h>

#include <array>
#include <map>
#endif

namespace crossply {

#if CROSSPLY_CUDA

namespace {

void check_cublas(cublasStatus_t status, const char* what, const ProductSize& z, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(Exit::device, __FILE__, ":", line, ": ", what, ": ", cublasLtGetStatusString(status), ", for ", z.batch,
       " products of ", z.M, " x ", z.K, " by ", z.K, " x ", z.N);
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

cudaDataType_t type_of(Dtype dtype) { return dtype == Dtype::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// The largest power of two that divides the address of every matrix, up to what algorithms ask for.
uint32_t alignment_of(const void* data, const Matrix& of) {
  const auto apart = static_cast<uint64_t>(of.apart) * size_of(of.dtype);
  const uint64_t address = reinterpret_cast<uintptr_t>(data) | apart | 256;
  return static_cast<uint32_t>(address & -address);
}

constexpr size_t workspace_bytes = matmul_workspace;

struct Plan {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t a, b, c;
  cublasLtMatmulAlgo_t algorithm;
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

// A row-major c is cuBLAS's c^T = b^T a^T: the factors change places.
Plan make_plan(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus) {
  cudaStreamCaptureStatus recording;
  CHECK_CUDA(cudaStreamIsCapturing(cuda_stream(), &recording));
  CHECK_THAT(recording == cudaStreamCaptureStatusNone, "a recording has a product of a new kind");
  Plan plan;
  const cublasOperation_t first = b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  CHECK_CUBLAS(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), z);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), z);
  CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), z);
  plan.a = make_layout(b, b.transposed ? z.N : z.K, b.transposed ? z.K : z.N, z);
  plan.b = make_layout(a, a.transposed ? z.K : z.M, a.transposed ? z.M : z.K, z);
  plan.c = make_layout(c, z.M, z.N, z);
  cublasLtMatmulPreference_t preference;
  CHECK_CUBLAS(cublasLtMatmulPreferenceCreate(&preference), z);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    CHECK_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), z);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  // Not in the type of c: parts of a sum would be rounded to bf16.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b.data, b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a.data, a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(plus, c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(c.data, c));
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  CHECK_CUBLAS(cublasLtMatmulAlgoGetHeuristic(cublas(), plan.product, plan.a, plan.b, plan.c, plan.c, preference, 1,
                                              &found, &count),
               z);
  CHECK_CUBLAS(cublasLtMatmulPreferenceDestroy(preference), z);
  CHECK_CUBLAS(count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED, z);
  plan.algorithm = found.algo;
  return plan;
}

// Chosen at the first product of its kind, so in the first step of a run, and kept.
const Plan& plan_of(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus) {
  using Key = std::array<int64_t, 5 + 3 * 4>;
  static std::map<Key, Plan> plans;
  Key key{z.M, z.N, z.K, z.batch, alignment_of(plus, c)};
  size_t next = 5;
  for (const Matrix* m : {&c, &a, &b}) {
    const int64_t kind = 2 * static_cast<int64_t>(m->dtype) + m->transposed;
    for (const int64_t part : {kind, m->stride, m->apart, int64_t{alignment_of(m->data, *m)}}) key.at(next++) = part;
  }
  const auto at = plans.find(key);
  return at != plans.end() ? at->second : plans.emplace(key, make_plan(c, a, b, z, plus)).first->second;
}

}  // namespace

void multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus) {
  const void* addend = plus != nullptr ? plus : c.data;
  const Plan& plan = plan_of(c, a, b, z, addend);
  const float one = 1, beta = plus != nullptr ? 1.f : 0.f;
  CHECK_CUBLAS(cublasLtMatmul(cublas(), plan.product, &one, b.data, plan.a, a.data, plan.b, &beta, addend, plan.c,
                              c.data, plan.c, &plan.algorithm, scratch<std::byte>(workspace_bytes, matmul_slot),
                              workspace_bytes, cuda_stream()),
               z);
}

#else

namespace {

template <class C, class T>
void multiply_one(C* c, const C* plus, const T* a, const T* b, const Matrix& of_c, const Matrix& of_a,
                  const Matrix& of_b, const ProductSize& z) {
  const auto place = [](const Matrix& of, int64_t row, int64_t column) {
    return of.transposed ? column * of.stride + row : row * of.stride + column;
  };
  for (int64_t m = 0; m < z.M; ++m)
    for (int64_t n = 0; n < z.N; ++n) {
      float sum = plus != nullptr ? static_cast<float>(plus[place(of_c, m, n)]) : 0.f;
      for (int64_t k = 0; k < z.K; ++k)
        sum += static_cast<float>(a[place(of_a, m, k)]) * static_cast<float>(b[place(of_b, k, n)]);
      c[place(of_c, m, n)] = C(sum);
    }
}

}  // namespace

void multiply(const Matrix& c, const Matrix& a, const Matrix& b, const ProductSize& z, const void* plus) {
  with_storage(a.dtype, [&]<class T>(T) {
    with_storage(c.dtype, [&]<class C>(C) {
      emulator::enqueue([=] {
        const C* addend = static_cast<const C*>(plus);
        for (int64_t i = 0; i < z.batch; ++i)
          multiply_one(static_cast<C*>(c.data) + i * c.apart, addend != nullptr ? addend + i * c.apart : nullptr,
                       static_cast<const T*>(a.data) + i * a.apart, static_cast<const T*>(b.data) + i * b.apart, c, a,
                       b, z);
      });
    });
  });
}

#endif

// -----------------------------------------------------------------------------------------------------------------

namespace {

// The whole tensor as rows of its last `columns`.
Matrix rows_of(const Tensor& tensor, int64_t columns) { return {tensor.data, tensor.dtype, columns}; }

}  // namespace

void matmul_forward_cuda(const Tensor& out, const Tensor& inp, const Tensor& weight, int64_t rows,
                         const Tensor& addend) {
  const int64_t to = weight.dim(0), from = weight.dim(1);
  multiply(rows_of(out, to), rows_of(inp, from), transposed(rows_of(weight, from)), {rows, to, from}, addend.data);
}

void matmul_backward_input_cuda(const Grad& dinp, const Tensor& dout, const Tensor& weight, int64_t rows) {
  const int64_t to = weight.dim(0), from = weight.dim(1);
  multiply(rows_of(dinp, from), rows_of(dout, to), rows_of(weight, from), {rows, from, to},
           dinp.add ? dinp.data : nullptr);
}

void matmul_backward_weight_cuda(const Tensor& dweight, const Tensor& dout, const Tensor& inp, int64_t rows) {
  const int64_t to = dweight.dim(0), from = dweight.dim(1);
  multiply(rows_of(dweight, from), transposed(rows_of(dout, to)), rows_of(inp, from), {to, from, rows}, dweight.data);
}

}  // namespace crossply
