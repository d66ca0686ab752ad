#include "coordinator/api/client_text.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/wire_format_lite.h>

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/utf8.h"

namespace kdt {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
namespace io = google::protobuf::io;

constexpr int kMaxDepth = 16;

// Path of the first string field whose bytes are not UTF-8, else empty.
std::string FindBrokenText(const Descriptor& type, const std::string& bytes, int depth) {
  io::CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<int>(bytes.size()));
  while (const uint32_t tag = in.ReadTag()) {
    const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const bool delimited = WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    if (field == nullptr || !delimited) {
      if (!WireFormatLite::SkipField(&in, tag)) return "";
      continue;
    }
    uint32_t size = 0;
    std::string value;
    if (!in.ReadVarint32(&size) || size > bytes.size() || !in.ReadString(&value, static_cast<int>(size)))
      return "";
    if (field->type() == FieldDescriptor::TYPE_STRING && FirstInvalidUtf8(value).has_value())
      return field->name();
    if (field->type() != FieldDescriptor::TYPE_MESSAGE || depth >= kMaxDepth) continue;
    const std::string inner = FindBrokenText(*field->message_type(), value, depth + 1);
    if (!inner.empty()) return absl::StrCat(field->name(), ".", inner);
  }
  return "";
}

std::string Join(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  std::string joined;
  if (!bytes.Dump(&slices).ok()) return joined;
  joined.reserve(bytes.Length());
  for (const grpc::Slice& slice : slices)
    joined.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return joined;
}

}  // namespace

absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  const std::string joined = Join(bytes);
  {
    const google::protobuf::LogSilencer quiet;  // what is wrong goes to the client, not into our log
    if (message->ParseFromString(joined)) return absl::OkStatus();
  }
  const std::string field = FindBrokenText(*message->GetDescriptor(), joined, 0);
  if (!field.empty()) return absl::InvalidArgumentError(absl::StrCat(field, ": not valid UTF-8"));
  return absl::InvalidArgumentError(absl::StrCat("the bytes are not a ", message->GetDescriptor()->name()));
}

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  const size_t size = message.ByteSizeLong();
  grpc::Slice slice(size);
  KDT_CHECK(message.SerializeToArray(const_cast<uint8_t*>(slice.begin()), static_cast<int>(size)));
  return grpc::ByteBuffer(&slice, 1);
}

bool IsLocalPeer(absl::string_view peer) {
  // gRPC percent-encodes the brackets of IPv6.
  for (const absl::string_view local : {"unix:", "ipv4:127.", "ipv6:%5B::1%5D:", "ipv6:[::1]:"}) {
    if (absl::StartsWith(peer, local)) return true;
  }
  return false;
}

}  // namespace kdt
