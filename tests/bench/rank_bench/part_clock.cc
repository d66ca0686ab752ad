#include "tests/bench/rank_bench/part_clock.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt::bench {
namespace {

absl::Status State(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", cudaGetErrorString(error)));
}

absl::Status Add(const std::vector<std::pair<Part, cudaEvent_t>>& marks,
                 std::array<double, kParts>* microseconds) {
  for (size_t i = 0; i + 1 < marks.size(); ++i) {
    if (marks[i].first == Part::kNone) continue;
    float milliseconds = 0;
    KDT_RETURN_IF_ERROR(State(cudaEventElapsedTime(&milliseconds, marks[i].second, marks[i + 1].second),
                              "cudaEventElapsedTime"));
    (*microseconds)[static_cast<int>(marks[i].first)] += milliseconds * 1e3;
  }
  return absl::OkStatus();
}

}  // namespace

const char* PartName(Part part) {
  constexpr const char* kNames[] = {"attention", "absorb",     "moe",      "router", "gemm",
                                    "small",     "collective", "sampling", "draft"};
  return kNames[static_cast<int>(part)];
}

PartClock::~PartClock() {
  for (cudaEvent_t event : all_) (void)cudaEventDestroy(event);
}

// `reusable`: not baked into a graph.
absl::StatusOr<cudaEvent_t> PartClock::Event(bool reusable) {
  cudaEvent_t event = nullptr;
  if (reusable && !spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
    return event;
  }
  KDT_RETURN_IF_ERROR(State(cudaEventCreate(&event), "cudaEventCreate"));
  all_.push_back(event);
  return event;
}

absl::Status PartClock::Mark(Part part) {
  KDT_ASSIGN_OR_RETURN(const cudaEvent_t event, Event(!capturing_));
  (capturing_ ? graph_ : step_).emplace_back(part, event);
  // In a capture an external record becomes a node of the graph that records at every replay.
  return State(
      cudaEventRecordWithFlags(event, stream_, capturing_ ? cudaEventRecordExternal : cudaEventRecordDefault),
      "cudaEventRecord");
}

absl::Status PartClock::Around(absl::FunctionRef<absl::Status()> replay) {
  if (!time_graphs_) return replay();
  KDT_ASSIGN_OR_RETURN(const cudaEvent_t begin, Event(true));
  KDT_ASSIGN_OR_RETURN(const cudaEvent_t end, Event(true));
  KDT_RETURN_IF_ERROR(State(cudaEventRecord(begin, stream_), "cudaEventRecord"));
  const auto start = std::chrono::steady_clock::now();
  KDT_RETURN_IF_ERROR(replay());
  const std::chrono::duration<double, std::micro> launch = std::chrono::steady_clock::now() - start;
  replays_.push_back({begin, end, launch.count()});
  return State(cudaEventRecord(end, stream_), "cudaEventRecord");
}

absl::StatusOr<std::vector<PartClock::GraphTime>> PartClock::CollectGraphs() {
  std::vector<GraphTime> times;
  for (const Replayed& replayed : replays_) {
    float milliseconds = 0;
    KDT_RETURN_IF_ERROR(
        State(cudaEventElapsedTime(&milliseconds, replayed.begin, replayed.end), "cudaEventElapsedTime"));
    times.push_back({milliseconds * 1e3, replayed.launch_us});
    spare_.push_back(replayed.begin);
    spare_.push_back(replayed.end);
  }
  replays_.clear();
  return times;
}

absl::Status PartClock::Enter(Part part) {
  if (!enabled_) return absl::OkStatus();
  if (!capturing_ && part != Part::kNone) {
    drafting_ |= sampled_ && part != Part::kSampling && part != Part::kCollective;
    sampled_ |= part == Part::kSampling;
    if (drafting_) part = Part::kDraft;
  }
  if (part == current_) return absl::OkStatus();
  current_ = part;
  return Mark(part);
}

void PartClock::BeginGraph() {
  capturing_ = true;
  current_ = Part::kNone;
  graph_.clear();
}

PartClock::Marks PartClock::EndGraph() {
  capturing_ = false;
  current_ = Part::kNone;
  const bool drafts =
      std::any_of(graph_.begin(), graph_.end(), [](const auto& mark) { return mark.first == Part::kDraft; });
  for (auto& [part, event] : graph_) {
    if (drafts && part != Part::kNone) part = Part::kDraft;
  }
  return std::exchange(graph_, {});
}

void PartClock::Replay(const Marks* marks) { sequence_.push_back(marks); }

absl::Status PartClock::Collect(std::array<double, kParts>* microseconds) {
  microseconds->fill(0);
  for (const Marks* marks : sequence_) KDT_RETURN_IF_ERROR(Add(*marks, microseconds));
  KDT_RETURN_IF_ERROR(Add(step_, microseconds));
  sequence_.clear();
  for (const auto& mark : step_) spare_.push_back(mark.second);
  step_.clear();
  current_ = Part::kNone;
  return absl::OkStatus();
}

}  // namespace kdt::bench
