// A set of slots that answers the allocator's questions in O(log slots): a bitmap with a tree over its 64-bit
// words, each node holding the longest run of set bits within its range and those that touch its two ends.
#pragma once

#include <cstdint>
#include <vector>

namespace kdt {

// Slots [begin, begin + size).
struct Extent {
  int32_t begin = 0;
  int32_t size = 0;
};

class FreeMap {
 public:
  // Slots 0 .. limit - 1, none in the set.
  explicit FreeMap(int64_t limit);

  // Puts all of `extent` in (Add) or takes it out (Remove). All its slots must be out, or in: a slot freed
  // twice is a bug.
  void Add(Extent extent) { Flip(extent, true); }
  void Remove(Extent extent) { Flip(extent, false); }
  void Clear();

  int64_t count() const { return count_; }
  // Size of the longest run of slots in the set.
  int32_t longest() const { return nodes_[1].longest; }
  // Start of the lowest run of at least `size` >= 1 slots; -1 when there is none.
  int32_t LowestFit(int64_t size) const;
  // Length, at most `limit`, of the run that begins at `slot` (0 when `slot` is not in the set or out of
  // range).
  int32_t RunAt(int64_t slot, int64_t limit) const;
  bool Contains(int32_t slot) const { return (words_[slot >> 6] >> (slot & 63)) & 1; }

 private:
  struct Node {
    int32_t prefix = 0, suffix = 0, longest = 0;
  };
  void Flip(Extent extent, bool value);
  void UpdateLeaf(int64_t word);

  std::vector<uint64_t> words_;  // a power of two of them
  std::vector<Node> nodes_;      // heap order: root 1, children 2i and 2i + 1, leaves one a word
  int64_t count_ = 0;
};

}  // namespace kdt
