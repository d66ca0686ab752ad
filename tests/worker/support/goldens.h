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

}  // namespace kdt::testing
