// The coordinator's Prometheus series. Requests and tokens are counted here alone, never by ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/group/group.h"
#include "kdt/v1/generation.pb.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace kdt {

// Every child is made once; recording is a few nanoseconds to a lock. Any thread.
class CoordinatorMetrics {
 public:
  explicit CoordinatorMetrics(std::shared_ptr<prometheus::Registry> registry);

  struct Finished {
    uint32_t prompt_tokens = 0;
    uint32_t cached_tokens = 0;
    double queue_s = 0;
    double total_s = 0;
  };
  void SampleFinished(v1::FinishReason reason, const Finished& sample);
  // A request that ended with an error.
  void RequestFailed(const absl::Status& status);
  void Rejected(const absl::Status& status);  // at the door
  // `held`: samples that ran, and wait for the group or for KV slots to go on.
  void SetLoad(uint32_t running, uint32_t held, uint32_t waiting);
  // Slots of one rank's pool (all ranks' are alike): held by running samples, by the prefix cache alone,
  // free.
  void SetPool(uint64_t running, uint64_t cached, uint64_t free);
  void Preempted(size_t samples);

  // `tokens` of one sample came `gap_s` behind its last ones (first: behind its submission).
  void TokensGained(uint32_t tokens, double gap_s, bool first);
  void StepDone(const StepCost& cost);
  void TreesBuilt(double build_s);
  void TreeVerified(uint32_t drafted_nodes, uint32_t accepted);

  // The slots counted here are not those that rank 0 told.
  void SlotCountDiffered();

  // `draft_depths`: how deep the group's drafter can draft; 0: it has none.
  void SetGroup(uint64_t epoch, const std::vector<RankStatus>& ranks, uint32_t draft_depths);

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>* requests_;
  prometheus::Family<prometheus::Counter>* rejections_;
  prometheus::Family<prometheus::Gauge>* rank_up_family_;
  std::vector<prometheus::Gauge*> rank_up_;  // by rank, made when the rank is first seen
  prometheus::Gauge *running_, *held_, *waiting_, *epoch_, *budget_;
  prometheus::Gauge *slots_running_, *slots_cached_, *slots_free_;
  prometheus::Counter *prompt_tokens_, *cached_tokens_, *generated_tokens_;
  prometheus::Counter *rounds_, *drafted_, *accepted_, *group_restarts_, *preemptions_, *slot_differences_;
  prometheus::Counter *stop_, *length_, *tool_calls_;
  prometheus::Family<prometheus::Counter>* accepted_by_depth_family_;
  std::vector<prometheus::Counter*> accepted_by_depth_;  // one for each depth that the drafter has
  prometheus::Histogram *first_token_, *inter_token_, *queue_, *total_, *step_, *tree_build_, *transport_;
  prometheus::Histogram* tree_nodes_;
};

}  // namespace kdt
