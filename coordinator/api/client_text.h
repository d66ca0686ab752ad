// Messages as clients send them: bytes that may be anything.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"

namespace kdt {

// Parses a message. INVALID_ARGUMENT names the string field that is not UTF-8, which protobuf refuses without
// saying which, or says that the bytes are not such a message.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message);

}  // namespace kdt
