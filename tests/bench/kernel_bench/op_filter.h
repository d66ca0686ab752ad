// A backend in front of another one that numbers the ops of a pass, says what each is, and leaves out those
// it is told to: what an op costs inside a graph is the graph's time with it less the time without it.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"

namespace kdt::bench {

struct OpFacts {
  std::string name;
  double bytes = 0;  // of weights and KV, each once
  double flop = 0;
};

class OpFilter final : public kernels::Backend {
 public:
  explicit OpFilter(kernels::Backend& base) : base_(base) {}

  // Starts a pass. Ops for which `wanted` (by their number in the pass) is false do nothing; `recording`
  // fills ops() (and reads the chosen experts back, so it is not for a pass that is captured).
  void Begin(std::function<bool(int)> wanted, bool recording = false) {
    wanted_ = std::move(wanted);
    recording_ = recording;
    next_ = 0;
    if (recording) ops_.clear();
  }
  const std::vector<OpFacts>& ops() const { return ops_; }

  std::string name() const override { return base_.name(); }
  std::string device_name() const override { return base_.device_name(); }
  kernels::DeviceFacts facts() const override { return base_.facts(); }
  kernels::DType activation_dtype() const override { return base_.activation_dtype(); }
  absl::StatusOr<void*> Allocate(size_t bytes) override { return base_.Allocate(bytes); }
  void Free(void* data) override { base_.Free(data); }
  absl::Status Upload(void* device, const void* host, size_t bytes) override {
    return base_.Upload(device, host, bytes);
  }
  absl::Status Download(void* host, const void* device, size_t bytes) override {
    return base_.Download(host, device, bytes);
  }
  absl::Status Synchronize() override { return base_.Synchronize(); }
  void* stream() const override { return base_.stream(); }

  absl::Status Embedding(const kernels::EmbeddingArgs& args) override {
    return Do([&] { return OpFacts{"embedding"}; }, [&] { return base_.Embedding(args); });
  }
  absl::Status RmsNorm(const kernels::RmsNormArgs& args) override {
    return Do([&] { return OpFacts{absl::StrCat("rms_norm ", args.x.cols)}; },
              [&] { return base_.RmsNorm(args); });
  }
  absl::Status Add(const kernels::AddArgs& args) override {
    return Do([&] { return OpFacts{"add"}; }, [&] { return base_.Add(args); });
  }
  absl::Status Rope(const kernels::RopeArgs& args) override {
    return Do([&] { return OpFacts{absl::StrCat("rope of ", args.heads)}; },
              [&] { return base_.Rope(args); });
  }
  absl::Status Gemm(const kernels::GemmArgs& args) override {
    return Do(
        [&] {
          const double weights = Elements(args.w) + Elements(args.beside_w);
          return OpFacts{absl::StrCat("gemm ", args.w.rows + args.beside_w.rows, "x", args.w.cols),
                         2.0 * weights, 2.0 * weights * static_cast<double>(args.x.rows)};
        },
        [&] { return base_.Gemm(args); });
  }
  absl::Status SiluMul(const kernels::SiluMulArgs& args) override {
    return Do([&] { return OpFacts{"silu_mul"}; }, [&] { return base_.SiluMul(args); });
  }
  absl::Status MlaPrepare(const kernels::MlaPrepareArgs& args) override {
    return Do([&] { return OpFacts{"mla_prepare"}; }, [&] { return base_.MlaPrepare(args); });
  }
  absl::Status MlaQuery(const kernels::MlaQueryArgs& args) override {
    return Do(
        [&] {
          const kernels::AbsorbQueryArgs& absorb = args.absorb;
          return OpFacts{"mla_query",
                         2.0 * (Elements(args.w_q_b) + absorb.heads * absorb.nope * absorb.latent),
                         2.0 * static_cast<double>(absorb.q.rows) *
                             (Elements(args.w_q_b) + absorb.heads * absorb.nope * absorb.latent)};
        },
        [&] { return base_.MlaQuery(args); });
  }
  absl::Status AbsorbQuery(const kernels::AbsorbQueryArgs& args) override {
    return Do(
        [&] {
          return OpFacts{"absorb_query", 2.0 * args.heads * args.nope * args.latent};
        },
        [&] { return base_.AbsorbQuery(args); });
  }
  absl::Status AbsorbValue(const kernels::AbsorbValueArgs& args) override {
    return Do(
        [&] {
          return OpFacts{"absorb_value", 2.0 * args.heads * args.v * args.latent};
        },
        [&] { return base_.AbsorbValue(args); });
  }
  absl::Status KvWrite(const kernels::KvWriteArgs& args) override {
    return Do([&] { return OpFacts{"kv_write"}; }, [&] { return base_.KvWrite(args); });
  }
  absl::Status ScaleRows(const kernels::ScaleRowsArgs& args) override {
    return Do([&] { return OpFacts{"scale_rows"}; }, [&] { return base_.ScaleRows(args); });
  }
  absl::Status TableWrite(const kernels::TableWriteArgs& args) override {
    return Do([&] { return OpFacts{"table_write"}; }, [&] { return base_.TableWrite(args); });
  }
  absl::Status KvMove(const kernels::KvMoveArgs& args) override {
    return Do([&] { return OpFacts{"kv_move"}; }, [&] { return base_.KvMove(args); });
  }
  // The context is the table's width less the rows: that is how the benchmark makes its one sequence.
  absl::Status VerifyAttention(const kernels::VerifyAttentionArgs& args) override {
    return Do(
        [&] {
          const double keys = static_cast<double>(args.table_stride);
          return OpFacts{"verify_attention", keys * 2.0 * (args.latent + args.rope),
                         keys * args.q.rows * args.heads * 2.0 * (2 * args.latent + args.rope)};
        },
        [&] { return base_.VerifyAttention(args); });
  }
  absl::Status VerifyAttentionReference(const kernels::VerifyAttentionArgs& args) override {
    return Do([&] { return OpFacts{"verify_attention_reference"}; },
              [&] { return base_.VerifyAttentionReference(args); });
  }
  absl::Status Compare(const kernels::CompareArgs& args) override {
    return Do([&] { return OpFacts{"compare"}; }, [&] { return base_.Compare(args); });
  }
  absl::Status DraftPrepare(const kernels::DraftPrepareArgs& args) override {
    return Do([&] { return OpFacts{"draft_prepare"}; }, [&] { return base_.DraftPrepare(args); });
  }
  absl::Status DraftAttention(const kernels::DraftAttentionArgs& args) override {
    return Do([&] { return OpFacts{"draft_attention"}; }, [&] { return base_.DraftAttention(args); });
  }
  absl::Status Router(const kernels::RouterArgs& args) override {
    return Do(
        [&] {
          return OpFacts{"router, shared experts", 2.0 * (Elements(args.w) + Elements(args.shared_gate_up) +
                                                          Elements(args.shared_down))};
        },
        [&] { return base_.Router(args); });
  }
  absl::Status Moe(const kernels::MoeArgs& args) override {
    return Do(
        [&] {
          std::vector<int32_t> ids(args.x.rows * args.top_k);
          (void)base_.Download(ids.data(), args.choice.expert_ids, ids.size() * sizeof(int32_t));
          const double expert = 3.0 * args.weights.hidden * args.weights.inner * (0.5 + 2.0 / 32);
          const size_t distinct = std::set<int32_t>(ids.begin(), ids.end()).size();
          return OpFacts{"choice, shared, moe",
                         static_cast<double>(distinct) * expert + 2.0 * Elements(args.shared_down)};
        },
        [&] { return MoeAsRecorded(args); });
  }
  absl::Status LogitsTopK(const kernels::LogitsTopKArgs& args) override {
    return Do([&] { return OpFacts{"logits_top_k"}; }, [&] { return base_.LogitsTopK(args); });
  }
  absl::Status GumbelArgmax(const kernels::GumbelArgmaxArgs& args) override {
    return Do([&] { return OpFacts{"gumbel_argmax"}; }, [&] { return base_.GumbelArgmax(args); });
  }
  absl::Status TreeWalk(const kernels::TreeWalkArgs& args) override {
    return Do([&] { return OpFacts{"tree_walk"}; }, [&] { return base_.TreeWalk(args); });
  }

 private:
  // Without another op the scores would be others, and with the number of chosen experts moe's time would
  // change: moe takes the scores of the recorded pass.
  absl::Status MoeAsRecorded(kernels::MoeArgs args) {
    kernels::Buffer& scores = scores_[next_ - 1];
    kernels::Tensor& given = args.choice.scores;
    if (recording_) {
      KDT_ASSIGN_OR_RETURN(scores, Copy(given.data, given.rows * given.stride * sizeof(float)));
    }
    given.data = scores.data();
    return base_.Moe(args);
  }
  absl::StatusOr<kernels::Buffer> Copy(const void* from, size_t bytes) {
    std::vector<std::byte> host(bytes);
    KDT_RETURN_IF_ERROR(base_.Synchronize());
    KDT_RETURN_IF_ERROR(base_.Download(host.data(), from, bytes));
    KDT_ASSIGN_OR_RETURN(kernels::Buffer to, kernels::Buffer::Make(base_, bytes));
    KDT_RETURN_IF_ERROR(base_.Upload(to.data(), host.data(), bytes));
    return to;
  }
  static double Elements(const kernels::Tensor& t) { return static_cast<double>(t.rows * t.cols); }
  template <typename Facts, typename Run>
  absl::Status Do(Facts facts, Run run) {
    const int number = next_++;
    const absl::Status status = wanted_(number) ? run() : absl::OkStatus();
    if (recording_) ops_.push_back(facts());
    return status;
  }

  kernels::Backend& base_;
  std::function<bool(int)> wanted_ = [](int) { return true; };
  bool recording_ = false;
  int next_ = 0;
  std::map<int, kernels::Buffer> scores_;  // by the op's number
  std::vector<OpFacts> ops_;
};

}  // namespace kdt::bench
