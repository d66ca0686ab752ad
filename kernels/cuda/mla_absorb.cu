// The absorbed projections. Value is the streaming gemm of gemm/stream.cuh with a head a grid layer. Query
// has its weights the other way round ([inputs, outputs]), so they go through shared memory and
// ldmatrix.trans: a block takes 64 latent columns of a head, its four warps 16 each, over all inputs; all of
// its weights are on their way before it waits for the kernel in front. One block more a head carries the
// rope part. Shapes that do not fit the tiles run on the CUDA cores.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/mla_rope.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kColumns = 64;  // latent columns of a block
constexpr int kPitch = kColumns + 8;
constexpr int kMaxNope = 512;

// The rope part of one head, rotated or as it is: rows first_row .. first_row + count - 1.
__device__ void CarryRope(const AbsorbedQuery& p, int head, int first_row, int count) {
  if (p.positions != nullptr) {
    const int half = p.rope / 2;
    for (int i = threadIdx.x; i < count * half; i += blockDim.x) {
      const int row = first_row + i / half, pair = i % half;
      RotatePair(p, head, row, pair, AngleOf(p, row, pair));
    }
    return;
  }
  for (int i = threadIdx.x; i < count * p.rope; i += blockDim.x) {
    const int64_t row = first_row + i / p.rope, at = i % p.rope;
    p.out[row * p.out_stride + static_cast<int64_t>(head) * (p.latent + p.rope) + p.latent + at] =
        p.q[row * p.q_stride + static_cast<int64_t>(head) * (p.nope + p.rope) + p.nope + at];
  }
}

template <int kTiles>
__global__ void __launch_bounds__(128) QueryKernel(const __grid_constant__ AbsorbedQuery p) {
  extern __shared__ uint4 shared[];  // [nope][kPitch] bf16
  LaunchDependents();
  const int head = blockIdx.y, first_row = blockIdx.z * 8 * kTiles;
  if (blockIdx.x == gridDim.x - 1) {
    WaitForPrevious();
    CarryRope(p, head, first_row, min(p.rows - first_row, 8 * kTiles));
    return;
  }
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int g = lane >> 2, t = lane & 3;
  const bf16* w = p.w + static_cast<int64_t>(head) * (p.nope + p.v) * p.latent + blockIdx.x * kColumns;
  const uint32_t tile = SharedAddress(shared);
  for (int i = threadIdx.x; i < p.nope * (kColumns / 8); i += 128) {
    const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
    CopyAsync16(tile + (row * kPitch + chunk * 8) * 2, w + static_cast<int64_t>(row) * p.latent + chunk * 8);
  }
  WaitForPrevious();
  const bf16* x[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    x[n] = p.q + min(first_row + 8 * n + g, p.rows - 1) * p.q_stride +
           static_cast<int64_t>(head) * (p.nope + p.rope) + 8 * t;
  float acc[kTiles][4] = {};
  uint4 in[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) in[n] = __ldcg(reinterpret_cast<const uint4*>(x[n]));
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  // Lane l gives the address of row l % 8 of matrix l / 8: matrices 0 and 1 are outputs 0..7 and 8..15 at the
  // inputs 8 t, 8 t + 1 of the lanes, 2 and 3 at 8 t + 2, 8 t + 3. So a lane's inputs are those of its 16
  // bytes of x.
  const int row = 8 * ((lane & 7) >> 1) + (lane & 1) + 2 * (lane >> 4);
  const uint32_t from = tile + (row * kPitch + warp * 16 + 8 * (lane >> 3 & 1)) * 2;
  for (int base = 0; base < p.nope; base += 32) {
    uint32_t first[4], second[4];
    LoadMatrix4Transposed(first, from + base * kPitch * 2);
    LoadMatrix4Transposed(second, from + (base + 4) * kPitch * 2);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      MmaBf16(acc[n], first, in[n].x, in[n].y);
      MmaBf16(acc[n], second, in[n].z, in[n].w);
      if (base + 32 < p.nope) in[n] = __ldcg(reinterpret_cast<const uint4*>(x[n] + base + 32));
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    StoreAbsorbed(p, acc[n], head, first_row + 8 * n, blockIdx.x * kColumns + warp * 16, lane);
}

// Any shape: a warp an output and row. `w` moves by `input_step` from input to input.
__global__ void __launch_bounds__(256)
    PlainKernel(const bf16* x, int64_t x_stride, int64_t x_head, const bf16* w, int64_t w_head,
                int64_t output_step, int64_t input_step, int inputs, int outs, bf16* out, int64_t out_stride,
                int64_t out_head) {
  LaunchDependents();
  WaitForPrevious();
  const int column = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (column >= outs) return;
  x += blockIdx.z * x_stride + blockIdx.y * x_head;
  w += blockIdx.y * w_head + column * output_step;
  float sum = 0.0f;
  for (int i = lane; i < inputs; i += 32) sum = fmaf(ToFloat(x[i]), ToFloat(w[i * input_step]), sum);
  sum = WarpSum(sum);
  if (lane == 0) out[blockIdx.z * out_stride + blockIdx.y * out_head + column] = FromFloat<bf16>(sum);
}

__global__ void __launch_bounds__(128) RopeKernel(const __grid_constant__ AbsorbedQuery p) {
  LaunchDependents();
  WaitForPrevious();
  CarryRope(p, blockIdx.y, blockIdx.z, 1);
}

}  // namespace

cudaError_t AbsorbQuery(const Launch& launch, const kernels::AbsorbQueryArgs& args) {
  if (args.q.rows == 0 || args.heads == 0) return cudaSuccess;
  if (args.q.dtype != kernels::DType::kBF16 || args.out.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  // A pair is rotated as one word.
  if (args.positions != nullptr &&
      (args.rope | args.nope | args.latent | args.q.stride | args.out.stride) % 2 != 0)
    return cudaErrorInvalidValue;
  const AbsorbedQuery p = MakeAbsorbedQuery(args);
  const int heads = static_cast<int>(args.heads);
  const bool fits = p.nope % 32 == 0 && p.nope <= kMaxNope && p.latent % kColumns == 0 && p.rope % 8 == 0 &&
                    p.q_stride % 8 == 0 && p.out_stride % 2 == 0 && Aligned16(p.q) && Aligned16(p.w) &&
                    Aligned16(p.out);
  if (fits) {
    const size_t shared = static_cast<size_t>(p.nope) * kPitch * 2;
    const auto run = [&](auto* kernel, int rows) {
      return LaunchAfter(launch, kernel, dim3(p.latent / kColumns + 1, heads, Blocks(p.rows, rows)),
                         dim3(128), shared, p);
    };
    if (p.rows <= 8) return run(QueryKernel<1>, 8);
    if (p.rows <= 16) return run(QueryKernel<2>, 16);
    return run(QueryKernel<4>, 32);
  }
  if (const cudaError_t error =
          LaunchAfter(launch, PlainKernel, dim3(Blocks(p.latent, 8), heads, p.rows), dim3(256), 0, p.q,
                      p.q_stride, args.nope + args.rope, p.w, (args.nope + args.v) * args.latent, int64_t{1},
                      args.latent, p.nope, p.latent, p.out, p.out_stride, args.latent + args.rope);
      error != cudaSuccess)
    return error;
  return LaunchAfter(launch, RopeKernel, dim3(1, heads, p.rows), dim3(128), 0, p);
}

cudaError_t AbsorbValue(const Launch& launch, const kernels::AbsorbValueArgs& args) {
  if (args.attended.rows == 0 || args.heads == 0) return cudaSuccess;
  if (args.attended.dtype != kernels::DType::kBF16 || args.out.dtype != kernels::DType::kBF16)
    return cudaErrorInvalidValue;
  SkinnyGemm gemm;
  gemm.x = args.attended;
  gemm.x.cols = args.latent;
  gemm.x_head = args.latent;
  gemm.w = reinterpret_cast<const bf16*>(args.w_kv_b) + args.nope * args.latent;
  gemm.outs = args.v;
  gemm.w_stride = args.latent;
  gemm.w_head = (args.nope + args.v) * args.latent;
  gemm.y = args.out;
  gemm.y_head = args.v;
  gemm.heads = args.heads;
  if (Fits(gemm)) return RunSkinny(launch, gemm);
  return LaunchAfter(
      launch, PlainKernel,
      dim3(Blocks(args.v, 8), static_cast<int>(args.heads), static_cast<int>(args.attended.rows)), dim3(256),
      0, Data<bf16>(args.attended), args.attended.stride, args.latent, gemm.w, gemm.w_head, args.latent,
      int64_t{1}, static_cast<int>(args.latent), static_cast<int>(args.v), Data<bf16>(args.out),
      args.out.stride, args.v);
}

}  // namespace kdt::cuda
