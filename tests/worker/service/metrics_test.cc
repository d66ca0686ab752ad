// A worker's series after known stats.
#include "worker/service/metrics.h"

#include <prometheus/text_serializer.h>

#include "tests/support/catch.h"

namespace kdt::testing {
namespace {

std::string Text(const prometheus::Registry& registry) {
  return prometheus::TextSerializer().Serialize(registry.Collect());
}

bool Has(const std::string& text, const std::string& line) {
  return text.find(line + "\n") != std::string::npos;
}

}  // namespace

TEST_CASE("graph series appear with the first graph and count replays by rows") {
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerIdentity identity;
  identity.rank = 3;
  WorkerMetrics metrics(identity, registry);
  EngineStats stats;
  metrics.SetStats(stats);
  CHECK(Text(*registry).find("graph") == std::string::npos);
  CHECK(Text(*registry).find("grid_fill") == std::string::npos);

  stats.replays = {{8, 2}, {16, 0}};
  stats.capture_seconds = 1.5;
  stats.kernel_uses = {{"verify_attention", 0.25, 0.5}};
  metrics.SetStats(stats);
  stats.replays = {{8, 5}, {16, 1}};
  stats.kernel_uses = {{"verify_attention", 0.25, 0.75}, {"gemm", 0.5, 2}};
  metrics.SetStats(stats);
  const std::string text = Text(*registry);
  INFO(text);
  CHECK(Has(text, R"(kdt_worker_graph_replays_total{rank="3",rows="8"} 5)"));
  CHECK(Has(text, R"(kdt_worker_graph_replays_total{rank="3",rows="16"} 1)"));
  CHECK(Has(text, R"(kdt_worker_graph_capture_seconds{rank="3"} 1.5)"));
  CHECK(Has(text, R"(kdt_worker_sm_occupancy_ratio{kernel="verify_attention",rank="3"} 0.25)"));
  CHECK(Has(text, R"(kdt_worker_grid_fill_ratio{kernel="verify_attention",rank="3"} 0.75)"));
  CHECK(Has(text, R"(kdt_worker_grid_fill_ratio{kernel="gemm",rank="3"} 2)"));
}

TEST_CASE("ratios that no step has told yet are not there") {
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerIdentity identity;
  identity.rank = 2;
  WorkerMetrics metrics(identity, registry);
  for (const char* name : {"kdt_worker_expert_imbalance_ratio{", "kdt_worker_expert_rank_imbalance_ratio{",
                           "kdt_worker_busy_ratio{"}) {
    CHECK(Text(*registry).find(name) == std::string::npos);
  }
  v1::StepResponse response;
  response.set_expert_imbalance(1.5);
  response.set_expert_rank_imbalance(1.25);
  response.mutable_timings()->set_total_us(2e6);
  response.mutable_timings()->set_collective_wait_us(5e5);
  metrics.Observe({}, response);
  const std::string text = Text(*registry);
  INFO(text);
  CHECK(Has(text, R"(kdt_worker_expert_imbalance_ratio{rank="2"} 1.5)"));
  CHECK(Has(text, R"(kdt_worker_expert_rank_imbalance_ratio{rank="2"} 1.25)"));
  CHECK(Has(text, R"(kdt_worker_busy_ratio{rank="2"} 0.75)"));
}

TEST_CASE("what validated steps found is counted once") {
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics(WorkerIdentity{}, registry);
  EngineStats stats;
  stats.attention = {1000, 7, 1, 3.5F, 1.25F};
  metrics.SetStats(stats);
  metrics.SetStats(stats);
  stats.attention.values = 1500;
  stats.attention.beyond_ulp = 8;
  metrics.SetStats(stats);
  const std::string text = Text(*registry);
  INFO(text);
  CHECK(Has(text, R"(kdt_worker_attention_checked_values_total{rank="0"} 1500)"));
  CHECK(Has(text, R"(kdt_worker_attention_beyond_ulp_values_total{of="value",rank="0"} 8)"));
  CHECK(Has(text, R"(kdt_worker_attention_beyond_ulp_values_total{of="row",rank="0"} 1)"));
  CHECK(Has(text, R"(kdt_worker_attention_error_ulps{of="value",rank="0"} 3.5)"));
  CHECK(Has(text, R"(kdt_worker_attention_error_ulps{of="row",rank="0"} 1.25)"));
}

}  // namespace kdt::testing
