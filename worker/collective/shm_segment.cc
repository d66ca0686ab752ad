#include "worker/collective/shm_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/status.h"

namespace kdt {
namespace {

constexpr uint64_t kMagic = 0x6b64747265653031;  // "kdtree01"
constexpr absl::Duration kRetryOpen = absl::Milliseconds(2);
// A sleeping rank looks this often whether those it waits for still run.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(100);
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

int UsableCpus() {
  cpu_set_t cpus;
  return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
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
  alignas(64) std::atomic<uint32_t> arrived;  // ranks in the barrier that runs
  // The futex: twice the barriers passed by the group, plus 1 once the group has ended. One word for both, so
  // that a rank about to sleep cannot miss either.
  alignas(64) std::atomic<uint32_t> state;
  // Why the group ended: ranks that left by themselves, came too late, or whose process is gone.
  alignas(64) std::atomic<uint64_t> left, late, dead;
  // Barriers each rank has come to, the rendezvous being the first: tells who is missing.
  std::atomic<uint32_t> mark[kMaxShmRanks];
  std::atomic<uint32_t> progress[kMaxShmRanks];
  std::atomic<int32_t> pid[kMaxShmRanks];  // 0: has not joined
};

std::byte* ShmSegment::Buffer(int parity, int rank) const {
  return data_ + (static_cast<size_t>(parity) * static_cast<size_t>(size_ + 1) + static_cast<size_t>(rank)) *
                     buffer_bytes_;
}

absl::StatusOr<std::unique_ptr<ShmSegment>> ShmSegment::Join(const std::string& id, int rank, int size,
                                                             size_t buffer_bytes, absl::Duration timeout,
                                                             const std::atomic<bool>* cancelled) {
  if (!GoodId(id))
    return absl::InvalidArgumentError(absl::StrCat("collective_id: \"", id, "\" is not a name"));
  if (size < 1 || size > kMaxShmRanks) {
    return absl::InvalidArgumentError(absl::StrCat("tp: ", size, " is not in 1..", kMaxShmRanks));
  }
  if (rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat("rank: ", rank, " is not in 0..", size - 1));
  }
  KDT_CHECK(buffer_bytes >= 64 && buffer_bytes % 64 == 0 && buffer_bytes <= (size_t{1} << 32));

  std::unique_ptr<ShmSegment> segment(new ShmSegment());
  segment->rank_ = rank;
  segment->size_ = size;
  segment->buffer_bytes_ = buffer_bytes;
  segment->mapped_bytes_ = sizeof(Header) + 2 * static_cast<size_t>(size + 1) * buffer_bytes;
  segment->spins_ = UsableCpus() >= size ? kSpins : 0;
  segment->cancelled_ = cancelled;
  const std::string path = absl::StrCat("/", kShmPrefix, id);
  const absl::Time deadline = absl::Now() + timeout;
  if (rank == 0) RemoveShmLeftovers();
  absl::Status status = rank == 0 ? segment->Create(path) : segment->Open(path, deadline);
  if (status.ok()) status = segment->Claim();
  if (status.ok()) status = segment->Barrier(deadline);
  // From here on the name is of no use: all have attached, or the group has failed. ALREADY_EXISTS: it is
  // somebody else's.
  if (!absl::IsAlreadyExists(status) && (rank == 0 || !status.ok())) shm_unlink(path.c_str());
  if (!status.ok()) return status;
  return segment;
}

absl::Status ShmSegment::Create(const std::string& path) {
  const int fd = shm_open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) {
    return absl::AlreadyExistsError(absl::StrCat("collective_id: /dev/shm", path, " exists; use a new one"));
  }
  if (fd < 0) return ErrnoError(absl::StrCat("shm_open ", path));
  fd_ = fd;
  if (posix_fallocate(fd, 0, static_cast<off_t>(mapped_bytes_)) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("/dev/shm has no room for ", mapped_bytes_, " bytes"));
  }
  KDT_RETURN_IF_ERROR(Map(fd));
  new (header_) Header();
  header_->size = static_cast<uint64_t>(size_);
  header_->buffer_bytes = buffer_bytes_;
  header_->magic.store(kMagic, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status ShmSegment::Open(const std::string& path, absl::Time deadline) {
  const auto wait = [&]() -> absl::Status {
    if (Cancelled()) return absl::CancelledError("joining the group was cancelled");
    if (absl::Now() >= deadline) return absl::DeadlineExceededError("rank 0 did not open the group in time");
    absl::SleepFor(kRetryOpen);
    return absl::OkStatus();
  };
  while (true) {
    const int fd = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0600);
    struct stat info {};
    // Rank 0 may be between creating and sizing it.
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size >= static_cast<off_t>(sizeof(Header))) {
      fd_ = fd;
      if (info.st_size == static_cast<off_t>(mapped_bytes_)) break;
      return absl::FailedPreconditionError(absl::StrCat("rank 0 opened a group of ", info.st_size,
                                                        " bytes, this rank expects ", mapped_bytes_));
    }
    if (fd >= 0) close(fd);
    KDT_RETURN_IF_ERROR(wait());
  }
  KDT_RETURN_IF_ERROR(Map(fd_));
  while (header_->magic.load(std::memory_order_acquire) != kMagic) KDT_RETURN_IF_ERROR(wait());
  if (header_->size != static_cast<uint64_t>(size_) || header_->buffer_bytes != buffer_bytes_) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank 0 opened a group of ", header_->size, " ranks with buffers of ",
                     header_->buffer_bytes, " bytes; this rank expects ", size_, " and ", buffer_bytes_));
  }
  return absl::OkStatus();
}

absl::Status ShmSegment::Map(int fd) {
  void* base = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return ErrnoError("mmap");
  header_ = static_cast<Header*>(base);
  data_ = static_cast<std::byte*>(base) + sizeof(Header);
  return absl::OkStatus();
}

// Takes this rank's place. Two processes that believe to be the same rank would corrupt each other's buffer.
absl::Status ShmSegment::Claim() {
  struct flock lock = ShmRankLock(rank_);
  if (fcntl(fd_, F_OFD_SETLK, &lock) != 0 || header_->pid[rank_].exchange(getpid()) != 0) {
    // Not through the destructor: the group is that other process's to end.
    munmap(static_cast<void*>(std::exchange(header_, nullptr)), mapped_bytes_);
    return absl::AlreadyExistsError(absl::StrCat("rank ", rank_, " has joined this group already"));
  }
  return absl::OkStatus();
}

ShmSegment::~ShmSegment() {
  if (header_ != nullptr) {
    Abort();
    munmap(static_cast<void*>(header_), mapped_bytes_);
  }
  if (fd_ >= 0) close(fd_);
}

uint64_t ShmSegment::Missing() const {
  uint64_t ranks = 0;
  for (int rank = 0; rank < size_; ++rank) {
    // The difference, so that a count that has wrapped around does not matter.
    const uint32_t behind = barriers_ - header_->mark[rank].load(std::memory_order_acquire);
    if (static_cast<int32_t>(behind) > 0) ranks |= uint64_t{1} << rank;
  }
  return ranks;
}

// Those of `ranks` that had joined and whose process has ended.
uint64_t ShmSegment::Ended(uint64_t ranks) const {
  uint64_t ended = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (((ranks >> rank) & 1) == 0 || header_->pid[rank].load(std::memory_order_acquire) == 0) continue;
    struct flock lock = ShmRankLock(rank);
    if (fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) ended |= uint64_t{1} << rank;
  }
  return ended;
}

std::string ShmSegment::Names(uint64_t ranks, bool processes) const {
  std::string names;
  for (int rank = 0; rank < size_; ++rank) {
    if (((ranks >> rank) & 1) == 0) continue;
    absl::StrAppend(&names, names.empty() ? "" : ", ", "rank ", rank);
    if (processes) absl::StrAppend(&names, " (process ", header_->pid[rank].load(), ")");
  }
  return names;
}

void ShmSegment::EndGroup(std::atomic<uint64_t>* cause, uint64_t ranks) {
  cause->fetch_or(ranks, std::memory_order_acq_rel);
  header_->state.fetch_or(1, std::memory_order_acq_rel);
  FutexWakeAll(&header_->state);
}

absl::Status ShmSegment::EndedStatus() const {
  if (aborted_.load(std::memory_order_acquire)) return absl::CancelledError("the epoch has ended");
  if (const uint64_t dead = header_->dead.load(std::memory_order_acquire); dead != 0) {
    return absl::UnavailableError(absl::StrCat(Names(dead, true), " ended"));
  }
  if (const uint64_t late = header_->late.load(std::memory_order_acquire); late != 0) {
    return absl::DeadlineExceededError(absl::StrCat(Names(late, false), " did not come in time"));
  }
  return absl::CancelledError(absl::StrCat(Names(header_->left.load(), false), " left the group"));
}

absl::Status ShmSegment::Barrier(absl::Time deadline) {
  const uint32_t before = header_->state.load(std::memory_order_acquire);
  if ((before & 1) != 0) return EndedStatus();
  header_->mark[rank_].store(++barriers_, std::memory_order_release);
  if (header_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    header_->arrived.store(0, std::memory_order_relaxed);
    header_->state.fetch_add(2, std::memory_order_acq_rel);
    FutexWakeAll(&header_->state);
    return absl::OkStatus();
  }
  const int64_t start = MonotonicNanos();
  absl::Status status;
  for (int looks = 0;; ++looks) {
    const uint32_t now_state = header_->state.load(std::memory_order_acquire);
    if ((now_state >> 1) != (before >> 1)) break;  // all were here, whatever happened since
    if ((now_state & 1) != 0) {
      status = EndedStatus();
      break;
    }
    if (looks < spins_) continue;
    const absl::Time now = absl::Now();
    if (Cancelled()) {
      Abort();
    } else if (now >= deadline) {
      EndGroup(&header_->late, Missing());
    } else if (looks > spins_ && MonotonicNanos() - start >= absl::ToInt64Nanoseconds(kLongestSleep)) {
      if (const uint64_t ended = Ended(Missing()); ended != 0) EndGroup(&header_->dead, ended);
    }
    FutexWait(&header_->state, before, std::min(deadline - now, kLongestSleep));
  }
  wait_ns_.fetch_add(MonotonicNanos() - start, std::memory_order_relaxed);
  return status;
}

absl::Status ShmSegment::State() {
  if (Cancelled()) Abort();
  if ((header_->state.load(std::memory_order_acquire) & 1) != 0) return EndedStatus();
  return absl::OkStatus();
}

void ShmSegment::SetProgress(uint32_t steps) {
  header_->progress[rank_].store(steps, std::memory_order_release);
}

uint64_t ShmSegment::Behind(uint32_t steps) const {
  uint64_t ranks = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const uint32_t behind = steps - header_->progress[rank].load(std::memory_order_acquire);
    if (static_cast<int32_t>(behind) > 0) ranks |= uint64_t{1} << rank;
  }
  return ranks;
}

void ShmSegment::FindDead() {
  const uint64_t others = ~(uint64_t{1} << rank_);
  if (const uint64_t ended = Ended(others); ended != 0) EndGroup(&header_->dead, ended);
}

absl::Status ShmSegment::EndLate(uint64_t ranks) {
  EndGroup(&header_->late, ranks);
  return EndedStatus();
}

void ShmSegment::Abort() {
  aborted_.store(true, std::memory_order_release);
  EndGroup(&header_->left, uint64_t{1} << rank_);
}

}  // namespace kdt
