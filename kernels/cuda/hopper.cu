// Not yet run on hardware: only in the emulator.
#include "kernels/cuda/hopper.cuh"

#include <cstdlib>
#include <string_view>

#if CROSSPLY_CUDA
#include <cudaTypedefs.h>
#endif

namespace crossply {

bool has_hopper() {
  if (const char* off = std::getenv("CROSSPLY_NO_HOPPER"); off != nullptr && std::string_view(off) == "1") return false;
#if !CROSSPLY_CUDA
  return emulator::hopper();
#elif defined(CROSSPLY_SM90A)
  return compute_capability() == 90;
#else
  return false;
#endif
}

TensorMap tensor_map(const RowsOfHeads& of, int box_rows) {
  constexpr int64_t element = sizeof(bf16);
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements * element); };
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  CHECK_THAT(of.D % 64 == 0 && box_rows >= 8 && box_rows <= 256 && box_rows % 8 == 0, of.D, " columns, boxes of ",
             box_rows, " rows");
  CHECK_THAT(reinterpret_cast<uintptr_t>(of.data) % 16 == 0 && of.row_stride % 8 == 0 && of.head_stride % 8 == 0 &&
                 of.batch_stride % 8 == 0,
             "rows that do not begin at multiples of 16 bytes");
  const uint64_t dims[5] = {64, size(of.rows), size(of.D / 64), size(of.heads), size(of.batches)};
  const uint64_t strides[4] = {bytes(of.row_stride), 128, bytes(of.head_stride), bytes(of.batch_stride)};
  const uint32_t box[5] = {64, static_cast<uint32_t>(box_rows), static_cast<uint32_t>(of.D / 64), 1, 1};
  for (const uint64_t dim : dims) CHECK_THAT(dim >= 1 && dim <= uint64_t{1} << 32, dim, " in a dimension");
  for (const uint64_t stride : strides) CHECK_THAT(stride < uint64_t{1} << 40, "a stride of ", stride, " bytes");
#if CROSSPLY_CUDA
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    CHECK_THAT(result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  const uint32_t every[5] = {1, 1, 1, 1, 1};
  TensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<bf16*>(of.data), dims, strides,
                                 box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK_THAT(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: error ", static_cast<int>(result));
  return map;
#else
  TensorMap map{of.data, {}, {}, {}};
  std::copy_n(dims, 5, map.dims), std::copy_n(strides, 4, map.strides), std::copy_n(box, 5, map.box);
  return map;
#endif
}

}  // namespace crossply
