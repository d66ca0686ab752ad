// The scheduler's thread: what clients get of a step's tokens, and how requests end.
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/scheduler/scheduler.h"

namespace kdt {

void Scheduler::DeliverGains() {
  for (Gained& gained : gained_) Deliver(&gained);
  gained_.clear();
}

void Scheduler::Deliver(Gained* gained) {
  Sample* sample = gained->sample;
  Request* request = sample->request;
  if (request->ended) return;
  if (!gained->error.empty()) {
    spdlog::error("request {} failed on the ranks: {}", request->spec.request_id, gained->error);
    EndRequest(request, absl::InternalError("the model gave no usable result for this request"));
    return;
  }
  v1::GenerateResponse response;
  response.set_request_id(request->spec.request_id);
  response.set_index(sample->index);
  v1::Chunk* chunk = response.mutable_chunk();
  // The token that ends the answer is listed, but is not text.
  std::span<const uint32_t> texts = gained->tokens;
  if (gained->stop_token.has_value()) texts = texts.first(texts.size() - 1);
  const auto taken = sample->output->Push(texts, chunk);
  if (!taken.ok()) {
    spdlog::error("request {}: {}", request->spec.request_id, taken.status().message());
    EndRequest(request, absl::InternalError("the answer's tokens have no text"));
    return;
  }
  std::optional<std::string> stop_string;
  size_t kept = gained->tokens.size();
  if (taken->stop.has_value()) {
    stop_string = request->spec.stops->strings()[*taken->stop];
    kept = taken->tokens;
    sample->kept -= static_cast<uint32_t>(gained->tokens.size() - kept);
    gained->finish = v1::STOP;
    gained->stop_token.reset();
  }
  metrics_.TokensGained(static_cast<uint32_t>(kept), gained->gap_s, gained->first);
  if (gained->tree) metrics_.TreeVerified(gained->drafted, gained->accepted);
  const bool finished = gained->finish != v1::FINISH_REASON_UNSPECIFIED;
  if (finished && !stop_string.has_value()) sample->output->Flush(chunk);
  for (size_t i = 0; i < kept; ++i) {
    chunk->add_token_ids(gained->tokens[i]);
    if (i < gained->logprobs.size()) *chunk->add_logprobs() = std::move(gained->logprobs[i]);
  }
  if (!request->sink->Push(std::move(response))) {
    EndRequest(request, absl::ResourceExhaustedError("the client reads its answer too slowly"));
    return;
  }
  if (finished) Complete(sample, *gained, stop_string);
}

void Scheduler::Complete(Sample* sample, const Gained& gained,
                         const std::optional<std::string>& stop_string) {
  Request* request = sample->request;
  const RequestSpec& spec = request->spec;
  const int64_t now_us = MonotonicMicros();
  v1::GenerateResponse response;
  response.set_request_id(spec.request_id);
  response.set_index(sample->index);
  v1::Complete* complete = response.mutable_complete();
  const bool called_tools = gained.finish == v1::STOP && sample->output->has_tool_calls();
  complete->set_finish_reason(called_tools ? v1::TOOL_CALLS : gained.finish);
  if (stop_string.has_value()) complete->set_stop_string(*stop_string);
  if (gained.stop_token.has_value()) complete->set_stop_token_id(*gained.stop_token);
  complete->mutable_usage()->set_prompt_tokens(static_cast<uint32_t>(spec.prompt.size()));
  complete->mutable_usage()->set_cached_prompt_tokens(request->cached_tokens);
  complete->mutable_usage()->set_completion_tokens(sample->kept);
  complete->mutable_usage()->set_reasoning_tokens(sample->output->reasoning_tokens());
  complete->mutable_timing()->set_queue_seconds(SecondsBetween(request->submitted_us, sample->admitted_us));
  complete->mutable_timing()->set_prefill_seconds(
      SecondsBetween(sample->admitted_us, sample->first_token_us));
  complete->mutable_timing()->set_time_to_first_token_seconds(
      SecondsBetween(request->submitted_us, sample->first_token_us));
  complete->mutable_timing()->set_decode_seconds(SecondsBetween(sample->first_token_us, now_us));
  *complete->mutable_speculation() = sample->speculation;
  for (const auto& logprobs : request->prompt_logprobs) *complete->add_prompt_logprobs() = logprobs;
  complete->set_seed(spec.sampling.seed() + sample->index);
  sample->state = SampleState::kDone;
  CoordinatorMetrics::Finished finished;
  finished.prompt_tokens = static_cast<uint32_t>(spec.prompt.size());
  finished.cached_tokens = request->cached_tokens;
  finished.queue_s = complete->timing().queue_seconds();
  finished.total_s = SecondsBetween(request->submitted_us, now_us);
  metrics_.SampleFinished(complete->finish_reason(), finished);
  const bool taken = request->sink->Push(std::move(response));
  if (!taken) {
    EndRequest(request, absl::ResourceExhaustedError("the client reads its answer too slowly"));
  } else if (--request->unfinished == 0) {
    EndRequest(request, absl::OkStatus());
  }
}

void Scheduler::EndRequest(Request* request, const absl::Status& status) {
  if (request->ended) return;
  request->ended = true;
  for (auto& sample : request->samples) {
    // A request that was cancelled or failed gives its slots back at once.
    if (sample->state != SampleState::kDone) sample->keep_sequence = false;
    sample->state = SampleState::kDone;
  }
  if (!status.ok()) metrics_.RequestFailed(status);
  request->sink->End(status);
}

void Scheduler::EndAll(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    for (auto& request : inbox_) request->sink->End(status);
    inbox_.clear();
  }
  for (auto& [id, request] : requests_) EndRequest(request.get(), status);
  gained_.clear();
  waiting_.clear();
  running_.clear();
  requests_.clear();
  UpdateCounts();
}

}  // namespace kdt
