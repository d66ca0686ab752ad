#include "client/connection.h"

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(std::string, server, "127.0.0.1:50051", "HOST:PORT of the coordinator");

namespace kdt {
namespace {

// Long prompts and their log-probabilities pass gRPC's default of 4 MiB; this bounds what a server can make
// us hold.
constexpr int kMaxMessageBytes = 256 << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<GenerationStub>> ConnectFromFlags() {
  const std::string server = absl::GetFlag(FLAGS_server);
  if (server.find(':') == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("--server: \"", server, "\" is not HOST:PORT"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  return v1::Generation::NewStub(
      grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments));
}

absl::Status ToAbsl(const grpc::Status& status, const grpc::ClientContext& context) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());  // both follow the gRPC numbering
  std::string text = status.error_message();
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto hint = trailers.find("retry-after-ms"); hint != trailers.end()) {
    absl::StrAppend(&text, " (retry after ", absl::string_view(hint->second.data(), hint->second.size()),
                    " ms)");
  }
  return absl::Status(code, text);
}

}  // namespace kdt
