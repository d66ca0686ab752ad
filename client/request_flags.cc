#include "client/request_flags.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/flags.h"
#include "common/status.h"

namespace kdt {
namespace {

// Comma-separated. Other than absl's list, "" is one empty entry and not as if nothing had been given.
struct Entries {
  std::vector<std::string> list;
};

bool AbslParseFlag(absl::string_view text, Entries* entries, std::string*) {
  entries->list = absl::StrSplit(text, ',');
  return true;
}

std::string AbslUnparseFlag(const Entries& entries) { return absl::StrJoin(entries.list, ","); }

}  // namespace
}  // namespace kdt

ABSL_FLAG(std::optional<float>, temperature, std::nullopt, "0 is greedy");
ABSL_FLAG(std::optional<float>, top_p, std::nullopt, "nucleus");
ABSL_FLAG(std::optional<int>, top_k, std::nullopt, "0: off");
ABSL_FLAG(std::optional<float>, min_p, std::nullopt, "least probability relative to the best token");
ABSL_FLAG(std::optional<float>, repetition_penalty, std::nullopt, "over prompt and generated tokens");
ABSL_FLAG(std::optional<float>, frequency_penalty, std::nullopt, "over generated tokens");
ABSL_FLAG(std::optional<float>, presence_penalty, std::nullopt, "over generated tokens");
ABSL_FLAG(kdt::Entries, logit_bias, {}, "ID:BIAS,...");
ABSL_FLAG(std::optional<uint64_t>, seed, std::nullopt, "the same seed gives the same text");
ABSL_FLAG(std::optional<unsigned>, n, std::nullopt, "samples of one prompt");
ABSL_FLAG(std::optional<unsigned>, max_tokens, std::nullopt, "most tokens to generate");
ABSL_FLAG(unsigned, min_tokens, 0, "tokens before the end may come");
ABSL_FLAG(kdt::Entries, stop, {}, "stop strings, comma-separated");
ABSL_FLAG(bool, ignore_eos, false, "go on behind the end token");
ABSL_FLAG(bool, include_stop, false, "keep the matched stop string in the text");
ABSL_FLAG(unsigned, logprobs, 0,
          "generate: a table of each token's log-probability and the K best, behind the text");
ABSL_FLAG(int, priority, 0, "larger first");
ABSL_FLAG(std::string, speculation, "default", "default, off, chain or tree");
ABSL_FLAG(std::optional<unsigned>, budget, std::nullopt, "drafted nodes a tree; unset: the server's choice");

namespace kdt {

absl::Status RequestFromFlags(v1::GenerateRequest* request) {
  v1::SamplingParams* sampling = request->mutable_sampling();
  if (const auto v = absl::GetFlag(FLAGS_temperature)) sampling->set_temperature(*v);
  if (const auto v = absl::GetFlag(FLAGS_top_p)) sampling->set_top_p(*v);
  if (const auto v = absl::GetFlag(FLAGS_top_k)) sampling->set_top_k(*v);
  if (const auto v = absl::GetFlag(FLAGS_min_p)) sampling->set_min_p(*v);
  if (const auto v = absl::GetFlag(FLAGS_repetition_penalty)) sampling->set_repetition_penalty(*v);
  if (const auto v = absl::GetFlag(FLAGS_frequency_penalty)) sampling->set_frequency_penalty(*v);
  if (const auto v = absl::GetFlag(FLAGS_presence_penalty)) sampling->set_presence_penalty(*v);
  if (const auto v = absl::GetFlag(FLAGS_seed)) sampling->set_seed(*v);
  if (const auto v = absl::GetFlag(FLAGS_n)) sampling->set_n(*v);
  for (const std::string& entry : absl::GetFlag(FLAGS_logit_bias).list) {
    const std::vector<std::string> parts = absl::StrSplit(entry, ':');
    uint32_t id = 0;
    float bias = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &id) || !absl::SimpleAtof(parts[1], &bias)) {
      return absl::InvalidArgumentError(absl::StrCat("--logit_bias: \"", entry, "\" is not ID:BIAS"));
    }
    (*sampling->mutable_logit_bias())[id] = bias;
  }

  v1::StopParams* stop = request->mutable_stop();
  if (const auto v = absl::GetFlag(FLAGS_max_tokens)) stop->set_max_tokens(*v);
  stop->set_min_tokens(absl::GetFlag(FLAGS_min_tokens));
  for (const std::string& text : absl::GetFlag(FLAGS_stop).list) {
    if (text.empty()) return absl::InvalidArgumentError("--stop: a stop string is empty");
    stop->add_stop(text);
  }
  stop->set_ignore_eos(absl::GetFlag(FLAGS_ignore_eos));
  stop->set_include_stop(absl::GetFlag(FLAGS_include_stop));

  request->mutable_output()->set_logprobs(absl::GetFlag(FLAGS_logprobs));
  request->mutable_output()->set_skip_special_tokens(true);
  request->set_priority(absl::GetFlag(FLAGS_priority));

  const std::string mode = absl::GetFlag(FLAGS_speculation);
  v1::SpeculationParams* speculation = request->mutable_speculation();
  if (mode == "default") {
    speculation->set_mode(v1::SpeculationParams::DEFAULT);
  } else if (mode == "off") {
    speculation->set_mode(v1::SpeculationParams::OFF);
  } else if (mode == "chain") {
    speculation->set_mode(v1::SpeculationParams::CHAIN);
  } else if (mode == "tree") {
    speculation->set_mode(v1::SpeculationParams::TREE);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--speculation: \"", mode, "\" is not one of default, off, chain, tree"));
  }
  if (const auto v = absl::GetFlag(FLAGS_budget)) speculation->set_budget(*v);
  if (mode == "off" && FlagIsSet("budget")) return FlagDoesNothing("budget", "with --speculation=off");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GenerationStub>> ConnectForRequests() {
  KDT_ASSIGN_OR_RETURN(std::unique_ptr<GenerationStub> stub, ConnectFromFlags());
  const std::string mode = absl::GetFlag(FLAGS_speculation);
  const char* flag = FlagIsSet("budget")                  ? "budget"
                     : mode != "default" && mode != "off" ? "speculation"
                                                          : nullptr;
  if (flag == nullptr) return stub;
  v1::ModelInfo model;
  grpc::ClientContext context;
  if (const auto status = stub->GetModelInfo(&context, {}, &model); !status.ok())
    return ToAbsl(status, context);
  // What the ranks have loaded is known from when they first were a group.
  const bool known = !model.checkpoint_digest().empty();
  if (known && model.draft_block_size() == 0)
    return FlagDoesNothing(flag, "with a server that has no drafter");
  return stub;
}

}  // namespace kdt
