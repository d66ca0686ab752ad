// Finds the names of control tokens in text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"

namespace kdt {

class SpecialNames {
 public:
  struct Hit {
    size_t offset;
    size_t length;
    uint32_t id;
  };

  SpecialNames();
  // False when the name is empty or already there.
  bool Add(std::string_view name, uint32_t id);
  std::optional<uint32_t> Find(std::string_view name) const;

  // The first name in text[from..]; of several that start together, the longest.
  std::optional<Hit> Search(std::string_view text, size_t from) const;

 private:
  // A trie: node << 8 | byte -> child. Walking it ends at the first byte that no name goes on with.
  absl::flat_hash_map<uint64_t, uint32_t> children_;
  absl::flat_hash_map<uint32_t, uint32_t> ids_;  // node -> id of the name that ends there
  uint32_t nodes_ = 1;
  bool first_[256] = {};  // bytes that begin a name
};

}  // namespace kdt
