#include "tests/worker/support/goldens.h"

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

}  // namespace kdt::testing
