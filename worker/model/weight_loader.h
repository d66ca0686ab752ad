// Copies one rank's slices of a checkpoint into a backend's memory. Pages of the files are dropped as soon as
// they have been copied, so that the process holds the weights once.
//
// The same loading code runs twice. A planning loader checks that every tensor is there with the right dtype
// and shape and adds up the bytes, copying nothing (data pointers stay null). A second one takes memory and
// notes what goes where; its Finish then copies everything with several threads. So a broken checkpoint is
// refused before the first byte is copied, and progress knows its total.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/backend.h"
#include "worker/model/load_progress.h"
#include "worker/model/parallel_copy.h"
#include "worker/model/shard.h"
#include "worker/model/weight_source.h"

namespace kdt {

class WeightLoader {
 public:
  enum class Mode { kPlan, kCopy };
  enum class Split { kNone, kRows, kColumns };

  // A bf16 tensor [out, in] of the checkpoint and the dimension that is cut among the ranks.
  struct Part {
    std::string name;
    int64_t out = 0;
    int64_t in = 0;
    Split split = Split::kNone;
  };

  // `backend` owns the memory and outlives the buffers. `loaded` continues over several loaders (target, then
  // drafter).
  WeightLoader(Mode mode, kernels::Backend* backend, Shard shard, LoadProgress progress, uint64_t total_bytes)
      : mode_(mode), backend_(backend), shard_(shard), progress_(std::move(progress)), total_(total_bytes) {}

  // Lives until Finish.
  void SetSource(const WeightSource* source) { source_ = source; }
  Shard shard() const { return shard_; }

  // The parts' slices below each other; all have the same width after slicing.
  absl::StatusOr<kernels::Tensor> Matrix(std::span<const Part> parts);
  absl::StatusOr<kernels::Tensor> Matrix(const Part& part) { return Matrix({&part, 1}); }
  // Columns [begin, begin + count) of a bf16 tensor [out, in].
  absl::StatusOr<kernels::Tensor> ColumnRange(const std::string& name, int64_t out, int64_t in, int64_t begin,
                                              int64_t count);
  // A bf16 vector [n], whole.
  absl::StatusOr<const uint16_t*> Vector(const std::string& name, int64_t n);
  // A bf16 or f32 vector [n], whole, as f32.
  absl::StatusOr<const float*> FloatVector(const std::string& name, int64_t n);
  // Values computed here.
  absl::StatusOr<const float*> Constants(std::span<const float> values);
  // `prefix`E.{gate,up,down}_proj.weight_{packed,scale,shape}. kTensor: each expert's inner width is cut
  // among the ranks; kExpert: this rank's experts, whole.
  absl::StatusOr<kernels::Int4Experts> Experts(const std::string& prefix, int64_t experts, int64_t hidden,
                                               int64_t inner, MoeSharding sharding);

  // Copies what the calls above noted and lets the backend prepare the experts; until then the memory they
  // gave is zero. A planning loader does nothing. `threads` read.
  absl::Status Finish(int threads = 1);

  uint64_t bytes() const { return bytes_; }  // planned or noted so far
  std::vector<kernels::Buffer> TakeBuffers() { return std::move(buffers_); }

 private:
  absl::StatusOr<char*> Allocate(uint64_t bytes);
  // Notes rows [row_begin, row_begin + rows), bytes [byte_begin, byte_begin + row_bytes) of each, of a tensor
  // whose rows have `source_row_bytes`, to be copied to `to` without gaps. Counts bytes in either mode.
  void Copy(const TensorView& tensor, int64_t row_begin, int64_t rows, int64_t source_row_bytes,
            int64_t byte_begin, int64_t row_bytes, char* to);
  absl::Status CopyPart(const Part& part, char* to);
  // One packed tensor of an expert with its scales.
  absl::Status CopyInt4(const std::string& name, int64_t out, int64_t in, Split split, char* packed,
                        char* scale);

  Mode mode_;
  kernels::Backend* backend_;
  Shard shard_;
  LoadProgress progress_;
  uint64_t total_;
  const WeightSource* source_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t constant_bytes_ = 0;  // of these, copied at once
  struct Noted {
    const WeightSource* source;
    TensorView tensor;
  };
  std::vector<Noted> noted_;                   // by a piece's tag
  std::vector<kernels::Int4Experts> experts_;  // to be prepared once they have come
  ParallelCopy copy_;
  std::vector<kernels::Buffer> buffers_;
};

}  // namespace kdt
