#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("kv_write puts rows into their slots and skips padding", "[kv_write]") {
  std::mt19937 rng(12);
  Matrix x(4, 20, 3), pool(6, 20);
  x.Fill(rng);
  x.at(0, 0) = NAN;
  x.at(3, 1) = 1.00390625f;  // between two bf16 values: ties to even
  std::fill(pool.values.begin(), pool.values.end(), 7.0f);
  std::vector<uint16_t> narrow(6 * 20, FloatToBf16(7.0f));
  const int32_t slots[] = {4, -1, 0, 5};
  const auto backend = MakeBackend(2);
  REQUIRE(backend->KvWrite({x.tensor(), slots, pool.tensor()}).ok());
  REQUIRE(backend->KvWrite({x.tensor(), slots, MakeTensor(narrow.data(), DType::kBF16, 6, 20)}).ok());
  const int from[] = {2, -1, -1, -1, 0, 3};  // row written to each slot
  for (int64_t slot = 0; slot < 6; ++slot) {
    for (int64_t c = 0; c < 20; ++c) {
      const float expected = from[slot] < 0 ? 7.0f : x.at(from[slot], c);
      if (std::isnan(expected)) {
        CHECK(std::isnan(pool.at(slot, c)));
        CHECK(std::isnan(Bf16ToFloat(narrow[slot * 20 + c])));
        continue;
      }
      CHECK(pool.at(slot, c) == expected);
      CHECK(std::abs(Bf16ToFloat(narrow[slot * 20 + c]) - expected) <= std::abs(expected) / 256);
    }
  }
  CHECK(Bf16ToFloat(narrow[5 * 20 + 1]) == 1.0f);
}

TEST_CASE("kv_move compacts forward in place, in every layer", "[kv_move]") {
  constexpr int64_t kLayers = 3, kSlots = 12, kWidth = 5, kLayerStride = kSlots * kWidth + 9;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<float> wide(kLayers * kLayerStride);
    std::vector<uint16_t> narrow(kLayers * kLayerStride);
    for (size_t i = 0; i < wide.size(); ++i) {
      wide[i] = static_cast<float>(i);
      narrow[i] = static_cast<uint16_t>(i);
    }
    // Accepted nodes 0, 2, 3, 7 of a tree at slot 4: overlapping moves, content checked for each token.
    const int32_t from[] = {4, 6, 7, 11}, to[] = {4, 5, 6, 7};
    void* data = dtype == DType::kF32 ? static_cast<void*>(wide.data()) : narrow.data();
    REQUIRE(MakeBackend(2)
                ->KvMove({from, to, 4, MakeTensor(data, dtype, kSlots, kWidth), kLayers, kLayerStride})
                .ok());
    const int64_t source[kSlots] = {0, 1, 2, 3, 4, 6, 7, 11, 8, 9, 10, 11};
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        for (int64_t c = 0; c < kWidth; ++c) {
          const int64_t at = layer * kLayerStride + slot * kWidth + c;
          const int64_t expected = layer * kLayerStride + source[slot] * kWidth + c;
          CHECK((dtype == DType::kF32 ? static_cast<int64_t>(wide[at]) : narrow[at]) == expected);
        }
      }
    }
  }
}

TEST_CASE("table_write writes what has an index", "[table_write]") {
  std::vector<int32_t> table(10, 7);
  const int64_t index[] = {9, -1, 0, -1};
  const int32_t value[] = {1, 2, 3, 4};
  REQUIRE(MakeBackend()->TableWrite({index, value, 4, table.data()}).ok());
  CHECK(table == std::vector<int32_t>{3, 7, 7, 7, 7, 7, 7, 7, 7, 1});
}

TEST_CASE("memory is zeroed, aligned and copied", "[backend]") {
  const auto backend = MakeBackend();
  CHECK(backend->activation_dtype() == DType::kF32);
  CHECK(backend->name() == "cpu");
  CHECK_FALSE(backend->device_name().empty());
  absl::StatusOr<Buffer> buffer = Buffer::Make(*backend, 1000);
  REQUIRE(buffer.ok());
  CHECK(reinterpret_cast<uintptr_t>(buffer->data()) % 256 == 0);
  for (int i = 0; i < 1000; ++i) REQUIRE(buffer->as<uint8_t>()[i] == 0);
  uint8_t bytes[3] = {1, 2, 3}, back[3] = {};
  CHECK(backend->Upload(buffer->data(), bytes, 3).ok());
  CHECK(backend->Download(back, buffer->data(), 3).ok());
  CHECK(back[2] == 3);
  CHECK(backend->Allocate(SIZE_MAX).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK(MakeCpuBackend(0).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(MakeCpuBackend(100000).status().code() == absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kdt::kernels::test
