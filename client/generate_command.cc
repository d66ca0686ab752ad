// kdt generate: streams a completion to the terminal.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/generation_run.h"
#include "client/report.h"
#include "client/request_flags.h"
#include "client/token_text.h"
#include "common/status.h"

ABSL_FLAG(std::string, prompt, "", "text to go on from; \"-\" reads it from standard input");
ABSL_FLAG(bool, echo, true, "print the prompt before its continuation");
ABSL_FLAG(bool, summary, true, "print tokens, seconds and tokens/s at the end");

namespace kdt {
namespace {

struct Sample {
  std::string text;
  std::vector<v1::PositionLogprobs> logprobs;
};

// A line a token, as "id  logprob  token  best": ids and numbers first, for programs that read it.
absl::Status PrintLogprobs(GenerationStub& stub, const std::vector<v1::PositionLogprobs>& positions) {
  std::map<uint32_t, std::string> texts;
  const auto text = [&](const v1::TokenLogprob& token) -> absl::StatusOr<std::string> {
    const auto known = texts.find(token.token_id());
    if (known != texts.end()) return known->second;
    KDT_ASSIGN_OR_RETURN(const std::string quoted, QuotedToken(stub, token.token_id()));
    return texts[token.token_id()] = quoted;
  };
  std::vector<std::vector<std::string>> rows = {{"id", "logprob", "token", "best"}};
  for (const v1::PositionLogprobs& position : positions) {
    std::vector<std::string> best;
    for (const v1::TokenLogprob& top : position.top()) {
      KDT_ASSIGN_OR_RETURN(const std::string token, text(top));
      best.push_back(absl::StrFormat("%s %.4f", token, top.logprob()));
    }
    KDT_ASSIGN_OR_RETURN(const std::string token, text(position.token()));
    rows.push_back({absl::StrCat(position.token().token_id()),
                    absl::StrFormat("%.4f", position.token().logprob()), token, absl::StrJoin(best, ", ")});
  }
  PrintTable(rows);
  return absl::OkStatus();
}

}  // namespace

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
  if (prompt.empty()) return WrongCall("generate needs a prompt: kdt generate \"TEXT\" or --prompt TEXT");
  v1::GenerateRequest request;
  request.set_text(prompt);
  if (const absl::Status status = RequestFromFlags(&request); !status.ok()) return Failed(status);
  absl::StatusOr<std::unique_ptr<GenerationStub>> stub = ConnectForRequests();
  if (!stub.ok()) return Failed(stub.status());

  const bool several = request.sampling().n() > 1;
  std::vector<Sample> samples;  // as many as the server answers: it knows the limit
  const auto run = RunGeneration(**stub, request, [&](uint32_t index, const v1::Chunk& chunk) {
    if (samples.empty() && absl::GetFlag(FLAGS_echo) && !several) {
      std::fwrite(prompt.data(), 1, prompt.size(), stdout);
    }
    if (samples.size() <= index) samples.resize(index + 1);
    Sample& sample = samples[index];
    sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs().begin(), chunk.logprobs().end());
    if (several) {  // samples come interleaved: print them one behind the other at the end
      sample.text += chunk.text();
      return;
    }
    std::fwrite(chunk.text().data(), 1, chunk.text().size(), stdout);
    std::fflush(stdout);
  });
  if (!several && !samples.empty()) std::printf("\n");
  for (size_t i = 0; i < samples.size(); ++i) {
    if (several) std::printf("%s--- sample %zu\n%s\n", i > 0 ? "\n" : "", i, samples[i].text.c_str());
    if (!run.ok() || samples[i].logprobs.empty()) continue;
    std::printf("\n");
    if (const absl::Status status = PrintLogprobs(**stub, samples[i].logprobs); !status.ok()) {
      return Failed(status);
    }
  }
  if (!run.ok()) return Failed(run.status());
  if (absl::GetFlag(FLAGS_summary)) {
    std::printf("\n");
    PrintSummary(*run);
  }
  return 0;
}

}  // namespace kdt
