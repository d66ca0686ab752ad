// Attention of draft blocks over their context: grouped-query, tensor cores, the keys split over the chip.
//
// All query rows of a sequence that share a KV head (block positions x heads of the group: 8 x 8 = 64 for the
// full-size drafter) read the same keys, so a block of four warps takes 64 of them, 16 a warp, against one
// split of the keys, 32 at a time: cp.async into a ring of four tiles, scores, softmax and outputs in
// registers (the scores' accumulators are the next product's operand as they lie). Splits are chosen on the
// device by the sequence's own length, up to what the grid has; a second kernel merges them. What bounds it
// is reading K and V once.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

constexpr int kRows = 64;  // query rows of a block
constexpr int kWarps = kRows / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 32;  // a tile
constexpr int kStages = 4;
constexpr int kMinSplitKeys = 32;
constexpr int kMaxSplits = 512;
constexpr int kMergeWarps = 16, kMergeAhead = 9;
constexpr float kLog2E = 1.44269504f;
constexpr float kNone = -1e30f;  // below every finite score

struct Params {
  kernels::DraftAttentionArgs args;
  int splits;      // of the grid
  float* partial;  // [sequence][kv head][tile][split][kRows][dim]
  float2* ml;      // the same without dim: reference (log2) and sum
};

// The part of the keys a block takes, the same arithmetic in both kernels.
struct Cut {
  int window, context, length, splits;  // of the sequence; length counts the block's own keys
};
__device__ Cut CutOf(const Params& p, int sequence) {
  Cut cut;
  cut.window = p.args.window_begin[sequence];
  cut.context = max(0, p.args.context_length[sequence] - cut.window);
  cut.length = cut.context + static_cast<int>(p.args.block);
  cut.splits = min(p.splits, (cut.length + kMinSplitKeys - 1) / kMinSplitKeys);
  return cut;
}
__device__ int SplitBegin(const Cut& cut, int split) {
  const int tiles = (cut.length + kKeys - 1) / kKeys;
  return min(static_cast<int>(static_cast<int64_t>(tiles) * split / cut.splits) * kKeys, cut.length);
}

template <int kDim>
struct Shape {
  static constexpr int kPitch = kDim * 2 < 128 ? 128 : kDim * 2;  // bytes of a row in shared memory
  static constexpr int kTile = kKeys * kPitch;                    // K or V of a tile
  static constexpr int kSharedBytes = kStages * 2 * kTile;
  static constexpr int kChunks = kDim / 4;      // 16-byte pieces of a key, K and V
  static constexpr int kAtOnce = 32 / kChunks;  // keys a warp loads with one instruction
  static constexpr int kLoads = 8 / kAtOnce;    // instructions a warp and tile
  static_assert(kDim == 32 || kDim == 64 || kDim == 128);
};

// On sm_120 shared memory has room for one block of the widest kind.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif

template <int kDim>
__global__ void __launch_bounds__(kThreads, kBlocks) DraftKernel(const __grid_constant__ Params p) {
  using S = Shape<kDim>;
  const kernels::DraftAttentionArgs& a = p.args;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = SharedAddress(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int group = static_cast<int>(a.heads / a.kv_heads), block = static_cast<int>(a.block);
  const int tiles = (block * group + kRows - 1) / kRows;
  const int tile = blockIdx.x % tiles, kv_head = blockIdx.x / tiles, sequence = blockIdx.y,
            split = blockIdx.z;
  // Lengths, slots and the context's keys: rule 5 of launch.cuh.
  const Cut cut = CutOf(p, sequence);
  if (split >= cut.splits) {
    WaitForPrevious();
    return;
  }
  const int begin = SplitBegin(cut, split), end = SplitBegin(cut, split + 1);
  if (end > cut.context) WaitForPrevious();  // the block's own keys
  const int rounds = (end - begin + kKeys - 1) / kKeys;

  // Loading. A warp brings eight keys of a tile; lane 8 j + n holds where the n-th of them lies in the j-th
  // tile from here: a slot of the pool, or one of the block's own rows as -1 - row. Keys past the end repeat
  // the last one.
  const auto key_of = [&](int n) { return (n / S::kAtOnce * kWarps + warp) * S::kAtOnce + n % S::kAtOnce; };
  const auto places_of = [&](int first_round) {
    const int key = min(begin + (first_round + (lane >> 3)) * kKeys + key_of(lane & 7), end - 1);
    return key < cut.context ? a.slot_table[sequence * a.table_stride + cut.window + key]
                             : -1 - (key - cut.context);
  };
  int places = places_of(0), places_next = places_of(4);
  const int chunk = lane % S::kChunks;
  const bool is_value = chunk >= S::kChunks / 2;
  const int column = chunk % (S::kChunks / 2);  // in 16-byte chunks
  const bf16* const from_pool =
      static_cast<const bf16*>(a.pool.data) + (is_value ? a.kv_heads + kv_head : kv_head) * kDim + column * 8;
  const kernels::Tensor& own = is_value ? a.block_v : a.block_k;
  const bf16* const from_own = static_cast<const bf16*>(own.data) +
                               static_cast<int64_t>(sequence) * block * own.stride + kv_head * kDim +
                               column * 8;
  const auto load = [&](int round) {
    if (round < rounds) {
      if (round % 4 == 0 && round > 0) {
        places = places_next;
        places_next = places_of(round + 4);
      }
      const uint32_t to = base + (round % kStages * 2 + is_value) * S::kTile;
#pragma unroll
      for (int i = 0; i < S::kLoads; ++i) {
        const int n = i * S::kAtOnce + lane / S::kChunks;
        const int64_t place = __shfl_sync(~0u, places, round % 4 * 8 + n);
        const int key = key_of(n);
        CopyAsync16(to + key * S::kPitch + ((column ^ (key & 7)) << 4),
                    place >= 0 ? from_pool + place * a.pool.stride : from_own + (-1 - place) * own.stride);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int r = 0; r < kStages - 1; ++r) load(r);
  WaitForPrevious();

  // Queries, rows g and g + 8 of the warp's sixteen.
  const auto query_row = [&](int row) { return tile * kRows + warp * 16 + row; };
  uint32_t q[kDim / 16][4];
  {
    const auto row_of = [&](int row) -> const uint32_t* {
      const int flat = query_row(row);
      if (flat >= block * group) return nullptr;
      return reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.q.data) +
                                               (static_cast<int64_t>(sequence) * block + flat / group) *
                                                   a.q.stride +
                                               static_cast<int64_t>(kv_head * group + flat % group) * kDim);
    };
    const uint32_t *upper = row_of(g), *lower = row_of(g + 8);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      q[k][0] = upper != nullptr ? upper[k * 8 + t] : 0;
      q[k][1] = lower != nullptr ? lower[k * 8 + t] : 0;
      q[k][2] = upper != nullptr ? upper[k * 8 + 4 + t] : 0;
      q[k][3] = lower != nullptr ? lower[k * 8 + 4 + t] : 0;
    }
  }

  float o[kDim / 8][4] = {};
  float reference[2] = {kNone, kNone}, sum[2] = {0.0f, 0.0f};
  const float scale_log2 = a.scale * kLog2E;
  // ldmatrix: K as it lies, V transposed.
  const int key_row = (lane & 7) + ((lane >> 4) << 3), value_row = (lane & 7) + (((lane >> 3) & 1) << 3);
  for (int round = 0; round < rounds; ++round) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    load(round + kStages - 1);
    const uint32_t keys = base + round % kStages * 2 * S::kTile, values = keys + S::kTile;
    float s[4][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b[4];
        LoadMatrix4(
            b, keys + (n * 16 + key_row) * S::kPitch + (((2 * k + ((lane >> 3) & 1)) ^ (lane & 7)) << 4));
        MmaBf16(s[2 * n], q[k], b[0], b[1]);
        MmaBf16(s[2 * n + 1], q[k], b[2], b[3]);
      }
    }
    const int left = end - begin - round * kKeys;  // keys of this tile that there are
    float top[2] = {reference[0], reference[1]};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = n * 8 + 2 * t + (c & 1) < left ? s[n][c] * scale_log2 : -INFINITY;
        top[c >> 1] = fmaxf(top[c >> 1], s[n][c]);
      }
    }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
      factor[i] = Exp2(reference[i] - top[i]);
      reference[i] = top[i];
      sum[i] *= factor[i];
    }
    uint32_t probabilities[2][4];  // of 16 keys each
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair =
            PackBf16(Exp2(s[n][2 * i] - reference[i]), Exp2(s[n][2 * i + 1] - reference[i]));
        sum[i] += LowBf16(pair) + HighBf16(pair);
        probabilities[n >> 1][2 * (n & 1) + i] = pair;
      }
    }
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o[n][c] *= factor[c >> 1];
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        LoadMatrix4Transposed(
            b, values + (j * 16 + value_row) * S::kPitch + (((2 * n + (lane >> 4)) ^ (lane & 7)) << 4));
        MmaBf16(o[2 * n], probabilities[j], b[0], b[1]);
        MmaBf16(o[2 * n + 1], probabilities[j], b[2], b[3]);
      }
    }
  }

  LaunchDependents();  // what is left is short
  const int64_t first =
      ((static_cast<int64_t>(sequence) * gridDim.x + blockIdx.x) * p.splits + split) * kRows + warp * 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (query_row(g + 8 * i) >= block * group) continue;
    sum[i] += __shfl_xor_sync(0xfu << (lane & ~3), sum[i], 1);
    sum[i] += __shfl_xor_sync(0xfu << (lane & ~3), sum[i], 2);
    const int64_t row = first + g + 8 * i;
    if (t == 0) p.ml[row] = make_float2(reference[i], sum[i]);
    float* const to = p.partial + row * kDim + 2 * t;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
    }
  }
}

// One query row a block; its warps share out the splits, a lane has kDim / 32 neighbouring columns.
template <int kDim>
__global__ void __launch_bounds__(32 * kMergeWarps) MergeKernel(const __grid_constant__ Params p) {
  constexpr int kColumns = kDim / 32;
  const kernels::DraftAttentionArgs& a = p.args;
  __shared__ float merge[kMergeWarps][kDim];
  __shared__ float weights[kMaxSplits], sums[kMergeWarps], tops[kMergeWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = static_cast<int>(a.heads / a.kv_heads), block = static_cast<int>(a.block);
  const int tiles = (block * group + kRows - 1) / kRows;
  const int head = blockIdx.x % a.heads, row = blockIdx.x / static_cast<int>(a.heads);  // of the sequence's
  const int sequence = blockIdx.y, kv_head = head / group;
  const int flat = row * group + head % group;
  LaunchDependents();
  const Cut cut = CutOf(p, sequence);  // rule 5 of launch.cuh
  const int64_t first =
      ((static_cast<int64_t>(sequence) * a.kv_heads * tiles + kv_head * tiles + flat / kRows) * p.splits) *
          kRows +
      flat % kRows;
  const int mine = threadIdx.x;  // a split a thread
  const auto load = [&](int split, float(&v)[kColumns]) {
    const float* from = p.partial + (first + static_cast<int64_t>(split) * kRows) * kDim + lane * kColumns;
    if constexpr (kColumns == 4) {
      *reinterpret_cast<float4*>(v) = __ldcg(reinterpret_cast<const float4*>(from));
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) v[c] = __ldcg(from + c);
    }
  };
  WaitForPrevious();
  float ahead[kMergeAhead][kColumns];  // the first splits' are on their way before their weights are known
#pragma unroll
  for (int i = 0; i < kMergeAhead; ++i) {
    if (warp + i * kMergeWarps < cut.splits) load(warp + i * kMergeWarps, ahead[i]);
  }
  float2 ml = make_float2(kNone, 0.0f);
  if (mine < cut.splits) ml = __ldcg(p.ml + first + static_cast<int64_t>(mine) * kRows);
  float top = ml.x;
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) top = fmaxf(top, tops[i]);
  const float weight = Exp2(ml.x - top);
  if (mine < cut.splits) weights[mine] = weight;
  const float sum = WarpSum(weight * ml.y);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  float acc[kColumns] = {};
  const auto add = [&](int split, const float(&v)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] = fmaf(weights[split], v[c], acc[c]);
  };
#pragma unroll
  for (int i = 0; i < kMergeAhead; ++i) {
    if (warp + i * kMergeWarps < cut.splits) add(warp + i * kMergeWarps, ahead[i]);
  }
#pragma unroll 4
  for (int split = warp + kMergeAhead * kMergeWarps; split < cut.splits; split += kMergeWarps) {
    float v[kColumns];
    load(split, v);
    add(split, v);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) merge[warp][lane * kColumns + c] = acc[c];
  __syncthreads();
  if (threadIdx.x >= kDim) return;
  float total = 0.0f, out = 0.0f;
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) total += sums[i], out += merge[i][threadIdx.x];
  static_cast<bf16*>(
      a.out.data)[(static_cast<int64_t>(sequence) * block + row) * a.out.stride + head * kDim + threadIdx.x] =
      FromFloat<bf16>(out / total);
}

template <int kDim>
cudaError_t Run(const Launch& launch, const kernels::DraftAttentionArgs& args) {
  const int64_t tiles = (args.block * (args.heads / args.kv_heads) + kRows - 1) / kRows;
  const int64_t items = args.sequences * args.kv_heads * tiles;
  constexpr size_t kSplitBytes = kRows * (kDim * sizeof(float) + sizeof(float2));
  // Two blocks a multiprocessor keep enough bytes in flight; what the workspace has room for.
  const int64_t room = static_cast<int64_t>(launch.workspace_bytes / kSplitBytes) / items;
  const int64_t splits =
      std::min({std::max<int64_t>(1, 2 * launch.processors / items), room, int64_t{kMaxSplits}});
  if (splits < 1 || items / args.sequences > 65535 || args.sequences > 65535) return cudaErrorInvalidValue;
  Params p{args, static_cast<int>(splits), static_cast<float*>(launch.workspace), nullptr};
  p.ml = reinterpret_cast<float2*>(p.partial + items * splits * kRows * kDim);
  const cudaError_t error =
      LaunchAfter(launch, DraftKernel<kDim>,
                  dim3(static_cast<unsigned>(args.kv_heads * tiles), static_cast<unsigned>(args.sequences),
                       static_cast<unsigned>(splits)),
                  dim3(kThreads), Shape<kDim>::kSharedBytes, p);
  if (error != cudaSuccess) return error;
  return LaunchAfter(
      launch, MergeKernel<kDim>,
      dim3(static_cast<unsigned>(args.block * args.heads), static_cast<unsigned>(args.sequences)),
      dim3(32 * kMergeWarps), 0, p);
}

}  // namespace

cudaError_t DraftAttention(const Launch& launch, const kernels::DraftAttentionArgs& args) {
  if (args.sequences == 0) return cudaSuccess;
  const auto whole = [](const kernels::Tensor& t) {
    return t.dtype == kernels::DType::kBF16 && t.stride % 8 == 0;
  };
  if (!whole(args.q) || !whole(args.block_k) || !whole(args.block_v) || !whole(args.pool) ||
      args.out.dtype != kernels::DType::kBF16) {
    return cudaErrorInvalidValue;
  }
  switch (args.dim) {
    case 32:
      return Run<32>(launch, args);
    case 64:
      return Run<64>(launch, args);
    case 128:
      return Run<128>(launch, args);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kdt::cuda
