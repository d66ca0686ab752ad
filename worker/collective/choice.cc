#include "worker/collective/choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace kdt {
namespace {

ReduceMethod FastestOf(const ReduceTimes& times) {
  int best = -1;
  for (int m = 0; m < kReduceMethods; ++m) {
    if (times.micros[m] >= 0 && (best < 0 || times.micros[m] < times.micros[best])) best = m;
  }
  KDT_CHECK(best >= 0);
  return static_cast<ReduceMethod>(best);
}

std::string Kib(size_t bytes) { return absl::StrFormat("%g KiB", static_cast<double>(bytes) / 1024); }

}  // namespace

absl::StatusOr<CollectiveKind> ParseCollectiveKind(absl::string_view text, absl::string_view backend) {
  if (text == "auto") return CollectiveKind::kAuto;
  const bool cuda = backend == "cuda";
  if (text == "shm" && !cuda) return CollectiveKind::kShm;
  if (text == "ipc" && cuda) return CollectiveKind::kIpc;
  if (text == "nccl" && cuda) return CollectiveKind::kNccl;
  return absl::InvalidArgumentError(absl::StrCat("--collective: \"", text,
                                                 "\" is not one of: ", cuda ? "auto, ipc, nccl" : "auto, shm",
                                                 " (backend ", backend, ")"));
}

const char* ReduceMethodName(ReduceMethod method) {
  switch (method) {
    case ReduceMethod::kOneShot:
      return "one-shot";
    case ReduceMethod::kTwoShot:
      return "two-shot";
    case ReduceMethod::kNccl:
      return "nccl";
  }
  return "";
}

ReduceChoice ReduceChoice::BySize(size_t two_shot_above) {
  ReduceChoice choice(ReduceMethod::kTwoShot);
  choice.steps_.push_back({two_shot_above, ReduceMethod::kOneShot});
  return choice;
}

ReduceChoice ReduceChoice::Fastest(std::span<const ReduceTimes> times) {
  KDT_CHECK(!times.empty());
  ReduceChoice choice(FastestOf(times.back()));
  for (const ReduceTimes& size : times.first(times.size() - 1)) {
    const ReduceMethod method = FastestOf(size);
    if (!choice.steps_.empty() && choice.steps_.back().method == method) {
      choice.steps_.back().bytes = size.bytes;
    } else {
      choice.steps_.push_back({size.bytes, method});
    }
  }
  if (!choice.steps_.empty() && choice.steps_.back().method == choice.above_) choice.steps_.pop_back();
  return choice;
}

ReduceMethod ReduceChoice::Of(size_t bytes) const {
  for (const UpTo& step : steps_) {
    if (bytes <= step.bytes) return step.method;
  }
  return above_;
}

bool ReduceChoice::Uses(ReduceMethod method) const {
  return above_ == method ||
         std::any_of(steps_.begin(), steps_.end(), [&](const UpTo& step) { return step.method == method; });
}

std::string ReduceChoice::ToString() const {
  std::string text;
  for (const UpTo& step : steps_) {
    absl::StrAppend(&text, ReduceMethodName(step.method), " to ", Kib(step.bytes), ", ");
  }
  return absl::StrCat(text, ReduceMethodName(above_), steps_.empty() ? "" : " above");
}

std::string ReduceTimesTable(std::span<const ReduceTimes> times) {
  std::string text = "     bytes    one-shot    two-shot        nccl  (us)";
  for (const ReduceTimes& size : times) {
    absl::StrAppendFormat(&text, "\n%10d", size.bytes);
    for (const float micros : size.micros) {
      text += micros < 0 ? absl::StrFormat("%12s", "-") : absl::StrFormat("%12.2f", micros);
    }
  }
  return text;
}

}  // namespace kdt
