#include "worker/sampling/logit_edits.h"

#include <algorithm>
#include <limits>

namespace kdt {

void SequenceSampling::Append(std::span<const int32_t> tokens) {
  if (params_.Penalizes()) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int64_t local = tokens[i] - vocab_begin_;
      if (local < 0 || local >= vocab_local_) continue;
      const auto [entry, is_new] = index_.try_emplace(tokens[i], counts_.size());
      if (is_new) counts_.push_back({tokens[i], 0});
      const int64_t position = static_cast<int64_t>(tokens_.size() + i);
      if (position >= params_.prompt_length) ++counts_[entry->second].generated;
    }
  }
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

const SequenceSampling::Count* SequenceSampling::Find(int32_t id) const {
  const auto found = index_.find(id);
  return found == index_.end() ? nullptr : &counts_[found->second];
}

bool SequenceSampling::EditsAt(int64_t position) const {
  return params_.Penalizes() || !params_.logit_bias.empty() ||
         (position - params_.prompt_length < params_.min_tokens && !params_.stop_token_ids.empty());
}

void LogitEditor::Penalize(const SamplingParams& params, int32_t generated, float* logit) const {
  float value = *logit;
  if (params.repetition_penalty != 1) {
    value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
  }
  if (generated > 0) {
    value -= params.frequency_penalty * static_cast<float>(generated);
    value -= params.presence_penalty;
  }
  *logit = value;
}

void LogitEditor::Apply(const SequenceSampling& sequence, std::span<const int32_t> path, int64_t position,
                        float* logits) {
  const SamplingParams& params = sequence.params();
  const int64_t vocab_local = static_cast<int64_t>(on_path_.size());
  const auto local_id = [&](int32_t id) {
    const int64_t local = id - vocab_begin_;
    return local >= 0 && local < vocab_local ? local : int64_t{-1};
  };
  const int64_t committed = static_cast<int64_t>(sequence.tokens().size());

  if (params.Penalizes()) {
    for (size_t i = 0; i < path.size(); ++i) {
      const int64_t local = local_id(path[i]);
      if (local < 0) continue;
      on_path_[local] = 1;
      if (committed + static_cast<int64_t>(i) >= params.prompt_length) ++path_count_[local];
    }
    for (const SequenceSampling::Count& count : sequence.counts()) {
      const int64_t local = count.id - vocab_begin_;
      if (!on_path_[local]) Penalize(params, count.generated, logits + local);
    }
    for (int32_t id : path) {
      const int64_t local = local_id(id);
      if (local < 0 || !on_path_[local]) continue;  // an id that came twice is done once
      const SequenceSampling::Count* before = sequence.Find(id);
      Penalize(params, path_count_[local] + (before == nullptr ? 0 : before->generated), logits + local);
      on_path_[local] = 0;
      path_count_[local] = 0;
    }
  }
  for (const auto& [id, bias] : params.logit_bias) {
    const int64_t local = local_id(id);
    if (local >= 0) logits[local] += bias;
  }
  if (position - params.prompt_length < params.min_tokens) {
    for (int32_t id : params.stop_token_ids) {
      const int64_t local = local_id(id);
      if (local >= 0) logits[local] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace kdt
