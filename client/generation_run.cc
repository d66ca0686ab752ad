#include "client/generation_run.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace kdt {
namespace {

std::string HowItEnded(const v1::Complete& complete) {
  switch (complete.finish_reason()) {
    case v1::STOP:
      return complete.has_stop_token_id()
                 ? absl::StrCat("stop token ", complete.stop_token_id())
                 : absl::StrCat("stop string \"", absl::Utf8SafeCEscape(complete.stop_string()), "\"");
    case v1::LENGTH:
      return "max_tokens, or the context's end";
    case v1::TOOL_CALLS:
      return "tool calls";
    default:
      return "unknown";
  }
}

}  // namespace

absl::StatusOr<GenerationRun> RunGeneration(GenerationStub& stub, const v1::GenerateRequest& request,
                                            const ChunkHandler& on_chunk) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto seconds_since = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };

  GenerationRun run;
  const uint32_t samples = request.sampling().has_n() ? request.sampling().n() : 1;
  std::vector<bool> done;  // grows with the answers: how many are allowed is the server's to say
  auto last_token = start;

  grpc::ClientContext context;
  auto reader = stub.Generate(&context, request);
  v1::GenerateResponse response;
  bool unknown_index = false;
  while (reader->Read(&response)) {
    if (response.index() >= samples) {
      unknown_index = true;
      context.TryCancel();
      break;
    }
    if (response.has_complete()) {
      if (done.size() <= response.index()) {
        done.resize(response.index() + 1, false);
        run.complete.resize(response.index() + 1);
      }
      done[response.index()] = true;
      run.complete[response.index()] = response.complete();
      continue;
    }
    const int count = response.chunk().token_ids_size();
    if (count > 0) {
      if (run.tokens == 0) {
        run.first_token_seconds = seconds_since(start);
      } else {
        for (int i = 0; i < count; ++i) run.token_gaps.push_back(seconds_since(last_token) / count);
      }
      last_token = Clock::now();
      run.tokens += static_cast<uint64_t>(count);
    }
    if (on_chunk) on_chunk(response.index(), response.chunk());
  }
  const grpc::Status status = reader->Finish();
  run.seconds = seconds_since(start);
  if (unknown_index) return absl::InternalError("the server sent a sample that was not asked for");
  if (!status.ok()) return ToAbsl(status, context);
  if (std::count(done.begin(), done.end(), true) != static_cast<int64_t>(samples)) {
    return absl::InternalError("the stream ended without its Complete message");
  }
  return run;
}

void PrintSummary(const GenerationRun& run) {
  uint64_t rounds = 0, spoken_for = 0, drafted = 0, accepted = 0;
  for (const v1::Complete& complete : run.complete) {
    rounds += complete.speculation().rounds();
    drafted += complete.speculation().drafted_nodes();
    accepted += complete.speculation().accepted_tokens();
    spoken_for += complete.usage().completion_tokens();
  }
  const double decode_seconds = run.seconds - run.first_token_seconds;
  std::printf("  %-22s %10llu\n", "tokens", static_cast<unsigned long long>(run.tokens));
  std::printf("  %-22s %10.3f\n", "seconds", run.seconds);
  std::printf("  %-22s %10.3f\n", "first token after (s)", run.first_token_seconds);
  if (run.tokens > 1 && decode_seconds > 0) {
    std::printf("  %-22s %10.1f\n", "tokens/s", static_cast<double>(run.tokens - 1) / decode_seconds);
  }
  if (drafted > 0 && rounds > 0) {
    std::printf("  %-22s %10.2f\n", "tokens a round",
                static_cast<double>(spoken_for) / static_cast<double>(rounds));
    std::printf("  %-22s %6llu of %llu\n", "drafted tokens kept", static_cast<unsigned long long>(accepted),
                static_cast<unsigned long long>(drafted));
  }
  // Of several samples the first: the next ones' seeds follow.
  std::printf("  %-22s %10llu\n", "seed", static_cast<unsigned long long>(run.complete.front().seed()));
  if (run.complete.size() == 1) {
    std::printf("  %-22s %s\n", "ended by", HowItEnded(run.complete.front()).c_str());
  }
}

}  // namespace kdt
