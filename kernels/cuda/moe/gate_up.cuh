// Of a Worker: tiles of gate_up, which a team of warps shares, up to the activations.
#pragma once

#include "kernels/cuda/moe/worker.cuh"

namespace kdt::cuda {

// One tile of gate_up; returns the next ticket.
template <Form kForm>
__device__ __forceinline__ unsigned Worker<kForm>::GateTile(unsigned ticket, unsigned seq, int& round) {
  const unsigned end = GateItems(p_, choice());
  const auto [active, tile] = GateCell(p_, ticket);
  const int begin = choice().begin[active], count = choice().begin[active + 1] - begin;
  unsigned next_ticket = 0;
  for (int first = 0; first < count; first += kColumnsAtOnce, ++round) {
    const bool last_pass = first + kColumnsAtOnce >= count;
    // Columns past the last pair repeat it; what they give is not stored.
    const int columns = min(count - first, kColumnsAtOnce);
    const int mine = pairs_[begin + first + min(g_, columns - 1)];
    const bf16* x = p_.x + mine / p_.top_k * p_.x_stride + first_group_ * 32 + 8 * t_;
    float4* const mine_sums = reinterpret_cast<float4*>(shared_.exchange[warp_]) + lane_;
    int group = first_group_, left = kEach * p_.slice_steps;
#pragma unroll 1
    for (int slice = 0; slice < kEach; ++slice) {
      const bool last_slice = slice == kEach - 1;
      float acc[2][4] = {};
      int slice_left = p_.slice_groups;
#pragma unroll 1
      for (int step = p_.slice_steps; step > 0; --step) {
        if (last_pass && left == p_.draw_at && Draws()) DrawTicket(drawn_, p_.state);
        if (last_pass && left == p_.take_at) next_ticket = TakeTicket(seq);
        --left;
        const int groups = GateGroups(group, slice_left);
        group += groups, slice_left -= groups;
        bool more = true;
        Position next = at_.Groups(groups);
        int next_groups = GateGroups(group, step > 1 ? slice_left : p_.slice_groups);
        int next_second = kSlotGroups;
        if (step == 1 && last_slice) {
          if (!last_pass) {
            next = GatePosition(ticket);
            next_groups = GateGroups(first_group_, p_.slice_groups);
          } else if (next_ticket < end) {
            next = GatePosition(next_ticket);
            next_groups = GateGroups(first_group_, p_.slice_groups);
          } else {
            more = NextCell(next);
            next_groups = min(kStep, p_.inner_groups);
            next_second = Second();
          }
        }
        if (kSingle || (kGateRows && columns == 1)) {
          const auto of_group = [&] {
            return *reinterpret_cast<const uint4*>(x + min(g_, kGateStep - 1) * 32);
          };
          RowStep<kGateStep>(acc, of_group, more, next, next_groups, next_second);
        } else {
          Step<kAll ? kGateStep : kStep, false>(acc, x, 0, groups, more, next, next_groups, next_second);
        }
        at_ = next;
        x += groups * 32;
      }
      if (slice == 0 && round > 0) BarrierWait(SharedAddress(&shared_.empty[team_]), (round - 1) & 1);
      if (kMail) {
        LeaveSums(acc, columns, slice);
        continue;
      }
      if (slice > 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float4 before = mine_sums[m * 32];
          acc[m][0] = before.x + acc[m][0], acc[m][1] = before.y + acc[m][1];
          acc[m][2] = before.z + acc[m][2], acc[m][3] = before.w + acc[m][3];
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) mine_sums[m * 32] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    }
    BarrierArrive(SharedAddress(&shared_.full[team_]));
    if (round % kTeamWarps != member_) continue;
    if (kMail) {
      FinishFew(round, tile, begin + first, columns);
    } else {
      FinishGate(round, active, tile, begin + first, columns);
    }
  }
  return next_ticket;
}

// The team's next ticket, which its last warp has drawn.
template <Form kForm>
__device__ __forceinline__ unsigned Worker<kForm>::TakeTicket(unsigned seq) {
  const uint32_t barrier = SharedAddress(&shared_.drawn[team_][seq % kTickets]);
  if (Draws()) {
    const unsigned drawn = drawn_ & ~kPhaseBit;
    ResetAfterLast(p_, choice(), kEach, shared_.phase, drawn);
    shared_.tickets[team_][seq % kTickets] = drawn;
    BarrierArrive(barrier);
  }
  __syncwarp();
  BarrierWait(barrier, seq / kTickets & 1);
  const unsigned next = shared_.tickets[team_][seq % kTickets];
  if (next >= GateItems(p_, choice()) && !kDirect) DrawDown();
  return next;
}

// With kMail a tile has a column or few, and sums lie in the exchange slice by slice, by column, 16 of gate,
// then 16 of up.
template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::LeaveSums(const float (&acc)[2][4], int columns, int slice) {
  static_assert(!kMail || kEach * MailRows(kForm) * 32 <= kSumFloats);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int column = 2 * t_ + odd;
    if (column >= columns) continue;
    float* const to = shared_.exchange[warp_] + slice * (kSumFloats / kEach) + column * 32 + g_;
#pragma unroll
    for (int m = 0; m < 2; ++m) to[m * 16] = acc[m][odd], to[m * 16 + 8] = acc[m][2 + odd];
  }
}

// What FinishGate does, a lane a sum, to the mail.
template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::FinishFew(int round, int tile, int begin, int columns) {
  BarrierWait(SharedAddress(&shared_.full[team_]), round & 1);
  const int inner = static_cast<int>(p_.w.inner);
#pragma unroll 1
  for (int column = 0; column < columns; ++column) {
    float part[kSlices];
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      part[i] = shared_.exchange[team_ * kTeamWarps + i / kEach]
                                [i % kEach * (kSumFloats / kEach) + column * 32 + lane_];
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlices; i += kSlicesEach) sum += part[i] + part[i + 1] + part[i + 2] + part[i + 3];
    sum *= kUnscale;
    const float value = Activation(sum, __shfl_down_sync(~0u, sum, 16));
    if (kSingle) {
      // Every copy, eight lanes each.
      static_assert(kMailCopies * 8 == 32);
      const int two = lane_ % 8;
      const float low = __shfl_sync(~0u, value, 2 * two), high = __shfl_sync(~0u, value, 2 * two + 1);
      PostPair(MailCopy(lane_ / 8), (pairs_[begin + column] * inner + tile * 16) / 2 + two,
               PackBf16(low, high), shared_.launch);
      continue;
    }
    const float next = __shfl_down_sync(~0u, value, 1);
    if (lane_ < 16 && lane_ % 2 == 0) {
      PostPair(Mail(), (pairs_[begin + column] * inner + tile * 16 + lane_) / 2, PackBf16(value, next),
               shared_.launch);
    }
  }
  BarrierArrive(SharedAddress(&shared_.empty[team_]));
}

template <Form kForm>
__device__ __forceinline__ float Worker<kForm>::Activation(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

// One warp of the team adds up and writes the activations.
template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::FinishGate(int round, int active, int tile, int begin,
                                                          int columns) {
  BarrierWait(SharedAddress(&shared_.full[team_]), round & 1);
  const uint32_t from = SharedAddress(shared_.exchange[team_ * kTeamWarps]) + lane_ * 16;
  float sum[2][4] = {}, part[2][4];
  for (int w = 0; w < kTeamWarps; ++w) {
#pragma unroll
    for (int m = 0; m < 2; ++m) LoadSums(part[m], from + (w * 2 + m) * 512);
#pragma unroll
    for (int i = kEach; i < kSlicesEach; ++i) {
      ++w;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float more[4];
        LoadSums(more, from + (w * 2 + m) * 512);
#pragma unroll
        for (int e = 0; e < 4; ++e) part[m][e] += more[e];
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] += part[m][e];
    }
  }
  BarrierArrive(SharedAddress(&shared_.empty[team_]));
  const int inner = static_cast<int>(p_.w.inner);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int column = 2 * t_ + odd;
    float value[2];  // of rows g and g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = sum[0][2 * half + odd] * kUnscale, high = sum[1][2 * half + odd] * kUnscale;
      value[half] = Activation(low, high);
    }
    if (column < columns) {
      bf16* const to = p_.activation + pairs_[begin + column] * inner + tile * 16 + g_;
      to[0] = __float2bfloat16_rn(value[0]);
      to[8] = __float2bfloat16_rn(value[1]);
    }
  }
  __syncwarp();
  if (lane_ == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(Done() + active) : "memory");
}

template <Form kForm>
__device__ __forceinline__ void Worker<kForm>::LoadSums(float (&to)[4], uint32_t from) {
  const float4 v = LoadShared4(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

}  // namespace kdt::cuda
