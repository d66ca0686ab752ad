#include "coordinator/scheduler/prefix_cache.h"

#include <algorithm>

namespace kdt {

size_t CommonPrefix(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t shorter = std::min(a.size(), b.size());
  return static_cast<size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(shorter), b.begin()).first -
      a.begin());
}

std::vector<uint64_t> PrefixCache::Insert(uint64_t sequence_id, std::vector<uint32_t> tokens) {
  std::vector<uint64_t> needless;
  std::erase_if(entries_, [&](const Entry& entry) {
    const bool covered =
        entry.tokens.size() <= tokens.size() && CommonPrefix(entry.tokens, tokens) == entry.tokens.size();
    if (covered) needless.push_back(entry.sequence_id);
    return covered;
  });
  entries_.push_front({sequence_id, std::move(tokens)});
  return needless;
}

PrefixCache::Match PrefixCache::Find(std::span<const uint32_t> tokens) {
  auto best = entries_.end();
  size_t length = 0;
  for (auto it = entries_.begin(); it != entries_.end() && length < tokens.size(); ++it) {
    const size_t common = CommonPrefix(it->tokens, tokens);
    if (common <= length) continue;
    length = common;
    best = it;
  }
  if (best == entries_.end()) return {};
  entries_.splice(entries_.begin(), entries_, best);
  return {best->sequence_id, length};
}

std::optional<uint64_t> PrefixCache::Evict() {
  if (entries_.empty()) return std::nullopt;
  const uint64_t id = entries_.back().sequence_id;
  entries_.pop_back();
  return id;
}

}  // namespace kdt
