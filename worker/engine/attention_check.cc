#include "worker/engine/attention_check.h"

#include "common/status.h"

namespace kdt {

using kernels::Buffer;
using kernels::CompareStats;

absl::StatusOr<std::unique_ptr<AttentionCheck>> AttentionCheck::Create(kernels::Backend* backend,
                                                                       AttentionMode mode, int64_t every,
                                                                       int64_t max_rows, int64_t width) {
  KDT_CHECK(every > 0);
  std::unique_ptr<AttentionCheck> check(new AttentionCheck(backend, mode, every));
  if (mode != AttentionMode::kValidate) return check;
  const int64_t size = kernels::DTypeSize(backend->activation_dtype());
  KDT_ASSIGN_OR_RETURN(check->reference_, Buffer::Make(*backend, max_rows * width * size));
  KDT_ASSIGN_OR_RETURN(check->stats_, Buffer::Make(*backend, sizeof(CompareStats)));
  KDT_ASSIGN_OR_RETURN(void* const copied, backend->AllocateHost(sizeof(CompareStats)));
  check->copied_ = static_cast<CompareStats*>(copied);
  return check;
}

AttentionCheck::~AttentionCheck() {
  if (copied_ != nullptr) backend_->FreeHost(copied_);
}

bool AttentionCheck::BeginStep(uint64_t step) {
  comparing_ = mode_ == AttentionMode::kValidate && step % static_cast<uint64_t>(every_) == 0;
  return comparing_;
}

absl::Status AttentionCheck::Run(const kernels::VerifyAttentionArgs& args) {
  if (mode_ == AttentionMode::kReference) return backend_->VerifyAttentionReference(args);
  KDT_RETURN_IF_ERROR(backend_->VerifyAttention(args));
  if (!comparing_) return absl::OkStatus();
  kernels::VerifyAttentionArgs plain = args;
  plain.out = kernels::MakeTensor(reference_.data(), args.out.dtype, args.out.rows, args.out.cols);
  KDT_RETURN_IF_ERROR(backend_->VerifyAttentionReference(plain));
  // Rows behind the last sequence's are padding and hold whatever was there.
  return backend_->Compare({args.out, plain.out, args.row_begin + args.sequences, stats_.as<CompareStats>()});
}

absl::Status AttentionCheck::EndStep() {
  if (!comparing_) return absl::OkStatus();
  comparing_ = false;
  return backend_->DownloadAsync(copied_, stats_.data(), sizeof(CompareStats));
}

AttentionErrors AttentionCheck::errors() const {
  if (copied_ == nullptr) return {};
  return {copied_->values, copied_->beyond_one, copied_->beyond_one_of_row, copied_->largest,
          copied_->largest_of_row};
}

}  // namespace kdt
