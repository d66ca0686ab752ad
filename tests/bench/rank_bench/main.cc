// One rank of a full-size model with random weights runs the worker's own steps at any rows, context and
// batch. Beside each time stands the floor: what the step cannot do without. With --ranks all ranks run, each
// on a GPU of its own, with their real collectives; otherwise a stand-in takes their place.
//
//   kdt-rank-bench [--config DIR] [--drafter DIR] [--tp 8] [--rank 0] [--rows 1,8,16,32]
//                  [--context 4096,65536,131072] [--batch 1] [--moe tensor|expert] [--parts] [--json FILE]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/flags.h"
#include "common/status.h"
#include "kdt/kernels/cuda_backend.h"
#include "tests/bench/rank_bench/floor.h"
#include "tests/bench/rank_bench/part_backend.h"
#include "tests/bench/rank_bench/ranks.h"
#include "tests/bench/rank_bench/stand_in.h"
#include "tests/bench/rank_bench/step_bench.h"
#include "worker/collective/factory.h"

ABSL_FLAG(std::string, config, KDT_RANK_BENCH_DIR "/k26", "folder with the target's config.json");
ABSL_FLAG(std::string, drafter, KDT_RANK_BENCH_DIR "/k26_drafter",
          "folder with the drafter's config.json; empty: none");
ABSL_FLAG(int, tp, 8, "tensor-parallel size");
ABSL_FLAG(int, rank, 0, "rank to run");
ABSL_FLAG(int, ranks, 1, "ranks to run, 1 .. tp; ranks that are not there add nothing");
ABSL_FLAG(std::string, collective, "auto", "of all ranks: auto, ipc or nccl");
ABSL_FLAG(std::vector<std::string>, rows, (std::vector<std::string>{"1", "8", "16", "32"}),
          "tree nodes a sequence");
ABSL_FLAG(std::vector<std::string>, context, (std::vector<std::string>{"4096", "65536", "131072"}),
          "tokens before the tree");
ABSL_FLAG(std::vector<std::string>, batch, (std::vector<std::string>{"1"}), "sequences");
ABSL_FLAG(int64_t, max_rows, 64, "rows of the largest step");
ABSL_FLAG(std::string, moe, "tensor", "tensor or expert");
ABSL_FLAG(bool, floors, false,
          "print the floors alone, for the machine of the three flags below; needs no GPU");
ABSL_FLAG(double, floor_tb_per_s, 4.1, "memory rate of the floor");
ABSL_FLAG(double, floor_tflop_per_s, 638, "arithmetic rate of the floor");
ABSL_FLAG(double, floor_reduce_us, 8, "a reduction in the floor");
ABSL_FLAG(double, reduce_us, 8,
          "what a reduction with its norm takes by itself where the other ranks are not there: they come so "
          "late; 0: they are always there");
ABSL_FLAG(bool, parts, false, "time by part as well");
ABSL_FLAG(bool, eager, false, "the same shapes op by op, without graphs");
ABSL_FLAG(int, warm_up, 5, "steps before measuring");
ABSL_FLAG(int, steps, 31, "measured steps");
ABSL_FLAG(std::string, json, "", "file for the results");

namespace kdt::bench {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

absl::StatusOr<std::vector<int64_t>> Numbers(const char* flag, const std::vector<std::string>& texts) {
  std::vector<int64_t> numbers;
  for (const std::string& text : texts) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < 1) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": \"", text, "\" is no number above 0"));
    }
    numbers.push_back(number);
  }
  if (numbers.empty()) return absl::InvalidArgumentError(absl::StrCat("--", flag, " is empty"));
  return numbers;
}

struct Result {
  StepShape shape;
  StepTimes times;
  Cost target, drafter;
  double reduce_us = 0;  // one sum with its norm, measured on its own
  double reduce_floor_us = 0;
  // Reductions that are faster here than in the floor get the floor's time.
  double Step() const {
    return times.wall_us + static_cast<double>(target.reductions + drafter.reductions) *
                               std::max(0.0, reduce_floor_us - reduce_us);
  }
  StepParts parts;
};

void Print(const Result& r, bool parts) {
  const double floor = r.target.us + r.drafter.us;
  std::printf(
      "rows %3ld batch %2ld context %6ld  step %8.1f us (%.1f .. %.1f), with the floor's reductions %8.1f, "
      "floor "
      "%7.1f, ratio %.2f | graphs %.1f us, a reduction %.2f us, busiest rank %.2f of the mean's experts\n",
      r.shape.rows, r.shape.batch, r.shape.context, r.times.wall_us, r.times.fastest_us, r.times.slowest_us,
      r.Step(), floor, r.Step() / floor, r.times.graphs_us, r.reduce_us, r.times.rank_imbalance);
  if (!parts && !r.times.graphs.empty()) {
    const v1::StepTimings& t = r.times.timings;
    std::printf("    graphs, device (launch) us:");
    for (const auto& graph : r.times.graphs) std::printf(" %.1f (%.1f)", graph.device_us, graph.launch_us);
    std::printf(
        "; host us: forward to tokens %.1f, draw and commit %.1f, queue kept and draft %.1f, rest %.1f\n",
        t.forward_us(), t.sample_us(), t.draft_us(),
        t.total_us() - t.forward_us() - t.sample_us() - t.draft_us());
  }
  if (parts) {
    std::printf("   ");
    double sum = 0;
    for (int p = 0; p < kParts; ++p) {
      std::printf(" %s %.0f", PartName(static_cast<Part>(p)), r.parts.us[p]);
      sum += r.parts.us[p];
    }
    std::printf("  sum %.0f us (events between parts lengthen them); %.1f experts a layer\n", sum,
                r.parts.experts);
  }
  std::fflush(stdout);
}

void PrintFloor(const Load& load, const Cost& target, const Cost& drafter) {
  std::printf(
      "rows %3ld batch %2ld context %6ld  target %7.1f us: %.2f GB weights (%.1f experts a layer), %.2f GB "
      "KV, %.1f GFLOP, %ld reductions; drafter %6.1f us: %.2f GB, %ld reductions\n",
      load.rows, load.batch, load.context, target.us, target.weight_bytes * 1e-9, target.experts,
      target.kv_bytes * 1e-9, target.flop * 1e-9, target.reductions, drafter.us,
      (drafter.weight_bytes + drafter.kv_bytes) * 1e-9, drafter.reductions);
}

std::string Json(const Result& r, bool parts) {
  std::string text = absl::StrFormat(
      "{\"rows\": %d, \"batch\": %d, \"context\": %d, \"draft\": %s, \"step_us\": %.1f, \"fastest_us\": "
      "%.1f, \"with_floor_reductions_us\": %.1f, \"graphs_us\": %.1f, \"reduce_us\": %.2f, \"ratio\": %.3f, "
      "\"target_floor_us\": %.1f, \"drafter_floor_us\": %.1f, \"weight_bytes\": %.0f, \"kv_bytes\": %.0f, "
      "\"flop\": %.4g, \"reductions\": %d, \"experts\": %.1f, \"rank_imbalance\": %.3f",
      r.shape.rows, r.shape.batch, r.shape.context, r.shape.draft ? "true" : "false", r.times.wall_us,
      r.times.fastest_us, r.Step(), r.times.graphs_us, r.reduce_us, r.Step() / (r.target.us + r.drafter.us),
      r.target.us, r.drafter.us, r.target.weight_bytes + r.drafter.weight_bytes,
      r.target.kv_bytes + r.drafter.kv_bytes, r.target.flop + r.drafter.flop,
      r.target.reductions + r.drafter.reductions, r.target.experts, r.times.rank_imbalance);
  if (parts) {
    std::vector<std::string> entries;
    for (int p = 0; p < kParts; ++p) {
      entries.push_back(absl::StrFormat("\"%s\": %.1f", PartName(static_cast<Part>(p)), r.parts.us[p]));
    }
    text += ", \"parts_us\": {" + absl::StrJoin(entries, ", ") + "}";
  }
  return text + "}";
}

absl::StatusOr<std::unique_ptr<Collective>> MakeGroup(const EngineOptions& options,
                                                      kernels::Backend& device) {
  if (options.tp == 1) return MakeLocalCollective();
  KDT_ASSIGN_OR_RETURN(const CollectiveKind kind,
                       ParseCollectiveKind(absl::GetFlag(FLAGS_collective), "cuda"));
  return MakeCollective(
      {absl::StrCat("rank-bench-", getppid()), options.rank, absl::GetFlag(FLAGS_ranks), absl::Seconds(60)},
      kind, device);
}

// `told`: null for a rank on its own.
absl::Status Run(int rank, Told* told) {
  const int64_t rank_begin = told == nullptr ? rank : 0;
  const bool prints = told == nullptr || rank == 0;
  KDT_ASSIGN_OR_RETURN(const auto rows, Numbers("rows", absl::GetFlag(FLAGS_rows)));
  KDT_ASSIGN_OR_RETURN(const auto contexts, Numbers("context", absl::GetFlag(FLAGS_context)));
  KDT_ASSIGN_OR_RETURN(const auto batches, Numbers("batch", absl::GetFlag(FLAGS_batch)));
  const std::string moe = absl::GetFlag(FLAGS_moe);
  if (moe != "tensor" && moe != "expert")
    return absl::InvalidArgumentError("--moe: neither tensor nor expert");
  const bool parts = absl::GetFlag(FLAGS_parts);
  const int steps = std::max(1, absl::GetFlag(FLAGS_steps)),
            warm_up = std::max(0, absl::GetFlag(FLAGS_warm_up));

  EngineOptions options;
  options.model_dir = absl::GetFlag(FLAGS_config);
  options.drafter_dir = absl::GetFlag(FLAGS_drafter);
  options.random_weights = true;
  options.step_mode = absl::GetFlag(FLAGS_eager) ? StepMode::kEager : StepMode::kAuto;
  options.rank = rank;
  options.tp = absl::GetFlag(FLAGS_tp);
  options.moe_sharding = moe == "expert" ? MoeSharding::kExpert : MoeSharding::kTensor;
  options.kv_dtype = kernels::DType::kBF16;
  options.max_rows = absl::GetFlag(FLAGS_max_rows);
  options.max_sequences = *std::max_element(batches.begin(), batches.end()) + 1;
  const int64_t context = *std::max_element(contexts.begin(), contexts.end());
  // Room for what the measured steps commit.
  options.kv_slots = (options.max_sequences - 1) * (context + 64 * (warm_up + steps + 16)) + options.max_rows;
  KDT_ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(options.model_dir));
  const bool drafts = !options.drafter_dir.empty();
  DrafterConfig drafter;
  if (drafts) {
    KDT_ASSIGN_OR_RETURN(drafter, DrafterConfig::Load(options.drafter_dir));
  }

  const Machine machine{absl::GetFlag(FLAGS_floor_tb_per_s) * 1e12,
                        absl::GetFlag(FLAGS_floor_tflop_per_s) * 1e12, absl::GetFlag(FLAGS_floor_reduce_us)};
  if (absl::GetFlag(FLAGS_floors)) {
    for (const int64_t batch : batches) {
      for (const int64_t c : contexts) {
        for (const int64_t r : rows) {
          const Load load{options.tp, options.moe_sharding, r * batch, batch, c};
          PrintFloor(load, TargetCost(config, load, machine),
                     drafts ? DrafterCost(drafter, config, load, machine) : Cost{});
        }
      }
    }
    return absl::OkStatus();
  }
  KDT_ASSIGN_OR_RETURN(
      const auto device,
      kernels::MakeCudaBackend({told == nullptr ? 0 : rank % std::max(1, kernels::CudaDevices())}));
  ExpertTap tap;
  KDT_RETURN_IF_ERROR(tap.Allocate(*device, config.num_hidden_layers - config.first_k_dense_replace,
                                   options.max_rows, config.num_experts_per_tok));
  PartClock clock(static_cast<cudaStream_t>(device->stream()));
  double prepare_s = 0;
  const auto backend = MakePartBackend(device.get(), &clock, &tap, &prepare_s);
  double start = Seconds();
  uint64_t bytes = 0;
  KDT_ASSIGN_OR_RETURN(const auto engine, Engine::Load(options, backend.get(),
                                                       [&](uint64_t, uint64_t total) { bytes = total; }));
  KDT_RETURN_IF_ERROR(backend->Synchronize());
  const double load_s = Seconds() - start;
  const double weights_gib = static_cast<double>(bytes) / (1 << 30);
  if (prints) {
    std::printf(
        "%s: %.2f GiB of weights in %.1f s, %.3f s of it the experts' layout, and a KV pool of %ld "
        "slots; %.1f GiB of the device in use\n",
        backend->device_name().c_str(), weights_gib, load_s, prepare_s, options.kv_slots,
        backend->memory() ? static_cast<double>(backend->memory()->used_bytes) / (1 << 30) : 0.0);
    std::fflush(stdout);
  }

  std::unique_ptr<StandIn> stand_in;  // of the other ranks
  std::unique_ptr<Collective> real;
  if (told == nullptr && options.tp > 1) {
    KDT_ASSIGN_OR_RETURN(stand_in, MakeStandIn(device.get(), options.rank, options.tp));
  } else {
    KDT_ASSIGN_OR_RETURN(real, MakeGroup(options, *device));
  }
  Collective* const group = stand_in != nullptr ? stand_in.get() : real.get();
  const auto collective = MakePartCollective(group, &clock, options.tp);
  start = Seconds();
  KDT_RETURN_IF_ERROR(engine->StartEpoch(collective.get()));
  const double epoch_s = Seconds() - start;
  const EngineStats stats = engine->stats();
  if (prints) {
    std::printf("start of an epoch: %.2f s, capture of %ld graphs of %ld nodes: %.2f s\n", epoch_s,
                stats.graphs, stats.graph_nodes, stats.capture_seconds);
  }

  const auto be_late = [&](int64_t rows_in_step) {
    const double us = absl::GetFlag(FLAGS_reduce_us);
    if (stand_in == nullptr || us <= 0) return absl::OkStatus();
    return LastFor(*stand_in, *device, rows_in_step, config.hidden_size, us);
  };
  StepBench bench(engine.get(), &clock, &tap, rank, told);
  std::vector<Result> results;
  for (const int64_t batch : batches) {
    for (const int64_t c : contexts) {
      for (const int64_t r : rows) {
        if (r * batch > options.max_rows) continue;
        Result result;
        result.shape = {r, batch, c, drafts, 0, 0};
        const int64_t local = config.vocab_size / options.tp;
        // The embeddings of ranks that are not there are zero.
        result.shape.token_begin = rank_begin * local;
        result.shape.token_end = (rank_begin + absl::GetFlag(FLAGS_ranks)) * local;
        KDT_RETURN_IF_ERROR(be_late(r * batch));
        KDT_ASSIGN_OR_RETURN(result.times, bench.Measure(result.shape, warm_up, steps));
        const Load load{options.tp, options.moe_sharding, r * batch, batch, c};
        result.target = TargetCost(config, load, machine);
        KDT_ASSIGN_OR_RETURN(result.reduce_us,
                             MeasureReduceNorm(*group, *device, r * batch, config.hidden_size));
        // Real ones take what they take.
        if (told == nullptr) result.reduce_floor_us = machine.reduce_us;
        if (drafts) result.drafter = DrafterCost(drafter, config, load, machine);
        if (prints) Print(result, false);
        results.push_back(result);
      }
    }
  }
  if (parts) {
    clock.Enable(true);
    KDT_RETURN_IF_ERROR(engine->StartEpoch(collective.get()));
    bench.Restart();
    for (Result& result : results) {
      KDT_RETURN_IF_ERROR(be_late(result.shape.rows * result.shape.batch));
      KDT_ASSIGN_OR_RETURN(result.parts, bench.MeasureParts(result.shape, 2, 7));
      // The floor counts what was really chosen.
      result.target = TargetCost(config,
                                 {options.tp, options.moe_sharding, result.shape.rows * result.shape.batch,
                                  result.shape.batch, result.shape.context, result.parts.experts},
                                 machine);
      if (prints) Print(result, true);
    }
  }
  // The graphs go before the collective does.
  KDT_RETURN_IF_ERROR(engine->StartEpoch(nullptr));
  if (absl::GetFlag(FLAGS_json).empty() || !prints) return absl::OkStatus();
  std::ofstream file(absl::GetFlag(FLAGS_json));
  file << absl::StrFormat(
      "{\"device\": \"%s\", \"moe\": \"%s\", \"eager\": %s, \"tp\": %d, \"weights_gib\": %.3f, \"load_s\": "
      "%.2f, \"prepare_experts_s\": %.3f, \"epoch_start_s\": %.3f, \"capture_s\": %.3f, \"results\": [\n",
      backend->device_name(), moe, absl::GetFlag(FLAGS_eager) ? "true" : "false", options.tp, weights_gib,
      load_s, prepare_s, epoch_s, stats.capture_seconds);
  for (size_t i = 0; i < results.size(); ++i) {
    file << "  " << Json(results[i], parts) << (i + 1 < results.size() ? ",\n" : "\n");
  }
  file << "]}\n";
  return file ? absl::OkStatus() : absl::InternalError("--json: cannot write");
}

}  // namespace
}  // namespace kdt::bench

int main(int argc, char** argv) {
  kdt::ParseFlags(argc, argv, "kdt-rank-bench [--rows LIST] [--context LIST] [--batch LIST]");
  const int ranks = absl::GetFlag(FLAGS_ranks);
  absl::Status status;
  if (ranks == 1) {
    status = kdt::bench::Run(absl::GetFlag(FLAGS_rank), nullptr);
  } else if (ranks < 1 || ranks > absl::GetFlag(FLAGS_tp)) {
    status = absl::InvalidArgumentError("--ranks is not 1 .. --tp");
  } else {
    status = kdt::bench::RunRanks(ranks, kdt::bench::Run);
  }
  if (!status.ok()) std::fprintf(stderr, "kdt-rank-bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
