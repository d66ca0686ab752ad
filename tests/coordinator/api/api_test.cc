// The public API over a real connection, with a toy group behind it.
#include <thread>

#include "coordinator/api/client_text.h"
#include "coordinator/api/server.h"
#include "tests/coordinator/api/raw_call.h"
#include "tests/coordinator/api/served_model.h"
#include "tests/coordinator/scheduler/fixture.h"
#include "tests/support/requests.h"

namespace kdt::testing {
namespace {

struct Service {
  explicit Service(SchedulerOptions options = {}, ToyOptions toy = {}) : harness(toy, options) {
    server = *ApiServer::Start(*ParseAddress("127.0.0.1:0", "listen"), GoldenServedModel(), &harness.group,
                               harness.scheduler.get());
    channel = grpc::CreateChannel(server->address().ToString(), grpc::InsecureChannelCredentials());
    stub = v1::Generation::NewStub(channel);
  }

  grpc::Status Run(const v1::GenerateRequest& request, std::vector<v1::GenerateResponse>* responses,
                   grpc::ClientContext* context) {
    auto reader = stub->Generate(context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) responses->push_back(response);
    return reader->Finish();
  }
  grpc::Status Run(const v1::GenerateRequest& request, std::vector<v1::GenerateResponse>* responses) {
    grpc::ClientContext context;
    return Run(request, responses, &context);
  }

  Harness harness;
  std::unique_ptr<ApiServer> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Generation::Stub> stub;
};

v1::GenerateRequest Request(uint32_t max_tokens) {
  v1::GenerateRequest request = GreedyRequest(Prompt(20), max_tokens);
  request.set_request_id("mine");
  return request;
}

}  // namespace

TEST_CASE("Generate streams chunks and one Complete") {
  Service service;
  service.harness.Start();
  std::vector<v1::GenerateResponse> responses;
  const grpc::Status status = service.Run(Request(30), &responses);
  REQUIRE(status.ok());
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < responses.size(); ++i) {
    CHECK(responses[i].request_id() == "mine");
    CHECK(responses[i].has_complete() == (i + 1 == responses.size()));
    tokens.insert(tokens.end(), responses[i].chunk().token_ids().begin(),
                  responses[i].chunk().token_ids().end());
  }
  CHECK(tokens == service.harness.Expected(Spec(Prompt(20), 30), 30));
  CHECK(responses.back().complete().timing().time_to_first_token_seconds() > 0);
}

TEST_CASE("a bad field is INVALID_ARGUMENT by name") {
  Service service;
  service.harness.Start();
  v1::GenerateRequest request = Request(5);
  request.mutable_sampling()->set_top_p(2);
  std::vector<v1::GenerateResponse> responses;
  const grpc::Status status = service.Run(request, &responses);
  CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(status.error_message().rfind("sampling.top_p: ", 0) == 0);
}

TEST_CASE("text that is not UTF-8, and bytes that are no request, are refused by name") {
  Service service;
  service.harness.Start();
  const std::string broken = "ab\xff";
  const auto field = [](int number, const std::string& value) {
    return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(value.size())} + value;
  };
  const std::string generate = "/kdt.v1.Generation/Generate";
  auto status = CallRaw(service.channel, generate, field(2, broken)).status;
  CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(status.error_message() == "text: not valid UTF-8");
  status = CallRaw(service.channel, generate, field(4, field(1, field(2, broken)))).status;
  CHECK(status.error_message() == "chat.messages.content: not valid UTF-8");
  status = CallRaw(service.channel, generate, "\x12\x7f").status;
  CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  status = CallRaw(service.channel, "/kdt.v1.Generation/Tokenize", field(1, broken)).status;
  CHECK(status.error_message() == "text: not valid UTF-8");
}

TEST_CASE("a full queue is RESOURCE_EXHAUSTED with a hint when to retry") {
  SchedulerOptions options;
  options.max_waiting = 0;
  Service service(options);
  service.harness.Start();
  grpc::ClientContext context;
  std::vector<v1::GenerateResponse> responses;
  const grpc::Status status = service.Run(Request(5), &responses, &context);
  CHECK(status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto hint = context.GetServerTrailingMetadata().find("retry-after-ms");
  REQUIRE(hint != context.GetServerTrailingMetadata().end());
  CHECK(std::stoi(std::string(hint->second.data(), hint->second.size())) > 0);
}

TEST_CASE("before the group serves, and after it is lost: UNAVAILABLE") {
  Service service;
  std::vector<v1::GenerateResponse> responses;
  CHECK(service.Run(Request(5), &responses).error_code() == grpc::StatusCode::UNAVAILABLE);
  service.harness.group.step_time = std::chrono::milliseconds(2);
  std::atomic<bool> fail{false};
  service.harness.group.on_step = [&](const v1::StepRequest&) {
    return fail ? absl::UnavailableError("rank 3 (unix:/tmp/rank3.sock) is gone") : absl::OkStatus();
  };
  service.harness.Start();
  grpc::Status status;
  std::thread client([&] { status = service.Run(Request(900), &responses); });
  while (service.harness.group.steps() < 5) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  fail = true;
  client.join();
  CHECK(status.error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(status.error_message().find("rank") == std::string::npos);
  CHECK(service.Run(Request(5), &responses).error_code() == grpc::StatusCode::UNAVAILABLE);
}

TEST_CASE("deadlines and cancellations free the request") {
  Service service;
  service.harness.group.step_time = std::chrono::milliseconds(2);
  service.harness.Start();
  std::vector<v1::GenerateResponse> responses;
  grpc::ClientContext context;
  SECTION("deadline") {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(60));
    CHECK(service.Run(Request(900), &responses, &context).error_code() ==
          grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  SECTION("cancel") {
    auto reader = service.stub->Generate(&context, Request(900));
    v1::GenerateResponse response;
    REQUIRE(reader->Read(&response));
    context.TryCancel();
    while (reader->Read(&response)) {
    }
    CHECK(reader->Finish().error_code() == grpc::StatusCode::CANCELLED);
  }
  CHECK(service.harness.scheduler->Drain(std::chrono::seconds(10)));
  CHECK(service.harness.scheduler->running() == 0);
}

TEST_CASE("Tokenize, Detokenize and the information calls") {
  Service service;
  service.harness.Start();
  v1::TokenizeRequest tokenize;
  tokenize.set_text("hello world");
  v1::TokenizeResponse tokens;
  {
    grpc::ClientContext context;
    REQUIRE(service.stub->Tokenize(&context, tokenize, &tokens).ok());
  }
  CHECK(tokens.ids_size() > 0);
  v1::DetokenizeRequest detokenize;
  *detokenize.mutable_ids() = tokens.ids();
  v1::DetokenizeResponse text;
  {
    grpc::ClientContext context;
    REQUIRE(service.stub->Detokenize(&context, detokenize, &text).ok());
  }
  CHECK(text.text() == "hello world");
  detokenize.add_ids(5000);
  {
    grpc::ClientContext context;
    const grpc::Status status = service.stub->Detokenize(&context, detokenize, &text);
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(status.error_message().rfind("ids", 0) == 0);
  }
  const grpc::Status garbage = CallRaw(service.channel, "/kdt.v1.Generation/Detokenize", "\xff\xff").status;
  CHECK(garbage.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  v1::TokenizeRequest chat;
  auto* message = chat.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  chat.set_add_generation_prompt(true);
  {
    grpc::ClientContext context;
    REQUIRE(service.stub->Tokenize(&context, chat, &tokens).ok());
  }
  CHECK(tokens.rendered().find("<|im_user|>user<|im_middle|>hi<|im_end|>") != std::string::npos);
  v1::ModelInfo model;
  {
    grpc::ClientContext context;
    REQUIRE(service.stub->GetModelInfo(&context, {}, &model).ok());
  }
  CHECK(model.name() == "golden");
  CHECK(model.vocab_size() == 1024);
  CHECK(model.max_context() == 1024);  // the toy group's
  CHECK(model.checkpoint_digest() == "toy");
  v1::ClusterInfo cluster;
  {
    grpc::ClientContext context;
    REQUIRE(service.stub->GetClusterInfo(&context, {}, &cluster).ok());
  }
  CHECK(cluster.serving());
  CHECK(cluster.epoch() == 1);
  CHECK(cluster.ranks_size() == 1);
}

TEST_CASE("health follows the group") {
  Service service;
  const auto serving = [&](const std::string& name = "") {
    return IsServing(CheckHealth(service.channel, name));
  };
  CHECK_FALSE(serving());
  CHECK(serving("live"));
  service.server->SetServing(true);
  CHECK(serving());
  service.server->SetServing(false);
  CHECK_FALSE(serving());
}

}  // namespace kdt::testing
