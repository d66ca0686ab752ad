#include "coordinator/tokenizer/special_names.h"

namespace kdt {
namespace {

uint64_t Edge(uint32_t node, char byte) { return uint64_t{node} << 8 | static_cast<unsigned char>(byte); }

}  // namespace

SpecialNames::SpecialNames() = default;

bool SpecialNames::Add(std::string_view name, uint32_t id) {
  if (name.empty()) return false;
  uint32_t node = 0;
  for (const char byte : name) {
    const auto [edge, added] = children_.emplace(Edge(node, byte), nodes_);
    if (added) ++nodes_;
    node = edge->second;
  }
  first_[static_cast<unsigned char>(name[0])] = true;
  return ids_.emplace(node, id).second;
}

std::optional<uint32_t> SpecialNames::Find(std::string_view name) const {
  const std::optional<Hit> hit = Search(name, 0);
  if (!hit || hit->offset != 0 || hit->length != name.size()) return std::nullopt;
  return hit->id;
}

std::optional<SpecialNames::Hit> SpecialNames::Search(std::string_view text, size_t from) const {
  for (size_t start = from; start < text.size(); ++start) {
    if (!first_[static_cast<unsigned char>(text[start])]) continue;
    std::optional<Hit> longest;
    uint32_t node = 0;
    for (size_t i = start; i < text.size(); ++i) {
      const auto edge = children_.find(Edge(node, text[i]));
      if (edge == children_.end()) break;
      node = edge->second;
      const auto id = ids_.find(node);
      if (id != ids_.end()) longest = Hit{start, i + 1 - start, id->second};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

}  // namespace kdt
