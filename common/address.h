// Addresses that processes listen on or connect to: HOST:PORT, [IPV6]:PORT or unix:PATH.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kdt {

struct Address {
  std::string host;       // without brackets; empty for a unix socket
  int port = 0;           // 0 .. 65535; 0 asks the system for a free port when listening
  std::string unix_path;  // empty for TCP

  bool is_unix() const { return !unix_path.empty(); }
  // A unix socket, "localhost", or a loopback address: not reachable from another host.
  bool is_local() const;
  // As gRPC takes it: "host:port", "[v6]:port" or "unix:path".
  std::string ToString() const;
};

// INVALID_ARGUMENT says what is wrong; `what` names the flag or field ("--listen").
absl::StatusOr<Address> ParseAddress(absl::string_view text, absl::string_view what);

}  // namespace kdt
