// The ranks' slices, put together again, are the checkpoint's tensors.
#include "worker/model/weight_loader.h"

#include <algorithm>
#include <cstring>

#include "common/int4.h"
#include "tests/support/catch.h"

namespace kdt {
namespace {

using Mode = WeightLoader::Mode;
using Split = WeightLoader::Split;

const std::string kLayer = "language_model.model.layers.1.";

Checkpoint OpenGolden() {
  auto checkpoint = Checkpoint::Open(std::string(KDT_GOLDENS_DIR) + "/model");
  REQUIRE(checkpoint.ok());
  return *std::move(checkpoint);
}

}  // namespace

TEST_CASE("row and column slices of all ranks make the whole") {
  const Checkpoint checkpoint = OpenGolden();
  const auto weights = *OpenCheckpointSource(checkpoint.folder());
  const auto backend = *kernels::MakeCpuBackend(1);
  const std::string name = kLayer + "self_attn.o_proj.weight";  // [128, 256]
  const auto whole = checkpoint.Find(name)->As<uint16_t>();
  std::vector<uint16_t> source(whole.begin(), whole.end());
  const int ranks = GENERATE(1, 2, 8);
  for (const Split split : {Split::kNone, Split::kRows, Split::kColumns}) {
    for (int rank = 0; rank < ranks; ++rank) {
      WeightLoader loader(Mode::kCopy, backend.get(), {rank, ranks}, nullptr, 0);
      loader.SetSource(weights.get());
      const auto slice = loader.Matrix({name, 128, 256, split});
      REQUIRE(slice.ok());
      REQUIRE(loader.Finish().ok());
      const int64_t row0 = split == Split::kRows ? rank * 128 / ranks : 0;
      const int64_t column0 = split == Split::kColumns ? rank * 256 / ranks : 0;
      CHECK(slice->rows == (split == Split::kRows ? 128 / ranks : 128));
      CHECK(slice->cols == (split == Split::kColumns ? 256 / ranks : 256));
      bool equal = true;
      for (int64_t r = 0; r < slice->rows; ++r) {
        for (int64_t c = 0; c < slice->cols; ++c) {
          equal &= slice->bf16()[r * slice->stride + c] == source[(row0 + r) * 256 + column0 + c];
        }
      }
      CHECK(equal);
      CHECK(loader.bytes() == static_cast<uint64_t>(slice->rows * slice->cols * 2));
    }
  }
}

TEST_CASE("an expert's slices hold the same INT4 values and scales") {
  const Checkpoint checkpoint = OpenGolden();
  const auto weights = *OpenCheckpointSource(checkpoint.folder());
  const auto backend = *kernels::MakeCpuBackend(1);
  constexpr int64_t kExperts = 8, kHidden = 128, kInner = 256, kExpert = 5;
  const int ranks = GENERATE(1, 8);
  const int64_t local = kInner / ranks;
  const std::string prefix = kLayer + "mlp.experts.";
  const auto reference = [&](const std::string& part, int64_t in, int64_t row, int64_t column) {
    const std::string name = prefix + std::to_string(kExpert) + "." + part;
    return Int4Weight(checkpoint.Find(name + ".weight_packed")->As<int32_t>().data(),
                      checkpoint.Find(name + ".weight_scale")->As<uint16_t>().data(), in, kernels::kInt4Group,
                      row, column);
  };
  for (int rank = 0; rank < ranks; rank += 3) {
    WeightLoader loader(Mode::kCopy, backend.get(), {rank, ranks}, nullptr, 0);
    loader.SetSource(weights.get());
    const auto experts = loader.Experts(prefix, kExperts, kHidden, kInner, MoeSharding::kTensor);
    REQUIRE(experts.ok());
    REQUIRE(loader.Finish().ok());
    REQUIRE(experts->inner == local);
    const auto* gate_up =
        reinterpret_cast<const int32_t*>(experts->gate_up) + kExpert * 2 * local * (kHidden / 8);
    const uint16_t* gate_up_scale = experts->gate_up_scale + kExpert * 2 * local * (kHidden / 32);
    const auto* down = reinterpret_cast<const int32_t*>(experts->down) + kExpert * kHidden * (local / 8);
    const uint16_t* down_scale = experts->down_scale + kExpert * kHidden * (local / 32);
    bool equal = true;
    for (int64_t row = 0; row < local; row += 5) {
      for (int64_t column = 0; column < kHidden; column += 3) {
        const int64_t at = rank * local + row;
        equal &= Int4Weight(gate_up, gate_up_scale, kHidden, 32, row, column) ==
                 reference("gate_proj", kHidden, at, column);
        equal &= Int4Weight(gate_up, gate_up_scale, kHidden, 32, local + row, column) ==
                 reference("up_proj", kHidden, at, column);
        equal &= Int4Weight(down, down_scale, local, 32, column, row) ==
                 reference("down_proj", kInner, column, at);
      }
    }
    CHECK(equal);
  }
}

TEST_CASE("a planning loader counts what a copying one copies, and names what is wrong") {
  const Checkpoint checkpoint = OpenGolden();
  const auto weights = *OpenCheckpointSource(checkpoint.folder());
  const auto backend = *kernels::MakeCpuBackend(1);
  WeightLoader plan(Mode::kPlan, backend.get(), {1, 2}, nullptr, 0);
  plan.SetSource(weights.get());
  const auto experts = plan.Experts(kLayer + "mlp.experts.", 8, 128, 256, MoeSharding::kTensor);
  REQUIRE(experts.ok());
  CHECK(experts->gate_up == nullptr);
  WeightLoader copy(Mode::kCopy, backend.get(), {1, 2}, nullptr, plan.bytes());
  copy.SetSource(weights.get());
  REQUIRE(copy.Experts(kLayer + "mlp.experts.", 8, 128, 256, MoeSharding::kTensor).ok());
  CHECK(copy.bytes() == plan.bytes());

  const auto named = [](const absl::Status& status, const std::string& text) {
    return !status.ok() && std::string(status.message()).find(text) != std::string::npos;
  };
  CHECK(named(plan.Vector("no.such.tensor", 4).status(), "no.such.tensor"));
  CHECK(named(plan.Vector(kLayer + "input_layernorm.weight", 127).status(), "input_layernorm"));
  CHECK(
      named(plan.Experts(kLayer + "mlp.experts.", 9, 128, 256, MoeSharding::kTensor).status(), "experts.8."));
  CHECK(named(plan.Experts(kLayer + "mlp.experts.", 8, 128, 512, MoeSharding::kTensor).status(),
              "weight_shape"));
}

}  // namespace kdt
