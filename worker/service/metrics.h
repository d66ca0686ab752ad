// A worker's Prometheus series. Every series carries the label rank; children are resolved once.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kdt/v1/worker.pb.h"
#include "worker/engine/engine.h"
#include "worker/service/worker_service.h"

namespace kdt {

class WorkerMetrics {
 public:
  WorkerMetrics(const WorkerIdentity& identity, std::shared_ptr<prometheus::Registry> registry);

  // Behind every step, on the engine's thread.
  void Observe(const v1::StepRequest& request, const v1::StepResponse& response);
  // Behind every step as well. Series of graphs exist once there is one.
  void SetStats(const EngineStats& stats);
  void SetLoaded(double seconds, uint64_t bytes);
  void SetKvSlots(uint64_t total);
  void SetDeviceMemory(uint64_t used, uint64_t total);

 private:
  // A gauge that appears with its first value: before, 0 would read as one.
  struct LateGauge {
    prometheus::Family<prometheus::Gauge>* family = nullptr;
    prometheus::Gauge* gauge = nullptr;
  };
  void Set(LateGauge* late, double value);
  void SetAttention(const AttentionErrors& errors);
  void SetGraphs(const EngineStats& stats);
  prometheus::Labels WithRank(const char* name, const std::string& value) const;

  std::shared_ptr<prometheus::Registry> registry_;
  const prometheus::Labels rank_;
  uint64_t slots_total_ = 0;
  // Steps since busy_ratio_ was set.
  double window_busy_us_ = 0;
  double window_total_us_ = 0;
  uint64_t moved_so_far_ = 0;
  AttentionErrors attention_so_far_;
  prometheus::Counter* steps_;
  prometheus::Counter* failed_steps_;
  prometheus::Counter* prefill_rows_;
  prometheus::Counter* tree_rows_;
  prometheus::Counter* step_seconds_;
  prometheus::Counter* attention_seconds_;
  prometheus::Counter* moe_seconds_;
  prometheus::Counter* dense_seconds_;
  prometheus::Counter* collective_seconds_;
  prometheus::Counter* draft_seconds_;
  prometheus::Counter* sample_seconds_;
  prometheus::Counter* other_seconds_;
  prometheus::Counter* failed_sequences_;
  prometheus::Counter* moved_bytes_;
  prometheus::Counter* attention_values_;
  prometheus::Counter* attention_beyond_;
  prometheus::Counter* attention_beyond_row_;
  prometheus::Gauge* attention_largest_;
  prometheus::Gauge* attention_largest_row_;
  prometheus::Gauge* slots_private_;
  prometheus::Gauge* slots_shared_;
  prometheus::Gauge* slots_free_;
  prometheus::Gauge* sequences_;
  prometheus::Gauge* runs_;
  prometheus::Gauge* fragmentation_;
  LateGauge busy_ratio_, expert_imbalance_, expert_rank_imbalance_;
  // Families of series that only a backend with captured graphs has; made with the first one.
  prometheus::Family<prometheus::Counter>* replays_ = nullptr;
  prometheus::Family<prometheus::Gauge>* occupancy_ = nullptr;
  prometheus::Family<prometheus::Gauge>* grid_fill_ = nullptr;
  prometheus::Gauge* capture_seconds_ = nullptr;
  std::map<int64_t, std::pair<prometheus::Counter*, uint64_t>> replays_so_far_;       // by rows
  std::map<std::string, std::pair<prometheus::Gauge*, prometheus::Gauge*>> kernels_;  // occupancy, grid fill
  prometheus::Gauge* load_seconds_;
  prometheus::Gauge* weight_bytes_;
};

}  // namespace kdt
