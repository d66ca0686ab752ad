// Plain decoding of one request at tensor-parallel size 1, in process, beside the rate at which this program
// streams the same weights through memory with the same threads. Decoding is bound by reading weights, so the
// second is the yardstick.
//
// Then the time of a step that verifies a tree, by its rows.
//
//   decode_bench --model deploy/models/kimi-tiny [--drafter DIR] [--threads N] [--prompt N] [--tokens N]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "common/flags.h"
#include "common/model_config.h"
#include "common/status.h"
#include "kdt/kernels/backend.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/bench/memory_stream.h"
#include "worker/collective/collective.h"
#include "worker/engine/engine.h"

ABSL_FLAG(std::string, model, "", "checkpoint folder");
ABSL_FLAG(std::string, drafter, "", "drafter's folder; empty: none");
ABSL_FLAG(int, threads, 1, "compute threads");
ABSL_FLAG(int, prompt, 64, "tokens of context before the first decoded token");
ABSL_FLAG(int, tokens, 256, "tokens to decode");
ABSL_FLAG(double, temperature, 0, "of sampling; 0: greedy");
ABSL_FLAG(double, top_p, 1, "of sampling");
ABSL_FLAG(int, repeats, 5, "runs of either measurement; the median counts");

namespace kdt {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processor time of all threads, which other programs on the machine do not lengthen.
double CpuMicros() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Weights that one token makes the forward read: all but the other tokens' embeddings and the experts not
// chosen.
uint64_t BytesAToken(const ModelConfig& config, uint64_t shard_bytes) {
  constexpr double kInt4Bytes = 0.5 + 2.0 / 32;  // a value and its share of a bf16 scale
  const double expert = 3.0 * static_cast<double>(config.moe_intermediate_size) *
                        static_cast<double>(config.hidden_size) * kInt4Bytes;
  const auto idle = static_cast<double>(config.n_routed_experts - config.num_experts_per_tok);
  const auto layers = static_cast<double>(config.num_hidden_layers - config.first_k_dense_replace);
  const double embeddings =
      2.0 * static_cast<double>(config.vocab_size - 1) * static_cast<double>(config.hidden_size);
  return shard_bytes - static_cast<uint64_t>(layers * idle * expert + embeddings);
}

// Bytes a second at which the threads read `bytes`.
double StreamRate(uint64_t bytes, int threads, int repeats) {
  constexpr uint64_t kPiece = 1 << 16;
  const uint64_t pieces = (bytes + kPiece - 1) / kPiece;
  std::vector<uint64_t> data(pieces * kPiece / sizeof(uint64_t), 1);
  kernels::cpu::ThreadPool pool(threads);
  std::vector<uint64_t> sums(pieces);
  constexpr int kPasses = 20;
  std::vector<double> seconds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double start = Seconds();
    for (int pass = 0; pass < kPasses; ++pass) {
      pool.Run(static_cast<int64_t>(pieces), [&](int task, int) {
        sums[task] += bench::StreamRead(data.data() + task * (kPiece / sizeof(uint64_t)), kPiece);
      });
    }
    seconds.push_back((Seconds() - start) / kPasses);
  }
  if (sums[0] == 0) std::printf("nothing was read\n");
  return static_cast<double>(pieces * kPiece) / Median(seconds);
}

// Fills a step that starts sequence 1 with a prompt.
v1::StepRequest PrefillStep(const ModelConfig& config, int prompt) {
  v1::StepRequest request;
  request.set_step(1);
  v1::CreateSequence* create = request.add_ops()->mutable_create();
  create->set_sequence_id(1);
  create->mutable_sampling()->set_temperature(static_cast<float>(absl::GetFlag(FLAGS_temperature)));
  create->mutable_sampling()->set_top_p(static_cast<float>(absl::GetFlag(FLAGS_top_p)));
  create->mutable_sampling()->set_repetition_penalty(1);
  v1::PrefillChunk* chunk = request.add_prefill();
  chunk->set_sequence_id(1);
  chunk->set_sample(true);
  for (int i = 0; i < prompt; ++i) chunk->add_tokens(static_cast<uint32_t>((i * 7919) % config.vocab_size));
  return request;
}

// Median step time, with its phases, of one tree of `nodes` random nodes behind the prompt: what a node more
// costs.
absl::Status PrintVerify(Engine& engine, Collective* collective, const ModelConfig& config, int prompt,
                         int nodes, bool draft) {
  constexpr int kSteps = 40;
  KDT_RETURN_IF_ERROR(engine.StartEpoch(collective));
  v1::StepResponse response;
  KDT_RETURN_IF_ERROR(engine.Step(PrefillStep(config, prompt), &response));
  std::vector<double> cpu, total, forward, drafting, sample;
  uint32_t start = prompt;
  for (int i = 0; i < kSteps; ++i) {
    v1::StepRequest step;
    step.set_step(2 + i);
    v1::TreeVerify* verify = step.add_verify();
    verify->set_sequence_id(1);
    verify->set_start(start);
    if (draft) verify->set_draft_top_k(16);
    for (int n = 0; n < nodes; ++n) {
      verify->add_tokens(static_cast<uint32_t>((n * 977 + i * 131) % config.vocab_size));
      if (n > 0) verify->add_parents(static_cast<uint32_t>((n - 1) / 2));
    }
    const double before = CpuMicros();
    KDT_RETURN_IF_ERROR(engine.Step(step, &response));
    cpu.push_back(CpuMicros() - before);
    start += 1 + response.results(0).accepted_nodes_size();
    total.push_back(response.timings().total_us());
    forward.push_back(response.timings().forward_us());
    drafting.push_back(response.timings().draft_us());
    sample.push_back(response.timings().sample_us());
  }
  std::printf("verify %3d rows      %.0f us (processors %.0f): forward %.0f, sample %.0f, draft %.0f\n",
              nodes, Median(total), Median(cpu), Median(forward), Median(sample), Median(drafting));
  return absl::OkStatus();
}

absl::Status Run() {
  const std::string model = absl::GetFlag(FLAGS_model);
  const int threads = absl::GetFlag(FLAGS_threads);
  const int tokens = absl::GetFlag(FLAGS_tokens);
  const int repeats = std::max(1, absl::GetFlag(FLAGS_repeats));
  const int prompt = absl::GetFlag(FLAGS_prompt);
  if (tokens < 1 || prompt < 1) return absl::InvalidArgumentError("--tokens and --prompt must be at least 1");
  KDT_ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(model));
  KDT_ASSIGN_OR_RETURN(const auto backend, kernels::MakeCpuBackend(threads));
  EngineOptions options;
  options.model_dir = model;
  options.drafter_dir = absl::GetFlag(FLAGS_drafter);
  options.kv_slots = prompt + tokens + 512;
  options.max_rows = prompt + 64;
  options.max_sequences = 2;
  uint64_t shard_bytes = 0;
  KDT_ASSIGN_OR_RETURN(const auto engine, Engine::Load(options, backend.get(), [&](uint64_t, uint64_t total) {
                         shard_bytes = total;
                       }));
  const auto collective = MakeLocalCollective();

  std::vector<double> seconds;
  v1::StepResponse response;
  std::vector<v1::StepTimings> timings;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    KDT_RETURN_IF_ERROR(engine->StartEpoch(collective.get()));
    KDT_RETURN_IF_ERROR(engine->Step(PrefillStep(config, prompt), &response));
    const double start = Seconds();
    for (int i = 0; i < tokens; ++i) {
      v1::StepRequest step;
      step.set_step(2 + i);
      v1::TreeVerify* verify = step.add_verify();
      verify->set_sequence_id(1);
      verify->set_start(prompt + i);
      verify->add_tokens(response.results(0).tokens(0));
      KDT_RETURN_IF_ERROR(engine->Step(step, &response));
      timings.push_back(response.timings());
    }
    seconds.push_back((Seconds() - start) / tokens);
  }

  const auto phase = [&](float (v1::StepTimings::*get)() const) {
    std::vector<double> values;
    for (const v1::StepTimings& t : timings) values.push_back((t.*get)());
    return Median(values);
  };
  const double a_token = Median(seconds);
  const uint64_t read = BytesAToken(config, shard_bytes);
  const double stream = StreamRate(shard_bytes, threads, repeats);
  const double decode_gb = static_cast<double>(read) / a_token / 1e9;
  const double bar = 0.5 * stream / static_cast<double>(shard_bytes);
  std::printf("threads              %d\n", threads);
  std::printf("weights              %.2f MB, %.2f MB of them read a token\n",
              static_cast<double>(shard_bytes) / 1e6, static_cast<double>(read) / 1e6);
  std::printf("decode               %.0f tokens/s, %.0f us a token, %.2f GB/s of weights\n", 1 / a_token,
              a_token * 1e6, decode_gb);
  std::printf(
      "  median step, us    %.0f: forward %.0f (attention %.0f, moe %.0f, dense %.0f), sample %.0f, draft "
      "%.0f\n",
      phase(&v1::StepTimings::total_us), phase(&v1::StepTimings::forward_us),
      phase(&v1::StepTimings::attention_us), phase(&v1::StepTimings::moe_us),
      phase(&v1::StepTimings::dense_us), phase(&v1::StepTimings::sample_us),
      phase(&v1::StepTimings::draft_us));
  std::printf("stream               %.2f GB/s, all weights %.0f times a second\n", stream / 1e9,
              stream / static_cast<double>(shard_bytes));
  std::printf("decode / stream      %.2f tokens for each pass over all weights (bar: 0.50, %.0f tokens/s)\n",
              0.5 / a_token / bar, bar);
  std::printf("bytes read / stream  %.2f\n", decode_gb * 1e9 / stream);
  for (int nodes : {1, 2, 4, 8, 16, 32, 64}) {
    KDT_RETURN_IF_ERROR(
        PrintVerify(*engine, collective.get(), config, prompt, nodes, !absl::GetFlag(FLAGS_drafter).empty()));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kdt

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "decode_bench --model DIR [--threads N]");
  const absl::Status status = kdt::Run();
  if (!status.ok()) std::fprintf(stderr, "decode_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
