#include "worker/collective/cuda/ipc_group.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "kernels/cuda/check.h"

namespace kdt {
namespace {

using cuda::kIpcMaxRanks;

// Test patterns lie behind the flags: first what others write here, by writer, then what this rank writes for
// others to read, by reader.
constexpr int kPatternWords = 64;
constexpr size_t kPatternBytes = kPatternWords * sizeof(uint32_t);
constexpr absl::Duration kReachLimit = absl::Seconds(5);

// What a rank tells the others.
struct Card {
  cudaIpcMemHandle_t handle;
  cudaUUID_t device;
  int processors, capability;
};

bool SameDevice(const Card& a, const Card& b) {
  return std::memcmp(&a.device, &b.device, sizeof(a.device)) == 0;
}

// The place of `uuid` among the devices this process sees; -1: not there.
int OrdinalOf(const cudaUUID_t& uuid) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return -1;
  for (int i = 0; i < devices; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess &&
        std::memcmp(&properties.uuid, &uuid, sizeof(uuid)) == 0) {
      return i;
    }
  }
  return -1;
}

uint32_t* Pattern(std::byte* block, int place) {
  return reinterpret_cast<uint32_t*>(block + cuda::kIpcFlagBytes +
                                     static_cast<size_t>(place) * kPatternBytes);
}

std::string Pair(int from, int to) { return absl::StrCat("ipc: rank ", from, " and rank ", to, ": "); }

}  // namespace

absl::Status WaitIdle(cudaStream_t stream, absl::Duration limit, const std::string& what) {
  const absl::Time deadline = absl::Now() + limit;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) return KDT_CUDA_STATUS(state);
    if (absl::Now() >= deadline) return absl::DeadlineExceededError(absl::StrCat(what, " did not finish"));
    absl::SleepFor(absl::Microseconds(20));
  }
}

absl::StatusOr<std::unique_ptr<IpcGroup>> IpcGroup::Make(HostExchange& exchange, size_t buffer_bytes,
                                                         int device, cudaStream_t stream) {
  KDT_CHECK(buffer_bytes % 256 == 0 && buffer_bytes >= 2 * kIpcMaxRanks * kPatternBytes);
  if (exchange.size() > kIpcMaxRanks) {
    return absl::UnavailableError(absl::StrCat("ipc: ", exchange.size(), " ranks, at most ", kIpcMaxRanks));
  }
  std::unique_ptr<IpcGroup> group(new IpcGroup());
  group->device_ = device;
  group->stream_ = stream;
  group->peers_.rank = exchange.rank();
  group->peers_.size = exchange.size();
  group->peers_.buffer_bytes = buffer_bytes;
  KDT_RETURN_IF_ERROR(exchange.Agree(group->Allocate()));
  KDT_RETURN_IF_ERROR(group->Open(exchange));
  KDT_RETURN_IF_ERROR(group->Reach(exchange));
  return group;
}

absl::Status IpcGroup::Allocate() {
  const auto zeroed = [this](auto** out, size_t bytes) {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(out, bytes));
    return KDT_CUDA_STATUS(cudaMemsetAsync(*out, 0, bytes, stream_));
  };
  KDT_RETURN_IF_ERROR(zeroed(&peers_.blocks[peers_.rank], cuda::kIpcFlagBytes + 2 * peers_.buffer_bytes));
  KDT_RETURN_IF_ERROR(zeroed(&peers_.local, sizeof(*peers_.local)));
  KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(&peers_.mails, 2 * sizeof(cuda::IpcMail)));
  KDT_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(peers_.mails, 0xff, 2 * sizeof(cuda::IpcMail), stream_));
  KDT_CUDA_RETURN_IF_ERROR(cudaHostAlloc(&host_, sizeof(*host_), cudaHostAllocMapped));
  std::memset(host_, 0, sizeof(*host_));
  KDT_CUDA_RETURN_IF_ERROR(cudaHostGetDevicePointer(&peers_.host, host_, 0));
  return KDT_CUDA_STATUS(cudaStreamSynchronize(stream_));
}

absl::Status IpcGroup::Open(HostExchange& exchange) {
  Card mine{};
  const auto fill = [&] {
    cudaDeviceProp properties;
    KDT_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device_));
    mine.device = properties.uuid;
    mine.processors = properties.multiProcessorCount;
    mine.capability = properties.major * 10 + properties.minor;
    return KDT_CUDA_STATUS(cudaIpcGetMemHandle(&mine.handle, peers_.blocks[peers_.rank]));
  };
  KDT_RETURN_IF_ERROR(exchange.Agree(fill()));
  KDT_ASSIGN_OR_RETURN(const std::vector<Card> cards, exchange.Gather(mine));

  int processors = mine.processors;
  bool alike = true;
  for (const Card& card : cards) {
    processors = std::min(processors, card.processors);
    alike = alike && card.processors == mine.processors && card.capability == mine.capability;
    const auto here =
        std::count_if(cards.begin(), cards.end(), [&](const Card& c) { return SameDevice(c, card); });
    ranks_per_device_ = std::max(ranks_per_device_, static_cast<int>(here));
  }
  peers_.own_gpu = ranks_per_device_ == 1;
  peers_.processors = alike ? processors : 0;
  // All ranks' waiting blocks together leave half of the multiprocessors to those who are on their way.
  peers_.max_blocks = std::clamp(processors / (2 * ranks_per_device_), 1, cuda::kIpcMaxBlocks);

  const auto open = [&]() -> absl::Status {
    for (int rank = 0; rank < peers_.size; ++rank) {
      if (rank == peers_.rank) continue;
      const Card& card = cards[static_cast<size_t>(rank)];
      if (!SameDevice(card, mine)) {
        const int ordinal = OrdinalOf(card.device);
        if (ordinal < 0) {
          return absl::UnavailableError(
              absl::StrCat(Pair(peers_.rank, rank), "the first one's process does not see the other's GPU"));
        }
        int reaches = 0;
        KDT_CUDA_RETURN_IF_ERROR(cudaDeviceCanAccessPeer(&reaches, device_, ordinal));
        if (reaches == 0) {
          return absl::UnavailableError(absl::StrCat(Pair(peers_.rank, rank), "no peer access from GPU ",
                                                     device_, " to GPU ", ordinal));
        }
      }
      void* block = nullptr;
      const absl::Status opened =
          KDT_CUDA_STATUS(cudaIpcOpenMemHandle(&block, card.handle, cudaIpcMemLazyEnablePeerAccess));
      if (!opened.ok()) {
        (void)cudaGetLastError();
        return absl::UnavailableError(absl::StrCat(Pair(peers_.rank, rank), opened.message()));
      }
      peers_.blocks[rank] = static_cast<std::byte*>(block);
    }
    return absl::OkStatus();
  };
  return exchange.Agree(open());
}

// Both directions of every pair: what A writes into B's memory B must find there, and what B writes into its
// own A must read.
absl::Status IpcGroup::Reach(HostExchange& exchange) {
  const int me = peers_.rank;
  const auto for_each_peer = [&](const char* what, auto act) -> absl::Status {
    for (int rank = 0; rank < peers_.size; ++rank) {
      KDT_RETURN_IF_ERROR(act(rank));
      // One pair at a time, so that the one that hangs is named.
      KDT_RETURN_IF_ERROR(WaitIdle(stream_, kReachLimit, absl::StrCat(Pair(me, rank), what)));
    }
    return absl::OkStatus();
  };
  KDT_RETURN_IF_ERROR(exchange.Agree(for_each_peer("a write of test words", [&](int rank) {
    KDT_CUDA_RETURN_IF_ERROR(
        cuda::IpcFill(Pattern(peers_.blocks[me], kIpcMaxRanks + rank), kPatternWords, me, rank, stream_));
    return KDT_CUDA_STATUS(cuda::IpcFill(Pattern(peers_.blocks[rank], me), kPatternWords, me, rank, stream_));
  })));

  uint32_t* wrong = nullptr;  // [2 * rank]: not arrived, [2 * rank + 1]: not read
  uint32_t found[2 * kIpcMaxRanks] = {};
  const auto check = [&]() -> absl::Status {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(&wrong, sizeof(found)));
    KDT_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(wrong, 0, sizeof(found), stream_));
    KDT_RETURN_IF_ERROR(for_each_peer("a read of test words", [&](int rank) {
      KDT_CUDA_RETURN_IF_ERROR(cuda::IpcCheck(Pattern(peers_.blocks[me], rank), kPatternWords, rank, me,
                                              wrong + 2 * rank, stream_));
      return KDT_CUDA_STATUS(cuda::IpcCheck(Pattern(peers_.blocks[rank], kIpcMaxRanks + me), kPatternWords,
                                            rank, me, wrong + 2 * rank + 1, stream_));
    }));
    KDT_CUDA_RETURN_IF_ERROR(cudaMemcpy(found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
    for (int rank = 0; rank < peers_.size; ++rank) {
      if (found[2 * rank] == 0 && found[2 * rank + 1] == 0) continue;
      return absl::UnavailableError(absl::StrCat(Pair(rank, me), "of ", kPatternWords, " words, ",
                                                 found[2 * rank], " did not arrive and ", found[2 * rank + 1],
                                                 " were read wrong"));
    }
    return absl::OkStatus();
  };
  const absl::Status checked = check();
  if (wrong != nullptr) (void)cudaFree(wrong);
  return exchange.Agree(checked);
}

// Errors on the way down have no one to go to.
IpcGroup::~IpcGroup() {
  for (int rank = 0; rank < peers_.size; ++rank) {
    if (rank != peers_.rank && peers_.blocks[rank] != nullptr)
      (void)cudaIpcCloseMemHandle(peers_.blocks[rank]);
  }
  (void)cudaFree(peers_.blocks[peers_.rank]);
  (void)cudaFree(peers_.local);
  (void)cudaFree(peers_.mails);
  if (host_ != nullptr) (void)cudaFreeHost(host_);
}

void IpcGroup::Abort() { *static_cast<volatile uint32_t*>(&host_->abort) = 1; }
bool IpcGroup::aborted() const { return *static_cast<volatile const uint32_t*>(&host_->abort) != 0; }

uint64_t IpcGroup::Missing() const {
  uint64_t ranks = 0;
  for (int rank = 0; rank < peers_.size; ++rank) {
    if (*static_cast<volatile const uint32_t*>(&host_->missing[rank]) != 0) ranks |= uint64_t{1} << rank;
  }
  return ranks;
}

int64_t IpcGroup::wait_ns() const {
  return static_cast<int64_t>(*static_cast<volatile const unsigned long long*>(&host_->wait_ns));
}

}  // namespace kdt
