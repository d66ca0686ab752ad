#include "worker/engine/step_plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kdt/v1/worker.pb.h"

namespace kdt {
namespace {

// Sequences as they will be behind the step's ops: committed length by id.
class AliveView {
 public:
  explicit AliveView(const KvPool& pool) : pool_(pool), count_(pool.stats().sequences) {}

  std::optional<int64_t> Committed(SequenceId id) const {
    const auto found = changed_.find(id);
    if (found != changed_.end()) return found->second;
    if (!pool_.Alive(id)) return std::nullopt;
    return pool_.Committed(id);
  }
  void Add(SequenceId id, int64_t committed) {
    changed_[id] = committed;
    ++count_;
  }
  void Remove(SequenceId id) {
    changed_[id] = std::nullopt;
    --count_;
  }
  int64_t count() const { return count_; }

 private:
  const KvPool& pool_;
  int64_t count_;
  std::unordered_map<SequenceId, std::optional<int64_t>> changed_;
};

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::Status Prefix(const std::string& where, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(where, ".", status.message()));
}

class Planner {
 public:
  Planner(const v1::StepRequest& request, const StepLimits& limits, const KvPool& pool)
      : request_(request), limits_(limits), alive_(pool) {}

  absl::StatusOr<StepPlan> Run() {
    for (int i = 0; i < request_.ops_size(); ++i) {
      KDT_RETURN_IF_ERROR(AddOp(absl::StrCat("ops[", i, "]"), request_.ops(i)));
    }
    for (int i = 0; i < request_.prefill_size(); ++i) {
      KDT_RETURN_IF_ERROR(AddChunk(absl::StrCat("prefill[", i, "]"), request_.prefill(i)));
    }
    for (int i = 0; i < request_.verify_size(); ++i) {
      KDT_RETURN_IF_ERROR(AddTree(absl::StrCat("verify[", i, "]"), request_.verify(i)));
    }
    if (rows_ > limits_.max_rows)
      return Invalid("the step has ", rows_, " rows, the most is ", limits_.max_rows);
    return std::move(plan_);
  }

 private:
  absl::Status AddOp(const std::string& where, const v1::SequenceOp& op) {
    PlannedOp planned;
    if (op.has_create()) {
      planned.kind = PlannedOp::Kind::kCreate;
      KDT_RETURN_IF_ERROR(AddNew(where + ".create", op.create(), 0, &planned));
    } else if (op.has_fork()) {
      const v1::ForkSequence& fork = op.fork();
      planned.kind = PlannedOp::Kind::kFork;
      planned.parent = fork.parent_id();
      planned.length = fork.length();
      const auto committed = alive_.Committed(planned.parent);
      if (!committed)
        return absl::NotFoundError(absl::StrCat(where, ".fork.parent_id: no sequence ", planned.parent));
      if (planned.length < 1 || planned.length > *committed) {
        return absl::OutOfRangeError(absl::StrCat(where, ".fork.length is ", planned.length,
                                                  ", but sequence ", planned.parent, " has ", *committed,
                                                  " committed tokens"));
      }
      KDT_RETURN_IF_ERROR(AddNew(where + ".fork", fork, planned.length, &planned));
    } else if (op.has_free()) {
      planned.kind = PlannedOp::Kind::kFree;
      planned.id = op.free().sequence_id();
      if (!alive_.Committed(planned.id)) {
        return absl::NotFoundError(absl::StrCat(where, ".free.sequence_id: no sequence ", planned.id));
      }
      alive_.Remove(planned.id);
    } else {
      return Invalid(where, ": no op is set");
    }
    plan_.ops.push_back(std::move(planned));
    return absl::OkStatus();
  }

  // What create and fork have in common.
  template <typename Op>
  absl::Status AddNew(const std::string& where, const Op& op, int64_t committed, PlannedOp* planned) {
    planned->id = op.sequence_id();
    // A hint may be too large, but must not make the pool look for more than a sequence can hold.
    planned->expected_tokens = std::min<int64_t>(op.expected_tokens(), limits_.max_context);
    if (alive_.Committed(planned->id))
      return Invalid(where, ".sequence_id: sequence ", planned->id, " is alive");
    if (alive_.count() >= limits_.max_sequences) {
      return absl::ResourceExhaustedError(
          absl::StrCat(where, ": ", limits_.max_sequences, " sequences are alive, which is the most"));
    }
    auto sampling = ParseSamplingState(op.sampling(), limits_.vocab_size, limits_.max_logprobs);
    if (!sampling.ok()) return Prefix(where, sampling.status());
    planned->sampling = *std::move(sampling);
    alive_.Add(planned->id, committed);
    return absl::OkStatus();
  }

  // What chunks and trees have in common.
  template <typename Item>
  absl::Status AddRows(const std::string& where, const Item& item, PlannedSequence* planned) {
    planned->id = item.sequence_id();
    planned->start = item.start();
    planned->draft_top_k = item.draft_top_k();
    const auto committed = alive_.Committed(planned->id);
    if (!committed)
      return absl::NotFoundError(absl::StrCat(where, ".sequence_id: no sequence ", planned->id));
    if (!in_step_.insert(planned->id).second) {
      return Invalid(where, ".sequence_id: sequence ", planned->id, " is already in this step");
    }
    if (planned->start != *committed) {
      return Invalid(where, ".start is ", planned->start, ", but sequence ", planned->id, " has ", *committed,
                     " committed tokens");
    }
    if (item.tokens().empty()) return Invalid(where, ".tokens is empty");
    for (int i = 0; i < item.tokens_size(); ++i) {
      if (item.tokens(i) >= limits_.vocab_size) {
        return Invalid(where, ".tokens[", i, "] is ", item.tokens(i), ", the vocabulary has ",
                       limits_.vocab_size);
      }
    }
    if (planned->draft_top_k > 0 && limits_.max_draft_top_k == 0) {
      return Invalid(where, ".draft_top_k is ", planned->draft_top_k, ", but there is no drafter");
    }
    if (planned->draft_top_k > limits_.max_draft_top_k) {
      return Invalid(where, ".draft_top_k is ", planned->draft_top_k, ", the most is ",
                     limits_.max_draft_top_k);
    }
    planned->tokens.assign(item.tokens().begin(), item.tokens().end());
    rows_ += planned->rows();
    return absl::OkStatus();
  }

  absl::Status CheckContext(const std::string& where, const PlannedSequence& planned, int64_t positions) {
    if (planned.start + positions <= limits_.max_context) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrCat(where, ": positions ", planned.start, " .. ",
                                              planned.start + positions - 1, " pass the context's ",
                                              limits_.max_context));
  }

  absl::Status AddChunk(const std::string& where, const v1::PrefillChunk& chunk) {
    PlannedSequence planned;
    KDT_RETURN_IF_ERROR(AddRows(where, chunk, &planned));
    KDT_RETURN_IF_ERROR(CheckContext(where, planned, planned.rows()));
    planned.sample = chunk.sample();
    planned.prompt_logprobs = chunk.prompt_logprobs();
    if (planned.draft_top_k > 0 && !planned.sample)
      return Invalid(where, ".draft_top_k is set without sample");
    if (planned.prompt_logprobs > limits_.max_logprobs) {
      return Invalid(where, ".prompt_logprobs is ", planned.prompt_logprobs, ", the most is ",
                     limits_.max_logprobs);
    }
    if (planned.prompt_logprobs > 0 && !planned.sample) {
      if (chunk.next_token() >= limits_.vocab_size) {
        return Invalid(where, ".next_token is ", chunk.next_token(), ", the vocabulary has ",
                       limits_.vocab_size);
      }
      planned.next_token = static_cast<int32_t>(chunk.next_token());
    }
    plan_.sequences.push_back(std::move(planned));
    return absl::OkStatus();
  }

  absl::Status AddTree(const std::string& where, const v1::TreeVerify& tree) {
    PlannedSequence planned;
    planned.tree = true;
    if (tree.tokens_size() > limits_.max_tree_nodes) {
      return Invalid(where, ".tokens has ", tree.tokens_size(), " nodes, the most is ",
                     limits_.max_tree_nodes);
    }
    KDT_RETURN_IF_ERROR(AddRows(where, tree, &planned));
    if (tree.parents_size() != tree.tokens_size() - 1) {
      return Invalid(where, ".parents has ", tree.parents_size(), " entries for ", tree.tokens_size(),
                     " nodes");
    }
    planned.parents.push_back(-1);
    planned.depths.push_back(0);
    for (int i = 0; i < tree.parents_size(); ++i) {
      if (tree.parents(i) >= static_cast<uint32_t>(i) + 1) {
        return Invalid(where, ".parents[", i, "] is ", tree.parents(i), ", not a node before node ", i + 1);
      }
      planned.parents.push_back(static_cast<int32_t>(tree.parents(i)));
      planned.depths.push_back(planned.depths[tree.parents(i)] + 1);
    }
    const int32_t deepest = *std::max_element(planned.depths.begin(), planned.depths.end());
    KDT_RETURN_IF_ERROR(CheckContext(where, planned, deepest + 1));
    plan_.sequences.push_back(std::move(planned));
    return absl::OkStatus();
  }

  const v1::StepRequest& request_;
  const StepLimits& limits_;
  AliveView alive_;
  std::unordered_set<SequenceId> in_step_;
  int64_t rows_ = 0;
  StepPlan plan_;
};

}  // namespace

absl::StatusOr<StepPlan> PlanStep(const v1::StepRequest& request, const StepLimits& limits,
                                  const KvPool& pool) {
  return Planner(request, limits, pool).Run();
}

}  // namespace kdt
