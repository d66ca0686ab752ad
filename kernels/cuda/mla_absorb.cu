// The absorbed projections. Per head they are small (128 x 512), so they run on the CUDA cores: eight rows a
// block share each weight read.
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kRows = 8;
constexpr int kColumns = 128;
constexpr int kChunk = 128;  // inputs staged at a time

// One thread a latent column; the weights of a head are read row by row.
__global__ void __launch_bounds__(kColumns)
    AbsorbQueryKernel(const bf16* q, int64_t q_stride, const bf16* w, int rows, int nope, int rope, int v,
                      int latent, bf16* out, int64_t out_stride, const int32_t* positions,
                      const float* inv_freq, float attention_factor) {
  __shared__ float staged[kChunk][kRows];
  const int head = blockIdx.y, first_row = blockIdx.z * kRows;
  const int column = blockIdx.x * kColumns + threadIdx.x;
  const bf16* from = w + static_cast<int64_t>(head) * (nope + v) * latent;
  float acc[kRows] = {};
  for (int base = 0; base < nope; base += kChunk) {
    const int count = min(kChunk, nope - base);
    __syncthreads();
    for (int i = threadIdx.x; i < count * kRows; i += kColumns) {
      const int row = i / count, k = i % count;
      staged[k][row] =
          first_row + row < rows
              ? ToFloat(
                    q[(first_row + row) * q_stride + static_cast<int64_t>(head) * (nope + rope) + base + k])
              : 0.0f;
    }
    __syncthreads();
    if (column < latent) {
      for (int k = 0; k < count; ++k) {
        const float weight = ToFloat(from[static_cast<int64_t>(base + k) * latent + column]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[r] = fmaf(staged[k][r], weight, acc[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r >= rows) break;
    bf16* to = out + (first_row + r) * out_stride + static_cast<int64_t>(head) * (latent + rope);
    if (column < latent) to[column] = FromFloat<bf16>(acc[r]);
    if (blockIdx.x == 0) {
      const bf16* rotated =
          q + (first_row + r) * q_stride + static_cast<int64_t>(head) * (nope + rope) + nope;
      for (int i = threadIdx.x; i < rope; i += kColumns) {
        if (positions == nullptr) {
          to[latent + i] = rotated[i];
        } else if ((i & 1) == 0) {
          float sin, cos;
          sincosf(static_cast<float>(positions[first_row + r]) * inv_freq[i / 2], &sin, &cos);
          sin *= attention_factor;
          cos *= attention_factor;
          const float a = ToFloat(rotated[i]), b = ToFloat(rotated[i + 1]);
          to[latent + i] = FromFloat<bf16>(a * cos - b * sin);
          to[latent + i + 1] = FromFloat<bf16>(b * cos + a * sin);
        }
      }
    }
  }
}

// One warp an output column: its lanes share the latent inputs.
__global__ void __launch_bounds__(256)
    AbsorbValueKernel(const bf16* attended, int64_t attended_stride, const bf16* w, int rows, int nope, int v,
                      int latent, bf16* out, int64_t out_stride) {
  const int head = blockIdx.y, first_row = blockIdx.z * kRows;
  const int lane = threadIdx.x & 31, column = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (column >= v) return;
  const bf16* from = w + (static_cast<int64_t>(head) * (nope + v) + nope + column) * latent;
  float acc[kRows] = {};
  for (int i = lane; i < latent; i += 32) {
    const float weight = ToFloat(from[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(first_row + r, rows - 1);
      acc[r] = fmaf(ToFloat(attended[row * attended_stride + static_cast<int64_t>(head) * latent + i]),
                    weight, acc[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = WarpSum(acc[r]);
    if (lane == 0 && first_row + r < rows) {
      out[(first_row + r) * out_stride + static_cast<int64_t>(head) * v + column] = FromFloat<bf16>(sum);
    }
  }
}

}  // namespace

cudaError_t AbsorbQuery(const Launch& launch, const kernels::AbsorbQueryArgs& args) {
  if (args.q.rows == 0) return cudaSuccess;
  if (args.q.dtype != kernels::DType::kBF16 || args.out.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  const dim3 grid(Blocks(args.latent, kColumns), static_cast<int>(args.heads), Blocks(args.q.rows, kRows));
  AbsorbQueryKernel<<<grid, kColumns, 0, launch.stream>>>(
      Data<bf16>(args.q), args.q.stride, reinterpret_cast<const bf16*>(args.w_kv_b),
      static_cast<int>(args.q.rows), static_cast<int>(args.nope), static_cast<int>(args.rope),
      static_cast<int>(args.v), static_cast<int>(args.latent), Data<bf16>(args.out), args.out.stride,
      args.positions, args.inv_freq, args.attention_factor);
  return cudaGetLastError();
}

cudaError_t AbsorbValue(const Launch& launch, const kernels::AbsorbValueArgs& args) {
  if (args.attended.rows == 0) return cudaSuccess;
  if (args.attended.dtype != kernels::DType::kBF16 || args.out.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  const dim3 grid(Blocks(args.v, 8), static_cast<int>(args.heads), Blocks(args.attended.rows, kRows));
  AbsorbValueKernel<<<grid, 256, 0, launch.stream>>>(
      Data<bf16>(args.attended), args.attended.stride, reinterpret_cast<const bf16*>(args.w_kv_b),
      static_cast<int>(args.attended.rows), static_cast<int>(args.nope), static_cast<int>(args.v),
      static_cast<int>(args.latent), Data<bf16>(args.out), args.out.stride);
  return cudaGetLastError();
}

}  // namespace kdt::cuda
