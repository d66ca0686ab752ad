// A backend for what needs one and runs nothing on it: every op is an UNIMPLEMENTED error.
#pragma once

#include <string>

#include "kdt/kernels/backend.h"

namespace kdt::testing {

class IdleBackend : public kernels::Backend {
 public:
  std::string name() const override { return "idle"; }
  std::string device_name() const override { return "none"; }
  kernels::DeviceFacts facts() const override { return {}; }
  kernels::DType activation_dtype() const override { return kernels::DType::kF32; }
  absl::StatusOr<void*> Allocate(size_t) override { return None("Allocate"); }
  void Free(void*) override {}
  absl::Status Upload(void*, const void*, size_t) override { return None("Upload"); }
  absl::Status Download(void*, const void*, size_t) override { return None("Download"); }
  absl::Status Synchronize() override { return absl::OkStatus(); }

#define KDT_IDLE_OP(op) \
  absl::Status op(const kernels::op##Args&) override { return None(#op); }
  KDT_IDLE_OP(Embedding)
  KDT_IDLE_OP(RmsNorm)
  KDT_IDLE_OP(Add)
  KDT_IDLE_OP(Rope)
  KDT_IDLE_OP(Gemm)
  KDT_IDLE_OP(SiluMul)
  KDT_IDLE_OP(MlaPrepare)
  KDT_IDLE_OP(AbsorbQuery)
  KDT_IDLE_OP(AbsorbValue)
  KDT_IDLE_OP(KvWrite)
  KDT_IDLE_OP(KvMove)
  KDT_IDLE_OP(TableWrite)
  KDT_IDLE_OP(VerifyAttention)
  KDT_IDLE_OP(Compare)
  KDT_IDLE_OP(DraftPrepare)
  KDT_IDLE_OP(DraftAttention)
  KDT_IDLE_OP(Router)
  KDT_IDLE_OP(Moe)
  KDT_IDLE_OP(LogitsTopK)
  KDT_IDLE_OP(ScaleRows)
  KDT_IDLE_OP(GumbelArgmax)
  KDT_IDLE_OP(TreeWalk)
#undef KDT_IDLE_OP
  absl::Status VerifyAttentionReference(const kernels::VerifyAttentionArgs&) override {
    return None("VerifyAttentionReference");
  }

 private:
  static absl::Status None(const char* op) { return absl::UnimplementedError(op); }
};

}  // namespace kdt::testing
