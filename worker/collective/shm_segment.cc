#include "worker/collective/shm_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr uint64_t kMagic = 0x6b64747265653031;  // "kdtree01"
constexpr absl::Duration kRetryOpen = absl::Milliseconds(2);
// A sleeping rank looks at its deadline this often, should the clock of the wait itself be off.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(200);
// About two microseconds of looking, only where every rank can have a core of its own.
constexpr int kSpins = 64;

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, absl::Duration timeout) {
  const timespec limit = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

absl::Status ErrnoError(const std::string& what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

bool GoodId(const std::string& id) {
  return !id.empty() && id.size() <= 200 && std::all_of(id.begin(), id.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_';
  });
}

}  // namespace

struct ShmSegment::Header {
  std::atomic<uint64_t> magic;
  uint64_t size;
  uint64_t buffer_bytes;
  alignas(64) std::atomic<uint32_t> arrived;     // ranks in the barrier that runs
  alignas(64) std::atomic<uint32_t> generation;  // barriers passed by the group; also woken by Abort
  alignas(64) std::atomic<uint32_t> aborted;
  // Barriers each rank has come to, the rendezvous being the first: tells who is missing.
  std::atomic<uint32_t> mark[kMaxShmRanks];
};

std::byte* ShmSegment::Buffer(int parity, int rank) const {
  return data_ + (static_cast<size_t>(parity) * static_cast<size_t>(size_ + 1) + static_cast<size_t>(rank)) *
                     buffer_bytes_;
}

absl::StatusOr<std::unique_ptr<ShmSegment>> ShmSegment::Join(const std::string& id, int rank, int size,
                                                             size_t buffer_bytes, absl::Duration timeout) {
  if (!GoodId(id))
    return absl::InvalidArgumentError(absl::StrCat("collective_id: \"", id, "\" is not a name"));
  if (size < 1 || size > kMaxShmRanks) {
    return absl::InvalidArgumentError(absl::StrCat("tp: ", size, " is not in 1..", kMaxShmRanks));
  }
  if (rank < 0 || rank >= size)
    return absl::InvalidArgumentError(absl::StrCat("rank: ", rank, " is not in 0..", size - 1));
  KDT_CHECK(buffer_bytes >= 64 && buffer_bytes % 64 == 0 && buffer_bytes <= (size_t{1} << 32));

  std::unique_ptr<ShmSegment> segment(new ShmSegment());
  segment->rank_ = rank;
  segment->size_ = size;
  segment->buffer_bytes_ = buffer_bytes;
  segment->mapped_bytes_ = sizeof(Header) + 64 + 2 * static_cast<size_t>(size + 1) * buffer_bytes;
  segment->spins_ = static_cast<int>(std::thread::hardware_concurrency()) >= size ? kSpins : 0;
  const std::string path = "/kdt-" + id;
  const absl::Time deadline = absl::Now() + timeout;
  absl::Status status = rank == 0 ? segment->Create(path) : segment->Open(path, deadline);
  if (status.ok()) status = segment->Attach(deadline);
  // From here on the name is of no use: all have attached, or the group has failed.
  if (rank == 0 || !status.ok()) shm_unlink(path.c_str());
  if (!status.ok()) return status;
  return segment;
}

absl::Status ShmSegment::Create(const std::string& path) {
  const int fd = shm_open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoError(absl::StrCat("shm_open ", path));
  if (posix_fallocate(fd, 0, static_cast<off_t>(mapped_bytes_)) != 0) {
    close(fd);
    return absl::ResourceExhaustedError(absl::StrCat("/dev/shm has no room for ", mapped_bytes_, " bytes"));
  }
  void* base = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (base == MAP_FAILED) return ErrnoError("mmap");
  header_ = new (base) Header();
  header_->size = static_cast<uint64_t>(size_);
  header_->buffer_bytes = buffer_bytes_;
  header_->magic.store(kMagic, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status ShmSegment::Open(const std::string& path, absl::Time deadline) {
  while (true) {
    const int fd = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0600);
    struct stat info {};
    // Rank 0 may be between creating and sizing it.
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size == static_cast<off_t>(mapped_bytes_)) {
      void* base = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      close(fd);
      if (base == MAP_FAILED) return ErrnoError("mmap");
      header_ = static_cast<Header*>(base);
      break;
    }
    if (fd >= 0) close(fd);
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", rank_, " waited for rank 0 to open the group"));
    }
    absl::SleepFor(kRetryOpen);
  }
  while (header_->magic.load(std::memory_order_acquire) != kMagic) {
    if (absl::Now() >= deadline)
      return absl::DeadlineExceededError("rank 0 did not prepare the group's memory");
    absl::SleepFor(kRetryOpen);
  }
  if (header_->size != static_cast<uint64_t>(size_) || header_->buffer_bytes != buffer_bytes_) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank 0 opened a group of ", header_->size, " ranks with buffers of ",
                     header_->buffer_bytes, " bytes; this rank expects ", size_, " and ", buffer_bytes_));
  }
  return absl::OkStatus();
}

absl::Status ShmSegment::Attach(absl::Time deadline) {
  const auto address = reinterpret_cast<uintptr_t>(header_) + sizeof(Header);
  data_ = reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
  return Barrier(deadline);
}

ShmSegment::~ShmSegment() {
  if (header_ != nullptr) munmap(static_cast<void*>(header_), mapped_bytes_);
}

std::string ShmSegment::Missing(uint32_t least) const {
  std::string names;
  for (int rank = 0; rank < size_; ++rank) {
    if (header_->mark[rank].load(std::memory_order_acquire) >= least) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", "rank ", rank);
  }
  return names;
}

absl::Status ShmSegment::Barrier(absl::Time deadline) {
  ++barriers_;
  const uint32_t generation = header_->generation.load(std::memory_order_acquire);
  header_->mark[rank_].store(barriers_, std::memory_order_release);
  if (header_->aborted.load(std::memory_order_acquire) != 0)
    return absl::CancelledError("the epoch has ended");
  if (header_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    header_->arrived.store(0, std::memory_order_relaxed);
    header_->generation.store(generation + 1, std::memory_order_release);
    FutexWakeAll(&header_->generation);
    return absl::OkStatus();
  }
  const int64_t start = MonotonicNanos();
  absl::Status status;
  for (int looks = 0; header_->generation.load(std::memory_order_acquire) == generation; ++looks) {
    if (header_->aborted.load(std::memory_order_acquire) != 0) {
      status = absl::CancelledError("the epoch has ended");
      break;
    }
    if (looks < spins_) continue;
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      status = absl::DeadlineExceededError(absl::StrCat("in time did not come: ", Missing(barriers_)));
      Abort();
      break;
    }
    FutexWait(&header_->generation, generation, std::min(deadline - now, kLongestSleep));
  }
  wait_ns_.fetch_add(MonotonicNanos() - start, std::memory_order_relaxed);
  return status;
}

void ShmSegment::Abort() {
  header_->aborted.store(1, std::memory_order_release);
  FutexWakeAll(&header_->generation);
}

}  // namespace kdt
