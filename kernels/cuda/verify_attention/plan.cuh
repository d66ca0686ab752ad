// Cuts the work of a launch into items, on the device, from the lengths alone: nothing is re-captured when
// they change.
//
// Each sequence belongs to the class whose range its query rows (rows * heads) fall in; a class has a
// configuration of the partial kernel. A sequence with r rows has tiles = ceil(r * heads / tile_rows) query
// tiles and L = context + r keys. Within a class it gets
//   splits = clamp(floor(slots * L / sum over sequences of tiles * L), 1, ceil(L / min_split_keys))
// so that all items together fill the chip once (a lone sequence takes it whole) and the sum of tiles *
// splits never exceeds slots + tiles, which is what the partial buffers are sized by. Items of one sequence
// are ordered split-major, so the query tiles that read the same keys run next to each other and share them
// in L2.
//
// A lone sequence's splits may leave blocks without an item (8 tiles: 16 splits each, 128 of 132 blocks).
// Where these are half as many as the tiles, every tile gets one split more, a rest: half as long as the
// others, less what its start costs. Rests come last, and two of them, one behind the other, take as long as
// another split.
#pragma once

#include "kernels/cuda/verify_attention/params.h"

namespace kdt::cuda {

struct Item {
  int sequence;     // -1: no such item
  int first_item;   // the sequence's first item
  int tile, tiles;  // query tile within the sequence
  bool narrow;      // tiles have half of the class's rows
  int splits;
  int row0, rows;  // the sequence's rows
  int context;
  int begin, end;  // keys of the split (by_tile false only)
};

// flat / heads, exact for flat < 2^21.
__device__ inline int RowOf(const VerifyParams& p, int flat) {
  return static_cast<int>((static_cast<float>(flat) + 0.5f) * p.heads_inverse);
}

// Whether the query at row `row` (within the sequence) sees `key`; keys from `context` on are the sequence's
// own rows.
__device__ inline bool Visible(const VerifyParams& p, const Item& it, int row, int key) {
  if (key >= it.end) return false;
  if (key < it.context) return true;
  const int node = key - it.context;
  if (p.causal[it.sequence] != 0) return node <= row;
  const uint64_t* bits = p.ancestor_bits + static_cast<int64_t>(it.row0 + row) * 4;
  return (bits[node >> 6] >> (node & 63)) & 1;
}

// Lengths are counted in tiles of keys, so that all products fit 32 bits (262144 tokens are 16384 tiles).
__device__ inline int KeyTiles(int length) { return (length + kTileKeys - 1) / kTileKeys; }

// Rounds (key tiles) a split must have for there to be rests, and how many the start of one costs.
inline constexpr unsigned kRestsFrom = 32, kStartRounds = 9;

// First key of split `split` of `splits`: splits are cut at whole tiles. The first ones are the longer ones,
// for their blocks start first. `full`: rounds of all but the last one, 0: evenly.
__device__ inline int SplitBegin(int length, int split, int splits, int full) {
  if (full > 0) return split < splits ? split * full * kTileKeys : length;
  const int tiles = KeyTiles(length), each = static_cast<unsigned>(tiles) / splits;
  return min((split * each + min(split, tiles - each * splits)) * kTileKeys, length);
}

// One whole warp calls everything here. Lane i holds sequence first + i.
class Planner {
 public:
  __device__ Planner(const VerifyParams& params, const VerifyClass& of) : p_(params), class_(of) {
#pragma unroll 1
    for (int first = 0; first < p_.sequences; first += 32) {
      Fetch(first);
      weight_ += static_cast<unsigned>(tiles_) * KeyTiles(length_);
      all_tiles_ += tiles_;
    }
    for (int d = 16; d > 0; d >>= 1) {
      weight_ += __shfl_xor_sync(~0u, weight_, d);
      all_tiles_ += __shfl_xor_sync(~0u, all_tiles_, d);
    }
  }

  // Query tiles of all sequences of the class.
  __device__ int tiles() const { return all_tiles_; }

  // Whether the tiles of a lone sequence have half of the class's rows.
  __device__ bool narrow() const { return __shfl_sync(~0u, narrow_, 0) != 0; }

  // The item (by_tile false) or the query tile counted over all sequences (by_tile true) with this index.
  __device__ Item Find(int index, bool by_tile) {
    const int lane = threadIdx.x & 31;
    int items_before = 0, tiles_before = 0;
#pragma unroll 1
    for (int first = 0; first < p_.sequences; first += 32) {
      if (p_.sequences > 32) Fetch(first);
      const int splits = Splits();
      const int items = tiles_ * splits;
      int item_end = items, tile_end = tiles_;
      if (p_.sequences > 1) {
        for (int d = 1; d < 32; d <<= 1) {
          const int a = __shfl_up_sync(~0u, item_end, d), b = __shfl_up_sync(~0u, tile_end, d);
          if (lane >= d) {
            item_end += a;
            tile_end += b;
          }
        }
      }
      const int my_begin = by_tile ? tiles_before + tile_end - tiles_ : items_before + item_end - items;
      const int my_count = by_tile ? tiles_ : items;
      const unsigned found = __ballot_sync(~0u, index >= my_begin && index < my_begin + my_count);
      if (found != 0) {
        const int src = __ffs(found) - 1;
        Item it;
        it.sequence = first + src;
        it.first_item = __shfl_sync(~0u, items_before + item_end - items, src);
        it.tiles = __shfl_sync(~0u, tiles_, src);
        it.splits = __shfl_sync(~0u, splits, src);
        it.narrow = __shfl_sync(~0u, narrow_, src) != 0;
        it.row0 = __shfl_sync(~0u, row0_, src);
        it.rows = __shfl_sync(~0u, rows_, src);
        const int length = __shfl_sync(~0u, length_, src);
        it.context = length - it.rows;
        const unsigned local = index - __shfl_sync(~0u, my_begin, src);
        const unsigned split = by_tile ? 0 : local / it.tiles;
        it.tile = by_tile ? local : local - split * it.tiles;
        const int full = __shfl_sync(~0u, full_, src);
        it.begin = by_tile ? 0 : SplitBegin(length, split, it.splits, full);
        it.end = by_tile ? 0 : SplitBegin(length, split + 1, it.splits, full);
        return it;
      }
      items_before += __shfl_sync(~0u, item_end, 31);
      tiles_before += __shfl_sync(~0u, tile_end, 31);
    }
    Item none;
    none.sequence = -1;
    return none;
  }

 private:
  __device__ void Fetch(int first) {
    const int s = first + (threadIdx.x & 31);
    int end = 0, context = 0;
    row0_ = 0;
    if (s < p_.sequences) {
      // All reads at once: each takes most of a microsecond when a launch begins.
      row0_ = p_.row_begin[s];
      end = p_.row_begin[s + 1];
      context = p_.context_length[s];
    }
    rows_ = max(0, end - row0_);
    const int queries = rows_ * p_.heads;
    const bool mine = queries >= class_.min_queries && queries <= class_.max_queries;
    length_ = mine ? context + rows_ : 0;
    narrow_ = length_ < class_.narrow_below;
    const int shift = class_.tile_shift - narrow_;
    tiles_ = mine ? (queries + (1 << shift) - 1) >> shift : 0;
  }

  __device__ int Splits() {
    full_ = 0;
    if (length_ == 0) return 0;
    const unsigned most = (length_ + class_.min_split_keys - 1) / class_.min_split_keys;
    if (class_.own_length_only) return static_cast<int>(most);
    const unsigned share = static_cast<unsigned>(class_.slots) * KeyTiles(length_) / weight_;
    // In a class with rests, all blocks are shared by the tiles of one sequence.
    if (class_.rests && 2 * (class_.slots - share * tiles_) == tiles_) {
      // Rounded up, so that a rest may have nothing left if splits are short.
      const unsigned full = (2 * (KeyTiles(length_) + kStartRounds) + 2 * share) / (2 * share + 1);
      if (full >= kRestsFrom && share * full < KeyTiles(length_)) {
        full_ = full;
        return share + 1;
      }
    }
    return max(1u, min(share, most));
  }

  const VerifyParams& p_;
  const VerifyClass& class_;
  unsigned weight_ = 0;  // sum of tiles * length
  int all_tiles_ = 0;
  int tiles_, length_, rows_, row0_, narrow_, full_;
};

}  // namespace kdt::cuda
