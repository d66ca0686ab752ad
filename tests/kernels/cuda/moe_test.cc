// Routed experts against the CPU twin, which has its own tests.
#include "tests/kernels/cuda/util.h"

namespace kdt::kernels::test {
namespace {

struct Experts {
  Experts(std::mt19937& rng, int64_t count, int64_t first, int64_t hidden, int64_t inner)
      : gate_up(count * 2 * inner * hidden / 8),
        down(count * hidden * inner / 8),
        gate_up_scale(ToBf16(Normal(rng, count * 2 * inner * hidden / 32, 0.02f))),
        down_scale(ToBf16(Normal(rng, count * hidden * inner / 32, 0.02f))) {
    for (uint32_t& v : gate_up) v = rng();
    for (uint32_t& v : down) v = rng();
    host = {
        count, first, hidden, inner, gate_up.data(), gate_up_scale.data(), down.data(), down_scale.data()};
    g = std::make_unique<OnGpu<uint32_t>>(gate_up), d = std::make_unique<OnGpu<uint32_t>>(down);
    gs = std::make_unique<OnGpu<uint16_t>>(gate_up_scale), ds = std::make_unique<OnGpu<uint16_t>>(down_scale);
    device = {count, first, hidden, inner, g->data(), gs->data(), d->data(), ds->data()};
    REQUIRE(Gpu()->PrepareExperts(device).ok());
  }

  std::vector<uint32_t> gate_up, down;
  std::vector<uint16_t> gate_up_scale, down_scale;
  std::unique_ptr<OnGpu<uint32_t>> g, d;
  std::unique_ptr<OnGpu<uint16_t>> gs, ds;
  Int4Experts host, device;
};

std::vector<int32_t> RandomIds(std::mt19937& rng, int64_t rows, int64_t top_k, int64_t all) {
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<int32_t> order(all);
    for (int64_t i = 0; i < all; ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    order.resize(top_k);
    std::sort(order.begin(), order.end());
    ids.insert(ids.end(), order.begin(), order.end());
  }
  return ids;
}

// Overwriting, accumulating, and each of the first rows alone: the same bits as among the others.
void CheckMoe(std::mt19937& rng, const Experts& e, const std::vector<int32_t>& ids, int64_t top_k) {
  const int64_t rows = static_cast<int64_t>(ids.size()) / top_k, hidden = e.host.hidden;
  const std::vector<float> weights = Normal(rng, ids.size());
  Twin x(rng, rows, hidden), out(rng, rows, hidden);
  const OnGpu<int32_t> device_ids(ids);
  const OnGpu<float> device_weights(weights);
  for (const bool accumulate : {false, true}) {
    REQUIRE(Cpu().Moe({x.cpu(), e.host, ids.data(), weights.data(), top_k, out.cpu(), accumulate}).ok());
    REQUIRE(
        Gpu()
            ->Moe({x.gpu(), e.device, device_ids.data(), device_weights.data(), top_k, out.gpu(), accumulate})
            .ok());
    CHECK(RelativeError(out.FromGpu(), out.host) < 8e-3);
  }
  OnGpu<float> all(rows * hidden, 0xff), alone(rows * hidden, 0xff);
  const Tensor together = MakeTensor(all.data(), DType::kF32, rows, hidden);
  const Tensor apart = MakeTensor(alone.data(), DType::kF32, rows, hidden);
  REQUIRE(Gpu()->Moe({x.gpu(), e.device, device_ids.data(), device_weights.data(), top_k, together}).ok());
  const int64_t some = std::min<int64_t>(rows, 12);
  for (int64_t r = 0; r < some; ++r) {
    REQUIRE(Gpu()
                ->Moe({x.gpu().Rows(r, 1), e.device, device_ids.data() + r * top_k,
                       device_weights.data() + r * top_k, top_k, apart.Rows(r, 1)})
                .ok());
  }
  CHECK(std::memcmp(all.Get().data(), alone.Get().data(), some * hidden * sizeof(float)) == 0);
}

TEST_CASE("cuda: routed experts against the CPU") {
  KDT_NEED_GPU();
  std::mt19937 rng(8);
  struct Shape {
    int64_t rows, experts, top_k, hidden, inner, first;
  };
  // Few rows, many rows, ragged steps, experts held in the middle, wide experts, more rows than a launch
  // takes, K2.6, widths of whole steps in each of the forms for few and many rows.
  for (const Shape s :
       {Shape{1, 16, 4, 256, 128, 0}, Shape{9, 6, 4, 512, 256, 0}, Shape{40, 4, 2, 96, 32, 2},
        Shape{300, 3, 2, 256, 128, 0}, Shape{1, 3, 4, 256, 1024, 5}, Shape{21, 5, 4, 256, 1056, 5},
        Shape{1100, 12, 8, 128, 64, 0}, Shape{360, 3, 8, 3584, 256, 20}, Shape{2, 8, 8, 7168, 256, 0},
        Shape{4, 11, 4, 3584, 256, 0}, Shape{12, 11, 4, 3584, 256, 3}, Shape{50, 7, 3, 3584, 512, 0},
        Shape{2, 8, 8, 3584, 1536, 0}, Shape{3, 11, 8, 3584, 256, 0}, Shape{8, 24, 8, 3584, 256, 2}}) {
    const Experts e(rng, s.experts, s.first, s.hidden, s.inner);
    CheckMoe(rng, e, RandomIds(rng, s.rows, s.top_k, s.experts + 2 * s.first), s.top_k);
  }
}

TEST_CASE("cuda: experts of padding rows, of other ranks, and one expert for all rows") {
  KDT_NEED_GPU();
  std::mt19937 rng(9);
  // Ragged steps, wide experts, and widths of whole steps.
  const Experts ragged(rng, 8, 4, 256, 128), wide(rng, 4, 4, 256, 1024), whole(rng, 8, 4, 3584, 256);
  for (const int64_t rows : {1, 2, 4, 8, 12, 33}) {
    const std::vector<int32_t> random = RandomIds(rng, rows, 4, 16);
    std::vector<int32_t> padded = random, same = random;
    for (int64_t r = 0; r < rows; r += 2) std::fill_n(padded.begin() + r * 4, 4, -1);
    for (size_t i = 0; i < same.size(); ++i) same[i] = static_cast<int32_t>(i % 4) + 4;
    for (const Experts* e : {&ragged, &whole}) {
      CheckMoe(rng, *e, random, 4);
      CheckMoe(rng, *e, padded, 4);
      CheckMoe(rng, *e, std::vector<int32_t>(rows * 4, -1), 4);
      CheckMoe(rng, *e, same, 4);
    }
    CheckMoe(rng, wide, same, 4);
  }
}

}  // namespace
}  // namespace kdt::kernels::test
