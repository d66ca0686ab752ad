// The golden model as the API serves it.
#pragma once

#include <memory>
#include <string>

#include "coordinator/api/request_check.h"

namespace kdt::testing {

inline std::shared_ptr<const ServedModel> GoldenServedModel() {
  auto model = std::make_shared<ServedModel>();
  const std::string folder = std::string(KDT_GOLDENS_DIR) + "/model";
  model->name = "golden";
  model->config = *ModelConfig::Load(folder);
  model->tokenizer = *Tokenizer::Load(folder);
  model->chat.emplace(*ChatRenderer::Create(model->tokenizer));
  return model;
}

}  // namespace kdt::testing
