// Server reflection, which gRPC adds to every server of a process that links it: behind the API keys, or left
// out.
#pragma once

#include <grpcpp/server_builder.h>

#include <memory>

#include "coordinator/api/api_keys.h"

namespace kdt {

// Reflection calls of this server need one of `keys`; null: none.
void GuardReflection(grpc::ServerBuilder* builder, std::shared_ptr<const ApiKeys> keys);

// This server has no reflection.
void LeaveOutReflection(grpc::ServerBuilder* builder);

}  // namespace kdt
