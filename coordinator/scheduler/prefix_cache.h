// Finished sequences whose K/V is kept, so that a prompt that begins like one of them starts from a fork.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <vector>

namespace kdt {

// Tokens that two lists begin with in common.
size_t CommonPrefix(std::span<const uint32_t> a, std::span<const uint32_t> b);

class PrefixCache {
 public:
  struct Match {
    uint64_t sequence_id = 0;
    size_t length = 0;  // tokens in common; 0: none
  };

  // Takes a sequence whose K/V holds `tokens`. Returns the entries that it makes needless (their tokens are a
  // prefix of its own); they are no longer in the cache, and the caller frees them.
  std::vector<uint64_t> Insert(uint64_t sequence_id, std::vector<uint32_t> tokens);
  // The entry with the longest common prefix, which counts as used now.
  Match Find(std::span<const uint32_t> tokens);
  // Takes the least recently used entry out.
  std::optional<uint64_t> Evict();

  size_t size() const { return entries_.size(); }
  void Clear() { entries_.clear(); }

 private:
  struct Entry {
    uint64_t sequence_id;
    std::vector<uint32_t> tokens;
  };
  std::list<Entry> entries_;  // most recently used first
};

}  // namespace kdt
