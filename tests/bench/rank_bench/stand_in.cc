#include "tests/bench/rank_bench/stand_in.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/bench/rank_bench/stand_in_kernels.h"

namespace kdt::bench {
namespace {

constexpr size_t kOtherBytes = size_t{256} << 20;  // of all other ranks

class StandIn final : public Collective {
 public:
  StandIn(kernels::Backend* backend, int rank, int size, int64_t nanoseconds, kernels::Buffer others)
      : stream_(static_cast<cudaStream_t>(backend->stream())),
        rank_(rank),
        size_(size),
        nanoseconds_(nanoseconds),
        others_(std::move(others)) {}

  std::string name() const override { return "stand-in"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::Status AllReduceSum(const kernels::Tensor& x) override {
    const int64_t bytes = x.rows * x.cols * kernels::DTypeSize(x.dtype);
    if (bytes * (size_ - 1) > static_cast<int64_t>(kOtherBytes)) {
      return absl::InvalidArgumentError(absl::StrCat("stand-in: ", x.rows, " rows are too many"));
    }
    return State(StandInReduce(stream_, x, others_.data(), size_, nanoseconds_));
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    return State(StandInGather(stream_, in, bytes, out, size_, nanoseconds_));
  }
  absl::Status Broadcast(void*, size_t, int) override { return absl::OkStatus(); }
  void SetDeadline(absl::Time) override {}
  void Abort() override {}
  int64_t wait_ns() const override { return 0; }

 private:
  static absl::Status State(cudaError_t error) {
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("stand-in: ", cudaGetErrorString(error)));
  }

  cudaStream_t stream_;
  int rank_;
  int size_;
  int64_t nanoseconds_;
  kernels::Buffer others_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeStandIn(kernels::Backend* backend, int rank, int size,
                                                        double microseconds) {
  KDT_ASSIGN_OR_RETURN(kernels::Buffer others, kernels::Buffer::Make(*backend, kOtherBytes));
  return std::make_unique<StandIn>(backend, rank, size, static_cast<int64_t>(microseconds * 1e3),
                                   std::move(others));
}

}  // namespace kdt::bench
