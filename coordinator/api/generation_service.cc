#include "coordinator/api/generation_service.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/utf8.h"
#include "coordinator/api/client_text.h"
#include "coordinator/api/response_queue.h"

namespace kdt {
namespace {

constexpr char kRetryAfterKey[] = "retry-after-ms";
constexpr int kRetryAfterMs = 500;

// One Generate call. gRPC owns it until OnDone.
class GenerateCall : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  GenerateCall(grpc::CallbackServerContext* context, Scheduler* scheduler)
      : context_(context), scheduler_(scheduler), queue_(std::make_shared<ResponseQueue>(this)) {}

  void Begin(const absl::StatusOr<RequestSpec>& spec) {
    if (!spec.ok()) {
      scheduler_->metrics().Rejected(spec.status());
      return queue_->End(spec.status());
    }
    auto id = scheduler_->Submit(*spec, queue_);
    if (id.ok()) {
      std::unique_lock lock(mutex_);
      id_ = *id;
      const bool cancelled = cancelled_;
      lock.unlock();
      if (cancelled) Cancel(*id);
      return;
    }
    scheduler_->metrics().Rejected(id.status());
    if (absl::IsResourceExhausted(id.status())) {
      context_->AddTrailingMetadata(kRetryAfterKey, std::to_string(kRetryAfterMs));
    }
    queue_->End(id.status());
  }

  void OnWriteDone(bool ok) override { queue_->OnWritten(ok); }

  void OnCancel() override {
    std::unique_lock lock(mutex_);
    cancelled_ = true;
    const std::optional<uint64_t> id = id_;
    lock.unlock();
    if (id.has_value()) Cancel(*id);
  }

  void OnDone() override {
    queue_->Detach();
    delete this;
  }

 private:
  void Cancel(uint64_t id) {
    const bool late = std::chrono::system_clock::now() >= context_->deadline();
    scheduler_->Cancel(id, late ? absl::DeadlineExceededError("the call's deadline passed")
                                : absl::CancelledError("the client cancelled"));
  }

  grpc::CallbackServerContext* const context_;
  Scheduler* const scheduler_;
  const std::shared_ptr<ResponseQueue> queue_;
  std::mutex mutex_;
  std::optional<uint64_t> id_;
  bool cancelled_ = false;
};

}  // namespace

GenerationService::GenerationService(std::shared_ptr<const ServedModel> model, Group* group,
                                     Scheduler* scheduler, std::shared_ptr<const ApiKeys> keys)
    : model_(std::move(model)), group_(group), scheduler_(scheduler), keys_(std::move(keys)) {}

absl::Status GenerationService::Authorize(const grpc::CallbackServerContext& context) const {
  return keys_ == nullptr ? absl::OkStatus() : keys_->Check(context);
}

grpc::ServerUnaryReactor* GenerationService::Answer(grpc::CallbackServerContext* context,
                                                    absl::FunctionRef<absl::Status()> answer) const {
  auto* reactor = context->DefaultReactor();
  const absl::Status allowed = Authorize(*context);
  reactor->Finish(ToGrpc(allowed.ok() ? answer() : allowed));
  return reactor;
}

RequestLimits GenerationService::Limits() const {
  const GroupLimits group = group_->limits();
  RequestLimits limits;
  uint64_t context = static_cast<uint64_t>(model_->config.max_position_embeddings);
  if (group.max_context > 0) context = std::min<uint64_t>(context, group.max_context);
  // One sequence must always fit the pool alone, or it could never be finished.
  if (group.kv_slots > 0) context = std::min<uint64_t>(context, group.kv_slots);
  limits.max_context = static_cast<uint32_t>(context);
  limits.max_samples = group.max_sequences;
  limits.max_budget = group.max_tree_nodes == 0 ? 0 : group.max_tree_nodes - 1;
  return limits;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GenerationService::Generate(grpc::CallbackServerContext* context,
                                                                        const grpc::ByteBuffer* bytes) {
  auto* call = new GenerateCall(context, scheduler_);
  const auto check = [&]() -> absl::StatusOr<RequestSpec> {
    KDT_RETURN_IF_ERROR(Authorize(*context));
    if (group_->state() != GroupState::kServing)
      return absl::UnavailableError("no model is being served right now");
    v1::GenerateRequest request;
    KDT_RETURN_IF_ERROR(ParseMessage(*bytes, &request));
    return CheckRequest(request, *model_, Limits());
  };
  call->Begin(check());
  return call;
}

absl::Status GenerationService::DoTokenize(const grpc::ByteBuffer& bytes, grpc::ByteBuffer* out) const {
  v1::TokenizeRequest request;
  KDT_RETURN_IF_ERROR(ParseMessage(bytes, &request));
  v1::TokenizeResponse response;
  if (request.has_chat()) {
    if (!request.text().empty()) return absl::InvalidArgumentError("text: not together with chat");
    if (!model_->chat.has_value())
      return absl::FailedPreconditionError("chat: this model has no chat format");
    KDT_ASSIGN_OR_RETURN(const RenderedChat rendered,
                         model_->chat->Render(request.chat(), request.add_generation_prompt()));
    response.mutable_ids()->Add(rendered.ids.begin(), rendered.ids.end());
    response.set_rendered(rendered.text);
  } else {
    auto ids = model_->tokenizer->Encode(request.text(), request.parse_special());
    if (!ids.ok()) return absl::InvalidArgumentError(absl::StrCat("text: ", ids.status().message()));
    response.mutable_ids()->Add(ids->begin(), ids->end());
  }
  *out = ToBytes(response);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* GenerationService::Tokenize(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* bytes,
                                                      grpc::ByteBuffer* response) {
  return Answer(context, [&] { return DoTokenize(*bytes, response); });
}

absl::Status GenerationService::DoDetokenize(const grpc::ByteBuffer& bytes, grpc::ByteBuffer* out) const {
  v1::DetokenizeRequest request;
  KDT_RETURN_IF_ERROR(ParseMessage(bytes, &request));
  const std::vector<uint32_t> ids(request.ids().begin(), request.ids().end());
  auto text = model_->tokenizer->Decode(ids, request.skip_special_tokens());
  if (!text.ok()) return absl::Status(text.status().code(), absl::StrCat("ids: ", text.status().message()));
  v1::DetokenizeResponse response;
  response.set_text(*std::move(text));
  *out = ToBytes(response);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* GenerationService::Detokenize(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* bytes,
                                                        grpc::ByteBuffer* response) {
  return Answer(context, [&] { return DoDetokenize(*bytes, response); });
}

grpc::ServerUnaryReactor* GenerationService::GetModelInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetModelInfoRequest*,
                                                          v1::ModelInfo* response) {
  return Answer(context, [&] {
    const ModelConfig& config = model_->config;
    const GroupLimits limits = group_->limits();
    response->set_name(model_->name);
    response->set_model_type(config.model_type);
    response->set_vocab_size(static_cast<uint32_t>(config.vocab_size));
    response->set_max_context(Limits().max_context);
    response->set_layers(static_cast<uint32_t>(config.num_hidden_layers));
    response->set_draft_block_size(limits.draft_block_size);
    response->set_checkpoint_digest(limits.checkpoint_digest);
    for (const int64_t id : config.eos_token_ids) response->add_stop_token_ids(static_cast<uint32_t>(id));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* GenerationService::GetClusterInfo(grpc::CallbackServerContext* context,
                                                            const v1::GetClusterInfoRequest*,
                                                            v1::ClusterInfo* response) {
  return Answer(context, [&] {
    response->set_epoch(group_->epoch());
    response->set_serving(group_->state() == GroupState::kServing);
    response->set_running(scheduler_->running());
    response->set_held(scheduler_->held());
    response->set_waiting(scheduler_->waiting());
    // Addresses and what ranks say of their failures (paths, devices) stay on this host.
    const bool on_this_host = IsLocalPeer(context->peer());
    if (on_this_host && !response->serving()) response->set_reason(Utf8Text(group_->reason()));
    for (const RankStatus& rank : group_->Ranks()) {
      v1::RankInfo* out = response->add_ranks();
      out->set_rank(rank.rank);
      if (on_this_host) {
        out->set_address(rank.address);
        out->set_last_error(Utf8Text(rank.last_error));
      }
      out->set_backend(rank.backend);
      out->set_device(rank.device);
      out->set_up(rank.up);
      out->set_kv_slots_total(rank.kv_slots_total);
      out->set_kv_slots_used(rank.kv_slots_used);
      out->set_kv_fragmentation(rank.kv_fragmentation);
      out->set_steps(rank.steps);
      out->set_busy_ratio(rank.busy_ratio);
    }
    return absl::OkStatus();
  });
}

}  // namespace kdt
