#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "kernels/cuda/check.h"
#include "tests/support/catch.h"
#include "tests/worker/collective/cuda/rank_processes.h"
#include "tests/worker/collective/cuda/sums.h"

namespace kdt {
namespace {

using kernels::DType;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// Device and page-locked memory of one test.
struct Memory {
  char* device = nullptr;
  char* host = nullptr;
  absl::Status Make(size_t bytes) {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(reinterpret_cast<void**>(&device), bytes));
    return KDT_CUDA_STATUS(cudaHostAlloc(reinterpret_cast<void**>(&host), bytes, cudaHostAllocDefault));
  }
  ~Memory() {
    if (device != nullptr) (void)cudaFree(device);
    if (host != nullptr) (void)cudaFreeHost(host);
  }
};

absl::Status Same(const char* got, const std::vector<char>& expected, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] != expected[i]) return absl::InternalError(absl::StrCat(what, ": byte ", i, " is wrong"));
  }
  return absl::OkStatus();
}

// Copies to the device go through the stream: those of pageable memory may still be under way when the call
// returns.
absl::Status CheckSum(CudaCollective& collective, Memory& memory, ReduceMethod method, DType type,
                      int64_t count, uint32_t salt) {
  const std::vector<char> mine = RankValues(collective.rank(), type, count, salt);
  KDT_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(memory.device, mine.data(), mine.size(), cudaMemcpyHostToDevice, collective.stream()));
  KDT_RETURN_IF_ERROR(collective.ReduceBy(method, kernels::MakeTensor(memory.device, type, 1, count)));
  KDT_RETURN_IF_ERROR(collective.FinishStream());
  KDT_CUDA_RETURN_IF_ERROR(cudaMemcpy(memory.host, memory.device, mine.size(), cudaMemcpyDeviceToHost));
  return Same(
      memory.host, SumOfRanks(collective.size(), type, count, salt),
      absl::StrCat(ReduceMethodName(method), " of ", count, " values of type ", static_cast<int>(type)));
}

// A group of which rank 1 does something else; what the others find must satisfy `check`.
void CheckLoss(
    int ranks,
    const std::function<std::string(CudaCollective&, const std::function<absl::Status()>& step)>& body,
    const std::function<void(const std::vector<std::string>&)>& check) {
  const Placement placement = PlacementFor(ranks);
  if (!placement.possible) {
    WARN("skipped with " << ranks << " ranks: " << placement.reason);
    return;
  }
  const auto run_rank = [&](const RankSetup& setup) {
    auto collective = CudaCollective::Make(setup.options);
    if (!collective.ok()) return Text(collective.status());
    Memory memory;
    if (!memory.Make(1 << 20).ok()) return std::string("no memory");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    (void)cudaStreamBeginCapture(setup.options.stream, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < 20; ++i) {
      const auto x = kernels::MakeTensor(memory.device, DType::kBF16, 1, 7168);
      if (!(*collective)->AllReduceSum(x).ok()) return std::string("not queued");
    }
    (void)cudaStreamEndCapture(setup.options.stream, &graph);
    if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return std::string("not captured");
    std::string told = body(**collective, [&]() -> absl::Status {
      KDT_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(exec, setup.options.stream));
      return (*collective)->FinishStream();
    });
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return told;
  };
  check(RunRanks(ranks, placement.gpus, CollectiveKind::kIpc, run_rank));
  if (placement.gpus == Gpus::kOwn) check(RunRanks(ranks, placement.gpus, CollectiveKind::kNccl, run_rank));
}

}  // namespace

TEST_CASE("all-reduce over GPUs gives the float32 sum in rank order, in every bit, by both methods") {
  for (const int ranks : {2, 3, 4, 8}) {
    CheckRanks(ranks, [](CudaCollective& collective) -> absl::Status {
      Memory memory;
      KDT_RETURN_IF_ERROR(memory.Make(4 << 20));
      uint32_t salt = 0;
      for (const DType type : {DType::kF32, DType::kBF16}) {
        // The largest are more than the group's buffer of 1 MiB.
        for (const int64_t count : {1, 7, 8, 511, 4099, 7168, 100003, 600001}) {
          for (const ReduceMethod method : {ReduceMethod::kOneShot, ReduceMethod::kTwoShot}) {
            KDT_RETURN_IF_ERROR(CheckSum(collective, memory, method, type, count, ++salt));
          }
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_CASE("all-gather and broadcast over GPUs move every byte, at any size and alignment") {
  for (const int ranks : {2, 8}) {
    CheckRanks(ranks, [](CudaCollective& collective) -> absl::Status {
      Memory in, out;
      const size_t most = 1200016;
      KDT_RETURN_IF_ERROR(in.Make(most));
      KDT_RETURN_IF_ERROR(out.Make(most * static_cast<size_t>(collective.size())));
      uint32_t salt = 100;
      for (const size_t bytes : {size_t{1}, size_t{4}, size_t{16}, size_t{1000}, size_t{4801}, most}) {
        ++salt;
        const auto values = [&](int rank) {
          std::vector<char> all = RankValues(rank, DType::kBF16, static_cast<int64_t>(bytes + 1) / 2, salt);
          all.resize(bytes);
          return all;
        };
        const std::vector<char> mine = values(collective.rank());
        KDT_CUDA_RETURN_IF_ERROR(
            cudaMemcpyAsync(in.device, mine.data(), bytes, cudaMemcpyHostToDevice, collective.stream()));
        KDT_RETURN_IF_ERROR(collective.AllGather(in.device, bytes, out.device));
        KDT_RETURN_IF_ERROR(collective.FinishStream());
        const size_t total = bytes * static_cast<size_t>(collective.size());
        KDT_CUDA_RETURN_IF_ERROR(cudaMemcpy(out.host, out.device, total, cudaMemcpyDeviceToHost));
        for (int rank = 0; rank < collective.size(); ++rank) {
          KDT_RETURN_IF_ERROR(Same(out.host + static_cast<size_t>(rank) * bytes, values(rank),
                                   absl::StrCat("all-gather of ", bytes, " bytes, rank ", rank)));
        }
        const int root = static_cast<int>(bytes) % collective.size();
        KDT_RETURN_IF_ERROR(collective.Broadcast(in.device, bytes, root));
        KDT_RETURN_IF_ERROR(collective.FinishStream());
        KDT_CUDA_RETURN_IF_ERROR(cudaMemcpy(in.host, in.device, bytes, cudaMemcpyDeviceToHost));
        KDT_RETURN_IF_ERROR(Same(in.host, values(root), absl::StrCat("broadcast of ", bytes, " bytes")));
      }
      return absl::OkStatus();
    });
  }
}

TEST_CASE("a reduction with the norm behind it gives the bits of the two kernels") {
  for (const int ranks : {2, 8}) {
    CheckBackedRanks(
        ranks, 1 << 20, [](kernels::Backend& backend, CudaCollective& collective) -> absl::Status {
          constexpr int64_t kMost = 100 * 7168 * 2;
          Memory x, residual, out, weight;
          for (Memory* memory : {&x, &residual, &out, &weight}) KDT_RETURN_IF_ERROR(memory->Make(kMost));
          // Widths that a thread takes one or two chunks of, too many chunks, and one that is not of whole
          // chunks.
          for (const int64_t cols : {192, 7168, 9216, 100}) {
            for (const int64_t rows : {1, 3, 33, 70}) {
              const int64_t count = rows * cols;
              const auto tensor = [&](const Memory& m) {
                return kernels::MakeTensor(m.device, DType::kBF16, rows, cols);
              };
              const kernels::RmsNormArgs norm{tensor(x), tensor(residual), tensor(weight).bf16(), 1e-5f,
                                              tensor(out)};
              std::vector<char> results[2];
              for (const bool together : {false, true}) {
                const auto set = [&](Memory& memory, int rank, uint32_t salt) {
                  const std::vector<char> values = RankValues(rank, DType::kBF16, count, salt);
                  return KDT_CUDA_STATUS(cudaMemcpyAsync(memory.device, values.data(), values.size(),
                                                         cudaMemcpyHostToDevice, collective.stream()));
                };
                KDT_RETURN_IF_ERROR(set(x, collective.rank(), 1));
                KDT_RETURN_IF_ERROR(set(residual, 99, 2));
                KDT_RETURN_IF_ERROR(set(weight, 99, 3));
                KDT_RETURN_IF_ERROR(together ? collective.AllReduceNorm(backend, norm)
                                             : collective.Collective::AllReduceNorm(backend, norm));
                KDT_RETURN_IF_ERROR(collective.Finish(backend));
                for (const Memory* memory : {&residual, &out}) {
                  std::vector<char> bytes(static_cast<size_t>(count) * 2);
                  KDT_CUDA_RETURN_IF_ERROR(
                      cudaMemcpy(bytes.data(), memory->device, bytes.size(), cudaMemcpyDeviceToHost));
                  results[together].insert(results[together].end(), bytes.begin(), bytes.end());
                }
              }
              KDT_RETURN_IF_ERROR(Same(results[1].data(), results[0], absl::StrCat(rows, " rows of ", cols)));
            }
          }
          return absl::OkStatus();
        });
  }
}

// Reductions right behind each other, a slow one in front of a fast one: where a rank may write its buffer
// again before all have read it, this fails.
TEST_CASE("ten thousand replays of a captured graph with changing data stay exact") {
  constexpr int kReplays = 10000, kSets = 25;
  struct Part {
    ReduceMethod method;
    int64_t count;
  };
  static constexpr Part kParts[] = {{ReduceMethod::kOneShot, 60000}, {ReduceMethod::kOneShot, 1000},
                                    {ReduceMethod::kTwoShot, 30001}, {ReduceMethod::kOneShot, 7},
                                    {ReduceMethod::kTwoShot, 999},   {ReduceMethod::kOneShot, 7168}};
  for (const int ranks : {2, 8}) {
    CheckRanks(ranks, [](CudaCollective& collective) -> absl::Status {
      constexpr DType kType = DType::kBF16;
      std::vector<std::vector<char>> ins(kSets), sums(kSets);
      for (int set = 0; set < kSets; ++set) {
        for (const Part& part : kParts) {
          const auto salt = static_cast<uint32_t>(set * 100 + (&part - kParts));
          const auto append = [](std::vector<char>& to, const std::vector<char>& from) {
            to.insert(to.end(), from.begin(), from.end());
            to.resize((to.size() + 255) / 256 * 256);
          };
          append(ins[set], RankValues(collective.rank(), kType, part.count, salt));
          append(sums[set], SumOfRanks(collective.size(), kType, part.count, salt));
        }
      }
      const size_t bytes = ins[0].size();
      Memory memory;
      KDT_RETURN_IF_ERROR(memory.Make(bytes));
      cudaStream_t stream = collective.stream();
      KDT_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      KDT_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(memory.device, memory.host, bytes, cudaMemcpyHostToDevice, stream));
      size_t at = 0;
      for (const Part& part : kParts) {
        KDT_RETURN_IF_ERROR(
            collective.ReduceBy(part.method, kernels::MakeTensor(memory.device + at, kType, 1, part.count)));
        at = (at + static_cast<size_t>(part.count) * 2 + 255) / 256 * 256;
      }
      KDT_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(memory.host, memory.device, bytes, cudaMemcpyDeviceToHost, stream));
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      KDT_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(stream, &graph));
      KDT_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&exec, graph, 0));
      for (int replay = 0; replay < kReplays; ++replay) {
        const auto set = static_cast<size_t>(replay % kSets);
        std::memcpy(memory.host, ins[set].data(), bytes);
        KDT_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(exec, stream));
        KDT_RETURN_IF_ERROR(collective.FinishStream());
        if (std::memcmp(memory.host, sums[set].data(), bytes) == 0) continue;
        return Same(memory.host, sums[set], absl::StrCat("replay ", replay));
      }
      KDT_CUDA_RETURN_IF_ERROR(cudaGraphExecDestroy(exec));
      return KDT_CUDA_STATUS(cudaGraphDestroy(graph));
    });
  }
}

TEST_CASE("a rank killed between replays is named by all others") {
  for (const int ranks : {2, 4}) {
    CheckLoss(
        ranks,
        [](CudaCollective& collective, const auto& step) {
          collective.SetDeadline(absl::Now() + absl::Seconds(30));
          for (int i = 0;; ++i) {
            if (collective.rank() == 1 && i == 50) raise(SIGKILL);
            if (const absl::Status status = step(); !status.ok()) return status.ToString();
          }
        },
        [ranks](const std::vector<std::string>& told) {
          CHECK(told[1] == "killed");
          for (int rank = 0; rank < ranks; ++rank) {
            if (rank == 1) continue;
            CHECK(told[static_cast<size_t>(rank)].find("UNAVAILABLE: rank 1 (process ") == 0);
          }
        });
  }
}

TEST_CASE("a rank that does not come in time is named, and it learns why the group has ended") {
  CheckLoss(
      3,
      [](CudaCollective& collective, const auto& step) {
        for (int i = 0;; ++i) {
          if (collective.rank() == 1 && i == 20) absl::SleepFor(absl::Milliseconds(1500));
          collective.SetDeadline(absl::Now() + absl::Milliseconds(collective.rank() == 0 ? 300 : 20000));
          if (const absl::Status status = step(); !status.ok()) return status.ToString();
        }
      },
      [](const std::vector<std::string>& told) {
        for (const std::string& text : told) CHECK(text == "DEADLINE_EXCEEDED: rank 1 did not come in time");
      });
}

TEST_CASE("abort by another thread ends what waits on the device, on the other ranks too") {
  CheckLoss(
      2,
      [](CudaCollective& collective, const auto& step) {
        collective.SetDeadline(absl::Now() + absl::Seconds(30));
        if (collective.rank() == 1) absl::SleepFor(absl::Milliseconds(500));
        std::thread aborter([&] {
          absl::SleepFor(absl::Milliseconds(100));
          if (collective.rank() == 0) collective.Abort();
        });
        absl::Status status = step();
        aborter.join();
        // Dead for good. (A graph with NCCL's kernels may not be replayed then.)
        if (!status.ok() && collective.Has(ReduceMethod::kOneShot)) status = step();
        return status.ToString();
      },
      [](const std::vector<std::string>& told) {
        CHECK(told[0] == "CANCELLED: the epoch has ended");
        CHECK(told[1] == "CANCELLED: rank 0 left the group");
      });
}

TEST_CASE("a group of one gathers by a copy, and NCCL runs at world size one") {
  const Placement placement = PlacementFor(1);
  if (!placement.possible) {
    WARN("skipped: " << placement.reason);
    return;
  }
  for (const CollectiveKind kind : {CollectiveKind::kAuto, CollectiveKind::kNccl}) {
    const auto told = RunRanks(1, Gpus::kOwn, kind, [](const RankSetup& setup) {
      auto collective = CudaCollective::Make(setup.options);
      if (!collective.ok()) return Text(collective.status());
      const auto run = [&]() -> absl::Status {
        Memory in, out;
        KDT_RETURN_IF_ERROR(in.Make(4096));
        KDT_RETURN_IF_ERROR(out.Make(4096));
        const std::vector<char> values = RankValues(0, DType::kF32, 1024, 5);
        KDT_CUDA_RETURN_IF_ERROR(
            cudaMemcpyAsync(in.device, values.data(), 4096, cudaMemcpyHostToDevice, setup.options.stream));
        KDT_RETURN_IF_ERROR(
            (*collective)->AllReduceSum(kernels::MakeTensor(in.device, DType::kF32, 1, 1024)));
        KDT_RETURN_IF_ERROR((*collective)->AllGather(in.device, 4096, out.device));
        KDT_RETURN_IF_ERROR((*collective)->Broadcast(out.device, 4096, 0));
        KDT_RETURN_IF_ERROR((*collective)->FinishStream());
        KDT_CUDA_RETURN_IF_ERROR(cudaMemcpy(out.host, out.device, 4096, cudaMemcpyDeviceToHost));
        return Same(out.host, values, "values");
      };
      return (*collective)->name() + " " + Text(run());
    });
    if (told[0].find("libnccl") != std::string::npos || told[0].find("KDT_NCCL") != std::string::npos) {
      WARN("skipped: " << told[0]);
    } else {
      CHECK(told[0] == (kind == CollectiveKind::kAuto ? "local " : "nccl "));
    }
  }
}

TEST_CASE("two ranks on one GPU: nccl is refused by name, auto goes on without it") {
  const Placement placement = PlacementFor(64);  // certainly on one GPU
  if (!placement.possible) {
    WARN("skipped: " << placement.reason);
    return;
  }
  const auto make = [](const RankSetup& setup) {
    auto collective = CudaCollective::Make(setup.options);
    return collective.ok() ? (*collective)->name() : Text(collective.status());
  };
  for (const std::string& text : RunRanks(2, Gpus::kShared, CollectiveKind::kNccl, make)) {
    CHECK(text == "nccl: rank 0 and rank 1 are on one GPU, which NCCL does not do");
  }
  for (const std::string& text : RunRanks(2, Gpus::kShared, CollectiveKind::kAuto, make))
    CHECK(text == "ipc");
}

TEST_CASE("ranks that do not see each other's GPU are named, and auto goes on with nccl alone") {
  const Placement placement = PlacementFor(2);
  if (!placement.possible || placement.gpus != Gpus::kOwn) {
    WARN("skipped: one GPU");
    return;
  }
  const auto make = [](const RankSetup& setup) {
    auto collective = CudaCollective::Make(setup.options);
    return collective.ok() ? (*collective)->name() : Text(collective.status());
  };
  for (const std::string& text : RunRanks(2, Gpus::kOwnOnly, CollectiveKind::kIpc, make)) {
    CHECK(text == "ipc: rank 0 and rank 1: the first one's process does not see the other's GPU");
  }
  for (const std::string& text : RunRanks(2, Gpus::kOwnOnly, CollectiveKind::kAuto, make))
    CHECK(text == "nccl");
}

TEST_CASE("on GPUs of their own, ranks sum over NCCL too, and auto has both") {
  const Placement placement = PlacementFor(2);
  if (!placement.possible || placement.gpus != Gpus::kOwn) {
    WARN("skipped: one GPU");
    return;
  }
  const auto told = RunRanks(2, Gpus::kOwn, CollectiveKind::kAuto, [](const RankSetup& setup) {
    auto collective = CudaCollective::Make(setup.options);
    if (!collective.ok()) return Text(collective.status());
    (*collective)->SetDeadline(absl::Now() + absl::Seconds(30));
    const auto run = [&]() -> absl::Status {
      if (!(*collective)->Has(ReduceMethod::kNccl)) return absl::InternalError("no nccl");
      Memory memory;
      KDT_RETURN_IF_ERROR(memory.Make(4 << 20));
      // Two values have one sum in either order.
      for (const ReduceMethod method :
           {ReduceMethod::kOneShot, ReduceMethod::kTwoShot, ReduceMethod::kNccl}) {
        KDT_RETURN_IF_ERROR(CheckSum(**collective, memory, method, DType::kF32, 100003, 7));
      }
      return (*collective)->exchange().Agree(absl::OkStatus());
    };
    return Text(run());
  });
  for (const std::string& text : told) CHECK(text == "");
}

}  // namespace kdt
