// One block a row.
#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

template <typename T, typename W>
__global__ void EmbeddingKernel(const int32_t* ids, int64_t begin, const W* table, int64_t vocab,
                                int64_t table_stride, int64_t hidden, T* out, int64_t out_stride,
                                bool in_chunks) {
  // In this order: what was written before an embedding may be read by all later kernels as they start
  // (launch.cuh).
  WaitForPrevious();
  LaunchDependents();
  const int64_t id = ids[blockIdx.x] - begin;
  const bool here = id >= 0 && id < vocab;
  T* to = out + blockIdx.x * out_stride;
  if (in_chunks) {
    for (int64_t i = threadIdx.x; i < hidden / 8; i += blockDim.x) {
      float v[8] = {};
      if (here) Load8(v, table + id * table_stride + i * 8);
      Store8(to + i * 8, v);
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < hidden; i += blockDim.x) {
    to[i] = here ? FromFloat<T>(ToFloat(table[id * table_stride + i])) : FromFloat<T>(0.0f);
  }
}

}  // namespace

cudaError_t Embedding(const Launch& launch, const kernels::EmbeddingArgs& args) {
  if (args.out.rows == 0) return cudaSuccess;
  return ByType(args.out.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return ByType(args.table.dtype, [&](auto* u) {
      using W = std::remove_pointer_t<decltype(u)>;
      return LaunchAfter(launch, EmbeddingKernel<T, W>, dim3(static_cast<unsigned>(args.out.rows)), 512, 0,
                         args.token_ids, args.vocab_begin, Data<W>(args.table), args.table.rows,
                         args.table.stride, args.out.cols, Data<T>(args.out), args.out.stride,
                         InChunks(args.table) && InChunks(args.out));
    });
  });
}

}  // namespace kdt::cuda
