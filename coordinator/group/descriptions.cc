#include "coordinator/group/descriptions.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

// What must be the same on all ranks, as two of them tell it.
template <typename Value>
absl::Status Same(const char* what, const Value& mine, const Value& zero) {
  if (mine == zero) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", mine, ", that of rank 0 is ", zero));
}

absl::Status CheckPlace(const v1::DescribeResponse& rank, size_t index, size_t tp) {
  if (rank.rank() != index) {
    return absl::InvalidArgumentError(absl::StrCat("the worker at this address is rank ", rank.rank()));
  }
  if (rank.tp() != tp) {
    return absl::InvalidArgumentError(
        absl::StrCat("the worker was started for tp ", rank.tp(), ", the group has ", tp));
  }
  if (rank.max_rows() == 0 || rank.max_sequences() == 0 || rank.kv_slots_total() == 0 ||
      rank.max_tree_nodes() == 0) {
    return absl::InvalidArgumentError(
        "max_rows, max_tree_nodes, max_sequences and kv_slots_total must not be 0");
  }
  return absl::OkStatus();
}

absl::Status CheckAlike(const v1::DescribeResponse& rank, const v1::DescribeResponse& zero) {
  if (rank.checkpoint_digest() != zero.checkpoint_digest()) {
    return absl::InvalidArgumentError("its checkpoint is not that of rank 0 (checkpoint_digest differs)");
  }
  KDT_RETURN_IF_ERROR(Same("backend", rank.backend(), zero.backend()));
  // Kernels and collectives are laid out for one number of multiprocessors and one instruction set, and all
  // ranks wait for the slowest.
  if (rank.backend() == "cuda") {
    KDT_RETURN_IF_ERROR(Same("its GPU", rank.device(), zero.device()));
    KDT_RETURN_IF_ERROR(Same("its GPU's architecture", rank.arch(), zero.arch()));
  }
  KDT_RETURN_IF_ERROR(Same("kv_dtype", rank.kv_dtype(), zero.kv_dtype()));
  KDT_RETURN_IF_ERROR(Same("kv_slots_total", rank.kv_slots_total(), zero.kv_slots_total()));
  KDT_RETURN_IF_ERROR(Same("max_rows", rank.max_rows(), zero.max_rows()));
  KDT_RETURN_IF_ERROR(Same("max_tree_nodes", rank.max_tree_nodes(), zero.max_tree_nodes()));
  KDT_RETURN_IF_ERROR(Same("max_sequences", rank.max_sequences(), zero.max_sequences()));
  KDT_RETURN_IF_ERROR(Same("draft_block_size", rank.draft_block_size(), zero.draft_block_size()));
  KDT_RETURN_IF_ERROR(Same("max_context", rank.max_context(), zero.max_context()));
  return Same("max_draft_top_k", rank.max_draft_top_k(), zero.max_draft_top_k());
}

}  // namespace

absl::StatusOr<GroupLimits> CheckDescriptions(const std::vector<v1::DescribeResponse>& ranks) {
  const v1::DescribeResponse& zero = ranks.front();
  for (size_t i = 0; i < ranks.size(); ++i) {
    absl::Status status = CheckPlace(ranks[i], i, ranks.size());
    if (status.ok()) status = CheckAlike(ranks[i], zero);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat("rank ", i, ": ", status.message()));
  }
  GroupLimits limits;
  limits.kv_slots = zero.kv_slots_total();
  limits.max_rows = zero.max_rows();
  limits.max_tree_nodes = zero.max_tree_nodes();
  limits.max_sequences = zero.max_sequences();
  limits.max_context = zero.max_context();
  limits.draft_block_size = zero.draft_block_size();
  limits.max_draft_top_k = zero.max_draft_top_k();
  limits.checkpoint_digest = zero.checkpoint_digest();
  return limits;
}

}  // namespace kdt
