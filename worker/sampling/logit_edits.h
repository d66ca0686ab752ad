// Changes to logits that depend on a sequence's tokens: repetition, frequency and presence penalties, logit
// bias, and the mask of stop tokens while fewer than min_tokens are generated. Every row of a tree is edited
// with the history along the path to its node, so speculation sees what plain decoding would see.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "worker/sampling/sampling_params.h"

namespace kdt {

// A sequence's parameters and committed tokens, with counts of the tokens that this rank's part of the
// vocabulary holds.
class SequenceSampling {
 public:
  // Ids in [vocab_begin, vocab_begin + vocab_local) are this rank's.
  SequenceSampling(SamplingParams params, int64_t vocab_begin, int64_t vocab_local)
      : params_(std::move(params)), vocab_begin_(vocab_begin), vocab_local_(vocab_local) {}

  struct Count {
    int32_t id;         // global
    int32_t generated;  // occurrences at positions >= prompt_length
  };

  // Committed tokens, from position tokens().size() on.
  void Append(std::span<const int32_t> tokens);

  const SamplingParams& params() const { return params_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // Every distinct committed token of this rank's vocabulary; kept only when a penalty is set.
  const std::vector<Count>& counts() const { return counts_; }
  // nullptr: not among the committed tokens.
  const Count* Find(int32_t id) const;

  // True when the logits for the token at `position` differ from the model's (temperature aside).
  bool EditsAt(int64_t position) const;

 private:
  SamplingParams params_;
  int64_t vocab_begin_;
  int64_t vocab_local_;
  std::vector<int32_t> tokens_;
  std::vector<Count> counts_;
  std::unordered_map<int32_t, size_t> index_;  // id -> place in counts_
};

// Scratch that is reused from row to row.
class LogitEditor {
 public:
  LogitEditor(int64_t vocab_begin, int64_t vocab_local)
      : vocab_begin_(vocab_begin), path_count_(vocab_local, 0), on_path_(vocab_local, 0) {}

  // Edits this rank's logits [vocab_local] for the token at `position`, where `path` are the tokens between
  // the committed ones and that position (read only when a penalty is set). Order: penalties, bias,
  // min_tokens mask (-infinity).
  void Apply(const SequenceSampling& sequence, std::span<const int32_t> path, int64_t position,
             float* logits);

 private:
  void Penalize(const SamplingParams& params, int32_t generated, float* logit) const;

  int64_t vocab_begin_;
  std::vector<int32_t> path_count_;  // generated occurrences on the path, by local id
  std::vector<uint8_t> on_path_;
};

}  // namespace kdt
