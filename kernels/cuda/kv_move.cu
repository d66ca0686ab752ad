// Each thread moves its own 4 bytes of every row, in the order of the list, so no thread ever waits for
// another. It takes eight rows at a time: within a batch all reads come before all writes. That is the
// in-order copy, because a row is never read after an earlier move has written it: to[i] <= from[i] with both
// rising, or ranges that do not overlap.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kBatch = 8;

template <typename Word>
__global__ void KvMoveKernel(const int32_t* from, const int32_t* to, int64_t count, Word* pool,
                             int64_t row_words, int64_t stride_words, int64_t layer_words) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  if (column >= row_words) return;
  pool += blockIdx.y * layer_words + column;
  for (int64_t first = 0; first < count; first += kBatch) {
    Word value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < count) value[i] = pool[from[first + i] * stride_words];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < count) pool[to[first + i] * stride_words] = value[i];
    }
  }
}

template <typename Word>
cudaError_t Move(const Launch& launch, const kernels::KvMoveArgs& args) {
  const int64_t size = kernels::DTypeSize(args.pool.dtype);
  const int64_t words = args.pool.cols * size / static_cast<int64_t>(sizeof(Word));
  return LaunchAfter(launch, KvMoveKernel<Word>, dim3(Blocks(words, 128), static_cast<unsigned>(args.layers)),
                     128, 0, args.from, args.to, args.count, static_cast<Word*>(args.pool.data), words,
                     args.pool.stride * size / static_cast<int64_t>(sizeof(Word)),
                     args.layer_stride * size / static_cast<int64_t>(sizeof(Word)));
}

}  // namespace

cudaError_t KvMove(const Launch& launch, const kernels::KvMoveArgs& args) {
  if (args.count == 0 || args.layers == 0) return cudaSuccess;
  const int64_t size = kernels::DTypeSize(args.pool.dtype);
  const bool words =
      args.pool.cols * size % 4 == 0 && args.pool.stride * size % 4 == 0 && args.layer_stride * size % 4 == 0;
  return words ? Move<uint32_t>(launch, args) : Move<uint16_t>(launch, args);
}

}  // namespace kdt::cuda
