// A metrics port as a scraper sees it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kdt::testing {

// The whole answer, head included, of 127.0.0.1:port to GET `path`. UNAVAILABLE when nothing listens or the
// connection breaks.
absl::StatusOr<std::string> HttpGet(int port, const std::string& path);

}  // namespace kdt::testing
