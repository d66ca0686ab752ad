// Requests that tests make, and a call that brings an API key.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kdt/v1/generation.grpc.pb.h"

namespace kdt::testing {

// Any few tokens of the golden model's.
inline const std::vector<uint32_t> kShortPrompt = {703, 80, 91, 337, 269};

// `max_tokens` tokens behind `prompt`, whatever the model would end with.
inline v1::GenerateRequest RequestFor(const std::vector<uint32_t>& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_stop()->set_max_tokens(max_tokens);
  request.mutable_stop()->set_ignore_eos(true);
  return request;
}

// Greedily.
inline v1::GenerateRequest GreedyRequest(const std::vector<uint32_t>& prompt, uint32_t max_tokens) {
  v1::GenerateRequest request = RequestFor(prompt, max_tokens);
  request.mutable_sampling()->set_temperature(0);
  return request;
}

// Runs the request with an API key (empty: none) to its end and counts its tokens.
inline grpc::Status GenerateWithKey(const std::shared_ptr<grpc::Channel>& channel,
                                    const v1::GenerateRequest& request, const std::string& key, int* tokens) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
  const auto stub = v1::Generation::NewStub(channel);
  const auto reader = stub->Generate(&context, request);
  v1::GenerateResponse response;
  while (reader->Read(&response)) *tokens += response.chunk().token_ids_size();
  return reader->Finish();
}

}  // namespace kdt::testing
