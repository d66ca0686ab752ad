// Which way of summing a group uses for which size, by measurement.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kdt {

// What --collective takes. kShm is for the CPU backend, kIpc and kNccl are for CUDA, kAuto is for both.
enum class CollectiveKind { kAuto, kShm, kIpc, kNccl };

// INVALID_ARGUMENT naming --collective when `text` is none of auto, shm, ipc, nccl, or is not for `backend`.
absl::StatusOr<CollectiveKind> ParseCollectiveKind(absl::string_view text, absl::string_view backend);

enum class ReduceMethod { kOneShot, kTwoShot, kNccl };
inline constexpr int kReduceMethods = 3;
const char* ReduceMethodName(ReduceMethod method);  // "one-shot", "two-shot", "nccl"

// Microseconds of one reduction of `bytes`, by method; negative: that method is not there.
struct ReduceTimes {
  size_t bytes = 0;
  float micros[kReduceMethods] = {-1, -1, -1};
};

class ReduceChoice {
 public:
  // Always `method`.
  explicit ReduceChoice(ReduceMethod method) : above_(method) {}
  // Without a measurement: one-shot up to `two_shot_above` bytes, two-shot above.
  static ReduceChoice BySize(size_t two_shot_above);
  // The fastest for each size; `times` in rising order of size, each with at least one method. A size between
  // two measured ones takes the larger one's method, one above all of them the largest one's.
  static ReduceChoice Fastest(std::span<const ReduceTimes> times);

  ReduceMethod Of(size_t bytes) const;
  bool Uses(ReduceMethod method) const;
  // "one-shot to 64 KiB, two-shot to 1024 KiB, nccl above"
  std::string ToString() const;

 private:
  struct UpTo {
    size_t bytes;
    ReduceMethod method;
  };
  std::vector<UpTo> steps_;  // rising
  ReduceMethod above_;
};

// One line a size, for the log.
std::string ReduceTimesTable(std::span<const ReduceTimes> times);

}  // namespace kdt
