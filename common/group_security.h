// Security between a coordinator and its workers: a unix socket, a loopback address, mutual TLS, or an
// explicit word that the network is private. Flags of both programs: --group_tls_cert, --group_tls_key,
// --group_tls_ca,
// --allow_insecure_group.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/address.h"
#include "common/tls.h"

namespace kdt {

// What the flags say, files read; nullopt: no TLS. INVALID_ARGUMENT names the flag and the file; mutual TLS
// needs all three.
absl::StatusOr<std::optional<TlsMaterial>> GroupTlsFromFlags();

// Whether a worker may listen on, or a coordinator send prompts to, the address that `flag` names.
// INVALID_ARGUMENT says what to give instead: another host could reach it unprotected, or TLS was asked for a
// unix socket, where it would be silently missing.
absl::Status CheckGroupAddress(const Address& address, const std::string& flag, bool tls,
                               bool allow_insecure);

// --allow_insecure_group
bool InsecureGroupAllowed();

}  // namespace kdt
