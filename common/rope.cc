#include "common/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "common/json_config.h"

namespace kdt {
namespace {

// The pair index at which `rotations` full turns fit into the original context (YaRN paper, section 3.2).
double CorrectionDim(double rotations, double dim, double theta, double original_positions) {
  return dim * std::log(original_positions / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
}

}  // namespace

double YarnMscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

std::vector<float> RopeConfig::InvFreq() const {
  const int64_t pairs = dim / 2;
  std::vector<float> inv_freq(static_cast<size_t>(pairs));
  // The reference keeps the exponent and the power in float32.
  const auto power = [this](int64_t pair) {
    const float exponent = static_cast<float>(2 * pair) / static_cast<float>(dim);
    return std::pow(static_cast<float>(theta), exponent);
  };
  if (!yarn) {
    for (int64_t i = 0; i < pairs; ++i) inv_freq[static_cast<size_t>(i)] = 1.0f / power(i);
    return inv_freq;
  }
  const double original = static_cast<double>(yarn->original_max_position_embeddings);
  const double width = static_cast<double>(dim);
  const double low = std::max(std::floor(CorrectionDim(yarn->beta_fast, width, theta, original)), 0.0);
  double high = std::min(std::ceil(CorrectionDim(yarn->beta_slow, width, theta, original)), width - 1.0);
  if (low == high) high += 0.001;
  for (int64_t i = 0; i < pairs; ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float keep = 1.0f - ramp;  // 1: unchanged frequency, 0: fully interpolated
    const float extrapolated = 1.0f / power(i);
    const float interpolated = 1.0f / (static_cast<float>(yarn->factor) * power(i));
    inv_freq[static_cast<size_t>(i)] = interpolated * (1.0f - keep) + extrapolated * keep;
  }
  return inv_freq;
}

float RopeConfig::AttentionFactor() const {
  if (!yarn) return 1.0f;
  if (yarn->mscale != 0.0 && yarn->mscale_all_dim != 0.0) {
    return static_cast<float>(YarnMscale(yarn->factor, yarn->mscale) /
                              YarnMscale(yarn->factor, yarn->mscale_all_dim));
  }
  return static_cast<float>(YarnMscale(yarn->factor, 1.0));
}

RopeConfig ReadRope(JsonConfig& config, int64_t dim) {
  RopeConfig rope;
  rope.dim = dim;
  const bool merged = config.IsObject("rope_parameters");
  JsonConfig* theta_holder = &config;
  std::optional<JsonConfig> scaling;
  if (merged) {
    scaling = config.Object("rope_parameters");
    if (scaling->Has("rope_theta")) theta_holder = &*scaling;
  } else if (config.Has("rope_scaling")) {
    scaling = config.Object("rope_scaling");
  }
  rope.theta = theta_holder->NumberOr("rope_theta", 10000.0, 1.0001, 1e12);
  if (!scaling) return rope;
  const char* type_key = scaling->Has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling->StringOr(type_key, "default");
  if (type == "default") return rope;
  if (type != "yarn") {
    scaling->Fail(type_key,
                  absl::StrCat("\"", type, "\" is not supported, only \"yarn\" and \"default\" are"));
    return rope;
  }
  YarnScaling yarn;
  yarn.factor = scaling->Number("factor", 1.0, 1e6);
  yarn.beta_fast = scaling->NumberOr("beta_fast", 32.0, 1e-6, 1e6);
  yarn.beta_slow = scaling->NumberOr("beta_slow", 1.0, 1e-6, 1e6);
  yarn.mscale = scaling->NumberOr("mscale", 0.0, 0.0, 100.0);
  yarn.mscale_all_dim = scaling->NumberOr("mscale_all_dim", 0.0, 0.0, 100.0);
  yarn.original_max_position_embeddings =
      scaling->Int("original_max_position_embeddings", 1, int64_t{1} << 40);
  scaling->RefuseIfSet("attention_factor", "is not supported");
  if (scaling->Has("truncate") && !scaling->Bool("truncate")) scaling->Fail("truncate", "must be true");
  rope.yarn = yarn;
  return rope;
}

}  // namespace kdt
