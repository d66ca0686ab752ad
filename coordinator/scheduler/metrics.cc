#include "coordinator/scheduler/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <utility>

namespace kdt {
namespace {

using prometheus::Histogram;

constexpr double kSecondsAMicro = 1e-6;

// From `first` on, `count` bounds, each `factor` times the one before.
Histogram::BucketBoundaries Bounds(double first, double factor, int count) {
  Histogram::BucketBoundaries bounds;
  for (int i = 0; i < count; ++i, first *= factor) bounds.push_back(first);
  return bounds;
}

// How a request that did not complete ended, as a label. Few values: a label must stay bounded.
std::string FailureLabel(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
      return "cancelled";
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    case absl::StatusCode::kUnavailable:
      return "unavailable";
    case absl::StatusCode::kResourceExhausted:
      return "slow_client";
    default:
      return "error";
  }
}

std::string RejectionLabel(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return "queue_full";
    case absl::StatusCode::kUnavailable:
      return "unavailable";
    default:
      return "invalid";
  }
}

}  // namespace

CoordinatorMetrics::CoordinatorMetrics(std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)) {
  const auto counter = [&](const char* name, const char* help) {
    return &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add({});
  };
  const auto gauge = [&](const char* name, const char* help) {
    return &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add({});
  };
  const auto histogram = [&](const char* name, const char* help, const Histogram::BucketBoundaries& bounds) {
    return &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_).Add({}, bounds);
  };
  const auto request_bounds = Bounds(0.001, 2, 18);   // 1 ms .. 131 s
  const auto token_bounds = Bounds(0.0005, 1.6, 18);  // 0.5 ms .. 1.5 s
  const auto step_bounds = Bounds(0.0002, 1.6, 22);   // 0.2 ms .. 3.9 s
  const auto cost_bounds = Bounds(0.00001, 1.6, 18);  // 10 us .. 30 ms

  requests_ = &prometheus::BuildCounter()
                   .Name("kdt_requests_total")
                   .Help("Samples that ended, by how")
                   .Register(*registry_);
  stop_ = &requests_->Add({{"finish_reason", "stop"}});
  length_ = &requests_->Add({{"finish_reason", "length"}});
  tool_calls_ = &requests_->Add({{"finish_reason", "tool_calls"}});
  for (const char* reason : {"cancelled", "deadline", "unavailable", "slow_client", "error"}) {
    requests_->Add({{"finish_reason", reason}});
  }
  rejections_ = &prometheus::BuildCounter()
                     .Name("kdt_admission_rejections_total")
                     .Help("Requests refused before they were queued, by reason")
                     .Register(*registry_);
  for (const char* reason : {"queue_full", "unavailable", "invalid"}) rejections_->Add({{"reason", reason}});
  running_ = gauge("kdt_requests_running", "Samples that take part in steps");
  held_ = gauge("kdt_requests_held",
                "Samples that ran and wait to go on: for the group to form again, or for KV slots");
  waiting_ = gauge("kdt_requests_waiting", "Requests of which no sample has started");
  prompt_tokens_ = counter("kdt_prompt_tokens_total", "Prompt tokens of finished samples");
  cached_tokens_ = counter("kdt_cached_prompt_tokens_total", "Of those, found in the prefix cache");
  generated_tokens_ = counter("kdt_generated_tokens_total", "Generated tokens");
  first_token_ = histogram("kdt_time_to_first_token_seconds", "From submission to a sample's first token",
                           request_bounds);
  inter_token_ = histogram("kdt_inter_token_seconds", "Time for each further token", token_bounds);
  queue_ = histogram("kdt_queue_seconds", "From submission to admission", request_bounds);
  total_ = histogram("kdt_request_seconds", "From submission to a sample's end", request_bounds);
  step_ = histogram("kdt_step_seconds", "A step: sent to answered by rank 0", step_bounds);
  tree_build_ =
      histogram("kdt_tree_build_seconds", "Growing the trees of a step and choosing budgets", cost_bounds);
  transport_ = histogram("kdt_transport_seconds", "A step's round trip less rank 0's own time", cost_bounds);
  tree_nodes_ = histogram("kdt_tree_nodes", "Drafted nodes of each verified tree",
                          {0, 1, 2, 4, 8, 16, 32, 64, 128, 256});
  rounds_ = counter("kdt_rounds_total", "Verified trees, those of a root alone included");
  drafted_ = counter("kdt_drafted_tokens_total", "Drafted nodes verified");
  accepted_ = counter("kdt_accepted_tokens_total", "Drafted tokens accepted");
  accepted_by_depth_family_ = &prometheus::BuildCounter()
                                   .Name("kdt_accepted_tokens_by_depth_total")
                                   .Help("Drafted tokens accepted, by their depth in the tree")
                                   .Register(*registry_);
  budget_ = gauge("kdt_budget_nodes", "Drafted nodes of the last verified tree");
  rank_up_family_ = &prometheus::BuildGauge()
                         .Name("kdt_rank_up")
                         .Help("1 while the rank takes part in the group")
                         .Register(*registry_);
  auto& slots = prometheus::BuildGauge()
                    .Name("kdt_kv_slots")
                    .Help("KV slots of a rank's pool: held by running samples, by the prefix cache, free")
                    .Register(*registry_);
  slots_running_ = &slots.Add({{"state", "running"}});
  slots_cached_ = &slots.Add({{"state", "cached"}});
  slots_free_ = &slots.Add({{"state", "free"}});
  preemptions_ = counter("kdt_preemptions_total",
                         "Times a running sample gave its KV slots to an older one and waits again");
  epoch_ = gauge("kdt_epoch", "Epoch of the group that serves or served last");
  slot_differences_ =
      counter("kdt_slot_count_differences_total",
              "Steps after which the coordinator's count of KV slots was not rank 0's; always 0");
  group_restarts_ = counter("kdt_group_restarts_total", "Times the group formed again after a loss");
}

void CoordinatorMetrics::SampleFinished(v1::FinishReason reason, const Finished& sample) {
  (reason == v1::STOP ? stop_ : reason == v1::LENGTH ? length_ : tool_calls_)->Increment();
  prompt_tokens_->Increment(sample.prompt_tokens);
  cached_tokens_->Increment(sample.cached_tokens);
  queue_->Observe(sample.queue_s);
  total_->Observe(sample.total_s);
}

void CoordinatorMetrics::RequestFailed(const absl::Status& status) {
  requests_->Add({{"finish_reason", FailureLabel(status)}}).Increment();
}

void CoordinatorMetrics::Rejected(const absl::Status& status) {
  rejections_->Add({{"reason", RejectionLabel(status)}}).Increment();
}

void CoordinatorMetrics::SetLoad(uint32_t running, uint32_t held, uint32_t waiting) {
  running_->Set(running);
  held_->Set(held);
  waiting_->Set(waiting);
}

void CoordinatorMetrics::SetPool(uint64_t running, uint64_t cached, uint64_t free) {
  slots_running_->Set(static_cast<double>(running));
  slots_cached_->Set(static_cast<double>(cached));
  slots_free_->Set(static_cast<double>(free));
}

void CoordinatorMetrics::Preempted(size_t samples) {
  if (samples > 0) preemptions_->Increment(static_cast<double>(samples));
}

void CoordinatorMetrics::TokensGained(uint32_t tokens, double gap_s, bool first) {
  generated_tokens_->Increment(tokens);
  if (first) {
    first_token_->Observe(gap_s);
    return;
  }
  // An accepted path comes at once; its tokens share the time that the round took.
  for (uint32_t i = 0; i < tokens; ++i) inter_token_->Observe(gap_s / tokens);
}

void CoordinatorMetrics::StepDone(const StepCost& cost) {
  step_->Observe(cost.round_trip_us * kSecondsAMicro);
  transport_->Observe(cost.transport_us * kSecondsAMicro);
}

void CoordinatorMetrics::TreesBuilt(double build_s) { tree_build_->Observe(build_s); }

void CoordinatorMetrics::TreeVerified(uint32_t drafted_nodes, uint32_t accepted) {
  rounds_->Increment();
  tree_nodes_->Observe(drafted_nodes);
  budget_->Set(drafted_nodes);
  if (drafted_nodes == 0) return;
  drafted_->Increment(drafted_nodes);
  accepted_->Increment(accepted);
  for (size_t depth = 0; depth < std::min<size_t>(accepted, accepted_by_depth_.size()); ++depth) {
    accepted_by_depth_[depth]->Increment();
  }
}

void CoordinatorMetrics::SlotCountDiffered() { slot_differences_->Increment(); }

void CoordinatorMetrics::SetGroup(uint64_t epoch, const std::vector<RankStatus>& ranks,
                                  uint32_t draft_depths) {
  while (accepted_by_depth_.size() < draft_depths) {
    const std::string depth = std::to_string(accepted_by_depth_.size() + 1);
    accepted_by_depth_.push_back(&accepted_by_depth_family_->Add({{"depth", depth}}));
  }
  if (epoch_->Value() != 0 && epoch_->Value() != static_cast<double>(epoch)) group_restarts_->Increment();
  epoch_->Set(static_cast<double>(epoch));
  for (const RankStatus& rank : ranks) {
    const auto index = static_cast<size_t>(rank.rank);
    while (rank_up_.size() <= index) {
      rank_up_.push_back(&rank_up_family_->Add({{"rank", std::to_string(rank_up_.size())}}));
    }
    rank_up_[index]->Set(rank.up ? 1 : 0);
  }
}

}  // namespace kdt
