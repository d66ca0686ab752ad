// Writes verified draft trees to a file that `kdt tree` draws: for looking at what speculation does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/scheduler/sample.h"
#include "coordinator/tokenizer/tokenizer.h"

namespace kdt {

class TreeRecorder {
 public:
  // Creates `path` anew and records the first `count` trees. NOT_FOUND when the file cannot be written.
  static absl::StatusOr<std::unique_ptr<TreeRecorder>> Open(const std::string& path, size_t count,
                                                            std::shared_ptr<const Tokenizer> tokenizer);
  ~TreeRecorder();

  // Called with every verified tree (SpeculationOptions::on_verified). The file is a valid JSON list after
  // each call: topk_ids, topk_logprobs and budget as in `kdt tree`'s input, and root_text, token_text,
  // accepted_tokens.
  void Record(const Sample& sample, std::span<const uint32_t> accepted_nodes);

 private:
  struct Cases;
  TreeRecorder(std::string path, size_t count, std::shared_ptr<const Tokenizer> tokenizer);
  absl::Status Write() const;

  const std::string path_;
  const size_t count_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<Cases> cases_;
};

}  // namespace kdt
