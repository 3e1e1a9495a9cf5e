// cuBLASLt without linking with it: it is half a gigabyte, lies somewhere else on every machine, and a program that is
// linked with it does not start where it is missing, not even to train on the CPU. So these are its functions by
// their own names, and each passes on to the library, which the first of them opens.
// Not yet run on hardware: only compiled.
#include <cublasLt.h>

#include "engine/check.h"
#include "kernels/cuda/library.h"

namespace crossply {
namespace {

// Any version of the major number that this was compiled with is good: within one, NVIDIA only adds functions.
void* open_cublaslt() {
  const std::string name = str("libcublasLt.so.", CUBLAS_VER_MAJOR);
  void* library = open_library(name, cuda_library_folders(),
                               str("Install cuBLAS of CUDA ", CUBLAS_VER_MAJOR,
                                   " (or pip install nvidia-cublas for a python3 of PATH), or name the folder of ",
                                   name, " in LD_LIBRARY_PATH, or CUDA's in CUDA_HOME, or use --device cpu"));
  const auto version =
      reinterpret_cast<decltype(&cublasLtGetVersion)>(find_function(library, "cublasLtGetVersion", name));
  if (version() / 10000 != CUBLAS_VER_MAJOR)
    fail(Exit::device, name, " is of version ", version(), "; this program was compiled for CUDA ", CUBLAS_VER_MAJOR);
  return library;
}

void* find_cublaslt(const char* name) {
  static void* const library = open_cublaslt();
  return find_function(library, name, str("cuBLASLt, here older than the ", CUBLAS_VERSION, " it was compiled with,"));
}

}  // namespace
}  // namespace crossply

// The function of the library, looked up once, with the type that the header says.
#define CUBLASLT(name)                                                                              \
  [] {                                                                                              \
    static const auto function = reinterpret_cast<decltype(&name)>(crossply::find_cublaslt(#name)); \
    return function;                                                                                \
  }()

extern "C" {

size_t cublasLtGetVersion() { return CUBLASLT(cublasLtGetVersion)(); }

const char* cublasLtGetStatusString(cublasStatus_t status) { return CUBLASLT(cublasLtGetStatusString)(status); }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* out) { return CUBLASLT(cublasLtCreate)(out); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute, cudaDataType_t scale) {
  return CUBLASLT(cublasLtMatmulDescCreate)(out, compute, scale);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  return CUBLASLT(cublasLtMatmulDescSetAttribute)(of, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  return CUBLASLT(cublasLtMatrixLayoutCreate)(out, type, rows, columns, stride);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t of, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  return CUBLASLT(cublasLtMatrixLayoutSetAttribute)(of, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  return CUBLASLT(cublasLtMatmulPreferenceCreate)(out);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return CUBLASLT(cublasLtMatmulPreferenceDestroy)(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t of,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  return CUBLASLT(cublasLtMatmulPreferenceSetAttribute)(of, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t* found, int* count) {
  return CUBLASLT(cublasLtMatmulAlgoGetHeuristic)(handle, product, a, b, c, d, preference, most, found, count);
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* of,
                                                 cublasLtMatmulAlgoCapAttributes_t attribute, void* value, size_t bytes,
                                                 size_t* written) {
  return CUBLASLT(cublasLtMatmulAlgoCapGetAttribute)(of, attribute, value, bytes, written);
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
  return CUBLASLT(cublasLtMatmulAlgoCheck)(handle, product, a, b, c, d, algorithm, result);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t of_a, const void* b, cublasLtMatrixLayout_t of_b, const void* beta,
                              const void* c, cublasLtMatrixLayout_t of_c, void* d, cublasLtMatrixLayout_t of_d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  return CUBLASLT(cublasLtMatmul)(handle, product, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm,
                                  workspace, workspace_bytes, stream);
}

}  // extern "C"
