// The public gRPC server: Generation, grpc.health.v1 and reflection on one port, and health alone on another.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "common/address.h"
#include "coordinator/api/api_keys.h"
#include "coordinator/api/generation_service.h"

namespace kdt {

struct ApiSecurity {
  std::shared_ptr<grpc::ServerCredentials> credentials;  // null: plaintext
  std::shared_ptr<const ApiKeys> keys;                   // null: who reaches the port may call
  std::optional<Address> health_listen;  // plaintext port with grpc.health.v1 only, for probes
};

class ApiServer {
 public:
  // Binds at once and answers; Generate is UNAVAILABLE and health NOT_SERVING until the group serves.
  // UNAVAILABLE names an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<ApiServer>> Start(const Address& listen,
                                                          std::shared_ptr<const ServedModel> model,
                                                          Group* group, Scheduler* scheduler,
                                                          const ApiSecurity& security = {});
  ~ApiServer();

  // The address with its actual port.
  const Address& address() const { return address_; }
  // Of the health-only port, with its actual port; null when there is none.
  const Address* health_address() const { return health_server_ == nullptr ? nullptr : &health_address_; }
  // On both ports: health of "" and "kdt.v1.Generation"; that of "live" is SERVING from the start.
  void SetServing(bool serving);
  // Lets calls end until `timeout` has passed, then cancels them.
  void Shutdown(std::chrono::milliseconds timeout);

 private:
  ApiServer() = default;

  absl::Status StartHealthOnly(const Address& listen);

  Address address_;
  Address health_address_;
  std::unique_ptr<GenerationService> service_;
  // Answers UNIMPLEMENTED to all but health; gRPC starts no server without a service of ours.
  grpc::CallbackGenericService nothing_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::Server> health_server_;
};

}  // namespace kdt
