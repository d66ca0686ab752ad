#include "coordinator/api/api_keys.h"

#include <grpcpp/server_context.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "common/tls.h"

namespace kdt {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr char kHeader[] = "authorization";
constexpr absl::string_view kScheme = "bearer ";

}  // namespace

ApiKeys::Digest ApiKeys::Hash(absl::string_view key) {
  Digest digest;
  SHA256(reinterpret_cast<const uint8_t*>(key.data()), key.size(), digest.data());
  return digest;
}

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& flag, const std::string& path) {
  KDT_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile({flag, path}, kMaxFileBytes));
  ApiKeys keys;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    for (const char c : line) {
      if (absl::ascii_isgraph(static_cast<unsigned char>(c))) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": ", path, " line ", line_number, ": a key is printable ASCII without blanks"));
    }
    keys.digests_.push_back(Hash(line));
  }
  if (keys.digests_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, " holds no key"));
  }
  return keys;
}

absl::Status ApiKeys::CheckHeader(absl::string_view authorization) const {
  const bool bearer = absl::StartsWithIgnoreCase(authorization, kScheme);
  const Digest shown = Hash(bearer ? authorization.substr(kScheme.size()) : "");
  // Digests of equal length, all of them compared, no early end.
  int equal = 0;
  for (const Digest& digest : digests_) {
    equal |= static_cast<int>(CRYPTO_memcmp(digest.data(), shown.data(), shown.size()) == 0);
  }
  if (equal != 0) return absl::OkStatus();
  return absl::UnauthenticatedError(
      "this server needs a valid API key (metadata \"authorization: Bearer KEY\")");
}

absl::Status ApiKeys::Check(const grpc::ServerContextBase& context) const {
  const auto& metadata = context.client_metadata();
  const auto header = metadata.find(kHeader);
  if (header == metadata.end()) return CheckHeader("");
  return CheckHeader({header->second.data(), header->second.size()});
}

}  // namespace kdt
