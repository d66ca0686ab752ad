// Products of few rows (the kernels that gemm.cu chooses among) for the ops that are built on them.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {

// `heads` products side by side: head h takes x, W and y moved by h times the steps. With `gated`, x is
// [rows, 2 in] and silu(gate) * up stands for it.
struct SkinnyGemm {
  kernels::Tensor x;  // bf16 [rows, in]
  const bf16* w;      // [outs, in], a row every w_stride
  int64_t outs, w_stride;
  kernels::Tensor y;  // bf16 or float32
  int64_t heads = 1, x_head = 0, w_head = 0, y_head = 0;
  bool accumulate = false, gated = false;
  // A second matrix with the same inputs (one head): beside_y = x beside^T. No rows: none. With beside_gated
  // it is gate and up, half of its rows each (a multiple of 8), and beside_y = silu(gate) * up in bf16, by
  // fours (Fits looks at that).
  kernels::Tensor beside, beside_y;
  bool beside_gated = false;
};

// y = x w^T of whole matrices, w in bf16.
inline SkinnyGemm MakeSkinny(const kernels::Tensor& x, const kernels::Tensor& w, const kernels::Tensor& y) {
  SkinnyGemm gemm;
  gemm.x = x;
  gemm.w = Data<bf16>(w);
  gemm.outs = w.rows;
  gemm.w_stride = w.stride;
  gemm.y = y;
  return gemm;
}

SkinnyGemm MakeSkinny(const kernels::GemmArgs& args);

inline constexpr int kSkinnyRows = 64;  // more rows are another kernel's, where there is a choice

inline bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether shapes and alignment are what the kernel takes: inputs a multiple of 32, everything in 16-byte
// steps.
bool Fits(const SkinnyGemm& gemm);
cudaError_t RunSkinny(const Launch& launch, const SkinnyGemm& gemm);

// The same, not gated, and beside it, in blocks of their own, the choice of experts (at most kChoiceExperts)
// from scores that an earlier launch wrote.
struct ChoiceParams;
cudaError_t RunSkinnyAndChoose(const Launch& launch, const SkinnyGemm& gemm, const ChoiceParams& choice);

}  // namespace kdt::cuda
