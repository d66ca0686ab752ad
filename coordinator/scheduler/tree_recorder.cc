#include "coordinator/scheduler/tree_recorder.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status.h"

namespace kdt {

struct TreeRecorder::Cases {
  nlohmann::json list = nlohmann::json::array();
};

TreeRecorder::TreeRecorder(std::string path, size_t count, std::shared_ptr<const Tokenizer> tokenizer)
    : path_(std::move(path)),
      count_(count),
      tokenizer_(std::move(tokenizer)),
      cases_(std::make_unique<Cases>()) {}

TreeRecorder::~TreeRecorder() = default;

absl::StatusOr<std::unique_ptr<TreeRecorder>> TreeRecorder::Open(const std::string& path, size_t count,
                                                                 std::shared_ptr<const Tokenizer> tokenizer) {
  std::unique_ptr<TreeRecorder> recorder(new TreeRecorder(path, count, std::move(tokenizer)));
  KDT_RETURN_IF_ERROR(recorder->Write());
  return recorder;
}

absl::Status TreeRecorder::Write() const {
  std::ofstream file(path_, std::ios::binary | std::ios::trunc);
  // Half a character is a token, too: such bytes are shown as U+FFFD.
  file << cases_->list.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  file.close();
  return file ? absl::OkStatus() : absl::NotFoundError(absl::StrCat("--record_trees: cannot write ", path_));
}

void TreeRecorder::Record(const Sample& sample, std::span<const uint32_t> accepted_nodes) {
  if (cases_->list.size() >= count_) return;
  const v1::DraftTopK& draft = sample.draft;
  const auto text = [this](uint32_t id) {
    const auto bytes = tokenizer_->TokenBytes(id);
    return bytes.ok() ? std::string(*bytes) : std::string();
  };
  nlohmann::json one = {{"budget", sample.nodes}, {"root_text", text(sample.tree->tokens[0])}};
  one["topk_ids"] = nlohmann::json::array();
  one["topk_logprobs"] = nlohmann::json::array();
  for (int begin = 0; begin < draft.token_ids_size(); begin += static_cast<int>(draft.k())) {
    nlohmann::json ids, log_probs;
    for (int i = begin; i < begin + static_cast<int>(draft.k()); ++i) {
      ids.push_back(draft.token_ids(i));
      log_probs.push_back(draft.log_probs(i));
      one["token_text"][std::to_string(draft.token_ids(i))] = text(draft.token_ids(i));
    }
    one["topk_ids"].push_back(ids);
    one["topk_logprobs"].push_back(log_probs);
  }
  one["accepted_tokens"] = nlohmann::json::array();
  for (const uint32_t node : accepted_nodes) one["accepted_tokens"].push_back(sample.tree->tokens[node]);
  cases_->list.push_back(std::move(one));
  if (const absl::Status written = Write(); !written.ok()) spdlog::warn("{}", written.message());
}

}  // namespace kdt
