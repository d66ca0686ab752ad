// The choice of the experts (gemm/choose.cuh) as the first part of moe, up to eight rows: every block makes
// it for itself, because to hand it over would take longer. Here it is cut for few meetings: four or two
// warps a row, up to the list of candidates, which then one of them ranks.
#pragma once

#include "kernels/cuda/gemm/choose.cuh"

namespace kdt::cuda {

inline constexpr int kBlockChoiceRows = 8, kBlockChoiceTopK = 8, kBlockChoiceExperts = kFewExperts;
inline constexpr int kChoiceGroups = 16;      // of experts, whose best ones give the bound
inline constexpr int kChoiceCandidates = 32;  // of a row

// Shared memory of it, needed no more when the list of experts is made.
struct BlockChoice {
  uint4 most[kBlockChoiceRows][kChoiceGroups * 2];  // keys, eight or four of a group
  uint4 best[kBlockChoiceRows * kChoiceWarps][kChoiceGroups / 4];
  uint4 keys[kBlockChoiceRows][kChoiceCandidates / 4];
  uint2 what[kBlockChoiceRows][kChoiceCandidates];  // score, expert
  int32_t ids[kBlockChoiceRows * kBlockChoiceTopK];
};

// A warp's part of the choice for a row, one of the kWarps of that row.
template <int kWarps>
class RowChoice {
  static constexpr int kPerLane = kBlockChoiceExperts / (32 * kWarps), kRoom = kChoiceCandidates / kWarps;

 public:
  __device__ __forceinline__ RowChoice(const ChoiceParams& p, BlockChoice& room, int warp, int lane)
      : p_(p),
        room_(room),
        row_(warp / kWarps),
        member_(warp % kWarps),
        lane_(lane),
        first_(member_ * 32 * kPerLane + lane) {}

  // Constants, before the wait for the kernel in front.
  __device__ __forceinline__ void Prepare() {
    if (row_ >= p_.rows) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) bias_[i] = There(i) ? p_.bias[first_ + 32 * i] : 0.0f;
    if (lane_ < kRoom) Key(member_ * kRoom + lane_) = 0;
  }
  // Behind it.
  __device__ __forceinline__ void Load() {
    if (row_ >= p_.rows) return;
    const float* const scores = p_.scores + row_ * p_.experts;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score_[i] = There(i) ? __ldcg(scores + first_ + 32 * i) : 0.0f;
    real_ = p_.row_count == nullptr || row_ < *p_.row_count;
  }
  // room.ids: complete where the row's first warp has been here.
  __device__ __forceinline__ void Choose() {
    if (!real_) {
      if (row_ < p_.rows && member_ == 0 && lane_ < p_.top_k) room_.ids[row_ * p_.top_k + lane_] = -1;
      Meet();
      Meet();
      return;
    }
    const uint32_t bound = Bound();
    unsigned all[kPerLane];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      all[i] = __ballot_sync(~0u, key_[i] >= bound);
      count += __popc(all[i]);
    }
    if (count > kRoom) KeepBest(all);
    int at = member_ * kRoom;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (all[i] >> lane_ & 1) {
        const int to = at + __popc(all[i] & Below());
        Key(to) = key_[i];
        room_.what[row_][to] = make_uint2(__float_as_uint(score_[i]), first_ + 32 * i);
      }
      at += __popc(all[i]);
    }
    Meet();
    if (member_ == 0) Rank();
  }
  // Weights of the row's pairs, to the block's, and with `publish` all for others. room is needed no more.
  __device__ __forceinline__ void Finish(float* weights, bool publish) {
    if (row_ >= p_.rows || member_ != 0) return;
    if (!real_) {
      if (lane_ < p_.top_k) Give(weights, publish, lane_, -1, 0.0f);
      return;
    }
    if (mine_) weights[row_ * p_.top_k + place_] = chosen_;
    __syncwarp();
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kBlockChoiceTopK; ++k) {
      if (k < p_.top_k) sum += weights[row_ * p_.top_k + k];
    }
    __syncwarp();
    if (mine_) Give(weights, publish, place_, expert_, ChoiceWeight(p_, chosen_, sum));
  }

 private:
  __device__ __forceinline__ bool There(int i) const { return first_ + 32 * i < p_.experts; }
  // The warps of a row, also of one that is not there: tools that check for races count each warp's barriers.
  __device__ __forceinline__ void Meet() const { NamedBarrier(1 + row_, kWarps * 32); }
  __device__ __forceinline__ unsigned Below() const { return (1u << lane_) - 1; }
  __device__ __forceinline__ uint32_t& Key(int at) const {
    return reinterpret_cast<uint32_t*>(room_.keys[row_])[at];
  }
  // The best top_k experts of the row are no worse than the top_k-th best of the best of the groups.
  __device__ __forceinline__ uint32_t Bound() {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_[i] = Sigmoid(score_[i]);
      key_[i] = There(i) ? OrderedKey(score_[i] + bias_[i]) : 0;
      most = max(most, key_[i]);
    }
    const int group = lane_ % kChoiceGroups;
    reinterpret_cast<uint32_t*>(room_.most[row_])[group * 2 * kWarps + member_ * 2 + lane_ / kChoiceGroups] =
        most;
    Meet();
#pragma unroll
    for (int i = 0; i < kWarps / 2; ++i) {
      const uint4 v = room_.most[row_][group * (kWarps / 2) + i];
      most = max(max(most, max(v.x, v.y)), max(v.z, v.w));
    }
    uint4* const best = room_.best[row_ * kWarps + member_];
    if (lane_ < kChoiceGroups) reinterpret_cast<uint32_t*>(best)[lane_] = most;
    __syncwarp();
    int as_good = 0;
#pragma unroll
    for (int i = 0; i < kChoiceGroups / 4; ++i) as_good += AtLeast(best[i], most);
    return max(1u, __reduce_max_sync(~0u, as_good >= p_.top_k ? most : 0u));
  }
  // Many are equal, or many of the best lie together. Of a warp's experts its best top_k are enough, one
  // after the other: the largest key, the lowest expert among equals.
  __device__ __forceinline__ void KeepBest(unsigned (&all)[kPerLane]) {
    unsigned taken = 0;
#pragma unroll 1
    for (int k = 0; k < p_.top_k; ++k) {
      uint32_t most = 0;
      int at = kPerLane;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if ((taken >> i & 1) == 0 && key_[i] > most) most = key_[i], at = i;
      }
      const uint32_t best = __reduce_max_sync(~0u, most);
      const unsigned expert = most == best ? static_cast<unsigned>(first_ + 32 * at) : ~0u;
      if (expert == __reduce_min_sync(~0u, expert) && best > 0) taken |= 1u << at;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) all[i] = __ballot_sync(~0u, taken >> i & 1);
  }
  // The row's candidates, a lane each, rise by expert.
  __device__ __forceinline__ void Rank() {
    const uint32_t key = Key(lane_);
    const uint2 what = room_.what[row_][lane_];
    int rank = 0;
#pragma unroll
    for (int i = 0; i < kChoiceCandidates / 4; ++i) {
      const uint4 four = room_.keys[row_][i];
      rank += (four.x > key) + (four.y > key) + (four.z > key) + (four.w > key);
    }
    mine_ = key > 0 && rank < p_.top_k;
    unsigned all = __ballot_sync(~0u, mine_);
    if (__popc(all) > p_.top_k) {  // the last ones are equal
      const int last = static_cast<int>(__reduce_max_sync(~0u, mine_ ? static_cast<unsigned>(rank) : 0u));
      const unsigned equal = __ballot_sync(~0u, mine_ && rank == last);
      mine_ = mine_ && (rank < last || __popc(all & ~equal) + __popc(equal & Below()) < p_.top_k);
      all = __ballot_sync(~0u, mine_);
    }
    place_ = __popc(all & Below());
    chosen_ = __uint_as_float(what.x);
    expert_ = static_cast<int>(what.y);
    if (mine_) room_.ids[row_ * p_.top_k + place_] = expert_;
  }
  __device__ __forceinline__ void Give(float* weights, bool publish, int place, int expert, float weight) {
    const int pair = row_ * p_.top_k + place;
    weights[pair] = weight;
    if (publish) p_.ids[pair] = expert, p_.weights[pair] = weight;
  }

  const ChoiceParams& p_;
  BlockChoice& room_;
  const int row_, member_, lane_, first_;
  bool real_ = false, mine_ = false;  // mine: the lane has one of the row's experts
  int place_ = 0, expert_ = 0;
  float chosen_ = 0.0f;
  float bias_[kPerLane], score_[kPerLane];
  uint32_t key_[kPerLane];
};

}  // namespace kdt::cuda
