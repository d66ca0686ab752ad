#include "worker/collective/factory.h"

#include "common/status.h"
#ifdef KDT_HAVE_CUDA
#include "worker/collective/cuda/cuda_collective.h"
#endif

namespace kdt {
namespace {

constexpr size_t kShmBufferBytes = size_t{1} << 20;
#ifdef KDT_HAVE_CUDA
// 512 rows of 7168 values in bf16 in one piece.
constexpr size_t kIpcBufferBytes = size_t{8} << 20;
#endif

}  // namespace

void PrepareCollectives() {
#ifdef KDT_HAVE_CUDA
  SetNcclDefaults();
#endif
}

absl::StatusOr<std::unique_ptr<Collective>> MakeCollective(const GroupPlace& place, CollectiveKind kind,
                                                           kernels::Backend& backend) {
#ifdef KDT_HAVE_CUDA
  if (backend.stream() != nullptr) {
    CudaCollectiveOptions options;
    options.id = place.id;
    options.rank = place.rank;
    options.size = place.size;
    options.kind = kind;
    options.buffer_bytes = kIpcBufferBytes;
    options.timeout = place.timeout;
    options.cancelled = place.cancelled;
    options.stream = static_cast<cudaStream_t>(backend.stream());
    return CudaCollective::Make(options);
  }
#endif
  KDT_CHECK(backend.stream() == nullptr && (kind == CollectiveKind::kAuto || kind == CollectiveKind::kShm));
  if (place.size == 1) return MakeLocalCollective();
  return MakeShmCollective(place.id, place.rank, place.size, kShmBufferBytes, place.timeout, place.cancelled);
}

}  // namespace kdt
