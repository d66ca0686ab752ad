// The sum as the first part of the gemm behind it. CudaCollective takes this way only where each rank has a
// GPU of its own; most tests are between ranks that are streams of one process on one GPU, with grids so
// small that the blocks of all ranks' kernels are on it together.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/status.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "tests/support/catch.h"
#include "tests/worker/collective/cuda/rank_processes.h"
#include "worker/collective/cuda/ipc_kernels.h"

namespace kdt {
namespace {

using kernels::DType;
using kernels::MakeTensor;
using kernels::Tensor;

constexpr size_t kBufferBytes = 1 << 20;
constexpr int64_t kMostRows = 8, kMostCols = 8192, kMostOuts = 512, kInner = 128;

// Device memory with an owner.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { (void)cudaFree(data_); }
  absl::Status Make(size_t bytes, int fill) {
    KDT_CUDA_RETURN_IF_ERROR(cudaMalloc(&data_, bytes));
    KDT_CUDA_RETURN_IF_ERROR(cudaMemset(data_, fill, bytes));
    return KDT_CUDA_STATUS(cudaDeviceSynchronize());
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

std::vector<uint16_t> Values(uint32_t seed, int64_t count, float scale) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& v : values) v = FloatToBf16(normal(rng));
  return values;
}

struct Shape {
  int64_t rows, cols, outs, inner;
  int slots;  // blocks of a gemm that it believes to have room for: decides its shares of the inputs
};

// Multiprocessors of a GPU of this one's kind with so many slots.
int Processors(const Shape& s) {
  int shared = 0;
  const bool known =
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0) == cudaSuccess;
  return known && shared >= 200 * 1024 ? s.slots / 2 : s.slots;
}

class LocalRanks {
 public:
  struct Rank {
    cudaStream_t stream = nullptr;
    cuda::IpcPeers peers{};
    Memory block, local, mails, x, residual, out, y, inner, workspace, counters;
    cuda::IpcHost* host = nullptr;
  };

  absl::Status Make(int size) {
    ranks_ = std::vector<Rank>(static_cast<size_t>(size));
    KDT_RETURN_IF_ERROR(w_.Make(kMostOuts * kMostCols * 2, 0));
    KDT_RETURN_IF_ERROR(beside_.Make(2 * kInner * kMostCols * 2, 0));
    KDT_RETURN_IF_ERROR(weight_.Make(kMostCols * 2, 0));
    KDT_RETURN_IF_ERROR(Set(w_.as<uint16_t>(), Values(1, kMostOuts * kMostCols, 0.02f)));
    KDT_RETURN_IF_ERROR(Set(beside_.as<uint16_t>(), Values(2, 2 * kInner * kMostCols, 0.02f)));
    KDT_RETURN_IF_ERROR(Set(weight_.as<uint16_t>(), Values(3, kMostCols, 1.0f)));
    for (Rank& rank : ranks_) {
      KDT_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      KDT_RETURN_IF_ERROR(rank.block.Make(cuda::kIpcFlagBytes + 2 * kBufferBytes, 0));
      KDT_RETURN_IF_ERROR(rank.local.Make(sizeof(cuda::IpcLocal), 0));
      KDT_RETURN_IF_ERROR(rank.mails.Make(2 * sizeof(cuda::IpcMail), 0xff));
      for (Memory* memory : {&rank.x, &rank.residual, &rank.out})
        KDT_RETURN_IF_ERROR(memory->Make(kMostRows * kMostCols * 2, 0));
      KDT_RETURN_IF_ERROR(rank.y.Make(kMostRows * kMostOuts * 4, 0));
      KDT_RETURN_IF_ERROR(rank.inner.Make(kMostRows * kInner * 2, 0));
      KDT_RETURN_IF_ERROR(rank.workspace.Make(kWorkspace, 0));
      KDT_RETURN_IF_ERROR(rank.counters.Make(cuda::kAllCounters * sizeof(unsigned), 0));
      KDT_CUDA_RETURN_IF_ERROR(
          cudaHostAlloc(reinterpret_cast<void**>(&rank.host), sizeof(*rank.host), cudaHostAllocMapped));
      std::memset(rank.host, 0, sizeof(*rank.host));
    }
    for (int r = 0; r < size; ++r) {
      cuda::IpcPeers& peers = ranks_[static_cast<size_t>(r)].peers;
      for (int other = 0; other < size; ++other)
        peers.blocks[other] = ranks_[static_cast<size_t>(other)].block.as<std::byte>();
      peers.local = rank(r).local.as<cuda::IpcLocal>();
      peers.mails = rank(r).mails.as<cuda::IpcMail>();
      peers.host = rank(r).host;
      peers.buffer_bytes = kBufferBytes;
      peers.rank = r;
      peers.size = size;
      peers.own_gpu = true;
      peers.max_blocks = cuda::kIpcMaxBlocks;
    }
    return absl::OkStatus();
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& rank(int r) { return ranks_[static_cast<size_t>(r)]; }

  kernels::RmsNormArgs Norm(int r, const Shape& s) {
    const auto rows = [&](const Memory& m) {
      return MakeTensor(m.as<uint16_t>(), DType::kBF16, s.rows, s.cols);
    };
    return {rows(rank(r).x), rows(rank(r).residual), weight_.as<uint16_t>(), 1e-5f, rows(rank(r).out)};
  }
  // y in float32 with a gated matrix beside it, or in bf16 alone.
  kernels::GemmArgs Gemm(int r, const Shape& s) {
    kernels::GemmArgs gemm{
        Norm(r, s).out, MakeTensor(w_.as<uint16_t>(), DType::kBF16, s.outs, s.cols),
        MakeTensor(rank(r).y.as<float>(), s.inner > 0 ? DType::kF32 : DType::kBF16, s.rows, s.outs)};
    if (s.inner == 0) return gemm;
    gemm.beside_w = MakeTensor(beside_.as<uint16_t>(), DType::kBF16, 2 * s.inner, s.cols);
    gemm.beside_y = MakeTensor(rank(r).inner.as<uint16_t>(), DType::kBF16, s.rows, s.inner);
    gemm.beside_gated = true;
    return gemm;
  }

  // With `poison` rank 0 contributes a NaN to row 1 and infinities to row 2.
  absl::Status SetInputs(int r, const Shape& s, uint32_t seed, bool poison) {
    const int64_t count = s.rows * s.cols;
    const auto set = [&](const Memory& m, const std::vector<uint16_t>& values) {
      return KDT_CUDA_STATUS(cudaMemcpyAsync(m.as<char>(), values.data(), values.size() * 2,
                                             cudaMemcpyHostToDevice, rank(r).stream));
    };
    std::vector<uint16_t> x = Values(seed * 16 + static_cast<uint32_t>(r), count, 1.0f);
    if (poison && r == 0 && s.rows > 2) {
      x[static_cast<size_t>(s.cols) + 77] = 0xffff;
      x[static_cast<size_t>(2 * s.cols) + 5] = 0x7f80;
      x[static_cast<size_t>(3 * s.cols) - 1] = 0xff80;
    }
    KDT_RETURN_IF_ERROR(set(rank(r).x, x));
    KDT_RETURN_IF_ERROR(set(rank(r).residual, Values(seed * 16 + 15, count, 3.0f)));
    for (Memory* m : {&rank(r).y, &rank(r).out, &rank(r).inner})
      KDT_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(m->as<char>(), 0xff, 256, rank(r).stream));
    return KDT_CUDA_STATUS(cudaStreamSynchronize(rank(r).stream));
  }
  absl::Status Queue(int r, const Shape& s, bool together) {
    cuda::IpcPeers peers = rank(r).peers;
    peers.processors = Processors(s);
    const auto norm = Norm(r, s);
    const auto gemm = Gemm(r, s);
    if (!cuda::IpcTakesGemm(peers, norm, gemm)) return absl::InternalError("not taken");
    if (together) return KDT_CUDA_STATUS(cuda::IpcReduceNormGemm(peers, norm, gemm, rank(r).stream));
    KDT_CUDA_RETURN_IF_ERROR(cuda::IpcReduceNorm(peers, norm, rank(r).stream));
    return KDT_CUDA_STATUS(cuda::Gemm({rank(r).stream, Processors(s), rank(r).workspace.as<char>(),
                                       kWorkspace, rank(r).counters.as<unsigned>()},
                                      gemm));
  }
  absl::Status Wait(absl::Duration limit) {
    const absl::Time deadline = absl::Now() + limit;
    for (const Rank& rank : ranks_) {
      cudaError_t state;
      while ((state = cudaStreamQuery(rank.stream)) == cudaErrorNotReady) {
        if (absl::Now() > deadline) return absl::DeadlineExceededError("not finished");
      }
      KDT_CUDA_RETURN_IF_ERROR(state);
    }
    return absl::OkStatus();
  }
  // Everything that the ops write, of all ranks.
  absl::StatusOr<std::vector<char>> Results(const Shape& s) {
    std::vector<char> all;
    for (int r = 0; r < size(); ++r) {
      const auto append = [&](const Memory& m, int64_t bytes) {
        const size_t at = all.size();
        all.resize(at + static_cast<size_t>(bytes));
        return KDT_CUDA_STATUS(
            cudaMemcpy(all.data() + at, m.as<char>(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost));
      };
      KDT_RETURN_IF_ERROR(append(rank(r).residual, s.rows * s.cols * 2));
      KDT_RETURN_IF_ERROR(append(rank(r).out, s.rows * s.cols * 2));
      KDT_RETURN_IF_ERROR(append(rank(r).y, s.rows * s.outs * (s.inner > 0 ? 4 : 2)));
      KDT_RETURN_IF_ERROR(append(rank(r).inner, s.rows * s.inner * 2));
    }
    return all;
  }
  absl::StatusOr<std::vector<char>> Run(const Shape& s, uint32_t seed, bool together, bool poison = false) {
    for (int r = 0; r < size(); ++r) KDT_RETURN_IF_ERROR(SetInputs(r, s, seed, poison));
    for (int r = 0; r < size(); ++r) KDT_RETURN_IF_ERROR(Queue(r, s, together));
    KDT_RETURN_IF_ERROR(Wait(absl::Seconds(10)));
    return Results(s);
  }

 private:
  static constexpr size_t kWorkspace = 4 << 20;

  template <typename T>
  absl::Status Set(T* to, const std::vector<T>& values) {
    return KDT_CUDA_STATUS(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

  std::vector<Rank> ranks_;
  Memory w_, beside_, weight_;
};

// In a process of its own.
void Check(int ranks, const std::function<absl::Status(LocalRanks&)>& test) {
  // Loading a kernel at its first launch may wait for the device, that is for a rank that waits for another.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  INFO(ranks << " ranks in it");
  CheckRankProcesses(1, [&](const RankSetup&) -> absl::Status {
    LocalRanks local;
    KDT_RETURN_IF_ERROR(local.Make(ranks));
    return test(local);
  });
}

std::string Name(const Shape& s) {
  return absl::StrCat(s.rows, " rows of ", s.cols, " to ", s.outs, " and ", s.inner);
}

}  // namespace

TEST_CASE("a sum that is the first part of the gemm behind it gives the bits of sum, norm and gemm") {
  // 28 and 36 blocks of 16 outputs and four shares of the inputs; 56 and 64 blocks of eight and eight shares.
  for (const int ranks : {1, 2, 3}) {
    Check(ranks, [](LocalRanks& local) -> absl::Status {
      uint32_t seed = 0;
      for (const int64_t cols : {7168, 3072, 4096, 8192}) {
        for (const Shape shape : {Shape{0, cols, 448, 0, 56}, Shape{0, cols, 448, 64, 72},
                                  Shape{0, cols, 440, 0, 264}, Shape{0, cols, 384, 64, 264}}) {
          if (local.size() > 2 && shape.slots > 200) continue;  // too many blocks for one GPU
          if (cols > 7168 && shape.slots < 200) continue;       // W does not fit on the chip
          for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 1}) {
            Shape s = shape;
            s.rows = rows;
            const bool poison = ++seed % 2 == 0;
            KDT_ASSIGN_OR_RETURN(const auto expected, local.Run(s, seed, false, poison));
            KDT_ASSIGN_OR_RETURN(const auto got, local.Run(s, seed, true, poison));
            for (size_t i = 0; i < expected.size(); ++i) {
              if (got[i] != expected[i])
                return absl::InternalError(absl::StrCat(Name(s), ": byte ", i, " of ", expected.size()));
            }
          }
        }
      }
      return absl::OkStatus();
    });
  }
}

TEST_CASE("fused sums of changing sizes right behind each other, and other operations between, stay exact") {
  Check(2, [](LocalRanks& local) -> absl::Status {
    constexpr int kSets = 6, kRounds = 150;
    const Shape shapes[] = {{8, 7168, 448, 0, 56}, {1, 3072, 448, 0, 56}, {3, 7168, 448, 0, 56}};
    std::vector<std::vector<char>> expected;
    for (const Shape& shape : shapes) {
      for (uint32_t set = 0; set < kSets; ++set) {
        KDT_ASSIGN_OR_RETURN(expected.emplace_back(), local.Run(shape, set, false));
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      const int which = round % 3, set = round % kSets;
      KDT_ASSIGN_OR_RETURN(const auto got, local.Run(shapes[which], static_cast<uint32_t>(set), true));
      if (got != expected[static_cast<size_t>(which * kSets + set)])
        return absl::InternalError(absl::StrCat("round ", round));
      // Other operations take numbers too, and two fused ones may follow each other at once.
      for (int r = 0; r < local.size() && round % 4 == 1; ++r) {
        auto& rank = local.rank(r);
        KDT_CUDA_RETURN_IF_ERROR(cuda::IpcGather(rank.peers, rank.x.as<char>(), 1000,
                                                 rank.workspace.as<char>(), 1024, rank.stream));
      }
      for (int r = 0; r < local.size() && round % 5 == 2; ++r)
        KDT_RETURN_IF_ERROR(local.Queue(r, shapes[0], true));
      for (int r = 0; r < local.size() && round % 5 == 2; ++r)
        KDT_RETURN_IF_ERROR(local.Queue(r, shapes[2], true));
      KDT_RETURN_IF_ERROR(local.Wait(absl::Seconds(10)));
    }
    return absl::OkStatus();
  });
}

TEST_CASE("a fused sum leaves when it is told to, names whom it waited for, and later ones leave at once") {
  Check(2, [](LocalRanks& local) -> absl::Status {
    const Shape shape{5, 7168, 448, 0, 56};
    KDT_RETURN_IF_ERROR(local.SetInputs(0, shape, 1, false));
    KDT_RETURN_IF_ERROR(local.Queue(0, shape, true));
    absl::SleepFor(absl::Milliseconds(50));
    if (cudaStreamQuery(local.rank(0).stream) != cudaErrorNotReady)
      return absl::InternalError("did not wait");
    *static_cast<volatile uint32_t*>(&local.rank(0).host->abort) = 1;
    KDT_RETURN_IF_ERROR(local.Wait(absl::Seconds(5)));
    if (local.rank(0).host->missing[1] == 0) return absl::InternalError("nobody is named");
    *static_cast<volatile uint32_t*>(&local.rank(0).host->abort) = 0;
    for (int i = 0; i < 20; ++i) KDT_RETURN_IF_ERROR(local.Queue(0, shape, true));
    return local.Wait(absl::Seconds(5));
  });
}

// Ranks as processes. A graph of several, replayed: the ranks drift apart between them, and the next one
// starts while the one before still runs.
TEST_CASE("a reduction with norm and gemm behind it gives the bits of the three, in replayed graphs too") {
  for (const int ranks : {2, 8}) {
    CheckBackedRanks(
        ranks, 4 << 20, [](kernels::Backend& backend, CudaCollective& collective) -> absl::Status {
          constexpr int64_t kCols = 7168, kOuts = 2112, kScores = 384, kGate = 256;
          constexpr int kOps = 4, kRounds = 8, kReplays = 20;
          Memory x, residual, out, weight, w, y, inner;
          KDT_RETURN_IF_ERROR(w.Make(kOuts * kCols * 2, 0));
          for (Memory* memory : {&x, &residual, &out, &weight, &y, &inner})
            KDT_RETURN_IF_ERROR(memory->Make(9 * kCols * 2, 0));
          const auto set = [&](const Memory& memory, const std::vector<uint16_t>& values) {
            KDT_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory.as<char>(), values.data(), values.size() * 2,
                                                     cudaMemcpyHostToDevice, collective.stream()));
            return KDT_CUDA_STATUS(cudaStreamSynchronize(collective.stream()));
          };
          KDT_RETURN_IF_ERROR(set(w, Values(1, kOuts * kCols, 0.02f)));
          KDT_RETURN_IF_ERROR(set(weight, Values(2, kCols, 1.0f)));
          for (const int64_t rows : {1, 2, 4, 8, 9}) {
            const auto tensor = [&](const Memory& m, int64_t cols) {
              return MakeTensor(m.as<char>(), DType::kBF16, rows, cols);
            };
            const auto matrix = [&](int64_t first, int64_t outs) {
              return MakeTensor(w.as<uint16_t>() + first * kCols, DType::kBF16, outs, kCols);
            };
            const kernels::RmsNormArgs norm{tensor(x, kCols), tensor(residual, kCols), weight.as<uint16_t>(),
                                            1e-5f, tensor(out, kCols)};
            kernels::GemmArgs scores{norm.out, matrix(0, kScores),
                                     MakeTensor(y.as<char>(), DType::kF32, rows, kScores)};
            scores.beside_w = matrix(kScores, 2 * kGate);
            scores.beside_y = tensor(inner, kGate);
            scores.beside_gated = true;
            const kernels::GemmArgs gemms[] = {scores, {norm.out, matrix(0, kOuts), tensor(y, kOuts)}};
            std::vector<char> results[2];
            for (const bool together : {false, true}) {
              KDT_ASSIGN_OR_RETURN(const auto graph, backend.Capture([&]() -> absl::Status {
                for (int i = 0; i < kOps; ++i) {
                  const kernels::GemmArgs& gemm = gemms[i % 2];
                  KDT_RETURN_IF_ERROR(together
                                          ? collective.AllReduceNormGemm(backend, norm, gemm)
                                          : collective.Collective::AllReduceNormGemm(backend, norm, gemm));
                }
                return absl::OkStatus();
              }));
              for (uint32_t round = 0; round < kRounds; ++round) {
                const auto seed = round * 32 + static_cast<uint32_t>(collective.rank());
                KDT_RETURN_IF_ERROR(set(x, Values(seed, rows * kCols, 0.1f)));
                KDT_RETURN_IF_ERROR(set(residual, Values(round * 32 + 31, rows * kCols, 1.0f)));
                for (int replay = 0; replay < kReplays; ++replay) KDT_RETURN_IF_ERROR(graph->Replay());
                KDT_RETURN_IF_ERROR(collective.Finish(backend));
                for (const Memory* memory : {&residual, &out, &y, &inner}) {
                  std::vector<char> bytes(static_cast<size_t>(9 * kCols * 2));
                  KDT_CUDA_RETURN_IF_ERROR(
                      cudaMemcpy(bytes.data(), memory->as<char>(), bytes.size(), cudaMemcpyDeviceToHost));
                  results[together].insert(results[together].end(), bytes.begin(), bytes.end());
                }
              }
            }
            if (results[0] != results[1]) return absl::InternalError(absl::StrCat(rows, " rows"));
          }
          return absl::OkStatus();
        });
  }
}

}  // namespace kdt
