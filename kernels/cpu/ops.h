// The ops of the CPU backend, one file each. Contracts: kdt/kernels/OP.h.
#pragma once

#include "kdt/kernels/backend.h"
#include "kernels/cpu/context.h"

namespace kdt::kernels::cpu {

void Embedding(Context& context, const EmbeddingArgs& args);
void RmsNorm(Context& context, const RmsNormArgs& args);
void Add(Context& context, const AddArgs& args);
void Rope(Context& context, const RopeArgs& args);
void Gemm(Context& context, const GemmArgs& args);
void SiluMul(Context& context, const SiluMulArgs& args);
void MlaPrepare(Context& context, const MlaPrepareArgs& args);
void AbsorbQuery(Context& context, const AbsorbQueryArgs& args);
void AbsorbValue(Context& context, const AbsorbValueArgs& args);
void KvWrite(Context& context, const KvWriteArgs& args);
void KvMove(Context& context, const KvMoveArgs& args);
void TableWrite(Context& context, const TableWriteArgs& args);
void VerifyAttention(Context& context, const VerifyAttentionArgs& args);
void Compare(Context& context, const CompareArgs& args);
void DraftPrepare(Context& context, const DraftPrepareArgs& args);
void DraftAttention(Context& context, const DraftAttentionArgs& args);
void Router(Context& context, const RouterArgs& args);
void ChooseExperts(Context& context, const MoeChoice& choice, int64_t top_k);
void Moe(Context& context, const MoeArgs& args);
void LogitsTopK(Context& context, const LogitsTopKArgs& args);
void ScaleRows(Context& context, const ScaleRowsArgs& args);
void GumbelArgmax(Context& context, const GumbelArgmaxArgs& args);
void TreeWalk(Context& context, const TreeWalkArgs& args);

}  // namespace kdt::kernels::cpu
