#include "tests/coordinator/scheduler/toy_rank.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt::testing {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a ^ (b + 0x9E3779B97F4A7C15u + (a << 6) + (a >> 2));
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t HashOf(std::span<const uint32_t> tokens) {
  uint64_t hash = 1;
  for (const uint32_t token : tokens) hash = Mix(hash, token);
  return hash;
}

}  // namespace

GroupLimits ToyOptions::Limits() const {
  GroupLimits limits;
  limits.kv_slots = slots;
  limits.max_rows = max_rows;
  limits.max_tree_nodes = max_tree_nodes;
  limits.max_sequences = max_sequences;
  limits.max_context = max_context;
  limits.draft_block_size = block_size;
  limits.max_draft_top_k = max_draft_top_k;
  limits.checkpoint_digest = "toy";
  return limits;
}

void ToyRank::StartEpoch() {
  sequences_.clear();
  references_.assign(options_.slots, 0);
  step_ = 0;
  digest_ = 0;
}

uint64_t ToyRank::used_slots() const {
  return static_cast<uint64_t>(
      std::count_if(references_.begin(), references_.end(), [](uint32_t n) { return n > 0; }));
}

uint32_t ToyRank::Draw(std::span<const uint32_t> history, const v1::SamplingState& sampling) const {
  uint64_t hash = HashOf(history);
  if (sampling.temperature() > 0) hash = Mix(hash, sampling.seed());
  uint32_t token = options_.next ? options_.next(history) : static_cast<uint32_t>(hash % options_.vocab);
  const auto& stops = sampling.stop_token_ids();
  if (history.size() - sampling.prompt_length() < sampling.min_tokens()) {
    while (std::find(stops.begin(), stops.end(), token) != stops.end()) token = (token + 1) % options_.vocab;
  }
  return token;
}

std::vector<uint32_t> ToyRank::Answer(std::vector<uint32_t> prompt, const v1::SamplingState& sampling,
                                      uint32_t count) const {
  std::vector<uint32_t> answer;
  for (uint32_t i = 0; i < count; ++i) {
    answer.push_back(Draw(prompt, sampling));
    prompt.push_back(answer.back());
  }
  return answer;
}

v1::PositionLogprobs ToyRank::Logprobs(std::span<const uint32_t> history, uint32_t token, uint32_t k) const {
  v1::PositionLogprobs logprobs;
  logprobs.mutable_token()->set_token_id(token);
  logprobs.mutable_token()->set_logprob(-static_cast<float>(Mix(HashOf(history), token) % 1000) / 100);
  for (uint32_t i = 0; i < k; ++i) logprobs.add_top()->set_token_id((token + i) % options_.vocab);
  return logprobs;
}

absl::Status ToyRank::Start(uint64_t id, const v1::SamplingState& sampling, Sequence sequence) {
  if (sequences_.size() >= options_.max_sequences) return absl::ResourceExhaustedError("too many sequences");
  sequence.sampling = sampling;
  if (!sequences_.emplace(id, std::move(sequence)).second) {
    return absl::InvalidArgumentError(absl::StrCat("sequence ", id, " is alive"));
  }
  return absl::OkStatus();
}

absl::Status ToyRank::Apply(const v1::SequenceOp& op) {
  if (op.has_create()) return Start(op.create().sequence_id(), op.create().sampling(), {});
  if (op.has_fork()) {
    const auto parent = sequences_.find(op.fork().parent_id());
    if (parent == sequences_.end()) return absl::NotFoundError("no such parent");
    const uint32_t length = op.fork().length();
    if (length == 0 || length > parent->second.tokens.size()) return absl::OutOfRangeError("fork length");
    Sequence child;
    child.tokens.assign(parent->second.tokens.begin(), parent->second.tokens.begin() + length);
    child.slots.assign(parent->second.slots.begin(), parent->second.slots.begin() + length);
    for (const uint32_t slot : child.slots) ++references_[slot];
    return Start(op.fork().sequence_id(), op.fork().sampling(), std::move(child));
  }
  const auto found = sequences_.find(op.free().sequence_id());
  if (found == sequences_.end()) return absl::NotFoundError("freed sequence is not alive");
  Release(found->second);
  sequences_.erase(found);
  return absl::OkStatus();
}

void ToyRank::Release(const Sequence& sequence) {
  for (const uint32_t slot : sequence.slots) --references_[slot];
}

absl::Status ToyRank::Check(uint64_t id, uint32_t start, size_t rows) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return absl::NotFoundError(absl::StrCat("no sequence ", id));
  if (start != found->second.tokens.size())
    return absl::InvalidArgumentError("start is not the committed length");
  if (rows == 0) return absl::InvalidArgumentError("no rows");
  if (start + rows > options_.max_context) return absl::OutOfRangeError("context");
  rows_needed_ += rows;
  return absl::OkStatus();
}

void ToyRank::Commit(Sequence* sequence, uint32_t token) {
  const auto slot =
      static_cast<uint32_t>(std::find(references_.begin(), references_.end(), 0u) - references_.begin());
  KDT_CHECK(slot < references_.size());
  references_[slot] = 1;
  sequence->tokens.push_back(token);
  sequence->slots.push_back(slot);
  digest_ = Mix(Mix(digest_, token), slot);
}

absl::Status ToyRank::Step(const v1::StepRequest& request, v1::StepResponse* response) {
  response->Clear();
  response->set_epoch(request.epoch());
  response->set_step(request.step());
  if (request.step() != ++step_) return absl::InvalidArgumentError("steps are not in order");
  rows_needed_ = 0;
  for (const auto& op : request.ops()) KDT_RETURN_IF_ERROR(Apply(op));
  for (const auto& chunk : request.prefill()) {
    KDT_RETURN_IF_ERROR(Check(chunk.sequence_id(), chunk.start(), chunk.tokens().size()));
  }
  for (const auto& tree : request.verify()) {
    KDT_RETURN_IF_ERROR(Check(tree.sequence_id(), tree.start(), tree.tokens().size()));
  }
  if (rows_needed_ > options_.max_rows) return absl::InvalidArgumentError("too many rows");
  if (rows_needed_ + used_slots() > options_.slots) return absl::ResourceExhaustedError("no free slots");
  mixed_steps_ += request.prefill_size() > 0 && request.verify_size() > 0;
  for (const auto& chunk : request.prefill()) KDT_RETURN_IF_ERROR(Prefill(chunk, response));
  for (const auto& tree : request.verify()) KDT_RETURN_IF_ERROR(Verify(tree, response));
  response->set_digest(digest_);
  response->mutable_pool()->set_slots_used(used_slots());
  response->mutable_pool()->set_sequences(static_cast<uint32_t>(sequences_.size()));
  return absl::OkStatus();
}

absl::Status ToyRank::Prefill(const v1::PrefillChunk& chunk, v1::StepResponse* response) {
  Sequence& sequence = sequences_.at(chunk.sequence_id());
  v1::SequenceResult result;
  result.set_sequence_id(chunk.sequence_id());
  prefilled_ += static_cast<uint64_t>(chunk.tokens_size());
  for (int i = 0; i < chunk.tokens_size(); ++i) {
    Commit(&sequence, chunk.tokens(i));
    const bool known = i + 1 < chunk.tokens_size() || !chunk.sample();
    if (chunk.prompt_logprobs() == 0 || !known) continue;
    const uint32_t next = i + 1 < chunk.tokens_size() ? chunk.tokens(i + 1) : chunk.next_token();
    *result.add_prompt_logprobs() = Logprobs(sequence.tokens, next, chunk.prompt_logprobs());
  }
  if (chunk.sample()) {
    const uint32_t token = Draw(sequence.tokens, sequence.sampling);
    result.add_tokens(token);
    const uint32_t k = sequence.sampling.logprobs();
    if (k > 0) *result.add_logprobs() = Logprobs(sequence.tokens, token, k);
    if (chunk.draft_top_k() > 0) Draft(sequence, token, chunk.draft_top_k(), result.mutable_draft());
  }
  if (chunk.sample() || chunk.prompt_logprobs() > 0) *response->add_results() = std::move(result);
  return absl::OkStatus();
}

absl::Status ToyRank::Verify(const v1::TreeVerify& tree, v1::StepResponse* response) {
  if (tree.parents_size() != tree.tokens_size() - 1) return absl::InvalidArgumentError("parents");
  if (static_cast<uint32_t>(tree.tokens_size()) > options_.max_tree_nodes)
    return absl::InvalidArgumentError("nodes");
  if (tree.draft_top_k() > options_.max_draft_top_k) return absl::InvalidArgumentError("draft_top_k");
  if (tree.draft_top_k() > 0 && options_.block_size == 0) return absl::InvalidArgumentError("no drafter");
  Sequence& sequence = sequences_.at(tree.sequence_id());
  v1::SequenceResult* result = response->add_results();
  result->set_sequence_id(tree.sequence_id());
  const uint32_t k = sequence.sampling.logprobs();
  Commit(&sequence, tree.tokens(0));
  for (int node = 0; node >= 0;) {
    const uint32_t token = Draw(sequence.tokens, sequence.sampling);
    result->add_tokens(token);
    if (k > 0) *result->add_logprobs() = Logprobs(sequence.tokens, token, k);
    int child = -1;
    for (int i = node + 1; i < tree.tokens_size() && child < 0; ++i) {
      if (tree.parents(i - 1) >= static_cast<uint32_t>(i)) return absl::InvalidArgumentError("parent");
      if (tree.parents(i - 1) == static_cast<uint32_t>(node) && tree.tokens(i) == token) child = i;
    }
    if (child >= 0) {
      result->add_accepted_nodes(static_cast<uint32_t>(child));
      Commit(&sequence, token);
    }
    node = child;
  }
  if (tree.draft_top_k() > 0) {
    Draft(sequence, result->tokens(result->tokens_size() - 1), tree.draft_top_k(), result->mutable_draft());
  }
  return absl::OkStatus();
}

// The true continuation, at a rank that depends on the position; sometimes not at all.
void ToyRank::Draft(const Sequence& sequence, uint32_t root, uint32_t k, v1::DraftTopK* draft) const {
  std::vector<uint32_t> history = sequence.tokens;
  history.push_back(root);
  draft->set_k(k);
  for (uint32_t position = 1; position < options_.block_size; ++position) {
    const uint32_t token = Draw(history, sequence.sampling);
    history.push_back(token);
    const auto rank = static_cast<uint32_t>(Mix(HashOf(history), 7) % 4);
    for (uint32_t i = 0; i < k; ++i) {
      draft->add_token_ids(i == rank ? token : (token + 1 + i) % options_.vocab);
      draft->add_log_probs(-0.5f - static_cast<float>(i));
    }
  }
}

}  // namespace kdt::testing
