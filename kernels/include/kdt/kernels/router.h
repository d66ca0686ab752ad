// DeepSeek-V3 routing ("noaux_tc" with one group): scores = sigmoid(x W^T) in float32; the top_k experts by
// scores + bias; weights = their scores without the bias, normalised to sum 1 (+1e-20) when `normalize`,
// times `scale`. The engine has the scores made by Gemm and the choice by Moe (MoeChoice); this op is both in
// one, by which these are tested, and takes float32 weights too. Ties go to the lower expert index. Experts
// of a row are listed by rising index, so that sums over experts have one order.
#pragma once

#include "kdt/kernels/tensor.h"

namespace kdt::kernels {

inline constexpr int kMaxExpertsPerToken = 32;

struct RouterArgs {
  Tensor x;           // [rows, hidden]
  Tensor w;           // bf16 or f32 [experts, hidden]
  const float* bias;  // [experts]
  int64_t top_k;      // 1 .. kMaxExpertsPerToken
  bool normalize;
  float scale;
  int32_t* expert_ids;  // [rows, top_k]
  float* weights;       // [rows, top_k]
  // One value in the backend's memory: rows from there on are padding and get expert ids -1 with weight 0, so
  // that they cost no expert. nullptr: no padding.
  const int32_t* row_count = nullptr;
  // The shared experts of the same rows, in the same pass: Gemm (gate and up, side by side), SiluMul and
  // Gemm. No rows of shared_gate_up: none.
  Tensor shared_gate_up;  // bf16 [2 inner, hidden]
  Tensor shared_down;     // bf16 [out, inner]
  Tensor shared_inner;    // activation dtype [rows, 2 inner or more]: room for what is between; its contents
                          // then are anything
  Tensor shared_y;        // activation dtype or f32 [rows, out]
};

}  // namespace kdt::kernels
