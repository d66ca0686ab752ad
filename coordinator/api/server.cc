#include "coordinator/api/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include "absl/strings/str_cat.h"
#include "common/status.h"

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

}  // namespace

absl::StatusOr<std::unique_ptr<ApiServer>> ApiServer::Start(const Address& listen,
                                                            std::shared_ptr<const ServedModel> model,
                                                            Group* group, Scheduler* scheduler) {
  std::unique_ptr<ApiServer> api(new ApiServer);
  const int64_t max_bytes =
      std::min(kMaxBytes, kOtherBytes + kBytesPerToken * model->config.max_position_embeddings);
  api->service_ = std::make_unique<GenerationService>(std::move(model), group, scheduler);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen.ToString(), grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(api->service_.get());
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxBytes));
  // A client waiting through a long prefill may ping; that is no reason to send it away.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second server on the port is an error
  api->server_ = builder.BuildAndStart();
  if (api->server_ == nullptr || (port == 0 && !listen.is_unix())) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen.ToString()));
  }
  api->address_ = listen;
  if (!listen.is_unix()) api->address_.port = port;
  api->SetServing(false);
  // For liveness probes: a process that waits for its ranks is not one to restart.
  api->server_->GetHealthCheckService()->SetServingStatus(kLiveName, true);
  return api;
}

ApiServer::~ApiServer() {
  if (server_ != nullptr) Shutdown(std::chrono::milliseconds(0));
}

void ApiServer::SetServing(bool serving) {
  auto* health = server_->GetHealthCheckService();
  health->SetServingStatus(kServiceName, serving);
  health->SetServingStatus("", serving);
}

void ApiServer::Shutdown(std::chrono::milliseconds timeout) {
  server_->Shutdown(std::chrono::system_clock::now() + timeout);
}

}  // namespace kdt
