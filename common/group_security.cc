#include "common/group_security.h"

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

ABSL_FLAG(std::string, group_tls_cert, "",
          "PEM file with this process's certificate for mutual TLS between coordinator and workers");
ABSL_FLAG(std::string, group_tls_key, "", "PEM file with the key of --group_tls_cert");
ABSL_FLAG(std::string, group_tls_ca, "",
          "PEM file with the authority that signed the certificates of the group's other side");
ABSL_FLAG(bool, allow_insecure_group, false,
          "let coordinator and workers talk in plaintext over addresses that other hosts reach");

namespace kdt {

absl::StatusOr<std::optional<TlsMaterial>> GroupTlsFromFlags() {
  const TlsFiles files{{"--group_tls_cert", absl::GetFlag(FLAGS_group_tls_cert)},
                       {"--group_tls_key", absl::GetFlag(FLAGS_group_tls_key)},
                       {"--group_tls_ca", absl::GetFlag(FLAGS_group_tls_ca)}};
  KDT_ASSIGN_OR_RETURN(TlsMaterial material, LoadTls(files));
  if (material.certificate.empty() && material.authorities.empty()) return std::nullopt;
  if (material.certificate.empty() || material.authorities.empty()) {
    return absl::InvalidArgumentError(
        "mutual TLS needs all of --group_tls_cert, --group_tls_key and --group_tls_ca");
  }
  return material;
}

absl::Status CheckGroupAddress(const Address& address, const std::string& flag, bool tls,
                               bool allow_insecure) {
  if (tls && address.is_unix()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", address.ToString(), ": a unix socket takes no --group_tls_*"));
  }
  if (tls || address.is_local() || allow_insecure) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, "=", address.ToString(),
                   ": other hosts reach it, and anyone who does could read prompts or drive the worker; give "
                   "--group_tls_cert, --group_tls_key and --group_tls_ca, or --allow_insecure_group on a "
                   "private network"));
}

bool InsecureGroupAllowed() { return absl::GetFlag(FLAGS_allow_insecure_group); }

}  // namespace kdt
