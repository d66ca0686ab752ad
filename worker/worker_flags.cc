#include "worker/worker_flags.h"

#include <cstdint>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/flags.h"
#include "common/group_security.h"
#include "common/status.h"

ABSL_FLAG(std::string, model, "", "folder of the target checkpoint");
ABSL_FLAG(std::string, drafter, "", "folder of the DFlash drafter; empty: none");
ABSL_FLAG(int64_t, draft_window, 0, "context positions the drafter sees, counted from the end; 0: all");
ABSL_FLAG(double, draft_rope_factor, 0, "drafter's rope attention factor; 0: what its config says");
ABSL_FLAG(int, rank, 0, "this worker's rank, 0 .. tp - 1");
ABSL_FLAG(int, tp, 1, "tensor-parallel size");
ABSL_FLAG(std::string, backend, "cpu", "device to run on");
ABSL_FLAG(int, device, -1, "GPU to run on (cuda only); -1: the rank modulo the number of GPUs");
ABSL_FLAG(
    std::string, collective, "auto",
    "how ranks sum: auto; shm (cpu); ipc or nccl (cuda), where auto takes the faster one for each size");
ABSL_FLAG(int, threads, 1, "compute threads (cpu only)");
ABSL_FLAG(std::string, listen, "127.0.0.1:0",
          "HOST:PORT or unix:PATH of the coordinator's side; port 0 takes a free one");
ABSL_FLAG(int, metrics_port, -1, "Prometheus port; 0 takes a free one; -1: none");
ABSL_FLAG(std::string, metrics_host, "127.0.0.1", "address that the Prometheus port is bound to");
ABSL_FLAG(std::string, kv_dtype, "",
          "type of KV rows: f32 or bf16; empty: that of the backend's activations");
ABSL_FLAG(int64_t, kv_slots, 0, "KV slots; 0: as many as fit kv_bytes");
ABSL_FLAG(int64_t, kv_bytes, int64_t{1} << 30, "bytes for the KV pools of target and drafter");
ABSL_FLAG(int64_t, max_rows, 1024, "most rows a step");
ABSL_FLAG(int64_t, max_context, 0, "longest sequence; 0: the model's limit");
ABSL_FLAG(int64_t, max_sequences, 256, "most sequences alive at once");
ABSL_FLAG(int64_t, max_tree_nodes, 256, "most nodes a tree, root included");
ABSL_FLAG(std::string, moe, "tensor",
          "routed experts: tensor (each rank has a slice of every expert) or expert (whole experts)");
ABSL_FLAG(std::string, attention, "fast",
          "fast; reference: the slow and plain kernel; validate: fast, and compared with the reference on a "
          "sample of steps. The cpu's kernel is its own reference");
ABSL_FLAG(
    bool, strict, false,
    "a step that allocates, frees or copies pageable memory behind the start fails, with the call named "
    "(cuda only)");
ABSL_FLAG(int64_t, validate_every, 64, "with --attention=validate: compare every so many steps");

namespace kdt {
namespace {

absl::Status CheckFlagsApply() {
  const bool cpu = absl::GetFlag(FLAGS_backend) == "cpu";
  const bool drafts = !absl::GetFlag(FLAGS_drafter).empty();
  const bool validates = absl::GetFlag(FLAGS_attention) == "validate";
  struct Need {
    const char* flag;
    bool met;
    const char* what;
  };
  for (const auto& [flag, met, what] :
       {Need{"strict", !cpu, "without --backend=cuda"}, Need{"device", !cpu, "without --backend=cuda"},
        Need{"threads", cpu, "without --backend=cpu"}, Need{"draft_window", drafts, "without --drafter"},
        Need{"draft_rope_factor", drafts, "without --drafter"},
        Need{"validate_every", validates, "without --attention=validate"}}) {
    if (!met && FlagIsSet(flag)) return FlagDoesNothing(flag, what);
  }
  return absl::OkStatus();
}

absl::Status CheckRanges(const EngineOptions& options) {
  const auto check = [](absl::string_view flag, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": ", value, " is not in ", least, "..", most));
  };
  for (const absl::Status& status :
       {check("tp", options.tp, 1, 64), check("rank", options.rank, 0, options.tp - 1),
        check("threads", absl::GetFlag(FLAGS_threads), 1, 1024),
        check("device", absl::GetFlag(FLAGS_device), -1, 1023),
        check("kv_slots", options.kv_slots, 0, INT32_MAX - 1),
        check("kv_bytes", options.kv_bytes, 1 << 16, int64_t{1} << 46),
        check("max_rows", options.max_rows, 1, 65536),
        check("max_context", options.max_context, 0, int64_t{1} << 24),
        check("max_sequences", options.max_sequences, 1, 65536),
        check("max_tree_nodes", options.max_tree_nodes, 1, 4096),
        check("validate_every", options.validate_every, 1, int64_t{1} << 32),
        check("metrics_port", absl::GetFlag(FLAGS_metrics_port), -1, 65535)}) {
    if (!status.ok()) return status;
  }
  // One token of prompt and one of answer.
  for (const auto& [flag, value] :
       {std::pair{"kv_slots", options.kv_slots}, std::pair{"max_context", options.max_context}}) {
    if (value == 1)
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": 1 is too little for an answer"));
  }
  return absl::OkStatus();
}

absl::StatusOr<AttentionMode> AttentionFromFlag() {
  const std::string attention = absl::GetFlag(FLAGS_attention);
  if (attention == "fast") return AttentionMode::kFast;
  if (attention == "reference") return AttentionMode::kReference;
  if (attention == "validate") return AttentionMode::kValidate;
  return absl::InvalidArgumentError(
      absl::StrCat("--attention: \"", attention, "\" is none of fast, reference and validate"));
}

absl::StatusOr<MoeSharding> MoeFromFlag() {
  const std::string moe = absl::GetFlag(FLAGS_moe);
  if (moe == "tensor") return MoeSharding::kTensor;
  if (moe == "expert") return MoeSharding::kExpert;
  return absl::InvalidArgumentError(absl::StrCat("--moe: \"", moe, "\" is neither tensor nor expert"));
}

absl::StatusOr<EngineOptions> EngineOptionsFromFlags() {
  EngineOptions options;
  options.model_dir = absl::GetFlag(FLAGS_model);
  options.drafter_dir = absl::GetFlag(FLAGS_drafter);
  options.rank = absl::GetFlag(FLAGS_rank);
  options.tp = absl::GetFlag(FLAGS_tp);
  options.kv_slots = absl::GetFlag(FLAGS_kv_slots);
  options.kv_bytes = absl::GetFlag(FLAGS_kv_bytes);
  options.max_rows = absl::GetFlag(FLAGS_max_rows);
  options.max_context = absl::GetFlag(FLAGS_max_context);
  options.max_sequences = absl::GetFlag(FLAGS_max_sequences);
  options.max_tree_nodes = absl::GetFlag(FLAGS_max_tree_nodes);
  options.draft_window = absl::GetFlag(FLAGS_draft_window);
  options.draft_rope_factor = static_cast<float>(absl::GetFlag(FLAGS_draft_rope_factor));
  options.validate_every = absl::GetFlag(FLAGS_validate_every);
  options.strict = absl::GetFlag(FLAGS_strict);
  if (options.model_dir.empty()) return absl::InvalidArgumentError("--model is required");
  KDT_ASSIGN_OR_RETURN(options.attention, AttentionFromFlag());
  KDT_ASSIGN_OR_RETURN(options.moe_sharding, MoeFromFlag());
  KDT_RETURN_IF_ERROR(CheckRanges(options));
  return options;
}

absl::StatusOr<std::optional<kernels::DType>> KvTypeFromFlag() {
  const std::string type = absl::GetFlag(FLAGS_kv_dtype);
  if (type.empty()) return std::nullopt;
  if (type == "f32") return kernels::DType::kF32;
  if (type == "bf16") return kernels::DType::kBF16;
  return absl::InvalidArgumentError(absl::StrCat("--kv_dtype: \"", type, "\" is neither f32 nor bf16"));
}

}  // namespace

absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags() {
  WorkerOptions options;
  KDT_ASSIGN_OR_RETURN(options.engine, EngineOptionsFromFlags());
  KDT_ASSIGN_OR_RETURN(options.kv_dtype, KvTypeFromFlag());
  KDT_RETURN_IF_ERROR(CheckFlagsApply());
  KDT_ASSIGN_OR_RETURN(options.listen, ParseAddress(absl::GetFlag(FLAGS_listen), "--listen"));
  KDT_ASSIGN_OR_RETURN(options.tls, GroupTlsFromFlags());
  KDT_RETURN_IF_ERROR(
      CheckGroupAddress(options.listen, "--listen", options.tls.has_value(), InsecureGroupAllowed()));
  options.backend = absl::GetFlag(FLAGS_backend);
  KDT_ASSIGN_OR_RETURN(options.collective,
                       ParseCollectiveKind(absl::GetFlag(FLAGS_collective), options.backend));
  options.backend_options = {absl::GetFlag(FLAGS_threads), absl::GetFlag(FLAGS_device), options.engine.rank};
  options.has_metrics = absl::GetFlag(FLAGS_metrics_port) >= 0;
  options.metrics = {absl::GetFlag(FLAGS_metrics_host), absl::GetFlag(FLAGS_metrics_port), ""};
  return options;
}

}  // namespace kdt
