// The public gRPC server: Generation, grpc.health.v1 and reflection on one port.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "common/address.h"
#include "coordinator/api/generation_service.h"

namespace kdt {

class ApiServer {
 public:
  // Binds at once and answers; Generate is UNAVAILABLE and health NOT_SERVING until the group serves.
  // UNAVAILABLE names an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<ApiServer>> Start(const Address& listen,
                                                          std::shared_ptr<const ServedModel> model,
                                                          Group* group, Scheduler* scheduler);
  ~ApiServer();

  // The address with its actual port.
  const Address& address() const { return address_; }
  // Health of "" and "kdt.v1.Generation"; that of "live" is SERVING from the start.
  void SetServing(bool serving);
  // Lets calls end until `timeout` has passed, then cancels them.
  void Shutdown(std::chrono::milliseconds timeout);

 private:
  ApiServer() = default;

  Address address_;
  std::unique_ptr<GenerationService> service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kdt
