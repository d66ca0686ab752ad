#include "tests/bench/rank_bench/step_bench.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt::bench {
namespace {

constexpr uint32_t kDraftTopK = 16;
constexpr int kGraphSteps = 7;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

absl::Status StepBench::Begin(const StepShape& shape) {
  // A step of its own drops what was there before.
  v1::StepRequest request;
  request.set_step(++step_);
  for (uint64_t id = first_id_; id < last_id_; ++id) request.add_ops()->mutable_free()->set_sequence_id(id);
  KDT_RETURN_IF_ERROR(engine_->Step(request, &response_));
  first_id_ = last_id_;
  starts_.assign(shape.batch, static_cast<uint32_t>(shape.context));
  for (int64_t s = 0; s < shape.batch; ++s) {
    KDT_RETURN_IF_ERROR(engine_->AssumeSequence(last_id_++, shape.context));
  }
  return absl::OkStatus();
}

absl::Status StepBench::Step(const StepShape& shape) {
  v1::StepRequest request;
  request.set_step(++step_);
  for (int64_t s = 0; s < shape.batch; ++s) {
    v1::TreeVerify* tree = request.add_verify();
    tree->set_sequence_id(first_id_ + s);
    tree->set_start(starts_[s]);
    if (shape.draft) tree->set_draft_top_k(kDraftTopK);
    for (int64_t n = 0; n < shape.rows; ++n) {
      random_ = random_ * 1664525u + 1013904223u;
      tree->add_tokens(
          static_cast<uint32_t>(shape.token_begin + (random_ >> 8) % (shape.token_end - shape.token_begin)));
      if (n > 0) tree->add_parents(static_cast<uint32_t>((n - 1) / 2));
    }
  }
  clock_->BeginStep();
  tap_->Begin();
  KDT_RETURN_IF_ERROR(engine_->Step(request, &response_));
  for (const v1::SequenceResult& result : response_.results()) {
    if (!result.error().empty()) return absl::InternalError(result.error());
    starts_[result.sequence_id() - first_id_] += 1 + result.accepted_nodes_size();
  }
  if (told_ == nullptr) {
    // A rank on its own that is not rank 0 gets no answers; random guesses are not accepted.
    for (uint32_t& start : starts_) start += rank_ == 0 ? 0 : 1;
  } else if (rank_ == 0) {
    std::copy(starts_.begin(), starts_.end(), told_->starts);
    told_->tellings.store(++tellings_, std::memory_order_release);
  } else {
    // Rank 0 cannot pass the next step without this rank, so what it tells stays until then.
    ++tellings_;
    while (told_->tellings.load(std::memory_order_acquire) < tellings_) std::this_thread::yield();
    std::copy(told_->starts, told_->starts + starts_.size(), starts_.begin());
  }
  return absl::OkStatus();
}

absl::StatusOr<StepTimes> StepBench::Measure(const StepShape& shape, int warm_up, int steps) {
  KDT_RETURN_IF_ERROR(Begin(shape));
  std::vector<std::pair<double, v1::StepTimings>> all;
  for (int i = 0; i < warm_up + steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    KDT_RETURN_IF_ERROR(Step(shape));
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (i >= warm_up) all.emplace_back(time.count(), response_.timings());
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto& median = all[all.size() / 2];
  StepTimes times{median.first,
                  all.front().first,
                  all.back().first,
                  0,
                  {},
                  median.second,
                  response_.expert_imbalance(),
                  response_.expert_rank_imbalance()};
  std::vector<std::pair<double, std::vector<PartClock::GraphTime>>> graphs;
  clock_->TimeGraphs(true);
  for (int i = 0; i < kGraphSteps; ++i) {
    KDT_RETURN_IF_ERROR(Step(shape));
    KDT_ASSIGN_OR_RETURN(auto replays, clock_->CollectGraphs());
    double sum = 0;
    for (const PartClock::GraphTime& time : replays) sum += time.device_us;
    graphs.emplace_back(sum, std::move(replays));
  }
  clock_->TimeGraphs(false);
  std::sort(graphs.begin(), graphs.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  times.graphs_us = graphs[kGraphSteps / 2].first;
  times.graphs = graphs[kGraphSteps / 2].second;
  return times;
}

absl::StatusOr<StepParts> StepBench::MeasureParts(const StepShape& shape, int warm_up, int steps) {
  KDT_RETURN_IF_ERROR(Begin(shape));
  StepParts result;
  std::array<std::vector<double>, kParts> all;
  std::array<double, kParts> parts{};
  for (int i = 0; i < warm_up + steps; ++i) {
    KDT_RETURN_IF_ERROR(Step(shape));
    KDT_RETURN_IF_ERROR(clock_->Collect(&parts));
    if (i < warm_up) continue;
    for (int p = 0; p < kParts; ++p) all[p].push_back(parts[p]);
    result.experts += tap_->Distinct(shape.rows * shape.batch) / steps;
  }
  for (int p = 0; p < kParts; ++p) result.us[p] = Median(all[p]);
  return result;
}

}  // namespace kdt::bench
