#include "coordinator/scheduler/step_results.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

absl::Status Unfit(const std::string& what) { return absl::InternalError(what); }

bool IsStopToken(const RequestSpec& spec, uint32_t token) {
  const auto& stops = spec.sampling.stop_token_ids();
  return std::find(stops.begin(), stops.end(), token) != stops.end();
}

// Every committed token is looked at in path order; the earliest stop wins and what is behind it is dropped.
void CutAtStop(const Sample& sample, Gained* gained) {
  const RequestSpec& spec = sample.request->spec;
  for (size_t i = 0; i < gained->tokens.size(); ++i) {
    const size_t generated = sample.kept + i + 1;
    const bool stop = generated > spec.sampling.min_tokens() && IsStopToken(spec, gained->tokens[i]);
    if (!stop && generated < spec.max_tokens) continue;
    gained->finish = stop ? v1::STOP : v1::LENGTH;
    if (stop) gained->stop_token = gained->tokens[i];
    gained->tokens.resize(i + 1);
    if (gained->logprobs.size() > i + 1) gained->logprobs.resize(i + 1);
    return;
  }
}

absl::Status CheckDraft(const v1::DraftTopK& draft, uint32_t vocab_size) {
  const auto outside = [vocab_size](uint32_t id) { return id >= vocab_size; };
  const auto& ids = draft.token_ids();
  const bool whole = draft.k() == 0 ? ids.empty() : static_cast<uint32_t>(ids.size()) % draft.k() == 0;
  if (!whole || ids.size() != draft.log_probs_size()) return Unfit("the draft's sizes do not agree");
  if (std::any_of(ids.begin(), ids.end(), outside)) return Unfit("a drafted token is outside the vocabulary");
  return absl::OkStatus();
}

void TakePromptLogprobs(const PlanItem& item, v1::SequenceResult* result) {
  Request& request = *item.sample->request;
  const size_t wanted = request.spec.prompt.size() - 1;
  // Row p predicts token p + 1. After a preemption rows are computed again; what is known stays.
  for (int i = 0; i < result->prompt_logprobs_size(); ++i) {
    const size_t at = item.start + static_cast<size_t>(i);
    if (at == request.prompt_logprobs.size() && at < wanted) {
      request.prompt_logprobs.push_back(std::move(*result->mutable_prompt_logprobs(i)));
    }
  }
}

absl::Status TakeResult(const PlanItem& item, v1::SequenceResult* result, uint32_t vocab_size,
                        SequenceStore* store, Speculator* speculator, std::vector<Gained>* gained) {
  Sample& sample = *item.sample;
  if (result->sequence_id() != sample.sequence_id)
    return Unfit("its results are not in the order of the step");
  Gained gain;
  gain.sample = &sample;
  if (!result->error().empty()) {
    if (sample.state == SampleState::kDone) {
      sample.keep_sequence = false;
      return absl::OkStatus();
    }
    gain.error = result->error();
    gained->push_back(std::move(gain));
    return absl::OkStatus();
  }
  const auto accepted = static_cast<uint32_t>(result->accepted_nodes_size());
  const uint32_t committed = item.tree ? 1 + accepted : item.rows;
  if (committed > item.rows) return Unfit("it accepted more nodes than the tree has");
  sample.committed += committed;
  store->Commit(sample.sequence_id, committed);
  TakePromptLogprobs(item, result);
  if (!item.samples) return absl::OkStatus();

  if (static_cast<uint32_t>(result->tokens_size()) != accepted + 1)
    return Unfit("tokens and accepted nodes do not agree");
  const bool with_logprobs = sample.request->spec.sampling.logprobs() > 0;
  if (with_logprobs && result->logprobs_size() != result->tokens_size()) {
    return Unfit("it gave no log-probabilities for some tokens");
  }
  for (const uint32_t token : result->tokens()) {
    if (token >= vocab_size) return Unfit(absl::StrCat("token id ", token, " is outside the vocabulary"));
    gain.tokens.push_back(token);
    sample.tokens.push_back(token);
  }
  if (sample.state == SampleState::kDone) return absl::OkStatus();  // a stop string ended it meanwhile
  if (with_logprobs) {
    for (auto& logprobs : *result->mutable_logprobs()) gain.logprobs.push_back(std::move(logprobs));
  }
  const std::span<const uint32_t> nodes(result->accepted_nodes().data(), accepted);
  for (const uint32_t node : nodes) {
    if (node == 0 || node >= item.rows) return Unfit("an accepted node is not in the tree");
  }
  if (item.tree) speculator->ObserveTree(sample, nodes);
  KDT_RETURN_IF_ERROR(CheckDraft(result->draft(), vocab_size));
  sample.draft.Swap(result->mutable_draft());
  gain.tree = item.tree;
  gain.drafted = item.rows - 1;
  gain.accepted = accepted;
  if (item.tree) {
    sample.speculation.set_rounds(sample.speculation.rounds() + 1);
    sample.speculation.set_drafted_nodes(sample.speculation.drafted_nodes() + item.rows - 1);
  }
  CutAtStop(sample, &gain);
  const auto kept = static_cast<uint32_t>(gain.tokens.size());
  // The last token of a round is the target's own; those before it were drafted.
  const uint32_t drafted_kept = std::min(kept, accepted);
  sample.speculation.set_accepted_tokens(sample.speculation.accepted_tokens() + drafted_kept);
  auto* per_depth = sample.speculation.mutable_accepted_per_depth();
  for (uint32_t depth = 0; depth < drafted_kept; ++depth) {
    if (static_cast<int>(depth) == per_depth->size()) per_depth->Add(0);
    per_depth->Set(static_cast<int>(depth), per_depth->Get(static_cast<int>(depth)) + 1);
  }
  sample.kept += kept;
  gained->push_back(std::move(gain));
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyStep(const std::vector<PlanItem>& plan, v1::StepResponse* response, uint32_t vocab_size,
                       SequenceStore* store, Speculator* speculator, std::vector<Gained>* gained) {
  int next = 0;
  for (const PlanItem& item : plan) {
    if (!item.has_result) {
      item.sample->committed += item.rows;
      store->Commit(item.sample->sequence_id, item.rows);
      continue;
    }
    if (next >= response->results_size()) return Unfit("results are missing");
    KDT_RETURN_IF_ERROR(
        TakeResult(item, response->mutable_results(next++), vocab_size, store, speculator, gained));
  }
  if (next != response->results_size()) return Unfit("it gave more results than were asked for");
  return absl::OkStatus();
}

}  // namespace kdt
