// Tokens as a reader sees them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/connection.h"

namespace kdt {

// The text of one token by the server's tokenizer, quoted and escaped: "\n". Control tokens have their names.
absl::StatusOr<std::string> QuotedToken(GenerationStub& stub, uint32_t id);

}  // namespace kdt
