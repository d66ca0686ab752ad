// Reference values of tests/goldens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/safetensors.h"
#include "nlohmann/json.hpp"

namespace kdt::testing {

struct Goldens {
  nlohmann::json json;
  std::unique_ptr<SafetensorsFile> tensors;

  // An f32 tensor's values.
  std::span<const float> Values(const std::string& name) const;
};

// NAME.json and NAME.safetensors; aborts the test when they cannot be read.
Goldens LoadGoldens(const std::string& name);

// A golden round's best token at each position, as a chain under its root.
struct GoldenChain {
  std::vector<int32_t> tokens;   // the root first
  std::vector<int32_t> parents;  // of those behind the root
};
GoldenChain ChainOf(const nlohmann::json& round);

// Largest distance of a shard [rows, columns] from the first columns of the reference [rows, n].
double LargestDistance(std::span<const float> shard, int64_t columns, std::span<const float> reference);

}  // namespace kdt::testing
