// Steps of the CUDA engine: graphs, padding, the seal, full pools, long runs.
#include <algorithm>
#include <chrono>
#include <random>

#include "tests/worker/engine/cuda_group.h"
#include "tests/worker/engine/step_mix.h"
#include "tests/worker/support/checkpoint_copy.h"

namespace kdt::testing {
namespace {

std::unique_ptr<EngineGroup> Start(const EngineOptions& options) {
  auto group = EngineGroup::Start(options, 1, nullptr, MakeGpu);
  INFO(group.status());
  REQUIRE(group.ok());
  return *std::move(group);
}

}  // namespace

TEST_CASE("cuda: graphs give the bits of the same shapes op by op; a strict engine runs them") {
  KDT_NEED_GPU();
  std::vector<std::string> seen;
  for (const StepMode mode : {StepMode::kAuto, StepMode::kEager}) {
    EngineOptions options = CudaOptions(true);
    options.step_mode = mode;
    options.strict = true;
    const auto group = Start(options);
    const EngineStats before = group->engine(0).stats();
    CHECK((before.graphs > 0) == (mode == StepMode::kAuto));
    std::printf("%ld graphs of %ld nodes in %.3f s, %.1f MB of the device in use\n",
                static_cast<long>(before.graphs), static_cast<long>(before.graph_nodes),
                before.capture_seconds, static_cast<double>(group->backend(0).memory()->used_bytes) / 1e6);
    seen.push_back(RunMix(*group, false));
    const EngineStats after = group->engine(0).stats();
    CHECK(after.general_draws == 0);
    // Restart makes the graphs anew; the steps themselves allocate nothing, and wait at most twice each.
    CHECK(after.device.allocations == before.device.allocations);
    CHECK(after.device.pageable_copies == before.device.pageable_copies);
    CHECK(after.device.synchronisations - before.device.synchronisations <= 2 * 24 + 2);
    seen.push_back(RunMix(*group, true));
  }
  CHECK(seen[0] == seen[2]);
  CHECK(seen[1] == seen[3]);
}

TEST_CASE("cuda: a step that neither moves rows nor drafts is two graphs and one wait") {
  KDT_NEED_GPU();
  const auto group = Start(CudaOptions(false));
  v1::StepRequest prompt;
  AddPrompt(&prompt, 1, GreedySampling(4), {3, 4, 5, 6});
  auto response = group->Step(prompt);
  REQUIRE(response.ok());
  uint32_t length = 4;
  auto root = static_cast<int32_t>(response->results(0).tokens(0));
  // A chain of what plain decoding draws is accepted whole, and lies where it has to.
  std::vector<int32_t> chain = {root};
  kernels::BackendStats before = group->engine(0).stats().device;
  for (int step = 0; step < 3; ++step) {
    v1::StepRequest request;
    AddTree(&request, 1, length++, {root}, {});
    response = group->Step(request);
    REQUIRE(response.ok());
    root = static_cast<int32_t>(response->results(0).tokens(0));
    chain.push_back(root);
  }
  const auto count = [&](int64_t graphs, int64_t waits) {
    const kernels::BackendStats now = group->engine(0).stats().device;
    CHECK(now.replays - before.replays == graphs);
    CHECK(now.synchronisations - before.synchronisations == waits);
    before = now;
  };
  count(3 * 2, 3);
  v1::StepRequest again;
  AddPrompt(&again, 2, GreedySampling(4), {3, 4, 5, 6});
  REQUIRE(group->Step(again).ok());
  before = group->engine(0).stats().device;
  v1::StepRequest verify;
  AddTree(&verify, 2, 4, chain, {0, 1, 2});
  response = group->Step(verify);
  REQUIRE(response.ok());
  REQUIRE(response->results(0).accepted_nodes_size() == 3);
  count(2, 1);
  // A wrong node before the right one: the right one's rows move.
  v1::StepRequest third;
  AddPrompt(&third, 3, GreedySampling(4), {3, 4, 5, 6});
  REQUIRE(group->Step(third).ok());
  before = group->engine(0).stats().device;
  v1::StepRequest tree;
  AddTree(&tree, 3, 4, {chain[0], (chain[1] + 1) % kVocab, chain[1]}, {0, 0});
  response = group->Step(tree);
  REQUIRE(response.ok());
  REQUIRE(response->results(0).accepted_nodes_size() == 1);
  count(3, 2);
}

TEST_CASE("cuda: one step in sixteen counts its experts, and every answer tells the balance") {
  KDT_NEED_GPU();
  const auto group = Start(CudaOptions(false));
  v1::StepRequest prompt;
  AddPrompt(&prompt, 1, GreedySampling(4), {3, 4, 5, 6});
  auto response = group->Step(prompt);
  for (uint32_t step = 2; step <= 17; ++step) {
    REQUIRE(response.ok());
    CHECK((response->expert_imbalance() >= 1) == (step > 16));
    CHECK((response->expert_rank_imbalance() == 1) == (step > 16));  // there is one rank
    v1::StepRequest request;
    AddTree(&request, 1, 2 + step, {static_cast<int32_t>(response->results(0).tokens(0))}, {});
    response = group->Step(request);
  }
  REQUIRE(response.ok());
  CHECK(response->expert_imbalance() >= 1);
}

TEST_CASE("cuda: steps of every size around the buckets, up to the largest") {
  KDT_NEED_GPU();
  EngineOptions options = CudaOptions(true);
  options.max_rows = 100;
  options.max_sequences = 9;
  options.strict = true;
  const auto group = Start(options);
  std::mt19937 random(5);
  for (const size_t rows : {1, 2, 3, 8, 9, 63, 64, 65, 95, 96, 97, 100}) {
    CAPTURE(rows);
    group->Restart();
    v1::StepRequest request;
    AddCreate(&request, 1, Sampling(static_cast<uint32_t>(rows), 2));
    v1::PrefillChunk* chunk = AddChunk(&request, 1, 0, RandomTokens(random, rows));
    chunk->set_sample(true);
    chunk->set_draft_top_k(3);
    const auto response = group->Step(request);
    INFO(response.status());
    REQUIRE(response.ok());
    CHECK(response->results(0).tokens_size() == 1);
    CHECK(response->results(0).draft().token_ids_size() == 3 * 7);
  }
  group->Restart();
  v1::StepRequest request;
  AddCreate(&request, 1, Sampling(101, 2));
  AddChunk(&request, 1, 0, RandomTokens(random, 101))->set_sample(true);
  CHECK(group->Step(request).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("cuda: a NaN fails its sequence alone, also in a graph's padding") {
  KDT_NEED_GPU();
  constexpr int32_t kPoisoned = 500;
  CheckpointCopy copy;
  CheckpointCopy::SetBf16(copy.model() + "/model-00001-of-00002.safetensors",
                          "language_model.model.embed_tokens.weight", kPoisoned * 128 + 3, 0x7fc0);
  EngineOptions options = CudaOptions(true);
  options.model_dir = copy.model();
  const auto group = Start(options);
  const auto prompt = [&](v1::StepRequest* request, uint64_t id, const std::vector<int32_t>& tokens) {
    AddCreate(request, id, GreedySampling(static_cast<uint32_t>(tokens.size())));
    v1::PrefillChunk* chunk = AddChunk(request, id, 0, tokens);
    chunk->set_sample(true);
    chunk->set_draft_top_k(3);
  };
  v1::StepRequest first;
  prompt(&first, 1, {1, 2, 3, 4, 5, 6, 7});
  auto response = group->Step(first);
  REQUIRE(response.ok());
  v1::SequenceResult alone = response->results(0);
  REQUIRE(alone.error().empty());
  // Rows of NaN are left behind in every activation, up to the largest of a step of 40 rows.
  v1::StepRequest poison;
  prompt(&poison, 2, std::vector<int32_t>(40, kPoisoned));
  prompt(&poison, 3, {1, 2, 3, 4, 5, 6, 7});
  response = group->Step(poison);
  REQUIRE(response.ok());
  CHECK(response->results(0).error().find("not finite") != std::string::npos);
  CHECK(response->results(1).error().empty());
  CHECK(response->results(1).tokens(0) == alone.tokens(0));
  // The same step as the first, its padding full of NaN.
  v1::StepRequest again;
  prompt(&again, 4, {1, 2, 3, 4, 5, 6, 7});
  response = group->Step(again);
  REQUIRE(response.ok());
  v1::SequenceResult result = response->results(0);
  result.set_sequence_id(1);
  CHECK(result.SerializeAsString() == alone.SerializeAsString());
}

TEST_CASE("cuda: a full pool is refused and nothing is lost; the context ends where it ends") {
  KDT_NEED_GPU();
  EngineOptions options = CudaOptions(false);
  options.kv_slots = 40;
  options.max_context = 24;
  const auto group = Start(options);
  const auto begin = [&] {
    group->Restart();
    v1::StepRequest request;
    AddCreate(&request, 1, GreedySampling(20));
    std::vector<int32_t> tokens(20);
    for (int i = 0; i < 20; ++i) tokens[i] = 30 + i;
    AddChunk(&request, 1, 0, tokens)->set_sample(true);
    REQUIRE(group->Step(request).ok());
  };
  const auto go_on = [&] {
    v1::StepRequest request;
    AddTree(&request, 1, 20, {7, 8, 9, 10}, {0, 1, 2});  // to the last position
    const auto response = group->Step(request);
    REQUIRE(response.ok());
    return response->results(0).SerializeAsString();
  };
  begin();
  const std::string expected = go_on();
  begin();
  v1::StepRequest full;
  AddTree(&full, 1, 20, std::vector<int32_t>(30, 5), std::vector<int32_t>(29, 0));
  CHECK(group->Step(full).status().code() == absl::StatusCode::kResourceExhausted);
  v1::StepRequest beyond;
  AddTree(&beyond, 1, 20, {7, 8, 9, 10, 11}, {0, 1, 2, 3});
  CHECK(group->Step(beyond).status().code() == absl::StatusCode::kOutOfRange);
  CHECK(go_on() == expected);
}

TEST_CASE("cuda: a sequence that is moved between steps goes on with the same bits") {
  KDT_NEED_GPU();
  constexpr uint64_t kFillers = 12;
  constexpr uint32_t kPrompt = 4, kSteps = 36;
  // Everything drawn and drafted for sequence 1. With little room it grows through the holes that its
  // neighbours leave.
  const auto run = [&](int64_t slots, uint32_t expected, uint64_t* moved) {
    EngineOptions options = CudaOptions(true);
    options.kv_slots = slots;
    options.strict = true;
    const auto group = Start(options);
    const auto create = [&](v1::StepRequest* request, uint64_t id) {
      v1::CreateSequence* sequence = request->add_ops()->mutable_create();
      sequence->set_sequence_id(id);
      sequence->set_expected_tokens(expected);
      *sequence->mutable_sampling() = Sampling(kPrompt, 2 * id + 1);
      return AddChunk(request, id, 0, {static_cast<int32_t>(id), 7, 8, 9});
    };
    v1::StepRequest start;
    v1::PrefillChunk* chunk = create(&start, 1);
    chunk->set_sample(true);
    chunk->set_draft_top_k(2);
    for (uint64_t id = 2; id < 2 + kFillers; ++id) create(&start, id);
    auto response = group->Step(start);
    std::string seen;
    for (uint32_t step = 0; step <= kSteps; ++step) {
      INFO(response.status());
      REQUIRE(response.ok());
      seen += response->results(0).SerializeAsString();
      *moved = response->pool().moved_bytes();
      if (step == kSteps) break;
      v1::StepRequest decode;
      for (uint64_t id = 2; id < 2 + kFillers; ++id) {
        if (step == (id % 2 == 0 ? 0 : kSteps / 2)) AddFree(&decode, id);
      }
      AddTree(&decode, 1, kPrompt + step, {static_cast<int32_t>(response->results(0).tokens(0))}, {})
          ->set_draft_top_k(2);
      response = group->Step(decode);
    }
    return seen;
  };
  uint64_t moved = 0;
  const std::string roomy = run(2048, 64, &moved);
  CHECK(moved == 0);
  const std::string tight = run((kFillers + 1) * kPrompt + 2, kPrompt, &moved);
  CHECK(moved > 0);
  CHECK(tight == roomy);
}

TEST_CASE("cuda: ten thousand steps take no more memory of the device") {
  KDT_NEED_GPU();
  EngineOptions options = CudaOptions(true);
  options.max_rows = 64;
  options.strict = true;
  const auto group = Start(options);
  constexpr int kSteps = 10000;
  constexpr uint32_t kLong = 700;
  const auto start = std::chrono::steady_clock::now();
  uint64_t used = 0;
  uint32_t length = 0;
  int32_t root = 0;
  uint64_t id = 0;
  for (int step = 0; step < kSteps; ++step) {
    v1::StepRequest request;
    if (length == 0) {
      if (id > 0) AddFree(&request, id);
      ++id;
      AddCreate(&request, id, Sampling(4, id));
      v1::PrefillChunk* chunk = AddChunk(&request, id, 0, {3, 4, 5, static_cast<int32_t>(id % kVocab)});
      chunk->set_sample(true);
      chunk->set_draft_top_k(4);
    } else {
      AddTree(&request, id, length, {root, 17, 18}, {0, 1})->set_draft_top_k(4);
    }
    const auto response = group->Step(request);
    INFO(response.status());
    REQUIRE(response.ok());
    const v1::SequenceResult& result = response->results(0);
    length += length == 0 ? 4 : static_cast<uint32_t>(1 + result.accepted_nodes_size());
    root = static_cast<int32_t>(result.tokens(result.tokens_size() - 1));
    if (length > kLong) length = 0;
    if (step == 100) used = group->backend(0).memory()->used_bytes;
  }
  CHECK(group->backend(0).memory()->used_bytes == used);
  std::printf(
      "%.1f us a step\n",
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kSteps);
}

}  // namespace kdt::testing
