// kdt bench: sends requests at a fixed concurrency and reports what a user would feel.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/commands.h"
#include "client/connection.h"
#include "client/generation_run.h"
#include "client/percentiles.h"
#include "client/report.h"
#include "client/request_flags.h"
#include "common/flags.h"
#include "common/json_fault.h"
#include "common/status.h"

ABSL_FLAG(int, concurrency, 1, "requests under way at once");
ABSL_FLAG(int, requests, 16, "requests in all");
ABSL_FLAG(int, warmup, 1, "requests before those that count");
ABSL_FLAG(int, prompt_tokens, 64, "length of the made-up prompts");
ABSL_FLAG(int, output_tokens, 64, "tokens to generate each; with made-up prompts the end token is ignored");
ABSL_FLAG(std::string, prompts, "", "JSON file of prompt texts, taken in turn, instead of made-up ones");
ABSL_FLAG(bool, json, false, "print one JSON object instead of the table");

namespace kdt {
namespace {

struct Load {
  std::vector<v1::GenerateRequest> requests;  // taken in turn
  int count = 0;
  int concurrency = 1;
};

struct Totals {
  std::vector<double> first_token, gap, end_to_end, tokens_per_second;
  uint64_t tokens = 0, rounds = 0, drafted = 0, accepted = 0, failed = 0;
  std::string first_error;
  double seconds = 0;

  void Add(const GenerationRun& run) {
    first_token.push_back(run.first_token_seconds);
    end_to_end.push_back(run.seconds);
    gap.insert(gap.end(), run.token_gaps.begin(), run.token_gaps.end());
    const double decode = run.seconds - run.first_token_seconds;
    if (run.tokens > 1 && decode > 0)
      tokens_per_second.push_back(static_cast<double>(run.tokens - 1) / decode);
    tokens += run.tokens;
    for (const v1::Complete& complete : run.complete) {
      rounds += complete.speculation().rounds();
      drafted += complete.speculation().drafted_nodes();
      accepted += complete.speculation().accepted_tokens();
    }
  }
};

absl::StatusOr<std::vector<v1::GenerateRequest>> MadeUpRequests(GenerationStub& stub,
                                                                const v1::GenerateRequest& base, int count) {
  v1::ModelInfo model;
  grpc::ClientContext context;
  if (const auto status = stub.GetModelInfo(&context, {}, &model); !status.ok())
    return ToAbsl(status, context);
  // Ids of ordinary tokens: the last 256 are reserved for control tokens.
  if (model.vocab_size() <= 256) return absl::InternalError("the model has no ordinary tokens");
  std::mt19937_64 random(1);
  std::uniform_int_distribution<uint32_t> id(0, model.vocab_size() - 257);
  std::vector<v1::GenerateRequest> requests(static_cast<size_t>(count), base);
  for (v1::GenerateRequest& request : requests) {
    for (int i = 0; i < absl::GetFlag(FLAGS_prompt_tokens); ++i)
      request.mutable_token_ids()->add_ids(id(random));
    request.mutable_stop()->set_ignore_eos(true);
  }
  return requests;
}

absl::StatusOr<std::vector<v1::GenerateRequest>> RequestsFromFile(const std::string& path,
                                                                  const v1::GenerateRequest& base) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("--prompts: cannot read ", path));
  const std::string content((std::istreambuf_iterator<char>(file)), {});
  KDT_ASSIGN_OR_RETURN(const nlohmann::json parsed, ParseJson(content, absl::StrCat("--prompts: ", path)));
  const nlohmann::json& list = parsed.is_object() && parsed.contains("prompts") ? parsed["prompts"] : parsed;
  const auto bad = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "--prompts: ", path,
        " is neither a list of texts (or of objects with a \"text\") nor an object with such \"prompts\""));
  };
  if (!list.is_array() || list.empty()) return bad();
  std::vector<v1::GenerateRequest> requests;
  for (const nlohmann::json& entry : list) {
    const nlohmann::json& text = entry.is_object() && entry.contains("text") ? entry["text"] : entry;
    if (!text.is_string()) return bad();
    requests.push_back(base);
    requests.back().set_text(text.get<std::string>());
  }
  return requests;
}

Totals RunLoad(GenerationStub& stub, const Load& load) {
  Totals totals;
  std::mutex mutex;
  std::atomic<int> next{0};
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < load.concurrency; ++i) {
    threads.emplace_back([&] {
      for (int at = next++; at < load.count; at = next++) {
        const auto run =
            RunGeneration(stub, load.requests[static_cast<size_t>(at) % load.requests.size()], nullptr);
        const std::lock_guard<std::mutex> lock(mutex);
        if (run.ok()) {
          totals.Add(*run);
        } else if (totals.failed++ == 0) {
          totals.first_error = std::string(run.status().ToString(absl::StatusToStringMode::kWithNoExtraData));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  totals.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return totals;
}

nlohmann::json Summary(Totals& totals) {
  nlohmann::json out;
  const auto spread = [](std::vector<double>& values, double scale) {
    return nlohmann::json{{"p50", scale * Quantile(values, 0.5)},
                          {"p90", scale * Quantile(values, 0.9)},
                          {"p99", scale * Quantile(values, 0.99)}};
  };
  out["requests"] = totals.end_to_end.size();
  out["failed"] = totals.failed;
  out["seconds"] = totals.seconds;
  out["tokens"] = totals.tokens;
  out["throughput_tokens_per_second"] = static_cast<double>(totals.tokens) / totals.seconds;
  out["requests_per_second"] = static_cast<double>(totals.end_to_end.size()) / totals.seconds;
  out["time_to_first_token_ms"] = spread(totals.first_token, 1e3);
  out["inter_token_ms"] = spread(totals.gap, 1e3);
  out["end_to_end_ms"] = spread(totals.end_to_end, 1e3);
  out["tokens_per_second_a_request"] = spread(totals.tokens_per_second, 1);
  out["rounds"] = totals.rounds;
  out["drafted_nodes"] = totals.drafted;
  out["accepted_tokens"] = totals.accepted;
  out["tokens_a_round"] =
      totals.rounds > 0 ? static_cast<double>(totals.tokens) / static_cast<double>(totals.rounds) : 0;
  return out;
}

void PrintSpread(const char* name, const nlohmann::json& spread) {
  std::printf("  %-30s %10.2f %10.2f %10.2f\n", name, spread["p50"].get<double>(),
              spread["p90"].get<double>(), spread["p99"].get<double>());
}

void PrintSummaryTable(const Totals& totals, int concurrency, const nlohmann::json& out) {
  std::printf("%zu requests, %d at once, %llu tokens in %.2f s: %.1f tokens/s, %.2f requests/s\n",
              totals.end_to_end.size(), concurrency, static_cast<unsigned long long>(totals.tokens),
              totals.seconds, out["throughput_tokens_per_second"].get<double>(),
              out["requests_per_second"].get<double>());
  std::printf("  %-30s %10s %10s %10s\n", "", "p50", "p90", "p99");
  PrintSpread("time to first token (ms)", out["time_to_first_token_ms"]);
  PrintSpread("inter-token time (ms)", out["inter_token_ms"]);
  PrintSpread("end to end (ms)", out["end_to_end_ms"]);
  PrintSpread("tokens/s a request", out["tokens_per_second_a_request"]);
  if (totals.drafted > 0)
    std::printf("  %-30s %10.2f\n", "tokens a round", out["tokens_a_round"].get<double>());
}

}  // namespace

int BenchCommand(const std::vector<std::string>& args) {
  if (!args.empty()) return WrongCall("bench takes flags only");
  Load load;
  load.count = absl::GetFlag(FLAGS_requests);
  load.concurrency = absl::GetFlag(FLAGS_concurrency);
  const int warmup = absl::GetFlag(FLAGS_warmup);
  const int output_tokens = absl::GetFlag(FLAGS_output_tokens);
  if (load.count < 1 || load.count > 1000000) return WrongCall("--requests: not in 1..1000000");
  if (load.concurrency < 1 || load.concurrency > 1024) return WrongCall("--concurrency: not in 1..1024");
  if (warmup < 0 || warmup > 1000) return WrongCall("--warmup: not in 0..1000");
  if (output_tokens < 1) return WrongCall("--output_tokens: less than 1");
  if (absl::GetFlag(FLAGS_prompt_tokens) < 1) return WrongCall("--prompt_tokens: less than 1");

  if (!absl::GetFlag(FLAGS_prompts).empty() && FlagIsSet("prompt_tokens"))
    return WrongCall("--prompt_tokens: it is for made-up prompts, not for those of --prompts");
  v1::GenerateRequest base;
  if (const absl::Status status = RequestFromFlags(&base); !status.ok()) return Failed(status);
  if (base.stop().has_max_tokens() && FlagIsSet("output_tokens"))
    return WrongCall("--max_tokens and --output_tokens: one of them is enough");
  if (!base.stop().has_max_tokens())
    base.mutable_stop()->set_max_tokens(static_cast<uint32_t>(output_tokens));
  const auto stub = ConnectForRequests();
  if (!stub.ok()) return Failed(stub.status());
  const std::string path = absl::GetFlag(FLAGS_prompts);
  auto requests =
      path.empty() ? MadeUpRequests(**stub, base, load.count + warmup) : RequestsFromFile(path, base);
  if (!requests.ok()) return Failed(requests.status());
  load.requests = *std::move(requests);

  Load warm = load;
  warm.count = warmup;
  std::reverse(warm.requests.begin(),
               warm.requests.end());  // so that its prompts are not the first ones measured
  if (const Totals totals = RunLoad(**stub, warm); totals.failed > 0) return WrongCall(totals.first_error);
  Totals totals = RunLoad(**stub, load);
  const nlohmann::json out = Summary(totals);
  if (absl::GetFlag(FLAGS_json)) {
    std::printf("%s\n", out.dump().c_str());
  } else {
    PrintSummaryTable(totals, load.concurrency, out);
  }
  if (totals.failed == 0) return 0;
  std::fprintf(stderr, "kdt: %llu requests failed; the first: %s\n",
               static_cast<unsigned long long>(totals.failed), totals.first_error.c_str());
  return 1;
}

}  // namespace kdt
