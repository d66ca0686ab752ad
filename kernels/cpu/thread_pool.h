// A fixed set of compute threads for one backend. Tasks of a job are handed out one by one, so a thread that
// the machine takes away delays its own task only. Which thread runs a task never changes a result.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kdt::kernels::cpu {

class ThreadPool {
 public:
  // `threads` >= 1, the caller's included: 1 starts nothing and runs every task inline.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(task, thread) for task = 0 .. tasks-1, thread in [0, threads()), and returns when all have
  // finished. Not reentrant; one caller at a time.
  template <typename Fn>
  void Run(int64_t tasks, const Fn& fn) {
    if (workers_.empty() || tasks <= 1) {
      for (int64_t task = 0; task < tasks; ++task) fn(static_cast<int>(task), 0);
      return;
    }
    RunShared(
        static_cast<uint32_t>(tasks),
        [](const void* context, int task, int thread) { (*static_cast<const Fn*>(context))(task, thread); },
        &fn);
  }

 private:
  using Call = void (*)(const void* context, int task, int thread);

  void RunShared(uint32_t tasks, Call call, const void* context);
  void Work(int thread);
  // Runs tasks of the current job until none is left; false when there was none.
  bool Drain(int thread);

  std::vector<std::thread> workers_;

  // The job. Written by the caller while no task is left to take; a thread reads it only while it holds a
  // task.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  uint32_t tasks_ = 0;

  alignas(64) std::atomic<uint32_t> left_{0};        // tasks not yet taken
  alignas(64) std::atomic<uint32_t> unfinished_{0};  // tasks not yet finished
  alignas(64) std::atomic<uint32_t> epoch_{0};       // grows with each job; idle threads sleep on it
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> caller_sleeps_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace kdt::kernels::cpu
