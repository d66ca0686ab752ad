// mla_prepare, q_b and the absorbed query in one launch, for rows so few that each of them is all latency.
//
// A block takes 16 outputs of q_b and holds their weights in registers, an eighth of the inputs a warp,
// before it waits for the kernel in front. Its warps read whole rows of the q latent between them, so the
// norm costs a sum over the warps. Then it is one of its head's blocks for the second product: 64 columns of
// the latent, or the rope part. It needs all of its head's q, from the other blocks of the head: up to 16
// rows by mail (common/mail.cuh), more rows through memory and a count of the blocks that have stored theirs.
// Blocks behind these write the keys.
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
constexpr int kMaxRows = 64, kMailRows = 16;
constexpr int kMaxKeyBlocks = 32;
constexpr int kAloneRows = 16;  // up to them a block has a multiprocessor to itself, where there are enough
constexpr int kLooks = 256;     // most of a microsecond each

struct Params {
  kernels::MlaPrepareArgs prepare;
  AbsorbedQuery absorb;
  const bf16* w;  // [heads * (nope + rope), inputs], rows w_stride apart
  int64_t w_stride;
  int heads, tiles, steps;  // tiles of kOuts outputs a head, steps of 32 inputs a warp
  unsigned* done;           // [heads + 1]: stored tiles of each head; blocks that have seen all of theirs
  // With mail, kQueryState words: blocks that have all of their head's q; the number of the last launch; from
  // word 4 on q on its way between the blocks.
  unsigned* state;
};

template <int kTiles>
struct Shared {
  uint4 absorb[kMaxNope * kPitch / 8];
  uint4 norm[kWarps * kMaxSteps * 4];
  float squares[kWarps][8 * kTiles];
  float sums[kWarps][8 * kTiles][kSumPitch];
  alignas(16) uint16_t q[8 * kTiles <= kMailRows ? 8 * kTiles : 1][kMaxNope + 32];  // with mail
  bool alone;
  unsigned launch;  // this one's number, with mail
};

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

__device__ __forceinline__ void LoadWeights(uint4 (&w)[2 * kMaxSteps], const Params& p, int first_out,
                                            int warp, int lane) {
  const bf16* from = p.w + (first_out + (lane >> 2)) * p.w_stride + warp * p.steps * 32 + 8 * (lane & 3);
#pragma unroll
  for (int s = 0; s < kMaxSteps; ++s) {
    if (s >= p.steps) break;
    w[2 * s] = __ldg(reinterpret_cast<const uint4*>(from + s * 32));
    w[2 * s + 1] = __ldg(reinterpret_cast<const uint4*>(from + s * 32 + 8 * p.w_stride));
  }
}

// Rows of the q latent, 8 kTiles at a time: a lane's share of the inputs of its warp.
template <int kTiles>
struct Inputs {
  uint4 v[kTiles][kMaxSteps];

  __device__ __forceinline__ void Load(const Params& p, int first_row, int warp, int lane) {
    const bf16* const x = static_cast<const bf16*>(p.prepare.qkv.data) + warp * p.steps * 32 + 8 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bf16* from = x + min(first_row + 8 * n + (lane >> 2), p.absorb.rows - 1) * p.prepare.qkv.stride;
#pragma unroll
      for (int s = 0; s < kMaxSteps; ++s)
        if (s < p.steps) v[n][s] = __ldcg(reinterpret_cast<const uint4*>(from + s * 32));
    }
  }
};

__device__ __forceinline__ unsigned* Mail(const Params& p) { return p.state + 4; }
// Of the pair of q at `column` of all heads.
__device__ __forceinline__ int MailIndex(const Params& p, int row, int column) {
  return (row * p.heads * p.tiles * kOuts + column) / 2;
}

// q of all rows at kOuts outputs from first_out on, `in` being the first rows. The norm's weights go into the
// inputs, its factor into the sums.
template <int kTiles, bool kMail>
__device__ __forceinline__ void MakeQ(const Params& p, Shared<kTiles>& shared,
                                      const uint4 (&w)[2 * kMaxSteps], Inputs<kTiles>& in, int first_out,
                                      int warp, int lane) {
  const int g = lane >> 2, t = lane & 3, rows = p.absorb.rows;
  const uint4* const norm = shared.norm + warp * p.steps * 4 + t;
#pragma unroll 1
  for (int first_row = 0; first_row < (kMail ? 1 : rows); first_row += 8 * kTiles) {  // with mail once
    float squares[kTiles] = {}, acc[kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kMaxSteps; ++s) {
      if (s >= p.steps) break;
      const uint4 &low = w[2 * s], &high = w[2 * s + 1];  // outputs g and g + 8
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
      const uint4 weight = norm[s * 4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4& x = in.v[n][s];
        MmaBf16(acc[n], first, MulBf16x2(x.x, weight.x), MulBf16x2(x.y, weight.y));
        MmaBf16(acc[n], second, MulBf16x2(x.z, weight.z), MulBf16x2(x.w, weight.w));
        float v[8];
        Unpack8(v, x);
        squares[n] += Squares8(v);
      }
    }
    if (!kMail && first_row + 8 * kTiles < rows) in.Load(p, first_row + 8 * kTiles, warp, lane);
    if (first_row > 0) __syncthreads();  // the sums before have been read
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      squares[n] += __shfl_xor_sync(~0u, squares[n], 1);
      squares[n] += __shfl_xor_sync(~0u, squares[n], 2);
      if (t == 0) shared.squares[warp][8 * n + g] = squares[n];
#pragma unroll
      for (int c = 0; c < 4; ++c) shared.sums[warp][8 * n + 2 * t + (c & 1)][8 * (c >> 1) + g] = acc[n][c];
    }
    __syncthreads();
    static_assert(8 * kTiles * kOuts / 2 <= kThreads);
    const int row = threadIdx.x / (kOuts / 2), out = threadIdx.x % (kOuts / 2) * 2;
    if (row >= 8 * kTiles || first_row + row >= rows) continue;
    float2 sum = {0.0f, 0.0f};
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      const float2 v = *reinterpret_cast<const float2*>(&shared.sums[k][row][out]);
      sum.x += v.x, sum.y += v.y;
      total += shared.squares[k][row];
    }
    const float factor = rsqrtf(total / static_cast<float>(p.prepare.q_lora) + p.prepare.eps);
    const uint32_t pair = PackBf16(sum.x * factor, sum.y * factor);
    if (kMail) {
      PostPair(Mail(p), MailIndex(p, row, first_out + out), pair, shared.launch);
    } else {
      *reinterpret_cast<uint32_t*>(p.absorb.q + (first_row + row) * p.absorb.q_stride + first_out + out) =
          pair;
    }
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

// The same of all rows, with q from memory.
__device__ __forceinline__ void AbsorbStored(const AbsorbedQuery& p, const uint4* weights, int head,
                                             int first_column, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  // Two tiles of rows at a time: their inputs are on their way together.
#pragma unroll 1
  for (int first_row = 8 * (warp >> 2); first_row < p.rows; first_row += 32) {
    uint4 in[2][kMaxNope / 32];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (first_row + 16 * n >= p.rows) break;
      const bf16* x = p.q + min(first_row + 16 * n + g, p.rows - 1) * p.q_stride +
                      static_cast<int64_t>(head) * (p.nope + p.rope) + 8 * t;
#pragma unroll
      for (int k = 0; k < kMaxNope / 32; ++k)
        if (k * 32 < p.nope) in[n][k] = __ldcg(reinterpret_cast<const uint4*>(x + k * 32));
    }
    Absorb<2>(p, weights, in, head, first_row, first_column, warp, lane);
  }
}

// q of a whole head, by a block that has waited long enough for the others.
template <int kTiles, bool kMail>
__device__ __forceinline__ void MakeOthers(const Params& p, Shared<kTiles>& shared, int head, int warp,
                                           int lane) {
  uint4 w[2 * kMaxSteps];
  Inputs<kTiles> in;
#pragma unroll 1
  for (int other = head * p.tiles; other < (head + 1) * p.tiles; ++other) {
    LoadWeights(w, p, other * kOuts, warp, lane);
    in.Load(p, 0, warp, lane);
    MakeQ<kTiles, kMail>(p, shared, w, in, other * kOuts, warp, lane);
    __syncthreads();
  }
}

// With mail: this block's part of the second product, once its head's q is there. False: after kLooks it is
// not. Warp w of a block with columns brings what its head's tile w has made.
template <int kTiles>
__device__ __forceinline__ bool TakeAndAbsorb(const Params& p, Shared<kTiles>& shared, int head, int tile,
                                              int warp, int lane) {
  static_assert(kMaxNope <= kWarps * kOuts && kOuts == 16);
  const int column_tiles = p.absorb.latent / kColumns, half = p.absorb.rope / 2;
  const int pair = (tile - column_tiles) * kThreads + static_cast<int>(threadIdx.x);
  const bool columns = tile < column_tiles, rotates = !columns && pair < p.absorb.rows * half;
  const unsigned launch = shared.launch;
  bool there = false;
  uint32_t bits = 0;
  if (columns) {
    // Lanes 4 i .. 4 i + 3 have a row's sixteen.
    uint2 in[kTiles];
    bool mine[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      mine[n] = warp * kOuts < p.absorb.nope && 8 * n + (lane >> 2) < p.absorb.rows;
#pragma unroll 1
    for (int look = 0; look < kLooks && !there; ++look) {
      there = true;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (mine[n])
          there =
              TakePairs2(in[n], Mail(p),
                         MailIndex(p, 8 * n + (lane >> 2), (head * p.tiles + warp) * kOuts + 4 * (lane & 3)),
                         launch) &&
              there;
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (mine[n])
        *reinterpret_cast<uint2*>(&shared.q[8 * n + (lane >> 2)][warp * kOuts + 4 * (lane & 3)]) = in[n];
    }
  } else {
    const int index = MailIndex(p, pair / half, head * p.tiles * kOuts + p.absorb.nope + 2 * (pair % half));
#pragma unroll 1
    for (int look = 0; look < kLooks && !there; ++look)
      there = !rotates || TakePair(bits, Mail(p), index, launch);
  }
  if (__syncthreads_or(!there)) return false;
  if (columns && 8 * (warp >> 2) < p.absorb.rows) {
    uint4 in[1][kMaxNope / 32];
#pragma unroll
    for (int k = 0; k < kMaxNope / 32; ++k) {
      if (k * 32 < p.absorb.nope)
        in[0][k] = *reinterpret_cast<const uint4*>(
            &shared.q[8 * (warp >> 2) % (8 * kTiles) + (lane >> 2)][8 * (lane & 3) + k * 32]);
    }
    Absorb<1>(p.absorb, shared.absorb, in, head, 8 * (warp >> 2), tile * kColumns, warp, lane);
  }
  if (rotates) {
    *reinterpret_cast<uint32_t*>(RopeOut(p.absorb, head, pair / half, pair % half)) =
        Rotated(bits, reinterpret_cast<const float2*>(shared.absorb)[threadIdx.x]);
  }
  // The last block that has used the launch's number leaves it to the next launch.
  if (threadIdx.x == kThreads - 1 && atomicAdd(p.state, 1u) == static_cast<unsigned>(p.heads * p.tiles) - 1)
    p.state[0] = 0, p.state[1] = launch;
  return true;
}

// The same by a block that has waited long enough: it makes its head's q itself.
template <int kTiles>
__device__ __noinline__ void MakeOthersAndAbsorb(const Params& p, Shared<kTiles>& shared, int head, int tile,
                                                 int warp, int lane) {
  MakeOthers<kTiles, true>(p, shared, head, warp, lane);
  while (!TakeAndAbsorb(p, shared, head, tile, warp, lane)) {
  }
}

template <int kTiles, bool kMail>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 2 : 1)
    MlaQueryKernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) Shared<kTiles> shared;
  LaunchDependents();
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int blocks = p.heads * p.tiles, rows = p.absorb.rows;
  if (static_cast<int>(blockIdx.x) >= blocks) {
    WaitForPrevious();
    for (int row = blockIdx.x - blocks; row < rows; row += gridDim.x - blocks)
      WriteKey(p.prepare, row, &shared.squares[0][0]);
    return;
  }
  const int head = blockIdx.x / p.tiles, tile = blockIdx.x - head * p.tiles;
  const int column_tiles = p.absorb.latent / kColumns;
  for (int i = threadIdx.x; i < kWarps * p.steps * 4; i += kThreads)
    CopyAsync16(SharedAddress(shared.norm + i), p.prepare.q_norm + i * 8);
  asm volatile("cp.async.commit_group;" ::: "memory");
  uint4 w[2 * kMaxSteps];
  LoadWeights(w, p, blockIdx.x * kOuts, warp, lane);
  // The second product's weights, or in their place the angle of this thread's first pair: a head's blocks
  // without columns share out its rope part.
  const int half = p.absorb.rope / 2, pairs = rows * half;
  const int first_pair = (tile - column_tiles) * kThreads + static_cast<int>(threadIdx.x);
  float2& first_angle = reinterpret_cast<float2*>(shared.absorb)[threadIdx.x];
  if (tile < column_tiles) {
    const bf16* from = p.absorb.w +
                       static_cast<int64_t>(head) * (p.absorb.nope + p.absorb.v) * p.absorb.latent +
                       tile * kColumns;
    for (int i = threadIdx.x; i < p.absorb.nope * (kColumns / 8); i += kThreads) {
      const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
      CopyAsync16(SharedAddress(shared.absorb) + (row * kPitch + chunk * 8) * 2,
                  from + static_cast<int64_t>(row) * p.absorb.latent + chunk * 8);
    }
  } else if (first_pair < pairs) {
    first_angle = AngleOf(p.absorb, first_pair / half, first_pair % half);  // positions: rule 5 of launch.cuh
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  WaitForPrevious();
  Inputs<kTiles> in;
  in.Load(p, 0, warp, lane);
  if (kMail && threadIdx.x == 0) {
    const unsigned launch = LoadRelaxedDevice(p.state + 1) + 1;
    shared.launch = launch + (launch == 0);  // mail never written has zero
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  MakeQ<kTiles, kMail>(p, shared, w, in, blockIdx.x * kOuts, warp, lane);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (kMail) {
    if (!TakeAndAbsorb(p, shared, head, tile, warp, lane))
      MakeOthersAndAbsorb(p, shared, head, tile, warp, lane);
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(p.done + head, 1u);
    int looks = 0;
    while (LoadAcquireDevice(p.done + head) < static_cast<unsigned>(p.tiles) && ++looks < kLooks) {
    }
    shared.alone = looks == kLooks;
    // The last to have seen its head's blocks cleans up: nobody looks any more.
    if (atomicAdd(p.done + p.heads, 1u) == static_cast<unsigned>(blocks) - 1) {
      for (int i = 0; i <= p.heads; ++i) p.done[i] = 0;
    }
  }
  __syncthreads();
  if (shared.alone) MakeOthers<kTiles, kMail>(p, shared, head, warp, lane);
  if (tile < column_tiles) {
    AbsorbStored(p.absorb, shared.absorb, head, tile * kColumns, warp, lane);
    return;
  }
  const int step = (p.tiles - column_tiles) * kThreads;
  for (int pair = first_pair; pair < pairs; pair += step) {
    const int row = pair / half, i = pair % half;
    RotatePair(p.absorb, head, row, i, pair == first_pair ? first_angle : AngleOf(p.absorb, row, i));
  }
}

}  // namespace

cudaError_t MlaQuery(const Launch& launch, const kernels::MlaQueryArgs& args) {
  const kernels::MlaPrepareArgs& prepare = args.prepare;
  const kernels::AbsorbQueryArgs& absorb = args.absorb;
  const auto aligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  Params p;
  p.prepare = prepare;
  p.absorb = MakeAbsorbedQuery(absorb);
  p.w = Data<bf16>(args.w_q_b);
  p.w_stride = args.w_q_b.stride;
  p.heads = static_cast<int>(absorb.heads);
  p.tiles = static_cast<int>((absorb.nope + absorb.rope) / kOuts);
  p.steps = static_cast<int>(prepare.q_lora / (32 * kWarps));
  p.done = launch.counters;
  p.state = launch.counters + kCounters + kMoeState;
  const bool fits =
      prepare.qkv.rows > 0 && prepare.qkv.rows <= kMaxRows && absorb.q.rows == prepare.qkv.rows &&
      args.w_q_b.rows == absorb.heads * (absorb.nope + absorb.rope) && p.heads > 0 && p.heads < kCounters &&
      prepare.qkv.dtype == kernels::DType::kBF16 && prepare.pool.dtype == kernels::DType::kBF16 &&
      absorb.q.dtype == kernels::DType::kBF16 && absorb.out.dtype == kernels::DType::kBF16 &&
      args.w_q_b.dtype == kernels::DType::kBF16 && prepare.q_lora % (32 * kWarps) == 0 &&
      p.steps <= kMaxSteps && prepare.q_lora == args.w_q_b.cols && prepare.latent % 8 == 0 &&
      prepare.latent / 8 <= kThreads && prepare.rope % 2 == 0 && prepare.rope / 2 <= kThreads &&
      absorb.positions != nullptr && (absorb.nope + absorb.rope) % kOuts == 0 && absorb.nope % 32 == 0 &&
      absorb.nope <= kMaxNope && absorb.rope % 8 == 0 && absorb.latent % kColumns == 0 &&
      absorb.latent / kColumns < p.tiles && aligned(prepare.qkv.data, prepare.qkv.stride) &&
      aligned(prepare.pool.data, prepare.pool.stride) && aligned(prepare.q_norm, 0) &&
      aligned(prepare.kv_norm, 0) && aligned(p.w, p.w_stride) && aligned(absorb.w_kv_b, 0) &&
      aligned(absorb.q.data, absorb.q.stride) && aligned(absorb.out.data, absorb.out.stride);
  if (!fits) {
    cudaError_t error = MlaPrepare(launch, prepare);
    if (error == cudaSuccess)
      error = Gemm(launch, {prepare.qkv.Columns(0, prepare.q_lora), args.w_q_b, absorb.q});
    return error == cudaSuccess ? AbsorbQuery(launch, absorb) : error;
  }
  const int rows = p.absorb.rows;
  const dim3 grid(p.heads * p.tiles + std::min(rows, kMaxKeyBlocks));
  // A thread of the blocks without columns has one pair at most.
  const int64_t pairs = rows * (p.absorb.rope / 2);
  const bool mail = rows <= kMailRows && rows * static_cast<int64_t>(args.w_q_b.rows) <= kQueryMailWords &&
                    pairs <= (p.tiles - absorb.latent / kColumns) * kThreads;
  const auto kernel = rows <= 8 && mail    ? MlaQueryKernel<1, true>
                      : rows <= 8          ? MlaQueryKernel<1, false>
                      : rows <= 16 && mail ? MlaQueryKernel<2, true>
                      : rows <= 16         ? MlaQueryKernel<2, false>
                                           : MlaQueryKernel<4, false>;
  // More shared memory than it uses, so that two do not fit; the next kernel still does. Not where blocks
  // would have to wait for a place, and those of their heads for them.
  const bool alone = rows <= kAloneRows && static_cast<int>(grid.x) <= launch.processors && HoldsTwoLargest();
  const size_t more = alone ? SharedOfMultiprocessor() / 2 - sizeof(Shared<1>) : 0;
  return LaunchAfter(launch, kernel, grid, dim3(kThreads), more, p);
}

}  // namespace kdt::cuda
