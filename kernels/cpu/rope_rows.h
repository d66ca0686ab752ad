// One row's rotation, shared by the ops that rotate, so that they agree in every bit.
#pragma once

#include <cstdint>

#include "kdt/kernels/rope.h"

namespace kdt::kernels::cpu {

// cos and sin, [half] each, of a position's angles, multiplied by attention_factor.
void RopeTable(int32_t position, const float* inv_freq, int64_t half, float attention_factor, float* cos,
               float* sin);

// Rotates the `half` pairs of one vector; to may be from.
void RotatePairs(const float* from, const float* cos, const float* sin, int64_t half, RopeLayout layout,
                 float* to);

}  // namespace kdt::kernels::cpu
