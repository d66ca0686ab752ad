// Calls with any bytes and any metadata, where no generated code is at hand.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

namespace kdt::testing {

struct RawAnswer {
  grpc::Status status;
  std::string bytes;  // the first message, empty when none came
};

// One message to `method`, at most one back. `authorization` is sent as metadata unless it is empty.
inline RawAnswer CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                         const std::string& bytes, const std::string& authorization = "") {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
  auto call = stub.PrepareCall(&context, method, &queue);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  RawAnswer answer;
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(&stub);
  queue.Next(&tag, &ok);
  call->WriteLast(request, grpc::WriteOptions(), &stub);
  queue.Next(&tag, &ok);
  call->Read(&response, &stub);
  queue.Next(&tag, &ok);
  grpc::Slice joined;
  if (ok && response.DumpToSingleSlice(&joined).ok()) {
    answer.bytes.assign(reinterpret_cast<const char*>(joined.begin()), joined.size());
  }
  call->Finish(&answer.status, &stub);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return answer;
}

// grpc.health.v1: HealthCheckRequest{service = 1}; HealthCheckResponse{status: n} is the bytes 08 0n.
inline RawAnswer CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service = "") {
  std::string request;
  if (!service.empty()) request = std::string{'\x0a', static_cast<char>(service.size())} + service;
  return CallRaw(channel, "/grpc.health.v1.Health/Check", request);
}
inline bool IsServing(const RawAnswer& answer) { return answer.status.ok() && answer.bytes == "\x08\x01"; }

}  // namespace kdt::testing
