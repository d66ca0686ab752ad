// Cuts the work of a launch into items, on the device, from the lengths alone: nothing is re-captured when they change.
//
// A sequence with r rows has tiles = ceil(r * heads / tile_rows) query tiles and L = context + r keys. It gets
//   splits = clamp(floor(slots * L / sum over sequences of tiles * L), 1, ceil(L / min_split_keys))
// so that all items together fill the chip once (a lone sequence takes it whole) and the sum of tiles * splits never
// exceeds slots + tiles, which is what the partial buffers are sized by. Items of one sequence are ordered split-major, so
// the query tiles that read the same keys run next to each other and share them in L2.
#pragma once

#include "kernels/cuda/verify_attention/params.h"

namespace kdt::cuda {

struct Item {
  int sequence;     // -1: no such item
  int first_item;   // the sequence's first item
  int tile, tiles;  // query tile within the sequence
  int splits;
  int row0, rows;   // the sequence's rows
  int context;
  int begin, end;  // keys of the split (by_tile false only)
};

// Keys [begin, end) of split `split` of `splits` over `length` keys are cut at whole tiles of keys.
__device__ inline int SplitBegin(int length, int split, int splits) {
  long long units = (length + kTileKeys - 1) / kTileKeys;
  int begin = static_cast<int>(units * split / splits) * kTileKeys;
  return min(begin, length);
}

template <int kTileRows>
struct Planner {
  const VerifyParams& p;
  unsigned long long weight;  // sum of tiles * L

  // One whole warp calls everything here.
  __device__ explicit Planner(const VerifyParams& params) : p(params), weight(0) {
    for (int s0 = 0; s0 < p.sequences; s0 += 32) {
      int tiles, length;
      Sizes(s0 + (threadIdx.x & 31), &tiles, &length);
      weight += static_cast<unsigned long long>(tiles) * length;
    }
    for (int d = 16; d > 0; d >>= 1) weight += __shfl_xor_sync(~0u, weight, d);
  }

  __device__ void Sizes(int s, int* tiles, int* length) const {
    *tiles = 0;
    *length = 0;
    if (s < p.sequences) {
      int rows = p.row_begin[s + 1] - p.row_begin[s];
      if (rows > 0) {
        *tiles = (rows * p.heads + kTileRows - 1) / kTileRows;
        *length = p.context_length[s] + rows;
      }
    }
  }

  __device__ int Splits(int length) const {
    if (length <= 0) return 0;
    int most = (length + p.min_split_keys - 1) / p.min_split_keys;
    unsigned long long share = static_cast<unsigned long long>(p.slots) * length / weight;
    return max(1, static_cast<int>(min(share, static_cast<unsigned long long>(most))));
  }

  // The item (by_tile false) or the query tile counted over all sequences (by_tile true) with this index.
  __device__ Item Find(int index, bool by_tile) const {
    int lane = threadIdx.x & 31;
    int items_before = 0, tiles_before = 0;
    for (int s0 = 0; s0 < p.sequences; s0 += 32) {
      int tiles, length;
      Sizes(s0 + lane, &tiles, &length);
      int splits = Splits(length);
      int items = tiles * splits;
      int item_end = items, tile_end = tiles;
      for (int d = 1; d < 32; d <<= 1) {
        int a = __shfl_up_sync(~0u, item_end, d), b = __shfl_up_sync(~0u, tile_end, d);
        if (lane >= d) {
          item_end += a;
          tile_end += b;
        }
      }
      int my_begin = by_tile ? tiles_before + tile_end - tiles : items_before + item_end - items;
      int my_count = by_tile ? tiles : items;
      bool mine = index >= my_begin && index < my_begin + my_count;
      unsigned found = __ballot_sync(~0u, mine);
      if (found != 0) {
        int src = __ffs(found) - 1;
        Item it;
        it.sequence = s0 + src;
        it.first_item = __shfl_sync(~0u, items_before + item_end - items, src);
        it.tiles = __shfl_sync(~0u, tiles, src);
        it.splits = __shfl_sync(~0u, splits, src);
        int local = index - __shfl_sync(~0u, my_begin, src);
        it.tile = by_tile ? local : local % it.tiles;
        it.row0 = p.row_begin[it.sequence];
        it.rows = p.row_begin[it.sequence + 1] - it.row0;
        it.context = p.context_length[it.sequence];
        it.begin = it.end = 0;
        if (!by_tile) {
          const int split = local / it.tiles;
          it.begin = SplitBegin(it.context + it.rows, split, it.splits);
          it.end = SplitBegin(it.context + it.rows, split + 1, it.splits);
        }
        return it;
      }
      items_before += __shfl_sync(~0u, item_end, 31);
      tiles_before += __shfl_sync(~0u, tile_end, 31);
    }
    Item none;
    none.sequence = -1;
    return none;
  }
};

}  // namespace kdt::cuda
