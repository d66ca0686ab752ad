// Chooses configurations of the partial kernel for the sequences a launch may have, and queues them and the
// reduce kernel.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/verify_attention/partial.cuh"
#include "kernels/cuda/verify_attention/reduce.cuh"

namespace kdt::cuda {
namespace {

// Below so many keys a split's fixed costs outweigh its share of them: for the small configuration, the
// others, and for several of the large one's tiles, whose partial results are most of what they move.
constexpr int kSmallSplitKeys = 32, kSplitKeys = 48, kTilesSplitKeys = 80;
constexpr float kLog2E = 1.44269504f;

// By query rows a sequence. Two blocks a multiprocessor hide latency; on sm_120 there is room for one.
using Small = VerifyConfig<1, 5, 2>;   // up to 16
using Middle = VerifyConfig<2, 4, 2>;  // up to 32
using Large = TallConfig<2>;           // more, in tiles of 64
// Up to 64 or 128 in a lone sequence of few keys, in tiles of 32: there the queries that every block reads
// and the results of a split are most of what is moved. In the kernel of Large, as the length is not known
// when it is launched.
using Narrow = TallConfig<1, Large::kFullAt>;
constexpr int kNarrowBelow = 9216, kTilesNarrowBelow = 4352;  // keys; the latter for more than 64 query rows
constexpr int kSmallQueries = Small::kTileRows, kMiddleQueries = Middle::kTileRows;

// One launch of a partial kernel: a class, and how many items and query tiles it can have at most.
struct Part {
  int64_t tiles, items;
  int tile_rows;
  cudaError_t (*run)(const Launch& launch, const VerifyParams& params, const VerifyClass& of, int64_t items);
};

template <class C, class N>
cudaError_t RunPartial(const Launch& launch, const VerifyParams& params, const VerifyClass& of,
                       int64_t items) {
  return LaunchAfter(launch, VerifyPartial<C, N>, dim3(static_cast<unsigned>(items)), dim3(C::kThreads),
                     C::kSharedBytes, params, of);
}

// Blocks of C that run at once; 0 if the device takes none.
template <class C, class N>
int Slots(const Launch& launch) {
  static const int blocks = [] {
    int count = 0;
    const bool known = cudaFuncSetAttribute(VerifyPartial<C, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            C::kSharedBytes) == cudaSuccess &&
                       cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, VerifyPartial<C, N>, C::kThreads,
                                                                     C::kSharedBytes) == cudaSuccess;
    return known ? count : 0;
  }();
  return launch.processors * blocks;
}

// What a launch consists of. A captured launch does not know which sequences will come: any number of them up
// to args.sequences may share the rows in any way, so there is a partial kernel for every class that can
// occur. One without sequences ends at once.
class Layout {
 public:
  Layout(const Launch& launch, const kernels::VerifyAttentionArgs& args) : launch_(launch), args_(args) {
    const int64_t most_rows =
        args.max_sequence_rows > 0 ? std::min(args.max_sequence_rows, args.q.rows) : args.q.rows;
    const int64_t most = most_rows * args.heads;
    // A lone sequence has about the rows of its bucket. Among several, some may have few: two classes, as
    // each costs a launch.
    const int64_t least = args.sequences == 1 ? most : args.heads;
    if (least <= kSmallQueries) Add<Small>(1, std::min<int64_t>(most, kSmallQueries));
    if (most <= kSmallQueries) return;
    const int64_t above = classes_.count == 0 ? 1 : kSmallQueries + 1;
    if (most <= kMiddleQueries) {
      Add<Middle>(above, most);
    } else if (args.sequences == 1 && most <= 2 * Large::kTileRows && args.split_keys == 0) {
      Add<Large, Narrow>(above, most);
    } else {
      Add<Large>(above, kQueryLimit);
    }
  }

  cudaError_t Run(const VerifyParams& params) {
    size_t at = 0;
    for (int i = 0; i < classes_.count; ++i) {
      VerifyClass& to = classes_.of[i];
      const int64_t rows = parts_[i].items * parts_[i].tile_rows;
      const auto take = [&](size_t row_bytes) {
        void* memory = static_cast<char*>(launch_.workspace) + at;
        at += rows * row_bytes;
        return memory;
      };
      to.partial = static_cast<uint4*>(take(kLatent * 2));
      to.partial_low = static_cast<uint2*>(take(kLatent));
      to.partial_ml = static_cast<float2*>(take(sizeof(float2)));
    }
    if (at > launch_.workspace_bytes) return cudaErrorInvalidValue;
    int64_t rows_of_tiles = 0;
    for (int i = 0; i < classes_.count; ++i) {
      if (classes_.of[i].slots == 0 || classes_.of[i].slots > kMaxSplits) return cudaErrorInvalidValue;
      if (const cudaError_t error = parts_[i].run(launch_, params, classes_.of[i], parts_[i].items);
          error != cudaSuccess)
        return error;
      rows_of_tiles += parts_[i].tiles * parts_[i].tile_rows;
    }
    // The fewer query tiles, the more splits each has and the more warps share them. One wave of blocks.
    const int64_t rows = args_.q.rows * args_.heads;
    const int64_t tile = parts_[classes_.count - 1].tile_rows;
    if (args_.split_keys > 0)
      return RunReduce<8, 1>(params, rows_of_tiles);  // the order of the sum is part of the bits
    // Longer pieces for one row: better with few keys, where a lane has all its splits in flight (144 in
    // all), than worse with many.
    if (rows <= kSmallQueries / 2) return RunReduce<8, 2>(params, rows_of_tiles);
    if (rows <= kSmallQueries) return RunReduce<8, 4>(params, rows_of_tiles);
    if (rows <= kMiddleQueries) return RunReduce<16, 1>(params, rows_of_tiles);
    if (rows <= tile) return RunReduce<16, 1, true>(params, rows_of_tiles);
    if (rows <= 2 * tile) return RunReduce<8, 1, true>(params, rows_of_tiles);
    return RunReduce<4, 1>(params, rows_of_tiles);
  }

 private:
  static constexpr int64_t kQueryLimit = int64_t{1} << 30;

  // The class of the sequences with min .. max query rows.
  template <class C, class N = void>
  void Add(int64_t min, int64_t max) {
    const int64_t queries = args_.q.rows * args_.heads;
    const int64_t sequences = std::min({args_.sequences, args_.q.rows, queries / std::max(min, args_.heads)});
    // A sequence's last tile may be partly filled.
    const int64_t tiles = max <= C::kTileRows ? sequences : queries / C::kTileRows + sequences;
    VerifyClass& to = classes_.of[classes_.count];
    to.min_queries = static_cast<int>(min);
    to.max_queries = static_cast<int>(max);
    to.tile_shift = C::kTileShift;
    to.narrow_below = std::is_void_v<N> ? 0 : queries <= C::kTileRows ? kNarrowBelow : kTilesNarrowBelow;
    to.slots = Slots<C, N>(launch_);
    to.own_length_only = args_.split_keys > 0;
    to.min_split_keys = C::kTileRows == kSmallQueries ? kSmallSplitKeys
                        : queries <= C::kTileRows     ? kSplitKeys
                                                      : kTilesSplitKeys;
    // No block too many where that is known: one that waits for a place holds up the reduce kernel's start.
    int64_t items = sequences == 1 ? std::max(int64_t{to.slots}, std::is_void_v<N> ? tiles : 2 * tiles)
                                   : to.slots + tiles;
    const int64_t lone =
        (std::min(queries, max) + C::kTileRows - 1) / C::kTileRows;  // tiles, of one sequence
    to.rests = sequences == 1 && !to.own_length_only && 2 * (to.slots % lone) == lone;
    if (to.rests) items += lone;
    if (to.own_length_only) {
      // A sequence is no longer than its table; a split not so short that there would be too many.
      const int64_t shortest = (args_.table_stride + kMaxSplits - 1) / kMaxSplits;
      to.min_split_keys = static_cast<int>(std::max(args_.split_keys, shortest));
      items = tiles * ((args_.table_stride + to.min_split_keys - 1) / to.min_split_keys);
    }
    parts_[classes_.count++] = {tiles, items, C::kTileRows, RunPartial<C, N>};
  }

  template <int kWarps, int kParts, bool kLean = false>
  cudaError_t RunReduce(const VerifyParams& params, int64_t rows_of_tiles) {
    using S = ReduceShape<kWarps, kParts, kLean>;
    const int64_t blocks =
        std::min<int64_t>(rows_of_tiles * 2 * kParts, int64_t{S::kBlocks} * launch_.processors);
    return LaunchAfter(launch_, VerifyReduce<S>, dim3(static_cast<unsigned>(blocks)), dim3(32 * kWarps), 0,
                       params, classes_);
  }

  const Launch& launch_;
  const kernels::VerifyAttentionArgs& args_;
  Part parts_[kMaxClasses];
  VerifyClasses classes_{};
};

}  // namespace

cudaError_t VerifyAttention(const Launch& launch, const kernels::VerifyAttentionArgs& args) {
  if (args.q.rows == 0 || args.sequences == 0 || args.heads == 0) return cudaSuccess;
  const bool fits = args.latent == kLatent && args.rope == kRope && args.q.dtype == kernels::DType::kBF16 &&
                    args.pool.dtype == kernels::DType::kBF16 && args.out.dtype == kernels::DType::kBF16 &&
                    args.q.stride % 8 == 0 && args.pool.stride % 8 == 0 && args.out.stride % 2 == 0;
  if (!fits) return cudaErrorInvalidValue;
  VerifyParams p{};
  p.q = args.q.bf16();
  p.q_stride = args.q.stride;
  p.pool = args.pool.bf16();
  p.pool_stride_bytes = static_cast<int>(args.pool.stride * 2);
  p.out = args.out.bf16();
  p.out_stride = args.out.stride;
  p.heads = static_cast<int>(args.heads);
  p.heads_inverse = 1.0f / static_cast<float>(args.heads);
  p.scale_log2 = args.scale * kLog2E;
  p.sequences = static_cast<int>(args.sequences);
  p.row_begin = args.row_begin;
  p.context_length = args.context_length;
  p.causal = args.causal;
  p.slot_table = args.slot_table;
  p.table_stride = args.table_stride;
  p.ancestor_bits = args.ancestor_bits;
  return Layout(launch, args).Run(p);
}

}  // namespace kdt::cuda
