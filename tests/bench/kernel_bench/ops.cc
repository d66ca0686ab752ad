// The shapes: one rank's share of Kimi-K2.6 at eight ranks.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "kernels/cuda/gemm/library.h"
#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"
#include "tests/bench/kernel_bench/read_floor.h"

namespace kdt::bench {

using kernels::DType;
using kernels::MakeTensor;

namespace {
constexpr int64_t kHeads = 8, kLatent = 512, kRope = 64, kWidth = 576;
constexpr int64_t kFloorRows = 64;       // with more of them, weights are not what counts
constexpr int64_t kPoolSlots = 1200000;  // 1.4 GB: several contexts, so that no run finds its keys in L2
}  // namespace

void BenchVerifyAttention(Bench& bench) {
  std::mt19937 rng(1);
  void* pool = bench.Memory(kPoolSlots * kWidth * 2);
  FillNormal(bench.launch().stream, pool, kPoolSlots * kWidth, 2, 1.0f);
  void* q = bench.Memory(256 * kHeads * kWidth * 2);
  FillNormal(bench.launch().stream, q, 256 * kHeads * kWidth, 3, 1.0f);
  void* out = bench.Memory(256 * kHeads * kLatent * 2);
  std::vector<int32_t> order(kPoolSlots);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  const int32_t* slots = bench.Copy(order);  // every piece of it is a random slot table

  struct Shape {
    int batch, context, rows;
    int named = 0;       // sequences of the launch, the rest of them without rows; 0: no rest
    int split_keys = 0;  // splits of a sequence by its own length
    int most_rows = 0;   // what the launch is told of a sequence's rows
    bool reference = false;
  };
  std::vector<Shape> shapes;
  for (const int context : {4096, 16384, 65536, 131072, 189440}) {
    for (const int rows : {1, 2, 4, 8, 16, 32, 64}) shapes.push_back({1, context, rows});
  }
  for (const int batch : {8, 32}) {
    for (const int rows : {1, 8}) {
      for (const int split_keys : {0, 256, 512, 1024}) shapes.push_back({batch, 8192, rows, 0, split_keys});
      if (rows == 1) shapes.push_back({batch, 8192, rows, 0, 0, rows});
    }
  }
  for (const int rows : {1, 8}) {
    for (const int split_keys : {256, 512, 1024}) {
      for (const int context : {8192, 131072}) shapes.push_back({1, context, rows, 0, split_keys});
    }
  }
  // What a captured step launches: it names more sequences than come.
  for (const int rows : {2, 8, 32}) shapes.push_back({1, 65536, rows, 32});
  for (const int batch : {2, 8}) shapes.push_back({batch, 8192, 1, 32});
  for (const int context : {4096, 65536}) {
    for (const int rows : {1, 8, 32}) shapes.push_back({1, context, rows, 0, 0, 0, true});
  }
  for (const Shape& s : shapes) {
    const int named = std::max(s.batch, s.named);
    std::vector<int32_t> begin(named + 1), context(named, s.context);
    for (int i = 0; i <= named; ++i) begin[i] = std::min(i, s.batch) * s.rows;
    std::vector<uint64_t> bits(static_cast<size_t>(s.batch) * s.rows * kernels::kAncestorWords, 0);
    for (int b = 0; b < s.batch; ++b) {
      for (int i = 0; i < s.rows; ++i) {
        uint64_t* mine = bits.data() + static_cast<size_t>(b * s.rows + i) * kernels::kAncestorWords;
        if (i > 0)
          std::copy_n(mine - (1 + static_cast<int>(rng() % i)) * kernels::kAncestorWords,
                      kernels::kAncestorWords, mine);
        mine[i / 64] |= uint64_t{1} << (i % 64);
      }
    }
    kernels::VerifyAttentionArgs args;
    args.q = MakeTensor(q, DType::kBF16, begin.back(), kHeads * kWidth);
    args.pool = MakeTensor(pool, DType::kBF16, kPoolSlots, kWidth);
    args.heads = kHeads, args.latent = kLatent, args.rope = kRope, args.scale = 0.1f;
    args.sequences = named;
    args.split_keys = s.split_keys;
    args.max_sequence_rows = s.most_rows;
    args.row_begin = bench.Copy(begin);
    args.context_length = bench.Copy(context);
    args.causal = bench.Copy(std::vector<uint8_t>(named, 0));
    args.table_stride = s.context + s.rows;
    args.ancestor_bits = bench.Copy(bits);
    args.out = MakeTensor(out, DType::kBF16, begin.back(), kHeads * kLatent);
    const int64_t used = s.batch * args.table_stride;
    const int64_t regions = std::max<int64_t>(1, kPoolSlots / used);
    const double time = bench.Median([&](int i) {
      args.slot_table = slots + i % regions * used;
      return s.reference ? cuda::VerifyAttentionReference(bench.launch(), args)
                         : cuda::VerifyAttention(bench.launch(), args);
    });
    const double keys = static_cast<double>(s.batch) * s.context;
    bench.Report({s.reference ? "verify_attention_reference" : "verify_attention",
                  "batch " + std::to_string(s.batch) + " context " + std::to_string(s.context) + " rows " +
                      std::to_string(s.rows) +
                      (s.named > 0 ? " of " + std::to_string(s.named) + " sequences" : "") +
                      (s.most_rows > 0 ? ", told so" : "") +
                      (s.split_keys > 0 ? " split " + std::to_string(s.split_keys) : ""),
                  time, keys * kWidth * 2, keys * s.rows * kHeads * 2 * (kWidth + kLatent), 0});
  }
}

void BenchMoe(Bench& bench) {
  constexpr int64_t kHidden = 7168, kInner = 256, kExperts = 384, kTopK = 8;
  std::mt19937 rng(2);
  // Two layers' experts, so that a run does not find the last one's in L2.
  constexpr int kLayers = 2;
  const size_t gate_up_words = kExperts * 2 * kInner * kHidden / 8,
               down_words = kExperts * kHidden * kInner / 8;
  const size_t gate_up_scales = kExperts * 2 * kInner * kHidden / 32,
               down_scales = kExperts * kHidden * kInner / 32;
  kernels::Int4Experts weights[kLayers];
  for (int i = 0; i < kLayers; ++i) {
    void* a = bench.Memory(gate_up_words * 4);
    void* b = bench.Memory(down_words * 4);
    void* c = bench.Memory(gate_up_scales * 2);
    void* d = bench.Memory(down_scales * 2);
    FillBits(bench.launch().stream, a, gate_up_words, 10 + i);
    FillBits(bench.launch().stream, b, down_words, 20 + i);
    FillNormal(bench.launch().stream, c, gate_up_scales, 30 + i, 0.02f);
    FillNormal(bench.launch().stream, d, down_scales, 40 + i, 0.02f);
    weights[i] = {kExperts,
                  0,
                  kHidden,
                  kInner,
                  static_cast<uint32_t*>(a),
                  static_cast<uint16_t*>(c),
                  static_cast<uint32_t*>(b),
                  static_cast<uint16_t*>(d)};
  }
  void* x = bench.Memory(1024 * kHidden * 2);
  FillNormal(bench.launch().stream, x, 1024 * kHidden, 5, 1.0f);
  void* out = bench.Memory(1024 * kHidden * 2);
  constexpr int kChoices = 8;  // other experts in each run
  const size_t read_bytes = size_t{2} << 30;
  void* read_pool = bench.Memory(read_bytes);
  FillBits(bench.launch().stream, read_pool, read_bytes / 4, 50);
  ReadFloors floors(bench, read_pool, read_bytes);
  for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
    std::vector<int32_t> ids;
    double distinct = 0;
    for (int choice = 0; choice < kChoices; ++choice) {
      std::set<int32_t> all;
      for (int64_t r = 0; r < rows; ++r) {
        std::set<int32_t> mine;
        while (mine.size() < kTopK) mine.insert(static_cast<int32_t>(rng() % kExperts));
        ids.insert(ids.end(), mine.begin(), mine.end());
        all.insert(mine.begin(), mine.end());
      }
      distinct += static_cast<double>(all.size()) / kChoices;
    }
    const int32_t* device_ids = bench.Copy(ids);
    const float* gates = bench.Copy(std::vector<float>(rows * kTopK, 0.125f));
    const auto run = [&](int i) {
      kernels::MoeArgs args{MakeTensor(x, DType::kBF16, rows, kHidden),
                            weights[i % kLayers],
                            device_ids + i % kChoices * rows * kTopK,
                            gates,
                            kTopK,
                            MakeTensor(out, DType::kBF16, rows, kHidden)};
      return cuda::Moe(bench.launch(), args);
    };
    const double bytes = distinct * 3.0 * kInner * kHidden * (0.5 + 2.0 / 32);
    const double flop = 2.0 * 3 * kInner * kHidden * kTopK * static_cast<double>(rows);
    const std::string name =
        "rows " + std::to_string(rows) + " experts " + std::to_string(static_cast<int>(distinct + 0.5));
    ReadTimes floor;
    if (rows <= kFloorRows) {
      const auto least = [&](ReadForm form) { return floors.Least(form, bytes, 2 * kChoices); };
      floor = {least(ReadForm::kRead), least(ReadForm::kDependent), least(ReadForm::kDependentTwice)};
    }
    bench.Report({"moe", name, bench.Chain(2 * kChoices, run), bytes, flop, 0, floor});
    bench.Report({"moe alone", name, bench.Median(run), bytes, flop, 0});
  }
  // With the choice and the shared experts' down product, and the same as ops of their own in front. Random
  // scores choose as above.
  void* scores = bench.Memory(kChoices * 64 * kExperts * 4);
  FillNormal(bench.launch().stream, scores, kChoices * 64 * kExperts * 2, 6, 1.0f);
  void* down = bench.Memory(kChoices * kHidden * kInner * 2);
  FillNormal(bench.launch().stream, down, kChoices * kHidden * kInner, 7, 0.05f);
  const float* bias = bench.Copy(std::vector<float>(kExperts, 0.0f));
  auto* const ids = static_cast<int32_t*>(bench.Memory(64 * kTopK * 4));
  auto* const chosen = static_cast<float*>(bench.Memory(64 * kTopK * 4));
  for (const int64_t rows : {1, 2, 4, 8, 16}) {
    const auto args = [&](int i) {
      kernels::MoeArgs args{
          MakeTensor(x, DType::kBF16, rows, kHidden),  weights[i % kLayers], ids, chosen, kTopK,
          MakeTensor(out, DType::kBF16, rows, kHidden)};
      args.choice = {
          MakeTensor(static_cast<float*>(scores) + i % kChoices * 64 * kExperts, DType::kF32, rows, kExperts),
          bias,
          true,
          2.827f,
          nullptr,
          ids,
          chosen};
      args.shared_inner = MakeTensor(x, DType::kBF16, rows, kInner);
      args.shared_down = MakeTensor(static_cast<char*>(down) + i % kChoices * kHidden * kInner * 2,
                                    DType::kBF16, kHidden, kInner);
      return args;
    };
    const auto together = [&](int i) { return cuda::Moe(bench.launch(), args(i)); };
    const auto apart = [&](int i) {
      kernels::MoeArgs moe = args(i);
      const cudaError_t error = cuda::ChooseExperts(bench.launch(), moe.choice, kTopK,
                                                    {moe.shared_inner, moe.shared_down, moe.out});
      if (error != cudaSuccess) return error;
      moe.choice = {}, moe.shared_down = {}, moe.accumulate = true;
      return cuda::Moe(bench.launch(), moe);
    };
    const std::string name = "rows " + std::to_string(rows);
    bench.Report({"moe and choice", name, bench.Chain(2 * kChoices, together), 0, 0, 0});
    bench.Report({"choice, then moe", name, bench.Chain(2 * kChoices, apart), 0, 0, 0});
  }
}

// Each shape alone ("gemm"), in a captured chain over other weights each ("gemm chain"), and the library in
// the same chain ("cublaslt chain").
void BenchGemm(Bench& bench) {
  struct Shape {
    const char* name;
    int64_t outs, in;
    bool f32, gated;
  };
  constexpr int64_t kRows = 1024;
  void* x = bench.Memory(kRows * 7168 * 2);
  FillNormal(bench.launch().stream, x, kRows * 7168, 6, 1.0f);
  void* y = bench.Memory(kRows * 20480 * 4);
  const size_t bytes = size_t{2} << 30;  // weights are taken from another place in each run
  void* w = bench.Memory(bytes);
  FillNormal(bench.launch().stream, w, bytes / 2, 7, 0.05f);
  ReadFloors floors(bench, w, bytes);
  for (const Shape s : {Shape{"qkv_a", 2112, 7168}, Shape{"q_b", 1536, 1536}, Shape{"o", 7168, 1024},
                        Shape{"shared gate_up", 512, 7168}, Shape{"shared down", 7168, 256},
                        Shape{"shared down, gated", 7168, 256, false, true}, Shape{"router", 384, 7168, true},
                        Shape{"dense gate_up", 4608, 7168}, Shape{"dense down", 7168, 2304},
                        Shape{"lm_head", 20480, 7168, true}}) {
    const int64_t size = s.outs * s.in * 2;
    const int chain = size > 100000000 ? 6 : 16;
    const auto least = [&](ReadForm form) { return floors.Least(form, static_cast<double>(size), chain); };
    const ReadTimes floor{least(ReadForm::kRead), least(ReadForm::kDependent), {}};
    for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
      const int64_t places = static_cast<int64_t>(bytes) / size;
      int64_t place = 0;
      const auto args = [&] {
        kernels::GemmArgs args{
            MakeTensor(x, DType::kBF16, rows, s.gated ? 2 * s.in : s.in),
            MakeTensor(static_cast<char*>(w) + place++ % places * size, DType::kBF16, s.outs, s.in),
            MakeTensor(y, s.f32 ? DType::kF32 : DType::kBF16, rows, s.outs)};
        args.gated = s.gated;
        return args;
      };
      const auto run = [&](int) { return cuda::Gemm(bench.launch(), args()); };
      const std::string shape = std::string(s.name) + " " + std::to_string(s.outs) + "x" +
                                std::to_string(s.in) + " rows " + std::to_string(rows);
      const double flop = 2.0 * static_cast<double>(rows * s.outs * s.in);
      bench.Report({"gemm", shape, bench.Median(run), static_cast<double>(size), flop, 0});
      bench.Report({"gemm chain", shape, bench.Chain(chain, run), static_cast<double>(size), flop, 0,
                    rows <= kFloorRows ? floor : ReadTimes{}});
      if (!cuda::HaveLibrary() || s.gated) continue;
      const auto library = [&](int) { return cuda::LibraryGemm(bench.launch(), args()); };
      bench.Report(
          {"cublaslt chain", shape, bench.Chain(chain, library), static_cast<double>(size), flop, 0});
    }
  }
}

}  // namespace kdt::bench
