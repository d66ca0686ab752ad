#include "coordinator/api/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "coordinator/api/reflection.h"

namespace kdt {
namespace {

constexpr char kServiceName[] = "kdt.v1.Generation";
constexpr char kLiveName[] = "live";
// A request is mostly its prompt: up to five bytes a token id, or a few bytes a token as text; the rest is
// small.
constexpr int64_t kBytesPerToken = 16;
constexpr int64_t kOtherBytes = 4 << 20;
constexpr int64_t kMaxBytes = 256 << 20;
constexpr int kMinPingIntervalMs = 10'000;
constexpr int kMaxHealthBytes = 4096;  // a request holds a service's name

// Binds; UNAVAILABLE names the address. `bound` gets the actual port.
absl::StatusOr<std::unique_ptr<grpc::Server>> Bind(grpc::ServerBuilder* builder, const Address& listen,
                                                   std::shared_ptr<grpc::ServerCredentials> credentials,
                                                   Address* bound) {
  int port = 0;
  builder->AddListeningPort(listen.ToString(), std::move(credentials), &port);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second server on the port is an error
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  if (server == nullptr || (port == 0 && !listen.is_unix())) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen.ToString()));
  }
  *bound = listen;
  if (!listen.is_unix()) bound->port = port;
  return server;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ApiServer>> ApiServer::Start(const Address& listen,
                                                            std::shared_ptr<const ServedModel> model,
                                                            Group* group, Scheduler* scheduler,
                                                            const ApiSecurity& security) {
  std::unique_ptr<ApiServer> api(new ApiServer);
  const int64_t max_bytes =
      std::min(kMaxBytes, kOtherBytes + kBytesPerToken * model->config.max_position_embeddings);
  api->service_ = std::make_unique<GenerationService>(std::move(model), group, scheduler, security.keys);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  GuardReflection(&builder, security.keys);
  builder.RegisterService(api->service_.get());
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxBytes));
  // A client waiting through a long prefill may ping; that is no reason to send it away.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  auto credentials = security.credentials;
  if (credentials == nullptr) credentials = grpc::InsecureServerCredentials();
  KDT_ASSIGN_OR_RETURN(api->server_, Bind(&builder, listen, std::move(credentials), &api->address_));
  if (security.health_listen.has_value()) {
    KDT_RETURN_IF_ERROR(api->StartHealthOnly(*security.health_listen));
  }
  api->SetServing(false);
  // For liveness probes: a process that waits for its ranks is not one to restart.
  for (grpc::Server* server : {api->server_.get(), api->health_server_.get()}) {
    if (server != nullptr) server->GetHealthCheckService()->SetServingStatus(kLiveName, true);
  }
  return api;
}

absl::Status ApiServer::StartHealthOnly(const Address& listen) {
  grpc::ServerBuilder builder;
  LeaveOutReflection(&builder);
  builder.RegisterCallbackGenericService(&nothing_);
  builder.SetMaxReceiveMessageSize(kMaxHealthBytes);
  KDT_ASSIGN_OR_RETURN(health_server_,
                       Bind(&builder, listen, grpc::InsecureServerCredentials(), &health_address_));
  return absl::OkStatus();
}

ApiServer::~ApiServer() {
  if (server_ != nullptr) Shutdown(std::chrono::milliseconds(0));
}

void ApiServer::SetServing(bool serving) {
  for (grpc::Server* server : {server_.get(), health_server_.get()}) {
    if (server == nullptr) continue;
    auto* health = server->GetHealthCheckService();
    health->SetServingStatus(kServiceName, serving);
    health->SetServingStatus("", serving);
  }
}

void ApiServer::Shutdown(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::system_clock::now() + timeout;
  server_->Shutdown(deadline);
  if (health_server_ != nullptr) health_server_->Shutdown(deadline);
}

}  // namespace kdt
