#include "worker/kv_pool/free_map.h"

#include <algorithm>
#include <bit>

#include "common/status.h"

namespace kdt {
namespace {

constexpr int kWordBits = 64;

// Ones in bits [begin, end) of a word.
uint64_t Mask(int begin, int end) {
  const uint64_t below_end = end == kWordBits ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below_end & (~uint64_t{0} << begin);
}

// Bit i stays set when bits i .. i + size - 1 are.
uint64_t RunStarts(uint64_t word, int64_t size) {
  for (int64_t have = 1; have < size;) {
    const int64_t step = std::min(have, size - have);
    word &= word >> step;
    have += step;
  }
  return word;
}

}  // namespace

FreeMap::FreeMap(int64_t limit)
    : words_(std::bit_ceil(static_cast<uint64_t>(limit + kWordBits - 1) / kWordBits)),
      nodes_(2 * words_.size()) {}

void FreeMap::Clear() {
  std::fill(words_.begin(), words_.end(), 0);
  std::fill(nodes_.begin(), nodes_.end(), Node{});
  count_ = 0;
}

void FreeMap::UpdateLeaf(int64_t word) {
  const uint64_t bits = words_[word];
  Node& leaf = nodes_[words_.size() + word];
  leaf.prefix = std::countr_one(bits);
  leaf.suffix = std::countl_one(bits);
  leaf.longest = 0;
  for (uint64_t rest = bits; rest != 0; rest &= rest << 1) ++leaf.longest;
}

void FreeMap::Flip(Extent extent, bool value) {
  if (extent.size == 0) return;
  const int64_t begin = extent.begin, end = begin + extent.size;
  const int64_t first = begin / kWordBits, last = (end - 1) / kWordBits;
  for (int64_t w = first; w <= last; ++w) {
    const uint64_t mask =
        Mask(w == first ? begin % kWordBits : 0, w == last ? (end - 1) % kWordBits + 1 : kWordBits);
    KDT_CHECK((words_[w] & mask) == (value ? 0 : mask));
    words_[w] ^= mask;
    UpdateLeaf(w);
  }
  count_ += value ? extent.size : -extent.size;

  int64_t lo = (words_.size() + first) / 2, hi = (words_.size() + last) / 2;
  for (int32_t half = kWordBits; lo >= 1; lo /= 2, hi /= 2, half *= 2) {
    for (int64_t n = lo; n <= hi; ++n) {
      const Node &left = nodes_[2 * n], &right = nodes_[2 * n + 1];
      nodes_[n].prefix = left.prefix == half ? half + right.prefix : left.prefix;
      nodes_[n].suffix = right.suffix == half ? half + left.suffix : right.suffix;
      nodes_[n].longest = std::max({left.longest, right.longest, left.suffix + right.prefix});
    }
  }
}

int32_t FreeMap::LowestFit(int64_t size) const {
  if (longest() < size) return -1;
  size_t n = 1;
  int64_t begin = 0, half = static_cast<int64_t>(words_.size()) * kWordBits / 2;
  for (; n < words_.size(); half /= 2) {
    const Node &left = nodes_[2 * n], &right = nodes_[2 * n + 1];
    if (left.longest >= size) {
      n = 2 * n;
    } else if (left.suffix + right.prefix >= size) {
      return static_cast<int32_t>(begin + half - left.suffix);
    } else {
      n = 2 * n + 1;
      begin += half;
    }
  }
  return static_cast<int32_t>(begin + std::countr_zero(RunStarts(words_[begin / kWordBits], size)));
}

int32_t FreeMap::RunAt(int64_t slot, int64_t limit) const {
  int64_t length = 0;
  while (length < limit && static_cast<size_t>(slot / kWordBits) < words_.size()) {
    const int offset = slot % kWordBits;
    const int ones = std::countr_one(words_[slot / kWordBits] >> offset);
    length += ones;
    slot += ones;
    if (ones < kWordBits - offset) break;
  }
  return static_cast<int32_t>(std::min(length, limit));
}

}  // namespace kdt
