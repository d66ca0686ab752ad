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
  // takes, K2.6, widths of whole steps in each of the forms for few and many rows, blocks with two and three
  // tiles of down (on up to 223 multiprocessors; the others have one).
  for (const Shape s :
       {Shape{1, 16, 4, 256, 128, 0},   Shape{9, 6, 4, 512, 256, 0},     Shape{40, 4, 2, 96, 32, 2},
        Shape{300, 3, 2, 256, 128, 0},  Shape{1, 3, 4, 256, 1024, 5},    Shape{21, 5, 4, 256, 1056, 5},
        Shape{1100, 12, 8, 128, 64, 0}, Shape{360, 3, 8, 3584, 256, 20}, Shape{2, 8, 8, 7168, 256, 0},
        Shape{4, 11, 4, 3584, 256, 0},  Shape{12, 11, 4, 3584, 256, 3},  Shape{50, 7, 3, 3584, 512, 0},
        Shape{2, 8, 8, 3584, 1536, 0},  Shape{7, 20, 8, 3584, 256, 9},   Shape{8, 30, 8, 3584, 256, 0},
        Shape{3, 11, 8, 3584, 256, 0},  Shape{8, 24, 8, 3584, 256, 2},   Shape{5, 60, 8, 3584, 256, 0},
        Shape{8, 24, 8, 7168, 256, 0},  Shape{5, 11, 8, 7168, 512, 2},   Shape{4, 9, 8, 10752, 256, 0},
        Shape{6, 30, 8, 7168, 256, 0}}) {
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

// Scores and shared experts of 64 rows, of which Moe gets some at a time.
struct Routed {
  static constexpr int64_t kRows = 64, kExperts = 384, kTopK = 8;

  Routed(std::mt19937& rng, const Experts& e, int64_t inner, std::vector<float> raw, std::vector<float> b)
      : experts(e),
        x(rng, kRows, e.host.hidden),
        shared(rng, kRows, inner),
        down(rng, e.host.hidden, inner, 0.06f),
        scores(std::move(raw)),
        bias(std::move(b)),
        device_scores(scores),
        device_bias(bias) {}

  struct Result {
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<uint16_t> out;
    std::vector<float> out32;
    bool operator==(const Result& other) const {
      return ids == other.ids && out == other.out &&
             std::memcmp(weights.data(), other.weights.data(), weights.size() * 4) == 0 &&
             std::memcmp(out32.data(), other.out32.data(), out32.size() * 4) == 0;
    }
  };
  MoeArgs Args(int64_t first, int64_t rows, bool with_shared) {
    MoeArgs args{x.gpu().Rows(first, rows), experts.device, nullptr, nullptr, kTopK, {}};
    args.choice = {MakeTensor(device_scores.data() + first * kExperts, DType::kF32, rows, kExperts),
                   device_bias.data(), true, 2.827f};
    if (with_shared) args.shared_inner = shared.gpu().Rows(first, rows), args.shared_down = down.gpu();
    return args;
  }
  Result Run(int64_t first, int64_t rows, int32_t real, bool with_shared = true) {
    const int64_t hidden = experts.host.hidden;
    OnGpu<int32_t> ids(rows * kTopK, 0x55), row_count(std::vector<int32_t>{real});
    OnGpu<float> weights(rows * kTopK, 0x55), out32(rows * hidden, 0x55);
    OnGpu<uint16_t> out(rows * hidden, 0x55);
    MoeArgs args = Args(first, rows, with_shared);
    args.choice.expert_ids = ids.data(), args.choice.weights = weights.data();
    args.choice.row_count = real < rows ? row_count.data() : nullptr;
    args.out = MakeTensor(out.data(), DType::kBF16, rows, hidden);
    REQUIRE(Gpu()->Moe(args).ok());
    args.out = MakeTensor(out32.data(), DType::kF32, rows, hidden);
    REQUIRE(Gpu()->Moe(args).ok());
    return {ids.Get(), weights.Get(), out.Get(), out32.Get()};
  }
  // Rows [first, first + rows) of a result of all.
  static Result Part(const Result& all, int64_t first, int64_t rows) {
    const auto part = [&](const auto& v) {
      const auto each = static_cast<int64_t>(v.size()) / kRows;
      return std::decay_t<decltype(v)>(v.begin() + first * each, v.begin() + (first + rows) * each);
    };
    return {part(all.ids), part(all.weights), part(all.out), part(all.out32)};
  }

  const Experts& experts;
  Twin x, shared, down;
  std::vector<float> scores, bias;
  OnGpu<float> device_scores, device_bias;
};

TEST_CASE(
    "cuda: experts that choose for themselves, with the shared experts, against the CPU and in any batch") {
  KDT_NEED_GPU();
  std::mt19937 rng(10);
  constexpr int64_t kRows = Routed::kRows, kExperts = Routed::kExperts, kTopK = Routed::kTopK;
  const Experts narrow(rng, 12, 100, 3584, 256), wide(rng, 12, 100, 7168, 256);
  for (const std::string kind : {"wide", "plain", "few values", "all equal", "best together"}) {
    const Experts& e = kind == "wide" ? wide : narrow;  // blocks with two tiles of down, or one
    const int64_t hidden = e.host.hidden;
    std::vector<float> scores = Normal(rng, kRows * kExperts), bias = Normal(rng, kExperts, 0.01f);
    for (int64_t i = 96; i < 116; ++i) bias[i] += 0.3f;  // the ones held here, and some beside them
    if (kind == "few values") {
      for (float& s : scores) s = std::floor(s);
      std::fill(bias.begin(), bias.end(), 0.0f);
    }
    if (kind == "all equal") {
      std::fill(scores.begin(), scores.end(), 0.25f);
      for (int64_t i = 0; i < kExperts; ++i) bias[i] = i < 100 ? -0.5f : 0.125f;
    }
    if (kind == "best together") {  // under one warp, each row's more and more of them
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i < r; ++i) scores[r * kExperts + 95 + i] += 3.0f;
      }
      for (int64_t i = 0; i < kExperts; ++i) scores[5 * kExperts + i] = std::nanf("");
      scores[3 * kExperts + 101] = std::nanf("");
    }
    for (const int64_t inner : {256, 128}) {
      Routed routed(rng, e, inner, scores, bias);
      INFO(kind << ", shared " << inner);
      std::vector<int32_t> ids(kRows * kTopK);
      std::vector<float> weights(kRows * kTopK);
      Twin out(rng, kRows, hidden);
      MoeArgs args{routed.x.cpu(), e.host, nullptr, nullptr, kTopK, out.cpu()};
      args.choice = {MakeTensor(routed.scores.data(), DType::kF32, kRows, kExperts),
                     routed.bias.data(),
                     true,
                     2.827f,
                     nullptr,
                     ids.data(),
                     weights.data()};
      args.shared_inner = routed.shared.cpu(), args.shared_down = routed.down.cpu_bf16();
      REQUIRE(Cpu().Moe(args).ok());
      const Routed::Result all = routed.Run(0, kRows, kRows), none = routed.Run(0, kRows, 0);
      CHECK(all.ids == ids);
      CHECK(RelativeError(ToFloat(all.out), out.host) < 8e-3);
      CHECK(RelativeError(all.out32, out.host) < 8e-3);
      double worst = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        if (!std::isnan(weights[i]) || !std::isnan(all.weights[i]))
          worst = std::max<double>(worst, std::abs(all.weights[i] - weights[i]));
      }
      CHECK(worst < 1e-5);
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}) {
        for (const int64_t first : {int64_t{0}, int64_t{3}, kRows - rows}) {
          INFO(rows << " rows from " << first);
          CHECK(routed.Run(first, rows, rows) == Routed::Part(all, first, rows));
        }
        // Padding rows: no experts, and of `out` the shared experts alone.
        for (const int64_t real : {int64_t{0}, rows / 2, rows - 1}) {
          const Routed::Result padded = routed.Run(8, rows, static_cast<int32_t>(real));
          const auto matches = [&](const Routed::Result& of, int64_t begin, int64_t end) {
            for (int64_t i = begin * hidden; i < end * hidden; ++i) {
              if (padded.out[i] != of.out[8 * hidden + i] || padded.out32[i] != of.out32[8 * hidden + i])
                return false;
            }
            for (int64_t i = begin * kTopK; i < end * kTopK; ++i) {
              if (padded.ids[i] != of.ids[8 * kTopK + i] || padded.weights[i] != of.weights[8 * kTopK + i])
                return false;
            }
            return true;
          };
          INFO(real << " real of " << rows << " rows");
          CHECK(matches(all, 0, real));
          CHECK(matches(none, real, rows));
        }
      }
      CHECK(none.ids == std::vector<int32_t>(kRows * kTopK, -1));
      // Without shared experts: overwriting.
      const Routed::Result bare = routed.Run(0, kRows, kRows, false);
      for (const int64_t rows : {1, 4, 8})
        CHECK(routed.Run(16, rows, rows, false) == Routed::Part(bare, 16, rows));
    }
  }
}

}  // namespace
}  // namespace kdt::kernels::test
