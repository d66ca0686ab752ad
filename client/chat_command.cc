// kdt chat: one turn (--message) or a conversation read line by line from standard input.
#include <cstdio>
#include <iostream>
#include <string>

#include "absl/flags/flag.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/generation_run.h"
#include "client/report.h"
#include "client/request_flags.h"

ABSL_FLAG(std::string, message, "", "the user's message; empty: a conversation from standard input");
ABSL_FLAG(std::string, system, "", "system message");
ABSL_FLAG(bool, thinking, true, "let the model think before it answers");

namespace kdt {
namespace {

// Streams one answer and appends it to the conversation.
absl::Status Turn(GenerationStub& stub, v1::GenerateRequest* request, const std::string& message) {
  v1::Chat* chat = request->mutable_chat();
  v1::ChatMessage* user = chat->add_messages();
  user->set_role("user");
  user->set_content(message);
  std::string text, reasoning;
  std::vector<v1::ToolCall> calls;
  const auto run = RunGeneration(stub, *request, [&](uint32_t, const v1::Chunk& chunk) {
    if (reasoning.empty() && !chunk.reasoning_text().empty()) std::printf("(thinking) ");
    std::fwrite(chunk.reasoning_text().data(), 1, chunk.reasoning_text().size(), stdout);
    if (text.empty() && !chunk.text().empty() && !reasoning.empty()) std::printf("\n");
    std::fwrite(chunk.text().data(), 1, chunk.text().size(), stdout);
    std::fflush(stdout);
    reasoning += chunk.reasoning_text();
    text += chunk.text();
    calls.insert(calls.end(), chunk.tool_calls().begin(), chunk.tool_calls().end());
  });
  std::printf("\n");
  if (!run.ok()) return run.status();
  v1::ChatMessage* assistant = chat->add_messages();
  assistant->set_role("assistant");
  assistant->set_content(text);
  assistant->set_reasoning_content(reasoning);
  for (const v1::ToolCall& call : calls) {
    std::printf("tool call %s: %s(%s)\n", call.id().c_str(), call.name().c_str(),
                call.arguments_json().c_str());
    *assistant->add_tool_calls() = call;
  }
  return absl::OkStatus();
}

}  // namespace

int ChatCommand(const std::vector<std::string>& args) {
  if (!args.empty()) return WrongCall("chat takes flags only: kdt chat --message TEXT");
  v1::GenerateRequest request;
  if (const absl::Status status = RequestFromFlags(&request); !status.ok()) return Failed(status);
  request.mutable_chat()->set_thinking(absl::GetFlag(FLAGS_thinking));
  if (const std::string system = absl::GetFlag(FLAGS_system); !system.empty()) {
    v1::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role("system");
    message->set_content(system);
  }
  absl::StatusOr<std::unique_ptr<GenerationStub>> stub = ConnectForRequests();
  if (!stub.ok()) return Failed(stub.status());

  if (const std::string message = absl::GetFlag(FLAGS_message); !message.empty()) {
    const absl::Status status = Turn(**stub, &request, message);
    return status.ok() ? 0 : Failed(status);
  }
  std::string line;
  while (std::printf("> "), std::fflush(stdout), std::getline(std::cin, line)) {
    if (line.empty()) continue;
    if (const absl::Status status = Turn(**stub, &request, line); !status.ok()) return Failed(status);
  }
  std::printf("\n");
  return 0;
}

}  // namespace kdt
