// A one-shot all-reduce with the norm behind it, as the first part of the gemm that reads the rows: all of W
// is on the chip when the sum is there, no multiprocessor is taken from the gemm, and a kernel boundary less
// stands between. The bits are those of ipc_reduce_norm.cu and gemm/whole.cuh one after the other.
//
// The kernel's first blocks reduce. Each takes a slice of one or two rows: chunks i and i + n / 16 of a row
// for 64 values of i in a row, which are two whole warps of rms_norm, so that each warp's sum of squares is
// the same. Blocks and ranks meet as in the other kernels. Between the blocks of one rank values go by
// IpcMail, where each word tells by itself whether it is there: first the sums of squares, among the blocks
// that reduce; then the rows, to all. The former also tell the others that it is time to look for the rows:
// until then one thread a block looks, so that the looks of two thousand warps are not in the way of what
// they wait for.
//
// Why this cannot stand still. Blocks wait for the first ones of their own kernel, which must be running, and
// those for the same blocks of the other ranks. A block is on a multiprocessor by itself, there are no more
// of them than multiprocessors, kernels in front end without this one, and those behind start only when
// all its blocks run. And every rank has a GPU of its own, so that none can keep another one's blocks out.
//
// Why two mails that take turns are enough. A use writes one of them and sets all words of the other to "not
// there", behind griddepcontrol.wait: when everybody who read the other in the use before has finished, and
// so that the next use, which is behind this kernel, finds it empty.
#include <algorithm>

#include "kernels/cuda/common/chunk.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/gemm/whole.cuh"
#include "worker/collective/cuda/ipc_vector.cuh"

namespace kdt::cuda {
namespace {

constexpr int kSliceChunks = 64, kRowThreads = 4 * kSliceChunks, kMostRowsEach = 2;
constexpr int kLooksPerDeadLook = 1024;
constexpr uint32_t kNotThere = ~0u;

__device__ __forceinline__ bool HasCome(const uint4& v) {
  return v.x != kNotThere && v.y != kNotThere && v.z != kNotThere && v.w != kNotThere;
}
__device__ __forceinline__ uint4 LoadMail(const uint32_t* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ void PostMail(uint32_t* to, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void PostMail(uint32_t* to, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
// Of chunk t of four from chunk 4 `four` of a row on: in IpcMail::x, in words.
__device__ __forceinline__ int PlaceOf(int row, int four, int t) {
  return ((four * kIpcMailRows + row) * 4 + t) * 4;
}
__device__ __forceinline__ void Unpack4(float (&v)[4], const uint2& bits) {
  v[0] = LowBf16(bits.x), v[1] = HighBf16(bits.x), v[2] = LowBf16(bits.y), v[3] = HighBf16(bits.y);
}
__device__ __forceinline__ uint2 Pack4(const float (&v)[4]) {
  return {PackBf16(v[0], v[1]), PackBf16(v[2], v[3])};
}

struct ReduceParams {
  const bf16* x;  // [rows, n]
  bf16* residual;
  int64_t residual_stride;
  const bf16* weight;
  float eps;
  int rows;
  int n;
  bf16* out;
  int64_t out_stride;
  int slices, rows_each;  // of a row; a block's rows
  int owners;             // blocks that reduce
};

struct XOfRanks {
  static constexpr bool kMayBeLate = true;
  class Reader;
  IpcPeers peers;
  ReduceParams reduce;
};

class XOfRanks::Reader {
 public:
  // A block that reduces shows the other ranks its values before it asks for all of W: what it reads would
  // stand in the queue behind that, and they wait for it.
  __device__ __forceinline__ explicit Reader(const XOfRanks& from) : peers(from.peers), p(from.reduce) {
    if (!IsOwner()) return;
    const Place at = FindPlace();
    if (at.reduces && at.pair % 16 == 0) PrefetchL2(p.weight + at.pair * 4);
    WaitForPrevious();
    number_ = NextNumber(peers);
    if (at.reduces) {
      before_ = reinterpret_cast<const uint2*>(p.residual + at.row * p.residual_stride)[at.pair];
      const int64_t in_x = static_cast<int64_t>(at.row) * (p.n / 4) + at.pair;
      reinterpret_cast<uint2*>(peers.blocks[peers.rank] + BufferOf(peers, number_))[in_x] =
          reinterpret_cast<const uint2*>(p.x)[in_x];
    }
    const unsigned long long start = Arrive(peers, &IpcFlags::arrived, number_);
    if (threadIdx.x == 0) *Start() = start;
  }

  __device__ __forceinline__ void Begin() {
    if (!IsOwner()) WaitForPrevious();
    const uint32_t use = peers.local->mails[blockIdx.x] + 1;
    mail_ = peers.mails + (use & 1);
    if (IsOwner()) {
      __syncwarp();
      const bool alive = Await(peers, &IpcFlags::arrived, number_, *Start());
      CountOp(peers, number_, p.owners);
      const Place at = FindPlace();
      if (alive && at.reduces) Reduce(at);
    }
    uint4* const other = reinterpret_cast<uint4*>(peers.mails + (~use & 1));
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < sizeof(IpcMail) / sizeof(uint4);
         i += gridDim.x * blockDim.x) {
      other[i] = make_uint4(kNotThere, kNotThere, kNotThere, kNotThere);
    }
    if (threadIdx.x == 0) {
      for (int looks = 0; *static_cast<const volatile uint32_t*>(mail_->squares) == kNotThere; ++looks) {
        if (GivenUp(looks)) break;
      }
    }
    __syncthreads();
    WriteOwn(peers.local->mails, gridDim.x, use);
  }

  __device__ __forceinline__ uint4 Load(const StreamParams&, int row, int four, int t) const {
    return LoadMail(mail_->x + PlaceOf(row, four, t));
  }
  __device__ __forceinline__ bool IsThere(const uint4& v) const { return HasCome(v); }
  __device__ __forceinline__ bool GivenUp(int looks) const {
    return looks % kLooksPerDeadLook == kLooksPerDeadLook - 1 &&
           *static_cast<const volatile uint32_t*>(&peers.local->dead) != 0;
  }

 private:
  struct Place {    // of a thread that reduces: four values of a row
    int row, pair;  // the second: of pairs of values, two of them, in a row
    bool reduces;
  };
  // When the block arrived: of interest to the first warp, and not worth registers.
  static __device__ __forceinline__ unsigned long long* Start() {
    __shared__ unsigned long long start;
    return &start;
  }
  __device__ __forceinline__ bool IsOwner() const { return static_cast<int>(blockIdx.x) < p.owners; }
  __device__ __forceinline__ int Slice() const { return static_cast<int>(blockIdx.x) % p.slices; }
  __device__ __forceinline__ Place FindPlace() const {
    const int thread = static_cast<int>(threadIdx.x), own_row = thread / kRowThreads;
    const int row = static_cast<int>(blockIdx.x) / p.slices * p.rows_each + own_row;
    const int in_half = thread % (kRowThreads / 2), half = thread / (kRowThreads / 2) % 2;
    return {row, Slice() * (kRowThreads / 2) + in_half + half * (p.n / 8),
            own_row < p.rows_each && row < p.rows};
  }

  __device__ __forceinline__ void Reduce(const Place& place) {
    __shared__ float squares_of_chunks[kMostRowsEach][2][kSliceChunks];
    // The row lies here in every rank's block, also in this one's.
    const size_t offset = BufferOf(peers, number_) + static_cast<size_t>(place.row) * p.n * sizeof(bf16);
    const int lane = threadIdx.x & 31, odd = lane & 1, at = place.pair, row = place.row;
    const int own_row = static_cast<int>(threadIdx.x) / kRowThreads;
    float v[4], r[4];
    for (int base = 0; base < peers.size; base += kBatch) {
      uint2 values[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k < peers.size)
          values[k] = LoadPeer(reinterpret_cast<const uint2*>(peers.blocks[base + k] + offset) + at);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k >= peers.size) break;
        Unpack4(r, values[k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = base + k == 0 ? r[i] : v[i] + r[i];
      }
    }
    Unpack4(r, before_);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = Rounded<bf16>(Rounded<bf16>(v[i]) + r[i]);
    // Squares8, its second half in the odd lane.
    const auto add_squares = [&](float sum) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(v[i], v[i], sum);
      return sum;
    };
    const float of_even = __shfl_up_sync(~0u, add_squares(0.0f), 1);
    const int in_row = static_cast<int>(threadIdx.x) % kRowThreads, pair = in_row / 2;
    if (odd == 1) squares_of_chunks[own_row][pair / kSliceChunks][pair % kSliceChunks] = add_squares(of_even);
    NamedBarrier(1 + own_row, kRowThreads);
    uint32_t* const mailed = mail_->squares + row * kIpcMailSquares;
    if (in_row < kSliceChunks) {  // two warps, each for one of rms_norm's
      const float sum =
          WarpSum(squares_of_chunks[own_row][0][in_row] + squares_of_chunks[own_row][1][in_row]);
      const int warp = 2 * Slice() + in_row / 32, warps = 2 * p.slices;
      // Not negative; a NaN must not have all bits set.
      if (lane == 0) PostMail(mailed + warp % 4 * 4 + warp / 4, __float_as_uint(sum) & 0x7fffffffu);
      if (warp == 0 && lane >= warps && lane < kIpcMailSquares)
        PostMail(mailed + lane % 4 * 4 + lane / 4, 0u);
    }
    reinterpret_cast<uint2*>(p.residual + row * p.residual_stride)[at] = Pack4(v);
    const uint2 weight = reinterpret_cast<const uint2*>(p.weight)[at];
    uint4 all = LoadMail(mailed + 4 * (lane & 3));
    for (int looks = 0; __any_sync(~0u, !HasCome(all)) && !GivenUp(looks); ++looks)
      all = LoadMail(mailed + 4 * (lane & 3));
    // WarpSum of one of the sums a lane.
    float sum =
        (__uint_as_float(all.x) + __uint_as_float(all.z)) + (__uint_as_float(all.y) + __uint_as_float(all.w));
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    const float factor = rsqrtf(sum / static_cast<float>(p.n) + p.eps);
    Unpack4(r, weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = r[i] * Rounded<bf16>(v[i] * factor);
    const uint2 normed = Pack4(v);
    PostMail(mail_->x + PlaceOf(row, at / 8, at / 2 % 4) + 2 * odd, normed);
    reinterpret_cast<uint2*>(p.out + row * p.out_stride)[at] = normed;
  }

  const IpcPeers& peers;
  const ReduceParams& p;
  IpcMail* mail_;
  uint32_t number_;  // of a block that reduces, as what follows
  uint2 before_;     // values of the residual
};

using FourShares = WholeShape<2, 1, 3, 4, 4>;
using EightShares = WholeShape<1, 2, 3, 1, 4>;

struct Plan {
  StreamParams gemm;
  int tiles, slices, rows_each, owners;
};

bool MakePlan(const IpcPeers& peers, const kernels::RmsNormArgs& norm, const kernels::GemmArgs& gemm,
              Plan* plan) {
  constexpr int kSliceValues = kSliceChunks * 2 * 8, kTwoChunksAThread = 2048;
  const int64_t rows = norm.x.rows, n = norm.x.cols;
  if (!peers.own_gpu || !IpcTakesNorm(norm) || rows > kWholeRows || n % kSliceValues != 0 ||
      n <= kTwoChunksAThread || gemm.x.data != norm.out.data || gemm.x.rows != rows || gemm.x.cols != n ||
      gemm.x.stride != norm.out.stride || gemm.w.dtype != kernels::DType::kBF16 || gemm.gated ||
      gemm.w.rows == 0 || (gemm.beside_w.rows > 0 && gemm.beside_w.dtype != kernels::DType::kBF16)) {
    return false;
  }
  if (!TakesWhole(Launch{.processors = peers.processors}, MakeSkinny(gemm), &plan->gemm)) return false;
  const auto fits = [&]<typename S>(S) {
    const int pieces = (plan->gemm.chunks + 7) / 8, share = (pieces + S::kSplits - 1) / S::kSplits;
    plan->tiles = Blocks(gemm.w.rows, S::kOuts) + Blocks(gemm.beside_w.rows, S::kOuts);
    return plan->tiles <= std::min(peers.processors, kIpcMailBlocks) &&
           (share + 3) / 4 <= S::kDepth + S::kHeld;
  };
  if (!(plan->gemm.splits == 8 ? fits(EightShares{}) : fits(FourShares{}))) return false;
  plan->slices = static_cast<int>(n) / kSliceValues;
  for (plan->rows_each = 1; plan->rows_each <= kMostRowsEach; plan->rows_each *= 2) {
    plan->owners = plan->slices * Blocks(rows, plan->rows_each);
    if (plan->owners <= std::min(plan->tiles, peers.max_blocks)) return true;
  }
  return false;
}

}  // namespace

bool IpcTakesGemm(const IpcPeers& peers, const kernels::RmsNormArgs& norm, const kernels::GemmArgs& gemm) {
  Plan plan;
  return MakePlan(peers, norm, gemm, &plan);
}

cudaError_t IpcReduceNormGemm(const IpcPeers& peers, const kernels::RmsNormArgs& norm,
                              const kernels::GemmArgs& gemm, cudaStream_t stream) {
  Plan plan;
  if (!MakePlan(peers, norm, gemm, &plan)) return cudaErrorInvalidValue;
  XOfRanks x{};
  x.peers = peers;
  x.reduce = {Data<bf16>(norm.x),
              Data<bf16>(norm.residual),
              norm.residual.stride,
              reinterpret_cast<const bf16*>(norm.weight),
              norm.eps,
              static_cast<int>(norm.x.rows),
              static_cast<int>(norm.x.cols),
              Data<bf16>(norm.out),
              norm.out.stride,
              plan.slices,
              plan.rows_each,
              plan.owners};
  const auto launch = [&]<typename S>(S) {
    return LaunchAfter(Launch{stream}, WholeKernel<S, XOfRanks>, dim3(plan.tiles), dim3(S::kThreads),
                       S::kShared, plan.gemm, x);
  };
  return plan.gemm.splits == 8 ? launch(EightShares{}) : launch(FourShares{});
}

}  // namespace kdt::cuda
