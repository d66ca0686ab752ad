#include "tests/gpu/streams.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace kdt::testing {
namespace {

constexpr size_t kMaxPromptTokens = 160;
constexpr uint32_t kChainBudget = 7;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// What request i of a plan samples with.
void SetSampling(size_t i, uint64_t seed, PlannedRequest* planned) {
  v1::SamplingParams* sampling = planned->request.mutable_sampling();
  sampling->set_seed(seed);
  sampling->set_top_p(1);
  sampling->set_top_k(0);
  sampling->set_min_p(0);
  sampling->set_repetition_penalty(1);
  switch (i % 8) {
    case 0:
    case 1:
    case 2:
      planned->kind = "greedy";
      sampling->set_temperature(0);
      break;
    case 3:
    case 4:
      planned->kind = "T 0.7";
      sampling->set_temperature(0.7F);
      break;
    case 5:
      planned->kind = "T 1";
      sampling->set_temperature(1);
      break;
    case 6:
      planned->kind = "T 0.8, penalties";
      sampling->set_temperature(0.8F);
      sampling->set_frequency_penalty(0.3F);
      sampling->set_presence_penalty(0.2F);
      break;
    default:
      planned->kind = "greedy, logprobs";
      sampling->set_temperature(0);
      planned->request.mutable_output()->set_logprobs(2);
      break;
  }
}

Stream RunOne(v1::Generation::Stub& stub, const v1::GenerateRequest& request, std::atomic<uint64_t>* seen) {
  Stream stream;
  grpc::ClientContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  bool complete = false;
  while (reader->Read(&response)) {
    if (response.has_complete()) {
      complete = true;
      const v1::SpeculationStats& speculation = response.complete().speculation();
      stream.rounds = speculation.rounds();
      stream.drafted = speculation.drafted_nodes();
      stream.accepted = speculation.accepted_tokens();
      continue;
    }
    const v1::Chunk& chunk = response.chunk();
    stream.tokens.insert(stream.tokens.end(), chunk.token_ids().begin(), chunk.token_ids().end());
    stream.logprobs.insert(stream.logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
    if (seen != nullptr) *seen += static_cast<uint64_t>(chunk.token_ids_size());
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    stream.error = FromGrpc(status).ToString();
  } else if (!complete) {
    stream.error = "the stream ended without Complete";
  }
  return stream;
}

}  // namespace

absl::StatusOr<Speculation> ParseSpeculation(const std::string& name) {
  Speculation speculation;
  speculation.name = name;
  absl::string_view rest = name;
  uint32_t budget = 0;
  if (name == "off") {
    speculation.params.set_mode(v1::SpeculationParams::OFF);
  } else if (name == "chain") {
    speculation.params.set_mode(v1::SpeculationParams::CHAIN);
    speculation.params.set_budget(kChainBudget);  // or what pays might be nothing
  } else if (name == "auto") {
    speculation.params.set_mode(v1::SpeculationParams::DEFAULT);
  } else if (absl::ConsumePrefix(&rest, "tree ") && absl::SimpleAtoi(rest, &budget)) {
    speculation.params.set_mode(v1::SpeculationParams::TREE);
    speculation.params.set_budget(budget);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is none of off, chain, auto and tree N"));
  }
  return speculation;
}

absl::StatusOr<std::vector<PlannedRequest>> PlanRequests(v1::Generation::Stub& stub,
                                                         const std::string& prompts_file, size_t count,
                                                         uint32_t tokens, uint64_t first_seed) {
  std::ifstream file(prompts_file);
  const nlohmann::json parsed = nlohmann::json::parse(file, nullptr, false);
  if (parsed.is_discarded() || !parsed.contains("prompts") || parsed["prompts"].empty()) {
    return absl::InvalidArgumentError(absl::StrCat(prompts_file, ": no prompts"));
  }
  std::vector<PlannedRequest> requests(count);
  for (size_t i = 0; i < count; ++i) {
    v1::TokenizeRequest tokenize;
    tokenize.set_text(parsed["prompts"][i % parsed["prompts"].size()]["text"].get<std::string>());
    v1::TokenizeResponse prompt;
    grpc::ClientContext context;
    KDT_RETURN_IF_ERROR(FromGrpc(stub.Tokenize(&context, tokenize, &prompt)));
    // Lengths differ, so that rows of a step belong to contexts of many lengths.
    const size_t length = std::min({static_cast<size_t>(prompt.ids_size()), kMaxPromptTokens, 8 + 11 * i});
    PlannedRequest& planned = requests[i];
    for (size_t t = 0; t < length; ++t) {
      planned.request.mutable_token_ids()->add_ids(prompt.ids(static_cast<int>(t)));
    }
    SetSampling(i, first_seed + i, &planned);
    planned.request.mutable_stop()->set_max_tokens(tokens);
    planned.request.mutable_stop()->set_ignore_eos(true);
  }
  return requests;
}

std::vector<Stream> RunStreams(v1::Generation::Stub& stub, const std::vector<PlannedRequest>& requests,
                               const Speculation& speculation, size_t concurrency, uint32_t logprobs,
                               std::atomic<uint64_t>* seen) {
  std::vector<Stream> streams(requests.size());
  std::atomic<size_t> next{0};
  std::vector<std::thread> clients;
  for (size_t c = 0; c < std::min(concurrency, requests.size()); ++c) {
    clients.emplace_back([&] {
      for (size_t i = next++; i < requests.size(); i = next++) {
        v1::GenerateRequest request = requests[i].request;
        *request.mutable_speculation() = speculation.params;
        if (logprobs > 0) request.mutable_output()->set_logprobs(logprobs);
        streams[i] = RunOne(stub, request, seen);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  return streams;
}

}  // namespace kdt::testing
