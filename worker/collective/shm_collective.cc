// All-reduce, all-gather and broadcast between ranks of one host over a shared-memory segment.
//
// Buffers alternate between two parities. An operation writes a parity's buffers, passes a barrier, and reads
// them; the same parity is written again two operations later, behind another barrier that a rank passes only
// once it has done reading. So one barrier an operation is enough.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bf16.h"
#include "common/status.h"
#include "worker/collective/collective.h"
#include "worker/collective/shm_segment.h"

namespace kdt {
namespace {

using kernels::DType;

// Up to this many values every rank sums all of them itself. Above, each sums its own part and a second
// barrier gives everybody the others' parts: less arithmetic for one more wake-up.
constexpr int64_t kOneShotValues = 4096;

class ShmCollective : public Collective {
 public:
  explicit ShmCollective(std::unique_ptr<ShmSegment> segment) : segment_(std::move(segment)) {}

  std::string name() const override { return "shm"; }
  int rank() const override { return segment_->rank(); }
  int size() const override { return segment_->size(); }
  void SetDeadline(absl::Time deadline) override { deadline_ = deadline; }
  void Abort() override { segment_->Abort(); }
  int64_t wait_ns() const override { return segment_->wait_ns(); }

  absl::Status AllReduceSum(const kernels::Tensor& x) override {
    KDT_CHECK(x.stride == x.cols || x.rows <= 1);
    const int64_t value_bytes = kernels::DTypeSize(x.dtype);
    const auto piece = static_cast<int64_t>(segment_->buffer_bytes()) / value_bytes;
    const int64_t count = x.rows * x.cols;
    for (int64_t begin = 0; begin < count; begin += piece) {
      std::byte* values = static_cast<std::byte*>(x.data) + begin * value_bytes;
      KDT_RETURN_IF_ERROR(ReducePiece(values, std::min(piece, count - begin), x.dtype));
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    for (size_t begin = 0; begin < bytes; begin += segment_->buffer_bytes()) {
      const size_t piece = std::min(segment_->buffer_bytes(), bytes - begin);
      const int parity = NextParity();
      std::memcpy(segment_->Buffer(parity, rank()), static_cast<const std::byte*>(in) + begin, piece);
      KDT_RETURN_IF_ERROR(segment_->Barrier(deadline_));
      for (int rank = 0; rank < size(); ++rank) {
        std::memcpy(static_cast<std::byte*>(out) + static_cast<size_t>(rank) * bytes + begin,
                    segment_->Buffer(parity, rank), piece);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    KDT_CHECK(root >= 0 && root < size());
    for (size_t begin = 0; begin < bytes; begin += segment_->buffer_bytes()) {
      const size_t piece = std::min(segment_->buffer_bytes(), bytes - begin);
      const int parity = NextParity();
      std::byte* const at = static_cast<std::byte*>(data) + begin;
      if (rank() == root) std::memcpy(segment_->Buffer(parity, root), at, piece);
      KDT_RETURN_IF_ERROR(segment_->Barrier(deadline_));
      if (rank() != root) std::memcpy(at, segment_->Buffer(parity, root), piece);
    }
    return absl::OkStatus();
  }

 private:
  int NextParity() {
    parity_ ^= 1;
    return parity_;
  }

  absl::Status ReducePiece(std::byte* values, int64_t count, DType dtype) {
    const auto bytes = static_cast<size_t>(count * kernels::DTypeSize(dtype));
    const int parity = NextParity();
    std::memcpy(segment_->Buffer(parity, rank()), values, bytes);
    KDT_RETURN_IF_ERROR(segment_->Barrier(deadline_));
    if (count <= kOneShotValues) {
      Sum(parity, 0, count, dtype, values);
      return absl::OkStatus();
    }
    const int64_t share = (count + size() - 1) / size();
    const int64_t begin = std::min(count, share * rank());
    Sum(parity, begin, std::min(count, begin + share), dtype, segment_->Result(parity));
    KDT_RETURN_IF_ERROR(segment_->Barrier(deadline_));
    std::memcpy(values, segment_->Result(parity), bytes);
    return absl::OkStatus();
  }

  // out[i] = sum over ranks 0, 1, ... of their values i, for i in [begin, end), in float32.
  void Sum(int parity, int64_t begin, int64_t end, DType dtype, std::byte* out) {
    constexpr int64_t kBlock = 1024;
    float sums[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      for (int rank = 0; rank < size(); ++rank) {
        const std::byte* buffer = segment_->Buffer(parity, rank);
        if (dtype == DType::kF32) {
          const float* in = reinterpret_cast<const float*>(buffer) + at;
          for (int64_t i = 0; i < n; ++i) sums[i] = rank == 0 ? in[i] : sums[i] + in[i];
        } else {
          const uint16_t* in = reinterpret_cast<const uint16_t*>(buffer) + at;
          for (int64_t i = 0; i < n; ++i)
            sums[i] = rank == 0 ? Bf16ToFloat(in[i]) : sums[i] + Bf16ToFloat(in[i]);
        }
      }
      if (dtype == DType::kF32) {
        std::memcpy(reinterpret_cast<float*>(out) + at, sums, static_cast<size_t>(n) * sizeof(float));
      } else {
        uint16_t* to = reinterpret_cast<uint16_t*>(out) + at;
        for (int64_t i = 0; i < n; ++i) to[i] = FloatToBf16(sums[i]);
      }
    }
  }

  std::unique_ptr<ShmSegment> segment_;
  absl::Time deadline_ = absl::InfiniteFuture();
  int parity_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeShmCollective(const std::string& id, int rank, int size,
                                                              size_t buffer_bytes, absl::Duration timeout,
                                                              const std::atomic<bool>* cancelled) {
  KDT_ASSIGN_OR_RETURN(std::unique_ptr<ShmSegment> segment,
                       ShmSegment::Join(id, rank, size, buffer_bytes, timeout, cancelled));
  return std::make_unique<ShmCollective>(std::move(segment));
}

}  // namespace kdt
