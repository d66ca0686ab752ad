// TLS, client certificates, API keys and the health-only port over real connections, with a toy group behind.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include "common/process.h"
#include "common/tls.h"
#include "coordinator/api/client_text.h"
#include "coordinator/api/server.h"
#include "tests/coordinator/api/raw_call.h"
#include "tests/coordinator/api/served_model.h"
#include "tests/coordinator/scheduler/fixture.h"
#include "tests/support/certificates.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
const std::string kListServices("\x3a\x00", 2);  // ServerReflectionRequest{list_services = 7: ""}

// This host's IPv4 addresses that are not loopback.
std::vector<std::string> OwnAddresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  REQUIRE(getifaddrs(&all) == 0);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    if ((one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    char text[INET_ADDRSTRLEN];
    const auto* address = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text, sizeof(text)) != nullptr) addresses.push_back(text);
  }
  freeifaddrs(all);
  return addresses;
}

struct SecureService {
  SecureService() : dir(*MakeTempDir("kdt-test-")), authority(dir, "authority"), stranger(dir, "stranger") {}
  ~SecureService() {
    server.reset();
    RemoveTree(dir);
  }

  void UseTls(bool client_certificates) {
    const CertificateFiles own = authority.Issue("server");
    TlsMaterial material{ReadWholeFile(own.certificate), ReadWholeFile(own.key), ""};
    if (client_certificates) material.authorities = ReadWholeFile(authority.path());
    security.credentials = ServerCredentials(material);
  }
  void UseKeys() {
    WriteFile(dir + "/keys", "right-key\nother-key\n");
    security.keys = std::make_shared<ApiKeys>(*ApiKeys::Load("--api_keys_file", dir + "/keys"));
  }
  void Start(const std::string& listen = "127.0.0.1:0") {
    server = *ApiServer::Start(*ParseAddress(listen, "listen"), GoldenServedModel(), &harness.group,
                               harness.scheduler.get(), security);
    harness.Start();
  }

  static std::shared_ptr<grpc::Channel> Connect(const Address& address,
                                                std::shared_ptr<grpc::ChannelCredentials> credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address.ToString(), std::move(credentials), arguments);
  }
  std::shared_ptr<grpc::Channel> Plain() const {
    return Connect(server->address(), grpc::InsecureChannelCredentials());
  }
  std::shared_ptr<grpc::Channel> Tls(const Authority& believed, const CertificateFiles& own = {}) const {
    TlsMaterial material{"", "", ReadWholeFile(believed.path())};
    if (!own.certificate.empty()) {
      material.certificate = ReadWholeFile(own.certificate);
      material.key = ReadWholeFile(own.key);
    }
    return Connect(server->address(), ClientCredentials(material));
  }
  // A short Generate; the number of tokens it gave in `tokens`.
  static grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel, const std::string& key = "",
                               int* tokens = nullptr) {
    int ignored = 0;
    return GenerateWithKey(channel, RequestFor(Prompt(20), 4), key, tokens != nullptr ? tokens : &ignored);
  }

  const std::string dir;
  Authority authority, stranger;
  Harness harness;
  ApiSecurity security;
  std::unique_ptr<ApiServer> server;
};

}  // namespace

TEST_CASE("TLS: who believes the authority is served; plaintext and other authorities are not") {
  SecureService service;
  service.UseTls(/*client_certificates=*/false);
  service.Start();
  int tokens = 0;
  REQUIRE(service.Generate(service.Tls(service.authority), "", &tokens).ok());
  CHECK(tokens == 4);
  CHECK(service.Generate(service.Plain()).error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(service.Generate(service.Tls(service.stranger)).error_code() == grpc::StatusCode::UNAVAILABLE);
}

TEST_CASE("client certificates: needed, and of the right authority") {
  SecureService service;
  service.UseTls(/*client_certificates=*/true);
  service.Start();
  const CertificateFiles right = service.authority.Issue("client"), wrong = service.stranger.Issue("wrong");
  CHECK(service.Generate(service.Tls(service.authority, right)).ok());
  CHECK(service.Generate(service.Tls(service.authority)).error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(service.Generate(service.Tls(service.authority, wrong)).error_code() ==
        grpc::StatusCode::UNAVAILABLE);
  CHECK(service.Generate(service.Plain()).error_code() == grpc::StatusCode::UNAVAILABLE);
}

TEST_CASE("API keys: every method needs one, with one answer for a missing and a wrong key") {
  SecureService service;
  service.UseKeys();
  service.Start();
  const auto channel = service.Plain();
  CHECK(service.Generate(channel, "right-key").ok());
  CHECK(service.Generate(channel, "other-key").ok());
  const uint64_t steps = service.harness.group.steps();
  const grpc::Status missing = service.Generate(channel), wrong = service.Generate(channel, "wrong-key");
  CHECK(missing.error_code() == grpc::StatusCode::UNAUTHENTICATED);
  CHECK(wrong.error_code() == grpc::StatusCode::UNAUTHENTICATED);
  CHECK(missing.error_message() == wrong.error_message());
  CHECK(missing.error_message().find("right-key") == std::string::npos);
  CHECK(service.harness.scheduler->running() == 0);
  CHECK(service.harness.group.steps() <= steps + 1);  // at most the idle one
  for (const char* name : {"Generate", "Tokenize", "Detokenize", "GetModelInfo", "GetClusterInfo"}) {
    INFO(name);
    const std::string method = std::string("/kdt.v1.Generation/") + name;
    CHECK(CallRaw(channel, method, "").status.error_code() == grpc::StatusCode::UNAUTHENTICATED);
    CHECK(CallRaw(channel, method, "", "Bearer wrong-key").status.error_message() == missing.error_message());
    if (name != std::string("Generate")) CHECK(CallRaw(channel, method, "", "Bearer right-key").status.ok());
  }
}

TEST_CASE("with API keys, reflection needs one and health does not") {
  SecureService service;
  service.UseKeys();
  service.Start();
  const auto channel = service.Plain();
  for (const std::string header : {"", "Bearer wrong-key"}) {
    const RawAnswer refused = CallRaw(channel, kReflection, kListServices, header);
    CHECK(refused.status.error_code() == grpc::StatusCode::UNAUTHENTICATED);
    CHECK(refused.status.error_message() == service.Generate(channel).error_message());
    CHECK(refused.bytes.empty());
  }
  const RawAnswer listed = CallRaw(channel, kReflection, kListServices, "Bearer right-key");
  CHECK(listed.status.ok());
  CHECK(listed.bytes.find("kdt.v1.Generation") != std::string::npos);
  CHECK_FALSE(IsServing(CheckHealth(channel)));
  service.server->SetServing(true);
  CHECK(IsServing(CheckHealth(channel)));
}

TEST_CASE("the health-only port is plaintext, needs no key, and answers nothing else") {
  SecureService service;
  service.UseTls(/*client_certificates=*/true);
  service.UseKeys();
  service.security.health_listen = *ParseAddress("127.0.0.1:0", "listen");
  service.Start();
  REQUIRE(service.server->health_address() != nullptr);
  CHECK(service.server->health_address()->port > 0);
  const auto channel = service.Connect(*service.server->health_address(), grpc::InsecureChannelCredentials());
  CHECK(CheckHealth(channel).status.ok());
  CHECK_FALSE(IsServing(CheckHealth(channel)));
  CHECK(IsServing(CheckHealth(channel, "live")));
  service.server->SetServing(true);
  CHECK(IsServing(CheckHealth(channel)));
  CHECK(IsServing(CheckHealth(channel, "kdt.v1.Generation")));
  for (const std::string method :
       {"/kdt.v1.Generation/GetModelInfo", "/kdt.v1.Generation/Generate", kReflection}) {
    INFO(method);
    CHECK(CallRaw(channel, method, "", "Bearer right-key").status.error_code() ==
          grpc::StatusCode::UNIMPLEMENTED);
  }
  const std::string huge(8192, 'x');
  CHECK(CallRaw(channel, "/grpc.health.v1.Health/Check", huge).status.error_code() ==
        grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_CASE("who is on this host") {
  for (const char* local : {"unix:", "unix:/tmp/s", "ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5"}) {
    INFO(local);
    CHECK(IsLocalPeer(local));
  }
  for (const char* remote : {"", "ipv4:10.0.0.1:5", "ipv4:1.127.0.1:5", "ipv6:%5B::12%5D:5",
                             "ipv6:%5B2001::1%5D:5", "ipv6:%5B::1%25eth0%5D:5"}) {
    INFO(remote);
    CHECK_FALSE(IsLocalPeer(remote));
  }
}

TEST_CASE("other hosts are told neither addresses of ranks nor error texts") {
  SecureService service;
  service.harness.group.status.address = "unix:/run/kdt/rank0.sock";
  service.harness.group.status.last_error = "cannot read /models/secret\xFF";
  service.Start("0.0.0.0:0");
  CHECK(service.server->address().port > 0);
  std::string reason;  // why it does not serve, as the last caller was told
  const auto info = [&](const std::string& host) {
    v1::ClusterInfo response;
    grpc::ClientContext context;
    const auto channel =
        service.Connect({host, service.server->address().port, ""}, grpc::InsecureChannelCredentials());
    REQUIRE(v1::Generation::NewStub(channel)->GetClusterInfo(&context, {}, &response).ok());
    REQUIRE(response.ranks_size() == 1);
    reason = response.reason();
    return response.ranks(0);
  };
  CHECK(info("127.0.0.1").address() == "unix:/run/kdt/rank0.sock");
  CHECK(info("127.0.0.1").last_error() == "cannot read /models/secret\uFFFD");
  for (const std::string& host : OwnAddresses()) {  // none on a host without a network
    INFO(host);
    CHECK(info(host).address().empty());
    CHECK(info(host).last_error().empty());
  }
  CHECK(reason.empty());  // it serves
  service.harness.group.Reject("");
  info("127.0.0.1");
  CHECK(reason == "toy");
  for (const std::string& host : OwnAddresses()) {
    info(host);
    CHECK(reason.empty());
  }
}

TEST_CASE("without security options the port is plaintext and open, reflection too") {
  SecureService service;
  service.Start();
  CHECK(service.Generate(service.Plain()).ok());
  CHECK(CallRaw(service.Plain(), kReflection, kListServices).bytes.find("kdt.v1.Generation") !=
        std::string::npos);
  CHECK(service.server->health_address() == nullptr);
}

}  // namespace kdt::testing
