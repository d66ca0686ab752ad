// Sampling, stop, output and speculation flags shared by generate, chat and bench.
#pragma once

#include "absl/status/status.h"
#include "kdt/v1/generation.pb.h"

namespace kdt {

// Fills everything but the prompt from flags that were given; unset flags stay unset in the request, so that
// the server's defaults hold. INVALID_ARGUMENT names the flag; ranges are the server's to check.
absl::Status RequestFromFlags(v1::GenerateRequest* request);

}  // namespace kdt
