// kdt.v1.Generation: the public API over the scheduler.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "coordinator/api/api_keys.h"
#include "coordinator/api/request_check.h"
#include "coordinator/group/group.h"
#include "coordinator/scheduler/scheduler.h"
#include "kdt/v1/generation.grpc.pb.h"

namespace kdt {

// Calls with fields take raw bytes, so that text which is not UTF-8 is refused by name and bytes that are no
// message with INVALID_ARGUMENT (gRPC itself would answer UNIMPLEMENTED).
using GenerationServiceBase =
    v1::Generation::WithRawCallbackMethod_Generate<v1::Generation::WithRawCallbackMethod_Tokenize<
        v1::Generation::WithRawCallbackMethod_Detokenize<v1::Generation::WithCallbackMethod_GetModelInfo<
            v1::Generation::WithCallbackMethod_GetClusterInfo<v1::Generation::Service>>>>>;

class GenerationService final : public GenerationServiceBase {
 public:
  // With `keys`, every call needs one; null: none does.
  GenerationService(std::shared_ptr<const ServedModel> model, Group* group, Scheduler* scheduler,
                    std::shared_ptr<const ApiKeys> keys = nullptr);

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* bytes) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest* request,
                                         v1::ModelInfo* response) override;
  grpc::ServerUnaryReactor* GetClusterInfo(grpc::CallbackServerContext* context,
                                           const v1::GetClusterInfoRequest* request,
                                           v1::ClusterInfo* response) override;

 private:
  absl::Status Authorize(const grpc::CallbackServerContext& context) const;
  // Ends the call with what `answer` says, if its caller may make it.
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                   absl::FunctionRef<absl::Status()> answer) const;
  RequestLimits Limits() const;
  absl::Status DoTokenize(const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response) const;
  absl::Status DoDetokenize(const grpc::ByteBuffer& bytes, grpc::ByteBuffer* response) const;

  const std::shared_ptr<const ServedModel> model_;
  Group* const group_;
  Scheduler* const scheduler_;
  const std::shared_ptr<const ApiKeys> keys_;
};

}  // namespace kdt
