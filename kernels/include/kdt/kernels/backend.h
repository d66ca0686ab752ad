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
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/kernels/compare.h"
#include "kdt/kernels/draft_attention.h"
#include "kdt/kernels/draft_prepare.h"
#include "kdt/kernels/embedding.h"
#include "kdt/kernels/gemm.h"
#include "kdt/kernels/kv_move.h"
#include "kdt/kernels/kv_write.h"
#include "kdt/kernels/logits.h"
#include "kdt/kernels/mla_absorb.h"
#include "kdt/kernels/mla_prepare.h"
#include "kdt/kernels/mla_query.h"
#include "kdt/kernels/moe.h"
#include "kdt/kernels/rms_norm.h"
#include "kdt/kernels/rope.h"
#include "kdt/kernels/router.h"
#include "kdt/kernels/table_write.h"
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

// What a backend did on behalf of its callers since it was made. Zeros where nobody counts (the CPU).
struct BackendStats {
  int64_t allocations = 0;  // device and page-locked memory
  int64_t frees = 0;
  int64_t synchronisations = 0;  // waits of the host for the device
  int64_t pageable_copies = 0;   // Upload and Download
  int64_t replays = 0;           // of graphs
};

// How the launches of one kernel fill the device.
struct KernelUse {
  const char* kernel;    // "verify_attention", "moe", "gemm_stream", ...; a literal
  double occupancy = 0;  // resident warps over the most that a multiprocessor holds, in theory
  double grid_fill = 0;  // blocks launched over the blocks that the device holds at once
};

// A recorded sequence of ops that can be run again. It ends before its backend does.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual absl::Status Replay() = 0;  // queued behind what was queued before
  virtual int64_t nodes() const = 0;
  // Of the main kernels in it.
  virtual const std::vector<KernelUse>& kernel_uses() const = 0;
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

  // Memory of the host that the device reads and writes at full speed, aligned to 64 bytes, zeroed.
  virtual absl::StatusOr<void*> AllocateHost(size_t bytes);
  virtual void FreeHost(void* data);
  // Copies that are only queued, so they may be captured: the memory (from AllocateHost) must stay as it is
  // until they are done. An op whose header says that it reads something early does not wait for a copy of it
  // right in front, and no op does for weights.
  virtual absl::Status UploadAsync(void* device, const void* pinned, size_t bytes) {
    return Upload(device, pinned, bytes);
  }
  virtual absl::Status DownloadAsync(void* pinned, const void* device, size_t bytes) {
    return Download(pinned, device, bytes);
  }

  // Whether Capture works here.
  virtual bool can_capture() const { return false; }
  // Records the ops that `record` calls instead of running them. They are replayed with the same pointers and
  // shapes. An op that cannot be captured is named in the error. UNIMPLEMENTED without can_capture.
  virtual absl::StatusOr<std::unique_ptr<Graph>> Capture(absl::FunctionRef<absl::Status()> record);
  // The queue behind the ops, for collectives: a cudaStream_t on CUDA, nullptr elsewhere.
  virtual void* stream() const { return nullptr; }

  // A sealed backend refuses, with FAILED_PRECONDITION that names the call, to allocate and to copy pageable
  // memory; memory freed while it is sealed fails the next Synchronize. Nothing on the CPU.
  virtual void Seal(bool /*sealed*/) {}
  virtual BackendStats stats() const { return {}; }

  // Brings experts' weights, once they have come in the checkpoint's order (Int4Experts), into the order in
  // which this backend's Moe reads them, in place and without more memory. Once for all weights that Moe
  // gets.
  virtual absl::Status PrepareExperts(const Int4Experts& /*weights*/) { return absl::OkStatus(); }

  virtual absl::Status Embedding(const EmbeddingArgs& args) = 0;
  virtual absl::Status RmsNorm(const RmsNormArgs& args) = 0;
  virtual absl::Status Add(const AddArgs& args) = 0;
  virtual absl::Status Rope(const RopeArgs& args) = 0;
  virtual absl::Status Gemm(const GemmArgs& args) = 0;
  virtual absl::Status SiluMul(const SiluMulArgs& args) = 0;
  virtual absl::Status MlaPrepare(const MlaPrepareArgs& args) = 0;
  virtual absl::Status AbsorbQuery(const AbsorbQueryArgs& args) = 0;
  // Here: the three ops it consists of.
  virtual absl::Status MlaQuery(const MlaQueryArgs& args);
  virtual absl::Status AbsorbValue(const AbsorbValueArgs& args) = 0;
  virtual absl::Status KvWrite(const KvWriteArgs& args) = 0;
  virtual absl::Status KvMove(const KvMoveArgs& args) = 0;
  virtual absl::Status TableWrite(const TableWriteArgs& args) = 0;
  virtual absl::Status VerifyAttention(const VerifyAttentionArgs& args) = 0;
  virtual absl::Status VerifyAttentionReference(const VerifyAttentionArgs& args) = 0;
  virtual absl::Status Compare(const CompareArgs& args) = 0;
  virtual absl::Status DraftPrepare(const DraftPrepareArgs& args) = 0;
  virtual absl::Status DraftAttention(const DraftAttentionArgs& args) = 0;
  virtual absl::Status Router(const RouterArgs& args) = 0;
  virtual absl::Status Moe(const MoeArgs& args) = 0;
  virtual absl::Status LogitsTopK(const LogitsTopKArgs& args) = 0;
  virtual absl::Status ScaleRows(const ScaleRowsArgs& args) = 0;
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

// Memory of AllocateHost with an owner. Move-only.
class HostBuffer {
 public:
  HostBuffer() = default;
  static absl::StatusOr<HostBuffer> Make(Backend& backend, size_t bytes) {
    absl::StatusOr<void*> data = backend.AllocateHost(bytes);
    if (!data.ok()) return data.status();
    HostBuffer buffer;
    buffer.backend_ = &backend;
    buffer.data_ = *data;
    buffer.bytes_ = bytes;
    return buffer;
  }
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~HostBuffer() {
    if (data_ != nullptr) backend_->FreeHost(data_);
  }

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The CPU backend. `threads` 1 .. 1024 compute threads (the caller's included). They wait on a futex between
// ops after a spin of a few microseconds; with 1 thread nothing is started and nothing spins.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(int threads);

}  // namespace kdt::kernels
