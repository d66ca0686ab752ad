// Transport security with real processes: the public port behind TLS, client certificates and API keys, the
// client's flags for them, and a group over mutual TLS.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <cstdio>
#include <optional>

#include "common/tls.h"
#include "kdt/v1/worker.grpc.pb.h"
#include "tests/coordinator/api/raw_call.h"
#include "tests/support/catch.h"
#include "tests/support/certificates.h"
#include "tests/support/cluster.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

constexpr int kStartMs = 60000;

struct Folder {
  Folder() : path(*MakeTempDir("kdt-test-")), authority(path, "authority"), stranger(path, "stranger") {}
  ~Folder() { RemoveTree(path); }
  const std::string path;
  Authority authority, stranger;
};

ChildProcess Start(const std::string& program, std::vector<std::string> flags, const std::string& log) {
  ChildProcess::Options process;
  process.name = program;
  process.argv = {std::string(KDT_BIN_DIR) + "/" + program};
  process.argv.insert(process.argv.end(), flags.begin(), flags.end());
  process.capture_stdout = true;
  process.stderr_path = log;
  auto started = ChildProcess::Start(process);
  REQUIRE(started.ok());
  return *std::move(started);
}

// What a program that ends by itself says on standard error.
struct Ended {
  std::optional<int> status;
  std::string text;
};
Ended RunToEnd(const Folder& folder, const std::string& program, const std::vector<std::string>& flags) {
  const std::string log = folder.path + "/end.log";
  ChildProcess process = Start(program, flags, log);
  REQUIRE(process.WaitEnded(kStartMs));
  const Ended ended{process.exit_status(), ReadWholeFile(log)};
  std::remove(log.c_str());
  return ended;
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address, const std::string& authorities,
                                       const CertificateFiles& own = {}) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!authorities.empty()) {
    TlsMaterial material{"", "", ReadWholeFile(authorities)};
    if (!own.key.empty()) {
      material.certificate = ReadWholeFile(own.certificate);
      material.key = ReadWholeFile(own.key);
    }
    credentials = ClientCredentials(material);
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

grpc::Status GenerateFour(const std::shared_ptr<grpc::Channel>& channel, const std::string& key = "") {
  int tokens = 0;
  const grpc::Status status = GenerateWithKey(channel, RequestFor(kShortPrompt, 4), key, &tokens);
  CHECK(tokens == (status.ok() ? 4 : 0));
  return status;
}

}  // namespace

TEST_CASE("a cluster behind TLS, client certificates and API keys") {
  Folder folder;
  const CertificateFiles server = folder.authority.Issue("server"), client = folder.authority.Issue("client"),
                         wrong = folder.stranger.Issue("wrong");
  const std::string keys = folder.path + "/keys", bad_key = folder.path + "/bad-key";
  WriteFile(keys, "# operators\nright-key\n");
  WriteFile(bad_key, "wrong-key\n");
  Cluster cluster({.model = GoldenModel(),
                   .tp = 2,
                   .flags = {"--tls_cert=" + server.certificate, "--tls_key=" + server.key,
                             "--tls_client_ca=" + folder.authority.path(), "--api_keys_file=" + keys,
                             "--health_listen=127.0.0.1:0"}});
  const std::string believed = folder.authority.path();
  const auto code = [](const grpc::Status& status) { return status.error_code(); };
  const auto secure = Connect(cluster.server(), believed, client);
  CHECK(GenerateFour(secure, "right-key").ok());
  CHECK(code(GenerateFour(secure)) == grpc::StatusCode::UNAUTHENTICATED);
  CHECK(code(GenerateFour(secure, "wrong-key")) == grpc::StatusCode::UNAUTHENTICATED);
  CHECK(code(GenerateFour(Connect(cluster.server(), believed), "right-key")) ==
        grpc::StatusCode::UNAVAILABLE);
  CHECK(code(GenerateFour(Connect(cluster.server(), believed, wrong), "right-key")) ==
        grpc::StatusCode::UNAVAILABLE);
  CHECK(code(GenerateFour(Connect(cluster.server(), ""), "right-key")) == grpc::StatusCode::UNAVAILABLE);

  const std::string log = cluster.Log(), mark = "health alone on ";
  const size_t at = log.find(mark);
  REQUIRE(at != std::string::npos);
  const std::string health = log.substr(at + mark.size(), log.find('\n', at) - at - mark.size());
  CHECK(IsServing(CheckHealth(Connect(health, ""))));
  CHECK(code(GenerateFour(Connect(health, ""), "right-key")) == grpc::StatusCode::UNIMPLEMENTED);

  const std::vector<std::string> base = {"generate", "hello", "--max_tokens=4",
                                         "--server=" + cluster.server()};
  const auto kdt = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), base.begin(), base.end());
    return RunToEnd(folder, "kdt", flags);
  };
  const std::string ca = "--tls_ca=" + believed, certificate = "--tls_cert=" + client.certificate,
                    key = "--tls_key=" + client.key, api_key = "--api_key_file=" + keys;
  const Ended served = kdt({ca, certificate, key, api_key});
  INFO(served.text);
  CHECK(served.status == 0);
  const Ended renamed = kdt({ca, certificate, key, api_key, "--tls_server_name=localhost"});
  CHECK(renamed.status == 0);
  CHECK(kdt({ca, certificate, key, api_key, "--tls_server_name=example.com"}).status == 1);
  const Ended no_key = kdt({ca, certificate, key});
  CHECK(no_key.status == 1);
  CHECK(no_key.text.find("API key") != std::string::npos);
  CHECK(kdt({ca, certificate, key, "--api_key_file=" + bad_key}).text == no_key.text);
  CHECK(kdt({ca, api_key}).status == 1);
  CHECK(kdt({"--tls", certificate, key, api_key}).status == 1);  // the system does not know our authority
  const std::vector<std::pair<std::vector<std::string>, std::string>> refusals = {
      {{certificate, ca}, "--tls_cert needs --tls_key"},
      {{certificate, key}, "--tls_cert needs --tls or --tls_ca"},
      {{"--tls_ca=/no/such/file"}, "--tls_ca: /no/such/file"},
      {{"--api_key_file=/no/such/file"}, "--api_key_file: /no/such/file"},
      {{"--server=192.0.2.1:1", api_key}, "plaintext to 192.0.2.1:1"}};
  for (const auto& [flags, text] : refusals) {
    const Ended refused = kdt(flags);
    INFO(refused.text);
    CHECK(refused.status == 1);
    CHECK(refused.text.find(text) != std::string::npos);
  }
}

TEST_CASE("a group over mutual TLS; who has no certificate of its authority reaches no worker") {
  Folder folder;
  const CertificateFiles own = folder.authority.Issue("rank"), wrong = folder.stranger.Issue("wrong");
  const std::vector<std::string> tls = {"--group_tls_cert=" + own.certificate, "--group_tls_key=" + own.key,
                                        "--group_tls_ca=" + folder.authority.path()};
  const std::string log = folder.path + "/log", worker_ready = "kdt-worker ready listen=";
  std::vector<ChildProcess> workers;
  std::string addresses;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> flags = tls;
    for (const std::string& flag : {"--model=" + GoldenModel(), std::string("--tp=2"),
                                    "--rank=" + std::to_string(rank), std::string("--listen=127.0.0.1:0"),
                                    std::string("--kv_slots=512"), std::string("--die_with_parent")}) {
      flags.push_back(flag);
    }
    workers.push_back(Start("kdt-worker", flags, log));
    const auto line = workers.back().WaitForLine(worker_ready, kStartMs);
    INFO(ReadWholeFile(log));
    REQUIRE(line.ok());
    addresses += (rank == 0 ? "" : ",") + line->substr(worker_ready.size());
  }
  const std::string first = addresses.substr(0, addresses.find(','));
  const auto describe = [&](const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::DescribeResponse response;
    return v1::Worker::NewStub(channel)->Describe(&context, {}, &response).error_code();
  };
  CHECK(describe(Connect(first, folder.authority.path(), own)) == grpc::StatusCode::OK);
  CHECK(describe(Connect(first, folder.authority.path())) == grpc::StatusCode::UNAVAILABLE);
  CHECK(describe(Connect(first, folder.authority.path(), wrong)) == grpc::StatusCode::UNAVAILABLE);
  CHECK(describe(Connect(first, "")) == grpc::StatusCode::UNAVAILABLE);

  std::vector<std::string> flags = tls;
  for (const std::string& flag : {"--model=" + GoldenModel(), "--workers=" + addresses,
                                  std::string("--listen=127.0.0.1:0"), std::string("--die_with_parent")}) {
    flags.push_back(flag);
  }
  ChildProcess coordinator = Start("kdt-coordinator", flags, log);
  const std::string ready = "kdt-coordinator ready listen=";
  const auto line = coordinator.WaitForLine(ready, kStartMs);
  INFO(ReadWholeFile(log));
  REQUIRE(line.ok());
  CHECK(GenerateFour(Connect(line->substr(ready.size()), "")).ok());
  coordinator.Signal(SIGTERM);
  CHECK(coordinator.WaitEnded(kStartMs));
  for (ChildProcess& worker : workers) {
    worker.Signal(SIGTERM);
    CHECK(worker.WaitEnded(kStartMs));
  }
}

TEST_CASE("what would be open to other hosts is refused at start, by flag") {
  Folder folder;
  const CertificateFiles own = folder.authority.Issue("own"), other = folder.authority.Issue("other");
  WriteFile(folder.path + "/keys", "key\n");
  const std::string model = "--model=" + GoldenModel(), certificate = own.certificate, key = own.key;
  const std::string group_certificate = "--group_tls_cert=" + certificate,
                    group_key = "--group_tls_key=" + key,
                    group_ca = "--group_tls_ca=" + folder.authority.path();
  struct Case {
    std::string program;
    std::vector<std::string> flags;
    std::string text;
  };
  const std::string workers = "--workers=unix:" + folder.path + "/none", local = "--listen=127.0.0.1:0";
  const std::vector<Case> cases = {
      {"kdt-worker", {"--listen=0.0.0.0:0"}, "--listen=0.0.0.0:0: other hosts reach it"},
      {"kdt-worker", {"--listen=[::]:0"}, "other hosts reach it"},
      {"kdt-worker", {"--listen=0.0.0.0:0", group_certificate, group_key}, "needs all of --group_tls_cert"},
      {"kdt-worker", {"--listen=0.0.0.0:0", group_certificate}, "--group_tls_cert needs --group_tls_key"},
      {"kdt-worker",
       {"--listen=unix:" + folder.path + "/s", group_certificate, group_key, group_ca},
       "a unix socket takes no --group_tls_*"},
      {"kdt-coordinator", {"--workers=192.0.2.1:7000"}, "--workers=192.0.2.1:7000: other hosts reach it"},
      {"kdt-coordinator", {workers, group_certificate, group_key, group_ca}, "a unix socket takes no"},
      {"kdt-coordinator", {workers, "--tls_cert=" + certificate}, "--tls_cert needs --tls_key"},
      {"kdt-coordinator", {workers, "--tls_key=" + key}, "--tls_key needs --tls_cert"},
      {"kdt-coordinator", {workers, "--tls_client_ca=" + certificate}, "--tls_client_ca needs --tls_cert"},
      {"kdt-coordinator",
       {workers, "--tls_cert=" + certificate, "--tls_key=" + other.key},
       "--tls_key: " + other.key + " is not the key of"},
      {"kdt-coordinator",
       {workers, "--tls_cert=/no/such.pem", "--tls_key=" + key},
       "--tls_cert: /no/such.pem"},
      {"kdt-coordinator",
       {workers, "--listen=0.0.0.0:0", "--api_keys_file=" + folder.path + "/keys"},
       "keys would travel in plaintext"},
      {"kdt-coordinator", {workers, local, "--api_keys_file=" + own.key + ".none"}, "--api_keys_file: "},
      {"kdt-coordinator", {workers, local, "--health_listen=nowhere"}, "--health_listen"}};
  for (const Case& refused : cases) {
    std::vector<std::string> flags = refused.flags;
    flags.push_back(model);
    const Ended ended = RunToEnd(folder, refused.program, flags);
    INFO(refused.text << "\n" << ended.text);
    CHECK(ended.status == (refused.program == "kdt-worker" ? 2 : 1));
    CHECK(ended.text.find(refused.text) != std::string::npos);
  }
}

TEST_CASE("with the flags that say so, plaintext is open to other hosts") {
  Folder folder;
  WriteFile(folder.path + "/keys", "key\n");
  const std::string model = "--model=" + GoldenModel(), log = folder.path + "/log";
  ChildProcess worker =
      Start("kdt-worker", {model, "--listen=0.0.0.0:0", "--allow_insecure_group", "--die_with_parent"}, log);
  const std::string worker_ready = "kdt-worker ready listen=0.0.0.0:";
  const auto worker_line = worker.WaitForLine(worker_ready, kStartMs);
  INFO(ReadWholeFile(log));
  REQUIRE(worker_line.ok());
  ChildProcess coordinator =
      Start("kdt-coordinator",
            {model, "--workers=127.0.0.1:" + worker_line->substr(worker_ready.size()), "--listen=0.0.0.0:0",
             "--api_keys_file=" + folder.path + "/keys", "--allow_insecure_api_keys", "--die_with_parent"},
            log);
  const std::string ready = "kdt-coordinator ready listen=0.0.0.0:";
  const auto line = coordinator.WaitForLine(ready, kStartMs);
  INFO(ReadWholeFile(log));
  REQUIRE(line.ok());
  CHECK(GenerateFour(Connect("127.0.0.1:" + line->substr(ready.size()), ""), "key").ok());
  coordinator.Signal(SIGTERM);
  CHECK(coordinator.WaitEnded(kStartMs));
  worker.Signal(SIGTERM);
  CHECK(worker.WaitEnded(kStartMs));
}

}  // namespace kdt::testing
