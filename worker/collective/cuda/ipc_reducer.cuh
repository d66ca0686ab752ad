// The blocks that reduce, of a kernel that sums rows over the ranks and normalises them as its first part
// (ipc_reduce_gemm.cu says how they fit into it), and the mail that their values go by.
#pragma once

#include "kernels/cuda/common/chunk.cuh"
#include "worker/collective/cuda/ipc_vector.cuh"

namespace kdt::cuda {

constexpr int kSliceChunks = 64, kRowThreads = 4 * kSliceChunks, kMostRowsEach = 2;
constexpr int kFewRows = 2;  // the bell rings early: looks that find nothing yet cost little
constexpr unsigned kLooksPerDeadLook = 1024;
constexpr uint32_t kNotThere = ~0u;

__device__ __forceinline__ bool HasCome(const uint4& v) {
  return v.x != kNotThere && v.y != kNotThere && v.z != kNotThere && v.w != kNotThere;
}
__device__ __forceinline__ uint4 LoadMail(const uint32_t* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
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
// Scale8 of two values. By float32, where a NaN comes out of the conversion as 0x7fff whatever its sign: so
// no value has all bits set.
__device__ __forceinline__ uint32_t ScalePair(uint32_t v, float factor, uint32_t weight) {
  return PackBf16(LowBf16(weight) * Rounded<bf16>(LowBf16(v) * factor),
                  HighBf16(weight) * Rounded<bf16>(HighBf16(v) * factor));
}

struct ReduceParams {
  IpcPeers peers;
  NormRows norm;
  int slices, rows_each;  // of a row; a block's rows
  int owners;             // blocks that reduce
};

__device__ __forceinline__ bool GivenUp(const ReduceParams& p, unsigned looks) {
  return looks % kLooksPerDeadLook == kLooksPerDeadLook - 1 &&
         *static_cast<const volatile uint32_t*>(&p.peers.local->dead) != 0;
}

// What a row is multiplied with: from its squares, of which lanes 4 i to 4 i + 3 have four each. The order is
// that of WarpSum of one of them a lane.
__device__ __forceinline__ float Factor(const ReduceParams& p, const uint4& squares) {
  float sum = (__uint_as_float(squares.x) + __uint_as_float(squares.z)) +
              (__uint_as_float(squares.y) + __uint_as_float(squares.w));
  sum += __shfl_xor_sync(~0u, sum, 2);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return rsqrtf(sum / static_cast<float>(p.norm.n) + p.norm.eps);
}

// Of a thread of a block that reduces: four values of a row.
class Reducer {
 public:
  __device__ __forceinline__ explicit Reducer(const ReduceParams& params) : p(params) {}

  __device__ __forceinline__ void Show() {
    const int at = At(), row = Row();
    if (Reduces() && at % 16 == 0) PrefetchL2(p.norm.weight + at * 4);
    WaitForPrevious();
    number_ = NextNumber(p.peers);
    if (Reduces()) {
      before_ = reinterpret_cast<const uint2*>(p.norm.residual + row * p.norm.residual_stride)[at];
      const int64_t in_x = static_cast<int64_t>(row) * (p.norm.n / 4) + at;
      reinterpret_cast<uint2*>(p.peers.blocks[p.peers.rank] + BufferOf(p.peers, number_))[in_x] =
          reinterpret_cast<const uint2*>(p.norm.x)[in_x];
    }
    const unsigned long long start = Arrive(p.peers, &IpcFlags::arrived, number_);
    if (threadIdx.x == 0) *Start() = start;
  }

  __device__ __forceinline__ void Sum(IpcMail* mail) {
    __syncwarp();
    const bool alive = Await(p.peers, &IpcFlags::arrived, number_, *Start());
    CountOp(p.peers, number_, p.owners);
    if (!alive || !Reduces()) return;
    __shared__ float squares_of_chunks[kMostRowsEach][2][kSliceChunks];
    // The row lies here in every rank's block, also in this one's.
    const int lane = threadIdx.x & 31, odd = lane & 1, at = At(), row = Row();
    const size_t offset = BufferOf(p.peers, number_) + static_cast<size_t>(row) * p.norm.n * sizeof(bf16);
    float v[4], r[4];
    for (int base = 0; base < p.peers.size; base += kBatch) {
      uint2 values[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k < p.peers.size)
          values[k] = LoadPeer(reinterpret_cast<const uint2*>(p.peers.blocks[base + k] + offset) + at);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (base + k >= p.peers.size) break;
        Unpack4(r, values[k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = base + k == 0 ? r[i] : v[i] + r[i];
      }
    }
    Unpack4(r, before_);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = Rounded<bf16>(Rounded<bf16>(v[i]) + r[i]);
    const uint2 sums = {PackBf16(v[0], v[1]), PackBf16(v[2], v[3])};
    // Squares8, its second half in the odd lane.
    const auto add_squares = [&](float sum) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(v[i], v[i], sum);
      return sum;
    };
    const float of_even = __shfl_up_sync(~0u, add_squares(0.0f), 1);
    const int own_row = OwnRow(), in_row = static_cast<int>(threadIdx.x) % kRowThreads;
    if (odd == 1)
      squares_of_chunks[own_row][in_row / 2 / kSliceChunks][in_row / 2 % kSliceChunks] = add_squares(of_even);
    NamedBarrier(1 + own_row, kRowThreads);
    if (in_row < kSliceChunks) {  // two warps, each for one of rms_norm's
      const float sum =
          WarpSum(squares_of_chunks[own_row][0][in_row] + squares_of_chunks[own_row][1][in_row]);
      uint32_t* const squares = mail->squares + row * kIpcMailSquares;
      const int warp = 2 * Slice() + in_row / 32, warps = 2 * p.slices;
      // Not negative; a NaN must not have all bits set.
      if (lane == 0) PostMail(squares + warp % 4 * 4 + warp / 4, __float_as_uint(sum) & 0x7fffffffu);
      if (warp == 0 && lane >= warps && lane < kIpcMailSquares)
        PostMail(squares + lane % 4 * 4 + lane / 4, 0u);
    }
    reinterpret_cast<uint2*>(p.norm.residual + row * p.norm.residual_stride)[at] = sums;
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.norm.rows <= kFewRows) PostMail(mail->bell, 0);
    const uint2 weight = __ldg(reinterpret_cast<const uint2*>(p.norm.weight) + at);
    const uint32_t* const squares = mail->squares + row * kIpcMailSquares + 4 * (lane & 3);
    uint4 all = LoadMail(squares);
    for (unsigned looks = 0; __any_sync(~0u, !HasCome(all)) && !GivenUp(p, looks); ++looks)
      all = LoadMail(squares);
    const float factor = Factor(p, all);
    const uint2 normed = {ScalePair(sums.x, factor, weight.x), ScalePair(sums.y, factor, weight.y)};
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.norm.rows > kFewRows) PostMail(mail->bell, 0);
    PostMail(mail->x + PlaceOf(row, at / 8, at / 2 % 4) + 2 * odd, normed);
    reinterpret_cast<uint2*>(p.norm.out + row * p.norm.out_stride)[at] = normed;
  }

  __device__ __forceinline__ bool IsOwner() const { return static_cast<int>(blockIdx.x) < p.owners; }

 private:
  // When the block arrived: of interest to the first warp, and not worth registers.
  static __device__ __forceinline__ unsigned long long* Start() {
    __shared__ unsigned long long start;
    return &start;
  }
  __device__ __forceinline__ int Slice() const { return static_cast<int>(blockIdx.x) % p.slices; }
  __device__ __forceinline__ int OwnRow() const { return static_cast<int>(threadIdx.x) / kRowThreads; }
  __device__ __forceinline__ int Row() const {
    return static_cast<int>(blockIdx.x) / p.slices * p.rows_each + OwnRow();
  }
  __device__ __forceinline__ bool Reduces() const { return OwnRow() < p.rows_each && Row() < p.norm.rows; }
  __device__ __forceinline__ int At() const {  // of fours of values in a row
    constexpr int kHalf = kRowThreads / 2;
    const int thread = static_cast<int>(threadIdx.x);
    return Slice() * kHalf + thread % kHalf + thread / kHalf % 2 * (p.norm.n / 8);
  }

  const ReduceParams& p;
  uint32_t number_;
  uint2 before_;  // values of the residual
};

}  // namespace kdt::cuda
