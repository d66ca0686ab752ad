// A MoE layer of the full-size model on one of eight ranks: a slice of every expert (tensor) against whole
// experts (expert). With whole experts the group waits for the rank whose experts were chosen most, so that
// is the rank that is timed.
#include <algorithm>
#include <random>
#include <set>

#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"

namespace kdt::bench {
namespace {

using kernels::DType;
using kernels::MakeTensor;

constexpr int64_t kHidden = 7168, kInner = 2048, kExperts = 384, kTopK = 8, kRanks = 8;
constexpr int kChoices = 16;  // other experts in each run

// Experts of `rows` rows, evenly drawn.
std::vector<int32_t> Draw(int64_t rows, std::mt19937& random) {
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < rows; ++r) {
    std::set<int32_t> mine;
    while (mine.size() < kTopK) mine.insert(static_cast<int32_t>(random() % kExperts));
    ids.insert(ids.end(), mine.begin(), mine.end());
  }
  return ids;
}

struct Busiest {
  int64_t rank = 0;
  int64_t experts = 0;  // distinct ones on it
  int64_t all = 0;      // on all ranks
};

Busiest FindBusiest(const std::vector<int32_t>& ids) {
  const std::set<int32_t> distinct(ids.begin(), ids.end());
  int64_t counts[kRanks] = {};
  for (const int32_t id : distinct) ++counts[id / (kExperts / kRanks)];
  const int64_t* most = std::max_element(counts, counts + kRanks);
  return {most - counts, *most, static_cast<int64_t>(distinct.size())};
}

}  // namespace

void BenchMoeSharding(Bench& bench) {
  const cudaStream_t stream = bench.launch().stream;
  // Both shapes read the same memory: 384 slices of 256 columns are as large as 48 experts of 2048.
  const size_t gate_up_words = kExperts / kRanks * 2 * kInner * kHidden / 8, down_words = gate_up_words / 2;
  void* gate_up = bench.Memory(gate_up_words * 4);
  void* down = bench.Memory(down_words * 4);
  void* gate_up_scale = bench.Memory(gate_up_words / 4 * 2);
  void* down_scale = bench.Memory(down_words / 4 * 2);
  FillBits(stream, gate_up, gate_up_words, 1);
  FillBits(stream, down, down_words, 2);
  FillNormal(stream, gate_up_scale, gate_up_words / 4, 3, 0.02f);
  FillNormal(stream, down_scale, down_words / 4, 4, 0.02f);
  kernels::Int4Experts weights;
  weights.hidden = kHidden;
  weights.gate_up = static_cast<uint32_t*>(gate_up);
  weights.gate_up_scale = static_cast<uint16_t*>(gate_up_scale);
  weights.down = static_cast<uint32_t*>(down);
  weights.down_scale = static_cast<uint16_t*>(down_scale);
  void* x = bench.Memory(64 * kHidden * 2);
  FillNormal(stream, x, 64 * kHidden, 5, 1.0f);
  void* out = bench.Memory(64 * kHidden * 2);
  std::mt19937 random(6);

  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64}) {
    constexpr int kDraws = 2000;  // for the figures on paper
    double most = 0, all = 0;
    for (int draw = 0; draw < kDraws; ++draw) {
      const Busiest busiest = FindBusiest(Draw(rows, random));
      most += static_cast<double>(busiest.experts) / kDraws;
      all += static_cast<double>(busiest.all) / kDraws;
    }
    std::vector<int32_t> ids;
    std::vector<int64_t> rank;
    for (int choice = 0; choice < kChoices; ++choice) {
      // A draw whose busiest rank is an ordinary one.
      std::vector<int32_t> drawn;
      do {
        drawn = Draw(rows, random);
      } while (std::abs(static_cast<double>(FindBusiest(drawn).experts) - most) > 1);
      rank.push_back(FindBusiest(drawn).rank);
      ids.insert(ids.end(), drawn.begin(), drawn.end());
    }
    const int32_t* device_ids = bench.Copy(ids);
    const float* gates = bench.Copy(std::vector<float>(rows * kTopK, 0.125f));
    const auto time = [&](bool whole) {
      return bench.Median([&](int i) {
        kernels::Int4Experts held = weights;
        held.experts = whole ? kExperts / kRanks : kExperts;
        held.first_expert = whole ? rank[i % kChoices] * held.experts : 0;
        held.inner = whole ? kInner : kInner / kRanks;
        kernels::MoeArgs args{MakeTensor(x, DType::kBF16, rows, kHidden),
                              held,
                              device_ids + i % kChoices * rows * kTopK,
                              gates,
                              kTopK,
                              MakeTensor(out, DType::kBF16, rows, kHidden)};
        return cuda::Moe(bench.launch(), args);
      });
    };
    const double expert_bytes = 3.0 * kInner * kHidden * (0.5 + 2.0 / 32);
    const double row_flop = 2.0 * 3 * kInner * kHidden * kTopK / kRanks;
    const std::string name = "rows " + std::to_string(rows);
    bench.Report({"moe tensor", name + ", mean " + std::to_string(all / kRanks) + " experts", time(false),
                  all / kRanks * expert_bytes, row_flop * static_cast<double>(rows), 0});
    bench.Report({"moe expert", name + ", busiest " + std::to_string(most) + " experts", time(true),
                  most * expert_bytes, row_flop * static_cast<double>(rows) * most * kRanks / all, 0});
  }
}

}  // namespace kdt::bench
