// Sampling, stop, output and speculation flags shared by generate, chat and bench.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {

// Fills everything but the prompt from flags that were given; unset flags stay unset in the request, so that
// the server's defaults hold. INVALID_ARGUMENT names the flag; ranges are the server's to check.
absl::Status RequestFromFlags(v1::GenerateRequest* request);

// ConnectFromFlags for a command that makes requests. INVALID_ARGUMENT names a flag that does nothing with
// the model that the server has.
absl::StatusOr<std::unique_ptr<GenerationStub>> ConnectForRequests();

}  // namespace kdt
