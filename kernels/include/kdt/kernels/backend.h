// A backend runs the ops of a step on one device. The model code (worker/engine) is written once against this
// class.
//
// Ops run in the order of the calls. On the CPU a call has finished when it returns; on a GPU it is queued,
// may be captured into a graph, and its results are there after Synchronize(). Pointers in the args are the
// backend's memory. Arguments come from our own code: a shape that does not fit is a bug and aborts; a device
// failure is a Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/draft_attention.h"
#include "kdt/kernels/embedding.h"
#include "kdt/kernels/gemm.h"
#include "kdt/kernels/kv_move.h"
#include "kdt/kernels/kv_write.h"
#include "kdt/kernels/logits.h"
#include "kdt/kernels/mla_absorb.h"
#include "kdt/kernels/moe.h"
#include "kdt/kernels/rms_norm.h"
#include "kdt/kernels/rope.h"
#include "kdt/kernels/router.h"
#include "kdt/kernels/tensor.h"
#include "kdt/kernels/tree_walk.h"
#include "kdt/kernels/verify_attention.h"

namespace kdt::kernels {

// What an operator looks a device up by; empty or 0 where there is no such thing.
struct DeviceFacts {
  std::string arch;        // "sm_120"; the CPU's machine, e.g. "x86_64"
  std::string gpu_uuid;    // as nvidia-smi and DCGM print it: "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
  std::string pci_bus_id;  // "00000000:C1:00.0"
};
struct DeviceMemory {
  uint64_t used_bytes = 0;  // by all processes
  uint64_t total_bytes = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;         // "cpu", "cuda"
  virtual std::string device_name() const = 0;  // processor or GPU
  virtual DeviceFacts facts() const = 0;
  // Nothing where the device's memory is the host's. Slow: not within a step.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }
  virtual DType activation_dtype() const = 0;  // f32 on the CPU, bf16 on CUDA

  // Zeroed memory of the device, aligned to 256 bytes. RESOURCE_EXHAUSTED with the size when there is none.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;
  virtual void Free(void* data) = 0;
  virtual absl::Status Upload(void* device, const void* host, size_t bytes) = 0;
  virtual absl::Status Download(void* host, const void* device, size_t bytes) = 0;
  virtual absl::Status Synchronize() = 0;

  virtual absl::Status Embedding(const EmbeddingArgs& args) = 0;
  virtual absl::Status RmsNorm(const RmsNormArgs& args) = 0;
  virtual absl::Status Add(const AddArgs& args) = 0;
  virtual absl::Status Rope(const RopeArgs& args) = 0;
  virtual absl::Status Gemm(const GemmArgs& args) = 0;
  virtual absl::Status SiluMul(const SiluMulArgs& args) = 0;
  virtual absl::Status AbsorbQuery(const AbsorbQueryArgs& args) = 0;
  virtual absl::Status AbsorbValue(const AbsorbValueArgs& args) = 0;
  virtual absl::Status KvWrite(const KvWriteArgs& args) = 0;
  virtual absl::Status KvMove(const KvMoveArgs& args) = 0;
  virtual absl::Status VerifyAttention(const VerifyAttentionArgs& args) = 0;
  virtual absl::Status DraftAttention(const DraftAttentionArgs& args) = 0;
  virtual absl::Status Router(const RouterArgs& args) = 0;
  virtual absl::Status Moe(const MoeArgs& args) = 0;
  virtual absl::Status LogitsTopK(const LogitsTopKArgs& args) = 0;
  virtual absl::Status GumbelArgmax(const GumbelArgmaxArgs& args) = 0;
  virtual absl::Status TreeWalk(const TreeWalkArgs& args) = 0;
};

// Device memory with an owner. Move-only.
class Buffer {
 public:
  Buffer() = default;
  static absl::StatusOr<Buffer> Make(Backend& backend, size_t bytes) {
    absl::StatusOr<void*> data = backend.Allocate(bytes);
    if (!data.ok()) return data.status();
    Buffer buffer;
    buffer.backend_ = &backend;
    buffer.data_ = *data;
    buffer.bytes_ = bytes;
    return buffer;
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) backend_->Free(data_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The CPU backend. `threads` 1 .. 1024 compute threads (the caller's included). They wait on a futex between
// ops after a spin of a few microseconds; with 1 thread nothing is started and nothing spins.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(int threads);

}  // namespace kdt::kernels
