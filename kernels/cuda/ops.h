// The ops of the CUDA backend, one file each: they queue their kernels on a stream and return the launch's
// error. Contracts: kdt/kernels/OP.h. None of them allocates, synchronises or reads device data on the host,
// so all of them can be captured into a graph.
#pragma once

#include <cuda_runtime_api.h>

#include "kdt/kernels/compare.h"
#include "kdt/kernels/draft_attention.h"
#include "kdt/kernels/draft_prepare.h"
#include "kdt/kernels/embedding.h"
#include "kdt/kernels/gemm.h"
#include "kdt/kernels/kv_move.h"
#include "kdt/kernels/kv_write.h"
#include "kdt/kernels/logits.h"
#include "kdt/kernels/mla_absorb.h"
#include "kdt/kernels/mla_prepare.h"
#include "kdt/kernels/mla_query.h"
#include "kdt/kernels/moe.h"
#include "kdt/kernels/rms_norm.h"
#include "kdt/kernels/rope.h"
#include "kdt/kernels/router.h"
#include "kdt/kernels/table_write.h"
#include "kdt/kernels/tree_walk.h"
#include "kdt/kernels/verify_attention.h"

namespace kdt::cuda {

// What an op runs with. The workspace is shared by all ops of a stream: none needs it beyond its own kernels.
struct Launch {
  cudaStream_t stream;
  int processors;  // multiprocessors of the device
  void* workspace;
  size_t workspace_bytes;
  unsigned* counters;  // kCounters zeros; every op leaves them zero
};
inline constexpr int kCounters = 16384;
// Behind the counters: what the experts' kernel keeps from launch to launch (zeros at the start): two words,
// for each of two phases 1024 + 2, and activations on their way from block to block, two words each pair of
// them.
inline constexpr int kMoePhaseWords = 1024 + 2, kMoeMailWords = 2 * 8192;
inline constexpr int kMoeState = 4 + 2 * kMoePhaseWords + kMoeMailWords;
// Behind that, what MlaQuery keeps: how many blocks have read the number of the last launch, that number,
// each in a line of its own, and q on its way from block to block (of 32 rows of 64 heads) in whole lines.
inline constexpr int kQueryReaders = 0, kQueryNumber = 32;
inline constexpr int kQueryFront = 64 - (kCounters + kMoeState) % 32;
inline constexpr int kQueryMailWords = 32 * 64 * 192, kQueryState = kQueryFront + kQueryMailWords;
static_assert((kCounters + kMoeState) % 4 == 0);  // mail is read 16 bytes at a time
inline constexpr int kAllCounters = kCounters + kMoeState + kQueryState;

cudaError_t Embedding(const Launch& launch, const kernels::EmbeddingArgs& args);
cudaError_t RmsNorm(const Launch& launch, const kernels::RmsNormArgs& args);
cudaError_t Add(const Launch& launch, const kernels::AddArgs& args);
cudaError_t Rope(const Launch& launch, const kernels::RopeArgs& args);
cudaError_t Gemm(const Launch& launch, const kernels::GemmArgs& args);
cudaError_t SiluMul(const Launch& launch, const kernels::SiluMulArgs& args);
cudaError_t MlaPrepare(const Launch& launch, const kernels::MlaPrepareArgs& args);
cudaError_t MlaQuery(const Launch& launch, const kernels::MlaQueryArgs& args);
cudaError_t AbsorbQuery(const Launch& launch, const kernels::AbsorbQueryArgs& args);
cudaError_t AbsorbValue(const Launch& launch, const kernels::AbsorbValueArgs& args);
cudaError_t KvWrite(const Launch& launch, const kernels::KvWriteArgs& args);
cudaError_t KvMove(const Launch& launch, const kernels::KvMoveArgs& args);
cudaError_t TableWrite(const Launch& launch, const kernels::TableWriteArgs& args);
cudaError_t VerifyAttention(const Launch& launch, const kernels::VerifyAttentionArgs& args);
cudaError_t VerifyAttentionReference(const Launch& launch, const kernels::VerifyAttentionArgs& args);
cudaError_t Compare(const Launch& launch, const kernels::CompareArgs& args);
cudaError_t DraftPrepare(const Launch& launch, const kernels::DraftPrepareArgs& args);
cudaError_t DraftAttention(const Launch& launch, const kernels::DraftAttentionArgs& args);
cudaError_t Router(const Launch& launch, const kernels::RouterArgs& args);
// The choice by itself, in one launch with a product `beside` where that fits (no rows of its w: none).
cudaError_t ChooseExperts(const Launch& launch, const kernels::MoeChoice& choice, int64_t top_k,
                          const kernels::GemmArgs& beside);
cudaError_t Moe(const Launch& launch, const kernels::MoeArgs& args);
// In place and once, when the weights have come: the order Moe reads them in (moe/int4.cuh). Uses the
// workspace.
cudaError_t OrderExperts(const Launch& launch, const kernels::Int4Experts& weights);
cudaError_t LogitsTopK(const Launch& launch, const kernels::LogitsTopKArgs& args);
cudaError_t ScaleRows(const Launch& launch, const kernels::ScaleRowsArgs& args);
cudaError_t GumbelArgmax(const Launch& launch, const kernels::GumbelArgmaxArgs& args);
cudaError_t TreeWalk(const Launch& launch, const kernels::TreeWalkArgs& args);

// Either of the two is page-locked memory of the host. Above kCopiedByKernel, or unaligned: by a copy engine.
cudaError_t CopyPinned(const Launch& launch, void* to, const void* from, size_t bytes);
inline constexpr size_t kCopiedByKernel = 128 * 1024;

// Bytes of workspace of the op whose need grows fastest with the rows.
size_t MoeWorkspace(int64_t rows, int64_t top_k, int64_t inner, int64_t hidden);

}  // namespace kdt::cuda
