// The client's connection to a coordinator: channel, stub, and errors as a person wants to read them.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kdt/v1/generation.grpc.pb.h"

namespace kdt {

using GenerationStub = v1::Generation::Stub;

// A stub for the server that the flag --server names, with TLS and an API key as the other flags say.
// INVALID_ARGUMENT names the flag, and the file where there is one.
absl::StatusOr<std::unique_ptr<GenerationStub>> ConnectFromFlags();

// The server's status as absl's, with its code's name and, for a full queue, the server's retry hint in the
// text.
absl::Status ToAbsl(const grpc::Status& status, const grpc::ClientContext& context);

}  // namespace kdt
