#include "kernels/cpu/thread_pool.h"

#include <chrono>
#include <thread>

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::cpu {
namespace {

TEST_CASE("the pool runs every task once, job after job", "[thread_pool]") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int job = 0; job < 2000; ++job) {
      const int tasks = job % 17;
      std::vector<std::atomic<int>> runs(tasks);
      std::atomic<bool> thread_in_range{true};
      pool.Run(tasks, [&](int task, int thread) {
        runs[task].fetch_add(1);
        if (thread < 0 || thread >= threads) thread_in_range = false;
      });
      bool once = true;
      for (const std::atomic<int>& count : runs) once = once && count.load() == 1;
      REQUIRE(once);
      REQUIRE(thread_in_range);
    }
  }
}

TEST_CASE("the pool wakes threads that went to sleep", "[thread_pool]") {
  ThreadPool pool(3);
  for (int job = 0; job < 5; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> sum{0};
    pool.Run(10, [&](int task, int) { sum += task; });
    CHECK(sum == 45);
  }
}

}  // namespace
}  // namespace kdt::kernels::cpu
