// API keys: who may call the public API.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace kdt {

class ApiKeys {
 public:
  // One key a line; blank lines and lines that begin with # are skipped, blanks around a key too. The texts
  // are not kept, only their SHA-256 digests. INVALID_ARGUMENT names `flag`, the file and the line, never a
  // key: no key at all, or one with characters that cannot stand in a header.
  static absl::StatusOr<ApiKeys> Load(const std::string& flag, const std::string& path);

  // OK for metadata `authorization: Bearer KEY` with one of the keys. UNAUTHENTICATED otherwise, with one
  // text for a missing and for a wrong key. The time it takes depends neither on which key it is nor on how
  // much of one was right.
  absl::Status Check(const grpc::ServerContextBase& context) const;
  absl::Status CheckHeader(absl::string_view authorization) const;

  size_t size() const { return digests_.size(); }

 private:
  using Digest = std::array<uint8_t, 32>;
  static Digest Hash(absl::string_view key);

  std::vector<Digest> digests_;
};

}  // namespace kdt
