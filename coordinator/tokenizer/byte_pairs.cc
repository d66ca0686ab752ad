#include "coordinator/tokenizer/byte_pairs.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>

#include "common/status.h"

namespace kdt {
namespace {

// Up to this many bytes a scan for the lowest rank is faster than a heap.
constexpr size_t kShortPiece = 48;

}  // namespace

BytePairs::BytePairs(const std::vector<std::string_view>& tokens) {
  KDT_CHECK(tokens.size() < kNone);
  ids_.reserve(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    KDT_CHECK(!tokens[id].empty());
    KDT_CHECK(ids_.emplace(tokens[id], static_cast<uint32_t>(id)).second);
    longest_ = std::max(longest_, tokens[id].size());
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char value = static_cast<char>(byte);
    const auto found = ids_.find(std::string_view(&value, 1));
    KDT_CHECK(found != ids_.end());
    byte_ids_[byte] = found->second;
  }
  // Every way to put a token together from two tokens. Looking a pair of ids up is cheaper than hashing its
  // bytes.
  for (size_t id = 0; id < tokens.size(); ++id) {
    for (size_t cut = 1; cut < tokens[id].size(); ++cut) {
      const auto left = ids_.find(tokens[id].substr(0, cut));
      if (left == ids_.end()) continue;
      const auto right = ids_.find(tokens[id].substr(cut));
      if (right == ids_.end()) continue;
      pairs_.emplace(uint64_t{left->second} << 32 | right->second, static_cast<uint32_t>(id));
    }
  }
}

uint32_t BytePairs::Merged(uint32_t left, uint32_t right) const {
  const auto found = pairs_.find(uint64_t{left} << 32 | right);
  return found == pairs_.end() ? kNone : found->second;
}

void BytePairs::Encode(std::string_view piece, std::vector<uint32_t>* ids) const {
  if (piece.size() == 1) {
    ids->push_back(byte_ids_[static_cast<unsigned char>(piece[0])]);
    return;
  }
  if (piece.size() <= longest_) {
    const auto found = ids_.find(piece);
    if (found != ids_.end()) {
      ids->push_back(found->second);
      return;
    }
  }
  piece.size() <= kShortPiece ? MergeShort(piece, ids) : MergeLong(piece, ids);
}

void BytePairs::MergeShort(std::string_view piece, std::vector<uint32_t>* ids) const {
  uint32_t part[kShortPiece];
  uint32_t rank[kShortPiece];  // rank[i]: of part[i] and part[i + 1] together
  size_t count = piece.size();
  for (size_t i = 0; i < count; ++i) part[i] = byte_ids_[static_cast<unsigned char>(piece[i])];
  for (size_t i = 0; i + 1 < count; ++i) rank[i] = Merged(part[i], part[i + 1]);
  while (count > 1) {
    const size_t i = std::min_element(rank, rank + count - 1) - rank;
    if (rank[i] == kNone) break;
    part[i] = rank[i];
    --count;
    std::memmove(part + i + 1, part + i + 2, (count - i - 1) * sizeof(uint32_t));
    std::memmove(rank + i, rank + i + 1, (count - i - 1) * sizeof(uint32_t));
    if (i > 0) rank[i - 1] = Merged(part[i - 1], part[i]);
    if (i + 1 < count) rank[i] = Merged(part[i], part[i + 1]);
  }
  ids->insert(ids->end(), part, part + count);
}

void BytePairs::MergeLong(std::string_view piece, std::vector<uint32_t>* ids) const {
  // Parts form a linked list over the byte positions where they start. The heap's keys are rank << 32 |
  // position; a key is stale when the part there is gone or has another rank by now.
  struct Part {
    uint32_t id;
    uint32_t rank;  // of this part and the next together
    uint32_t previous;
    uint32_t next;
  };
  KDT_CHECK(piece.size() < kNone);
  const uint32_t size = static_cast<uint32_t>(piece.size());
  std::vector<Part> parts(size);
  for (uint32_t i = 0; i < size; ++i) {
    parts[i] = {byte_ids_[static_cast<unsigned char>(piece[i])], kNone, i == 0 ? kNone : i - 1, i + 1};
  }
  std::vector<uint64_t> keys;
  keys.reserve(size);
  for (uint32_t i = 0; i + 1 < size; ++i) {
    parts[i].rank = Merged(parts[i].id, parts[i + 1].id);
    if (parts[i].rank != kNone) keys.push_back(uint64_t{parts[i].rank} << 32 | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap(std::greater<>(),
                                                                            std::move(keys));
  const auto update = [&](uint32_t at) {
    Part& part = parts[at];
    part.rank = part.next == size ? kNone : Merged(part.id, parts[part.next].id);
    if (part.rank != kNone) heap.push(uint64_t{part.rank} << 32 | at);
  };
  while (!heap.empty()) {
    const uint64_t key = heap.top();
    heap.pop();
    const uint32_t at = static_cast<uint32_t>(key);
    Part& part = parts[at];
    if (part.rank != static_cast<uint32_t>(key >> 32)) continue;
    const uint32_t gone = part.next;
    parts[gone].rank = kNone;
    part.id = part.rank;
    part.next = parts[gone].next;
    if (part.next != size) parts[part.next].previous = at;
    update(at);
    if (part.previous != kNone) update(part.previous);
  }
  for (uint32_t i = 0; i != size; i = parts[i].next) ids->push_back(parts[i].id);
}

}  // namespace kdt
