#include "tests/worker/support/goldens.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>

namespace kdt::testing {

std::span<const float> Goldens::Values(const std::string& name) const {
  const auto tensor = tensors->Find(name);
  if (!tensor.ok()) throw std::runtime_error(std::string(tensor.status().message()));
  return tensor->As<float>();
}

Goldens LoadGoldens(const std::string& name) {
  const std::string base = std::string(KDT_GOLDENS_DIR) + "/" + name;
  Goldens goldens;
  std::ifstream file(base + ".json");
  goldens.json = nlohmann::json::parse(file);
  auto tensors = SafetensorsFile::Open(base + ".safetensors");
  if (!tensors.ok()) throw std::runtime_error(std::string(tensors.status().message()));
  goldens.tensors = *std::move(tensors);
  return goldens;
}

GoldenChain ChainOf(const nlohmann::json& round) {
  GoldenChain chain;
  chain.tokens.push_back(round["bonus"].get<int32_t>());
  for (const auto& position : round["top8"]) {
    chain.parents.push_back(static_cast<int32_t>(chain.parents.size()));
    chain.tokens.push_back(position[0][0].get<int32_t>());
  }
  return chain;
}

double LargestDistance(std::span<const float> shard, int64_t columns, std::span<const float> reference) {
  const size_t mine = static_cast<size_t>(columns), rows = shard.size() / mine;
  const size_t all = reference.size() / rows;
  double largest = 0;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < mine; ++i) {
      largest = std::max<double>(largest, std::abs(shard[row * mine + i] - reference[row * all + i]));
    }
  }
  return largest;
}

}  // namespace kdt::testing
