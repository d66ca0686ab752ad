// The DFlash drafter's description, read from its checkpoint folder. Unsupported variants are refused by
// name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rope.h"

namespace kdt {

struct ModelConfig;

// A DFlash drafter: block diffusion on the target's layer outputs. Its embedding and lm_head are the
// target's.
struct DrafterConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate_size = 0;
  double rms_norm_eps = 1e-5;
  int64_t max_position_embeddings = 0;
  int64_t block_size = 0;         // root and block_size - 1 drafted positions
  int64_t num_target_layers = 0;  // layers of the target it was trained for
  int64_t mask_token_id = 0;
  std::vector<int64_t>
      target_layer_ids;  // 0-based, strictly rising; fc input = their outputs, concatenated in this order
  RopeConfig rope;       // dim = head_dim, half-split

  // head_dim^-0.5.
  float SoftmaxScale() const;

  static absl::StatusOr<DrafterConfig> Load(const std::string& folder);
  static absl::StatusOr<DrafterConfig> Parse(const std::string& config_json);
  absl::Status CheckTensorParallel(int64_t tp) const;
};

// INVALID_ARGUMENT naming the first field in which the drafter does not fit the target.
absl::Status CheckFits(const DrafterConfig& drafter, const ModelConfig& target);

}  // namespace kdt
