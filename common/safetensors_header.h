// The JSON header of a safetensors file, parsed without a DOM so that a hostile header costs no more than its
// size. Used by safetensors.cc; not meant for others.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/safetensors.h"

namespace kdt {

struct HeaderEntry {
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;   // all >= 0
  uint64_t begin = 0, end = 0;  // bytes, relative to the end of the header
};

// Names of tensors -> entries; "__metadata__" is checked to be an object of strings and left out. Errors do
// not name the file.
absl::StatusOr<std::map<std::string, HeaderEntry>> ParseSafetensorsHeader(absl::string_view text);

}  // namespace kdt
