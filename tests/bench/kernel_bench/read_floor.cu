#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/launch.cuh"
#include "tests/bench/kernel_bench/read_floor.h"

namespace kdt::bench {
namespace {

using namespace kdt::cuda;

constexpr unsigned long long kOneBlock = 1ull << 44;  // above the sum of all blocks' words
constexpr int kLine = 128, kChunk = 16, kChunksOfLine = kLine / kChunk;

// A part of a block's lines, [begin, border), is used at once, [border, end) behind the hand-over where there
// is one.
struct Share {
  const char* bytes;  // of line 0
  int begin, border, end;
};
__device__ __forceinline__ Share ShareOf(const char* bytes, int64_t lines, bool twice) {
  const int64_t begin = lines * blockIdx.x / gridDim.x;
  const int mine = static_cast<int>(lines * (blockIdx.x + 1) / gridDim.x - begin);
  return {bytes + begin * kLine, 0, twice ? static_cast<int>(mine * int64_t{2} / 3) : mine, mine};
}

__device__ __forceinline__ uint32_t Words(const uint4& v) { return v.x + v.y + v.z + v.w; }

// 16 bytes, past L1, or zeros: one instruction and no branch, so that all of a thread's are under way at
// once.
__device__ __forceinline__ uint4 LoadOr0(const void* from, bool there) {
  uint4 v{};
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(static_cast<int>(there)));
  return v;
}

// A way to read: Run adds up all words and calls `between` at the border, with what the second part has room
// for under way.

// Plain loads, kAhead of a thread at once.
template <int kThreadsIn, int kBlocksIn, int kAhead>
struct Loads {
  static constexpr int kThreads = kThreadsIn, kBlocks = kBlocksIn, kShared = 0;
  static constexpr int kRegisterBlocks =
      kBlocks * std::max(1, (kAhead <= 4 ? 1536 : 1024) / (kThreads * kBlocks));
  static std::string Name() {
    return "loads " + std::to_string(kBlocks) + "x" + std::to_string(kThreads) + "x" + std::to_string(kAhead);
  }

  template <typename Between>
  static __device__ __forceinline__ uint32_t Run(const Share& share, char*, const Between& between) {
    uint4 v[kAhead];
    uint32_t sum = 0;
    const auto ask = [&](int at, int end) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = at + static_cast<int>(threadIdx.x) + i * kThreads;
        v[i] = LoadOr0(share.bytes + int64_t{chunk} * kChunk, chunk < end);
      }
    };
    const auto fold = [&] {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sum += Words(v[i]);
    };
    int at = share.begin * kChunksOfLine;
    const int border = share.border * kChunksOfLine, end = share.end * kChunksOfLine;
    for (; at < border; at += kAhead * kThreads) {
      ask(at, border);
      fold();
    }
    if (border == end) return sum;
    ask(border, end);
    between(sum);
    fold();
    for (at = border + kAhead * kThreads; at < end; at += kAhead * kThreads) {
      ask(at, end);
      fold();
    }
    return sum;
  }
};

// cp.async; each thread has kAhead places of its own in shared memory.
template <int kThreadsIn, int kBlocksIn, int kAhead>
struct Ring {
  static constexpr int kThreads = kThreadsIn, kBlocks = kBlocksIn, kShared = kThreads * kAhead * kChunk;
  static constexpr int kRegisterBlocks = kBlocks * std::max(1, 1024 / (kThreads * kBlocks));
  static std::string Name() {
    return "ring " + std::to_string(kBlocks) + "x" + std::to_string(kThreads) + "x" + std::to_string(kAhead);
  }

  template <typename Between>
  static __device__ __forceinline__ uint32_t Run(const Share& share, char* shared, const Between& between) {
    const uint32_t mine = SharedAddress(shared) + threadIdx.x * kChunk;
    const int first = Steps(share.border - share.begin), all = first + Steps(share.end - share.border);
    int asked = 0, place = 0;
    const auto ask = [&] {
      const bool late = asked >= first;
      const int chunk = (late ? share.border : share.begin) * kChunksOfLine + static_cast<int>(threadIdx.x) +
                        (asked - (late ? first : 0)) * kThreads;
      const bool there = chunk < (late ? share.end : share.border) * kChunksOfLine;
      if (asked < all)
        CopyAsync16Or0(mine + place * (kThreads * kChunk),
                       share.bytes + (there ? int64_t{chunk} * kChunk : 0), there);
      CopyAsyncCommit();
      ++asked;
    };
    for (; place < kAhead; ++place) ask();
    place = 0;
    uint32_t sum = 0;
    for (int step = 0; step < all; ++step) {
      if (step == first) between(sum);
      CopyAsyncWaitGroups<kAhead - 1>();
      sum += Words(LoadShared4U(mine + place * (kThreads * kChunk)));
      ask();
      place = place + 1 == kAhead ? 0 : place + 1;
    }
    return sum;
  }
  static __device__ __forceinline__ int Steps(int lines) {
    return (lines * kChunksOfLine + kThreads - 1) / kThreads;
  }
};

// Bulk copies of kPiece bytes; each warp has kAhead places of its own.
template <int kThreadsIn, int kBlocksIn, int kPiece, int kAhead>
class Bulk {
 public:
  static constexpr int kThreads = kThreadsIn, kBlocks = kBlocksIn, kWarps = kThreads / 32;
  static constexpr int kRing = kWarps * kAhead * kPiece, kShared = kRing + kWarps * kAhead * 8;
  static constexpr int kRegisterBlocks = kBlocks * std::max(1, 1024 / (kThreads * kBlocks));
  static std::string Name() {
    return "bulk " + std::to_string(kBlocks) + "x" + std::to_string(kWarps) + "x" + std::to_string(kAhead) +
           "x" + std::to_string(kPiece);
  }

  template <typename Between>
  static __device__ __forceinline__ uint32_t Run(const Share& share, char* shared, const Between& between) {
    return Bulk(share, shared).Take(between);
  }

  // Asks for what there is room for.
  __device__ __forceinline__ Bulk(const Share& share, char* shared)
      : share_(share),
        ring_(SharedAddress(shared) + threadIdx.x / 32 * kAhead * kPiece),
        barriers_(SharedAddress(shared) + kRing + threadIdx.x / 32 * kAhead * 8),
        first_(Pieces(share.border - share.begin)),
        all_(first_ + Pieces(share.end - share.border)) {
    if (threadIdx.x % 32 < kAhead) BarrierInit(barriers_ + threadIdx.x % 32 * 8, 1);
    FenceBulk();
    __syncwarp();
    for (int place = 0; place < kAhead; ++place) Ask(place);
  }
  template <typename Between>
  __device__ __forceinline__ uint32_t Take(const Between& between) {
    uint32_t sum = 0;
    int place = 0;
    uint32_t phases = 0;  // of the places, a bit each; a step without bytes for this warp changes none
    for (int step = 0; step < all_; ++step) {
      if (step == first_) between(sum);
      const char* from;
      const int count = Size(step, from);
      if (count > 0) {
        BarrierWait(barriers_ + place * 8, phases >> place & 1);
        phases ^= 1u << place;
#pragma unroll
        for (int i = 0; i < kPiece / 512; ++i) {
          const int at = i * 512 + static_cast<int>(threadIdx.x % 32) * kChunk;
          if (at < count) sum += Words(LoadShared4U(ring_ + place * kPiece + at));
        }
      }
      __syncwarp();
      Ask(place);
      if (++place == kAhead) place = 0;
    }
    return sum;
  }

 private:
  static __device__ __forceinline__ int Pieces(int lines) {
    return (lines * kLine + kWarps * kPiece - 1) / (kWarps * kPiece);
  }
  // Bytes of a piece of this warp's, and where they are.
  __device__ __forceinline__ int Size(int step, const char*& from) const {
    const bool late = step >= first_;
    const int at = (late ? share_.border : share_.begin) * kLine +
                   ((step - (late ? first_ : 0)) * kWarps + static_cast<int>(threadIdx.x) / 32) * kPiece;
    from = share_.bytes + at;
    return max(0, min(kPiece, (late ? share_.end : share_.border) * kLine - at));
  }
  __device__ __forceinline__ void Ask(int place) {
    const char* from;
    const int count = asked_ < all_ ? Size(asked_, from) : 0;
    if (count > 0 && threadIdx.x % 32 == 0) {
      BarrierExpect(barriers_ + place * 8, count);
      CopyBulk(ring_ + place * kPiece, from, count, barriers_ + place * 8);
    }
    ++asked_;
  }

  Share share_;
  uint32_t ring_, barriers_;
  int first_, all_, asked_ = 0;
};

// The block's sum, in thread 0.
template <int kThreads>
__device__ __forceinline__ uint32_t BlockSum(uint32_t x) {
  __shared__ uint32_t of_warp[kThreads / 32];
  x = __reduce_add_sync(~0u, x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  uint32_t sum = 0;
  if (threadIdx.x < 32) sum = __reduce_add_sync(~0u, threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0u);
  return sum;
}

template <class W, ReadForm kForm>
__global__ void __launch_bounds__(W::kThreads, W::kRegisterBlocks)
    ReadKernel(const __grid_constant__ ReadParams p) {
  extern __shared__ __align__(128) char shared[];
  constexpr bool kTwice = kForm == ReadForm::kDependentTwice;
  LaunchDependents();
  Share share = ShareOf(p.pool, p.lines, kTwice);
  uint32_t sum = 0;
  const auto nothing = [](uint32_t) {};
  if constexpr (kForm == ReadForm::kRead) {
    share.bytes += p.place;
    sum = W::Run(share, shared, nothing);
    WaitForPrevious();
    for (int i = threadIdx.x; i < gridDim.x; i += W::kThreads) sum += __ldcg(p.before + i);
  } else {
    WaitForPrevious();
    share.bytes += __ldcg(reinterpret_cast<const long long*>(p.told_place));
    uint32_t before = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += W::kThreads) before += __ldcg(p.before + i);
    if (kTwice && blockIdx.x == 0 && threadIdx.x == 0) *p.next_handed = 0;
    uint32_t others = 0;
    // Everyone has the sum of everybody's first part before anyone goes on. One word counts the blocks and
    // adds up what they have, so that there is nothing to order.
    const auto hand_over = [&](uint32_t so_far) {
      const uint32_t mine = BlockSum<W::kThreads>(so_far);
      if (threadIdx.x == 0) {
        atomicAdd(p.handed, kOneBlock + mine);
        unsigned long long found;
        do {
          asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(p.handed) : "memory");
        } while (found / kOneBlock != gridDim.x);
        others = static_cast<uint32_t>(found);
      }
      __syncthreads();
    };
    if constexpr (kTwice) {
      sum = W::Run(share, shared, hand_over);
    } else {
      sum = W::Run(share, shared, nothing);
    }
    sum += before + others;
  }
  sum = BlockSum<W::kThreads>(sum);
  if (threadIdx.x == 0) {
    p.words[blockIdx.x] = sum;
    if (blockIdx.x == 0) p.told_place[1] = p.next_place;
  }
}

__global__ void SumSharesKernel(const char* bytes, int64_t lines, uint32_t* sums) {
  const Share share = ShareOf(bytes, lines, true);
  const auto* words = reinterpret_cast<const uint32_t*>(share.bytes);
  uint32_t all = 0, first = 0;
  for (int i = threadIdx.x; i < share.end * (kLine / 4); i += blockDim.x) {
    all += words[i];
    if (i < share.border * (kLine / 4)) first += words[i];
  }
  atomicAdd(sums + blockIdx.x, all);
  atomicAdd(sums + gridDim.x + blockIdx.x, first);
}

template <class... W>
struct List {
  static constexpr int kCount = sizeof...(W);
  template <typename F>
  static void With(int way, const F& f) {
    int at = 0;
    ((at++ == way ? f(std::type_identity<W>{}) : void()), ...);
  }
};
using Ways = List<Loads<512, 1, 4>, Loads<512, 1, 8>, Loads<1024, 1, 8>, Loads<512, 2, 8>, Ring<512, 1, 12>,
                  Bulk<256, 1, 4096, 3>>;

}  // namespace

int ReadWays() { return Ways::kCount; }

std::string ReadWayName(int way) {
  std::string name;
  Ways::With(way, [&]<class W>(std::type_identity<W>) { name = W::Name(); });
  return name;
}

int ReadBlocks(const Launch& launch, int way) {
  int blocks = 0;
  Ways::With(way, [&]<class W>(std::type_identity<W>) { blocks = W::kBlocks * launch.processors; });
  return blocks;
}

cudaError_t Read(const Launch& launch, ReadForm form, int way, const ReadParams& params) {
  cudaError_t error = cudaErrorInvalidValue;
  Ways::With(way, [&]<class W>(std::type_identity<W>) {
    const auto kernel = form == ReadForm::kRead        ? ReadKernel<W, ReadForm::kRead>
                        : form == ReadForm::kDependent ? ReadKernel<W, ReadForm::kDependent>
                                                       : ReadKernel<W, ReadForm::kDependentTwice>;
    const int blocks = W::kBlocks * launch.processors;
    error = LaunchAfter(launch, kernel, dim3(blocks), dim3(W::kThreads), W::kShared, params);
  });
  return error;
}

void SumShares(cudaStream_t stream, const char* bytes, int64_t lines, int blocks, uint32_t* sums) {
  SumSharesKernel<<<blocks, 512, 0, stream>>>(bytes, lines, sums);
}

}  // namespace kdt::bench
