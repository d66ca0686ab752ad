// Of a Worker: tiles of down, where each warp is on its own, and the sum over experts where the block takes
// it.
#pragma once

#include "kernels/cuda/moe/worker.cuh"

namespace kdt::cuda {

template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::DrawDown() {
  if (lane_ == 0) DrawTicket(drawn_, Done() + kDownTicket);
}

// What the warp does next in down, and where that begins; false at the end.
template <Form kForm>
__device__ __forceinline__ bool Worker<kForm>::NextCell(Position& at) {
  Cell next;
  if (kDirect) {
    int item = state().item, expert = state().expert;
    __syncwarp();
    if (expert < choice().active && item < p_.down_tiles) {
      const bool pair = kPairs && item + static_cast<int>(gridDim.x) < p_.down_tiles;
      next = {expert, item, pair ? 2 : 1};
      expert += kTileTeam;
      if (expert >= choice().active) {
        item += static_cast<int>(gridDim.x) * kDirectTeams;
        expert = warp_ % kTileTeam;
      }
      if (lane_ == 0) state().item = item, state().expert = expert;
    }
  } else {
    const int ticket = static_cast<int>(__shfl_sync(~0u, drawn_, 0));
    next.active = ticket / runs().each;
    next.tile = ticket % runs().each * runs().tiles;
    next.tiles = next.active < choice().active ? min(runs().tiles, p_.down_tiles - next.tile) : 0;
  }
  __syncwarp();
  if (lane_ == 0) state().next = next;
  __syncwarp();
  if (next.tiles == 0) return false;
  at = DownPosition(next);
  return true;
}

template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::Down() {
  const int inner = static_cast<int>(p_.w.inner);
  const int steps = (p_.inner_groups + kStep - 1) / kStep;
  if (kDirect) __syncthreads();  // the exchange becomes the products
  int item = kPairs ? static_cast<int>(blockIdx.x) : FirstTile(warp_);
  for (;;) {
    if (state().next.tiles == 0 || (kDirect && state().next.tile != item)) {
      if (!kDirect || item >= p_.down_tiles) break;
      SumExperts(item);
      item += static_cast<int>(gridDim.x) * kDirectTeams;
      continue;
    }
    const Cell cell = state().next;
    const int begin = choice().begin[cell.active], count = choice().begin[cell.active + 1] - begin;
    if (!kDirect) DrawDown();
    if (!kMail) WaitForExpert(cell.active, count);
    for (int first = 0; first < count; first += kColumnsAtOnce) {
      const bool last_pass = first + kColumnsAtOnce >= count;
      const int left = min(count - first, kColumnsAtOnce);
      const int mine = pairs_[begin + first + min(g_, left - 1)];
      const bf16* const inputs = p_.activation + mine * inner + 8 * t_;
      int to[2];  // where the lane's two columns go
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int column = 2 * t_ + odd;
        to[odd] = column < left ? ProductAt(pairs_[begin + first + column]) : -1;
      }
      const auto store = [&](float* products, const float(&acc)[2][4]) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (to[odd] < 0) continue;
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            products[to[odd] + 16 * m] = acc[m][odd] * kUnscale;
            products[to[odd] + 16 * m + 8] = acc[m][2 + odd] * kUnscale;
          }
        }
      };
      // A single row, of one step, with one way to L2.
      const bool row = kSingle || (kMail && left == 1 && p_.inner_groups == kStep);
      if (kPairs && cell.tiles == 2) {
        float acc[2][2][4] = {};
        const bf16* x = inputs;
        int mail = (mine * inner + 8 * t_) / 2;
        if (row) {
          FetchRow(mine);
          mail = kRow;
        }
#pragma unroll 1
        for (int part = steps * kStep / kSlotGroups; part > 0; --part) {
          Position next = at_.Groups(kSlotGroups);
          int next_second = Apart();
          bool more = true;
          if (part == 1) {
            more = NextCell(next);
            next_second = Second();
          }
          PairStep(acc, x, mail, more, next, next_second);
          at_ = next;
          x += kSlotGroups * 32;
          if (mail == kRow) {
            row_ += kSlotGroups * 64;
          } else {
            mail += kSlotGroups * 16;
          }
        }
        store(Products(0) + g_, acc[0]);
        store(Products(1) + g_, acc[1]);
        break;
      }
#pragma unroll 1
      for (int tile = 0; tile < cell.tiles; ++tile) {
        float acc[2][4] = {};
        const bf16* x = inputs;
        int mail = (mine * inner + (kDownRows && row ? 0 : 8 * t_)) / 2;
        if (!kDownRows && row) {
          FetchRow(mine);
          mail = kRow;
        }
        int groups_left = p_.inner_groups;
#pragma unroll 1
        for (int step = steps; step > 0; --step) {
          const int groups = kAll ? kStep : min(kStep, groups_left);
          groups_left -= groups;
          Position next = at_.Groups(groups);
          const int next_groups = kAll ? kStep : min(kStep, step > 1 ? groups_left : p_.inner_groups);
          int next_second = kSlotGroups;
          bool more = true;
          if (step == 1 && tile == cell.tiles - 1) {
            if (!last_pass) {
              next = DownPosition(cell);
            } else {
              more = NextCell(next);
              next_second = Second();
            }
          }
          if (kDownRows && row) {
            const auto of_group = [&] {
              return ReadMailGroups<kSingle>(kSingle ? MailCopy(blockIdx.x % kMailCopies) : Mail(), mail,
                                             shared_.launch, lane_);
            };
            RowStep<kStep>(acc, of_group, more, next, next_groups, next_second);
          } else {
            Step<kStep, kMail>(acc, x, mail, groups, more, next, next_groups, next_second);
          }
          at_ = next;
          x += kStep * 32;
          if (mail != kRow) mail += kStep * 16;
        }
        store(kDirect ? Products(kPairs ? 0 : warp_ / kDirectTeam) + g_
                      : p_.product + (cell.tile + tile) * kTileRows + g_,
              acc);
      }
      if (kPairs) break;
    }
  }
}

template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::WaitForExpert(int active, int rows) {
  if (active == ready_) return;
  const unsigned target =
      static_cast<unsigned>(p_.gate_tiles * ((rows + kColumnsAtOnce - 1) / kColumnsAtOnce));
  while (LoadAcquireDevice(Done() + active) < target) {
  }
  ready_ = active;
  __syncwarp();
}

// Products of either of two tiles of down, by pair. With kMail half of the exchange is for FetchRow, and
// a row of it has the products of four pairs.
template <Form kForm>
__device__ __forceinline__ float* Worker<kForm>::Products(int team) const {
  return kMail ? shared_.exchange[team * (kMailPairs / 4)] : shared_.products[team];
}

template <Form kForm>
__device__ __forceinline__ int Worker<kForm>::ProductAt(int pair) const {
  if (kMail) return pair / 4 * kSumFloats + pair % 4 * kTileRows;
  return pair * (kDirect ? kTileRows : static_cast<int>(p_.w.hidden));
}

// With kMail: the activations of a pair.
template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::FetchRow(int pair) {
  float* const row = shared_.exchange[warp_] + kSumFloats / 2;
  row_ = SharedAddress(row);
  ReadMailRow(row, Mail(), pair, shared_.launch, lane_);
  __syncwarp();
}

template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::StoreOut(int64_t at, float value) const {
  if (p_.out_is_float) {
    static_cast<float*>(p_.out)[at] = value;
  } else {
    static_cast<bf16*>(p_.out)[at] = FromFloat<bf16>(value);
  }
}

// The warps of a kTileTeam make all products of a tile, or of this and the one it is paired with; then each
// kDirectTeam sums a tile, a warp a row, a lane a column.
template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::SumExperts(int first_tile) {
  const int tile = first_tile + (kPairs ? static_cast<int>(gridDim.x) * (warp_ / kDirectTeam) : 0);
  const int row = tile < p_.down_tiles ? warp_ % kDirectTeam : kDirectTeam, column = tile * kTileRows + lane_;
  const int barrier = kPairs ? 1 : 1 + warp_ / kDirectTeam;
  const float* const from = Products(warp_ / kDirectTeam) + lane_;
  float sum = 0.0f, before = 0.0f;
  const int64_t at = row * p_.out_stride + column;
  if (p_.shared_pieces > 0) {
    if (row < p_.rows) before = few_.shared_out[warp_ / kDirectTeam][row][lane_];
  } else if (p_.accumulate && row < p_.rows) {
    before = p_.out_is_float ? static_cast<float*>(p_.out)[at] : ToFloat(static_cast<bf16*>(p_.out)[at]);
  }
  NamedBarrier(barrier, kTileTeam * 32);
  if (row < p_.rows) {
    // Without a branch, so that several products are read at once.
    const unsigned long long held = choice().held >> (row * p_.top_k);
#pragma unroll 4
    for (int k = 0; k < p_.top_k; ++k) {
      const int pair = row * p_.top_k + k;
      const float with = fmaf(choice().weights[pair], from[ProductAt(pair)], sum);
      if (held >> k & 1) sum = with;
    }
    if (p_.accumulate) sum = before + sum;
    StoreOut(at, sum);
  }
  NamedBarrier(barrier, kTileTeam * 32);  // the products have been read
}

}  // namespace kdt::cuda
