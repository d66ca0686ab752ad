// Collectives of one tensor-parallel group. Every rank calls the same operations in the same order with the
// same sizes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kdt/kernels/backend.h"
#include "kdt/kernels/tensor.h"

namespace kdt {

// Pointers are memory of the backend. On the CPU an operation is done when it returns. On CUDA ("ipc",
// "nccl", "ipc+nccl") it is only queued on Backend::stream() and may be captured; addresses inside stay the
// same until the destructor, data are 16-byte aligned, and what goes wrong on the device comes out of Finish.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual std::string name() const = 0;  // "local", "shm", "ipc", "nccl", "ipc+nccl"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // x = sum over ranks of x, in place, on all ranks the same bits: float32 sums in rank order 0, 1, ...
  // x: f32 or bf16 [rows, cols], stride == cols.
  virtual absl::Status AllReduceSum(const kernels::Tensor& x) = 0;

  // AllReduceSum(norm.x), then the backend's RmsNorm(norm), which adds it to norm.residual: what stands
  // behind every half of a layer. What norm.x holds afterwards is undefined, so that a group may do both in
  // one kernel.
  virtual absl::Status AllReduceNorm(kernels::Backend& backend, const kernels::RmsNormArgs& norm) {
    const absl::Status status = AllReduceSum(norm.x);
    return status.ok() ? backend.RmsNorm(norm) : status;
  }

  // AllReduceNorm(norm), then the backend's Gemm(gemm), whose x is norm.out: what stands behind most halves
  // of a layer. All that both write is written, norm.out too, so that a group may do both in one kernel.
  virtual absl::Status AllReduceNormGemm(kernels::Backend& backend, const kernels::RmsNormArgs& norm,
                                         const kernels::GemmArgs& gemm) {
    const absl::Status status = AllReduceNorm(backend, norm);
    return status.ok() ? backend.Gemm(gemm) : status;
  }

  // out = rank 0's `bytes`, rank 1's, ... (out holds size() * bytes). out and in may not overlap.
  virtual absl::Status AllGather(const void* in, size_t bytes, void* out) = 0;

  // On all ranks `data` = rank `root`'s.
  virtual absl::Status Broadcast(void* data, size_t bytes, int root) = 0;

  // Waits until everything queued on the backend is done. Gives up at the deadline or on Abort with the error
  // that names the ranks that did not come; the group is of no use afterwards. Not while capturing.
  virtual absl::Status Finish(kernels::Backend& backend) { return backend.Synchronize(); }

  // Tests a new group with one reduction, each rank contributing rank + 1 in each place, so that a rank that
  // was summed twice or not at all shows. INTERNAL when the sum is wrong.
  virtual absl::Status Probe();

  // Time until which an operation may wait for other ranks; set once a step. Afterwards: DEADLINE_EXCEEDED
  // that names the ranks that did not come. A rank whose process has ended is found sooner (shm: a tenth of a
  // second) and named with UNAVAILABLE. An error on one rank ends the group: the others get the same error.
  virtual void SetDeadline(absl::Time deadline) = 0;

  // From any thread: every operation waiting or called later returns CANCELLED, on the other ranks too. For
  // the end of an epoch; so does the destructor.
  virtual void Abort() = 0;

  // Nanoseconds spent waiting for other ranks since start; on CUDA as of the last all-gather or broadcast, 0
  // where it is not known (nccl).
  virtual int64_t wait_ns() const = 0;
};

// A group of one: every operation is a copy or nothing.
std::unique_ptr<Collective> MakeLocalCollective();

// Ranks of one host through POSIX shared memory named by `id` (letters, digits, '-', '_'). Blocks until all
// `size` ranks have attached; then the name is unlinked, so that nothing stays in /dev/shm however the
// processes end. Waits are on futexes after at most a few microseconds of spinning. `buffer_bytes`: largest
// operation done in one piece; larger ones are cut. DEADLINE_EXCEEDED naming the missing ranks after
// `timeout`; ALREADY_EXISTS when `id` was used before or the rank is there twice; CANCELLED within a tenth of
// a second of `*cancelled` (may be null) becoming true while joining or in an operation.
absl::StatusOr<std::unique_ptr<Collective>> MakeShmCollective(const std::string& id, int rank, int size,
                                                              size_t buffer_bytes, absl::Duration timeout,
                                                              const std::atomic<bool>* cancelled = nullptr);

}  // namespace kdt
