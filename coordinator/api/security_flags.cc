#include "coordinator/api/security_flags.h"

#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/status.h"
#include "common/tls.h"

ABSL_FLAG(std::string, tls_cert, "",
          "PEM file with the public port's certificate and its chain; empty: plaintext");
ABSL_FLAG(std::string, tls_key, "", "PEM file with the key of --tls_cert");
ABSL_FLAG(std::string, tls_client_ca, "",
          "PEM file with authorities; clients must show a certificate that one of them signed");
ABSL_FLAG(std::string, api_keys_file, "",
          "file with one API key a line; calls need metadata \"authorization: Bearer KEY\"");
ABSL_FLAG(bool, allow_insecure_api_keys, false,
          "accept API keys in plaintext from other hosts, as behind a proxy that ends TLS");
ABSL_FLAG(std::string, health_listen, "",
          "HOST:PORT of a plaintext port with grpc.health.v1 only, for probes; empty: none");

namespace kdt {

absl::StatusOr<ApiSecurity> ApiSecurityFromFlags(const Address& listen) {
  ApiSecurity security;
  const TlsFiles files{{"--tls_cert", absl::GetFlag(FLAGS_tls_cert)},
                       {"--tls_key", absl::GetFlag(FLAGS_tls_key)},
                       {"--tls_client_ca", absl::GetFlag(FLAGS_tls_client_ca)}};
  KDT_ASSIGN_OR_RETURN(const TlsMaterial material, LoadTls(files));
  if (!material.certificate.empty()) {
    security.credentials = ServerCredentials(material);
  } else if (!material.authorities.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key too");
  }
  if (const std::string path = absl::GetFlag(FLAGS_api_keys_file); !path.empty()) {
    if (security.credentials == nullptr && !listen.is_local() &&
        !absl::GetFlag(FLAGS_allow_insecure_api_keys)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--api_keys_file: keys would travel in plaintext to --listen=", listen.ToString(),
          "; give --tls_cert and --tls_key, or --allow_insecure_api_keys where a proxy ends TLS"));
    }
    KDT_ASSIGN_OR_RETURN(ApiKeys keys, ApiKeys::Load("--api_keys_file", path));
    spdlog::info("{} API keys", keys.size());
    security.keys = std::make_shared<const ApiKeys>(std::move(keys));
  }
  if (const std::string health = absl::GetFlag(FLAGS_health_listen); !health.empty()) {
    KDT_ASSIGN_OR_RETURN(security.health_listen, ParseAddress(health, "--health_listen"));
  }
  return security;
}

}  // namespace kdt
