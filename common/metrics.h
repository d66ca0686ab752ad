// The Prometheus endpoint of a process: GET /metrics on HOST:PORT.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/address.h"

namespace prometheus {
class Exposer;
class Registry;
}  // namespace prometheus

namespace kdt {

// Serves a registry until destroyed. The registry must outlive nothing: it is shared.
class MetricsServer {
 public:
  // Port 0 takes a free one. UNAVAILABLE names the address when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const Address& address,
                                                              std::shared_ptr<prometheus::Registry> registry);
  ~MetricsServer();
  int port() const { return port_; }  // the actual port

 private:
  MetricsServer() = default;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
};

}  // namespace kdt
