// Lets tests look at values inside a step. Without an observer none of this costs anything.
#pragma once

#include <cstdint>

#include "kdt/kernels/tensor.h"

namespace kdt {

class EngineObserver {
 public:
  virtual ~EngineObserver() = default;

  // The residual stream [rows, hidden] behind layer `layer`; -1: the embedding. Valid during the call.
  virtual void OnLayerOutput(int64_t /*layer*/, const kernels::Tensor& /*residual*/) {}
  // This rank's logits, f32 [rows, vocab_local], of the rows that need them, before sampling changes them.
  virtual void OnLogits(const kernels::Tensor& /*logits*/) {}
  // The drafter's logits, f32 [sequences * (block_size - 1), vocab_local].
  virtual void OnDraftLogits(const kernels::Tensor& /*logits*/) {}
};

}  // namespace kdt
