// Messages as clients send them: bytes that may be anything; and what may be told to whom.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kdt {

// Parses a message. INVALID_ARGUMENT names the string field that is not UTF-8, which protobuf refuses without
// saying which, or says that the bytes are not such a message.
absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message);

// Whether a caller, as gRPC names it, is on this host. Only such a one is told addresses and the ranks' own
// error texts.
bool IsLocalPeer(absl::string_view peer);

}  // namespace kdt
