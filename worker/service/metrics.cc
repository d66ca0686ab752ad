#include "worker/service/metrics.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kdt {
namespace {

constexpr double kSecondsAMicro = 1e-6;
constexpr double kBusyWindowUs = 1e6;  // step time that busy_ratio is taken over

}  // namespace

WorkerMetrics::WorkerMetrics(const WorkerIdentity& identity, std::shared_ptr<prometheus::Registry> registry)
    : registry_(std::move(registry)), rank_({{"rank", std::to_string(identity.rank)}}) {
  const auto counter = [&](const char* name, const char* help) {
    return &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(rank_);
  };
  const auto gauge = [&](const char* name, const char* help) {
    return &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(rank_);
  };
  prometheus::BuildGauge()
      .Name("kdt_worker_info")
      .Help("What this rank runs on; always 1")
      .Register(*registry_)
      .Add({{"rank", std::to_string(identity.rank)},
            {"backend", identity.backend},
            {"device", identity.device},
            {"arch", identity.arch},
            {"gpu_uuid", identity.gpu_uuid},
            {"pci_bus_id", identity.pci_bus_id}})
      .Set(1);

  steps_ = counter("kdt_worker_steps_total", "Steps run");
  failed_steps_ = counter("kdt_worker_failed_steps_total", "Steps that ended the epoch with an error");
  step_seconds_ = counter("kdt_worker_step_seconds_total", "Time from a step's arrival to its answer");
  failed_sequences_ = counter("kdt_worker_bad_logits_total",
                              "Sequences failed because their logits were not finite (rank 0)");

  auto& rows =
      prometheus::BuildCounter().Name("kdt_worker_rows_total").Help("Rows forwarded").Register(*registry_);
  const auto rows_of = [&](const char* kind) {
    return &rows.Add({{"rank", std::to_string(identity.rank)}, {"kind", kind}});
  };
  prefill_rows_ = rows_of("prefill");
  tree_rows_ = rows_of("tree");

  auto& busy =
      prometheus::BuildCounter()
          .Name("kdt_worker_busy_seconds_total")
          .Help("Step time by phase; the phases do not overlap, collective_wait is waiting for other ranks")
          .Register(*registry_);
  const auto phase = [&](const char* name) {
    return &busy.Add({{"rank", std::to_string(identity.rank)}, {"phase", name}});
  };
  attention_seconds_ = phase("attention");
  moe_seconds_ = phase("moe");
  dense_seconds_ = phase("dense");
  collective_seconds_ = phase("collective_wait");
  draft_seconds_ = phase("draft");
  sample_seconds_ = phase("sample");
  other_seconds_ = phase("other");

  auto& slots = prometheus::BuildGauge()
                    .Name("kdt_worker_kv_slots")
                    .Help("KV slots by state: private to one sequence, shared by several, free")
                    .Register(*registry_);
  const auto state = [&](const char* name) {
    return &slots.Add({{"rank", std::to_string(identity.rank)}, {"state", name}});
  };
  slots_private_ = state("private");
  slots_shared_ = state("shared");
  slots_free_ = state("free");
  sequences_ = gauge("kdt_worker_kv_sequences", "Sequences alive in the pool");
  runs_ = gauge("kdt_worker_kv_runs", "Contiguous runs over all slot tables");
  fragmentation_ = gauge("kdt_worker_kv_fragmentation_ratio", "1 - largest free extent / free slots");
  moved_bytes_ =
      counter("kdt_worker_kv_moved_bytes_total", "Bytes of KV rows moved by commits and relocation");
  const auto late = [&](const char* name, const char* help) {
    return LateGauge{&prometheus::BuildGauge().Name(name).Help(help).Register(*registry_)};
  };
  busy_ratio_ = late("kdt_worker_busy_ratio",
                     "Share of step time not spent waiting for other ranks, over the last second of steps");
  expert_imbalance_ = late("kdt_worker_expert_imbalance_ratio",
                           "Busiest expert's rows over the mean expert's, mean of the layers; 1 is even");
  expert_rank_imbalance_ = late(
      "kdt_worker_expert_rank_imbalance_ratio",
      "Distinct experts that the busiest rank reads for a layer over the mean rank's; 1 unless --moe=expert");
  attention_values_ = counter("kdt_worker_attention_checked_values_total",
                              "Values of attention compared with the reference (--attention=validate)");
  auto& beyond =
      prometheus::BuildCounter()
          .Name("kdt_worker_attention_beyond_ulp_values_total")
          .Help("Of those, more than one bf16 ulp away: of the value, or of its row's largest value")
          .Register(*registry_);
  auto& largest = prometheus::BuildGauge()
                      .Name("kdt_worker_attention_error_ulps")
                      .Help("Largest distance from the reference since the start, in the same bf16 ulps")
                      .Register(*registry_);
  const auto of = [&](const char* what) {
    return prometheus::Labels{{"rank", std::to_string(identity.rank)}, {"of", what}};
  };
  attention_beyond_ = &beyond.Add(of("value"));
  attention_beyond_row_ = &beyond.Add(of("row"));
  attention_largest_ = &largest.Add(of("value"));
  attention_largest_row_ = &largest.Add(of("row"));
  load_seconds_ = gauge("kdt_worker_load_seconds", "Time to load the weights");
  weight_bytes_ = gauge("kdt_worker_weight_bytes", "Bytes of this rank's weights");
}

void WorkerMetrics::Observe(const v1::StepRequest& request, const v1::StepResponse& response) {
  steps_->Increment();
  if (response.error_code() != 0) failed_steps_->Increment();
  double prefill = 0, tree = 0;
  for (const v1::PrefillChunk& chunk : request.prefill()) prefill += chunk.tokens_size();
  for (const v1::TreeVerify& verify : request.verify()) tree += verify.tokens_size();
  prefill_rows_->Increment(prefill);
  tree_rows_->Increment(tree);
  const v1::StepTimings& timings = response.timings();
  step_seconds_->Increment(timings.total_us() * kSecondsAMicro);
  attention_seconds_->Increment(timings.attention_us() * kSecondsAMicro);
  moe_seconds_->Increment(timings.moe_us() * kSecondsAMicro);
  dense_seconds_->Increment(timings.dense_us() * kSecondsAMicro);
  collective_seconds_->Increment(timings.collective_wait_us() * kSecondsAMicro);
  const double draft_us = timings.draft_us() - timings.draft_wait_us();
  const double sample_us = timings.sample_us() - timings.sample_wait_us();
  draft_seconds_->Increment(std::max(0.0, draft_us) * kSecondsAMicro);
  sample_seconds_->Increment(std::max(0.0, sample_us) * kSecondsAMicro);
  const double busy_us = timings.total_us() - timings.collective_wait_us();
  const double other_us =
      busy_us - timings.attention_us() - timings.moe_us() - timings.dense_us() - draft_us - sample_us;
  other_seconds_->Increment(std::max(0.0, other_us) * kSecondsAMicro);
  window_busy_us_ += busy_us;
  window_total_us_ += timings.total_us();
  if (window_total_us_ >= kBusyWindowUs) {
    Set(&busy_ratio_, window_busy_us_ / window_total_us_);
    window_busy_us_ = window_total_us_ = 0;
  }
  if (response.expert_imbalance() > 0) Set(&expert_imbalance_, response.expert_imbalance());
  if (response.expert_rank_imbalance() > 0) {
    Set(&expert_rank_imbalance_, response.expert_rank_imbalance());
  }
  for (const v1::SequenceResult& result : response.results()) {
    if (!result.error().empty()) failed_sequences_->Increment();
  }
  if (!response.has_pool()) return;  // a step that failed
  const v1::PoolStats& pool = response.pool();
  slots_private_->Set(static_cast<double>(pool.slots_used() - pool.slots_shared()));
  slots_shared_->Set(static_cast<double>(pool.slots_shared()));
  slots_free_->Set(static_cast<double>(slots_total_) - static_cast<double>(pool.slots_used()));
  sequences_->Set(pool.sequences());
  runs_->Set(pool.runs());
  fragmentation_->Set(pool.fragmentation());
  if (pool.moved_bytes() > moved_so_far_) {
    moved_bytes_->Increment(static_cast<double>(pool.moved_bytes() - moved_so_far_));
    moved_so_far_ = pool.moved_bytes();
  }
}

void WorkerMetrics::SetStats(const EngineStats& stats) {
  SetAttention(stats.attention);
  if (!stats.replays.empty()) SetGraphs(stats);
}

void WorkerMetrics::Set(LateGauge* late, double value) {
  if (late->gauge == nullptr) late->gauge = &late->family->Add(rank_);
  late->gauge->Set(value);
}

prometheus::Labels WorkerMetrics::WithRank(const char* name, const std::string& value) const {
  prometheus::Labels labels = rank_;
  labels[name] = value;
  return labels;
}

void WorkerMetrics::SetGraphs(const EngineStats& stats) {
  if (replays_ == nullptr) {
    replays_ = &prometheus::BuildCounter()
                    .Name("kdt_worker_graph_replays_total")
                    .Help("Replays of the target's captured graphs, by the rows that they are for")
                    .Register(*registry_);
    occupancy_ =
        &prometheus::BuildGauge()
             .Name("kdt_worker_sm_occupancy_ratio")
             .Help("Theoretical occupancy in the last graph: resident warps over the most an SM holds")
             .Register(*registry_);
    grid_fill_ = &prometheus::BuildGauge()
                      .Name("kdt_worker_grid_fill_ratio")
                      .Help("Blocks launched by the last graph over the blocks that the GPU holds at once")
                      .Register(*registry_);
    capture_seconds_ = &prometheus::BuildGauge()
                            .Name("kdt_worker_graph_capture_seconds")
                            .Help("Time to capture all graphs, when the group last formed")
                            .Register(*registry_)
                            .Add(rank_);
  }
  capture_seconds_->Set(stats.capture_seconds);
  for (const EngineStats::GraphReplays& graph : stats.replays) {
    auto& [counter, so_far] = replays_so_far_[graph.rows];
    if (counter == nullptr) counter = &replays_->Add(WithRank("rows", std::to_string(graph.rows)));
    if (graph.replays > so_far) counter->Increment(static_cast<double>(graph.replays - so_far));
    so_far = graph.replays;
  }
  for (const kernels::KernelUse& use : stats.kernel_uses) {
    auto& [occupancy, fill] = kernels_[use.kernel];
    if (occupancy == nullptr) {
      occupancy = &occupancy_->Add(WithRank("kernel", use.kernel));
      fill = &grid_fill_->Add(WithRank("kernel", use.kernel));
    }
    occupancy->Set(use.occupancy);
    fill->Set(use.grid_fill);
  }
}

void WorkerMetrics::SetAttention(const AttentionErrors& errors) {
  if (errors.values == attention_so_far_.values) return;
  const auto grew = [](uint64_t now, uint64_t before) { return static_cast<double>(now - before); };
  attention_values_->Increment(grew(errors.values, attention_so_far_.values));
  attention_beyond_->Increment(grew(errors.beyond_ulp, attention_so_far_.beyond_ulp));
  attention_beyond_row_->Increment(grew(errors.beyond_row_ulp, attention_so_far_.beyond_row_ulp));
  attention_largest_->Set(static_cast<double>(errors.largest_ulps));
  attention_largest_row_->Set(static_cast<double>(errors.largest_row_ulps));
  attention_so_far_ = errors;
}

void WorkerMetrics::SetKvSlots(uint64_t total) {
  slots_total_ = total;
  slots_free_->Set(static_cast<double>(total));
}

void WorkerMetrics::SetDeviceMemory(uint64_t used, uint64_t total) {
  auto& memory = prometheus::BuildGauge()
                     .Name("kdt_worker_device_memory_bytes")
                     .Help("The GPU's memory behind loading: used by all processes, and total")
                     .Register(*registry_);
  const auto set = [&](const char* state, uint64_t bytes) {
    prometheus::Labels labels = rank_;
    labels["state"] = state;
    memory.Add(labels).Set(static_cast<double>(bytes));
  };
  set("used", used);
  set("total", total);
}

void WorkerMetrics::SetLoaded(double seconds, uint64_t bytes) {
  load_seconds_->Set(seconds);
  weight_bytes_->Set(static_cast<double>(bytes));
}

}  // namespace kdt
