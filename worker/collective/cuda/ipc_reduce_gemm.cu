// A one-shot all-reduce with the norm behind it, as the first part of the gemm that reads the rows: all of W
// is on the chip when the sum is there, no multiprocessor is taken from the gemm, and a kernel boundary less
// stands between. The bits are those of ipc_reduce_norm.cu and gemm/whole.cuh one after the other.
//
// The kernel's first blocks reduce. Each takes a slice of one or two rows: chunks i and i + n / 16 of a row
// for 64 values of i in a row, which are two whole warps of rms_norm, so that each warp's sum of squares is
// the same. Blocks and ranks meet as in the other kernels. What a block reads while all others ask for all of
// W at once takes 3 to 5 us. So the others ask for it piece by piece, which is as fast; and a block that
// reduces shows its values before it asks for any W, then for so much of it that it is done when the others
// come, and for the rest while it waits for the squares.
//
// Between the blocks of a rank values go by IpcMail, where each word tells by itself whether it is there, so
// that no flag and no fence stands between: first the sums of squares, among the blocks that reduce; then the
// normalised rows, to all. Until it is time to look for the rows one thread of any other block
// looks for the bell, so that the looks of two thousand warps are not in the way of what they wait for.
//
// Lane (g, t) of a warp has a product's inputs 8 t, ... of row g. With less than eight rows there are lanes
// left, and a warp's steps are dealt out to them: lane g has row g % kRows, and of all steps (of all shares,
// one share after the other) those of its group g / kRows, kRows steps. So kRows steps' registers take all of
// x. The sums of a share stand in the columns of the group whose step it
// is, and move on to the next group's.
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

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/skinny.h"
#include "kernels/cuda/gemm/whole.cuh"
#include "worker/collective/cuda/ipc_reducer.cuh"

namespace kdt::cuda {
namespace {

// A lane's inputs of a warp's products, as the head of this file says.
template <typename S, int kRows>
class Inputs {
 public:
  static constexpr int kEach = S::kEach, kSteps = 8 / kEach;  // of a share, at most
  static constexpr int kSlots = kRows;
  // With one share registers are full of W: more come when the first steps' W is used up.
  static constexpr int kFirst = kEach == 1 && kSlots > 3 ? 3 : kSlots;
  static_assert(WholeBlock<S>::kOnChip <= kSteps);

  __device__ __forceinline__ Inputs(const ReduceParams& params, const WholeBlock<S>& block,
                                    const IpcMail* mail)
      : p_(params), block_(block), mail_(mail), row_((block.lane >> 2) % kRows) {
    const int place = (block.lane >> 2) / kRows * kRows;  // the first of the group's
    const bool second = kEach == 2 && place >= kSteps;
    first_ = (second ? block.first[kEach - 1] : block.first[0]) + 4 * (place % kSteps);
    from_ = mail->x + PlaceOf(row_, 2 * first_, block.lane & 3);
    count_ = row_ < p_.norm.rows ? (second ? block.count[kEach - 1] : block.count[0]) - place % kSteps : 0;
  }

  __device__ __forceinline__ void Load(int j) {
    if (!Has(j)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) in_[j][half] = LoadMail(Mail(j) + PlaceOf(0, half, 0));
  }
  __device__ __forceinline__ bool IsThere(int j) const {
    return !Has(j) || (HasCome(in_[j][0]) && HasCome(in_[j][1]));
  }
  // Waits for the first kFirst.
  __device__ __forceinline__ void Get() {
    for (unsigned looks = 0;; ++looks) {
      bool there = true;
#pragma unroll
      for (int j = 0; j < kFirst; ++j) Load(j);
#pragma unroll
      for (int j = 0; j < kFirst; ++j) there = there && IsThere(j);
      if (__all_sync(~0u, there) || GivenUp(p_, looks)) break;
    }
  }
  // Behind step 0 and step 1.
  __device__ __forceinline__ void LoadMore(int step) {
#pragma unroll
    for (int j = kFirst + 3 * step; j < kFirst + 3 * step + 3 && j < kSlots; ++j) Load(j);
  }
  // Waits for what LoadMore gave.
  __device__ __forceinline__ void Settle(int j) {
    for (unsigned looks = 0; !__all_sync(~0u, IsThere(j)) && !GivenUp(p_, looks); ++looks) Load(j);
  }
  // Of place i = kSteps e + step of all steps.
  static __device__ constexpr int GroupOf(int i) { return i / kRows; }
  __device__ __forceinline__ const uint4& Of(int i, int half) const { return in_[i % kSlots][half]; }

 private:
  // Slot j: with eight rows there is one group, which has both shares.
  __device__ __forceinline__ bool Has(int j) const {
    if (kRows == 8 && j >= kSteps) return row_ < p_.norm.rows && j - kSteps < block_.count[kEach - 1];
    return j < count_;
  }
  __device__ __forceinline__ const uint32_t* Mail(int j) const {
    if (kRows == 8 && j >= kSteps)
      return mail_->x + PlaceOf(row_, 2 * block_.first[kEach - 1], block_.lane & 3) +
             PlaceOf(0, 8 * (j - kSteps), 0);
    return from_ + PlaceOf(0, 8 * j, 0);
  }
  const ReduceParams& p_;
  const WholeBlock<S>& block_;
  const IpcMail* const mail_;
  const int row_;
  const uint32_t* from_;
  int first_, count_;  // of the group's share, from its first step on
  uint4 in_[kSlots][2] = {};
};

// Moves the sums from a group's columns to the next one's: kRows on.
template <int kRows, int kHalves>
__device__ __forceinline__ void MoveOn(float (&acc)[4], int from_group) {
  if constexpr (kRows == 1) {
#pragma unroll
    for (int c = 0; c < 2 * kHalves; c += 2) {
      if (from_group % 2 == 0) {
        acc[c + 1] = acc[c];
      } else {
        acc[c] = __shfl_up_sync(~0u, acc[c + 1], 1);
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < 2 * kHalves; ++c) acc[c] = __shfl_up_sync(~0u, acc[c], kRows / 2);
  }
}

template <typename S, int kRows>
__global__ void __launch_bounds__(S::kThreads, 1)
    SumAndMultiplyKernel(const __grid_constant__ StreamParams p, const __grid_constant__ ReduceParams r) {
  using X = Inputs<S, kRows>;
  constexpr int kEach = S::kEach, kOnChip = WholeBlock<S>::kOnChip;
  extern __shared__ uint4 shared[];
  LaunchDependents();
  WholeBlock<S> block(p, shared);
  Reducer reducer(r);
  const bool owner = reducer.IsOwner();
  constexpr int kBefore = S::kHeld / 2;
  if (owner) {
    reducer.Show();
    block.FillRing();
    block.template Hold<0, kBefore>();
  } else {
    block.FillRing(true);
    block.Hold(true);
  }
  if (!owner) WaitForPrevious();
  const uint32_t use = r.peers.local->mails[blockIdx.x] + 1;
  IpcMail* const mail = r.peers.mails + (use & 1);
  X x(r, block, mail);
  if (owner) {
    reducer.Sum(mail);
    block.template Hold<kBefore>();
  }
  uint4* const other = reinterpret_cast<uint4*>(r.peers.mails + (~use & 1));
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < sizeof(IpcMail) / sizeof(uint4);
       i += gridDim.x * blockDim.x) {
    other[i] = make_uint4(kNotThere, kNotThere, kNotThere, kNotThere);
  }
  if (!owner && threadIdx.x == 0) {
    for (unsigned looks = 0; *static_cast<const volatile uint32_t*>(mail->bell) == kNotThere; ++looks) {
      if (GivenUp(r, looks)) break;
    }
  }
  __syncthreads();
  WriteOwn(r.peers.local->mails, gridDim.x, use);

  x.Get();
#pragma unroll
  for (int step = 0; step < kOnChip; ++step) {
    if (step >= block.steps) break;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = e * X::kSteps + step;
      if (i >= X::kFirst && i < X::kSlots) x.Settle(i);
      if (step > 0 && X::GroupOf(i) != X::GroupOf(i - 1))
        MoveOn<kRows, S::kHalves>(block.acc[e], X::GroupOf(i - 1));
    }
    const auto of = [&](int e, int half) -> const uint4& { return x.Of(e * X::kSteps + step, half); };
    if (step < S::kHeld) {
      block.MultiplyHeld(step, of);
    } else {
      block.MultiplyRing(step, step - S::kHeld, of);
      CopyAsyncCommit();
    }
    if (step < 2) x.LoadMore(step);
  }
  block.Finish([&](int e, int c) {
    const int last = e * X::kSteps + max(block.count[e] - 1, 0);
    const unsigned row = 2 * (block.lane & 3) + (c & 1) - X::GroupOf(last) * kRows;
    return row < kRows ? row : static_cast<unsigned>(kWholeRows);
  });
}

using FourShares = WholeShape<2, 1, 3, 4, 1, true>;
using EightShares = WholeShape<1, 2, 3, 1, 1, true>;

struct Plan {
  StreamParams gemm;
  int tiles, slices, rows_each, owners;
};

bool MakePlan(const IpcPeers& peers, const kernels::RmsNormArgs& norm, const kernels::GemmArgs& gemm,
              Plan* plan) {
  constexpr int kSliceValues = kSliceChunks * 2 * 8, kTwoChunksAThread = 2048;
  const int64_t rows = norm.x.rows, n = norm.x.cols;
  // Rows of whole slices: so all of a warp's shares have as many steps too, on which MoveOn relies.
  if (!peers.own_gpu || peers.processors == 0 || !IpcTakesNorm(norm) || rows > kWholeRows ||
      n % kSliceValues != 0 || n <= kTwoChunksAThread || gemm.x.data != norm.out.data ||
      gemm.x.rows != rows || gemm.x.cols != n || gemm.x.stride != norm.out.stride ||
      gemm.w.dtype != kernels::DType::kBF16 || gemm.gated || gemm.w.rows == 0 ||
      (gemm.beside_w.rows > 0 && gemm.beside_w.dtype != kernels::DType::kBF16)) {
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
  const ReduceParams reduce{peers, MakeNormRows(norm), plan.slices, plan.rows_each, plan.owners};
  const auto launch = [&]<typename S>(S) {
    const auto with = [&](auto* kernel) {
      return LaunchAfter(Launch{stream}, kernel, dim3(plan.tiles), dim3(S::kThreads), S::kShared, plan.gemm,
                         reduce);
    };
    if (reduce.norm.rows == 1) return with(SumAndMultiplyKernel<S, 1>);
    if (reduce.norm.rows == 2) return with(SumAndMultiplyKernel<S, 2>);
    return reduce.norm.rows <= 4 ? with(SumAndMultiplyKernel<S, 4>) : with(SumAndMultiplyKernel<S, 8>);
  };
  return plan.gemm.splits == 8 ? launch(EightShares{}) : launch(FourShares{});
}

}  // namespace kdt::cuda
