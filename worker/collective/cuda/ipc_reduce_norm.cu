// A one-shot all-reduce with the norm behind it (kernels/cuda/rms_norm.cu) in the same kernel: the sums stay
// in registers. The bits are those of the two kernels one after the other: the sum is rounded to bf16 first,
// and the squares are added up in the same order.
#include <algorithm>

#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "worker/collective/cuda/ipc_vector.cuh"

namespace kdt::cuda {
namespace {

// v = the sum over the ranks of this thread's chunks of a row, in rank order; the row is at `offset` of every
// rank's block, also of this one's.
template <int kChunks>
__device__ __forceinline__ void SumRow(const IpcPeers& peers, size_t offset, int chunks,
                                       float (&v)[kChunks][8]) {
  for (int base = 0; base < peers.size; base += kBatch) {
    uint4 vectors[kBatch][kChunks];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (base + k >= peers.size) break;
      const uint4* const row = reinterpret_cast<const uint4*>(peers.blocks[base + k] + offset);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int at = static_cast<int>(threadIdx.x + c * blockDim.x);
        if (at < chunks) vectors[k][c] = LoadPeer(row + at);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (base + k >= peers.size) break;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float values[8];
        Unpack8(values, vectors[k][c]);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[c][i] = base + k == 0 ? values[i] : v[c][i] + values[i];
      }
    }
  }
}

// A block takes whole rows, a thread kChunks times eight values of each, as in rms_norm. All loads of a row
// are under way at once: a second round of them costs a microsecond.
template <int kChunks>
__global__ void __launch_bounds__(kIpcThreads, 1)
    OneShotNormKernel(const __grid_constant__ IpcPeers peers, const __grid_constant__ NormRows p) {
  __shared__ float shared[kIpcThreads / 32];
  const int chunks = p.n / 8, lane = threadIdx.x & 31, warps = blockDim.x / 32;
  const auto at = [&](int c) { return static_cast<int>(threadIdx.x + c * blockDim.x); };
  const auto load = [&](uint4(&to)[kChunks], const bf16* row) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (at(c) < chunks) to[c] = reinterpret_cast<const uint4*>(row)[at(c)];
    }
  };
  uint4 weight[kChunks], before[kChunks];
  load(weight, p.weight);
  const IpcOp op = BeginOp(peers);
  load(before, p.residual + blockIdx.x * p.residual_stride);
  uint4* const mine = reinterpret_cast<uint4*>(peers.blocks[peers.rank] + op.offset);
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t i = static_cast<int64_t>(row) * chunks + at(c);
      if (at(c) < chunks) mine[i] = reinterpret_cast<const uint4*>(p.x)[i];
    }
  }
  const bool alive = Meet(peers, &IpcFlags::arrived, op.number);
  CountOp(peers, op.number);
  LaunchDependents();
  if (!alive) return;
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float v[kChunks][8], squares = 0.0f;
    SumRow<kChunks>(peers, op.offset + static_cast<size_t>(row) * p.n * sizeof(bf16), chunks, v);
    bf16* const residual = p.residual + row * p.residual_stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (at(c) >= chunks) continue;
      float r[8];
      Unpack8(r, before[c]);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[c][i] = Rounded<bf16>(Rounded<bf16>(v[c][i]) + r[i]);
      Store8(residual + at(c) * 8, v[c]);
      squares += Squares8(v[c]);
    }
    if (row + static_cast<int>(gridDim.x) < p.rows) load(before, residual + gridDim.x * p.residual_stride);
    squares = WarpSum(squares);
    if (lane == 0) shared[threadIdx.x / 32] = squares;
    __syncthreads();
    const float sum = WarpSum(lane < warps ? shared[lane] : 0.0f);
    const float factor = rsqrtf(sum / static_cast<float>(p.n) + p.eps);
    bf16* const out = p.out + row * p.out_stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (at(c) >= chunks) continue;
      Scale8<bf16>(v[c], factor, weight[c]);
      Store8(out + at(c) * 8, v[c]);
    }
    __syncthreads();  // before the next row's sums
  }
}

}  // namespace

bool IpcTakesNorm(const kernels::RmsNormArgs& norm) {
  using kernels::DType;
  return norm.x.dtype == DType::kBF16 && norm.out.dtype == DType::kBF16 && norm.residual.data != nullptr &&
         norm.residual.dtype == DType::kBF16 && norm.x.stride == norm.x.cols && InChunks(norm.x) &&
         InChunks(norm.residual) && InChunks(norm.out) &&
         reinterpret_cast<uintptr_t>(norm.weight) % 16 == 0 && norm.x.cols / 8 <= 2 * kIpcThreads &&
         norm.x.rows > 0;
}

cudaError_t IpcReduceNorm(const IpcPeers& peers, const kernels::RmsNormArgs& norm, cudaStream_t stream) {
  const NormRows p = MakeNormRows(norm);
  const int chunks = p.n / 8;
  const int blocks = std::min(p.rows, peers.max_blocks);
  // As rms_norm shares a row out over its threads.
  const auto launch = [&](auto* kernel, int each) {
    return LaunchAfter(Launch{stream}, kernel, blocks, Blocks(chunks, each * 32) * 32, 0, peers, p);
  };
  return chunks <= kIpcThreads / 2 ? launch(OneShotNormKernel<1>, 1) : launch(OneShotNormKernel<2>, 2);
}

}  // namespace kdt::cuda
