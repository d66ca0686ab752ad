// Flags of the public port's security: --tls_cert, --tls_key, --tls_client_ca, --api_keys_file,
// --allow_insecure_api_keys, --health_listen.
#pragma once

#include "absl/status/statusor.h"
#include "common/address.h"
#include "coordinator/api/server.h"

namespace kdt {

// Reads the files that the flags name. INVALID_ARGUMENT names the flag, and the file where there is one; also
// when API keys would travel in plaintext to an address that other hosts reach.
absl::StatusOr<ApiSecurity> ApiSecurityFromFlags(const Address& listen);

}  // namespace kdt
