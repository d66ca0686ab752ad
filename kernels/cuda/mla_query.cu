// mla_prepare, q_b and the absorbed query in one launch, for rows so few that each of them is all latency.
//
// A block takes 16 outputs of q_b, whose weights are on the chip before it waits for the kernel in front, an
// eighth of the inputs a warp. Its warps read whole rows of the q latent between them, so the norm costs a
// sum over the warps. Outputs of the rope part are rotated where they are made. A block of the others sends
// them by mail (common/mail.cuh), and is then one of its head's blocks for the second product, 64 columns of
// the latent, which needs all of its head's q. Blocks behind these write the keys.
//
// Nobody relies on how many blocks are resident at once (ranks may share a GPU): a block that has looked for
// the others long enough makes their outputs itself, the same bits to the same places.
#include <algorithm>

#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/mail.cuh"
#include "kernels/cuda/mla_rope.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMaxSteps = 6;   // of 32 inputs a warp
constexpr int kOuts = 16;      // of a block in the first product
constexpr int kColumns = 64;   // of a block in the second
constexpr int kMaxNope = 128;  // its inputs
constexpr int kPitch = kColumns + 8;
constexpr int kSumPitch = kOuts + 4;
constexpr int kMaxRows = 32, kMaxLaunches = 2;  // rows of a launch
constexpr int kLooks = 256;                     // most of a microsecond each

struct Params {
  kernels::MlaPrepareArgs prepare;
  AbsorbedQuery absorb;
  const bf16* w;  // [heads * (nope + rope), inputs], rows w_stride apart
  int64_t w_stride;
  int heads, tiles, steps;  // tiles of kOuts outputs a head, steps of 32 inputs a warp
  float per_input;          // 1 / q_lora
  unsigned* state;          // kQueryState words
};

// Above 8 rows weights wait in shared memory, so that the registers leave room for the next kernel's blocks.
template <int kTiles>
inline constexpr bool kInRegisters = kTiles == 1;

template <int kTiles>
struct WarpShared {
  union {
    uint4 w[kInRegisters<kTiles> ? 1 : 2 * kMaxSteps][32];
    float sums[8 * kTiles][kSumPitch];  // when the weights have been used
  };
  uint4 norm[kMaxSteps * 4];
  float squares[8 * kTiles];
};

template <int kTiles>
struct Shared {
  uint4 absorb[kMaxNope * kPitch / 8];
  WarpShared<kTiles> warps[kWarps];
  alignas(16) uint16_t q[8 * kTiles][kMaxNope + 32];
  float key[32];
  unsigned launch;  // this one's number
};
static_assert(sizeof(Shared<4>) <= 101376);

// The key of one row: kv norm and rope, as MlaPrepare.
__device__ __forceinline__ void WriteKey(const kernels::MlaPrepareArgs& p, int row, float* shared) {
  const int64_t slot = p.slots[row];
  const bf16* const from = static_cast<const bf16*>(p.qkv.data) + row * p.qkv.stride + p.q_lora;
  bf16* const to = static_cast<bf16*>(p.pool.data) + slot * p.pool.stride;
  const int chunks = static_cast<int>(p.latent / 8), chunk = threadIdx.x;
  float v[8] = {};
  if (chunk < chunks) Load8(v, from + chunk * 8);
  const float sum = BlockSum(Squares8(v), shared);
  if (slot < 0) return;
  if (chunk < chunks) {
    Scale8<bf16>(v, rsqrtf(sum / static_cast<float>(p.latent) + p.eps),
                 reinterpret_cast<const uint4*>(p.kv_norm)[chunk]);
    Store8(to + chunk * 8, v);
  }
  const int pair = static_cast<int>(threadIdx.x) - (kThreads - static_cast<int>(p.rope / 2));
  if (pair >= 0) {
    Rotate(from + p.latent + 2 * pair, to + p.latent + 2 * pair,
           AngleOf(p.positions[row], p.inv_freq[pair], p.attention_factor));
  }
}

// A lane's share of the weights of a block's outputs: of each of its warp's steps 16 bytes of output g and of
// output g + 8.
template <int kTiles>
struct Weights {
  uint4 v[kInRegisters<kTiles> ? 2 * kMaxSteps : 1];

  __device__ __forceinline__ void Load(const Params& p, WarpShared<kTiles>& shared, int first_out, int warp,
                                       int lane) {
    const bf16* from = p.w + (first_out + (lane >> 2)) * p.w_stride + warp * p.steps * 32 + 8 * (lane & 3);
#pragma unroll
    for (int s = 0; s < kMaxSteps; ++s) {
      if (s >= p.steps) break;
      const bf16 *low = from + s * 32, *high = low + 8 * p.w_stride;
      if constexpr (kInRegisters<kTiles>) {
        v[2 * s] = __ldg(reinterpret_cast<const uint4*>(low));
        v[2 * s + 1] = __ldg(reinterpret_cast<const uint4*>(high));
      } else {
        CopyAsync16(SharedAddress(&shared.w[2 * s][lane]), low);
        CopyAsync16(SharedAddress(&shared.w[2 * s + 1][lane]), high);
      }
    }
  }
  // The norm's weights go into them.
  __device__ __forceinline__ uint4 Get(const WarpShared<kTiles>& shared, int i, int lane,
                                       const uint4& norm) const {
    uint4 w;
    if constexpr (kInRegisters<kTiles>)
      w = v[i];
    else
      w = shared.w[i][lane];
    return {MulBf16x2(w.x, norm.x), MulBf16x2(w.y, norm.y), MulBf16x2(w.z, norm.z), MulBf16x2(w.w, norm.w)};
  }
};

// Rows of the q latent: a lane's share of the inputs of its warp, kAhead steps at a time.
template <int kTiles>
struct Inputs {
  static constexpr int kAhead = kTiles == 4 ? 3 : kMaxSteps;
  const bf16* x;
  int from[kTiles];
  uint4 v[kTiles][kAhead];

  __device__ __forceinline__ void Load(const Params& p, int warp, int lane) {
    x = static_cast<const bf16*>(p.prepare.qkv.data) + warp * p.steps * 32 + 8 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      from[n] = min(8 * n + (lane >> 2), p.absorb.rows - 1) * static_cast<int>(p.prepare.qkv.stride);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (s < p.steps) LoadStep(s);
    }
  }
  __device__ __forceinline__ void LoadStep(int s) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      v[n][s % kAhead] = __ldcg(reinterpret_cast<const uint4*>(x + from[n] + s * 32));
  }
};

__device__ __forceinline__ unsigned* Mail(const Params& p) { return p.state + kQueryFront; }
// Of the pair of q at `column` of all heads: what a block sends is in a piece.
__device__ __forceinline__ int MailIndex(int row, int column) {
  return ((column / kOuts * kMaxRows + row) * kOuts + column % kOuts) / 2;
}

// Of the threads behind the first product each has two neighbouring outputs of a row.
__device__ __forceinline__ int RowOfThread() { return threadIdx.x / (kOuts / 2); }
__device__ __forceinline__ int OutOfThread() { return threadIdx.x % (kOuts / 2) * 2; }

// q of all rows at a head's outputs tile * kOuts and on: by mail or, of the rope part, rotated to where it is
// wanted. The norm's weights go into those of q_b, its factor into the sums.
template <int kTiles>
__device__ __forceinline__ void MakeQ(const Params& p, Shared<kTiles>& shared, const Weights<kTiles>& w,
                                      Inputs<kTiles>& in, int head, int tile, int warp, int lane,
                                      float2 angle = {}) {
  const int g = lane >> 2, t = lane & 3;
  WarpShared<kTiles>& mine = shared.warps[warp];
  float squares[kTiles] = {}, acc[kTiles][4] = {};
#pragma unroll
  for (int s = 0; s < kMaxSteps; ++s) {
    if (s >= p.steps) break;
    const uint4 norm = mine.norm[s * 4 + t];
    const uint4 low = w.Get(mine, 2 * s, lane, norm), high = w.Get(mine, 2 * s + 1, lane, norm);
    const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint4& x = in.v[n][s % in.kAhead];
      MmaBf16(acc[n], first, x.x, x.y);
      MmaBf16(acc[n], second, x.z, x.w);
      float v[8];
      Unpack8(v, x);
      squares[n] += Squares8(v);
    }
    if (s + in.kAhead < kMaxSteps && s + in.kAhead < p.steps) in.LoadStep(s + in.kAhead);
  }
  if (!kInRegisters<kTiles>) __syncwarp();  // the sums take the weights' place
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    squares[n] += __shfl_xor_sync(~0u, squares[n], 1);
    squares[n] += __shfl_xor_sync(~0u, squares[n], 2);
    if (t == 0) mine.squares[8 * n + g] = squares[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) mine.sums[8 * n + 2 * t + (c & 1)][8 * (c >> 1) + g] = acc[n][c];
  }
  __syncthreads();
  static_assert(8 * kTiles * kOuts / 2 <= kThreads);
  const int row = RowOfThread(), out = OutOfThread();
  if (row >= p.absorb.rows) return;
  float2 sum = {0.0f, 0.0f};
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    const float2 v = *reinterpret_cast<const float2*>(&shared.warps[k].sums[row][out]);
    sum.x += v.x, sum.y += v.y;
    total += shared.warps[k].squares[row];
  }
  const float factor = rsqrtf(total * p.per_input + p.prepare.eps);
  const uint32_t pair = PackBf16(sum.x * factor, sum.y * factor);
  const int in_rope = tile * kOuts + out - p.absorb.nope;
  if (in_rope < 0) {
    PostPair(Mail(p), MailIndex(row, (head * p.tiles + tile) * kOuts + out), pair, shared.launch);
  } else {
    *reinterpret_cast<uint32_t*>(RopeOut(p.absorb, head, row, in_rope / 2)) = Rotated(pair, angle);
  }
}

// kColumns columns from first_column on of the absorbed query, of the rows 8 (warp / 4) + 16 n + g from
// first_row on; a lane's inputs are the 16 bytes 8 t of each 32, as in mla_absorb.cu.
template <int kEach>
__device__ __forceinline__ void Absorb(const AbsorbedQuery& p, const uint4* weights,
                                       const uint4 (&in)[kEach][kMaxNope / 32], int head, int first_row,
                                       int first_column, int warp, int lane) {
  const int line = 8 * ((lane & 7) >> 1) + (lane & 1) + 2 * (lane >> 4);
  const uint32_t from = SharedAddress(weights) + (line * kPitch + (warp & 3) * 16 + 8 * (lane >> 3 & 1)) * 2;
  float acc[kEach][4] = {};
#pragma unroll
  for (int k = 0; k < kMaxNope / 32; ++k) {
    if (k * 32 >= p.nope) break;
    uint32_t first[4], second[4];
    LoadMatrix4Transposed(first, from + k * 32 * kPitch * 2);
    LoadMatrix4Transposed(second, from + (k * 32 + 4) * kPitch * 2);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      MmaBf16(acc[n], first, in[n][k].x, in[n][k].y);
      MmaBf16(acc[n], second, in[n][k].z, in[n][k].w);
    }
  }
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    if (first_row + 16 * n < p.rows)
      StoreAbsorbed(p, acc[n], head, first_row + 16 * n, first_column + (warp & 3) * 16, lane);
  }
}

// This block's columns of the second product, once its head's q is there. False: after kLooks it is not.
// Warp w brings what its head's tile w has made.
template <int kTiles>
__device__ __forceinline__ bool TakeAndAbsorb(const Params& p, Shared<kTiles>& shared, int head, int tile,
                                              int warp, int lane) {
  static_assert(kMaxNope <= kWarps * kOuts && kOuts == 16);
  // Lanes 4 i .. 4 i + 3 have a row's sixteen.
  uint2 in[kTiles];
  bool mine[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    mine[n] = warp * kOuts < p.absorb.nope && 8 * n + (lane >> 2) < p.absorb.rows;
  bool there = false;
#pragma unroll 1
  for (int look = 0; look < kLooks && !there; ++look) {
    there = true;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (mine[n])
        there = TakePairs2(in[n], Mail(p),
                           MailIndex(8 * n + (lane >> 2), (head * p.tiles + warp) * kOuts + 4 * (lane & 3)),
                           shared.launch) &&
                there;
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (mine[n])
      *reinterpret_cast<uint2*>(&shared.q[8 * n + (lane >> 2)][warp * kOuts + 4 * (lane & 3)]) = in[n];
  }
  if (__syncthreads_or(!there)) return false;
  constexpr int kEach = (kTiles + 1) / 2;
  const int first_row = 8 * (warp >> 2);
  if (first_row >= p.absorb.rows) return true;
  uint4 q[kEach][kMaxNope / 32];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
#pragma unroll
    for (int k = 0; k < kMaxNope / 32; ++k) {
      if (k * 32 < p.absorb.nope)
        q[n][k] = *reinterpret_cast<const uint4*>(
            &shared.q[(first_row + 16 * n) % (8 * kTiles) + (lane >> 2)][8 * (lane & 3) + k * 32]);
    }
  }
  Absorb<kEach>(p.absorb, shared.absorb, q, head, first_row, tile * kColumns, warp, lane);
  return true;
}

// The same by a block that has waited long enough: it makes its head's q itself.
template <int kTiles>
__device__ __noinline__ void MakeOthersAndAbsorb(const Params& p, Shared<kTiles>& shared, int head, int tile,
                                                 int warp, int lane) {
  Weights<kTiles> w;
  Inputs<kTiles> in;
#pragma unroll 1
  for (int other = 0; other * kOuts < p.absorb.nope; ++other) {
    w.Load(p, shared.warps[warp], (head * p.tiles + other) * kOuts, warp, lane);
    in.Load(p, warp, lane);
    CopyAsyncWait();
    MakeQ(p, shared, w, in, head, other, warp, lane);
    __syncthreads();
  }
  while (!TakeAndAbsorb(p, shared, head, tile, warp, lane)) {
  }
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2) MlaQueryKernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 room[];
  Shared<kTiles>& shared = *reinterpret_cast<Shared<kTiles>*>(room);
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int blocks = p.heads * p.tiles, rows = p.absorb.rows;
  if (static_cast<int>(blockIdx.x) >= blocks) {
    WaitForPrevious();
    for (int row = blockIdx.x - blocks; row < rows; row += gridDim.x - blocks)
      WriteKey(p.prepare, row, shared.key);
    return;
  }
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  // A warp's part of the norm's weights, which nobody else reads.
  if (lane < p.steps * 4)
    CopyAsync16(SharedAddress(shared.warps[warp].norm + lane),
                p.prepare.q_norm + (warp * p.steps * 4 + lane) * 8);
  Weights<kTiles> w;
  w.Load(p, shared.warps[warp], blockIdx.x * kOuts, warp, lane);
  CopyAsyncCommit();
  const bool columns = tile * kColumns < p.absorb.latent;
  if (columns) {
    const bf16* from = p.absorb.w +
                       static_cast<int64_t>(head) * (p.absorb.nope + p.absorb.v) * p.absorb.latent +
                       tile * kColumns;
    for (int i = threadIdx.x; i < p.absorb.nope * (kColumns / 8); i += kThreads) {
      const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
      CopyAsync16(SharedAddress(shared.absorb) + (row * kPitch + chunk * 8) * 2,
                  from + static_cast<int64_t>(row) * p.absorb.latent + chunk * 8);
    }
  }
  CopyAsyncCommit();
  const int in_rope = tile * kOuts + OutOfThread() - p.absorb.nope;
  float2 angle = {};
  if (in_rope >= 0 && RowOfThread() < rows)
    angle = AngleOf(p.absorb, RowOfThread(), in_rope / 2);  // positions: rule 5 of launch.cuh
  WaitForPrevious();
  Inputs<kTiles> in;
  in.Load(p, warp, lane);
  if (threadIdx.x == 0) {
    const unsigned launch = LoadRelaxedDevice(p.state + kQueryNumber) + 1;
    shared.launch = launch + (launch == 0);  // mail never written has zero
  }
  CopyAsyncWaitGroups<1>();
  __syncwarp();
  MakeQ(p, shared, w, in, head, tile, warp, lane, angle);
  // The last block that has read the launch's number leaves it to the next launch. It is known to be the last
  // when nothing waits for this thread any more.
  unsigned readers = 0;
  if (threadIdx.x == 0) readers = atomicAdd(p.state + kQueryReaders, 1u);
  if (columns) {
    CopyAsyncWaitGroups<0>();
    if (!TakeAndAbsorb(p, shared, head, tile, warp, lane))
      MakeOthersAndAbsorb(p, shared, head, tile, warp, lane);
  }
  if (threadIdx.x == 0 && readers == static_cast<unsigned>(blocks) - 1)
    p.state[kQueryReaders] = 0, p.state[kQueryNumber] = shared.launch;
}

// Rows first .. first + rows - 1 of the op.
cudaError_t LaunchRows(const Launch& launch, const kernels::MlaQueryArgs& args, int64_t first, int64_t rows) {
  Params p;
  p.prepare = args.prepare;
  p.prepare.qkv = args.prepare.qkv.Rows(first, rows);
  p.prepare.positions += first;
  p.prepare.slots += first;
  kernels::AbsorbQueryArgs absorb = args.absorb;
  absorb.q = absorb.q.Rows(first, rows);
  absorb.out = absorb.out.Rows(first, rows);
  absorb.positions += first;
  p.absorb = MakeAbsorbedQuery(absorb);
  p.w = Data<bf16>(args.w_q_b);
  p.w_stride = args.w_q_b.stride;
  p.heads = static_cast<int>(absorb.heads);
  p.tiles = static_cast<int>((absorb.nope + absorb.rope) / kOuts);
  p.steps = static_cast<int>(args.prepare.q_lora / (32 * kWarps));
  p.per_input = 1.0f / static_cast<float>(args.prepare.q_lora);
  p.state = launch.counters + kCounters + kMoeState;
  const dim3 grid(p.heads * p.tiles + static_cast<int>(rows));
  // More shared memory than it uses, so that two do not fit; the next kernel still does. Not where blocks
  // would have to wait for a place, and those of their heads for them.
  const bool alone = static_cast<int>(grid.x) <= launch.processors && HoldsTwoLargest();
  const size_t least = alone ? SharedOfMultiprocessor() / 2 : 0;
  const auto run = [&](auto* kernel, size_t shared) {
    return LaunchAfter(launch, kernel, grid, dim3(kThreads), std::max(shared, least), p);
  };
  if (rows <= 8) return run(MlaQueryKernel<1>, sizeof(Shared<1>));
  if (rows <= 16) return run(MlaQueryKernel<2>, sizeof(Shared<2>));
  return run(MlaQueryKernel<4>, sizeof(Shared<4>));
}

}  // namespace

cudaError_t MlaQuery(const Launch& launch, const kernels::MlaQueryArgs& args) {
  const kernels::MlaPrepareArgs& prepare = args.prepare;
  const kernels::AbsorbQueryArgs& absorb = args.absorb;
  const auto aligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  const int64_t rows = prepare.qkv.rows, head_outs = absorb.nope + absorb.rope,
                outs = absorb.heads * head_outs;
  const bool fits =
      rows > 0 && rows <= kMaxRows * kMaxLaunches && absorb.q.rows == rows && args.w_q_b.rows == outs &&
      absorb.heads > 0 && prepare.qkv.dtype == kernels::DType::kBF16 &&
      prepare.pool.dtype == kernels::DType::kBF16 && absorb.q.dtype == kernels::DType::kBF16 &&
      absorb.out.dtype == kernels::DType::kBF16 && args.w_q_b.dtype == kernels::DType::kBF16 &&
      prepare.q_lora % (32 * kWarps) == 0 && prepare.q_lora <= 32 * kWarps * kMaxSteps &&
      prepare.q_lora == args.w_q_b.cols && prepare.latent % 8 == 0 && prepare.latent / 8 <= kThreads &&
      prepare.rope % 2 == 0 && prepare.rope / 2 <= kThreads && absorb.positions != nullptr &&
      head_outs % kOuts == 0 && absorb.nope % 32 == 0 && absorb.nope <= kMaxNope && absorb.rope % 8 == 0 &&
      absorb.latent % kColumns == 0 && absorb.latent / kColumns <= head_outs / kOuts &&
      kMaxRows * outs <= kQueryMailWords && aligned(prepare.qkv.data, prepare.qkv.stride) &&
      aligned(prepare.pool.data, prepare.pool.stride) && aligned(prepare.q_norm, 0) &&
      aligned(prepare.kv_norm, 0) && aligned(args.w_q_b.data, args.w_q_b.stride) &&
      aligned(absorb.w_kv_b, 0) && aligned(absorb.q.data, absorb.q.stride) &&
      aligned(absorb.out.data, absorb.out.stride);
  if (!fits) {
    cudaError_t error = MlaPrepare(launch, prepare);
    if (error == cudaSuccess)
      error = Gemm(launch, {prepare.qkv.Columns(0, prepare.q_lora), args.w_q_b, absorb.q});
    return error == cudaSuccess ? AbsorbQuery(launch, absorb) : error;
  }
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < rows && error == cudaSuccess; first += kMaxRows)
    error = LaunchRows(launch, args, first, std::min<int64_t>(rows - first, kMaxRows));
  return error;
}

}  // namespace kdt::cuda
