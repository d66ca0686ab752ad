#include "common/metrics.h"

#include <exception>

#include "absl/strings/str_cat.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"

namespace kdt {

MetricsServer::~MetricsServer() = default;

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const Address& address, std::shared_ptr<prometheus::Registry> registry) {
  if (address.is_unix()) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address ", address.ToString(), ": must be HOST:PORT, not a unix socket"));
  }
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->registry_ = std::move(registry);
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(address.ToString(), /*num_threads=*/1);
    server->exposer_->RegisterCollectable(server->registry_);
    const std::vector<int> ports = server->exposer_->GetListeningPorts();
    if (!ports.empty()) server->port_ = ports.front();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("metrics address ", address.ToString(), ": cannot listen: ", error.what()));
  }
  return server;
}

}  // namespace kdt
