#include "kernels/cpu/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kdt::kernels::cpu {
namespace {

// About three microseconds: longer than the gap between two ops of a step, far shorter than a scheduling
// quantum, so that many ranks can share few cores.
constexpr int kSpins = 100;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { Work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  FutexWake(epoch_, INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::Drain(int thread) {
  bool any = false;
  uint32_t left = left_.load(std::memory_order_acquire);
  while (left != 0) {
    if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
    // Holding a task, so the job cannot end under us.
    call_(context_, static_cast<int>(tasks_ - left), thread);
    any = true;
    if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load() != 0) FutexWake(unfinished_, 1);
    left = left_.load(std::memory_order_acquire);
  }
  return any;
}

void ThreadPool::RunShared(uint32_t tasks, Call call, const void* context) {
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  unfinished_.store(tasks);
  left_.store(tasks);
  epoch_.fetch_add(1);
  if (const uint32_t sleepers = sleepers_.load(); sleepers != 0) {
    FutexWake(epoch_, static_cast<int>(sleepers < tasks ? sleepers : tasks - 1));
  }
  Drain(0);
  for (int spin = 0; spin < kSpins && unfinished_.load() != 0; ++spin) Pause();
  if (unfinished_.load() == 0) return;
  caller_sleeps_.store(1);
  for (uint32_t unfinished = unfinished_.load(); unfinished != 0; unfinished = unfinished_.load()) {
    FutexWait(unfinished_, unfinished);
  }
  caller_sleeps_.store(0);
}

void ThreadPool::Work(int thread) {
  while (!stop_.load()) {
    const uint32_t epoch = epoch_.load();
    if (Drain(thread)) continue;
    int spin = 0;
    while (spin < kSpins && epoch_.load() == epoch) {
      Pause();
      ++spin;
    }
    if (spin < kSpins) continue;
    sleepers_.fetch_add(1);
    // The caller raises the epoch before it looks at sleepers_: either it sees us, or the wait returns at
    // once.
    if (!stop_.load()) FutexWait(epoch_, epoch);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace kdt::kernels::cpu
