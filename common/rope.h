// Rotary position embedding constants, in the reference's precision (transformers' rope utilities, float32).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kdt {

class JsonConfig;

// YaRN context extension (arXiv:2309.00071), field names as in rope_scaling.
struct YarnScaling {
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 0.0;          // 0: not given
  double mscale_all_dim = 0.0;  // 0: not given
  int64_t original_max_position_embeddings = 4096;
};

struct RopeConfig {
  double theta = 10000.0;
  int64_t dim = 0;  // rotated width, even
  std::optional<YarnScaling> yarn;

  // [dim/2] float32: angle of pair i at position p is float(p) * inv_freq[i], in float32.
  std::vector<float> InvFreq() const;
  // Factor on cos and sin: mscale/mscale_all_dim form when both are given, else 0.1 ln(factor) + 1; 1 without
  // YaRN.
  float AttentionFactor() const;
};

// (0.1 x mscale x ln(factor) + 1), 1 when factor <= 1.
double YarnMscale(double factor, double mscale);

// Reads rope_theta and rope_scaling (absent, null or type default/yarn) of `config`; faults are kept in it.
// Newer files that hold both in rope_parameters are read as well.
RopeConfig ReadRope(JsonConfig& config, int64_t dim);

}  // namespace kdt
