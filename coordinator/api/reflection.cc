#include "coordinator/api/reflection.h"

#include <grpc/grpc.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

namespace kdt {
namespace {

using grpc::experimental::InterceptionHookPoints;

constexpr char kReflectionPrefix[] = "/grpc.reflection.";

class NoPlugins : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

// The handlers of reflection are gRPC's own, so a call without a key is ended in front of them.
class KeyGuard : public grpc::experimental::Interceptor {
 public:
  KeyGuard(grpc::experimental::ServerRpcInfo* info, std::shared_ptr<const ApiKeys> keys)
      : info_(info), keys_(std::move(keys)) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      const auto* metadata = methods->GetRecvInitialMetadata();
      const auto header = metadata->find("authorization");
      const absl::Status status = keys_->CheckHeader(
          header == metadata->end() ? absl::string_view()
                                    : absl::string_view(header->second.data(), header->second.size()));
      if (!status.ok()) {
        // ServerContext::TryCancel would say CANCELLED.
        grpc_call_cancel_with_status(info_->server_context()->c_call(), GRPC_STATUS_UNAUTHENTICATED,
                                     std::string(status.message()).c_str(), nullptr);
      }
    }
    methods->Proceed();
  }

 private:
  grpc::experimental::ServerRpcInfo* const info_;
  const std::shared_ptr<const ApiKeys> keys_;
};

class KeyGuardFactory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit KeyGuardFactory(std::shared_ptr<const ApiKeys> keys) : keys_(std::move(keys)) {}
  // No guard for other methods: a null is left out of the call's interceptors.
  grpc::experimental::Interceptor* CreateServerInterceptor(grpc::experimental::ServerRpcInfo* info) override {
    if (!absl::StartsWith(info->method(), kReflectionPrefix)) return nullptr;
    return new KeyGuard(info, keys_);
  }

 private:
  const std::shared_ptr<const ApiKeys> keys_;
};

}  // namespace

void GuardReflection(grpc::ServerBuilder* builder, std::shared_ptr<const ApiKeys> keys) {
  if (keys == nullptr) return;
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<KeyGuardFactory>(std::move(keys)));
  builder->experimental().SetInterceptorCreators(std::move(factories));
}

void LeaveOutReflection(grpc::ServerBuilder* builder) { builder->SetOption(std::make_unique<NoPlugins>()); }

}  // namespace kdt
