// Byte-pair merging over a set of ranked byte strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace kdt {

// Immutable; may be used from any thread. Token ids are ranks.
class BytePairs {
 public:
  // tokens[r] is the byte string of rank r. They must be distinct, not empty, and contain all 256 single
  // bytes. The views must outlive this object.
  explicit BytePairs(const std::vector<std::string_view>& tokens);

  // Appends the ids of one piece: its own id if it is a token, else its bytes with the pair of the lowest
  // rank (the leftmost of equals) merged again and again. O(n log n) in the piece's length.
  void Encode(std::string_view piece, std::vector<uint32_t>* ids) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // The rank of left and right put together; kNone if that is no token.
  uint32_t Merged(uint32_t left, uint32_t right) const;
  void MergeShort(std::string_view piece, std::vector<uint32_t>* ids) const;
  void MergeLong(std::string_view piece, std::vector<uint32_t>* ids) const;

  absl::flat_hash_map<std::string_view, uint32_t, std::hash<std::string_view>> ids_;
  absl::flat_hash_map<uint64_t, uint32_t> pairs_;  // left << 32 | right -> rank of both together
  uint32_t byte_ids_[256];
  size_t longest_ = 0;  // bytes of the longest token
};

}  // namespace kdt
