// What an op of the CPU backend works with besides its arguments: threads and memory for intermediate values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/status.h"
#include "hwy/aligned_allocator.h"
#include "kernels/cpu/thread_pool.h"

namespace kdt::kernels::cpu {

// Memory that is kept between calls and only ever grows, so a warm op allocates nothing.
class Scratch {
 public:
  // At least `count` values of T, aligned for vectors; the content is undefined. Asking again may move it.
  template <typename T>
  T* Get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > bytes_) {
      data_ = hwy::AllocateAligned<uint8_t>(bytes);
      KDT_CHECK(data_ != nullptr);
      bytes_ = bytes;
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  hwy::AlignedFreeUniquePtr<uint8_t[]> data_;
  size_t bytes_ = 0;
};

struct Context {
  explicit Context(int threads) : pool(threads) {}

  ThreadPool pool;
  // An op uses them as it likes; nothing in them outlives the call.
  std::array<Scratch, 6> scratch;
};

// Work below this is not worth handing to other threads, in bytes of weights read or multiply-adds.
inline constexpr int64_t kMinWorkPerTask = 16384;

// How many tasks `items` of `work` each should be cut into: enough to balance the threads, none too small.
inline int64_t TaskCount(const Context& context, int64_t items, int64_t work) {
  if (context.pool.threads() == 1) return 1;
  const int64_t by_work = items * work / kMinWorkPerTask;
  const int64_t by_threads = int64_t{4} * context.pool.threads();
  int64_t tasks = by_work < by_threads ? by_work : by_threads;
  if (tasks > items) tasks = items;
  return tasks < 1 ? 1 : tasks;
}

// Calls fn(begin, end) over [0, items), cut into ranges whose bounds are multiples of `multiple`.
template <typename Fn>
void ParallelRanges(Context& context, int64_t items, int64_t multiple, int64_t work, const Fn& fn) {
  const int64_t units = (items + multiple - 1) / multiple;
  const int64_t tasks = TaskCount(context, units, work * multiple);
  if (tasks <= 1) {
    if (items > 0) fn(int64_t{0}, items);
    return;
  }
  context.pool.Run(tasks, [&](int task, int) {
    const int64_t begin = units * task / tasks * multiple;
    const int64_t end = units * (task + 1) / tasks * multiple;
    fn(begin, end < items ? end : items);
  });
}

}  // namespace kdt::kernels::cpu
