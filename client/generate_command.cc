// kdt generate: streams a completion to the terminal.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>

#include "absl/flags/flag.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/generation_run.h"
#include "client/report.h"
#include "client/request_flags.h"

ABSL_FLAG(std::string, prompt, "", "text to go on from; \"-\" reads it from standard input");
ABSL_FLAG(bool, echo, true, "print the prompt before its continuation");
ABSL_FLAG(bool, summary, true, "print tokens, seconds and tokens/s at the end");

namespace kdt {

int GenerateCommand(const std::vector<std::string>& args) {
  std::string prompt = absl::GetFlag(FLAGS_prompt);
  if (args.size() == 1 && prompt.empty()) {
    prompt = args[0];
  } else if (!args.empty()) {
    return WrongCall("generate takes one prompt: kdt generate \"TEXT\" or --prompt TEXT");
  }
  if (prompt == "-") {
    prompt.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  v1::GenerateRequest request;
  request.set_text(prompt);
  if (const absl::Status status = RequestFromFlags(&request); !status.ok()) return Failed(status);
  absl::StatusOr<std::unique_ptr<GenerationStub>> stub = ConnectFromFlags();
  if (!stub.ok()) return Failed(stub.status());

  const bool several = request.sampling().n() > 1;
  std::vector<std::string> samples;  // as many as the server answers: it knows the limit
  if (absl::GetFlag(FLAGS_echo) && !several) std::fwrite(prompt.data(), 1, prompt.size(), stdout);
  const auto run = RunGeneration(**stub, request, [&](uint32_t index, const v1::Chunk& chunk) {
    if (several) {  // samples come interleaved: print them one behind the other at the end
      if (samples.size() <= index) samples.resize(index + 1);
      samples[index] += chunk.text();
      return;
    }
    std::fwrite(chunk.text().data(), 1, chunk.text().size(), stdout);
    for (const v1::PositionLogprobs& position : chunk.logprobs()) PrintLogprobs(position);
    std::fflush(stdout);
  });
  for (size_t i = 0; i < samples.size(); ++i) std::printf("--- sample %zu\n%s\n", i, samples[i].c_str());
  std::printf("\n");
  if (!run.ok()) return Failed(run.status());
  if (absl::GetFlag(FLAGS_summary)) {
    std::printf("\n");
    PrintSummary(*run);
  }
  return 0;
}

}  // namespace kdt
