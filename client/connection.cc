#include "client/connection.h"

#include <grpcpp/support/client_interceptor.h>

#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/address.h"
#include "common/status.h"
#include "common/tls.h"

ABSL_FLAG(std::string, server, "127.0.0.1:50051", "HOST:PORT of the coordinator");
ABSL_FLAG(bool, tls, false, "TLS, believing the system's authorities");
ABSL_FLAG(std::string, tls_ca, "", "TLS, believing the authorities in this PEM file only");
ABSL_FLAG(std::string, tls_cert, "", "PEM file with a certificate to show to a server that asks for one");
ABSL_FLAG(std::string, tls_key, "", "PEM file with the key of --tls_cert");
ABSL_FLAG(std::string, tls_server_name, "", "name in the server's certificate, when it is not the host");
ABSL_FLAG(std::string, api_key_file, "", "file with the API key in its first line that is not a # comment");
ABSL_FLAG(bool, allow_insecure_api_keys, false, "send the API key in plaintext to another host");

namespace kdt {
namespace {

using grpc::experimental::InterceptionHookPoints;

// Long prompts and their log-probabilities pass gRPC's default of 4 MiB; this bounds what a server can make
// us hold.
constexpr int kMaxMessageBytes = 256 << 20;
constexpr size_t kMaxKeyFileBytes = 1 << 20;

// Adds the key to every call; gRPC's own call credentials refuse plaintext channels, also to this host.
class KeySender : public grpc::experimental::Interceptor {
 public:
  explicit KeySender(std::string header) : header_(std::move(header)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->insert({"authorization", header_});
    }
    methods->Proceed();
  }

 private:
  const std::string header_;
};

class KeySenderFactory : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit KeySenderFactory(std::string header) : header_(std::move(header)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new KeySender(header_);
  }

 private:
  const std::string header_;
};

absl::StatusOr<std::string> ReadKey(const std::string& path) {
  KDT_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile({"--api_key_file", path}, kMaxKeyFileBytes));
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    for (const char c : line) {
      if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
        return absl::InvalidArgumentError(
            absl::StrCat("--api_key_file: ", path, ": a key is printable ASCII without blanks"));
      }
    }
    return std::string(line);
  }
  return absl::InvalidArgumentError(absl::StrCat("--api_key_file: ", path, " holds no key"));
}

// Null: plaintext.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsFromFlags() {
  const TlsFiles files{{"--tls_cert", absl::GetFlag(FLAGS_tls_cert)},
                       {"--tls_key", absl::GetFlag(FLAGS_tls_key)},
                       {"--tls_ca", absl::GetFlag(FLAGS_tls_ca)}};
  KDT_ASSIGN_OR_RETURN(const TlsMaterial material, LoadTls(files));
  if (absl::GetFlag(FLAGS_tls) || !material.authorities.empty()) return ClientCredentials(material);
  for (const auto& [flag, given] :
       {std::pair("--tls_cert", !material.certificate.empty()),
        std::pair("--tls_server_name", !absl::GetFlag(FLAGS_tls_server_name).empty())}) {
    if (given) return absl::InvalidArgumentError(absl::StrCat(flag, " needs --tls or --tls_ca too"));
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GenerationStub>> ConnectFromFlags() {
  const std::string server = absl::GetFlag(FLAGS_server);
  KDT_ASSIGN_OR_RETURN(const Address address, ParseAddress(server, "--server"));
  KDT_ASSIGN_OR_RETURN(std::shared_ptr<grpc::ChannelCredentials> credentials, TlsFromFlags());
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (const std::string path = absl::GetFlag(FLAGS_api_key_file); !path.empty()) {
    if (credentials == nullptr && !address.is_local() && !absl::GetFlag(FLAGS_allow_insecure_api_keys)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--api_key_file: the key would travel in plaintext to ", server,
          "; give --tls or --tls_ca, or --allow_insecure_api_keys on a network that nobody else reads"));
    }
    KDT_ASSIGN_OR_RETURN(const std::string key, ReadKey(path));
    interceptors.push_back(std::make_unique<KeySenderFactory>(absl::StrCat("Bearer ", key)));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  if (const std::string name = absl::GetFlag(FLAGS_tls_server_name); !name.empty()) {
    arguments.SetSslTargetNameOverride(name);
  }
  if (credentials == nullptr) credentials = grpc::InsecureChannelCredentials();
  return v1::Generation::NewStub(grpc::experimental::CreateCustomChannelWithInterceptors(
      address.ToString(), credentials, arguments, std::move(interceptors)));
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
